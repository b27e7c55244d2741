"""transformers' models over a communicator with invariant=: logits have the same bits for every number of ranks, if all
between the recurrences is a function of one token."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

import allscan
from support.models import VOCABULARY, made, sequence_parallel
from support.segments import bits
from support.values import place, raised

pytest.importorskip("transformers", minversion="5.18", reason="needs transformers")
pytestmark = pytest.mark.cpu

S = 64
LINEAR = dict(layer_types=["linear_attention"] * 2)
FAMILIES = dict(
    qwen3_5=LINEAR,
    kimi_linear=LINEAR | dict(first_k_dense_replace=2),
    nemotron_h=dict(layers_block_type=["linear_attention", "mlp", "linear_attention"]),
)
CUTS = {1: [5 * S - 7], 2: [S, 4 * S - 7], 3: [2 * S, S, 2 * S - 7]}  # of each rank
PRELOAD = ["allscan.integrations.transformers", *(f"transformers.models.{f}.modeling_{f}" for f in FAMILIES)]


class Alike(TorchFunctionMode):
    """Compute these functions in float64 and round: a library's choice by the number of tokens, as for a vector's last
    elements, then changes no bit."""

    NAMES = "linear matmul __matmul__ conv1d silu softplus sigmoid exp rsqrt mean sum log_softmax".split()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") not in self.NAMES:
            return function(*args, **(kwargs or {}))
        found = function(*map(wide, args), **{name: wide(x) for name, x in (kwargs or {}).items()})
        return found.float() if found.dtype == torch.float64 else found


def wide(x):
    return x.double() if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x


def logits_case(group, family, tokens, invariant, layout):
    """Return (indices of this rank's tokens, their logits)."""
    with allscan.Communicator(group, invariant=invariant) as comm:
        model = made(family, **FAMILIES[family])
        torch.manual_seed(1)
        whole, mine = torch.randint(1, VOCABULARY, (2, sum(tokens))), place(comm, tokens, layout == "zigzag")
        sequence_parallel(model, comm=comm, layout=layout)
        with Alike(), torch.no_grad():
            logits = model(input_ids=whole[:, mine], use_cache=False).logits
        comm.barrier()
        return torch.arange(sum(tokens))[mine], logits


def logits(run, family, tokens, invariant=S, layout="contiguous"):
    parts = run(len(tokens), logits_case, family, tokens, invariant, layout)
    return torch.cat([x for _, x in parts], 1)[:, torch.cat([mine for mine, _ in parts]).argsort()]


@pytest.mark.slow(but=("2-qwen", "2-nemotron"))
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [2, 3])
def test_logits_have_the_same_bits(run, family, size):
    one = logits(run, family, CUTS[1])
    assert torch.equal(bits(one), bits(logits(run, family, CUTS[size])))


@pytest.mark.slow(but="kimi")
@pytest.mark.parametrize("family", FAMILIES)
def test_in_zigzag(run, family, size=2):
    one = logits(run, family, [4 * S])
    assert torch.equal(bits(one), bits(logits(run, family, [2 * S] * size, layout="zigzag")))


@pytest.mark.parametrize("family", FAMILIES)
def test_without_it_bits_differ(run, family, size=2):
    """The control."""
    one, two = (logits(run, family, CUTS[n], 0) for n in (1, size))
    assert (bits(one) != bits(two)).float().mean() > 0.02
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


def cut_case(group, rows):
    """Return (this rank's tokens, logits) of rows that cut_batch cuts."""
    from allscan.integrations.transformers import cut_batch

    with allscan.Communicator(group, invariant=S) as comm:
        family = next(iter(FAMILIES))
        model, found = sequence_parallel(made(family, **FAMILIES[family]), comm=comm), []
        for T in rows:
            whole = torch.randint(1, VOCABULARY, (1, T), generator=torch.Generator().manual_seed(T))
            part = cut_batch(dict(input_ids=whole), comm=comm)
            with Alike(), torch.no_grad():
                found.append((part["input_ids"].shape[1], model(**part, use_cache=False).logits))
        with pytest.raises(ValueError, match=rf"multiple of 2 \* {comm.size} \(twice the ranks\) \* {S} \(invariant\)"):
            cut_batch(dict(input_ids=whole), comm=comm, layout="zigzag")
        return found


def test_cut_batch_cuts_at_multiples(run):
    rows = 2 * S, 3 * S, 3 * S + 8, S + 8
    [one], parts = run(1, cut_case, rows), run(2, cut_case, rows)
    for T, whole, (a, b) in zip(rows, one, zip(*parts), strict=True):
        assert (a[0], b[0]) == (-(-(T // S) // 2) * S, T - -(-(T // S) // 2) * S)
        assert torch.equal(bits(whole[1]), bits(torch.cat([a[1], b[1]], 1)))


def other_rule(query, key, value, **options):
    raise AssertionError("not to be called")


def rejected_case(group):
    """Return this rank's errors for a model with a rule that has no replacement."""
    from allscan.integrations import fla_cp, transformers_layers

    tensors = [torch.randn(1, S, 1, 16) for _ in range(3)]
    rest = -torch.rand(1, S, 1), torch.rand(1, S, 1)
    with allscan.Communicator(group, invariant=S) as comm:
        sequence = mock.Mock(comm=comm, pieces=[], where=dict(comm=comm))
        with mock.patch.object(transformers_layers, "_own", lambda sequence, *given: given):
            rule = transformers_layers.original_of(other_rule)
            found = raised(transformers_layers._delta_rule, rule, sequence, *tensors, *rest)
        comm.barrier()
        return found, raised(fla_cp.context_parallel, comm)


def test_other_rules_are_rejected_on_all_ranks(run, size=2):
    pytest.importorskip("fla.ops", reason="needs flash-linear-attention")
    for problems in run(size, rejected_case):
        assert all(kind == "ValueError" and f"invariant={S}" in text for kind, text in problems), problems
        assert "other_rule" in problems[0][1]
