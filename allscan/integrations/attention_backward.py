"""Gradients of attention without a mask by kernels that are faster with other blocks.

*Triangles*: a square of n queries and n keys splits into the keys up to each query, and the keys behind it. In reverse
order the keys behind a query precede it; with the queries shifted by one place they are the keys up to it, and the last
place has a query without gradient. Both triangles are thus causal and of equal size, and their gradients are added in
float32. *Rows*: queries become rows of a batch, with the same keys.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from ..base.tiling import cdiv
from ..bindings.torch_compat import capturing
from ..bindings.triton_compat import OPTIONS
from ..shmem_kernels.softmax_parts import fold_kernel, reverse_kernel


def tokens_first(x: Tensor) -> torch.Tensor:
    """x [B, H, T, D] with tokens before heads in memory; a batch stride of 0 is kept."""
    if x.shape[0] > 1 and not x.stride(0):
        return tokens_first(x[:1]).expand(x.shape)
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def by_rows(backward: Callable, row: int, most: int) -> Callable:
    """Wrap an ``attention_kernels.Kernel.backward``: blocks of several times ``row`` queries become rows of a batch.

    A call has rows of one sequence, at most ``most`` divided by its keys. These are a part of the keys where two rows
    with all keys would be more, so that calls have two rows or more, unless one is left. Keys have a batch stride of 0.
    Causal blocks and other numbers of queries are left to ``backward``.
    """

    def backward_of_any(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
        o, lse, more, causal, scale = others
        rows, keys = q.shape[2] // row, k.shape[2]
        if causal or q.shape[2] % row or rows < 2 or not (keys and q.shape[0]):
            return backward(do, q, k, v, *others)

        def call(dy: Tensor, x: Tensor, K: Tensor, W: Tensor, y: Tensor, total: Tensor) -> list[torch.Tensor]:
            many = x.shape[2] // row
            dy, x, y, total = (squares(some, row, many) for some in (dy, x, y, total[..., None]))
            K, W = (squares(some, some.shape[2], many) for some in (K, W))
            dq, *found = backward(dy, x, K, W, y, total[..., 0].contiguous(), more, False, scale)
            sums = [some.transpose(1, 2).sum(0, keepdim=True).transpose(1, 2) for some in found]
            return [dq.transpose(0, 1).flatten(1, 2)[None], *sums]

        part = cdiv(keys, cdiv(2 * keys, most))
        at_once = cdiv(rows, cdiv(rows, most // part)) * row
        sequences = zip(*(x.split(1) for x in (do, q, k, v, o, lse)), strict=True)
        return _joined([in_parts(call, sequence, at_once, part) for sequence in sequences], 0)

    return backward_of_any


def in_parts(
    call: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], queries: int, keys: int
) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv) from calls with at most so many queries and keys; sums over calls are in float32.

    inputs: do, q, k, v, o, lse. call: a part of them -> [dq, dk, dv].
    """
    do, q, k, v, o, lse = inputs
    of_queries = [*zip(*(x.split(queries, 2) for x in (do, q, o, lse)), strict=True)]
    of_keys: list[list[torch.Tensor]] = []
    dq: list[list[torch.Tensor]] = [[] for _ in of_queries]
    for K, W in zip(*(x.split(keys, 2) for x in (k, v)), strict=True):
        sums: list[torch.Tensor] = []
        for i, (dy, x, y, total) in enumerate(of_queries):
            part, *found = call(dy, x, K, W, y, total)
            dq[i], sums = _added(dq[i], [part]), _added(sums, found)
        of_keys.append([x.to(q.dtype) for x in sums])
    (found_dq,) = _joined(dq, 2)
    return found_dq.to(q.dtype), *_joined(of_keys, 2)


def _joined(parts: Sequence[Sequence[Tensor]], dim: int) -> tuple[torch.Tensor, ...]:
    """Concatenate the first tensors [B, H, T, D] of all parts, the second ones, ...; tokens before heads in memory."""
    if len(parts) == 1:
        return tuple(parts[0])
    order = (0, 2, 1, 3)
    return tuple(torch.cat([x.permute(order) for x in column], order[dim]).permute(order) for column in zip(*parts))


