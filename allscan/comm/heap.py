"""This process's part of the job: which transport, and the symmetric heap, made once."""

from __future__ import annotations

import os
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from ..base.errors import AllScanError
from ..bindings import nvshmem_host
from ..bindings.arena import arena_bytes
from ..bindings.cuda_ipc import CudaIpcHeap
from ..bindings.interpreter import prepare_interpreter
from ..bindings.nvshmem_host import NvshmemHeap
from ..bindings.shared_memory import SharedMemoryHeap
from ..bindings.transport import SymmetricHeap
from ..bindings.triton_compat import interpreting
from ..shmem_kernels.scan import scan_kernel
from .host_exchange import StoreExchange

_heap: SymmetricHeap | None = None
_job: dist.ProcessGroup | None = None  # torch.distributed's default group when the heap was made
_users: weakref.WeakSet[Any] = weakref.WeakSet()  # communicators that were made since
_deserted = False  # whether one of them has ended without all of its ranks, of which some may be gone


# Of functions that make tensors that later calls use: those made in torch.inference_mode could neither be written
# outside of it nor be saved for a backward pass
outside_inference_mode = torch.inference_mode(False)


@outside_inference_mode
def init(heap_bytes: int | None = None, *, transport: str = "auto") -> None:
    """Make this process's symmetric arena. Collective over the whole job (torch.distributed's default group).

    The first ``Communicator`` calls it; call it yourself to choose the size, or where only some ranks of the job
    make communicators at first. A second call does nothing if it asks for no other size.

    Args:
        heap_bytes: size of the arena; default ``ALLSCAN_HEAP`` (e.g. ``512M``), else 256 MiB. The same on every rank.
        transport: "nvshmem" (one process a GPU; the current CUDA device is used), "ipc" (CUDA IPC: processes of one
            host, which may share GPUs, for tests; without puts), "shm" (processes without GPUs, for Triton's
            interpreter), or "auto": "nvshmem" where CUDA is, or "ipc" if ``ALLSCAN_TRANSPORT`` says so.

    Raises:
        RuntimeError: if the transport is missing, or NVSHMEM was left by ``finalize``.
        ValueError: for a bad size or name, or if ranks disagree.

    Example:
        >>> allscan.init(1 << 30)                                   # 1 GiB on every rank, before the first Communicator
    """
    global _heap, _job
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
    transport = resolve_transport(transport)
    if _heap is not None:
        if dist.group.WORLD is not _job:
            raise RuntimeError(
                "torch.distributed was restarted: call allscan.finalize() before destroy_process_group(), or at the "
                "latest now"
            )
        if heap_bytes is not None and arena_bytes(heap_bytes) != _heap.arena.size:
            raise ValueError(f"the arena exists already with {_heap.arena.size:,} bytes")
        if transport != _heap.transport:
            raise ValueError(f"this process already uses transport {_heap.transport!r}")
        return
    everybody = StoreExchange(range(dist.get_world_size()))

    def exchange(value: Any) -> list[Any]:
        return everybody.exchange(value, "allscan.init, collective over the job")

    left = transport == "nvshmem" and nvshmem_host.left_behind
    transports, anybody_left = zip(*exchange((transport, left)), strict=True)
    if len(set(transports)) > 1:
        raise ValueError(f"ranks ask for different transports: {list(transports)}")
    if any(anybody_left):
        raise RuntimeError(
            f"ranks {[rank for rank, left in enumerate(anybody_left) if left]} need a new process: finalize() has left "
            "NVSHMEM there as it was, since its end is collective and ranks were gone"
        )
    if transport == "nvshmem":
        _heap = NvshmemHeap(dist.get_rank(), everybody.size, exchange, heap_bytes)
    elif transport == "ipc":
        _heap = CudaIpcHeap(dist.get_rank(), exchange, heap_bytes)
    else:
        prepare_interpreter()
        _heap = SharedMemoryHeap(exchange, heap_bytes)
    _job = dist.group.WORLD


