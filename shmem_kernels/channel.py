"""The channel: one direction between neighbours, along which the tiles of a state travel.

A scan numbers its ranks in the direction of travel: ``prev`` sends to me, I send to ``next``; the first rank has no
prev, the last no next. The state is cut into tiles. Each tile has ``DEPTH`` slots in the receiver's inbox and a scan
number of its own, the *epoch*, which counts 1, 2, 3 ... in device memory: nothing comes from the host, so a CUDA graph
can replay a scan and ranks may run ahead of each other.

        prev                              me                               next
        inbox[slot] <-- credits --  freed = epoch - 1
        stores tile ------------->  inbox[slot]
        arrived = epoch --------->  arrived               (signal protocols only)
                                    prev = inbox[slot]
                                    decay * prev + state ------------->  inbox[slot] ...

**Links.** How a tile crosses one link, fixed when the kernel is compiled and the same at both ends:

``SENTINEL``  Stores into the mapped inbox. Every word says for itself that it has arrived: a free slot is filled with
              -0.0, which is never sent (the sender turns -0.0 into +0.0), and the receiver polls the words themselves.
              A 4-byte store arrives whole, so no word needs an order to another, and no fence is paid. (PTX promises
              that of relaxed stores; these are plain ones, 16 bytes a thread. That they arrive whole and soon is what
              GPUs do, and what the tests' thousands of epochs of fresh values would show.)
``SIGNAL``    Stores into the mapped inbox, then ``arrived = epoch`` as a release.
``PUT``       NVSHMEM's put with signal, for a neighbour that is not mapped (another node).
``NONE``      There is no neighbour on this side.

**Credits.** A slot may be written again once its tile was consumed. The launch boundary says that for all tiles at
once: a launch of epoch e begins by telling prev ``freed = e - 1``, one word a channel. So a channel is used by launches
that follow one another on a stream, and each of them handles each tile exactly once: ``recv``, then ``send``; or
``shift``.

**No deadlock.** A tile of epoch e waits for (a) ``freed >= e - DEPTH``, given by the *beginning* of next's launch
e - DEPTH + 1, and (b) the same tile of epoch e on prev, never for another tile of its own rank.
Order waits by (epoch, place of the rank): (b) leads to the same epoch and a smaller place, and ends at the first rank.
(a) with DEPTH >= 2 leads to an earlier launch of next, which completes by induction; with DEPTH = 1 it leads to next's
launch of the same epoch, where every tile gives the credit before it waits for anything. Blocks need not be
co-resident, except that a rank's waiting blocks must not keep *another rank's* blocks off a GPU: one rank a GPU.

**One opinion a block.** Triton takes a scalar to be the same in all threads, but warps that load a changing word, or
read a clock, may see different values and then take different branches around a barrier. So one thread looks, by an
atomic whose result the block shares; a tile's own words are looked at by all threads and reduced over the block.

**Faults.** Every wait ends after ``timeout`` by the clock. The first one that does records who waited for whom in
memory that the host can read; ``recv`` then returns NaN, the tile's epoch becomes ``BROKEN``, nothing is sent any more,
and later waits of the communicator give up at once.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import triton
import triton.language as tl
from triton.language import core

from ..bindings import nvshmem_device as nvshmem

NONE = tl.constexpr(-1)
SENTINEL = tl.constexpr(0)
SIGNAL = tl.constexpr(1)
PUT = tl.constexpr(2)

SENTINEL_BITS = tl.constexpr(-(2**31))  # -0.0 as int32
BROKEN = tl.constexpr(-1)  # a tile's epoch after a wait that timed out

# Words of Channel.info (int64)
INFO_RANK = tl.constexpr(0)
INFO_PREV = tl.constexpr(1)
INFO_NEXT = tl.constexpr(2)
INFO_PREV_PE = tl.constexpr(3)
INFO_NEXT_PE = tl.constexpr(4)
INFO_TIMEOUT_NS = tl.constexpr(5)
INFO_FAULT = tl.constexpr(6)  # address of an int64: 1 once a wait of this communicator has timed out
INFO_RECORD = tl.constexpr(7)  # address of the record below, in memory that the host can read
INFO_WORDS = 8

# Words of the record (int64), written once by the first wait that times out; RECORD_SET is written last
RECORD_SET = tl.constexpr(0)
RECORD_RANK = tl.constexpr(1)
RECORD_NEIGHBOUR = tl.constexpr(2)
RECORD_TILE = tl.constexpr(3)
RECORD_EXPECTED = tl.constexpr(4)
RECORD_SEEN = tl.constexpr(5)
RECORD_WORDS = 8

POLLS_PER_CLOCK = tl.constexpr(64)
HOT_POLLS = tl.constexpr(32)  # looks at full speed; a longer wait pauses in between, for the sake of other kernels


class Channel(NamedTuple):
    """What a kernel must know of a channel: one argument. Made by ``AllScan.channel``; addresses are device addresses.

    "mine" lies in this rank's memory, "next's" and "prev's" in theirs (for a ``PUT`` link: the local symmetric address
    that stands for it). All words but the tiles are int64.
    """

    inbox: object  # float32 [DEPTH, num_tiles, BK * BV], mine, written by prev
    next_inbox: object  # float32, next's inbox
    outbox: object  # float32, like inbox, mine: where PUT sends from (other links do not use it)
    arrived: object  # [num_tiles], mine, written by prev: the last epoch of each tile (SENTINEL does not use it)
    next_arrived: object  # next's arrived
    freed: object  # [2], mine, written by next: every tile up to this epoch was consumed; a spare word
    prev_freed: object  # prev's freed
    epoch: object  # [num_tiles], mine: the last epoch that each tile has completed here
    clock: object  # [num_tiles], mine: where a waiting tile shares its clock among its threads
    info: object  # [INFO_WORDS], mine: ranks, PEs and what a fault needs
    num_tiles: tl.constexpr
    BK: tl.constexpr  # rows of a tile
    BV: tl.constexpr  # columns of a tile
    DEPTH: tl.constexpr
    RECV: tl.constexpr  # the link from prev
    SEND: tl.constexpr  # the link to next


def builtin(function):
    """A function that the compiler calls with a builder, and the interpreter without one."""
    setattr(function, core.TRITON_BUILTIN, True)
    return function


@builtin
def clock_ns(_semantic=None):
    """A clock in nanoseconds. In the interpreter, where a rank is a process, it lets other processes run too."""
    if _semantic is None:
        time.sleep(2e-5)
        return time.monotonic_ns()
    return core.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=core.int64, is_pure=False, pack=1, _semantic=_semantic
    )


@builtin
def pause(_semantic=None):
    """Let other warps run for half a microsecond or so."""
    if _semantic is not None:
        core.inline_asm_elementwise(
            "nanosleep.u32 500; mov.u32 $0, 0;", "=r", [], dtype=core.int32, is_pure=False, pack=1, _semantic=_semantic
        )


@builtin
def num_warps(_semantic=None):
    """Warps of a program, at compile time; 1 in the interpreter."""
    return core.constexpr(1 if _semantic is None else _semantic.builder.options.num_warps)


@triton.jit
def _look(p_word):
    """What one thread sees at ``p_word``, for all threads of the block."""
    return tl.atomic_add(p_word, 0, sem="relaxed", scope="sys")


@triton.jit
def _now(channel, tile):
    """The clock of one thread, for all threads of the block."""
    tl.store(channel.clock + tile, clock_ns())
    tl.debug_barrier()
    return _look(channel.clock + tile)


@triton.jit
def _gave_up(channel, started, NEIGHBOUR: tl.constexpr, tile, expected, seen):
    """Whether a wait that began at ``started`` is to end: its time is over, or another wait's was."""
    p_fault = tl.load(channel.info + INFO_FAULT).to(tl.pointer_type(tl.int64))
    fault = _look(p_fault) != 0
    if _now(channel, tile) - started > tl.load(channel.info + INFO_TIMEOUT_NS):
        if tl.atomic_xchg(p_fault, 1, sem="relaxed", scope="sys") == 0:  # the first one writes the record
            p_record = tl.load(channel.info + INFO_RECORD).to(tl.pointer_type(tl.int64))
            tl.store(p_record + RECORD_RANK, tl.load(channel.info + INFO_RANK))
            tl.store(p_record + RECORD_NEIGHBOUR, tl.load(channel.info + NEIGHBOUR))
            tl.store(p_record + RECORD_TILE, tile)
            tl.store(p_record + RECORD_EXPECTED, expected)
            tl.store(p_record + RECORD_SEEN, seen)
            tl.debug_barrier()
            # release: the record's words before the flag, for the host
            tl.atomic_xchg(p_record + RECORD_SET, 1, sem="release", scope="sys")
        fault = True
    return fault


