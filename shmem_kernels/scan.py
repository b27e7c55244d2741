"""The stand-alone scans: R_0 = initial, R_{p+1} = decay_p * R_p + state_p, or with a dense transition in place of the
decay; rank p gets R_p (method: ZeCO, section 3)."""

from __future__ import annotations

import triton
import triton.language as tl

from .channel import allscan_begun, begin, finish, receive, send_ahead, shift_ahead, shift_begun
from .links import NONE, post
from .wait import hidden


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
    ONE_HOP: tl.constexpr,  # every decay is 0
):
    """A program takes tiles program_id, program_id + num_programs, ...; a tile is BK rows and BV columns of a matrix.

    First it sends those that depend on nothing. Then it takes its tiles in ascending order; the next one's state is
    loaded while this one is waited for.
    """
    tile = tl.program_id(0)
    b_state = _load(p_state, channel, tile, K, V)  # [BK, BV]; under way while the epoch begins
    begun = begin(channel, tile)
    if ONE_HOP or (HAS_DECAY and channel.RECV != NONE and channel.SEND != NONE):
        while tile < channel.num_tiles:
            b_ahead = _load(p_state, channel, tile, K, V)
            if ONE_HOP:
                shift_ahead(channel, tile, begun, b_ahead)
            else:
                send_ahead(channel, tile, begun, b_ahead, _decays(p_decay, channel, tile, stride_g, stride_k, K, V))
            tile += tl.num_programs(0)
        tile = tl.program_id(0)

    while tile < channel.num_tiles:
        b_decay = tl.full([channel.BK, 1], 1.0, tl.float32)
        if HAS_DECAY:
            b_decay = _decays(p_decay, channel, tile, stride_g, stride_k, K, V)
        b_first = tl.zeros([channel.BK, channel.BV], tl.float32)
        if HAS_INITIAL:
            b_first = _load(p_initial, channel, tile, K, V)
        next_tile = tile + tl.num_programs(0)
        b_next = _load(p_state, channel, next_tile, K, V)
        if ONE_HOP:
            b_prev = shift_begun(channel, tile, begun, b_first)
        else:
            b_prev, _ = allscan_begun(channel, tile, begun, b_state, b_decay, b_first)
        offsets, inside = _offsets(channel, tile, K, V)
        tl.store(p_out + offsets, b_prev, mask=inside)
        tile = next_tile
        b_state = b_next


@triton.jit
def transition_kernel(
    p_state,  # float32 [G, K, V]
    p_transition,  # float32 [G, K, K], element (g, i, j) at g * K * K + i * stride_i + j * stride_j
    p_initial,  # float32 [G, K, V]; not read without HAS_INITIAL
    p_out,  # float32 [G, K, V]
    channel,
    stride_i,
    stride_j,
    K: tl.constexpr,
    V: tl.constexpr,
    BJ: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
):
    """R_{p+1} = transition_p R_p + state_p. A tile is BV whole columns, since a row of the product needs all of R's.

    A program takes tiles that follow one another. With BJ >= BK it holds a tile's transition before it waits for R; a
    larger transition it takes BJ columns at a time afterwards, and reads as many rows of R back from p_out. Products
    are of three TF32 parts each, as accurate as float32. A first rank that begins with 0 sends its state as it is.
    """
    PRODUCT: tl.constexpr = (channel.SEND != NONE) and ((channel.RECV != NONE) or HAS_INITIAL)
    HELD: tl.constexpr = PRODUCT and BJ >= channel.BK
    count = (channel.num_tiles + tl.num_programs(0) - 1) // tl.num_programs(0)
    tile = tl.program_id(0) * count
    end = tl.minimum(tile + count, channel.num_tiles)
    epoch, word, begun_well = begin(channel, tile)
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
            row = i + hidden(tile - tile)  # or the offsets would stay in registers over the whole loop
            at = row[:, None] * stride_i + row[None, :] * stride_j
            b_transition = tl.load(dense + at, mask=(i < K)[:, None] & (i < K)[None, :], other=0.0)  # [BK, BK]
        b_prev, ok = receive(channel, tile, epoch, word, begun_well, b_first)
        tl.store(p_out + state + offsets, b_prev, mask=inside)
        if HELD:
            b_state = tl.dot(b_transition, b_prev, b_state, input_precision="tf32x3")
        elif PRODUCT:
            tl.debug_barrier()  # all of R is in p_out
            for n in tl.range((K + BJ - 1) // BJ, num_stages=4):
                j = n * BJ + tl.arange(0, BJ)
                at = i[:, None] * stride_i + j[None, :] * stride_j
                b_columns = tl.load(dense + at, mask=(i < K)[:, None] & (j < K)[None, :], other=0.0)  # [BK, BJ]
                at = j[:, None] * V + v[None, :]
                b_rows = tl.load(p_out + state + at, mask=(j < K)[:, None] & (v < V)[None, :], other=0.0)  # [BJ, BV]
                b_state = tl.dot(b_columns, b_rows, b_state, input_precision="tf32x3")
        if ok:
            post(channel, tile, epoch, word, b_state)
            finish(channel, tile, epoch)  # on the last rank too
        tile += 1


@triton.jit
def tile_place(channel, tile, K: tl.constexpr, V: tl.constexpr):
    """(matrix, rows [BK], columns [BV]) of a tile."""
    NK: tl.constexpr = (K + channel.BK - 1) // channel.BK
    NV: tl.constexpr = (V + channel.BV - 1) // channel.BV
    k = (tile // NV) % NK * channel.BK + tl.arange(0, channel.BK)
    v = tile % NV * channel.BV + tl.arange(0, channel.BV)
    return (tile // (NK * NV)).to(tl.int64), k, v


@triton.jit
def _decays(p_decay, channel, tile, stride_g, stride_k, K: tl.constexpr, V: tl.constexpr):
    """[BK, 1], 0 beyond the last row."""
    g, k, _ = tile_place(channel, tile, K, V)
    return tl.load(p_decay + g * stride_g + k * stride_k, mask=k < K, other=0.0)[:, None]


@triton.jit
def _offsets(channel, tile, K: tl.constexpr, V: tl.constexpr):
    """(offsets, mask) [BK, BV] of a tile in [G, K, V]; a tile beyond the last is masked."""
    g, k, v = tile_place(channel, tile, K, V)
    inside = (k < K)[:, None] & (v < V)[None, :] & (tile < channel.num_tiles)
    return g * (K * V) + k[:, None] * V + v[None, :], inside


@triton.jit
def _load(p, channel, tile, K: tl.constexpr, V: tl.constexpr):
    """A tile of [G, K, V], 0 where masked."""
    offsets, inside = _offsets(channel, tile, K, V)
    return tl.load(p + offsets, mask=inside, other=0.0)


@triton.jit
def copy_kernel(p_dst, p_src, numel, BLOCK: tl.constexpr):
    """A bare copy, with p_dst in a peer's memory: what the wire allows, for comparison."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_dst + offsets, tl.load(p_src + offsets, mask=offsets < numel), mask=offsets < numel)