def finalize() -> None:
    """Give the arena back, and NVSHMEM if ``init`` initialised it. Collective over the job, after the last use.

    Communicators of a torch.distributed that was ended, or restarted, since, cannot be closed together any more: they
    are closed here, with a warning, and the next init() works. But NVSHMEM's end is collective: where ranks may be gone
    (such a communicator, or one that closed without the others, and ranks that cannot be asked, or do not come) its
    memory is left, with a warning, and init() over it needs a new process.

    Raises:
        RuntimeError: before anything is given back, if another Communicator is open.

    Example:
        >>> with allscan.Communicator() as comm:
        ...     train(comm)
        >>> allscan.finalize()                                                    # on every rank of the job
        >>> torch.distributed.destroy_process_group()
    """
    global _heap, _job, _deserted
    if _heap is None:
        return
    users = [user for user in _users if not user.closed]
    if still_open := [repr(user) for user in users if not user.gone]:
        raise RuntimeError(f"finalize() with open communicators: {'; '.join(still_open)}. close() them first")
    for user in users:
        try:
            user.close()
        except AllScanError as error:  # that nothing has said before
            warnings.warn(f"{user!r} is closed: {error}", stacklevel=2)
    together = not _deserted
    if _heap.transport == "nvshmem" and dist.is_initialized() and dist.group.WORLD is _job:
        together = _all_come()
    _heap.close(together)
    if not together and nvshmem_host.left_behind:
        warnings.warn(
            "finalize() has left NVSHMEM as it was: ranks may be gone, and its end is collective. "
            "allscan.init() over NVSHMEM needs a new process",
            stacklevel=2,
        )
    _heap = _job = None
    _deserted = False
    _users.clear()


def _all_come() -> bool:
    """Whether all ranks of the job are at finalize()."""
    try:
        StoreExchange(range(dist.get_world_size())).exchange(None, "allscan.finalize, collective over the job")
    except RuntimeError:
        return False
    return True


def desert() -> None:
    """A communicator has ended without all of its ranks."""
    global _deserted
    _deserted = True


def symmetric_heap(user: object = None) -> SymmetricHeap:
    """What ``init`` has made; ``user``, a communicator, keeps it from being finalized until it is closed. Raises
    RuntimeError before init."""
    if _heap is None:
        raise RuntimeError("there is no symmetric heap: allscan.init() was not called, or finalize() was")
    if user is not None:
        _users.add(user)
    return _heap


def _interpreted() -> bool:
    """Whether kernels are interpreted. Raises RuntimeError where TRITON_INTERPRET has been set, or unset, since they
    were defined, which is when Triton reads it."""
    triton_is, ours_are = (not isinstance(kernel, triton.JITFunction) for kernel in (tl.cdiv, scan_kernel))
    if triton_is == ours_are == interpreting():
        return ours_are
    if triton_is and ours_are:
        raise RuntimeError(
            "TRITON_INTERPRET is off, and was on when triton and allscan were imported: their kernels are interpreted "
            "for the rest of this process. Set it before Python starts, and leave it"
        )
    raise RuntimeError(
        f"TRITON_INTERPRET was set too late: triton{'' if ours_are else ' and allscan'} had been imported, and kernels "
        "are compiled or interpreted by what it says when they are defined. Set it before Python starts, or above all "
        "imports"
    )


def resolve_transport(transport: str) -> str:
    """Decide on "nvshmem", "ipc" or "shm". Raises ValueError or RuntimeError when it cannot be."""
    if transport not in ("auto", "nvshmem", "ipc", "shm"):
        raise ValueError(f'transport must be "auto", "nvshmem", "ipc" or "shm", got {transport!r}')
    interpreted = _interpreted()
    if transport == "auto":
        gpus = "ipc" if os.environ.get("ALLSCAN_TRANSPORT") == "ipc" else "nvshmem"
        transport = gpus if torch.cuda.is_available() and not interpreted else "shm"
    if transport != "shm" and interpreted:
        raise RuntimeError(f"transport {transport!r} is for compiled kernels, and TRITON_INTERPRET is set")
    if transport != "shm" and not torch.cuda.is_available():
        raise RuntimeError(f"transport {transport!r} needs a CUDA device, and torch finds none")
    if transport == "shm" and not interpreted:
        raise RuntimeError(
            "without GPUs the kernels run in Triton's interpreter: set TRITON_INTERPRET=1 before Python starts"
        )
    return transport
