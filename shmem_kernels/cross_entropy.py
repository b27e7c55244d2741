"""Cross entropy of a slice of tokens, with the gradient of the logits in their own memory."""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import cast


@triton.jit
def cross_entropy_kernel(
    p_logits,  # [n, V]; with GRAD the gradient of the sum of all losses * p_factor afterwards
    p_labels,  # int64 [n]
    p_loss,  # float32 [n], written
    p_factor,  # float32 [1]
    ignored,  # the label of tokens without a loss
    scale,  # of the logits
    smoothing,
    z_loss,
    V: tl.constexpr,
    GRAD: tl.constexpr,
    BV: tl.constexpr,
):
    """loss = lse - (1 - smoothing) x[label] - smoothing mean(x) + z_loss lse^2, x = scale * logits, lse = logsumexp(x),
    in float32; 0 for an ignored label; NaN, and so is the gradient, for a label outside of 0 to V - 1. A program for
    each token."""
    token = tl.program_id(0).to(tl.int64)
    p_logits += token * V
    label = tl.load(p_labels + token)
    counted, known = label != ignored, (label >= 0) & (label < V)
    b_target = tl.load(p_logits + label, mask=known, other=float("nan")).to(tl.float32) * scale
    largest, total, every = -3e38, 0.0, 0.0  # finite: a block of V may have logits of -inf only
    for first in range(0, V, BV):
        v = first + tl.arange(0, BV)
        b_x = tl.load(p_logits + v, mask=v < V, other=float("-inf")).to(tl.float32) * scale
        every += tl.sum(tl.where(v < V, b_x, 0.0))
        larger = tl.maximum(largest, tl.max(b_x))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(b_x - larger))
        largest = larger
    lse = largest + tl.log(total)
    smoothed = tl.where(smoothing > 0, smoothing * every / V, 0.0)
    loss = lse - (1 - smoothing) * b_target - smoothed + z_loss * lse * lse
    tl.store(p_loss + token, tl.where(counted, loss, 0.0))
    if GRAD:
        factor = tl.where(known, tl.load(p_factor) * scale, float("nan"))
        slope = 1 + 2 * z_loss * lse
        tl.debug_barrier()  # every warp has loaded the label's logit, which one of them overwrites
        for first in range(0, V, BV):
            v = first + tl.arange(0, BV)
            b_x = tl.load(p_logits + v, mask=v < V, other=0.0).to(tl.float32) * scale
            b_dx = tl.exp(b_x - lse) * slope - smoothing / V - tl.where(v == label, 1 - smoothing, 0.0)
            b_dx = tl.where(counted, b_dx * factor, 0.0)
            tl.store(p_logits + v, cast(b_dx, p_logits.dtype.element_ty), mask=v < V)
