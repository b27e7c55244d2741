"""Functions shared by the benchmarks: inputs, checks, times, CSV files of the slowest rank with the machine's name."""

from __future__ import annotations

import contextlib
import csv
import functools
import gc
import os
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
import triton

import allscan
from allscan.comm.heap import source_hash
from allscan.tools.ranks import Ranks
from allscan.tools.timing import replay_us

# Environment of processes that use NCCL's or PyTorch's symmetric memory
WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
REPEATS, REPLAYS = 20, 60  # scans in a graph, and replays of the graph
STEP_REPLAYS = 10  # consecutive replays of a graph of one step
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@contextlib.contextmanager
def environment(variables: dict[str, str]):
    """Set environment variables inside the block, for processes started there."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def check_on_cpus(check, models) -> int:
    """On a machine without two GPUs: print ``check(None, model, 24)``, an error, of each model on 2 CPU ranks. Returns
    the exit status."""
    print("No two GPUs here: a check of every model on 2 CPU ranks.")
    with Ranks(2, "cpu") as ranks:
        for model in models:
            print(f"{model:12} error {ranks.run(check, None, model, 24)[0]:.1e}")
    return 0


def results(name: str) -> str:
    """Return the path of a committed result."""
    return os.path.join(ROOT, "bench", "results", name)


def state_shape(nbytes: float) -> tuple[int, int, int]:
    """Return the largest state [heads, K, 128], K <= 128, of at most ``nbytes``, and of 512 bytes at least."""
    return max(1, int(nbytes // (4 * 128 * 128))), max(1, min(128, int(nbytes // 512))), 128


def machine() -> dict:
    """Return the last columns of every table: GPU, versions, sources."""
    return dict(
        gpu=torch.cuda.get_device_name(),
        torch=torch.__version__,
        triton=triton.__version__,
        sources=source_hash()[:12],
    )


def quantiles(us: torch.Tensor) -> dict:
    """Return p20, p50 and p80 of the samples."""
    return {f"p{n}_us": us.quantile(n / 100).item() for n in (20, 50, 80)}


def slowest(rows, *most) -> dict:
    """Reduce the rows of all ranks to one: times of the slowest rank, difference of the fastest (skew_us), and the
    maxima of the columns ``most``, empty where no rank has the column."""
    row = dict(max(rows, key=lambda r: r["p50_us"]))
    row["skew_us"] = row["p50_us"] - min(r["p50_us"] for r in rows)
    for name in most:
        row[name] = max((r[name] for r in rows if name in r), default="")
    return row


class Table:
    """A CSV file that is complete after every row. Entries of a row that are not in ``columns`` are dropped. keep:
    whether a row of an existing file with these columns stays; by default none does."""

    def __init__(self, path: str, columns, digits: int = 5, keep: Callable[[dict], bool] = lambda row: False):
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        self.path, self.columns, self.digits, self.keep, self.machine = path, columns, digits, keep, machine()

    def __enter__(self):
        kept = self._kept()
        self._file = open(self.path, "w", newline="")
        self._writer = csv.DictWriter(self._file, self.columns)
        self._writer.writeheader()
        self._writer.writerows(kept)
        self._file.flush()
        return self

    def _kept(self) -> list[dict]:
        if not os.path.exists(self.path):
            return []
        with open(self.path, newline="") as file:
            rows = csv.DictReader(file)
            return [row for row in rows if self.keep(row)] if rows.fieldnames == [*self.columns] else []

    def __exit__(self, *error):
        self._file.close()

    def write(self, row: dict) -> None:
        row = row | self.machine
        values = {c: row[c] for c in self.columns}
        self._writer.writerow({c: f"{x:.{self.digits}g}" if isinstance(x, float) else x for c, x in values.items()})
        self._file.flush()


def inputs(T, H, K, device, seed=0, dtype=torch.bfloat16, mildness=16.0, B=1, V=None):
    """Draw ([q, k, v, g], do)."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(width):
        return torch.randn(B, T, H, width, generator=generator, device=device)

    q, k, v, do = (normal(width).to(dtype) for width in (K, K, V or K, V or K))
    g = torch.nn.functional.logsigmoid(normal(K))
    g = g / mildness if mildness else torch.zeros_like(g)
    return [x.requires_grad_() for x in (q, k, v, g)], do


