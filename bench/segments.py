"""The scan over segments of a sequence, allscan_segments(), beside the scan of one state.

    python -m bench.segments                    # two GPUs; writes bench/results/segments.csv

States of 2 MiB (32 x 128 x 128), a decay for each row. Each call is checked against float64 first. ``p50_us``: from a
barrier of the ranks to the end of the call on the slower rank, less the barrier alone; ``back_to_back_us``: of calls
back to back.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch

import allscan
from allscan.reference import allscan_reference
from allscan.tools.ranks import Ranks
from bench.harness import Table, group_of, results, stopwatches

SHAPE, SEGMENTS = (32, 128, 128), (1, 2, 4, 8)
COLUMNS = ("method", "ranks", "segments", "p50_us", "back_to_back_us", "max_error", "gpu", "torch", "triton", "sources")


def drawn(rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(states [8, 32, 128, 128], decays [8, 32, 128]) of a rank."""
    generator = torch.Generator(device).manual_seed(rank)
    count = max(SEGMENTS)
    state = torch.randn(count, *SHAPE, generator=generator, device=device)
    return state, torch.rand(count, *SHAPE[:-1], generator=generator, device=device)


def segments(states: torch.Tensor, decays: torch.Tensor, comm: allscan.Communicator) -> torch.Tensor:
    """The incoming states."""
    return allscan.allscan_segments(states, decays, comm=comm)[0]


def rows(size: int) -> list[dict]:
    """Of this rank."""
    found = []
    group = group_of(size)
    latency, back_to_back = stopwatches(size)
    with allscan.Communicator(group) as comm:
        states, decays = drawn(comm.rank, comm.device)
        out = torch.empty_like(states[0])
        scan = allscan.AllScan(comm, SHAPE)
        calls = {("AllScan.scan", 1): lambda: scan.scan(states[0], decays[0], out=out)}
        for n in SEGMENTS:
            calls["allscan_segments", n] = partial(segments, states[:n], decays[:n], comm)
        for (method, n), call in calls.items():
            of_all = [[x[:n].cpu() for x in drawn(rank, comm.device)] for rank in range(size)]
            wanted = allscan_reference(
                [x for states, _ in of_all for x in states], [x for _, decays in of_all for x in decays]
            )
            wanted, made = wanted[comm.rank * n : (comm.rank + 1) * n], call()
            worst = (made.cpu().double() - torch.stack([*wanted]).view_as(made).double()).abs().max().item()
            if not worst < 1e-4:
                raise RuntimeError(f"{method} of {n} segments is wrong by {worst}")
            comm.barrier()
            times = dict(p50_us=latency(call).median().item(), back_to_back_us=back_to_back(call).median().item())
            found.append(dict(method=method, ranks=size, segments=n, max_error=worst, **times))
            comm.barrier()
    return found


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--csv", default=results("segments.csv"))
    path, size = parser.parse_args(given).csv, torch.cuda.device_count()
    if size < 2:
        raise SystemExit("bench.segments needs two GPUs")
    with Ranks(size, "cuda") as ranks, Table(path, COLUMNS) as table:
        for of_ranks in zip(*ranks.run(rows, size, timeout=120), strict=True):
            slowest = {name: max(row[name] for row in of_ranks) for name in ("p50_us", "back_to_back_us", "max_error")}
            row = of_ranks[0] | slowest
            table.write(row)
            print(*(f"{name} {row[name]}" for name in COLUMNS[:6]), flush=True)


if __name__ == "__main__":
    main()
