"""Measures training on long sequences over several GPUs: each layer recomputed, MLPs and the loss in slices of tokens.

    python -m bench.long                                         # all GPUs; writes bench/results/long.csv
    python -m bench.long --model kimi_linear qwen3_next --tokens 131072 262144 --steps 2
    python -m bench.long --model kimi_linear --tokens 524288 --only split --steps 1 --warm 16384    # minutes a step
    python -m bench.long --tokens 1048576 --offload --only split --steps 1 --warm 16384    # inputs in the host's memory

Models: ``gla``, that of bench.model (1.24 billion parameters, vocabulary 32,000), and the hybrids of bench.hybrid, in
zigzag; bfloat16, for gla autocast. T tokens a rank (--tokens). Methods, in turns:

* split: one sequence over all ranks, T tokens on each; with --ranks 1 2 4 also strong scaling: rows whose ranks times T
  are equal have the same sequence;
* data parallel: a sequence of T tokens a rank, split over this rank alone, with the same slices: 100 %.

Gradients are summed by DistributedDataParallel, and AdamW makes a step. A time is the median of --steps steps of the
slowest rank, after one more, with --warm tokens a rank. First the split is checked on a small model: loss and gradients
against one rank with the whole sequence. ``proof``: All-Scan's scans of states in a step, which are counted on the GPU.
``mfu_percent``: 6 FLOPs a parameter and token, and those of softmax layers over the whole sequence, forward and
backward without recomputation, in the time of a step, of 989 TFLOP/s. ``softmax_s``, ``softmax_tflops``: time of the
softmax kernels in one more step, with --steps 1 in the timed one, by torch's profiler, and their FLOPs, recomputation
counted, in that time. One GPU has data parallel alone. Without a GPU only the check runs, on 2 CPU ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import random
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.autograd.graph import save_on_cpu
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import allscan
from allscan.integrations.slices import linear_cross_entropy, mlp_in_slices
from allscan.tools.ranks import Ranks, on_first
from allscan.zigzag import zigzag_positions
from bench import hybrid
from bench.harness import Table, check_on_cpus, results
from bench.model import Model, text, training_rows
from bench.proof import breakdown, launched

MODELS = "gla", *hybrid.FAMILIES
TOKENS, STEPS, SLICE = 262144, 3, 4096  # tokens a rank; steps; tokens of an MLP's slice
PEAK = 989e12  # FLOP/s of an H200, bfloat16, dense
METHODS = {"split": True, "data parallel": False}
COLUMNS = (
    *("model", "method", "ranks", "T", "sequence", "parameters", "step_s", "tokens_per_s_per_gpu"),
    *("percent_of_data_parallel", "peak_gib", "mfu_percent", "softmax_s", "softmax_tflops", "loss", "max_error"),
    *("proof", "gpu", "torch", "triton", "sources"),
)


class LongGla(Model):
    """The model of bench.model, with every layer recomputed, its input kept in autocast's dtype, on the host if
    ``offload``, and the loss in slices."""

    offload = False

    def forward(self, tokens, labels, call, comm=None):
        x = self.embedding(tokens)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        on_gpu = x.device.type == "cuda"
        with save_on_cpu(pin_memory=on_gpu) if self.offload else contextlib.nullcontext():
            for layer in self.layers:
                x = checkpoint(layer, x, call, use_reentrant=False)
        return linear_cross_entropy(self.norm(x), self.head.weight, labels, comm=comm)


class Gla:
    """The GLA model, and its two methods."""

    softmax = 0

    def __init__(self, comm, one, small: bool, offload: bool = False) -> None:
        torch.manual_seed(0)
        self.model = LongGla(**dict(layers=2, width=64, heads=2, vocabulary=97) if small else {}).to(comm.device)
        self.model.offload = offload
        self.comm, self.one, self.words = comm, one, self.model.embedding.num_embeddings
        self.dtype, layers = torch.float32 if small else torch.bfloat16, self.model.layers
        # rows and columns of a state; scans in a step, forward and reverse: each layer's forward runs twice
        self.state, self.scans = (layers[0].norm_heads.weight.numel(),) * 2, (2 * len(layers), len(layers))
        for layer in self.model.layers:
            mlp_in_slices(layer.mlp, 16 if small else SLICE)

    def loss(self, module, tokens, split: bool):
        """Return the loss of this rank's tokens [1, T + 1], the last one a label: a share if ``split``, else the
        mean."""
        comm = self.comm if split else self.one

        def call(q, k, v, g):
            return allscan.zeco_gla(q, k, v, g, comm=comm)[0]

        with torch.autocast(tokens.device.type, self.dtype, enabled=self.dtype == torch.bfloat16):
            return module(tokens[:, :-1], tokens[:, 1:], call, comm)

    @contextlib.contextmanager
    def method(self, split: bool):
        yield

    def mine(self, T: int):
        """Return the positions of this rank's tokens."""
        return torch.arange(self.comm.rank * T, (self.comm.rank + 1) * T, device=self.comm.device)


