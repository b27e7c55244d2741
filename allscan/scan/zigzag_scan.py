"""The two scans of the zigzag layout: in ascending order of the ranks, then in descending order."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base.checks import ScanInputs, Shift
from ..launch.plan import Plan
from ..shmem_kernels.channel import Channel
from .collective import AllScan
from .launcher import ChannelUse, ScanBuffers
from .segment_launches import SegmentScans


def two_way_scan(
    scan: AllScan,
    ascending: ScanInputs,
    descending: ScanInputs,
    *,
    channels: tuple[Channel, Channel] | None = None,
) -> tuple[Tensor, Tensor]:
    """Scan both halves of the zigzag layout: ``ascending`` from the first rank to the last, then ``descending`` from
    the last rank to the first. The descending scan begins with the outgoing state of the ascending one.

        R_0 = initial_state (or 0),   R_{p+1} = decay_p R_p + ascending_p,
        E_{P-1} = R_P,                E_{p-1} = decay'_p E_p + descending_p

    Only ``ascending`` may have an initial_state; neither has an ``out``. channels: of the ascending and of the
    descending scan. Returns (R_p, E_p). The adjoint exchanges the two inputs.
    Deadlock-free: the ascending scan depends only on ascending scans of lower ranks; the descending scan, launched
    after it, depends on ascending scans and on descending scans of higher ranks.
    """
    for_ascending, for_descending = channels or (None, None)
    state, decay, transition, initial_state, _ = ascending
    prev = scan.scan(state, decay, initial_state=initial_state, transition=transition, channel=for_ascending)
    outgoing_state = None
    if scan.comm.rank == scan.comm.size - 1:
        outgoing_state = outgoing(ascending, prev)
    state, decay, transition, *_ = descending
    back = scan.scan(
        state, decay, initial_state=outgoing_state, transition=transition, reverse=True, channel=for_descending
    )
    return prev, back


def record_two_way(
    plan: Plan, scan: AllScan, ascending: ScanBuffers, descending: ScanBuffers, adjoint: bool, stamp: int | None
) -> None:
    """Record ``two_way_scan`` in a plan, which runs inside a call of the communicator.

    adjoint: the scans are the adjoints of those that wrote the forward epochs; transitions are multiplied as given, so
    they are transposed already. stamp: see ChannelUse. The last rank's ascending scan is one over a
    segment, because that kernel also writes the outgoing state, with which the descending scan begins.
    """
    upwards = ChannelUse(False, adjoint, stamp)
    last = scan.comm.rank == scan.comm.size - 1
    outgoing_state = ascending.state if last else None
    if last and (ascending.decay or ascending.transition):
        outgoing_state = plan.scratch(*scan.shape)
        SegmentScans.of(scan).record(plan, ascending, outgoing_state, upwards)
    else:
        scan.launcher.record_scan(plan, ascending, upwards)
    scan.launcher.record_scan(plan, descending, ChannelUse(True, adjoint, stamp, True), outgoing_state)


def two_way_channels(scan: AllScan, fwd_epoch: Tensor, adjoint: bool) -> tuple[Channel, Channel]:
    """The channels of ``two_way_scan``. fwd_epoch: int64 [FWD_EPOCHS], memory for one forward epoch of each scan."""
    halves = fwd_epoch[:2], fwd_epoch[2:]  # the adjoint exchanges them
    ascending, descending = halves[::-1] if adjoint else halves
    make = scan.launcher.channel
    return make(False, ascending, adjoint), make(True, descending, adjoint)


def outgoing(inputs: ScanInputs, prev: Tensor, adjoint: bool = False) -> Tensor:
    """The outgoing state of a rank whose incoming state is ``prev``: decay * prev + state, or state for a decay of 0.
    Differentiable."""
    state: Tensor = inputs.state
    decay, transition = inputs.decay, inputs.transition
    factor: Any
    found: Tensor
    if isinstance(decay, Shift):
        rows = -decay.rows if adjoint else decay.rows
        return state + F.pad(prev, (0, 0, -rows, rows))  # negative padding drops rows
    if transition is not None:  # float64, since torch may multiply float32 as TF32
        factor = transition.mT if adjoint else transition
        found = (factor.double() @ prev.double() + state).float()
        return found
    if decay is None:
        return prev + state
    if not isinstance(decay, Tensor):
        found = state if decay == 0 else decay * prev + state
        return found
    factor = decay[(...,) + (None,) * (prev.ndim - decay.ndim)] if decay.ndim else decay
    found = factor * torch.where(factor == 0, prev.nan_to_num(0.0, 0.0, 0.0), prev) + state
    return found
