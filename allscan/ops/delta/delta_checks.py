"""Arguments of the delta rules: checks on this rank before a call, and the shapes of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...base.autograd import check_saveable
from ...base.checks import (
    check_for_an_operator,
    check_halves,
    check_tensor,
    checked_first_token,
    zigzag_of,
)
from ...base.errors import DeferredError
from ...base.tiling import multiprocessors
from ...bindings.versions import rejection
from ...comm.communicator import Communicator
from ...tokens.packing import CHUNK_TOKENS, GRID_LIMIT, carried_states, own_boundaries
from ...tokens.partition import compare_values
from ..carrier import AllScanCarrier, check_invariant
from .delta_passes import delta_segment_length
from .fla_chunks import KDA, GatedDeltaNet
from .own_chunks import OwnChunks
from .records import Before, CallOptions, Inputs, Options

RULES: dict[str, KDA | GatedDeltaNet | OwnChunks] = {
    "kda": KDA(),
    "safe_kda": KDA(safe_gate=True),
    "gated_delta_rule": GatedDeltaNet(),
    "own_kda": OwnChunks(scalar=False),
    "own_gated_delta_rule": OwnChunks(scalar=True),
}
TITLES = {rule: "zeco_" + rule.removeprefix("own_") for rule in RULES}  # public names
CHUNKS = "fla", "allscan"  # values of chunk=


def checked(
    rule: str, before: Before, fields: str, x: Inputs, comm: Communicator, asked: CallOptions
) -> tuple[Tensor | None, Options]:
    """Run the checks that need no other rank; return (cu_seqlens, Options)."""
    deferred, cu_seqlens, scale, initial_state = None, None, asked.scale, asked.initial_state
    try:
        zigzag = zigzag_of(asked.layout, asked.per_document, asked.cu_seqlens)
        check_for_an_operator(dict(x._asdict(), initial_state=initial_state), scale)
        _check_types(x)
        if before.state_v_first and initial_state is not None and initial_state.ndim < 2:
            raise ValueError(f"initial_state must be [.., HV, V, K], got {tuple(initial_state.shape)}")
        cu_seqlens = None if asked.cu_seqlens is None else own_boundaries(asked.cu_seqlens)
        first_token = checked_first_token(asked.first_token, cu_seqlens)
        if before.chunk not in CHUNKS:
            raise ValueError(f"chunk must be one of {', '.join(CHUNKS)}, got {before.chunk!r}")
        of_gate = dict(lower_bound=before.lower_bound, A_log=before.A_log, dt_bias=before.dt_bias)
        if not before.gate and (gate_arguments := [name for name, x in of_gate.items() if x is not None]):
            raise ValueError(f"{gate_arguments[0]} is of the gate that use_gate_in_kernel=True makes of g")
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
        # raises the error, at a first call on all ranks
        AllScanCarrier.of(comm, dense=True).prepare(None, deferred=deferred)
    compare_values(comm, asked.cu_seqlens, cu_seqlens)
    scale = x.q.shape[-1] ** -0.5 if scale is None else float(scale)
    bound = None if before.lower_bound is None or not before.gate else float(before.lower_bound)
    return cu_seqlens, Options(rule, scale, fields, bound, first_token, zigzag, invariant)


def _check_types(x: Inputs) -> None:
    """Raise TypeError for inputs whose dtype is wrong before raw arguments are converted."""
    for name, y in x._asdict().items():
        if not y.is_floating_point():
            raise TypeError(f"{name} must have a float type, got {y.dtype}")
    q, k, v, *_ = x
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32) or not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k, v must be bfloat16, float16 or float32 alike, got {q.dtype}, {k.dtype}, {v.dtype}")


def _check_before(before: Before, rule: str, q: Tensor, v: Tensor, g: Tensor) -> None:
    """Raise TypeError or ValueError for wrong options of raw gates and beta."""
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
    if v.ndim != 4:
        raise ValueError(f"v must be [B, T, HV, V], got {tuple(v.shape)}")
    heads, K = v.shape[2], q.shape[3]
    if tuple(g.shape[2:]) != ((heads,) if scalar else (heads, K)):
        raise ValueError(f"g must be {['B', 'T', heads] if scalar else ['B', 'T', heads, K]}, got {list(g.shape)}")
    for name, x, count in (("A_log", before.A_log, heads), ("dt_bias", before.dt_bias, heads * (1 if scalar else K))):
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.layout != torch.strided or not x.is_floating_point():
            raise TypeError(f"{name} must be dense, of a float type, got {x.dtype}, {x.layout}")
        if x.numel() != count or x.device != g.device:
            raise ValueError(f"{name} must be {count} numbers on {g.device}, got {tuple(x.shape)} on {x.device}")


def check_tensors(
    comm: Communicator, tensors: Sequence[Any], cu_seqlens: Tensor | None, rule: str, zigzag: int
) -> None:
    """Raise TypeError or ValueError for arguments that are wrong on this rank."""
    q, k, v, g, beta, initial_state = tensors
    for name, x in dict(q=q, k=k, v=v, g=g, beta=beta).items():
        if x.device != comm.device:
            raise ValueError(f"{name} must be on {comm.device}, got {x.device}")
    if q.dtype == torch.bfloat16 and q.device.type == "cpu" and not isinstance(RULES[rule], OwnChunks):
        raise TypeError(
            "q, k, v must be float32 or float16 on CPUs: Triton's interpreter, in which fla's kernels run "
            "there, makes garbage of products of bfloat16"
        )
    if g.dtype not in (torch.float32, q.dtype):
        raise TypeError(f"g must be float32 or have the dtype of q, {q.dtype}, got {g.dtype}")
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
    if B * -(-T // CHUNK_TOKENS) > GRID_LIMIT:
        raise ValueError(f"B * T must be at most {GRID_LIMIT:,} chunks of {CHUNK_TOKENS} tokens, got {tuple(q.shape)}")
    sequences = shapes_of(q, v, cu_seqlens).sequences
    states = carried_states(B, sequences, zigzag) * (1 + bool(zigzag))
    if states * HV > GRID_LIMIT:
        raise ValueError(f"{states} states of sequences or halves times the heads of v must be at most {GRID_LIMIT:,}")
    if cu_seqlens is not None and B != 1:
        raise ValueError(f"cu_seqlens must be [N + 1] with B = 1, got {tuple(cu_seqlens.shape)}, B = {B}")
    if initial_state is not None:
        check_tensor("initial_state", initial_state, (sequences, HV, K, v.shape[3]), comm.device)


def _import_fla() -> None:
    if rejected := rejection("flash-linear-attention"):
        raise ImportError(rejected)
    try:
        import fla.ops.kda  # noqa: F401
    except Exception as error:  # an incomplete installation can raise any exception
        raise ImportError(f"delta rules need flash-linear-attention, whose import failed: {error!r}") from error


class Shapes(NamedTuple):
    """Shapes of a call. boundaries: number of elements of cu_seqlens, 0 without."""

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
        """Return the shape of the states that a rank sends."""
        return carried_states(self.B, self.sequences, zigzag) * self.HV, self.K, self.V

    def segment_length(self) -> int:
        return self.invariant or delta_segment_length(self.B * self.T, self.HV, multiprocessors(self.device))


def shapes_of(q: Tensor, v: Tensor, cu_seqlens: Tensor | None = None, invariant: int = 0) -> Shapes:
    """Return the Shapes of checked tensors."""
    boundaries = 0 if cu_seqlens is None else cu_seqlens.shape[0]
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    return Shapes(B, T, H, HV, K, V, boundaries, v.dtype, v.device, invariant)
