"""Torch operators with gradients: one for torch.compile, and the same functions at less cost where nobody compiles."""

from __future__ import annotations

import inspect
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..bindings.torch_compat import (
    bare_apply,
    compiled_effects,
    in_backward,
    left_out_arguments,
    no_cuda_graph,
    num_dispatch_modes,
    unwrap_if_dead,
)

TupleFunction = Callable[..., tuple[Any, ...]]  # of tensors, numbers and None, of which it returns a tuple


def wants_gradient(inputs: Iterable[object]) -> bool:
    """Whether a call with these inputs is to have a backward pass."""
    if torch.is_grad_enabled():
        for x in inputs:
            if x is not None and isinstance(x, Tensor) and x.requires_grad:
                return True
    return False


def inference_tensors(inputs: Iterable[object]) -> bool:
    """Whether torch cannot save for backward what a call with a backward pass is given and makes: tensors made in
    torch.inference_mode, as all are inside of it."""
    if torch.is_inference_mode_enabled():
        return True
    for x in inputs:
        if isinstance(x, Tensor) and x.is_inference():
            return True
    return False


def check_saveable(saved: Iterable[object], inputs: Iterable[object]) -> None:
    """Raise ValueError if a call with ``inputs`` is to have a backward pass, and torch cannot save for it."""
    if not torch.compiler.is_compiling() and wants_gradient(inputs) and inference_tensors(saved):
        raise ValueError(NOT_SAVEABLE)


NOT_SAVEABLE = (
    "a gradient is wanted of what is made in torch.inference_mode, which torch cannot save for backward: no "
    "torch.enable_grad() inside of it, and clone() such tensors outside"
)


class Function(torch.autograd.Function):
    """torch's, whose ``apply`` takes 2 us less: default arguments are not for it, nor functorch's transforms, which
    Communicator.call rejects, and what is not a tensor or None is one argument, the first."""

    _apply: Callable[..., Any]  # of torch's base class, bound to this one

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._apply = bare_apply(cls)

    @classmethod
    def apply(cls, rest: Any, *tensors: Tensor | None) -> Any:
        return cls._apply(rest, *[x if x is None else unwrap_if_dead(x) for x in tensors])


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return (a.double() @ b.double()).float()

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (a, b), d = ctx.saved_tensors, d.double()
        of_a = (d @ b.double().mT).sum_to_size(a.shape).float() if ctx.needs_input_grad[0] else None
        of_b = (a.double().mT @ d).sum_to_size(b.shape).float() if ctx.needs_input_grad[1] else None
        return of_a, of_b


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of float32 tensors, with the first dimensions broadcast, in float64, rounded at the end; its gradients too.
    Neither torch.autocast nor torch.set_float32_matmul_precision makes it coarser, wherever the backward runs. What is
    kept for backward are a and b."""
    found: Tensor = _Product.apply(a, b)
    return found


def reject_second_derivative(name: str) -> None:
    """Raise RuntimeError in a backward pass that is to be differentiated; within Communicator.call, so that the other
    ranks hear of it."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"{name} has no second derivative (create_graph=True)")


_TORCHS_OWN = Tensor, torch.nn.Parameter


def watched(inputs: Iterable[object]) -> bool:
    """Whether torch.compile traces, a torch dispatch mode is on, or tensors are of a subclass."""
    if torch.compiler.is_compiling() or num_dispatch_modes() > 0:
        return True
    for x in inputs:
        if x is not None and type(x) not in _TORCHS_OWN and isinstance(x, Tensor):
            return True
    return False


# What torch.compile makes of the operators. The other ranks count the calls, so each is made once, in the order of the
# program, whether or not its results are used:
#
# * As an ordered effect of torch's it is neither left out, nor merged with an equal one, nor made again in backward.
# * But inductor orders effects in name only: it looks their dependencies up by other names than it stores them by. So
#   each call of a graph takes as ``after`` a tensor that the one before has made, which orders them as data does.
# * And torch.utils.checkpoint marks all in its region to be made again in backward, a memory budget what it chooses,
#   where an effect is an AssertionError of the partitioner. So calls lose that mark, and their graph has no budget.
#
# Torch's caches on disk know an operator by its name alone.
REVISION = 7  # ends the names: to be raised with every change of an operator's arguments, results, fake or effect


