"""zeco_ssd with gates from 0 to -inf, random options, and tensors that are columns of others."""

from __future__ import annotations

import itertools
import random
import types

import pytest
import torch
import torch.distributed as dist

import allscan
from allscan.ops.ssd.ssd_plans import BackwardPlan, Inputs, shape_of, strides_of
from allscan.reference import ssd_reference
from support.values import error, place

OF_TOKENS = "x", "dt", "B", "C", "z"


def drawn(seed, tokens, batch, sequences, sizes, gates, **absent):
    """Return ({name: argument}, dy, gradient of final states). gates: "weak", "mild", "strong", or "reset": mild with
    one token in ten that leaves nothing."""
    H, G, P, N = sizes
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    rates = dict(weak=1e-3, mild=1.0, strong=300.0, reset=1.0)[gates]
    dt = normal(batch, tokens, H).sigmoid()
    dt[:, 1::5] = 0.0
    if gates == "reset":
        dt[:, ::10] = 1e9
    given = dict(
        x=normal(batch, tokens, H, P),
        dt=dt,
        A=-torch.rand(H, generator=generator) * rates,
        B=normal(batch, tokens, G, N),
        C=normal(batch, tokens, G, N),
        D=normal(H, P) if absent.get("D") == "channels" else normal(H),
        z=normal(batch, tokens, H, P),
        dt_bias=normal(H),
        initial_states=normal(sequences, H, P, N),
    )
    given["A"][0] = -0.3  # else the gradient of A is 0 up to rounding where all decays are strong
    if gates == "reset":  # large steps have no large inputs
        given["x"] = torch.where(dt[..., None] == 1e9, given["x"] * 1e-9, given["x"])
    given = {name: t for name, t in given.items() if absent.get(name, True)}
    return given, normal(batch, tokens, H, P), normal(sequences, H, P, N)


def compared(comm, tokens, lengths, layout, given, dy, dfinal, options, dtypes=None):
    """Return errors of y, final states and each gradient against the recurrence in float64."""
    documents = lengths if layout == "documents" else None
    mine = place(comm, tokens, layout in ("zigzag", "documents"), documents)
    given = {name: t.to((dtypes or {}).get(name, t.dtype)) for name, t in given.items()}
    exact = {name: t.double().requires_grad_() for name, t in given.items()}
    y, final = ssd_reference(**exact, **options, cu_seqlens=lengths)
    ((y * dy).sum() + (final * dfinal).sum() + sum(0.0 * t.sum() for t in exact.values())).backward()
    cut = {name: t[:, mine] if name in OF_TOKENS else t for name, t in given.items()}
    cut = {name: t.to(comm.device).requires_grad_() for name, t in cut.items()}
    own_y, own_final = allscan.zeco_ssd(
        chunk_size=64,
        comm=comm,
        **cut,
        **options,
        cu_seqlens=lengths,
        return_final_states=True,
        layout="contiguous" if layout == "contiguous" else "zigzag",
        per_document=documents is not None,
    )
    loss = (own_y.float() * dy[:, mine].to(comm.device)).sum() + (own_final * dfinal.to(comm.device)).sum()
    loss.backward()
    errors, shared = {"y": error(own_y, y[:, mine])}, {"final": own_final.detach()}
    for name, t in cut.items():
        if name in OF_TOKENS:
            # of this rank's largest values, which may all be tiny where decays leave nothing
            largest = exact[name].grad.abs().max()
            errors[name] = (
                ((t.grad.double().cpu() - exact[name].grad[:, mine]).abs().max() / largest).item() if t.numel() else 0.0
            )
        else:
            shared[name] = t.grad.float()
    for name, t in shared.items():
        dist.all_reduce(t, group=comm.group)
        errors[name] = error(t, final if name == "final" else exact[name].grad)
    return errors


def gates_case(group, gates, sizes):
    with allscan.Communicator(group) as comm:
        tokens = [131, 70][: comm.size]
        given = drawn(1, sum(tokens), 1, 1, sizes, gates, z=False, dt_bias=False)
        return compared(comm, tokens, None, "contiguous", *given, {})


