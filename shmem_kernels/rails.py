"""The exclusive scan over several nodes: a slice of the state for each GPU of a node, slices scanned over the nodes.

A member of a node gives the owner of a slice its part of it, state and decays; the owner folds the parts of its node,
scans their total over the nodes, along its *rail*, and gives each member its incoming state. docs/rails.md says what
is sent, how much memory that takes, and why no rank waits for ever. In short: a launch has the same number of programs
on all ranks, a program handles the same tiles on all of them, and waits for programs of its own number only, in an
order that is the same everywhere.

Every message crosses a link of links.py, with the arrival word of the tile. ``node`` is a Channel whose words (epochs,
tags, forward epochs) are those of the whole scan, and whose inbox takes what owners send; ``rail`` is the channel of a
chain over the nodes. The others are made here, of addresses in a table, since a member has as many links as its node
has members.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .channel import BROKEN, _arrival_word, all_decays_zero, finish
from .links import NONE, combine, free_slot, give_credit, post, take, wait_credit
from .tiles import load_decays, load_tile, tile_offsets
from .wait import INFO_NEXT, INFO_WORDS, poll_word, wait_signal

RAILS = tl.constexpr(3)  # the kind of link of ``node``, by which nothing crosses

# The table (int64): of this rank
TABLE_MEMBERS = tl.constexpr(0)  # of this rank's node
TABLE_POSITION = tl.constexpr(1)  # of this rank among them, in the order of ranks
TABLE_FIRST = tl.constexpr(2)  # the position of the first of them in the direction of the scan
TABLE_STEP = tl.constexpr(3)  # from one position to the next in that direction: 1 or -1
TABLE_GIVERS = tl.constexpr(4)  # how many of them give: all but the last rank of all
TABLE_FIRST_NODE = tl.constexpr(5)  # whether this node is the first in that direction
TABLE_ROUNDS = tl.constexpr(6)  # where the words of the rounds begin
TABLE_WORDS = tl.constexpr(8)
# ... then of each member, by position: addresses in its memory for what this rank sends to it
MEMBER_GIVEN = tl.constexpr(0)
MEMBER_GIVEN_ARRIVED = tl.constexpr(1)
MEMBER_DECAYS = tl.constexpr(2)
MEMBER_DECAYS_ARRIVED = tl.constexpr(3)
MEMBER_INBOX = tl.constexpr(4)
MEMBER_ARRIVED = tl.constexpr(5)
MEMBER_BEGUN = tl.constexpr(6)
MEMBER_WORDS = tl.constexpr(8)
# ... then of each round over the nodes, twice, for states and for decays: the fields of a Link, and who is there
ROUND_PREV = tl.constexpr(8)
ROUND_NEXT = tl.constexpr(9)
ROUND_INFO = tl.constexpr(10)  # the offset of the round's words in node.info
ROUND_WORDS = tl.constexpr(16)

SMALLEST = tl.constexpr(2.0**-126)
EACH_INFO = tl.constexpr(INFO_WORDS)  # node.info: of this rank; then of each member, by position; then of each round


class Link(NamedTuple):
    """What links.py must know of a link; see Channel."""

    inbox: Any
    next_inbox: Any
    outbox: Any
    arrived: Any
    next_arrived: Any
    freed: Any
    prev_freed: Any
    clock: Any
    info: Any
    num_tiles: tl.constexpr
    BK: tl.constexpr
    BV: tl.constexpr
    DEPTH: tl.constexpr
    RECV: tl.constexpr
    SEND: tl.constexpr


class Outlet(Link):
    """Made in a kernel, in the call that uses it, since no variable and nothing that a jit function returns has
    constants: a Link by which ``post`` goes to addresses of another rank's memory."""

    def __new__(cls, node, next_inbox, next_arrived, num_tiles, BV, LINK) -> Link:  # type: ignore[misc]
        return Link(
            node.inbox,
            next_inbox,
            node.inbox,
            node.arrived,
            next_arrived,
            node.freed,
            node.freed,
            node.clock,
            node.info,
            num_tiles,
            node.BK,
            BV,
            node.DEPTH,
            LINK,
            LINK,
        )


class Inlet(Link):
    """Likewise, by which ``take`` and ``free_slot`` look at this rank's memory. info: of who sends."""

    def __new__(cls, node, inbox, arrived, clock, info, num_tiles, BV, LINK) -> Link:  # type: ignore[misc]
        return Link(
            inbox,
            node.inbox,
            node.inbox,
            arrived,
            node.arrived,
            node.freed,
            node.freed,
            clock,
            info,
            num_tiles,
            node.BK,
            BV,
            node.DEPTH,
            LINK,
            LINK,
        )


