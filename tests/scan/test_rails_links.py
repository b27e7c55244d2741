"""Rails: scans over a communicator's nodes, against float64; errors where a rank makes other calls."""

from __future__ import annotations

import functools
import time

import pytest
import torch
import torch.distributed as dist

import allscan
from allscan.comm import topology
from allscan.comm.topology import ANY_SIZE, Topology, runs
from allscan.reference import allscan_reference
from allscan.scan.rails_links import distances
from allscan.shmem_kernels.links import NONE
from allscan.tools.ranks import Ranks
from support.call_order import (
    check_no_values_of_others,
    ignoring_case,
    other_backward_case,
    resync_case,
    shifted_case,
    validation_case,
)
from support.scans import ScanCase, error_of, gradient_case, scan_case
from support.values import check_errors, error, inputs, late, raised
from support.virtual import VirtualRanks

pytestmark = pytest.mark.cpu


def values_case(group, nodes, algorithm, case: ScanCase):
    return scan_case(group, case._replace(reverse=None, initial=None), nodes, algorithm=algorithm, tile=(2, 8))


@pytest.mark.slow(but=("nodes0-recursive", "nodes2-rails"))
@pytest.mark.quick("nodes0-rails")
@pytest.mark.parametrize("algorithm", ["rails", "recursive_doubling"])
@pytest.mark.parametrize("nodes", [(2, 2), (4,), (1, 1, 1), (3, 1), (2, 3)])
def test_values(run, nodes, algorithm):
    case = ScanCase((3, 5, 7), (3, 5), depth=3, epochs=4, most_ms=2)
    assert max(run(sum(nodes), values_case, nodes, algorithm, case)) < 1e-6


@pytest.fixture(scope="module")
def sixteen():
    with Ranks(16, "cpu") as ranks:
        yield ranks


@pytest.mark.slow(but="nodes1-rails")
@pytest.mark.parametrize("algorithm", ["rails", "recursive_doubling"])
@pytest.mark.parametrize("nodes", [(4, 4, 4, 4), (3, 5)])
def test_values_of_16_ranks_and_of_uneven_nodes(request, nodes, algorithm):
    """Over a network that delays puts and delivers them in any order."""
    case = ScanCase((2, 5, 7), (2, 5), protocol="put", epochs=3, most_ms=3)
    if sum(nodes) == 16:
        errors = request.getfixturevalue("sixteen").run(values_case, None, nodes, algorithm, case)
    else:
        errors = request.getfixturevalue("run")(sum(nodes), values_case, nodes, algorithm, case)
    assert max(errors) < 1e-6


@pytest.mark.slow(but="signal-2-rails")
@pytest.mark.parametrize("algorithm", ["rails", "recursive_doubling"])
@pytest.mark.parametrize("protocol, depth", [("put", 1), ("put", 3), ("signal", 2)])
def test_protocols_and_depths(run, algorithm, protocol, depth):
    """Many calls, with stragglers while other ranks run ahead; decays of several shapes."""
    case = ScanCase((2, 3, 10), (2, 3), depth=depth, protocol=protocol, epochs=8, most_ms=4)
    assert max(run(5, values_case, (2, 1, 2), algorithm, case)) < 1e-6
    for decay_shape in ((), (2,), None):
        case = ScanCase((2, 3, 9), decay_shape, depth=depth, protocol=protocol)
        assert max(run(4, values_case, (2, 2), algorithm, case)) < 1e-6


@pytest.mark.slow(but="rails")
@pytest.mark.parametrize("algorithm", ["rails", "recursive_doubling"])
def test_special_values(run, algorithm):
    """A decay of 0 blocks Inf and NaN, and no other decay does; -0.0 is not taken for a sentinel."""
    case = ScanCase((2, 8, 20), (2, 8), depth=3, protocol="put", epochs=2, special=True)
    assert max(run(6, values_case, (2, 2, 2), algorithm, case)) < 1e-6


def options(algorithm, nodes):
    return dict(nodes=nodes, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ["rails", "recursive_doubling"])
@pytest.mark.parametrize("decay_shape", [(2, 5), ()])
def test_gradients(run, decay_shape, algorithm):
    for reverse in (False, True):
        check_errors(run(5, gradient_case, (2, 5, 6), decay_shape, reverse, options(algorithm, (2, 3))), 1e-5)


def test_a_call_that_one_rank_rejects_or_never_enters(run):
    given = options("rails", (2, 2))
    for how, step in (("allscan", False), ("skipped", True)):
        check_no_values_of_others(run(4, shifted_case, how, step, given))


