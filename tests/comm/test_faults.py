"""No endless wait and no silent wrong number: stragglers, dead and disagreeing ranks, bad input, full memory."""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import gc
import inspect
import os
import pickle
import signal
import tempfile
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import conftest
import numpy
import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

import allscan
from allscan import device
from allscan.base import errors
from allscan.bindings.arena import Arena
from allscan.bindings.shared_memory import SharedMemoryHeap
from allscan.comm import communicator, heap, host_exchange, places
from support.faults import TIMEOUT, poisoned_case, scan_until_timeout
from support.fla import import_fla
from support.scans import error_of
from support.values import error, raised, raised_and_freed


def never_calls_case(absent):
    comm = allscan.Communicator(timeout=TIMEOUT)
    scan = allscan.AllScan(comm, (2, 4, 8), depth=2, tile=(4, 8))
    if comm.rank == absent:
        time.sleep(3 * TIMEOUT)
        answer = None
    else:
        seconds, record, message = scan_until_timeout(comm, scan, 4)
        again = raised(scan.scan, torch.ones(scan.shape, device=comm.device))
        start = time.monotonic()
        comm.close()  # waits for no rank
        answer = (seconds, record, message, again[0], time.monotonic() - start)
    with allscan.Communicator() as other:  # all ranks have returned: a new communicator works
        return answer, error_of(other, functools.partial(allscan.allscan, comm=other), (2, 4, 8), 1) < 1e-6


def test_a_rank_that_never_calls(fresh, size=3):
    answers = fresh(size).run(never_calls_case, 1)
    assert all(good for _, good in answers)
    for rank, neighbour, expected in ((0, 1, 1), (2, 1, 1)):
        seconds, record, message, again, closing = answers[rank][0]
        assert TIMEOUT <= seconds < 60, seconds
        assert (record[0], record[1], record[3]) == (rank, neighbour, expected), record
        assert record[2] in (0, 1)
        assert f"rank {rank} waited {TIMEOUT:g} s for rank {neighbour}" in message and "epoch" in message
        assert again == "AllScanTimeout"
        assert closing < TIMEOUT + host_exchange.GRACE_S  # the limit of a wait for the absent rank


@pytest.mark.parametrize("protocol", ["sentinel", "signal"])
def test_a_wait_that_timed_out_gives_nan(fresh, protocol):
    assert fresh(2).run(poisoned_case, 0, protocol) == [None, True]


def zeco_timeout_case(absent):
    """Tokens whose state did not arrive are NaN; tokens of a sequence that begins after them are not."""
    comm = allscan.Communicator(timeout=TIMEOUT)
    x = torch.ones(1, 20, 1, 16, device=comm.device)

    def call():
        return allscan.zeco_gla(x, x, x, -0.1 * x, comm=comm, cu_seqlens=[0, 25, 40])[0]

    call()
    comm.barrier()
    if comm.rank == absent:
        time.sleep(2 * TIMEOUT)
        return None
    try:
        o = call()
        poisoned = o.isnan().any((0, 2, 3))  # on GPUs; in the interpreter the call itself raises
        assert poisoned[:5].all() and not poisoned[5:].any()
        comm.check()
    except allscan.AllScanTimeout as timeout:
        return timeout.rank, timeout.neighbour


def test_zeco_gla_without_its_neighbour(fresh):
    assert fresh(2).run(zeco_timeout_case, 0) == [None, (1, 0)]


def left_out_case(ended):
    """Return the message of a time-out after rank 1 has left out the backward of step 2, or ``ended`` before step 2."""
    comm = allscan.Communicator(timeout=TIMEOUT)
    for step in (1, 2, 3):
        comm.step()
        x = torch.ones(1, 20, 1, 16, device=comm.device, requires_grad=True)
        try:
            for one_pass in ("forward", "backward"):
                if one_pass == "forward":
                    o, _ = allscan.zeco_gla(x, x, x, -0.1 * x.detach(), comm=comm)
                elif (comm.rank, step) != (1, 2):
                    o.sum().backward()
                comm.streams.synchronize()  # a host is in the call that its GPU is in
                comm.check()
        except allscan.AllScanTimeout as timeout:
            return str(pickle.loads(pickle.dumps(timeout)))
        if (comm.rank, ended) == (1, True):
            time.sleep(3 * TIMEOUT)
            return None


@pytest.mark.parametrize("ended", [False, True])
def test_a_time_out_names_the_calls_of_both_ranks(fresh, ended):
    first, second = fresh(2).run(left_out_case, ended)
    shape = "zeco_gla (tokens [1, 20], H 1, K 16, V 16)"
    mine = f"Rank 0 has made 2 forward and 2 reverse calls, the last is the backward of {shape}, in step 2"
    mine += ", and has given up a scan of [1, 16, 16], from the last rank to the first"
    if ended:
        assert f"{mine}; rank 1 has reported nothing for 2 s. {errors.REMEDY}" in first and second is None, first
    else:
        other = f"ank 1 has made 3 forward and 1 reverse calls, the last is {shape}, in step 3"
        other += ", and has given up a scan of [1, 16, 16], from the first rank to the last"
        assert f"{mine}; r{other}" in first and f"R{other}; r{mine[1:]}" in second, (first, second)
        fewer = "Rank 1 is in a later step and has made fewer reverse calls, such as backwards, than rank 0. "
        assert fewer in first and fewer in second, (first, second)


