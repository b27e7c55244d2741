"""Workspaces: the symmetric memory of a channel, and the Channel that kernels get of it."""

from __future__ import annotations

import torch
import triton.language as tl

from .communicator import Communicator, by_rank
from .shmem_kernels import wait
from .shmem_kernels.channel import Channel
from .shmem_kernels.links import NONE, PUT, SENTINEL, SIGNAL

PROTOCOLS = {"sentinel": SENTINEL.value, "signal": SIGNAL.value, "put": PUT.value}


def _layout(num_tiles: int, tile: tuple[int, int], depth: int, put: bool) -> tuple[dict, int]:
    """(name -> (offset in bytes, elements, dtype), bytes in all) of one channel's workspace."""
    slots = depth * num_tiles * tile[0] * tile[1]
    parts, offset = {}, 0
    for name, numel, dtype in (
        ("inbox", slots, torch.float32),
        ("outbox", slots if put else 0, torch.float32),
        ("arrived", depth * num_tiles, torch.int64),
        ("epoch", num_tiles, torch.int64),
        ("clock", num_tiles, torch.int64),
        ("backwards", num_tiles, torch.int64),
        ("freed", depth + 1, torch.int64),
        ("ticket", 1, torch.int64),
    ):
        parts[name] = (offset, numel, dtype)
        offset += -(-numel * dtype.itemsize // 128) * 128
    return parts, offset


def workspace_bytes(num_tiles: int, tile: tuple[int, int], depth: int, put: bool) -> int:
    """Symmetric memory of one channel, in bytes."""
    return _layout(num_tiles, tile, depth, put)[1]


def make_channels(comm: Communicator, num_tiles: int, tile: tuple[int, int], depth: int, protocol: str, spec) -> tuple:
    """(forward Channel, reverse Channel). Collective over the group; ``spec`` must be equal on all ranks.

    Raises on every rank alike: ValueError (specs differ), MemoryError (an arena is full), RuntimeError (protocol).
    """
    if comm.size == 1:
        constants = _constants(num_tiles, tile, depth, NONE.value, NONE.value)
        words = torch.zeros(num_tiles, dtype=torch.int64, device=comm.device)
        values = torch.zeros(1, dtype=torch.float32, device=comm.device)
        lonely = Channel(*[values] * 3, *[words] * 10, **constants)
        return lonely, lonely

    best = [(SENTINEL if mapped else PUT).value for mapped in comm.mapped_links]
    links = best if protocol == "auto" else [PROTOCOLS[protocol]] * len(best)  # links[p] joins rank p and rank p + 1
    puts = [PUT.value in links[max(0, p - 1) : p + 1] for p in range(comm.size)]  # of each rank
    try:
        offsets, error = [comm.alloc(workspace_bytes(num_tiles, tile, depth, puts[comm.rank])) for _ in range(2)], None
    except MemoryError as full:
        offsets, error = None, str(full)
    specs, offsets, errors = zip(*comm.exchange((spec, offsets, error), "making a workspace"), strict=True)
    if len(set(specs)) > 1:
        raise ValueError("ranks differ in (shape, tile, depth, protocol): " + by_rank(specs))
    if any(errors):
        raise MemoryError(by_rank(error or "ok" for error in errors))
    if protocol in ("sentinel", "signal") and not comm.mapped:
        p = comm.mapped_links.index(False)
        raise RuntimeError(f"protocol {protocol!r} needs mapped peers; ranks {p} and {p + 1} do not map each other")

    channels = []
    for direction, step in enumerate((1, -1)):
        workspaces = [(offsets[p][direction], _layout(num_tiles, tile, depth, puts[p])[0]) for p in range(comm.size)]
        channels.append(_make_channel(comm, workspaces, num_tiles, tile, depth, links, step))
    channels[1] = channels[1]._replace(backwards=channels[0].backwards)
    for channel in channels:
        reset(channel)
    if comm.device.type == "cuda":
        torch.cuda.synchronize(comm.device)
    comm.exchange("workspace filled", "making a workspace")  # nobody sends before every inbox is filled
    return tuple(channels)


def _make_channel(comm, workspaces, num_tiles, tile, depth, links, step) -> Channel:
    prev, next_ = comm.rank - step, comm.rank + step
    recv = links[min(prev, comm.rank)] if 0 <= prev < comm.size else NONE.value
    send = links[min(next_, comm.rank)] if 0 <= next_ < comm.size else NONE.value

    def mine(name):
        base, layout = workspaces[comm.rank]
        offset, numel, dtype = layout[name]
        heap, pe = comm.heap_and_pe(comm.rank)
        return heap.local(pe, base + offset, numel, dtype)

    def theirs(rank, link, name):
        if link == NONE.value:
            return mine(name)
        base, layout = workspaces[rank]
        offset, numel, dtype = layout[name]
        heap, pe = comm.heap_and_pe(rank)
        if link == PUT.value:
            return heap.symmetric(base + offset, dtype)
        return heap.view(pe, base + offset, numel, dtype)

    info = torch.zeros(wait.INFO_WORDS, dtype=torch.int64)
    info[wait.INFO_RANK.value] = comm.rank
    info[wait.INFO_PREV.value] = prev
    info[wait.INFO_NEXT.value] = next_
    info[wait.INFO_PREV_PE.value] = comm.heap_and_pe(prev)[1] if recv != NONE.value else -1
    info[wait.INFO_NEXT_PE.value] = comm.heap_and_pe(next_)[1] if send != NONE.value else -1
    info[wait.INFO_TIMEOUT_NS.value] = int(comm.timeout * 1e9)
    info[wait.INFO_FAULT.value] = comm.fault.data_ptr()
    info[wait.INFO_RECORD.value] = comm.record.data_ptr()
    return Channel(
        inbox=mine("inbox"),
        next_inbox=theirs(next_, send, "inbox"),
        outbox=mine("outbox" if send == PUT.value else "inbox"),
        arrived=mine("arrived"),
        next_arrived=theirs(next_, send, "arrived"),
        freed=mine("freed"),
        prev_freed=theirs(prev, recv, "freed"),
        epoch=mine("epoch"),
        clock=mine("clock"),
        backwards=mine("backwards"),
        step=comm.step_word,
        ticket=mine("ticket"),
        info=info.to(comm.device),
        **_constants(num_tiles, tile, depth, recv, send),
    )


def _constants(num_tiles, tile, depth, recv, send) -> dict:
    values = dict(num_tiles=num_tiles, BK=tile[0], BV=tile[1], DEPTH=depth, RECV=recv, SEND=send, ADJOINT=False)
    return {name: tl.constexpr(value) for name, value in values.items()}


def reset(channel: Channel) -> None:
    """Make a channel as if nothing had passed yet. While no kernel of any rank uses it."""
    channel.inbox.fill_(-0.0 if channel.RECV == SENTINEL else 0.0)
    for words in (channel.arrived, channel.epoch, channel.backwards, channel.freed, channel.ticket):
        words.zero_()
