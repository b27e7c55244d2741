"""Measures training of Megatron-core's hybrids of Mamba2, Gated DeltaNet, softmax attention and MLPs over several GPUs.

    python -m bench.megatron            # all GPUs of this machine; writes bench/results/megatron.csv; needs fla
    python -m bench.megatron --pattern "MG*-MG*-" --tokens 8192

HybridModel of megatron-core, layers by their letters in --hybrid-layer-pattern (M: Mamba2, G: Gated DeltaNet,
*: softmax attention, -: MLP), width 2,048, a vocabulary of 8,192, random weights, bfloat16, T tokens a rank, torch's
DistributedDataParallel and AdamW, called from Python. Methods:

* allscan, zigzag: allscan.integrations.megatron; two states are sent; Megatron's own layout;
* allscan: the same in consecutive tokens; one state;
* all-to-all: Megatron's own mixers under context parallelism, with all-to-all from tokens to heads and back;
* data parallel: a sequence of T tokens a rank, by the ordinary model: 100 %. Its softmax layers have fewer keys.

All methods use the same kernels in Mamba2 and Gated DeltaNet: a rank that computes a layer alone, all its heads or some
of them, calls allscan's operator on one rank in place of mamba_ssm's chunk scan, and of fla's rule, whose backward fla
rejects on Hopper before Triton 3.7.1. Other stand-ins, also the same for all methods, since neither mamba_ssm nor
Transformer Engine is required (column ``stand_ins``; see tests/support/megatron.py): for mamba_ssm's gated norm and
Transformer Engine's norm torch's; for Transformer Engine's attention that of allscan.integrations.attention, which
gathers keys, also with Megatron's all-to-all. Functions that Megatron compiles with torch.compile run eagerly.

The methods alternate step by step in a new order each time; a time is the median step of the slowest rank. They are
checked first on a small model: loss and gradients against one rank with the whole sequence. Afterwards the kernels of
one more step prove which method ran, for allscan also its counted scans (column ``proof``, of rank 0). Without GPUs
only the check runs, on 2 CPU ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import random
import statistics
import sys
import time
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import allscan
from allscan.tools.ranks import Ranks, on_first
from allscan.zigzag import zigzag_positions
from bench.harness import Table, results
from bench.hybrid import communicators, freed, kill
from bench.model import text, training_rows
from bench.proof import DELTA_STATES, kernels, ran

STEPS, CHECKED, VOCABULARY = 7, 512, 8192  # measured steps; tokens per rank in the check
PATTERNS = "MG*-MG*-", "GGGG", "MMMM"
COLUMNS = (
    "pattern",
    "method",
    "stand_ins",
    "ranks",
    "T",
    "parameters",
    "step_ms",
    "tokens_per_s_per_gpu",
    "percent_of_data_parallel",
    "peak_gib",
    "max_error",
    "proof",
    "gpu",
    "torch",
    "triton",
    "sources",
)
METHODS = ("allscan, zigzag", "allscan", "all-to-all")
STAND_INS = {"M": "scan of a rank alone, gated norm", "G": "rule of a rank alone", "*": "core attention"}
RECURRENT = {"M": "ssd_output_kernel", "G": "|".join(DELTA_STATES)}  # a kernel of the layer in every method
STATES, STATES_ON_CPU = ((128, 64), (128, 128)), ((6, 4), (8, 8))  # (rows, columns), which identify scans


class Shape(NamedTuple):
    """Sizes of a model; the states of its heads are STATES, on CPUs STATES_ON_CPU."""

    pattern: str
    width: int = 2048
    heads: int = 16
    cpu: bool = False

    def options(self) -> dict[str, Any]:
        """Return options of Megatron's configuration."""
        (N, P), (K, V) = STATES_ON_CPU if self.cpu else STATES
        sizes = dict(
            hidden_size=self.width,
            num_attention_heads=self.heads,
            kv_channels=16 if self.cpu else 128,
            ffn_hidden_size=4 * self.width,
            linear_num_key_heads=self.heads,
            linear_num_value_heads=2 * self.heads,
            linear_key_head_dim=K,
            linear_value_head_dim=V,
            mamba_num_heads=2 * self.heads,
            mamba_head_dim=P,
            mamba_state_dim=N,
            mamba_num_groups=2,
            deterministic_mode=False,
            perform_initialization=False,  # weights are drawn afterwards
        )
        return sizes | ({} if self.cpu else dict(bf16=True, params_dtype=torch.bfloat16))

    def stand_ins(self) -> str:
        return "; ".join(["norms", *(what for letter, what in STAND_INS.items() if letter in self.pattern)])


