"""Every kernel under NVIDIA's compute-sanitizer: reads and writes outside of allocations, races in shared memory.

    compute-sanitizer --tool memcheck python tests/gpu/test_sanitizer.py

One GPU. Each tensor has its own allocation, so that a read past its end cannot hit another tensor.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import types

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
if __name__ == "__main__":
    sys.path[:0] = [ROOT, os.path.join(ROOT, "tests")]

import torch  # noqa: E402

import allscan  # noqa: E402
from allscan.launch.streams import Streams  # noqa: E402
from allscan.ops.carrier import AllScanCarrier, IncomingStates  # noqa: E402
from allscan.ops.delta import delta_passes  # noqa: E402
from allscan.ops.delta.delta_passes import ChunkOperands, DeltaShape, LocalGrads  # noqa: E402
from allscan.reference import allscan_reference  # noqa: E402
from allscan.tokens.packing import Layout, TokenRange  # noqa: E402
from support.delta import saved_states_for  # noqa: E402
from support.gla import BF16, F32, NAMES, GLACase, Whole  # noqa: E402
from support.values import relative_all  # noqa: E402
from support.virtual import VirtualRanks  # noqa: E402

pytestmark = pytest.mark.gpu

# T, B, H, K, V, gates, dtype, boundaries of packed sequences
GLA = [
    (150, 1, 2, 64, 48, "mixed", BF16, None),
    (130, 1, 1, 128, 128, "mild", BF16, (0, 0, 1, 64, 64, 130)),
    (70, 2, 1, 40, 24, "strong", F32, None),
    (70, 1, 1, 256, 64, "mixed", BF16, None),
]


def every_kernel() -> None:
    """Run each kernel in shapes that fill no block; check against float64."""
    with allscan.Communicator() as comm:
        for T, B, H, K, V, kind, dtype, lengths in GLA:
            whole = Whole(GLACase([T], B=B, H=H, K=K, V=V, gates=kind, dtype=dtype, lengths=lengths), comm.device)
            errors = relative_all(NAMES, whole.ours(comm, slice(None)), whole.reference())
            assert max(errors.values()) < (1e-5 if dtype == F32 else 2e-2), (K, V, kind, errors)
        for K, V in ((24, 40), (128, 128), (200, 64)):
            state, transition = (torch.randn(3, K, width, device="cuda") for width in (V, K))
            tile = allscan.base.tiling.transition_tile(K)
            with allscan.AllScan(comm, (3, K, V), tile=tile) as scan:
                for reverse, adjoint in itertools.product((False, True), repeat=2):
                    scan.scan(state, transition=transition, transpose=adjoint, initial_state=state, reverse=reverse)
    delta_kernels()
    for protocol, shape in itertools.product(("sentinel", "signal"), ((3, 20, 36), (2, 64, 128))):
        ranks = VirtualRanks(3, shape, protocol=protocol)
        for reverse in (False, True, False, True, False):
            states, decays = torch.randn(3, *shape, device="cuda"), torch.rand(3, *shape[:2], device="cuda")
            outs = torch.full_like(states, float("nan"))
            for rank in range(3)[:: -1 if reverse else 1]:  # no rank waits: kernels may run one at a time
                outs[rank] = ranks.scan(states, decays, reverse=reverse, ranks=[rank])[rank]
                ranks.check()
            expected = allscan_reference(list(states), list(decays), reverse=reverse)
            assert max((out - e).abs().max() for out, e in zip(outs, expected)) < 1e-5
    print("every kernel has run")


def delta_kernels() -> None:
    """Run the kernels between the chunks of delta rules, as on a middle rank whose neighbours send 0."""

    class Nobody:
        def record(self, plan, carried, *_):
            plan.call_python(lambda _, x: x.zero_(), carried.out)

        def stream(self):
            return streams.side()

    device = torch.device("cuda", torch.cuda.current_device())
    streams = Streams(device)
    carriers = {(AllScanCarrier, True): Nobody()}
    middle = types.SimpleNamespace(size=3, device=device, attributes=carriers)
    for K, V, dtype, scalar in (
        (128, 128, BF16, False),
        (128, 64, BF16, True),
        (40, 24, F32, False),
        (100, 16, F32, False),
        (200, 40, F32, True),
        (200, 48, BF16, True),
    ):
        H, T = 2, 300
        layout = Layout([TokenRange(0, T)], 1, 128, middle.device)
        states = delta_passes.StatePass(middle, layout, DeltaShape(1, H, H, K, V, dtype, scalar))
        q, k, w = (torch.randn(1, T, H, K, device="cuda", dtype=dtype) / K**0.5 for _ in range(3))
        u, do, dv = (torch.randn(1, T, H, V, device="cuda", dtype=dtype) for _ in range(3))
        sums = -torch.rand((1, T, H) if scalar else (1, T, H, K), device="cuda")
        saved_states = saved_states_for(states)
        between = ChunkOperands(k, w, u, sums, q)
        h, v_new = states.forward(between._replace(q=None), None, None, saved_states)
        scores = torch.randn(1, T, H, 64, device="cuda", dtype=dtype)
        d = LocalGrads(do, dv) if scalar else LocalGrads(do, None, scores)
        _, _, *incoming = states.turn(between, d, None, saved_states, 0.1)
        dh, dv = states.backward(between, LocalGrads(do, dv), IncomingStates(*incoming), None, 0.1)
        if scalar:
            gradients = states.gradients(between, v_new, LocalGrads(do, dv), (h, dh), 0.1)
            assert all(x.isfinite().all() for x in gradients)
        assert all(x.isfinite().all() for x in (h, v_new, dh, dv)), (K, V, dtype)


def test_no_kernel_is_caught(tmp_path):
    """memcheck and racecheck run at the same time: each takes minutes."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.path.exists(sanitizer):
        pytest.skip("compute-sanitizer is not installed")
    runs = {}
    for i, tool in enumerate(("memcheck", "racecheck")):
        gpu = str(i % torch.cuda.device_count())
        environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_VISIBLE_DEVICES": gpu}
        command = [sanitizer, "--tool", tool, "--print-limit", "100000", sys.executable, os.path.abspath(__file__)]
        with open(tmp_path / tool, "w") as file:
            runs[tool] = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
    try:
        for tool, run in runs.items():
            caught_nothing(tool, run.wait(timeout=900), (tmp_path / tool).read_text())
    finally:
        for run in runs.values():
            run.kill()


def caught_nothing(tool, returncode, said):
    if "Device not supported" in said:
        pytest.skip("compute-sanitizer does not run on this machine")
    assert returncode == 0 and "every kernel has run" in said, (tool, said[-4000:])
    assert "SUMMARY" in said, (tool, said[-4000:])
    # Triton changes layouts after a reduction by a store of the sum from every lane of a warp to one address. Two
    # writes of one instruction are such a store; any other hazard is an error.
    hazards = re.findall(r"(\w+) access at (\S+).*\n=+ +and (\w+) access at (\S+)", said)
    wrong = [h for h in hazards if not (h[0] == h[2] == "Write" and h[1] == h[3])]
    assert not wrong and len(hazards) == said.count("Race reported"), (tool, said[-4000:])
    assert tool == "racecheck" or "ERROR SUMMARY: 0 errors" in said, (tool, said[-4000:])


if __name__ == "__main__":
    every_kernel()
