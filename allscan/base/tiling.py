"""Tile sizes of the kernels."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

# Float32 words of a tile by type of link: (minimum, maximum with one tile per program, maximum with two or more). A
# launch has at most Communicator.max_ctas programs. The interpreter's cost grows with the number of tiles.
SENTINEL_WORDS = (128, 2048, 4096)
SIGNAL_WORDS = (1024, 8192, 8192)
CPU_WORDS = (8192, 8192, 8192)


def scan_tile(shape: Sequence[int], ctas: int, sentinel: bool, device: torch.device) -> tuple[int, int]:
    """(BK, BV) of a scan of ``shape`` [..., K, V] in at most ``ctas`` programs; ``sentinel``: whether its links are
    sentinel links (else signal links)."""
    limits = CPU_WORDS if device.type == "cpu" else SENTINEL_WORDS if sentinel else SIGNAL_WORDS
    least, most, most_of_two = limits
    one, two = (next_power_of_2(-(-math.prod(shape) // (ctas * tiles))) for tiles in (1, 2))
    K, V = shape[-2:]
    return default_tile(K, V, max(least, min(one, most), min(two, most_of_two)))


def default_tile(K: int, V: int, words: int) -> tuple[int, int]:
    """(BK, BV), powers of two with BK * BV at most ``words``. BV covers a whole, contiguous row of V if it fits."""
    BV = min(next_power_of_2(V), words)
    return min(next_power_of_2(K), max(1, words // BV)), BV


def scan_num_warps(tile: tuple[int, int]) -> int:
    """num_warps of a program that scans tiles of this size: 16 words for a thread."""
    return max(1, min(8, math.prod(tile) // 512))


def transition_tile(K: int) -> tuple[int, int]:
    """The ``tile`` (BK, BV) of an AllScan with transitions: 32 whole columns, or 16 if the registers cannot hold a
    transition (K > 128)."""
    return max(16, next_power_of_2(K)), 32 if K <= 128 else 16


def transition_blocks(BK: int) -> dict[str, int]:
    """Launch options of transition_kernel. The registers of 8 warps hold a transition of up to 128 x 128; with a larger
    one they do not hold the addresses of 4 stages."""
    return dict(BJ=BK if BK <= 128 else 32 if BK <= 256 else 16, STAGES=3, num_warps=4 if BK <= 64 else 8)


H100_MULTIPROCESSORS = 132


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU; 0 for CPUs. Without a GPU (tracing of CUDA tensors) that of an H100."""
    if device.type != "cuda":
        return 0
    if not torch.cuda.is_available():
        return H100_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def power_of_2_below(n: int) -> int:
    """The greatest power of two that is not above ``n``."""
    return 1 << n.bit_length() - 1


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. Triton's cdiv, which kernels can call too, takes ten times as long on the host."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below ``n``."""
    return 1 << (n - 1).bit_length()
