"""zeco_ssd with the same bits for every number of ranks: segment by segment, see docs/invariant.md.

Nothing here adds gradients of parts of a tensor, whose order would depend on where ranks end: tensors are split, which
is undone by putting the parts side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.communicator import Communicator
from ..tokens.packing import TokenRange
from .allscan_segments import allscan_segments


class Segment(NamedTuple):
    """Of one batch entry, made by calls of the same shapes wherever it lies."""

    state: Tensor  # [1, H, P, N] float32, from zero
    decay: Tensor  # [1, H]: what is left of a state behind it
    outputs: Callable[[Tensor], Tensor]  # of its incoming state


class Ordered(NamedTuple):
    """What ``scan_in_order`` has found."""

    outputs: list[Tensor]  # of each segment
    final: dict[int, Tensor]  # [B, H, P, N], by sequence, of those that end here
    scanned: tuple[Tensor, ...]  # whose backward each rank has to run


def segments_of(span: TokenRange, tokens: int) -> list[int]:
    """The sizes of the parts of a span that is cut at multiples of ``tokens`` of this rank's."""
    cuts = [span.start, *range((span.start // tokens + 1) * tokens, span.end, tokens), span.end]
    return [b - a for a, b in zip(cuts, cuts[1:]) if b > a]


def by_segments(tensors: dict[str, Tensor | None], sizes: list[int]) -> list[list[dict[str, Any]]]:
    """[segment][batch entry]: these tensors [B, T, ...]."""
    parts: list[list[dict[str, Any]]] = [[] for _ in sizes]
    for name, x in tensors.items():
        if x is None:
            continue
        for of_segment, part in zip(parts, x.split(sizes, 1) if sizes else (), strict=True):
            for b, one in enumerate(part.split(1)):
                of_segment += [{}] if b == len(of_segment) else []
                of_segment[b][name] = one.contiguous()
    return parts


def scan_in_order(
    comm: Communicator,
    spans: list[tuple[TokenRange, list[list[Segment]]]],
    halves: int,
    before: Callable[[TokenRange | None], Tensor],
    differentiable: bool,
) -> Ordered:
    """Over this rank's spans, each with its segments by batch entry, and over the ranks. before(span): the state [B, H,
    P, N] before a sequence, of None zeros. A sequence begins with a segment of its own, of the decay 0."""
    entries: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(halves)]
    places, ends = [], {}
    for span, segments in spans:
        half = entries[span.state_index]
        if span.begins:
            state = before(span)
            half.append((state, state.new_zeros(state.shape[:2])))
        for batch in segments:
            places.append((span.state_index, len(half), batch))
            half.append((torch.cat([x.state for x in batch]), torch.cat([x.decay for x in batch])))
        if span.ends:
            ends[span.sequence] = span.state_index, len(half)
    like, inputs = before(None).detach(), []
    for half in entries:
        states, decays = zip(*half) if half else ((), ())
        pair = [
            torch.stack(x) if x else like.new_zeros(0, *shape)
            for x, shape in ((states, like.shape), (decays, like.shape[:2]))
        ]
        # on all ranks alike, also where no segment is
        inputs.append([x.detach().requires_grad_() if differentiable and not x.requires_grad else x for x in pair])
    if halves == 1:
        incoming, outgoing = ((x,) for x in allscan_segments(*inputs[0], comm=comm))
    else:
        incoming, outgoing = allscan_segments(*map(tuple, zip(*inputs, strict=True)), comm=comm, layout="zigzag")
    states_at = [[*x.unbind(0), last] for x, last in zip(incoming, outgoing, strict=True)]
    outputs = []
    for number, n, batch in places:
        ones = states_at[number][n].split(1)
        outputs.append(torch.cat([x.outputs(state) for x, state in zip(batch, ones, strict=True)]))
    final = {sequence: states_at[number][n] for sequence, (number, n) in ends.items()}
    return Ordered(outputs, final, (*incoming, *outgoing))
