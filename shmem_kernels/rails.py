"""The exclusive scan over several nodes: a slice of the state for each GPU of a node, slices scanned over the nodes.

Each member of a node sends the owner of a slice its part of that slice, state and decays. The owner folds the parts of
its node, scans their total over the nodes, along its *rail*, and sends each member its incoming state. docs/rails.md
describes the messages, the memory, and why no rank waits for ever. In short: a launch has the same number of programs
on all ranks; a program handles the same tiles on all ranks, and waits only for programs with its own index, in the
same order on all ranks.

Every message crosses a link of links.py, with the arrival word of the tile. ``node`` is a Channel whose words (epochs,
tags, forward epochs) are those of the whole scan, and whose inbox receives the owners' tiles; ``rail`` is the channel
of a chain over the nodes. All other links are built here from addresses in a table, since a member has a link to each
member of its node.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any, NamedTuple

import triton
import triton.language as tl

from .channel import BROKEN, _arrival_word, all_decays_zero, finish
from .links import NONE, combine, free_slot, give_credit, post, take, wait_credit
from .tiles import load_decays, load_tile, tile_offsets
from .wait import INFO_NEXT, INFO_WORDS, poll_word, wait_signal

RAILS = tl.constexpr(3)  # link type of ``node``, which carries no tiles itself
SMALLEST = tl.constexpr(2.0**-126)
EACH_INFO = tl.constexpr(INFO_WORDS)  # node.info: of this rank; then of each member, by position; then of each round


# The table of a rank, int64 words: the fields of a Table; a Member for each member of its node, by position; two Rounds
# for each round over the nodes: for states and for decays. The host writes rows by name; TABLE, MEMBER and ROUND are
# the kernels' offsets of the fields of a row.


class Table(NamedTuple):
    """This rank's place in its node."""

    members: Any  # number of members of this rank's node
    position: Any  # this rank's position among them, in the order of ranks
    first: Any  # position of the first member in the direction of the scan
    step: Any  # from one position to the next in that direction: 1 or -1
    givers: Any  # number of members that send parts: all but the last rank of the whole scan
    in_first_node: Any  # whether this node is the first in that direction


class Member(NamedTuple):
    """Addresses in a member's memory, for this rank's messages to it."""

    states: Any
    states_arrived: Any
    decays: Any
    decays_arrived: Any
    inbox: Any
    arrived: Any
    begun: Any


# inbox to prev_freed: addresses, as in a Link; receives, sends: whether this rank receives and sends in this round;
# info: the offset of the round's words in node.info.
Round = namedtuple("Round", "inbox next_inbox outbox arrived next_arrived freed prev_freed receives sends info")

TABLE = tl.constexpr(Table(*range(len(Table._fields))))
TABLE_WORDS = tl.constexpr(len(Table._fields))
MEMBER = tl.constexpr(Member(*range(len(Member._fields))))
MEMBER_WORDS = tl.constexpr(len(Member._fields))
ROUND = tl.constexpr(Round(*range(len(Round._fields))))
ROUND_WORDS = tl.constexpr(len(Round._fields))


class Slice(NamedTuple):
    """The slices, mainly this rank's own, as one kernel argument. Addresses are device addresses."""

    table: Any  # int64, see above
    states: Any  # float32 [members, DEPTH, SLICE, BK * BV], mine: the members' states
    states_arrived: Any  # int64 [members, DEPTH, SLICE]
    decays: Any  # float32 [members, DEPTH, SLICE, BK * BD], mine: the members' decays, each BD times
    decays_arrived: Any  # int64 [members, DEPTH, SLICE]
    SLICE: tl.constexpr  # tiles of an owner; the last one may have fewer
    BD: tl.constexpr  # columns of a message of decays, so that it has a word for each thread
    LINK: tl.constexpr  # the links between members
    ROUNDS: tl.constexpr  # over the nodes; 0: a chain
    ROUND_LINK: tl.constexpr  # the links of the rounds


