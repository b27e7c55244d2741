"""zeco_gla: gated linear attention over a sequence that is sharded across the ranks of a communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...base.autograd import (
    Operator,
    Passes,
    check_saveable,
    reject_second_derivative,
    wants_gradient,
    watched,
)
from ...base.checks import (
    call_key,
    check_for_an_operator,
    check_halves,
    check_tensor,
    checked_first_token,
    plain_or_traced,
    restored,
    saved_tensor_error,
    signature_of,
    zigzag_of,
)
from ...base.errors import DeferredError
from ...base.tiling import cdiv, multiprocessors
from ...bindings.torch_compat import num_dispatch_modes, recorded
from ...comm.backwards import saved_tensors
from ...comm.communicator import Communicator, check_communicator
from ...launch.plan import Plan
from ...tokens.packing import CHUNK_TOKENS, GRID_LIMIT, Layout, carried_states, own_boundaries
from ...tokens.partition import OwnTokens, check_packed, compare_values, find_layout
from ..allscan import check_final, final_of_all
from ..carrier import AllScanCarrier, InOrderCarrier, StateCarrier, carrier_of, check_cut, check_invariant
from ..first_call import FINAL_OF_ALL, FirstCall, check_first, common_fields, look_for_head_first
from .gla_plans import Shape, backward_plan, forward_plan, shape_of

SAVED_DTYPE = torch.int32  # of the saved buffer: integers, so that a saved_tensors_hook does not treat it as floats


def zeco_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    comm: Communicator,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | str = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    first_token: int | None = None,
    layout: str = "contiguous",
    per_document: bool = False,
    recompute: bool = True,
    invariant: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention over a sharded sequence; each rank holds consecutive tokens, in rank order.

        S_0 = initial_state (or 0),   S_t = diag(exp(g_t)) S_{t-1} + k_t^T v_t,   o_t = scale * q_t S_t

    The function is differentiable in q, k, v, g and initial_state. Forward runs one scan over the ranks; backward runs
    one scan in reverse. Each scan sends one state of B*H*K*V float32 words from each rank to the next, overlapped with
    the kernels that need no remote data. The result is ready on the current stream; the host does not wait. All ranks
    must make the same calls in the same order, forward and backward; activation checkpointing keeps that order.
    torch.compile traces the call as one custom operator. The first call for a shape, or for a cu_seqlens, is collective
    on the host and must come before a CUDA graph's capture.

    Args:
        q, k, v: [B, T, H, K] (v: V), this rank's T tokens; bfloat16, float16 or float32, one dtype for all three. K is
            at most 512. T may differ between ranks and between calls, and may be 0: such a rank forwards the incoming
            state. B, H, K and V must be equal on all ranks. A rank has at most 65,535 chunks of 64 tokens in its
            B * T tokens; the last chunk of each sequence on the rank counts as full.
        g: [B, T, H, K], natural logarithm of the decay, at most 0 (-inf is exact); float32, or q's dtype. Positive and
            NaN gates are detected at the first call for a shape and in debug mode only, because the check
            synchronizes with the GPU.
        comm: the communicator.
        scale: factor of the output, finite and not 0, K ** -0.5 by default; equal on all ranks.
        initial_state: [B or N, H, K, V] float32, equal on all ranks: each sequence's state before its first token.
            Its gradient is non-zero only on the rank with this token; without cu_seqlens, on the first rank.
        output_final_state: whether to return each sequence's state after its last token. Each rank may choose for
            itself. "all", on all ranks or on none: every rank gets the final state, to decode after a sharded prefill.
            One more scan, with cu_seqlens two for every 8 sequences, sends it from its rank to the others; its gradient
            is the sum over the ranks.
        cu_seqlens: packed sequences, B = 1: integers [N + 1] rising from 0 to the number of tokens of *all* ranks;
            sequence i has tokens cu_seqlens[i] .. cu_seqlens[i + 1] - 1 of the row. Equal on all ranks; a tensor
            on the CPU or the GPU, or a list. Sequences may be empty and may span any number of ranks. A communicator
            binds a cu_seqlens to one partition: each rank must have the same T in every call with it. Backward uses
            the values from the time of the forward call. A tensor on the GPU is read once, which synchronizes, and
            again after a write that torch has counted. Do not change it in other ways (``.data``, other code's
            kernels, a CUDA graph's replay); do not change a tensor from torch.inference_mode at all. Debug mode
            detects such changes. In a CUDA graph's capture, pass a list or a CPU tensor.
        first_token: with cu_seqlens, the position of this rank's first token in the global sequence, on all ranks or on
            none. A new cu_seqlens then needs no exchange on the host, and its partition may change between calls. The
            caller guarantees that the ranks' tokens are contiguous; debug mode checks it.
        layout: "contiguous", or "zigzag", the layout that balances causal softmax attention: the row is split into 2P
            chunks; rank r has chunk r in the first half of its T tokens and chunk 2P - 1 - r in the second. T is even.
            Two states are sent instead of one: the state of the first halves in an ascending scan, then the state of
            the second halves in a descending scan. first_token is the position of the first half; rank 0 has
            final_state.
        per_document: for packed sequences in the zigzag layout; equal on all ranks. False: the whole row is split,
            wherever sequences begin. True: each sequence is split into 2P chunks of its own, and rank r has chunks r
            and 2P - 1 - r of each, one sequence after the other (``allscan.zigzag.zigzag_positions``): each length is
            a multiple of 2P, T is 1 / P of the row on every rank, and first_token is r T / 2. An ascending and a
            descending scan then send the states of all N sequences; N, rounded up to a power of 2, is part of the
            shape.
        recompute: whether backward recomputes the decayed queries and keys and the scores inside the chunks. False:
            forward saves them for backward, about B * T * H * (4 * K + 256) bytes for bfloat16 inputs, 8 * K + 256 in
            place of 4 * K + 256 for others, and backward runs two kernels fewer. Without gradients nothing is saved in
            either case. Each rank may choose for itself.
        invariant: tokens of a segment, a multiple of 64 such as 2,048; equal on all ranks. The results of the call and
            of its backward are then bitwise equal for every number of ranks, one included, and for every partition
            whose boundaries are multiples of it (docs/invariant.md). 0: no such guarantee; the segment length is
            chosen for speed. Default: the communicator's value. Not with per_document.

    Returns:
        (o, final_state): o [B, T, H, V] like v; final_state [B or N, H, K, V] float32, or None. without
        cu_seqlens the last rank has it (zigzag: the first), also without tokens; with cu_seqlens the rank with the
        sequence's last token. Other ranks have zeros. With "all" every rank has it.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: shapes, device or cu_seqlens are wrong, or a gate is positive.
        RuntimeError, MemoryError, NotImplementedError, AllScanError: as ``allscan.allscan``.

    Example:
        >>> o, _ = allscan.zeco_gla(q, k, v, g, comm=comm)         # q[:, t0:t1], ... of the global sequence

    Source:
        ZeCO, arXiv 2507.01004, algorithms 1 and 2.
    """
    if type(comm) is not Communicator:
        check_communicator(comm)
    of_all = False
    if isinstance(output_final_state, str):
        of_all = output_final_state = check_final(output_final_state, comm)
    invariant = comm.invariant if invariant is None else invariant
    carrier = InOrderCarrier.of(comm) if invariant else comm.attributes.get("carrier") or AllScanCarrier.of(comm)
    asked = CallOptions(
        scale, output_final_state, cu_seqlens, first_token, layout, recompute, per_document, invariant, of_all
    )
    found = zeco_gla_by(carrier, (q, k, v, g, initial_state), asked)
    if not of_all:
        return found
    return final_of_all(*found, comm, cu_seqlens is not None and not per_document, layout == "zigzag")


