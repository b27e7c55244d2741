"""Ranks that reject, miss or ignore calls, on any communicator."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
import torch.distributed as dist

import allscan
from allscan.comm import heap
from allscan.launch.compiled_kernel import Launch

from .fla import import_fla
from .values import raised

TIMEOUT = 3.0


def failing_launch(name):
    """Make launches of the kernel ``name`` run out of memory inside the block."""
    whole = Launch.__call__

    def launch(self, *tensors):
        if self.kernel.fn.__name__ == name:
            raise torch.OutOfMemoryError(name)
        return whole(self, *tensors)

    return mock.patch.object(Launch, "__call__", launch)


def delta(comm, v):
    """Call zeco_kda with inputs for which the state is the last token's v, and o of a token its v; of a rank's first
    token the v of the token before."""
    import_fla()
    T = v.shape[1]
    k = torch.nn.functional.one_hot(torch.zeros(1, T, 1, dtype=torch.long), 8).to(v)
    beta = torch.ones(1, T, 1, device=v.device)
    beta[:, :1] = 0.0
    return allscan.zeco_kda(k, k, v, 0 * k, beta, comm=comm, scale=1.0)[0]


def value(comm, how, i, bad):
    """Make one call of iteration i with 10 * i as every rank's input; return a value of its result, or the exception's
    name."""
    try:
        if how == "allscan":
            state = torch.full((1, 2), 10.0 * i, device=comm.device)
            return allscan.allscan(state.double() if bad else state, comm=comm).mean().item()
        kind = torch.float64 if bad else torch.float32
        if how == "halo":
            x = torch.full((1, 4, 3), 10.0 * i, device=comm.device, dtype=kind)
            return allscan.halo(x, 2, comm=comm).mean().item()
        if how == "zeco_gla":
            x = torch.ones(1, 3, 1, 2, device=comm.device, dtype=kind)
            return allscan.zeco_gla(0 * x + 1, x, 10.0 * i * x, 0 * x, comm=comm, scale=1.0)[0][0, 0, 0, 0].item()
        if "halfway" in how:
            with failing_launch(how.split()[-1] if bad else None):
                return value(comm, how.split()[0], i, False)
        if how == "delta":
            return delta(comm, torch.full((1, 3, 1, 8), 10.0 * i, device=comm.device, dtype=kind))[0, 0, 0, 0].item()
        if bad and "skipped" in how:
            raise torch.OutOfMemoryError
        if "zigzag" in how:
            state = torch.full((1, 2), 10.0 * i, device=comm.device)
            pair = state, state.double() if bad else state
            return allscan.allscan(pair, comm=comm, layout="zigzag")[1].mean().item()
        return allscan.allscan(torch.full((1, 2), 10.0 * i, device=comm.device), comm=comm).mean().item()
    except (RuntimeError, ValueError, TypeError) as problem:
        return type(problem).__name__


def expected(how, comm, i):
    how = how.split(" halfway")[0]
    if how in ("halo", "delta"):
        return 10.0 * i if comm.rank else 0.0
    if how == "zeco_gla":  # 3 tokens for each rank before this one, and its first token; K = 2
        return 2 * 10.0 * i * (3 * comm.rank + 1)
    if "zigzag" in how:  # all ranks' states in the ascending scan, those of later ranks in the descending one
        return 10.0 * i * (2 * comm.size - 1 - comm.rank)
    return 10.0 * i * comm.rank


def shifted_case(group, how, step, options=None):
    comm = allscan.Communicator(group, timeout=TIMEOUT, **options or {})
    last, found, right = comm.size - 1, [], []
    for i in range(1, 10):
        if step:
            with contextlib.suppress(allscan.AllScanError):
                comm.step()
        found.append(value(comm, how, i, i == 4 and comm.rank == last))
        right.append(expected(how, comm, i))
    comm.streams.synchronize()
    end = raised(comm.barrier) or ("nothing", "")
    comm.resync()
    again = value(comm, how, 7, False) == expected(how, comm, 7)
    comm.close()
    return found, right, end, again


def check_no_values_of_others(answers):
    """Each rank has right values, NaN or the names of errors; barrier() raises, and calls after resync() are right."""
    for rank, (found, right, end, again) in enumerate(answers):
        for got, wanted in zip(found, right):
            assert got == wanted or isinstance(got, str) or got != got, (rank, found, right)
        assert end[0] in ("AllScanOutOfStep", "AllScanTimeout") and again, (rank, found, end)


def training(comm, i, ignores, validate=False, how="allscan"):
    """Run one step of prev = allscan(state), loss = prev * i; return state.grad; with delta() the gradient of the last
    token's v. In the zigzag layout prev is the sum of both scans, and state that of the ascending one. Of an operator,
    by its name, in that layout: the sum of v's gradient."""
    if how in ("zeco_gla", "zeco_kda"):
        v = torch.full((1, 64, 1, 16), float(i), device=comm.device, requires_grad=True)
        k = torch.full_like(v, 1 / 8)
        beta = [] if how == "zeco_gla" else [k[..., 0]]
        o, _ = getattr(allscan, how)(k, k, v, -k, *beta, comm=comm, layout="zigzag")
        (v.sum() * 0 if ignores else (o * i).sum()).backward()
        return v.grad.sum().item()
    if how == "delta":
        v = torch.full((1, 3, 1, 8), float(i), device=comm.device, requires_grad=True)
        o = delta(comm, v)
        (v.sum() * 0 if ignores else (o * i).sum()).backward()
        return v.grad[:, -1].mean().item()
    state = torch.full((1, 1), float(i), device=comm.device, requires_grad=True)
    if how == "zigzag":
        prev = sum(allscan.allscan((state, state.detach()), comm=comm, layout=how))
    else:
        prev = allscan.allscan(state, comm=comm)
    loss = state.sum() * 0 if ignores else (prev * i).sum()
    if validate:
        return None
    loss.backward()
    return state.grad.item()


