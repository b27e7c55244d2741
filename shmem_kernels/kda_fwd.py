"""KDA inside of a chunk, forward. Gated DeltaNet, which has one gate per head: gdn.py.

With G_t the sum of a chunk's gates up to token t, G the sum of all, S the chunk's incoming state:

    Aqk[t, s] = scale sum_c q_t k_s e^(G_t - G_s), s <= t       Akk[t, s] = beta_t sum_c k_t k_s e^(G_t - G_s), s < t
    T = (1 + Akk)^-1      w = T (beta k e^G)      u = T (beta v)      kg = k e^(G - G_t)      qg = q e^G
    v_new = u - w S       o = scale qg S + Aqk v_new       S' = e^G S + kg^T v_new

operands_kernel   Aqk and T, unless they are inputs; w, u, kg, qg and G of each chunk alone; in two launches, the second
                  for strong chunks
anchors_kernel    between the two, for strong chunks: the first tokens of their stretches; before the gradients for all
output_kernel     from chunk to chunk of a segment: o, without storing states

Between them the segments' states are sent, see delta_state.py. T - 1 is stored, and T x computed as x + (T - 1) x: as
an operand of the product x is rounded, but T's diagonal is 1. x is float32; for w in forward it is rounded once before.

**Decays between two tokens.** For a product of matrices e^(G_t - G_s) must be a factor of t times a factor of s. The
tokens of a chunk are divided into stretches. The first stretch begins with the chunk. A new one begins with each token
at which the sum of any channel's gates since the start of the stretch is below -LIMIT, or any gate below MILD; only
gates up to that token count, so that nothing depends on later tokens. A chunk is weak, and one stretch, if no channel's
sum is below MILD; others are strong. The anchor of a stretch is the end of its first token (of the first stretch: the
beginning of the chunk). A token of the stretch has the factor e^(sum from the anchor on), and as the earlier token of a
pair e^-(the same sum); a token before the stretch e^(sum up to the anchor). Tokens beyond 4 stretches, the rest, are
paired by halves: of 2n tokens, n = 32 to 1, the later n have e^(sum from the middle on), the earlier n e^(sum up to the
middle); and each token is paired with itself.

So no relevant factor is above e^LIMIT, and a sum has the gates between two tokens only: exact for every gate, except
that factors below 2^-71, in strong chunks 2^-46, are 0. tests/support/delta_chunks.py has the same in float64, with the
error analysis.

q, k [tokens, HK, K], v, u, o [tokens, H, V], g [tokens, H, K], beta [tokens, H]; w, kg, qg [tokens, H, K], Aqk,
T - 1 [tokens, H, BT], the chunks' sums of gates [NC, H, K] float32, to base 2. PRECISION as in delta_state.py.
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
    load_gates,
    load_weights,
    loop_bound,
    lower,
    product,
    product_of_parts,
    rows,
    tf32_product,
    upper,
    zeros,
)
from .delta_state import load_incoming, store_final
from .segment_table import ENTERED, FLAGS, UNUSED, segment

# To base 2. Sums of the same gates, also of gates rounded to 16 bits for bfloat16 products, differ by less than 2^-7
# by the order of additions: hence the margins
LIMIT = tl.constexpr(160.0)
STEEP = tl.constexpr(-LIMIT.value + 0.03125)  # a stretch ends at a sum below it, or at a gate below MILD
MILD = tl.constexpr(-123.9375)  # a chunk is weak if no sum is below it
# Forward, weak chunks: e^G_t is multiplied by BIG and e^-G_s by SMALL. Both are then within 2^-69 and 2^69, and their
# products with queries and keys are in float32's range. Strong chunks, and all in backward: within 2^-80 and 2^80;
# gradients are scaled, see pairs_kernel
BIG = tl.constexpr(2.0**55)
SMALL = tl.constexpr(2.0**-55)
STRONG_BIG = tl.constexpr(2.0**80)
STRONG_SMALL = tl.constexpr(2.0**-80)
FAR = tl.constexpr(125.0)  # beyond it after_anchor divides e^G by 2^-64, else e^G or e^-G is not in float32's range
# Tables of blocks.load_weights. For halves of 1, 2 .. 32 tokens: the gates in each token's sum (SUMS), and the pairs
# across two halves (PAIRS)
SUMS = tl.constexpr(3)
PAIRS = tl.constexpr(9)


@triton.jit
def tile(h, start, end, H: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr, i_w=0):
    """blocks.rows in two parts, (offset, int32 offsets from there, mask): tensors of one shape share the registers of
    the int32 offsets."""
    t, w = tl.arange(0, BT), tl.arange(0, BW)
    inside = (t < end - start)[:, None] & (i_w * BW + w < W)[None, :]
    return (start.to(tl.int64) * H + h) * W + i_w * BW, t[:, None] * (H * W) + w[None, :], inside


@triton.jit
def state_tile(i_state, i_v, d: tl.constexpr, j):
    """blocks.state_at of rows j * BJ .. + BJ in two parts, as ``tile``."""
    k, v = tl.arange(0, d.BJ), tl.arange(0, d.BV)
    inside = (j * d.BJ + k < d.K)[:, None] & (i_v * d.BV + v < d.V)[None, :]
    return (i_state.to(tl.int64) * d.K + j * d.BJ) * d.V + i_v * d.BV, k[:, None] * d.V + v[None, :], inside


@triton.jit
def halves(n, BT: tl.constexpr):
    """Return, for blocks of 2 ** (n + 1) tokens, (the gates in each token's sum to the middle, the pairs of a later and
    an earlier half), both [BT, BT]."""
    t, u = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    middle = ((t >> (n + 1)) << (n + 1)) + (1 << n)
    where = ((u > middle) & (u <= t)) | ((u > t) & (u <= middle))
    return where, (t >= middle) & (u < middle) & ((u >> (n + 1)) == (t >> (n + 1)))


@triton.jit
def gates_at(p_g, h, start, end, j, d: tl.constexpr):
    """Load gates [BT, BJ], to base 2."""
    base, at, inside = tile(h, start, end, d.H, d.K, d.BT, d.BJ, j)
    return load_gates(p_g + base, at, inside)


@triton.jit
def shared(b_x, p_x, i, BT: tl.constexpr, PRECISION: tl.constexpr):
    """Return b_x, the matrix i of p_x: an operand in bfloat16 stays in shared memory. For other types load it again, as
    the parts of its several products would not fit."""
    if PRECISION == "bf16":
        return b_x
    else:
        return load_weights(p_x, i, BT)


@triton.jit
def gate_sums(b_table, p_weights, i, b_g, BT: tl.constexpr, PRECISION: tl.constexpr):
    """Sums of the gates up to each token (i = ONWARD), or after it (BEFORE); b_table as in ``shared``. In bfloat16 a
    gate has 16 bits: a relative error of 2^-17, the same in all sums."""
    b_table = shared(b_table, p_weights, i, BT, PRECISION)
    return product_of_parts(tl.trans(b_table), b_g, 2, PRECISION)


@triton.jit
def sums_from(anchor, tables, p_weights, b_g, BT: tl.constexpr, PRECISION: tl.constexpr):
    """Sums of the gates between the end of token ``anchor`` and each token, negated for later tokens. tables: ONWARD
    and BEFORE."""
    b_later = (tl.arange(0, BT) > anchor)[:, None]
    b_sums = gate_sums(tables[0], p_weights, ONWARD, tl.where(b_later, -b_g, 0.0), BT, PRECISION)
    return b_sums + gate_sums(tables[1], p_weights, BEFORE, tl.where(b_later, 0.0, b_g), BT, PRECISION)


@triton.jit
def after_anchor(b_sums, first, beyond):
    """Return the factors (of the later token of a pair, of the earlier one) [BT, BJ], times STRONG_BIG and
    STRONG_SMALL, for the stretch behind an anchor: the later token is one of first .. beyond, for others it is 0."""
    t = tl.arange(0, b_sums.shape[0])[:, None]
    b_far = b_sums > FAR
    b_shift = tl.where(b_far, 64.0, 0.0)
    b_row = exp2(tl.minimum(b_shift - b_sums, 0.0)) * tl.where(b_far, STRONG_BIG * 2.0**-64, STRONG_BIG)
    b_column = exp2(tl.minimum(b_sums, LIMIT) - b_shift) * tl.where(b_far, STRONG_SMALL * 2.0**64, STRONG_SMALL)
    return tl.where((t >= first) & (t < beyond), b_row, 0.0), b_column


@triton.jit
def anchors_kernel(
    p_g,  # [tokens, H, K], natural logarithms
    p_chunks,  # int32 [NC, 2]
    p_strong,  # int32 [NC, H]; in and out
    d: tl.constexpr,  # H K BT BK
    ALL: tl.constexpr,
):
    """Replace each nonzero word of p_strong [NC, H] by the chunk's anchors, 8 bits each, BT for none: the first tokens
    of the stretches, and of the rest. ALL: also those of weak chunks, which have none."""
    n, h = tl.program_id(0) // d.H, tl.program_id(0) % d.H
    packed = d.BT * 0x01010101
    if tl.load(p_strong + n * d.H + h) == 0:
        if ALL:
            tl.store(p_strong + n * d.H + h, packed)
        return
    start, end, c = tl.load(p_chunks + 2 * n), tl.load(p_chunks + 2 * n + 1), tl.arange(0, d.BK)
    b_sum = zeros(d.BK)
    i = 0
    for first in range(0, d.BT, 8):
        for t in tl.static_range(8):
            at = (start + first + t).to(tl.int64) * d.H + h
            b_g = load_gates(p_g, at * d.K + c, (c < d.K) & (start + first + t < end))
            b_sum += b_g
            # a sum with a gate like -inf, here -128, would leave few digits to those after it
            steep = tl.max(((b_sum < STEEP) | (b_g < MILD)).to(tl.int32), 0) > 0
            b_sum = tl.where(steep, 0.0, b_sum)
            packed += tl.where(steep & (i < 32), (first + t - d.BT) << i, 0)
            i += tl.where(steep, 8, 0)
    tl.store(p_strong + n * d.H + h, packed)


@triton.jit
def halves_of(p_weights, m, b_g, beyond, BT: tl.constexpr, PRECISION: tl.constexpr):
    """Return the factors (of the later token of a pair, of the earlier one) between halves of 2 ** (m + 1) tokens of
    the rest."""
    b_factor = exp2(product_of_parts(load_weights(p_weights, SUMS + m, BT), b_g, 2, PRECISION))
    return tl.where(tl.arange(0, BT)[:, None] >= beyond, b_factor, 0.0), b_factor


@triton.jit
def add_strong_pairs(b_aq, b_ak, b_q, b_k, gates, p_weights, packed, BT: tl.constexpr, PRECISION: tl.constexpr):
    """Add these channels' terms to Aqk and Akk; in the first stretch with the same bits as in a weak chunk. gates: the
    gates, their sums up to each token, and the tables ONWARD and BEFORE."""
    b_g, b_sums, tables = gates
    t = tl.arange(0, BT)[:, None]
    i, first, b_sums = 0, 0, -b_sums
    while (i < 32) & (first < BT):
        beyond = (packed >> i) & 255
        b_row, b_column = after_anchor(b_sums, first, beyond)
        b_column = tl.trans(b_k * b_column)
        b_aq = tf32_product(b_q * b_row, b_column, b_aq, PRECISION)
        b_ak = tf32_product(b_k * b_row, b_column, b_ak, PRECISION)
        if beyond < BT:
            b_sums = sums_from(beyond, tables, p_weights, b_g, BT, PRECISION)
        i, first = i + 8, beyond
    rest = packed >> 24
    if rest < BT:
        b_same = tl.sum(tl.where(t >= rest, b_q * b_k, 0.0), 1)
        b_aq += tl.where(lower(BT, 0) & upper(BT, 0), b_same[:, None], 0.0)
        for m in range(6):
            b_row, b_column = halves_of(p_weights, m, b_g, rest, BT, PRECISION)
            b_column = tl.trans(b_k * b_column)
            b_pairs = load_weights(p_weights, PAIRS + m, BT).to(tl.float32)
            b_aq += tf32_product(b_q * b_row, b_column, tl.zeros([BT, BT], tl.float32), PRECISION) * b_pairs
            b_ak += tf32_product(b_k * b_row, b_column, tl.zeros([BT, BT], tl.float32), PRECISION) * b_pairs
    return b_aq, b_ak


@triton.jit
def chunk_of(p_chunks, p_beta, n, h, d: tl.constexpr):
    """Return (first token, end, offsets of one number per token, their mask, beta) of chunk n."""
    start, end = tl.load(p_chunks + 2 * n), tl.load(p_chunks + 2 * n + 1)
    t = start + tl.arange(0, d.BT)
    at, inside = t.to(tl.int64) * d.H + h, t < end
    return start, end, at, inside, tl.load(p_beta + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def small_inverses(b_a, B: tl.constexpr, BT: tl.constexpr, PRECISION: tl.constexpr):
    """Inverses of 1 + the B diagonal blocks of BT tokens of a, [B * BT, B * BT] with zeros elsewhere."""
    b, t = tl.arange(0, B), tl.arange(0, BT)
    diagonal = b[:, None, None, None] == b[None, None, :, None]
    b_a = tl.sum(tl.where(diagonal, tl.reshape(b_a, [B, BT, B, BT]), 0.0), 2)
    r, c = t[None, :, None], t[None, None, :]
    b_x = tl.where(r == c, 1.0, tl.where((r >> 1) == (c >> 1), -b_a, 0.0))
    n = 1
    while (2 << n) <= BT:
        middle = ((r >> (n + 1)) << (n + 1)) + (1 << n)
        b_pairs = (r >= middle) & (c < middle) & ((c >> (n + 1)) == (r >> (n + 1)))
        b_y = tl.zeros([B, BT, BT], tl.float32)
        b_y = tf32_product(b_x, tl.where(b_pairs, b_a, 0.0), b_y, PRECISION)
        b_x = tf32_product(-b_y, b_x, b_x, PRECISION)
        n += 1
    return tl.reshape(tl.where(diagonal, b_x[:, :, None, :], 0.0), [B * BT, B * BT])


@triton.jit
def inverse(b_a, BT: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of 1 + a, less 1; a [BT, BT], BT = 64, is strictly lower triangular. With X the inverses of
    the diagonal blocks of n tokens and a' the part of a between the two blocks of each pair, the inverses for 2n tokens
    are X - X a' X: forward substitution by blocks. The first levels take blocks of 16 tokens, two more the whole."""
    b_x = small_inverses(b_a, BT // 16, 16, PRECISION)
    for n in tl.static_range(4, 6):
        where, b_pairs = halves(n, BT)
        b_y = tl.zeros([BT, BT], tl.float32)
        b_y = tf32_product(b_x, tl.where(b_pairs, b_a, 0.0), b_y, PRECISION)
        b_x = tf32_product(-b_y, b_x, b_x, PRECISION)
    return tl.where(lower(BT, 1), b_x, 0.0)


@triton.jit
def operands_kernel(
    p_q,  # [tokens, HK, K]
    p_k,  # [tokens, HK, K]
    p_v,  # [tokens, H, V]
    p_g,  # [tokens, H, K], natural logarithms
    p_beta,  # [tokens, H]
    p_chunks,  # int32 [NC, 2]
    p_strong,  # int32 [NC, H]; out, with STRONG in
    p_weights,  # bfloat16 [tables, BT, BT], see load_weights
    p_scores,  # Aqk [tokens, H, BT]; out, with SOLVED in
    p_solved,  # T - 1 [tokens, H, BT]; out, with SOLVED in
    p_w,  # [tokens, H, K]; out
    p_u,  # [tokens, H, V]; out
    p_kg,  # [tokens, H, K]; out
    p_qg,  # [tokens, H, K]; out
    p_sums,  # float32 [NC, H, K]; out
    scale,  # float
    d: tl.constexpr,  # H HK K V BT BJ BV
    SOLVED: tl.constexpr,
    STRONG: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Aqk, T - 1, w, u, kg, qg and the sum of the gates of one chunk and head. SOLVED: Aqk and T - 1 are inputs.
    Otherwise the launch without STRONG computes weak chunks and marks strong ones in p_strong [NC, H] by a nonzero
    word; the launch with STRONG then computes these, with anchors_kernel's anchors in p_strong."""
    n, h = tl.program_id(0) // d.H, tl.program_id(0) % d.H  # heads of a token are adjacent in memory
    start, end, at_t, inside_t, b_beta = chunk_of(p_chunks, p_beta, n, h, d)
    c = tl.arange(0, d.BJ)
    if not SOLVED:
        if STRONG:
            packed = tl.load(p_strong + n * d.H + h)
            if packed == 0:
                return
        else:
            b_least = zeros(d.BJ)
            for j in range((d.K + d.BJ - 1) // d.BJ):
                b_sum = tl.sum(gates_at(p_g, h, start, end, j, d), 0)
                tl.store(p_sums + (n * d.H + h).to(tl.int64) * d.K + j * d.BJ + c, b_sum, mask=j * d.BJ + c < d.K)
                b_least = tl.minimum(b_least, b_sum)
            strong = tl.min(b_least) < MILD
            tl.store(p_strong + n * d.H + h, strong.to(tl.int32))
            if strong | (start == end):  # the launch with STRONG computes it, or it is unused
                return
    base_a, at_a, inside_a = tile(h, start, end, d.H, d.BT, d.BT, d.BT)
    b_aq = zeros(d.BT, d.BT)
    b_ak = zeros(d.BT, d.BT)
    b_least = zeros(d.BJ)
    if SOLVED:
        b_solved = load(p_solved + base_a, at_a, inside_a)
    b_onward, b_before = load_weights(p_weights, ONWARD, d.BT), load_weights(p_weights, BEFORE, d.BT)
    for j in range((d.K + d.BJ - 1) // d.BJ):
        b_g = gates_at(p_g, h, start, end, j, d)
        base, at, inside = tile(h // (d.H // d.HK), start, end, d.HK, d.K, d.BT, d.BJ, j)
        b_q, b_k = load(p_q + base, at, inside), load(p_k + base, at, inside)
        b_q, b_k = b_q.to(tl.float32), b_k.to(tl.float32)
        base, at, inside = tile(h, start, end, d.H, d.K, d.BT, d.BJ, j)
        b_sums = gate_sums(b_onward, p_weights, ONWARD, b_g, d.BT, PRECISION)
        b_from = exp2(b_sums)
        tl.store(p_qg + base + at, cast(b_q * b_from, p_qg.dtype.element_ty), mask=inside)
        b_kb = b_k * b_from * b_beta[:, None]
        b_total = tl.sum(b_g, 0)
        if SOLVED:
            b_w = product(b_solved, b_kb, b_kb, PRECISION)
            tl.store(p_w + base + at, cast(b_w, p_w.dtype.element_ty), mask=inside)
            tl.store(p_sums + (n * d.H + h).to(tl.int64) * d.K + j * d.BJ + c, b_total, mask=j * d.BJ + c < d.K)
            b_least = tl.minimum(b_least, b_total)
        else:
            tl.store(p_w + base + at, cast(b_kb, p_w.dtype.element_ty), mask=inside)  # until T is computed
            if STRONG:
                gates = b_g, b_sums, (b_onward, b_before)
                b_aq, b_ak = add_strong_pairs(b_aq, b_ak, b_q, b_k, gates, p_weights, packed, d.BT, PRECISION)
            else:
                b_column = tl.trans(b_k * (exp2(-b_sums) * SMALL))
                b_from *= BIG
                b_aq = tf32_product(b_q * b_from, b_column, b_aq, PRECISION)
                b_ak = tf32_product(b_k * b_from, b_column, b_ak, PRECISION)
        if SOLVED or STRONG or PRECISION != "bf16":
            b_after = exp2(gate_sums(b_before, p_weights, BEFORE, b_g, d.BT, PRECISION))
        else:
            b_after = exp2(b_total[None, :] - b_sums)
        tl.store(p_kg + base + at, cast(b_k * b_after, p_kg.dtype.element_ty), mask=inside)
    if SOLVED:
        tl.store(p_strong + n * d.H + h, (tl.min(b_least) < MILD).to(tl.int32))
    else:
        b_aq = tl.where(lower(d.BT, 0), b_aq * scale, 0.0)
        tl.store(p_scores + base_a + at_a, cast(b_aq, p_scores.dtype.element_ty), mask=inside_a)
        b_ak = tl.where(lower(d.BT, 1), b_ak * b_beta[:, None], 0.0)
        tl.debug_barrier()  # p_w, for loads by other threads
        if d.K <= d.BV:  # these loads, and those of v, end during the inverse
            base, at, inside = tile(h, start, end, d.H, d.K, d.BT, d.BV)
            b_kb = load(p_w + base, at, inside)
    if d.V <= d.BV:
        base, at, inside = tile(h, start, end, d.H, d.V, d.BT, d.BV)
        b_v = load(p_v + base, at, inside)
    if not SOLVED:
        b_solved = cast(inverse(b_ak, d.BT, PRECISION), p_solved.dtype.element_ty)
        tl.store(p_solved + base_a + at_a, b_solved, mask=inside_a)
        for j in range((d.K + d.BV - 1) // d.BV):
            base, at, inside = tile(h, start, end, d.H, d.K, d.BT, d.BV, j)
            if d.K > d.BV:
                b_kb = load(p_w + base, at, inside)
            b_w = product(b_solved, b_kb, b_kb.to(tl.float32), PRECISION)
            tl.debug_barrier()
            tl.store(p_w + base + at, cast(b_w, p_w.dtype.element_ty), mask=inside)
    for i_v in range((d.V + d.BV - 1) // d.BV):
        base, at, inside = tile(h, start, end, d.H, d.V, d.BT, d.BV, i_v)
        if d.V > d.BV:
            b_v = load(p_v + base, at, inside)
        b_vb = b_v.to(tl.float32) * b_beta[:, None]
        b_u = product(b_solved, b_vb, b_vb, PRECISION)
        tl.store(p_u + base + at, cast(b_u, p_u.dtype.element_ty), mask=inside)


@triton.jit
def output_kernel(
    p_qg,  # [tokens, H, K]
    p_kg,  # [tokens, H, K]
    p_w,  # [tokens, H, K]
    p_u,  # [tokens, H, V]
    p_scores,  # Aqk [tokens, H, BT]
    p_sums,  # float32 [NC, H, K]
    p_segments,  # int32 [NS, SEGMENT_WORDS]
    p_incoming,  # float32 [NS, H, K, V]
    p_through,  # float32 [NS, H, K, K]; None without an incoming state
    p_prev,  # float32 [B, H, K, V]; None without p_through
    p_o,  # [tokens, H, V]; out
    p_final,  # float32 [N, H, K, V]; out, or None
    scale,  # float
    d: tl.constexpr,  # H K V BT BK BV BJ
    PRECISION: tl.constexpr,
):
    """Pass through the chunks of one segment, from its incoming state: o [tokens, H, V], and p_final. Holds the state
    and writes p_final as delta_states_kernel. p_through and p_final may be None."""
    i_v, s, h = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    p_segment, start, end, chunk, num_chunks = segment(p_segments, s, d.BT)
    if (tl.load(p_segment + FLAGS) & UNUSED) != 0:
        return
    b_state = load_incoming(p_incoming, p_through, p_prev, p_segment, s, h, i_v, d, ENTERED)
    k = tl.arange(0, d.BK)
    for n in range(loop_bound(num_chunks)):
        first = start + n * d.BT
        b_sums = tl.load(p_sums + ((chunk + n) * d.H + h).to(tl.int64) * d.K + k, mask=k < d.K, other=0.0)
        at, inside = rows(h, first, end, d.H, d.K, d.BT, d.BK)
        at_v, inside_v = rows(h, first, end, d.H, d.V, d.BT, d.BV, i_v)
        at_a, inside_a = rows(h, first, end, d.H, d.BT, d.BT, d.BT)
        b_v = tl.trans(load(p_u, at_v, inside_v)).to(tl.float32)
        b_v = product(-b_state, tl.trans(load(p_w, at, inside)), b_v, PRECISION)
        b_o = product(b_state, tl.trans(load(p_qg, at, inside)), zeros(d.BV, d.BT), PRECISION) * scale
        b_o = product(b_v, tl.trans(load(p_scores, at_a, inside_a)), b_o, PRECISION)
        b_state = product(b_v, load(p_kg, at, inside), b_state * exp2(b_sums)[None, :], PRECISION)
        tl.store(p_o + at_v, tl.trans(cast(b_o, p_o.dtype.element_ty)), mask=inside_v)
    store_final(p_final, p_segment, b_state, h, i_v, d)
