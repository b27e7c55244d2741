"""Transport "ipc": processes of one host map each other's arenas by CUDA IPC.

Processes may share a GPU, which NVSHMEM does not allow: one GPU can test several ranks. Kernels of different processes
then take turns. Do not use CUDA's multi-process service (MPS): waiting programs of one rank could occupy the GPU and
block another rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from .arena import Arena, arena_bytes, check_alike
from .nvshmem_host import Address
from .torch_compat import ipc_handle, mapped

_left: list[torch.Tensor] = []  # abandoned blocks: kernels of other ranks may still write to them


class CudaIpcHeap:
    """Symmetric heap of one block per process. Collective over the job; ``exchange(value) -> list`` gathers a JSON
    value of every process in rank order."""

    transport = "ipc"

    def __init__(self, rank: int, exchange: Callable[[Any], list[Any]], nbytes: int | None = None) -> None:
        self.arena = Arena(arena_bytes(nbytes))
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._block = torch.empty(self.arena.size, dtype=torch.uint8, device=self.device)
        torch.cuda.synchronize(self.device)
        handle = ipc_handle(self._block)  # numbers and bytes; JSON has no bytes
        coded = [x.hex() if isinstance(x, bytes) else x for x in handle]
        hosts, sizes, handles = zip(*exchange((os.uname().nodename, self.arena.size, coded)), strict=True)
        if len(set(hosts)) > 1:
            raise RuntimeError(f"transport 'ipc' needs all ranks on one host, got {sorted(set(hosts))}")
        _left.clear()  # all ranks have closed those heaps and waited for their kernels
        check_alike(sizes)
        self.pes = list(range(len(handles)))
        self._peers: dict[int, torch.UntypedStorage] = {}
        for pe, other in enumerate(handles):
            if pe != rank:
                decoded = [bytes.fromhex(x) if isinstance(own, bytes) else x for x, own in zip(other, handle)]
                decoded[0] = self.device.index  # map for this process's GPU, wherever the memory is
                self._peers[pe] = mapped(decoded)
        exchange("ready")

    def local(self, pe: int, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ``numel`` elements at ``offset`` of this process's arena."""
        return self._block[offset : offset + numel * dtype.itemsize].view(dtype)

    def view(self, pe: int, offset: int, numel: int, dtype: torch.dtype) -> Address:
        """Return the address of ``offset`` of the arena of ``pe`` in this process."""
        block = self._peers.get(pe, self._block)
        return Address(block.data_ptr() + offset, dtype)

    def symmetric(self, offset: int, dtype: torch.dtype) -> Address:
        raise RuntimeError("transport 'ipc' has no puts")

    def is_mapped(self, pe: int) -> bool:
        return True

    def quiet(self) -> None:
        """Do nothing: this transport has no puts."""

    def close(self, together: bool) -> None:
        """Free the block, collectively; without ``together`` keep it until the ranks create the next heap."""
        torch.cuda.synchronize(self.device)
        self._peers.clear()
        if not together:
            _left.append(self._block)
        del self._block
