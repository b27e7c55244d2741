"""zeco_simple_gla against the recurrence in float64."""

from __future__ import annotations

import functools
import random

import pytest
import torch

import allscan
from allscan.reference import gla_reference
from support.operators import Operator, Split, compared, random_split
from support.values import check_answers, check_errors, raised


def reference(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, cu_seqlens=None):
    """Return (o, final state): zeco_gla's reference with the same gate for all keys of a head."""
    repeats = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(repeats, 2) for x in (q, k))
    gates = torch.zeros(v.shape[:3], dtype=v.dtype) if g is None else g
    if g_gamma is not None:
        gates = gates + g_gamma
    return gla_reference(q, k, v, gates[..., None].expand_as(k), scale, initial_state, cu_seqlens)


def drawn(seed, tokens, batch, sequences, sizes, gates, decay, initial):
    """Return ({name: argument}, (do, gradient of final states)). decay: "g", "g_gamma" or None."""
    H, HV, K, V = sizes
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    given = dict(q=normal(batch, tokens, H, K), k=normal(batch, tokens, H, K), v=normal(batch, tokens, HV, V))
    if decay is not None:
        rate = dict(weak=1e-3, mild=1.0, strong=100.0)[gates]
        given[decay] = -rate * torch.rand((HV,) if decay == "g_gamma" else (batch, tokens, HV), generator=generator)
    if decay == "g_gamma":
        given[decay][0] = -0.3  # else its gradient is 0 up to rounding where all decays are strong
    if decay == "g":
        given["g"][:, 1::7] = 0.0
        given["g"][:, 3::31] = -torch.inf
    if initial:
        given["initial_state"] = normal(sequences, HV, K, V)
    return given, (normal(batch, tokens, HV, V), normal(sequences, HV, K, V))


SIMPLE_GLA = Operator(
    functools.partial(allscan.zeco_simple_gla, output_final_state=True), reference, ("q", "k", "v", "g")
)


def random_case(comm, seed):
    draw = random.Random(seed)
    split, batch, sequences = random_split(draw, comm.size)
    H = draw.choice([1, 2, 3])
    sizes = H, H * draw.choice([1, 2, 3]), draw.choice([1, 16, 48, 130]), draw.choice([1, 8, 33, 70])
    decay, initial = ("g", "g", "g_gamma", None)[seed % 4], draw.random() < 0.5
    gates = draw.choice(["weak", "mild", "strong"])
    given = drawn(seed, sum(split.tokens), batch, sequences, sizes, gates, decay, initial)
    return compared(SIMPLE_GLA, comm, split, *given, scale=draw.choice([None, 1.0, -0.3]))


@pytest.mark.slow(but=("0", "1", "2", "3", "7"))
@pytest.mark.kernels
@pytest.mark.parametrize("seed", range(8))
def test_random_options(run, seed):
    check_errors(run(1 + seed % 3, random_case, seed), 2e-5)


def half_case(comm, dtype):
    tokens = [100] * comm.size
    given, grads = drawn(3, sum(tokens), 1, 1, (2, 4, 32, 32), "weak", "g", True)
    given = {name: x.to(dtype) if name in "qkv" else x for name, x in given.items()}
    return compared(SIMPLE_GLA, comm, Split(tokens), given, grads)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(run, dtype, size=2):
    check_errors(run(size, half_case, dtype), (2**-7 if dtype == torch.bfloat16 else 2**-10))


def arguments_case(comm):
    shapes = (2, 4), (4, 4), (4,), (2, 257)
    q, v, g, wide = (torch.zeros(1, 8, *of, device=comm.device) for of in shapes)
    wrong = {
        "not both": (q, q, v, g, g[0, 0]),
        "g must be": (q, q, v, g[..., :2]),
        "multiple of the 2": (q, q, v[:, :, :3], g[..., :3]),
        "one dtype": (q, q, v.half(), g),
        "at most 256": (wide, wide, v, g),
        "at most 0": (q, q, v, g + 1),
        "g_gamma": (q, q, v, None, g[0, 0] + 1),
        ("g must be", "int"): (q, q, v, g.int()),
    }
    return {text: raised(allscan.zeco_simple_gla, *tensors, comm=comm) for text, tensors in wrong.items()}


def test_wrong_arguments(run, size=2):
    for answers in run(size, arguments_case):
        check_answers(answers, "TypeError", "ValueError")
