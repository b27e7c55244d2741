"""The CUDA driver, through ctypes: what torch and Triton have no function for.

Streams of one's own, and graphs that are captured whatever other threads launch meanwhile (one that synchronises the
device may end a capture, and get an error) and launched for a microsecond of Python. Handles are integers. Every
function raises RuntimeError with the driver's number for an error.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from ctypes import byref, c_int, c_ulonglong, c_void_p
from typing import Any, ClassVar

NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
NODE_PRIORITY = 8  # CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY: that of the stream on which a kernel was captured
SHARED_MEMORY_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *args: Any) -> None:
    error = getattr(_library(), name)(*args)
    if error:
        raise RuntimeError(f"{name}: CUDA error {error}")


def set_shared_memory_carveout(function: int, percent: int) -> None:
    """How a multiprocessor divides its memory into cache and shared memory for a CUDA function."""
    _call("cuFuncSetAttribute", c_void_p(function), SHARED_MEMORY_CARVEOUT, percent)


def new_stream(priority: int = 0) -> int:
    """A stream of the current device that nothing else is launched on: torch's come from a pool, and may be shared."""
    stream = c_void_p()
    _call("cuStreamCreateWithPriority", byref(stream), NON_BLOCKING, c_int(priority))
    assert stream.value is not None
    return stream.value


class Capture:
    """``with Capture(stream) as captured: ...`` holds back what is launched on ``stream``, and on streams that are put
    behind it and joined to it again; then ``captured.launch(stream)`` launches it as one graph."""

    living: ClassVar[set[int]] = set()  # of the process: those that can be launched

    def __init__(self, stream: int) -> None:
        self._stream, self._executable = c_void_p(stream), c_void_p()
        self._destroy = _library().cuGraphExecDestroy
        self._launch = _library().cuGraphLaunch
        self._launch.argtypes = c_void_p, c_void_p  # so that a number is one

    def __enter__(self) -> Capture:
        try:
            _call("cuStreamBeginCapture_v2", self._stream, RELAXED)
        except RuntimeError:  # of a capture that was interrupted, perhaps: so the next one begins
            _library().cuStreamEndCapture(self._stream, byref(c_void_p()))
            raise
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        graph = c_void_p()
        error = _library().cuStreamEndCapture(self._stream, byref(graph))
        try:
            if kind is None:
                if error:
                    raise RuntimeError(f"cuStreamEndCapture: CUDA error {error}")
                _call("cuGraphInstantiateWithFlags", byref(self._executable), graph, c_ulonglong(NODE_PRIORITY))
                Capture.living.add(id(self))
        finally:
            if graph:
                _library().cuGraphDestroy(graph)

    def launch(self, stream: int) -> None:
        error = self._launch(self._executable, stream)
        if error:
            raise RuntimeError(f"cuGraphLaunch: CUDA error {error}")

    def __del__(self) -> None:
        if self._executable and not sys.is_finalizing():  # what still runs of it goes on
            Capture.living.discard(id(self))
            self._destroy(self._executable)
