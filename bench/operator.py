"""The GLA operator over several ranks: zeco_gla, the same kernels with other communications, and what the split costs.

    python -m bench.operator            # all GPUs of this machine, and 2 of them; writes bench/results/operator.csv

Weak scaling: T tokens a rank. Beside each other: zeco_gla; the all-gather of LASP-2 (NCCL, one fused fold; blocking,
and beside what needs nothing remote), the ring of LASP-1 and the all-to-all of Ulysses, all around the same local
kernels; no communication at all, the ideal; zeco_gla on one rank; and, where fla is installed, its chunk_gla on one
rank. All are CUDA graphs, replayed in turns on the same GPUs in the same processes. A time is the median over samples
of REPLAYS replays one after another, of the slowest rank. Every method is checked first against one rank's zeco_gla on
the whole sequence (at a tenth of the tokens, since that must fit one GPU). Without GPUs only that check runs, on 3 CPU
ranks.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys

import torch
import torch.distributed as dist
import triton

import allscan
from allscan.doctor import source_hash
from allscan.launch import Ranks
from bench.baselines import METHODS, all_to_all, gla

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SHAPES = [(16384, 16, 128), (32768, 16, 128), (8192, 32, 128)]  # T tokens a rank, H, K = V
GATES = {"near 1": 16.0, "mild": 1.0}  # logsigmoid(normal) over this
SAMPLES, REPLAYS = 20, 10
COLUMNS = (
    "method", "T", "H", "D", "gates", "pass", "ranks", "p20_us", "p50_us", "p80_us", "skew_us", "one_rank_us",
    "times_one_rank", "ideal_us", "percent_of_ideal", "extra_mib", "max_error", "gpu", "torch", "triton", "sources",
)  # fmt: skip


def inputs(T, H, D, device, seed, dtype=torch.bfloat16, mildness=16.0):
    generator = torch.Generator(device).manual_seed(seed)
    q, k, v, do = (torch.randn(1, T, H, D, generator=generator, device=device).to(dtype) for _ in range(4))
    g = torch.nn.functional.logsigmoid(torch.randn(1, T, H, D, generator=generator, device=device)) / mildness
    return [x.requires_grad_() for x in (q, k, v, g)], do


def step(leaves, do, call, backward):
    """o, or o and the gradients, of one call."""
    for leaf in leaves:
        leaf.grad = None
    if not backward:
        with torch.no_grad():
            return [call(*leaves)]
    o = call(*leaves)
    o.backward(do)
    return [o.detach(), *(leaf.grad for leaf in leaves)]


def calls(comm, one) -> dict:
    """{method: function of q, k, v, g}."""
    found = {"zeco": lambda *x: allscan.zeco_gla(*x, comm=comm)[0]}
    for name in METHODS:
        found[name] = lambda *x, name=name: gla(*x, comm=comm, alone=one, method=name)
    found["all_to_all"] = lambda *x: all_to_all(*x, comm=comm, alone=one)
    found["one rank"] = lambda *x: allscan.zeco_gla(*x, comm=one)[0]
    try:
        from fla.ops.gla import chunk_gla
    except ImportError:
        return found
    if comm.device.type == "cuda":
        found["fla, one rank"] = lambda *x: chunk_gla(*x)[0]
    return found


def check(comm, methods, T, H, D, dtype, mildness) -> dict:
    """{method: largest error against one rank on the whole, relative to each tensor's size}."""
    leaves, do = inputs(T * comm.size, H, D, comm.device, 1, dtype, mildness)
    expected = step(leaves, do, methods["one rank"], True)
    mine = slice(comm.rank * T, (comm.rank + 1) * T)
    own = [x.detach()[:, mine].contiguous().requires_grad_() for x in leaves]
    local = step(own, do[:, mine].contiguous(), methods["one rank"], True)
    errors = {}
    for name in (name for name in methods if name not in ("one rank", "no communication")):
        errors[name] = 0.0
        wanted = local if name == "fla, one rank" else [x[:, mine] for x in expected]
        for a, b in zip(step(own, do[:, mine].contiguous(), methods[name], True), wanted):
            a, b = a.double(), b.double()
            errors[name] = max(errors[name], ((a - b).norm() / b.norm()).item())
        if not errors[name] < (1e-5 if dtype == torch.float32 else 5e-3):
            raise AssertionError(f"{name} differs from one rank by {errors[name]}")
    return errors


def capture(leaves, do, call, backward):
    """A CUDA graph of one step, what it returns, and the memory that a step needs beyond its inputs, in MiB."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(leaves, do, call, backward)
        for leaf in leaves:
            leaf.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(leaves, do, call, backward)
        torch.cuda.synchronize()
        extra = (torch.cuda.max_memory_allocated() - before) / (1 << 20)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step(leaves, do, call, backward)
    return graph, kept, extra


def sample(graph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / REPLAYS


_groups = {}


def point(ranks, T, H, D, mildness, backward) -> dict | None:
    """{method: row} on each of the first ``ranks`` ranks; on CPUs only errors."""
    allscan.init()
    if ranks not in _groups:
        alone = [dist.new_group([r]) for r in range(dist.get_world_size())]
        _groups[ranks] = (dist.new_group(list(range(ranks))), alone[dist.get_rank()])
    if dist.get_rank() >= ranks:
        return None
    group, alone = _groups[ranks]
    with allscan.Communicator(group) as comm, allscan.Communicator(alone) as one:
        methods = calls(comm, one)
        if comm.device.type == "cpu":
            return check(comm, methods, T, H, D, torch.float32, mildness)
        errors = check(comm, methods, T // 10, H, D, torch.bfloat16, mildness)
        leaves, do = inputs(T, H, D, comm.device, comm.rank, mildness=mildness)
        made = {name: capture(leaves, do, call, backward) for name, call in methods.items()}
        times = {name: [] for name in made}
        comm.barrier()
        for _ in range(SAMPLES):
            for name, (graph, _, _) in made.items():
                dist.barrier(group)
                graph.replay()
                times[name].append(sample(graph))
        comm.barrier()
        rows = {}
        for name, (_, _, extra) in made.items():
            quantiles = torch.tensor(times[name]).quantile(torch.tensor([0.2, 0.5, 0.8])).tolist()
            rows[name] = dict(zip(("p20_us", "p50_us", "p80_us"), quantiles), extra_mib=extra)
            rows[name]["max_error"] = errors.get(name, "")
        return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks; default 2 and all GPUs")
    parser.add_argument("--gates", nargs="+", default=list(GATES), choices=list(GATES))
    parser.add_argument("--csv", default=os.path.join(ROOT, "bench", "results", "operator.csv"))
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count()
    if gpus < 2:
        print("No two GPUs here: a check of every method on 3 CPU ranks, forward and backward.")
        with Ranks(3, "cpu") as ranks:
            for name, error in ranks.run(point, 3, 70, 3, 16, 16.0, True)[2].items():
                print(f"{name:22} error {error:.1e}")
        return 0
    counts = arguments.ranks or sorted({2, gpus})
    names = dict(gpu=torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__)
    names["sources"] = source_hash()[:12]
    cases = [(*shape, kind, count, backward) for shape in SHAPES for kind in arguments.gates for count in counts
             for backward in (False, True)]  # fmt: skip
    with open(arguments.csv, "w", newline="") as file, Ranks(max(counts), "cuda") as ranks:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for T, H, D, kind, count, backward in cases:
            results = ranks.run(point, count, T, H, D, GATES[kind], backward)[:count]
            slowest = {name: max((r[name] for r in results), key=lambda row: row["p50_us"]) for name in results[0]}
            for name, row in slowest.items():
                if name == "one rank":
                    continue
                row |= dict(method=name, T=T, H=H, D=D, gates=kind, ranks=count) | names
                row["pass"] = "forward+backward" if backward else "forward"
                row["skew_us"] = row["p50_us"] - min(r[name]["p50_us"] for r in results)
                row["extra_mib"] = max(r[name]["extra_mib"] for r in results)
                row["one_rank_us"], row["ideal_us"] = (slowest[n]["p50_us"] for n in ("one rank", "no communication"))
                row["times_one_rank"] = row["p50_us"] / row["one_rank_us"]
                row["percent_of_ideal"] = 100 * row["ideal_us"] / row["p50_us"]
                writer.writerow({c: f"{x:.5g}" if isinstance(x, float) else x for c, x in row.items()})
                print(
                    f"T={T} H={H} {kind:7} {row['pass']:16} P={count} {name:22}{row['p50_us']:9.1f} us "
                    f"({row['p20_us']:.1f}-{row['p80_us']:.1f})  {row['times_one_rank']:.4f} x one rank  "
                    f"{row['percent_of_ideal']:5.1f} % of ideal  extra {row['extra_mib']:.0f} MiB",
                    flush=True,
                )
            file.flush()
    print(f"wrote {arguments.csv}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
