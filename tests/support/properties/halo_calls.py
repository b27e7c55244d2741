"""Random calls of halo(), and their law."""

from __future__ import annotations

import itertools
import time

import torch
import torch.distributed as dist

import allscan

from ..values import chunks
from .draw import AUTOCAST, TIMEOUT, Draw, autocast, draw_memory, off, same, told
from .sharding import Sharding

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float32", "bfloat16", "float16")


def draw_numbers(draw, dtype, *shape):
    """Integers over their full range, with those at its ends; floats with Inf and NaN."""
    kind = getattr(torch, dtype)
    if dtype in INTEGERS:
        bits = torch.randint(-(2**63), 2**63 - 1, shape, generator=draw.generator())
        pick = draw.uniform_tensor(*shape)
        width = 8 * kind.itemsize
        ends = [0, -1, 1, 1 << 31, -(1 << 31), 1 << 16, (1 << (width - 1)) - 1, -(1 << (width - 1)), 0x80008000]
        for i, value in enumerate(ends):
            bits[(pick > 0.05 * i) & (pick < 0.05 * (i + 1))] = value
        signed = bits.to(getattr(torch, dtype.removeprefix("u")))  # the low bits
        return signed.view(kind)
    x = draw.normal(*shape) * 10.0 ** draw.choice([-40, -6, 0, 3])
    pick = draw.uniform_tensor(*shape)
    for i, value in enumerate((0.0, -0.0, float("inf"), float("-inf"), float("nan"))):
        x[(pick > 0.04 * i) & (pick < 0.04 * (i + 1))] = value
    return x.to(kind)


class HaloCall:
    def __init__(self, draw, size, contiguous=False):
        self.n, packed = draw.choice([1, 1, 2, 3, 5]), draw.happens(0.4)
        self.cut = Sharding(draw, size, packed, contiguous=contiguous)
        self.total, self.reverse = self.cut.total, draw.happens(0.5)
        self.lengths = self.cut.lengths
        B = 1 if packed else draw.randint(1, 3)
        self.several = draw.happens(0.4)
        self.dtypes = [draw.choice(INTEGERS + 3 * FLOATS) for _ in range(draw.randint(1, 3) if self.several else 1)]
        rests = [[draw.randint(1, 5) for _ in range(draw.choice([0, 1, 1, 2]))] for _ in self.dtypes]
        wholes = [draw_numbers(draw, d, B, self.total, *rest) for d, rest in zip(self.dtypes, rests, strict=True)]
        self.memories = [draw_memory(draw, x) for x in wholes]
        self.wholes = [m.alike(x) for m, x in zip(self.memories, wholes, strict=True)]
        self.wanted = [d in FLOATS and draw.happens(0.5) for d in self.dtypes]
        rows = self.n * len(self.boundaries(0))
        weights = [
            [draw.normal(B, rows, *rest).to(getattr(torch, d)) if d in FLOATS else None for _ in range(size)]
            for d, rest in zip(self.dtypes, rests, strict=True)
        ]
        self.of_weights = [draw_memory(draw, some[0]) if some[0] is not None else None for some in weights]
        of_each = zip(self.of_weights, weights, strict=True)
        self.weights = [some if m is None else [m.alike(x) for x in some] for m, some in of_each]
        self.waits = [draw.choice([0, 0, 4]) * draw.random() / 1000 for _ in range(size)]
        self.autocast = draw.choice(AUTOCAST)
        self.text = (
            f"n={self.n}, {self.cut.text}, B={B}, reverse={self.reverse}, autocast={self.autocast}, "
            f"{'tuple of ' if self.several else ''}{list(zip(self.dtypes, rests, self.wanted, strict=True))}, "
            f"memory {[*map(str, self.memories)]}, of weights {[*map(str, self.of_weights)]}"
        )

    def boundaries(self, rank):
        """(first token, end, first token and end of the sequence there) of each of the rank's pieces."""
        cut, size = self.cut, self.cut.size
        if cut.per_document:
            found = []
            for a, b in itertools.pairwise(self.lengths):
                piece = (b - a) // (2 * size)
                found += [(a + i * piece, a + (i + 1) * piece, a, b) for i in (rank, 2 * size - 1 - rank)]
            return found
        found = []
        for owner, first, end in chunks(cut.tokens, cut.zigzag):
            here, within = end - 1 if self.reverse else first, (0, self.total)
            if self.lengths is not None:
                cuts = itertools.pairwise(self.lengths)
                some = [(a, b) for a, b in cuts if (a <= here < b if first < end else a < first < b)]
                within = some[0] if some else (0, 0)
            found += [(first, end, *within)] * (owner == rank)
        return found

    def sources(self, rank):
        """The token of the whole that each token of the result is, or None."""
        found = []
        for first, end, begin, last in self.boundaries(rank):
            places = range(end, end + self.n) if self.reverse else range(first - self.n, first)
            found += [t if begin <= t < last else None for t in places]
        return found

    def check(self, comm):
        mine = self.cut.places[comm.rank]
        xs = tuple(
            m.of(x[:, mine].to(comm.device)).requires_grad_(w)
            for m, x, w in zip(self.memories, self.wholes, self.wanted, strict=True)
        )
        time.sleep(self.waits[comm.rank])
        with autocast(self.autocast):
            found = allscan.halo(
                xs if self.several else xs[0], self.n, comm=comm, reverse=self.reverse, **self.cut.options()
            )
        found = found if self.several else (found,)
        sources = self.sources(comm.rank)
        for x, y in zip(self.wholes, found, strict=True):
            zero = torch.zeros_like(x[:, :1])
            expected = torch.cat([zero if t is None else x[:, t : t + 1] for t in sources], 1)
            assert same(y.detach().cpu(), expected), ("values", y, expected)
        if not any(self.wanted):
            return
        used = [i for i, wanted in enumerate(self.wanted) if wanted]
        weights = [self.of_weights[i].of(self.weights[i][comm.rank].to(comm.device)) for i in used]
        torch.autograd.backward([found[i] for i in used], weights)
        for i, x in enumerate(xs):
            assert (x.grad is not None) == self.wanted[i], i
        for i in used:
            whole = torch.zeros_like(self.wholes[i], dtype=torch.float64)
            for rank in range(self.cut.size):
                for n, t in enumerate(self.sources(rank)):
                    if t is not None:
                        whole[:, t] += self.weights[i][rank][:, n]
            got = [t for rank in range(self.cut.size) for t in self.sources(rank) if t is not None]
            grad, wanted = xs[i].grad.cpu(), whole[:, mine]
            if len(set(got)) == len(got):
                right = same(grad, wanted.to(grad.dtype))
            else:  # tokens that several ranks get have a sum
                right = not grad.numel() or off(grad, wanted) < 2 * torch.finfo(grad.dtype).eps
            assert right, ("gradients", i, grad, wanted)


def halo_case(group, seed):
    size = dist.get_world_size(group)
    draw = Draw("halo", seed)
    with told(seed, f"halo on {size} ranks"), allscan.Communicator(group, timeout=TIMEOUT) as comm:
        lengths = set()  # on one communicator a cu_seqlens has one split
        for number in range(draw.randint(2, 5)):
            call = HaloCall(draw, size)
            if call.lengths is not None and tuple(call.lengths) in lengths:
                continue
            lengths.add(tuple(call.lengths or ()))
            with told(seed, f"call {number}", call.text):
                call.check(comm)
