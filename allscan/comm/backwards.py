"""Backward passes of calls: the forward epoch, a device word that pairs each with its forward launch, which writes it
(shmem_kernels/channel.py); and detection of calls whose backward did not run on a rank."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..bindings.torch_compat import graph_task, in_backward, num_dispatch_modes, without_dispatch_modes
from .call_order import Order
from .communicator import Communicator, communicator_of

recomputing = in_backward  # activation checkpointing makes the calls in a backward pass; their nodes never run


@dataclasses.dataclass(eq=False)
class Backwards:
    """The state of backward passes of one AllScan on this rank."""

    order: Order
    dropped: list[bool]  # [reverse]: a forward launch in that direction had no backward on this rank
    adjoint_launches: int = 0  # counted on the host


class PendingBackward:
    """Detects that a differentiable call's backward never ran (its autograd node, which owns this object, was freed).

    If the node is freed without having run, and no other backward of its AllScan has run since the call, there are two
    cases: no rank runs a backward (validation with gradients enabled), or this rank alone has ignored the call's
    results and its gradients lack a part. ``AllScan`` finds out which before its next launch in that direction.

    reverse: direction of the call's scan. None: do not look, in the zigzag layout of a chain. Its backward begins with
        a scan that stops at the rank that has ignored the results, and that rank's next call finds another tag.
    fwd_epoch, fwd_epochs: the node's buffer of ``borrow_fwd_epoch``, and the free list to which it is
        returned.
    """

    __slots__ = "_of", "_reverse", "_adjoint_launches", "generation", "_fwd_epoch", "_fwd_epochs"

    def __init__(
        self,
        backwards: Backwards,
        reverse: bool | None,
        fwd_epoch: Any = None,
        fwd_epochs: list[torch.Tensor] | None = None,
    ) -> None:
        self._of, self._reverse, self._adjoint_launches = weakref.ref(backwards), reverse, backwards.adjoint_launches
        self.generation = backwards.order.generation
        self._fwd_epoch, self._fwd_epochs = fwd_epoch, fwd_epochs

    def run(self) -> None:
        """Record that the backward runs. Raises RuntimeError if the AllScan was deleted, or if a resync() followed the
        forward call."""
        backwards = self._of()
        if backwards is None:
            raise RuntimeError(GONE)
        if backwards.order.generation != self.generation:
            raise RuntimeError("this call was made before Communicator.resync(): its backward can no longer run")
        backwards.adjoint_launches += 1

    def __del__(self) -> None:
        if self._fwd_epochs is not None:
            self._fwd_epochs.append(self._fwd_epoch)
        backwards = self._of()
        if backwards is None or backwards.order.generation != self.generation:
            return
        if self._reverse is not None and backwards.adjoint_launches == self._adjoint_launches:
            backwards.dropped[self._reverse] = True


def pending_backward(scan: Any, reverse: bool | None) -> PendingBackward | None:
    """The PendingBackward of a differentiable call that has run scans of ``scan``; None in a recomputation."""
    return None if graph_task() != -1 else PendingBackward(scan.launcher.backwards, reverse)  # as ``recomputing``


GONE = "the communicator of this call was closed, or its AllScan deleted"


def gone_error(handle: int) -> RuntimeError:
    """The error for an autograd node whose AllScan was deleted. Nodes hold weak references, so that they do not keep a
    communicator and its memory alive. Raises the communicator's own error if the one with this ``handle`` is closed,
    broken or deleted."""
    communicator_of(handle).check()
    return RuntimeError(GONE)


def saved_tensors(ctx: Any, comm: Callable[[], Communicator], reverse: bool) -> tuple[torch.Tensor, ...]:
    """ctx.saved_tensors, for a backward pass that is about to make its call. Reading it may make other calls, of
    activation checkpointing. An error of it (a saved tensor was modified in place) is recorded as an error of this
    backward's call, which the other ranks make."""
    try:
        saved: tuple[torch.Tensor, ...] = ctx.saved_tensors
        return saved
    except Exception:
        with comm().call(reverse):
            raise


FWD_EPOCHS = 4  # int64 words of a call in the zigzag layout: two forward epochs, each at a multiple of 16 bytes
AT_ONCE = 64  # forward epochs of one allocation


def new_fwd_epochs(comm: Communicator, *shape: int) -> torch.Tensor:
    """Allocate forward epochs of this shape, int64, outside of torch dispatch modes. Selective activation checkpointing
    rejects operators in a recomputation that forward did not call, and FakeTensorMode's tensors have no memory."""
    new_empty = comm.memory.step.new_empty  # takes half the time of torch.empty
    if num_dispatch_modes() == 0:
        return new_empty(shape)
    with without_dispatch_modes():
        return new_empty(shape)


def borrow_fwd_epoch(comm: Communicator) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
    """Borrow a forward epoch from the communicator's free list, without an allocation. Returns (the forward epoch, its
    free list). The caller puts the epoch back once no future launch reads it: launches of a communicator are ordered,
    so the next borrower's write comes after those reads. A capture gets a new epoch and no list: replays reuse it."""
    if comm.streams.capturing():
        return new_fwd_epochs(comm, 1), None
    free = comm.fwd_epochs
    if not free:
        comm.streams.follow()  # orders launches on other streams after the memory's earlier use on this one
        block = comm.memory.keep(new_fwd_epochs(comm, AT_ONCE, 2))  # at multiples of 16 bytes
        with without_dispatch_modes():
            fwd_epoch, *others = block[:, :1].unbind()
        free += others
        return fwd_epoch, free
    try:
        return free.pop(), free
    except IndexError:  # another thread has taken the last one
        return new_fwd_epochs(comm, 1), None
