"""Measures the scan alone, by method, size and number of ranks, against a plain peer copy of the same bytes.

    python -m bench.scan                        # all GPUs of this machine, and 2 of them; writes bench/results/scan.csv
    python -m bench.scan --ranks 4 --mib 2      # one point

Every method is checked against float64 before it is timed, and the baselines are proven by the names of their kernels
(column ``proof``, of the last rank). NCCL reads the number of programs of its symmetric kernels once, so each of
WINDOWS is timed in separate processes. A latency is the median over replays of a CUDA graph with REPEATS pairs
(barrier, scan), minus the same graph of barriers alone, divided by REPEATS; of the slowest rank. "Back to back": a
graph of scans without barriers, the cost of a scan if ranks may run ahead; "eager": REPEATS consecutive calls from
Python without a graph. "whole_gpu": sentinel links with as many programs as multiprocessors, as the pull has; the
default is half of them, which leaves the others to NCCL. "rails": algorithm="rails" inside the host, where each rank
scans a slice of the state. "put_signal": a chain of torch's kernels and copies into PyTorch's symmetric memory. Without
GPUs the methods that need none of that are checked, on 3 CPU ranks.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import re
import sys

import torch
import torch.distributed as dist
import triton

import allscan
from allscan.base.tiling import multiprocessors
from allscan.reference import allscan_reference
from allscan.tools.ranks import Ranks
from allscan.tools.timing import copy_kernel
from bench.baselines import AllGather, Pull, Ring, SignalChain, WindowAllGather
from bench.harness import (
    REPEATS,
    WITHOUT_MULTICAST,
    Table,
    environment,
    group_of,
    quantiles,
    results,
    sample,
    slowest,
    state_shape,
    stopwatches,
)
from bench.proof import kernels, ran

COLUMNS = (
    "method",
    "ranks",
    "bytes",
    "p20_us",
    "p50_us",
    "p80_us",
    "skew_us",
    "back_to_back_us",
    "eager_us",
    "copy_us",
    "times_copy",
    "max_error",
    "proof",
    "gpu",
    "torch",
    "triton",
    "sources",
)
METHODS = ["sentinel", "whole_gpu", "signal", "put", "rails", "all_gather", "windows", "pull", "put_signal", "ring"]

# Environments for NCCL's all-gather of symmetric windows, by suffix of the method's name
WINDOWS = {"": {}} | {f", {n} programs": {"NCCL_SYM_CTAS": str(n)} for n in (16, 32, 64)}
WINDOWS[", AllGather_LL"] = {"NCCL_SYM_KERNEL": "AllGather_LL"}
LL_BYTES = 1 << 18  # largest state for this kernel

# By method: parts of the names of kernels that it must run, and All-Scan must not
PROOFS = {
    "sentinel": ["scan_kernel"],
    "signal": ["scan_kernel"],
    "put_signal": ["put_signal_kernel|wait_signal_kernel"],
    "put": ["scan_kernel"],
    "rails": ["rails_kernel"],
    "all_gather": ["ncclDevKernel_AllGather"],
    "windows": ["ncclSymkDevKernel_AllGather_ST|ncclSymkDevKernel_AllGather_LL"],
    "pull and fold": ["barrier_kernel", "pull_kernel"],
    "ring": ["ncclDevKernel_SendRecv"],
}


class AllScanMethod:
    def __init__(self, comm, state, decay, protocol="auto", **options):
        self.scan = allscan.AllScan(comm, state.shape, protocol=protocol, **options)
        self.state, self.decay, self.out = state, decay, torch.empty_like(state)

    def __call__(self):
        self.scan.scan(self.state, self.decay, out=self.out)
        return self.out


def point(ranks: int, nbytes: int, methods, tiles) -> list:
    """Check and time all methods for one size; runs on every rank. Return this rank's rows."""
    group = group_of(ranks)
    if dist.get_rank() >= ranks:
        return []
    comm = allscan.Communicator(group)
    heads, K, V = state_shape(nbytes)
    generator = torch.Generator().manual_seed(nbytes)
    states = [torch.randn(heads, K, V, generator=generator) for _ in range(ranks)]
    decays = [torch.rand(heads, K, generator=generator) for _ in range(ranks)]
    expected = allscan_reference(states, decays)[comm.rank]
    state, decay = states[comm.rank].to(comm.device), decays[comm.rank].to(comm.device)
    made = {name: AllScanMethod(comm, state, decay, name) for name in ("sentinel", "signal", "put") if name in methods}
    if "whole_gpu" in methods and comm.device.type == "cuda":
        programs = multiprocessors(comm.device)
        made["sentinel (whole GPU)"] = AllScanMethod(comm, state, decay, "sentinel", max_ctas=programs)
    if "rails" in methods:
        made["rails"] = AllScanMethod(comm, state, decay, algorithm="rails")
    for words, depth in tiles:
        tile = (max(1, words // V), min(V, words))
        name = f"sentinel-{words}-depth{depth}"
        made[name] = AllScanMethod(comm, state, decay, "sentinel", tile=tile, depth=depth)
    if "all_gather" in methods:
        made["all_gather"] = AllGather(comm, state, decay, fused=False)
        made["all_gather (fused fold)"] = AllGather(comm, state, decay, fused=True)
    if "windows" in methods and comm.device.type == "cuda":
        made["windows (fused fold)"] = WindowAllGather(comm, state, decay)
    if "pull" in methods and comm.device.type == "cuda":
        made["pull and fold"] = Pull(comm, state, decay)
    if "put_signal" in methods and comm.device.type == "cuda":
        made["put_signal chain"] = SignalChain(comm, state, decay)
    if "ring" in methods:
        made["ring"] = Ring(comm, state, decay)

    def checked(name):
        error = (made[name].out.double().cpu() - expected).abs().max().item()
        if not error < 1e-5 * ranks:
            raise AssertionError(f"{name} is wrong at {nbytes} bytes, {ranks} ranks: {error}")
        return error

    rows = []
    for name, method in made.items():
        method.out.fill_(float("nan"))
        method()
        rows.append({"method": name, "ranks": ranks, "bytes": nbytes, "max_error": checked(name)})
    comm.check()
    if comm.device.type == "cpu":
        comm.close()
        return rows

    latency, in_a_row = stopwatches(ranks)
    copies = _copies(comm, state)
    copy = min(map(latency, copies), key=lambda t: t.median())
    copy_us = copy.median().item()
    last = comm.rank == comm.size - 1  # the last rank copies nothing
    copies_in_a_row = torch.zeros(1) if last else min(map(in_a_row, copies), key=lambda t: t.median())
    for name in [name for name in made if name in ("all_gather", "windows (fused fold)")]:
        alone = f"{name.partition(' ')[0]} (no fold)"
        made[alone] = made[name].gather
        rows.append({"method": alone, "ranks": ranks, "bytes": nbytes})
    rows.append({"method": "peer copy", "ranks": ranks, "bytes": nbytes})
    for row in rows:
        name = row["method"]
        if name == "peer copy":
            times, free, eager, proof = copy, copies_in_a_row, "", ""
        else:
            try:
                times, free = latency(made[name]), in_a_row(made[name])
                eager = sorted(sample(made[name], REPEATS) for _ in range(REPEATS))[REPEATS // 2]
                comm.check()
            except allscan.AllScanTimeout as timeout:
                raise RuntimeError(f"{name}, {nbytes} bytes, {ranks} ranks: {timeout}") from timeout
            if "max_error" in row:
                checked(name)  # still correct after back-to-back scans
            wanted = next(kinds for method, kinds in PROOFS.items() if name.startswith(method))
            others = ["nccl"] if wanted in (["scan_kernel"], ["rails_kernel"]) else ["scan_kernel", "rails_kernel"]
            found = kernels(made[name])
            ran(name, found, wanted, others)
            proof = "; ".join(f"{n} {re.split('[(<]', kernel)[0]}" for kernel, n in sorted(found.items()))
        row |= {**quantiles(times), "back_to_back_us": free.median().item(), "eager_us": eager, "copy_us": copy_us}
        row["proof"] = proof
    comm.check()
    comm.close()
    return rows


def _copies(comm, state):
    """Return plain copies of a state into the next rank's memory, by kernels of several shapes; the fastest counts."""
    channel = allscan.AllScan(comm, state.shape, protocol="signal", depth=1).channel()  # its inbox is overwritten

    def copy(block, warps):
        if comm.rank < comm.size - 1:
            grid = (triton.cdiv(state.numel(), block),)
            copy_kernel[grid](channel.next_inbox, state, state.numel(), BLOCK=block, num_warps=warps)

    return [functools.partial(copy, *shape) for shape in ((512, 1), (2048, 4), (8192, 8))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks; default 2 and all GPUs")
    parser.add_argument(
        "--mib", type=float, nargs="+", default=[0.0625, 0.25, 0.5, 1, 2, 4, 8, 32], help="sizes of the state"
    )
    parser.add_argument("--tiles", type=int, nargs="*", default=[], help="also time sentinel with tiles of these sizes")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--csv", default=results("scan.csv"))
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count()
    if gpus < 2:
        methods = ["sentinel", "signal", "rails", "all_gather", "ring"]
        print(f"No two GPUs here: a check of {', '.join(methods)} on 3 CPU ranks; options have no effect.")
        with Ranks(3, "cpu") as ranks:
            rows = ranks.run(point, 3, 1 << 16, methods, [])[2]
        for row in rows:
            print(f"{row['method']:12} max error {row['max_error']:.1e}")
        return 0
    counts = arguments.ranks or sorted({2, gpus})
    os.environ.setdefault("ALLSCAN_HEAP", "2G")
    methods = arguments.methods
    runs = [("", WITHOUT_MULTICAST, [m for m in methods if m != "windows"])]
    if "windows" in methods:
        runs += [(name, WITHOUT_MULTICAST | variables, ["windows"]) for name, variables in WINDOWS.items()]
    with Table(arguments.csv, COLUMNS, digits=4) as table:
        for name, variables, chosen in runs:
            sizes = [4 * math.prod(state_shape(mib * (1 << 20))) for mib in arguments.mib]
            if "NCCL_SYM_KERNEL" in variables:
                sizes = [nbytes for nbytes in sizes if nbytes <= LL_BYTES]
            if chosen and sizes:
                with environment(variables), Ranks(max(counts), "cuda") as ranks:
                    for count in counts:
                        for nbytes in sizes:
                            time_one(ranks, table, count, nbytes, chosen, arguments.tiles, name)
    print(f"wrote {arguments.csv}")
    return 0


def time_one(ranks, table, count, nbytes, methods, words, suffix) -> None:
    """Write rows of ``count`` ranks and one size; ``suffix``: of the names of methods with symmetric windows."""
    tiles = [(tile, depth) for tile in words for depth in (2, 3)]
    answers = ranks.run(point, count, nbytes, methods, tiles)[:count]
    for same in zip(*answers):
        row = slowest(same, "copy_us", "back_to_back_us", "max_error")
        if methods == ["windows"] and not row["method"].startswith("windows"):
            continue
        row["method"] += suffix
        row["proof"] = same[-1]["proof"]
        row["times_copy"] = row["p50_us"] / row["copy_us"]
        table.write(row)
        print(
            f"P={count} {nbytes / (1 << 20):6g} MiB  {row['method']:36} {row['p50_us']:8.2f} us "
            f"({row['times_copy']:5.2f} x copy)  p20-p80 {row['p20_us']:.2f}-{row['p80_us']:.2f}  "
            f"back to back {row['back_to_back_us']:8.2f} us  eager {row['eager_us'] or 0:8.1f} us",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
