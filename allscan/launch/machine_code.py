"""Workaround for wrong machine code of ptxas: detects it and compiles the kernel with other options.

The ptxas of Triton 3.6 and 3.7 (12.8) generates wrong code for some matrix products on Hopper: their operand
descriptors are in uniform registers that no instruction has written, so the products read from any address inside or
outside of shared memory. Which products are affected depends on each constant of a kernel (widths, heads) and on the
pipelining of its loops. So a Hopper kernel with matrix products is disassembled at its first compilation on a machine,
before its first launch. If its code is wrong, it is compiled with another ``num_stages``. This changes no result, as
long as no loop of such a kernel loads what an earlier iteration stored: pipelined loads are issued iterations ahead.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import triton
from torch import Tensor
from triton import JITFunction

from ..bindings.triton_compat import get_cache_manager

WRONG = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)  # Triton 3.9 has ptxas 13.4
TOOLS = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
STAGES = 2, 3, 1, 4
SHARED_MEMORY = 227 << 10  # bytes, maximum of a program on Hopper
MOST = 4096  # maximum number of entries of _right
_right: dict[object, dict[str, Any]] = {}  # options with right code, by kernel, arguments and requested options
LABEL = re.compile(r"\s*(\.L_\w+):")
INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(@\S+ )?(\S+)\s*(.*?);")
PREDICATE = re.compile(r"!?U?P[0-6]$")


def _registers(operation: str, operands: Sequence[str]) -> tuple[int, int]:
    """(bit mask of the uniform registers that an instruction reads, bit mask of those that it writes)."""
    read = written = 0
    for operand in operands[1:]:
        if descriptor := re.search(r"gdesc\[UR(\d+)\]", operand):  # 4 registers; operand A uses the first 2
            first = 2 if re.fullmatch(r"R\d+", operands[1]) else 0
            read |= sum(1 << int(descriptor[1]) + i for i in range(first, 4))
        else:
            read |= sum(1 << int(n) for n in {*re.findall(r"\bUR(\d+)", operand)})
    if operation.startswith("R2UR"):  # its first operand may be a predicate
        return 0, sum(1 << int(n) for operand in operands for n in re.findall(r"\bUR(\d+)", operand))
    if target := re.fullmatch(r"UR(\d+)", operands[0]):
        written = (3 if re.search(r"\.64\b|WIDE", operation) else 1) << int(target[1])
    return read, written


def unset_registers(lines: Iterable[str]) -> list[str]:
    """Instructions that read a uniform register that no instruction has written on any path from the beginning.
    ``lines``: output of ``nvdisasm -c``."""
    code: list[tuple[str, bool, str, list[str]]] = []  # line, whether predicated, operation, operands
    labels: dict[str, int] = {}
    for line in lines:
        if label := LABEL.match(line):
            labels[label[1]] = len(code)
        elif match := INSTRUCTION.match(line):
            code.append((line.strip(), bool(match[1]), match[2], match[3].split(", ")))
    registers = [_registers(operation, operands) for _, _, operation, operands in code]
    before: list[int | None] = [None] * len(code)  # by instruction: registers that may be written before it
    ways = [(0, 0)]
    while ways:
        at, written = ways.pop()
        while at < len(code):
            known = before[at]
            if known is not None and known | written == known:
                break
            written |= known or 0
            before[at] = written
            written |= registers[at][1]
            _, perhaps, operation, operands = code[at]
            at += 1
            if operation.startswith("BRA"):
                target = re.search(r"\.L_\w+", operands[-1])
                if target and target[0] in labels:
                    ways.append((labels[target[0]], written))
                perhaps = perhaps or any(PREDICATE.match(x) for x in operands) or "DIV" in operation
                if not perhaps:
                    break
            elif operation.startswith("EXIT") and not perhaps:
                break
    return [
        line
        for (line, *_), (read, _), written in zip(code, registers, before, strict=True)
        if written is not None and read & ~written
    ]


def tool(name: str, cubin: bytes, *options: str) -> str:
    """Output of CUDA's "nvdisasm" or "cuobjdump" for machine code. Raises OSError if Triton was installed without the
    tool, CalledProcessError if the tool does not support the code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [os.path.join(TOOLS, name), *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def disassembled(cubin: bytes) -> list[str]:
    """Lines of the disassembly: instructions and labels. Raises the errors of ``tool``."""
    return tool("nvdisasm", cubin, "-c", "--no-dataflow").splitlines()


def reads_unset_registers(compiled: Any) -> bool:
    """Whether a compiled kernel reads uniform registers that were not written; False, with a warning, if this is
    unknown. Triton's cache stores the result, so each kernel is disassembled once per machine."""
    if "wgmma.mma_async" not in compiled.asm.get("ptx", ""):
        return False
    cubin = compiled.asm["cubin"]
    try:
        cache = get_cache_manager(hashlib.sha256(cubin + b"unset registers").hexdigest())
        if (known := cache.get_file("unset")) is not None:
            with open(known) as file:
                return file.read() == "1"
    except OSError:  # the cache is read-only
        cache = None
    try:
        found = bool(unset_registers(disassembled(cubin)))
    except (OSError, subprocess.CalledProcessError) as error:
        warnings.warn(f"kernels are not checked for wrong code of ptxas: {type(error).__name__}: {error}", stacklevel=2)
        return False
    with contextlib.suppress(OSError):
        if cache is not None:
            cache.put(str(int(found)), "unset", binary=False)
    return found


def _kind(x: Any) -> object:
    """Properties of an argument that Triton specializes on: dtype and alignment of a tensor, and of each tensor of a
    channel; the value of a constant."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() & 15
    return tuple(_kind(field) for field in x) if isinstance(x, tuple) else getattr(x, "value", x)


def options_of_right_code(
    kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], named: Mapping[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """``options``, with another ``num_stages`` if their machine code is wrong. Compiles the kernel, launches nothing.

    Raises:
        RuntimeError: if the code is wrong with every ``num_stages``.
    """
    if not WRONG or not isinstance(kernel, JITFunction):
        return options
    key = kernel, _kind((*arguments, *named.values())), tuple(options.items())
    if key in _right:
        return _right[key]
    requested = options.get("num_stages")
    for stages in (requested, *(n for n in STAGES if n != requested)):
        tried = options if stages == requested else options | dict(num_stages=stages)
        compiled = kernel.warmup(*arguments, grid=grid, **named, **tried)
        fits = stages == requested or compiled.metadata.shared <= SHARED_MEMORY
        if fits and not reads_unset_registers(compiled):
            if len(_right) >= MOST:
                _right.clear()
            _right[key] = tried
            return tried
    raise RuntimeError(
        f"ptxas of Triton {triton.__version__} miscompiles {kernel.__name__} with {options}: set "
        "TRITON_PTXAS_PATH to ptxas of CUDA 13.1 or later, or use Triton 3.9"
    )