@triton.jit
def wait_signal(channel, p_word, value, NEIGHBOUR: tl.constexpr, tile):
    """Wait until the int64 at ``p_word`` is at least ``value``; True if it is, False if the wait timed out.

    NEIGHBOUR (INFO_PREV or INFO_NEXT) and ``tile`` say in the record of a time-out who was waited for, and for what.
    """
    # acquire: what the writer stored before it set the word, for the loads and stores below
    seen = tl.atomic_add(p_word, 0, sem="acquire", scope="sys")
    if seen < value:
        started = _now(channel, tile)
        waiting = seen < value
        polls = 0
        while waiting:
            seen = tl.atomic_add(p_word, 0, sem="acquire", scope="sys")  # acquire: as above
            waiting = seen < value
            polls += 1
            if waiting & (polls > HOT_POLLS):
                pause()
            if waiting & (polls % POLLS_PER_CLOCK == 0):
                waiting = not _gave_up(channel, started, NEIGHBOUR, tile, value, seen)
    return seen >= value


@triton.jit
def set_signal(p_word, value):
    """Set the int64 at ``p_word``, a mapped address, to ``value`` after everything that this block has stored."""
    tl.debug_barrier()  # all threads' stores before the release of the one thread that signals
    # release: this block's stores, for whoever acquires the word
    tl.atomic_xchg(p_word, value, sem="release", scope="sys")


