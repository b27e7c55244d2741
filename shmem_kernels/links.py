"""Sends a tile over one link of the chain. The link's type is a compile-time constant, the same at both ends.

``SENTINEL``  Stores into the mapped inbox. The words themselves signal their arrival: a free slot is filled with -0.0,
              which is never sent (the sender turns -0.0 into +0.0), and the receiver polls the words. A 4-byte store
              arrives whole, so words need no order among themselves, and no fence. (PTX promises that for relaxed
              stores. These are plain stores of 16 bytes a thread; we assume that they arrive whole and in bounded time.
              The tests' thousands of epochs of fresh values would detect a violation.) So a scan can forward each word
              on arrival (``pass_words``).
``SIGNAL``    Stores into the mapped inbox, then the arrival word as a release.
``PUT``       NVSHMEM's put with signal, for a neighbour that is not mapped (another node). Puts may be reordered.
``NONE``      There is no neighbour on this side.

**Arrival words.** With every tile one int64 is sent: its epoch in the low half, and in the high half the *tag*, 31 bits
that identify the sender's call (channel.py). Each slot of each tile has its own word. The receiver waits until the low
half *equals* the epoch: so a reordered put is not mistaken for another, and the word needs no reset. Then the receiver
compares the tag with its own, before it uses or forwards any part of the tile.

**Credits.** ``freed`` is the last epoch whose tiles were all consumed. Over mapped memory it is one word, whose stores
arrive in order. Over PUT it is one word per slot, so that a late credit cannot overwrite a newer one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..bindings import nvshmem_device as nvshmem
from .wait import (
    INFO_NEXT,
    INFO_NEXT_PE,
    INFO_PREV,
    INFO_PREV_PE,
    OUT_OF_STEP,
    backoff,
    fault,
    gave_up,
    now,
    num_warps,
    opaque,
    poll_word,
    polls_before_backoff,
    polls_per_clock,
    set_signal,
    wait_signal,
)

NONE = tl.constexpr(-1)
SENTINEL = tl.constexpr(0)
SIGNAL = tl.constexpr(1)
PUT = tl.constexpr(2)

SENTINEL_BITS = tl.constexpr(-(2**31))  # -0.0 as int32
EPOCH_BITS = tl.constexpr(0xFFFFFFFF)  # of an arrival word

POLLS_OF_WORDS = tl.constexpr(32)  # then a wait polls the arrival word alone until that arrives

# State of an awaited tile, as seen by a block
HERE = tl.constexpr(0)
OTHER = tl.constexpr(1)
MISSING = tl.constexpr(2)


@triton.jit
def slot_offsets(channel, tile, epoch):
    """Offsets [BK, BV] of a tile's slot in an inbox."""
    SIZE: tl.constexpr = channel.BK * channel.BV
    start = ((epoch % channel.DEPTH) * channel.num_tiles + tile) * SIZE
    rows = tl.arange(0, channel.BK)[:, None] * channel.BV
    return tl.multiple_of(start, SIZE) + rows + tl.arange(0, channel.BV)[None, :]


@triton.jit
def _arrival(channel, tile, epoch):
    """Offset of a tile's arrival word."""
    return (epoch % channel.DEPTH) * channel.num_tiles + tile


@triton.jit
def give_credit(channel, tile, consumed):
    """Tell prev that every tile up to epoch ``consumed`` has been consumed here."""
    if channel.RECV != NONE:
        if ((channel.DEPTH == 1) | (tile == 0)) & (consumed > 0):
            if channel.RECV == PUT:
                # a put of a spare word: it signals once per block, signal_op once per thread
                pe = tl.load(channel.info + INFO_PREV_PE).to(tl.int32)
                spare: tl.constexpr = channel.DEPTH
                nvshmem.putmem_signal_nbi_block(
                    channel.prev_freed + spare,
                    channel.freed + spare,
                    8,
                    channel.prev_freed + consumed % channel.DEPTH,
                    consumed.to(tl.uint64),
                    nvshmem.SIGNAL_SET,
                    pe,
                )
            else:
                # no release: earlier, completed launches have read and refilled the slots
                tl.store(channel.prev_freed, consumed)


@triton.jit
def wait_credit(channel, tile, epoch, ok):
    """Wait until next has consumed the previous tile of this epoch's slot. Returns whether all is well."""
    if channel.SEND != NONE:
        p_freed = channel.freed
        if channel.SEND == PUT:
            p_freed += epoch % channel.DEPTH
        # no acquire: the stores that it allows depend on it
        if ok & (poll_word(p_freed) < epoch - channel.DEPTH):
            ok = wait_signal(channel, p_freed, epoch - channel.DEPTH, INFO_NEXT, tile)
    return ok


