"""zeco_ssd: the state space duality of Mamba2 over a sequence that is sharded across the ranks of a communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...base.autograd import Operator, Passes, check_saveable, reject_second_derivative, watched
from ...base.checks import (
    call_key,
    check_halves,
    check_restored,
    check_tensor,
    checked_first_token,
    integer,
    plain_or_traced,
    saved_tensor_error,
    signature_of,
    zigzag_of,
)
from ...base.errors import DeferredError
from ...base.tiling import cdiv, multiprocessors
from ...bindings.torch_compat import num_dispatch_modes, recorded, without_dispatch_modes
from ...comm.backwards import saved_tensors
from ...comm.communicator import Communicator, check_communicator
from ...launch.compiled_kernel import dynamo_disabled
from ...launch.plan import Plan
from ...tokens.packing import CHUNK_TOKENS, GRID_LIMIT, Layout, carried_states, own_boundaries
from ...tokens.partition import OwnTokens, check_packed, compare_values, find_layout
from ..allscan import check_final, final_of_all
from ..carrier import AllScanCarrier, InOrderCarrier, StateCarrier, carrier_of, check_cut, check_invariant
from ..first_call import check_gates, common_fields, looks_at_gates
from .ssd_plans import Inputs, SSDShape, Steps, backward_plan, forward_plan, shape_of, strides_of

SAVED_DTYPE = torch.int32  # of the saved buffer: integers, so that a saved_tensors_hook does not treat it as floats
MOST_ROWS = 256  # of a state: N
OPTIONAL = "D", "z", "dt_bias"


@dynamo_disabled
def zeco_ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    *,
    comm: Communicator,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool | str = False,
    first_token: int | None = None,
    layout: str = "contiguous",
    per_document: bool = False,
    invariant: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba2's scan (SSD) over a sharded sequence; each rank holds consecutive tokens, in rank order.

        d_t = clamp(dt_t + dt_bias, *dt_limit), or clamp(softplus(dt_t + dt_bias), *dt_limit) with dt_softplus
        S_t = exp(d_t A) S_{t-1} + d_t x_t^T B_t,     y_t = S_t C_t + D x_t,  times silu(z_t) if z is given

    The arguments are those of ``mamba_ssm``'s ``mamba_chunk_scan_combined``, with comm= in addition.

    The function is differentiable in all tensors; the gradients of A, D and dt_bias are this rank's contribution.
    Forward runs one scan over the ranks; backward runs one scan in reverse. Each scan sends one state of B * H * P * N
    float32 words from each rank to the next, overlapped with the kernels that need no remote data. Decays are exact for
    every d_t A from 0 to -inf. Kernels read x, dt, B, C and z by their strides: columns of a larger contiguous tensor,
    such as the output of one convolution, are not copied.

    Args:
        x: [B, T, H, P], this rank's T tokens; bfloat16, float16 or float32. T may differ between ranks and may be 0;
            all other dimensions and options must be equal on all ranks unless stated otherwise.
        dt: [B, T, H].
        A: [H], at most 0. A positive A and NaN in A or dt are detected at the first call for a shape and in debug mode
            only, because the check synchronizes with the GPU.
        B, C: [B, T, G, N], one for each group of H / G heads; N is at most 256.
        D: [H] or [H, P].
        z: like x.
        dt_bias: [H]. dt, A, B, C, D, z and dt_bias may have any float dtypes of at most 32 bits. Products are computed
            in bfloat16 if x, B and C all are bfloat16, else in float32 (three TF32 parts).
        chunk_size: an integer for the arguments of ``mamba_ssm``, without effect; it may differ between ranks.
        dt_softplus, dt_limit: equal on all ranks.
        dt_limit: lower and upper bound of d_t, the lower one at least 0.
        initial_states: [B or number of sequences, H, P, N] float32, equal on all ranks. Its gradient is non-zero only
            on the rank with a sequence's first token; without cu_seqlens, on the first rank.
        return_final_states: whether to return each sequence's state after its last token. Each rank may choose for
            itself, except that "all" is for all ranks or none: see output_final_state of ``allscan.zeco_gla``.
        cu_seqlens, first_token, layout, per_document, comm: as in ``allscan.zeco_gla``; in place of ``seq_idx``.
        invariant: as in ``allscan.zeco_gla``: results, and gradients except those of A, D and dt_bias, are bitwise
            equal for every number of ranks. Cost: one call of the chunk scan for each segment and batch entry.

    Returns:
        y [B, T, H, P] like x; with return_final_states (y, final_states). final_states [B or number of sequences, H, P,
        N] float32 is valid on the rank with the sequence's last token, without cu_seqlens on the last rank; it is zero
        on the other ranks.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: shapes, device or cu_seqlens are wrong, or A is positive.
        RuntimeError: as ``allscan.allscan``, whose other errors are raised too; each before anything is launched.

    Example:
        >>> y = allscan.zeco_ssd(x, dt, A, B, C, 256, D=D, dt_bias=bias, dt_softplus=True, comm=comm)

    Source:
        Mamba2, arXiv 2405.21060; ZeCO, arXiv 2507.01004.
    """
    check_communicator(comm)
    of_all = False
    if isinstance(return_final_states, str):
        of_all = return_final_states = check_final(return_final_states, comm, "return_final_states")
    invariant = comm.invariant if invariant is None else invariant
    carrier = InOrderCarrier.of(comm) if invariant else AllScanCarrier.of(comm)
    tensors = x, dt, A, B, C, D, z, dt_bias, initial_states
    where = cu_seqlens, first_token, layout, per_document
    asked = _CallOptions(chunk_size, dt_softplus, dt_limit, return_final_states, *where, invariant, of_all)
    y, final = _call(carrier, tensors, asked)  # type: tuple[Tensor, Any]
    if final is None:
        return y
    if not of_all:
        return y, final
    return final_of_all(y, final, comm, cu_seqlens is not None and not per_document, layout == "zigzag")


