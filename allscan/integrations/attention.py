"""Causal softmax attention over a sharded sequence, in blocks without a mask, by PyTorch's fastest kernels.

A rank's queries attend to its own keys in one causal block. In the zigzag layout this block covers both halves, since
the second half attends to all of the first. Queries attend to the earlier tokens of other ranks in blocks without a
mask, whose keys may have any order. The results are merged by their log-sum-exps. In forward the own block overlaps
with the all-gather of the other ranks' keys (or of the latents from which the keys are projected), in backward with the
reduce-scatter of their gradients.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import get_device_states, set_device_states

from ..base.checks import is_zigzag
from ..bindings.torch_compat import TorchDispatchMode, operator
from ..bindings.triton_compat import OPTIONS
from ..comm.communicator import Communicator, check_communicator
from ..shmem_kernels.merge import merge_kernel
from ..tokens.packing import Tables, document_places
from ..tokens.partition import cached_table
from .attention_kernels import flash_fits, kernel_for, strided_like, widened
from .softmax import Gather
from .unmasked import exact_of, tokens_first

# Packed sequences use FlashAttention 2: its causal mask aligns the last query with the last key

flash_packed = operator(
    "_flash_attention_forward",
    "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask scale",
    more=True,
)


class Pieces(Tables):
    """Tables of the packed sequences with tokens in first .. end - 1 of the row, which are one part of a rank.

    Tensors: cu_seqlens of their queries in the part; cu_seqlens of their keys up to the part's end; for each sequence
    the number of tokens before the part. Also ``begin``, the start of the first sequence, and ``longest``, the length
    of the longest one.
    """

    def __init__(self, device: torch.device, first: int, end: int, lengths: Sequence[int]) -> None:
        here = [(a, b) for a, b in pairwise(lengths) if max(a, first) < min(b, end)]
        self.begin, self.longest = here[0][0] if here else first, max((b - a for a, b in here), default=0)
        queries, keys = ([0, *(min(b, end) - start for _, b in here)] for start in (first, self.begin))
        tables = queries, keys, [max(first - a, 0) for a, _ in here]
        super().__init__([torch.tensor(x, dtype=torch.int32, device="cpu") for x in tables], device)
        self.queries, self.keys, _ = self.tensors


def pieces_of(comm: Communicator, first: int, end: int, lengths: tuple[int, ...]) -> Pieces:
    """The tables of packed sequences for the tokens first .. end - 1; cached."""
    key = "softmax", first, end, lengths
    return cached_table(comm, key, lambda: Pieces(comm.device, first, end, lengths))


class Documents(Tables):
    """Tables of this rank's pieces of packed sequences that are each sharded.

    Tensors: cu_seqlens of the queries; cu_seqlens of the keys, concatenated by piece; for each piece the number of the
    sequence's tokens before it; the row index of each key (a token that both pieces of a sequence attend to appears
    twice); and the inverse, [2, tokens]: the key index of each token for the first and for the second piece, or the
    number of keys if the piece does not attend to the token.
    """

    def __init__(self, comm: Communicator, lengths: tuple[int, ...]) -> None:
        places = document_places(lengths, comm.rank, comm.size)
        begins = [begin for begin in lengths[:-1] for _ in range(2)]
        sizes = [[b - a for a, b in places], [b - begin for begin, (_, b) in zip(begins, places)]]
        self.longest_query, self.longest = map(max, sizes)
        before = [a - begin for begin, (a, _) in zip(begins, places)]
        tables = [[*accumulate(some, initial=0)] for some in sizes] + [before]
        seen = [torch.arange(begin, b, device="cpu") for begin, (_, b) in zip(begins, places)]
        where = torch.full((2, lengths[-1]), tables[1][-1], device="cpu")
        for i, tokens in enumerate(seen):
            where[i % 2, tokens] = torch.arange(*tables[1][i : i + 2], device="cpu")
        numbers = (torch.tensor(x, dtype=torch.int32, device="cpu") for x in tables)
        super().__init__([*numbers, torch.cat(seen), where], comm.device)
        self.queries, self.keys, _, *self.seen = self.tensors


class Seen(torch.autograd.Function):
    """Selects the keys of a rank's pieces from those of the row [S, ...]. The backward needs no atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: Any, where: dict[str, Any]) -> torch.Tensor:
        ctx.where = where
        return x.index_select(0, seen)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[torch.Tensor, None, None]:
        dx = F.pad(dx, (0, 0) * (dx.ndim - 1) + (0, 1))
        first, second = (dx.index_select(0, some) for some in ctx.where)
        return second.add_(first), None, None


