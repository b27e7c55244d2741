"""Measures the host time of a call from Python, against NCCL's all-gather and fla in the same process.

    python -m bench.host                 # 2 GPUs; writes bench/results/host.csv; fla's rows need fla

There are no caller's CUDA graphs, except in one row that says so; backward passes run in torch's backward thread,
except in rows with "one thread". Other rows: torch's own time for an autograd.Function that launches nothing.
``host_us``: host time per call of CALLS consecutive calls on an idle GPU; few enough to fit in the GPU's queue. WARM
calls run before: a processor that has waited for the other rank is slow at first, more so for NCCL's call. Torch's
backward thread is woken, and waited for, once in a call of "forward+backward". In rows with "a layer" this happens once
for LAYERS calls, each with the output of the one before as its v, as in a model of many layers. ``total_us``: to the
end on the GPU. Medians over SAMPLES, of the slowest rank, methods in turns in a new random order each time.
``over_nccl``: host_us over that of ``all_gather_into_tensor`` of the same state, since hosts differ, and one host
varies within minutes: NCCL's call takes turns with the methods of each T. Without two GPUs every method is called once
on 2 CPU ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import random
import sys
import time

import torch
import torch.distributed as dist

import allscan
from allscan.tools.ranks import Ranks
from bench.harness import Table, group_of, inputs, results
from bench.tuning import Job, compile_ahead

TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
H, D = 16, 128
SAMPLES, WARM, CALLS, LAYERS = 30, 5, 10, 8
NCCL = "NCCL all_gather_into_tensor"
A_LAYER = f"a layer of {LAYERS}"
NOTHING = "autograd.Function of nothing, forward+backward"
COLUMNS = ("method", "T", "H", "D", "ranks", "host_us", "total_us", "over_nccl", "gpu", "torch", "triton", "sources")


def collectives(comm, heads, width, held: list) -> dict:
    """Return {method: call} for a state [heads, width, width]. Calls put tensors for a backward pass into ``held``."""
    state, decay = (torch.rand(heads, width, *w, device=comm.device) for w in ((width,), ()))
    leaf, out = state.clone().requires_grad_(), torch.empty_like(state)
    scan, tokens = allscan.AllScan(comm, state.shape), torch.zeros(1, 64, heads * width, device=comm.device)

    def with_gradients():
        held.append(allscan.allscan(leaf, decay, comm=comm))

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *given):
            ctx.save_for_backward(*given)
            return given[0].view_as(given[0])

        @staticmethod
        def backward(ctx, dout):
            return dout, None

    def asynchronous():
        return allscan.allscan(state, decay, comm=comm, async_op=True).wait()

    return {
        "AllScan.scan(out=)": lambda: scan.scan(state, decay, out=out),
        "allscan, no gradients": lambda: allscan.allscan(state, decay, comm=comm),
        "allscan, async_op": asynchronous,
        "allscan, forward with gradients": with_gradients,
        NOTHING: lambda: torch.autograd.grad(Nothing.apply(leaf, decay), leaf, state),
        "halo": lambda: allscan.halo(tokens, 3, comm=comm),
    }


def all_gather(comm, heads, width):
    """Return NCCL's call for that state."""
    state = torch.rand(heads, width, width, device=comm.device)
    gathered = state.new_empty(comm.size * heads, width, width)
    return lambda: dist.all_gather_into_tensor(gathered, state, group=comm.group)


def operators(comm, T, heads, width) -> dict:
    """Return {method: call} for T tokens a rank."""
    leaves, do = inputs(T, heads, width, comm.device, comm.rank, *_small(comm))
    beta = torch.rand(1, T, heads, device=comm.device)
    calls = {
        "zeco_gla": lambda *x: allscan.zeco_gla(*x, comm=comm)[0],
        "zeco_gla in zigzag": lambda *x: allscan.zeco_gla(*x, comm=comm, layout="zigzag")[0],
        "zeco_kda": lambda *x: allscan.zeco_kda(*x, beta, comm=comm)[0],
        "zeco_kda in zigzag": lambda *x: allscan.zeco_kda(*x, beta, comm=comm, layout="zigzag")[0],
    }
    if comm.device.type == "cuda":
        with contextlib.suppress(ImportError):
            from fla.ops.gla import chunk_gla
            from fla.ops.kda import chunk_kda

            calls["fla chunk_gla"] = lambda *x: chunk_gla(*x)[0]
            calls["fla chunk_kda"] = lambda *x: chunk_kda(*x, beta)[0]

    def forward(call):
        with torch.no_grad():
            return call(*leaves)

    layers = [[x.detach().clone().requires_grad_() for x in leaves] for _ in range(LAYERS)]
    first_v = layers[0][2]

    def in_a_row(call):
        o, wanted = first_v, [first_v]
        for q, k, _, g in layers:
            o, wanted = call(q, k, o, g), [*wanted, q, k, g]
        return torch.autograd.grad(o, wanted, do)

    found = {}
    for name, call in calls.items():
        found[f"{name}, forward"] = lambda call=call: forward(call)
        found[f"{name}, forward+backward"] = lambda call=call: torch.autograd.grad(call(*leaves), leaves, do)
        if "gla" in name:
            found[f"{name}, forward+backward, {A_LAYER}"] = lambda call=call: in_a_row(call)

    def one_thread():
        with torch.autograd.set_multithreading_enabled(False):
            return found["zeco_gla, forward+backward"]()

    return found | {"zeco_gla, forward+backward, one thread": one_thread}


