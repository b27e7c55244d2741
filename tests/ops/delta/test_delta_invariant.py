"""Delta rules with invariant= and chunk="allscan": the same bits for every number of ranks and every split."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

import allscan
from support.delta import NAMES, DeltaCase, Whole
from support.gla import BF16, F16, F32
from support.segments import bits
from support.values import late, place, raised

S = 128
ALL = [*NAMES]
_of_one_rank = {}  # results of one rank by case, for comparison with each split
CALLS = {"kda": allscan.zeco_kda, "gated_delta_rule": allscan.zeco_gated_delta_rule}


class How(NamedTuple):
    """How the operators are called. of_comm: the communicator has ``invariant``, the call has no such argument. raw:
    norms, gate and beta are computed from raw arguments. batch: number of the case's batch entries. most_ms: largest
    delay of a rank, in three calls."""

    invariant: int = S
    of_comm: bool = False
    raw: bool = False
    batch: int | None = None
    most_ms: int = 0


def case_of(group, case, how):
    """Return (indices of this rank's tokens, NAMES of them)."""
    invariant, of_comm, raw, batch, most_ms = how
    with allscan.Communicator(group, invariant=invariant if of_comm else 0) as comm:
        whole, mine = Whole(case, comm.device), place(comm, case.tokens, case.zigzag)
        own = [x[:batch, mine].contiguous() for x in whole.tensors()] + [whole.initial[:batch].clone()]
        options = {} if of_comm else dict(chunk="allscan", invariant=invariant)
        if raw:
            options |= dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)
            options["A_log"] = torch.linspace(-1, 1, case.HV, device=comm.device)
        found = []
        for call in range(3 if most_ms else 1):
            late(call, comm.rank, most_ms)
            leaves = [x.detach().requires_grad_() for x in own]
            o, final = CALLS[case.rule](
                *leaves[:5],
                comm=comm,
                initial_state=leaves[5],
                output_final_state=True,
                cu_seqlens=case.lengths,
                layout="zigzag" if case.zigzag else "contiguous",
                **options,
            )
            do, dfinal = whole.do[:batch, mine], whole.dfinal[:batch]
            ((o * do).sum() + (final * dfinal).sum()).backward()
            again = [x.detach().cpu() for x in (o, final, *(x.grad for x in leaves))]
            assert not found or same(again, found) == ALL, f"call {call} has other bits than the first"
            found = again
        comm.barrier()
        return torch.arange(sum(case.tokens))[mine], found


def found(run, case, **how):
    parts = run(len(case.tokens), case_of, case, How(**how))
    order, whole = torch.cat([mine for mine, _ in parts]).argsort(), []
    for i, name in enumerate(NAMES):
        of_ranks = [part[i] for _, part in parts]
        whole.append(sum(of_ranks) if "state" in name else torch.cat(of_ranks, 1)[:, order])
    return whole


def found_by_one(run, case):
    if str(case) not in _of_one_rank:
        _of_one_rank[str(case)] = found(run, case)
    return _of_one_rank[str(case)]


def same(one, other):
    return [name for name, a, b in zip(NAMES, one, other, strict=True) if torch.equal(bits(a), bits(b))]


@pytest.mark.parametrize("rule", CALLS)
def test_the_law_in_float64(run, rule, size=2):
    case = DeltaCase(rule, [S, S + 37], H=1, HV=2)
    for name, ours, expected in zip(NAMES, found(run, case), Whole(case, "cpu").reference(), strict=True):
        assert ((ours - expected).abs().max() / expected.abs().max()).item() < 1e-5, name


@pytest.mark.slow(but=("kda-weak-dtype1-2-1-3-tokens2", "gated_delta_rule-mild-dtype3-1-2-3"))
@pytest.mark.parametrize("size, tokens", [(2, [S, 2 * S + 37]), (3, [S, 0, 2 * S + 37]), (3, [S, S, S + 37])])
@pytest.mark.parametrize(
    "rule, kind, dtype, B, HV",
    [
        ("kda", "mixed", F32, 1, 2),
        ("kda", "weak", BF16, 2, 1),
        ("kda", "strong", F16, 1, 1),
        ("gated_delta_rule", "mild", F32, 1, 2),
        ("gated_delta_rule", "strong", BF16, 2, 1),
    ],
)
def test_contiguous(run, rule, kind, dtype, B, HV, size, tokens):
    case = DeltaCase(rule, [3 * S + 37], B, 1, HV, 16, 32, kind, dtype)
    assert same(found_by_one(run, case), found(run, case._replace(tokens=tokens))) == ALL


