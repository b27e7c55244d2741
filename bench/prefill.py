"""Measures the time to the first token of a long prompt, on one GPU and split over several.

    python -m bench.prefill                                      # all GPUs; writes bench/results/prefill.csv
    python -m bench.prefill --model kimi_linear --tokens 8192 131072 --pieces 1 4

Models: those of bench.hybrid, bfloat16, random weights: Kimi-Linear's layers (12, width 2,048), and Qwen3-Next's in the
sizes of Qwen3.5-9B (32, width 4,096, vocabulary 248,320; 2 key heads a softmax layer). T: tokens of the prompt. A call
has a cache, which holds the whole prompt's keys and states on every rank afterwards, and computes the logits of
the last token. A time is that of the slowest rank from the call to the token on the host, median of --steps after one
more; with --pieces N the prompt is read in N calls. One GPU runs the same operators, split over this rank alone.

First a small model is checked: the last logits, and those of the next token, which each rank decodes alone, against the
ordinary model. ``proof``: All-Scan's scans of states, which are counted on the GPU. softmax_ms, recurrent_ms, other_ms:
kernels of one more call, by torch's profiler, on the rank with the last token. host_ms: the time without a kernel.
Without two GPUs only the check runs, on 2 CPU ranks.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time

import torch

from allscan.tools.ranks import Ranks, on_first
from allscan.zigzag import zigzag_positions
from bench import hybrid
from bench.harness import Table, results
from bench.model import text
from bench.proof import breakdown, launched

SIZES = {  # layers, width, heads, width of a head, vocabulary
    "kimi_linear": (12, 2048, 16, 128, hybrid.VOCABULARY),
    "qwen3_next": (32, 4096, 16, 128, 248320),
}
SMALL = 4, 64, 4, 16, 97
TOKENS, STEPS = (8192, 32768, 131072, 524288), 3
COLUMNS = (
    *("model", "method", "ranks", "T", "pieces", "first_token_ms", "times_one_gpu", "peak_gib", "softmax_ms"),
    *("recurrent_ms", "other_ms", "host_ms", "max_error", "proof", "gpu", "torch", "triton", "sources"),
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
    with context as (comm, _), hybrid.functions(kind, comm.device):
        dtype, limit = (torch.float32, 1e-4) if comm.device.type == "cpu" else (torch.bfloat16, 5e-2)
        model = hybrid.made(kind, comm.device, dtype, *SMALL).eval()
        prompt, errors = text(T * comm.size, 97, comm.device, 0)[:, :-1], []
        want = model(input_ids=prompt, use_cache=True, logits_to_keep=1)
        for pieces in (1, 2):
            before = hybrid.scans(comm, kind.state(SMALL[3]))
            logits, cache = read(split(model, comm), prompt, comm, pieces)
            prove(comm, kind, SMALL, before, pieces)
            split(model, None)
            pairs = [(logits, want.logits)] if comm.rank == 0 else []
            token = torch.ones(1, 1, dtype=torch.int64, device=comm.device)
            after = model(input_ids=prompt, use_cache=True).past_key_values
            pairs.append(
                tuple(model(input_ids=token, past_key_values=x, use_cache=True).logits for x in (cache, after))
            )
            errors += [((found - wanted).float().norm() / wanted.float().norm()).item() for found, wanted in pairs]
        if not max(errors) < limit:
            raise AssertionError(f"{name}, split, is wrong by {max(errors)}")
        comm.barrier()
        return max(errors)


@torch.no_grad()
def measure(group, name: str, lengths, pieces, steps: int) -> list[dict]:
    """Return rows of this rank's times."""
    kind, context = opened(group, name)
    rows = []
    with context as (comm, one), hybrid.functions(kind, comm.device):
        model = hybrid.made(kind, comm.device, torch.bfloat16, *SIZES[name]).eval()
        for T in lengths:
            prompt = text(T, SIZES[name][4], comm.device, 0)[:, :-1]
            for method, by in {"split, zigzag": comm, "one GPU": one}.items():
                for count in pieces:
                    if method == "one GPU" and comm.rank:
                        comm.barrier()
                        continue
                    split(model, by)
                    call = functools.partial(first_token, model, prompt, by, count)
                    before = hybrid.scans(by, kind.state(SIZES[name][3]))
                    call()  # compiles, and agrees on shapes
                    proof, times = prove(by, kind, SIZES[name], before, count), []
                    torch.cuda.reset_peak_memory_stats()
                    for _ in range(steps):
                        if by is comm:
                            comm.barrier()
                        start = time.perf_counter()
                        call()
                        times.append(time.perf_counter() - start)
                    kinds = breakdown(launched(call))
                    known = {f"{x}_ms": kinds.pop(y) for x, y in (("softmax", "softmax"), ("recurrent", "recurrences"))}
                    busy = sum(known.values()) + sum(kinds.values())
                    row = dict(model=name, method=method, ranks=by.size, T=T, pieces=count, **known, proof=proof)
                    row |= dict(first_token_ms=1e3 * statistics.median(times), other_ms=sum(kinds.values()))
                    row |= dict(host_ms=max(0.0, row["first_token_ms"] - busy))
                    row["peak_gib"] = torch.cuda.max_memory_allocated() / (1 << 30)
                    rows.append(row)
                    if method == "one GPU":
                        comm.barrier()
        split(model, None)
        comm.barrier()
    return rows


def first_token(model, prompt, comm, pieces: int) -> None:
    logits, _ = read(model, prompt, comm, pieces)
    logits[:, -1].argmax(-1).tolist()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--ranks", type=int, help="number of ranks; default all GPUs")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="tokens of the prompt")
    parser.add_argument("--pieces", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--csv", default=results("prefill.csv"))
    arguments = parser.parse_args()
    if torch.cuda.device_count() < 2:
        print("No two GPUs here: a check of every model on 2 CPU ranks.")
        with Ranks(2, "cpu") as ranks:
            for name in arguments.model:
                print(f"{name:12} error {ranks.run(check, None, name, 24)[0]:.1e}")
        return 0
    count = arguments.ranks or torch.cuda.device_count()
    measured = {(name, str(count)) for name in arguments.model}
    keep = lambda row: (row["model"], row["ranks"]) not in measured | {(m, "1") for m, _ in measured}  # noqa: E731
    with Table(arguments.csv, COLUMNS, keep=keep) as table, Ranks(count, "cuda") as ranks:
        for name in arguments.model:
            error = ranks.run(on_first, count, check, name, 600)[0]
            asked = name, arguments.tokens, arguments.pieces, arguments.steps
            answers = ranks.run(on_first, count, measure, *asked, timeout=1800)
            alone = {(x["T"], x["pieces"]): x["first_token_ms"] for x in answers[0] if x["method"] == "one GPU"}
            for row in answers[0]:  # in zigzag rank 0 has the last token; one GPU is rank 0
                of_all = [x for some in answers for x in some if all(x[k] == row[k] for k in ("method", "T", "pieces"))]
                for column in ("first_token_ms", "peak_gib"):
                    row[column] = max(x[column] for x in of_all)
                row["times_one_gpu"] = alone[row["T"], row["pieces"]] / row["first_token_ms"]
                print(
                    f"{name} T={row['T']} {row['pieces']} pieces, {row['method']}: {row['first_token_ms']:.0f} ms, "
                    f"{row['times_one_gpu']:.2f} times one GPU",
                    flush=True,
                )
                table.write(row | dict(max_error=error if row["ranks"] > 1 else ""))
            ranks.run(hybrid.freed)
    print(f"wrote {arguments.csv}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
