"""KDA inside of a chunk, backward; delta_chunks.py defines the symbols.

Inputs are dS', the gradient of the chunk's outgoing state, and r = T^T dv_new, dv_new = Aqk^T do + kg dS', both from
adjoint_kernel (delta.py). gradient_kernel computes weak chunks, BJ columns of q and k a program, dbeta_kernel sums
their terms of dbeta. pairs_kernel and strong_gradient_kernel compute strong chunks.

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

from .blocks import BEFORE, ONWARD, cast, exp2, load, load_weights, lower, product, rounded_to_tf32, times, upper
from .delta_chunks import (
    BIG,
    PAIRS,
    SMALL,
    STRONG_SMALL,
    SUMS,
    after_anchor,
    anchored_sums,
    chunk_of,
    gate_sums,
    gates_at,
    state_tile,
    tile,
    weighted,
)


@triton.jit
def tf32(b_x, PRECISION: tl.constexpr):
    """Round an operand of times_pairs to the number that the product takes: so that it can also be a factor of dG."""
    if PRECISION == "bf16":
        return (rounded_to_tf32(b_x).to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)
    return b_x


@triton.jit
def times_pairs(b_pairs, b_x, b_sum, PRECISION: tl.constexpr):
    """pairs x + sum: in TF32 where other products are in bfloat16, for smaller errors of dq, dk and dg."""
    if PRECISION == "bf16":
        return product(b_pairs, b_x, b_sum, "tf32")
    return product(b_pairs, b_x, b_sum, PRECISION)


@triton.jit
def parts_at(n, h, H: tl.constexpr, BT: tl.constexpr):
    """Return the offset of pairs_kernel's parts: BT numbers dAqk[t, t], BT terms of dbeta, a scale and its inverse."""
    return (n * H + h).to(tl.int64) * (3 * BT)


