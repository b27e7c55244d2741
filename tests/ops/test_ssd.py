"""zeco_ssd against the token-by-token recurrence in float64 over the whole sequence: splits, gates from 0 to -inf,
random options, 16-bit types, columns of other tensors, wrong arguments."""

from __future__ import annotations

import functools
import itertools
import random
import types

import pytest
import torch

import allscan
from allscan.ops.gpu_blocks import HOPPER
from allscan.ops.ssd.ssd_plans import BackwardPlan, Inputs, shape_of, strides_of
from allscan.reference import ssd_reference
from support.launches import with_ssd_blocks
from support.operators import Operator, Split, compared, random_split
from support.values import check_answers, check_errors, error, place, raised

OF_TOKENS = "x", "dt", "B", "C", "z"
SSD = Operator(functools.partial(allscan.zeco_ssd, return_final_states=True), ssd_reference, OF_TOKENS)
CHUNK = dict(chunk_size=64)
TOKENS = {1: [47], 2: [33, 18], 3: [21, 10, 15]}  # of each rank
EVEN = {1: [48], 2: [34, 18], 3: [22, 10, 16]}  # for the zigzag layout
CUTS = [0, 0, 5, 6, 21, 21, 30, 33, 45]  # empty ones, one at a rank's boundary, and one to the end
SIZES = H, G, P, N = 4, 2, 6, 10
OPTIONS = dict(dt_softplus=True, dt_limit=(0.0, 1.5))
NAMES = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")


def drawn(seed, tokens, batch, sequences, sizes, gates, **absent):
    """Return ({name: argument}, (dy, gradient of final states)). gates: "weak", "mild", "strong", or "reset": mild with
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
    return given, (normal(batch, tokens, H, P), normal(sequences, H, P, N))


def values_case(comm, tokens, cuts, layout):
    total = sum(tokens)
    lengths = None if cuts is None else [*(c for c in CUTS if c < total), total]
    if layout == "documents":
        lengths = [2 * comm.size * i for i in (0, 1, 1, 4, 5, total // (2 * comm.size))]
    sequences, where = 2 if cuts is None else len(lengths) - 1, dict(chunk_size=8)
    if cuts == "given":
        where["first_token"] = sum(tokens[: comm.rank])
    given = drawn(0, total, 1 if cuts else 2, sequences, SIZES, "mild")
    return compared(SSD, comm, Split(tokens, lengths, layout), *given, where, **OPTIONS)


@pytest.mark.slow(but=("1-given", "1-None-zigzag", "2-asked", "3-None-contiguous"))
@pytest.mark.quick("2-asked-contiguous")
@pytest.mark.parametrize(
    "cuts, layout",
    [
        (None, "contiguous"),
        ("asked", "contiguous"),
        ("given", "contiguous"),
        (None, "zigzag"),
        ("asked", "zigzag"),
        ("asked", "documents"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.kernels
def test_values_and_gradients(run, size, cuts, layout):
    tokens = {"zigzag": EVEN[size], "contiguous": TOKENS[size], "documents": [16] * size}[layout]
    for errors in run(size, values_case, tokens, cuts, layout):
        assert set(errors) == {"o", "final", *NAMES} and max(errors.values()) < 1e-5, errors


def gates_case(comm, gates, sizes):
    tokens = [131, 70][: comm.size]
    given = drawn(1, sum(tokens), 1, 1, sizes, gates, z=False, dt_bias=False)
    return compared(SSD, comm, Split(tokens), *given, CHUNK)


@pytest.mark.slow(but=("one group-strong", "one group-reset", "no groups-weak"))
@pytest.mark.kernels
@pytest.mark.parametrize("gates", ["weak", "mild", "strong", "reset"])
@pytest.mark.parametrize("sizes", [(4, 1, 16, 16), (3, 3, 20, 40)], ids=["one group", "no groups"])
def test_gates(run, gates, sizes, size=2):
    check_errors(run(size, gates_case, gates, sizes), 1e-5)


def nothing_case(comm):
    """Heads whose state is forgotten at each token, by -inf and by a large number."""
    given, (dy, dfinal) = drawn(2, 70, 1, 1, (2, 1, 16, 16), "mild", z=False, dt_bias=False)
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


def random_case(comm, seed):
    draw = random.Random(seed)
    split, batch, sequences = random_split(draw, comm.size)
    G = draw.choice([1, 1, 2, 3])
    sizes = G * draw.choice([1, 2, 3, 5]), G, draw.choice([1, 8, 16, 33, 70]), draw.choice([1, 7, 16, 48, 130])
    absent = {name: draw.random() < 0.5 for name in ("z", "dt_bias", "initial_states")}
    absent["D"] = draw.choice([True, False, "channels"])
    options = dict(dt_softplus=draw.random() < 0.5)
    if draw.random() < 0.5:
        options["dt_limit"] = draw.choice([(0.0, 0.6), (0.1, 1.0), (0.3, 0.3)])
    gates = draw.choice(["weak", "mild", "strong"])
    given = drawn(seed, sum(split.tokens), batch, sequences, sizes, gates, **absent)
    return compared(SSD, comm, split, *given, CHUNK, **options)


@pytest.mark.slow(but=("0", "1", "2", "3"))
@pytest.mark.kernels
@pytest.mark.parametrize("seed", range(9))
def test_random_options(run, seed):
    check_errors(run(1 + seed % 3, random_case, seed), 2e-5)


def half_case(group, dtype, gates, sizes=(4, 2, 32, 32)):
    with allscan.Communicator(group) as comm:
        tokens = [100, 100][: comm.size]
        given, grads = drawn(3, sum(tokens), 1, 1, sizes, gates, z=False)
        given = {name: x.to(dtype) if name in OF_TOKENS else x for name, x in given.items()}
        return compared(SSD, comm, Split(tokens), given, grads, CHUNK, dt_softplus=True)


@pytest.mark.kernels
@pytest.mark.parametrize("gates", ["weak", "strong"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(run, dtype, gates, size=2):
    check_errors(run(size, half_case, dtype, gates), (2**-7 if dtype == torch.bfloat16 else 2**-10))


def of_gpu_case(group, capability):
    with pytest.MonkeyPatch.context() as patch:
        if capability:
            with_ssd_blocks(patch, capability)
        return half_case(group, torch.bfloat16, "weak", (4, 2, 128, 128))


@pytest.mark.slow(but=("None", "80"))
@pytest.mark.parametrize("capability", [None, 80, 100, 120])
def test_block_sizes_of_gpus(run, capability):
    """Errors are those with Hopper's block sizes, on which GPU tests bound them."""
    for errors, of_hopper in zip(run(2, of_gpu_case, capability), run(2, of_gpu_case, 90)):
        assert all(errors[name] <= 1.05 * of_hopper[name] < 0.02 for name in of_hopper), (errors, of_hopper)


