"""Runs a long training under realistic conditions, with all faults that may occur in one injected now and then.

    PYTHONPATH=.:tests python -m support.soak      # all GPUs, 3,000 steps; without GPUs 100 on 2 CPU ranks

tests/test_soak.py runs 40 steps of it on CPU ranks.

A small GLA language model (a short convolution over allscan.halo, allscan.zeco_gla, MLP) is trained twice from the same
start on the same data: by all ranks with split sequences, and then by the first rank alone with whole ones. The first
training has

* DistributedDataParallel, whose all-reduces overlap with the scans of backward; activation checkpointing, of different
  layers in each step;
* two communicators: the layers', and one on its own stream, by which each rank gets its last label from the next rank;
* sequences that are packed differently in every step, with ``first_token`` or without, or not packed, and split at
  different places every time;
* stragglers;
* ranks that skip a batch or fail in the middle of it (FAULTS); all ranks are then notified, resync() both
  communicators, and repeat the step;
* checkpoints, in files; half way the whole training is deleted and restored from the last one;
* validation, under torch.no_grad() and, once, without.

Then it asserts: every loss equals that of the single rank; so do the parameters at every checkpoint; the loss has
fallen; all ranks have the same parameters; every fault was detected by every rank; neither the GPU's memory nor the
symmetric arena's has grown; no key is left in torch.distributed's store. Exit status 1, with the reason, if not.

The single rank compares itself with every checkpoint and continues from it. Over thousands of steps two trainings that
differ in the last bits diverge: unsplit, at width 64 and a learning rate of 3e-4, a relative noise of 1e-6 in the
results of the GLA layers became 1e-1 of the loss within 400 steps. With two layers of width 16 at 1e-2 noise grew from
1e-7 to 2e-2 in 32 steps. And if a head's output is nearly 0, an ordinary norm behind it amplifies rounding: on CPU
ranks, in the one step of a thousand with an output of 9e-4, a noise of 6e-8 in one rank's parameters became 1e-5 of the
losses within four steps, as between the two trainings. So that norm has a large eps.

A step fails without hanging a rank in an all-reduce of DistributedDataParallel: the gradients of attempts that will
fail are not reduced (``no_sync()``). A reducer whose backward stops half way on one rank cannot be used again, and the
other ranks' all-reduces would be paired with those of the next step. No rank steps the optimizer before all ranks have
confirmed their gradients in an all-reduce of one small tensor. So the parameters are unchanged, and to repeat the step
it is enough to zero the gradients.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import itertools
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import allscan
from allscan.tools.ranks import Ranks, on_first

# Faults of a step's victim. "before": skips the batch, and waits for the agreement. "next": skips it, and continues
# with another one. "argument": its last layer calls zeco_gla with a wrong dtype. "backward": raises in its backward.
# In the last two all layers are recomputed in backward: so the last rank, which does not wait in a reverse scan, waits
# for the victim in the recomputation, and detects the fault in the same step.
FAULTS = ("before", "next", "argument", "backward")
KINDS = ("whole", "packed", "first_token", "first_token")  # kinds of batches, equally frequent
TAPS = 2  # earlier tokens in a short convolution
VOCABULARY = 32
FILLED = 500  # steps after which a communicator's tables of the last 256 batches are full
TOLERANCE = 1e-3  # relative, of losses and parameters
GROWTH = 1 << 20  # allowed growth of GPU memory in bytes: tables of different lengths have different sizes


class SkippedBatch(Exception):
    """Raised by a rank that cannot use its batch."""


# The plan of a step


@dataclass(frozen=True)
class Plan:
    """The plan of a step, the same on all ranks."""

    step: int
    kind: str
    lengths: tuple[int, ...]  # cu_seqlens
    cuts: tuple[int, ...]  # rank r has tokens cuts[r] .. cuts[r + 1] - 1
    on_device: bool  # whether cu_seqlens is a tensor on the device, or a list
    again: tuple[int, ...]  # layers recomputed in backward
    late: tuple[int, float]  # rank, seconds
    fault: str | None
    victim: int


def plan(options, step, salt="") -> Plan:
    chance = random.Random(f"{salt}{step}")
    total = options.ranks * options.tokens
    number, place = divmod(step, options.fault_every)
    fault = FAULTS[number % len(FAULTS)] if place == options.fault_every // 2 else None
    kind = chance.choice(KINDS)
    if kind == "packed" and fault in ("before", "next") or salt:
        # Without first_token a rank exchanges T with the others, and waits 120 s for a missing rank.
        kind = "first_token"
    inner = sorted(
        chance.randint(0, total) for _ in range(chance.randrange(options.sequences))
    )  # some sequences may be empty
    spread = options.tokens // 4
    if kind == "packed":
        chance = random.Random(str(inner))  # without first_token equal cu_seqlens need equal cuts
    cuts = [r * options.tokens + chance.randint(-spread, spread) for r in range(1, options.ranks)]
    return Plan(
        step=step,
        kind=kind,
        lengths=(0, *inner, total) if kind != "whole" else (0, total),
        cuts=(0, *cuts, total),
        on_device=chance.random() < 0.5,
        again=tuple(i for i in range(options.layers) if chance.random() < 0.5 or fault in ("argument", "backward")),
        late=(chance.randrange(options.ranks), options.late * chance.random() * (chance.random() < 0.2)),
        fault=fault,
        victim=(number + number // len(FAULTS)) % options.ranks,
    )


def whole_tokens(planned: Plan) -> torch.Tensor:
    """Return the tokens of all sequences, int64 [total]. Each sequence counts up by its own stride, so that two tokens
    determine the next; one token in ten is random."""
    generator = torch.Generator().manual_seed(planned.step)
    total = planned.lengths[-1]
    tokens = torch.empty(total, dtype=torch.long)
    for begin, end in itertools.pairwise(planned.lengths):
        first, stride = torch.randint(VOCABULARY, (), generator=generator), torch.randint(1, 4, (), generator=generator)
        tokens[begin:end] = (first + stride * torch.arange(end - begin)) % VOCABULARY
    noise = torch.randint(VOCABULARY, (total,), generator=generator)
    return torch.where(torch.rand(total, generator=generator) < 0.1, noise, tokens)


class Batch:
    """A rank's part of a step."""

    def __init__(self, planned: Plan, comm):
        """Build this rank's part; on a communicator of one rank the whole batch."""
        total = planned.lengths[-1]
        self.first, self.end = (0, total) if comm.size == 1 else planned.cuts[comm.rank : comm.rank + 2]
        self.tokens = whole_tokens(planned)[self.first : self.end].to(comm.device)[None]
        sequences = [(begin, end) for begin, end in itertools.pairwise(planned.lengths) if begin < end]
        self.count = total - len(sequences)  # labels of all ranks: the last token of a sequence has none
        place = torch.cat([torch.arange(end - begin) for begin, end in sequences])[self.first : self.end]
        remain = torch.cat([torch.arange(end - begin).flip(0) for begin, end in sequences])[self.first : self.end]
        self.place, self.last = place.to(comm.device), (remain == 0).to(comm.device)
        self.packing = {}
        if planned.kind != "whole":
            lengths = list(planned.lengths)
            self.packing["cu_seqlens"] = torch.tensor(lengths, device=comm.device) if planned.on_device else lengths
        if planned.kind == "first_token":
            self.packing["first_token"] = self.first
        self.again = planned.again if comm.size > 1 else ()
        self.fault = None  # this rank's fault

    def labels(self, data) -> torch.Tensor:
        """Return the next token of each token, the last one from the next rank over the communicator ``data``."""
        after = allscan.halo(self.tokens, 1, comm=data, reverse=True, **self.packing)
        after = after.clamp(0, VOCABULARY - 1)  # after a time-out any value; cross_entropy on a GPU would abort
        return torch.cat([self.tokens[:, 1:], after], 1).masked_fill(self.last, -100)


