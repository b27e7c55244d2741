"""Helpers for models of other packages whose sequence is sharded over ranks: they gather keys and values for softmax
layers, shift labels across shard boundaries and raise an error on every rank."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..bindings.torch_compat import coalesced
from ..comm.communicator import Communicator
from ..comm.process_groups import check_group, collective
from ..launch.compiled_kernel import dynamo_disabled
from ..ops.halo import halo
from ..tokens.packing import Tables, TensorKey, document_places
from ..tokens.partition import cached_table


def chunks(tokens: Sequence[int], zigzag: bool = False) -> list[tuple[int, int, int]]:
    """(rank, first token, end) of each part, in sequence order; ``tokens``: the number of tokens of each rank."""
    numbers = [(rank, n // 2 if zigzag else n) for rank, n in enumerate(tokens)]
    numbers += reversed(numbers) if zigzag else ()
    ends = list(itertools.accumulate(n for _, n in numbers))
    return [(rank, end - n, end) for (rank, n), end in zip(numbers, ends, strict=True)]


def gathered(x: Tensor, chunks: Sequence[tuple[int, int, int]], comm: Communicator) -> torch.Tensor:
    """All-gather x [B, T, ...] in sequence order; the backward reduce-scatters the gradient."""
    if comm.size == 1 or not chunks[-1][2]:
        return x
    tokens = [sum(end - first for rank, first, end in chunks if rank == r) for r in range(comm.size)]
    gather = Gather(comm, tokens, len(chunks) > comm.size, x)
    return gather.read(gather.in_order())[0]


class _Order(Tables):
    """Permutation from the tokens concatenated in rank order to the order of the row, and its inverse."""

    def __init__(self, comm: Communicator, lengths: tuple[int, ...]) -> None:
        places = [place for rank in range(comm.size) for place in document_places(lengths, rank, comm.size)]
        whole = torch.cat([torch.arange(*place, device="cpu") for place in places])
        super().__init__([whole.argsort(), whole], comm.device)


class _Ordered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> torch.Tensor:
        ctx.back = back
        return x.index_select(1, order)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[torch.Tensor, None, None]:
        return dx.index_select(1, ctx.back), None, None


def documents_in_order(comm: Communicator, lengths: tuple[int, ...], *tensors: Tensor) -> list[torch.Tensor]:
    """Reorder tensors [B, S, ...] from rank order to the order of the row, where each packed sequence is sharded."""
    table = cached_table(comm, ("order of documents", lengths), lambda: _Order(comm, lengths))
    return [_Ordered.apply(x, *table.tensors) for x in tensors]


class Gather:
    """Asynchronous all-gather of the tokens of all ranks: the constructor starts it, ``read`` waits for it.

    tokens: the number of tokens of each rank; in zigzag two chunks of equal length. tensors: this rank's [B, T, ...].

    The tokens arrive in slots of equal length, by all-gathers in one group call of the back end. In the zigzag layout
    of P ranks, slot i holds the second half of rank i's tokens and slot P + i the first half; in the contiguous layout,
    slot i holds the tokens of rank i. The backward is a reduce-scatter: each rank gets the sum over the ranks of its
    tokens' gradients. The backward of ``read`` starts it, again in one group call, and the backward of the constructor
    waits for it. The layer's computation between constructor and ``read`` overlaps with the communication in forward
    and in backward. The sum has the tensors' dtype; with 8 ranks or more it has float32.
    """

    @dynamo_disabled
    def __init__(self, comm: Communicator, tokens: Sequence[int], zigzag: bool, *tensors: Tensor) -> None:
        self.comm, self.halves, size = comm, 1 + zigzag, comm.size
        self.length = max(tokens) // self.halves
        self.filled = [n // self.halves for n in tokens] * self.halves  # tokens in each slot
        self.starts = [size * (1 - half) * zigzag for half in range(self.halves)]  # slot of each half of rank 0
        self._work: Any = None  # handle of the collective; ``_arrived`` holds its outputs
        self._arrived: Any = None
        self._sums: Any = None
        self._token: torch.Tensor | None = _Start.apply(self, *tensors)

    def in_order(self) -> list[int]:
        """The slot numbers in sequence order."""
        size = self.comm.size
        return [*range(size)] if self.halves == 1 else [*range(size, 2 * size), *reversed(range(size))]

    @dynamo_disabled
    def read(self, slots: Any) -> tuple[torch.Tensor, ...]:
        """Wait, and return the tokens of ``slots``, concatenated, of each tensor [B, tokens, ...].

        The results are views where the slots are consecutive and full. Call it once, even if this rank reads no slot.
        """
        return _Read.apply(self, list(slots), self._token)

    def start(self, tensors: Sequence[Tensor]) -> None:
        pairs: list = []
        self._arrived = []
        for x in tensors:
            halves = [_padded(half, self.length) for half in x.chunk(self.halves, 1)]
            x = (x if halves[0].shape[1] == x.shape[1] // self.halves else torch.cat(halves, 1)).transpose(0, 1)
            x = x.contiguous()  # tokens first: slots are rows
            slots = x.new_empty(len(self.filled) * self.length, *x.shape[1:])
            pairs += zip(self._parts(slots), x.chunk(self.halves), strict=True)
            self._arrived.append(slots)
        self._work = _together("all_gather", pairs, self.comm.group)

    @dynamo_disabled
    def finish(self, slots: Any) -> tuple[torch.Tensor, ...]:
        with collective(self.comm.group):
            self._work.wait()
        runs = self._runs(slots)
        rows = [[x[first:end] for first, end in runs] for x in self._arrived]
        self._work = self._arrived = self._token = None
        return tuple((some[0] if len(some) == 1 else torch.cat(some)).transpose(0, 1) for some in rows)

    def start_sum(self, slots: Any, gradients: Any) -> None:
        """Start the reduce-scatter of the gradients of ``slots``; the gradients of other slots are zero."""
        pairs: list = []
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
            pairs += zip(mine.chunk(self.halves), self._parts(sent), strict=True)
            self._sums.append((mine, sent))
        self._work = _together("reduce_scatter", pairs, self.comm.group)

    def finish_sum(self) -> list[torch.Tensor]:
        with collective(self.comm.group):
            self._work.wait()
        own = self.filled[self.comm.rank]
        halves = [[half[:own] for half in mine.chunk(self.halves)] for mine, _ in self._sums]
        found = [mine if own == self.length else torch.cat(some) for some, (mine, _) in zip(halves, self._sums)]
        self._work = self._sums = None
        return [x.transpose(0, 1) for x in found]

    def _parts(self, slots: Any) -> list[torch.Tensor]:
        """Views of the slots: one of all ranks' first halves, one of their second halves."""
        rows = self.comm.size * self.length
        return [slots[start * self.length :][:rows] for start in self.starts]

    def _runs(self, slots: Any) -> list[tuple[int, int]]:
        """(first row, end) of the tokens in ``slots``; adjacent ranges are merged, and at least one is returned."""
        runs: list[tuple[int, int]] = []
        for first, end in ((slot * self.length, slot * self.length + self.filled[slot]) for slot in slots):
            if runs and runs[-1][1] == first:
                runs[-1] = runs[-1][0], end
            elif end > first:
                runs.append((first, end))
        return runs or [(0, 0)]


