"""Plans: a recorded launch sequence runs with each call's tensors (on GPUs: tests/gpu/test_plans.py)."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import os
import shutil
import subprocess
import types
import weakref
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.nvidia.driver import CudaLauncher

import allscan
from allscan.bindings import cuda_driver, nvshmem_module, triton_compat
from allscan.bindings.cuda_driver import parameter_sizes
from allscan.launch import compiled_kernel, graph_cache, streams
from allscan.launch.compiled_kernel import Launch
from allscan.launch.plan import OWN, Plan
from allscan.ops.gla import gla_plans
from allscan.scan.launcher import Work
from allscan.shmem_kernels.scan import scan_kernel
from allscan.tokens.packing import Layout, TokenRange, flags_of
from support.fake_gpu import CUDA, LOADED, fake_gpu, floats

pytestmark = [pytest.mark.cpu, pytest.mark.quick]


@triton.jit
def sum_kernel(p_x, p_y, p_out, scale, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(p_out + i, tl.load(p_x + i) + scale * tl.load(p_y + i))


def sum_of(plan, x, y, out, scale):
    plan.launch(sum_kernel, (1,), x, y, out, scale=scale, N=8)


def launches_in_order(group):
    """Compute x + 2 y + 3 table through scratch and output memory; twice, with other tensors."""
    table, plan = torch.ones(8), Plan()
    x, y = plan.input(table), plan.input(torch.zeros(2, 8))
    out, same = plan.output_like(x), plan.output(8)
    t, other = plan.scratch(8), plan.scratch(8, before=[out])
    first, second = plan.view(y, 0, 8), plan.view(y, 8, 8)
    sum_of(plan, x, first, t, 2.0)
    sum_of(plan, t, t, other, 0.0)
    sum_of(plan, other, plan.constant(table), same, 3.0)
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
    x, whole = plan.input(torch.zeros(8)), plan.scratch(2, 8)
    sum_of(plan, x, x, plan.view(whole, 8, 8), 1.0)
    out = plan.output_like(x)
    sum_of(plan, plan.view(whole, 8, 2, 4), x, out, 0.0)
    given = torch.randn(8)
    assert torch.equal(plan.run(None, given)[0], 2 * given)


def test_places_follow_one_another_and_are_aligned():
    plan = Plan()
    a, b = plan.scratch(3, 5), plan.scratch(7, dtype=torch.bfloat16)
    assert (a.offset, b.offset, plan.bytes) == (0, 256, 512)
    assert plan.scratch(1, dtype=torch.int64).offset == 512
    assert plan.scratch(0).offset == 768 and plan.scratch(1).offset == 1024


def test_places_in_outputs():
    """Scratch is placed in the first output with enough space, else in the run's own memory."""
    plan = Plan()
    small, large = plan.output(33, dtype=torch.bfloat16), plan.output(100)
    first, *others = (plan.scratch(15, before=[small, large]) for _ in range(4))
    assert (first.memory, first.offset) == (small.memory, 0)
    assert [(x.memory, x.offset) for x in others] == [(large.memory, 0), (large.memory, 256), (OWN, 0)]
    assert plan.scratch(100, before=[plan.output(99)]).memory == OWN


def lent_as_another_dtype(group):
    """Scratch may lie in an output of another dtype with an odd number of elements."""
    plan = Plan()
    x, out = plan.input(torch.zeros(8)), plan.output(145, dtype=torch.bfloat16)
    plan.scratch(3, dtype=torch.int8, before=[out])
    t, end = plan.scratch(8, before=[out]), plan.output_like(x)
    assert (t.memory, t.offset) == (out.memory, 256) != (end.memory, 0)
    sum_of(plan, x, x, t, 1.0)
    sum_of(plan, t, t, end, 0.0)
    given = torch.randn(8)
    found = plan.run(None, given)
    assert found[0].shape == (145,) and torch.equal(found[1], 2 * given)
    plan = Plan()
    x = plan.input(torch.zeros(4))
    plan.call_python(lambda _, number: number.zero_(), plan.view(x, 0, 1, dtype=torch.int64))
    for begin in (0, 1):
        with contextlib.nullcontext() if begin == 0 else pytest.raises(ValueError, match="itemsize, 8 bytes"):
            plan.run(None, torch.zeros(8)[begin : begin + 4])