class _CallOptions(NamedTuple):
    """Unchecked options of a call, as the caller passes them: see ``zeco_ssd``."""

    chunk_size: Any
    softplus: Any
    limit: Any
    final: bool
    cu_seqlens: Any
    first_token: int | None
    layout: str
    per_document: bool
    invariant: int
    of_all: bool


class Options(NamedTuple):
    """Checked options of a call, without its tensors. zigzag: see zigzag_of. of_all: see final_of_all."""

    softplus: bool = False
    least: float = 0.0
    most: float = float("inf")
    first_token: int | None = None
    zigzag: int = 0
    invariant: int = 0
    of_all: bool = False

    @property
    def steps(self) -> Steps:
        return Steps(self.softplus, self.least, self.most)


def _call(carrier: StateCarrier, tensors: tuple, asked: _CallOptions) -> tuple[Tensor, Tensor | None]:
    """Run ``zeco_ssd``; return (y, final states or None)."""
    comm = carrier.comm
    if torch.compiler.is_compiling() or (num_dispatch_modes() and recorded()):
        return _traced_call(carrier, tensors, asked.final, *_checked(carrier, tensors, asked))
    with comm.call(False, "zeco_ssd", tensors):
        key = call_key(tensors)
        differentiable = bool(key[-1])  # 2: there are inference tensors, which torch cannot save (see call_key)
        # calls that need all checks bypass the cache
        known = (
            asked.cu_seqlens is None
            and asked.first_token is None
            and not (comm.debug or asked.per_document)
            and type(asked.chunk_size) is type(asked.invariant) is int
            and type(asked.softplus) is bool
            and type(asked.limit) is tuple
            and {*map(type, asked.limit)} <= {int, float}
            and type(asked.layout) is str
            and key[-1] != 2
            and num_dispatch_modes() == 0
        )
        key = key, asked if known else None, type(carrier), carrier.handle
        prepared = comm.calls.get(key) if known else None
        if prepared is None:
            cu_seqlens, options = _checked(carrier, tensors, asked)
            if watched((*tensors, cu_seqlens)):
                return _traced_call(carrier, tensors, asked.final, cu_seqlens, options)
            prepared = _prepare(carrier, tensors, cu_seqlens, options)
            if known:
                comm.calls.remember(key, prepared)
        else:
            cu_seqlens = None
        if differentiable:
            return _operator.eager((prepared, (cu_seqlens, asked.final)), *tensors)
        y, final, _ = prepared.forward(*tensors, cu_seqlens, asked.final)
        return y, final


