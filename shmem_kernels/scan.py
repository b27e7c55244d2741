"""The stand-alone scans: R_0 = initial, R_{p+1} = decay_p * R_p + state_p; rank p gets R_p (method: ZeCO, section 3);
and with a dense transition in place of the decay."""

from __future__ import annotations

import triton
import triton.language as tl

from .channel import (
    BROKEN,
    all_decays_zero,
    allscan_to,
    begin,
    finish,
    receive,
    send_ahead,
    shift_ahead,
    shift_begun,
)
from .links import NONE, post
from .tiles import load_decays, load_tile, tile_offsets, tile_place
from .wait import opaque


@triton.jit
def scan_kernel(
    p_state,  # float32 [G, K, V]
    p_decay,  # float32, element (g, k) at g * stride_g + k * stride_k; not read without HAS_DECAY
    p_initial,  # float32 [G, K, V]; not read without HAS_INITIAL
    p_out,  # float32 [G, K, V]
    channel,
    stride_g,
    stride_k,
    K: tl.constexpr,
    V: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    NEIGHBOUR_SHIFT: tl.constexpr,  # every decay is 0
):
    """A program takes tiles program_id, program_id + num_programs, ...; a tile is BK rows and BV columns of a matrix.

    First it sends its tiles with zero decays. Then it processes its tiles in ascending order, and loads the next
    tile's inputs while it waits for this one or sends it.
    """
    tile = tl.program_id(0)
    # loads overlap with begin()
    b_state = load_tile(p_state, channel, tile, K, V)  # [BK, BV]
    b_decay = tl.full([channel.BK, 1], 1.0, tl.float32)
    if HAS_DECAY:
        b_decay = load_decays(p_decay, channel, tile, stride_g, stride_k, K, V)
    completed = tl.load(channel.epoch + tile)
    epoch, word, ok = begin(channel, tile, True)
    if NEIGHBOUR_SHIFT or (HAS_DECAY and channel.RECV != NONE and channel.SEND != NONE):
        while tile < channel.num_tiles:
            if NEIGHBOUR_SHIFT:
                shift_ahead(channel, tile, (epoch, word, ok), load_tile(p_state, channel, tile, K, V))
            else:
                b_ahead = load_decays(p_decay, channel, tile, stride_g, stride_k, K, V)
                if all_decays_zero(b_ahead):  # loads the state only then: others do not need it yet
                    send_ahead(channel, tile, (epoch, word, ok), load_tile(p_state, channel, tile, K, V), b_ahead)
            tile += tl.num_programs(0)
        tile = tl.program_id(0)

    while tile < channel.num_tiles:
        b_first = tl.zeros([channel.BK, channel.BV], tl.float32)
        if HAS_INITIAL:
            b_first = load_tile(p_initial, channel, tile, K, V)
        next_tile = tile + tl.num_programs(0)
        b_next = load_tile(p_state, channel, next_tile, K, V)
        b_next_decay = b_decay
        if HAS_DECAY:
            b_next_decay = load_decays(p_decay, channel, next_tile, stride_g, stride_k, K, V)
        next_completed = tl.load(channel.epoch + next_tile, mask=next_tile < channel.num_tiles, other=BROKEN)
        offsets, inside = tile_offsets(channel, tile, K, V)
        if NEIGHBOUR_SHIFT:
            b_prev = shift_begun(channel, tile, (epoch, word, ok), b_first)
            tl.store(p_out + offsets, b_prev, mask=inside)
        else:
            begun = (epoch, word, ok & (completed == epoch - 1))
            allscan_to(channel, tile, begun, b_state, b_decay, b_first, p_out + offsets, inside)
        tile = next_tile
        b_state = b_next
        b_decay = b_next_decay
        completed = next_completed


@triton.jit
def shift_rows_kernel(
    p_state,  # float32 [G, K, V]
    p_unused,  # in place of decays
    p_initial,  # float32 [G, K, V]; not read without HAS_INITIAL
    p_out,  # float32 [G, K, V], which is not p_state
    channel,
    rows,
    K: tl.constexpr,
    V: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
):
    """R_{p+1}[k] = R_p[k + rows] + state_p[k], for rows 0 .. K - 1: see checks.Shift. Rows of a tile depend on other
    tiles, so one program takes all tiles, and sends the first after it has received the last."""
    epoch, word, ok = begin(channel, 0)
    tile = tl.program_id(0)
    while tile < channel.num_tiles:
        b_first = tl.zeros([channel.BK, channel.BV], tl.float32)
        if HAS_INITIAL:
            b_first = load_tile(p_initial, channel, tile, K, V)
        b_prev, ok = receive(channel, tile, epoch, word, ok, b_first)
        offsets, inside = tile_offsets(channel, tile, K, V)
        tl.store(p_out + offsets, b_prev, mask=inside)
        tile += 1
    tl.debug_barrier()  # all of R is in p_out
    tile = tl.program_id(0)
    while tile < channel.num_tiles:
        g, k, v = tile_place(channel, tile, K, V)
        source = k + rows
        there = (k < K)[:, None] & (source >= 0)[:, None] & (source < K)[:, None] & (v < V)[None, :]
        b_passed = tl.load(p_out + g * (K * V) + source[:, None] * V + v[None, :], mask=there, other=0.0)
        if ok:
            post(channel, tile, epoch, word, load_tile(p_state, channel, tile, K, V) + b_passed)
            finish(channel, tile, epoch)
        else:  # a fault of one tile is one of all tiles
            tl.store(channel.epoch + tile, BROKEN)
        tile += 1


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
