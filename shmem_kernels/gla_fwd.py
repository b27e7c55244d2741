"""Gated linear attention, forward: the chunked form of S_t = diag(exp g_t) S_{t-1} + k_t^T v_t,  o_t = scale * q_t S_t.

The T tokens of this rank are cut into N chunks of BT tokens. In the order the data moves:

    state_kernel    each chunk alone, from a zero state: U[n] = sum_t (k_t exp(sum of g after t))^T v_t
    carry_kernel    U[0..N-1] -> this rank's state; All-Scan over the ranks; then the state entering each chunk, S[n]
    intra_kernel    A[t, s] = scale * sum_k q_t k_s exp(g_{s+1} + ... + g_t), s <= t in one chunk; nothing remote
    output_kernel   o = A v + scale * (q exp(sum of g up to t)) S[n]

**Exact for every gate.** A decay between two places is the exponential of the *sum of the gates between them*, and that
sum is formed by adding those gates only: never as a difference of two cumulative sums, and never as a product of one
factor below 1 and one above. So no gate from 0 to -inf overflows, cancels or loses the small terms.

Tensors: q, k, g [B, T, H, K], v, o [B, T, H, V]; chunk states [B*H, N, K, V] float32; A [B, T, H, BT] float32.
Products take float32 operands on the tensor cores, in PRECISION ("tf32" for 16-bit inputs, "tf32x3" for float32).
Source: ZeCO, arXiv 2507.01004, section 3; GLA, arXiv 2312.06635, section 4.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .channel import NONE, allscan
from .scan import tile_place

SIZES = ("T", "N")  # arguments that vary from call to call: no specialisation for 1 or multiples of 16


@triton.jit
def rows(i_bh, start, T, H: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr, i_w=0):
    """Where tokens start .. start + BT of one head lie in a tensor [B, T, H, W], columns i_w * BW .. + BW.

    Returns [BT, BW]: offsets; which of them are inside; for which the next token is inside and in the block too.
    """
    t = start + tl.arange(0, BT)
    w = i_w * BW + tl.arange(0, BW)
    first = ((i_bh // H).to(tl.int64) * T * H + i_bh % H) * W
    offsets = first + t.to(tl.int64)[:, None] * (H * W) + w[None, :]
    columns = (w < W)[None, :]
    return offsets, (t < T)[:, None] & columns, (t + 1 < min(T, start + BT))[:, None] & columns


@triton.jit
def gates_after(p_g, offsets, has_next, H: tl.constexpr, K: tl.constexpr):
    """For each token of a block, the sum of the gates of the block's later tokens."""
    return tl.cumsum(tl.load(p_g + offsets + H * K, mask=has_next, other=0.0).to(tl.float32), 0, reverse=True)


