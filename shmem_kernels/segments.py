"""The scan over segments: a rank has n consecutive segments, and each gets its incoming state.

    R' = decay_s * R + state_s        or        R' = transition_s R + state_s

A tile's state R arrives from the rank before, passes this rank's segments in registers, and is sent to the next rank.
Every segment is folded by the same function, in the order of the sequence, wherever it lies. A link's change of a state
(no -0.0 is sent) is applied at every segment boundary. So the bits do not depend on the rank boundaries: one rank runs
the same kernels, without waits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import exp2, loop_bound
from .channel import begin, finish, receive
from .links import NONE, SENTINEL_BITS, post
from .segment_table import END, FIRST, FLAGS, LAST, SEGMENT_WORDS, SEQUENCE, START, segments_of_state
from .tiles import load_tile, tile_offsets, tile_place

# EXTERNAL: the meaning of p_external [G, K, V]
NOTHING = tl.constexpr(0)
INITIAL = tl.constexpr(1)  # the state before the very first segment, on the first rank
ADDED = tl.constexpr(2)  # added to the received state


@triton.jit
def without_negative_zero(b_state):
    """Return the state as a link would deliver it: see links.post."""
    b_words = b_state.to(tl.int32, bitcast=True)
    return tl.where(b_words == SENTINEL_BITS, 0, b_words).to(tl.float32, bitcast=True)


@triton.jit
def fold(b_state, b_decay, b_prev):
    """Return the state after a segment, of the segment's state and decay and the state before it: [BK, BV] float32,
    ``b_decay`` broadcastable. One rounding, in every kernel. A decay of 0 discards the state before, even Inf or
    NaN."""
    b_decay = b_decay + tl.zeros_like(b_prev)
    b_next = tl.where(b_decay == 0.0, b_state, tl.fma(b_decay, b_prev, b_state))
    return without_negative_zero(b_next)


@triton.jit
def _place(i, n, MATRICES: tl.constexpr, DESCENDING: tl.constexpr):
    """Return (the first matrix of the i-th segment in the order of the scan, whether it exists)."""
    s = n - 1 - i if DESCENDING else n * 0 + i
    return s.to(tl.int64) * MATRICES, i < n


@triton.jit
def _load_segment(
    p_states, p_decays, channel, tile, place, strides, K: tl.constexpr, V: tl.constexpr, HAS_DECAY: tl.constexpr
):
    """Load the state [BK, BV] and decays [BK, 1] of a tile of a segment; 0 and 1 without a segment."""
    matrix, there = place
    stride_g, stride_k = strides
    offsets, inside = tile_offsets(channel, tile, K, V)
    b_state = tl.load(p_states + matrix * (K * V) + offsets, mask=inside & there, other=0.0)
    b_decay = tl.full([channel.BK, 1], 1.0, tl.float32)
    if HAS_DECAY:
        g, k, _ = tile_place(channel, tile, K, V)
        at = (matrix + g) * stride_g + k * stride_k
        b_decay = tl.load(p_decays + at, mask=(k < K) & there, other=1.0)[:, None]
    return b_state, b_decay


@triton.jit
def _entered(channel, tile, begun, p_external, K: tl.constexpr, V: tl.constexpr, EXTERNAL: tl.constexpr):
    """Return (the state before this rank's first segment, whether all is well)."""
    epoch, word, ok = begun
    b_first = tl.zeros([channel.BK, channel.BV], tl.float32)
    b_external = b_first
    if EXTERNAL != NOTHING:
        b_external = load_tile(p_external, channel, tile, K, V)
    if EXTERNAL == INITIAL:
        b_first = b_external
    b_prev, ok = receive(channel, tile, epoch, word, ok, b_first)
    if EXTERNAL == ADDED:
        b_prev = b_prev + b_external
    return without_negative_zero(b_prev), ok


@triton.jit(do_not_specialize=["n"])
def segments_kernel(
    p_states,  # float32 [n, G, K, V]
    p_decays,  # float32, of matrix m of n * G: element k at m * stride_g + k * stride_k; not read without HAS_DECAY
    p_external,  # float32 [G, K, V]; see EXTERNAL
    p_incoming,  # float32 [n, G, K, V], out: the incoming state of each segment
    p_outgoing,  # float32 [G, K, V], out: the state behind the last
    channel,
    n,
    stride_g,
    stride_k,
    MATRICES: tl.constexpr,  # G
    K: tl.constexpr,
    V: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    EXTERNAL: tl.constexpr,
    DESCENDING: tl.constexpr,  # from this rank's last segment to its first
    AHEAD: tl.constexpr,  # number of segments that are loaded before the wait for R
    MORE: tl.constexpr,  # whether n is larger than AHEAD
):
    """A program takes tiles program_id, program_id + num_programs, ...

    It loads AHEAD segments before it waits for R, and later ones while it folds earlier ones. If there are no more than
    AHEAD it sends R on before it stores the incoming states, since the next rank waits for R.
    """
    SENDS_FIRST: tl.constexpr = channel.SEND != NONE and not MORE
    tile = tl.program_id(0)
    begun = begin(channel, tile, True)
    strides = (stride_g, stride_k)
    while tile < channel.num_tiles:
        b_states, b_decays = (), ()
        for i in tl.static_range(AHEAD):
            place = _place(i, n, MATRICES, DESCENDING)
            b_state, b_decay = _load_segment(p_states, p_decays, channel, tile, place, strides, K, V, HAS_DECAY)
            b_states += (b_state,)  # type: ignore[assignment]
            b_decays += (b_decay,)  # type: ignore[assignment]
        b_prev, ok = _entered(channel, tile, begun, p_external, K, V, EXTERNAL)
        offsets, inside = tile_offsets(channel, tile, K, V)
        if SENDS_FIRST:
            b_last = b_prev
            for i in tl.static_range(AHEAD):
                _, there = _place(i, n, MATRICES, DESCENDING)
                b_last = tl.where(there, fold(b_states[i], b_decays[i], b_last), b_last)
            _leave(channel, tile, begun, ok, b_last)
        for i in tl.static_range(AHEAD):
            matrix, there = _place(i, n, MATRICES, DESCENDING)
            tl.store(p_incoming + matrix * (K * V) + offsets, b_prev, mask=inside & there)
            b_prev = tl.where(there, fold(b_states[i], b_decays[i], b_prev), b_prev)
        if MORE:
            for i in tl.range(AHEAD, loop_bound(n), num_stages=4):
                place = _place(i, n, MATRICES, DESCENDING)
                b_state, b_decay = _load_segment(p_states, p_decays, channel, tile, place, strides, K, V, HAS_DECAY)
                matrix, _ = place
                tl.store(p_incoming + matrix * (K * V) + offsets, b_prev, mask=inside)
                b_prev = fold(b_state, b_decay, b_prev)
        if not SENDS_FIRST:
            _leave(channel, tile, begun, ok, b_prev)
        tl.store(p_outgoing + offsets, b_prev, mask=inside)
        tile += tl.num_programs(0)


@triton.jit
def _leave(channel, tile, begun, ok, b_next):
    epoch, word, _ = begun
    if ok:
        post(channel, tile, epoch, word, b_next)
        finish(channel, tile, epoch)  # on the last rank too


@triton.jit
def _times(
    p_dense,
    p_prev,
    b_prev,
    b_sum,
    place,
    strides,
    K: tl.constexpr,
    V: tl.constexpr,
    BJ: tl.constexpr,
    STAGES: tl.constexpr,
):
    """transition R + sum. R [BK, BV] is also in p_prev [K, V], where this program has just stored it: with BJ < BK it
    loads BJ columns of the transition at a time, and BJ rows of R from there."""
    i, v = place
    stride_i, stride_j = strides
    if BJ >= b_prev.shape[0]:
        at = i[:, None] * stride_i + i[None, :] * stride_j
        b_transition = tl.load(p_dense + at, mask=(i < K)[:, None] & (i < K)[None, :], other=0.0)
        if K < b_prev.shape[0]:  # rows beyond K are NaN after a product with Inf
            b_prev = tl.where((i < K)[:, None], b_prev, 0.0)
        b_sum = tl.dot(b_transition, b_prev, b_sum, input_precision="tf32x3")
    else:
        tl.debug_barrier()  # all of R is there
        for part in tl.range((K + BJ - 1) // BJ, num_stages=STAGES):
            j = part * BJ + tl.arange(0, BJ)
            at = i[:, None] * stride_i + j[None, :] * stride_j
            b_columns = tl.load(p_dense + at, mask=(i < K)[:, None] & (j < K)[None, :], other=0.0)
            at = j[:, None] * V + v[None, :]
            b_rows = tl.load(p_prev + at, mask=(j < K)[:, None] & (v < V)[None, :], other=0.0)
            b_sum = tl.dot(b_columns, b_rows, b_sum, input_precision="tf32x3")
    return b_sum


@triton.jit(do_not_specialize=["n"])
def dense_segments_kernel(
    p_states,  # float32 [n, G, K, V]
    p_transitions,  # float32 [n, G, K, K], element (m, i, j) at m * K * K + i * stride_i + j * stride_j
    p_external,  # float32 [G, K, V]; see EXTERNAL
    p_incoming,  # float32 [n, G, K, V]; out
    p_outgoing,  # float32 [G, K, V]; out
    channel,
    n,
    stride_i,
    stride_j,
    MATRICES: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BJ: tl.constexpr,
    STAGES: tl.constexpr,
    EXTERNAL: tl.constexpr,
    DESCENDING: tl.constexpr,
):
    """segments_kernel with transitions. As in transition_kernel a tile is BV whole columns, products are of three TF32
    parts, and with a transition larger than BJ columns the rows of R are read back from p_incoming. Products with a
    zero state are computed, too: whether a state is zero depends on the rank boundaries."""
    tile = tl.program_id(0)
    begun = begin(channel, tile, True)
    while tile < channel.num_tiles:
        g, i, v = tile_place(channel, tile, K, V)
        offsets, inside = tile_offsets(channel, tile, K, V)
        b_prev, ok = _entered(channel, tile, begun, p_external, K, V, EXTERNAL)
        for m in range(loop_bound(n)):
            matrix, _ = _place(m, n, MATRICES, DESCENDING)
            p_rows = p_incoming + matrix * (K * V)
            tl.store(p_rows + offsets, b_prev, mask=inside)
            b_next = tl.load(p_states + matrix * (K * V) + offsets, mask=inside, other=0.0)
            p_dense, p_here = p_transitions + (matrix + g) * (K * K), p_rows + g * (K * V)
            b_next = _times(p_dense, p_here, b_prev, b_next, (i, v), (stride_i, stride_j), K, V, BJ, STAGES)
            b_prev = without_negative_zero(b_next)
        _leave(channel, tile, begun, ok, b_prev)
        tl.store(p_outgoing + offsets, b_prev, mask=inside)
        tile += tl.num_programs(0)


@triton.jit
def gated_segments_kernel(
    p_state,  # float32 [NS, H, K, V]; in, each segment's local state; out, its incoming state, from all ranks
    p_segment_gate,  # float32 [NS, H, K]
    p_edge_gate,  # float32 [NS, H, K]; out, -inf: later kernels then add nothing to the incoming states
    p_segments,  # int32 [NS, SEGMENT_WORDS]
    p_segments_of_states,  # int32 [B, 2]; first segment and end of each state
    p_outside,  # float32 [N, H, K, V], the states at the beginning of each sequence; None for zeros
    p_final,  # float32 [N, H, K, V]; out, the states at the end of each sequence that ends here; or None
    p_external,  # float32 [STATES, H, K, V], of the first rank: its incoming state; None for zeros
    p_outgoing,  # float32 [STATES, H, K, V]; out, the outgoing state
    channel,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    STATES: tl.constexpr,  # number of states that this scan carries
    HALF: tl.constexpr,  # of a rank's tokens in the zigzag layout, whose states this scan carries: 0 or 1
    REVERSE: tl.constexpr,
):
    """state_passing_kernel (gla_fwd.py) and the scan over the ranks in one, in the order of the sequence. Loads states
    up to three segments ahead of the fold."""
    tile = tl.program_id(0)
    begun = begin(channel, tile, True)
    BEGIN: tl.constexpr = LAST if REVERSE else FIRST
    FINISH: tl.constexpr = FIRST if REVERSE else LAST
    EXTERNAL: tl.constexpr = NOTHING if p_external is None else INITIAL
    while tile < channel.num_tiles:
        g, k, v = tile_place(channel, tile, K, V)
        inside, at = (k < K)[:, None] & (v < V)[None, :], k[:, None] * V + v[None, :]
        index, h = HALF * STATES + g // H, g % H
        s_first, s_end = segments_of_state(p_segments_of_states, index)
        b_prev, ok = _entered(channel, tile, begun, p_external, K, V, EXTERNAL)
        for n in tl.range(0, loop_bound(s_end - s_first), num_stages=4):
            s = s_end - 1 - n if REVERSE else s_first + n
            row = s.to(tl.int64) * H + h
            flags = tl.load(p_segments + s * SEGMENT_WORDS + FLAGS)
            end = (tl.load(p_segments + s * SEGMENT_WORDS + SEQUENCE).to(tl.int64) * H + h) * (K * V)
            b_state = tl.load(p_state + row * (K * V) + at, mask=inside, other=0.0)
            b_gate = tl.load(p_segment_gate + row * K + k, mask=k < K, other=0.0)
            begins = (flags & BEGIN) != 0
            b_outside = tl.zeros_like(b_prev)
            if p_outside is not None:
                b_outside = tl.load(p_outside + end + at, mask=inside & begins, other=0.0)
            b_prev = tl.where(begins, without_negative_zero(b_outside), b_prev)
            tl.store(p_state + row * (K * V) + at, b_prev, mask=inside)
            tl.store(p_edge_gate + row * K + k, tl.full([channel.BK], float("-inf"), tl.float32), mask=k < K)
            b_prev = fold(b_state, exp2(b_gate)[:, None], b_prev)
            if (flags & FINISH) != 0:
                if p_final is not None:
                    tl.store(p_final + end + at, b_prev, mask=inside)
                b_prev = tl.zeros_like(b_prev)
        _leave(channel, tile, begun, ok, b_prev)
        tl.store(p_outgoing + g * (K * V) + at, b_prev, mask=inside)
        tile += tl.num_programs(0)


@triton.jit
def delta_segments_kernel(
    p_transition,  # float32 [NS, H, K, K]
    p_local,  # float32 [NS, H, K, V], the segments' local states
    p_segments,  # int32 [NS, SEGMENT_WORDS]
    p_segments_of_states,  # int32 [B, 2]; first segment and end of each state
    p_outside,  # float32 [N, H, K, V], the states at the beginning of each sequence; None for zeros
    p_incoming,  # float32 [NS, H, K, V]; out, each segment's incoming state, from all ranks
    p_external,  # float32 [STATES, H, K, V], of the first rank: its incoming state; None for zeros
    p_outgoing,  # float32 [STATES, H, K, V]; out, the outgoing state
    channel,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    STATES: tl.constexpr,
    HALF: tl.constexpr,
    BJ: tl.constexpr,
    STAGES: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """delta_state_passing_kernel (delta_state.py) and the scan over the ranks in one, in the order of the sequence,
    with products as in dense_segments_kernel. A segment without tokens passes its incoming state on: a product with
    the identity, in three parts, would not be exact."""
    tile = tl.program_id(0)
    begun = begin(channel, tile, True)
    BEGIN: tl.constexpr = LAST if REVERSE else FIRST
    FINISH: tl.constexpr = FIRST if REVERSE else LAST
    KNOWN: tl.constexpr = FIRST | LAST if REVERSE else LAST  # as in delta_state_passing_kernel
    EXTERNAL: tl.constexpr = NOTHING if p_external is None else INITIAL
    stride_i, stride_j = 1 if REVERSE else K, K if REVERSE else 1
    while tile < channel.num_tiles:
        g, i, v = tile_place(channel, tile, K, V)
        inside, offsets = (i < K)[:, None] & (v < V)[None, :], i[:, None] * V + v[None, :]
        index, h = HALF * STATES + g // H, g % H
        s_first, s_end = segments_of_state(p_segments_of_states, index)
        b_prev, ok = _entered(channel, tile, begun, p_external, K, V, EXTERNAL)
        for n in range(loop_bound(s_end - s_first)):
            s = s_end - 1 - n if REVERSE else s_first + n
            row = (s.to(tl.int64) * H + h) * K
            p_segment = p_segments + s * SEGMENT_WORDS
            flags = tl.load(p_segment + FLAGS)
            begins = (flags & BEGIN) != 0
            b_outside = tl.zeros_like(b_prev)
            if p_outside is not None:
                place = (tl.load(p_segment + SEQUENCE).to(tl.int64) * H + h) * (K * V)
                b_outside = tl.load(p_outside + place + offsets, mask=inside & begins, other=0.0)
            b_prev = tl.where(begins, without_negative_zero(b_outside), b_prev)
            p_here = p_incoming + row * V
            tl.store(p_here + offsets, b_prev, mask=inside)
            b_next = tl.load(p_local + row * V + offsets, mask=inside & ((flags & FINISH) == 0), other=0.0)
            if (flags & KNOWN) == 0:
                if tl.load(p_segment + START) == tl.load(p_segment + END):
                    b_next = b_prev
                else:
                    p_dense = p_transition + row * K
                    b_next = _times(p_dense, p_here, b_prev, b_next, (i, v), (stride_i, stride_j), K, V, BJ, STAGES)
            b_prev = without_negative_zero(b_next)
        _leave(channel, tile, begun, ok, b_prev)
        tl.store(p_outgoing + g * (K * V) + offsets, b_prev, mask=inside)
        tile += tl.num_programs(0)


@triton.jit
def row_sums_kernel(
    p_x,  # float32 [rows, W]
    p_y,  # float32 [rows, W]; not read without PRODUCT
    p_sums,  # float32 [rows], out
    W: tl.constexpr,
    BW: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """The sum of each row of x, or of x * y, BW columns at a time. One program per row, so that the bits depend on the
    row only."""
    row = tl.program_id(0).to(tl.int64)
    b_sum = tl.zeros([BW], tl.float32)
    for i in range((W + BW - 1) // BW):
        w = i * BW + tl.arange(0, BW)
        b_x = tl.load(p_x + row * W + w, mask=w < W, other=0.0)
        if PRODUCT:
            b_y = tl.load(p_y + row * W + w, mask=w < W, other=0.0)
            b_sum = tl.fma(b_x, b_y, b_sum)
        else:
            b_sum += b_x
    tl.store(p_sums + row, tl.sum(b_sum, 0))


@triton.jit
def outer_products_kernel(
    p_x,  # float32 [M, K, V]
    p_y,  # float32 [M, K, V]
    p_out,  # float32 [M, K, K], out
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """x y^T of each of M matrices, BK rows and columns of it in a program, of three TF32 parts."""
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    block, m = tl.program_id(0) % (BLOCKS * BLOCKS), (tl.program_id(0) // (BLOCKS * BLOCKS)).to(tl.int64)
    i, j = block // BLOCKS * BK + tl.arange(0, BK), block % BLOCKS * BK + tl.arange(0, BK)
    b_out = tl.zeros([BK, BK], tl.float32)
    for part in range((V + BV - 1) // BV):
        v = part * BV + tl.arange(0, BV)
        b_x = tl.load(p_x + (m * K + i[:, None]) * V + v[None, :], mask=(i < K)[:, None] & (v < V)[None, :], other=0.0)
        b_y = tl.load(p_y + (m * K + j[:, None]) * V + v[None, :], mask=(j < K)[:, None] & (v < V)[None, :], other=0.0)
        b_out = tl.dot(b_x, tl.trans(b_y), b_out, input_precision="tf32x3")
    tl.store(p_out + (m * K + i[:, None]) * K + j[None, :], b_out, mask=(i < K)[:, None] & (j < K)[None, :])
