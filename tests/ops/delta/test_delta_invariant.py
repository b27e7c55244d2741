"""Delta rules with invariant= and chunk="allscan": the same bits for every number of ranks and every cut."""

from __future__ import annotations

import pytest
import torch

import allscan
from support.delta import NAMES, DeltaCase, Whole
from support.gla import BF16, F32
from support.segments import bits
from support.values import place, raised

S = 128
ALL = [*NAMES]
_of_one_rank = {}  # str of a case -> what one rank finds: the same for each cut that is compared with it
CALLS = {"kda": allscan.zeco_kda, "gated_delta_rule": allscan.zeco_gated_delta_rule}


def case_of(group, case, invariant, of_comm=False):
    """(which tokens this rank has, NAMES of them). of_comm: the communicator has ``invariant``, the call says
    nothing."""
    with allscan.Communicator(group, invariant=invariant if of_comm else 0) as comm:
        whole, mine = Whole(case, comm.device), place(comm, case.tokens, case.zigzag)
        own = [x[:, mine].contiguous().requires_grad_() for x in whole.tensors()]
        own.append(whole.initial.clone().requires_grad_())
        o, final = CALLS[case.rule](
            *own[:5],
            comm=comm,
            **({} if of_comm else dict(chunk="allscan", invariant=invariant)),
            initial_state=own[5],
            output_final_state=True,
            cu_seqlens=case.lengths,
            layout="zigzag" if case.zigzag else "contiguous",
        )
        whole.loss(o, final, whole.do[:, mine]).backward()
        comm.barrier()
        return torch.arange(sum(case.tokens))[mine], [x.detach().cpu() for x in (o, final, *(x.grad for x in own))]


def found(run, case, invariant=S, of_comm=False):
    parts = run(len(case.tokens), case_of, case, invariant, of_comm)
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


def test_the_law_in_float64(run, size=2):
    case = DeltaCase("kda", [S, S + 37], H=1, HV=2)
    for name, ours, expected in zip(NAMES, found(run, case), Whole(case, "cpu").reference(), strict=True):
        assert ((ours - expected).abs().max() / expected.abs().max()).item() < 1e-5, name


@pytest.mark.parametrize("size, tokens", [(2, [S, 2 * S + 37]), (3, [S, 0, 2 * S + 37]), (3, [S, S, S + 37])])
@pytest.mark.parametrize(
    "rule, kind, dtype, B, HV",
    [("kda", "mixed", F32, 1, 2), ("kda", "weak", BF16, 2, 1), ("gated_delta_rule", "mild", F32, 1, 2)],
)
def test_contiguous(run, rule, kind, dtype, B, HV, size, tokens):
    case = DeltaCase(rule, [3 * S + 37], B, 1, HV, 16, 32, kind, dtype)
    assert same(found_by_one(run, case), found(run, case._replace(tokens=tokens))) == ALL


@pytest.mark.parametrize("rule", CALLS)
def test_of_the_communicator(run, rule, size=2):
    case = DeltaCase(rule, [S, S])
    assert same(found(run, case), found(run, case, of_comm=True)) == ALL


def test_zigzag(run, size=2):
    case = DeltaCase("kda", [4 * S], 2, gates="mixed")
    assert same(found_by_one(run, case), found(run, case._replace(tokens=[2 * S] * 2, zigzag=True))) == ALL


@pytest.mark.parametrize("zigzag", [False, True])
def test_packed(run, zigzag, size=2):
    case = DeltaCase("kda", [4 * S], gates="weak", lengths=[0, 5, S, S, 2 * S + 70, 4 * S])
    assert same(found_by_one(run, case), found(run, case._replace(tokens=[2 * S] * 2, zigzag=zigzag))) == ALL


def test_without_it_bits_differ(run, size=2):
    """The control."""
    case = DeltaCase("kda", [6 * S])
    one, two = (found(run, case._replace(tokens=tokens), 0) for tokens in ([6 * S], [3 * S] * 2))
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
