"""zeco_gla with invariant=: the same bits for every number of ranks and every split at multiples of it."""

from __future__ import annotations

import pytest
import torch

import allscan
from support.gla import BF16, F16, F32, NAMES, GLACase, Whole
from support.invariant import Calls, invariant_case, same, share_of_others, whole_of
from support.segments import bits
from support.values import raised

S = 128
ALL = [*NAMES]
_of_one_rank = {}  # results of one rank by case, for comparison with each split


def found(run, case, calls=None):
    return whole_of(run(len(case.tokens), invariant_case, case, calls or Calls()))


def found_by_one(run, case):
    if str(case) not in _of_one_rank:
        _of_one_rank[str(case)] = found(run, case)
    return _of_one_rank[str(case)]


@pytest.mark.quick
def test_the_law_in_float64(run, size=2):
    case = GLACase([S, 2 * S + 37], B=2, H=2, V=32)
    for name, ours, expected in zip(NAMES, found(run, case), Whole(case, "cpu").reference(), strict=True):
        assert ((ours - expected).abs().max() / expected.abs().max()).item() < 2e-6, name


CASES = [  # gates, dtype, B, K, V, and splits beside that over four ranks
    ("weak", F32, 1, 16, 32, [[0, 4 * S + 37]]),
    ("mixed", F32, 2, 20, 16, [[S, 3 * S + 37]]),
    ("strong", BF16, 1, 64, 32, [[S, 3 * S + 37], [0, 4 * S + 37]]),
    ("spots", BF16, 1, 32, 80, []),
    ("weak", F16, 1, 16, 16, []),
    ("weak", BF16, 1, 160, 16, [[S, 3 * S + 37]]),
]


@pytest.mark.slow(but=("2-tokens1-", "2-tokens3"))
@pytest.mark.parametrize(
    "size, tokens, kind, dtype, B, K, V",
    [(len(x), x, *case) for *case, more in CASES for x in ([2 * S, 0, S, S + 37], *more)],
)
def test_contiguous(run, size, tokens, kind, dtype, B, K, V):
    case = GLACase([4 * S + 37], B, 2, K, V, kind, dtype)
    assert same(found_by_one(run, case), found(run, case._replace(tokens=tokens))) == ALL


def test_eight_ranks(run, size=8):
    case = GLACase([7 * S + 37], gates="mixed")
    for tokens in ([S] * 7 + [37], [2 * S, 0, S, S, 0, 2 * S, S, 37]):
        assert same(found_by_one(run, case), found(run, case._replace(tokens=tokens))) == ALL


