"""For every kernel with products, and any K and V, some num_stages gives right code; see machine_code.

This takes hours of one core: run it after a change of kernels, of block sizes or of Triton.

    python -m pytest -m every_shape -n 16 -rP    # lists kernels whose num_stages differ from ours
"""

from __future__ import annotations

import pytest
import torch

from allscan.launch.machine_code import STAGES
from support.launches import Launches, compiled_launches, launch_chunks, launch_gla

pytestmark = [pytest.mark.cpu, pytest.mark.every_shape]
WIDTHS = [16, 32, 64, 96, 128, 160, 192, 256]


def check_all(seen):
    for launch in Launches.made:
        kernel, values, options = launch
        for stages in (options.get("num_stages"), *STAGES):
            Launches.made = [(kernel, values, options | ({} if stages is None else dict(num_stages=stages)))]
            if all(not compiled.unset_registers() for _, compiled in compiled_launches(seen=seen, look=False)):
                break
            print(kernel.__name__, options, "not with", stages)
        else:
            pytest.fail(f"{kernel.__name__} {options}")


@pytest.mark.parametrize("K", [*WIDTHS, 512])
@pytest.mark.parametrize("V", [*WIDTHS, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gla(K, V, dtype, monkeypatch):
    seen = []
    for kept in (False, True) if dtype == torch.bfloat16 else (False,):
        for H, T in ((4, 130), (16, 8192)):
            launch_gla(K, V, dtype, kept, monkeypatch, H, T)
            check_all(seen)


@pytest.mark.parametrize("K", WIDTHS)
@pytest.mark.parametrize("V", [*WIDTHS, 512])
@pytest.mark.parametrize("scalar", [False, True], ids=["KDA", "Gated DeltaNet"])
def test_delta_rules(K, V, scalar, monkeypatch):
    launch_chunks(K, V, torch.bfloat16, scalar, monkeypatch)
    check_all([])
