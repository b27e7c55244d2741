"""Torch operators with gradients: one for torch.compile, and the same functions at less cost where nobody compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Operator:
    """A function of tensors, numbers and None, with a backward function, both opaque to torch.

    Traced by torch.compile it is a custom operator, ``name`` with a backward ``name_backward``; else an
    autograd.Function of the same functions, which takes about a third of the host's time.

    forward, backward: on tensors, with a schema that torch.library.custom_op can infer; both return tuples. fake,
    fake_backward: the same on tensors without data, without effect. save: called as save(ctx, inputs, output), before
    any backward. gradient: called as gradient(backward, ctx, *gradients of the outputs), returns those of the inputs,
    and calls ``backward`` once.
    """

    def __init__(
        self, name: str, forward: Callable[..., Any], fake: Callable[..., Any], backward: Callable[..., Any],
        fake_backward: Callable[..., Any], save: Callable[..., None], gradient: Callable[..., Any],
    ) -> None:  # fmt: skip
        traced_backward = torch.library.custom_op(f"{name}_backward", backward, mutates_args=())
        traced_backward.register_fake(fake_backward)
        self._forward, self._traced = forward, torch.library.custom_op(name, forward, mutates_args=())
        self._traced.register_fake(fake)
        self._traced.register_autograd(lambda ctx, *grads: gradient(traced_backward, ctx, *grads), setup_context=save)

        class Eager(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *inputs):
                output = forward(*inputs)
                save(ctx, inputs, output)
                return output

            @staticmethod
            def backward(ctx, *grads):
                if torch.is_grad_enabled():
                    raise RuntimeError(f"{name} has no second derivative (create_graph=True)")
                return gradient(backward, ctx, *grads)

        self._eager = Eager

    def __call__(self, *inputs):
        """All inputs by position."""
        if torch.compiler.is_compiling():
            return self._traced(*inputs)
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
            return self._eager.apply(*inputs)
        return self._forward(*inputs)
