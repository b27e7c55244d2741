"""RWKV-7 of flash-linear-attention over a sharded sequence: ``fla.sequence_parallel`` uses it."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..comm.communicator import Communicator
from ..tokens.packing import Tables
from ..tokens.partition import cached_table
from . import fla_cp, needing

with needing(__name__, "flash-linear-attention"):
    from fla.modules.l2norm import l2_norm
    from fla.modules.token_shift import token_shift
    from fla.ops.generalized_delta_rule.dplr import chunk as dplr
    from fla.ops.rwkv7 import chunk_rwkv7
    from fla.ops.rwkv7.fused_addcmul import fused_addcmul_rwkv7
    from fla.ops.rwkv7.fused_k_update import fused_k_rwkv7
    from fla.ops.rwkv7.gate_output_correction import gate_output_correction

SLOWEST = -0.6065306597126334  # -exp(-1/2): the lowest log decay of the layer


class TokenShift(torch.nn.Module):
    """The previous token minus each token, called like fla's ShortConvolution: a state ends with the token before."""

    kernel_size = (2,)

    def forward(self, x: Tensor, cache: Tensor | None = None, cu_seqlens: Tensor | None = None, **_: Any) -> tuple:
        before = None if cache is None else cache[..., -1].contiguous()
        return token_shift(x, cu_seqlens, cache=before), None


def context_of(comm: Communicator, T: int, halves: int, begin: int, lengths: tuple[int, ...] | None) -> Any:
    """fla's context of this rank's ``T`` tokens, the first of which is token ``begin`` of the packed sequences
    ``lengths``. A rank without tokens has one in each half, which must leave the state as it is."""
    fla_cp.ensure_installed(dplr)
    part = T // halves
    places = [begin]
    if halves == 2:
        places.append((0 if lengths is None else lengths[-1]) - begin - part)
    cuts = {half * part + c - place for half, place in enumerate(places) for c in lengths or () if 0 < c - place < part}
    width = max(part, 1)
    cuts |= {half * width for half in range(halves + 1)}
    bounds = tuple(sorted(cuts))
    if lengths is None:
        first = comm.rank == 0
        starts = [first, False]
        finishes = [comm.rank == comm.size - 1] if halves == 1 else [False, first]
    else:
        starts, finishes = ([place + n in lengths for place in places] for n in (0, part))
    on_host = _on_host(bounds)
    tables = cached_table(comm, ("rwkv7", bounds), lambda: Tables([on_host], comm.device))
    common: dict[str, Any] = dict(cu_seqlens=tables.of_stream(comm)[0], cu_seqlens_cpu=on_host)
    if halves == 1:
        return fla_cp.RankContext(comm, is_first_rank=starts[0], is_last_rank=finishes[0], **common)
    return fla_cp.RankContext(
        comm,
        layout="zigzag",
        front_num_seqs=bounds.index(width),
        is_first_by_part=(starts[0], starts[1]),
        is_last_by_part=(finishes[0], finishes[1]),
        **common,
    )


@functools.lru_cache(256)
def _on_host(bounds: tuple[int, ...]) -> Tensor:
    """One tensor object for equal bounds: fla caches its tables of chunks by object."""
    return torch.tensor(bounds, dtype=torch.int32, device="cpu")


def time_mixing(layer: Any, x: Tensor, delta: Tensor, v_first: Tensor | None, context: Any) -> tuple[Tensor, Tensor]:
    """(output, values of the first layer) of fla's RWKV7Attention, from the tokens and their shifts."""
    T = x.shape[1]
    nothing = int(context.cu_seqlens_cpu[-1]) if not T else 0
    if nothing:  # fla's kernels take no empty tensors
        x, delta = (F.pad(y, (0, 0, 0, nothing)) for y in (x, delta))
    xr, xw, xk, xv, xa, xg = fused_addcmul_rwkv7(
        x, delta, layer.x_r, layer.x_w, layer.x_k, layer.x_v, layer.x_a, layer.x_g
    )
    r, k, v = layer.r_proj(xr), layer.k_proj(xk), layer.v_proj(xv)
    w = SLOWEST * layer.w_lora(xw).sigmoid()
    if layer.layer_idx == 0:
        v_first = v
    else:
        assert v_first is not None  # only the first layer needs none
        v_first = F.pad(v_first, (0, 0, 0, nothing)) if nothing else v_first
        v = torch.lerp(v, v_first, layer.v_lora(xv).sigmoid())
    rate, gate = layer.a_lora(xa).sigmoid(), layer.g_lora(xg)
    removed = (k * layer.k_k).unflatten(-1, (-1, layer.head_dim))
    removed = l2_norm(removed) if layer.fuse_norm else F.normalize(removed, dim=-1)
    k = fused_k_rwkv7(k, rate, layer.k_a)
    r, w, k, rate = (y.unflatten(-1, (-1, layer.head_dim)) for y in (r, w, k, rate))
    v = v.unflatten(-1, (-1, layer.head_v_dim))
    o = _recurrence(context, nothing, r, w, k, v, -removed, removed * rate)
    o = layer.g_norm(o.flatten(-2)) if layer.fuse_norm else layer.g_norm(o.flatten(2).flatten(0, 1)).view_as(o)
    o = layer.o_proj(gate_output_correction(o.reshape(*o.shape[:2], -1), r, k, layer.r_k, v, gate))
    return o[:, :T], v_first[:, :T]


def _recurrence(context: Any, nothing: int, *given: Tensor) -> Tensor:
    """S_t = diag(exp(w_t)) S_{t-1} + b_t (a_t S_{t-1}) + k_t v_t, o_t = r_t S_t. Rows of the batch become heads."""
    B, H = given[0].shape[0], given[0].shape[2]
    if nothing:  # zeros leave the state as it is; these are differentiable
        given = tuple(y * 0 for y in given)
    r, w, k, v, a, b = (y.transpose(0, 1).flatten(1, 2)[None] for y in given)
    # recomputing, fla's backward reads states of all sequences where its forward has kept those of both halves
    keep = context.layout == "zigzag" and len(context.cu_seqlens_cpu) > 3
    gates: dict[str, Any] = dict(safe_gate=True, lower_bound=SLOWEST, chunk_size=64)
    o, _ = chunk_rwkv7(r, w, k, v, a, b, cp_context=context, disable_recompute=keep, **gates)
    return o[0].unflatten(1, (B, H)).transpose(0, 1)


def channel_mixing(module: Any, x: Tensor, delta: Tensor) -> Tensor:
    """The output of fla's RWKV7FeedForward, from the tokens and their shifts."""
    return module.value(module.act_fn(module.key(x.addcmul(delta, module.x_k))))