IN_FLOAT32 = 8  # from this number of ranks on, gradients are summed in float32


class _Start(torch.autograd.Function):
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
    def forward(ctx: Any, gather: Gather, slots: Any, token: Tensor) -> tuple[torch.Tensor, ...]:
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


def _padded(x: Tensor, length: int) -> torch.Tensor:
    """x [B, T, ...], padded with zeros to ``length`` tokens."""
    return x if x.shape[1] == length else F.pad(x, (0, 0) * (x.ndim - 2) + (0, length - x.shape[1]))


def shifted(
    labels: Tensor, ignored: Any, comm: Communicator, zigzag: bool = False, documents: Any = None
) -> torch.Tensor:
    """Shift labels [B, T] by one token, across shard boundaries; the last token of the row gets ``ignored``.

    documents: cu_seqlens of packed sequences that are each sharded, without empty ones; the last token of each sequence
    gets ``ignored``.
    """
    if documents is not None:
        return _shifted_documents(labels, ignored, comm, documents)
    # halo() fills with 0 behind the last token of the row, on whichever rank it is: hence the offset
    following = halo(labels - ignored, 1, comm=comm, reverse=True, layout="zigzag" if zigzag else "contiguous")
    halves = labels.chunk(1 + zigzag, 1), (following + ignored).chunk(1 + zigzag, 1)
    return torch.cat([torch.cat(pair, 1)[:, 1:] for pair in zip(*halves, strict=True)], 1)


def _shifted_documents(labels: Tensor, ignored: Any, comm: Communicator, lengths: tuple[int, ...]) -> torch.Tensor:
    T = labels.shape[1]
    if not T:
        return labels
    where: dict[str, Any] = dict(cu_seqlens=torch.tensor(lengths, device="cpu"), first_token=comm.rank * T // 2)
    where |= dict(layout="zigzag", per_document=True)
    following = halo(labels - ignored, 1, comm=comm, reverse=True, **where)

    def make() -> Tables:
        sizes = [b - a for a, b in document_places(lengths, comm.rank, comm.size)]
        return Tables([torch.tensor([end - 1 for end in itertools.accumulate(sizes)], device="cpu")], comm.device)

    (ends,) = cached_table(comm, ("ends of documents", lengths), make).tensors
    return F.pad(labels[:, 1:], (0, 1)).index_copy(1, ends, following + ignored)


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
