"""NVSHMEM inside a compiled Triton kernel: its device library is linked, and every CUDA module is given its state."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, cast

import triton

from .nvshmem_host import INSTALL, initialized_modules, load
from .triton_compat import NOT_SO_IN_THIS_TRITON, functions_of, module_of
from .versions import device_library_rejection

DEVICE_LIBRARY = "libnvshmem_device"  # what nvshmem_device's functions name
# All of it that they call
FUNCTIONS = (
    "nvshmem_fence",
    "nvshmem_my_pe",
    "nvshmem_n_pes",
    "nvshmem_ptr",
    "nvshmem_quiet",
    "nvshmem_signal_wait_until",
    "nvshmemx_barrier_all_block",
    "nvshmemx_getmem_block",
    "nvshmemx_getmem_nbi_block",
    "nvshmemx_putmem_block",
    "nvshmemx_putmem_nbi_block",
    "nvshmemx_putmem_signal_block",
    "nvshmemx_putmem_signal_nbi_block",
    "nvshmemx_signal_op",
    "nvshmemx_sync_all_block",
)


@functools.cache
def device_library() -> str:
    """Path of NVSHMEM's LLVM bitcode. Raises RuntimeError naming the package when there is none that Triton can read.

    Up to NVSHMEM 3.6 it is one file; from 3.7 there is one for each architecture.
    """
    try:
        import nvidia.nvshmem as package
    except ImportError:
        raise RuntimeError(f"NVSHMEM's device library is missing: {INSTALL}") from None
    if rejected := device_library_rejection():
        raise RuntimeError(rejected)
    folder = os.path.join(list(package.__path__)[0], "lib")
    for name in ("libnvshmem_device.bc", "libnvshmem_device_sm_90.bc"):
        if os.path.exists(os.path.join(folder, name)):
            return os.path.join(folder, name)
    raise RuntimeError(f"no NVSHMEM bitcode in {folder}: install nvidia-nvshmem 3.4 or later")


@functools.cache
def _called_of(library: str) -> str:
    """Path of ``FUNCTIONS`` alone: the library has 30 MB, which Triton reads for each kernel in 4 s. Where this Triton
    does not give them, the library's."""
    try:
        return functions_of(library, FUNCTIONS)
    except (*NOT_SO_IN_THIS_TRITON, OSError):  # or there is no room
        return library


def extern_libs() -> dict:
    """The launch option that links the device library: ``kernel[grid](..., extern_libs=extern_libs())``."""
    return {DEVICE_LIBRARY: _called_of(device_library())}


class Kernel:
    """A ``triton.jit`` function linked with NVSHMEM, whose modules are initialised before their first launch.

    Every specialisation that Triton compiles is a CUDA module with a copy of NVSHMEM's device state in it; a module
    that was not initialised ends in an illegal address at its first NVSHMEM call. NVSHMEM must be initialised first.
    """

    def __init__(self, fn: Any) -> None:
        self.fn, self.arg_names = fn, fn.arg_names
        functools.update_wrapper(cast(Any, self), fn.fn if hasattr(fn, "fn") else fn)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        return functools.partial(self.run, grid)

    def run(self, grid: tuple[int, ...], *args: Any, **options: Any) -> object:
        options["extern_libs"] = extern_libs()
        initialize_module(self.fn.warmup(*args, grid=grid, **options))
        return self.fn[grid](*args, **options)


def initialize_module(kernel: Any) -> None:
    """Give a compiled Triton kernel NVSHMEM's device state, if it uses any."""
    module = module_of(kernel)
    if module in initialized_modules:
        return
    if "nvshmemi_device_state_d" in kernel.asm["ptx"]:
        status = load().cumodule_init(module)
        if status:
            raise RuntimeError(f"nvshmemx_cumodule_init failed with {status}: is NVSHMEM initialised?")
    initialized_modules[module] = kernel


def jit(fn: Callable[..., object] | None = None, **options: Any) -> Any:
    """``triton.jit`` for kernels that call the functions of this module."""
    if fn is None:
        return functools.partial(jit, **options)
    return Kernel(triton.jit(fn, **options))
