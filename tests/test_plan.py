"""Plans: what is recorded once is run for each call's tensors (on GPUs: tests/gpu/test_plans.py)."""

from __future__ import annotations

import contextlib
import functools
import gc
import types
import weakref

import pytest
import torch
import triton
import triton.language as tl

from allscan import graphs, streams
from allscan.launching import Launch
from allscan.packing import Layout, Piece
from allscan.plan import OWN, Plan

pytestmark = [pytest.mark.cpu, pytest.mark.quick]


@triton.jit
def sum_kernel(p_x, p_y, p_out, scale, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(p_out + i, tl.load(p_x + i) + scale * tl.load(p_y + i))


def sum_of(plan, x, y, out, scale):
    plan.launch(sum_kernel, (1,), x, y, out, scale=scale, N=8)


def launches_in_order(group):
    """x + 2 y + 3 table, by way of memory of a run and of an output; twice, with other tensors."""
    table, plan = torch.ones(8), Plan()
    x, y = plan.given(table), plan.given(torch.zeros(2, 8))
    out, same = plan.output_like(x), plan.output(8)
    t, other = plan.empty(8), plan.empty(8, before=[out])
    first, second = plan.part(y, 0, 8), plan.part(y, 8, 8)
    sum_of(plan, x, first, t, 2.0)
    sum_of(plan, t, t, other, 0.0)
    sum_of(plan, other, plan.table(table), same, 3.0)
    sum_of(plan, same, same, out, 0.0)
    sum_of(plan, second, second, same, 0.0)
    assert plan.bytes == 256
    for i in range(2):
        given, pair = torch.randn(8), torch.randn(2, 8)
        found = plan.run(None, given, pair)
        assert torch.equal(found[0], given + 2 * pair[0] + 3 * table), i
        assert torch.equal(found[1], pair[1])


def parts_of_a_runs_memory_are_one(group):
    plan = Plan()
    x, whole = plan.given(torch.zeros(8)), plan.empty(2, 8)
    sum_of(plan, x, x, plan.part(whole, 8, 8), 1.0)
    out = plan.output_like(x)
    sum_of(plan, plan.part(whole, 8, 2, 4), x, out, 0.0)
    given = torch.randn(8)
    assert torch.equal(plan.run(None, given)[0], 2 * given)


def test_places_follow_one_another_and_are_aligned():
    plan = Plan()
    a, b = plan.empty(3, 5), plan.empty(7, dtype=torch.bfloat16)
    assert (a.offset, b.offset, plan.bytes) == (0, 256, 512)
    assert plan.empty(1, dtype=torch.int64).offset == 512
    assert plan.empty(0).offset == 768 and plan.empty(1).offset == 1024


def test_places_in_outputs():
    """The first of the outputs that has room; else the run's own memory."""
    plan = Plan()
    small, large = plan.output(33, dtype=torch.bfloat16), plan.output(100)
    first, *others = (plan.empty(15, before=[small, large]) for _ in range(4))
    assert (first.memory, first.offset) == (small.memory, 0)
    assert [(x.memory, x.offset) for x in others] == [(large.memory, 0), (large.memory, 256), (OWN, 0)]
    assert plan.empty(100, before=[plan.output(99)]).memory == OWN


def lent_as_another_dtype(group):
    """In an output of another dtype, with an odd number of elements."""
    plan = Plan()
    x, out = plan.given(torch.zeros(8)), plan.output(145, dtype=torch.bfloat16)
    plan.empty(3, dtype=torch.int8, before=[out])
    t, end = plan.empty(8, before=[out]), plan.output_like(x)
    assert (t.memory, t.offset) == (out.memory, 256) != (end.memory, 0)
    sum_of(plan, x, x, t, 1.0)
    sum_of(plan, t, t, end, 0.0)
    given = torch.randn(8)
    found = plan.run(None, given)
    assert found[0].shape == (145,) and torch.equal(found[1], 2 * given)
    plan = Plan()
    x = plan.given(torch.zeros(4))
    plan.call(lambda _, number: number.zero_(), plan.part(x, 0, 1, dtype=torch.int64))
    for begin in (0, 1):
        with contextlib.nullcontext() if begin == 0 else pytest.raises(ValueError, match="multiple of its 8 bytes"):
            plan.run(None, torch.zeros(8)[begin : begin + 4])


def test_a_layout_goes_with_what_is_derived_of_it():
    """Without Python's collector, which some trainers switch off."""
    gc.disable()
    try:
        layout = Layout([Piece(0, 10, 0, 0, 3)], 1, 64, "cpu")
        layout.derived("launches", functools.partial(types.SimpleNamespace, layout=layout.tables()))
        gone = weakref.ref(layout)
        del layout
        assert gone() is None
    finally:
        gc.enable()


def test_what_runs_beside_is_joined_when_a_step_fails():
    seen = []

    @contextlib.contextmanager
    def stream(context):
        seen.append(("begin", context))
        try:
            yield lambda: seen.append("join")
        finally:
            seen.append("end")

    def fails(context, x):
        raise ArithmeticError(context)

    for inside in (True, False):
        plan = Plan()
        x = plan.given(torch.zeros(8))
        with plan.beside(stream):
            plan.call(fails if inside else lambda context, x: x.add_(1), x)
        plan.call(fails, x)
        plan.join()
        seen.clear()
        with pytest.raises(ArithmeticError, match="here"):
            plan.run("here", torch.zeros(8))
        assert seen == [("begin", "here"), "end", "join"]


@pytest.mark.parametrize(
    "failing, expected",
    [
        ("in outer", "enter outer, leave outer, join outer"),
        ("in inner", "enter outer, enter inner, leave inner, leave outer, join inner, join outer"),
        ("behind inner", "enter outer, enter inner, leave inner, leave outer, join inner, join outer"),
        ("behind outer", "enter outer, enter inner, leave inner, join inner, leave outer, join outer"),
        ("nowhere", "enter outer, enter inner, leave inner, join inner, leave outer, join outer"),
    ],
)
def test_one_beside_another_is_joined_when_a_step_fails(failing, expected):
    seen = []

    @contextlib.contextmanager
    def stream(name):
        seen.append(f"enter {name}")
        try:
            yield lambda: seen.append(f"join {name}")
        finally:
            seen.append(f"leave {name}")

    def step(place):
        def call(context, x):
            if place == context:
                raise ArithmeticError(place)

        plan.call(call, x)

    plan = Plan()
    x = plan.given(torch.zeros(8))
    with plan.beside(lambda _: stream("outer")):
        step("in outer")
        with plan.beside(lambda _: stream("inner")):
            step("in inner")
        step("behind inner")
        plan.join()
    step("behind outer")
    plan.join()
    with contextlib.nullcontext() if failing == "nowhere" else pytest.raises(ArithmeticError, match=failing):
        plan.run(failing, torch.zeros(8))
    assert ", ".join(seen) == expected


def test_all_are_joined_when_leaving_fails_too():
    seen = []

    @contextlib.contextmanager
    def stream(name):
        def join():
            seen.append(f"join {name}")
            raise KeyError(f"join {name}")

        try:
            yield join
        finally:
            seen.append(f"leave {name}")
            raise KeyError(f"leave {name}")

    def fails(context, x):
        raise ArithmeticError("first")

    plan = Plan()
    x = plan.given(torch.zeros(8))
    with plan.beside(lambda _: stream("outer")), plan.beside(lambda _: stream("inner")):
        plan.call(fails, x)
    with pytest.raises(KeyError, match="join outer") as raised:
        plan.run(None, torch.zeros(8))
    assert seen == ["leave inner", "leave outer", "join inner", "join outer"]
    errors, error = [], raised.value
    while error is not None:
        errors.append(error.args[0])
        error = error.__context__
    assert errors == ["join outer", "join inner", "leave outer", "leave inner", "first"]


def test_which_stream_waits_for_which(monkeypatch):
    """The scan, on a stream in which there is another one, waits for nothing that is launched on that one."""
    some, waits, current = streams.Streams(torch.device("cuda", 0)), [], ["caller"]
    names = {streams.SCANS: "scans", streams.LONG: "long"}
    monkeypatch.setattr(some, "own", names.get)
    monkeypatch.setattr(some, "current", lambda: current[-1])
    monkeypatch.setattr(some, "put_behind", lambda later, earlier: waits.append(f"{later} {earlier}"))
    monkeypatch.setattr(streams, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_stream", current.append)
    with some.side() as join:
        assert current[-1] == "scans"
        with some.side(streams.LONG) as join_long:
            assert current[-1] == "long"
        assert current[-1] == "scans" and waits == ["scans caller", "caller scans", "long scans"]
        join_long()
    assert current[-1] == "caller"
    join()
    assert waits[3:] == ["scans long", "caller scans"]


class Recorded:
    """In place of the driver's captures: what was launched inside is launched again."""

    living: set = set()

    def __init__(self, stream):
        self.again = []

    def __enter__(self):
        Recorded.now = self
        return self

    def __exit__(self, *error):
        Recorded.now = None

    def launch(self, stream):
        for key in self.again:
            launched.append((key, "graph"))


launched: list = []


def without_a_gpu(monkeypatch, capture):
    for name, value in dict(capturing=lambda: False, current_device=lambda: 0).items():
        monkeypatch.setattr(graphs, name, value)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(graphs, "Capture", capture)
    monkeypatch.setattr(graphs, "current_stream_of", lambda device: 0)
    monkeypatch.setattr(graphs, "_capture_stream", lambda device: types.SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(graphs, "KEPT", 3)
    Recorded.now = None


def runs(some, *keys):
    """How the launches with these keys are made."""

    def launches(key):
        (launched if Recorded.now is None else Recorded.now.again).append(key if Recorded.now else (key, "launched"))

    launched.clear()
    for key in keys:
        some.launch(0, (key,), launches, key)
    return [how for _, how in launched]


def test_what_came_twice_is_launched_as_a_graph(monkeypatch):
    without_a_gpu(monkeypatch, Recorded)
    some = graphs.Graphs()
    assert runs(some, "a", "b", "a", "a", "b") == ["launched", "launched", "graph", "graph", "graph"]
    assert runs(some, "c", "d", "b") == ["launched", "launched", "graph"]  # of three that are kept a was the oldest
    assert runs(some, "a", "a", "d") == ["launched", "graph", "graph"]
    monkeypatch.setattr(graphs, "capturing", lambda: True)
    assert runs(some, "a", "d") == ["launched", "launched"]


def test_a_capture_that_fails_is_no_error(monkeypatch):
    """Nor one while another thread captures, nor more than a process may have."""

    class Fails(Recorded):
        def __exit__(self, *error):
            super().__exit__()
            raise RuntimeError("cuGraphInstantiateWithFlags: CUDA error 2")

    without_a_gpu(monkeypatch, Fails)
    some = graphs.Graphs()
    assert runs(some, "a", "a", "a") == ["launched"] * 3  # two captures that failed
    monkeypatch.setattr(graphs, "Capture", Recorded)
    assert runs(some, "a", "c", "c") == ["graph", "launched", "graph"]
    monkeypatch.setattr(graphs, "Capture", Fails)
    assert runs(some, "b", "b", "b", "b") == ["launched"] * 4  # three in a row
    monkeypatch.setattr(graphs, "Capture", Recorded)
    assert runs(some, "b", "d", "d") == ["launched"] * 3
    some = graphs.Graphs()
    with graphs._one_at_a_time:
        assert runs(some, "a", "a") == ["launched"] * 2
    monkeypatch.setattr(Recorded, "living", set(range(graphs.MOST)))
    assert runs(some, "a") == ["launched"]
    monkeypatch.setattr(Recorded, "living", set())
    assert runs(some, "a", "a") == ["graph", "graph"]
    monkeypatch.setattr(graphs, "current_device", lambda: 1)
    assert runs(some, "a") == ["launched"]


def a_launch_in_the_interpreter(group):
    launch, x = Launch(sum_kernel, (1,), scale=2.0, N=8), torch.randn(8)
    for _ in range(2):
        out = torch.empty(8)
        launch(x, x, out)
        assert torch.equal(out, x + 2 * x) and not launch.ready
    with pytest.raises(RuntimeError, match="not compiled"):
        launch.at([0, 0, 0])


@pytest.mark.parametrize(
    "case",
    [launches_in_order, lent_as_another_dtype, parts_of_a_runs_memory_are_one, a_launch_in_the_interpreter],
)
def test_in_the_interpreter(run, case):
    run(1, case)
