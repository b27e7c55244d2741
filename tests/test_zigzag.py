"""The zigzag layout: native, by an ascending and a descending scan; conversions to it and from it."""

from __future__ import annotations

import contextlib
import itertools
from unittest import mock

import pytest
import torch
import torch.utils.checkpoint

import allscan
from allscan.base.checks import ScanInputs
from allscan.ops import carrier
from allscan.scan.zigzag_scan import two_way_scan
from allscan.zigzag import from_zigzag, to_zigzag, zigzag_first_token, zigzag_positions
from support.delta import DeltaCase, operator_case
from support.gla import BF16, GLACase, Whole, check, gla_case
from support.values import check_answers, check_errors, error, late, place, raised

TOKENS = [40, 70, 16, 66, 2, 34]  # of each rank
PACKED = {  # tokens of each rank, and boundaries of packed sequences over all of them
    "one rank": ([140], [0, 3, 3, 70, 71, 140]),
    "over the middle": ([40, 30], [0, 25, 50, 70]),
    "at the cuts": ([64, 64], [0, 32, 64, 96, 128]),
    "over all": ([30, 20, 26], [0, 76]),
    "over most, between others": ([40, 70, 10, 50], [0, 13, 30, 130, 156, 170]),
    "empty ones": ([20, 20], [0, 0, 10, 10, 20, 20, 39, 40, 40]),
}


def zigzag_case(comm, T):
    P, rank = comm.size, comm.rank
    whole = torch.arange(2.0 * P * T * 3).reshape(2, P * T, 3).to(comm.device)
    own = whole[:, rank * T : (rank + 1) * T].clone().requires_grad_()
    pieces = whole.chunk(2 * P, 1)
    expected = torch.cat([pieces[rank], pieces[2 * P - 1 - rank]], 1)
    moved = to_zigzag(own, comm=comm)
    assert torch.equal(moved, expected)
    assert torch.equal(moved, whole[:, zigzag_positions(T, comm=comm)])
    (moved * expected).sum().backward()  # the gradient of a token is its weight: the token itself
    assert torch.equal(own.grad, own.detach())
    assert torch.equal(from_zigzag(moved, comm=comm), own)
    with pytest.raises(ValueError, match="even number of tokens"):
        to_zigzag(own[:, 1:], comm=comm)
    with pytest.raises(ValueError, match="T must be even"):
        zigzag_positions(T + 1, comm=comm)
    with pytest.raises(ValueError, match="T must be even"):
        zigzag_first_token(T + 1, comm=comm)
    assert zigzag_first_token(T, comm=comm) == zigzag_positions(T, comm=comm)[0]
    total = torch.arange(P * T)
    lengths = [0, 0, 2 * P, P * T] if T > 2 else [0, P * T]
    for cu_seqlens in (lengths, torch.tensor(lengths, dtype=torch.int32, device=comm.device)):
        found = zigzag_positions(T, comm=comm, cu_seqlens=cu_seqlens)
        assert torch.equal(found, zigzag_positions(T, comm=comm))
        found = zigzag_positions(T, comm=comm, cu_seqlens=cu_seqlens, per_document=True)
        documents = [total[a:b].chunk(2 * P) for a, b in itertools.pairwise(lengths) if b > a]
        wanted = torch.cat([x for chunks in documents for x in (chunks[rank], chunks[2 * P - 1 - rank])])
        assert torch.equal(found.cpu(), wanted)
    wrong = {
        "needs cu_seqlens": dict(per_document=True),
        "must rise from 0": dict(cu_seqlens=[0, P * T + 2]),
        "cu_seqlens must be": dict(cu_seqlens=[0.5]),
        "multiples of": dict(cu_seqlens=[0, 1, P * T], per_document=True),
    }
    for text, given in wrong.items():
        with pytest.raises((TypeError, ValueError), match=text):
            zigzag_positions(T, comm=comm, **given)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("T", [2, 6])
def test_ascending_and_descending(run, size, T):
    run(size, zigzag_case, T)


def recorded_case(group, case):
    """Return gla_case's errors, and the number of its scans that Python launches, because a plan cannot."""
    with mock.patch.object(carrier, "record_call", wraps=carrier.record_call) as called:
        return gla_case(group, case), called.call_count


