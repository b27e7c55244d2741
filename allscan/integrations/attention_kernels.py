"""Attention of one block by PyTorch's kernels with log-sum-exps: cuDNN, FlashAttention 2, and a CPU kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..bindings.torch_compat import operator
from .attention_backward import by_rows, by_triangles, tokens_first

Output = tuple[torch.Tensor, torch.Tensor, Any]  # o, its log-sum-exps, values saved for backward


class Kernel(NamedTuple):
    """A pair of attention kernels whose forward returns, and whose backward takes, log-sum-exps.

    forward: (q [B, H, T, D], k [B, G, S, D], v [B, G, S, V], causal, scale) -> (o [B, H, T, V], lse [B, H, T], saved
        values for backward); H is a multiple of G; causal only for T = S. o has tokens before heads in memory.
    backward: (do, q, k, v, o, lse, saved values, causal, scale) -> (dq, dk, dv). o and lse may cover more keys than k;
        the gradients are then this block's share. lse is contiguous.
    """

    name: str
    forward: Callable
    backward: Callable
    fits: Callable  # (q, k, v) -> bool


def kernel_for(q: Tensor, k: Tensor, v: Tensor) -> Kernel | None:
    """The fastest kernel for these tensors, or None. The result depends on torch's current backend switches.

    torch.compile asks for the switches when it traces a function, and not when that runs."""
    return next((kernel for kernel in KERNELS if kernel.fits(q, k, v)), None)


def strided_like(x: Tensor, other: Tensor) -> torch.Tensor:
    """x with the strides of ``other``, of the same shape."""
    return x if x.stride() == other.stride() else torch.empty_like(other).copy_(x)


def _aligned(x: Tensor) -> torch.Tensor:
    """x, aligned to 16 bytes as the GPU kernels require; copied if necessary."""
    words = 16 // x.element_size()
    fits = x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and not any(s % words for s in x.stride()[:-1])
    return x if fits else x.contiguous()


# cuDNN. PyTorch caches its backward graphs by the layouts of q, k and v only, but a graph also depends on the layouts
# of o, its gradient and the log-sum-exp: here they always follow from q's, as in PyTorch's own calls.


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Output:
    tensors = tokens_first(q), _aligned(k), _aligned(v)
    o, lse, *lengths, seed, offset, _ = cudnn(*tensors, None, True, 0.0, causal, False, scale=scale)
    return o, lse.view(q.shape[:3]), (lse.shape, lengths, (seed, offset))


def _cudnn_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, more: Any, causal: bool, scale: float
) -> tuple[torch.Tensor, ...]:
    shape, (cum_q, cum_k, *_), seeds = more
    o, sizes = tokens_first(o), (q.shape[2], k.shape[2])
    lse = lse.reshape(*q.shape[:3], *shape[3:])
    tensors = strided_like(do, o), tokens_first(q), _aligned(k), _aligned(v), o, lse
    return cudnn_backward(*tensors, *seeds, None, cum_q, cum_k, *sizes, 0.0, causal, scale=scale)


def _cudnn_fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    if q.dtype not in HALF or not _has_cudnn(q.device) or torch.are_deterministic_algorithms_enabled():
        return False
    return min(q.shape[2], k.shape[2]) >= CUDNN_TOKENS and (q.shape[-1], v.shape[-1]) in CUDNN_WIDTHS


@torch.compiler.assume_constant_result  # torch.compile does not trace it, but calls it once
def _has_cudnn(device: torch.device) -> bool:
    """Whether cuDNN's kernels are enabled, and were tested on this GPU and in this version."""
    known = CUDNN_IS_KNOWN and _capability(device) == CUDNN_GPU
    return known and (torch.backends.cudnn.version() or 0) >= CUDNN_LEAST and torch.backends.cuda.cudnn_sdp_enabled()


def _widths_in(widths: set[tuple[int, int]], q: Tensor, k: Tensor, v: Tensor) -> bool:
    return (q.shape[-1], v.shape[-1]) in widths and _cudnn_fits(q, k, v)


# Compute capability, cuDNN's version and widths of keys and values with which tests/gpu/test_attention_gpu.py has
# passed: other GPUs and older versions were not tested.
CUDNN_GPU, CUDNN_LEAST = (9, 0), 91900
CUDNN_WIDTHS = {(64, 64), (128, 96), (128, 128), (192, 128), (256, 256)}
CUDNN_TOKENS = 256  # below this flash runs: a plan for each new length costs the host more than the kernel saves
cudnn = operator(
    "_scaled_dot_product_cudnn_attention",
    "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask scale",
)
cudnn_backward = operator(
    "_scaled_dot_product_cudnn_attention_backward",
    "grad_out query key value out logsumexp philox_seed philox_offset attn_bias cum_seq_q cum_seq_k max_q max_k "
    "dropout_p is_causal scale",
)
IN_TRIANGLES = {(192, 128)}  # widths of keys and values, on Hopper: 495 TFLOP/s in place of 288; 128, 256: fewer
SQUARE = 4096  # tokens; smaller squares in triangles were not measured
BY_ROWS = {(256, 256)}  # on an H200 two rows of 4,096 queries have 390 TFLOP/s, one of 8,192 has 345
# A call's rows times keys. dk and dv of each row need memory: 1 GiB with 16 heads of keys, as much in the kernel with
# fewer.
ROW, ROWS_TIMES_KEYS = 4096, 65536
CUDNN_IS_KNOWN = None not in (cudnn, cudnn_backward)


