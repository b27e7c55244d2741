"""The local operator on one GPU: zeco_gla beside flash-linear-attention's chunk_gla, and each kernel beside its floors.

    python -m bench.local                       # one GPU; writes bench/results/local.csv
    python -m bench.local --shapes 1x16384x16x128x128 --no-fla

Results are checked first: both against the float64 recurrence on 512 tokens of the same heads and widths. Times are
medians of CUDA events around one call, inputs the same for both. The floors of a kernel are the bytes that it must move
over the memory's bandwidth and its products' FLOPs (counted once, without the second products that keep precision) over
the tensor cores' rate; "of floor" is the larger of the two over the time.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

import allscan
from allscan.layout import chunk_tokens, segment_length
from allscan.reference import gla_reference
from bench.operator import checked, extra_mib, inputs, step
from bench.table import Table, results

# B, T, H, K, V: two of the paper's sizes, then others that users have
SHAPES = (
    (1, 16384, 16, 128, 128), (1, 8192, 32, 128, 128), (2, 16384, 16, 128, 128), (4, 2048, 16, 128, 128),
    (4, 4096, 64, 128, 128), (8, 2048, 32, 256, 256), (8, 1024, 8, 64, 64), (1, 2048, 4, 64, 64),
    (1, 16384, 16, 128, 64), (1, 16384, 16, 128, 256),
)  # fmt: skip
# An H200: the measured streaming rate, and about 80 % of the peak for dense bfloat16
BYTES_PER_US, FLOPS_PER_US = 4.3e6, 8e8
CALLS = 20
COLUMNS = (
    "shape", "method", "forward_us", "forward_backward_us", "extra_mib", "first_call_s", "max_error", "gpu", "torch",
    "triton", "sources",
)  # fmt: skip


def work(B, T, H, K, V) -> dict:
    """{kernel: (bytes, FLOPs)} of one forward and backward, bfloat16 with float32 gates, all its launches together."""
    n, BT = B * T * H, chunk_tokens(K)
    segments = B * -(-T // segment_length(B * T, H, BT, True)) * H * K * V * 4
    chunks = B * -(-T // BT) * H * K * V * 2
    key, value, gate, scores = n * K * 2, n * V * 2, n * K * 4, n * BT * 2
    pass_, within, pairs = 2 * n * K * V, 2 * n * BT * K, 2 * n * BT * V
    return {
        "keys_kernel": (2 * (2 * key + gate), 0),
        "queries_kernel": (2 * (3 * key + gate) + 3 * scores, 4 * within),
        "state_kernel": (3 * (key + value) + 3 * segments + 2 * chunks, 3 * pass_),
        "carry_kernel": (4 * segments, 0),
        "output_kernel": (2 * (2 * key + 2 * value + segments) + 3 * scores + 3 * chunks, 4 * pass_ + 2 * pairs),
        "grad_kernel": (4 * key + 2 * gate + 2 * value + 2 * chunks, 2 * pass_ + pairs + 6 * within),
    }


def check(name, call, H, K, V) -> float:
    """Largest relative error of o and the gradients against float64."""
    leaves, do = inputs(512, min(H, 2), K, "cuda", V=V)
    reference = [x.detach().double().requires_grad_() for x in leaves]
    expected = step(reference, do.double(), lambda *x: gla_reference(*x)[0], True)
    return checked(name, step(leaves, do, call, True), expected, 5e-3)


def median_us(function) -> float:
    for _ in range(3):
        function()
    times = []
    for _ in range(CALLS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times)[CALLS // 2]


def measure(name, call, shape) -> dict:
    B, T, H, K, V = shape
    start = time.perf_counter()
    leaves, do = inputs(T, H, K, "cuda", B=B, V=V)

    def both():
        step(leaves, do, call, True)

    both()
    torch.cuda.synchronize()
    row = {"first_call_s": time.perf_counter() - start, "max_error": check(name, call, H, K, V)}
    for leaf in leaves:
        leaf.grad = None
    row["extra_mib"] = extra_mib(both)
    row["forward_us"] = median_us(lambda: step(leaves, do, call, False))
    row["forward_backward_us"] = median_us(both)
    return row


def kernels(call, shape) -> list:
    """[(kernel, launches, us, MB, GFLOP, percent of its floor)] of one forward and backward, the slowest first."""
    B, T, H, K, V = shape
    leaves, do = inputs(T, H, K, "cuda", B=B, V=V)
    for _ in range(3):
        step(leaves, do, call, True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(CALLS):
            step(leaves, do, call, True)
        torch.cuda.synchronize()
    counted, found = work(*shape), []
    for event in profile.key_averages():
        us = event.self_device_time_total / CALLS
        nbytes, flops = counted.get(event.key, (0, 0))
        floor = max(nbytes / BYTES_PER_US, flops / FLOPS_PER_US)
        if us > 1:
            found.append((event.key, event.count // CALLS, us, nbytes / 1e6, flops / 1e9, 100 * floor / us))
    return sorted(found, key=lambda row: -row[2])


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", help="BxTxHxKxV")
    parser.add_argument("--no-fla", action="store_true", help="zeco_gla alone: fla's first calls take minutes")
    parser.add_argument("--csv", default=results("local.csv"))
    options = parser.parse_args(arguments)
    shapes = [tuple(map(int, s.split("x"))) for s in options.shapes] if options.shapes else SHAPES
    if not torch.cuda.is_available():
        print("No GPU here. What one forward and backward moves and computes, and the floor on an H200:")
        for shape in shapes:
            floor = sum(max(b / BYTES_PER_US, f / FLOPS_PER_US) for b, f in work(*shape).values())
            nbytes, flops = (sum(column) for column in zip(*work(*shape).values()))
            print(f"{'x'.join(map(str, shape)):22} {nbytes / 1e6:8.0f} MB {flops / 1e9:8.0f} GFLOP  {floor:8.0f} us")
        return 0
    comm = allscan.Communicator()
    methods = {"zeco_gla": lambda *x: allscan.zeco_gla(*x, comm=comm)[0]}
    if not options.no_fla:
        from fla.ops.gla import chunk_gla

        methods["fla chunk_gla"] = lambda *x: chunk_gla(*x)[0]
    with Table(options.csv, COLUMNS) as table:
        for shape in shapes:
            for name, call in methods.items():
                row = measure(name, call, shape) | dict(shape="x".join(map(str, shape)), method=name)
                table.write(row)
                print(
                    f"{row['shape']:22} {name:14} forward {row['forward_us']:8.1f} us  forward+backward "
                    f"{row['forward_backward_us']:9.1f} us  extra {row['extra_mib']:6.0f} MiB  "
                    f"first call {row['first_call_s']:.1f} s",
                    flush=True,
                )
    for name, launches, us, mb, gflop, percent in kernels(methods["zeco_gla"], shapes[0]):
        print(
            f"  {name[:40]:40} x{launches} {us:8.1f} us {mb:8.0f} MB {gflop:8.1f} GFLOP  {percent:5.1f} % of its floor"
        )
    comm.close()
    print(f"wrote {options.csv}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
