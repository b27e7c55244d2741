"""Rails: scans over the nodes of a communicator, against float64; what happens where a rank leaves the order."""

from __future__ import annotations

import pytest
import torch
from test_order import ignoring_case, other_backward_case, resync_case, shifted_case, validation_case
from test_scan import gradient_case

import allscan
from allscan.reference import allscan_reference
from support.values import error, inputs, late

pytestmark = pytest.mark.cpu


def values_case(group, nodes, algorithm, protocol, depth, shape, decay_shape, epochs, most_ms, special=False):
    """The largest error of both directions, with an initial state in every other epoch."""
    with allscan.Communicator(group, nodes=nodes) as comm:
        scan = allscan.AllScan(comm, shape, depth=depth, protocol=protocol, algorithm=algorithm, tile=(2, 8))
        worst = 0.0
        for epoch in range(epochs):
            states, decays = inputs(comm, shape, decay_shape, epoch, special)
            initial = torch.randn(shape, generator=torch.Generator().manual_seed(epoch)) if epoch % 2 else None
            for reverse in (False, True):
                expected = allscan_reference(states, decays, initial, reverse)[comm.rank]
                out = torch.full(shape, float("nan"))
                late(2 * epoch + reverse, comm.rank, most_ms)
                decay = None if decays is None else decays[comm.rank]
                scan.scan(states[comm.rank], decay, initial_state=initial, reverse=reverse, out=out)
                worst = max(worst, error(out, expected))
        assert scan.epochs == (epochs, epochs)
        comm.check()
    return worst


@pytest.mark.parametrize("algorithm", ["rails", "doubling"])
@pytest.mark.parametrize("nodes", [(2, 2), (4,), (1, 1, 1), (3, 1), (2, 3)])
def test_values(run, nodes, algorithm):
    shape = (3, 5, 7)
    assert max(run(sum(nodes), values_case, nodes, algorithm, "auto", 3, shape, shape[:-1], 4, 2)) < 1e-6


@pytest.mark.parametrize("algorithm", ["rails", "doubling"])
@pytest.mark.parametrize("nodes", [(4, 4, 4, 4), (3, 5)])
def test_values_of_16_ranks_and_of_uneven_nodes(fresh, nodes, algorithm):
    """Over the network that delays puts and delivers them in any order."""
    arguments = nodes, algorithm, "put", 2, (3, 5, 7), (3, 5), 4, 3
    assert max(fresh(sum(nodes)).run(values_case, None, *arguments)) < 1e-6


@pytest.mark.parametrize("algorithm", ["rails", "doubling"])
@pytest.mark.parametrize("protocol, depth", [("put", 1), ("put", 3), ("signal", 2), ("sentinel", 1)])
def test_protocols_and_depths(run, algorithm, protocol, depth):
    """Many calls, with late ranks, in which the others run ahead; decays of several shapes."""
    assert max(run(5, values_case, (2, 1, 2), algorithm, protocol, depth, (2, 6, 10), (2, 6), 12, 4)) < 1e-6
    for decay_shape in ((), (2,), None):
        assert max(run(4, values_case, (2, 2), algorithm, protocol, depth, (2, 3, 9), decay_shape, 2, 0)) < 1e-6


@pytest.mark.parametrize("algorithm", ["rails", "doubling"])
def test_special_values(run, algorithm):
    """A decay of 0 blocks Inf and NaN, and no other decay does; -0.0 is no sentinel."""
    arguments = algorithm, "put", 3, (2, 8, 20), (2, 8), 4, 0, True
    assert max(run(6, values_case, (2, 2, 2), *arguments)) < 1e-6


def options(algorithm, nodes):
    return dict(nodes=nodes, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ["rails", "doubling"])
@pytest.mark.parametrize("decay_shape", [(2, 5), (2,), ()])
def test_gradients(run, decay_shape, algorithm):
    for reverse in (False, True):
        for errors in run(5, gradient_case, (2, 5, 6), decay_shape, reverse, options(algorithm, (2, 3))):
            assert max(errors) < 1e-5, errors


@pytest.mark.parametrize("algorithm", ["rails", "doubling"])
def test_a_call_that_one_rank_refuses_or_never_enters(run, algorithm):
    given = options(algorithm, (2, 2))
    for how, step in (("allscan", False), ("skipped", True)):
        for rank, (found, right, end, again) in enumerate(run(4, shifted_case, how, step, given)):
            for got, wanted in zip(found, right):
                assert got == wanted or isinstance(got, str) or got != got, (rank, found, right)
            assert end[0] in ("AllScanOutOfStep", "AllScanTimeout") and again, (rank, found, end)


@pytest.mark.parametrize("algorithm", ["rails", "doubling"])
def test_a_rank_that_ignores_what_it_gets(run, algorithm):
    answers = run(4, ignoring_case, "allscan", options(algorithm, (2, 2)))
    for found, right, later in answers:
        assert isinstance(found[-1], str) and len(found) <= 3, found
        assert right == [float(later * i) for i in range(1, 4)]


@pytest.mark.parametrize("nodes", [(2, 2), (1, 3), (1, 1, 1)])
def test_validation_without_backward(run, nodes):
    assert all(run(sum(nodes), validation_case, options("rails", nodes)))


def test_backwards_in_another_order(run):
    answers = run(4, other_backward_case, options("rails", (2, 2)))
    assert any("AllScanOutOfStep" in found and "backward of forward call" in found for found, _, _ in answers), answers
    for found, nan, _ in answers[:2]:  # the other node needs nothing of these
        assert found != "nothing" and nan, answers


@pytest.mark.parametrize("algorithm", ["rails", "doubling"])
def test_resync_after_time_outs(run, algorithm):
    assert all(run(4, resync_case, options(algorithm, (2, 2))))
