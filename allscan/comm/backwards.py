"""The backward passes that calls with gradients are to have: whether each rank runs its own."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..bindings.torch_compat import in_backward
from .call_order import Order
from .communicator import Communicator, communicator_of

recomputing = in_backward  # calls in a backward pass are activation checkpointing's, whose nodes are not run


@dataclasses.dataclass(eq=False)
class Backwards:
    """Of one AllScan on this rank."""

    order: Order
    dropped: list[bool]  # [reverse]: a forward launch in that direction had no backward on this rank
    adjoint_launches: int = 0  # as the host has made them


class PendingBackward:
    """Stands for the backward pass that a call with gradients is to have; lives as long as its autograd node.

    If the node goes without having run, and no other backward of its AllScan has run since the call, either no rank
    runs one (validation with gradients enabled), or this rank alone has ignored what the call returned: then its
    gradients lack a part. ``AllScan`` finds out which before its next launch in that direction.

    forward epoch, forward epochs: what the node has of ``borrow_fwd_epoch`` (fwd_epochs.py), and the list into which it
        is put back.
    """

    __slots__ = "_of", "_reverse", "_adjoint_launches", "generation", "_fwd_epoch", "_fwd_epochs"

    def __init__(
        self,
        backwards: Backwards,
        reverse: bool,
        fwd_epoch: Any = None,
        fwd_epochs: list[torch.Tensor] | None = None,
    ) -> None:
        self._of, self._reverse, self._adjoint_launches = weakref.ref(backwards), reverse, backwards.adjoint_launches
        self.generation = backwards.order.generation
        self._fwd_epoch, self._fwd_epochs = fwd_epoch, fwd_epochs

    def run(self) -> None:
        """The backward runs now. Raises RuntimeError if the forward call was before a resync()."""
        backwards = self._of()
        if backwards is None:
            raise RuntimeError("the AllScan of this call is gone")
        if backwards.order.generation != self.generation:
            raise RuntimeError("this call was made before Communicator.resync(): its backward cannot be run any more")
        backwards.adjoint_launches += 1

    def __del__(self) -> None:
        if self._fwd_epochs is not None:
            self._fwd_epochs.append(self._fwd_epoch)
        backwards = self._of()
        if backwards is None or backwards.order.generation != self.generation:
            return
        if backwards.adjoint_launches == self._adjoint_launches:
            backwards.dropped[self._reverse] = True


def lost(handle: int) -> RuntimeError:
    """The error where what a node of autograd's graph refers to, weakly, since it is not to keep a communicator with
    its memory, is gone. Raises what is wrong if the communicator of this ``handle`` is closed or gone."""
    communicator_of(handle).check()
    return RuntimeError("the AllScan of this call is gone")


def pending_backwards(backwards: Backwards, zigzag: bool) -> list[PendingBackward]:
    """For the scan of a call, with ``zigzag`` for those of both halves: ascending and descending."""
    there = PendingBackward(backwards, False)
    return [there, PendingBackward(backwards, True)] if zigzag else [there]


def saved_tensors(ctx: Any, comm: Callable[[], Communicator], reverse: bool) -> tuple[torch.Tensor, ...]:
    """ctx.saved_tensors, for a backward pass that is about to make its call; here activation checkpointing may make
    others. What it raises (a tensor that was written to since) is this call's error: the others make it."""
    try:
        saved: tuple[torch.Tensor, ...] = ctx.saved_tensors
        return saved
    except Exception:
        with comm().call(reverse):
            raise
