"""The skeleton of differentiable operators over a sharded sequence: zeco_gla, the delta rules, zeco_ssd.

A call has three records: ``Asked``, the caller's options, unchecked; ``Call``, the checked options that, with the
shapes of the tensors, determine everything that is prepared; ``PreparedCall``, which is found by a key of the former
and launches the kernels. A new option, a flag or an integer, is a field of one name in the first two; a set of options
of one operator is ``Asked.more`` and, by ``SequenceOperator.options``, ``Call.more``. Both are compared at first calls,
and by the stamps of later launches.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.autograd import (
    CustomOperator,
    Function,
    Passes,
    check_saveable,
    second_derivative_error,
    wants_gradient,
    watched,
)
from ..base.checks import (
    PER_DOCUMENT,
    check_for_an_operator,
    check_gates,
    check_halves,
    check_tensor,
    checked_first_token,
    plain_or_traced,
    restored,
    saved_tensor_error,
    signature_of,
    zigzag_of,
)
from ..base.errors import DeferredError
from ..base.tiling import cdiv
from ..bindings.torch_compat import graph_task, in_backward, num_dispatch_modes, recorded, without_dispatch_modes
from ..comm.backwards import saved_tensors
from ..comm.calls import call_key
from ..comm.communicator import Communicator, check_communicator
from ..tokens.packing import CHUNK_TOKENS, GRID_LIMIT, DeviceBoundaries, Layout, carried_states, own_boundaries
from ..tokens.partition import OwnTokens, check_packed, compare_values, find_layout
from .allscan import check_final, final_of_all
from .carrier import AllScanCarrier, InOrderCarrier, StateCarrier, carrier_of, check_cut, check_invariant

FLOATS = torch.bfloat16, torch.float16, torch.float32  # dtypes of q, k, v
HEAD_FIRST = "warned of head-first inputs"  # attribute of a communicator
KEYABLE = frozenset((float, int, bool, str, type(None)))  # types of options by which a PreparedCall can be found


class Asked(NamedTuple):
    """Options of a call as the caller passes them, unchecked: see ``zeco_gla``. more: those of one operator only, a
    tuple without tensors."""

    output_final_state: bool | str = False  # no part of the key of a PreparedCall
    more: Any = ()
    scale: float | None = None
    cu_seqlens: Tensor | Sequence[int] | None = None
    first_token: int | None = None
    layout: str = "contiguous"
    per_document: bool = False
    invariant: int | None = None
    recompute: bool | None = True


class Call(NamedTuple):
    """Checked options of a call. They are equal on all ranks, except ``saves``.

    Custom operators take ``scale`` and ``lower_bound`` as numbers, since torch.compile may trace these, and the others
    as ``text``, integers as such: exported programs run in other processes."""

    rule: str
    scale: float
    lower_bound: float | None = None  # of raw gates
    more: str = ""  # options of one operator, "name=value,..."
    zigzag: int = 0  # see checks.zigzag_of
    invariant: int = 0
    of_all: bool = False  # see final_of_all
    saves: bool = False  # forward saves the intermediates of the chunks for backward

    @property
    def text(self) -> str:
        rule, _, _, more, *numbers = self
        return ";".join([rule, more, *[str(int(x)) for x in numbers]])

    @property
    def agreed(self) -> tuple[tuple[str, object], ...]:
        """(name, value) of the options that must be equal on all ranks."""
        fields = self._asdict() | {"output_final_state is 'all'": bool(self.of_all)}
        fields |= dict(layout="zigzag" if self.zigzag else "contiguous", per_document=self.zigzag == PER_DOCUMENT)
        for name in ("zigzag", "of_all", "saves", "more"):
            del fields[name]
        more = [field.partition("=") for field in self.more.split(",") if field]
        return *fields.items(), *[(name, value) for name, _, value in more]


@functools.lru_cache(4096)
def call_of(scale: float, lower_bound: float | None, text: str) -> Call:
    """The Call of a custom operator's arguments."""
    rule, more, *numbers = text.split(";")
    return Call._make([rule, scale, lower_bound, more, *map(int, numbers)])


