"""Operators with invariant=: the same bits for every number of ranks and every split at multiples of it."""

from __future__ import annotations

import pytest
import torch

import allscan
from support.gla import BF16, F16, F32
from support.invariant import RULES, case_of, found, same
from support.segments import bits
from support.values import raised

S = 128
DELTA = "kda", "gated_delta_rule"
LENGTHS = [0, 5, S, S, 2 * S + 70, 3 * S + 1, 6 * S]  # one empty; some begin at multiples of S
_of_one_rank = {}  # results of one rank by case, for comparison with each split


def differing(run, rule, case, tokens, **how):
    """Return the names of results whose bits differ between one rank and a split over ``tokens``, with stragglers."""
    one = case._replace(tokens=[sum(tokens)], zigzag=False)
    if str((rule, one)) not in _of_one_rank:
        _of_one_rank[str((rule, one))] = found(run, rule, one)
    split = found(run, rule, case._replace(tokens=tokens), **how)
    return {*RULES[rule].names} - {*same(rule, _of_one_rank[str((rule, one))], split)}


@pytest.mark.slow(but=("False", "True-ssd"))
@pytest.mark.quick("False-gla")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("packed", [False, True])
def test_the_law_in_float64(run, packed, rule, size=2):
    case = case_of(rule, [S, 3 * S + 21], lengths=[0, 0, 5, S, S, 2 * S + 9, 4 * S + 21] if packed else None)
    wanted = RULES[rule].whole(case, "cpu").reference()
    for name, ours, expected in zip(RULES[rule].names, found(run, rule, case), wanted, strict=True):
        assert ((ours - expected).abs().max() / expected.abs().max()).item() < 2e-5, name


LAST = [S, 0, 2 * S + 37], [S, 3 * S + 37], [S, S, S + 37]
CONTIGUOUS = [  # rule, options, splits
    ("gla", dict(V=32), [[2 * S, 0, S, S + 37], [0, 4 * S + 37]]),
    ("gla", dict(gates="mixed", B=2, K=20), [[2 * S, 0, S, S + 37], [S, 3 * S + 37]]),
    ("gla", dict(gates="strong", dtype=BF16, K=64, V=32), LAST[:2]),
    ("gla", dict(gates="spots", dtype=BF16, K=32, V=80), LAST[:1]),
    ("gla", dict(dtype=F16), LAST[:1]),
    ("gla", dict(dtype=BF16, K=160), LAST[1:2]),
    ("gla", dict(gates="mixed"), [[S] * 7 + [37], [2 * S, 0, S, S, 0, 2 * S, S, 37]]),
    ("kda", dict(gates="mixed", V=32), LAST),
    ("kda", dict(dtype=BF16, B=2, V=32), LAST),
    ("kda", dict(gates="strong", dtype=F16, V=32), LAST),
    ("gated_delta_rule", dict(gates="mild", V=32), LAST),
    ("gated_delta_rule", dict(gates="strong", dtype=BF16, B=2, V=32), LAST),
    ("ssd", dict(B=2), [[S, 3 * S + 21], [2 * S, 0, 2 * S + 21], [S, 0, S, 0, S, S, 0, 21]]),
    ("ssd", dict(lengths=[0, 0, 5, S, S, 2 * S + 9, 4 * S + 21]), [[S, 3 * S + 21], [2 * S, 0, 2 * S + 21]]),
    ("ssd", dict(B=2, dtype=BF16), [[2 * S, 0, 2 * S + 21]]),
]
FIRST = 0, 2, 7, 10, 12  # cases, with their first split, that run by default


@pytest.mark.parametrize(
    "rule, options, tokens, size",
    [
        pytest.param(rule, options, x, len(x), marks=[] if i in FIRST and j == 0 else pytest.mark.slow)
        for i, (rule, options, splits) in enumerate(CONTIGUOUS)
        for j, x in enumerate(splits)
    ],
)
def test_contiguous(run, rule, options, tokens, size):
    assert not differing(run, rule, case_of(rule, tokens, **options), tokens)