@pytest.mark.parametrize("B, K, of_python", [(1, 16, 0), (2, 6, 0), (1, 18, 2)])
def test_both_scans_are_launches_of_a_plan(run, B, K, of_python, size=2):
    """Except where the states of the second halves would not begin at a multiple of 16 bytes."""
    found = run(size, recorded_case, GLACase(TOKENS[:size], B=B, K=K, zigzag=True))
    check([errors for errors, _ in found])
    assert [count for _, count in found] == [of_python] * size


DOCUMENTS = {  # cu_seqlens over 2P, with each document in 2P pieces: empty ones, some with one token a piece
    1: [0, 3, 3, 70, 71],
    2: [0, 0, 33, 34, 67],
    3: [0, 20, 21, 21],
    4: [0, 12, 12, 12, 13, 30, 35],
    5: [0, 9, 11],
}


def split(size, what):
    """Return (tokens of each rank, fields of a case): plain, one of PACKED, or "documents", each sharded."""
    if what == "documents":
        lengths = [2 * size * n for n in DOCUMENTS[size]]
        return [lengths[-1] // size] * size, dict(zigzag=True, lengths=lengths, per_document=True)
    tokens, lengths = PACKED.get(what, (TOKENS[:size], None))
    return tokens, dict(zigzag=True, lengths=lengths)


PACKED_SIZES = [(len(tokens), name) for name, (tokens, _) in PACKED.items()]


@pytest.mark.slow(but=("1-plain", "2", "3-over"))
@pytest.mark.parametrize("size, what", [*itertools.product([1, 2, 3, 4, 5], ["plain", "documents"]), *PACKED_SIZES])
def test_zeco_gla(run, size, what):
    tokens, fields = split(size, what)
    fields |= dict(gates="mixed" if size == 3 else "weak", recompute=(size, what) != (2, "documents"))
    check(run(size, gla_case, GLACase(tokens, B=2 if what == "plain" and size < 4 else 1, H=2, V=24, **fields)))


@pytest.mark.slow(but=("gated_delta_rule-1", "gated_delta_rule-3-plain", "gated_delta_rule-2"))
@pytest.mark.cpu
@pytest.mark.parametrize(
    "rule, size, what",
    [
        ("gated_delta_rule", 1, "plain"),
        ("gated_delta_rule", 3, "plain"),
        ("kda", 2, "plain"),
        ("gated_delta_rule", 2, "over the middle"),
        ("gated_delta_rule", 4, "over most, between others"),
        ("gated_delta_rule", 3, "documents"),
        ("kda", 4, "documents"),
    ],
)
def test_delta_rules(run, rule, size, what):
    tokens, fields = split(size, what)
    check_errors(run(size, operator_case, DeltaCase(rule, tokens, HV=2, **fields)), 1e-5)


def test_bfloat16(run, size=2):
    check(run(size, gla_case, GLACase([40, 150], K=32, V=32, dtype=BF16, zigzag=True)), BF16)


def collective_case(comm, kind):
    """Compare both prefixes and all gradients with a sequential reference, over several epochs with stragglers."""
    P, K, errors = comm.size, 16, []
    for epoch in range(4):
        generator = torch.Generator().manual_seed(epoch)

        def drawn(*shape, generator=generator):
            return torch.randn(2 * P, *shape, generator=generator).double().requires_grad_()

        states, weights, initial = drawn(2, K, 24), drawn(2, K, 24), drawn(2, K, 24)
        factors = {"rows": (drawn(2, K) / 4).clamp(0, 1), "dense": drawn(2, K, K) / 8, "none": torch.ones(2 * P)}[kind]
        factors = factors.detach().requires_grad_(kind != "none")
        prefix, prefixes = initial[0], []
        for state, factor in zip(states, factors, strict=True):
            prefixes.append(prefix)
            passed = factor @ prefix if kind == "dense" else factor[..., None] * prefix
            prefix = passed + state
        sum((x * w).sum() for x, w in zip(prefixes, weights.detach(), strict=True)).backward()

        places = comm.rank, 2 * P - 1 - comm.rank

        def own(x, places=places):
            return tuple(x[i].detach().float().to(comm.device).requires_grad_() for i in places)

        pair, of_pair = own(states), own(factors)
        first = initial[0].detach().float().to(comm.device).requires_grad_()
        how = {"rows": dict(decay=of_pair), "dense": dict(transition=of_pair), "none": {}}[kind]
        late(epoch, comm.rank, 5)
        found = allscan.allscan(pair, comm=comm, initial_state=first, layout="zigzag", **how)
        sum((x * w).sum() for x, w in zip(found, own(weights), strict=True)).backward()
        for i, j in enumerate(places):
            errors += [error(found[i], prefixes[j]), error(pair[i].grad, states.grad[j])]
            if kind != "none":
                errors.append(error(of_pair[i].grad, factors.grad[j]))
        errors.append(error(first.grad, initial.grad[0]) if comm.rank == 0 else first.grad.abs().max().item())
    return max(errors)


@pytest.mark.slow(but=("rows-1", "rows-2", "rows-3", "dense-2", "dense-3", "none-1", "none-2"))
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ["rows", "dense", "none"])
def test_allscan(run, size, kind):
    assert max(run(size, collective_case, kind)) < 2e-5


