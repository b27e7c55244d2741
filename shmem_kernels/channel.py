"""The channel: one direction between neighbours, along which the tiles of a state are sent.

A scan numbers its ranks in the direction of the scan: ``prev`` sends to me, I send to ``next``; the first rank has no
prev, the last no next. The state is cut into tiles. Each tile has ``DEPTH`` slots in the receiver's inbox and a scan
number of its own, the *epoch*, which counts 1, 2, 3 ... in device memory: the host passes no values, so a CUDA graph
can replay a scan and ranks may run ahead of each other.

        prev                              me                               next
        freed <----- credit ------  epoch - 1
        stores tile ------------->  inbox[slot]
        (tag, epoch) ------------>  arrived[slot]
                                    prev = inbox[slot]
                                    decay * prev + state ------------->  inbox[slot] ...

``links.py`` says how a tile crosses one link, ``wait.py`` how a rank waits, and what happens at a time-out.

**Credits.** A slot may be written again once its tile was consumed. The launch boundary says that for all tiles at
once: in a launch of epoch e, ``begin`` with tile 0 tells prev ``freed = e - 1`` for all tiles (links.py says by which
words). So a channel is used by launches that follow one another on a stream; each of them handles each tile exactly
once (``recv``, then ``send``; or ``allscan``; or ``shift``), and the program that has tile 0 calls ``begin`` with it.

**In step.** Epochs cannot distinguish a rank that missed a call from a straggler: both have counted one launch less. So
every tile carries a tag with the sender's other counters. A tile whose tag differs from the receiver's own is a fault
(AllScanOutOfStep), found in the first launch that pairs two different calls:

    step        15 bits: the number of calls of ``Communicator.step()``, counted in stream order, plus STEPS_A_STAMP
                times the call's stamp (12 bits), a hash of the arguments that must be equal on all ranks. Device memory
                has one such sum for each stamp: ``Channel.step`` is the address of the call's
    backwards   8 bits: the number of adjoint launches of this tile, in both directions together
    forward     8 bits: for an adjoint launch the epoch of its forward launch, modulo 255, plus 1; for any other 0

A forward launch stores its epoch in ``fwd_epoch``, where the adjoint launch reads it.

**Zero-decay fast path.** If all decays of a tile are exactly 0, the sent tile does not depend on the received one. It
is sent before any wait for prev's tile, and takes one hop for any number of ranks. A program with several tiles calls
``send_ahead`` for all of them before it waits for the first, so that no zero-decay tile waits until another tile has
been received.

**No deadlock.** Every wait leads to an earlier launch or to a smaller rank of the same one, in whatever order programs
take their tiles: docs/memory_model.md, which has the proof and its conditions.

**Free SMs.** Waiting blocks occupy their multiprocessors. Kernels that wait therefore have at most
``Communicator.max_ctas`` programs, by default half the number of multiprocessors, and leave the others to other
kernels, above all NCCL: its blocks need a whole multiprocessor, and the awaited rank may itself be waiting for NCCL.

**Faults.** ``recv`` returns NaN, the tile's epoch becomes ``BROKEN``, nothing is sent any more, and the host raises.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..bindings.triton_compat import builtin
from .links import (
    EPOCH_BITS,
    NONE,
    SENTINEL,
    combine,
    free_slot,
    give_credit,
    pass_words,
    post,
    take,
    wait_credit,
)

BROKEN = tl.constexpr(-1)  # a tile's epoch after a fault

# A tag is step * TAG_STEP + backwards * TAG_BACKWARDS + forward, each modulo the number of its values
STEPS = tl.constexpr(1 << 15)
BACKWARDS = tl.constexpr(1 << 8)
EPOCHS = tl.constexpr((1 << 8) - 1)  # forward is 1 .. EPOCHS; 0 stands for none
STEPS_A_STAMP = tl.constexpr(1 << 3)
STAMPS = tl.constexpr(1 << 12)
TAG_STEP = tl.constexpr(1 << 16)
TAG_BACKWARDS = tl.constexpr(1 << 8)


class Channel(NamedTuple):
    """A channel as one kernel argument, made by ``AllScan.channel``. Addresses are device addresses.

    "mine" is in this rank's memory, "next's" and "prev's" in theirs (for a ``PUT`` link the local symmetric address).
    All words but the tiles are int64.
    """

    inbox: Any  # float32 [DEPTH, num_tiles, BK * BV], mine, written by prev
    next_inbox: Any  # float32, next's inbox
    outbox: Any  # float32, like inbox, mine: source of PUT (unused by other links)
    arrived: Any  # [DEPTH, num_tiles], mine, written by prev: tag and epoch of each slot's tile
    next_arrived: Any  # next's arrived
    freed: Any  # [DEPTH + 1], mine, written by next: tiles up to this epoch were consumed; last: for puts
    prev_freed: Any  # prev's freed
    epoch: Any  # [num_tiles], mine: the last epoch that each tile has completed here
    clock: Any  # [num_tiles], mine: shares the clock among the threads of a waiting tile
    backwards: Any  # [num_tiles], mine: number of adjoint launches of each tile; shared by both directions' channels
    step: Any  # [1], mine: number of calls of Communicator.step(), and the stamp of the call
    fwd_epoch: Any  # [1], mine: the epoch of a forward launch, written by it and read by its adjoint
    info: Any  # [INFO_WORDS], mine: ranks, PEs, addresses of the fault words
    num_tiles: tl.constexpr
    BK: tl.constexpr  # rows of a tile
    BV: tl.constexpr  # columns of a tile
    DEPTH: tl.constexpr
    RECV: tl.constexpr  # the type of the link from prev: NONE, SENTINEL, SIGNAL, PUT (links.py) or RAILS (rails.py)
    SEND: tl.constexpr  # the link to next
    ADJOINT: tl.constexpr  # whether this launch belongs to the forward launch of the forward epoch


@builtin
def check_tile(channel, block, name, _semantic=None) -> None:
    """Raise ValueError, at compile time, unless ``block``, the argument called ``name``, is float32 [BK, BV]."""
    BK, BV, name = map(_value, (channel.BK, channel.BV, name))
    shape = _shape_of(block)
    if shape != [BK, BV] or block.dtype != tl.float32:
        raise ValueError(
            f"{name} must be a tile, float32 [{BK}, {BV}] (channel.BK, channel.BV), got "
            f"{f'{block.dtype} {shape}' if shape else 'a number'}: convert or reshape it; a bitcast sends integers"
        )


@builtin
def check_decay(channel, b_decay, _semantic=None) -> None:
    """Raise ValueError, at compile time, unless ``b_decay`` is a number, or a block [1 or BK, 1 or BV]: one of [BK]
    would be taken for the decays of columns."""
    BK, BV, shape = _value(channel.BK), _value(channel.BV), _shape_of(b_decay)
    if shape and not (len(shape) == 2 and shape[0] in (1, BK) and shape[1] in (1, BV)):
        raise ValueError(
            f"b_decay must be a number or a block [{BK} or 1, {BV} or 1] (channel.BK, channel.BV), got {shape}: "
            "b_decay[:, None] decays rows, b_decay[None, :] columns"
        )


def _value(x: Any) -> Any:
    """The value of a constexpr, or ``x``."""
    return getattr(x, "value", x)


def _shape_of(block: Any) -> list[int]:
    """The shape of a block; [] of a number."""
    return [*map(_value, getattr(block, "shape", ()))]


@triton.jit
def begin(channel, tile, HAS_TILE: tl.constexpr = False):
    """Begin the tile's epoch: give prev its credit, wait for next's. tile: int32.

    Returns (epoch int64, its arrival word int64, whether there was no fault), the same for all tiles of a launch: the
    argument ``begun`` of other functions. A program with several tiles begins once, before the first, with its lowest
    tile. Credits are given with tile 0 (with DEPTH 1 with every tile): a launch in which no program begins with tile 0
    leaves the rank before without slots. Never begin with a tile of another program, which may have ended the epoch. A
    program without a tile (``tile`` is ``num_tiles`` or more) gives no credit and waits for none. HAS_TILE: the launch
    has no such program, which saves a register.
    """
    if HAS_TILE:
        epoch = tl.load(channel.epoch + tile) + 1
        word = _arrival_word(channel, tile, epoch)
    else:
        own = tl.where(tile < channel.num_tiles, tile, 0)
        epoch = tl.where(tile < channel.num_tiles, tl.load(channel.epoch + own), BROKEN) + 1
        word = _arrival_word(channel, own, epoch)
    give_credit(channel, tile, epoch - 1)
    ok = wait_credit(channel, tile, epoch, epoch > 0)  # epoch 0: BROKEN
    return epoch, word, ok


@triton.jit
def _arrival_word(channel, tile, epoch):
    step = tl.load(channel.step)
    backwards = tl.load(channel.backwards + tile)
    tag = step % STEPS * TAG_STEP + backwards % BACKWARDS * TAG_BACKWARDS
    if channel.ADJOINT:
        tag += tl.load(channel.fwd_epoch) % EPOCHS + 1
    return (tag << 32) | (epoch & EPOCH_BITS)


@triton.jit
def receive(channel, tile, epoch, word, ok, b_first):
    """Wait for prev's tile of this epoch. Returns (the tile, ``b_first`` on the first rank, or NaN; whether all is
    well)."""
    if (channel.RECV != NONE) | (channel.SEND != NONE):
        ok = ok & (tl.load(channel.epoch + tile) == epoch - 1)  # else BROKEN, of a program that began well
    return _receive(channel, tile, epoch, word, ok, b_first)


@triton.jit
def _receive(channel, tile, epoch, word, ok, b_first):
    b_prev = b_first
    if channel.RECV != NONE:
        b_prev, ok = take(channel, tile, epoch, word, ok)
    if not ok:
        tl.store(channel.epoch + tile, BROKEN)
        tl.debug_barrier()  # all threads of this block see BROKEN in send
        b_prev = tl.full([channel.BK, channel.BV], float("nan"), tl.float32)
    return b_prev, ok


@triton.jit
def finish(channel, tile, epoch):
    """Free the slot that was received, and end the epoch."""
    if (channel.RECV != NONE) | (channel.SEND != NONE):
        free_slot(channel, tile, epoch)
        _end(channel, tile, epoch)


@triton.jit
def _end(channel, tile, epoch):
    if (channel.RECV != NONE) | (channel.SEND != NONE):
        tl.debug_barrier()  # every thread has read the epoch before it moves on
        tl.store(channel.epoch + tile, epoch)
        if channel.ADJOINT:
            tl.store(channel.backwards + tile, tl.load(channel.backwards + tile) + 1)
        elif tile == 0:
            tl.store(channel.fwd_epoch, epoch)


@triton.jit
def recv(channel, tile, b_first):
    """Receive the tile from prev; ``b_first`` [BK, BV] float32 on the first rank.

    Begins the tile's epoch: gives prev its credit and waits until next has a free slot, so that ``send`` never waits.
    Returns [BK, BV] float32; NaN after a fault.
    """
    check_tile(channel, b_first, "b_first")
    b_prev = b_first
    if (channel.RECV != NONE) | (channel.SEND != NONE):
        epoch, word, ok = begin(channel, tile, True)
        b_prev, _ = receive(channel, tile, epoch, word, ok, b_first)
    return b_prev


@triton.jit
def send(channel, tile, b_value):
    """Send ``b_value`` [BK, BV] float32 to the next rank, free the slot of ``recv`` and end the epoch. Never waits.

    Every rank calls it. The last rank sends nothing, but frees the slot and ends the epoch."""
    check_tile(channel, b_value, "b_value")
    if (channel.RECV != NONE) | (channel.SEND != NONE):
        epoch = tl.load(channel.epoch + tile) + 1
        if epoch > 0:  # not BROKEN
            post(channel, tile, epoch, _arrival_word(channel, tile, epoch), b_value)
            finish(channel, tile, epoch)


@triton.jit
def allscan(channel, tile, b_state, b_decay, b_first):
    """One tile of the exclusive scan: returns prev and sends ``b_decay * prev + b_state`` on.

    ``b_state`` and ``b_first`` (the initial state, used by the first rank) are [BK, BV] float32, ``b_decay`` is a
    number or a block [BK or 1, BV or 1]: other shapes are errors at compile time. Where ``b_decay`` is 0 the result is
    ``b_state``, even if prev is Inf or NaN; where it is 0 in the whole tile, the tile is sent before the wait for
    prev's. Returns (prev, inclusive), both [BK, BV].
    """
    check_tile(channel, b_state, "b_state")
    check_tile(channel, b_first, "b_first")
    check_decay(channel, b_decay)
    b_prev = b_first
    if (channel.RECV == NONE) & (channel.SEND == NONE):
        b_inclusive = combine(b_state, b_decay, b_prev)
    else:
        begun = begin(channel, tile, True)
        send_ahead(channel, tile, begun, b_state, b_decay)
        b_prev, b_inclusive = allscan_begun(channel, tile, begun, b_state, b_decay, b_first)
    return b_prev, b_inclusive


@triton.jit
def send_ahead(channel, tile, begun, b_state, b_decay):
    """Send the tile now if all its decays are zero. Does nothing on the first rank, which waits for no tile, nor on the
    last, which sends none. b_state and b_decay as for ``allscan``.

    For programs with several tiles: ``begun = begin(channel, lowest tile)`` once; ``send_ahead`` for each tile; then
    ``allscan_begun`` for each tile, in any order.
    """
    check_tile(channel, b_state, "b_state")
    check_decay(channel, b_decay)
    if (channel.RECV != NONE) & (channel.SEND != NONE):
        epoch, word, ok = begun
        ok = ok & (tl.load(channel.epoch + tile) == epoch - 1)
        if ok & all_decays_zero(b_decay):
            post(channel, tile, epoch, word, b_state)


@triton.jit
def allscan_begun(channel, tile, begun, b_state, b_decay, b_first):
    """``allscan`` of a tile that has gone through ``send_ahead`` with the same ``begun``, state and decay. b_first and
    the results as there."""
    check_tile(channel, b_state, "b_state")
    check_tile(channel, b_first, "b_first")
    check_decay(channel, b_decay)
    epoch, word, ok = begun
    if (channel.RECV != NONE) | (channel.SEND != NONE):
        ok = ok & (tl.load(channel.epoch + tile) == epoch - 1)
    return _allscan_well(channel, tile, epoch, word, ok, b_state, b_decay, b_first)


@triton.jit
def _allscan_well(channel, tile, epoch, word, ok, b_state, b_decay, b_first):
    """``allscan_begun`` where ``ok`` also says that the tile's epoch is not BROKEN."""
    b_prev = b_first
    if (channel.RECV == NONE) & (channel.SEND == NONE):
        b_inclusive = combine(b_state, b_decay, b_prev)
    else:
        sends = channel.SEND != NONE  # the tile must still be sent, unless send_ahead has sent it
        if (channel.RECV != NONE) & (channel.SEND != NONE):
            sends = not all_decays_zero(b_decay)
        b_prev, ok = _receive(channel, tile, epoch, word, ok, b_first)
        b_inclusive = combine(b_state, b_decay, b_prev)
        if ok:
            if sends:
                post(channel, tile, epoch, word, b_inclusive)
            finish(channel, tile, epoch)
    return b_prev, b_inclusive


