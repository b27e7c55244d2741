"""allscan_segments(): its law in float64, and the same bits for every number of ranks and every split."""

from __future__ import annotations

import functools

import pytest
import torch

import allscan
from support.segments import SegmentsCase, Sequence, bits, local_folds_case, segments_case, whole_of
from support.values import pairs, raised

FACTORS = ["rows", "heads", "number", "none", "transitions"]
CUTS = {
    2: [(3, 4), (0, 7)],
    4: [(2, 0, 5), (1, 1, 1, 4)],
    8: [(1, 0, 2, 1, 0, 1, 1, 1)],
}  # by number of ranks, or twice that in zigzag: segments of each
NAMES = ("incoming", "final state", "dstates", "dfactor", "dinitial")


def found(run, case, counts=None, zigzag=False, **options):
    counts = counts or case.counts
    size = len(counts) // (1 + zigzag)
    parts = run(size, functools.partial(segments_case, zigzag=zigzag, **options), case._replace(counts=counts))
    if zigzag:  # rank r has chunks r and 2P - 1 - r, in this order
        return in_order(parts, counts)
    return whole_of(parts, reverse=case.reverse)


def in_order(parts, counts):
    whole, size = whole_of(parts, zigzag=True), len(parts)
    chunks = [[None] * len(counts) for _ in range(5)]
    for rank, part in enumerate(parts):
        n = counts[rank]
        for i in (0, 2, 3):
            if part[i] is not None:
                chunks[i][rank], chunks[i][2 * size - 1 - rank] = part[i][:n], part[i][n:]
    for i in (0, 2, 3):
        whole[i] = None if whole[i] is None else torch.cat(chunks[i])
    return whole


def differing(one, other):
    """Return the names of results with other bits."""
    pairs = [(name, a, b) for name, a, b in zip(NAMES, one, other, strict=True) if a is not None or b is not None]
    assert pairs
    return [name for name, a, b in pairs if not torch.equal(bits(a), bits(b))]


@pytest.mark.quick("rows")
@pytest.mark.parametrize("factor", FACTORS)
def test_values_and_gradients(run, factor, size=2):
    for reverse in (False, True):
        case = SegmentsCase((3, 4), factor=factor, reverse=reverse, initial=not reverse)
        expected = Sequence(case).reference()
        for name, a, b in zip(NAMES, found(run, case), expected, strict=True):
            assert (a is None) == (b is None), name
            if a is not None:
                assert ((a - b).abs().max() / b.abs().max()).item() < 1e-6, name


@pytest.mark.slow(but=("rows-False-8", "rows-True", "heads-False-4", "number-True", "none", "transitions-True"))
@pytest.mark.parametrize("factor, reverse, size", pairs([*FACTORS], [False, True], [*CUTS]))
def test_the_same_bits_for_every_cut(run, factor, reverse, size):
    case = SegmentsCase((7,), factor=factor, reverse=reverse)
    one = found(run, case)
    for counts in CUTS[size]:
        assert differing(one, found(run, case, counts)) == [], counts


@pytest.mark.parametrize("reverse", [False, True])
def test_more_segments_than_are_loaded_ahead(run, reverse, size=2):
    case = SegmentsCase((19,), factor="rows", reverse=reverse)
    one = found(run, case)
    for counts in ((9, 10), (2, 17), (8, 11)):
        assert differing(one, found(run, case, counts)) == [], counts


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("factor", ["rows", "transitions"])
def test_the_same_bits_in_the_zigzag_layout(run, factor, size):
    case = SegmentsCase((6,), factor=factor)
    one = found(run, case)
    for counts in {2: [(2, 4), (1, 2, 0, 3)], 3: [(1, 0, 2, 1, 1, 1)]}[size]:
        assert differing(one, found(run, case, counts, zigzag=True)) == [], counts


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("factor", ["rows", "transitions"])
def test_special_values(run, factor, size):
    """NaN and Inf propagate as in the law, and no boundary state is -0.0."""
    case = SegmentsCase((5,), factor=factor, special=True)
    one = found(run, case)
    assert not (bits(one[0]) == -(2**31)).any() and bits(one[0]).any()
    assert differing(one, found(run, case, {2: (2, 3), 3: (1, 0, 4)}[size])) == []


