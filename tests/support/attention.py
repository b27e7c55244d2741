"""Attention over a split sequence, and over the whole one on one rank, for CPU ranks and GPUs."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import allscan
from allscan.integrations import attention, attention_blocks, softmax
from bench.harness import capture
from support.values import place, relative

TOKENS = {1: [14], 2: [7, 12], 3: [9, 0, 7], 4: [0, 6, 1, 9], 5: [3, 2, 5, 1, 4]}
# (heads, key heads, key width, value width); keys of "latents" have two parts, as in 192 = 128 + 64
SIZES = {
    "heads": (4, 4, 16, 16),
    "groups": (4, 2, 16, 16),
    "narrow": (2, 1, 12, 6),
    "latents": (2, 2, 24, 16),
    "128": (8, 8, 128, 128),
    "128 in groups": (8, 2, 128, 128),
    "latents of 192": (4, 4, 192, 128),
}


def whole_case(kind, batch, total, dtype, device):
    """Return ({name: tensor, tokens in dimension 1} of the whole sequence, function that expands latents to keys and
    values or None, gradient of the output)."""
    H, G, D, V = SIZES[kind]
    generator = torch.Generator().manual_seed(total)

    def drawn(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype)

    q, do = drawn(batch, total, H, D), drawn(batch, total, H, V)
    if "latents" not in kind:
        return dict(q=q, k=drawn(batch, total, G, D), v=drawn(batch, total, G, V)), None, do
    rope, width = D // 3, D // 2
    weight = (drawn(width, H * (D - rope + V)) * width**-0.5).requires_grad_()

    def expand(latents, rope_keys):
        """Map two [B, 1, S, width] to k, v [B, H, S, width], as transformers' expand_kv."""
        k, v = (latents[:, 0] @ weight).unflatten(-1, (H, -1)).transpose(1, 2).split([D - rope, V], -1)
        return torch.cat([k, rope_keys.expand(-1, H, -1, -1)], -1), v

    expand.weight = weight
    return dict(q=q, latents=drawn(batch, total, 1, width), rope=drawn(batch, total, 1, rope)), expand, do


def keys_of(given, expand):
    """Return (q, k, v) [B, heads, tokens, width]."""
    q, *others = (x.transpose(1, 2) for x in given.values())
    return q, *(others if expand is None else expand(*others))


def one_rank(given, expand, do):
    """Return [o, the gradients of the inputs, the gradient of the weight] on one rank."""
    q, k, v = keys_of(given, expand)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE).transpose(1, 2)
    leaves = [*given.values(), *([] if expand is None else [expand.weight])]
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


SCALE = 0.2


