"""Other forms of the chunk kernels of delta rules, which bench.chunks times beside shmem_kernels/delta_chunks.py.

operands_kernel           TF32: scores of products in TF32, since in bfloat16 their operands' rounding is most of o's
                          error (3.9e-3 for 4.4e-3, in float64 with each rounding by itself)
pairs_kernel              of a chunk's gradients dv and those of the scores and of T, which need no decays of pairs
gradient_kernel           all others where entries are of class 0 alone, and
strong_gradient_kernel    elsewhere: three kernels for one, fewer registers, but more bytes (3.7 for 2.5 GB at
                          16,384 x 32 x 128 x 128, bfloat16)

In the strong forms decays are looked up level by level: tables of weights and of pairs, no masks in registers, and what
a token gives as the earlier one of pairs and as the later one by themselves. In each channel the classes follow one
another: once a token is of class 2, all after it are, so that two numbers a channel say which class a token is of.
HEADS_FIRST: which axis of the grid comes first; tokens of all heads lie together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from allscan.shmem_kernels.blocks import (
    BEFORE,
    ONWARD,
    cast,
    exp2,
    load,
    lower,
    product,
    tf32_product,
    upper,
    weighted_by,
)
from allscan.shmem_kernels.delta_chunks import LIMIT, gates_at, inverse, state_tile, tile, weighted


@triton.jit
def place(HEADS_FIRST: tl.constexpr):
    """(chunk, head)."""
    if HEADS_FIRST:
        return tl.program_id(1), tl.program_id(0)
    else:
        return tl.program_id(0), tl.program_id(1)


@triton.jit
def scores_of(b_x, b_y, b_sum, PRECISION: tl.constexpr, TF32: tl.constexpr):
    """``product``, in bfloat16 with TF32 for it."""
    if TF32:
        return tf32_product(b_x, b_y, b_sum, PRECISION)
    else:
        return product(b_x, b_y, b_sum, PRECISION)


@triton.jit
def chunk_of(p_chunks, p_beta, n, h, H: tl.constexpr, BT: tl.constexpr):
    """(first token, end, where a number of each token lies, whether there is such a token, beta)."""
    start, end = tl.load(p_chunks + 2 * n), tl.load(p_chunks + 2 * n + 1)
    t = start + tl.arange(0, BT)
    at, inside = t.to(tl.int64) * H + h, t < end
    return start, end, at, inside, tl.load(p_beta + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def table(p_tables, i, BT: tl.constexpr):
    """One of many matrices [BT, BT]."""
    t = tl.arange(0, BT)
    return tl.load(p_tables + i * BT * BT + t[:, None] * BT + t[None, :])


@triton.jit
def summed(p_levels, m, b_g, BT: tl.constexpr, PRECISION: tl.constexpr):
    """The sums of gates of level m, see decay_factors."""
    return weighted_by(table(p_levels, m, BT), b_g, tl.zeros(b_g.shape, tl.float32), PRECISION)


@triton.jit
def first_of_class(p_levels, b_g, b_sums, BT: tl.constexpr, PRECISION: tl.constexpr):
    """In each channel the first token that is not of class 0, and the first one of class 2 [BJ]; BT for none. sums: of
    level 7."""
    t = tl.arange(0, BT)[:, None]
    b_first = tl.min(tl.where(b_sums < -LIMIT, t, BT), 0)
    b_strong = (summed(p_levels, 6, b_g, BT, PRECISION) < -LIMIT) & (t >= b_first[None, :])
    return b_first, tl.min(tl.where(b_strong, t, BT), 0)


@triton.jit
def decay_factors(p_levels, m, b_g, b_first, b_second, BT: tl.constexpr, PRECISION: tl.constexpr):
    """(factor of the later token of a pair, of the earlier one) of level m: 7 has class 0, 6 class 1 within sub-blocks
    of 16 tokens; 5 and 4, between halves of 64 and 32 tokens, have classes 1 and 2, and 3 to 0, of 16 to 2, class 2.
    p_levels [16, BT, BT]: of each level which tokens' gates a token sums up, then which pairs are of it."""
    b_sums = summed(p_levels, m, b_g, BT, PRECISION)
    t = tl.arange(0, BT)[:, None]
    b_begin = tl.where(m < 4, b_second, tl.where(m == 7, 0, b_first))
    b_end = tl.where(m == 7, b_first, tl.where(m == 6, b_second, BT))
    b_row = tl.where((t >= b_begin[None, :]) & (t < b_end[None, :]), exp2(b_sums), 0.0)
    return b_row, exp2(tl.minimum(tl.where(m >= 6, -b_sums, b_sums), LIMIT))


