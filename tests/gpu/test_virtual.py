"""Many ranks on one GPU: chain, rails and recursive doubling with 16 to 64 virtual ranks; rails on two GPUs as two
nodes.

The number of hardware queues is set before CUDA starts, so virtual ranks run in a separate process.
"""

from __future__ import annotations

import os
import random
import time
from unittest import mock

import pytest
import torch

import allscan
from allscan.reference import allscan_reference
from allscan.tools.ranks import Ranks
from support import virtual
from support.scans import Guarded
from support.values import captured, raised
from support.virtual import VirtualRanks

pytestmark = pytest.mark.gpu
FOUR = (8, 8, 8, 8)
KINDS = [
    ("chain", (32,)),
    ("rails", FOUR),
    ("recursive_doubling", FOUR),
    ("rails", (3, 5)),
    ("recursive_doubling", (2,) * 7),
]
DECAYS = ["random", "0", "1", "mixed"]


@pytest.fixture(scope="module")
def one():
    """A process with one rank and 32 hardware queues, which loads all modules at once."""
    variables = dict(CUDA_DEVICE_MAX_CONNECTIONS="32", CUDA_MODULE_LOADING="EAGER")
    with mock.patch.dict(os.environ, variables), Ranks(1, "cuda", backend="gloo") as ranks:
        yield ranks


def draw(generator, size, shape, kind):
    """Return (states, decays) of all ranks."""
    device = generator.device
    states = torch.randn(size, *shape, generator=generator, device=device)
    decays = torch.rand(size, *shape[:-1], generator=generator, device=device)
    if kind in ("0", "1"):
        decays.fill_(float(kind))
    elif kind == "mixed":  # zeros in whole ranks, tiles and single rows
        pick = torch.rand(decays.shape, generator=generator, device=device)
        decays[pick < 0.3], decays[pick > 0.7] = 0.0, 1.0
        whole = torch.rand(size, generator=generator, device=device)
        decays[whole < 0.2], decays[whole > 0.6] = 0.0, 1.0
    return states, decays


def wrong_by(found, states, decays, initial=None, reverse=False):
    """Return the largest difference as a tensor on the GPU; 1e30 for NaN."""
    expected = torch.stack(allscan_reference(list(states), list(decays), initial, reverse))
    return (found - expected).abs().max().nan_to_num(nan=1e30)


def values(algorithm, nodes, kind, epochs, shape, tile, depth, protocol, straggler_us, initials, programs=4, gpus=1):
    """Scan fresh data in every epoch, with programs late by up to ``straggler_us``; compare every 50 epochs. Ranks are
    assigned to ``gpus`` in turns."""
    size = sum(nodes)
    devices = [rank % gpus for rank in range(size)]
    options = dict(depth=depth, protocol=protocol, tile=tile, programs=programs, devices=devices)
    ranks = VirtualRanks(size, shape, nodes=nodes, algorithm=algorithm, **options)
    generator = torch.Generator("cuda").manual_seed(0)
    chance = random.Random(0)
    worst = torch.zeros((), device="cuda", dtype=torch.float64)
    calls = []
    for epoch in range(epochs):
        states, decays = draw(generator, size, shape, kind)
        initial = states[0] / 2 if initials and epoch % 3 == 0 else None
        late = [16 * chance.randrange(1 + int(straggler_us * 62.5)) * (chance.random() < 0.3) for _ in range(size)]
        delays = torch.tensor(late, device="cuda")
        reverse = bool(epoch % 2)
        calls.append((states, decays, initial, reverse, delays))
        if len(calls) == 50 or epoch == epochs - 1:  # launched together, so that ranks run ahead of each other
            given = [
                (states, decays) if gpus == 1 else [[*map(torch.Tensor.to, x, devices)] for x in (states, decays)]
                for states, decays, *_ in calls
            ]
            outs = [
                ranks.scan(*both, reverse=reverse, initial=initial, delays_ns=delays, join=False)
                for both, (_, _, initial, reverse, delays) in zip(given, calls, strict=True)
            ]
            ranks.join()
            for found, (states, decays, initial, reverse, _) in zip(outs, calls, strict=True):
                found = torch.stack([x.to("cuda") for x in found])
                worst = torch.maximum(worst, wrong_by(found, states, decays, initial, reverse))
            calls.clear()
    ranks.check()
    return worst.item()


