"""The scan with a dense transition in place of the decay: R_{p+1} = transition_p R_p + state_p; rank p gets R_p."""

from __future__ import annotations

import triton
import triton.language as tl

from .channel import begin, finish, receive
from .links import NONE, post
from .tiles import tile_place
from .wait import opaque


@triton.jit
def transition_kernel(
    p_state,  # float32 [G, K, V]
    p_transition,  # float32 [G, K, K], element (g, i, j) at g * K * K + i * stride_i + j * stride_j
    p_initial,  # float32 [G, K, V]; not read without HAS_INITIAL
    p_out,  # float32 [G, K, V]
    p_passes,  # int32 [1], 0: the transition is 0, and R without effect on what is sent, even Inf or NaN; or None
    channel,
    stride_i,
    stride_j,
    K: tl.constexpr,
    V: tl.constexpr,
    BJ: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
):
    """R_{p+1} = transition_p R_p + state_p. A tile is BV whole columns, since a row of the product needs all of R's.

    A program takes consecutive tiles. With BJ >= BK it loads a tile's transition before it waits for R; of a larger
    transition it loads BJ columns at a time afterwards, STAGES ahead, and reads as many rows of R back from p_out.
    Products are of three TF32 parts each, as accurate as float32. A first rank that begins with 0 sends its state
    unchanged. The products of a transition that is not held use transposed operands: with default tiles these have too
    few rows for wgmma, so Triton uses mma, which is not asynchronous and needs no barriers of its own.
    """
    PRODUCT: tl.constexpr = (channel.SEND != NONE) and ((channel.RECV != NONE) or HAS_INITIAL)
    HELD: tl.constexpr = PRODUCT and BJ >= channel.BK
    passes = True
    if PRODUCT and p_passes is not None:
        passes = tl.load(p_passes) != 0
    count = (channel.num_tiles + tl.num_programs(0) - 1) // tl.num_programs(0)
    tile = tl.program_id(0) * count
    end = tl.minimum(tile + count, channel.num_tiles)
    epoch, word, begun_well = begin(channel, tile, True)
    while tile < end:
        g, i, v = tile_place(channel, tile, K, V)
        state, dense = g * (K * V), p_transition + g * (K * K)
        offsets = i[:, None] * V + v[None, :]
        inside = (i < K)[:, None] & (v < V)[None, :]
        b_state = tl.load(p_state + state + offsets, mask=inside, other=0.0)
        b_first = tl.zeros([channel.BK, channel.BV], tl.float32)
        if HAS_INITIAL:
            b_first = tl.load(p_initial + state + offsets, mask=inside, other=0.0)
        if HELD:
            row = i + opaque(tile - tile)  # keeps the offsets out of registers during the loop
            at = row[:, None] * stride_i + row[None, :] * stride_j
            b_transition = tl.load(dense + at, mask=(i < K)[:, None] & (i < K)[None, :], other=0.0)  # [BK, BK]
        b_prev, ok = receive(channel, tile, epoch, word, begun_well, b_first)
        tl.store(p_out + state + offsets, b_prev, mask=inside)
        if HELD:
            if K < channel.BK or p_passes is not None:  # rows beyond K are NaN after a product with Inf
                b_prev = tl.where((i < K)[:, None] & passes, b_prev, 0.0)
            b_state = tl.dot(b_transition, b_prev, b_state, input_precision="tf32x3")
        elif PRODUCT:
            tl.debug_barrier()  # all of R is in p_out
            b_sum = tl.trans(b_state)
            for n in tl.range((K + BJ - 1) // BJ, num_stages=STAGES):
                j = n * BJ + tl.arange(0, BJ)
                at = i[:, None] * stride_i + j[None, :] * stride_j
                b_columns = tl.load(dense + at, mask=(i < K)[:, None] & (j < K)[None, :], other=0.0)  # [BK, BJ]
                at = j[:, None] * V + v[None, :]
                there = (j < K)[:, None] & (v < V)[None, :] & passes
                b_rows = tl.load(p_out + state + at, mask=there, other=0.0)  # [BJ, BV]
                b_sum = tl.dot(tl.trans(b_rows), tl.trans(b_columns), b_sum, input_precision="tf32x3")
            b_state = tl.trans(b_sum)
        if ok:
            post(channel, tile, epoch, word, b_state)
            finish(channel, tile, epoch)  # on the last rank too
        tile += 1
