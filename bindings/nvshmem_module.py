"""Links NVSHMEM's device library into Triton kernels, and initialises the device state of their CUDA modules."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, cast

import triton

from .nvshmem_host import INSTALL, initialized_modules, load
from .triton_compat import NOT_SO_IN_THIS_TRITON, functions_of, module_of
from .versions import device_library_rejection

DEVICE_LIBRARY = "libnvshmem_device"  # named by the functions in nvshmem_device
# The library's functions that nvshmem_device calls
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
    """Return the path of NVSHMEM's LLVM bitcode. Raises RuntimeError if Triton can read none, naming the package.

    One file up to NVSHMEM 3.6; one per architecture from 3.7 on.
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
    """Return the path of a library with ``FUNCTIONS`` only: Triton reads the full library (30 MB) for each kernel, in
    4 s. Falls back to the full library if this Triton cannot extract functions."""
    try:
        return functions_of(library, FUNCTIONS)
    except (*NOT_SO_IN_THIS_TRITON, OSError):  # OSError: e.g. disk full
        return library


def extern_libs() -> dict:
    """Return the launch option that links the device library: ``kernel[grid](..., extern_libs=extern_libs())``."""
    return {DEVICE_LIBRARY: _called_of(device_library())}


class Kernel:
    """A ``triton.jit`` function linked with NVSHMEM. Its modules are initialised before their first launch.

    Every compiled specialisation is a CUDA module with its own copy of NVSHMEM's device state. Without initialisation
    the first NVSHMEM call in a module fails with an illegal address. NVSHMEM must be initialised first.
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
    """Initialise NVSHMEM's device state in a compiled kernel's module, if the kernel uses it."""
    module = module_of(kernel)
    if module in initialized_modules:
        return
    if "nvshmemi_device_state_d" in kernel.asm["ptx"]:
        status = load().cumodule_init(module)
        if status:
            raise RuntimeError(f"nvshmemx_cumodule_init failed with {status}: is NVSHMEM initialised?")
    initialized_modules[module] = kernel


def jit(fn: Callable[..., object] | None = None, **options: Any) -> Any:
    """Compile like ``triton.jit``, for kernels that call the functions of nvshmem_device."""
    if fn is None:
        return functools.partial(jit, **options)
    return Kernel(triton.jit(fn, **options))
