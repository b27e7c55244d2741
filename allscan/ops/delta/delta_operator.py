"""zeco_kda and zeco_gated_delta_rule: delta rules over a sequence that is cut over the ranks of a communicator."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...base.autograd import Operator, Passes, check_saveable, reject_second_derivative, wants_gradient, watched
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
from ...base.tiling import multiprocessors
from ...bindings.torch_compat import num_dispatch_modes, unsafe_view
from ...bindings.versions import rejection
from ...comm.backwards import saved_tensors
from ...comm.communicator import Communicator, check_communicator, communicator_of
from ...scan.fwd_epochs import FWD_EPOCHS
from ...tokens.packing import CHUNK_TOKENS, MOST_CHUNKS, Layout, carried_states, most_segments, own_boundaries
from ...tokens.partition import OwnTokens, check_packed, compare_values, find_layout
from ..allscan import check_final, final_of_all
from ..carrier import AllScanCarrier, check_cut, check_invariant
from ..first_call import FirstCall, check_first, common_fields
from .delta_passes import StatePass, delta_segment_length
from .fla_chunks import KDA, ChunkCall, Gate, GatedDeltaNet, gate, local, normalized
from .own_chunks import ChunkPass, OwnChunks
from .records import DeltaShape, Ends, Inputs, Kept, Outer, Saved

RULES: dict[str, KDA | GatedDeltaNet | OwnChunks] = {
    "kda": KDA(),
    "safe_kda": KDA(safe_gate=True),
    "gated_delta_rule": GatedDeltaNet(),
    "own_kda": OwnChunks(scalar=False),
    "own_gated_delta_rule": OwnChunks(scalar=True),
}
TITLES = {rule: "zeco_" + rule.removeprefix("own_") for rule in RULES}  # what users call them
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
    chunk: str | None

    def fields(self) -> str:
        """What all ranks have alike, but lower_bound, as names and values."""
        values = (
            self.normalize,
            self.gate,
            self.sigmoid,
            self.twice,
            self.A_log is None,
            self.dt_bias is None,
            self.state_v_first,
        )
        return _fields(*values) if torch.compiler.is_compiling() else _cached_fields(*values)

    def applied(self, rule: str, x: Inputs, handle: int) -> Inputs:
        """What the rule takes. handle: of the communicator."""
        (q, k, v, g, beta), own = x, isinstance(RULES[rule], OwnChunks)
        if self.normalize:
            q, k = normalized(q, handle, own), normalized(k, handle, own)
        if self.gate:
            A_log, dt_bias = plain_or_traced(self.A_log, self.dt_bias)
            by = Gate(A_log, dt_bias, self.lower_bound)
            g = gate(g, by, RULES[rule].scalar, handle, own)
        if self.sigmoid:
            beta = beta.float().sigmoid() * (2 if self.twice else 1)
        elif beta.dtype not in BETAS:
            beta = beta.float()
        return Inputs(q, k, v, g, beta)


class Asked(NamedTuple):
    """Options of a call as its caller passes them: see ``zeco_kda``."""

    scale: float | None
    initial_state: Tensor | None
    output_final_state: bool | str
    cu_seqlens: Tensor | Sequence[int] | None
    first_token: int | None
    layout: str
    per_document: bool
    invariant: int | None


class Options(NamedTuple):
    """What is not in the tensors of a call, checked. fields, bound: of Before, what the ranks compare; zigzag: see
    zigzag_of."""

    rule: str
    scale: float
    fields: str
    bound: float | None
    first_token: int | None = None
    zigzag: int = 0
    invariant: int = 0


FIELDS = (
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
    "A_log is None",
    "dt_bias is None",
    "state_v_first",
)


def _fields(*values: bool) -> str:
    return ";".join([f"{name}={bool(value)}" for name, value in zip(FIELDS, values)])


_cached_fields = functools.lru_cache(maxsize=256)(_fields)


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
    chunk: str | None = None,
    invariant: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Kimi delta attention with the sequence cut over the ranks; each rank holds consecutive tokens, in rank order.

        S_t = (1 - beta_t k_t k_t^T) diag(exp(g_t)) S_{t-1} + beta_t k_t^T v_t,     o_t = scale * q_t S_t

    The arguments are those of ``fla.ops.kda.chunk_kda``, and comm=, with the same defaults.

    Differentiable in q, k, v, g, beta, A_log, dt_bias and initial_state; the gradients of A_log and dt_bias are this
    rank's share. One scan forward, with the K x K transition that a rank's tokens make, and one in reverse in backward,
    each moving one state of B * HV * K * V float32 words from a rank to the next.

    Args:
        q, k: [B, T, H, K], this rank's T tokens; float16, bfloat16 or float32, v alike. K up to 256. T may
            differ between ranks and be 0, nothing else may differ.
        v: [B, T, HV, V], HV a multiple of H.
        g: [B, T, HV, K], natural logarithm of the decay, at most 0; float32, or like q. With fla's kernels at least
            -1,048,576 in the sum of 64 tokens, and errors grow with that sum (docs/delta.md): begin documents by
            cu_seqlens. Gates are looked at at the first call for a shape only, and in debug mode: it waits for the GPU.
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
        chunk: who computes inside of chunks of 64 tokens, alike on all ranks: "allscan", kernels of our own: for any
            gates, and on CPUs for bfloat16, too; or "fla", flash-linear-attention, which must be installed (``pip
            install flash-linear-attention``). Default: ours on CPUs and with invariant, else fla's.
        invariant: as in ``allscan.zeco_gla``, with chunk="allscan" only: the same bits for every number of ranks. The
            first and the last rank must have tokens.

    Returns:
        (o, final_state), as ``allscan.zeco_gla`` does.

    Raises:
        ImportError: where fla's kernels are to work and it is not installed.
        RuntimeError: and whatever else ``allscan.zeco_gla`` raises, before anything is launched.

    Example:
        >>> o, _ = allscan.zeco_kda(q, k, v, g, beta, comm=comm)         # q[:, t0:t1], ... of the whole sequence

    Source:
        Kimi Linear, arXiv 2510.26692; ZeCO, arXiv 2507.01004; docs/delta.md.
    """
    chunk = _default_chunk(comm, invariant) if chunk is None else chunk
    flags = use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval
    before = Before(*flags, lower_bound, A_log, dt_bias, state_v_first, chunk)
    rule = "own_kda" if chunk == "allscan" else "safe_kda" if safe_gate else "kda"
    asked = Asked(scale, initial_state, output_final_state, cu_seqlens, first_token, layout, per_document, invariant)
    return _call(rule, before, Inputs(q, k, v, g, beta), comm, asked)


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
    chunk: str | None = None,
    invariant: int | None = None,
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
            per_document, chunk, invariant: as in ``allscan.zeco_kda``.

    Returns:
        (o, final_state), as ``allscan.zeco_gla`` does.

    Raises:
        ImportError: where fla's kernels are to work and it is not installed.
        RuntimeError: and whatever else ``allscan.zeco_gla`` raises, before anything is launched.

    Example:
        >>> o, _ = allscan.zeco_gated_delta_rule(q, k, v, g, beta, comm=comm)

    Source:
        Gated Delta Networks, arXiv 2412.06464; ZeCO, arXiv 2507.01004; docs/delta.md.
    """
    chunk = _default_chunk(comm, invariant) if chunk is None else chunk
    flags = use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval
    before = Before(*flags, None, A_log, dt_bias, state_v_first, chunk)
    rule = "own_gated_delta_rule" if chunk == "allscan" else "gated_delta_rule"
    asked = Asked(scale, initial_state, output_final_state, cu_seqlens, first_token, layout, per_document, invariant)
    return _call(rule, before, Inputs(q, k, v, g, beta), comm, asked)


def _default_chunk(comm: Any, invariant: int | None) -> str:
    """Who computes inside of chunks where the caller does not say it."""
    invariant = getattr(comm, "invariant", 0) if invariant is None else invariant
    on_cpus = isinstance(comm, Communicator) and comm.device.type == "cpu"
    return "allscan" if invariant or on_cpus else "fla"


def _call(rule: str, before: Before, x: Inputs, comm: Communicator, asked: Asked) -> tuple[Tensor, Tensor | None]:
    if type(comm) is not Communicator:
        check_communicator(comm)
    if torch.compiler.is_compiling():
        return _delta(rule, before, x, comm, asked)
    with comm.call(False, TITLES[rule], (*x, asked.initial_state, before.A_log, before.dt_bias)):
        return _delta(rule, before, x, comm, asked)


def _delta(rule: str, before: Before, x: Inputs, comm: Communicator, asked: Asked) -> tuple[Tensor, Any]:
    final, of_all = asked.output_final_state, False
    if isinstance(final, str):
        of_all = final = check_final(final, comm)
    cu_seqlens, initial_state = None, asked.initial_state
    key = None if torch.compiler.is_compiling() else _key(rule, before, x, comm, asked)
    prepared = None if key is None else comm.calls.get(key)
    if prepared is None:
        cu_seqlens, options = _checked(rule, before, x, comm, asked)
    if initial_state is not None and before.state_v_first:
        initial_state = initial_state.mT
    *inputs, initial_state = plain_or_traced(*x, initial_state)
    tensors = *before.applied(rule, Inputs(*inputs), comm.handle), initial_state
    if prepared is None and watched((*tensors, cu_seqlens)):
        o, final_state, *_ = _operator.forward(*tensors, cu_seqlens, final, comm.handle, *options)
    else:
        if prepared is None:
            prepared = _prepare(comm, tensors, cu_seqlens, options)
            if key is not None:
                comm.calls.remember(key, prepared)
        if wants_gradient(tensors):
            o, final_state = _operator.eager((prepared, (cu_seqlens, final)), *tensors)
        else:
            o, final_state, *_ = prepared.forward(*tensors, cu_seqlens, final)
    if not final:
        return o, None
    if of_all:
        packed = asked.cu_seqlens is not None and not asked.per_document
        o, final_state = final_of_all(o, final_state, comm, packed, asked.layout == "zigzag")
    return o, final_state.mT if before.state_v_first else final_state


def _key(rule: str, before: Before, x: Inputs, comm: Communicator, asked: Asked) -> tuple | None:
    """By which a call finds what an equal one has prepared; None where each call is to be checked: a wrong number may
    equal a right one (Decimal(1)), and NaN is none."""
    scale, bound, layout = asked.scale, before.lower_bound, asked.layout
    if asked.cu_seqlens is not None or asked.first_token is not None or asked.per_document:
        return None
    if comm.debug or num_dispatch_modes():
        return None
    for number in (scale, bound):
        if type(number) not in (float, int, type(None)) or number != number:
            return None
    if not type(layout) is type(before.chunk) is str or type(asked.invariant) not in (int, type(None)):
        return None
    tensors = call_key((*x, asked.initial_state, before.A_log, before.dt_bias))
    return (
        None
        if tensors[-1] == 2
        else (tensors, rule, scale, bound, layout, before.chunk, before.fields(), asked.invariant)
    )


def _checked(rule: str, before: Before, x: Inputs, comm: Communicator, asked: Asked) -> tuple[Tensor | None, Options]:
    """(cu_seqlens, Options), after the checks that need no other rank."""
    deferred, cu_seqlens, scale, initial_state = None, None, asked.scale, asked.initial_state
    try:
        zigzag = zigzag_of(asked.layout, asked.per_document, asked.cu_seqlens)
        check_for_an_operator(dict(x._asdict(), initial_state=initial_state), scale)
        cu_seqlens = None if asked.cu_seqlens is None else own_boundaries(asked.cu_seqlens)
        first_token = own_place(asked.first_token, cu_seqlens)
        if before.chunk not in (None, *CHUNKS):
            raise ValueError(f"chunk must be one of {', '.join(CHUNKS)}, got {before.chunk!r}")
        of_gate = dict(lower_bound=before.lower_bound, A_log=before.A_log, dt_bias=before.dt_bias)
        if not before.gate and (given := [name for name, x in of_gate.items() if x is not None]):
            raise ValueError(f"{given[0]} is of the gate that use_gate_in_kernel=True makes of g")
        if before.gate or before.sigmoid or before.twice:
            _check_before(before, rule, x.q, x.v, x.g)
        invariant = check_invariant(comm, comm.invariant if asked.invariant is None else asked.invariant, zigzag)
        if invariant and not isinstance(RULES[rule], OwnChunks):
            raise ValueError(f'with invariant={invariant} chunk must be "allscan", got {before.chunk!r}')
        inputs = *x, initial_state, before.A_log, before.dt_bias
        check_saveable((*inputs, cu_seqlens), inputs)
        if not (isinstance(RULES[rule], OwnChunks) or torch.compiler.is_compiling()):
            _import_fla()
    except (TypeError, ValueError, ImportError) as error:
        deferred = DeferredError(error)
    if deferred is not None:
        # raises it, on the other ranks too if this is a first call
        AllScanCarrier.of(comm, dense=True).prepare(None, deferred=deferred)
    compare_values(comm, asked.cu_seqlens, cu_seqlens)
    scale = x.q.shape[-1] ** -0.5 if scale is None else float(scale)
    bound = None if before.lower_bound is None or not before.gate else float(before.lower_bound)
    return cu_seqlens, Options(rule, scale, before.fields(), bound, first_token, zigzag, invariant)


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


def _check(comm, tensors, cu_seqlens, rule: str, zigzag: int) -> None:
    """Raise TypeError or ValueError for arguments that are wrong on this rank."""
    q, k, v, g, beta, initial_state = tensors
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
    sequences = shapes_of(q, v, cu_seqlens).sequences
    states = carried_states(B, sequences, zigzag) * (1 + bool(zigzag))
    if states * HV > MOST_CHUNKS:
        raise ValueError(f"{states} states of sequences or halves times the heads of v must be at most {MOST_CHUNKS:,}")
    if cu_seqlens is not None and B != 1:
        raise ValueError(f"cu_seqlens must be [N + 1] with B = 1, got {tuple(cu_seqlens.shape)}, B = {B}")
    if initial_state is not None:
        check_tensor("initial_state", initial_state, (sequences, HV, K, v.shape[3]), comm.device)


class Shapes(NamedTuple):
    """Of a call; boundaries: the numbers of cu_seqlens, 0 without."""

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    boundaries: int
    dtype: torch.dtype  # of q, k, v
    device: torch.device
    invariant: int = 0

    @property
    def sequences(self) -> int:
        return self.boundaries - 1 if self.boundaries else self.B

    def carried(self, zigzag: int) -> tuple[int, int, int]:
        """Of what is sent over the ranks."""
        return carried_states(self.B, self.sequences, zigzag) * self.HV, self.K, self.V

    def segment_length(self) -> int:
        return self.invariant or delta_segment_length(self.B * self.T, self.HV, multiprocessors(self.device))


def shapes_of(q: Tensor, v: Tensor, cu_seqlens: Tensor | None = None, invariant: int = 0) -> Shapes:
    """Of tensors that were checked."""
    boundaries = 0 if cu_seqlens is None else cu_seqlens.shape[0]
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    return Shapes(B, T, H, HV, K, V, boundaries, v.dtype, v.device, invariant)


def _find_layout(comm: Communicator, x: Shapes, cu_seqlens: Tensor | None, options: Options) -> Layout:
    packed = bool(options.zigzag) or cu_seqlens is not None  # as fla takes both halves
    tokens = OwnTokens(x.B, x.T, cu_seqlens, options.first_token, options.zigzag)
    return find_layout(comm, tokens, x.segment_length(), packed, bool(x.invariant))


class PreparedDelta:
    """Of calls with one signature: what the first of them has worked out, with which the later ones need no checks but
    those by which they find it; and their backward passes.

    saved: what autograd saves, see ``_saved``. fixed: the operator's last inputs."""

    def __init__(self, comm: Communicator, x: Shapes, cu_seqlens: Tensor | None, options: Options, saved: list) -> None:
        rule, scale, *_, zigzag, _ = options
        self.comm, self.rule, self.name, self.saved, self.zigzag = (
            comm,
            RULES[rule],
            TITLES[rule],
            saved,
            bool(zigzag),
        )
        self.layout = _find_layout(comm, x, cu_seqlens, options)
        self.states = _state_pass(comm, self.layout, x, options)
        self.call = ChunkCall(self.states, scale, local(self.layout))
        self.fixed = comm.handle, *options
        self.state_shape = x.sequences, x.HV, x.K, x.V
        self._state_specs = _state_specs(x, zigzag)
        carrier = AllScanCarrier.of(comm, dense=True)
        self.pending = partial(carrier.pending, carrier.prepare(x.carried(zigzag)), self.zigzag)

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        """(o, final_state or None, and for backward: sums of gates, scores and solved of chunks.py, and Kept), of the
        operator's inputs before ``fixed``."""
        *tensors, initial_state, _, final = inputs
        x = Inputs(*tensors)
        ends = Ends(initial_state, x.q.new_zeros(self.state_shape, dtype=torch.float32) if final else None)
        kept = Kept(*(x.q.new_empty(shape, dtype=dtype) for dtype, shape in self._state_specs))
        self.layout.use(self.comm)
        v_shape = x.v.shape
        if not v_shape[1]:
            self.states.forward_of_none(ends, kept)
            return torch.empty_like(x.v), ends.filled, *_sums_and_chunks(self.rule, x.k, x.v, x.g), *kept
        if self.zigzag:
            x = Inputs(*_in_one(*x))
        o, sums, (scores, solved) = self.rule.forward(self.call, x, ends, kept)
        if self.zigzag:
            o = unsafe_view(o, v_shape)  # no view, which must not be written to
            solved = solved.view(v_shape[0], -1, *solved.shape[2:])
            sums = sums.view(v_shape[0], -1, *sums.shape[2:]) if sums.numel() else sums
            scores = scores.view(solved.shape) if scores.numel() else scores
        if self.comm.debug:
            self.comm._look_for_nan(self.name, o=o, final_state=ends.filled)
        return o, ends.filled, sums, scores.view(WORDS[scores.dtype]), solved, *kept

    def backward(self, x: Inputs, saved: Saved, outer: Outer, kept: Kept) -> list[Any]:
        """Gradients of the inputs."""
        self.layout.use(self.comm)
        if not x.q.shape[1]:
            self.states.backward_of_none(Ends(outer.dfinal, outer.dinitial), kept)
            return [torch.empty_like(y) for y in x]
        saved, like = saved._replace(scores=saved.scores.view(saved.solved.dtype)), x
        if self.zigzag:
            x, scores = Inputs(*_in_one(*x)), saved.scores
            saved = Saved(*_in_one(scores if scores.numel() else None, saved.solved))
            outer = outer._replace(do=outer.do.flatten(0, 1)[None])
        grads: Any = self.rule.backward(self.call, x, saved, outer, kept)
        grads = [d.to(y.dtype).contiguous() for d, y in zip(grads, like, strict=True)]
        if self.zigzag:
            grads = [d.view(y.shape) for d, y in zip(grads, like, strict=True)]
        if self.comm.debug:
            named = dict(zip(("dq", "dk", "dv", "dg", "dbeta"), grads), dinitial_state=outer.dinitial)
            self.comm._look_for_nan(f"{self.name}'s backward", **named)
        return grads


