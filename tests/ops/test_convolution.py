"""Short convolutions over ranks by our kernels, and their gradients, against float64 on one rank."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F

import allscan
from allscan.ops.convolution import convolution
from support.gla import BF16, F32
from support.values import added_up, check_errors, place, raised, relative

F16 = torch.float16
ROUNDED = {F32: 2e-6, BF16: 4e-3, F16: 6e-4}  # a result in this type


def whole(comm, dtype, B, T, C, n, bias):
    """x, weight, bias, the output's gradient and the tokens before x: the same on all ranks."""
    generator = torch.Generator().manual_seed(T)
    shapes = (B, T, C), (C, n + 1), (C,) if bias else None, (B, T, C), (B, n, C)
    drawn = [s if s is None else torch.randn(s, generator=generator).to(comm.device, dtype) for s in shapes]
    drawn[0] = 3 * drawn[0]
    return drawn


def in_float64(x, weight, bias, activation, before):
    x, weight, before = x.double(), weight.double(), before.double()
    y = F.conv1d(
        torch.cat([before, x], 1).mT, weight[:, None], None if bias is None else bias.double(), groups=len(weight)
    )
    return (F.silu(y) if activation else y).mT


def case(comm, dtype, layout, shape, n, bias, activation):
    """Return errors, relative to the rounding of dtype, of the output and of the gradients."""
    (B, T, C), zigzag = shape, layout == "zigzag"
    x, weight, bias, dy, _ = whole(comm, dtype, B, T * comm.size, C, n, bias)
    mine = place(comm, [T] * comm.size, zigzag)
    own = [y if y is None else y.clone().requires_grad_() for y in (x[:, mine], weight, bias)]
    leaves = [y for y in own if y is not None]
    found = [convolution(*own, activation, comm=comm, layout=layout) for _ in "ab"]
    grads = [torch.autograd.grad(y, leaves, dy[:, mine]) for y in found]
    assert torch.equal(*found) and all(map(torch.equal, *grads)), "not the same bits again"
    assert [(g.dtype, g.shape) for g in grads[0]] == [(y.dtype, y.shape) for y in leaves]
    exact = [y if y is None else y.double().requires_grad_() for y in (x, weight, bias)]
    y = in_float64(*exact, activation, x.new_zeros(B, n, C))
    dx, *sums = torch.autograd.grad(y, [y for y in exact if y is not None], dy.double())
    pairs = [(found[0].detach(), y.detach()[:, mine]), (grads[0][0], dx[:, mine])]
    pairs += [(added_up(g.float(), comm.group), of_all) for g, of_all in zip(grads[0][1:], sums, strict=True)]
    return [relative(a, b) / ROUNDED[dtype] for a, b in pairs]


CASES = [  # dtype, layout, (B, tokens of a rank, C), n, bias, activation
    (BF16, "zigzag", (1, 96, 200), 3, False, "silu"),
    (F32, "contiguous", (2, 37, 130), 3, True, "silu"),
    (F32, "zigzag", (2, 6, 24), 3, True, None),
    (F16, "contiguous", (1, 2, 8), 2, False, "swish"),
    (F32, "zigzag", (1, 50, 16), 1, True, "silu"),
]


@pytest.mark.parametrize("dtype, layout, shape, n, bias, activation", CASES)
@pytest.mark.kernels
def test_values(run, dtype, layout, shape, n, bias, activation, size=2):
    check_errors(run(size, case, dtype, layout, shape, n, bias, activation), 2.0)


def test_three_ranks(run, size=3):
    for given in CASES[:2]:
        check_errors(run(size, case, *given), 2.0)


def state_case(comm, layout):
    """Return the error of a convolution that continues a sequence, without a gradient."""
    T, mine = 12, place(comm, [12] * comm.size, layout == "zigzag")
    x, weight, bias, _, before = whole(comm, F32, 2, T * comm.size, 24, 3, True)
    state = before if comm.rank == 0 else None
    y = convolution(x[:, mine], weight, bias, "silu", comm=comm, layout=layout, state=state)
    return [relative(y, in_float64(x, weight, bias, "silu", before)[:, mine])]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_state(run, layout, size=2):
    check_errors(run(size, state_case, layout), 2e-6)


def frozen_case(comm):
    """Return errors of the gradient of one input that requires it; x in bfloat16, parameters in float32."""
    x, weight, bias, dy, none = whole(comm, F32, 1, 12 * comm.size, 24, 3, True)
    x, dy, mine, errors = x.bfloat16(), dy.bfloat16(), place(comm, [12] * comm.size, True), []
    exact = [y.double().requires_grad_() for y in (x, weight, bias)]
    wanted = torch.autograd.grad(in_float64(*exact, "silu", torch.zeros_like(none)), exact, dy.double())
    for i in range(3):
        own = [y.clone().requires_grad_(i == j) for j, y in enumerate((x[:, mine], weight, bias))]
        y = convolution(*own, "silu", comm=comm, layout="zigzag")
        (found,) = torch.autograd.grad(y, own[i], dy[:, mine])
        assert y.dtype == x.dtype and found.dtype == own[i].dtype
        pair = (found, wanted[0][:, mine]) if i == 0 else (added_up(found, comm.group), wanted[i])
        errors.append(relative(*pair) / ROUNDED[found.dtype])
    return errors


def test_frozen_inputs(run, size=2):
    check_errors(run(size, frozen_case), 2.0)


