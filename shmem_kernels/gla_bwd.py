"""Gated linear attention, backward. With S[n] entering chunk n (recomputed) and D[n] = dL/d(state leaving chunk n):

    state_kernel, carry_kernel   with REVERSE: D[n], over the chunks and, by the reverse All-Scan, over the ranks
    score_grad_kernel            dA = scale * do v^T, needs nothing remote
    intra_grad_kernel            what dA gives q and k of the same chunk, pairs of different tokens only
    grad_kernel                  dv = A^T do + (k exp(gates after)) D
                                 dq = intra + scale * exp(gates up to) * (do S^T)
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

from .gla_fwd import SIZES, gates_after, load_causal, rows, state_at


@triton.jit(do_not_specialize=SIZES)
def score_grad_kernel(
    p_v, p_do, p_da, T, scale,
    H: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dA [BT, BT] of one chunk."""
    n, i_bh = tl.program_id(0), tl.program_id(1)
    b_da = tl.zeros([BT, BT], tl.float32)
    for i_v in range((V + BV - 1) // BV):
        at, inside, _ = rows(i_bh, n * BT, T, H, V, BT, BV, i_v)
        b_v = tl.load(p_v + at, mask=inside, other=0.0).to(tl.float32)  # [BT, BV]
        b_do = tl.load(p_do + at, mask=inside, other=0.0).to(tl.float32)
        b_da += tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
    at, inside, _ = rows(i_bh, n * BT, T, H, BT, BT, BT)
    tl.store(p_da + at, b_da * scale, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def intra_grad_kernel(
    p_q, p_k, p_g, p_da, p_dq, p_dk, T,
    H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """For BC tokens (a sub-block) and BS columns: dq from earlier tokens of the chunk, dk from later ones. float32."""
    i_s, i_row, i_bh = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    NC: tl.constexpr = BT // BC
    i_sub = i_row % NC
    start = i_row * BC
    own, inside, has_next = rows(i_bh, start, T, H, K, BC, BS, i_s)
    b_q = tl.load(p_q + own, mask=inside, other=0.0).to(tl.float32)  # [BC, BS]
    b_k = tl.load(p_k + own, mask=inside, other=0.0).to(tl.float32)
    b_g = tl.load(p_g + own, mask=inside, other=0.0).to(tl.float32)

    # Its own sub-block, every pair by itself
    later = tl.arange(0, BC)[:, None] > tl.arange(0, BC)[None, :]
    at_a, inside_a, _ = rows(i_bh, start, T, H, BT, BC, BC)
    b_da = tl.load(p_da + at_a + i_sub * BC, mask=inside_a & later, other=0.0)  # [BC, BC]
    b_decay = tl.exp(tl.cumsum(tl.where(later[:, :, None], b_g[:, None, :], 0.0), 0)) * b_da[:, :, None]
    b_dq = tl.sum(b_decay * b_k[None, :, :], 1)  # [BC, BS]
    b_dk = tl.sum(b_decay * b_q[:, None, :], 0)

    # Earlier sub-blocks, which are whole, give dq; b_between: the gates in between
    b_far = tl.zeros([BC, BS], tl.float32)
    b_between = tl.zeros([BS], tl.float32)
    at, whole, whole_next = rows(i_bh, start - BC, T, H, K, BC, BS, i_s)
    j = i_sub - 1
    while j >= 0:
        b_kj = tl.load(p_k + at, mask=whole, other=0.0).to(tl.float32)
        b_kj *= tl.exp(gates_after(p_g, at, whole_next, H, K) + b_between[None, :])
        b_far += tl.dot(tl.load(p_da + at_a + j * BC, mask=inside_a, other=0.0), b_kj, input_precision=PRECISION)
        b_between += tl.sum(tl.load(p_g + at, mask=whole, other=0.0).to(tl.float32), 0)
        at -= BC * H * K
        j -= 1
    tl.store(p_dq + own, b_dq + b_far * tl.exp(tl.cumsum(b_g, 0)), mask=inside)

    # Later sub-blocks give dk
    b_far = tl.zeros([BC, BS], tl.float32)
    b_between = tl.zeros([BS], tl.float32)
    i = i_sub + 1
    while i < NC:
        at, inside_i, _ = rows(i_bh, start + (i - i_sub) * BC, T, H, K, BC, BS, i_s)
        at_a, inside_a, _ = rows(i_bh, start + (i - i_sub) * BC, T, H, BT, BC, BC, i_sub)
        b_gi = tl.load(p_g + at, mask=inside_i, other=0.0).to(tl.float32)
        b_qi = tl.load(p_q + at, mask=inside_i, other=0.0).to(tl.float32)
        b_qi *= tl.exp(tl.cumsum(b_gi, 0) + b_between[None, :])
        b_da = tl.load(p_da + at_a, mask=inside_a, other=0.0)
        b_far += tl.dot(tl.trans(b_da), b_qi, input_precision=PRECISION)
        b_between += tl.sum(b_gi, 0)
        i += 1
    tl.store(p_dk + own, b_dk + b_far * tl.exp(gates_after(p_g, own, has_next, H, K)), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def grad_kernel(
    p_q, p_k, p_v, p_g, p_do, p_a, p_state, p_dstate, p_dq_intra, p_dk_intra,
    p_dq, p_dk, p_dv, p_dg, T, N, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk, dv, dg of one chunk."""
    n, i_bh = tl.program_id(0), tl.program_id(1)
    at_k, inside_k, has_next = rows(i_bh, n * BT, T, H, K, BT, BK)
    b_k = tl.load(p_k + at_k, mask=inside_k, other=0.0).to(tl.float32)  # [BT, BK]
    b_after = tl.exp(gates_after(p_g, at_k, has_next, H, K))
    b_a = load_causal(p_a, i_bh, n, T, H, BT)  # [BT, BT]

    b_dq = tl.zeros([BT, BK], tl.float32)
    b_dk = tl.zeros([BT, BK], tl.float32)
    b_through = tl.zeros([BK], tl.float32)
    b_self = tl.zeros([BT], tl.float32)
    for i_v in range((V + BV - 1) // BV):
        at_v, inside_v, _ = rows(i_bh, n * BT, T, H, V, BT, BV, i_v)
        b_v = tl.load(p_v + at_v, mask=inside_v, other=0.0).to(tl.float32)  # [BT, BV]
        b_do = tl.load(p_do + at_v, mask=inside_v, other=0.0).to(tl.float32)
        at, inside = state_at(i_bh * N + n, i_v, K, V, BK, BV)
        b_state = tl.load(p_state + at, mask=inside, other=0.0)  # [BK, BV]
        b_dstate = tl.load(p_dstate + at, mask=inside, other=0.0)
        b_dq += tl.dot(b_do, tl.trans(b_state), input_precision=PRECISION)
        b_dk += tl.dot(b_v, tl.trans(b_dstate), input_precision=PRECISION)
        b_through += tl.sum(b_state * b_dstate, 1)
        b_self += tl.sum(b_do * b_v, 1)
        b_dv = tl.dot(b_k * b_after, b_dstate, input_precision=PRECISION)
        b_dv += tl.dot(tl.trans(b_a), b_do, input_precision=PRECISION)
        tl.store(p_dv + at_v, b_dv.to(p_dv.dtype.element_ty), mask=inside_v)

    b_g = tl.load(p_g + at_k, mask=inside_k, other=0.0).to(tl.float32)
    b_q = tl.load(p_q + at_k, mask=inside_k, other=0.0).to(tl.float32)
    b_dq *= tl.exp(tl.cumsum(b_g, 0)) * scale
    b_dk *= b_after
    # the sum over s < t as a product: a cumulative sum less its last term would lose what is small beside that term
    before = tl.arange(0, BT)[:, None] > tl.arange(0, BT)[None, :]
    b_dg = tl.dot(before.to(tl.float32), b_k * b_dk, input_precision="tf32x3")
    b_dg += (b_through * tl.exp(tl.sum(b_g, 0)))[None, :]

    b_dk_intra = tl.load(p_dk_intra + at_k, mask=inside_k, other=0.0)
    b_dq += tl.load(p_dq_intra + at_k, mask=inside_k, other=0.0)
    b_dg += tl.cumsum(b_q * b_dq - b_k * b_dk_intra, 0, reverse=True)
    tl.store(p_dg + at_k, b_dg.to(p_dg.dtype.element_ty), mask=inside_k)
    b_dq += (b_self * scale)[:, None] * b_k
    b_dk += b_dk_intra + (b_self * scale)[:, None] * b_q
    tl.store(p_dq + at_k, b_dq.to(p_dq.dtype.element_ty), mask=inside_k)
    tl.store(p_dk + at_k, b_dk.to(p_dk.dtype.element_ty), mask=inside_k)
