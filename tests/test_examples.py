"""Every example runs, and compares itself with the unsplit sequence."""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys

import pytest
import torch

from support import ROOT

EXAMPLES = os.path.join(ROOT, "examples")


@pytest.mark.slow(but=("prefill", "same_bits"))
@pytest.mark.parametrize(
    "command",
    [
        "any_recurrence.py",
        "prefill_decode.py",
        "same_bits.py",
        "hybrid.py",
        "long_sequence.py",
        "train_fsdp.py",
        "train_hybrid_fsdp.py",
        "train_text.py --steps 2 --length 64 --out {folder}/train",
    ],
)
def test_example(fresh, command, tmp_path, monkeypatch, capsys):
    """Its main() runs on as many ranks as its printed command starts; they have the package loaded."""
    script, *options = command.format(folder=tmp_path).split()
    gpus = torch.cuda.device_count()
    size = gpus if gpus > 1 else 2 if script == "same_bits.py" else 4
    monkeypatch.setattr(sys, "argv", [script, *options])
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module(script.removesuffix(".py"))
    main = functools.partial(example.main, example.options_of()) if hasattr(example, "options_of") else example.main
    assert main(fresh(size)) == 0
    assert "rank" in capsys.readouterr().out


def test_the_text_suffices_for_all_sequences_on_gpus(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("train_hybrid_fsdp")
    monkeypatch.setattr(example, "LENGTH", 16384)
    first, last = example.sequences(0, 4), example.sequences(19, 4)
    assert first.shape == last.shape == (2, 4, 16384) and not torch.equal(first, last)
    assert torch.equal(first.flatten()[:1000], example.text_bytes()[:1000])


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher, command",
    [
        ("", "own_kernel.py"),
        ("", "train_transformers.py --steps 3"),
        pytest.param(
            "-m torch.distributed.run --nproc-per-node 2",
            "prefill_decode.py --length 1 --tokens 4",
            marks=pytest.mark.cpu,
        ),
    ],
)
def test_its_printed_command(launcher, command):
    """With a kernel of the program itself, in a process without fla, and by torchrun."""
    script, *options = command.split()
    if script == "train_transformers.py":
        pytest.importorskip("transformers", minversion="5.18", reason="needs transformers")
        pytest.importorskip("accelerate", reason="needs accelerate")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_INTERPRET": "1"} if launcher else {}
    environment["PYTHONPATH"] = os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])  # a bare checkout
    result = subprocess.run(
        [sys.executable, *launcher.split(), os.path.join(EXAMPLES, script), *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [line for line in result.stdout.splitlines() if "rank" in line]
    assert lines and len(lines) == len(set(lines)), result.stdout  # rank 0 alone prints
