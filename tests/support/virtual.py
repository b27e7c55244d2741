"""Runs many ranks in one process, on one or a few GPUs, to test and develop algorithms.

Each rank has its own stream, memory and time-out, and runs the real kernels; its neighbours' memory is on the same GPU.
This tests the values, waits and order of an algorithm on 32 or 64 ranks. It does not test the memory model of NVLink or
of a network, and measures no time of either.

    ranks = VirtualRanks(32, (4, 16, 32), nodes=(8,) * 4, algorithm="rails")
    prevs = ranks.scan(states, decays)                  # [32, 4, 16, 32], as 32 ranks would get them

With ``devices`` the ranks are distributed over several GPUs that map each other. Ranks that alternate between two GPUs
form a chain that is longer than the number of GPUs, with every hop over the real link; hops of one direction share its
bandwidth.

CUDA has at most 32 hardware queues, and kernels of different streams in one queue run in order: set
CUDA_DEVICE_MAX_CONNECTIONS=32 before CUDA starts. Calls are launched epoch by epoch, each on all ranks, so that a
kernel never waits for one behind it in a queue. All programs of a GPU's ranks must fit on it at once. Lazy loading of a
module may wait for kernels that are waiting themselves: also set CUDA_MODULE_LOADING=EAGER.

Without a GPU, in Triton's interpreter, launches run sequentially, in the order of the scan. This is enough for a chain,
and for rails over nodes of one rank.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from allscan.base.errors import AllScanTimeout
from allscan.base.tiling import scan_num_warps, scan_tile
from allscan.bindings.interpreter import prepare_interpreter
from allscan.bindings.triton_compat import OPTIONS
from allscan.comm.memory import Line, Memory
from allscan.comm.topology import ALGORITHMS, Topology
from allscan.launch.streams import Streams
from allscan.scan.rails_links import Rails
from allscan.scan.workspace import Chain, Spec, WorkspaceLayout
from allscan.shmem_kernels import wait
from allscan.shmem_kernels.rails import rails_kernel
from allscan.shmem_kernels.scan import scan_kernel
from allscan.shmem_kernels.wait import clock_ns, poll_word

MEET, OPEN, SKIP = 0, 1, 2  # modes of a gate: wait for the programs of all ranks; run at once; return without a scan

# Words of a gate (int64), one gate per GPU
GATE = tl.constexpr(0)  # mode
GATE_FLAG = tl.constexpr(1)  # completed meetings of all programs
GATE_COUNT = tl.constexpr(2)  # address of the count of arrived programs
GATE_PROGRAMS = tl.constexpr(3)  # programs of all ranks
GATE_DEVICES = tl.constexpr(4)
GATE_FLAGS = tl.constexpr(5)  # addresses, one for each GPU
MOST_POLLS = tl.constexpr(10_000_000)  # some seconds


@triton.jit
def enter_gate(p_gate, p_delay, p_times):
    """Wait as the gate says, and then for this launch's delay; return whether to run the scan. Records the time at
    which the last program started."""
    says = tl.load(p_gate + GATE)
    if says == 0:
        _meet(p_gate)
    if says != 2:
        delay = tl.load(p_delay)
        # each thread waits by itself: the code behind the loop starts with a barrier of the block
        start = clock_ns()
        while clock_ns() - start < delay:
            pass
        tl.debug_barrier()
        tl.atomic_max(p_times, clock_ns(), sem="relaxed")
    return says != 2


@triton.jit
def _meet(p_gate):
    """Wait for all programs of all ranks. The number of polls is bounded: the scan then reports the missing rank."""
    programs = tl.load(p_gate + GATE_PROGRAMS)
    before = tl.atomic_add(tl.load(p_gate + GATE_COUNT).to(tl.pointer_type(tl.int64)), 1, sem="relaxed", scope="sys")
    met = before // programs + 1
    if before % programs == programs - 1:
        for i in range(tl.load(p_gate + GATE_DEVICES)):
            p_flag = tl.load(p_gate + GATE_FLAGS + i).to(tl.pointer_type(tl.int64))
            tl.atomic_xchg(p_flag, met, sem="relaxed", scope="sys")
    polls = 0
    while (poll_word(p_gate + GATE_FLAG) < met) & (polls < MOST_POLLS):
        polls += 1


@triton.jit
def leave_gate(p_times):
    """Record the time at which the last program ended."""
    tl.debug_barrier()
    tl.atomic_max(p_times + 1, clock_ns(), sem="relaxed")


@triton.jit
def gated_scan_kernel(
    p_state,
    p_decay,
    p_initial,
    p_out,
    channel,
    p_gate,
    p_delay,
    p_times,
    stride_g,
    stride_k,
    K: tl.constexpr,
    V: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
):
    """Run scan_kernel behind a gate."""
    if enter_gate(p_gate, p_delay, p_times):
        scan_kernel(
            p_state, p_decay, p_initial, p_out, channel, stride_g, stride_k, K, V, HAS_DECAY, HAS_INITIAL, False
        )
        leave_gate(p_times)


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
    p_times,
    stride_g,
    stride_k,
    K: tl.constexpr,
    V: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
):
    """Run rails_kernel behind a gate."""
    if enter_gate(p_gate, p_delay, p_times):
        rails_kernel(
            p_state, p_decay, p_initial, p_out, node, rail, own, stride_g, stride_k, K, V, HAS_DECAY, HAS_INITIAL
        )
        leave_gate(p_times)


def map_each_other(devices: Sequence[torch.device]) -> None:
    """Map the memory of each of these GPUs on the others. Raises ValueError if peer access is not possible."""
    for a, b in itertools.permutations(devices, 2):
        if not torch.cuda.can_device_access_peer(a, b):
            raise ValueError(f"{a} and {b} cannot map each other's memory (no peer access)")
        torch.zeros(1, device=b).copy_(torch.zeros(1, device=a))  # torch then maps b's memory on a


class _Heap:
    """The arenas of all ranks; each is a block of this process."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices, self._arenas = devices, list[torch.Tensor]()

    def make(self, nbytes: list[int]) -> None:
        for n, device in zip(nbytes, self._devices, strict=True):
            self._arenas.append(torch.zeros(n, dtype=torch.uint8, device=device))

    def local(self, pe: int, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._arenas[pe][offset : offset + numel * dtype.itemsize].view(dtype)

    view = local


class VirtualRank:
    """The attributes of a Communicator that rails need."""

    def __init__(self, rank: int, nodes: tuple[int, ...], heap: Any, device: torch.device, timeout: float) -> None:
        self.rank, self.size, self.nodes, self.device = rank, sum(nodes), nodes, device
        self.memory = Memory(heap, device)
        self.line = Line(rank, range(self.size), self.memory, timeout)
        self.topology = Topology([(0, self.size - 1)] * self.size, nodes)
        self.streams = Streams(device)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None


class _Scan(NamedTuple):
    """Tensors of all ranks for one scan; see ``VirtualRanks.scan``."""

    states: Any
    decays: Any
    initial: torch.Tensor | None
    outs: Any
    reverse: bool


class VirtualRanks:
    """Scan of ``size`` ranks over states of ``shape`` [..., K, V]; each rank has its own stream.

    nodes: number of ranks of each node; default one node. algorithm: "chain", "rails" or "recursive_doubling".
    depth, tile: as for ``allscan.AllScan``. protocol: "sentinel" or "signal". programs: programs per launch of a rank.
    timeout: longest wait of a kernel in seconds. devices: device of each rank; default the current GPU for all.

    Raises ValueError for inconsistent arguments, and for GPUs that do not map each other.
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
        devices: Sequence[torch.device | str | int] | None = None,
    ) -> None:
        cuda = torch.cuda.is_available()
        if not cuda:
            prepare_interpreter()
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        named = [self.device] * size if devices is None else devices
        self.devices = [torch.device("cuda", x) if isinstance(x, int) else torch.device(x) for x in named]
        kinds = {(device.type, device.index is None) for device in self.devices}
        if len(self.devices) != size or kinds != {(self.device.type, not cuda)}:
            raise ValueError(f"{size} ranks on {self.devices}: name the {self.device.type} device of each")
        different = [*dict.fromkeys(self.devices)]
        map_each_other(different)
        self.size, self.shape, self.algorithm = size, tuple(shape), algorithm
        self.nodes = (size,) if nodes is None else tuple(nodes)
        if sum(self.nodes) != size or protocol not in ("sentinel", "signal") or algorithm not in ALGORITHMS:
            raise ValueError(
                f"nodes must have {size} ranks in total, protocol be sentinel or signal, algorithm in {ALGORITHMS}; "
                f"got nodes {self.nodes}, protocol {protocol!r}, algorithm {algorithm!r}"
            )
        self.K, self.V = self.shape[-2:]
        tile = tile or scan_tile(self.shape, programs, protocol == "sentinel", self.device)
        self.spec = Spec(self.shape, tile, depth, protocol, algorithm)
        self.programs = min(programs, self.spec.num_tiles)
        self.timeout, heap = timeout, _Heap(self.devices)
        self.ranks = [VirtualRank(rank, self.nodes, heap, self.devices[rank], timeout) for rank in range(size)]
        self._rails = [] if algorithm == "chain" else [Rails(rank, self.spec) for rank in self.ranks]
        mapped = [True] * (size - 1)
        layouts: Sequence[WorkspaceLayout] = self._rails or [Chain(rank.line, self.spec, mapped) for rank in self.ranks]
        heap.make([2 * layout.nbytes for layout in layouts])
        offsets = [(0, layout.nbytes) for layout in layouts]
        for layout, own in zip(layouts, offsets, strict=True):
            layout.fill(own)
        self.channels = [layout.make(offsets) for layout in layouts]
        self._gates = self._make_gates(different)
        self._zeros, self._unread = (
            {device: torch.zeros(2, dtype=torch.int64, device=device) for device in different} for _ in range(2)
        )
        self._ready: set[tuple] = set()
        self._held: list[object] = []  # inputs of launches, kept until ``join``

    def _make_gates(self, devices: list[torch.device]) -> dict[int, dict[torch.device, torch.Tensor]]:
        """Return {mode: {device: gate}}."""
        self._count = torch.zeros(1, dtype=torch.int64, device=devices[0])
        words = GATE_FLAGS.value + len(devices)
        gates = {
            says: {device: torch.zeros(words, dtype=torch.int64, device=device) for device in devices}
            for says in (MEET, OPEN, SKIP)
        }
        flags = [gate[GATE_FLAG.value :].data_ptr() for gate in gates[MEET].values()]
        fixed = [0, self._count.data_ptr(), self.size * self.programs, len(flags), *flags]
        for says, device in itertools.product(gates, devices):
            gates[says][device].copy_(torch.tensor([says, *fixed]))
        return gates

    def scan(
        self,
        states: Any,
        decays: Any,
        *,
        reverse: bool = False,
        initial: torch.Tensor | None = None,
        delays_ns: torch.Tensor | None = None,
        ranks: Sequence[int] | None = None,
        times: Sequence[torch.Tensor] | None = None,
        join: bool = True,
    ) -> Any:
        """Launch one call on all ranks and return the result of each, [P, ...]. The host does not wait.

        With ``join`` the devices' current streams wait for the results. Without it ranks may run ahead of each other;
        call ``join()`` later, and until then do not write to or drop the arguments.

        states: float32 [P, ..., K, V]. decays: float32 [P, ..., K]. With ranks on several GPUs each is a list of the
        ranks' tensors, and so is the result.
        initial: initial state of the first rank, [..., K, V].
        delays_ns: int64 [P], delay of each rank's programs before they start.
        ranks: the ranks that make the call; default all.
        times: int64 [2] of zeros for each rank; receives the start and end of its last program, by its GPU's clock, in
        ns. The programs of all ranks then start together, so all ranks must make the call.

        Raises ValueError for unknown ranks, and for ``times`` without all ranks.
        """
        if ranks is not None and not set(ranks) <= set(range(self.size)):
            raise ValueError(f"ranks must be in 0 .. {self.size - 1}, got {[*ranks]}")
        if times is not None and (len(times) != self.size or (ranks is not None and len({*ranks}) < self.size)):
            raise ValueError(f"times needs one tensor for each of {self.size} ranks, and a call by all ranks")
        if isinstance(states, torch.Tensor):
            outs: Any = torch.full_like(states, float("nan"))
        else:
            outs = [torch.full_like(state, float("nan")) for state in states]
        order = range(self.size)[:: -1 if reverse else 1] if ranks is None else ranks
        scan, kind = _Scan(states, decays, initial, outs, reverse), (reverse, initial is not None)
        if kind not in self._ready:
            self._load(scan)
            self._ready.add(kind)
        delays = self._zeros
        if delays_ns is not None:  # each at a multiple of 16 bytes: the kernels are compiled for that alignment
            delays = {device: delays_ns.to(device).repeat_interleave(2) for device in self._zeros}
            self._held.append(delays)
        for rank in order:
            stream, device = self.ranks[rank].stream, self.devices[rank]
            at = 0 if delays_ns is None else 2 * rank
            gate = self._gates[OPEN if times is None else MEET][device]
            behind = gate, delays[device][at:], self._unread[device] if times is None else times[rank]
            if stream is not None:
                self._held.append(behind)
                for other in self._zeros:  # an argument, e.g. ``initial``, may be computed on any of the devices
                    stream.wait_stream(torch.cuda.current_stream(other))
            with self._on(rank):
                self._launch(rank, scan, behind)
        if join:
            self.join()
        return outs

    def _load(self, scan: _Scan) -> None:
        """Compile and load all kernels before one of them waits."""
        self._synchronize()
        for rank, device in enumerate(self.devices):
            with self._on(rank):
                self._launch(rank, scan, (self._gates[SKIP][device], self._zeros[device], self._unread[device]))
        self._synchronize()

    def _on(self, rank: int) -> contextlib.AbstractContextManager[object]:
        """Return a context with the rank's stream as the current stream."""
        stream = self.ranks[rank].stream
        return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)

    def join(self) -> None:
        """Make the devices' current streams wait for all ranks."""
        for rank, device in itertools.product(self.ranks, self._zeros):
            if rank.stream is not None:
                torch.cuda.current_stream(device).wait_stream(rank.stream)
        self._held.clear()

    def _launch(self, rank: int, scan: _Scan, behind: tuple[torch.Tensor, ...]) -> None:
        """Launch the rank's kernel; ``behind``: the arguments of its gate."""
        states, decays, initial, outs, reverse = scan
        tensors = states[rank], decays[rank], states[rank] if initial is None else initial, outs[rank]
        fixed = dict(stride_g=self.K, stride_k=1, K=self.K, V=self.V, HAS_DECAY=True, HAS_INITIAL=initial is not None)
        fixed |= dict(num_warps=scan_num_warps(self.spec.tile))
        channel = self.channels[rank][reverse]
        if self._rails:
            launch = self._rails[rank].make_launch(gated_rails_kernel, int(reverse), self.programs, **fixed)
            launch(*tensors, channel, behind=behind)
        else:
            gated_scan_kernel[(self.programs,)](*tensors, channel, *behind, **fixed, **OPTIONS)

    def timed(self, states: Any, decays: Any, epochs: int = 1, **options: Any) -> tuple[list[torch.Tensor], Any]:
        """Run scans whose ranks start together. Return (times, results of the last scan); times: for each rank int64
        [epochs, 2], start and end of its last program, by its GPU's clock, in ns."""
        self.scan(states, decays, **options)  # compiles and loads
        times = [torch.zeros(epochs, 2, dtype=torch.int64, device=device) for device in self.devices]
        for epoch in range(epochs):
            outs = self.scan(states, decays, times=[x[epoch] for x in times], **options)
            self._synchronize()  # keeps the next scan from filling its outputs during this one
        return [x.cpu() for x in times], outs

    def _synchronize(self) -> None:
        for device in self._zeros:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def check(self) -> None:
        """Wait for all ranks. Raise the first rank's AllScanTimeout, if any, or RuntimeError for different calls."""
        self._synchronize()
        for kind, rank, neighbour, tile, expected, seen in self.faults().values():
            if kind != wait.TIMED_OUT.value:
                raise RuntimeError(f"rank {rank} and rank {neighbour} are in different calls")
            raise AllScanTimeout(rank, neighbour, tile, expected, seen, self.timeout)

    def faults(self) -> dict[int, tuple[int, ...]]:
        """Return {rank: (kind, rank, neighbour, tile, expected, seen)} of the ranks with a fault."""
        words = slice(wait.RECORD_KIND.value, wait.RECORD_SEEN.value + 1)
        broken = [rank for rank in self.ranks if rank.memory.record[wait.RECORD_SET.value]]
        return {rank.rank: tuple(rank.memory.record[words].tolist()) for rank in broken}
