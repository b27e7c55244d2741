"""Causal softmax attention over a split sequence, in blocks that need no mask, by the fastest kernels that PyTorch has.

A rank's queries see its own keys by one causal block, or in the zigzag layout by one for each half, and earlier tokens
by blocks without a mask, whose keys may lie in any order; results are merged by their log-sum-exps. The own blocks run
while the other ranks' keys, or the latents that these are made of, are under way; in backward while the sums of their
gradients are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton

from ..bindings.triton_compat import OPTIONS
from ..shmem_kernels.merge import merge_kernel
from ..torch_compat import operator


class Kernel(NamedTuple):
    """Attention kernels that give and take log-sum-exps.

    forward: (q [B, H, T, D], k [B, G, S, D], v [B, G, S, V], causal, scale) -> (o [B, H, T, V], lse [B, H, T], what
        backward is to get); H is a multiple of G; causal where T = S only. o has its tokens before its heads in memory.
    backward: (do, q, k, v, o, lse, that, causal, scale) -> (dq, dk, dv). o and lse may be those over more keys: these
        get what is theirs.
    """

    name: str
    forward: Callable
    backward: Callable
    fits: Callable  # (q, k, v) -> bool


def kernel_for(q, k, v) -> Kernel | None:
    """The fastest for tensors like these, None without one. Ask again where torch's switches may have changed."""
    return next((kernel for kernel in KERNELS if kernel.fits(q, k, v)), None)


