"""Sequence parallelism for the GLA layers and models of flash-linear-attention (tested with 0.6.0)."""

from __future__ import annotations

import functools
import weakref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fla.layers import GatedLinearAttention
from fla.layers.utils import get_layer_cache, update_layer_cache

from ..checks import boundaries
from ..communicator import Communicator
from ..first_call import cached_table, partition_start
from ..gla import zeco_gla
from ..ops import halo
from ..packing import TensorKey, boundaries_on_host, to_device

_prefilled: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # cache -> tokens of all ranks that it has seen


def sequence_parallel(module: torch.nn.Module, *, comm: Communicator | None) -> torch.nn.Module:
    """Let ``module``, in place, take this rank's part of each sequence where it took the whole; returns it.

        >>> model = sequence_parallel(GLAForCausalLM(config).cuda(), comm=comm)
        >>> loss = model(input_ids=tokens[:, mine], labels=tokens[:, mine]).loss      # this rank's share
        >>> loss.backward()                                  # add the gradients up over the ranks of comm

    module: a ``GatedLinearAttention``, or anything made of such layers whose other parts look at one token at a time: a
        ``GLABlock``, ``GLAModel`` or ``GLAForCausalLM``. Parameters, their names and checkpoints stay as they are.
    comm: the ranks that share a sequence, in the order of its parts; None makes the module an ordinary one again.

    The layers call zeco_gla, whatever their ``mode``, and the tokens that short convolutions look back at come from the
    rank before, so each rank needs at least conv_size - 1 tokens. ``cu_seqlens`` is that of the whole, as for zeco_gla.
    A causal language model's loss is this rank's share of the mean over the tokens of all ranks: the sum over the ranks
    is the loss (DistributedDataParallel and FSDP over all ranks average gradients instead: multiply the loss by
    ``comm.size``). Labels are shifted across the cuts. ``num_items_in_batch`` is the number of labels on all ranks. A
    ``criterion`` of the model's is used as fla does, with its ``ignore_index``; its ``reduction`` is "mean" (over the
    tokens, by their ``weight`` if it has one) or "sum".

    With ``use_cache=True`` the cache of the last rank is what the ordinary model goes on from, as a single process:
    ``sequence_parallel(model, comm=None)``. The others' is not to be used.

    Raises ValueError if there is no such layer, a layer of fla of another kind, or one whose forward is not its class's
    (hooks that replace it come after); when called, for an attention mask that masks anything (pack with cu_seqlens
    instead; looking waits for the GPU, once a mask: do not write to one made in torch.inference_mode), for a cache that
    is not empty, for cu_seqlens where a cache is wanted (fla's default in eval mode: pass use_cache=False), and for
    ``use_l2warp``, whose penalty fla scales by what one rank has.
    """
    layers = [m for m in module.modules() if isinstance(m, GatedLinearAttention)]
    others = {
        type(m).__name__ for m in module.modules() if _of_fla(type(m)) and not isinstance(m, GatedLinearAttention)
    }
    others |= {type(m).__name__ for m in layers if type(m).forward is not GatedLinearAttention.forward}
    if others or not layers:
        raise ValueError(f"expected layers of GatedLinearAttention only, got {sorted(others) or 'none'}")
    for layer in layers:
        _replace(layer, "forward", comm and functools.partial(_layer, layer, comm))
    for model in module.modules():
        if hasattr(model, "_compute_logits_and_loss"):
            _replace(model, "_compute_logits_and_loss", comm and functools.partial(_loss, model, comm))
    return module


def _of_fla(kind) -> bool:
    return any(base.__module__.startswith("fla.layers.") for base in kind.__mro__)  # FSDP2 makes subclasses


def _replace(module, name, function):
    """Let the module's method be ``function``, None: that of its class."""
    present = vars(module).get(name)
    if present is not None and getattr(present, "func", None) not in (_layer, _loss):
        raise ValueError(f"the {name} of a {type(module).__name__} was replaced: call sequence_parallel before that")
    vars(module).pop(name, None)
    if function is not None:
        setattr(module, name, function)


