"""A scalar decay for each head (Mamba2's SSD), forward.

    S_t = exp(d_t A) S_{t-1} + d_t B_t x_t^T      y_t = scale C_t S_t + D x_t, times silu(z_t) if z is given

For zeco_simple_gla C, B, x are q, k, v; d_t is 1, and the gate A or, without it, dt_t (g); scale is 1 for zeco_ssd.

ssd_steps_kernel    d_t, and the sums of d A up to each token of its chunk, of a chunk and several heads
ssd_scores_kernel   scale C B^T of a chunk and group; with G = H other kernels compute it
ssd_state_kernel    each segment alone, from a zero state: its local state, and the sum of its gates; or, from its
                    incoming state, the incoming state of every chunk, which backward takes
state_passing_kernel, scan_kernel, final_kernel: as in gla_fwd.py, with gates that are equal for all rows of a state
ssd_output_kernel   a segment at a time, HEADS states in registers, starting with their incoming states: y

With G_t the sum of a chunk's gates up to token t, and G that of the whole chunk:

    y_t = sum over s <= t of (C_t . B_s) e^(G_t - G_s) d_s x_s + e^G_t C_t S, times scale
    S' = e^G S + sum e^(G - G_s) d_s B_s x_s^T

Exact for every gate from 0 to -inf: each factor is the exponential of a sum of gates between two tokens and at most 1.
Such a sum is a difference of two sums from the chunk's beginning on, which are kept as an integer and a fraction (made
in float64), so nothing is lost to gates outside. Factors are applied to float32 results of products, or to an operand
that is rounded once: scores by head. So C, B and C B^T serve all heads of a program, one or two.

Tensors: x, y, z [tokens, H, P], B, C [tokens, G, N], dt [tokens, H]: tokens may be any number of elements apart
(*_STRIDE), all else is contiguous. Factors [NC, H, 3, BT] float32: d_t, integer and fraction of G_t to base 2; 0 and
the chunk's sum for tokens beyond its end. States [N, P] of a head. Tables: see gla_fwd.py.
PRECISION as in gla_fwd.py. Source: Mamba2, arXiv 2405.21060.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import cast, load, loop_bound, product, state_at, zeros
from .gates import sigmoid
from .gla_blocks import load_incoming_state
from .segment_table import segment
from .ssd_blocks import behind_of, decays_of, factors_of, gates_of, reading_of, scores_of, state_behind, tile


@triton.jit
def raw_steps(p_dt, p_dt_bias, start, i, inside, d: tl.constexpr):
    """Return dt + dt_bias [BT, BH] of one chunk."""
    t, h = tl.arange(0, d.BT), i * d.BH + tl.arange(0, d.BH)
    b_v = load(p_dt, (start + t).to(tl.int64)[:, None] * d.DT_STRIDE + h[None, :], inside).to(tl.float32)
    if p_dt_bias is not None:
        b_v += tl.load(p_dt_bias + h, mask=h < d.H, other=0.0).to(tl.float32)[None, :]
    return b_v


@triton.jit
def steps_of(b_v, least, most, SOFTPLUS: tl.constexpr):
    """Return (d, its derivative) of raw steps."""
    b_d, b_slope = b_v, tl.full(b_v.shape, 1.0, tl.float32)
    if SOFTPLUS:
        b_slope, b_unused, b_log = sigmoid(b_v)
        b_d = tl.maximum(b_v, 0.0, propagate_nan=tl.PropagateNan.ALL) + b_log
    b_slope = tl.where((b_d >= least) & (b_d <= most), b_slope, 0.0)
    b_d = tl.maximum(b_d, least, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(b_d, most, propagate_nan=tl.PropagateNan.ALL), b_slope


@triton.jit(do_not_specialize=["least", "most"])
def ssd_steps_kernel(
    p_dt,  # [tokens, H]; or None: d is 1
    p_A,  # [H]; or None: the gates are dt, and d is 1
    p_dt_bias,  # [H], or None
    p_chunks,  # int32 [NC, 2]
    p_factors,  # float32 [NC, H, 3, BT]; out
    least,  # float, bounds of d
    most,  # float
    d: tl.constexpr,  # H BT BH DT_STRIDE
    SOFTPLUS: tl.constexpr,
):
    """The factors of one chunk and BH heads."""
    BLOCKS: tl.constexpr = (d.H + d.BH - 1) // d.BH
    n, i = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    start, end = tl.load(p_chunks + 2 * n), tl.load(p_chunks + 2 * n + 1)
    t, h = tl.arange(0, d.BT), i * d.BH + tl.arange(0, d.BH)
    inside = (start + t < end)[:, None] & (h < d.H)[None, :]
    b_d = tl.where(inside, 1.0, 0.0)
    b_A = zeros(d.BT, d.BH)
    if p_A is not None:
        b_A += tl.load(p_A + h, mask=h < d.H, other=0.0).to(tl.float32)[None, :]
    if p_dt is not None:
        b_v = raw_steps(p_dt, p_dt_bias, start, i, inside, d)
        if p_A is None:
            b_A = b_v
        else:
            b_steps, b_slope = steps_of(b_v, least, most, SOFTPLUS)
            b_d = tl.where(inside, b_steps, 0.0)
    b_sums = tl.cumsum(gates_of(b_d, b_A), 0)
    b_whole = b_sums.to(tl.int32)
    b_part = (b_sums - b_whole.to(tl.float64)).to(tl.float32)
    at = ((n * d.H + h).to(tl.int64) * (3 * d.BT))[None, :] + t[:, None]
    there = (t >= 0)[:, None] & (h < d.H)[None, :]
    tl.store(p_factors + at, b_d, mask=there)
    tl.store(p_factors + at + d.BT, b_whole.to(tl.float32), mask=there)
    tl.store(p_factors + at + 2 * d.BT, b_part, mask=there)


@triton.jit(do_not_specialize=["scale"])
def ssd_scores_kernel(
    p_c,  # [tokens, G, N]
    p_b,  # [tokens, G, N]
    p_chunks,  # int32 [NC, 2]
    p_scores,  # float32 [tokens, G, BT]; out
    scale,  # float
    d: tl.constexpr,  # G N BT C_STRIDE B_STRIDE
    PRECISION: tl.constexpr,
):
    """scale C B^T of one chunk and group."""
    n, g = tl.program_id(0) // d.G, tl.program_id(0) % d.G
    start, end = tl.load(p_chunks + 2 * n), tl.load(p_chunks + 2 * n + 1)
    b_scores = scores_of(p_c, p_b, start, end, g, scale, d, PRECISION)
    base, at, inside = tile(start, end, g * d.BT, 0, d.G * d.BT, d.BT, d.BT, d.BT)
    tl.store(p_scores + base + at, b_scores, mask=inside)


@triton.jit
def states_of_heads(p_incoming, p_edge_gate, p_prev, p_segment, place, d: tl.constexpr):
    """Return the states [BK, BV] of the program's two heads at a segment's edge; the first one twice if HEADS is 1.
    p_incoming, p_edge_gate, p_prev: see load_incoming_state; None for zeros. place: segment, first head, block of P."""
    s, h, i_v = place
    if p_incoming is None:
        b_first = zeros(d.BK, d.BV)
        b_second = b_first
    else:
        b_first = load_incoming_state(p_incoming, p_edge_gate, p_prev, p_segment, s, h, i_v, d.H, d.N, d.P, d.BK, d.BV)
        b_second = b_first
        if d.HEADS == 2:
            b_second = load_incoming_state(
                p_incoming, p_edge_gate, p_prev, p_segment, s, h + 1, i_v, d.H, d.N, d.P, d.BK, d.BV
            )
    return b_first, b_second


@triton.jit
def _local_gate(p_gate, sum_of_gates, row, d: tl.constexpr):
    """Store a segment's sum of gates, the same for all rows of the state."""
    k = tl.arange(0, d.BK)
    tl.store(p_gate + row * d.N + k, zeros(d.BK) + sum_of_gates, mask=k < d.N)


