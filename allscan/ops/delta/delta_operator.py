"""zeco_kda and zeco_gated_delta_rule: delta rules over a sequence that is cut over the ranks of a communicator."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...base.autograd import Operator, check_saveable, reject_second_derivative
from ...base.checks import (
    check_for_an_operator,
    check_halves,
    check_tensor,
    integer,
    others_than_saved,
    plain_or_traced,
    restored,
    signature_of,
    zigzag_of,
)
from ...base.errors import DeferredError
from ...bindings.torch_compat import unsafe_view
from ...bindings.versions import rejection
from ...comm.backwards import recomputing, saved_tensors
from ...comm.communicator import Communicator, check_communicator, communicator_of
from ...scan.fwd_epochs import FWD_EPOCHS
from ...tokens.packing import CHUNK_TOKENS, MOST_CHUNKS, Layout, carried_states, most_segments, own_boundaries
from ...tokens.partition import check_packed, compare_values, find_layout
from ..allscan import check_final, final_of_all
from ..carrier import AllScanCarrier
from ..first_call import check_first, common_fields
from .delta_passes import StatePass, delta_segment_length
from .fla_chunks import KDA, ChunkCall, GatedDeltaNet, gate, local, normalized
from .own_chunks import ChunkPass, OwnChunks
from .records import DeltaShape, Ends, Inputs, Kept, Outer, Saved

RULES: dict[str, KDA | GatedDeltaNet | OwnChunks] = {
    "kda": KDA(),
    "safe_kda": KDA(safe_gate=True),
    "gated_delta_rule": GatedDeltaNet(),
    "own_kda": OwnChunks(scalar=False),
    "own_gated_delta_rule": OwnChunks(scalar=True),
}
CHUNKS = "fla", "allscan"  # whose kernels work inside of the chunks


# What numbers are saved as of which some are never written: a saved_tensors_hook that looks at numbers, as a quantizer
# does, is not to take those for numbers
WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
BETAS = torch.float32, torch.bfloat16, torch.float16  # types that fla's kernels take it in


class Before(NamedTuple):
    """What is done to the arguments before the rule; see ``zeco_kda``."""

    normalize: bool
    gate: bool
    sigmoid: bool
    twice: bool
    lower_bound: float | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    state_v_first: bool
    chunk: str

    def fields(self) -> str:
        """What all ranks have alike, but lower_bound, as names and values."""
        given = (
            self.normalize,
            self.gate,
            self.sigmoid,
            self.twice,
            self.A_log is None,
            self.dt_bias is None,
            self.state_v_first,
        )
        return _fields(*given) if torch.compiler.is_compiling() else _kept_fields(*given)


FIELDS = (
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
    "A_log is None",
    "dt_bias is None",
    "state_v_first",
)


def _fields(*given: bool) -> str:
    return ";".join([f"{name}={bool(value)}" for name, value in zip(FIELDS, given)])


_kept_fields = functools.lru_cache(maxsize=256)(_fields)


def zeco_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    comm: Communicator,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | str = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    first_token: int | None = None,
    layout: str = "contiguous",
    per_document: bool = False,
    chunk: str = "fla",
) -> tuple[Tensor, Tensor | None]:
    """Kimi delta attention with the sequence cut over the ranks; each rank holds consecutive tokens, in rank order.

        S_t = (1 - beta_t k_t k_t^T) diag(exp(g_t)) S_{t-1} + beta_t k_t^T v_t,     o_t = scale * q_t S_t

    The arguments are those of ``fla.ops.kda.chunk_kda``, and comm=, with the same defaults.

    Differentiable in q, k, v, g, beta, A_log, dt_bias and initial_state; the gradients of A_log and dt_bias are this
    rank's share. One scan forward, with the K x K transition that a rank's tokens make, and one in reverse in backward,
    each moving one state of B * HV * K * V float32 words from a rank to the next.

    Args:
        q, k: [B, T, H, K], this rank's T tokens; float16, float32 or, on GPUs, bfloat16, v alike. K up to 256. T may
            differ between ranks and be 0, nothing else may differ.
        v: [B, T, HV, V], HV a multiple of H.
        g: [B, T, HV, K], natural logarithm of the decay, at most 0, and at least -1,048,576 in the sum of 64 tokens,
            which is checked at the first call for a shape only, and in debug mode: looking waits for the GPU. Errors
            grow with that sum (docs/delta.md); begin documents by cu_seqlens. float32, or like q.
        beta: [B, T, HV], any float type.
        use_qk_l2norm_in_kernel: whether q and k are divided by their norms first.
        use_gate_in_kernel: whether g is raw, of any float type: the decay's logarithm is -exp(A_log) softplus(g +
            dt_bias), with lower_bound (below 0) lower_bound * sigmoid(exp(A_log) (g + dt_bias)).
        A_log: [HV], optional where there is a lower_bound.
        dt_bias: HV * K numbers, optional.
        use_beta_sigmoid_in_kernel: whether beta is raw: beta is sigmoid(beta), with allow_neg_eigval twice that.
        safe_gate: promises that no decay's logarithm is below -5, which fla's kernels are faster with.
        state_v_first: whether states are [.., V, K]; final_state is a transposed view then.
        scale, initial_state, output_final_state, cu_seqlens, first_token, layout, per_document, comm: as in
            ``allscan.zeco_gla``; states are [B or N, HV, K, V] float32.
        chunk: who computes inside of chunks of 64 tokens, alike on all ranks: "fla", flash-linear-attention, which must
            be installed (``pip install flash-linear-attention``), or "allscan", kernels of our own: for any gates, and
            on CPUs for bfloat16, too; faster than fla's unless gates are strong (docs/delta.md).

    Returns:
        (o, final_state), as ``allscan.zeco_gla`` does.

    Raises:
        ImportError: without fla.
        RuntimeError: and whatever else ``allscan.zeco_gla`` raises, before anything is launched.

    Example:
        >>> o, _ = allscan.zeco_kda(q, k, v, g, beta, comm=comm)         # q[:, t0:t1], ... of the whole sequence

    Source:
        Kimi Linear, arXiv 2510.26692; ZeCO, arXiv 2507.01004; docs/delta.md.
    """
    flags = use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval
    before = Before(*flags, lower_bound, A_log, dt_bias, state_v_first, chunk)
    rule = "own_kda" if chunk == "allscan" else "safe_kda" if safe_gate else "kda"
    where = cu_seqlens, first_token, layout, per_document
    return _call(rule, before, q, k, v, g, beta, comm, scale, initial_state, output_final_state, *where)


def zeco_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    comm: Communicator,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | str = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    first_token: int | None = None,
    layout: str = "contiguous",
    per_document: bool = False,
    chunk: str = "fla",
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule (Gated DeltaNet) with the sequence cut over the ranks; each rank holds consecutive tokens.

        S_t = exp(g_t) (1 - beta_t k_t k_t^T) S_{t-1} + beta_t k_t^T v_t,     o_t = scale * q_t S_t

    The arguments are those of ``fla.ops.gated_delta_rule.chunk_gated_delta_rule``, and comm=. Trains on Hopper with
    Triton 3.6 too, where fla rejects this rule's backward.

    Args:
        g: [B, T, HV], natural logarithm of the decay of a head.
        dt_bias: [HV], optional.
        q, k, v, beta, comm, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
            use_beta_sigmoid_in_kernel, allow_neg_eigval, A_log, state_v_first, cu_seqlens, first_token, layout,
            per_document, chunk: as in ``allscan.zeco_kda``.

    Returns:
        (o, final_state), as ``allscan.zeco_gla`` does.

    Raises:
        ImportError: without fla.
        RuntimeError: and whatever else ``allscan.zeco_gla`` raises, before anything is launched.

    Example:
        >>> o, _ = allscan.zeco_gated_delta_rule(q, k, v, g, beta, comm=comm)

    Source:
        Gated Delta Networks, arXiv 2412.06464; ZeCO, arXiv 2507.01004; docs/delta.md.
    """
    flags = use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval
    before = Before(*flags, None, A_log, dt_bias, state_v_first, chunk)
    return _call(
        "own_gated_delta_rule" if chunk == "allscan" else "gated_delta_rule",
        before,
        q,
        k,
        v,
        g,
        beta,
        comm,
        scale,
        initial_state,
        output_final_state,
        cu_seqlens,
        first_token,
        layout,
        per_document,
    )


