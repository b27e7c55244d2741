"""Gated linear attention, forward: the chunked form of S_t = diag(exp g_t) S_{t-1} + k_t^T v_t,  o_t = scale * q_t S_t.

The tokens of this rank are cut into segments, and those into chunks of BT tokens. In the order the data moves:

    state_kernel    each segment alone, from a zero state: what it leaves, and the sum of its gates
    carry_kernel    what enters each segment from this rank's own tokens; All-Scan of the rank's state over the ranks
    intra_kernel    A[t, s] = scale * sum_k q_t k_s exp(g_{s+1} + ... + g_t), s <= t in one chunk; nothing remote
    output_kernel   a segment at a time, its state in registers, beginning with what enters it from this rank and,
                    decayed, from the others:  o = A v + scale * (q exp(sum of g up to t)) S

intra_kernel needs nothing remote: it runs while carry_kernel's tiles travel.

**Exact for every gate.** A decay between two places is the exponential of the *sum of the gates between them*, and that
sum is formed by adding those gates only: never as a difference of two cumulative sums, and never as a product of one
factor below 1 and one above. So no gate from 0 to -inf overflows, cancels or loses the small terms. The exception is a
chunk whose gates are so mild that such a product is harmless (``relative_gates``); this is decided chunk by chunk.

**Sequences.** A piece is what this rank has of one sequence; segments lie inside one piece, chunks inside one segment.
The tables are int32, made by ``allscan/layout.py``: ``p_segments`` [NS, SEGMENT_WORDS], ``p_chunks`` [NC, 2] (first
token, end), ``p_slots`` [slots + 1]: the segments of each slot, a slot being one state that travels over the ranks.

Tensors: q, k, g [tokens, H, K], v, o [tokens, H, V]; states [NS, H, K, V] and gates [NS, H, K] float32, ``prev``
[slots, H, K, V] float32; A [tokens, H, BT] float32. PRECISION is that of the products' operands: "bf16" for
bfloat16 inputs, "tf32x3" for others (float16 could not hold the small end of a decay).
Source: ZeCO, arXiv 2507.01004, section 3; GLA, arXiv 2312.06635, section 4.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import core

from .channel import allscan, builtin
from .scan import tile_place

# Words of a segment
START = tl.constexpr(0)  # its first token
END = tl.constexpr(1)  # behind its last token
CHUNK = tl.constexpr(2)  # its first chunk
SLOT = tl.constexpr(3)
SEQUENCE = tl.constexpr(4)  # row of initial_state and final_state
FLAGS = tl.constexpr(5)  # FIRST, LAST
SEGMENT_WORDS = tl.constexpr(6)
FIRST = tl.constexpr(1)  # its sequence begins with this segment
LAST = tl.constexpr(2)  # its sequence ends with this segment


@builtin
def count(n, _semantic=None):
    """``n`` as the bound of a loop: the interpreter wants a Python number."""
    return int(n.handle.data.item()) if _semantic is None else n


@builtin
def cast(x, dtype, _semantic=None):
    """``x`` in another float type, rounded to nearest: the interpreter's own conversion to bfloat16 cuts off."""
    dtype = core._unwrap_if_constexpr(dtype)
    if _semantic is not None:
        return x.to(dtype, _semantic=_semantic)
    if dtype == tl.bfloat16 and x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
        x = (bits + ((bits >> 16) & 1) + 0x7FFF).to(tl.float32, bitcast=True)
    return x.to(dtype)


@builtin
def operand(x, dtype, _semantic=None):
    """``x`` as an operand of a product in ``dtype``: rounded to it; the interpreter can only multiply it as float32."""
    if _semantic is not None:
        return x.to(core._unwrap_if_constexpr(dtype), _semantic=_semantic)
    return cast(x, dtype).to(tl.float32)


@triton.jit
def product(b_x, b_y, b_sum, PRECISION: tl.constexpr):
    """x y + sum; sum is float32."""
    if PRECISION == "bf16":
        return tl.dot(operand(b_x, tl.bfloat16), operand(b_y, tl.bfloat16), b_sum)
    else:
        return tl.dot(b_x.to(tl.float32), b_y.to(tl.float32), b_sum, input_precision=PRECISION)


