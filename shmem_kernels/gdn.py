"""Gated DeltaNet inside of a chunk and from chunk to chunk: one gate per head. kda_fwd.py defines the symbols.

Only Aqk, T - 1 and three factors of each token are stored, not w, u, kg and qg. With before = e^G_t and
behind = e^(G - G_t), factors of a token's row, and D = e^G:

    v_new = T beta (v - before k S)      o = scale before q S + Aqk v_new      S' = D S + (behind k)^T v_new
    r = T^T dv_new,  dv_new = Aqk^T do + behind k dS'      dS = D dS' + (scale before q)^T do - (before beta k)^T r

scalar_operands_kernel    Aqk, T - 1 and the factors of each chunk alone
scalar_summary_kernel     as summary_kernel of delta_state.py
scalar_states_kernel      from chunk to chunk: o; or, for backward, the states and v_new; or both
scalar_adjoint_kernel     from the last chunk to the first: the gradients of the states and r
scalar_gradients_kernel   all gradients of each chunk alone, see kda_bwd.py

Factors are [NC, H, 3, BT] float32: beta, before and behind; 0, e^G and 1 for tokens beyond the end. Loops over chunks
are pipelined (num_stages): they load nothing that they store. With 3 stages a chunk is copied while another is
computed; with 2 the copies are issued behind the products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import (
    cast,
    exp2,
    load,
    load_gates,
    loop_bound,
    lower,
    product,
    rows,
    state_at,
    upper,
    zeros,
)
from .delta_state import (
    gradient_behind,
    load_incoming,
    store_before,
    store_final,
    store_gradients,
    store_summary,
    times_keys,
)
from .kda_bwd import of_values, same_of, times_values
from .kda_fwd import chunk_of, inverse, state_tile, tile
from .segment_table import ENTERED, FIRST, FLAGS, LAST, UNUSED, segment


@triton.jit
def gate_sums_of(p_g, at_t, inside_t):
    """(G_t, gates) of a chunk's tokens, to base 2, [BT] float64."""
    b_g = load_gates(p_g, at_t, inside_t).to(tl.float64)
    return tl.cumsum(b_g, 0), b_g


@triton.jit
def decays_of(b_sums, BT: tl.constexpr):
    """e^(G_t - G_s), s <= t [BT, BT]. The difference of two sums from the chunk's beginning on is one of integers and
    one of fractions, which loses nothing to gates outside."""
    b_whole = b_sums.to(tl.int32)
    b_part = (b_sums - b_whole.to(tl.float64)).to(tl.float32)
    b_whole = b_whole.to(tl.float32)
    b_between = (b_whole[:, None] - b_whole[None, :]) + (b_part[:, None] - b_part[None, :])
    return exp2(tl.where(lower(BT, 0), b_between, 0.0))


