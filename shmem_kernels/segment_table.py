"""The table of segments: this rank's tokens of each sequence, in parts that programs process."""

from __future__ import annotations

import triton
import triton.language as tl

# Words of a segment
START = tl.constexpr(0)  # its first token
END = tl.constexpr(1)  # behind its last token
FIRST_CHUNK = tl.constexpr(2)  # its first chunk
STATE_INDEX = tl.constexpr(3)  # its incoming state's index among the states that are sent, first halves' states first
SEQUENCE = tl.constexpr(4)  # row of initial_state and final_state
FLAGS = tl.constexpr(5)  # FIRST, LAST, ENTERED, LEFT, UNUSED
SEGMENT_WORDS = tl.constexpr(6)
FIRST = tl.constexpr(1)  # its sequence begins with this segment
LAST = tl.constexpr(2)  # its sequence ends with this segment
ENTERED = tl.constexpr(4)  # its sequence began on a rank before this one
LEFT = tl.constexpr(8)  # its sequence continues on the next rank
UNUSED = tl.constexpr(16)  # no segment; only in tables of device_tables.py, with LAST


@triton.jit
def segment(p_segments, s, BT: tl.constexpr):
    """(its row of the table, first token, end, first chunk, number of chunks)."""
    p_segment = p_segments + s * SEGMENT_WORDS
    start, end, chunk = tl.load(p_segment + START), tl.load(p_segment + END), tl.load(p_segment + FIRST_CHUNK)
    return p_segment, start, end, chunk, (end - start + BT - 1) // BT


@triton.jit
def segments_of_state(p_segments_of_states, index):
    """(the first segment of a sent state, their end)."""
    p_state = p_segments_of_states + 2 * index
    return tl.load(p_state), tl.load(p_state + 1)