@pytest.mark.cpu
@pytest.mark.quick
@pytest.mark.parametrize(
    "there, here, left_out",
    [
        ((2, 2, 2), (3, 1, 3), "reverse call"),
        ((3, 1, 2), (2, 2, 3), "forward call"),
        ((2, 2, 2), (2, 2, 3), None),  # late only
        ((2, 2, 2), (3, 1, 2), None),  # the same step: rank 1 may be late
        ((2, 2, 0), (3, 1, 3), None),  # step() was never called
    ],
)
def test_fewer_calls_are_only_told_if_the_counts_say_so(there, here, left_out):
    """Rank 1 is ``here``, rank 0 ``there``: (forward calls, reverse calls, steps)."""
    found = places.told(
        {1: places.Place(*here[:2], "a call", here[2]), 0: places.Place(*there[:2], "a call", there[2])}
    )
    assert ("has made fewer" in found) == (left_out is not None) and found.startswith("Rank 1 has made"), found
    assert left_out is None or f"Rank 1 is in a later step and has made fewer {left_out}" in found, found


def ignored_results_case(timeout):
    """Return the seconds until the error, and its type: no rank runs a backward, and rank 1 skips an iteration."""
    comm, begin = allscan.Communicator(timeout=timeout), time.monotonic()
    x = torch.ones(1, 20, 1, 16, device=comm.device, requires_grad=True)
    try:
        for step in range(1, 7):
            comm.step()
            if (comm.rank, step) != (1, 3):
                allscan.zeco_gla(x, x, x, -0.1 * x.detach(), comm=comm)
    except errors.AllScanError as error:
        return time.monotonic() - begin, type(error).__name__


@pytest.mark.cpu
@pytest.mark.slow
def test_calls_without_a_backward_wait_once_for_a_rank_that_has_stopped(fresh, timeout=8.0):
    """Each of rank 0's further calls looks for a backward on rank 1, which has reported its error at once."""
    first, second = fresh(2).run(ignored_results_case, timeout)
    assert first[1] == "AllScanTimeout" and second[1] == "AllScanOutOfStep", (first, second)
    assert first[0] < 2.5 * timeout, first  # 4 time-outs if each call waited


@triton.jit
def shift_kernel(p_out, channel):
    b_ones = tl.full([channel.BK, channel.BV], 1.0, tl.float32)
    tl.store(p_out + tl.arange(0, channel.BV)[None, :], device.shift(channel, 0, b_ones, b_ones))


def uncounted_case(made, launched):
    """After ``made`` calls the message of the last of ``launched`` launches that are no calls, as in replays of a CUDA
    graph, which rank 0 leaves out."""
    comm = allscan.Communicator(timeout=TIMEOUT)
    scan = allscan.AllScan(comm, (1, 8), tile=(1, 8))
    out = torch.zeros(1, 8, device=comm.device)
    for _ in range(made):
        scan.scan(out)
    for _ in range(launched - (comm.rank == 0)):
        shift_kernel[(1,)](out, scan.channel(), num_warps=1)
    return None if comm.rank == 0 else raised(comm.barrier)[1]


@pytest.mark.cpu
@pytest.mark.parametrize("made, launched", [(0, 2), (2, 1)])
def test_a_time_out_tells_launches_that_the_host_has_not_counted(fresh, made, launched):
    message = fresh(2).run(uncounted_case, made, launched)[1]
    known = f"Rank 1 has made {made} forward and 0 reverse calls"
    assert known in message and ", and has given up a scan of [1, 8], from the first rank to the last" in message
    assert ("its device has come to scan 2 of a shape, more than its host has made calls" in message) == (made == 0)


def scan_for_ever(folder):
    comm = allscan.Communicator(timeout=TIMEOUT)
    scan = allscan.AllScan(comm, (2, 4, 8))
    scan.scan(torch.ones(scan.shape, device=comm.device))
    comm.barrier()
    open(os.path.join(folder, str(comm.rank)), "w").close()
    if comm.device.type == "cuda":
        state = torch.ones(scan.shape, device=comm.device)
        start = time.monotonic()
        try:
            while time.monotonic() - start < 60:
                scan.scan(state)
                torch.cuda.synchronize()
        except allscan.AllScanTimeout as timeout:
            return time.monotonic() - start, (timeout.rank, timeout.neighbour)
    seconds, record, _ = scan_until_timeout(comm, scan, 100_000)
    return seconds, record and record[:2]


def test_a_rank_killed_in_mid_scan(fresh, request, tmp_path, size=2):
    size = min(3, conftest.count_of_ranks(request.config)) if request.config.getoption("--gpu") else 3
    ranks = fresh(size)
    victim, before = size - 2, set(os.listdir("/dev/shm"))
    ranks.start(scan_for_ever, tmp_path)
    deadline = time.monotonic() + 120
    while len(os.listdir(tmp_path)) < size and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.5)
    os.kill(ranks.processes[victim].pid, signal.SIGKILL)
    answers = ranks.results()
    for rank, (value, problem) in enumerate(answers):
        if rank == victim:
            assert "has ended (exit code -9)" in str(problem)
        else:
            assert problem is None, problem
            assert value[1] == (rank, victim), value
    left = {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("allscan-")}
    deadline = time.monotonic() + 120
    while left and time.monotonic() < deadline:  # for a moment ranks of other tests have names there
        time.sleep(0.1)
        left &= set(os.listdir("/dev/shm"))
    assert not left