def _layer(
    layer, comm, hidden_states, attention_mask=None, past_key_values=None, use_cache=False, output_attentions=False,
    cu_seqlens=None, first_token=None, **_,
):  # fmt: skip
    """GatedLinearAttention.forward, over this rank's tokens."""
    if attention_mask is not None and not _masks_nothing(TensorKey(attention_mask)):
        _refuse(comm, "attention_mask masks tokens: pack the sequences, with cu_seqlens, instead of padding them")
    if get_layer_cache(layer, past_key_values) is not None:
        _refuse(comm, "past_key_values must be empty: the state before the first rank's tokens is taken as zero")
    if use_cache and cu_seqlens is not None:
        _refuse(comm, "packed sequences leave no cache: pass use_cache=False")
    x, conv_states = hidden_states, None
    q, k, v, g = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x), layer.gk_proj(x)
    if layer.use_short_conv:
        convolutions = layer.q_conv1d, layer.k_conv1d, layer.v_conv1d
        (q, k, v), conv_states = _convolve(convolutions, (q, k, v), comm, cu_seqlens, first_token, use_cache)
    q, k, g = (y.unflatten(-1, (-1, layer.head_k_dim)) for y in (q, k, g))
    v = v.unflatten(-1, (-1, layer.head_v_dim))
    if layer.num_kv_groups > 1:
        k, v, g = (y.repeat_interleave(layer.num_kv_groups, -2) for y in (k, v, g))
    g = F.logsigmoid(g) / layer.gate_logit_normalizer
    if layer.clamp_min is not None:
        g = g.clamp_min(layer.clamp_min)
    if layer.feature_map_fn is not None:
        q, k = layer.feature_map_fn(q), layer.feature_map_fn(k)
    o, state = zeco_gla(
        q, k, v, g, comm=comm, output_final_state=bool(use_cache), cu_seqlens=cu_seqlens, first_token=first_token
    )
    if use_cache and past_key_values is not None:
        if past_key_values not in _prefilled or not past_key_values.get_seq_length():  # the first layer
            _prefilled[past_key_values] = sum(comm.exchange(x.shape[1], "the first layer of a prefill"))
        update_layer_cache(
            layer, past_key_values, recurrent_state=state.mT.contiguous(), conv_state=conv_states,
            offset=_prefilled[past_key_values],
        )  # fmt: skip
    if not layer.use_output_gate:
        o = layer.g_norm(o).flatten(-2)
    elif layer.fuse_norm_and_gate:
        o = layer.g_norm_swish_gate(o, layer.g_proj(x).unflatten(-1, (-1, layer.head_v_dim))).flatten(-2)
    else:
        o = layer.g_norm(o).flatten(-2) * layer.gate_fn(layer.g_proj(x))
    return layer.o_proj(o), None, past_key_values


def _refuse(comm, message: str):
    """Raise ValueError, so that ranks on which the call goes on hear of it."""
    with comm.call():
        raise ValueError(message)


@functools.lru_cache(maxsize=1)
def _masks_nothing(mask: TensorKey) -> bool:
    return bool(mask.tensor().all())  # waits for the GPU, once for the mask that all layers are given


def _convolve(convolutions, xs, comm, cu_seqlens, first_token, use_cache):
    """(fla's convolutions of this rank's tokens xs, their states behind the last one or None); kernels of one size."""
    n, T = convolutions[0].kernel_size[0] - 1, xs[0].shape[1]
    if n:
        before = halo(tuple(xs), n, comm=comm, cu_seqlens=cu_seqlens, first_token=first_token)
        xs = [torch.cat(both, 1) for both in zip(before, xs, strict=True)]
    if cu_seqlens is not None:
        lengths = boundaries_on_host(boundaries(cu_seqlens))
        first = partition_start(comm, lengths, T, first_token)
        key = ("convolution", first, T, lengths, n)
        cu_seqlens = cached_table(comm, key, lambda: _lengths_here(comm.device, first, lengths, n, T))
    options = dict(output_final_state=bool(use_cache), cu_seqlens=cu_seqlens)
    ys, states = zip(*(c(x, **options) for c, x in zip(convolutions, xs, strict=True)))
    return [y[:, n:] for y in ys], states


def _lengths_here(device, first, lengths, n, T):
    """cu_seqlens of n tokens of the rank before, zeros if the cut is between sequences, and this rank's T tokens."""
    inside = sorted({n + c - first for c in lengths if first < c < first + T})
    return to_device(torch.tensor([0, *inside, n + T], dtype=torch.int32), device)


def _loss(
    model, comm, hidden_states, labels=None, logits_to_keep=0, *, shift_labels=None, num_items_in_batch=None, **options
):
    """FLAPreTrainedModel._compute_logits_and_loss, with this rank's share of the loss."""
    penalty = options.get("use_l2warp")
    penalty = getattr(model.config, "use_l2warp", False) if penalty is None else penalty
    if penalty and not (labels is None and shift_labels is None):
        raise ValueError("use_l2warp does not go with a split sequence")
    criterion = getattr(model, "criterion", None)
    ignored = getattr(criterion, "ignore_index", -100)
    if shift_labels is None and labels is not None:
        following = halo(labels, 1, comm=comm, reverse=True)
        if comm.rank == comm.size - 1:
            following = torch.full_like(following, ignored)
        shift_labels = torch.cat([labels[:, 1:], following], 1)
    if shift_labels is not None and num_items_in_batch is None:
        num_items_in_batch = _divisor(criterion, shift_labels, shift_labels != ignored)
        if num_items_in_batch is not None and comm.size > 1:
            dist.all_reduce(num_items_in_batch, group=comm.group)
    return type(model)._compute_logits_and_loss(
        model, hidden_states, None, logits_to_keep, shift_labels=shift_labels, num_items_in_batch=num_items_in_batch,
        **options,
    )  # fmt: skip


def _divisor(criterion, labels, counted):
    """What this rank's labels add to the number by which the sum over all ranks is divided, or None for a sum."""
    reduction = getattr(criterion, "reduction", None) if criterion is not None else "mean"
    if reduction == "sum":
        return None
    if reduction != "mean":
        raise ValueError(f'a criterion must have a reduction of "mean" or "sum", got {reduction!r}')
    weight = getattr(criterion, "weight", None)
    return counted.sum() if weight is None else (weight[labels.where(counted, 0)] * counted).sum()
