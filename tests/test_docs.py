"""The documentation: it builds without a broken link or a missing reference, and its examples run."""

from __future__ import annotations

import inspect
import os
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
pytestmark = pytest.mark.cpu


def python(*command):
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_builds(tmp_path):
    python("-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path))
    page = (tmp_path / "api" / "zeco_gla" / "index.html").read_text()
    assert "initial_state" in page and "arXiv 2507.01004" in page


def documented():
    """Public classes and functions of the host: those that the pages show."""
    for page in sorted(pathlib.Path(ROOT, "docs").rglob("*.md")):
        for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE):
            found = pkgutil.resolve_name(re.sub(r"^(allscan(?:\.[a-z_]+)*)\.(\w+)$", r"\1:\2", name))
            if inspect.isfunction(found) or (inspect.isclass(found) and "__init__" in vars(found)):
                yield name, found


def test_docstrings_name_all_arguments():
    """In Google's style, which the documentation reads; several may share a line."""
    made_by_others = {"allscan.Work", "allscan.AllScanTimeout", "allscan.device.Channel"}
    wrong = []
    for name, found in documented():
        taken = [
            p.name
            for p in inspect.signature(found).parameters.values()
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        text = inspect.getdoc(found) or ""
        listed = text.partition("Args:\n")[2].partition("\n\n")[0]
        missing = [x for x in taken if x != "self" and not re.search(rf"\b{x}\b", listed)]
        if re.search(r":(func|class|meth):", text) or (missing and name not in made_by_others):
            wrong.append((name, missing))
    assert not wrong, wrong


def test_its_examples_run():
    done, of_all = python("docs/check_examples.py").split()[0:3:2]
    assert done == of_all and int(done) >= 16


@pytest.mark.quick
def test_the_readme_is_short():
    assert len(open(os.path.join(ROOT, "README.md"), encoding="utf-8").read().splitlines()) <= 200
