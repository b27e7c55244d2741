"""Measures allscan's kernels on one GPU, to compare versions of Triton: one process per version.

    python -m bench.versions --json 3.6.json                                # the Triton of this environment
    PYTHONPATH=/other/triton:. python -m bench.versions --json 3.9.json     # another one in front
    python -m bench.versions --compare 3.6.json 3.9.json                    # a table

Scans of 2 MiB and with transitions run on three virtual ranks of this GPU: the second one waits, computes and sends.
zeco_gla and zeco_kda run on one rank. All are checked against float64 first, zeco_kda with fla's chunk kernels against
fla. A time is the median over samples of replays of a CUDA graph, in microseconds per call; also the time of each
kernel, from torch's profiler. flash-linear-attention's autotuner may choose other kernels with another Triton;
``--no-fla`` omits them, and saves some minutes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from functools import partial

import torch

import allscan
from allscan.base.tiling import scan_num_warps, transition_blocks, transition_tile
from allscan.bindings.triton_compat import OPTIONS
from allscan.launch.compiled_kernel import Launch
from allscan.reference import allscan_reference, delta_reference
from allscan.shmem_kernels.scan import scan_kernel, transition_kernel
from allscan.tools.ranks import Ranks
from bench import local, tuning
from bench.harness import capture, checked, inputs, machine, quantiles, sample, step
from support.virtual import VirtualRanks

RANKS, ROUNDS = 3, 10  # virtual ranks, and scans in a graph
PROGRAMS = 40  # per virtual rank: with transitions each needs a multiprocessor, and all must run at once
SAMPLES = 25
T, H = 16384, 32
CASES = {
    "scan 2 MiB": ("scan", (32, 128, 128)),
    "transitions K=128": ("transitions", (32, 128, 128)),
    "transitions K=256": ("transitions", (6, 256, 512)),
    "transitions K=512": ("transitions", (4, 512, 128)),
    **{
        f"zeco_gla K=V={K}, {name}": ("gla", (K, backward))
        for K in (128, 256)
        for name, backward in (("forward", False), ("both", True))
    },
    "zeco_kda, both": ("kda", "fla"),
    "zeco_kda by our chunk kernels, both": ("kda", "allscan"),
}


class Chain:
    """Scans of RANKS virtual ranks, each on its own stream."""

    def __init__(self, kind: str, shape: tuple[int, ...]) -> None:
        heads, K, V = shape
        dense = kind == "transitions"
        tile = transition_tile(K) if dense else None
        self.ranks = VirtualRanks(RANKS, shape, tile=tile, programs=PROGRAMS if dense else 64)
        device, generator = self.ranks.device, torch.Generator().manual_seed(K)
        factor = (K, K) if dense else (K,)
        self.states, self.factors = (
            torch.randn(RANKS, heads, *x, generator=generator, device="cpu") for x in ((K, V), factor)
        )
        self.factors = self.factors / (2 * K**0.5) if dense else self.factors.sigmoid()
        initial = torch.randn(heads, K, V, generator=generator)
        named = dict(transitions=[*self.factors]) if dense else dict(decays=[*self.factors])
        self.expected = allscan_reference([*self.states], initial_state=initial, **named)
        self.states, self.factors, initial = (x.to(device) for x in (self.states, self.factors, initial))
        self.outs = torch.full_like(self.states, float("nan"))
        self.launches = []
        for rank in range(RANKS):
            fixed = dict(K=K, V=V, HAS_INITIAL=rank == 0)
            if dense:
                fixed |= dict(p_passes=None, stride_i=K, stride_j=1, **transition_blocks(self.ranks.spec.tile[0]))
            else:
                fixed |= dict(stride_g=K, stride_k=1, HAS_DECAY=True, NEIGHBOUR_SHIFT=False)
                fixed |= dict(num_warps=scan_num_warps(self.ranks.spec.tile))
            launch = Launch(transition_kernel if dense else scan_kernel, (self.ranks.programs,), **fixed)
            given = self.states[rank], self.factors[rank], initial if rank == 0 else self.states[rank], self.outs[rank]
            self.launches.append(partial(launch, *given, self.ranks.channels[rank][0]))

    def __call__(self) -> None:
        for rank, launch in zip(self.ranks.ranks, self.launches, strict=True):
            if rank.stream is not None:
                rank.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(rank.stream):  # None keeps the current stream
                launch()
        self.ranks.join()

    def check(self) -> float:
        for _ in range(2):
            self()
        return checked("a scan", self.outs[1:].cpu(), self.expected[1:], 1e-5)

    def graph(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(ROUNDS):
                self()
        return graph


def gla(comm, K: int, backward: bool):
    """Return (error, graph) of zeco_gla."""
    error = local.check("zeco_gla", comm, (1, T, H, K, K), False)
    leaves, do = inputs(T, H, K, "cuda")
    return error, capture(leaves, do, local.METHODS["zeco_gla"](comm, None), backward)[0]


def kda(comm, chunk: str):
    """Return (error, graph) of both passes of zeco_kda; chunk: whose kernels are used inside chunks."""

    def run(call, tokens):
        return partial(tuning.step, call, *tuning.inputs("kda", tokens, H, 1 / 16, "cuda", 1), True)

    def ours(*x):
        return allscan.zeco_kda(*x[:5], comm=comm, chunk=chunk)

    if chunk == "fla":
        expected = run(lambda *x: tuning.fla_operator("kda")(*x[:5]), 2048)()
        error = checked("zeco_kda", run(ours, 2048)(), expected, 1e-2)
    else:
        expected = run(lambda *x: (delta_reference(*(leaf.double() for leaf in x[:5]))[0], None), 256)()
        error = checked("zeco_kda", run(ours, 256)(), expected, 1e-2)
    call = run(ours, T)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(8):  # until plans of fla's functions exist
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return error, graph


def prepared(comm, name: str):
    """Return (error, graph, calls in it) of a case."""
    kind, what = CASES[name]
    if kind == "gla":
        return *gla(comm, *what), 1
    if kind == "kda":
        return *kda(comm, what), 1
    chain = Chain(kind, what)
    return chain.check(), chain.graph(), ROUNDS


def kernels(graph, calls: int) -> dict[str, float]:
    """Return the microseconds of each kernel in a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
    found = {event.key: event.self_device_time_total / 5 / calls for event in profile.key_averages()}
    return {name: round(us, 2) for name, us in sorted(found.items(), key=lambda x: -x[1]) if us > 0.5}


