"""Random calls of halo(), and their law."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

import allscan

from .draw import TIMEOUT, Draw, same, told

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
    def __init__(self, draw, size):
        self.n = draw.choice([1, 1, 2, 3, 5])
        self.tokens = [self.n + draw.choice([0, 0, 1, 4, 9]) for _ in range(size)]
        self.total, self.reverse = sum(self.tokens), draw.happens(0.5)
        packed = draw.happens(0.4)
        B = 1 if packed else draw.randint(1, 3)
        self.lengths = None
        if packed:
            edges = [sum(self.tokens[:p]) for p in range(size + 1)]
            cuts = [draw.choice([draw.randint(0, self.total), draw.choice(edges)]) for _ in range(draw.randint(0, 6))]
            self.lengths = sorted([0, self.total, *cuts])
        self.several = draw.happens(0.4)
        self.dtypes = [draw.choice(INTEGERS + 3 * FLOATS) for _ in range(draw.randint(1, 3) if self.several else 1)]
        rests = [[draw.randint(1, 5) for _ in range(draw.choice([0, 1, 1, 2]))] for _ in self.dtypes]
        self.wholes = [draw_numbers(draw, d, B, self.total, *rest) for d, rest in zip(self.dtypes, rests, strict=True)]
        self.wanted = [d in FLOATS and draw.happens(0.5) for d in self.dtypes]
        self.weights = [
            [draw.normal(B, self.n, *rest).to(getattr(torch, d)) if d in FLOATS else None for _ in range(size)]
            for d, rest in zip(self.dtypes, rests, strict=True)
        ]
        self.waits = [draw.choice([0, 0, 4]) * draw.random() / 1000 for _ in range(size)]
        self.text = (
            f"n={self.n}, tokens {self.tokens}, B={B}, reverse={self.reverse}, cu_seqlens {self.lengths}, "
            f"{'tuple of ' if self.several else ''}{list(zip(self.dtypes, rests, self.wanted, strict=True))}"
        )

    def sources(self, rank):
        """The token of the whole that each of the n is, or None."""
        first = sum(self.tokens[:rank])
        end = first + self.tokens[rank]
        here, places = (end - 1, range(end, end + self.n)) if self.reverse else (first, range(first - self.n, first))
        lengths = self.lengths or [0, self.total]

        def sequence(t):
            return max(i for i, cut in enumerate(lengths[:-1]) if cut <= t)

        return [t if 0 <= t < self.total and sequence(t) == sequence(here) else None for t in places]

    def check(self, comm):
        first = sum(self.tokens[: comm.rank])
        mine = slice(first, first + self.tokens[comm.rank])
        xs = tuple(
            x[:, mine].clone().to(comm.device).requires_grad_(w) for x, w in zip(self.wholes, self.wanted, strict=True)
        )
        time.sleep(self.waits[comm.rank])
        found = allscan.halo(
            xs if self.several else xs[0], self.n, comm=comm, reverse=self.reverse, cu_seqlens=self.lengths
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
        torch.autograd.backward([found[i] for i in used], [self.weights[i][comm.rank].to(comm.device) for i in used])
        for i in used:
            whole = torch.zeros_like(self.wholes[i])
            for rank in range(len(self.tokens)):
                for n, t in enumerate(self.sources(rank)):
                    if t is not None:
                        whole[:, t] += self.weights[i][rank][:, n]
            assert same(xs[i].grad.cpu(), whole[:, mine]), ("gradients", i, xs[i].grad, whole[:, mine])


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
