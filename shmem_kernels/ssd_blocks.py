"""Functions shared by the kernels of a scalar decay (ssd_fwd.py, ssd_bwd.py): tiles, factors of tokens, decays."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .blocks import LOG2_E, exp2, load, lower, product, upper, zeros

NEVER = tl.constexpr(-256.0)  # exponent of a decay that is exactly 0


class SSDSizes(NamedTuple):
    """Constants of the kernels of a scalar decay: their argument ``d``. A kernel names the fields that it and its
    functions read; others may be 0. Blocks have powers of two. *_STRIDE: elements from one token to the next."""

    H: int  # heads
    G: int  # groups of heads, which share B and C
    N: int  # rows of a state: columns of B and C
    P: int  # columns of a state: channels of a head of x
    BT: int  # tokens of a chunk
    BK: int = 0  # rows of a state in a block
    BV: int = 0  # columns of a state in a block
    BJ: int = 0  # rows of a state in a program of ssd_gradients_kernel
    NJ: int = 0  # blocks of BJ rows
    BH: int = 0  # heads of a program of the kernels of d_t
    HEADS: int = 1  # heads of a program that goes from chunk to chunk, 1 or 2
    SPLIT: int = 1  # programs among which ssd_pairs_kernel and ssd_gradients_kernel divide the heads of a group
    DT_STRIDE: int = 0
    C_STRIDE: int = 0
    B_STRIDE: int = 0
    X_STRIDE: int = 0
    Z_STRIDE: int = 0
    DY_STRIDE: int = 0


@triton.jit
def tile(start, end, first, i_w, STRIDE: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr):
    """Return (base, offsets, mask) [BT, BW] of tokens start .. and columns i_w * BW .. of the W columns from ``first``
    on, in a tensor whose tokens are STRIDE elements apart."""
    t, w = tl.arange(0, BT), i_w * BW + tl.arange(0, BW)
    base = start.to(tl.int64) * STRIDE + first
    return base, t[:, None] * STRIDE + w[None, :], (start + t < end)[:, None] & (w < W)[None, :]


@triton.jit
def scores_of(p_c, p_b, start, end, g, scale, d: tl.constexpr, PRECISION: tl.constexpr):
    """Return scale C B^T [BT, BT] of the tokens start .. of one group, 64 columns of C and B at a time."""
    BK: tl.constexpr = 64 if d.N > 32 else (32 if d.N > 16 else 16)
    b_scores = zeros(d.BT, d.BT)
    for j in tl.static_range((d.N + BK - 1) // BK):
        base, at, inside = tile(start, end, g * d.N, j, d.C_STRIDE, d.N, d.BT, BK)
        b_c = load(p_c + base, at, inside)
        base, at, inside = tile(start, end, g * d.N, j, d.B_STRIDE, d.N, d.BT, BK)
        b_scores = product(b_c, tl.trans(load(p_b + base, at, inside)), b_scores, PRECISION)
    return b_scores * scale


@triton.jit
def gates_of(b_d, b_A):
    """Return d A to base 2 in float64, clamped to -128 from below, where the decay is 0, too. 0 where d is 0."""
    b_g = b_d.to(tl.float64) * b_A.to(tl.float64) * LOG2_E
    return tl.where(b_d == 0.0, 0.0, tl.maximum(b_g, -128.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def factors_of(p_factors, row, BT: tl.constexpr):
    """Return (d_t, integer and fraction of G_t [BT], those of the whole chunk) of one chunk and head."""
    p_factors += row.to(tl.int64) * (3 * BT)
    t = tl.arange(0, BT)
    b_d, b_whole, b_part = tl.load(p_factors + t), tl.load(p_factors + BT + t), tl.load(p_factors + 2 * BT + t)
    return b_d, b_whole, b_part, tl.load(p_factors + 2 * BT - 1), tl.load(p_factors + 3 * BT - 1)


@triton.jit
def decay_of(b_whole, b_part):
    """Return 2^(whole + part), both at most 0, without the rounding of that sum."""
    return exp2(b_whole) * exp2(b_part)


@triton.jit
def reading_of(b_whole, b_part, scale):
    """Return the decay from the chunk's beginning to each token, times the scale of y."""
    return decay_of(b_whole, b_part) * scale


@triton.jit
def behind_of(b_whole, b_part, whole, part):
    """Return the decay from each token to the chunk's end."""
    return exp2(whole - b_whole) * exp2(part - b_part)


@triton.jit
def decays_of(b_whole, b_part, BT: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Return 2^(G_t - G_s) [t, s] where s <= t, else 0; TRANSPOSED: [s, t]. A difference of two sums from the chunk's
    beginning on is one of integers and one of fractions, which loses nothing to gates outside."""
    b_between = (b_whole[:, None] - b_whole[None, :]) + (b_part[:, None] - b_part[None, :])
    if TRANSPOSED:
        return exp2(tl.where(upper(BT, 0), -b_between, NEVER))
    else:
        return exp2(tl.where(lower(BT, 0), b_between, NEVER))


@triton.jit
def state_behind(b_state, b_x, b_b, b_factor, whole, part, PRECISION: tl.constexpr):
    """Return decay S + b^T (factor x): the state behind a chunk; or the gradient of the one before it, of C, dy."""
    b_x = b_x.to(tl.float32) * b_factor[:, None]
    return product(tl.trans(b_b), b_x, b_state * decay_of(whole, part), PRECISION)
