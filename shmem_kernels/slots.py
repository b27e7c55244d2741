"""Copies between the slots of a server's pool and the states of the requests in a batch."""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import cast
from .wait import BAD_SLOT, reject


@triton.jit
def copy_slots_kernel(
    p_pool,  # [num_slots, H, R, C], any strides
    p_states,  # [N, H, R, C] float32, contiguous
    p_slots,  # [N]; a negative slot stands for none
    p_begun,  # bool [N]: whether the slot has a state, else it reads as zeros. Not read with WRITE
    p_fault,  # the communicator's fault word and record (wait.py): set for slots that are twice in p_slots or not in
    p_record,  # the pool
    num_slots,
    stride_slot,
    stride_head,
    stride_row,
    stride_column,
    N,
    H,
    R: tl.constexpr,
    C: tl.constexpr,
    WRITE: tl.constexpr,  # from p_states to p_pool, else from p_pool to p_states
    BN: tl.constexpr,  # at least N
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """A program for each request, head and BR rows."""
    n, h = tl.program_id(0) // H, (tl.program_id(0) % H).to(tl.int64)  # a pool's strides may be large: 64 bits
    r = (tl.program_id(1) * BR + tl.arange(0, BR)).to(tl.int64)
    slot = tl.load(p_slots + n).to(tl.int64)
    inside = (slot >= 0) & (slot < num_slots)
    if not WRITE:
        if (h == 0) & (tl.program_id(1) == 0):
            m = tl.arange(0, BN)
            others = tl.load(p_slots + m, mask=m < n, other=-1)
            twice = tl.sum((others == slot).to(tl.int32)) > 0
            if (slot >= num_slots) | (inside & twice):
                reject(p_fault, p_record, BAD_SLOT, n, num_slots, slot)
        inside = inside & (tl.load(p_begun + n) != 0)
    p_pool += slot * stride_slot + h * stride_head
    p_states += tl.program_id(0).to(tl.int64) * R * C
    for first in range(0, C, BC):
        c = (first + tl.arange(0, BC)).to(tl.int64)
        valid = (r < R)[:, None] & (c < C)[None, :]
        p_there = p_pool + r[:, None] * stride_row + c[None, :] * stride_column
        p_here = p_states + r[:, None] * C + c[None, :]
        if WRITE:
            tl.store(p_there, cast(tl.load(p_here, mask=valid), p_pool.dtype.element_ty), mask=valid & inside)
        else:
            b_state = tl.load(p_there, mask=valid & inside, other=0.0).to(tl.float32)
            tl.store(p_here, b_state, mask=valid)