def step(leaves, do, call, backward):
    """Run one call; return [o], or [o, *gradients]."""
    for leaf in leaves:
        leaf.grad = None
    if not backward:
        with torch.no_grad():
            return [call(*leaves)]
    o = call(*leaves)
    o.backward(do)
    return [o.detach(), *(leaf.grad for leaf in leaves)]


def checked(name, actual, expected, limit) -> float:
    """Return the largest difference of the pairs, relative to each tensor's norm. Raise AssertionError unless it is
    below ``limit``."""
    differences = [(a.double() - b.double()).norm() / b.double().norm() for a, b in zip(actual, expected)]
    worst = torch.stack(differences).max().item()  # NaN if any is
    if not worst < limit:
        raise AssertionError(f"{name} is wrong by {worst}")
    return worst


def extra_mib(function) -> float:
    """Return the peak memory of a call in MiB, beyond the memory in use before it."""
    gc.collect()  # else garbage that is collected during the call counts as in use before it
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / (1 << 20)


def capture(leaves, do, call, backward):
    """Return (CUDA graph of one step, its results, peak memory of a step without its inputs in MiB)."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(leaves, do, call, backward)
        for leaf in leaves:
            leaf.grad = None
        extra = extra_mib(lambda: step(leaves, do, call, backward))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step(leaves, do, call, backward)
    return graph, kept, extra


def sample(call, count: int = STEP_REPLAYS) -> float:
    """Return the microseconds per call of ``count`` consecutive calls, e.g. replays of a graph."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / count


def both_passes(leaves, do, call, packed: bool, samples: int, both: bool = True) -> dict:
    """Return median microseconds of forward and, with ``both``, of both passes with their peak MiB. Times replays of a
    CUDA graph; calls for packed sequences."""
    row = {} if both else {"forward_backward_us": ""}
    for backward, column in ((False, "forward_us"), (True, "forward_backward_us"))[: 1 + both]:
        if packed:
            replay = functools.partial(step, leaves, do, call, backward)
            row["extra_mib"] = extra_mib(replay)
        else:
            graph, _, row["extra_mib"] = capture(leaves, do, call, backward)
            replay = graph.replay
        replay()
        row[column] = sorted(sample(replay) for _ in range(samples))[samples // 2]
    return row


_groups: dict = {}
_teams: dict = {}


def group_of(ranks: int):
    """Return the process group of the first ranks; also create their NVSHMEM team for barriers. Collective over the
    job."""
    if ranks not in _groups:
        allscan.init()
        _groups[ranks] = dist.new_group(list(range(ranks)))
        if torch.cuda.is_available():
            from allscan.bindings.nvshmem_host import load

            team = np.full(1, -1, dtype=np.int32)
            nvshmem = load()
            nvshmem.team_split_strided(nvshmem.Team_id.TEAM_WORLD, 0, 1, ranks, 0, 0, team.ctypes.data)
            _teams[ranks] = int(team[0])
    return _groups[ranks]


def barrier_of(ranks: int):
    """Return a barrier of the first ranks on their current streams; the host does not wait."""
    from allscan.bindings.nvshmem_host import load

    nvshmem = load()
    return lambda: nvshmem.team_sync_on_stream(_teams[ranks], torch.cuda.current_stream().cuda_stream)


def stopwatches(ranks: int):
    """Return (latency, in_a_row): functions that time a call in microseconds, one value per replay. latency: a graph of
    REPEATS pairs (barrier, call), minus the same graph of barriers alone, divided by REPEATS; a pair ends when the
    slowest rank has ended. in_a_row: back to back."""
    barrier = barrier_of(ranks)

    def in_a_row(*calls):
        return replay_us(calls * REPEATS, REPLAYS) / REPEATS

    base = in_a_row(barrier).median()
    return lambda call: in_a_row(barrier, call) - base, in_a_row