def disagree_case(group):
    """Return ([(expected type of this rank's error, a text of it, the error)], difference of a right call)."""
    with allscan.Communicator(group) as comm:
        me, device = comm.rank, comm.device

        def make(*shape, dtype=torch.float32, device=device):
            return torch.zeros(shape, dtype=dtype, device=device)

        def call(*tensors):
            return raised(allscan.allscan, *tensors, comm=comm)

        def scan(*shape, **options):
            return raised(allscan.AllScan, comm, shape, **options)

        def made(**options):
            return raised(allscan.Communicator, group, **options)

        other, odd = "meta" if device.type == "cpu" else "cpu", torch.float64 if me else torch.float32
        answers = [
            ("ValueError", "different arguments", call(make(2, 4, 8 + me))),
            ("TypeError" if me else "ValueError", "float64", call(make(2, 4, 9, dtype=odd))),
            ("ValueError", "must be on", call(make(2, 4, 10, device=other))),
            ("ValueError", "broadcastable", call(make(2, 4, 11), make(2, 5))),
            ("TypeError", "float16", call(make(2, 4, 12), make(2, 4, dtype=torch.float16))),
            ("ValueError", "[..., K, V]", call(make(8))),
            ("TypeError", "str", call("state")),
            ("ValueError", "different arguments", scan(2, 4, 8, depth=1 + me)),
            ("ValueError", "depth", scan(2, 4, 8, depth=0)),
            ("ValueError", "protocol", scan(2, 4, 8, protocol="carrier pigeon")),
            ("ValueError", "powers of two", scan(2, 4, 8, tile=(3, 8))),
            ("MemoryError", "ALLSCAN_HEAP", scan(1, 1 << 14, 1 << 14)),
            ("ValueError", "timeout", made(timeout=0)),
            ("ValueError", "timeout", made(timeout=float("inf"))),
            ("ValueError", "transport", made(transport="smoke signals")),
            ("ValueError", "ProcessGroup", raised(allscan.Communicator, "group")),
        ]
        for wrong in (dict(timeout=-1), dict(timeout="5"), dict(max_ctas=0), dict(transport="pigeon")):
            [name] = wrong
            text = f"rank 0: ok; rank 1: ValueError: {name} must be"
            answers.append(("ValueError", text, made(**(wrong if me else {}))))
        healthy = error(allscan.allscan(make(2, 4, 8) + 1, comm=comm), torch.full((2, 4, 8), float(me)))
    answers.append(("RuntimeError", "closed", call(make(2, 4, 8))))
    return answers, healthy


def test_errors_are_clear_and_on_every_rank(run):
    for rank, (answers, healthy) in enumerate(run(2, disagree_case)):
        for kind, text, answer in answers:
            assert answer is not None and answer[0] == kind and text in answer[1], (rank, kind, text, answer)
        assert healthy == 0


def init_case():
    """Return this rank's error of each init() with a wrong argument or another source on rank 1; then whether a
    Communicator works."""
    rank, answers = dist.get_rank(), []
    for wrong in (dict(heap_bytes=-5), dict(heap_bytes="x"), dict(heap_bytes=1 << 20), dict(transport="pigeon")):
        answers.append(raised(allscan.init, **(wrong if rank else {})))
    with mock.patch.object(heap, "source_hash", lambda: f"sources {rank}"):
        answers.append(raised(allscan.init))
    with mock.patch.dict(os.environ, {"ALLSCAN_HEAP": "1MK" if rank else "1M"}):
        answers.append(raised(allscan.Communicator))
    wrong_transport = {"ALLSCAN_TRANSPORT": "carrier pigeon" if rank else "nvshmem"}
    with mock.patch.dict(os.environ, wrong_transport):
        answers.append(raised(allscan.Communicator))
    with mock.patch.object(heap, "SharedMemoryHeap", raises) if rank else contextlib.nullcontext():
        answers.append(raised(allscan.init))
    with allscan.Communicator() as comm:
        with mock.patch.dict(os.environ, wrong_transport):
            answers.append(raised(allscan.Communicator))  # with an arena
        full = mock.patch.object(communicator, "Memory", side_effect=torch.OutOfMemoryError("no memory"))
        with full if rank else contextlib.nullcontext():
            answers.append(raised(allscan.Communicator))
        return answers, allscan.allscan(torch.ones(1, 2, 2), comm=comm)[0, 0, 0].item() == rank


def raises(*_):
    raise MemoryError("no memory")


@pytest.mark.cpu
def test_init_raises_on_every_rank(fresh):
    """An error of one rank, before any exchange or between two, ends init() on all; the next one works."""
    texts = ["at least 512", "an integer", "differ in heap_bytes", "transport must be", "differ in sources"]
    texts += ["ALLSCAN_HEAP", "ALLSCAN_TRANSPORT", "no memory"]
    texts += ["rank 1: ValueError: ALLSCAN_TRANSPORT", "rank 1: OutOfMemoryError"]
    for answers, works in fresh(2).run(init_case):
        assert works
        for answer, text in zip(answers, texts, strict=True):
            assert answer is not None and text in answer[1], (answer, text)


@pytest.mark.cpu
def test_a_missing_transport_names_what_to_install():
    for transport in ("nvshmem", "ipc"):
        with pytest.raises(RuntimeError, match=f"'{transport}' needs a CUDA device"):
            allscan.Communicator(transport=transport)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        allscan.Communicator()
    from allscan.bindings.nvshmem_host import load

    with pytest.raises(RuntimeError, match="pip install nvshmem4py-cu13"):
        load()


def two_threads_case():
    """Two threads have a communicator each and call it in their own order. On GPUs, with a stream each, results are
    right. The interpreter runs one kernel at a time: it raises before the launch, and every returned result is
    right."""
    comms = [allscan.Communicator(timeout=TIMEOUT) for _ in range(2)]
    state, found = torch.ones(2, 4, 8, device=comms[0].device), [[], []]
    for comm in comms:
        allscan.allscan(state, comm=comm)

    def calls(i):
        if state.is_cuda:
            torch.cuda.set_device(state.device)  # the current device belongs to a thread
            # on one stream launches of two threads would come in any order, and wait for one another
            torch.cuda.set_stream(torch.cuda.Stream())
        for _ in range(200):
            try:
                prev = allscan.allscan((i + 1) * state, comm=comms[i])
                found[i].append(bool((prev == (i + 1) * comms[i].rank).all()))
            except RuntimeError as problem:
                found[i].append(f"{type(problem).__name__}: {problem}")
                return

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(calls, range(2)))
    return found


