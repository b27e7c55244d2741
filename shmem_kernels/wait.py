"""Waits for another rank, bounded by the clock, and the fault record that the host reads.

**Block-uniform polling.** Triton takes a scalar to be the same in all threads, but warps that load a changing word, or
read a clock, may see different values and then take different branches around a barrier. So one thread polls, by an
atomic addition of 0, which Triton compiles to a load, and shares the value with the block. All threads poll a tile's
own words and reduce the result over the block.

**Faults.** Every wait ends after ``timeout`` by the clock. A tile from a desynchronized rank (channel.py) is not taken.
The first fault of a communicator writes the record below, in memory that the host can read; later waits of the
communicator give up at once.
"""

from __future__ import annotations

import time

import triton
import triton.language as tl

from ..bindings.triton_compat import builtin, core, warps_of

# Words of Channel.info (int64)
INFO_RANK = tl.constexpr(0)
INFO_PREV = tl.constexpr(1)
INFO_NEXT = tl.constexpr(2)
INFO_PREV_PE = tl.constexpr(3)
INFO_NEXT_PE = tl.constexpr(4)
INFO_TIMEOUT_NS = tl.constexpr(5)
INFO_FAULT = tl.constexpr(6)  # address of an int64: 1 once there was a fault in this communicator
INFO_RECORD = tl.constexpr(7)  # address of the record below, in memory that the host can read
INFO_WORDS = 8

# Words of the record (int64), written once, by the first fault, RECORD_SET last
RECORD_SET = tl.constexpr(0)
RECORD_KIND = tl.constexpr(1)
RECORD_RANK = tl.constexpr(2)
RECORD_NEIGHBOUR = tl.constexpr(3)
RECORD_TILE = tl.constexpr(4)
RECORD_EXPECTED = tl.constexpr(5)  # TIMED_OUT: an epoch. OUT_OF_STEP: the arrival word (links.py) that was expected
RECORD_SEEN = tl.constexpr(6)  # likewise
RECORD_WORDS = 7

TIMED_OUT = tl.constexpr(0)
OUT_OF_STEP = tl.constexpr(1)
BAD_SLOT = tl.constexpr(2)  # slots.py. TILE: the request, EXPECTED: the number of slots, SEEN: the slot
BAD_BOUNDARIES = tl.constexpr(3)  # device_tables.py. TILE: number of sequences, EXPECTED: end of the cut, SEEN: theirs


@builtin
def clock_ns(_semantic=None) -> int | core.tensor:
    """Return a clock in nanoseconds. In the interpreter, where a rank is a process, also yield to other processes."""
    if _semantic is None:
        time.sleep(2e-5)
        return time.monotonic_ns()
    return core.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=core.int64, is_pure=False, pack=1, _semantic=_semantic
    )


@builtin
def polls_before_backoff(_semantic=None) -> core.constexpr:
    """Return the number of polls at full speed; a longer wait pauses between polls, to leave bandwidth to others."""
    return core.constexpr(0 if _semantic is None else 32)


@builtin
def polls_per_clock(_semantic=None) -> core.constexpr:
    """Return the number of polls between two looks at the clock and the fault word. Small in the interpreter, where
    tiles wait one after another and each must find a fault soon."""
    return core.constexpr(4 if _semantic is None else 64)


@builtin
def backoff(polls, _semantic=None) -> None:
    """Yield to other warps for about half a microsecond; in the interpreter to other processes, for a time that grows
    with ``polls``."""
    if _semantic is None:
        time.sleep(min(3e-4 * polls.handle.data.item(), 3e-3))
    else:
        core.inline_asm_elementwise(
            "nanosleep.u32 500; mov.u32 $0, 0;", "=r", [], dtype=core.int32, is_pure=False, pack=1, _semantic=_semantic
        )


@builtin
def opaque(x, _semantic=None) -> core.tensor:
    """Hide ``x`` (int32 or int64) from the compiler: it then neither assumes the same value in all threads, nor moves
    dependent code out of a loop."""
    if _semantic is None:
        return x
    move = ("mov.b64 $0, $1;", "=l,l") if x.dtype.is_int64() else ("mov.b32 $0, $1;", "=r,r")
    return core.inline_asm_elementwise(*move, [x], dtype=x.dtype, is_pure=False, pack=1, _semantic=_semantic)


@builtin
def num_warps(_semantic=None) -> core.constexpr:
    """Return the number of warps of a program, at compile time; 1 in the interpreter."""
    return core.constexpr(1 if _semantic is None else warps_of(_semantic))


