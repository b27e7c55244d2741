"""Segments of a sequence that is split over ranks: compares allscan_segments with its definition, and bit by bit."""

from __future__ import annotations

from typing import NamedTuple

import torch

import allscan
from allscan.reference import allscan_segments_reference

from .values import late


def integers(x):
    """View x as integers on its device, for comparisons that distinguish -0.0 from 0.0 and equate NaN with itself."""
    return x.detach().contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def bits(x):
    """Return ``integers(x)`` on the CPU."""
    return integers(x).cpu()


class SegmentsCase(NamedTuple):
    """Segments over the ranks. counts: number of segments per rank; in the zigzag layout per chunk, two chunks per
    rank. factor: "rows" ([n, ..., K]), "heads" ([n, ...]), "number", "none" or "transitions"."""

    counts: tuple[int, ...]
    shape: tuple[int, ...] = (2, 5, 20)
    factor: str = "rows"
    reverse: bool = False
    initial: bool = True
    special: bool = False  # whether there are NaN, Inf and -0
    seed: int = 0


class Sequence:
    """The whole sequence, the same on every rank, on the CPU."""

    def __init__(self, case: SegmentsCase):
        self.case, total = case, sum(case.counts)
        generator = torch.Generator().manual_seed(case.seed)
        *lead, K, V = shape = case.shape
        self.states = torch.randn(total, *shape, generator=generator)
        self.of_incoming = torch.randn(total, *shape, generator=generator)
        self.of_outgoing = torch.randn(shape, generator=generator)
        self.initial = torch.randn(shape, generator=generator) if case.initial else None
        self.factor = None
        if case.factor == "transitions":
            self.factor = torch.randn(total, *lead, K, K, generator=generator) / K**0.5
        elif case.factor in ("rows", "heads"):
            self.factor = torch.rand(total, *lead, *[K] * (case.factor == "rows"), generator=generator)
            pick = torch.rand(self.factor.shape, generator=generator)
            self.factor[pick < 0.1] = 0.0
            self.factor[pick > 0.9] = 1.0
        if case.special:
            pick = torch.rand(self.states.shape, generator=generator)
            self.states[pick < 0.2] = -0.0
            self.states[(pick > 0.2) & (pick < 0.25)] = float("inf")
            self.states[(pick > 0.25) & (pick < 0.3)] = float("nan")
            if self.initial is not None:
                self.initial[self.initial > 0.5] = -0.0

    def named(self, factor):
        """Return the factor as a keyword argument."""
        number = {"number": 0.7}.get(self.case.factor, factor)
        return {"transitions": factor} if self.case.factor == "transitions" else {"decays": number}

    def reference(self):
        """Return [incoming, final state, dstates, dfactor, dinitial] of the whole sequence on one rank, float64."""
        leaves = [None if x is None else x.double().requires_grad_() for x in (self.states, self.factor, self.initial)]
        states, factor, initial = leaves
        given = {name: x if x is None else [x] for name, x in self.named(factor).items()}
        incoming, outgoing = allscan_segments_reference(
            [states], initial_state=initial, reverse=self.case.reverse, **given
        )
        ((incoming[0] * self.of_incoming).sum() + (outgoing[0] * self.of_outgoing).sum()).backward()
        return [incoming[0], outgoing[0], *(x if x is None else x.grad for x in leaves)]


def segments_case(group, case: SegmentsCase, zigzag=False, most_ms=0, options=None):
    """Return this rank's [incoming, outgoing, dstates, dfactor, dinitial] of its segments. The loss includes the state
    after the very last segment once."""
    with allscan.Communicator(group, **options or {}) as comm:
        whole, P = Sequence(case), comm.size
        ends = torch.tensor([0, *case.counts]).cumsum(0).tolist()
        chunks = (comm.rank, 2 * P - 1 - comm.rank) if zigzag else (comm.rank,)
        mine = [slice(ends[chunk], ends[chunk + 1]) for chunk in chunks]
        assert len(case.counts) == P * len(chunks)

        def own(x, place):
            return None if x is None else x[place].to(comm.device).requires_grad_()

        states, factors = ([own(x, place) for place in mine] for x in (whole.states, whole.factor))
        initial = None if whole.initial is None else whole.initial.to(comm.device).requires_grad_()
        if case.factor == "number":
            factors = [0.7 for _ in mine]
        name = "transitions" if case.factor == "transitions" else "decays"
        given = [states, None if factors[0] is None else factors]
        if not zigzag:
            given = [x if x is None else x[0] for x in given]
        late(case.seed, comm.rank, most_ms)
        incoming, outgoing = allscan.allscan_segments(
            given[0],
            comm=comm,
            initial_state=initial,
            layout="zigzag" if zigzag else "contiguous",
            reverse=case.reverse,
            **{name: given[1]},
        )
        incoming, outgoing = (x if zigzag else (x,) for x in (incoming, outgoing))
        loss = sum((x * whole.of_incoming[place].to(comm.device)).sum() for x, place in zip(incoming, mine))
        last = 0 if zigzag or case.reverse else P - 1
        loss = loss + (outgoing[-1] * whole.of_outgoing.to(comm.device) * (comm.rank == last)).sum()
        late(case.seed + 1, comm.rank, most_ms)
        loss.backward()
        comm.barrier()
        grads = [
            torch.cat([x.grad for x in found]) if torch.is_tensor(found[0]) else None for found in (states, factors)
        ]
        found = [torch.cat(incoming), outgoing[-1], *grads, None if initial is None else initial.grad]
        return [None if x is None else x.detach().cpu() for x in found]


def whole_of(parts, zigzag=False, reverse=False):
    """Join the ranks' results in the order of the sequence: incoming, final state, dstates, dfactor, dinitial."""
    first = len(parts) - 1 if reverse else 0
    last = 0 if zigzag or reverse else len(parts) - 1
    return [
        cat([part[0] for part in parts]),
        parts[last][1],
        cat([part[2] for part in parts]),
        cat([part[3] for part in parts]),
        parts[first][4],
    ]


def cat(found):
    return None if found[0] is None else torch.cat(found)


def local_folds_case(comm, counts, shape, seed):
    """Run the control: each rank folds its own segments, then allscan. Return the rank's outgoing state."""
    whole = Sequence(SegmentsCase(counts, shape, initial=False, seed=seed))
    ends = torch.tensor([0, *counts]).cumsum(0).tolist()
    state, decay = torch.zeros(shape), torch.ones(shape[:-1])
    for s in range(ends[comm.rank], ends[comm.rank + 1]):
        state, decay = whole.factor[s][..., None] * state + whole.states[s], decay * whole.factor[s]
    prev = allscan.allscan(state.to(comm.device), decay.to(comm.device), comm=comm).cpu()
    return decay[..., None] * prev + state