def test_two_threads(fresh, request):
    errors = []
    for found in fresh(2).run(two_threads_case):
        for of_a_thread in found:
            assert of_a_thread and all(x is True for x in of_a_thread[:-1]), of_a_thread
            errors += [x for x in of_a_thread if x is not True]
    assert "InterpreterError" not in str(errors)
    if request.config.getoption("--gpu"):
        assert not errors, errors
    else:
        assert any("another thread of this process is inside of a kernel" in x for x in errors), errors


class Unportable(Exception):
    """An exception that can be pickled, but not unpickled."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def answer_late(seconds, value):
    time.sleep(seconds)
    if value is None:
        raise Unportable("this", "that")
    return value


@pytest.mark.cpu
def test_answers_belong_to_their_call(fresh):
    ranks = fresh(1)
    assert ranks.run(answer_late, 0, "first") == ["first"]
    with pytest.raises(RuntimeError, match="did not answer within 0.2 s"):
        ranks.run(answer_late, 3, "late", timeout=0.2)
    assert ranks.run(answer_late, 0, "next") == ["next"]
    with pytest.raises(RuntimeError, match="Unportable: this and that"):
        ranks.run(answer_late, 0, None)
    assert ranks.run(answer_late, 0, "last") == ["last"]


def test_shared_memory_is_private_and_leaves_nothing():
    modes = []

    def exchange(value):
        if isinstance(value, tuple):
            modes.append(os.stat(value[1]).st_mode & 0o777)
        return [value]

    heap = SharedMemoryHeap(exchange, 1 << 20)
    assert modes == [0o600]
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("allscan-")]
    heap.view(0, 512, 4, torch.float32).fill_(3.0)
    assert heap.local(0, 512, 4, torch.float32).tolist() == [3.0] * 4


@pytest.mark.quick
def test_heap_gives_back_and_says_when_it_is_full():
    heap = Arena(4096)
    offsets = [heap.alloc(1000) for _ in range(4)]
    assert offsets == [0, 1024, 2048, 3072]
    with pytest.raises(MemoryError, match=r"512 bytes asked for, 0 of 4,096 free.*ALLSCAN_HEAP"):
        heap.alloc(1)
    for offset in (1024, 3072, 0, 2048):
        heap.free(offset)
    assert heap.alloc(4096) == 0


def order_case(group):
    """Every rank makes the same launches until the last."""
    with allscan.Communicator(group, debug=True) as comm:
        scans = [allscan.AllScan(comm, (1, 4, 8 * (i + 1))) for i in range(2)]
        state = [torch.ones(scan.shape, device=comm.device) for scan in scans]
        for i in (0, 1):
            scans[i].scan(state[i])
        scans[0].scan(state[0], reverse=True)
        messages = []
        for i, reverse in ((comm.rank == 1, False), (0, comm.rank == 0)):
            with pytest.raises(RuntimeError) as caught:
                scans[i].scan(state[i], reverse=reverse)
            messages.append(str(caught.value))
        scans[1].scan(state[1])  # nothing was launched, so the channel can be used
        comm.barrier()
        comm.check()
        return messages


def test_debug_names_the_first_launch_that_differs(run):
    for shapes, directions in run(2, order_case):
        assert "launch 4: rank 0: scan over (1, 4, 8), in step 0; rank 1: scan over (1, 4, 16), in step 0" in shapes
        other = "launch 5: rank 0: scan over (1, 4, 8), reverse, in step 0; rank 1: scan over (1, 4, 8), in step 0"
        assert other in directions


def broken_on_one_rank_case():
    """Rank 1 makes one more call, which breaks only its own communicator; both ranks close theirs and create
    another."""
    comm = allscan.Communicator(timeout=TIMEOUT)
    state = torch.ones(1, 16)
    allscan.allscan(state, comm=comm)
    problem = raised(allscan.allscan, state, comm=comm) if comm.rank == 1 else None
    start = time.monotonic()
    comm.close()
    with allscan.Communicator() as new:
        return problem and problem[0], time.monotonic() - start < 100, allscan.allscan(state, comm=new).sum().item()


@pytest.mark.cpu
def test_a_new_communicator_after_one_broken_on_one_rank(fresh):
    ranks = fresh(2)
    assert ranks.run(broken_on_one_rank_case) == [(None, True, 0.0), ("AllScanTimeout", True, 16.0)]


def leave_with_an_error_case():
    """Rank 1 leaves its block with an exception, rank 0 without one."""
    start = time.monotonic()
    try:
        with allscan.Communicator() as comm:
            allscan.allscan(torch.ones(1, 16), comm=comm)
            if comm.rank == 1:
                raise KeyError
    except KeyError:
        pass
    with allscan.Communicator() as new:
        return time.monotonic() - start < 100, allscan.allscan(torch.ones(1, 16), comm=new).sum().item()


@pytest.mark.cpu
def test_a_block_left_with_an_error_on_one_rank(fresh):
    assert fresh(2).run(leave_with_an_error_case) == [(True, 0.0), (True, 16.0)]


def threads_case():
    """Two communicators of one group make their first calls in a thread each, in a different order on each rank."""
    comms = [allscan.Communicator() for _ in range(2)]

    def made(comm):  # Triton's interpreter itself is single-threaded
        time.sleep(0.3 * (comm is comms[comm.rank]))
        return allscan.AllScan(comm, (1, 16))

    with ThreadPoolExecutor(2) as threads:
        scans = [*threads.map(made, comms)]
    results = [scan.scan(torch.full((1, 16), value)).mean().item() for scan, value in zip(scans, (10.0, 20.0))]
    for comm in comms:
        comm.close()
    return results


@pytest.mark.cpu
def test_communicators_in_threads(fresh):
    assert fresh(2).run(threads_case) == [[0.0, 0.0], [10.0, 20.0]]


def missed_case():
    """Rank 1 skips a first call; later calls of both ranks work."""
    with allscan.Communicator(timeout=2.0) as comm:
        allscan.allscan(torch.ones(1, 16), comm=comm)
        missed = raised(allscan.allscan, torch.ones(2, 16), comm=comm) if comm.rank == 0 else None
        dist.barrier()
        return missed and "did not come" in missed[1], allscan.allscan(torch.ones(2, 16), comm=comm).sum().item()


@pytest.mark.cpu
def test_a_missed_first_call_does_not_shift_the_later_ones(fresh):
    assert fresh(2).run(missed_case) == [(True, 0.0), (None, 32.0)]


def late_on_the_host_case():
    """Rank 0 makes each call later than the default limit, like a rank that writes a checkpoint."""
    comm = allscan.Communicator(timeout=20.0)  # its exchange has the default limit: ranks start at different times
    host_exchange.TIMEOUT_S = host_exchange.GRACE_S = 0.2
    x = torch.ones(1, 4, 1, 16)

    def gla():
        return allscan.zeco_gla(x, x, x, 0 * x, comm=comm, cu_seqlens=[0, 8])[0].sum().item()

    found = []
    for call in (lambda: allscan.allscan(torch.ones(1, 16), comm=comm).sum().item(), comm.barrier, gla, comm.close):
        time.sleep(0 if comm.rank else 1.0)
        found.append(call())
    return found


@pytest.mark.cpu
def test_host_operations_wait_as_long_as_kernels(fresh):
    (state, *_), (state_of_1, *_) = fresh(2).run(late_on_the_host_case)
    assert (state, state_of_1) == (0.0, 16.0)


@pytest.mark.cpu
@pytest.mark.quick
def test_a_time_out_says_who_is_to_resync():
    """Also ranks without an error: resync() waits for all."""
    said = str(errors.AllScanTimeout(1, 0, 3, 7, 6, 30.0))
    assert said.endswith(f"{errors.REMEDY}.") and "All ranks of this group, also those without an error" in said


@pytest.mark.cpu
@pytest.mark.quick
def test_the_errors_of_other_ranks_have_one_base_class():
    """Each error is public, and can be pickled."""
    names = [name for name, x in vars(errors).items() if inspect.isclass(x) and issubclass(x, Exception)]
    assert {"AllScanTimeout", "AllScanHostTimeout", "AllScanRejected", "AllScanOutOfStep"} <= {*names}
    for name in names:
        error = getattr(errors, name)
        assert getattr(allscan, name) is error and name in allscan.__all__
        assert issubclass(error, allscan.AllScanError) and issubclass(error, RuntimeError)
        made = error(*range(7)) if name == "AllScanTimeout" else error("why")
        assert str(pickle.loads(pickle.dumps(made))) == str(made)


def failing_steps_case(group, failing):
    """Run the loop of docs/training.md; rank 1 fails in some steps, before their first call."""
    errors, losses = [], []
    with allscan.Communicator(group, timeout=4.0) as comm:
        for step in range(4):
            comm.step()
            error = None
            try:
                for _ in range(2):
                    if step in failing and comm.rank == 1:
                        raise torch.cuda.OutOfMemoryError("made up")
                    x = torch.ones(1, 4, 1, 16, device=comm.device, requires_grad=True)
                    o, _ = allscan.zeco_gla(x, x, x, -0.1 * x, comm=comm)
                    o.sum().backward()
                comm.streams.synchronize()
                comm.check()
                losses.append(round(o.sum().item(), 2))
            except (torch.cuda.OutOfMemoryError, allscan.AllScanError) as caught:
                error = caught
            flag = torch.tensor(float(error is not None))
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
            errors.append("" if error is None else f"{type(error).__name__}: {error}")
            if flag.item():
                comm.resync()
    return errors, losses


@pytest.mark.cpu
@pytest.mark.side_by_side(case=failing_steps_case)
@pytest.mark.parametrize("failing", [(1, 2), (0, 1)])
def test_steps_that_fail_one_behind_the_other(answers, failing, size=2):
    """In first calls, and after resync() every call is one, nobody waits longer for the failed rank than kernels + 5
    s."""
    (errors, losses), (errors_of_1, losses_of_1) = answers
    first, second = failing
    assert errors[first].startswith("AllScanTimeout" if first else "AllScanHostTimeout"), errors
    assert errors[second].startswith("AllScanHostTimeout") and "did not come within 9 s" in errors[second], errors
    assert [errors_of_1[i] for i in failing] == ["OutOfMemoryError: made up"] * 2
    assert len(losses) == len(losses_of_1) == 2 and losses[0] == losses[1] and losses_of_1[0] == losses_of_1[1]


def same_size_case():
    allscan.init(1_000_000)
    allscan.init(1_000_000)
    return raised(allscan.init, 2_000_000)[0]


@pytest.mark.cpu
def test_an_arena_of_the_same_size_is_no_second_one(fresh):
    assert fresh(1).run(same_size_case) == ["ValueError"]


class Elsewhere(torch.Tensor):
    """A tensor without memory of its own, like a DTensor."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError("no memory")


