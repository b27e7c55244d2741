"""Softmax attention in parts: over two sets of keys, from the results over each; over triangles, with rows in reverse
order (integrations/attention_backward.py)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge_kernel(
    p_o,  # [B, T, H, V], over the first keys; over both afterwards
    p_lse,  # float32 [B, H, T]; likewise
    p_more,  # [B, T, H, V], over the others
    p_more_lse,  # float32 [B, H, T], contiguous
    rows,  # T * H
    T,
    H,
    tokens,  # size of the token dimension of p_o's and p_lse's memory; these T are a part of it
    V: tl.constexpr,
    BV: tl.constexpr,
    ROWS: tl.constexpr,
):
    """o := exp(lse - both) o + exp(more_lse - both) more, both = log(exp(lse) + exp(more_lse)), in float32.
    lse := both."""
    batch = tl.program_id(1).to(tl.int64)
    p_o += batch * tokens * H * V
    p_more += batch * rows * V
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = row // H, row % H
    inside = row < rows
    p_lse += (batch * H + head) * tokens + token
    b_lse = tl.load(p_lse, mask=inside, other=0.0)
    b_more_lse = tl.load(p_more_lse + (batch * H + head) * T + token, mask=inside, other=0.0)
    largest = tl.maximum(b_lse, b_more_lse)
    b_both = largest + tl.log(tl.exp(b_lse - largest) + tl.exp(b_more_lse - largest))
    v = tl.arange(0, BV)
    offsets = row[:, None] * V + v[None, :]
    wide = inside[:, None] & (v < V)[None, :]
    b_o = tl.load(p_o + offsets, mask=wide, other=0.0).to(tl.float32)
    b_more = tl.load(p_more + offsets, mask=wide, other=0.0).to(tl.float32)
    b_o = b_o * tl.exp(b_lse - b_both)[:, None] + b_more * tl.exp(b_more_lse - b_both)[:, None]
    tl.debug_barrier()  # several warps load the same lse, and one stores it
    tl.store(p_lse, b_both, mask=inside)
    tl.store(p_o + offsets, b_o.to(p_o.dtype.element_ty), mask=wide)


@triton.jit
def reverse_kernel(
    p_x,  # [batch, blocks * n, H, W] as the strides say
    p_out,  # [batch, blocks, n, H, W]
    x_batch,
    x_token,
    x_head,
    blocks,
    n,
    H,
    shift,
    W: tl.constexpr,
    BW: tl.constexpr,
    ROWS: tl.constexpr,
    WITHOUT_LAST: tl.constexpr,
):
    """Row t of out's blocks is row (shift - t) mod n of x's. WITHOUT_LAST: the last one is 0."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head, block = row // H, row % H, tl.program_id(1).to(tl.int64)
    p_x += block // blocks * x_batch + block % blocks * n * x_token
    w = tl.arange(0, BW)
    inside = (token < n)[:, None] & (w < W)[None, :]
    wanted = inside & (token < n - 1)[:, None] if WITHOUT_LAST else inside
    source = (shift + n - token) % n * x_token + head * x_head
    b_x = tl.load(p_x + source[:, None] + w[None, :], mask=wanted, other=0.0)
    tl.store(p_out + block * n * H * W + row[:, None] * W + w[None, :], b_x, mask=inside)


@triton.jit
def fold_kernel(
    p_x,  # [blocks * many, n, H, W] as the strides say
    p_reversed,  # [blocks * many, n, H, W] likewise
    p_out,  # [blocks, n, H, W]
    x_block,
    x_token,
    x_head,
    reversed_block,
    reversed_token,
    reversed_head,
    n,
    H,
    shift,
    W: tl.constexpr,
    BW: tl.constexpr,
    ROWS: tl.constexpr,
    MANY: tl.constexpr,
):
    """Row t of an output block is the sum of rows t of MANY blocks of x and of rows (shift - t) mod n of MANY blocks of
    reversed."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head, block = row // H, row % H, tl.program_id(1).to(tl.int64)
    w = tl.arange(0, BW)
    inside = (token < n)[:, None] & (w < W)[None, :]
    at = (token * x_token + head * x_head)[:, None] + w[None, :]
    back = ((shift + n - token) % n * reversed_token + head * reversed_head)[:, None] + w[None, :]
    b_sum = tl.zeros([ROWS, BW], tl.float32)
    for i in tl.static_range(MANY):
        number = block * MANY + i
        b_sum += tl.load(p_x + number * x_block + at, mask=inside, other=0.0).to(tl.float32)
        b_sum += tl.load(p_reversed + number * reversed_block + back, mask=inside, other=0.0).to(tl.float32)
    offsets = block * n * H * W + row[:, None] * W + w[None, :]
    tl.store(p_out + offsets, b_sum.to(p_out.dtype.element_ty), mask=inside)
