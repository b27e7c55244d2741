"""halo: the tokens on the other side of a cut, for short convolutions, token shifts and shifted labels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .communicator import Communicator
from .layout import content, kept, tokens_of_ranks
from .scan import allscan, persistent


def halo(x: Tensor, n: int, *, comm: Communicator, reverse: bool = False, cu_seqlens=None) -> Tensor:
    """The n tokens that precede this rank's part of the sequence: the last n of the rank before. Differentiable.

        out[:, i] = whole[:, first - n + i],   i = 0 .. n - 1, where this rank has whole[:, first : first + T]

    With reverse=True those that follow it: out[:, i] = whole[:, first + T + i]. Zeros where there are none.

    x: [B, T, ...], this rank's T tokens, at least n; T may differ between ranks, the other dimensions may not. Floating
        point, or integers below 2 ** 24 such as token numbers: a word travels as float32.
    cu_seqlens: packed sequences, B = 1, as for :func:`allscan.zeco_gla`: tokens of another sequence than the one at the
        cut count as none.
    Returns [B, n, ...] like x. One hop to the neighbour, by the same channel as :func:`allscan.allscan`; the first call
    for a shape is collective on the host.

    Raises ValueError (n, T, shapes that differ, cu_seqlens), TypeError (dtype), and what allscan() raises.

        >>> before = allscan.halo(x, 3, comm=comm)                       # a causal convolution over 4 tokens:
        >>> y = conv(torch.cat([before, x], 1))                          # without padding of its own
        >>> labels = torch.cat([tokens[:, 1:], allscan.halo(tokens, 1, comm=comm, reverse=True)], 1)
    """
    shape = problem = None
    try:
        if not isinstance(x, Tensor) or x.is_complex() or x.dtype in (torch.float64, torch.bool):
            kind = getattr(x, "dtype", type(x).__name__)
            raise TypeError(f"x must be a tensor of floats of at most 32 bits or of integers, got {kind}")
        if x.ndim < 2 or not 1 <= n <= x.shape[1]:
            raise ValueError(f"x must be [B, T, ...] with T of at least n = {n} tokens, got {tuple(x.shape)}")
        B, _, *rest = x.shape
        shape = (B, n, math.prod(rest))
    except (TypeError, ValueError) as error:
        problem = error
    persistent(comm, shape, problem=problem)
    edge = x[:, :n] if reverse else x[:, -n:]
    found = allscan(
        edge.reshape(shape).float(), 0.0, comm=comm, reverse=reverse
    )  # decay 0: nothing comes from beyond the neighbour
    if cu_seqlens is not None:
        lengths = content(torch.as_tensor(cu_seqlens))
        key = ("halo", x.shape[1], lengths, n, reverse)
        found = found * kept(comm, key, lambda: _same_sequence(comm, x, n, reverse, lengths))
    return found.to(x.dtype).reshape(B, n, *rest)


def _same_sequence(comm, x, n, reverse, lengths) -> Tensor:
    """[n, 1]: 1 where the token is of the sequence on this rank's side of the cut, else 0."""
    tokens = tokens_of_ranks(comm, lengths, x.shape[1])
    first = sum(tokens[: comm.rank])
    end = first + tokens[comm.rank]
    here = end - 1 if reverse else first  # the token next to the cut
    begin, finish = next((a, b) for a, b in zip(lengths, lengths[1:]) if a <= here < b)
    places = range(end, end + n) if reverse else range(first - n, first)
    return torch.tensor([[float(begin <= t < finish)] for t in places], device=x.device)
