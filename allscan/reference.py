"""What the operators mean, in float64 and in rank order, in one process. Slow, differentiable, for tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def allscan_reference(
    states: Sequence[Tensor], decays: Sequence | None = None, initial_state: Tensor | None = None,
    reverse: bool = False, transitions: Sequence[Tensor] | None = None,
) -> list[Tensor]:  # fmt: skip
    """R_0 = initial, R_{p+1} = decay_p * R_p + state_p; where decay is 0 nothing passes. Returns [R_0, ..., R_{P-1}].

    states: list of [..., K, V], one a rank. decays: list of [..., K], [...] or numbers, or None. transitions: list of
    [..., K, K] in their place.
    """
    order = range(len(states))
    if reverse:
        order = order[::-1]
    carry = torch.zeros_like(states[0], dtype=torch.float64) if initial_state is None else initial_state.double()
    prevs: list = [None] * len(states)
    for p in order:
        prevs[p] = carry
        state = states[p].double()
        if transitions is not None:
            carry = transitions[p].double() @ carry + state
            continue
        if decays is None:
            carry = carry + state
            continue
        decay = torch.as_tensor(decays[p], dtype=torch.float64, device=state.device)
        if decay.ndim:
            decay = decay[(...,) + (None,) * (state.ndim - decay.ndim)]
        passed = torch.where((decay == 0) & ~carry.isfinite(), 0.0, carry)
        carry = decay * passed + state
    return prevs


def gla_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gated linear attention token by token: S_t = diag(exp(g_t)) S_{t-1} + k_t^T v_t,  o_t = scale * q_t S_t.

    q, k, g: [B, T, H, K]; v: [B, T, H, V]; initial_state: [B or N, H, K, V] or None; cu_seqlens: N + 1 boundaries of
    packed sequences (B = 1) or None. Returns (o, final_state [B or N, H, K, V]), float64.
    """
    if cu_seqlens is not None:
        cuts = [int(cut) for cut in cu_seqlens]
        initial = [None] * (len(cuts) - 1) if initial_state is None else initial_state.split(1)
        parts = [
            gla_reference(q[:, a:b], k[:, a:b], v[:, a:b], g[:, a:b], scale, first)
            for a, b, first in zip(cuts, cuts[1:], initial)
        ]
        o, final_state = zip(*parts)
        return torch.cat(o, 1), torch.cat(final_state)
    q, k, v, g = (x.double() for x in (q, k, v, g))
    batch, length, heads, width = q.shape
    scale = width**-0.5 if scale is None else scale
    state = q.new_zeros(batch, heads, width, v.shape[-1]) if initial_state is None else initial_state.double()
    outputs = []
    for t in range(length):
        state = g[:, t].exp()[..., None] * state + k[:, t][..., None] * v[:, t][..., None, :]
        outputs.append(scale * (q[:, t][..., None] * state).sum(-2))
    return torch.stack(outputs, 1) if outputs else v, state


def delta_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, cu_seqlens: Tensor | Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Delta rules token by token: S = diag(exp(g_t)) S_{t-1}, S_t = S + beta_t k_t^T (v_t - k_t S),
    o_t = scale * q_t S_t.

    q, k: [B, T, H, K]; v: [B, T, HV, V]; g: [B, T, HV, K] (KDA) or [B, T, HV] (Gated DeltaNet); beta: [B, T, HV];
    initial_state: [B or N, HV, K, V] or None; cu_seqlens: N + 1 boundaries of packed sequences (B = 1) or None.
    Returns (o, final_state [B or N, HV, K, V]), float64.
    """
    if cu_seqlens is not None:
        cuts = [int(cut) for cut in cu_seqlens]
        initial = [None] * (len(cuts) - 1) if initial_state is None else initial_state.split(1)
        parts = [
            delta_reference(q[:, a:b], k[:, a:b], v[:, a:b], g[:, a:b], beta[:, a:b], scale, first)
            for a, b, first in zip(cuts, cuts[1:], initial)
        ]
        o, final_state = zip(*parts)
        return torch.cat(o, 1), torch.cat(final_state)
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    heads = v.shape[2]
    q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    state = q.new_zeros(q.shape[0], heads, q.shape[3], v.shape[3]) if initial_state is None else initial_state.double()
    outputs = []
    for t in range(q.shape[1]):
        decay = g[:, t].exp()
        state = (decay[..., None] if g.ndim == 4 else decay[..., None, None]) * state
        error = v[:, t] - (k[:, t][..., None] * state).sum(-2)
        state = state + (beta[:, t][..., None] * k[:, t])[..., None] * error[..., None, :]
        outputs.append(scale * (q[:, t][..., None] * state).sum(-2))
    return torch.stack(outputs, 1) if outputs else v, state