@triton.jit
def pairs_of(p_x, p_k, b_sums, b_factor, place, d: tl.constexpr, PRECISION: tl.constexpr, EARLIER: tl.constexpr):
    """x_t k_s e^(G_t - G_s) b_factor of tokens s <= t, EARLIER: s < t; else 0 [BT, BT]. place: h, first and last
    token."""
    h, start, end = place
    b_a = zeros(d.BT, d.BT)
    for j in tl.static_range((d.K + d.BJ - 1) // d.BJ):
        base, at, inside = tile(h // (d.H // d.HK), start, end, d.HK, d.K, d.BT, d.BJ, j)
        b_a = product(load(p_x + base, at, inside), tl.trans(load(p_k + base, at, inside)), b_a, PRECISION)
    return tl.where(lower(d.BT, EARLIER), b_a * decays_of(b_sums, d.BT) * b_factor, 0.0)


@triton.jit
def scalar_operands_kernel(
    p_q,  # [tokens, HK, K]
    p_k,  # [tokens, HK, K]
    p_g,  # [tokens, H], natural logarithms
    p_beta,  # [tokens, H]
    p_chunks,  # int32 [NC, 2]
    p_scores,  # Aqk [tokens, H, BT]; out
    p_solved,  # T - 1 [tokens, H, BT]; out
    p_factors,  # float32 [NC, H, 3, BT]; out
    scale,  # float
    d: tl.constexpr,  # H HK K BT BJ
    PRECISION: tl.constexpr,
):
    """Aqk, T - 1 and the factors of one chunk and head: even programs compute T - 1 and the factors, odd ones Aqk."""
    i = tl.program_id(0)
    n, h = i // (2 * d.H), i // 2 % d.H  # heads of a token are adjacent in memory
    start, end, at_t, inside_t, b_beta = chunk_of(p_chunks, p_beta, n, h, d)
    if start == end:  # unused
        return
    b_sums, b_g = gate_sums_of(p_g, at_t, inside_t)
    place = h, start, end
    if i % 2 == 0:
        p_chunk = p_factors + (n * d.H + h).to(tl.int64) * (3 * d.BT) + tl.arange(0, d.BT)
        tl.store(p_chunk, b_beta)
        tl.store(p_chunk + d.BT, exp2(b_sums.to(tl.float32)))
        tl.store(p_chunk + 2 * d.BT, exp2((tl.sum(b_g, 0) - b_sums).to(tl.float32)))
        b_a = pairs_of(p_k, p_k, b_sums, b_beta[:, None], place, d, PRECISION, 1)
        b_a = inverse(b_a, d.BT, PRECISION)
        base, at, inside = tile(h, start, end, d.H, d.BT, d.BT, d.BT)
        tl.store(p_solved + base + at, cast(b_a, p_solved.dtype.element_ty), mask=inside)
    else:
        b_a = pairs_of(p_q, p_k, b_sums, scale, place, d, PRECISION, 0)
        base, at, inside = tile(h, start, end, d.H, d.BT, d.BT, d.BT)
        tl.store(p_scores + base + at, cast(b_a, p_scores.dtype.element_ty), mask=inside)


@triton.jit
def factors_of(p_factors, n, h, d: tl.constexpr):
    """(beta, before, behind [BT], D) of chunk n."""
    t = tl.arange(0, d.BT)
    p_factors += (n * d.H + h).to(tl.int64) * (3 * d.BT)
    b_beta, b_before, b_behind = (
        tl.load(p_factors + t),
        tl.load(p_factors + d.BT + t),
        tl.load(p_factors + 2 * d.BT + t),
    )
    return b_beta, b_before, b_behind, tl.load(p_factors + 2 * d.BT - 1)


@triton.jit
def places(h, first, end, i_v, d: tl.constexpr):
    """blocks.rows of a chunk's keys, values and rows of T."""
    at_k, inside_k = rows(h // (d.H // d.HK), first, end, d.HK, d.K, d.BT, d.BK)
    at_v, inside_v = rows(h, first, end, d.H, d.V, d.BT, d.BV, i_v)
    at_a, inside_a = rows(h, first, end, d.H, d.BT, d.BT, d.BT)
    return at_k, inside_k, at_v, inside_v, at_a, inside_a


@triton.jit
def scalar_summary_kernel(
    p_k,  # [tokens, HK, K]
    p_v,  # [tokens, H, V]
    p_factors,  # float32 [NC, H, 3, BT]
    p_solved,  # T - 1 [tokens, H, BT]
    p_segments,  # int32 [NS, SEGMENT_WORDS]
    p_transition,  # float32 [NS, H, K, K]; out
    p_local,  # float32 [NS, H, K, V]; out
    d: tl.constexpr,  # H HK K V BT BR BK BV
    PRECISION: tl.constexpr,
):
    """As summary_kernel of delta_state.py, of a chunk's Z:
    A = Z (behind k)^T T beta,  R = R + A v,  Z = Z D - A before k."""
    NR: tl.constexpr = (d.K + d.BR - 1) // d.BR
    i_r, i_v, s, h = tl.program_id(0) % NR, tl.program_id(0) // NR, tl.program_id(1), tl.program_id(2)
    p_segment, start, end, chunk, num_chunks = segment(p_segments, s, d.BT)
    if (tl.load(p_segment + FLAGS) & LAST) != 0:
        return
    r, k = i_r * d.BR + tl.arange(0, d.BR), tl.arange(0, d.BK)
    diagonal = r[:, None] == k[None, :]
    b_z, b_local = tl.where(diagonal, 1.0, 0.0), zeros(d.BR, d.BV)
    for i in range(loop_bound(num_chunks)):
        n = num_chunks - 1 - i
        first = start + n * d.BT
        b_beta, b_before, b_behind, decay = factors_of(p_factors, chunk + n, h, d)
        at_k, inside_k, at_v, inside_v, at_a, inside_a = places(h, first, end, i_v, d)
        b_k = load(p_k, at_k, inside_k)
        b_a = times_keys(b_z, b_k, p_k, diagonal, h, first, end, i_r, d, PRECISION)
        b_a *= b_behind[None, :]
        b_a = product(b_a, load(p_solved, at_a, inside_a), b_a, PRECISION)
        b_a *= b_beta[None, :]
        b_local = product(b_a, load(p_v, at_v, inside_v), b_local, PRECISION)
        b_z = product(b_a * -b_before[None, :], b_k, b_z * decay, PRECISION)
    store_summary(p_transition, p_local, b_z, b_local, s, h, i_r, i_v, d)


@triton.jit
def scalar_states_kernel(
    p_q,  # [tokens, HK, K]; None without p_o
    p_k,  # [tokens, HK, K]
    p_v,  # [tokens, H, V]
    p_factors,  # float32 [NC, H, 3, BT]
    p_scores,  # Aqk [tokens, H, BT]; None without p_o
    p_solved,  # T - 1 [tokens, H, BT]
    p_segments,  # int32 [NS, SEGMENT_WORDS]
    p_incoming,  # float32 [NS, H, K, V]
    p_through,  # float32 [NS, H, K, K]; None: nothing enters this rank
    p_prev,  # float32 [B, H, K, V]; None without p_through
    p_o,  # [tokens, H, V]; out; or None
    p_states,  # [NC, H, K, V], each chunk's incoming state; out; or None
    p_v_new,  # [tokens, H, V]; out; None without p_states
    p_final,  # float32 [N, H, K, V]; out; or None
    scale,  # float
    d: tl.constexpr,  # H HK K V BT BK BV BJ
    PRECISION: tl.constexpr,
):
    """Through the chunks of one segment, from its incoming state: o, or what backward takes, or both. The state is held
    as by delta_states_kernel of delta_state.py."""
    i_v, s, h = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    p_segment, start, end, chunk, num_chunks = segment(p_segments, s, d.BT)
    if (tl.load(p_segment + FLAGS) & UNUSED) != 0:
        return
    b_state = load_incoming(p_incoming, p_through, p_prev, p_segment, s, h, i_v, d, ENTERED)
    for n in range(loop_bound(num_chunks)):
        first = start + n * d.BT
        b_beta, b_before, b_behind, decay = factors_of(p_factors, chunk + n, h, d)
        at_k, inside_k, at_v, inside_v, at_a, inside_a = places(h, first, end, i_v, d)
        b_k = load(p_k, at_k, inside_k)
        b_p = product(b_state, tl.trans(b_k), zeros(d.BV, d.BT), PRECISION)
        b_v = tl.trans(load(p_v, at_v, inside_v)).to(tl.float32)
        b_v = (b_v - b_p * b_before[None, :]) * b_beta[None, :]
        b_solved = tl.trans(load(p_solved, at_a, inside_a))
        b_v = product(b_v, b_solved, b_v, PRECISION)
        if p_o is not None:
            b_o = product(b_state, tl.trans(load(p_q, at_k, inside_k)), zeros(d.BV, d.BT), PRECISION)
            b_o *= (b_before * scale)[None, :]
            b_o = product(b_v, tl.trans(load(p_scores, at_a, inside_a)), b_o, PRECISION)
            tl.store(p_o + at_v, tl.trans(cast(b_o, p_o.dtype.element_ty)), mask=inside_v)
        if p_states is not None:
            at_s, inside_s = state_at((chunk + n) * d.H + h, i_v, d.K, d.V, d.BK, d.BV)
            tl.store(p_states + at_s, tl.trans(cast(b_state, p_states.dtype.element_ty)), mask=inside_s)
            tl.store(p_v_new + at_v, tl.trans(cast(b_v, p_v_new.dtype.element_ty)), mask=inside_v)
        b_state = product(b_v * b_behind[None, :], b_k, b_state * decay, PRECISION)
    store_final(p_final, p_segment, b_state, h, i_v, d)


@triton.jit
def scalar_adjoint_kernel(
    p_q,  # [tokens, HK, K]
    p_k,  # [tokens, HK, K]
    p_factors,  # float32 [NC, H, 3, BT]
    p_do,  # [tokens, H, V]
    p_scores,  # Aqk [tokens, H, BT]
    p_solved,  # T - 1 [tokens, H, BT]
    p_segments,  # int32 [NS, SEGMENT_WORDS]
    p_incoming,  # float32 [NS, H, K, V]; in and out, see load_incoming; this and what follows up to p_dinitial: or None
    p_through,  # float32 [NS, H, K, K]; None: nothing enters this rank
    p_prev,  # float32 [B, H, K, V]; None without p_through
    p_dstates,  # [NC, H, K, V]; out, the gradient of each chunk's outgoing state
    p_r,  # T^T dv_new [tokens, H, V]; out
    p_dinitial,  # float32 [N, H, K, V]; out, of the states before the first token of each sequence that begins here
    p_local,  # float32 [NS, H, K, V]; out, what each segment leaves from zero; None with p_incoming
    p_outside,  # float32 [N, H, K, V], gradients of final states; or None
    scale,  # float
    d: tl.constexpr,  # H HK K V BT BK BV BJ
    PRECISION: tl.constexpr,
):
    """As adjoint_kernel of delta_state.py, with r in place of dv_new."""
    i_v, s, h = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    p_segment, start, end, chunk, num_chunks = segment(p_segments, s, d.BT)
    EVERY_CHUNK: tl.constexpr = p_incoming is not None
    begins = (tl.load(p_segment + FLAGS) & FIRST) != 0
    if not EVERY_CHUNK:
        if begins:
            return
    b_state = gradient_behind(p_incoming, p_through, p_prev, p_outside, p_segment, s, h, i_v, d)
    for i in range(loop_bound(num_chunks)):
        n = num_chunks - 1 - i
        first = start + n * d.BT
        b_beta, b_before, b_behind, decay = factors_of(p_factors, chunk + n, h, d)
        at_k, inside_k, at_v, inside_v, at_a, inside_a = places(h, first, end, i_v, d)
        b_do = tl.trans(load(p_do, at_v, inside_v))
        b_k = load(p_k, at_k, inside_k)
        b_dv = product(b_state, tl.trans(b_k), zeros(d.BV, d.BT), PRECISION) * b_behind[None, :]
        b_dv = product(b_do, load(p_scores, at_a, inside_a), b_dv, PRECISION)
        b_r = product(b_dv, load(p_solved, at_a, inside_a), b_dv, PRECISION)
        if EVERY_CHUNK:
            at_s, inside_s = state_at((chunk + n) * d.H + h, i_v, d.K, d.V, d.BK, d.BV)
            store_gradients(p_dstates, p_r, b_state, b_r, at_s, inside_s, at_v, inside_v)
        b_do = b_do.to(tl.float32) * (b_before * scale)[None, :]
        b_state = product(b_do, load(p_q, at_k, inside_k), b_state * decay, PRECISION)
        b_state = product(b_r * -(b_before * b_beta)[None, :], b_k, b_state, PRECISION)
    store_before(p_dinitial, p_local, p_segment, begins, b_state, s, h, i_v, d)


@triton.jit
def times_state(p_x, p_states, place, place_s, d: tl.constexpr, PRECISION: tl.constexpr):
    """Return BJ columns of x S^T [BT, BJ]. place: h, first and last token; place_s: number of the state, j."""
    h, start, end = place
    i_state, j = place_s
    b_sum = zeros(d.BT, d.BJ)
    for i_v in range((d.V + d.BV - 1) // d.BV):
        base, at, inside = tile(h, start, end, d.H, d.V, d.BT, d.BV, i_v)
        base_s, at_s, inside_s = state_tile(i_state, i_v, d, j)
        b_state = tl.trans(load(p_states + base_s, at_s, inside_s))
        b_sum = product(load(p_x + base, at, inside), b_state, b_sum, PRECISION)
    return b_sum


@triton.jit
def inner(p_x, p_y, place_s, d: tl.constexpr):
    """Return the sums of x y over V, of BJ rows of two states [BJ]. place_s as in times_state."""
    i_state, j = place_s
    b_sum = zeros(d.BJ)
    for i_v in range((d.V + d.BV - 1) // d.BV):
        base, at, inside = state_tile(i_state, i_v, d, j)
        b_x, b_y = load(p_x + base, at, inside).to(tl.float32), load(p_y + base, at, inside).to(tl.float32)
        b_sum += tl.sum(b_x * b_y, 1)
    return b_sum


@triton.jit
def scalar_gradients_kernel(
    p_q,  # [tokens, HK, K]
    p_k,  # [tokens, HK, K]
    p_v,  # [tokens, H, V]
    p_g,  # [tokens, H], natural logarithms
    p_chunks,  # int32 [NC, 2]
    p_factors,  # float32 [NC, H, 3, BT]
    p_states,  # [NC, H, K, V], each chunk's incoming state
    p_dstates,  # [NC, H, K, V], the gradient of its outgoing state
    p_v_new,  # [tokens, H, V]
    p_do,  # [tokens, H, V]
    p_r,  # [tokens, H, V]
    p_dq,  # [tokens, H, K]; out
    p_dk,  # [tokens, H, K]; out
    p_dv,  # [tokens, H, V]; out
    p_dg,  # [tokens, H]; out
    p_dbeta,  # [tokens, H]; out
    scale,  # float
    d: tl.constexpr,  # H HK K V BT BJ BV
    PRECISION: tl.constexpr,
):
    """All gradients of one chunk and head, BJ columns of dq and dk at a time. Pairs of tokens and, with V <= BV, do, r
    and v_new are loaded or computed once for all columns."""
    ONE: tl.constexpr = d.V <= d.BV
    DTYPE: tl.constexpr = tl.bfloat16 if PRECISION == "bf16" else tl.float32
    h, n = tl.program_id(0) % d.H, tl.program_id(0) // d.H  # heads of a token are adjacent in memory
    start, end = tl.load(p_chunks + 2 * n), tl.load(p_chunks + 2 * n + 1)
    place = (h, start, end)
    if ONE:
        base_v, at_v, inside_v = tile(h, start, end, d.H, d.V, d.BT, d.BV, 0)
        b_do, b_r = load(p_do + base_v, at_v, inside_v), load(p_r + base_v, at_v, inside_v)
        b_v_new = load(p_v_new + base_v, at_v, inside_v)
    b_beta, b_before, b_behind, decay = factors_of(p_factors, n, h, d)
    t = start + tl.arange(0, d.BT)
    at_t, inside_t = t.to(tl.int64) * d.H + h, t < end
    b_sums, b_g = gate_sums_of(p_g, at_t, inside_t)
    if ONE:
        b_dv = b_r.to(tl.float32)
        b_dbeta = tl.sum(b_dv * load(p_v + base_v, at_v, inside_v).to(tl.float32), 1)
        tl.store(p_dv + base_v + at_v, cast(b_dv * b_beta[:, None], p_dv.dtype.element_ty), mask=inside_v)
        b_pq = product(b_do, tl.trans(b_v_new), zeros(d.BT, d.BT), PRECISION)
        b_pk = product(b_r, tl.trans(b_v_new), zeros(d.BT, d.BT), PRECISION)
    else:
        b_dbeta = of_values(p_v, p_r, p_dv, b_beta, place, d)
        b_pq = times_values(p_do, p_v_new, place, d, PRECISION)
        b_pk = times_values(p_r, p_v_new, place, d, PRECISION)
    b_between = decays_of(b_sums, d.BT)
    b_pq *= b_between * scale
    b_same = same_of(b_pq, d.BT)
    b_pq = cast(tl.where(lower(d.BT, 1), b_pq, 0.0), DTYPE)
    b_pk = cast(tl.where(lower(d.BT, 1), -b_pk * b_between, 0.0), DTYPE)
    b_gates, b_left = zeros(d.BT), zeros(d.BT)  # dG; what a token leaves in the state, of dg after it
    through = 0.0
    for j in range((d.K + d.BJ - 1) // d.BJ):
        place_s = (n * d.H + h, j)
        base_k, at_k, inside_k = tile(h // (d.H // d.HK), start, end, d.HK, d.K, d.BT, d.BJ, j)
        base, at, inside = tile(h, start, end, d.H, d.K, d.BT, d.BJ, j)
        base_s, at_s, inside_s = state_tile(n * d.H + h, 0, d, j)
        if ONE:
            b_state = load(p_states + base_s, at_s, inside_s)
        b_q, b_k = load(p_q + base_k, at_k, inside_k), load(p_k + base_k, at_k, inside_k)
        b_d = zeros(d.BT, d.BJ)
        if ONE:
            b_d = product(b_do, tl.trans(b_state), b_d, PRECISION)
        else:
            b_d = times_state(p_do, p_states, place, place_s, d, PRECISION)
        b_d = product(b_pq, b_k, b_d * (b_before * scale)[:, None], PRECISION)
        b_gates += tl.sum(b_q.to(tl.float32) * b_d, 1)
        b_d += b_same[:, None] * b_k.to(tl.float32)
        tl.store(p_dq + base + at, cast(b_d, p_dq.dtype.element_ty), mask=inside)

        b_d = zeros(d.BT, d.BJ)
        if ONE:
            b_d = product(b_r, tl.trans(b_state), b_d, PRECISION)
        else:
            b_d = times_state(p_r, p_states, place, place_s, d, PRECISION)
        b_d = product(b_pk, b_k, b_d * -b_before[:, None], PRECISION)
        b_later = cast(b_k.to(tl.float32) * b_beta[:, None], DTYPE)
        b_gates += tl.sum(b_later.to(tl.float32) * b_d, 1)
        b_dbeta += tl.sum(b_k.to(tl.float32) * b_d, 1)
        b_d = b_d * b_beta[:, None] + b_same[:, None] * b_q.to(tl.float32)

        b_sum = product(tl.trans(b_pq), b_q, zeros(d.BT, d.BJ), PRECISION)
        b_sum = product(tl.trans(b_pk), b_later, b_sum, PRECISION)
        b_gates -= tl.sum(b_k.to(tl.float32) * b_sum, 1)
        b_d += b_sum
        if ONE:
            b_dstate = load(p_dstates + base_s, at_s, inside_s)
            through += tl.sum(b_state.to(tl.float32) * b_dstate.to(tl.float32))
            b_sum = product(b_v_new, tl.trans(b_dstate), zeros(d.BT, d.BJ), PRECISION)
        else:
            through += tl.sum(inner(p_states, p_dstates, place_s, d))
            b_sum = times_state(p_v_new, p_dstates, place, place_s, d, PRECISION)
        b_sum *= b_behind[:, None]
        b_left += tl.sum(b_k.to(tl.float32) * b_sum, 1)
        tl.store(p_dk + base + at, cast(b_d + b_sum, p_dk.dtype.element_ty), mask=inside)
    b_dg = tl.sum(tl.where(lower(d.BT, 0), b_gates[:, None], 0.0) + tl.where(upper(d.BT, 1), b_left[:, None], 0.0), 0)
    tl.store(p_dg + at_t, cast(b_dg + through * decay, p_dg.dtype.element_ty), mask=inside_t)
    tl.store(p_dbeta + at_t, cast(b_dbeta, p_dbeta.dtype.element_ty), mask=inside_t)
