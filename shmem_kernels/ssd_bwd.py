"""A scalar decay for each head (ssd_fwd.py), backward.

With S the incoming state of a chunk, E the gradient of its outgoing one, and dy that of y before its product with
silu(z), without the factor scale of C, which scores, reading_of and the stored W contain:

ssd_steps_kernel, ssd_scores_kernel: the factors and scores again
ssd_output_kernel      with z alone: dz and dy
ssd_state_kernel       REVERSE: the gradient of the state over each segment alone; then, as in gla_bwd.py, the carries
ssd_pairs_kernel       of each chunk and group, over its heads: the sum of W[t, s] = e^(G_t - G_s) d_s (dy_t . x_s),
                       s <= t; of each head what pairs of tokens give to dg and dd, and dD; needs no remote gradient
then, a part of the segments at a time:
ssd_state_kernel       for every chunk: S; needs no remote gradient
ssd_adjoint_kernel     from the last chunk to the first: E of every chunk, and
                       dx_s = sum over t >= s of (C_t . B_s) e^(G_t - G_s) d_s dy_t + e^(G - G_s) d_s B_s E + D dy_s
ssd_gradients_kernel   of each chunk and group, over its heads:
                       dC_t = sum_s W[t, s] B_s + e^G_t S dy_t      dB_s = sum_t W[t, s] C_t + e^(G - G_s) d_s E x_s
                       and of each head the terms of dg and dd with S and E
at last:
ssd_step_grad_kernel   dg, ddt, and the parts of dA and ddt_bias, of a chunk and several heads
ssd_sums_kernel        sums of parts: of dB and dC over several programs of a group; of dA, dD, ddt_bias over chunks

dg_r is the sum of all terms whose decay contains g_r; it is 0 where a decay is. In bfloat16 no term is the difference
of larger sums; in float32 the sum over s < r is one up to s <= r less its last term.
With Q[t, s] = (C_t . B_s) W[t, s] / d_s:

    pairs s < r <= t:                      sum_{t >= r} sum_{s < r} Q[t, s] d_s
    from the state to tokens t >= r:       sum_{t >= r} e^G_t C_t . (S dy_t)
    from tokens s < r to the state:        sum_{s < r} e^(G - G_s) d_s B_s . (E x_s)
    from state to state:                   e^G sum S E

dd_s = A dg_s + sum_{t >= s} Q[t, s] + e^(G - G_s) B_s . (E x_s), exact also where d_s is 0.
Factors are applied in float32 to products of the tensors as they are; S and E are stored in the dtype of products, and
W and Q are float32, in bfloat16's products the sum of two parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import cast, dot_split, load, loop_bound, lower, minus, product, state_at, zeros
from .segment_table import segment
from .ssd_blocks import behind_of, decay_of, decays_of, factors_of, reading_of, scores_of, state_behind, tile
from .ssd_fwd import of_columns, raw_steps, states_of_heads, steps_of


@triton.jit
def _adjoint_of_head(
    tensors,
    b_state,
    b_c,
    b_b,
    b_scores,
    place,
    scale,
    d: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Store E and dx of one chunk and head; return the gradient of its incoming state. b_scores: B C^T."""
    p_dy, p_factors, p_D, p_dstates, p_dx = tensors
    n, first, end, h, i_v = place
    at, inside = state_at(n * d.H + h, i_v, d.N, d.P, d.BK, d.BV)
    tl.store(p_dstates + at, cast(b_state, p_dstates.dtype.element_ty), mask=inside)
    b_d, b_whole, b_part, whole, part = factors_of(p_factors, n * d.H + h, d.BT)
    base, at, inside = tile(first, end, h * d.P, i_v, d.DY_STRIDE, d.P, d.BT, d.BV)
    b_dy = load(p_dy + base, at, inside)
    b_a = b_scores * decays_of(b_whole, b_part, d.BT, True) * b_d[:, None]
    b_factor = behind_of(b_whole, b_part, whole, part) * b_d
    b_dx = product(b_a, b_dy, zeros(d.BT, d.BV), PRECISION)
    b_read = product(b_b, b_state, zeros(d.BT, d.BV), PRECISION)
    b_dx = tl.fma(b_read, b_factor[:, None] + tl.zeros_like(b_dx), b_dx)  # see _outputs_of_head
    b_state = state_behind(b_state, b_dy, b_c, reading_of(b_whole, b_part, scale), whole, part, PRECISION)
    if p_D is not None:
        b_dx += b_dy.to(tl.float32) * of_columns(p_D, h, i_v, d, PER_CHANNEL)
    base, at, inside = tile(first, end, h * d.P, i_v, d.H * d.P, d.P, d.BT, d.BV)
    tl.store(p_dx + base + at, cast(b_dx, p_dx.dtype.element_ty), mask=inside)
    return b_state


