"""Causal depthwise convolutions of 2 to TAPS tokens over the pieces of a rank's row, whose first tokens read the
tokens before the piece, which other ranks have sent; and their gradients.

conv_edges_kernel    the last tokens of each piece, in float32; or adds their gradients to those of x
conv_kernel          y[t] = f(bias + sum_j w[j] x[t - j]), f: silu or nothing; w[j] = weight[:, N - j], N tokens before
conv_back_kernel     dx, the gradient of the tokens before each piece, parts of the gradients of weight and bias
conv_sums_kernel     the gradients of weight and bias, from conv_back_kernel's parts

In float32. Sums over tokens have one order for each number of tokens: no atomics.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .blocks import cast, load, loop_bound

TAPS = 4


class ConvSizes(NamedTuple):
    """Constants of the kernels: their argument ``d``. Blocks have powers of two."""

    N: int  # tokens before the one of an output
    C: int  # channels
    PIECES: int  # of a row: 1 or 2
    SILU: bool
    RUNS: int  # of consecutive tokens that a program processes side by side
    BC: int  # channels of a block


@triton.jit
def token_at(p, start, s, b_t, b_at, c, L, d: tl.constexpr):
    """Load float32 [RUNS, BC]: channels c of token s of each run; 0 outside of the piece. start: int64, the place of
    the first run's first token in p. b_t: the runs' first tokens. b_at: offsets of the runs' channels."""
    inside = (b_t + s >= 0) & (b_t + s < L) & (c < d.C)[None, :]
    return load(p + (start + s) * d.C, b_at, inside).to(tl.float32)


@triton.jit
def eight_tokens_at(p, start, s, b_t, b_at, c, L, d: tl.constexpr):
    """``token_at`` of the tokens s .. s + 7."""
    b_0 = token_at(p, start, s, b_t, b_at, c, L, d)
    b_1 = token_at(p, start, s + 1, b_t, b_at, c, L, d)
    b_2 = token_at(p, start, s + 2, b_t, b_at, c, L, d)
    b_3 = token_at(p, start, s + 3, b_t, b_at, c, L, d)
    b_4 = token_at(p, start, s + 4, b_t, b_at, c, L, d)
    b_5 = token_at(p, start, s + 5, b_t, b_at, c, L, d)
    b_6 = token_at(p, start, s + 6, b_t, b_at, c, L, d)
    b_7 = token_at(p, start, s + 7, b_t, b_at, c, L, d)
    return b_0, b_1, b_2, b_3, b_4, b_5, b_6, b_7


