"""Measures the scan with dense transitions, as in delta rules, against flash-linear-attention's method.

That is an all-gather of states and transitions, and on every rank the product of those of earlier ranks (fla's own
kernel).

    python -m bench.transitions      # 2 and all GPUs of this machine; writes bench/results/transitions.csv

Times are measured as in bench.scan; every method is checked against float64 before and after. Without GPUs the scan is
only checked, on 3 CPU ranks.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys

import torch
import torch.distributed as dist

import allscan
from allscan.base.tiling import transition_tile
from allscan.reference import allscan_reference
from allscan.tools.ranks import Ranks
from bench.harness import Table, group_of, quantiles, results, slowest, stopwatches

SHAPES = [(32, 128, 128), (32, 64, 64), (6, 256, 512)]  # heads, K, V; the last is the default of fla's Gated DeltaNet
COLUMNS = (
    "method",
    "ranks",
    "heads",
    "K",
    "V",
    "p20_us",
    "p50_us",
    "p80_us",
    "skew_us",
    "back_to_back_us",
    "max_error",
    "gpu",
    "torch",
    "triton",
    "sources",
)


def point(ranks: int, heads: int, K: int, V: int) -> list:
    """Check and time all methods for one shape; runs on every rank. Return this rank's rows."""
    group = group_of(ranks)
    if dist.get_rank() >= ranks:
        return []
    comm = allscan.Communicator(group)
    generator = torch.Generator().manual_seed(K)
    states = [torch.randn(heads, K, V, generator=generator) for _ in range(ranks)]
    transitions = [torch.randn(heads, K, K, generator=generator) / (2 * K**0.5) for _ in range(ranks)]
    adjoints = [t.mT for t in transitions]
    state, transition = states[comm.rank].to(comm.device), transitions[comm.rank].to(comm.device)
    scan = allscan.AllScan(comm, state.shape, tile=transition_tile(K))
    out = torch.empty_like(state)
    both = torch.cat([state, transition], -1)
    gathered = both.new_empty(ranks, *both.shape)

    def gather():
        dist.all_gather_into_tensor(gathered, both, group=group)

    def gather_and_merge():
        gather()
        if comm.rank == 0:
            out.zero_()
        else:
            chunk_cp_merge(h=out, ag_hm=gathered, num_ranks=comm.rank, rank=comm.rank)

    forward = allscan_reference(states, None, transitions=transitions)[comm.rank]
    backward = allscan_reference(states, None, None, True, adjoints)[comm.rank]
    methods = {
        "All-Scan": (lambda: scan.scan(state, transition=transition, out=out), forward),
        "All-Scan, adjoint": (
            lambda: scan.scan(state, transition=transition, transpose=True, reverse=True, out=out),
            backward,
        ),
    }
    if comm.device.type == "cuda":
        methods["all_gather alone"] = (gather, None)
        if K <= 128 and importlib.util.find_spec("fla"):  # with K=256 fla's autotuning takes over 3 minutes
            from fla.ops.cp.chunk_merge import chunk_cp_merge

            methods["all_gather and fla's merge"] = (gather_and_merge, forward)
        latency, in_a_row = stopwatches(ranks)

    def error(name, expected):
        found = 0.0 if expected is None else (out.double().cpu() - expected).abs().max().item()
        if not found < 1e-5 * ranks:
            raise AssertionError(f"{name} is wrong for {(heads, K, V)}, {ranks} ranks: {found}")
        return found

    rows = []
    for name, (method, expected) in methods.items():
        out.fill_(float("nan"))
        method()
        row = dict(method=name, ranks=ranks, heads=heads, K=K, V=V, max_error=error(name, expected))
        if comm.device.type == "cuda":
            row |= {**quantiles(latency(method)), "back_to_back_us": in_a_row(method).median().item()}
            error(name, expected)
        comm.check()
        rows.append(row)
    comm.close()
    return rows


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--csv", default=results("transitions.csv"))
    options = parser.parse_args(arguments)
    gpus = torch.cuda.device_count()
    if gpus < 2:
        print("No two GPUs here: a check of All-Scan on 3 CPU ranks.")
        with Ranks(3, "cpu") as ranks:
            for row in ranks.run(point, 3, 2, 40, 16)[2]:
                print(f"{row['method']:18} max error {row['max_error']:.1e}")
        return 0
    with Table(options.csv, COLUMNS, digits=4) as table, Ranks(gpus, "cuda") as ranks:
        for count in sorted({2, gpus}):
            for shape in SHAPES:
                for same in zip(*ranks.run(point, count, *shape)[:count]):
                    row = slowest(same, "back_to_back_us", "max_error")
                    table.write(row)
                    print(
                        f"P={count} {shape}  {row['method']:26} {row['p50_us']:7.2f} us  p20-p80 {row['p20_us']:.2f}-"
                        f"{row['p80_us']:.2f}  back to back {row['back_to_back_us']:7.2f} us",
                        flush=True,
                    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
