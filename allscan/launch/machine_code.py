"""Kernels whose machine code is not what they say, and how they are compiled instead.

The ptxas of Triton 3.6 and 3.7 (12.8) makes such code of some matrix products for Hopper: the descriptors of their
operands are in uniform registers that nothing has written, so they read anywhere in shared memory, or outside of it.
Which products those are, differs with each constant of a kernel (widths, heads) and with how its loops are pipelined.
So a kernel for Hopper with products is disassembled when it is first compiled on a machine, before its first launch,
and is compiled with other ``num_stages`` where its code is wrong; these change no result otherwise.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import triton
from torch import Tensor
from triton import JITFunction

from ..bindings.triton_compat import get_cache_manager

WRONG = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)  # whose ptxas is 13.4
TOOLS = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
STAGES = 2, 3, 1, 4
SHARED_MEMORY = 227 << 10  # of a program on Hopper
MOST = 4096  # launches of which this process remembers that their code is right
_right: dict[object, dict[str, Any]] = {}  # options by kernel, what it is given, and options
INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(@\S+ )?(\S+)\s*(.*?);")


def unset_registers(lines: Iterable[str]) -> list[str]:
    """Instructions before the first jump that read a uniform register which nothing has written. ``lines``: as of
    ``nvdisasm -c``."""
    written: set[int] = set()
    found = []
    for line in lines:
        match = INSTRUCTION.match(line)
        if not match:
            continue
        predicate, operation, operands = match[1], match[2], match[3].split(", ")
        if operation.startswith("BRA") and not predicate:
            break
        read = set()
        for operand in operands[1:]:
            if descriptor := re.search(r"gdesc\[UR(\d+)\]", operand):  # 4 registers, of which A takes the first 2
                first = 2 if re.fullmatch(r"R\d+", operands[1]) else 0
                read |= {int(descriptor[1]) + i for i in range(first, 4)}
            else:
                read |= {int(n) for n in re.findall(r"\bUR(\d+)", operand)}
        if read - written:
            found.append(line.strip())
        if target := re.fullmatch(r"UR(\d+)", operands[0]):
            written |= {int(target[1]) + i for i in range(2 if re.search("64|WIDE", operation) else 1)}
    return found


def disassembled(cubin: bytes) -> list[str]:
    """Raises OSError where Triton came without nvdisasm, CalledProcessError where that does not know the code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [os.path.join(TOOLS, "nvdisasm"), "-c", "--no-dataflow", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def reads_unset_registers(compiled: Any) -> bool:
    """Of a compiled kernel; looked at once a machine, by Triton's cache. False where it cannot be said."""
    if "wgmma.mma_async" not in compiled.asm.get("ptx", ""):
        return False
    cubin = compiled.asm["cubin"]
    cache = get_cache_manager(hashlib.sha256(cubin + b"unset registers").hexdigest())
    if (known := cache.get_file("unset")) is not None:
        with open(known) as file:
            return file.read() == "1"
    try:
        found = bool(unset_registers(disassembled(cubin)))
    except (OSError, subprocess.CalledProcessError):
        return False
    with contextlib.suppress(OSError):  # a cache that is read only
        cache.put(str(int(found)), "unset", binary=False)
    return found


def options_of_right_code(
    kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], named: Mapping[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """``options``, or those with other ``num_stages`` whose code is right; compiles, launches nothing.

    Raises:
        RuntimeError: if there are none.
    """
    if not WRONG or not isinstance(kernel, JITFunction):
        return options
    tensors = [x for x in (*arguments, *named.values()) if isinstance(x, Tensor)]
    kinds = tuple((x.dtype, x.data_ptr() & 15) for x in tensors)  # Triton compiles for each
    key = kernel, kinds, tuple(options.items())
    if key in _right:
        return _right[key]
    given = options.get("num_stages")
    for stages in (given, *(n for n in STAGES if n != given)):
        tried = options if stages == given else options | dict(num_stages=stages)
        compiled = kernel.warmup(*arguments, grid=grid, **named, **tried)
        fits = stages == given or compiled.metadata.shared <= SHARED_MEMORY
        if fits and not reads_unset_registers(compiled):
            if len(_right) >= MOST:
                _right.clear()
            _right[key] = tried
            return tried
    raise RuntimeError(
        f"the ptxas of Triton {triton.__version__} makes wrong code of {kernel.__name__} with {options}: set "
        "TRITON_PTXAS_PATH to that of CUDA 13.1 or later, or take Triton 3.9"
    )
