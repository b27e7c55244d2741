"""Stands for the modules ``chunkwise`` and ``gdp_common`` of Megatron-core's ``context_parallel``, in no release:
the names, arguments and results that ``integrations.megatron_chunkwise`` and a layer use, written for the tests.
support/gdp.py takes the real files instead if the variable ALLSCAN_MEGATRON names a checkout."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


@dataclass
class CPForwardPackedSummary:
    packed: torch.Tensor


@dataclass
class CPBackwardPackedSummary:
    packed: torch.Tensor


@dataclass
class CPSavedContext:
    tensors: tuple
    metadata: Any = None


class CPForwardResult(NamedTuple):
    output: torch.Tensor
    saved_context: CPSavedContext


class PackedSequenceCPMetadata(NamedTuple):
    local_seq_idx: torch.Tensor
    local_cu_seqlens: torch.Tensor
    preceding_rank_start: int
    following_rank_stop: int


class GDPInputs(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    cu_seqlens: torch.Tensor | None
    num_householder: int
    scale: float


def build_packed_sequence_cp_metadata(global_seq_idx, cp_rank, cp_size):
    numbers = global_seq_idx[0].tolist()
    T = len(numbers) // cp_size
    local = numbers[cp_rank * T : (cp_rank + 1) * T]
    ends = [0]
    for _, tokens in groupby(local):
        ends.append(ends[-1] + len([*tokens]))
    ranks = [[p for p in range(cp_size) if number in numbers[p * T : (p + 1) * T]] for number in (local[0], local[-1])]
    cuts = torch.tensor(ends, dtype=torch.int32, device=global_seq_idx.device)
    return PackedSequenceCPMetadata(torch.tensor([local]), cuts, ranks[0][0], ranks[1][-1] + 1)


def gathered(summary, group, which):
    every = summary.packed.new_empty(group.size(), *summary.packed.shape)
    dist.all_gather_into_tensor(every, summary.packed, group=group)
    return type(summary)(every[which])


def chunkwise_cp_forward(backend, inputs, cp_group, preceding_slice):
    summary, local = backend.cp_forward_prepare(inputs=inputs)
    preceding = gathered(summary, cp_group, preceding_slice)
    return CPForwardResult(*backend.cp_forward_apply(local_context=local, preceding_summaries=preceding))


def chunkwise_cp_backward(backend, output_grad, saved_context, cp_group, following_slice):
    summary, local = backend.cp_backward_prepare(output_grad=output_grad, saved_context=saved_context)
    following = gathered(summary, cp_group, following_slice)
    return backend.cp_backward_apply(backward_context=local, following_summaries=following)


class GDPChunkwiseContextParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        *fields, ctx.group, ctx.backend, first, ctx.end = arguments
        result = chunkwise_cp_forward(ctx.backend, GDPInputs(*fields), ctx.group, slice(first, ctx.group.rank()))
        ctx.save_for_backward(*result.saved_context.tensors)
        ctx.saved_metadata = result.saved_context.metadata
        return result.output

    @staticmethod
    def backward(ctx, output_grad):
        saved, following = CPSavedContext(ctx.saved_tensors, ctx.saved_metadata), slice(ctx.group.rank() + 1, ctx.end)
        gradients = chunkwise_cp_backward(ctx.backend, output_grad, saved, ctx.group, following)
        return *gradients, *[None] * 7


def gdp_chunkwise_context_parallel(
    q,
    k,
    v,
    g,
    beta,
    cu_seqlens,
    num_householder,
    scale,
    cp_group,
    backend,
    preceding_rank_start=0,
    following_rank_stop=None,
):
    end = cp_group.size() if following_rank_stop is None else following_rank_stop
    inputs = GDPInputs(q, k, v, g, beta, cu_seqlens, num_householder, scale)
    return backend.autograd_function.apply(*inputs, cp_group, backend, preceding_rank_start, end)