class Inputs(NamedTuple):
    """This rank's state, and the address for its incoming state. Built in a kernel, in the call that uses it, like the
    classes below."""

    state: Any  # float32 [G, K, V]
    decay: Any  # float32, element (g, k) at g * stride_g + k * stride_k; not read without HAS_DECAY
    initial: Any  # float32 [G, K, V], of the first rank; not read without HAS_INITIAL
    out: Any  # float32 [G, K, V]
    stride_g: Any
    stride_k: Any
    K: tl.constexpr
    V: tl.constexpr
    HAS_DECAY: tl.constexpr
    HAS_INITIAL: tl.constexpr


_Link = namedtuple(
    "_Link",
    "inbox next_inbox outbox arrived next_arrived freed prev_freed clock info num_tiles BK BV DEPTH RECV SEND",
)


class Link(_Link):
    """The fields of a channel that links.py uses; see Channel."""


def _constants(node, num_tiles, BV, LINK) -> tuple[Any, ...]:
    """Return the compile-time fields of a Link."""
    return num_tiles, node.BK, BV, node.DEPTH, LINK, LINK


class Outlet(Link):
    """A Link by which ``post`` sends to addresses of another rank's memory. Built in a kernel, in the call that uses
    it: variables and results of jit functions cannot hold constants."""

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
            *_constants(node, num_tiles, BV, LINK),
        )


class Inlet(Link):
    """A Link by which ``take`` and ``free_slot`` use this rank's memory; see Outlet. info: the sender's."""

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
            *_constants(node, num_tiles, BV, LINK),
        )


class RoundLink(Link):
    """The Link of a round over the nodes; see Outlet. ``words``: the result of _round_words."""

    def __new__(cls, node, own, words, BV) -> Link:  # type: ignore[misc]
        inbox, next_inbox, outbox, arrived, next_arrived, freed, prev_freed, info = words
        fixed = _constants(node, own.SLICE, BV, own.ROUND_LINK)
        return Link(inbox, next_inbox, outbox, arrived, next_arrived, freed, prev_freed, node.clock, info, *fixed)


@triton.jit
def rails_kernel(
    p_state,  # float32 [G, K, V]
    p_decay,  # float32, see Inputs
    p_initial,  # float32 [G, K, V]
    p_out,  # float32 [G, K, V]; out
    node,  # Channel, see above
    rail,  # of an owner where the nodes are a chain; else without links
    own,  # Slice
    stride_g,
    stride_k,
    K: tl.constexpr,
    V: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
):
    """R_0 = initial, R_{p+1} = decay_p * R_p + state_p; rank p gets R_p. See Inputs. The number of programs is the same
    on all ranks."""
    _scan_over_nodes(
        Inputs(p_state, p_decay, p_initial, p_out, stride_g, stride_k, K, V, HAS_DECAY, HAS_INITIAL), node, rail, own
    )


@triton.jit
def _scan_over_nodes(inputs, node, rail, own):
    """Process tiles program_id, program_id + num_programs, ... in ascending order: send the tiles of other owners to
    them, scan the own ones, then receive the others."""
    me = _this_rank(own)
    begun = _begin(node, rail, own, me)
    tile = tl.program_id(0)
    while tile < node.num_tiles:
        if tile // own.SLICE != me.position:
            _give_tile(inputs, node, own, me, begun, tile)
        tile += tl.num_programs(0)
    tile = tl.program_id(0)
    while tile < node.num_tiles:
        if tile // own.SLICE == me.position:
            _scan_tile(inputs, node, rail, own, me, begun, tile)
        tile += tl.num_programs(0)
    tile = tl.program_id(0)
    while tile < node.num_tiles:
        if tile // own.SLICE != me.position:
            _take_tile(inputs, node, own, me, begun, tile)
        tile += tl.num_programs(0)