@triton.jit
def allscan_to(channel, tile, begun, b_state, b_decay, b_first, p_out, b_inside):
    """``allscan_begun`` that stores prev to ``p_out`` [BK, BV] where ``b_inside``; ``begun`` also says whether all is
    well with this tile. Sentinel links forward each word on arrival, before the whole tile has arrived.
    """
    epoch, word, ok = begun
    if (channel.RECV == SENTINEL) & ((channel.SEND == SENTINEL) | (channel.SEND == NONE)):
        sends = False
        if channel.SEND != NONE:
            sends = not all_decays_zero(b_decay)
        ok = pass_words(channel, tile, epoch, word, ok, sends, b_state, b_decay, p_out, b_inside)
        if ok:
            _end(channel, tile, epoch)
        else:
            tl.store(channel.epoch + tile, BROKEN)
            tl.store(p_out, tl.full([channel.BK, channel.BV], float("nan"), tl.float32), mask=b_inside)
    else:
        b_prev, _ = _allscan_well(channel, tile, epoch, word, ok, b_state, b_decay, b_first)
        tl.store(p_out, b_prev, mask=b_inside)


@triton.jit
def all_decays_zero(b_decay):
    """Check whether every decay of a tile is 0 (-0.0 too, NaN not); the same for all threads of the block."""
    return tl.min((b_decay + tl.zeros([1, 1], tl.float32) == 0.0).to(tl.int32)) > 0


