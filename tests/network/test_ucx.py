"""Kernels in Triton's interpreter with puts over UCX and TCP, through the hostile network: without GPUs, but with the
wheel libucx-cu13."""

from __future__ import annotations

import pytest
import torch

import allscan
from allscan.reference import allscan_reference
from allscan.tools.ranks import Ranks
from support import network, ucx_network
from support.any_epoch import control_case
from support.call_order import resync_case, shifted_case
from support.delta import DeltaCase, own_case
from support.gla import GLACase, check, gla_case
from support.network_cases import absent_case, halo_case, lost_case, memory_case, stall_case
from support.scans import ScanCase, error_of, gradient_case, scan_case
from support.values import error, late

pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(not network.compiler(), reason="needs a C compiler, cc"),
    pytest.mark.skipif(not network.ucx_folder(), reason="needs UCX: pip install libucx-cu13 (or -cu12)"),
]
REORDER = "reorder", 3_000_000  # a put's largest delay in ns
DELAYS = 20_000_000, 200_000_000, 2_000_000_000  # tried in turn: a busy machine makes launches that take longer
IN_ORDER = "bandwidth", 1 << 40


class Network:
    """Ranks of several nodes. nodes: ranks of each; heap: "host", or "gpu" for a mocked GPU's."""

    def __init__(self, folder, nodes, heap="host"):
        self.nodes, self.folder = nodes, str(folder)
        self.ranks = Ranks(sum(nodes), "cpu")
        numbers = [n for n, members in enumerate(nodes) for _ in range(members)]
        assert all(self.ranks.run(ucx_network.enter, numbers, ucx_network.variables(self.folder, heap)))

    def run(self, function, *arguments, behaves=REORDER, timeout=900.0):
        """Return (results by rank, increases of the network's counters); all traffic went through lo."""
        options = dict(behaves=behaves, timeout=timeout)
        found, counted, _ = network.run_over(self.ranks, sum(self.nodes), function, *arguments, **options)
        assert network.lanes(self.folder) == {"tcp/lo"}
        return found, counted

    def reordered(self, function, *arguments, overtakings=13, of_groups=0):
        """Return ``run`` with the first of DELAYS by which so many puts overtake each other."""
        for delay in DELAYS:
            found, counted = self.run(function, *arguments, behaves=("reorder", delay))
            if counted["overtakings"] >= overtakings and counted["of_groups"] >= of_groups:
                return found, counted
        pytest.fail(f"puts hardly overtake each other: {counted}")


@pytest.fixture
def over(tmp_path):
    """over(nodes, heap): a Network."""
    made = []

    def start(nodes, heap="host"):
        made.append(Network(tmp_path, nodes, heap))
        return made[-1]

    yield start
    for one in made:
        one.ranks.close(0.0)


def nodes_case(group, nodes, algorithm, epochs, depth=3):
    """Return the largest error; directions alternate between epochs, with stragglers."""
    with allscan.Communicator(group, nodes=nodes, timeout=60) as comm:
        scan = allscan.AllScan(comm, (4, 8, 16), depth=depth, algorithm=algorithm, tile=(2, 16))
        worst = 0.0
        for epoch in range(epochs):
            late(epoch, comm.rank, 4)
            worst = max(worst, error_of(comm, scan.scan, scan.shape, epoch, bool(epoch % 2)))
        comm.check()
    return worst


@pytest.mark.parametrize("algorithm", ["chain", "rails", "recursive_doubling"])
@pytest.mark.parametrize("nodes", [(1, 1), (1, 1, 1, 1), (2, 2), (1, 2), (4, 4), (2, 2, 2, 2)], ids=str)
def test_nodes(over, nodes, algorithm):
    least = 0 if (nodes, algorithm) == ((4, 4), "rails") else 13  # each of four owners has few puts in flight
    assert max(over(nodes).reordered(nodes_case, nodes, algorithm, 12, overtakings=least)[0]) < 1e-6


@pytest.mark.parametrize("depth", [1, 2])
def test_depths(over, depth):
    one = over((2, 2))
    for algorithm in ("chain", "rails", "recursive_doubling"):
        assert max(one.run(nodes_case, (2, 2), algorithm, 12, depth, behaves=("reorder", 20_000_000))[0]) < 1e-6