def ignoring_case(group, how, options=None, who=0):
    """Train while rank ``who`` ignores its result, and so has no backward."""
    with allscan.Communicator(group, **options or {}) as patient:
        training(patient, 1, False, how=how)  # compiles first: a rank waits only TIMEOUT for another one's backward
    comm = allscan.Communicator(group, timeout=TIMEOUT, **options or {})
    found = []
    for i in range(1, 8):
        try:
            gradient = training(comm, i, ignores=comm.rank == who, how=how)
            if comm.device.type == "cuda":
                torch.cuda.synchronize()
                comm.check()
            found.append(gradient)
        except RuntimeError as problem:
            found.append(type(problem).__name__)
            break
    comm.resync()
    right = [training(comm, i, ignores=False, how=how) for i in range(1, 4)]
    comm.close()
    return found, right, comm.size - 1 - comm.rank


def validation_case(group, options=None):
    """Make calls with gradients but no backward on all ranks: between training steps, and many in a row."""
    with allscan.Communicator(group, timeout=20, **options or {}) as comm:
        found = []
        for i in range(1, 5):
            for _ in range(3):
                training(comm, i, False, validate=True)
            found.append(training(comm, i, False))
        return found == [float((comm.size - 1 - comm.rank) * i) for i in range(1, 5)]


def other_backward_case(group, options=None):
    """Run the second call's backward first on rank 0, the first call's on the others."""
    comm = allscan.Communicator(group, timeout=TIMEOUT, **options or {})
    states = [torch.full((1, 1), float(i), device=comm.device, requires_grad=True) for i in (1, 2)]
    prevs = [allscan.allscan(state, comm=comm) for state in states]
    try:
        prevs[comm.rank == 0].sum().backward()
        comm.streams.synchronize()
        comm.check()
        found = "nothing"
    except RuntimeError as problem:
        found = f"{type(problem).__name__}: {problem}"
    nan = states[comm.rank == 0].grad
    comm.resync()
    old = raised(prevs[comm.rank != 0].sum().backward)
    comm.close()
    return found, nan is None or bool(nan.isnan().all()), old


def resync_case(group, options=None):
    """Resync after a time-out, repeatedly, with the same objects and without a leak of memory."""

    comm = allscan.Communicator(group, **dict(timeout=2.0) | (options or {}))
    scan = allscan.AllScan(comm, (2, 4, 8))
    free = heap.symmetric_heap().arena.free_bytes
    state = torch.ones(2, 4, 8, device=comm.device)
    for round in range(3):
        if comm.rank != 1:
            try:
                scan.scan(state)
                comm.streams.synchronize()
                comm.check()
            except allscan.AllScanTimeout:
                pass
        dist.barrier(group)
        comm.resync()
        for i in range(1, 6):
            assert (scan.scan(i * state) == i * comm.rank).all(), (round, i)
            assert (scan.scan(i * state, reverse=True) == i * (comm.size - 1 - comm.rank)).all()
        comm.barrier()
    assert heap.symmetric_heap().arena.free_bytes == free
    comm.close()
    return True