@triton.jit
def add_strong_pairs(
    b_aq, b_ak, b_q, b_k, b_g, b_sums, p_levels, BT: tl.constexpr, PRECISION: tl.constexpr, TF32: tl.constexpr
):
    """Aqk and Akk with what these channels give; where all is of class 0 with the same bits as without STRONG."""
    b_first, b_second = first_of_class(p_levels, b_g, b_sums, BT, PRECISION)
    t = tl.arange(0, BT)[:, None]
    b_row = tl.where(t < b_first[None, :], exp2(b_sums), 0.0)
    b_column = tl.trans(b_k * exp2(tl.minimum(-b_sums, LIMIT)))
    b_aq = scores_of(b_q * b_row, b_column, b_aq, PRECISION, TF32)
    b_ak = scores_of(b_k * b_row, b_column, b_ak, PRECISION, TF32)
    b_same = tl.sum(tl.where(t >= b_second[None, :], b_q * b_k, 0.0), 1)
    b_aq += tl.where(lower(BT, 0) & upper(BT, 0), b_same[:, None], 0.0)
    last = tl.where(tl.min(b_second) < BT, 0, 4)
    m = 6
    while m >= last:
        b_row, b_column = decay_factors(p_levels, m, b_g, b_first, b_second, BT, PRECISION)
        b_column = tl.trans(b_k * b_column)
        b_pairs = table(p_levels, 8 + m, BT).to(tl.float32)
        b_aq += scores_of(b_q * b_row, b_column, tl.zeros([BT, BT], tl.float32), PRECISION, TF32) * b_pairs
        b_ak += scores_of(b_k * b_row, b_column, tl.zeros([BT, BT], tl.float32), PRECISION, TF32) * b_pairs
        m -= 1
    return b_aq, b_ak