def back_to_back_case(group, rounds):
    """Keep many tiles of several epochs in flight; sums of integers are exact."""
    with allscan.Communicator(group, timeout=60) as comm:
        scan, wrong = allscan.AllScan(comm, (8, 8, 16), depth=3, tile=(8, 16), protocol="put"), 0
        pattern = torch.arange(scan.shape[0] * 128.0).view(scan.shape)
        for i in range(rounds):
            found = scan.scan(pattern + i * (comm.rank + 1))
            wrong += (found != comm.rank * pattern + i * (comm.rank * (comm.rank + 1) // 2)).sum().item()
        return wrong


def test_a_thousand_overtakings(over):
    assert max(over((1, 1)).reordered(back_to_back_case, 600, overtakings=1001, of_groups=101)[0]) == 0


def test_a_receiver_that_takes_any_later_epoch(over):
    """The control is wrong where puts overtake each other."""
    one = over((1, 1))
    assert all(one.run(control_case, 30, behaves=IN_ORDER)[0])
    assert not all(all(one.run(control_case, 30, behaves=("reorder", delay))[0]) for delay in DELAYS)


def transition_case(group, epochs):
    """Return the largest error with dense transitions."""
    with allscan.Communicator(group) as comm:
        worst = 0.0
        for epoch in range(epochs):
            generator = torch.Generator().manual_seed(epoch)
            states = list(torch.randn(comm.size, 2, 4, 8, generator=generator))
            factors = list(torch.randn(comm.size, 2, 4, 4, generator=generator) / 4)
            late(epoch, comm.rank, 2)
            found = allscan.allscan(states[comm.rank], comm=comm, transition=factors[comm.rank])
            worst = max(worst, error(found, allscan_reference(states, transitions=factors)[comm.rank]))
    return worst


def zigzag_case(group, epochs):
    """Return the largest error with two states a rank."""
    with allscan.Communicator(group) as comm:
        places, worst = (comm.rank, 2 * comm.size - 1 - comm.rank), 0.0
        for epoch in range(epochs):
            states = list(torch.randn(2 * comm.size, 2, 4, 8, generator=torch.Generator().manual_seed(epoch)))
            late(epoch, comm.rank, 2)
            found = allscan.allscan(tuple(states[i] for i in places), comm=comm, layout="zigzag")
            expected = allscan_reference(states)
            worst = max(worst, *(error(x, expected[i]) for x, i in zip(found, places, strict=True)))
    return worst


def test_operators_and_faults(over):
    """In sequence, on the same ranks."""
    one = over((1, 1))
    for reverse in (False, True):
        case = ScanCase((3, 5, 7), (3, 5), reverse, initial=True, epochs=8, special=True, most_ms=2)
        assert max(one.run(scan_case, case)[0]) < 1e-6
        assert max(max(errors) for errors in one.run(gradient_case, (2, 5, 6), (2, 5), reverse)[0]) < 1e-5
    for zigzag in (False, True):
        check(one.run(gla_case, GLACase([70, 70], gates="mild", zigzag=zigzag))[0])
        case = DeltaCase("kda", [70, 70], gates="mild", zigzag=zigzag)
        assert max(max(errors.values()) for errors in one.run(own_case, case)[0]) < 1e-4
        errors = one.run(zigzag_case, 10)[0] if zigzag else one.run(transition_case, 10)[0]
        assert max(errors) < 1e-5
    for how, step in (("allscan", False), ("skipped", True), ("halo", False)):
        for found, right, end, again in one.run(shifted_case, how, step)[0]:
            for got, wanted in zip(found, right, strict=True):
                assert got == wanted or isinstance(got, str) or got != got, (found, right)
            assert end[0] in ("AllScanOutOfStep", "AllScanTimeout") and again, (found, end)
    assert all(one.run(resync_case)[0]) and all(one.run(halo_case, 20)[0])
    assert one.run(absent_case)[0] == [(None, True), ((1, 0), True)]
    for first, second in one.run(memory_case, (100, 1000))[0]:
        assert first == second


def test_a_stall_and_what_is_lost(over):
    """close() returns after delivery; for a lost message the time-out names its sender."""
    one = over((1, 1))
    (seconds, *of_0), (_, *of_1) = one.run(stall_case, 2.0, behaves=IN_ORDER)[0]
    assert 2 <= seconds < 60 and of_0 == of_1 == [0, True]
    found, counted = one.run(lost_case)
    assert found == [(None, True), ((1, 0, True), True)] and counted["lost"] > 0


@pytest.mark.skipif(bool(network.missing_for_gpu_heap()), reason=str(network.missing_for_gpu_heap()))
@pytest.mark.parametrize("nodes", [(1, 1), (2, 2)], ids=str)
def test_gpu_heap(over, nodes):
    """The CPU cannot access the heap: UCX's cuda_copy and gpu_heap.c copy everything through the driver."""
    one = over(nodes, "gpu")
    for algorithm in ("chain", "rails"):
        found, counted = one.reordered(nodes_case, nodes, algorithm, 12)
        assert max(found) < 1e-6
    signals, copies = sum(one.ranks.run(network.gpu_heap_signals)), sum(one.ranks.run(ucx_network.fake_copies))
    assert signals >= counted["passed"] and copies >= 2 * counted["passed"], (signals, copies)