@triton.jit
def _slot(channel, tile, epoch):
    """Offsets [BK, BV] of a tile's slot in an inbox."""
    SIZE: tl.constexpr = channel.BK * channel.BV
    start = ((epoch % channel.DEPTH) * channel.num_tiles + tile) * SIZE
    rows = tl.arange(0, channel.BK)[:, None] * channel.BV
    return tl.multiple_of(start, SIZE) + rows + tl.arange(0, channel.BV)[None, :]


@triton.jit
def _give_credit(channel, tile, consumed):
    """Tell prev that every tile up to epoch ``consumed`` has been consumed here."""
    if channel.RECV != NONE:
        if (channel.DEPTH == 1) | (tile == 0):
            if channel.RECV == PUT:
                # a put of a spare word, because it signals once a block; signal_op would once a thread
                pe = tl.load(channel.info + INFO_PREV_PE).to(tl.int32)
                nvshmem.putmem_signal_nbi_block(
                    channel.prev_freed + 1, channel.freed + 1, 8,
                    channel.prev_freed, consumed.to(tl.uint64), nvshmem.SIGNAL_SET, pe,
                )  # fmt: skip
            else:
                # no release: what prev must see, the slots read and refilled, was done by launches that have ended
                tl.store(channel.prev_freed, consumed)


@triton.jit
def recv(channel, tile, b_first):
    """Receive the tile: what all ranks before this one sent through; ``b_first`` [BK, BV] float32 on the first rank.

    Begins the tile's epoch: gives prev its credit and waits until next has a slot free, so that ``send`` never waits.
    Returns [BK, BV] float32; NaN after a time-out.
    """
    b_prev = b_first
    if (channel.RECV != NONE) | (channel.SEND != NONE):
        epoch, ok = _begin(channel, tile)
        b_prev, _ = _receive(channel, tile, epoch, ok, b_first)
    return b_prev