@pytest.mark.slow(but="rails")
@pytest.mark.parametrize("algorithm", ["rails", "recursive_doubling"])
def test_a_rank_that_ignores_what_it_gets(run, algorithm):
    answers = run(4, ignoring_case, "allscan", options(algorithm, (2, 2)))
    for found, right, later in answers:
        assert isinstance(found[-1], str) and len(found) <= 3, found
        assert right == [float(later * i) for i in range(1, 4)]
    assert answers[0][0] == [0.0, "RuntimeError"]  # before its next launch, since others have run that backward


@pytest.mark.parametrize("nodes", [(2, 2), (1, 3), (1, 1, 1)])
def test_validation_without_backward(run, nodes):
    assert all(run(sum(nodes), validation_case, options("rails", nodes)))


def test_backwards_in_another_order(run):
    answers = run(4, other_backward_case, options("rails", (2, 2)))
    assert any("AllScanOutOfStep" in found and "backward of forward call" in found for found, _, _ in answers), answers
    for found, nan, _ in answers[:2]:  # the other node needs no value of these
        assert found != "nothing" and nan, answers


def test_resync_after_time_outs(run):
    assert all(run(4, resync_case, options("recursive_doubling", (2, 2)) | dict(timeout=3.0)))


def absent_case(group, nodes, absent, algorithm):
    """Return the ranks' errors where one of them never calls, and whether all return."""
    comm = allscan.Communicator(group, timeout=3.0, nodes=nodes, algorithm=algorithm)
    scan = allscan.AllScan(comm, (4, 4, 8), tile=(4, 8))
    state, out = torch.ones(scan.shape), torch.zeros(scan.shape)
    start, found, prev = time.monotonic(), None, None
    if comm.rank != absent:
        try:
            for _ in range(10):  # beyond the depth of two nodes
                scan.scan(state, out=out)
        except allscan.AllScanTimeout as timeout:
            found, prev = (timeout.rank, timeout.neighbour, str(timeout)), out.isnan().any().item()
    seconds = time.monotonic() - start
    dist.barrier(group)
    comm.resync()
    again = (scan.scan(state) == comm.rank).all().item()
    comm.close()
    return found, prev, seconds, again


@pytest.mark.slow(but=("rails-1", "recursive_doubling"))
@pytest.mark.parametrize("algorithm, absent", [("rails", 1), ("rails", 2), ("rails", 5), ("recursive_doubling", 2)])
def test_a_rank_that_never_comes_is_named(run, absent, algorithm):
    answers = run(6, absent_case, (2, 2, 2), absent, algorithm)
    named = [found[1] for found, _, _, _ in answers if found is not None]
    assert absent in named
    for rank, (found, spoiled, seconds, again) in enumerate(answers):
        assert again
        if rank != absent:
            assert found and found[0] == rank and f"rank {rank} waited 3 s for rank {found[1]}" in found[2], answers
            assert spoiled and seconds < 60


def strided_case(group):
    """Run communicators over the even and over the odd ranks concurrently, each with its own nodes."""
    groups = [dist.new_group(list(range(first, dist.get_world_size(), 2))) for first in (0, 1)]
    worst = 0.0
    with allscan.Communicator(groups[dist.get_rank() % 2], nodes=(2, 2), algorithm="rails") as comm:
        for epoch in range(6):
            late(epoch, dist.get_rank(), 5)
            call, seed = functools.partial(allscan.allscan, comm=comm), epoch + 10 * (dist.get_rank() % 2)
            worst = max(worst, error_of(comm, call, (2, 4, 8), seed, bool(epoch % 2)))
        assert [scan.algorithm for scan in comm.collectives] == ["rails"]
    return worst


def test_strided_sub_groups_at_work_at_once(run):
    assert max(run(8, strided_case)) < 1e-6