def _checked(carrier: StateCarrier, tensors: Sequence[Tensor], asked: _CallOptions) -> tuple[Tensor | None, Options]:
    """Run the checks that need no other rank; return (cu_seqlens, Options)."""
    deferred, cu_seqlens, boundaries = None, None, asked.cu_seqlens
    try:
        zigzag = zigzag_of(asked.layout, asked.per_document, boundaries)
        cu_seqlens = None if boundaries is None else own_boundaries(boundaries)
        first_token = checked_first_token(asked.first_token, cu_seqlens)
        for name, x in zip((*Inputs._fields, "initial_states"), tensors, strict=True):
            if (x is not None or name not in (*OPTIONAL, "initial_states")) and not torch.compiler.is_compiling():
                check_tensor(name, x, None, carrier.comm.device, None)
        integer("chunk_size", asked.chunk_size)
        check_saveable((*tensors, cu_seqlens), tensors)
        limit = asked.limit
        if len(limit) != 2 or not 0 <= limit[0] <= limit[1]:
            raise ValueError(f"dt_limit must be two numbers that rise from at least 0, got {limit}")
        least, most = map(float, limit)
        invariant = check_invariant(carrier.comm, asked.invariant, zigzag)
    except (TypeError, ValueError) as error:
        deferred = DeferredError(error)
    if deferred is not None:
        carrier.prepare(None, deferred=deferred)  # raises the error, at a first call on all ranks
    compare_values(carrier.comm, boundaries, cu_seqlens)
    return cu_seqlens, Options(bool(asked.softplus), least, most, first_token, zigzag, invariant, asked.of_all)


def _traced_call(
    carrier: StateCarrier, tensors: Sequence[Tensor | None], final: bool, cu_seqlens: Tensor | None, options: Options
) -> tuple[Tensor, Tensor | None]:
    """Call the custom operator."""
    y, final_states, _ = _operator.forward(*tensors, cu_seqlens, final, carrier.handle, *options)
    return y, final_states if final else None


