"""The process's transport and symmetric heap, created once per job."""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import importlib.util
import os
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from ..base.errors import AllScanError, AllScanRejected
from ..bindings import nvshmem_host
from ..bindings.arena import SymmetricHeap, arena_bytes
from ..bindings.cuda_ipc import CudaIpcHeap
from ..bindings.interpreter import prepare_interpreter
from ..bindings.nvshmem_host import NvshmemHeap
from ..bindings.shared_memory import SharedMemoryHeap
from ..bindings.triton_compat import interpreting
from ..shmem_kernels.scan import scan_kernel
from .host_exchange import StoreExchange, StoreGone, by_rank, differing

_heap: SymmetricHeap | None = None
_job: dist.ProcessGroup | None = None  # torch.distributed's default group at creation of the heap
_users: weakref.WeakSet[Any] = weakref.WeakSet()  # communicators that use the heap
_ended_alone = False  # whether a communicator has ended without all of its ranks; some may have died


# Decorator of functions that create tensors for later calls: tensors created in torch.inference_mode can neither be
# written outside of it nor be saved for a backward pass
outside_inference_mode = torch.inference_mode(False)


@outside_inference_mode
def init(heap_bytes: int | None = None, *, transport: str = "auto") -> None:
    """Create this process's symmetric arena. Collective over the whole job (torch.distributed's default group).

    The first ``Communicator`` calls it. Call it yourself to choose the size, or if only some ranks of the job create
    communicators at first. A second call does nothing unless it requests another size.

    Args:
        heap_bytes: size of the arena; default ``ALLSCAN_HEAP`` (e.g. ``512M``), else 256 MiB. The same on every rank.
        transport: "nvshmem" (one process per GPU; uses the current CUDA device), "ipc" (CUDA IPC: processes of one
            host, which may share GPUs, for tests; without puts), "shm" (processes without GPUs, for Triton's
            interpreter), or "auto": with CUDA "nvshmem", or "ipc" if ``ALLSCAN_TRANSPORT=ipc``; else "shm".

    Raises:
        RuntimeError: if torch.distributed is not initialised (one process alone needs no ``init``), if the transport is
            missing, or if ``finalize`` could not finalize NVSHMEM before.
        ValueError: for a wrong size or name, or if ranks have different arguments or sources of this package.
        MemoryError: if the system does not have the memory.
        AllScanRejected: for an error of another rank.

    Example:
        >>> allscan.init(1 << 30)                                   # 1 GiB on every rank, before the first Communicator
    """
    global _heap, _job
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
    if _heap is not None and dist.group.WORLD is _job:
        check_transport(transport)
        if heap_bytes is not None and arena_bytes(heap_bytes) != _heap.arena.size:
            raise ValueError(f"the arena exists already with {_heap.arena.size:,} bytes")
        return
    everybody, part = StoreExchange(range(dist.get_world_size())), 0

    def exchange(value: Any, problem: str = "") -> list[Any]:
        nonlocal part
        part += 1
        answers = everybody.exchange((problem, value), f"allscan.init, collective over the job, part {part}")
        problems, values = zip(*answers, strict=True)
        if any(problems):
            raise AllScanRejected(f"allscan.init: {by_rank(text or 'ok' for text in problems)}")
        return list(values)

    try:
        if _heap is not None:
            raise RuntimeError(
                "torch.distributed was restarted: call allscan.finalize() before destroy_process_group(), or at the "
                "latest now"
            )
        _job = dist.group.WORLD
        transport = resolve_transport(transport)
        left = transport == "nvshmem" and nvshmem_host.left_behind
        arguments = ("transport", transport), ("heap_bytes", arena_bytes(heap_bytes)), ("sources", source_hash())
        answers, anybody_left = zip(*exchange((arguments, left)), strict=True)
        if different := differing(answers):
            raise ValueError(f"ranks differ in {different}")
        if any(anybody_left):
            raise RuntimeError(
                f"ranks {[rank for rank, left in enumerate(anybody_left) if left]} need a new process: finalize() "
                "could not finalize NVSHMEM there, which is collective, because ranks were missing"
            )
        if transport == "nvshmem":
            _heap = NvshmemHeap(dist.get_rank(), everybody.size, exchange, heap_bytes)
        elif transport == "ipc":
            _heap = CudaIpcHeap(dist.get_rank(), exchange, heap_bytes)
        else:
            prepare_interpreter()
            _heap = SharedMemoryHeap(exchange, heap_bytes)
    except (AllScanError, StoreGone):
        raise  # known to all ranks
    except Exception as error:
        with contextlib.suppress(RuntimeError):
            exchange(None, f"{type(error).__name__}: {error}")
        raise


