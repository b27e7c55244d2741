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
    BT: int  # tokens of a block, at least 2N
    BC: int  # channels of a block


@triton.jit
def rows_inside(start, c, L, d: tl.constexpr):
    """Mask [BT, BC]: the tokens from ``start`` on that are 0 .. L - 1, the channels that are below C."""
    t = start + tl.arange(0, d.BT)
    return ((t >= 0) & (t < L))[:, None] & (c < d.C)[None, :]


@triton.jit
def before_at(row, start, c, d: tl.constexpr):
    """(offsets, mask) [BT, BC] of the tokens from ``start`` on that are -N .. -1 of piece ``row``, in [B, N, C]."""
    t = start + tl.arange(0, d.BT)
    at = (row // d.PIECES * d.N + t + d.N).to(tl.int64)[:, None] * d.C + c[None, :]
    return at, ((t < 0) & (t >= -d.N))[:, None] & (c < d.C)[None, :]


@triton.jit
def tokens_at(p_x, p_first, p_second, row, start, c, L, d: tl.constexpr, EDGE: tl.constexpr):
    """Load float32 [BT, BC]: channels c of the tokens from ``start`` on. Without EDGE, 0 before the piece."""
    at = tl.arange(0, d.BT)[:, None] * d.C + c[None, :]
    b_x = load(p_x + (row.to(tl.int64) * L + start) * d.C, at, rows_inside(start, c, L, d)).to(tl.float32)
    if EDGE:
        at, before = before_at(row, start, c, d)
        b_x += load(p_first, at, before & (row % d.PIECES == 0))
        if d.PIECES == 2:
            b_x += load(p_second, at, before & (row % d.PIECES == 1))
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
    d: tl.constexpr,  # N C PIECES BT BC
):
    """Grid: (blocks of BC channels, B * PIECES). The last N tokens of the pieces; with BACK they are added to x."""
    row, c = tl.program_id(1), tl.program_id(0) * d.BC + tl.arange(0, d.BC)
    t = tl.arange(0, d.BT)[:, None]
    b_inside, at = (t < d.N) & (c < d.C)[None, :], t * d.C + c[None, :]
    p = p_x + (row.to(tl.int64) * L + (L - d.N)) * d.C
    of_edges = (row // d.PIECES * d.N).to(tl.int64) * d.C + at
    b_first = b_inside & (row % d.PIECES == 0)
    b_second = b_inside & (row % d.PIECES == 1)
    b_x = load(p, at, b_inside).to(tl.float32)
    if BACK:
        b_x += load(p_first, of_edges, b_first)
        if d.PIECES == 2:
            b_x += load(p_second, of_edges, b_second)
        tl.store(p + at, cast(b_x, p_x.dtype.element_ty), mask=b_inside)
    else:
        tl.store(p_first + of_edges, b_x, mask=b_first)
        if d.PIECES == 2:
            tl.store(p_second + of_edges, b_x, mask=b_second)


@triton.jit
def sigmoid(b_x):
    """1 / (1 + e^-x)."""
    return 1.0 / (1.0 + tl.exp(-b_x))


@triton.jit
def convolve(p_x, b_taps, b_bias, p_first, p_second, row, start, c, L, d: tl.constexpr, EDGE: tl.constexpr):
    """bias + sum_j w[j] x[t - j], float32 [BT, BC], of the tokens from ``start`` on."""
    b_z = tl.full([d.BT, d.BC], 0.0, tl.float32) + b_bias
    for j in tl.static_range(d.N + 1):
        b_z += b_taps[j] * tokens_at(p_x, p_first, p_second, row, start + -j, c, L, d, EDGE)
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
    blocks,  # int: of BT tokens a program
    d: tl.constexpr,  # N C PIECES SILU BT BC
):
    """Grid: (programs for blocks * BT tokens, blocks of BC channels, B * PIECES)."""
    row, c = tl.program_id(2), tl.program_id(1) * d.BC + tl.arange(0, d.BC)
    at = tl.arange(0, d.BT)[:, None] * d.C + c[None, :]
    b_taps, b_bias = taps(p_weight, c, d), biases_at(p_bias, c, d)
    for i in range(loop_bound(blocks)):
        start = (tl.program_id(0) * blocks + i) * d.BT
        if start < d.N:
            b_y = convolve(p_x, b_taps, b_bias, p_first, p_second, row, start, c, L, d, True)
        else:
            b_y = convolve(p_x, b_taps, b_bias, p_first, p_second, row, start, c, L, d, False)
        if d.SILU:
            b_y *= sigmoid(b_y)
        p = p_y + (row.to(tl.int64) * L + start) * d.C
        tl.store(p + at, cast(b_y, p_y.dtype.element_ty), mask=rows_inside(start, c, L, d))


