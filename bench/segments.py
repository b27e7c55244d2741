"""Measures the scan over segments of a sequence, allscan_segments(), against the scan of one state.

    python -m bench.segments                    # two GPUs; writes bench/results/segments.csv. On CPU ranks only checks

States of 2 MiB (32 x 128 x 128), one decay per row. Each call is checked against float64 first. ``p50_us``: from a
barrier of the ranks to the end of the call on the slower rank, minus the barrier alone; ``back_to_back_us``: per call,
back to back.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

import allscan
from allscan.reference import allscan_reference
from allscan.tools.ranks import Ranks
from bench.harness import Table, group_of, results, stopwatches

SHAPE, SMALL, SEGMENTS = (32, 128, 128), (2, 16, 32), (1, 2, 4, 8)
COLUMNS = ("method", "ranks", "segments", "p50_us", "back_to_back_us", "max_error", "gpu", "torch", "triton", "sources")


class Case(NamedTuple):
    """A case with ``segments`` segments per rank. method: a function without arguments that returns their incoming
    states."""

    method: str
    segments: int
    call: Callable[[], torch.Tensor]


def drawn(rank: int, device: torch.device, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a rank's (states [8, ..., K, V], decays [8, ..., K])."""
    generator = torch.Generator(device).manual_seed(rank)
    count = max(SEGMENTS)
    state = torch.randn(count, *shape, generator=generator, device=device)
    return state, torch.rand(count, *shape[:-1], generator=generator, device=device)


def segments(states: torch.Tensor, decays: torch.Tensor, comm: allscan.Communicator) -> torch.Tensor:
    """Return the incoming states."""
    return allscan.allscan_segments(states, decays, comm=comm)[0]


def cases(comm: allscan.Communicator, shape: tuple[int, ...]) -> list[Case]:
    states, decays = drawn(comm.rank, comm.device, shape)
    out = torch.empty_like(states[0])
    scan = allscan.AllScan(comm, shape)
    found = [Case("AllScan.scan", 1, lambda: scan.scan(states[0], decays[0], out=out))]
    for n in SEGMENTS:
        found.append(Case("allscan_segments", n, partial(segments, states[:n], decays[:n], comm)))
    return found


def check(comm: allscan.Communicator, shape: tuple[int, ...], case: Case) -> float:
    """Return the largest error of this rank."""
    n, made = case.segments, case.call()
    of_all = [[x[:n].cpu() for x in drawn(rank, comm.device, shape)] for rank in range(comm.size)]
    states, decays = ([x for some in of_all for x in some[i]] for i in range(2))
    wanted = torch.stack([*allscan_reference(states, decays)][comm.rank * n : (comm.rank + 1) * n])
    worst = (made.cpu().double() - wanted.view_as(made).double()).abs().max().item()
    if not worst < 1e-4:
        raise RuntimeError(f"{case.method} of {n} segments is wrong by {worst}")
    return worst


def rows(size: int, shape: tuple[int, ...]) -> list[dict]:
    """Return this rank's rows; on CPUs without times."""
    found = []
    with allscan.Communicator(group_of(size)) as comm:
        latency, back_to_back = stopwatches(size) if comm.device.type == "cuda" else (None, None)
        for case in cases(comm, shape):
            row = dict(method=case.method, ranks=size, segments=case.segments, max_error=check(comm, shape, case))
            comm.barrier()
            if latency is not None and back_to_back is not None:
                row["p50_us"] = latency(case.call).median().item()
                row["back_to_back_us"] = back_to_back(case.call).median().item()
            found.append(row)
            comm.barrier()
    return found


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--csv", default=results("segments.csv"))
    path, size = parser.parse_args(given).csv, torch.cuda.device_count()
    if size < 2:
        with Ranks(2, "cpu") as ranks:
            worst = max(row["max_error"] for found in ranks.run(rows, 2, SMALL) for row in found)
        print(f"No two GPUs here: checked on CPU ranks, largest error {worst:.1e}.")
        return
    with Ranks(size, "cuda") as ranks, Table(path, COLUMNS) as table:
        for of_ranks in zip(*ranks.run(rows, size, SHAPE, timeout=120), strict=True):
            slowest = {name: max(row[name] for row in of_ranks) for name in ("p50_us", "back_to_back_us", "max_error")}
            row = of_ranks[0] | slowest
            table.write(row)
            print(*(f"{name} {row[name]}" for name in COLUMNS[:6]), flush=True)


if __name__ == "__main__":
    main()