def _prepare(comm: Communicator, tensors: tuple, cu_seqlens: Tensor | None, options: Options) -> PreparedDelta:
    """After all checks; those of the tensors at the first call with tensors like these, which agrees with the other
    ranks. tensors: q, k, v, g, beta, initial_state."""
    q, _, v, g, beta, initial_state = tensors
    rule, scale, fields, bound, first_token, zigzag, invariant = options
    are_none = initial_state is None, cu_seqlens is None, first_token is None
    sequences = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    signature = rule, scale, fields, bound, signature_of(*tensors), sequences, are_none, zigzag, invariant
    if comm.debug or signature not in comm.checked:
        shape = agree = None
        if q.ndim == v.ndim == 4:
            shape = shapes_of(q, v, cu_seqlens).carried(zigzag)
            of_fields = (*(tuple(field.split("=")) for field in fields.split(";")), ("lower_bound", bound))
            common = common_fields(q.shape[0], q.dtype, scale, zigzag, *are_none)
            agree = f"zeco_{rule}", ("heads of q", q.shape[2]), *common, *of_fields, ("invariant", invariant)

        def check() -> None:
            _check(comm, tensors, cu_seqlens, rule, zigzag)
            check_packed(comm, cu_seqlens, q.shape[1], first_token, zigzag)
            check_cut(comm, q.shape[1], invariant, zigzag)
            if invariant and not q.shape[1] and comm.rank in ((0,) if zigzag else (0, comm.size - 1)):
                raise ValueError(f"with invariant={invariant} the first and the last rank must have tokens")

        summed = None if isinstance(RULES[rule], OwnChunks) else CHUNK_TOKENS  # ours take gates of -inf, too
        first = FirstCall(signature, shape, agree, summed)
        check_first(comm, first, check, g, AllScanCarrier.of(comm, dense=True).prepare)
    x = shapes_of(q, v, cu_seqlens, invariant)
    own = isinstance(RULES[rule], OwnChunks)  # which saves the gates, not their sums
    saved = _saved(x, beta.dtype, g.dtype if own else torch.float32, rule, zigzag)
    return PreparedDelta(comm, x, cu_seqlens, options, saved)


