"""fwd_epoch: device words in which a forward launch leaves its epoch for its backward (shmem_kernels/channel.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..bindings.torch_compat import num_dispatch_modes, without_dispatch_modes

if TYPE_CHECKING:
    from ..comm.communicator import Communicator

FWD_EPOCHS = 4  # words of the forward epochs of a call in the zigzag layout: two, each at a multiple of 16 bytes
AT_ONCE = 64  # that are allocated


def new_fwd_epochs(comm: Communicator, *shape: int) -> torch.Tensor:
    """Where there are torch dispatch modes they do not see it. Selective activation checkpointing rejects operators in
    a recomputation that forward did not call, and FakeTensorMode's tensors have no memory."""
    new_empty = comm.memory.step.new_empty  # half the time of torch.empty
    if num_dispatch_modes() == 0:
        return new_empty(shape)
    with without_dispatch_modes():
        return new_empty(shape)


def borrow_fwd_epoch(comm: Communicator) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
    """A forward epoch of the communicator's, which takes no allocation, and the list that it is put back into once no
    launch that is still to come reads it. Launches of a communicator follow one another, so whoever takes it next
    writes to it behind those that read it. In a capture a new one: replays use it again."""
    if comm.streams.capturing():
        return new_fwd_epochs(comm, 1), None
    free = comm.fwd_epochs
    if not free:
        comm.streams.follow()  # so that launches on other streams come behind the memory's earlier use on this one
        block = comm.memory.keep(new_fwd_epochs(comm, AT_ONCE, 2))  # at multiples of 16 bytes
        with without_dispatch_modes():
            fwd_epoch, *others = block[:, :1].unbind()
        free += others
        return fwd_epoch, free
    try:
        return free.pop(), free
    except IndexError:  # another thread has taken the last one
        return new_fwd_epochs(comm, 1), None