def _call(rule, before, q, k, v, g, beta, comm, *options) -> tuple[Tensor, Tensor | None]:
    check_communicator(comm)
    if torch.compiler.is_compiling():
        return _delta(rule, before, q, k, v, g, beta, comm, *options)
    inputs = q, k, v, g, beta, options[1], before.A_log, before.dt_bias
    with comm.call(False, f"zeco_{rule}", inputs):
        return _delta(rule, before, q, k, v, g, beta, comm, *options)


def _delta(
    rule,
    before: Before,
    q,
    k,
    v,
    g,
    beta,
    comm,
    scale,
    initial_state,
    output_final_state,
    cu_seqlens,
    first_token,
    layout,
    per_document,
) -> tuple[Tensor, Tensor | None]:
    of_all = False
    if isinstance(output_final_state, str):
        of_all = output_final_state = check_final(output_final_state, comm)
    deferred, boundaries, own = None, cu_seqlens, isinstance(RULES[rule], OwnChunks)
    try:
        zigzag = zigzag_of(layout, per_document, cu_seqlens)
        tensors = dict(q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state)
        check_for_an_operator(tensors, scale)
        cu_seqlens = None if cu_seqlens is None else own_boundaries(cu_seqlens)
        first_token = None if first_token is None or cu_seqlens is None else integer("first_token", first_token, 0)
        if before.chunk not in CHUNKS:
            raise ValueError(f"chunk must be one of {', '.join(CHUNKS)}, got {before.chunk!r}")
        if before.gate or before.sigmoid or before.twice:
            _check_before(before, rule, q, v, g)
        given = *tensors.values(), before.A_log, before.dt_bias
        check_saveable((*given, cu_seqlens), given)
        if not (own or torch.compiler.is_compiling()):
            _import_fla()
    except (TypeError, ValueError, ImportError) as error:
        deferred = DeferredError(error)
    if deferred is not None:
        # raises it, on the other ranks too if this is a first call
        AllScanCarrier.of(comm, dense=True).prepare(None, deferred=deferred)
    compare_values(comm, boundaries, cu_seqlens)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if initial_state is not None and before.state_v_first:
        initial_state = initial_state.mT
    q, k, v, g, beta, initial_state = plain_or_traced(q, k, v, g, beta, initial_state)
    bound = None if before.lower_bound is None or not before.gate else float(before.lower_bound)
    if before.normalize:
        q, k = normalized(q, comm.handle, own), normalized(k, comm.handle, own)
    if before.gate:
        A_log, dt_bias = plain_or_traced(before.A_log, before.dt_bias)
        g = gate(g, A_log, dt_bias, before.lower_bound, RULES[rule].scalar, comm.handle, own)
    if before.sigmoid:
        beta = beta.float().sigmoid() * (2 if before.twice else 1)
    elif beta.dtype not in BETAS:
        beta = beta.float()
    o, final_state, *_ = _operator(
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        cu_seqlens,
        rule,
        scale,
        output_final_state,
        before.fields(),
        bound,
        comm.handle,
        first_token,
        zigzag,
    )
    if not output_final_state:
        return o, None
    if of_all:
        packed = cu_seqlens is not None and not per_document
        o, final_state = final_of_all(o, final_state, comm, packed, bool(zigzag))
    return o, final_state.mT if before.state_v_first else final_state


