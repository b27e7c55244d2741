"""halo: the tokens on the other side of a cut, for short convolutions, token shifts and shifted labels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .collective import uncompiled
from .communicator import Communicator
from .layout import content, first_token, kept
from .scan import allscan, persistent


@uncompiled
def halo(x, n: int, *, comm: Communicator, reverse: bool = False, cu_seqlens=None):
    """The n tokens that precede this rank's part of the sequence: the last n of the rank before. Differentiable.

        out[:, i] = whole[:, first - n + i],   i = 0 .. n - 1, where this rank has whole[:, first : first + T]

    With reverse=True those that follow it: out[:, i] = whole[:, first + T + i]. Zeros where there are none.

    x: [B, T, ...], this rank's T tokens, at least n; T may differ between ranks, other dimensions may not. Floats of
        at most 32 bits, which travel as float32 (-0.0 may arrive as +0.0), or integers, which travel 16 bits a word and
        arrive as they are. Or a tuple of such tensors, alike in B and T, which travel together.
    cu_seqlens: packed sequences, B = 1, as for :func:`allscan.zeco_gla`: tokens of another sequence than the one at the
        cut count as none.
    Returns [B, n, ...] like x, a tuple for a tuple. One hop, by :func:`allscan.allscan` with the decay 0: a rank waits
    for its neighbours only. The first call for a shape is collective on the host. For gradients every rank uses the
    result, the first one too, which has zeros: else its own backward does not run, and the next call raises.

    Raises ValueError (n, T, shapes that differ, cu_seqlens), TypeError (dtype), and what allscan() raises.

        >>> before = allscan.halo(x, 3, comm=comm)                       # a causal convolution over 4 tokens:
        >>> y = conv(torch.cat([before, x], 1))                          # without padding of its own
        >>> labels = torch.cat([tokens[:, 1:], allscan.halo(tokens, 1, comm=comm, reverse=True)], 1)
    """
    with comm.call(reverse):
        return _halo(x, n, comm, reverse, cu_seqlens)


def _halo(x, n, comm, reverse, cu_seqlens):
    several = isinstance(x, tuple)
    xs, shape, problem = x if several else (x,), None, None
    try:
        for x in xs:
            if not isinstance(x, Tensor) or x.is_complex() or x.dtype in (torch.float64, torch.bool):
                kind = getattr(x, "dtype", type(x).__name__)
                raise TypeError(f"x must be a tensor of floats of at most 32 bits or of integers, got {kind}")
        if not xs or not isinstance(n, int) or n < 1 or min(x.ndim for x in xs) < 2:
            raise ValueError(f"x must be [B, T, ...] and n an integer of at least 1, got {_shapes(xs)} and {n!r}")
        B, T = xs[0].shape[:2]
        if any(x.shape[:2] != (B, T) for x in xs):
            raise ValueError(f"the tensors of x must have B and T alike, got {_shapes(xs)}")
        widths = [math.prod(x.shape[2:]) * _words(x.dtype) for x in xs]
        shape = (B, n, sum(widths))
        if T < n:
            raise ValueError(f"x must have T of at least n = {n} tokens, got {_shapes(xs)}")
        for x in xs:
            if x.device != comm.device:
                raise ValueError(f"x must be on {comm.device}, got {x.device}")
    except (TypeError, ValueError) as error:
        problem = error
    persistent(comm, shape, problem=problem)
    edges = [_to_words((x[:, :n] if reverse else x[:, T - n :]).reshape(B, n, -1)) for x in xs]
    inside = None
    if cu_seqlens is not None:
        lengths = content(torch.as_tensor(cu_seqlens))
        first = first_token(comm, lengths, T)
        key = ("halo", first, T, lengths, n, reverse)
        inside = kept(comm, key, lambda: _same_sequence(comm.device, first, first + T, n, reverse, lengths))
    # decay 0: nothing comes from beyond the neighbour
    found = allscan(torch.cat(edges, -1) if several else edges[0], 0.0, comm=comm, reverse=reverse)
    if inside is not None:
        found = torch.where(inside, found, 0.0)
    parts = found.split(widths, -1) if several else (found,)
    out = tuple(_from_words(part, x.dtype).reshape(B, n, *x.shape[2:]) for part, x in zip(parts, xs, strict=True))
    return out if several else out[0]


def _words(dtype) -> int:
    """Words of float32 for an element: 16 bits of an integer each, since a float32 must not be -0.0 on its way."""
    return 1 if dtype.is_floating_point else max(1, dtype.itemsize // 2)


def _to_words(x) -> Tensor:
    """float32 [B, n, words] of [B, n, elements]; whole numbers below 2 ** 16 for integers."""
    if x.dtype.is_floating_point:
        return x.float()
    x = x.to(torch.int16) if x.dtype.itemsize == 1 else x.contiguous()
    return (x.view(torch.int16).int() & 0xFFFF).float()


def _from_words(words, dtype) -> Tensor:
    if dtype.is_floating_point:
        return words.to(dtype)
    x = words.int().to(torch.int16)  # the low 16 bits
    return x.to(dtype) if dtype.itemsize == 1 else x.contiguous().view(dtype)


def _shapes(xs) -> str:
    return ", ".join(str(tuple(x.shape)) for x in xs)


def _same_sequence(device, first, end, n, reverse, lengths) -> Tensor:
    """[n, 1]: whether the token is of the sequence on this rank's side of the cut; it has tokens first .. end - 1."""
    here = end - 1 if reverse else first  # the token next to the cut
    begin, finish = next((a, b) for a, b in zip(lengths, lengths[1:]) if a <= here < b)
    places = range(end, end + n) if reverse else range(first - n, first)
    return torch.tensor([[begin <= t < finish] for t in places], device=device)
