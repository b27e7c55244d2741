"""All-Scan inside other people's models; each module needs the package that it is named after, and is imported when it
is asked for: ``allscan.integrations.fla.sequence_parallel(model, comm=comm)``."""

import importlib
import re
from typing import Any


def needs(module: str, package: str) -> ImportError:
    """The error of a module whose ``package`` is not installed."""
    name = re.split("[<>=]", package)[0]
    return ImportError(f"{module} needs {name}, which is not installed: pip install '{package}'")


def __getattr__(name: str) -> Any:
    if name in (
        "attention", "batches", "fla", "fla_cp", "megatron", "recurrent", "softmax", "transformers",
        "transformers_trainer",
    ):  # fmt: skip
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
