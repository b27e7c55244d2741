"""The tables of segments and chunks (segment_table.py, tokens/packing.py), from boundaries of sequences on the device.

One CUDA graph then serves all lengths: the tables have room for the most segments and chunks of N sequences in T
tokens, and what is beyond those in use is UNUSED or has no token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import cast
from .channel import STAMPS, STEPS_A_STAMP
from .segment_table import (
    END,
    ENTERED,
    FIRST,
    FIRST_CHUNK,
    FLAGS,
    LAST,
    LEFT,
    SEGMENT_WORDS,
    SEQUENCE,
    START,
    STATE_INDEX,
    UNUSED,
)
from .wait import BAD_BOUNDARIES, reject

# Words of a rank's counts. What kernels get the address of begins at a multiple of 16 bytes
SEGMENTS = tl.constexpr(0)  # first and end of the only sent state's segments, a row of segments_of_states
TOKENS = tl.constexpr(2)  # in use
PASSES = tl.constexpr(4)  # whether a sequence begins before this rank and ends after it
COUNT_WORDS = 5


@triton.jit
def boundaries_hash(b_values, b_places):
    """A hash of 32 bits of integers below 2 ** 31, of each with its place."""
    b_hash = (b_values * 0x5851F42D + b_places.to(tl.int64) * 0x14057B7F + 0x2545F491) & 0xFFFFFFFF
    b_hash = ((b_hash ^ (b_hash >> 15)) * 0x4C957F2D) & 0xFFFFFFFF
    b_hash = ((b_hash ^ (b_hash >> 13)) * 0x369DEA0F) & 0xFFFFFFFF
    return b_hash ^ (b_hash >> 16)


@triton.jit
def picked(b_chosen, b_values):
    """The chosen one of the values [BN] for each row of b_chosen [BI, BN], of which at most one is True; else 0."""
    return tl.sum(tl.where(b_chosen, b_values[None, :], 0), 1)


@triton.jit
def owners(b_entries, b_ends, n):
    """For each entry [BI] the sequence that has it, as ``picked`` takes it [BI, BN]. b_ends [BN]: ends of the
    sequences' entries, ascending."""
    b_owner = tl.sum((b_ends[None, :] <= b_entries[:, None]).to(tl.int32), 1)
    return b_owner[:, None] == n[None, :]