class Prepared:
    """State of one call signature, as gla_operator.Prepared."""

    def __init__(
        self, carrier: StateCarrier, shape: SSDShape, layout: Layout, options: Options, saved_words: int
    ) -> None:
        self.carrier, self.shape, self.layout, self.options = carrier, shape, layout, options
        self.saved_words = saved_words
        scan = carrier.prepare((shape.carried * shape.H, shape.K, shape.V))
        self.fixed = carrier.handle, *options  # the operator's last inputs
        self.pending = partial(carrier.pending, scan, bool(shape.zigzag))
        self._states = shape.sequences, shape.H, shape.K, shape.V
        self._plans: dict[tuple, Plan] = {}

    def forward(self, *inputs: Any) -> tuple[Tensor, Any, Tensor]:
        """Run forward. ``inputs``: the operator's inputs before ``fixed``.

        Returns (y, final states or None, the buffer of Shape.saved_sizes)."""
        *tensors, initial, _, final = inputs
        x = tensors[0]
        final_states = x.new_zeros(self._states, dtype=torch.float32) if final else None
        saved_buffer = x.new_empty(self.saved_words, dtype=SAVED_DTYPE)
        rest = _turned(initial), final_states, saved_buffer
        (y,) = self._run(forward_plan, tensors, rest)
        final_states = _turned(final_states)
        if self.carrier.comm.debug:
            self.carrier.comm._look_for_nan("zeco_ssd", y=y, final_states=final_states)
        return y, final_states, saved_buffer

    def backward(
        self, dy: Tensor, dfinal: Tensor | None, tensors: Sequence[Any], saved_buffer: Tensor, initial: bool
    ) -> tuple[Tensor | None, ...]:
        """Run backward; return the gradients of ``tensors`` (Inputs; None for None) and of initial_states or None."""
        dinitial = dy.new_zeros(self._states, dtype=torch.float32) if initial else None
        found = iter(self._run(backward_plan, tensors, (dy, _turned(dfinal), dinitial, saved_buffer)))
        grads = [None if x is None else next(found) for x in tensors]
        dinitial = _turned(dinitial)
        if self.carrier.comm.debug:
            named = {f"d{name}": x for name, x in zip(Inputs._fields, grads, strict=True)}
            self.carrier.comm._look_for_nan("zeco_ssd's backward", **named, dinitial_states=dinitial)
        return *grads, dinitial

    def saved_specs(self, tensors: Sequence[Any]) -> list:
        """Return (dtype, shape, device) of what autograd saves (Inputs, those that are not None; the saved buffer), and
        of dy."""
        shape, device = self.shape, self.carrier.comm.device
        x, B = (torch.Size((shape.B, shape.T, *rest)) for rest in ((shape.H, shape.V), (shape.G, shape.K)))
        shapes = dict(x=x, dt=x[:3], A=x[2:3], B=B, C=B, D=x[2:3], z=x, dt_bias=x[2:3])
        specs = [
            (t.dtype, x[2:] if name == "D" and t.ndim == 2 else shapes[name], device)
            for name, t in zip(Inputs._fields, tensors, strict=True)
            if t is not None
        ]
        specs[0], specs[1] = (shape.dtype, x, device), (shape.gate_dtype, x[:3], device)
        return [*specs, (SAVED_DTYPE, torch.Size((self.saved_words,)), device), (shape.dtype, x, device)]

    def _run(self, make: Callable[..., Plan], tensors: Sequence[Any], rest: tuple[Tensor | None, ...]) -> list[Tensor]:
        """Run the plan of a pass, which ``make`` makes."""
        self.layout.use(self.carrier.comm)
        taken, strides = strides_of(tensors)
        variant = make, strides, tuple(x is None for x in rest)
        plan = self._plans.get(variant)
        if plan is None:
            shape, layout, options = self.shape, self.layout, self.options
            kinds = tuple(None if x is None else (x.shape, x.dtype) for x in tensors)
            key = type(self.carrier), self.carrier.handle, shape, options, kinds, *variant
            alike = "zeco_ssd", shape.B, shape.G, str(shape.dtype), options.steps, options.of_all

            def new() -> Plan:
                same = layout.for_calls(*alike)
                return make(shape, options.steps, strides, same, self.carrier, *taken, *rest)

            plan = layout.derived(key, new)
            self._plans[variant] = plan
        return plan.run(self.carrier, *[x for x in (*taken, *rest) if x is not None])


def _turned(states: Tensor | None) -> Any:
    """[..., P, N] as [..., N, P], or the other way; contiguous."""
    return None if states is None else states.resolve_neg().mT.contiguous()


