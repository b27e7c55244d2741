"""This rank's memory that kernels of a communicator use: blocks of its arena, buffers, and the words that all share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch

from ..bindings.torch_compat import without_dispatch_modes
from ..bindings.transport import SymmetricHeap
from ..shmem_kernels import wait
from ..shmem_kernels.channel import STAMP, STAMPS

_abandoned: list[object] = []  # what kernels of communicators that were not closed may still write to


class Memory:
    """Of one communicator on this rank.

    heap: the symmetric heap, which one rank alone has not.
    record: the fault record, which the host reads. fault: a word on the device. steps: int64 [STAMPS, 2] there, by a
    call's stamp the word that its kernels take for ``step``, at multiples of 16 bytes; step: that of no stamp.
    """

    def __init__(self, heap: SymmetricHeap | None, device: torch.device) -> None:
        self.heap, self.device = cast(SymmetricHeap, heap), device  # which one rank alone asks for nothing
        self.record = torch.zeros(wait.RECORD_WORDS, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self.fault = torch.zeros(1, dtype=torch.int64, device=device)
        self._first_steps = torch.arange(0, STAMPS.value * STAMP.value, STAMP.value, device="cpu")
        self._first_steps = self._first_steps.repeat_interleave(2).view(-1, 2)
        self.steps = self._first_steps.to(device, copy=True)
        self.step = self.steps[0]
        self._steps = {0: self.step}
        self._offsets: set[int] = set()
        self._buffers = {id(buffer): buffer for buffer in (self.record, self.fault, self.steps)}

    def step_of(self, stamp: int) -> torch.Tensor:
        """The word of ``steps`` for a stamp."""
        found = self._steps.get(stamp)
        if found is None:
            with without_dispatch_modes():  # of selective checkpointing, which counts the operators of torch
                found = self._steps[stamp] = self.steps[stamp]
        return found

    def reset(self) -> None:
        """As if nothing had happened but for ``steps``. While no kernel runs."""
        for words in (self.record, self.fault):
            words.zero_()

    def reset_steps(self) -> None:
        """As at first. While no kernel runs; takes no memory of the GPU, of which there may be none left."""
        self.steps.copy_(self._first_steps)

    def alloc(self, nbytes: int) -> int:
        """Offset of a block of this rank's arena, until ``free``."""
        offset: int = self.heap.arena.alloc(nbytes)
        self._offsets.add(offset)
        return offset

    def free(self, *offsets: int) -> None:
        """Give blocks back, or all, when no kernel of any rank uses them any more."""
        for offset in offsets or [*self._offsets]:
            self._offsets.remove(offset)
            self.heap.arena.free(offset)

    def keep(self, buffer: torch.Tensor) -> torch.Tensor:
        """``buffer``, alive as long as kernels of the communicator may use it."""
        self._buffers[id(buffer)] = buffer
        return buffer

    def release(self, *buffers: torch.Tensor) -> None:
        """No kernel uses these buffers of ``keep`` any more."""
        for buffer in buffers:
            del self._buffers[id(buffer)]

    def holds(self, buffer: torch.Tensor) -> bool:
        """Whether ``buffer`` is kept."""
        return self._buffers.get(id(buffer)) is buffer

    def abandon(self) -> None:
        """Kernels may use all of it until this process ends."""
        _abandoned.append(self._buffers)


class Line(NamedTuple):
    """A line of ranks, along which there is a channel: all of a group, or one of each node."""

    rank: int  # this one's place in it
    pes: Sequence[int]  # what the transport calls each of them
    memory: Memory
    timeout: float