def by_triangles(backward: Callable, least: int) -> Callable:
    """Wrap an ``attention_kernels.Kernel.backward``: squares of ``least`` tokens or more use its causal backward.

    The causal backward gets tensors whose batch stride may be 0. The first call for a shape also computes the kernel's
    unmasked gradients. If the two differ by more than rounding, in total or in a row, this and all later calls for the
    shape use the unmasked gradients, with a warning.
    """
    right: dict[tuple, bool] = {}

    def backward_of_any(
        do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, more: Any, causal: bool, scale: float
    ) -> tuple[torch.Tensor, ...]:
        n = math.gcd(q.shape[2], k.shape[2])
        inputs = do, q, k, v, o, lse, more
        key = q.device, q.dtype, *(x.shape for x in (q, k, v))
        looks = key not in right
        if causal or n < least or not right.get(key, True) or (looks and q.is_cuda and capturing()):
            return backward(*inputs, causal, scale)
        if not looks:
            return _in_triangles(backward, n, inputs, scale)
        plain = backward(*inputs, False, scale)
        size = sum(x.float().norm().item() for x in plain)
        if not math.isfinite(size) or size == 0.0:
            return plain  # nothing to compare
        try:
            found = _in_triangles(backward, n, inputs, scale)
            problem = _difference(found, plain)
        except torch.OutOfMemoryError:
            return plain
        except RuntimeError as error:  # the kernel does not support these inputs
            problem = str(error)
        right[key] = not problem
        if right[key]:
            return found
        warnings.warn(f"gradients of softmax attention in triangles are not taken: {problem}", stacklevel=2)
        return plain

    return backward_of_any


ROUNDING = 2e-2  # relative; bfloat16's is 3e-3 where nothing cancels
OF_A_ROW = 1e-1  # relative, for one token and head: its terms may cancel more than those of others


def _difference(found: Sequence[Tensor], plain: Sequence[Tensor]) -> str:
    """Description of a difference beyond rounding between gradients, or ""."""
    for name, x, y in zip(("queries", "keys", "values"), found, plain, strict=True):
        sizes, apart = (some.norm(dim=-1) for some in (_exact_of(y), _exact_of(x) - y))
        whole = (apart.norm() / sizes.norm().clamp_min(1e-30)).item()
        if not whole < ROUNDING:
            return f"those of {name} differ by {whole:.1e}"
        # a row much smaller than most others may consist of rounding errors
        least = sizes[sizes > 0].median() if whole else 1.0
        row = (apart / sizes.clamp_min(least)).max().item()
        if not row < OF_A_ROW:
            return f"those of {name} differ by {row:.1e} in a row"
    return ""


def _in_triangles(
    backward: Callable[..., Any], n: int, inputs: Sequence[Any], scale: float
) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv) by squares of n tokens, at most AT_ONCE squares in a call."""
    *tensors, more = inputs

    def call(*some: Tensor) -> list[torch.Tensor]:
        return _triangles(lambda *of: backward(*of, more, True, scale), n, some)

    queries = n if tensors[2].shape[2] > n else n * AT_ONCE
    return in_parts(call, tensors, queries, n * AT_ONCE)


AT_ONCE = 4  # enough to fill the GPU; their temporary tensors take 20 times the keys of one square


def _added(sums: Any, more: Any) -> list[torch.Tensor]:
    return [_exact_of(a).add_(b) for a, b in zip(sums, more, strict=True)] if sums else more


HIDDEN = 1e30  # log-sum-exp of the query without gradient: its keys get weight 0


def _triangles(backward: Callable[..., Any], n: int, inputs: Sequence[Any]) -> list[torch.Tensor]:
    """[dq, dk, dv] for n queries or n keys. inputs: do, q, k, v, o, lse."""
    *_, lse = inputs
    B, many = lse.shape[0], max(x.shape[2] for x in inputs[:3]) // n
    shifts = n - 2, n - 2, n - 1, n - 1, n - 2
    reverse_order = [reverse(x, n, shift, i == 0) for i, (x, shift) in enumerate(zip(inputs, shifts))]
    hidden = lse.unflatten(2, (-1, n)).flip(3).roll(-1, 3)
    hidden[..., -1] = HIDDEN
    found = []
    for *some, total in ((*inputs[:5], lse), (*reverse_order, hidden.flatten(2))):
        *parts, totals = (squares(x, n, many) for x in (*some, total[..., None]))
        found.append(backward(*parts, totals[..., 0].contiguous()))
    sizes = [(B, x.shape[2] // n) for x in inputs[1:4]]
    return [fold(x, y, n, shift, size) for x, y, shift, size in zip(*found, (n - 2, n - 1, n - 1), sizes)]


def _exact_of(x: Tensor) -> torch.Tensor:
    """x in float32, or in float64 if it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def squares(x: Tensor, n: int, many: int) -> torch.Tensor:
    """Batch rows of n tokens: x [B, H, n or many * n, W] -> [B * many, H, n, W], a view where B = 1."""
    if x.shape[2] == n:
        return x[:, None].expand(-1, many, -1, -1, -1).flatten(0, 1)
    return x.unflatten(2, (many, n)).movedim(2, 1).flatten(0, 1)