class RoundLink(Link):
    """Likewise, of a round over the nodes; ``words``: what _round_words has returned."""

    def __new__(cls, node, words, num_tiles, BV, LINK) -> Link:  # type: ignore[misc]
        inbox, next_inbox, outbox, arrived, next_arrived, freed, prev_freed, info = words
        return Link(
            inbox,
            next_inbox,
            outbox,
            arrived,
            next_arrived,
            freed,
            prev_freed,
            node.clock,
            info,
            num_tiles,
            node.BK,
            BV,
            node.DEPTH,
            LINK,
            LINK,
        )


@triton.jit
def rails_kernel(
    p_state,  # float32 [G, K, V]
    p_decay,  # float32, element (g, k) at g * stride_g + k * stride_k; not read without HAS_DECAY
    p_initial,  # float32 [G, K, V], of the first rank; not read without HAS_INITIAL
    p_out,  # float32 [G, K, V]
    node,
    rail,  # of an owner where the nodes are a chain; else without links
    p_table,  # int64, see above
    p_given,  # float32 [members, DEPTH, SLICE, BK * BV], mine: the members' states
    p_given_arrived,  # int64 [members, DEPTH, SLICE]
    p_decays,  # float32 [members, DEPTH, SLICE, BK * BD], mine: the members' decays, each BD times
    p_decays_arrived,  # int64 [members, DEPTH, SLICE]
    stride_g,
    stride_k,
    K: tl.constexpr,
    V: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    SLICE: tl.constexpr,  # tiles of an owner; the last one may have fewer
    BD: tl.constexpr,  # columns of a message of decays, so that it has a word for each thread
    LINK: tl.constexpr,  # the links between members
    ROUNDS: tl.constexpr,  # over the nodes; 0: a chain
    ROUND_LINK: tl.constexpr,  # the links of the rounds
):
    """R_0 = initial, R_{p+1} = decay_p * R_p + state_p; rank p gets R_p. Tiles program_id, program_id + num_programs,
    ... in ascending order: those that others own are given to them, then the own ones are scanned, then the others
    are taken. The number of programs is the same on all ranks.
    """
    me = tl.load(p_table + TABLE_POSITION).to(tl.int32)
    members = tl.load(p_table + TABLE_MEMBERS).to(tl.int32)
    givers = tl.load(p_table + TABLE_GIVERS).to(tl.int32)
    first = tl.load(p_table + TABLE_FIRST).to(tl.int32)
    step = tl.load(p_table + TABLE_STEP).to(tl.int32)
    in_first_node = tl.load(p_table + TABLE_FIRST_NODE) != 0
    place = (me - first) * step  # in the direction of the scan
    first_of_all = in_first_node & (place == 0)
    begun = _begin(node, rail, p_table, me, members, SLICE, BD, ROUNDS, ROUND_LINK)
    epoch, word, ok = begun

    tile = tl.program_id(0)
    while tile < node.num_tiles:
        owner = tile // SLICE
        if (owner != me) & (place < givers) & ok & (tl.load(node.epoch + tile) == epoch - 1):
            b_state, b_decay = _own_part(
                p_state, p_decay, p_initial, node, tile, stride_g, stride_k, first_of_all, K, V, HAS_DECAY, HAS_INITIAL
            )
            p_owner = p_table + TABLE_WORDS + owner * MEMBER_WORDS
            p_to, p_word = _floats(p_owner + MEMBER_DECAYS), _words(p_owner + MEMBER_DECAYS_ARRIVED)
            b_decays = b_decay + tl.zeros([node.BK, BD], tl.float32)
            post(Outlet(node, p_to, p_word, SLICE, BD, LINK), tile - owner * SLICE, epoch, word, b_decays)
            p_to, p_word = _floats(p_owner + MEMBER_GIVEN), _words(p_owner + MEMBER_GIVEN_ARRIVED)
            post(Outlet(node, p_to, p_word, SLICE, node.BV, LINK), tile - owner * SLICE, epoch, word, b_state)
        tile += tl.num_programs(0)

    tile = tl.program_id(0)
    while tile < node.num_tiles:
        if tile // SLICE == me:
            part = tile - me * SLICE
            well = ok & (tl.load(node.epoch + tile) == epoch - 1)
            b_own, b_own_decay = _own_part(
                p_state, p_decay, p_initial, node, tile, stride_g, stride_k, first_of_all, K, V, HAS_DECAY, HAS_INITIAL
            )
            # the node's total, from zero
            b_sum = tl.zeros([node.BK, node.BV], tl.float32)
            b_product = tl.full([node.BK, 1], 1.0, tl.float32)
            member = first
            i = 0
            while i < givers:
                b_state = b_own
                b_decay = b_own_decay
                if member != me:
                    slots = member * (node.DEPTH * SLICE)
                    p_info, p_clock = node.info + (1 + member) * EACH_INFO, node.clock + me * SLICE
                    p_from, p_word = p_given + slots * (node.BK * node.BV), p_given_arrived + slots
                    b_state, well = take(
                        Inlet(node, p_from, p_word, p_clock, p_info, SLICE, node.BV, LINK), part, epoch, word, well
                    )
                    p_from, p_word = p_decays + slots * (node.BK * BD), p_decays_arrived + slots
                    b_decays, well = take(
                        Inlet(node, p_from, p_word, p_clock, p_info, SLICE, BD, LINK), part, epoch, word, well
                    )
                    b_decay = _column(b_decays)
                b_sum = combine(b_state, b_decay, b_sum)
                b_product = _times(b_decay, b_product)
                member += step
                i += 1

            if ROUNDS == 0:
                b_enters, well = _over_a_chain(rail, part, epoch, word, well, b_sum, b_product)
            else:
                b_enters, well = _over_rounds(
                    node, p_table, part, epoch, word, well, b_sum, b_product, SLICE, BD, ROUNDS, ROUND_LINK
                )

            tl.debug_barrier()  # before threads read words that others have seen; one warp has had no barrier
            # once more, from the node's incoming state
            offsets, inside = tile_offsets(node, tile, K, V)
            member = first
            i = 0
            while well & (i < members):
                if member == me:
                    b_out = b_enters
                    if first_of_all:
                        b_out = _first(p_initial, node, tile, K, V, HAS_INITIAL)
                    tl.store(p_out + offsets, b_out, mask=inside)
                elif (i > 0) | (not in_first_node):
                    p_member = p_table + TABLE_WORDS + member * MEMBER_WORDS
                    p_to, p_word = _floats(p_member + MEMBER_INBOX), _words(p_member + MEMBER_ARRIVED)
                    post(Outlet(node, p_to, p_word, node.num_tiles, node.BV, LINK), tile, epoch, word, b_enters)
                if i < members - 1:
                    b_state = b_own
                    b_decay = b_own_decay
                    if member != me:
                        slot = (member * node.DEPTH + (epoch % node.DEPTH).to(tl.int32)) * SLICE + part
                        rows = tl.arange(0, node.BK)[:, None]
                        p_slot = p_given + slot * (node.BK * node.BV) + rows * node.BV
                        b_state = tl.load(p_slot + tl.arange(0, node.BV)[None, :], volatile=True)
                        b_decay = tl.load(p_decays + slot * (node.BK * BD) + rows * BD, volatile=True)
                    b_enters = combine(b_state, b_decay, b_enters)
                member += step
                i += 1
            tl.debug_barrier()  # all threads have read the parts before their slots are refilled
            member = first
            i = 0
            while well & (i < givers):
                if member != me:
                    slots = member * (node.DEPTH * SLICE)
                    p_from = p_given + slots * (node.BK * node.BV)
                    free_slot(
                        Inlet(node, p_from, node.arrived, node.clock, node.info, SLICE, node.BV, LINK), part, epoch
                    )
                    p_from = p_decays + slots * (node.BK * BD)
                    free_slot(Inlet(node, p_from, node.arrived, node.clock, node.info, SLICE, BD, LINK), part, epoch)
                member += step
                i += 1
            _end(node, tile, epoch, well, p_out + offsets, inside)
        tile += tl.num_programs(0)

    tile = tl.program_id(0)
    while tile < node.num_tiles:
        owner = tile // SLICE
        if owner != me:
            well = ok & (tl.load(node.epoch + tile) == epoch - 1)
            offsets, inside = tile_offsets(node, tile, K, V)
            b_out = _first(p_initial, node, tile, K, V, HAS_INITIAL)
            if not first_of_all:
                p_info = node.info + (1 + owner) * EACH_INFO
                b_out, well = take(
                    Inlet(node, node.inbox, node.arrived, node.clock, p_info, node.num_tiles, node.BV, LINK),
                    tile,
                    epoch,
                    word,
                    well,
                )
                if well:
                    free_slot(
                        Inlet(node, node.inbox, node.arrived, node.clock, p_info, node.num_tiles, node.BV, LINK),
                        tile,
                        epoch,
                    )
            tl.store(p_out + offsets, b_out, mask=inside)
            _end(node, tile, epoch, well, p_out + offsets, inside)
        tile += tl.num_programs(0)


