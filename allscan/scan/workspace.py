"""Workspaces: the symmetric memory of a channel, and the Channel that kernels get of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import triton.language as tl

from ..base.errors import DeferredError
from ..bindings.arena import ALIGNMENT
from ..comm.communicator import Communicator
from ..comm.host_exchange import by_rank, differing
from ..comm.memory import Line
from ..shmem_kernels import wait
from ..shmem_kernels.channel import Channel
from ..shmem_kernels.links import NONE, PUT, SENTINEL, SIGNAL

PROTOCOLS = {"sentinel": SENTINEL.value, "signal": SIGNAL.value, "put": PUT.value}


class Spec(NamedTuple):
    """What the ranks must have in common to share a workspace."""

    shape: tuple[int, ...]
    tile: tuple[int, int]
    depth: int
    protocol: str
    algorithm: str = "chain"

    @property
    def num_tiles(self) -> int:
        *lead, K, V = self.shape
        tiles = -(-K // self.tile[0]) * -(-V // self.tile[1])
        for n in lead:
            tiles *= n
        return tiles


class Workspace(NamedTuple):
    """Both directions of an AllScan on this rank."""

    channels: tuple[Channel, Channel]  # forward, reverse
    offsets: tuple[int, ...]  # of the blocks in the arena that they take
    max_ctas: int = 1  # the least of all ranks


Parts = dict[str, tuple[int, int, torch.dtype]]  # name -> (offset in bytes, elements, dtype)


class Layout(Protocol):
    """A workspace of another kind than two channels between neighbours."""

    @property
    def nbytes(self) -> int:
        """Symmetric memory of one direction on this rank."""

    def make(self, offsets: Sequence[Sequence[int]]) -> tuple[Channel, Channel]:
        """The channels, of [rank][direction]: where the memory lies in each rank's arena."""


