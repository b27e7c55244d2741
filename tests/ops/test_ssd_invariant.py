"""zeco_ssd with invariant=: the same bits for every number of ranks and every split at multiples of it."""

from __future__ import annotations

import pytest
import torch

import allscan
from allscan.reference import ssd_reference
from support.segments import bits
from support.values import place, raised

S, H, G, P, N, CHUNK = 64, 4, 2, 6, 10, 16
OPTIONS = dict(dt_softplus=True, dt_limit=(0.0, 1.5))
OF_TOKENS, PARAMETERS = ("x", "dt", "B", "C", "z"), ("A", "D", "dt_bias")
CUTS = [0, 0, 5, S, S, 2 * S + 9, 3 * S]  # empty ones, and some that begin at multiples of S


def drawn(tokens, batch, sequences, dtype):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    given = dict(
        x=normal(batch, tokens, H, P).to(dtype),
        dt=normal(batch, tokens, H),
        A=-torch.rand(H, generator=generator) / 4,
        B=normal(batch, tokens, G, N).to(dtype),
        C=normal(batch, tokens, G, N).to(dtype),
        D=normal(H),
        z=normal(batch, tokens, H, P),
        dt_bias=normal(H),
        initial_states=normal(sequences, H, P, N),
    )
    return given, normal(batch, tokens, H, P), normal(sequences, H, P, N)


def case(group, tokens, packed, zigzag, dtype=torch.float32, invariant=S):
    """Return (indices of this rank's tokens, {name: result of them}, {name: states or the gradient of initial
    ones})."""
    with allscan.Communicator(group) as comm:
        total = sum(tokens)
        lengths = [*(c for c in CUTS if c < total), total] if packed else None
        given, dy, dfinal = drawn(total, 1 if packed else 2, len(lengths) - 1 if packed else 2, dtype)
        mine = place(comm, tokens, zigzag)
        own = {name: (t[:, mine] if name in OF_TOKENS else t).to(comm.device) for name, t in given.items()}
        own = {name: t.contiguous().requires_grad_() for name, t in own.items()}
        y, final = allscan.zeco_ssd(
            **own,
            chunk_size=CHUNK,
            comm=comm,
            cu_seqlens=lengths,
            layout="zigzag" if zigzag else "contiguous",
            return_final_states=True,
            invariant=invariant,
            **OPTIONS,
        )
        ((y * dy[:, mine].to(comm.device)).sum() + (final * dfinal.to(comm.device)).sum()).backward()
        comm.barrier()
        of_tokens = dict(y=y.detach().cpu(), **{name: own[name].grad.cpu() for name in OF_TOKENS})
        initial = own["initial_states"].grad.cpu()
        return torch.arange(total)[mine], of_tokens, dict(final=final.detach().cpu(), initial=initial)


def found_by_one(run, total, *options):
    if (total, *options) not in _of_one_rank:
        _of_one_rank[total, *options] = found(run, [total], *options)
    return _of_one_rank[total, *options]


_of_one_rank: dict = {}  # results by case, for comparison with each split


def found(run, tokens, *options):
    parts = run(len(tokens), case, tokens, *options)
    order = torch.cat([mine for mine, *_ in parts]).argsort()
    whole = {name: torch.cat([x[name] for _, x, _ in parts], 1)[:, order] for name in parts[0][1]}
    return whole | {name: sum(x[name] for *_, x in parts) for name in parts[0][2]}


def differing(one, other):
    return [name for name in one if not torch.equal(bits(one[name]), bits(other[name]))]


@pytest.mark.parametrize("packed", [False, True])
def test_the_law_in_float64(run, packed, size=2):
    tokens = [S, 3 * S + 21]
    lengths = [*(c for c in CUTS if c < sum(tokens)), sum(tokens)] if packed else None
    given, dy, dfinal = drawn(sum(tokens), 1 if packed else 2, len(lengths) - 1 if packed else 2, torch.float32)
    exact = {name: t.double().requires_grad_() for name, t in given.items()}
    y, final = ssd_reference(**exact, **OPTIONS, cu_seqlens=lengths)
    ((y * dy).sum() + (final * dfinal).sum()).backward()
    wanted = dict(y=y, final=final, initial=exact["initial_states"].grad, **{n: exact[n].grad for n in OF_TOKENS})
    for name, ours in found(run, tokens, packed, False).items():
        expected = wanted[name].detach()
        assert ((ours - expected).abs().max() / expected.abs().max()).item() < 2e-5, name


@pytest.mark.slow(but=("False-dtype0-3", "True-dtype1-3"))
@pytest.mark.parametrize(
    "size, tokens", [(2, [S, 3 * S + 21]), (3, [2 * S, 0, 2 * S + 21]), (8, [S, 0, S, 0, S, S, 0, 21])]
)
@pytest.mark.parametrize("packed, dtype", [(False, torch.float32), (True, torch.float32), (False, torch.bfloat16)])
def test_contiguous(run, packed, dtype, size, tokens):
    assert (
        differing(found_by_one(run, 4 * S + 21, packed, False, dtype), found(run, tokens, packed, False, dtype)) == []
    )


@pytest.mark.slow(but="2-True")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_zigzag(run, packed, size):
    assert differing(found_by_one(run, 8 * S, packed, False), found(run, [8 * S // size] * size, packed, True)) == []


def _rejected(group):
    """Return errors where rank 0 alone is wrong."""
    with allscan.Communicator(group) as comm:

        def call(T, **options):
            x, B = torch.randn(1, T, H, P, device=comm.device), torch.randn(1, T, G, N, device=comm.device)
            dt, A = x[..., 0].sigmoid(), -torch.ones(H, device=comm.device)
            return raised(lambda: allscan.zeco_ssd(x, dt, A, B, B, CHUNK, comm=comm, **options))

        one = comm.rank == 0
        texts = [
            call(S + 32 if one else S, invariant=S),
            call(S, invariant=S if one else 0),
            call(S, invariant=100 if one else S),
        ]
        comm.barrier()
    return texts


@pytest.mark.cpu
def test_what_is_not_possible_is_rejected_on_all_ranks(run, size=2):
    for texts in zip(*run(size, _rejected)):
        assert all(texts) and all("invariant" in text for _, text in texts), texts


def test_without_it_bits_differ(run, size=2):
    """The control."""
    one, two = (found(run, tokens, False, False, torch.float32, 0) for tokens in ([4 * S], [2 * S + 5, 2 * S - 5]))
    assert {"y", "x", "B"} <= {*differing(one, two)}