def received_case(comm):
    """Return the bytes that other ranks have written to both inboxes of this rank in one call."""
    states = [torch.rand(3, 16, 64, device=comm.device) for _ in range(2)]
    scan = allscan.AllScan(comm, states[0].shape, protocol="signal")  # its inboxes are not cleared after a read
    inboxes = [scan.channel(reverse).inbox for reverse in (False, True)]
    before = [x.view(torch.int32).clone() for x in inboxes]
    comm.barrier()
    two_way_scan(scan, *map(ScanInputs, states))
    comm.barrier()
    comm.streams.synchronize()
    return sum(4 * (x.view(torch.int32) != y).sum().item() for x, y in zip(inboxes, before, strict=True))


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_receives_two_states(run, size):
    """One by the ascending scan, one by the descending; the first and the last rank get only one of them."""
    nbytes = 4 * 3 * 16 * 64
    assert run(size, received_case) == [nbytes, *[2 * nbytes] * (size - 2), nbytes]


def one_gradient_case(group):
    """A learned initial state gets the gradient of all outgoing states; with different layouts all ranks get an
    error."""
    with allscan.Communicator(group, timeout=60) as comm:
        learned = torch.full((1, 4, 4), 2.0, device=comm.device, requires_grad=True)
        state = torch.ones(1, 4, 4, device=comm.device)
        ascending, descending = allscan.allscan(
            (state, state), (0.5, 0.5), comm=comm, initial_state=learned, layout="zigzag"
        )
        (ascending.sum() + descending.sum()).backward()
        gradient = learned.grad.clone()
    with allscan.Communicator(group, timeout=60) as comm:
        given = ((state, state), "zigzag") if comm.rank else (state, "contiguous")
        return gradient.unique().tolist(), raised(allscan.allscan, given[0], comm=comm, layout=given[1])


@pytest.mark.parametrize("size", [2, 3])
def test_one_gradient_and_different_layouts(run, size):
    for rank, (gradient, answer) in enumerate(run(size, one_gradient_case)):
        assert gradient == [sum(0.5**i for i in range(2 * size)) if rank == 0 else 0.0]
        assert answer[0] == "ValueError" and "different arguments" in answer[1]


def of_one_input_case(comm):
    """Request gradients of one input alone: both states, a decay of each, the initial state. On all ranks but one only
    one scan uses it. Return differences to the gradients of one backward pass."""
    generator = torch.Generator().manual_seed(comm.rank)
    ascending, descending = (
        torch.randn(2, 4, 4, generator=generator).to(comm.device).requires_grad_() for _ in range(2)
    )
    decays = [torch.rand(2, 4, generator=generator).to(comm.device).requires_grad_() for _ in range(2)]
    initial = torch.ones(2, 4, 4, device=comm.device, requires_grad=True)
    inputs = ascending, descending, *decays, initial

    def loss():
        given = dict(comm=comm, initial_state=initial, layout="zigzag")
        return sum(x.square().sum() for x in allscan.allscan((ascending, descending), decays, **given))

    loss().backward()
    return [error(torch.autograd.grad(loss(), [x])[0], x.grad) for x in inputs]


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_of_one_input_alone(run, size):
    assert max(map(max, run(size, of_one_input_case))) == 0.0


