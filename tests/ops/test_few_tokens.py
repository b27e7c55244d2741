"""Ranks with few tokens or none at a later batch, unknown to the other ranks, in every operator."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

import allscan
from allscan.base.checks import Shift
from allscan.integrations import softmax
from allscan.integrations.recurrent import conv_with_halo
from allscan.reference import delta_reference, gla_reference, ssd_reference
from allscan.tokens.packing import TokenRange
from allscan.zigzag import from_zigzag, to_zigzag, zigzag_positions
from support.fla import import_fla
from support.values import check_errors, chunks, error, pairs, place

REFERENCES = {
    "zeco_gla": gla_reference,
    "zeco_kda": delta_reference,
    "zeco_gated_delta_rule": delta_reference,
    "zeco_ssd": ssd_reference,
}
# For each batch: tokens of each rank, and a boundary of packed sequences
BATCHES = [
    ((8, 8, 8, 8), 5),
    ((8, 2, 8, 1), 9),
    ((0, 0, 8, 0), 3),
    ((8, 0, 0, 0), 8),
    ((0, 8, 8, 0), 4),
    ((8, 0, 8, 0), 8),
    ((8, 8, 0, 0), 11),
    ((0, 0, 0, 0), 0),
    ((8, 8, 8, 8), 5),
]
IN_ZIGZAG = [((8,) * 4, 5), ((0,) * 4, 0), ((2,) * 4, 1)]
DOCUMENTS = [((), (0, 0, 5, 7, 12)), ((), (0, 0, 0, 0, 0)), ((), (0, 1, 1, 2, 3))]  # cu_seqlens over 2P
# (ranks, ...): all cases of 3 ranks and more; of fewer, which have no middle rank, pairs of values
RULES, DELTA_RULES = ("zeco_gla", "zeco_ssd"), ("zeco_kda", "zeco_gated_delta_rule")
CASES = {
    "operators": [*itertools.product([3, 4], RULES, [False, True]), *pairs([1, 2], RULES, [False, True])],
    "delta rules": [
        (1, "zeco_kda", True),
        *itertools.product([3], ["zeco_kda", "zeco_gated_delta_rule"], [False, True]),
    ],
    "halo": [*itertools.product([3, 4], [False, True], [False, True]), *pairs([1, 2], [False, True], [False, True])],
    "zigzag": [*itertools.product([3], [False, True], [False, True]), *pairs([1, 2], [False, True], [False, True])],
}
SHARED = "A", "D", "initial_state", "initial_states"  # arguments without a dimension of tokens


def drawn(name, batch, total, sequences):
    generator = torch.Generator().manual_seed(total)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    if name == "zeco_ssd":
        return dict(
            x=normal(batch, total, 4, 6),
            dt=normal(batch, total, 4).sigmoid(),
            A=-normal(4).exp(),
            B=normal(batch, total, 2, 10),
            C=normal(batch, total, 2, 10),
            D=normal(4),
            initial_states=normal(sequences, 4, 6, 10),
        )
    g = F.logsigmoid(normal(batch, total, 2, 16))
    given = dict(
        q=normal(batch, total, 2, 16),
        k=normal(batch, total, 2, 16),
        v=normal(batch, total, 2, 12),
        g=g,
        initial_state=normal(sequences, 2, 16, 12),
    )
    if name != "zeco_gla":
        given |= dict(k=F.normalize(given["k"], dim=-1), beta=normal(batch, total, 2).sigmoid())
        given["g"] = g[..., 0] if name == "zeco_gated_delta_rule" else g
    return given


def called(name, given, final, **where):
    if name == "zeco_ssd":
        found = allscan.zeco_ssd(**given, chunk_size=4, return_final_states=final, **where)
        return found if final else (found, None)
    return getattr(allscan, name)(**given, output_final_state=final, **where)


def few_case(group, name, batches, packed, layout, debug=False):
    """Return the largest error of outputs, states and gradients for each batch: in turns without states, with final
    states, and with them on every rank, where every second rank uses them."""
    if name in ("zeco_kda", "zeco_gated_delta_rule"):
        import_fla(models=False)
    with allscan.Communicator(group, timeout=60, debug=debug) as comm:
        found = []
        for number, (tokens, boundary) in enumerate(batches):
            tokens, final, errors = tokens[: comm.size], (False, True, "all")[number % 3], []
            uses = [float(final is True or final == "all" and rank % 2 == 0) for rank in range(comm.size)]
            weight = sum(uses) if final == "all" else float(final)
            total, batch = sum(tokens), 1 if packed else 2
            if layout == "documents":
                lengths = [2 * comm.size * n for n in boundary]
                tokens, total = [2 * boundary[-1]] * comm.size, lengths[-1]
            else:
                lengths = [0, 0, min(boundary, total), min(boundary, total), total] if packed else None
            given = drawn(name, batch, total, 4 if packed else batch)
            if not final:
                given = {n: x for n, x in given.items() if not n.startswith("initial")}
            exact = {n: x.double().requires_grad_() for n, x in given.items()}
            o, state = REFERENCES[name](**exact, cu_seqlens=lengths)
            ((o.sin().sum() + state.sin().sum() * weight) + sum(0 * x.sum() for x in exact.values())).backward()

            mine = place(comm, tokens, layout == "zigzag", lengths if layout == "documents" else None)
            own = {n: (x if n in SHARED else x[:, mine]).to(comm.device).requires_grad_() for n, x in given.items()}
            where = dict(cu_seqlens=lengths, layout="contiguous" if layout == "contiguous" else "zigzag")
            where |= dict(per_document=True) if layout == "documents" else {}
            own_o, own_state = called(name, own, final, comm=comm, **where)
            assert own_o.requires_grad and own_o.shape[1] == tokens[comm.rank]
            (own_o.sin().sum() + (own_state.sin().sum() if uses[comm.rank] else 0)).backward()
            errors.append(error(own_o, o[:, mine]))
            shared = [(own_state.detach(), state)] if final is True else []
            if final == "all":
                errors.append(error(own_state, state))
            for n, x in own.items():
                if n in SHARED:
                    shared.append((x.grad, exact[n].grad))
                else:
                    errors.append(error(x.grad, exact[n].grad[:, mine]))
            for x, y in shared:
                dist.all_reduce(x, group=comm.group)
                errors.append(error(x, y))
            found.append(max(errors))
        return found


@pytest.mark.slow(but=("3-zeco_gla-True", "2-zeco_ssd", "1"))
@pytest.mark.parametrize("size, name, packed", CASES["operators"])
def test_operators(run, size, name, packed):
    check_errors(run(size, few_case, name, BATCHES, packed, "contiguous"), 2e-5)


@pytest.mark.slow(but=("1", "3-zeco_gated_delta_rule-True"))
@pytest.mark.cpu  # on GPUs fla's kernels round float32 to TF32
@pytest.mark.parametrize("size, name, packed", CASES["delta rules"])
def test_delta_rules(run, size, name, packed):
    check_errors(run(size, few_case, name, BATCHES, packed, "contiguous"), 2e-5)


@pytest.mark.slow(but=("zeco_gla", "zeco_gated_delta_rule"))
@pytest.mark.cpu
@pytest.mark.parametrize("name", REFERENCES)
def test_in_debug_mode(run, name, size=3):
    """The ranks compare all results, also those of ranks without tokens."""
    check_errors(run(size, few_case, name, BATCHES[1:5], False, "contiguous", debug=True), 2e-5)


@pytest.mark.slow(but=("zeco_gla-True", "zeco_gated_delta_rule-True", "zeco_ssd-True"))
@pytest.mark.cpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", REFERENCES)
def test_zigzag(run, name, packed, size=2):
    check_errors(run(size, few_case, name, IN_ZIGZAG, packed, "zigzag"), 2e-5)


@pytest.mark.slow(but="zeco_gated")
@pytest.mark.cpu
@pytest.mark.parametrize("name, size", [*zip(REFERENCES, (3, 2, 1, 4))])
def test_cut_documents(run, name, size):
    """Sharded documents, with no tokens, with one a piece, and no documents; with states and without."""
    check_errors(run(size, few_case, name, DOCUMENTS, True, "documents"), 2e-5)


def halo_case(comm, n, batches, reverse, packed, layout):
    """halo() of a tuple of floats and integers of any bits sends them unchanged; its gradient is right."""
    zigzag = layout == "zigzag"
    for tokens, boundary in batches:
        tokens = tokens[: comm.size]
        total, batch = sum(tokens), 1 if packed else 2
        lengths = [0, 0, min(boundary, total), min(boundary, total), total] if packed else None
        generator = torch.Generator().manual_seed(total)
        whole = torch.randn(batch, total, 3, 2, generator=generator).to(comm.device).requires_grad_()
        names = torch.randint(-(2**63), 2**63 - 1, (batch, total), generator=generator).to(comm.device)
        expected, weighted = [], 0.0
        for rank, begin, end in chunks(tokens, zigzag):
            at = range(end, end + n) if reverse else range(begin - n, begin)
            here = end - 1 if reverse and begin < end else begin
            cuts = list(zip(lengths, lengths[1:])) if packed else [(0, total)]
            least = here if begin < end else begin - 1  # without tokens: the sequence has tokens on both sides
            own = [(a, b) for a, b in cuts if a <= least and here < b] if packed else cuts
            first, last = own[0] if own else (0, 0)
            for t in at:
                there = first <= t < last
                pair = [x[:, t] if there else torch.zeros_like(x[:, :1].sum(1)) for x in (whole, names)]
                weight = 1 + rank + 2 * len(expected)
                weighted = weighted + weight * pair[0].sin().sum()
                expected.append((rank, weight, pair))
        (weighted + 0 * whole.sum()).backward()
        own = [(w, pair) for rank, w, pair in expected if rank == comm.rank]
        mine = place(comm, tokens, zigzag)
        x = whole.detach()[:, mine].requires_grad_()
        found, numbers = allscan.halo(
            (x, names[:, mine]), n, comm=comm, reverse=reverse, cu_seqlens=lengths, layout=layout
        )
        assert found.requires_grad and found.shape[1] == len(own)
        weights = torch.tensor([float(w) for w, _ in own], device=comm.device)[None, :, None, None]
        (weights * found.sin()).sum().backward()
        assert torch.equal(found, torch.stack([pair[0] for _, pair in own], 1)), (tokens, found)
        assert torch.equal(numbers, torch.stack([pair[1] for _, pair in own], 1)), tokens
        assert error(x.grad, whole.grad[:, mine]) < 1e-6, tokens
    return comm.size


SHORT = [((8, 8, 8, 8), 5), ((8, 2, 8, 1), 9), ((0, 1, 1, 8), 3), ((8, 1, 0, 1), 4), *BATCHES[2:]]


@pytest.mark.slow(but=("1", "3-False-True", "2-True"))
@pytest.mark.parametrize("size, reverse, packed", CASES["halo"])
def test_halo(run, size, reverse, packed):
    for n in (1, 3):
        run(size, halo_case, n, SHORT, reverse, packed, layout="contiguous")
    run(
        size, halo_case, n=20, batches=SHORT, reverse=reverse, packed=packed, layout="contiguous"
    )  # more than several ranks have


@pytest.mark.parametrize("size, reverse, packed", CASES["zigzag"])
def test_halo_in_zigzag(run, size, reverse, packed):
    batches = [*IN_ZIGZAG, ((4,) * 4, 3), ((20, 14, 6, 8), 19)]
    run(size, halo_case, n=3, batches=batches, reverse=reverse, packed=packed, layout="zigzag")


def tiles_case(comm, depth, protocol, reverse):
    """Send rows past ranks with few tokens, with tiles of part of the rows and columns; other ranks send ahead; more
    scans than the next rank's inbox holds. Every rank has a different number of tokens."""
    n, words = 7, 9
    scan = allscan.AllScan(comm, (2, n, words), tile=(2, 4), depth=depth, protocol=protocol)
    order = range(comm.size)[:: -1 if reverse else 1]
    for number in range(12):
        generator = torch.Generator().manual_seed(number)
        tokens = [(0, 9, 3, 5, 1, 7, 6)[(number + 2 * rank) % 7] for rank in range(comm.size)]
        for adjoint in (False, True):
            states = [torch.randn(2, n, words, generator=generator) for _ in order]
            carry = torch.zeros(2, n, words)
            for rank in order:
                if rank == comm.rank:
                    expected = carry
                rows = -tokens[rank] if adjoint else tokens[rank]
                shifted = torch.stack(
                    [carry[:, k + rows] if 0 <= k + rows < n else torch.zeros(2, words) for k in range(n)], 1
                )
                carry = shifted + states[rank]
            few = tokens[comm.rank] < n
            found = scan.scan(
                states[comm.rank].to(comm.device),
                Shift(tokens[comm.rank]) if few else 0.0,
                transpose=adjoint,
                reverse=reverse,
            )
            assert torch.equal(found.cpu(), expected), (number, adjoint)