def lay_out(sizes: Iterable[tuple[str, int, torch.dtype]]) -> tuple[Parts, int]:
    """(The parts, bytes in all), one behind the other."""
    parts, offset = {}, 0
    for name, numel, dtype in sizes:
        parts[name] = (offset, numel, dtype)
        offset += -(-numel * dtype.itemsize // 128) * 128
    return parts, offset


def workspace_layout(spec: Spec, put: bool) -> tuple[Parts, int]:
    """(The parts, bytes in all) of one channel's workspace."""
    depth, num_tiles = spec.depth, spec.num_tiles
    slots = depth * num_tiles * spec.tile[0] * spec.tile[1]
    return lay_out(
        (
            ("inbox", slots, torch.float32),
            ("outbox", slots if put else 0, torch.float32),
            ("arrived", depth * num_tiles, torch.int64),
            ("epoch", num_tiles, torch.int64),
            ("clock", num_tiles, torch.int64),
            ("backwards", num_tiles, torch.int64),
            ("freed", depth + 1, torch.int64),
            ("fwd_epoch", 1, torch.int64),
        )
    )


def _links(comm: Communicator, protocol: str) -> list[int]:
    """[p]: the link that joins rank p and rank p + 1."""
    if protocol == "auto":
        return [(SENTINEL if mapped else PUT).value for mapped in comm.topology.mapped_links]
    return [PROTOCOLS[protocol]] * len(comm.topology.mapped_links)


def _puts(links: list[int], rank: int) -> bool:
    return PUT.value in links[max(0, rank - 1) : rank + 1]


def workspace_bytes(comm: Communicator, spec: Spec, layout: Layout | None = None) -> int:
    """Symmetric memory that both directions take on this rank, in bytes."""
    if comm.size == 1:
        return 0
    nbytes = _nbytes(comm, spec, layout)
    return 2 * -(-nbytes // ALIGNMENT) * ALIGNMENT


def _nbytes(comm: Communicator, spec: Spec, layout: Layout | None) -> int:
    if layout is not None:
        return layout.nbytes
    return workspace_layout(spec, _puts(_links(comm, spec.protocol), comm.rank))[1]


def make_workspace(
    comm: Communicator, spec: Spec | DeferredError, layout: Layout | None = None, max_ctas: int = 1
) -> Workspace:
    """Collective over the group; ``spec`` must be equal on all ranks, or a DeferredError: this rank's arguments are
    wrong.
    layout: of another kind of workspace, where the spec's algorithm has one.

    Raises on every rank: ValueError (specs differ, wrong arguments somewhere), MemoryError (an arena is full),
    RuntimeError (protocol).
    """
    if isinstance(spec, DeferredError):
        try:
            comm.order.exchange((None, [], spec.text, 1), "making a workspace")
        except RuntimeError as nobody_came:
            raise spec.take() from nobody_came
        raise comm.order.raised_everywhere(spec.take())
    if comm.size == 1:
        fixed = constants(spec, spec.num_tiles, NONE.value, NONE.value)
        # kept, since a stream that nobody waits for may still write there when the AllScan goes
        words = comm.memory.keep(torch.zeros(spec.num_tiles, dtype=torch.int64, device=comm.device))
        values = comm.memory.keep(torch.zeros(1, dtype=torch.float32, device=comm.device))
        lonely = Channel(*[values] * 3, *[words] * 10, **fixed)
        return Workspace((lonely, lonely), ())

    links = _links(comm, spec.protocol)
    offsets: list[int] = []
    full = None
    try:
        for _ in range(2):
            offsets.append(comm.memory.alloc(_nbytes(comm, spec, layout)))
    except MemoryError as error:
        full = str(error)
    if layout is None and full is None:  # before the others know of it: nobody sends before every inbox is filled
        for offset, step in zip(offsets, (1, -1), strict=True):
            _fill(comm.line, offset, spec, links, step)
        comm.streams.synchronize()
    answers = comm.order.exchange((tuple(spec), offsets, full, max_ctas), "making a workspace")
    specs, all_offsets, errors, ctas = zip(*answers, strict=True)
    try:
        _check_alike(comm, specs, errors)
    except (ValueError, MemoryError, RuntimeError) as error:
        if offsets:  # every rank raises, so nobody will write there
            comm.memory.free(*offsets)
        comm.order.raised_everywhere(error)
        raise

    if layout is None:
        channels = make_channels(comm.line, all_offsets, spec, links)
    else:
        channels = layout.make(all_offsets)  # and fills it
        comm.streams.synchronize()
        comm.order.exchange("workspace filled", "making a workspace")
    return Workspace(channels, tuple(offsets), min(ctas))


def _links_of(line: Line, links: list[int], step: int) -> tuple[int, int]:
    """The links from the rank before this one and to the next, ``step`` places on; links: [p]: of p and p + 1."""
    prev, next_ = line.rank - step, line.rank + step
    recv = links[min(prev, line.rank)] if 0 <= prev < line.size else NONE.value
    send = links[min(next_, line.rank)] if 0 <= next_ < line.size else NONE.value
    return recv, send


def _fill(line: Line, offset: int, spec: Spec, links: list[int], step: int) -> None:
    """Make this rank's workspace of one direction at ``offset`` of its arena as if nothing had passed yet."""
    recv, _ = _links_of(line, links, step)
    for name, (first, numel, dtype) in workspace_layout(spec, _puts(links, line.rank))[0].items():
        words = line.memory.heap.local(line.pes[line.rank], offset + first, numel, dtype)
        words.fill_(-0.0 if name == "inbox" and recv == SENTINEL.value else 0)


def make_channels(
    line: Line, offsets: Sequence[Sequence[int]], spec: Spec, links: list[int]
) -> tuple[Channel, Channel]:
    """Between neighbours, forward and reverse, of workspaces that are filled or will be. offsets: [rank][direction] in
    its arena."""
    channels = []
    for direction, step in enumerate((1, -1)):
        parts = [(offsets[p][direction], workspace_layout(spec, _puts(links, p))[0]) for p in range(line.size)]
        channels.append(make_channel(line, parts, spec, links, step))
    return channels[0], channels[1]._replace(backwards=channels[0].backwards)


def _check_alike(comm: Communicator, specs: Sequence[Any], errors: Sequence[str | None]) -> None:
    """Raise, as all ranks do, unless they can all make the same workspace."""
    if None in specs:
        raise ValueError("wrong arguments: " + by_rank(error or "ok" for error in errors))
    if len(set(specs)) > 1:
        named = [zip(Spec._fields, spec, strict=True) for spec in specs]
        raise ValueError("ranks differ in " + differing(named))
    if any(errors):
        raise MemoryError(by_rank(error or "ok" for error in errors))
    protocol = specs[0][3]
    if protocol in ("sentinel", "signal") and not comm.mapped:
        p = comm.topology.mapped_links.index(False)
        raise RuntimeError(f"protocol {protocol!r} needs mapped peers; ranks {p} and {p + 1} do not map each other")


def make_channel(
    line: Line, workspaces: Sequence[tuple[int, Parts]], spec: Spec, links: list[int], step: int
) -> Channel:
    """The channel to the rank ``step`` places on. workspaces: (offset in its arena, _layout) of every rank."""
    prev, next_, memory = line.rank - step, line.rank + step, line.memory
    recv, send = _links_of(line, links, step)

    def words(name: str, rank: int = line.rank, link: int = NONE.value) -> torch.Tensor:
        """Of this rank, or of one that a link goes to."""
        there = rank if link != NONE.value else line.rank
        base, layout = workspaces[there]
        offset, numel, dtype = layout[name]
        found: torch.Tensor
        if link == NONE.value:
            found = memory.heap.local(line.pes[there], base + offset, numel, dtype)
        elif link == PUT.value:
            found = memory.heap.symmetric(base + offset, dtype)
        else:
            found = memory.heap.view(line.pes[there], base + offset, numel, dtype)
        return found

    pes = [line.pes[rank] if link != NONE.value else -1 for rank, link in ((prev, recv), (next_, send))]
    info = info_words(line, (prev, next_), pes)
    return Channel(
        inbox=words("inbox"),
        next_inbox=words("inbox", next_, send),
        outbox=words("outbox" if send == PUT.value else "inbox"),
        arrived=words("arrived"),
        next_arrived=words("arrived", next_, send),
        freed=words("freed"),
        prev_freed=words("freed", prev, recv),
        epoch=words("epoch"),
        clock=words("clock"),
        backwards=words("backwards"),
        step=memory.step,
        fwd_epoch=words("fwd_epoch"),
        info=memory.keep(info.to(memory.device)),
        **constants(spec, spec.num_tiles, recv, send),
    )


def info_words(line: Line, ranks: Sequence[int], pes: Sequence[int]) -> torch.Tensor:
    """Channel.info on the host: the ranks before and behind, what the transport calls them (-1: there is no such link),
    the time-out, where a fault is written."""
    info = torch.zeros(wait.INFO_WORDS, dtype=torch.int64, device="cpu")
    info[wait.INFO_RANK.value] = line.rank
    info[wait.INFO_PREV.value], info[wait.INFO_NEXT.value] = ranks
    info[wait.INFO_PREV_PE.value], info[wait.INFO_NEXT_PE.value] = pes
    info[wait.INFO_TIMEOUT_NS.value] = int(line.timeout * 1e9)
    info[wait.INFO_FAULT.value] = line.memory.fault.data_ptr()
    info[wait.INFO_RECORD.value] = line.memory.record.data_ptr()
    return info


def constants(spec: Spec, num_tiles: int, recv: int, send: int) -> dict[str, Any]:
    """The constants of a Channel."""
    values = dict(
        num_tiles=num_tiles,
        BK=spec.tile[0],
        BV=spec.tile[1],
        DEPTH=spec.depth,
        RECV=recv,
        SEND=send,
        ADJOINT=False,
    )
    return {name: tl.constexpr(value) for name, value in values.items()}


def reset(channel: Channel) -> None:
    """Make a channel as if nothing had passed yet. While no kernel of any rank uses it."""
    channel.inbox.fill_(-0.0 if channel.RECV == SENTINEL else 0.0)
    words: torch.Tensor
    for words in (channel.arrived, channel.epoch, channel.backwards, channel.freed, channel.fwd_epoch):
        words.zero_()