@triton.jit
def post(channel, tile, epoch, word, b_value):
    """Send the tile [BK, BV] float32 to next, with its arrival word."""
    at = _arrival(channel, tile, epoch)
    if channel.SEND == SENTINEL:
        tl.store(channel.next_arrived + at, word)
        p_next = channel.next_inbox + slot_offsets(channel, tile, epoch)
        tl.store(p_next.to(tl.pointer_type(tl.int32), bitcast=True), _words_of(b_value))
    elif channel.SEND == SIGNAL:
        tl.store(channel.next_inbox + slot_offsets(channel, tile, epoch), b_value)
        set_signal(channel.next_arrived + at, word)
    elif channel.SEND == PUT:
        SIZE: tl.constexpr = channel.BK * channel.BV
        tl.store(channel.outbox + slot_offsets(channel, tile, epoch), b_value)
        tl.debug_barrier()  # the whole tile is in the outbox before any thread puts its part
        pe = tl.load(channel.info + INFO_NEXT_PE).to(tl.int32)
        # no quiet: the receiver's credit frees the outbox slot
        nvshmem.putmem_signal_nbi_block(
            channel.next_inbox + at * SIZE,
            channel.outbox + at * SIZE,
            SIZE * 4,
            channel.next_arrived + at,
            word.to(tl.uint64),
            nvshmem.SIGNAL_SET,
            pe,
        )


@triton.jit
def _words_of(b_value):
    """Return the words to send: -0.0 becomes +0.0."""
    b_words = b_value.to(tl.int32, bitcast=True)
    return tl.where(b_words == SENTINEL_BITS, 0, b_words)


@triton.jit
def combine(b_state, b_decay, b_prev):
    """Return a rank's outgoing state for its incoming one."""
    return tl.where(b_decay == 0.0, b_state, b_decay * b_prev + b_state)


@triton.jit
def take(channel, tile, epoch, word, ok):
    """Wait for the tile with this arrival word. Returns (the tile [BK, BV], whether all is well)."""
    if channel.RECV == SENTINEL:
        b_prev, seen, ok = _take_sentinel(channel, tile, epoch, word, ok)
    else:
        b_prev, seen, ok = _take_signal(channel, tile, epoch, word, ok)
    if ok & (seen != word):
        fault(channel, OUT_OF_STEP, INFO_PREV, tile, word, seen)
        ok = False
    return b_prev, ok


@triton.jit
def pass_words(channel, tile, epoch, word, ok, sends, b_state, b_decay, p_out, b_inside):
    """Over sentinel links, process each word on arrival: store it to ``p_out`` [BK, BV] where ``b_inside``; with
    ``sends`` combine it and send it on; free its place in the slot. Returns whether all is well.

    Words are processed in groups of four, stored at once. A thread processes a group after it has seen the group and
    the arrival word with the expected tag, independently of other threads.
    """
    _a_word_for_each_thread(channel)
    at = slot_offsets(channel, tile, epoch)
    p_words = (channel.inbox + at).to(tl.pointer_type(tl.int32), bitcast=True)
    p_next = (channel.next_inbox + at).to(tl.pointer_type(tl.int32), bitcast=True)
    p_arrived = channel.arrived + _arrival(channel, tile, epoch)
    b_free = tl.full([channel.BK, channel.BV], SENTINEL_BITS, tl.int32)
    b_left = b_free != 0  # words that have not arrived
    started = tl.full([], 0, tl.int64)
    seen = started  # of the arrival word: may differ between threads
    polls = 0
    state = MISSING
    if channel.SEND != NONE:
        if ok & sends:
            tl.store(channel.next_arrived + _arrival(channel, tile, epoch), word)
    while ok & (state == MISSING):
        b_words, seen = _poll_words(p_words, p_arrived, b_left, SENTINEL_BITS, seen, word, polls)
        b_new = _in_fours((b_words != SENTINEL_BITS) & (seen == word), channel.BK, channel.BV)
        b_prev = b_words.to(tl.float32, bitcast=True)
        if channel.SEND != NONE:
            if sends:
                tl.store(p_next, _words_of(combine(b_state, b_decay, b_prev)), mask=b_new)
        tl.store(p_out, b_prev, mask=b_new & b_inside)
        tl.store(p_words, b_free, mask=b_new)
        b_left = b_left & (b_new == 0)
        state = _state_of_tile(b_left, seen, word)
        polls += 1
        started, ok = _between_polls(channel, tile, epoch, state, polls, started, ok)
    if ok & (state == OTHER):
        fault(channel, OUT_OF_STEP, INFO_PREV, tile, word, poll_word(p_arrived))
        ok = False
    return ok


@triton.jit
def _poll_words(p_words, p_arrived, b_left, other, seen, word, polls):
    """Load the words ``b_left``, and the arrival word, which this thread has last ``seen``. Returns (the words [BK, BV]
    int32, ``other`` where none was loaded; the arrival word). Each word that is not polled leaves the cache to those
    that arrive; after POLLS_OF_WORDS polls only the arrival word is polled until it is ``word``."""
    due = (seen == word) | (polls < POLLS_OF_WORDS)
    b_words = tl.load(p_words, mask=b_left & due, other=other, volatile=True)
    # opaque: Triton takes a loaded scalar as uniform, and may turn a select on it into a branch
    return b_words, opaque(tl.load(p_arrived, volatile=True))