def tokens_first(x):
    """x [B, H, T, D] with tokens before heads in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _like(x, other):
    """x with the strides of ``other``, of the same shape."""
    return x if x.stride() == other.stride() else torch.empty_like(other).copy_(x)


def _aligned(x):
    """x as kernels for GPUs read it: words of 16 bytes."""
    words = 16 // x.element_size()
    fits = x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and not any(s % words for s in x.stride()[:-1])
    return x if fits else x.contiguous()


# cuDNN. Its graphs for backward are cached by the layouts of q, k and v only, while they hold those of o, its gradient
# and the log-sum-exp: these always follow from q's here, as where PyTorch calls it.


def _cudnn_forward(q, k, v, causal, scale):
    found = cudnn(tokens_first(q), _aligned(k), _aligned(v), None, True, 0.0, causal, False, scale=scale)
    o, lse, *lengths, seed, offset, _ = found
    return o, lse.view(q.shape[:3]), (lse.shape, lengths, (seed, offset))


def _cudnn_backward(do, q, k, v, o, lse, more, causal, scale):
    shape, lengths, seeds = more
    return cudnn_backward(
        _like(do, o), tokens_first(q), _aligned(k), _aligned(v), o, lse.reshape(shape), *seeds, None, *lengths, 0.0,
        causal, scale=scale,
    )  # fmt: skip


def _cudnn_fits(q, k, v) -> bool:
    D, V = q.shape[-1], v.shape[-1]
    if not _half_on_gpu(q, (9, 0)) or torch.are_deterministic_algorithms_enabled() or not CUDNN_IS_KNOWN:
        return False
    if q.shape[2] < CUDNN_TOKENS or k.shape[2] < CUDNN_TOKENS or D % 8 or V % 8:
        return False
    if torch.cuda.get_device_capability(q.device)[0] > 9 and k.shape[1] < 8:  # reported to be wrong there
        return False
    return (max(D, V) <= 128 or (D, V) == (192, 128)) and torch.backends.cuda.cudnn_sdp_enabled()


CUDNN_TOKENS = 256  # where fewer, flash: a plan for each new length costs the host more than the kernel saves
cudnn = operator(
    "_scaled_dot_product_cudnn_attention",
    "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask scale",
)
cudnn_backward = operator(
    "_scaled_dot_product_cudnn_attention_backward",
    "grad_out query key value out logsumexp philox_seed philox_offset attn_bias cum_seq_q cum_seq_k max_q max_k "
    "dropout_p is_causal scale",
)
CUDNN_IS_KNOWN = None not in (cudnn, cudnn_backward)


def _half_on_gpu(x, capability) -> bool:
    return (
        x.device.type == "cuda"
        and x.dtype in (torch.bfloat16, torch.float16)
        and torch.version.hip is None
        and torch.cuda.get_device_capability(x.device) >= capability
    )


# FlashAttention 2 as PyTorch has it


def _flash_forward(q, k, v, causal, scale):
    q, k, v = (_aligned(x) for x in (q, k, v))
    found = flash(q, k, v, 0.0, causal, False, scale=scale)
    o, lse, *lengths, seed, offset, _ = found
    return o, lse, (lengths, (seed, offset))


def _flash_backward(do, q, k, v, o, lse, more, causal, scale):
    lengths, seeds = more
    do, q, k, v, o = (_aligned(x) for x in (do, q, k, v, o))
    return flash_backward(do, q, k, v, o, lse, *lengths, 0.0, causal, *seeds, scale=scale)


def _flash_fits(q, k, v) -> bool:
    width = max(q.shape[-1], v.shape[-1])
    return FLASH_IS_KNOWN and _half_on_gpu(q, (8, 0)) and width <= 256 and torch.backends.cuda.flash_sdp_enabled()


flash = operator("_scaled_dot_product_flash_attention", "query key value dropout_p is_causal return_debug_mask scale")
flash_backward = operator(
    "_scaled_dot_product_flash_attention_backward",
    "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal philox_seed "
    "philox_offset scale",
)
FLASH_IS_KNOWN = None not in (flash, flash_backward)


# PyTorch's on CPUs


on_cpu = operator("_scaled_dot_product_flash_attention_for_cpu", "query key value dropout_p is_causal attn_mask scale")
on_cpu_backward = operator(
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "grad_out query key value out logsumexp dropout_p is_causal attn_mask scale",
)


def _cpu_forward(q, k, v, causal, scale):
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    return *on_cpu(q, k, v, 0.0, causal, scale=scale), None


def _cpu_backward(do, q, k, v, o, lse, _, causal, scale):
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    dq, *others = on_cpu_backward(do, q, k, v, o, lse, 0.0, causal, scale=scale)
    return dq, *(x.unflatten(1, (-1, groups)).sum(2) for x in others)


def _cpu_fits(q, k, v) -> bool:
    return q.device.type == "cpu"


def _of_one_width(forward, backward) -> tuple[Callable, Callable]:
    """The same where the kernels want q, k and v of one width, a multiple of 8."""

    def wide(*tensors):
        width = max(x.shape[-1] for x in tensors)
        width += -width % 8
        return [F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in tensors]

    def forward_of_any(q, k, v, causal, scale):
        o, lse, more = forward(*wide(q, k, v), causal, scale)
        return tokens_first(o[..., : v.shape[-1]]), lse, more

    def backward_of_any(do, q, k, v, o, lse, more, causal, scale):
        do, q_, k_, v_, o = wide(do, q, k, v, o)
        found = backward(do, q_, k_, v_, o, lse, more, causal, scale)
        return tuple(dx[..., : x.shape[-1]] for dx, x in zip(found, (q, k, v), strict=True))

    return forward_of_any, backward_of_any


KERNELS = (
    Kernel("cudnn", _cudnn_forward, _cudnn_backward, _cudnn_fits),
    Kernel("flash", *_of_one_width(_flash_forward, _flash_backward), _flash_fits),
    Kernel("cpu", *_of_one_width(_cpu_forward, _cpu_backward), _cpu_fits),
)


# The blocks


def reads(rank: int, size: int, zigzag: bool) -> tuple[range, list[tuple[int, range]]]:
    """(slots of :class:`softmax.Gather` that a rank's queries see beside its own causal blocks, [(half, those of its
    slots that this half of the queries sees)]); in the contiguous layout there is one half."""
    if not zigzag:
        return range(rank), [(0, range(rank))] if rank else []
    halves = [(0, range(size, size + rank)), (1, range(rank + 1, 2 * size))]
    return range(rank + 1, 2 * size), halves if rank else halves[1:]


def attend(q, k, v, gather, scale=None, project=None):
    """o [B, T, H, V] of a rank's queries to all tokens up to each.

    q [B, H, T, D], k [B, G, T, D], v [B, G, T, V]: of this rank's tokens, for which kernel_for has a kernel. gather: a
    softmax.Gather of the tensors [B, T, ...] of which ``project`` makes k and v, else of k and v with tokens first.
    """
    halves, rank, batch = gather.halves, gather.comm.rank, q.shape[0]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (_halved(x, halves) for x in (q, k, v))
    kernel, shared = kernel_for(q, k, v), _Shared()
    q = tokens_first(q)
    o, lse = _Own.apply(shared, kernel, scale, q, k, v)
    slots, blocks = reads(rank, gather.comm.size, halves == 2)
    if not q.shape[2]:  # a rank without tokens takes part in what others do
        slots, blocks = range(0), []
    keys, rows = gather.read(slots), []
    for half, seen in blocks:
        before, inside = (sum(gather.filled[slot] for slot in some) for some in (range(slots[0], seen[0]), seen))
        if inside:
            rows.append((slice(half * batch, (half + 1) * batch), slice(before, before + inside)))
    if rows:
        keys = (x.transpose(1, 2) for x in keys)
        keys = [x.to(q.dtype) for x in (keys if project is None else project(*keys))]
    o = _Others.apply(shared, kernel, scale, rows, q.detach(), o, lse, *keys)
    return o.transpose(1, 2).unflatten(0, (halves, batch)).movedim(0, 1).flatten(1, 2)


def _halved(x, halves):
    """[B, H, T, D] -> [halves * B, H, T / halves, D], a view where B = 1."""
    if halves == 1:
        return x
    x = x.transpose(1, 2).unflatten(1, (halves, x.shape[2] // halves))
    return x.movedim(1, 0).flatten(0, 1).transpose(1, 2)


class _Shared:
    """What the own blocks' backward gets from the others': o and its log-sum-exp over all keys, and parts of dq."""

    def __init__(self):
        self.merged, self.parts = None, ()


class _Own(torch.autograd.Function):
    """The causal blocks. Their gradients are those of o over all keys, which :class:`_Others` returns."""

    @staticmethod
    def forward(ctx, shared, kernel, scale, q, k, v):
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
    def backward(ctx, do, _):
        q, k, v = ctx.saved_tensors
        (o, lse), parts = ctx.shared.merged, ctx.shared.parts
        ctx.shared.merged, ctx.shared.parts = None, ()
        if not q.shape[2]:
            return None, None, None, *(torch.zeros_like(x) for x in (q, k, v))
        dq, dk, dv = ctx.kernel.backward(do, q, k, v, o, lse, ctx.more, True, ctx.scale)
        for rows, part in parts:
            dq[rows] += part
        return None, None, None, dq, dk, dv


class _Others(torch.autograd.Function):
    """The blocks without a mask. They are added to o and lse in place, which autograd need not know: nobody else has
    them."""

    @staticmethod
    def forward(ctx, shared, kernel, scale, rows, q, o, lse, *keys):
        ctx.shared, ctx.kernel, ctx.scale, ctx.rows, ctx.more = shared, kernel, scale, rows, []
        for mine, seen in rows:
            k, v = (x[:, :, seen] for x in keys)
            *found, more = kernel.forward(q[mine], k, v, False, scale)
            _merge(o[mine], lse[mine], *found)
            ctx.more.append(more)
        o = o.detach()
        ctx.save_for_backward(q, o, lse, *keys)
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do):
        q, o, lse, *keys = ctx.saved_tensors
        do, parts, sums = _like(do, o), [], [None] * len(keys)
        for (mine, seen), more in reversed(list(zip(ctx.rows, ctx.more, strict=True))):  # the first sees all keys
            k, v = (x[:, :, seen] for x in keys)
            dq, *found = ctx.kernel.backward(do[mine], q[mine], k, v, o[mine], lse[mine], more, False, ctx.scale)
            parts.append((mine, dq))
            if sums[0] is None:
                sums = found
            else:
                for total, x in zip(sums, found, strict=True):
                    total[:, :, seen] += x
        ctx.shared.merged, ctx.shared.parts = (o, lse), parts
        sums = [torch.zeros_like(x) if dx is None else dx for dx, x in zip(sums, keys, strict=True)]
        return None, None, None, None, None, do, None, *sums


def _merge(o, lse, more, more_lse):
    """Let o [B, H, T, V] and lse [B, H, T] be over the keys of both."""
    dense = all(x.transpose(1, 2).is_contiguous() for x in (o, more)) and lse.is_contiguous()
    if o.is_cuda and dense and lse.dtype == torch.float32:
        return merge(o, lse, more, more_lse.contiguous())
    both = torch.logaddexp(lse, more_lse)
    weights = ((x - both).exp()[..., None] for x in (lse, more_lse))
    o.copy_(o * next(weights) + more * next(weights))
    lse.copy_(both)


def merge(o, lse, more, more_lse):
    """The same by a kernel, where o and more have tokens before heads in memory."""
    (B, H, T, V), both = o.shape, torch.empty_like(lse)
    width = triton.next_power_of_2(V)
    rows, tile = B * T * H, max(1, MERGED // width)
    merge_kernel[(triton.cdiv(rows, tile),)](
        o, lse, more, more_lse, both, rows, T, H, V=V, BV=width, ROWS=tile, num_warps=4, **OPTIONS
    )
    lse.copy_(both)


MERGED = 4096  # elements that a program has
