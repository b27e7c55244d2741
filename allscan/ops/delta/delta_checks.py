"""Arguments of the delta rules: checks on this rank before a call, and the shapes of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...base.tiling import multiprocessors
from ...bindings.versions import rejection
from ...comm.communicator import Communicator
from ..operator import Call, check_dtypes
from .delta_passes import delta_segment_length
from .fla_chunks import KDA, GatedDeltaNet, SafeKDA
from .gdn_plans import ScalarChunkPass
from .kda_plans import ChunkPass

Pass = type[KDA] | type[GatedDeltaNet] | type[ChunkPass]
RULES: dict[str, Pass] = {
    "kda": KDA,
    "safe_kda": SafeKDA,
    "gated_delta_rule": GatedDeltaNet,
    "own_kda": ChunkPass,
    "own_gated_delta_rule": ScalarChunkPass,
}
TITLES = {rule: "zeco_" + rule.removeprefix("own_") for rule in RULES}  # public names
CHUNKS = "fla", "allscan"  # values of chunk=


class InputTransforms(NamedTuple):
    """Options that prepare raw arguments, and of the implementation: see ``zeco_kda``."""

    use_qk_l2norm_in_kernel: bool
    use_gate_in_kernel: bool
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    lower_bound: float | None
    state_v_first: bool
    chunk: str


def check_options(
    rule: str, tensors: Sequence[Any], raw: InputTransforms, invariant: int, recompute: bool | None
) -> None:
    """Raise TypeError, ValueError or ImportError for wrong options. tensors: q, k, v, g, beta, initial_state, A_log,
    dt_bias."""
    q, _, v, g, _, initial_state, A_log, dt_bias = tensors
    _check_types(tensors[:5])
    if raw.state_v_first and initial_state is not None and initial_state.ndim < 2:
        raise ValueError(f"initial_state must be [.., HV, V, K], got {tuple(initial_state.shape)}")
    if raw.chunk not in CHUNKS:
        raise ValueError(f"chunk must be one of {', '.join(CHUNKS)}, got {raw.chunk!r}")
    of_gate = dict(lower_bound=raw.lower_bound, A_log=A_log, dt_bias=dt_bias)
    if not raw.use_gate_in_kernel and (names := [name for name, x in of_gate.items() if x is not None]):
        raise ValueError(f"{names[0]} requires use_gate_in_kernel=True")
    if raw.allow_neg_eigval and not raw.use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval requires use_beta_sigmoid_in_kernel=True")
    if raw.use_gate_in_kernel:
        _check_gate(rule, raw.lower_bound, (q, v, g, A_log, dt_bias))
    if RULES[rule].own:
        return
    if invariant:
        raise ValueError(f'with invariant={invariant} chunk must be "allscan", got {raw.chunk!r}')
    if recompute is not None and not recompute:
        raise ValueError(f'with recompute=False chunk must be "allscan", got {raw.chunk!r}')
    if not torch.compiler.is_compiling():
        _import_fla()


def _check_types(tensors: Sequence[Tensor]) -> None:
    """Raise TypeError for inputs whose dtype is wrong before raw arguments are converted."""
    for name, y in zip(("q", "k", "v", "g", "beta"), tensors):
        if not y.is_floating_point():
            raise TypeError(f"{name} must have a float type, got {y.dtype}")
    check_dtypes(*tensors[:3])


def _check_gate(rule: str, lower_bound: Any, tensors: Sequence[Any]) -> None:
    """Raise TypeError or ValueError for wrong arguments of raw gates. tensors: q, v, g, A_log, dt_bias."""
    (q, v, g, A_log, dt_bias), scalar = tensors, RULES[rule].scalar
    if lower_bound is not None and not -float("inf") < lower_bound < 0:
        raise ValueError(f"lower_bound must be below 0, got {lower_bound}")
    if rule == "safe_kda" and (lower_bound is None or lower_bound < -5):
        raise ValueError(f"safe_gate with use_gate_in_kernel requires -5 <= lower_bound < 0, got {lower_bound}")
    if A_log is None and lower_bound is None:
        raise ValueError("use_gate_in_kernel requires A_log")
    if v.ndim != 4:
        raise ValueError(f"v must be [B, T, HV, V], got {tuple(v.shape)}")
    heads, K = v.shape[2], q.shape[3]
    if tuple(g.shape[2:]) != ((heads,) if scalar else (heads, K)):
        raise ValueError(f"g must be {['B', 'T', heads] if scalar else ['B', 'T', heads, K]}, got {list(g.shape)}")
    for name, x, count in (("A_log", A_log, heads), ("dt_bias", dt_bias, heads * (1 if scalar else K))):
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.layout != torch.strided or not x.is_floating_point():
            raise TypeError(f"{name} must be dense, of a float type, got {x.dtype}, {x.layout}")
        if x.numel() != count or x.device != g.device:
            raise ValueError(f"{name} must be {count} numbers on {g.device}, got {tuple(x.shape)} on {x.device}")


def check_tensors(comm: Communicator, tensors: Sequence[Any], call: Call) -> None:
    """Raise TypeError or ValueError for inputs that are wrong on this rank."""
    q, k, v, g, beta, _ = tensors
    if q.dtype == torch.bfloat16 and q.device.type == "cpu" and not RULES[call.rule].own:
        raise TypeError(
            "q, k and v must be float32 or float16 on CPUs: Triton's interpreter, in which fla's kernels run there, "
            "miscomputes products of bfloat16"
        )
    if g.dtype not in (torch.float32, q.dtype):
        raise TypeError(f"g must be float32 or have the dtype of q, {q.dtype}, got {g.dtype}")
    empty = 0 in (*q.shape[:1], *q.shape[2:], *v.shape[2:])
    if v.ndim != 4 or q.shape != k.shape or q.shape[:2] != v.shape[:2] or empty:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in dict(q=q, k=k, v=v).items())
        raise ValueError(f"q, k must be [B, T, H, K] and v [B, T, HV, V] with no empty dimension but T, got {shapes}")
    (B, T, H, K), HV = q.shape, v.shape[2]
    if HV % H:
        raise ValueError(f"v must have a multiple of the {H} heads of q, got {HV}")
    if K > 256:
        raise ValueError(f"K must be at most 256, got {K}")
    expected = dict(g=(B, T, HV) if RULES[call.rule].scalar else (B, T, HV, K), beta=(B, T, HV))
    for name, x in dict(g=g, beta=beta).items():
        if x.shape != expected[name]:
            raise ValueError(f"{name} must be {list(expected[name])}, got {list(x.shape)}")
    if call.invariant and not T and comm.rank in ((0,) if call.zigzag else (0, comm.size - 1)):
        raise ValueError(f"with invariant={call.invariant} the first and the last rank must have tokens")


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

    def segment_length(self) -> int:
        return self.invariant or delta_segment_length(self.B * self.T, self.HV, multiprocessors(self.device))


def shapes_of(q: Tensor, v: Tensor, cu_seqlens: Tensor | None = None, invariant: int = 0) -> Shapes:
    """Return the Shapes of checked tensors."""
    boundaries = 0 if cu_seqlens is None else cu_seqlens.shape[0]
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    return Shapes(B, T, H, HV, K, V, boundaries, v.dtype, v.device, invariant)
