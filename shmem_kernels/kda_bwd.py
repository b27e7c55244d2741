"""KDA inside of a chunk, backward; kda_fwd.py defines the symbols.

Inputs are dS', the gradient of the chunk's outgoing state, and r = T^T dv_new, dv_new = Aqk^T do + kg dS', both from
adjoint_kernel (delta_state.py). pairs_kernel computes dv and, for each two tokens of a chunk, dAqk and dAkk;
gradient_kernel all other gradients, in two launches, the second for chunks with more than 4 stretches (kda_fwd.py).

    r is the gradient of the right side of (1 + Akk) v_new = beta v - beta k e^G S
    dAqk = do v_new^T, s <= t         dAkk = -r v_new^T, s < t         dv = beta r
    dbeta = v . r - (k e^G) . r S^T + k . X,      X_t = sum_s dAkk[t, s] k_s e^(G_t - G_s)
    dq   = scale e^G do S^T  +  scale sum_s dAqk[t, s] k_s e^(G_t - G_s)
    dk'  = beta (X - e^G r S^T)                                                        as the later token
    dk'' = e^(G - G_t) v_new dS'^T + sum_t (scale dAqk[t, s] q_t + dAkk[t, s] beta_t k_t) e^(G_t - G_s)  as the earlier
    dk = dk' + dk''        dG_t = q . dq + k . dk' - k . dk'', both without s = t, which cancels up to rounding
    dG at the last token also + sum_t k_t . e^(G - G_t) v_new dS'^T + e^G <S, dS'>_row;  dg = the sum of dG from t on
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import (
    BEFORE,
    ONWARD,
    cast,
    exp2,
    load,
    load_weights,
    lower,
    product,
    product_of_parts,
    rounded_to_16_bits,
    times,
    upper,
    zeros,
)
from .kda_fwd import (
    PAIRS,
    after_anchor,
    chunk_of,
    gate_sums,
    gates_at,
    halves_of,
    shared,
    state_tile,
    sums_from,
    tile,
)


@triton.jit
def parts_at(n, h, d: tl.constexpr):
    """Return the offset of pairs_kernel's parts: BT numbers dAqk[t, t], BT terms of dbeta, a scale and its inverse."""
    return (n * d.H + h).to(tl.int64) * (3 * d.BT)


@triton.jit
def times_values(p_x, p_v_new, place, d: tl.constexpr, PRECISION: tl.constexpr):
    """Return x v_new^T [BT, BT]. place: h, first and last token."""
    h, start, end = place
    b_sum = zeros(d.BT, d.BT)
    for i_v in range((d.V + d.BV - 1) // d.BV):
        base, at, inside = tile(h, start, end, d.H, d.V, d.BT, d.BV, i_v)
        b_v_new = tl.trans(load(p_v_new + base, at, inside))
        b_sum = product(load(p_x + base, at, inside), b_v_new, b_sum, PRECISION)
    return b_sum


@triton.jit
def of_values(p_v, p_r, p_dv, b_beta, place, d: tl.constexpr):
    """Store dv; return v . r [BT]. place: h, first and last token."""
    h, start, end = place
    b_dbeta = zeros(d.BT)
    for i_v in range((d.V + d.BV - 1) // d.BV):
        base, at, inside = tile(h, start, end, d.H, d.V, d.BT, d.BV, i_v)
        b_r = load(p_r + base, at, inside).to(tl.float32)
        b_dbeta += tl.sum(b_r * load(p_v + base, at, inside).to(tl.float32), 1)
        tl.store(p_dv + base + at, cast(b_r * b_beta[:, None], p_dv.dtype.element_ty), mask=inside)
    return b_dbeta


@triton.jit
def same_of(b_pairs, BT: tl.constexpr):
    """Return the diagonal [BT]."""
    return tl.sum(tl.where(lower(BT, 0) & upper(BT, 0), b_pairs, 0.0), 1)


@triton.jit
def power_of_two(b_x, b_y):
    """Return (2^n, 2^-n), with 2^n the largest power of two up to the largest absolute value, within 2^-60 and 2^40;
    2^-40 if all are 0: then dbeta has other terms alone."""
    largest = tl.maximum(tl.max(tl.abs(b_x)), tl.max(tl.abs(b_y)))
    n = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 67), 167)
    n = tl.where(largest == 0.0, 87, n)
    return (n << 23).to(tl.float32, bitcast=True), ((254 - n) << 23).to(tl.float32, bitcast=True)


