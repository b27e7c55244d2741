"""The command by which a cluster's user checks a network: here on CPU ranks, by torchrun."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
import sys

import pytest

from allscan.bindings.arena import check_nodes
from allscan.tools import network_check
from support import ROOT
from support.network import compiler

pytestmark = pytest.mark.cpu

WRONG = """
import sys, torch, allscan
from allscan.tools import network_check
def check_what_is_wrong(comm, epochs):
    network_check._compare(torch.full((2,), float(comm.rank)), torch.zeros(2), "a sum")
network_check.CHECKS = {network_check.check_halo: 1.0, check_what_is_wrong: 1.0, network_check.check_zigzag: 1.0}
sys.exit(network_check.main())
"""


VARIABLES = {"TRITON_INTERPRET": "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def torchrun(*program, size=2):
    """Run a program with torchrun on this host."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size)]
    command += ["--master-addr", "127.0.0.1", "--master-port", free_port(), *program]
    return subprocess.run(command, cwd=ROOT, env=os.environ | VARIABLES, capture_output=True, text=True, timeout=900)


def one_by_one(*program, size):
    """Run ranks without a launcher that ends all when one has failed; return their results."""
    variables = os.environ | VARIABLES | dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(), WORLD_SIZE=str(size))
    options = dict(cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    ranks = [
        subprocess.Popen([sys.executable, *program], env=variables | dict(RANK=str(rank), LOCAL_RANK="0"), **options)
        for rank in range(size)
    ]
    try:
        found = [rank.communicate(timeout=900) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [subprocess.CompletedProcess(program, rank.returncode, *out) for rank, out in zip(ranks, found, strict=True)]


def test_a_report(tmp_path):
    path = tmp_path / "report.txt"
    module = ["-m", "allscan.tools.network_check"]
    done = torchrun(*module, "--epochs", "10", "--output", str(path), size=3)
    report = path.read_text()
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(line in done.stdout for line in report.splitlines())
    for check in network_check.CHECKS:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        assert [line for line in report.splitlines() if line.startswith(name) and "right" in line], (name, report)
    assert "nodes                      (3,)" in report and "all is right" in report


def test_a_wrong_result_ends_it(tmp_path):
    program = tmp_path / "wrong.py"
    program.write_text(WRONG)
    done = torchrun(str(program), "--epochs", "5")
    assert done.returncode != 0
    assert "FAILED on rank 1: WrongResultError: a sum: off by 1.00e+00" in done.stdout, done.stdout + done.stderr
    assert "halo                       right" in done.stdout and "zigzag" not in done.stdout
    assert "NOT right" in done.stdout


@pytest.mark.parametrize("launched", ["torchrun", "one by one"])
def test_a_report_that_cannot_be_written(tmp_path, launched):
    """All ranks end before the checks, with the reason; also without a launcher that ends the other ranks."""
    path = str(tmp_path / "no such folder" / "report.txt")
    program = ["-m", "allscan.tools.network_check", "--epochs", "2", "--output", path]
    if launched == "torchrun":
        done = [torchrun(*program, size=2)]
    else:
        done = one_by_one(*program, size=3)
    for one in done:
        assert one.returncode != 0 and "the first rank cannot write its report to --output=" in one.stderr, one
        assert "No such file or directory" in one.stderr and "right" not in one.stdout


def test_one_process():
    done = torchrun("-m", "allscan.tools.network_check", "--epochs", "1", size=1)
    assert done.returncode and "at least 2 processes" in done.stderr and "right" not in done.stdout, done


def test_a_full_disk():
    """Lines still go to standard output."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()) as errors:
        report = network_check.Report("/dev/full", True)
        for name in ("first", "second"):
            report.line(name, "right")
    assert printed.getvalue().count("right") == 2 and errors.getvalue().count("No space left on device") == 1


@pytest.mark.skipif(not compiler(), reason="needs a C compiler, cc")
def test_nodes_by_name_on_one_host():
    """Each torchrun has a node name, by which ranks without GPUs detect that they are on different hosts."""
    launcher = os.path.join(ROOT, "tests", "network", "launch_nodes.py")
    command = [sys.executable, launcher, "1,1", "-m", "allscan.tools.network_check", "--epochs", "1"]
    variables = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=900)
    assert done.returncode and "needs all ranks on one host, got node0-" in done.stdout + done.stderr, done


@pytest.mark.quick
def test_uneven_nodes():
    check_nodes(["a", "b", "a", "b"])
    with pytest.raises(RuntimeError, match="same number of ranks on every node, got 2 on a, 1 on b"):
        check_nodes(["a", "a", "b"])


@pytest.mark.quick
def test_what_the_launcher_has_not_said(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_PROCID", "0")
    with pytest.raises(SystemExit, match="WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set: start this by torchrun"):
        network_check.main([])
    monkeypatch.delenv("RANK", raising=False)
