"""The two scans of the zigzag layout: over the ranks, and back from the last one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base.checks import ScanInputs, Shift
from ..shmem_kernels.channel import Channel
from .collective import AllScan


def two_way_scan(
    scan: AllScan,
    there: ScanInputs,
    back: ScanInputs,
    *,
    adjoint: bool = False,
    channels: tuple[Channel, Channel] | None = None,
) -> tuple[Tensor, Tensor]:
    """The scan of ``there`` over the ranks, then that of ``back`` from the last rank to the first, which begins with
    what the first one leaves behind the last rank: both halves of the zigzag layout.

        R_0 = initial_state (or 0),   R_{p+1} = decay_p R_p + there_p,
        E_{P-1} = R_P,                E_{p-1} = decay'_p E_p + back_p

    initial_state: that of ``there``; ``back`` has none, nor have they an ``out``. adjoint: the transposed transitions.
    channels: of the two. Returns (R_p, E_p). The adjoint is the same with the two exchanged. Deadlock-free: the scan
    there depends on scans there of ranks before only, and the scan back, launched behind it, on scans there and on
    scans back of the ranks behind.
    """
    for_there, for_back = channels or (None, None)
    state, decay, transition, initial_state, _ = there
    arguments = dict(transition=transition, adjoint=adjoint, channel=for_there)
    prev = scan.scan(state, decay, initial_state=initial_state, **arguments)
    handed = None
    if scan.comm.rank == scan.comm.size - 1:
        handed = outgoing(there, prev, adjoint)
    state, decay, transition, *_ = back
    arguments = dict(transition=transition, adjoint=adjoint, channel=for_back)
    return prev, scan.scan(state, decay, initial_state=handed, reverse=True, **arguments)


def two_way_channels(scan: AllScan, fwd_epoch: Tensor, adjoint: bool) -> tuple[Channel, Channel]:
    """For ``two_way_scan``; ``fwd_epoch``: int64 [FWD_EPOCHS], with room for one of each."""
    make = scan.launcher.channel
    if adjoint:  # of the halves in the other order
        return make(False, adjoint_of=fwd_epoch[2:]), make(True, adjoint_of=fwd_epoch[:2])
    return make(False, fwd_epoch=fwd_epoch[:2]), make(True, fwd_epoch=fwd_epoch[2:])


def outgoing(inputs: ScanInputs, prev: Tensor, adjoint: bool = False) -> Tensor:
    """The outgoing state of a rank with the incoming state ``prev``, differentiable: decay * prev + state; of a decay
    that is 0, state."""
    state: Tensor = inputs.state
    decay, transition = inputs.decay, inputs.transition
    factor: Any
    found: Tensor
    if isinstance(decay, Shift):
        rows = -decay.rows if adjoint else decay.rows
        return state + F.pad(prev, (0, 0, -rows, rows))  # negative: rows that are left out
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
