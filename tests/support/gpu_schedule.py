"""Schedules the GPU tests on one machine: the longest first, and few tests that need much memory at once.

Each worker of pytest-xdist has its own ranks on the same GPUs. It gets cases of one test function together, as a unit,
since they launch the same kernels, which each process must compile or load.
"""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Iterable

UNIT_S = 45.0  # approximate time of a unit's cases together
WHOLE = ("tests/gpu/test_frameworks.py",)  # files that are one unit: their fixture takes longer than a test
# Functions whose tests need several GB on a GPU: token-by-token references in float64, ten processes at once
LARGE = (
    "test_zeco_gla_at_size",
    "test_packed_at_size",
    "test_widths",
    "test_kda_is_as_near_as_flas",
    "test_own_chunks_are_as_near_as_flas",
    "test_gated_delta_rule",
    "test_error_is_no_larger_than_flas",
    "test_peaks_are_those_estimated",
    "test_transformers",
    "test_ten_steps_of_training",
    "test_megatron",
)
LARGE_AT_ONCE = 2
# Seconds of a test that is not in tests/gpu/seconds.json: by default, and by a part of its name
GUESS_S, GUESSES_S = (
    3.0,
    {"test_sanitizer": 300.0, "test_fla_models": 15.0, "test_examples": 30.0, "test_frameworks": 10.0},
)


def function_of(test: str) -> str:
    """Return the test's name without its parameters."""
    return test.partition("[")[0]


def seconds(folder: str) -> dict[str, float]:
    """Read the time of a case of each test function in earlier runs: seconds.json in ``folder``, tests/gpu."""
    try:
        with open(os.path.join(folder, "seconds.json")) as file:
            return json.load(file)
    except FileNotFoundError:
        return {}


def expected(test: str, known: dict[str, float]) -> float:
    """Return the expected seconds of a test."""
    guess = next((guess for name, guess in GUESSES_S.items() if name in test), GUESS_S)
    return known.get(function_of(test), guess)


def units_of(tests: Iterable[str], known: dict[str, float]) -> dict[str, str]:
    """Return the unit of each test, independent of the order of ``tests``."""
    cases = collections.defaultdict(list)
    for test in sorted(tests):
        cases[function_of(test)].append(test)
    found = {}
    for function, of_function in cases.items():
        size = max(1, int(UNIT_S / max(expected(function, known), 0.01)))
        file = function.partition("::")[0]
        found |= {test: file if file in WHOLE else f"{function}, {i // size}" for i, test in enumerate(of_function)}
    return found


def longest_first(tests: list[str], known: dict[str, float]) -> list[str]:
    """Sort the tests by unit, longest unit first."""
    units, total = units_of(tests, known), collections.Counter()
    for test in tests:
        total[units[test]] += expected(test, known)
    return sorted(tests, key=lambda test: (-total[units[test]], units[test]))


def is_large(test: str) -> bool:
    return function_of(test).rpartition("::")[2] in LARGE


def scheduler(config, log, known: dict[str, float], sets: int = 1):
    """Return a scheduler for pytest-xdist that gives each worker a unit at a time, in the order of ``longest_first``.
    ``sets``: number of disjoint sets of GPUs among workers, e.g. 2 if each has two of four."""
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        removing = False

        def schedule(self) -> None:
            if self.collection is None:
                self.units = units_of(next(iter(self.registered_collections.values())), known)
            super().schedule()

        def _split_scope(self, nodeid: str) -> str:
            return self.units[nodeid]

        def waiting(self, node) -> list[str]:
            """Return the worker's unfinished tests."""
            return [test for unit in self.assigned_work[node].values() for test, ended in unit.items() if not ended]

        def next_unit(self, node) -> str | None:
            """Return the longest unit; after a long test the shortest one, since a worker starts a test only when it
            has the next one. No large tests if enough workers have some."""
            with_large = sum(any(map(is_large, self.waiting(other))) for other in self.nodes if other is not node)
            few = with_large < LARGE_AT_ONCE * sets
            fitting = [u for u, tests in self.workqueue.items() if few or not is_large([*tests][0])]
            long = sum(expected(test, known) for test in self.waiting(node)) > UNIT_S / 2
            return fitting[-1 if long else 0] if fitting else None

        def _assign_work_unit(self, node) -> None:
            if (unit := self.next_unit(node)) is not None:
                self.workqueue.move_to_end(unit, last=False)
                super()._assign_work_unit(node)

        def _reschedule(self, node) -> None:
            if self.removing:
                return
            if self.workqueue and not node.shutting_down and self.next_unit(node) is None:
                node.shutdown()  # other workers run the remaining large tests; this one completes its last test
            else:
                super()._reschedule(node)

        def remove_node(self, node) -> str | None:
            """Remove a dead worker. Its running test is not repeated; the other tests of its unit are."""
            self.removing = True
            crashed = super().remove_node(node)
            self.removing = False
            if crashed is None:
                return None
            for unit, tests in [*self.workqueue.items()]:
                tests |= {crashed: True} if crashed in tests else {}
                if all(tests.values()):
                    del self.workqueue[unit]
            for other in self.nodes:
                self._reschedule(other)
            return crashed

    config.option.loadscopereorder = False
    return Units(config, log)


def turned(worker: str, devices: list[str], count: int | None = None) -> str:
    """Return CUDA_VISIBLE_DEVICES of a worker such as "gw3": each has a different first GPU, since tests with few ranks
    use the first ones only; ``count``: the number of GPUs, by default all."""
    by = int(worker.removeprefix("gw")) % len(devices)
    return ",".join((devices[by:] + devices[:by])[:count])