@triton.jit
def convolve_back(
    p_x, b_taps, b_bias, p_first, p_second, p_dy, row, start, c, L, b_sums, d: tl.constexpr, EDGE: tl.constexpr
):
    """(dx float32 [BT, BC] of the tokens from ``start`` on, b_sums + (their parts of dbias, dw[0], .. dw[3]))."""
    b_dbias, b_dw0, b_dw1, b_dw2, b_dw3 = b_sums
    b_dx, at = tl.full([d.BT, d.BC], 0.0, tl.float32), tl.arange(0, d.BT)[:, None] * d.C + c[None, :]
    for j in tl.static_range(d.N + 1):  # from y[t + j]
        p_d = p_dy + (row.to(tl.int64) * L + (start + j)) * d.C
        b_d = load(p_d, at, rows_inside(start + j, c, L, d)).to(tl.float32)
        if d.SILU:
            b_z = tl.full([d.BT, d.BC], 0.0, tl.float32) + b_bias
            for e in tl.static_range(d.N + 1):  # not convolve: loads of equal places become one
                b_z += b_taps[e] * tokens_at(p_x, p_first, p_second, row, start + (j - e), c, L, d, EDGE)
            b_s = sigmoid(b_z)
            b_d *= b_s * (1.0 + b_z * (1.0 - b_s))
        b_dx += b_taps[j] * b_d
        if j == 0:
            b_dbias += b_d
            b_dw0 += b_d * tokens_at(p_x, p_first, p_second, row, start, c, L, d, EDGE)
            b_dw1 += b_d * tokens_at(p_x, p_first, p_second, row, start + -1, c, L, d, EDGE)
            if d.N >= 2:
                b_dw2 += b_d * tokens_at(p_x, p_first, p_second, row, start + -2, c, L, d, EDGE)
            if d.N >= 3:
                b_dw3 += b_d * tokens_at(p_x, p_first, p_second, row, start + -3, c, L, d, EDGE)
    return b_dx, (b_dbias, b_dw0, b_dw1, b_dw2, b_dw3)


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
    blocks,  # int: of BT tokens a program
    d: tl.constexpr,  # N C PIECES SILU BT BC
):
    """Grid: (programs, blocks of BC channels, B * PIECES). The first program of a piece has the BT tokens from -N on,
    the others blocks * BT each. Parts: a program's sums for dw[0 .. N] and dbias. The convolution is computed again."""
    row, c = tl.program_id(2), tl.program_id(1) * d.BC + tl.arange(0, d.BC)
    at, b_none = tl.arange(0, d.BT)[:, None] * d.C + c[None, :], tl.full([d.BT, d.BC], 0.0, tl.float32)
    b_sums = b_none, b_none, b_none, b_none, b_none
    b_w, b_bias = taps(p_weight, c, d), biases_at(p_bias, c, d)
    p_dx += row.to(tl.int64) * L * d.C
    if tl.program_id(0) == 0:
        b_dx, b_sums = convolve_back(p_x, b_w, b_bias, p_first, p_second, p_dy, row, -d.N, c, L, b_sums, d, True)
        tl.store(p_dx - d.N * d.C + at, cast(b_dx, p_dx.dtype.element_ty), mask=rows_inside(-d.N, c, L, d))
        of_before, before = before_at(row, -d.N, c, d)
        tl.store(p_dfirst + of_before, b_dx, mask=before & (row % d.PIECES == 0))
        if d.PIECES == 2:
            tl.store(p_dsecond + of_before, b_dx, mask=before & (row % d.PIECES == 1))
    else:
        for i in range(loop_bound(blocks)):
            start = ((tl.program_id(0) - 1) * blocks + i + 1) * d.BT - d.N
            b_dx, b_sums = convolve_back(p_x, b_w, b_bias, p_first, p_second, p_dy, row, start, c, L, b_sums, d, False)
            p_d = p_dx + start.to(tl.int64) * d.C
            tl.store(p_d + at, cast(b_dx, p_dx.dtype.element_ty), mask=rows_inside(start, c, L, d))
    p_part = p_parts + (row * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * (d.N + 2) * d.C + c
    b_dbias, b_dw0, b_dw1, b_dw2, b_dw3 = b_sums
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
