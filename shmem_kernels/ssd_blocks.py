"""Functions shared by the kernels of a scalar decay (ssd_fwd.py, ssd_bwd.py): tiles, factors of tokens, decays."""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import LOG2_E, exp2, load, lower, product, upper

NEVER = tl.constexpr(-256.0)  # exponent of a decay that is exactly 0


@triton.jit
def tile(start, end, first, i_w, STRIDE: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr):
    """Return (base, offsets, mask) [BT, BW] of tokens start .. and columns i_w * BW .. of the W columns from ``first``
    on, in a tensor whose tokens are STRIDE elements apart."""
    t, w = tl.arange(0, BT), i_w * BW + tl.arange(0, BW)
    base = start.to(tl.int64) * STRIDE + first
    return base, t[:, None] * STRIDE + w[None, :], (start + t < end)[:, None] & (w < W)[None, :]


@triton.jit
def scores_of(
    p_c,
    p_b,
    start,
    end,
    g,
    scale,
    N: tl.constexpr,
    C_STRIDE: tl.constexpr,
    B_STRIDE: tl.constexpr,
    BT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return scale C B^T [BT, BT] of the tokens start .. of one group, 64 columns of C and B at a time."""
    BK: tl.constexpr = 64 if N > 32 else (32 if N > 16 else 16)
    b_scores = tl.zeros([BT, BT], tl.float32)
    for j in tl.static_range((N + BK - 1) // BK):
        base, at, inside = tile(start, end, g * N, j, C_STRIDE, N, BT, BK)
        b_c = load(p_c + base, at, inside)
        base, at, inside = tile(start, end, g * N, j, B_STRIDE, N, BT, BK)
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
