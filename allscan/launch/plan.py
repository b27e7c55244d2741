"""Launches in their order, recorded once and run for many calls."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..bindings.triton_compat import launchable
from .compiled_kernel import Launch
from .graph_cache import Builder, Graphs
from .streams import Side

WORD = 4  # bytes of float32, of which the memory of a run is made
ALIGNMENT = 256  # bytes
OWN, TABLE = -2, -1  # memories of a run, behind its inputs and outputs

_numbers = itertools.count(1)


class Buffer(NamedTuple):
    """Stands for a tensor that each run has: ``offset`` bytes into one of the run's memories. Of a table the offset is
    the address."""

    number: int  # of the plan's buffers
    memory: int
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Plan:
    """Records what is launched on which stream, and with which memory; ``run`` does it for a call's tensors.

        plan = Plan()
        x = plan.input(like_x)                              # the tensors of each run, in this order
        y = plan.output_like(x)
        t = plan.scratch(chunks, H, K)                        # memory that a run takes
        plan.launch(first_kernel, grid, x, t, H=H, num_warps=4)
        plan.launch(second_kernel, grid, t, y, H=H)
        ...
        [y] = plan.run(None, x)

    All runs have contiguous tensors of the same shapes and dtypes. With compiled kernels a run is an allocation for
    each output and one for all else, the addresses in them, and launches; those are one CUDA graph where the same
    addresses have come before and nothing else is recorded, see ``allscan.launch.graph_cache.Graphs``. In the
    interpreter, and where a ``Launch`` has to go through Triton, every buffer is a tensor.

    graphs: those of the communicator; None: nothing becomes a graph.
    """

    def __init__(self, graphs: Graphs | None = None) -> None:
        self.buffers: list[Buffer] = []
        self.divided: set[int] = set()  # empty buffers of which there are parts
        self.tables: dict[int, Tensor] = {}  # by number of the buffer
        self.bytes = 0  # of a run's own memory
        self.new_outputs: list[tuple[int | None, tuple[int, ...], torch.dtype]] = []  # like which input, shape, dtype
        self._ready = False
        self._num_inputs = 0
        self._lent: dict[int, int] = {}  # bytes of outputs in which empty buffers lie, by number of the output
        self._launches: list[Launch] = []
        self._steps: list[Callable[[PlanExecution], object]] = []
        self._checks: list[Callable[[], None]] = []
        self._builds: list[Callable[[Builder], None]] | None = []  # of the steps; None where one is more than nodes
        self._graphs, self.number, self.num_nodes, self.failures = graphs, next(_numbers), 0, 0
        if graphs is not None:
            weakref.finalize(self, graphs.forget, self.number).atexit = False

    def input(self, like: Tensor) -> Buffer:
        """The next tensor of a run; all come before anything else is recorded."""
        assert not (self._steps or self.new_outputs)
        self._num_inputs += 1
        return self._buffer(self._num_inputs - 1, 0, tuple(like.shape), like.dtype)

    def view(self, whole: Buffer, offset: int, *shape: int, dtype: torch.dtype | None = None) -> Buffer:
        """Of an input or a scratch buffer, from element ``offset`` on; of an input also as another ``dtype``. Two
        parts are the same or do not overlap: where buffers are tensors of their own, so are parts of an empty one."""
        self.divided.add(whole.number)
        return self._buffer(whole.memory, whole.offset + offset * whole.dtype.itemsize, shape, dtype or whole.dtype)

    def scratch(self, *shape: int, dtype: torch.dtype = torch.float32, before: Sequence[Buffer] = ()) -> Buffer:
        """Uninitialised, until the end of a run. ``before``: outputs that are written only when this is not used any
        more; it lies in one of them, if there is room."""
        size = max(1, math.prod(shape) * dtype.itemsize)
        for output in before:
            used = self._lent.get(output.number, 0)
            if used + size <= math.prod(output.shape) * output.dtype.itemsize:
                self._lent[output.number] = _aligned(used + size)
                return self._buffer(output.memory, used, shape, dtype)
        offset, self.bytes = self.bytes, self.bytes + _aligned(size)
        return self._buffer(OWN, offset, shape, dtype)

    def constant(self, tensor: Tensor) -> Buffer:
        """A tensor that is the same in all runs."""
        buffer = self._buffer(TABLE, tensor.data_ptr(), tuple(tensor.shape), tensor.dtype)
        self.tables[buffer.number] = tensor
        return buffer

    def output(self, *shape: int, dtype: torch.dtype = torch.float32) -> Buffer:
        """A new tensor, which a run returns."""
        return self._output(None, shape, dtype)

    def output_like(self, x: Buffer) -> Buffer:
        """The same, with the shape and dtype of ``x``, an input."""
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
        """``kernel[grid](*args, **fixed)``, on the stream that is current then; nothing for an empty grid. None is for
        pointers that the kernel does without."""
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
        """``launch`` in another way: ``call(*tensors)``, or once it is ready with ``given(addresses)`` of the buffers.
        ``check()``, before the launches of each run, may raise."""
        places, numbers = [(x.memory, x.offset) for x in buffers], [x.number for x in buffers]

        def step(run: PlanExecution) -> None:
            if run.places is None:
                call(*(run.tensor(n) for n in numbers))
            else:
                launch.at(arguments([run.places[memory] + offset for memory, offset in places]))

        def build(builder: Builder) -> None:
            builder.kernel(launch.node(arguments([builder.places[memory] + offset for memory, offset in places])))

        self._launches.append(launch)
        self._add(step, build, 1)
        self._checks += [] if check is None else [check]

    def zero(self, x: Buffer) -> None:
        """Fill a buffer with zeros."""
        _, memory, offset, shape, dtype = x
        nbytes = math.prod(shape) * dtype.itemsize
        if not nbytes:  # of a rank without tokens; a node of no bytes is rejected
            return
        self._add(
            lambda run: run.tensor(x.number).zero_(),
            lambda builder: builder.zeros(builder.places[memory] + offset, nbytes),
            1,
        )

    def call_python(self, function: Callable[..., None], *buffers: Buffer) -> None:
        """``function(context, *tensors)``, with the context of the run."""
        numbers = [x.number for x in buffers]
        self._add(lambda run: function(run.context, *(run.tensor(n) for n in numbers)))

    def _add(
        self,
        step: Callable[[PlanExecution], object],
        build: Callable[[Builder], None] | None = None,
        num_nodes: int = 0,
    ) -> None:
        self._steps.append(step)
        self.num_nodes += num_nodes
        if build is None:
            self._builds = None
        elif self._builds is not None:
            self._builds.append(build)

    @contextmanager
    def side_stream(self, stream: Callable[[Any], AbstractContextManager[Callable[[], None]]]) -> Iterator[None]:
        """What is recorded inside runs inside of ``stream(context)``, which gives a function that joins it. May be
        inside of another one, and is joined there then."""
        self._add(
            lambda run: run.enter(stream(run.context)),
            lambda builder: builder.enter(_priority(stream(builder.context))),
        )
        yield
        self._add(lambda run: run.leave(), lambda builder: builder.leave())

    def join(self) -> None:
        """From here on the current stream has what was recorded on side streams."""
        self._add(lambda run: run.join(), lambda builder: builder.join())

    def run(self, context: Any, *inputs: Tensor) -> list[Tensor]:
        """All steps, with ``inputs`` as announced by ``input``. Returns those of ``output``."""
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
        if self._graphs is not None and self._builds is not None and self.num_nodes > 1:
            self._graphs.launch(inputs[0].get_device(), self, places, self._launch, context, tensors, memory, places)
        else:
            self._launch(context, tensors, memory, places)
        return tensors[len(inputs) :]

    def build(self, builder: Builder) -> None:
        """Add the nodes of a run to a graph."""
        for build in self._builds or ():
            build(builder)

    def _launch(self, *args: Any) -> None:
        """Should a step raise, side streams are joined first: it uses memory that is given back then."""
        run = PlanExecution(self, *args)
        try:
            for step in self._steps:
                step(run)
        except BaseException:
            run.abandon()
            raise

    def ready(self) -> bool:
        """Whether all its kernels are compiled."""
        if not self._ready:
            self._ready = all(launch.ready for launch in self._launches)
        return self._ready


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _priority(side: object) -> int:
    """Of a side stream, as Streams.side has made it. Another one may order its launches in ways of its own."""
    if not isinstance(side, Side):
        raise NotImplementedError(f"a stream of {type(side).__name__}")
    return side.priority


class PlanExecution:
    """Memory and streams of one run whose launches are made one by one.

    tensors: its inputs and outputs. places: where these, its own memory and tables are; None where every
    buffer is a tensor."""

    __slots__ = "_plan", "context", "_tensors", "_memory", "places", "_side_streams", "_joins", "_empty"

    def __init__(
        self,
        plan: Plan,
        context: Any,
        tensors: list[Tensor],
        memory: Tensor | None = None,
        places: list[int] | None = None,
    ) -> None:
        self._plan, self.context, self._tensors, self._memory, self.places = plan, context, tensors, memory, places
        self._side_streams: list[AbstractContextManager[object]] = []  # streams that it is in, the innermost last
        self._joins: list[Callable[[], None]] = []  # what joins those that it is in or has left, the last entered last
        self._empty: dict[int, Tensor] = {}  # by offset
        if places is None:
            for buffer in plan.buffers:  # here: memory belongs to the stream that is current when it is taken
                if buffer.memory == OWN and buffer.number not in plan.divided:
                    self.tensor(buffer.number)

    def tensor(self, number: int) -> Tensor:
        """The buffer with this number."""
        _, memory, offset, shape, dtype = self._plan.buffers[number]
        if memory == TABLE:
            return self._plan.tables[number]
        if memory >= 0:
            whole = self._tensors[memory]
            if whole.shape == shape and whole.dtype == dtype:
                return whole  # an output as it is: of a view, torch forbids its caller changes in place
        elif self._memory is None:
            found = self._empty.get(offset)
            if found is None:
                found = self._empty[offset] = self._tensors[0].new_empty(shape, dtype=dtype)
            return found if found.shape == shape else found.view(shape)
        else:
            whole = self._memory
        start, rest = divmod(int(whole.storage_offset()) * whole.itemsize + offset, dtype.itemsize)
        if rest:  # of a tensor that a saved_tensors_hook of the caller's has moved
            raise ValueError(f"a tensor of {dtype} begins at no multiple of its {dtype.itemsize} bytes")
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
        """After an error in a step: leave the streams that it is in and join all, inner ones first, whatever fails."""
        if self._side_streams or self._joins:
            try:
                self.leave() if self._side_streams else self.join()
            finally:
                self.abandon()
