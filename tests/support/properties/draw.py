"""What random cases are drawn with, and what compares them."""

from __future__ import annotations

import contextlib
import random
from typing import NamedTuple

import torch

TIMEOUT = 60.0  # of communicators on which nothing is to go wrong


def size_of(name, seed) -> int:
    """How many ranks a case has: up to 4, and up to 8 from the tenth seed on."""
    return random.Random(f"{name} {seed}").choice([1, *3 * [2, 2, 3, 3, 4]] + [5, 6, 7, 8][: 4 * (seed >= 10)])


@contextlib.contextmanager
def told(seed, *what):
    """Puts the seed and the case in front of whatever goes wrong."""
    try:
        yield
    except Exception as problem:
        raise AssertionError(f"SEED {seed}: {'; '.join(map(str, what))}") from problem


class Draw(random.Random):
    """A random.Random that draws tensors too."""

    def __init__(self, *seed):
        super().__init__(" ".join(map(str, seed)))

    def generator(self):
        return torch.Generator().manual_seed(self.getrandbits(40))

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator())

    def uniform_tensor(self, *shape):
        return torch.rand(shape, generator=self.generator())

    def happens(self, chance):
        return self.random() < chance


class Place(NamedTuple):
    """What place() reads of a communicator."""

    rank: int
    size: int


class Memory(NamedTuple):
    """How a tensor lies in memory: "own"; "turned": the last two dimensions exchanged; "offset": not aligned; "sliced":
    every second element; "negated": with the negative bit; "expanded": a dimension with stride 0.

    Elements of the memory that are not the tensor's are NaN, and the largest integer."""

    kind: str = "own"
    dim: int = 0  # which one is expanded

    def alike(self, x):
        """Values that such memory can have: along an expanded dimension all are the first."""
        return self.of(x).clone() if self.kind == "expanded" else x

    def of(self, x):
        """These values in such memory; a leaf, as if it were a model's parameter."""
        x, kind = x.detach(), self.kind
        if kind == "turned" and x.ndim > 1:
            return x.mT.contiguous().mT
        if kind == "offset":
            memory = _not_of_it(x, x.numel() + 5)
            return memory[3 : 3 + x.numel()].view(x.shape).copy_(x)
        if kind == "sliced" and x.ndim:
            return _not_of_it(x, *x.shape[:-1], 2 * x.shape[-1] + 1)[..., 1::2].copy_(x)
        if kind == "negated":
            return torch._neg_view(-x)
        if kind == "expanded" and x.numel():
            return x.narrow(self.dim, 0, 1).clone().expand(x.shape)
        return x.clone()

    def __str__(self):
        return f"expanded by {self.dim}" if self.kind == "expanded" else self.kind


def _not_of_it(x, *shape):
    filler = float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).max
    return torch.full(shape, filler, dtype=x.dtype, device=x.device)


def draw_memory(draw, x):
    """Memory for ``x``, or for tensors of such a shape and dtype."""
    kinds = ["own", "own", "turned", "offset", "sliced"]
    kinds += ["negated"] * x.is_floating_point() + ["expanded"] * (x.ndim > 0)
    kind = draw.choice(kinds)
    return Memory(kind, draw.randrange(x.ndim) if kind == "expanded" else 0)


def draw_wanted(draw, names, present=None):
    """Which inputs require a gradient: any of them, only one, all, or none."""
    names = [name for name in names if present is None or name in present]
    if draw.happens(0.4):
        return {draw.choice(names)}
    return {name for name in names if draw.happens(draw.choice([0.0, 0.5, 0.5, 1.0]))}


AUTOCAST = None, None, None, torch.bfloat16, torch.float16


def autocast(dtype):
    """torch.autocast of CPUs to ``dtype``, unless None."""
    return torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None)


def off(actual, expected) -> float:
    """Largest difference, over the largest expected value where that is above 1; Inf where NaN and Inf differ."""
    actual, expected = actual.detach().double().cpu(), expected.double()
    finite = expected.isfinite()
    if actual.shape != expected.shape or not same(actual.masked_fill(finite, 0), expected.masked_fill(finite, 0)):
        return float("inf")
    if not finite.any():
        return 0.0
    difference = (actual - expected)[finite].abs().max() / expected[finite].abs().max().clamp_min(1.0)
    return difference.nan_to_num(float("inf")).item()


def same(a, b) -> bool:
    """Equal values, NaN to NaN, 0 to -0; of one dtype."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.is_floating_point():
        return bool(((a == b) | (a.isnan() & b.isnan())).all())
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def words(x) -> str:
    """A decay in a description."""
    return f"tensor{tuple(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)