HALF = torch.bfloat16, torch.float16


def _capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of an NVIDIA GPU, else (0, 0)."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return torch.cuda.get_device_capability(device) if nvidia else (0, 0)


# FlashAttention 2 of PyTorch


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Output:
    q, k, v = (_aligned(x) for x in (q, k, v))
    o, lse, *lengths, seed, offset, _ = flash(q, k, v, 0.0, causal, False, scale=scale)
    return o, lse, (lengths, (seed, offset))


def _flash_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, more: Any, causal: bool, scale: float
) -> tuple[torch.Tensor, ...]:
    lengths, seeds = more
    do, q, k, v, o = (_aligned(x) for x in (do, q, k, v, o))
    return flash_backward(do, q, k, v, o, lse, *lengths, 0.0, causal, *seeds, scale=scale)


def flash_fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether FlashAttention 2 supports these tensors."""
    return q.dtype in HALF and _has_flash(q.device) and max(q.shape[-1], v.shape[-1]) <= 256


@torch.compiler.assume_constant_result
def _has_flash(device: torch.device) -> bool:
    return FLASH_IS_KNOWN and _capability(device) >= (8, 0) and torch.backends.cuda.flash_sdp_enabled()


flash = operator("_scaled_dot_product_flash_attention", "query key value dropout_p is_causal return_debug_mask scale")
flash_backward = operator(
    "_scaled_dot_product_flash_attention_backward",
    "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal philox_seed "
    "philox_offset scale",
)
FLASH_IS_KNOWN = None not in (flash, flash_backward)


# PyTorch's CPU kernel

on_cpu = operator("_scaled_dot_product_flash_attention_for_cpu", "query key value dropout_p is_causal attn_mask scale")
on_cpu_backward = operator(
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "grad_out query key value out logsumexp dropout_p is_causal attn_mask scale",
)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Output:
    groups = q.shape[1] // k.shape[1]
    o, lse = on_cpu(q, *(x.repeat_interleave(groups, 1) for x in (k, v)), 0.0, causal, scale=scale)
    return o, lse.contiguous(), None


def _cpu_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, _, causal: bool, scale: float
) -> tuple[torch.Tensor, ...]:
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    dq, *others = on_cpu_backward(do, q, k, v, o, lse, 0.0, causal, scale=scale)
    return dq, *(x.unflatten(1, (-1, groups)).sum(2) for x in others)


def _cpu_fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return q.device.type == "cpu" and None not in (on_cpu, on_cpu_backward)


def widened(*tensors: Tensor) -> list[torch.Tensor]:
    """The tensors padded with zeros to one width (last dimension), a multiple of 8."""
    width = max(x.shape[-1] for x in tensors)
    width += -width % 8
    return [F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in tensors]


def _of_one_width(forward: Callable[..., Any], backward: Callable[..., Any]) -> tuple[Callable, Callable]:
    """Wrap kernels that require q, k and v of one width, a multiple of 8."""

    def forward_of_any(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Output:
        o, lse, more = forward(*widened(q, k, v), causal, scale)
        return tokens_first(o[..., : v.shape[-1]]), lse, more

    def backward_of_any(
        do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, *others: Any
    ) -> tuple[torch.Tensor, ...]:
        found = backward(*widened(do, q, k, v, o), *others)
        return tuple(dx[..., : x.shape[-1]] for dx, x in zip(found, (q, k, v), strict=True))

    return forward_of_any, backward_of_any


_triangles, _rows = by_triangles(_cudnn_backward, SQUARE), by_rows(_cudnn_backward, ROW, ROWS_TIMES_KEYS)
KERNELS = (
    Kernel("cudnn, triangles", _cudnn_forward, _triangles, partial(_widths_in, IN_TRIANGLES)),
    Kernel("cudnn, rows", _cudnn_forward, _rows, partial(_widths_in, BY_ROWS)),
    Kernel("cudnn", _cudnn_forward, _cudnn_backward, _cudnn_fits),
    Kernel("flash", *_of_one_width(_flash_forward, _flash_backward), flash_fits),
    Kernel("cpu", *_of_one_width(_cpu_forward, _cpu_backward), _cpu_fits),
)
