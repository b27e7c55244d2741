"""The documentation builds without a broken link or a missing reference, and its examples run."""

from __future__ import annotations

import importlib
import inspect
import os
import pathlib
import pkgutil
import re
import subprocess
import sys
import types

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
pytestmark = pytest.mark.cpu


def python(*command):
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_builds(tmp_path):
    """Without --quiet, which hides warnings from --strict."""
    python("-m", "mkdocs", "build", "--strict", "-d", str(tmp_path))
    page = (tmp_path / "api" / "zeco_gla" / "index.html").read_text()
    assert "initial_state" in page and "arXiv 2507.01004" in page
    for name, drawing in (("index.html", "chain"), ("ranks/index.html", "mesh"), ("training/index.html", "layouts")):
        page = (tmp_path / name).read_text()
        assert f'<marker id="{drawing}-end"' in page and "<style>svg" not in page, name  # docs/hooks.py puts it there
    page = (tmp_path / "results" / "index.html").read_text()
    found = [tmp_path / "results" / path for path in re.findall(r'<img [^>]*src="([^"]*)"', page)]
    assert found and all(path.exists() for path in found), found


@pytest.mark.parametrize("url", ["", "https://example.org/allscan"])
def test_the_link_to_the_repository_is_that_of_setup(url, tmp_path, monkeypatch):
    """Without an address there is none."""
    monkeypatch.syspath_prepend(os.path.join(ROOT, "docs"))
    hooks = importlib.import_module("hooks")
    monkeypatch.setattr(hooks, "ROOT", tmp_path)
    text = pathlib.Path(ROOT, "setup.py").read_text()
    (tmp_path / "setup.py").write_text(re.sub(r'^URL = ".*"$', f'URL = "{url}"', text, flags=re.MULTILINE))
    assert hooks.on_config(types.SimpleNamespace()).repo_url == url


def documented():
    """Return public classes and functions of the host on the pages."""
    for page in sorted(pathlib.Path(ROOT, "docs").rglob("*.md")):
        for name in re.findall(r"^<!-- generated: api (\S+)", page.read_text(), re.MULTILINE):
            try:
                found = pkgutil.resolve_name(re.sub(r"^(allscan(?:\.[a-z_]+)*)\.(\w+)$", r"\1:\2", name))
            except ImportError:  # as in the matrix, without all packages of integrations
                continue
            if inspect.isfunction(found) or (inspect.isclass(found) and "__init__" in vars(found)):
                yield name, found


def test_docstrings_name_all_arguments():
    """In Google's style, which mkdocs reads; several arguments may share a line."""
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
        if re.search(r":(func|class|meth):", text) or (missing and name not in SAID_BY_OTHERS):
            wrong.append((name, missing))
    assert not wrong, wrong


SAID_BY_OTHERS = {"allscan.Work", "allscan.AllScanTimeout", "allscan.device.Channel"}  # users do not create these
OF_TRAINER = "SequenceParallel"  # the Trainer and its mixin, whose methods are those of transformers' Trainer


@pytest.mark.quick
def test_docstrings_have_their_sections():
    """Functions, classes and their methods have Returns, Raises and an example, if they take arguments or have
    Raises."""
    wrong = []
    for name, found in documented():
        if name in SAID_BY_OTHERS:
            continue
        said = [(name, found, inspect.isclass(found))]
        if inspect.isclass(found) and OF_TRAINER not in name:
            methods = ((key, getattr(x, "__func__", x)) for key, x in vars(found).items() if key[0] != "_")
            methods = [(key, x) for key, x in methods if inspect.isfunction(x)]
            said += [
                (f"{name}.{key}", x, False)
                for key, x in methods
                if len(inspect.signature(x).parameters) > 1 or "Raises:" in (inspect.getdoc(x) or "")
            ]
        for full_name, thing, is_class in said:
            text = inspect.getdoc(thing) or ""
            sections = ["Raises", "Example"]
            parameters = [] if is_class else [x for x in inspect.signature(thing).parameters if x != "self"]
            sections += ["Args"] if parameters else []
            if not is_class and inspect.signature(thing).return_annotation not in ("None", None):
                sections.append("Returns")
            missing = [x for x in sections if not re.search(rf"^{x}:\n {{4}}\S", text, re.MULTILINE)]
            if missing:
                wrong.append((full_name, missing))
    assert not wrong, wrong