@triton.jit
def operands_kernel(
    p_q,
    p_k,
    p_v,
    p_g,
    p_beta,
    p_chunks,
    p_strong,
    p_weights,
    p_levels,
    p_scores,
    p_solved,
    p_w,
    p_u,
    p_kg,
    p_qg,
    p_sums,
    scale,
    H: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BJ: tl.constexpr,
    BV: tl.constexpr,
    SCALAR: tl.constexpr,
    SOLVED: tl.constexpr,
    STRONG: tl.constexpr,
    PRECISION: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    TF32: tl.constexpr,
):
    """Of one chunk and head Aqk, T, w, u, kg, qg and the sum of the gates. SOLVED: Aqk and T are there. Otherwise
    without STRONG of those whose entries are all of class 0, with STRONG then of the others, by p_strong [NC, H], which
    it writes, but with STRONG."""
    n, h = place(HEADS_FIRST)
    start, end, at_t, inside_t, b_beta = chunk_of(p_chunks, p_beta, n, h, H, BT)
    c = tl.arange(0, BJ)
    if not SOLVED:
        if STRONG:
            if tl.load(p_strong + n * H + h) == 0:
                return
        else:
            b_least = tl.zeros([BJ], tl.float32)
            for j in range((K + BJ - 1) // BJ):
                b_sum = tl.sum(gates_at(p_g, h, start, end, j, H, K, BT, BJ, SCALAR), 0)
                tl.store(p_sums + (n * H + h).to(tl.int64) * K + j * BJ + c, b_sum, mask=j * BJ + c < K)
                b_least = tl.minimum(b_least, b_sum)
            strong = tl.min(b_least) < -LIMIT
            tl.store(p_strong + n * H + h, strong.to(tl.int32))
            if strong:
                return
    base_a, at_a, inside_a = tile(h, start, end, H, BT, BT, BT)
    b_aq = tl.zeros([BT, BT], tl.float32)
    b_ak = tl.zeros([BT, BT], tl.float32)
    b_least = tl.zeros([BJ], tl.float32)
    if SOLVED:
        b_solved = load(p_solved + base_a, at_a, inside_a)
    for j in range((K + BJ - 1) // BJ):
        b_g = gates_at(p_g, h, start, end, j, H, K, BT, BJ, SCALAR)
        base, at, inside = tile(h // (H // HK), start, end, HK, K, BT, BJ, j)
        b_q, b_k = load(p_q + base, at, inside).to(tl.float32), load(p_k + base, at, inside).to(tl.float32)
        base, at, inside = tile(h, start, end, H, K, BT, BJ, j)
        b_sums = weighted(p_weights, ONWARD, True, b_g, tl.zeros([BT, BJ], tl.float32), BT, PRECISION)
        b_before = exp2(b_sums)
        tl.store(p_qg + base + at, cast(b_q * b_before, p_qg.dtype.element_ty), mask=inside)
        b_kb = b_k * b_before * b_beta[:, None]
        b_total = tl.sum(b_g, 0)
        if SOLVED:
            b_w = product(b_solved, b_kb, tl.zeros([BT, BJ], tl.float32), PRECISION)
            tl.store(p_w + base + at, cast(b_w, p_w.dtype.element_ty), mask=inside)
            tl.store(p_sums + (n * H + h).to(tl.int64) * K + j * BJ + c, b_total, mask=j * BJ + c < K)
            b_least = tl.minimum(b_least, b_total)
        else:
            tl.store(p_w + base + at, cast(b_kb, p_w.dtype.element_ty), mask=inside)  # until T is there
            if STRONG:
                b_aq, b_ak = add_strong_pairs(b_aq, b_ak, b_q, b_k, b_g, b_sums, p_levels, BT, PRECISION, TF32)
            else:
                b_column = tl.trans(b_k * exp2(-b_sums))
                b_aq = scores_of(b_q * b_before, b_column, b_aq, PRECISION, TF32)
                b_ak = scores_of(b_k * b_before, b_column, b_ak, PRECISION, TF32)
        if SOLVED or STRONG or PRECISION != "bf16":
            b_after = tl.zeros([BT, BJ], tl.float32)
            b_after = exp2(weighted(p_weights, BEFORE, True, b_g, b_after, BT, PRECISION))
        else:
            b_after = exp2(b_total[None, :] - b_sums)
        tl.store(p_kg + base + at, cast(b_k * b_after, p_kg.dtype.element_ty), mask=inside)
    if SOLVED:
        tl.store(p_strong + n * H + h, (tl.min(b_least) < -LIMIT).to(tl.int32))
    else:
        b_aq = tl.where(lower(BT, 0), b_aq * scale, 0.0)
        tl.store(p_scores + base_a + at_a, cast(b_aq, p_scores.dtype.element_ty), mask=inside_a)
        b_ak = tl.where(lower(BT, 1), b_ak * b_beta[:, None], 0.0)
        b_solved = cast(inverse(b_ak, BT, PRECISION), p_solved.dtype.element_ty)
        tl.store(p_solved + base_a + at_a, b_solved, mask=inside_a)
        tl.debug_barrier()  # other threads read what is in p_w
        for j in range((K + BJ - 1) // BJ):
            base, at, inside = tile(h, start, end, H, K, BT, BJ, j)
            b_w = product(b_solved, load(p_w + base, at, inside), tl.zeros([BT, BJ], tl.float32), PRECISION)
            tl.debug_barrier()
            tl.store(p_w + base + at, cast(b_w, p_w.dtype.element_ty), mask=inside)
    for i_v in range((V + BV - 1) // BV):
        base, at, inside = tile(h, start, end, H, V, BT, BV, i_v)
        b_v = load(p_v + base, at, inside).to(tl.float32) * b_beta[:, None]
        b_u = product(b_solved, b_v, tl.zeros([BT, BV], tl.float32), PRECISION)
        tl.store(p_u + base + at, cast(b_u, p_u.dtype.element_ty), mask=inside)


@triton.jit
def rounded(b_x, dtype: tl.constexpr):
    """As it is as an operand of a product."""
    return cast(b_x, dtype).to(tl.float32)


@triton.jit
def with_states(
    p_x,
    p_states,
    n,
    h,
    start,
    end,
    j,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BJ: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x S^T [BT, BJ], S of chunk n."""
    b_sum = tl.zeros([BT, BJ], tl.float32)
    for i_v in range((V + BV - 1) // BV):
        base_v, at_v, inside_v = tile(h, start, end, H, V, BT, BV, i_v)
        base_s, at_s, inside_s = state_tile(n * H + h, i_v, K, V, BJ, BV, j)
        b_state = tl.trans(load(p_states + base_s, at_s, inside_s))
        b_sum = product(load(p_x + base_v, at_v, inside_v), b_state, b_sum, PRECISION)
    return b_sum


@triton.jit
def sums_at(n, h, H: tl.constexpr, BT: tl.constexpr):
    """Where sums of pairs_kernel lie: dAqk[t, t], and BT numbers on what dbeta has by then."""
    return (n * H + h).to(tl.int64) * (2 * BT) + tl.arange(0, BT)


@triton.jit
def pairs_kernel(
    p_k,
    p_v,
    p_g,
    p_beta,
    p_chunks,
    p_weights,
    p_solved,
    p_states,
    p_v_new,
    p_do,
    p_dv_new,
    p_dv,
    p_pairs,
    p_dkeys,
    p_parts,
    scale,
    H: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BJ: tl.constexpr,
    BV: tl.constexpr,
    SCALAR: tl.constexpr,
    PRECISION: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
):
    """Of one chunk and head dv; scale dAqk and dAkk, s < t, for the kernels below (pairs [NC, H, 2, BT, BT]), and
    T^T dw (dkeys, like w), and sums (parts [NC, H, 2, BT])."""
    n, h = place(HEADS_FIRST)
    start, end, at_t, inside_t, b_beta = chunk_of(p_chunks, p_beta, n, h, H, BT)
    base_a, at_a, inside_a = tile(h, start, end, H, BT, BT, BT)
    b_solved = load(p_solved + base_a, at_a, inside_a)
    b_dbeta = tl.zeros([BT], tl.float32)
    b_a = tl.zeros([BT, BT], tl.float32)  # dAqk
    b_b = tl.zeros([BT, BT], tl.float32)  # dT, later dAkk
    for i_v in range((V + BV - 1) // BV):
        base_v, at_v, inside_v = tile(h, start, end, H, V, BT, BV, i_v)
        b_dv_new = load(p_dv_new + base_v, at_v, inside_v)
        b_a = product(
            load(p_do + base_v, at_v, inside_v), tl.trans(load(p_v_new + base_v, at_v, inside_v)), b_a, PRECISION
        )
        b_v = load(p_v + base_v, at_v, inside_v)
        b_b = product(b_dv_new, tl.trans(b_v), b_b, PRECISION)
        b_dv = product(tl.trans(b_solved), b_dv_new, tl.zeros([BT, BV], tl.float32), PRECISION)
        b_dbeta += tl.sum(b_dv * b_v.to(tl.float32), 1)
        tl.store(p_dv + base_v + at_v, cast(b_dv * b_beta[:, None], p_dv.dtype.element_ty), mask=inside_v)
    for j in range((K + BJ - 1) // BJ):
        b_dw = with_states(p_dv_new, p_states, n, h, start, end, j, H, K, V, BT, BJ, BV, PRECISION)
        b_g = gates_at(p_g, h, start, end, j, H, K, BT, BJ, SCALAR)
        b_before = exp2(weighted(p_weights, ONWARD, True, b_g, tl.zeros([BT, BJ], tl.float32), BT, PRECISION))
        base, at, inside = tile(h // (H // HK), start, end, HK, K, BT, BJ, j)
        b_k = load(p_k + base, at, inside).to(tl.float32)
        b_b = product(-b_dw, tl.trans(b_k * b_before), b_b, PRECISION)
        b_dkeys = product(tl.trans(b_solved), -b_dw, tl.zeros([BT, BJ], tl.float32), PRECISION)
        base, at, inside = tile(h, start, end, H, K, BT, BJ, j)
        tl.store(p_dkeys + base + at, cast(b_dkeys, p_dkeys.dtype.element_ty), mask=inside)
    b_b = tl.where(lower(BT, 1), b_b * b_beta[None, :], 0.0)
    b_b = product(tl.trans(b_solved), b_b, tl.zeros([BT, BT], tl.float32), PRECISION)
    b_b = product(-b_b, tl.trans(b_solved), tl.zeros([BT, BT], tl.float32), PRECISION)
    b_same = tl.sum(tl.where(lower(BT, 0) & upper(BT, 0), b_a, 0.0), 1) * scale
    p_pairs += (n * H + h).to(tl.int64) * (2 * BT * BT)
    at_p = tl.arange(0, BT)[:, None] * BT + tl.arange(0, BT)[None, :]
    tl.store(p_pairs + at_p, cast(tl.where(lower(BT, 1), b_a * scale, 0.0), p_pairs.dtype.element_ty))
    tl.store(p_pairs + BT * BT + at_p, cast(tl.where(lower(BT, 1), b_b, 0.0), p_pairs.dtype.element_ty))
    p_parts += sums_at(n, h, H, BT)
    tl.store(p_parts, b_same)
    tl.store(p_parts + BT, b_dbeta)


@triton.jit
def gradient_kernel(
    p_q,
    p_k,
    p_g,
    p_beta,
    p_chunks,
    p_strong,
    p_weights,
    p_levels,
    p_states,
    p_dstates,
    p_v_new,
    p_do,
    p_pairs,
    p_dkeys,
    p_parts,
    p_dq,
    p_dk,
    p_dg,
    p_dbeta,
    scale,
    H: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BJ: tl.constexpr,
    BV: tl.constexpr,
    SCALAR: tl.constexpr,
    PRECISION: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
):
    """Of one chunk and head, whose entries are all of class 0, dq, dk [tokens, H, K], dg and dbeta."""
    n, h = place(HEADS_FIRST)
    if tl.load(p_strong + n * H + h) != 0:
        return
    DTYPE: tl.constexpr = tl.bfloat16 if PRECISION == "bf16" else tl.float32
    start, end, at_t, inside_t, b_beta = chunk_of(p_chunks, p_beta, n, h, H, BT)
    p_parts += sums_at(n, h, H, BT)
    b_same, b_dbeta = tl.load(p_parts), tl.load(p_parts + BT)
    b_dg = tl.zeros([BT], tl.float32)  # SCALAR
    p_pairs += (n * H + h).to(tl.int64) * (2 * BT * BT)
    for j in range((K + BJ - 1) // BJ):
        b_g = gates_at(p_g, h, start, end, j, H, K, BT, BJ, SCALAR)
        base_k, at_k, inside_k = tile(h // (H // HK), start, end, HK, K, BT, BJ, j)
        base, at, inside = tile(h, start, end, H, K, BT, BJ, j)
        b_sums = weighted(p_weights, ONWARD, True, b_g, tl.zeros([BT, BJ], tl.float32), BT, PRECISION)
        b_decay = exp2(tl.sum(b_g, 0))
        b_sum = tl.zeros([BT, BJ], tl.float32)
        b_dk = tl.zeros([BT, BJ], tl.float32)
        b_last = tl.zeros([BJ], tl.float32)
        for i_v in range((V + BV - 1) // BV):
            base_v, at_v, inside_v = tile(h, start, end, H, V, BT, BV, i_v)
            base_s, at_s, inside_s = state_tile(n * H + h, i_v, K, V, BJ, BV, j)
            b_state, b_dstate = load(p_states + base_s, at_s, inside_s), load(p_dstates + base_s, at_s, inside_s)
            b_last += tl.sum(b_state.to(tl.float32) * b_dstate.to(tl.float32), 1)
            b_sum = product(load(p_do + base_v, at_v, inside_v), tl.trans(b_state), b_sum, PRECISION)
            b_dk = product(load(p_v_new + base_v, at_v, inside_v), tl.trans(b_dstate), b_dk, PRECISION)
        b_k = load(p_k + base_k, at_k, inside_k).to(tl.float32)
        b_before = exp2(b_sums)
        b_keys = cast(b_k * exp2(-b_sums), DTYPE)
        b_sum = product(table(p_pairs, 0, BT), b_keys, b_sum * scale, PRECISION)
        b_q = load(p_q + base_k, at_k, inside_k).to(tl.float32)
        b_queries = cast(b_q * b_before, DTYPE)
        b_gates = b_queries.to(tl.float32) * b_sum  # dG
        b_sum = b_before * b_sum + b_same[:, None] * b_k
        tl.store(p_dq + base + at, cast(b_sum, p_dq.dtype.element_ty), mask=inside)
        b_sum = load(p_dkeys + base, at, inside).to(tl.float32)
        b_sum = product(table(p_pairs, 1, BT), b_keys, b_sum, PRECISION)
        b_later = cast(b_k * b_before * b_beta[:, None], DTYPE)
        b_gates += b_later.to(tl.float32) * b_sum
        b_x = b_before * b_sum
        b_dbeta += tl.sum(b_k * b_x, 1)
        b_x = b_x * b_beta[:, None] + b_same[:, None] * b_q
        b_sum = b_dk * b_decay[None, :]
        b_last = b_last * b_decay + tl.sum(b_keys.to(tl.float32) * b_sum, 0)
        b_sum = product(tl.trans(table(p_pairs, 0, BT)), b_queries, b_sum, PRECISION)
        b_sum = product(tl.trans(table(p_pairs, 1, BT)), b_later, b_sum, PRECISION)
        b_gates -= b_keys.to(tl.float32) * b_sum
        tl.store(p_dk + base + at, cast(exp2(-b_sums) * b_sum + b_x, p_dk.dtype.element_ty), mask=inside)
        b_through = b_last[None, :] + tl.zeros([BT, BJ], tl.float32)
        b_gates = weighted(p_weights, ONWARD, False, b_gates, b_through, BT, PRECISION)
        if SCALAR:
            b_dg += tl.sum(tl.where(inside, b_gates, 0.0), 1)
        else:
            tl.store(p_dg + base + at, cast(b_gates, p_dg.dtype.element_ty), mask=inside)
    tl.store(p_dbeta + at_t, cast(b_dbeta, p_dbeta.dtype.element_ty), mask=inside_t)
    if SCALAR:
        tl.store(p_dg + at_t, cast(b_dg, p_dg.dtype.element_ty), mask=inside_t)


@triton.jit
def strong_gradient_kernel(
    p_q,
    p_k,
    p_g,
    p_beta,
    p_chunks,
    p_strong,
    p_weights,
    p_levels,
    p_states,
    p_dstates,
    p_v_new,
    p_do,
    p_pairs,
    p_dkeys,
    p_parts,
    p_dq,
    p_dk,
    p_dg,
    p_dbeta,
    scale,
    H: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BJ: tl.constexpr,
    BV: tl.constexpr,
    SCALAR: tl.constexpr,
    PRECISION: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
):
    """The same where there are entries of other classes: what a token has as the earlier one of pairs, then as the
    later one, each from level to level, see decay_factors."""
    n, h = place(HEADS_FIRST)
    if tl.load(p_strong + n * H + h) == 0:
        return
    DTYPE: tl.constexpr = tl.bfloat16 if PRECISION == "bf16" else tl.float32
    p_parts += sums_at(n, h, H, BT)
    b_same, b_dbeta = tl.load(p_parts), tl.load(p_parts + BT)
    start, end, at_t, inside_t, b_beta = chunk_of(p_chunks, p_beta, n, h, H, BT)
    p_pairs += (n * H + h).to(tl.int64) * (2 * BT * BT)
    b_dg = tl.zeros([BT], tl.float32)  # SCALAR
    b_zeros = tl.zeros([BT, BJ], tl.float32)
    for j in range((K + BJ - 1) // BJ):
        b_g = gates_at(p_g, h, start, end, j, H, K, BT, BJ, SCALAR)
        base, at, inside = tile(h // (H // HK), start, end, HK, K, BT, BJ, j)
        b_q, b_k = load(p_q + base, at, inside), load(p_k + base, at, inside)
        base, at, inside = tile(h, start, end, H, K, BT, BJ, j)
        b_last = tl.zeros([BJ], tl.float32)
        b_dk = b_zeros  # dk''
        for i_v in range((V + BV - 1) // BV):
            base_v, at_v, inside_v = tile(h, start, end, H, V, BT, BV, i_v)
            base_s, at_s, inside_s = state_tile(n * H + h, i_v, K, V, BJ, BV, j)
            b_state, b_dstate = load(p_states + base_s, at_s, inside_s), load(p_dstates + base_s, at_s, inside_s)
            b_last += tl.sum(b_state.to(tl.float32) * b_dstate.to(tl.float32), 1)
            b_dk = product(load(p_v_new + base_v, at_v, inside_v), tl.trans(b_dstate), b_dk, PRECISION)
        b_dk *= exp2(weighted(p_weights, BEFORE, True, b_g, b_zeros, BT, PRECISION))
        b_through = (b_last * exp2(tl.sum(b_g, 0)))[None, :] + b_zeros  # of dg
        # not the difference of what all tokens give and later ones: it may be much less than these
        b_through = weighted(p_weights, BEFORE, False, b_k.to(tl.float32) * b_dk, b_through, BT, PRECISION)
        b_sums = weighted(p_weights, ONWARD, True, b_g, b_zeros, BT, PRECISION)
        b_first, b_second = first_of_class(p_levels, b_g, b_sums, BT, PRECISION)
        last = tl.where(tl.min(b_second) < BT, 0, 4)
        b_gates = b_zeros  # dG
        m = 7
        while m >= last:
            b_row, b_column = decay_factors(p_levels, m, b_g, b_first, b_second, BT, PRECISION)
            b_pairs = table(p_levels, 8 + m, BT).to(tl.float32) > 0.0
            b_a, b_b = tl.where(b_pairs, table(p_pairs, 0, BT), 0.0), tl.where(b_pairs, table(p_pairs, 1, BT), 0.0)
            b_sum = product(tl.trans(b_a), cast(b_q.to(tl.float32) * b_row, DTYPE), b_zeros, PRECISION)
            b_later = cast(b_k.to(tl.float32) * b_row * b_beta[:, None], DTYPE)
            b_sum = product(tl.trans(b_b), b_later, b_sum, PRECISION)
            b_dk += b_column * b_sum
            b_gates -= rounded(b_k.to(tl.float32) * b_column, DTYPE) * b_sum
            m -= 1
        b_dq = with_states(p_do, p_states, n, h, start, end, j, H, K, V, BT, BJ, BV, PRECISION)
        b_row = exp2(weighted(p_weights, ONWARD, True, b_g, b_zeros, BT, PRECISION))
        b_dq *= b_row * scale
        b_x = load(p_dkeys + base, at, inside).to(tl.float32) * b_row
        b_gates += b_q.to(tl.float32) * b_dq + b_k.to(tl.float32) * b_beta[:, None] * b_x
        m = 7
        while m >= last:
            b_row, b_column = decay_factors(p_levels, m, b_g, b_first, b_second, BT, PRECISION)
            b_pairs = table(p_levels, 8 + m, BT).to(tl.float32) > 0.0
            b_keys = cast(b_k.to(tl.float32) * b_column, DTYPE)
            b_sum = product(tl.where(b_pairs, table(p_pairs, 0, BT), 0.0), b_keys, b_zeros, PRECISION)
            b_dq += b_row * b_sum
            b_gates += rounded(b_q.to(tl.float32) * b_row, DTYPE) * b_sum
            b_sum = product(tl.where(b_pairs, table(p_pairs, 1, BT), 0.0), b_keys, b_zeros, PRECISION)
            b_x += b_row * b_sum
            b_gates += rounded(b_k.to(tl.float32) * b_row * b_beta[:, None], DTYPE) * b_sum
            m -= 1
        b_k, b_q = b_k.to(tl.float32), b_q.to(tl.float32)
        b_dbeta += tl.sum(b_k * b_x, 1)
        b_gates = weighted(p_weights, ONWARD, False, b_gates, b_through, BT, PRECISION)
        if SCALAR:
            b_dg += tl.sum(tl.where(inside, b_gates, 0.0), 1)
        else:
            tl.store(p_dg + base + at, cast(b_gates, p_dg.dtype.element_ty), mask=inside)
        tl.store(p_dq + base + at, cast(b_dq + b_same[:, None] * b_k, p_dq.dtype.element_ty), mask=inside)
        b_dk += b_x * b_beta[:, None] + b_same[:, None] * b_q
        tl.store(p_dk + base + at, cast(b_dk, p_dk.dtype.element_ty), mask=inside)
    tl.store(p_dbeta + at_t, cast(b_dbeta, p_dbeta.dtype.element_ty), mask=inside_t)
    if SCALAR:
        tl.store(p_dg + at_t, cast(b_dg, p_dg.dtype.element_ty), mask=inside_t)
