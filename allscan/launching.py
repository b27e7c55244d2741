"""What a kernel that waits for other ranks needs of its launch."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from .bindings import nvshmem_module

P = ParamSpec("P")
R = TypeVar("R")


def dynamo_disabled(function: Callable[P, R]) -> Callable[P, R]:
    """torch.compiler.disable: what ``function`` asks of other ranks, and launches, is not for torch to trace. But it
    does not import the compiler, which takes a second, where nobody has."""

    disabled: Callable[P, R] | None = None

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return function(*args, **options)
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **options)

    return call


@functools.cache
def with_nvshmem(kernel):
    """The kernel linked with NVSHMEM's device library."""
    return nvshmem_module.Kernel(kernel)


@functools.cache
def prefer_shared_memory_carveout(function: int) -> None:
    """From the next launch on, give the multiprocessors where this kernel waits all the shared memory there is.

    A multiprocessor divides its memory into cache and shared memory for the first program on it, and holds to that
    until it is empty: programs that wait would keep away the kernels that are to run beside them.

    function: handle of the CUDA function. Raises RuntimeError for a CUDA error.
    """
    carveout = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent
    error = ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(ctypes.c_void_p(function), carveout, 100)
    if error:
        raise RuntimeError(f"cuFuncSetAttribute: CUDA error {error}")
