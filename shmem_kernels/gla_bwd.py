"""Gated linear attention, backward. With S[n] entering chunk n and D[n] = dL/d(state leaving chunk n):

    keys_kernel, queries_kernel    k_out, q_in and A as in forward
    state_kernel      REVERSE: the gradient of the state over each segment alone
    carry_kernel      REVERSE: over this rank's segments and, by the reverse All-Scan, over the ranks
    state_kernel      EVERY_CHUNK: S[n]; needs no remote gradient and runs while the tiles travel
    output_kernel     REVERSE: D[n];  dv = A^T do + k_out D;  what passes from state to state (below)
    grad_kernel       dA = scale * do v^T, and
                      dq = scale * exp(gates up to) * (do S^T) + what dA gives
                      dk = exp(gates after) * (v D^T) + what dA gives
                      dg

dg_t collects every term whose decay holds g_t; within a chunk those are

    pairs s < t <= r of the chunk:                 sum_{r >= t} (q dq_pairs - k dk_pairs)_r
    from the state to tokens r >= t:               sum_{r >= t} (q dq_state)_r
    from tokens s < t to the state:                sum_{s < t} (k dk_state)_s
    from state to state:                           exp(all gates) * sum_v D * S

A token's product with itself holds no gate, so it is left out of the sums and added to dq and dk afterwards.
Decays are formed as in gla_fwd.py, wide chunks left to a kernel of their own as there.
Source: ZeCO, arXiv 2507.01004, section 3; GLA, arXiv 2312.06635, appendix.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gla_blocks import (
    cast,
    exp2,
    fine_product,
    load,
    load_gates,
    lower,
    ones,
    pair_decays,
    product,
    rows,
    state_at,
    upper,
    weighted_columns,
    weighted_rows,
)  # fmt: skip


@triton.jit
def grad_kernel(
    p_q, p_k, p_v, p_g, p_do, p_chunks, p_gate, p_wide, p_states, p_dstates, p_through, p_dq, p_dk, p_dg, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    NT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk, dg of one chunk, BK columns, without the pairs of a wide chunk. p_through: in NT parts.

    Blocks are [BK, BT], so that the sums over tokens take one operand from registers.
    """
    i_k, n, h = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, end = tl.load(p_chunks + 2 * n), tl.load(p_chunks + 2 * n + 1)
    wide = tl.load(p_wide + n * H + h) != 0
    b_da = _da(p_do, p_v, h, start, start, end, H, V, BT, BV, PRECISION) * scale
    b_self = tl.sum(tl.where(lower(BT, 0) & upper(BT, 0), b_da, 0.0), 0)
    b_da = tl.where(lower(BT, 1) & (wide == 0), b_da, 0.0)

    # Half the difference of the gates up to a token and behind it, and the half of the chunk's that both lack; of a
    # wide chunk the gates up to a token, and none
    k = i_k * BK + tl.arange(0, BK)
    at, inside = rows(h, start, end, H, K, BT, BK, i_k)
    b_g = tl.trans(load_gates(p_g, at, inside))
    b_zero = tl.zeros([BK, BT], tl.float32)
    b_weights = tl.where(upper(BT, 0), tl.where(wide, 1.0, 0.5), tl.where(wide, 0.0, -0.5))
    b_gates = weighted_columns(b_g, b_weights, b_zero, PRECISION)
    b_rest = tl.load(p_gate + (n * H + h) * K + k, mask=(k < K) & (wide == 0), other=0.0)
    b_rest = exp2(0.5 * b_rest)[:, None]

    b_dq = _from_states(p_states, p_do, n, h, start, end, i_k, H, K, V, BT, BK, BV, PRECISION)
    b_k = tl.trans(load(p_k, at, inside))  # [BK, BT]
    b_back = exp2(b_gates * tl.where(wide, 0.0, -1.0))  # of a wide chunk there are no pairs here
    b_dq = fine_product(b_k.to(tl.float32) * b_back, tl.trans(b_da), b_dq * (b_rest * scale), PRECISION)
    b_dq *= exp2(b_gates)
    b_q = tl.trans(load(p_q, at, inside)).to(tl.float32)
    b_dg = b_zero
    for i in tl.static_range(NT):
        b_dg += tl.load(p_through + ((n * H + h) * NT + i) * K + k, mask=k < K, other=0.0)[:, None]
    b_dg = weighted_columns(b_q * b_dq, ones(lower(BT, 0)), b_dg, PRECISION)
    b_dq += b_self[None, :] * b_k.to(tl.float32)
    tl.store(p_dq + at, cast(tl.trans(b_dq), p_dq.dtype.element_ty), mask=inside)

    tl.debug_barrier()  # so that the loads for dk do not take registers from dq
    b_dk = _from_states(p_dstates, p_v, n, h, start, end, i_k, H, K, V, BT, BK, BV, PRECISION)
    b_after = exp2(-b_gates)
    if wide:
        b_after = exp2(weighted_columns(b_g, ones(lower(BT, 1)), b_zero, PRECISION))
    b_dk *= b_after * b_rest
    b_k = tl.trans(load(p_k, at, inside)).to(tl.float32)
    b_dg = weighted_columns(b_k * b_dk, ones(upper(BT, 1)), b_dg, PRECISION)
    b_q = tl.trans(load(p_q, at, inside)).to(tl.float32)
    b_pairs = fine_product(b_q * exp2(b_gates), b_da, b_zero, PRECISION) * b_after
    b_dg = weighted_columns(-b_k * b_pairs, ones(lower(BT, 0)), b_dg, PRECISION)
    b_dk += b_pairs + b_self[None, :] * b_q
    tl.store(p_dk + at, cast(tl.trans(b_dk), p_dk.dtype.element_ty), mask=inside)
    tl.store(p_dg + at, cast(tl.trans(b_dg), p_dg.dtype.element_ty), mask=inside)


