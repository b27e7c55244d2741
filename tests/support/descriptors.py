"""Finds the operand addresses of wgmma: traces integer registers in a kernel's machine code (sm_90, from nvdisasm).

The ptxas of Triton 3.6 and 3.7 (12.8) computes some descriptors from a register that is not set, or overwritten: seen
where operands with rows of 64 bytes (32 columns of bfloat16) and of 128 bytes are at one place in shared memory, at
different times. They read outside of shared memory, or wrong numbers. This module executes a kernel
symbolically for one thread without data: an integer is known if it derives from constants, the start of shared memory
and the thread's number. Loops run three times, forward branches are not taken.
"""

from __future__ import annotations

import re
from typing import NamedTuple

WORD = 0xFFFFFFFF
BEGIN = 0x400  # start of a program's shared memory
INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?(\S+)\s*(.*?)\s*;")
PREDICATE, REGISTER = re.compile(r"U?P\d|U?PT"), re.compile(r"(U?R)(\d+)")


class Line(NamedTuple):
    address: str
    predicate: str | None
    operation: str
    operands: list[str]


class Follower:
    """Traces one kernel. known: number of wgmma operands in shared memory; lost: operands outside of it, or with
    unknown address (in a pipelined loop the address depends on the iteration)."""

    def __init__(self, lines: list[str], shared: int, thread: int = 0) -> None:
        self.code: list[Line] = []
        self.thread = thread
        self.labels: dict[str, int] = {}
        self.shared, self.known = shared, 0
        self.lost: list[tuple[str, str, str]] = []
        self.registers: dict[str, int | None] = {}
        self.predicates: dict[str, bool | None] = {}
        self.local: dict[int, int | None] = {}
        for line in lines:
            if label := re.match(r"\s*(\.L_\w+):", line):
                self.labels[label[1]] = len(self.code)
            elif found := INSTRUCTION.match(line):
                operands = [x.strip().replace(".reuse", "") for x in found[4].split(",")] if found[4] else []
                self.code.append(Line(found[1], found[2], found[3], operands))
        self._run()

    def _run(self) -> None:
        at, back = 0, dict.fromkeys(range(len(self.code)), 0)
        while at < len(self.code):
            line, here = self.code[at], at
            at += 1
            kind = line.operation.split(".")[0]
            if kind == "BRA":
                target = self.labels.get(re.search(r"\.L_\w+|$", " ".join(line.operands))[0], len(self.code))
                always = line.predicate is None and not any(PREDICATE.match(x.lstrip("!")) for x in line.operands)
                if target <= here and back[here] < 2:
                    back[here] += 1
                    at = target
                elif target > here and always:
                    at = target
            elif kind == "EXIT" and line.predicate is None:
                return
            elif kind == "HGMMA":
                self._product(line)
            elif kind not in ("BAR", "BSSY", "BSYNC", "DEPBAR", "NOP", "RED", "ST", "STG", "STS", "WARPGROUP", "EXIT"):
                self._step(line, kind)

    def _product(self, line: Line) -> None:
        first = int(re.search(r"gdesc\[UR(\d+)\]", " ".join(line.operands))[1])
        from_registers = re.fullmatch(r"R\d+", line.operands[1])
        for name, number in [("A", first), ("B", first + 2)][1 if from_registers else 0 :]:
            low, high = (self.registers.get(f"UR{number + i}") for i in range(2))
            inside = low is not None and BEGIN <= (low & 0x3FFF) << 4 < BEGIN + self.shared
            if inside and high is not None and high >> 30:
                self.known += 1
            else:
                self.lost.append((line.address, line.operation, name))
        self._forget(line.operands[0], int(re.search(r"64x(\d+)x", line.operation)[1]) // 2)

    def _step(self, line: Line, kind: str) -> None:
        operation, x = line.operation, line.operands
        carries = [i for i, name in enumerate(x) if PREDICATE.fullmatch(name.lstrip("!"))]
        values = [self._value(name) for i, name in enumerate(x) if i and i not in carries]
        known = None not in values
        if kind == "STL":
            for i in range(self._width(operation)):
                self.local[self._place(x[0]) + 4 * i] = self.registers.get(self._next(x[1], i), 0)
        elif kind == "LDL":
            for i in range(self._width(operation)):
                self._set(line, self._next(x[0], i), self.local.get(self._place(x[1]) + 4 * i))
        elif kind in ("MOV", "UMOV", "R2UR"):
            self._set(line, x[0], values[-1] if kind == "R2UR" else values[0])
        elif kind == "CS2R":
            for i in range(2):
                self._set(line, self._next(x[0], i), 0 if x[1] == "SRZ" else None)
        elif kind in ("S2R", "S2UR"):
            self._set(line, x[0], 0 if "CgaCtaId" in x[1] else self.thread if x[1] == "SR_TID.X" else None)
        elif operation == "UIADD3.64":
            total = self._pair(x[1]), self._pair(x[2]), self._pair(x[3])
            whole = None if None in total else sum(total)
            for i in range(2):
                self._set(line, self._next(x[0], i), None if whole is None else whole >> 32 * i)
        elif kind in ("IADD3", "UIADD3", "VIADD"):
            adds = [self._predicate(x[i]) for i in carries if i > 2] if ".X" in operation else []
            total = sum(values) + sum(adds) if known and None not in adds else None
            for i in carries:
                if i < 3:
                    self.predicates[x[i]] = None if total is None else bool(total >> 32)
            self._set(line, x[0], total)
        elif operation in ("IMAD", "UIMAD", "IMAD.IADD", "IMAD.MOV.U32", "IMAD.SHL.U32", "IMAD.U32"):
            self._set(line, x[0], values[0] * values[1] + values[2] if known else None)
        elif operation in ("SHF.R.U32.HI", "USHF.R.U32.HI"):
            self._set(line, x[0], values[2] >> values[1] if known and values[0] == 0 else None)
        elif operation in ("SHF.L.U32", "USHF.L.U32"):
            self._set(line, x[0], values[0] << values[1] if known else None)
        elif operation in ("SGXT.U32", "USGXT.U32"):
            self._set(line, x[0], values[0] & (1 << values[1]) - 1 if known else None)
        elif operation in ("LEA", "ULEA") and not carries:
            self._set(line, x[0], (values[0] << values[2]) + values[1] if known else None)
        elif operation in ("LEA.HI", "ULEA.HI") and not carries:
            self._set(line, x[0], ((values[2] << 32 | values[0]) << values[3] >> 32) + values[1] if known else None)
        elif operation in ("LOP3.LUT", "ULOP3.LUT") and REGISTER.fullmatch(x[0]):
            self._set(line, x[0], _by_table(*values[:4]) if None not in values[:4] else None)
        else:
            self._forget(x[0] if x else "", self._width(operation))
            for i in carries:
                self.predicates[x[i]] = None

    def _set(self, line: Line, name: str, value: int | None) -> None:
        value = None if value is None else value & WORD
        taken = True if line.predicate is None else self._predicate(line.predicate)
        if taken is False or name in ("RZ", "URZ"):
            return
        same = taken or self.registers.get(name) == value
        self.registers[name] = value if same else None

    def _forget(self, name: str, count: int) -> None:
        for i in range(count if REGISTER.fullmatch(name) else 0):
            self.registers[self._next(name, i)] = None

    def _value(self, name: str) -> int | None:
        sign, name = (name[0], name[1:]) if name[0] in "-~" else ("", name)
        value = 0 if name in ("RZ", "URZ") else self.registers.get(name)
        if re.fullmatch(r"0x[0-9a-f]+", name):
            value = int(name, 16)
        if value is None:
            return None
        return (-value if sign == "-" else ~value if sign else value) & WORD

    def _pair(self, name: str) -> int | None:
        sign, name = (-1, name[1:]) if name[0] == "-" else (1, name)
        if not REGISTER.fullmatch(name):
            return sign * int(name.replace("URZ", "0x0"), 16)
        low, high = self._value(name), self._value(self._next(name, 1))
        return None if low is None or high is None else sign * (low | high << 32)

    def _predicate(self, name: str) -> bool | None:
        value = True if name.lstrip("!") in ("PT", "UPT") else self.predicates.get(name.lstrip("!"))
        return None if value is None else value != name.startswith("!")

    @staticmethod
    def _next(name: str, i: int) -> str:
        found = REGISTER.fullmatch(name)
        return f"{found[1]}{int(found[2]) + i}" if found else name

    @staticmethod
    def _width(operation: str) -> int:
        """Return the number of registers that an operation writes."""
        if ".128" in operation or operation.startswith("LDSM"):
            return 4
        return 2 if re.search("64|WIDE", operation) and "SHF" not in operation else 1

    @staticmethod
    def _place(name: str) -> int:
        """Return the stack place of a spilled register."""
        found = re.fullmatch(r"\[R1(?:\+(0x[0-9a-f]+))?\]", name)
        return int(found[1] or "0", 16) if found else -(1 << 30)


def _by_table(a: int, b: int, c: int, table: int) -> int:
    """Combine a, b, c bitwise: three bits are an index into ``table`` (LOP3)."""
    found = 0
    for i in range(8):
        if table >> i & 1:
            found |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return found & WORD