def _import_fla() -> None:
    if rejected := rejection("flash-linear-attention"):
        raise ImportError(rejected)
    try:
        import fla.ops.kda  # noqa: F401
    except Exception as error:  # a package that is there in part raises anything
        raise ImportError(f"delta rules need flash-linear-attention, whose import failed: {error!r}") from error


def _state_pass(comm: Communicator, layout: Layout, x: Shapes, options: Options) -> StatePass:
    rule, zigzag = RULES[options.rule], options.zigzag
    cls = ChunkPass if isinstance(rule, OwnChunks) else StatePass
    heads = x.H if rule.scalar or cls is ChunkPass else x.HV
    B = carried_states(x.B, x.sequences, zigzag)
    shape = DeltaShape(B, x.HV, heads, x.K, x.V, x.dtype, rule.scalar, bool(zigzag), bool(x.invariant))
    return layout.derived((cls, shape), lambda: cls(comm, layout.tables(), shape))


def _in_one(*tensors: Tensor | None) -> Iterator[Any]:
    """[B, T, ...] as [1, B * T, ...]: packed, as the halves of the zigzag layout are for fla."""
    return (x if x is None else x.flatten(0, 1)[None] for x in tensors)


def _state_specs(x: Shapes, zigzag: int) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
    """(dtype, shape) of each of Kept; of more segments than there may be. The first two are saved as integers, see
    WORDS."""
    segments = most_segments(x.B, x.T, x.sequences, x.segment_length(), zigzag)
    states = ((torch.int32, (segments, x.HV, x.K, width)) for width in (x.K, x.V))
    return *states, (torch.int64, (FWD_EPOCHS,))


