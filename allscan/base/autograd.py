"""Torch operators with gradients: custom operators for torch.compile, cheaper autograd Functions for eager mode."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..bindings.torch_compat import (
    bare_apply,
    compiled_effects,
    left_out_arguments,
    no_cuda_graph,
    num_dispatch_modes,
    unwrap_if_dead,
)

TupleFunction = Callable[..., tuple[Any, ...]]  # takes tensors, numbers and None; returns a tuple of these


def wants_gradient(inputs: Iterable[object]) -> bool:
    """Whether grad mode is on and an input requires a gradient: the call then needs a backward pass."""
    if torch.is_grad_enabled():
        for x in inputs:
            if x is not None and isinstance(x, Tensor) and x.requires_grad:
                return True
    return False


def inference_tensors(inputs: Iterable[object]) -> bool:
    """Whether torch cannot save these inputs, or the results of a call with them, for backward: torch.inference_mode is
    on, or an input was created in it."""
    if torch.is_inference_mode_enabled():
        return True
    for x in inputs:
        if isinstance(x, Tensor) and x.is_inference():
            return True
    return False


def check_saveable(saved: Iterable[object], inputs: Iterable[object]) -> None:
    """Raise ValueError if a call with ``inputs`` needs a backward pass and torch cannot save ``saved`` for it."""
    if not torch.compiler.is_compiling() and wants_gradient(inputs) and inference_tensors(saved):
        raise ValueError(NOT_SAVEABLE)


NOT_SAVEABLE = (
    "inference tensors cannot be saved for backward: create the inputs outside torch.inference_mode(), or clone() them "
    "outside, and do not use torch.enable_grad() inside"
)


class Function(torch.autograd.Function):
    """torch.autograd.Function with an ``apply`` that takes 2 us less.

    ``apply`` supports neither default arguments nor functorch's transforms (Communicator.call rejects these). Its first
    argument holds all values other than tensors and None."""

    _apply: Callable[..., Any]  # apply of torch's base class, bound to this class

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
    """a @ b of float32 tensors, leading dimensions broadcast, computed in float64 and rounded to float32 at the end.
    The gradients are computed likewise. Neither torch.autocast nor torch.set_float32_matmul_precision lowers the
    precision, wherever the backward runs. a and b are saved for backward."""
    found: Tensor = _Product.apply(a, b)
    return found


def second_derivative_error(name: str) -> RuntimeError:
    """The error for grad mode in a backward pass, which is to be differentiated. To be raised within
    Communicator.call, which tells the other ranks of it."""
    return RuntimeError(f"{name} has no second derivative (create_graph=True)")


_TORCHS_OWN = Tensor, torch.nn.Parameter


def watched(inputs: Iterable[object]) -> bool:
    """Whether torch.compile traces, a torch dispatch mode is on, or an input is of a tensor subclass."""
    if torch.compiler.is_compiling() or num_dispatch_modes() > 0:
        return True
    for x in inputs:
        if x is not None and type(x) not in _TORCHS_OWN and isinstance(x, Tensor):
            return True
    return False


# How torch.compile treats the operators. The other ranks count the calls, so each call must run exactly once, in
# program order, whether or not its results are used:
#
# * Each operator is an ordered effect of torch: a call is not removed, not merged with an equal call, and not
#   recomputed in backward.
# * Inductor does not keep the order of effects: it stores their dependencies under other names than it looks up. So
#   each call of a graph takes an output tensor of the previous call as ``after``: a data dependency orders the calls.
# * torch.utils.checkpoint marks all nodes of its region for recomputation, a memory budget marks a selection. The
#   partitioner raises AssertionError for an effect with this mark. So calls lose the mark, and their graph has no
#   budget.
# * Inductor gives the inputs of an effect any strides, also a traced contiguous() copy: operators whose kernels need
#   contiguous tensors make them so when they run.
#
# A public custom operator that mutates a token tensor cannot replace the effects (tried with torch 2.13):
# register_autograd rejects operators that mutate an input; with an autograd.Function around such an operator,
# AOTAutograd's partitioner raises "Node ... was invalid, but is output".
#
# Torch's caches on disk identify an operator by its name alone.
REVISION = 12  # suffix of the names: raise it with every change of an operator's arguments, results, fake or effect


def _record(mode: Any, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Call an operator in a dispatch mode of torch. In a graph that is being recorded, the call depends on the graph's
    previous call and is not marked for recomputation."""
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
    """Compile the graph of ``node`` without an activation memory budget. Raises NotImplementedError if the region of
    ``node`` has a budget below 1 of its own."""
    effects = compiled_effects()
    region = effects.budget(node)
    if region is not None and region < 1:
        raise NotImplementedError("region_activation_memory_budget() is not supported around calls of allscan")
    if effects.memory_budget() < 1:
        warnings.warn(
            "activation_memory_budget is ignored in compiled functions that call allscan: calls are not recomputed",
            stacklevel=2,
        )
        node.meta["memory_budget"] = 1.0  # the partitioner applies the first budget that it finds to the graph


