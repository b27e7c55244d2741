"""Write the generated parts of README.md and docs/**/*.md: python docs/generate.py [--check]

A generated part lies between ``<!-- generated: NAME -->`` and ``<!-- end -->``. NAME is one of

    table X        a table, from bench/results/*.csv or tests/gpu/last_run.json: a function of tables.py
    api X [a b]    signature and docstring of the public name X, read from its source; a, b: members of a class
    program P N    the N-th block of Python in README.md or a docs page, so that its text has one source

With --check nothing is written; the exit status is 1 if a page differs from its sources. Needs griffe, but no GPU,
torch or Triton: sources are parsed, not imported.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import tables
from api_reference import api

ROOT = Path(__file__).resolve().parent.parent
PART = re.compile(r"(<!-- generated: (\w+) ([^\n]*?) -->\n).*?(<!-- end -->)", re.DOTALL)
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def program(page: str, number: str) -> str:
    """Return a block of Python from another page."""
    return f"\n```python\n{PYTHON.findall((ROOT / page).read_text(encoding='utf-8'))[int(number) - 1]}```\n\n"


def generate(text: str) -> str:
    """Return the page with its generated parts up to date."""

    def part(match: re.Match[str]) -> str:
        begin, kind, arguments, end = match.groups()
        makers = {"api": api, "program": program, "table": lambda name: f"\n{getattr(tables, name)()}\n"}
        return begin + makers[kind](*arguments.split()) + end

    return PART.sub(part, text)


def main() -> int:
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        made = generate(text)
        if made != text:
            stale.append(path.relative_to(ROOT).as_posix())
            if "--check" not in sys.argv:
                path.write_text(made, encoding="utf-8")
    told = "differ from their sources, run python docs/generate.py" if "--check" in sys.argv else "written"
    print(f"{', '.join(stale) or 'no page'}: {told}" if stale else "all pages are those of their sources")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
