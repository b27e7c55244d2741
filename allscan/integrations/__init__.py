"""All-Scan inside models of other packages. Each module needs the package of its name and is imported at its first use:
``allscan.integrations.fla.sequence_parallel(model, comm=comm)``."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from ..bindings import versions

if rejected := versions.rejection(*versions.ALL):
    raise ImportError(rejected)


@contextlib.contextmanager
def needing(module: str, *packages: str) -> Iterator[None]:
    """Context for the imports of ``module`` from ``packages`` (names of versions.PACKAGES).

    A missing or too old package raises ImportError with its name; a package newer than tested gives a warning.
    """
    if rejected := versions.rejection(*packages):
        raise ImportError(f"{module}: {rejected}")
    versions.warn_of_newer(*packages)
    try:
        yield
    except ModuleNotFoundError as error:
        missing = [name for name in packages if versions.version_of(name) is None] or packages
        names, install = " and ".join(missing), " ".join(f"'{versions.package(name).requirement}'" for name in missing)
        raise ImportError(f"{module} needs {names}, not installed: pip install {install}") from error


def __getattr__(name: str) -> Any:
    if name in (
        "attention",
        "batches",
        "fla",
        "fla_cp",
        "megatron",
        "megatron_chunkwise",
        "recurrent",
        "ringmaster",
        "sglang",
        "slices",
        "softmax",
        "transformers",
        "transformers_trainer",
    ):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
