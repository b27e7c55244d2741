"""Properties on random cases with fixed seeds, against the tests' own float64 laws.

``--seeds N`` runs N cases of each, by default two, with ``--all`` four; a failure names its seed, the test's id.
"""

from __future__ import annotations

import pytest

from support.properties.delta_calls import delta_case
from support.properties.draw import size_of
from support.properties.gla_calls import gla_calls, gla_case
from support.properties.halo_calls import halo_case
from support.properties.life_cycle import life_cycle_case
from support.properties.scan_calls import scans_case
from support.properties.segment_calls import segments_case
from support.properties.ssd_calls import ssd_calls, ssd_case

pytestmark = pytest.mark.cpu  # GPUs would compile kernels for every case


def seeds_of(config):
    return config.getoption("--seeds") or (4 if config.getoption("--all") else 2)


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        name, seeds = metafunc.function.__name__, range(seeds_of(metafunc.config))
        metafunc.parametrize("seed, size", [pytest.param(s, size_of(name, s), id=str(s)) for s in seeds])


def test_scans(run, seed, size):
    run(size, scans_case, seed)


def test_gla(run, seed, size):
    answers = run(size, gla_case, seed)
    calls, _ = gla_calls(seed, size)
    for number, call in enumerate(calls):
        errors = call.errors([found[number] for found in answers])
        assert max(errors.values()) < 1, f"SEED {seed}, {size} ranks: {call.text}: {errors}"


def test_ssd(run, seed, size):
    answers = run(size, ssd_case, seed)
    for number, call in enumerate(ssd_calls(seed, size)):
        by_rank = [found[number] for found in answers]
        errors = {} if by_rank[0] is None else call.errors(by_rank)
        assert max(errors.values(), default=0) < 1, f"SEED {seed}, {size} ranks: {call.text}: {errors}"


def test_segments(run, seed, size):
    run(size, segments_case, seed)


def test_delta_rules(run, seed, size):
    run(size, delta_case, seed)


def test_halos(run, seed, size):
    run(size, halo_case, seed)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_life_cycles(fresh, request, size):
    ranks = fresh(size)
    for seed in range(size - 2, max(3, seeds_of(request.config)), 3):
        ranks.run(life_cycle_case, seed)
