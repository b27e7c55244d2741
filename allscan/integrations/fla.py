"""Sequence parallelism for layers and models of flash-linear-attention (tested with 0.6.0): GLA, simple GLA, RetNet,
KDA, Gated DeltaNet, Mamba2, RWKV-7, and hybrids of the former with softmax attention."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..base.checks import PER_DOCUMENT, boundaries, is_zigzag
from ..bindings.torch_compat import has_backward_hooks
from ..comm.communicator import Communicator
from ..comm.host_exchange import differing
from ..launch.compiled_kernel import dynamo_disabled
from ..ops.delta import zeco_gated_delta_rule, zeco_kda
from ..ops.gla import zeco_gla
from ..ops.halo import halo_from_boundary_tokens
from ..ops.ssd import zeco_simple_gla, zeco_ssd
from ..tokens.packing import Tables, boundaries_on_host, document_places, without_empty
from ..tokens.partition import cached_table, partition_start
from . import needing
from .attention import Blocks, attend, check_split, packed_of
from .batches import DOCUMENTS, STAMP, misfit, read
from .batches import cut_batch as cut_batch
from .recurrent import Tokens, gather_rows, of_last_tokens
from .softmax import Row, joined, masks_nothing, reject, shifted

with needing(__name__, "flash-linear-attention"):
    from fla.layers import GatedDeltaNet, GatedLinearAttention, KimiDeltaAttention, Mamba2, MultiScaleRetention
    from fla.layers import attn as softmax_attention
    from fla.layers.rwkv7 import LoRA, RWKV7Attention
    from fla.layers.simple_gla import SimpleGatedLinearAttention
    from fla.layers.utils import get_layer_cache, update_layer_cache
    from fla.models.rwkv7.modeling_rwkv7 import RWKV7FeedForward
    from fla.modules.convolution import causal_conv1d

    from . import fla_cp, fla_rwkv7

_prefilled: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # cache -> number of tokens of all ranks in it


def sequence_parallel(
    module: torch.nn.Module,
    *,
    comm: Communicator | None,
    layout: str = "contiguous",
    per_document: bool = False,
    merged_attention: bool = True,
) -> torch.nn.Module:
    """Convert ``module``, in place, so that each rank processes its part of a sequence; returns the module.

    The layers call zeco_gla, zeco_simple_gla, zeco_kda, zeco_gated_delta_rule or zeco_ssd, for any ``mode``. Short
    convolutions receive the preceding tokens from the ranks before. A rank may have few tokens or none: fla's norms and
    MLPs have no backward for empty tensors and process one token of zeros then. Softmax attention all-gathers keys and
    values; in the contiguous layout the last rank has the most work. Each call of such a layer, and of RetNet's, whose
    rotary embeddings need positions, exchanges the ranks' numbers of tokens on the host. ``cu_seqlens`` is that of the
    row, as for zeco_gla; fla's own Mamba2 ignores it.
    A causal language model's loss is this rank's share of the mean over the tokens of all ranks: the sum over the ranks
    is the loss (DistributedDataParallel and FSDP over all ranks average gradients instead: multiply the loss by
    ``comm.size``). Labels are shifted across shard boundaries. ``num_items_in_batch`` is the number of labels on all
    ranks. The model's ``criterion`` is used as in fla, with its ``ignore_index``; its ``reduction`` is "mean" (over the
    tokens, by their ``weight`` if it has one) or "sum".

    With ``use_cache=True``, on all ranks or on none, every rank's cache is that of the row. Each rank can then generate
    with the ordinary model by itself: ``sequence_parallel(module, comm=None)``. The rank with the last token has its
    logits: the last rank, in zigzag the first.

    RWKV-7's recurrence is fla's, whose context parallelism passes the states by ``fla_cp``; token shifts, also those of
    channel mixing, get the token before by ``halo``. It leaves no cache. Its config has ``use_l2warp=True`` by default:
    pass False.

    Args:
        module: a ``GatedLinearAttention``, ``SimpleGatedLinearAttention``, ``MultiScaleRetention``,
            ``KimiDeltaAttention``, ``GatedDeltaNet``, ``Mamba2`` or ``RWKV7Attention``, or anything made of such
            layers, of softmax ``Attention`` and of parts that look at one token at a time: a ``KDABlock``,
            ``GatedDeltaNetModel`` or ``GLAForCausalLM``, hybrids included. Parameters, their names and checkpoints stay
            as they are.
        comm: the ranks that share a sequence, in the order of its parts; None restores the ordinary module.
        layout: "zigzag" if rank r's tokens are chunks r and 2P - 1 - r of the 2P that the row is cut into, as for
            zeco_gla. All ranks of a softmax layer have the same work then.
        per_document: with cu_seqlens in the zigzag layout, equal on every rank: True cuts each sequence into 2P chunks
            in place of the row, as for zeco_gla. Lengths must then be multiples of 2P; all ranks have the same work in
            softmax layers for any lengths, and labels do not cross the end of a sequence.
        merged_attention: equal on all ranks: True: softmax layers without a window, a cache and cu_seqlens run in
            blocks by PyTorch's kernels, whose results are merged. False, and otherwise: flash_attn's kernels run over
            the keys of the row, in sequence order.

    Returns:
        ``module`` itself, changed.

    Raises:
        ValueError: if there is no recurrent layer, a layer of fla of another kind, or one whose forward is not its
            class's (hooks that replace it come after); for ``per_document``, and for a communicator with ``invariant``,
            if there is an RWKV-7 layer; when called, for an attention mask that masks anything (pack with cu_seqlens
            instead; looking waits for the GPU, once a mask: do not write to one made in torch.inference_mode), for a
            cache that is not empty, for cu_seqlens where a cache is wanted (fla's default in eval mode: pass
            use_cache=False), for a cache of RWKV-7, and for ``use_l2warp``, whose penalty fla divides by one rank's
            tokens.

    Example:
        >>> model = sequence_parallel(GLAForCausalLM(config).cuda(), comm=comm)
        >>> loss = model(input_ids=tokens[:, mine], labels=tokens[:, mine]).loss      # this rank's share
        >>> loss.backward()                                  # add the gradients up over the ranks of comm
    """
    zigzag = check_split(comm, layout, per_document, merged_attention)
    layers = [m for m in module.modules() if _kind(m) is not None]
    others = {type(m).__name__ for m in module.modules() if _of_fla(type(m)) and _kind(m) is None}
    others |= {type(m).__name__ for m in layers if type(m).forward is not _kind(m).forward}
    if others or all(_kind(m) is softmax_attention.Attention for m in layers):
        kinds = ", ".join(kind.__name__ for kind in _CALLS)
        raise ValueError(f"expected layers of {kinds}, got {sorted(others) or 'no recurrent one'}")
    if comm is not None and any(_kind(m) is RWKV7Attention for m in layers):
        if per_document:
            raise ValueError("per_document=True is not for RWKV-7, whose recurrence takes one state of each row")
        fla_cp.reject_invariant(comm)
    documents: list | None = [None] if per_document else None  # cu_seqlens of the layers' last call
    for layer in layers:
        how = layout, merged_attention, documents
        split = None if comm is None else functools.partial(_layer, layer, _kind(layer), comm, *how)
        _replace(layer, "forward", split)
    for model in module.modules():
        if isinstance(model, RWKV7FeedForward):
            split = None if comm is None else functools.partial(_channel_mixing, model, comm, layout)
            _replace(model, "forward", split)
        if type(model).__module__.startswith(_TOKENWISE):
            _replace(model, "forward", None if comm is None else functools.partial(_tokenwise, model))
        if hasattr(model, "_compute_logits_and_loss"):
            loss = None if comm is None else functools.partial(_loss, model, comm, zigzag, documents)
            _replace(model, "_compute_logits_and_loss", loss)
    return module


def _of_fla(kind: type) -> bool:
    return not issubclass(kind, LoRA) and any(base.__module__.startswith("fla.layers.") for base in kind.__mro__)


def _replace(module: Any, name: str, function: Callable[..., Any] | None) -> None:
    """Replace the module's method by ``function``; None restores the class's method."""
    present = vars(module).get(name)
    if present is not None and getattr(present, "func", None) not in (_layer, _loss, _tokenwise, _channel_mixing):
        raise ValueError(f"the {name} of a {type(module).__name__} was replaced: call sequence_parallel before that")
    vars(module).pop(name, None)
    if function is not None:
        setattr(module, name, function)


_TOKENWISE = "fla.modules.norm.", "fla.modules.mlp"


def _tokenwise(module: Any, *arguments: Any, **options: Any) -> torch.Tensor | tuple:
    """Forward of a token-wise module; on a rank without tokens it runs on one token of zeros."""
    forward = functools.partial(type(module).forward, module)
    if not any(isinstance(x, torch.Tensor) and x.ndim > 2 and not x.shape[1] for x in (*arguments, *options.values())):
        return forward(*arguments, **options)

    def of_one(x: Tensor) -> torch.Tensor:
        padded = isinstance(x, torch.Tensor) and x.ndim > 2
        return F.pad(x, (0, 0) * (x.ndim - 2) + (0, 1)) if padded else x

    found = forward(*map(of_one, arguments), **{name: of_one(x) for name, x in options.items()})
    return found[:, :0] if isinstance(found, torch.Tensor) else tuple(x if x is None else x[:, :0] for x in found)


def _kind(module: Any) -> Any:
    """The supported fla class of a layer, or None."""
    return next((kind for kind in _CALLS if isinstance(module, kind)), None)  # FSDP2 makes subclasses


def _layer(
    layer: Any,
    kind: Any,
    comm: Communicator,
    layout: str,
    merged: bool,
    documents: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    use_cache: Any = False,
    output_attentions: Any = False,
    cu_seqlens: Tensor | None = None,
    first_token: int | None = None,
    **options: Any,
) -> tuple:
    """Forward of a layer over this rank's tokens."""
    stamp = options.get(STAMP)
    if attention_mask is not None and not masks_nothing(attention_mask, comm):
        reject(comm, "attention_mask masks tokens: pack the sequences, with cu_seqlens, instead of padding them")
    if get_layer_cache(layer, past_key_values) is not None:
        reject(comm, "past_key_values must be empty: the state before the first rank's tokens is taken as zero")
    if use_cache and cu_seqlens is not None:
        reject(comm, "packed sequences leave no cache: pass use_cache=False")
    if use_cache and kind is RWKV7Attention:
        reject(comm, "split RWKV-7 layers leave no cache: pass use_cache=False")
    cache = past_key_values if use_cache else None
    if cache is not None and (cache not in _prefilled or not cache.get_seq_length()):  # the first layer
        _prefilled[cache] = sum(_tokens_of_all(comm, hidden_states, layout, stamp, (_called(True),)))
    where = dict(comm=comm, cu_seqlens=cu_seqlens, first_token=first_token, layout=layout)
    if documents is not None:
        documents[0] = None if cu_seqlens is None else without_empty(_read(comm, cu_seqlens))
        if cu_seqlens is not None:
            where |= dict(cu_seqlens=torch.tensor(documents[0], device="cpu"), per_document=True)
    cut = DOCUMENTS if "per_document" in where else layout
    # these exchange the numbers of tokens themselves
    if kind is softmax_attention.Attention:
        return _softmax(layer, hidden_states, cache, where, stamp, merged), None, past_key_values
    if kind is MultiScaleRetention:
        return _retention(layer, hidden_states, cache, where, stamp), None, past_key_values
    if stamp is not None:
        batch = "integrations.fla", hidden_states.shape[:2], cut, read(stamp)[:3]
        if comm.debug or batch not in comm.agreed.arguments:
            _tokens_of_all(comm, hidden_states, cut, stamp)
            comm.agreed.arguments.remember(batch)
    if kind is RWKV7Attention:
        o, v_first = _rwkv7(layer, hidden_states, options.get("v_first"), where)
        return o, None, past_key_values, v_first
    return _CALLS[kind](layer, hidden_states, cache, where), None, past_key_values


