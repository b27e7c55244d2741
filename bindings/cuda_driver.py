"""Calls the CUDA driver through ctypes, for functions that torch and Triton lack.

Handles are integers. Every function raises RuntimeError with the driver's name of an error.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_char_p, c_int, c_void_p
from typing import Any

NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
SHARED_MEMORY_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _name(error: int) -> str:
    name = c_char_p()
    _library().cuGetErrorName(c_int(error), byref(name))
    return name.value.decode() if name.value else f"CUDA error {error}"


def _call(name: str, *args: Any) -> None:
    error = getattr(_library(), name)(*args)
    if error:
        raise RuntimeError(f"{name}: {_name(error)}")


def set_shared_memory_carveout(function: int, percent: int) -> None:
    """Set the share of L1 memory that a CUDA function prefers as shared memory."""
    _call("cuFuncSetAttribute", c_void_p(function), SHARED_MEMORY_CARVEOUT, percent)


def new_stream(priority: int = 0) -> int:
    """Create an exclusive stream on the current device. torch's streams come from a pool and may be shared."""
    stream = c_void_p()
    _call("cuStreamCreateWithPriority", byref(stream), NON_BLOCKING, c_int(priority))
    assert stream.value is not None
    return stream.value


def is_captured(stream: int) -> bool:
    """Check whether a stream is being captured. For the default stream the query fails during another stream's
    capture; the result is then True."""
    status = c_int()
    return bool(_library().cuStreamIsCapturing(c_void_p(stream), byref(status)) or status.value)
