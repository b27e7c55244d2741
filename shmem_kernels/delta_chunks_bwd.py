"""Delta rules inside of a chunk, backward; see delta_chunks.py for what is what.

With dS' the gradient of the state that leaves the chunk and dv_new = Aqk^T do + kg dS', which adjoint_kernel (delta.py)
has made:

    dAqk = do v_new^T, s <= t         dw = -dv_new S^T
    dT = dw (beta k e^G)^T + dv_new (beta v)^T      dAkk = -T^T dT T^T, s < t
    dv = beta T^T dv_new
    dbeta = v . T^T dv_new + (k e^G) . T^T dw + k . X,      X_t = sum_s dAkk[t, s] k_s e^(G_t - G_s)
    dq   = scale e^G do S^T  +  scale sum_s dAqk[t, s] k_s e^(G_t - G_s)
    dk'  = beta (e^G T^T dw + X)                                                        as the later token
    dk'' = e^(G - G_t) v_new dS'^T + sum_t (scale dAqk[t, s] q_t + dAkk[t, s] beta_t k_t) e^(G_t - G_s)  as the earlier
    dk = dk' + dk''        dG_t = q . dq + k . dk' - k . dk'', both without s = t, which would only leave errors
    dG at the last token also + sum_t k_t . e^(G - G_t) v_new dS'^T + e^G <S, dS'>_row;  dg = the sum of dG from t on
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import BEFORE, ONWARD, cast, exp2, load, lower, product, sums_of, upper
from .delta_chunks import LIMIT, gates_at, halves, state_tile, tile, weighted, within


@triton.jit
def rounded(b_x, dtype: tl.constexpr):
    """As it is as an operand of a product."""
    return cast(b_x, dtype).to(tl.float32)


@triton.jit
def add_pair_gradients(
    b_dq,
    b_x,
    b_dk,
    b_gates,
    b_a,
    b_b,
    b_row,
    b_column,
    b_q,
    b_k,
    b_beta,
    BT: tl.constexpr,
    BJ: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq, X, dk'' and dG with what pairs a (of q and k) and b (of k and k) give, whose decays are row_t column_s. For
    dG the operands count as they are rounded: so what a pair gives to t and takes from s is the same."""
    DTYPE: tl.constexpr = tl.bfloat16 if PRECISION == "bf16" else tl.float32
    b_zeros = tl.zeros([BT, BJ], tl.float32)
    b_queries = rounded(b_q * b_row, DTYPE)
    b_keys = rounded(b_k * b_column, DTYPE)
    b_later = rounded(b_k * b_row * b_beta[:, None], DTYPE)
    b_sum = product(b_a, b_keys, b_zeros, PRECISION)
    b_dq += b_row * b_sum
    b_gates += b_queries * b_sum
    b_sum = product(b_b, b_keys, b_zeros, PRECISION)
    b_x += b_row * b_sum
    b_gates += b_later * b_sum
    b_sum = product(tl.trans(b_a), b_queries, b_zeros, PRECISION)
    b_sum = product(tl.trans(b_b), b_later, b_sum, PRECISION)
    return b_dq, b_x, b_dk + b_column * b_sum, b_gates - b_keys * b_sum


