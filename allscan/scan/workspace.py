"""Workspaces: the symmetric memory of an AllScan, and the Channels over it that kernels take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import triton.language as tl

from ..bindings.arena import ALIGNMENT
from ..comm.communicator import Communicator
from ..comm.host_exchange import by_rank
from ..comm.memory import Line
from ..shmem_kernels import wait
from ..shmem_kernels.channel import Channel
from ..shmem_kernels.links import NONE, PUT, SENTINEL, SIGNAL

PROTOCOLS = {"sentinel": SENTINEL.value, "signal": SIGNAL.value, "put": PUT.value}


class Spec(NamedTuple):
    """The parameters of a workspace, equal on all ranks."""

    shape: tuple[int, ...]
    tile: tuple[int, int]
    depth: int
    protocol: str
    algorithm: str = "chain"

    @property
    def num_tiles(self) -> int:
        *lead, K, V = self.shape
        return math.prod(lead) * -(-K // self.tile[0]) * -(-V // self.tile[1])


class Workspace(NamedTuple):
    """Both directions of an AllScan on this rank."""

    channels: tuple[Channel, Channel]  # forward, reverse
    offsets: tuple[int, ...]  # in the arena, of the blocks that the channels occupy
    max_ctas: int = 1  # minimum over the ranks


Parts = dict[str, tuple[int, int, torch.dtype]]  # name -> (offset in bytes, elements, dtype)


class WorkspaceLayout(Protocol):
    """The memory layout of an AllScan and its channels: ``Chain`` or ``rails_links.Rails``."""

    @property
    def nbytes(self) -> int:
        """Symmetric memory of one direction on this rank, in bytes."""

    def fill(self, offsets: Sequence[int]) -> bool:
        """Initialize this rank's memory, at ``offsets`` [direction] in its arena; False: left to ``make``."""

    def make(self, offsets: Sequence[Sequence[int]]) -> tuple[Channel, Channel]:
        """The two channels. offsets: [rank][direction], the position of the memory in each rank's arena."""


def lay_out(sizes: Iterable[tuple[str, int, torch.dtype]]) -> tuple[Parts, int]:
    """(The parts, one after the other; total bytes)."""
    parts, offset = {}, 0
    for name, numel, dtype in sizes:
        parts[name] = (offset, numel, dtype)
        offset += -(-numel * dtype.itemsize // 128) * 128
    return parts, offset


def workspace_layout(spec: Spec, put: bool) -> tuple[Parts, int]:
    """(The parts, total bytes) of one channel's workspace."""
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
            ("info", wait.INFO_WORDS, torch.int64),
        )
    )


class Chain:
    """Two channels along a line of ranks, forward and reverse. mapped[p]: whether ranks p and p + 1 reach each other by
    loads and stores. Raises RuntimeError if the protocol needs mapped ranks and some are not."""

    def __init__(self, line: Line, spec: Spec, mapped: Sequence[bool]) -> None:
        if spec.protocol in ("sentinel", "signal") and not all(mapped):
            p = mapped.index(False)
            raise RuntimeError(
                f"protocol {spec.protocol!r} needs mapped peers; ranks {p} and {p + 1} do not map each other"
            )
        self.line, self.spec = line, spec
        if spec.protocol == "auto":
            links = [(SENTINEL if yes else PUT).value for yes in mapped]
        else:
            links = [PROTOCOLS[spec.protocol]] * len(mapped)
        recv, send = [NONE.value, *links, NONE.value][line.rank : line.rank + 2]
        self._links = (recv, send), (send, recv)  # [direction]: from the rank before this one, and to the next
        of_kind = [workspace_layout(spec, put) for put in (False, True)]
        puts = [PUT.value in links[max(0, p - 1) : p + 1] for p in range(len(line.pes))]
        self._parts = [of_kind[put][0] for put in puts]  # of each rank
        self.nbytes = of_kind[puts[line.rank]][1]

    def fill(self, offsets: Sequence[int]) -> bool:
        # precedes the exchange of the offsets: no rank sends before every inbox is filled
        line = self.line
        for offset, (recv, _) in zip(offsets, self._links, strict=True):
            for name, (first, numel, dtype) in self._parts[line.rank].items():
                words = line.memory.heap.local(line.pes[line.rank], offset + first, numel, dtype)
                words.fill_(-0.0 if name == "inbox" and recv == SENTINEL.value else 0)
        return True

    def make(self, offsets: Sequence[Sequence[int]]) -> tuple[Channel, Channel]:
        forward, reverse = (
            make_channel(
                self.line,
                [(of_rank[direction], parts) for of_rank, parts in zip(offsets, self._parts, strict=True)],
                self.spec,
                links,
                displacement,
            )
            for direction, (links, displacement) in enumerate(zip(self._links, (1, -1)))
        )
        return forward, reverse._replace(backwards=forward.backwards)


