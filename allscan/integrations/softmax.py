"""Helpers for models of other packages whose sequence is sharded over ranks: they gather keys and values for softmax
layers, shift labels across shard boundaries and raise an error on every rank."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..base.autograd import CustomOperator, Passes
from ..bindings.torch_compat import coalesced, no_cuda_graph
from ..comm.communicator import Communicator, communicator_of
from ..comm.process_groups import check_group, collective
from ..ops.halo import halo
from ..tokens.packing import Tables, TensorKey, boundaries_on_host, cut, document_places
from ..tokens.partition import cached_table


def chunks(tokens: Sequence[int], zigzag: bool = False) -> list[tuple[int, int, int]]:
    """(rank, first token, end) of each part, in sequence order; ``tokens``: the number of tokens of each rank."""
    numbers = [(rank, n // 2 if zigzag else n) for rank, n in enumerate(tokens)]
    numbers += reversed(numbers) if zigzag else ()
    ends = list(itertools.accumulate(n for _, n in numbers))
    return [(rank, end - n, end) for (rank, n), end in zip(numbers, ends, strict=True)]


class Part(NamedTuple):
    """Consecutive tokens of one sequence: start .. end - 1 of this rank.

    In the row the sequence begins at token ``begin``, and the part ends before token ``last``: its queries attend to
    the keys begin .. last - 1, causally, the last query aligned with the last key. half, entry: see TokenRange.
    """

    start: int
    end: int
    half: int
    begin: int
    last: int
    entry: int = 0

    @property
    def before(self) -> int:
        """Number of tokens of the sequence before this part."""
        return self.last - self.begin - (self.end - self.start)


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """The tokens of all ranks in one row: one sequence, or packed ones."""

    comm: Communicator
    tokens: Sequence[int]  # number of tokens of each rank
    lengths: torch.Tensor | None  # cu_seqlens of the row, on the CPU
    zigzag: bool = dataclasses.field(default=False, kw_only=True)
    per_document: bool = dataclasses.field(default=False, kw_only=True)  # each packed sequence is cut; none is empty
    # number of tokens before the row, whose keys precede those of the row; None: the row begins the sequence
    past: int | None = dataclasses.field(default=None, kw_only=True)

    @functools.cached_property
    def own(self) -> int:
        return self.tokens[self.comm.rank]

    def parts(self) -> list[Part]:
        """The parts of nonempty sequences on this rank; without packed sequences its one or two chunks of the row."""
        rank, parts, start = self.comm.rank, [], 0
        lengths = boundaries_on_host(self.lengths) if self.lengths is not None and self.own else None
        if lengths is not None and self.per_document:
            for i, (first, end) in enumerate(document_places(lengths, rank, self.comm.size)):
                parts.append(Part(start, start + end - first, i % 2, lengths[i // 2], end, i // 2))
                start += end - first
            return parts
        own = [(first, end) for owner, first, end in chunks(self.tokens, self.zigzag) if owner == rank]
        for half, (first, end) in enumerate(own):
            if lengths is None:
                parts.append(Part(start, start + end - first, half, 0, end))  # the incoming state passes through
            else:
                parts += [
                    Part(start + p.start, start + p.end, half, lengths[p.sequence], first + p.end)
                    for p in cut(lengths, first, end - first)
                    if p.end > p.start
                ]
            start += end - first
        return parts

    def gather(self, *tensors: Tensor) -> Gather:
        """Start the gather of this rank's tensors [B, T, ...]."""
        return Gather(self.comm, self.tokens, self.zigzag and not self.per_document, *tensors)

    def in_order(self, gather: Gather) -> Sequence[torch.Tensor]:
        """Wait for ``gather``, and return its tensors [B, S, ...] in the order of the row."""
        found = gather.read(gather.in_order())
        if not self.per_document:
            return found
        assert self.lengths is not None  # of the packed sequences
        lengths = boundaries_on_host(self.lengths)

        def make() -> Tables:
            places = [p for rank in range(self.comm.size) for p in document_places(lengths, rank, self.comm.size)]
            whole = torch.cat([torch.arange(*place, device="cpu") for place in places])
            return Tables([whole.argsort(), whole[None]], self.comm.device)

        table = cached_table(self.comm, ("order of documents", lengths), make)
        return [Select.apply(x, 1, *table.tensors) for x in found]