def test_a_layout_goes_with_what_is_derived_of_it():
    """Reference counts free both: some trainers disable Python's garbage collector."""
    gc.disable()
    try:
        layout = Layout([TokenRange(0, 10, flags=flags_of(True, True))], 1, 64, "cpu")
        layout.derived("launches", functools.partial(types.SimpleNamespace, layout=layout.for_calls()))
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
        x = plan.input(torch.zeros(8))
        with plan.side_stream(stream):
            plan.call_python(fails if inside else lambda context, x: x.add_(1), x)
        plan.call_python(fails, x)
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

        plan.call_python(call, x)

    plan = Plan()
    x = plan.input(torch.zeros(8))
    with plan.side_stream(lambda _: stream("outer")):
        step("in outer")
        with plan.side_stream(lambda _: stream("inner")):
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
    x = plan.input(torch.zeros(8))
    with plan.side_stream(lambda _: stream("outer")), plan.side_stream(lambda _: stream("inner")):
        plan.call_python(fails, x)
    with pytest.raises(KeyError, match="join outer") as raised:
        plan.run(None, torch.zeros(8))
    assert seen == ["leave inner", "leave outer", "join inner", "join outer"]
    errors, error = [], raised.value
    while error is not None:
        errors.append(error.args[0])
        error = error.__context__
    assert errors == ["join outer", "join inner", "leave outer", "leave inner", "first"]


def test_which_stream_waits_for_which(monkeypatch):
    """A scan whose stream records another side stream does not wait for launches on that stream."""
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


def as_sum(grid, x, y, out, scale, N):
    floats(out, N)[:] = floats(x, N) + scale * floats(y, N)


@contextlib.contextmanager
def the_same_memory(monkeypatch):
    """Yield ``run(plan, ...)``, in which each run gets the previous run's memory, as from a GPU's allocator."""
    new_empty, known, taken = torch.Tensor.new_empty, [], []

    def again(self, *size, dtype=None):
        found = next((x for key, x in known if key == (size, dtype) and not any(x is y for y in taken)), None)
        if found is None:
            found = new_empty(self, *size, dtype=dtype)
            known.append(((size, dtype), found))
        taken.append(found)
        return found

    def run(plan, *given):
        taken.clear()
        return plan.run(None, *given)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", again)
        yield run