@triton.jit
def _state_of_tile(b_left, seen, word):
    """Return HERE if no word is ``b_left``, OTHER if the arrival word has another tag, else MISSING: block-uniform.
    b_left: words that are missing, or cannot be used before the arrival word is there."""
    other = (seen != word) & ((seen ^ word) & EPOCH_BITS == 0)
    return tl.max(tl.where(b_left, tl.where(other, OTHER, MISSING), HERE))


@triton.jit
def _between_polls(channel, tile, epoch, state, polls, started, ok):
    """Pause after many polls of a tile that is MISSING. Returns (when the pauses began, from which the time-out counts;
    whether to go on)."""
    if state == MISSING:
        if polls > polls_before_backoff():
            if polls == polls_before_backoff() + 1:
                started = now(channel, tile)
            backoff(polls)
        if polls % polls_per_clock() == 0:
            ok = not gave_up(channel, started, INFO_PREV, tile, epoch, epoch - 1)
    return started, ok


@triton.jit
def _in_fours(b_here, BK: tl.constexpr, BV: tl.constexpr):
    """Select the words whose whole group of four is ``b_here``, so that 16-byte stores stay whole."""
    if BV >= 4:
        b_all = tl.min(tl.reshape(b_here.to(tl.int32), [BK, BV // 4, 4]), axis=2, keep_dims=True)
        b_here = tl.reshape(tl.broadcast_to(b_all, [BK, BV // 4, 4]), [BK, BV]) > 0
        b_here = tl.max_constancy(b_here, [1, 4])
    return b_here


@triton.jit
def _a_word_for_each_thread(channel):
    """Assert that no two warps hold the same words, so that a reduction of them is over the whole block.

    Lanes of one warp may hold the same word if the tile has fewer than 32. They load it by one instruction, which reads
    an address once for all lanes, so that no lane finds a word refilled that another has seen. If one did, its wait
    would time out: no wrong number."""
    tl.static_assert(
        (num_warps() == 1) | (channel.BK * channel.BV >= 32 * num_warps()),
        "a tile needs at least one word for each thread: launch with fewer warps or choose larger tiles",
    )


@triton.jit
def _take_sentinel(channel, tile, epoch, word, ok):
    _a_word_for_each_thread(channel)
    p_words = (channel.inbox + slot_offsets(channel, tile, epoch)).to(tl.pointer_type(tl.int32), bitcast=True)
    p_arrived = channel.arrived + _arrival(channel, tile, epoch)
    b_words = tl.full([channel.BK, channel.BV], SENTINEL_BITS, tl.int32)
    started = tl.full([], 0, tl.int64)
    seen = started
    polls = 0
    state = MISSING
    while ok & (state == MISSING):
        b_left = _in_fours(b_words != SENTINEL_BITS, channel.BK, channel.BV) == 0
        b_words, seen = _poll_words(p_words, p_arrived, b_left, b_words, seen, word, polls)
        state = _state_of_tile((b_words == SENTINEL_BITS) | (seen != word), seen, word)
        polls += 1
        started, ok = _between_polls(channel, tile, epoch, state, polls, started, ok)
    seen = word
    if state == OTHER:
        seen = poll_word(p_arrived)
    return b_words.to(tl.float32, bitcast=True), seen, ok


@triton.jit
def _take_signal(channel, tile, epoch, word, ok):
    p_arrived = channel.arrived + _arrival(channel, tile, epoch)
    # acquire: the tile, which the sender stored before the word, for the loads below
    seen = tl.atomic_add(p_arrived, 0, sem="acquire", scope="sys")
    missing = (seen ^ word) & EPOCH_BITS != 0
    if ok & missing:
        started = now(channel, tile)
        polls = 0
        while ok & missing:
            seen = tl.atomic_add(p_arrived, 0, sem="acquire", scope="sys")  # acquire: as above
            missing = (seen ^ word) & EPOCH_BITS != 0
            polls += 1
            if (polls > polls_before_backoff()) & missing:
                backoff(polls)
            if missing & (polls % polls_per_clock() == 0):
                ok = not gave_up(channel, started, INFO_PREV, tile, epoch, epoch - 1)
    if channel.RECV == PUT:
        if ok:  # returns at once; makes data that a network card wrote visible where the hardware needs that
            nvshmem.signal_wait_until(p_arrived, nvshmem.CMP_EQ, seen.to(tl.uint64))
    return tl.load(channel.inbox + slot_offsets(channel, tile, epoch), volatile=True), seen, ok


@triton.jit
def free_slot(channel, tile, epoch):
    """Make the slot of a received tile ready for another one."""
    if channel.RECV == SENTINEL:
        p_slot = channel.inbox + slot_offsets(channel, tile, epoch)
        b_free = tl.full([channel.BK, channel.BV], SENTINEL_BITS, tl.int32)
        tl.store(p_slot.to(tl.pointer_type(tl.int32), bitcast=True), b_free)