class PreparedCall:
    """State of one call signature. The first call with the signature makes it; later calls find it by their cache key,
    skip all other checks, and run their forward and backward passes by it.

    states: shape of initial and final states. carried_states: number of states that are sent in each direction.
    fixed: the custom operators' last inputs, which are equal in all of these calls. saved_specs: (dtype, shape, device)
    of ``SequenceOperator.kept`` and of do. pending: functions that make the communicator's PendingBackward records of
    an outstanding backward pass. name, backward_name: of the passes, in errors.
    """

    saved_specs: list[tuple[Any, ...]]
    name: str
    backward_name: str

    def __init__(
        self,
        carrier: StateCarrier,
        call: Call,
        first_token: int | None,
        states: tuple[int, int, int, int],
        carried_states: int,
    ) -> None:
        self.carrier, self.comm, self.call = carrier, carrier.comm, call
        self.fixed = carrier.handle, call.scale, call.lower_bound, first_token, call.text
        self.states = states
        scan = carrier.get_or_create_scan((carried_states * states[1], *states[2:]))
        self.pending = carrier.pending(scan, bool(call.zigzag))

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        """Run forward on the custom operator's inputs before ``fixed``. Returns (o, final_state or None, and the
        operator's ``outputs`` for backward)."""
        raise NotImplementedError

    def backward(self, do: Tensor, dfinal: Tensor | None, kept: Sequence[Tensor], initial: bool) -> Sequence[Any]:
        """Run backward; return the gradients of the inputs, and of the initial state if ``initial``, else None."""
        raise NotImplementedError


