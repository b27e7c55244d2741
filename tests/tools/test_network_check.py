"""The command by which a cluster's user checks a network, on CPU ranks."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from allscan.bindings.arena import check_nodes
from allscan.tools import network_check
from support import ROOT
from support.network import compiler

pytestmark = pytest.mark.cpu


def program_case(arguments, port, checks, folder):
    """Run main() as in a process of torchrun, after which this rank has no process group; return its exit status."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    job = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ |= {name: str(value) for name, value in job.items()}
    network_check.CHECKS = checks or network_check.CHECKS
    with open(os.path.join(folder, f"output{rank}"), "w", buffering=1) as output:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            try:
                return network_check.main(arguments)
            except SystemExit as error:
                print(error, file=output)
                return 1


@pytest.fixture
def program(fresh, tmp_path):
    """Return program(size, *arguments): it returns for each rank (whether it succeeded, its output)."""

    def run(size, *arguments, checks=None):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        ranks = fresh(size)
        ranks.start(program_case, arguments, port, checks, str(tmp_path))
        ended = [value == 0 for value, _ in ranks.results(timeout=900)]  # None: its process has ended
        return [(ok, (tmp_path / f"output{rank}").read_text()) for rank, ok in enumerate(ended)]

    return run


def test_a_report(program, tmp_path):
    path = tmp_path / "report.txt"
    found = program(3, "--epochs", "10", "--output", str(path))
    report = path.read_text()
    assert all(ok for ok, _ in found), found
    assert found[0][1] == report and not found[1][1] and not found[2][1]
    for check in network_check.CHECKS:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        assert [line for line in report.splitlines() if line.startswith(name) and "right" in line], (name, report)
    assert "nodes                      (3,)" in report and "all is right" in report


def check_what_is_wrong(comm, epochs):
    network_check._compare(torch.full((2,), float(comm.rank)), torch.zeros(2), "a sum")


def test_a_wrong_result_ends_it(program):
    checks = {network_check.check_halo: 1.0, check_what_is_wrong: 1.0, network_check.check_zigzag: 1.0}
    found = program(2, "--epochs", "5", checks=checks)
    assert not any(ok for ok, _ in found), found
    report = found[0][1]
    assert "FAILED on rank 1: WrongResultError: a sum: off by 1.00e+00" in report, found
    assert "halo                       right" in report and "zigzag" not in report
    assert "NOT right" in report


def test_a_report_that_cannot_be_written(program, tmp_path):
    """All ranks end before the checks, with the reason; also without a launcher that ends the other ranks."""
    path = str(tmp_path / "no such folder" / "report.txt")
    for ok, output in program(3, "--epochs", "2", "--output", path):
        assert not ok and "the first rank cannot write its report to --output=" in output, output
        assert "No such file or directory" in output and "right" not in output


@pytest.mark.slow
def test_by_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "allscan.tools.network_check", "--epochs", "2"]
    variables = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and "all is right" in done.stdout, done


def test_one_process(program):
    ((ok, output),) = program(1, "--epochs", "1")
    assert not ok and "at least 2 processes" in output and "right" not in output, output


def test_a_full_disk():
    """Lines still go to standard output."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()) as errors:
        report = network_check.Report("/dev/full", True)
        for name in ("first", "second"):
            report.line(name, "right")
    assert printed.getvalue().count("right") == 2 and errors.getvalue().count("No space left on device") == 1


@pytest.mark.slow
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
