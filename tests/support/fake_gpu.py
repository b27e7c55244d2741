"""Fakes Triton's driver and the CUDA driver without a GPU: kernels are compiled for sm_90, and a launch calls a Python
function of the kernel's name with the arguments of a GPU's launcher, or with the parameters of a graph's node."""

from __future__ import annotations

import contextlib
import ctypes
import random
import struct
from typing import Any
from unittest import mock

import numpy
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from allscan.bindings import cuda_driver
from allscan.launch import compiled_kernel, graph_cache
from support.sm90 import parameters_in

LOADED: dict[int, tuple] = {}  # the process's kernels by CUDA function: (name, source, bytes of each parameter)


class Driver:
    """Replaces Triton's driver. kernels: {name: function(grid, *arguments)}; tensors are passed as addresses."""

    def __init__(self, kernels):
        self.launches, self.utils = [], self
        self.kernels, self.source = kernels, None
        made_by = self

        class Launcher:
            def __init__(self, source, metadata):
                self.name = source.fn.__name__
                made_by.source = source

            def __call__(self, x, y, z, stream, function, packed, metadata, enter, leave, *arguments):
                gpu = driver.active  # Triton may have cached the kernel for an earlier fake GPU
                gpu.launches.append(self.name)
                values = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
                gpu.kernels[self.name]((x, y, z), *values)

        self.launcher_cls = Launcher

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device):
        return {"max_shared_mem": 227 << 10}

    def load_binary(self, name, binary, shared, device):
        function = 4096 + len(LOADED)
        LOADED[function] = name, self.source, parameters_in(binary, name)
        return 1, function, 32, 0, 1024

    def get_benchmarker(self):
        return self.benchmark

    def benchmark(self, call, quantiles):
        call()
        return [1.0] * len(quantiles)


class Cuda:
    """Replaces the driver's library. A launch runs a graph's nodes in a random order that its edges allow."""

    def __init__(self, gpu: Driver, seed: int = 0) -> None:
        self.gpu, self.chance = gpu, random.Random(seed)
        self.nodes: dict[int, tuple[int, str, list[int], Any, int]] = {}  # graph, kind, behind, what, priority
        self.graphs: set[int] = set()
        self.executables: dict[int, list[int]] = {}
        self.numbers = iter(range(1 << 20, 1 << 30))
        self.fails: dict[str, int] = {}  # error to return, by function
        self.mode, self.calls = 0, []
        self.cuGraphLaunch = _Function(self._launch)

    def __getattr__(self, name):
        if name not in CUDA:
            raise AttributeError(name)

        def call(*args):
            self.calls.append(name)
            return self.fails.get(name) or CUDA[name](self, *args) or 0

        return call

    def _launch(self, executable, stream):
        self.calls.append("cuGraphLaunch")
        if self.fails.get("cuGraphLaunch"):
            return self.fails["cuGraphLaunch"]
        left = list(self.executables[executable.value])
        done: set[int] = set()
        self.gpu.launches.append("graph")
        while left:
            ready = [node for node in left if done.issuperset(self.nodes[node][2])]
            node = self.chance.choice(ready)
            left.remove(node)
            done.add(node)
            _, kind, _, what, _ = self.nodes[node]
            if kind == "zeros":
                ctypes.memset(*what)
            else:
                name, grid, values = what
                self.gpu.kernels[name](grid, *values)
        return 0


class _Function:
    argtypes: tuple = ()

    def __init__(self, call):
        self.call = call

    def __call__(self, *args):
        return self.call(*args)


def _create(cuda, graph, flags):
    graph._obj.value = next(cuda.numbers)
    cuda.graphs.add(graph._obj.value)


def _added(cuda, made, graph, behind, count, kind, what):
    assert graph.value in cuda.graphs and len(behind) == count.value
    assert all(cuda.nodes[node][0] == graph.value for node in behind)
    made._obj.value = next(cuda.numbers)
    cuda.nodes[made._obj.value] = graph.value, kind, list(behind), what, 0