class CallOptions(NamedTuple):
    """Unchecked options of a call, as the caller passes them: see ``zeco_gla``."""

    scale: float | None = None
    output_final_state: bool = False
    cu_seqlens: Tensor | Sequence[int] | None = None
    first_token: int | None = None
    layout: str = "contiguous"
    recompute: bool = True
    per_document: bool = False
    invariant: int = 0
    of_all: bool = False


class Options(NamedTuple):
    """Checked options of a call, without its tensors. zigzag: see zigzag_of. saves: forward saves the intermediates of
    the chunks for backward. of_all: see final_of_all."""

    scale: float
    first_token: int | None = None
    zigzag: int = 0
    saves: bool = False
    invariant: int = 0
    of_all: bool = False

    @property
    def of_shape(self) -> tuple[int, bool, int]:
        """The options that determine the Shape, for ``_shape``."""
        return self.zigzag, self.saves, self.invariant


def zeco_gla_by(carrier: StateCarrier, tensors: tuple, asked: CallOptions) -> tuple[Tensor, Tensor | None]:
    """Run ``zeco_gla`` on ``tensors`` (q, k, v, g, initial_state); ``carrier`` scans the state over the ranks."""
    comm, (scale, final, cu_seqlens, first, layout, recompute, per_document, invariant, of_all) = carrier.comm, asked
    if torch.compiler.is_compiling() or (num_dispatch_modes() and recorded()):
        saves = wants_gradient(tensors) and not recompute
        return _traced_call(carrier, tensors, final, *_checked(carrier, tensors, asked, saves))
    with comm.call(False, "zeco_gla", tensors):
        key = call_key(tensors)
        differentiable = bool(key[-1])  # 2: there are inference tensors, which torch cannot save (see call_key)
        saves = differentiable and not recompute
        # calls that need all checks bypass the cache: Decimal(1), an invalid scale, equals 1.0, and NaN equals nothing
        known = (
            cu_seqlens is None
            and first is None
            and not (comm.debug or per_document)
            and type(scale) in (float, int, type(None))
            and scale == scale
            and type(layout) is str
            and type(invariant) is int
            and key[-1] != 2
            and num_dispatch_modes() == 0
        )
        key = key, scale, layout, saves, invariant, of_all, type(carrier), carrier.handle
        prepared = comm.calls.get(key) if known else None
        if prepared is None:
            cu_seqlens, options = _checked(carrier, tensors, asked, saves)
            if watched((*tensors, cu_seqlens)):
                return _traced_call(carrier, tensors, final, cu_seqlens, options)
            prepared = _prepare(carrier, tensors, cu_seqlens, options)
            if known:
                comm.calls.remember(key, prepared)
        inputs = plain_or_traced(*tensors)
        if differentiable:
            return _operator.eager((prepared, (cu_seqlens, final)), *inputs)
        o, final_state, _ = prepared.forward(*inputs, cu_seqlens, final)
        return o, final_state


