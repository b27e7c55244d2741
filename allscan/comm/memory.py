"""Memory of this rank that a communicator's kernels use: blocks of its arena, buffers, and shared words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch

from ..bindings.arena import SymmetricHeap
from ..bindings.torch_compat import without_dispatch_modes
from ..shmem_kernels import wait
from ..shmem_kernels.channel import STAMPS, STEPS_A_STAMP

_abandoned: list[object] = []  # buffers of unclosed communicators: their kernels may still write to them


class Memory:
    """Memory of one communicator on this rank.

    heap: the symmetric heap; None in a communicator of one rank.
    record: the fault record, int64 in host memory. fault: int64 word on the device. steps: int64 [STAMPS, 2] on the
    device; row ``stamp`` holds the step word of calls with that stamp, at a multiple of 16 bytes. step: row 0 of it,
    for calls without a stamp.
    """

    def __init__(self, heap: SymmetricHeap | None, device: torch.device) -> None:
        self.heap, self.device = cast(SymmetricHeap, heap), device  # None for one rank, which does not use it
        self.record = torch.zeros(wait.RECORD_WORDS, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self.fault = torch.zeros(1, dtype=torch.int64, device=device)
        stamps = torch.arange(0, STAMPS.value * STEPS_A_STAMP.value, STEPS_A_STAMP.value, device="cpu")
        self.steps = stamps.repeat_interleave(2).view(-1, 2).to(device)
        self.step = self.steps[0]
        self._steps = {0: self.step}
        self._offsets: set[int] = set()
        self._unused: list[int] = []
        self._buffers = {id(buffer): buffer for buffer in (self.record, self.fault, self.steps)}

    def step_of(self, stamp: int) -> torch.Tensor:
        """The row of ``steps`` for a stamp, int64 [2]."""
        found = self._steps.get(stamp)
        if found is None:
            with without_dispatch_modes():  # selective checkpointing's mode counts torch operators
                found = self._steps[stamp] = self.steps[stamp]
        return found

    def reset(self) -> None:
        """Clear the fault record and the fault word, not ``steps``. Only while no kernel runs."""
        for words in (self.record, self.fault):
            words.zero_()

    def alloc(self, nbytes: int) -> int:
        """Allocate a block of this rank's arena. Returns its offset in bytes, valid until ``free``."""
        offset: int = self.heap.arena.alloc(nbytes)
        self._offsets.add(offset)
        return offset

    def free(self, *offsets: int) -> None:
        """Free the blocks at ``offsets``; without offsets all. Only when no kernel of any rank uses them any more."""
        for offset in offsets or [*self._offsets]:
            self._offsets.remove(offset)
            self.heap.arena.free(offset)

    def free_later(self, *offsets: int) -> None:
        """Free these blocks at the next ``free_unused``: another rank may know them."""
        self._unused += offsets

    def free_unused(self) -> None:
        """Free the blocks of ``free_later``. Only if no rank has an AllScan that another one lacks."""
        offsets, self._unused = self._unused, []
        if offsets:
            self.free(*offsets)

    def keep(self, buffer: torch.Tensor) -> torch.Tensor:
        """Hold ``buffer`` as long as kernels of the communicator may use it. Returns it."""
        self._buffers[id(buffer)] = buffer
        return buffer

    def release(self, *buffers: torch.Tensor) -> None:
        """Drop buffers of ``keep`` that no kernel uses any more."""
        for buffer in buffers:
            del self._buffers[id(buffer)]

    def holds(self, buffer: torch.Tensor) -> bool:
        """Whether ``keep`` holds ``buffer``."""
        return self._buffers.get(id(buffer)) is buffer

    def abandon(self) -> None:
        """Hold all buffers until the process ends, since kernels may still use them."""
        _abandoned.append(self._buffers)


class Line(NamedTuple):
    """A line of ranks that a channel connects: all ranks of a group, or one rank of each node."""

    rank: int  # position of this rank in the line
    pes: Sequence[int]  # the transport's PE number of each rank
    memory: Memory
    timeout: float  # seconds