def arguments_case(group):
    """A wrong argument on one rank is an error on all; ranks may differ in decays."""
    last = dist.get_rank(group) == dist.get_world_size(group) - 1
    answers = []
    for here, there in (
        (dict(nodes=(2, 2)), dict(nodes=(1, 3))),
        (dict(nodes=(2, 2)), dict(nodes=(2, 3))),
        (dict(algorithm="rails"), dict(algorithm="recursive_doubling")),
        (dict(algorithm="rails"), dict(algorithm="rings")),
    ):
        answers.append(raised(allscan.Communicator, group, **(there if last else here)))
    with allscan.Communicator(group, nodes=(2, 2), algorithm="rails") as comm:
        answers.append(raised(allscan.AllScan, comm, (2, 4), algorithm="rails" if last else "chain"))
        answers.append(raised(allscan.AllScan, comm, (2, 4), algorithm="rings" if last else "rails"))
        scan = allscan.AllScan(comm, (2, 4), max_ctas=1 + comm.rank)  # the number of programs that fits on all ranks
        answers.append(raised(scan.channel))
        answers.append(raised(scan.launch, None, (1,)))
        answers.append(raised(scan.scan, torch.ones(2, 4), transition=torch.ones(2, 2)))
        answers.append(raised(scan.scan, torch.ones(2, 4).double()))  # all ranks reject it
        decay = (None, 0.5, torch.tensor([1.0, 0.0]), 0)[comm.rank]
        given = [torch.ones(2), torch.full((2,), 0.5), torch.tensor([1.0, 0.0]), torch.zeros(2)]
        for reverse in (False, True):
            expected = allscan_reference([torch.ones(2, 4)] * 4, given, None, reverse)[comm.rank]
            assert error(scan.scan(torch.ones(2, 4), decay, reverse=reverse), expected) == 0
            state = torch.ones(2, 4)
            assert error(scan.scan(state, decay, reverse=reverse, out=state), expected) == 0
        before, _ = allscan.halo((torch.ones(1, 3, 4), torch.ones(1, 3, 4)), 2, comm=comm)
        assert before.mean() == min(comm.rank, 1)
        prev = allscan.allscan(torch.ones(1, 2, 2), comm=comm, transition=torch.eye(2)[None])
        assert (prev == comm.rank).all()
        pair = allscan.allscan((torch.ones(2, 4), torch.ones(2, 4)), comm=comm, layout="zigzag")
        assert [x.mean().item() for x in pair] == [comm.rank, 7 - comm.rank]
        with allscan.Communicator(group, nodes=(2, 2), algorithm="rails") as other:
            assert other.topology.algorithm_for(64) == "rails" and other.topology.algorithm_for(64, "chain") == "chain"
        kinds = sorted(scan.algorithm for scan in comm.collectives)
        free = comm.memory.heap.arena.free_bytes
        hint = allscan.AllScan.size_hint(comm, (6, 8, 16))
        answers.append(raised(allscan.AllScan.size_hint, comm, (1 << 11, 512, 512), depth=4))  # 2 GiB
        scan = allscan.AllScan(comm, (6, 8, 16))
        assert comm.memory.heap.arena.free_bytes == free - hint == free - scan.workspace_bytes
        scan.close()
        assert comm.memory.heap.arena.free_bytes == free
    return answers, kinds


def test_arguments_of_ranks(run):
    wanted = ["ValueError"] * 9 + ["TypeError", "ValueError"]
    for answers, kinds in run(4, arguments_case):
        assert [answer and answer[0] for answer in answers] == wanted, answers
        assert "ranks differ in nodes: (2, 2) on ranks 0, 1, 2; (1, 3) on rank 3" in answers[0][1]
        assert "4 in total, got (2, 3)" in answers[1][1] and "rank 3" in answers[3][1]
        assert "different arguments: algorithm: chain on ranks 0, 1, 2; rails on rank 3" in answers[4][1]
        assert kinds == ["chain", "chain", "rails", "rails"]


