"""Triton's side of a GPU without one: kernels are compiled for sm_90, and a launch calls a Python function of their
name with what the launcher of a GPU would have got."""

from __future__ import annotations

import contextlib
import ctypes
from unittest import mock

import numpy
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from allscan import graphs, launching, traces


class Driver:
    """In place of Triton's. kernels: {name: function(grid, *arguments)}; tensors come as addresses."""

    def __init__(self, kernels):
        self.launches, self.utils = [], self
        driver_of = self

        class Launcher:
            def __init__(self, source, metadata):
                self.name = source.fn.__name__

            def __call__(self, x, y, z, stream, function, packed, metadata, enter, leave, *arguments):
                driver_of.launches.append(self.name)
                values = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
                kernels[self.name]((x, y, z), *values)

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
        return 1, 1, 32, 0, 1024

    def get_benchmarker(self):
        return self.benchmark

    def benchmark(self, call, quantiles):
        call()
        return [1.0] * len(quantiles)


@contextlib.contextmanager
def fake_gpu(kernels):
    made = Driver(kernels)
    before = driver._active
    driver.set_active(made)
    patches = (
        mock.patch.object(launching.torch.cuda, "current_device", lambda: 0),
        mock.patch.object(launching, "current_stream_of", lambda device: 0),
        mock.patch.object(traces, "capturing", lambda: False),
        mock.patch.object(graphs, "current_device", lambda: 0),  # not the tensors': no CUDA graphs
    )
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.callback(lambda: setattr(driver, "_active", before))
        yield made


def floats(address, count):
    """What is there, float32; no tensor, which would be seen."""
    return numpy.frombuffer((ctypes.c_float * count).from_address(address), numpy.float32)