# The custom operator, which torch.compile traces


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    final: bool,
    handle: int,
    rule: str,
    scale: float,
    fields: str,
    bound: float | None,
    first_token: int | None = None,
    zigzag: int = False,
    invariant: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    comm, tensors = communicator_of(handle), (q, k, v, g, beta, initial_state)
    with comm.call(False, TITLES[rule], tensors):
        options = Options(rule, scale, fields, bound, first_token, zigzag, invariant)
        prepared = _prepare(comm, tensors, cu_seqlens, options)
        return prepared.forward(*tensors, cu_seqlens, final)


def _fake(
    q,
    k,
    v,
    g,
    beta,
    initial_state,
    cu_seqlens,
    final,
    handle,
    rule,
    scale,
    fields,
    bound,
    first_token=None,
    zigzag=False,
    invariant=0,
) -> tuple[Tensor | None, ...]:
    specs = _state_specs(shapes_of(q, v, cu_seqlens, invariant), zigzag)
    kept = (q.new_empty(shape, dtype=dtype) for dtype, shape in specs)
    final_state = _zeros(q, v, cu_seqlens, final)
    return torch.empty_like(v), final_state, *_sums_and_chunks(RULES[rule], k, v, g), *kept


def _zeros(q, v, cu_seqlens, wanted) -> Tensor | None:
    """States, or None."""
    x = shapes_of(q, v, cu_seqlens)
    return q.new_zeros((x.sequences, x.HV, x.K, x.V), dtype=torch.float32) if wanted else None


