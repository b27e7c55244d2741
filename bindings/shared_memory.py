"""Symmetric heap in POSIX shared memory, for ranks as processes of one host without GPUs."""

from __future__ import annotations

import ctypes
import heapq
import mmap
import os
import random
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import torch

from . import nvshmem_device
from .arena import Arena, arena_bytes, check_alike

_DIRECTORY = "/dev/shm"


class SharedMemoryHeap:
    """Symmetric heap of one segment per process, mapped by all processes of the job; ``pe``: the rank in the job.

    ``exchange(object) -> list`` gathers an object of every process in pe order; it must not return before all processes
    have called it. Only the owner can read the segments (mode 0600). The constructor unlinks them, so none is left if a
    process is killed.
    """

    transport = "shm"

    def __init__(self, exchange: Callable[[Any], list[Any]], nbytes: int | None = None) -> None:
        self.device = torch.device("cpu")
        self.arena = Arena(arena_bytes(nbytes), self._commit)
        path = os.path.join(_DIRECTORY, f"allscan-{uuid.uuid4().hex}")
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.ftruncate(fd, self.arena.size)  # sparse: _commit allocates the pages
            self._fd = fd
            peers = exchange((os.uname().nodename, path, self.arena.size))
            if len({node for node, _, _ in peers}) > 1:
                raise RuntimeError(
                    "transport 'shm' needs all ranks on one host, got "
                    + ", ".join(sorted({node for node, _, _ in peers}))
                    + "; across hosts use GPUs and the transport 'nvshmem'"
                )
            check_alike([size for _, _, size in peers])
            self._arenas = [self._map(peer_path, size) for _, peer_path, size in peers]
            self._me = [peer_path for _, peer_path, _ in peers].index(path)
            self.pes = list(range(len(peers)))
            exchange("mapped")
        finally:
            os.unlink(path)
        self.network = Network([arena.data_ptr() for arena in self._arenas], self._me)
        nvshmem_device.interpreted_network = self.network

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

    @staticmethod
    def _map(path: str, size: int) -> torch.Tensor:
        fd = os.open(path, os.O_RDWR)
        try:
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
        """Close the segment's file. A segment is freed when no rank refers to its tensors."""
        os.close(self._fd)
        self._fd = -1


class Network:
    """Simulates NVSHMEM's put with signal over shared memory, for the interpreter. Like the worst network, it delays
    every put by a random time of at most ``most_s``, so that puts are reordered, and reads the source at delivery."""

    def __init__(self, bases: list[int], me: int, most_s: float = 2e-3) -> None:
        self.most_s = most_s
        self._bases, self._me, self._random = bases, me, random.Random(me)
        self._under_way: list[tuple] = []
        self._changed, self._count = threading.Condition(), 0
        self._thread: threading.Thread | None = None

    def put_signal(self, dst: int, src: int, nbytes: int, signal: int, value: int, pe: int) -> None:
        """Start a put. dst, signal: local symmetric addresses."""
        there = self._bases[pe] - self._bases[self._me]
        due = time.monotonic() + self._random.uniform(0, self.most_s)
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._deliver, daemon=True)
                self._thread.start()
            self._count += 1
            heapq.heappush(self._under_way, (due, self._count, dst + there, src, nbytes, signal + there, value))
            self._changed.notify_all()

    def quiet(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way)

    def _deliver(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._under_way)
                wait_s = self._under_way[0][0] - time.monotonic()
                if wait_s > 0:
                    self._changed.wait(wait_s)
                    continue
                _, _, dst, src, nbytes, signal, value = self._under_way[0]
                ctypes.memmove(dst, src, nbytes)
                ctypes.c_int64.from_address(signal).value = value
                heapq.heappop(self._under_way)
                self._changed.notify_all()
