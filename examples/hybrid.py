"""A stack of linear and softmax attention over a split sequence, as in LASP-2H.

    python examples/hybrid.py                     # on all GPUs, or on 4 CPU processes in Triton's interpreter

The GLA layers send one state; the softmax layers gather keys and values, which is all that they can do, and let every
rank attend from its own queries. Both keep the plain layout, rank order being time order, so nothing is moved between
them. (Causal softmax gives the last rank the most work. Ring attention in a zigzag layout balances that, at the price
of moving the activations at every border between the two kinds of layers: allscan.zigzag does it.) Prints the relative
difference of loss and gradients to the unsplit model; above 1e-4 the exit status is 1.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from train_text import GlaBlock, text_bytes

import allscan
from allscan.tools.ranks import Ranks, on_first

WIDTH, HEADS, LENGTH = 64, 2, 240  # a multiple of most numbers of GPUs


class Gather(torch.autograd.Function):
    """The parts of all ranks one behind the other along dimension 1; backward, each rank's part of the sum."""

    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        parts = [torch.empty_like(x) for _ in range(comm.size)]
        dist.all_gather(parts, x.contiguous(), group=comm.group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, dx):
        dx = dx.contiguous()
        dist.all_reduce(dx, group=ctx.comm.group)
        return dx.chunk(ctx.comm.size, 1)[ctx.comm.rank], None


class SoftmaxBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, x, comm):
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in self.qkv(self.norm(x)).chunk(3, -1))
        k, v = Gather.apply(k, comm), Gather.apply(v, comm)
        here = comm.rank * x.shape[1] + torch.arange(x.shape[1], device=x.device)
        seen = torch.arange(k.shape[1], device=x.device) <= here[:, None]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, H, T, D]
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)
        x = x + self.out(o.flatten(-2))
        return x + self.mlp(x)


class Hybrid(nn.Module):
    """Three layers of GLA to one of softmax attention is what such models use; here two to one."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        kinds = (GlaBlock, GlaBlock, SoftmaxBlock)
        self.blocks = nn.ModuleList(kind(WIDTH, HEADS) for kind in kinds)
        self.head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, tokens, comm):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, comm)
        return self.head(x)


def gradient(group):
    """On rank 0: (loss, gradient) with the sequence cut over the group's ranks."""
    with allscan.Communicator(group) as comm:
        torch.manual_seed(0)
        model = Hybrid().to(comm.device)
        part = LENGTH // comm.size
        tokens = text_bytes()[comm.rank * part : (comm.rank + 1) * part + 1].to(comm.device)[None]
        logits = model(tokens[:, :-1], comm)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum") / LENGTH
        loss.backward()
        total = torch.cat([loss.detach()[None]] + [p.grad.flatten() for p in model.parameters()])
        dist.all_reduce(total, group=group)
        comm.barrier()
        return (total[0].item(), total[1:].cpu()) if comm.rank == 0 else None


def main() -> int:
    gpus = torch.cuda.device_count()
    count = gpus if gpus > 1 else 4
    with Ranks(count, "cuda" if gpus > 1 else "cpu") as ranks:
        (loss, expected), (split_loss, actual) = (ranks.run(on_first, n, gradient)[0] for n in (1, count))
    difference = ((actual - expected).norm() / expected.norm()).item()
    print(f"loss on 1 rank {loss:.6f}, on {count} {split_loss:.6f}; gradients differ by {difference:.1e}")
    return int(not max(abs(split_loss / loss - 1), difference) < 1e-4)


if __name__ == "__main__":
    sys.exit(main())
