"""Gated linear attention, forward: the chunked form of S_t = diag(exp g_t) S_{t-1} + k_t^T v_t,  o_t = scale * q_t S_t.

The tokens of this rank are cut into segments, and those into chunks of BT tokens. In the order of the data:

    operands_kernel   k_out: every key decayed to the end of its chunk; the sum of the chunk's gates
                      q_in: every query decayed from the beginning of its chunk;
                      A[t, s] = scale * sum_k q_t k_s exp(g_{s+1} + ... + g_t), s <= t in one chunk
    keys_kernel       k_out and the sum of gates alone, before a long scan (GLAPlan); operands_kernel then computes the
                      rest, overlapped with the scan
    state_kernel      each segment alone, from a zero state: its local state, and the sum of its gates
    state_passing_kernel
                      each segment's incoming state from this rank's own tokens; the rank's local state
    scan_kernel       (scan.py) All-Scan of that over the ranks: this rank's incoming state. With ``invariant``
                      gated_segments_kernel (segments.py) replaces state_passing_kernel and scan_kernel
    final_kernel      adds this rank's incoming state, decayed, to the final state of the sequence that it belongs to
    output_kernel     a segment at a time, its state in registers, starting with its incoming state: from this rank's
                      tokens, plus that of the other ranks, decayed:
                      o = A v + scale * q_in S,  then  S = exp(the chunk's gates) S + k_out^T v

In block sizes: rank > piece (of one sequence) > segment (up to 4,096 tokens, or ``invariant``) > chunk (BT = 64 tokens)
> sub-block (BC, strong-decay chunks only); BK and BV columns of K and V, BR tokens a step of keys_kernel, BS columns of
K at a time.

Only operands_kernel, keys_kernel and strong_decay_kernel (gla_strong.py) read the gates of tokens; later kernels read
their sums over chunks and multiply matrices. The scan is a separate kernel because it waits: few programs with few
registers, so that a straggler occupies few resources.

**Exact for every gate.** A decay between two tokens is the exponential of the *sum of the gates between them*, and that
sum adds those gates only: never a difference of two cumulative sums, and never a product of one factor below 1 and one
above. So no gate from 0 to -inf overflows, cancels or loses small terms. The exception is operands_kernel, for chunks
whose gates are so mild that such a product is harmless. This is decided for each chunk; ``strong_decay_kernel`` takes
the other chunks, those of strong decay.

**Sequences.** A piece is this rank's part of one sequence; segments lie inside one piece, chunks inside one segment.
The tables are int32, made by ``allscan/tokens/packing.py``: ``p_segments`` [NS, SEGMENT_WORDS], ``p_chunks`` [NC, 2]
(first token, end), ``p_segments_of_states`` [B, 2]: the first segment and the end of each of the B states that are sent
over the ranks (B is the batch size; 1 for packed sequences; in the zigzag layout twice as many, those of the first
halves first; with per_document=True 2 * carried_states(...), see packing.py). N is the number of
sequences.

Tensors: q, k, g, q_in, k_out [tokens, H, K], v, o [tokens, H, V], A [tokens, H, BT]; a segment's incoming state
[NS, H, K, V] and its gates [NS, H, K], ``prev`` [B, H, K, V], the gates of a chunk [NC, H, K], all float32, the
gates of chunks and segments as logarithms to base 2, g natural; ``p_strong`` [NC, H] int32; ``p_weights`` [3, BT, BT]
bfloat16 (blocks.load_weights).
PRECISION is that of the products' operands: "bf16" for bfloat16 inputs, with TF32 for A, and "tf32x3" for others
(float16 has too small a range for decays). With "tf32x3" all is stored as float32. With "bf16" q_in, k_out and incoming
states of chunks are stored as bfloat16, the states with 8 more bits in a second tensor; A as bfloat16 if only o uses
it and without ``invariant``, else as float32.
Source: ZeCO, arXiv 2507.01004, section 3; GLA, arXiv 2312.06635, section 4.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import (
    HALVES,
    cast,
    dot_split,
    exp2,
    load,
    load_gates,
    load_weights,
    loop_bound,
    lower,
    product,
    rows,
    state_at,
    tf32_product,
    zeros,
)
from .gla_blocks import decayed, load_incoming_state, passed, store_split, weighted_gates
from .segment_table import FIRST, FLAGS, LAST, SEGMENT_WORDS, SEQUENCE, segment, segments_of_state


@triton.jit
def keys_kernel(
    p_k,  # [tokens, H, K]
    p_g,  # [tokens, H, K], natural logarithms
    p_chunks,  # int32 [NC, 2]
    p_k_out,  # [tokens, H, K]; out
    p_gate,  # float32 [NC, H, K]; out
    p_strong,  # int32 [NC, H]; out
    d: tl.constexpr,  # H K BT BR BK RANGE
):
    """For one chunk k_out, the sum of its gates, and whether its decay is strong (below 2 ** -RANGE).

    One warp per 128 columns, BR tokens at a time from the last, in blocks [BK / 4, BR, 4]: the fastest of the tried
    layouts for sums over tokens.
    """
    h, n = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(p_chunks + 2 * n), tl.load(p_chunks + 2 * n + 1)
    k = tl.arange(0, d.BK // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    b_gate = zeros(d.BK // 4, 4)
    for i in tl.static_range(d.BT // d.BR):
        begin = start + d.BT - (i + 1) * d.BR
        t = (begin + tl.arange(0, d.BR))[None, :, None]
        at = (t.to(tl.int64) * d.H + h) * d.K + k[:, None, :]
        columns = (k < d.K)[:, None, :]
        b_g = load_gates(p_g, at + d.H * d.K, (t + 1 < min(end, begin + d.BR)) & columns)  # of the next token
        b_after = tl.cumsum(b_g, 1, reverse=True) + b_gate[:, None, :]
        b_k = load(p_k, at, (t < end) & columns).to(tl.float32)
        tl.store(p_k_out + at, cast(b_k * exp2(b_after), p_k_out.dtype.element_ty), mask=(t < end) & columns)
        b_gate += tl.sum(load_gates(p_g, at, (t < end) & columns), 1)
    tl.store(p_gate + (n * d.H + h) * d.K + k, b_gate, mask=k < d.K)
    tl.store(p_strong + n * d.H + h, (tl.min(b_gate) < -d.RANGE).to(tl.int32))


@triton.jit
def operands_kernel(
    p_q,  # [tokens, H, K]
    p_k,  # [tokens, H, K]
    p_g,  # [tokens, H, K], natural logarithms
    p_chunks,  # int32 [NC, 2]
    p_weights,  # bfloat16 [3, BT, BT], see load_weights
    p_gate,  # float32 [NC, H, K]; out with KEYS
    p_strong,  # int32 [NC, H]; out with KEYS
    p_q_in,  # [tokens, H, K]; out
    p_k_out,  # [tokens, H, K]; out with KEYS
    p_a,  # [tokens, H, BT]; out
    scale,  # float
    d: tl.constexpr,  # H K BT BK RANGE
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """q_in and A of one chunk; with KEYS also the outputs of keys_kernel, which otherwise are inputs.
    strong_decay_kernel writes q_in, k_out and A of strong chunks: with KEYS it runs after this kernel and overwrites
    them, otherwise it has run before, and this kernel skips strong chunks.

    With G the sum of the chunk's gates and b_t half of (the sum of the gates up to t) - (the sum of those behind t)
        A = scale * (q exp2(b)) (k exp2(-b))^T,    q_in = q exp2(b) exp2(G / 2),    k_out = k exp2(-b) exp2(G / 2)
    where no exponent exceeds half of the chunk's range. An absolute error of b, at most RANGE * 2 ** -18 ("bf16"), is a
    relative error of each decay.
    """
    h, n = tl.program_id(0), tl.program_id(1)
    if not KEYS:
        if tl.load(p_strong + n * d.H + h) != 0:
            return
    start, end = tl.load(p_chunks + 2 * n), tl.load(p_chunks + 2 * n + 1)
    b_weights = load_weights(p_weights, HALVES, d.BT)
    b_a = zeros(d.BT, d.BT)
    b_least = zeros(d.BK)
    for i_k in range((d.K + d.BK - 1) // d.BK):
        at, inside = rows(h, start, end, d.H, d.K, d.BT, d.BK, i_k)
        k = i_k * d.BK + tl.arange(0, d.BK)
        b_gates = weighted_gates(b_weights, p_g, at, inside, PRECISION)
        if KEYS:
            b_sum = tl.sum(load_gates(p_g, at, inside), 0)
            tl.store(p_gate + (n * d.H + h) * d.K + k, b_sum, mask=k < d.K)
            b_least = tl.minimum(b_least, b_sum)
        else:
            b_sum = tl.load(p_gate + (n * d.H + h) * d.K + k, mask=k < d.K, other=0.0)
        b_rest = exp2(0.5 * b_sum)[None, :]
        b_k = load(p_k, at, inside).to(tl.float32) * exp2(-b_gates)
        if KEYS:
            tl.store(p_k_out + at, cast(b_k * b_rest, p_k_out.dtype.element_ty), mask=inside)
        b_q = load(p_q, at, inside).to(tl.float32) * exp2(b_gates)
        b_a = tf32_product(b_q, tl.trans(b_k), b_a, PRECISION)
        tl.store(p_q_in + at, cast(b_q * b_rest, p_q_in.dtype.element_ty), mask=inside)
    if KEYS:
        tl.store(p_strong + n * d.H + h, (tl.min(b_least) < -d.RANGE).to(tl.int32))
    at_a, inside_a = rows(h, start, end, d.H, d.BT, d.BT, d.BT)
    b_a = tl.where(lower(d.BT, 0), b_a * scale, 0.0)
    tl.store(p_a + at_a, cast(b_a, p_a.dtype.element_ty), mask=inside_a)


@triton.jit
def state_kernel(
    p_x,  # k_out, REVERSE q_in [tokens, H, K]
    p_y,  # v, REVERSE do [tokens, H, V]
    p_gate,  # float32 [NC, H, K]
    p_segments,  # int32 [NS, SEGMENT_WORDS]
    p_state,  # float32 [NS, H, K, V]; for every chunk [NC, H, K, V] in the storage dtype
    p_low,  # int8 [NC, H, K, V], see store_split; or None
    p_segment_gate,  # float32 [NS, H, K]; None for every chunk
    p_incoming,  # float32 [NS, H, K, V], the segments' incoming states from this rank; None for zeros: see below
    p_edge_gate,  # float32 [NS, H, K]; None without p_incoming
    p_prev,  # float32 [B, H, K, V]; None: p_incoming is all
    p_states,  # like p_state; REVERSE and for every chunk, else None
    p_passed,  # float32 [NC, H, blocks of V, K]; with p_states
    scale,  # float
    d: tl.constexpr,  # H K V BT BK BV
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Pass through the chunks of one segment: BK rows and BV columns of S = decay S + x^T y. Forward (x, y = k_out, v):
    the state. REVERSE (q_in, do), from the last chunk to the first, times scale: the gradient of the state.

    From zero, it writes the segment's local state (p_state) and the sum of its gates (p_segment_gate). For every chunk,
    from the segment's incoming state (p_incoming, p_edge_gate, p_prev), it writes each chunk's incoming state (p_state,
    p_low); REVERSE, it writes output_kernel's p_dstates to p_state and, with p_states and p_low, its p_passed.
    """
    EVERY_CHUNK: tl.constexpr = p_incoming is not None
    V_BLOCKS: tl.constexpr = (d.V + d.BV - 1) // d.BV
    i_k, i_v = tl.program_id(0) // V_BLOCKS, tl.program_id(0) % V_BLOCKS
    h, s = tl.program_id(1), tl.program_id(2)
    p_segment, start, end, chunk, num_chunks = segment(p_segments, s, d.BT)
    k = i_k * d.BK + tl.arange(0, d.BK)
    b_state = zeros(d.BK, d.BV)
    if EVERY_CHUNK:
        b_state = load_incoming_state(
            p_incoming, p_edge_gate, p_prev, p_segment, s, h, i_v, d.H, d.K, d.V, d.BK, d.BV, i_k
        )
        if REVERSE:
            b_state = b_state / scale
    b_gates = zeros(d.BK)
    for i in range(loop_bound(num_chunks)):
        n = num_chunks - 1 - i if REVERSE else i
        row = (chunk + n) * d.H + h
        at_k, inside_k = rows(h, start + n * d.BT, end, d.H, d.K, d.BT, d.BK, i_k)
        at_v, inside_v = rows(h, start + n * d.BT, end, d.H, d.V, d.BT, d.BV, i_v)
        b_gate = tl.load(p_gate + row * d.K + k, mask=k < d.K, other=0.0)
        if EVERY_CHUNK:
            at, inside = state_at(row, i_v, d.K, d.V, d.BK, d.BV, i_k)
            if REVERSE:
                tl.store(p_state + at, cast(b_state * scale, p_state.dtype.element_ty), mask=inside)
                b_passed = passed(b_state, b_gate, p_states, p_low, at, inside, PRECISION) * scale
                tl.store(p_passed + (row * V_BLOCKS + i_v) * d.K + k, b_passed, mask=k < d.K)
            else:
                store_split(p_state, p_low, at, inside, b_state, PRECISION)
        b_x, b_y = load(p_x, at_k, inside_k), load(p_y, at_v, inside_v)
        b_state = product(tl.trans(b_x), b_y, b_state * exp2(b_gate)[:, None], PRECISION)
        b_gates += b_gate
    if not EVERY_CHUNK:
        at, inside = state_at(s * d.H + h, i_v, d.K, d.V, d.BK, d.BV, i_k)
        tl.store(p_state + at, b_state * scale if REVERSE else b_state, mask=inside)
        if i_v == 0:
            tl.store(p_segment_gate + (s * d.H + h) * d.K + k, b_gates, mask=k < d.K)


