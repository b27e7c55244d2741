"""Reference operators for tests: float64, in rank order, in one process. Slow, differentiable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor


def allscan_reference(
    states: Sequence[Tensor],
    decays: Sequence | None = None,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    transitions: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """R_0 = initial, R_{p+1} = decay_p * R_p + state_p. A decay of 0 discards R_p, even Inf or NaN.

    Args:
        states: list of [..., K, V], one per rank.
        decays: list of [..., K], [...] or numbers, or None.
        initial_state: [..., K, V], or None (0).
        reverse: whether to scan from the last rank to the first.
        transitions: list of [..., K, K], instead of decays.

    Returns:
        [R_0, ..., R_{P-1}], float64.

    Raises:
        IndexError: if states, decays and transitions are not of the same ranks.
        RuntimeError: torch's, for shapes that do not go together.

    Example:
        >>> allscan_reference([torch.ones(2, 2), torch.ones(2, 2)], decays=[0.5, 0.5])[1]     # rank 0's state
        tensor([[1., 1.],
                [1., 1.]], dtype=torch.float64)
    """
    order = range(len(states))
    if reverse:
        order = order[::-1]
    carry = torch.zeros_like(states[0], dtype=torch.float64) if initial_state is None else initial_state.double()
    prevs: list = [None] * len(states)
    for p in order:
        prevs[p] = carry
        decay, transition = (None if x is None else x[p] for x in (decays, transitions))
        carry = _next(carry, states[p], decay, transition)
    return prevs


def _next(carry: Tensor, state: Tensor, decay: object, transition: Tensor | None) -> Tensor:
    """decay * carry + state, or transition @ carry + state."""
    state = state.double()
    if transition is not None:
        return transition.double() @ carry + state
    if decay is None:
        return carry + state
    factor = torch.as_tensor(decay, dtype=torch.float64, device=state.device)
    if factor.ndim:
        factor = factor[(...,) + (None,) * (state.ndim - factor.ndim)]
    return factor * torch.where((factor == 0) & ~carry.isfinite(), 0.0, carry) + state


def allscan_segments_reference(
    states: Sequence[Tensor],
    decays: Sequence | None = None,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    transitions: Sequence[Tensor] | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """R' = decay_s * R + state_s over the segments of all ranks. A decay of 0 discards R, even Inf or NaN.

    Args:
        states: list of [n, ..., K, V], one per rank; n may differ between ranks, and may be 0.
        decays: list of [n, ..., K], [n, ...] or numbers, or None.
        initial_state: [..., K, V], or None (0).
        reverse: whether to scan from the last rank's last segment to the first rank's first.
        transitions: list of [n, ..., K, K], instead of decays.

    Returns:
        (incoming, outgoing): lists of [n, ..., K, V] and [..., K, V], float64, one entry per rank: the incoming state
        of each segment, and the outgoing state of the rank.

    Raises:
        IndexError: if states, decays and transitions are not of the same ranks.
        RuntimeError: torch's, for shapes that do not go together.

    Example:
        >>> incoming, outgoing = allscan_segments_reference([torch.ones(2, 1, 1), torch.ones(1, 1, 1)])
        >>> incoming[1].flatten(), outgoing[1].flatten()                          # of rank 1, which has one segment
        (tensor([2.], dtype=torch.float64), tensor([3.], dtype=torch.float64))
    """
    step = -1 if reverse else 1
    carry = states[0].new_zeros(states[0].shape[1:]) if initial_state is None else initial_state
    carry = carry.double()
    incoming: list = [None] * len(states)
    outgoing: list = [None] * len(states)
    for p in range(len(states))[::step]:
        found = [carry.new_empty(0, *carry.shape)]
        for s in range(len(states[p]))[::step]:
            found.append(carry[None])
            decay, transition = (None if x is None else x[p] for x in (decays, transitions))
            decay = decay[s] if isinstance(decay, Tensor) else decay
            carry = _next(carry, states[p][s], decay, None if transition is None else transition[s])
        incoming[p], outgoing[p] = torch.cat(found[:1] + found[1:][::step]), carry
    return incoming, outgoing


def _of_each(
    reference: Callable[..., tuple[Tensor, Tensor]],
    cu_seqlens: Tensor | Sequence[int],
    states: Tensor | None,
    **tensors: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The results of ``reference`` for packed sequences, one after the other. states: initial ones."""
    cuts = [int(cut) for cut in cu_seqlens]
    initial = [None] * (len(cuts) - 1) if states is None else states.split(1)
    outputs, final = [], []
    for a, b, state in zip(cuts, cuts[1:], initial):
        given = {name: x if x is None else x[:, a:b] for name, x in tensors.items()}
        o, last = reference(**given, initial_state=state)
        outputs.append(o)
        final.append(last)
    return torch.cat(outputs, 1), torch.cat(final)


