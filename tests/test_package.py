"""The package as a whole: layers, import, installation, documentation."""

from __future__ import annotations

import ast
import glob
import inspect
import os
import subprocess
import sys
import time

import pytest

import allscan
import allscan.device
from allscan.bindings import nvshmem_device

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LAYERS = ["bindings", "shmem_kernels", "allscan"]  # each may import those to its left, and itself


def imported_layers(path):
    """Layers of this project that a file imports."""
    for node in ast.walk(ast.parse(open(path, encoding="utf-8").read())):
        if isinstance(node, ast.ImportFrom):
            names = [("." * node.level) + (node.module or "")]
            names += [names[0] + "." + alias.name for alias in node.names] if not node.module else []
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.strip(".").split(".")
            parts = parts[1:] if parts[0] == "allscan" and len(parts) > 1 else parts
            if parts[0] in LAYERS or parts[0] in ("tests", "bench", "examples"):
                yield parts[0]


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_know_only_what_is_below_them(layer):
    allowed = LAYERS[: LAYERS.index(layer) + 1]
    for path in glob.glob(os.path.join(ROOT, layer, "*.py")):
        text = open(path, encoding="utf-8").read()
        assert set(imported_layers(path)) <= set(allowed), path
        if layer == "shmem_kernels":
            assert "torch.distributed" not in text and "import torch" not in text, path


def test_import_is_quick_and_needs_no_gpu():
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES="", PYTHONPATH=ROOT)
    code = "import time, torch; start = time.perf_counter(); import allscan; print(time.perf_counter() - start)"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)  # warms the file cache
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    whole, own = time.perf_counter() - start, float(done.stdout)
    assert own < 1 and (whole < 3 or whole - own > 2), (whole, own)  # some machines need over 2 s for torch alone


@pytest.mark.cpu
def test_installed_package_imports_outside_the_checkout(tmp_path):
    target = str(tmp_path / "site")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        target,
        ROOT,
    ]
    subprocess.run(command, check=True, capture_output=True)
    code = "import allscan, allscan.device, allscan.bindings.heap as h; print(allscan.__file__, h.__file__)"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": target}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert all(path.startswith(target) for path in done.stdout.split())
    assert sorted(name for name in os.listdir(target) if not name.endswith("info") and name != "bin") == ["allscan"]


def test_public_things_are_documented():
    public = [getattr(allscan, name) for name in allscan.__all__]
    public += [getattr(allscan.device, name).fn for name in allscan.device.__all__ if name[0].islower()]
    public += [f for name, f in vars(nvshmem_device).items() if inspect.isfunction(f) and not name.startswith("_")]
    for thing in public:
        assert inspect.getdoc(thing), thing


@pytest.mark.cpu
def test_doctor():
    done = subprocess.run(
        [sys.executable, "-m", "allscan", "doctor"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("torch", "triton", "NVSHMEM", "transport   shm", "GPU tests", "self-test   2 ranks on cpu"):
        assert word in done.stdout
    assert subprocess.run([sys.executable, "-m", "allscan"], cwd=ROOT, capture_output=True).returncode == 2
