"""zeco_ssd with bitwise equal results for every number of ranks, segment by segment: see docs/invariant.md.

No backward here adds up gradients of parts of a tensor, because the order of the sum would depend on the partition.
Tensors are split instead; the backward of a split concatenates.
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
    """A segment of one batch entry. The shapes of the calls that compute it do not depend on the partition."""

    state: Tensor  # [1, H, P, N] float32, local state
    decay: Tensor  # [1, H]: decay of a state over the segment
    outputs: Callable[[Tensor], Tensor]  # computes the outputs from the incoming state


class Ordered(NamedTuple):
    """Results of ``scan_in_order``."""

    outputs: list[Tensor]  # of each segment
    final: dict[int, Tensor]  # final states [B, H, P, N] by sequence, for sequences that end on this rank
    scanned: tuple[Tensor, ...]  # results of the scans; each rank must run their backward


def segments_of(span: TokenRange, tokens: int) -> list[int]:
    """Return the sizes of a span's parts after a split at multiples of ``tokens``, counted from the rank's first."""
    cuts = [span.start, *range((span.start // tokens + 1) * tokens, span.end, tokens), span.end]
    return [b - a for a, b in zip(cuts, cuts[1:]) if b > a]


def by_segments(tensors: dict[str, Tensor | None], sizes: list[int]) -> list[list[dict[str, Any]]]:
    """Split tensors [B, T, ...]; return them as [segment][batch entry]."""
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
    """Scan over this rank's spans, each with its segments by batch entry, and over the ranks. before(span): the initial
    state of the span's sequence [B, H, P, N]; zeros for None. An extra segment with the decay 0 begins a sequence."""
    entries: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(halves)]
    places, ends = [], {}
    for span, segments in spans:
        half = entries[span.half]
        if span.begins:
            state = before(span)
            half.append((state, state.new_zeros(state.shape[:2])))
        for batch in segments:
            places.append((span.half, len(half), batch))
            half.append((torch.cat([x.state for x in batch]), torch.cat([x.decay for x in batch])))
        if span.ends:
            ends[span.sequence] = span.half, len(half)
    like, inputs = before(None).detach(), []
    for half in entries:
        states, decays = zip(*half) if half else ((), ())
        pair = [
            torch.stack(x) if x else like.new_zeros(0, *shape)
            for x, shape in ((states, like.shape), (decays, like.shape[:2]))
        ]
        # equal on all ranks, also on a rank without segments
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