@pytest.mark.quick
def test_the_choice(monkeypatch):
    def chosen(nbytes, *hosts):
        return Topology([(0, len(hosts) - 1)] * len(hosts), hosts=hosts).algorithm_for(nbytes)

    assert runs(["a", "a", "b"]) == (2, 1) and runs(["a", "b", "a"]) is None
    hosts = [str(rank // 8) for rank in range(8 * 64)]
    assert {chosen(1 << 21, *hosts[: 8 * n]) for n in (1, 2, 64)} == {"chain"}  # without measurements between nodes
    table = (12, 4 << 20, "recursive_doubling"), (4, 1 << 20, "recursive_doubling"), (2, ANY_SIZE, "rails")
    monkeypatch.setattr(topology, "MEASURED", table)
    for without in (["a", "b", "a"], hosts[:8], ["a", "b", "c"], [*hosts[:16], "c"]):
        assert chosen(1 << 21, *without) == "chain", without
    assert [chosen(1 << 21, *hosts[: 8 * n]) for n in (2, 4, 16)] == ["rails", "rails", "recursive_doubling"]
    assert chosen(1 << 20, *hosts[:32]) == "recursive_doubling"
    assert [distances(n) for n in (1, 2, 3, 4, 5, 7, 8, 32)] == [
        [],
        [1],
        [1, 2],
        [1, 2],
        [1, 2, 3],
        [1, 2, 3],
        [1, 2, 3, 6],
        [1, 2, 3, 6, 12, 24],
    ]


def ahead_case(group, nodes, algorithm, protocol, depth, sleeper):
    """All ranks but one launch all their scans at once."""
    with allscan.Communicator(group, timeout=60, nodes=nodes) as comm:
        shape, count, worst = (3, 4, 8), 6, 0.0
        scan = allscan.AllScan(comm, shape, depth=depth, protocol=protocol, algorithm=algorithm, tile=(4, 8))
        for reverse in (False, True):
            comm.barrier()
            if comm.rank == sleeper:
                time.sleep(0.15)
            worst = max(worst, *(error_of(comm, scan.scan, shape, epoch, reverse) for epoch in range(count)))
    return worst


@pytest.mark.slow(but=("rails-nodes2", "recursive_doubling-nodes3"))
@pytest.mark.parametrize(
    "algorithm, nodes, sleeper",
    [
        ("rails", (1, 3), 1),
        ("rails", (1, 3), 3),
        ("rails", (1, 1, 1), 2),
        ("recursive_doubling", (1, 1, 1), 2),
        ("recursive_doubling", (2, 2, 2), 3),
    ],
)
def test_ranks_ahead_of_a_straggler(run, algorithm, nodes, sleeper):
    """Ranks run ahead until the slots are full. Members that own a slice wait for each other in each call. A member
    without a slice may be ahead of its owner if it is the first of all ranks, or behind it if it is the last."""
    for protocol, depth in (("sentinel", 1), ("put", 2)):
        assert max(run(sum(nodes), ahead_case, nodes, algorithm, protocol, depth, sleeper=sleeper)) < 1e-6


def underflow_case(group, algorithm):
    """A product of decays that underflows in float32 passes Inf and NaN. A product with a factor of 0 is 0 and blocks
    NaN."""
    with allscan.Communicator(group, nodes=(2, 2, 2), algorithm=algorithm) as comm:
        generator = torch.Generator().manual_seed(0)
        states = [torch.randn(2, 4, 8, generator=generator) for _ in range(comm.size)]
        decays = [torch.full((2, 4), 1e-30) for _ in range(comm.size)]
        states[0][0, 0, 0], states[0][1, 2, 3], states[0][1, 1, 1] = float("nan"), float("inf"), 1e30
        decays[1][1, 3] = 0.0
        states[0][1, 3] = float("-inf")
        # decays of NaN or Inf followed by 0: in one node, in two, and in the other order
        decays[2][0, 1], decays[3][0, 1] = float("nan"), 0.0
        decays[1][0, 2], decays[4][0, 2] = float("nan"), 0.0
        decays[2][1, 0], decays[3][1, 0] = float("inf"), 0.0
        decays[2][1, 2], decays[3][1, 2] = 0.0, float("nan")
        allscan.allscan(states[comm.rank], torch.ones(2, 4), comm=comm)  # a first call rejects NaN and Inf
        prev = allscan.allscan(states[comm.rank], decays[comm.rank], comm=comm)
        return error(prev, allscan_reference(states, decays)[comm.rank])


@pytest.mark.parametrize("algorithm", ["rails", "recursive_doubling"])
def test_decays_that_underflow(run, algorithm):
    assert max(run(6, underflow_case, algorithm)) < 1e-6


def virtual_case(group, algorithm, nodes):
    """Run virtual ranks in sequence without a GPU. A rank that makes no launch is named."""
    worst = 0.0
    ranks = VirtualRanks(sum(nodes), (2, 5, 7), nodes=nodes, algorithm=algorithm, tile=(2, 8), timeout=0.3)
    for epoch in range(4):
        states, decays = (torch.stack(x) for x in inputs(ranks, (2, 5, 7), (2, 5), epoch))
        initial = states[0] * 2 if epoch % 2 else None
        for reverse in (False, True):
            found = ranks.scan(states, decays, reverse=reverse, initial=initial)
            expected = allscan_reference(list(states), list(decays), initial, reverse)
            worst = max(worst, *(error(x, y) for x, y in zip(found, expected, strict=True)))
    ranks.check()
    ranks.scan(states, decays, ranks=[0, 2])
    assert ranks.faults()[2][1:3] == (2, 1)
    with pytest.raises(allscan.AllScanTimeout, match="rank 2 waited 0.3 s for rank 1"):
        ranks.check()
    return worst


@pytest.mark.slow("recursive_doubling")
@pytest.mark.parametrize(
    "algorithm, nodes",
    [("chain", (4,)), ("rails", (1, 1, 1, 1)), ("recursive_doubling", (1,) * 8)],  # 8 nodes: rounds of 1, 2, 3 and 6
)
def test_virtual_ranks(run, algorithm, nodes):
    assert max(run(1, virtual_case, algorithm, nodes)) < 1e-6


def gla_case(group, algorithm, layout):
    """Return the largest difference between rails and the chain, for zeco_gla and its gradients, in two calls."""
    found = []
    for given in (options(algorithm, (2, 2)), dict(algorithm="chain")):
        with allscan.Communicator(group, **given) as comm:
            for seed in range(2):
                generator = torch.Generator().manual_seed(10 * seed + comm.rank)
                leaves = [torch.randn(2, 6, 2, 16, generator=generator) for _ in range(4)]
                leaves[3] = -leaves[3].abs() / 8
                leaves = [leaf.requires_grad_() for leaf in leaves]
                o, _ = allscan.zeco_gla(*leaves, comm=comm, layout=layout)
                o.square().sum().backward()
                found.append([o, *(leaf.grad for leaf in leaves)])
            assert {scan.algorithm for scan in comm.collectives} == {given["algorithm"]}
            comm.check()
    return max(error(x, y) for i in range(2) for x, y in zip(found[i], found[2 + i], strict=True))


@pytest.mark.slow(but="rails")
@pytest.mark.parametrize("algorithm, layout", [("rails", "contiguous"), ("recursive_doubling", "zigzag")])
def test_zeco_gla(run, algorithm, layout):
    assert max(run(4, gla_case, algorithm, layout)) < 1e-5


def memory_case(group):
    """Check memory bounds: of the rail's clock, and of a member without a slice."""
    with allscan.Communicator(group, nodes=(1, 3), algorithm="rails", max_ctas=66) as comm:
        options, found = dict(tile=(4, 8), max_ctas=66), []
        for heads in (1, 2, 7, 12, 32):  # for some, no gap follows the memory
            first, second = (allscan.AllScan(comm, (heads, 4, 8), **options) for _ in range(2))
            programs = min(first.num_tiles, first.launcher._common_max_ctas)
            found.append(all(rails[0].clock.numel() >= programs for rails in first.launcher.rails.further))
            first.close()
            before = second.launcher.channels[0].inbox.clone()
            third = allscan.AllScan(comm, (heads, 4, 8), **options)
            after = second.launcher.channels[0].inbox
            found.append(torch.equal(before.view(torch.int32), after.view(torch.int32)))
            third.close()
            second.close()
        return all(found)


def test_nothing_outside_of_its_memory_is_written(run):
    assert all(run(4, memory_case))


def slots_case(group, algorithm):
    """When all ranks are done, every slot is free: a remaining word could be taken for a later call's."""
    with allscan.Communicator(group, nodes=(2, 2, 2)) as comm:
        scan = allscan.AllScan(comm, (3, 4, 8), protocol="sentinel", algorithm=algorithm, tile=(4, 8))
        decay = torch.full((3, 4), 0.5)
        decay[0] = float(comm.rank != 2)  # the middle node sends this tile before it waits for the first node
        for epoch in range(4):
            time.sleep(0.1 * (comm.rank < 2))
            scan.scan(torch.ones(3, 4, 8), decay, reverse=bool(epoch % 2))
        comm.barrier()
        rails = scan.launcher.rails
        inboxes = [tensor for tensor, value in rails._filled if tensor.is_floating_point()]
        inboxes += [c.inbox for channels in rails._channels for c in channels if c.RECV != NONE]
        return all((inbox.view(torch.int32) == -(2**31)).all().item() for inbox in inboxes)


@pytest.mark.parametrize("algorithm", ["rails", "recursive_doubling"])
def test_every_slot_is_free_at_the_end(run, algorithm):
    assert all(run(6, slots_case, algorithm))


def dropped_case(group, nodes, reverse):
    """Dropping a backward on all ranks is no error if one of them is a straggler."""
    with allscan.Communicator(group, timeout=60, nodes=nodes, algorithm="rails") as comm:
        for backward in (True, True, False, True):
            state = torch.ones(4, 4, 8, requires_grad=True)
            prev = allscan.allscan(state, comm=comm, reverse=reverse)
            if backward:
                prev.sum().backward()
            del state, prev
            if not backward and comm.rank == 2:
                time.sleep(1.0)
    return True


@pytest.mark.parametrize("nodes, reverse", [((2, 2), False), ((1, 3), True)])
def test_a_backward_that_all_drop(run, nodes, reverse):
    assert all(run(4, dropped_case, nodes, reverse))
