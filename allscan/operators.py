"""Torch operators with gradients: one for torch.compile, and the same functions at less cost where nobody compiles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import unwrap_if_dead


def wants_gradient(inputs) -> bool:
    """Whether a call with these inputs is to have a backward pass."""
    if torch.is_grad_enabled():
        for x in inputs:
            if x is not None and isinstance(x, Tensor) and x.requires_grad:
                return True
    return False


def inference_tensors(inputs: Iterable[Any]) -> bool:
    """Whether torch cannot save for backward what a call with a backward pass is given and makes: tensors made in
    torch.inference_mode, as all are inside of it."""
    if torch.is_inference_mode_enabled():
        return True
    for x in inputs:
        if isinstance(x, Tensor) and x.is_inference():
            return True
    return False


def check_saveable(saved: Iterable[Any], inputs: Iterable[Any]) -> None:
    """Raise ValueError if a call with ``inputs`` is to have a backward pass, and torch cannot save for it."""
    if not torch.compiler.is_compiling() and wants_gradient(inputs) and inference_tensors(saved):
        raise ValueError(
            "a gradient is wanted of what is made in torch.inference_mode, which torch cannot save for backward: no "
            "torch.enable_grad() inside of it, and clone() such tensors outside"
        )


class Function(torch.autograd.Function):
    """torch's, whose ``apply`` takes 2 us less: default arguments are not for it, nor functorch's transforms, which
    Communicator.call refuses, and what is not a tensor or None is one argument, the first."""

    _apply: Callable[..., Any]  # of torch's base class, bound to this one

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._apply = super(torch.autograd.Function, cls).apply  # type: ignore[misc]

    @classmethod
    def apply(cls, rest: Any, *tensors: Tensor | None) -> Any:
        return cls._apply(rest, *[x if x is None else unwrap_if_dead(x) for x in tensors])


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return (a.double() @ b.double()).float()

    @staticmethod
    def backward(ctx, d):
        (a, b), d = ctx.saved_tensors, d.double()
        of_a = (d @ b.double().mT).sum_to_size(a.shape).float() if ctx.needs_input_grad[0] else None
        of_b = (a.double().mT @ d).sum_to_size(b.shape).float() if ctx.needs_input_grad[1] else None
        return of_a, of_b


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of float32 tensors, with the first dimensions broadcast, in float64, rounded at the end; its gradients too.
    Neither torch.autocast nor torch.set_float32_matmul_precision makes it coarser, wherever the backward runs. What is
    kept for backward are a and b."""
    return _Product.apply(a, b)


def refuse_second_derivative(name: str) -> None:
    """Raise RuntimeError in a backward pass that is to be differentiated; within Communicator.call, so that the other
    ranks hear of it."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"{name} has no second derivative (create_graph=True)")


def ordered(*names: str) -> None:
    """Let torch.compile make every call of these operators, in the order of the program: the other ranks count them."""
    try:
        from torch._higher_order_ops.effects import _register_effectful_op
        from torch._library.effects import EffectType
    except ImportError:  # a torch that has them elsewhere; then equal calls may be made once, and unused ones not
        return
    for name in names:
        _register_effectful_op(name, EffectType.ORDERED)


_TORCHS_OWN = Tensor, torch.nn.Parameter


def watched(inputs) -> bool:
    """Whether torch.compile traces, a torch dispatch mode is on, or tensors are of a subclass."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    for x in inputs:
        if x is not None and type(x) not in _TORCHS_OWN and isinstance(x, Tensor):
            return True
    return False


def _without_none(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*inputs):
        return tuple(inputs[0].new_empty(0) if x is None else x for x in function(*inputs))

    return call


class CustomOperator:
    """A function of tensors, numbers and None, with a backward function, both opaque to torch: the custom operators
    ``name`` and ``name_backward``.

    forward, backward: on tensors, with a schema that torch.library.custom_op can infer; both return tuples, None for a
    tensor where there is nothing: custom operators return one without elements then. fake, fake_backward: the same on
    tensors without data, without effect. save: called as save(ctx, inputs, output), before any backward. gradient:
    called as gradient(backward, ctx, *gradients of the outputs), returns those of the inputs, and calls ``backward``
    once.
    """

    def __init__(
        self, name: str, forward: Callable[..., Any], fake: Callable[..., Any], backward: Callable[..., Any],
        fake_backward: Callable[..., Any], save: Callable[..., None], gradient: Callable[..., Any],
    ) -> None:  # fmt: skip
        self.backward = torch.library.custom_op(f"{name}_backward", _without_none(backward), mutates_args=())
        self.backward.register_fake(_without_none(fake_backward))
        self.forward = torch.library.custom_op(name, _without_none(forward), mutates_args=())
        self.forward.register_fake(_without_none(fake))
        self.forward.register_autograd(lambda ctx, *grads: gradient(self.backward, ctx, *grads), setup_context=save)


class Operator:
    """Where inputs are :func:`watched` a :class:`CustomOperator`, which see; else an autograd.Function of the same
    functions, which takes about a third of the host's time.

    tensors: how many inputs, the first ones, may be tensors.
    """

    def __init__(
        self, name: str, forward: Callable[..., Any], fake: Callable[..., Any], backward: Callable[..., Any],
        fake_backward: Callable[..., Any], save: Callable[..., None], gradient: Callable[..., Any], tensors: int,
    ) -> None:  # fmt: skip
        traced = CustomOperator(name, forward, fake, backward, fake_backward, save, gradient)

        class Eager(Function):
            @staticmethod
            def forward(ctx, others, *tensors):
                inputs = *tensors, *others
                output = forward(*inputs)
                save(ctx, inputs, output)
                return output

            @staticmethod
            def backward(ctx, *grads):
                run = traced.backward if watched(grads) else backward
                return None, *gradient(run, ctx, *grads)[:tensors]

        self._forward, self._traced, self._eager, self._tensors = forward, traced.forward, Eager, tensors

    def __call__(self, *inputs):
        """All inputs by position."""
        tensors = inputs[: self._tensors]
        if watched(tensors):
            return self._traced(*inputs)
        if wants_gradient(tensors):
            return self._eager.apply(inputs[self._tensors :], *tensors)
        return self._forward(*inputs)