@pytest.mark.slow(but="4-tokens0-gated")
@pytest.mark.parametrize("rule", CALLS)
@pytest.mark.parametrize("size, tokens", [(4, [2, 0, 3, 2]), (8, [1, 0, 2, 1, 0, 1, 1, 1])])
def test_many_ranks(run, rule, tokens, size):
    """With stragglers, in calls with repeated plans."""
    case = DeltaCase(rule, [7 * S], gates="mixed")
    cut = case._replace(tokens=[n * S for n in tokens])
    assert same(found_by_one(run, case), found(run, cut, most_ms=5)) == ALL


@pytest.mark.parametrize("rule", CALLS)
def test_every_batch_size(run, rule, size=1):
    case = DeltaCase(rule, [2 * S], 3, gates="mild", dtype=BF16)
    one, three = found(run, case, batch=1), found(run, case)
    assert same(one, [x[:1] for x in three]) == ALL


@pytest.mark.slow(but="gated")
@pytest.mark.parametrize("rule", CALLS)
def test_raw_arguments(run, rule, size=2):
    case = DeltaCase(rule, [3 * S + 37], H=2, HV=2, dtype=BF16)
    cut = case._replace(tokens=[S, 2 * S + 37])
    assert same(found(run, case, raw=True), found(run, cut, raw=True)) == ALL


@pytest.mark.parametrize("rule", CALLS)
def test_of_the_communicator(run, rule, size=2):
    case = DeltaCase(rule, [S, S])
    assert same(found(run, case), found(run, case, of_comm=True)) == ALL


@pytest.mark.slow(but="3")
@pytest.mark.parametrize("rule", CALLS)
@pytest.mark.parametrize("size", [1, 3])
def test_zigzag(run, rule, size):
    case = DeltaCase(rule, [6 * S], 2, gates="mixed")
    cut = case._replace(tokens=[6 * S // size] * size, zigzag=True)
    assert same(found_by_one(run, case), found(run, cut)) == ALL


@pytest.mark.slow(but=("True", "False-gated"))
@pytest.mark.parametrize("rule", CALLS)
@pytest.mark.parametrize("zigzag", [False, True])
def test_packed(run, zigzag, rule, size=2):
    case = DeltaCase(rule, [4 * S], gates="weak", lengths=[0, 5, S, S, 2 * S + 70, 4 * S])
    assert same(found_by_one(run, case), found(run, case._replace(tokens=[2 * S] * 2, zigzag=zigzag))) == ALL


@pytest.mark.parametrize("rule", CALLS)
def test_without_it_bits_differ(run, rule, size=2):
    """The control."""
    case = DeltaCase(rule, [6 * S])
    one, two = (found(run, case._replace(tokens=tokens), invariant=0) for tokens in ([6 * S], [3 * S] * 2))
    assert not {"o", "dq", "dk", "dv", "dg"} & {*same(one, two)}


def _rejected(group):
    with allscan.Communicator(group) as comm:

        def call(T, chunk="allscan", **options):
            q, k, v = (torch.randn(1, T, 1, 16, device=comm.device) for _ in range(3))
            g, beta = -torch.rand(1, T, 1, 16, device=comm.device), torch.rand(1, T, 1, device=comm.device)
            return raised(lambda: allscan.zeco_kda(q, k, v, g, beta, comm=comm, chunk=chunk, **options))

        one = comm.rank == 0
        texts = [
            call(S, "fla", invariant=S),
            call(S + 64 if one else S, invariant=S),
            call(S, invariant=S if one else 0),
            call(0 if one else S, invariant=S),
        ]
        comm.barrier()
    return texts


@pytest.mark.cpu
def test_what_is_not_possible_is_rejected_on_all_ranks(run, size=2):
    for texts in zip(*run(size, _rejected)):
        assert all(texts) and all("invariant" in text[1] for text in texts), texts