@triton.jit
def pairs_kernel(
    p_v,  # [tokens, H, V]
    p_beta,  # [tokens, H]
    p_chunks,  # int32 [NC, 2]
    p_v_new,  # [tokens, H, V]
    p_do,  # [tokens, H, V]
    p_r,  # [tokens, H, V]
    p_dv,  # [tokens, H, V]; out
    p_pairs,  # [NC, H, 2, BT, BT]; out
    p_parts,  # float32 [NC, H, 3, BT]; out, see parts_at
    scale,  # float
    d: tl.constexpr,  # H V BT BV
    PRECISION: tl.constexpr,
):
    """For one chunk and head: dv; scale dAqk and dAkk, s < t (pairs [NC, H, 2, BT, BT]); and sums, see
    parts_at. Pairs and sums are divided by a power of two, so that the largest pair is at most 2, and their products
    with factors up to 2^80 are in float32's range."""
    n, h = tl.program_id(0) // d.H, tl.program_id(0) % d.H  # heads of a token are adjacent in memory
    start, end, at_t, inside_t, b_beta = chunk_of(p_chunks, p_beta, n, h, d)
    place = (h, start, end)
    b_dbeta = of_values(p_v, p_r, p_dv, b_beta, place, d)
    b_pq = times_values(p_do, p_v_new, place, d, PRECISION) * scale
    b_pk = times_values(p_r, p_v_new, place, d, PRECISION)
    b_pq = tl.where(lower(d.BT, 0), b_pq, 0.0)
    b_pk = tl.where(lower(d.BT, 1), b_pk, 0.0)
    size, inverse = power_of_two(b_pq, b_pk)
    b_pq *= inverse
    b_pk *= inverse
    p_pairs += (n * d.H + h).to(tl.int64) * (2 * d.BT * d.BT)
    at_p = tl.arange(0, d.BT)[:, None] * d.BT + tl.arange(0, d.BT)[None, :]
    tl.store(p_pairs + at_p, cast(tl.where(lower(d.BT, 1), b_pq, 0.0), p_pairs.dtype.element_ty))
    tl.store(p_pairs + d.BT * d.BT + at_p, cast(-b_pk, p_pairs.dtype.element_ty))
    p_parts += parts_at(n, h, d)
    t = tl.arange(0, d.BT)
    tl.store(p_parts + t, same_of(b_pq, d.BT))
    tl.store(p_parts + d.BT + t, b_dbeta * inverse)
    tl.store(p_parts + 2 * d.BT, size)
    tl.store(p_parts + 2 * d.BT + 1, inverse)


@triton.jit
def load_values(p_do, p_r, p_v_new, place, i_v, d: tl.constexpr):
    """Load a block of columns of do, r and v_new. place: h, first and last token."""
    h, start, end = place
    base, at, inside = tile(h, start, end, d.H, d.V, d.BT, d.BV, i_v)
    return load(p_do + base, at, inside), load(p_r + base, at, inside), load(p_v_new + base, at, inside)


@triton.jit
def load_states(p_states, p_dstates, place_s, i_v, d: tl.constexpr):
    """Load a block of a state and of its gradient; return also the sums of their product over its columns [BJ].
    place_s: number of the state, j."""
    i_state, j = place_s
    base, at, inside = state_tile(i_state, i_v, d, j)
    b_state, b_dstate = load(p_states + base, at, inside), load(p_dstates + base, at, inside)
    return b_state, b_dstate, tl.sum(b_state.to(tl.float32) * b_dstate.to(tl.float32), 1)


@triton.jit
def load_pairs(b_pairs, p_pairs, i, p_where, BT: tl.constexpr, PRECISION: tl.constexpr):
    """Return the pairs of tokens that p_where [BT, BT] selects, or all without it; b_pairs as in ``shared``."""
    b_pairs = shared(b_pairs, p_pairs, i, BT, PRECISION)
    if p_where is not None:
        b_pairs = times(b_pairs, load_weights(p_where, 0, BT).to(b_pairs.dtype))
    return b_pairs


