"""Sequence parallelism for transformers' own models (tested with 5.23.0): Gated DeltaNet, KDA, Mamba2 and lightning
attention layers, and their hybrids with softmax attention."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.checks import boundaries
from ..comm.communicator import Communicator
from ..launch.compiled_kernel import dynamo_disabled
from ..tokens.packing import boundaries_on_host, without_empty
from ..zigzag import zigzag_positions
from . import needing
from .attention import check_split
from .batches import STAMP, looked_at
from .batches import check_batch as check_batch
from .batches import cut_batch as cut_batch
from .recurrent import of_last_tokens
from .slices import check_slice, linear_cross_entropy
from .slices import mlp_in_slices as in_slices
from .softmax import discard_gathers, masks_nothing, reject, shifted
from .transformers_layers import (
    CACHES,
    NAME,
    OF_SPLIT,
    OPERATORS,
    OTHER_VERSION,
    RECURRENCES,
    REMEDY,
    SEQUENCE,
    SplitOperator,
    lightning_forward,
    name_of_cache,
    softmax_forward,
)
from .transformers_sequence import BY_POSITIONS, Agreed, SequenceOptions, SplitSequence, agree_sequence

with needing(__name__, "transformers"):
    from transformers import PreTrainedModel
    from transformers.loss.loss_utils import ForCausalLMLoss
    from transformers.utils import ModelOutput

INNER = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4")
# model, causal language model, softmax and lightning attention layer of each file in transformers.models
FAMILIES = {
    "qwen3_next": ("Qwen3NextModel", "Qwen3NextForCausalLM", "Qwen3NextAttention"),
    "qwen3_5": ("Qwen3_5TextModel", "Qwen3_5ForCausalLM", "Qwen3_5Attention"),
    "qwen3_5_moe": ("Qwen3_5MoeTextModel", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeAttention"),
    "kimi_linear": ("KimiLinearModel", "KimiLinearForCausalLM", "KimiLinearAttention"),
    "nemotron_h": ("NemotronHModel", "NemotronHForCausalLM", "NemotronHAttention"),
    "bamba": ("BambaModel", "BambaForCausalLM", "BambaAttention"),
    "granitemoehybrid": ("GraniteMoeHybridModel", "GraniteMoeHybridForCausalLM", "GraniteMoeHybridAttention"),
    "falcon_h1": ("FalconH1Model", "FalconH1ForCausalLM", "FalconH1Attention"),
    "zamba2": ("Zamba2Model", "Zamba2ForCausalLM", "Zamba2Attention"),
    "mamba2": ("Mamba2Model", "Mamba2ForCausalLM"),
    "minimax": ("MiniMaxModel", "MiniMaxForCausalLM", "MiniMaxAttention", "MiniMaxLightningAttention"),
    "olmo_hybrid": ("OlmoHybridModel", "OlmoHybridForCausalLM", "OlmoHybridAttention"),
    "bailing_hybrid": ("BailingHybridModel", "BailingHybridForCausalLM", "BailingHybridAttention"),
    "lfm2": ("Lfm2Model", "Lfm2ForCausalLM", "Lfm2Attention"),
    "lfm2_moe": ("Lfm2MoeModel", "Lfm2MoeForCausalLM", "Lfm2MoeAttention"),
}
SHORT_CONVOLUTIONS = "lfm2", "lfm2_moe"  # instead of recurrent layers


def sequence_parallel(
    model: nn.Module,
    *,
    comm: Communicator | None,
    layout: str = "contiguous",
    per_document: bool = False,
    merged_attention: bool = True,
    loss_in_slices: bool | Mapping[str, Any] = False,
    mlp_in_slices: int | None = None,
) -> nn.Module:
    """Convert ``model``, in place, so that each rank processes its part of a sequence; returns the model.

    A rank may have no tokens; in zigzag then all ranks have none. transformers' layers reject empty tensors, so such a
    rank runs one padding token, which no other rank receives and no result contains.

    Recurrent layers call their original functions once, with a zero initial state; the contribution of the incoming
    state is linear and is added afterwards. For delta rules the values get K extra columns, which yield the dependence
    of outputs and last state on the initial state. On GPUs, and if ``comm`` has ``invariant``, the layers call
    ``allscan.zeco_kda`` or ``allscan.zeco_gated_delta_rule`` instead. On CPU ranks they otherwise call transformers'
    torch functions, even if fla is installed, since fla's kernels need a GPU. Mamba2 layers call ``allscan.zeco_ssd``
    in place of their own scan, lightning attention ``allscan.zeco_simple_gla``. Short convolutions receive the
    preceding tokens from the ranks before.

    Softmax layers all-gather keys and values; Kimi-Linear's layers all-gather the latents. With "sdpa" as the model's
    attention function, for unpacked sequences without cache or dropout, the rank's own causal block overlaps with the
    all-gather. The blocks of earlier tokens follow without a mask, by PyTorch's cuDNN or FlashAttention kernels, and
    the results are merged. Otherwise the layer calls its attention function ("sdpa", "eager" or FlashAttention) with
    keys in sequence order, once for each sequence of a rank, in zigzag once for each half; with "sdpa" and
    without gradients such a call is a causal block and one of all earlier tokens, too. Each forward pass exchanges
    the ranks' numbers of tokens on the host. At the first batch that does not come from ``cut_batch`` it warns if all
    ranks have the same tokens. Positions continue across shard boundaries; explicit ``position_ids`` are those of this
    rank's tokens, in zigzag ``allscan.zigzag.zigzag_positions``.

    Packed sequences need a batch of one and either ``cu_seq_lens_q`` of the row, equal on every rank, or
    ``position_ids`` of this rank's tokens: a sequence begins wherever they do not rise by 1. Both separate the
    sequences in all layers, even where the ordinary model needs extra packages for it. per_document=True requires
    ``cu_seq_lens_q``, and labels do not cross the end of a sequence; pass ``per_document=True`` to ``cut_batch`` and
    ``allscan.zigzag.zigzag_positions``, too.
    The loss is this rank's share of the mean over the labels of all ranks: the sum over the ranks is the loss
    (DistributedDataParallel and FSDP over all ranks average gradients instead: multiply the loss by ``comm.size``).
    Labels are shifted across shard boundaries. ``num_items_in_batch`` is the number of labels on all ranks, equal on
    every rank.

    ``use_cache`` defaults to False. With ``use_cache=True`` or a cache, on all ranks or on none, every rank's cache is
    that of the row. A cache that is not empty, the same on every rank, has the tokens before the row. Each rank can
    then generate with the ordinary model by itself: ``sequence_parallel(model, comm=None)``. The rank with the last
    token has its logits: the last rank, in zigzag the first.

    Args:
        model: a causal language model of transformers, its text model, or a module around one, of Qwen3-Next, Qwen3.5
            and its mixture of experts, Olmo-Hybrid, Kimi-Linear, Ling 3 (bailing_hybrid), Nemotron-H, Bamba,
            Granite-MoE-hybrid, Falcon-H1, Zamba2, Mamba2, MiniMax, LFM2 or its mixture of experts. Parameters, their
            names and checkpoints stay as they are; its config is replaced by a copy.
        comm: the ranks that share a sequence, in the order of its parts; None restores the ordinary model.
        layout: where a rank's tokens lie, the same on every rank. "contiguous": consecutive tokens in rank order, their
            number may differ between ranks. "zigzag": rank r of P has chunk r of 2P in the first half of its tokens and
            chunk 2P - 1 - r in the second, so that all have the same work in softmax layers: an even number of tokens,
            the same on every rank.
        per_document: for packed sequences in the zigzag layout, equal on every rank. False: the row is cut as a whole.
            True: each sequence is cut into 2P chunks, and rank r has chunks r and 2P - 1 - r of each, sequence after
            sequence, so that all ranks have the same work for any lengths. The caller must make the lengths multiples
            of 2P. The states of all sequences are sent.
        merged_attention: equal on all ranks: True: softmax attention under "sdpa" runs in blocks whose results are
            merged, where kernels for that exist. False: the keys of all ranks are put into sequence order, and one
            kernel runs over the keys up to each query, without a merge.
        loss_in_slices: True: a call with labels computes the loss by ``allscan.integrations.slices.
            linear_cross_entropy``, and its result has no ``logits``. A mapping gives that function's options
            ``slice_tokens``, ``label_smoothing`` and ``z_loss``, alike on all ranks.
        mlp_in_slices: tokens of a slice: MLPs and mixtures of experts run by ``allscan.integrations.slices.
            mlp_in_slices``, slice by slice with recomputation. None: they run whole, also those cut before.

    Returns:
        ``model`` itself, changed.

    Raises:
        ValueError: for unsupported models, with a forward that was replaced (install such hooks afterwards), with hub
            kernels, another attention function or loss, a sliding window, rotary embeddings that depend on the length
            ("dynamic", "longrope"), a z-loss, for other options of ``loss_in_slices``, for ``mlp_in_slices`` with
            MiniMax's jitter of routers, which writes to its input; when called, for a head that was replaced or wrapped
            since, with ``loss_in_slices`` (LoRA of the head, ``resize_token_embeddings``), for an attention mask that
            masks anything (pack instead), for a cache of packed sequences, for ``use_cache=True`` where the last rank,
            in zigzag a half, has fewer tokens than a convolution's kernel, for a cache that is not empty where any
            rank, in zigzag any half, has, or whose tensors require a gradient, for ``output_attentions`` and
            ``output_router_logits``; in zigzag for an odd number of tokens or one that differs between ranks, and for
            ``position_ids`` that begin a sequence with another number than 0; with per_document=True for lengths that
            are no multiples of 2P, and for packed sequences without ``cu_seq_lens_q``.

    Example:
        >>> model = sequence_parallel(Qwen3NextForCausalLM(config).cuda(), comm=comm)
        >>> loss = model(input_ids=tokens[:, mine], labels=tokens[:, mine]).loss      # this rank's share
        >>> loss.backward()                                  # add the gradients up over the ranks of comm
    """
    zigzag = check_split(comm, layout, per_document, merged_attention)
    family, bases, heads, layers = _parts(model)
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    if comm is None:
        _restore(bases, heads, layers)
        cut_mlps(model, family, None)
        return model
    of_loss: Any = {} if isinstance(loss_in_slices, bool) else loss_in_slices
    if not isinstance(of_loss, Mapping) or not {*of_loss} <= {*OF_LOSS}:
        raise ValueError(f"loss_in_slices takes True or a mapping of {', '.join(OF_LOSS)}, got {loss_in_slices!r}")
    check_slice(mlp_in_slices)
    names = vars(modeling).keys()
    recurs = family in SHORT_CONVOLUTIONS or names & RECURRENCES
    if family != "minimax" and ("causal_conv1d_fn" not in names or not recurs):
        raise ValueError(f"{modeling.__name__} has other functions than those to replace: {OTHER_VERSION}")
    for name, operator in OPERATORS.items():
        known = vars(modeling).get(name)
        if known is not None and not isinstance(known, SplitOperator):
            setattr(modeling, name, SplitOperator(known, operator))
    _restore(bases, heads, layers)
    cut_mlps(model, family, mlp_in_slices)
    _separate_configs(model, bases)
    for base, inner in [(base, base.config._attn_implementation) for base in bases]:
        base.set_attn_implementation(NAME)
        base.allscan_inner = inner
        how: dict[str, Any] = dict(per_document=per_document, merged_attention=merged_attention)
        base.forward = functools.partial(_model, base, comm, zigzag, modeling.__name__, inner, **how)
    for layer in layers:
        kind: Any = type(layer)
        if _class_of(layer, family, (3,)):
            layer.forward = functools.partial(lightning_forward, layer)
        else:
            layer.forward = functools.partial(softmax_forward, layer, name_of_cache(kind))
    for head in heads:
        head.loss_function = functools.partial(_loss, comm, zigzag, per_document)
        head.generate = functools.partial(_generate, comm)
        # a subclass may have a forward without one of these
        parameters = inspect.signature(head.forward).parameters
        hooks: list[Any] = []
        if any(x.kind is x.VAR_KEYWORD for x in parameters.values()):
            if "labels" in parameters:
                hooks.append(functools.partial(_with_labels, [*parameters].index("labels")))
            if family == "mamba2":
                hooks.append(functools.partial(_hand_over, head.base_model))
        if loss_in_slices is not False:
            linear: Any = head.get_output_embeddings()
            if getattr(linear.forward, "__func__", None) is not nn.Linear.forward or "labels" not in parameters:
                raise ValueError(f"loss_in_slices is for labels and a head that is an nn.Linear, got {linear}")
            hooks.append(functools.partial(_begin_sliced, comm, [*parameters].index("labels")))
            scale = SCALES[family](head) if family in SCALES else 1.0
            share = functools.partial(_share, comm, zigzag, per_document)
            linear.forward = functools.partial(_sliced_head, linear, head, share, dict(of_loss, scale=scale))
            head.loss_function = functools.partial(_sliced_loss, head)
        head.allscan_hooks = [head.register_forward_pre_hook(hook, with_kwargs=True) for hook in hooks]
        if loss_in_slices is not False:
            head.allscan_hooks.append(head.register_forward_hook(_end_sliced, always_call=True))
    return model


def split_of(model: nn.Module | None) -> tuple[nn.Module, Communicator, str, bool]:
    """(text model, comm, layout, per_document) of a split model; ValueError if the model is not split."""
    for module in model.modules() if model is not None else ():
        forward = vars(module).get("forward")
        if isinstance(forward, functools.partial) and forward.func is _model:
            _, comm, zigzag, *_ = forward.args
            return module, comm, "zigzag" if zigzag else "contiguous", forward.keywords["per_document"]
    raise ValueError("the model is not split: call sequence_parallel(model, comm=comm) first")


def __getattr__(name: str) -> Any:
    if name in ("SequenceParallelMixin", "SequenceParallelTrainer"):  # transformers' Trainer takes seconds to import
        return getattr(importlib.import_module(".transformers_trainer", __package__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _parts(model: Any) -> tuple:
    """(family, text models, causal language models, softmax and lightning attention layers), after all checks."""
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    families = {name for name in FAMILIES for module in models if _class_of(module, name, (0, 1))}
    others = sorted({type(m).__name__ for m in models if not any(_class_of(m, name, (0, 1)) for name in families)})
    if len(families) != 1 or others:
        known = ", ".join(names[1] for names in FAMILIES.values())
        raise ValueError(f"expected one of {known} or its text model, got {others or sorted(families) or 'none'}")
    (family,) = families
    bases, heads = ([m for m in models if _class_of(m, family, (i,))] for i in range(2))
    layers = [module for module in model.modules() if _class_of(module, family, (2, 3))]
    for module in (*bases, *layers):
        replaced = vars(module).get("forward")
        if replaced is not None and getattr(replaced, "func", None) not in (_model, softmax_forward, lightning_forward):
            raise ValueError(
                f"the forward of a {type(module).__name__} was replaced: call sequence_parallel before that"
            )
        if name_of_cache(type(module)) is None:  # type: ignore[arg-type]
            raise ValueError(
                f"the forward of {type(module).__name__} takes no cache called {' or '.join(CACHES)}: {OTHER_VERSION}"
            )
    for base in bases:
        config, inner = base.config, base.config._attn_implementation
        if inner == NAME and "allscan_inner" not in vars(base):
            raise ValueError(f"{OF_SPLIT}: {REMEDY}")
        if inner not in (*INNER, NAME):
            raise ValueError(f"the attention function must be one of {', '.join(INNER)}, got {inner!r}")
        if any(m.use_kernels for m in models):
            raise ValueError("hub kernels (use_kernels) take the place of functions that sequence_parallel calls")
        if getattr(config, "sliding_window", None) or "sliding_attention" in (
            getattr(config, "layer_types", None) or ()
        ):
            raise ValueError("layers with a sliding window are not supported")
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        if rope in ("dynamic", "longrope"):
            raise ValueError(f"rotary embeddings of type {rope!r} depend on how long the sequence of a rank is")
        if not getattr(config, "is_causal", True):
            raise ValueError("attention that is not causal is not supported")
    for head in heads:
        if getattr(head.config, "z_loss_coefficient", 0):
            raise ValueError(
                "z_loss_coefficient must be 0: z-loss is averaged per rank and cannot be summed over ranks"
            )
        of_loss = getattr(head.loss_function, "func", head.loss_function)
        if of_loss not in (ForCausalLMLoss, _loss, _sliced_loss):
            raise ValueError(f"the loss must be ForCausalLMLoss, got {head.loss_function}")
    return family, bases, heads, layers


def _class_of(module: Any, family: Any, which: Any) -> bool:
    """Whether a module is of transformers' class; FSDP2 makes subclasses."""
    names = [name for i, name in enumerate(FAMILIES[family]) if i in which]
    home = f"transformers.models.{family}.modeling_{family}"
    return any(kind.__module__ == home and kind.__name__ in names for kind in type(module).__mro__)