@pytest.mark.slow(but=("one group-strong", "one group-reset", "no groups-weak"))
@pytest.mark.kernels
@pytest.mark.parametrize("gates", ["weak", "mild", "strong", "reset"])
@pytest.mark.parametrize("sizes", [(4, 1, 16, 16), (3, 3, 20, 40)], ids=["one group", "no groups"])
def test_gates(run, gates, sizes, size=2):
    for errors in run(size, gates_case, gates, sizes):
        assert max(errors.values()) < 1e-5, errors


def nothing_case(group):
    """Heads whose state is forgotten at each token, by -inf and by a large number."""
    with allscan.Communicator(group) as comm:
        given, dy, dfinal = drawn(2, 70, 1, 1, (2, 1, 16, 16), "mild", z=False, dt_bias=False)
        given["dt"] += 0.1
        grads = []
        for A in (-torch.inf, -1e30):
            leaves = {name: t.clone().to(comm.device) for name, t in given.items()}
            leaves["A"] = torch.tensor([A, -1.0], device=comm.device)
            leaves = {name: t.requires_grad_() for name, t in leaves.items()}
            y, final = allscan.zeco_ssd(chunk_size=64, comm=comm, **leaves, return_final_states=True)
            ((y * dy.to(comm.device)).sum() + (final * dfinal.to(comm.device)).sum()).backward()
            grads.append([y.detach(), final.detach(), *(t.grad for t in leaves.values())])
        only = (given["dt"][..., None] * given["x"]) * (given["C"] * given["B"]).sum(3)[..., None]
        expected = only[:, :, 0] + given["D"][0] * given["x"][:, :, 0]
        same = [torch.equal(a, b) for a, b in zip(*grads, strict=True)]
        return same, error(grads[0][0][:, :, 0], expected), grads[0][4][0].item()


@pytest.mark.kernels
def test_minus_infinity(run):
    """-inf and -1e30 give equal bits, no NaN, and the gradient 0 of A."""
    [(same, difference, dA)] = run(1, nothing_case)
    assert all(same) and difference < 1e-5 and dA == 0.0


LAYOUTS = "contiguous", "zigzag", "documents"


