"""Recurrent layers of other packages over a split sequence, around functions that know nothing of it: delta rules by
one call for each piece of a sequence, and short convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..checks import has_tangents
from ..collective import leaves
from ..halos import halo
from ..operators import product
from ..ops import allscan
from ..ssd import Using


class Piece(NamedTuple):
    """Consecutive tokens of a rank that are of one sequence."""

    tokens: int
    half: int  # of the zigzag layout
    entered: bool  # whether there are tokens of the sequence before


def convolved(conv: Callable, n: int, x, pieces: list[Piece], **where):
    """conv over x [B, T, C] with the n tokens before each cut, and zeros where a sequence begins."""
    before = [torch.zeros_like(x[:, :1]).expand(-1, n, -1)] * len(pieces)
    for some, found in zip(_halves(pieces), halo(x, n, **where).split(n, 1), strict=True):
        before[some[0]] = found
    rows = [row for pair in zip(before, _split(x, pieces), strict=True) for row in pair]
    y = conv(torch.cat(rows, 1))
    return joined(y.split([row.shape[1] for row in rows], 1)[1::2])


def delta_rule(operator: Callable, q, k, v, g, beta, pieces: list[Piece], *, comm, final: bool = False):
    """(o, with ``final`` the state after these tokens, in the contiguous layout) of Gated DeltaNet and KDA.

    operator: called as fla's are, with initial_state and output_final_state, for each piece. Outputs and last states
    are linear in values and first states together: K columns of zeros behind the values, with the unit matrix for their
    first state, give how both depend on it.
    """
    if has_tangents((q, k, v, g, beta)):
        with comm.call(False, "a delta rule", (q, k, v, g, beta)):  # which refuses them
            pass
    q, k, v, g, beta = (t.resolve_neg() for t in (q, k, v, g, beta))  # whose kernels see the memory alone
    (batch, _, HV, V), K, halves = v.shape, k.shape[-1], _halves(pieces)
    zeros = torch.zeros(batch, HV, K, V + K, dtype=torch.float32, device=v.device)
    identity = torch.eye(K, dtype=torch.float32, device=v.device)
    unit = torch.cat([zeros[..., :V], identity.expand(batch, HV, K, K)], -1)
    wide = [i in (some[0] for some in halves) and piece.entered for i, piece in enumerate(pieces)]
    outputs, states = [], []
    for more, *tensors in zip(wide, *(_split(t, pieces) for t in (q, k, v, g, beta)), strict=True):
        q, k, v, g, beta = tensors
        o, state = operator(
            q, k, F.pad(v, (0, K)) if more else v, g=g, beta=beta, initial_state=unit if more else None,
            output_final_state=True,
        )  # fmt: skip
        outputs.append(o)
        states.append(state.float())
    left = [states[some[-1]][..., :V] for some in halves]
    passes = [len(some) == 1 and wide[some[0]] for some in halves]  # of what enters, nothing passes an end
    through = [(states[some[0]] if p else zeros)[..., V:] for some, p in zip(halves, passes, strict=True)]
    if len(halves) > 1:
        prevs = allscan(tuple(left), comm=comm, transition=tuple(through), layout="zigzag")
    else:
        prevs = (allscan(left[0], comm=comm, transition=through[0]),)
    for some, prev in zip(halves, prevs, strict=True):
        o = outputs[some[0]]
        if wide[some[0]]:
            added = product(o[..., V:].float().transpose(1, 2), prev).transpose(1, 2)
            outputs[some[0]] = (o[..., :V].float() + added).to(o.dtype)
    o = Using.apply(joined(outputs), *prevs)
    return o, leaves(left[0], None, through[0], prevs[0]) if final else None


def joined(parts):
    """[B, T, ...] one behind the other."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _split(x, pieces):
    return x.split([piece.tokens for piece in pieces], 1)


def _halves(pieces) -> list[list[int]]:
    """The numbers of the pieces of each half, of all in the contiguous layout."""
    numbers = range(pieces[-1].half + 1)
    return [[i for i, piece in enumerate(pieces) if piece.half == half] for half in numbers]
