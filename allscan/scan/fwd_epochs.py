"""fwd_epoch: device words. A forward launch writes its epoch there for its backward (shmem_kernels/channel.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..bindings.torch_compat import num_dispatch_modes, without_dispatch_modes

if TYPE_CHECKING:
    from ..comm.communicator import Communicator

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
