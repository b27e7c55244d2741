"""Measures the time to the first token of a long prompt, on one GPU and split over several.

    python -m bench.prefill                                      # all GPUs; writes bench/results/prefill.csv
    python -m bench.prefill --model kimi_linear --tokens 8192 131072 --pieces 1 4

Models: those of bench.hybrid, bfloat16, random weights: Kimi-Linear's layers (12, width 2,048), and Qwen3-Next's in the
sizes of Qwen3.5-9B (32, width 4,096, vocabulary 248,320; 2 key heads a softmax layer). T: tokens of the prompt. A call
has a cache, which holds the whole prompt's keys and states on every rank afterwards, and computes the logits of
the last token. A time is that of the slowest rank from the call to the token on the host, median of --steps after one
more; with --pieces N the prompt is read in N calls. One GPU runs the same operators, split over this rank alone. What
fails, as for lack of memory, is printed and has no row. torch's depthwise convolution may fail from 2^31 numbers on,
which one GPU has with 524,288 tokens in one piece.

First a small model is checked: the last logits, and those of the next token, which each rank decodes alone, against the
ordinary model. ``proof``: All-Scan's scans of states, which are counted on the GPU. softmax_ms, recurrent_ms, other_ms:
kernels of one more call, by torch's profiler, on the rank with the last token. host_ms: the time that is more than the
sum of these, which counts kernels that run at once twice. graph_ms: the same call, in one piece, captured in a CUDA
graph and replayed, up to GRAPHED tokens; its scans are counted, too, and its token is that of the eager call.
Without two GPUs only the check runs, on 2 CPU ranks.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
import time
from unittest import mock

import torch
import torch.distributed as dist
from triton.runtime.autotuner import Autotuner

from allscan.tools.ranks import Ranks, on_first
from allscan.zigzag import zigzag_positions
from bench import hybrid
from bench.harness import Table, check_on_cpus, results
from bench.model import text
from bench.proof import breakdown, launched

SIZES = {  # layers, width, heads, width of a head, vocabulary
    "kimi_linear": (12, 2048, 16, 128, hybrid.VOCABULARY),
    "qwen3_next": (32, 4096, 16, 128, 248320),
}
SMALL = 4, 64, 4, 16, 97
TOKENS, STEPS, GRAPHED = (8192, 32768, 131072, 524288), 3, 32768
COLUMNS = (
    *("model", "method", "ranks", "T", "pieces", "first_token_ms", "times_one_gpu", "graph_ms", "graph_times_one_gpu"),
    *("peak_gib", "softmax_ms", "recurrent_ms", "other_ms", "host_ms", "max_error", "proof"),
    *("gpu", "torch", "triton", "sources"),
)


def opened(group, name: str):
    kind = hybrid.Hybrid(name, 192 if name == "kimi_linear" else 0)
    return kind, hybrid.communicators(group)


def read(model, prompt, comm, pieces: int):
    """Read the prompt [1, T] in pieces, split over ``comm``; return (logits of this rank's last token, cache)."""
    cache = None
    for piece in prompt.chunk(pieces, 1):
        mine = zigzag_positions(piece.shape[1] // comm.size, comm=comm) if comm.size > 1 else slice(None)
        out = model(input_ids=piece[:, mine], past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
    return out.logits, cache


def split(model, comm):
    from allscan.integrations.transformers import sequence_parallel

    return sequence_parallel(model, comm=comm, layout="zigzag" if comm is not None and comm.size > 1 else "contiguous")


def prove(comm, kind, sizes, before: tuple, pieces: int) -> str:
    """Return a sentence with the number of scans of states since ``before``; AssertionError unless each recurrent layer
    made two, and one that sends its final state to all ranks, in each call."""
    layers = pieces * sum(i % 4 != 3 for i in range(sizes[0])) * (comm.size > 1)
    made = tuple(now - then for now, then in zip(hybrid.scans(comm, kind.state(sizes[3])), before))
    if made != (2 * layers, layers):
        raise AssertionError(f"All-Scan made {made} scans of states, {(2 * layers, layers)} are its own")
    return f"{sum(made)} scans of states by All-Scan"


@torch.no_grad()
def check(group, name: str, T: int) -> float:
    """Return the error of the last logits, and of those of the next token, against the ordinary model."""
    kind, context = opened(group, name)
    untuned = mock.patch.object(Autotuner, "run", hybrid.first_configuration)  # fla's kernels of the ordinary model
    with context as (comm, _), hybrid.functions(kind, comm.device), untuned:
        on_cpu = comm.device.type == "cpu"
        dtype, limit = (torch.float32, 1e-4) if on_cpu else (torch.bfloat16, 5e-2)
        # on GPUs with the measured heads, so that their kernels are compiled once
        sizes = SMALL if on_cpu else (*SMALL[:3], 128, SMALL[4])
        model = hybrid.made(kind, comm.device, dtype, *sizes).eval()
        prompt, errors = text(T * comm.size, 97, comm.device, 0)[:, :-1], []
        want = model(input_ids=prompt, use_cache=True, logits_to_keep=1)
        for pieces in (1, 2):
            before = hybrid.scans(comm, kind.state(sizes[3]))
            logits, cache = read(split(model, comm), prompt, comm, pieces)
            prove(comm, kind, sizes, before, pieces)
            split(model, None)
            pairs = [(logits, want.logits)] if comm.rank == 0 else []
            token = torch.ones(1, 1, dtype=torch.int64, device=comm.device)
            after = model(input_ids=prompt, use_cache=True).past_key_values
            pairs.append(
                tuple(model(input_ids=token, past_key_values=x, use_cache=True).logits for x in (cache, after))
            )
            errors += [((found - wanted).float().norm() / wanted.float().norm()).item() for found, wanted in pairs]
        worst = torch.tensor(max(errors), device=comm.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=comm.group)  # the other ranks have fewer errors
        if not worst < limit:
            raise AssertionError(f"{name}, split, is wrong by {worst.item()}: {errors}")
        return worst.item()


@torch.no_grad()
def measure(group, name: str, T: int, pieces, steps: int) -> list[dict]:
    """Return rows of this rank's times, one for each number of pieces."""
    kind, context = opened(group, name)
    rows = []
    with context as (comm, _), hybrid.functions(kind, comm.device):
        model = split(hybrid.made(kind, comm.device, torch.bfloat16, *SIZES[name]).eval(), comm)
        prompt = text(T, SIZES[name][4], comm.device, 0)[:, :-1]
        for count in pieces:
            call = functools.partial(first_token, model, prompt, comm, count)
            before = hybrid.scans(comm, kind.state(SIZES[name][3]))
            call()  # compiles, and agrees on shapes
            proof, times = prove(comm, kind, SIZES[name], before, count), []
            torch.cuda.reset_peak_memory_stats()
            for _ in range(steps):
                comm.barrier()
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
            kinds = breakdown(launched(call))
            known = {f"{x}_ms": kinds.pop(y) for x, y in (("softmax", "softmax"), ("recurrent", "recurrences"))}
            busy = sum(known.values()) + sum(kinds.values())
            method = "split, zigzag" if comm.size > 1 else "one GPU"
            row = dict(model=name, method=method, ranks=comm.size, T=T, pieces=count, **known, proof=proof)
            row |= dict(first_token_ms=1e3 * statistics.median(times), other_ms=sum(kinds.values()))
            row |= dict(host_ms=max(0.0, row["first_token_ms"] - busy))
            row["peak_gib"] = torch.cuda.max_memory_allocated() / (1 << 30)
            row["graph_ms"] = ""
            if count == 1 and T <= GRAPHED and comm.device.type == "cuda":
                row["graph_ms"] = graphed(model, prompt, comm, kind, steps)
            rows.append(row)
        comm.barrier()
    return rows


def first_token(model, prompt, comm, pieces: int) -> list[int]:
    logits, _ = read(model, prompt, comm, pieces)
    return logits[:, -1].argmax(-1).tolist()


def graphed(model, prompt, comm, kind, steps: int) -> float | str:
    """Return the milliseconds of a replayed CUDA graph of the call; "" on all ranks if one of them has none."""
    expected, graph, times = first_token(model, prompt, comm, 1), torch.cuda.CUDAGraph(), []
    failed = torch.zeros(1, device=comm.device)
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            logits, cache = read(model, prompt, comm, 1)
            token = logits[:, -1].argmax(-1)
    except RuntimeError as failure:
        print(f"rank {comm.rank} of {comm.size} has no graph: {failure}", flush=True)
        failed += 1
    dist.all_reduce(failed, group=comm.group)
    if failed:
        return ""
    for _ in range(steps + 1):
        token.fill_(-1)
        before = hybrid.scans(comm, kind.state(SIZES[kind.family][3]))
        comm.barrier()
        start = time.perf_counter()
        graph.replay()
        found = token.tolist()
        times.append(time.perf_counter() - start)
        prove(comm, kind, SIZES[kind.family], before, 1)
        if found != expected:
            raise AssertionError(f"the graph's token is {found}, the eager call's {expected}")
    del cache
    return 1e3 * statistics.median(times[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--ranks", type=int, help="number of ranks; default all GPUs")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="tokens of the prompt")
    parser.add_argument("--pieces", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--csv", default=results("prefill.csv"))
    arguments = parser.parse_args()
    count = arguments.ranks or torch.cuda.device_count()
    if torch.cuda.device_count() < 2:
        return check_on_cpus(check, arguments.model)
    if any(T % (2 * count * pieces) for T in arguments.tokens for pieces in arguments.pieces):
        parser.error(f"--tokens must be multiples of {2 * count}, twice the ranks, times --pieces")
    measured = {(name, str(count)) for name in arguments.model}
    keep = lambda row: (row["model"], row["ranks"]) not in measured | {(m, "1") for m, _ in measured}  # noqa: E731
    with Table(arguments.csv, COLUMNS, keep=keep) as table, Ranks(count, "cuda") as ranks:
        for name in arguments.model:
            error = ranks.run(on_first, count, check, name, 600)[0]
            alone: dict = {}
            for T, size in itertools.product(sorted(arguments.tokens), (1, count)):
                try:
                    asked = name, T, arguments.pieces, arguments.steps
                    answers = ranks.run(on_first, size, measure, *asked, timeout=1800)[:size]
                except RuntimeError as failure:  # one GPU may have too little memory for what several hold
                    print(f"{name} T={T} on {size} GPUs: {str(failure).strip().splitlines()[-1]}", flush=True)
                    continue
                finally:
                    ranks.run(hybrid.freed)
                for row, *others in zip(*answers, strict=True):  # in zigzag rank 0 has the last token
                    for column in ("first_token_ms", "graph_ms", "peak_gib"):
                        row[column] = max(x[column] for x in (row, *others))
                    of_one = alone.setdefault((T, row["pieces"]), row if size == 1 else {})
                    for column, times in (("first_token_ms", "times_one_gpu"), ("graph_ms", "graph_times_one_gpu")):
                        row[times] = of_one[column] / row[column] if row[column] and of_one.get(column) else ""
                    took = f"{row['first_token_ms']:.0f} ms, as a graph {row['graph_ms'] or 0:.0f}"
                    print(f"{name} T={T}, {row['pieces']} pieces, {size} GPUs: {took}", flush=True)
                    table.write(row | dict(max_error=error if size > 1 else ""))
    print(f"wrote {arguments.csv}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
