"""Launch sequences that are recorded once and run by many calls."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..bindings.triton_compat import launchable
from .compiled_kernel import Launch

WORD = 4  # bytes of float32, the dtype of a run's scratch memory
ALIGNMENT = 256  # bytes
OWN, TABLE = -2, -1  # indices of a run's memories: scratch, constants; after inputs and outputs

Stored = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a stored tensor


class Buffer(NamedTuple):
    """Placeholder for a tensor of each run, at ``offset`` bytes in one of the run's memories. The offset of a constant
    (memory TABLE) is its address."""

    number: int  # index in the plan's buffers
    memory: int
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def with_places(plan: Plan, buffers: Sequence[Buffer | None]) -> tuple[Plan, list[int | None]]:
    """(The plan, the place of each of the output ``buffers`` among the outputs of a run, None for None)."""
    places = sorted(x.number for x in buffers if x is not None)
    return plan, [x if x is None else places.index(x.number) for x in buffers]


def words_of(stored: Sequence[Stored]) -> list[int]:
    """Words of each of several tensors in one buffer, rounded up to ALIGNMENT."""
    return [_round_up(math.prod(shape) * dtype.itemsize) // WORD for shape, dtype in stored]


class Plan:
    """Records launches with their streams and buffers; ``run`` makes them with the tensors of a call.

        plan = Plan()
        x = plan.input(like_x)                              # the tensors of each run, in this order
        y = plan.output_like(x)
        t = plan.scratch(chunks, H, K)                        # memory that a run takes
        plan.launch(first_kernel, grid, x, t, H=H, num_warps=4)
        plan.launch(second_kernel, grid, t, y, H=H)
        ...
        [y] = plan.run(None, x)

    All runs have contiguous tensors of the same shapes and dtypes. With compiled kernels, a run makes one allocation
    for each output and one for all scratch buffers, computes addresses, and launches. In the interpreter, and if a
    ``Launch`` has to go through Triton, every buffer is a separate tensor, except views, and scratch in the memory of
    an output.
    """

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.wholes: dict[int, Buffer] = {}  # by number of a view of scratch memory: the buffer that it is a view of
        self.tables: dict[int, Tensor] = {}  # constants by number of the buffer
        self.named: dict[str, Buffer] = {}  # for functions that record parts of the plan
        self.bytes = 0  # of a run's scratch memory
        self.new_outputs: list[tuple[int | None, tuple[int, ...], torch.dtype]] = []  # like which input, shape, dtype
        self._ready = False
        self._num_inputs = 0
        self._lent: dict[int, int] = {}  # bytes used by scratch buffers in an output, by number of the output
        self._launches: list[Launch] = []
        self._steps: list[Callable[[PlanExecution], object]] = []
        self._checks: list[Callable[[], None]] = []

    def input(self, like: Tensor) -> Buffer:
        """The next input tensor of a run. All inputs are declared before anything else is recorded."""
        assert not (self._steps or self.new_outputs)
        self._num_inputs += 1
        return self._buffer(self._num_inputs - 1, 0, tuple(like.shape), like.dtype)

    def view(self, whole: Buffer, offset: int, *shape: int, dtype: torch.dtype | None = None) -> Buffer:
        """View of a buffer that is no constant, from element ``offset`` on, also with another ``dtype``."""
        assert whole.memory != TABLE
        view = self._buffer(whole.memory, whole.offset + offset * whole.dtype.itemsize, shape, dtype or whole.dtype)
        if whole.memory == OWN:
            self.wholes[view.number] = whole
        return view

    def views(self, whole: Buffer, stored: Sequence[Stored]) -> list[Buffer]:
        """Views of tensors that lie one after the other in a buffer of words: see ``words_of``."""
        places = itertools.accumulate(words_of(stored), initial=0)
        return [self.view(whole, at, *shape, dtype=dtype) for at, (shape, dtype) in zip(places, stored)]

    def scratch(self, *shape: int, dtype: torch.dtype = torch.float32, before: Sequence[Buffer] = ()) -> Buffer:
        """An uninitialised buffer that lives until the end of a run. ``before``: outputs that are first written after
        the buffer's last use; the buffer uses the memory of one of them if it fits."""
        size = max(1, math.prod(shape) * dtype.itemsize)
        for output in before:
            used = self._lent.get(output.number, 0)
            if used + size <= math.prod(output.shape) * output.dtype.itemsize:
                self._lent[output.number] = _round_up(used + size)
                return self._buffer(output.memory, used, shape, dtype)
        offset, self.bytes = self.bytes, self.bytes + _round_up(size)
        return self._buffer(OWN, offset, shape, dtype)

    def constant(self, tensor: Tensor) -> Buffer:
        """A buffer for ``tensor``, which all runs use."""
        buffer = self._buffer(TABLE, tensor.data_ptr(), tuple(tensor.shape), tensor.dtype)
        self.tables[buffer.number] = tensor
        return buffer

    def output(self, *shape: int, dtype: torch.dtype = torch.float32) -> Buffer:
        """A buffer for a new tensor that a run returns."""
        return self._output(None, shape, dtype)

    def output_like(self, x: Buffer) -> Buffer:
        """An output with the shape and dtype of ``x``, an input."""
        assert 0 <= x.memory < self._num_inputs
        return self._output(x.memory, x.shape, x.dtype)

    def _output(self, like: int | None, shape: tuple[int, ...], dtype: torch.dtype) -> Buffer:
        self.new_outputs.append((like, shape, dtype))
        return self._buffer(self._num_inputs + len(self.new_outputs) - 1, 0, shape, dtype)

    def _buffer(self, memory: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Buffer:
        buffer = Buffer(len(self.buffers), memory, offset, shape, dtype)
        self.buffers.append(buffer)
        return buffer

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Buffer | None, **fixed: Any) -> None:
        """Record ``kernel[grid](*args, **fixed)`` on the stream that is current in the run. An empty grid records
        nothing. None stands for a pointer that the kernel does not use."""
        if 0 in grid:
            return
        nothing = {name: None for name, x in zip(kernel.arg_names, args) if x is None}
        launch = Launch(kernel, grid, **nothing, **fixed)
        self.launch_with(launch, [x for x in args if x is not None], launch)

    def launch_with(
        self,
        launch: Launch,
        buffers: Sequence[Buffer],
        call: Callable[..., object],
        arguments: Callable[[list[int]], Sequence[Any]] = list,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Record ``launch`` with its own way to pass arguments: ``call(*tensors)`` makes it, or, once the kernel is
        compiled, ``launch.at(arguments(addresses))``. ``check()`` runs before each run's launches and may raise."""
        places, numbers = [(x.memory, x.offset) for x in buffers], [x.number for x in buffers]

        def step(run: PlanExecution) -> None:
            if run.places is None:
                call(*(run.tensor(n) for n in numbers))
            else:
                launch.at(arguments([run.places[memory] + offset for memory, offset in places]))

        self._launches.append(launch)
        self._steps.append(step)
        self._checks += [] if check is None else [check]

    def call_python(self, function: Callable[..., None], *buffers: Buffer) -> None:
        """Record the call ``function(context, *tensors)``, with the context of the run."""
        numbers = [x.number for x in buffers]
        self._steps.append(lambda run: function(run.context, *(run.tensor(n) for n in numbers)))

    @contextmanager
    def side_stream(self, stream: Callable[[Any], AbstractContextManager[Callable[[], None]]]) -> Iterator[None]:
        """Record the steps in the with block on the side stream ``stream(context)``, a context manager that returns a
        function to join it. May be nested; ``join`` then belongs in the outer block."""
        self._steps.append(lambda run: run.enter(stream(run.context)))
        yield
        self._steps.append(lambda run: run.leave())

    def join(self) -> None:
        """Record that the current stream waits for the side stream that was entered last and is not joined yet."""
        self._steps.append(lambda run: run.join())

    def run(self, context: Any, *inputs: Tensor) -> list[Tensor]:
        """Run all steps. ``inputs``: tensors in the order of ``input``. Returns the outputs in the order of ``output``
        and ``output_like``."""
        new_empty, tensors = inputs[0].new_empty, [*inputs]
        for like, shape, dtype in self.new_outputs:
            tensors.append(new_empty(shape, dtype=dtype) if like is None else torch.empty_like(inputs[like]))
        places = [x.data_ptr() for x in tensors]
        for check in self._checks:
            check()
        if not ((self._ready or self.ready()) and launchable(places)):
            self._launch(context, tensors)
            return tensors[len(inputs) :]
        memory = new_empty(self.bytes // WORD, dtype=torch.float32)
        places += memory.data_ptr(), 0
        self._launch(context, tensors, memory, places)
        return tensors[len(inputs) :]

    def _launch(self, *args: Any) -> None:
        """Run the steps one by one. If a step raises, join the side streams first: their kernels use memory that is
        freed when the error propagates."""
        run = PlanExecution(self, *args)
        try:
            for step in self._steps:
                step(run)
        except BaseException:
            run.abandon()
            raise

    def ready(self) -> bool:
        """Whether all kernels of the plan are compiled."""
        if not self._ready:
            self._ready = all(launch.ready for launch in self._launches)
        return self._ready


def _round_up(size: int) -> int:
    """The least multiple of ALIGNMENT that is not below ``size``."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class PlanExecution:
    """Memory and streams of one run.

    tensors: the run's inputs and outputs. places: base addresses of these, of scratch memory and of constants (0); None
    if buffers are separate tensors, see Plan."""

    __slots__ = "_plan", "context", "_tensors", "_memory", "places", "_side_streams", "_joins", "_scratch"

    def __init__(
        self,
        plan: Plan,
        context: Any,
        tensors: list[Tensor],
        memory: Tensor | None = None,
        places: list[int] | None = None,
    ) -> None:
        self._plan, self.context, self._tensors, self._memory, self.places = plan, context, tensors, memory, places
        self._side_streams: list[AbstractContextManager[object]] = []  # entered side streams, the innermost last
        self._joins: list[Callable[[], None]] = []  # of streams not joined yet, in order of entry
        self._scratch: dict[int, Tensor] = {}  # scratch tensors by number, if they are separate
        if places is None:
            for buffer in plan.buffers:  # here: the allocator assigns memory to the stream that is current now
                if buffer.memory == OWN and buffer.number not in plan.wholes:
                    self.tensor(buffer.number)

    def tensor(self, number: int) -> Tensor:
        """The tensor of the buffer with this number."""
        _, memory, offset, shape, dtype = self._plan.buffers[number]
        if memory == TABLE:
            return self._plan.tables[number]
        if memory >= 0:
            whole = self._tensors[memory]
            if whole.shape == shape and whole.dtype == dtype:
                return whole  # not a view: torch forbids a caller to change such an output in place
        elif self._memory is None:
            if number not in self._plan.wholes:
                if number not in self._scratch:
                    self._scratch[number] = self._tensors[0].new_empty(shape, dtype=dtype)
                return self._scratch[number]
            of = self._plan.wholes[number]
            whole, offset = self.tensor(of.number), offset - of.offset
        else:
            whole = self._memory
        start, rest = divmod(int(whole.storage_offset()) * whole.itemsize + offset, dtype.itemsize)
        if rest:  # the caller's saved_tensors_hook has moved the tensor
            raise ValueError(f"a tensor of {dtype} is not aligned to its itemsize, {dtype.itemsize} bytes")
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        return whole.new_empty(0, dtype=dtype).set_(whole.untyped_storage(), start, shape, strides)

    def enter(self, side: AbstractContextManager[Callable[[], None]]) -> None:
        self._joins.append(side.__enter__())
        self._side_streams.append(side)

    def leave(self) -> None:
        self._side_streams.pop().__exit__(None, None, None)

    def join(self) -> None:
        self._joins.pop()()

    def abandon(self) -> None:
        """After an error in a step: leave and join all side streams, inner ones first, even if one of them fails."""
        if self._side_streams or self._joins:
            try:
                self.leave() if self._side_streams else self.join()
            finally:
                self.abandon()
