"""Measures zeco_ssd and zeco_simple_gla on one GPU, beside mamba_ssm's mamba_chunk_scan_combined and fla's
chunk_simple_gla if they are installed.

    python -m bench.ssd                              # writes bench/results/ssd.csv; about 4 minutes
    python -m bench.ssd --shapes 16384x128x64x8x128  # T x heads x P x groups x N; with groups = heads: simple GLA, too
    python -m bench.ssd --alone                      # without mamba_ssm and fla

Errors are relative differences of norms to the recurrence in float64, on 512 tokens, with D = 0: of the output, and the
largest of the gradients'; "strong": with A = 1 .. H, or the gates times 100. Times are of CUDA graphs of one call:
medians over samples of 5 replays. x, B and C are columns of one tensor. The configurations of mamba_ssm's and fla's
kernels are compiled ahead, all of them (bench/tuning.py), and chosen with the shape's length. Column kernels: the
slowest kernels of both passes as the profiler saw them in this process, which shows what has run.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import sys
import traceback

import torch

import allscan
from allscan.reference import gla_reference, ssd_reference
from bench.harness import Table, extra_mib, results, sample
from bench.tuning import Job, compile_ahead, mamba, of_simple_gla, of_ssd, time_quickly

SHAPES = "16384x128x64x8x128", "16384x80x64x1x128", "16384x64x128x64x128"
BYTES_PER_US = 4.3e6
COLUMNS = (
    *("shape", "method", "forward_us", "forward_backward_us", "extra_mib", "error", "grad_error"),
    *("strong_error", "strong_grad_error", "kernels", "gpu", "torch", "triton", "sources"),
)


def simple_gla_reference(q, k, v, g_gamma):
    return gla_reference(q, k, v, g_gamma[:, None].expand_as(k))[0]


def exact_ssd(**leaves):
    return ssd_reference(**leaves, dt_softplus=True)[0]


def methods(shape, comm, alone):
    """Return {method: (call, draw, exact)} for a shape."""

    def ssd(function, **options):
        def call(x, dt, A, B, C, **rest):
            return function(x, dt, A, B, C, 256, **rest, dt_softplus=True, **options)

        return call, of_ssd, exact_ssd

    def simple(function, **options):
        return (lambda **leaves: function(**leaves, **options)[0]), of_simple_gla, simple_gla_reference

    found = {"zeco_ssd": ssd(allscan.zeco_ssd, comm=comm)}
    if not alone and importlib.util.find_spec("mamba_ssm"):
        found["mamba_ssm"] = ssd(mamba())
    if shape[1] == shape[3]:
        found["zeco_simple_gla"] = simple(allscan.zeco_simple_gla, comm=comm)
        if not alone and importlib.util.find_spec("fla"):
            from fla.ops.simple_gla import chunk_simple_gla

            found["fla chunk_simple_gla"] = simple(chunk_simple_gla)
    return found


def both(call, leaves, do):
    o = call(**leaves)
    return [o.detach(), *torch.autograd.grad(o, [x for x in leaves.values() if x.requires_grad], do)]


def forward(call, leaves):
    with torch.no_grad():
        return call(**leaves)


def errors(call, draw, exact, shape, strong) -> tuple[float, float]:
    """Return the relative errors of the output and, the largest, of the gradients on 512 tokens."""
    leaves, do = draw(512, *shape[1:], strong=strong)
    if "D" in leaves:
        leaves["D"].detach().zero_()
    doubles = {name: t.detach().double().requires_grad_(t.requires_grad) for name, t in leaves.items()}
    expected = both(exact, doubles, do.double())
    found = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(both(call, leaves, do), expected, strict=True)]
    print("    errors" + ", A = 1 .. H or strong gates" * strong, *(f"{x:.1e}" for x in found), flush=True)
    return found[0], max(found[1:], key=lambda x: float("inf") if x != x else x)


def graph_us(call, samples=15):
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return sorted(sample(graph.replay, 5) for _ in range(samples))[samples // 2]


def by_kernel(call, runs=5):
    """Return [(kernel, launches, us)], slowest first."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(runs):
            call()
        torch.cuda.synchronize()
    found = [(e.key, e.count / runs, e.self_device_time_total / runs) for e in profile.key_averages()]
    return sorted((x for x in found if x[2] > 1), key=lambda x: -x[2])


