"""The chunked form of the delta rules in torch, forward and backward, as shmem_kernels/kda_fwd.py computes it.

With G_t the sum of a chunk's gates up to token t, G the sum of all, S the chunk's incoming state:

    Aqk[t, s] = scale sum_c q_t k_s e^(G_t - G_s), s <= t       Akk[t, s] = beta_t sum_c k_t k_s e^(G_t - G_s), s < t
    T = (1 + Akk)^-1      w = T (beta k e^G)      u = T (beta v)      kg = k e^(G - G_t)      qg = q e^G
    v_new = u - w S       o = scale qg S + Aqk v_new       S' = e^G S + kg^T v_new

Backward, with dS' the gradient of the chunk's outgoing state:

    dv_new = Aqk^T do + kg dS'        dS = e^G dS' + scale qg^T do - w^T dv_new
    r = T^T dv_new, the gradient of the right side of (1 + Akk) v_new = beta v - beta k e^G S
    dAqk = do v_new^T, s <= t         dAkk = -r v_new^T, s < t         dv = beta r
    dbeta = v . r - (k e^G) . r S^T + k . X,      X_t = sum_s dAkk[t, s] k_s e^(G_t - G_s)
    dq   = scale e^G do S^T  +  scale sum_s dAqk[t, s] k_s e^(G_t - G_s)
    dk'  = beta (X - e^G r S^T)                                                        as the later token
    dk'' = e^(G - G_t) v_new dS'^T + sum_t (scale dAqk[t, s] q_t + dAkk[t, s] beta_t k_t) e^(G_t - G_s)  as the earlier
    dk = dk' + dk''        dG_t = q . dq + k . dk' - k . dk'', both without s = t, which cancels up to rounding
    dG at the last token also + sum_t k_t . e^(G - G_t) v_new dS'^T + e^G <S, dS'>_row;  dg = the sum of dG from t on

Decays between two tokens. For a product of matrices e^(G_t - G_s) must be (a factor of t) x (a factor of s). The tokens
of a chunk are divided into stretches. The first begins with the chunk. A new one begins with each token t at which the
sum of any channel's gates since the start of the stretch is below -LIMIT, or any gate below -WEAK, since a sum with it
would leave few digits to those after it; only gates up to t count, so that nothing depends on later tokens. The anchor
A of a stretch is the end of its first token (of the first stretch: the beginning of the chunk). Tokens t of the stretch
have the factor e^(G_t - G_A), at most 1; tokens s of it and before it e^(G_A - G_s), at most e^LIMIT in relevant pairs.
Tokens beyond 4 stretches, the rest, are paired by halves: of 2n tokens, n = 32 .. 1, the later n have e^(sum from the
middle on), the earlier n e^(sum to the middle), both at most 1; and each token is paired with itself.

A sum contains the gates between two tokens only. -inf is replaced by -128 ln 2, whose e is 0 in float32. So the result
is exact for every gate, except that kernels treat factors below 2^-71, in strong chunks 2^-46, as 0. LIMIT = 160 ln 2
makes 3 stretches of 64 gates of -5.

Error analysis, bfloat16: q, k times their factors are rounded to TF32, for gradients to 16 bits: 2^-12, 2^-17 of each
term, for any gates; pairs of gradients to bfloat16: 2^-9. T - 1 is stored, and T x computed as x + (T - 1) x: T's
diagonal is 1. A gate has 16 bits (two bfloat16 parts), the same in all sums: an error of 2^-17 G in a decay, much less
than the decay's rounding where the decay is relevant. Sums are float32. Scores use TF32. T is also computed by halves:
with X the inverses of diagonal blocks of n and A' the part of Akk between the blocks of a pair, X - X A' X; forward
substitution by blocks. Its TF32 products, with rounded operands, add 2^-11 of |X| |A'| |X| each, before T - 1 is
rounded to 2^-9. u, kg, qg, v_new are rounded once, w twice in forward; in gdn.py, beta (v - k e^G S), v_new,
r, and the latter two times their factors. dG uses the rounded operands: a pair's term in dG_t equals its negative term
in dG_s, so that they cancel in the gates after t. For strong gates kg's term of dg is a sum over earlier tokens, not a
difference.
"""

from __future__ import annotations

import torch

LN_2 = 0.6931471805599453
LIMIT = 160.0  # to base 2
WEAK = 124.0  # a chunk is weak if no channel's gates sum up to less than minus this
LEAST = -128.0  # replaces gates below it


def halves(n, C, like):
    """Return (the gates in each token's sum to the middle [C, C], the pairs across two halves [C, C])."""
    t, u = torch.arange(C, device=like.device)[:, None], torch.arange(C, device=like.device)[None]
    middle = t // (2 * n) * (2 * n) + n
    where = (u > middle) & (u <= t) | (u > t) & (u <= middle)
    return where.to(like.dtype), (t >= middle) & (u < middle) & (u >= middle - n)


def exp2(x):
    return torch.where(x < -126, 0.0, torch.exp2(x))


def levels(g):
    """Return (factor of the later token, of the earlier one [.., C, K], their pairs [C, C]) of each stretch, and of
    halves of the rest; g to base 2, [.., C, K]."""
    C = g.shape[-2]
    ones = torch.ones(C, C, dtype=g.dtype, device=g.device)
    t = torch.arange(C, device=g.device)[:, None]
    first, anchor = (torch.full((*g.shape[:-2], 1, 1), x, device=g.device) for x in (0, -1))
    for _ in range(4):
        sums = ones.tril() @ (g * (t > anchor))
        steep = (sums < -LIMIT) | (g < -WEAK) & (t > anchor)
        beyond = torch.where(steep, t, C).amin((-2, -1), keepdim=True)
        column = ones.triu(1) @ (g * (t <= anchor)) - sums
        yield sums.exp2() * ((t >= first) & (t < beyond)), column.clamp(max=LIMIT).exp2(), ones.tril() > 0
        first = anchor = beyond
    rest = t >= first
    if rest.any():
        for n in (32, 16, 8, 4, 2, 1):
            where, pairs = halves(n, C, g)
            factor = exp2(where @ g)
            yield factor * rest, factor, pairs
        yield rest.to(g.dtype), torch.ones_like(g), torch.eye(C, device=g.device) > 0