def _record(mode: Any, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """A call of an operator in a mode of torch's. Where a graph is recorded, it comes behind the graph's last call, and
    is not to be made again."""
    effects, kwargs = compiled_effects(), kwargs or {}
    recorder = effects.recorder()
    if recorder is None:
        return mode.__torch_dispatch__(operator, types, args, kwargs)
    if effects.within_another():
        raise NotImplementedError(
            "a compiled function cannot call allscan within nested_compile_region, torch.cond and the like: torch does "
            "not keep the order of calls there"
        )
    graph, functional = recorder.tracer.graph, isinstance(mode, effects.modes[0])
    if functional:
        in_graph, done = getattr(recorder, "last_of_allscan", (None, None))
        if in_graph is graph:
            args = *args, *left_out_arguments(operator, len(args)), done
    before = len(graph.nodes)
    outputs = mode.__torch_dispatch__(operator, types, args, kwargs)
    if functional:
        recorder.last_of_allscan = graph, outputs[-1]
    for node in itertools.islice(reversed(graph.nodes), len(graph.nodes) - before):
        node.meta.pop("recompute", None)
        _without_budget(node)
    return outputs


def _without_budget(node: Any) -> None:
    """Let the graph of ``node`` be compiled without a memory budget of activations, or raise NotImplementedError."""
    effects = compiled_effects()
    region = effects.budget(node)
    if region is not None and region < 1:
        raise NotImplementedError("region_activation_memory_budget() does not go with calls of allscan")
    if effects.memory_budget() < 1:
        warnings.warn(
            "activation_memory_budget does not hold for compiled functions that call allscan: no call is made again",
            stacklevel=2,
        )
        node.meta["memory_budget"] = 1.0  # the partitioner takes the first that it finds for that of the graph


def _custom_operator(
    name: str, function: TupleFunction, fake: TupleFunction, tags: Sequence[torch.Tag] = ()
) -> torch.library.CustomOpDef:
    """The custom operator of a ``function`` that returns a tuple, with one argument more, ``after``, and one result
    more, for ``after`` of the next call."""
    count = len(inspect.signature(function).parameters)

    def extended(run: TupleFunction) -> TupleFunction:
        def call(*inputs: Any) -> tuple[Tensor, ...]:
            outputs = [inputs[0].new_empty(0) if x is None else x for x in run(*inputs[:count])]
            return *outputs, inputs[0].new_empty(1, dtype=torch.int64)

        return call

    def reject(*inputs: object) -> None:
        raise RuntimeError(f"allscan cannot be compiled with torch {torch.__version__}, which orders no effects")

    arguments, results = torch.library.infer_schema(function, mutates_args=()).rsplit(") -> ", 1)
    schema = f"{arguments}, Tensor? after=None) -> ({results.strip('()')}, Tensor)"
    name, effects = f"{name}_{REVISION}", compiled_effects()
    operator = torch.library.custom_op(name, extended(function), mutates_args=(), schema=schema, tags=tags)
    operator.register_fake(reject if effects is None else extended(fake))
    if effects is not None:
        effects.order(name)
        for mode in effects.modes:
            operator.register_torch_dispatch(mode, _record)
    return operator


def ordered(name: str, function: TupleFunction, fake: TupleFunction) -> TupleFunction:
    """A ``function`` of tensors that returns a tuple of them, as an operator whose results torch.compile neither makes
    again in backward nor has in a CUDA graph. ``fake``: the same on tensors without data."""
    operator = _custom_operator(name, function, fake, no_cuda_graph)
    return lambda *inputs: operator(*inputs)[:-1]


def _with_packed(
    name: str, function: TupleFunction, fake: TupleFunction
) -> tuple[list[torch.library.CustomOpDef], TupleFunction]:
    """(custom operators, what calls one of them). With cu_seqlens it is one that is not part of a CUDA graph of
    torch's, which would go on with the tables of the call that was captured."""
    operators, names = [_custom_operator(name, function, fake)], [*inspect.signature(function).parameters]
    at = names.index("cu_seqlens") if "cu_seqlens" in names else None
    if at is None:
        return operators, lambda *inputs: operators[0](*inputs)[:-1]
    operators.append(_custom_operator(f"{name}_packed", function, fake, no_cuda_graph))
    plain, packed = operators  # torch.compile of torch 2.11 takes no boolean for a number of one
    return operators, lambda *inputs: (plain if inputs[at] is None else packed)(*inputs)[:-1]


class Passes(NamedTuple):
    """The functions of a ``CustomOperator``.

    forward, backward: on tensors, the first one never None, with a schema that torch.library.custom_op can infer; both
    return tuples, None for a tensor where there is nothing: custom operators return one without elements then. fake,
    fake_backward: the same on tensors without data, without effect.
    """

    forward: TupleFunction
    fake: TupleFunction
    backward: TupleFunction
    fake_backward: TupleFunction


class CustomOperator:
    """A function of tensors, numbers and None, with a backward function, both opaque to torch: custom operators of this
    ``name``, and for packed sequences others, which torch keeps out of its CUDA graphs. torch.compile makes each of
    their calls once, in the order of the program.

    save: called as save(ctx, inputs, output), before any backward. gradient: called as gradient(backward, ctx,
    *gradients of the outputs), returns those of the inputs, and calls ``backward`` once.
    """

    def __init__(self, name: str, passes: Passes, save: Callable[..., None], gradient: TupleFunction) -> None:
        operators, self.forward = _with_packed(name, passes.forward, passes.fake)
        _, self.backward = _with_packed(f"{name}_backward", passes.backward, passes.fake_backward)
        for operator in operators:
            operator.register_autograd(
                lambda ctx, *grads: gradient(self.backward, ctx, *grads[:-1]),
                setup_context=lambda ctx, inputs, output: save(ctx, inputs[:-1], output[:-1]),
            )
        self.operator = operators[0]


class PreparedCalls(Protocol):
    """What runs the calls of one kind of an ``Operator``: what the first of them has worked out. ``fixed``: the last
    inputs, which are the same at all of them."""

    fixed: tuple[Any, ...]

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        """The outputs, of the inputs before ``fixed``."""

    def pending(self) -> list[Any]:
        """For the backward that a call is to have."""


RESULTS = 2  # outputs that a caller sees: o and final_state


class Operator(CustomOperator):
    """The same with functions that take less of the host's time where nobody traces: ``eager``, an autograd.Function.

    save: as for a CustomOperator; called with all inputs and outputs, and with ``ctx.pending``: what PreparedCalls made
        of it, or for a call of the custom operator ``pending(*inputs)``; [] where no backward of this node will run.
    gradient: called as gradient(backward, ctx, *gradients of the results), returns those of the tensors.
    backward: called as backward(PreparedCalls or None, *inputs of passes.backward).

    Of the outputs the first RESULTS are results, the others are there to be saved.
    """

    def __init__(
        self,
        name: str,
        passes: Passes,
        save: Callable[..., None],
        gradient: TupleFunction,
        pending: Callable[..., list[Any]],
        backward: TupleFunction,
    ) -> None:
        count = len(inspect.signature(passes.forward).parameters)

        def save_traced(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
            ctx.mark_non_differentiable(*output[RESULTS:])
            ctx.set_materialize_grads(False)
            eager = type(output[0]) is Tensor and not in_backward()  # not traced, nor activation checkpointing's
            ctx.pending = pending(*inputs) if eager else []
            save(ctx, inputs, output)

        def gradient_traced(run: TupleFunction, ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
            found = gradient(run, ctx, *grads[:RESULTS])
            return *found, *[None] * (count - len(found))

        super().__init__(name, passes, save_traced, gradient_traced)
        traced = self.backward

        class Eager(Function):
            """An autograd graph has a weak reference to what was prepared: it is not to keep the plans of a
            communicator that is gone."""

            @staticmethod
            def forward(ctx: Any, rest: tuple[Any, ...], *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
                prepared, others = rest
                output = prepared.forward(*tensors, *others)
                ctx.set_materialize_grads(False)
                ctx.pending = [] if in_backward() else prepared.pending()
                save(ctx, (*tensors, *others, *prepared.fixed), output)
                ctx.prepared = weakref.ref(prepared)
                return tuple(output[:RESULTS])

            @staticmethod
            def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
                own = num_dispatch_modes() == 0 and not torch.compiler.is_compiling()
                for x in grads:
                    own = own and (x is None or type(x) is Tensor)
                return None, *gradient(partial(backward, ctx.prepared()) if own else traced, ctx, *grads)

        # called as eager((PreparedCalls, inputs between the tensors and what is fixed), *tensors)
        self.eager: Callable[..., tuple[Any, ...]] = Eager.apply