@triton.jit
def _begin(channel, tile):
    """Give prev its credit, wait for next's; the epoch that begins, and whether all is well."""
    epoch = tl.load(channel.epoch + tile) + 1
    if channel.SEND != NONE:
        # without acquire, since the stores that it allows depend on it; here, so that it travels with the epoch
        freed = _look(channel.freed)
    _give_credit(channel, tile, epoch - 1)
    ok = epoch > 0  # not BROKEN
    if channel.SEND != NONE:
        if ok & (freed < epoch - channel.DEPTH):
            ok = wait_signal(channel, channel.freed, epoch - channel.DEPTH, INFO_NEXT, tile)
    return epoch, ok


@triton.jit
def _receive(channel, tile, epoch, ok, b_first):
    """Wait for the tile; (the tile or NaN, whether all is well)."""
    b_prev = b_first
    if channel.RECV == SENTINEL:
        b_prev, ok = _recv_sentinel(channel, tile, epoch, ok)
    elif channel.RECV != NONE:
        b_prev, ok = _recv_signal(channel, tile, epoch, ok)
    if not ok:
        tl.store(channel.epoch + tile, BROKEN)
        tl.debug_barrier()  # all threads of this block see BROKEN in send
        b_prev = tl.full([channel.BK, channel.BV], float("nan"), tl.float32)
    return b_prev, ok


@triton.jit
def _recv_sentinel(channel, tile, epoch, ok):
    # so that no two warps hold the same words, and the reduction below is over the whole block
    tl.static_assert(
        (num_warps() == 1) | (channel.BK * channel.BV >= 32 * num_warps()),
        "a tile needs at least one word for each thread: launch with fewer warps or choose larger tiles",
    )
    p_words = (channel.inbox + _slot(channel, tile, epoch)).to(tl.pointer_type(tl.int32), bitcast=True)
    b_words = tl.load(p_words, volatile=True)  # [BK, BV]
    missing = tl.max((b_words == SENTINEL_BITS).to(tl.int32))
    if ok & (missing > 0):
        started = _now(channel, tile)
        polls = 0
        while ok & (missing > 0):
            b_words = tl.load(p_words, volatile=True)
            missing = tl.max((b_words == SENTINEL_BITS).to(tl.int32))
            polls += 1
            if (polls > HOT_POLLS) & (missing > 0):
                pause()
            if (missing > 0) & (polls % POLLS_PER_CLOCK == 0):
                ok = not _gave_up(channel, started, INFO_PREV, tile, epoch, epoch - 1)
    return b_words.to(tl.float32, bitcast=True), ok


@triton.jit
def _recv_signal(channel, tile, epoch, ok):
    if ok:
        ok = wait_signal(channel, channel.arrived + tile, epoch, INFO_PREV, tile)
    if channel.RECV == PUT:
        if ok:  # returns at once; makes data that a network card wrote visible where the hardware needs that
            nvshmem.signal_wait_until(channel.arrived + tile, nvshmem.CMP_GE, epoch.to(tl.uint64))
    return tl.load(channel.inbox + _slot(channel, tile, epoch), volatile=True), ok


@triton.jit
def send(channel, tile, b_value):
    """Send ``b_value`` [BK, BV] float32 to the next rank, free the slot of ``recv`` and end the epoch. Never waits.

    Every rank calls it, the last one too, which has nobody to send to but a slot to free and an epoch to end."""
    if (channel.RECV != NONE) | (channel.SEND != NONE):
        epoch = tl.load(channel.epoch + tile) + 1
        if epoch > 0:  # not BROKEN
            _post(channel, tile, b_value, epoch)
            _end(channel, tile, epoch)


