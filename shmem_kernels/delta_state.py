"""Delta rules from chunk to chunk: the part of KDA and Gated DeltaNet between chunks, over segments and ranks.

With w, u, kg, qg of a chunk of BT tokens in the WY form (w, u = T (beta k e^G), T (beta v); kg = k e^(G_C - G);
qg = q e^G, G the sums of the chunk's gates) and D = e^G_C:

    v_new = u - w S         S' = D S + kg^T v_new                                    forward, S [K, V]
    dv' = dv + kg dS        dS' = D dS + scale * qg^T do - w^T dv'                   backward, dv = Aqk^T do

Forward:
1. summary_kernel        each segment alone: its local state R [K, V] (from zero), and its transition M [K, K]
2. delta_state_passing_kernel
                         over the segments of this rank: each one's incoming state from this rank's tokens, and the
                         matrix from the rank's incoming state to it; the rank's local state and transition
3. All-Scan over the ranks with that transition (scan.py): only a state is sent
4. delta_states_kernel   each segment from its incoming state: each chunk's incoming state, and v_new
Backward, the same from the last rank to the first with the transposed transitions of forward:
1. adjoint_kernel        each segment from zero: its local gradient
   (the last segment of a sequence from the gradient of its final state, so that its transition is not needed)
2. delta_state_passing_kernel, 3. All-Scan with the transposed transition
4. adjoint_kernel        each segment from its incoming gradient: that of each chunk's outgoing state, and dv'

Gates G are sums from the chunk's first token on, times log2(e), float32: KDA's [tokens, H, K], with TOTALS of whole
chunks only, [chunks, H, K]. With SCALAR they are Gated DeltaNet's [tokens, H]; k and q are then without decays, in HK
heads, and kg = e^(G_C - G) k is applied as a factor of the rows of v_new and kg dS. Products take operands in
PRECISION, "bf16" or "tf32x3", and sum in float32; R, M and the states between segments are float32, and their products
of three TF32 parts.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .blocks import cast, dot_split, exp2, load, loop_bound, lower, product, rows, state_at, zeros
from .segment_table import (
    ENTERED,
    FIRST,
    FLAGS,
    LAST,
    LEFT,
    SEGMENT_WORDS,
    SEQUENCE,
    STATE_INDEX,
    segment,
    segments_of_state,
)


class DeltaSizes(NamedTuple):
    """Constants of the kernels of a delta rule: their argument ``d``. A kernel names the fields that it and its
    functions read; others may be 0. Blocks have powers of two, 16 or more."""

    H: int  # heads of v
    K: int  # channels of a head of q and k: rows of a state
    V: int = 0  # channels of a head of v: columns of a state
    HK: int = 0  # heads of q and k as inputs; H is a multiple
    BT: int = 0  # tokens of a chunk
    BK: int = 0  # channels of a block that holds all of K
    BV: int = 0  # columns of V in a block
    BJ: int = 0  # channels of K in a block of several
    BR: int = 0  # rows of a transition in a program
    BC: int = 0  # columns of a state or of a transition in a program
    SCALAR: bool = False  # one gate a head: Gated DeltaNet
    TOTALS: bool = False  # the sums of gates are those of whole chunks alone


@triton.jit
def chunk_decay(p_g, h, chunk, start, end, d: tl.constexpr):
    """Load D [BK] of chunk ``chunk``, which begins with token ``start``; with SCALAR all values are equal. Without such
    a chunk, the decay of any token."""
    last = tl.maximum(tl.minimum(start + d.BT, end) - 1, 0).to(tl.int64) * d.H + h
    if d.TOTALS:
        last = chunk.to(tl.int64) * d.H + h
    k = tl.arange(0, d.BK)
    if d.SCALAR:
        return exp2(tl.load(p_g + last + 0 * k))
    return exp2(tl.load(p_g + last * d.K + k, mask=k < d.K, other=0.0))


@triton.jit
def token_decays(p_g, h, start, end, d: tl.constexpr):
    """Return, with SCALAR, (the decay up to each token of a chunk, the decay behind it) [BT]; 0 beyond ``end``."""
    t = start + tl.arange(0, d.BT)
    last = (tl.minimum(start + d.BT, end) - 1).to(tl.int64) * d.H + h
    b_g = tl.load(p_g + t.to(tl.int64) * d.H + h, mask=t < end, other=0.0)
    return tl.where(t < end, exp2(b_g), 0.0), tl.where(t < end, exp2(tl.load(p_g + last) - b_g), 0.0)


@triton.jit
def times_keys(b_z, b_k, p_k, diagonal, h, first, end, i_r, d: tl.constexpr, PRECISION: tl.constexpr):
    """Rows i_r * BR .. + BR of Z k^T, [BR, BT], for keys in HK heads. Z's diagonal, which is near 1 for weak decay, is
    not rounded."""
    if PRECISION == "bf16":
        at_r, inside_r = rows(h // (d.H // d.HK), first, end, d.HK, d.K, d.BT, d.BR, i_r)
        b_a = tl.sum(tl.where(diagonal, b_z, 0.0), 1)[:, None] * tl.trans(load(p_k, at_r, inside_r)).to(tl.float32)
        return product(tl.where(diagonal, 0.0, b_z), tl.trans(b_k), b_a, PRECISION)
    else:
        return product(b_z, tl.trans(b_k), zeros(d.BR, d.BT), PRECISION)


@triton.jit
def store_summary(p_transition, p_local, b_z, b_local, s, h, i_r, i_v, d: tl.constexpr):
    """Store these rows of a segment's transition and local state."""
    r, k, v = i_r * d.BR + tl.arange(0, d.BR), tl.arange(0, d.BK), i_v * d.BV + tl.arange(0, d.BV)
    row = (s * d.H + h).to(tl.int64) * d.K + r
    tl.store(p_local + row[:, None] * d.V + v[None, :], b_local, mask=(r < d.K)[:, None] & (v < d.V)[None, :])
    if i_v == 0:
        tl.store(p_transition + row[:, None] * d.K + k[None, :], b_z, mask=(r < d.K)[:, None] & (k < d.K)[None, :])