class Select(torch.autograd.Function):
    """x.index_select(dim, index), with a backward that needs no atomics.

    inverse: [n, tokens of x]: for each token its at most n places in ``index``. If n > 1, len(index) stands for no
    place.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, index: Tensor, inverse: Tensor) -> torch.Tensor:
        ctx.dim, ctx.inverse = dim, inverse
        return x.index_select(dim, index)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[torch.Tensor | None, ...]:
        if len(ctx.inverse) > 1:
            dx = F.pad(dx, (0, 0) * (dx.ndim - 1 - ctx.dim) + (0, 1))
        *others, total = (dx.index_select(ctx.dim, places) for places in ctx.inverse)
        for x in others:
            total.add_(x)
        return total, None, None, None


class Gather:
    """Asynchronous all-gather of the tokens of all ranks: the constructor starts it, ``read`` waits for it.

    tokens: the number of tokens of each rank; in zigzag two chunks of equal length. tensors: this rank's [B, T, ...].

    The tokens arrive in slots of equal length, by one all-gather of each tensor, in one group call of the back end. In
    the zigzag layout slot 2i holds the first half of rank i's tokens and slot 2i + 1 the second half; in the contiguous
    layout, slot i holds the tokens of rank i. The backward is a reduce-scatter: each rank gets the sum over the ranks
    of its tokens' gradients. The backward of ``read`` starts it, again in one group call, and the backward of the
    constructor waits for it. The layer's computation between constructor and ``read`` overlaps with the communication
    in forward and in backward. The sum has the tensors' dtype; with 8 ranks or more it has float32.
    """

    def __init__(self, comm: Communicator, tokens: Sequence[int], zigzag: bool, *tensors: Tensor) -> None:
        self.comm, self.halves = comm, 1 + zigzag
        self.length = max(tokens) // self.halves
        self.filled = [n // self.halves for n in tokens for _ in range(self.halves)]  # tokens in each slot
        self._work: Any = None  # handle of the collective; ``_arrived`` holds its outputs
        self._arrived: Any = None
        self._sums: Any = None
        self._token: torch.Tensor | None = None
        self._traced: Any = None  # of a traced gather: its operators' tensors and other arguments
        if tensors and torch.compiler.is_compiling():
            (arrived,) = _gather.forward(tensors, [*tokens], tokens[comm.rank], zigzag, comm.handle)
            self._traced = [*arrived, *tensors], ([*tokens], zigzag, comm.handle)
        elif tensors:
            self._token = _Start.apply(self, *tensors)

    def in_order(self) -> list[int]:
        """The slot numbers in sequence order."""
        slots = range(len(self.filled))
        return [*slots] if self.halves == 1 else [*slots[::2], *slots[:0:-2]]

    def read(self, slots: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Wait, and return the tokens of ``slots``, concatenated, of each tensor [B, tokens, ...].

        The results are views where the slots are consecutive and full. Call it once, even if this rank reads no slot.
        """
        if self._traced is not None:
            tensors, fixed = self._traced
            read = [sum(self.filled[slot] for slot in slots), *slots]
            return tuple(x.transpose(0, 1) for x in _read.forward(tensors, read, *fixed)[0])
        return _Read.apply(self, list(slots), self._token)

    def start(self, tensors: Sequence[Tensor]) -> None:
        pairs: list = []
        for x in tensors:
            if x.shape[1] < self.halves * self.length:
                missing = (0, 0) * (x.ndim - 2) + (0, self.length - x.shape[1] // self.halves)
                x = torch.cat([F.pad(half, missing) for half in x.chunk(self.halves, 1)], 1)
            x = x.transpose(0, 1).contiguous()  # tokens first: slots are rows
            slots = x.new_empty(len(self.filled) * self.length, *x.shape[1:])
            pairs.append((slots, x))
        self._arrived = [slots for slots, _ in pairs]
        self._work = _together("all_gather", pairs, self.comm.group)

    def finish(self, slots: Sequence[int]) -> tuple[torch.Tensor, ...]:
        with collective(self.comm.group):
            self._work.wait()
        runs = self._runs(slots)
        rows = [[x[first:end] for first, end in runs] for x in self._arrived]
        self._work = self._arrived = self._token = None
        return tuple(joined(some, 0).transpose(0, 1) for some in rows)

    def start_sum(self, slots: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Start the reduce-scatter of the gradients of ``slots``; the gradients of other slots are zero."""
        self._sums, runs = [], self._runs(slots)
        for dx in gradients:
            dx = dx.transpose(0, 1)
            dtype = torch.float32 if self.comm.size >= IN_FLOAT32 and dx.dtype.itemsize < 4 else dx.dtype
            sent = dx.new_empty(len(self.filled) * self.length, *dx.shape[1:], dtype=dtype)
            at = before = 0
            for first, end in runs:
                sent[first:end] = dx[at : at + end - first]
                at += end - first
            for first, end in [*sorted(runs), (sent.shape[0],) * 2]:
                sent[before:first].zero_()
                before = end
            mine = sent.new_empty(self.halves * self.length, *dx.shape[1:])
            self._sums.append((mine, sent))
        self._work = _together("reduce_scatter", self._sums, self.comm.group)

    def finish_sum(self) -> list[torch.Tensor]:
        with collective(self.comm.group):
            self._work.wait()
        own = self.filled[self.comm.rank * self.halves]
        halves = [[half[:own] for half in mine.chunk(self.halves)] for mine, _ in self._sums]
        found = [mine if own == self.length else torch.cat(some) for some, (mine, _) in zip(halves, self._sums)]
        self._work = self._sums = None
        return [x.transpose(0, 1) for x in found]

    def _runs(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        """(first row, end) of the tokens in ``slots``; adjacent ranges are merged, and at least one is returned."""
        runs: list[tuple[int, int]] = []
        for first, end in ((slot * self.length, slot * self.length + self.filled[slot]) for slot in slots):
            if runs and runs[-1][1] == first:
                runs[-1] = runs[-1][0], end
            elif end > first:
                runs.append((first, end))
        return runs or [(0, 0)]


# The same two steps as custom operators, for torch.compile. A Gather that runs is found by the address of the memory
# that the one operator returns and the other takes. Gathered tensors and gradients are [tokens, B, ...]. read: the
# number of tokens to read, then their slots (torch would take an empty list of slots for one of tensors).

_running: dict[int, Gather] = {}


def discard_gathers(comm: Communicator) -> None:
    """Release the gathers of a compiled step that has raised between the two operators, before the next step."""
    for address in [address for address, gather in _running.items() if gather.comm is comm]:
        del _running[address]


def _start_traced(
    xs: Sequence[Tensor], tokens: Sequence[int], own: int, zigzag: bool, handle: int
) -> tuple[list[torch.Tensor]]:
    gather = Gather(communicator_of(handle), tokens, zigzag)
    gather.start(xs)
    _running[gather._arrived[0].data_ptr()] = gather
    return (gather._arrived,)


def _start_fake(xs: Sequence[Tensor], tokens: Sequence[int], own: int, zigzag: bool, _: Any) -> Any:
    return ([x.new_empty(_rows_of_slots(tokens, zigzag), x.shape[0], *x.shape[2:]) for x in xs],)


def _rows_of_slots(tokens: Sequence[int], zigzag: bool) -> int:
    return len(tokens) * (1 + zigzag) * (max(tokens) // (1 + zigzag))


def _finish_sum_traced(
    gradients: Sequence[Tensor], tokens: Sequence[int], own: int, zigzag: bool, handle: int
) -> tuple[list[torch.Tensor]]:
    sums = _running.pop(gradients[0].data_ptr()).finish_sum()
    return ([x.transpose(0, 1).to(dx.dtype) for x, dx in zip(sums, gradients, strict=True)],)


def _finish_sum_fake(gradients: Sequence[Tensor], _: Any, own: int, *__: Any) -> Any:
    return ([dx.new_empty(own, *dx.shape[1:]) for dx in gradients],)


def _gradient_start(backward: Any, ctx: Any, gradients: Sequence[Tensor]) -> Any:
    return ([dx.transpose(0, 1) for dx in backward(gradients, *ctx.fixed)[0]],)


def _read_traced(
    tensors: Sequence[Tensor], read: Sequence[int], tokens: Sequence[int], zigzag: bool, handle: int
) -> tuple[list[torch.Tensor]]:
    """tensors: those that have arrived, then as many that were sent, which must be kept until then."""
    gather = _running.pop(tensors[0].data_ptr())
    found = [x.transpose(0, 1) for x in gather.finish(read[1:])]
    views = len(gather._runs(read[1:])) == 1
    return ([x.clone() for x in found] if views else found,)


def _read_fake(tensors: Sequence[Tensor], read: Sequence[int], *_: Any) -> Any:
    return ([x.new_empty(read[0], *x.shape[1:]) for x in tensors[: len(tensors) // 2]],)


def _gradient_read(backward: Any, ctx: Any, gradients: Sequence[Tensor]) -> Any:
    return ([*backward(gradients, *ctx.fixed)[0], *[None] * len(gradients)],)


def _start_sum_traced(
    gradients: Sequence[Tensor], read: Sequence[int], tokens: Sequence[int], zigzag: bool, handle: int
) -> tuple[list[torch.Tensor]]:
    gather = Gather(communicator_of(handle), tokens, zigzag)
    gather.start_sum(read[1:], [dx.transpose(0, 1) for dx in gradients])
    pairs = zip((x for _, x in gather._sums), gradients, strict=True)
    sent = [x if x.dtype == dx.dtype else dx.new_empty(x.shape) for x, dx in pairs]  # not in float32: see IN_FLOAT32
    _running[sent[0].data_ptr()] = gather
    return (sent,)


def _start_sum_fake(gradients: Sequence[Tensor], _: Any, tokens: Sequence[int], zigzag: bool, __: Any) -> Any:
    return ([dx.new_empty(_rows_of_slots(tokens, zigzag), *dx.shape[1:]) for dx in gradients],)


_gather = CustomOperator(
    "allscan::gather",
    Passes(_start_traced, _start_fake, _finish_sum_traced, _finish_sum_fake, strided=True),
    lambda ctx, inputs, output: setattr(ctx, "fixed", inputs[1:]),
    _gradient_start,
    tags=no_cuda_graph,
)
_read = CustomOperator(
    "allscan::gather_read",
    Passes(_read_traced, _read_fake, _start_sum_traced, _start_sum_fake, strided=True),
    lambda ctx, inputs, output: setattr(ctx, "fixed", inputs[1:]),
    _gradient_read,
    tags=no_cuda_graph,
)


IN_FLOAT32 = 8  # from this number of ranks on, gradients are summed in float32


class _Start(torch.autograd.Function):
    """Starts a Gather; its backward waits for the sums of the tensors' gradients."""

    @staticmethod
    def forward(ctx: Any, gather: Gather, *tensors: Tensor) -> torch.Tensor:
        ctx.gather, ctx.dtypes = gather, [x.dtype for x in tensors]
        gather.start(tensors)
        return tensors[0].new_empty(0)  # connects this node to _Read in the autograd graph

    @staticmethod
    def backward(ctx: Any, _) -> tuple[torch.Tensor | None, ...]:
        return None, *(dx.to(dtype) for dx, dtype in zip(ctx.gather.finish_sum(), ctx.dtypes, strict=True))


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gather: Gather, slots: Sequence[int], token: Tensor) -> tuple[torch.Tensor, ...]:
        ctx.gather, ctx.slots = gather, slots
        return gather.finish(slots)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, torch.Tensor]:
        ctx.gather.start_sum(ctx.slots, gradients)
        return None, None, gradients[0].new_zeros(0)


