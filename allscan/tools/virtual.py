"""Many ranks on one GPU, in one process: for tests, and for people who develop an algorithm.

Every rank has a stream, memory and a time-out of its own, and runs the real kernels; its neighbours' memory lies on the
same GPU. So it shows what an algorithm does with 32 or 64 ranks, its values, its waits and its order. It shows nothing
of NVLink's memory model or a network's, and no time of either.

    ranks = VirtualRanks(32, (4, 16, 32), nodes=(8,) * 4, algorithm="rails")
    prevs = ranks.scan(states, decays)                  # [32, 4, 16, 32], as 32 ranks would get them

CUDA has at most 32 hardware queues, in which kernels of different streams follow one another: set
CUDA_DEVICE_MAX_CONNECTIONS=32 before CUDA starts. Calls are launched epoch by epoch, each on all ranks, so that what a
kernel waits for is never behind it in a queue. All programs of all ranks must fit on the GPU at once.

Without a GPU, in Triton's interpreter, launches run one after another, in the order of the scan. That is enough for a
chain, and for rails over nodes of one rank.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..base.errors import AllScanTimeout
from ..base.tiling import scan_tile
from ..bindings.interpreter import prepare_interpreter
from ..bindings.triton_compat import OPTIONS
from ..comm.memory import Line, Memory
from ..comm.topology import ALGORITHMS, Topology
from ..launch.streams import Streams
from ..scan.rails_links import Rails, warps_of
from ..scan.workspace import PROTOCOLS, Spec, make_channels, reset, workspace_layout
from ..shmem_kernels import wait
from ..shmem_kernels.rails import rails_kernel
from ..shmem_kernels.scan import scan_kernel
from ..shmem_kernels.wait import backoff, clock_ns

CLOSED, OPEN, SKIP = 0, 1, 2  # what a gate says: wait; go; do nothing at all


@triton.jit
def _wait_at_gate(p_gate, p_delay, p_start):
    """Whether to go on, when the gate is open and this launch's delay is over. Notes when the last program saw it."""
    seen = tl.atomic_add(p_gate, 0, sem="acquire", scope="sys")
    polls = 1
    while seen == 0:
        backoff(polls)
        seen = tl.atomic_add(p_gate, 0, sem="acquire", scope="sys")
    if seen == 1:
        delay = tl.load(p_delay)
        # a thread for itself: what follows begins with a barrier of the block, or waits for nobody
        start = clock_ns()
        tl.atomic_max(p_start, start)
        while clock_ns() - start < delay:
            backoff(polls)
        tl.debug_barrier()
    return seen == 1


@triton.jit
def _note_end(p_end):
    tl.debug_barrier()
    tl.atomic_max(p_end, clock_ns())


@triton.jit
def gated_scan_kernel(
    p_state,
    p_decay,
    p_initial,
    p_out,
    channel,
    p_gate,
    p_delay,
    p_start,
    p_end,
    stride_g,
    stride_k,
    K: tl.constexpr,
    V: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
):
    """scan_kernel behind a gate."""
    if _wait_at_gate(p_gate, p_delay, p_start):
        scan_kernel(
            p_state, p_decay, p_initial, p_out, channel, stride_g, stride_k, K, V, HAS_DECAY, HAS_INITIAL, False
        )
        _note_end(p_end)


@triton.jit
def gated_rails_kernel(
    p_state,
    p_decay,
    p_initial,
    p_out,
    node,
    rail,
    own,
    p_gate,
    p_delay,
    p_start,
    p_end,
    stride_g,
    stride_k,
    K: tl.constexpr,
    V: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
):
    """rails_kernel behind a gate."""
    if _wait_at_gate(p_gate, p_delay, p_start):
        rails_kernel(
            p_state, p_decay, p_initial, p_out, node, rail, own, stride_g, stride_k, K, V, HAS_DECAY, HAS_INITIAL
        )
        _note_end(p_end)


@triton.jit
def open_kernel(p_gate, p_word):
    """Opens the gate when the host has set the word, after 10 seconds at the latest."""
    first = clock_ns()
    polls = 1
    while (tl.load(p_word, volatile=True) == 0) & (clock_ns() - first < 10_000_000_000):
        backoff(polls)
    tl.debug_barrier()
    tl.atomic_xchg(p_gate, 1, sem="release", scope="sys")


