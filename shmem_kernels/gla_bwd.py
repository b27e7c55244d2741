"""Gated linear attention, backward. With S[n] entering chunk n (recomputed) and D[n] = dL/d(state leaving chunk n):

    state_kernel, carry_kernel   with REVERSE: over the segments and, by the reverse All-Scan, over the ranks
    state_kernel                 with EVERY_CHUNK: S[n], and with REVERSE D[n]
    intra_grad_kernel            dA = scale * do v^T, and what it gives q and k of the same chunk, pairs of different
                                 tokens only; needs nothing remote
    value_grad_kernel            dv = A^T do + (k exp(gates after)) D
    grad_kernel                  dq = intra + scale * exp(gates up to) * (do S^T)
                                 dk = intra + exp(gates after) * (v D^T)
                                 and dg, below

dg_t collects every term whose decay holds g_t; within a chunk those are

    pairs s < t <= r of the chunk:                 sum_{r >= t} (q dq_intra - k dk_intra)_r
    from the state to tokens r >= t:               sum_{r >= t} (q dq_inter)_r
    from tokens s < t to the state:                sum_{s < t} (k dk_inter)_s
    from state to state:                           exp(all gates) * rowsum(D * S)

A token's product with itself holds no gate, so it is left out of the sums and added to dq and dk afterwards.
Decays are formed as in gla_fwd.py. Source: ZeCO, arXiv 2507.01004, section 3; GLA, arXiv 2312.06635, appendix.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gla_fwd import cast, fine_product, gates_after, load_causal, load_gates, lower, relative_gates, rows, state_at


@triton.jit
def intra_grad_kernel(
    p_q, p_k, p_v, p_g, p_do, p_chunks, p_da, p_dq, p_dk, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr,
    RANGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the tokens of one chunk give to each other's q and k, in float32; dA only passes through p_da.

    As in intra_kernel: in two products where the gates allow that, else by sub-blocks.
    """
    n, h = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(p_chunks + 2 * n), tl.load(p_chunks + 2 * n + 1)
    b_da = tl.zeros([BT, BT], tl.float32)
    for i_v in range((V + BV - 1) // BV):
        at, inside, _ = rows(h, start, end, H, V, BT, BV, i_v)
        b_v = tl.load(p_v + at, mask=inside, other=0.0)  # [BT, BV]
        b_do = tl.load(p_do + at, mask=inside, other=0.0)
        b_da = fine_product(b_do, tl.trans(b_v), b_da, PRECISION)
    b_da = tl.where(lower(BT, 1), b_da * scale, 0.0)

    at, inside, _ = rows(h, start, end, H, K, BT, BK)
    b_g, narrow = relative_gates(load_gates(p_g, at, inside, PRECISION), RANGE)
    if narrow:
        b_k = tl.load(p_k + at, mask=inside, other=0.0).to(tl.float32) * tl.exp(-b_g)  # [BT, BK]
        b_dq = fine_product(b_da, b_k, tl.zeros([BT, BK], tl.float32), PRECISION) * tl.exp(b_g)
        tl.store(p_dq + at, b_dq, mask=inside)
        b_q = tl.load(p_q + at, mask=inside, other=0.0).to(tl.float32) * tl.exp(b_g)
        b_dk = fine_product(tl.trans(b_da), b_q, tl.zeros([BT, BK], tl.float32), PRECISION) * tl.exp(-b_g)
        tl.store(p_dk + at, b_dk, mask=inside)
    else:
        at_a, inside_a, no_next = rows(h, start, end, H, BT, BT, BT)
        tl.store(p_da + at_a, b_da, mask=inside_a)
        tl.debug_barrier()  # the parts that other threads have stored are loaded below
        for i in range((BT // BC) * (BK // BS)):
            i_sub, i_s = i // (BK // BS), i % (BK // BS)
            _intra_grad_rows(p_q, p_k, p_g, p_da, p_dq, p_dk, h, start, end, i_sub, i_s, H, K, BT, BC, BS, PRECISION)


@triton.jit
def _intra_grad_rows(
    p_q, p_k, p_g, p_da, p_dq, p_dk, h, chunk_start, end, i_sub, i_s,
    H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """For BC tokens (a sub-block) and BS columns: dq from earlier tokens of the chunk, dk from later ones."""
    start = chunk_start + i_sub * BC
    own, inside, has_next = rows(h, start, end, H, K, BC, BS, i_s)
    b_q = tl.load(p_q + own, mask=inside, other=0.0).to(tl.float32)  # [BC, BS]
    b_k = tl.load(p_k + own, mask=inside, other=0.0).to(tl.float32)
    b_g = load_gates(p_g, own, inside, PRECISION)

    # Its own sub-block, every pair by itself
    later = lower(BC, 1)
    at_a, inside_a, _ = rows(h, start, end, H, BT, BC, BC)
    b_da = tl.load(p_da + at_a + i_sub * BC, mask=inside_a & later, other=0.0)  # [BC, BC]
    b_decay = tl.exp(tl.cumsum(tl.where(later[:, :, None], b_g[:, None, :], 0.0), 0)) * b_da[:, :, None]
    b_dq = tl.sum(b_decay * b_k[None, :, :], 1)  # [BC, BS]
    b_dk = tl.sum(b_decay * b_q[:, None, :], 0)

    # Earlier sub-blocks, which are whole, give dq; b_between: the gates in between
    b_far = tl.zeros([BC, BS], tl.float32)
    b_between = tl.zeros([BS], tl.float32)
    at, whole, whole_next = rows(h, start - BC, end, H, K, BC, BS, i_s)
    j = i_sub - 1
    while j >= 0:
        b_kj = tl.load(p_k + at, mask=whole, other=0.0).to(tl.float32)
        b_gj = load_gates(p_g, at, whole, PRECISION)
        b_kj *= tl.exp(gates_after(p_g, b_gj, at, whole_next, H, K, PRECISION) + b_between[None, :])
        b_far = fine_product(tl.load(p_da + at_a + j * BC, mask=inside_a, other=0.0), b_kj, b_far, PRECISION)
        b_between += tl.sum(b_gj, 0)
        at -= BC * H * K
        j -= 1
    tl.store(p_dq + own, b_dq + b_far * tl.exp(tl.cumsum(b_g, 0)), mask=inside)

    # Later sub-blocks give dk
    b_far = tl.zeros([BC, BS], tl.float32)
    b_between = tl.zeros([BS], tl.float32)
    i = i_sub + 1
    while i < BT // BC:
        at, inside_i, _ = rows(h, start + (i - i_sub) * BC, end, H, K, BC, BS, i_s)
        at_a, inside_a, _ = rows(h, start + (i - i_sub) * BC, end, H, BT, BC, BC, i_sub)
        b_gi = load_gates(p_g, at, inside_i, PRECISION)
        b_qi = tl.load(p_q + at, mask=inside_i, other=0.0).to(tl.float32)
        b_qi *= tl.exp(tl.cumsum(b_gi, 0) + b_between[None, :])
        b_da = tl.load(p_da + at_a, mask=inside_a, other=0.0)
        b_far = fine_product(tl.trans(b_da), b_qi, b_far, PRECISION)
        b_between += tl.sum(b_gi, 0)
        i += 1
    tl.store(p_dk + own, b_dk + b_far * tl.exp(gates_after(p_g, b_g, own, has_next, H, K, PRECISION)), mask=inside)


@triton.jit
def value_grad_kernel(
    p_k, p_g, p_do, p_a, p_chunks, p_dstate, p_dv,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dv of one chunk."""
    i_v, n, h = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, end = tl.load(p_chunks + 2 * n), tl.load(p_chunks + 2 * n + 1)
    at_k, inside_k, has_next = rows(h, start, end, H, K, BT, BK)
    at_v, inside_v, _ = rows(h, start, end, H, V, BT, BV, i_v)
    b_g = load_gates(p_g, at_k, inside_k, PRECISION)
    b_k = tl.load(p_k + at_k, mask=inside_k, other=0.0).to(tl.float32)  # [BT, BK]
    b_k *= tl.exp(gates_after(p_g, b_g, at_k, has_next, H, K, PRECISION))
    at, inside = state_at(n * H + h, i_v, K, V, BK, BV)
    b_dstate = tl.load(p_dstate + at, mask=inside, other=0.0)  # [BK, BV]
    b_dv = fine_product(b_k, b_dstate, tl.zeros([BT, BV], tl.float32), PRECISION)
    b_do = tl.load(p_do + at_v, mask=inside_v, other=0.0)  # [BT, BV]
    b_dv = fine_product(tl.trans(load_causal(p_a, h, start, end, H, BT)), b_do, b_dv, PRECISION)
    tl.store(p_dv + at_v, cast(b_dv, p_dv.dtype.element_ty), mask=inside_v)


@triton.jit
def grad_kernel(
    p_q, p_k, p_v, p_g, p_do, p_chunks, p_state, p_dstate, p_dq_intra, p_dk_intra, p_dq, p_dk, p_dg, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk, dg of one chunk, BK columns."""
    i_k, n, h = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, end = tl.load(p_chunks + 2 * n), tl.load(p_chunks + 2 * n + 1)
    b_dq = tl.zeros([BT, BK], tl.float32)
    b_dk = tl.zeros([BT, BK], tl.float32)
    b_through = tl.zeros([BK], tl.float32)
    b_self = tl.zeros([BT], tl.float32)
    for i_v in range((V + BV - 1) // BV):
        at_v, inside_v, _ = rows(h, start, end, H, V, BT, BV, i_v)
        b_v = tl.load(p_v + at_v, mask=inside_v, other=0.0)  # [BT, BV]
        b_do = tl.load(p_do + at_v, mask=inside_v, other=0.0)
        at, inside = state_at(n * H + h, i_v, K, V, BK, BV, i_k)
        b_state = tl.load(p_state + at, mask=inside, other=0.0)  # [BK, BV]
        b_dstate = tl.load(p_dstate + at, mask=inside, other=0.0)
        b_dq = fine_product(b_do, tl.trans(b_state), b_dq, PRECISION)
        b_dk = fine_product(b_v, tl.trans(b_dstate), b_dk, PRECISION)
        b_through += tl.sum(b_state * b_dstate, 1)
        b_self += tl.sum(b_do.to(tl.float32) * b_v.to(tl.float32), 1)

    at, inside, has_next = rows(h, start, end, H, K, BT, BK, i_k)
    b_g = load_gates(p_g, at, inside, PRECISION)
    b_dq *= tl.exp(tl.cumsum(b_g, 0)) * scale
    b_dk *= tl.exp(gates_after(p_g, b_g, at, has_next, H, K, PRECISION))
    b_q = tl.load(p_q + at, mask=inside, other=0.0).to(tl.float32)  # [BT, BK]
    b_k = tl.load(p_k + at, mask=inside, other=0.0).to(tl.float32)
    # the sum over s < t as a product: a cumulative sum less its last term would lose what is small beside that term
    b_dg = tl.dot(lower(BT, 1).to(tl.float32), b_k * b_dk, input_precision="tf32x3")
    b_dg += (b_through * tl.exp(tl.sum(b_g, 0)))[None, :]
    b_dk_intra = tl.load(p_dk_intra + at, mask=inside, other=0.0)
    b_dq += tl.load(p_dq_intra + at, mask=inside, other=0.0)
    b_dg += tl.cumsum(b_q * b_dq - b_k * b_dk_intra, 0, reverse=True)
    tl.store(p_dg + at, cast(b_dg, p_dg.dtype.element_ty), mask=inside)
    b_dq += (b_self * scale)[:, None] * b_k
    b_dk += b_dk_intra + (b_self * scale)[:, None] * b_q
    tl.store(p_dq + at, cast(b_dq, p_dq.dtype.element_ty), mask=inside)
    tl.store(p_dk + at, cast(b_dk, p_dk.dtype.element_ty), mask=inside)