@triton.jit
def _this_rank(own):
    """Return this rank's Table."""
    p = own.table
    return Table(
        tl.load(p + TABLE.value.members).to(tl.int32),
        tl.load(p + TABLE.value.position).to(tl.int32),
        tl.load(p + TABLE.value.first).to(tl.int32),
        tl.load(p + TABLE.value.step).to(tl.int32),
        tl.load(p + TABLE.value.givers).to(tl.int32),
        tl.load(p + TABLE.value.in_first_node) != 0,
    )


@triton.jit
def _is_first(me):
    """Check whether this rank is the first in the direction of the scan."""
    return me.in_first_node & (me.position == me.first)


@triton.jit
def _member(own, position):
    """Return the address of a member's row of the table."""
    return own.table + TABLE_WORDS + position * MEMBER_WORDS


@triton.jit
def _round(own, me, i):
    """Return the address of a round's row; each round has two."""
    return own.table + TABLE_WORDS + me.members * MEMBER_WORDS + i * ROUND_WORDS


@triton.jit
def _begin(node, rail, own, me):
    """Begin the epoch: notify the ranks that send to this one, and wait until this rank's receivers have begun the
    launch that frees their slots. Returns (epoch, its arrival word, whether all is well)."""
    program = tl.program_id(0)
    epoch = tl.load(node.epoch + program) + 1
    word = _arrival_word(node, program, epoch)
    ok = epoch > 0  # 0: BROKEN
    if ok & ((node.DEPTH == 1) | (program == 0)):
        member = 0
        while member < me.members:
            if member != me.position:
                # no release: earlier, completed launches have read and refilled the slots
                tl.store(_words(_member(own, member) + MEMBER.value.begun), epoch)
            member += 1
    give_credit(rail, program, epoch - 1)
    for i in tl.static_range(2 * own.ROUNDS):
        if tl.load(_round(own, me, i) + ROUND.value.receives) != 0:
            give_credit(RoundLink(node, own, _round_words(node, _round(own, me, i)), own.BD), program, epoch - 1)
    ok = _wait_for_members(node, me, program, epoch, ok)
    ok = wait_credit(rail, program, epoch, ok)
    for i in tl.static_range(2 * own.ROUNDS):
        if tl.load(_round(own, me, i) + ROUND.value.sends) != 0:
            words = _round_words(node, _round(own, me, i))
            ok = wait_credit(RoundLink(node, own, words, own.BD), program, epoch, ok)
    return epoch, word, ok


@triton.jit
def _wait_for_members(node, me, program, epoch, ok):
    member = 0
    while member < me.members:
        if member != me.position:
            p_begun = node.freed + member
            # no acquire at first, as in wait_credit: the stores that it allows depend on it
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
    return ok