def elsewhere(x):
    return torch.Tensor._make_wrapper_subclass(Elsewhere, x.shape, dtype=x.dtype, device=x.device)


def arguments_of(kind, sparse=False):
    """Return (function, valid arguments) for ranks of 6 tokens."""
    x = torch.linspace(0.1, 1.0, 96).view(1, 6, 2, 8)
    gate, beta = -x.square(), x.mean(-1).sigmoid()
    if kind == "allscan":
        return allscan.allscan, dict(state=x[0, :4].clone())
    if kind == "zigzag":
        return allscan.allscan, dict(state=(x[0, :4], x[0, :4]), layout="zigzag")
    if kind == "halo":
        return allscan.halo, dict(x=x, n=2)
    if kind == "zeco_gla":
        return allscan.zeco_gla, dict(q=x, k=x, v=x, g=gate)
    if kind == "zeco_ssd":
        return allscan.zeco_ssd, dict(x=x, dt=beta, A=-torch.ones(2), B=x, C=x, chunk_size=4)
    import_fla()
    gate = gate if kind == "zeco_kda" else gate.mean(-1)
    return getattr(allscan, kind), dict(q=x, k=x, v=x, g=gate, beta=beta)


def wrong_of(kind, size):
    """Return {error: (additional arguments of all ranks, wrong arguments of rank 1)}."""
    _, right = arguments_of(kind)
    packed, ends = dict(cu_seqlens=torch.tensor([0, 6 * size])), dict(first_token=6)
    found = {}
    if kind in ("allscan", "zigzag"):
        states = torch.ones(4, 2, 8)
        found |= {
            f"{name} initial state": ({}, dict(initial_state=x))
            for name, x in {
                "small": states[:1],
                "sparse": states.to_sparse(),
                "meta": states.to("meta"),
                "other": elsewhere(states),
            }.items()
        }
        huge = 10**400 if kind == "allscan" else (10**400, None)
        found["huge decay"] = {}, dict(decay=huge)
    if kind == "zigzag":
        found["vectors"] = {}, dict(state=(torch.ones(4), torch.ones(4)))
        return found
    if kind == "allscan":
        memory, ones = torch.zeros(128), numpy.ones((4, 2, 8), dtype=numpy.float32)
        states = {"negative strides": ones[::-1], "foreign byte order": ones.astype(">f4"), "no array": "state"}
        found |= {name: ({}, dict(state=x)) for name, x in (states | {"no shape": torch.ones(())}).items()}
        beside = memory[64:72].view(4, 2), memory[8:72].view(4, 2, 8)
        found["out beside decay"] = {}, dict(decay=beside[0], out=beside[1])
        found["text for decay"] = {}, dict(decay="0.5")
        found["strides of out"] = {}, dict(out=torch.zeros(4, 8, 2).mT)
        found["out beside state"] = {}, dict(state=memory[:64].view(4, 2, 8), out=memory[8:72].view(4, 2, 8))
        found["out is initial_state"] = {}, dict(initial_state=memory[:64].view(4, 2, 8), out=memory[:64].view(4, 2, 8))
        found["out negative"] = {}, dict(out=torch.zeros(4, 2, 8, dtype=torch.complex64).conj().imag)
    else:
        found |= {
            f"{name} cu_seqlens": (packed, dict(cu_seqlens=x))
            for name, x in {
                "meta": packed["cu_seqlens"].to("meta"),
                "sparse": packed["cu_seqlens"].to_sparse(),
                "other": elsewhere(packed["cu_seqlens"]),
                "text for": f"0, {6 * size}",
                "ragged": [[0], [1, 2]],
                "float": torch.tensor([0.0, 6.0 * size]),
            }.items()
        }
        found |= {f"first_token {i}": (packed | ends, dict(first_token=i)) for i in (99, -1, 1.5, 6 * size - 5)}
    first = next(iter(right))
    for name in right if kind in ("zeco_ssd", "zeco_gla") else (first,):
        if isinstance(right[name], torch.Tensor):
            x = right[name]
            found |= {
                f"{how} {name}": ({}, {name: y})
                for how, y in {
                    "sparse": x.to_sparse(),
                    "meta": x.to("meta"),
                    "other": elsewhere(x),
                    "double": x.double(),
                }.items()
            }
    if kind == "zeco_gla":
        options = dict(scale="1"), dict(scale=0.0), dict(output_final_state="last"), dict(q="q"), dict(q=torch.ones(()))
        found |= {str(given): ({}, given) for given in options}
    if kind == "halo":
        found |= {f"{n} tokens": ({}, dict(n=n)) for n in (2.0, 1.5)}
        found["cu_seqlens on one rank"] = {}, packed
        found["no batch"] = {}, dict(x=right["x"][0, 0])
        found["quantized"] = {}, dict(x=torch.quantize_per_tensor(right["x"], 0.1, 0, torch.quint8))
    return found


