"""``make peer`` with a checkout written by the test: what it replaces, joins and counts."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from support import peer

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

CASE = """
import torch
import torch.nn.functional as F
from fla.ops.{room} import {operator}
from fla.utils import device

from allscan.reference import {reference}

CUTS = None, [0, 5, 5, 19]

def tensors(T, states):
    torch.manual_seed(0)
    q, k, v = (F.normalize(torch.randn(1, T, 2, 16), dim=-1) for _ in "qkv")
    g = F.logsigmoid(torch.randn(1, T, 2, 16)){of_head}
    beta = torch.rand(1, T, 2)
    made = [q, k, v, g, beta][:{count}] + [torch.randn(states, 2, 16, 16)]
    return [x.to(device).requires_grad_() for x in made]

def results(function, inputs, cuts):
    cuts = None if cuts is None else torch.tensor(cuts)
    o, state = function(*inputs[:-1], scale=0.5, initial_state=inputs[-1], output_final_state=True, cu_seqlens=cuts)
    torch.manual_seed(1)
    loss = (o * torch.randn(o.shape)).sum() + (state * torch.randn(state.shape)).sum()
    return [o, state, *torch.autograd.grad(loss, inputs)]

def unsplit(*inputs, output_final_state, **options):
    return {reference}(*inputs, **options)

def test_values():
    for cuts in CUTS:
        inputs = tensors(19, 1 if cuts is None else 3)
        for x, y in zip(results({operator}, inputs, cuts), results(unsplit, inputs, cuts), strict=True):
            assert (x - y).norm() <= 1e-4 * y.norm()

def test_other_values():
    inputs = tensors(6, 1)
    assert (results({operator}, inputs, None)[0] - 1).norm() < 1e-4

def test_an_argument_that_allscan_has_not():
    {operator}(*tensors(6, 1)[:-1], use_graph=True)

def test_of_another_function():
    raise AssertionError
"""
OPERATORS = (
    dict(file="test_gla", room="gla", operator="chunk_gla", reference="gla_reference", of_head="", count=4),
    dict(file="test_kda", room="kda", operator="chunk_kda", reference="delta_reference", of_head="", count=5),
    dict(
        file="test_gdn",
        room="gated_delta_rule",
        operator="chunk_gated_delta_rule",
        reference="delta_reference",
        of_head=".mean(-1)",
        count=5,
    ),
)


@pytest.mark.slow
@pytest.mark.cpu
def test_a_checkout_whose_tests_are_known(tmp_path):
    """fla's assertions judge the ranks' results, in both layouts, also with odd numbers of tokens."""
    pytest.importorskip("fla")
    folder = tmp_path / "tests" / "ops"
    folder.mkdir(parents=True)
    for operator in OPERATORS:
        (folder / f"{operator['file']}.py").write_text(CASE.format(**operator))
    record, command = tmp_path / "record", ["make", "-C", ROOT, "peer", f"PYTHON={sys.executable}"]

    def make(options: str) -> subprocess.CompletedProcess:
        given = f"PEER={tmp_path}", f"OPTIONS=--ranks 2 --chunk allscan --record {record} {options}"
        return subprocess.run([*command, *given], capture_output=True, text=True, timeout=900)

    done = make("-n 1")  # in a worker of pytest-xdist
    for operator in OPERATORS:
        for layout in ("contiguous", "zigzag"):
            found = re.search(f"{operator['file']}.py {layout}: (.*)", done.stdout)
            graph = ", 1 skipped" if operator["file"] != "test_gla" else ""
            assert found and found[1] == f"1 passed, {2 - bool(graph)} failed{graph}", done.stdout
    assert done.returncode == 2  # make's status
    again = make("--collect-only -k 'test_gla and contiguous'")  # only failed tests
    assert len(re.findall(r"test_gla.py::\w+\[contiguous\]$", again.stdout, re.MULTILINE)) == 2, again.stdout
    assert "test_gla.py::test_values zigzag: 1 passed" in again.stdout, again.stdout
    told = peer.summary(peer.read(str(record)))
    assert "test_gla.py zigzag: 1 passed, 2 failed" in told, told
    assert sum(line.startswith("FAILED tests/ops/test_gla.py::") for line in told) == 4, told