def _sums_and_chunks(rule, k, v, g) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised sums of gates, scores and solved."""
    solved, own = k.new_empty(*v.shape[:3], CHUNK_TOKENS), isinstance(rule, OwnChunks)
    scores = k.new_empty(0 if rule.scalar and not own else solved.shape, dtype=WORDS[k.dtype])
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
    initial: bool,
    beta_dtype: torch.dtype,
    handle: int,
    rule: str,
    scale: float,
    first_token: int | None = None,
    zigzag: int = False,
    invariant: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dg, dbeta, dinitial_state or None)."""
    saved = q, k, v, beta, cu_seqlens, sums, scores, solved, transitions, enters, fwd_epoch
    options = handle, rule, scale, first_token, zigzag, invariant
    return _run_backward(None, do, dfinal, *saved, initial, beta_dtype, *options)


def _run_backward(prepared: PreparedDelta | None, do: Tensor, dfinal: Tensor | None, *inputs: Any) -> tuple[Any, ...]:
    """``inputs``: those of ``_backward``."""
    *tensors, initial, beta_dtype, handle, rule, scale, first_token, zigzag, invariant = inputs
    q, k, v, beta, cu_seqlens, sums, *others = tensors
    comm = communicator_of(handle)
    with comm.call(True, f"the backward of {TITLES[rule]}", (do, dfinal)):
        reject_second_derivative("a delta rule")
        if q.ndim != 4:
            raise others_than_saved(TITLES[rule], "q", q, "[B, T, H, K]")
        if prepared is None:
            own = isinstance(RULES[rule], OwnChunks) and sums.dtype == do.dtype  # gates like q
            shapes = shapes_of(q, do, cu_seqlens, invariant)
            saved = _saved(shapes, beta_dtype, do.dtype if own else torch.float32, rule, zigzag)
        else:
            saved = prepared.saved
        names, given = (
            "q k v beta sums scores solved transitions enters fwd_epoch do",
            (q, k, v, beta, sums, *others, do),
        )
        q, k, v, beta, sums, scores, solved, *kept, do = restored(TITLES[rule], names, given, saved)
        if prepared is None:
            options = Options(rule, scale, "", None, first_token, zigzag, invariant)
            prepared = PreparedDelta(comm, shapes, cu_seqlens, options, saved)
        dinitial = q.new_zeros(prepared.state_shape, dtype=torch.float32) if initial else None
        outer = Outer(do, dfinal, dinitial)
        grads = prepared.backward(Inputs(q, k, v, sums, beta), Saved(scores, solved), outer, Kept(*kept))
        return *grads, dinitial