def reverse(x: Tensor, n: int, shift: int, without_last: int = False) -> torch.Tensor:
    """Reverse each block of n tokens of x [B, H, tokens, W]: row t becomes row (shift - t) mod n of the block.

    The result has tokens before heads in memory. without_last: the last row of each block is 0.
    """
    if x.is_cuda and x.stride(3) == 1:
        return launch_reverse(x, n, shift, without_last)
    places = (shift - torch.arange(n, device=x.device)) % n
    out = x.transpose(1, 2).unflatten(1, (-1, n)).index_select(2, places)
    if without_last:
        out[:, :, -1] = 0
    return out.flatten(1, 2).transpose(1, 2)


def launch_reverse(x: Tensor, n: int, shift: int, without_last: int) -> torch.Tensor:
    """``reverse`` by a Triton kernel."""
    B, H, T, W = x.shape
    out = x.new_empty(B, T, H, W)
    strides = x.stride(0), x.stride(2), x.stride(1)
    grid, tile = _tiles(n * H, W, B * T // n)
    reverse_kernel[grid](x, out, *strides, T // n, n, H, shift, WITHOUT_LAST=without_last, **tile, **OPTIONS)
    return out.transpose(1, 2)


def fold(x: Tensor, behind: Tensor, n: int, shift: int, size: tuple[int, int]) -> torch.Tensor:
    """Sum x and the reversed ``behind``, both [B * many, H, n, W], into [B, H, blocks * n, W]; size = (B, blocks).

    Row t of a block is the sum of the rows t of many / blocks squares of x and of the rows (shift - t) mod n of as many
    squares of ``behind``. The result has tokens before heads in memory.
    """
    if x.is_cuda and x.stride(3) == behind.stride(3) == 1:
        return launch_fold(x, behind, n, shift, size)
    total = _exact_of(x) + behind[:, :, (shift - torch.arange(n, device=x.device)) % n]
    return tokens_first(total.unflatten(0, (*size, -1)).sum(2).transpose(1, 2).flatten(2, 3)).to(x.dtype)


def launch_fold(x: Tensor, behind: Tensor, n: int, shift: int, size: tuple[int, int]) -> torch.Tensor:
    """``fold`` by a Triton kernel."""
    (many, H, _, W), (B, blocks) = x.shape, size
    out = x.new_empty(B, blocks * n, H, W)
    strides = (some.stride(i) for some in (x, behind) for i in (0, 2, 1))
    grid, tile = _tiles(n * H, W, B * blocks)
    fold_kernel[grid](x, behind, out, *strides, n, H, shift, MANY=many // (B * blocks), **tile, **OPTIONS)
    return out.transpose(1, 2)


def _tiles(rows: int, W: int, blocks: int) -> tuple[tuple[int, int], dict]:
    width = triton.next_power_of_2(W)
    tile = max(1, TILE // width)
    return (triton.cdiv(rows, tile), blocks), dict(W=W, BW=width, ROWS=tile, num_warps=4)


TILE = 4096  # elements per Triton program
