"""All-Scan and ZeCO: sequence parallelism for linear attention. See README.md."""

import os as _os

if not _os.path.isdir(
    _os.path.join(__path__[0], "shmem_kernels")
):  # a bare checkout: the layers lie beside this folder
    __path__.append(_os.path.dirname(__path__[0]))

from . import device, zigzag  # noqa: E402
from .collective import AllScan  # noqa: E402
from .communicator import Communicator, finalize, init  # noqa: E402
from .gla import zeco_gla  # noqa: E402
from .halo import halo  # noqa: E402
from .order import AllScanOutOfStep, AllScanTimeout  # noqa: E402
from .scan import allscan  # noqa: E402

__version__ = "0.1.0"
__all__ = [
    "AllScan", "AllScanOutOfStep", "AllScanTimeout", "Communicator", "allscan", "device", "finalize", "halo", "init",
    "zeco_gla", "zigzag",
]  # fmt: skip
