"""Compiles a kernel for sm_90 or another GPU, without one, and inspects the result."""

from __future__ import annotations

import re

from allscan.launch.machine_code import unset_registers
from allscan.tools import compiled

from .descriptors import Follower


class Compiled(compiled.Compiled):
    """A compiled kernel with checks of its machine code."""

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
