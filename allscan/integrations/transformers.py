"""Sequence parallelism for transformers' own models (tested with 5.23.0): Gated DeltaNet, KDA and Mamba2 layers, and
their hybrids with softmax attention."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right

from ..base.checks import boundaries
from ..comm.communicator import Communicator
from ..comm.host_exchange import by_rank
from ..ops.allscan import Using
from ..ops.delta import zeco_gated_delta_rule, zeco_kda
from ..ops.ssd import zeco_ssd
from ..tokens.packing import TokenRange, boundaries_on_host, cut, document_places, without_empty
from ..zigzag import zigzag_positions
from . import needing
from .attention import (
    WHOLE,
    Attention,
    Later,
    attend,
    check_split,
    kernel_for,
    packed,
    packed_documents,
    takes_packed,
)
from .batches import DOCUMENTS, STAMP, documents_misfit, looked_at, misfit
from .batches import cut_batch as cut_batch
from .recurrent import convolved, delta_rule, of_last_tokens
from .softmax import Gather, chunks, documents_in_order, masks_nothing, reject, shifted

with needing(__name__, "transformers"):
    from transformers import AttentionInterface, PreTrainedModel
    from transformers.loss.loss_utils import ForCausalLMLoss
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.utils import ModelOutput

NAME = "allscan"  # of the attention function
SEQUENCE = "allscan_sequence"  # the argument by which the model's forward tells its layers
CACHES = ("cache", "past_key_values")  # what forwards call their cache: from transformers 5.24 on, and before
INNER = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4")
# model, causal language model and softmax layer of each file in transformers.models
FAMILIES = {
    "qwen3_next": ("Qwen3NextModel", "Qwen3NextForCausalLM", "Qwen3NextAttention"),
    "qwen3_5": ("Qwen3_5TextModel", "Qwen3_5ForCausalLM", "Qwen3_5Attention"),
    "qwen3_5_moe": ("Qwen3_5MoeTextModel", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeAttention"),
    "kimi_linear": ("KimiLinearModel", "KimiLinearForCausalLM", "KimiLinearAttention"),
    "nemotron_h": ("NemotronHModel", "NemotronHForCausalLM", "NemotronHAttention"),
    "bamba": ("BambaModel", "BambaForCausalLM", "BambaAttention"),
    "granitemoehybrid": ("GraniteMoeHybridModel", "GraniteMoeHybridForCausalLM", "GraniteMoeHybridAttention"),
    "falcon_h1": ("FalconH1Model", "FalconH1ForCausalLM", "FalconH1Attention"),
}


def sequence_parallel(
    model: nn.Module,
    *,
    comm: Communicator | None,
    layout: str = "contiguous",
    per_document: bool = False,
    attention: Attention = WHOLE,
) -> nn.Module:
    """Let ``model``, in place, take this rank's part of each sequence where it took the whole; returns it.

    A rank may have no tokens, in zigzag all of them: it runs one token of padding, which no other rank sees and no
    result has, since transformers' layers take none.

    Recurrent layers call the functions that they would have called, once, from zero: what the state before this rank's
    tokens adds is linear in it. For delta rules values get K columns more, which give how outputs and the last state
    depend on the first; where the function is fla's, on GPUs, it is ``allscan.zeco_kda`` or
    ``allscan.zeco_gated_delta_rule`` instead. Mamba2's layers call ``allscan.zeco_ssd`` around theirs. The
    tokens that short convolutions look back at come from the ranks before. Softmax layers gather keys and values, of
    Kimi-Linear the latents, of all ranks. With "sdpa" as the model's attention function, for whole sequences without a
    cache or dropout, a rank's own causal block runs meanwhile, then those of earlier tokens, which need no mask, by
    cuDNN's or FlashAttention's kernels as PyTorch has them; what they give is merged. Else that function ("sdpa",
    "eager" or FlashAttention) is called with keys in the order of the sequence, once for each sequence of a rank, in
    zigzag for each half. Each forward pass asks on the host how
    many tokens the ranks have. Positions go on over the cuts; ``position_ids`` of one's own are those of this rank's
    tokens, in zigzag ``allscan.zigzag.zigzag_positions``.

    Packed sequences, in a batch of one: ``cu_seq_lens_q`` of the whole, the same on every rank, or ``position_ids`` of
    this rank's tokens, which begin a sequence wherever they do not rise by 1. Either keeps sequences apart in all
    layers, also where the ordinary model would need packages for it. With per_document=True it is ``cu_seq_lens_q``,
    and labels do not reach over the end of a sequence; ``cut_batch`` and
    ``allscan.zigzag.zigzag_positions`` cut such rows, if they are told ``per_document=True``, too.
    The loss is this rank's share of the mean over the labels of all ranks: the sum over the ranks is the loss
    (DistributedDataParallel and FSDP over all ranks average gradients instead: multiply the loss by ``comm.size``).
    Labels are shifted across the cuts. ``num_items_in_batch`` is the number of labels on all ranks.

    ``use_cache`` is False unless it is given. With ``use_cache=True``, on all ranks or on none, every rank's cache is
    that of the whole, which the ordinary model goes on from, each rank by itself: ``sequence_parallel(model,
    comm=None)``. The logits of the last token are on the rank that has it: the last one, in zigzag the first.

    Args:
        model: a causal language model of transformers, its text model, or a module around one, of Qwen3-Next, Qwen3.5
            and its mixture of experts, Kimi-Linear, Nemotron-H, Bamba, Granite-MoE-hybrid or Falcon-H1. Parameters,
            their names and checkpoints stay as they are.
        comm: the ranks that share a sequence, in the order of its parts; None makes the model an ordinary one again.
        layout: where a rank's tokens lie, the same on every rank. "contiguous": consecutive tokens in rank order, their
            number may differ between ranks. "zigzag": rank r of P has chunk r of 2P in the first half of its tokens and
            chunk 2P - 1 - r in the second, so that all have the same work in softmax layers: an even number of tokens,
            the same on every rank.
        per_document: of packed sequences in the zigzag layout, the same on every rank. False: the row of all is cut.
            True: each sequence is cut into 2P chunks of its own, and a rank has r and 2P - 1 - r of each, one sequence
            behind the other, so that all have the same work whatever the lengths are: multiples of 2P, of which the
            caller takes care. The states of all sequences are sent then.
        attention: how softmax layers run, see ``allscan.integrations.attention.Attention``.

    Raises:
        ValueError: for models of another kind or around one, with a forward that was replaced (hooks that do so come
            after), with hub kernels, another attention function or loss, a sliding window, rotary embeddings that
            depend on the length ("dynamic", "longrope"), a z-loss, for a limit of memory without merged blocks under
            "sdpa"; when called, for an attention mask that masks anything (pack instead), for a cache that is not empty
            or of packed sequences, for ``use_cache=True`` where the last rank, in zigzag a half, has fewer tokens than
            a convolution's kernel, for ``output_attentions`` and ``output_router_logits``; with a limit of memory for
            ``use_cache=True``, packed sequences, dropout and dtypes without a kernel; in zigzag for an odd number of
            tokens or one that differs between ranks, and for ``position_ids`` that begin a sequence with another number
            than 0; with per_document=True for lengths that are no multiples of 2P, and for packed sequences without
            ``cu_seq_lens_q``.

    Example:
        >>> model = sequence_parallel(Qwen3NextForCausalLM(config).cuda(), comm=comm)
        >>> loss = model(input_ids=tokens[:, mine], labels=tokens[:, mine]).loss      # this rank's share
        >>> loss.backward()                                  # add the gradients up over the ranks of comm
    """
    zigzag = check_split(comm, layout, per_document, attention)
    family, bases, heads, layers = _parts(model)
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    if comm is None:
        _restore(bases, heads, layers)
        return model
    for name, operator in OPERATORS.items():
        known = vars(modeling).get(name)
        if known is not None and not isinstance(known, _Operator):
            setattr(modeling, name, _Operator(known, operator))
    _restore(bases, heads, layers)
    if attention.memory is not None:
        functions = {base.config._attn_implementation for base in bases}
        if not attention.merged or functions != {"sdpa"}:
            raise ValueError(
                f'attention.memory is for merged=True and the function "sdpa", got {attention}, {functions}'
            )
    for base in bases:
        inner = base.config._attn_implementation
        base.set_attn_implementation(NAME)
        base.allscan_inner = inner
        how = dict(per_document=per_document, attention=attention)
        base.forward = functools.partial(_model, base, comm, zigzag, modeling.__name__, inner, **how)
    for layer in layers:
        layer.forward = functools.partial(_softmax, layer)
    for head in heads:
        head.loss_function = functools.partial(_loss, comm, zigzag, per_document)
    return model


def split_of(model: nn.Module | None) -> tuple[nn.Module, Communicator, str, bool]:
    """(The text model, comm, layout, per_document) of a model that is split; ValueError for one that is not."""
    for module in model.modules() if model is not None else ():
        forward = vars(module).get("forward")
        if isinstance(forward, functools.partial) and forward.func is _model:
            _, comm, zigzag, *_ = forward.args
            return module, comm, "zigzag" if zigzag else "contiguous", forward.keywords["per_document"]
    raise ValueError("the model is not split: call sequence_parallel(model, comm=comm) first")


def __getattr__(name) -> Any:
    if name == "SequenceParallelTrainer":  # transformers' Trainer takes seconds to import
        return importlib.import_module(".transformers_trainer", __package__).SequenceParallelTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _parts(model) -> tuple:
    """(family, text models, causal language models, softmax layers), after all checks."""
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    families = {name for name in FAMILIES for module in models if _class_of(module, name, (0, 1))}
    others = sorted({type(m).__name__ for m in models if not any(_class_of(m, name, (0, 1)) for name in families)})
    if len(families) != 1 or others:
        known = ", ".join(names[1] for names in FAMILIES.values())
        raise ValueError(f"expected one of {known} or its text model, got {others or sorted(families) or 'none'}")
    (family,) = families
    bases, heads = ([m for m in models if _class_of(m, family, (i,))] for i in range(2))
    layers = [module for module in model.modules() if _class_of(module, family, (2,))]
    for module in (*bases, *layers):
        replaced = vars(module).get("forward")
        if replaced is not None and getattr(replaced, "func", None) not in (_model, _softmax):
            raise ValueError(
                f"the forward of a {type(module).__name__} was replaced: call sequence_parallel before that"
            )
        if _name_of_cache(type(module)) is None:  # type: ignore[arg-type]
            raise ValueError(
                f"the forward of {type(module).__name__} takes no cache called {' or '.join(CACHES)}: this version of "
                "transformers is not covered"
            )
    for base in bases:
        config, inner = base.config, base.config._attn_implementation
        if inner == NAME and "allscan_inner" not in vars(base):
            raise ValueError("another model that is split has the same config: give each a copy of its own")
        if inner not in (*INNER, NAME):
            raise ValueError(f"the attention function must be one of {', '.join(INNER)}, got {inner!r}")
        if any(m.use_kernels for m in models):
            raise ValueError("hub kernels (use_kernels) take the place of functions that sequence_parallel calls")
        if getattr(config, "sliding_window", None) or "sliding_attention" in (
            getattr(config, "layer_types", None) or ()
        ):
            raise ValueError("layers with a sliding window are not covered")
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        if rope in ("dynamic", "longrope"):
            raise ValueError(f"rotary embeddings of type {rope!r} depend on how long the sequence of a rank is")
        if not getattr(config, "is_causal", True):
            raise ValueError("attention that is not causal is not covered")
    for head in heads:
        if getattr(head.config, "z_loss_coefficient", 0):
            raise ValueError("z_loss_coefficient must be 0: the mean over one rank's tokens is no share of the loss")
        if head.loss_function is not ForCausalLMLoss and getattr(head.loss_function, "func", None) is not _loss:
            raise ValueError(f"the loss must be ForCausalLMLoss, got {head.loss_function}")
    return family, bases, heads, layers


def _class_of(module, family, which) -> bool:
    """Whether a module is of transformers' class; FSDP2 makes subclasses."""
    names = [FAMILIES[family][i] for i in which]
    home = f"transformers.models.{family}.modeling_{family}"
    return any(kind.__module__ == home and kind.__name__ in names for kind in type(module).__mro__)


