"""NVSHMEM's remote transport: UCX over TCP on one host's loopback, through a hostile network. ``make test-network``.
These tests check results and bounded waits: times over a loopback mean nothing."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch

import allscan
from allscan.tools.ranks import Ranks
from support import network
from support.any_epoch import control_case
from support.call_order import resync_case, shifted_case
from support.delta import DeltaCase, own_case
from support.gla import GLACase, check, gla_case
from support.long_runs import graph_case, long_case, zigzag_case
from support.network_cases import (
    absent_case,
    halo_case,
    lost_case,
    memory_case,
    memory_of_heaps_case,
    stall_case,
)
from support.scans import ScanCase, error_of, gradient_case, scan_case
from support.values import late

pytestmark = pytest.mark.network
REORDER = "reorder", 200_000  # a put's largest delay in ns
IN_ORDER = "bandwidth", 1 << 40
TWO_NODES = {"NVSHMEM_DISABLE_P2P": "1"}  # NVSHMEM then sees nodes of one GPU each


class Network:
    """Ranks on two GPUs whose NVSHMEM reaches other ranks by UCX only. names: each rank's node; None: one host, whose
    GPUs do not map each other. heap: the memory of NVSHMEM's heap, "host" or "gpu"."""

    def __init__(self, folder, names=None, size=2, heap="host"):
        self.folder, self.size = str(folder), size
        more = {"ALLSCAN_HEAP": "64M", "NVSHMEM_SYMMETRIC_SIZE": "256M"} | ({} if names else TWO_NODES)
        with mock.patch.dict(os.environ, network.environment(self.folder, heap) | more):
            self.ranks = Ranks(size, "cuda", "gloo", share=True)
        if names:
            assert self.ranks.run(network.enter_node, names) == names

    def run(self, function, *arguments, behaves=REORDER, payload=0, timeout=100.0):
        """Return (results by rank, increases of the network's counters) of function(group, *arguments) on all ranks,
        over a network with behaviour ``behaves``. At least ``payload`` bytes must go through lo."""
        options = dict(behaves=behaves, timeout=timeout)
        found, counted, received = network.run_over(self.ranks, self.size, function, *arguments, **options)
        assert received >= payload
        return found, counted

    def close(self):
        self.ranks.close(0.0)


def skip_without(heap):
    if reason := network.missing() or (heap == "gpu" and network.missing_for_gpu_heap()):
        pytest.skip(reason)


@pytest.fixture(scope="session")
def two(tmp_path_factory):
    """networks(heap): a network of two ranks, shared by tests until one fails."""
    made = {}

    def networks(heap="host"):
        skip_without(heap)
        if heap not in made or made[heap].ranks is None:
            made[heap] = Network(tmp_path_factory.mktemp("network"), heap=heap)
        return made[heap]

    yield networks
    for one in made.values():
        if one.ranks is not None:
            one.close()


@pytest.fixture
def over(two):
    """over(function, *arguments, heap=..., behaves=...): Network.run of two ranks. After a failure new ranks replace
    them."""

    def run(*arguments, heap="host", **options):
        one = two(heap)
        try:
            return one.run(*arguments, **options)
        except BaseException:
            one.close()
            one.ranks = None
            raise

    return run


@pytest.fixture
def fresh_network(tmp_path):
    """fresh_network(names, size, heap): new ranks."""
    made = []

    def start(names=None, size=2, heap="host"):
        skip_without(heap)
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Network(folder, names, size, heap))
        return made[-1]

    yield start
    for one in made:
        one.close()


def transport_case(group, epochs):
    with allscan.Communicator(group) as comm:
        assert not comm.mapped and comm.transport == "nvshmem"
    return max(scan_case(group, ScanCase((4, 16, 32), (4, 16), reverse, 2, "put", epochs=epochs)) for reverse in (0, 1))


