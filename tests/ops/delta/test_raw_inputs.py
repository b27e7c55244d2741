"""Norms of q and k, gates and beta from raw arguments, and their gradients, against float64."""

from __future__ import annotations

import sys
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import allscan
from allscan.ops.delta.raw_inputs import gate, normalized
from support.gla import BF16, F32
from support.values import check_errors, relative

F16, F64 = torch.float16, torch.float64
ROUNDED = {F32: 2e-6, BF16: 4e-3, F16: 6e-4, F64: 2e-6}  # a result in this type


def drawn(comm, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(comm.device)


def gate_case(group, shape, dtype, of_parameters, bound):
    """Return errors of a gate and its gradients, including the largest error of a single value. of_parameters: (dtype,
    shape of dt_bias or None)."""
    kind, bias_shape = of_parameters
    with mock.patch.dict(sys.modules, {"fla": None}), allscan.Communicator(group) as comm:
        x = (6 * drawn(comm, *shape)).to(dtype)
        x.view(-1)[:6] = torch.tensor([0.0, -60.0, 60.0, 1e4, -1e4, -17.0])
        leaves = [x, None if kind is None else drawn(comm, shape[2]).to(kind)]
        leaves.append(None if bias_shape is None else drawn(comm, *bias_shape).to(kind or F32))
        leaves = [y if y is None else y.requires_grad_() for y in leaves]
        found = [gate(leaves[0], comm.handle, *leaves[1:], bound) for _ in "ab"]
        there = [y for y in leaves if y is not None]
        dg = drawn(comm, *shape)
        grads = [torch.autograd.grad(g, there, dg) for g in found]
        exact = [y if y is None else y.detach().double().requires_grad_() for y in leaves]
        z = exact[0] if exact[2] is None else exact[0] + exact[2].view(shape[2:])
        rate = 1.0 if exact[1] is None else exact[1].exp().view(-1, *[1] * (len(shape) - 3))
        wanted = -rate * F.softplus(z, threshold=1000) if bound is None else bound * (rate * z).sigmoid()
        expected = torch.autograd.grad(wanted, [y for y in exact if y is not None], dg.double())
        assert torch.equal(*found) and all(map(torch.equal, *grads)), "not the same bits again"
        assert found[0].dtype == F32 and [y.dtype for y in grads[0]] == [y.dtype for y in there]
        assert [y.shape for y in grads[0]] == [y.shape for y in there]
        single = (found[0] - wanted).abs() / wanted.abs().clamp(min=1e-12)
        errors = [relative(a, b) / ROUNDED[y.dtype] for a, b, y in zip(grads[0], expected, there, strict=True)]
        return single.max().item(), relative(found[0].detach(), wanted.detach()), *errors


@pytest.mark.parametrize(
    "shape, dtype, of_parameters, bound",
    [
        ((1, 300, 4, 128), BF16, (F32, (512,)), None),
        ((2, 75, 3, 24), F32, (BF16, (3, 24)), -5.0),
        ((1, 130, 2, 200), F16, (None, (2, 200)), -2.0),
        ((1, 4200, 32), BF16, (F32, (32,)), None),
        ((2, 70, 3), F64, (F64, None), None),
        ((2, 70, 5), BF16, (None, None), 2.0),
        ((1, 1, 1, 16), F32, (F32, (16,)), -0.5),
    ],
    ids=["KDA", "bounded", "no A_log", "GDN", "float64", "beta", "a token"],
)
def test_gates(run, shape, dtype, of_parameters, bound, size=1):
    for single, of_all, *of_grads in run(size, gate_case, shape, dtype, of_parameters, bound):
        assert single < 1e-5 and of_all < 1e-6 and max(of_grads) < 1.0, (single, of_all, of_grads)


def infinite_case(comm):
    """Return gradients where a gate is -inf, from a raw gate of +inf, and no loss depends on it."""
    x, A_log = drawn(comm, 1, 8, 2, 16), drawn(comm, 2)
    x[0, 3, 1, 2] = float("inf")
    leaves = x.requires_grad_(), A_log.requires_grad_()
    g = gate(x, comm.handle, A_log)
    grads = torch.autograd.grad(g, leaves, torch.where(g > -1e30, 1.0, 0.0))
    return g[0, 3, 1, 2].item(), [y.isfinite().all().item() for y in grads]


def test_gates_of_minus_infinity(run, size=1):
    assert run(size, infinite_case) == [(-float("inf"), [True, True])]


def norm_case(group, shape, dtype, large):
    """Return errors of q's and k's norms and of their gradients."""
    with mock.patch.dict(sys.modules, {"fla": None}), allscan.Communicator(group) as comm:
        pair = [(large * drawn(comm, *shape, n)[..., 0]).to(dtype).requires_grad_() for n in (1, 2)]
        dy = [drawn(comm, *shape).to(dtype), drawn(comm, *shape).to(dtype).neg()]
        found = normalized(*pair, comm.handle)
        grads = torch.autograd.grad(found, pair, dy)
        exact = [x.detach().double().requires_grad_() for x in pair]
        wanted = [x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in exact]
        expected = torch.autograd.grad(wanted, exact, [x.double() for x in dy])
        assert [x.dtype for x in (*found, *grads)] == [dtype] * 4
        return [relative(a.detach(), b.detach()) for a, b in zip((*found, *grads), (*wanted, *expected), strict=True)]


@pytest.mark.parametrize(
    "shape, dtype, large",
    [
        ((1, 300, 4, 128), BF16, 10.0),
        ((2, 75, 3, 24), F32, 1e-3),  # the square is as small as the added epsilon
        ((1, 130, 2, 200), F16, 1.0),
        ((3, 1, 1, 256), BF16, 1e-3),
    ],
)
def test_norms(run, shape, dtype, large, size=1):
    check_errors(run(size, norm_case, shape, dtype, large), ROUNDED[dtype] * (1 if dtype == F32 else 2))