class SequenceOperator:
    """A differentiable operator of q, k, v, gates and more, with an initial and a final state, over the ranks.

    Eager calls are a torch.autograd.Function, which has the least host time; under torch.compile they are custom
    operators. A subclass says what its tensors are, checks them, and makes PreparedCalls. In this class q and
    v are the inputs whose last dimensions are those of a state, [B, T, H, K] and [B, T, HV, V].
    """

    name: str  # of the custom operators
    titles: Mapping[str, str]  # the public function's name, by rule
    inputs: tuple[str, ...]  # names of the input tensors, before the initial state: q, k, v, g, ...
    optional: tuple[str, ...] = ()  # those of them that may be None
    q_at, v_at = 0, 2  # places of q and v, among the inputs and in ``kept``
    dtypes_at = 3, -1  # places of the inputs whose dtypes backward needs; that of the first is its gradient's
    initial, final = "initial_state", "output_final_state"  # names of these arguments
    restored: Callable[..., Sequence[Any]] = staticmethod(restored)  # checks saved tensors; returns what kernels take
    outputs: tuple[str, ...]  # results that are saved for backward
    kept: tuple[str, ...]  # all tensors that are saved for backward, except cu_seqlens
    kept_at: Mapping[str, Sequence[int]]  # their places among inputs and outputs, by rule
    dense = False  # the scan has transitions
    strided = False  # kernels read inputs by their strides
    # (the caller's tensors, Asked.more, handle) -> the custom operator's (inputs, initial_state); None: the caller's
    prepared_inputs: Callable[..., Sequence[Any]] | None = None

    def check_options(self, rule: str, tensors: Sequence[Any], asked: Asked, invariant: int) -> None:
        """Raise TypeError, ValueError or ImportError for options that this operator does not support."""

    def options(self, tensors: Sequence[Any], more: Any) -> tuple[float | None, str]:
        """``lower_bound`` and ``more`` of the Call, from those of Asked."""
        return None, ""

    def check_tensors(self, comm: Communicator, tensors: Sequence[Any], call: Call) -> None:
        """Raise TypeError or ValueError for inputs that are wrong on this rank; see also ``check_all``."""
        raise NotImplementedError

    def summed_gates(self, rule: str) -> int | None:
        """See ``check_gates``, tokens."""
        return None

    def gates(self, tensors: Sequence[Any], call: Call) -> Iterable[tuple[str, Tensor]]:
        """(name, logarithms of decays), whose values a first call checks."""
        return [("g", tensors[3])]

    def state_shape(self, n: int, q: Tensor, v: Tensor) -> tuple[int, int, int, int]:
        """Shape of initial and final states of n sequences."""
        return n, v.shape[2], q.shape[3], v.shape[3]

    def make(
        self,
        carrier: StateCarrier,
        tensors: Sequence[Any],
        cu_seqlens: Tensor | None,
        first_token: int | None,
        call: Call,
        traced: bool,
    ) -> PreparedCall:
        """Prepare calls with such ``tensors`` (inputs, initial_state). traced: of the custom operator, whose saved
        results have the size for any number of pieces of packed sequences; otherwise that of this rank's pieces."""
        raise NotImplementedError

    def make_again(
        self, carrier: StateCarrier, rest: Sequence[Any], check: Callable[..., Any], dtypes: Sequence[torch.dtype]
    ) -> PreparedCall:
        """Prepare a backward pass of the custom operator. rest: (kept, do, cu_seqlens, first_token, call). check: to be
        called with the expected ``saved_specs`` first. dtypes: of the inputs."""
        raise NotImplementedError

    def fake_outputs(self, inputs: Sequence[Tensor], cu_seqlens: Tensor | None, call: Call) -> Sequence[Tensor]:
        """``outputs`` without data."""
        raise NotImplementedError

    def gradients_like(self, kept: Sequence[Any]) -> Sequence[Any]:
        """The saved tensors whose shapes and dtypes the gradients of the inputs have."""
        raise NotImplementedError

    def __init__(self) -> None:
        fixed = dict(handle=int, scale=float, lower_bound=float | None, first_token=int | None, call=str)
        maybe: Any = Tensor | None
        tensors = {name: maybe if name in self.optional else Tensor for name in self.inputs}
        forward = typed(
            self._forward, 2 + len(self.outputs), tensors, initial_state=maybe, cu_seqlens=maybe, final=bool, **fixed
        )
        kept = dict(do=Tensor, dfinal=maybe) | {name: maybe if name in self.optional else Tensor for name in self.kept}
        of_call = dict(cu_seqlens=maybe, initial=bool, gate_dtype=torch.dtype, last_dtype=torch.dtype)
        backward = typed(partial(self._backward, None), len(self.inputs) + 1, kept, **of_call, **fixed)
        passes = Passes(forward, self._fake, backward, self._fake_backward, self.strided)
        self.custom = CustomOperator(f"allscan::{self.name}", passes, self._save_traced, self._gradient)
        operator, traced = self, self.custom.backward

        class Eager(Function):
            """The autograd graph holds a weak reference to the PreparedCall, so that it does not keep the plans of a
            deleted communicator alive."""

            @staticmethod
            def forward(ctx: Any, rest: tuple[Any, ...], *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
                prepared, *others = rest
                output = prepared.forward(*tensors, *others)
                ctx.set_materialize_grads(False)
                ctx.pending = [] if graph_task() != -1 else [make() for make in prepared.pending]
                operator._save(ctx, (*tensors, *others, *prepared.fixed), prepared.call.rule, output)
                ctx.prepared = weakref.ref(prepared)
                return tuple(output[:2])

            @staticmethod
            def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
                own = num_dispatch_modes() == 0 and not torch.compiler.is_compiling()
                for x in grads:
                    own = own and (x is None or type(x) is Tensor)
                run = partial(operator._backward, ctx.prepared()) if own else traced
                return None, *operator._gradient(run, ctx, *grads)

        # called as eager((PreparedCall, cu_seqlens, final), *tensors)
        self.eager: Callable[..., tuple[Any, ...]] = Eager.apply

    def run(
        self,
        comm: Communicator,
        rule: str,
        tensors: tuple[Any, ...],
        asked: Asked,
        carrier: StateCarrier | None = None,
    ) -> tuple[Tensor, Any]:
        """Make a call; returns (o, final_state or None). tensors: inputs, initial_state, and further ones for
        ``prepared_inputs``. ``carrier`` scans the state over the ranks, by default All-Scan."""
        if type(comm) is not Communicator:
            check_communicator(comm)
        of_all = isinstance(asked.output_final_state, str) and check_final(asked.output_final_state, comm, self.final)
        tracing = torch.compiler.is_compiling()
        if carrier is None:
            in_order = comm.invariant if asked.invariant is None else asked.invariant
            kind = InOrderCarrier if in_order else AllScanCarrier
            if tracing:  # a look-up would be a guard, which fails at the second call
                carrier = kind(comm, self.dense)
            else:
                carrier = comm.attributes.get((kind, self.dense)) or kind.of(comm, self.dense)
        modes = not tracing and num_dispatch_modes()
        recording = tracing or (modes and recorded())
        prepared = key = cu_seqlens = None
        with contextlib.nullcontext() if recording else comm.call(False, self.titles[rule], tensors):
            differentiable = False
            if not tracing:
                of_tensors = call_key(tensors)
                differentiable = bool(of_tensors[-1])  # 2: there are inference tensors, which torch cannot save
                # calls that need all checks bypass the cache: Decimal(1), an invalid scale, equals 1.0, and 1 is True
                types = *map(type, asked[2:]), *map(type, asked.more)
                known = asked.first_token is None and not (comm.debug or asked.per_document or modes)
                if known and KEYABLE.issuperset(types) and of_tensors[-1] != 2:
                    key = of_tensors, rule, asked[1:], types, carrier.handle, of_all
                    prepared = comm.calls.get(key)
            if prepared is None:
                cu_seqlens, first_token, call = self._checked(carrier, rule, tensors, asked)
            final, inputs = bool(asked.output_final_state), tensors  # type: tuple[bool, Any]
            if self.prepared_inputs is not None:
                inputs = self.prepared_inputs(tensors, asked.more, comm.handle)
            elif tracing or any([x is not None and (x.is_neg() or not x.is_contiguous()) for x in tensors]):
                inputs = plain_or_traced(*tensors)
            if prepared is None and watched((*inputs, cu_seqlens)):
                fixed = carrier.handle, call.scale, call.lower_bound, first_token, call.text
                o, final_state, *_ = self.custom.forward(*inputs, cu_seqlens, final, *fixed)
                found = o, final_state if final else None
            else:
                if prepared is None:
                    prepared = self._prepare(carrier, inputs, cu_seqlens, first_token, call)
                    if key is not None:
                        comm.calls.remember(key, prepared)
                comm.order.what = prepared.name
                if differentiable:
                    found = self.eager((prepared, cu_seqlens, final), *inputs)
                else:
                    found = prepared.forward(*inputs, cu_seqlens, final)[:2]
        if not of_all:
            return found
        packed = asked.cu_seqlens is not None and not asked.per_document
        step = asked.cu_seqlens.step if isinstance(asked.cu_seqlens, DeviceBoundaries) else None
        return final_of_all(*found, comm, packed, asked.layout == "zigzag", step)

    def _checked(
        self, carrier: StateCarrier, rule: str, tensors: Sequence[Any], asked: Asked
    ) -> tuple[Tensor | None, int | None, Call]:
        """Run the checks that need no other rank; return (cu_seqlens, first_token, Call)."""
        deferred, cu_seqlens, comm = None, None, carrier.comm
        try:
            zigzag = zigzag_of(asked.layout, asked.per_document, asked.cu_seqlens)
            named = dict(zip((*self.inputs, self.initial), tensors))
            check_for_an_operator(named, (*self.optional, self.initial), self.inputs[self.q_at], asked.scale)
            cu_seqlens = None if asked.cu_seqlens is None else own_boundaries(asked.cu_seqlens)
            first_token = checked_first_token(asked.first_token, cu_seqlens)
            invariant = comm.invariant if asked.invariant is None else asked.invariant
            invariant = check_invariant(comm, invariant, zigzag)
            self.check_options(rule, tensors, asked, invariant)
            check_saveable((*tensors, cu_seqlens), tensors)
        except (TypeError, ValueError, ImportError) as error:
            deferred = DeferredError(error)
        if deferred is not None:
            carrier.get_or_create_scan(None, deferred=deferred)  # raises the error, at a first call on all ranks
        compare_values(comm, asked.cu_seqlens, cu_seqlens)
        lower_bound, more = self.options(tensors, asked.more)
        recompute = comm.recompute if asked.recompute is None else asked.recompute
        checked = dict(
            rule=rule,
            scale=tensors[self.q_at].shape[-1] ** -0.5 if asked.scale is None else float(asked.scale),
            lower_bound=lower_bound,
            zigzag=zigzag,
            invariant=invariant,
            of_all=isinstance(asked.output_final_state, str),
            saves=not recompute and wants_gradient(tensors),
            more=more,
        )
        others = {name: x for name, x in asked._asdict().items() if name in Call._fields}
        return cu_seqlens, first_token, Call(**others | checked)

    def _prepare(
        self,
        carrier: StateCarrier,
        tensors: Sequence[Any],
        cu_seqlens: Tensor | None,
        first_token: int | None,
        call: Call,
        traced: bool = False,
    ) -> PreparedCall:
        """Run the remaining checks; return the PreparedCall. The first call for a signature checks the tensors and
        compares its arguments with those of the other ranks. traced: for a call of the custom operator."""
        comm, n = carrier.comm, None if cu_seqlens is None else cu_seqlens.shape[0] - 1
        signature = call, signature_of(*tensors), n, first_token is None, type(carrier), carrier.handle
        if comm.debug or signature not in comm.checked:
            self.check_first(carrier, tensors, cu_seqlens, first_token, call)
            comm.checked.remember(signature)
        prepared, shape = self.make(carrier, tensors, cu_seqlens, first_token, call, traced), tensors[self.v_at].shape
        prepared.name, prepared.backward_name = names_of(self.titles[call.rule], *shape[:2], *prepared.states[1:])
        return prepared

    def check_first(
        self,
        carrier: StateCarrier,
        tensors: Sequence[Any],
        cu_seqlens: Tensor | None,
        first_token: int | None,
        call: Call,
    ) -> None:
        """Check all arguments and compare them with the other ranks'. An error is raised on all ranks. Gates are read
        at the first call with equal arguments, in debug mode at every call; never in a capture."""
        comm, q, v = carrier.comm, tensors[self.q_at], tensors[self.v_at]
        shape = agree = deferred = None
        if q.ndim == v.ndim == 4:
            n = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
            shape = carried(q, v, n or q.shape[0], call.zigzag)
            named = dict(zip((*self.inputs, self.initial), tensors))
            named |= dict(cu_seqlens=cu_seqlens, first_token=first_token)
            optional = *self.optional, self.initial, "cu_seqlens", "first_token"
            agree = (
                self.titles[call.rule],
                ("B", q.shape[0]),
                (f"heads of {self.inputs[self.q_at]}", q.shape[2]),
                ("dtype", str(q.dtype)),
                *[(f"{name} is None", named[name] is None) for name in optional],
                *call.agreed,
            )
        reads_gates = False
        try:
            self.check_all(comm, tensors, cu_seqlens, first_token, call)
            known = (shape, agree) in comm.agreed.arguments and not comm.debug
            reads_gates = not (known or comm.streams.capturing())
            with torch.no_grad(), without_dispatch_modes():  # selective checkpointing does not check again
                for name, g in self.gates(tensors, call) if reads_gates else ():
                    check_gates(name, g, self.summed_gates(call.rule))
        except (TypeError, ValueError) as error:
            deferred = DeferredError(error)
        carrier.get_or_create_scan(shape, agree, deferred, first_call_only=reads_gates)

    def check_all(
        self,
        comm: Communicator,
        tensors: Sequence[Any],
        cu_seqlens: Tensor | None,
        first_token: int | None,
        call: Call,
    ) -> None:
        """Raise TypeError or ValueError for arguments that are wrong on this rank."""
        q, v, initial_state = tensors[self.q_at], tensors[self.v_at], tensors[-1]
        for name, x in zip(self.inputs, tensors):
            if x is not None and x.device != comm.device:
                raise ValueError(f"{name} must be on {comm.device}, got {x.device}")
        self.check_tensors(comm, tensors, call)
        (B, T, H), HV = q.shape[:3], v.shape[2]
        if call.zigzag:
            check_halves(T)
        if B * cdiv(T, CHUNK_TOKENS) > GRID_LIMIT:
            raise ValueError(
                f"B * T must be at most {GRID_LIMIT:,} chunks of {CHUNK_TOKENS} tokens, got {tuple(q.shape)}"
            )
        n = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        states = carried_states(B, n, call.zigzag) * (1 + bool(call.zigzag))
        if states * HV > GRID_LIMIT:
            raise ValueError(f"{states} states of sequences or halves times the heads must be at most {GRID_LIMIT:,}")
        if cu_seqlens is not None and B != 1:
            raise ValueError(f"cu_seqlens must be [N + 1] with B = 1, got {tuple(cu_seqlens.shape)}, B = {B}")
        if initial_state is not None:
            check_tensor(self.initial, initial_state, self.state_shape(n, q, v), comm.device)
        check_cut(comm, T, call.invariant, call.zigzag)
        check_packed(comm, cu_seqlens, T, first_token, call.zigzag)
        if cu_seqlens is None and H == HV:  # packed inputs that are head-first would not fit the tokens of all ranks
            look_for_head_first(comm, self.titles[call.rule], self.inputs[self.q_at], q)

    def _save(self, ctx: Any, inputs: tuple[Any, ...], rule: str, output: Sequence[Any]) -> None:
        """Save what ``_gradient`` needs. inputs: all of the custom operator's."""
        tensors, (initial_state, cu_seqlens, _, *fixed) = inputs[: len(self.inputs)], inputs[len(self.inputs) :]
        found = *tensors, *output[2:]
        ctx.save_for_backward(*[found[i] for i in self.kept_at[rule]], cu_seqlens)
        ctx.rest = (
            initial_state is not None and initial_state.requires_grad,
            *[tensors[i].dtype for i in self.dtypes_at],
            *fixed,
        )

    def _save_traced(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)
        eager = type(output[0]) is Tensor and not in_backward()  # not traced, nor activation checkpointing's
        *_, handle, scale, lower_bound, _, text = inputs
        call, cu_seqlens = call_of(scale, lower_bound, text), inputs[len(self.inputs) + 1]
        q, v = inputs[self.q_at], inputs[self.v_at]
        ctx.pending = []
        if eager:
            carrier = carrier_of(handle, call.invariant, self.dense)
            n = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
            scan = carrier.get_or_create_scan(carried(q, v, n, call.zigzag))
            ctx.pending = [make() for make in carrier.pending(scan, bool(call.zigzag))]
        self._save(ctx, inputs, call.rule, output)

    def _gradient(
        self, backward: Callable[..., Any], ctx: Any, do: Tensor | None, dfinal: Tensor | None, *_: Any
    ) -> tuple[Tensor | None, ...]:
        """The gradients of the inputs and of initial_state."""
        for pending in ctx.pending:
            pending.run()
        initial, gate_dtype, _, handle, *_ = ctx.rest
        *kept, cu_seqlens = saved_tensors(ctx, lambda: carrier_of(handle).comm, True)
        v = kept[self.v_at]
        do, dfinal = plain_or_traced(v.new_zeros(v.shape) if do is None else do, dfinal)
        dq, dk, dv, dg, *others, dinitial = backward(do, dfinal, *kept, cu_seqlens, *ctx.rest)
        return dq, dk, dv, dg.to(gate_dtype), *others, dinitial if initial else None

    # The custom operators, which torch.compile traces

    def _forward(self, *inputs: Any) -> tuple[Any, ...]:
        *tensors, cu_seqlens, final, handle, scale, lower_bound, first_token, text = inputs
        call = call_of(scale, lower_bound, text)
        carrier = carrier_of(handle, call.invariant, self.dense)
        with carrier.comm.call(False, self.titles[call.rule], tuple(tensors)):
            prepared = self._prepare(carrier, tensors, cu_seqlens, first_token, call, traced=True)
            carrier.comm.order.what = prepared.name
            return prepared.forward(*tensors, cu_seqlens, final)

    def _fake(self, *inputs: Any) -> tuple[Tensor | None, ...]:
        *tensors, _, cu_seqlens, final, _, scale, lower_bound, _, text = inputs
        q, v = tensors[self.q_at], tensors[self.v_at]
        o, final_state = v.new_empty(v.shape), self._zero_states(q, v, cu_seqlens, final)
        return o, final_state, *self.fake_outputs(tensors, cu_seqlens, call_of(scale, lower_bound, text))

    def _backward(
        self, prepared: PreparedCall | None, do: Tensor, dfinal: Tensor | None, *inputs: Any
    ) -> tuple[Any, ...]:
        """Check the restored tensors and run backward."""
        *kept, cu_seqlens, initial, gate_dtype, last_dtype, handle, scale, lower_bound, first_token, text = inputs
        call = call_of(scale, lower_bound, text) if prepared is None else prepared.call
        carrier = carrier_of(handle, call.invariant, self.dense) if prepared is None else prepared.carrier
        title = self.titles[call.rule]
        name = f"the backward of {title}" if prepared is None else prepared.backward_name
        with carrier.comm.call(True, name, (do, dfinal)):
            if torch.is_grad_enabled():
                raise second_derivative_error(title)
            for i in (self.q_at, self.v_at):
                if kept[i].ndim != 4:
                    raise saved_tensor_error(title, self.kept[i], kept[i], "a tensor of four dimensions")
            check = partial(self.restored, title, (*self.kept, "do"), (*kept, do))
            if prepared is None:
                rest = kept, do, cu_seqlens, first_token, call
                prepared = self.make_again(carrier, rest, check, (gate_dtype, last_dtype))
                carrier.comm.order.what = names_of(title, *do.shape[:2], *prepared.states[1:])[1]
            *kept, do = check(prepared.saved_specs)
            return tuple(prepared.backward(do, dfinal, kept, initial))

    def _fake_backward(self, _: Any, __: Any, *inputs: Any) -> tuple[Tensor | None, ...]:
        kept, (cu_seqlens, initial, *_) = inputs[: len(self.kept)], inputs[len(self.kept) :]
        dinitial = self._zero_states(kept[self.q_at], kept[self.v_at], cu_seqlens, initial)
        return *(x if x is None else x.new_empty(x.shape) for x in self.gradients_like(kept)), dinitial

    def _zero_states(self, q: Tensor, v: Tensor, cu_seqlens: Tensor | None, wanted: bool) -> Tensor | None:
        """Zeros for each sequence's state, or None if not ``wanted``."""
        n = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        return q.new_zeros(self.state_shape(n, q, v), dtype=torch.float32) if wanted else None


def look_for_head_first(comm: Communicator, name: str, what: str, q: Tensor) -> None:
    """Warn on the first rank, once, if inputs like q [B, T, H, K], without packed sequences, may be [B, H, T, K]: if T
    of all ranks, taken as this rank's times their number, is less than H. ``what``: q's name. Not for a single token
    (decoding), nor for as many heads as a call with more tokens had."""
    T, H = q.shape[1:3]
    if T * comm.size >= H:
        comm.attributes[name, "heads", H] = True
    elif T > 1 and comm.rank == 0 and not comm.attributes.keys() & {HEAD_FIRST, (name, "heads", H)}:
        comm.attributes[HEAD_FIRST] = True
        warnings.warn(
            f"{name} got {T} tokens of {H} heads, {what} {list(q.shape)}: are the inputs head-first, [B, H, T, ...]? "
            "Expected [B, T, H, ...]: use transpose(1, 2). Ignore this if so few tokens are intended",
            stacklevel=4,
        )


def typed(function: Callable[..., Any], results: int, *tables: dict[str, Any], **more: Any) -> Callable[..., Any]:
    """``function`` with a signature for torch.library: parameters by name, with their types, and tensors as results."""

    def call(*inputs: Any) -> Any:
        return function(*inputs)

    named = {name: kind for table in (*tables, more) for name, kind in table.items()}
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, annotation=x) for name, x in named.items()]
    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        parameters, return_annotation=tuple.__class_getitem__((Tensor,) * results)
    )
    return call