def _together(name: str, pairs: Any, group: Any) -> Any:
    """Start the collective ``name`` for all (output, input) pairs in one group call; returns the handle."""
    check_group(group)
    function: Any = getattr(dist, f"{name}_single", None)  # from torch 2.13 on
    function = (
        function or {"all_gather": dist.all_gather_into_tensor, "reduce_scatter": dist.reduce_scatter_tensor}[name]
    )
    with coalesced(group=group, async_ops=True) as work:
        for output, x in pairs:
            function(output, x, group=group)
    return work


def joined(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
    """Concatenate; one tensor is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def shifted(
    labels: Tensor, ignored: Any, comm: Communicator, zigzag: bool = False, documents: Any = None
) -> torch.Tensor:
    """Shift labels [B, T] by one token, across shard boundaries; the last token of the row gets ``ignored``.

    documents: cu_seqlens of packed sequences that are each sharded, without empty ones; the last token of each sequence
    gets ``ignored``.
    """
    T, where = labels.shape[1], {"layout": "zigzag" if zigzag else "contiguous"}  # type: int, dict[str, Any]
    if documents is not None:
        if not T:
            return labels
        lengths = torch.tensor(documents, device="cpu")
        where |= dict(cu_seqlens=lengths, first_token=comm.rank * T // 2, per_document=True)
    # halo() fills with 0 behind the last token of the row, on whichever rank it is: hence the offset
    following = halo(labels - ignored, 1, comm=comm, reverse=True, **where) + ignored
    if documents is None:
        halves = labels.chunk(1 + zigzag, 1), following.chunk(1 + zigzag, 1)
        return torch.cat([torch.cat(pair, 1)[:, 1:] for pair in zip(*halves, strict=True)], 1)

    def make() -> Tables:
        sizes = [b - a for a, b in document_places(documents, comm.rank, comm.size)]
        return Tables([torch.tensor([end - 1 for end in itertools.accumulate(sizes)], device="cpu")], comm.device)

    (ends,) = cached_table(comm, ("ends of documents", documents), make).tensors
    return F.pad(labels[:, 1:], (0, 1)).index_copy(1, ends, following)


def reject(comm: Communicator, message: str) -> NoReturn:
    """Raise ValueError on this rank, and report it to the ranks that continue the call."""
    with comm.call():
        raise ValueError(message)


def masks_nothing(mask: torch.Tensor, comm: Communicator) -> bool:
    """Whether all elements of ``mask`` are true.

    The check synchronizes with the GPU: once for a mask that all layers share (see TensorKey), in debug mode at each
    call. During a CUDA graph capture a mask on the GPU is rejected, since replays would not check it.
    """
    if mask.is_cuda and comm.streams.capturing():
        reject(comm, "attention_mask on the GPU cannot be captured, since replays would not look at it: leave it out")
    return bool(mask.all()) if comm.debug or not mask.is_cuda else _masks_nothing(TensorKey(mask))


@functools.lru_cache(maxsize=1)
def _masks_nothing(mask: TensorKey) -> bool:
    x: Any = mask.tensor()
    return bool(x.all())