@triton.jit
def add_pairs(pairs, tokens, factors, sums, BT: tl.constexpr, PRECISION: tl.constexpr):
    """Add the pairs' terms to dq, dk, dG and dbeta; a pair's decay is the product of the later token's factor, 0 for
    other tokens, and the earlier one's. pairs: of q, of k, the pointer to both, and p_where of load_pairs. dG takes the
    rounded operands: a pair's terms in dG_t and dG_s cancel in the gates after t."""
    b_pq, b_pk, p_pairs, p_where = pairs
    b_q, b_k, b_beta = tokens
    b_row, b_column = factors
    b_dq, b_dk, b_gates, b_dbeta = sums
    b_q, b_k = b_q.to(tl.float32), b_k.to(tl.float32)
    b_keys = rounded_to_16_bits(b_k * b_column, PRECISION)
    b_later_q = rounded_to_16_bits(b_q * b_row, PRECISION)
    b_pairs = load_pairs(b_pq, p_pairs, 0, p_where, BT, PRECISION)
    b_of = product_of_parts(b_pairs, b_keys, 2, PRECISION)
    b_gates = tl.fma(b_later_q, b_of, b_gates)
    b_dq = tl.fma(b_row, b_of, b_dq)
    tl.debug_barrier()  # no load moves across, which saves registers, as below
    b_later_k = rounded_to_16_bits(b_k * b_row * b_beta[:, None], PRECISION)
    b_pairs = load_pairs(b_pk, p_pairs, 1, p_where, BT, PRECISION)
    b_of = product_of_parts(b_pairs, b_keys, 2, PRECISION)
    b_gates = tl.fma(b_later_k, b_of, b_gates)
    b_of *= b_row
    b_dbeta += tl.sum(b_k * b_of, 1)
    b_dk = tl.fma(b_of, b_beta[:, None] + tl.zeros(b_dk.shape, tl.float32), b_dk)
    tl.debug_barrier()
    b_pairs = load_pairs(b_pq, p_pairs, 0, p_where, BT, PRECISION)
    b_sum = product_of_parts(tl.trans(b_pairs), b_later_q, 2, PRECISION)
    tl.debug_barrier()
    b_pairs = load_pairs(b_pk, p_pairs, 1, p_where, BT, PRECISION)
    b_sum += product_of_parts(tl.trans(b_pairs), b_later_k, 2, PRECISION)
    return b_dq, tl.fma(b_column, b_sum, b_dk), tl.fma(-b_keys, b_sum, b_gates), b_dbeta


