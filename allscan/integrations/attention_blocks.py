"""Causal attention of one rank's queries in blocks without a mask, whose results are merged by their log-sum-exps.

Queries attend to the rank's own keys in one causal block. In the zigzag layout this block covers both halves, since the
second half attends to all of the first. Queries attend to the earlier tokens of other ranks in blocks without a mask,
whose keys may have any order. In forward the own block overlaps with the gather of the other ranks' keys (or of the
latents from which the keys are projected), in backward with the reduce-scatter of their gradients.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import get_device_states, set_device_states

from ..base.autograd import CustomOperator, Passes, ordered
from ..bindings.torch_compat import TorchDispatchMode, no_cuda_graph
from ..bindings.triton_compat import OPTIONS
from ..launch.compiled_kernel import dynamo_disabled
from ..shmem_kernels.softmax_parts import merge_kernel
from .attention_backward import exact_of, tokens_first
from .attention_kernels import Kernel, kernel_for, strided_like
from .softmax import Gather, Row, Start


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


class Blocks(NamedTuple):
    """How attention runs in merged blocks.

    gather: a softmax.Gather or ChunkedGather of k and v as [B, T, ...], or of the tensors [B, T, ...] that ``project``
    maps to k and v (``project`` gets them with tokens in the third dimension); None if the rank is alone. latents: with
    ChunkedGather and ``project``, the tensors from which k and v were projected. dropout: no kernel for blocks has it.
    """

    gather: Any
    scale: float | None = None
    project: Callable[..., Any] | None = None
    latents: Sequence[Tensor] = ()
    dropout: float = 0.0


def merged(q: Tensor, k: Tensor, v: Tensor, how: Blocks, kernel: Kernel | None = None) -> torch.Tensor:
    """Causal attention output [B, T, H, V] of a rank's queries over the tokens of all ranks.

    q [B, H, T, D], k [B, G, T, D], v [B, G, T, V]: this rank's tensors. kernel: the result of
    ``kernel_for`` for them, which must not be None.
    """
    if torch.compiler.is_compiling():
        return (_in_steps if isinstance(how.gather, ChunkedGather) else _traced)(q, k, v, how)
    gather, project = how.gather, how.project
    scale = q.shape[-1] ** -0.5 if how.scale is None else how.scale
    sources: list = []
    if isinstance(gather, ChunkedGather):
        if gather.set_ranges(*(() if project is None else (k, v))) > 1:
            sources = [] if project is None else _leaves((k, v), how.latents)
        else:
            gather = gather.step(0, gather.tensors)
    kernel, shared = kernel or kernel_for(q, k, v), _Shared()
    q = tokens_first(q)
    if isinstance(gather, ChunkedGather):
        tensors, gather.tensors = gather.tensors, ()  # autograd saves them
        token = Start.apply(gather, *tensors)
        o, lse = _Own.apply(shared, kernel, scale, q, k, v)
        steps, tensors = (gather, project, kernel, scale), tuple(x.detach() for x in tensors)
        o = _Steps.apply(shared, steps, q.detach(), o, lse, token, *tensors, *sources)
    else:
        o, lse = _Own.apply(shared, kernel, scale, q, k, v)
        slots, rows = ([], []) if gather is None else _rows(gather, q)
        keys = () if gather is None else _keys(gather.read(slots), project, q.dtype, bool(rows))
        o = _Others.apply(shared, (kernel, scale, rows), q.detach(), o, lse, *keys)
    return o.transpose(1, 2)


_in_steps = dynamo_disabled(merged)


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
    kernel = kernel_for(q, k, v)
    o, lse, more = kernel.forward(q, k, v, True, scale)  # type: ignore[union-attr]
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
    o, lse = tokens_first(o.clone()), lse.clone()
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
    do = strided_like(do, o)
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
    Passes(_blocks_traced, _own_fake, _blocks_backward, _blocks_fake_backward),
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


class ChunkedGather:
    """Gathers the tokens of all ranks in steps that fit into ``memory`` bytes, in forward and again in backward.

    tensors: the keys and values, or the inputs of the ``project`` function of ``merged``, which starts the gathers once
    it knows how many tokens fit.
    """

    def __init__(self, row: Row, memory: int, *tensors: Tensor) -> None:
        self.comm, self.tokens, self.halves = row.comm, row.tokens, 1 + row.zigzag
        self.memory, self.tensors, self.count = memory, tensors, len(tensors)
        self.ranges: list[tuple[int, int]] = []  # tokens (first, end) of each step, in each half of each rank
        self.sums: list[torch.Tensor] | None = None  # gradients of all tokens, filled by backward's steps
        self.last: tuple[int, Gather, Sequence[Tensor]] | None = None  # the step whose reduce-scatter runs
        self.arriving: Gather | None = None  # the first step

    def set_ranges(self, *keys: Tensor) -> int:
        """Compute the steps, equal on all ranks; returns their number.

        keys: the keys and values projected from this rank's tensors, for their size. The memory is counted for two
        steps, since one step is gathered while the other is read.
        """
        length = max(self.tokens) // self.halves
        token = sum(2 * x.element_size() * math.prod([x.shape[0], *x.shape[2:]]) for x in self.tensors)
        token += sum(x.element_size() * math.prod([*x.shape[:2], x.shape[3]]) for x in keys)
        step = max(1, min(self.memory // max(1, token * self.comm.size * self.halves), length))
        self.ranges = [(first, min(first + step, length)) for first in range(0, max(length, 1), step)]
        return len(self.ranges)

    def _of_step(self, x: Tensor, step: int) -> torch.Tensor:
        """View of a step's tokens in x [B, T, ...]: [B, halves, tokens, ...]."""
        return x.unflatten(1, (self.halves, x.shape[1] // self.halves))[:, :, slice(*self.ranges[step])]

    def start(self, tensors: Sequence[Tensor]) -> None:
        self.arriving = self.step(0, tensors)

    def step(self, number: int, tensors: Sequence[Tensor]) -> Any:
        """Start a step's Gather; None behind the last step."""
        if number == len(self.ranges):
            return None
        first, end = self.ranges[number]
        tokens = [max(min(end, n // self.halves) - first, 0) * self.halves for n in self.tokens]
        return Gather(self.comm, tokens, self.halves == 2, *(self._of_step(x, number).flatten(1, 2) for x in tensors))

    def start_sum(self, number: int, gather: Gather, slots: Any, gradients: Any, like: Sequence[Tensor]) -> None:
        """Wait for the previous step's reduce-scatter, and start this one's. like: this rank's tensors, all tokens."""
        self._collect()
        gather.start_sum(slots, gradients)
        self.last = number, gather, like

    def _collect(self) -> None:
        """Wait for the reduce-scatter that runs, and copy its results into the sums of all tokens."""
        if self.last is not None:
            number, gather, like = self.last
            self.sums = self.sums or [x.new_empty(x.shape) for x in like]
            for total, x in zip(self.sums, gather.finish_sum(), strict=True):
                self._of_step(total, number).copy_(x.unflatten(1, (self.halves, x.shape[1] // self.halves)))

    def finish_sum(self) -> Any:
        self._collect()
        sums, self.sums, self.last = self.sums, None, None
        return sums


class _Steps(torch.autograd.Function):
    """``_Others`` in steps: each step gathers tokens and projects keys, in forward and again in backward.

    inputs: the gathered tensors, and the parameters of ``project``."""

    @staticmethod
    def forward(
        ctx: Any, shared: _Shared, how: Any, q: Tensor, o: Tensor, lse: Tensor, token: Tensor, *inputs: Any
    ) -> torch.Tensor:
        chunked, project, kernel, scale = how
        gather, chunked.arriving = chunked.arriving, None
        ctx.shared, ctx.how, ctx.blocks = shared, (chunked, project, scale), []
        device = q.device.type
        ctx.autocast = dict(device_type=device, dtype=torch.get_autocast_dtype(device), cache_enabled=False)
        ctx.autocast["enabled"] = torch.is_autocast_enabled(device)
        again = project is not None and any(ctx.needs_input_grad)  # backward projects again
        captured = again and chunked.comm.streams.capturing()  # torch does not read a generator in a capture
        ctx.random = (torch.get_rng_state(), *get_device_states(q)) if again and not captured else None
        exact = exact_of(o)  # rounded once, after all steps
        for step in range(len(chunked.ranges)):
            following = chunked.step(step + 1, inputs[: chunked.count])
            slots, rows = _rows(gather, q)
            found = gather.finish(slots)
            with _WithoutRandom() if captured else contextlib.nullcontext():
                keys = _keys(found, project, q.dtype, bool(rows))
            ctx.blocks.append(_add(kernel, scale, rows, (q, exact, lse), keys))
            gather = following
        o = o.copy_(exact).detach()
        ctx.save_for_backward(q, o, lse, *inputs)
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.random is None:
            return _Steps._backward(ctx, do)
        on_host, devices, on_devices = ctx.random  # dropout in the projection repeats forward's
        with torch.random.fork_rng(devices, device_type=do.device.type):
            torch.set_rng_state(on_host)
            set_device_states(devices, on_devices, device_type=do.device.type)
            return _Steps._backward(ctx, do)

    @staticmethod
    def _backward(ctx: Any, do: Tensor) -> tuple[torch.Tensor | None, ...]:
        q, o, lse, *inputs = ctx.saved_tensors
        chunked, project, scale = ctx.how
        tensors, sources = inputs[: chunked.count], inputs[chunked.count :]
        do, total = strided_like(do, o), torch.zeros_like(exact_of(q))
        weights: list[torch.Tensor | None] = [None] * len(sources)
        gradients: Sequence[torch.Tensor]
        gather = chunked.step(0, tensors)
        for step in range(len(chunked.ranges)):
            following = chunked.step(step + 1, tensors)
            slots, rows = _rows(gather, q)
            found = [x.detach().requires_grad_() for x in gather.finish(slots)]
            with torch.enable_grad(), torch.autocast(**ctx.autocast):
                keys = _keys(found, project, q.dtype, bool(rows))
                # sources may be copies of forward's parameters (saved_tensors_hooks), with their nodes
                known, used = ({get_gradient_edge(x).node for x in y} for y in (sources, _leaves(keys, found)))
            if not used <= known:
                raise RuntimeError(
                    "with attention.memory backward projects keys again, and the projection has other parameters than "
                    "in forward (torch.func.functional_call?)"
                )
            blocks = list(zip(rows, ctx.blocks[step], strict=True))
            parts, gradients = _gradients(scale, blocks, do, (q, o, lse), [x.detach() for x in keys])
            for mine, dq in parts:
                total[:, :, mine] += dq
            gradients = torch.autograd.grad(keys, [*found, *sources], gradients, allow_unused=True)
            sums = [torch.zeros_like(a) if b is None else b for a, b in zip(found, gradients)]
            pairs = zip(weights, gradients[len(found) :], strict=True)
            weights = [b if a is None else a if b is None else a + b for a, b in pairs]
            chunked.start_sum(step, gather, slots, sums, tensors)
            gather = following
        ctx.shared.merged, ctx.shared.parts = (o, lse), [(slice(None), total)]
        return None, None, None, do, None, do.new_zeros(0), *[None] * chunked.count, *weights


class _WithoutRandom(TorchDispatchMode):
    """Raises RuntimeError for an operator that draws random numbers."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(function, "tags", ()):
            raise RuntimeError(
                f"with attention.memory a projection that draws random numbers ({function}) cannot be captured in a "
                f"CUDA graph: its backward could not repeat them"
            )
        return function(*args, **(kwargs or {}))


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