@triton.jit
def _begin(
    node,
    rail,
    p_table,
    me,
    members,
    SLICE: tl.constexpr,
    BD: tl.constexpr,
    ROUNDS: tl.constexpr,
    ROUND_LINK: tl.constexpr,
):
    """Begin the epoch: say so to all who send to this rank, and wait until those whom it sends to have begun the launch
    that says that their slots are free. Returns (epoch, its arrival word, whether all is well)."""
    program = tl.program_id(0)
    epoch = tl.load(node.epoch + program) + 1
    word = _arrival_word(node, program, epoch)
    ok = epoch > 0  # 0: BROKEN
    if ok & ((node.DEPTH == 1) | (program == 0)):
        member = 0
        while member < members:
            if member != me:
                # no release: the slots were read and refilled by launches that have ended
                tl.store(_words(p_table + TABLE_WORDS + member * MEMBER_WORDS + MEMBER_BEGUN), epoch)
            member += 1
    give_credit(rail, program, epoch - 1)
    p_rounds = p_table + tl.load(p_table + TABLE_ROUNDS)
    for i in tl.static_range(2 * ROUNDS):
        if tl.load(p_rounds + i * ROUND_WORDS + ROUND_PREV) != 0:
            words = _round_words(node, p_rounds + i * ROUND_WORDS)
            give_credit(RoundLink(node, words, SLICE, BD, ROUND_LINK), program, epoch - 1)
    member = 0
    while member < members:
        if member != me:
            p_begun = node.freed + member
            # without acquire at first, as in wait_credit: the stores that it allows depend on it
            if ok & (poll_word(p_begun) < epoch - node.DEPTH + 1):
                p_info = node.info + (1 + member) * EACH_INFO
                ok = wait_signal(
                    Inlet(node, node.inbox, node.arrived, node.clock, p_info, node.num_tiles, node.BV, NONE),
                    p_begun,
                    epoch - node.DEPTH + 1,
                    INFO_NEXT,
                    program,
                )
        member += 1
    ok = wait_credit(rail, program, epoch, ok)
    for i in tl.static_range(2 * ROUNDS):
        if tl.load(p_rounds + i * ROUND_WORDS + ROUND_NEXT) != 0:
            words = _round_words(node, p_rounds + i * ROUND_WORDS)
            ok = wait_credit(RoundLink(node, words, SLICE, BD, ROUND_LINK), program, epoch, ok)
    return epoch, word, ok