def finalize() -> None:
    """Free the arena, and finalize NVSHMEM if ``init`` initialised it. Collective over the job, after the last use.

    If torch.distributed was destroyed or restarted, its communicators cannot be closed collectively any more. Then
    finalize() closes them, with a warning, and the next init() works. But NVSHMEM's finalization is collective. Ranks
    may have died if they do not all come to finalize(), or if torch.distributed was destroyed or restarted and a
    communicator was closed without all of its ranks. NVSHMEM's memory then stays allocated, with a warning, and init()
    over NVSHMEM needs a new process.

    Raises:
        RuntimeError: if a Communicator of several ranks is open; nothing is freed then.

    Example:
        >>> with allscan.Communicator() as comm:
        ...     train(comm)
        >>> allscan.finalize()                                                    # on every rank of the job
        >>> torch.distributed.destroy_process_group()
    """
    global _heap, _job, _ended_alone
    if _heap is None:
        return
    users = [user for user in _users if not user.closed]
    if still_open := [repr(user) for user in users if not user.gone]:
        raise RuntimeError(f"finalize() with open communicators: {'; '.join(still_open)}. close() them first")
    for user in users:
        try:
            user.close()
        except AllScanError as error:  # an error that was not raised before
            warnings.warn(f"{user!r} is closed: {error}", stacklevel=2)
    together = not _ended_alone
    if _heap.transport == "nvshmem" and dist.is_initialized() and dist.group.WORLD is _job:
        together = _all_come()
    _heap.close(together)
    if not together and nvshmem_host.left_behind:
        warnings.warn(
            "finalize() has not finalized NVSHMEM, which needs all ranks, because ranks may be missing. "
            "allscan.init() over NVSHMEM needs a new process",
            stacklevel=2,
        )
    _heap = _job = None
    _ended_alone = False
    _users.clear()


def _all_come() -> bool:
    """Whether all ranks of the job come to finalize(). Collective."""
    try:
        StoreExchange(range(dist.get_world_size())).exchange(None, "allscan.finalize, collective over the job")
    except RuntimeError:
        return False
    return True


def record_ended_alone() -> None:
    """Record that a communicator has ended without all of its ranks."""
    global _ended_alone
    _ended_alone = True


def symmetric_heap(user: object = None) -> SymmetricHeap:
    """The heap that ``init`` created. ``user``: a communicator; finalize() raises until it is closed. Raises
    RuntimeError before init()."""
    if _heap is None:
        raise RuntimeError("there is no symmetric heap: allscan.init() was not called, or finalize() was")
    if user is not None:
        _users.add(user)
    return _heap


def check_transport(transport: str) -> None:
    """Raise ValueError if the arena exists with another transport than this one, and the errors of resolve_transport
    unless it has this name."""
    if _heap is not None and transport != _heap.transport and resolve_transport(transport) != _heap.transport:
        raise ValueError(f"this process already uses transport {_heap.transport!r}")


def arena_transport() -> str:
    """The arena's transport, "auto" without an arena."""
    return "auto" if _heap is None else _heap.transport


def _interpreted() -> bool:
    """Whether kernels are interpreted. Triton reads TRITON_INTERPRET when a kernel is defined: raises RuntimeError if
    the variable was set or unset since then."""
    triton_is, ours_are = (not isinstance(kernel, triton.JITFunction) for kernel in (tl.cdiv, scan_kernel))
    if triton_is == ours_are == interpreting():
        return ours_are
    if triton_is and ours_are:
        raise RuntimeError(
            "TRITON_INTERPRET is off, and was on when triton and allscan were imported: their kernels are interpreted "
            "for the rest of this process. Set it before starting Python and do not change it"
        )
    raise RuntimeError(
        f"TRITON_INTERPRET was set too late: triton{'' if ours_are else ' and allscan'} had been imported, and Triton "
        "reads the variable when a kernel is defined. Set it before starting Python, or above all imports"
    )


def resolve_transport(transport: str) -> str:
    """Resolve ``transport`` to "nvshmem", "ipc" or "shm". Raises ValueError for an unknown name, RuntimeError if the
    transport cannot be used."""
    if transport not in ("auto", "nvshmem", "ipc", "shm"):
        raise ValueError(f'transport must be "auto", "nvshmem", "ipc" or "shm", got {transport!r}')
    interpreted = _interpreted()
    if transport == "auto":
        gpus = os.environ.get("ALLSCAN_TRANSPORT", "").strip() or "nvshmem"
        if gpus not in ("nvshmem", "ipc"):
            raise ValueError(f'ALLSCAN_TRANSPORT must be "nvshmem" or "ipc", got {gpus!r}')
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


@functools.cache
def source_hash() -> str:
    """sha256 over the bytes of the package's *.py, in the order of their paths."""
    package, files = os.path.dirname(os.path.dirname(os.path.abspath(__file__))), {}
    for name in ("", "bindings", "shmem_kernels"):
        spec = importlib.util.find_spec(f"allscan.{name}") if name else None
        folder = spec.submodule_search_locations[0] if spec and spec.submodule_search_locations else package
        for path in glob.glob(os.path.join(folder, "**", "*.py"), recursive=True):
            files[os.path.join(name, os.path.relpath(path, folder))] = path
    digest = hashlib.sha256()
    for _, path in sorted(files.items()):
        with open(path, "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()
