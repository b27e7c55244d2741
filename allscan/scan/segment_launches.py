"""Kernel launches of one AllScan's scans over segments; see shmem_kernels/segments.py."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.caches import Recent
from ..base.checks import decay_rows, plain
from ..base.tiling import next_power_of_2, transition_blocks
from ..launch.compiled_kernel import Launch
from ..launch.plan import Buffer, Plan
from ..shmem_kernels.segments import (
    ADDED,
    INITIAL,
    NOTHING,
    dense_segments_kernel,
    outer_products_kernel,
    row_sums_kernel,
    segments_kernel,
)
from .collective import AllScan
from .launcher import ChannelUse, ScanBuffers


class Segments(NamedTuple):
    """The segments of one rank: states [n, ..., K, V], with decays (None, a number, [n, ..., K] or [n, ...]) or with
    transitions [n, ..., K, K]."""

    states: Tensor
    decays: Any = None
    transitions: Tensor | None = None


class Direction(NamedTuple):
    """The direction of a scan over segments. reverse: from the last rank to the first; descending: from a rank's last
    segment to its first; adjoint: the scan is the adjoint of a forward scan, with transposed transitions."""

    reverse: bool = False
    descending: bool = False
    adjoint: bool = False

    def back(self) -> Direction:
        """The direction of the adjoint scan."""
        return Direction(not self.reverse, not self.descending, True)


class SegmentScans:
    """The scans over segments of one AllScan, which must be a chain."""

    def __init__(self, scan: AllScan) -> None:
        self.comm, self.launcher, self.shape = scan.comm, scan.launcher, scan.shape
        self._spec = scan.spec
        self._launches = Recent()

    @staticmethod
    def of(scan: AllScan) -> SegmentScans:
        """The SegmentScans of ``scan``, one object until its communicator is closed."""
        attributes, name = scan.comm.attributes, ("scans over segments", scan.number)
        found: SegmentScans = attributes.get(name) or attributes.setdefault(name, SegmentScans(scan))
        return found

    def is_first(self, reverse: bool) -> bool:
        """Whether this rank is the first one in the direction and receives no state."""
        return self.comm.rank == (self.comm.size - 1 if reverse else 0)

    def run(
        self, segments: Segments, direction: Direction, fwd_epoch: Tensor | None, initial: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(The incoming state of each segment, the outgoing state). Runs inside a call of the communicator, with
        checked inputs. ``initial``: the initial state, which the first rank uses; for an adjoint, a term added to the
        incoming gradient."""
        states, decays, transitions = segments
        states, added = plain(states), NOTHING.value
        if initial is not None and (direction.adjoint or self.is_first(direction.reverse)):
            added = ADDED.value if direction.adjoint else INITIAL.value
        factor, ndim = states, 0
        if transitions is not None:
            factor = plain(transitions)
        elif decays is not None:
            factor = decay_rows(decays, states.shape, self.comm.device)
            ndim = factor.ndim
        incoming, outgoing = torch.empty_like(states), states.new_empty(self.shape)
        key = len(states), direction, ndim, decays is not None, transitions is not None, added
        launch = self._launches.find(key, lambda: self._make(*key))
        reverse, stamp = direction.reverse, self.comm.order.stamp_in(direction.reverse)
        channel = self.launcher.channel(reverse, fwd_epoch, direction.adjoint, stamp)
        self.launcher.before_launch(launch.kernel, reverse)
        initial = states if initial is None else plain(initial)
        self.launcher.after_launch(launch(states, factor, initial, incoming, outgoing, channel))
        if self.comm.debug:
            self.comm._look_for_nan("allscan_segments()", incoming=incoming, outgoing=outgoing)
        return incoming, outgoing

    def record(self, plan: Plan, segment: ScanBuffers, outgoing: Buffer, use: ChannelUse) -> None:
        """Record a scan over one segment in a plan, which also writes the outgoing state. Transitions are not
        transposed."""
        state, out, fwd_epoch, decay, transition, _ = segment
        factor = decay or transition
        assert factor is not None, "the outgoing state is the segment's"
        launch = self._make(1, Direction(use.reverse), len(self.shape), decay is not None, decay is None, NOTHING.value)
        self.launcher.record_launch(plan, launch, (state, factor, state, out, outgoing, fwd_epoch), use)

    def _make(self, n: int, direction: Direction, ndim: int, has_decay: bool, dense: bool, added: int) -> Launch:
        *lead, K, V = self.shape
        fixed: dict[str, Any] = dict(n=n, MATRICES=math.prod(lead), K=K, V=V, EXTERNAL=added)
        fixed |= dict(DESCENDING=direction.descending)
        if dense:
            strides = (1, K) if direction.adjoint else (K, 1)  # of a transition
            fixed |= dense_blocks(self._spec.tile[0])
        else:
            # ndim: of decays [n, ..., K] or [n, ...], 0 for a number
            strides = (K, 1) if ndim == len(self.shape) else (min(ndim, 1), 0)
            ahead = segments_ahead(n, self._spec.tile, self.launcher.num_warps)
            fixed |= dict(HAS_DECAY=has_decay, AHEAD=ahead, MORE=n > ahead, num_warps=self.launcher.num_warps)
        kernel = self.launcher.linked(dense_segments_kernel if dense else segments_kernel)
        fixed |= dict(zip(("stride_i", "stride_j") if dense else ("stride_g", "stride_k"), strides))
        return Launch(kernel, (self.launcher.segment_programs,), **fixed)


def segments_ahead(n: int, tile: tuple[int, int], num_warps: int) -> int:
    """AHEAD of segments_kernel for n segments: a power of two up to 8, whose tiles fill at most 128 registers of a
    thread."""
    return min(next_power_of_2(max(1, n)), 8, 128 * 32 * num_warps // math.prod(tile))


def dense_blocks(BK: int) -> dict[str, int]:
    """Launch options of dense_segments_kernel, which depend on the rows of a state only. With the loop over segments a
    transition of 128 rows does not fit in the registers."""
    return transition_blocks(BK) | ({"BJ": 32} if BK == 128 else {})


def row_sums(x: Tensor, y: Tensor | None = None) -> Tensor:
    """The row sums [...] of x [..., W], or of x * y. The bits of a row's sum do not depend on other rows."""
    sums, W = x.new_empty(x.shape[:-1]), x.shape[-1]
    if sums.numel():
        fixed: dict[str, int] = dict(W=W, BW=min(128, next_power_of_2(W)), PRODUCT=y is not None, num_warps=1)
        row_sums_kernel[(sums.numel(),)](x, x if y is None else y, sums, **fixed)
    return sums


def outer_products(x: Tensor, y: Tensor) -> Tensor:
    """x y^T, [..., K, K], of x and y [..., K, V]. The bits of a product do not depend on other products."""
    K, V = x.shape[-2:]
    found = x.new_empty((*x.shape[:-1], K))
    if found.numel():
        BK, BV = (min(64, max(16, next_power_of_2(width))) for width in (K, V))
        programs = math.prod(x.shape[:-2]) * (-(-K // BK)) ** 2
        outer_products_kernel[(programs,)](x, y, found, K=K, V=V, BK=BK, BV=min(32, BV), num_warps=4)
    return found
