"""How large tiles are."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

# Words of a tile by kind of link: (fewest, most where a program has one tile, most where it has two or more). A
# launch has at most Communicator.max_ctas programs. The interpreter pays by the tile.
SENTINEL_WORDS = (128, 2048, 4096)
SIGNAL_WORDS = (1024, 8192, 8192)
CPU_WORDS = (8192, 8192, 8192)


def scan_tile(shape: Sequence[int], ctas: int, sentinel: bool, device: torch.device) -> tuple[int, int]:
    """(BK, BV) of a scan of ``shape`` [..., K, V] in at most ``ctas`` programs; ``sentinel``: the kind of its links."""
    limits = CPU_WORDS if device.type == "cpu" else SENTINEL_WORDS if sentinel else SIGNAL_WORDS
    least, most, most_of_two = limits
    one, two = (next_power_of_2(-(-math.prod(shape) // (ctas * tiles))) for tiles in (1, 2))
    K, V = shape[-2:]
    return default_tile(K, V, max(least, min(one, most), min(two, most_of_two)))


def default_tile(K: int, V: int, words: int) -> tuple[int, int]:
    """(BK, BV), powers of two of at most ``words``: whole rows of V where they fit, since those are contiguous."""
    BV = min(next_power_of_2(V), words)
    return min(next_power_of_2(K), max(1, words // BV)), BV


def transition_tile(K: int) -> tuple[int, int]:
    """The ``tile`` of an AllScan for transitions: whole columns, 32 of them, or 16 where registers do not hold a
    transition."""
    return max(16, next_power_of_2(K)), 32 if K <= 128 else 16


def transition_blocks(BK: int) -> dict[str, int]:
    """Launch options of transition_kernel: up to 128 x 128 a transition fits the registers of 8 warps. Of a larger one
    the addresses of 4 stages do not."""
    return dict(BJ=BK if BK <= 128 else 32 if BK <= 256 else 16, STAGES=3, num_warps=4 if BK <= 64 else 8)


H100_MULTIPROCESSORS = 132


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 0 of CPUs. Where tensors of a GPU are traced without one, those of an H100."""
    if device.type != "cuda":
        return 0
    if not torch.cuda.is_available():
        return H100_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def power_of_2_below(n: int) -> int:
    """The greatest power of two that is not above ``n``."""
    return 1 << n.bit_length() - 1


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. Triton's own, which kernels can call too, takes ten times as long."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below ``n``."""
    return 1 << (n - 1).bit_length()
