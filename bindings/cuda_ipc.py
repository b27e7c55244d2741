"""Transport "ipc": one host's processes map each other's arenas by CUDA IPC.

They may share GPUs, which NVSHMEM does not allow, so that one GPU is enough to test several ranks: kernels of different
processes take turns there. (Not with CUDA's multi-process service, MPS, where one rank's waiting programs could keep
another's off the GPU.)"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from .arena import Arena, arena_bytes, check_alike
from .nvshmem_host import Address
from .torch_compat import ipc_handle, mapped

_left: list[torch.Tensor] = []  # blocks into which kernels of other ranks may still write


class CudaIpcHeap:
    """One block a process. Collective over the job; ``exchange(value) -> list`` gathers what JSON knows from every
    process in rank order."""

    transport = "ipc"

    def __init__(self, rank: int, exchange: Callable[[Any], list[Any]], nbytes: int | None = None) -> None:
        self.arena = Arena(arena_bytes(nbytes))
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._block = torch.empty(self.arena.size, dtype=torch.uint8, device=self.device)
        torch.cuda.synchronize(self.device)
        handle = ipc_handle(self._block)  # numbers, and bytes that JSON does not know
        coded = [x.hex() if isinstance(x, bytes) else x for x in handle]
        hosts, sizes, handles = zip(*exchange((os.uname().nodename, self.arena.size, coded)), strict=True)
        if len(set(hosts)) > 1:
            raise RuntimeError(f"transport 'ipc' is for the processes of one host, these are on {sorted(set(hosts))}")
        _left.clear()  # all ranks have closed the heaps of these by now, and have waited for their kernels
        check_alike(sizes)
        self.pes = list(range(len(handles)))
        self._peers: dict[int, torch.UntypedStorage] = {}
        for pe, other in enumerate(handles):
            if pe != rank:
                decoded = [bytes.fromhex(x) if isinstance(own, bytes) else x for x, own in zip(other, handle)]
                decoded[0] = self.device.index  # mapped for this process's GPU, whichever the memory is on
                self._peers[pe] = mapped(decoded)
        exchange("ready")

    def local(self, pe: int, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """``numel`` elements at ``offset`` of this process's own arena."""
        return self._block[offset : offset + numel * dtype.itemsize].view(dtype)

    def view(self, pe: int, offset: int, numel: int, dtype: torch.dtype) -> Address:
        """The address at which this process reaches ``offset`` of the arena of ``pe``."""
        block = self._peers.get(pe, self._block)
        return Address(block.data_ptr() + offset, dtype)

    def symmetric(self, offset: int, dtype: torch.dtype) -> Address:
        raise RuntimeError("transport 'ipc' has no puts")

    def is_mapped(self, pe: int) -> bool:
        return True

    def quiet(self) -> None:
        """There are no puts."""

    def close(self, together: bool) -> None:
        """Collective: give the block back; not ``together`` when the ranks make the next heap."""
        torch.cuda.synchronize(self.device)
        self._peers.clear()
        if not together:
            _left.append(self._block)
        del self._block