@triton.jit
def _block_of_state(d: tl.constexpr):
    """Return this program's block of a state [K, V]: (rows, mask, offsets)."""
    k, v = tl.program_id(0) * d.BK + tl.arange(0, d.BK), tl.program_id(1) * d.BV + tl.arange(0, d.BV)
    return k, (k < d.K)[:, None] & (v < d.V)[None, :], k[:, None] * d.V + v[None, :]


@triton.jit
def state_passing_kernel(
    p_state,  # float32 [NS, H, K, V]; in, each segment's local state; out, its incoming state from this rank's tokens
    p_segment_gate,  # float32 [NS, H, K]
    p_edge_gate,  # float32 [NS, H, K]; out
    p_segments,  # int32 [NS, SEGMENT_WORDS]
    p_segments_of_states,  # int32 [B, 2]; first segment and end of each state
    p_outside,  # float32 [N, H, K, V], the states at the beginning of each sequence; None for zeros
    p_own,  # float32 [B, H, K, V]; out, this rank's local state
    p_decay,  # float32 [B, H, K]; out, the decay of its incoming state
    p_final,  # float32 [N, H, K, V]; out, the states at the end of each sequence that ends here; or None
    d: tl.constexpr,  # H K V BK BV
    REVERSE: tl.constexpr,
):
    """Pass the states through this rank's segments; one program for BK rows and BV columns of a sent state and head.

    p_edge_gate: the summed gates from this rank's edge to each segment, the decay of the rank's incoming state; -inf
    for segments that it does not reach. Inputs of the scan over the ranks: p_own, p_decay. REVERSE: gradients, from
    the ends to the beginnings.
    """
    i = tl.program_id(2)
    index, h = i // d.H, i % d.H
    k, inside, offsets = _block_of_state(d)
    s_first, s_end = segments_of_state(p_segments_of_states, index)
    BEGIN: tl.constexpr = LAST if REVERSE else FIRST
    FINISH: tl.constexpr = FIRST if REVERSE else LAST

    b_own = zeros(d.BK, d.BV)
    b_gates = zeros(d.BK)  # since this rank's edge; -inf once a sequence begins or ends here
    for n in tl.range(0, loop_bound(s_end - s_first), num_stages=4):  # loads 3 segments ahead
        s = s_end - 1 - n if REVERSE else s_first + n
        row = (s * d.H + h).to(tl.int64)
        flags = tl.load(p_segments + s * SEGMENT_WORDS + FLAGS)
        sequence = tl.load(p_segments + s * SEGMENT_WORDS + SEQUENCE).to(tl.int64)
        b_local = tl.load(p_state + row * (d.K * d.V) + offsets, mask=inside, other=0.0)
        b_gate = tl.load(p_segment_gate + row * d.K + k, mask=k < d.K, other=0.0)  # [BK]
        begins = (flags & BEGIN) != 0
        if p_outside is not None:
            p_begin = p_outside + (sequence * d.H + h) * (d.K * d.V) + offsets
            b_own = tl.where(begins, tl.load(p_begin, mask=inside & begins, other=0.0), b_own)
        b_gates = tl.where(begins, float("-inf"), b_gates)
        tl.store(p_state + row * (d.K * d.V) + offsets, b_own, mask=inside)
        tl.store(p_edge_gate + row * d.K + k, b_gates, mask=k < d.K)
        b_own = b_own * exp2(b_gate)[:, None] + b_local
        b_gates += b_gate
        if (flags & FINISH) != 0:
            if p_final is not None:
                tl.store(p_final + (sequence * d.H + h) * (d.K * d.V) + offsets, b_own, mask=inside)
            b_own = zeros(d.BK, d.BV)
            b_gates = tl.full([d.BK], float("-inf"), tl.float32)
    tl.store(p_own + i.to(tl.int64) * (d.K * d.V) + offsets, b_own, mask=inside)
    tl.store(p_decay + i * d.K + k, exp2(b_gates), mask=k < d.K)


