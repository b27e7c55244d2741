"""Operators on one rank whose tensors have more than 2^31 elements: offsets need 64 bits."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

import allscan
from support.values import relative

pytestmark = pytest.mark.gpu
HEADS, WIDTH = 32, 128
TOKENS = 589824  # times 32 heads of 128: 1.125 * 2^31
GLA, KDA = allscan.zeco_gla, functools.partial(allscan.zeco_kda, use_qk_l2norm_in_kernel=True)
DELTA = functools.partial(allscan.zeco_gated_delta_rule, use_qk_l2norm_in_kernel=True)
# the operator, whether gates are of channels, whether there is a beta
OPERATORS = {
    "gla": (GLA, True, False),
    "kda": (KDA, True, True),
    "gated_delta_rule": (DELTA, False, True),
    "simple_gla": (allscan.zeco_simple_gla, False, False),
}


def drawn(device, tokens, heads, width, of_channels, with_beta):
    """Draw ([q, k, v, g, and beta], do)."""
    generator = torch.Generator(device).manual_seed(3)

    def normal(*shape):
        return torch.randn(1, tokens, heads, *shape, generator=generator, device=device, dtype=torch.bfloat16)

    g = normal(width) if of_channels else normal()
    rest = [normal().sigmoid()] if with_beta else []
    return [normal(width), normal(width), normal(width), F.logsigmoid(g.float()) / 16, *rest], normal(width)


def both_passes(comm, operator, leaves, do, state=None, dstate=None):
    """Return (o, final state, gradients of the leaves and of the initial state)."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    given = [] if state is None else [state.detach().requires_grad_()]
    o, last = operator(*leaves, comm=comm, initial_state=given[0] if given else None, output_final_state=True)
    dlast = torch.zeros_like(last) if dstate is None else dstate
    return o.detach(), last.detach(), torch.autograd.grad([o, last], [*leaves, *given], [do, dlast])


def case(comm, name, tokens, heads, width):
    """Return relative errors of the output and of each gradient, at the beginning, around the middle and at the end,
    against two calls with half the tokens each, between which the state and its gradient pass."""
    operator, of_channels, with_beta = OPERATORS[name]
    leaves, do = drawn(comm.device, tokens, heads, width, of_channels, with_beta)
    half, few = tokens // 2, tokens // 64
    places = slice(0, few), slice(half - few, half + few), slice(tokens - few, tokens)
    o, _, grads = both_passes(comm, operator, leaves, do)
    found = [[x[:, place].clone() for place in places] for x in (o, *grads)]
    del o, grads
    first, second = ([x[:, part] for x in (*leaves, do)] for part in (slice(half), slice(half, tokens)))
    _, state, _ = both_passes(comm, operator, [x[:, :half] for x in leaves], first[-1])
    o2, _, (*grads2, dstate) = both_passes(comm, operator, second[:-1], second[-1], state)
    o1, _, grads1 = both_passes(comm, operator, first[:-1], first[-1], None, dstate)
    errors = []
    for pieces, a, b in zip(found, (o1, *grads1), (o2, *grads2), strict=True):
        expected = a[:, :few], torch.cat([a[:, -few:], b[:, :few]], 1), b[:, -few:]
        errors.append([relative(x, y) for x, y in zip(pieces, expected, strict=True)])
    return errors


@pytest.mark.alone  # it needs most of a GPU's memory
@pytest.mark.parametrize("name", OPERATORS)
def test_more_than_2_31_elements(run, name, size=1):
    for errors in run(size, case, name, TOKENS, HEADS, WIDTH):
        assert max(map(max, errors)) < 1e-2, errors
