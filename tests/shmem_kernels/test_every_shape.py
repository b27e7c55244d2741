"""No product of any kernel reads outside of shared memory, whatever K and V are.

ptxas 12.8, that of Triton 3.6 and 3.7, makes such code of some products; of which, differs with every constant of a
kernel. This takes hours of one core: ask for it after a change of kernels, of block sizes or of Triton.

    python -m pytest -m every_shape -n 16
"""

from __future__ import annotations

import pytest
import torch

from allscan.shmem_kernels import gla_bwd
from support.launches import Launches, compiled_launches, launch_chunks, launch_gla

pytestmark = pytest.mark.cpu
WIDTHS = [16, 32, 64, 96, 128, 160, 192, 256]


@pytest.mark.every_shape
@pytest.mark.parametrize("K", [*WIDTHS, 512])
@pytest.mark.parametrize("V", [*WIDTHS, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gla(K, V, dtype, monkeypatch):
    seen = []
    for kept in (False, True) if dtype == torch.bfloat16 else (False,):
        for H, T in ((4, 130), (16, 8192)):
            launch_gla(K, V, dtype, kept, monkeypatch, H, T)
            for _ in compiled_launches(seen=seen):  # which looks
                pass


def test_products_that_have_been_wrong(monkeypatch):
    """value_grad_kernel with 16 columns."""
    launch_gla(160, 16, torch.bfloat16, False, monkeypatch)
    Launches.made = [launch for launch in Launches.made if launch[0] is gla_bwd.value_grad_kernel]
    assert len([*compiled_launches()]) == 1


@pytest.mark.every_shape
@pytest.mark.parametrize("K", WIDTHS)
@pytest.mark.parametrize("V", [*WIDTHS, 512])
@pytest.mark.parametrize("scalar", [False, True], ids=["KDA", "Gated DeltaNet"])
def test_delta_rules(K, V, scalar, monkeypatch):
    launch_chunks(K, V, torch.bfloat16, scalar, monkeypatch)
    for _ in compiled_launches():
        pass