def _checked(
    carrier: StateCarrier, tensors: Sequence[Tensor], asked: CallOptions, saves: bool
) -> tuple[Tensor | None, Options]:
    """Run the checks that need no other rank; return (cu_seqlens, Options)."""
    scale, _, boundaries, first_token, layout, _, per_document, invariant, of_all = asked
    deferred, cu_seqlens = None, None
    try:
        zigzag = zigzag_of(layout, per_document, boundaries)
        check_for_an_operator(dict(zip(("q", "k", "v", "g", "initial_state"), tensors)), scale)
        cu_seqlens = None if boundaries is None else own_boundaries(boundaries)
        first_token = checked_first_token(first_token, cu_seqlens)
        check_saveable((*tensors, cu_seqlens), tensors)
        invariant = check_invariant(carrier.comm, invariant, zigzag)
    except (TypeError, ValueError) as error:
        deferred = DeferredError(error)
    if deferred is not None:
        carrier.prepare(None, deferred=deferred)  # raises the error, at a first call on all ranks
    compare_values(carrier.comm, boundaries, cu_seqlens)
    scale = tensors[0].shape[-1] ** -0.5 if scale is None else float(scale)
    return cu_seqlens, Options(scale, first_token, zigzag, saves, invariant, of_all)


def _traced_call(
    carrier: StateCarrier, tensors: Sequence[Tensor | None], final: bool, cu_seqlens: Tensor | None, options: Options
) -> tuple[Tensor, Tensor | None]:
    """Call the custom operator."""
    o, final_state, _ = _operator.forward(*plain_or_traced(*tensors), cu_seqlens, final, carrier.handle, *options)
    return o, final_state if final else None


