"""Measures zeco_gla on one GPU against flash-linear-attention's chunk_gla, and each kernel against its lower bounds.

    python -m bench.local                       # one GPU; writes bench/results/local.csv
    python -m bench.local --shapes 1x16384x16x128x128 --no-fla

Results are checked first: both against the float64 recurrence on 512 tokens of the same heads and widths. Times are of
CUDA graphs of one call, with the same inputs: medians over samples of 10 consecutive replays. (Packed sequences: of 10
consecutive calls, because chunk_gla then waits for the GPU in between.) fla's configurations are compiled and chosen
ahead (bench/tuning.py). The lower bounds ("floors") of a kernel are its minimal bytes over the memory bandwidth, and
its products' FLOPs (counted once, without the second products for precision) over the tensor cores' rate; "of floor" is
the larger of the two over the time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time

import torch

import allscan
from allscan.base.tiling import multiprocessors
from allscan.reference import gla_reference
from allscan.tokens.packing import CHUNK_TOKENS, segment_length
from bench import local_delta
from bench.harness import Table, both_passes, capture, checked, inputs, results, step
from bench.tuning import Job, compile_ahead

# B, T, H, K, V: two of the paper's sizes, then other common ones, last the default of fla's GLA models
SHAPES = (
    (1, 16384, 16, 128, 128),
    (1, 8192, 32, 128, 128),
    (2, 16384, 16, 128, 128),
    (4, 2048, 16, 128, 128),
    (4, 4096, 64, 128, 128),
    (8, 2048, 32, 256, 256),
    (8, 1024, 8, 64, 64),
    (1, 2048, 4, 64, 64),
    (1, 16384, 16, 128, 64),
    (1, 16384, 16, 128, 256),
    (1, 16384, 4, 256, 512),
)
PACKED = 37  # sequences of uneven lengths, in an additional measurement of the first shape
# An H200: the measured streaming rate, and about 80 % of the peak for dense bfloat16
BYTES_PER_US, FLOPS_PER_US = 4.3e6, 8e8
SAMPLES = 15
COLUMNS = (
    "shape",
    "sequences",
    "method",
    "forward_us",
    "forward_backward_us",
    "extra_mib",
    "first_call_s",
    "second_process_s",
    "max_error",
    "gpu",
    "torch",
    "triton",
    "sources",
)


def work(B, T, H, K, V) -> dict:
    """Return {kernel: (bytes, FLOPs)} of a forward and backward, bfloat16 with float32 gates, summed over launches."""
    n, BT = B * T * H, CHUNK_TOKENS
    segments = B * -(-T // segment_length(B, T, H, K, V, False, multiprocessors(torch.device("cuda")))) * H * K * V * 4
    chunks = B * -(-T // BT) * H * K * V * 2
    key, value, gate, scores = n * K * 2, n * V * 2, n * K * 4, n * BT * 2
    pass_, within, pairs = 2 * n * K * V, 2 * n * BT * K, 2 * n * BT * V
    # Backward's A is float32. A chunk's incoming state takes 3 bytes, the gradient of its outgoing state 2.
    turned = (key + value + segments + 2.5 * chunks, pass_), (key + value + 2 * scores, pass_ + pairs)
    found = {
        "operands_kernel": [(2 * (4 * key + gate) + 3 * scores, 4 * within)],
        "state_kernel": [(3 * (key + value) + 3 * segments + 1.5 * chunks, 3 * pass_)],
        "state_passing_kernel": [(4 * segments, 0)],
        "da_kernel": [(2 * value + 2 * scores, pairs)],
        "output_kernel": [(2 * key + 2 * value + segments + scores, 2 * pass_ + pairs)],
        "grad_kernel": [(4 * key + 2 * gate + 2 * value + 2 * scores + 2 * chunks, 2 * pass_ + 6 * within)],
    }
    if K <= 128:
        found["output_kernel"] += turned
    else:  # value_grad_kernel reads do and the gradients of states again
        found["state_kernel"] += turned[:1]
        found["value_grad_kernel"] = [turned[1], (value + chunks, 0)]
    return {name: tuple(map(sum, zip(*parts))) for name, parts in found.items()}


def boundaries(tokens: int):
    """Return cu_seqlens of PACKED sequences of very different lengths."""
    cuts = torch.rand(PACKED - 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 2
    return torch.tensor([0, *sorted((cuts * tokens).long().tolist()), tokens])


def ours(comm, lengths, recompute=True):
    return lambda *x: allscan.zeco_gla(*x, comm=comm, cu_seqlens=lengths, recompute=recompute)[0]


def keeping(comm, lengths):
    return ours(comm, lengths, recompute=False)


def theirs(comm, lengths):
    from fla.ops.gla import chunk_gla

    options = {} if lengths is None else dict(cu_seqlens=lengths.cuda())
    return lambda *x: chunk_gla(*x, **options)[0]


METHODS = {"zeco_gla": ours, "zeco_gla, recompute=False": keeping, "fla chunk_gla": theirs}


def check(name, comm, shape, packed) -> float:
    """Return the largest relative error of o and the gradients against float64."""
    lengths = boundaries(512) if packed else None
    leaves, do = inputs(512, shape[2], shape[3], comm.device, V=shape[4])  # the same heads, to compile only once
    reference = [x.detach().double().requires_grad_() for x in leaves]
    expected = step(reference, do.double(), lambda *x: gla_reference(*x, cu_seqlens=lengths)[0], True)
    return checked(name, step(leaves, do, METHODS[name](comm, lengths), True), expected, 5e-3)


def first_call(comm, name, shape, packed=False):
    """Return (seconds of the first forward and backward, arguments of :func:`step` for more of them)."""
    B, T, H, K, V = shape
    leaves, do = inputs(T, H, K, "cuda", B=B, V=V)
    call = METHODS[name](comm, boundaries(T) if packed else None)
    torch.cuda.synchronize()
    start = time.perf_counter()
    step(leaves, do, call, True)
    torch.cuda.synchronize()
    return time.perf_counter() - start, (leaves, do, call)


def first_calls(shape) -> list:
    """Return the seconds of zeco_gla's first forward and backward, with compilation, in a process and in a second
    one."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "bench.local", "--first-call", "--shapes", "x".join(map(str, shape))]
        environment = os.environ | {"TRITON_CACHE_DIR": cache}
        run = [subprocess.run(command, env=environment, capture_output=True, text=True, check=True) for _ in range(2)]
    return [float(x.stdout.split()[-1]) for x in run]