@triton.jit
def before_at(first, row, s, b_t, c, d: tl.constexpr):
    """(int64 place in [B, N, C] of the first run's token s, mask [RUNS, BC] of the tokens -N .. -1 of piece ``row``).
    first: the first run's first token."""
    inside = (b_t + s < 0) & (b_t + s >= -d.N) & (c < d.C)[None, :]
    return (row // d.PIECES * d.N + d.N + first + s).to(tl.int64) * d.C, inside


@triton.jit
def earlier_token_at(p_x, p_first, p_second, start, first, row, s, b_t, b_at, c, L, d: tl.constexpr):
    """``token_at``, also of the tokens -N .. -1 before the piece."""
    of_before, before = before_at(first, row, s, b_t, c, d)
    b_x = token_at(p_x, start, s, b_t, b_at, c, L, d)
    b_x += load(p_first + of_before, b_at, before & (row % d.PIECES == 0))
    if d.PIECES == 2:
        b_x += load(p_second + of_before, b_at, before & (row % d.PIECES == 1))
    return b_x


@triton.jit
def taps(p_weight, c, d: tl.constexpr):
    """Load (w[0], .. w[3]), float32 [1, BC] each; 0 beyond w[N]."""
    p, inside = p_weight + c * (d.N + 1), c < d.C
    b_w0 = load(p, d.N, inside).to(tl.float32)[None, :]
    b_w1 = load(p, d.N - 1, inside).to(tl.float32)[None, :]
    b_w2 = load(p, d.N - 2, inside & (d.N >= 2)).to(tl.float32)[None, :]
    b_w3 = load(p, d.N - 3, inside & (d.N >= 3)).to(tl.float32)[None, :]
    return b_w0, b_w1, b_w2, b_w3


@triton.jit
def biases_at(p_bias, c, d: tl.constexpr):
    """Load float32 [1, BC]; 0 without a bias."""
    b_bias = tl.full([1, d.BC], 0.0, tl.float32)
    if p_bias is not None:
        b_bias += load(p_bias, c, c < d.C).to(tl.float32)[None, :]
    return b_bias


@triton.jit(do_not_specialize=["L"])
def conv_edges_kernel(
    p_x,  # [B * PIECES, L, C]
    p_first,  # float32 [B, N, C], of first pieces
    p_second,  # the same of second pieces, or None
    L,  # int: tokens of a piece
    BACK: tl.constexpr,
    d: tl.constexpr,  # N C PIECES BC
):
    """Grid: (blocks of BC channels, B * PIECES). The last N tokens of the pieces; with BACK they are added to x."""
    row, c = tl.program_id(1), tl.program_id(0) * d.BC + tl.arange(0, d.BC)
    for n in tl.static_range(1, d.N + 1):  # from the end
        b_inside, of_edge = c < d.C, p_first + (row // d.PIECES * d.N + (d.N - n)).to(tl.int64) * d.C
        if d.PIECES == 2:
            if row % 2 == 1:
                of_edge = p_second + (row // d.PIECES * d.N + (d.N - n)).to(tl.int64) * d.C
        p = p_x + (row.to(tl.int64) * L + (L - n)) * d.C
        b_x = load(p, c, b_inside).to(tl.float32)
        if BACK:
            b_x += load(of_edge, c, b_inside)
            tl.store(p + c, cast(b_x, p_x.dtype.element_ty), mask=b_inside)
        else:
            tl.store(of_edge + c, b_x, mask=b_inside)


@triton.jit
def convolved(b_taps, b_bias, b_x, b_x1, b_x2, b_x3, d: tl.constexpr):
    """bias + w[0] x + w[1] x1 + ...: x of the token, and of those before it."""
    b_z = b_bias + b_taps[0] * b_x + b_taps[1] * b_x1
    if d.N >= 2:
        b_z += b_taps[2] * b_x2
    if d.N >= 3:
        b_z += b_taps[3] * b_x3
    return b_z


@triton.jit(do_not_specialize=["L", "blocks"])
def conv_kernel(
    p_x,  # [B * PIECES, L, C]
    p_weight,  # [C, N + 1]
    p_bias,  # [C], or None
    p_first,  # float32 [B, N, C]: the tokens before first pieces
    p_second,  # the same before second pieces, or None
    p_y,  # like p_x; out
    L,  # int: tokens of a piece
    blocks,  # int: of 8 tokens a run
    d: tl.constexpr,  # N C PIECES SILU RUNS BC
):
    """Grid: (programs of RUNS runs of 8 * blocks tokens, blocks of BC channels, B * PIECES)."""
    row, c = tl.program_id(2), tl.program_id(1) * d.BC + tl.arange(0, d.BC)
    first, b_run = tl.program_id(0) * d.RUNS * blocks * 8, tl.arange(0, d.RUNS)[:, None] * blocks * 8
    start, b_t, b_at = row.to(tl.int64) * L + first, first + b_run, b_run * d.C + c[None, :]
    b_taps, b_bias = taps(p_weight, c, d), biases_at(p_bias, c, d)
    b_x1 = earlier_token_at(p_x, p_first, p_second, start, first, row, -1, b_t, b_at, c, L, d)
    b_x2 = earlier_token_at(p_x, p_first, p_second, start, first, row, -2, b_t, b_at, c, L, d)
    b_x3 = earlier_token_at(p_x, p_first, p_second, start, first, row, -3, b_t, b_at, c, L, d)
    for i in range(loop_bound(blocks)):
        b_xs = eight_tokens_at(p_x, start, i * 8, b_t, b_at, c, L, d)
        for u in tl.static_range(8):
            b_y = convolved(b_taps, b_bias, b_xs[u], b_x1, b_x2, b_x3, d)
            if d.SILU:
                b_y *= tl.sigmoid(b_y)
            s = i * 8 + u
            b_y, inside = cast(b_y, p_y.dtype.element_ty), (b_t + s < L) & (c < d.C)[None, :]
            tl.store(p_y + (start + s) * d.C + b_at, b_y, mask=inside)
            b_x3, b_x2, b_x1 = b_x2, b_x1, b_xs[u]


@triton.jit
def silu_back(b_dy, b_z, d: tl.constexpr):
    """dz of y = f(z)."""
    if d.SILU:
        b_s = tl.sigmoid(b_z)
        b_dy *= b_s * (1.0 + b_z * (1.0 - b_s))
    return b_dy


@triton.jit(do_not_specialize=["L", "blocks"])
def conv_back_kernel(
    p_x,  # [B * PIECES, L, C]
    p_weight,  # [C, N + 1]
    p_bias,  # [C], or None
    p_first,  # float32 [B, N, C]
    p_second,  # the same, or None
    p_dy,  # like p_x
    p_dx,  # like p_x; out
    p_dfirst,  # like p_first; out
    p_dsecond,  # like p_second; out
    p_parts,  # float32 [B * PIECES, programs along the tokens, N + 2, C]; out
    L,  # int: tokens of a piece
    blocks,  # int: of 8 tokens a run
    d: tl.constexpr,  # N C PIECES SILU RUNS BC
):
    """Grid: (programs of RUNS runs of 8 * blocks tokens t, blocks of BC channels, B * PIECES), for L + N tokens. Dz[t]
    completes dx[t - N]; a run computes those of the N tokens before it again. Parts: a program's sums for dw[0 .. N]
    and dbias. The convolution is computed again."""
    row, c = tl.program_id(2), tl.program_id(1) * d.BC + tl.arange(0, d.BC)
    first, b_run = tl.program_id(0) * d.RUNS * blocks * 8, tl.arange(0, d.RUNS)[:, None] * blocks * 8
    start, b_t, b_at = row.to(tl.int64) * L + first, first + b_run, b_run * d.C + c[None, :]
    b_taps, b_bias = taps(p_weight, c, d), biases_at(p_bias, c, d)
    b_none = tl.full([d.RUNS, d.BC], 0.0, tl.float32)
    b_dbias, b_dw0, b_dw1, b_dw2, b_dw3 = b_none, b_none, b_none, b_none, b_none
    b_dz1, b_dz2, b_dz3 = b_none, b_none, b_none
    b_x1 = earlier_token_at(p_x, p_first, p_second, start, first, row, -d.N - 1, b_t, b_at, c, L, d)
    b_x2 = earlier_token_at(p_x, p_first, p_second, start, first, row, -d.N - 2, b_t, b_at, c, L, d)
    b_x3 = earlier_token_at(p_x, p_first, p_second, start, first, row, -d.N - 3, b_t, b_at, c, L, d)
    for n in tl.static_range(1, d.N + 1):
        b_x = earlier_token_at(p_x, p_first, p_second, start, first, row, n - d.N - 1, b_t, b_at, c, L, d)
        b_d = token_at(p_dy, start, n - d.N - 1, b_t, b_at, c, L, d)
        b_dz3, b_dz2, b_dz1 = b_dz2, b_dz1, silu_back(b_d, convolved(b_taps, b_bias, b_x, b_x1, b_x2, b_x3, d), d)
        b_x3, b_x2, b_x1 = b_x2, b_x1, b_x
    for i in range(loop_bound(blocks)):
        b_xs = eight_tokens_at(p_x, start, i * 8, b_t, b_at, c, L, d)
        b_ds = eight_tokens_at(p_dy, start, i * 8, b_t, b_at, c, L, d)
        for u in tl.static_range(8):
            b_x, s = b_xs[u], i * 8 + u
            b_dz = silu_back(b_ds[u], convolved(b_taps, b_bias, b_x, b_x1, b_x2, b_x3, d), d)
            b_dbias += b_dz
            b_dw0 += b_dz * b_x
            b_dw1 += b_dz * b_x1
            b_dx = b_taps[d.N] * b_dz + b_taps[d.N - 1] * b_dz1
            if d.N >= 2:
                b_dw2 += b_dz * b_x2
                b_dx += b_taps[d.N - 2] * b_dz2
            if d.N >= 3:
                b_dw3 += b_dz * b_x3
                b_dx += b_taps[d.N - 3] * b_dz3
            inside = (b_t + s >= d.N) & (b_t + s < L + d.N) & (c < d.C)[None, :]
            p_d = p_dx + (start + s - d.N) * d.C
            tl.store(p_d + b_at, cast(b_dx, p_dx.dtype.element_ty), mask=inside)
            if u < d.N:
                of_before, before = before_at(first, row, s - d.N, b_t, c, d)
                tl.store(p_dfirst + of_before + b_at, b_dx, mask=before & (row % d.PIECES == 0))
                if d.PIECES == 2:
                    tl.store(p_dsecond + of_before + b_at, b_dx, mask=before & (row % d.PIECES == 1))
            b_x3, b_x2, b_x1 = b_x2, b_x1, b_x
            b_dz3, b_dz2, b_dz1 = b_dz2, b_dz1, b_dz
    p_part = p_parts + (row * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * (d.N + 2) * d.C + c
    tl.store(p_part, tl.sum(b_dw0, 0), mask=c < d.C)
    tl.store(p_part + d.C, tl.sum(b_dw1, 0), mask=c < d.C)
    if d.N >= 2:
        tl.store(p_part + 2 * d.C, tl.sum(b_dw2, 0), mask=c < d.C)
    if d.N >= 3:
        tl.store(p_part + 3 * d.C, tl.sum(b_dw3, 0), mask=c < d.C)
    tl.store(p_part + (d.N + 1) * d.C, tl.sum(b_dbias, 0), mask=c < d.C)


@triton.jit(do_not_specialize=["parts"])
def conv_sums_kernel(
    p_parts,  # float32 [parts, N + 2, C]
    p_dweight,  # [C, N + 1]; out
    p_dbias,  # [C]; out, or None
    parts,  # int
    BN: tl.constexpr,
    d: tl.constexpr,  # N C BC
):
    """Grid: (blocks of BC channels, N + 2): the gradient of w[j], the last of the bias."""
    j, c = tl.program_id(1), tl.program_id(0) * d.BC + tl.arange(0, d.BC)
    b_sum = tl.full([d.BC], 0.0, tl.float32)
    for n in range(loop_bound((parts + BN - 1) // BN)):
        part = n * BN + tl.arange(0, BN)
        at = (part.to(tl.int64) * (d.N + 2) + j)[:, None] * d.C + c[None, :]
        b_sum += tl.sum(load(p_parts, at, (part < parts)[:, None] & (c < d.C)[None, :]), 0)
    of_weight = (c < d.C) & (j <= d.N)
    tl.store(p_dweight + c * (d.N + 1) + (d.N - j), cast(b_sum, p_dweight.dtype.element_ty), mask=of_weight)
    if p_dbias is not None:
        tl.store(p_dbias + c, cast(b_sum, p_dbias.dtype.element_ty), mask=(c < d.C) & (j == d.N + 1))
