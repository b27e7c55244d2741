"""Measures a chain of more ranks than GPUs, over the real link of two GPUs, and the cost of one hop.

    python -m bench.chain                       # two GPUs; writes bench/results/chain.csv
    python -m bench.chain --seconds 120         # only for that long, the most important cases first

Ranks are virtual (tests/support/virtual.py) and alternate between the GPUs, so every hop crosses NVLink. Several hops
share a direction of the link, so the result is a latency only for small states: up to 0.5 MiB with 4 ranks, 0.25 MiB
with 8. With 3, 5 and 9 ranks the first and the last are on one GPU, whose clock times the chain; with 2 they are not,
and the two clocks are aligned by ping-pong messages. The difference of 3 and 2 ranks is one hop at every size, since
the two hops use different directions. All ranks start together; a time is from the start of the first rank's last
program to the end of the last rank's last program, so it contains no launch. It shows neither the jitter of separate
hosts nor a full L2 cache per rank.

The rows "hop" are clocks in a kernel with one whole tile per program (scan_kernel forwards words on arrival).
"""

from __future__ import annotations

import argparse
import math
import sys
import time

import torch
import triton
import triton.language as tl

from allscan.base.tiling import scan_num_warps, scan_tile
from allscan.bindings.triton_compat import OPTIONS
from allscan.reference import allscan_reference
from allscan.shmem_kernels.channel import begin, finish, receive
from allscan.shmem_kernels.links import combine, post
from allscan.shmem_kernels.tiles import load_decays, load_tile, tile_offsets
from allscan.shmem_kernels.wait import clock_ns
from allscan.tools.ranks import Ranks
from allscan.tools.timing import replay_us
from bench.harness import Table, environment, quantiles, results, state_shape
from support.virtual import VirtualRanks, enter_gate, leave_gate, map_each_other

COLUMNS = (
    "kind",
    "ranks",
    "bytes",
    "programs",
    "p20_us",
    "p50_us",
    "p80_us",
    "error_us",
    "gpu",
    "torch",
    "triton",
    "sources",
)
ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
EPOCHS, WARM = 60, 10
HOP_MIB = 0.0625, 0.25  # sizes with one tile per program
FIRST_WAITS_NS = 3_000  # delay of the first rank: the others then already poll for its words
MOST_POLLS = tl.constexpr(10_000_000)
NEVER = tl.constexpr(3.0e38)  # larger than all values here
STEPS = tl.constexpr(8)  # clock slots of a program
BEGUN, LOADED, THERE, COMBINED, POSTED, ENDED = 1, 2, 3, 4, 5, 6  # clock slots; 0: at the start


@triton.jit(do_not_specialize=["rounds"])
def ping_pong_kernel(p_mine, p_theirs, p_clocks, rounds, FIRST: tl.constexpr):
    """Exchange messages with the other GPU; one warp. The first GPU records the times of its sends and of the answers,
    the other one those of its receives."""
    polls = 0
    for i in range(1, rounds + 1):
        if FIRST:
            tl.store(p_clocks + 2 * i - 2, clock_ns())
            tl.store(p_theirs, i)
        while (tl.load(p_mine, volatile=True) < i) & (polls < MOST_POLLS):
            polls += 1
        tl.store(p_clocks + 2 * i - 1, clock_ns())
        if not FIRST:
            tl.store(p_theirs, i)


@triton.jit
def empty_kernel(p_unused):
    """Do nothing."""
    tl.store(p_unused, 0, mask=tl.program_id(0) < 0)


@triton.jit
def _note(p_clocks, STEP: tl.constexpr):
    tl.debug_barrier()
    tl.store(p_clocks + STEP, clock_ns())


