"""Launches that come again with the same addresses, as CUDA graphs: one call of the driver in place of many."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from .bindings.cuda_driver import Capture
from .streams import capturing, current_device, current_stream_of, private_stream

KEPT = 128  # graphs of one sequence of launches, and addresses that came once
MOST = 1024  # graphs of a process, since each takes memory of the driver
FAILURES = 3  # captures of one sequence of launches that fail in a row, after which no other is tried

_NEW: Any = False  # addresses that have not come yet
_one_at_a_time = threading.Lock()  # for _capture_stream


class Graphs:
    """Of one sequence of launches, by the addresses that it is given.

    Training gives an operator the same addresses step after step, since an allocator answers the same requests alike.
    What comes for the first time is launched as it is; the second time it is captured, and from then on launched as a
    graph. A graph has the addresses in it and nothing else: no memory is kept for it. In a capture of the caller's
    nothing else is captured. Where a capture fails, the launches are made as they are.
    """

    def __init__(self) -> None:
        self._known: dict[tuple, Capture | None] = {}  # None for what came once; the newest is last
        self._failures = 0  # in a row

    def launch(self, device: int, key: tuple, launches: Callable[..., None], *args: Any) -> None:
        """``launches(*args)`` on the current stream of the GPU ``device``, which launches the same whenever ``key`` is
        the same, and can be called again after an error."""
        if current_device() != device or capturing():
            return launches(*args)
        known = self._known
        graph = known.pop(key, _NEW)
        if graph is None and self._failures < FAILURES and len(Capture.living) < MOST:
            graph = self._capture(device, launches, *args)
        if len(known) >= KEPT:
            del known[next(iter(known))]
        known[key] = graph or None
        if graph:
            graph.launch(current_stream_of(device))
        else:
            launches(*args)

    def _capture(self, device: int, launches: Callable[..., None], *args: Any) -> Capture | None:
        """None where it cannot be; nothing was launched then."""
        if not _one_at_a_time.acquire(blocking=False):
            return None
        try:
            stream = _capture_stream(device)
            with torch.cuda.stream(stream), Capture(stream.cuda_stream) as graph:
                launches(*args)
            self._failures = 0
            return graph
        except Exception:  # no memory for a graph; another thread synchronises the device; a step that raises
            self._failures += 1
            return None
        finally:
            _one_at_a_time.release()


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    return private_stream(torch.device("cuda", device))
