"""Functions shared by the GLA kernels: incoming states, and the formats of tensors saved between kernels."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .blocks import (
    LOG2_E,
    cast,
    dot_split,
    exp2,
    high_half,
    load,
    load_gates,
    lower,
    product,
    rows,
    state_at,
    zeros,
)
from .segment_table import STATE_INDEX


class GLASizes(NamedTuple):
    """Constants of the GLA kernels: their argument ``d``. A kernel names the fields that it and its functions read;
    others may be 0. Blocks have powers of two."""

    H: int  # heads
    K: int  # channels of a head of q, k and g: rows of a state
    V: int = 0  # channels of a head of v: columns of a state
    BT: int = 0  # tokens of a chunk
    BK: int = 0  # channels of K in a block
    BV: int = 0  # columns of V in a block
    BR: int = 0  # tokens of a step of keys_kernel
    BC: int = 0  # tokens of a sub-block of a chunk of strong decay
    BS: int = 0  # channels of K at a time, in chunks of strong decay
    LOOK: int = 0  # flags of chunks that a program reads at a time
    PARTS: int = 0  # blocks of V whose state-to-state terms of dg are stored
    RANGE: float = 0.0  # decay of a chunk from which it is strong, as a logarithm to base 2


@triton.jit
def weighted_gates(b_weights, p_g, at, inside, PRECISION: tl.constexpr):
    """weights times the gates of one chunk, which are at most 0, to base 2. Gates in bfloat16 are operands as they are,
    exact, but not clamped as by load_gates: a chunk with -inf, which is a strong one, has NaN."""
    b_zero = tl.zeros(at.shape, tl.float32)
    if PRECISION == "bf16" and p_g.dtype.element_ty == tl.bfloat16:
        return product(b_weights, load(p_g, at, inside), b_zero, PRECISION) * LOG2_E
    else:
        return dot_split(b_weights, load_gates(p_g, at, inside), b_zero, PRECISION)


@triton.jit
def parts_product(b_high, b_low, b_y, b_sum, PRECISION: tl.constexpr):
    """``dot_split`` of high + low, both bfloat16, with "bf16"; otherwise low is ignored."""
    if PRECISION != "bf16":
        return product(b_high, b_y, b_sum, PRECISION)
    b_y_high = high_half(b_y)
    b_sum = product(b_high, b_y - b_y_high, b_sum, PRECISION)
    b_sum = product(b_low, b_y_high, b_sum, PRECISION)
    return product(b_high, b_y_high, b_sum, PRECISION)


@triton.jit
def pair_decays(b_g, BC: tl.constexpr):
    """[BC, BC, BS]: for each pair of tokens t, s the decay from s to t; 1 where s is not before t."""
    return exp2(tl.cumsum(tl.where(lower(BC, 1)[:, :, None], b_g[:, None, :], 0.0), 0))


@triton.jit
def decayed(b_own, b_gates, b_prev):
    """own + 2 ** gates * prev; own where the decay is 0, even if prev is Inf or NaN."""
    b_decay = exp2(b_gates)[:, None]
    return b_own + tl.where(b_decay == 0.0, 0.0, b_decay * b_prev)


@triton.jit
def load_incoming_state(
    p_incoming,
    p_edge_gate,
    p_prev,
    p_segment,
    s,
    h,
    i_v,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    i_k=0,
):
    """Load a segment's incoming state [BK, BV]: from this rank's tokens and, with p_prev, from the other ranks."""
    at, inside = state_at(s * H + h, i_v, K, V, BK, BV, i_k)
    b_state = load(p_incoming, at, inside)
    if p_prev is not None:
        k = i_k * BK + tl.arange(0, BK)
        b_gates = tl.load(p_edge_gate + (s * H + h) * K + k, mask=k < K, other=0.0)
        at, inside = state_at(tl.load(p_segment + STATE_INDEX) * H + h, i_v, K, V, BK, BV, i_k)
        b_state = decayed(b_state, b_gates, load(p_prev, at, inside))
    return b_state


@triton.jit
def load_da(p_da, h, t, end, i_s, H: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr):
    """dA [BC, BC] of tokens t .. and the i_s-th BC tokens of the chunk, as (high, low): p_da is [tokens, H, 2, BT] in
    bfloat16, their sum dA, or else [tokens, H, BT] in float32, high alone."""
    PARTS: tl.constexpr = 2 if PRECISION == "bf16" else 1
    at, inside = rows(h, t, end, H, PARTS * BT, BC, BC, i_s)
    b_high = load(p_da, at, inside)
    b_low = b_high
    if PARTS == 2:
        b_low = load(p_da, at + BT, inside)
    return b_high, b_low


@triton.jit
def load_passed(p_passed, n, h, k, d: tl.constexpr):
    """Load the state-to-state term of dg, the same for all tokens of the chunk; it is stored in PARTS parts."""
    PARTS: tl.constexpr = d.PARTS
    b_sum = tl.zeros(k.shape, tl.float32)
    for i in tl.static_range(PARTS):
        b_sum += tl.load(p_passed + ((n * d.H + h) * PARTS + i) * d.K + k, mask=k < d.K, other=0.0)
    return b_sum


@triton.jit
def store_split(p, p_low, at, inside, b_x, PRECISION: tl.constexpr):
    """Store x in the dtype of p; if that is bfloat16 ("bf16"), the next 8 bits of its float32 into p_low (int8)."""
    b_stored = cast(b_x, p.dtype.element_ty)
    tl.store(p + at, b_stored, mask=inside)
    if PRECISION == "bf16":
        b_rest = b_x.to(tl.int32, bitcast=True) - b_stored.to(tl.float32).to(tl.int32, bitcast=True)
        tl.store(p_low + at, tl.minimum((b_rest + 128) >> 8, 127).to(tl.int8), mask=inside)


@triton.jit
def load_split(p, p_low, at, inside, PRECISION: tl.constexpr):
    """Load a result of store_split in float32; the relative error is at most 2 ** -16, in few numbers 2 ** -15."""
    b_x = load(p, at, inside).to(tl.float32)
    if PRECISION == "bf16":
        b_low = tl.load(p_low + at, mask=inside, other=0).to(tl.int32)
        b_x = (b_x.to(tl.int32, bitcast=True) + b_low * 256).to(tl.float32, bitcast=True)
    return b_x


@triton.jit
def passed(b_dstate, b_gate, p_states, p_low, at, inside, PRECISION: tl.constexpr):
    """decay * sum over columns of dstate * states: the state-to-state term of the gates' gradient, for these rows."""
    return exp2(b_gate) * tl.sum(b_dstate * load_split(p_states, p_low, at, inside, PRECISION), 1)


@triton.jit
def from_states(p_y, p_states, n, h, start, end, i_s, d: tl.constexpr, PRECISION: tl.constexpr):
    """y S^T [BC, BS], with the chunk's state."""
    b_sum = zeros(d.BC, d.BS)
    for i_v in range((d.V + d.BV - 1) // d.BV):
        at_y, inside_y = rows(h, start, end, d.H, d.V, d.BC, d.BV, i_v)
        at, inside = state_at(n * d.H + h, i_v, d.K, d.V, d.BS, d.BV, i_s)
        b_sum = product(load(p_y, at_y, inside_y), tl.trans(load(p_states, at, inside)), b_sum, PRECISION)
    return b_sum