def _mixed(layer: Any, x: Tensor, cache: Any, where: dict[str, Any], activation: Any = None) -> tuple:
    """(q, k, v with heads, convolution states) of a recurrent layer."""
    xs: Any = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)
    states: Any = None
    if layer.use_short_conv:
        convolutions = layer.q_conv1d, layer.k_conv1d, layer.v_conv1d
        xs, states = _convolve(convolutions, xs, cache is not None, where)
    elif activation is not None:
        xs = [activation(y) for y in xs]
    widths = layer.head_k_dim, layer.head_k_dim, layer.head_v_dim
    return *(y.unflatten(-1, (-1, width)) for y, width in zip(xs, widths, strict=True)), states


def _remember(layer: Any, cache: Any, state: Any, conv_states: Tensor | None) -> None:
    if cache is not None:
        update_layer_cache(
            layer, cache, recurrent_state=state.contiguous(), conv_state=conv_states, offset=_prefilled[cache]
        )


def _linear(layer: Any, x: Tensor, cache: Any, where: dict[str, Any]) -> tuple:
    """``_mixed`` with feature maps, and k and v of every head."""
    q, k, v, conv_states = _mixed(layer, x, cache, where)
    if layer.feature_map_fn is not None:
        q, k = layer.feature_map_fn(q), layer.feature_map_fn(k)
    return q, *(_of_every_head(layer, y) for y in (k, v)), conv_states