def _separate_configs(model: nn.Module, bases: Any) -> None:
    """Give each text model a copy of its config, which is to name another attention function.

    Other models may have the same config object, and the caller may make more of it.
    """
    own = {id(base.config): copy.deepcopy(base.config) for base in bases}
    for module in model.modules():
        found = vars(module).get("config")
        if id(found) in own:
            module.config = own[id(found)]


def cut_mlps(model: nn.Module, family: str, slice_tokens: int | None) -> None:
    """Let the MLPs and mixtures of experts run in slices, or whole again. Those inside of another run with it."""
    home, inside = f"transformers.models.{family}.modeling_{family}", set[nn.Module]()
    for module in model.modules():
        names = [kind.__name__ for kind in type(module).__mro__ if kind.__module__ == home]
        if module not in inside and any(name.endswith(("MLP", "MoE", "SparseMoeBlock")) for name in names):
            if slice_tokens is not None and getattr(module, "jitter_noise", None):
                raise ValueError("router_jitter_noise must be 0 for mlp_in_slices: it writes to the input of a slice")
            in_slices(module, slice_tokens)
            inside.update(module.modules())


def _restore(bases: Any, heads: Any, layers: Any) -> None:
    for base in bases:
        if "allscan_inner" in vars(base):
            base.set_attn_implementation(vars(base).pop("allscan_inner"))
    for module in (*bases, *layers):
        vars(module).pop("forward", None)
    for head in heads:
        linear: Any = head.get_output_embeddings()
        if getattr(vars(linear).get("forward"), "func", None) is _sliced_head:
            del linear.forward
        for name in ("_loss_function", "generate"):
            vars(head).pop(name, None)
        for hook in vars(head).pop("allscan_hooks", ()):
            hook.remove()


