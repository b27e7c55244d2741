"""The stand-alone scan: R_0 = initial, R_{p+1} = decay_p * R_p + state_p; rank p gets R_p (method: ZeCO, section 3)."""

from __future__ import annotations

import triton
import triton.language as tl

from .channel import allscan


@triton.jit
def scan_kernel(
    p_state,  # float32 [G, K, V]
    p_decay,  # float32, element (g, k) at g * stride_g + k * stride_k; not read without HAS_DECAY
    p_initial,  # float32 [G, K, V]; not read without HAS_INITIAL
    p_out,  # float32 [G, K, V]
    channel,
    stride_g,
    stride_k,
    K: tl.constexpr,
    V: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
):
    """One program, one tile: BK rows and BV columns of one of the G matrices."""
    tile = tl.program_id(0)
    NK: tl.constexpr = (K + channel.BK - 1) // channel.BK
    NV: tl.constexpr = (V + channel.BV - 1) // channel.BV
    g = (tile // (NK * NV)).to(tl.int64)
    k = (tile // NV) % NK * channel.BK + tl.arange(0, channel.BK)  # [BK]
    v = tile % NV * channel.BV + tl.arange(0, channel.BV)  # [BV]
    inside = (k < K)[:, None] & (v < V)[None, :]
    offsets = g * (K * V) + k[:, None] * V + v[None, :]

    b_state = tl.load(p_state + offsets, mask=inside, other=0.0)  # [BK, BV]
    b_decay = tl.full([channel.BK], 1.0, tl.float32)
    if HAS_DECAY:
        b_decay = tl.load(p_decay + g * stride_g + k * stride_k, mask=k < K, other=0.0)  # [BK]
    b_first = tl.zeros([channel.BK, channel.BV], tl.float32)
    if HAS_INITIAL:
        b_first = tl.load(p_initial + offsets, mask=inside, other=0.0)  # [BK, BV]

    b_prev, _ = allscan(channel, tile, b_state, b_decay[:, None], b_first)
    tl.store(p_out + offsets, b_prev, mask=inside)
