"""Measures the host time of a call from Python with other sources and with these, in turns on one machine.

    git archive -o before.tgz 32fa03c allscan shmem_kernels bindings
    python -m bench.against before.tgz --kda           # 1 GPU; --kda needs fla, whose kernels are compiled ahead

Each of RUNS runs has two processes of one rank, one per source, on the same cores and without a caller's CUDA graphs.
They take turns, one sample each, so that both see the same clock and the same load: a sample is the mean of CALLS
consecutive calls after WARM others. Prints CSV, in microseconds per call: median, minimum and maximum of the runs'
medians; "change" is the median of the samples' ratios within a run, with minimum and maximum over the runs. Without a
GPU every method is called, and nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time

RUNS, SAMPLES, WARM, CALLS = 5, 60, 5, 10
CORES = 4  # cores shared by the two processes of a run
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
START = "import runpy, sys; sys.path.insert(0, ''); runpy.run_path(sys.argv.pop(1), run_name='__main__')"


def methods(kda: bool) -> dict:
    """Return {name: call}, for methods that both sources have."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    import allscan

    cuda = torch.cuda.is_available()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    comm = allscan.Communicator()
    comm.step()  # all calls are one iteration
    T, H, D, dtype = (2048, 16, 128, torch.bfloat16) if cuda else (64, 2, 16, torch.float32)
    generator = torch.Generator(comm.device).manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=comm.device)

    state, decay, tokens = normal(H, D, D), normal(H, D).sigmoid(), normal(1, 64, H * D)
    leaf, do = state.clone().requires_grad_(), normal(1, T, H, D).to(dtype)
    q, k, v = (normal(1, T, H, D).to(dtype) for _ in "qkv")
    g, beta = F.logsigmoid(normal(1, T, H, D)) / 16, normal(1, T, H).sigmoid()
    leaves = [x.requires_grad_() for x in (q, F.normalize(k.float(), dim=-1).to(dtype), v, g)]

    def gla(*given):
        return allscan.zeco_gla(*given, comm=comm)[0]

    def delta(*given):
        return allscan.zeco_kda(*given, beta, comm=comm)[0]

    def forward(call):
        def run():
            with torch.no_grad():
                return call(*leaves)

        return run

    found = {
        "allscan": lambda: allscan.allscan(state, decay, comm=comm),
        "allscan, forward+backward": lambda: torch.autograd.grad(allscan.allscan(leaf, decay, comm=comm), leaf, state),
        "halo": lambda: allscan.halo(tokens, 3, comm=comm),
    }
    for name, call in {"zeco_gla": gla, **({"zeco_kda": delta} if kda else {})}.items():
        found[name] = forward(call)
        found[f"{name}, forward+backward"] = lambda call=call: torch.autograd.grad(call(*leaves), leaves, do)
    return found


def serve(kda: bool) -> None:
    """Write the methods' names; then read names and write the microseconds of a call of each."""
    import torch

    cuda, calls = torch.cuda.is_available(), methods(kda)
    for name, call in calls.items():
        for _ in range((16 if "kda" in name else 4) if cuda else 1):  # fla's functions become plans after some calls
            call()
            if cuda:
                torch.cuda.synchronize()
    print(json.dumps([*calls]), flush=True)
    for line in sys.stdin:
        call, spent = calls[line.strip()], 0.0
        if cuda:
            for _ in range(WARM):
                call()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            spent = 1e6 * (time.perf_counter() - begin) / CALLS
            torch.cuda.synchronize()
        print(spent, flush=True)


def start(tree: str, kda: bool) -> subprocess.Popen:
    """Start a process that serves with the sources of ``tree``."""
    import torch

    paths = [tree, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "FLA_CACHE_RESULTS": "1"}
    environment |= {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", START, os.path.abspath(__file__), "--serve", *(["--kda"] if kda else [])]
    return subprocess.Popen(
        command, cwd=tree, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def one_run(trees: dict[str, str], kda: bool) -> dict[str, dict[str, list[float]]]:
    """Return {label: {method: samples}}."""
    processes = {label: start(tree, kda) for label, tree in trees.items()}

    def answer(label: str) -> str:
        process = processes[label]
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process with the sources in {trees[label]} has ended: {process.wait()}")
        return line

    try:
        names = {label: json.loads(answer(label).splitlines()[-1]) for label in processes}["now"]
        found: dict[str, dict[str, list[float]]] = {label: {name: [] for name in names} for label in trees}
        for turn in range(SAMPLES):
            for name in names:
                for label in (*trees,) if turn % 2 else (*reversed(trees),):
                    process = processes[label]
                    assert process.stdin is not None
                    process.stdin.write(name + "\n")
                    process.stdin.flush()
                    found[label][name].append(float(answer(label)))
        return found
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("archive", nargs="?", help="archive of the other sources; default: these sources")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--kda", action="store_true", help="also time zeco_kda; needs fla")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.runs < 1:
        parser.error("--runs must be at least 1")
    if arguments.serve:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
        serve(arguments.kda)
        return 0
    if arguments.kda:
        from bench.tuning import Job, compile_ahead

        compile_ahead([Job("kda", 16)])
    with tempfile.TemporaryDirectory() as folder:
        trees = {"before": ROOT, "now": ROOT}
        if arguments.archive:
            with tarfile.open(arguments.archive) as archive:
                archive.extractall(folder, filter="data")
            trees["before"] = folder
        runs = [one_run(trees, arguments.kda) for _ in range(arguments.runs)]
    print("method,before_us,before_least,before_most,now_us,now_least,now_most,change,change_least,change_most")
    for name in runs[0]["now"]:
        values = []
        for label in trees:
            of = [statistics.median(run[label][name]) for run in runs]
            values += [f"{x:.1f}" for x in (statistics.median(of), min(of), max(of))]
        if runs[0]["now"][name][0]:
            pairs = [zip(run["now"][name], run["before"][name], strict=True) for run in runs]
            changes = [statistics.median(100 * (a / b - 1) for a, b in of) for of in pairs]
            values += [f"{x:+.1f} %" for x in (statistics.median(changes), min(changes), max(changes))]
        else:
            values += [""] * 3
        print(f'"{name}"', *values, sep=",", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
