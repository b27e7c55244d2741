"""All-Scan and ZeCO: sequence parallelism for linear attention. See README.md."""

import importlib
from typing import TYPE_CHECKING, Any

from . import device, zigzag
from .collective import AllScan, Work
from .communicator import Communicator
from .errors import AllScanOutOfStep, AllScanTimeout
from .gla import zeco_gla
from .halos import halo
from .ops import allscan
from .runtime import finalize, init
from .ssd import zeco_ssd

if TYPE_CHECKING:
    from .delta import zeco_gated_delta_rule, zeco_kda

__version__ = "0.1.0"
__all__ = [
    "AllScan", "AllScanOutOfStep", "AllScanTimeout", "Communicator", "Work", "allscan", "device", "finalize", "halo",
    "init", "zeco_gated_delta_rule", "zeco_gla", "zeco_kda", "zeco_ssd", "zigzag",
]  # fmt: skip


_ON_DEMAND = "delta", "integrations", "reference", "tools"  # modules that take their time to import


def __getattr__(name: str) -> Any:
    if name in ("zeco_gated_delta_rule", "zeco_kda"):
        from . import delta

        return getattr(delta, name)
    if name in _ON_DEMAND:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module 'allscan' has no attribute {name!r}")
