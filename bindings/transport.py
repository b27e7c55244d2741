"""What a symmetric heap offers, whichever the transport: the part that channels are built on."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from .arena import Arena


class SymmetricHeap(Protocol):
    """One block of memory a process, of which peers know each other's addresses.

    ``pe`` is the transport's own number of a process, ``pes[rank]`` that of a rank of the job; offsets are bytes.
    """

    transport: str  # "nvshmem", "ipc" or "shm"
    device: torch.device
    arena: Arena  # what is taken of this process's block
    pes: list[int]

    def local(self, pe: int, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """``numel`` elements at ``offset`` of this process's own block; ``pe`` is its own."""

    def view(self, pe: int, offset: int, numel: int, dtype: torch.dtype) -> Any:
        """What a kernel is given to reach ``offset`` of the block of ``pe`` by loads and stores. RuntimeError unless
        ``is_mapped``."""

    def symmetric(self, offset: int, dtype: torch.dtype) -> Any:
        """The local address by which a put names ``offset`` on whatever PE it is given."""

    def is_mapped(self, pe: int) -> bool:
        """Whether this process reaches the block of ``pe`` by loads and stores."""

    def quiet(self) -> None:
        """Return when the puts of this process's kernels, which have ended, have arrived."""

    def close(self, together: bool) -> None:
        """Give the block back: collective over the job, or by this rank alone, where others may be gone."""
