"""Fast repeated launches of one kernel: arguments that are equal in every call are processed once."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor

from ..bindings import nvshmem_module
from ..bindings.cuda_driver import set_shared_memory_carveout
from ..bindings.torch_compat import current_stream_of
from ..bindings.triton_compat import OPTIONS, launchable, launcher
from ..shmem_kernels.channel import Channel
from .machine_code import options_of_right_code

P = ParamSpec("P")
R = TypeVar("R")


def dynamo_disabled(function: Callable[P, R]) -> Callable[P, R]:
    """torch.compiler.disable for ``function``, whose host exchanges and launches torch must not trace. Outside of
    torch.compile it does not import the compiler, which takes a second, and costs next to nothing."""
    # resolved now if that costs nothing: in a traced function torch.compiler.disable() is one more graph break
    disabled: Callable[P, R] | None = torch.compiler.disable(function) if "torch._dynamo" in sys.modules else None

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        nonlocal disabled
        if not torch.compiler.is_compiling():
            return function(*args, **options)
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **options)

    return call


@functools.cache
def with_nvshmem(kernel: Any) -> nvshmem_module.Kernel:
    """``kernel``, linked with NVSHMEM's device library."""
    return nvshmem_module.Kernel(kernel)


_preferring: set[object] = set()  # compiled kernels; held, since a freed kernel's handle could be reused


def prefer_shared_memory_carveout(compiled: Any) -> None:
    """Set the kernel's shared memory carveout to the maximum, from its next launch on.

    A multiprocessor splits its memory into L1 cache and shared memory for the first program on it, and keeps this split
    until it is idle. With a smaller carveout, programs that wait would block the kernels to be overlapped with them.

    compiled: the compiled kernel, as a Triton launch returns it. Raises RuntimeError for a CUDA error.
    """
    if compiled not in _preferring:
        set_shared_memory_carveout(compiled.function, 100)
        _preferring.add(compiled)


NUM_POINTERS = Channel._fields.index("num_tiles")  # the first fields of a channel are addresses, the others constants


class Launch:
    """A kernel, its grid, and the arguments that are equal in every call. Calls pass the other arguments.

        keys = Launch(keys_kernel, (chunks, H), d=GLASizes(H=H, K=K, BT=64, BR=4, BK=128, RANGE=115.0), num_warps=1)
        keys(k, g, table, k_out, gate, strong)

    The first call goes through Triton, which compiles the kernel for its arguments. Later calls pass addresses to the
    compiled kernel. This takes 5 us; Triton, which inspects every argument again, takes 16 us. So calls may differ in
    addresses only, not in dtypes. A call goes through Triton if an address is not a multiple of 16 bytes (Triton
    compiles another kernel for it), with launch hooks (profilers such as Proton), and in the interpreter.

    kernel: a triton.jit function, or a result of ``with_nvshmem``.
    fixed: all kernel parameters other than tensors and channels, by name: numbers, constants, None; and launch options
        (num_warps, num_stages) in addition to ``OPTIONS``. Calls pass tensors and channels in the order of parameters.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], **fixed: Any) -> None:
        self.kernel, self.grid, self.fixed = kernel, grid, OPTIONS | fixed
        self._names: Sequence[str] = kernel.arg_names
        self._arguments = [i for i, name in enumerate(self._names) if name not in fixed]  # positions of call arguments
        self._first = self._arguments == list(range(len(self._arguments)))  # they are the first parameters
        self.ready = False  # whether the kernel is compiled; then ``at`` launches it with an address for a tensor and
        self.at: Callable[[Sequence[Any]], Any] = _not_compiled  # a tuple of addresses and constants for a channel

    def __call__(self, *args: Tensor | Channel) -> Any:
        """Launch on the current stream. Returns the result of Triton: the compiled kernel, None in the interpreter."""
        if self.ready:
            arguments, addresses = _addresses(args)
            if launchable(addresses):
                return self.at(arguments)
        named = {} if self._first else {self._names[i]: x for i, x in zip(self._arguments, args, strict=True)}
        args_in_order = args if self._first else ()
        options = options_of_right_code(self.kernel, self.grid, args_in_order, named, self.fixed)
        compiled = self.kernel[self.grid](*args_in_order, **named, **options)
        if not self.ready and hasattr(compiled, "run") and not any(x % 16 for x in _addresses(args)[1]):
            self._keep(compiled)
        return compiled

    def _keep(self, compiled: Any) -> None:
        """Let ``at`` launch ``compiled``, a kernel compiled for addresses that are multiples of 16 bytes."""
        arguments = [self.fixed.get(name) for name in self._names]
        grid, device = (*self.grid, 1, 1)[:3], torch.cuda.current_device()
        self.at = launcher(compiled, grid, arguments, self._arguments, current_stream_of, device)  # type: ignore[arg-type]
        self.ready = True


def _not_compiled(addresses: Sequence[Any]) -> NoReturn:
    raise RuntimeError("this kernel has not been compiled yet")


def _addresses(args: tuple[Any, ...]) -> tuple[list[Any], list[int]]:
    """(arguments of the compiled kernel for ``args``, all addresses among them)."""
    arguments: list[Any] = []
    addresses: list[int] = []
    for x in args:
        if isinstance(x, Channel):
            arguments.append(channel_addresses(x))
            addresses += arguments[-1][:NUM_POINTERS]
        elif isinstance(x, tuple):
            arguments.append(tuple(field.data_ptr() if hasattr(field, "data_ptr") else field for field in x))
            addresses += (field.data_ptr() for field in x if hasattr(field, "data_ptr"))
        else:
            arguments.append(x.data_ptr())
            addresses.append(arguments[-1])
    return arguments, addresses


def channel_addresses(channel: Channel) -> tuple[Any, ...]:
    """The argument of a compiled kernel for ``channel``: a tuple of addresses and constants."""
    return (*(word.data_ptr() for word in channel[:NUM_POINTERS]), *channel[NUM_POINTERS:])