def _check_before(before: Before, rule: str, q, v, g) -> None:
    """Raise TypeError or ValueError for what raw gates and beta cannot be made of."""
    scalar = RULES[rule].scalar
    if before.twice and not before.sigmoid:
        raise ValueError("allow_neg_eigval needs use_beta_sigmoid_in_kernel")
    if not before.gate:
        return
    if before.lower_bound is not None and not -float("inf") < before.lower_bound < 0:
        raise ValueError(f"lower_bound must be below 0, got {before.lower_bound}")
    if rule == "safe_kda" and (before.lower_bound is None or before.lower_bound < -5):
        raise ValueError(f"safe_gate with use_gate_in_kernel needs -5 <= lower_bound < 0, got {before.lower_bound}")
    if before.A_log is None and before.lower_bound is None:
        raise ValueError("use_gate_in_kernel needs A_log")
    heads, K = v.shape[-2], q.shape[-1]
    if tuple(g.shape[2:]) != ((heads,) if scalar else (heads, K)):
        raise ValueError(f"g must be {['B', 'T', heads] if scalar else ['B', 'T', heads, K]}, got {list(g.shape)}")
    for name, x, count in (("A_log", before.A_log, heads), ("dt_bias", before.dt_bias, heads * (1 if scalar else K))):
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.numel() != count or x.device != g.device:
            raise ValueError(f"{name} must be {count} numbers on {g.device}, got {tuple(x.shape)} on {x.device}")


