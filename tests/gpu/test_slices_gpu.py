"""linear_cross_entropy on a GPU: its kernel and products, and its memory."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from allscan.integrations.slices import SLICE_BYTES, linear_cross_entropy
from bench import loss
from bench.harness import extra_mib
from support.values import relative

pytestmark = pytest.mark.gpu


def loss_case(group, words, gradient):
    """Return bench.loss's errors, where a row's address is no multiple of 16 bytes, or all are."""
    return loss.check(3000, words, 256, torch.device("cuda"), gradient)


@pytest.mark.parametrize("words", [5003, 8192])
@pytest.mark.parametrize("gradient", [1.0, 0.3])
def test_the_loss_in_slices(run, gradient, words, size=1):
    """The product with an incoming gradient that is no power of two rounds gradients once more."""
    (errors,) = run(size, loss_case, words, gradient)
    numbers = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    once_more = relative(numbers.bfloat16(), numbers) if gradient == 0.3 else 0.0
    for dtype in (torch.bfloat16, torch.float32):
        most = 1.1 * math.hypot(errors["torch, whole", dtype], once_more)
        assert errors["linear_cross_entropy", dtype] < most, errors


def memory_case(group, tokens, words, width):
    """Return the peak bytes beside inputs and gradients, and what they may be, for both dtypes of the weight."""
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        x, weight, labels = loss.drawn(tokens, words, width, dtype, "cuda")
        call = functools.partial(loss.both_passes, linear_cross_entropy, x, weight, labels)
        call()  # kernels are compiled and loaded
        x.grad = weight.grad = None
        extra = extra_mib(call) * (1 << 20) - x.nbytes - weight.nbytes
        found.append((extra, SLICE_BYTES + 4 * weight.numel() + 0.1e9))
    return found


def test_memory_of_the_loss_in_slices(run, size=1):
    (found,) = run(size, memory_case, 32768, 65536, 1024)
    assert all(extra < most for extra, most in found), found
