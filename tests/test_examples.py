"""Every example runs from its printed command; each compares itself with the unsplit sequence."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@pytest.mark.parametrize(
    "command",
    [
        "own_kernel.py",
        "any_recurrence.py",
        "prefill_decode.py",
        "same_bits.py",
        "hybrid.py",
        "train_fsdp.py",
        "train_transformers.py",
        "train_text.py --steps 2 --length 64 --out {folder}/train",
    ],
)
def test_example(command, tmp_path):
    run_example([sys.executable], command, tmp_path)


@pytest.mark.cpu
@pytest.mark.parametrize("command", ["own_kernel.py", "prefill_decode.py --length 1 --tokens 4", "same_bits.py"])
def test_example_under_torchrun(command, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    run_example(torchrun, command, tmp_path, TRITON_INTERPRET="1")


def run_example(launcher, command, tmp_path, **variables):
    script, *options = command.format(folder=tmp_path).split()
    if script == "train_transformers.py":
        pytest.importorskip("transformers", minversion="5.18", reason="needs transformers")
        pytest.importorskip("accelerate", reason="needs accelerate")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= variables
    environment["PYTHONPATH"] = os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])  # a bare checkout
    result = subprocess.run(
        [*launcher, os.path.join(ROOT, "examples", script), *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [line for line in result.stdout.splitlines() if "rank" in line]
    assert lines and len(lines) == len(set(lines)), result.stdout  # rank 0 alone prints