@triton.jit
def times_values(
    p_x, p_v_new, place, H: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr
):
    """Return x v_new^T [BT, BT]. place: h, first and last token."""
    h, start, end = place
    b_sum = tl.zeros([BT, BT], tl.float32)
    for i_v in range((V + BV - 1) // BV):
        base, at, inside = tile(h, start, end, H, V, BT, BV, i_v)
        b_v_new = tl.trans(load(p_v_new + base, at, inside))
        b_sum = product(load(p_x + base, at, inside), b_v_new, b_sum, PRECISION)
    return b_sum


@triton.jit
def of_values(p_v, p_r, p_dv, b_beta, place, H: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr):
    """Store dv; return v . r [BT]. place: h, first and last token."""
    h, start, end = place
    b_dbeta = tl.zeros([BT], tl.float32)
    for i_v in range((V + BV - 1) // BV):
        base, at, inside = tile(h, start, end, H, V, BT, BV, i_v)
        b_r = load(p_r + base, at, inside).to(tl.float32)
        b_dbeta += tl.sum(b_r * load(p_v + base, at, inside).to(tl.float32), 1)
        tl.store(p_dv + base + at, cast(b_r * b_beta[:, None], p_dv.dtype.element_ty), mask=inside)
    return b_dbeta


@triton.jit
def same_of(b_pairs, BT: tl.constexpr):
    """Return the diagonal [BT]."""
    return tl.sum(tl.where(lower(BT, 0) & upper(BT, 0), b_pairs, 0.0), 1)


@triton.jit
def times_state(
    p_x,
    p_states,
    place,
    place_s,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BJ: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return BJ columns of x S^T [BT, BJ]. place: h, first and last token; place_s: number of the state, j."""
    h, start, end = place
    i_state, j = place_s
    b_sum = tl.zeros([BT, BJ], tl.float32)
    for i_v in range((V + BV - 1) // BV):
        base, at, inside = tile(h, start, end, H, V, BT, BV, i_v)
        base_s, at_s, inside_s = state_tile(i_state, i_v, K, V, BJ, BV, j)
        b_state = tl.trans(load(p_states + base_s, at_s, inside_s))
        b_sum = product(load(p_x + base, at, inside), b_state, b_sum, PRECISION)
    return b_sum


@triton.jit
def inner(p_x, p_y, place_s, K: tl.constexpr, V: tl.constexpr, BJ: tl.constexpr, BV: tl.constexpr):
    """Return the sums of x y over V, of BJ rows of two states [BJ]. place_s as in times_state."""
    i_state, j = place_s
    b_sum = tl.zeros([BJ], tl.float32)
    for i_v in range((V + BV - 1) // BV):
        base, at, inside = state_tile(i_state, i_v, K, V, BJ, BV, j)
        b_x, b_y = load(p_x + base, at, inside).to(tl.float32), load(p_y + base, at, inside).to(tl.float32)
        b_sum += tl.sum(b_x * b_y, 1)
    return b_sum


@triton.jit
def power_of_two(b_x, b_y):
    """Return (2^n, 2^-n), with 2^n the largest power of two up to the largest absolute value, within 2^-60 and 2^40;
    2^-40 if all are 0: then the state's terms alone remain."""
    largest = tl.maximum(tl.max(tl.abs(b_x)), tl.max(tl.abs(b_y)))
    n = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 67), 167)
    n = tl.where(largest == 0.0, 87, n)
    return (n << 23).to(tl.float32, bitcast=True), ((254 - n) << 23).to(tl.float32, bitcast=True)


@triton.jit
def pairs_kernel(
    p_v,  # [tokens, H, V]
    p_beta,  # [tokens, H]
    p_chunks,  # int32 [NC, 2]
    p_strong,  # int32 [NC, H], see anchors_kernel
    p_v_new,  # [tokens, H, V]
    p_do,  # [tokens, H, V]
    p_r,  # [tokens, H, V]
    p_dv,  # [tokens, H, V]; out
    p_pairs,  # [NC, H, 2, BT, BT]; out
    p_parts,  # float32 [NC, H, 3, BT]; out, see parts_at
    scale,  # float
    H: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BJ: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """For one strong chunk and head: dv; scale dAqk and dAkk, s < t (pairs [NC, H, 2, BT, BT]); and sums, see
    parts_at. Pairs and sums are divided by a power of two, so that the largest pair is at most 2, and their products
    with factors up to 2^80 are in float32's range."""
    n, h = tl.program_id(0) // H, tl.program_id(0) % H  # heads of a token are adjacent in memory
    if tl.load(p_strong + n * H + h) == 0:
        return
    start, end, at_t, inside_t, b_beta = chunk_of(p_chunks, p_beta, n, h, H, BT)
    place = (h, start, end)
    b_dbeta = of_values(p_v, p_r, p_dv, b_beta, place, H, V, BT, BV)
    b_pq = times_values(p_do, p_v_new, place, H, V, BT, BV, PRECISION) * scale
    b_pk = times_values(p_r, p_v_new, place, H, V, BT, BV, PRECISION)
    b_pq = tl.where(lower(BT, 0), b_pq, 0.0)
    b_pk = tl.where(lower(BT, 1), b_pk, 0.0)
    size, inverse = power_of_two(b_pq, b_pk)
    b_pq *= inverse
    b_pk *= inverse
    p_pairs += (n * H + h).to(tl.int64) * (2 * BT * BT)
    at_p = tl.arange(0, BT)[:, None] * BT + tl.arange(0, BT)[None, :]
    tl.store(p_pairs + at_p, cast(tl.where(lower(BT, 1), b_pq, 0.0), p_pairs.dtype.element_ty))
    tl.store(p_pairs + BT * BT + at_p, cast(-b_pk, p_pairs.dtype.element_ty))
    p_parts += parts_at(n, h, H, BT)
    t = tl.arange(0, BT)
    tl.store(p_parts + t, same_of(b_pq, BT))
    tl.store(p_parts + BT + t, b_dbeta * inverse)
    tl.store(p_parts + 2 * BT, size)
    tl.store(p_parts + 2 * BT + 1, inverse)


@triton.jit
def gradient_kernel(
    p_q,  # [tokens, HK, K]
    p_k,  # [tokens, HK, K]
    p_v,  # [tokens, H, V]
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
    p_dq,  # [tokens, H, K]; out
    p_dk,  # [tokens, H, K]; out
    p_dv,  # [tokens, H, V]; out
    p_dg,  # like p_g; out
    p_parts,  # float32 [NC, H, NJ, BT]: dbeta of BJ columns; out
    scale,  # float
    H: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BJ: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of one weak chunk and head BJ columns of dq, dk and dg, and what these give to dbeta; dv."""
    NJ: tl.constexpr = (K + BJ - 1) // BJ
    DTYPE: tl.constexpr = tl.bfloat16 if PRECISION == "bf16" else tl.float32
    j, h, n = tl.program_id(0) % NJ, tl.program_id(0) // NJ % H, tl.program_id(0) // (NJ * H)
    if tl.load(p_strong + n * H + h) != 0:
        return
    start, end, at_t, inside_t, b_beta = chunk_of(p_chunks, p_beta, n, h, H, BT)
    place, place_s = (h, start, end), (n * H + h, j)
    base_k, at_k, inside_k = tile(h // (H // HK), start, end, HK, K, BT, BJ, j)
    base, at, inside = tile(h, start, end, H, K, BT, BJ, j)
    b_dbeta = tl.zeros([BT], tl.float32)
    if j == 0:
        b_dbeta = of_values(p_v, p_r, p_dv, b_beta, place, H, V, BT, BV)

    b_g = gates_at(p_g, h, start, end, j, H, K, BT, BJ)
    b_sums = gate_sums(p_weights, ONWARD, True, b_g, BT, PRECISION)
    b_decay = exp2(tl.sum(b_g, 0))
    b_keys = tf32(load(p_k + base_k, at_k, inside_k).to(tl.float32) * (exp2(-b_sums) * SMALL), PRECISION)
    b_before = exp2(b_sums) * BIG
    b_sum = times_state(p_v_new, p_dstates, place, place_s, H, K, V, BT, BJ, BV, PRECISION)
    b_sum *= (b_decay * BIG)[None, :]
    b_last = inner(p_states, p_dstates, place_s, K, V, BJ, BV) * b_decay
    b_last += tl.sum(b_keys * b_sum, 0)
    tl.debug_barrier()  # no load moves across, which saves registers, as below

    b_pairs = times_values(p_do, p_v_new, place, H, V, BT, BV, PRECISION) * scale
    b_same = same_of(b_pairs, BT)
    b_pairs = cast(tl.where(lower(BT, 1), b_pairs, 0.0), DTYPE)
    b_d = times_state(p_do, p_states, place, place_s, H, K, V, BT, BJ, BV, PRECISION)
    b_d = times_pairs(b_pairs, b_keys, b_d * (scale * SMALL), PRECISION)
    b_later = tf32(load(p_q + base_k, at_k, inside_k).to(tl.float32) * b_before, PRECISION)
    b_sum = times_pairs(tl.trans(b_pairs), b_later, b_sum, PRECISION)
    b_gates = b_later * b_d  # dG
    b_d = tl.fma(b_before, b_d, b_same[:, None] * load(p_k + base_k, at_k, inside_k).to(tl.float32))
    tl.store(p_dq + base + at, cast(b_d, p_dq.dtype.element_ty), mask=inside)
    tl.debug_barrier()

    b_pairs = times_values(p_r, p_v_new, place, H, V, BT, BV, PRECISION)
    b_pairs = cast(tl.where(lower(BT, 1), -b_pairs, 0.0), DTYPE)
    b_d = times_state(p_r, p_states, place, place_s, H, K, V, BT, BJ, BV, PRECISION)
    b_d = times_pairs(b_pairs, b_keys, b_d * -SMALL, PRECISION)
    b_k = load(p_k + base_k, at_k, inside_k).to(tl.float32)
    b_later = tf32(b_k * b_before * b_beta[:, None], PRECISION)
    b_sum = times_pairs(tl.trans(b_pairs), b_later, b_sum, PRECISION)
    b_gates = tl.fma(b_later, b_d, b_gates)  # as strong_gradient_kernel, with the same bits
    b_d *= b_before
    b_dbeta += tl.sum(b_k * b_d, 1)
    p_parts += ((n * H + h).to(tl.int64) * NJ + j) * BT + tl.arange(0, BT)
    tl.store(p_parts, b_dbeta)
    b_q = load(p_q + base_k, at_k, inside_k).to(tl.float32)
    b_d = tl.fma(b_d, b_beta[:, None] + tl.zeros([BT, BJ], tl.float32), b_same[:, None] * b_q)
    tl.debug_barrier()

    b_g = gates_at(p_g, h, start, end, j, H, K, BT, BJ)
    b_column = exp2(-gate_sums(p_weights, ONWARD, True, b_g, BT, PRECISION)) * SMALL
    b_keys = tf32(load(p_k + base_k, at_k, inside_k).to(tl.float32) * b_column, PRECISION)
    b_d = tl.fma(b_column, b_sum, b_d)
    tl.store(p_dk + base + at, cast(b_d, p_dk.dtype.element_ty), mask=inside)
    b_gates = tl.fma(-b_keys, b_sum, b_gates)
    b_through = b_last[None, :] + tl.zeros([BT, BJ], tl.float32)
    b_gates = weighted(p_weights, ONWARD, False, b_gates, b_through, BT, PRECISION)
    tl.store(p_dg + base + at, cast(b_gates, p_dg.dtype.element_ty), mask=inside)


@triton.jit
def dbeta_kernel(
    p_parts,  # float32 [NC, H, NJ, BT], of gradient_kernel
    p_chunks,  # int32 [NC, 2]
    p_strong,  # int32 [NC, H], see anchors_kernel
    p_dbeta,  # [tokens, H]; out
    H: tl.constexpr,
    BT: tl.constexpr,
    NJ: tl.constexpr,
):
    """dbeta of a weak chunk and head: a sum in a fixed order."""
    n, h = tl.program_id(0) // H, tl.program_id(0) % H
    if tl.load(p_strong + n * H + h) != 0:
        return
    t = tl.load(p_chunks + 2 * n) + tl.arange(0, BT)
    p_parts += (n * H + h).to(tl.int64) * (NJ * BT) + tl.arange(0, BT)
    b_dbeta = tl.load(p_parts)
    for j in tl.static_range(1, NJ):
        b_dbeta += tl.load(p_parts + j * BT)
    b_dbeta = cast(b_dbeta, p_dbeta.dtype.element_ty)
    tl.store(p_dbeta + t.to(tl.int64) * H + h, b_dbeta, mask=t < tl.load(p_chunks + 2 * n + 1))


@triton.jit
def pairs_of(p_pairs, first, beyond, BT: tl.constexpr):
    """Load scale dAqk and dAkk of the later tokens first .. beyond, [BT, BT]."""
    t, s = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    at, own = t * BT + s, (t >= first) & (t < beyond)
    return tl.load(p_pairs + at, mask=own, other=0.0), tl.load(p_pairs + BT * BT + at, mask=own, other=0.0)


@triton.jit
def as_later(pairs, tokens, factors, begin, sums, PRECISION: tl.constexpr):
    """Add the pairs' terms for the later token to dq, dk, dG and dbeta; decays are products of these factors. begin:
    start values of the matrix products."""
    b_pq, b_pk = pairs
    b_q, b_k, b_beta = tokens
    b_row, b_column = factors
    b_of_q, b_of_k = begin
    b_dq, b_dk, b_gates, b_dbeta = sums
    b_k = b_k.to(tl.float32)
    b_keys = tf32(b_k * b_column, PRECISION)
    b_of_q = times_pairs(b_pq, b_keys, b_of_q, PRECISION)
    b_dq = tl.fma(b_row, b_of_q, b_dq)
    b_gates = tl.fma(tf32(b_q.to(tl.float32) * b_row, PRECISION), b_of_q, b_gates)
    b_of_k = times_pairs(b_pk, b_keys, b_of_k, PRECISION)
    b_gates = tl.fma(tf32(b_k * b_row * b_beta[:, None], PRECISION), b_of_k, b_gates)
    b_of_k *= b_row
    b_dbeta += tl.sum(b_k * b_of_k, 1)
    b_dk = tl.fma(b_of_k, b_beta[:, None] + tl.zeros(b_dq.shape, tl.float32), b_dk)
    return b_dq, b_dk, b_gates, b_dbeta


@triton.jit
def as_earlier(pairs, tokens, factors, sums, PRECISION: tl.constexpr):
    """Add the pairs' terms for the earlier token to dk and dG."""
    b_pq, b_pk = pairs
    b_q, b_k, b_beta = tokens
    b_row, b_column = factors
    b_dk, b_gates = sums
    b_later = tf32(b_q.to(tl.float32) * b_row, PRECISION)
    b_sum = times_pairs(tl.trans(b_pq), b_later, tl.zeros(b_dk.shape, tl.float32), PRECISION)
    b_later = tf32(b_k.to(tl.float32) * b_row * b_beta[:, None], PRECISION)
    b_sum = times_pairs(tl.trans(b_pk), b_later, b_sum, PRECISION)
    b_keys = tf32(b_k.to(tl.float32) * b_column, PRECISION)
    return tl.fma(b_column, b_sum, b_dk), tl.fma(-b_keys, b_sum, b_gates)


@triton.jit
def strong_gradient_kernel(
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
    H: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BJ: tl.constexpr,
    BV: tl.constexpr,
    REST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """gradient_kernel for strong chunks, one stretch at a time, divided by pairs_kernel's power of two
    until they are stored. Each stretch loads its operands again, to save registers."""
    n, h = tl.program_id(0) // H, tl.program_id(0) % H  # heads of a token are adjacent in memory
    packed = tl.load(p_strong + n * H + h)
    if (packed == 0) | ((packed >> 24 < BT) != REST):
        return
    p_parts += parts_at(n, h, H, BT)
    t = tl.arange(0, BT)
    size, inverse = tl.load(p_parts + 2 * BT), tl.load(p_parts + 2 * BT + 1)
    b_dbeta = tl.load(p_parts + BT + t)
    start, end, at_t, inside_t, b_beta = chunk_of(p_chunks, p_beta, n, h, H, BT)
    p_pairs += (n * H + h).to(tl.int64) * (2 * BT * BT)
    for j in range((K + BJ - 1) // BJ):
        base_k, at_k, inside_k = tile(h // (H // HK), start, end, HK, K, BT, BJ, j)
        base, at, inside = tile(h, start, end, H, K, BT, BJ, j)
        b_zeros = tl.zeros([BT, BJ], tl.float32)
        b_dq = tl.zeros([BT, BJ], tl.float32)
        b_x = tl.zeros([BT, BJ], tl.float32)
        for i_v in range((V + BV - 1) // BV):
            base_v, at_v, inside_v = tile(h, start, end, H, V, BT, BV, i_v)
            base_s, at_s, inside_s = state_tile(n * H + h, i_v, K, V, BJ, BV, j)
            b_state = tl.trans(load(p_states + base_s, at_s, inside_s))
            b_dq = product(load(p_do + base_v, at_v, inside_v), b_state, b_dq, PRECISION)
            b_x = product(load(p_r + base_v, at_v, inside_v), b_state, b_x, PRECISION)
        b_same = tl.load(p_parts + t)[:, None]
        b_dk = b_same * load(p_q + base_k, at_k, inside_k).to(tl.float32)
        b_of_q, b_of_k = b_dq * (inverse * STRONG_SMALL * scale), b_x * (inverse * -STRONG_SMALL)
        b_dq = b_same * load(p_k + base_k, at_k, inside_k).to(tl.float32)
        b_gates = b_zeros
        i, first, anchor = 0, 0, 0
        while (i < 32) & (first < BT):
            tl.debug_barrier()
            beyond = (packed >> i) & 255
            b_g = gates_at(p_g, h, start, end, j, H, K, BT, BJ)
            b_sums = anchored_sums(p_weights, anchor, b_g, BT, PRECISION)
            b_dq, b_dk, b_gates, b_dbeta = as_later(
                pairs_of(p_pairs, first, beyond, BT),
                (load(p_q + base_k, at_k, inside_k), load(p_k + base_k, at_k, inside_k), b_beta),
                after_anchor(b_sums),
                (b_of_q, b_of_k),
                (b_dq, b_dk, b_gates, b_dbeta),
                PRECISION,
            )
            tl.debug_barrier()
            b_dk, b_gates = as_earlier(
                pairs_of(p_pairs, first, beyond, BT),
                (load(p_q + base_k, at_k, inside_k), load(p_k + base_k, at_k, inside_k), b_beta),
                after_anchor(b_sums),
                (b_dk, b_gates),
                PRECISION,
            )
            b_of_q, b_of_k = b_zeros, b_zeros
            i, first, anchor = i + 8, beyond, beyond + 1
        for m in range(6 if REST else 0):
            tl.debug_barrier()
            b_g = gates_at(p_g, h, start, end, j, H, K, BT, BJ)
            b_factor = exp2(gate_sums(p_weights, SUMS + m, False, b_g, BT, PRECISION))
            b_pq, b_pk = pairs_of(p_pairs, packed >> 24, BT, BT)
            b_pairs = load_weights(p_weights, PAIRS + m, BT).to(p_pairs.dtype.element_ty)
            pairs = times(b_pq, b_pairs), times(b_pk, b_pairs)
            tokens = load(p_q + base_k, at_k, inside_k), load(p_k + base_k, at_k, inside_k), b_beta
            factors = b_factor, b_factor
            b_dq, b_dk, b_gates, b_dbeta = as_later(
                pairs, tokens, factors, (b_zeros, b_zeros), (b_dq, b_dk, b_gates, b_dbeta), PRECISION
            )
            b_dk, b_gates = as_earlier(pairs, tokens, factors, (b_dk, b_gates), PRECISION)
        tl.store(p_dq + base + at, cast(b_dq * size, p_dq.dtype.element_ty), mask=inside)
        b_by_state = tl.zeros([BT, BJ], tl.float32)
        b_last = tl.zeros([BJ], tl.float32)
        for i_v in range((V + BV - 1) // BV):
            base_v, at_v, inside_v = tile(h, start, end, H, V, BT, BV, i_v)
            base_s, at_s, inside_s = state_tile(n * H + h, i_v, K, V, BJ, BV, j)
            b_state, b_dstate = load(p_states + base_s, at_s, inside_s), load(p_dstates + base_s, at_s, inside_s)
            b_last += tl.sum(b_state.to(tl.float32) * b_dstate.to(tl.float32), 1)
            b_by_state = product(load(p_v_new + base_v, at_v, inside_v), tl.trans(b_dstate), b_by_state, PRECISION)
        b_g = gates_at(p_g, h, start, end, j, H, K, BT, BJ)
        b_by_state *= exp2(gate_sums(p_weights, BEFORE, True, b_g, BT, PRECISION))
        tl.store(p_dk + base + at, cast(b_dk * size + b_by_state, p_dk.dtype.element_ty), mask=inside)
        # not a difference of sums over all tokens and over later ones: it may be much smaller than both
        b_through = (b_last * exp2(tl.sum(b_g, 0)))[None, :] + b_zeros
        b_by_state *= load(p_k + base_k, at_k, inside_k).to(tl.float32)
        b_through = weighted(p_weights, BEFORE, False, b_by_state, b_through, BT, PRECISION)
        b_gates = weighted(p_weights, ONWARD, False, b_gates * size, b_through, BT, PRECISION)
        tl.store(p_dg + base + at, cast(b_gates, p_dg.dtype.element_ty), mask=inside)
    tl.store(p_dbeta + at_t, cast(b_dbeta * size, p_dbeta.dtype.element_ty), mask=inside_t)