@contextlib.contextmanager
def side_streams(monkeypatch):
    """Yield a communicator's streams of a mocked GPU; streams are names."""
    some = streams.Streams(torch.device("cuda", 0))
    for name, value in dict(own=str, current=lambda: "caller", put_behind=lambda later, earlier: None).items():
        monkeypatch.setattr(some, name, value)
    monkeypatch.setattr(streams, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    yield some


def a_plan_with_side_streams(made, some):
    """Record a plan whose scratch is written on the caller's stream, and read there and on two others; with zeros,
    too."""
    plan = Plan(made)
    x, out = plan.input(torch.zeros(8)), plan.output(8)
    a, b, c, d = (plan.scratch(8) for _ in range(4))
    sum_of(plan, x, x, a, 1.0)  # 2 x
    with plan.side_stream(lambda _: some.side()):
        sum_of(plan, a, x, b, 1.0)  # 3 x
        with plan.side_stream(lambda _: some.side(streams.LONG)):
            plan.zero(c)
            sum_of(plan, a, c, c, 0.5)  # 2 x
        sum_of(plan, b, b, b, 1.0)  # 6 x
        plan.join()
        sum_of(plan, b, c, b, -1.0)  # 4 x
    sum_of(plan, a, x, d, 3.0)  # 5 x
    plan.join()
    sum_of(plan, b, d, out, 2.0)  # 14 x
    return plan


def test_a_graph_is_built_of_nodes(monkeypatch):
    """In any order that its edges allow, a graph computes the launches' result. Each kernel has its stream's priority
    and the parameters that its machine code reads, and no stream is captured."""
    made = graph_cache.Graphs()
    with (
        fake_gpu({"sum_kernel": as_sum}, with_graphs=True) as gpu,
        side_streams(monkeypatch) as some,
        the_same_memory(monkeypatch) as run,
    ):
        plan, given = a_plan_with_side_streams(made, some), torch.randn(8)
        for i in range(40):
            gpu.launches.clear()
            (out,) = run(plan, given)
            assert torch.allclose(out, 14 * given), i
            assert gpu.launches == (["graph"] if i > 1 else ["sum_kernel"] * 7), i  # the first run goes through Triton
            out.fill_(float("nan"))
        nodes = [node for node in gpu.cuda.nodes.values() if node[0] == next(iter(gpu.cuda.nodes.values()))[0]]
        numbers = dict(zip(gpu.cuda.nodes, range(len(nodes))))
        behind = [sorted(numbers[n] for n in node[2]) for node in nodes]
        assert behind == [[], [0], [1], [2], [1], [3, 4], [0], [5, 6]]
        assert [node[4] for node in nodes] == [0, -2, 0, -1, -2, -2, 0, 0]  # memset nodes have no priority
        assert not [name for name in gpu.cuda.calls if "Capture" in name and "Exchange" not in name]
        assert gpu.cuda.mode == 0 and not gpu.cuda.graphs, "only what was instantiated is left"
        counts = made.counts()
        assert counts.kept == counts.built == len(gpu.cuda.executables) and counts.bytes == 8 * counts.kept * NODE
        made.close()
        assert not gpu.cuda.executables and made.counts()[:3] == (False, 0, 0)
        gpu.launches.clear()
        run(plan, given)
        assert gpu.launches == ["sum_kernel"] * 7


def test_a_scan_that_was_begun_before_a_capture_is_none_of_its_graph(monkeypatch):
    """If the Work is dropped in a capture, its memory is kept until the capture has ended; if it is waited for, an
    error is raised, and the capture goes on."""
    some, waits, now = streams.Streams(torch.device("cuda", 0)), [], dict(stream="caller", captured=set())

    class Stream(str):
        cuda_stream = property(lambda stream: stream)

        def wait_event(self, event):
            assert self not in now["captured"], "an event from outside of the capture"
            waits.append(str(self))

    monkeypatch.setattr(torch.cuda, "Event", lambda: types.SimpleNamespace(record=lambda stream: None))
    for name, value in dict(own=str, current=lambda: Stream(now["stream"]), put_behind=lambda *_: None).items():
        monkeypatch.setattr(some, name, value)
    monkeypatch.setattr(streams, "current_device", lambda: 0)
    monkeypatch.setattr(streams, "current_stream_of", lambda index: 0)
    monkeypatch.setattr(streams, "capturing", lambda: now["stream"] in now["captured"])
    monkeypatch.setattr(cuda_driver, "is_captured", now["captured"].__contains__)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    some.last_number = 0

    class Memory:
        pass

    def begun():
        with streams.AsyncLaunches(some) as side:
            pass
        memory = Memory()
        return Work(types.SimpleNamespace(check=lambda: None), "result", side, (memory,)), weakref.ref(memory)

    for captured in ("graph", "caller"):  # the capture's stream may be that on which the scan was begun
        now.update(stream="caller")
        (work, memory), (other, _) = begun(), begun()
        now["captured"].add(captured)
        now.update(stream=captured)
        with pytest.raises(RuntimeError, match="before the capture: this scan"):
            other.wait()
        del work
        now.update(stream="third")  # not captured; for example, another thread's
        kept, of_kept = begun()
        assert kept.wait() == "result" and of_kept() is None
        now.update(stream=captured)
        some.follow()
        assert memory() is not None
        now["captured"].clear()
        now.update(stream="caller")
        waits.clear()
        some.follow()  # as the next launch does
        assert memory() is None and waits == ["caller"]
        assert other.wait() == "result" and waits == ["caller"] * 2
    monkeypatch.setattr(streams, "capturing", lambda: True)
    with streams.AsyncLaunches(some) as side:
        pass
    side.wait(())
    assert waits == ["caller"] * 2, "begun in the capture, on its stream"


class Edges:
    """A stand-in for a graph; records nodes by the names of their kernels."""

    def __init__(self):
        self.names, self.behind, self.priorities = [], {}, {}

    def kernel(self, node, behind, priority=0):
        self.names.append(node)
        self.behind[node], self.priorities[node] = {self.names[i] for i in behind}, priority
        return len(self.names) - 1

    def zeros(self, address, nbytes, behind):
        return self.kernel("zeros", behind)


class Middle:
    """The StateCarrier of a rank with neighbours on both sides, or on one."""

    def __init__(self, some, before=True, behind=True):
        self.comm, self.stream, self.sides = types.SimpleNamespace(graphs=None), some.side, (before, behind)

    def neighbours(self, shape, zigzag):
        return self.sides

    def expected_us(self, words, zigzag):
        return 1e6

    def record(self, plan, carried, reverse, zigzag):
        plan.launch(scan_kernel, (1,), carried.state, carried.decay, carried.out, carried.fwd_epoch)


def edges_of(plan, carrier):
    found = Edges()
    plan.build(graph_cache.Builder(found, carrier, [0] * 32))
    return found


def test_what_a_graph_of_zeco_gla_runs_beside_the_scan(monkeypatch):
    """The scan waits for this rank's segments only; da_kernel and the chunks' states wait for no scan."""
    monkeypatch.setattr(Launch, "node", lambda launch, _: launch.kernel.fn.__name__)
    layout, like = Layout([TokenRange(0, 256)], 1, 64, "cpu"), torch.zeros(1, 256, 2, 64, dtype=torch.bfloat16)
    shape = gla_plans.shape_of(1, 256, 2, 64, 64, 1, torch.bfloat16, torch.float32, "cuda", False, 132, False)
    kept, gates = torch.zeros(shape.saved_words), torch.zeros(1, 256, 2, 64)
    with side_streams(monkeypatch) as some:
        middle = Middle(some)
        forward = gla_plans.forward_plan(shape, 1.0, layout, middle, like, like, like, gates, None, None, kept)
        found = edges_of(forward, middle)
        assert found.behind["carry_kernel"] == {"state_kernel"} and found.behind["scan_kernel"] == {"carry_kernel"}
        assert found.behind["operands_kernel"] == {"state_kernel"}, "beside the scan"
        assert found.behind["output_kernel"] == {"operands_kernel", "scan_kernel"}
        assert {name for name, p in found.priorities.items() if p} == {"carry_kernel", "scan_kernel"}
        last = Middle(some, behind=False)
        found = edges_of(
            gla_plans.forward_plan(shape, 1.0, layout, last, like, like, like, gates, None, None, kept), last
        )
        assert found.behind["carry_kernel"] == {"state_kernel"} == found.behind["scan_kernel"], "the last rank's scan"
        first = Middle(some, before=False)
        found = edges_of(
            gla_plans.forward_plan(shape, 1.0, layout, first, like, like, like, gates, None, None, kept), first
        )
        assert found.behind["output_kernel"] == {"operands_kernel"}, "waits for no scan"
        backward = gla_plans.backward_plan(shape, 1.0, layout, middle, like, like, like, gates, like, None, None, kept)
        found = edges_of(backward, middle)
        names = found.names
        assert names.count("state_kernel") == 2, "the second, of the chunks, is that in these dictionaries"
        assert found.behind["state_kernel"] == {"carry_kernel"} == found.behind["scan_kernel"]
        assert found.priorities["state_kernel"] == streams.LONG and found.priorities["scan_kernel"] == streams.SCANS
        assert found.behind["da_kernel"] == {"state_kernel"} and names.index("da_kernel") > names.index("scan_kernel")
        assert found.behind["grad_kernel"] == {"output_kernel"}


NODE = graph_cache.NODE_BYTES


def test_an_empty_buffer_is_no_node():
    """A rank without tokens adds no memset node: the driver rejects zero bytes."""
    plan, found = Plan(), Edges()
    x = plan.input(torch.zeros(0, 8))
    plan.zero(x)
    plan.zero(plan.output(4))
    plan.build(graph_cache.Builder(found, None, [0] * 4))
    assert found.names == ["zeros"] and plan.num_nodes == 1
    assert torch.equal(plan.run(None, torch.zeros(0, 8))[0], torch.zeros(4))


class Sequence:
    """A stand-in for a plan."""

    num_nodes = 2

    def __init__(self, number, node=None):
        self.number, self.failures, self.node = number, 0, node

    def build(self, builder):
        if self.node:
            raise self.node
        builder.zeros(0, 0)


def runs(made, gpu, *keys, sequence=None):
    """Return how the launches with these keys were made."""
    how, sequence = [], sequence or Sequence(1)
    for key in keys:
        gpu.launches.clear()
        made.launch(-1, sequence, (key,), lambda context: gpu.launches.append("launched"), None)
        how += gpu.launches
    return how


def test_what_came_twice_is_launched_as_a_graph(monkeypatch):
    made = graph_cache.Graphs(3 * 2 * NODE)
    with fake_gpu({}, with_graphs=True) as gpu:
        assert runs(made, gpu, *"abaab") == ["launched", "launched", "graph", "graph", "graph"]
        monkeypatch.setattr(graph_cache, "capturing", lambda: True)
        assert runs(made, gpu, *"ab") == ["launched", "launched"], "in a capture of the caller's"
        monkeypatch.setattr(graph_cache, "capturing", lambda: False)
        monkeypatch.setattr(graph_cache, "current_device", lambda: 1)
        assert runs(made, gpu, "a") == ["launched"], "on another device"
        made.close()


def test_memory_of_graphs_is_bounded():
    """The memory holds three graphs. Addresses beyond that, in turns, do not evict each other and are counted;
    addresses that are no longer used are evicted."""
    made = graph_cache.Graphs(3 * 2 * NODE)
    with fake_gpu({}, with_graphs=True) as gpu:
        for i in range(5):
            how = runs(made, gpu, *"abcde")
            assert how == (["launched"] * 5 if i == 0 else ["graph"] * 3 + ["launched"] * 2)
            assert made.counts().bytes <= made.most_bytes
        assert made.counts().declined == 8 and made.counts().built == 3
        for _ in range(3):
            how = runs(made, gpu, *"xyz")
        assert how == ["graph"] * 3 and made.counts().kept == len(gpu.cuda.executables) == 3
        made.forget(1)
        assert not gpu.cuda.executables and made.counts().bytes == 0
    assert graph_cache.Graphs(0).counts().enabled is False


def test_more_than_128_addresses_of_a_plan_become_graphs():
    """Layers times micro-batches."""
    made = graph_cache.Graphs()
    with fake_gpu({}, with_graphs=True) as gpu:
        for i in range(3):
            assert set(runs(made, gpu, *range(1000))) == {"graph" if i else "launched"}
        assert made.counts().kept == 1000 and made.counts().declined == 0
        made.close()


def test_a_plans_graphs_go_with_it(monkeypatch):
    made = graph_cache.Graphs()
    with fake_gpu({"sum_kernel": as_sum}, with_graphs=True) as gpu, the_same_memory(monkeypatch) as run:
        plan = Plan(made)
        x = plan.input(torch.zeros(8))
        t, out = plan.scratch(8), plan.output(8)
        sum_of(plan, x, x, t, 1.0)
        sum_of(plan, t, x, out, 1.0)
        given = torch.randn(8)
        for _ in range(4):
            run(plan, given)
        assert made.counts().kept
        del plan
        gc.collect()
        assert not made.counts().kept and not gpu.cuda.executables


@pytest.mark.parametrize(
    "function", ["cuGraphCreate", "cuGraphAddMemsetNode", "cuGraphInstantiateWithFlags", "cuGraphLaunch"]
)
def test_a_graph_that_cannot_be_made_is_no_error(function):
    """The error is counted, with the driver's name for it; after three failures of one plan in a row no graph is
    built."""
    made, sequence = graph_cache.Graphs(), Sequence(1)
    with fake_gpu({}, with_graphs=True) as gpu:
        gpu.cuda.fails[function] = 2
        assert runs(made, gpu, *"aa", sequence=sequence) == ["launched"] * 2
        assert made.counts().failed == 1 and made.counts().why == f"RuntimeError: {function}: CUDA_ERROR_2"
        assert made.counts()[:3] == (True, 0, 0) and not gpu.cuda.graphs and not gpu.cuda.executables
        gpu.cuda.fails.clear()
        assert "graph" in runs(made, gpu, *"aa", sequence=sequence) and made.counts().kept == 1
        gpu.cuda.fails[function] = 2
        runs(made, gpu, *"bbbbccccdd", sequence=sequence)
        assert sequence.failures == 3
        gpu.cuda.fails.clear()
        assert runs(made, gpu, *"eee", sequence=sequence) == ["launched"] * 3
        assert runs(made, gpu, *"fff", sequence=Sequence(2)) == ["launched", "graph", "graph"]
        other = Sequence(3, NotImplementedError("a launch that is no node"))
        failed = made.counts().failed
        assert runs(made, gpu, *"aaaa", sequence=other) == ["launched"] * 4
        assert made.counts().failed == failed + 1 and made.counts().why.endswith("no node")
        assert gpu.cuda.mode == 0
        made.close()


def test_a_kernel_that_takes_other_parameters_than_we_know_of_is_no_node(monkeypatch):
    """With another version of Triton no kernel is launched with parameters that it does not read."""
    with fake_gpu({"sum_kernel": as_sum}, with_graphs=True):
        launch, x = Launch(sum_kernel, (1,), scale=2.0, N=8), torch.randn(8)
        launch(x, x, torch.empty(8))
        node = launch.node([x.data_ptr()] * 3)
        name, source, sizes = LOADED[node.function]
        assert [size for _, size in node.arguments] == sizes == [8, 8, 8, 4, 8, 8]
        monkeypatch.setitem(LOADED, node.function, (name, source, [*sizes, 8]))
        launch, x = Launch(sum_kernel, (1,), scale=2.0, N=8), torch.randn(8)
        launch(x, x, torch.empty(8))
        with pytest.raises(NotImplementedError, match="unexpected kernel parameters"):
            launch.node([x.data_ptr()] * 3)
        monkeypatch.delitem(CUDA, "cuFuncGetParamInfo")  # as with an older driver
        with pytest.raises(RuntimeError, match="older than CUDA 12.4"):
            parameter_sizes(node.function)


class Bare:
    """A compiled kernel with Triton's own GPU launcher, whose C function is ``handed``'s."""

    function, packed_metadata = 4096, (4, 1, 1024)

    def __init__(self, handed):
        self.run = object.__new__(CudaLauncher)
        vars(self.run).update(
            global_scratch_size=0,
            global_scratch_align=1,
            profile_scratch_size=0,
            profile_scratch_align=1,
            num_ctas=1,
            launch_cooperative_grid=False,
            launch_pdl=False,
            gsan_enabled=False,
            arg_annotations=["of arguments"],
            kernel_signature=b"types",
            launch=lambda *x: handed.append(x),
        )


def test_what_a_launch_hands_to_the_launcher_of_this_triton(monkeypatch):
    """The C function gets equal arguments from our launch and from Triton's, with addresses in any position."""
    monkeypatch.setattr(triton_compat, "_held", set())
    assert triton_compat._ONE_BY_ONE + triton_compat._IN_A_TUPLE == 1, "a Triton that is not known"
    handed, arguments, grid = [], [4096, (16, 32, None), 8192, 2.5], (3, 2, 1)
    compiled = Bare(handed)
    with fake_gpu({}):
        compiled.run(*grid, 77, 4096, compiled.packed_metadata, None, None, None, *arguments)
        for places in ([0, 1], [2, 0]):
            given = [None if i in places else x for i, x in enumerate(arguments)]
            launch = triton_compat.launcher(compiled, grid, given, places, lambda device: 70 + device, 7)
            assert launch([arguments[i] for i in places]) is compiled
    theirs, *ours = [(*call[:-1], [*call[-1]] if isinstance(call[-1], (list, tuple)) else call[-1]) for call in handed]
    assert ours == [theirs] * 2


class Unloaded:
    """A kernel as compiled by Triton from 3.8 on, which unloads its module when freed. ``loaded``: handles in use; a
    new kernel gets the first free one."""

    packed_metadata, asm = (4, 1, 0), {"ptx": "nvshmemi_device_state_d"}

    def __init__(self, loaded):
        self.module = self.function = next(n for n in itertools.count(4096) if n not in loaded)
        self.loaded, self.run = loaded, lambda *arguments: None
        loaded.append(self.module)

    def _init_handles(self):
        pass

    def __del__(self):
        self.loaded.remove(self.module)


@pytest.mark.parametrize("kept", ["launcher", "carveout", "NVSHMEM's state"])
def test_what_keeps_a_number_of_a_kernel_holds_it(kept, monkeypatch):
    """Holders of the handle of a function or module also hold the kernel: after an unload another kernel may get the
    handle."""
    loaded, told = [], []
    monkeypatch.setattr(compiled_kernel, "set_shared_memory_carveout", lambda function, percent: told.append(function))
    state = types.SimpleNamespace(cumodule_init=told.append)
    monkeypatch.setattr(nvshmem_module, "load", lambda: state)
    monkeypatch.setattr(nvshmem_module, "initialized_modules", {})
    monkeypatch.setattr(triton_compat, "_held", set())
    monkeypatch.setattr(compiled_kernel, "_preferring", set())
    for _ in range(2):
        kernel = Unloaded(loaded)
        for _ in range(2):
            if kept == "launcher":  # a caller's graph has the handle, without the launcher
                triton_compat.launcher(kernel, (1, 1, 1), [None], [0], lambda device: 0, 0)([16])
            elif kept == "carveout":
                compiled_kernel.prefer_shared_memory_carveout(kernel)
            else:
                nvshmem_module.initialize_module(kernel)
        del kernel
        gc.collect()
    assert loaded == [4096, 4097]
    assert told == ([] if kept == "launcher" else loaded)  # each of them, once


HEADER = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "include", "cuda.h")
STRUCTURES = {
    "CUDA_KERNEL_NODE_PARAMS": cuda_driver._KernelParams,
    "CUDA_MEMSET_NODE_PARAMS": cuda_driver._MemsetParams,
    "CUlaunchAttributeValue": cuda_driver._AttributeValue,
}
CONSTANTS = {
    "CU_STREAM_NON_BLOCKING": cuda_driver.NON_BLOCKING,
    "CU_STREAM_CAPTURE_MODE_RELAXED": cuda_driver.RELAXED,
    "CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY": cuda_driver.NODE_PRIORITY,
    "CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT": cuda_driver.SHARED_MEMORY_CARVEOUT,
    "CU_LAUNCH_ATTRIBUTE_PRIORITY": cuda_driver.PRIORITY,
    "CUDA_ERROR_INVALID_VALUE": cuda_driver.OUT_OF_RANGE,
}