@triton.jit
def final_kernel(
    p_final,  # float32 [N, H, K, V]; in and out
    p_segment_gate,  # float32 [NS, H, K]
    p_edge_gate,  # float32 [NS, H, K], as state_passing_kernel writes it
    p_segments,  # int32 [NS, SEGMENT_WORDS]
    p_segments_of_states,  # int32 [B, 2]; first segment and end of each state
    p_prev,  # float32 [B, H, K, V]
    d: tl.constexpr,  # H K V BK BV
    REVERSE: tl.constexpr,
):
    """Add this rank's incoming state (p_prev) to the final state of its sequence, if the sequence ends on this rank,
    at the first segment with the flag FINISH. Arguments and programs as in state_passing_kernel."""
    i = tl.program_id(2)
    index, h = i // d.H, i % d.H
    k, inside, offsets = _block_of_state(d)
    s_first, s_end = segments_of_state(p_segments_of_states, index)
    FINISH: tl.constexpr = FIRST if REVERSE else LAST
    n = 0
    while n < s_end - s_first:
        s = s_end - 1 - n if REVERSE else s_first + n
        if (tl.load(p_segments + s * SEGMENT_WORDS + FLAGS) & FINISH) != 0:
            row = (s * d.H + h).to(tl.int64) * d.K
            b_gates = tl.load(p_edge_gate + row + k, mask=k < d.K, other=0.0)
            b_gates += tl.load(p_segment_gate + row + k, mask=k < d.K, other=0.0)
            sequence = tl.load(p_segments + s * SEGMENT_WORDS + SEQUENCE).to(tl.int64)
            p_end = p_final + (sequence * d.H + h) * (d.K * d.V) + offsets
            b_prev = tl.load(p_prev + i.to(tl.int64) * (d.K * d.V) + offsets, mask=inside, other=0.0)
            b_end = tl.load(p_end, mask=inside, other=0.0)
            tl.store(p_end, decayed(b_end, b_gates, b_prev), mask=inside)
            n = s_end - s_first
        n += 1


