"""Which versions of other packages this one was tested with: the only table of them.

`allscan doctor` compares it with what is installed, a first Communicator warns of what is newer, and what is too old is
rejected. docs/versions.md shows it. Tests compare both, and setup.py, with it and with what has run.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import platform
import re
import warnings
from typing import NamedTuple

ALL = "Python", "torch", "Triton"  # nothing works without these


class Package(NamedTuple):
    """Versions are those of feature releases, "3.6" for every 3.6.x."""

    name: str
    distributions: tuple[str, ...]  # on the package index, the first that is installed counts
    least: str  # older ones are rejected
    on_gpus: tuple[str, ...]  # what the suite, or the tests that need it, ran with on GPUs
    on_cpus: tuple[str, ...]  # the same on CPUs: tests/matrix/results.json
    below: str = ""  # where pip is to stop: of packages whose inner functions are called
    use: str = ""  # what it is for, if it is optional

    @property
    def requirement(self) -> str:
        """For pip."""
        below = f",<{self.below}" if self.below else ""
        return f"{self.distributions[0]}>={self.least}{below}"

    @property
    def newest(self) -> str:
        """Of those that were tested, or are known to be allowed."""
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
)
TRITON_OF_TORCH = {"2.11": "3.6", "2.12": "3.7", "2.13": "3.7", "2.14": "3.8", "2.15": "3.9"}  # that its wheel asks for


def installed_version(*distributions: str) -> str | None:
    """The version of the first of these distributions that is installed, or None."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def nvshmem_version() -> str | None:
    """The installed version of NVSHMEM, or None."""
    return version_of("NVSHMEM")


def package(name: str) -> Package:
    """The row of the table with this name."""
    return next(known for known in PACKAGES if known.name == name)


def version_of(name: str) -> str | None:
    """What is installed of it."""
    return platform.python_version() if name == "Python" else installed_version(*package(name).distributions)


def number(version: str) -> tuple[int, int]:
    """(major, minor); of a version that has none, such as "unknown", one that is newer than all."""
    found = re.match(r"(\d+)(?:\.(\d+))?", version)
    return (int(found[1]), int(found[2] or 0)) if found else (1 << 30, 0)


class State(NamedTuple):
    """``kind``: "missing", "rejected", "tested on GPUs", "tested on CPUs", "expected" or "newer"."""

    kind: str
    version: str | None
    advice: str  # what to do, or ""


def state_of(name: str) -> State:
    """Of what is installed."""
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
    """Why nothing works that needs packages of these names, or "": those that are too old, and of ALL those that are
    missing."""
    found = []
    for name in names:
        kind, version, advice = state_of(name)
        if kind == "rejected":
            found.append(f"{name} {version} is {advice}")
        elif kind == "missing" and name in ALL:
            found.append(f"{name} is missing: {advice}")
    return "; ".join(found)


def device_library_rejection() -> str:
    """Why Triton cannot link NVSHMEM's device library, as far as their versions say it, or ""."""
    triton, nvshmem = version_of("Triton") or "", nvshmem_version() or ""
    if not triton or number(triton) >= (3, 7) or not nvshmem or number(nvshmem) < (3, 8):
        return ""
    way = f"pip install '{package('NVSHMEM').distributions[0]}<3.8', or take a Triton from 3.7 on"
    return f"Triton {triton} cannot read the device library of NVSHMEM {nvshmem}: {way}"


@functools.cache
def warn_of_newer(*names: str) -> None:
    """Once a process, of those of ``names`` that are newer than what was tested."""
    for name in names:
        kind, version, advice = state_of(name)
        if kind == "newer":
            warnings.warn(f"{name} {version} is {advice} (`allscan doctor` shows all)", stacklevel=3)