@pytest.mark.slow(but="3-dtype1")
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("size", [1, 3])
def test_zigzag(run, dtype, size):
    case = GLACase([6 * S], 1, 2, 32, 16, "mixed", dtype)
    cut = case._replace(tokens=[6 * S // size] * size, zigzag=True)
    assert same(found_by_one(run, case), found(run, cut)) == ALL


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_what_is_kept(run, dtype, size=2):
    case = GLACase([2 * S, 2 * S], dtype=dtype, gates="spots")
    assert same(found(run, case), found(run, case._replace(recompute=False))) == ALL


LENGTHS = [0, 5, S, S, 2 * S + 70, 3 * S + 1, 6 * S]  # one empty; some begin at multiples of S


@pytest.mark.slow(but=("weak-2", "mixed-3-tokens2"))
@pytest.mark.parametrize("size, tokens", [(1, [6]), (2, [2, 4]), (3, [1, 4, 1]), (3, [2, 2, 2])])
@pytest.mark.parametrize("kind", ["weak", "mixed"])
def test_packed(run, kind, tokens, size):
    case = GLACase([6 * S], 1, 2, 16, 32, kind, lengths=LENGTHS)
    one, case = found_by_one(run, case), case._replace(tokens=[n * S for n in tokens])
    if size > 1:
        assert same(one, found(run, case)) == ALL
    if len({*tokens}) == 1:
        assert same(one, found(run, case._replace(zigzag=True))) == ALL


def _documents(group, before, length):
    """Return (o, final state) of a document after ``before`` tokens of another one."""
    with allscan.Communicator(group) as comm:
        generator = torch.Generator().manual_seed(3)
        own = [torch.randn(1, length, 2, 16, generator=generator) for _ in range(4)]
        rows = []
        for x in own:
            other = torch.randn(1, before, 2, 16, generator=generator)
            rows.append(torch.cat([other, x, other[:, :64]], 1).to(comm.device))
        q, k, v, g = rows
        cuts = [0, before, before + length, before + length + min(before, 64)]
        o, final = allscan.zeco_gla(q, k, v, -g.abs(), comm=comm, cu_seqlens=cuts, output_final_state=True, invariant=S)
        return o[:, before : before + length].cpu(), final[1].cpu()


def test_a_document_has_its_bits_wherever_it_lies(run):
    """They do not depend on the position, if it is a multiple of S, nor on the other documents."""
    alone = run(1, _documents, 0, 300)[0]
    for before in (S, 3 * S):
        for a, b in zip(alone, run(1, _documents, before, 300)[0], strict=True):
            assert torch.equal(bits(a), bits(b)), before


def _batch(group, B):
    with allscan.Communicator(group, invariant=S) as comm:
        whole = Whole(GLACase([3 * S], 4, 2, 64, 64, dtype=BF16), comm.device)
        o, _ = allscan.zeco_gla(whole.q[:B], whole.k[:B], whole.v[:B], whole.g[:B], comm=comm)
        return o[:1].cpu()


def test_every_batch_size(run):
    one, four = (run(1, _batch, B)[0] for B in (1, 4))
    assert torch.equal(bits(one), bits(four))


def test_of_the_communicator_and_compiled(run, size=2):
    case = GLACase([2 * S, S])
    expected = found(run, case)
    for calls in (Calls(of_comm=True), Calls(compiled=True)):
        assert same(expected, found(run, case, calls)) == ALL, calls


@pytest.mark.slow(but="3")
@pytest.mark.parametrize("size, tokens", [(2, [S, 3 * S]), (3, [S, 2 * S, S])])
def test_stragglers(run, tokens, size):
    """Repeated plans, with each rank as straggler in turn."""
    case = GLACase(tokens, gates="mixed")
    one = found_by_one(run, case._replace(tokens=[4 * S]))
    assert same(one, found(run, case, Calls(most_ms=10, times=2 * size))) == ALL


def test_without_it_bits_differ(run, size=2):
    """The control."""
    case = GLACase([768], 1, 2, 64, 64)
    one, two = (found(run, case._replace(tokens=tokens), Calls(S=0)) for tokens in ([768], [384, 384]))
    assert share_of_others(one, two) > 0.2
    assert not {"o", "dq", "dk", "dv", "dg"} & {*same(one, two)}


def _rejected(group):
    with allscan.Communicator(group) as comm:

        def call(T, **options):
            tensors = [torch.randn(1, T, 2, 16, device=comm.device) for _ in range(4)]
            tensors[3] = -tensors[3].abs()
            return raised(lambda: allscan.zeco_gla(*tensors, comm=comm, **options))

        one = comm.rank == 0
        texts = [
            call(S + 64 if one else S, invariant=S),  # rank 0's boundary
            call(S, invariant=S if one else 0),
            call(S, invariant=100),
            call(S, invariant=-64),
            call(S, invariant=S, layout="zigzag"),
            call(2 * S, invariant=S, layout="zigzag", per_document=True, cu_seqlens=[0, 4 * S]),
        ]
        fine = call(S if one else S + 64, invariant=S)  # the last rank may end at any token
        comm.barrier()
    return texts, fine


@pytest.mark.cpu
def test_other_boundaries_are_rejected_on_all_ranks(run, size=2):
    answers = run(size, _rejected)
    assert [fine for _, fine in answers] == [None] * size
    for texts in zip(*(texts for texts, _ in answers)):
        assert all(texts) and all("invariant" in text[1] for text in texts), texts


def _with_algorithm(group, algorithm):
    with allscan.Communicator(group, algorithm=algorithm, nodes=(1,) * group.size()) as comm:
        tensors = [torch.zeros(1, S, 1, 16, device=comm.device)] * 4
        return raised(lambda: allscan.zeco_gla(*tensors, comm=comm, invariant=S))


@pytest.mark.cpu
@pytest.mark.parametrize("algorithm, rejected", [("recursive_doubling", True), ("rails", True), ("auto", False)])
def test_algorithms(run, algorithm, rejected, size=2):
    for text in run(size, _with_algorithm, algorithm):
        assert (text is not None and algorithm in text[1]) == rejected, text


def _communicators(group):
    rank = group.rank()
    return [
        raised(allscan.Communicator, group, invariant=invariant)
        for invariant in (64 if rank else 128, 100 if rank else 64, -64, "all")
    ]


@pytest.mark.cpu
def test_communicators_are_alike(run, size=2):
    for texts in zip(*run(size, _communicators)):
        assert all(texts) and all("invariant" in text for _, text in texts), texts
