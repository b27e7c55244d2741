"""Launches in their order, recorded once and run for many calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .graphs import Graphs
from .launching import Launch, aligned, hooked

WORD = 4  # bytes of float32, of which the memory of a run is made
ALIGNMENT = 64  # words
LONG, SHORT, TABLE, FIRST_TENSOR = range(4)  # memories of a run; from the last on what it is given, then its outputs


class Buffer(NamedTuple):
    """Stands for a tensor that each run has: ``offset`` bytes into one of the run's memories. Of a table the offset is
    the address."""

    number: int  # of the plan's buffers
    memory: int
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Plan:
    """Records what is launched on which stream, and with which memory; :meth:`run` does it for a call's tensors.

        plan = Plan()
        x = plan.given(like_x)                              # the tensors of each run, in this order
        t = plan.empty(chunks, H, K)                        # memory that a run takes
        plan.launch(first_kernel, grid, x, t, H=H, num_warps=4)
        y = plan.output_like(x)
        plan.launch(second_kernel, grid, t, y, H=H)
        ...
        [y] = plan.run(None, x)

    All runs have contiguous tensors of the same shapes and dtypes. With compiled kernels a run is two allocations, the
    addresses in them, and launches; the second allocation is given back by :meth:`free_short`. Launches between two
    changes of memory are one CUDA graph where the same addresses have come before, see :class:`allscan.graphs.Graphs`.
    In the interpreter, and where a :class:`Launch` has to go through Triton, every buffer is a tensor of its own.

    at_once: outputs are made before all launches, and short-lived buffers live to the end: no memory changes between
    launches, so that they are one graph. For runs that take so little memory that time counts more.
    """

    def __init__(self, at_once: bool = False) -> None:
        self.at_once = at_once
        self.buffers: list[Buffer] = []
        self.divided: set[int] = set()  # buffers of which there are parts
        self.tables: dict[int, Tensor] = {}  # by number of the buffer
        self.words = [0, 0]  # of the memories LONG and SHORT
        self._ready = False
        self._tensors = 0  # that are given, and outputs
        self._launches: list[Launch] = []
        self._forked: Part | None = None
        self._parts = [Part()]

    def given(self, like: Tensor) -> Buffer:
        """The next tensor of a run; all come before anything else is recorded."""
        assert not (self._parts[-1].steps or self._parts[-1].makes)
        return self._tensor(tuple(like.shape), like.dtype)

    def part(self, whole: Buffer, offset: int, *shape: int, dtype: torch.dtype | None = None) -> Buffer:
        """Of a given tensor or an empty one, from element ``offset`` on; of a given one also as another ``dtype``. Two
        parts are the same or do not overlap: where buffers are tensors of their own, so are parts of an empty one."""
        self.divided.add(whole.number)
        return self._buffer(whole.memory, whole.offset + offset * whole.dtype.itemsize, shape, dtype or whole.dtype)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32, short: bool = False) -> Buffer:
        """Uninitialised, until the end of a run; ``short``: until :meth:`free_short`."""
        memory = SHORT if short and not self.at_once else LONG
        offset, words = self.words[memory], max(1, -(-math.prod(shape) * dtype.itemsize // WORD))
        self.words[memory] += -(-words // ALIGNMENT) * ALIGNMENT
        return self._buffer(memory, offset * WORD, shape, dtype)

    def table(self, tensor: Tensor) -> Buffer:
        """A tensor that is the same in all runs."""
        buffer = self._buffer(TABLE, tensor.data_ptr(), tuple(tensor.shape), tensor.dtype)
        self.tables[buffer.number] = tensor
        return buffer

    def output(self, *shape: int, dtype: torch.dtype = torch.float32) -> Buffer:
        """A new tensor, made here, which a run returns."""
        return self._output(None, shape, dtype)

    def output_like(self, x: Buffer) -> Buffer:
        """The same, with the shape and dtype of ``x``, which is given."""
        assert x.memory >= FIRST_TENSOR
        return self._output(x.memory - FIRST_TENSOR, x.shape, x.dtype)

    def _output(self, like: int | None, shape: tuple[int, ...], dtype: torch.dtype) -> Buffer:
        if self._parts[-1].steps and not self.at_once:
            self._parts.append(Part())
        self._parts[-1].makes.append((like, shape, dtype))
        return self._tensor(shape, dtype)

    def _tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Buffer:
        self._tensors += 1
        return self._buffer(FIRST_TENSOR + self._tensors - 1, 0, shape, dtype)

    def _buffer(self, memory: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Buffer:
        buffer = Buffer(len(self.buffers), memory, offset, shape, dtype)
        self.buffers.append(buffer)
        return buffer

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Buffer, **fixed: Any) -> None:
        """``kernel[grid](*args, **fixed)``, on the stream that is current then."""
        launch = Launch(kernel, grid, **fixed)
        self.step(launch, args, lambda addresses: launch.at(addresses), launch)

    def step(
        self, launch: Launch, buffers: Sequence[Buffer], at: Callable[[list[int]], Any], call: Callable[..., Any],
        check: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """``launch`` in another way: ``at(addresses)`` of the buffers, once it is ready, or ``call(*tensors)``.
        ``check()``, before the launches of each run, may raise."""
        places, numbers = [(x.memory, x.offset) for x in buffers], [x.number for x in buffers]

        def step(run: Run) -> None:
            if run.places is None:
                call(*(run.tensor(n) for n in numbers))
            else:
                at([run.places[memory] + offset for memory, offset in places])

        self._launches.append(launch)
        part = self._parts[-1]
        part.steps.append(step)
        part.launches += 1
        part.checks += [] if check is None else [check]

    def call(self, function: Callable[..., None], *buffers: Buffer, only_launches: bool = False) -> None:
        """``function(context, *tensors)``, with the context of the run. ``only_launches``: a CUDA graph of what it
        launches does the same again."""
        numbers = [x.number for x in buffers]
        self._parts[-1].steps.append(lambda run: function(run.context, *(run.tensor(n) for n in numbers)))
        self._parts[-1].only_launches &= only_launches

    @contextmanager
    def beside(self, stream: Callable[[Any], AbstractContextManager[Callable[[], None]]]) -> Iterator[None]:
        """What is recorded inside runs inside of ``stream(context)``, which gives a function that joins it. May be
        inside of another one, and is joined there then."""
        self._forked = self._parts[-1]
        self._forked.steps.append(lambda run: run.enter(stream(run.context)))
        yield
        self._parts[-1].steps.append(lambda run: run.leave())

    def join(self) -> None:
        """From here on the current stream has what was recorded beside it."""
        assert self._forked is self._parts[-1], "no change of memory between beside() and join(): a part is one graph"
        self._parts[-1].steps.append(lambda run: run.join())

    def free_short(self) -> None:
        """Give the memory of short-lived buffers back."""
        if not self.at_once:
            self._parts.append(Part(frees_short=True))

    def run(self, context: Any, *given: Tensor) -> list[Tensor]:
        """All parts, with the tensors that :meth:`given` has announced. Returns those of :meth:`output`. Should a step
        raise, what runs beside is joined first: it uses memory that is given back now."""
        run = Run(self, context, given)
        for part in self._parts:
            part(run)
        return run.tensors[len(given) :]

    def ready(self) -> bool:
        """Whether all its kernels are compiled."""
        if not self._ready:
            self._ready = all(launch.ready for launch in self._launches)
        return self._ready


class Part:
    """Of a plan: a change of memory, and the launches up to the next one, and on which stream they are."""

    def __init__(self, frees_short: bool = False) -> None:
        self.frees_short = frees_short
        self.makes: list[tuple[int | None, tuple[int, ...], torch.dtype]] = []  # outputs; like which given tensor
        self.steps: list[Callable[[Run], None]] = []
        self.checks: list[Callable[[], None]] = []
        self.launches = 0
        self.only_launches = True
        self._graphs = Graphs()

    def __call__(self, run: Run) -> None:
        tensors, places = run.tensors, run.places
        if self.frees_short:
            run.free_short()
        for like, shape, dtype in self.makes:
            out = torch.empty_like(tensors[like]) if like is not None else tensors[0].new_empty(shape, dtype=dtype)
            tensors.append(out)
            if places is not None:
                places.append(out.data_ptr())
        for check in self.checks:
            check()
        if places is not None and self.only_launches and self.launches > 1:
            self._graphs.launch(run.device, tuple(places), self._launch, run)
        else:
            self._launch(run)

    def _launch(self, run: Run) -> None:
        try:
            for step in self.steps:
                step(run)
        except BaseException:
            run.abandon()
            raise


class Run:
    """Memory and streams of one run."""

    __slots__ = "_plan", "context", "tensors", "_beside", "_joins", "_empty", "places", "_memory", "device"

    def __init__(self, plan: Plan, context: Any, given: tuple[Tensor, ...]) -> None:
        self._plan, self.context = plan, context
        self.tensors = [*given]  # and outputs, once they are made
        self._beside: list[AbstractContextManager] = []  # streams that it is in, the innermost last
        self._joins: list[Callable[[], None]] = []  # what joins those that it is in or has left, the last entered last
        self.places: list[int] | None = None  # where memories are; None where every buffer is a tensor
        addresses = [x.data_ptr() for x in given]
        if not (plan.ready() and aligned(addresses)) or hooked():
            self._empty: dict[tuple[int, int], Tensor] = {}  # by memory and offset
            for buffer in plan.buffers:  # here: memory belongs to the stream that is current when it is taken
                if buffer.memory in (LONG, SHORT) and buffer.number not in plan.divided:
                    self.tensor(buffer.number)
            return
        long, short = plan.words
        empty, self.device = given[0].new_empty, given[0].get_device()
        self._memory: list[Any] = [empty(n, dtype=torch.float32) if n else None for n in (long, short)]
        self.places = [self._memory[LONG].data_ptr() if long else 0, self._memory[SHORT].data_ptr() if short else 0, 0]
        self.places += addresses

    def tensor(self, number: int) -> Tensor:
        """The buffer with this number."""
        _, memory, offset, shape, dtype = self._plan.buffers[number]
        if memory == TABLE:
            return self._plan.tables[number]
        if memory >= FIRST_TENSOR:
            whole = self.tensors[memory - FIRST_TENSOR]
            if whole.shape == shape and whole.dtype == dtype:
                return whole  # an output as it is: of a view, torch forbids its caller changes in place
        elif self.places is None:
            found = self._empty.get((memory, offset))
            if found is None:
                found = self._empty[memory, offset] = self.tensors[0].new_empty(shape, dtype=dtype)
            return found if found.shape == shape else found.view(shape)
        else:
            whole = self._memory[memory]
        whole = whole if dtype == whole.dtype else whole.view(dtype)
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        return whole.as_strided(shape, strides, whole.storage_offset() + offset // dtype.itemsize)

    def enter(self, beside: AbstractContextManager[Callable[[], None]]) -> None:
        self._joins.append(beside.__enter__())
        self._beside.append(beside)

    def leave(self) -> None:
        self._beside.pop().__exit__(None, None, None)

    def join(self) -> None:
        self._joins.pop()()

    def free_short(self) -> None:
        if self.places is not None:
            self._memory[SHORT] = None
        else:
            for place in [place for place in self._empty if place[0] == SHORT]:
                del self._empty[place]

    def abandon(self) -> None:
        """After an error in a step: leave the streams that it is in and join all, inner ones first, whatever fails."""
        if self._beside or self._joins:
            try:
                self.leave() if self._beside else self.join()
            finally:
                self.abandon()
