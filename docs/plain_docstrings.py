"""Griffe extension: the plain-text docstrings of allscan as Markdown.

The docstrings are written to be read as they are: laws and examples indented by four spaces, lists of the form
``name: meaning`` with continuation lines indented, ``Returns`` and ``Raises`` as sentences. Markdown would run the
lines of such a list together, so each becomes a list item here; roles such as :func: become code.
"""

from __future__ import annotations

import re

import griffe

ROLE = re.compile(r":(?:func|class|meth|mod|attr):`~?([^`]+)`")
ITEM = re.compile(r"^(\*{0,2}[A-Za-z_]\w*(?:, \*{0,2}[A-Za-z_]\w*)*): (?=\S)")
COLUMN = re.compile(r"^((?:``[^`]+``(?:, )?)+)\s{2,}(?=\S)")
SECTION = re.compile(r"^(Returns|Raises|Attributes|Source|Reference|Collective|Yields)\b")


def escaped(line: str) -> str:
    """A line of prose in which products and numbers are not taken for emphasis and lists."""
    return re.sub(r"^(\s*\d+)\. ", r"\1\\. ", re.sub(r"(?<=\w)\*(?=\w)", r"\\*", line))


def markdown(text: str) -> str:
    """``text``, a docstring without its common indentation, as Markdown."""
    out, block = [], "text"  # block: what the line before belongs to: "text", "item" or "code"
    lines = ROLE.sub(r"`\1`", text).split("\n")
    for i, line in enumerate(lines):
        blank_before = i == 0 or not lines[i - 1].strip()
        item, column = ITEM.match(line), COLUMN.match(line)
        if not line.strip():
            out.append("")
        elif line.startswith("    ") and (block == "code" or blank_before and block != "item"):
            if block != "code":
                out += ["", "```python" if line.lstrip().startswith(">>>") else "```text"]
            block = "code"
            out.append(line[4:])
            continue
        elif line.startswith(" ") and block == "item":
            if blank_before and line.lstrip().startswith(">>>"):
                out += ["```python", line[4:]]
                block = "code"
                continue
            out.append("  " + escaped(line.strip()))
            continue
        if block == "code" and line.strip():
            while out and not out[-1]:
                out.pop()
            out += ["```", ""]
            block = "text"
        if not line.strip():
            continue
        if (item and not SECTION.match(line)) and _is_list(lines, i, item):
            names = ", ".join(f"`{name}`" for name in item[1].split(", "))
            out += ["" if block != "item" else None, f"- {names}: {escaped(line[item.end() :])}"]
            block = "item"
        elif column:
            out += ["" if block != "item" else None, f"- {column[1].strip()}: {escaped(line[column.end() :])}"]
            block = "item"
        elif SECTION.match(line):
            word = SECTION.match(line)[1]
            out += ["", f"**{word}**{line[len(word) :]}"]
            block = "text"
        else:
            if block == "item":
                out.append("")
            out.append(escaped(line.rstrip()))
            block = "text"
    if block == "code":
        while out and not out[-1]:
            out.pop()
        out.append("```")
    return "\n".join(line for line in out if line is not None)


def _is_list(lines, i, item) -> bool:
    """Whether the line begins an entry of a list: it stands alone in lower case, not in the middle of a sentence."""
    if i == 0:
        return False
    before = lines[i - 1]
    return not before.strip() or before.startswith(" ") or bool(ITEM.match(before)) or before.rstrip()[-1] in ".:;)"


class PlainDocstrings(griffe.Extension):
    """Rewrites every docstring that belongs to allscan."""

    def on_instance(self, *, node, obj, agent, **kwargs) -> None:
        if obj.docstring is not None and obj.path.split(".")[0] == "allscan":
            obj.docstring.value = markdown(obj.docstring.value)
