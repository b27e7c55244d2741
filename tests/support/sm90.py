"""Compiles a kernel for sm_90 or another GPU, without one, and inspects the result."""

from __future__ import annotations

import re
import struct

from allscan.bindings.triton_compat import words
from allscan.launch.machine_code import unset_registers
from allscan.tools import compiled

from .descriptors import Follower


def parameters_in(cubin: bytes, kernel: str) -> list[int]:
    """Return the bytes of each parameter, from the KPARAM_INFO attributes in an ELF file's section .nv.info.KERNEL."""
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
    """Return the bytes of each parameter in a graph's node, for a kernel with arguments of these types."""

    def none(kind):
        return [*map(none, kind)] if isinstance(kind, tuple) else 0

    return [size for _, size in words(signature, [*map(none, signature)])]


class Compiled(compiled.Compiled):
    """A compiled kernel with checks of its parameters in a graph's node, and of its machine code."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        sizes = parameter_sizes([*self.signature.values()])
        assert parameters_in(self.cubin, self.name) == sizes, f"Triton hands {self.name} other parameters"

    def lost_operands(self) -> list[tuple[str, str, str]]:
        """Return products with operands outside of shared memory or at unknown addresses, for each of up to two groups
        of 4 warps; see descriptors.Follower."""
        return [lost for first in (0, 128) for lost in Follower(self.instructions, self.shared, first).lost]

    def spilled_beside_products(self) -> list[str]:
        """Return instructions that access spilled registers in innermost loops with products."""
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
        """Return reads of registers that are not set; see machine_code."""
        return unset_registers(self.instructions) if "wgmma.mma" in self.ptx else []