def _generate(comm: Communicator, *_, **__) -> NoReturn:
    """Replaces generate(), whose position_ids would begin with 0 on each rank."""
    reject(comm, "generate() is for the ordinary model: call sequence_parallel(model, comm=None) before it")


def _with_gradient(embedding: nn.Module, arguments: Any, output: Tensor) -> Tensor:
    """Hook after an embedding: its result needs a gradient, even with frozen weights."""
    return output if output.requires_grad else output.detach().requires_grad_()


LABELS = "allscan_labels"  # option of the text model: whether its causal language model was called with labels


def _with_labels(at: int, head: nn.Module, arguments: tuple, options: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Hook before the forward of a causal language model, which does not pass ``labels``, its argument ``at``, to its
    text model."""
    labels = arguments[at] if len(arguments) > at else options.get("labels")
    return arguments, options | {LABELS: labels is not None}


# options that Mamba2's causal language model takes and does not pass to its text model
NOT_PASSED = "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "num_items_in_batch", "shift_labels"
HANDED = "allscan_handed"  # attribute of a text model: such options of the call that follows


def _hand_over(model: Any, head: nn.Module, arguments: tuple, options: dict[str, Any]) -> None:
    """Hook before the forward of Mamba2's causal language model: hand the options over to its text model."""
    vars(model)[HANDED] = {name: options[name] for name in (*NOT_PASSED, STAMP, LABELS) if name in options}


def _tokens_in(cache: Any) -> int | None:
    """The number of tokens in a cache of transformers, None if it is empty; 0 if it has recurrent states alone and does
    not know the number."""
    layers = getattr(cache, "layers", ())
    recurrent = any(any(getattr(layer, "has_previous_state", {}).values()) for layer in layers)
    # cache.get_seq_length() is that of the first layer, in MiniMax also of one without keys
    counts = (int(layer.get_seq_length()) for layer in layers if hasattr(layer, "get_seq_length"))
    tokens = next((count for count in counts if count), 0)
    return tokens if tokens or recurrent or getattr(cache, "linear_cache", None) else None  # MiniMaxCache


def _tensors_of(cache: Any) -> list[torch.Tensor]:
    """The keys, values and states in a cache of transformers."""
    found = [*getattr(cache, "linear_cache", ())]  # MiniMaxCache
    for layer in getattr(cache, "layers", ()):
        for x in vars(layer).values():
            found += x.values() if isinstance(x, dict) else [x]
    return [x for x in found if isinstance(x, torch.Tensor)]


def _model(
    model: Any,
    comm: Communicator,
    zigzag: bool,
    home: str,
    inner: Any,
    input_ids: Tensor | None = None,
    *,
    use_cache: Any = None,
    **options: Any,
) -> Any:
    """The forward of a text model over this rank's tokens. torch.compile traces what follows ``_entered``."""
    inputs, sequence, adds_gradient = _entered(model, comm, zigzag, home, inner, input_ids, use_cache, **options)
    embedding = model.get_input_embeddings() if adds_gradient else None
    with embedding.register_forward_hook(_with_gradient) if embedding is not None else contextlib.nullcontext():
        outputs = type(model).forward(model, **inputs)
    if inputs["use_cache"]:
        _of_last_tokens(outputs, sequence)
    return outputs if sequence.own else _without_padding(outputs)


@dynamo_disabled
def _entered(
    model: Any,
    comm: Communicator,
    zigzag: bool,
    home: str,
    inner: Any,
    input_ids: Tensor | None,
    use_cache: Any,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    cache: Any = None,
    cache_params: Any = None,
    inputs_embeds: Tensor | None = None,
    per_document: bool = False,
    merged_attention: bool = True,
    **options: Any,
) -> tuple[dict[str, Any], SplitSequence, bool]:
    """Check the arguments of ``_model`` and exchange the ranks' tokens: (arguments of the model's own forward, the
    sequence, whether the embedding's result needs a gradient)."""
    comm.order.forwards += 1  # first, so that it counts also if what follows raises on this rank alone
    discard_gathers(comm)
    options |= vars(model).pop(HANDED, {})
    position_ids = options.pop("position_ids", position_ids)
    for name in OPERATORS:
        if not isinstance(vars(sys.modules[home]).get(name), (SplitOperator, type(None))):
            reject(comm, f"{home}.{name} was replaced since sequence_parallel: call it again")
    if model.config._attn_implementation != NAME:  # set_attn_implementation: layers would see this rank's keys alone
        reject(comm, "the attention function was set since sequence_parallel: set it before that, with comm=None first")
    if attention_mask is not None and not (
        isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2 and masks_nothing(attention_mask, comm)
    ):
        reject(comm, "attention_mask masks tokens: pack the sequences instead of padding them")
    cache = next((x for x in (cache, past_key_values, cache_params) if x is not None), None)
    past = None if cache is None else _tokens_in(cache)
    if past is not None and torch.is_grad_enabled() and any(x.requires_grad for x in _tensors_of(cache)):
        reject(comm, "gradients do not pass through a cache: read the pieces of a prompt under torch.no_grad()")
    use_cache = use_cache or cache is not None  # layers fill it in any case
    for name in ("output_attentions", "output_router_logits"):
        option = options.get(name)
        if getattr(model.config, name, False) if option is None else option:
            reject(comm, f"{name} is not supported")
    x: Any = input_ids if inputs_embeds is None else inputs_embeds
    inputs = {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
    shapes = [f"{name} {tuple(getattr(y, 'shape', ()))}" for name, y in inputs.items() if y is not None]
    if len(shapes) != 1 or getattr(x, "ndim", 0) != (2 if inputs_embeds is None else 3):
        what = ", ".join(shapes) or "neither"
        reject(comm, f"expected either input_ids [B, T] or inputs_embeds [B, T, H], got {what}")
    if position_ids is not None and (position_ids.ndim != 2 or position_ids.shape[1] != x.shape[1]):
        reject(comm, f"position_ids must be [B, T] with T = {x.shape[1]}, got {tuple(position_ids.shape)}")
    cu_seqlens = options.pop("cu_seq_lens_q", None)
    if cu_seqlens is None and any(options.get(name) is not None for name in ("seq_idx", "cu_seq_lens_k")):
        reject(comm, "packed sequences are given by cu_seq_lens_q or position_ids")
    wanted = torch.is_grad_enabled() and inputs_embeds is not None and inputs_embeds.requires_grad
    stamp = options.pop(STAMP, None)
    told = stamp, looked_at(comm, input_ids, stamp)
    kernel = max(getattr(model.config, name, 0) for name in KERNELS) if use_cache else -1
    B, T = x.shape[:2]
    labels = options.pop(LABELS, None)
    count, shifted_labels = (options.get(name) for name in ("num_items_in_batch", "shift_labels"))
    alike = Agreed(model, x.device.type, labels, count, shifted_labels, past)
    asked = SequenceOptions(B, T, cu_seqlens, zigzag, per_document, merged_attention, inner, home, alike)
    sequence, wanted_by_any = agree_sequence(comm, asked, position_ids, wanted, told, kernel)
    # another rank's embeddings are trained: with all else frozen this rank would run no backward
    adds_gradient = wanted_by_any and not wanted and torch.is_grad_enabled()
    if adds_gradient and inputs_embeds is not None:
        inputs_embeds = inputs_embeds.detach().requires_grad_()
    if sequence.lengths is not None and use_cache:
        why = BY_POSITIONS if cu_seqlens is None else ""
        reject(comm, f"packed sequences leave no cache: pass use_cache=False{why}")
    if not sequence.own:  # run one padding token
        if inputs_embeds is not None:
            inputs_embeds = F.pad(inputs_embeds, (0, 0, 0, 1))
        elif input_ids is not None:
            input_ids = F.pad(input_ids, (0, 1))
        position_ids = torch.zeros(1, 1, dtype=torch.int64, device=x.device)
    elif position_ids is None and zigzag:
        documents: dict[str, Any] = (
            dict(cu_seqlens=sequence.lengths, per_document=True) if sequence.per_document else {}
        )
        position_ids = zigzag_positions(sequence.own, comm=comm, **documents)[None] + (past or 0)
    elif position_ids is None:
        first = sequence.first + (past or 0)
        position_ids = torch.arange(first, first + sequence.own, device=x.device)[None]
    for name in ("cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"):
        options.pop(name, None)
    kind: Any = type(model)
    passed: Any = {name_of_cache(kind): cache, SEQUENCE: sequence, "use_cache": bool(use_cache), **options}
    passed |= dict(input_ids=input_ids, position_ids=position_ids, inputs_embeds=inputs_embeds)
    return passed, sequence, adds_gradient and inputs_embeds is None


@dynamo_disabled
def _of_last_tokens(outputs: Any, sequence: SplitSequence) -> None:
    """Write the row's last convolution states into the cache among a model's outputs."""
    found = outputs if isinstance(outputs, tuple) else outputs.values()
    for cache in (x for x in found if hasattr(x, "layers")):
        for layer in cache.layers:
            for state in getattr(layer, "conv_states", {}).values():
                if state is not None:
                    with torch.no_grad():
                        state.copy_(of_last_tokens([state], sequence.comm, sequence.zigzag)[0])


def _without_padding(outputs: Any) -> Any:
    """A model's outputs without the padding token: hidden states have no tokens."""
    if isinstance(outputs, torch.Tensor):
        return outputs[:, :0]
    if isinstance(outputs, ModelOutput):
        for name in ("last_hidden_state", "hidden_states"):
            if outputs.get(name) is not None:
                outputs[name] = _without_padding(outputs[name])
        return outputs
    return tuple(_without_padding(x) if isinstance(x, (torch.Tensor, tuple)) else x for x in outputs)


KERNELS = (
    "linear_conv_kernel_dim",
    "conv_kernel",
    "mamba_d_conv",
    "conv_L_cache",
)  # names of the convolution's kernel size in configs


def _share(
    comm: Communicator,
    zigzag: bool,
    per_document: bool,
    labels: Tensor,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Any = None,
    cu_seq_lens_q: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, int, Any]:
    """Options of a loss function: (the labels of this rank's tokens, shifted; ignore_index; number by which the sum is
    divided, None for the labels of all ranks)."""
    if shift_labels is None:
        documents = cu_seq_lens_q if per_document else None
        documents = None if documents is None else without_empty(boundaries_on_host(boundaries(documents)))
        shift_labels = shifted(labels, ignore_index, comm, zigzag, documents)
    return shift_labels, ignore_index, num_items_in_batch


def _loss(
    comm: Communicator,
    zigzag: bool,
    per_document: bool,
    logits: Tensor,
    labels: Any,
    vocab_size: int,
    **options: Any,
) -> torch.Tensor:
    """ForCausalLMLoss; returns this rank's share of the loss."""
    shift_labels, ignore_index, count = _share(comm, zigzag, per_document, labels, **options)
    if count is None:
        count = (shift_labels != ignore_index).sum()
        if comm.size > 1:
            dist.all_reduce(count, group=comm.group)
    # ForCausalLMLoss views the labels; a rank's part of several rows is strided
    options |= dict(shift_labels=shift_labels.contiguous(), num_items_in_batch=count)
    return ForCausalLMLoss(logits, labels, vocab_size, **options)


# The loss in slices. The head's own forward computes it, since FSDP2 may have sharded the head by itself

OF_LOSS = "slice_tokens", "label_smoothing", "z_loss"  # options of linear_cross_entropy that loss_in_slices takes
SLICED = "allscan_sliced"  # attribute of a causal language model in a call with labels: its labels, options and loss
SCALES: dict[str, Any] = {  # factors of the logits, outside of the head
    "granitemoehybrid": lambda model: 1 / model.config.logits_scaling,
    "falcon_h1": lambda model: model.base_model.lm_head_multiplier,
}


def _begin_sliced(comm: Communicator, at: int, model: Any, arguments: tuple, options: dict[str, Any]) -> None:
    """Hook before the forward of a causal language model, whose argument ``at`` is ``labels``."""
    labels = arguments[at] if len(arguments) > at else options.get("labels")
    keep = options.get("logits_to_keep", 0)
    if labels is not None and (isinstance(keep, Tensor) or keep):
        reject(comm, "loss_in_slices takes all of a rank's tokens: logits_to_keep is for calls without labels")
    vars(model)[SLICED] = None if labels is None else dict(options, labels=labels)


def _sliced_head(linear: Any, model: Any, share: Any, of_loss: dict[str, Any], x: Tensor) -> torch.Tensor:
    """The forward of a language model's head: with labels the loss, in place of logits."""
    given = vars(model).get(SLICED)
    if given is None:
        return type(linear).forward(linear, x)
    labels, ignore_index, count = share(**given)
    how = dict(of_loss, bias=linear.bias, ignore_index=ignore_index, comm=share.args[0], num_items=count)
    given["loss"] = linear_cross_entropy(x, linear.weight, labels.to(x.device), **how)
    return given["loss"]


def _sliced_loss(model: Any, logits: Any, *_: Any, **__: Any) -> torch.Tensor:
    """The loss function of a causal language model: what its head has computed. ``logits`` are that, multiplied."""
    loss = vars(model)[SLICED].get("loss")
    if loss is None or logits.ndim:
        raise ValueError("the head was replaced or wrapped after sequence_parallel(..., loss_in_slices=)")
    return loss


def _end_sliced(model: Any, arguments: tuple, outputs: Any) -> Any:
    """Hook after the forward of a causal language model: take the place of the logits out of its result, which is None
    if the forward has raised."""
    if vars(model).pop(SLICED, None) is None or outputs is None:
        return outputs
    if isinstance(outputs, tuple):
        return outputs[:1] + outputs[2:]
    return type(outputs)(**{name: x for name, x in outputs.items() if name != "logits"})


def require_logits(outputs: Any) -> None:
    """Raise ValueError for the result of a call with labels of a model with loss_in_slices, which has no logits."""
    if isinstance(outputs, ModelOutput) and "loss" in outputs and "logits" not in outputs:
        raise ValueError("loss_in_slices leaves no logits for metrics or predictions: pass prediction_loss_only=True")