def first_call_case(group, kind):
    """Make a first call with each wrong argument on rank 1 and valid ones elsewhere, then a valid call."""
    found, rank, size = {}, dist.get_rank(group), dist.get_world_size(group)
    function, right = arguments_of(kind)
    for name, (common, wrong) in wrong_of(kind, size).items():
        with allscan.Communicator(group, timeout=60) as comm:
            allscan.allscan(torch.ones(1, 16), comm=comm)
            given = right | {x: 6 * rank if x == "first_token" else y for x, y in common.items()}
            start = time.monotonic()
            answer = raised_and_freed(function, **given | (wrong if rank == 1 else {}), comm=comm)
            found[name] = answer, time.monotonic() - start, raised(function, **given, comm=comm)
            comm.barrier()
    return found


KINDS = "allscan", "zigzag", "halo", "zeco_gla", "zeco_kda", "zeco_gated_delta_rule", "zeco_ssd"


@pytest.mark.slow(but=("allscan", "zigzag", "halo", "zeco_gla", "zeco_kda"))
@pytest.mark.cpu
@pytest.mark.side_by_side(case=first_call_case)
@pytest.mark.parametrize("kind", KINDS)
def test_a_first_call_checks_before_it_asks(answers, kind, size=3):
    """If one rank's arguments are wrong at a first call, all ranks get an error there, and the next call is right."""
    first, second, third = answers
    for name, (answer, seconds, after) in second.items():
        assert answer is not None and after is None and seconds < 60, (name, answer, after)
        for others, seconds, after in (first[name], third[name]):
            assert others is not None and others[0] != "AllScanTimeout" and "rank 1" in others[1], (name, others)
            assert answer[1][:40] in others[1] and after is None and seconds < 60, (name, answer, others, after)