def _custom_operator(
    name: str, function: TupleFunction, fake: TupleFunction, strided: bool, tags: Sequence[torch.Tag] = ()
) -> torch.library.CustomOpDef:
    """The custom operator of ``function``, which returns a tuple. ``strided``: it takes tensors of any strides. The
    operator has an additional last argument, ``after``, and an additional last result, which is passed to the next call
    as ``after``."""
    count = len(inspect.signature(function).parameters)

    def contiguous(*inputs: Any) -> tuple[Any, ...]:
        return function(*(x.contiguous() if isinstance(x, Tensor) else x for x in inputs))

    def extended(run: TupleFunction) -> TupleFunction:
        def call(*inputs: Any) -> tuple[Any, ...]:
            first = inputs[0] if isinstance(inputs[0], Tensor) else inputs[0][0]
            outputs = [first.new_empty(0) if x is None else x for x in run(*inputs[:count])]
            return *outputs, first.new_empty(1, dtype=torch.int64)

        return call

    def reject(*inputs: object) -> None:
        raise RuntimeError(f"allscan cannot be compiled with torch {torch.__version__}, which has no ordered effects")

    arguments, results = torch.library.infer_schema(function, mutates_args=()).rsplit(") -> ", 1)
    schema = f"{arguments}, Tensor? after=None) -> ({results.strip('()')}, Tensor)"
    name, effects = f"{name}_{REVISION}", compiled_effects()
    operator = torch.library.custom_op(
        name, extended(function if strided else contiguous), mutates_args=(), schema=schema, tags=tags
    )
    operator.register_fake(reject if effects is None else extended(fake))
    if effects is not None:
        effects.order(name)
        for mode in effects.modes:
            operator.register_torch_dispatch(mode, _record)
    return operator


def ordered(name: str, function: TupleFunction, fake: TupleFunction) -> TupleFunction:
    """An operator of ``function``, which takes tensors of any strides and returns a tuple of tensors. torch.compile
    neither recomputes the operator in backward nor captures it in a CUDA graph. ``fake``: the same function on tensors
    without data."""
    operator = _custom_operator(name, function, fake, True, no_cuda_graph)
    return lambda *inputs: operator(*inputs)[:-1]


def _with_packed(
    name: str, function: TupleFunction, fake: TupleFunction, strided: bool, tags: Sequence[torch.Tag]
) -> tuple[list[torch.library.CustomOpDef], TupleFunction]:
    """(custom operators, function that calls one of them). Calls with cu_seqlens use a second operator, which torch
    keeps out of its CUDA graphs: a replay would use the tables of the captured call."""
    operators = [_custom_operator(name, function, fake, strided, tags)]
    names = [*inspect.signature(function).parameters]
    at = names.index("cu_seqlens") if "cu_seqlens" in names else None
    if at is None:
        return operators, lambda *inputs: operators[0](*inputs)[:-1]
    operators.append(_custom_operator(f"{name}_packed", function, fake, strided, no_cuda_graph))
    plain, packed = operators  # torch.compile of torch 2.11 rejects a boolean as an index
    return operators, lambda *inputs: (plain if inputs[at] is None else packed)(*inputs)[:-1]


class Passes(NamedTuple):
    """The functions of a ``CustomOperator``.

    forward, backward: functions of tensors with a schema that torch.library.custom_op can infer. The first argument is
    a tensor or a list of tensors. Both return tuples, with None for an absent tensor; the custom operator returns an
    empty tensor for it.
    fake, fake_backward: the same functions on tensors without data, without a side effect. They need no schema.
    strided: forward and backward take tensors of any strides; otherwise they get contiguous ones.
    """

    forward: TupleFunction
    fake: TupleFunction
    backward: TupleFunction
    fake_backward: TupleFunction
    strided: bool = False


class CustomOperator:
    """A function of tensors, numbers and None, with a backward function. Both are opaque to torch: custom operators of
    this ``name``. Packed sequences have operators of their own, which torch keeps out of its CUDA graphs. torch.compile
    runs each call once, in program order.

    save: called as save(ctx, inputs, output), before any backward. gradient: called as gradient(backward, ctx,
    *gradients of the outputs); returns the gradients of the first inputs, the others have none, and calls ``backward``
    once.
    """

    def __init__(
        self,
        name: str,
        passes: Passes,
        save: Callable[..., None],
        gradient: TupleFunction,
        tags: Sequence[torch.Tag] = (),
    ) -> None:
        operators, self.forward = _with_packed(name, passes.forward, passes.fake, passes.strided, tags)
        _, self.backward = _with_packed(f"{name}_backward", passes.backward, passes.fake_backward, passes.strided, tags)

        def gradients(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
            found = gradient(self.backward, ctx, *grads[:-1])
            return *found, *[None] * (len(ctx.needs_input_grad) - len(found))  # one for each argument that was passed

        for operator in operators:
            operator.register_autograd(
                gradients, setup_context=lambda ctx, inputs, output: save(ctx, inputs[:-1], output[:-1])
            )
        self.operator = operators[0]