@triton.jit
def clocked_kernel(
    p_state, p_decay, p_out, channel, p_gate, p_delay, p_times, p_clocks, K: tl.constexpr, V: tl.constexpr
):
    """Scan with one tile per program, received, combined and sent as a whole, with clocks in between."""
    if enter_gate(p_gate, p_delay, p_times):
        tile = tl.program_id(0)
        p_clocks += tile * STEPS
        _note(p_clocks, 0)
        offsets, inside = tile_offsets(channel, tile, K, V)
        b_state = load_tile(p_state, channel, tile, K, V)
        b_decay = load_decays(p_decay, channel, tile, K, 1, K, V)
        epoch, word, ok = begin(channel, tile, True)
        _note(p_clocks, 1)
        tl.store(p_out + offsets, b_state, mask=inside & (b_state + b_decay == NEVER))  # waits for the loads
        _note(p_clocks, 2)
        b_prev, ok = receive(channel, tile, epoch, word, ok, tl.zeros([channel.BK, channel.BV], tl.float32))
        _note(p_clocks, 3)
        b_inclusive = combine(b_state, b_decay, b_prev)
        tl.store(p_out + offsets, b_state, mask=inside & (b_inclusive == NEVER))
        _note(p_clocks, 4)
        if ok:
            post(channel, tile, epoch, word, b_inclusive)
        _note(p_clocks, 5)
        tl.store(p_out + offsets, b_prev, mask=inside)
        if ok:
            finish(channel, tile, epoch)
        _note(p_clocks, 6)
        leave_gate(p_times)


class ClockedRanks(VirtualRanks):
    """Ranks that run clocked_kernel. clocks: by rank, int64 [programs, STEPS] of each launch."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.clocks = [[] for _ in self.ranks]

    def _launch(self, rank, scan, behind):
        clocks = torch.zeros(self.programs, STEPS.value, dtype=torch.int64, device=self.devices[rank])
        self.clocks[rank].append(clocks)
        given = (
            scan.states[rank],
            scan.decays[rank],
            scan.outs[rank],
            self.channels[rank][scan.reverse],
            *behind,
            clocks,
        )
        warps = scan_num_warps(self.spec.tile)
        clocked_kernel[(self.programs,)](*given, K=self.K, V=self.V, num_warps=warps, **OPTIONS)


def clocks_of(devices, rounds: int = 200) -> tuple[float, float, float]:
    """Exchange messages between two GPUs, and return ``aligned`` of their times."""
    mine = [torch.zeros(2, dtype=torch.int64, device=device) for device in devices]
    clocks = [torch.zeros(rounds, 2, dtype=torch.int64, device=device) for device in devices]
    streams = [torch.cuda.Stream(device) for device in devices]
    for count in (0, rounds):  # 0: load both kernels before one waits
        for i, stream in enumerate(streams):
            stream.wait_stream(torch.cuda.current_stream(devices[i]))
            with torch.cuda.stream(stream):
                ping_pong_kernel[(1,)](mine[i], mine[1 - i], clocks[i], count, FIRST=i == 0, num_warps=1)
        for device in devices:
            torch.cuda.synchronize(device)
    return aligned(*since(clocks[0][0, 0].item(), [*clocks[0].T, clocks[1][:, 1]]))


def aligned(sent: torch.Tensor, answered: torch.Tensor, heard: torch.Tensor) -> tuple[float, float, float]:
    """Return (offset of the second GPU's clock from the first one's, its uncertainty, one-way time of a message), in
    us. sent, answered: the first GPU's clock at each send and answer; heard: the second one's at each receive, in ns.
    Assumes equal times in both directions."""
    sent, answered, heard = sent.double(), answered.double(), heard.double()
    ways = (answered - sent) / 2
    offsets = heard - (sent + answered) / 2
    fastest = ways.argsort()[: len(ways) // 4]
    spread = offsets[fastest].quantile(0.9) - offsets[fastest].quantile(0.1)
    return offsets[fastest].median().item() / 1e3, spread.item() / 1e3, ways.median().item() / 1e3


def since(begin: int, clocks) -> list[torch.Tensor]:
    """Subtract ``begin`` from the clocks in integers: floating-point numbers have too few digits for clocks."""
    return [x.cpu() - begin for x in clocks]


def gpu(rank: int) -> torch.device:
    """Return the device of a rank."""
    return torch.device("cuda", rank % 2)


def processors() -> int:
    """Return the number of multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(0).multi_processor_count