@pytest.mark.parametrize("behaves", [("pass", 0), IN_ORDER, REORDER], ids=lambda x: x[0])
def test_scans_over_tcp_alone(two, over, behaves):
    """No rank maps another in 300 scans; UCX's log names their transport."""
    scans = 2 * (50 if behaves[0] == "pass" else 150)
    found, counted = over(transport_case, scans // 2, behaves=behaves, payload=scans * 4 * 16 * 32 * 4)
    assert max(found) < 1e-6
    assert network.lanes(two().folder) == {"tcp/lo"}
    assert (counted["overtakings"] > 0) == (behaves == REORDER), counted


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_values(over, depth):
    for reverse in (False, True):
        case = ScanCase((3, 5, 7), (3, 5), reverse, depth, initial=True, epochs=20, special=True, most_ms=2)
        assert max(over(scan_case, case)[0]) < 1e-6


@pytest.mark.parametrize("reverse", [False, True])
def test_gradients(over, reverse):
    for errors in over(gradient_case, (2, 5, 6), (2, 5), reverse)[0]:
        assert max(errors) < 1e-5, errors


@pytest.mark.parametrize("kind, straggler", [("decays", 0), ("decays", 1), ("transitions", 1), ("hops", 0)])
def test_2000_epochs_with_a_straggler(over, kind, straggler):
    found, counted = over(long_case, 2000, "auto", 3, straggler, kind)
    assert max(found) < 1e-5
    assert counted["overtakings"] > 1000, counted


def test_1000_epochs_of_zigzag(over):
    found, counted = over(zigzag_case, 1000, 1)
    assert max(found) < 1e-5 and counted["overtakings"] > 1000


def many_tiles_case(group, rounds):
    """Scan 1 MiB states back to back in both directions: hundreds of tiles of several epochs are in flight."""
    with allscan.Communicator(group) as comm:
        scan, worst = allscan.AllScan(comm, (16, 128, 128), depth=3), 0.0
        generator = torch.Generator(comm.device).manual_seed(0)
        for _ in range(rounds):
            states = torch.randn(4, *scan.shape, generator=generator, device=comm.device)
            outs = [torch.full(scan.shape, float("nan"), device=comm.device) for _ in range(8)]
            for i, out in enumerate(outs):
                scan.scan(states[(i // 2 + comm.rank) % 4], 0.5, reverse=bool(i % 2), out=out)
            for i, out in enumerate(outs):
                others = states[(i // 2 + 1 - comm.rank) % 4]
                receives = comm.rank == (0 if i % 2 else 1)
                worst = max(worst, (out - others * receives).abs().max().nan_to_num(nan=1e30).item())
        comm.barrier()
        return worst


@pytest.mark.parametrize("behaves", [REORDER, ("bandwidth", 1 << 30)], ids=lambda x: x[0])
def test_many_tiles_back_to_back(over, behaves):
    found, counted = over(many_tiles_case, 10, behaves=behaves)
    assert max(found) == 0
    assert (counted["overtakings"] > 1000) == (behaves == REORDER), counted


def test_halo(over):
    assert all(over(halo_case, 100)[0])


@pytest.mark.parametrize("zigzag", [False, True])
def test_zeco_gla(over, zigzag):
    check(over(gla_case, GLACase([128, 128], H=2, K=32, V=32, gates="mild", zigzag=zigzag))[0])


@pytest.mark.parametrize("zigzag", [False, True])
def test_zeco_kda(over, zigzag):
    for errors in over(own_case, DeltaCase("kda", [128, 128], H=2, HV=2, K=64, V=64, gates="mild", zigzag=zigzag))[0]:
        assert max(errors.values()) < 1e-3, errors


@pytest.mark.parametrize("kind", ["decays", "transitions"])
def test_graph_replays(over, kind):
    assert max(over(graph_case, 300, kind)[0]) < 1e-4


@pytest.mark.parametrize("how, step", [("allscan", False), ("skipped", True), ("halo", False)])
def test_a_call_that_one_rank_rejects_or_never_enters(over, how, step):
    for rank, (found, right, end, again) in enumerate(over(shifted_case, how, step)[0]):
        for got, wanted in zip(found, right, strict=True):
            assert got == wanted or isinstance(got, str) or got != got, (rank, found, right)
        assert end[0] in ("AllScanOutOfStep", "AllScanTimeout") and again, (rank, found, end)


def test_a_rank_that_never_comes_is_named(over):
    assert over(absent_case)[0] == [(None, True), ((1, 0), True)]


def test_resync_after_time_outs(over):
    assert all(over(resync_case)[0])


def test_memory_after_1000_and_10000_epochs(over):
    for first, second in over(memory_case, (1000, 10_000))[0]:
        assert first == second


def test_close_returns_after_delivery(over):
    (seconds, *of_0), (_, *of_1) = over(stall_case, 2.0, behaves=IN_ORDER)[0]
    assert 2 <= seconds < 60 and of_0 == of_1 == [0, True]


def test_what_is_never_delivered_is_a_time_out(over):
    found, counted = over(lost_case)
    assert found == [(None, True), ((1, 0, True), True)] and counted["lost"] > 0


@pytest.mark.parametrize("behaves", [IN_ORDER, ("reorder", 3_000_000)], ids=lambda x: x[0])
def test_the_control(fresh_network, behaves):
    """A receiver that takes any later epoch is right with delivery in order, and wrong where puts overtake."""
    right, _ = fresh_network().run(control_case, 60, behaves=behaves)
    assert all(right) == (behaves == IN_ORDER)


def nodes_case(group, wanted, algorithm, epochs):
    """Return the largest error over nodes found by their names; check the types of this rank's links."""
    with allscan.Communicator(group, timeout=60) as comm:
        assert comm.nodes == wanted, comm.nodes
        scan = allscan.AllScan(comm, (2, 8, 16), algorithm=algorithm, tile=(8, 16), max_ctas=8)
        worst = 0.0
        for epoch in range(epochs):
            for reverse in (False, True):
                late(2 * epoch + reverse, comm.rank, 3)
                worst = max(worst, error_of(comm, scan.scan, scan.shape, epoch, reverse))
        comm.check()
    return worst


@pytest.mark.parametrize("algorithm", ["chain", "rails", "recursive_doubling"])
@pytest.mark.parametrize("nodes", [(1, 1), (1, 1, 1, 1), (2, 2), (4, 4), (2, 2, 2, 2)], ids=str)
def test_nodes_by_their_names(fresh_network, nodes, algorithm):
    """With fewer GPUs ranks share them: contexts are then time-sliced, and a hop takes milliseconds."""
    names = [f"node{n}-{os.getpid()}" for n, members in enumerate(nodes) for _ in range(members)]
    found, _ = fresh_network(names, len(names)).run(nodes_case, nodes, algorithm, 100, timeout=200)
    assert max(found) < 1e-6


@pytest.mark.parametrize("heap", ["host", "gpu"])
def test_memory_of_the_heap(over, heap):
    found, _ = over(memory_of_heaps_case, heap=heap, behaves=("pass", 0))
    assert [{rank: kind for rank, (kind, _) in mapped.items()} for mapped in found] == [{0: heap}, {1: heap}]
    if heap == "gpu":
        assert [mapped[rank][1] for rank, mapped in enumerate(found)] == [0, 1]


@pytest.mark.parametrize("behaves", [IN_ORDER, REORDER], ids=lambda x: x[0])
def test_gpu_heap_scans(two, over, behaves):
    """UCX copies the states of 300 scans out of and into GPU memory; the driver writes their signals."""
    signals = sum(two("gpu").ranks.run(network.gpu_heap_signals))
    found, counted = over(transport_case, 150, heap="gpu", behaves=behaves, payload=300 * 4 * 16 * 32 * 4)
    assert max(found) < 1e-6
    assert network.lanes(two("gpu").folder) == {"tcp/lo"}
    assert (counted["overtakings"] > 0) == (behaves == REORDER), counted
    assert sum(two("gpu").ranks.run(network.gpu_heap_signals)) - signals >= counted["passed"]


@pytest.mark.parametrize("reverse", [False, True])
def test_gpu_heap_gradients(over, reverse):
    for errors in over(gradient_case, (2, 5, 6), (2, 5), reverse, heap="gpu")[0]:
        assert max(errors) < 1e-5, errors


@pytest.mark.parametrize("kind, waits", [("decays", 3), ("transitions", 1)])
def test_gpu_heap_with_a_straggler(over, kind, waits):
    found, counted = over(long_case, 500, "auto", 3, 1, kind, waits, heap="gpu")
    assert max(found) < 1e-5
    assert counted["overtakings"] > 250, counted


def test_gpu_heap_of_nodes_of_two(fresh_network):
    """Inside of a node a rank stores to the other GPU's memory, by NVLink if that connects them."""
    names = [f"node{n}-{os.getpid()}" for n in (0, 0, 1, 1)]
    network_of_four = fresh_network(names, 4, "gpu")
    found, _ = network_of_four.run(memory_of_heaps_case, behaves=("pass", 0))
    assert [{rank: kind for rank, (kind, _) in mapped.items()} for mapped in found] == [
        {0: "gpu", 1: "gpu"},
        {0: "gpu", 1: "gpu"},
        {2: "gpu", 3: "gpu"},
        {2: "gpu", 3: "gpu"},
    ]
    for algorithm in ("chain", "rails", "recursive_doubling"):
        assert max(network_of_four.run(nodes_case, (2, 2), algorithm, 30, timeout=100)[0]) < 1e-6


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(network, "ucx_folder", lambda: None)
    assert "needs" in network.missing() and "pip install libucx-cu13" in network.missing()