@triton.jit
def fine_product(b_x, b_y, b_sum, PRECISION: tl.constexpr):
    """``product``, but a float32 operand counts as the sum of two in bfloat16, which hold 16 bits of it."""
    b_sum = product(b_x, b_y, b_sum, PRECISION)
    if PRECISION == "bf16":
        if b_x.dtype == tl.float32:
            b_sum = product(b_x - operand(b_x, tl.bfloat16).to(tl.float32), b_y, b_sum, PRECISION)
        if b_y.dtype == tl.float32:
            b_sum = product(b_x, b_y - operand(b_y, tl.bfloat16).to(tl.float32), b_sum, PRECISION)
    return b_sum


@triton.jit
def rows(h, start, end, H: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr, i_w=0):
    """Where tokens start .. start + BT of head h lie in a tensor [tokens, H, W], columns i_w * BW .. + BW.

    Returns [BT, BW]: offsets; which of them are before ``end``; for which the next token is, and in the block too.
    """
    t = start + tl.arange(0, BT)
    w = i_w * BW + tl.arange(0, BW)
    offsets = (t.to(tl.int64) * H + h)[:, None] * W + w[None, :]
    columns = (w < W)[None, :]
    return offsets, (t < end)[:, None] & columns, (t + 1 < min(end, start + BT))[:, None] & columns


@triton.jit
def load_gates(p_g, at, inside, PRECISION: tl.constexpr):
    """Gates [BT, BK] in float32. Products of 16-bit operands take what is below -128 for -128: its decay is 0 too."""
    b_g = tl.load(p_g + at, mask=inside, other=0.0).to(tl.float32)
    return tl.maximum(b_g, -128.0) if PRECISION == "bf16" else b_g


@triton.jit
def gates_after(p_g, b_g, at, has_next, H: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr):
    """For each token of a block, the sum of the gates of the block's later tokens."""
    if PRECISION == "bf16":
        return tl.cumsum(b_g, 0, reverse=True) - b_g  # wrong by 2**-24 of the sum: far below the operand's rounding
    else:
        return tl.cumsum(tl.load(p_g + at + H * K, mask=has_next, other=0.0).to(tl.float32), 0, reverse=True)


@triton.jit
def state_at(i_state, i_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, i_k=0):
    """(offsets, mask) [BK, BV] of one of many [K, V] matrices: rows i_k * BK .. + BK, columns i_v * BV .. + BV."""
    k = i_k * BK + tl.arange(0, BK)
    v = i_v * BV + tl.arange(0, BV)
    return i_state.to(tl.int64) * (K * V) + k[:, None] * V + v[None, :], (k < K)[:, None] & (v < V)[None, :]


@triton.jit
def decayed(b_own, b_gates, b_prev):
    """own + exp(gates) * prev; where the decay is 0 nothing passes, not even Inf or NaN."""
    b_decay = tl.exp(b_gates)[:, None]
    return b_own + tl.where(b_decay == 0.0, 0.0, b_decay * b_prev)