def random_case(group, seed):
    with allscan.Communicator(group) as comm:
        draw = random.Random(seed)
        G, layout = draw.choice([1, 1, 2, 3]), draw.choice(LAYOUTS)
        sizes = G * draw.choice([1, 2, 3, 5]), G, draw.choice([1, 8, 16, 33, 70]), draw.choice([1, 7, 16, 48, 130])
        packed = layout == "documents" or draw.random() < 0.5
        if layout == "documents":
            steps = [draw.choice([0, 1, 3, 20]) for _ in range(3)]
            lengths = [2 * comm.size * sum(steps[:i]) for i in range(len(steps) + 1)]
            tokens = [lengths[-1] // comm.size] * comm.size
        else:
            tokens = [draw.choice([0, 1, 40, 65, 150]) for _ in range(comm.size)]
            if layout == "zigzag":
                tokens = [draw.choice([2, 40, 132])] * comm.size
            lengths = sorted([0, sum(tokens), *(draw.randint(0, sum(tokens)) for _ in range(3))]) if packed else None
        batch = 1 if packed else draw.choice([1, 2])
        if not sum(tokens):
            return {"y": 0.0}
        absent = {name: draw.random() < 0.5 for name in ("z", "dt_bias", "initial_states")}
        absent["D"] = draw.choice([True, False, "channels"])
        options = dict(dt_softplus=draw.random() < 0.5)
        if draw.random() < 0.5:
            options["dt_limit"] = draw.choice([(0.0, 0.6), (0.1, 1.0), (0.3, 0.3)])
        given = drawn(
            seed,
            sum(tokens),
            batch,
            len(lengths) - 1 if packed else batch,
            sizes,
            draw.choice(["weak", "mild", "strong"]),
            **absent,
        )
        return compared(comm, tokens, lengths, layout, *given, options)


@pytest.mark.slow(but=("0", "1", "2", "3"))
@pytest.mark.kernels
@pytest.mark.parametrize("seed", range(9))
def test_random_options(run, seed):
    for errors in run(1 + seed % 3, random_case, seed):
        assert max(errors.values()) < 2e-5, errors


BFLOAT16 = dict.fromkeys(("x", "dt", "B", "C", "z"), torch.bfloat16)


def half_case(group, dtypes, bound_of_gates):
    with allscan.Communicator(group) as comm:
        tokens = [100, 100][: comm.size]
        given = drawn(3, sum(tokens), 1, 1, (4, 2, 32, 32), bound_of_gates, z=False)
        return compared(comm, tokens, None, "contiguous", *given, dict(dt_softplus=True), dtypes)


@pytest.mark.kernels
@pytest.mark.parametrize("gates", ["weak", "strong"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(run, dtype, gates, size=2):
    for errors in run(size, half_case, dict.fromkeys(OF_TOKENS, dtype), gates):
        assert max(errors.values()) < (2**-7 if dtype == torch.bfloat16 else 2**-10), errors


def views_case(group):
    """Return (whether the kernels take the views as they are, whether results have equal bits with copies)."""
    with allscan.Communicator(group) as comm:
        H, G, P, N, T = 4, 2, 8, 8, 72
        generator = torch.Generator().manual_seed(comm.rank)
        mixed = torch.randn(2, T, H * P + 2 * G * N, generator=generator).to(comm.device)
        other = torch.randn(2, T, H * P + H, generator=generator).to(comm.device)
        x, B, C = mixed.split([H * P, G * N, G * N], 2)
        z, dt = other.split([H * P, H], 2)
        x, z, B, C = x.unflatten(2, (H, P)), z.unflatten(2, (H, P)), B.unflatten(2, (G, N)), C.unflatten(2, (G, N))
        A, D = -torch.ones(H, device=comm.device), torch.ones(H, device=comm.device)
        given = Inputs(x, dt, A, B, C, D, z)
        taken, strides = strides_of(given)
        direct = all(a is None or a.data_ptr() == b.data_ptr() for a, b in zip(taken, given, strict=True))
        results = []
        for change in (lambda t: t, torch.Tensor.contiguous):
            leaves = [change(t).detach().requires_grad_() for t in given[:7]]
            x, dt, A, B, C, D, z = leaves
            y = allscan.zeco_ssd(x, dt, A, B, C, 64, D=D, z=z, dt_softplus=True, comm=comm)
            results.append([y.detach(), *torch.autograd.grad(y.square().sum(), leaves)])
        return direct, strides, [torch.equal(a, b) for a, b in zip(*results, strict=True)]


@pytest.mark.kernels
def test_columns_of_other_tensors(run, size=2):
    for direct, strides, same in run(size, views_case):
        assert direct and strides == Inputs(64, 36, 0, 64, 64, 0, 36, 0) and all(same)


def test_what_is_copied():
    """Tensors whose tokens are not a fixed distance apart, or whose rows are not contiguous."""
    x = torch.zeros(2, 8, 4, 8)
    given = Inputs(x[:, ::2].flip(0), torch.zeros(2, 4, 4), torch.zeros(4), x[:, :4, :, ::2], torch.zeros(2, 4, 4, 4))
    taken, strides = strides_of(given)
    assert strides == Inputs(32, 4, 0, 16, 16, 0, 0, 0)
    assert all(t is None or t.is_contiguous() for t in taken)
    assert strides_of(given._replace(x=x[:, :4]))[1].x == 32  # batch entries are further apart than their tokens
    assert strides_of(given._replace(x=x[:1, ::2]))[1].x == 64


@pytest.mark.cpu
@pytest.mark.quick
@pytest.mark.parametrize(
    "chunks, expected",
    [([64] * 4, [128, 128]), ([64] * 3, [192]), ([0], [0]), ([], [0]), ([0, 1, 2, 5] * 32, [128, 128])],
    ids=["dense", "short", "no tokens", "no segments", "packed"],
)
def test_parts_of_backward(chunks, expected):
    """Segments with these numbers of chunks are cut into parts with ``expected``, on 132 multiprocessors."""
    sizes = 1, 16384, 128, 128, 64, 1, torch.bfloat16, torch.bfloat16, "cuda", 0, 132, False, 0, 8, True
    plan = types.SimpleNamespace(cuda=True, shape=shape_of(*sizes))
    assert plan.shape.segment == 4096
    parts = BackwardPlan._cut(plan, [*itertools.accumulate(chunks, initial=0)])
    assert [part.end_chunk - part.first_chunk for part in parts] == expected
    ends = [0, *(part.end for part in parts)]
    assert [part.segment for part in parts] == ends[:-1] and ends[-1] == len(chunks)
