"""Measures zeco_ssd on one GPU, beside mamba_ssm's mamba_chunk_scan_combined if it is installed.

    python -m bench.ssd                              # errors, times, times by kernel; about 2 minutes
    python -m bench.ssd --shapes 16384x128x64x8x128  # T x heads x P x groups x N
    python -m bench.ssd --mamba none | both --configs 6   # mamba_ssm: with so many configurations of each kernel
    python -m bench.ssd --tune                       # other warps, stages and blocks of each kernel, of the first shape

Errors are relative differences of norms to the recurrence in float64, on 512 tokens, with D = 0. Times are of CUDA
graphs of one call: medians over samples of 5 replays. x, B and C are columns of one tensor.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import time
import traceback
import types

import torch

import allscan
from allscan.ops.ssd import ssd_plans
from allscan.reference import ssd_reference

SHAPES = "16384x128x64x8x128", "16384x80x64x1x128", "16384x64x128x64x128"
NAMES = "x", "dt", "A", "B", "C", "D", "dt_bias"
BYTES_PER_US = 4.3e6


def drawn(T, H, P, G, N, dtype=torch.bfloat16, device="cuda", seed=0, strong=False):
    """Return ({name: tensor}, dy)."""
    make = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=make)

    width = H * P + 2 * G * N
    mixed = torch.cat([normal(1, T, H * P), normal(1, T, 2 * G * N) / N**0.5], 2).to(device, dtype)
    x, B, C = mixed.split([H * P, G * N, G * N], 2)
    assert mixed.shape[2] == width
    steps = torch.exp(torch.rand(H, generator=make) * 4.6 - 6.9)  # Mamba2's: 0.001 to 0.1
    A = -torch.arange(1.0, H + 1) if strong else -(1 + 15 * torch.rand(H, generator=make))
    given = dict(
        x=x.unflatten(2, (H, P)),
        dt=(normal(1, T, H) * 0.5).to(device, dtype),
        A=A.to(device),
        B=B.unflatten(2, (G, N)),
        C=C.unflatten(2, (G, N)),
        D=normal(H).to(device),
        dt_bias=(steps + torch.log(-torch.expm1(-steps))).to(device),
    )
    leaves = {name: t.detach().requires_grad_() for name, t in given.items()}
    return leaves, normal(1, T, H, P).to(device, dtype)


def ours(comm):
    def call(x, dt, A, B, C, D, dt_bias):
        return allscan.zeco_ssd(x, dt, A, B, C, 256, D=D, dt_bias=dt_bias, dt_softplus=True, comm=comm)

    return call


def theirs(function):
    def call(x, dt, A, B, C, D, dt_bias):
        return function(x, dt, A, B, C, 256, D=D, dt_bias=dt_bias, dt_softplus=True)

    return call


def both(call, leaves, dy):
    y = call(**leaves)
    return (y.detach(), *torch.autograd.grad(y, [*leaves.values()], dy))


def forward(call, leaves):
    with torch.no_grad():
        return call(**leaves)


def errors(call, shape, **options):
    """Return {name: relative error} of y and the gradients."""
    _, H, P, G, N = shape
    leaves, dy = drawn(512, H, P, G, N, **options)
    with torch.no_grad():
        leaves["D"].zero_()
    exact = {name: t.detach().double().requires_grad_() for name, t in leaves.items()}
    expected = both(lambda **x: ssd_reference(**x, dt_softplus=True)[0], exact, dy.double())
    found = both(call, leaves, dy)
    return {
        name: ((a.double() - b).norm() / b.norm()).item()
        for name, a, b in zip(("y", *NAMES), found, expected, strict=True)
    }


def graph_us(call, samples=15):
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    replay = graph.replay
    try:
        with torch.cuda.graph(graph):
            call()
    except Exception as error:
        print("  not captured, timed without a graph:", str(error)[:200], flush=True)
        torch.cuda.synchronize()
        replay = call
    times = []
    for _ in range(samples):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in "fl")
        first.record()
        for _ in range(5):
            replay()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) / 5 * 1e3)
    return sorted(times)[len(times) // 2]


def peak_mib(call):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


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
    scores = T * G * 256
    found = dict(
        ssd_steps_kernel=2 * factors,
        ssd_scores_kernel=4 * b + 2 * scores,
        ssd_state_kernel=3 * (x + b + factors) + states,
        ssd_output_kernel=2 * x + 2 * b + scores + factors,
        ssd_adjoint_kernel=2 * x + 2 * b + scores + factors + states,
        ssd_gradients_kernel=2 * x + 4 * b + scores + factors + 2 * states,
    )
    return {name: nbytes / BYTES_PER_US for name, nbytes in found.items()}


def mamba(most):
    """Return mamba_chunk_scan_combined, its kernels with at most ``most`` configurations; or None."""
    if importlib.util.find_spec("mamba_ssm") is None:
        return None
    import triton

    original = triton.autotune
    triton.autotune = lambda configs, *args, **options: original(configs[:most], *args, **options)
    spec = importlib.util.find_spec("mamba_ssm")
    package = types.ModuleType("mamba_ssm")  # its __init__ imports CUDA extensions
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["mamba_ssm"] = package
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    finally:
        triton.autotune = original
    return mamba_chunk_scan_combined


@contextlib.contextmanager
def told(what):
    """Print an error and go on."""
    try:
        yield
    except Exception:
        print(f"FAILED: {what}\n{traceback.format_exc(limit=-6)[-3000:]}", flush=True)


def measure(name, call, shape, kernels=True):
    text = "x".join(map(str, shape))
    with told(f"{name} {text}: errors"):
        found = errors(call, shape)
        print(f"{text} {name}: errors", *(f"{k} {v:.1e}" for k, v in found.items()), flush=True)
        found = errors(call, shape, strong=True)
        print(f"{text} {name}: errors, A = 1 .. H", *(f"{k} {v:.1e}" for k, v in found.items()), flush=True)
    leaves, dy = drawn(*shape)
    with told(f"{name} {text}: forward"):
        print(f"{text} {name}: forward {graph_us(lambda: forward(call, leaves)):.0f} us", flush=True)
    with told(f"{name} {text}: both passes"):
        us = graph_us(lambda: both(call, leaves, dy))
        print(f"{text} {name}: both passes {us:.0f} us", flush=True)
        print(f"{text} {name}: peak {peak_mib(lambda: both(call, leaves, dy)):.0f} MiB", flush=True)
    if kernels:
        with told(f"{name} {text}: by kernel"):
            least = floors(*shape)
            for kernel, count, us in by_kernel(lambda: both(call, leaves, dy)):
                floor = f"   bytes {least[kernel]:.0f} us" if kernel in least else ""
                print(f"    {kernel[:50]:50} x{count:g} {us:8.1f} us{floor}", flush=True)


def tune(shape):
    """Print the times of each kernel with other warps and stages."""
    variants: list = [("as chosen", {}, {})]
    for heads in (set(), {"output", "adjoint", "state"}):
        for warps, stages in ((4, 1), (4, 2), (4, 3)) if not heads else ((8, 1), (8, 2), (8, 3)):
            kernels = dict.fromkeys(("output", "adjoint", "state"), (warps, stages))
            text = f"{2 if heads else 1} heads, {warps} warps, {stages} stages"
            variants.append((text, dict(TWO_HEADS=heads), kernels))
    for rows in (64, 128):
        for warps, stages in ((8, 1), (8, 2), (8, 3), (4, 2)):
            text = f"{rows} rows, {warps} warps, {stages} stages"
            variants.append((text, dict(GRADIENT_ROWS=rows), dict(gradients=(warps, stages))))
    usual = {name: getattr(ssd_plans, name) for name in ("TWO_HEADS", "GRADIENT_ROWS", "LONGEST", "SHORTEST")}
    warps = dict(ssd_plans.TUNED)
    leaves, dy = drawn(*shape)
    for text, options, of_kernels in variants:
        with told(text):
            for name, value in (usual | options).items():
                setattr(ssd_plans, name, value)
            ssd_plans.TUNED.update(warps | of_kernels)
            ssd_plans.shape_of.cache_clear()
            start = time.time()
            with allscan.Communicator() as comm:
                call = ours(comm)
                found = by_kernel(lambda call=call: both(call, leaves, dy), 3)
            print(
                f"{text} ({time.time() - start:.0f} s):",
                *(f"{kernel.removesuffix('_kernel')} {us:.0f}" for kernel, _, us in found if us > 20),
                flush=True,
            )


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="TxHxPxGxN")
    parser.add_argument("--mamba", choices=["none", "forward", "both"], default="both")
    parser.add_argument("--configs", type=int, default=3)
    parser.add_argument("--tune", action="store_true")
    options = parser.parse_args(arguments)
    shapes = [tuple(map(int, s.split("x"))) for s in options.shapes]
    if not torch.cuda.is_available():
        print("No GPU here. Minimal bytes of each kernel over an H200's bandwidth:")
        for shape in shapes:
            print("x".join(map(str, shape)), {name: round(us) for name, us in floors(*shape).items()})
        return 0
    start = time.time()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    if options.tune:
        tune(shapes[0])
        return 0
    with allscan.Communicator() as comm:
        for shape in shapes:
            measure("zeco_ssd", ours(comm), shape)
            print(f"after {time.time() - start:.0f} s", flush=True)
    if options.mamba != "none":
        with told("mamba_ssm"):
            function = mamba(options.configs)
            if function is None:
                print("mamba_ssm is not installed")
            else:
                measure("mamba_ssm", theirs(function), shapes[0])
                print(f"after {time.time() - start:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