# The model


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm, self.norm_heads = nn.RMSNorm(width), nn.RMSNorm(width // heads, eps=1e-2)  # eps: see above
        self.taps = nn.Parameter(torch.randn(TAPS, width) / 4)
        self.qkvg, self.out = nn.Linear(width, 4 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, x, batch, comm, wrong=False):
        h = self.norm(x)
        h = h + self.convolution(h, batch, comm)
        q, k, v, g = (t.unflatten(-1, (self.heads, -1)) for t in self.qkvg(h).chunk(4, -1))
        if wrong:
            v = v.double()
        o, _ = allscan.zeco_gla(q, F.normalize(k, dim=-1), v, F.logsigmoid(g + 3) / 4, comm=comm, **batch.packing)
        x = x + self.out(self.norm_heads(o).flatten(-2))
        return x + self.mlp(x)

    def convolution(self, h, batch, comm):
        T = h.shape[1]
        before = allscan.halo(h, TAPS, comm=comm, **batch.packing)  # 0 for tokens of another sequence
        longer = torch.cat([before, h], 1)
        own = torch.arange(T, device=h.device)
        total = 0.0
        for tap in range(1, TAPS + 1):
            other = (batch.place < tap) & (batch.place < own)  # tokens of the sequence before, inside this rank
            total = total + longer[:, TAPS - tap : TAPS - tap + T].masked_fill(other[:, None], 0.0) * self.taps[tap - 1]
        return total


class Model(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, options.width)
        self.layers = nn.ModuleList(Layer(options.width, options.heads) for _ in range(options.layers))
        self.norm, self.head = nn.RMSNorm(options.width), nn.Linear(options.width, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=options.width**-0.5)
        self.head.weight = self.embedding.weight

    def forward(self, batch, labels, comm):
        """Return this rank's share of the loss, the mean over all labels of the step."""
        x = self.embedding(batch.tokens)
        for i, layer in enumerate(self.layers):
            wrong = batch.fault == "argument" and i == len(self.layers) - 1
            if i in batch.again and torch.is_grad_enabled():
                x = checkpoint(layer, x, batch, comm, wrong, use_reentrant=False)
            else:
                x = layer(x, batch, comm, wrong)
            if batch.fault == "backward" and i == 0:
                x.register_hook(_fail)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten(), reduction="sum") / batch.count


