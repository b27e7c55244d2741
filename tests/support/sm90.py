"""Compile a kernel for sm_90, or another GPU, without one and look at what comes out."""

from __future__ import annotations

import functools
import os
import re
import struct
import subprocess
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from allscan.bindings.triton_compat import OPTIONS, words
from allscan.shmem_kernels.channel import Channel
from allscan.shmem_kernels.links import NONE

from .descriptors import Follower


def channel_type(recv=NONE.value, send=NONE.value, num_tiles=64, BK=4, BV=128, DEPTH=3, ADJOINT=False):
    """(type of a Channel argument, its constants by field)."""
    constants = dict(num_tiles=num_tiles, BK=BK, BV=BV, DEPTH=DEPTH, RECV=recv, SEND=send, ADJOINT=ADJOINT)
    types = {name: "constexpr" for name in constants}
    types |= {name: "*fp32" for name in ("inbox", "next_inbox", "outbox")}
    types |= {name: "*i64" for name in Channel._fields if name not in types}
    return Channel(**types), constants


def parameters_in(cubin: bytes, kernel: str) -> list[int]:
    """Bytes of each parameter, by the attributes KPARAM_INFO of an ELF file's section .nv.info.KERNEL."""
    table, size, count, names = struct.unpack_from("<Q10xHHH", cubin, 40)[:1] + struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + size * i) for i in range(count)]

    def name(section):
        start = sections[names][4] + section[0]
        return cubin[start : cubin.index(b"\0", start)].decode()

    [info] = [x for x in sections if name(x) == f".nv.info.{kernel}"]
    at, end, found = info[4], info[4] + info[5], {}
    while at < end:
        form, attribute, length = struct.unpack_from("<BBH", cubin, at)
        if form == 4:
            if attribute == 0x17:
                _, ordinal, offset, flags = struct.unpack_from("<IHHI", cubin, at + 4)
                found[ordinal] = flags >> 18
            at += length
        at += 4
    return [found[i] for i in range(len(found))]


def parameter_sizes(signature) -> list[int]:
    """Bytes of each parameter, as a graph's node gives them to a kernel of these types."""

    def none(kind):
        return [*map(none, kind)] if isinstance(kind, tuple) else 0

    return [size for _, size in words(signature, [*map(none, signature)])]


class Compiled:
    """PTX, registers and spilled bytes of one kernel."""

    def __init__(
        self, kernel, arguments: dict, constants: dict, num_warps=4, extern_libs=None, capability=90, **options
    ):
        """``arguments``: name -> Triton type, or a tuple of types as of a Channel; ``constants``: name -> value, a
        tuple's in a dict."""
        names = kernel.arg_names
        values, attributes = {}, {}
        for i, name in enumerate(names):
            kind = arguments.get(name, "constexpr")
            if isinstance(kind, tuple):
                for j, field in enumerate(kind._fields):
                    if field in constants[name]:
                        values[(i, j)] = constants[name][field]
                    else:
                        attributes[(i, j)] = [["tt.divisibility", 16]]
            elif kind == "constexpr":
                values[(i,)] = constants[name]
            elif kind.startswith("*"):
                attributes[(i,)] = [["tt.divisibility", 16]]
        signature = {name: arguments.get(name, "constexpr") for name in names}
        source = ASTSource(kernel, signature, values, attributes)
        options = OPTIONS | options | {"num_warps": num_warps}
        if extern_libs:
            options["extern_libs"] = extern_libs
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        self.ptx, self.cubin, self.shared = compiled.asm["ptx"], compiled.asm["cubin"], compiled.metadata.shared
        self.tensor_memory = getattr(compiled.metadata, "tmem_size", None) or 0  # columns, of 512
        sizes = parameter_sizes([*signature.values()])
        assert parameters_in(self.cubin, compiled.name) == sizes, f"Triton hands {compiled.name} other parameters"
        usage = self._tool("cuobjdump", "--dump-resource-usage")
        found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
        self.registers, self.spilled_bytes = int(found["REG"]), int(found["STACK"]) + int(found["LOCAL"])

    def _tool(self, name, *options):
        tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", name)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            return subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=True).stdout

    @functools.cached_property
    def instructions(self) -> list[str]:
        """Of the machine code, and labels."""
        return self._tool("nvdisasm", "-c", "--no-dataflow").splitlines()

    def lost_operands(self) -> list[tuple[str, str, str]]:
        """Products that read outside of shared memory, or it cannot be said from where; see descriptors.Follower."""
        return Follower(self.instructions, self.shared).lost

    def spilled_beside_products(self) -> list[str]:
        """Instructions within innermost loops of products that read or write spilled registers."""
        labels, loops, code = {}, [], []
        for line in self.instructions:
            if label := re.match(r"\s*(\.L_\w+):", line):
                labels[label[1]] = len(code)
            elif match := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
                back = re.search(r"\bBRA\b.*?(\.L_\w+)", match[1])
                if back and back[1] in labels:
                    loops.append(range(labels[back[1]], len(code) + 1))
                code.append(match[1])
        inner = [a for a in loops if not any(b != a and b.start >= a.start and b.stop <= a.stop for b in loops)]
        inner = [[code[i] for i in loop] for loop in inner]
        inner = [loop for loop in inner if any("GMMA" in x or "HMMA" in x for x in loop)]
        return [x for loop in inner for x in loop if re.search(r"\b(LDL|STL)\b", x)]

    def unset_registers(self) -> list:
        """Instructions before the first jump that read a uniform register which nothing has written: the ptxas of
        Triton 3.6 and 3.7 (12.8) makes such code of some products, which then read outside of the shared memory."""
        written, found = set(), []
        for line in self.instructions:
            match = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(@\S+ )?(\S+)\s*(.*?);", line)
            if not match:
                continue
            predicate, operation, operands = match.group(1), match.group(2), match.group(3).split(", ")
            if operation.startswith("BRA") and not predicate:
                break
            read = set()
            for operand in operands[1:]:
                descriptor = re.search(r"gdesc\[UR(\d+)\]", operand)  # 4 registers, of which A takes the first 2
                if descriptor:
                    first = 2 if re.fullmatch(r"R\d+", operands[1]) else 0
                    read |= {int(descriptor[1]) + i for i in range(first, 4)}
                else:
                    read |= {int(n) for n in re.findall(r"\bUR(\d+)", operand)}
            if read - written:
                found.append(line.strip())
            if target := re.fullmatch(r"UR(\d+)", operands[0]):
                written |= {int(target[1]) + i for i in range(2 if re.search("64|WIDE", operation) else 1)}
        return found

    def count(self, pattern: str) -> int:
        """How many instructions of the PTX match the regular expression."""
        return sum(
            bool(re.search(pattern, line)) for line in self.ptx.splitlines() if not line.lstrip().startswith("//")
        )