@pytest.mark.slow(but=("1", "4-2"))
@pytest.mark.parametrize(
    "size, depth, protocol, reverse", pairs([1, 4], [(1, "auto"), (2, "signal"), (3, "auto")], [False, True])
)
def test_shifted_rows(run, size, depth, protocol, reverse):
    run(size, tiles_case, depth, protocol, reverse)


def compiled_case(comm):
    """Compile a convolution, as Megatron's layers call it, and an operator in one full graph."""

    def convolution(x):
        both = F.pad(x, (0, 0, 3, 0))
        return sum(both[:, i : i + x.shape[1]] for i in range(4))

    def layer(x):
        pieces, where = [TokenRange(0, x.shape[1])], dict(comm=comm, layout="contiguous")
        y = conv_with_halo(convolution, 3, x, pieces, {}, **where)
        q = y.unflatten(-1, (1, 16))
        o, _ = allscan.zeco_gla(q, q, q, F.logsigmoid(q), comm=comm)
        return o.flatten(2)

    compiled, errors = torch.compile(layer, fullgraph=True, backend="aot_eager"), []
    for tokens, _ in SHORT[:6]:
        tokens = tokens[: comm.size]
        x = torch.randn(2, sum(tokens), 16, generator=torch.Generator().manual_seed(0)).to(comm.device)
        found = []
        for function in (layer, compiled):
            own = x[:, place(comm, tokens)].clone().requires_grad_()
            o = function(own)
            o.square().sum().backward()
            found += o.detach(), own.grad
        errors += error(found[2], found[0]), error(found[3], found[1])
    return max(errors)