@triton.jit
def gradient_kernel(
    p_q,
    p_k,
    p_v,
    p_g,
    p_beta,
    p_chunks,
    p_strong,
    p_weights,
    p_pairs,
    p_solved,
    p_states,
    p_dstates,
    p_v_new,
    p_do,
    p_dv_new,
    p_dq,
    p_dk,
    p_dv,
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
    STRONG: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of one chunk and head dq, dk [tokens, H, K], dv, dg and dbeta. Without STRONG of those with entries of class 0
    alone, with it of the others."""
    n, h = tl.program_id(0), tl.program_id(1)
    if (tl.load(p_strong + n * H + h) != 0) != STRONG:
        return
    start, end = tl.load(p_chunks + 2 * n), tl.load(p_chunks + 2 * n + 1)
    t = start + tl.arange(0, BT)
    at_t = t.to(tl.int64) * H + h
    b_beta = tl.load(p_beta + at_t, mask=t < end, other=0.0).to(tl.float32)
    base_a, at_a, inside_a = tile(h, start, end, H, BT, BT, BT)
    b_solved = load(p_solved + base_a, at_a, inside_a)
    DTYPE: tl.constexpr = tl.bfloat16 if PRECISION == "bf16" else tl.float32
    b_dbeta = tl.zeros([BT], tl.float32)
    b_dg = tl.zeros([BT], tl.float32)  # SCALAR
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
        b_dw = tl.zeros([BT, BJ], tl.float32)
        for i_v in range((V + BV - 1) // BV):
            base_v, at_v, inside_v = tile(h, start, end, H, V, BT, BV, i_v)
            base_s, at_s, inside_s = state_tile(n * H + h, i_v, K, V, BJ, BV, j)
            b_dw = product(
                load(p_dv_new + base_v, at_v, inside_v),
                tl.trans(load(p_states + base_s, at_s, inside_s)),
                b_dw,
                PRECISION,
            )
        base, at, inside = tile(h // (H // HK), start, end, HK, K, BT, BJ, j)
        b_g = gates_at(p_g, h, start, end, j, H, K, BT, BJ, SCALAR)
        b_before = exp2(weighted(p_weights, ONWARD, True, b_g, tl.zeros([BT, BJ], tl.float32), BT, PRECISION))
        b_k = load(p_k + base, at, inside).to(tl.float32)
        b_b = product(-b_dw, tl.trans(b_k * b_before), b_b, PRECISION)
    b_b = tl.where(lower(BT, 1), b_b * b_beta[None, :], 0.0)
    b_b = product(tl.trans(b_solved), b_b, tl.zeros([BT, BT], tl.float32), PRECISION)
    b_b = product(-b_b, tl.trans(b_solved), tl.zeros([BT, BT], tl.float32), PRECISION)
    b_same = tl.sum(tl.where(lower(BT, 0) & upper(BT, 0), b_a, 0.0), 1) * scale
    # by way of memory, from where products take them into shared memory: here they would fill registers
    base_p = (n * H + h).to(tl.int64) * (2 * BT * BT)
    at_p = tl.arange(0, BT)[:, None] * BT + tl.arange(0, BT)[None, :]
    tl.store(p_pairs + base_p + at_p, cast(tl.where(lower(BT, 1), b_a * scale, 0.0), p_pairs.dtype.element_ty))
    tl.store(p_pairs + base_p + BT * BT + at_p, cast(tl.where(lower(BT, 1), b_b, 0.0), p_pairs.dtype.element_ty))
    tl.debug_barrier()
    if STRONG:
        for j in range((K + BJ - 1) // BJ):
            b_dq = tl.zeros([BT, BJ], tl.float32)
            b_dk = tl.zeros([BT, BJ], tl.float32)  # dk''
            b_dw = tl.zeros([BT, BJ], tl.float32)
            b_last = tl.zeros([BJ], tl.float32)
            for i_v in range((V + BV - 1) // BV):
                base_v, at_v, inside_v = tile(h, start, end, H, V, BT, BV, i_v)
                base_s, at_s, inside_s = state_tile(n * H + h, i_v, K, V, BJ, BV, j)
                b_state, b_dstate = load(p_states + base_s, at_s, inside_s), load(p_dstates + base_s, at_s, inside_s)
                b_last += tl.sum(b_state.to(tl.float32) * b_dstate.to(tl.float32), 1)
                b_dq = product(load(p_do + base_v, at_v, inside_v), tl.trans(b_state), b_dq, PRECISION)
                b_dw = product(load(p_dv_new + base_v, at_v, inside_v), tl.trans(b_state), b_dw, PRECISION)
                b_dk = product(load(p_v_new + base_v, at_v, inside_v), tl.trans(b_dstate), b_dk, PRECISION)
            b_g = gates_at(p_g, h, start, end, j, H, K, BT, BJ, SCALAR)
            base, at, inside = tile(h // (H // HK), start, end, HK, K, BT, BJ, j)
            b_q, b_k = load(p_q + base, at, inside).to(tl.float32), load(p_k + base, at, inside).to(tl.float32)
            b_sums = weighted(p_weights, ONWARD, True, b_g, tl.zeros([BT, BJ], tl.float32), BT, PRECISION)
            b_before = exp2(b_sums)
            b_x = product(tl.trans(b_solved), -b_dw, tl.zeros([BT, BJ], tl.float32), PRECISION) * b_before
            b_dq *= b_before * scale
            b_total = tl.sum(b_g, 0)
            b_after = tl.zeros([BT, BJ], tl.float32)
            b_dk *= exp2(weighted(p_weights, BEFORE, True, b_g, b_after, BT, PRECISION))
            b_through = (b_last * exp2(b_total))[None, :] + tl.zeros([BT, BJ], tl.float32)  # of dg
            b_gates = b_q * b_dq + b_k * b_beta[:, None] * b_x  # dG
            # not the difference of what all tokens give and later ones: it may be much less than these
            b_through = weighted(p_weights, BEFORE, False, b_k * b_dk, b_through, BT, PRECISION)
            b_pq, b_pk = tl.load(p_pairs + base_p + at_p), tl.load(p_pairs + base_p + BT * BT + at_p)
            b_row = tl.where(b_sums >= -LIMIT, b_before, 0.0)
            b_column = exp2(tl.minimum(-b_sums, LIMIT))
            b_dq, b_x, b_dk, b_gates = add_pair_gradients(
                b_dq, b_x, b_dk, b_gates, b_pq, b_pk, b_row, b_column, b_q, b_k, b_beta, BT, BJ, PRECISION
            )
            b_where, b_pairs = within(BT)
            b_sums_16 = sums_of(b_where, b_g, PRECISION)
            b_row = tl.where((b_sums_16 >= -LIMIT) & (b_sums < -LIMIT), exp2(b_sums_16), 0.0)
            b_column = exp2(tl.minimum(-b_sums_16, LIMIT))
            b_as, b_bs = tl.where(b_pairs, b_pq, 0.0), tl.where(b_pairs, b_pk, 0.0)
            b_dq, b_x, b_dk, b_gates = add_pair_gradients(
                b_dq, b_x, b_dk, b_gates, b_as, b_bs, b_row, b_column, b_q, b_k, b_beta, BT, BJ, PRECISION
            )
            b_strong = (b_sums_16 < -LIMIT) & (b_sums < -LIMIT)
            last = tl.where(tl.sum(b_strong.to(tl.int32)) != 0, 0, 4)
            m = 5
            while m >= last:
                b_where, b_pairs = halves(m, BT)
                b_column = exp2(sums_of(b_where, b_g, PRECISION))
                b_row = tl.where((b_sums < -LIMIT) & (b_strong | (m >= 4)), b_column, 0.0)
                b_as, b_bs = tl.where(b_pairs, b_pq, 0.0), tl.where(b_pairs, b_pk, 0.0)
                b_dq, b_x, b_dk, b_gates = add_pair_gradients(
                    b_dq, b_x, b_dk, b_gates, b_as, b_bs, b_row, b_column, b_q, b_k, b_beta, BT, BJ, PRECISION
                )
                m -= 1
            b_dbeta += tl.sum(b_k * b_x, 1)
            b_x *= b_beta[:, None]  # dk'
            b_gates = weighted(p_weights, ONWARD, False, b_gates, b_through, BT, PRECISION)
            base, at, inside = tile(h, start, end, H, K, BT, BJ, j)
            if SCALAR:
                b_dg += tl.sum(tl.where(inside, b_gates, 0.0), 1)
            else:
                tl.store(p_dg + base + at, cast(b_gates, p_dg.dtype.element_ty), mask=inside)
            tl.store(p_dq + base + at, cast(b_dq + b_same[:, None] * b_k, p_dq.dtype.element_ty), mask=inside)
            tl.store(p_dk + base + at, cast(b_x + b_dk + b_same[:, None] * b_q, p_dk.dtype.element_ty), mask=inside)
    else:
        for j in range((K + BJ - 1) // BJ):
            b_g = gates_at(p_g, h, start, end, j, H, K, BT, BJ, SCALAR)
            b_total = tl.sum(b_g, 0)
            base_k, at_k, inside_k = tile(h // (H // HK), start, end, HK, K, BT, BJ, j)
            base, at, inside = tile(h, start, end, H, K, BT, BJ, j)
            b_k = load(p_k + base_k, at_k, inside_k).to(tl.float32)
            b_sums = weighted(p_weights, ONWARD, True, b_g, tl.zeros([BT, BJ], tl.float32), BT, PRECISION)
            b_before = exp2(b_sums)
            b_keys = cast(b_k * exp2(-b_sums), DTYPE)
            b_sum = tl.zeros([BT, BJ], tl.float32)
            b_dw = tl.zeros([BT, BJ], tl.float32)
            for i_v in range((V + BV - 1) // BV):
                base_v, at_v, inside_v = tile(h, start, end, H, V, BT, BV, i_v)
                base_s, at_s, inside_s = state_tile(n * H + h, i_v, K, V, BJ, BV, j)
                b_state = load(p_states + base_s, at_s, inside_s)
                b_sum = product(load(p_do + base_v, at_v, inside_v), tl.trans(b_state), b_sum, PRECISION)
                b_dw = product(load(p_dv_new + base_v, at_v, inside_v), tl.trans(b_state), b_dw, PRECISION)
            b_sum = product(tl.load(p_pairs + base_p + at_p), b_keys, b_sum * scale, PRECISION)
            b_q = load(p_q + base_k, at_k, inside_k).to(tl.float32)
            b_queries = cast(b_q * b_before, DTYPE)
            b_gates = b_queries.to(tl.float32) * b_sum
            b_sum = b_before * b_sum + b_same[:, None] * b_k
            tl.store(p_dq + base + at, cast(b_sum, p_dq.dtype.element_ty), mask=inside)
            b_sum = product(tl.trans(b_solved), -b_dw, tl.zeros([BT, BJ], tl.float32), PRECISION)
            b_sum = product(tl.load(p_pairs + base_p + BT * BT + at_p), b_keys, b_sum, PRECISION)
            b_later = cast(b_k * b_before * b_beta[:, None], DTYPE)
            b_gates += b_later.to(tl.float32) * b_sum
            b_x = b_before * b_sum
            b_dbeta += tl.sum(b_k * b_x, 1)
            b_x = b_x * b_beta[:, None] + b_same[:, None] * b_q
            b_sum = tl.zeros([BT, BJ], tl.float32)
            b_last = tl.zeros([BJ], tl.float32)
            for i_v in range((V + BV - 1) // BV):
                base_v, at_v, inside_v = tile(h, start, end, H, V, BT, BV, i_v)
                base_s, at_s, inside_s = state_tile(n * H + h, i_v, K, V, BJ, BV, j)
                b_state, b_dstate = load(p_states + base_s, at_s, inside_s), load(p_dstates + base_s, at_s, inside_s)
                b_last += tl.sum(b_state.to(tl.float32) * b_dstate.to(tl.float32), 1)
                b_sum = product(load(p_v_new + base_v, at_v, inside_v), tl.trans(b_dstate), b_sum, PRECISION)
            b_decay = exp2(b_total)
            b_sum *= b_decay[None, :]
            b_last = b_last * b_decay + tl.sum(b_keys.to(tl.float32) * b_sum, 0)
            b_sum = product(tl.trans(tl.load(p_pairs + base_p + at_p)), b_queries, b_sum, PRECISION)
            b_sum = product(tl.trans(tl.load(p_pairs + base_p + BT * BT + at_p)), b_later, b_sum, PRECISION)
            b_gates -= b_keys.to(tl.float32) * b_sum
            tl.store(p_dk + base + at, cast(exp2(-b_sums) * b_sum + b_x, p_dk.dtype.element_ty), mask=inside)
            b_through = b_last[None, :] + tl.zeros([BT, BJ], tl.float32)
            b_gates = weighted(p_weights, ONWARD, False, b_gates, b_through, BT, PRECISION)
            if SCALAR:
                b_dg += tl.sum(tl.where(inside, b_gates, 0.0), 1)
            else:
                tl.store(p_dg + base + at, cast(b_gates, p_dg.dtype.element_ty), mask=inside)
    tl.store(p_dbeta + at_t, cast(b_dbeta, p_dbeta.dtype.element_ty), mask=t < end)
    if SCALAR:
        tl.store(p_dg + at_t, cast(b_dg, p_dg.dtype.element_ty), mask=t < end)
