"""Symmetric heap in POSIX shared memory, for ranks as processes of one host without GPUs."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import heapq
import itertools
import mmap
import os
import queue
import random
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import nvshmem_device
from .arena import Arena, arena_bytes, check_alike

_DIRECTORY = "/dev/shm"


class SharedMemoryHeap:
    """Symmetric heap of one segment per process, mapped by all processes of the job; ``pe``: the rank in the job.

    ``exchange(object) -> list`` gathers an object of every process in pe order; it must not return before all processes
    have called it. Only the owner can read the segments (mode 0600). The constructor unlinks its segment, so none is
    left if a process is killed later. A process killed inside of the constructor leaves a file without pages.

    Raises:
        MemoryError: if this process cannot create or map a segment of this size.
        RuntimeError: unless all processes are on one host.
        ValueError: for a wrong size, or if the sizes differ.
    """

    transport = "shm"

    def __init__(self, exchange: Callable[[Any], list[Any]], nbytes: int | None = None) -> None:
        self.device = torch.device("cpu")
        self.arena = Arena(arena_bytes(nbytes), self._commit)
        path = os.path.join(_DIRECTORY, f"allscan-{uuid.uuid4().hex}")
        self._fd = self._open(path, os.O_CREAT | os.O_EXCL)
        try:
            self._connect(exchange, path)
        except BaseException:
            os.close(self._fd)
            raise
        finally:
            os.unlink(path)
        self.network = Network([arena.data_ptr() for arena in self._arenas], self._me)
        nvshmem_device.interpreted_network = self.network

    def _connect(self, exchange: Callable[[Any], list[Any]], path: str) -> None:
        """Map the segments of all processes."""
        with self._naming_the_size():
            os.ftruncate(self._fd, self.arena.size)  # sparse: _commit allocates the pages
        mine = self._map(path, self.arena.size)
        peers = exchange((os.uname().nodename, path, self.arena.size))
        if len({node for node, _, _ in peers}) > 1:
            raise RuntimeError(
                "transport 'shm' needs all ranks on one host, got "
                + ", ".join(sorted({node for node, _, _ in peers}))
                + "; across hosts use GPUs and the transport 'nvshmem'"
            )
        check_alike([size for _, _, size in peers])
        self._arenas = [mine if other == path else self._map(other, size) for _, other, size in peers]
        self._me = [other for _, other, _ in peers].index(path)
        self.pes = list(range(len(peers)))
        exchange("mapped")

    @contextlib.contextmanager
    def _naming_the_size(self) -> Iterator[None]:
        """Raise MemoryError with the arena's size instead of the system's error."""
        try:
            yield
        except OSError as error:
            raise MemoryError(
                f"cannot create the symmetric arena of {self.arena.size:,} bytes a rank in {_DIRECTORY}: "
                f"{error.strerror}. Its size is allscan.init(heap_bytes=...) or the variable ALLSCAN_HEAP"
            ) from error

    def _commit(self, offset: int, length: int) -> None:
        """Allocate the pages of a block now: a later write without free pages would raise SIGBUS."""
        try:
            os.posix_fallocate(self._fd, offset, length)
        except OSError as error:
            room = os.statvfs(_DIRECTORY)
            raise MemoryError(
                f"{_DIRECTORY} is full: {length:,} bytes asked for, {room.f_bavail * room.f_frsize:,} of "
                f"{room.f_blocks * room.f_frsize:,} free ({error.strerror}). Make it larger: in Docker, --shm-size=1g"
            ) from error

    def _open(self, path: str, flags: int = 0) -> int:
        with self._naming_the_size():
            return os.open(path, os.O_RDWR | flags, 0o600)

    def _map(self, path: str, size: int) -> torch.Tensor:
        fd = self._open(path)
        try:
            with self._naming_the_size():
                return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
        finally:
            os.close(fd)

    def view(self, pe: int, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ``numel`` elements at ``offset`` of the arena of ``pe``, as a tensor over the shared memory."""
        return self._arenas[pe][offset : offset + numel * dtype.itemsize].view(dtype)

    local = view

    def symmetric(self, offset: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the local symmetric address of ``offset``; a put translates it for its target PE."""
        return self.view(self._me, offset, 1, dtype)

    def is_mapped(self, pe: int) -> bool:
        return True

    def quiet(self) -> None:
        """Wait until this process's puts have arrived."""
        self.network.quiet()

    def close(self, together: bool) -> None:
        """Deliver the puts under way at once, and close the segment's file. A segment is freed when no rank refers to
        its tensors."""
        self.network.close()
        if nvshmem_device.interpreted_network is self.network:
            nvshmem_device.interpreted_network = None
        os.close(self._fd)
        self._fd = -1


class Network:
    """Simulates NVSHMEM's put with signal over shared memory, for the interpreter. Like the worst network, it delays
    every put by a random time of at most ``most_s``, so that puts are reordered, and reads the source at delivery.

    A thread delivers, from the first put until ``close``. It starts and gets requests without locks of Python code,
    which Ctrl-C could leave held.
    """

    def __init__(self, bases: list[int], me: int, most_s: float = 2e-3) -> None:
        self.most_s = most_s
        self._bases, self._me, self._random = bases, me, random.Random(me)
        self._count, self._closing = itertools.count(), False
        # a put; a queue, which gets an answer when all puts before have arrived; None: the end
        self._requests: queue.SimpleQueue[tuple | queue.SimpleQueue | None] = queue.SimpleQueue()
        self._thread: dict[str, int] = {}  # {"delivers": its identifier}

    def put_signal(self, dst: int, src: int, nbytes: int, signal: int, value: int, pe: int) -> None:
        """Start a put. dst, signal: local symmetric addresses."""
        there = self._bases[pe] - self._bases[self._me]
        due = time.monotonic() + self._random.uniform(0, self.most_s)
        if not self._thread:
            _thread.start_new_thread(self._deliver, ())
        self._requests.put((due, next(self._count), dst + there, src, nbytes, signal + there, value))

    def quiet(self) -> None:
        """Wait until all puts have arrived."""
        if self._requests.empty() and not self._thread:
            return
        answer: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._requests.put(answer)
        answer.get()

    def close(self) -> None:
        """Deliver the puts under way at once, and end the thread."""
        self._closing = True
        self.quiet()
        self._requests.put(None)

    def _deliver(self) -> None:
        me = _thread.get_ident()
        if self._thread.setdefault("delivers", me) != me:  # the second put came before the thread started
            return
        under_way: list[tuple] = []
        answers: list[queue.SimpleQueue] = []
        while True:
            wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
            try:
                request = self._requests.get(timeout=0.0 if under_way and self._closing else wait_s)
            except queue.Empty:
                _, _, dst, src, nbytes, signal, value = heapq.heappop(under_way)
                ctypes.memmove(dst, src, nbytes)
                ctypes.c_int64.from_address(signal).value = value
            else:
                if request is None:
                    return
                if isinstance(request, tuple):
                    heapq.heappush(under_way, request)
                else:
                    answers.append(request)
            while answers and not under_way:
                answers.pop().put(None)