@triton.jit
def _own_part(
    p_state,
    p_decay,
    p_initial,
    node,
    tile,
    stride_g,
    stride_k,
    first_of_all,
    K: tl.constexpr,
    V: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
):
    """(state [BK, BV], decay [BK, 1]) of this rank; of the first one its outgoing state stands for its state."""
    b_state = load_tile(p_state, node, tile, K, V)
    b_decay = tl.full([node.BK, 1], 1.0, tl.float32)
    if HAS_DECAY:
        b_decay = load_decays(p_decay, node, tile, stride_g, stride_k, K, V)
    if HAS_INITIAL:
        if first_of_all:
            b_state = combine(b_state, b_decay, load_tile(p_initial, node, tile, K, V))
    return b_state, b_decay


@triton.jit
def _first(p_initial, node, tile, K: tl.constexpr, V: tl.constexpr, HAS_INITIAL: tl.constexpr):
    b_first = tl.zeros([node.BK, node.BV], tl.float32)
    if HAS_INITIAL:
        b_first = load_tile(p_initial, node, tile, K, V)
    return b_first


@triton.jit
def _over_a_chain(rail, part, epoch, word, well, b_sum, b_product):
    """(This node's incoming state, whether all is well), where its outgoing state is b_product * that + b_sum."""
    b_enters = tl.zeros([rail.BK, rail.BV], tl.float32)
    if (rail.RECV != NONE) & (rail.SEND != NONE):
        stopped = all_decays_zero(b_product)
        if well & stopped:
            post(rail, part, epoch, word, b_sum)
        b_enters, well = take(rail, part, epoch, word, well)
        if well & (not stopped):
            post(rail, part, epoch, word, combine(b_sum, b_product, b_enters))
    elif rail.SEND != NONE:
        if well:
            post(rail, part, epoch, word, b_sum)  # zero enters the first node
    elif rail.RECV != NONE:
        b_enters, well = take(rail, part, epoch, word, well)
    if well:
        free_slot(rail, part, epoch)
    return b_enters, well


