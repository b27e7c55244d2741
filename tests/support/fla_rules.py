"""fla's operators with a ``cp_context``, and their law in float64: each is a special case of the DPLR recurrence."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F


def dplr_reference(q, k, v, a, b, g, scale=None, initial_state=None, cu_seqlens=None):
    """Token by token: S_t = diag(exp(g_t)) S_{t-1} + b_t (a_t S_{t-1}) + k_t v_t, o_t = scale * q_t S_t, in float64.

    q, k, a, b, g: [B, T, H, K]; v: [B, T, H, V]; states [B or N, H, K, V]. Returns (o, final state).
    """
    if cu_seqlens is not None:
        starts = [None] * (len(cu_seqlens) - 1) if initial_state is None else initial_state.split(1)
        found = [
            dplr_reference(*(x[:, first:end] for x in (q, k, v, a, b, g)), scale, start)
            for (first, end), start in zip(pairwise(map(int, cu_seqlens)), starts, strict=True)
        ]
        o, states = zip(*found, strict=True)
        return torch.cat(o, 1), torch.cat(states)
    q, k, v, a, b, g = (x.double() for x in (q, k, v, a, b, g))
    state = q.new_zeros(q.shape[0], *q.shape[2:], v.shape[3]) if initial_state is None else initial_state.double()
    scale, outputs = q.shape[-1] ** -0.5 if scale is None else scale, []
    for t in range(q.shape[1]):
        read = torch.einsum("bhk,bhkv->bhv", a[:, t], state)
        state = g[:, t].exp()[..., None] * state
        for column, row in ((b[:, t], read), (k[:, t], v[:, t])):
            state = state + column[..., None] * row[..., None, :]
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, 1) if outputs else v, state


class Rule(NamedTuple):
    """An operator of fla. ``names``: its tensors in order; ``law``: their DPLR inputs (q, k, v, a, b, g)."""

    names: tuple[str, ...]
    operator: Callable[..., Any]
    law: Callable[..., tuple]
    times: int = 1  # tokens of the recurrence for each token of q and g
    rejected: bool = False  # whether fla rejects the backward on Hopper with Triton before 3.7.1

    def draw(self, T: int, H: int, K: int, device: Any, narrow: torch.dtype) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)

        def normal(times: int, *shape: int) -> torch.Tensor:
            return torch.randn(1, T * times, H, *shape, generator=generator)

        n = self.times
        slow = 3 / T  # a state decays to a tenth or so over a rank's tokens
        kk = F.normalize(normal(1, K), dim=-1)
        drawn = dict(
            q=normal(1, K),
            k=F.normalize(normal(n, K), dim=-1),
            v=normal(n, K),
            gk=F.logsigmoid(normal(1, K)) * slow,
            g=F.logsigmoid(normal(1)) * slow,
            w=-0.6065 * (normal(1, K) - 2).sigmoid() * slow,
            beta=normal(n).sigmoid(),
            a=-kk,
            b=kk * normal(1, K).sigmoid(),
            erase=normal(1, K).sigmoid(),
            write=normal(1, K).sigmoid(),
        )
        wide = "g", "gk", "w"
        return [drawn[name].to(device, torch.float32 if name in wide else narrow) for name in self.names]

    def reference(self, given: Any, cu_seqlens: list[int]) -> torch.Tensor:
        o, _ = dplr_reference(*self.law(*given), cu_seqlens=[self.times * x for x in cu_seqlens])
        return o[:, self.times - 1 :: self.times]


def _delta(q: Any, k: Any, v: Any, g: Any, erase: Any, write: Any) -> tuple:
    """The delta rule S = D S - k (erase * k) D S + k (write * v), with D = diag(exp(g))."""
    g = g.expand_as(k)
    return q, k, write * v, g.exp() * erase * k, -k, g


def _expanded(x: torch.Tensor, times: int, place: int) -> torch.Tensor:
    """x at one of ``times`` tokens for each, and zeros at the others."""
    return F.pad(x[:, :, None], (0, 0, 0, 0, place, times - 1 - place)).flatten(1, 2)


def rules() -> dict[str, Rule]:
    from fla.ops.gated_delta_product import chunk_gated_delta_product
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.gdn2 import chunk_gdn2
    from fla.ops.generalized_delta_rule import chunk_dplr_delta_rule
    from fla.ops.kda import chunk_kda
    from fla.ops.rwkv7 import chunk_rwkv7

    def kda(q, k, v, g, beta):
        return _delta(q, k, v, g, beta[..., None], beta[..., None])

    def gated(q, k, v, g, beta):
        return kda(q, k, v, g[..., None], beta)

    def product(q, k, v, g, beta):
        return kda(_expanded(q, 2, 1), k, v, _expanded(g[..., None], 2, 0), beta)

    def rwkv7(r, w, k, v, a, b):
        return r / r.shape[-1] ** -0.5, k, v, a, b, w

    # as in fla's RWKV-7 layer; the interpreter does not run the kernels for other gates
    safe = dict(safe_gate=True, chunk_size=64)

    def dplr_operator(*x, **options):
        return chunk_dplr_delta_rule(*x, **safe, **options)

    def rwkv7_operator(*x, **options):
        return chunk_rwkv7(*x, scale=1.0, lower_bound=-0.6065306597126334, **safe, **options)

    def product_operator(*x, **options):
        return chunk_gated_delta_product(*x, num_householder=2, **options)

    return {
        "KDA": Rule(("q", "k", "v", "gk", "beta"), chunk_kda, kda),
        "Gated DeltaNet": Rule(("q", "k", "v", "g", "beta"), chunk_gated_delta_rule, gated, rejected=True),
        "Gated DeltaNet 2": Rule(("q", "k", "v", "gk", "erase", "write"), chunk_gdn2, _delta),
        "gated delta product": Rule(("q", "k", "v", "g", "beta"), product_operator, product, 2, rejected=True),
        "DPLR": Rule(("q", "k", "v", "a", "b", "w"), dplr_operator, lambda *x: x),
        "RWKV-7": Rule(("q", "w", "k", "v", "a", "b"), rwkv7_operator, rwkv7),
    }