def _fail(gradient):
    raise SkippedBatch("in backward")


# Training


class Training:
    """The state of a rank's training: everything that a checkpoint restores, and the communicators.

    group: the ranks that share sequences; control: a group of the same ranks, for the loop's own messages.
    """

    def __init__(self, options, group, control, timeout):
        self.options, self.control = options, control
        self.comm = allscan.Communicator(group, timeout=timeout)
        self.data = allscan.Communicator(group, timeout=timeout)
        self.device = self.comm.device
        self.side = torch.cuda.Stream() if self.device.type == "cuda" else None
        torch.manual_seed(0)
        self.model = Model(options).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr, eps=1e-4)  # eps: see train_text.py
        self.wrapped: nn.Module = self.model
        if self.comm.size > 1:
            self.wrapped = DistributedDataParallel(self.model, process_group=group, gradient_as_bucket_view=True)

    def save(self, path) -> None:
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, path)

    def load(self, path) -> float:
        """Load a checkpoint; return the relative difference of the parameters before."""
        state = torch.load(path, weights_only=True, map_location=self.device)
        before = self.parameters()
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return ((before - self.parameters()).norm() / before.norm()).item()

    def parameters(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    def close(self) -> None:
        self.comm.close()
        self.data.close()

    def labels(self, batch):
        if self.side is None:
            return batch.labels(self.data)
        current = torch.cuda.current_stream()
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            labels = batch.labels(self.data)
        current.wait_stream(self.side)
        labels.record_stream(current)
        batch.tokens.record_stream(self.side)
        return labels

    def begin(self) -> None:
        """Begin an iteration, before anything that may raise."""
        self.data.step()
        self.comm.step()

    def forward_backward(self, batch) -> torch.Tensor:
        """Run both passes; return this rank's share of the loss."""
        loss = self.wrapped(batch, self.labels(batch), self.comm)
        (loss * self.comm.size).backward()  # DistributedDataParallel averages instead of adding
        return loss.detach()

    def agree(self, loss, failed: bool) -> tuple[float, int]:
        """Return (the loss over all ranks, the number of ranks on which the step has failed)."""
        said = torch.stack([torch.as_tensor(x, dtype=torch.float64, device=self.device) for x in (loss, failed)])
        if self.comm.size > 1:
            dist.all_reduce(said, group=self.control)
        loss, failed = said.tolist()
        return loss, int(failed)

    def step(self, planned: Plan) -> float:
        """Run a step without a fault; return its loss."""
        batch = Batch(planned, self.comm)
        self.begin()
        self.be_late(planned)
        loss, failed = self.agree(self.forward_backward(batch), False)
        assert not failed
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def be_late(self, planned: Plan) -> None:
        if self.comm.size > 1 and planned.late[0] == self.comm.rank:
            time.sleep(planned.late[1])

    def failing_step(self, planned: Plan) -> str:
        """Run a step in which ``planned.victim`` fails, until all ranks know; return this rank's error."""
        batch, other = Batch(planned, self.comm), Batch(plan(self.options, planned.step, "other"), self.comm)
        error = None
        self.begin()
        try:
            # no_sync(): see above
            with self.wrapped.no_sync() if self.comm.size > 1 else contextlib.nullcontext():
                if self.comm.rank == planned.victim:
                    if planned.fault == "before":
                        raise SkippedBatch("before its first call")
                    if planned.fault == "next":
                        self.begin()
                        batch = other
                    batch.fault = planned.fault
                self.forward_backward(batch)
            self.comm.streams.synchronize()
            self.data.check()
            self.comm.check()
        except (RuntimeError, TypeError, ValueError, SkippedBatch) as problem:
            error = type(problem).__name__  # keeping the object would keep this attempt's tensors
        _, failed = self.agree(0.0, error is not None)
        if failed != self.comm.size:
            raise AssertionError(
                f"step {planned.step}, where rank {planned.victim} fails ({planned.fault}), was found by {failed} of "
                f"{self.comm.size} ranks; here: {error}"
            )
        self.optimizer.zero_grad()
        if self.comm.rank == planned.victim and planned.fault == "next":  # it returns to the others' batch
            for comm in (self.data, self.comm):
                if comm.order.missed_steps:
                    comm.order.missed_steps -= 1
                else:
                    comm.memory.steps.sub_(1)
        self.comm.resync()
        self.data.resync()
        assert error is not None
        return error

    def validate(self, planned: Plan, gradients: bool) -> float:
        """Return the loss of a validation batch. Not through DistributedDataParallel: with ``gradients`` its forward
        expects a backward."""
        with torch.set_grad_enabled(gradients):
            batch = Batch(planned, self.comm)
            loss = self.model(batch, self.labels(batch), self.comm).detach()
        return self.agree(loss, False)[0]

    def memory(self) -> dict:
        """Return the bytes allocated on the GPU and free in the arena, between two steps."""
        self.comm.streams.synchronize()
        gc.collect()
        gpu = torch.cuda.memory_allocated() if self.device.type == "cuda" else 0
        return dict(gpu=gpu, arena=self.comm.memory.heap.arena.free_bytes)


def validation_kind(options, step) -> str | None:
    """Return the validation after a step: None, "no_grad", or, once, "gradients"."""
    if (step + 1) % options.validate_every:
        return None
    return "gradients" if (step + 1) // options.validate_every == 2 else "no_grad"


def alone(group, options, folder) -> tuple[list[float], list[float], list[float]]:
    """Train on whole sequences on one rank, without faults; return (losses by step, losses of validation, differences
    of the parameters from each checkpoint)."""
    training = Training(options, group, group, 30.0)
    losses, validations, apart = [], [], []
    for step in range(options.steps):
        losses.append(training.step(plan(options, step)))
        if validation_kind(options, step):
            validations.append(training.validate(plan(options, step, "validation"), False))
        if (step + 1) % options.checkpoint_every == 0:
            apart.append(training.load(checkpoint_file(folder, step)))
            os.remove(checkpoint_file(folder, step))
    training.close()
    return losses, validations, apart


def checkpoint_file(folder, step) -> str:
    return os.path.join(folder, f"{step + 1}.pt")


def together(options, folder) -> dict:
    """Train over all ranks with all faults; return this rank's values for the assertions."""
    allscan.init()
    group, control = dist.group.WORLD, dist.new_group()
    warm_up(options, group, control)
    gc.collect()
    keys, free = keys_in_store(group), None
    losses, validations, errors = [], [], collections.Counter()
    skipped = resyncs = checkpoints = 0
    warm, half = None, options.steps // 2 // options.checkpoint_every * options.checkpoint_every
    training = Training(options, group, control, options.timeout)
    free = training.comm.memory.heap.arena.free_bytes  # before a first call
    start = time.perf_counter()
    for step in range(options.steps):
        planned = plan(options, step)
        if planned.fault:
            errors[training.failing_step(planned)] += 1
            skipped += planned.victim == training.comm.rank
            resyncs += 1
        losses.append(training.step(planned))
        if kind := validation_kind(options, step):
            validations.append(training.validate(plan(options, step, "validation"), kind == "gradients"))
        if step + 1 == warm_steps(options):
            warm = training.memory()
        if (step + 1) % options.checkpoint_every == 0:
            checkpoints += 1
            if training.comm.rank == 0:
                training.save(checkpoint_file(folder, step))
        if step + 1 == half:
            training.close()
            training = None
            gc.collect()
            dist.barrier(group)  # the file is written
            training = Training(options, group, control, options.timeout)
            training.load(checkpoint_file(folder, step))
        if training.comm.rank == 0 and (step + 1) % (options.steps // 10) == 0:
            print(f"  step {step + 1:5d}  loss {losses[-1]:.4f}  {time.perf_counter() - start:.0f} s", flush=True)
    seconds = time.perf_counter() - start
    end = training.memory()
    spread = spread_of_parameters(training, group)
    training.close()
    closed, heap = training.comm.memory.heap.arena.free_bytes, training.comm.memory.heap.arena
    del training
    return dict(
        losses=losses,
        validations=validations,
        errors=errors,
        skipped=skipped,
        resyncs=resyncs,
        spread=spread,
        checkpoints=checkpoints,
        seconds=seconds,
        warm=warm,
        end=end,
        free=free,
        closed=closed,
        arena=heap.size,
        keys=keys_in_store(group) - keys,
    )


def warm_steps(options) -> int:
    return FILLED if options.steps >= 2 * FILLED else options.steps // 4


def warm_up(options, group, control) -> None:
    """Run every kind of step, with a time-out that allows for compilation, and connect all groups."""
    training = Training(options, group, control, 120.0)
    by_kind = {plan(options, step).kind: step for step in range(64)}
    for step in by_kind.values():
        training.step(plan(options, step))
    training.validate(plan(options, 0), False)
    training.close()


def keys_in_store(group) -> int:
    """Return the number of keys in torch.distributed's store while all ranks are idle; 0 on all ranks but the first."""
    dist.barrier(group)
    number = dist.distributed_c10d._get_default_store().num_keys() if dist.get_rank() == 0 else 0
    dist.barrier(group)
    return number


def spread_of_parameters(training, group) -> float:
    """Return the largest difference of parameters between two ranks."""
    most, least = training.parameters(), training.parameters()
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    return (most - least).max().item()


# The checks


def difference(found, expected) -> float:
    """Return the largest relative difference of two lists of losses; infinite for a NaN."""
    assert len(found) == len(expected)
    apart = [abs(a / b - 1) for a, b in zip(found, expected)]
    return max((x if x == x else float("inf") for x in apart), default=0.0)


def check(options, expected, answers) -> None:
    """Raise AssertionError for a failed check."""
    losses, validations, apart_at_checkpoints = expected
    for number, apart in enumerate(apart_at_checkpoints, 1):
        step = number * options.checkpoint_every
        assert apart < TOLERANCE, f"the parameters after {step} steps differ by {apart:.1e} from those of one rank"
    for rank, found in enumerate(answers):
        who = f"rank {rank}"
        apart = [i for i, pair in enumerate(zip(found["losses"], losses)) if not difference(*zip(pair)) < TOLERANCE]
        assert not apart, (
            f"{who}: {len(apart)} of {options.steps} losses differ from those of one rank, first in step {apart[0]}: "
            f"{found['losses'][apart[0]]} instead of {losses[apart[0]]}"
        )
        worst = difference(found["validations"], validations)
        assert worst < TOLERANCE, f"{who}: a loss of validation differs by {worst:.1e}"
        assert found["spread"] == 0, f"the ranks' parameters differ by up to {found['spread']:.1e}"
        warm, end = found["warm"], found["end"]
        assert end["arena"] == warm["arena"], (
            f"{who}: {warm['arena']} bytes of the arena were free after {warm_steps(options)} steps, {end['arena']} at "
            "the end"
        )
        assert found["closed"] == found["free"], (
            f"{who}: {found['free']} bytes of the arena were free at the start, {found['closed']} after close()"
        )
        if memory_is_checked(options):
            grown = end["gpu"] - warm["gpu"]
            assert abs(grown) <= GROWTH, f"{who}: the GPU's memory has grown by {grown} bytes from {warm['gpu']}"
    keys = answers[0]["keys"]
    assert keys == 0, f"{keys} keys are left in the store"
    tenth = max(1, options.steps // 10)
    first, last = sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth
    assert last < first, f"nothing was learnt: the loss went from {first:.4f} to {last:.4f}"


def memory_is_checked(options) -> bool:
    return options.steps >= 2 * FILLED


def summary(options, expected, answers) -> str:
    found = answers[0]
    errors = sum((answer["errors"] for answer in answers), collections.Counter())
    skipped = sum(answer["skipped"] for answer in answers)
    raised = ", ".join(f"{count} {name}" for name, count in sorted(errors.items()))
    worst = difference(found["losses"] + found["validations"], expected[0] + expected[1])
    memory = f"{found['end']['gpu'] - found['warm']['gpu']:+d} bytes" if memory_is_checked(options) else "not checked"
    return (
        f"{len(found['losses'])} steps on {len(answers)} ranks in {found['seconds']:.0f} s, "
        f"{options.steps / found['seconds']:.1f} steps/s; {skipped} batches skipped ({raised}), {found['resyncs']} "
        f"resyncs, {found['checkpoints']} checkpoints, 1 resumed, {len(found['validations'])} validations; losses "
        f"{sum(found['losses'][:10]) / 10:.3f} to {sum(found['losses'][-10:]) / 10:.3f}, at most {worst:.1e} from one "
        f"rank's, parameters {max(expected[2]):.1e}; the GPU's memory since step {warm_steps(options)}: {memory}"
    )


def soak(options) -> tuple[str, list[dict]]:
    """Run all checks; return (the summary, each rank's results)."""
    with Ranks(options.ranks, options.device) as ranks, tempfile.TemporaryDirectory() as folder:
        answers = ranks.run(together, options, folder, timeout=options.limit)
        start = time.perf_counter()
        expected = ranks.run(on_first, 1, alone, options, folder, timeout=options.limit)[0]
        print(f"  one rank alone: {time.perf_counter() - start:.0f} s", flush=True)
    text = summary(options, expected, answers)
    print(text, flush=True)
    check(options, expected, answers)
    return text, answers


DEFAULTS = dict(  # on GPUs, on CPUs; tokens: average of a rank; sequences: most of a packed batch; late: in seconds
    steps=(3000, 100),
    tokens=(1024, 16),
    layers=(2, 1),
    width=(256, 16),
    heads=(4, 1),
    sequences=(6, 2),
    lr=(1e-4, 1e-2),
    fault_every=(100, 25),
    checkpoint_every=(50, 20),
    validate_every=(100, 20),
    late=(0.05, 0.05),
    timeout=(2.0, 6.0),  # of the communicators
    limit=(1200.0, 1200.0),  # seconds for each of the two trainings
)


def parsed(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--ranks", type=int, help="default: all GPUs, or 2 CPU processes")
    for name, (on_gpus, on_cpus) in DEFAULTS.items():
        text = f"default {on_gpus}, on CPUs {on_cpus}"
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(on_gpus), help=text)
    options = parser.parse_args(arguments)
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.device_count() > 1 else "cpu"
    cuda = options.device == "cuda"
    for name, (on_gpus, on_cpus) in [*DEFAULTS.items(), ("ranks", (torch.cuda.device_count(), 2))]:
        if getattr(options, name) is None:
            setattr(options, name, on_gpus if cuda else on_cpus)
    if options.ranks < 2 or options.steps < 40 or options.tokens < 8:
        parser.error("at least 2 ranks, 40 steps and 8 tokens")
    if options.checkpoint_every > options.steps // 2:
        parser.error("a checkpoint in the first half of the steps")
    return options


def main() -> int:
    options = parsed()
    where = "GPUs" if options.device == "cuda" else "CPU processes, kernels in Triton's interpreter"
    print(f"{options.steps} steps of {options.tokens} tokens a rank on {options.ranks} {where}")
    try:
        soak(options)
    except AssertionError as problem:
        print(f"FAILED: {problem}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