@triton.jit
def _post(channel, tile, b_value, epoch):
    """Let the tile travel to next."""
    if channel.SEND == SENTINEL:
        b_words = b_value.to(tl.int32, bitcast=True)
        b_words = tl.where(b_words == SENTINEL_BITS, 0, b_words)
        p_next = channel.next_inbox + _slot(channel, tile, epoch)
        tl.store(p_next.to(tl.pointer_type(tl.int32), bitcast=True), b_words)
    elif channel.SEND == SIGNAL:
        tl.store(channel.next_inbox + _slot(channel, tile, epoch), b_value)
        set_signal(channel.next_arrived + tile, epoch)
    elif channel.SEND == PUT:
        _put(channel, tile, epoch, b_value)


@triton.jit
def _end(channel, tile, epoch):
    """Free the slot that was received, and end the epoch."""
    if channel.RECV == SENTINEL:
        p_slot = channel.inbox + _slot(channel, tile, epoch)
        b_free = tl.full([channel.BK, channel.BV], SENTINEL_BITS, tl.int32)
        tl.store(p_slot.to(tl.pointer_type(tl.int32), bitcast=True), b_free)
    tl.debug_barrier()  # every thread has read the epoch before it moves on
    tl.store(channel.epoch + tile, epoch)


@triton.jit
def _put(channel, tile, epoch, b_value):
    SIZE: tl.constexpr = channel.BK * channel.BV
    tl.store(channel.outbox + _slot(channel, tile, epoch), b_value)
    tl.debug_barrier()  # the whole tile is in the outbox before any thread puts its part
    start = ((epoch % channel.DEPTH) * channel.num_tiles + tile) * SIZE
    pe = tl.load(channel.info + INFO_NEXT_PE).to(tl.int32)
    # the outbox slot is free again when the receiver gives the credit for it: no quiet
    nvshmem.putmem_signal_nbi_block(
        channel.next_inbox + start, channel.outbox + start, SIZE * 4,
        channel.next_arrived + tile, epoch.to(tl.uint64), nvshmem.SIGNAL_SET, pe,
    )  # fmt: skip


@triton.jit
def allscan(channel, tile, b_state, b_decay, b_first):
    """One tile of the exclusive scan: returns prev and sends ``b_decay * prev + b_state`` on.

    ``b_state`` and ``b_first`` (the initial state, used by the first rank) are [BK, BV] float32, ``b_decay`` is
    broadcastable to them. Where ``b_decay`` is 0 nothing passes, not even Inf or NaN.
    Returns (prev, inclusive), both [BK, BV].
    """
    if (channel.RECV == NONE) & (channel.SEND == NONE):
        b_prev = b_first
        b_inclusive = _combine(b_state, b_decay, b_prev)
    else:
        epoch, ok = _begin(channel, tile)
        b_prev, ok = _receive(channel, tile, epoch, ok, b_first)
        b_inclusive = _combine(b_state, b_decay, b_prev)
        if ok:
            _post(channel, tile, b_inclusive, epoch)
            _end(channel, tile, epoch)
    return b_prev, b_inclusive


@triton.jit
def _combine(b_state, b_decay, b_prev):
    return tl.where(b_decay == 0.0, b_state, b_decay * b_prev + b_state)


@triton.jit
def shift(channel, tile, b_value, b_first):
    """One tile over one hop: send ``b_value`` to next and return what prev has sent, ``b_first`` on the first rank.

    What :func:`allscan` gives where every decay is 0, but sent before it waits: a rank waits for its neighbours only.
    In place of ``recv`` and ``send``. Both are [BK, BV] float32.
    """
    b_prev = b_first
    if (channel.RECV != NONE) | (channel.SEND != NONE):
        epoch, ok = _begin(channel, tile)
        if ok:
            _post(channel, tile, b_value, epoch)
        b_prev, ok = _receive(channel, tile, epoch, ok, b_first)
        if ok:
            _end(channel, tile, epoch)
    return b_prev