@pytest.mark.skipif(
    not (shutil.which("cc") and os.path.exists(HEADER)), reason="needs a C compiler and Triton's cuda.h"
)
def test_structures_are_those_of_the_drivers_header(tmp_path):
    wanted, lines = [], []
    for name, structure in STRUCTURES.items():
        wanted.append(ctypes.sizeof(structure))
        lines.append(f"sizeof({name})")
        for field, *_ in structure._fields_:
            place = getattr(structure, field)
            wanted += place.offset, place.size
            lines += f"offsetof({name}, {field})", f"sizeof((({name}*)0)->{field})"
    wanted += CONSTANTS.values()
    lines += CONSTANTS
    numbers = "".join(f'  printf("%zu\\n", (size_t){line});\n' for line in lines)
    source, program = tmp_path / "sizes.c", tmp_path / "sizes"
    source.write_text(
        f"#include <stddef.h>\n#include <stdio.h>\n#include <cuda.h>\nint main() {{\n{numbers}  return 0;\n}}\n"
    )
    subprocess.run(["cc", "-I", os.path.dirname(HEADER), source, "-o", program], check=True)
    found = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    assert dict(zip(lines, map(int, found), strict=True)) == dict(zip(lines, wanted, strict=True))
    text = open(HEADER, encoding="utf-8").read()
    assert "#define cuGraphAddKernelNode " in text and "cuGraphAddKernelNode_v2" in text  # takes this structure