class Hybrid:
    """A model of bench.hybrid in zigzag, and its two methods."""

    def __init__(self, comm, one, small: bool, family: str, offload: bool = False) -> None:
        self.kind = hybrid.Hybrid(family, 128 if family == "kimi_linear" else 0)
        self.comm, self.one, self.words = comm, one, 97 if small else hybrid.VOCABULARY
        self.offload = offload and comm.device.type == "cuda"
        sizes = (4, 64, 4, 16, 97) if small else (12, 2048, 16, 128, self.words)
        self.slice, dtype = 16 if small else SLICE, torch.float32 if comm.device.type == "cpu" else torch.bfloat16
        self.model = hybrid.made(self.kind, comm.device, dtype, *sizes)
        # each pass scans in both directions, and each layer's forward runs twice
        scans = 3 * self.model.config.layer_types.count("linear_attention")
        self.state, self.scans = self.kind.state(sizes[3]), (scans, scans)
        config, layers = self.model.config, self.model.config.layer_types.count("full_attention")
        key = getattr(config, "qk_head_dim", None) or config.head_dim
        self.softmax = layers * config.num_attention_heads * (key + getattr(config, "v_head_dim", key))

    def loss(self, module, tokens, split: bool):
        part = tokens[:, :-1]
        return module(input_ids=part, labels=part, use_cache=False).loss

    @contextlib.contextmanager
    def method(self, split: bool):
        from allscan.integrations.transformers import sequence_parallel

        comm, layout = (self.comm, "zigzag") if split else (self.one, "contiguous")
        how = dict(loss_in_slices=True, mlp_in_slices=self.slice)
        sequence_parallel(self.model, comm=comm, layout=layout, **how)
        self.model.activation_checkpointing_enable(dict(use_reentrant=False), offload=self.offload)
        yield
        sequence_parallel(self.model, comm=None)

    def mine(self, T: int):
        return zigzag_positions(T, comm=self.comm)


@contextlib.contextmanager
def opened(group, name: str, small: bool, **options):
    """Open the communicators and make the model ``name``."""
    with hybrid.communicators(group) as (comm, one), contextlib.ExitStack() as stack:
        if name == "gla":
            yield Gla(comm, one, small, **options)
            return
        stack.enter_context(hybrid.functions(hybrid.Hybrid(name, 128 if name == "kimi_linear" else 0), comm.device))
        yield Hybrid(comm, one, small, name, **options)


def check(group, name: str, T: int, options: dict) -> float:
    """Return the error of loss and gradients of a small model against one rank with the whole sequence."""
    with opened(group, name, True, **options) as trained:
        comm, whole = trained.comm, text(T * trained.comm.size, 97, trained.comm.device, 0)
        mine, found = trained.mine(T), []
        for split in (False, True):
            comm.step()
            tokens, before = whole, hybrid.scans(comm, trained.state)
            if split:
                own = whole[:, mine]
                tokens = torch.cat([own, whole[:, mine[-1:] + 1]], 1)
            with trained.method(split):
                loss = trained.loss(trained.model, tokens, split)
                loss.backward()
            prove(trained, split, before)
            gradients = [p.grad for p in trained.model.parameters() if p.grad is not None]
            found.append(torch.cat([loss.detach()[None], *(x.flatten() for x in gradients)]).float())
            trained.model.zero_grad()
        dist.all_reduce(found[1], group=comm.group)
        error = ((found[1] - found[0]).norm() / found[0].norm()).item()
        limit = 1e-4 if comm.device.type == "cpu" or name == "gla" else 5e-2
        if not error < limit:
            raise AssertionError(f"{name}, split, is wrong by {error}")
        comm.barrier()
        return error