@triton.jit(do_not_specialize=["rank", "P", "N", "T", "NS", "NC"])
def tables_kernel(
    p_boundaries,  # int32 or int64 [N + 1], cu_seqlens
    p_cut,  # int32 or int64 [P + 1], the first token of each rank, and an end
    p_step,  # int64 [1], the step word (channel.py) of calls with the stamp of all other arguments
    p_segments,  # int32 [NS, SEGMENT_WORDS]; out
    p_chunks,  # int32 [NC, 2]; out
    p_counts,  # int32 [COUNT_WORDS]; out
    p_own_step,  # int64 [1]; out, the step word of a call with these boundaries
    p_fault,  # the communicator's fault word and record (wait.py): set for boundaries or a cut that are wrong. Then all
    p_record,  # sequences are taken to be empty
    rank,
    P,
    N,
    T,
    NS,
    NC,
    SEGMENT: tl.constexpr,  # tokens of a segment
    BT: tl.constexpr,
    BN: tl.constexpr,  # at least N
    BP: tl.constexpr,  # at least P
    BI: tl.constexpr,  # rows of each table in a program
):
    """The tables that packing.Layout has for ``cut`` of cu_seqlens, in one sent state."""
    n, p, i = tl.arange(0, BN), tl.arange(0, BP), tl.program_id(0) * BI + tl.arange(0, BI)
    b_first = tl.load(p_boundaries + n, mask=n < N, other=0).to(tl.int64)
    b_end = tl.load(p_boundaries + 1 + n, mask=n < N, other=0).to(tl.int64)
    b_here = tl.load(p_cut + p, mask=p < P, other=0).to(tl.int64)
    b_next = tl.load(p_cut + 1 + p, mask=p < P, other=0).to(tl.int64)
    total, most = tl.load(p_boundaries + N).to(tl.int64), tl.load(p_cut + P).to(tl.int64)
    wrong = (tl.load(p_boundaries) != 0) | (tl.load(p_cut) != 0) | (total > most)
    wrong = wrong | (tl.max((b_end < b_first).to(tl.int32), 0) > 0)
    wrong = wrong | (tl.max(((b_next < b_here) | (b_next > b_here + T)).to(tl.int32), 0) > 0)
    if wrong:
        if tl.program_id(0) == 0:
            reject(p_fault, p_record, BAD_BOUNDARIES, N, most, total)
        total = total * 0
    b_first, b_end = tl.minimum(tl.maximum(b_first, 0), total), tl.minimum(tl.maximum(b_end, 0), total)
    begin = tl.minimum(tl.maximum(tl.load(p_cut + rank).to(tl.int64), 0), total)
    end = tl.minimum(tl.maximum(tl.load(p_cut + rank + 1).to(tl.int64), 0), total)

    # packing.cut: the piece of each sequence, if there is one
    b_empty = b_first == b_end
    b_begins = b_empty | (b_first >= begin) & (b_first < end)
    b_ends = b_empty | (b_end > begin) & (b_end <= end)
    b_has = (b_first < end) & (b_end > begin)
    b_ends_here = (b_end > begin) & (b_end <= end) | (b_end == 0) & (rank == 0)
    b_has = tl.where(b_empty, b_ends_here, b_has) & (n < N)
    b_start = (tl.maximum(b_first, begin) - begin).to(tl.int32)
    b_stop = (tl.minimum(b_end, end) - begin).to(tl.int32)
    b_segments = tl.where(b_has, tl.maximum((b_stop - b_start + SEGMENT - 1) // SEGMENT, 1), 0)
    b_chunks = tl.where(b_has, (b_stop - b_start + BT - 1) // BT, 0)
    b_segment_ends, b_chunk_ends = tl.cumsum(b_segments, 0), tl.cumsum(b_chunks, 0)
    if tl.program_id(0) == 0:
        b_passes = b_has & (b_begins == 0) & (b_ends == 0)
        tl.store(p_counts + SEGMENTS, 0)
        tl.store(p_counts + SEGMENTS + 1, tl.sum(b_segments, 0))
        tl.store(p_counts + PASSES, tl.max(b_passes.to(tl.int32), 0))
        tl.store(p_counts + TOKENS, (end - begin).to(tl.int32))
        b_hash = tl.where(n < N, boundaries_hash(b_end, n), 0)
        stamp = tl.sum(b_hash, 0) + tl.sum(tl.where(p < P, boundaries_hash(b_next, BN + p), 0), 0)
        tl.store(p_own_step, tl.load(p_step) + (stamp >> 8) % STAMPS * STEPS_A_STAMP)

    b_chosen = owners(i, b_segment_ends, n)
    b_used = i < tl.sum(b_segments, 0)
    b_number = i - picked(b_chosen, b_segment_ends - b_segments)  # among the segments of the piece
    b_begin, b_behind = picked(b_chosen, b_start), picked(b_chosen, b_stop)
    b_begin = tl.where(b_used, b_begin + b_number * SEGMENT, 0)
    b_chunk = picked(b_chosen, b_chunk_ends - b_chunks) + b_number * (SEGMENT // BT)
    b_is_last = b_number == picked(b_chosen, b_segments) - 1
    b_first_here, b_last_here = picked(b_chosen, b_begins.to(tl.int32)) != 0, picked(b_chosen, b_ends.to(tl.int32)) != 0
    b_flags = tl.where(b_first_here, tl.where(b_number == 0, FIRST, 0), ENTERED)
    b_flags += tl.where(b_last_here, tl.where(b_is_last, LAST, 0), LEFT)
    p_segment = p_segments + i * SEGMENT_WORDS
    inside = i < NS
    tl.store(p_segment + START, b_begin, mask=inside)
    tl.store(p_segment + END, tl.minimum(b_begin + SEGMENT, b_behind), mask=inside)
    tl.store(p_segment + FIRST_CHUNK, tl.where(b_used, b_chunk, 0), mask=inside)
    tl.store(p_segment + STATE_INDEX, 0 * i, mask=inside)
    tl.store(p_segment + SEQUENCE, picked(b_chosen, n), mask=inside)
    tl.store(p_segment + FLAGS, tl.where(b_used, b_flags, LAST | UNUSED), mask=inside)

    b_chosen = owners(i, b_chunk_ends, n)
    b_begin = picked(b_chosen, b_start) + (i - picked(b_chosen, b_chunk_ends - b_chunks)) * BT
    b_begin = tl.where(i < tl.sum(b_chunks, 0), b_begin, 0)
    tl.store(p_chunks + 2 * i, b_begin, mask=i < NC)
    tl.store(p_chunks + 2 * i + 1, tl.minimum(b_begin + BT, picked(b_chosen, b_stop)), mask=i < NC)


@triton.jit(do_not_specialize=["T"])
def clear_padding_kernel(
    p_x,  # [T, W]; the rows behind those in use become 0
    p_counts,  # int32 [COUNT_WORDS]
    T,
    W: tl.constexpr,
    BR: tl.constexpr,
    BW: tl.constexpr,
):
    """A program for BR rows."""
    t, used = tl.program_id(0) * BR + tl.arange(0, BR), tl.load(p_counts + TOKENS)
    if (tl.program_id(0) + 1) * BR <= used:
        return
    b_zero = cast(tl.zeros([BR, BW], tl.float32), p_x.dtype.element_ty)
    for first in range(0, W, BW):
        w = first + tl.arange(0, BW)
        inside = ((t >= used) & (t < T))[:, None] & (w < W)[None, :]
        tl.store(p_x + t.to(tl.int64)[:, None] * W + w[None, :], b_zero, mask=inside)
