"""bench.chunks: all variants are right on CPUs; compiled for sm_90, none reads outside of shared memory."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import triton

from bench import chunks, local_delta
from support.sm90 import Compiled

pytestmark = pytest.mark.cpu
POINTERS = {chunks.BF16: "*bf16", chunks.F32: "*fp32", chunks.I32: "*i32"}


def chunks_case(group, gates, name):
    return chunks.run(gates, name, 128, 1, "cpu")


@pytest.mark.slow(but="weak")
@pytest.mark.parametrize("gates, name", [(gates, x) for gates in ("weak", "strong") for x in chunks.groups(gates)])
def test_variants_against_float64(run, gates, name):
    assert run(1, chunks_case, gates, name) == [0]


@pytest.mark.slow(but="strong")
@pytest.mark.parametrize("name", chunks.groups("mixed"))
def test_variants_with_gates_of_all_strengths(run, name):
    assert run(1, chunks_case, "mixed", name) == [0]


NAMES = "operands", "strong", "solved", "pairs", "gradient", "rest"


@pytest.mark.slow(but="pairs")
@pytest.mark.skipif(not triton.__version__.startswith("3.6"), reason="which products are wrong differs with ptxas")
@pytest.mark.parametrize("name", NAMES)
def test_kernels_read_what_they_should(name):
    variant = chunks.variants()[name]
    given = {x: POINTERS[chunks.TYPES[x]] for x in variant.kernel.arg_names if x in chunks.TYPES} | dict(scale="fp32")
    fixed = chunks.fixed(variant, 32)
    constants = {x: fixed[x] for x in variant.kernel.arg_names if x in fixed}
    compiled = Compiled(variant.kernel, given, constants, **{x: fixed[x] for x in ("num_warps", "num_stages")})
    assert compiled.count(r"wgmma\.mma") and not compiled.lost_operands()


def local_case(comm):
    """Return errors of bench.local's KDA and Gated DeltaNet methods that run on CPUs."""
    kinds = itertools.product(("weak", "strong"), (False, True), ("kda", "gated_delta_rule"))
    shapes = [local_delta.Shape(70, 1, 16, *kind) for kind in kinds]
    return [
        local_delta.check(f"zeco_{shape.rule}, {how}", comm, shape, 70)
        for shape in shapes
        for how in ("chunk=allscan", "recompute=False")
    ]


@pytest.mark.slow
def test_bench_local_of_kda(run):
    [errors] = run(1, local_case)
    assert all(0 < error < 1e-2 for error in errors), errors
    rules = "kda", "gated_delta_rule"
    ours = {f"zeco_{rule}, {how}" for rule in rules for how in ("chunk=allscan", "recompute=False")}
    with mock.patch.object(local_delta.importlib.util, "find_spec", lambda name: name == "allscan" or None):
        assert {*local_delta.installed()} == ours  # other packages have no row unless installed
