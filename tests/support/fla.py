"""flash-linear-attention in the tests."""

from __future__ import annotations

import os
from itertools import pairwise
from unittest import mock

import torch
import torch.nn.functional as F
import triton
from triton.runtime.autotuner import Autotuner

from allscan.reference import delta_reference, gla_reference

from .fla_rules import dplr_reference

os.environ["FLA_CACHE_RESULTS"] = "0"  # import_fla fakes autotuning results, which must not be cached for others
os.environ["FLA_USE_COMPILE"] = "0"  # RWKV-7's backward would compile a sum


def import_fla(models=True):
    """Import fla; on GPUs each kernel uses its first configuration, since speed does not matter here. ``models``: also
    import its layers and models, in ten seconds."""
    if torch.cuda.is_available():
        Autotuner._bench = lambda *_, **__: [1.0, 1.0, 1.0]
    if not models:
        return None
    import fla.layers
    import fla.models

    fla.layers.attn.flash_attn_func, fla.layers.attn.flash_attn_varlen_func = attention, packed_attention
    return fla


def has_gradients():
    """Return whether fla computes gradients of gated delta rules here: on Hopper with Triton 3.7.1 or later."""
    version = tuple(int(x) for x in triton.__version__.split("+")[0].split(".")[:3])
    return torch.cuda.get_device_capability()[0] != 9 or version >= (3, 7, 1)


def recurrence(q, k, v, g, initial_state=None, cu_seqlens=None, output_final_state=False, **_):
    """Replace chunk_gla of fla's layer by the token-by-token recurrence; states are [.., V, K]."""
    initial = None if initial_state is None else initial_state.mT
    o, state = gla_reference(q, k, v, g, initial_state=initial, cu_seqlens=cu_seqlens)
    return o.to(v.dtype), state.mT.to(v.dtype)


def scalar_recurrence(q, k, v, g=None, initial_state=None, state_v_first=False, cu_seqlens=None, **_):
    """Replace chunk_simple_gla and, without g, chunk_retention of fla's layers by the token-by-token recurrence."""
    if g is None:
        g = (1 - 2.0 ** (-5.0 - torch.arange(q.shape[2], dtype=torch.float, device=q.device))).log().expand(q.shape[:3])
    initial = initial_state.mT if state_v_first and initial_state is not None else initial_state
    o, state = gla_reference(q, k, v, g[..., None].expand_as(k), initial_state=initial, cu_seqlens=cu_seqlens)
    return o.to(v.dtype), (state.mT if state_v_first else state).float()


def by_document(forward):
    """The forward of fla's Mamba2 layer, which ignores packed sequences, for each by itself. Consecutive heads share a
    group of B and C, as in mamba_ssm and fla's decoding: fla's prefill in torch gives groups to the heads in turns."""

    def of_consecutive_heads(x, *times):
        return x.repeat_interleave(times[2], 2)

    def call(layer, hidden_states, cu_seqlens=None, **options):
        lengths = [0, hidden_states.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        with mock.patch.object(torch.Tensor, "repeat", of_consecutive_heads):
            found = [forward(layer, hidden_states[:, a:b], **options) for a, b in pairwise(lengths)]
        return torch.cat([o for o, *_ in found], 1), *found[-1][1:]

    return call


def delta_recurrence(
    q, k, v, g, beta, A_log, dt_bias, lower_bound=None, allow_neg_eigval=False, initial_state=None, cu_seqlens=None, **_
):
    """Replace chunk_kda and chunk_gated_delta_rule of fla's layers by the token-by-token recurrence."""
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q.double(), k.double()))
    raw, rate = g.double() + dt_bias.double().view(g.shape[2:]), A_log.double().exp()
    rate = rate[:, None] if g.ndim == 4 else rate
    g = -rate * F.softplus(raw) if lower_bound is None else lower_bound * (rate * raw).sigmoid()
    beta = (1 + allow_neg_eigval) * beta.double().sigmoid()
    initial = None if initial_state is None else initial_state.mT
    o, state = delta_reference(q, k, v, g, beta, initial_state=initial, cu_seqlens=cu_seqlens)
    return o.to(v.dtype), state.mT.float()


def dplr_recurrence(r, w, k, v, a, b, scale, initial_state=None, cu_seqlens=None, **_):
    """Replace chunk_rwkv7 of fla's layer by the token-by-token recurrence."""
    o, state = dplr_reference(r, k, v, a, b, w, scale, initial_state, cu_seqlens)
    return o.to(v.dtype), state.float()


def attention(q, k, v, causal, window_size):
    """Replace flash_attn_func: q [B, T, H, D], k and v [B, S, HK, D], the last query aligned with the last key."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    keys = torch.arange(k.shape[1], device=q.device)
    distance = keys[-q.shape[1] :, None] - keys
    seen = (distance >= 0) & (distance <= (len(keys) if window_size[0] < 0 else window_size[0]))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)


def packed_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window_size):
    """Replace flash_attn_varlen_func by one call per sequence."""
    cuts = zip(*(pairwise(cuts.tolist()) for cuts in (cu_seqlens_q, cu_seqlens_k)), strict=True)
    pieces = [(q[None, a:b], k[None, c:d], v[None, c:d]) for (a, b), (c, d) in cuts if a < b]
    return torch.cat([attention(*piece, causal, window_size) for piece in pieces], 1)[0]


H, D = 4, 64  # heads, widths
T = 192 if torch.cuda.is_available() else 48  # tokens per rank


WIDTHS = dict(q=D, k=D, v=D, g=1, gk=D, x=D, beta=1, u=D)


def drawn(names, tokens):
    generator = torch.Generator().manual_seed(0)
    for name in names:
        x = torch.randn((H, D) if name == "u" else (1, tokens, H, WIDTHS[name]), generator=generator)
        if name in ("g", "gk"):
            x = F.logsigmoid(x) * (3 / T)  # a state decays to a tenth over a rank's tokens
        x = F.normalize(x, dim=-1) if name == "k" else x.sigmoid() if name == "beta" else x
        yield x.squeeze(-1) if name in ("g", "beta") else x