def varlen(q, k, v, q_cuts, k_cuts, longest_q, longest_k, dropout, causal, debug, scale):
    """Replace aten's _flash_attention_forward for packed sequences, whose last queries are aligned with last keys."""
    outputs = []
    assert q_cuts.dtype == k_cuts.dtype == torch.int32 and causal and len(q) == q_cuts[-1]
    for (a, b), (c, d) in zip(*(itertools.pairwise(x.tolist()) for x in (q_cuts, k_cuts)), strict=True):
        Q, K, V = (x.transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d]))
        K, V = (x.repeat_interleave(Q.shape[0] // K.shape[0], 0) for x in (K, V))
        seen = torch.ones(b - a, d - c, dtype=torch.bool, device=q.device).tril(d - c - b + a)
        assert b - a <= longest_q and d - c <= longest_k
        outputs.append(F.scaled_dot_product_attention(Q, K, V, seen, scale=scale).transpose(0, 1))
    return torch.cat(outputs), None


LENGTHS = [0, 0, 3, 37, 40, 41, 64]  # of packed sequences


def packed_case(group, zigzag, kind, dtype, per_document=False):
    """Return relative errors of o and of the gradients of q, k and v over all ranks, against float64 by sequence."""
    with allscan.Communicator(group, timeout=60) as comm:
        lengths = [2 * comm.size * n for n in (0, 3, 4, 9, 16)] if per_document else LENGTHS
        total, (H, G, D, V) = lengths[-1], SIZES[kind]
        tokens = [total // comm.size] * comm.size
        mine = place(comm, tokens, zigzag, lengths if per_document else None)
        generator = torch.Generator().manual_seed(0)
        q, k, v, do = (
            torch.randn(1, total, *shape, generator=generator).to(comm.device, dtype)
            for shape in ((H, D), (G, D), (G, V), (H, V))
        )
        exact = [x.double().requires_grad_() for x in (q, k, v)]
        K, V = (x.repeat_interleave(H // G, 2) for x in exact[1:])
        o = torch.cat(
            [
                F.scaled_dot_product_attention(
                    *(x[:, a:b].transpose(1, 2) for x in (exact[0], K, V)), is_causal=True, scale=SCALE
                ).transpose(1, 2)
                for a, b in itertools.pairwise(lengths)
            ],
            1,
        )
        o.backward(do.double())
        leaves = [x.detach().requires_grad_() for x in (q[:, mine], k, v)]
        assert comm.device.type == "cpu" or attention.takes_packed(*leaves)
        how = dict(zigzag=zigzag, per_document=bool(per_document))
        found = attention.attend_packed(*leaves, softmax.Row(comm, tokens, torch.tensor(lengths), **how), SCALE)
        found.backward(do[:, mine])
        sums = [x.grad.float() for x in leaves[1:]]
        for x in sums:
            dist.all_reduce(x, group=comm.group)
        wanted = [o[:, mine], exact[0].grad[:, mine], *(x.grad for x in exact[1:])]
        return [relative(a, b) for a, b in zip((found, leaves[0].grad, *sums), wanted, strict=True)]


def split(comm, tokens, zigzag, given, expand):
    """Return o of this rank's part of the inputs."""
    q, *own = given.values()
    gather = softmax.Gather(comm, tokens, zigzag, *own)
    _, k, v = keys_of(given, expand)
    return attention_blocks.merged(q.transpose(1, 2), k, v, attention_blocks.Blocks(gather, SCALE, expand))


def attention_case(group, kind, layout, batch, how="plain", dtype=torch.float32, length=10):
    """Return (relative errors of this rank's o and gradients against one rank in float64, the same of one rank in
    ``dtype``)."""
    zigzag = layout != "contiguous"
    with allscan.Communicator(group, timeout=60) as comm:
        tokens = [2 * n for n in TOKENS[comm.size]] if layout == "uneven zigzag" else TOKENS[comm.size]
        tokens = [length] * comm.size if layout == "zigzag" or length != 10 else tokens
        given, expand, do = whole_case(kind, batch, sum(tokens), dtype, comm.device)
        whole, weight = {name: x.requires_grad_() for name, x in given.items()}, getattr(expand, "weight", None)
        alone = one_rank(whole, expand, do)
        exact = {name: x.detach().double().requires_grad_() for name, x in whole.items()}
        if weight is not None:
            weight.data = weight.data.double()
        wanted = one_rank(exact, expand, do.double())
        if weight is not None:
            weight.data = weight.data.to(dtype)
        mine = place(comm, tokens, zigzag)
        own = {name: x[:, mine].detach().requires_grad_() for name, x in whole.items()}

        def call(*tensors):
            return split(comm, tokens, zigzag, dict(zip(own, tensors, strict=True)), expand)

        if how == "no_grad":
            with torch.no_grad():
                return {"o": relative(call(*own.values()), wanted[0][:, mine])}, {}
        if how == "captured":
            leaves = [*own.values(), *([] if weight is None else [weight])]
            graph, (o, *_), _ = capture(leaves, do[:, mine], lambda *x: call(*x[: len(own)]), True)
            graph.replay()
        else:
            o = (
                call(*own.values())
                if how == "plain"
                else checkpoint(lambda *x: call(*x) * 1.0, *own.values(), use_reentrant=how == "reentrant")
            )
            o.backward(do[:, mine])
        found = [o, *(x.grad for x in own.values())]
        alone[: len(found)], wanted[: len(found)] = (
            [x[:, mine] for x in some[: len(found)]] for some in (alone, wanted)
        )
        if weight is not None:
            total = weight.grad.float()
            dist.all_reduce(total, group=comm.group)
            found.append(total)
        names = ["o", *own, "weight"][: len(found)]
        return tuple(dict(zip(names, map(relative, some, wanted), strict=True)) for some in (found, alone))