@functools.cache
def _name_of_cache(kind: Any) -> str | None:
    """What the forward of a class of models or softmax layers calls its cache."""
    parameters = inspect.signature(kind.forward).parameters
    return next((name for name in CACHES if name in parameters), None)


def _restore(bases, heads, layers) -> None:
    for base in bases:
        if "allscan_inner" in vars(base):
            base.set_attn_implementation(vars(base).pop("allscan_inner"))
    for module in (*bases, *layers):
        vars(module).pop("forward", None)
    for head in heads:
        vars(head).pop("_loss_function", None)


class _Part(NamedTuple):
    """Tokens start .. end - 1 of this rank, consecutive ones of a sequence: in the whole that begins with the token
    ``begin``, and they end before ``last``. half: see TokenRange.state_index."""

    start: int
    end: int
    half: int
    begin: int
    last: int

    @property
    def before(self) -> int:
        """Tokens of the sequence before these."""
        return self.last - self.begin - (self.end - self.start)


@dataclasses.dataclass(frozen=True, eq=False)
class _Sequence:
    """What the layers are told: where this rank's tokens lie."""

    comm: Communicator
    tokens: list[int]  # of each rank
    lengths: torch.Tensor | None  # cu_seqlens of the whole, on the CPU
    inner: str  # the attention function that the model had
    zigzag: bool = False
    per_document: bool = False  # each of packed sequences, of which none is empty, is cut
    attention: Attention = WHOLE
    keys: Any = None  # _Keys of the softmax layer that is told

    @property
    def first(self) -> int:
        """Where in the whole this rank's tokens begin."""
        return sum(self.tokens[: self.comm.rank]) // (1 + self.zigzag)

    @property
    def own(self) -> int:
        return self.tokens[self.comm.rank]

    def chunks(self) -> list[tuple[int, int, int]]:
        """(rank, first token, end) of the ranks' parts, in the order of the whole."""
        return chunks(self.tokens, self.zigzag)

    def parts(self) -> list[_Part]:
        """Of the sequences on this rank that are not empty."""
        own, parts, start = [(a, b) for rank, a, b in self.chunks() if rank == self.comm.rank], [], 0
        lengths = None if self.lengths is None else boundaries_on_host(self.lengths)
        if lengths is not None and self.per_document and self.own:
            for i, (first, end) in enumerate(document_places(lengths, self.comm.rank, self.comm.size)):
                parts.append(_Part(start, start + end - first, i, lengths[i // 2], end))
                start += end - first
            return parts
        for half, (first, end) in enumerate(own):
            if lengths is None or not self.own:
                parts.append(_Part(start, start + end - first, half, 0, end))  # what comes goes on
            else:
                parts += [
                    _Part(start + p.start, start + p.end, half, lengths[p.sequence], first + p.end)
                    for p in cut(lengths, first, end - first)
                    if p.end > p.start
                ]
            start += end - first
        return parts

    def cut(self) -> list[TokenRange]:
        return [TokenRange.of(p.start, p.end, p.half, begins=p.before == 0) for p in self.parts()]

    def where(self) -> dict:
        return dict(
            cu_seqlens=self.lengths,
            first_token=None if self.lengths is None else self.first,
            layout="zigzag" if self.zigzag else "contiguous",
            per_document=self.per_document,
        )


def _model(
    model,
    comm,
    zigzag,
    home,
    inner,
    input_ids=None,
    *,
    attention_mask=None,
    position_ids=None,
    past_key_values=None,
    cache=None,
    inputs_embeds=None,
    use_cache=None,
    per_document=False,
    attention=WHOLE,
    **options,
) -> Any:
    """The forward of a text model over this rank's tokens."""
    for name in OPERATORS:
        if not isinstance(vars(sys.modules[home]).get(name), (_Operator, type(None))):
            reject(comm, f"{home}.{name} was replaced since sequence_parallel: call it again")
    if attention_mask is not None and not (
        isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2 and masks_nothing(attention_mask, comm)
    ):
        reject(comm, "attention_mask masks tokens: pack the sequences instead of padding them")
    cache = past_key_values if cache is None else cache
    if cache is not None and cache.get_seq_length():
        reject(comm, "past_key_values must be empty: the state before the first rank's tokens is taken as zero")
    for name in ("output_attentions", "output_router_logits"):
        given = options.get(name)
        if getattr(model.config, name, False) if given is None else given:
            reject(comm, f"{name} is not covered")
    x = input_ids if inputs_embeds is None else inputs_embeds
    if position_ids is not None and (position_ids.ndim != 2 or position_ids.shape[1] != x.shape[1]):
        reject(comm, f"position_ids must be [B, T] with T = {x.shape[1]}, got {tuple(position_ids.shape)}")
    cu_seqlens = options.pop("cu_seq_lens_q", None)
    if cu_seqlens is None and any(options.get(name) is not None for name in ("seq_idx", "cu_seq_lens_k")):
        reject(comm, "packed sequences are given by cu_seq_lens_q or position_ids")
    if attention.memory is not None and use_cache:
        reject(comm, "use_cache=True needs all keys at once: attention.memory must be None")
    wanted = torch.is_grad_enabled() and inputs_embeds is not None and inputs_embeds.requires_grad
    stamp = options.pop(STAMP, None), looked_at(comm, input_ids)
    kernel = max(getattr(model.config, name, 0) for name in KERNELS) if use_cache else 0
    B, T = x.shape[:2]
    asked = _Asked(B, T, cu_seqlens, zigzag, per_document, attention, inner)
    sequence, wanted_by_any = _sequence(comm, asked, position_ids, wanted, stamp, kernel)
    if wanted_by_any and not wanted and torch.is_grad_enabled():
        # another rank has learned tokens, which these see: where all else is frozen no backward would run here
        x = model.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        input_ids, inputs_embeds = None, x if x.requires_grad else x.detach().requires_grad_()
    if sequence.lengths is not None and attention.memory is not None:
        reject(comm, "packed sequences take all keys at once: attention.memory must be None")
    if sequence.lengths is not None and use_cache:
        reject(comm, "packed sequences leave no cache: pass use_cache=False")
    if not sequence.own:  # one token of padding
        if inputs_embeds is None:
            input_ids = F.pad(input_ids, (0, 1))
        else:
            inputs_embeds = F.pad(inputs_embeds, (0, 0, 0, 1))
        position_ids = torch.zeros(1, 1, dtype=torch.int64, device=x.device)
    elif position_ids is None and zigzag:
        documents: dict[str, Any] = (
            dict(cu_seqlens=sequence.lengths, per_document=True) if sequence.per_document else {}
        )
        position_ids = zigzag_positions(sequence.own, comm=comm, **documents)[None]
    elif position_ids is None:
        position_ids = torch.arange(sequence.first, sequence.first + sequence.own, device=x.device)[None]
    for name in ("cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"):
        options.pop(name, None)
    outputs = type(model).forward(
        model,
        input_ids=input_ids,
        position_ids=position_ids,
        inputs_embeds=inputs_embeds,
        use_cache=bool(use_cache),
        **{_name_of_cache(type(model)): cache, SEQUENCE: sequence},  # type: ignore[arg-type]
        **options,
    )
    if use_cache:
        _of_last_tokens(outputs if isinstance(outputs, tuple) else outputs.values(), sequence)
    return outputs if sequence.own else _without_padding(outputs)


def _of_last_tokens(outputs, sequence) -> None:
    """Let the cache among a model's outputs have the convolutions' states of the whole."""
    for cache in (x for x in outputs if hasattr(x, "layers")):
        for layer in cache.layers:
            for state in getattr(layer, "conv_states", {}).values():
                if state is not None:
                    with torch.no_grad():
                        state.copy_(of_last_tokens([state], sequence.comm, sequence.zigzag)[0])


def _without_padding(outputs) -> Any:
    """A model's outputs, or hidden states among them, with no tokens in place of one."""
    if isinstance(outputs, torch.Tensor):
        return outputs[:, :0]
    if isinstance(outputs, ModelOutput):
        for name in ("last_hidden_state", "hidden_states"):
            if outputs.get(name) is not None:
                outputs[name] = _without_padding(outputs[name])
        return outputs
    return tuple(_without_padding(x) if isinstance(x, (torch.Tensor, tuple)) else x for x in outputs)


KERNELS = "linear_conv_kernel_dim", "conv_kernel", "mamba_d_conv"  # of convolutions, in configs


class _Asked(NamedTuple):
    """What a rank says of its tokens and of how they are cut."""

    B: int
    T: int
    cu_seqlens: Any
    zigzag: bool
    per_document: bool
    attention: Attention
    inner: str


def _sequence(comm, asked: _Asked, position_ids, wanted, stamp, kernel) -> tuple[_Sequence, bool]:
    """(The sequence, whether any rank's embeddings want a gradient), by asking; ``wanted``: this one's do; ``stamp``:
    of the batch, what it says and what is seen of it (batches.py); ``kernel``: tokens that the convolutions' states
    have, 0 without a cache."""
    B, T, cu_seqlens, zigzag, per_document, attention, inner = asked
    with comm.call():
        lengths = None if cu_seqlens is None else boundaries_on_host(boundaries(cu_seqlens))
        rises, begun = None, []  # with which position_ids sequences begin
        if lengths is None and position_ids is not None:
            rises = [_rises(half) for half in position_ids.chunk(1 + zigzag, -1)] if T else []
        layout = DOCUMENTS if per_document else "zigzag" if zigzag else "contiguous"
        told = B, T, lengths, rises, layout, wanted, *stamp, kernel, list(attention)
        answers = comm.order.exchange(told, "the tokens of each rank")
        rows, tokens, _, _, _, _, stamps, contents, kernels, kinds = map(list, zip(*answers, strict=True))
        if len(set(kernels)) > 1:
            why = f"use_cache differs between ranks: {by_rank(bool(kernel) for kernel in kernels)}"
            raise comm.order.raised_everywhere(ValueError(why))
        last = tokens[0] // 2 if zigzag else tokens[-1]
        if last < kernel:  # the layers make the state of these tokens alone
            where = "half of the first rank's tokens" if zigzag else "the last rank"
            why = f"with a cache {where} must have as many tokens as a convolution's kernel, got {last}"
            raise comm.order.raised_everywhere(ValueError(why))
        if len({answer[4] for answer in answers}) > 1:
            given = by_rank(answer[4] for answer in answers)
            raise comm.order.raised_everywhere(ValueError(f"layout differs between ranks: {given}"))
        if any(kind != kinds[0] for kind in kinds):
            different = by_rank(Attention(*kind) for kind in kinds)
            raise comm.order.raised_everywhere(ValueError(f"attention differs between ranks: {different}"))
        cut_row = per_document and lengths is None  # of one sequence
        problem = misfit(comm, rows, tokens, "zigzag" if cut_row else layout, stamps, contents)
        if problem is not None:
            raise comm.order.raised_everywhere(ValueError(problem))
        if zigzag and (len(set(tokens)) > 1 or tokens[0] % 2):
            wanted = "an even number of tokens, the same on every rank"
            raise comm.order.raised_everywhere(ValueError(f"the zigzag layout wants {wanted}, got {by_rank(tokens)}"))
        if any(list(answer[2] or ()) != list(lengths or ()) for answer in answers):
            given = by_rank(answer[2] for answer in answers)
            raise comm.order.raised_everywhere(ValueError(f"cu_seq_lens_q differs between ranks: {given}"))
        if len({answer[3] is None for answer in answers}) > 1:
            raise comm.order.raised_everywhere(ValueError("position_ids must be given on every rank or on none"))
        if rises is not None:
            found, before = [], None  # where position_ids do not rise by 1
            halves = [iter(answer[3]) for answer in answers]
            for rank, first, last in chunks(tokens, zigzag):
                if first == last:
                    continue
                here, positions, (start, end) = next(halves[rank])
                if before is None or any(a != b + 1 for a, b in zip(start, before, strict=True)):
                    found.append(first)
                    begun += start
                found += [first + i for i in here]
                begun += itertools.chain(*positions)
                before = end
            lengths = (*found, sum(tokens)) if len(found) > 1 else None
        if lengths is not None and cut_row:
            problem = f"with per_document=True packed sequences are told by cu_seq_lens_q, got position_ids {begun}"
        elif lengths is not None and zigzag and any(begun):  # as where they are those of another layout
            problem = f"in the zigzag layout position_ids of packed sequences begin with 0, got {lengths[:-1]}"
            problem = f"{problem} of the whole at positions {begun}: see allscan.zigzag.zigzag_positions"
        elif lengths is not None and (lengths[0] != 0 or any(a > b for a, b in zip(lengths, lengths[1:]))):
            problem = f"cu_seq_lens_q must rise from 0, got {lengths}"
        elif lengths is not None and lengths[-1] != sum(tokens):
            problem = f"cu_seq_lens_q must end with the {sum(tokens)} tokens of all ranks, got {lengths[-1]}"
        elif lengths is not None and B != 1:
            problem = f"packed sequences must be in a batch of one, got {B}"
        elif per_document and not cut_row:
            problem = documents_misfit(lengths, comm.size, sum(tokens))
        if problem is not None:
            raise comm.order.raised_everywhere(ValueError(problem))
        per_document = per_document and not cut_row
        if lengths is not None and per_document:
            lengths = without_empty(lengths)
        cuts = None if lengths is None else torch.tensor(lengths, device="cpu")
        sequence = _Sequence(comm, tokens, cuts, inner, zigzag, per_document, attention)
        return sequence, any(answer[5] for answer in answers)


def _rises(position_ids) -> tuple[list[int], list, list]:
    """(where they do not rise by 1, what each row has there, (the first of each row, the last)); waits for the GPU."""
    breaks = (position_ids.diff(dim=-1) != 1).any(0).nonzero()[:, 0] + 1
    return breaks.tolist(), position_ids[:, breaks].mT.tolist(), position_ids[:, [0, -1]].mT.tolist()


class _Operator:
    """A function that a model's file calls by its name, in place of it: over the ranks where it is told so."""

    def __init__(self, original, split) -> None:
        self.original, self.split = original, split
        functools.update_wrapper(self, original)

    def __call__(self, *arguments, **options) -> Any:
        sequence = options.pop(SEQUENCE, None)
        if sequence is None:
            return self.original(*arguments, **options)
        return self.split(self.original, sequence, *arguments, **options)


def _convolution(original, sequence, x, weight, bias=None, activation=None, **_) -> torch.Tensor:
    """x [B, channels, tokens], the last of which are this rank's."""
    n, x = weight.shape[-1] - 1, x if x.shape[2] == sequence.own else x[:, :, x.shape[2] - sequence.own :]
    if not n:
        return original(x, weight, bias, activation=activation)

    def conv(x) -> torch.Tensor:
        return original(x.mT, weight, bias, activation=activation).mT

    y = convolved(conv, n, x.mT, sequence.cut(), comm=sequence.comm, **sequence.where())
    return _padded(y, sequence).mT


def _own(sequence, *tensors) -> Sequence[torch.Tensor | None]:
    """[B, T, ...] of this rank's tokens, without one of padding."""
    return tensors if sequence.own else [x if x is None else x[:, :0] for x in tensors]


def _padded(x, sequence) -> torch.Tensor:
    """x [B, T, ...] with what the model's layers go on with: on a rank without tokens zeros of one."""
    return x if sequence.own else F.pad(x, (0, 0) * (x.ndim - 2) + (0, 1))


def _fused(original, sequence, *_, **__) -> None:
    """mamba_ssm's kernel of a whole layer: not over ranks; the layer goes on with its parts."""


def _state_space(
    original,
    sequence,
    x,
    dt,
    A,
    B,
    C,
    chunk_size,
    *,
    D=None,
    dt_bias=None,
    dt_softplus=False,
    z=None,
    dt_limit=(0.0, float("inf")),
    return_final_states=False,
    initial_states=None,
    **_,
) -> Any:
    def scan(x, dt, A, B, C, chunk_size, D, seq_idx, return_final_states) -> Any:
        options = dict(chunk_size=chunk_size, D=D, return_final_states=return_final_states)
        if seq_idx is None or of_package(original) is not None:
            return original(x, dt, A, B, C, seq_idx=seq_idx, **options)
        outputs, state = [], None
        for start, end, *_ in sequence.parts():  # torch's own function takes one sequence
            y, state = original(*(t[:, start:end] for t in (x, dt)), A, *(t[:, start:end] for t in (B, C)), **options)
            outputs.append(y)
        return torch.cat(outputs, 1), state

    x, dt, B, C, z = _own(sequence, x, dt, B, C, z)
    found = zeco_ssd(
        x,
        dt,
        A,
        B,
        C,
        chunk_size,
        comm=sequence.comm,
        D=D,
        z=z,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
        return_final_states="all" if return_final_states else False,
        chunk_scan=scan,
        **sequence.where(),
    )
    return (_padded(found[0], sequence), found[1]) if return_final_states else _padded(found, sequence)


def of_package(function) -> Callable | None:
    """fla's or mamba_ssm's function that one of a model's file calls, None where that is transformers' own, in torch:
    only the former take packed sequences in one call."""
    inside = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    found = inside.get("implementation")  # of use_kernel_func_from_hub_with_fallback
    return None if found is inside.get("torch_function") else found


def ours(function, device, options) -> Callable | None:
    """All-Scan's operator in place of a model's delta rule, or None where it is not the same: it is where that is fla's
    on a GPU, and ours knows all options that fla's would be given."""
    theirs: Any = of_package(function)
    found: Any = OURS.get(getattr(theirs, "__name__", ""))
    if found is None or not theirs.__module__.startswith("fla.") or not on_gpu(device):
        return None
    known, taken = (inspect.signature(f).parameters for f in (found, theirs))
    return found if all(name in known for name in options if name in taken) else None


def on_gpu(device) -> bool:
    """Whether tensors there are in the memory of a GPU; the tests replace it."""
    return device.type == "cuda"


def _delta_rule(
    original,
    sequence,
    query,
    key,
    value,
    g,
    beta,
    *,
    initial_state=None,
    output_final_state=False,
    cu_seqlens=None,
    use_qk_l2norm_in_kernel=False,
    **options,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated DeltaNet and KDA."""
    operator, tensors = ours(original, value.device, options), _own(sequence, query, key, value, g, beta)
    if operator is not None:
        taken = inspect.signature(operator).parameters
        o, state = operator(
            *tensors,
            comm=sequence.comm,
            output_final_state="all" if output_final_state else False,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            **sequence.where(),
            **{name: x for name, x in options.items() if name in taken},
        )
    else:
        alone: Any = functools.partial(original, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **options)
        o, state = delta_rule(alone, tensors, sequence.cut(), comm=sequence.comm, final=output_final_state)
    return _padded(o, sequence), state


OURS = {"chunk_gated_delta_rule": zeco_gated_delta_rule, "chunk_kda": zeco_kda}
OPERATORS = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _state_space,
    "mamba2_split_conv1d_scan_combined": _fused,
}


class _Keys:
    """In place of a softmax layer's cache: what the layer appends its keys and values, or latents, to. It gets those of
    all ranks back; or where ``attend`` can do with them its own, and those of the others are under way."""

    def __init__(self, sequence, cache) -> None:
        self.sequence, self.cache = sequence, cache
        self.others: Gather | Later | None = None

    def update(self, key, value, layer_idx, *arguments, **options) -> tuple[torch.Tensor, torch.Tensor]:
        sequence, self.given = self.sequence, (key, value)
        if sequence.comm.size > 1:
            merged, memory = sequence.attention
            where = sequence.comm, sequence.tokens, sequence.zigzag and not sequence.per_document
            tensors = _own(sequence, *(x.transpose(1, 2) for x in (key, value)))
            others = Gather(*where, *tensors) if memory is None else Later(*where, memory, *tensors)
            if self.cache is None and sequence.lengths is None and sequence.inner == "sdpa" and merged:
                self.others = others
                return key, value
            key, value = in_order(others, boundaries_on_host(sequence.lengths) if sequence.per_document else None)
        if self.cache is not None:
            self.cache.update(key, value, layer_idx, *arguments, **options)
        return key, value

    def attend(
        self, module, query, key, value, scaling, dropout
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """(o, None, None), or None and the keys and values of all ranks where there is no kernel."""
        sequence, expand = self.sequence, None
        if [key.shape, value.shape] != [x.shape for x in self.given]:
            expand = getattr(module, "expand_kv", None)  # which makes them of latents
            if expand is None:
                reject(sequence.comm, f"a {type(module).__name__} changes the keys that it keeps: {OTHER_VERSION}")
        if not sequence.own:
            query, key, value = (x[:, :, :0] for x in (query, key, value))
        if not dropout and kernel_for(query, key, value) is not None:
            return attend(query, key, value, self.others, scaling, expand, self.given), None, None
        if sequence.attention.memory is not None:
            what = f"no kernel for {query.dtype} on {query.device.type} and a dropout of {dropout}"
            reject(sequence.comm, f"attention.memory needs merged blocks: {what}")
        key, value = in_order(self.others)
        return None, *((key, value) if expand is None else expand(key, value))


OTHER_VERSION = "this version of transformers is not covered"


def in_order(gather, documents=None) -> Iterator[torch.Tensor]:
    """[B, H, T, D] of all ranks' tokens. documents: cu_seqlens of sequences that are each cut."""
    found = gather.read(gather.in_order())
    if documents is not None:
        found = documents_in_order(gather.comm, documents, *found)
    return (x.transpose(1, 2) for x in found)


def _softmax(layer, *arguments, past_key_values=None, cache=None, **options) -> Any:
    """The forward of a softmax layer, with the keys and values of all ranks."""
    sequence = options.get(SEQUENCE)
    if sequence is None:
        raise ValueError(f"a {type(layer).__name__} of a split model is called through the model")
    keys = _Keys(sequence, past_key_values if cache is None else cache)
    options[SEQUENCE] = dataclasses.replace(sequence, keys=keys)
    return type(layer).forward(layer, *arguments, **{_name_of_cache(type(layer)): keys}, **options)  # type: ignore[arg-type]


class _Layer:
    """A softmax layer as its former attention function is to see it: with that function's name in its config."""

    def __init__(self, layer, inner) -> None:
        self._layer, self._inner = layer, inner

    def __getattr__(self, name) -> Any:
        return getattr(self._layer, name)

    @property
    def config(self) -> _Config:
        return _Config(self._layer.config, self._inner)


class _Config:
    def __init__(self, config, inner) -> None:
        self._config, self._attn_implementation = config, inner

    def __getattr__(self, name) -> Any:
        return getattr(self._config, name)


def _attention(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, **options
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: this rank's queries [B, H, T, D] to the whole's keys up to each."""
    sequence = options.get(SEQUENCE)
    if sequence is None:
        raise ValueError(
            f"the attention function {NAME!r} is for models of sequence_parallel; another model has the same config"
        )
    inner, home, keys = sequence.inner, sys.modules[_home(module)], sequence.keys
    function = ALL_ATTENTION_FUNCTIONS.get_interface(inner, home.eager_attention_forward)
    device, outputs, found = query.device.type, [], None

    def cast(*tensors) -> Sequence[torch.Tensor]:  # autocast does not reach through causal_lower_right
        if inner != "sdpa" or not torch.is_autocast_enabled(device):
            return tensors
        return [t.to(torch.get_autocast_dtype(device)) for t in tensors]

    query, key, value = cast(query, key, value)
    if keys.others is not None:
        found, key, value = keys.attend(module, query, key, value, scaling, dropout)
    if found is not None:
        return _padded(found, sequence), None
    query, key, value = cast(query, key, value)
    if key.shape[2] != sum(sequence.tokens):
        reject(
            sequence.comm,
            f"a {type(module).__name__} has the keys of {key.shape[2]} tokens, not of the "
            f"{sum(sequence.tokens)} of all ranks: {OTHER_VERSION}",
        )
    if not sequence.own:  # takes part in the others' backward
        o = query.new_zeros(query.shape[0], 0, query.shape[1], value.shape[-1])
        return _padded(Using.apply(o, key, value), sequence), None
    if inner == "sdpa" and sequence.lengths is not None and not dropout and takes_packed(query, key, value):
        lengths = boundaries_on_host(sequence.lengths)
        if sequence.per_document:
            return packed_documents(query, key, value, sequence.comm, lengths, scaling), None
        own = [(first, end) for rank, first, end in sequence.chunks() if rank == sequence.comm.rank]
        return packed(query, key, value, sequence.comm, own, lengths, scaling), None
    for part in sequence.parts():
        T, before, mask = part.end - part.start, part.before, None
        if inner == "eager" and T > 1:
            mask = query.new_full((T, T + before), torch.finfo(query.dtype).min).triu(before + 1)[None, None]
        elif inner == "sdpa" and T > 1 and before:  # whose own mask begins at token 0
            mask = causal_lower_right(T, T + before)  # its kernels go on without a mask in memory
        here, keys = query[:, :, part.start : part.end], (t[:, :, part.begin : part.last] for t in (key, value))
        outputs.append(function(_Layer(module, inner), here, *keys, mask, scaling=scaling, dropout=dropout)[0])
    return torch.cat(outputs, 1), None


def _home(module) -> str:
    """The file of a softmax layer's class."""
    known = {names[2]: family for family, names in FAMILIES.items()}
    return next(kind.__module__ for kind in type(module).__mro__ if kind.__name__ in known)


AttentionInterface.register(NAME, _attention)


def _loss(
    comm,
    zigzag,
    per_document,
    logits,
    labels,
    vocab_size,
    num_items_in_batch=None,
    ignore_index=-100,
    shift_labels=None,
    **options,
) -> torch.Tensor:
    """ForCausalLMLoss, with this rank's share."""
    if shift_labels is None:
        documents = options.get("cu_seq_lens_q") if per_document else None
        documents = None if documents is None else without_empty(boundaries_on_host(boundaries(documents)))
        shift_labels = shifted(labels, ignore_index, comm, zigzag, documents)
    if num_items_in_batch is None:
        num_items_in_batch = (shift_labels != ignore_index).sum()
        if comm.size > 1:
            dist.all_reduce(num_items_in_batch, group=comm.group)
    return ForCausalLMLoss(
        logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels=shift_labels, **options
    )
