"""The workspace and links of rails, and their kernel's launch. See docs/rails.md and shmem_kernels/rails.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl

from ..base.tiling import scan_num_warps
from ..launch.compiled_kernel import Launch
from ..shmem_kernels import rails as kernels
from ..shmem_kernels import wait
from ..shmem_kernels.channel import Channel
from ..shmem_kernels.links import EPOCH_BITS, NONE, PUT, SENTINEL, SIGNAL
from .workspace import (
    PROTOCOLS,
    Parts,
    Spec,
    constants,
    info_words,
    lay_out,
    make_channel,
    reset,
    workspace_layout,
)


def distances(nodes: int) -> list[int]:
    """The distances in nodes of the rounds of recursive doubling: 1, 2, 3, 6, 12 ..., until all nodes before the last
    are covered."""
    found: list[int] = []
    covered = 0
    while covered < nodes - 1:
        found.append(1 if not found else 2 if covered == 1 else covered)
        covered += found[-1]
    return found


class Rails:
    """The rails of one AllScan on this rank. ``comm``: a Communicator, whose ``nodes`` are the sizes of its nodes.

    Raises on all ranks alike: RuntimeError if the protocol needs mapped peers and some are not mapped, ValueError for a
    state that is too large.
    """

    def __init__(self, comm: Any, spec: Spec) -> None:
        self.comm, self.spec = comm, spec
        self.nodes, self.owners = comm.nodes, min(comm.nodes)
        self.begins = [sum(self.nodes[:n]) for n in range(len(self.nodes))]  # first rank of each node
        self.node, self.position = self._place(comm.rank)
        self.slice = -(-spec.num_tiles // self.owners)  # tiles
        if spec.depth * max(self.nodes) * self.slice * math.prod(spec.tile) >= 1 << 31:
            raise ValueError(
                "the owner's buffer for the members of its node would have 2^31 words or more: "
                f'give a depth of less than {spec.depth}, or algorithm="chain"'
            )  # the kernel's offsets are int32
        warps = scan_num_warps(spec.tile)
        self.decay_columns = max(1, 32 * warps // spec.tile[0])
        self.distances = distances(len(self.nodes)) if spec.algorithm == "recursive_doubling" else []
        self.link = (SIGNAL if spec.protocol == "signal" else SENTINEL).value
        # [n]: the link of the rail between this rank's owners on nodes n and n + 1; with rounds, one link for all
        pairs = list(zip(self._line(), self._line()[1:]))
        if self.distances:
            pairs = [(a, b) for a in self._line() for b in self._line() if a < b]
        mapped = [comm.topology.maps(a, b) for a, b in pairs]
        if spec.protocol in ("sentinel", "signal") and not all(comm.topology.maps(0, p) for p in range(comm.size)):
            raise RuntimeError(f"protocol {spec.protocol!r} needs mapped peers, and not all ranks map each other")
        if spec.protocol != "auto":
            self.links = [PROTOCOLS[spec.protocol]] * max(1, len(pairs))
        elif self.distances:
            self.links = [(SENTINEL if all(mapped) else PUT).value]
        else:
            self.links = [(SENTINEL if yes else PUT).value for yes in mapped]
        # kernel arguments after the node's channel, [direction]: forward, reverse
        self.further: list[tuple[Any, ...]] = []
        self._nodes: list[Channel] = []  # forward and reverse
        self._channels: list[list[Channel]] = [[], []]  # of the rails, [direction]
        self._filled: list[tuple[torch.Tensor, float]] = []
        self._buffers: list[torch.Tensor] = []

    @property
    def puts(self) -> bool:
        """Whether this rank's kernels call NVSHMEM."""
        return PUT.value in self.links and self.position < self.owners and len(self.nodes) > 1

    @property
    def nbytes(self) -> int:
        """Symmetric memory of one direction on this rank, in bytes."""
        return self._layout(self.comm.rank)[1]

    def _place(self, rank: int) -> tuple[int, int]:
        """(Node of a rank, position of the rank in that node)."""
        node = max(n for n, begin in enumerate(self.begins) if begin <= rank)
        return node, rank - self.begins[node]

    def _line(self) -> list[int]:
        """The owners of this rank's slice, in the order of nodes. A rank without a slice gets another's owners."""
        return [begin + self.position % self.owners for begin in self.begins]

    def _layout(self, rank: int) -> tuple[Parts, int]:
        """The workspace of one direction: words of all tiles, the states and decays that members send to the owner, and
        one part for each link of the rails, named "rail 0", "rail 1" ..."""
        spec, (node, position) = self.spec, self._place(rank)
        depth, tiles, members = spec.depth, spec.num_tiles, self.nodes[node]
        slots = depth * self.slice * members if position < self.owners else 0
        rows, words = spec.tile[0], math.prod(spec.tile)
        sizes: list[tuple[str, int, torch.dtype]] = [
            ("inbox", depth * tiles * words, torch.float32),
            ("arrived", depth * tiles, torch.int64),
            ("begun", members, torch.int64),
            ("epoch", tiles, torch.int64),
            ("clock", tiles, torch.int64),
            ("backwards", tiles, torch.int64),
            ("fwd_epoch", 1, torch.int64),
            ("states", slots * words, torch.float32),
            ("states arrived", slots, torch.int64),
            ("decays", slots * rows * self.decay_columns, torch.float32),
            ("decays arrived", slots, torch.int64),
        ]
        if position < self.owners and len(self.nodes) > 1:
            for i, message in enumerate(self._messages()):
                nbytes = workspace_layout(message, PUT.value in self.links)[1]
                sizes.append((f"rail {i}", nbytes // 4, torch.float32))
        return lay_out(sizes)

    def _messages(self) -> list[Spec]:
        """The message of each link of a rail, as the Spec of a channel. A chain sends states, recursive doubling
        states and decays in each round."""
        rows, columns = self.spec.tile
        widths = [columns, self.decay_columns] * len(self.distances) or [columns]
        return [Spec((self.slice, rows, width), (rows, width), self.spec.depth, "auto") for width in widths]

    def fill(self, offsets: Sequence[int]) -> bool:
        return False  # make() fills the memory through the channels

    def make(self, offsets: Sequence[Sequence[int]]) -> tuple[Channel, Channel]:
        """The channels of the node, (forward, reverse). offsets: [rank][direction], in each rank's arena."""
        channels = [self._make(direction, [of_rank[direction] for of_rank in offsets]) for direction in range(2)]
        channels[1] = channels[1]._replace(backwards=channels[0].backwards)
        self.reset()
        return channels[0], channels[1]

    def _make(self, direction: int, offsets: list[int]) -> Channel:
        comm, spec, me = self.comm, self.spec, self.comm.rank
        members = [self.begins[self.node] + i for i in range(self.nodes[self.node])]
        layouts = {rank: self._layout(rank)[0] for rank in {me, *members, *self._line()}}

        def mine(name: str) -> torch.Tensor:
            offset, numel, dtype = layouts[me][name]
            if not numel:  # a member without a slice: the following bytes of the arena belong to others
                return self._keep(torch.zeros(1, dtype=dtype, device=comm.device))
            found: torch.Tensor = comm.memory.heap.local(comm.line.pes[me], offsets[me] + offset, numel, dtype)
            return found

        def theirs(rank: int, name: str, start: int) -> int:
            """The mapped address of element ``start`` of a part of another member's workspace; 0 for an empty part."""
            offset, numel, dtype = layouts[rank][name]
            if not numel:
                return 0
            start = offsets[rank] + offset + start * dtype.itemsize
            address: int = comm.memory.heap.view(comm.line.pes[rank], start, 1, dtype).data_ptr()
            return address

        slots, size = spec.depth * self.slice, math.prod(spec.tile)
        last = len(self.nodes) - 1
        in_last_node = self.node == (0 if direction else last)
        table = [
            *kernels.Table(
                members=len(members),
                position=self.position,
                first=len(members) - 1 if direction else 0,
                step=-1 if direction else 1,
                givers=len(members) - in_last_node,
                in_first_node=self.node == (last if direction else 0),
            )
        ]
        here = self.position * slots
        for rank in members:
            table += kernels.Member(
                states=theirs(rank, "states", here * size),
                states_arrived=theirs(rank, "states arrived", here),
                decays=theirs(rank, "decays", here * spec.tile[0] * self.decay_columns),
                decays_arrived=theirs(rank, "decays arrived", here),
                inbox=theirs(rank, "inbox", 0),
                arrived=theirs(rank, "arrived", 0),
                begun=theirs(rank, "begun", self.position),
            )
        infos = [self._info(me), *(self._info(rank) for rank in members)]
        rail, rounds = self._rail(direction, offsets, layouts, len(infos))
        for row, info in rounds:
            table += row
            infos.append(info)
        p_table = self._keep(torch.tensor(table, dtype=torch.int64, device="cpu").to(comm.device))
        info = self._keep(torch.stack(infos).flatten().to(comm.device))
        words = {name: mine(name) for name in ("inbox", "arrived", "epoch", "clock", "backwards", "fwd_epoch")}
        words |= {name: mine("inbox") for name in ("next_inbox", "outbox")} | dict(next_arrived=mine("arrived"))
        words |= {name: mine("begun") for name in ("freed", "prev_freed")}
        fixed = constants(spec, spec.num_tiles, kernels.RAILS.value, kernels.RAILS.value)
        node = Channel(**words, step=comm.memory.step, info=info, **fixed)
        if rail is None:
            rail = node._replace(**constants(spec, self.slice, NONE.value, NONE.value))
        rail = rail._replace(clock=node.clock)  # indexed by program, too: more than a slice has tiles
        names = "states", "states arrived", "decays", "decays arrived"
        states, states_arrived, decays, decays_arrived = of_members = [mine(name) for name in names]
        fixed = dict(SLICE=self.slice, BD=self.decay_columns, LINK=self.link)
        fixed["ROUNDS"] = len(self.distances) if self.position < self.owners else 0
        fixed["ROUND_LINK"] = self.links[0] if self.links else NONE.value
        fixed = {name: tl.constexpr(value) for name, value in fixed.items()}
        self.further.append((rail, kernels.Slice(p_table, *of_members, **fixed)))
        self._nodes.append(node)
        empty = -0.0 if self.link == SENTINEL.value else 0.0
        self._filled += [(x, empty) for x in (node.inbox, states, decays)]
        words_of_node = node.arrived, node.epoch, node.backwards, node.freed, node.fwd_epoch
        self._filled += [(x, 0) for x in (*words_of_node, states_arrived, decays_arrived)]
        return node

    def _info(self, other: int, following: int | None = None) -> torch.Tensor:
        """Channel.info of a link: this rank receives from ``other`` and sends to ``following`` (default ``other``)."""
        ranks = other, other if following is None else following
        return info_words(self.comm.line, ranks, [self.comm.line.pes[rank] if rank >= 0 else -1 for rank in ranks])

    def _rail(
        self, direction: int, offsets: Sequence[int], layouts: dict[int, Parts], infos: int
    ) -> tuple[Channel | None, list[tuple[kernels.Round, torch.Tensor]]]:
        """(Channel of a chain over the nodes or None, for rounds [(row of the table, info)] of states and decays)."""
        if self.position >= self.owners or len(self.nodes) == 1:
            return None, []
        line, whole, rounds = self._line(), self.comm.line, list[tuple[kernels.Round, torch.Tensor]]()
        owners = whole._replace(rank=self.node, pes=[whole.pes[rank] for rank in line])
        for i, message in enumerate(self._messages()):
            layout = workspace_layout(message, PUT.value in self.links)[0]
            spaces = [(offsets[rank] + layouts[rank][f"rail {i}"][0], layout) for rank in line]
            displacement = (-1 if direction else 1) * (self.distances[i // 2] if self.distances else 1)
            links = self.links * len(line) if self.distances else self.links
            there = self.node - displacement, self.node + displacement
            recv, send = (links[min(n, self.node)] if 0 <= n < len(line) else NONE.value for n in there)
            channel = make_channel(owners, spaces, message, (recv, send), displacement)
            prev, following = (line[n] if 0 <= n < len(line) else -1 for n in there)
            channel.info.copy_(self._info(prev, following))
            self._channels[direction].append(channel)
            if not self.distances:
                return channel, []
            # the first node sends its total only, in the first two rounds
            first = len(line) - 1 if direction else 0
            prev_sends = prev >= 0 and (i // 2 < 2 or there[0] != first)
            sends = following >= 0 and (i // 2 < 2 or self.node != first)
            addresses = {field: getattr(channel, field).data_ptr() for field in kernels.Round._fields[:7]}
            of_info = (infos + len(rounds)) * wait.INFO_WORDS
            row = kernels.Round(**addresses, receives=prev_sends, sends=sends, info=of_info)
            rounds.append((row, self._info(prev, following)))
        return None, rounds

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self._buffers.append(tensor)
        held: torch.Tensor = self.comm.memory.keep(tensor)
        return held

    def reset(self) -> None:
        """Reset all words to their initial values, while no kernel of any rank uses them."""
        for tensor, value in self._filled:
            tensor.fill_(value)
        for channel in self._channels[0] + self._channels[1]:
            reset(channel)

    def is_first(self, direction: int) -> bool:
        """Whether this rank is the first rank in a direction."""
        return bool(self.comm.rank == (self.comm.size - 1 if direction else 0))

    def have_begun(self, direction: int, epoch: int) -> bool:
        """Whether another rank is seen to have begun a launch after ``epoch`` in this direction."""
        peek = self.comm.streams.peek
        credits = [peek(c.freed[: self.spec.depth]) for c in self._channels[direction] if c.SEND != NONE]
        if max(peek(self._nodes[direction].freed)) > epoch or any(max(c) >= epoch > 0 for c in credits):
            return True  # a credit belongs to the previous launch
        return self._sent(direction, epoch)

    def have_run(self, direction: int, epoch: int) -> bool:
        """Whether a rank before this one in this direction is seen to have begun the launch after ``epoch``. The
        ranks after this one do not count: in the other direction they may not wait for this rank, so they may already
        be at the backward of a later call."""
        begun = self.comm.streams.peek(self._nodes[direction].freed)
        before = begun[self.position + 1 :] if direction else begun[: self.position]
        return max(before, default=0) > epoch or self._sent(direction, epoch)

    def _sent(self, direction: int, epoch: int) -> bool:
        """Whether a message of the launch after ``epoch`` has arrived over a rail."""
        channels = [c for c in self._channels[direction] if c.RECV != NONE]
        words = (word for c in channels for word in self.comm.streams.peek(c.arrived[:: self.slice]))
        return any(word & EPOCH_BITS.value == epoch + 1 for word in words)

    def release(self) -> None:
        """Release the tensors that the kernels use; no kernel may use them afterwards."""
        self.comm.memory.release(*self._buffers)

    def make_launch(self, kernel: Any, direction: int, programs: int, **fixed: Any) -> RailsLaunch:
        """``kernel``: rails_kernel, linked with NVSHMEM if ``puts``."""
        return RailsLaunch(Launch(kernel, (programs,), **fixed), self.further[direction])


class RailsLaunch:
    """A Launch that appends the arguments of rails to a scan's."""

    def __init__(self, launch: Launch, further: tuple[Any, ...]) -> None:
        self.kernel, self._launch, self._further = launch.kernel, launch, further

    def __call__(self, *args: Any, behind: tuple[Any, ...] = ()) -> Any:
        """Launch. ``behind``: arguments after those of rails, for a kernel that has more."""
        return self._launch(*args, *self._further, *behind)
