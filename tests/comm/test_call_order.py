"""A rank rejects, skips or ignores a call: no rank returns another call's values, and every rank gets an error."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import math
import random
import re
import sys
import time
import uuid
import warnings
from datetime import timedelta
from itertools import product
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import allscan
from allscan.base.caches import Agreement
from allscan.comm import calls
from allscan.comm.call_order import Order
from allscan.comm.tags import stamp
from allscan.launch.compiled_kernel import channel_addresses
from allscan.scan import launcher
from allscan.scan.launcher import ChannelUse
from allscan.shmem_kernels.channel import STAMPS
from allscan.tools import ranks
from support.call_order import (
    TIMEOUT,
    check_no_values_of_others,
    ignoring_case,
    other_backward_case,
    resync_case,
    shifted_case,
    validation_case,
)
from support.fla import import_fla
from support.values import check_errors, pairs, raised, value_or_error


@pytest.mark.side_by_side(case=shifted_case, step=False)
@pytest.mark.parametrize("how, size", [*product(["allscan", "zigzag", "halo", "zeco_gla"], [2, 3]), ("delta", 2)])
def test_a_call_that_one_rank_rejects(answers, size, how):
    """No rank returns another call's values, all ranks get an error, and resync() repairs the communicator."""
    check_no_values_of_others(answers)
    rejecting = answers[-1]
    assert rejecting[0][3] in ("TypeError", "ValueError") and set(rejecting[0][4:]) == {"AllScanOutOfStep"}, rejecting
    assert "has rejected its call 4" in rejecting[2][1]
    said = [end[1] for _, _, end, _ in answers[:-1]]
    assert any(f"Rank {size - 1} has rejected its call 4" in text for text in said), said


def other_shape_case(group, options):
    """Rank 1 makes call 4 with another shape, is told that the others made other calls, and goes on."""
    comm = allscan.Communicator(group, timeout=TIMEOUT, **options)
    found, right = [], []
    for i in range(1, 7):
        state = torch.full((3 if i == 4 and comm.rank == 1 else 1, 2), float(i), device=comm.device)
        found.append(value_or_error(lambda state=state: allscan.allscan(state, comm=comm).mean().item()))
        right.append(float(i * comm.rank))
    comm.streams.synchronize()
    end = raised(comm.barrier)
    comm.resync()
    again = (allscan.allscan(torch.ones(1, 2, device=comm.device), comm=comm) == comm.rank).all().item()
    comm.close()
    return found, right, end, again


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_is_at_another_call_does_not_go_on(run, size):
    answers = run(size, other_shape_case, {})
    check_no_values_of_others(answers)
    assert answers[1][0][3:] == ["AllScanOutOfStep"] * 3, answers[1]


def halfway_case(group, kernel):
    return shifted_case(group, f"zeco_gla halfway {kernel}", False)


