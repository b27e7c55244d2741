"""Functions of other libraries that launch Triton kernels, as plans: their Python runs a few times only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton import JITFunction

from .launching import aligned, hooked
from .plan import Buffer, Plan
from .streams import capturing

aten = torch.ops.aten
KEPT = 256  # functions and kinds of arguments of one Traced
ATTEMPTS = 6  # to trace one of them
MOST_SUMMED = 16  # numbers of a sum: torch takes no memory of its own for so few

EMPTY = {
    aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default,
    aten.new_empty_strided.default,
}  # fmt: skip
CONSTANTS = int, float, str, type(None), tl.constexpr, tl.dtype
ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}

_one_at_a_time = threading.Lock()  # traces: each watches all launches of its thread


class Traced:
    """``traced(function, **arguments)`` is ``function(**arguments)``, of tensors and constants, in less host time.

    Where fla's Python takes 100 us for a launch, a plan takes 5. The first call with arguments of one kind - tensors of
    these shapes and dtypes, these constants - is as it is: Triton compiles, and autotuners choose. The next ones are
    traced: which kernels are launched, with which grids and constants, on which tensors, and where torch fills or adds
    some. Once two traces in a row are the same, a plan is made of them and held against the function: bit for bit, both
    with all new memory filled with ones before. Only then it takes the function's place.

    So what is not seen - launches that do not go through Triton, tensors that the function keeps - makes no plan, and
    neither does a call that torch operators other than these take part in: such a function is called as it is for ever
    (:meth:`plans` says of which there is one). It may not change its arguments, and what it does may depend on nothing
    but them. Calls outside of GPUs, and with tensors that are not contiguous, are as they are, too.
    """

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._known: dict[tuple, _Calls] = {}

    def __call__(self, function: Callable[..., Any], **arguments: Any) -> Any:
        if not self._cuda:
            return function(**arguments)
        tensors: list[Tensor] = []
        kind: list[Any] = [function]
        for name, x in arguments.items():
            if isinstance(x, Tensor):
                tensors.append(x)
                kind += name, x.shape, x.dtype
            else:
                kind += name, x
        calls = self._known.get(tuple(kind))
        if calls is None:
            if len(self._known) >= KEPT:  # of calls with ever other constants
                self._known.clear()
            self._known[tuple(kind)] = _Calls()
            return function(**arguments)
        return calls(function, arguments, tensors)

    def plans(self) -> dict[str, bool]:
        """Which functions have been traced, and whether they have plans, for all kinds of their arguments."""
        found: dict[str, bool] = {}
        for (function, *_), calls in self._known.items():
            if calls.attempts:
                found[function.__name__] = found.get(function.__name__, True) and calls.accepted
        return found


class _Calls:
    """Of one function, with arguments of one kind."""

    def __init__(self) -> None:
        self.attempts = 0
        self.accepted = False
        self._plan: Plan | None = None
        self._trace: _Trace | None = None  # the last one; with a plan, the one that it was made of
        self._verdict: tuple[Tensor, torch.cuda.Event] | None = None

    def __call__(self, function: Callable[..., Any], arguments: dict[str, Any], tensors: list[Tensor]) -> Any:
        if not self.accepted:
            if capturing():
                return function(**arguments)
            if not self._is_accepted():
                return self._attempt(function, arguments, tensors)
        for x in tensors:
            if not x.is_contiguous():
                return function(**arguments)
        assert self._plan is not None and self._trace is not None
        return self._trace.result_of([*tensors, *self._plan.run(None, *tensors)])

    def _is_accepted(self) -> bool:
        """Asked until there is an answer: the host waits for no GPU here."""
        if self._verdict is None or not self._verdict[1].query():
            return False
        self.accepted, self._verdict = bool(self._verdict[0]), None
        if not self.accepted:
            self._plan = self._trace = None
        return self.accepted

    def _attempt(self, function: Callable[..., Any], arguments: dict[str, Any], tensors: list[Tensor]) -> Any:
        waiting = self._plan is not None or self.attempts >= ATTEMPTS
        if waiting or hooked() or not aligned([x.data_ptr() for x in tensors]):
            return function(**arguments)
        if not _one_at_a_time.acquire(blocking=False):
            return function(**arguments)
        try:
            self.attempts += 1
            trace = _Trace(tensors)
            with trace, _launches_go_to(trace):
                result = function(**arguments)
            trace.returns(result)
            if not trace.refused and trace.is_same(self._trace):
                try:
                    self._plan = plan = trace.plan(tensors)
                    plan.run(None, *tensors)  # by way of Triton, which hands out the compiled kernels
                    with _AllOnes():  # the function, too: it may leave parts of its results as they were
                        wanted, found = trace.made_of(function(**arguments)), plan.run(None, *tensors)
                    self._verdict = _are_same(found, wanted)
                except Exception as error:  # no memory to hold it against the function, for one
                    self._plan, trace.refused = None, f"{type(error).__name__}: {error}"
            trace.forget()
            self._trace = trace
            return result
        finally:
            _one_at_a_time.release()


def _are_same(found: list[Tensor], wanted: list[Tensor]) -> tuple[Tensor, torch.cuda.Event]:
    """(whether they have the same bits, once the event has come)."""
    same = torch.stack([(_bits(a) == _bits(b)).all() for a, b in zip(found, wanted, strict=True)]).all()
    verdict = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=same.is_cuda).copy_(same, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return verdict, event


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes


def _bits(x: Tensor) -> Tensor:
    return x.view(INTEGERS[x.dtype.itemsize])


class _AllOnes(TorchDispatchMode):
    """All bits of new memory are ones: NaN, or a number far off."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if function in EMPTY:
            _bits(made).fill_(-1)
        return made


