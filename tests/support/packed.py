"""Calls of every operator in every layout, for tests of state that calls share."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import allscan

LAYOUTS = "contiguous", "zigzag"


def calls(comm, T, K=16, dtype=torch.float32, operators=None):
    """Return {(operator, layout): call}, of all operators or of those named. call(cu_seqlens or None) runs on this
    rank's T tokens and returns (result, tensors to differentiate by)."""
    generator = torch.Generator().manual_seed(comm.rank)

    def leaf(*shape, of=None, like=dtype):
        x = torch.randn(shape, generator=generator)
        return (x if of is None else of(x)).to(comm.device, like).requires_grad_()

    def unit(x):
        return F.normalize(x, dim=-1)

    q, k, v = leaf(1, T, 2, K, of=unit), leaf(1, T, 2, K, of=unit), leaf(1, T, 2, K)
    g, scalar = leaf(1, T, 2, K, of=F.logsigmoid), leaf(1, T, 2, of=F.logsigmoid)
    beta = leaf(1, T, 2, of=torch.sigmoid)
    x, dt, A = leaf(1, T, 2, K), leaf(1, T, 2, of=torch.sigmoid), leaf(2, of=lambda x: -x.abs(), like=torch.float32)
    B, C = leaf(1, T, 1, K), leaf(1, T, 1, K)

    def call(operator, inputs, layout, **options):
        def made(cu_seqlens):
            found = operator(*inputs, comm=comm, cu_seqlens=cu_seqlens, layout=layout, **options)
            return found[0] if isinstance(found, tuple) else found, inputs

        return made

    found = {}
    for layout in LAYOUTS:
        found["zeco_gla", layout] = call(allscan.zeco_gla, (q, k, v, g), layout)
        found["zeco_kda", layout] = call(allscan.zeco_kda, (q, k, v, g, beta), layout)
        found["zeco_gated_delta_rule", layout] = call(allscan.zeco_gated_delta_rule, (q, k, v, scalar, beta), layout)
        found["zeco_ssd", layout] = call(
            lambda x, dt, A, B, C, **options: allscan.zeco_ssd(x, dt, A, B, C, 16, **options), (x, dt, A, B, C), layout
        )
        found["zeco_simple_gla", layout] = call(allscan.zeco_simple_gla, (q, k, v, scalar), layout)
        found["halo", layout] = call(lambda x, **options: allscan.halo(x, 3, **options), (x,), layout)
    return {name: one for name, one in found.items() if operators is None or name[0] in operators}


def forward_and_backward(call, cu_seqlens, between=None):
    """Return [the result, gradients of its inputs]; calls ``between()`` between forward and backward."""
    result, inputs = call(cu_seqlens)
    if between is not None:
        between()
    weights = torch.linspace(-1, 1, result.numel(), device=result.device, dtype=result.dtype).view(result.shape)
    return [result.detach(), *torch.autograd.grad(result, inputs, weights, allow_unused=True)]


def differ(found, expected) -> list[int]:
    """Return the indices of tensors with different bits."""
    pairs = enumerate(zip(found, expected, strict=True))
    return [i for i, (a, b) in pairs if not (a is b if a is None or b is None else torch.equal(a, b))]