MAKE_WORKSPACE = "making a workspace"  # purpose of the host exchange, for error messages


def workspace_bytes(comm: Communicator, layout: WorkspaceLayout) -> int:
    """Symmetric memory of both directions on this rank, in bytes."""
    return 0 if comm.size == 1 else 2 * -(-layout.nbytes // ALIGNMENT) * ALIGNMENT


def make_workspace(comm: Communicator, spec: Spec, layout: WorkspaceLayout, max_ctas: int) -> Workspace:
    """Allocate and initialize a workspace. Collective over the group; ``spec`` must be equal on all ranks.

    Raises on every rank: ValueError (specs differ, or a rank has invalid arguments), MemoryError (an arena is full).
    """
    if comm.size == 1:
        fixed = constants(spec, spec.num_tiles, NONE.value, NONE.value)
        # kept by comm: a stream may still write there when the AllScan is deleted
        words = comm.memory.keep(torch.zeros(spec.num_tiles, dtype=torch.int64, device=comm.device))
        values = comm.memory.keep(torch.zeros(1, dtype=torch.float32, device=comm.device))
        lonely = Channel(*[values] * 3, *[words] * 10, **fixed)
        return Workspace((lonely, lonely), ())

    offsets, full = list[int](), None
    fields = tuple(zip(Spec._fields, spec, strict=True))
    try:
        try:
            for _ in range(2):
                offsets.append(comm.memory.alloc(layout.nbytes))
        except MemoryError as error:
            full = str(error)
        filled = full is None and layout.fill(offsets)
        comm.streams.synchronize()
        try:
            answers = comm.order.agree(fields, None, MAKE_WORKSPACE, (offsets, full, max_ctas))
            all_offsets, errors, ctas = zip(*answers, strict=True)
            if any(errors):
                raise comm.order.raised_everywhere(MemoryError(by_rank(error or "ok" for error in errors)))
        except (ValueError, MemoryError):
            if offsets:  # every rank raises, so no rank writes there
                comm.memory.free(*offsets)
                offsets.clear()
            raise
        channels = layout.make(all_offsets)
        if not filled:
            comm.streams.synchronize()
            comm.order.exchange("workspace filled", MAKE_WORKSPACE)
    except BaseException:  # another rank may have the offsets, if this one is interrupted
        comm.memory.free_later(*offsets)
        raise
    return Workspace(channels, tuple(offsets), min(ctas))


def make_channel(
    line: Line, workspaces: Sequence[tuple[int, Parts]], spec: Spec, links: tuple[int, int], displacement: int
) -> Channel:
    """The channel from rank - ``displacement`` to this rank, and on to rank + ``displacement``. workspaces: (offset in
    its arena, parts) of every rank. links: (from the previous rank, to the next rank)."""
    (prev, next_), (recv, send) = (line.rank - displacement, line.rank + displacement), links
    heap = line.memory.heap
    offset, parts = workspaces[line.rank]
    words = {
        name: heap.local(line.pes[line.rank], offset + first, numel, dtype)
        for name, (first, numel, dtype) in parts.items()
    }
    if send != PUT.value:
        words["outbox"] = words["inbox"]
    for field, name, rank, link in (
        ("next_inbox", "inbox", next_, send),
        ("next_arrived", "arrived", next_, send),
        ("prev_freed", "freed", prev, recv),
    ):
        if link == NONE.value:
            words[field] = words[name]
            continue
        offset, parts = workspaces[rank]
        first, numel, dtype = parts[name]
        if link == PUT.value:
            words[field] = heap.symmetric(offset + first, dtype)
        else:
            words[field] = heap.view(line.pes[rank], offset + first, numel, dtype)
    pes = [line.pes[rank] if link != NONE.value else -1 for rank, link in ((prev, recv), (next_, send))]
    words["info"].copy_(info_words(line, (prev, next_), pes))
    return Channel(**words, step=line.memory.step, **constants(spec, spec.num_tiles, recv, send))


def info_words(line: Line, ranks: Sequence[int], pes: Sequence[int]) -> torch.Tensor:
    """Channel.info on the host: the previous and the next rank, their PE numbers (-1: no such link), the time-out, the
    addresses of fault records."""
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
    (BK, BV), DEPTH = spec.tile, spec.depth
    values = dict(num_tiles=num_tiles, BK=BK, BV=BV, DEPTH=DEPTH, RECV=recv, SEND=send, ADJOINT=False)
    return {name: tl.constexpr(value) for name, value in values.items()}


def reset(channel: Channel) -> None:
    """Reset a channel to its initial state, while no kernel of any rank uses it."""
    channel.inbox.fill_(-0.0 if channel.RECV == SENTINEL else 0.0)
    words: torch.Tensor
    for words in (channel.arrived, channel.epoch, channel.backwards, channel.freed, channel.fwd_epoch):
        words.zero_()