def of_results_case(comm):
    """Run backward from one result alone, and for gradients of the results. Return differences to those from both."""
    generator = torch.Generator().manual_seed(comm.rank)
    states = [torch.randn(2, 4, 4, generator=generator).to(comm.device).requires_grad_() for _ in range(2)]

    def results():
        return allscan.allscan(tuple(states), (0.5, None), comm=comm, layout="zigzag")

    errors = []
    for i in range(2):
        alone = torch.autograd.grad(results()[i].square().sum(), states)
        weighted = sum((j == i) * x.square().sum() for j, x in enumerate(results()))
        errors += [error(*pair) for pair in zip(alone, torch.autograd.grad(weighted, states), strict=True)]
        found = results()
        (of_one,) = torch.autograd.grad(sum(x.square().sum() for x in found), [found[i]])
        errors.append(error(of_one, 2 * found[i]))
    return errors


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_by_and_of_one_result(run, size):
    assert max(map(max, run(size, of_results_case))) == 0.0


def checkpointed_case(comm):
    """Recomputed calls count equally, even if the last rank needs saved tensors before the others."""
    states = [torch.ones(2, 4, 4, device=comm.device, requires_grad=True) for _ in range(2)]
    decay = torch.full((2, 4), 0.5, device=comm.device)

    def both(*states):
        return torch.cat(allscan.allscan(states, (decay, None), comm=comm, layout="zigzag"))

    torch.utils.checkpoint.checkpoint(both, *states, use_reentrant=False).square().sum().backward()
    comm.barrier()  # raises if the ranks have made different numbers of calls
    found = [x.grad for x in states]
    return [error(*pair) for pair in zip(found, torch.autograd.grad(both(*states).square().sum(), states))]


def test_checkpointed(run, size=3):
    assert max(map(max, run(size, checkpointed_case))) == 0.0


def checkpointed_move_case(comm):
    """A recomputed region ends in to_zigzag() and an operation that saves its result on the first rank alone."""
    x = torch.arange(8.0, device=comm.device).view(1, 4, 2) + 10 * comm.rank

    def moved(x):
        y = to_zigzag(x.sin(), comm=comm)
        return y * 2 if comm.rank else y * y

    x.requires_grad_()
    answers = [moved(x), torch.utils.checkpoint.checkpoint(moved, x, use_reentrant=False)]
    return torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in answers))


def test_moves_are_recomputed_at_the_same_place_on_all_ranks(run, size=2):
    assert run(size, checkpointed_move_case) == [True] * size


def halo_of_documents_case(comm, lengths, n):
    """Check a halo of two tensors, one of integers, in both directions, for pieces longer and shorter than n; the
    gradient."""
    P, mine = comm.size, place(comm, None, True, lengths)
    whole = torch.randn(1, lengths[-1], 5, generator=torch.Generator().manual_seed(0)).to(comm.device)
    for reverse in (False, True):
        own = whole[:, mine].clone().requires_grad_()
        where = dict(comm=comm, cu_seqlens=lengths, layout="zigzag", per_document=True)
        found, numbers = allscan.halo((own, (own * 1000).long().detach()), n, reverse=reverse, **where)
        expected, taken, at = torch.zeros_like(found), torch.zeros(lengths[-1]), 0
        for begin, end in itertools.pairwise(lengths):
            size = (end - begin) // (2 * P)
            for i in (comm.rank, 2 * P - 1 - comm.rank):
                first = begin + (i + 1) * size if reverse else begin + i * size - n
                for j, t in enumerate(range(first, first + n)):
                    if begin <= t < end:
                        expected[:, at + j] = whole[:, t]
                        taken[t] += 1
                at += n
        assert torch.equal(found, expected) and torch.equal(numbers, (expected * 1000).long())
        found.sum().backward()
        counts = sum(torch.tensor(c) for c in comm.order.exchange(taken.tolist(), "test"))
        assert torch.equal(own.grad.cpu(), counts[mine][None, :, None].expand_as(own))


@pytest.mark.slow(but=("1", "2"))
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_halo_of_cut_documents(run, size):
    for lengths, n in (([0, 9, 9, 14, 18], 3), ([0, 1, 3, 4, 9, 9], 3), ([0, 1], 2), ([0, 0], 2)):
        run(size, halo_of_documents_case, [2 * size * x for x in lengths], n)