@triton.jit
def shift(channel, tile, b_value, b_first):
    """Neighbour shift of one tile: send ``b_value`` to next and return prev's tile, ``b_first`` on the first rank.

    Equals ``allscan`` with zero decays; use it in place of ``recv`` and ``send``. Both arguments are [BK, BV] float32.
    A program with several tiles calls ``begin`` for the lowest, then ``shift_ahead`` for all, then ``shift_begun`` for
    all.
    """
    begun = begin(channel, tile, True)
    shift_ahead(channel, tile, begun, b_value)
    return shift_begun(channel, tile, begun, b_first)


@triton.jit
def shift_ahead(channel, tile, begun, b_value):
    """The sending half of ``shift``, of b_value [BK, BV] float32."""
    check_tile(channel, b_value, "b_value")
    epoch, word, ok = begun
    if channel.SEND != NONE:
        ok = ok & (tl.load(channel.epoch + tile) == epoch - 1)
    if ok:
        post(channel, tile, epoch, word, b_value)


@triton.jit
def shift_begun(channel, tile, begun, b_first):
    """The receiving half of ``shift``: return prev's tile, b_first [BK, BV] float32 on the first rank, NaN after a
    fault."""
    check_tile(channel, b_first, "b_first")
    b_prev = b_first
    if (channel.RECV != NONE) | (channel.SEND != NONE):
        epoch, word, ok = begun
        b_prev, ok = receive(channel, tile, epoch, word, ok, b_first)
        if ok:
            finish(channel, tile, epoch)
    return b_prev
