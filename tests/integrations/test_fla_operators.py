"""allscan() around flash-linear-attention's operators, split over the ranks, against the same operators unsplit.

GPUs run fla's kernels, whose error is compared with that of the unsplit ones; CPU ranks run the loops of its
references.
"""

from __future__ import annotations

import pytest
import torch

import allscan
from support.fla import D, H, T, drawn, import_fla
from support.gla import BF16, F32
from support.values import relative


def operators(fast):
    """Return {name: (inputs, operator(*inputs, initial_state=, output_final_state=), decay)}.

    The decay is None, a function of the inputs, or "transition": the operator's result for the identity.
    """
    import_fla()
    from fla.ops import gated_delta_rule, gla, hgrn, kda, linear_attn, retention, rwkv6, simple_gla
    from fla.ops.gated_delta_rule import naive as naive_gated_delta_rule
    from fla.ops.gla import naive as naive_gla
    from fla.ops.hgrn import naive as naive_hgrn
    from fla.ops.kda import naive as naive_kda
    from fla.ops.linear_attn import naive as naive_linear_attn
    from fla.ops.rwkv6 import recurrent_naive as naive_rwkv6
    from fla.ops.simple_gla import naive as naive_simple_gla

    def rates(q):
        return (1 - 2.0 ** (-5.0 - torch.arange(H, device=q.device))).log()

    def loop_retention(q, k, v, **o):
        return naive_simple_gla.naive_recurrent_simple_gla(q, k, v, rates(q).expand(q.shape[:3]), **o)

    def loop_rwkv6(q, k, v, w, u, **o):  # heads before tokens
        o, state = naive_rwkv6.naive_recurrent_rwkv6(*(x.transpose(1, 2) for x in (q, k, v, w)), u, **o)
        return o.transpose(1, 2), state

    def fast_linear_attn(q, k, v, **o):
        return linear_attn.chunk_linear_attn(q, k, v, normalize=False, **o)

    def fast_simple_gla(q, k, v, g, **o):  # fla's chunk kernels reject gradients like Gated DeltaNet's (below)
        return simple_gla.fused_recurrent_simple_gla(q, k, v, g, **o)

    def fast_hgrn(x, g, **o):
        return hgrn.fused_recurrent_hgrn(x.flatten(2), g.flatten(2), **o)

    def loop_hgrn(x, g, **o):
        return naive_hgrn.naive_recurrent_hgrn(x.flatten(2), g.flatten(2), **o)

    def loop_delta_rule(q, k, v, g, beta, **o):
        return naive_gated_delta_rule.naive_recurrent_gated_delta_rule(q, k, v, beta, g, **o)

    def after(i):
        return lambda *inputs: inputs[i].sum(1).exp()

    table = {
        "linear attention": ("q k v", fast_linear_attn, naive_linear_attn.naive_recurrent_linear_attn, None),
        "RetNet": (
            "q k v",
            retention.chunk_retention,
            loop_retention,
            lambda q, *_: (rates(q) * q.shape[1]).exp()[None],
        ),
        "simple GLA, Mamba2": ("q k v g", fast_simple_gla, naive_simple_gla.naive_recurrent_simple_gla, after(3)),
        "GLA": ("q k v gk", gla.chunk_gla, naive_gla.naive_recurrent_gla, after(3)),
        "RWKV6": ("q k v gk u", rwkv6.chunk_rwkv6, loop_rwkv6, after(3)),
        "HGRN": ("x gk", fast_hgrn, loop_hgrn, lambda x, g: g.flatten(2).sum(1).exp()),
        "Gated DeltaNet": ("q k v g beta", gated_delta_rule.chunk_gated_delta_rule, loop_delta_rule, "transition"),
        "KDA": ("q k v gk beta", kda.chunk_kda, naive_kda.naive_recurrent_kda, "transition"),
    }
    return {name: (inputs.split(), a if fast else b, decay) for name, (inputs, a, b, decay) in table.items()}


def split(operator, decay, comm):
    """Return a function that runs ``operator`` over all ranks' tokens."""

    def call(*inputs):
        _, left = operator(*inputs, output_final_state=True)
        options = {}
        if decay == "transition":
            one = torch.eye(D, device=left.device).expand(1, H, D, D).contiguous()
            q, k, v, *rest = inputs
            _, dense = operator(q, k, torch.zeros_like(v), *rest, initial_state=one, output_final_state=True)
            options["transition"] = dense
        elif decay is not None:
            options["decay"] = decay(*inputs).float()
        flat = left.ndim == 2  # HGRN's state is a vector; allscan() gets a column
        prev = allscan.allscan(left[..., None] if flat else left, comm=comm, **options)
        return operator(*inputs, initial_state=prev[..., 0] if flat else prev)[0]

    return call


def operator_case(comm, name):
    """Return {tensor: (error of the split sequence, error of the unsplit one)} against fla's loop in float32 on each
    rank."""
    on_gpu = torch.cuda.is_available()
    names, operator, decay = operators(on_gpu)[name]
    _, loop, _ = operators(False)[name]
    total, mine = comm.size * T, slice(comm.rank * T, (comm.rank + 1) * T)
    narrow = BF16 if on_gpu and name != "HGRN" else F32  # fla's HGRN returns such a state
    given = {n: x.to(comm.device, F32 if n in ("g", "gk") else narrow) for n, x in zip(names, drawn(names, total))}
    weights = torch.randn(1, total, H, D, generator=torch.Generator().manual_seed(1)).to(comm.device, narrow)

    def results(call, part=slice(None), dtype=None):
        """Return output and gradients of these tokens; without u, which belongs to no token."""
        leaves = [
            (x if n == "u" else x[:, part]).to(dtype or x.dtype, copy=True).requires_grad_() for n, x in given.items()
        ]
        o = call(*leaves)
        if on_gpu and name == "Gated DeltaNet":  # fla rejects its gradients with Triton before 3.7.1 on Hopper
            return {"o": o.detach()}
        gradients = torch.autograd.grad(o, leaves, weights[:, part].reshape(o.shape).to(o.dtype))
        return {"o": o.detach()} | {n: x for n, x in zip(names, gradients, strict=True) if n != "u"}

    expected = results(lambda *x: loop(*x)[0], dtype=F32)
    whole = results(lambda *x: operator(*x)[0])
    cut = results(split(operator, decay, comm), mine)
    comm.barrier()
    return {
        n: (relative(cut[n], e[:, mine]), relative(whole[n][:, mine], e[:, mine]))
        for n, e in expected.items()
        if n in whole
    }


NAMES = ["linear attention", "RetNet", "simple GLA, Mamba2", "GLA", "RWKV6", "HGRN", "Gated DeltaNet", "KDA"]


@pytest.mark.slow(but=("HGRN-2", "Gated DeltaNet-2", "KDA-2", "GLA-2", "RWKV6-2", "simple GLA, Mamba2-4", "RetNet-2"))
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_operators(run, size, name):
    """On GPUs the bound is 2: a gradient of the split sequence sums two or three parts, each rounded to bfloat16."""
    for errors in run(size, operator_case, name):
        assert all(ours < 1e-5 or (ours <= 2 * theirs and theirs > 1e-4) for ours, theirs in errors.values()), errors