def rejected_case(comm):
    """Return ([(expected text, the error)], outputs of a call after them)."""
    x = torch.ones(1, 7, 1, 16, device=comm.device)
    state = torch.ones(1, 4, 4, device=comm.device)
    cut = dict(layout="zigzag", per_document=True)
    documents = (
        ("per_document=True requires", dict(per_document=True, cu_seqlens=[0, 8])),
        ("per_document=True requires", cut),
        ("multiples of 4", cut | dict(cu_seqlens=[0, 4, 6, 8])),
        ("multiples of 4", cut | dict(cu_seqlens=[0, 4, 6, 8], first_token=2 * comm.rank)),
        ("must have 6 of 12 tokens", cut | dict(cu_seqlens=[0, 4, 12])),
        ("first_token", cut | dict(cu_seqlens=[0, 4, 8], first_token=2)),
        ("per_document: True on rank 0", cut | dict(cu_seqlens=[0, 8], per_document=comm.rank == 0)),
    )
    zigzag = dict(comm=comm, layout="zigzag")
    answers = [
        ("even T", raised(allscan.zeco_gla, x, x, x, -x, **zigzag)),
        ('"contiguous" or "zigzag"', raised(allscan.zeco_gla, x, x, x, -x, comm=comm, layout="ring")),
        ("even T", raised(allscan.halo, x, 1, **zigzag)),
        ("pairs", raised(allscan.allscan, state, **zigzag)),
        ("does not support reverse", raised(allscan.allscan, (state, state), reverse=True, **zigzag)),
        ("same shape", raised(allscan.allscan, (state, state[:, 1:]), **zigzag)),
        *((text, raised(allscan.zeco_gla, *[x[:, :4]] * 3, -x[:, :4], comm=comm, **how)) for text, how in documents),
    ]
    o, _ = allscan.zeco_gla(*(x[:, :4] for x in (x, x, x, 0 * x)), comm=comm, scale=1.0, layout="zigzag")
    return answers, o[0, :, 0, 0].tolist()


def test_what_is_rejected(run):
    for rank, (answers, o) in enumerate(run(2, rejected_case)):
        for text, (_, message) in answers:
            assert text in message
        places = (0, 1, 6, 7) if rank == 0 else (2, 3, 4, 5)
        assert o == [16.0 * (t + 1) for t in places]  # the numbers of tokens, over K


def rejected_alone_case(group):
    """Rank 1 alone repeats lengths that all ranks have rejected. Return (error of all, that of rank 1, errors of later
    calls, close())."""
    with allscan.Communicator(group, timeout=3) as comm:
        x = torch.ones(1, 4, 1, 16, device=comm.device)

        def call(lengths):
            return allscan.zeco_gla(x, x, x, 0 * x, comm=comm, cu_seqlens=lengths, layout="zigzag", per_document=True)

        good, bad = [0, 4, 8], [0, 2, 8]
        call(good)
        together = raised(call, bad)
        call(good)  # the rejection has no effect on it
        alone = raised(call, bad if comm.rank == 1 else good)
        later = [raised(call, good) for _ in range(2)]
        return together, alone, later, raised(comm.close)  # on a GPU a rank may get the error only at the end


def direction_case(comm):
    """Rank 1 gives other options in a first call. Return its error, and whether the next first call is right."""
    state = torch.ones(1, 4, 4, device=comm.device)
    allscan.allscan(state, comm=comm)
    wrong = dict(reverse=comm.rank == 1, comm=comm, layout="zigzag")
    answers = [
        raised(allscan.allscan, (state[:, :2], state[:, :2]), **wrong),
        raised(allscan.allscan_segments, (state, state), **wrong),
        raised(allscan.halo, state, 1, **wrong),
    ]
    return answers, [allscan.allscan(torch.ones(n, 4, 4, device=comm.device), comm=comm)[0, 0, 0] for n in (2, 3)]


def test_a_rejected_direction_counts_as_no_other_call(run, size=2):
    for rank, (answers, found) in enumerate(run(size, direction_case)):
        assert all(answer[0] in ("ValueError", "AllScanRejected") for answer in answers), answers
        assert found == [rank, rank]


def test_documents_that_one_rank_rejects(run):
    """The lengths are known on all ranks, so no exchange is made: later calls may be paired with different ones."""
    (first, *of_first), (second, alone, later, _) = run(2, rejected_alone_case)
    assert "multiples of 4" in first[1] and first == second and alone == second
    assert all(error[0] == "AllScanOutOfStep" and "has rejected its call" in error[1] for error in later)
    errors = [of_first[0], *of_first[1], of_first[2]]
    assert any(error is not None for error in errors) and "has rejected its call" in str(errors), errors


