"""The table of tested versions of other packages; there is no second one.

`allscan doctor` compares it with the installed versions. The first Communicator warns of newer versions and rejects
older ones. docs/versions.md shows the table. Tests compare that page and pyproject.toml with this table, and the table
with the recorded test runs.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import platform
import re
import warnings
from typing import NamedTuple

ALL = "Python", "torch", "Triton"  # required


class Package(NamedTuple):
    """Tested versions of a package. Versions are feature releases: "3.6" for every 3.6.x."""

    name: str
    distributions: tuple[str, ...]  # names on the package index; the first installed one counts
    least: str  # older versions are rejected
    on_gpus: tuple[str, ...]  # versions in GPU runs of the suite, or of the tests that need the package
    on_cpus: tuple[str, ...]  # versions in CPU runs: tests/matrix/results.json
    below: str = ""  # pip's upper bound, for packages whose private functions are called
    use: str = ""  # purpose of an optional package

    @property
    def requirement(self) -> str:
        """Return the requirement for pip."""
        below = f",<{self.below}" if self.below else ""
        return f"{self.distributions[0]}>={self.least}{below}"

    @property
    def newest(self) -> str:
        """Return the newest version that was tested or is allowed."""
        return max((self.least, *self.on_gpus, *self.on_cpus), key=number)


PACKAGES = (
    Package("Python", (), "3.10", ("3.12",), ("3.10", "3.11", "3.12", "3.13")),
    Package("torch", ("torch",), "2.11", ("2.11",), ("2.11", "2.12", "2.13", "2.14", "2.15")),
    Package("Triton", ("triton", "pytorch-triton"), "3.6", ("3.6",), ("3.6", "3.7", "3.8", "3.9")),
    Package(
        "NVSHMEM",
        ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12"),
        "3.4",
        ("3.4",),
        ("3.4", "3.6", "3.7", "3.8"),
        use="more than one GPU",
    ),
    Package("nvshmem4py", ("nvshmem4py-cu13", "nvshmem4py-cu12"), "0.3", ("0.3",), (), "0.5", "more than one GPU"),
    Package("CuPy", ("cupy-cuda13x", "cupy-cuda12x", "cupy"), "13.6", (), (), use="CuPy arrays"),
    Package(
        "transformers",
        ("transformers",),
        "5.18",
        ("5.23",),
        tuple(f"5.{minor}" for minor in range(18, 25)),
        use="its models",
    ),
    Package(
        "flash-linear-attention",
        ("flash-linear-attention",),
        "0.6",
        ("0.6",),
        ("0.6",),
        "0.7",
        "delta rules, and its models",
    ),
    Package("megatron-core", ("megatron-core",), "0.19", ("0.19",), ("0.19",), "0.20", "its models"),
    Package("accelerate", ("accelerate",), "1.15", ("1.15",), ("1.15",), "2", "the Trainer of transformers"),
    Package("trl", ("trl",), "1.16", (), ("1.16",), "2", "its trainers"),
    Package("axolotl-ringmaster", ("axolotl-ringmaster",), "0.2", (), ("0.2",), "0.3", "its context parallelism"),
)
TRITON_OF_TORCH = {"2.11": "3.6", "2.12": "3.7", "2.13": "3.7", "2.14": "3.8", "2.15": "3.9"}  # as its wheel requires


def installed_version(*distributions: str) -> str | None:
    """Return the version of the first installed one of these distributions, or None."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def package(name: str) -> Package:
    """Return the row of the table with this name."""
    return next(known for known in PACKAGES if known.name == name)


def version_of(name: str) -> str | None:
    """Return the installed version of a package of the table, or None."""
    return platform.python_version() if name == "Python" else installed_version(*package(name).distributions)


def number(version: str) -> tuple[int, int]:
    """Return (major, minor); without numbers, e.g. for "unknown", a number above all versions."""
    found = re.match(r"(\d+)(?:\.(\d+))?", version)
    return (int(found[1]), int(found[2] or 0)) if found else (1 << 30, 0)


class State(NamedTuple):
    """An installed package against the table. ``kind``: "missing", "rejected", "tested on GPUs", "tested on CPUs",
    "expected" or "newer"."""

    kind: str
    version: str | None
    advice: str  # for the user, or ""


def state_of(name: str) -> State:
    """Return the state of an installed package."""
    known, version = package(name), version_of(name)
    if version is None and name in ALL and importlib.util.find_spec(name.lower()):
        return State("expected", "unknown", "built without metadata")
    if version is None:
        return State("missing", None, f"pip install '{known.requirement}'")
    here = number(version)
    if here < number(known.least):
        way = f"pip install '{known.requirement}'" if known.distributions else f"take {known.least} or later"
        return State("rejected", version, f"too old, {known.least} is the oldest: {way}")
    if here > number(known.newest) and (known.on_gpus or known.on_cpus):
        advice = f"newer than {known.newest}, the last that was tested: allowed. If something fails, take that"
        return State("newer", version, advice)
    advice = ""
    if name == "Triton":
        torch = version_of("torch")
        own = TRITON_OF_TORCH.get("{}.{}".format(*number(torch or "0")))
        if own is not None and here != number(own):
            advice = f"torch {torch} brings {own}, which torch.compile may need; allscan does not"
    for kind, tested in (("tested on GPUs", known.on_gpus), ("tested on CPUs", known.on_cpus)):
        if here in map(number, tested):
            return State(kind, version, advice)
    return State("expected", version, advice)


@functools.cache
def rejection(*names: str) -> str:
    """Return why these packages cannot be used, or "": too old, or, for those in ALL, missing."""
    found = []
    for name in names:
        kind, version, advice = state_of(name)
        if kind == "rejected":
            found.append(f"{name} {version} is {advice}")
        elif kind == "missing" and name in ALL:
            found.append(f"{name} is missing: {advice}")
    return "; ".join(found)


def device_library_rejection() -> str:
    """Return why Triton cannot link NVSHMEM's device library, judged by their versions, or ""."""
    triton, nvshmem = version_of("Triton") or "", version_of("NVSHMEM") or ""
    if not triton or number(triton) >= (3, 7) or not nvshmem or number(nvshmem) < (3, 8):
        return ""
    way = f"pip install '{package('NVSHMEM').distributions[0]}<3.8', or take a Triton from 3.7 on"
    return f"Triton {triton} cannot read the device library of NVSHMEM {nvshmem}: {way}"


@functools.cache
def warn_of_newer(*names: str) -> None:
    """Warn, once per process, of each package that is newer than the tested versions."""
    for name in names:
        kind, version, advice = state_of(name)
        if kind == "newer":
            warnings.warn(f"{name} {version} is {advice} (`allscan doctor` shows all)", stacklevel=3)