def check_tensors(tensors: Sequence[Any], cu_seqlens: Tensor | None, comm: Communicator, zigzag: int) -> None:
    """Raise TypeError or ValueError for arguments that are wrong on this rank."""
    named = dict(zip(Inputs._fields, tensors))
    x, B, D, initial = named["x"], named["B"], named["D"], tensors[-1]
    for name, t in named.items():
        if t is not None and t.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise TypeError(f"{name} must be bfloat16, float16 or float32, got {t.dtype}")
    if x.ndim != 4 or B.ndim != 4 or 0 in (*x.shape[:1], *x.shape[2:], *B.shape[2:]):
        shapes = f"{tuple(x.shape)}, {tuple(B.shape)}"
        raise ValueError(f"x must be [B, T, H, P] and B [B, T, G, N] with no empty dimension but T, got {shapes}")
    (batch, T, H, P), (G, N) = x.shape, B.shape[2:]
    if H % G:
        raise ValueError(f"the {H} heads of x must be a multiple of the {G} groups of B")
    wanted = dict(dt=(batch, T, H), A=(H,), B=(batch, T, G, N), C=(batch, T, G, N), z=(batch, T, H, P), dt_bias=(H,))
    for name, shape in wanted.items():
        if named[name] is not None and named[name].shape != shape:
            why = f"{name} must be {list(shape)}, got {list(named[name].shape)}"
            head_first = name == "A" and named[name].shape == (T,)
            raise ValueError(why + f": is x, {list(x.shape)}, [B, H, T, P] in place of [B, T, H, P]?" * head_first)
    if D is not None and D.shape not in ((H,), (H, P)):
        raise ValueError(f"D must be {[H]} or {[H, P]}, got {list(D.shape)}")
    if N > MOST_ROWS:
        raise ValueError(f"N must be at most {MOST_ROWS}, got {N}")
    if batch * cdiv(T, CHUNK_TOKENS) > GRID_LIMIT:
        raise ValueError(f"B * T must be at most {GRID_LIMIT:,} chunks of {CHUNK_TOKENS} tokens, got {tuple(x.shape)}")
    if zigzag:
        check_halves(T)
    if cu_seqlens is not None and batch != 1:
        raise ValueError(f"cu_seqlens must be [N + 1] with B = 1, got {tuple(cu_seqlens.shape)}, B = {batch}")
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    states = carried_states(batch, sequences, zigzag) * (1 + bool(zigzag))
    if states * H > GRID_LIMIT:
        raise ValueError(f"the states of {states} sequences or halves times H must be at most {GRID_LIMIT:,}")
    if initial is not None:
        check_tensor("initial_states", initial, (sequences, H, P, N), comm.device)


def _carried_shape(x: Tensor, B: Tensor, cu_seqlens: Tensor | None, zigzag: int) -> tuple[int, int, int]:
    """Return the shape (states * H, N, P) of the data that a rank sends."""
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return carried_states(x.shape[0], sequences, zigzag) * x.shape[2], B.shape[3], x.shape[3]


def _prepare(
    carrier: StateCarrier, tensors: Sequence[Any], cu_seqlens: Tensor | None, options: Options, traced: bool = False
) -> Prepared:
    """Run the remaining checks; return the Prepared. The first call for a signature checks the tensors and compares
    its arguments with those of the other ranks. traced: for a call of the custom operator."""
    comm, (x, dt, A, B, C, *optional, initial) = carrier.comm, tensors
    softplus, least, most, first_token, zigzag, invariant, of_all = options
    are_none = initial is None, cu_seqlens is None, first_token is None
    sequences = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    by = type(carrier), carrier.handle
    rest = first_token is None, zigzag, *options.steps, invariant, of_all
    signature = "zeco_ssd", signature_of(*tensors), sequences, rest, by
    if comm.debug or signature not in comm.checked:
        deferred, shape, agree, values_checked = None, None, None, False
        try:
            if x.ndim == B.ndim == 4:
                shape = _carried_shape(x, B, cu_seqlens, zigzag)
                absent = tuple((f"{name} is None", t is None) for name, t in zip(OPTIONAL, optional, strict=True))
                how = ("dt_softplus", softplus), ("dt_limit", (least, most))
                common = common_fields(x.shape[0], x.dtype, 1.0, zigzag, *are_none)
                last = ("invariant", invariant), ("return_final_states is 'all'", of_all)
                agree = "zeco_ssd", ("groups", B.shape[2]), *common, *absent, *how, *last
            check_tensors(tensors, cu_seqlens, comm, zigzag)
            check_cut(comm, x.shape[1], invariant, zigzag)
            check_packed(comm, cu_seqlens, x.shape[1], first_token, zigzag)
            values_checked = looks_at_gates(comm, shape, agree)
            if values_checked:
                with torch.no_grad(), without_dispatch_modes():  # selective checkpointing does not check again
                    check_gates("A", A[None, None])
                    d = dt.float() if optional[-1] is None else dt.float() + optional[-1].float()
                    d = (F.softplus(d) if softplus else d).clamp(least, most)
                    check_gates("dt * A", torch.where(d == 0, 0.0, A.float() * d))
        except (TypeError, ValueError) as error:
            deferred = DeferredError(error)
        carrier.prepare(shape, agree, deferred, first_call_only=values_checked)
        comm.checked.remember(signature)
    return _find(carrier, _shape(x, dt.dtype, B, C, cu_seqlens, options), cu_seqlens, options, traced)


