"""The table of versions: handling of installed versions, and other places that state versions."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap

import pytest

try:
    import tomllib
except ImportError:  # Python 3.10; pytest requires it there
    import tomli as tomllib

from allscan.bindings import versions
from allscan.tools import doctor
from support import ROOT

pytestmark = pytest.mark.cpu
OLD = {
    "torch": "2.10.0+cu128",
    "Triton": "3.5.1",
    "NVSHMEM": "3.3.24",
    "nvshmem4py": "0.2.1",
    "CuPy": "12.3.0",
    "transformers": "5.10.4",
    "flash-linear-attention": "0.5.1",
    "megatron-core": "0.18.0",
    "accelerate": "1.9.0",
    "trl": "1.15.0",
    "axolotl-ringmaster": "0.1.9",
}
NEW = {
    "torch": "2.16.0",
    "Triton": "3.10.0+git1234",
    "NVSHMEM": "3.9.0",
    "nvshmem4py": "0.4.1",
    "transformers": "6.0",
    "flash-linear-attention": "0.7.0",
    "megatron-core": "0.20.0",
    "accelerate": "2.0",
    "trl": "2.0",
    "axolotl-ringmaster": "0.3.0",
}
GOOD = {"torch": "2.11.0", "Triton": "3.6.0", "NVSHMEM": "3.4.5"}


@pytest.fixture
def install(monkeypatch):
    """Return install({name: version}); no other package is installed."""

    def install(given):
        of = {
            name: version
            for known in versions.PACKAGES
            for name in known.distributions[:1]
            if (version := given.get(known.name))
        }
        monkeypatch.setattr(versions, "installed_version", lambda *names: next(filter(None, map(of.get, names)), None))
        monkeypatch.setattr(versions.importlib.util, "find_spec", lambda name: None)
        versions.rejection.cache_clear()
        versions.warn_of_newer.cache_clear()

    yield install
    versions.rejection.cache_clear()
    versions.warn_of_newer.cache_clear()


@pytest.mark.parametrize("name", OLD)
def test_too_old(name, install, capsys):
    """An old version is rejected by the doctor and at its use; the error names the command that installs a newer
    one."""
    install(GOOD | {name: OLD[name]})
    least = re.escape(versions.package(name).least)
    assert re.fullmatch(
        rf"{name} .* is too old, {least} is the oldest: pip install '.*>={least}.*'", versions.rejection(name)
    )
    needs = doctor.report_versions()
    assert f"{OLD[name]}, rejected: too old" in capsys.readouterr().out
    assert len(needs) == (name in versions.ALL)


@pytest.mark.parametrize("name", NEW)
def test_newer_than_known(name, install, capsys):
    """A newer version is allowed, with one warning."""
    install(GOOD | {name: NEW[name]})
    assert not versions.rejection(name) and not versions.rejection(*versions.ALL)
    with pytest.warns(UserWarning, match=rf"{name} .* is newer than {versions.package(name).newest}") as caught:
        for _ in range(2):
            versions.warn_of_newer(*dict.fromkeys((*versions.ALL, name)))
    assert len(caught) == 1
    assert not doctor.report_versions()
    assert f"{NEW[name]}, newer: newer than" in capsys.readouterr().out


@pytest.mark.parametrize("torch, triton", [*versions.TRITON_OF_TORCH.items(), ("2.11", "3.9"), ("2.15", "3.6")])
def test_the_triton_of_a_torch(torch, triton, install, capsys):
    """Another Triton than torch's own is no error."""
    install({"torch": f"{torch}.0", "Triton": f"{triton}.1"})
    assert not doctor.report_versions()
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("Triton"))
    assert ("tested on" in line) and ("brings" in line) == (versions.TRITON_OF_TORCH[torch] != triton), line


@pytest.mark.parametrize("missing", ["torch", "Triton", "NVSHMEM", "transformers"])
def test_missing(missing, install, capsys):
    install({name: version for name, version in GOOD.items() if name != missing})
    needs = doctor.report_versions()
    assert (missing in versions.ALL) == bool(needs) == bool(versions.rejection(*versions.ALL))
    assert re.search(rf"^{missing} +missing", capsys.readouterr().out, re.MULTILINE)


def test_a_device_library_that_triton_cannot_read(install):
    install({"Triton": "3.6.0", "NVSHMEM": "3.8.0"})
    assert "pip install 'nvidia-nvshmem-cu13<3.8'" in versions.device_library_rejection()
    for good in (
        {"Triton": "3.6.0", "NVSHMEM": "3.7.2"},
        {"Triton": "3.7.1", "NVSHMEM": "3.8.0"},
        {"NVSHMEM": "3.8.0"},
    ):
        install(good)
        assert not versions.device_library_rejection()


