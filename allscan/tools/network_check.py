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
    if options.epochs < 1:
        parser.error("--epochs must be at least 1")
    _join(options.output)
    report = Report(options.output if dist.get_rank() == 0 else None, dist.get_rank() == 0)
    try:
        right = check_all(report, options.epochs)
        if right and torch.cuda.is_available() and options.sizes:
            latency_table(report, options.sizes)
        report.line("result", "all is right" if right else "NOT right: see above")
        if right:
            allscan.finalize()
    finally:
        report.close()
    if not right:  # ranks may hang in shared resources and must not block the job's end
        os._exit(1)
    dist.destroy_process_group()
    return 0


def _join(output: str | None) -> None:
    """Create the process group from the variables of torchrun or srun.

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
    problem = None
    if output is not None and os.environ["RANK"] == "0":
        try:
            open(output, "a", encoding="utf-8").close()
        except (OSError, ValueError) as error:
            problem = f"--output={output}: {error}"
    if torch.cuda.is_available():
        take_local_gpu()
    dist.init_process_group("gloo" if not torch.cuda.is_available() else "cpu:gloo,cuda:nccl")
    problem, *_ = StoreExchange(range(dist.get_world_size())).exchange(problem, "network_check, --output")
    if problem is not None:
        dist.destroy_process_group()
        raise SystemExit(f"the first rank cannot write its report to {problem}")


class Report:
    """Lines that the first rank prints, and writes to a file."""

    def __init__(self, path: str | None, speaks: bool) -> None:
        self._file = open(path, "w", encoding="utf-8") if path else None
        self._speaks = speaks

    def line(self, name: str, text: object) -> None:
        if self._speaks:
            line = f"{name:<26} {text}"
            print(line, flush=True)
            if self._file:
                try:
                    print(line, file=self._file, flush=True)
                except OSError as error:  # e.g. a full disk: the other ranks continue with the checks
                    print(f"the file has no more lines: {error}", file=sys.stderr, flush=True)
                    self._file = None

    def close(self) -> None:
        if self._file:
            self._file.close()


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
        start = time.monotonic()
        found, problem = "", None
        try:
            with allscan.Communicator(timeout=20) as comm:
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


def _drawn(comm: Communicator, epoch: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Random (states, decays) of all ranks, equal on every rank."""
    generator = torch.Generator().manual_seed(epoch)
    states = torch.randn(comm.size, *SHAPE, generator=generator).to(comm.device)
    return list(states), list(torch.rand(comm.size, *SHAPE[:-1], generator=generator).to(comm.device))


def _compare(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    error = (found.double() - expected.double()).abs().max().item()
    if not error <= TOLERANCE * max(1.0, expected.double().abs().max().item()):
        raise WrongResultError(f"{what}: off by {error:.2e}")


def check_values(comm: Communicator, epochs: int) -> str:
    """Compare all algorithms for these nodes, in both directions, with a reference."""
    for algorithm in _algorithms(comm):
        scan = allscan.AllScan(comm, SHAPE, algorithm=algorithm)
        for epoch in range(epochs):
            states, decays = _drawn(comm, epoch)
            reverse = bool(epoch % 2)
            found = scan.scan(states[comm.rank], decays[comm.rank], reverse=reverse)
            expected = allscan_reference(states, decays, reverse=reverse)[comm.rank]
            _compare(found, expected, f"{algorithm}, epoch {epoch}, reverse={reverse}")
    return f"{', '.join(_algorithms(comm))}: {epochs} scans each"


def check_zigzag(comm: Communicator, epochs: int) -> str:
    """Check the zigzag layout."""
    places = comm.rank, 2 * comm.size - 1 - comm.rank
    for epoch in range(epochs):
        states = torch.cat([torch.stack(_drawn(comm, 2 * epoch + i)[0]) for i in (0, 1)])
        found = allscan.allscan(tuple(states[i] for i in places), comm=comm, layout="zigzag")
        expected = allscan_reference(list(states))
        for x, i in zip(found, places, strict=True):
            _compare(x, expected[i], f"epoch {epoch}, part {i}")
    return f"{epochs} calls"


def check_halo(comm: Communicator, epochs: int) -> str:
    """Check that halo() returns the tokens of the rank before."""
    for epoch in range(epochs):
        x = torch.randn(comm.size, 1, 8, 4, generator=torch.Generator().manual_seed(epoch)).to(comm.device)
        before = allscan.halo(x[comm.rank], 3, comm=comm)
        _compare(before, x[comm.rank - 1][:, -3:] if comm.rank else torch.zeros_like(before), f"epoch {epoch}")
    return f"{epochs} calls"


def check_zeco_gla(comm: Communicator, epochs: int) -> str:
    """Compare zeco_gla and its gradients with the recurrence over all tokens."""
    mine = slice(16 * comm.rank, 16 * comm.rank + 16)
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(epoch)
        q, k, v, g, do = torch.randn(5, 1, 16 * comm.size, 1, 16, generator=generator)
        whole = [x.double().requires_grad_() for x in (q, k, v, -g.abs() / 16)]
        own = [x.detach()[:, mine].float().to(comm.device).requires_grad_() for x in whole]
        expected, (o, _) = gla_reference(*whole)[0], allscan.zeco_gla(*own, comm=comm)
        expected.backward(do.double())
        o.backward(do[:, mine].to(comm.device))
        _compare(o, expected[:, mine].to(comm.device), f"call {epoch}")
        for name, x, y in zip("qkvg", own, whole, strict=True):
            assert x.grad is not None and y.grad is not None
            _compare(x.grad, y.grad[:, mine].to(comm.device), f"call {epoch}, d{name}")
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
    with allscan.Communicator(timeout=2.0) as own:
        scan, state = allscan.AllScan(own, SHAPE), torch.ones(SHAPE, device=own.device)
        if own.rank:
            with contextlib.suppress(allscan.AllScanTimeout):
                scan.scan(state)
                own.streams.synchronize()
                own.check()
                raise WrongResultError("the wait for an absent rank did not time out")
        own.order.store_exchange.private("end").exchange(None, "network_check, all ranks have ended")
        own.resync()
        _compare(scan.scan(state), own.rank * torch.ones_like(state), "after resync()")
    return "the other ranks timed out; resync() recovered them"


def check_rejected_call(comm: Communicator, epochs: int) -> str:
    """The last rank passes a wrong dtype once: the next barrier raises on every rank; then all ranks resume."""
    with allscan.Communicator(timeout=2.0) as own:
        state = torch.ones(SHAPE, device=own.device)
        allscan.allscan(state, comm=own)
        with contextlib.suppress(TypeError, ValueError):
            allscan.allscan(state.double() if own.rank == own.size - 1 else state, comm=own)
        with contextlib.suppress(allscan.AllScanOutOfStep, allscan.AllScanTimeout):
            own.barrier()
            raise WrongResultError("this rank did not detect the call that another rank had rejected")
        own.resync()
        _compare(allscan.allscan(state, comm=own), own.rank * torch.ones_like(state), "after resync()")
    return "the fault reached all ranks; resync() recovered them"


# In order of execution; values: the fraction of the epochs that each check runs
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