def inverse(a):
    """Return the inverse of 1 + a; a [.., C, C] is strictly lower triangular."""
    C = a.shape[-1]
    x = torch.eye(C, dtype=a.dtype, device=a.device).expand_as(a)
    n = 1
    while n < C:
        x = x - x @ (a * halves(n, C, a)[1]) @ x
        n *= 2
    return x


class Chunk:
    """q, k, g [H, C, K], v [H, C, V], beta [H, C]; g: natural logarithms."""

    def __init__(self, q, k, v, g, beta, scale):
        self.q, self.k, self.v, self.beta, self.scale = q, k, v, beta[..., None], scale
        self.g = (g / LN_2).clamp(min=LEAST)
        C = q.shape[-2]
        later = torch.ones(C, C, dtype=g.dtype, device=g.device)
        self.before, self.after = exp2(later.tril() @ self.g), exp2(later.triu(1) @ self.g)
        self.decay = exp2(self.g.sum(-2))[..., None]
        scores = solved = 0.0
        for row, column, pairs in levels(self.g):
            scores = scores + torch.where(pairs, (q * row) @ (k * column).mT, 0.0)
            solved = solved + torch.where(pairs, (k * row) @ (k * column).mT, 0.0)
        self.scores, self.solved = scale * scores, inverse(self.beta * solved.tril(-1))
        self.w, self.u = self.solved @ (self.beta * k * self.before), self.solved @ (self.beta * v)
        self.kg, self.qg = k * self.after, q * self.before

    def forward(self, state):
        """Return (o, the outgoing state)."""
        self.state = state
        self.v_new = self.u - self.w @ state
        return self.scale * self.qg @ state + self.scores @ self.v_new, self.decay * state + self.kg.mT @ self.v_new

    def backward(self, do, dstate):
        """Return (dq, dk, dv, dg, dbeta, the gradient of the incoming state)."""
        q, k, scale = self.q, self.k, self.scale
        dv_new = self.scores.mT @ do + self.kg @ dstate
        dentering = self.decay * dstate + scale * self.qg.mT @ do - self.w.mT @ dv_new
        dvb = self.solved.mT @ dv_new
        dscores, dinverse, dkb = (do @ self.v_new.mT).tril(), (-dvb @ self.v_new.mT).tril(-1), -dvb @ self.state.mT
        dq, x, dcolumn = scale * self.before * (do @ self.state.mT), 0.0, self.after * (self.v_new @ dstate.mT)
        last = (k * dcolumn).sum(-2) + self.decay[..., 0] * (self.state * dstate).sum(-1)
        for row, column, pairs in levels(self.g):
            a, b = (torch.where(pairs, x, 0.0).tril(-1) for x in (scale * dscores, dinverse))
            dq = dq + row * (a @ (k * column))
            x = x + row * (b @ (k * column))
            dcolumn = dcolumn + column * (a.mT @ (q * row) + b.mT @ (self.beta * k * row))
        dbeta = (self.v * dvb).sum(-1) + (k * (self.before * dkb + x)).sum(-1)
        drow = self.beta * (self.before * dkb + x)
        dsums = q * dq + k * drow - k * dcolumn
        dsums[..., -1, :] += last
        dg = dsums.flip(-2).cumsum(-2).flip(-2)
        same = scale * dscores.diagonal(dim1=-2, dim2=-1)[..., None]
        dq, dcolumn = dq + same * k, dcolumn + same * q
        return dq, drow + dcolumn, self.beta * dvb, dg, dbeta, dentering


def chunked(q, k, v, g, beta, do, initial, dfinal, scale, size=64):
    """Return (o, final state, dq, dk, dv, dg, dbeta, dinitial) of one sequence: q, k [T, H, K], v, do [T, HV, V], g
    [T, HV, K] or [T, HV], beta [T, HV], states [HV, K, V]."""
    T, H, HV = q.shape[0], q.shape[1], v.shape[1]
    scalar = g.ndim == 2
    wide = g[..., None].expand(T, HV, q.shape[2]) if scalar else g
    q, k = (x.repeat_interleave(HV // H, 1) for x in (q, k))
    parts = [x.movedim(1, 0) for x in (q, k, v, wide, beta)]
    chunks, o, state = [], [], initial
    for a in range(0, T, size):
        chunks.append(Chunk(*(x[:, a : a + size] for x in parts), scale))
        out, state = chunks[-1].forward(state)
        o.append(out)
    grads, dstate = [], dfinal
    for i, a in reversed([*enumerate(range(0, T, size))]):
        *found, dstate = chunks[i].backward(do[a : a + size].movedim(1, 0), dstate)
        grads.insert(0, found)
    dq, dk, dv, dg, dbeta = (torch.cat(x, 1).movedim(0, 1) for x in zip(*grads, strict=True))
    dq, dk = (x.unflatten(1, (H, -1)).sum(2) for x in (dq, dk))
    return torch.cat(o, 1).movedim(0, 1), state, dq, dk, dv, dg.sum(-1) if scalar else dg, dbeta, dstate