def floors(T, H, P, G, N):
    """Return {kernel: us} of each kernel's minimal bytes, bfloat16, both passes."""
    x, b, states, factors = T * H * P * 2, T * G * N * 2, T // 64 * H * N * P * 2, T * H * 12
    pairs = T * G * 256  # of the sums of W, and of the scores
    scores, of_scores = (pairs, 0) if G < H else (0, 2 * b)  # stored and read, or computed from B and C
    found = dict(
        ssd_steps_kernel=2 * factors,
        ssd_scores_kernel=4 * b + 2 * scores,
        ssd_state_kernel=3 * (x + b + factors) + states,
        ssd_output_kernel=2 * x + 2 * b + scores + factors,
        ssd_adjoint_kernel=2 * x + 2 * b + scores + factors + states,
        ssd_pairs_kernel=2 * x + scores + of_scores + pairs + factors,
        ssd_gradients_kernel=2 * x + 4 * b + pairs + factors + 2 * states,
    )
    return {name: nbytes / BYTES_PER_US for name, nbytes in found.items()}


def measure(method, call, draw, exact, shape) -> dict:
    leaves, do = draw(*shape)
    step = functools.partial(both, call, leaves, do)
    step()  # mamba_ssm's kernels choose their configurations at the first call, for all lengths
    error, grad_error = errors(call, draw, exact, shape, False)
    strong_error, strong_grad_error = errors(call, draw, exact, shape, True)
    row = dict(
        shape="x".join(map(str, shape)),
        method=method,
        forward_us=graph_us(lambda: forward(call, leaves)),
        forward_backward_us=graph_us(step),
        extra_mib=extra_mib(step),
        error=error,
        grad_error=grad_error,
        strong_error=strong_error,
        strong_grad_error=strong_grad_error,
    )
    print(row["shape"], method, {k: float(f"{x:.4g}") for k, x in row.items() if isinstance(x, float)}, flush=True)
    least, kernels = floors(*shape), by_kernel(step)
    for kernel, count, us in kernels:
        floor = f"   bytes {least[kernel]:.0f} us" if kernel in least else ""
        print(f"    {kernel[:50]:50} x{count:g} {us:8.1f} us{floor}", flush=True)
    return row | dict(kernels=" ".join(kernel[:40].split("(")[0] for kernel, *_ in kernels[:6]))


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="TxHxPxGxN")
    parser.add_argument("--alone", action="store_true", help="without mamba_ssm and fla")
    parser.add_argument("--csv", default=results("ssd.csv"))
    options = parser.parse_args(arguments)
    shapes = [tuple(map(int, s.split("x"))) for s in options.shapes]
    if not torch.cuda.is_available():
        print("No GPU here. Minimal bytes of each kernel over an H200's bandwidth:")
        for shape in shapes:
            print("x".join(map(str, shape)), {name: round(us) for name, us in floors(*shape).items()})
        return 0
    if not options.alone:
        jobs = [Job("mamba", H, K=N, V=P, G=G) for _, H, P, G, N in shapes if importlib.util.find_spec("mamba_ssm")]
        jobs += [
            Job("simple_gla", H, K=N, V=P) for _, H, P, G, N in shapes if H == G and importlib.util.find_spec("fla")
        ]
        compile_ahead(jobs)
        time_quickly()
    failed = False
    with allscan.Communicator() as comm, Table(options.csv, COLUMNS) as table:
        for shape in shapes:
            for method, (call, draw, exact) in methods(shape, comm, options.alone).items():
                try:
                    table.write(measure(method, call, draw, exact, shape))
                except Exception:  # of another package: go on with the other methods
                    failed = True
                    print(f"FAILED: {method} {shape}\n{traceback.format_exc(limit=-6)[-3000:]}", flush=True)
    print(f"wrote {options.csv}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