class Prepared:
    """State of one call signature: shape, token layout and launch plans. The first call with the signature makes it;
    later calls find it by their cache key and skip all other checks.

    options: ``_find`` returns an equal object for them. saved_specs: see the function. pending: makes the
    communicator's PendingBackward records of an outstanding backward pass."""

    def __init__(self, carrier: StateCarrier, shape: Shape, layout: Layout, options: Options, saved_words: int) -> None:
        self.carrier, self.shape, self.layout, self.options = carrier, shape, layout, options
        self.saved_words, self.saved_specs = saved_words, saved_specs(shape, carrier.comm.device, saved_words)
        scan = carrier.prepare((shape.carried * shape.H, shape.K, shape.V))
        self.fixed = carrier.handle, *options  # the operator's last inputs
        self.pending = partial(carrier.pending, scan, bool(shape.zigzag))
        self._states = shape.sequences, shape.H, shape.K, shape.V
        self._plans: dict[tuple, Plan] = {}  # by variant of the pass, see _run

    def forward(self, *inputs: Any) -> tuple[Tensor, Any, Tensor]:
        """Run forward. ``inputs``: the operator's inputs before ``fixed``.

        Returns (o, final_state or None, the buffer of Shape.saved_sizes)."""
        q, k, v, g, initial_state, _, final = inputs
        final_state = q.new_zeros(self._states, dtype=torch.float32) if final else None
        saved_buffer = q.new_empty(self.saved_words, dtype=SAVED_DTYPE)
        variant = forward_plan, initial_state is None, final_state is None
        (o,) = self._run(variant, q, k, v, g, initial_state, final_state, saved_buffer)
        if self.carrier.comm.debug:
            self.carrier.comm._look_for_nan("zeco_gla", o=o, final_state=final_state)
        return o, final_state, saved_buffer

    def backward(
        self, do: Tensor, dfinal: Tensor | None, saved: Sequence[Tensor], initial: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Run backward; return (dv, dq, dk, dg, dinitial_state or None)."""
        q, k, v, g, saved_buffer = saved
        dinitial = q.new_zeros(self._states, dtype=torch.float32) if initial else None
        variant = backward_plan, dfinal is None, dinitial is None
        dv, dq, dk, dg = self._run(variant, q, k, v, g, do, dfinal, dinitial, saved_buffer)
        if self.carrier.comm.debug:
            named = dict(dq=dq, dk=dk, dv=dv, dg=dg, dinitial_state=dinitial)
            self.carrier.comm._look_for_nan("zeco_gla's backward", **named)
        return dv, dq, dk, dg, dinitial

    def _run(self, variant: tuple, *tensors: Tensor | None) -> list[Tensor]:
        """Run the plan of a pass. ``variant``: the function that makes the plan; which optional tensors are None."""
        self.layout.use(self.carrier.comm)
        plan = self._plans.get(variant)
        if plan is None:
            (make, *_), shape, layout, scale = variant, self.shape, self.layout, self.options.scale
            key = type(self.carrier), self.carrier.handle, shape, scale, self.options.of_all, *variant
            alike = "zeco_gla", shape.B, str(shape.dtype), scale, self.options.of_all
            plan = layout.derived(key, lambda: make(shape, scale, layout.for_calls(*alike), self.carrier, *tensors))
            self._plans[variant] = plan
        return plan.run(self.carrier, *[x for x in tensors if x is not None])


def check_tensors(tensors: Sequence[Any], cu_seqlens: Tensor | None, comm: Communicator, zigzag: int) -> None:
    """Raise TypeError or ValueError for arguments that are wrong on this rank."""
    q, k, v, g, initial_state = tensors
    names = dict(q=q, k=k, v=v, g=g)
    for name, x in names.items():
        if x.device != comm.device:
            raise ValueError(f"{name} must be on {comm.device}, got {x.device}")
        if x.ndim != 4 or 0 in (*x.shape[:1], *x.shape[2:]):
            last = "V" if name == "v" else "K"
            raise ValueError(f"{name} must be [B, T, H, {last}] with no empty dimension but T, got {tuple(x.shape)}")
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32) or not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k, v must be bfloat16, float16 or float32 alike, got {q.dtype}, {k.dtype}, {v.dtype}")
    if g.dtype not in (torch.float32, q.dtype):
        raise TypeError(f"g must be float32 or have the dtype of q, {q.dtype}, got {g.dtype}")
    if not q.shape == k.shape == g.shape or q.shape[:3] != v.shape[:3]:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in names.items())
        raise ValueError(f"q, k, g must be [B, T, H, K] and v [B, T, H, V], got {shapes}")
    if q.shape[0] * cdiv(q.shape[1], CHUNK_TOKENS) > GRID_LIMIT:
        raise ValueError(f"B * T must be at most {GRID_LIMIT:,} chunks of {CHUNK_TOKENS} tokens, got {tuple(q.shape)}")
    if zigzag:
        check_halves(q.shape[1])
    states = carried_states(q.shape[0], _state_shape(q, v, cu_seqlens)[0], zigzag) * (1 + bool(zigzag))
    if states * q.shape[2] > GRID_LIMIT:
        raise ValueError(f"the states of {states} sequences or halves times H must be at most {GRID_LIMIT:,}")
    if q.shape[-1] > 512:
        raise ValueError(f"K must be at most 512, got {q.shape[-1]}")
    if cu_seqlens is not None:
        if q.shape[0] != 1:
            raise ValueError(f"cu_seqlens must be [N + 1] with B = 1, got {tuple(cu_seqlens.shape)}, B = {q.shape[0]}")
    if initial_state is not None:
        check_tensor("initial_state", initial_state, _state_shape(q, v, cu_seqlens), comm.device)


def _carried_shape(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, zigzag: int) -> tuple[int, int, int]:
    """Return the shape (states * H, K, V) of the data that a rank sends."""
    sequences, H, K, V = _state_shape(q, v, cu_seqlens)
    return carried_states(q.shape[0], sequences, zigzag) * H, K, V


def _state_shape(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[int, int, int, int]:
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return sequences, q.shape[2], q.shape[3], v.shape[3]


def _prepare(
    carrier: StateCarrier, tensors: Sequence[Any], cu_seqlens: Tensor | None, options: Options, traced: bool = False
) -> Prepared:
    """Run the remaining checks; return the Prepared. The first call for a signature checks the tensors and compares
    its arguments with those of the other ranks. traced: for a call of the custom operator."""
    comm, (q, _, v, g, initial_state) = carrier.comm, tensors
    scale, first_token, zigzag, _, invariant, of_all = options
    are_none = initial_state is None, cu_seqlens is None, first_token is None
    sequences = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    by = type(carrier), carrier.handle
    signature = "zeco_gla", signature_of(*tensors), sequences, are_none, zigzag, scale, invariant, of_all, by
    if comm.debug or signature not in comm.checked:
        shape = agree = None
        if q.ndim == v.ndim == 4:
            shape = _carried_shape(q, v, cu_seqlens, zigzag)
            common = common_fields(q.shape[0], q.dtype, scale, zigzag, *are_none)
            agree = "zeco_gla", *common, ("invariant", invariant), (FINAL_OF_ALL, of_all)

        def check() -> None:
            check_tensors(tensors, cu_seqlens, comm, zigzag)
            check_cut(comm, q.shape[1], invariant, zigzag)
            check_packed(comm, cu_seqlens, q.shape[1], first_token, zigzag)
            if cu_seqlens is None:  # which would not fit the tokens of all ranks
                look_for_head_first(comm, "zeco_gla", q)

        check_first(comm, FirstCall(signature, shape, agree), check, g, carrier.prepare)
    return _find(carrier, _shape(q, v, g.dtype, cu_seqlens, options.of_shape), cu_seqlens, options, traced)


def _find(carrier: StateCarrier, shape: Shape, cu_seqlens: Tensor | None, options: Options, traced: bool) -> Prepared:
    """Return the Prepared of checked tensors. traced: for a call of the custom operator, whose saved buffer has the
    size for any number of pieces of packed sequences; otherwise it has that for this rank's pieces."""
    _, first_token, zigzag, *_ = options
    own = OwnTokens(shape.B, shape.T, cu_seqlens, first_token, zigzag)
    layout = find_layout(carrier.comm, own, shape.segment, aligned=bool(shape.invariant))
    every_cut = traced or cu_seqlens is None
    words = shape.saved_words if every_cut else sum(shape.saved_sizes(layout.num_segments, layout.num_chunks))
    return Prepared(carrier, shape, layout, options, words)


def saved_specs(shape: Shape, device: torch.device, saved_words: int) -> list:
    """Return (dtype, shape, device) of the tensors that autograd saves (q, k, v, g, the saved buffer) and of do."""
    keys, values = ((shape.B, shape.T, shape.H, width) for width in (shape.K, shape.V))
    specs: list[tuple[torch.dtype, tuple[int, ...]]] = [(shape.dtype, x) for x in (keys, keys, values)]
    specs += [(shape.gate_dtype, keys), (SAVED_DTYPE, (saved_words,)), (shape.dtype, values)]
    return [(dtype, torch.Size(x), device) for dtype, x in specs]


def _shape(
    q: Tensor,
    v: Tensor,
    gate_dtype: torch.dtype,
    cu_seqlens: Tensor | None,
    how: tuple[int, bool, int],
    make: Callable[..., Shape] = shape_of,
) -> Shape:
    """Return the Shape of a call. how: zigzag, saves and invariant of Options."""
    (B, T, H, K), sequences = q.shape, q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    (zigzag, *rest), device = how, v.device
    of_gpu = device.type, zigzag, multiprocessors(device)
    return make(B, T, H, K, v.shape[3], sequences, v.dtype, gate_dtype, *of_gpu, *rest)


def _ends(q: Tensor, wanted: bool, shape: Shape) -> Tensor | None:
    """Return zeros [sequences, H, K, V], or None if not ``wanted``."""
    return q.new_zeros((shape.sequences, shape.H, shape.K, shape.V), dtype=torch.float32) if wanted else None


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    q, k, v, g, initial_state, cu_seqlens, _, handle, *options = inputs
    ctx.save_for_backward(q, k, v, g, cu_seqlens, output[2])
    ctx.rest = initial_state is not None and initial_state.requires_grad, handle, g.dtype, *options


def _pending(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, *rest: Any
) -> list:
    """Return the PendingBackward records of a call of the custom operator."""
    _, handle, _, _, zigzag, _, invariant, _ = rest
    carrier = carrier_of(handle, invariant)
    return carrier.pending(carrier.prepare(_carried_shape(q, v, cu_seqlens, zigzag)), bool(zigzag))


def _gradient(backward: Callable[..., Any], ctx: Any, do: Tensor, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, g and initial_state."""
    for pending in ctx.pending:
        pending.run()
    q, k, v, g, cu_seqlens, saved_buffer = saved_tensors(ctx, lambda: carrier_of(ctx.rest[1]).comm, True)
    do, dfinal = plain_or_traced(torch.zeros_like(v) if do is None else do, dfinal)
    dv, dq, dk, dg, dinitial = backward(do, dfinal, q, k, v, g, cu_seqlens, saved_buffer, *ctx.rest)
    return dq, dk, dv, dg, dinitial if ctx.rest[0] else None


def _run_backward(prepared: Prepared | None, *inputs: Any) -> tuple[Any, ...]:
    """Check the restored tensors and run backward. ``inputs``: the inputs of ``_backward``."""
    do, dfinal, q, k, v, g, cu_seqlens, saved_buffer, initial, handle, gate_dtype, *rest = inputs
    options = Options(*rest)
    carrier = carrier_of(handle, options.invariant) if prepared is None else prepared.carrier
    with carrier.comm.call(True, "the backward of zeco_gla", (do, dfinal)):
        reject_second_derivative("zeco_gla")
        if q.ndim != 4:
            raise saved_tensor_error("zeco_gla", "q", q, "[B, T, H, K]")
        check = partial(restored, "zeco_gla", "q k v g saved_buffer do", (q, k, v, g, saved_buffer, do))
        if prepared is None:
            shape = _shape(q, do, gate_dtype, cu_seqlens, options.of_shape)
            packed = cu_seqlens is not None and saved_buffer.shape != (shape.saved_words,)  # saved by an eager call
            check(saved_specs(shape, carrier.comm.device, saved_buffer.numel() if packed else shape.saved_words))
            prepared = _find(carrier, shape, cu_seqlens, options, traced=not packed)
        q, k, v, g, saved_buffer, do = check(prepared.saved_specs)
        if saved_buffer.data_ptr() % 16:  # kernels need 16-byte alignment; a caller's hook may return other memory
            saved_buffer = saved_buffer.clone()
        return prepared.backward(do, dfinal, (q, k, v, g, saved_buffer), initial)


# The custom operator, which torch.compile traces


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    final: bool,
    handle: int,
    scale: float,
    first_token: int | None = None,
    zigzag: int = False,
    saves: bool = False,
    invariant: int = 0,
    of_all: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    carrier = carrier_of(handle, invariant)
    with carrier.comm.call(False, "zeco_gla", (q, k, v, g, initial_state)):
        options = Options(scale, first_token, zigzag, saves, invariant, of_all)
        prepared = _prepare(carrier, (q, k, v, g, initial_state), cu_seqlens, options, traced=True)
        return prepared.forward(q, k, v, g, initial_state, cu_seqlens, final)


def _fake(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    _, cu_seqlens, final, _, *options = rest
    shape = _shape(q, v, g.dtype, cu_seqlens, Options(*options).of_shape, Shape)
    return torch.empty_like(v), _ends(q, final, shape), q.new_empty(shape.saved_words, dtype=SAVED_DTYPE)


def _backward(
    do: Tensor,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    cu_seqlens: Tensor | None,
    saved: Tensor,
    initial: bool,
    handle: int,
    gate_dtype: torch.dtype,
    scale: float,
    first_token: int | None = None,
    zigzag: int = False,
    saves: bool = False,
    invariant: int = 0,
    of_all: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rest = scale, first_token, zigzag, saves, invariant, of_all
    return _run_backward(None, do, dfinal, q, k, v, g, cu_seqlens, saved, initial, handle, gate_dtype, *rest)


def _fake_backward(*inputs: Any) -> tuple[Tensor | None, ...]:
    _, _, q, k, v, g, cu_seqlens, _, initial, _, gate_dtype, *options = inputs
    dinitial = _ends(q, initial, _shape(q, v, gate_dtype, cu_seqlens, Options(*options).of_shape, Shape))
    return *(torch.empty_like(x) for x in (v, q, k, g)), dinitial


_passes = Passes(_forward, _fake, _backward, _fake_backward)
_operator = Operator("allscan::zeco_gla", _passes, _setup_context, _gradient, _pending, _run_backward)