@pytest.mark.slow
@pytest.mark.cpu
def test_compiled(run, size=3):
    assert max(run(size, compiled_case)) < 1e-6


def gather_case(comm):
    """Check gathers of softmax layers by the back end, labels across rank boundaries, and moves to the zigzag
    layout."""
    for tokens, _ in SHORT:
        tokens = tokens[: comm.size]
        generator = torch.Generator().manual_seed(0)
        whole = torch.randn(2, sum(tokens), 3, generator=generator).to(comm.device)
        mine = place(comm, tokens)
        own = whole[:, mine].clone().requires_grad_()
        gather = softmax.Gather(comm, tokens, False, own)
        (found,) = gather.read(gather.in_order())
        assert torch.equal(found, whole)
        (found * (1 + comm.rank)).sum().backward()
        assert torch.equal(own.grad, torch.full_like(own, comm.size * (comm.size + 1) / 2 if sum(tokens) else 0))
        labels = torch.randint(9, (2, sum(tokens)), generator=generator).to(comm.device)
        following = F.pad(labels[:, 1:], (0, 1 if sum(tokens) else 0), value=-100)
        assert torch.equal(softmax.shifted(labels[:, mine], -100, comm), following[:, mine]), tokens
    x = torch.zeros(2, 0, 3, device=comm.device, requires_grad=True)
    y = from_zigzag(to_zigzag(x, comm=comm), comm=comm)
    y.sum().backward()
    assert y.shape == x.shape == x.grad.shape and zigzag_positions(0, comm=comm).shape == (0,)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_goes_by_the_back_end(run, size):
    run(size, gather_case)