@pytest.mark.slow(but=("rows-shape0", "rows-shape1", "rows-shape2", "transitions"))
@pytest.mark.parametrize("shape", [(1, 1), (3, 33, 7), (1, 130, 5), (2, 3, 8, 40)])
@pytest.mark.parametrize("factor", ["rows", "transitions"])
def test_shapes(run, factor, shape, size=2):
    case = SegmentsCase((9,), shape if len(shape) > 2 else (1, *shape), factor)  # more than are loaded ahead
    assert differing(found(run, case), found(run, case, (8, 1))) == []


@pytest.mark.parametrize("size", [2, 3])
def test_stragglers(run, size):
    case = SegmentsCase((4,))
    one = [found(run, case._replace(seed=seed)) for seed in range(6)]
    for seed, of_seed in enumerate(one):
        cut = found(run, case._replace(seed=seed), (1, 2, 1) if size == 3 else (1, 3), most_ms=8)
        assert differing(of_seed, cut) == []


def test_plain_sums_differ(run, size=2):
    """The control: sums computed on each rank first have other bits, with the same segments."""
    shape = (4, 16, 32)
    one, two = (run(len(counts), local_folds_case, counts, shape, 0)[-1] for counts in ((6,), (3, 3)))
    share = (bits(one) != bits(two)).float().mean().item()
    assert share > 0.05, share
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def _rejected(comm, wrong_on):
    states, decays = torch.randn(2, 3, 4, 8, device=comm.device), torch.rand(2, 3, 4, device=comm.device)

    def call(name, *given, **options):
        given, options = list(given), dict(options)
        if comm.rank != wrong_on:
            given, options = [states, decays], {}
        return raised(lambda: allscan.allscan_segments(*given, comm=comm, **options))

    texts = [
        call("shape", states[0], decays),
        call("decays", states, decays[:1]),
        call("both", states, decays, transitions=torch.randn(2, 3, 4, 4, device=comm.device)),
        call("dtype", states.double(), decays),
        call("initial", states, decays, initial_state=torch.randn(3, 4, 9, device=comm.device)),
        call("differs", states, decays, initial_state=torch.randn(3, 4, 8, device=comm.device)),
        call("reverse", states, decays, reverse=True, layout="zigzag"),
    ]
    comm.barrier()
    return texts


@pytest.mark.cpu
def test_bad_input_is_rejected_on_every_rank(run, size=2):
    for texts in zip(*run(size, _rejected, 1)):
        assert all(texts), texts


def _with_algorithm(group, algorithm):
    options = dict(nodes=(1, 1)) if group.size() == 2 else {}
    with allscan.Communicator(group, algorithm=algorithm, **options) as comm:
        states = torch.randn(2, 3, 4, 8, device=comm.device)
        return raised(lambda: allscan.allscan_segments(states, comm=comm))


@pytest.mark.cpu
@pytest.mark.parametrize("algorithm, rejected", [("recursive_doubling", True), ("rails", True), ("chain", False)])
def test_algorithms_that_add_in_another_order(run, algorithm, rejected, size=2):
    for text in run(size, _with_algorithm, algorithm):
        assert (text is not None and algorithm in text[1]) == rejected, text


def default_dtype_case(group):
    """Return the differences of gradients under other default dtypes, in backward and at the communicator's making."""
    answers = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            with allscan.Communicator(group) as comm:
                generator = torch.Generator().manual_seed(comm.rank)
                states = torch.randn(3, 2, 4, 8, generator=generator, dtype=torch.float32).to(comm.device)
                decays = torch.rand(3, 2, 4, generator=generator, dtype=torch.float32).to(comm.device)
                leaves = states.requires_grad_(), decays.requires_grad_()
                _, outgoing = allscan.allscan_segments(*leaves, comm=comm)
                found = torch.autograd.grad((outgoing * outgoing).sum(), leaves)
                incoming, _ = allscan.allscan_segments(states, comm=comm)
                answers.append([*found, *torch.autograd.grad(incoming.sum(), states)])
        finally:
            torch.set_default_dtype(torch.float32)
    return [all(map(torch.equal, some, answers[0])) for some in answers]


def test_default_dtypes(run, size=2):
    assert all(all(same) for same in run(size, default_dtype_case))