OF_ANOTHER_CALL = "no shape", "no batch", "cu_seqlens on one rank"  # with them a rank makes a first call


def later_call_case(group, kind):
    """Make the same calls as repeated ones, without a host exchange, until the last rank has rejected one."""
    found, rank, size = {}, dist.get_rank(group), dist.get_world_size(group)
    function, right = arguments_of(kind)
    with allscan.Communicator(group, timeout=3.0) as comm:
        known = [x for x in wrong_of(kind, size).items() if x[0] not in OF_ANOTHER_CALL]
        for name, (common, wrong) in known[::4]:
            given = right | {x: 6 * rank if x == "first_token" else y for x, y in common.items()}
            function(**given, comm=comm)
            number = sum(comm.order.call_counts) + 1
            exchanges = dict(host_exchange._exchanges)
            answer = raised(function, **given | (wrong if rank == 1 else {}), comm=comm)
            alone = exchanges == host_exchange._exchanges
            after = raised(function, **given, comm=comm)
            found[name] = number, answer, alone, after, raised(comm.barrier)
            comm.resync()
    return found


@pytest.mark.slow(but=("allscan", "zigzag", "halo", "zeco_gla"))
@pytest.mark.cpu
@pytest.mark.side_by_side(case=later_call_case)
@pytest.mark.parametrize("kind", KINDS)
def test_a_later_call_that_one_rank_rejects(answers, kind, size=2):
    """As documented: that rank raises at once, and AllScanOutOfStep at its next call; the others raise, at the latest
    in barrier(), an error that names rank, call and reason."""
    first, second = answers
    for name, (number, answer, alone, after, end) in second.items():
        assert answer is not None and not answer[0].startswith("AllScan") and alone, (name, answer, alone)
        assert after[0] == end[0] == "AllScanOutOfStep" and f"has rejected its call {number}" in end[1], (name, after)
        assert answer[1][:40] in end[1], (name, answer, end)
        for other in first[name][1::2]:
            assert other is None or other[0] in ("AllScanTimeout", "AllScanOutOfStep"), (name, other)
        other = first[name][-1]
        assert other is not None and f"ank 1 has rejected its call {number}" in other[1], (name, other)
        assert answer[1][:40] in other[1], (name, answer, other)


def captured_case(comm):
    """A first call in a capture allocates nothing. The capture is mocked: CPU ranks have no CUDA graphs."""
    free = comm.memory.heap.arena.free_bytes
    with mock.patch.object(comm.streams, "capturing", lambda: True):
        answer = raised(allscan.allscan, torch.ones(2, 16), comm=comm)
    assert comm.memory.heap.arena.free_bytes == free
    return answer, allscan.allscan(torch.ones(2, 16), comm=comm).sum().item()


@pytest.mark.cpu
def test_a_first_call_in_a_capture(run):
    for rank, (answer, total) in enumerate(run(2, captured_case)):
        assert answer[0] == "RuntimeError" and "cannot be captured" in answer[1]
        assert total == 32.0 * rank


def full_case(comm):
    """The memory of rank 1's host is full: all ranks get an error, and everything allocated is freed."""
    free, full = comm.memory.heap.arena.free_bytes, OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(os, "posix_fallocate", side_effect=full) if comm.rank == 1 else contextlib.nullcontext():
        answer = raised(allscan.allscan, torch.ones(2, 16), comm=comm)
    assert comm.memory.heap.arena.free_bytes == free
    return answer, allscan.allscan(torch.ones(2, 16), comm=comm).sum().item()


@pytest.mark.cpu
def test_a_host_without_memory(run):
    for rank, (answer, total) in enumerate(run(2, full_case)):
        assert answer[0] == "MemoryError" and "rank 1: /dev/shm is full" in answer[1] and "--shm-size" in answer[1]
        assert total == 32.0 * rank


def pickled_case(comm):
    module = torch.nn.Linear(2, 2)
    module.comm = comm
    return copy.deepcopy(module).comm is comm, raised(pickle.dumps, module)


@pytest.mark.cpu
def test_a_communicator_is_not_pickled_but_copied(run):
    ((same, (kind, text)),) = run(1, pickled_case)
    assert same and kind == "TypeError" and "state_dict" in text


@pytest.mark.cpu
def test_the_store_of_ranks_listens_on_the_loopback_address_only(pool):
    listening = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as file:
            listening += [line.split()[1] for line in file.readlines()[1:] if line.split()[3] == "0A"]
    assert [address for address in listening if int(address.split(":")[1], 16) == pool.ranks._store.port] == [
        f"0100007F:{pool.ranks._store.port:04X}"
    ]


def forked_case():
    with allscan.Communicator(timeout=60) as comm:
        x = torch.full((2, 4, 8), 1.0 + comm.rank)
        found = [allscan.allscan(x, comm=comm)[0, 0, 0].item()]
        answer = b""
        if comm.rank == 0:
            read, write = os.pipe()
            if not os.fork():
                errors = raised(allscan.allscan, 100 * x, comm=comm), raised(allscan.Communicator)
                os.write(write, str(errors).encode())
                os._exit(0)
            os.wait()
            answer = os.read(read, 1000)
        found += [allscan.allscan(i * x, comm=comm)[0, 0, 0].item() for i in (10, 20)]
        comm.barrier()
        return found, answer.decode()


