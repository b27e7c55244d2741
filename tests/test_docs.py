"""The documentation: it builds without a broken link or a missing reference, and its examples run."""

from __future__ import annotations

import os
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


def test_its_examples_run():
    done, of_all = python("docs/check_examples.py").split()[0:3:2]
    assert done == of_all and int(done) >= 16


@pytest.mark.quick
def test_the_readme_is_short():
    assert len(open(os.path.join(ROOT, "README.md"), encoding="utf-8").read().splitlines()) <= 200
