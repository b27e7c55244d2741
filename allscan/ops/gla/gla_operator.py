"""zeco_gla: gated linear attention over a sequence that is cut over the ranks of a communicator."""

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
    others_than_saved,
    own_place,
    plain_or_traced,
    restored,
    signature_of,
    zigzag_of,
)
from ...base.errors import DeferredError
from ...base.tiling import cdiv, multiprocessors
from ...bindings.torch_compat import num_dispatch_modes
from ...comm.backwards import saved_tensors
from ...comm.communicator import Communicator, check_communicator
from ...launch.plan import Plan
from ...tokens.packing import CHUNK_TOKENS, MOST_CHUNKS, Layout, carried_states, own_boundaries
from ...tokens.partition import OwnTokens, check_packed, compare_values, find_layout
from ..allscan import check_final, final_of_all
from ..carrier import AllScanCarrier, InOrderCarrier, StateCarrier, carrier_of, check_cut, check_invariant
from ..first_call import FINAL_OF_ALL, FirstCall, check_first, common_fields
from .gla_plans import Shape, backward_plan, forward_plan, shape_of

SAVED_DTYPE = torch.int32  # of the memory that backward takes from forward: to a hook of the caller's no floats


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
    """Gated linear attention with the sequence cut over the ranks; each rank holds consecutive tokens, in rank order.

        S_t = diag(exp(g_t)) S_{t-1} + k_t^T v_t,     o_t = scale * q_t S_t         for every sequence and head

    Differentiable in q, k, v, g and initial_state. One scan forward and one in reverse in backward, each moving one
    state of B*H*K*V float32 words from a rank to the next, while the kernels that need nothing remote run. The result
    is ready on the current stream; the host does not wait. All ranks make the same calls in the same order, forward and
    backward; activation checkpointing keeps that order. torch.compile takes it as a whole, a custom operator. The first
    call for a shape, or for a cu_seqlens, is collective on the host and must come before a CUDA graph's capture.

    Args:
        q, k, v: [B, T, H, K] (v: V), this rank's T tokens; bfloat16, float16 or float32, all three alike. K up
            to 512. T may differ between ranks, and from call to call, and be 0: such a rank passes on what comes. B, H,
            K and V may not differ. B * T of a rank at most 65,535 chunks of 64 tokens, a sequence's last one on the
            rank counting as whole.
        g: [B, T, H, K], natural logarithm of the decay, at most 0 (down to -inf is exact); float32, or like q. That no
            gate is positive or NaN is checked at the first call for a shape only, and in debug mode: looking waits for
            the GPU.
        comm: the ranks.
        scale: default K ** -0.5; the same on every rank.
        initial_state: [B or N, H, K, V] float32, the same on every rank: each sequence's state before its first token.
            Its gradient is non-zero on the rank that has this token, without cu_seqlens on the first rank.
        output_final_state: whether to return each sequence's state after its last token. Each rank may choose for
            itself. "all", on all ranks or on none: true on every rank, for decoding behind a split prefill. It goes
            from the rank that has it to the others, by one scan more, with cu_seqlens by two; its gradient is the sum
            over the ranks.
        cu_seqlens: packed sequences, B = 1: integers [N + 1] rising from 0 to the number of tokens of *all* ranks;
            sequence i has tokens cu_seqlens[i] .. cu_seqlens[i + 1] - 1 of the row. The same on every rank; a tensor
            on the CPU or the GPU, or a list. Sequences may be empty, and lie on any number of ranks. On one
            communicator a cu_seqlens has one split: each rank has the same T whenever it comes again. A call and its
            backward have the values of when it was made. A tensor on the GPU is read once, which waits for it, and
            again when torch has counted a write to it: do not change it in other ways (``.data``, other code's kernels,
            a CUDA graph's replay), and not at all if made in torch.inference_mode; debug mode compares. In a CUDA
            graph's capture it must be a list or on the CPU.
        first_token: with cu_seqlens, where in the global sequence this rank's tokens begin, on every rank or on none.
            Then a new cu_seqlens asks no other rank on the host, and need not come with the same partition again. That
            the ranks' tokens follow one another is the caller's word; debug mode compares it.
        layout: "zigzag" where the row is cut into 2P chunks and rank r has chunk r in the first half of its T tokens
            and chunk 2P - 1 - r in the second, as trainers have it that balance causal softmax attention. T is even.
            Two states are sent instead of one: that of the first halves in ascending order of ranks, then that of the
            second halves in descending order. first_token is that of the first half; final_state is rank 0's.
        per_document: of packed sequences in the zigzag layout, the same on every rank. False: the row of all is cut,
            wherever sequences begin. True: each sequence is cut into 2P chunks of its own, and rank r has chunks r and
            2P - 1 - r of each, one sequence after the other (``allscan.zigzag.zigzag_positions``): each length is
            a multiple of 2P, T is a P-th of the row on every rank, and first_token r T / 2. Then the states of all N
            sequences are sent, in an ascending and a descending scan: N rounded up to a power of 2, a shape of its own.
        recompute: whether backward makes the decayed queries and keys and the scores inside the chunks again. False:
            they are kept from forward, which takes about B * T * H * (4 * K + 256) bytes until backward for bfloat16
            inputs, 8 * K + 256 for others, and spares backward two kernels. Without gradients nothing is kept either
            way. Each rank may choose for itself.
        invariant: tokens of a segment, a multiple of 64 such as 2,048, the same on every rank: then all that the call
            and its backward return has the same bits for every number of ranks, one included, wherever they cut, at
            multiples of it (docs/invariant.md). 0: it has not, and the segments are as long as is fast. Default: the
            communicator's. Not with per_document.

    Returns:
        (o, final_state): o [B, T, H, V] like v; final_state [B or N, H, K, V] float32, true on the rank that has the
        sequence's last token, without cu_seqlens on the last rank, even if that has none, and zeros on the others, with
        "all" on every rank; or None.

    Raises:
        TypeError: dtypes.
        ValueError: shapes, device, cu_seqlens, a positive gate.
        RuntimeError: and whatever else ``allscan.allscan`` raises, before anything is launched.

    Example:
        >>> o, _ = allscan.zeco_gla(q, k, v, g, comm=comm)         # q[:, t0:t1], ... of the whole sequence

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
    asked = Asked(
        scale, output_final_state, cu_seqlens, first_token, layout, recompute, per_document, invariant, of_all
    )
    found = zeco_gla_by(carrier, (q, k, v, g, initial_state), asked)
    if not of_all:
        return found
    return final_of_all(*found, comm, cu_seqlens is not None and not per_document, layout == "zigzag")


class Asked(NamedTuple):
    """Options of a call as its caller passes them: see ``zeco_gla``."""

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
    """The same, checked: what is not in the tensors. zigzag: see zigzag_of; saves: forward saves the intermediates of
    the chunks for backward; of_all: see final_of_all."""

    scale: float
    first_token: int | None = None
    zigzag: int = 0
    saves: bool = False
    invariant: int = 0
    of_all: bool = False

    @property
    def of_shape(self) -> tuple[int, bool, int]:
        """What ``_shape`` takes of them."""
        return self.zigzag, self.saves, self.invariant


def zeco_gla_by(carrier: StateCarrier, tensors: tuple, asked: Asked) -> tuple[Tensor, Tensor | None]:
    """``zeco_gla`` of ``tensors`` (q, k, v, g, initial_state), with the state carried by ``carrier``."""
    comm, (scale, final, cu_seqlens, first, layout, recompute, per_document, invariant, of_all) = carrier.comm, asked
    if torch.compiler.is_compiling():
        saves = wants_gradient(tensors) and not recompute
        return _traced_call(carrier, tensors, final, *_checked(carrier, tensors, asked, saves))
    with comm.call(False, "zeco_gla", tensors):
        key = call_key(tensors)
        differentiable = bool(key[-1])  # 2: with inference tensors, which torch cannot save (call_key)
        saves = differentiable and not recompute
        # not where each call is to be checked: a wrong scale may equal a right one (Decimal(1)), NaN is none
        known = cu_seqlens is None and first is None and not (comm.debug or per_document)
        known = known and type(scale) in _SCALES and scale == scale
        known = known and type(layout) is str and type(invariant) is int and key[-1] != 2 and num_dispatch_modes() == 0
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


_SCALES = float, int, type(None)


def _checked(
    carrier: StateCarrier, tensors: Sequence[Tensor], asked: Asked, saves: bool
) -> tuple[Tensor | None, Options]:
    """(cu_seqlens, Options), after the checks that need no other rank."""
    scale, _, boundaries, first_token, layout, _, per_document, invariant, of_all = asked
    deferred, cu_seqlens = None, None
    try:
        zigzag = zigzag_of(layout, per_document, boundaries)
        check_for_an_operator(dict(zip(("q", "k", "v", "g", "initial_state"), tensors)), scale)
        cu_seqlens = None if boundaries is None else own_boundaries(boundaries)
        first_token = own_place(first_token, cu_seqlens)
        check_saveable((*tensors, cu_seqlens), tensors)
        invariant = check_invariant(carrier.comm, invariant, zigzag)
    except (TypeError, ValueError) as error:
        deferred = DeferredError(error)
    if deferred is not None:
        carrier.prepare(None, deferred=deferred)  # raises it, on the other ranks too if this is a first call
    compare_values(carrier.comm, boundaries, cu_seqlens)
    scale = tensors[0].shape[-1] ** -0.5 if scale is None else float(scale)
    return cu_seqlens, Options(scale, first_token, zigzag, saves, invariant, of_all)


def _traced_call(
    carrier: StateCarrier, tensors: Sequence[Tensor | None], final: bool, cu_seqlens: Tensor | None, options: Options
) -> tuple[Tensor, Tensor | None]:
    """By the custom operator."""
    o, final_state, _ = _operator.forward(*plain_or_traced(*tensors), cu_seqlens, final, carrier.handle, *options)
    return o, final_state if final else None


class Prepared:
    """Of calls with one signature: what the first of them has worked out, with which the later ones need no checks but
    those by which they find it.

    options: with which ``_find`` finds the same again. saved: see ``_saved``. pending: makes the communicator's record
    of a backward pass that is outstanding."""

    def __init__(self, carrier: StateCarrier, shape: Shape, layout: Layout, options: Options, saved: list) -> None:
        self.carrier, self.shape, self.layout, self.options, self.saved = carrier, shape, layout, options, saved
        scan = carrier.prepare((shape.carried * shape.H, shape.K, shape.V))
        self.fixed = carrier.handle, *options  # the operator's last inputs
        self.pending = partial(carrier.pending, scan, bool(shape.zigzag))
        self._states = shape.sequences, shape.H, shape.K, shape.V
        self._plans: dict[tuple, Plan] = {}  # by variant of the pass, see _run

    def forward(self, *inputs: Any) -> tuple[Tensor, Any, Tensor]:
        """(o, final_state or None, and the buffer of Shape.saved_sizes), of the operator's inputs before ``fixed``."""
        q, k, v, g, initial_state, _, final = inputs
        final_state = q.new_zeros(self._states, dtype=torch.float32) if final else None
        saved_buffer = q.new_empty(self.shape.saved_words, dtype=SAVED_DTYPE)
        variant = forward_plan, initial_state is None, final_state is None
        (o,) = self._run(variant, q, k, v, g, initial_state, final_state, saved_buffer)
        if self.carrier.comm.debug:
            self.carrier.comm._look_for_nan("zeco_gla", o=o, final_state=final_state)
        return o, final_state, saved_buffer

    def backward(
        self, do: Tensor, dfinal: Tensor | None, saved: Sequence[Tensor], initial: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """(dv, dq, dk, dg, dinitial_state or None)."""
        q, k, v, g, saved_buffer = saved
        dinitial = q.new_zeros(self._states, dtype=torch.float32) if initial else None
        variant = backward_plan, dfinal is None, dinitial is None
        dv, dq, dk, dg = self._run(variant, q, k, v, g, do, dfinal, dinitial, saved_buffer)
        if self.carrier.comm.debug:
            named = dict(dq=dq, dk=dk, dv=dv, dg=dg, dinitial_state=dinitial)
            self.carrier.comm._look_for_nan("zeco_gla's backward", **named)
        return dv, dq, dk, dg, dinitial

    def _run(self, variant: tuple, *tensors: Tensor | None) -> list[Tensor]:
        """Run the plan of a pass. ``variant``: what makes it, and which of these tensors are None."""
        self.layout.use(self.carrier.comm)
        plan = self._plans.get(variant)
        if plan is None:
            (make, *_), shape, layout, scale = variant, self.shape, self.layout, self.options.scale
            key = type(self.carrier), self.carrier.handle, shape, scale, self.options.of_all, *variant
            alike = "zeco_gla", shape.B, str(shape.dtype), scale, self.options.of_all
            plan = layout.derived(key, lambda: make(shape, scale, layout.tables(*alike), self.carrier, *tensors))
            self._plans[variant] = plan
        return plan.run(self.carrier, *[x for x in tensors if x is not None])


def _check(tensors: Sequence[Any], cu_seqlens: Tensor | None, comm: Communicator, zigzag: int) -> None:
    """Raise TypeError or ValueError for arguments that are wrong on this rank."""
    q, k, v, g, initial_state = tensors
    names = dict(q=q, k=k, v=v, g=g)
    for name, x in names.items():
        if x.device != comm.device:
            raise ValueError(f"{name} must be on {comm.device}, got {x.device}")
        if x.ndim != 4 or 0 in (*x.shape[:1], *x.shape[2:]):
            raise ValueError(f"{name} must be [B, T, H, K or V] with no empty dimension but T, got {tuple(x.shape)}")
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32) or not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k, v must be bfloat16, float16 or float32 alike, got {q.dtype}, {k.dtype}, {v.dtype}")
    if g.dtype not in (torch.float32, q.dtype):
        raise TypeError(f"g must be float32 or {q.dtype}, got {g.dtype}")
    if not q.shape == k.shape == g.shape or q.shape[:3] != v.shape[:3]:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in names.items())
        raise ValueError(f"q, k, g must be [B, T, H, K] and v [B, T, H, V], got {shapes}")
    if q.shape[0] * cdiv(q.shape[1], CHUNK_TOKENS) > MOST_CHUNKS:
        raise ValueError(f"B * T must be at most {MOST_CHUNKS:,} chunks of {CHUNK_TOKENS} tokens, got {tuple(q.shape)}")
    if zigzag:
        check_halves(q.shape[1])
    states = carried_states(q.shape[0], _state_shape(q, v, cu_seqlens)[0], zigzag) * (1 + bool(zigzag))
    if states * q.shape[2] > MOST_CHUNKS:
        raise ValueError(f"the states of {states} sequences or halves times H must be at most {MOST_CHUNKS:,}")
    if q.shape[-1] > 512:
        raise ValueError(f"K must be at most 512, got {q.shape[-1]}")
    if cu_seqlens is not None:
        if q.shape[0] != 1:
            raise ValueError(f"cu_seqlens must be [N + 1] with B = 1, got {tuple(cu_seqlens.shape)}, B = {q.shape[0]}")
    if initial_state is not None:
        check_tensor("initial_state", initial_state, _state_shape(q, v, cu_seqlens), comm.device)