def saved_case(comm, name):
    """Rank 0 has one packed sequence, the last rank many. Return the bytes that each rank saves for backward, by the
    number of sequences; and whether a dispatch mode around one of the passes leaves the gradients as they are."""
    saved, equal = [], []
    given = {k: x.to(comm.device) for k, x in drawn(name, 1, 128, 1).items() if k != "initial_state"}
    x = given["v"].requires_grad_()
    for sequences in (1, 8, 64):
        last = 128 * (comm.size - 1)
        cuts = [*range(0, last + 1, 128), *(last + 128 * (i + 1) // sequences for i in range(sequences))]
        where = dict(comm=comm, cu_seqlens=cuts, first_token=128 * comm.rank)
        gradients, memory = [], {}

        def pack(t, memory=memory):
            memory[t.data_ptr()] = t.nbytes
            return t

        for modes in ((False, False), (False, True), (True, False))[: 3 if sequences == 8 else 1]:
            forward, backward = (FlopCounterMode(display=False) if m else contextlib.nullcontext() for m in modes)
            hooks = contextlib.nullcontext() if any(modes) else saved_tensors_hooks(pack, lambda t: t)
            with forward, hooks:
                o, _ = called(name, given, False, **where)
            with backward:
                gradients += torch.autograd.grad(o.square().sum(), x)
        saved.append(sum(memory.values()))
        equal += [torch.equal(gradients[0], other) for other in gradients[1:]]
    return saved, equal


@pytest.mark.slow(but="zeco_gated")
@pytest.mark.parametrize("name", ["zeco_gla", "zeco_kda", "zeco_gated_delta_rule"])
def test_a_rank_saves_nothing_for_the_sequences_of_others(run, name, size=2):
    (first, last), equal = zip(*run(size, saved_case, name))
    assert first[2] < 1.02 * first[0] and last[2] > 2 * last[0], (first, last)
    assert all(map(all, equal)) and len(equal[0]) == 2


def many_finals_case(comm):
    """Return how far final states of all ranks, and gradients, are from the sums of each rank's own; and the number of
    AllScans."""
    differences = []
    generator = torch.Generator().manual_seed(comm.rank)
    x = torch.randn(1, 24, 2, 16, generator=generator).to(comm.device).requires_grad_()
    for N in (1, 2, 3, 8, 9, 16, 17):
        cuts = [i * 24 * comm.size // N for i in range(N + 1)]
        where = dict(comm=comm, cu_seqlens=cuts, first_token=24 * comm.rank)
        weight = torch.arange(N, device=comm.device)[:, None, None, None] + 1.0
        of_all = allscan.zeco_gla(x, x, x, -x.detach().abs(), output_final_state="all", **where)[1]
        own = allscan.zeco_gla(x, x, x, -x.detach().abs(), output_final_state=True, **where)[1]
        whole = own.detach().clone()
        dist.all_reduce(whole, group=comm.group)
        used = of_all * weight if comm.rank == 0 else 0 * of_all
        grads = [torch.autograd.grad(y.sum(), x)[0] for y in (used, own * weight)]
        differences += [error(of_all, whole), error(*grads)]
    return max(differences), len(comm.agreed.scans)


@pytest.mark.slow
def test_final_states_of_many_sequences(run, size=3):
    """On all ranks they need memory for some numbers of sequences, not for each."""
    for difference, scans in run(size, many_finals_case):
        assert difference < 1e-5 and scans <= 1 + 4


def written_final_case(group, operator):
    """Return o's gradients where one rank has written to the final states, which it got with "all"."""
    answers = []
    for writes in (False, True):
        with allscan.Communicator(group, timeout=60) as comm:
            generator = torch.Generator().manual_seed(comm.rank)
            x = torch.randn(1, 32, 2, 16, generator=generator).to(comm.device).requires_grad_()
            gate = -x.detach().abs()
            if operator == "gla":
                o, final = allscan.zeco_gla(x, x, x, gate, comm=comm, output_final_state="all")
            else:
                beta = gate[..., 0].exp()
                o, final = allscan.zeco_kda(x, x, x, gate, beta, comm=comm, output_final_state="all")
            if writes and comm.rank:
                final.mul_(0.5)
            answers += torch.autograd.grad(o.sum(), x)
    return torch.equal(*answers)


@pytest.mark.parametrize("operator", ["gla", "kda"])
def test_final_states_may_be_written_to(run, operator, size=2):
    assert run(size, written_final_case, operator) == [True, True]
