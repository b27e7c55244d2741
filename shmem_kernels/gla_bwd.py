"""Gated linear attention, backward. With S[n] entering chunk n and D[n] = dL/d(state leaving chunk n):

    keys_kernel, queries_kernel    k_out, q_in and A as in forward
    state_kernel      REVERSE: the gradient of the state over each segment alone
    carry_kernel      REVERSE: over this rank's segments and, by the reverse All-Scan, over the ranks
    state_kernel      EVERY_CHUNK: S[n]; needs no remote gradient and runs while the tiles travel
    da_kernel         dA = scale * do v^T; likewise
    output_kernel     REVERSE: D[n];  dv = A^T do + k_out D;  what passes from state to state (below)
    grad_kernel       dq = scale * exp(gates up to) * (do S^T) + what dA gives
                      dk = exp(gates after) * (v D^T) + what dA gives
                      dg

dg_t collects every term whose decay holds g_t; within a chunk those are

    pairs s < t <= r of the chunk:                 sum_{r >= t} (q dq_pairs - k dk_pairs)_r
    from the state to tokens r >= t:               sum_{r >= t} (q dq_state)_r
    from tokens s < t to the state:                sum_{s < t} (k dk_state)_s
    from state to state:                           exp(all gates) * sum_v D * S

A token's product with itself holds no gate, so it is left out of the sums and added to dq and dk afterwards.
Decays are formed as in gla_fwd.py, wide chunks left to a kernel of their own as there.
Source: ZeCO, arXiv 2507.01004, section 3; GLA, arXiv 2312.06635, appendix.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gla_blocks import (
    BEFORE,
    HALVES,
    ONWARD,
    cast,
    exp2,
    fine_product,
    load,
    load_gates,
    load_weights,
    lower,
    pair_decays,
    parts_product,
    product,
    rows,
    state_at,
    sums_of,
    upper,
)


@triton.jit
def da_kernel(
    p_v, p_do, p_chunks, p_da, p_diagonal, scale,
    H: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dA = scale * do v^T of one chunk: p_da has what is below the diagonal (see load_da), p_diagonal the diagonal."""
    n, h = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(p_chunks + 2 * n), tl.load(p_chunks + 2 * n + 1)
    b_da = tl.zeros([BT, BT], tl.float32)
    for i_v in range((V + BV - 1) // BV):
        at, inside = rows(h, start, end, H, V, BT, BV, i_v)
        b_da = product(load(p_do, at, inside), tl.trans(load(p_v, at, inside)), b_da, PRECISION)
    b_da *= scale
    t = start + tl.arange(0, BT)
    b_diagonal = tl.sum(tl.where(lower(BT, 0) & upper(BT, 0), b_da, 0.0), 1)
    tl.store(p_diagonal + t.to(tl.int64) * H + h, b_diagonal, mask=t < end)
    b_da = tl.where(lower(BT, 1), b_da, 0.0)
    b_high = cast(b_da, p_da.dtype.element_ty)
    PARTS: tl.constexpr = 2 if PRECISION == "bf16" else 1
    at, inside = rows(h, start, end, H, PARTS * BT, BT, BT)
    tl.store(p_da + at, b_high, mask=inside)
    if PARTS == 2:
        tl.store(p_da + at + BT, cast(b_da - b_high.to(tl.float32), p_da.dtype.element_ty), mask=inside)


@triton.jit
def load_da(p_da, h, t, end, i_s, H: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr):
    """dA [BC, BC] of tokens t .. and the i_s-th BC tokens of the chunk, as (high, low): p_da is [tokens, H, 2, BT] in
    bfloat16, their sum dA, or else [tokens, H, BT] in float32, high alone."""
    PARTS: tl.constexpr = 2 if PRECISION == "bf16" else 1
    at, inside = rows(h, t, end, H, PARTS * BT, BC, BC, i_s)
    b_high = load(p_da, at, inside)
    b_low = b_high
    if PARTS == 2:
        b_low = load(p_da, at + BT, inside)
    return b_high, b_low


@triton.jit
def through(p_through, n, h, k, H: tl.constexpr, K: tl.constexpr, NT: tl.constexpr):
    """What dg has from state to state, which is in NT parts; the same for all tokens of the chunk."""
    b_sum = tl.zeros(k.shape, tl.float32)
    for i in tl.static_range(NT):
        b_sum += tl.load(p_through + ((n * H + h) * NT + i) * K + k, mask=k < K, other=0.0)
    return b_sum


@triton.jit
def from_states(
    p_y, p_states, n, h, start, end, i_k,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """y S^T [BT, BK], with the chunk's state."""
    b_sum = tl.zeros([BT, BK], tl.float32)
    for i_v in range((V + BV - 1) // BV):
        at_y, inside_y = rows(h, start, end, H, V, BT, BV, i_v)
        at, inside = state_at(n * H + h, i_v, K, V, BK, BV, i_k)
        b_sum = product(load(p_y, at_y, inside_y), tl.trans(load(p_states, at, inside)), b_sum, PRECISION)
    return b_sum


@triton.jit
def grad_kernel(
    p_q, p_k, p_v, p_g, p_do, p_chunks, p_weights, p_gate, p_wide, p_da, p_diagonal, p_states, p_dstates, p_through,
    p_dq, p_dk, p_dg, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    NT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk, dg of one chunk, BK columns, unless it is wide. What is loaded again is what registers could not keep."""
    i_k, n, h = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tl.load(p_wide + n * H + h) != 0:
        return
    start, end = tl.load(p_chunks + 2 * n), tl.load(p_chunks + 2 * n + 1)
    k = i_k * BK + tl.arange(0, BK)
    at, inside = rows(h, start, end, H, K, BT, BK, i_k)
    b_zero = tl.zeros([BT, BK], tl.float32)
    b_high, b_low = load_da(p_da, h, start, end, 0, H, BT, BT, PRECISION)
    t = start + tl.arange(0, BT)
    b_diagonal = tl.load(p_diagonal + t.to(tl.int64) * H + h, mask=t < end, other=0.0)[:, None]
    b_dq = from_states(p_do, p_states, n, h, start, end, i_k, H, K, V, BT, BK, BV, PRECISION)

    # As in queries_kernel: half the difference of the gates up to a token and behind it, and the half that both lack
    b_gates = fine_product(load_weights(p_weights, HALVES, BT), load_gates(p_g, at, inside), b_zero, PRECISION)
    b_rest = exp2(0.5 * tl.load(p_gate + (n * H + h) * K + k, mask=k < K, other=0.0))[None, :]

    b_k = load(p_k, at, inside).to(tl.float32)
    b_dq = parts_product(b_high, b_low, b_k * exp2(-b_gates), b_dq * (b_rest * scale), PRECISION) * exp2(b_gates)
    tl.store(p_dq + at, cast(b_dq + b_diagonal * b_k, p_dq.dtype.element_ty), mask=inside)
    b_onward = b_dq * load(p_q, at, inside).to(tl.float32)

    b_dk = from_states(p_v, p_dstates, n, h, start, end, i_k, H, K, V, BT, BK, BV, PRECISION)
    b_q = load(p_q, at, inside).to(tl.float32)
    b_pairs = parts_product(tl.trans(b_high), tl.trans(b_low), b_q * exp2(b_gates), b_zero, PRECISION)
    b_back = exp2(-b_gates)
    b_pairs *= b_back
    b_dk *= b_back * b_rest
    b_k = load(p_k, at, inside).to(tl.float32)
    tl.store(p_dk + at, cast(b_dk + b_pairs + b_diagonal * b_q, p_dk.dtype.element_ty), mask=inside)

    b_dg = b_zero + through(p_through, n, h, k, H, K, NT)[None, :]
    b_dg = fine_product(load_weights(p_weights, ONWARD, BT), b_onward - b_k * b_pairs, b_dg, PRECISION)
    b_dg = fine_product(load_weights(p_weights, BEFORE, BT), b_k * b_dk, b_dg, PRECISION)
    tl.store(p_dg + at, cast(b_dg, p_dg.dtype.element_ty), mask=inside)


@triton.jit
def wide_grad_kernel(
    p_q, p_k, p_v, p_g, p_do, p_chunks, p_wide, p_da, p_diagonal, p_states, p_dstates, p_through, p_dq, p_dk, p_dg,
    scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr,
    NT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk, dg of a wide chunk, by sub-blocks of BC tokens, BS columns."""
    n, h = tl.program_id(0), tl.program_id(1)
    if tl.load(p_wide + n * H + h) != 0:
        start, end = tl.load(p_chunks + 2 * n), tl.load(p_chunks + 2 * n + 1)
        for i_s in range(BK // BS):
            # From the last sub-block: the sums of what later tokens give to dg
            b_later = through(p_through, n, h, i_s * BS + tl.arange(0, BS), H, K, NT)
            for i in range(BT // BC):
                b_later = _wide_grad_rows(
                    p_q, p_k, p_v, p_g, p_do, p_da, p_diagonal, p_states, p_dstates, p_dq, p_dk, p_dg, b_later,
                    n, h, start, end, BT // BC - 1 - i, i_s, scale, H, K, V, BT, BC, BV, BS, PRECISION,
                )  # fmt: skip
            # From the first: of what earlier ones give by way of the state
            b_earlier = tl.zeros([BS], tl.float32)
            for i in range(BT // BC):
                own, inside = rows(h, start + i * BC, end, H, K, BC, BS, i_s)
                b_k = load(p_k, own, inside).to(tl.float32)
                b_dk = _wide_from_state(
                    p_v, p_g, p_dstates, n, h, start, end, i, i_s, H, K, V, BT, BC, BV, BS, PRECISION
                )
                b_dg = load(p_dg, own, inside).to(tl.float32) + b_earlier[None, :]
                b_dg += sums_of(lower(BC, 1), b_k * b_dk, PRECISION)
                tl.store(p_dg + own, cast(b_dg, p_dg.dtype.element_ty), mask=inside)
                b_earlier += tl.sum(b_k * b_dk, 0)


@triton.jit
def _wide_from_state(
    p_v, p_g, p_dstates, n, h, chunk_start, end, i_sub, i_s,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr,
    BS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What D gives to dk of the BC tokens of a sub-block: exp(gates after) * (v D^T) [BC, BS]."""
    start = chunk_start + i_sub * BC
    own, inside = rows(h, start, end, H, K, BC, BS, i_s)
    b_after = sums_of(upper(BC, 1), load_gates(p_g, own, inside), PRECISION)
    i = i_sub + 1
    while i < BT // BC:
        at, inside = rows(h, chunk_start + i * BC, end, H, K, BC, BS, i_s)
        b_after += tl.sum(load_gates(p_g, at, inside), 0)[None, :]
        i += 1
    return exp2(b_after) * from_states(p_v, p_dstates, n, h, start, end, i_s, H, K, V, BC, BS, BV, PRECISION)


@triton.jit
def _wide_grad_rows(
    p_q, p_k, p_v, p_g, p_do, p_da, p_diagonal, p_states, p_dstates, p_dq, p_dk, p_dg, b_later,
    n, h, chunk_start, end, i_sub, i_s, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr,
    BS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq and dk of BC tokens (a sub-block) and BS columns, and of dg what these and later tokens give.

    b_later [BS]: the sum of q dq - k dk_pairs over the later sub-blocks. Returns it with this one.
    """
    start = chunk_start + i_sub * BC
    own, inside = rows(h, start, end, H, K, BC, BS, i_s)
    b_q = load(p_q, own, inside).to(tl.float32)  # [BC, BS]
    b_k = load(p_k, own, inside).to(tl.float32)
    b_g = load_gates(p_g, own, inside)

    # Its own sub-block, every pair by itself
    b_pairs = pair_decays(b_g, BC) * _wide_da(p_da, h, start, end, i_sub, H, BT, BC, PRECISION)[:, :, None]
    b_dq = tl.sum(b_pairs * b_k[None, :, :], 1)  # [BC, BS]
    b_dk = tl.sum(b_pairs * b_q[:, None, :], 0)

    # Earlier sub-blocks, nearest first, which are whole, and the state before them give dq; b_between: the gates in
    # between
    b_far = tl.zeros([BC, BS], tl.float32)
    b_between = tl.zeros([BS], tl.float32)
    j = i_sub - 1
    while j >= 0:
        at, whole = rows(h, chunk_start + j * BC, end, H, K, BC, BS, i_s)
        b_gj = load_gates(p_g, at, whole)
        b_kj = exp2(sums_of(upper(BC, 1), b_gj, PRECISION) + b_between[None, :])
        b_kj *= load(p_k, at, whole).to(tl.float32)
        b_far = fine_product(_wide_da(p_da, h, start, end, j, H, BT, BC, PRECISION), b_kj, b_far, PRECISION)
        b_between += tl.sum(b_gj, 0)
        j -= 1
    b_gates = sums_of(lower(BC, 0), b_g, PRECISION)
    b_state = from_states(p_do, p_states, n, h, start, end, i_s, H, K, V, BC, BS, BV, PRECISION) * scale
    b_dq += b_far * exp2(b_gates) + b_state * exp2(b_gates + b_between[None, :])

    # Later sub-blocks give dk
    b_far = tl.zeros([BC, BS], tl.float32)
    b_between = tl.zeros([BS], tl.float32)
    i = i_sub + 1
    while i < BT // BC:
        at, inside_i = rows(h, chunk_start + i * BC, end, H, K, BC, BS, i_s)
        b_gi = load_gates(p_g, at, inside_i)
        b_qi = exp2(sums_of(lower(BC, 0), b_gi, PRECISION) + b_between[None, :])
        b_qi *= load(p_q, at, inside_i).to(tl.float32)
        b_da = _wide_da(p_da, h, chunk_start + i * BC, end, i_sub, H, BT, BC, PRECISION)
        b_far = fine_product(tl.trans(b_da), b_qi, b_far, PRECISION)
        b_between += tl.sum(b_gi, 0)
        i += 1
    b_dk += b_far * exp2(sums_of(upper(BC, 1), b_g, PRECISION))
    b_dg = b_q * b_dq - b_k * b_dk
    tl.store(
        p_dg + own, cast(sums_of(upper(BC, 0), b_dg, PRECISION) + b_later[None, :], p_dg.dtype.element_ty), mask=inside
    )

    b_dk += _wide_from_state(
        p_v, p_g, p_dstates, n, h, chunk_start, end, i_sub, i_s, H, K, V, BT, BC, BV, BS, PRECISION
    )
    t = start + tl.arange(0, BC)
    b_diagonal = tl.load(p_diagonal + t.to(tl.int64) * H + h, mask=t < end, other=0.0)[:, None]
    tl.store(p_dq + own, cast(b_dq + b_diagonal * b_k, p_dq.dtype.element_ty), mask=inside)
    tl.store(p_dk + own, cast(b_dk + b_diagonal * b_q, p_dk.dtype.element_ty), mask=inside)
    return b_later + tl.sum(b_dg, 0)


@triton.jit
def _wide_da(p_da, h, t, end, i_s, H: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr):
    """load_da in float32."""
    b_high, b_low = load_da(p_da, h, t, end, i_s, H, BT, BC, PRECISION)
    if PRECISION == "bf16":
        return b_high.to(tl.float32) + b_low.to(tl.float32)
    else:
        return b_high
