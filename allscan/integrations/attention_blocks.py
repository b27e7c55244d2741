"""Causal attention of one rank's queries in blocks without a mask, whose results are merged by their log-sum-exps.

Queries attend to the rank's own keys in one causal block. In the zigzag layout this block covers both halves, since the
second half attends to all of the first. Queries attend to the earlier tokens of other ranks in blocks without a mask,
whose keys may have any order. In forward the own block overlaps with the gather of the other ranks' keys (or of the
latents from which the keys are projected), in backward with the reduce-scatter of their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from ..base.autograd import CustomOperator, Passes, ordered
from ..bindings.torch_compat import no_cuda_graph
from ..bindings.triton_compat import OPTIONS
from ..shmem_kernels.softmax_parts import merge_kernel
from .attention_backward import tokens_first
from .attention_kernels import Kernel, kernel_for, strided_like
from .softmax import Gather


def reads(rank: int, size: int, zigzag: bool) -> tuple[list[int], list[tuple[range, int]]]:
    """(slots, [(halves, n)]): a rank's queries attend to these slots of ``softmax.Gather`` besides the rank's own keys;
    the queries in ``halves`` attend to the last n of them. The contiguous layout has one half."""
    if not zigzag:
        return [*range(rank)], [(range(1), rank)] if rank else []
    first = [*range(0, 2 * rank, 2)]
    slots = [*range(2 * (rank + 1), 2 * size), *first]
    if len(slots) == len(first):
        return slots, [(range(2), rank)] if rank else []
    return slots, [(range(1), rank)] * (rank > 0) + [(range(1, 2), len(slots))]


class Blocks(NamedTuple):
    """How attention runs in merged blocks.

    gather: a softmax.Gather of k and v as [B, T, ...], or of the tensors [B, T, ...] that ``project`` maps to k and v
    (``project`` gets them with tokens in the third dimension); None if the rank is alone. dropout: no kernel for blocks
    has it.
    """

    gather: Gather | None
    scale: float | None = None
    project: Callable[..., Any] | None = None
    dropout: float = 0.0


def merged(q: Tensor, k: Tensor, v: Tensor, how: Blocks, kernel: Kernel | None = None) -> torch.Tensor:
    """Causal attention output [B, T, H, V] of a rank's queries over the tokens of all ranks.

    q [B, H, T, D], k [B, G, T, D], v [B, G, T, V]: this rank's tensors. kernel: the result of
    ``kernel_for`` for them, which must not be None.
    """
    if torch.compiler.is_compiling():
        return _traced(q, k, v, how)
    gather, scale = how.gather, q.shape[-1] ** -0.5 if how.scale is None else how.scale
    kernel, shared = kernel or kernel_for(q, k, v), _Shared()
    q = tokens_first(q)
    o, lse = _Own.apply(shared, kernel, scale, q, k, v)
    slots, rows = ([], []) if gather is None else _rows(gather, q)
    keys = () if gather is None else _keys(gather.read(slots), how.project, q.dtype, bool(rows))
    return _Others.apply(shared, (kernel, scale, rows), q.detach(), o, lse, *keys).transpose(1, 2)


def after_others(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> torch.Tensor | None:
    """Causal attention output [B, H, T, V] of queries [B, H, T, D] over keys [B, G, S, D] and values [B, G, S, V], the
    last query aligned with the last key; without gradients. None if there is no kernel for that."""
    scale, before = q.shape[-1] ** -0.5 if scale is None else scale, k.shape[2] - q.shape[2]
    own = q, *(x[:, :, before:] for x in (k, v))
    if (kernel := kernel_for(*own)) is None:
        return None
    o, lse, _ = kernel.forward(*own, True, scale)
    _add(kernel, scale, [(slice(None), slice(before))], (q, o, lse), (k, v))
    return o


def _traced(q: Tensor, k: Tensor, v: Tensor, how: Blocks) -> torch.Tensor:
    """``merged`` for torch.compile. Its backward is one operator: the reduce-scatter begins after it."""
    gather, scale = how.gather, q.shape[-1] ** -0.5 if how.scale is None else how.scale
    q = tokens_first(q)
    o, lse = _own_block(q.detach(), k.detach(), v.detach(), scale)
    slots, rows = ([], []) if gather is None else _rows(gather, q)
    none = [x[:, :, :0] for x in (k, v)]
    keys = none if gather is None else _keys(gather.read(slots), how.project, q.dtype, bool(rows))
    places = [place for some in rows for part in some for place in (part.start, part.stop)]
    return _blocks.forward(q, k, v, o, lse, *keys, places, scale)[0].transpose(1, 2)


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
        ctx.more = _add(kernel, ctx.scale, ctx.rows, (q, o, lse), keys)
        o = o.detach()
        ctx.save_for_backward(q, o, lse, *keys)
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[torch.Tensor | None, ...]:
        q, o, lse, *keys = ctx.saved_tensors
        do = strided_like(do, o)
        blocks = list(zip(ctx.rows, ctx.more, strict=True))
        parts, sums = _gradients(ctx.scale, blocks, do, (q, o, lse), keys)
        ctx.shared.merged, ctx.shared.parts = (o, lse), parts
        return None, None, None, do, None, *sums


# The blocks as custom operators, for torch.compile. What kernels save for backward besides tensors depends on the
# shapes alone, as there is no dropout.

_saved: dict[tuple, Any] = {}


def _own_traced(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    if not q.shape[2]:
        return _own_fake(q, k, v)
    if (kernel := kernel_for(q, k, v)) is None:  # there was one when the layer was traced
        raise RuntimeError("torch's switches have changed since torch.compile: call torch.compiler.reset()")
    o, lse, more = kernel.forward(q, k, v, True, scale)
    _saved[_key(q, k, v)] = kernel, more
    return tokens_first(o), lse.contiguous()


def _key(*tensors: Tensor) -> tuple:
    return tuple((x.shape, x.dtype, x.device) for x in tensors)


def _own_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    B, H, T = q.shape[:3]
    lse = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(B, T, H, v.shape[-1]).transpose(1, 2), q.new_empty(B, H, T, dtype=lse)


def _blocks_traced(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    key: Tensor,
    value: Tensor,
    places: Sequence[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    o, lse = tokens_first(o.clone()), lse.clone(memory_format=torch.contiguous_format)
    if q.shape[2]:
        kernel, _ = _saved[_key(q, k, v)]
        _saved[(*_key(q, k, v, key), *places)] = _add(kernel, scale, _slices(places), (q, o, lse), (key, value))
    return o, lse


def _slices(places: Sequence[int]) -> list[tuple[slice, slice]]:
    return [(slice(*places[i : i + 2]), slice(*places[i + 2 : i + 4])) for i in range(0, len(places), 4)]


def _blocks_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    key: Tensor,
    value: Tensor,
    places: Sequence[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    if not q.shape[2]:
        return _blocks_fake_backward(do, q, k, v, o, lse, key, value)
    do, lse = strided_like(do, o), lse.contiguous()
    kernel, more = _saved[_key(q, k, v)]
    blocks = list(zip(_slices(places), _saved[(*_key(q, k, v, key), *places)], strict=True))
    parts, sums = _gradients(scale, blocks, do, (q, o, lse), (key, value))
    dq, dk, dv = kernel.backward(do, q, k, v, o, lse, more, True, scale)
    for rows, part in parts:
        dq[:, :, rows] += part.to(dq.dtype)
    dq, dk, dv, dkey, dvalue = (tokens_first(x) for x in (dq, dk, dv, *sums))
    return dq, dk, dv, dkey, dvalue


def _blocks_fake_backward(do: Tensor, *inputs: Any) -> Any:
    like = *inputs[:3], *inputs[5:7]
    return tuple(x.new_zeros(x.transpose(1, 2).shape).transpose(1, 2) for x in like)


def _save_blocks(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, _, _, key, value, ctx.places, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output, key, value)
    ctx.mark_non_differentiable(output[1])


def _gradient_blocks(backward: Any, ctx: Any, do: Tensor, _: Any) -> tuple[Any, ...]:
    dq, dk, dv, dkey, dvalue = backward(do, *ctx.saved_tensors, ctx.places, ctx.scale)
    return dq, dk, dv, None, None, dkey, dvalue


_own_block = ordered("allscan::own_block", _own_traced, _own_fake)
_blocks = CustomOperator(
    "allscan::blocks",
    Passes(_blocks_traced, _own_fake, _blocks_backward, _blocks_fake_backward, strided=True),
    _save_blocks,
    _gradient_blocks,
    tags=no_cuda_graph,  # ``_saved``
)


def _add(kernel: Any, scale: float, rows: Any, of: Sequence[Tensor], keys: Sequence[Tensor]) -> list:
    """Merge the attention to these keys into o and lse; returns (kernel, values saved for its backward) for each block.

    of: this rank's queries, o and lse over the keys processed so far. A block may be too small for ``kernel``, that of
    the own block; then another one is used.
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
    scale: float, blocks: Any, do: Tensor, of: Sequence[Tensor], keys: Sequence[Tensor]
) -> tuple[list[tuple[slice, torch.Tensor]], list[torch.Tensor]]:
    """([(rows, dq)], [dk, dv]). blocks: (rows, result of ``_add``) for each block."""
    parts, sums = [], None
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