def _of_every_head(layer: Any, x: Tensor) -> Tensor:
    return x if layer.num_kv_groups == 1 else x.repeat_interleave(layer.num_kv_groups, -2)


def _gla(layer: Any, x: Tensor, cache: Any, where: dict[str, Any]) -> torch.Tensor:
    q, k, v, conv_states = _linear(layer, x, cache, where)
    g = F.logsigmoid(layer.gk_proj(x).unflatten(-1, (-1, layer.head_k_dim))) / layer.gate_logit_normalizer
    if layer.clamp_min is not None:
        g = g.clamp_min(layer.clamp_min)
    g = _of_every_head(layer, g)
    o, state = zeco_gla(q, k, v, g, output_final_state="all" if cache is not None else False, **where)
    _remember(layer, cache, state if state is None else state.mT, conv_states)
    return _output(layer, x, o)


def _simple_gla(layer: Any, x: Tensor, cache: Any, where: dict[str, Any]) -> torch.Tensor:
    q, k, v, conv_states = _linear(layer, x, cache, where)
    g = F.logsigmoid(layer.gk_proj(x)) / layer.gate_logit_normalizer
    final = "all" if cache is not None else False
    o, state = zeco_simple_gla(q, k, v, g, output_final_state=final, state_v_first=True, **where)
    _remember(layer, cache, state, conv_states)
    return _output(layer, x, o)


