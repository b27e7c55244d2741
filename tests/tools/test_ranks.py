"""Processes of ``Ranks``: late and large messages, ranks that hang or die, a parent that dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from allscan.tools.ranks import Ranks

pytestmark = pytest.mark.cpu


def sleep_case(seconds, nbytes=0):
    time.sleep(seconds)
    return bytes(nbytes)


def length_case(data):
    return len(data)


def die_case(rank):
    import torch.distributed as dist

    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return dist.get_rank()


def test_large_messages_after_a_call_that_timed_out():
    """The rank still sends its late answer while the parent sends the arguments of the next call."""
    with Ranks(1, "cpu") as ranks:
        with pytest.raises(RuntimeError, match="rank 0 did not answer within 0.5 s"):
            ranks.run(sleep_case, 2.0, 20 << 20, timeout=0.5)
        assert ranks.run(length_case, bytes(20 << 20)) == [20 << 20]


def test_ranks_that_hang_are_killed_together():
    ranks = Ranks(3, "cpu")
    ranks.run(sleep_case, 0.0)
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 2 did not answer"), ranks:
        ranks.run(sleep_case, 600.0, timeout=0.5)
    assert time.monotonic() - begun < 60.0
    assert not any(process.is_alive() for process in ranks.processes)


def test_a_call_after_a_rank_has_died():
    with Ranks(2, "cpu") as ranks:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"the process of rank 1 has ended \(exit code -9\)"):
                ranks.run(die_case, 1)


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


PROGRAM = """
import os, sys, time
from allscan.tools.ranks import Ranks

if __name__ == "__main__":
    ranks = Ranks(2, "cpu")
    print(*ranks.run(os.getpid), flush=True)
    ranks.run(time.sleep, 600.0)
"""


def test_ranks_end_when_their_parent_is_killed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 2
    deadline = time.monotonic() + 60.0
    while any(map(runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(runs, pids))