@triton.jit
def entering(
    p_state, p_gates, p_prev, p_segment, s, h, i_v,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The state that enters a segment [BK, BV]: from this rank's tokens, and from the other ranks."""
    k = tl.arange(0, BK)
    b_gates = tl.load(p_gates + (s * H + h) * K + k, mask=k < K, other=0.0)
    at, inside = state_at(s * H + h, i_v, K, V, BK, BV)
    b_own = tl.load(p_state + at, mask=inside, other=0.0)
    at, inside = state_at(tl.load(p_segment + SLOT) * H + h, i_v, K, V, BK, BV)
    return decayed(b_own, b_gates, tl.load(p_prev + at, mask=inside, other=0.0))


@triton.jit
def state_kernel(
    p_x, p_y, p_g, p_segments, p_state, p_gate, p_own, p_gates, p_prev, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    REVERSE: tl.constexpr, EVERY_CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Through the chunks of one segment. Forward (x, y = k, v): the state. REVERSE (x, y = q, do), from the last chunk
    to the first: the gradient of the state, which decays up to each token instead of after it.

    From zero, it writes what the segment leaves (p_state [NS, H, K, V]) and the sum of its gates (p_gate [NS, H, K]).
    EVERY_CHUNK: from what enters the segment (p_own, p_gates, p_prev), it writes what enters each chunk (p_state
    [NC, H, K, V]; REVERSE: the gradient of what leaves it).
    """
    i_v, s, h = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    p_segment = p_segments + s * SEGMENT_WORDS
    start, end = tl.load(p_segment + START), tl.load(p_segment + END)
    chunk = tl.load(p_segment + CHUNK)
    num_chunks = (end - start + BT - 1) // BT
    factor = scale if REVERSE else 1.0  # of the products' sum, not of an operand, which would round it
    b_state = tl.zeros([BK, BV], tl.float32)
    if EVERY_CHUNK:
        b_state = entering(p_own, p_gates, p_prev, p_segment, s, h, i_v, H, K, V, BK, BV) / factor
    b_gates = tl.zeros([BK], tl.float32)
    for i in range(count(num_chunks)):
        n = num_chunks - 1 - i if REVERSE else i
        at_k, inside_k, has_next = rows(h, start + n * BT, end, H, K, BT, BK)
        at_v, inside_v, _ = rows(h, start + n * BT, end, H, V, BT, BV, i_v)
        b_x = tl.load(p_x + at_k, mask=inside_k, other=0.0).to(tl.float32)  # [BT, BK]
        b_y = tl.load(p_y + at_v, mask=inside_v, other=0.0)  # [BT, BV]
        b_g = load_gates(p_g, at_k, inside_k, PRECISION)  # [BT, BK]
        if REVERSE:
            b_x *= tl.exp(tl.cumsum(b_g, 0))
        else:
            b_x *= tl.exp(gates_after(p_g, b_g, at_k, has_next, H, K, PRECISION))
        if EVERY_CHUNK:
            at, inside = state_at((chunk + n) * H + h, i_v, K, V, BK, BV)
            tl.store(p_state + at, b_state * factor, mask=inside)
        b_gate = tl.sum(b_g, 0)
        b_state = fine_product(tl.trans(b_x), b_y, b_state * tl.exp(b_gate)[:, None], PRECISION)
        b_gates += b_gate
    if not EVERY_CHUNK:
        at, inside = state_at(s * H + h, i_v, K, V, BK, BV)
        tl.store(p_state + at, b_state * factor, mask=inside)
        if i_v == 0:
            k = tl.arange(0, BK)
            tl.store(p_gate + (s * H + h) * K + k, b_gates, mask=k < K)


@triton.jit
def carry_kernel(
    p_state, p_gate, p_gates, p_segments, p_slots, p_outside, p_prev, p_final, channel,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    HAS_OUTSIDE: tl.constexpr, HAS_FINAL: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """The states through this rank's segments and over the ranks; one program, one tile of one slot and head.

    p_state [NS, H, K, V]: in, what each segment leaves; out, what enters it from this rank's tokens. p_gates
    [NS, H, K]: out, the gates by which what enters this rank decays up to there, -inf where it does not get there.
    p_prev [slots, H, K, V]: out, what enters this rank. p_outside: the states at the beginning of each sequence.
    p_final: out, those at the end of each sequence that ends here. REVERSE: gradients, from the ends to the beginnings.
    """
    tile = tl.program_id(0)
    i, k, v = tile_place(channel, tile, K, V)
    slot, h = i // H, i % H
    inside = (k < K)[:, None] & (v < V)[None, :]
    offsets = k[:, None] * V + v[None, :]
    s_first, s_end = tl.load(p_slots + slot), tl.load(p_slots + slot + 1)
    BEGIN: tl.constexpr = LAST if REVERSE else FIRST
    FINISH: tl.constexpr = FIRST if REVERSE else LAST

    b_own = tl.zeros([channel.BK, channel.BV], tl.float32)
    b_gates = tl.zeros([channel.BK], tl.float32)  # since this rank's edge; -inf once a sequence begins or ends here
    b_end, b_end_gates, ended = b_own, b_gates, s_first * 0 - 1  # the end of the sequence that comes from outside
    for n in range(count(s_end - s_first)):
        s = s_end - 1 - n if REVERSE else s_first + n
        row = (s * H + h).to(tl.int64)
        flags = tl.load(p_segments + s * SEGMENT_WORDS + FLAGS)
        sequence = tl.load(p_segments + s * SEGMENT_WORDS + SEQUENCE)
        b_leaves = tl.load(p_state + row * (K * V) + offsets, mask=inside, other=0.0)
        b_gate = tl.load(p_gate + row * K + k, mask=k < K, other=0.0)  # [BK]
        begins = (flags & BEGIN) != 0
        if HAS_OUTSIDE:
            p_begin = p_outside + (sequence * H + h) * (K * V) + offsets
            b_own = tl.where(begins, tl.load(p_begin, mask=inside & begins, other=0.0), b_own)
        b_gates = tl.where(begins, float("-inf"), b_gates)
        tl.store(p_state + row * (K * V) + offsets, b_own, mask=inside)
        tl.store(p_gates + row * K + k, b_gates, mask=k < K)
        b_own = b_own * tl.exp(b_gate)[:, None] + b_leaves
        b_gates += b_gate
        if (flags & FINISH) != 0:
            if HAS_FINAL:
                tl.store(p_final + (sequence * H + h) * (K * V) + offsets, b_own, mask=inside)
                if ended < 0:
                    b_end, b_end_gates, ended = b_own, b_gates, sequence
            b_own = tl.zeros([channel.BK, channel.BV], tl.float32)
            b_gates = tl.full([channel.BK], float("-inf"), tl.float32)

    b_prev, _ = allscan(channel, tile, b_own, tl.exp(b_gates)[:, None], tl.zeros_like(b_own))
    tl.store(p_prev + i * (K * V) + offsets, b_prev, mask=inside)
    if HAS_FINAL:
        if ended >= 0:
            p_end = p_final + (ended * H + h) * (K * V) + offsets
            tl.store(p_end, decayed(b_end, b_end_gates, b_prev), mask=inside)


@triton.jit
def relative_gates(b_g, RANGE: tl.constexpr):
    """(cumulative gates [BT, BK] less half of their sum, whether no decay of the chunk is below exp(-RANGE)).

    Where the second is true, exp(b_i - b_j) may be formed as a product of exp(b_i) and exp(-b_j), both within
    exp(RANGE / 2); the rounding of the sums is an error of at most RANGE * 2**-24 of each decay.
    """
    b_gates = tl.cumsum(b_g, 0)
    return b_gates - 0.5 * tl.sum(b_g, 0)[None, :], tl.min(b_gates) >= -RANGE


@triton.jit
def intra_kernel(
    p_q, p_k, p_g, p_chunks, p_a, scale,
    H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr,
    RANGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A of one chunk, on and below the diagonal: in one product where its gates allow that, else by sub-blocks."""
    n, h = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(p_chunks + 2 * n), tl.load(p_chunks + 2 * n + 1)
    at, inside, _ = rows(h, start, end, H, K, BT, BK)
    b_g, narrow = relative_gates(load_gates(p_g, at, inside, PRECISION), RANGE)
    if narrow:
        b_q = tl.load(p_q + at, mask=inside, other=0.0).to(tl.float32) * tl.exp(b_g) * scale  # [BT, BK]
        b_k = tl.load(p_k + at, mask=inside, other=0.0).to(tl.float32) * tl.exp(-b_g)
        at_a, inside_a, no_next = rows(h, start, end, H, BT, BT, BT)
        b_a = fine_product(b_q, tl.trans(b_k), tl.zeros([BT, BT], tl.float32), PRECISION)
        tl.store(p_a + at_a, b_a, mask=inside_a & lower(BT, 0))
    else:
        for i in range(BT // BC):
            _intra_rows(p_q, p_k, p_g, p_a, h, start, end, i, scale, H, K, BT, BC, BK, BS, PRECISION)


@triton.jit
def lower(BT: tl.constexpr, DISTANCE: tl.constexpr):
    """[BT, BT]: whether the row is at least DISTANCE after the column."""
    return tl.arange(0, BT)[:, None] >= tl.arange(0, BT)[None, :] + DISTANCE


@triton.jit
def _intra_rows(
    p_q, p_k, p_g, p_a, h, chunk_start, end, i_sub, scale,
    H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A for BC tokens of a chunk (a sub-block) against the sub-blocks up to its own, for any gates."""
    start = chunk_start + i_sub * BC
    at_a, inside_a, _ = rows(h, start, end, H, BT, BC, BC)

    # Its own sub-block, every pair by itself; BS columns of K at a time
    b_a = tl.zeros([BC, BC], tl.float32)
    for i_s in tl.static_range(BK // BS):
        at, inside, _ = rows(h, start, end, H, K, BC, BS, i_s)
        b_q = tl.load(p_q + at, mask=inside, other=0.0).to(tl.float32)  # [BC, BS]
        b_k = tl.load(p_k + at, mask=inside, other=0.0).to(tl.float32)
        b_g = load_gates(p_g, at, inside, PRECISION)
        b_decay = tl.exp(tl.cumsum(tl.where(lower(BC, 1)[:, :, None], b_g[:, None, :], 0.0), 0))  # [BC, BC, BS]
        b_a += tl.sum(b_q[:, None, :] * b_k[None, :, :] * b_decay, 2)
    tl.store(p_a + at_a + i_sub * BC, b_a * scale, mask=inside_a)

    # Earlier sub-blocks, nearest first, which are whole; b_between: the gates of the sub-blocks in between
    at, inside, _ = rows(h, start, end, H, K, BC, BK)
    b_qi = tl.load(p_q + at, mask=inside, other=0.0).to(tl.float32)  # [BC, BK]
    b_qi *= tl.exp(tl.cumsum(load_gates(p_g, at, inside, PRECISION), 0)) * scale
    at, whole, has_next = rows(h, start - BC, end, H, K, BC, BK)
    b_between = tl.zeros([BK], tl.float32)
    j = i_sub - 1
    while j >= 0:
        b_kj = tl.load(p_k + at, mask=whole, other=0.0).to(tl.float32)
        b_gj = load_gates(p_g, at, whole, PRECISION)
        b_kj *= tl.exp(gates_after(p_g, b_gj, at, has_next, H, K, PRECISION) + b_between[None, :])
        b_aij = fine_product(b_qi, tl.trans(b_kj), tl.zeros([BC, BC], tl.float32), PRECISION)
        tl.store(p_a + at_a + j * BC, b_aij, mask=inside_a)
        b_between += tl.sum(b_gj, 0)
        at -= BC * H * K
        j -= 1


@triton.jit
def load_causal(p_a, h, start, end, H: tl.constexpr, BT: tl.constexpr):
    """[BT, BT] of one chunk from [tokens, H, BT], 0 above the diagonal."""
    at, inside, _ = rows(h, start, end, H, BT, BT, BT)
    return tl.load(p_a + at, mask=inside & lower(BT, 0), other=0.0)


@triton.jit
def output_kernel(
    p_q, p_k, p_v, p_g, p_a, p_segments, p_state, p_gates, p_prev, p_o, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """o of one segment: chunk by chunk, what the state gives and what the chunk's own tokens give."""
    i_v, s, h = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    p_segment = p_segments + s * SEGMENT_WORDS
    start, end = tl.load(p_segment + START), tl.load(p_segment + END)
    b_state = entering(p_state, p_gates, p_prev, p_segment, s, h, i_v, H, K, V, BK, BV)
    for n in range(count((end - start + BT - 1) // BT)):
        at_k, inside_k, has_next = rows(h, start + n * BT, end, H, K, BT, BK)
        at_v, inside_v, _ = rows(h, start + n * BT, end, H, V, BT, BV, i_v)
        b_g = load_gates(p_g, at_k, inside_k, PRECISION)  # [BT, BK]
        b_q = tl.load(p_q + at_k, mask=inside_k, other=0.0).to(tl.float32) * tl.exp(tl.cumsum(b_g, 0))
        b_v = tl.load(p_v + at_v, mask=inside_v, other=0.0)  # [BT, BV]
        b_o = product(b_q, b_state, tl.zeros([BT, BV], tl.float32), PRECISION) * scale
        b_o = fine_product(load_causal(p_a, h, start + n * BT, end, H, BT), b_v, b_o, PRECISION)
        tl.store(p_o + at_v, cast(b_o, p_o.dtype.element_ty), mask=inside_v)
        b_k = tl.load(p_k + at_k, mask=inside_k, other=0.0).to(tl.float32)
        b_k *= tl.exp(gates_after(p_g, b_g, at_k, has_next, H, K, PRECISION))
        b_state = product(tl.trans(b_k), b_v, b_state * tl.exp(tl.sum(b_g, 0))[:, None], PRECISION)
