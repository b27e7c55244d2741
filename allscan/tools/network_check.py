"""``python -m allscan.tools.network_check``: checks results and measures latency of scans over the nodes of a cluster.

Run one process per GPU with the cluster's launcher (torchrun, or srun with MASTER_ADDR and MASTER_PORT set). The first
rank prints a report, which can be attached to an issue. Without GPUs, with TRITON_INTERPRET=1, it runs on CPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import allscan
from allscan.reference import allscan_reference, gla_reference

from ..bindings import versions
from ..comm.communicator import Communicator
from ..comm.host_exchange import StoreExchange
from .ranks import take_local_gpu
from .timing import replay_us

Check = Callable[[Communicator, int], str]  # (communicator, number of epochs) -> remark for the report
SHAPE = torch.Size((2, 8, 16))
TOLERANCE = 1e-5


class WrongResultError(Exception):
    """A check found a wrong result."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all checks; returns the exit status, equal on all ranks: 0 if all passed."""
    parser = argparse.ArgumentParser(prog="python -m allscan.tools.network_check", description=__doc__)
    parser.add_argument("--epochs", type=int, default=2000, help="of the longest check (default 2000)")
    parser.add_argument("--sizes", type=float, nargs="*", default=[0.25, 2, 8], help="MiB of the states that are timed")
    parser.add_argument("--output", help="a file that the first rank writes the report to, too")
    options = parser.parse_args(arguments)
    report = _join(options.output)
    right = check_all(report, options.epochs)
    if right and torch.cuda.is_available() and options.sizes:
        latency_table(report, options.sizes)
    report.line("result", "all is right" if right else "NOT right: see above")
    if not right:  # ranks may hang in shared resources and must not block the job's end
        os._exit(1)
    allscan.finalize()
    dist.destroy_process_group()
    return 0


def _join(output: str | None) -> Report:
    """Create the process group from the variables of torchrun or srun; return the report.

    Raises SystemExit on all ranks, before any check, if the first rank cannot write the report to the file ``output``.
    """
    for name, of_slurm in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS")):
        if name not in os.environ and of_slurm in os.environ:
            os.environ[name] = os.environ[of_slurm]
    absent = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if absent:
        raise SystemExit(
            f"{', '.join(absent)} not set: start this by torchrun, or by srun with MASTER_ADDR and MASTER_PORT set to "
            "the first node and a free port"
        )
    if int(os.environ["WORLD_SIZE"]) < 2:
        raise SystemExit("network_check needs at least 2 processes")
    problem, first = None, os.environ["RANK"] == "0"
    try:
        report = Report(output if first else None, first)
    except (OSError, ValueError) as error:
        problem = f"--output={output}: {error}"
    if torch.cuda.is_available():
        take_local_gpu()
    dist.init_process_group("gloo" if not torch.cuda.is_available() else "cpu:gloo,cuda:nccl")
    problem, *_ = StoreExchange(range(dist.get_world_size())).exchange(problem, "network_check, --output")
    if problem is not None:
        dist.destroy_process_group()
        raise SystemExit(f"the first rank cannot write its report to {problem}")
    return report


class Report:
    """Lines that the first rank prints, and writes to a file."""

    def __init__(self, path: str | None, speaks: bool) -> None:
        self._speaks, self._file = speaks, open(path, "w", encoding="utf-8") if path else None

    def line(self, name: str, text: object) -> None:
        line = f"{name:<26} {text}"
        if self._speaks:
            print(line, flush=True)
        try:
            if self._file:
                print(line, file=self._file, flush=True)
        except OSError as error:  # e.g. a full disk: the other ranks continue with the checks
            print(f"the file has no more lines: {error}", file=sys.stderr, flush=True)
            self._file = None


def check_all(report: Report, epochs: int) -> bool:
    """Whether all checks pass on all ranks; stops at the first that fails."""
    exchange = StoreExchange(range(dist.get_world_size())).exchange
    for name, values in zip(("host", "GPU", "versions", "settings"), zip(*exchange(_mine(), "network_check"))):
        for value in dict.fromkeys(values):
            ranks = [rank for rank, other in enumerate(values) if other == value]
            report.line(name, f"{value}  (ranks {ranks[0]} to {ranks[-1]}, {len(ranks)} in all)")
    with allscan.Communicator() as comm:
        report.line("nodes", comm.nodes)
        report.line("mapped", "all neighbours" if comm.mapped else "not all neighbours: some links are puts")
    for check, times in CHECKS.items():
        start, found, problem = time.monotonic(), "", None
        try:
            with allscan.Communicator(timeout=20 if times else 2) as comm:  # a fault lasts for the time-out
                found = check(comm, max(1, int(epochs * times)))
        except Exception as error:  # the report names any error
            problem = f"{type(error).__name__}: {error}"
        try:
            problems = exchange(problem, f"network_check, {check.__name__}")
        except RuntimeError as gone:
            problems = [f"{problem or 'right'}; then {gone}"]
        name = check.__name__.removeprefix("check_").replace("_", " ")
        for rank, text in enumerate(problems):
            if text is not None:
                report.line(name, f"FAILED on rank {rank}: {text}")
        if any(problems):
            return False
        report.line(name, f"right, {found}, {time.monotonic() - start:.1f} s")
    return True