def guarded(V):
    """Launch three ranks in sequence whose rows are not multiples of four words. Return (largest error, whether the
    memory around each ``out`` is unchanged)."""
    shape = (4, 16, V)
    ranks = VirtualRanks(3, shape)
    states, decays = draw(torch.Generator("cuda").manual_seed(V), 3, shape, "random")
    outs = [Guarded(shape, "cuda") for _ in range(3)]
    scan = virtual._Scan(states, decays, None, [out.tensor for out in outs], False)
    gate = ranks._gates[virtual.OPEN], ranks._zeros, ranks._unread
    for rank in range(3):
        ranks._launch(rank, scan, tuple(x[ranks.device] for x in gate))
    torch.cuda.synchronize()
    ranks.check()
    worst = wrong_by(torch.stack([out.tensor for out in outs]), states, decays).item()
    return worst, all(out.intact() for out in outs)


@pytest.mark.parametrize("V", [1, 2, 3, 126, 127])
def test_nothing_is_stored_beside_out(one, V):
    [(worst, intact)] = one.run(guarded, V)
    assert worst < 1e-5 and intact


@pytest.mark.parametrize("kind", DECAYS)
@pytest.mark.parametrize("algorithm, nodes", KINDS)
@pytest.mark.kernels
def test_values(one, algorithm, nodes, kind):
    for protocol, depth in (("sentinel", 3), ("sentinel", 1), ("signal", 2))[: 3 if kind == "mixed" else 1]:
        arguments = 40, (3, 16, 33), (4, 64), depth, protocol, 20, depth == 3
        [worst] = one.run(values, algorithm, nodes, kind, *arguments, timeout=600)
        assert worst < 1e-4, (protocol, depth, worst)  # sums of 32 states of size 1


@pytest.mark.parametrize("algorithm, nodes", KINDS[:3])
def test_2000_epochs_with_random_delays(one, algorithm, nodes):
    arguments = 2_000, (4, 16, 32), (4, 32), 3, "sentinel", 50, False
    [worst] = one.run(values, algorithm, nodes, "mixed", *arguments, timeout=600)
    assert worst < 1e-4


@pytest.mark.parametrize("kind", ["random", "mixed"])
@pytest.mark.parametrize("count, programs", [(3, 66), (5, 66), (9, 33)])
def test_a_chain_over_two_gpus(one, count, programs, kind, size=2):
    """Every hop crosses the link between the GPUs; now and then a middle rank is late."""
    arguments = (2_000, (8, 64, 128), (8, 128), 3, "sentinel", 30, True, programs, size)
    [worst] = one.run(values, "chain", (count,), kind, *arguments, timeout=600)
    assert worst < 1e-4


@pytest.mark.parametrize("algorithm, nodes", [("chain", (64,)), ("rails", (8,) * 8), ("recursive_doubling", (8,) * 8)])
@pytest.mark.kernels
def test_64_ranks(one, algorithm, nodes):
    [worst] = one.run(values, algorithm, nodes, "mixed", 100, (4, 16, 32), (4, 32), 3, "sentinel", 20, False, 2)
    assert worst < 1e-4


def absent(algorithm, nodes, rank):
    """Return (largest error before, ranks named in fault records, seconds until the GPU is free, the error of a check)
    with rank ``rank`` absent."""
    size, shape = sum(nodes), (2, 16, 32)
    ranks = VirtualRanks(size, shape, nodes=nodes, algorithm=algorithm, tile=(4, 32), timeout=1.0)
    states, decays = draw(torch.Generator("cuda").manual_seed(0), size, shape, "1")
    worst = wrong_by(ranks.scan(states, decays), states, decays).item()
    start = time.monotonic()
    for _ in range(3):  # at the last one the slots of a rank that only receives are full
        ranks.scan(states, decays, ranks=[p for p in range(size) if p != rank])
    torch.cuda.synchronize()
    seconds = time.monotonic() - start
    named = {found[2] for found in ranks.faults().values()}
    return worst, named, seconds, raised(ranks.check)