def by_fla(name: str) -> bool:
    return CASES[name] == ("kda", "fla")


def compile_kernels(name: str) -> None:
    """Compile a case's kernels into Triton's cache; runs in a separate process."""
    kind, what = CASES[name]
    if kind in ("scan", "transitions"):
        Chain(kind, what).check()
        return
    with allscan.Communicator() as comm:
        if kind == "kda":
            kda(comm, what)
            return
        leaves, do = inputs(T, H, what[0], "cuda")
        step(leaves, do, local.METHODS["zeco_gla"](comm, None), True)
        torch.cuda.synchronize()
        local.check("zeco_gla", comm, (1, T, H, what[0], what[0]), False)


def compile_ahead(names: list[str]) -> None:
    """Compile the kernels of the cases, with a process for each."""
    ours = [name for name in names if not (by_fla(name) or name.endswith("forward"))]  # both passes include forward
    with multiprocessing.get_context("spawn").Pool(len(ours) or 1) as pool:
        compiling = pool.map_async(compile_kernels, ours, chunksize=1)
        if any(map(by_fla, names)):
            tuning.compile_ahead([tuning.Job("kda", H)], compiling.wait)
        compiling.get()


def measure(names: list[str], path: str) -> None:
    with allscan.Communicator() as comm:
        found = dict(machine(), ptxas_options=os.environ.get("PTXAS_OPTIONS", ""), options=OPTIONS, cases={})
        for name in names:
            error, graph, calls = prepared(comm, name)
            for _ in range(3):
                graph.replay()
            times = torch.tensor([sample(graph.replay) / calls for _ in range(SAMPLES)])
            case = dict(max_error=error, **{n: round(us, 2) for n, us in quantiles(times).items()})
            found["cases"][name] = case | dict(kernels=kernels(graph, calls))
            print(f"{name:28} {case['p50_us']:10.1f} us   error {error:.1e}", flush=True)
            del graph
            torch.cuda.empty_cache()
            with open(path, "w") as file:
                json.dump(found, file, indent=1)


def compare(paths: list[str]) -> None:
    runs = [json.load(open(path)) for path in paths]
    titles = [f"{run['triton']} {run['ptxas_options']}".strip() for run in runs]
    print(" | ".join(["", *titles, "of the first"]))
    for name, first in runs[0]["cases"].items():
        cases = [run["cases"].get(name) for run in runs]
        rows = [(name, [case and case["p50_us"] for case in cases])]
        for kernel, us in first["kernels"].items():
            if us > 0.02 * first["p50_us"]:
                rows.append((f"  {kernel[:40]}", [case and case["kernels"].get(kernel) for case in cases]))
        for title, times in rows:
            ratios = [f"{x / times[0]:.3f}" if x else "-" for x in times[1:]]
            print(" | ".join([f"{title:44}", *(f"{x:9.1f}" if x else "-" for x in times), *ratios]))


def check(kind: str, shape: tuple[int, ...]) -> float:
    """The largest error of a chain."""
    return Chain(kind, shape).check()


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", default="versions.json")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--no-fla", action="store_true")
    parser.add_argument("--compile", action="store_true", help="only compile, into Triton's cache")
    parser.add_argument("--compare", nargs="+", help="JSON files of earlier runs")
    options = parser.parse_args(arguments)
    if options.compare:
        compare(options.compare)
        return 0
    if not torch.cuda.is_available():
        print("No GPU here: the scans are checked, with smaller states.")
        with Ranks(1, "cpu") as ranks:  # a process with Triton's interpreter
            for kind, shape in (("scan", (2, 8, 16)), ("transitions", (1, 16, 32)), ("transitions", (1, 256, 16))):
                print(f"{kind:12} max error {ranks.run(check, kind, shape)[0]:.1e}")
        return 0
    names = [name for name in options.cases if not (options.no_fla and by_fla(name))]
    compile_ahead(names)
    if not options.compile:
        measure(names, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