def _mine() -> tuple[str, ...]:
    folder = "/sys/class/infiniband"
    cards = " ".join(sorted(os.listdir(folder))) if os.path.isdir(folder) else ""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    known = ", ".join(f"{package.name} {versions.version_of(package.name)}" for package in versions.PACKAGES[:6])
    own = " ".join(f"{x}={os.environ[x]}" for x in sorted(os.environ) if x.startswith(("NVSHMEM_", "ALLSCAN_")))
    return f"{os.uname().nodename}, {cards or 'no InfiniBand devices'}", gpu, known, own or "none"


def _algorithms(comm: Communicator) -> list[str]:
    whole = comm.nodes is not None and len(comm.nodes) > 1
    return ["chain", *["rails", "recursive_doubling"] * whole]


def _random(comm: Communicator, seed: int, *shape: int) -> torch.Tensor:
    """Normally distributed numbers, equal on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(comm.device)


def _compare(found: Any, expected: torch.Tensor, what: str) -> None:
    error = (found.double() - expected.double()).abs().max().item()
    if not error <= TOLERANCE * max(1.0, expected.double().abs().max().item()):
        raise WrongResultError(f"{what}: off by {error:.2e}")


def check_values(comm: Communicator, epochs: int) -> str:
    """Compare all algorithms for these nodes, in both directions, with a reference."""
    for algorithm in _algorithms(comm):
        scan = allscan.AllScan(comm, SHAPE, algorithm=algorithm)
        for epoch in range(epochs):
            states, reverse = _random(comm, epoch, comm.size, *SHAPE), bool(epoch % 2)
            decays = states[..., 0].sigmoid()
            found = scan.scan(states[comm.rank], decays[comm.rank], reverse=reverse)
            expected = allscan_reference([*states], [*decays], reverse=reverse)[comm.rank]
            _compare(found, expected, f"{algorithm}, epoch {epoch}, reverse={reverse}")
    return f"{', '.join(_algorithms(comm))}: {epochs} scans each"


def check_zigzag(comm: Communicator, epochs: int) -> str:
    """Check the zigzag layout."""
    places = [comm.rank, 2 * comm.size - 1 - comm.rank]
    for epoch in range(epochs):
        states = _random(comm, epoch, 2 * comm.size, *SHAPE)
        found = allscan.allscan(tuple(states[places]), comm=comm, layout="zigzag")
        _compare(torch.stack(found), torch.stack(allscan_reference([*states]))[places], f"epoch {epoch}")
    return f"{epochs} calls"


def check_halo(comm: Communicator, epochs: int) -> str:
    """Check that halo() returns the tokens of the rank before."""
    for epoch in range(epochs):
        x = _random(comm, epoch, comm.size, 1, 8, 4)
        before = allscan.halo(x[comm.rank], 3, comm=comm)
        _compare(before, x[comm.rank - 1][:, -3:] if comm.rank else torch.zeros_like(before), f"epoch {epoch}")
    return f"{epochs} calls"


def check_zeco_gla(comm: Communicator, epochs: int) -> str:
    """Compare zeco_gla and its gradients with the recurrence over all tokens."""
    mine = slice(16 * comm.rank, 16 * comm.rank + 16)
    for epoch in range(epochs):
        q, k, v, g, do = _random(comm, epoch, 5, 1, 16 * comm.size, 1, 16)
        whole = [x.double().requires_grad_() for x in (q, k, v, -g.abs() / 16)]
        own = [x.detach()[:, mine].float().requires_grad_() for x in whole]
        expected, (o, _) = gla_reference(*whole)[0], allscan.zeco_gla(*own, comm=comm)
        expected.backward(do.double())
        o.backward(do[:, mine])
        pairs = [(o, expected), *((x.grad, y.grad) for x, y in zip(own, whole, strict=True))]
        for name, (x, y) in zip(("o", "dq", "dk", "dv", "dg"), pairs, strict=True):
            _compare(x, y[:, mine], f"call {epoch}, {name}")
    return f"{epochs} calls"


def check_stragglers(comm: Communicator, epochs: int) -> str:
    """Delay one rank after the other; the values are integers with exact sums, compared on the GPU."""
    pattern, chance = torch.arange(SHAPE.numel(), device=comm.device).view(SHAPE).float() % 7, random.Random(comm.rank)
    for algorithm in _algorithms(comm):
        scan, out = allscan.AllScan(comm, SHAPE, algorithm=algorithm), torch.empty(SHAPE, device=comm.device)
        wrong = torch.zeros((), dtype=torch.int64, device=comm.device)
        for epoch in range(epochs):
            if chance.random() < 0.02:
                time.sleep(chance.uniform(0, 4e-3))
            number = epoch % 100 + 1
            scan.scan(pattern + number * (comm.rank + 1), out=out.fill_(float("nan")))
            wrong += (out != comm.rank * pattern + number * (comm.rank * (comm.rank + 1) // 2)).sum()
        if wrong.item():
            raise WrongResultError(f"{algorithm}: {wrong.item()} words are wrong")
    return f"{', '.join(_algorithms(comm))}: {epochs} epochs each"


def check_absent_rank(comm: Communicator, epochs: int) -> str:
    """The first rank makes no call: later ranks time out; then all ranks resume."""
    scan, state = allscan.AllScan(comm, SHAPE), torch.ones(SHAPE, device=comm.device)
    if comm.rank:
        with contextlib.suppress(allscan.AllScanTimeout):
            scan.scan(state)
            comm.streams.synchronize()
            comm.check()
            raise WrongResultError("the wait for an absent rank did not time out")
    comm.order.store_exchange.private("end").exchange(None, "network_check, all ranks have ended")
    comm.resync()
    _compare(scan.scan(state), comm.rank * torch.ones_like(state), "after resync()")
    return "the other ranks timed out; resync() recovered them"


def check_rejected_call(comm: Communicator, epochs: int) -> str:
    """The last rank passes a wrong dtype once: the next barrier raises on every rank; then all ranks resume."""
    state = torch.ones(SHAPE, device=comm.device)
    allscan.allscan(state, comm=comm)
    with contextlib.suppress(TypeError, ValueError):
        allscan.allscan(state.double() if comm.rank == comm.size - 1 else state, comm=comm)
    with contextlib.suppress(allscan.AllScanOutOfStep, allscan.AllScanTimeout):
        comm.barrier()
        raise WrongResultError("this rank did not detect the call that another rank had rejected")
    comm.resync()
    _compare(allscan.allscan(state, comm=comm), comm.rank * torch.ones_like(state), "after resync()")
    return "the fault reached all ranks; resync() recovered them"


# In order of execution; values: the fraction of the epochs that each check runs, 0 for a fault
CHECKS: dict[Check, float] = {
    check_values: 0.01,
    check_zigzag: 0.01,
    check_halo: 0.01,
    check_zeco_gla: 0.002,
    check_stragglers: 1.0,
    check_rejected_call: 0.0,
    check_absent_rank: 0.0,
}


def latency_table(report: Report, sizes: Sequence[float]) -> None:
    """Back-to-back time of a scan in microseconds: the slowest rank's median of 30 graph replays."""
    exchange = StoreExchange(range(dist.get_world_size())).exchange
    with allscan.Communicator() as comm:
        algorithms = _algorithms(comm)
        report.line("MiB of a state", "  ".join(f"{name:>20}" for name in (*algorithms, "decays 0, chain")) + "   us")
        for size in sizes:
            shape = (max(1, int(size * 16)), 128, 128)
            state, decay = torch.ones(shape, device=comm.device), torch.ones(shape[:-1], device=comm.device)
            times = []
            factors: list[tuple[str, torch.Tensor | int]] = [*((name, decay) for name in algorithms), ("chain", 0)]
            for algorithm, factor in factors:
                scan, out = allscan.AllScan(comm, shape, algorithm=algorithm), torch.empty_like(state)
                comm.barrier()
                mine = replay_us([lambda: scan.scan(state, factor, out=out)] * 20).median().item() / 20  # noqa: B023
                comm.barrier()
                times.append(max(exchange(mine, "network_check, times")))
                scan.close()
            report.line(f"{shape[0] / 16:g}", "  ".join(f"{us:20.1f}" for us in times))


if __name__ == "__main__":
    sys.exit(main())
