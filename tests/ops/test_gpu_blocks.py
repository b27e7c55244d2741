"""Block sizes by kind of GPU; operators with them on CPU ranks, against float64. zeco_ssd with them: test_ssd.py."""

from __future__ import annotations

import types

import pytest
import torch

from allscan.ops import gpu_blocks
from allscan.ops.gpu_blocks import A100, BLACKWELL, HOPPER, SMALL, fitted, gpu_kind, kind_of
from support.delta import DeltaCase, own_case
from support.gla import BF16, GLACase, check, gla_case
from support.launches import with_gla_blocks, with_gpu_blocks
from support.values import check_errors

pytestmark = pytest.mark.cpu


@pytest.mark.quick
@pytest.mark.parametrize(
    "major, memory, kind",
    [(9, 232448, HOPPER), (10, 232448, BLACKWELL), (8, 166912, A100), (8, 101376, SMALL), (12, 101376, SMALL)],
)
def test_kinds(major, memory, kind, monkeypatch):
    """By what the device reports: capability and the shared memory of a program."""
    found = types.SimpleNamespace(major=major, shared_memory_per_block_optin=memory)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert kind_of(major, memory) == gpu_kind.__wrapped__(torch.device("cuda", 0)) == kind
    assert memory >= gpu_blocks.SHARED_MEMORY[kind]
    assert gpu_kind.__wrapped__(torch.device("cpu")) == HOPPER


@pytest.mark.quick
def test_smaller_blocks_stay():
    wide = dict(BV=128, BJ=32, num_warps=8, num_stages=3)
    assert fitted(HOPPER, "output", wide) == wide
    assert fitted(A100, "output", wide) == wide | dict(BV=64)
    assert fitted(SMALL, "output", wide) == wide | dict(BV=64, num_stages=2)
    narrow = dict(BV=32, num_warps=4, num_stages=3)
    assert fitted(A100, "output", narrow) == narrow
    assert fitted(SMALL, "output", narrow) == narrow | dict(num_stages=2)
    assert fitted(A100, "gla_output_reverse", dict(BV=64, num_warps=4, num_stages=1))["num_stages"] == 1


def of_gpu_case(group, case_of, case, capability):
    with pytest.MonkeyPatch.context() as patch:
        with_gla_blocks(patch, capability)
        with_gpu_blocks(patch, capability)
        return case_of(group, case)


@pytest.mark.slow(but="80-kda")
@pytest.mark.parametrize("rule", ["kda", "gated_delta_rule"])
@pytest.mark.parametrize("capability", [80, 100, 120])
def test_delta_rules(run, rule, capability):
    case = DeltaCase(rule, [70, 33], H=1, HV=1, K=128, V=128, gates="mixed", dtype=BF16)
    check_errors(run(2, of_gpu_case, own_case, case, capability), 1e-2)


@pytest.mark.slow(but="120")
@pytest.mark.parametrize("capability", [80, 100, 120])
def test_gla(run, capability):
    case = GLACase([70, 33], K=128, V=128, gates="mixed", dtype=BF16)
    check(run(2, of_gpu_case, gla_case, case, capability), BF16)