def _find(
    carrier: StateCarrier, shape: SSDShape, cu_seqlens: Tensor | None, options: Options, traced: bool
) -> Prepared:
    """Return the Prepared of checked tensors. traced: as in gla_operator._find."""
    own = OwnTokens(shape.B, shape.T, cu_seqlens, options.first_token, options.zigzag)
    layout = find_layout(carrier.comm, own, shape.segment, aligned=bool(shape.invariant))
    every_cut = traced or cu_seqlens is None
    words = shape.saved_words if every_cut else sum(shape.saved_sizes(layout.num_segments, layout.num_chunks))
    return Prepared(carrier, shape, layout, options, words)


def _shape(
    x: Tensor,
    dt_dtype: torch.dtype,
    B: Tensor,
    C: Tensor,
    cu_seqlens: Tensor | None,
    options: Options,
    make: Callable[..., SSDShape] = shape_of,
) -> SSDShape:
    """Return the SSDShape of a call."""
    (batch, T, H, P), (G, N) = x.shape, B.shape[2:]
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    is_bf16 = x.dtype == B.dtype == C.dtype == torch.bfloat16
    how = x.device.type, options.zigzag, multiprocessors(x.device), False, options.invariant
    return make(batch, T, H, N, P, sequences, x.dtype, dt_dtype, *how, G, is_bf16)


def _ends(x: Tensor, wanted: bool, shape: SSDShape) -> Tensor | None:
    """Return zeros [sequences, H, P, N], or None if not ``wanted``."""
    return x.new_zeros((shape.sequences, shape.H, shape.V, shape.K), dtype=torch.float32) if wanted else None


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    *tensors, initial, cu_seqlens, _, handle = inputs[:12]
    options = inputs[12:]
    ctx.save_for_backward(*tensors, cu_seqlens, output[2])
    ctx.rest = initial is not None and initial.requires_grad, handle, *options


def _pending(*inputs: Any) -> list:
    """Return the PendingBackward records of a call of the custom operator."""
    x, B, cu_seqlens, handle = inputs[0], inputs[3], inputs[9], inputs[11]
    options = Options(*inputs[12:])
    carrier = carrier_of(handle, options.invariant)
    shape = _carried_shape(x, B, cu_seqlens, options.zigzag)
    return carrier.pending(carrier.prepare(shape), bool(options.zigzag))