@triton.jit
def _next_state(
    p_x,
    p_factors,
    p_states,
    b_state,
    b_b,
    place,
    scale,
    d: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return (the state behind a chunk of one head, the chunk's gates). place: chunk, first token, end, head, block of
    P."""
    n, first, end, h, i_v = place
    if p_states is not None:
        at, inside = state_at(n * d.H + h, i_v, d.N, d.P, d.BK, d.BV)
        tl.store(p_states + at, cast(b_state, p_states.dtype.element_ty), mask=inside)
    b_d, b_whole, b_part, whole, part = factors_of(p_factors, n * d.H + h, d.BT)
    base, at, inside = tile(first, end, h * d.P, i_v, d.X_STRIDE, d.P, d.BT, d.BV)
    b_x = load(p_x + base, at, inside)
    b_factor = reading_of(b_whole, b_part, scale) if REVERSE else behind_of(b_whole, b_part, whole, part) * b_d
    return state_behind(b_state, b_x, b_b, b_factor, whole, part, PRECISION), whole + part


@triton.jit(do_not_specialize=["first_segment", "first_chunk", "scale"])
def ssd_state_kernel(
    p_b,  # B, REVERSE C [tokens, G, N]
    p_x,  # x, REVERSE dy [tokens, H, P]
    p_factors,  # float32 [NC, H, 3, BT]
    p_segments,  # int32 [NS, SEGMENT_WORDS]
    p_incoming,  # float32 [NS, H, N, P], the segments' incoming states from this rank; None for zeros: see below
    p_edge_gate,  # float32 [NS, H, N]; None without p_incoming
    p_prev,  # float32 [B, H, N, P]; None: p_incoming is all
    p_states,  # [chunks of the launch, H, N, P]; out, each chunk's incoming state; None without p_incoming
    p_local,  # float32 [NS, H, N, P]; out; None with p_incoming
    p_gate,  # float32 [NS, H, N]; out; None with p_incoming
    first_segment,  # int, of the launch
    first_chunk,  # int, of the launch
    scale,  # float
    d: tl.constexpr,  # H G N P BT BK BV HEADS B_STRIDE X_STRIDE
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Pass through the chunks of one segment, HEADS heads, BV columns of the states. From zero: the segment's local
    state and the sum of its gates; REVERSE: the gradient of its incoming state, from the last chunk to the first. From
    its incoming state: the incoming state of each chunk."""
    V_BLOCKS: tl.constexpr = (d.P + d.BV - 1) // d.BV
    i_v, h, s = tl.program_id(0) % V_BLOCKS, tl.program_id(0) // V_BLOCKS * d.HEADS, first_segment + tl.program_id(1)
    p_segment, start, end, chunk, num_chunks = segment(p_segments, s, d.BT)
    b_first, b_second = states_of_heads(p_incoming, p_edge_gate, p_prev, p_segment, (s, h, i_v), d)
    chunk, p_factors = chunk - first_chunk, p_factors + first_chunk.to(tl.int64) * (d.H * 3 * d.BT)
    gate, second_gate = 0.0, 0.0
    for i in range(loop_bound(num_chunks)):
        n = num_chunks - 1 - i if REVERSE else i
        first = start + n * d.BT
        base, at, inside = tile(first, end, h // (d.H // d.G) * d.N, 0, d.B_STRIDE, d.N, d.BT, d.BK)
        b_b = load(p_b + base, at, inside)
        place = (chunk + n, first, end, h, i_v)
        b_first, more = _next_state(p_x, p_factors, p_states, b_first, b_b, place, scale, d, REVERSE, PRECISION)
        gate += more
        if d.HEADS == 2:
            place = (chunk + n, first, end, h + 1, i_v)
            b_second, more = _next_state(p_x, p_factors, p_states, b_second, b_b, place, scale, d, REVERSE, PRECISION)
            second_gate += more
    if p_local is not None:
        at, inside = state_at(s * d.H + h, i_v, d.N, d.P, d.BK, d.BV)
        tl.store(p_local + at, b_first, mask=inside)
        if i_v == 0:
            _local_gate(p_gate, gate, s * d.H + h, d)
        if d.HEADS == 2:
            at, inside = state_at(s * d.H + h + 1, i_v, d.N, d.P, d.BK, d.BV)
            tl.store(p_local + at, b_second, mask=inside)
            _local_gate(p_gate, second_gate, s * d.H + h + 1, d)


@triton.jit
def of_columns(p_D, h, i_v, d: tl.constexpr, PER_CHANNEL: tl.constexpr):
    """Return D of a head's columns [1, BV]. PER_CHANNEL: p_D is [H, P], else [H]."""
    v = i_v * d.BV + tl.arange(0, d.BV)
    if PER_CHANNEL:
        b_D = tl.load(p_D + h * d.P + v, mask=v < d.P, other=0.0).to(tl.float32)
    else:
        b_D = zeros(d.BV) + tl.load(p_D + h).to(tl.float32)
    return b_D[None, :]


@triton.jit
def _outputs_of_head(
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
    """Store y of one chunk and head, return the state behind. place as in _next_state."""
    p_x, p_factors, p_D, p_z, p_dy, p_y, p_dz = tensors
    n, first, end, h, i_v = place
    b_d, b_whole, b_part, whole, part = factors_of(p_factors, n * d.H + h, d.BT)
    base, at, inside = tile(first, end, h * d.P, i_v, d.X_STRIDE, d.P, d.BT, d.BV)
    b_x = load(p_x + base, at, inside)
    b_a = b_scores * decays_of(b_whole, b_part, d.BT, False) * b_d[None, :]
    # fma: Triton makes one chain of products that are added up, whose rows it gives to all warps; 8 have too few of BT
    b_y = product(b_a, b_x, zeros(d.BT, d.BV), PRECISION)
    b_read = product(b_c, b_state, zeros(d.BT, d.BV), PRECISION)
    b_y = tl.fma(b_read, reading_of(b_whole, b_part, scale)[:, None] + tl.zeros_like(b_y), b_y)
    b_factor = behind_of(b_whole, b_part, whole, part) * b_d
    b_state = state_behind(b_state, b_x, b_b, b_factor, whole, part, PRECISION)
    if p_D is not None:
        b_y += b_x.to(tl.float32) * of_columns(p_D, h, i_v, d, PER_CHANNEL)
    base, at_y, inside = tile(first, end, h * d.P, i_v, d.H * d.P, d.P, d.BT, d.BV)
    if p_z is not None:
        base_z, at, inside = tile(first, end, h * d.P, i_v, d.Z_STRIDE, d.P, d.BT, d.BV)
        b_z = load(p_z + base_z, at, inside).to(tl.float32)
        b_sigmoid = tl.sigmoid(b_z)
        if p_dz is not None:
            base_z, at, inside = tile(first, end, h * d.P, i_v, d.DY_STRIDE, d.P, d.BT, d.BV)
            b_dy = load(p_dy + base_z, at, inside).to(tl.float32)
            b_dz = b_dy * b_y * b_sigmoid * (1.0 + b_z * (1.0 - b_sigmoid))
            tl.store(p_dz + base + at_y, cast(b_dz, p_dz.dtype.element_ty), mask=inside)
            b_y = b_dy
        b_y *= b_z * b_sigmoid
    tl.store(p_y + base + at_y, cast(b_y, p_y.dtype.element_ty), mask=inside)
    return b_state


@triton.jit(do_not_specialize=["scale"])
def ssd_output_kernel(
    p_c,  # [tokens, G, N]
    p_b,  # [tokens, G, N]
    p_x,  # [tokens, H, P]
    p_scores,  # float32 [tokens, G, BT]; None: computed
    p_factors,  # float32 [NC, H, 3, BT]
    p_segments,  # int32 [NS, SEGMENT_WORDS]
    p_incoming,  # float32 [NS, H, N, P], the segments' incoming states from this rank
    p_edge_gate,  # float32 [NS, H, N]
    p_prev,  # float32 [B, H, N, P]; None: p_incoming is all
    p_D,  # [H] or [H, P]; or None
    p_z,  # [tokens, H, P]; or None
    p_dy,  # [tokens, H, P]; None but for backward with z
    p_y,  # [tokens, H, P]; out
    p_dz,  # [tokens, H, P]; out; or None, see below
    scale,  # float
    d: tl.constexpr,  # H G N P BT BK BV HEADS C_STRIDE B_STRIDE X_STRIDE Z_STRIDE DY_STRIDE
    PER_CHANNEL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y of HEADS heads, BV columns, from chunk to chunk of a segment. With p_dz, for backward: the gradients of z
    (p_dz) and of y before its product with silu(z) (p_y)."""
    V_BLOCKS: tl.constexpr = (d.P + d.BV - 1) // d.BV
    i_v, h, s = tl.program_id(0) % V_BLOCKS, tl.program_id(0) // V_BLOCKS * d.HEADS, tl.program_id(1)
    p_segment, start, end, chunk, num_chunks = segment(p_segments, s, d.BT)
    b_first, b_second = states_of_heads(p_incoming, p_edge_gate, p_prev, p_segment, (s, h, i_v), d)
    for n in range(loop_bound(num_chunks)):
        first = start + n * d.BT
        base_c, at_c, inside = tile(first, end, h // (d.H // d.G) * d.N, 0, d.C_STRIDE, d.N, d.BT, d.BK)
        base_b, at_b, inside = tile(first, end, h // (d.H // d.G) * d.N, 0, d.B_STRIDE, d.N, d.BT, d.BK)
        b_c, b_b = load(p_c + base_c, at_c, inside), load(p_b + base_b, at_b, inside)
        if p_scores is None:
            b_scores = product(b_c, tl.trans(b_b), zeros(d.BT, d.BT), PRECISION) * scale
        else:
            base, at, inside = tile(first, end, h // (d.H // d.G) * d.BT, 0, d.G * d.BT, d.BT, d.BT, d.BT)
            b_scores = load(p_scores + base, at, inside)
        tensors = (p_x, p_factors, p_D, p_z, p_dy, p_y, p_dz)
        place = (chunk + n, first, end, h, i_v)
        b_first = _outputs_of_head(tensors, b_first, b_c, b_b, b_scores, place, scale, d, PER_CHANNEL, PRECISION)
        if d.HEADS == 2:
            place = (chunk + n, first, end, h + 1, i_v)
            b_second = _outputs_of_head(tensors, b_second, b_c, b_b, b_scores, place, scale, d, PER_CHANNEL, PRECISION)
