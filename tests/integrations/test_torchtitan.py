"""The class for torchtitan in docs/integrations/index.md, with a stand-in for its InnerKDA."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from allscan.reference import delta_reference
from support import ROOT
from support.values import check_errors, place, relative

H, D, W = 2, 16, 4


class InnerKDA(torch.nn.Module):
    """Stands for torchtitan's module: it has no parameters of its own."""

    head_dim = D


def written():
    """Return the class that the page shows."""
    text = (Path(ROOT) / "docs" / "integrations" / "index.md").read_text(encoding="utf-8")
    program = re.search(r"```python\n(# part of a program; tests/integrations/test_torchtitan.*?)```", text, re.S)[1]
    names = {"InnerKDA": InnerKDA}
    exec(program, names)
    return names["AllScanInnerKDA"]


def unsplit(q, k, v, gate, beta, *weights):
    *convs, A_log, dt_bias = weights
    x, weight = torch.cat([q, k, v], -1).mT, torch.cat(convs)
    qkv = F.silu(F.conv1d(F.pad(x, (W - 1, 0)), weight, groups=len(weight))).mT[None]
    q, k, v = (y.unflatten(-1, (-1, D)) for y in qkv.chunk(3, -1))
    decay = -5.0 * (A_log.exp()[:, None] * (gate + dt_bias)).sigmoid()
    return delta_reference(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, decay[None], beta.sigmoid()[None])[0][0]


def layer_case(comm, layout):
    """Return relative errors of the output and of the gradients of all inputs."""
    layer = written()()
    layer.comm, layer.layout = comm, layout
    T, generator = 24 * comm.size, torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    whole = [*(draw(T, H * D) for _ in range(3)), draw(T, H, D), draw(T, H)]
    weights = [*(draw(H * D, 1, W) for _ in range(3)), draw(H), draw(H, D)]
    mine = place(comm, [24] * comm.size, layout == "zigzag")
    expected, factor = unsplit(*whole, *weights), torch.randn(T, H, D, generator=generator)
    (expected * factor).sum().backward()
    own = [x.detach()[mine].float().to(comm.device).requires_grad_() for x in whole]
    copies = [x.detach().float().to(comm.device).requires_grad_() for x in weights]
    one, two = torch.tensor([0, T]), torch.tensor([0, 24, T])  # documents
    for names in (
        dict(cu_seqlens=two),
        dict(attention_metadata=SimpleNamespace(varlen=SimpleNamespace(cu_seq_q=two))),
    ):
        with pytest.raises(ValueError, match="several documents"):
            layer(*own, *copies, **names)
    o = layer(*own, *copies, cu_seqlens=one, attention_metadata=None)
    (o * factor[mine].to(comm.device)).sum().backward()
    errors = [relative(o, expected[mine])]
    errors += [relative(x.grad, y.grad[mine]) for x, y in zip(own, whole, strict=True)]
    for x, y in zip(copies, weights, strict=True):
        torch.distributed.all_reduce(x.grad, group=comm.group)
        errors.append(relative(x.grad, y.grad))
    return errors


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_the_class_in_the_documentation(run, layout, size=2):
    check_errors(run(size, layer_case, layout), 2e-5)