@triton.jit
def _over_rounds(
    node,
    p_table,
    part,
    epoch,
    word,
    well,
    b_sum,
    b_product,
    SLICE: tl.constexpr,
    BD: tl.constexpr,
    ROUNDS: tl.constexpr,
    LINK: tl.constexpr,
):
    """The same by recursive doubling. (b_enters, b_passes) is of the 0, 1, 3, 6, 12 ... nodes before this one; a round
    adds those before them, from a node that has as many. The first round sends a node's own total, the second that and
    the one before it (123-recursive doubling: Traeff, arXiv 2507.04785)."""
    b_enters = tl.zeros([node.BK, node.BV], tl.float32)
    b_passes = tl.full([node.BK, 1], 1.0, tl.float32)
    p_rounds = p_table + tl.load(p_table + TABLE_ROUNDS)
    for i in tl.static_range(ROUNDS):
        p_round = p_rounds + 2 * i * ROUND_WORDS
        if well & (tl.load(p_round + ROUND_NEXT) != 0):
            b_sent = b_enters
            b_sent_decay = b_passes
            if i < 2:
                b_sent = combine(b_sum, b_product, b_enters)
                b_sent_decay = _times(b_product, b_passes)
            b_decays = b_sent_decay + tl.zeros([node.BK, BD], tl.float32)
            words = _round_words(node, p_round + ROUND_WORDS)
            post(RoundLink(node, words, SLICE, BD, LINK), part, epoch, word, b_decays)
            words = _round_words(node, p_round)
            post(RoundLink(node, words, SLICE, node.BV, LINK), part, epoch, word, b_sent)
        if tl.load(p_round + ROUND_PREV) != 0:
            words, of_decays = _round_words(node, p_round), _round_words(node, p_round + ROUND_WORDS)
            b_state, well = take(RoundLink(node, words, SLICE, node.BV, LINK), part, epoch, word, well)
            b_decays, well = take(RoundLink(node, of_decays, SLICE, BD, LINK), part, epoch, word, well)
            b_enters = combine(b_enters, b_passes, b_state)
            b_passes = _times(b_passes, _column(b_decays))
            if well:
                free_slot(RoundLink(node, words, SLICE, node.BV, LINK), part, epoch)
                free_slot(RoundLink(node, of_decays, SLICE, BD, LINK), part, epoch)
    return b_enters, well


@triton.jit
def _round_words(node, p_round):
    return (
        _floats(p_round),
        _floats(p_round + 1),
        _floats(p_round + 2),
        _words(p_round + 3),
        _words(p_round + 4),
        _words(p_round + 5),
        _words(p_round + 6),
        node.info + tl.load(p_round + ROUND_INFO),
    )


@triton.jit
def _end(node, tile, epoch, well, p_out, inside):
    """End the tile's epoch, or spoil its output."""
    if well:
        finish(node, tile, epoch)
    else:
        tl.store(node.epoch + tile, BROKEN)
        tl.store(p_out, tl.full([node.BK, node.BV], float("nan"), tl.float32), mask=inside)


@triton.jit
def _column(b_decays):
    """[BK, 1] of [BK, BD], whose columns are alike."""
    return tl.max(b_decays, axis=1)[:, None]


@triton.jit
def _times(b_later, b_earlier):
    """The product of two decays, which is 0 if and only if one of them is, the other NaN or Inf even."""
    b_product = b_later * b_earlier
    b_product = tl.where(tl.abs(b_product) < SMALLEST, SMALLEST, b_product)
    return tl.where((b_later == 0.0) | (b_earlier == 0.0), 0.0, b_product)


@triton.jit
def _floats(p_address):
    """The address of a tile, found in a table."""
    return tl.multiple_of(tl.load(p_address).to(tl.pointer_type(tl.float32)), 16)


@triton.jit
def _words(p_address):
    return tl.load(p_address).to(tl.pointer_type(tl.int64))