class _Heap:
    """The arenas of all ranks, of which each is a block of this process."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._arenas = device, list[torch.Tensor]()

    def make(self, nbytes: list[int]) -> None:
        self._arenas += [torch.zeros(n, dtype=torch.uint8, device=self._device) for n in nbytes]

    def local(self, pe: int, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._arenas[pe][offset : offset + numel * dtype.itemsize].view(dtype)

    view = local


class VirtualRank:
    """What rails ask of a Communicator."""

    def __init__(self, rank: int, nodes: tuple[int, ...], heap: Any, device: torch.device, timeout: float) -> None:
        self.rank, self.size, self.nodes, self.device = rank, sum(nodes), nodes, device
        self.memory = Memory(heap, device)
        self.line = Line(rank, range(self.size), self.memory, timeout)
        self.topology = Topology([(0, self.size - 1)] * self.size, nodes)
        self.streams = Streams(device)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None


class _Scan(NamedTuple):
    """Of all ranks; see ``VirtualRanks.scan``."""

    states: torch.Tensor
    decays: torch.Tensor
    initial: torch.Tensor | None
    outs: torch.Tensor
    reverse: bool


class VirtualRanks:
    """The scan of ``size`` ranks over states of ``shape`` [..., K, V], each rank on a stream of the current GPU.

    nodes: how many ranks each node has; default one node. algorithm: "chain", "rails" or "recursive_doubling".
    depth, tile: as for ``allscan.AllScan``. protocol: "sentinel" or "signal". programs: of each rank's launches.
    timeout: seconds that a kernel waits.
    """

    def __init__(
        self,
        size: int,
        shape: Sequence[int],
        *,
        nodes: Sequence[int] | None = None,
        algorithm: str = "chain",
        depth: int = 3,
        protocol: str = "sentinel",
        tile: tuple[int, int] | None = None,
        programs: int = 4,
        timeout: float = 5.0,
    ) -> None:
        cuda = torch.cuda.is_available()
        if not cuda:
            prepare_interpreter()
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.size, self.shape, self.algorithm = size, tuple(shape), algorithm
        self.nodes = (size,) if nodes is None else tuple(nodes)
        if sum(self.nodes) != size or protocol not in ("sentinel", "signal") or algorithm not in ALGORITHMS:
            raise ValueError(f"{size} ranks in nodes of {self.nodes}, protocol {protocol!r}, algorithm {algorithm!r}")
        self.K, self.V = self.shape[-2:]
        tile = tile or scan_tile(self.shape, programs, protocol == "sentinel", self.device)
        self.spec = Spec(self.shape, tile, depth, protocol, algorithm)
        self.programs = min(programs, self.spec.num_tiles)
        self.timeout, heap = timeout, _Heap(self.device)
        self.ranks = [VirtualRank(rank, self.nodes, heap, self.device, timeout) for rank in range(size)]
        self._rails = [] if algorithm == "chain" else [Rails(rank, self.spec) for rank in self.ranks]
        sizes = [rails.nbytes for rails in self._rails] or [workspace_layout(self.spec, False)[1]] * size
        heap.make([2 * n for n in sizes])
        offsets = [(0, n) for n in sizes]
        links, self.channels = [PROTOCOLS[protocol]] * (size - 1), []
        for p, rank in enumerate(self.ranks):
            if self._rails:
                channels = self._rails[p].make(offsets)
            else:
                channels = make_channels(rank.line, offsets, self.spec, links)
                for channel in channels:
                    reset(channel)
            self.channels.append(channels)
        self.start, self.end = (torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(2))
        self._open = torch.full((1,), OPEN, device=self.device)
        self._no_delay = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._ready: set[tuple] = set()
        self._held: list[torch.Tensor] = []  # until the current stream waits for what reads it

    def scan(
        self,
        states: torch.Tensor,
        decays: torch.Tensor,
        *,
        reverse: bool = False,
        initial: torch.Tensor | None = None,
        delays_ns: torch.Tensor | None = None,
        ranks: Sequence[int] | None = None,
        gate: torch.Tensor | None = None,
        join: bool = True,
    ) -> torch.Tensor:
        """One call of all ranks: [P, ...], what each gets. Does not wait for it. The current stream does, but behind a
        gate and without ``join``: then ranks run ahead of each other, and ``join`` comes later. Until then nothing
        that is given may be written or dropped.

        states: float32 [P, ..., K, V]. decays: float32 [P, ..., K]. initial: of the first rank, [..., K, V].
        delays_ns: int64 [P], how long each rank's programs wait before they begin.
        ranks: those that make the call; default all. gate: int64 [1] on the GPU; 0 holds all programs until it is 1.
        """
        outs = torch.full_like(states, float("nan"))
        order = range(self.size)[:: -1 if reverse else 1] if ranks is None else ranks
        scan, kind = _Scan(states, decays, initial, outs, reverse), (reverse, initial is not None)
        if kind not in self._ready:  # all kernels are compiled and loaded before any waits
            self._synchronize()
            skip = torch.full((1,), SKIP, device=self.device)
            for rank in range(self.size):
                self._launch(rank, scan, None, skip)
            self._synchronize()
            self._ready.add(kind)
        if delays_ns is not None:  # at multiples of 16 bytes, for which the kernels were compiled
            delays_ns = delays_ns.repeat_interleave(2)
            self._held.append(delays_ns)
        current = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        for rank in order:
            stream = self.ranks[rank].stream
            if current is None or stream is None:
                self._launch(rank, scan, delays_ns, gate)
                continue
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                self._launch(rank, scan, delays_ns, gate)
        if join and gate is None:
            self.join()
        return outs

    def join(self) -> None:
        """The current stream waits for all ranks."""
        for rank in self.ranks:
            if rank.stream is not None:
                torch.cuda.current_stream(self.device).wait_stream(rank.stream)
        self._held.clear()

    def _launch(self, rank, scan: _Scan, delays_ns, gate) -> None:
        states, decays, initial, outs, reverse = scan
        delay = self._no_delay if delays_ns is None else delays_ns[2 * rank : 2 * rank + 1]
        gates = (self._open if gate is None else gate, delay, self.start, self.end)
        given = states[rank], decays[rank], states[rank] if initial is None else initial, outs[rank]
        fixed = dict(stride_g=self.K, stride_k=1, K=self.K, V=self.V, HAS_DECAY=True, HAS_INITIAL=initial is not None)
        channel = self.channels[rank][reverse]
        if self._rails:
            launch = self._rails[rank].launch(gated_rails_kernel, int(reverse), self.programs, **fixed)
            launch(*given, channel, behind=gates)
        else:
            fixed |= OPTIONS | dict(num_warps=warps_of(self.spec.tile))
            gated_scan_kernel[(self.programs,)](*given, channel, *gates, **fixed)

    def timed(self, states: torch.Tensor, decays: torch.Tensor, **options: Any) -> tuple[float, torch.Tensor]:
        """(Microseconds by the GPU's clock, from when the last of all ranks' programs has seen that its gate is open to
        the last end, what each rank gets)."""
        gate = torch.zeros(1, dtype=torch.int64, device=self.device)
        word = torch.ones(1, dtype=torch.int64, device="cpu", pin_memory=True)
        self.scan(states, decays, **options)  # compiled and loaded, as is the next one
        open_kernel[(1,)](gate, word)
        self._synchronize()
        self.start.zero_()
        self.end.zero_()
        gate.zero_()
        word.zero_()
        self._synchronize()
        # It runs before the others are launched: a hardware queue may end in a launch that cannot begin yet
        with torch.cuda.stream(torch.cuda.Stream(self.device, priority=-1)):
            open_kernel[(1,)](gate, word)
        outs = self.scan(states, decays, gate=gate, **options)
        time.sleep(0.05)
        word.fill_(1)
        self._synchronize()
        return (self.end - self.start).item() / 1e3, outs

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def check(self) -> None:
        """Wait for all ranks. Raises AllScanTimeout of the first rank that has one, or RuntimeError."""
        self._synchronize()
        for kind, rank, neighbour, tile, expected, seen in self.faults().values():
            if kind != wait.TIMED_OUT.value:
                raise RuntimeError(f"rank {rank} and rank {neighbour} are in different calls")
            raise AllScanTimeout(rank, neighbour, tile, expected, seen, self.timeout)

    def faults(self) -> dict[int, tuple[int, ...]]:
        """{rank: (kind, rank, neighbour, tile, expected, seen)} of the ranks that have given up."""
        words = slice(wait.RECORD_KIND.value, wait.RECORD_SEEN.value + 1)
        broken = [rank for rank in self.ranks if rank.memory.record[wait.RECORD_SET.value]]
        return {rank.rank: tuple(rank.memory.record[words].tolist()) for rank in broken}