def _retention(layer: Any, x: Tensor, cache: Any, where: dict[str, Any], stamp: Any = None) -> torch.Tensor:
    row = _row(x, where, stamp, (_called(cache is not None),))
    q, k, v, conv_states = _linear(layer, x, cache, where)
    q, k = _rotated(layer, q, k, row)
    decays = (1 - 2.0 ** (-5.0 - torch.arange(layer.num_heads, dtype=torch.float32, device=x.device))).log()
    final = "all" if cache is not None else False
    o, state = zeco_simple_gla(q, k, v, g_gamma=decays, output_final_state=final, **where)
    _remember(layer, cache, state, conv_states)
    return _output(layer, x, o)


def _output(layer: Any, x: Tensor, o: Tensor) -> torch.Tensor:
    """The output of GLA, simple GLA and RetNet, from the operator's o."""
    if not getattr(layer, "use_output_gate", True):
        o = layer.g_norm(o).flatten(-2)
    elif layer.fuse_norm_and_gate:
        o = layer.g_norm_swish_gate(o, layer.g_proj(x).unflatten(-1, (-1, layer.head_v_dim))).flatten(-2)
    else:
        o = layer.g_norm(o).flatten(-2) * layer.gate_fn(layer.g_proj(x))
    return layer.o_proj(o)


class _Convolution(torch.nn.Module):
    """Mamba2's convolution, called like fla's ShortConvolution."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.of_layer, self.kernel_size = layer.conv1d, layer.conv1d.kernel_size
        self.activation = "silu" if layer.activation in ("silu", "swish") else None

    def forward(self, x: Tensor, cache: Tensor | None = None, **options: Any) -> tuple:
        weight, bias = self.of_layer.weight.squeeze(1), self.of_layer.bias
        return causal_conv1d(x, weight, bias, initial_state=cache, activation=self.activation, **options)


def _mamba2(layer: Any, x: Tensor, cache: Any, where: dict[str, Any]) -> torch.Tensor:
    H, G, N = layer.num_heads, layer.n_groups, layer.ssm_state_size
    gate, mixed, dt = layer.in_proj(x).split([layer.intermediate_size, layer.conv_dim, H], -1)
    conv = _Convolution(layer)
    (mixed,), conv_states = _convolve((conv,), (mixed,), cache is not None, where)
    mixed = mixed if conv.activation else layer.act(mixed)
    x, B, C = mixed.split([layer.intermediate_size, G * N, G * N], -1)
    x, B, C = x.unflatten(-1, (H, -1)), B.unflatten(-1, (G, N)), C.unflatten(-1, (G, N))
    A, D = -layer.A_log.float().exp(), layer.D.unflatten(0, (H, -1)) if layer.D_has_hdim else layer.D
    options: dict[str, Any] = dict(dt_bias=layer.dt_bias, dt_softplus=True, dt_limit=layer.dt_limit)
    final = "all" if cache is not None else False
    y: Any = zeco_ssd(x, dt, A, B, C, layer.chunk_size, D=D, return_final_states=final, **options, **where)
    if cache is not None:
        y, state = y
        _remember(layer, cache, state, conv_states[0])
    y = y.flatten(-2)
    return layer.out_proj(layer.norm(y, gate) if layer.rmsnorm else y * layer.act(gate))


def _delta_rule(
    rule: Callable[..., Any],
    layer: Any,
    x: Tensor,
    cache: Any,
    where: dict[str, Any],
    g: Tensor,
    gated: bool,
    **options: Any,
) -> torch.Tensor:
    """Call KDA or Gated DeltaNet; ``g``: the gate's raw input; ``options``: further options of the rule."""
    q, k, v, conv_states = _mixed(layer, x, cache, where, F.silu)
    options |= dict(allow_neg_eigval=layer.allow_neg_eigval, A_log=layer.A_log, dt_bias=layer.dt_bias)
    final = "all" if cache is not None else False
    o, state = rule(q, k, v, g, layer.b_proj(x), output_final_state=final, **RAW, **options, **where)
    _remember(layer, cache, state, conv_states)
    gate = (layer.g_proj(x).unflatten(-1, (-1, layer.head_v_dim)),) if gated else ()
    return layer.o_proj(layer.o_norm(o, *gate).flatten(-2))