@triton.jit(do_not_specialize=["first_segment", "first_chunk", "scale"])
def ssd_adjoint_kernel(
    p_c,  # [tokens, G, N]
    p_b,  # [tokens, G, N]
    p_dy,  # [tokens, H, P]
    p_scores,  # float32 [tokens, G, BT]; None: computed
    p_factors,  # float32 [NC, H, 3, BT]
    p_segments,  # int32 [NS, SEGMENT_WORDS]
    p_incoming,  # float32 [NS, H, N, P], gradients of the segments' outgoing states from this rank
    p_edge_gate,  # float32 [NS, H, N]
    p_prev,  # float32 [B, H, N, P]; None: p_incoming is all
    p_D,  # [H] or [H, P]; or None
    p_dstates,  # [chunks of the launch, H, N, P]; out, the gradient of each chunk's outgoing state
    p_dx,  # [tokens, H, P]; out
    first_segment,  # int, of the launch
    first_chunk,  # int, of the launch
    scale,  # float
    d: tl.constexpr,  # H G N P BT BK BV HEADS C_STRIDE B_STRIDE DY_STRIDE
    PER_CHANNEL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """E of every chunk and dx, of HEADS heads, BV columns, from the last chunk of a segment to the first."""
    V_BLOCKS: tl.constexpr = (d.P + d.BV - 1) // d.BV
    i_v, h, s = tl.program_id(0) % V_BLOCKS, tl.program_id(0) // V_BLOCKS * d.HEADS, first_segment + tl.program_id(1)
    p_segment, start, end, chunk, num_chunks = segment(p_segments, s, d.BT)
    b_first, b_second = states_of_heads(p_incoming, p_edge_gate, p_prev, p_segment, (s, h, i_v), d)
    chunk, p_factors = chunk - first_chunk, p_factors + first_chunk.to(tl.int64) * (d.H * 3 * d.BT)
    for i in range(loop_bound(num_chunks)):
        n = num_chunks - 1 - i
        first = start + n * d.BT
        base_c, at_c, inside = tile(first, end, h // (d.H // d.G) * d.N, 0, d.C_STRIDE, d.N, d.BT, d.BK)
        base_b, at_b, inside = tile(first, end, h // (d.H // d.G) * d.N, 0, d.B_STRIDE, d.N, d.BT, d.BK)
        b_c, b_b = load(p_c + base_c, at_c, inside), load(p_b + base_b, at_b, inside)
        if p_scores is None:
            b_scores = product(b_b, tl.trans(b_c), zeros(d.BT, d.BT), PRECISION) * scale
        else:
            base, at, inside = tile(first, end, h // (d.H // d.G) * d.BT, 0, d.G * d.BT, d.BT, d.BT, d.BT)
            b_scores = tl.trans(load(p_scores + base, at, inside))
        tensors = (p_dy, p_factors, p_D, p_dstates, p_dx)
        place = (chunk + n, first, end, h, i_v)
        b_first = _adjoint_of_head(tensors, b_first, b_c, b_b, b_scores, place, scale, d, PER_CHANNEL, PRECISION)
        if d.HEADS == 2:
            place = (chunk + n, first, end, h + 1, i_v)
            b_second = _adjoint_of_head(tensors, b_second, b_c, b_b, b_scores, place, scale, d, PER_CHANNEL, PRECISION)


@triton.jit(do_not_specialize=["tokens", "scale"])
def ssd_pairs_kernel(
    p_c,  # [tokens, G, N]
    p_b,  # [tokens, G, N]
    p_x,  # [tokens, H, P]
    p_dy,  # [tokens, H, P]
    p_scores,  # float32 [tokens, G, BT]; None: computed
    p_factors,  # float32 [NC, H, 3, BT]
    p_chunks,  # int32 [NC, 2]
    p_scalars,  # float32 [NC, H, 2, BT]; out: dg and, without A dg, dd from the pairs of tokens
    p_weights,  # float32 [SPLIT, tokens, G, BT]; out, sum of W over heads, times scale
    p_dD,  # float32 [NC, H] or [NC, H, P]; out; or None
    tokens,  # int
    scale,  # float
    d: tl.constexpr,  # H G N P BT BV SPLIT C_STRIDE B_STRIDE X_STRIDE DY_STRIDE
    PER_CHANNEL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """W of one chunk and group (SPLIT: of a part of its heads); of each head what its pairs of tokens give to dg and
    dd, and dD."""
    HEADS: tl.constexpr = d.H // d.G
    V_BLOCKS: tl.constexpr = (d.P + d.BV - 1) // d.BV
    split, g, n = tl.program_id(0) % d.SPLIT, tl.program_id(0) // d.SPLIT % d.G, tl.program_id(0) // (d.SPLIT * d.G)
    start, end = tl.load(p_chunks + 2 * n), tl.load(p_chunks + 2 * n + 1)
    base_scores, at_scores, inside = tile(start, end, g * d.BT, 0, d.G * d.BT, d.BT, d.BT, d.BT)
    if p_scores is None:
        b_scores = scores_of(p_c, p_b, start, end, g, scale, d, PRECISION)
    else:
        b_scores = load(p_scores + base_scores, at_scores, inside)
    t = tl.arange(0, d.BT)
    b_before = tl.where(t[:, None] < t[None, :], 1.0, 0.0).to(tl.bfloat16)
    b_w = zeros(d.BT, d.BT)
    for i_h in range(HEADS * split // d.SPLIT, HEADS * (split + 1) // d.SPLIT):
        h = g * HEADS + i_h
        row = n * d.H + h
        b_d, b_whole, b_part, whole, part = factors_of(p_factors, row, d.BT)
        b_pairs = zeros(d.BT, d.BT)
        for i_v in tl.static_range(V_BLOCKS):
            base_x, at_x, inside_v = tile(start, end, h * d.P, i_v, d.X_STRIDE, d.P, d.BT, d.BV)
            base_dy, at_dy, inside_v = tile(start, end, h * d.P, i_v, d.DY_STRIDE, d.P, d.BT, d.BV)
            b_x, b_dy = load(p_x + base_x, at_x, inside_v), load(p_dy + base_dy, at_dy, inside_v)
            b_pairs = product(b_dy, tl.trans(b_x), b_pairs, PRECISION)
            if p_dD is not None:
                if PER_CHANNEL:
                    v = i_v * d.BV + tl.arange(0, d.BV)
                    b_dD = tl.sum(b_x.to(tl.float32) * b_dy.to(tl.float32), 0)
                    tl.store(p_dD + row.to(tl.int64) * d.P + v, b_dD, mask=v < d.P)
        if p_dD is not None:
            if not PER_CHANNEL:
                tl.store(p_dD + row, tl.sum(tl.where(t[:, None] == t[None, :], b_pairs, 0.0)))
        b_pairs *= decays_of(b_whole, b_part, d.BT, False)
        b_terms = b_pairs * b_d[None, :]
        b_w += b_terms
        b_terms *= b_scores
        if PRECISION == "bf16":
            b_onward = dot_split(b_terms, b_before, zeros(d.BT, d.BT), PRECISION)
        else:
            b_onward = minus(tl.cumsum(b_terms, 1), b_terms)
        p_of = p_scalars + row.to(tl.int64) * (2 * d.BT) + t
        tl.store(p_of, tl.sum(tl.where(lower(d.BT, 0), b_onward, 0.0), 0))
        tl.store(p_of + d.BT, tl.sum(b_pairs * b_scores, 0))
    base_scores += split * tokens.to(tl.int64) * (d.G * d.BT)
    tl.store(p_weights + base_scores + at_scores, b_w * scale, mask=inside)


@triton.jit(do_not_specialize=["first_chunk", "tokens", "scale"])
def ssd_gradients_kernel(
    p_c,  # [tokens, G, N]
    p_b,  # [tokens, G, N]
    p_x,  # [tokens, H, P]
    p_dy,  # [tokens, H, P]
    p_weights,  # float32 [SPLIT, tokens, G, BT], see ssd_pairs_kernel
    p_factors,  # float32 [NC, H, 3, BT]
    p_chunks,  # int32 [NC, 2]
    p_states,  # [chunks of the launch, H, N, P], each chunk's incoming state
    p_dstates,  # like p_states, the gradient of its outgoing state
    p_dc,  # [SPLIT, tokens, G, N]; out
    p_db,  # [SPLIT, tokens, G, N]; out
    p_parts,  # float32 [NC, H, NJ, 2, BT]; out, of BJ rows of the states: e^G_t C_t . (S dy_t) and, without d_s,
    # e^(G - G_s) B_s . (E x_s)
    p_through,  # float32 [NC, H, N]; out, the sum of S E over columns
    first_chunk,  # int, of the launch
    tokens,  # int
    scale,  # float
    d: tl.constexpr,  # H G N P BT BV BJ SPLIT C_STRIDE B_STRIDE X_STRIDE DY_STRIDE
    PRECISION: tl.constexpr,
):
    """BJ columns of dC and dB of one chunk and group, over all heads of the group (SPLIT: over a part of them)."""
    HEADS: tl.constexpr = d.H // d.G
    NJ: tl.constexpr = (d.N + d.BJ - 1) // d.BJ
    V_BLOCKS: tl.constexpr = (d.P + d.BV - 1) // d.BV
    j, i = tl.program_id(0) % NJ, tl.program_id(0) // NJ
    split, g, m = i % d.SPLIT, i // d.SPLIT % d.G, i // (d.SPLIT * d.G)
    n = first_chunk + m
    start, end = tl.load(p_chunks + 2 * n), tl.load(p_chunks + 2 * n + 1)
    base_c, at_c, inside = tile(start, end, g * d.N, j, d.C_STRIDE, d.N, d.BT, d.BJ)
    base_b, at_b, inside = tile(start, end, g * d.N, j, d.B_STRIDE, d.N, d.BT, d.BJ)
    b_dc = zeros(d.BT, d.BJ)
    b_db = zeros(d.BT, d.BJ)
    k = j * d.BJ + tl.arange(0, d.BJ)
    for i_h in range(HEADS * split // d.SPLIT, HEADS * (split + 1) // d.SPLIT):
        h = g * HEADS + i_h
        row = n * d.H + h
        b_d, b_whole, b_part, whole, part = factors_of(p_factors, row, d.BT)
        # loaded again for every head, since there are no registers to hold them; before the products, whose layout
        # Triton then takes for the sums below, instead of that of these tiles
        b_c, b_b = load(p_c + base_c, at_c, inside), load(p_b + base_b, at_b, inside)
        b_read = zeros(d.BT, d.BJ)
        b_left = zeros(d.BT, d.BJ)
        b_through = zeros(d.BJ)
        for i_v in tl.static_range(V_BLOCKS):
            base_x, at_x, inside_v = tile(start, end, h * d.P, i_v, d.X_STRIDE, d.P, d.BT, d.BV)
            base_dy, at_dy, inside_v = tile(start, end, h * d.P, i_v, d.DY_STRIDE, d.P, d.BT, d.BV)
            at_s, inside_s = state_at(m * d.H + h, i_v, d.N, d.P, d.BJ, d.BV, j)
            b_x, b_dy = load(p_x + base_x, at_x, inside_v), load(p_dy + base_dy, at_dy, inside_v)
            b_state, b_dstate = load(p_states, at_s, inside_s), load(p_dstates, at_s, inside_s)
            b_read = product(b_dy, tl.trans(b_state), b_read, PRECISION)
            b_left = product(b_x, tl.trans(b_dstate), b_left, PRECISION)
            b_through += tl.sum(b_state.to(tl.float32) * b_dstate.to(tl.float32), 1)
        tl.store(p_through + row.to(tl.int64) * d.N + k, b_through, mask=k < d.N)
        b_read *= reading_of(b_whole, b_part, scale)[:, None]
        b_dc += b_read
        p_of = p_parts + (row.to(tl.int64) * NJ + j) * (2 * d.BT) + tl.arange(0, d.BT)
        tl.store(p_of, tl.sum(b_read * b_c.to(tl.float32), 1))
        b_left *= behind_of(b_whole, b_part, whole, part)[:, None]
        b_db += b_left * b_d[:, None]
        tl.store(p_of + d.BT, tl.sum(b_left * b_b.to(tl.float32), 1))
    base, at, inside_w = tile(start, end, g * d.BT, 0, d.G * d.BT, d.BT, d.BT, d.BT)
    b_w = load(p_weights + base + split * tokens.to(tl.int64) * (d.G * d.BT), at, inside_w)
    b_c, b_b = load(p_c + base_c, at_c, inside), load(p_b + base_b, at_b, inside)
    b_dc += dot_split(b_w, b_b, zeros(d.BT, d.BJ), PRECISION)
    b_db += dot_split(tl.trans(b_w), b_c, zeros(d.BT, d.BJ), PRECISION)
    base, at, inside = tile(start, end, g * d.N, j, d.G * d.N, d.N, d.BT, d.BJ)
    base += split * tokens.to(tl.int64) * (d.G * d.N)
    tl.store(p_dc + base + at, cast(b_dc, p_dc.dtype.element_ty), mask=inside)
    tl.store(p_db + base + at, cast(b_db, p_db.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["least", "most"])
def ssd_step_grad_kernel(
    p_dt,  # [tokens, H]; or None, see ssd_steps_kernel
    p_A,  # [H]; or None
    p_dt_bias,  # [H], or None
    p_factors,  # float32 [NC, H, 3, BT]
    p_chunks,  # int32 [NC, 2]
    p_scalars,  # float32 [NC, H, 2, BT], see ssd_pairs_kernel
    p_parts,  # float32 [NC, H, NJ, 2, BT], see ssd_gradients_kernel
    p_through,  # float32 [NC, H, N]
    p_ddt,  # [tokens, H]; out; None without p_dt
    p_dA,  # float32 [NC, H]; out; None without p_A
    p_dbias,  # float32 [NC, H]; out; None without p_dt_bias
    least,  # float, bounds of d
    most,  # float
    d: tl.constexpr,  # H N BT BK BH NJ DT_STRIDE
    SOFTPLUS: tl.constexpr,
):
    """ddt of one chunk and BH heads; a bound of d has the gradient 0 outside, as torch.clamp."""
    BLOCKS: tl.constexpr = (d.H + d.BH - 1) // d.BH
    NJ: tl.constexpr = d.NJ
    n, i = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    start, end = tl.load(p_chunks + 2 * n), tl.load(p_chunks + 2 * n + 1)
    t, h = tl.arange(0, d.BT), i * d.BH + tl.arange(0, d.BH)
    there = (t >= 0)[:, None] & (h < d.H)[None, :]
    later = (t > 0)[:, None] & (h < d.H)[None, :]
    inside = (start + t < end)[:, None] & (h < d.H)[None, :]
    row = (n * d.H + h).to(tl.int64)
    at_factors = (row * (3 * d.BT))[None, :] + t[:, None]
    k = tl.arange(0, d.BK)
    b_through = load(p_through, row[None, :] * d.N + k[:, None], (k < d.N)[:, None] & (h < d.H)[None, :])
    whole = tl.load(p_factors + row * (3 * d.BT) + (2 * d.BT - 1), mask=h < d.H, other=0.0)
    part = tl.load(p_factors + row * (3 * d.BT) + (3 * d.BT - 1), mask=h < d.H, other=0.0)
    b_read, b_left = zeros(d.BT, d.BH), zeros(d.BT, d.BH)
    b_before = zeros(d.BT, d.BH)
    for j in tl.static_range(NJ):
        at = ((row * NJ + j) * (2 * d.BT))[None, :] + t[:, None]
        b_read += load(p_parts, at, there)
        b_left += load(p_parts + d.BT, at, there)
        b_before += load(p_parts + (d.BT - 1), at, later)
    at = (row * (2 * d.BT))[None, :] + t[:, None]
    b_before *= load(p_factors - 1, at_factors, later)
    b_dg = load(p_scalars, at, inside) + tl.cumsum(b_before, 0) + tl.cumsum(b_read, 0, reverse=True)
    b_dg += (tl.sum(b_through, 0) * decay_of(whole, part))[None, :]
    b_grad = b_dg
    if p_A is not None:
        b_d = load(p_factors, at_factors, there)
        tl.store(p_dA + row, tl.sum(tl.where(inside & (b_dg != 0.0), b_dg * b_d, 0.0), 0), mask=h < d.H)
        if p_dt is not None:
            b_v = raw_steps(p_dt, p_dt_bias, start, i, inside, d)
            b_unused, b_slope = steps_of(b_v, least, most, SOFTPLUS)
            b_A = tl.load(p_A + h, mask=h < d.H, other=0.0).to(tl.float32)
            b_dd = load(p_scalars + d.BT, at, inside) + b_left
            b_dd += tl.where(b_dg == 0.0, 0.0, b_dg * b_A[None, :])  # A may be -inf
            b_grad = tl.where(b_slope == 0.0, 0.0, b_dd * b_slope)
    if p_dt is not None:
        at_dt = (start + t).to(tl.int64)[:, None] * d.H + h[None, :]
        tl.store(p_ddt + at_dt, cast(b_grad, p_ddt.dtype.element_ty), mask=inside)
    if p_dbias is not None:
        tl.store(p_dbias + row, tl.sum(tl.where(inside, b_grad, 0.0), 0), mask=h < d.H)


@triton.jit(do_not_specialize=["parts", "width"])
def ssd_sums_kernel(
    p_parts,  # float32 [parts, width]
    p_sum,  # [width]; out
    parts,  # int
    width,  # int
    BN: tl.constexpr,
    BW: tl.constexpr,
):
    """Sums over parts of BW columns, BN parts at a time."""
    w = tl.program_id(0).to(tl.int64) * BW + tl.arange(0, BW)
    b_sum = zeros(BW)
    for i in range(loop_bound((parts + BN - 1) // BN)):
        part = i * BN + tl.arange(0, BN)
        at = part.to(tl.int64)[:, None] * width + w[None, :]
        b_sum += tl.sum(load(p_parts, at, (part < parts)[:, None] & (w < width)[None, :]), 0)
    tl.store(p_sum + w, cast(b_sum, p_sum.dtype.element_ty), mask=w < width)
