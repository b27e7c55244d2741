"""Compiles a kernel without a GPU, and reports its registers, spills, PTX and machine code.

    from allscan.tools.compiled import Compiled, channel_type

    channel, fixed = channel_type(BK=128, BV=32)
    found = Compiled(my_kernel, {"p_x": "*fp32", "channel": channel, "T": "i32"}, {"channel": fixed}, num_warps=8)
    print(found.registers, found.spilled_bytes)

It takes any kernel, with or without a channel. TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import triton

from ..bindings.triton_compat import OPTIONS, ASTSource, GPUTarget
from ..launch.machine_code import disassembled, tool
from ..shmem_kernels.channel import Channel
from ..shmem_kernels.links import SENTINEL


def channel_type(
    recv: int = SENTINEL.value,
    send: int = SENTINEL.value,
    num_tiles: int = 64,
    BK: int = 4,
    BV: int = 128,
    DEPTH: int = 3,
    ADJOINT: bool = False,
) -> tuple[Channel, dict[str, int]]:
    """The Channel argument of a kernel that ``Compiled`` compiles.

    Args:
        recv, send: links; the default is a rank with two mapped neighbours. For put links ``Compiled`` needs NVSHMEM's
            library as ``extern_libs``.
        num_tiles, BK, BV, DEPTH, ADJOINT: the fields of ``allscan.device.Channel``: number of tiles, rows and columns
            of a tile, slots of a tile, whether the launch is of a backward pass.

    Returns:
        (the type of the argument, its constants by field).

    Raises:
        Nothing: the kernel's compilation rejects sizes that are no powers of two.

    Example:
        >>> channel, fixed = channel_type(BK=128, BV=32)
    """
    constants = dict(num_tiles=num_tiles, BK=BK, BV=BV, DEPTH=DEPTH, RECV=recv, SEND=send, ADJOINT=ADJOINT)
    types = {name: "constexpr" for name in constants}
    types |= {name: "*fp32" for name in ("inbox", "next_inbox", "outbox")}
    types |= {name: "*i64" for name in Channel._fields if name not in types}
    return Channel(**types), constants


class Compiled:
    """A kernel that is compiled for a GPU, without that GPU.

    Attributes: ``registers`` per thread, ``spilled_bytes`` per thread, ``shared`` memory per block in bytes,
    ``tensor_memory`` (columns, of 512), ``ptx``, ``cubin``, ``instructions``.

    Args:
        kernel: a ``triton.jit`` function.
        arguments: name -> Triton type ("*fp32", "i32", "fp32"), or a named tuple of types, e.g. for a Channel.
        constants: name -> value of each other argument; a dict for a tuple.
        capability: the GPU's compute capability: 90 for H100 and H200, 80 for A100.
        **options: Triton's launch options: num_warps, 4 by default; num_stages, extern_libs ...

    Raises:
        TypeError: if ``kernel`` is no ``triton.jit`` function, also where TRITON_INTERPRET is set.
        ValueError: if an argument of the kernel is missing; unknown arguments are ignored.
        triton.CompilationError: if Triton rejects the kernel.

    Example:
        >>> found = Compiled(my_kernel, {"p_x": "*fp32", "channel": channel}, {"channel": fixed}, num_warps=8)
        >>> print(found.registers, found.spilled_bytes)
    """

    def __init__(
        self, kernel: Any, arguments: dict[str, Any], constants: dict[str, Any], capability: int = 90, **options: Any
    ) -> None:
        if not isinstance(kernel, triton.JITFunction):
            raise TypeError(
                f"kernel must be a triton.jit function, with TRITON_INTERPRET unset, got {type(kernel).__name__}"
            )
        names = kernel.arg_names
        tuples = {name for name, kind in arguments.items() if hasattr(kind, "_fields")}
        if {*names} - {*arguments, *constants} or tuples - {*constants}:
            raise ValueError(f"the kernel's arguments are {names}, got {[*arguments]} and constants {[*constants]}")
        values: dict[tuple[int, ...], object] = {}
        attributes: dict[tuple[int, ...], list[list[object]]] = {}
        for i, name in enumerate(names):
            kind = arguments.get(name, "constexpr")
            if hasattr(kind, "_fields"):
                for j, field in enumerate(kind._fields):
                    if field in constants[name]:
                        values[(i, j)] = constants[name][field]
                    else:
                        attributes[(i, j)] = [["tt.divisibility", 16]]
            elif kind == "constexpr":
                values[(i,)] = constants[name]
            elif kind.startswith("*"):
                attributes[(i,)] = [["tt.divisibility", 16]]
        self.signature = {name: arguments.get(name, "constexpr") for name in names}
        source = ASTSource(kernel, self.signature, values, attributes)
        options = {"num_warps": 4} | OPTIONS | {name: value for name, value in options.items() if value is not None}
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        self.name, self.shared = compiled.name, compiled.metadata.shared
        self.ptx, self.cubin = compiled.asm["ptx"], compiled.asm["cubin"]
        self.tensor_memory = getattr(compiled.metadata, "tmem_size", None) or 0
        usage = tool("cuobjdump", self.cubin, "--dump-resource-usage")
        found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
        self.registers, self.spilled_bytes = int(found["REG"]), int(found["STACK"]) + int(found["LOCAL"])

    @functools.cached_property
    def instructions(self) -> list[str]:
        """The instructions and labels of the machine code."""
        return disassembled(self.cubin)

    def count(self, pattern: str) -> int:
        """Count instructions of the PTX.

        Args:
            pattern: a regular expression.

        Returns:
            The number of lines of the PTX that match it, without comments.

        Raises:
            re.error: for a wrong expression.

        Example:
            >>> found.count("bar.sync")
        """
        lines = [line for line in self.ptx.splitlines() if not line.lstrip().startswith("//")]
        return sum(bool(re.search(pattern, line)) for line in lines)
