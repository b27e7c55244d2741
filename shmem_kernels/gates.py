"""Computes inputs of delta rules from raw arguments: normalized queries and keys, gates, beta; and their gradients.

normalize_kernel, normalize_back_kernel   y = x / sqrt(|x|^2 + 1e-6) for each row of D numbers
gate_kernel, gate_back_kernel             for each of W numbers a token, K a head, with z = x + dt_bias, r = exp(A_log):
                                          -r softplus(z); BOUNDED, also used for beta: bound sigmoid(r z)
sums_kernel                               the gradients of A_log and dt_bias, from gate_back_kernel's parts

In float32. Sums over tokens have one order for each number of tokens: no atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import cast, load, loop_bound

EPS = tl.constexpr(1e-6)  # as in flash-linear-attention


@triton.jit
def block_at(i, j, rows, W: tl.constexpr, ROWS: tl.constexpr, BW: tl.constexpr):
    """(offsets, mask) [ROWS, BW] of block (i, j) of a matrix [rows, W]."""
    row, column = i.to(tl.int64) * ROWS + tl.arange(0, ROWS), j * BW + tl.arange(0, BW)
    return row[:, None] * W + column[None, :], (row < rows)[:, None] & (column < W)[None, :]


@triton.jit(do_not_specialize=["rows"])
def normalize_kernel(
    p_x,  # [rows, D]
    p_y,  # [rows, D]; out
    p_factors,  # float32 [rows]; out
    rows,  # int
    D: tl.constexpr,
    BD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Normalize rows; p_factors float32 [rows]: 1 / sqrt(|x|^2 + 1e-6)."""
    at, inside = block_at(tl.program_id(0), 0, rows, D, ROWS, BD)
    b_x = load(p_x, at, inside).to(tl.float32)
    b_factors = 1.0 / tl.sqrt(tl.sum(b_x * b_x, 1) + EPS)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(p_factors + row, b_factors, mask=row < rows)
    tl.store(p_y + at, cast(b_x * b_factors[:, None], p_y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def normalize_back_kernel(
    p_y,  # [rows, D]
    p_factors,  # float32 [rows]
    p_dy,  # [rows, D]
    p_dx,  # [rows, D]; out
    rows,  # int
    D: tl.constexpr,
    BD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """dx from dy."""
    at, inside = block_at(tl.program_id(0), 0, rows, D, ROWS, BD)
    b_y, b_dy = load(p_y, at, inside).to(tl.float32), load(p_dy, at, inside).to(tl.float32)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    b_factors = tl.load(p_factors + row, mask=row < rows, other=0.0)
    b_dx = (b_dy - b_y * tl.sum(b_y * b_dy, 1)[:, None]) * b_factors[:, None]
    tl.store(p_dx + at, cast(b_dx, p_dx.dtype.element_ty), mask=inside)


@triton.jit
def parameters_at(p_A_log, p_dt_bias, j, W: tl.constexpr, K: tl.constexpr, BW: tl.constexpr):
    """Load (r, dt_bias) [1, BW] of columns j * BW .. + BW; 1 and 0 if the argument is None."""
    column = j * BW + tl.arange(0, BW)
    b_rate, b_bias = tl.full([BW], 1.0, tl.float32), tl.zeros([BW], tl.float32)
    if p_A_log is not None:
        b_rate = tl.exp(tl.load(p_A_log + column // K, mask=column < W, other=0.0).to(tl.float32))
    if p_dt_bias is not None:
        b_bias = tl.load(p_dt_bias + column, mask=column < W, other=0.0).to(tl.float32)
    return b_rate[None, :], b_bias[None, :]


@triton.jit
def sigmoid(b_x):
    """Return (sigmoid, its derivative, log(1 + e^-|x|)), all accurate also where they are small."""
    b_e = tl.exp(-tl.abs(b_x))
    b_part = 1.0 / (1.0 + b_e)
    # log(1 + e) = 2 atanh(s), s <= 1/3; the GPU's logarithm of a number near 1 has few digits
    b_s = b_e / (2.0 + b_e)
    b_square = b_s * b_s
    b_log = tl.full(b_x.shape, 1.0 / 15, tl.float32)
    for n in tl.static_range(7):
        b_log = b_log * b_square + 1.0 / (13 - 2 * n)
    return tl.where(b_x >= 0, b_part, b_e * b_part), b_e * b_part * b_part, 2.0 * b_s * b_log


@triton.jit(do_not_specialize=["rows"])
def gate_kernel(
    p_x,  # [rows, W]
    p_A_log,  # [W / K], or None
    p_dt_bias,  # [W], or None
    p_g,  # float32 [rows, W]; out
    rows,  # int
    bound,  # float; not read without BOUNDED
    W: tl.constexpr,
    K: tl.constexpr,
    BW: tl.constexpr,
    ROWS: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """p_A_log and p_dt_bias may be None."""
    columns: tl.constexpr = (W + BW - 1) // BW
    i, j = tl.program_id(0) // columns, tl.program_id(0) % columns
    b_rate, b_bias = parameters_at(p_A_log, p_dt_bias, j, W, K, BW)
    at, inside = block_at(i, j, rows, W, ROWS, BW)
    b_z = load(p_x, at, inside).to(tl.float32) + b_bias
    if BOUNDED:
        b_g, b_slope, b_log = sigmoid(b_rate * b_z)
        b_g *= bound
    else:
        b_g, b_slope, b_log = sigmoid(b_z)
        b_g = -b_rate * (tl.maximum(b_z, 0.0) + b_log)
    tl.store(p_g + at, b_g, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def gate_back_kernel(
    p_x,  # [rows, W]
    p_A_log,  # [W / K], or None
    p_dt_bias,  # [W], or None
    p_dg,  # float32 [rows, W]
    p_dx,  # [rows, W]; out
    p_parts,  # float32 [parts, 2, W]; out, or None
    rows,  # int
    bound,  # float; not read without BOUNDED
    W: tl.constexpr,
    K: tl.constexpr,
    BW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """BLOCKS blocks of rows a program. p_parts [programs of a column, 2, W]: a program's partial sums of dA_log and
    ddt_bias; or None."""
    columns: tl.constexpr = (W + BW - 1) // BW
    i, j = tl.program_id(0) // columns, tl.program_id(0) % columns
    b_rate, b_bias = parameters_at(p_A_log, p_dt_bias, j, W, K, BW)
    b_of_rate, b_of_bias = tl.zeros([ROWS, BW], tl.float32), tl.zeros([ROWS, BW], tl.float32)
    for n in range(BLOCKS):
        at, inside = block_at(i * BLOCKS + n, j, rows, W, ROWS, BW)
        b_z = load(p_x, at, inside).to(tl.float32) + b_bias
        b_dg = load(p_dg, at, inside).to(tl.float32)
        if BOUNDED:
            b_u = b_rate * b_z
            b_y, b_slope, b_log = sigmoid(b_u)
            b_du = b_dg * (bound * b_slope)
            b_dx = b_du * b_rate
        else:
            b_y, b_slope, b_log = sigmoid(b_z)
            b_u, b_du = tl.maximum(b_z, 0.0) + b_log, -b_dg * b_rate
            b_dx = b_du * b_y
        tl.store(p_dx + at, cast(b_dx, p_dx.dtype.element_ty), mask=inside)
        if p_parts is not None:
            b_of_rate += tl.where(b_du == 0.0, 0.0, b_du * b_u)  # u may be infinite
            b_of_bias += b_dx
    if p_parts is not None:
        column = j * BW + tl.arange(0, BW)
        p_parts += i.to(tl.int64) * 2 * W + column
        tl.store(p_parts, tl.sum(b_of_rate, 0), mask=column < W)
        tl.store(p_parts + W, tl.sum(b_of_bias, 0), mask=column < W)


@triton.jit(do_not_specialize=["parts"])
def sums_kernel(
    p_parts,  # float32 [parts, 2, W]
    p_dA_log,  # [W / K]; out, or None
    p_ddt_bias,  # [W]; out, or None
    parts,  # int
    W: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Sum the parts of one head. p_dA_log or p_ddt_bias may be None."""
    h, k = tl.program_id(0), tl.arange(0, BK)
    b_of_rate, b_of_bias = tl.zeros([BK], tl.float32), tl.zeros([BK], tl.float32)
    for n in range(loop_bound((parts + BN - 1) // BN)):
        part = n * BN + tl.arange(0, BN)
        at = part.to(tl.int64)[:, None] * (2 * W) + (h * K + k)[None, :]
        inside = (part < parts)[:, None] & (k < K)[None, :]
        b_of_rate += tl.sum(load(p_parts, at, inside), 0)
        b_of_bias += tl.sum(load(p_parts + W, at, inside), 0)
    if p_dA_log is not None:
        tl.store(p_dA_log + h, cast(tl.sum(b_of_rate, 0), p_dA_log.dtype.element_ty))
    if p_ddt_bias is not None:
        tl.store(p_ddt_bias + h * K + k, cast(b_of_bias, p_ddt_bias.dtype.element_ty), mask=k < K)