def documents_of(comm: Communicator, lengths: tuple[int, ...]) -> Documents:
    """The tables of packed sequences that are each sharded; cached."""
    return cached_table(comm, ("softmax of documents", lengths), lambda: Documents(comm, lengths))


def takes_packed(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel for packed sequences supports these tensors."""
    return flash_packed is not None and flash_fits(q, k, v)


def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    comm: Communicator,
    parts: Any,
    lengths: tuple[int, ...],
    scale: float | None = None,
) -> torch.Tensor:
    """Attention output [1, T, H, V] of this rank's queries [1, H, T, D] over packed sequences.

    The keys [1, G, S, D] and values of all ranks are in the order of the row. parts: (first token, end) of each part of
    this rank; lengths: cu_seqlens of the row.
    """
    scale, outputs = q.shape[-1] ** -0.5 if scale is None else scale, []
    width = v.shape[-1]
    q, k, v = (x[0].transpose(0, 1) for x in widened(q, k, v))
    for mine, (first, end) in zip(q.split([end - first for first, end in parts]), parts, strict=True):
        pieces = pieces_of(comm, first, end, lengths)
        here = slice(pieces.begin, end)
        outputs.append(
            flash_packed(
                mine,
                k[here],
                v[here],
                pieces.queries,
                pieces.keys,
                end - first,
                pieces.longest,
                0.0,
                True,
                False,
                scale=scale,
            )[0]
        )
    return torch.cat(outputs)[None, ..., :width]


def packed_documents(
    q: Tensor, k: Tensor, v: Tensor, comm: Communicator, lengths: tuple[int, ...], scale: float | None = None
) -> torch.Tensor:
    """``packed`` for packed sequences that are each sharded."""
    scale, width, table = q.shape[-1] ** -0.5 if scale is None else scale, v.shape[-1], documents_of(comm, lengths)
    q, k, v = (x[0].transpose(0, 1) for x in widened(q, k, v))
    k, v = (Seen.apply(x, *table.seen) for x in (k, v))
    cuts = table.queries, table.keys, table.longest_query, table.longest
    return flash_packed(q, k, v, *cuts, 0.0, True, False, scale=scale)[0][None, ..., :width]


# The blocks


def reads(rank: int, size: int, zigzag: bool) -> tuple[list[int], list[tuple[range, int]]]:
    """(slots, [(halves, n)]): a rank's queries attend to these slots of ``softmax.Gather`` besides the rank's own keys;
    the queries in ``halves`` attend to the last n of them. The contiguous layout has one half."""
    if not zigzag:
        return [*range(rank)], [(range(1), rank)] if rank else []
    first = [*range(size, size + rank)]
    slots = [*range(rank + 1, size), *range(size + rank + 1, 2 * size), *first]
    if len(slots) == len(first):
        return slots, [(range(2), rank)] if rank else []
    return slots, [(range(1), rank)] * (rank > 0) + [(range(1, 2), len(slots))]


class Attention(NamedTuple):
    """Options of the softmax layers of a split model, equal on all ranks.

    Usage: ``sequence_parallel(model, comm=comm, attention=Attention(...))``.

    Args:
        merged: True: attention runs in blocks whose results are merged, if kernels for that exist. False: the keys of
            all ranks are reordered into sequence order, and one kernel runs over the keys up to each query, without a
            merge.
        memory: limit in bytes, for each layer, of the other ranks' tokens and the keys projected from them. If they
            exceed it, the tokens are gathered in steps that fit, in forward and again in backward; this needs
            merged=True. None: all tokens are gathered at once and saved for backward. Gradients temporarily need as
            much memory again, and more with heads of 256 or of 192 and 128: docs/integrations/transformers_how.md. In
            a CUDA graph's capture a projection to keys must not draw random numbers (dropout).
    """

    merged: bool = True
    memory: int | None = None


WHOLE = Attention()


def check_attention(attention: Attention) -> None:
    """Raise TypeError or ValueError unless ``attention`` is a valid Attention."""
    if not isinstance(attention, Attention) or not isinstance(attention.merged, bool):
        raise TypeError(f"attention must be an Attention, with merged=True or False, got {attention!r}")
    if attention.memory is not None and (not isinstance(attention.memory, int) or attention.memory < 1):
        raise ValueError(f"attention.memory must be a number of bytes or None, got {attention.memory!r}")


def check_split(comm: Communicator | None, layout: str, per_document: bool, attention: Attention) -> bool:
    """Check the arguments of ``sequence_parallel``; returns whether the layout is zigzag.

    Raises TypeError or ValueError for invalid arguments.
    """
    if comm is not None:
        check_communicator(comm)
    zigzag = is_zigzag(layout)
    if per_document and not zigzag:
        raise ValueError(f'per_document=True is for layout="zigzag", got {layout!r}')
    check_attention(attention)
    return zigzag


class Later:
    """Arguments of a deferred softmax.Gather: ``attend`` gathers once it knows how many tokens fit into ``memory``
    bytes. The tensors are the keys and values, or the inputs of the ``project`` function of ``attend``."""

    def __init__(
        self, comm: Communicator, tokens: Sequence[int], zigzag: bool, memory: int | None, *tensors: Tensor
    ) -> None:
        self.comm, self.tokens, self.halves, self.memory, self.tensors = comm, tokens, 1 + zigzag, memory, tensors

    def ranges(self, *keys: Any) -> list[tuple[int, int]]:
        """Token ranges (first, end) of the steps, within each half of each rank; equal on all ranks.

        keys: the keys and values projected from this rank's tensors, for their size. The memory is counted for two
        steps, since one step is gathered while the other is read.
        """
        length = max(self.tokens) // self.halves
        token = sum(2 * x.element_size() * math.prod([x.shape[0], *x.shape[2:]]) for x in self.tensors)
        token += sum(x.element_size() * math.prod([*x.shape[:2], x.shape[3]]) for x in keys)
        fit = self.memory // max(1, token * self.comm.size * self.halves)
        step = max(1, min(fit, length))
        return [(first, min(first + step, length)) for first in range(0, length, step)]

    def gather(self, first: int = 0, end: int | None = None, tensors: Sequence[Tensor] | None = None) -> Gather:
        def part(x: Tensor) -> torch.Tensor:
            return x.unflatten(1, (self.halves, x.shape[1] // self.halves))[:, :, first:end].flatten(1, 2)

        ends = [n // self.halves if end is None else min(end, n // self.halves) for n in self.tokens]
        tokens = [max(n - first, 0) * self.halves for n in ends]
        return Gather(self.comm, tokens, self.halves == 2, *map(part, self.tensors if tensors is None else tensors))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gather: Any,
    scale: float | None = None,
    project: Callable[..., Any] | None = None,
    latents: Sequence[Tensor] = (),
) -> torch.Tensor:
    """Causal attention output [B, T, H, V] of a rank's queries over the tokens of all ranks.

    q [B, H, T, D], k [B, G, T, D], v [B, G, T, V]: this rank's tensors; ``kernel_for`` must have a kernel for them.
    gather: a softmax.Gather or Later of k and v as [B, T, ...], or of the tensors [B, T, ...] that ``project`` maps to
    k and v (``project`` gets them with tokens in the third dimension). latents: with Later and ``project``, the tensors
    from which k and v were projected.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    steps = []
    if isinstance(gather, Later):
        steps = gather.ranges(*(() if project is None else (k, v)))
        sources = _leaves((k, v), latents) if len(steps) > 1 and project is not None else []
        later, gather = gather, None if len(steps) > 1 else gather.gather()
    kernel, shared = kernel_for(q, k, v), _Shared()
    q = tokens_first(q)
    if gather is None:
        tensors: Any = later.tensors
        where: Any = copy.copy(later)
        where.tensors = None  # autograd saves them
        plan = _Plan(where, steps, project, kernel, scale)
        token = _Enter.apply(plan, *tensors)
        tensors = [x.detach() for x in tensors]
        plan.count = len(tensors)
        with torch.no_grad():
            plan.first = plan.start(0, tensors)
        o, lse = _Own.apply(shared, kernel, scale, q, k, v)
        o = _Steps.apply(shared, plan, q.detach(), o, lse, token, *tensors, *sources)
    else:
        o, lse = _Own.apply(shared, kernel, scale, q, k, v)
        slots, rows = _rows(gather, q)
        keys = _keys(gather.read(slots), project, q.dtype, bool(rows))
        o = _Others.apply(shared, (kernel, scale, rows), q.detach(), o, lse, *keys)
    return o.transpose(1, 2)


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> torch.Tensor:
    """Causal attention output [B, T, H, V] of unsharded sequences, q [B, H, T, D], k and v [B, G, T, ...], by the
    kernels of the blocks."""
    kernel, shared = kernel_for(q, k, v), _Shared()
    if kernel is None:
        grouped = q.shape[1] != k.shape[1]
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        return o.transpose(1, 2)
    q, scale = tokens_first(q), q.shape[-1] ** -0.5 if scale is None else scale
    o, lse = _Own.apply(shared, kernel, scale, q, k, v)
    return _Others.apply(shared, (kernel, scale, []), q.detach(), o, lse).transpose(1, 2)


def _rows(gather: Gather, q: Tensor) -> tuple[list[int], list[tuple[slice, slice]]]:
    """(slots to read, [(queries, keys)]): for each block the slices of the queries and of the keys in these slots."""
    slots, blocks = reads(gather.comm.rank, gather.comm.size, gather.halves == 2)
    filled, half, rows = [gather.filled[slot] for slot in slots], q.shape[2] // gather.halves, []
    for halves, many in blocks:
        before, inside = sum(filled[:-many]), sum(filled[-many:])
        if inside and half:
            rows.append((slice(halves.start * half, halves.stop * half), slice(before, before + inside)))
    return slots, rows


def _keys(
    found: Sequence[Tensor], project: Callable[..., Any] | None, dtype: torch.dtype, seen: bool
) -> list[torch.Tensor]:
    """[k, v], each [B, G, tokens, width], from the gathered tensors; no tokens if this rank attends to none of them.

    Such a rank projects one token of zeros: the projection's parameters may be sharded over the ranks (FSDP2), whose
    collectives all of them must call.
    """
    found = [x.transpose(1, 2) for x in found]
    if project is None or seen:
        return [x.to(dtype) for x in (found if project is None else project(*found))]
    return [x[:, :, :0].to(dtype) for x in project(*(F.pad(x[:, :, :0], (0, 0, 0, 1)) for x in found))]


class _Shared:
    """Passes o and its log-sum-exp over all keys, and parts of dq, from ``_Others``' backward to ``_Own``'s."""

    def __init__(self) -> None:
        self.merged, self.parts = None, ()


class _Own(torch.autograd.Function):
    """The causal block. Its backward uses o and lse over all keys, which the backward of ``_Others`` provides."""

    @staticmethod
    def forward(
        ctx: Any, shared: _Shared, kernel: Any, scale: float, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.shared, ctx.kernel, ctx.scale = shared, kernel, scale
        if q.shape[2]:
            o, lse, ctx.more = kernel.forward(q, k, v, True, scale)
        else:
            o, lse = q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3])
        ctx.save_for_backward(q, k, v)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor, _) -> tuple[torch.Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        (o, lse), parts = ctx.shared.merged, ctx.shared.parts
        ctx.shared.merged, ctx.shared.parts = None, ()
        if not q.shape[2]:
            return None, None, None, *(torch.zeros_like(x) for x in (q, k, v))
        dq, dk, dv = ctx.kernel.backward(do, q, k, v, o, lse, ctx.more, True, ctx.scale)
        for rows, part in parts:
            dq[:, :, rows] += part.to(dq.dtype)
        return None, None, None, dq, dk, dv


class _Others(torch.autograd.Function):
    """The blocks without a mask. They update o and lse in place without autograd: no other node uses these tensors."""

    @staticmethod
    def forward(ctx: Any, shared: _Shared, how: Any, q: Tensor, o: Tensor, lse: Tensor, *keys: Any) -> torch.Tensor:
        ctx.shared, (kernel, ctx.scale, ctx.rows) = shared, how
        ctx.more = _add(kernel, ctx.scale, ctx.rows, _Queries(q, o, lse), keys)
        o = o.detach()
        ctx.save_for_backward(q, o, lse, *keys)
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[torch.Tensor | None, ...]:
        q, o, lse, *keys = ctx.saved_tensors
        do = strided_like(do, o)
        blocks = list(zip(ctx.rows, ctx.more, strict=True))
        parts, sums = _gradients(ctx.scale, blocks, do, _Queries(q, o, lse), keys)
        ctx.shared.merged, ctx.shared.parts = (o, lse), parts
        return None, None, None, do, None, *sums


class _Queries(NamedTuple):
    """This rank's queries, with o and lse over the keys processed so far."""

    q: torch.Tensor
    o: torch.Tensor
    lse: torch.Tensor


def _add(kernel: Any, scale: float, rows: Any, of: _Queries, keys: Sequence[Tensor]) -> list:
    """Merge the attention to these keys into o and lse; returns (kernel, values saved for its backward) for each block.

    A block may be too small for ``kernel``, the kernel of the own block; then another one is used.
    """
    (q, o, lse), blocks = of, []
    for mine, seen in rows:
        tensors = q[:, :, mine], *(x[:, :, seen] for x in keys)
        fitting = kernel if kernel.fits(*tensors) else kernel_for(*tensors) or kernel
        *found, more = fitting.forward(*tensors, False, scale)
        _merge(o[:, :, mine], lse[:, :, mine], *found)
        blocks.append((fitting, more))
    return blocks


def _gradients(
    scale: float, blocks: Any, do: Tensor, of: _Queries, keys: Sequence[Tensor]
) -> tuple[list[tuple[slice, torch.Tensor]], list[torch.Tensor]]:
    """([(rows, dq)], [dk, dv]). blocks: (rows, result of ``_add``) for each block."""
    parts: list[tuple[slice, torch.Tensor]] = []
    sums: list[torch.Tensor] | None = None
    for (mine, seen), (kernel, more) in reversed(blocks):  # the last block attends to all keys
        dy, q, o, lse = (some[:, :, mine] for some in (do, *of))
        some = (x[:, :, seen] for x in keys)
        dq, *found = kernel.backward(dy, q, *some, o, lse.contiguous(), more, False, scale)
        parts.append((mine, dq))
        if sums is None:
            sums = found
        else:
            for dx, more_dx in zip(sums, found, strict=True):
                dx[:, :, seen] += more_dx
    return parts, [torch.zeros_like(x) for x in keys] if sums is None else sums


class _Plan:
    """The steps that gather the other ranks' tokens, and the state of the backward's reduce-scatters."""

    def __init__(
        self,
        later: Later,
        ranges: Sequence[tuple[int, int]],
        project: Callable[..., Any] | None,
        kernel: Any,
        scale: float,
    ) -> None:
        self.later, self.ranges, self.project, self.kernel, self.scale = later, ranges, project, kernel, scale
        self.count = 0  # number of gathered tensors
        self.first: Gather | None = None
        self.sums: list[torch.Tensor] | None = None
        self.last: tuple | None = None

    def start(self, step: int, tensors: Sequence[Tensor]) -> Gather | None:
        return self.later.gather(*self.ranges[step], tensors) if step < len(self.ranges) else None

    def collect(self, step: int, gather: Any, like: Sequence[Tensor]) -> None:
        """Wait for a step's gradient sums and copy them into the sums of all tokens."""
        first, end = self.ranges[step]
        if self.sums is None:
            self.sums = [x.new_empty(x.shape) for x in like]
        for total, x in zip(self.sums, gather.finish_sum(), strict=True):
            halves = total.unflatten(1, (self.later.halves, total.shape[1] // self.later.halves))
            halves[:, :, first:end] = x.unflatten(1, (self.later.halves, x.shape[1] // self.later.halves))


class _Enter(torch.autograd.Function):
    """Autograd node of the gathered tensors: its backward waits for the last step and returns their gradients."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, *tensors: Tensor) -> torch.Tensor:
        ctx.plan = plan
        return tensors[0].new_empty(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _) -> tuple[torch.Tensor | None, ...]:
        plan = ctx.plan
        plan.collect(*plan.last)
        sums, plan.sums, plan.last = plan.sums, None, None
        return None, *sums


class _Steps(torch.autograd.Function):
    """``_Others`` in steps: each step gathers tokens and projects keys, in forward and again in backward.

    inputs: the gathered tensors, and the parameters of ``project``."""

    @staticmethod
    def forward(
        ctx: Any, shared: _Shared, plan: _Plan, q: Tensor, o: Tensor, lse: Tensor, token: Tensor, *inputs: Any
    ) -> torch.Tensor:
        tensors, device = inputs[: plan.count], q.device.type
        ctx.shared, ctx.plan, ctx.count, ctx.blocks = shared, plan, plan.count, []
        ctx.autocast = dict(
            device_type=device,
            dtype=torch.get_autocast_dtype(device),
            enabled=torch.is_autocast_enabled(device),
            cache_enabled=False,
        )
        again = plan.project is not None and any(ctx.needs_input_grad)  # backward projects again
        captured = again and plan.later.comm.streams.capturing()  # torch does not read a generator in a capture
        ctx.random = (torch.get_rng_state(), *get_device_states(q)) if again and not captured else None
        gather, plan.first, exact = plan.first, None, exact_of(o)  # rounded once, after all steps
        for step in range(len(plan.ranges)):
            following = plan.start(step + 1, tensors)
            assert gather is not None  # true for each step of plan.ranges
            slots, rows = _rows(gather, q)
            found = gather.finish(slots)
            with _WithoutRandom() if captured else contextlib.nullcontext():
                keys = _keys(found, plan.project, q.dtype, bool(rows))
            ctx.blocks.append(_add(plan.kernel, plan.scale, rows, _Queries(q, exact, lse), keys))
            gather = following
        o = o.copy_(exact).detach()
        ctx.save_for_backward(q, o, lse, *inputs)
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[torch.Tensor | None, ...]:
        with _replayed(ctx.random, do.device.type):
            return _Steps._backward(ctx, do)

    @staticmethod
    def _backward(ctx: Any, do: Tensor) -> tuple[torch.Tensor | None, ...]:
        q, o, lse, *inputs = ctx.saved_tensors
        plan, tensors, sources = ctx.plan, inputs[: ctx.count], inputs[ctx.count :]
        do, total = strided_like(do, o), torch.zeros_like(exact_of(q))
        weights: list[torch.Tensor | None] = [None] * len(sources)
        gradients: Sequence[torch.Tensor]
        gather = plan.start(0, tensors)
        for step in range(len(plan.ranges)):
            following = plan.start(step + 1, tensors)
            slots, rows = _rows(gather, q)
            found = [x.detach().requires_grad_() for x in gather.finish(slots)]
            with torch.enable_grad(), torch.autocast(**ctx.autocast):
                keys = _keys(found, plan.project, q.dtype, bool(rows))
                known, used = (
                    {get_gradient_edge(x).node for x in some} for some in (sources, _leaves(keys, found))
                )  # sources may be copies of forward's parameters (saved_tensors_hooks), with their nodes
            if not used <= known:
                raise RuntimeError(
                    "with attention.memory backward projects keys again, and the projection has other parameters than "
                    "in forward (torch.func.functional_call?)"
                )
            detached = [x.detach() for x in keys]
            blocks = list(zip(rows, ctx.blocks[step], strict=True))
            parts, gradients = _gradients(plan.scale, blocks, do, _Queries(q, o, lse), detached)
            for mine, dq in parts:
                total[:, :, mine] += dq
            gradients = torch.autograd.grad(keys, [*found, *sources], gradients, allow_unused=True)
            sums = [torch.zeros_like(a) if b is None else b for a, b in zip(found, gradients)]
            weights = [
                b if a is None else a if b is None else a + b
                for a, b in zip(weights, gradients[len(found) :], strict=True)
            ]
            if plan.last is not None:
                plan.collect(*plan.last)
            gather.start_sum(slots, sums)
            plan.last, gather = (step, gather, tensors), following
        ctx.shared.merged, ctx.shared.parts = (o, lse), [(slice(None), total)]
        return None, None, None, do, None, do.new_zeros(0), *[None] * ctx.count, *weights


class _WithoutRandom(TorchDispatchMode):
    """Raises RuntimeError for an operator that draws random numbers."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(function, "tags", ()):
            raise RuntimeError(
                f"with attention.memory a projection that draws random numbers ({function}) cannot be captured in a "
                f"CUDA graph: its backward could not repeat them"
            )
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def _replayed(states: tuple | None, device: str) -> Iterator[None]:
    """Context in which random numbers follow these states of the generators, as dropout in a projection repeats it."""
    if states is None:
        yield
        return
    on_host, devices, on_devices = states
    with torch.random.fork_rng(devices, device_type=device):
        torch.set_rng_state(on_host)
        set_device_states(devices, on_devices, device_type=device)
        yield


def _leaves(tensors: Sequence[Tensor], inputs: Sequence[Tensor]) -> list:
    """The leaves (parameters) of the autograd graph between ``inputs`` and ``tensors``."""
    seen = {x.grad_fn for x in inputs if x.grad_fn is not None}
    found, ahead = [], [x.grad_fn for x in tensors if x.grad_fn is not None]
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and not any(leaf is x for x in inputs):
            found.append(leaf)
        ahead += [following for following, _ in node.next_functions if following is not None]
    return found


def _merge(o: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Merge ``more`` and ``more_lse`` into o [B, H, T, V] and lse [B, H, T], in place."""
    fits = _memory(o, lse) is not None and _memory(more, more_lse) == o.shape[2]
    if fits and o.is_cuda and lse.dtype == torch.float32:
        merge(o, lse, more, more_lse)
        return
    both = torch.logaddexp(lse, more_lse)
    weights = ((x - both).exp()[..., None] for x in (lse, more_lse))
    o.copy_(o * next(weights) + more * next(weights))
    lse.copy_(both)


def _memory(o: Tensor, lse: Tensor) -> int | None:
    """Number of tokens in the memory of o (tokens before heads) and lse; None for other strides."""
    B, H, T, V = o.shape
    tokens = lse.stride(1) if H > 1 else lse.stride(0) if B > 1 else T
    wanted = tokens * H * V, V, H * V, 1, H * tokens, tokens, 1
    places = zip((*o.shape, *lse.shape), o.stride() + lse.stride(), wanted, strict=True)
    return tokens if all(size == 1 or stride == other for size, stride, other in places) else None


def merge(o: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """``_merge`` by a Triton kernel. o and lse may be views of some tokens of larger tensors, see ``_memory``."""
    B, H, T, V = o.shape
    width = triton.next_power_of_2(V)
    rows, tile = T * H, max(1, MERGED // width)
    merge_kernel[triton.cdiv(rows, tile), B](
        o, lse, more, more_lse, rows, T, H, _memory(o, lse), V=V, BV=width, ROWS=tile, num_warps=4, **OPTIONS
    )


MERGED = 4096  # elements of o per Triton program