def left_to_others_case(comm):
    """Return, by name, whether a call is left to the layer's own function."""
    x, weight, bias, _, state = whole(comm, F32, 2, 12, 24, 3, True)
    given = dict(x=x, weight=weight, bias=bias, activation="silu", state=state)
    with torch.inference_mode():
        of_inference, state_of_inference = x.clone(), state.clone()
    parameter, wide = weight.clone().requires_grad_(), torch.randn(24, 5, device=comm.device)
    others = {
        "bias": dict(bias=bias[:1]),
        "state": dict(state=state[:, 1:]),
        "batch of the state": dict(state=state[:1]),
        "width": dict(weight=wide),
        "activation": dict(activation="relu"),
        "few tokens": dict(x=x[:, :2]),
        "dtype": dict(x=x.to(torch.int32)),
        "inference": dict(x=of_inference, weight=parameter),
        "state of inference": dict(state=state_of_inference, weight=parameter),
        "device": dict(x=x.to("meta")),
    }
    found = {name: convolution(**given | other, comm=comm) is None for name, other in others.items()}
    y = convolution(**given | dict(state=state.clone().requires_grad_()), comm=comm)  # it has no gradient
    return found | {"a valid call": y is not None, "no gradient": not y.requires_grad}


def test_what_is_left_to_others(run, size=1):
    for found in run(size, left_to_others_case):
        assert all(found.values()), found


def rejected_case(comm):
    """Return what a second derivative raises, and then each rank's next call."""
    x, weight = torch.randn(1, 8, 8, device=comm.device, requires_grad=True), torch.randn(8, 4, device=comm.device)
    y = convolution(x, weight, None, "silu", comm=comm)
    found = raised(torch.autograd.grad, y.sum(), x, create_graph=True)
    return found, raised(convolution, x, weight, None, "silu", comm=comm)


def test_no_second_derivative(run, size=2):
    answers = run(size, rejected_case)
    assert all(first[0] == "RuntimeError" and "second derivative" in first[1] for first, _ in answers), answers


def ignored_case(comm):
    """Return seconds of convolutions after calls of their scan, in either direction, that had no backward."""
    x, weight = torch.randn(1, 16, 8, device=comm.device, requires_grad=True), torch.randn(8, 4, device=comm.device)
    edges, seconds = torch.randn(2, 1, 3, 8, device=comm.device, requires_grad=True), []
    for ignored in (
        lambda: allscan.halo(x, 3, comm=comm, reverse=True),
        lambda: allscan.halo(x, 3, comm=comm, layout="zigzag"),
        lambda: allscan.allscan((edges[0], edges[1]), comm=comm, layout="zigzag"),
        lambda: allscan.allscan_segments((edges[:1], edges[1:]), comm=comm, layout="zigzag"),
        lambda: convolution(x, weight, None, "silu", comm=comm, layout="zigzag"),
    ):
        ignored()
        begun = time.monotonic()
        convolution(x, weight, None, "silu", comm=comm, layout="zigzag").sum().backward()
        comm.check()
        seconds.append(time.monotonic() - begun)
    return seconds


def test_convolutions_after_calls_without_a_backward(run, size=2):
    """Neither rank waits for the other one's second scan before it launches the first: until the time limit."""
    for seconds in run(size, ignored_case):
        assert max(seconds) < 30.0, seconds


def around_halo(x, weight, comm, layout):
    """The convolution by torch's function, as a rank with too few tokens for the kernels computes it."""
    halves = 1 + (layout == "zigzag")
    before = allscan.halo(x, 3, comm=comm, layout=layout).unflatten(1, (halves, 3))
    rows = torch.cat([before, x.unflatten(1, (halves, -1))], 2).flatten(0, 1)
    y = F.silu(F.conv1d(rows.mT, weight[:, None], groups=len(weight))).mT
    return y.unflatten(0, (-1, halves)).flatten(1, 2)


def beside_halo_case(comm, layout, debug):
    """Return errors where rank 0 does not use the kernels, in debug mode no rank: of the output, of all gradients, and
    of the weight's gradient alone, for which no rank exchanges anything."""
    tokens, zigzag, errors = [16] * comm.size, layout == "zigzag", []
    x, weight, _, dy, _ = whole(comm, F32, 1, sum(tokens), 8, 3, False)
    mine = place(comm, tokens, zigzag)
    exact = [y.double().requires_grad_() for y in (x, weight)]
    y = in_float64(*exact, None, "silu", torch.zeros(1, 3, 8))
    dx, dw = torch.autograd.grad(y, exact, dy.double())
    with allscan.Communicator(comm.group, timeout=20.0, debug=debug) as own:
        for both in (True, False, True):
            part, w = x[:, mine].clone().requires_grad_(), weight.clone().requires_grad_()
            found = None if own.rank == 0 else convolution(part, w, None, "silu", comm=own, layout=layout)
            assert own.rank == 0 or (found is None) == debug
            found = around_halo(part, w, own, layout) if found is None else found
            errors.append(relative(found, y.detach()[:, mine]))
            grads = torch.autograd.grad(found, (w, part) if both else (w,), dy[:, mine])
            errors.append(relative(added_up(grads[0], comm.group), dw))
            errors += [relative(grads[1], dx[:, mine])] if both else []
    return errors


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_beside_ranks_without_the_kernels(run, layout, debug, size=2):
    check_errors(run(size, beside_halo_case, layout, debug), 2e-6)
