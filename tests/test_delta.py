"""KDA and Gated DeltaNet on the ranks against the token-by-token recurrence in float64 over the whole sequence."""

from __future__ import annotations

import pytest

from support.delta import operator_case, pass_case
from support.gla import BF16, F32

LIMIT = {F32: 1e-5, BF16: 8e-3}
PACKED = {
    "over the cut": ([100, 150], [0, 30, 240, 250]),
    "one over three, between others": ([70, 130, 10, 90], [0, 13, 39, 215, 216, 300]),
    "at the cut": ([64, 64], [0, 64, 128]),
    "empty ones": ([70, 70], [0, 0, 70, 70, 70, 139, 140, 140]),
    "whole": ([140, 70, 200], [0, 410]),
}


def check(answers, dtype=F32):
    for errors in answers:
        assert max(errors.values()) < LIMIT[dtype], errors


@pytest.mark.parametrize("rule", ["kda", "gated_delta_rule"])
@pytest.mark.parametrize("kind", ["zero", "mild", "mixed", "strong"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_passes(run, rule, kind, size):
    tokens = [(300, 150, 10, 200)[rank] for rank in range(size)]
    check(run(size, pass_case, rule, tokens, 1, 2, 16, 24, kind, F32))


@pytest.mark.parametrize("rule", ["kda", "gated_delta_rule"])
@pytest.mark.parametrize("kind, beta", [("weak", None), ("zero", 0.0), ("zero", 1.0)])
def test_passes_in_bfloat16(run, rule, kind, beta, size=2):
    check(run(size, pass_case, rule, [300, 270], 2, 2, 32, 16, kind, BF16, None, beta), BF16)


@pytest.mark.parametrize("rule", ["kda", "gated_delta_rule"])
@pytest.mark.parametrize("K, V", [(24, 40), (100, 16), (200, 40)])
def test_passes_of_odd_widths(run, rule, K, V, size=2):
    check(run(size, pass_case, rule, [150, 140], 1, 1, K, V, "weak", F32))


@pytest.mark.parametrize("rule", ["kda", "gated_delta_rule"])
@pytest.mark.parametrize("size, name", [(len(tokens), name) for name, (tokens, _) in PACKED.items()])
def test_passes_of_packed_sequences(run, rule, size, name):
    tokens, lengths = PACKED[name]
    check(run(size, pass_case, rule, tokens, 1, 1, 16, 16, "weak", F32, lengths))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gated_delta_rule(run, size):
    tokens = [(70, 130, 20, 65)[rank] for rank in range(size)]
    check(run(size, operator_case, "gated_delta_rule", tokens, 2, 1, 2, 32, 16, "mild", F32))


@pytest.mark.parametrize("size, name", [(2, "over the cut"), (4, "one over three, between others")])
def test_packed_gated_delta_rule(run, size, name):
    tokens, lengths = PACKED[name]
    check(run(size, operator_case, "gated_delta_rule", tokens, 1, 1, 1, 16, 16, "weak", F32, lengths))
