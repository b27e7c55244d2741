"""Launches that come again with the same addresses, as CUDA graphs: one call of the driver in place of many."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .bindings.cuda_driver import Capture
from .streams import current_stream_of, private_stream

KEPT = 128  # graphs of one sequence of launches, and addresses that came once


class Graphs:
    """Of one sequence of launches, by the addresses that it is given.

    Training gives an operator the same addresses step after step, since an allocator answers the same requests alike.
    What comes for the first time is launched as it is; the second time it is captured, and from then on launched as a
    graph. A graph has the addresses in it and nothing else: no memory is kept for it. In a capture of the caller's
    nothing else is captured.
    """

    def __init__(self) -> None:
        self._known: dict[tuple, Capture | None] = {}  # the newest is last

    def launch(self, key: tuple, launches: Callable[..., None], *args: Any) -> None:
        """``launches(*args)``, which launches the same whenever ``key`` is the same, on the current stream."""
        if torch.cuda.is_current_stream_capturing():
            return launches(*args)
        device, came = torch.cuda.current_device(), key in self._known
        graph = self._known.pop(key, None)
        if came and graph is None:
            stream = _capture_stream(device)
            with torch.cuda.stream(stream), Capture(stream.cuda_stream) as graph:
                launches(*args)
        if len(self._known) >= KEPT:
            del self._known[next(iter(self._known))]
        self._known[key] = graph
        if graph is None:
            launches(*args)
        else:
            graph.launch(current_stream_of(device))


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    return private_stream(torch.device("cuda", device))
