"""Interface of a symmetric heap for all transports, on which channels are built, and the allocator of its blocks."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

ALIGNMENT = 512
DEFAULT_BYTES = 256 << 20
MOST_BYTES = 1 << 62
_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def arena_bytes(requested: int | None) -> int:
    """Return the arena's size: the argument, else the variable ``ALLSCAN_HEAP`` (bytes, or K, M, G), else 256 MiB."""
    if requested is None:
        text = os.environ.get("ALLSCAN_HEAP", "").strip().upper()
        if not text:
            return DEFAULT_BYTES
        found = re.fullmatch(r"(\d{1,20})([KMG]?)", text, re.ASCII)
        if found is None:
            raise ValueError(f"ALLSCAN_HEAP must be a number of bytes such as 512M, got {text!r}")
        requested = int(found[1]) * _FACTORS[found[2]]
    if isinstance(requested, bool) or not hasattr(requested, "__index__"):
        raise TypeError(f"heap_bytes must be an integer, got {requested!r}")
    if requested < ALIGNMENT:
        raise ValueError(f"the arena must hold at least {ALIGNMENT} bytes, got {requested}")
    if requested > MOST_BYTES:
        raise ValueError(
            f"the arena of {requested:,} bytes is larger than an address space: allscan.init(heap_bytes=...) or the "
            f"variable ALLSCAN_HEAP must be at most {MOST_BYTES:,}"
        )
    return -(-requested // ALIGNMENT) * ALIGNMENT


def check_alike(sizes: Sequence[int]) -> None:
    """Raise ValueError unless the arenas of all ranks have one size."""
    if len(set(sizes)) > 1:
        raise ValueError(f"heap_bytes must be the same on every rank, got {list(sizes)}")


class Arena:
    """First-fit allocator over the offsets ``0 .. size`` of a heap. Blocks are multiples of 512 bytes.

    ``commit(offset, length)`` runs before each allocation, and may raise MemoryError.

    Several threads may use it, since they may have a communicator each.

    Ranks of different groups allocate at different times, so offsets differ between ranks: a rank exchanges offsets
    with a peer to address the peer's block.
    """

    def __init__(self, size: int, commit: Callable[[int, int], None] | None = None) -> None:
        self.size = size
        self._commit = commit
        self._free = {0: size}  # offset -> length of every free interval
        self._used: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def free_bytes(self) -> int:
        return sum(self._free.values())

    def alloc(self, nbytes: int) -> int:
        """Return the offset of a new block of at least ``nbytes``. Raises MemoryError if no free interval fits."""
        length = max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
        with self._lock:
            for offset in sorted(self._free):
                room = self._free[offset]
                if room >= length:
                    if self._commit is not None:
                        self._commit(offset, length)
                    del self._free[offset]
                    if room > length:
                        self._free[offset + length] = room - length
                    self._used[offset] = length
                    return offset
        raise MemoryError(
            f"the symmetric arena is full: {length:,} bytes asked for, {self.free_bytes:,} of {self.size:,} free "
            f"(largest piece {max(self._free.values(), default=0):,}). Make it larger before the first Communicator: "
            "allscan.init(heap_bytes=...) or the variable ALLSCAN_HEAP, e.g. ALLSCAN_HEAP=1G"
        )

    def free(self, offset: int) -> None:
        with self._lock:
            length = self._used.pop(offset)
            end = offset + length
            if end in self._free:
                length += self._free.pop(end)
            for start, room in self._free.items():
                if start + room == offset:
                    self._free[start] = room + length
                    return
            self._free[offset] = length


def check_nodes(hosts: Sequence[str]) -> None:
    """Raise RuntimeError, on all ranks, unless all nodes have the same number of ranks. hosts: node name by rank."""
    counts = {host: list(hosts).count(host) for host in dict.fromkeys(hosts)}
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{count} on {host}" for host, count in counts.items())
        raise RuntimeError(f"NVSHMEM needs the same number of ranks on every node, got {found}")


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
