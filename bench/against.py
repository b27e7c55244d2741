"""What a call from Python costs the host, with other sources and with these, in turns on one machine.

    git archive -o before.tgz 32fa03c allscan shmem_kernels bindings
    python -m bench.against before.tgz --kda           # 1 GPU; --kda needs fla, whose kernels are compiled ahead

Each run is a process of its own, of one rank, with no CUDA graphs of the caller's: medians over SAMPLES of CALLS calls
in a row, behind WARM others, in microseconds of a call. Of RUNS runs each the median, the least and the most are
printed, in CSV. Without a GPU every method is called, and nothing is timed.
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
LIMIT_S = 120.0  # of a process; the first one compiles
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
START = "import runpy, sys; sys.path.insert(0, ''); runpy.run_path(sys.argv.pop(1), run_name='__main__')"


def methods(kda: bool) -> dict:
    """{name: call}; nothing but what both sources have."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    import allscan

    cuda = torch.cuda.is_available()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    comm = allscan.Communicator()
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


def one_run(kda: bool) -> dict[str, float]:
    """{method: microseconds of a call} in this process."""
    import torch

    cuda, calls = torch.cuda.is_available(), methods(kda)
    for name, call in calls.items():
        for _ in range((16 if "kda" in name else 4) if cuda else 1):  # fla's functions become plans after some calls
            call()
            if cuda:
                torch.cuda.synchronize()
    if not cuda:
        return dict.fromkeys(calls, 0.0)
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(SAMPLES):
        for name, call in calls.items():
            for _ in range(WARM):
                call()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            found[name].append(1e6 * (time.perf_counter() - begin) / CALLS)
            torch.cuda.synchronize()
    return {name: statistics.median(samples) for name, samples in found.items()}


def run(tree: str, kda: bool) -> dict[str, float]:
    """``one_run`` in a process with the sources of ``tree``."""
    import torch

    paths = [tree, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "FLA_CACHE_RESULTS": "1"}
    environment |= {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", START, os.path.abspath(__file__), "--one", *(["--kda"] if kda else [])]
    options = dict(cwd=tree, env=environment, timeout=LIMIT_S, text=True)
    done = subprocess.run(command, check=False, capture_output=True, **options)
    if done.returncode:
        raise RuntimeError(f"a run with the sources in {tree} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("archive", nargs="?", help="of other sources; default: these")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--kda", action="store_true", help="zeco_kda too, which needs fla")
    parser.add_argument("--one", action="store_true", help="one run of the sources that are imported")
    arguments = parser.parse_args(given)
    if arguments.one:
        print(json.dumps(one_run(arguments.kda)))
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
        found: dict[str, list[dict[str, float]]] = {label: [] for label in trees}
        for _ in range(arguments.runs):
            for label, tree in trees.items():
                found[label].append(run(tree, arguments.kda))
    print("method,before_us,before_least,before_most,now_us,now_least,now_most,change")
    for name in found["now"][0]:
        of = {label: [row[name] for row in rows] for label, rows in found.items()}
        before, now = (statistics.median(of[label]) for label in trees)
        values = [f"{x:.1f}" for rows in of.values() for x in (statistics.median(rows), min(rows), max(rows))]
        print(
            f'"{name}"', *values, f"{100 * (now / before - 1):+.1f} %" if before else "not timed", sep=",", flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
