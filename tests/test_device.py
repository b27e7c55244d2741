"""All-Scan inside kernels of a user's own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

import allscan
from allscan import device
from support.values import error, late

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

recv, send = device.recv, device.send


@triton.jit
def dense_kernel(p_state, p_transition, p_initial, p_out, channel, V, K: tl.constexpr):
    """R_{p+1} = A_p R_p + S_p with a dense A [K, K]: columns of the state travel whole, rows cannot be cut."""
    tile = tl.program_id(0)
    NV = (V + channel.BV - 1) // channel.BV
    head, v = tile // NV, tile % NV * channel.BV + tl.arange(0, channel.BV)
    k = tl.arange(0, K)
    offsets = head * K * V + k[:, None] * V + v[None, :]
    inside = (v < V)[None, :]
    b_transition = tl.load(p_transition + head * K * K + k[:, None] * K + k[None, :])  # [K, K]
    b_state = tl.load(p_state + offsets, mask=inside, other=0.0)  # [K, BV]
    b_first = tl.load(p_initial + offsets, mask=inside, other=0.0)
    b_prev = recv(channel, tile, b_first)
    send(channel, tile, tl.dot(b_transition, b_prev, input_precision="ieee") + b_state)
    tl.store(p_out + offsets, b_prev, mask=inside)


def dense_case(group, protocol):
    with allscan.Communicator(group) as comm:
        heads, K, V = 2, 16, 40
        scan = allscan.AllScan(comm, (heads, K, V), tile=(K, 16), protocol=protocol)
        worst = 0.0
        for epoch in range(6):
            generator = torch.Generator().manual_seed(epoch)
            states = [torch.randn(heads, K, V, generator=generator) for _ in range(comm.size)]
            transitions = [torch.randn(heads, K, K, generator=generator) / 4 for _ in range(comm.size)]
            initial = torch.randn(heads, K, V, generator=generator)
            expected = initial.double()
            for state, transition in zip(states[: comm.rank], transitions):
                expected = transition.double() @ expected + state
            late(epoch, comm.rank, 5)
            mine = (x.to(comm.device) for x in (states[comm.rank], transitions[comm.rank], initial))
            out = torch.full((heads, K, V), float("nan"), device=comm.device)
            scan.launch(dense_kernel, (scan.num_tiles,), *mine, out, scan.channel(), V, K, num_warps=2)
            worst = max(worst, error(out, expected))
        return worst


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("protocol", ["sentinel", "signal"])
def test_dense_combine_between_recv_and_send(run, size, protocol):
    assert max(run(size, dense_case, protocol)) < 1e-5


def torchrun(script: str, ranks: int, on_gpu: bool) -> str:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")]))
    if not on_gpu:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), script]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def readme_blocks(language: str) -> list:
    text = open(os.path.join(ROOT, "README.md"), encoding="utf-8").read()
    return [part.split("```")[0] for part in text.split(f"```{language}\n")[1:]]


def test_programs_of_the_readme_run_as_pasted(request, tmp_path, size=2):
    programs = [block for block in readme_blocks("python") if "init_process_group" in block]
    assert len(programs) >= 2
    for i, program in enumerate(programs):
        path = tmp_path / f"readme{i}.py"
        path.write_text(program)
        assert "difference" in torchrun(str(path), size, request.config.getoption("--gpu"))
