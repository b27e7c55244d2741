"""Calls the CUDA driver through ctypes, for functions that torch and Triton lack.

Exclusive streams; CUDA graphs built from nodes, without stream capture, with a launch of about one microsecond of
Python. Handles are integers. Every function raises RuntimeError with the driver's name of an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Iterator, Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_ulonglong, c_void_p
from typing import Any, NamedTuple

NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
NODE_PRIORITY = 8  # CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY: priorities of the nodes, not of the launch stream
SHARED_MEMORY_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent
PRIORITY = 8  # CU_LAUNCH_ATTRIBUTE_PRIORITY
OUT_OF_RANGE = 1  # CUDA_ERROR_INVALID_VALUE: the kernel has fewer parameters


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


def parameter_sizes(function: int) -> list[int]:
    """Return the size in bytes of each parameter of a CUDA function. Needs a driver of CUDA 12.4 or later."""
    offset, size = c_size_t(), c_size_t()
    sizes: list[int] = []
    while True:
        arguments = c_void_p(function), c_size_t(len(sizes)), byref(offset), byref(size)
        try:
            error = _library().cuFuncGetParamInfo(*arguments)
        except AttributeError:
            raise RuntimeError("cuFuncGetParamInfo: the driver is older than CUDA 12.4") from None
        if error == OUT_OF_RANGE:
            return sizes
        if error:
            raise RuntimeError(f"cuFuncGetParamInfo: {_name(error)}")
        sizes.append(size.value)


class KernelNode(NamedTuple):
    """A kernel launch. arguments: (bits, size in bytes, at most 8) of each parameter."""

    function: int
    grid: tuple[int, int, int]
    threads: int  # per program
    shared: int  # bytes of dynamic shared memory
    arguments: list[tuple[int, int]]


class _KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("func", c_void_p),
        ("gridDimX", c_uint),
        ("gridDimY", c_uint),
        ("gridDimZ", c_uint),
        ("blockDimX", c_uint),
        ("blockDimY", c_uint),
        ("blockDimZ", c_uint),
        ("sharedMemBytes", c_uint),
        ("kernelParams", c_void_p),
        ("extra", c_void_p),
        ("kern", c_void_p),
        ("ctx", c_void_p),
    ]


class _MemsetParams(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = [
        ("dst", c_uint64),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("elementSize", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
    ]


class _AttributeValue(ctypes.Union):
    """CUlaunchAttributeValue."""

    _fields_ = [("priority", c_int), ("pad", ctypes.c_char * 64)]


@contextlib.contextmanager
def relaxed() -> Iterator[None]:
    """Use the relaxed capture mode: calls of this thread do not end captures of others (torch.cuda.graph)."""
    mode = c_int(RELAXED)
    error = _library().cuThreadExchangeStreamCaptureMode(byref(mode))
    try:
        yield
    finally:
        if not error:
            _library().cuThreadExchangeStreamCaptureMode(byref(mode))


@contextlib.contextmanager
def new_graph() -> Iterator[Graph]:
    """Create an empty graph and destroy it at the end of the block; executable graphs stay. No stream is captured, and
    captures of other threads stay valid."""
    with relaxed():
        graph = c_void_p()
        _call("cuGraphCreate", byref(graph), c_uint(0))
        try:
            yield Graph(graph)
        finally:
            _library().cuGraphDestroy(graph)


class Graph:
    """A CUDA graph under construction. ``behind``: the nodes that a new node depends on."""

    def __init__(self, graph: c_void_p) -> None:
        self._graph = graph

    def kernel(self, node: KernelNode, behind: Sequence[int], priority: int = 0) -> int:
        """Add a kernel launch. The driver copies the arguments."""
        count = len(node.arguments)
        words = (c_uint64 * count)(*(bits for bits, _ in node.arguments))
        places = (c_void_p * count)(*(ctypes.addressof(words) + 8 * i for i in range(count)))
        params = _KernelParams(node.function, *node.grid, node.threads, 1, 1, node.shared, ctypes.addressof(places))
        handle = self._add("cuGraphAddKernelNode_v2", behind, byref(params))
        if priority:
            value = _AttributeValue(priority=priority)
            _call("cuGraphKernelNodeSetAttribute", c_void_p(handle), c_int(PRIORITY), byref(value))
        return handle

    def zeros(self, address: int, nbytes: int, behind: Sequence[int]) -> int:
        """Add a node that fills memory with zeros."""
        size = 1 if (address | nbytes) % 4 else 4
        params = _MemsetParams(address, 0, 0, size, nbytes // size, 1)
        context = c_void_p()
        _call("cuCtxGetCurrent", byref(context))
        return self._add("cuGraphAddMemsetNode", behind, byref(params), context)

    def _add(self, name: str, behind: Sequence[int], *params: Any) -> int:
        handle, others = c_void_p(), (c_void_p * len(behind))(*behind)
        _call(name, byref(handle), self._graph, others, c_size_t(len(behind)), *params)
        assert handle.value is not None
        return handle.value

    def instantiate(self) -> ExecutableGraph:
        executable = c_void_p()
        _call("cuGraphInstantiateWithFlags", byref(executable), self._graph, c_ulonglong(NODE_PRIORITY))
        return ExecutableGraph(executable)


class ExecutableGraph:
    """An instantiated CUDA graph. The driver frees it at ``destroy``, or when this object is deleted."""

    def __init__(self, executable: c_void_p) -> None:
        self._executable = executable
        self._launch = _library().cuGraphLaunch
        self._launch.argtypes = c_void_p, c_void_p  # ctypes would pass a Python integer as a 32-bit int

    def launch(self, stream: int) -> None:
        error = self._launch(self._executable, stream)
        if error:
            raise RuntimeError(f"cuGraphLaunch: {_name(error)}")

    def destroy(self) -> None:
        """Free the graph. A running launch completes."""
        executable, self._executable = self._executable, c_void_p()
        if executable:
            with relaxed():
                _library().cuGraphExecDestroy(executable)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.destroy()
