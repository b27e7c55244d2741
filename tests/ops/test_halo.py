"""halo() for short convolutions, token shifts and labels, against the unsplit sequence."""

from __future__ import annotations

import uuid
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import allscan
from support.values import check_errors, place

TOKENS = {1: [20], 2: [7, 13], 3: [9, 4, 12], 4: [5, 4, 11, 8]}  # of each rank


def convolution(before, x, weight):
    """Causal and depthwise; x [B, T, D], before [B, n, D], weight [D, n + 1]."""
    whole = torch.cat([before, x], 1).transpose(1, 2)
    return F.conv1d(whole, weight[:, None], groups=weight.shape[0]).transpose(1, 2)


def convolution_case(comm, tokens, n, packed, dtype):
    generator = torch.Generator().manual_seed(0)
    total, D, B = sum(tokens), 6, 1 if packed else 2
    x, weights = torch.randn(B, total, D, generator=generator), torch.randn(B, total, D, generator=generator)
    weight = torch.randn(D, n + 1, generator=generator).to(comm.device)
    x = x.to(comm.device, dtype)
    cuts = [0, 1, 3, 3, total // 2, total - 2, total] if packed else [0, total]
    mine = place(comm, tokens)

    whole = x.float().clone().requires_grad_()
    parts = [whole[:, a:b] for a, b in zip(cuts, cuts[1:]) if b > a]
    expected = torch.cat([convolution(torch.zeros(B, n, D, device=x.device), part, weight) for part in parts], 1)
    (expected * weights.to(x.device)).sum().backward()

    own = x[:, mine].clone().requires_grad_()
    lengths = torch.tensor(cuts) if packed else None
    before = allscan.halo(own, n, comm=comm, cu_seqlens=lengths)
    assert before.dtype == dtype
    pieces, at = [], mine.start  # one rank's packed convolution, with the tokens before its first one
    for a, b in zip(cuts, cuts[1:]):
        a, b = max(a, mine.start), min(b, mine.stop)
        if b > a:
            first = before if a == mine.start else torch.zeros_like(before)
            pieces.append(convolution(first.float(), own[:, a - at : b - at].float(), weight))
    o = torch.cat(pieces, 1)
    (o * weights[:, mine].to(x.device)).sum().backward()
    return (o - expected[:, mine]).abs().max().item(), (own.grad - whole.grad[:, mine]).abs().max().item()


@pytest.mark.quick
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.kernels
def test_convolutions(run, size, packed):
    for n in (1, 3):
        check_errors(run(size, convolution_case, TOKENS[size], n, packed, torch.float32), 1e-5)
    for error, _ in run(size, convolution_case, TOKENS[size], 3, packed, torch.bfloat16):
        assert error < 1e-5  # the transfer is exact


def integer_case(comm):
    """Send integers including multiples of 2 ** 31, whose halves look like sentinels."""
    special = [k << 31 for k in range(-4, 5)] + [
        -(2**63),
        2**63 - 1,
        -1,
        0,
        1,
        2**24 + 1,
        0x80000000,
        0x8000000080000000 - 2**64,
    ]
    generator = torch.Generator().manual_seed(1)
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        bits = torch.randint(-(2**63), 2**63 - 1, (40,), generator=generator)
        numbers = torch.cat([torch.tensor(special), bits]).to(dtype)  # the low bits
        whole = numbers.roll(1)[None, None].expand(1, comm.size, -1) + torch.arange(comm.size)[None, :, None].to(dtype)
        x = whole[:, comm.rank : comm.rank + 1].to(comm.device)
        before = allscan.halo(x, 1, comm=comm)
        wanted = whole[:, comm.rank - 1 : comm.rank] if comm.rank else torch.zeros_like(whole[:, :1])
        assert before.dtype == dtype and torch.equal(before.cpu(), wanted), dtype
    return True


@pytest.mark.parametrize("size", [1, 2, 3])
def test_integers_arrive_as_they_are(run, size):
    assert all(run(size, integer_case))


def several_case(comm, tokens):
    """Send tensors of different widths and dtypes together; with gradients; several times."""
    mine = place(comm, tokens)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        wholes = [torch.randn(2, sum(tokens), *rest, generator=generator) for rest in ((3, 2), (5,), ())]
        wholes = [x.to(comm.device, dtype) for x, dtype in zip(wholes, (torch.float32, torch.bfloat16, torch.float32))]
        own = [x[:, mine].clone().requires_grad_() for x in wholes]
        reverse = seed % 2 == 1
        together = allscan.halo(tuple(own), 2, comm=comm, reverse=reverse)
        alone = [allscan.halo(x, 2, comm=comm, reverse=reverse) for x in own]
        sum((x.float() * (seed + 1)).sum() for x in together).backward()
        at = mine.stop if reverse else mine.start - 2
        there = 0 <= at < sum(tokens)
        taken = (comm.rank > 0) if reverse else (comm.rank < comm.size - 1)
        for x, a, b, leaf in zip(wholes, together, alone, own, strict=True):
            assert a.dtype == leaf.dtype and torch.equal(a, b)
            assert torch.equal(a, x[:, at : at + 2] if there else torch.zeros_like(a))
            expected = torch.zeros_like(leaf)
            (expected[:, :2] if reverse else expected[:, -2:]).fill_((seed + 1) * taken)
            assert torch.equal(leaf.grad, expected)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_several_tensors(run, size):
    run(size, several_case, TOKENS[size])


def no_width_case(comm, B, tokens, n, options):
    """Return whether halo() of floats [B, T], a gradient of it, and one of its second use equal those of [B, T, 1]."""
    T = tokens[comm.rank]
    x = 1.0 + comm.rank + torch.arange(B * T, dtype=torch.float32, device=comm.device).view(B, T)
    found = []
    for shape in ((B, T), (B, T, 1)):
        own = x.reshape(shape).clone().requires_grad_()
        o = allscan.halo(own, n, comm=comm, **options)
        weights = torch.arange(1.0, o.numel() + 1, device=comm.device).view(o.shape)
        (grad,) = torch.autograd.grad((weights * o).sum(), own)
        assert o.shape == (B, o.shape[1], *shape[2:])
        found.append((o.detach().flatten(), grad.flatten()))
    return all(torch.equal(a, b) for a, b in zip(*found)), found[0][0].any().item()


@pytest.mark.parametrize(
    "B, tokens, n, options",
    [
        (2, [2, 2], 3, {}),
        (2, [2, 2, 2], 3, {}),
        (2, [2, 2, 2], 3, dict(reverse=True)),
        (1, [6, 1, 6], 3, {}),
        (2, [6, 0, 6], 2, {}),
        (1, [6, 6], 2, dict(cu_seqlens=[0, 5, 12])),
        (1, [2, 2], 2, dict(layout="zigzag")),
        (2, [4, 4], 3, dict(layout="zigzag")),
        (1, [12, 12], 2, dict(layout="zigzag", cu_seqlens=[0, 9, 24])),
        (1, [6, 6], 1, dict(layout="zigzag", cu_seqlens=[0, 4, 4, 12], per_document=True)),
        (1, [6, 6], 2, dict(layout="zigzag", cu_seqlens=[0, 4, 12], per_document=True, reverse=True)),
    ],
)
def test_tokens_without_a_width(run, B, tokens, n, options):
    equal, arrived = zip(*run(len(tokens), no_width_case, B, tokens, n, options))
    assert all(equal) and any(arrived), (equal, arrived)


def straggler_case(comm, key):
    """The first rank launches after the last one has its halo: a rank waits for its neighbour only."""
    store = dist.distributed_c10d._get_default_store()
    x = torch.full((1, 4, 8), 1.0 + comm.rank, device=comm.device)
    allscan.halo(x, 2, comm=comm)
    comm.barrier()
    if comm.rank == 0:
        store.wait([key], timedelta(seconds=60))
    found = allscan.halo(10 * x, 2, comm=comm).unique().tolist()  # waits for the kernel
    if comm.rank == comm.size - 1:
        store.set(key, b"there")
    comm.barrier()
    return found


@pytest.mark.parametrize("size", [3, 4])
def test_a_rank_waits_for_its_neighbour_only(run, size):
    assert run(size, straggler_case, uuid.uuid4().hex) == [[10.0 * rank] for rank in range(size)]


def border_case(comm):
    """Neither values of another sequence nor their gradients cross the boundary, even NaN."""
    x = torch.full((1, 4, 2), float("nan"), device=comm.device, requires_grad=True)
    before = allscan.halo(x, 1, comm=comm, cu_seqlens=[0, 4, 8])
    (before * float("inf")).nansum().backward()
    return before.detach().cpu(), x.grad.cpu()


def test_nan_at_a_border_of_sequences(run):
    for before, gradient in run(2, border_case):
        assert not before.any() and not gradient.any()


def wrong_case(comm):
    with pytest.raises(ValueError, match="n must be at least 1"):  # on one rank: all ranks raise
        allscan.halo(torch.zeros(1, 4, 2, device=comm.device), 3 * comm.rank, comm=comm)
    x = torch.zeros(1, 4, 2, device=comm.device)
    with pytest.raises(TypeError, match="at most 32 bits"):
        allscan.halo(x.double(), 1, comm=comm)
    assert allscan.halo(x, 1, comm=comm).shape == (1, 1, 2)
    for n in (True, 1.0, "1"):  # also after a call with such tensors and n=1
        with pytest.raises(TypeError, match="n must be an integer"):
            allscan.halo(x, n, comm=comm)
    with pytest.raises(ValueError, match="x must have no empty dimension but T"):
        allscan.halo(x[..., :0], 1, comm=comm)
    with pytest.raises(ValueError, match="layout must be"):
        allscan.halo(x, 1, comm=comm, layout=["zigzag"])
    assert torch.equal(allscan.halo(x, torch.tensor(1), comm=comm), x[:, :1])
    with pytest.raises(ValueError, match="must rise from 0 to the 8 tokens"):
        allscan.halo(x, 1, comm=comm, cu_seqlens=[0, 9])


@pytest.mark.cpu
def test_wrong_arguments(run):
    run(2, wrong_case)