def _carried_shape(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, zigzag: int) -> tuple[int, int, int]:
    """Of what is sent over the ranks."""
    sequences, H, K, V = _state_shape(q, v, cu_seqlens)
    return carried_states(q.shape[0], sequences, zigzag) * H, K, V


def _state_shape(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[int, int, int, int]:
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return sequences, q.shape[2], q.shape[3], v.shape[3]


def _prepare(carrier: StateCarrier, tensors: Sequence[Any], cu_seqlens: Tensor | None, options: Options) -> Prepared:
    """After all checks; those of the tensors at the first call with tensors like these, which agrees with the other
    ranks."""
    comm, (q, _, v, g, initial_state), (scale, first_token, zigzag, _, invariant, of_all) = (
        carrier.comm,
        tensors,
        options,
    )
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
            _check(tensors, cu_seqlens, comm, zigzag)
            check_cut(comm, q.shape[1], invariant, zigzag)
            check_packed(comm, cu_seqlens, q.shape[1], first_token, zigzag)

        check_first(comm, FirstCall(signature, shape, agree), check, g, carrier.prepare)
    return _find(carrier, q, v, g.dtype, cu_seqlens, options)


def _find(
    carrier: StateCarrier, q: Tensor, v: Tensor, gate_dtype: torch.dtype, cu_seqlens: Tensor | None, options: Options
) -> Prepared:
    """For tensors that were checked."""
    _, first_token, zigzag, *_ = options
    shape = _shape(q, v, gate_dtype, cu_seqlens, options.of_shape)
    own = OwnTokens(shape.B, shape.T, cu_seqlens, first_token, zigzag)
    layout = find_layout(carrier.comm, own, shape.segment, aligned=bool(shape.invariant))
    return Prepared(carrier, shape, layout, options, _saved(shape, carrier.comm.device))


def _saved(shape: Shape, device: torch.device) -> list:
    """Dtype, shape and device of q, k, v, g and the buffer of intermediates, which autograd saves, and of do."""
    keys, values = ((shape.B, shape.T, shape.H, width) for width in (shape.K, shape.V))
    specs: list[tuple[torch.dtype, tuple[int, ...]]] = [(shape.dtype, x) for x in (keys, keys, values)]
    specs += [(shape.gate_dtype, keys), (SAVED_DTYPE, (shape.saved_words,)), (shape.dtype, values)]
    return [(dtype, torch.Size(x), device) for dtype, x in specs]


def _shape(
    q: Tensor,
    v: Tensor,
    gate_dtype: torch.dtype,
    cu_seqlens: Tensor | None,
    how: tuple[int, bool, int],
    make: Callable[..., Shape] = shape_of,
) -> Shape:
    """how: zigzag, saves, invariant of Options."""
    (B, T, H, K), sequences = q.shape, q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    (zigzag, *rest), device = how, v.device
    of_gpu = device.type, zigzag, multiprocessors(device)
    return make(B, T, H, K, v.shape[3], sequences, v.dtype, gate_dtype, *of_gpu, *rest)


def _new_outputs(q: Tensor, final: bool, shape: Shape) -> tuple[Tensor | None, Tensor]:
    """(final_state or None, the buffer of Shape.saved_sizes, uninitialised)."""
    return _ends(q, final, shape), q.new_empty(shape.saved_words, dtype=SAVED_DTYPE)


def _ends(q: Tensor, wanted: bool, shape: Shape) -> Tensor | None:
    """A state for each sequence, or None."""
    return q.new_zeros((shape.sequences, shape.H, shape.K, shape.V), dtype=torch.float32) if wanted else None


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    q, k, v, g, initial_state, cu_seqlens, _, handle, *options = inputs
    ctx.save_for_backward(q, k, v, g, cu_seqlens, output[2])
    ctx.rest = initial_state is not None and initial_state.requires_grad, handle, g.dtype, *options


def _pending(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, *rest: Any
) -> list:
    """For the backward of a call of the custom operator."""
    _, handle, _, _, zigzag, _, invariant, _ = rest
    carrier = carrier_of(handle, invariant)
    return carrier.pending(carrier.prepare(_carried_shape(q, v, cu_seqlens, zigzag)), bool(zigzag))


def _gradient(backward: Callable[..., Any], ctx: Any, do: Tensor, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
    """Of q, k, v, g and initial_state."""
    for pending in ctx.pending:
        pending.run()
    q, k, v, g, cu_seqlens, saved_buffer = saved_tensors(ctx, lambda: carrier_of(ctx.rest[1]).comm, True)
    do, dfinal = plain_or_traced(torch.zeros_like(v) if do is None else do, dfinal)
    dv, dq, dk, dg, dinitial = backward(do, dfinal, q, k, v, g, cu_seqlens, saved_buffer, *ctx.rest)
    return dq, dk, dv, dg, dinitial if ctx.rest[0] else None


def _run_backward(prepared: Prepared | None, *inputs: Any) -> tuple[Any, ...]:
    """``inputs``: those of ``_backward``."""
    do, dfinal, q, k, v, g, cu_seqlens, saved_buffer, initial, handle, gate_dtype, *rest = inputs
    options = Options(*rest)
    carrier = carrier_of(handle, options.invariant) if prepared is None else prepared.carrier
    with carrier.comm.call(True, "the backward of zeco_gla", (do, dfinal)):
        reject_second_derivative("zeco_gla")
        if q.ndim != 4:
            raise others_than_saved("zeco_gla", "q", q, "[B, T, H, K]")
        if prepared is None:
            saved = _saved(_shape(q, do, gate_dtype, cu_seqlens, options.of_shape), carrier.comm.device)
        else:
            saved = prepared.saved
        q, k, v, g, saved_buffer, do = restored(
            "zeco_gla", "q k v g saved_buffer do", (q, k, v, g, saved_buffer, do), saved
        )
        prepared = prepared or _find(carrier, q, v, gate_dtype, cu_seqlens, options)
        if saved_buffer.data_ptr() % 16:  # in memory of another's, of which kernels want multiples
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
        prepared = _prepare(carrier, (q, k, v, g, initial_state), cu_seqlens, options)
        return prepared.forward(q, k, v, g, initial_state, cu_seqlens, final)


def _fake(
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
) -> tuple[Tensor | None, ...]:
    shape = _shape(q, v, g.dtype, cu_seqlens, (zigzag, saves, invariant), Shape)
    return torch.empty_like(v), *_new_outputs(q, final, shape)


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


def _fake_backward(
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
) -> tuple[Tensor | None, ...]:
    dinitial = _ends(q, initial, _shape(q, v, gate_dtype, cu_seqlens, (zigzag, saves, invariant), Shape))
    return *(torch.empty_like(x) for x in (v, q, k, g)), dinitial


_passes = Passes(_forward, _fake, _backward, _fake_backward)
_operator = Operator("allscan::zeco_gla", _passes, _save, _gradient, _pending, _run_backward)