def captured(call):
    """Return a function that replays ``call`` as one CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()
    return lambda: (graph.replay(), kept)


def _small(comm):
    return () if comm.device.type == "cuda" else (torch.float32,)


def timed(call, layers: int = 1) -> tuple[float, float]:
    """Return (host time, time to the end on the GPU) in us of a call, or of one of its ``layers``."""
    warm, calls = (WARM, CALLS) if layers == 1 else (1, 2)
    for _ in range(warm):
        call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    host = time.perf_counter()
    torch.cuda.synchronize()
    end, count = time.perf_counter(), calls * layers
    return (host - begin) / count * 1e6, (end - begin) / count * 1e6


def run_backward(held: list) -> None:
    for prev in reversed(held):
        prev.sum().backward()
    held.clear()


def point(T: int | None, heads: int = H, width: int = D) -> dict:
    """Return {method: (host_us, total_us)} on each of 2 ranks; T None: the collectives. On CPUs nothing is timed."""
    with allscan.Communicator(group_of(2), timeout=300.0) as comm:  # time for fla's autotuning
        comm.step()  # all calls are one iteration
        held: list = []
        calls = {NCCL: all_gather(comm, heads, width)}
        calls |= collectives(comm, heads, width, held) if T is None else operators(comm, T, heads, width)
        for call in [*calls.values()] * (1 if comm.device.type == "cpu" else 5):
            call()
            run_backward(held)
            if comm.device.type == "cuda":
                torch.cuda.synchronize()
        if comm.device.type == "cpu":
            return dict.fromkeys(calls, (0.0, 0.0))
        if T is not None:
            ours = "zeco_gla, forward+backward"
            calls[f"{ours}, CUDA graph"] = captured(calls[ours])
        times: dict = {name: [] for name in calls}
        for turn in range(SAMPLES):
            for name in random.Random(turn).sample(list(calls), len(calls)):
                comm.barrier()
                times[name].append(timed(calls[name], LAYERS if A_LAYER in name else 1))
                run_backward(held)
        comm.barrier()
        return {name: tuple(torch.tensor(samples).median(0).values.tolist()) for name, samples in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="tokens per rank")
    parser.add_argument("--csv", default=results("host.csv"))
    arguments = parser.parse_args()
    if torch.cuda.device_count() < 2:
        print("No two GPUs here: every method is called once on 2 CPU ranks.")
        with Ranks(2, "cpu") as ranks:
            for T in (None, 70):
                print(*ranks.run(point, T, 2, 16)[0], sep="\n")
        return 0
    if importlib.util.find_spec("fla") is not None:
        compile_ahead([Job("kda", H), Job("gla", H)])
    with Table(arguments.csv, COLUMNS) as table, Ranks(2, "cuda") as ranks:
        for T in (None, *arguments.tokens):
            answers = ranks.run(point, T, timeout=570.0)
            nccl = max(answer[NCCL][0] for answer in answers)
            for name in answers[0]:
                host, total = (max(answer[name][i] for answer in answers) for i in range(2))
                row = dict(method=name, T=T or "", H=H, D=D, ranks=2, host_us=host, total_us=total)
                table.write(row | dict(over_nccl=host / nccl))
                print(
                    f"{name:50} T={T or '-':<6} host {host:8.1f} us  total {total:8.1f}  {host / nccl:6.2f} x NCCL",
                    flush=True,
                )
    print(f"wrote {arguments.csv}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
