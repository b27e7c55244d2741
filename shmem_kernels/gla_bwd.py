"""Gated linear attention, backward.

With S[n] the incoming state of chunk n and D[n] = dL/d(its outgoing state):

    operands_kernel   q_in, k_out and A as in forward, unless they were saved
    state_kernel      REVERSE: the gradient of the state over each segment alone
    state_passing_kernel
                      REVERSE: over this rank's segments; then scan_kernel (scan.py) in reverse, over the ranks
    state_kernel      for every chunk: S[n]; needs no remote gradient: overlapped with the scan, on a side stream
    da_kernel         dA = scale * do v^T; also overlapped, on the caller's stream
    output_kernel     REVERSE: D[n];  dv = A^T do + k_out D;  the state-to-state term of dg (below). K above 128:
                      state_kernel, REVERSE and for every chunk, and value_grad_kernel for dv
    grad_kernel       dq = scale * exp(gates up to) * (do S^T) + terms of dA
                      dk = exp(gates after) * (v D^T) + terms of dA
                      dg

dg_t is the sum of all terms whose decay contains g_t; within a chunk these are

    pairs s < t <= r of the chunk:                 sum_{r >= t} (q dq_pairs - k dk_pairs)_r
    from the state to tokens r >= t:               sum_{r >= t} (q dq_state)_r
    from tokens s < t to the state:                sum_{s < t} (k dk_state)_s
    from state to state:                           exp(all gates) * sum_v D * S

A token's product with itself contains no gate, so it is excluded from the sums and added to dq and dk afterwards.
Decays are computed as in gla_fwd.py; strong-decay chunks have their own kernel, as there.
Source: ZeCO, arXiv 2507.01004, section 3; GLA, arXiv 2312.06635, appendix.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import (
    BEFORE,
    HALVES,
    ONWARD,
    cast,
    dot_split,
    exp2,
    load,
    load_weights,
    lower,
    product,
    rows,
    state_at,
    upper,
    zeros,
)
from .gla_blocks import load_da, load_passed, parts_product, weighted_gates


@triton.jit
def da_kernel(
    p_v,  # [tokens, H, V]
    p_do,  # [tokens, H, V]
    p_chunks,  # int32 [NC, 2]
    p_da,  # [tokens, H, parts, BT]; out, see load_da
    p_diagonal,  # float32 [tokens, H]; out
    scale,  # float
    d: tl.constexpr,  # H V BT BV
    PRECISION: tl.constexpr,
):
    """dA = scale * do v^T of one chunk: p_da: the part below the diagonal (see load_da), p_diagonal: the diagonal."""
    h, n = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(p_chunks + 2 * n), tl.load(p_chunks + 2 * n + 1)
    b_da = zeros(d.BT, d.BT)
    for i_v in range((d.V + d.BV - 1) // d.BV):
        at, inside = rows(h, start, end, d.H, d.V, d.BT, d.BV, i_v)
        b_da = product(load(p_do, at, inside), tl.trans(load(p_v, at, inside)), b_da, PRECISION)
    b_da *= scale
    t = start + tl.arange(0, d.BT)
    b_diagonal = tl.sum(tl.where(lower(d.BT, 0) & upper(d.BT, 0), b_da, 0.0), 1)
    tl.store(p_diagonal + t.to(tl.int64) * d.H + h, b_diagonal, mask=t < end)
    b_da = tl.where(lower(d.BT, 1), b_da, 0.0)
    b_high = cast(b_da, p_da.dtype.element_ty)
    PARTS: tl.constexpr = 2 if PRECISION == "bf16" else 1
    at, inside = rows(h, start, end, d.H, PARTS * d.BT, d.BT, d.BT)
    tl.store(p_da + at, b_high, mask=inside)
    if PARTS == 2:
        tl.store(p_da + at + d.BT, cast(b_da - b_high.to(tl.float32), p_da.dtype.element_ty), mask=inside)


@triton.jit
def value_grad_kernel(
    p_do,  # [tokens, H, V]
    p_k_out,  # [tokens, H, K]
    p_a,  # float32 [tokens, H, BT]
    p_chunks,  # int32 [NC, 2]
    p_dstates,  # [NC, H, K, V]
    p_dv,  # [tokens, H, V]; out
    d: tl.constexpr,  # H K V BT BK BV
    PRECISION: tl.constexpr,
):
    """dv = A^T do + k_out D of one chunk, BV columns."""
    i_v, h, n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, end = tl.load(p_chunks + 2 * n), tl.load(p_chunks + 2 * n + 1)
    b_dv = zeros(d.BT, d.BV)
    for i_k in range((d.K + d.BK - 1) // d.BK):
        at_k, inside_k = rows(h, start, end, d.H, d.K, d.BT, d.BK, i_k)
        at_s, inside_s = state_at(n * d.H + h, i_v, d.K, d.V, d.BK, d.BV, i_k)
        b_dv = product(load(p_k_out, at_k, inside_k), load(p_dstates, at_s, inside_s), b_dv, PRECISION)
    at_a, inside_a = rows(h, start, end, d.H, d.BT, d.BT, d.BT)
    at, inside = rows(h, start, end, d.H, d.V, d.BT, d.BV, i_v)
    b_dv = dot_split(tl.trans(load(p_a, at_a, inside_a)), load(p_do, at, inside), b_dv, PRECISION)
    tl.store(p_dv + at, cast(b_dv, p_dv.dtype.element_ty), mask=inside)


@triton.jit
def grad_kernel(
    p_q,  # [tokens, H, K]
    p_k,  # [tokens, H, K]
    p_v,  # [tokens, H, V]
    p_g,  # [tokens, H, K], natural logarithms
    p_do,  # [tokens, H, V]
    p_chunks,  # int32 [NC, 2]
    p_weights,  # bfloat16 [3, BT, BT], see load_weights
    p_gate,  # float32 [NC, H, K]
    p_strong,  # int32 [NC, H]
    p_da,  # [tokens, H, parts, BT], see load_da
    p_diagonal,  # float32 [tokens, H]
    p_states,  # [NC, H, K, V]
    p_dstates,  # [NC, H, K, V]
    p_passed,  # float32 [NC, H, PARTS, K]
    p_dq,  # [tokens, H, K]; out
    p_dk,  # [tokens, H, K]; out
    p_dg,  # [tokens, H, K]; out
    scale,  # float
    d: tl.constexpr,  # H K V BT BK BV PARTS
    PRECISION: tl.constexpr,
):
    """dq, dk, dg of one chunk, BK columns, unless its decay is strong.

    Blocks that do not fit into registers are loaded again.
    """
    BLOCKS: tl.constexpr = (d.V + d.BV - 1) // d.BV
    # two steps without a pipeline, whose third buffer they would not use: its memory is left to the first cache
    UNROLL: tl.constexpr = BLOCKS if BLOCKS <= 2 and PRECISION == "bf16" else 1
    i_k, h, n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, end, strong = tl.load(p_chunks + 2 * n), tl.load(p_chunks + 2 * n + 1), tl.load(p_strong + n * d.H + h)
    if (strong != 0) | (start == end):  # a test of all three, so that their loads are in flight together
        return
    k = i_k * d.BK + tl.arange(0, d.BK)
    at, inside = rows(h, start, end, d.H, d.K, d.BT, d.BK, i_k)
    b_zero = zeros(d.BT, d.BK)
    b_dq, b_dk = b_zero, b_zero  # do S^T, v D^T: all loads of a step before its products
    for i_v in tl.range(BLOCKS, loop_unroll_factor=UNROLL):
        at_v, inside_v = rows(h, start, end, d.H, d.V, d.BT, d.BV, i_v)
        at_s, inside_s = state_at(n * d.H + h, i_v, d.K, d.V, d.BK, d.BV, i_k)
        b_do, b_v = load(p_do, at_v, inside_v), load(p_v, at_v, inside_v)
        b_state, b_dstate = load(p_states, at_s, inside_s), load(p_dstates, at_s, inside_s)
        b_dq = product(b_do, tl.trans(b_state), b_dq, PRECISION)
        b_dk = product(b_v, tl.trans(b_dstate), b_dk, PRECISION)
    b_high, b_low = load_da(p_da, h, start, end, 0, d.H, d.BT, d.BT, PRECISION)
    t = start + tl.arange(0, d.BT)
    b_diagonal = tl.load(p_diagonal + t.to(tl.int64) * d.H + h, mask=t < end, other=0.0)[:, None]

    # As in operands_kernel: half the difference of the gates up to a token and those behind it; the other half of the
    # chunk's gates is a factor of both
    b_gates = weighted_gates(load_weights(p_weights, HALVES, d.BT), p_g, at, inside, PRECISION)
    b_rest = exp2(0.5 * tl.load(p_gate + (n * d.H + h) * d.K + k, mask=k < d.K, other=0.0))[None, :]

    b_k = load(p_k, at, inside).to(tl.float32)
    b_dq = parts_product(b_high, b_low, b_k * exp2(-b_gates), b_dq * (b_rest * scale), PRECISION) * exp2(b_gates)
    tl.store(p_dq + at, cast(b_dq + b_diagonal * b_k, p_dq.dtype.element_ty), mask=inside)
    b_onward = b_dq * load(p_q, at, inside).to(tl.float32)

    b_q = load(p_q, at, inside).to(tl.float32)
    b_pairs = parts_product(tl.trans(b_high), tl.trans(b_low), b_q * exp2(b_gates), b_zero, PRECISION)
    b_back = exp2(-b_gates)
    b_pairs *= b_back
    b_dk *= b_back * b_rest
    b_k = load(p_k, at, inside).to(tl.float32)
    tl.store(p_dk + at, cast(b_dk + b_pairs + b_diagonal * b_q, p_dk.dtype.element_ty), mask=inside)

    b_dg = b_zero + load_passed(p_passed, n, h, k, d)[None, :]
    b_dg = dot_split(load_weights(p_weights, ONWARD, d.BT), b_onward - b_k * b_pairs, b_dg, PRECISION)
    b_dg = dot_split(load_weights(p_weights, BEFORE, d.BT), b_k * b_dk, b_dg, PRECISION)
    tl.store(p_dg + at, cast(b_dg, p_dg.dtype.element_ty), mask=inside)
