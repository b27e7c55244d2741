"""Collectives of torch that a rank has abandoned: no later one gets their tokens."""

from __future__ import annotations

import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import allscan
from allscan import zigzag
from allscan.comm.process_groups import is_desynchronized
from allscan.integrations.softmax import Gather


def moved(comm, value):
    """Return the first channel of tokens moved to the zigzag layout; each rank's tokens are 10 value + rank."""
    x = torch.full((1, 4, 2), 10.0 * value + comm.rank)
    return zigzag.to_zigzag(x, comm=comm)[0, :, 0].tolist()


def failed(function, *arguments):
    try:
        return function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def anew(comm, how):
    """Synchronize the ranks in one of three ways; return the communicator to go on with."""
    if how == "resync":
        comm.resync()
        return comm
    failed(comm.close)
    return allscan.Communicator(dist.new_group() if how == "new group" else None, timeout=TIMEOUT)


TIMEOUT = 3.0


def rejected_case(how):
    """Rank 0 runs out of memory before its all-to-all; rank 1 abandons its own one after the time-out."""
    comm = allscan.Communicator(timeout=TIMEOUT)
    unflatten = torch.Tensor.unflatten

    def without_memory(*_):
        raise MemoryError("out of memory")

    if comm.rank == 0:
        torch.Tensor.unflatten = without_memory
    first = failed(moved, comm, 1)
    torch.Tensor.unflatten = unflatten
    if comm.rank == 0:
        time.sleep(TIMEOUT + 1)
    comm = anew(comm, how)
    found = [failed(moved, comm, value) for value in (2, 3)]
    prev = allscan.allscan(torch.ones(2, 4, 8), comm=comm)
    comm.barrier()
    return first, found, prev[0, 0, 0].item()


def skipped_case(how):
    """Rank 0 does not enter a call that it made before."""
    comm = allscan.Communicator(timeout=TIMEOUT)
    first = moved(comm, 1)
    if comm.rank == 1:
        failed(moved, comm, 2)
    else:
        time.sleep(TIMEOUT + 1)
    comm = anew(comm, how)
    return first, [failed(moved, comm, value) for value in (3, 4)], float(comm.rank)


@pytest.mark.slow(but=("rejected_case-new", "skipped_case-close"))
@pytest.mark.cpu
@pytest.mark.parametrize("how", ["resync", "close", "new group"])
@pytest.mark.parametrize("case", [rejected_case, skipped_case])
def test_tokens_of_an_abandoned_call(fresh, case, how):
    """With another process group they are right again; without, all ranks hear of it, and other calls go on."""
    for rank, (_, found, prev) in enumerate(fresh(2).run(case, how)):
        assert prev == rank
        if how == "new group":
            start = 20 if case is rejected_case else 30
            assert found == [[value + rank_of for rank_of in (0, 0, 1, 1)] for value in (start, start + 10)]
        else:
            assert all(text.startswith("RuntimeError") and "torch.distributed.new_group" in text for text in found)


def interrupted_case(what):
    """Ctrl-C while a rank waits for the other one."""
    comm = allscan.Communicator(dist.new_group(timeout=timedelta(seconds=TIMEOUT)), timeout=TIMEOUT)
    x = torch.ones(1, 4, 2)

    def gathered():
        return Gather(comm, [4, 4], False, x).read([0, 1])

    call = gathered if what == "gather" else lambda: moved(comm, 1)
    call()

    def interrupt(*_):
        raise KeyboardInterrupt

    if comm.rank == 1:
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        with pytest.raises(KeyboardInterrupt):  # raised when the wait ends, before any handler of its own error
            call()
    else:
        time.sleep(TIMEOUT + 1)
    comm.resync()
    return is_desynchronized(comm.group), failed(call)


@pytest.mark.slow(but="gather")
@pytest.mark.cpu
@pytest.mark.parametrize("what", ["to_zigzag", "gather"])
def test_an_interrupted_wait(fresh, what):
    for marked, answer in fresh(2).run(interrupted_case, what):
        assert marked and "RuntimeError" in answer and "torch.distributed.new_group" in answer


def dtypes_case():
    comm, answers = allscan.Communicator(timeout=60), []
    for dtype in (torch.uint16, torch.bool, torch.float8_e5m2, torch.complex64, torch.float64):
        x = (torch.arange(8.0).view(1, 4, 2) + 8 * comm.rank).to(comm.device, dtype)
        answers.append([x.float() if not x.is_complex() else x.real, zigzag.to_zigzag(x, comm=comm)])
        answers[-1].append(zigzag.from_zigzag(answers[-1][1], comm=comm))
    return [[x.cpu().to(torch.complex64) for x in some] for some in answers]


def test_dtypes_that_torch_does_not_send(fresh):
    """Tokens are moved as bytes."""
    first, second = fresh(2).run(dtypes_case)
    for (mine, moved_mine, back), (other, moved_other, other_back) in zip(first, second, strict=True):
        whole = torch.cat([mine, other], 1)
        assert torch.equal(back, mine) and torch.equal(other_back, other)
        assert torch.equal(moved_mine, whole[:, [0, 1, 6, 7]]) and torch.equal(moved_other, whole[:, 2:6])


def another_communicator_case():
    """Rank 1 knows of its abandoned call, and raises with another communicator of the group; rank 0 hears of it."""
    first, second = (allscan.Communicator(timeout=TIMEOUT) for _ in range(2))
    moved(second, 1)
    moved(first, 1)
    if first.rank == 1:
        failed(moved, first, 2)
    else:
        time.sleep(TIMEOUT + 1)
    answers = [failed(moved, second, 3)]
    second.resync()
    return [*answers, failed(moved, second, 4)]


@pytest.mark.cpu
def test_another_communicator_of_the_group(fresh):
    first, second = fresh(2).run(another_communicator_case)
    assert second[0].startswith("RuntimeError") and "rank 1 has rejected" in first[0].lower(), first
    assert all("torch.distributed.new_group" in answers[1] for answers in (first, second))
