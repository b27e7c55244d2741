"""Functions of other libraries that launch Triton kernels, as plans: their Python runs a few times only."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...bindings.torch_compat import TorchDispatchMode, capturing
from ...bindings.triton_compat import OPTIONS, launchable, launches_watched
from ...launch.graph_cache import Graphs
from ...launch.plan import Buffer, Plan

aten = torch.ops.aten
KEPT = 256  # functions and signatures of one FlaReplay
ATTEMPTS = 6  # to trace one of them
MOST_SUMMED = 16  # numbers of a sum: for more torch adds in another order
UNKNOWN = -1

EMPTY = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.empty_strided.default,
    aten.new_empty_strided.default,
}
CONSTANTS = int, float, str, type(None), tl.constexpr, tl.dtype
ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}

_one_at_a_time = threading.Lock()  # traces: each watches all launches of its thread


class FlaReplay:
    """``traced(function, **arguments)`` is ``function(**arguments)``, of tensors and constants, in less host time.

    Where fla's Python takes 100 us for a launch, a plan takes 5. The first call of one signature - tensors of these
    shapes and dtypes, these constants - runs the function: Triton compiles, and autotuners choose. The next calls
    run it, too, and are traced: which kernels it launches, with which grids and constants, on which tensors, and what
    of torch's it calls: new tensors, with zeros or without, views, sums of up to 16 numbers, ``add_``. Once two traces
    in a row are the same, a plan is made of them and compared with the function. In both all new memory is filled with
    ones (NaN, as floats) before, so that what nobody writes is the same, and what only the function writes is not. If
    the results have the same bits, the plan takes the function's place.

    No plan is made of a function that calls other operators of torch, uses tensors beside its arguments and those that
    it makes, or returns parts of tensors; of one whose kernels do not all go through Triton, unless the comparison
    misses it. ``plans`` says what has one.

    The function may not change its arguments. What it launches may depend on the arguments' shapes, dtypes and
    constants, not on values that it reads from the GPU, nor on settings (torch's default dtype, environment variables).
    It is called as it is outside of GPUs, where gradients are to go through it, with tensors that are not contiguous,
    and with anything else than tensors and constants.

    cuda: whether anything is traced at all. graphs: what plans become, see ``Plan``.
    """

    def __init__(self, cuda: bool, graphs: Graphs | None = None) -> None:
        self._cuda, self._graphs = cuda, graphs
        self._known: dict[tuple, _Calls] = {}  # the one that was called last is last

    def __call__(self, function: Callable[..., Any], **arguments: Any) -> Any:
        if not self._cuda:
            return function(**arguments)
        tensors: list[Tensor] = []
        gradients = torch.is_grad_enabled()
        signature: list[object] = [function, torch.is_autocast_enabled("cuda")]
        for name, x in arguments.items():
            if isinstance(x, Tensor):
                if not x.is_contiguous() or (gradients and x.requires_grad):
                    return function(**arguments)
                tensors.append(x)
                signature += name, x.shape, x.dtype, x.device
            elif isinstance(x, CONSTANTS):
                signature += name, x, x.__class__  # True is 1 is 1.0 for Python
            else:
                return function(**arguments)
        key, known = tuple(signature), self._known
        calls = known.pop(key, None)
        if calls is None and len(known) >= KEPT:
            del known[next(iter(known))]
        known[key] = calls or _Calls(self._graphs)
        return function(**arguments) if calls is None else calls(function, arguments, tensors)

    def plans(self, *others: FlaReplay) -> dict[str, bool]:
        """Which functions have been traced, here or by others, and whether they have plans for all their
        signatures."""
        found: dict[str, bool] = {}
        for traced in (self, *others):
            for (function, *_), calls in [*traced._known.items()]:
                if calls.attempts:
                    found[function.__name__] = found.get(function.__name__, True) and calls.accepted
        return found


class _Calls:
    """Of one function and one signature."""

    def __init__(self, graphs: Graphs | None) -> None:
        self._graphs = graphs
        self.attempts = 0
        self.accepted = False
        self._plan: Plan | None = None
        self._trace: _Trace | None = None  # the last one; with a plan, the one that it was made of
        self._verdict: Tensor | None = None  # on the host

    def __call__(self, function: Callable[..., Any], arguments: dict[str, object], tensors: list[Tensor]) -> Any:
        if not self.accepted:
            if capturing():
                return function(**arguments)
            if not self._is_accepted():
                return self._attempt(function, arguments, tensors)
        assert self._plan is not None and self._trace is not None
        return self._trace.result_of([*tensors, *self._plan.run(None, *tensors)])

    def _is_accepted(self) -> bool:
        """Asked until there is an answer: the host waits for no GPU here. A plan that differs once is given up."""
        on_host = self._verdict
        verdict = UNKNOWN if on_host is None else int(on_host)
        if verdict != UNKNOWN:
            self._verdict = None
            if verdict:
                self.accepted = True
            else:
                self.attempts, self._plan, self._trace = ATTEMPTS, None, None
        return self.accepted

    def _attempt(self, function: Callable[..., Any], arguments: dict[str, object], tensors: list[Tensor]) -> Any:
        addresses = [x.data_ptr() for x in tensors]
        distinct = len({*addresses}) == len(addresses) and all(x.numel() for x in tensors)  # else: which one was it?
        if not distinct or not launchable(addresses) or not _one_at_a_time.acquire(blocking=False):
            return function(**arguments)
        try:
            if self._plan is not None or self.attempts >= ATTEMPTS:
                return function(**arguments)
            self.attempts += 1
            trace = _Trace(tensors)
            try:
                with trace, launches_watched(trace.launched):
                    result = function(**arguments)
            except torch.OutOfMemoryError:  # a trace keeps all that the function makes
                trace.forget()
                return function(**arguments)
            trace.returns(result)
            if not trace.rejected and trace.is_same(self._trace):
                try:
                    self._compare(trace, function, arguments, tensors)
                except Exception as error:  # no memory for a second result, for one
                    self._plan, trace.rejected = None, f"{type(error).__name__}: {error}"
            trace.forget()
            self._trace = trace
            return result
        finally:
            _one_at_a_time.release()

    def _compare(
        self, trace: _Trace, function: Callable[..., Any], arguments: dict[str, object], tensors: list[Tensor]
    ) -> None:
        """Make a plan of the trace; ``_verdict`` becomes 1 when the GPU finds that it gives the same bits, else 0."""
        self._plan = plan = trace.plan(tensors, self._graphs)
        plan.run(None, *tensors)  # by way of Triton, which hands out the compiled kernels
        with _AllOnes():
            wanted, found = trace.outputs_of(function(**arguments)), plan.run(None, *tensors)
        same = torch.stack([(_bits(a) == _bits(b)).all() for a, b in zip(found, wanted, strict=True)]).all()
        verdict = torch.full((), UNKNOWN, dtype=torch.int8, device="cpu", pin_memory=same.is_cuda)
        self._verdict = verdict.copy_(same.to(torch.int8), non_blocking=True)


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes


def _bits(x: Tensor) -> Tensor:
    return x.view(INTEGERS[x.dtype.itemsize])


class _AllOnes(TorchDispatchMode):
    """All bits of new memory are ones: NaN, or a number far off."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None) -> Any:
        output = function(*args, **(kwargs or {}))
        if function in EMPTY:
            _bits(output).fill_(-1)
        return output


class _Place(NamedTuple):
    """A tensor of a trace. memory: a number; the arguments have the first ones."""

    memory: int
    shape: tuple[int, ...]


class _Memory(NamedTuple):
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Step(NamedTuple):
    kernel: Any  # of Triton, or what records the step: a function (plan, *buffers)
    grid: tuple[int, ...] | None
    fixed: tuple[tuple[str, object], ...]
    places: tuple[_Place, ...]


class _Rejected(Exception):
    pass


class _Trace(TorchDispatchMode):
    """Of one call: its steps; see ``FlaReplay``."""

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        self.steps: list[_Step] = []
        self.rejected = ""  # why there is no plan of it
        self._memories: dict[int, _Memory] = {}  # by address
        self._held: list[Tensor] = []  # so that no address comes twice
        self._result: list[_Place | None] = []
        self._alone = False  # whether a tensor is returned, not several
        self._where: list[tuple[int, tuple[int, ...]] | None] = []  # of the result, among a plan's tensors
        self._num_inputs = len(inputs)
        for x in inputs:
            self._add(x)

    def _add(self, x: Tensor) -> None:
        self._memories[x.data_ptr()] = _Memory(len(self._held), tuple(x.shape), x.dtype)
        self._held.append(x)

    def _place(self, x: Tensor) -> _Place:
        """The tensor must be an argument, or one that was made during the trace, whole."""
        memory = self._memories.get(x.data_ptr())
        if memory is None or memory.dtype != x.dtype or not x.is_contiguous():
            raise _Rejected("a tensor that is neither an argument nor made here, or a part of one")
        if x.numel() != self._held[memory.number].numel():
            raise _Rejected("a part of a tensor")
        return _Place(memory.number, tuple(x.shape))

    def _step(self, kernel: Any, grid: Any, fixed: dict[str, Any], tensors: Sequence[Tensor]) -> None:
        places = tuple(self._place(x) for x in tensors)
        self.steps.append(_Step(kernel, grid, tuple(fixed.items()), places))

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """The call goes on as it is, whatever is found."""
        try:
            yield
        except Exception as error:
            self.rejected = self.rejected or f"{type(error).__name__}: {error}"

    def launched(self, kernel: Any, grid: Any, args: tuple, options: dict[str, Any]) -> None:
        if threading.get_ident() != self._thread:
            return
        with self._watching():
            names = kernel.signature.parameters
            bound = kernel.signature.bind(*args, **{name: x for name, x in options.items() if name in names})
            bound.apply_defaults()
            grid = tuple(grid(bound.arguments) if callable(grid) else grid)
            fixed = {name: x for name, x in (bound.arguments | options).items() if not isinstance(x, Tensor)}
            if not all(isinstance(x, CONSTANTS) for x in fixed.values()):
                raise _Rejected("an argument of a kernel that is neither a tensor nor a constant")
            self._step(kernel, grid, fixed, [x for x in bound.arguments.values() if isinstance(x, Tensor)])

    def __torch_dispatch__(self, function, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        output = function(*args, **kwargs)
        with self._watching():
            if function in EMPTY or function in ZEROS:
                self._add(output)
                if function in ZEROS:
                    self._step(_zero, None, {}, [output])
            elif function is aten.sum.dim_IntList and {*kwargs} <= {"dtype"}:
                x, *where = args
                if x.numel() > MOST_SUMMED * output.numel():
                    raise _Rejected("a sum of many")
                self._add(output)
                keep = len(where) > 1 and where[1]
                self._step(_sum, None, dict(dims=tuple(where[0]), keepdim=keep, dtype=output.dtype), [x, output])
            elif function is aten.add_.Tensor and not kwargs and isinstance(args[1], Tensor):
                if self._place(args[0]).memory < self._num_inputs:
                    raise _Rejected("an argument that is changed")
                self._step(_add, None, {}, args)
            elif not function.is_view:
                raise _Rejected(str(function))
        return output

    def returns(self, result: Any) -> None:
        """What the call has returned, a tensor, or tensors and None."""
        with self._watching():
            self._alone = isinstance(result, Tensor)
            if not self._alone and type(result) is not tuple:
                raise _Rejected("a result that is neither a tensor nor a tuple")
            self._result = [None if x is None else self._place(x) for x in ([result] if self._alone else result)]

    def is_same(self, other: _Trace | None) -> bool:
        return other is not None and (self.steps, self._result) == (other.steps, other._result)

    def _outputs(self) -> list[_Place]:
        """The places that are returned, each memory once, in the order in which a plan makes them."""
        return [*{x.memory: x for x in self._result if x is not None and x.memory >= self._num_inputs}.values()]

    def outputs_of(self, result: Any) -> list[Tensor]:
        """Of what another such call has returned: the tensors of ``_outputs``."""
        tensors = [result] if self._alone else result
        by_memory = {place.memory: x for place, x in zip(self._result, tensors, strict=True) if place is not None}
        return [by_memory[place.memory] for place in self._outputs()]

    def plan(self, inputs: list[Tensor], graphs: Graphs | None) -> Plan:
        plan = Plan(graphs)
        buffers: dict[int, Buffer] = {i: plan.input(x) for i, x in enumerate(inputs)}
        memories = {memory.number: memory for memory in self._memories.values()}
        for place in self._outputs():
            buffers[place.memory] = plan.output(*place.shape, dtype=memories[place.memory].dtype)
        order = [*range(len(inputs)), *(place.memory for place in self._outputs())]
        self._where = [None if place is None else (order.index(place.memory), place.shape) for place in self._result]
        for place in (place for step in self.steps for place in step.places):
            if place.memory not in buffers:
                memory = memories[place.memory]
                buffers[place.memory] = plan.scratch(*memory.shape, dtype=memory.dtype)

        def buffer(place: _Place) -> Buffer:
            whole = buffers[place.memory]
            return whole if whole.shape == place.shape else plan.view(whole, 0, *place.shape)

        for kernel, grid, fixed, places in self.steps:
            if grid is None:
                kernel(plan, *map(buffer, places), **dict(fixed))
            else:
                plan.launch(kernel, grid, *map(buffer, places), **dict.fromkeys(OPTIONS) | dict(fixed))
        return plan

    def result_of(self, tensors: list[Tensor]) -> Any:
        """The function's result, of its arguments and the plan's outputs."""
        found: list[Tensor | None] = []
        for where in self._where:
            x = None if where is None else tensors[where[0]]
            found.append(x if x is None or where is None or x.shape == where[1] else x.view(where[1]))
        return found[0] if self._alone else tuple(found)

    def forget(self) -> None:
        """The tensors."""
        self._held.clear()


# What is recorded in place of torch's operators: launches, so that plans become graphs. Other sums and additions than
# fla's are left to torch, and such a plan becomes none.


def _zero(plan: Plan, out: Buffer) -> None:
    plan.zero(out)


def _sum(plan: Plan, x: Buffer, out: Buffer, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype) -> None:
    first = sorted(d % len(x.shape) for d in dims) == [*range(len(dims))]
    if first and dims and x.dtype == out.dtype == torch.float32:
        count = math.prod(out.shape)
        N = math.prod(x.shape[: len(dims)])
        plan.launch(first_sum_kernel, (triton.cdiv(count, 1024),), x, out, count=count, N=N, BLOCK=1024)
    else:
        plan.call_python(partial(_torch_sum, dims, keepdim, dtype), x, out)


def _add(plan: Plan, x: Buffer, y: Buffer) -> None:
    if x.shape == y.shape and x.dtype == y.dtype == torch.float32:
        count = math.prod(x.shape)
        plan.launch(add_kernel, (triton.cdiv(count, 1024),), x, y, count=count, BLOCK=1024)
    else:
        plan.call_python(_torch_add, x, y)


def _torch_sum(dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype, _: object, x: Tensor, out: Tensor) -> None:
    torch.sum(x, dims, keepdim, dtype=dtype, out=out)


def _torch_add(_: object, x: Tensor, y: Tensor) -> None:
    x.add_(y)


@triton.jit(do_not_specialize=["count"])
def first_sum_kernel(x, out, count, N: tl.constexpr, BLOCK: tl.constexpr):
    """out [count] = the sum of x [N, count] over N, in the order of torch's: four sums of every fourth, then these."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    total = tl.zeros([BLOCK], tl.float32)
    for first in tl.static_range(4):
        part = tl.zeros([BLOCK], tl.float32)
        for n in tl.static_range(first, N, 4):
            part += tl.load(x + n * count.to(tl.int64) + i, mask=inside, other=0.0)
        total += part
    tl.store(out + i, total, mask=inside)


@triton.jit(do_not_specialize=["count"])
def add_kernel(x, y, count, BLOCK: tl.constexpr):
    """x += y, of ``count`` elements."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    tl.store(x + i, tl.load(x + i, mask=inside) + tl.load(y + i, mask=inside), mask=inside)
