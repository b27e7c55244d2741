"""Measures training of a transformers hybrid on packed rows in the zigzag layout: split by row, or by document.

    python -m bench.packed              # 2 GPUs; writes bench/results/packed.csv; needs fla
    python -m bench.packed --model qwen3_next

Either the row or each document is cut into 2P chunks. Models and steps are those of bench.hybrid. The two cuts
alternate; a time is the median step of the slowest rank. The kernel times of one more step are printed, by kind. A
check runs first on a small model: loss and gradients of one cut against those of the other. Without GPUs only the check
runs, on 2 CPU ranks.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from allscan.ops.delta.delta_checks import CHUNKS
from allscan.tools.ranks import Ranks, on_first
from bench import hybrid
from bench.harness import Table, results
from bench.model import text
from bench.proof import breakdown, launched
from bench.tuning import compile_ahead

COLUMNS = (
    "model",
    "chunk",
    "documents",
    "per_document",
    "ranks",
    "T",
    "layers",
    "heads",
    "step_ms",
    "tokens_per_s_per_gpu",
)
COLUMNS += ("softmax_ms", "peak_gib", "gpu", "torch", "triton", "sources")  # softmax_ms: per rank, in one step
CUTS = False, True


def packings(whole: int) -> dict[str, list[int]]:
    """Return {name: cu_seqlens} of rows of ``whole`` tokens."""
    long = [whole // 2, *[whole // 32] * 14, whole // 16]
    lengths = {"4 of a quarter": [whole // 4] * 4, "1 of a half, 14 of a 32nd, 1 of a 16th": long}
    return {name: [sum(some[:i]) for i in range(len(some) + 1)] for name, some in lengths.items()}


def parts(comm, whole, cuts) -> dict:
    """Return {per_document: this rank's part of a row}."""
    from allscan.integrations.transformers import cut_batch

    labels, boundaries = whole.clone(), torch.tensor(cuts, device="cpu")
    labels[:, boundaries[:-1].to(labels.device)] = -100
    batch = dict(input_ids=whole, labels=labels, cu_seq_lens_q=boundaries)
    return {cut: cut_batch(batch, comm=comm, layout="zigzag", per_document=cut) for cut in CUTS}


def split(model, comm, cut) -> None:
    from allscan.integrations.transformers import sequence_parallel

    sequence_parallel(model, comm=comm, layout="zigzag", per_document=cut)


def check(group, kind, T, heads, head) -> dict:
    """Return {packing: relative error of loss and gradients} of a small model, one cut against the other."""
    with hybrid.communicators(group) as (comm, _), hybrid.functions(kind, comm.device):
        dtype, limit = (torch.float32, 1e-4) if comm.device.type == "cpu" else (torch.bfloat16, 5e-2)
        model, errors = hybrid.made(kind, comm.device, dtype, 4, 64, heads, head, 97), {}
        whole = text(T * comm.size, 97, comm.device, 0)[:, :-1]
        for name, cuts in packings(whole.shape[1]).items():
            found = []
            for cut, part in parts(comm, whole, cuts).items():
                comm.step()
                split(model, comm, cut)
                loss = model(**part).loss
                loss.backward()
                found.append(torch.cat([loss.detach()[None], *(p.grad.flatten() for p in model.parameters())]).float())
                model.zero_grad()
                dist.all_reduce(found[-1], group=comm.group)
            errors[name] = ((found[0] - found[1]).norm() / found[0].norm()).item()
            if not errors[name] < limit:
                raise AssertionError(f"the cuts of {name} differ by {errors[name]}")
        comm.barrier()
        return errors


def measure(group, kind, T, shape, steps) -> dict:
    """Return {(packing, per_document): (seconds of a step, ms of softmax kernels, peak GiB)}."""
    with hybrid.communicators(group) as (comm, _), hybrid.functions(kind, comm.device):
        model = hybrid.made(kind, comm.device, torch.bfloat16, **shape)
        wrapped = DistributedDataParallel(model, process_group=comm.group, gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        whole = text(T * comm.size, hybrid.VOCABULARY, comm.device, 0)[:, :-1]
        given = {
            (name, cut): part
            for name, cuts in packings(whole.shape[1]).items()
            for cut, part in parts(comm, whole, cuts).items()
        }
        times, peaks, kinds = {case: [] for case in given}, {}, {}

        def step(case):
            comm.step()
            (wrapped(**given[case]).loss * comm.size).backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()

        for turn in range(steps + 2):
            for case in random.Random(turn).sample([*given], len(given)):
                split(model, comm, case[1])
                torch.cuda.reset_peak_memory_stats()
                comm.barrier()
                start = time.perf_counter()
                step(case)
                times[case].append(time.perf_counter() - start)
                peaks[case] = torch.cuda.max_memory_allocated() / (1 << 30)
        for case in given:
            split(model, comm, case[1])
            comm.barrier()
            kinds[case] = breakdown(launched(functools.partial(step, case)))
        return {case: (statistics.median(times[case][2:]), kinds[case], peaks[case]) for case in given}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, help="default all GPUs")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens per rank")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--steps", type=int, default=hybrid.STEPS)
    parser.add_argument("--model", choices=("kimi_linear", "qwen3_next"), default="kimi_linear")
    parser.add_argument("--mla", type=int, choices=(128, 192), default=128, help="key width in kimi_linear")
    parser.add_argument("--chunk", choices=CHUNKS, default="allscan", help="as in bench.hybrid")
    parser.add_argument("--tuned", action="store_true", help="fla is already tuned, in Triton's cache")
    parser.add_argument("--csv", default=results("packed.csv"))
    arguments = parser.parse_args()
    kind = hybrid.Hybrid(arguments.model, arguments.mla if arguments.model == "kimi_linear" else 0, arguments.chunk)
    if torch.cuda.device_count() < 2:
        print("No two GPUs here: a check of both cuts on 2 CPU ranks.")
        with Ranks(2, "cpu") as ranks:
            for name, error in ranks.run(check, None, kind, 64, 4, 16)[0].items():
                print(f"{name:40} error {error:.1e}")
        return 0
    count = arguments.ranks or torch.cuda.device_count()
    if arguments.chunk == "fla" and not arguments.tuned:
        compile_ahead(hybrid.jobs(kind, count, arguments.heads, [arguments.tokens]))
    shape = dict(layers=arguments.layers, width=2048, heads=arguments.heads, head=128)
    with Table(arguments.csv, COLUMNS) as table, Ranks(count, "cuda") as ranks:
        errors = ranks.run(on_first, count, check, kind, hybrid.CHECKED, arguments.heads, 128, timeout=300.0)[0]
        print("errors", {name: f"{error:.1e}" for name, error in errors.items()}, flush=True)
        answers = ranks.run(on_first, count, measure, kind, arguments.tokens, shape, arguments.steps, timeout=300.0)
        for name, cut in answers[0]:
            found = [answer[name, cut] for answer in answers]
            seconds = max(x[0] for x in found)
            row = dict(
                model=kind.name, chunk=kind.chunk, documents=name, per_document=cut, ranks=count, T=arguments.tokens
            )
            row |= dict(layers=arguments.layers, heads=arguments.heads, step_ms=1e3 * seconds)
            row |= dict(tokens_per_s_per_gpu=arguments.tokens / seconds, peak_gib=max(x[2] for x in found))
            row |= dict(softmax_ms=" ".join(f"{x[1]['softmax']:.1f}" for x in found))
            print({key: round(x, 1) if isinstance(x, float) else x for key, x in row.items()}, flush=True)
            for rank, x in enumerate(found):
                print(f"  rank {rank}: kernels", {name: round(ms, 1) for name, ms in x[1].items()}, flush=True)
            table.write(row)
    print(f"wrote {arguments.csv}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
