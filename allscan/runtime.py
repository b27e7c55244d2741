"""This process's part of the job: which transport, and the symmetric heap, made once."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from .bindings.arena import arena_bytes
from .bindings.cuda_ipc import CudaIpcHeap
from .bindings.interpreter import prepare_interpreter
from .bindings.nvshmem_host import NvshmemHeap
from .bindings.shared_memory import SharedMemoryHeap
from .bindings.transport import SymmetricHeap
from .rendezvous import Rendezvous

P = ParamSpec("P")
R = TypeVar("R")

_heap: SymmetricHeap | None = None
_job: Any = None  # torch.distributed's default group when the heap was made
_users: weakref.WeakSet = weakref.WeakSet()  # communicators that were made since


def outside_inference_mode(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which makes tensors that later calls use. Those made in torch.inference_mode could neither be
    written outside of it nor be saved for a backward pass."""

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        if not torch.is_inference_mode_enabled():
            return function(*args, **options)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **options)

    return call


@outside_inference_mode
def init(heap_bytes: int | None = None, *, transport: str = "auto") -> None:
    """Make this process's symmetric arena. Collective over the whole job (torch.distributed's default group).

    The first :class:`Communicator` calls it; call it yourself to choose the size, or where only some ranks of the job
    make communicators at first. A second call does nothing if it asks for no other size.

    heap_bytes: size of the arena; default ``ALLSCAN_HEAP`` (e.g. ``512M``), else 256 MiB. The same on every rank.
    transport: "nvshmem" (one process a GPU; the current CUDA device is used), "ipc" (CUDA IPC: processes of one host,
        which may share GPUs, for tests; without puts), "shm" (processes without GPUs, for Triton's interpreter), or
        "auto": "nvshmem" where CUDA is, or "ipc" if ``ALLSCAN_TRANSPORT`` says so.
    Raises RuntimeError if the transport is missing, ValueError for a bad size or name, or if ranks disagree.

        >>> allscan.init(1 << 30)                                   # 1 GiB on every rank, before the first Communicator
    """
    global _heap, _job
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
    transport = resolve_transport(transport)
    if _heap is not None:
        if dist.group.WORLD is not _job:
            raise RuntimeError(
                "torch.distributed was begun anew: call allscan.finalize() before destroy_process_group(), or at the "
                "latest now"
            )
        if heap_bytes is not None and arena_bytes(heap_bytes) != _heap.arena.size:
            raise ValueError(f"the arena exists already with {_heap.arena.size:,} bytes")
        if transport != _heap.transport:
            raise ValueError(f"this process already uses transport {_heap.transport!r}")
        return
    everybody = Rendezvous(range(dist.get_world_size()))

    def exchange(value):
        return everybody.exchange(value, "allscan.init, collective over the job")

    if len(set(transports := exchange(transport))) > 1:
        raise ValueError(f"ranks ask for different transports: {transports}")
    if transport == "nvshmem":
        _heap = NvshmemHeap(dist.get_rank(), everybody.size, exchange, heap_bytes)
    elif transport == "ipc":
        _heap = CudaIpcHeap(dist.get_rank(), exchange, heap_bytes)
    else:
        prepare_interpreter()
        _heap = SharedMemoryHeap(exchange, heap_bytes)
    _job = dist.group.WORLD


def finalize() -> None:
    """Give the arena back, and NVSHMEM if :func:`init` initialised it. Collective over the job, after the last use.

    Raises RuntimeError, before anything is given back, if a Communicator is open.
    """
    global _heap, _job
    if _heap is None:
        return
    if still_open := [repr(user) for user in _users if not user.closed]:
        raise RuntimeError(f"finalize() with open communicators: {'; '.join(still_open)}. close() them first")
    _heap.close()
    _heap = _job = None
    _users.clear()


def symmetric_heap(user: Any = None) -> SymmetricHeap:
    """What :func:`init` has made; ``user``, a communicator, keeps it from being finalized until it is closed. Raises
    RuntimeError before init."""
    if _heap is None:
        raise RuntimeError("there is no symmetric heap: allscan.init() was not called, or finalize() was")
    if user is not None:
        _users.add(user)
    return _heap


def resolve_transport(transport: str) -> str:
    """ "nvshmem", "ipc" or "shm", with "auto" decided. Raises ValueError or RuntimeError when it cannot be."""
    if transport not in ("auto", "nvshmem", "ipc", "shm"):
        raise ValueError(f'transport must be "auto", "nvshmem", "ipc" or "shm", got {transport!r}')
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    if transport == "auto":
        gpus = "ipc" if os.environ.get("ALLSCAN_TRANSPORT") == "ipc" else "nvshmem"
        transport = gpus if torch.cuda.is_available() and not interpreted else "shm"
    if transport != "shm" and not torch.cuda.is_available():
        raise RuntimeError(f"transport {transport!r} needs a CUDA device, and torch finds none")
    if transport == "shm" and not interpreted:
        raise RuntimeError(
            "without GPUs the kernels run in Triton's interpreter: set TRITON_INTERPRET=1 before Python starts"
        )
    return transport
