"""Detection of a backward pass that autograd ran on other ranks but not here, where the call's result is unused."""

from __future__ import annotations

import time
from typing import Any

import torch

from ..base.errors import REMEDY
from ..shmem_kernels.links import EPOCH_BITS, NONE


def look_for_backwards(launcher: Any, reverse: bool) -> None:
    """Called after a call in direction ``reverse`` had no backward on this rank. Raise RuntimeError if the rank that
    sends to this one in the backward direction has run its backward; return once that rank has begun its next call.

    Waits for that rank's next launch. Validation under torch.no_grad() avoids the wait: it has no backward.
    """
    comm, rails = launcher.comm, launcher.rails
    launcher.backwards.dropped[reverse] = False
    there, back = launcher.channels[reverse], launcher.channels[not reverse]
    first = back.RECV == NONE if rails is None else rails.is_first(not reverse)
    if first or comm.streams.capturing():
        return  # this rank's backward waits for no rank: the others wait for it
    peek, deadline = comm.streams.peek, time.monotonic() + comm.timeout
    if comm.streams.cuda:
        torch.cuda.current_stream(comm.device).synchronize()
    launched, epoch = peek(there.epoch[:1])[0], peek(back.epoch[:1])[0]
    while time.monotonic() < deadline and launched >= 0 <= epoch:
        if rails is None:
            begun = max(peek(there.freed[: launcher.spec.depth])) >= launched
            arrived = peek(back.arrived[:: launcher.spec.num_tiles])
            ran = any(word & EPOCH_BITS.value == epoch + 1 for word in arrived)
        else:
            begun = rails.have_begun(reverse, launched)
            ran = rails.have_run(not reverse, epoch)
        if ran:
            raise RuntimeError(
                "a call with gradients had no backward on this rank, but on another one: this rank has not used "
                "what the call returned, and its gradients since then lack that call's part. Use the "
                f"result on every rank, 0 * result.sum() if need be; or torch.no_grad() on all. {REMEDY}."
            )
        if begun:
            return
        time.sleep(1e-3)