def python(code, tmp_path, **installed):
    """Run Python in an empty folder, with metadata that makes these packages look installed."""
    for name, version in installed.items():
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return subprocess.run(
        [sys.executable, *code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), ROOT)), "TRITON_INTERPRET": "1"},
    )


@pytest.mark.parametrize(
    "code", ["allscan.Communicator", "from allscan import zeco_gla", "allscan.halo", "import allscan.integrations.fla"]
)
def test_a_torch_that_is_too_old_is_an_import_error(code, tmp_path):
    """The error is raised at the first use of the package, whatever is imported from it."""
    done = python(["-c", f"import allscan; {code}"], tmp_path, torch="2.6.0")
    words = (
        r"ImportError: (allscan .* does not run here: )?torch 2.6.0 is too old, 2.11 is the oldest: pip install 'tor"
    )
    assert done.returncode == 1 and re.search(words, done.stderr), done.stderr


@pytest.mark.slow(but=("torch-2.6", "triton"))
@pytest.mark.parametrize("name, version", [("torch", "2.6.0"), ("triton", "3.0.0"), ("torch", "2.16.0")])
def test_doctor_has_no_traceback(name, version, tmp_path):
    done = python(["-m", "allscan", "doctor"], tmp_path, **{name: version})
    old = version != "2.16.0"
    assert done.returncode == old and version in done.stdout and "Traceback" not in done.stdout + done.stderr, done
    assert ("too old" if old else "newer than 2.15") in done.stdout and ("self-test" in done.stdout) != old


def test_estimate_with_an_old_version(tmp_path):
    done = python(["-m", "allscan", "estimate", "config.json"], tmp_path, triton="3.0.0")
    assert done.returncode == 2 and "3.0.0 is too old" in done.stderr and "Traceback" not in done.stderr, done