def measure(name, comm, shape, packed) -> dict:
    seconds, (leaves, do, call) = first_call(comm, name, shape, packed)
    row = {"first_call_s": seconds, "second_process_s": "", "max_error": check(name, comm, shape, packed)}
    return row | both_passes(leaves, do, call, packed, SAMPLES)


def kernels(call, shape) -> list:
    """Return [(kernel, launches, us, MB, GFLOP, percent of its floor)] of one forward and backward, slowest first."""
    B, T, H, K, V = shape
    leaves, do = inputs(T, H, K, "cuda", B=B, V=V)
    graph, *_ = capture(leaves, do, call, True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(SAMPLES):
            graph.replay()
        torch.cuda.synchronize()
    counted, found = work(*shape), []
    for event in profile.key_averages():
        us = event.self_device_time_total / SAMPLES
        nbytes, flops = counted.get(event.key, (0, 0))
        floor = max(nbytes / BYTES_PER_US, flops / FLOPS_PER_US)
        if us > 1:
            found.append((event.key, event.count // SAMPLES, us, nbytes / 1e6, flops / 1e9, 100 * floor / us))
    return sorted(found, key=lambda row: -row[2])


def main_of_kda(options) -> int:
    if not torch.cuda.is_available():
        print("No GPU here; tests/bench/test_chunks.py checks the method that needs none.")
        return 0
    names = [name for name in local_delta.installed() if not (options.no_fla and "fla" in name)]
    shapes = [shape for shape in local_delta.SHAPES if not options.shapes or str(shape) in options.shapes]
    if options.backends:
        names = [name for name in names if name.startswith("fla ")]
    elif not options.no_fla:
        os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"
        compile_ahead(list(dict.fromkeys(x.job for x in shapes)))
    with allscan.Communicator() as comm, Table(options.csv, local_delta.COLUMNS) as table:
        for row in local_delta.rows(comm, names, options.backends, shapes):
            table.write(row)
            print(
                f"{row['shape']:26} {row['gates']:6} {row['method']:36} forward {row['forward_us']:8.1f} us  "
                f"forward+backward {row['forward_backward_us'] or float('nan'):9.1f} us  error {row['max_error']:.2e}",
                flush=True,
            )
    return 0


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", help="BxTxHxKxV; with --rule kda some of its own")
    parser.add_argument("--rule", choices=["gla", "kda"], default="gla", help="kda: see bench/local_delta.py")
    parser.add_argument("--no-fla", action="store_true", help="only allscan: fla's autotuning takes minutes")
    parser.add_argument("--backends", action="store_true", help="with kda: only fla, with its other backends")
    parser.add_argument("--first-call", action="store_true", help="only the seconds of zeco_gla's first call")
    parser.add_argument("--csv", help="default: bench/results/local.csv, or local_kda.csv")
    options = parser.parse_args(arguments)
    options.csv = options.csv or results("local.csv" if options.rule == "gla" else "local_kda.csv")
    if options.rule == "kda":
        return main_of_kda(options)
    shapes = [tuple(map(int, s.split("x"))) for s in options.shapes] if options.shapes else SHAPES
    if not torch.cuda.is_available():
        print("No GPU here. What one forward and backward moves and computes, and the floor on an H200:")
        for shape in shapes:
            floor = sum(max(b / BYTES_PER_US, f / FLOPS_PER_US) for b, f in work(*shape).values())
            nbytes, flops = (sum(column) for column in zip(*work(*shape).values()))
            print(f"{'x'.join(map(str, shape)):22} {nbytes / 1e6:8.0f} MB {flops / 1e9:8.0f} GFLOP  {floor:8.0f} us")
        return 0
    if not options.no_fla and not options.first_call:
        jobs = [Job("gla", H, K=K, V=V) for H, K, V in dict.fromkeys(shape[2:] for shape in shapes)]
        H, K, V = SHAPES[0][2:]
        compile_ahead(jobs + [Job("gla", H, "packed", K=K, V=V)] * (SHAPES[0] in shapes))
    comm = allscan.Communicator()
    if options.first_call:
        print(first_call(comm, "zeco_gla", shapes[0])[0])
        return 0
    cases = [(shape, False) for shape in shapes]
    if SHAPES[0] in shapes:
        cases.insert(1 + shapes.index(SHAPES[0]), (SHAPES[0], True))
    with Table(options.csv, COLUMNS) as table:
        for shape, packed in cases:
            for name, method in METHODS.items():
                if options.no_fla and method is theirs:
                    continue
                row = dict(shape="x".join(map(str, shape)), sequences=PACKED if packed else "", method=name)
                row |= measure(name, comm, shape, packed)
                if (shape, packed) == cases[0] and method is ours:
                    row["first_call_s"], row["second_process_s"] = first_calls(shape)
                table.write(row)
                print(
                    f"{row['shape']:22} {row['sequences']:2} {name:25} forward {row['forward_us']:8.1f} us  "
                    f"forward+backward {row['forward_backward_us']:9.1f} us  extra {row['extra_mib']:6.0f} MiB  "
                    f"first call {row['first_call_s']:.1f} s",
                    flush=True,
                )
    for name, launches, us, mb, gflop, percent in kernels(ours(comm, None), shapes[0]):
        print(
            f"  {name[:40]:40} x{launches} {us:8.1f} us {mb:8.0f} MB {gflop:8.1f} GFLOP  {percent:5.1f} % of its floor"
        )
    comm.close()
    print(f"wrote {options.csv}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