@functools.lru_cache(4096)
def names_of(title: str, B: int, T: int, H: int, K: int, V: int) -> tuple[str, str]:
    """The names of the forward and the backward pass of a call, with this rank's shape."""
    of = f"{title} (tokens [{B}, {T}], H {H}, K {K}, V {V})"
    return of, f"the backward of {of}"


def carried(q: Tensor, v: Tensor, sequences: int, zigzag: int) -> tuple[int, int, int]:
    """The shape (states * heads, K, V) of the data that a rank sends."""
    return carried_states(q.shape[0], sequences, zigzag) * v.shape[2], q.shape[3], v.shape[3]


def check_dtypes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise TypeError unless q, k and v share one of FLOATS."""
    if q.dtype not in FLOATS or not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"q, k and v must share one dtype (bfloat16, float16 or float32), got {q.dtype}, {k.dtype}, {v.dtype}"
        )


def layout_of(
    comm: Communicator,
    q: Tensor,
    cu_seqlens: Tensor | None,
    first_token: int | None,
    call: Call,
    segment: int,
) -> Layout:
    """The Layout of this rank's tokens."""
    own = OwnTokens(q.shape[0], q.shape[1], cu_seqlens, first_token, call.zigzag)
    return find_layout(comm, own, segment, aligned=bool(call.invariant))
