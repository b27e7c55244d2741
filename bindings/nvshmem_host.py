"""NVSHMEM's host API through nvshmem4py: initialisation, the symmetric arena, addresses of peers.

nvshmem4py's tensors are tracked and must be freed collectively. This module allocates one block with
``nvshmem_malloc``, so the thin layer ``nvshmem.bindings`` is enough. The arena therefore also works if another library
(e.g. PyTorch's symmetric memory) has initialised NVSHMEM.
"""

from __future__ import annotations

import ctypes
import os
import types
from collections.abc import Callable
from typing import Any

import torch

from .arena import Arena, arena_bytes, check_alike, check_nodes
from .versions import rejection

INSTALL = "pip install nvshmem4py-cu13 nvidia-nvshmem-cu13 (or -cu12)"  # advice in error messages
_INITIALIZED = 2  # nvshmemx_init_status: NVSHMEM_STATUS_IS_INITIALIZED; larger values mean initialised, too


left_behind = False  # whether a heap was closed without the other ranks
# CUDA module -> compiled kernel, for modules with the device state of the running NVSHMEM. The kernel keeps the module
# loaded: a new module could reuse the handle of an unloaded one, without device state
initialized_modules: dict[int, Any] = {}


class Address:
    """A device address with an element type, as a kernel argument in place of a tensor.

    A tensor cannot represent another GPU's memory: PyTorch would treat it as memory of this GPU.
    """

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address


class _CudaArray:
    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def load() -> types.ModuleType:
    """Load the host library and return nvshmem4py's thin bindings. Raises RuntimeError with the packages to install."""
    if rejected := rejection("NVSHMEM", "nvshmem4py"):
        raise RuntimeError(rejected)
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib
        from nvshmem import bindings

        load_nvidia_dynamic_lib("nvshmem_host")
    except Exception as error:  # ImportError, or pathfinder's own errors when the shared library is absent
        raise RuntimeError(
            "transport 'nvshmem' needs nvshmem4py and NVSHMEM's host library: "
            f"{INSTALL}. {type(error).__name__}: {error}"
        ) from error
    return bindings


def is_initialized() -> bool:
    """Check whether NVSHMEM is initialised in this process, by allscan or by another library."""
    return load().init_status() >= _INITIALIZED


def initialize(rank: int, size: int, exchange: Callable[[Any], list[Any]]) -> bool:
    """Initialise NVSHMEM on the current CUDA device unless it is initialised; return whether this call did it.

    Collective over the job. ``exchange(value) -> list`` gathers a JSON value of every process in rank order.
    """
    bindings = load()
    done = exchange(is_initialized())
    if all(done):
        return False
    if any(done):
        raise RuntimeError(f"NVSHMEM is initialised on ranks {[r for r, d in enumerate(done) if d]} only")
    torch.cuda.current_stream().synchronize()  # creates the CUDA context that NVSHMEM binds to
    uid = bindings.uniqueid()
    if rank == 0:
        bindings.get_uniqueid(uid.ptr)
    root_uid = bytes.fromhex(exchange(ctypes.string_at(uid.ptr, uid._data.nbytes).hex() if rank == 0 else "")[0])
    ctypes.memmove(uid.ptr, root_uid, len(root_uid))
    attributes = bindings.InitAttr()
    bindings.set_attr_uniqueid_args(rank, size, uid.ptr, attributes.ptr)
    bindings.hostlib_init_attr(bindings.Flags.INIT_WITH_UNIQUEID, attributes.ptr)
    return True


class NvshmemHeap:
    """Symmetric heap of one block per process, allocated once in NVSHMEM's heap; ``pe``: NVSHMEM's index of a process.

    Collective over the job, like NVSHMEM's own initialisation. ``exchange``: see ``initialize``. Ranks equal PE indices
    only if this class initialised NVSHMEM, so the table ``pes`` maps rank to PE.
    """

    transport = "nvshmem"

    def __init__(self, rank: int, size: int, exchange: Callable[[Any], list[Any]], nbytes: int | None = None) -> None:
        self._bindings = load()
        self.arena = Arena(arena_bytes(nbytes))
        self.device = torch.device("cuda", torch.cuda.current_device())
        nodes, sizes = zip(*exchange((os.uname().nodename, self.arena.size)), strict=True)
        check_alike(sizes)
        check_nodes(nodes)
        defaults = {"NVSHMEM_SYMMETRIC_SIZE": str(max(1 << 30, 2 * self.arena.size)), "NVSHMEM_DISABLE_NVLS": "1"}
        if len(set(nodes)) == 1:  # one host needs no network
            defaults |= {"NVSHMEM_REMOTE_TRANSPORT": "none", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo"}
        for name, value in defaults.items():
            os.environ.setdefault(name, value)
        self._owner = initialize(rank, size, exchange)
        self.pes = exchange(self._bindings.my_pe())
        self._base = self._bindings.malloc(self.arena.size)
        if not self._base:
            raise MemoryError(
                f"nvshmem_malloc could not give {self.arena.size:,} bytes: set NVSHMEM_SYMMETRIC_SIZE larger, "
                "or ask for a smaller arena (allscan.init(heap_bytes=...) or ALLSCAN_HEAP)"
            )
        self._block = torch.as_tensor(_CudaArray(self._base, self.arena.size), device=self.device)
        if self._block.data_ptr() != self._base:
            raise RuntimeError("PyTorch copied the symmetric arena instead of sharing it")
        self._peer_base = {pe: self._bindings.ptr(self._base, pe) for pe in range(self._bindings.n_pes())}
        exchange("ready")

    def view(self, pe: int, offset: int, numel: int, dtype: torch.dtype) -> Address:
        """Return the address of ``offset`` of the arena of ``pe`` for this GPU's loads and stores."""
        if not self.is_mapped(pe):
            raise RuntimeError(f"the memory of PE {pe} is not mapped here")
        return Address(self._peer_base[pe] + offset, dtype)

    def symmetric(self, offset: int, dtype: torch.dtype) -> Address:
        """Return the local symmetric address of ``offset``; NVSHMEM's functions translate it for their target PE."""
        return Address(self._base + offset, dtype)

    def local(self, pe: int, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ``numel`` elements at ``offset`` of this process's arena."""
        return self._block[offset : offset + numel * dtype.itemsize].view(dtype)

    def is_mapped(self, pe: int) -> bool:
        return bool(self._peer_base[pe])

    def quiet(self) -> None:
        """Wait until the puts of this process's completed kernels have arrived."""
        stream = torch.cuda.current_stream(self.device)
        self._bindings.quiet_on_stream(stream.cuda_stream)
        stream.synchronize()

    def close(self, together: bool) -> None:
        """With ``together``, collective: free the block, and finalise NVSHMEM if this object initialised it. Otherwise
        keep both: other ranks may be gone, and the collective calls would not return."""
        global left_behind
        torch.cuda.synchronize(self.device)
        del self._block
        if not together:
            left_behind = True
            return
        self._bindings.free(self._base)
        if self._owner:
            self._bindings.hostlib_finalize()
            initialized_modules.clear()