@pytest.mark.slow(but=("2-state_kernel", "2-scan_kernel", "2-output", "3-scan"))
@pytest.mark.cpu  # on GPUs a plan's launches may be one graph
@pytest.mark.side_by_side(case=halfway_case)
@pytest.mark.parametrize("kernel", ["state_kernel", "scan_kernel", "output_kernel"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_call_that_ends_between_two_launches(answers, size, kernel):
    """An error before or after the rank's scan has the effect of a rejected call."""
    check_no_values_of_others(answers)
    found, right, end, _ = answers[-1]
    assert found[:4] == [*right[:3], "OutOfMemoryError"] and set(found[4:]) == {"AllScanOutOfStep"}, found
    assert "has rejected its call 4" in end[1]


def skipped_case(group, how):
    return [shifted_case(group, how, step) for step in (False, True)]


@pytest.mark.quick
@pytest.mark.side_by_side(case=skipped_case)
@pytest.mark.parametrize("how, size", [("skipped", 2), ("skipped", 3), ("zigzag skipped", 3)])
def test_a_call_that_one_rank_never_enters(answers, how, size):
    """Without step() the barrier tells all ranks; with step() the first wrong launch does."""
    counted = f"rank {size - 1}: 8 forward, 0 reverse"
    without, answers = zip(*answers)
    for rank, (_, _, end, again) in enumerate(without):
        assert end[0] == "AllScanOutOfStep" or "zigzag" in how and end[0] == "AllScanTimeout", (rank, end)
        assert again and (counted in end[1] or "zigzag" in how), (rank, end)  # zigzag waits for all ranks in each call
    check_no_values_of_others(answers)
    found, right, end, _ = answers[-1]
    assert found[:4] == [*right[:3], "OutOfMemoryError"], found
    assert not any(isinstance(x, float) and x == x for x in found[4:])
    assert "here it is step 5, there it was step 4" in end[1], end


def loop_case(group, debug):
    """For each kind of loop: warnings of a loop without step()."""
    found = {}

    def scan(x, reverse=False):
        return allscan.allscan(x, comm=comm, reverse=reverse).sum()

    def recomputed(x):
        return checkpoint(scan, x, use_reentrant=False)

    def gla(x):
        return allscan.zeco_gla(x, x, x, 0 * x, comm=comm)[0].sum()

    loops = {
        "training": lambda x: scan(x).backward(),
        "reverse": lambda x: scan(x, True).backward(),
        "recomputed": lambda x: recomputed(x).backward(),
        "an operator": lambda x: gla(x.expand(1, 4, 4, 8)).backward(),
        "skipped by the first": lambda x: None if comm.rank == 0 and len(turns) == 2 else scan(x).backward(),
        "with step()": lambda x: (comm.step(), scan(x).backward()),
        "inference": lambda x: (scan(x.detach()), scan(x)),
        "reverse inference": lambda x: (scan(x.detach(), True), scan(x.detach())),
        "one backward": lambda x: turns or (recomputed(x) + recomputed(2 * x)).backward(),
        "resync()": lambda x: (comm.resync() if turns else None, scan(x).backward()),
    }
    for name, iteration in loops.items():
        if name.startswith("skipped") and debug:
            continue
        limit = dict(timeout=2.0) if name.startswith("skipped") else {}
        comm, turns = allscan.Communicator(group, debug=debug, **limit), []
        for _ in range(4):
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                with contextlib.suppress(allscan.AllScanError):
                    iteration(torch.ones(1, 4, 8, device=comm.device, requires_grad=True))
            turns.append(sum("Communicator.step() was never called" in str(w.message) for w in warned))
        found[name] = turns
        if not name.startswith("skipped"):
            comm.barrier()
        with contextlib.suppress(allscan.AllScanError):
            comm.close()
    return found


@pytest.mark.quick
@pytest.mark.parametrize("size, debug", [(1, False), (2, False), (2, True)])
def test_a_loop_without_step(run, size, debug):
    """Warned of once, on the first rank, at the first call after a backward pass."""
    for rank, found in enumerate(run(size, loop_case, debug)):
        for name, turns in found.items():
            warns = name not in ("with step()", "inference", "reverse inference", "one backward")
            assert turns == [0, int(warns and size > 1 and rank == 0), 0, 0], (rank, name, turns)


def stale_case(comm):
    """Backward of a graph from before resync() raises."""
    prev = allscan.allscan(torch.ones(1, 16, device=comm.device, requires_grad=True), comm=comm)
    comm.resync()
    with pytest.raises(RuntimeError, match="before Communicator.resync"):
        prev.sum().backward()
    del prev
    gc.collect()
    return [scan.launcher.backwards.dropped for scan in comm.collectives]


def test_a_graph_from_before_resync_is_not_missed(run):
    assert run(2, stale_case) == [[[False, False]]] * 2


def closing_case(group):
    """The last rank skips a call, and close() is the next call of all ranks."""
    comm = allscan.Communicator(group)
    state = torch.ones(1, 16, device=comm.device)
    for _ in range(2 if comm.rank < comm.size - 1 else 1):
        allscan.allscan(state, comm=comm)
    return raised(comm.close), comm.closed


def test_a_call_left_out_before_closing(run):
    for answer, closed in run(2, closing_case):
        assert closed and answer[0] == "AllScanOutOfStep", answer
        assert "rank 0: 2 forward and 0 reverse; rank 1: 1 forward and 0 reverse" in answer[1]


def all_reject_case(comm):
    """A call that all ranks reject alike has no effect."""
    state = torch.ones(1, 2, device=comm.device)
    scan = allscan.AllScan(comm, (1, 2))
    for i in range(1, 6):
        assert raised(scan.scan, state.double())[0] == "TypeError"
        assert scan.scan(i * state).mean().item() == i * comm.rank
    comm.barrier()
    return True


@pytest.mark.quick
def test_a_call_that_all_ranks_reject(run, pool):
    assert all(run(min(3, pool.size), all_reject_case))


def known_fault_case(group, kind, where):
    """The last rank rejects a call, or times out; rank 0, not yet informed, makes a call of the whole group."""
    store = dist.distributed_c10d._get_default_store()
    comm = allscan.Communicator(group, timeout=2.0)
    key = f"{comm.order.store_exchange.name}/after a fault/"
    state, last = torch.ones(1, 16, device=comm.device), comm.rank == comm.size - 1
    scan = allscan.AllScan(comm, (2, 16))
    allscan.allscan(state, comm=comm)
    found, times = [], []

    def call(function, *arguments, **options):
        start = time.monotonic()
        found.append(raised(function, *arguments, **options))
        times.append(time.monotonic() - start)

    if last:
        call(allscan.allscan, state.double() if kind == "rejected" else state, comm=comm)
        comm.streams.synchronize()
        call(allscan.allscan, state, comm=comm)
        call(comm.barrier)
        store.set(f"{key}0", b"")
    elif kind == "rejected":
        allscan.allscan(state, comm=comm)
    store.wait([f"{key}0"], timedelta(seconds=60))
    if not last:
        call(
            {"barrier": comm.barrier, "close": comm.close, "AllScan.close": scan.close, "resync": comm.resync}.get(
                where, lambda: allscan.allscan(torch.ones(3, 16, device=comm.device), comm=comm)
            )
        )
        store.set(f"{key}1", b"")
    store.wait([f"{key}1"], timedelta(seconds=60))
    if where in ("close", "resync"):  # one rank alone
        call(comm.close)
        return found, times, comm.closed
    comm.resync()
    again = (allscan.allscan(2 * state, comm=comm) == 2 * comm.rank).all().item()
    comm.close()
    return found, times, again


@pytest.mark.side_by_side(case=known_fault_case)
@pytest.mark.parametrize("kind", ["rejected", "late"])
@pytest.mark.parametrize("where", ["resync", "close", "barrier", "first call", "AllScan.close"])  # longest first
def test_nobody_waits_longer_than_the_time_out_after_a_fault(answers, kind, where, size=2):
    """The wait is bounded on the rank with the error and on the others, whose error names the reason."""
    (found, times, after), (of_last, times_of_last, after_last) = answers
    assert after and after_last
    last = "AllScanOutOfStep" if kind == "rejected" else "AllScanTimeout"
    assert of_last[1][0] == of_last[2][0] == last, of_last
    # on GPUs a call that times out has returned long before
    assert (of_last[0] or [last])[0] in ("TypeError", "AllScanTimeout"), of_last
    assert times_of_last[2] < 2 + 5 and max(times_of_last) < 60, times_of_last  # 2 + 5: the limit of a wait
    late = r"AllScanTimeout: rank 1 (\(of the job: \d+\) )?waited 2 s"
    reason = r"has rejected its call 2 \(TypeError" if kind == "rejected" else late
    assert found[0][0] == ("AllScanHostTimeout" if where == "resync" else "AllScanOutOfStep"), found
    assert re.search(reason, found[0][1]), found
    assert times[0] < (60 if where in ("close", "resync") else 2 + 5), times


def compared_case(group):
    """In debug mode ranks compare calls before each launch: the others are told that a rank rejects the call."""
    with allscan.Communicator(group, timeout=60, debug=True) as comm:
        state = torch.ones(1, 16, device=comm.device)
        scan = allscan.AllScan(comm, (1, 16))  # its arguments are not compared before the launch
        scan.scan(state)
        start = time.monotonic()
        try:
            answer = scan.scan(state.double() if comm.rank == 1 else state)
        except (TypeError, allscan.AllScanError) as error:  # the exceptions that a training step catches
            answer = type(error).__name__, str(error)
        seconds = time.monotonic() - start
        right = [(allscan.allscan(i * state, comm=comm) == i * comm.rank).all().item() for i in (1, 2)]
        comm.barrier()
        return answer, seconds, right


def test_debug_hears_of_a_rejected_call(run):
    for rank, (answer, seconds, right) in enumerate(run(2, compared_case)):
        assert answer[0] == ("TypeError" if rank else "AllScanRejected"), answer
        assert seconds < 60 and right == [True, True]
        assert rank or "rank 1 has rejected this call: TypeError" in answer[1]


def settled_case(group):
    """All ranks reject calls, at different times, and go on; later one rank skips a call."""
    comm = allscan.Communicator(group, timeout=4.0)
    chance, state = random.Random(comm.rank), torch.ones(1, 16, device=comm.device)
    allscan.allscan(state, comm=comm)
    rejected = []
    for _ in range(6):
        time.sleep(chance.uniform(0, 0.3))
        rejected.append(raised(allscan.allscan, state.double(), comm=comm)[0])
    right = [(allscan.allscan(i * state, comm=comm) == i * comm.rank).all().item() for i in range(1, 5)]
    comm.barrier()
    missed = None
    if comm.rank:
        missed = raised(allscan.allscan, state, comm=comm)
        if comm.device.type == "cuda":
            torch.cuda.synchronize()
            missed = raised(comm.check)
    dist.barrier(group)
    comm.close()
    return rejected, right, missed


def test_a_time_out_names_no_call_that_all_ranks_rejected(run):
    for rank, (rejected, right, missed) in enumerate(run(3, settled_case)):
        assert rejected == ["TypeError"] * 6 and right == [True] * 4
        assert rank == 0 or (missed[0] == "AllScanTimeout" and "rejected" not in missed[1]), missed


@pytest.mark.side_by_side(case=ignoring_case)
@pytest.mark.parametrize("how, size", [("allscan", 2), ("allscan", 3), ("zigzag", 3), ("delta", 2)])
def test_a_rank_that_ignores_what_it_gets(answers, how, size):
    """Its gradient is wrong in the step in which it ignores a call's result, and right afterwards."""
    for found, right, later in answers:
        assert isinstance(found[-1], str) and len(found) <= 3, found
        wanted = dict(allscan=later, zigzag=later + size)  # the descending scan reaches all ranks
        wanted = wanted.get(how, 1 + (later > 0))  # for delta: its own output, and the next rank's first one
        right = [round(x, 4) for x in right] if how == "delta" else right  # fla's products round
        assert right == [float(wanted * i) for i in range(1, 4)]
    # in the zigzag layout backward of the other ranks needs the first rank's state
    assert answers[0][0] == [0.0, "AllScanTimeout" if how == "zigzag" else "RuntimeError"]


@pytest.mark.slow(but="zeco_gla-2")
@pytest.mark.cpu
@pytest.mark.parametrize("name, size, who", [("zeco_gla", 3, 0), ("zeco_gla", 2, 1), ("zeco_kda", 2, 0)])
def test_a_rank_that_ignores_an_operators_output_in_zigzag(run, name, size, who):
    """Every rank raises, at the latest in the next step; no other gradient is wrong before."""
    for rank, (found, right, _) in enumerate(run(size, ignoring_case, name, None, who)):
        assert isinstance(found[-1], str) and len(found) <= 3, found
        wanted = [0.0] * 3 if rank == who else right
        assert found[:-1] == wanted[: len(found) - 1] and all(right), (rank, found, right)


def test_validation_without_backward(run, pool):
    assert all(run(min(3, pool.size), validation_case))


def operators_validation_case(group, name, invariant):
    """Return the seconds of a call in the zigzag layout whose results no rank uses, and of a call and its backward
    after that, over the time-out."""
    timeout = 120.0
    with allscan.Communicator(group, timeout=timeout) as comm:
        x = torch.full((1, 128, 1, 16), 0.25, device=comm.device, requires_grad=True)
        one = x.detach()[..., 0]
        gates = -one if name == "zeco_gated_delta_rule" else -x.detach()
        beta = [] if name == "zeco_gla" else [one]
        where, start = dict(layout="zigzag", invariant=invariant, comm=comm), time.monotonic()
        for _ in range(2):
            o, _ = getattr(allscan, name)(x, x, x, gates, *beta, **where)
        o.sum().backward()
        return (time.monotonic() - start) / timeout


@pytest.mark.slow(but="2")
@pytest.mark.cpu  # on GPUs the first call compiles its kernels
@pytest.mark.parametrize(
    "size, name, invariant", pairs([2, 3], ["zeco_gla", "zeco_kda", "zeco_gated_delta_rule"], [0, 64])
)
def test_validation_without_backward_in_zigzag(run, size, name, invariant):
    """No rank waits, before its first scan, for another one's second scan, which waits for that first one."""
    assert max(run(size, operators_validation_case, name, invariant)) < 1


SCANS = 13  # of recomputed_operators; their optional inputs differ between ranks


def recomputed_operators(comm):
    """Return ({name: function of [1, 4, 2, 8]}, learned); optional inputs of the scans differ between ranks."""
    first, last = comm.rank == 0, comm.rank == comm.size - 1
    learned = torch.full((1, 2), 0.5, device=comm.device, requires_grad=True)
    decays = {
        "some": 0.5 * learned.detach() if last else None,
        "number": 0.5 if first else learned.detach(),
        "learned": learned if last else None,
        "learned or a number": learned if first else 0.0,
        "learned or given": learned if last else learned.detach(),
    }
    packed = torch.tensor([0, 5, 4 * comm.size], device=comm.device)

    def scan(decay, **options):
        return lambda x: allscan.allscan(x.mean(1), decay, comm=comm, **options)

    def zigzag(x):
        pair = x[:, :2].mean(1), x[:, 2:].mean(1)
        return torch.cat(allscan.allscan(pair, (decays["some"], decays["learned"]), comm=comm, layout="zigzag"))

    def waited(x):
        return allscan.allscan(x.mean(1), decays["learned"], comm=comm, async_op=True).wait()

    def gla(x, **options):
        return allscan.zeco_gla(x, x, x, -x.square(), comm=comm, **options)[0]

    def rule(name, x, **options):
        import_fla()
        g = -x.square() if name == "kda" else -x.square().mean(-1)
        call = allscan.zeco_kda if name == "kda" else allscan.zeco_gated_delta_rule
        return call(x, x, x, g, x.sigmoid().mean(-1), comm=comm, **options)[0]

    def ssd(x, **options):
        given = x, x.square().mean(-1), -learned.squeeze(0).square(), x, x, 4
        y = allscan.zeco_ssd(*given, comm=comm, **options)
        return y[0] + y[1].mean() if isinstance(y, tuple) else y

    made = {f"decay {name}": scan(decay) for name, decay in decays.items()}
    made |= {f"reverse {name}": scan(decay, reverse=True) for name, decay in decays.items()}
    made |= {
        "zigzag": zigzag,
        "async_op": waited,
        "initial state": lambda x: allscan.allscan(
            x.mean(1), decays["some"], comm=comm, initial_state=learned[..., None].expand(1, 2, 8).contiguous()
        ),
    }
    for options in ({}, dict(layout="zigzag"), dict(cu_seqlens=packed)):
        name = str(options.get("layout", "packed" if options else "contiguous"))
        made |= {
            f"{kind} {name}": lambda x, f=f, options=options: f(x, **options)
            for kind, f in (
                ("halo", lambda x, **o: allscan.halo(x, 2, comm=comm, **o)),
                ("gla", gla),
                ("kept gla", lambda x, **o: gla(x, recompute=False, **o)),
                ("kda", lambda x, **o: rule("kda", x, **o)),
                ("gated delta rule", lambda x, **o: rule("gated", x, **o)),
                ("ssd", ssd),
                ("ssd with states", lambda x, **o: ssd(x, return_final_states=True, **o)),
            )
        }
    made["to_zigzag"] = lambda x: allscan.zigzag.to_zigzag(x, comm=comm)
    return made, learned


def recomputed_case(comm, scans_only):
    """Return differences of gradients to those without checkpointing, by operator, place in the region, early_stop."""
    from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

    operators, learned = recomputed_operators(comm)
    found = {}
    chosen = [*operators.items()][: SCANS if scans_only else None]
    for (name, function), last in product(chosen, (False, True)):

        def region(x, function=function, last=last):
            y = function(x.sin())
            return y if last else y.cos().square()

        def gradients(call):
            x = torch.linspace(0.1, 1.0, 64, device=comm.device).view(1, 4, 2, 8).requires_grad_()
            learned.grad = None
            call(x).square().sum().backward()
            return x.grad, torch.zeros_like(learned) if learned.grad is None else learned.grad

        expected = gradients(region)
        for early_stop in (True, False):

            def checkpointed(x, region=region, early_stop=early_stop):
                with set_checkpoint_early_stop(early_stop):
                    return checkpoint(region, x, use_reentrant=False)

            found[name, last, early_stop] = max(
                (a - b).abs().max().item() for a, b in zip(expected, gradients(checkpointed), strict=True)
            )
    assert comm.order.rejected is None and not any(any(x.launcher.backwards.dropped) for x in comm.collectives)
    comm.barrier()
    return found


@pytest.mark.slow(but="3")
@pytest.mark.parametrize("size, scans_only", [(2, False), (3, True)])  # only scans' inputs differ between ranks
def test_what_ranks_compute_again(run, size, scans_only):
    """Non-reentrant checkpointing recomputes each operator, last in its region or not, at the same place on all ranks
    or on none, whichever optional inputs a rank has."""
    for found in run(size, recomputed_case, scans_only):
        assert len(found) == 4 * (SCANS if scans_only else 35)
        check_errors([found], 1e-5)


def test_backwards_in_another_order(run):
    first, last = run(2, other_backward_case)
    assert "AllScanOutOfStep" in first[0] and "backward of forward call" in first[0] and first[1]
    for _, _, old in (first, last):
        assert "before Communicator.resync()" in old[1]


def other_steps_case(group):
    """The ranks make the last resync() in step 2, the last rank, without an error of its own, in step 3."""
    with allscan.Communicator(group, timeout=60) as comm:
        state = torch.ones(1, 16, device=comm.device)
        for _ in range(2 + (comm.rank == comm.size - 1)):
            comm.step()
        answers = raised(comm.resync), raised(allscan.allscan, state, comm=comm), raised(comm.step)
    with allscan.Communicator(group) as comm:
        comm.step()
        comm.resync()
        comm.step()
        return answers, (allscan.allscan(state, comm=comm) == comm.rank).all().item()


@pytest.mark.quick
def test_resync_in_different_steps(run):
    """All ranks raise, and none continues with a batch that the others do not have."""
    for answers, right in run(3, other_steps_case):
        assert right and all(answer and answer[0] == "AllScanOutOfStep" for answer in answers), answers
        assert all("rank 0: 2; rank 1: 2; rank 2: 3" in text for _, text in answers), answers


def interrupted_case(comm):
    """Rank 1 is interrupted after all ranks have agreed on a call and before it has recorded that."""
    x = torch.ones(1, 20, 1, 16, device=comm.device)

    def call(cu_seqlens=None):
        return allscan.zeco_gla(x, x, x, -0.1 * x, comm=comm, cu_seqlens=cu_seqlens)[0]

    call()
    if comm.rank == 1:
        with (
            mock.patch.object(Agreement, "remember", side_effect=KeyboardInterrupt),
            contextlib.suppress(KeyboardInterrupt),
        ):
            call([0, 25, 40])
    else:
        raised(call, [0, 25, 40])
    comm.resync()
    again = [raised(call), raised(call, [0, 25, 40]), raised(call, [0, 25, 40]), raised(comm.barrier)]
    return again, len(comm.agreed.arguments)


def interrupted_first_call_case(group):
    """Rank 1 gets Ctrl-C in a first call before rank 2 comes to it. Return what the call and the next one raise."""
    store = dist.distributed_c10d._get_default_store()
    with allscan.Communicator(group, timeout=60, debug=True) as comm:
        x = torch.ones(2, 16, device=comm.device)

        def interrupt(late):
            raise KeyboardInterrupt

        if comm.rank == 1:
            with mock.patch.object(comm.order, "_abort_reason", interrupt), pytest.raises(KeyboardInterrupt):
                allscan.allscan(x, comm=comm)
            first = "KeyboardInterrupt"
            store.set("interrupted", "")
        else:
            if comm.rank == 2:
                store.wait(["interrupted"], timedelta(seconds=60))
            first = raised(allscan.allscan, x, comm=comm)[0]
        again = raised(allscan.allscan, x, comm=comm)
        return first, again, allscan.allscan(x, comm=comm)[0, 0].item() == comm.rank, raised(comm.barrier)


@pytest.mark.cpu
def test_ctrl_c_in_a_first_call(run):
    """All ranks reject that call, and the next one is right."""
    first = "AllScanRejected", "KeyboardInterrupt", "AllScanRejected"
    assert run(3, interrupted_first_call_case) == [(name, None, True, None) for name in first]


def test_resync_forgets_what_one_rank_alone_has_noted(run):
    assert run(2, interrupted_case) == [([None] * 4, 2)] * 2


def test_resync_after_time_outs(run, pool):
    assert all(run(min(3, pool.size), resync_case))


def neighbour_shift_case(group, key, how):
    """The first rank launches after the last one has its result: tiles with zero decays take the fast path."""
    store = dist.distributed_c10d._get_default_store()
    with allscan.Communicator(group, timeout=30, max_ctas=2) as comm:
        if how == "zeco_gla":  # more tiles than programs; the product of the gates of 70 tokens is 0 in float32
            x = torch.full((1, 70, 6, 16), 1.0, device=comm.device)

            def call(i):
                o, _ = allscan.zeco_gla(x, x, i * x, -2 * x, comm=comm)
                return o[0, :2].sum().item()

        else:
            shape = (6, 128, 128)
            decay = 0.0 if how == "number" else torch.zeros(6, 128, device=comm.device)
            if how == "signs":
                decay = -decay
            state = torch.ones(shape, device=comm.device) + comm.rank

            def call(i):
                return allscan.allscan(i * state, decay, comm=comm).mean().item()

        right = call(1.0)
        comm.barrier()
        if comm.rank == 0:
            store.wait([key], timedelta(seconds=60))
        found = call(2.0)
        if comm.rank == comm.size - 1:
            store.set(key, b"there")
        comm.barrier()
        return abs(found - 2 * right) <= 1e-6 * abs(right)


@pytest.mark.parametrize("how", ["number", "tensor", "signs", "zeco_gla"])
def test_a_tile_with_zero_decays_waits_for_one_rank(run, how, size=4):
    # of 2 ranks the last one waits for the first in any case
    assert run(size, neighbour_shift_case, uuid.uuid4().hex, how) == [True] * size


def nan_decay_case(comm):
    """A NaN decay is not 0: its tile waits, and NaN is sent on."""
    state, decay = torch.ones(1, 2, 2, device=comm.device), torch.full((1, 2), float("nan"), device=comm.device)
    allscan.allscan(state, torch.ones_like(decay), comm=comm)  # a first call rejects NaN
    prev = allscan.allscan(state, decay, comm=comm)
    return prev.isnan().all().item() if comm.rank > 1 else (prev == comm.rank).all().item() or comm.rank == 1


def test_a_decay_that_is_nan(run, pool):
    assert all(run(min(3, pool.size), nan_decay_case))


def few_programs_case(group, depth, protocol):
    """With more tiles than programs: a straggler two ranks before, and late credits, in both directions."""
    with allscan.Communicator(group, max_ctas=2) as comm:
        scan = allscan.AllScan(comm, (5, 8, 16), depth=depth, protocol=protocol, tile=(4, 16))
        assert scan.num_tiles == 10
        chance = random.Random(comm.rank)
        for epoch in range(1, 9):
            if comm.rank == epoch % comm.size:
                time.sleep(chance.uniform(0, 0.02))
            state = torch.full((5, 8, 16), float(epoch), device=comm.device)
            decay = torch.ones(5, 8, device=comm.device)
            decay[::2] = 0  # these tiles take the zero-decay fast path
            place = comm.rank if epoch % 2 else comm.size - 1 - comm.rank
            prev = scan.scan(state, decay, reverse=epoch % 2 == 0)
            assert (prev[::2] == epoch * (place > 0)).all() and (prev[1::2] == epoch * place).all(), epoch
    return True


@pytest.mark.slow(but=("1", "3-put"))
@pytest.mark.parametrize("protocol", ["sentinel", "signal", "put"])
@pytest.mark.parametrize("depth", [1, 3])
def test_more_tiles_than_programs(run, pool, depth, protocol):
    assert all(run(min(3, pool.size), few_programs_case, depth, protocol))


def overtaking_case(comm, depth):
    """Concurrent puts arrive in any order, up to 0.3 s late."""
    with mock.patch.object(comm.memory.heap.network, "most_s", 0.3):
        scan = allscan.AllScan(comm, (1, 2, 4), depth=depth, protocol="put")
        outs = [scan.scan(torch.full((1, 2, 4), 10.0 * i + comm.rank)) for i in range(1, 9)]
        comm.barrier()
    return [i for i, o in enumerate(outs, 1) if (o != sum(10.0 * i + r for r in range(comm.rank))).any()]


@pytest.mark.cpu
@pytest.mark.parametrize("depth", [2, 3])
def test_puts_that_overtake_each_other(run, depth):
    assert run(3, overtaking_case, depth) == [[], [], []]


def transforms_case(comm):
    """torch.func's transforms are rejected by name, and the next call is right."""
    x = torch.ones(2, 1, 3, 1, 2, device=comm.device)
    calls = {
        "allscan": lambda x: allscan.allscan(x[0].transpose(0, 1), comm=comm),
        "halo": lambda x: allscan.halo(x, 1, comm=comm),
        "zeco_gla": lambda x: allscan.zeco_gla(x, x, x, -x, comm=comm, scale=1.0)[0],
    }
    found = []
    for first in (True, False):  # False: the call repeats a shape
        for call in calls.values():
            if not first:
                call(x[0])
            for transformed in (torch.func.vmap(call), torch.func.grad(lambda x, call=call: call(x[0]).sum())):
                found.append(raised(transformed, x))
    return found, allscan.allscan(x[0, 0], comm=comm).mean().item() == comm.rank


@pytest.mark.cpu
def test_functorch(run):
    for found, right in run(2, transforms_case):
        assert right and len(found) == 12
        assert all(kind == "NotImplementedError" and "torch.func" in text for kind, text in found), found


def heard_at_the_end_case(group):
    """Return the error of close() on a rank whose last kernel has timed out unnoticed, as on a GPU."""
    comm = allscan.Communicator(group, timeout=2)
    x = torch.ones(2, 16, 16, device=comm.device)
    allscan.allscan(x, comm=comm)
    if comm.rank == 0:
        return raised(comm.close)
    raised(allscan.allscan, x, comm=comm)  # rank 0 skips it
    comm.streams.synchronize()
    assert comm.broken
    comm.order._has_reported = False
    return raised(comm.close), raised(comm.close)


def test_close_says_that_a_kernel_has_given_up(run):
    error, again = run(2, heard_at_the_end_case)[1]
    assert error[0] == "AllScanTimeout" and "rank 0" in error[1] and again is None, error


MIXED = {  # arguments that ranks mix after agreeing on both, and tokens of a rank
    "cu_seqlens": (40, lambda n: (dict(cu_seqlens=[0, 30, n]), dict(cu_seqlens=[0, 35, n]))),
    "some packed": (40, lambda n: (dict(cu_seqlens=[0, n]), {})),
    "zigzag": (40, lambda n: [dict(cu_seqlens=[0, at, n], layout="zigzag") for at in (30, 35)]),
    "invariant": (128, lambda n: (dict(invariant=64), dict(invariant=128))),
    "layout": (40, lambda n: ({}, dict(layout="zigzag"))),
    "scale": (40, lambda n: (dict(scale=0.5), dict(scale=0.25))),
    "packed scale": (40, lambda n: [dict(cu_seqlens=[0, 30, n], scale=x) for x in (0.5, 0.25)]),
    "normalized": (40, lambda n: ({}, dict(use_qk_l2norm_in_kernel=True))),
    "softplus": (40, lambda n: ({}, dict(dt_softplus=True))),
    "all": (40, lambda n: (dict(output_final_state=True), dict(output_final_state="all"))),
    "all of ssd": (40, lambda n: ({}, dict(return_final_states="all"))),
    "dtypes": (40, lambda n: ({}, dict(dtype=torch.bfloat16))),
    "initial_state": (40, lambda n: ({}, dict(initial_state=torch.zeros(40, 1, 16)))),
}


def fault_at_the_end(comm):
    """Return the error of a barrier after mixed calls, and resync()."""
    comm.streams.synchronize()
    found = raised(comm.barrier)
    comm.resync()
    return found


def mixed_case(group, operator, what):
    """The last rank makes call 4 and the next two with other arguments, all of them already agreed on. Return for each
    call its results and gradients or its error; the error of the barrier; whether all is right after resync()."""
    comm = allscan.Communicator(group, timeout=4.0)
    tokens, ways = MIXED[what]
    ways = ways(tokens * comm.size)
    generator = torch.Generator().manual_seed(comm.rank)
    given = [torch.randn(1, tokens, 1, 16, generator=generator).to(comm.device) for _ in range(3)]
    q, k, v = (x.requires_grad_() for x in given)

    def call(**options):
        if operator == "zeco_gla":
            o, _ = allscan.zeco_gla(q, k, v, -q.detach().abs() / 16, comm=comm, **options)
        elif operator == "zeco_kda":
            g = -q.detach().abs() / 16
            o, _ = allscan.zeco_kda(q, k / 8, v, g, k[..., 0].sigmoid(), comm=comm, chunk="allscan", **options)
        elif operator == "halo":
            dtype = options.pop("dtype", torch.float32)
            o = allscan.halo(q.to(dtype), 3, comm=comm, **options).float()
        elif operator == "allscan":
            o = allscan.allscan((q, k) if options else q, comm=comm, **options)
            o = torch.stack(o) if options else o
        elif operator == "allscan_segments":
            pair = "layout" in options
            options = {name: x.to(comm.device) if name == "initial_state" else x for name, x in options.items()}
            found, _ = allscan.allscan_segments((q, k) if pair else q, comm=comm, **options)
            o = torch.stack(found) if pair else found
        else:
            dt, A = v[..., 0].abs() / 16, -torch.ones(1, device=comm.device)
            found = allscan.zeco_ssd(q, dt, A, k, v, 64, comm=comm, **options)
            o = found[0] if isinstance(found, tuple) else found
        leaf = k if operator in ("zeco_gla", "zeco_kda") else q  # its gradient depends on tokens of other ranks
        leaf.grad = None
        o.square().sum().backward()
        return o.detach().norm().item(), leaf.grad.norm().item()

    right = [call(**ways[i]) for i in (0, 1, 0)]
    found = [value_or_error(call, **ways[comm.rank == comm.size - 1]) for _ in range(3)]
    end = fault_at_the_end(comm)
    again = all(
        math.isclose(a, b, rel_tol=1e-4) for i in (1, 0) for a, b in zip(call(**ways[i]), right[i], strict=True)
    )
    comm.close()
    return found, end, again


@pytest.mark.slow(
    "zeco_gla-some",
    "zeco_gla-packed",
    "zeco_kda-zigzag",
    "zeco_kda-packed",
    "zeco_ssd-invariant",
    "zeco_ssd-layout",
    "zeco_gla-layout",
    "zeco_gla-scale-3",
    "allscan_segments-layout",
    "halo-layout",
)
@pytest.mark.side_by_side(case=mixed_case)
@pytest.mark.parametrize(
    "operator, what, size",
    [
        *[("zeco_gla", what, size) for what, size in zip(MIXED, (2, 3, 3, 2))],
        *product(["halo", "zeco_ssd"], ["cu_seqlens", "zigzag"], [2]),
        *product(["zeco_kda"], ["cu_seqlens", "zigzag", "invariant"], [2]),
        ("zeco_ssd", "invariant", 2),
        *product(["allscan", "allscan_segments", "zeco_ssd", "zeco_gla"], ["layout"], [3]),
        ("halo", "layout", 2),
        *product(["zeco_gla", "zeco_kda"], ["scale", "packed scale", "all"], [2]),
        ("zeco_kda", "normalized", 2),
        *product(["zeco_ssd"], ["softplus", "all of ssd"], [2]),
        ("zeco_gla", "scale", 3),
        ("halo", "dtypes", 2),
        ("allscan_segments", "initial_state", 2),
    ],
)
def test_ranks_that_mix_what_they_know(answers, operator, what, size):
    """No call exchanges anything on the host: the first launch that pairs two different calls detects them."""
    assert all(end and end[0] in ("AllScanOutOfStep", "AllScanTimeout") and again for _, end, again in answers), answers
    found, end, _ = answers[-1]
    for one in found:  # no gradient is another call's, nor is a result on the last rank
        assert isinstance(one, str) or one[0] != one[0], answers
    assert end[0] == "AllScanOutOfStep" and "possible causes are different cu_seqlens" in end[1], end
    for others, _, _ in answers[:-1]:
        assert all(isinstance(one, str) or one[1] != one[1] for one in others), answers


def mixed_reverse_case(group, operator):
    """The last rank makes the third call with reverse=True. Return whether each of the next two, equal on all ranks, is
    right, or its error; and the error of the barrier."""
    comm = allscan.Communicator(group, timeout=4.0)
    x = torch.full((1, 1, 16, 16), comm.rank + 1.0, device=comm.device)
    scan = allscan.AllScan(comm, x.shape)

    def call(reverse):
        if operator == "AllScan.scan":
            return scan.scan(x, reverse=reverse)
        if operator == "halo":
            return allscan.halo(x, 1, comm=comm, reverse=reverse)
        if operator == "allscan_segments":
            return allscan.allscan_segments(x, comm=comm, reverse=reverse)[0]
        return allscan.allscan(x, comm=comm, reverse=reverse)

    right = {reverse: call(reverse) for reverse in (False, True)}
    call(comm.rank == comm.size - 1)
    found = [value_or_error(lambda way=way: torch.equal(call(way), right[way])) for way in (False, True)]
    end = fault_at_the_end(comm)
    again = all(torch.equal(call(reverse), x) for reverse, x in right.items())
    comm.close()
    return found, end, again


def interrupted_call_case(group, functions, wrong_decay, debug):
    """Ctrl-C on the last rank at each line of these functions in turn. Return the lines, and those after which a later
    call had another call's value, or none of the two ranks an error although their calls differ."""
    entry = calls._Call.__enter__ in functions
    comm = allscan.Communicator(group, timeout=TIMEOUT if entry else 2.0, debug=debug)
    x = torch.full((1, 4, 4), comm.rank + 1.0, device=comm.device)
    decay = torch.ones(1, 4, device=comm.device)
    codes = [f.__code__ for f in functions]
    lines = [(code, line) for code in codes for *_, line in code.co_lines() if line and line > code.co_firstlineno]
    lines = list(dict.fromkeys(lines))

    def attempt(value, decay=decay):
        try:
            found = allscan.allscan(value * x, decay, comm=comm)[0, 0, 0].item()
            comm.check()
        except (RuntimeError, TypeError, ValueError) as error:
            return type(error).__name__
        return found

    wrong = []
    for code, line in lines:
        comm.resync()
        first = attempt(1.0)
        hit = []

        def trace(frame, event, argument, code=code, line=line, hit=hit):
            if frame.f_code is code and event == "line" and frame.f_lineno == line and not hit:
                hit.append(line)
                raise KeyboardInterrupt
            return trace if frame.f_code is code else None

        second = "KeyboardInterrupt"
        if comm.rank == comm.size - 1:
            sys.settrace(trace)
        with contextlib.suppress(KeyboardInterrupt):
            second = attempt(2.0, decay.double() if wrong_decay and comm.rank == comm.size - 1 else decay)
        sys.settrace(None)
        if entry:  # a call that a rank has not entered is found by the next step, others without it
            comm.step()
        others = [attempt(3.0), attempt(4.0)]
        right = [value * comm.rank for value in (3.0, 4.0)]
        if first != comm.rank or any(not isinstance(a, str) and a != b for a, b in zip(others, right)):
            wrong.append((line, first, second, others))
        if comm.order.inside is not None:
            wrong.append((line, "the call has not ended"))
    comm.resync()
    comm.close()
    return len(lines), wrong


@pytest.mark.cpu
def test_ctrl_c_where_a_call_begins_and_ends(run):
    functions = calls._Call.__enter__, calls._leave
    for count, wrong in run(2, interrupted_call_case, functions, False, False):
        assert count > 15 and not wrong, wrong


@pytest.mark.slow(but="True")
@pytest.mark.cpu
@pytest.mark.parametrize("debug", [False, True])
def test_ctrl_c_where_a_call_fails(run, debug):
    functions = calls._leave, Order.failed
    for count, wrong in run(2, interrupted_call_case, functions, True, debug):
        assert count > 10 and not wrong, wrong


def fails_before_its_launch_case(group):
    """Rank 1 fails between a launch's comparison, in debug mode, and the launch. Return what three calls give, and
    what barrier() raises."""
    with allscan.Communicator(group, timeout=60, debug=True) as comm:
        x = torch.ones(1, 4, 4, device=comm.device)
        allscan.allscan(x, comm=comm)
        launch = launcher.Launcher.before_launch

        def failing(self, *arguments):
            launch(self, *arguments)
            if comm.rank == 1:
                raise torch.OutOfMemoryError("no memory for the scan")

        found = []
        for value in (1.0, 10.0, 20.0):
            with mock.patch.object(launcher.Launcher, "before_launch", failing if value == 1.0 else launch):
                found.append(value_or_error(lambda n=value: allscan.allscan(n * x, comm=comm)[0, 0, 0].item()))
        end = raised(comm.barrier)
        comm.resync()
        return found, end[0], allscan.allscan(x, comm=comm)[0, 0, 0].item() == comm.rank


@pytest.mark.cpu
def test_a_rank_that_fails_after_the_comparison_of_a_launch(run):
    """The other rank has launched, so this is no call that all ranks reject: later calls raise on both."""
    lost = "AllScanOutOfStep"
    for (first, *others), end, right in run(2, fails_before_its_launch_case):
        assert first in (lost, "OutOfMemoryError") and others == [lost, lost] and end == lost and right


def interrupted_rejection_case(group):
    """Rank 1 rejects a call and gets Ctrl-C before that is recorded; then all call barrier() and close()."""
    comm = allscan.Communicator(group, timeout=2)
    x = torch.ones(1, 4, 4, device=comm.device)
    allscan.allscan(x, comm=comm)
    with mock.patch.object(Order, "failed", side_effect=KeyboardInterrupt):
        try:
            allscan.allscan(x.double() if comm.rank else x, comm=comm)
        except KeyboardInterrupt:
            assert comm.rank == 1
    return raised(comm.barrier), raised(comm.close), comm.closed


def test_ctrl_c_before_a_rejection_is_recorded(run):
    for end, _, closed in run(2, interrupted_rejection_case):
        assert end[0] == "AllScanOutOfStep" and "rank 1 was interrupted in its call 2" in end[1] and closed, end


def failed_block_case(group):
    """Rank 1 leaves the block of an AllScan by an exception; then all ranks call resync()."""
    with allscan.Communicator(group, timeout=4.0) as comm:
        x, found = torch.ones(1, 4, 4, device=comm.device), []
        for _ in range(2):
            with contextlib.suppress(ValueError, allscan.AllScanError), allscan.AllScan(comm, (1, 4, 4)) as scan:
                scan.scan(x)
                if comm.rank == 1:
                    raise ValueError
            del scan
            found.append(raised(comm.resync))
        return found


def test_resync_after_a_block_that_failed_on_one_rank(run):
    assert run(2, failed_block_case) == [[None, None]] * 2


def closes_early_case(group, how):
    """Rank 0 is in barrier() or a first call, or leaves its block by an exception, while rank 1 is in close()."""
    comm = allscan.Communicator(group, timeout=2)
    x, begun = torch.ones(1, 4, 4, device=comm.device), time.monotonic()
    allscan.allscan(x, comm=comm)
    if comm.rank == 1:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            error = raised(comm.close)
        assert comm.closed
        return error, time.monotonic() - begun
    if how == "block":
        with pytest.raises(ValueError, match="a batch"), comm:
            raise ValueError("a batch of \udcff")  # as in names of files
        return None, time.monotonic() - begun
    error = raised(comm.barrier) if how == "barrier" else raised(allscan.allscan, x[:, :2], comm=comm)
    raised(comm.close)
    return error, time.monotonic() - begun


@pytest.mark.parametrize("how", ["barrier", "first call", "block"])
def test_a_rank_closes_while_another_one_goes_on(run, how):
    (of_0, seconds), (of_1, others_seconds) = run(2, closes_early_case, how)
    assert max(seconds, others_seconds) < 60
    if how == "block":
        assert of_0 is None and of_1[0] == "UserWarning", (of_0, of_1)
        assert "rank 0 (global) has left its communicator's block by ValueError: a batch of ?" in of_1[1], of_1
    else:
        assert of_0[0] == "AllScanOutOfStep" and "rank 1 waits in Communicator.close" in of_0[1], of_0


@pytest.mark.parametrize("operator", ["AllScan.scan", "allscan", "allscan_segments", "halo"])
def test_a_rank_that_goes_the_other_way(run, operator):
    """No launch pairs the calls that differ; the next one, in either direction, detects them."""
    answers = run(2, mixed_reverse_case, operator)
    assert all(end and end[0] == "AllScanOutOfStep" and again for _, end, again in answers[1:]), answers
    (first, *_), (last, end, _) = answers
    assert last[0] is not True and True not in last[1:], answers  # it waits for the first rank
    assert "an earlier call with a different reverse" in end[1], end


def stamps_case(group):
    """Return whether compiled kernels and the interpreter get equal channels, and the counts in words of stamps."""
    with allscan.Communicator(group) as comm, allscan.AllScan(comm, (2, 4, 8)) as scan:
        launcher, fwd_epoch = scan.launcher, scan.fwd_epoch()
        alike = []
        for reverse, adjoint, number in product((False, True), (False, True), (0, 1, STAMPS.value - 1)):
            *rest, taken = launcher._with_channel(ChannelUse(reverse, adjoint, number), [16, 32, fwd_epoch.data_ptr()])
            wanted = launcher.channel(reverse, fwd_epoch, adjoint, number)
            alike.append(rest == [16, 32] and taken == channel_addresses(wanted))
        words = [comm.memory.step_of(number)[0].item() for number in (0, 1, 7)]
        comm.step()
        words += [comm.memory.step_of(number)[0].item() for number in (0, 1, 7)]
        comm.resync()
        return alike, words, comm.memory.step_of(7)[0].item()


def test_the_words_of_stamps(run):
    for alike, words, last in run(2, stamps_case):
        assert all(alike) and words == [0, 8, 56, 1, 9, 57] and last == 57


@pytest.mark.quick
def test_stamps():
    lengths = [(0, 10 + i, 100) for i in range(64)]
    found = {stamp(x, kind, segment) for x in lengths for kind in (0, 1) for segment in (0, 64)}
    assert 240 < len(found) <= 256 and max(found) < STAMPS.value
    assert stamp((0, 3), True, 0) == stamp(tuple(np.array([0, 3])), 1, 0) != stamp((0, 3), 0, 0)
    assert stamp((0, 3), "scale", 1) == stamp((0, 3), "scale", 1.0) != stamp((0, 3), "scale", 1.5) != stamp(None, 1.5)
    digest = hashlib.blake2b(b"[[0.0, 12.0, 40.0], 1.0, 128.0]", digest_size=8).digest()  # the same in every process
    assert stamp((0, 12, 40), 1, 128) == int.from_bytes(digest, "little") % STAMPS.value


def failed_resync_case(comm):
    """Return the errors of resync() calls where rank 1 fails inside of one; whether a scan is right afterwards."""
    x = torch.ones(2, 16, 16, device=comm.device)
    for _ in range(3):
        comm.step()
        allscan.allscan(x, comm=comm)
    if comm.rank == 1:
        comm.memory.reset = mock.Mock(side_effect=torch.OutOfMemoryError("no memory"))
    first = raised(comm.resync)
    vars(comm.memory).pop("reset", None)
    again = raised(comm.resync)
    return first[0], again, allscan.allscan(x, comm=comm)[0, 0, 0].item() == comm.rank


def test_resync_again_after_one_that_failed_on_one_rank(run):
    (of_0, *rest_of_0), (of_1, *rest_of_1) = run(2, failed_resync_case)
    assert of_0 == "AllScanOutOfStep" and of_1 == "OutOfMemoryError"
    assert rest_of_0 == rest_of_1 == [None, True]


def interrupted_resync_case(comm):
    """Rank 1 gets Ctrl-C once the others go on in resync(), twice; it calls step() between the attempts."""
    x, exchange = torch.ones(2, 16, 16, device=comm.device), comm.order.store_exchange.exchange

    def interrupted(value, what, *rest, **options):
        exchange(value, what, *rest, **options)
        raise KeyboardInterrupt

    found = []
    for attempt in range(2):
        comm.step()
        allscan.allscan(x, comm=comm)
        if comm.rank == 1:
            with mock.patch.object(comm.order.store_exchange, "exchange", interrupted):
                with pytest.raises(KeyboardInterrupt):
                    comm.resync()
        else:
            found.append(raised(comm.resync)[0])
        if attempt:
            comm.order.missed_steps += 1  # as a step() that raises
        found.append(raised(comm.resync))
    return found, comm._steps(), allscan.allscan(x, comm=comm)[0, 0, 0].item() == comm.rank


def test_resync_again_after_ctrl_c_in_it(run):
    for rank, answer in enumerate(run(2, interrupted_resync_case)):
        of_others = [] if rank else ["AllScanOutOfStep"]
        assert answer == ([*of_others, None] * 2, 3, True), answer


def replayed_steps_case(group):
    """Return the error of resync() where rank 1 has replayed a graph with a step() once more."""
    comm = allscan.Communicator(group, timeout=60)
    comm.step()
    for _ in range(2 + comm.rank):  # as a replay does
        comm.memory.steps.add_(1)
    error = raised(comm.resync)
    raised(comm.close)
    return error


def test_resync_counts_steps_of_graphs(run):
    for name, text in run(2, replayed_steps_case):
        assert name == "AllScanOutOfStep" and "rank 0: 3; rank 1: 4" in text


def names_case(group):
    names = []
    for _ in range(2):
        with allscan.Communicator(group) as comm:
            names.append(comm.order.store_exchange.name)
            comm.order.store_exchange._counts.clear()  # as where torch.distributed is restarted over the same store
    return names


def test_a_communicator_reads_nothing_of_an_earlier_one(fresh):
    first, second = fresh(2).run(ranks.on_first, 2, names_case)
    assert first == second and len({*first}) == 2