class Chain:
    """``size`` ranks that alternate between two GPUs, with inputs."""

    def __init__(self, kind, size: int, mib: float):
        self.size, self.shape = size, state_shape(mib * (1 << 20))
        self.nbytes = 4 * math.prod(self.shape)
        devices, count = [gpu(rank) for rank in range(size)], processors()
        programs = min(count // 2, count // (size // 2))  # the first GPU may have one rank more, which also fits
        tile = scan_tile(self.shape, programs, True, devices[0])
        self.ranks = kind(size, self.shape, tile=tile, programs=programs, devices=devices)
        generator = torch.Generator().manual_seed(size)
        self.states = [torch.randn(self.shape, generator=generator) for _ in devices]
        self.decays = [torch.rand(self.shape[:-1], generator=generator) for _ in devices]
        self.given = [[x.to(device) for x, device in zip(xs, devices)] for xs in (self.states, self.decays)]
        self.delays = torch.zeros(size, dtype=torch.int64, device=devices[0])
        self.delays[0] = FIRST_WAITS_NS

    def timed(self) -> tuple[list[torch.Tensor], float, float]:
        """Return (start and end of each rank in EPOCHS scans, in us of the first GPU's clock; uncertainty of the second
        GPU's clock; its offset). Raises AssertionError for a wrong value."""
        devices = self.ranks.devices[:2]
        before = clocks_of(devices)
        times, outs = self.ranks.timed(*self.given, epochs=WARM + EPOCHS, delays_ns=self.delays)
        after = clocks_of(devices)
        self.ranks.check()
        expected = allscan_reference(self.states, self.decays)
        worst = max((a.cpu() - b).abs().max().item() for a, b in zip(outs, expected))
        if not worst < 1e-5 * self.size:
            raise AssertionError(f"{self.size} ranks, {self.nbytes} bytes: wrong by {worst}")
        offset = (before[0] + after[0]) / 2
        error = abs(before[0] - after[0]) / 2 + max(before[1], after[1])
        times = since(times[0][0, 0].item(), times)
        return [x[WARM:].double() / 1e3 - offset * (rank % 2) for rank, x in enumerate(times)], error, offset

    def row(self) -> dict:
        times, error, _ = self.timed()
        took = times[-1][:, 1] - times[0][:, 0]
        return self.named("chain", took, 0.0 if self.size % 2 else error)

    def named(self, kind: str, us: torch.Tensor, error: float) -> dict:
        row = dict(kind=kind, ranks=self.size, bytes=self.nbytes, programs=self.ranks.programs, error_us=error)
        return row | quantiles(us)


def hop_rows(mib: float) -> list[dict]:
    """Return the times of each step of a chain of 3 ranks."""
    chain = Chain(ClockedRanks, 3, mib)
    if chain.ranks.spec.num_tiles > chain.ranks.programs:
        raise ValueError(f"{mib} MiB are more than a tile for each program")
    _, error, offset = chain.timed()
    clocks = [torch.stack(launches[-EPOCHS:]) for launches in chain.ranks.clocks]
    clocks = since(clocks[0][0, 0, 0].item(), clocks)
    clocks = [x.double() / 1e3 - offset * (rank % 2) for rank, x in enumerate(clocks)]
    *_, way = clocks_of(chain.ranks.devices[:2])
    first, middle, last = (x.unbind(-1) for x in clocks)
    spare = torch.zeros(2, dtype=torch.int64, device=gpu(0))
    launch = replay_us([lambda: empty_kernel[(chain.ranks.programs,)](spare)] * 20) / 20
    crossing = middle[THERE] - first[POSTED], last[THERE] - middle[POSTED]
    steps = {
        "launch, of an empty kernel": (launch, 0.0),
        "epoch and credit": (first[BEGUN] - first[0], 0.0),
        "loads, behind that": (first[LOADED] - first[BEGUN], 0.0),
        "store, first rank": (first[POSTED] - first[COMBINED], 0.0),
        "flight, half a round trip": (torch.tensor([way], dtype=torch.float64), 0.0),
        "flight and poll, first hop": (crossing[0], error),
        "flight and poll, second hop": (crossing[1], error),
        "combine": (middle[COMBINED] - middle[THERE], 0.0),
        "forward": (middle[POSTED] - middle[COMBINED], 0.0),
        "a hop, there to there": (last[THERE] - middle[THERE], error),
        "output and end": (last[ENDED] - last[POSTED], 0.0),
        "first store to last output": (last[ENDED] - first[COMBINED].min(1, keepdim=True).values, 0.0),
    }
    return [chain.named(f"hop: {name}", us.flatten(), error) for name, (us, error) in steps.items()]


def rows_of(kind: str, mib: float, size: int) -> list[dict]:
    """Return the rows of one case; runs in the process with both GPUs."""
    map_each_other([gpu(0), gpu(1)])
    return hop_rows(mib) if kind == "hop" else [Chain(VirtualRanks, size, mib).row()]


def cases(kinds, mibs, counts) -> list[tuple[str, float, int]]:
    """Return the arguments of rows_of, the most important first: one further hop, its parts, then longer chains."""
    chains = [("chain", mib, size) for mib in mibs for size in counts] if "chain" in kinds else []
    hops = [("hop", mib, 3) for mib in HOP_MIB] if "hop" in kinds else []
    return [*(case for case in chains if case[2] < 4), *hops, *(case for case in chains if case[2] > 3)]


def further_hops(rows) -> dict[int, float]:
    """Return {bytes: us of one further hop}: the difference of 3 and 2 ranks."""
    found = {(row["ranks"], row["bytes"]): row["p50_us"] for row in rows if row["kind"] == "chain"}
    return {
        nbytes: us - found[2, nbytes] for (ranks, nbytes), us in found.items() if ranks == 3 and (2, nbytes) in found
    }


def shown(row: dict) -> str:
    name = f"{row['kind']:34} P={row['ranks']} {row['bytes'] / (1 << 20):6g} MiB {row['programs']:3} programs"
    return f"{name} {row['p50_us']:7.2f} us  p20-p80 {row['p20_us']:.2f}-{row['p80_us']:.2f}  +- {row['error_us']:.2f}"


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kinds", nargs="+", default=["chain", "hop"], choices=["chain", "hop"])
    parser.add_argument("--mib", type=float, nargs="+", default=[0.0625, 0.25, 0.5, 1, 2])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 5, 8, 9])
    parser.add_argument("--seconds", type=float, default=600.0, help="start no case after so many seconds")
    parser.add_argument("--csv", default=results("chain.csv"))
    options = parser.parse_args(arguments)
    if torch.cuda.device_count() < 2:
        print("A chain over a link needs two GPUs.")
        return 0
    rows: list[dict] = []
    ends, left = time.monotonic() + options.seconds, cases(options.kinds, options.mib, options.ranks)
    with environment(ENVIRONMENT), Ranks(1, "cuda", backend="gloo") as ranks, Table(options.csv, COLUMNS, 4) as table:
        while left and time.monotonic() < ends:
            [found] = ranks.run(rows_of, *left.pop(0), timeout=60)
            rows += found
            for row in found:
                table.write(row)
                print(shown(row), flush=True)
    hops = further_hops(rows)
    print("a further hop, us: " + ", ".join(f"{nbytes / (1 << 20):g} MiB {us:.2f}" for nbytes, us in hops.items()))
    print(f"wrote {options.csv}" + (f", not begun: {left}" if left else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
