"""Measures the first step of a process, with nothing compiled, and again in the next process.

    python -m bench.cold                           # up to 2 GPUs; writes bench/results/cold.csv
    python -m bench.cold --sources DIRECTORY       # another checkout, for comparison; writes no file

Each rank is a new process. Triton's cache is an empty directory in the first run, and the same directory in the second.
Seconds of the slowest rank, in sequence: ``import_s``, torch and allscan; ``start_s``, NCCL's process group, the first
CUDA call and a Communicator; ``first_s``, the operator's first forward and backward pass, to their end on the GPU;
``second_s``, another one. Without GPUs one rank runs in the interpreter, and nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time

T, H, D = 2048, 16, 128
OPERATORS = "zeco_gla", "zeco_kda", "zeco_gated_delta_rule"
PARTS = "import_s", "start_s", "first_s", "second_s"


def rank_main(operator: str, tokens: int, heads: int, width: int) -> None:
    """Run one rank in this process; print the time of each part."""
    at = [time.perf_counter()]
    import torch
    import torch.distributed as dist

    import allscan

    at.append(time.perf_counter())
    cuda = torch.cuda.is_available()
    if int(os.environ["WORLD_SIZE"]) > 1:
        torch.cuda.set_device(int(os.environ["RANK"]))
        dist.init_process_group("nccl")
    comm = allscan.Communicator()
    at.append(time.perf_counter())

    def synchronize():
        if cuda:
            torch.cuda.synchronize()

    dtype = torch.bfloat16 if cuda else torch.float32
    leaves = [torch.randn(1, tokens, heads, width, device=comm.device, dtype=dtype).requires_grad_() for _ in "qkv"]
    of_gates = (1, tokens, heads) if operator == "zeco_gated_delta_rule" else (1, tokens, heads, width)
    leaves.append(torch.full(of_gates, -0.01, device=comm.device).requires_grad_())
    if operator != "zeco_gla":
        leaves.append(torch.full((1, tokens, heads), 0.5, device=comm.device).requires_grad_())
    for _ in range(2):
        comm.step()
        synchronize()
        begin = time.perf_counter()
        o, _ = getattr(allscan, operator)(*leaves, comm=comm)
        torch.autograd.grad(o, leaves, o.detach())
        synchronize()
        at.append(time.perf_counter() - begin)
    comm.close()
    print(json.dumps([at[1] - at[0], at[2] - at[1], at[3], at[4]]), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def start(ranks: int, sources: str, cache: str, operator: str, *sizes: int) -> dict[str, float]:
    """Run a job of ``ranks`` processes with Triton's cache in ``cache``; return each part's seconds, of the slowest
    rank. ranks=0: one rank in the interpreter."""
    count = max(1, ranks)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = os.environ | dict(
        PYTHONPATH=os.pathsep.join(filter(None, (sources, os.environ.get("PYTHONPATH")))),
        TRITON_CACHE_DIR=cache,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        WORLD_SIZE=str(count),
        TRITON_INTERPRET="0" if ranks else "1",
    )
    # running it by path would put bench/ on sys.path, and bench/operator.py would hide Python's operator
    program = f"import runpy, sys; runpy.run_path({os.path.abspath(__file__)!r}, run_name='__main__')"
    command = [sys.executable, "-c", program, "--rank", operator, *map(str, sizes)]
    jobs = [
        subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True, cwd=cache)
        for rank in range(count)
    ]
    deadline = time.monotonic() + 300
    try:
        while any(job.poll() is None for job in jobs) and not any(job.poll() for job in jobs):
            if time.monotonic() > deadline:
                raise TimeoutError("the ranks have not ended after 300 s")
            time.sleep(0.1)
        if any(job.poll() for job in jobs):
            raise RuntimeError(f"a rank has failed: exit codes {[job.poll() for job in jobs]}")
        answers = [job.stdout.read() for job in jobs if job.stdout is not None]
    finally:
        for job in jobs:
            job.kill()
    times = [json.loads(answer.strip().splitlines()[-1]) for answer in answers]
    return {part: max(of_a_rank[i] for of_a_rank in times) for i, part in enumerate(PARTS)}


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2], *map(int, sys.argv[3:]))
        return 0
    import torch

    from bench.harness import ROOT, Table, results

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sources", help="directory of another checkout of allscan to measure")
    parser.add_argument("--operators", nargs="+", choices=OPERATORS, default=OPERATORS[:2])
    parser.add_argument("--repeats", type=int, default=1, help="number of runs, each with an empty cache")
    parser.add_argument("--csv", default=results("cold.csv"))
    arguments = parser.parse_args()
    ranks = min(2, torch.cuda.device_count())
    if not ranks:
        for operator in arguments.operators:
            with tempfile.TemporaryDirectory() as cache:
                start(0, ROOT, cache, operator, 70, 2, 16)
        print("No GPU here: the first step ran in the interpreter.")
        return 0
    columns = "operator", "kept", "ranks", "T", "H", "D", *PARTS, "gpu", "torch", "triton", "sources"
    sources = os.path.abspath(arguments.sources or ROOT)
    with Table(os.devnull if arguments.sources else arguments.csv, columns) as table:
        for operator in [*arguments.operators] * arguments.repeats:
            with tempfile.TemporaryDirectory() as cache:
                for kept in ("nothing", "compiled kernels"):
                    row = start(ranks, sources, cache, operator, T, H, D)
                    table.write(dict(operator=operator, kept=kept, ranks=ranks, T=T, H=H, D=D) | row)
                    times = ", ".join(f"{part} {seconds:.2f}" for part, seconds in row.items())
                    print(f"{operator}, {kept} kept, {ranks} rank(s): {times}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