@pytest.mark.parametrize("rank", [0, 9, 31])
@pytest.mark.parametrize("algorithm, nodes", KINDS[:3])
def test_a_rank_that_never_comes_is_named(one, algorithm, nodes, rank):
    [(worst, named, seconds, problem)] = one.run(absent, algorithm, nodes, rank)
    assert worst < 1e-4 and rank in named and seconds < 20, (named, seconds)
    assert problem and problem[0] == "AllScanTimeout", problem


def timed(algorithm, nodes, kind, shape, tile, programs):
    """Return (median of 15 scans in us, from the begin of the first rank to the end of the last; largest error)."""
    size = sum(nodes)
    ranks = VirtualRanks(size, shape, nodes=nodes, algorithm=algorithm, tile=tile, programs=programs)
    generator = torch.Generator("cuda").manual_seed(0)
    times, worst = [], 0.0
    for _ in range(15):
        states, decays = draw(generator, size, shape, kind)
        spans, found = ranks.timed(states, decays)
        times.append((spans[-1][0, 1] - spans[0][0, 0]).item() / 1e3)
        worst = max(worst, wrong_by(found, states, decays).item())
    ranks.check()
    return sorted(times)[7], worst


@pytest.mark.alone
def test_where_decays_are_zero_a_chain_waits_for_one_rank(one):
    """With decays of 0, 24 further ranks cost only their launches; with decays of 1, 24 hops. A program has one tile of
    32 KiB. The rest of the time, equal for all, cancels in the difference to 8 ranks."""
    arguments, us = ((4, 64, 128), (64, 128), 4), {}
    for size in (8, 32):
        for kind in ("0", "1"):
            [(us[size, kind], worst)] = one.run(timed, "chain", (size,), kind, *arguments)
            assert worst < 1e-4
    print("chain of 8 and 32 ranks, decays 0 and 1:", us)
    assert us[32, "1"] - us[8, "1"] >= 8 * (us[32, "0"] - us[8, "0"]), us


@pytest.mark.alone
@pytest.mark.parametrize("algorithm, nodes", KINDS[:3])
def test_times(one, algorithm, nodes):
    """Prints times for the model (bench.scaling), with one GPU's memory in place of links."""
    for kind in ("1", "0"):
        [(us, worst)] = one.run(timed, algorithm, nodes, kind, (4, 16, 128), (4, 128), 8)
        print(f"{algorithm}, 32 ranks, decays {kind}: {us:.1f} us")
        assert worst < 1e-4


def epochs_case(group, algorithm, protocol, nodes, epochs, shape=(4, 16, 32)):
    """Scan fresh data every epoch, and compare every epoch; now and then the last rank is late."""
    with allscan.Communicator(group, nodes=nodes, algorithm=algorithm) as comm:
        scan = allscan.AllScan(comm, shape, protocol=protocol)
        generator = torch.Generator(comm.device).manual_seed(0)
        chance = random.Random(comm.rank)
        worst = torch.zeros((), device=comm.device, dtype=torch.float64)
        for epoch in range(epochs):
            states, decays = draw(generator, comm.size, shape, "mixed")
            if comm.rank == comm.size - 1 and chance.random() < 0.02:
                torch.cuda.synchronize()
                time.sleep(chance.uniform(0, 4e-3))
            reverse = bool(epoch % 2)
            found = scan.scan(states[comm.rank], decays[comm.rank], reverse=reverse)
            expected = allscan_reference(list(states), list(decays), None, reverse)[comm.rank]
            worst = torch.maximum(worst, (found - expected).abs().max().nan_to_num(nan=1e30))
        comm.barrier()
        return worst.item()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("algorithm", ["rails", "recursive_doubling"])