def _check(rule, q, k, v, g, beta, initial_state, cu_seqlens, comm, zigzag) -> None:
    """Raise TypeError or ValueError for arguments that are wrong on this rank."""
    for name, x in dict(q=q, k=k, v=v, g=g, beta=beta).items():
        if x.device != comm.device:
            raise ValueError(f"{name} must be on {comm.device}, got {x.device}")
        if not x.is_floating_point():
            raise TypeError(f"{name} must have a float type, got {x.dtype}")
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32) or not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k, v must be bfloat16, float16 or float32 alike, got {q.dtype}, {k.dtype}, {v.dtype}")
    if q.dtype == torch.bfloat16 and q.device.type == "cpu" and not isinstance(RULES[rule], OwnChunks):
        raise TypeError(
            "q, k, v must be float32 or float16 on CPUs: Triton's interpreter, in which fla's kernels run "
            "there, makes garbage of products of bfloat16"
        )
    if g.dtype not in (torch.float32, q.dtype):
        raise TypeError(f"g must be float32 or {q.dtype}, got {g.dtype}")
    empty = 0 in (*q.shape[:1], *q.shape[2:], *v.shape[2:])
    if v.ndim != 4 or q.shape != k.shape or q.shape[:2] != v.shape[:2] or empty:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in dict(q=q, k=k, v=v).items())
        raise ValueError(f"q, k must be [B, T, H, K] and v [B, T, HV, V] with no empty dimension but T, got {shapes}")
    B, T, H, K = q.shape
    HV = v.shape[2]
    if HV % H:
        raise ValueError(f"v must have a multiple of the {H} heads of q, got {HV}")
    if zigzag:
        check_halves(T)
    if K > 256:
        raise ValueError(f"K must be at most 256, got {K}")
    wanted = dict(g=(B, T, HV) if RULES[rule].scalar else (B, T, HV, K), beta=(B, T, HV))
    for name, x in dict(g=g, beta=beta).items():
        if x.shape != wanted[name]:
            raise ValueError(f"{name} must be {list(wanted[name])}, got {list(x.shape)}")
    if B * -(-T // CHUNK_TOKENS) > MOST_CHUNKS:
        raise ValueError(f"B * T must be at most {MOST_CHUNKS:,} chunks of {CHUNK_TOKENS} tokens, got {tuple(q.shape)}")
    states = carried_states(B, _state_shape(v, K, cu_seqlens)[0], zigzag) * (1 + bool(zigzag))
    if states * HV > MOST_CHUNKS:
        raise ValueError(f"{states} states of sequences or halves times the heads of v must be at most {MOST_CHUNKS:,}")
    if cu_seqlens is not None and B != 1:
        raise ValueError(f"cu_seqlens must be [N + 1] with B = 1, got {tuple(cu_seqlens.shape)}, B = {B}")
    if initial_state is not None:
        check_tensor("initial_state", initial_state, _state_shape(v, K, cu_seqlens), comm.device)


def _state_shape(v, K, cu_seqlens) -> tuple[int, int, int, int]:
    sequences = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return sequences, v.shape[2], K, v.shape[3]


def _carried_shape(q, v, cu_seqlens, zigzag) -> tuple[int, int, int]:
    """Of what is sent over the ranks."""
    sequences, HV, K, V = _state_shape(v, q.shape[3], cu_seqlens)
    return carried_states(q.shape[0], sequences, zigzag) * HV, K, V


def _segment_length(v) -> int:
    return delta_segment_length(v.shape[0] * v.shape[1], v.shape[2], v.is_cuda)


def _prepare(
    rule, scale, fields, bound, q, k, v, g, beta, initial_state, cu_seqlens, comm, first_token, zigzag
) -> Layout:
    """The Layout, after all checks. fields: of Before; bound: its lower_bound."""
    are_none = initial_state is None, cu_seqlens is None, first_token is None
    sequences = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    tensors = signature_of(q, k, v, g, beta, initial_state)
    signature = rule, scale, fields, bound, tensors, sequences, are_none, zigzag
    if comm.debug or signature not in comm.checked:
        shape = agree = None
        if q.ndim == v.ndim == 4:
            shape = _carried_shape(q, v, cu_seqlens, zigzag)
            options = (*(tuple(field.split("=")) for field in fields.split(";")), ("lower_bound", bound))
            common = common_fields(q.shape[0], q.dtype, scale, zigzag, *are_none)
            agree = f"zeco_{rule}", ("heads of q", q.shape[2]), *common, *options

        def check() -> None:
            _check(rule, q, k, v, g, beta, initial_state, cu_seqlens, comm, zigzag)
            check_packed(comm, cu_seqlens, q.shape[1], first_token, zigzag)

        check_first(comm, signature, shape, agree, check, g, AllScanCarrier.of(comm, dense=True).prepare, CHUNK_TOKENS)
    return _find_layout(comm, q, v, cu_seqlens, first_token, zigzag)


def _find_layout(comm, q, v, cu_seqlens, first_token, zigzag) -> Layout:
    packed = bool(zigzag) or cu_seqlens is not None  # as fla takes both halves
    return find_layout(comm, q.shape[0], q.shape[1], cu_seqlens, _segment_length(v), first_token, zigzag, packed)


def _import_fla() -> None:
    if rejected := rejection("flash-linear-attention"):
        raise ImportError(rejected)
    try:
        import fla.ops.kda  # noqa: F401
    except Exception as error:  # a package that is there in part raises anything
        raise ImportError(f"delta rules need flash-linear-attention, whose import failed: {error!r}") from error


def _state_pass(rule, layout, q, v, comm, cu_seqlens=None, zigzag=False) -> StatePass:
    HV, scalar, sequences = v.shape[2], RULES[rule].scalar, 1 if cu_seqlens is None else len(cu_seqlens) - 1
    B = carried_states(q.shape[0], sequences, zigzag)
    own = isinstance(RULES[rule], OwnChunks)
    kind = ChunkPass if own else StatePass
    heads = q.shape[2] if scalar or own else HV
    shape = DeltaShape(B, HV, heads, q.shape[3], v.shape[3], q.dtype, scalar, bool(zigzag))
    return layout.derived((kind, shape), lambda: kind(comm, layout.tables(), shape))


def _in_one(*tensors) -> Iterator[Any]:
    """[B, T, ...] as [1, B * T, ...]: packed, as the halves of the zigzag layout are for fla."""
    return (x if x is None else x.flatten(0, 1)[None] for x in tensors)


def _kept_tensors(q, v, cu_seqlens, final, zigzag) -> tuple[Any, ...]:
    """(final_state or None, and uninitialised, Kept; of more segments than there may be)."""
    kinds = _kept_kinds(q.shape, v.shape, 0 if cu_seqlens is None else cu_seqlens.shape[0], v.is_cuda, zigzag)
    return _zeros(q, v, cu_seqlens, final), *(q.new_empty(shape, dtype=dtype) for dtype, shape in kinds)


def _kept_kinds(keys, values, boundaries, cuda, zigzag) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
    """(dtype, shape) of each of Kept, by the shapes of q and v and how many numbers cu_seqlens has. The first two are
    saved as integers, see WORDS."""
    (B, T, H, V), K = values, keys[3]
    sequences = boundaries - 1 if boundaries else B
    segments = most_segments(B, T, sequences, delta_segment_length(B * T, H, cuda), zigzag)
    return (torch.int32, (segments, H, K, K)), (torch.int32, (segments, H, K, V)), (torch.int64, (FWD_EPOCHS,))


def _zeros(q, v, cu_seqlens, wanted) -> Any:
    """States, or None."""
    return q.new_zeros(_state_shape(v, q.shape[3], cu_seqlens), dtype=torch.float32) if wanted else None


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    rule: str,
    scale: float,
    final: bool,
    fields: str,
    bound: float | None,
    handle: int,
    first_token: int | None = None,
    zigzag: int = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(o, final_state or None, and for backward: sums of gates, scores and solved of chunks.py, and Kept). fields,
    bound: of Before, what the ranks compare."""
    comm = communicator_of(handle)
    with comm.call(False, f"zeco_{rule}", (q, k, v, g, beta, initial_state)):
        given = q, k, v, g, beta, initial_state, cu_seqlens
        layout = _prepare(rule, scale, fields, bound, *given, comm, first_token, zigzag)
        final_state, *kept = _kept_tensors(q, v, cu_seqlens, final, zigzag)
        ends = Ends(initial_state, final_state)
        states = _state_pass(rule, layout, q, v, comm, cu_seqlens, zigzag)
        if not q.shape[1]:
            states.forward_of_none(ends, Kept(*kept))
            return torch.empty_like(v), final_state, *_sums_and_chunks(rule, k, v, g), *kept
        v_shape = v.shape
        if zigzag:
            q, k, v, g, beta = _in_one(q, k, v, g, beta)
        call, x = ChunkCall(states, scale, local(layout)), Inputs(q, k, v, g, beta)
        o, sums, (scores, solved) = RULES[rule].forward(call, x, ends, Kept(*kept))
        if zigzag:
            o = unsafe_view(o, v_shape)  # no view, which must not be written to
            solved = solved.view(v_shape[0], -1, *solved.shape[2:])
            sums = sums.view(v_shape[0], -1, *sums.shape[2:]) if sums.numel() else sums
            scores = scores.view(solved.shape) if scores.numel() else scores
        if comm.debug:
            comm.look_for_nan(f"zeco_{rule}", o=o, final_state=final_state)
        return o, final_state, sums, scores.view(WORDS[scores.dtype]), solved, *kept


def _fake(
    q,
    k,
    v,
    g,
    beta,
    initial_state,
    cu_seqlens,
    rule,
    scale,
    final,
    fields,
    bound,
    handle,
    first_token=None,
    zigzag=False,
) -> tuple[Tensor | None, ...]:
    final_state, *kept = _kept_tensors(q, v, cu_seqlens, final, zigzag)
    return torch.empty_like(v), final_state, *_sums_and_chunks(rule, k, v, g), *kept


def _sums_and_chunks(rule, k, v, g) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised sums of gates, scores and solved."""
    solved, own = k.new_empty(*v.shape[:3], CHUNK_TOKENS), isinstance(RULES[rule], OwnChunks)
    scores = k.new_empty(0 if RULES[rule].scalar and not own else solved.shape, dtype=WORDS[k.dtype])
    return g.new_empty(0 if own else g.shape, dtype=torch.float32), scores, solved


def _backward(
    do: Tensor,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None,
    sums: Tensor,
    scores: Tensor,
    solved: Tensor,
    transitions: Tensor,
    enters: Tensor,
    fwd_epoch: Tensor,
    beta_dtype: torch.dtype,
    rule: str,
    scale: float,
    initial: bool,
    handle: int,
    first_token: int | None = None,
    zigzag: int = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dg, dbeta, dinitial_state or None)."""
    comm = communicator_of(handle)
    with comm.call(True, f"the backward of zeco_{rule}", (do, dfinal)):
        reject_second_derivative("a delta rule")
        if q.ndim != 4:
            raise others_than_saved(f"zeco_{rule}", "q", q, "[B, T, H, K]")
        given = q, k, v, beta, sums, scores, solved, transitions, enters, fwd_epoch, do
        wanted = _saved(q, do, beta_dtype, sums.dtype, cu_seqlens, rule, zigzag)
        q, k, v, beta, sums, scores, solved, transitions, enters, fwd_epoch, do = restored(
            f"zeco_{rule}", "q k v beta sums scores solved transitions enters fwd_epoch do", given, wanted
        )
        layout = _find_layout(comm, q, v, cu_seqlens, first_token, zigzag)
        scores, dinitial = scores.view(solved.dtype), _zeros(q, v, cu_seqlens, initial)
        states, like = _state_pass(rule, layout, q, v, comm, cu_seqlens, zigzag), (q, k, v, sums, beta)
        if not q.shape[1]:
            states.backward_of_none(Ends(dfinal, dinitial), Kept(transitions, enters, fwd_epoch))
            return *(torch.empty_like(x) for x in like), dinitial
        if zigzag:
            q, k, v, sums, beta, scores, solved, do = _in_one(
                q, k, v, sums, beta, scores if scores.numel() else None, solved, do
            )
        call, x = ChunkCall(states, scale, local(layout)), Inputs(q, k, v, sums, beta)
        outer, kept = Outer(do, dfinal, dinitial), Kept(transitions, enters, fwd_epoch)
        grads: Any = RULES[rule].backward(call, x, Saved(scores, solved), outer, kept)
        grads = [x.to(y.dtype).contiguous() for x, y in zip(grads, like, strict=True)]
        if zigzag:
            grads = [x.view(y.shape) for x, y in zip(grads, like, strict=True)]
        if comm.debug:
            named = dict(zip(("dq", "dk", "dv", "dg", "dbeta"), grads), dinitial_state=dinitial)
            comm.look_for_nan(f"zeco_{rule}'s backward", **named)
        return *grads, dinitial


def _saved(q, do, beta_dtype, gate_dtype, cu_seqlens, rule, zigzag) -> list[tuple]:
    """The dtype, shape and device of what autograd saves, but for cu_seqlens, and of do."""
    sequences = 0 if cu_seqlens is None else cu_seqlens.shape[0]
    own = isinstance(RULES[rule], OwnChunks) and gate_dtype == do.dtype  # which saves the gates, not their sums
    gate_dtype = gate_dtype if own else torch.float32
    return _saved_kinds(q.shape, do.shape, do.dtype, do.device, beta_dtype, gate_dtype, sequences, rule, zigzag)


@functools.lru_cache(1024)
def _saved_kinds(keys, values, dtype, device, beta_dtype, gate_dtype, boundaries, rule, zigzag) -> list[tuple]:
    of_v = values[:3]
    chunk, scalar = (*of_v, CHUNK_TOKENS), RULES[rule].scalar
    without = scalar and not isinstance(RULES[rule], OwnChunks)
    kinds = [(dtype, keys), (dtype, keys), (dtype, values), (beta_dtype, of_v)]
    kinds += (gate_dtype, of_v if scalar else (*of_v, keys[3])), (WORDS[dtype], (0,) if without else chunk)
    kinds += (dtype, chunk), *_kept_kinds(keys, values, boundaries, device.type == "cuda", zigzag), (dtype, values)
    return [(of, torch.Size(shape), device) for of, shape in kinds]


def _fake_backward(
    do,
    dfinal,
    q,
    k,
    v,
    beta,
    cu_seqlens,
    sums,
    scores,
    solved,
    transitions,
    enters,
    fwd_epoch,
    beta_dtype,
    rule,
    scale,
    initial,
    handle,
    first_token=None,
    zigzag=False,
) -> tuple[Tensor | None, ...]:
    dinitial = _zeros(q, v, cu_seqlens, initial)
    return *(torch.empty_like(x) for x in (q, k, v, sums, beta)), dinitial


def _save(ctx, inputs, output) -> None:
    q, k, v, g, beta, initial_state, cu_seqlens, ctx.rule, ctx.scale, _, _, _, *ctx.where = inputs
    ctx.initial = initial_state is not None and initial_state.requires_grad
    ctx.gate_dtype, ctx.beta_dtype = g.dtype, beta.dtype
    sums = g if isinstance(RULES[ctx.rule], OwnChunks) else output[2]
    ctx.save_for_backward(q, k, v, beta, cu_seqlens, sums, *output[3:])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    no_node = type(output[0]) is not Tensor or recomputing()  # traced by torch.compile, or checkpointing's
    handle, _, zigzag = ctx.where
    ctx.pending = []
    if not no_node:
        carrier = AllScanCarrier.of(communicator_of(handle), dense=True)
        shape = _carried_shape(q, v, cu_seqlens, zigzag)
        ctx.pending = carrier.pending(carrier.prepare(shape), bool(zigzag))


def _gradient(backward, ctx, do, dfinal, *_) -> tuple[Tensor | None, ...]:
    for pending in ctx.pending:
        pending.run()
    q, k, v, beta, cu_seqlens, *saved = saved_tensors(ctx, lambda: communicator_of(ctx.where[0]), True)
    do, dfinal = plain_or_traced(torch.zeros_like(v) if do is None else do, dfinal)
    given = ctx.beta_dtype, ctx.rule, ctx.scale, ctx.initial, *ctx.where
    dq, dk, dv, dg, dbeta, dinitial = backward(do, dfinal, q, k, v, beta, cu_seqlens, *saved, *given)
    dinitial = dinitial if ctx.initial else None
    return dq, dk, dv, dg.to(ctx.gate_dtype), dbeta, dinitial, *[None] * 9


_operator = Operator("allscan::zeco_delta", _forward, _fake, _backward, _fake_backward, _save, _gradient, tensors=7)
