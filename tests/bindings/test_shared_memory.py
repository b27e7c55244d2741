"""bindings/shared_memory.py and bindings/arena.py: sizes of the arena, errors of the system, and what is left."""

from __future__ import annotations

import concurrent.futures
import errno
import gc
import os
import time

import pytest
import torch

from allscan.bindings import nvshmem_device, shared_memory
from allscan.bindings.arena import Arena, arena_bytes
from allscan.bindings.shared_memory import SharedMemoryHeap

pytestmark = [pytest.mark.cpu, pytest.mark.quick]


def alone(value):
    return [value]


def left_over():
    """Return (open file descriptors, threads, segments with a name)."""
    gc.collect()  # a mapping has a descriptor, and tracebacks refer to it
    names = [name for name in os.listdir("/dev/shm") if name.startswith("allscan-")]
    return len(os.listdir("/proc/self/fd")), threads(), names


def threads():
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize(
    "text, nbytes",
    [("4096", 4096), ("600", 1024), (" 5k ", 5 << 10), ("512M", 512 << 20), ("1G", 1 << 30), ("", 256 << 20)],
)
def test_sizes(monkeypatch, text, nbytes):
    monkeypatch.setenv("ALLSCAN_HEAP", text)
    assert arena_bytes(None) == nbytes
    assert arena_bytes(1 << 20) == 1 << 20


@pytest.mark.parametrize("text", ["5KM", "1MK", "12GGG", "٣M", "M", "-5M", "+5M", "5_0M", "5 M", "1.5G", "9" * 5000])
def test_texts_that_are_no_size(monkeypatch, text):
    monkeypatch.setenv("ALLSCAN_HEAP", text)
    with pytest.raises(ValueError, match="ALLSCAN_HEAP must be a number of bytes such as 512M, got '"):
        arena_bytes(None)


@pytest.mark.parametrize(
    "text, error, match",
    [
        ("100000000G", MemoryError, "arena of 107,374,182,400,000,000 bytes.*: Cannot allocate memory.*ALLSCAN_HEAP"),
        ("9999999999G", ValueError, "arena of 10,737,418,238,926,258,176 bytes.*ALLSCAN_HEAP must be at most"),
        ("511", ValueError, "at least 512 bytes, got 511"),
    ],
)
def test_sizes_that_do_not_fit(monkeypatch, text, error, match):
    monkeypatch.setenv("ALLSCAN_HEAP", text)
    before = left_over()
    with pytest.raises(error, match=match):
        SharedMemoryHeap(alone)
    assert left_over() == before


def test_a_read_only_file_system(monkeypatch):
    def read_only(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(shared_memory.os, "open", read_only)
    with pytest.raises(MemoryError, match="1,048,576 bytes a rank in /dev/shm: Read-only file system.*ALLSCAN_HEAP"):
        SharedMemoryHeap(alone, 1 << 20)


@pytest.mark.parametrize("step", ["segments", "mapped"])
def test_a_failed_exchange_leaves_nothing(step):
    def exchange(value):
        if (value == "mapped") == (step == "mapped"):
            raise KeyboardInterrupt
        return [value]

    before = left_over()
    with pytest.raises(KeyboardInterrupt):
        SharedMemoryHeap(exchange, 1 << 20)
    assert left_over() == before


def test_close_delivers_puts_and_ends_the_thread():
    for puts in (0, 1, 50):
        before = left_over()
        heap = SharedMemoryHeap(alone, 1 << 20)
        data, signals = (heap.view(0, offset, puts + 1, torch.int64) for offset in (0, 4096))
        data[:] = torch.arange(puts + 1) + 7
        for most_s in (1e-3, 600):
            heap.quiet()
            heap.network.most_s = most_s
            data[0] = 0
            signals.zero_()
            for i in range(1, puts + 1):
                addresses = data[0].data_ptr(), data[i].data_ptr(), 8, signals[i].data_ptr()
                heap.network.put_signal(*addresses, i, 0)
            if most_s < 1:
                heap.quiet()
                assert signals.tolist() == list(range(puts + 1)) and data[0].item() in (data[1:].tolist() or [0])
        start = time.monotonic()
        heap.close(True)
        assert time.monotonic() - start < 60 and signals.tolist() == list(range(puts + 1))
        assert nvshmem_device.interpreted_network is None
        del heap, data, signals
        while threads() > before[1] and time.monotonic() - start < 60:
            time.sleep(1e-3)
        assert left_over() == before


def test_threads_that_allocate_at_once():
    """Each thread may have a communicator of its own; all use one arena."""
    arena = Arena(1 << 20, commit=lambda offset, length: time.sleep(1e-4))
    live: set[int] = set()

    def work(number):
        for i in range(40):
            offset = arena.alloc(512 * (1 + (i + number) % 5))
            assert offset not in live
            live.add(offset)
            time.sleep(1e-4)
            live.remove(offset)
            arena.free(offset)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in pool.map(work, range(4)):
            pass
    assert arena.free_bytes == arena.size and arena.alloc(arena.size) == 0