@pytest.mark.slow(but=("1-gla", "3-gated", "3-ssd"))
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [1, 3])
def test_zigzag(run, rule, size):
    case = case_of(rule, [6 * S], **dict(gates="mixed") if rule != "ssd" else dict(B=2))
    assert not differing(run, rule, case._replace(zigzag=True), [6 * S // size] * size)


@pytest.mark.slow(but=("2-tokens0", "3-tokens2-gla"))
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size, tokens", [(2, [2, 4]), (3, [1, 4, 1]), (3, [2, 2, 2])])
def test_packed(run, rule, tokens, size):
    case = case_of(rule, [6 * S], lengths=LENGTHS, **dict(gates="mixed") if rule == "gla" else {})
    tokens = [n * S for n in tokens]
    assert not differing(run, rule, case, tokens)
    if len({*tokens}) == 1:
        assert not differing(run, rule, case._replace(zigzag=True), tokens)


@pytest.mark.slow(but="3-tokens1-g")
@pytest.mark.parametrize("rule", ["gla", *DELTA])
@pytest.mark.parametrize("size, tokens", [(2, [1, 3]), (3, [1, 0, 3]), (8, [1, 0, 2, 1, 0, 1, 1, 1])])
def test_stragglers(run, rule, tokens, size):
    """Repeated plans, with random delays of each rank."""
    tokens, times = [n * S for n in tokens], 6 if size < 8 else 3
    assert not differing(run, rule, case_of(rule, tokens, gates="mixed"), tokens, most_ms=10, times=times)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_what_is_kept(run, dtype, size=2):
    case = case_of("gla", [2 * S, 2 * S], dtype=dtype, gates="spots")
    kept = found(run, "gla", case._replace(recompute=False))
    assert same("gla", found(run, "gla", case), kept) == [*RULES["gla"].names]


@pytest.mark.parametrize(
    "rule, how",
    [
        ("gla", dict(of_comm=True)),
        ("gla", dict(compiled=True)),
        ("gated_delta_rule", dict(raw=True)),
        *(pytest.param(rule, dict(of_comm=True), marks=pytest.mark.slow) for rule in DELTA),
        pytest.param("kda", dict(raw=True), marks=pytest.mark.slow),
    ],
)
def test_options(run, rule, how, size=2):
    """The communicator's option, compiled calls and raw arguments, between one rank and two."""
    case = case_of(rule, [3 * S + 37], dtype=BF16 if "raw" in how else F32)
    one = found(run, rule, case, **{name: x for name, x in how.items() if name == "raw"})
    assert same(rule, one, found(run, rule, case._replace(tokens=[S, 2 * S + 37]), **how)) == [*RULES[rule].names]


@pytest.mark.slow(but=("gla", "gated", "ssd"))
@pytest.mark.parametrize("rule", RULES)
def test_without_it_bits_differ(run, rule, size=2):
    """The control."""
    case = case_of(rule, [6 * S], **{} if rule == "ssd" else dict(K=32, V=32))
    one, two = (found(run, rule, case._replace(tokens=tokens), S=0) for tokens in ([6 * S], [3 * S] * 2))
    assert not {"o", "dq", "dk", "dv", "dg", "dx", "dB"} & {*same(rule, one, two)}


def _documents(comm, before, length):
    """Return (o, final state) of a document after ``before`` tokens of another one."""
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


def _batch(group, rule, B):
    with allscan.Communicator(group, invariant=S) as comm:
        case = case_of(rule, [3 * S], B=4, dtype=BF16, **dict(K=64, V=64) if rule == "gla" else dict(gates="mild"))
        whole = RULES[rule].whole(case, comm.device)
        given = whole.tensors() if rule in DELTA else (whole.q, whole.k, whole.v, whole.g)
        leaves = [x[:B].clone().requires_grad_() for x in given]
        o, _ = getattr(allscan, RULES[rule].operator)(*leaves, comm=comm, **RULES[rule].options)
        found = [o, *torch.autograd.grad((o * whole.do[:B]).sum(), leaves)]
        return [x[:1].detach().cpu() for x in found]


@pytest.mark.parametrize("rule", ["gla", *DELTA])
def test_every_batch_size(run, rule):
    one, four = (run(1, _batch, rule, B)[0] for B in (1, 4))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(one, four, strict=True))


def _rejected(comm, rule):
    def call(T, **options):
        q, k, v = (torch.randn(1, T, 2, 16, device=comm.device) for _ in range(3))
        g, heads = -torch.rand(1, T, 2, 16, device=comm.device), torch.rand(1, T, 2, device=comm.device)
        A = -torch.ones(2, device=comm.device)
        given = {"gla": (q, k, v, g), "kda": (q, k, v, g, heads), "ssd": (v, heads, A, k, q, 16)}[rule]
        return raised(lambda: getattr(allscan, RULES[rule].operator)(*given, comm=comm, **options))

    one = comm.rank == 0
    texts = [
        call(S + 64 if one else S, invariant=S),  # rank 0's boundary
        call(S, invariant=S if one else 0),
        call(0 if one else S, invariant=S) if rule == "kda" else call(S, invariant=100 if one else S),
    ]
    if rule == "kda":
        texts.append(call(S, chunk="fla", invariant=S))
    if rule == "gla":
        texts += [
            call(S, invariant=100),
            call(S, invariant=-64),
            call(S, invariant=S, layout="zigzag"),
            call(2 * S, invariant=S, layout="zigzag", per_document=True, cu_seqlens=[0, 4 * S]),
        ]
    fine = call(S if one else S + 64, invariant=S)  # the last rank may end at any token
    comm.barrier()
    return texts, fine


@pytest.mark.cpu
@pytest.mark.parametrize("rule", ["gla", "kda", "ssd"])
def test_what_is_not_possible_is_rejected_on_all_ranks(run, rule, size=2):
    answers = run(size, _rejected, rule)
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
