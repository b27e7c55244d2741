"""Runs the quick tests with each version of torch, Triton, Python, transformers and NVSHMEM, on CPUs: `make matrix`.

Each environment is created, runs the quick tests, and is removed: unpacked it takes 2 GB. CUDA's libraries are not
installed, see stand_ins.py. results.json has the last result of each; bench/README.md lists them.

    make matrix                               # all, with the installed pythons
    make matrix ONLY='torch-2.15.0-3.12'      # a session of nox -l
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import tempfile
import time
from xml.etree import ElementTree

import nox

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
RESULTS = os.path.join(HERE, "results.json")

# torch: (the Triton that it requires, pythons); its wheels for CPUs require no Triton
ENVIRONMENTS = {
    "2.11.0": ("3.6.0", ("3.12", "3.13")),
    "2.12.1": ("3.7.1", ("3.12",)),
    "2.13.0": ("3.7.1", ("3.12", "3.11")),
    "2.14.1": ("3.8.0", ("3.12", "3.10")),
    "2.15.0": ("3.9.0", ("3.12", "3.13")),
}
TRANSFORMERS = ("5.18.0", "5.19.0", "5.20.2", "5.21.1", "5.22.2", "5.23.0", "5.24.0")
NVSHMEM = ("3.4.5", "3.6.5", "3.7.2", "3.8.0")
EXCHANGED_IN = ("3.12", "2.13.0")  # (python, torch) for the versions of transformers and NVSHMEM
TOOLS = (
    "pytest",
    "pytest-xdist",
    "numpy",
    "matplotlib",
    "einops",
    "flash-linear-attention==0.6.0",
    "accelerate>=1.15,<2",
)

PIP = "--no-cache-dir", "--quiet", "--disable-pip-version-check"
FOUND = """
import importlib.metadata, json, platform
names = "torch", "triton", "nvidia-nvshmem-cu13", "transformers", "flash-linear-attention", "numpy"
print(json.dumps({"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}))
"""

nox.options.error_on_missing_interpreters = False
nox.options.default_venv_backend = "venv"
nox.options.envdir = os.path.join(ROOT, "build", "matrix")  # not below tests/: tests read that folder


def install(session: nox.Session, torch: str, transformers: str, nvshmem: str) -> None:
    session.install(*PIP, "--no-deps", f"torch=={torch}")
    session.run("python", os.path.join(HERE, "stand_ins.py"))
    names = "torch", "triton", "transformers", "nvidia-nvshmem-cu13"
    versions = torch, ENVIRONMENTS[torch][0], transformers, nvshmem
    session.install(*PIP, *(f"{name}=={version}" for name, version in zip(names, versions)), *TOOLS)


def run_tests(session: nox.Session, *chosen: str) -> list[str]:
    """Run the quick tests, optionally of the chosen files; save the result, and return the names of failed tests."""
    found = json.loads(session.run("python", "-c", FOUND, silent=True).splitlines()[-1])
    environment = {"PYTHONPATH": os.pathsep.join((ROOT, os.path.join(ROOT, "tests")))}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "report.xml")
        session.chdir(ROOT)
        command = "python", "-m", "pytest", "-m", "quick", "-p", "no:cacheprovider", f"--junitxml={report}", *chosen
        session.run(*command, env=environment, success_codes=[0, 1])
        suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = [
        f"{x.get('classname')}.{x.get('name')}"
        for x in suite.iter("testcase")
        if x.find("failure") is not None or x.find("error") is not None
    ]
    result = found | dict(
        tests=" ".join(chosen) or "-m quick",
        passed=counts["tests"] - sum(list(counts.values())[1:]),
        failed=failed,
        skipped=counts["skipped"],
        seconds=round(time.monotonic() - start),
        date=str(datetime.date.today()),
    )
    keep(result)
    return failed


def keep(result: dict) -> None:
    """Save a result in results.json; it replaces an earlier one of the same versions."""
    key = "torch", "python", "transformers", "nvidia-nvshmem-cu13", "tests"
    results = json.load(open(RESULTS)) if os.path.exists(RESULTS) else []
    results = [old for old in results if any(old[name] != result[name] for name in key)] + [result]
    with open(RESULTS, "w") as file:
        json.dump(sorted(results, key=lambda x: [x[name] for name in key]), file, indent=1)
        file.write("\n")


def removed(session: nox.Session) -> None:
    shutil.rmtree(session.virtualenv.location)


def quick(torch: str, python: str) -> None:
    """Define the session of one environment."""

    @nox.session(python=python, name=f"torch-{torch}-{python}")
    def session(session: nox.Session) -> None:
        """Run the quick tests."""
        try:
            transformers = "5.20.2" if python == "3.10" else "5.23.0"  # the last version for that python
            install(session, torch, transformers, "3.7.2" if torch == "2.15.0" else "3.4.5")  # as torch requires
            if failed := run_tests(session):
                session.error("\n".join(failed))
        finally:
            removed(session)


for torch, (_, pythons) in ENVIRONMENTS.items():
    for python in pythons:
        quick(torch, python)


@nox.session(python=EXCHANGED_IN[0])
def transformers(session: nox.Session) -> None:
    """Test every version of transformers in one environment."""
    try:
        install(session, EXCHANGED_IN[1], TRANSFORMERS[0], NVSHMEM[0])
        each(session, "transformers", TRANSFORMERS, "tests/integrations/test_transformers.py")
    finally:
        removed(session)


@nox.session(python=EXCHANGED_IN[0])
def nvshmem(session: nox.Session) -> None:
    """Test every version of NVSHMEM's device library in one environment."""
    try:
        install(session, EXCHANGED_IN[1], TRANSFORMERS[-1], NVSHMEM[0])
        each(session, "nvidia-nvshmem-cu13", NVSHMEM, "tests/shmem_kernels/test_compile.py", "-k", "nvshmem")
    finally:
        removed(session)


def each(session: nox.Session, name: str, versions: tuple[str, ...], *chosen: str) -> None:
    failed = []
    for version in versions:
        session.install(*PIP, *(["--no-deps"] if name.startswith("nvidia") else []), f"{name}=={version}")
        failed += [f"{name} {version}: {test}" for test in run_tests(session, *chosen)]
    if failed:
        session.error("\n".join(failed))
