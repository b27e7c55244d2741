"""A long sequence over all ranks, in memory that its layers hardly add to: each block recomputed, MLPs and the loss in
slices of tokens.

    python examples/long_sequence.py                     # on all GPUs, or on 4 CPU processes in Triton's interpreter
    torchrun --nproc-per-node 2 examples/long_sequence.py  # with its ranks; on CPUs with TRITON_INTERPRET=1

Prints the relative difference of loss and gradients to the unsplit model, which keeps everything and makes all logits;
above 1e-4 the exit status is 1. On GPUs it then runs two steps of a model of 0.4 billion parameters with 1,048,576
tokens in bfloat16 (--tokens), and prints the time of the second one, and the peak memory. docs/long_sequences.md says
what takes memory and what else reduces it.
"""

import argparse
import functools
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from train_text import GlaBlock, text_bytes

import allscan
from allscan.integrations.slices import linear_cross_entropy, mlp_in_slices
from allscan.tools.ranks import launch, on_first

SMALL = dict(words=300, width=64, heads=2, blocks=2)
LARGE = dict(words=151936, width=1024, heads=8, blocks=12)


class LongModel(nn.Module):
    def __init__(self, words, width, heads, blocks):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(GlaBlock(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens, labels, comm, whole=False):
        """Return the loss: the sum over these tokens, divided by the labels of all ranks."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, comm) if whole else checkpoint(block, x, comm, use_reentrant=False)
        if whole:
            return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())
        return linear_cross_entropy(self.norm(x), self.head.weight, labels, comm=comm)


def made(comm, shape, slice_tokens, length):
    """Return the model, and this rank's tokens and labels of a sequence."""
    torch.manual_seed(0)  # the same parameters on every rank
    with torch.device(comm.device):
        model = LongModel(**shape)
    for block in model.blocks:
        mlp_in_slices(block.mlp, slice_tokens)
    first, end = (rank * length // comm.size for rank in (comm.rank, comm.rank + 1))
    text = text_bytes().repeat(length // len(text_bytes()) + 1)[first : end + 1].to(comm.device)[None]
    return model, text[:, :-1], text[:, 1:]  # the last label is the next rank's first token


def gradient(group, length, slice_tokens):
    """Return on rank 0 (loss, gradient), with the sequence split over the group's ranks; on one rank without slices."""
    with allscan.Communicator(group) as comm:
        whole = comm.size == 1
        model, tokens, labels = made(comm, SMALL, None if whole else slice_tokens, length)
        loss = model(tokens, labels, comm, whole)
        loss.backward()
        total = torch.cat([loss.detach()[None]] + [p.grad.flatten() for p in model.parameters()])
        dist.all_reduce(total, group=group)
        comm.barrier()
        return (total[0].item(), total[1:].cpu()) if comm.rank == 0 else None


def step(group, length, slice_tokens):
    """Return (loss, seconds of the second step, peak GiB of this rank); on GPUs."""
    with allscan.Communicator(group) as comm:
        model, tokens, labels = made(comm, LARGE, slice_tokens, length)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        for _ in range(2):
            comm.step()
            comm.barrier()
            start = time.perf_counter()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(tokens, labels, comm)
            loss.backward()
            for p in model.parameters():
                dist.all_reduce(p.grad, group=group)
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
        dist.all_reduce(total := loss.detach(), group=group)
        return total.item(), time.perf_counter() - start, torch.cuda.max_memory_allocated() / (1 << 30)


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=1 << 20, help="of the long sequence, on GPUs")
    parser.add_argument("--slice", type=int, default=4096, help="tokens of an MLP's slice in it")
    return parser.parse_args()


def main(options, ranks) -> int:
    (loss, expected), (split_loss, actual) = (ranks.run(on_first, n, gradient, 240, 16)[0] for n in (1, ranks.size))
    difference = ((actual - expected).norm() / expected.norm()).item()
    print(f"loss on 1 rank {loss:.6f}, on {ranks.size} {split_loss:.6f}; gradients differ by {difference:.1e}")
    if ranks.device == "cuda":
        answers = ranks.run(on_first, ranks.size, step, options.tokens, options.slice, timeout=1800)
        seconds, peak = (max(x) for x in list(zip(*answers))[1:])
        print(
            f"{options.tokens} tokens on {ranks.size} ranks: loss {answers[0][0]:.3f}, {seconds:.2f} s, {peak:.1f} GiB"
        )
    return int(not max(abs(split_loss / loss - 1), difference) < 1e-4)


if __name__ == "__main__":
    sys.exit(launch(functools.partial(main, options_of())))
