"""Keys and values of multi-head latent attention (MLA), from latents, with fewer copies than in transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..bindings.torch_compat import without_dispatch_modes


def expansion_of(module: Any) -> Callable[..., Any]:
    """Return the function that computes keys and values from a softmax layer's latents: ``expand``, or the layer's own
    ``expand_kv`` if that one computes something else."""
    own: Callable[..., Any] = module.expand_kv
    layer: Any = type(module)
    if getattr(own, "__func__", None) is layer.expand_kv and _computes_the_same(layer.expand_kv):
        return functools.partial(expand, module)
    return own


def expand(module: Any, latents: Tensor, rope_keys: Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys [B, H, T, D + R] and values [B, H, T, V], with tokens before heads in memory.

    latents [B, 1, T, rank]; rope_keys [B, 1, T, R]: the last R columns of the keys of all heads. The layer's
    ``kv_b_proj`` computes D columns of keys and V of values for each head.
    """
    batch, _, tokens, _ = latents.shape
    width = module.qk_nope_head_dim + module.v_head_dim
    projected = module.kv_b_proj(latents).view(batch, tokens, -1, width)
    return _KeysAndValues.apply(projected, rope_keys, module.qk_nope_head_dim)


class _KeysAndValues(torch.autograd.Function):
    """projected [B, T, H, D + V], rope keys [B, 1, T, R] -> keys, a copy, and values, a view."""

    @staticmethod
    def forward(ctx: Any, projected: Tensor, rope_keys: Tensor, D: int) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.D, ctx.dtype = D, rope_keys.dtype
        keys = projected.new_empty(*projected.shape[:3], D + rope_keys.shape[-1])
        keys[..., :D] = projected[..., :D]
        keys[..., D:] = rope_keys.transpose(1, 2)
        return keys.transpose(1, 2), projected[..., D:].transpose(1, 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        B, H, T, V = dv.shape
        d_projected = dv.new_empty(B, T, H, ctx.D + V)
        d_projected[..., : ctx.D] = dk[..., : ctx.D].transpose(1, 2)
        d_projected[..., ctx.D :] = dv.transpose(1, 2)
        return d_projected, dk[..., ctx.D :].sum(1, keepdim=True).to(ctx.dtype), None


@functools.cache
def _computes_the_same(expand_kv: Callable[..., Any]) -> bool:
    """Whether a method ``expand_kv`` computes what ``expand`` does: both are applied to a few numbers."""
    module = SimpleNamespace(kv_b_proj=lambda x: x, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=4)
    with without_dispatch_modes():
        drawn = [torch.arange(2.0 * 5 * n, device="cpu", dtype=torch.float32).view(2, 1, 5, n) for n in (6 * 7, 2)]
        try:
            keys, values = expand_kv(module, *drawn)
        except Exception:  # it needs more of its layer, or has other results
            return False
        return all(map(torch.equal, (keys, values), expand(module, *drawn)))