@triton.jit
def poll_word(p_word):
    """Load ``p_word`` in one thread and share the value with the block."""
    return tl.atomic_add(p_word, 0, sem="relaxed", scope="sys")


@triton.jit
def now(channel, tile):
    """Read the clock in one thread and share the value with the block."""
    tl.store(channel.clock + tile, clock_ns())
    tl.debug_barrier()
    return poll_word(channel.clock + tile)


@triton.jit
def fault(channel, KIND: tl.constexpr, NEIGHBOUR: tl.constexpr, tile, expected, seen):
    """Make every later wait of this communicator give up. The first fault writes the record."""
    p_fault = tl.load(channel.info + INFO_FAULT).to(tl.pointer_type(tl.int64))
    if tl.atomic_xchg(p_fault, 1, sem="relaxed", scope="sys") == 0:
        p_record = tl.load(channel.info + INFO_RECORD).to(tl.pointer_type(tl.int64))
        tl.store(p_record + RECORD_KIND, KIND)
        tl.store(p_record + RECORD_RANK, tl.load(channel.info + INFO_RANK))
        tl.store(p_record + RECORD_NEIGHBOUR, tl.load(channel.info + NEIGHBOUR))
        tl.store(p_record + RECORD_TILE, tile)
        tl.store(p_record + RECORD_EXPECTED, expected)
        tl.store(p_record + RECORD_SEEN, seen)
        tl.debug_barrier()
        # release: the record's words before the flag, for the host
        tl.atomic_xchg(p_record + RECORD_SET, 1, sem="release", scope="sys")


@triton.jit
def reject(p_fault, p_record, KIND: tl.constexpr, place, expected, seen):
    """``fault`` of a value in this rank's memory, without a channel."""
    if tl.atomic_xchg(p_fault, 1, sem="relaxed", scope="sys") == 0:
        tl.store(p_record + RECORD_KIND, KIND)
        tl.store(p_record + RECORD_TILE, place)
        tl.store(p_record + RECORD_EXPECTED, expected)
        tl.store(p_record + RECORD_SEEN, seen)
        tl.debug_barrier()
        # release: the record's words before the flag, for the host
        tl.atomic_xchg(p_record + RECORD_SET, 1, sem="release", scope="sys")


@triton.jit
def gave_up(channel, started, NEIGHBOUR: tl.constexpr, tile, expected, seen):
    """Check whether a wait that began at ``started`` must end: timed out, or after a fault elsewhere."""
    over = poll_word(tl.load(channel.info + INFO_FAULT).to(tl.pointer_type(tl.int64))) != 0
    waited = now(channel, tile) - started
    timeout = tl.load(channel.info + INFO_TIMEOUT_NS)
    if waited > timeout:
        p_record = tl.load(channel.info + INFO_RECORD).to(tl.pointer_type(tl.int64))
        # adds at most 1 ns: without this second condition ptxas 12.8 spills registers in the loops (test_compile.py)
        if waited > timeout + poll_word(p_record + RECORD_SET):
            fault(channel, TIMED_OUT, NEIGHBOUR, tile, expected, seen)
            over = True
    return over


@triton.jit
def wait_signal(channel, p_word, value, NEIGHBOUR: tl.constexpr, tile):
    """Wait until the int64 at ``p_word`` is at least ``value``; True if it is, False if the wait timed out.

    NEIGHBOUR (INFO_PREV or INFO_NEXT) and ``tile`` identify the awaited rank and tile in the record of a time-out.
    """
    # acquire: the writer's stores before it set the word, for the loads and stores below
    seen = tl.atomic_add(p_word, 0, sem="acquire", scope="sys")
    if seen < value:
        started = now(channel, tile)
        waiting = seen < value
        polls = 0
        while waiting:
            seen = tl.atomic_add(p_word, 0, sem="acquire", scope="sys")  # acquire: as above
            waiting = seen < value
            polls += 1
            if waiting & (polls > polls_before_backoff()):
                backoff(polls)
            if waiting & (polls % polls_per_clock() == 0):
                waiting = not gave_up(channel, started, NEIGHBOUR, tile, value, seen)
    return seen >= value


@triton.jit
def set_signal(p_word, value):
    """Set the int64 at ``p_word``, a mapped address, to ``value`` after everything that this block has stored."""
    tl.debug_barrier()  # all threads' stores before the release of the one thread that signals
    # release: this block's stores, for the rank that acquires the word
    tl.atomic_xchg(p_word, value, sem="release", scope="sys")