def measure(group, name: str, T: int, steps: int, only, warm: int | None, options: dict) -> dict:
    """Return {method: (seconds of a step, peak GiB, parameters, proof, last loss, ms of softmax kernels, FLOPs of
    softmax layers in a forward pass)}."""
    with opened(group, name, False, **options) as trained:
        comm, model = trained.comm, trained.model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        wrapped = DistributedDataParallel(model, process_group=comm.group, gradient_as_bucket_view=True)
        data = text(T, trained.words, comm.device, comm.rank)
        methods = {name: split for name, split in METHODS.items() if name in only and (comm.size > 1 or not split)}
        times, kept, profiles = {method: [] for method in methods}, {}, {}

        def step(split: bool, tokens: int = T) -> float:
            comm.step()
            loss = trained.loss(wrapped, data[:, : tokens + 1], split)
            (loss * comm.size if split else loss).backward()  # gradients are averaged
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            return loss.item()

        def timed(method: str, tokens: int) -> None:
            before = hybrid.scans(comm, trained.state)
            torch.cuda.reset_peak_memory_stats()
            comm.barrier()
            start = time.perf_counter()
            loss = step(methods[method], tokens)
            times[method].append(time.perf_counter() - start)
            proof = prove(trained, methods[method], before)
            kept[method] = torch.cuda.max_memory_allocated() / (1 << 30), proof, loss

        for turn in range(steps + 1):
            for method in random.Random(turn).sample(list(methods), len(methods)):
                once = functools.partial(timed, method, T if turn else warm or T)
                with trained.method(methods[method]):
                    if turn and steps == 1 and trained.softmax:
                        profiles[method] = launched(once)
                    else:
                        once()
        answers = {}
        for method, split in methods.items():
            of_softmax = 0.0
            if trained.softmax:
                with trained.method(split):
                    of_softmax = breakdown(profiles.get(method) or launched(functools.partial(step, split)))["softmax"]
            peak, proof, loss = kept[method]
            parameters = sum(p.numel() for p in model.parameters())
            share = loss if not split else sum_over(comm, loss)
            if comm.rank == 0:
                print(f"{name}, {method}: {', '.join(f'{x:.2f}' for x in times[method])} s", flush=True)
            flops = trained.softmax * T * (T * comm.size if split else T)  # of one forward, causal
            answers[method] = statistics.median(times[method][1:]), peak, parameters, proof, share, of_softmax, flops
        return answers


def prove(trained, split: bool, before: tuple) -> str:
    """Return a sentence with the number of a step's scans of states since ``before``; AssertionError if others."""
    made = tuple(now - then for now, then in zip(hybrid.scans(trained.comm, trained.state), before))
    wanted = trained.scans if split else (0, 0)
    if made != wanted:
        raise AssertionError(f"All-Scan made {made} scans of states in a step, {wanted} are its own")
    return f"{sum(made)} scans of states by All-Scan in a step"


def sum_over(comm, x: float) -> float:
    total = torch.tensor(x, device=comm.device)
    dist.all_reduce(total, group=comm.group)
    return total.item()


def rows_of(name: str, answers: list, T: int, error: float, told: str):
    """Yield table rows from every rank's result of ``measure``, with the slowest rank's time."""
    for row in training_rows(answers, T):
        split, took = row["method"] == "split", row["step_ms"] / 1e3
        _, _, _, _, loss, ms, flops = answers[0][row["method"]]
        row |= dict(model=name, step_s=took, sequence=T * (len(answers) if split else 1), loss=loss)
        row["mfu_percent"] = 100 * (6 * row["parameters"] * T + 3 * flops) / took / PEAK
        # forward, once more for recomputation, and a backward of five products for two
        row |= dict(softmax_s=ms / 1e3 if ms else "", softmax_tflops=4.5 * flops / ms / 1e9 if ms else "")
        print(f"{name}: {took:.2f} s a step, MFU {row['mfu_percent']:.1f} %", flush=True)
        yield row | dict(max_error=error if split else "", method=row["method"] + told)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["gla"])
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks; default all GPUs")
    parser.add_argument("--tokens", type=int, nargs="+", default=[TOKENS], help="tokens per rank")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--warm", type=int, help="tokens per rank of the step before; default --tokens")
    parser.add_argument("--offload", action="store_true", help="keep the layers' inputs in the host's memory")
    parser.add_argument("--csv", default=results("long.csv"))
    arguments = parser.parse_args()
    options, told = dict(offload=arguments.offload), ", inputs on the host" if arguments.offload else ""
    if not torch.cuda.is_available():
        return check_on_cpus(functools.partial(check, options=options), arguments.model)
    counts = arguments.ranks or [torch.cuda.device_count()]
    measured = set(
        itertools.product(
            arguments.model, map(str, counts), map(str, arguments.tokens), [method + told for method in arguments.only]
        )
    )
    keep = lambda row: (row["model"], row["ranks"], row["T"], row["method"]) not in measured  # noqa: E731
    with Table(arguments.csv, COLUMNS, keep=keep) as table:
        for count, name in itertools.product(counts, arguments.model):
            with Ranks(count, "cuda") as ranks:  # all of them create hybrid.communicators' groups
                error = ranks.run(on_first, count, check, name, 600, options)[0] if count > 1 else 0.0
                for T in arguments.tokens:
                    asked = name, T, arguments.steps, arguments.only, arguments.warm, options
                    answers = ranks.run(on_first, count, measure, *asked, timeout=1800)[:count]
                    for row in rows_of(name, answers, T, error, told):
                        table.write(row)
                    ranks.run(hybrid.freed)
    print(f"wrote {arguments.csv}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