@pytest.mark.parametrize("protocol, epochs", [("put", 4_000), ("sentinel", 2_000), ("signal", 500)])
def test_gpus_as_nodes(run, size, algorithm, protocol, epochs):
    assert max(run(size, epochs_case, algorithm, protocol, (1,) * size, epochs)) < 1e-5


@pytest.mark.parametrize(
    "size, nodes, algorithm",
    [(2, (2,), "rails"), (4, (2, 2), "rails"), (4, (2, 2), "recursive_doubling"), (4, (1, 3), "rails")],
)
def test_members_of_nodes(run, size, nodes, algorithm):
    """Links between members of a node are over NVLink."""
    for protocol in ("sentinel", "put", "signal"):
        assert max(run(size, epochs_case, algorithm, protocol, nodes, 1_000, shape=(8, 64, 64))) < 1e-4


def graph(group, algorithm, protocol, replays):
    """Replay both directions and a gradient from a CUDA graph on fresh data."""
    nodes = (1,) * torch.distributed.get_world_size(group)
    with allscan.Communicator(group, nodes=nodes, algorithm=algorithm) as comm:
        shape = (4, 16, 32)
        scan = allscan.AllScan(comm, shape, protocol=protocol)
        generator = torch.Generator(comm.device).manual_seed(0)
        state, decay = torch.zeros(shape, device=comm.device), torch.zeros(shape[:-1], device=comm.device)
        forward, backward = torch.empty_like(state), torch.empty_like(state)
        leaf = torch.zeros(shape, device=comm.device, requires_grad=True)

        def both():
            scan.scan(state, decay, out=forward)
            scan.scan(forward, decay, reverse=True, out=backward)
            prev = allscan.allscan(leaf, decay, comm=comm)
            return prev.detach(), torch.autograd.grad(prev.sum(), leaf)[0]

        replayed, (prev, gradient) = captured(comm, both)
        worst = torch.zeros((), device=comm.device, dtype=torch.float64)
        for _ in range(replays):
            states, decays = draw(generator, comm.size, shape, "mixed")
            state.copy_(states[comm.rank])
            decay.copy_(decays[comm.rank])
            with torch.no_grad():
                leaf.copy_(states[comm.rank])
            replayed.replay()
            given = list(decays)
            prevs = allscan_reference(list(states), given)
            ones = [torch.ones_like(x) for x in states]
            expected = (
                (forward, prevs),
                (prev, prevs),
                (backward, allscan_reference(prevs, given, None, True)),
                (gradient, allscan_reference(ones, given, None, True)),
            )
            for found, wanted in expected:
                worst = torch.maximum(worst, (found - wanted[comm.rank]).abs().max().nan_to_num(nan=1e30))
        comm.barrier()
        return worst.item()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("algorithm", ["rails", "recursive_doubling"])
@pytest.mark.parametrize("protocol", ["put", "sentinel"])
@pytest.mark.kernels
def test_graph_replays(run, size, algorithm, protocol):
    assert max(run(size, graph, algorithm, protocol, 500)) < 1e-4


def stopped(group, algorithm):
    """Rank 1 makes no call; the others get an error, and all return."""
    nodes = (1,) * torch.distributed.get_world_size(group)
    comm = allscan.Communicator(group, timeout=1.0, nodes=nodes, algorithm=algorithm)
    scan = allscan.AllScan(comm, (2, 16, 32))
    state = torch.ones(2, 16, 32, device=comm.device)
    named = None
    scan.scan(state)
    comm.barrier()
    if comm.rank != 1:
        try:
            for _ in range(8):
                scan.scan(state)
            torch.cuda.synchronize()
            comm.check()
        except allscan.AllScanTimeout as timeout:
            named = timeout.neighbour
            torch.cuda.synchronize()
    torch.distributed.barrier(group)
    comm.resync()
    right = bool((scan.scan(state) == comm.rank).all())
    comm.close()
    return named, right


@pytest.mark.parametrize("algorithm", ["rails", "recursive_doubling"])
def test_a_gpu_that_never_comes(run, algorithm, size=2):
    answers = run(size, stopped, algorithm)
    assert answers == [(1, True), (None, True)]
