"""Random calls of allscan_segments, against the package's reference."""

from __future__ import annotations

import torch
import torch.distributed as dist

import allscan
from allscan.reference import allscan_segments_reference

from .draw import AUTOCAST, TIMEOUT, Draw, autocast, draw_memory, draw_wanted, off, told
from .scan_calls import draw_shape, draw_state

INPUTS = ("states", "factor", "initial")


class SegmentsCall:
    """One call; in the zigzag layout each rank has two chunks of segments."""

    def __init__(self, draw, size, debug):
        self.zigzag = draw.happens(0.4)
        chunks = size * (1 + self.zigzag)
        self.own = [[p, chunks - 1 - p][: 1 + self.zigzag] for p in range(size)]
        self.counts = [draw.choice([0, 0, 1, 1, 2, 5]) for _ in range(chunks)]
        self.shape, self.reverse = (draw.randint(1, 2), *draw_shape(draw)[-2:]), not self.zigzag and draw.happens(0.5)
        self.kind = draw.choice(["none", "number", "rows", "rows", "heads", "transitions"])
        self.wanted = draw_wanted(draw, INPUTS) if draw.happens(0.8) else set()
        tensors = self.kind in ("rows", "heads", "transitions")
        initial = draw_state(draw, self.shape, False) if draw.happens(0.5) else None
        if not tensors:
            self.wanted.discard("factor")
        if initial is None:
            self.wanted.discard("initial")
        special = not self.wanted and not debug and self.kind != "transitions" and draw.happens(0.5)
        *lead, K, V = self.shape
        of_initial = None if initial is None else draw_memory(draw, initial)
        self.inputs, self.memories = [], []
        for n in self.counts:
            factor = {"none": None, "number": 0.7}.get(self.kind)
            if self.kind == "transitions":
                factor = draw.normal(n, *lead, K, K) / (2 * K**0.5)
            elif tensors:
                factor = draw.uniform_tensor(n, *lead, *[K] * (self.kind == "rows"))
                pick = draw.uniform_tensor(*factor.shape)
                factor[pick < 0.2], factor[pick > 0.8] = 0.0, 1.0
            inputs = draw_state(draw, (n, *self.shape), special), factor
            memories = [draw_memory(draw, x) if isinstance(x, torch.Tensor) else None for x in inputs] + [of_initial]
            of_chunk = zip(memories, (*inputs, initial), strict=True)
            self.inputs.append([x if m is None else m.alike(x) for m, x in of_chunk])
            self.memories.append(memories)
        weights = [(draw.normal(n, *self.shape), draw.normal(*self.shape)) for n in self.counts]
        self.of_weights = [[draw_memory(draw, x) for x in pair] for pair in weights]
        of_chunks = zip(self.of_weights, weights, strict=True)
        self.weights = [[m.alike(x) for m, x in zip(*pair, strict=True)] for pair in of_chunks]
        self.used = [draw.choice([[0], [1], [0, 1]]) for _ in range(size)]  # incoming, outgoing
        self.autocast = draw.choice(AUTOCAST)
        self.text = (
            f"segments {self.counts}, zigzag={self.zigzag}, shape {self.shape}, reverse={self.reverse}, {self.kind}, "
            f"initial={initial is not None}, {special=}, gradients of {sorted(self.wanted)}, used {self.used}, "
            f"autocast={self.autocast}, memory of [states, factor, initial] "
            f"{[[str(m) for m in some] for some in self.memories]}, of weights "
            f"{[[str(m) for m in some] for some in self.of_weights]}"
        )

    def leaves(self, chunk, convert):
        return [
            convert(x, m).requires_grad_(name in self.wanted) if isinstance(x, torch.Tensor) else x
            for name, x, m in zip(INPUTS, self.inputs[chunk], self.memories[chunk], strict=True)
        ]

    def named(self, factors):
        name = "transitions" if self.kind == "transitions" else "decays"
        return {name: None if self.kind == "none" else factors}

    def expected(self):
        """(incoming and outgoing of each chunk, gradients of each chunk's inputs)."""
        leaves = [self.leaves(c, lambda x, m: x.double().clone()) for c in range(len(self.counts))]
        for of_chunk in leaves[1:]:
            of_chunk[2] = leaves[0][2]
        states, factors, (initial, *_) = map(list, zip(*leaves, strict=True))
        found = allscan_segments_reference(states, initial_state=initial, reverse=self.reverse, **self.named(factors))
        if self.wanted:
            places = [(i, c) for own, used in zip(self.own, self.used, strict=True) for c in own for i in used]
            loss = sum((found[i][c] * self.weights[c][i].double()).sum() for i, c in places)
            if loss.requires_grad:
                loss.backward()
        return found, leaves

    def check(self, comm):
        own = self.own[comm.rank]
        leaves = [self.leaves(c, lambda x, m: m.of(x.to(comm.device))) for c in own]
        for of_chunk in leaves[1:]:
            of_chunk[2] = leaves[0][2]
        states, factors, (initial, *_) = map(list, zip(*leaves, strict=True))
        if not self.zigzag:
            states, factors = states[0], factors[0]
        options = dict(layout="zigzag") if self.zigzag else dict(reverse=self.reverse)
        with autocast(self.autocast):
            found = allscan.allscan_segments(states, comm=comm, initial_state=initial, **self.named(factors), **options)
        found = found if self.zigzag else [(x,) for x in found]
        expected, laws = self.expected()
        for name, chunks, law in zip(("incoming", "outgoing"), found, expected, strict=True):
            for place, c in enumerate(own):
                assert off(chunks[place], law[c].detach()) < 1e-5, (name, c, chunks[place], law[c])
        if not self.wanted:
            return
        places = [(i, place, c) for place, c in enumerate(own) for i in self.used[comm.rank]]
        weights = [self.of_weights[c][i].of(self.weights[c][i].to(comm.device)) for i, _, c in places]
        torch.autograd.backward([found[i][place] for i, place, _ in places], weights)
        first = comm.rank == (comm.size - 1 if self.reverse else 0)
        for place, c in enumerate(own):
            for name, leaf, law in zip(INPUTS, leaves[place], laws[c], strict=True):
                if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
                    assert getattr(leaf, "grad", None) is None, name
                    continue
                wanted = torch.zeros_like(law) if law.grad is None or (name == "initial" and not first) else law.grad
                assert off(leaf.grad, wanted) < 2e-5, ("gradient of " + name, c, leaf.grad, wanted)


def segments_case(group, seed):
    draw, size = Draw("segments", seed), dist.get_world_size(group)
    debug = draw.happens(0.2)
    with told(seed, f"allscan_segments on {size} ranks"):
        with allscan.Communicator(group, timeout=TIMEOUT, debug=debug) as comm:
            for number in range(draw.randint(2, 4)):
                call = SegmentsCall(draw, size, debug)
                with told(seed, f"call {number}, {debug=}", call.text):
                    call.check(comm)