# the kernels compute norms, gates and beta, as in fla's layers
RAW: dict[str, Any] = dict(
    use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, state_v_first=True
)


def _kda(layer: Any, x: Tensor, cache: Any, where: dict[str, Any]) -> torch.Tensor:
    g = layer.f_proj(x).unflatten(-1, (-1, layer.head_k_dim))
    options = dict(safe_gate=layer.safe_gate, lower_bound=layer.lower_bound)
    return _delta_rule(zeco_kda, layer, x, cache, where, g, True, **options)


def _gated_delta_net(layer: Any, x: Tensor, cache: Any, where: dict[str, Any]) -> torch.Tensor:
    return _delta_rule(zeco_gated_delta_rule, layer, x, cache, where, layer.a_proj(x), layer.use_gate)


def _shifted(x: Tensor, where: dict[str, Any]) -> torch.Tensor:
    """The previous token minus each token of this rank."""
    ((delta,), _) = _convolve((fla_rwkv7.TokenShift(),), (x,), False, where)
    return delta


def _rwkv7(layer: Any, x: Tensor, v_first: Tensor | None, where: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    delta = _shifted(x, where)
    return fla_rwkv7.time_mixing(layer, x, delta, v_first, _context(x.shape[1], **where))


@dynamo_disabled
def _context(T: int, comm: Communicator, cu_seqlens: Any, first_token: int | None, layout: str) -> object:
    zigzag, begin = is_zigzag(layout), 0
    lengths = None if cu_seqlens is None else _read(comm, cu_seqlens)
    if lengths is not None:
        with comm.call():
            begin = partition_start(comm, lengths, T, first_token, zigzag)
    return fla_rwkv7.context_of(comm, T, 1 + zigzag, begin, lengths)


def _channel_mixing(
    module: Any,
    comm: Communicator,
    layout: str,
    x: Tensor,
    attention_mask: Tensor | None = None,
    state: Any = None,
    cu_seqlens: Tensor | None = None,
    first_token: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, Any]:
    """Forward of RWKV-7's channel mixing; its block's time mixing has checked the mask."""
    where = dict(comm=comm, cu_seqlens=cu_seqlens, first_token=first_token, layout=layout)
    return fla_rwkv7.channel_mixing(module, x, _shifted(x, where)), state


def _softmax(layer: Any, x: Tensor, cache: Any, where: dict[str, Any], stamp: Any, merged: bool) -> torch.Tensor:
    """Causal softmax attention of this rank's queries over the tokens of all ranks."""
    comm: Communicator = where["comm"]
    packed = where["cu_seqlens"] is not None
    whole = cache is not None or packed or layer.window_size is not None  # takes all keys at once
    q, k, v = _projected(layer, x)
    # in every call: the back end's collectives that follow cannot report a difference or a rank's rejection
    gradients = k.requires_grad or v.requires_grad
    alike = (
        _called(cache is not None),
        ("merged_attention", merged),
        ("dtypes of keys and values", f"{k.dtype}, {v.dtype}"),
        ("gradients of keys and values", gradients),
    )
    row = _row(x, where, stamp, alike)
    q, k = _rotated(layer, q, k, row)
    blocks = None
    if comm.size > 1 and any(row.tokens):
        gather = row.gather(k, v)
        if merged and not whole:
            blocks = Blocks(gather)
        else:
            k, v = row.in_order(gather)
    if cache is not None:
        cache.update(
            attn_state=(k.flatten(-2), v.flatten(-2)),
            layer_idx=layer.layer_idx,
            offset=_prefilled[cache],
            cache_kwargs=dict(window_size=layer.window_size),
        )
    # flash_attn aligns the last query with the last key if there are more keys
    window = (-1, -1) if layer.window_size is None else (layer.window_size - 1, 0)
    options: dict[str, Any] = dict(causal=True, window_size=window)
    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"

    def varlen(q: Tensor, k: Tensor, v: Tensor, *cuts: Any) -> torch.Tensor:
        return softmax_attention.flash_attn_varlen_func(q, k, v, **dict(zip(names, cuts, strict=True)), **options)

    o = attend(q, k, v, row, functools.partial(softmax_attention.flash_attn_func, **options), varlen, blocks)
    return layer.o_proj(o.flatten(-2))


def _row(x: Tensor, where: dict[str, Any], stamp: Any, alike: tuple[tuple[str, object], ...]) -> Row:
    """The tokens of all ranks; exchanges their numbers, see ``_tokens_of_all``."""
    comm, layout, cu_seqlens = (where[name] for name in ("comm", "layout", "cu_seqlens"))
    per_document = "per_document" in where
    zigzag, T = is_zigzag(layout), x.shape[1]
    if zigzag and T % 2:
        reject(comm, f"the zigzag layout needs an even number of tokens, got {T}")
    lengths = None if cu_seqlens is None else _read(comm, cu_seqlens)
    tokens = _tokens_of_all(comm, x, DOCUMENTS if per_document else layout, stamp, alike)
    if lengths is not None and sum(tokens) != lengths[-1]:
        reject(comm, f"cu_seqlens must end with the {sum(tokens)} tokens of all ranks, got {lengths[-1]}")
    if per_document and T:
        assert lengths is not None
        with comm.call():
            partition_start(comm, lengths, T, where["first_token"], PER_DOCUMENT)
    cuts = None if lengths is None else torch.tensor(lengths, device="cpu")
    return Row(comm, tokens, cuts, zigzag=zigzag, per_document=per_document)


def _rotated(layer: Any, q: Tensor, k: Tensor, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k with rotary embeddings of their positions in the sequences."""
    if not row.own:
        return q, k
    most = getattr(layer, "max_position_embeddings", None) or 0
    if row.lengths is not None:
        table = packed_of(row)
        cu_seqlens, _, before, *_ = table.of_stream(row.comm)
        longest = max(table.longest[1], most)
        return layer.rotary(q, k, seqlen_offset=before, max_seqlen=longest, cu_seqlens=cu_seqlens)
    parts = row.parts()
    longest = max(sum(row.tokens), most)
    halves = zip(parts, q.chunk(len(parts), 1), k.chunk(len(parts), 1), strict=True)
    found = [layer.rotary(y, z, seqlen_offset=part.before, max_seqlen=longest) for part, y, z in halves]
    return joined([y for y, _ in found], 1), joined([z for _, z in found], 1)


def _projected(layer: Any, x: Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q, k, v) with heads."""
    q, k, v = (project(x).unflatten(-1, (-1, layer.head_dim)) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
    return (layer.q_norm(q), layer.k_norm(k), v) if layer.qk_norm else (q, k, v)


_CALLS: dict[Any, Callable[..., Any]] = {
    GatedLinearAttention: _gla,
    SimpleGatedLinearAttention: _simple_gla,
    MultiScaleRetention: _retention,
    Mamba2: _mamba2,
    KimiDeltaAttention: _kda,
    GatedDeltaNet: _gated_delta_net,
    RWKV7Attention: _rwkv7,
    softmax_attention.Attention: _softmax,
}


@dynamo_disabled
def _read(comm: Communicator, cu_seqlens: Tensor | None) -> tuple[int, ...]:
    with comm.call():  # reports a rejection to the other ranks, which would otherwise wait
        return boundaries_on_host(boundaries(cu_seqlens))


def _called(use_cache: bool) -> tuple[str, object]:
    return "call", f"with use_cache={use_cache}"


def _tokens_of_all(
    comm: Communicator, x: Tensor, layout: str, stamp: Any, alike: tuple[tuple[str, object], ...] = ()
) -> list[int]:
    """Exchange the number of tokens of each rank, and check that all ranks have parts of one batch and the same
    (name, value) pairs in ``alike``."""
    with comm.call():  # reports a rejection to the other ranks, which would otherwise wait
        told = *x.shape[:2], stamp, (("torch.is_grad_enabled()", torch.is_grad_enabled()), *alike)
        rows, tokens, stamps, others = zip(*comm.order.exchange(told, "the tokens of each rank"), strict=True)
        if different := differing(others):  # in backward the others would wait in collectives of torch
            raise comm.order.raised_everywhere(ValueError(f"ranks call with different arguments: {different}"))
        problem = misfit(comm, rows, tokens, layout, stamps)
        if problem is not None:
            raise comm.order.raised_everywhere(ValueError(problem))
        return list(tokens)


@dynamo_disabled
def _convolve(convolutions: Any, xs: Any, use_cache: Any, where: dict[str, Any]) -> tuple[list[torch.Tensor], tuple]:
    """(outputs of fla's convolutions over this rank's tokens xs, their last states or None); equal kernel sizes."""
    comm, cu_seqlens, first_token, layout = (where[name] for name in ("comm", "cu_seqlens", "first_token", "layout"))
    per_document = where.get("per_document", False)
    # a state holds one token more than an output's history; the last rank may have none of these tokens
    W, T, halves = convolutions[0].kernel_size[0], xs[0].shape[1], 1 + is_zigzag(layout)
    n, sequences = W - (0 if use_cache else 1), None
    states: Any = [None] * len(xs)
    ys: Any
    lengths = None if cu_seqlens is None else _read(comm, cu_seqlens)
    sizes = None  # lengths of the pieces of sharded documents
    if per_document:
        assert lengths is not None  # with per_document there are cu_seqlens
        sizes = [b - a for a, b in document_places(lengths, comm.rank, comm.size)]
        halves = len(sizes)
    if n:
        xs, before = _before(convolutions, xs, n, halves, where, sizes)
        states = [F.pad(y.unflatten(1, (halves, n)).flatten(0, 1).mT, (W - n, 0)) for y in before]
    first = 0
    if lengths is not None:
        zigzag = PER_DOCUMENT if per_document else int(halves == 2)
        with comm.call():  # on every rank, even without tokens
            first = partition_start(comm, lengths, T, first_token, zigzag)
    if not T:
        ys = [c(y)[0][:, halves * n :] for c, y in zip(convolutions, before if n else xs, strict=True)]
        return ys, _last_states(states, use_cache, comm, halves)
    if lengths is not None:
        key = ("convolution", first, T, lengths, zigzag)

        def make_tables() -> Tables:
            if sizes is None:
                return Tables(_sequences(first, lengths, T, halves), comm.device)
            cuts = torch.tensor([*itertools.accumulate(sizes, initial=0)], dtype=torch.int32, device="cpu")
            return Tables([cuts, torch.arange(halves, device="cpu")], comm.device)

        tables = cached_table(comm, key, make_tables)
        sequences, firsts = tables.of_stream(comm)
        N = len(sequences) - 1
        if n and N > halves:
            states = [y.new_zeros(N, *y.shape[1:]).index_copy(0, firsts, y) for y in states]
    else:  # each half is a sequence
        xs = [x.unflatten(1, (halves, -1)).flatten(0, 1) for x in xs]
    options = dict(output_final_state=bool(use_cache), cu_seqlens=sequences)
    results = [c(x, cache=state, **options) for c, x, state in zip(convolutions, xs, states, strict=True)]
    ys, states = zip(*results)
    if cu_seqlens is None:
        ys = [y.unflatten(0, (-1, halves)).flatten(1, 2) for y in ys]
    return ys, _last_states(states, use_cache, comm, halves)


def _last_states(states: Tensor, wanted: Any, comm: Communicator, halves: int) -> tuple:
    """The states after the last token of all ranks, on every rank, from the states of each half."""
    if not wanted:
        return (None,) * len(states)
    return of_last_tokens([x[halves - 1 :: halves] for x in states], comm, halves == 2)


def _before(
    convolutions: Any, xs: Any, n: int, halves: int, where: dict[str, Any], sizes: Any = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(xs, the n tokens before each half, or before each piece of the given sizes)."""
    comm, T = where["comm"], xs[0].shape[1]
    if T <= halves * n and sizes is None or not T:
        return xs, halo_from_boundary_tokens(xs, T, n, **where)
    sizes = [T // halves] * halves if sizes is None else sizes
    ends: Any = zip(itertools.accumulate(sizes), sizes)
    numbers = [t for end, size in ends for t in range(end - min(n, size), end)]
    tokens = cached_table(comm, ("ends", n, *sizes), lambda: Tokens(numbers, T, comm.device))
    # a backward hook of a convolution may keep the gradient: then it must not be changed in place
    hooked = [has_backward_hooks(c) for c in convolutions]
    xs, ends = zip(*(gather_rows(x, tokens, comm, not hook) for x, hook in zip(xs, hooked, strict=True)))
    return xs, halo_from_boundary_tokens(ends, T, n, **where)


def _sequences(first: int, lengths: tuple[int, ...], T: int, halves: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(cu_seqlens of this rank's tokens, with both halves in zigzag; index of each half's first sequence)."""
    part, cuts, firsts = T // halves, [0], []
    for half, begin in enumerate((first, lengths[-1] - first - part)[:halves]):
        firsts.append(len(cuts) - 1)
        inside = {c - begin for c in lengths if begin < c < begin + part}
        cuts += [half * part + c for c in (*sorted(inside), part)]
    return torch.tensor(cuts, dtype=torch.int32, device="cpu"), torch.tensor(firsts, device="cpu")


def _loss(
    model: Any,
    comm: Communicator,
    zigzag: bool,
    documents: Any,
    hidden_states: Tensor,
    labels: Any = None,
    logits_to_keep: Any = 0,
    *,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """FLAPreTrainedModel._compute_logits_and_loss; returns this rank's share of the loss."""
    penalty = options.get("use_l2warp")
    penalty = getattr(model.config, "use_l2warp", False) if penalty is None else penalty
    if penalty and not (labels is None and shift_labels is None):
        raise ValueError("use_l2warp is not supported with a split sequence")
    criterion = getattr(model, "criterion", None)
    ignored = getattr(criterion, "ignore_index", -100)
    _agree_loss(comm, labels, num_items_in_batch, shift_labels)
    if shift_labels is None and labels is not None:
        shift_labels = shifted(labels, ignored, comm, zigzag, documents[0] if documents else None)
    if shift_labels is not None and num_items_in_batch is None:
        num_items_in_batch = _divisor(criterion, shift_labels, shift_labels != ignored)
        if num_items_in_batch is not None and comm.size > 1:
            dist.all_reduce(num_items_in_batch, group=comm.group)
    if shift_labels is not None and not shift_labels.numel():  # fla's losses reject empty tensors
        logits = model.lm_head(hidden_states)
        fused = options.get("fuse_linear_cross_entropy")
        fused = getattr(model.config, "fuse_linear_cross_entropy", False) if fused is None else fused
        return logits.float().sum(), None if fused else logits
    options |= dict(shift_labels=shift_labels, num_items_in_batch=num_items_in_batch)
    return type(model)._compute_logits_and_loss(model, hidden_states, None, logits_to_keep, **options)


@dynamo_disabled
def _agree_loss(comm: Communicator, labels: Any, num_items_in_batch: Any, shift_labels: Any) -> None:
    """Compare the arguments that decide which collectives follow, and num_items_in_batch, which may synchronize with
    the GPU: at the first call of the model with such arguments, and in debug mode."""
    none = num_items_in_batch is None
    fields = (
        ("call", "the loss"),
        ("labels is None", labels is None),
        ("num_items_in_batch is None", none),
        ("shift_labels is None", shift_labels is None),
    )
    if comm.debug or fields not in comm.agreed.arguments:
        with comm.call():
            number = None if none or comm.streams.capturing() else float(num_items_in_batch)
            comm.order.agree((*fields, ("num_items_in_batch", number)), None, "the first loss with its arguments")
            comm.agreed.arguments.remember(fields)


def _divisor(criterion: Any, labels: Tensor, counted: Any) -> torch.Tensor | None:
    """This rank's share of the divisor of the summed loss, or None for reduction="sum"."""
    reduction = getattr(criterion, "reduction", None) if criterion is not None else "mean"
    if reduction == "sum":
        return None
    if reduction != "mean":
        raise ValueError(f'a criterion must have a reduction of "mean" or "sum", got {reduction!r}')
    weight = getattr(criterion, "weight", None)
    return counted.sum() if weight is None else (weight[labels.where(counted, 0)] * counted).sum()