def _gradient(backward: Callable[..., Any], ctx: Any, dy: Tensor, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of Inputs and of initial_states."""
    for pending in ctx.pending:
        pending.run()
    comm = lambda: carrier_of(ctx.rest[1]).comm  # noqa: E731
    *tensors, cu_seqlens, saved_buffer = saved_tensors(ctx, comm, True)
    x = tensors[0]
    dy = torch.zeros_like(x, memory_format=torch.contiguous_format) if dy is None else dy
    dy, dfinal = plain_or_traced(dy, dfinal)
    *grads, dinitial = backward(dy, dfinal, *tensors, cu_seqlens, saved_buffer, *ctx.rest)
    return *[None if t is None else g for t, g in zip(tensors, grads)], dinitial if ctx.rest[0] else None


def _run_backward(prepared: Prepared | None, *inputs: Any) -> tuple[Any, ...]:
    """Check the restored tensors and run backward. ``inputs``: the inputs of ``_backward``."""
    dy, dfinal, *tensors, cu_seqlens, saved_buffer = inputs[:12]
    initial, handle, *rest = inputs[12:]
    options = Options(*rest)
    carrier = carrier_of(handle, options.invariant) if prepared is None else prepared.carrier
    with carrier.comm.call(True, "the backward of zeco_ssd", (dy, dfinal)):
        reject_second_derivative("zeco_ssd")
        x, B = tensors[0], tensors[3]
        if x.ndim != 4 or B.ndim != 4:
            name = "x" if x.ndim != 4 else "B"
            raise saved_tensor_error("zeco_ssd", name, tensors[Inputs._fields.index(name)], "four dimensions")
        if prepared is None:
            shape = _shape(x, tensors[1].dtype, B, tensors[4], cu_seqlens, options)
            packed = cu_seqlens is not None and saved_buffer.shape != (shape.saved_words,)  # saved by an eager call
            prepared = _find(carrier, shape, cu_seqlens, options, traced=not packed)
        named = [(name, t) for name, t in zip(Inputs._fields, tensors, strict=True) if t is not None]
        names = " ".join([name for name, _ in named] + ["saved_buffer", "dy"])
        restored = [*(t for _, t in named), saved_buffer, dy]
        check_restored("zeco_ssd", names, restored, prepared.saved_specs(tensors))
        (saved_buffer,) = plain_or_traced(saved_buffer)
        if saved_buffer.data_ptr() % 16:  # kernels need 16-byte alignment; a caller's hook may return other memory
            saved_buffer = saved_buffer.clone()
        return prepared.backward(dy, dfinal, tensors, saved_buffer, initial)


# The custom operator, which torch.compile traces


def _forward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
    cu_seqlens: Tensor | None,
    final: bool,
    handle: int,
    softplus: bool,
    least: float,
    most: float,
    first_token: int | None = None,
    zigzag: int = False,
    invariant: int = 0,
    of_all: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    carrier, tensors = carrier_of(handle, invariant), (x, dt, A, B, C, D, z, dt_bias, initial_states)
    with carrier.comm.call(False, "zeco_ssd", tensors):
        options = Options(softplus, least, most, first_token, zigzag, invariant, of_all)
        prepared = _prepare(carrier, tensors, cu_seqlens, options, traced=True)
        return prepared.forward(*tensors, cu_seqlens, final)


def _fake(*inputs: Any) -> tuple[Tensor | None, ...]:
    x, dt, _, B, C = inputs[:5]
    cu_seqlens, final, _, *options = inputs[9:]
    shape = _shape(x, dt.dtype, B, C, cu_seqlens, Options(*options), SSDShape)
    return x.new_empty(x.shape), _ends(x, final, shape), x.new_empty(shape.saved_words, dtype=SAVED_DTYPE)


def _backward(
    dy: Tensor,
    dfinal: Tensor | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: Tensor,
    initial: bool,
    handle: int,
    softplus: bool,
    least: float,
    most: float,
    first_token: int | None = None,
    zigzag: int = False,
    invariant: int = 0,
    of_all: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    rest = softplus, least, most, first_token, zigzag, invariant, of_all
    tensors = x, dt, A, B, C, D, z, dt_bias
    return _run_backward(None, dy, dfinal, *tensors, cu_seqlens, saved, initial, handle, *rest)  # type: ignore[return-value]


def _fake_backward(*inputs: Any) -> tuple[Tensor | None, ...]:
    tensors, (cu_seqlens, _, initial, _, *options) = inputs[2:10], inputs[10:]
    x, dt, _, B, C, *_ = tensors
    dinitial = _ends(x, initial, _shape(x, dt.dtype, B, C, cu_seqlens, Options(*options), SSDShape))
    return *(t if t is None else t.new_empty(t.shape) for t in tensors), dinitial


_passes = Passes(_forward, _fake, _backward, _fake_backward)
_operator = Operator("allscan::zeco_ssd", _passes, _setup_context, _gradient, _pending, _run_backward)
