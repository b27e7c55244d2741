"""A model of linear and softmax attention layers over a split sequence, as in LASP-2H.

    python examples/hybrid.py                     # on all GPUs, or on 4 CPU processes in Triton's interpreter
    torchrun --nproc-per-node 2 examples/hybrid.py  # with its ranks; on CPUs with TRITON_INTERPRET=1

The tokens are in the zigzag layout: rank r has chunks r and 2P - 1 - r of 2P, so that all ranks have equal work in the
causal softmax layers. These gather keys and values, and attend from each chunk to the tokens before it. The GLA layers
use that layout directly, and send two states: no token is moved between the two types of layers. Prints the relative
difference of loss and gradients to the unsplit model; above 1e-4 the exit status is 1.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from train_text import GlaBlock, text_bytes

import allscan
from allscan.tools.ranks import launch, on_first

WIDTH, HEADS, LENGTH = 64, 2, 240  # a multiple of most numbers of GPUs


class Gather(torch.autograd.Function):
    """Concatenates all ranks' parts along dimension 1; backward returns each rank's part of the summed gradient."""

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


def chunks_of(rank, size):
    """Return the indices of a rank's chunks, out of 2P."""
    return rank, 2 * size - 1 - rank


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
        order = [i for rank in range(comm.size) for i in chunks_of(rank, comm.size)]  # chunk indices in gathered order
        gathered = [Gather.apply(t, comm).chunk(2 * comm.size, 1) for t in (k, v)]
        k, v = (torch.cat([t[order.index(i)] for i in range(len(order))], 1).transpose(1, 2) for t in gathered)
        n, outputs = x.shape[1] // 2, []
        for i, q_chunk in zip(chunks_of(comm.rank, comm.size), q.chunk(2, 1), strict=True):
            end = (i + 1) * n
            seen = torch.ones(n, end, dtype=torch.bool, device=x.device).tril(end - n)
            o = F.scaled_dot_product_attention(q_chunk.transpose(1, 2), k[:, :, :end], v[:, :, :end], attn_mask=seen)
            outputs.append(o.transpose(1, 2))
        o = torch.cat(outputs, 1)
        x = x + self.out(o.flatten(-2))
        return x + self.mlp(x)


class Hybrid(nn.Module):
    """Two layers of GLA and one of softmax attention; such models commonly use three to one."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        kinds = (GlaBlock, GlaBlock, SoftmaxBlock)
        self.blocks = nn.ModuleList(kind(WIDTH, HEADS) for kind in kinds)
        self.head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, tokens, comm):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, comm, "zigzag") if isinstance(block, GlaBlock) else block(x, comm)
        return self.head(x)


def gradient(group):
    """Return on rank 0 (loss, gradient), with the sequence split over the group's ranks."""
    with allscan.Communicator(group) as comm:
        torch.manual_seed(0)
        model = Hybrid().to(comm.device)
        n, text = LENGTH // (2 * comm.size), text_bytes().to(comm.device)
        tokens, labels = (
            torch.cat([text[i * n + ahead : (i + 1) * n + ahead] for i in chunks_of(comm.rank, comm.size)])[None]
            for ahead in (0, 1)
        )
        logits = model(tokens, comm)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / LENGTH
        loss.backward()
        total = torch.cat([loss.detach()[None]] + [p.grad.flatten() for p in model.parameters()])
        dist.all_reduce(total, group=group)
        comm.barrier()
        return (total[0].item(), total[1:].cpu()) if comm.rank == 0 else None


def main(ranks) -> int:
    (loss, expected), (split_loss, actual) = (ranks.run(on_first, n, gradient)[0] for n in (1, ranks.size))
    difference = ((actual - expected).norm() / expected.norm()).item()
    print(f"loss on 1 rank {loss:.6f}, on {ranks.size} {split_loss:.6f}; gradients differ by {difference:.1e}")
    return int(not max(abs(split_loss / loss - 1), difference) < 1e-4)


if __name__ == "__main__":
    sys.exit(launch(main))
