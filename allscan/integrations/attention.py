"""Causal softmax attention of a rank's queries over the row of all ranks: ``attend``, for every model and layout.

A rank's share is a list of parts (queries, keys, whether it is causal); one of three back ends computes them: merged
blocks, one call of a kernel for packed sequences, or the model's own function. docs/architecture.md has the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ..base.checks import is_zigzag
from ..bindings.torch_compat import operator
from ..comm.communicator import Communicator, check_communicator
from ..ops.allscan import tie_backward
from ..tokens.packing import Tables, boundaries_on_host
from ..tokens.partition import cached_table
from .attention_blocks import Blocks, merged
from .attention_kernels import flash_fits, kernel_for, widened
from .softmax import Part, Row, Select, joined


def check_split(comm: Communicator | None, layout: str, per_document: bool, merged_attention: bool) -> bool:
    """Check the arguments of ``sequence_parallel``; returns whether the layout is zigzag.

    Raises TypeError or ValueError for invalid arguments.
    """
    if comm is not None:
        check_communicator(comm)
    zigzag = is_zigzag(layout)
    if per_document and not zigzag:
        raise ValueError(f'per_document=True is for layout="zigzag", got {layout!r}')
    if not isinstance(merged_attention, bool):
        raise TypeError(f"merged_attention must be True or False, got {merged_attention!r}")
    return zigzag


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row: Row,
    function: Callable[..., Any],
    varlen: Callable[..., Any] | None = None,
    blocks: Blocks | None = None,
) -> torch.Tensor:
    """Causal attention output [B, T, H, V] of this rank's queries q [B, T, H, D].

    k [B, S, G, D], v [B, S, G, V]: the keys and values of the ``row.past`` tokens before the row, if any, and of all
    ranks in the order of the row; with ``blocks`` those of this rank, as the other ranks' are still to be read from
    ``blocks.gather``.
    function: (q, k, v) [B, tokens, heads, width] -> output of one causal part, the model's own function.
    varlen: (q, k, v, cu_seqlens of queries, of keys, longest of both) -> output of many causal parts, for packed
        sequences; q, k and v are [tokens, heads, width]. None: there is no such kernel.
    """
    if not row.own:  # transformers pads this rank's tokens
        q, k, v = (x[:, :0] for x in (q, k, v)) if blocks is not None else (q[:, :0], k, v)
    if blocks is not None:
        gather, project, dropout = blocks.gather, blocks.project, blocks.dropout
        own = [x.transpose(1, 2) for x in (q, k, v)]
        if not dropout and (kernel := kernel_for(*own)) is not None:
            return merged(own[0], own[1], own[2], blocks, kernel)
        assert gather is not None  # of several ranks
        found = row.in_order(gather)
        if project is not None:
            found = [x.transpose(1, 2) for x in project(*(x.transpose(1, 2) for x in found))]
        k, v = (x.to(like.dtype) for x, like in zip(found, (k, v), strict=True))
    if not row.own:  # this rank must join the backward's collectives, those of DistributedDataParallel, too
        return tie_backward(row.comm, q.new_zeros(*q.shape[:3], v.shape[-1]), q, k, v)
    if row.lengths is None or varlen is None:
        parts = row.parts()
        queries = _split(q, 1, [p.end - p.start for p in parts])
        past = row.past or 0  # packed sequences have none
        return joined(
            [function(y, *(x[:, p.begin : past + p.last] for x in (k, v))) for y, p in zip(queries, parts)], 1
        )
    halves = (0, 1) if row.zigzag and not row.per_document else (None,)
    calls, outputs = [packed_of(row, half) for half in halves], []
    for y, call in zip(_split(q[0], 0, [call.tokens for call in calls]), calls, strict=True):
        keys = [Select.apply(x[0], 0, *call.selected) if call.selected else x[0, call.keys] for x in (k, v)]
        outputs.append(varlen(y, *keys, *call.tensors[:2], *call.longest))
    return joined(outputs, 0)[None]


def _split(x: Tensor, dim: int, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
    return [x] if len(sizes) == 1 else x.split(sizes, dim)


class Packed(Tables):
    """The tables of some parts of a rank, for one call.

    Tensors: cu_seqlens of the queries; of the keys, concatenated by part; for each part the number of its sequence's
    tokens before it. select: the number of tokens in the row, for parts whose keys overlap: also the arguments of
    ``Select`` for the keys of all parts; 0: each part's keys follow the previous part's in the row, and are ``keys``.
    """

    def __init__(self, parts: Sequence[Part], select: int, device: torch.device) -> None:
        queries, keys = [p.end - p.start for p in parts], [p.last - p.begin for p in parts]
        self.tokens, self.longest = sum(queries), (max(queries), max(keys))
        self.keys = slice(parts[0].begin, parts[-1].last)
        cuts = [[*accumulate(sizes, initial=0)] for sizes in (queries, keys)]
        numbers = *cuts, [p.before for p in parts]
        tables = [torch.tensor(x, dtype=torch.int32, device="cpu") for x in numbers]
        if select:
            seen = [torch.arange(p.begin, p.last, device="cpu") for p in parts]
            where = torch.full((2, select), cuts[1][-1], device="cpu")
            for p, tokens, place in zip(parts, seen, pairwise(cuts[1]), strict=True):
                where[p.half, tokens] = torch.arange(*place, device="cpu")
            tables += [torch.cat(seen), where]
        super().__init__(tables, device)
        self.selected = self.tensors[3:]


def packed_of(row: Row, half: int | None = None) -> Packed:
    """The tables of all parts of the rank, or of those in a half of its tokens; cached."""
    assert row.lengths is not None  # of packed sequences
    key = "attention", half, tuple(row.tokens), row.zigzag, row.per_document, boundaries_on_host(row.lengths)

    def make() -> Packed:
        parts = [p for p in row.parts() if half in (None, p.half)]
        return Packed(parts, sum(row.tokens) * row.per_document, row.comm.device)

    return cached_table(row.comm, key, make)


# Packed sequences use FlashAttention 2: its causal mask aligns the last query with the last key

flash_packed = operator(
    "_flash_attention_forward",
    "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask scale",
    more=True,
)


def takes_packed(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel for packed sequences supports these tensors."""
    return flash_packed is not None and flash_fits(q, k, v)


def attend_packed(q: Tensor, k: Tensor, v: Tensor, row: Row, scale: float | None = None) -> torch.Tensor:
    """``attend`` over packed sequences by PyTorch's FlashAttention 2."""
    scale, width = q.shape[-1] ** -0.5 if scale is None else scale, v.shape[-1]

    def varlen(*tensors: Any) -> torch.Tensor:
        return flash_packed(*tensors, 0.0, True, False, scale=scale)[0]

    q, k, v = widened(q, k, v)
    return attend(q, k, v, row, function=varlen, varlen=varlen)[..., :width]  # calls no function of parts
