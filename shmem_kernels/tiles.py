"""Addresses of tiles in a state [G, K, V]: a tile is BK rows and BV columns of one of G matrices."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_place(channel, tile, K: tl.constexpr, V: tl.constexpr):
    """(matrix, rows [BK], columns [BV]) of a tile."""
    NK: tl.constexpr = (K + channel.BK - 1) // channel.BK
    NV: tl.constexpr = (V + channel.BV - 1) // channel.BV
    k = (tile // NV) % NK * channel.BK + tl.arange(0, channel.BK)
    v = tile % NV * channel.BV + tl.arange(0, channel.BV)
    return (tile // (NK * NV)).to(tl.int64), k, v


@triton.jit
def load_decays(p_decay, channel, tile, stride_g, stride_k, K: tl.constexpr, V: tl.constexpr):
    """[BK, 1], 0 beyond the last row and the last tile."""
    g, k, _ = tile_place(channel, tile, K, V)
    inside = (k < K) & (tile < channel.num_tiles)
    return tl.load(p_decay + g * stride_g + k * stride_k, mask=inside, other=0.0)[:, None]


@triton.jit
def tile_offsets(channel, tile, K: tl.constexpr, V: tl.constexpr):
    """(offsets, mask) [BK, BV] of a tile in [G, K, V]; a tile beyond the last is masked."""
    g, k, v = tile_place(channel, tile, K, V)
    inside = (k < K)[:, None] & (v < V)[None, :] & (tile < channel.num_tiles)
    return g * (K * V) + k[:, None] * V + v[None, :], inside


@triton.jit
def load_tile(p, channel, tile, K: tl.constexpr, V: tl.constexpr):
    """A tile of [G, K, V], 0 where masked."""
    offsets, inside = tile_offsets(channel, tile, K, V)
    return tl.load(p + offsets, mask=inside, other=0.0)
