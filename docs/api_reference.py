"""Signatures and docstrings of public names in Markdown. Sources are parsed by griffe, not imported."""

from __future__ import annotations

import functools
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@functools.cache
def _package():
    import griffe

    loader = griffe.GriffeLoader(search_paths=[str(ROOT)], allow_inspection=False, docstring_parser="google")
    package = loader.load("allscan")
    loader.resolve_aliases(implicit=True, external=False)
    return package


def _signature(found) -> str:
    """Format a signature with defaults, without annotations; if too long for one line, with a line per argument."""
    taken, star = [], False
    for x in found.parameters:
        kind = x.kind.value
        if kind == "keyword-only" and not star:
            taken.append("*")
        star |= kind in ("keyword-only", "variadic positional")
        prefix = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "")
        default = "" if x.default is None or prefix else f"={x.default}".replace("'", '"')
        if x.name not in ("self", "cls", "_semantic"):
            taken.append(f"{prefix}{x.name}{default}")
    line = f"{found.name}({', '.join(taken)})"
    if len(line) <= 100:
        return line
    return f"{found.name}(\n" + "".join(f"    {x},\n" for x in taken) + ")"


def _docstring(found) -> str:
    """Convert a docstring to Markdown."""
    import griffe

    if found.docstring is None:
        return ""
    told = []
    silent = dict(warn_unknown_params=False, warn_missing_types=False, warnings=False)
    for section in griffe.parse_google(found.docstring, **silent):
        kind = section.kind.value
        if kind == "text":
            told.append(section.value)
        elif kind == "admonition":
            told.append(f"{section.title or 'Example'}:\n\n```\n{section.value.contents}\n```")
        elif kind == "examples":
            told.append("Example:\n\n```\n" + "\n".join(text for _, text in section.value) + "\n```")
        else:
            title = {"parameters": "Arguments"}.get(kind, kind.capitalize())
            if kind == "returns":  # plain text; griffe would parse each line as a named value
                lines = re.search(r"^Returns:\n((?: .*\n?|\n)+)", found.docstring.value, re.M)[1]
                told.append("Returns:\n\n" + textwrap.dedent(lines).strip())
                continue
            items = []
            for x in section.value:
                name = getattr(x, "name", "") or str(getattr(x, "annotation", "") or "")
                text = x.description.strip().replace("\n", "\n  ")
                items.append(f"* `{name}`: {text}" if name else f"* {text}")
            told.append(f"{title}:\n\n" + "\n".join(items))
    return "\n\n".join(told) + "\n"


def api(name: str, *members: str) -> str:
    """Return a heading, the signature and the docstring, followed by those of members."""
    found = _package()[name.removeprefix("allscan.")]
    found = found.final_target if found.is_alias else found
    told = [f"## {name}\n"]
    function = found if found.is_function else found.members.get("__init__") if found.is_class else None
    if function is not None:
        told.append(f"```\n{_signature(function).replace('__init__', found.name, 1)}\n```\n")
    told.append(_docstring(found))
    for member in members:
        inner = found.members[member]
        head = _signature(inner) if inner.is_function else member
        told.append(f"### {found.name}.{member}\n")
        told.append(f"```\n{head}\n```\n" if inner.is_function else "An attribute.\n")
        told.append(_docstring(inner))
    source = Path(found.filepath).resolve().relative_to(ROOT).as_posix()
    source = re.sub("^allscan/(?=bindings/|shmem_kernels/)", "", source)  # an sdist has copies in place of links
    told.append(f"*Generated from the {'docstrings' if members else 'docstring'} in `{source}`.*\n")
    return "\n" + "\n".join(told) + "\n"