@triton.jit
def _from_states(
    p_states, p_y, n, h, start, end, i_k,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """S y^T [BK, BT], with the chunk's state."""
    b_sum = tl.zeros([BK, BT], tl.float32)
    for i_v in range((V + BV - 1) // BV):
        at, inside = state_at(n * H + h, i_v, K, V, BK, BV, i_k)
        at_y, inside_y = rows(h, start, end, H, V, BT, BV, i_v)
        b_sum = product(load(p_states, at, inside), tl.trans(load(p_y, at_y, inside_y)), b_sum, PRECISION)
    return b_sum


@triton.jit
def wide_grad_kernel(
    p_q, p_k, p_v, p_g, p_do, p_chunks, p_wide, p_dq, p_dk, p_dg, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds to dq, dk and dg what the pairs of tokens of a wide chunk give, by sub-blocks of BC tokens, BS columns."""
    n, h = tl.program_id(0), tl.program_id(1)
    if tl.load(p_wide + n * H + h) != 0:
        start, end = tl.load(p_chunks + 2 * n), tl.load(p_chunks + 2 * n + 1)
        for i_s in range(BK // BS):
            b_later = tl.zeros([BS], tl.float32)
            for i in range(BT // BC):  # from the last sub-block, for the sums of dg
                b_later = _wide_grad_rows(
                    p_q, p_k, p_v, p_g, p_do, p_dq, p_dk, p_dg, b_later, h, start, end, BT // BC - 1 - i, i_s, scale,
                    H, K, V, BT, BC, BV, BS, PRECISION,
                )  # fmt: skip


@triton.jit
def _wide_grad_rows(
    p_q, p_k, p_v, p_g, p_do, p_dq, p_dk, p_dg, b_later, h, chunk_start, end, i_sub, i_s, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr,
    BS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """For BC tokens (a sub-block) and BS columns: dq from earlier tokens of the chunk, dk from later ones, and dg.

    b_later [BS]: the sum of q dq - k dk over the later sub-blocks. Returns it with this one.
    """
    start = chunk_start + i_sub * BC
    own, inside = rows(h, start, end, H, K, BC, BS, i_s)
    b_q = load(p_q, own, inside).to(tl.float32)  # [BC, BS]
    b_k = load(p_k, own, inside).to(tl.float32)
    b_g = load_gates(p_g, own, inside)

    # Its own sub-block, every pair by itself
    b_da = tl.where(lower(BC, 1), _da(p_do, p_v, h, start, start, end, H, V, BC, BV, PRECISION), 0.0)
    b_decay = pair_decays(b_g, BC) * b_da[:, :, None]
    b_dq = tl.sum(b_decay * b_k[None, :, :], 1)  # [BC, BS]
    b_dk = tl.sum(b_decay * b_q[:, None, :], 0)

    # Earlier sub-blocks, nearest first, which are whole, give dq; b_between: the gates in between
    b_far = tl.zeros([BC, BS], tl.float32)
    b_between = tl.zeros([BS], tl.float32)
    j = i_sub - 1
    while j >= 0:
        at, whole = rows(h, chunk_start + j * BC, end, H, K, BC, BS, i_s)
        b_gj = load_gates(p_g, at, whole)
        b_kj = exp2(weighted_rows(ones(upper(BC, 1)), b_gj, PRECISION) + b_between[None, :])
        b_kj *= load(p_k, at, whole).to(tl.float32)
        b_da = _da(p_do, p_v, h, start, chunk_start + j * BC, end, H, V, BC, BV, PRECISION)
        b_far = fine_product(b_da, b_kj, b_far, PRECISION)
        b_between += tl.sum(b_gj, 0)
        j -= 1
    b_dq = (b_dq + b_far * exp2(weighted_rows(ones(lower(BC, 0)), b_g, PRECISION))) * scale
    _add(p_dq, own, inside, b_dq)

    # Later sub-blocks give dk
    b_far = tl.zeros([BC, BS], tl.float32)
    b_between = tl.zeros([BS], tl.float32)
    i = i_sub + 1
    while i < BT // BC:
        at, inside_i = rows(h, chunk_start + i * BC, end, H, K, BC, BS, i_s)
        b_gi = load_gates(p_g, at, inside_i)
        b_qi = exp2(weighted_rows(ones(lower(BC, 0)), b_gi, PRECISION) + b_between[None, :])
        b_qi *= load(p_q, at, inside_i).to(tl.float32)
        b_da = _da(p_do, p_v, h, chunk_start + i * BC, start, end, H, V, BC, BV, PRECISION)
        b_far = fine_product(tl.trans(b_da), b_qi, b_far, PRECISION)
        b_between += tl.sum(b_gi, 0)
        i += 1
    b_dk = (b_dk + b_far * exp2(weighted_rows(ones(upper(BC, 1)), b_g, PRECISION))) * scale
    _add(p_dk, own, inside, b_dk)
    b_dg = b_q * b_dq - b_k * b_dk
    _add(p_dg, own, inside, weighted_rows(ones(upper(BC, 0)), b_dg, PRECISION) + b_later[None, :])
    return b_later + tl.sum(b_dg, 0)


@triton.jit
def _add(p, at, inside, b_x):
    tl.store(p + at, cast(load(p, at, inside).to(tl.float32) + b_x, p.dtype.element_ty), mask=inside)


@triton.jit
def _da(
    p_do, p_v, h, t, s, end,
    H: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """do v^T of BT tokens from t and BT tokens from s."""
    b_da = tl.zeros([BT, BT], tl.float32)
    for i_v in range((V + BV - 1) // BV):
        at, inside = rows(h, t, end, H, V, BT, BV, i_v)
        b_do = load(p_do, at, inside)
        at, inside = rows(h, s, end, H, V, BT, BV, i_v)
        b_da = product(b_do, tl.trans(load(p_v, at, inside)), b_da, PRECISION)
    return b_da
