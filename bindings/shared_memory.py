"""A symmetric heap in POSIX shared memory, for ranks that are processes on one host without GPUs."""

from __future__ import annotations

import mmap
import os
import uuid

import torch

from .heap import Heap, heap_bytes

_DIRECTORY = "/dev/shm"


class SharedMemoryHeap:
    """One segment a process, mapped by every process of the job; ``pe`` is the place in the job.

    ``exchange(object) -> list`` hands an object to every process of the job and returns all of them in pe order; it
    must not return before everybody has called it. The segments are readable by their owner only (mode 0600) and have
    no name any more when the constructor returns: nothing is left behind, however the processes end.
    """

    transport = "shm"

    def __init__(self, exchange, nbytes: int | None = None):
        self.device = torch.device("cpu")
        self.heap = Heap(heap_bytes(nbytes))
        path = os.path.join(_DIRECTORY, f"allscan-{uuid.uuid4().hex}")
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.ftruncate(fd, self.heap.size)  # sparse: pages are taken when they are written
            os.close(fd)
            peers = exchange((os.uname().nodename, path, self.heap.size))
            if len({node for node, _, _ in peers}) > 1:
                raise RuntimeError(
                    "transport 'shm' needs all ranks on one host, got "
                    + ", ".join(sorted({node for node, _, _ in peers}))
                    + "; across hosts use GPUs and the transport 'nvshmem' (pip install allscan[cuda13])"
                )
            self._arenas = [self._map(peer_path, size) for _, peer_path, size in peers]
            self.pes = list(range(len(peers)))
            exchange("mapped")
        finally:
            os.unlink(path)

    @staticmethod
    def _map(path: str, size: int) -> torch.Tensor:
        fd = os.open(path, os.O_RDWR)
        try:
            return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
        finally:
            os.close(fd)

    def view(self, pe: int, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """``numel`` elements at ``offset`` of the arena of ``pe``, as a tensor over the shared memory itself."""
        return self._arenas[pe][offset : offset + numel * dtype.itemsize].view(dtype)

    def local(self, pe: int, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self.view(pe, offset, numel, dtype)

    def is_mapped(self, pe: int) -> bool:
        return True

    def quiet(self) -> None:
        """Stores arrive without it."""
