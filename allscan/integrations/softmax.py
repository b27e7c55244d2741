"""What models of other packages need around a split sequence: in softmax layers keys and values of all ranks, labels
across the cuts, refusals that all ranks hear."""

from __future__ import annotations

import functools
import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ..halos import halo
from ..packing import TensorKey


def chunks(tokens, zigzag=False):
    """(rank, first token, end) of the ranks' parts, in the order of the sequence; ``tokens``: how many each has."""
    numbers = [(rank, n // 2 if zigzag else n) for rank, n in enumerate(tokens)]
    numbers += reversed(numbers) if zigzag else ()
    ends = list(itertools.accumulate(n for _, n in numbers))
    return [(rank, end - n, end) for (rank, n), end in zip(numbers, ends, strict=True)]


def gathered(x, chunks, comm):
    """x [B, T, ...] of all ranks in the order of the sequence; in backward each rank gets its part of the sum."""
    return x if comm.size == 1 or not chunks[-1][2] else _Gather.apply(x, chunks, comm)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, chunks, comm):
        ctx.chunks, ctx.comm = chunks, comm
        tokens = _tokens(chunks, comm.size)
        parts = [x.new_empty(x.shape[0], max(tokens), *x.shape[2:]) for _ in tokens]
        dist.all_gather(parts, _padded(x, max(tokens)), group=comm.group)
        at, pieces = [0] * comm.size, []
        for rank, first, end in chunks:
            pieces.append(parts[rank][:, at[rank] : at[rank] + end - first])
            at[rank] += end - first
        return torch.cat(pieces, 1)

    @staticmethod
    def backward(ctx, dx):
        comm, chunks = ctx.comm, ctx.chunks
        tokens = _tokens(chunks, comm.size)
        parts = [[dx[:, first:end] for rank, first, end in chunks if rank == r] for r in range(comm.size)]
        mine = dx.new_empty(dx.shape[0], max(tokens), *dx.shape[2:])
        dist.reduce_scatter(mine, [_padded(torch.cat(part, 1), max(tokens)) for part in parts], group=comm.group)
        return mine[:, : tokens[comm.rank]], None, None


def _tokens(chunks, size):
    return [sum(end - first for rank, first, end in chunks if rank == r) for r in range(size)]


def _padded(x, length):
    """x [B, T, ...] with ``length`` tokens."""
    return F.pad(x, (0, 0) * (x.ndim - 2) + (0, length - x.shape[1])).contiguous()


def shifted(labels, ignored, comm, zigzag=False):
    """labels [B, T] of the tokens that follow this rank's, ``ignored`` behind the last of all."""
    # what nobody sends is 0: behind the last of all tokens, on whichever rank that is
    following = halo(labels - ignored, 1, comm=comm, reverse=True, layout="zigzag" if zigzag else "contiguous")
    halves = labels.chunk(1 + zigzag, 1), (following + ignored).chunk(1 + zigzag, 1)
    return torch.cat([torch.cat(pair, 1)[:, 1:] for pair in zip(*halves, strict=True)], 1)


def refuse(comm, message: str):
    """Raise ValueError, so that ranks on which the call goes on hear of it."""
    with comm.call():
        raise ValueError(message)


def masks_nothing(mask: torch.Tensor, comm) -> bool:
    """Looking waits for the GPU, once for the mask that all layers are given, see TensorKey; in debug mode each time.
    Refuses a mask on the GPU in a capture, since replays would not look at it."""
    if mask.is_cuda and comm.streams.capturing():
        refuse(comm, "attention_mask on the GPU cannot be captured, since replays would not look at it: leave it out")
    return bool(mask.all()) if comm.debug or not mask.is_cuda else _masks_nothing(TensorKey(mask))


@functools.lru_cache(maxsize=1)
def _masks_nothing(mask: TensorKey) -> bool:
    return bool(mask.tensor().all())