@functools.lru_cache(1024)
def _saved(x: Shapes, beta_dtype: torch.dtype, gate_dtype: torch.dtype, rule: str, zigzag: int) -> list[tuple]:
    """The dtype, shape and device of what autograd saves, but for cu_seqlens, and of do."""
    keys, of_v, dtype, scalar = (x.B, x.T, x.H, x.K), (x.B, x.T, x.HV), x.dtype, RULES[rule].scalar
    values, chunk = (*of_v, x.V), (*of_v, CHUNK_TOKENS)
    without = scalar and not isinstance(RULES[rule], OwnChunks)
    specs = [(dtype, keys), (dtype, keys), (dtype, values), (beta_dtype, of_v)]
    specs += (gate_dtype, of_v if scalar else (*of_v, x.K)), (WORDS[dtype], (0,) if without else chunk)
    specs += (dtype, chunk), *_state_specs(x, zigzag), (dtype, values)
    return [(of, torch.Size(shape), x.device) for of, shape in specs]


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
    initial,
    beta_dtype,
    handle,
    rule,
    scale,
    first_token=None,
    zigzag=False,
    invariant=0,
) -> tuple[Tensor | None, ...]:
    dinitial = _zeros(q, v, cu_seqlens, initial)
    return *(torch.empty_like(x) for x in (q, k, v, sums, beta)), dinitial


