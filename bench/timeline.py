"""Draws the timeline of each GPU in one forward and backward of zeco_gla, and writes a trace: it shows the overlap.

    python -m bench.timeline                    # all GPUs of this machine; writes timeline.png and timeline.json

timeline.json opens in chrome://tracing or ui.perfetto.dev: a process per rank, a thread per stream. Times are from
torch's profiler, whose clock the ranks of a host share. In the plot each rank has two lines: compute kernels above,
scans below.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile

import torch

import allscan
from allscan.tools.ranks import Ranks
from bench.harness import capture, inputs

SCAN = "scan_kernel"


def record(T, H, D):
    """Return [(kernel, stream, begin in us, duration in us)] of one step of this rank, a CUDA graph."""
    with allscan.Communicator() as comm:
        leaves, do = inputs(T, H, D, comm.device, comm.rank)
        graph, *_ = capture(leaves, do, lambda *x: allscan.zeco_gla(*x, comm=comm)[0], True)
        comm.barrier()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(10):  # the last one counts: it is warm
                graph.replay()
            torch.cuda.synchronize()
        comm.barrier()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profile.export_chrome_trace(path)
        with open(path) as file:
            events = json.load(file)["traceEvents"]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    kernels.sort(key=lambda e: e["ts"])
    ends = [e for e in kernels if e["name"].startswith("strong_decay_grad_kernel")]  # the last kernel of a step
    before = ends[-2]["ts"]
    return [(e["name"], e["args"]["stream"], e["ts"], e["dur"]) for e in kernels if e["ts"] > before]


def exposed(kernels) -> float:
    """Return the microseconds of scans without another running kernel of this rank."""
    others = sorted((begin, begin + dur) for name, _, begin, dur in kernels if name != SCAN)
    alone = 0.0
    for name, _, begin, dur in kernels:
        if name == SCAN:
            alone += dur
            at = begin
            for a, b in others:
                a, b = max(a, at), min(b, begin + dur)
                if b > a:
                    alone -= b - a
                    at = b
    return alone


def draw(ranks, path, title):
    from matplotlib.figure import Figure

    start = min(begin for kernels in ranks for _, _, begin, _ in kernels)
    names = sorted({name for kernels in ranks for name, *_ in kernels if name.endswith("_kernel")})
    figure = Figure(figsize=(12, 1 + 0.9 * len(ranks)), layout="constrained")
    axes = figure.subplots()
    for rank, kernels in enumerate(ranks):
        for i, name in enumerate([*names, None]):
            bars = [
                (begin - start, dur) for n, _, begin, dur in kernels if n == name or (name is None and n not in names)
            ]
            line = 2 * (len(ranks) - 1 - rank) + (name != SCAN)
            label = (name or "other") if rank == 0 and bars else None
            color = "black" if name == SCAN else f"C{i}" if name else "lightgray"
            axes.broken_barh(bars, (line + 0.1, 0.8), facecolors=color, label=label)
    axes.set_yticks([2 * i + 1 for i in range(len(ranks))], [f"rank {len(ranks) - 1 - i}" for i in range(len(ranks))])
    axes.set(xlabel="us", title=title)
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of each rank")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--out", default="timeline", help="path without suffix")
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count()
    if gpus < 2:
        print("A timeline needs at least two GPUs.")
        return 0
    with Ranks(gpus, "cuda") as ranks:
        recorded = ranks.run(record, arguments.tokens, arguments.heads, 128)
    events = [
        {"name": name, "ph": "X", "ts": begin, "dur": dur, "pid": rank, "tid": stream}
        for rank, kernels in enumerate(recorded)
        for name, stream, begin, dur in kernels
    ]
    events += [{"name": "process_name", "ph": "M", "pid": r, "args": {"name": f"rank {r}"}} for r in range(gpus)]
    with open(arguments.out + ".json", "w") as file:
        json.dump({"traceEvents": events}, file)
    for rank, kernels in enumerate(recorded):
        scans = sum(dur for name, _, _, dur in kernels if name == SCAN)
        whole = max(b + d for _, _, b, d in kernels) - kernels[0][2]
        print(f"rank {rank}: one step {whole:.0f} us, scans {scans:.0f} us, of it {exposed(kernels):.1f} us alone")
    title = f"zeco_gla forward and backward, {gpus} ranks, T={arguments.tokens} a rank, H={arguments.heads}, K=V=128"
    draw(recorded, arguments.out + ".png", title)
    print(f"wrote {arguments.out}.png and {arguments.out}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
