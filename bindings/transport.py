"""Interface of a symmetric heap for all transports; channels are built on it."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from .arena import Arena


class SymmetricHeap(Protocol):
    """One block of memory per process, addressable by peers.

    ``pe``: the transport's index of a process; ``pes[rank]``: the PE of a rank of the job. Offsets are in bytes.
    """

    transport: str  # "nvshmem", "ipc" or "shm"
    device: torch.device
    arena: Arena  # allocator of this process's block
    pes: list[int]

    def local(self, pe: int, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ``numel`` elements at ``offset`` of this process's block; ``pe``: this process's PE."""

    def view(self, pe: int, offset: int, numel: int, dtype: torch.dtype) -> Any:
        """Return the kernel argument that addresses ``offset`` of the block of ``pe`` by loads and stores. Raises
        RuntimeError unless ``is_mapped(pe)``."""

    def symmetric(self, offset: int, dtype: torch.dtype) -> Any:
        """Return the local symmetric address of ``offset``; a put translates it for its target PE."""

    def is_mapped(self, pe: int) -> bool:
        """Check whether this process can load from and store to the block of ``pe``."""

    def quiet(self) -> None:
        """Wait until the puts of this process's completed kernels have arrived."""

    def close(self, together: bool) -> None:
        """Free the block: collectively with ``together``, else by this rank alone, since other ranks may be gone."""