def support():
    """Import tests/support/megatron.py."""
    from support import megatron

    return megatron


@contextlib.contextmanager
def stand_ins(one):
    """Set the stand-ins of all methods. one: the communicator of this rank alone."""
    from megatron.core.ssm import mamba_mixer

    alone = functools.partial(allscan.zeco_ssd, comm=one)
    with support().stand_ins(), mock.patch.object(mamba_mixer, "mamba_chunk_scan_combined", alone):
        yield


def rule_alone(one, q, k, v, g, beta, use_qk_l2norm_in_kernel=False, **_):
    """Replace fla's chunk_gated_delta_rule on a rank with all tokens of some heads."""
    tensors = [x.contiguous() for x in (q, k, v, g, beta)]
    return allscan.zeco_gated_delta_rule(*tensors, comm=one, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)


def made(name, shape, comm, one):
    """Create the model for a method, with the same weights for all."""
    from allscan.integrations.megatron import sequence_parallel

    megatron, alone = support(), name == "data parallel"
    layout = "contiguous" if name == "allscan" else "zigzag"
    spec = megatron.specification(attention=dict(comm=None if alone else comm, layout=layout))
    if name.startswith("allscan"):
        spec = sequence_parallel(spec, layout=layout, comm=comm)
    group = None if alone else comm.group
    model = megatron.model(spec, group, pattern=shape.pattern, vocabulary=VOCABULARY, **shape.options())
    if not name.startswith("allscan"):
        for module in model.modules():
            if hasattr(module, "gated_delta_rule"):
                module.gated_delta_rule = functools.partial(rule_alone, one)
    return model


def scans(comm) -> tuple[int, int]:
    """Return the number of All-Scan's scans of states on this rank, forward and reverse."""
    counted = [scan.epochs for scan in comm.collectives if tuple(scan.shape[-2:]) in STATES + STATES_ON_CPU]
    ascending, descending = map(sum, zip((0, 0), *counted))
    return ascending, descending


def prove_scans(name, shape, comm, before) -> None:
    """Raise AssertionError unless a step made the method's scans: see bench.hybrid."""
    made_now = tuple(now - then for now, then in zip(scans(comm), before, strict=True))
    layers = sum(letter in RECURRENT for letter in shape.pattern)
    wanted = layers * {"allscan": 1, "allscan, zigzag": 2}.get(name, 0)
    if made_now != (wanted, wanted):
        raise AssertionError(f"{name}: All-Scan made {made_now} scans of states in a step, {wanted} each are its own")


def seen(shape) -> dict:
    """Return by method the kernels that a step must run, and those that it must not."""
    gathers = {"AllGather": None, "ReduceScatter": None} if "*" in shape.pattern else {}
    rules = {kernel: None for letter, kernel in RECURRENT.items() if letter in shape.pattern}
    no_gathers = () if gathers else ("AllGather", "ReduceScatter")
    ours = {**rules, **gathers}, ("SendRecv", *no_gathers)
    return {
        "allscan, zigzag": ours,
        "allscan": ours,
        "all-to-all": ({"SendRecv": None, **rules, **gathers}, no_gathers),
        "data parallel": ({"AllReduce": None, **rules}, ("SendRecv", "AllGather", "ReduceScatter")),
    }


def check(group, shape, names, T) -> dict:
    """Return {method: largest relative error of the loss and of each weight's gradient} of a small model against one
    rank with the whole sequence."""
    with communicators(group) as (comm, one), stand_ins(one):
        limit = 1e-4 if shape.cpu else 0.1  # worst of many weights in bfloat16; without a state the error is 0.6
        whole = text(T * comm.size, VOCABULARY, comm.device, 0)
        tokens, labels = whole[:, :-1], whole[:, 1:]
        errors, expected = {}, None
        for name in ("data parallel", *names):
            comm.step()
            model = made(name, shape, comm, one)
            mine = torch.arange(comm.rank * T, (comm.rank + 1) * T, device=comm.device)
            mine = mine if name == "allscan" else zigzag_positions(T, comm=comm)
            mine, before = slice(None) if expected is None else mine, scans(comm)
            loss = model(tokens[:, mine], None, None, labels=labels[:, mine]).float().sum() / labels.numel()
            loss.backward()
            prove_scans(name, shape, comm, before)
            grads = [p.grad.float() for p in model.parameters() if p.ndim > 1]  # vectors' gradients suffer cancellation
            found = [loss.detach().float(), *grads]
            if expected is None:
                expected = found
                continue
            for x in found:
                dist.all_reduce(x, group=comm.group)
            errors[name] = max(((x - y).norm() / y.norm()).item() for x, y in zip(found, expected, strict=True))
            if not errors[name] < limit:
                raise AssertionError(f"{name} is wrong by {errors[name]}")
        comm.barrier()
        return errors