def _add_kernel(cuda, made, graph, behind, count, params):
    """Add a launch. Reads the parameters as a kernel would: sizes from its machine code, types from its source."""
    params = params._obj
    name, source, sizes = LOADED[params.func]
    assert (params.blockDimX % 32, params.blockDimY, params.blockDimZ, params.extra, params.ctx) == (
        0,
        1,
        1,
        None,
        None,
    )
    places = (ctypes.c_void_p * len(sizes)).from_address(params.kernelParams)
    words = iter([ctypes.string_at(place, size) for place, size in zip(places, sizes)])
    values = [_value(kind, words, source.constants.get((i,))) for i, kind in enumerate(source.signature.values())]
    assert [*words] == [bytes(8)] * 2, "Triton's scratch memories"
    grid = params.gridDimX, params.gridDimY, params.gridDimZ
    _added(cuda, made, graph, behind, count, "kernel", (name, grid, values))


def _value(kind, words, constant):
    if kind == "constexpr":
        return constant
    if isinstance(kind, tuple):
        return tuple(_value(x, words, None) for x in kind)
    form = "<Q" if kind.startswith("*") else {"fp32": "<f", "fp64": "<d", "i32": "<i", "i64": "<q"}[kind]
    return struct.unpack(form, next(words))[0]


def _add_zeros(cuda, made, graph, behind, count, params, context):
    params = params._obj
    assert params.height == 1 and context.value == 77 and params.value == 0
    what = params.dst, 0, params.width * params.elementSize
    _added(cuda, made, graph, behind, count, "zeros", what)


def _set_priority(cuda, node, attribute, value):
    assert attribute.value == 8
    cuda.nodes[node.value] = (*cuda.nodes[node.value][:4], value._obj.priority)


def _instantiate(cuda, executable, graph, flags):
    assert flags.value == 8 and cuda.mode == 2
    executable._obj.value = next(cuda.numbers)
    cuda.executables[executable._obj.value] = [n for n, node in cuda.nodes.items() if node[0] == graph.value]


def _exchange_mode(cuda, mode):
    cuda.mode, mode._obj.value = mode._obj.value, cuda.mode


def _parameter(cuda, function, index, offset, size):
    sizes = LOADED[function.value][2]
    if index.value >= len(sizes):
        return 1
    size._obj.value = sizes[index.value]


CUDA = dict(
    cuGraphCreate=_create,
    cuGraphAddKernelNode_v2=_add_kernel,
    cuGraphAddMemsetNode=_add_zeros,
    cuGraphKernelNodeSetAttribute=_set_priority,
    cuGraphInstantiateWithFlags=_instantiate,
    cuGraphDestroy=lambda cuda, graph: cuda.graphs.remove(graph.value),
    cuGraphExecDestroy=lambda cuda, executable: cuda.executables.pop(executable.value) and None,
    cuThreadExchangeStreamCaptureMode=_exchange_mode,
    cuFuncGetParamInfo=_parameter,
    cuCtxGetCurrent=lambda cuda, context: setattr(context._obj, "value", 77),
    cuGetErrorName=lambda cuda, error, name: setattr(name._obj, "value", f"CUDA_ERROR_{error.value}".encode()),
)


@contextlib.contextmanager
def fake_gpu(kernels, with_graphs=False):
    """Install a fake GPU. with_graphs: repeated launches may become CUDA graphs of :class:`Cuda`, in ``gpu.cuda``."""
    made = Driver(kernels)
    made.cuda = Cuda(made)
    before = driver._active
    driver.set_active(made)
    patches = (
        mock.patch.object(compiled_kernel.torch.cuda, "current_device", lambda: 0),
        mock.patch.object(compiled_kernel, "current_stream_of", lambda device: 0),
        mock.patch.object(graph_cache, "capturing", lambda: False),
        mock.patch.object(graph_cache, "current_stream_of", lambda device: 0),
        mock.patch.object(graph_cache, "current_device", lambda: -1 if with_graphs else 0),  # -1 is the tensors' device
        mock.patch.object(cuda_driver, "_library", lambda: made.cuda),
    )
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.callback(lambda: setattr(driver, "_active", before))
        yield made


def floats(address, count):
    """Read float32 values at an address, without a tensor, which dispatch modes would see."""
    return numpy.frombuffer((ctypes.c_float * count).from_address(address), numpy.float32)