@pytest.mark.cpu
def test_a_forked_process_makes_no_calls(fresh):
    (first, text), (second, _) = fresh(2).run(forked_case)
    assert first == [0.0, 0.0, 0.0] and second == [1.0, 10.0, 20.0]
    assert "RuntimeError" in text and "from which this one was forked" in text
    assert "StoreGone" in text and "this process was forked from a rank" in text


def interrupted_allscan_case():
    """Return free bytes of the arena before, and after each interrupted construction, another one and resync()."""

    waits = mock.Mock(monotonic=time.monotonic, sleep=mock.Mock(side_effect=KeyboardInterrupt))
    with allscan.Communicator(timeout=60) as comm:
        allscan.AllScan(comm, (2, 4, 8)).close()
        free = [comm.memory.heap.arena.free_bytes]
        for _ in range(2):
            comm.barrier()
            if comm.rank == 1:  # in its first wait for rank 0
                with mock.patch.object(host_exchange, "time", waits), pytest.raises(KeyboardInterrupt):
                    allscan.AllScan(comm, (64, 64, 64))
            dist.barrier()
            allscan.AllScan(comm, (64, 64, 64)).close()
            comm.resync()
            free.append(comm.memory.heap.arena.free_bytes)
        return free


def test_an_interrupted_construction_leaks_no_memory(fresh):
    for free in fresh(2).run(interrupted_allscan_case):
        assert len(set(free)) == 1


def many_tiles_case():
    """Return the seconds of a scan of 200 tiles whose previous rank is a straggler."""
    with contextlib.suppress(allscan.AllScanTimeout), allscan.Communicator(timeout=TIMEOUT) as comm:
        state = torch.ones(200, 1, 16, device=comm.device)
        allscan.allscan(state, comm=comm)
        if comm.rank == 0:
            dist.barrier()  # the other rank has given up
            return 0.0
        start = time.monotonic()
        raised(allscan.allscan, state, comm=comm)
        comm.streams.synchronize()
        seconds = time.monotonic() - start
        dist.barrier()
        comm.check()
    return seconds


def test_all_tiles_give_up_at_once(fresh):
    """This holds in the interpreter, too, where 200 tiles wait in sequence: one after the other they would take 200
    times the limit."""
    _, seconds = fresh(2).run(many_tiles_case)
    assert TIMEOUT < seconds < 100 * TIMEOUT


def dropped_case():
    """Check that an unreferenced communicator is freed."""
    comm = allscan.Communicator()
    allscan.allscan(torch.ones(1, 4, 8, device=comm.device), comm=comm)
    there = weakref.ref(comm)
    with pytest.warns(ResourceWarning, match="without close"):
        del comm
        gc.collect()
    return there() is None


def test_an_unreferenced_communicator_is_freed(fresh):
    assert all(fresh(2).run(dropped_case))


def graphs_case(group, ends):
    """Return whether a closed or dropped communicator is freed before the graphs of its calls; the errors of
    backward."""
    with allscan.Communicator(group) as comm, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        own, device = allscan.Communicator(group, timeout=20), comm.device
        x, tokens = (torch.ones(shape, device=device, requires_grad=True) for shape in ((2, 4, 8), (1, 6, 2, 16)))
        results = [
            allscan.allscan(x, comm=own),
            allscan.allscan((x, x), comm=own, layout="zigzag")[0],
            allscan.halo(tokens, 2, comm=own),
            allscan.allscan_segments(x[None], comm=own)[0],
            allscan.zigzag.to_zigzag(tokens, comm=own),
            allscan.zeco_gla(*[tokens] * 3, -tokens, comm=own)[0],
        ]
        there = weakref.ref(own)
        answers = []
        if ends == "closed":
            own.close()
            answers = [raised(result.sum().backward, retain_graph=True) for result in results]
        del own
        gc.collect()
        answers += [raised(result.sum().backward) for result in results]
        comm.barrier()
        return there() is None, answers


@pytest.mark.parametrize("ends", ["closed", "dropped"])
def test_graphs_keep_no_communicator(run, ends):
    for gone, answers in run(2, graphs_case, ends):
        assert gone and {kind for kind, _ in answers} == {"RuntimeError"}, answers
        assert all("closed" in why for _, why in answers[:-6][:5]), answers
        assert all("deleted" in why for _, why in answers[-6:]), answers


def cold_cache_case(cold):
    comm = allscan.Communicator()
    if comm.rank == cold:
        os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
    generator = torch.Generator().manual_seed(comm.rank)
    leaves = [torch.randn(1, 256, 2, 64, generator=generator).to(comm.device) for _ in range(3)]
    leaves.append(-torch.rand(1, 256, 2, 64, generator=generator).to(comm.device))
    start = time.monotonic()
    for _ in range(2):
        q, k, v, g = (x.requires_grad_() for x in leaves)
        output, _ = allscan.zeco_gla(q, k, v, g, comm=comm)
        output.sum().backward()
    comm.streams.synchronize()
    seconds = time.monotonic() - start
    comm.close()
    return seconds


@pytest.mark.gpu
def test_a_rank_with_a_cold_cache(fresh):
    """Ranks with a warm cache wait for it: compiling takes less than the default time-out."""
    fresh(2).run(cold_cache_case, None, timeout=300)
    usual = fresh(2).run(cold_cache_case, None, timeout=300)
    warm, cold = fresh(2).run(cold_cache_case, 1, timeout=300)
    assert min(warm, cold) > 2 * max(usual), (warm, cold, usual)  # else nothing was compiled
