"""zeco_simple_gla against the recurrence in float64."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

import allscan
from allscan.reference import gla_reference
from support.values import error, place, raised

OF_TOKENS = "q", "k", "v", "g"


def reference(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, cu_seqlens=None):
    """Return (o, final state): zeco_gla's reference with the same gate for all keys of a head."""
    repeats = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(repeats, 2) for x in (q, k))
    gates = torch.zeros(v.shape[:3], dtype=v.dtype) if g is None else g
    if g_gamma is not None:
        gates = gates + g_gamma
    return gla_reference(q, k, v, gates[..., None].expand_as(k), scale, initial_state, cu_seqlens)


def drawn(seed, tokens, batch, sequences, sizes, gates, decay, initial):
    """Return ({name: argument}, do, gradient of final states). decay: "g", "g_gamma" or None."""
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
    return given, normal(batch, tokens, HV, V), normal(sequences, HV, K, V)


def compared(comm, tokens, lengths, layout, given, do, dfinal, dtype=torch.float32, **options):
    """Return errors of o, final states and each gradient."""
    documents = lengths if layout == "documents" else None
    mine = place(comm, tokens, layout != "contiguous", documents)
    given = {name: x.to(dtype) if name in OF_TOKENS[:3] else x for name, x in given.items()}
    exact = {name: x.double().requires_grad_() for name, x in given.items()}
    o, final = reference(**exact, **options, cu_seqlens=lengths)
    ((o * do).sum() + (final * dfinal).sum()).backward()
    cut = {name: x[:, mine] if name in OF_TOKENS else x for name, x in given.items()}
    cut = {name: x.to(comm.device).requires_grad_() for name, x in cut.items()}
    own_o, own_final = allscan.zeco_simple_gla(
        comm=comm,
        **cut,
        **options,
        cu_seqlens=lengths,
        output_final_state=True,
        layout="contiguous" if layout == "contiguous" else "zigzag",
        per_document=documents is not None,
    )
    ((own_o.float() * do[:, mine].to(comm.device)).sum() + (own_final * dfinal.to(comm.device)).sum()).backward()
    errors, shared = {"o": error(own_o, o[:, mine])}, {"final": own_final.detach()}
    for name, x in cut.items():
        if name in OF_TOKENS:
            largest = exact[name].grad.abs().max()
            difference = (x.grad.double().cpu() - exact[name].grad[:, mine]).abs()
            errors[name] = (difference.max() / largest).item() if x.numel() else 0.0
        else:
            shared[name] = x.grad.float()
    for name, x in shared.items():
        dist.all_reduce(x, group=comm.group)
        errors[name] = error(x, final if name == "final" else exact[name].grad)
    return errors


def random_case(group, seed):
    with allscan.Communicator(group) as comm:
        draw = random.Random(seed)
        H, layout = draw.choice([1, 2, 3]), ("contiguous", "zigzag", "documents")[seed % 3]
        sizes = H, H * draw.choice([1, 2, 3]), draw.choice([1, 16, 48, 130]), draw.choice([1, 8, 33, 70])
        packed = layout == "documents" or draw.random() < 0.5
        if layout == "documents":
            lengths = [2 * comm.size * n for n in (0, 3, 3, 20)]
            tokens = [lengths[-1] // comm.size] * comm.size
        else:
            tokens = [draw.choice([0, 1, 40, 150]) for _ in range(comm.size - 1)] + [65]
            if layout == "zigzag":
                tokens = [draw.choice([2, 40, 132])] * comm.size
            lengths = sorted([0, sum(tokens), *(draw.randint(0, sum(tokens)) for _ in range(3))]) if packed else None
        batch = 1 if packed else draw.choice([1, 2])
        sequences = len(lengths) - 1 if packed else batch
        decay, initial = ("g", "g", "g_gamma", None)[seed % 4], draw.random() < 0.5
        given = drawn(
            seed, sum(tokens), batch, sequences, sizes, draw.choice(["weak", "mild", "strong"]), decay, initial
        )
        return compared(comm, tokens, lengths, layout, *given, scale=draw.choice([None, 1.0, -0.3]))


@pytest.mark.slow(but=("0", "1", "2", "3", "7"))
@pytest.mark.kernels
@pytest.mark.parametrize("seed", range(8))
def test_random_options(run, seed):
    for errors in run(1 + seed % 3, random_case, seed):
        assert max(errors.values()) < 2e-5, errors


def half_case(group, dtype):
    with allscan.Communicator(group) as comm:
        tokens = [100] * comm.size
        given = drawn(3, sum(tokens), 1, 1, (2, 4, 32, 32), "weak", "g", True)
        return compared(comm, tokens, None, "contiguous", *given, dtype=dtype)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(run, dtype, size=2):
    for errors in run(size, half_case, dtype):
        assert max(errors.values()) < (2**-7 if dtype == torch.bfloat16 else 2**-10), errors


def arguments_case(group):
    with allscan.Communicator(group) as comm:
        shapes = (2, 4), (4, 4), (4,), (2, 257)
        q, v, g, wide = (torch.zeros(1, 8, *of, device=comm.device) for of in shapes)
        return [
            raised(allscan.zeco_simple_gla, *tensors, comm=comm)
            for tensors in (
                (q, q, v, g, g[0, 0]),
                (q, q, v, g[..., :2]),
                (q, q, v[:, :, :3], g[..., :3]),
                (q, q, v.half(), g),
                (wide, wide, v, g),
                (q, q, v, g + 1),
                (q, q, v, None, g[0, 0] + 1),
                (q, q, v, g.int()),
            )
        ]


def test_wrong_arguments(run, size=2):
    expected = (
        "not both",
        "g must be",
        "multiple of the 2",
        "one dtype",
        "at most 256",
        "at most 0",
        "g_gamma",
        "g must be",
    )
    for found in run(size, arguments_case):
        for (name, why), part in zip(found, expected, strict=True):
            assert name in ("TypeError", "ValueError") and part in why, (name, why, part)