def gla_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Gated linear attention token by token: S_t = diag(exp(g_t)) S_{t-1} + k_t^T v_t,  o_t = scale * q_t S_t.

    Args:
        q, k, g: [B, T, H, K].
        v: [B, T, H, V].
        scale: default K ** -0.5.
        initial_state: [B or N, H, K, V] or None.
        cu_seqlens: N + 1 boundaries of packed sequences (B = 1) or None.

    Returns:
        (o, final_state [B or N, H, K, V]), float64.

    Raises:
        RuntimeError: torch's, for shapes that do not go together.

    Example:
        >>> q, k, v, g = (torch.randn(1, 8, 2, 16) for _ in range(4))
        >>> o, final_state = gla_reference(q, k, v, torch.nn.functional.logsigmoid(g))

    Source:
        Gated linear attention (Yang et al., arXiv 2312.06635), its recurrent form.
    """
    if cu_seqlens is not None:
        return _of_each(partial(gla_reference, scale=scale), cu_seqlens, initial_state, q=q, k=k, v=v, g=g)
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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Delta rules token by token: S = diag(exp(g_t)) S_{t-1}, S_t = S + beta_t k_t^T (v_t - k_t S),
    o_t = scale * q_t S_t.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V].
        g: [B, T, HV, K] (KDA) or [B, T, HV] (Gated DeltaNet).
        beta: [B, T, HV].
        scale: default K ** -0.5.
        initial_state: [B or N, HV, K, V] or None.
        cu_seqlens: N + 1 boundaries of packed sequences (B = 1) or None.

    Returns:
        (o, final_state [B or N, HV, K, V]), float64.

    Raises:
        RuntimeError: torch's, for shapes that do not go together.

    Example:
        >>> q, k, v, g = (torch.randn(1, 8, 2, 16) for _ in range(4))
        >>> k, beta = torch.nn.functional.normalize(k, dim=-1), torch.rand(1, 8, 2)
        >>> o, final_state = delta_reference(q, k, v, torch.nn.functional.logsigmoid(g), beta)

    Source:
        Gated DeltaNet (arXiv 2412.06464) and Kimi Delta Attention (arXiv 2510.26692), their recurrent forms.
    """
    if cu_seqlens is not None:
        return _of_each(partial(delta_reference, scale=scale), cu_seqlens, initial_state, q=q, k=k, v=v, g=g, beta=beta)
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


def ssd_reference(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_states: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Mamba2's scan token by token: S_t = exp(d_t A) S_{t-1} + d_t x_t^T B_t, y_t = S_t C_t + D x_t, times silu(z_t).

    Args:
        x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, initial_states, cu_seqlens: see ``allscan.zeco_ssd``. d_t
            is the clamped softplus of dt + dt_bias.

    Returns:
        (y [B, T, H, P], final_states [B or number of sequences, H, P, N]), float64.

    Raises:
        RuntimeError: torch's, for shapes that do not go together.

    Example:
        >>> x, dt, A = torch.randn(1, 8, 2, 4), torch.rand(1, 8, 2), -torch.rand(2)
        >>> B, C = torch.randn(2, 1, 8, 1, 16)
        >>> y, final_states = ssd_reference(x, dt, A, B, C)

    Source:
        Mamba2 (Dao and Gu, arXiv 2405.21060), its recurrent form.
    """
    if cu_seqlens is not None:

        def of_one(initial_state: Tensor | None, **tensors: Any) -> tuple[Tensor, Tensor]:
            how: dict[str, Any] = dict(A=A, D=D, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit)
            return ssd_reference(**tensors, **how, initial_states=initial_state)

        return _of_each(of_one, cu_seqlens, initial_states, x=x, dt=dt, B=B, C=C, z=z)
    x, d, A, B, C = (t.double() for t in (x, dt, A, B, C))
    d = d if dt_bias is None else d + dt_bias.double()
    d = (torch.nn.functional.softplus(d) if dt_softplus else d).clamp(*dt_limit)
    B, C = (t.repeat_interleave(x.shape[2] // t.shape[2], 2) for t in (B, C))
    state = x.new_zeros(*x.shape[::2], x.shape[3], B.shape[3]) if initial_states is None else initial_states.double()
    decay, inputs, reads = (d * A).exp(), d[..., None] * x, []
    for t in range(x.shape[1]):
        state = decay[:, t, :, None, None] * state + inputs[:, t, :, :, None] * B[:, t, :, None]
        reads.append((state * C[:, t, :, None]).sum(-1))
    y = torch.stack(reads, 1) if reads else x
    if D is not None:
        y = y + x * (D.double() if D.ndim == 2 else D.double()[:, None])
    return y if z is None else y * torch.nn.functional.silu(z.double()), state
