"""All-Scan and ZeCO: sequence parallelism for linear attention. See README.md."""

import importlib
import os as _os
from typing import TYPE_CHECKING, Any

if not _os.path.isdir(_os.path.join(__path__[0], "bindings")):  # a checkout without symbolic links
    __path__.append(_os.path.dirname(__path__[0]))

from .bindings import versions as _versions  # noqa: E402

_rejected = _versions.rejection(*_versions.ALL)
_cause: Exception | None = None
if not _rejected:
    try:
        import torch as _torch  # noqa: F401
        import triton as _triton  # noqa: F401
    except Exception as error:  # for example OSError for a missing shared library
        _rejected, _cause = f"torch or triton is not imported: {type(error).__name__}: {error}", error
if not _rejected:
    from . import device, zigzag
    from .base.errors import AllScanError, AllScanHostTimeout, AllScanOutOfStep, AllScanRejected, AllScanTimeout
    from .comm.communicator import Communicator
    from .comm.heap import finalize, init
    from .ops.allscan import allscan
    from .ops.allscan_segments import allscan_segments
    from .ops.gla import zeco_gla
    from .ops.halo import halo
    from .ops.ssd import zeco_simple_gla, zeco_ssd
    from .scan.collective import AllScan
    from .scan.launcher import Work

if TYPE_CHECKING:
    from .ops.delta import zeco_gated_delta_rule, zeco_kda

__version__ = "0.1.0"
__all__ = [
    "AllScan",
    "AllScanError",
    "AllScanHostTimeout",
    "AllScanOutOfStep",
    "AllScanRejected",
    "AllScanTimeout",
    "Communicator",
    "Work",
    "allscan",
    "allscan_segments",
    "check_batch",
    "cut_batch",
    "device",
    "finalize",
    "halo",
    "init",
    "zeco_gated_delta_rule",
    "zeco_gla",
    "zeco_kda",
    "zeco_simple_gla",
    "zeco_ssd",
    "zigzag",
]


_ON_DEMAND = "integrations", "reference", "serving", "tools"  # modules that are slow to import


def __getattr__(name: str) -> Any:
    if _rejected and name[:2] != "__":  # but `allscan doctor` works
        raise ImportError(f"allscan {__version__} does not run here: {_rejected}") from _cause
    if name in ("zeco_gated_delta_rule", "zeco_kda"):
        from .ops import delta

        found = globals()[name] = getattr(delta, name)  # cached: the next access does not call __getattr__
        return found
    if name in ("check_batch", "cut_batch"):
        return getattr(importlib.import_module(f"{__name__}.integrations.batches"), name)
    if name in _ON_DEMAND:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module 'allscan' has no attribute {name!r}")