def test_doctor_tells_of_a_broken_installation(tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so: cannot open shared object file')")
    done = python(["-m", "allscan", "doctor"], tmp_path)
    assert "Traceback" not in done.stdout + done.stderr and done.returncode == 1, done
    assert "cannot open shared object file" in done.stdout and "pip install --force-reinstall torch==" in done.stdout


@pytest.mark.quick
def test_doctor_names_what_failed_on_gpus(tmp_path, monkeypatch):
    """The names are listed, since a count does not show what is safe."""
    record = tmp_path / "tests" / "gpu" / "last_run.json"
    record.parent.mkdir(parents=True)
    failed = ["tests/gpu/test_waiting.py::test_one", "tests/gpu/test_plans.py::test_two[3]"]
    counts = dict(passed=5, failed=1, error=1, parts=["not alone", "alone"], tests_that_failed=failed)
    record.write_text(json.dumps(dict(counts, date="2026-01-01", gpus=["a GPU"] * 2, sha256="")))
    monkeypatch.setattr(doctor, "__file__", str(tmp_path / "allscan" / "tools" / "doctor.py"))
    said = doctor._last_run()
    assert "5 passed, 2 failed on 2 x a GPU, 2026-01-01, other sources than these" in said
    assert [line.strip() for line in said.splitlines()[1:]] == [f"failed: {name}" for name in failed]


def test_the_first_communicator_warns_once(tmp_path):
    code = "import allscan\nfor _ in range(2):\n    allscan.Communicator().close()"
    done = python(["-c", code], tmp_path, torch="2.16.0")
    assert done.returncode == 0 and done.stderr.count("torch 2.16.0 is newer than 2.15") == 1, done.stderr


def test_integrations_name_what_is_too_old(tmp_path):
    old = {"transformers": "5.10.4", "flash-linear-attention": "0.5.0", "megatron-core": "0.18.0"}
    old |= {"axolotl-ringmaster": "0.1.9"}
    of = dict(transformers="transformers", megatron="megatron-core", ringmaster="axolotl-ringmaster")
    of |= dict.fromkeys(("fla", "fla_cp"), "flash-linear-attention")
    code = f"""
        import importlib
        for module in {[*of]}:
            try:
                importlib.import_module("allscan.integrations." + module)
            except ImportError as error:
                print(error)
    """
    lines = python(["-c", textwrap.dedent(code)], tmp_path, **old).stdout.splitlines()
    for module, name in of.items():
        words = f"allscan.integrations.{module}: {name} {old[name]} is too old"
        assert [line for line in lines if line.startswith(words)], (words, lines)


def test_delta_rules_name_a_fla_that_is_too_old(tmp_path):
    code = (
        "import torch, allscan\nx = torch.ones(1, 2, 1, 4)\n"
        'allscan.zeco_kda(x, x, x, -x, x[..., 0], comm=allscan.Communicator(), chunk="fla")'
    )
    done = python(["-c", code], tmp_path, **{"flash-linear-attention": "0.5.0"})
    assert "ImportError: flash-linear-attention 0.5.0 is too old" in done.stderr, done.stderr


# Other places that state versions


def results():
    with open(os.path.join(ROOT, "tests", "matrix", "results.json")) as file:
        return json.load(file)


@pytest.mark.parametrize("name", ["Python", "torch", "Triton", "NVSHMEM", "transformers", "flash-linear-attention"])
def test_what_is_said_to_be_tested_on_cpus_has_run(name):
    """Each version has run in an environment of the matrix without a failure, or is that of this run."""
    known = versions.package(name)
    column = known.distributions[0] if known.distributions else "python"
    ran = {versions.number(result[column]) for result in results() if result["passed"] and not result["failed"]}
    ran.add(versions.number(versions.version_of(name) or "0"))
    assert {*map(versions.number, known.on_cpus)} <= ran


def test_the_matrix_runs_each_triton_with_its_torch():
    ran = {(versions.number(x["torch"]), versions.number(x["triton"])) for x in results()}
    assert {(versions.number(a), versions.number(b)) for a, b in versions.TRITON_OF_TORCH.items()} <= ran


def test_what_is_said_to_be_tested_on_gpus_has_run():
    with open(os.path.join(ROOT, "tests", "gpu", "last_run.json")) as file:
        ran = json.load(file)["versions"]
    for name in ("Python", "torch", "Triton", "NVSHMEM"):
        assert versions.number(ran[name.lower()]) in map(versions.number, versions.package(name).on_gpus)


def test_the_package_asks_for_what_the_table_says():
    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        given = tomllib.load(file)["project"]
    assert given["requires-python"] == f">={versions.package('Python').least}"
    extras = given["optional-dependencies"].items()
    asked = [*given["dependencies"], *(x for extra, xs in extras if extra != "test" for x in xs)]
    for known in versions.PACKAGES[1:]:
        found = {
            re.sub("cu1[23]|cuda1[23]x", "", x)
            for x in asked
            if x.startswith(tuple(f"{n}>" for n in known.distributions))
        }
        wanted = re.sub("cu1[23]|cuda1[23]x", "", known.requirement)
        assert {",".join(sorted(x.split(","))) for x in found} <= {",".join(sorted(wanted.split(",")))}, known.name
    pythons = [x.rpartition(" ")[2] for x in given["classifiers"] if re.search(r":: 3\.\d+$", x)]
    assert tuple(pythons) == versions.package("Python").on_cpus


def spans(tested):
    """Return versions as text, such as 3.4, 3.6 to 3.8 for a list."""
    runs: list[list[str]] = []
    for version in tested:
        major, minor = versions.number(version)
        if runs and versions.number(runs[-1][-1]) == (major, minor - 1):
            runs[-1].append(version)
        else:
            runs.append([version])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs) or "-"


def test_the_documentation_has_the_table():
    """bench/README.md has the environments of the matrix and their results."""
    text = ""
    for page in ("docs/versions.md", "bench/README.md"):
        with open(os.path.join(ROOT, page), encoding="utf-8") as file:
            text += file.read()
    rows = [f"| {p.name} | {spans(p.on_gpus)} | {spans(p.on_cpus)} | before {p.least} |" for p in versions.PACKAGES]
    for x in results():
        failed = f", {len(x['failed'])} failed" if x["failed"] else ""
        found = f"{x['torch']}, {x['triton']}, {x['python']}"
        more = f"transformers {x['transformers']}, NVSHMEM {x['nvidia-nvshmem-cu13']}"
        chosen = x["tests"].removeprefix("tests/").partition(".py")[0].rpartition("/")[2]
        rows.append(f"| {found} | {more} | `{chosen}` | {x['passed']} passed{failed} | {x['date']} |")
    missing = [row for row in rows if row not in text]
    assert not missing, "\n".join(rows)


def test_the_readme_says_which_versions():
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
        text = file.read()
    packages = [versions.package(name) for name in ("Python", "torch", "Triton", "NVSHMEM")]
    rows = [
        ("tested on GPUs", *(spans(p.on_gpus) for p in packages)),
        ("tested on CPUs", *(spans(p.on_cpus) for p in packages)),
        ("rejected", *(f"before {p.least}" for p in packages)),
    ]
    rows = [f"| {' | '.join(row)} |" for row in rows]
    assert not [row for row in rows if row not in text], "\n".join(rows)
