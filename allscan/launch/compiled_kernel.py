"""How kernels are launched: what is the same at every call is worked out once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
import triton
from torch import Tensor

from ..bindings import nvshmem_module
from ..bindings.cuda_driver import KernelNode, parameter_sizes, set_shared_memory_carveout
from ..bindings.torch_compat import current_stream_of
from ..bindings.triton_compat import OPTIONS, kernel_node, launchable, launcher
from ..shmem_kernels.channel import Channel
from .machine_code import options_of_right_code

P = ParamSpec("P")
R = TypeVar("R")


def dynamo_disabled(function: Callable[P, R]) -> Callable[P, R]:
    """torch.compiler.disable: what ``function`` asks of other ranks, and launches, is not for torch to trace. But where
    nobody compiles it does not import the compiler, which takes a second, and costs next to nothing."""
    disabled: Callable[P, R] | None = None

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
    """The kernel linked with NVSHMEM's device library."""
    return nvshmem_module.Kernel(kernel)


_preferring: set[object] = set()  # compiled kernels; they are held, or a number could be another function's


def prefer_shared_memory_carveout(compiled: Any) -> None:
    """From the next launch on, give the multiprocessors where this kernel waits all the shared memory there is.

    A multiprocessor divides its memory into cache and shared memory for the first program on it, and holds to that
    until it is empty: programs that wait would keep away the kernels that are to be overlapped with them.

    compiled: as Triton returns it from a launch. Raises RuntimeError for a CUDA error.
    """
    if compiled not in _preferring:
        set_shared_memory_carveout(compiled.function, 100)
        _preferring.add(compiled)


NUM_POINTERS = Channel._fields.index("num_tiles")  # fields of a channel that are addresses; the others are constants


class Launch:
    """A kernel, its grid, and those of its arguments that are the same at every call; called with the others.

        keys = Launch(keys_kernel, (chunks, H), first=0, H=H, K=K, BT=64, BR=4, BK=128, RANGE=115.0, num_warps=1)
        keys(k, g, table, k_out, gate, strong)

    The first call goes through Triton, which compiles the kernel for what it is given. Later ones hand the addresses to
    the compiled kernel: 5 us where Triton, which looks at every argument again, takes 16. So calls differ in addresses
    only, not in dtypes; addresses that are no multiples of 16 bytes, for which Triton compiles another kernel, launch
    hooks (profilers such as Proton) and the interpreter go through Triton at each call.

    kernel: a triton.jit function, or one of ``with_nvshmem``.
    fixed: all parameters of the kernel but tensors and channels, which a call gives in their order: numbers, constants,
        None; and launch options (num_warps, num_stages), besides those of ``OPTIONS``.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], **fixed: Any) -> None:
        self.kernel, self.grid, self.fixed = kernel, grid, OPTIONS | fixed
        self._names: Sequence[str] = kernel.arg_names
        self._arguments = [i for i, name in enumerate(self._names) if name not in fixed]  # places of a call's arguments
        self._first = self._arguments == list(range(len(self._arguments)))  # these are the first ones
        self.ready = False  # whether there is a compiled kernel, which ``at`` launches with addresses for tensors and
        self.at: Callable[[Sequence[Any]], Any] = _not_compiled  # tuples of addresses and constants for channels
        self._compiled: Any = None
        self._sizes: list[int] | None = None  # bytes of the compiled kernel's parameters

    def __call__(self, *args: Tensor | Channel) -> Any:
        """Launch on the current stream. Returns what Triton does: the compiled kernel, None in the interpreter."""
        if self.ready:
            arguments, addresses = _addresses(args)
            if self.takes(addresses):
                return self.at(arguments)
        named = {} if self._first else {self._names[i]: x for i, x in zip(self._arguments, args, strict=True)}
        args_in_order = args if self._first else ()
        options = options_of_right_code(self.kernel, self.grid, args_in_order, named, self.fixed)
        compiled = self.kernel[self.grid](*args_in_order, **named, **options)
        if not self.ready and hasattr(compiled, "run") and aligned(_addresses(args)[1]):
            self._keep(compiled)
        return compiled

    def takes(self, addresses: Sequence[int]) -> bool:
        """Whether ``at`` may be called now, with these addresses."""
        return self.ready and launchable(addresses)

    def node(self, addresses: Sequence[Any]) -> KernelNode:
        """What ``at`` launches, as a node of a CUDA graph. Raises NotImplementedError where it cannot be one, and where
        this Triton hands its kernels other parameters than those that we know of."""
        arguments = [self.fixed.get(name) for name in self._names]
        for place, address in zip(self._arguments, addresses, strict=True):
            arguments[place] = address
        node = kernel_node(self._compiled, (*self.grid, 1, 1)[:3], arguments)  # type: ignore[arg-type]
        if self._sizes is None:
            self._sizes = parameter_sizes(node.function)
        if self._sizes != [size for _, size in node.arguments]:
            raise NotImplementedError(f"Triton {triton.__version__} hands its kernels other parameters: {self._sizes}")
        return node

    def _keep(self, compiled: Any) -> None:
        """For ``at``, a kernel that was compiled for addresses that are multiples of 16 bytes."""
        arguments = [self.fixed.get(name) for name in self._names]
        grid, device = (*self.grid, 1, 1)[:3], torch.cuda.current_device()
        self.at = launcher(compiled, grid, arguments, self._arguments, current_stream_of, device)  # type: ignore[arg-type]
        self.ready, self._compiled = True, compiled


def _not_compiled(addresses: Sequence[Any]) -> NoReturn:
    raise RuntimeError("this kernel was not compiled yet")


def _addresses(args: tuple[Any, ...]) -> tuple[list[Any], list[int]]:
    """(what the compiled kernel takes in place of ``args``, all addresses in it)."""
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
    """What a compiled kernel takes in place of ``channel``."""
    return (*(word.data_ptr() for word in channel[:NUM_POINTERS]), *channel[NUM_POINTERS:])


def aligned(addresses: Sequence[int]) -> bool:
    """Whether they are multiples of 16, as compiled kernels take them."""
    bits = 0
    for address in addresses:  # half the time of functools.reduce
        bits |= address
    return not bits & 15
