"""Softmax attention over two sets of keys, from the results over each."""

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
