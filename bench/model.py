"""Measures training of a GLA language model of 1.2 billion parameters over several GPUs (the paper's tables 5 and 6).

    python -m bench.model               # 1, 2 and all GPUs of this machine; writes bench/results/model.csv

Every rank has the whole model (DistributedDataParallel) and T tokens, forward, backward and optimizer step in bfloat16
autocast, called from Python as in training. Methods: one sequence split over the ranks, its state carried by zeco_gla,
by LASP-2's all-gather, LASP-1's ring or Ulysses' all-to-all; and plain data parallelism, a sequence of T tokens a rank,
which is the ideal. The methods alternate step by step in a new order each time, because a GPU's clock depends on its
previous load; a time is the median step of the slowest rank. They are checked first on a small model: loss and
gradients against one rank with the whole sequence; afterwards bench/proof.py proves which method ran (column ``proof``,
of rank 0). Without GPUs only the check runs, on 2 CPU ranks.
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
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from allscan.tools.ranks import Ranks
from bench.harness import Table, results
from bench.operator import INVARIANT, ZIGZAG, over

TOKENS = (16384, 32768)
STEPS = 11
COLUMNS = (
    "method",
    "ranks",
    "T",
    "parameters",
    "step_ms",
    "tokens_per_s_per_gpu",
    "percent_of_data_parallel",
    "peak_gib",
    "proof",
    "gpu",
    "torch",
    "triton",
    "sources",
)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, width):
        super().__init__()
        hidden = width * 11 // 4
        self.norm = nn.RMSNorm(width)
        self.wide, self.out = nn.Linear(width, 2 * hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        a, b = self.wide(self.norm(x)).chunk(2, -1)
        return self.out(F.silu(a) * b)


class Layer(nn.Module):
    """Gated linear attention with a low-rank gate and an output gate, then an MLP."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm, self.norm_heads = heads, nn.RMSNorm(width), nn.RMSNorm(width // heads)
        self.qkv, self.out_gate = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate = nn.Sequential(nn.Linear(width, 16, bias=False), nn.Linear(16, width))
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = Mlp(width)

    def forward(self, x, call):
        h = self.norm(x)
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in self.qkv(h).chunk(3, -1))
        g = F.logsigmoid(self.gate(h).float()).unflatten(-1, (self.heads, -1)) / 16
        o = self.norm_heads(call(q, k, v, g).to(q.dtype)).flatten(-2)
        x = x + self.out(o * F.silu(self.out_gate(h)))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, layers=20, width=2048, heads=32, vocabulary=32000):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens, labels, call):
        """Return the loss, the mean over these tokens."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, call)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


def text(tokens, vocabulary, device, seed):
    """Draw [1, tokens + 1] random token numbers."""
    return torch.randint(vocabulary, (1, tokens + 1), generator=torch.Generator().manual_seed(seed)).to(device)


def chosen(methods, size) -> dict:
    """Select the methods of bench.operator that can train; plain data parallelism first. It needs no other ranks, and
    is the only method on one rank."""
    left_out = "one rank", "fla, one rank", *INVARIANT, *ZIGZAG  # the model's tokens are in rank order
    others = {name: call for name, call in methods.items() if name not in left_out}
    return {"data parallel": methods["one rank"]} | (others if size > 1 else {})


def check(ranks, T) -> dict | None:
    """Return {method: relative error of loss and gradients} of a small model against one rank with the whole
    sequence."""
    with over(ranks) as here:
        if here is None:
            return None
        comm, methods = here
        torch.manual_seed(0)
        model = Model(2, 64, 4, 97).to(comm.device)
        whole, mine = text(T * ranks, 97, comm.device, 0), slice(comm.rank * T, (comm.rank + 1) * T)
        errors, expected = {}, None
        for name, call in chosen(methods, comm.size).items():
            model.zero_grad()
            inside = slice(None) if expected is None else mine  # first the whole sequence on every rank
            loss = model(whole[:, :-1][:, inside], whole[:, 1:][:, inside], call)
            loss.backward()
            found = torch.cat([loss.detach()[None]] + [p.grad.flatten() for p in model.parameters()])
            dist.all_reduce(found, group=comm.group)
            found /= ranks
            if expected is None:
                expected = found
                continue
            errors[name] = ((found - expected).norm() / expected.norm()).item()
            if not errors[name] < 1e-4:
                raise AssertionError(f"{name} is wrong by {errors[name]}")
        comm.barrier()
        return errors


def measure(ranks, T, shape) -> dict | None:
    """Return {method: (seconds of a step, peak GiB, parameters)}."""
    with over(ranks) as here:
        if here is None:
            return None
        comm, methods = here
        torch.manual_seed(0)
        model = Model(**shape).to(comm.device)
        wrapped = DistributedDataParallel(model, process_group=comm.group, gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        data = text(T, model.embedding.num_embeddings, comm.device, comm.rank)
        calls = chosen(methods, comm.size)
        times, peaks = {name: [] for name in calls}, {}

        def step(name):
            with torch.autocast("cuda", torch.bfloat16):
                loss = wrapped(data[:, :-1], data[:, 1:], calls[name])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()

        before = {name: method.epochs() for name, method in calls.items()}
        for turn in range(STEPS + 2):
            for name in random.Random(turn).sample(list(calls), len(calls)):
                torch.cuda.reset_peak_memory_stats()
                comm.barrier()
                start = time.perf_counter()
                step(name)
                times[name].append(time.perf_counter() - start)
                peaks[name] = torch.cuda.max_memory_allocated() / (1 << 30)
        layers, proofs = len(model.layers), {}
        for name, method in calls.items():
            comm.barrier()
            steps = STEPS + 2
            proofs[name] = method.prove(name, before[name], steps, layers, True, functools.partial(step, name))
        parameters = sum(p.numel() for p in model.parameters())
        return {name: (statistics.median(times[name][2:]), peaks[name], parameters, proofs[name]) for name in calls}


def training_rows(answers: list, T: int):
    """Yield, and print, table rows from every rank's result of :func:`measure`, with the slowest rank's time."""
    seconds = {name: max(answer[name][0] for answer in answers) for name in answers[0]}
    for name, step in seconds.items():
        row = dict(method=name, ranks=len(answers), T=T, step_ms=1e3 * step, tokens_per_s_per_gpu=T / step)
        percent = 100 * seconds["data parallel"] / step if "data parallel" in seconds else ""
        row["percent_of_data_parallel"] = percent
        row["peak_gib"], row["parameters"] = max(a[name][1] for a in answers), answers[0][name][2]
        row["proof"] = answers[0][name][3]
        print(
            f"P={len(answers)} T={T} {name:22} {row['tokens_per_s_per_gpu']:8.0f} tokens/s/GPU  "
            f"{percent and f'{percent:5.1f} % of data parallel'}  {row['peak_gib']:.0f} GiB",
            flush=True,
        )
        yield row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks; default 1, 2 and all GPUs")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="tokens per rank")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--csv", default=results("model.csv"))
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count()
    if gpus < 2:
        print("No two GPUs here: a check of every method on 2 CPU ranks.")
        with Ranks(2, "cpu") as ranks:
            for name, error in ranks.run(check, 2, 70)[0].items():
                print(f"{name:22} error {error:.1e}")
        return 0
    counts = arguments.ranks or sorted({1, 2, gpus})
    shape = dict(layers=arguments.layers, width=arguments.width, heads=arguments.heads)
    with Table(arguments.csv, COLUMNS) as table, Ranks(max(counts), "cuda") as ranks:
        for count in counts:
            ranks.run(check, count, 600)
            for T in arguments.tokens:
                answers = ranks.run(measure, count, T, shape)[:count]
                for row in training_rows(answers, T):
                    table.write(row)
    print(f"wrote {arguments.csv}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