@triton.jit
def summary_kernel(
    p_k,  # kg [tokens, H, K]; SCALAR: k [tokens, HK, K]
    p_w,  # [tokens, H, K]
    p_u,  # [tokens, H, V]
    p_g,  # float32, see above
    p_segments,  # int32 [NS, SEGMENT_WORDS]
    p_transition,  # float32 [NS, H, K, K]; out
    p_local,  # float32 [NS, H, K, V]; out
    d: tl.constexpr,  # H HK K V BT BR BK BV SCALAR TOTALS
    PRECISION: tl.constexpr,
):
    """BR rows of a segment's transition M, and BV columns of the same rows of its local state R. The last segment of a
    sequence has neither.

    By rows, from the last chunk to the first, since one product then serves both:
        A = Z kg^T,  R = R + A u,  Z = Z D - A w,     Z starts as the identity and ends as M.
    """
    NR: tl.constexpr = (d.K + d.BR - 1) // d.BR
    i_r, i_v, s, h = tl.program_id(0) % NR, tl.program_id(0) // NR, tl.program_id(1), tl.program_id(2)
    p_segment, start, end, chunk, num_chunks = segment(p_segments, s, d.BT)
    if (tl.load(p_segment + FLAGS) & LAST) != 0:
        return
    diagonal = (i_r * d.BR + tl.arange(0, d.BR))[:, None] == tl.arange(0, d.BK)[None, :]
    b_z = tl.where(diagonal, 1.0, 0.0)
    b_local = zeros(d.BR, d.BV)
    for i in range(loop_bound(num_chunks)):
        first = start + (num_chunks - 1 - i) * d.BT
        at, inside = rows(h, first, end, d.H, d.K, d.BT, d.BK)
        at_k, inside_k = rows(h // (d.H // d.HK), first, end, d.HK, d.K, d.BT, d.BK)
        at_u, inside_u = rows(h, first, end, d.H, d.V, d.BT, d.BV, i_v)
        b_k = load(p_k, at_k, inside_k)
        b_a = times_keys(b_z, b_k, p_k, diagonal, h, first, end, i_r, d, PRECISION)
        if d.SCALAR:
            b_before, b_behind = token_decays(p_g, h, first, end, d)
            b_a *= b_behind[None, :]
        b_local = product(b_a, load(p_u, at_u, inside_u), b_local, PRECISION)
        b_decay = chunk_decay(p_g, h, chunk + num_chunks - 1 - i, first, end, d)
        b_z = product(-b_a, load(p_w, at, inside), b_z * b_decay[None, :], PRECISION)
    store_summary(p_transition, p_local, b_z, b_local, s, h, i_r, i_v, d)


@triton.jit
def times(p_matrix, p_x, b_sum, k, c, stride_i, stride_j, stride_x, K: tl.constexpr, C, BJ: tl.constexpr):
    """matrix x + sum: matrix [K, K], columns c of x [K, C]; both in memory, BJ columns of the matrix at a time."""
    for n in tl.range((K + BJ - 1) // BJ, num_stages=2):
        j = n * BJ + tl.arange(0, BJ)
        at = k[:, None] * stride_i + j[None, :] * stride_j
        b_matrix = tl.load(p_matrix + at, mask=(k < K)[:, None] & (j < K)[None, :], other=0.0)
        at = j[:, None] * stride_x + c[None, :]
        b_x = tl.load(p_x + at, mask=(j < K)[:, None] & (c < C)[None, :], other=0.0)
        b_sum = tl.dot(b_matrix, b_x, b_sum, input_precision="tf32x3")
    return b_sum


@triton.jit
def delta_state_passing_kernel(
    p_transition,  # float32 [NS, H, K, K]
    p_local,  # float32 [NS, H, K, V], the segments' local states
    p_segments,  # int32 [NS, SEGMENT_WORDS]
    p_segments_of_states,  # int32 [B, 2]; first segment and end of each state
    p_outside,  # float32 [N, H, K, V], the states at the beginning of each sequence; None for zeros
    p_incoming,  # float32 [NS, H, K, V]; out, each segment's incoming state from this rank's tokens
    p_through,  # float32 [NS, H, K, K]; out, transition from the rank's incoming state to each segment; or None
    p_own,  # float32 [B, H, K, V]; out, the rank's local state
    p_dense,  # float32 [B, H, K, K]; out, the rank's transition; None without p_through
    d: tl.constexpr,  # H K V BK BC BJ
    REVERSE: tl.constexpr,
):
    """Pass X = M X + R through the segments of one sent state and head. A program has BC columns of one of two X.

    The first X is the state from this rank's tokens: p_incoming and p_own. The second X, only if this rank has an
    incoming state, starts as the identity and omits R: p_through and p_dense. REVERSE: from the last segment to the
    first, M transposed, ends and beginnings exchanged.
    """
    NV: tl.constexpr = (d.V + d.BC - 1) // d.BC
    i_c, i = tl.program_id(0), tl.program_id(1)
    index, h = i // d.H, i % d.H
    s_first, s_end = segments_of_state(p_segments_of_states, index)
    BEGIN: tl.constexpr = LAST if REVERSE else FIRST
    FINISH: tl.constexpr = FIRST if REVERSE else LAST
    COMES: tl.constexpr = LEFT if REVERSE else ENTERED
    KNOWN: tl.constexpr = FIRST | LAST if REVERSE else LAST  # adjoint_kernel starts with the last one's incoming state
    stride_i, stride_j = 1 if REVERSE else d.K, d.K if REVERSE else 1
    state = i_c < NV
    C = tl.where(state, d.V, d.K)
    k, c = tl.arange(0, d.BK), tl.where(state, i_c, i_c - NV) * d.BC + tl.arange(0, d.BC)
    inside = (k < d.K)[:, None] & (c < C)[None, :]
    offsets = k[:, None] * C + c[None, :]
    p_ways = p_incoming if p_through is None else p_through  # no program has columns of it then
    p_way = p_own if p_dense is None else p_dense

    b_x = zeros(d.BK, d.BC)
    if i_c >= NV:
        b_x = tl.where(k[:, None] == c[None, :], 1.0, 0.0)
    n = s_first * 0
    while n < s_end - s_first:
        s = s_end - 1 - n if REVERSE else s_first + n
        row = (s * d.H + h).to(tl.int64) * d.K
        flags = tl.load(p_segments + s * SEGMENT_WORDS + FLAGS)
        known = (flags & KNOWN) != 0
        if state:
            if p_outside is None:
                known |= (n == 0) | ((flags & BEGIN) != 0)  # X is 0
            else:
                begins = (flags & BEGIN) != 0
                sequence = tl.load(p_segments + s * SEGMENT_WORDS + SEQUENCE).to(tl.int64)
                p_begin = p_outside + (sequence * d.H + h) * (d.K * d.V) + offsets
                b_x = tl.where(begins, tl.load(p_begin, mask=inside & begins, other=0.0), b_x)
            p_here = p_incoming + row * d.V
            b_next = tl.load(p_local + row * d.V + offsets, mask=inside & ((flags & FINISH) == 0), other=0.0)
        else:
            p_here = p_ways + row * d.K
            b_next = zeros(d.BK, d.BC)
        if state | ((flags & COMES) != 0):
            tl.store(p_here + offsets, b_x, mask=inside)
            if not known:
                tl.debug_barrier()  # times() reads all of X
                b_next = times(p_transition + row * d.K, p_here, b_next, k, c, stride_i, stride_j, C, d.K, C, d.BJ)
            b_x = b_next
            n += 1
        else:
            n = s_end - s_first
    if state:
        tl.store(p_own + i.to(tl.int64) * (d.K * d.V) + offsets, b_x, mask=inside)
    else:
        tl.store(p_way + i.to(tl.int64) * (d.K * d.K) + offsets, b_x, mask=inside)


@triton.jit
def load_incoming(p_incoming, p_through, p_prev, p_segment, s, h, i_v, d: tl.constexpr, COMES: tl.constexpr):
    """Load a segment's incoming state, transposed [BV, BK], from this rank's tokens and from the other ranks. Also
    stores it to p_incoming, which holds the first part before."""
    at, inside = transposed_at(s * d.H + h, i_v, d)
    b_state = load(p_incoming, at, inside)
    if p_through is not None:
        if (tl.load(p_segment + FLAGS) & COMES) != 0:
            k, v = tl.arange(0, d.BK), i_v * d.BV + tl.arange(0, d.BV)
            prev = (tl.load(p_segment + STATE_INDEX) * d.H + h).to(tl.int64) * (d.K * d.V)
            dense = (s * d.H + h).to(tl.int64) * (d.K * d.K)
            for n in tl.range((d.K + d.BJ - 1) // d.BJ, num_stages=2):
                j = n * d.BJ + tl.arange(0, d.BJ)
                at_prev = prev + j[None, :] * d.V + v[:, None]
                b_prev = tl.load(p_prev + at_prev, mask=(j < d.K)[None, :] & (v < d.V)[:, None], other=0.0)
                at_dense = dense + k[None, :] * d.K + j[:, None]
                b_dense = tl.load(p_through + at_dense, mask=(k < d.K)[None, :] & (j < d.K)[:, None], other=0.0)
                b_state = tl.dot(b_prev, b_dense, b_state, input_precision="tf32x3")
            tl.store(p_incoming + at, b_state, mask=inside)
    return b_state


@triton.jit
def transposed_at(i_state, i_v, d: tl.constexpr):
    """(offsets, mask) [BV, BK] of one of many [K, V] matrices: columns i_v * BV .. + BV."""
    k, v = tl.arange(0, d.BK), i_v * d.BV + tl.arange(0, d.BV)
    return i_state.to(tl.int64) * (d.K * d.V) + k[None, :] * d.V + v[:, None], (k < d.K)[None, :] & (v < d.V)[:, None]


@triton.jit
def store_final(p_final, p_segment, b_state, h, i_v, d: tl.constexpr):
    """Store the state behind a segment, transposed, as its sequence's final state, if the sequence ends with it and
    p_final is no None."""
    if p_final is not None:
        if (tl.load(p_segment + FLAGS) & LAST) != 0:
            at, inside = transposed_at(tl.load(p_segment + SEQUENCE) * d.H + h, i_v, d)
            tl.store(p_final + at, b_state, mask=inside)


@triton.jit
def delta_states_kernel(
    p_k,  # kg [tokens, H, K]; SCALAR: k [tokens, HK, K]
    p_w,  # [tokens, H, K]
    p_u,  # [tokens, H, V]
    p_g,  # float32, see above
    p_segments,  # int32 [NS, SEGMENT_WORDS]
    p_incoming,  # float32 [NS, H, K, V]; in and out, see load_incoming
    p_through,  # float32 [NS, H, K, K]; None without an incoming state
    p_prev,  # float32 [B, H, K, V]; None without p_through
    p_states,  # [NC, H, K, V]; out, each chunk's incoming state
    p_v_new,  # [tokens, H, V]; out
    p_final,  # float32 [N, H, K, V]; out, the state behind the last token of each sequence that ends here; or None
    d: tl.constexpr,  # H HK K V BT BK BV BJ SCALAR TOTALS
    PRECISION: tl.constexpr,
):
    """Pass through the chunks of one segment, from its incoming state: each chunk's incoming state, and v_new.

    The state is held transposed, [BV, BK]: so it and v_new are left operands of the products, which tensor cores read
    from registers, and no dependent operand goes through shared memory. The next chunk's decay is loaded during the
    computation of a chunk.
    """
    i_v, s, h = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    p_segment, start, end, chunk, num_chunks = segment(p_segments, s, d.BT)
    b_state = load_incoming(p_incoming, p_through, p_prev, p_segment, s, h, i_v, d, ENTERED)
    b_decay = chunk_decay(p_g, h, chunk, start, end, d)
    for n in range(loop_bound(num_chunks)):
        first = start + n * d.BT
        following = tl.minimum(n + 1, num_chunks - 1)
        b_next_decay = chunk_decay(p_g, h, chunk + following, start + following * d.BT, end, d)
        at, inside = rows(h, first, end, d.H, d.K, d.BT, d.BK)
        at_k, inside_k = rows(h // (d.H // d.HK), first, end, d.HK, d.K, d.BT, d.BK)
        at_v, inside_v = rows(h, first, end, d.H, d.V, d.BT, d.BV, i_v)
        b_v = tl.trans(load(p_u, at_v, inside_v)).to(tl.float32)
        b_v = product(-b_state, tl.trans(load(p_w, at, inside)), b_v, PRECISION)
        at_s, inside_s = state_at((chunk + n) * d.H + h, i_v, d.K, d.V, d.BK, d.BV)
        tl.store(p_states + at_s, tl.trans(cast(b_state, p_states.dtype.element_ty)), mask=inside_s)
        tl.store(p_v_new + at_v, tl.trans(cast(b_v, p_v_new.dtype.element_ty)), mask=inside_v)
        if d.SCALAR:
            b_before, b_behind = token_decays(p_g, h, first, end, d)
            b_v *= b_behind[None, :]
        b_state = product(b_v, load(p_k, at_k, inside_k), b_state * b_decay[None, :], PRECISION)
        b_decay = b_next_decay
    store_final(p_final, p_segment, b_state, h, i_v, d)


@triton.jit
def gradient_behind(p_incoming, p_through, p_prev, p_outside, p_segment, s, h, i_v, d: tl.constexpr):
    """Load the gradient that a pass through a segment starts from, [BV, BK]: load_incoming's; without p_incoming the
    final state's, if the segment's sequence ends with it and p_outside is no None; else zeros."""
    b_state = zeros(d.BV, d.BK)
    if p_incoming is not None:
        b_state = load_incoming(p_incoming, p_through, p_prev, p_segment, s, h, i_v, d, LEFT)
    elif p_outside is not None:
        ends = (tl.load(p_segment + FLAGS) & LAST) != 0
        at, inside = transposed_at(tl.load(p_segment + SEQUENCE) * d.H + h, i_v, d)
        b_state = load(p_outside, at, inside & ends)
    return b_state


@triton.jit
def local_gradients(p_do, p_dv, p_scores, h, first, end, i_v, d: tl.constexpr, PRECISION: tl.constexpr):
    """Return (do, the gradient of v_new from inside the chunk: p_dv, or Aqk^T do) [BV, BT] of a chunk."""
    at_v, inside_v = rows(h, first, end, d.H, d.V, d.BT, d.BV, i_v)
    b_do = tl.trans(load(p_do, at_v, inside_v))
    if p_dv is None:
        at_a, inside_a = rows(h, first, end, d.H, d.BT, d.BT, d.BT)
        b_scores = tl.where(lower(d.BT, 0), load(p_scores, at_a, inside_a), 0.0)
        b_dv_local = product(b_do, b_scores, zeros(d.BV, d.BT), PRECISION)
    else:
        b_dv_local = tl.trans(load(p_dv, at_v, inside_v)).to(tl.float32)
    return b_do, b_dv_local


@triton.jit
def store_gradients(p_dstates, p_dv_new, b_state, b_dv, at_s, inside_s, at_v, inside_v):
    """Store the gradient of a chunk's outgoing state, and dv'; both arguments are transposed."""
    tl.store(p_dstates + at_s, tl.trans(cast(b_state, p_dstates.dtype.element_ty)), mask=inside_s)
    tl.store(p_dv_new + at_v, tl.trans(cast(b_dv, p_dv_new.dtype.element_ty)), mask=inside_v)


@triton.jit
def store_before(p_dinitial, p_local, p_segment, begins, b_state, s, h, i_v, d: tl.constexpr):
    """Store the gradient before a segment, transposed: to p_local, without it to p_dinitial if that is no None and the
    sequence begins with the segment."""
    if p_local is not None:
        at, inside = transposed_at(s * d.H + h, i_v, d)
        tl.store(p_local + at, b_state, mask=inside)
    elif p_dinitial is not None:
        if begins:
            at, inside = transposed_at(tl.load(p_segment + SEQUENCE) * d.H + h, i_v, d)
            tl.store(p_dinitial + at, b_state, mask=inside)


@triton.jit
def adjoint_kernel(
    p_q,  # qg [tokens, H, K]; SCALAR: q [tokens, HK, K]
    p_k,  # kg [tokens, H, K]; SCALAR: k [tokens, HK, K]
    p_w,  # [tokens, H, K]
    p_g,  # float32, see above
    p_do,  # [tokens, H, V]
    p_dv,  # [tokens, H, V]; None: computed from p_scores
    p_scores,  # Aqk [tokens, H, BT]; None with p_dv
    p_solved,  # T - 1 [tokens, H, BT]; or None
    p_segments,  # int32 [NS, SEGMENT_WORDS]
    p_incoming,  # float32 [NS, H, K, V]; in and out, see load_incoming; all from here to p_dinitial may be None
    p_through,  # float32 [NS, H, K, K]; None without an incoming gradient
    p_prev,  # float32 [B, H, K, V]; None without p_through
    p_dstates,  # [NC, H, K, V]; out, the gradient of each chunk's outgoing state
    p_dv_new,  # dv', with p_solved T^T dv' [tokens, H, V]; out
    p_dinitial,  # float32 [N, H, K, V]; out, gradients of the initial states of the sequences that begin here
    p_local,  # float32 [NS, H, K, V]; out, each segment's local gradient, from zero; None with p_incoming
    p_outside,  # float32 [N, H, K, V], gradients of final states; or None
    scale,  # float
    d: tl.constexpr,  # H HK K V BT BK BV BJ SCALAR TOTALS
    PRECISION: tl.constexpr,
):
    """Pass the gradient of the state through the chunks of one segment, from the last to the first; held as by
    delta_states_kernel.

    Without p_incoming it starts from zero, or from p_outside if the sequence ends, and writes the segment's local
    gradient (p_local), unless the sequence begins with the segment. With p_incoming it starts from the segment's
    incoming gradient, and writes p_dstates, p_dv_new and p_dinitial.
    """
    EVERY_CHUNK: tl.constexpr = p_incoming is not None
    i_v, s, h = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    p_segment, start, end, chunk, num_chunks = segment(p_segments, s, d.BT)
    begins = (tl.load(p_segment + FLAGS) & FIRST) != 0
    if not EVERY_CHUNK:
        if begins:
            return
    b_state = gradient_behind(p_incoming, p_through, p_prev, p_outside, p_segment, s, h, i_v, d)
    last = tl.maximum(num_chunks - 1, 0)
    b_decay = chunk_decay(p_g, h, chunk + last, start + last * d.BT, end, d)
    for i in range(loop_bound(num_chunks)):
        n = num_chunks - 1 - i
        first = start + n * d.BT
        following = tl.maximum(n - 1, 0)
        b_next_decay = chunk_decay(p_g, h, chunk + following, start + following * d.BT, end, d)
        at, inside = rows(h, first, end, d.H, d.K, d.BT, d.BK)
        at_k, inside_k = rows(h // (d.H // d.HK), first, end, d.HK, d.K, d.BT, d.BK)
        b_do, b_dv_local = local_gradients(p_do, p_dv, p_scores, h, first, end, i_v, d, PRECISION)
        b_k = tl.trans(load(p_k, at_k, inside_k))
        if d.SCALAR:
            b_before, b_behind = token_decays(p_g, h, first, end, d)
            b_dv = product(b_state, b_k, zeros(d.BV, d.BT), PRECISION) * b_behind[None, :] + b_dv_local
        else:
            b_dv = product(b_state, b_k, b_dv_local, PRECISION)
        if EVERY_CHUNK:
            at_s, inside_s = state_at((chunk + n) * d.H + h, i_v, d.K, d.V, d.BK, d.BV)
            at_v, inside_v = rows(h, first, end, d.H, d.V, d.BT, d.BV, i_v)
            b_out = b_dv
            if p_solved is not None:
                at_a, inside_a = rows(h, first, end, d.H, d.BT, d.BT, d.BT)
                b_out = product(b_dv, load(p_solved, at_a, inside_a), b_dv, PRECISION)
            store_gradients(p_dstates, p_dv_new, b_state, b_out, at_s, inside_s, at_v, inside_v)
        b_state *= b_decay[None, :]
        b_decay = b_next_decay
        if d.SCALAR:
            b_q = load(p_q, at_k, inside_k).to(tl.float32) * (b_before * scale)[:, None]
            b_state = dot_split(b_do, b_q, b_state, PRECISION)
        else:
            b_q = load(p_q, at, inside)
            b_state += scale * product(b_do, b_q, zeros(d.BV, d.BK), PRECISION)
        b_state = product(-b_dv, load(p_w, at, inside), b_state, PRECISION)
    store_before(p_dinitial, p_local, p_segment, begins, b_state, s, h, i_v, d)


@triton.jit
def scalar_gradient_kernel(
    p_q,  # [tokens, HK, K]
    p_k,  # [tokens, HK, K]
    p_v_new,  # [tokens, H, V]
    p_g,  # float32 [tokens, H]
    p_do,  # [tokens, H, V]
    p_dv,  # dv' [tokens, H, V]
    p_states,  # [NC, H, K, V]
    p_dstates,  # [NC, H, K, V]
    p_chunks,  # int32 [NC, 2]
    p_dq,  # [tokens, H, K], per head, since heads share the rows of q and k; out
    p_dk,  # [tokens, H, K], the same; out
    p_dw,  # [tokens, H, K]; out
    p_dg,  # float32 [tokens, H]; out
    scale,  # float
    d: tl.constexpr,  # H HK K V BT BJ BV
    PRECISION: tl.constexpr,
):
    """Gated DeltaNet: gradients of q, k and the gates' sums of one chunk and head, without the terms through w and u;
    their gradients are dw, an output of this kernel, and dv'.

    With S the chunk's incoming state, dS the gradient of its outgoing state, and, for tokens t >= s,
    P_ts = scale * e^(G_t - G_s) (do_t . v_new_s):
        dq = scale * e^G do S^T + P k       dk = e^(G_C - G) v_new dS^T + P^T q       dw = -dv' S^T
        dG = q . dq - k . dk, and at the last token also e^G_C <S, dS> + sum_s k_s . e^(G_C - G_s) v_new_s dS^T
    G and dG are natural logarithms here; p_g holds G times log2(e), as everywhere.
    """
    n, h = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(p_chunks + 2 * n), tl.load(p_chunks + 2 * n + 1)
    t = tl.arange(0, d.BT)
    b_before, b_behind = token_decays(p_g, h, start, end, d)
    at_g = (start + t).to(tl.int64) * d.H + h
    b_g = tl.load(p_g + at_g, mask=start + t < end, other=0.0)
    b_pairs = zeros(d.BT, d.BT)
    for i_v in range((d.V + d.BV - 1) // d.BV):
        at_v, inside_v = rows(h, start, end, d.H, d.V, d.BT, d.BV, i_v)
        b_pairs = product(load(p_do, at_v, inside_v), tl.trans(load(p_v_new, at_v, inside_v)), b_pairs, PRECISION)
    b_pairs *= exp2(tl.minimum(b_g[:, None] - b_g[None, :], 0.0)) * scale
    b_pairs = tl.where(t[:, None] >= t[None, :], b_pairs, 0.0)
    b_dg = zeros(d.BT)
    b_of_states = zeros(d.BT)  # sum over columns of k times the dS term of dk
    b_inner = zeros(d.BJ)  # <S, dS>
    for j in range((d.K + d.BJ - 1) // d.BJ):
        b_dq = zeros(d.BT, d.BJ)
        b_dk = zeros(d.BT, d.BJ)
        b_dw = zeros(d.BT, d.BJ)
        for i_v in range((d.V + d.BV - 1) // d.BV):
            at_v, inside_v = rows(h, start, end, d.H, d.V, d.BT, d.BV, i_v)
            at_s, inside_s = state_at(n * d.H + h, i_v, d.K, d.V, d.BJ, d.BV, j)
            b_state, b_dstate = load(p_states, at_s, inside_s), load(p_dstates, at_s, inside_s)
            b_inner += tl.sum(b_state.to(tl.float32) * b_dstate.to(tl.float32), 1)
            b_dq = product(load(p_do, at_v, inside_v), tl.trans(b_state), b_dq, PRECISION)
            b_dk = product(load(p_v_new, at_v, inside_v), tl.trans(b_dstate), b_dk, PRECISION)
            b_dw = product(load(p_dv, at_v, inside_v), tl.trans(b_state), b_dw, PRECISION)
        at_k, inside_k = rows(h // (d.H // d.HK), start, end, d.HK, d.K, d.BT, d.BJ, j)
        b_q, b_k = load(p_q, at_k, inside_k), load(p_k, at_k, inside_k)
        b_dk *= b_behind[:, None]
        b_of_states += tl.sum(b_dk * b_k.to(tl.float32), 1)
        b_dq = product(b_pairs, b_k, b_dq * (b_before * scale)[:, None], PRECISION)
        b_dk = product(tl.trans(b_pairs), b_q, b_dk, PRECISION)
        b_dg += tl.sum(b_dq * b_q.to(tl.float32) - b_dk * b_k.to(tl.float32), 1)
        at, inside = rows(h, start, end, d.H, d.K, d.BT, d.BJ, j)
        tl.store(p_dq + at, cast(b_dq, p_dq.dtype.element_ty), mask=inside)
        tl.store(p_dk + at, cast(b_dk, p_dk.dtype.element_ty), mask=inside)
        tl.store(p_dw + at, cast(-b_dw, p_dw.dtype.element_ty), mask=inside)
    through = exp2(tl.load(p_g + (end - 1).to(tl.int64) * d.H + h)) * tl.sum(b_inner) + tl.sum(b_of_states)
    b_dg += tl.where(start + t == end - 1, through, 0.0)
    tl.store(p_dg + at_g, b_dg, mask=start + t < end)