def switches(group):
    """An argument overrides ALLSCAN_CUDA_GRAPHS; all ranks get an error for a bad value. Attributes used by AllScans
    and plans are read-only."""
    name = "ALLSCAN_CUDA_GRAPHS"
    for values, options, wanted in (
        ({}, {}, 256 << 20),
        ({name: "0"}, {}, 0),
        ({name: "1"}, {}, 256 << 20),
        ({}, dict(cuda_graphs=False), 0),
        ({name: "0"}, dict(cuda_graphs=True), 256 << 20),
        ({}, dict(cuda_graphs=1 << 20), 1 << 20),
    ):
        with mock.patch.dict(os.environ, values), allscan.Communicator(group, **options) as comm:
            counts = comm.cuda_graphs
            assert counts.most_bytes == wanted and counts.enabled == bool(wanted)
            assert counts[1:3] == (0, 0) and counts.why == ""
            with allscan.AllScan(comm, (2, 4, 4)) as scan:
                for thing, field in (
                    (comm, "max_ctas"),
                    (comm, "timeout"),
                    (comm, "algorithm"),
                    (comm, "nodes"),
                    (comm, "cuda_graphs"),
                    (scan, "max_ctas"),
                ):
                    before = getattr(thing, field)
                    with pytest.raises(AttributeError):
                        setattr(thing, field, 1)
                    assert getattr(thing, field) == before
        assert comm.cuda_graphs[:3] == (False, 0, 0)
    rank = 0 if group is None else torch.distributed.get_rank()
    with mock.patch.dict(os.environ, {name: "yes"} if rank == 1 else {}):
        with pytest.raises(ValueError, match=f"rank 1: ValueError: {name} must be 0 or 1, got 'yes'"):
            allscan.Communicator(group)
    with pytest.raises(ValueError, match="TypeError: cuda_graphs must be an integer"):
        allscan.Communicator(group, cuda_graphs="no" if rank == 1 else None)


def test_switches(run):
    run(2, switches)


def a_launch_in_the_interpreter(group):
    launch, x = Launch(sum_kernel, (1,), scale=2.0, N=8), torch.randn(8)
    for _ in range(2):
        out = torch.empty(8)
        launch(x, x, out)
        assert torch.equal(out, x + 2 * x) and not launch.ready
    with pytest.raises(RuntimeError, match="not been compiled"):
        launch.at([0, 0, 0])


@pytest.mark.parametrize(
    "case",
    [launches_in_order, lent_as_another_dtype, parts_of_a_runs_memory_are_one, a_launch_in_the_interpreter],
)
def test_in_the_interpreter(run, case):
    run(1, case)
