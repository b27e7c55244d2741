"""All-Scan and ZeCO: sequence parallelism for linear attention. See README.md."""

from . import device, zigzag
from .collective import AllScan
from .communicator import Communicator
from .delta import zeco_gated_delta_rule, zeco_kda
from .errors import AllScanOutOfStep, AllScanTimeout
from .gla import zeco_gla
from .ops import allscan, halo
from .runtime import finalize, init

__version__ = "0.1.0"
__all__ = [
    "AllScan", "AllScanOutOfStep", "AllScanTimeout", "Communicator", "allscan", "device", "finalize", "halo", "init",
    "zeco_gated_delta_rule", "zeco_gla", "zeco_kda", "zigzag",
]  # fmt: skip