def measure(group, shape, names, T, steps) -> dict:
    """Return {method: (seconds of a step, peak GiB, parameters, proof)}."""
    with communicators(group) as (comm, one), stand_ins(one):
        names, models = (*names, "data parallel"), {}
        whole = text(T, VOCABULARY, comm.device, comm.rank)
        data, labels = whole[:, :-1], whole[:, 1:]
        for name in names:
            model = made(name, shape, comm, one)
            wrapped = DistributedDataParallel(model, process_group=comm.group, gradient_as_bucket_view=True)
            models[name] = wrapped, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        others = torch.cuda.memory_allocated() * (len(names) - 1) / len(names)  # memory of the other methods' models
        times: dict[str, list[float]] = {name: [] for name in names}
        peaks, proofs = {}, {}

        def step(name):
            wrapped, optimizer = models[name]
            comm.step()
            wrapped(data, None, None, labels=labels).float().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()

        for turn in range(steps + 2):
            for name in random.Random(turn).sample(names, len(names)):
                before = scans(comm)
                torch.cuda.reset_peak_memory_stats()
                comm.barrier()
                start = time.perf_counter()
                step(name)
                times[name].append(time.perf_counter() - start)
                peaks[name] = torch.cuda.max_memory_allocated()
                prove_scans(name, shape, comm, before)
                if turn == 0:  # the optimizer's moments exist from now on
                    others += sum(2 * p.nbytes for p in models[name][0].parameters()) * (len(names) - 1) / len(names)
        for name in names:
            comm.barrier()
            proofs[name] = ran(name, kernels(functools.partial(step, name)), *seen(shape)[name])
        parameters = sum(p.numel() for p in models[names[0]][0].parameters())
        return {
            name: (statistics.median(times[name][2:]), (peaks[name] - others) / (1 << 30), parameters, proofs[name])
            for name in names
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, help="default all GPUs; must divide the heads")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192], help="tokens per rank")
    parser.add_argument("--pattern", nargs="+", default=PATTERNS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=METHODS, help="methods besides data parallel")
    parser.add_argument("--csv", default=results("megatron.csv"))
    arguments = parser.parse_args()
    names, count = tuple(arguments.only), arguments.ranks or torch.cuda.device_count()
    if torch.cuda.device_count() < 2:
        print("No two GPUs here: a check of every method on 2 CPU ranks.")
        with Ranks(2, "cpu") as ranks:
            for name, error in ranks.run(check, None, Shape("MG*-", 32, 2, True), names, 24)[0].items():
                print(f"{name:22} error {error:.1e}")
        return 0
    failed, ranks = False, Ranks(count, "cuda")
    with Table(arguments.csv, COLUMNS) as table:
        for shape in map(Shape, arguments.pattern):
            try:
                small = shape._replace(width=256)
                errors = ranks.run(on_first, count, check, small, names, CHECKED, timeout=570.0)[0]
                print(shape.pattern, "errors", {name: f"{error:.1e}" for name, error in errors.items()}, flush=True)
                for T in arguments.tokens:
                    answers = ranks.run(on_first, count, measure, shape, names, T, arguments.steps, timeout=570.0)
                    for row in training_rows(answers, T):
                        row |= dict(pattern=shape.pattern, stand_ins=shape.stand_ins())
                        table.write(row | dict(max_error=errors.get(row["method"], "")))
                    ranks.run(freed)
            except RuntimeError as error:  # from the ranks; some may still wait for others
                failed = True
                print(f"{shape.pattern}: {error}", file=sys.stderr, flush=True)
                kill(ranks)
                ranks = Ranks(count, "cuda")
    ranks.close()
    print(f"wrote {arguments.csv}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