def _save(ctx, inputs, output) -> None:
    q, k, v, g, beta, initial_state, cu_seqlens, _, handle, rule, scale, _, _, *where = inputs
    sums = g if isinstance(RULES[rule], OwnChunks) else output[2]
    ctx.save_for_backward(q, k, v, beta, cu_seqlens, sums, *output[3:])
    ctx.gate_dtype, initial = g.dtype, initial_state is not None and initial_state.requires_grad
    ctx.rest = initial, beta.dtype, handle, rule, scale, *where


def _pending(q, k, v, g, beta, initial_state, cu_seqlens, *rest) -> list:
    """For the backward of a call of the custom operator."""
    _, handle, *_, zigzag, _ = rest
    carrier = AllScanCarrier.of(communicator_of(handle), dense=True)
    return carrier.pending(carrier.prepare(shapes_of(q, v, cu_seqlens).carried(zigzag)), bool(zigzag))


def _gradient(backward, ctx, do, dfinal) -> tuple[Tensor | None, ...]:
    """Of q, k, v, g, beta and initial_state."""
    for pending in ctx.pending:
        pending.run()
    initial, _, handle, *_ = ctx.rest
    q, k, v, *saved = saved_tensors(ctx, lambda: communicator_of(handle), True)
    do, dfinal = plain_or_traced(torch.zeros_like(v) if do is None else do, dfinal)
    dq, dk, dv, dg, dbeta, dinitial = backward(do, dfinal, q, k, v, *saved, *ctx.rest)
    return dq, dk, dv, dg.to(ctx.gate_dtype), dbeta, dinitial if initial else None


_passes = Passes(_forward, _fake, _backward, _fake_backward)
_operator = Operator("allscan::zeco_delta", _passes, _save, _gradient, _pending, _run_backward)