def test_its_examples_run():
    done, of_all = python("docs/check_examples.py").split()[0:3:2]
    assert done == of_all and int(done) >= 30


@pytest.mark.quick
def test_generated_parts_are_those_of_their_sources():
    """Generated parts: tables of bench/results, docstrings, programs on two pages."""
    pytest.importorskip("griffe", reason="needs griffe")
    python("docs/generate.py", "--check")


@pytest.mark.quick
def test_every_program_runs_or_says_why_not():
    """check_examples runs those for one process and for ranks, test_device those for torchrun."""
    said = re.compile(r"# (runs on (one process|\d ranks)|part of a program|needs)\b")
    by_torchrun, silent = [pathlib.Path(ROOT, page).read_text() for page in ("README.md", "docs/own_kernels.md")], []
    for page in [pathlib.Path(ROOT, "README.md"), *sorted(pathlib.Path(ROOT, "docs").rglob("*.md"))]:
        for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            runs = "init_process_group" in block and any(block in page for page in by_torchrun)
            if not (runs or said.match(block)):
                silent.append(f"{page.relative_to(ROOT)}: {block.partition(chr(10))[0]}")
            if "set_device(dist.get_rank())" in block:
                silent.append(f"{page.relative_to(ROOT)}: wrong on a second node")
    assert not silent, "\n".join(silent)


@pytest.mark.quick
def test_the_readme_is_short():
    assert len(open(os.path.join(ROOT, "README.md"), encoding="utf-8").read().splitlines()) <= 140


@pytest.mark.quick
def test_all_pages_are_in_the_menu():
    menu = pathlib.Path(ROOT, "mkdocs.yml").read_text()
    pages = [path.relative_to(f"{ROOT}/docs").as_posix() for path in pathlib.Path(ROOT, "docs").rglob("*.md")]
    assert not [page for page in pages if f": {page}\n" not in menu]


@pytest.mark.quick
def test_profiling_names_every_kernel():
    page = pathlib.Path(ROOT, "docs", "profiling.md").read_text()
    sources = [path.read_text() for path in pathlib.Path(ROOT, "shmem_kernels").glob("*.py")]
    kernels = {name for source in sources for name in re.findall(r"^def ([a-z]\w*_kernel)\b", source, re.MULTILINE)}
    assert len(kernels) > 30 and not [name for name in sorted(kernels) if f"`{name}`" not in page]


@pytest.mark.quick
def test_the_readme_leads_to_every_page():
    """The README links to every page; to API pages through their overview, whose links are relative to its folder."""
    readme, overview = (pathlib.Path(ROOT, name).read_text() for name in ("README.md", "docs/api/index.md"))
    pages = [path.relative_to(ROOT) for path in pathlib.Path(ROOT, "docs").rglob("*.md")]
    missing = [str(x) for x in pages if f"]({x}" not in readme and (x.parts[1] != "api" or x.name not in overview)]
    assert missing == ["docs/index.md"], missing  # the site's counterpart of the README


@pytest.mark.quick
def test_variables_are_documented():
    """Covers every variable that the package, or its tests, read."""
    names = set()
    for folder in ("allscan", "bindings", "shmem_kernels", "bench", "tests", "docs"):
        for path in pathlib.Path(ROOT, folder).rglob("*.py"):
            names |= set(re.findall(r"[\"'](ALLSCAN_[A-Z_]+)", path.read_text()))
    page = pathlib.Path(ROOT, "docs", "variables.md").read_text()
    assert len(names) >= 8 and not [name for name in sorted(names) if f"`{name}`" not in page], sorted(names)