@triton.jit
def state_at(i_state, i_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """(offsets, mask) [BK, BV] of one of many [K, V] matrices, columns i_v * BV .. + BV."""
    k = tl.arange(0, BK)
    v = i_v * BV + tl.arange(0, BV)
    return i_state.to(tl.int64) * (K * V) + k[:, None] * V + v[None, :], (k < K)[:, None] & (v < V)[None, :]


@triton.jit(do_not_specialize=SIZES)
def state_kernel(
    p_x, p_y, p_g, p_state, p_gate, T, N, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk alone. Forward (x, y = k, v): the state it leaves. REVERSE (x, y = q, do): the gradient it gives to
    the state that enters it, decayed up to each token instead of after it. Also the sum of its gates [BH, N, K].
    """
    i_v, n, i_bh = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at_k, inside_k, has_next = rows(i_bh, n * BT, T, H, K, BT, BK)
    at_v, inside_v, _ = rows(i_bh, n * BT, T, H, V, BT, BV, i_v)
    b_x = tl.load(p_x + at_k, mask=inside_k, other=0.0).to(tl.float32)  # [BT, BK]
    b_y = tl.load(p_y + at_v, mask=inside_v, other=0.0).to(tl.float32)  # [BT, BV]
    b_g = tl.load(p_g + at_k, mask=inside_k, other=0.0).to(tl.float32)  # [BT, BK]
    if REVERSE:
        b_x *= tl.exp(tl.cumsum(b_g, 0)) * scale
    else:
        b_x *= tl.exp(gates_after(p_g, at_k, has_next, H, K))
    offsets, mask = state_at(i_bh * N + n, i_v, K, V, BK, BV)
    tl.store(p_state + offsets, tl.dot(tl.trans(b_x), b_y, input_precision=PRECISION), mask=mask)
    if i_v == 0:
        k = tl.arange(0, BK)
        tl.store(p_gate + (i_bh * N + n) * K + k, tl.sum(b_g, 0), mask=k < K)


@triton.jit(do_not_specialize=SIZES)
def carry_kernel(
    p_state, p_gate, p_initial, p_prev, p_final, channel, N,
    K: tl.constexpr, V: tl.constexpr, HAS_INITIAL: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """The states through this rank's chunks and over the ranks; one program, one tile of one head.

    p_state [BH, N, K, V]: in, what each chunk leaves; out, what enters each chunk (REVERSE: the gradient of the state
    that leaves it). p_initial enters the first rank. p_prev [BH, K, V]: what enters this rank. p_final: what leaves
    the last rank; zeros elsewhere.
    """
    tile = tl.program_id(0)
    i_bh, k, v = tile_place(channel, tile, K, V)
    inside = (k < K)[:, None] & (v < V)[None, :]
    offsets = k[:, None] * V + v[None, :]
    step = -1 if REVERSE else 1
    first = i_bh * N + (N - 1 if REVERSE else 0)
    p_state += first * (K * V) + offsets
    p_gate += first * K + k

    b_local = tl.zeros([channel.BK, channel.BV], tl.float32)
    b_gates = tl.zeros([channel.BK], tl.float32)
    p_u, p_g = p_state, p_gate
    i = 0
    while i < N:
        b_gate = tl.load(p_g, mask=k < K, other=0.0)  # [BK]
        b_local = b_local * tl.exp(b_gate)[:, None] + tl.load(p_u, mask=inside, other=0.0)
        b_gates += b_gate
        p_u += step * K * V
        p_g += step * K
        i += 1

    b_first = tl.zeros([channel.BK, channel.BV], tl.float32)
    if HAS_INITIAL:
        b_first = tl.load(p_initial + i_bh * K * V + offsets, mask=inside, other=0.0)
    b_carry, b_last = allscan(channel, tile, b_local, tl.exp(b_gates)[:, None], b_first)
    tl.store(p_prev + i_bh * K * V + offsets, b_carry, mask=inside)
    if channel.SEND != NONE:
        b_last = tl.zeros([channel.BK, channel.BV], tl.float32)
    tl.store(p_final + i_bh * K * V + offsets, b_last, mask=inside)

    i = 0
    while i < N:
        b_gate = tl.load(p_gate, mask=k < K, other=0.0)
        b_own = tl.load(p_state, mask=inside, other=0.0)
        tl.store(p_state, b_carry, mask=inside)
        b_carry = b_carry * tl.exp(b_gate)[:, None] + b_own
        p_state += step * K * V
        p_gate += step * K
        i += 1


@triton.jit(do_not_specialize=SIZES)
def intra_kernel(
    p_q, p_k, p_g, p_a, T, scale,
    H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A for BC tokens of a chunk (a sub-block) against the sub-blocks up to its own; what lies above is not written."""
    i_row, i_bh = tl.program_id(0), tl.program_id(1)
    i_sub = i_row % (BT // BC)
    start = i_row * BC
    at_a, inside_a, _ = rows(i_bh, start, T, H, BT, BC, BC)

    # Its own sub-block, every pair by itself; BS columns of K at a time
    b_a = tl.zeros([BC, BC], tl.float32)
    later = (tl.arange(0, BC)[:, None] > tl.arange(0, BC)[None, :])[:, :, None]
    for i_s in tl.static_range(BK // BS):
        at, inside, _ = rows(i_bh, start, T, H, K, BC, BS, i_s)
        b_q = tl.load(p_q + at, mask=inside, other=0.0).to(tl.float32)  # [BC, BS]
        b_k = tl.load(p_k + at, mask=inside, other=0.0).to(tl.float32)
        b_g = tl.load(p_g + at, mask=inside, other=0.0).to(tl.float32)
        b_decay = tl.exp(tl.cumsum(tl.where(later, b_g[:, None, :], 0.0), 0))  # [BC, BC, BS]
        b_a += tl.sum(b_q[:, None, :] * b_k[None, :, :] * b_decay, 2)
    tl.store(p_a + at_a + i_sub * BC, b_a * scale, mask=inside_a)

    # Earlier sub-blocks, nearest first, which are whole; b_between: the gates of the sub-blocks in between
    at, inside, _ = rows(i_bh, start, T, H, K, BC, BK)
    b_qi = tl.load(p_q + at, mask=inside, other=0.0).to(tl.float32)  # [BC, BK]
    b_qi *= tl.exp(tl.cumsum(tl.load(p_g + at, mask=inside, other=0.0).to(tl.float32), 0)) * scale
    at, whole, has_next = rows(i_bh, start - BC, T, H, K, BC, BK)
    b_between = tl.zeros([BK], tl.float32)
    j = i_sub - 1
    while j >= 0:
        b_kj = tl.load(p_k + at, mask=whole, other=0.0).to(tl.float32)
        b_kj *= tl.exp(gates_after(p_g, at, has_next, H, K) + b_between[None, :])
        tl.store(p_a + at_a + j * BC, tl.dot(b_qi, tl.trans(b_kj), input_precision=PRECISION), mask=inside_a)
        b_between += tl.sum(tl.load(p_g + at, mask=whole, other=0.0).to(tl.float32), 0)
        at -= BC * H * K
        j -= 1


@triton.jit
def load_causal(p_a, i_bh, n, T, H: tl.constexpr, BT: tl.constexpr):
    """[BT, BT] of one chunk from [B, T, H, BT], 0 above the diagonal."""
    at, inside, _ = rows(i_bh, n * BT, T, H, BT, BT, BT)
    causal = tl.arange(0, BT)[:, None] >= tl.arange(0, BT)[None, :]
    return tl.load(p_a + at, mask=inside & causal, other=0.0)


@triton.jit(do_not_specialize=SIZES)
def output_kernel(
    p_q, p_v, p_g, p_a, p_state, p_o, T, N, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o of one chunk: what the state that enters it gives, and what its own tokens give."""
    i_v, n, i_bh = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at_k, inside_k, _ = rows(i_bh, n * BT, T, H, K, BT, BK)
    at_v, inside_v, _ = rows(i_bh, n * BT, T, H, V, BT, BV, i_v)
    b_g = tl.load(p_g + at_k, mask=inside_k, other=0.0).to(tl.float32)  # [BT, BK]
    b_q = tl.load(p_q + at_k, mask=inside_k, other=0.0).to(tl.float32) * tl.exp(tl.cumsum(b_g, 0)) * scale
    at, inside = state_at(i_bh * N + n, i_v, K, V, BK, BV)
    b_o = tl.dot(b_q, tl.load(p_state + at, mask=inside, other=0.0), input_precision=PRECISION)
    b_v = tl.load(p_v + at_v, mask=inside_v, other=0.0).to(tl.float32)  # [BT, BV]
    b_o += tl.dot(load_causal(p_a, i_bh, n, T, H, BT), b_v, input_precision=PRECISION)
    tl.store(p_o + at_v, b_o.to(p_o.dtype.element_ty), mask=inside_v)