@triton.jit
def gradient_kernel(
    p_q,  # [tokens, HK, K]
    p_k,  # [tokens, HK, K]
    p_g,  # [tokens, H, K], natural logarithms
    p_beta,  # [tokens, H]
    p_chunks,  # int32 [NC, 2]
    p_strong,  # int32 [NC, H], see anchors_kernel
    p_weights,  # bfloat16 [tables, BT, BT], see load_weights
    p_states,  # [NC, H, K, V], each chunk's incoming state
    p_dstates,  # [NC, H, K, V], the gradient of its outgoing state
    p_v_new,  # [tokens, H, V]
    p_do,  # [tokens, H, V]
    p_r,  # [tokens, H, V]
    p_pairs,  # [NC, H, 2, BT, BT], of pairs_kernel
    p_parts,  # float32 [NC, H, 3, BT], of pairs_kernel
    p_dq,  # [tokens, H, K]; out
    p_dk,  # [tokens, H, K]; out
    p_dg,  # like p_g; out
    p_dbeta,  # like p_beta; out
    scale,  # float
    d: tl.constexpr,  # H HK K V BT BJ BV
    REST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """For one chunk and head: dq, dk, dg and dbeta, BJ channels and one stretch at a time. Pairs, and so sums over
    pairs, are divided by pairs_kernel's power of two. With REST only chunks with more than 4 stretches, otherwise only
    the others.

    Operands that all channels share stay in shared memory: pairs, tables, and with V <= BV do, r and v_new. What BJ
    channels need is loaded at once. On Hopper take BJ = 32 or more for bfloat16: see product_of_parts."""
    n, h = tl.program_id(0) // d.H, tl.program_id(0) % d.H  # heads of a token are adjacent in memory
    packed = tl.load(p_strong + n * d.H + h)
    if (packed >> 24 < d.BT) != REST:
        return
    p_parts += parts_at(n, h, d)
    t = tl.arange(0, d.BT)
    size, inverse = tl.load(p_parts + 2 * d.BT), tl.load(p_parts + 2 * d.BT + 1)
    b_dbeta = tl.load(p_parts + d.BT + t)
    start, end, at_t, inside_t, b_beta = chunk_of(p_chunks, p_beta, n, h, d)
    place = (h, start, end)
    p_pairs += (n * d.H + h).to(tl.int64) * (2 * d.BT * d.BT)
    b_pq, b_pk = load_weights(p_pairs, 0, d.BT), load_weights(p_pairs, 1, d.BT)
    b_onward, b_before = load_weights(p_weights, ONWARD, d.BT), load_weights(p_weights, BEFORE, d.BT)
    if d.V <= d.BV:
        b_do, b_r, b_v_new = load_values(p_do, p_r, p_v_new, place, 0, d)
    for j in range((d.K + d.BJ - 1) // d.BJ):
        base_k, at_k, inside_k = tile(h // (d.H // d.HK), start, end, d.HK, d.K, d.BT, d.BJ, j)
        base, at, inside = tile(h, start, end, d.H, d.K, d.BT, d.BJ, j)
        place_s = (n * d.H + h, j)
        b_zeros = zeros(d.BT, d.BJ)
        b_last = zeros(d.BJ)
        b_g = gates_at(p_g, h, start, end, j, d)
        b_q, b_k = load(p_q + base_k, at_k, inside_k), load(p_k + base_k, at_k, inside_k)
        if d.V <= d.BV:
            b_state, b_dstate, b_last = load_states(p_states, p_dstates, place_s, 0, d)
        b_same = tl.load(p_parts + t)[:, None]
        b_dq, b_dk, b_gates = b_same * b_k.to(tl.float32), b_same * b_q.to(tl.float32), b_zeros
        b_sums = -gate_sums(b_onward, p_weights, ONWARD, b_g, d.BT, PRECISION)
        i, first = 0, 0
        while (i < 32) & (first < d.BT):
            tl.debug_barrier()
            beyond = (packed >> i) & 255
            b_dq, b_dk, b_gates, b_dbeta = add_pairs(
                (b_pq, b_pk, p_pairs, None),
                (b_q, b_k, b_beta),
                after_anchor(b_sums, first, beyond),
                (b_dq, b_dk, b_gates, b_dbeta),
                d.BT,
                PRECISION,
            )
            if beyond < d.BT:
                b_g = gates_at(p_g, h, start, end, j, d)
                b_sums = sums_from(beyond, (b_onward, b_before), p_weights, b_g, d.BT, PRECISION)
            i, first = i + 8, beyond
        for m in range(6 if REST else 0):
            tl.debug_barrier()
            b_g = gates_at(p_g, h, start, end, j, d)
            b_dq, b_dk, b_gates, b_dbeta = add_pairs(
                (b_pq, b_pk, p_pairs, p_weights + (PAIRS + m) * d.BT * d.BT),
                (b_q, b_k, b_beta),
                halves_of(p_weights, m, b_g, packed >> 24, d.BT, PRECISION),
                (b_dq, b_dk, b_gates, b_dbeta),
                d.BT,
                PRECISION,
            )
        b_of_q, b_of_k, b_by_state = b_zeros, b_zeros, b_zeros
        b_g = gates_at(p_g, h, start, end, j, d)
        for i_v in range((d.V + d.BV - 1) // d.BV):
            if d.V > d.BV:
                b_state, b_dstate, b_part = load_states(p_states, p_dstates, place_s, i_v, d)
                b_last += b_part
                b_do, b_r, b_v_new = load_values(p_do, p_r, p_v_new, place, i_v, d)
            b_of_q = product(b_do, tl.trans(b_state), b_of_q, PRECISION)
            b_of_k = product(b_r, tl.trans(b_state), b_of_k, PRECISION)
            b_by_state = product(b_v_new, tl.trans(b_dstate), b_by_state, PRECISION)
        b_from = exp2(gate_sums(b_onward, p_weights, ONWARD, b_g, d.BT, PRECISION))
        b_of_q *= b_from * scale
        tl.store(p_dq + base + at, cast(tl.fma(b_dq, size + b_zeros, b_of_q), p_dq.dtype.element_ty), mask=inside)
        b_gates = tl.fma(b_q.to(tl.float32), b_of_q, b_gates * size)
        b_of_k *= -b_from
        b_dbeta += tl.sum(b_k.to(tl.float32) * b_of_k, 1) * inverse
        b_of_k *= b_beta[:, None]
        b_gates = tl.fma(b_k.to(tl.float32), b_of_k, b_gates)
        b_by_state *= exp2(gate_sums(b_before, p_weights, BEFORE, b_g, d.BT, PRECISION))
        b_dk = tl.fma(b_dk, size + b_zeros, b_of_k + b_by_state)
        tl.store(p_dk + base + at, cast(b_dk, p_dk.dtype.element_ty), mask=inside)
        # not a difference of sums over all tokens and over later ones: it may be much smaller than both
        b_through = (b_last * exp2(tl.sum(b_g, 0)))[None, :] + b_zeros
        b_table = shared(b_before, p_weights, BEFORE, d.BT, PRECISION)
        b_through += product_of_parts(b_table, b_by_state * b_k.to(tl.float32), 3, PRECISION)
        b_table = shared(b_onward, p_weights, ONWARD, d.BT, PRECISION)
        b_gates = b_through + product_of_parts(b_table, b_gates, 3, PRECISION)
        tl.store(p_dg + base + at, cast(b_gates, p_dg.dtype.element_ty), mask=inside)
    tl.store(p_dbeta + at_t, cast(b_dbeta * size, p_dbeta.dtype.element_ty), mask=inside_t)
