"""Plans: a recorded launch sequence runs with each call's tensors (on GPUs: tests/gpu/test_plans.py)."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
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
from allscan.launch import compiled_kernel, streams
from allscan.launch.compiled_kernel import Launch
from allscan.launch.plan import OWN, Plan
from allscan.ops.gla import gla_plans
from allscan.ops.operator import Call
from allscan.scan.launcher import Work
from allscan.shmem_kernels.scan import scan_kernel
from allscan.tokens.packing import Layout, TokenRange, flags_of

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


@contextlib.contextmanager
def recorded(seen, name, broken=False):
    """A side stream that records its use; if it is broken, to leave it and to join it raises an error."""

    def note(what):
        seen.append(f"{what} {name}")
        if broken and what != "enter":
            raise KeyError(seen[-1])

    note("enter")
    try:
        yield lambda: note("join")
    finally:
        note("leave")


def test_what_runs_beside_is_joined_when_a_step_fails():
    seen = []

    def fails(context, x):
        raise ArithmeticError(context)

    for inside in (True, False):
        plan = Plan()
        x = plan.input(torch.zeros(8))
        with plan.side_stream(functools.partial(recorded, seen)):
            plan.call_python(fails if inside else lambda context, x: x.add_(1), x)
        plan.call_python(fails, x)
        plan.join()
        seen.clear()
        with pytest.raises(ArithmeticError, match="here"):
            plan.run("here", torch.zeros(8))
        assert seen == ["enter here", "leave here", "join here"]


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

    def step(place):
        def call(context, x):
            if place == context:
                raise ArithmeticError(place)

        plan.call_python(call, x)

    plan = Plan()
    x = plan.input(torch.zeros(8))
    with plan.side_stream(lambda _: recorded(seen, "outer")):
        step("in outer")
        with plan.side_stream(lambda _: recorded(seen, "inner")):
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

    def fails(context, x):
        raise ArithmeticError("first")

    plan = Plan()
    x = plan.input(torch.zeros(8))
    outer, inner = (functools.partial(recorded, seen, name, True) for name in ("outer", "inner"))
    with plan.side_stream(lambda _: outer()), plan.side_stream(lambda _: inner()):
        plan.call_python(fails, x)
    with pytest.raises(KeyError, match="join outer") as raised:
        plan.run(None, torch.zeros(8))
    assert seen[2:] == ["leave inner", "leave outer", "join inner", "join outer"]
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


class Order:
    """Records the launches of a plan by the names of their kernels: the stream of each, and the earlier ones that it
    waits for, without those that another of them waits for. Of launches with one name the last counts."""

    def __init__(self, monkeypatch):
        self.names, self.behind, self.stream_of = [], {}, {}
        self.last, self.before, self.current = {"caller": set()}, {}, "caller"
        self.streams = streams.Streams(torch.device("cuda", 0))
        for name, value in dict(own=str, current=lambda: self.current, put_behind=self.put_behind).items():
            monkeypatch.setattr(self.streams, name, value)
        monkeypatch.setattr(streams, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "current", stream))
        monkeypatch.setattr(Launch, "__call__", lambda launch, *_: self.launch(launch.kernel.fn.__name__))

    def put_behind(self, later, earlier):
        self.last.setdefault(later, set()).update(self.last.setdefault(earlier, set()))

    def launch(self, name):
        number, waits = len(self.names), self.last[self.current]
        self.names.append(name)
        self.before[number] = waits.union(*(self.before[other] for other in waits))
        self.behind[name] = {self.names[n] for n in waits - set().union(*(self.before[other] for other in waits))}
        self.stream_of[name] = self.current
        self.last[self.current] = {number}


class Middle:
    """The StateCarrier of a rank with neighbours on both sides, or on one."""

    def __init__(self, order, before=True, behind=True):
        self.order, self.comm, self.stream, self.sides = order, None, order.streams.side, (before, behind)

    def neighbours(self, shape, zigzag):
        return self.sides

    def expected_us(self, words, zigzag):
        return 1e6

    def record(self, plan, carried, reverse, zigzag):
        plan.launch(scan_kernel, (1,), carried.state, carried.decay, carried.out, carried.fwd_epoch)


def test_what_zeco_gla_overlaps_with_the_scan(monkeypatch):
    """The scan waits for this rank's segments only; da_kernel and the chunks' states wait for no scan."""
    layout, like = Layout([TokenRange(0, 256)], 1, 64, "cpu"), torch.zeros(1, 256, 2, 64, dtype=torch.bfloat16)
    shape = gla_plans.shape_of(1, 256, 2, 64, 64, 1, torch.bfloat16, torch.float32, "cuda", False, 132, False)
    kept, gates = torch.zeros(shape.saved_words), torch.zeros(1, 256, 2, 64)
    inputs, rest = (like, like, like, gates), (None, None, kept)

    def order_of(make_plan, *tensors, **sides):
        order = Order(monkeypatch)
        carrier = Middle(order, **sides)
        plan = make_plan(shape, Call("zeco_gla", 1.0), layout, carrier, *tensors)
        plan.run(carrier, *[x for x in tensors if x is not None])
        return order

    found, passing = order_of(gla_plans.forward_plan, *inputs, *rest), "state_passing_kernel"
    assert found.behind[passing] == {"state_kernel"} and found.behind["scan_kernel"] == {passing}
    assert found.behind["operands_kernel"] == {"state_kernel"}, "overlapped with the scan"
    assert found.behind["output_kernel"] == {"operands_kernel", "scan_kernel"}
    assert {name for name, stream in found.stream_of.items() if stream != "caller"} == {passing, "scan_kernel"}
    found = order_of(gla_plans.forward_plan, *inputs, *rest, behind=False)
    assert found.behind[passing] == {"state_kernel"} == found.behind["scan_kernel"], "the last rank's scan"
    found = order_of(gla_plans.forward_plan, *inputs, *rest, before=False)
    assert found.behind["output_kernel"] == {"operands_kernel"}, "waits for no scan"
    found = order_of(gla_plans.backward_plan, *inputs, like, *rest)
    names = found.names
    assert names.count("state_kernel") == 2, "the second, of the chunks, counts"
    assert found.behind["state_kernel"] == {passing} == found.behind["scan_kernel"]
    assert found.stream_of["state_kernel"] == str(streams.LONG)
    assert found.stream_of["scan_kernel"] == str(streams.SCANS)
    assert found.behind["da_kernel"] == {"state_kernel"} and names.index("da_kernel") > names.index("scan_kernel")
    assert found.behind["grad_kernel"] == {"output_kernel"}


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


def switches(group):
    """An argument overrides ALLSCAN_DEBUG; all ranks get an error for a bad value. Attributes used by AllScans and
    plans are read-only."""
    name = "ALLSCAN_DEBUG"
    for values, options, wanted in (
        ({}, {}, False),
        ({name: "0"}, {}, False),
        ({name: "1"}, {}, True),
        ({name: "1"}, dict(debug=False), False),
    ):
        with mock.patch.dict(os.environ, values), allscan.Communicator(group, **options) as comm:
            assert comm.debug is wanted
            with allscan.AllScan(comm, (2, 4, 4)) as scan:
                for thing, field in (
                    (comm, "max_ctas"),
                    (comm, "timeout"),
                    (comm, "algorithm"),
                    (comm, "nodes"),
                    (scan, "max_ctas"),
                ):
                    before = getattr(thing, field)
                    with pytest.raises(AttributeError):
                        setattr(thing, field, 1)
                    assert getattr(thing, field) == before
    rank = 0 if group is None else torch.distributed.get_rank()
    with mock.patch.dict(os.environ, {name: "yes"} if rank == 1 else {}):
        with pytest.raises(ValueError, match=f"rank 1: ValueError: {name} must be 0 or 1, got 'yes'"):
            allscan.Communicator(group)


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