@triton.jit
def _give_tile(inputs, node, own, me, begun, tile):
    """Send this rank's part of a tile to its owner, except on the last rank."""
    epoch, word, ok = begun
    gives = (me.position - me.first) * me.step < me.givers
    if gives & ok & (tl.load(node.epoch + tile) == epoch - 1):
        b_state, b_decay = _own_part(inputs, node, me, tile)
        p_owner = _member(own, tile // own.SLICE)
        part = tile - tile // own.SLICE * own.SLICE  # % takes registers of the whole kernel
        p_to, p_word = _floats(p_owner + MEMBER.value.decays), _words(p_owner + MEMBER.value.decays_arrived)
        b_decays = b_decay + tl.zeros([node.BK, own.BD], tl.float32)
        post(Outlet(node, p_to, p_word, own.SLICE, own.BD, own.LINK), part, epoch, word, b_decays)
        p_to, p_word = _floats(p_owner + MEMBER.value.states), _words(p_owner + MEMBER.value.states_arrived)
        post(Outlet(node, p_to, p_word, own.SLICE, node.BV, own.LINK), part, epoch, word, b_state)


@triton.jit
def _scan_tile(inputs, node, rail, own, me, begun, tile):
    """Scan a tile of this rank's slice: over the members, over the nodes, and once more over the members."""
    epoch, word, ok = begun
    part = tile - me.position * own.SLICE
    well = ok & (tl.load(node.epoch + tile) == epoch - 1)
    b_own, b_own_decay = _own_part(inputs, node, me, tile)
    mine = b_own, b_own_decay
    b_sum, b_product, well = _fold(node, own, me, (epoch, word, well), part, mine)
    if own.ROUNDS == 0:
        b_incoming, well = _over_a_chain(rail, part, epoch, word, well, b_sum, b_product)
    else:
        b_incoming, well = _over_rounds(node, own, me, (epoch, word, well), part, b_sum, b_product)
    tl.debug_barrier()  # threads read words below that other threads have polled; one warp has had no barrier
    _hand_out(inputs, node, own, me, (epoch, word, well), tile, (b_own, b_own_decay, b_incoming))
    tl.debug_barrier()  # all threads have read the parts before their slots are refilled
    _free_parts(node, own, me, epoch, part, well)
    offsets, inside = tile_offsets(node, tile, inputs.K, inputs.V)
    _end(node, tile, epoch, well, inputs.out + offsets, inside)


@triton.jit
def _take_tile(inputs, node, own, me, begun, tile):
    """Receive this rank's incoming state of a tile from the owner."""
    epoch, word, ok = begun
    well = ok & (tl.load(node.epoch + tile) == epoch - 1)
    offsets, inside = tile_offsets(node, tile, inputs.K, inputs.V)
    b_out = _first(inputs, node, tile)
    if not _is_first(me):
        p_info = node.info + (1 + tile // own.SLICE) * EACH_INFO
        b_out, well = take(
            Inlet(node, node.inbox, node.arrived, node.clock, p_info, node.num_tiles, node.BV, own.LINK),
            tile,
            epoch,
            word,
            well,
        )
        if well:
            free_slot(
                Inlet(node, node.inbox, node.arrived, node.clock, p_info, node.num_tiles, node.BV, own.LINK),
                tile,
                epoch,
            )
    tl.store(inputs.out + offsets, b_out, mask=inside)
    _end(node, tile, epoch, well, inputs.out + offsets, inside)


@triton.jit
def _fold(node, own, me, call, part, mine):
    """Fold the members' parts from zero into the node's total: (state, product of decays, whether all is well).

    call: (epoch, arrival word, whether all is well so far); mine: this rank's own (state, decay)."""
    epoch, word, well = call
    b_sum = tl.zeros([node.BK, node.BV], tl.float32)
    b_product = tl.full([node.BK, 1], 1.0, tl.float32)
    member = me.first
    i = 0
    while i < me.givers:
        b_state, b_decay = mine
        if member != me.position:
            slots = member * (node.DEPTH * own.SLICE)
            p_info, p_clock = node.info + (1 + member) * EACH_INFO, node.clock + me.position * own.SLICE
            p_from, p_word = own.states + slots * (node.BK * node.BV), own.states_arrived + slots
            b_state, well = take(
                Inlet(node, p_from, p_word, p_clock, p_info, own.SLICE, node.BV, own.LINK), part, epoch, word, well
            )
            p_from, p_word = own.decays + slots * (node.BK * own.BD), own.decays_arrived + slots
            b_decays, well = take(
                Inlet(node, p_from, p_word, p_clock, p_info, own.SLICE, own.BD, own.LINK), part, epoch, word, well
            )
            b_decay = _column(b_decays)
        b_sum = combine(b_state, b_decay, b_sum)
        b_product = _times(b_decay, b_product)
        member += me.step
        i += 1
    return b_sum, b_product, well


@triton.jit
def _hand_out(inputs, node, own, me, call, tile, states):
    """Scan the members once more, from the node's incoming state, and send each its incoming state.

    states: this rank's own (state, decay), and the incoming state."""
    epoch, word, well = call
    b_own, b_own_decay, b_incoming = states
    part = tile - me.position * own.SLICE
    offsets, inside = tile_offsets(node, tile, inputs.K, inputs.V)
    member = me.first
    i = 0
    while well & (i < me.members):
        if member == me.position:
            b_out = b_incoming
            if _is_first(me):
                b_out = _first(inputs, node, tile)
            tl.store(inputs.out + offsets, b_out, mask=inside)
        elif (i > 0) | (not me.in_first_node):
            p_member = _member(own, member)
            p_to, p_word = _floats(p_member + MEMBER.value.inbox), _words(p_member + MEMBER.value.arrived)
            post(Outlet(node, p_to, p_word, node.num_tiles, node.BV, own.LINK), tile, epoch, word, b_incoming)
        if i < me.members - 1:
            b_state = b_own
            b_decay = b_own_decay
            if member != me.position:
                b_state, b_decay = _read_again(node, own, member, part, epoch)
            b_incoming = combine(b_state, b_decay, b_incoming)
        member += me.step
        i += 1


@triton.jit
def _read_again(node, own, member, part, epoch):
    """Load a member's (state, decay) again, after their arrival."""
    slot = (member * node.DEPTH + (epoch % node.DEPTH).to(tl.int32)) * own.SLICE + part
    rows = tl.arange(0, node.BK)[:, None]
    p_slot = own.states + slot * (node.BK * node.BV) + rows * node.BV
    b_state = tl.load(p_slot + tl.arange(0, node.BV)[None, :], volatile=True)
    b_decay = tl.load(own.decays + slot * (node.BK * own.BD) + rows * own.BD, volatile=True)
    return b_state, b_decay


@triton.jit
def _free_parts(node, own, me, epoch, part, well):
    member = me.first
    i = 0
    while well & (i < me.givers):
        if member != me.position:
            slots = member * (node.DEPTH * own.SLICE)
            p_from = own.states + slots * (node.BK * node.BV)
            free_slot(
                Inlet(node, p_from, node.arrived, node.clock, node.info, own.SLICE, node.BV, own.LINK), part, epoch
            )
            p_from = own.decays + slots * (node.BK * own.BD)
            free_slot(
                Inlet(node, p_from, node.arrived, node.clock, node.info, own.SLICE, own.BD, own.LINK), part, epoch
            )
        member += me.step
        i += 1


@triton.jit
def _own_part(inputs, node, me, tile):
    """Return this rank's (state [BK, BV], decay [BK, 1]); the first rank's outgoing state replaces its state."""
    b_state = load_tile(inputs.state, node, tile, inputs.K, inputs.V)
    b_decay = tl.full([node.BK, 1], 1.0, tl.float32)
    if inputs.HAS_DECAY:
        b_decay = load_decays(inputs.decay, node, tile, inputs.stride_g, inputs.stride_k, inputs.K, inputs.V)
    if inputs.HAS_INITIAL:
        if _is_first(me):
            b_state = combine(b_state, b_decay, load_tile(inputs.initial, node, tile, inputs.K, inputs.V))
    return b_state, b_decay


@triton.jit
def _first(inputs, node, tile):
    """Return the incoming state of the first rank."""
    b_first = tl.zeros([node.BK, node.BV], tl.float32)
    if inputs.HAS_INITIAL:
        b_first = load_tile(inputs.initial, node, tile, inputs.K, inputs.V)
    return b_first


@triton.jit
def _over_a_chain(rail, part, epoch, word, well, b_sum, b_product):
    """Scan over the nodes as a chain: return (this node's incoming state, whether all is well). The outgoing state is
    b_product * incoming + b_sum."""
    b_incoming = tl.zeros([rail.BK, rail.BV], tl.float32)
    if (rail.RECV != NONE) & (rail.SEND != NONE):
        stopped = all_decays_zero(b_product)
        if well & stopped:
            post(rail, part, epoch, word, b_sum)
        b_incoming, well = take(rail, part, epoch, word, well)
        if well & (not stopped):
            post(rail, part, epoch, word, combine(b_sum, b_product, b_incoming))
    elif rail.SEND != NONE:
        if well:
            post(rail, part, epoch, word, b_sum)  # zero enters the first node
    elif rail.RECV != NONE:
        b_incoming, well = take(rail, part, epoch, word, well)
    if well:
        free_slot(rail, part, epoch)
    return b_incoming, well


@triton.jit
def _over_rounds(node, own, me, call, part, b_sum, b_product):
    """Scan over the nodes by recursive doubling; returns as _over_a_chain. (b_incoming, b_passes) covers the 0, 1, 3,
    6, 12 ... nodes before this one; a round adds as many nodes before them. The first round sends a node's own total,
    the second that and the one before it (123-recursive doubling: Traeff, arXiv 2507.04785)."""
    epoch, word, well = call
    b_incoming = tl.zeros([node.BK, node.BV], tl.float32)
    b_passes = tl.full([node.BK, 1], 1.0, tl.float32)
    for i in tl.static_range(own.ROUNDS):
        p_states, p_decays = _round(own, me, 2 * i), _round(own, me, 2 * i + 1)
        if well & (tl.load(p_states + ROUND.value.sends) != 0):
            b_sent = b_incoming
            b_sent_decay = b_passes
            if i < 2:
                b_sent = combine(b_sum, b_product, b_incoming)
                b_sent_decay = _times(b_product, b_passes)
            b_decays = b_sent_decay + tl.zeros([node.BK, own.BD], tl.float32)
            post(RoundLink(node, own, _round_words(node, p_decays), own.BD), part, epoch, word, b_decays)
            post(RoundLink(node, own, _round_words(node, p_states), node.BV), part, epoch, word, b_sent)
        if tl.load(p_states + ROUND.value.receives) != 0:
            words, of_decays = _round_words(node, p_states), _round_words(node, p_decays)
            b_state, well = take(RoundLink(node, own, words, node.BV), part, epoch, word, well)
            b_decays, well = take(RoundLink(node, own, of_decays, own.BD), part, epoch, word, well)
            b_incoming = combine(b_incoming, b_passes, b_state)
            b_passes = _times(b_passes, _column(b_decays))
            if well:
                free_slot(RoundLink(node, own, words, node.BV), part, epoch)
                free_slot(RoundLink(node, own, of_decays, own.BD), part, epoch)
    return b_incoming, well


@triton.jit
def _round_words(node, p_round):
    return (
        _floats(p_round + ROUND.value.inbox),
        _floats(p_round + ROUND.value.next_inbox),
        _floats(p_round + ROUND.value.outbox),
        _words(p_round + ROUND.value.arrived),
        _words(p_round + ROUND.value.next_arrived),
        _words(p_round + ROUND.value.freed),
        _words(p_round + ROUND.value.prev_freed),
        node.info + tl.load(p_round + ROUND.value.info),
    )


@triton.jit
def _end(node, tile, epoch, well, p_out, inside):
    """End the tile's epoch; after a fault mark it BROKEN and fill the output with NaN."""
    if well:
        finish(node, tile, epoch)
    else:
        tl.store(node.epoch + tile, BROKEN)
        tl.store(p_out, tl.full([node.BK, node.BV], float("nan"), tl.float32), mask=inside)


@triton.jit
def _column(b_decays):
    """Return one column [BK, 1] of [BK, BD], whose columns are equal."""
    return tl.max(b_decays, axis=1)[:, None]


@triton.jit
def _times(b_later, b_earlier):
    """Return the product of two decays: 0 if and only if one of them is 0, even if the other is NaN or Inf."""
    b_product = b_later * b_earlier
    b_product = tl.where(tl.abs(b_product) < SMALLEST, SMALLEST, b_product)
    return tl.where((b_later == 0.0) | (b_earlier == 0.0), 0.0, b_product)


@triton.jit
def _floats(p_address):
    """Convert an address from a table to a pointer to a tile."""
    return tl.multiple_of(tl.load(p_address).to(tl.pointer_type(tl.float32)), 16)


@triton.jit
def _words(p_address):
    return tl.load(p_address).to(tl.pointer_type(tl.int64))
