"""From the layout of recurrences (rank order is time order) to that which balances causal softmax, and back."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .communicator import Communicator


def to_zigzag(x: Tensor, *, comm: Communicator) -> Tensor:
    """Move tokens for a causal softmax layer, so that all ranks have equal work. Differentiable.

    The whole sequence is cut into 2P pieces of equal length; rank p has pieces 2p and 2p + 1 before, and p and
    2P - 1 - p after, which is how ring attention and torch's context_parallel balance their load.

    x: [B, T, ...], this rank's T tokens; T is even and the same on every rank, which is not checked.
    Returns [B, T, ...]. One all-to-all of the process group's back end; each rank sends at most what it has.
    Raises ValueError (T, dimensions).
    """
    return _move(x, comm, True)


def from_zigzag(x: Tensor, *, comm: Communicator) -> Tensor:
    """The way back from :func:`to_zigzag`."""
    return _move(x, comm, False)


def zigzag_positions(T: int, *, comm: Communicator) -> Tensor:
    """[T] int64: where in the whole sequence the tokens of this rank lie in the zigzag layout, T tokens a rank.
    Raises ValueError for an odd T."""
    if T % 2 or T < 2:
        raise ValueError(f"T must be even, got {T}")
    piece = torch.arange(T // 2, device=comm.device)
    first, second = _pieces(comm.rank, comm.size, True)
    return torch.cat([first * (T // 2) + piece, second * (T // 2) + piece])


def _pieces(rank: int, size: int, zigzag: bool) -> tuple[int, int]:
    return (rank, 2 * size - 1 - rank) if zigzag else (2 * rank, 2 * rank + 1)


def _move(x, comm, to):
    if x.ndim < 2 or x.shape[1] % 2 or x.shape[1] < 2:
        raise ValueError(f"x must be [B, T, ...] with an even number of tokens, got {tuple(x.shape)}")
    return x if comm.size == 1 else _Move.apply(x, comm, to)


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm, to):
        ctx.comm, ctx.to = comm, to
        size, rank = comm.size, comm.rank
        owner = {piece: r for r in range(size) for piece in _pieces(r, size, to)}
        source = {piece: r for r in range(size) for piece in _pieces(r, size, not to)}
        have, wanted = _pieces(rank, size, not to), _pieces(rank, size, to)
        # both sides in the order of the other's rank, then of the piece
        leaving = sorted(range(2), key=lambda i: (owner[have[i]], have[i]))
        coming = sorted(range(2), key=lambda i: (source[wanted[i]], wanted[i]))
        halves = x.unflatten(1, (2, -1)).movedim(1, 0)  # [2, B, T / 2, ...]
        send = torch.stack([halves[i] for i in leaving])
        received = torch.empty_like(send)
        splits = [[table[piece] for piece in some] for table, some in ((source, wanted), (owner, have))]
        dist.all_to_all_single(
            received, send, *([ranks.count(r) for r in range(size)] for ranks in splits), group=comm.group
        )
        return torch.cat([received[coming.index(i)] for i in range(2)], 1)

    @staticmethod
    def backward(ctx, dx):
        return _Move.apply(dx, ctx.comm, not ctx.to), None, None