class _Place(NamedTuple):
    """A tensor of a trace: the number of its memory - first those that the function is given - and its shape."""

    memory: int
    shape: tuple[int, ...]


class _Memory(NamedTuple):
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Step(NamedTuple):
    kernel: Any  # of Triton, or a function (context, *tensors)
    grid: tuple[int, ...] | None
    fixed: tuple[tuple[str, Any], ...]
    places: tuple[_Place, ...]


class _Refused(Exception):
    pass


class _Trace(TorchDispatchMode):
    """Of one call: its steps; see :class:`Traced`."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        self.steps: list[_Step] = []
        self.refused = ""  # why there is no plan of it
        self._memories: dict[int, _Memory] = {}  # by address
        self._kept: list[Tensor] = []  # so that no address comes twice
        self._result: list[_Place | None] = []
        self._alone = False  # whether a tensor is returned, not several
        self._numbers: list[int] = []  # the memories of a plan's tensors
        self._given = len(given)
        for x in given:
            if not x.numel() or not x.is_contiguous() or x.data_ptr() in self._memories:
                self.refused = "arguments without elements, with gaps, or with the same memory"
            self._add(x)

    def _add(self, x: Tensor) -> None:
        self._memories[x.data_ptr()] = _Memory(len(self._kept), tuple(x.shape), x.dtype)
        self._kept.append(x)

    def _place(self, x: Tensor) -> _Place:
        """Of all of a memory."""
        memory = self._memories.get(x.data_ptr())
        if memory is None or memory.dtype != x.dtype or not x.is_contiguous():
            raise _Refused("a tensor that is neither an argument nor made here, or a part of one")
        if x.numel() != self._kept[memory.number].numel():
            raise _Refused("a part of a tensor")
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
            self.refused = self.refused or f"{type(error).__name__}: {error}"

    def launched(self, kernel: Any, grid: Any, args: tuple, options: dict[str, Any]) -> None:
        with self._watching():
            names = kernel.signature.parameters
            bound = kernel.signature.bind(*args, **{name: x for name, x in options.items() if name in names})
            bound.apply_defaults()
            grid = tuple(grid(bound.arguments) if callable(grid) else grid)
            fixed = {name: x for name, x in (bound.arguments | options).items() if not isinstance(x, Tensor)}
            if not all(isinstance(x, CONSTANTS) for x in fixed.values()):
                raise _Refused("an argument of a kernel that is neither a tensor nor a constant")
            self._step(kernel, grid, fixed, [x for x in bound.arguments.values() if isinstance(x, Tensor)])

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        made = function(*args, **kwargs)
        with self._watching():
            if function in EMPTY or function in ZEROS:
                self._add(made)
                if function in ZEROS:
                    self._step(_zero, None, {}, [made])
            elif function is aten.sum.dim_IntList and not kwargs:
                x, dims = args[0], list(args[1])
                if x.numel() > MOST_SUMMED * made.numel():
                    raise _Refused("a sum of many")
                self._add(made)
                self._step(_sum, None, dict(dims=tuple(dims), keepdim=len(args) > 2 and args[2]), [x, made])
            elif function is aten.add_.Tensor and not kwargs and isinstance(args[1], Tensor):
                if self._place(args[0]).memory < self._given:
                    raise _Refused("an argument that is changed")
                self._step(_add, None, {}, args)
            elif not function.is_view:
                raise _Refused(str(function))
        return made

    def returns(self, result: Any) -> None:
        """What the call has returned, a tensor, or tensors and None."""
        with self._watching():
            self._alone = isinstance(result, Tensor)
            self._result = [None if x is None else self._place(x) for x in ([result] if self._alone else result)]

    def is_same(self, other: _Trace | None) -> bool:
        return other is not None and (self.steps, self._result) == (other.steps, other._result)

    def _outputs(self) -> list[_Place]:
        """The places that are returned, each memory once, in the order in which a plan makes them."""
        return [*{x.memory: x for x in self._result if x is not None and x.memory >= self._given}.values()]

    def made_of(self, result: Any) -> list[Tensor]:
        """Those tensors of a result like that of the call."""
        tensors = [result] if self._alone else result
        by_memory = {place.memory: x for place, x in zip(self._result, tensors, strict=True) if place is not None}
        return [by_memory[place.memory] for place in self._outputs()]

    def plan(self, given: list[Tensor]) -> Plan:
        plan = Plan()
        buffers: dict[int, Buffer] = {i: plan.given(x) for i, x in enumerate(given)}
        memories = {memory.number: memory for memory in self._memories.values()}
        for place in self._outputs():
            buffers[place.memory] = plan.output(*place.shape, dtype=memories[place.memory].dtype)
        self._numbers = [*range(len(given)), *(place.memory for place in self._outputs())]
        for place in (place for step in self.steps for place in step.places):
            if place.memory not in buffers:
                memory = memories[place.memory]
                buffers[place.memory] = plan.empty(*memory.shape, dtype=memory.dtype)

        def buffer(place: _Place) -> Buffer:
            whole = buffers[place.memory]
            return whole if whole.shape == place.shape else plan.part(whole, 0, *place.shape)

        for kernel, grid, fixed, places in self.steps:
            if grid is None:
                plan.call(_with(kernel, dict(fixed)), *map(buffer, places), only_launches=True)
            else:
                plan.launch(kernel, grid, *map(buffer, places), **dict(fixed))
        return plan

    def result_of(self, tensors: list[Tensor]) -> Any:
        """The function's result, of its arguments and the plan's outputs."""
        by_memory = dict(zip(self._numbers, tensors))

        def of(place: _Place | None) -> Tensor | None:
            if place is None:
                return None
            x = by_memory[place.memory]
            return x if x.shape == place.shape else x.view(place.shape)

        return of(self._result[0]) if self._alone else tuple(map(of, self._result))

    def forget(self) -> None:
        """The tensors."""
        self._kept.clear()


@contextmanager
def _launches_go_to(trace: _Trace) -> Iterator[None]:
    """Those of this thread, of Triton's kernels: its launch hooks are not told the arguments."""
    original, thread = JITFunction.run, threading.get_ident()

    def run(self, *args, grid, warmup, **options):
        if not warmup and threading.get_ident() == thread:
            trace.launched(self, grid, args, options)
        return original(self, *args, grid=grid, warmup=warmup, **options)

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = original


def _with(function: Callable[..., None], fixed: dict[str, Any]) -> Callable[..., None]:
    return lambda _, *tensors: function(*tensors, **fixed)


def _zero(out: Tensor) -> None:
    out.zero_()


def _sum(x: Tensor, out: Tensor, dims: tuple[int, ...], keepdim: bool) -> None:
    torch.sum(x, dims, keepdim, out=out)


def _add(x: Tensor, y: Tensor) -> None:
    x.add_(y)