def other_moves_case(group, odd, compared):
    """The last rank makes another known call. ``compared``: False: as on GPUs, where no call is compared before its
    transfer. Return the call's error, or whether its result is that of all ranks' own call; and errors of the barrier
    and of a call after it, or after resync()."""
    some = contextlib.nullcontext() if compared else mock.patch.object(allscan.zigzag, "_compare")
    with some, allscan.Communicator(group, timeout=60) as comm:
        x = torch.arange(8.0).view(1, 8, 1) + 8 * comm.rank
        calls = {
            "inverse": lambda: from_zigzag(x, comm=comm),
            "dtype": lambda: to_zigzag(x.int(), comm=comm),
            "longer": lambda: to_zigzag(torch.cat([x, x], 1), comm=comm),
            "shorter": lambda: to_zigzag(x[:, :4], comm=comm),
            "half": lambda: to_zigzag(x.half(), comm=comm),
        }
        expected = to_zigzag(x, comm=comm)
        for call in calls.values():
            call()
        comm.barrier()
        other = comm.rank == comm.size - 1
        found = []
        answer = raised(lambda: found.append(calls[odd]() if other else to_zigzag(x, comm=comm)))
        same = answer or torch.equal(found[0].float(), expected)
        wrong = raised(comm.barrier)
        if wrong is not None:
            comm.resync()
        again = torch.equal(to_zigzag(x, comm=comm), expected)
        comm.barrier()
        return same, wrong, again


@pytest.mark.cpu
@pytest.mark.parametrize("odd", ["inverse", "dtype"])
def test_a_rank_moves_tokens_by_another_call(run, odd):
    for same, wrong, again in run(2, other_moves_case, odd, False):
        assert same is False and again
        assert wrong[0] == "AllScanOutOfStep" and "different calls of to_zigzag" in wrong[1], wrong


@pytest.mark.cpu
@pytest.mark.parametrize("size, odd", [(2, "inverse"), (2, "dtype"), (3, "longer"), (3, "shorter"), (2, "half")])
def test_cpu_ranks_compare_moves(run, size, odd):
    """gloo would end the process of a rank that receives more bytes than it expects."""
    names = dict(inverse="call: to_zigzag", dtype="dtype: torch.float32", half="dtype: torch.float32")
    wanted = names.get(odd, "shape: (1, 8, 1)") + f" on rank{'s 0, 1' if size == 3 else ' 0'}; "
    for answer, wrong, again in run(size, other_moves_case, odd, True):
        assert answer[0] == "ValueError" and wanted in answer[1], answer
        assert wrong is None and again


def elsewhere_case(comm, call):
    """On the middle rank first_token contradicts the sharded documents."""
    x = torch.ones(1, 4, 1, 16, device=comm.device)
    where = dict(comm=comm, cu_seqlens=[0, 12], layout="zigzag", per_document=True)
    given = (x, 2) if call == "halo" else (x, x, x, -x)
    return [
        raised(getattr(allscan, call), *given, **where, first_token=2 * comm.rank + i * (comm.rank == 1))
        for i in (1, 0)
    ]


@pytest.mark.parametrize("call", ["zeco_gla", "halo"])
def test_first_token_of_cut_documents(run, call):
    for found, right in run(3, elsewhere_case, call):
        check_answers({"first_token of rank 1 must be 2": found})
        assert right is None, right


def modes_case(comm, documents):
    """Compile, checkpoint, and validate without backward in between."""
    whole = Whole(GLACase([48], lengths=documents), comm.device)
    mine, errors = place(comm, [30, 18], True, documents), []
    expected = whole.reference()

    def call(*x, **options):
        where = {} if documents is None else dict(cu_seqlens=documents, first_token=12 * comm.rank)
        where |= dict(layout="zigzag", per_document=documents is not None)
        return allscan.zeco_gla(*x, **(options | where))

    def checkpointed(*x, **options):
        return torch.utils.checkpoint.checkpoint(call, *x, **options, use_reentrant=False)

    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager"), checkpointed, call):
        call(whole.q[:, mine].clone().requires_grad_(), *(x[:, mine] for x in (whole.k, whole.v, whole.g)), comm=comm)
        actual = whole.ours(comm, mine, function)
        errors += [error(actual[i], expected[i][:, mine]) for i in (0, 2, 3, 4, 5)]
    return max(errors)


@pytest.mark.slow(but="None")
@pytest.mark.parametrize("documents", [None, [0, 8, 8, 24, 48]])
def test_compiled_and_checkpointed(run, documents):
    assert max(run(2, modes_case, documents)) < 1e-4