@triton.jit
def output_kernel(
    p_x,  # k_out, REVERSE q_in [tokens, H, K]
    p_y,  # v, REVERSE do [tokens, H, V]
    p_z,  # q_in, REVERSE k_out [tokens, H, K]
    p_a,  # A [tokens, H, BT]
    p_gate,  # float32 [NC, H, K]
    p_segments,  # int32 [NS, SEGMENT_WORDS]
    p_incoming,  # float32 [NS, H, K, V], the segments' incoming states from this rank
    p_edge_gate,  # float32 [NS, H, K]
    p_prev,  # float32 [B, H, K, V]; None: p_incoming is all
    p_o,  # o, REVERSE dv [tokens, H, V]
    p_states,  # [NC, H, K, V], the chunks' incoming states; this and the next three are None in forward
    p_low,  # int8 [NC, H, K, V], see load_split (gla_blocks.py); or None
    p_dstates,  # [NC, H, K, V]; out
    p_passed,  # float32 [NC, H, blocks of V, K]; out
    scale,  # float
    d: tl.constexpr,  # H K V BT BK BV
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Pass through the chunks of one segment, from its incoming state: o = A y + scale * z S, then S = decay S + x^T y.

    Forward: x, y, z = k_out, v, q_in. REVERSE, from the last chunk to the first: x, y, z = q_in, do, k_out, A
    transposed, o is dv, and scale * S the gradient D of the chunk's outgoing state, which is written to p_dstates. With
    the chunk's incoming state (p_states and p_low) p_passed becomes decay * sum_v D * states: the state-to-state term
    of dg. For K above 128 a program's part of the state does not fit into registers with these: state_kernel and
    value_grad_kernel (gla_bwd.py) are used instead.
    """
    i_v, h, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    p_segment, start, end, chunk, num_chunks = segment(p_segments, s, d.BT)
    k = tl.arange(0, d.BK)
    b_state = load_incoming_state(p_incoming, p_edge_gate, p_prev, p_segment, s, h, i_v, d.H, d.K, d.V, d.BK, d.BV)
    if REVERSE:
        b_state = b_state / scale
    for i in range(loop_bound(num_chunks)):
        n = num_chunks - 1 - i if REVERSE else i
        at_k, inside_k = rows(h, start + n * d.BT, end, d.H, d.K, d.BT, d.BK)
        at_v, inside_v = rows(h, start + n * d.BT, end, d.H, d.V, d.BT, d.BV, i_v)
        at_a, inside_a = rows(h, start + n * d.BT, end, d.H, d.BT, d.BT, d.BT)
        row = (chunk + n) * d.H + h
        b_gate = tl.load(p_gate + row * d.K + k, mask=k < d.K, other=0.0)
        b_a, b_y, b_z = load(p_a, at_a, inside_a), load(p_y, at_v, inside_v), load(p_z, at_k, inside_k)
        if REVERSE:
            at, inside = state_at(row, i_v, d.K, d.V, d.BK, d.BV)
            b_passed = passed(b_state, b_gate, p_states, p_low, at, inside, PRECISION) * scale
            tl.store(p_dstates + at, cast(b_state * scale, p_dstates.dtype.element_ty), mask=inside)
            tl.store(p_passed + (row * ((d.V + d.BV - 1) // d.BV) + i_v) * d.K + k, b_passed, mask=k < d.K)
            b_a = tl.trans(b_a)
        b_o = product(b_z, b_state, zeros(d.BT, d.BV), PRECISION) * scale
        b_o = dot_split(b_a, b_y, b_o, PRECISION)
        tl.store(p_o + at_v, cast(b_o, p_o.dtype.element_ty), mask=inside_v)
        b_x = load(p_x, at_k, inside_k)
        b_state = product(tl.trans(b_x), b_y, b_state * exp2(b_gate)[:, None], PRECISION)