def views_case(comm):
    """Return (whether the kernels take the views as they are, whether results have equal bits with copies)."""
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


def of_initial_states_case(comm, tokens, layout):
    """Return the difference of the initial states' gradient, computed alone, to that with the other gradients. Only the
    first token's rank needs the scan for it."""
    given, _ = drawn(0, sum(tokens), 2, 2, SIZES, "mild")
    mine = place(comm, tokens, layout == "zigzag")
    cut = {name: t[:, mine] if name in OF_TOKENS else t for name, t in given.items()}
    cut = {name: t.to(comm.device).requires_grad_() for name, t in cut.items()}
    y = allscan.zeco_ssd(chunk_size=8, comm=comm, **cut, **OPTIONS, layout=layout)
    (alone,) = torch.autograd.grad(y.sum(), [cut["initial_states"]], retain_graph=True)
    y.sum().backward()
    return error(alone, cut["initial_states"].grad)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_the_gradient_of_initial_states_alone(run, layout, size=2):
    assert max(run(size, of_initial_states_case, EVEN[size], layout)) == 0.0


WRONG = {
    "x must be bfloat16, float16 or float32": dict(x=torch.zeros(1, 4, H, P, dtype=torch.float64)),
    "float32, got torch.float8": dict(B=torch.zeros(1, 4, G, N).to(torch.float8_e4m3fn)),
    "x must be [B, T, H, P]": dict(x=torch.zeros(4, H, P)),
    "must be a multiple of the 3 groups": dict(B=torch.zeros(1, 4, 3, N)),
    "dt must be [1, 4, 4]": dict(dt=torch.zeros(1, 4, 2)),
    "D must be": dict(D=torch.zeros(3)),
    "A must be at most 0": dict(A=torch.ones(H)),
    "chunk_size must be at least 1": dict(chunk_size=0),
    "dt_limit must be": dict(dt_limit=(-1.0, 1.0)),
    "layout must be": dict(layout="other"),
    "requires an even T": dict(
        layout="zigzag",
        x=torch.zeros(1, 3, H, P),
        dt=torch.zeros(1, 3, H),
        B=torch.zeros(1, 3, G, N),
        C=torch.zeros(1, 3, G, N),
        z=None,
    ),
    "initial_states must have shape": dict(initial_states=torch.zeros(2, H, P, N)),
    "cu_seqlens must rise": dict(cu_seqlens=[0, 3], initial_states=None),
}


def wrong_case(group):
    """Return errors where only the last rank has a wrong argument, at a first call."""
    found, given = {}, CHUNK | drawn(0, 4, 1, 1, SIZES, "mild")[0]
    for text, wrong in WRONG.items():
        with allscan.Communicator(group, timeout=60) as comm:
            # cu_seqlens may differ between ranks, and all ranks compare it
            own = {**given, **(wrong if comm.rank == comm.size - 1 or "cu_seqlens" in wrong else {})}
            found[text] = raised(allscan.zeco_ssd, comm=comm, **own)
    return found


@pytest.mark.cpu
def test_all_ranks_hear_of_what_is_wrong(run, size=2):
    for found in run(size, wrong_case):
        check_answers(found, "TypeError", "ValueError")


@pytest.mark.cpu
@pytest.mark.quick
@pytest.mark.parametrize(
    "chunks, expected",
    [([64] * 4, [128, 128]), ([64] * 3, [192]), ([0], [0]), ([], [0]), ([0, 1, 2, 5] * 32, [128, 128])],
    ids=["dense", "short", "no tokens", "no segments", "packed"],
)
def test_parts_of_backward(chunks, expected):
    """Segments with these numbers of chunks are cut into parts with ``expected``, on 132 multiprocessors."""
    sizes = 1, 16384, 128, 128, 64, 1, torch.bfloat16, torch.bfloat16, "cuda", 0, 132, False, 0, HOPPER, 8, True
    plan = types.SimpleNamespace(cuda=True, shape=shape_of(*sizes))
    assert plan.shape.segment == 4096
    parts = BackwardPlan._cut(plan, [*itertools.accumulate(chunks, initial=0)])
    assert [sum(chunks[i] for i in part) for part in parts] == expected
    assert [i for part in parts for i in part] == [*range(len(chunks))]
