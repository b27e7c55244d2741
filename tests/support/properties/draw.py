"""What random cases are drawn with, and what compares them."""

from __future__ import annotations

import contextlib
import random

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


def strided(x):
    """The same values with the last two dimensions exchanged in memory."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


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
