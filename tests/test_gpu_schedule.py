"""Order and concurrency of the GPU tests over workers of pytest-xdist."""

from __future__ import annotations

import glob
import os
import re
import types

import pytest

from support import ROOT, gpu_schedule

pytestmark = pytest.mark.cpu
KNOWN = {"a.py::test_long": 90.0, "a.py::test_short": 1.0, "a.py::test_packed_at_size": 20.0}
TESTS = [
    *(f"a.py::test_short[{i}]" for i in range(100)),
    *(f"a.py::test_packed_at_size[{i}]" for i in range(12)),
    "a.py::test_new",
    *(f"a.py::test_long[{i}]" for i in range(3)),
]


class Worker:
    """A stand-in for pytest-xdist's worker: begins a test once it has another one, or is told that there is none."""

    def __init__(self, name):
        self.gateway, self.sent, self.shutting_down = types.SimpleNamespace(id=name), [], False

    def send_runtest_some(self, indices):
        self.sent += indices

    def shutdown(self):
        self.shutting_down = True


def made(workers, tests=None):
    config = types.SimpleNamespace(option=types.SimpleNamespace(), getvalue=lambda name: [f"{len(workers)}*popen"])
    plan = gpu_schedule.scheduler(config, None, KNOWN)
    for worker in workers:
        plan.add_node(worker)
        plan.add_node_collection(worker, tests or gpu_schedule.longest_first(TESTS, KNOWN))
    plan.schedule()
    return plan


def run(plan, crashes=""):
    """Return (tests in the order of their ends, largest number of concurrent large tests); a worker crashes in test
    ``crashes``."""
    ended, most, now = [], 0, {worker: 0.0 for worker in plan.nodes}
    while ready := [w for w in plan.nodes if len(w.sent) > 1 or (w.sent and w.shutting_down)]:
        most = max(most, sum(gpu_schedule.is_large(plan.collection[w.sent[0]]) for w in ready))
        worker = min(ready, key=lambda w: now[w] + gpu_schedule.expected(plan.collection[w.sent[0]], KNOWN))
        index = worker.sent.pop(0)
        test = plan.collection[index]
        ended.append(test)
        now[worker] += gpu_schedule.expected(test, KNOWN)
        if test == crashes:
            assert plan.remove_node(worker) == test
        else:
            plan.mark_test_complete(worker, index)
    assert not plan.has_pending and all(worker.shutting_down for worker in plan.nodes)
    return ended, most, now


def test_what_takes_longest_is_first():
    order = gpu_schedule.longest_first(TESTS, KNOWN)
    assert sorted(order) == sorted(TESTS)
    assert order[:3] == TESTS[-3:] and order[-1] == "a.py::test_new"
    units = gpu_schedule.units_of(TESTS, KNOWN)
    assert units == gpu_schedule.units_of(order, KNOWN)
    assert [len([t for t in TESTS if units[t] == units[first]]) for first in (TESTS[0], TESTS[100], TESTS[-1])] == [
        45,
        2,
        1,
    ]


def test_all_workers_end_together_and_few_have_large_tests():
    ended, most, now = run(made([Worker(f"gw{i}") for i in range(4)]))
    assert sorted(ended) == sorted(TESTS) and most == gpu_schedule.LARGE_AT_ONCE
    assert max(now.values()) < 1.5 * sum(now.values()) / len(now), now


@pytest.mark.parametrize("crashes", ["a.py::test_long[1]", "a.py::test_packed_at_size[3]", "a.py::test_short[50]"])
def test_where_a_worker_dies_the_others_run_the_rest(crashes):
    ended, *_ = run(made([Worker(f"gw{i}") for i in range(4)]), crashes)
    assert sorted(ended) == sorted(TESTS)


def test_without_tests():
    workers = [Worker("gw0"), Worker("gw1")]
    plan = made(workers, tests=["a.py::test_new"])
    assert run(plan)[0] == ["a.py::test_new"]


def test_names_in_the_lists_are_tests():
    text = "".join(open(path).read() for path in glob.glob(os.path.join(ROOT, "tests", "**", "*.py"), recursive=True))
    assert all(re.search(rf"^def {name}\(", text, re.M) for name in gpu_schedule.LARGE)
    assert all(os.path.exists(os.path.join(ROOT, name)) for name in gpu_schedule.WHOLE)
    of_file = [f"{gpu_schedule.WHOLE[0]}::test_{i}[{j}]" for i in "ab" for j in range(99)]
    assert {*gpu_schedule.units_of(of_file, {}).values()} == {gpu_schedule.WHOLE[0]}


def test_each_worker_begins_with_another_gpu():
    assert [gpu_schedule.turned(f"gw{i}", ["0", "1", "3"]) for i in (0, 1, 11)] == ["0,1,3", "1,3,0", "3,0,1"]
    assert [gpu_schedule.turned(f"gw{i}", ["0", "1", "3"], 2) for i in (0, 2)] == ["0,1", "3,0"]
