"""Chunks of strong decay, which operands_kernel (gla_fwd.py) and grad_kernel (gla_bwd.py) skip; for any gates.

Those kernels compute a decay as a quotient of two exponentials, harmless if a chunk's gates are mild. This is decided
for each chunk (``p_strong`` [NC, H]). Here a chunk is processed by sub-blocks of BC tokens. Within a sub-block each
pair of tokens has its own decay; between two sub-blocks the decay is the product of three exponentials of sums of
gates, none above 1.

Mostly no chunk is strong, and these kernels only read flags: a few programs read LOOK flags at a time and take the
strong chunks in turn.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .blocks import cast, dot_split, exp2, load, load_gates, lower, rows, sums_of, upper, zeros
from .gla_blocks import from_states, load_da, load_passed, pair_decays


class Pointers(NamedTuple):
    """Pointers that strong_decay_grad_kernel passes to its functions; see its parameters."""

    q: Any
    k: Any
    v: Any
    g: Any
    do: Any
    da: Any
    diagonal: Any
    states: Any
    dstates: Any
    dq: Any
    dk: Any
    dg: Any


@triton.jit
def _begin():
    """Return (number of this program's next strong chunk, first flag to read, number of strong chunks before it)."""
    number = tl.program_id(0)
    return number, number * 0, number * 0


@triton.jit
def _flags(p_strong, first, before, N, d: tl.constexpr):
    """Return (flags first .. first + LOOK of N, 1 for a strong chunk; number of strong chunks up to their end)."""
    i = first + tl.arange(0, d.LOOK)
    b_strong = (tl.load(p_strong + i, mask=i < N, other=0) != 0).to(tl.int32)
    return b_strong, before + tl.sum(b_strong, 0)


@triton.jit
def _strong_chunk(p_chunks, b_strong, first, number, d: tl.constexpr):
    """Return (index of the chunk, head, first token, end) of strong chunk ``number`` of these flags, from 0."""
    mine = (b_strong != 0) & (tl.cumsum(b_strong, 0) == number + 1)
    chunk = first + tl.sum(tl.where(mine, tl.arange(0, d.LOOK), 0), 0)
    n, h = chunk // d.H, chunk % d.H
    return n, h, tl.load(p_chunks + 2 * n), tl.load(p_chunks + 2 * n + 1)


@triton.jit(do_not_specialize=["N"])
def strong_decay_kernel(
    p_q,  # [tokens, H, K]
    p_k,  # [tokens, H, K]
    p_g,  # [tokens, H, K], natural logarithms
    p_chunks,  # int32 [NC, 2]
    p_strong,  # int32 [NC, H]
    p_q_in,  # [tokens, H, K]; out
    p_k_out,  # [tokens, H, K]; out
    p_a,  # [tokens, H, BT]; out
    scale,  # float
    N,  # NC * H
    d: tl.constexpr,  # H K BT BC BK BS LOOK
    PRECISION: tl.constexpr,
):
    """q_in, k_out and A of the strong-decay chunks, by sub-blocks of BC tokens. Program p takes strong chunks p, p +
    programs, ..., counted in the order of their flags, of which there are N."""
    number, first, before = _begin()
    while first < N:
        b_strong, behind = _flags(p_strong, first, before, N, d)
        if number < behind:
            n, h, start, end = _strong_chunk(p_chunks, b_strong, first, number - before, d)
            for i in range(d.BT // d.BC):
                _rows(p_q, p_k, p_g, p_q_in, p_k_out, p_a, h, start, end, i, scale, d, PRECISION)
            number += tl.num_programs(0)
        else:
            first += d.LOOK
            before = behind


@triton.jit
def _rows(
    p_q, p_k, p_g, p_q_in, p_k_out, p_a, h, chunk_start, end, i_sub, scale, d: tl.constexpr, PRECISION: tl.constexpr
):
    """q_in, k_out, and A against the sub-blocks up to its own, of the BC tokens of a sub-block, for any gates."""
    start = chunk_start + i_sub * d.BC
    at_a, inside_a = rows(h, start, end, d.H, d.BT, d.BC, d.BC)

    # Pairs within the sub-block, each with its own decay; BS columns of K at a time
    b_a = zeros(d.BC, d.BC)
    for i_s in tl.static_range(d.BK // d.BS):
        at, inside = rows(h, start, end, d.H, d.K, d.BC, d.BS, i_s)
        b_q = load(p_q, at, inside).to(tl.float32)  # [BC, BS]
        b_k = load(p_k, at, inside).to(tl.float32)
        b_a += tl.sum(b_q[:, None, :] * b_k[None, :, :] * pair_decays(load_gates(p_g, at, inside), d.BC), 2)
    b_a = tl.where(lower(d.BC, 0), b_a * scale, 0.0)
    tl.store(p_a + at_a + i_sub * d.BC, cast(b_a, p_a.dtype.element_ty), mask=inside_a)

    # Earlier sub-blocks, all complete, nearest first; b_between: the gates of the sub-blocks in between
    own, inside = rows(h, start, end, d.H, d.K, d.BC, d.BK)
    b_g = load_gates(p_g, own, inside)
    b_gates = sums_of(lower(d.BC, 0), b_g, PRECISION)  # [BC, BK]
    b_q = load(p_q, own, inside).to(tl.float32)
    b_qi = b_q * exp2(b_gates) * scale
    at, whole = rows(h, start - d.BC, end, d.H, d.K, d.BC, d.BK)
    b_between = zeros(d.BK)
    j = i_sub - 1
    while j >= 0:
        b_gj = load_gates(p_g, at, whole)
        b_kj = load(p_k, at, whole).to(tl.float32)
        b_kj *= exp2(sums_of(upper(d.BC, 1), b_gj, PRECISION) + b_between[None, :])
        b_aij = dot_split(b_qi, tl.trans(b_kj), zeros(d.BC, d.BC), PRECISION)
        tl.store(p_a + at_a + j * d.BC, cast(b_aij, p_a.dtype.element_ty), mask=inside_a)
        b_between += tl.sum(b_gj, 0)
        at -= d.BC * d.H * d.K
        j -= 1
    b_q *= exp2(b_gates + b_between[None, :])
    tl.store(p_q_in + own, cast(b_q, p_q_in.dtype.element_ty), mask=inside)

    # Queries do not see later sub-blocks, but keys decay over them to the end of the chunk
    b_after = sums_of(upper(d.BC, 1), b_g, PRECISION)
    i = i_sub + 1
    while i < d.BT // d.BC:
        tl.store(p_a + at_a + i * d.BC, zeros(d.BC, d.BC).to(p_a.dtype.element_ty), mask=inside_a)
        at, inside_i = rows(h, chunk_start + i * d.BC, end, d.H, d.K, d.BC, d.BK)
        b_after += tl.sum(load_gates(p_g, at, inside_i), 0)[None, :]
        i += 1
    b_k = load(p_k, own, inside).to(tl.float32) * exp2(b_after)
    tl.store(p_k_out + own, cast(b_k, p_k_out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["N"])
def strong_decay_grad_kernel(
    p_q,  # [tokens, H, K]
    p_k,  # [tokens, H, K]
    p_v,  # [tokens, H, V]
    p_g,  # [tokens, H, K], natural logarithms
    p_do,  # [tokens, H, V]
    p_chunks,  # int32 [NC, 2]
    p_strong,  # int32 [NC, H]
    p_da,  # [tokens, H, parts, BT], see load_da
    p_diagonal,  # float32 [tokens, H]
    p_states,  # [NC, H, K, V]
    p_dstates,  # [NC, H, K, V]
    p_passed,  # float32 [NC, H, PARTS, K]
    p_dq,  # [tokens, H, K]; out
    p_dk,  # [tokens, H, K]; out
    p_dg,  # [tokens, H, K]; out
    scale,  # float
    N,  # NC * H
    d: tl.constexpr,  # H K V BT BC BK BV BS LOOK PARTS
    PRECISION: tl.constexpr,
):
    """dq, dk, dg of the strong-decay chunks, by sub-blocks of BC tokens. Programs as in strong_decay_kernel."""
    number, first, before = _begin()
    while first < N:
        b_strong, behind = _flags(p_strong, first, before, N, d)
        if number < behind:
            n, h, start, end = _strong_chunk(p_chunks, b_strong, first, number - before, d)
            p = Pointers(p_q, p_k, p_v, p_g, p_do, p_da, p_diagonal, p_states, p_dstates, p_dq, p_dk, p_dg)
            for i_s in range(d.BK // d.BS):
                _grad_columns(p, p_passed, n, h, start, end, i_s, scale, d, PRECISION)
            number += tl.num_programs(0)
        else:
            first += d.LOOK
            before = behind


@triton.jit
def _grad_columns(p, p_passed, n, h, start, end, i_s, scale, d: tl.constexpr, PRECISION: tl.constexpr):
    """dq, dk, dg of one chunk, BS columns."""
    # From the last sub-block to the first: terms of dg from later tokens
    b_later = load_passed(p_passed, n, h, i_s * d.BS + tl.arange(0, d.BS), d)
    for i in range(d.BT // d.BC):
        i_sub = d.BT // d.BC - 1 - i
        b_later = _grad_rows(p, b_later, n, h, start, end, i_sub, i_s, scale, d, PRECISION)
    # From the first to the last: terms of dg from earlier tokens, through the state
    tl.debug_barrier()  # p.dg, for loads by other threads
    b_earlier = zeros(d.BS)
    for i in range(d.BT // d.BC):
        own, inside = rows(h, start + i * d.BC, end, d.H, d.K, d.BC, d.BS, i_s)
        b_k = load(p.k, own, inside).to(tl.float32)
        b_dk = _grad_from_state(p.v, p.g, p.dstates, n, h, start, end, i, i_s, d, PRECISION)
        b_dg = load(p.dg, own, inside).to(tl.float32) + b_earlier[None, :]
        b_dg += sums_of(lower(d.BC, 1), b_k * b_dk, PRECISION)
        tl.store(p.dg + own, cast(b_dg, p.dg.dtype.element_ty), mask=inside)
        b_earlier += tl.sum(b_k * b_dk, 0)


@triton.jit
def _grad_from_state(p_v, p_g, p_dstates, n, h, chunk_start, end, i_sub, i_s, d: tl.constexpr, PRECISION: tl.constexpr):
    """The term of D in dk, for the BC tokens of a sub-block: exp(gates after) * (v D^T) [BC, BS]."""
    start = chunk_start + i_sub * d.BC
    own, inside = rows(h, start, end, d.H, d.K, d.BC, d.BS, i_s)
    b_after = sums_of(upper(d.BC, 1), load_gates(p_g, own, inside), PRECISION)
    i = i_sub + 1
    while i < d.BT // d.BC:
        at, inside = rows(h, chunk_start + i * d.BC, end, d.H, d.K, d.BC, d.BS, i_s)
        b_after += tl.sum(load_gates(p_g, at, inside), 0)[None, :]
        i += 1
    return exp2(b_after) * from_states(p_v, p_dstates, n, h, start, end, i_s, d, PRECISION)


@triton.jit
def _grad_rows(p, b_later, n, h, chunk_start, end, i_sub, i_s, scale, d: tl.constexpr, PRECISION: tl.constexpr):
    """dq and dk of BC tokens (a sub-block) and BS columns, and the terms of dg from these and later tokens.

    b_later [BS]: the sum of q dq - k dk_pairs over the later sub-blocks. Returns it with this one.
    """
    start = chunk_start + i_sub * d.BC
    own, inside = rows(h, start, end, d.H, d.K, d.BC, d.BS, i_s)
    b_q = load(p.q, own, inside).to(tl.float32)  # [BC, BS]
    b_k = load(p.k, own, inside).to(tl.float32)
    b_g = load_gates(p.g, own, inside)

    # Pairs within the sub-block, each with its own decay
    b_pairs = pair_decays(b_g, d.BC) * _load_da(p.da, h, start, end, i_sub, d, PRECISION)[:, :, None]
    b_dq = tl.sum(b_pairs * b_k[None, :, :], 1)  # [BC, BS]
    b_dk = tl.sum(b_pairs * b_q[:, None, :], 0)

    # dq from earlier sub-blocks, all complete, nearest first, and from the state before them; b_between: the gates in
    # between
    b_far = zeros(d.BC, d.BS)
    b_between = zeros(d.BS)
    j = i_sub - 1
    while j >= 0:
        at, whole = rows(h, chunk_start + j * d.BC, end, d.H, d.K, d.BC, d.BS, i_s)
        b_gj = load_gates(p.g, at, whole)
        b_kj = exp2(sums_of(upper(d.BC, 1), b_gj, PRECISION) + b_between[None, :])
        b_kj *= load(p.k, at, whole).to(tl.float32)
        b_far = dot_split(_load_da(p.da, h, start, end, j, d, PRECISION), b_kj, b_far, PRECISION)
        b_between += tl.sum(b_gj, 0)
        j -= 1
    b_gates = sums_of(lower(d.BC, 0), b_g, PRECISION)
    b_state = from_states(p.do, p.states, n, h, start, end, i_s, d, PRECISION) * scale
    b_dq += b_far * exp2(b_gates) + b_state * exp2(b_gates + b_between[None, :])

    # dk from later sub-blocks
    b_far = zeros(d.BC, d.BS)
    b_between = zeros(d.BS)
    i = i_sub + 1
    while i < d.BT // d.BC:
        at, inside_i = rows(h, chunk_start + i * d.BC, end, d.H, d.K, d.BC, d.BS, i_s)
        b_gi = load_gates(p.g, at, inside_i)
        b_qi = exp2(sums_of(lower(d.BC, 0), b_gi, PRECISION) + b_between[None, :])
        b_qi *= load(p.q, at, inside_i).to(tl.float32)
        b_da = _load_da(p.da, h, chunk_start + i * d.BC, end, i_sub, d, PRECISION)
        b_far = dot_split(tl.trans(b_da), b_qi, b_far, PRECISION)
        b_between += tl.sum(b_gi, 0)
        i += 1
    b_dk += b_far * exp2(sums_of(upper(d.BC, 1), b_g, PRECISION))
    b_dg = b_q * b_dq - b_k * b_dk
    tl.store(
        p.dg + own,
        cast(sums_of(upper(d.BC, 0), b_dg, PRECISION) + b_later[None, :], p.dg.dtype.element_ty),
        mask=inside,
    )

    b_dk += _grad_from_state(p.v, p.g, p.dstates, n, h, chunk_start, end, i_sub, i_s, d, PRECISION)
    t = start + tl.arange(0, d.BC)
    b_diagonal = tl.load(p.diagonal + t.to(tl.int64) * d.H + h, mask=t < end, other=0.0)[:, None]
    tl.store(p.dq + own, cast(b_dq + b_diagonal * b_k, p.dq.dtype.element_ty), mask=inside)
    tl.store(p.dk + own, cast(b_dk + b_diagonal * b_q, p.dk.dtype.element_ty), mask=inside)
    return b_later + tl.sum(b_dg, 0)


@triton.jit
def _load_da(p_da, h, t, end, i_s, d: tl.constexpr, PRECISION: tl.constexpr):
    """load_da in float32."""
    b_high, b_low = load_da(p_da, h, t, end, i_s, d.H, d.BT, d.BC, PRECISION)
    if PRECISION == "bf16":
        return b_high.to(tl.float32) + b_low.to(tl.float32)
    else:
        return b_high
