"""``allscan estimate --step``: memory of a whole training step of a model of transformers', without a GPU.

The model's own code runs forward and backward on torch's meta device, where tensors have shapes but no data, and a
dispatch mode counts the bytes of all live tensors. Delta rules count with the memory from allscan.tools.estimate,
softmax layers with the memory of their blocks. tests/tools/test_estimate.py compares it with measured peaks of models.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..bindings.torch_compat import TorchDispatchMode, tree_leaves
from ..integrations import needing
from ..ops.convolution import supports
from .estimate import Cut, Peak, Recurrent, check_cut, line_of, peak, ssd_peak, text_model

with needing(__name__, "transformers"):
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

RULES = {"torch_chunk_gated_delta_rule": "gated_delta_rule", "chunk_kimi_delta_attention": "kda"}
CONVOLUTION = "causal_conv1d_fn"
SCAN, FUSED = "mamba2_chunk_scan", "mamba2_split_conv1d_scan_combined"  # Mamba2's functions
ATTENTION = "allscan_estimate"  # name of the attention function
ALIGNED = 512  # bytes; torch's allocator rounds sizes up to a multiple


class Step(NamedTuple):
    """Bytes of one rank, in a step after the first. Parameters, their gradients (kept from step to step) and both
    moments of AdamW are bfloat16."""

    parameters: int
    gradients: int
    optimizer: int
    saved: int  # between forward and backward, including the loss
    peak: int  # maximum over the step
    layers: int  # saved by all but the head and the loss
    loss: int  # maximum of logits, loss and their gradients, beside ``layers``
    work: int  # maximum of the layers' backward, beside ``layers``
    seen: Any  # Seen


class Living(TorchDispatchMode):
    """Counts the bytes of operators' results while these are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.most = 0
        self._known: set[int] = set()

    def add(self, tensor: Tensor) -> None:
        """Count ``tensor`` from now on."""
        storage = tensor.untyped_storage()
        key: int = storage._cdata
        if key not in self._known:
            nbytes = -(-storage.nbytes() // ALIGNED) * ALIGNED
            self._known.add(key)
            self.bytes += nbytes
            self.most = max(self.most, self.bytes)
            weakref.finalize(storage, self._drop, key, nbytes)

    def _drop(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.bytes -= nbytes

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, Tensor):
                self.add(x)
        return found


def _held(nbytes: int) -> Tensor:
    return torch.empty(max(0, nbytes), dtype=torch.uint8, device="meta")


class _Normalized(torch.autograd.Function):
    """q and k divided by their norms, see ops/delta/raw_inputs.py."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        found = tuple(map(_contiguous_like, (q, k)))
        ctx.save_for_backward(*found, *(x.new_empty(x.shape[:-1], dtype=torch.float32) for x in found))
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(_contiguous_like, grads))


class _Operator(torch.autograd.Function):
    """An operator whose output is like tensor number ``at``."""

    @staticmethod
    def forward(ctx: Any, found: Peak, at: int, *tensors: Tensor | None) -> Tensor:
        value: Any = tensors[at]
        o, ctx.found = _contiguous_like(value), found
        ctx.save_for_backward(*tensors, _held(found.saved - o.nbytes))
        _held(found.forward - found.saved)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        grads = [None if x is None else _contiguous_like(x) for x in ctx.saved_tensors[:-1]]
        _held(ctx.found.both - ctx.found.saved - sum(x.nbytes for x in grads if x is not None))
        return None, None, *grads


class _Convolved(torch.autograd.Function):
    """A short convolution with its activation, see ops/convolution.py."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        tensors = x.mT.contiguous(), weight, bias
        ctx.save_for_backward(*tensors)
        return torch.empty_like(tensors[0]).mT

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        return torch.empty_like(x).mT, *[y if y is None else torch.empty_like(y) for y in parameters]


class _SlicedLoss(torch.autograd.Function):
    """linear_cross_entropy: the gradients of x and of the head's weight, computed with the loss, slice by slice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, slice_tokens: int) -> Tensor:
        tokens = x.shape[0] * x.shape[1]
        dx, dw = torch.empty_like(x), torch.empty_like(weight, dtype=torch.float32)
        logits = weight.new_empty(min(slice_tokens, tokens), weight.shape[0])  # noqa: F841
        ctx.save_for_backward(dx, dw)
        ctx.dtype = weight.dtype
        return x.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, Tensor, None]:
        dx, dw = ctx.saved_tensors
        return dx, torch.empty_like(dw, dtype=ctx.dtype), None


class _Received(torch.autograd.Function):
    """Tensors received from other ranks; backward sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, shape: tuple[int, ...]) -> Tensor:
        return own.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


class _Softmax(torch.autograd.Function):
    """Attention output [B, H, T, V] over own and received keys and values; tokens before heads in memory."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Tensor:
        B, H, T, _ = q.shape
        o = q.new_empty(B, T, H, v.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(q, k, v, *others, o, q.new_empty(B, H, T, dtype=torch.float32))
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, ...]:
        tensors = ctx.saved_tensors[:-2]
        sums = torch.empty_like(tensors[0], dtype=torch.float32)  # noqa: F841  of dq, while the kernel runs
        return tuple(torch.empty_like(x) for x in tensors)


def _contiguous_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


class Seen(NamedTuple):
    """What a model's layers have called, in order: recurrent layers, and for each softmax layer (bytes received, (keys'
    plus values' width) * heads)."""

    recurrent: list[Recurrent]
    softmax: list[tuple[int, int]]


def _delta_rule(
    rule: str,
    cut: Cut,
    seen: Seen,
    q: Tensor,
    k: Tensor,
    *rest: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **named: Any,
) -> tuple[Tensor, None]:
    """Replaces the delta rule of a model's file."""
    if use_qk_l2norm_in_kernel:
        q, k = _Normalized.apply(q, k)
    gates = [named[name] for name in ("g", "beta") if name in named]
    v, *_ = tensors = [x.contiguous() for x in (*rest, *gates)]
    q, k = q.contiguous(), k.contiguous()
    layer = Recurrent(rule, 1, v.shape[2], k.shape[-1], v.shape[-1])
    seen.recurrent.append(layer)
    o: Tensor = _Operator.apply(peak(layer, cut), 2, q, k, *tensors)
    return o, None


def _convolution(
    original: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Any = None, **options: Any
) -> Any:
    """Replaces the convolution in a model's file, where the sequence is split and the package's kernels support it."""
    if not supports(weight.shape[-1] - 1, activation):
        return original(x, weight, bias, activation=activation, **options)
    return _Convolved.apply(x, weight, bias)


def _state_space(
    cut: Cut,
    seen: Seen,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *_: Any,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    **__: Any,
) -> Tensor:
    """Replaces Mamba2's scan in a model's file."""
    tensors = x, dt, A, B, C, D, z, dt_bias
    seen.recurrent.append(Recurrent("ssd", 1, x.shape[2], B.shape[-1], x.shape[-1]))
    y: Tensor = _Operator.apply(ssd_peak(tensors, cut), 0, *tensors)
    return y


def _attention(
    cut: Cut, seen: Seen, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any
) -> tuple[Tensor, None]:
    """Replaces transformers' attention function.

    The received keys are those of the rank that needs most of them: the last one, in zigzag the first one. They are
    projected from latents if the layer does so.
    """
    others, tokens, batch = [], (cut.ranks - 1) * cut.own, query.shape[0]
    if tokens and hasattr(module, "expand_kv"):
        widths = module.kv_lora_rank, module.qk_rope_head_dim
        others = module.expand_kv(*(_Received.apply(key, (batch, 1, tokens, width)) for width in widths))
    elif tokens:
        others = [_Received.apply(x, (*x.shape[:2], tokens, x.shape[-1])) for x in (key, value)]
    seen.softmax.append((sum(x.nbytes for x in others), query.shape[1] * (query.shape[-1] + value.shape[-1])))
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    o: Tensor = _Softmax.apply(query, key, value, *others)
    return o.transpose(1, 2), None


@contextlib.contextmanager
def _counted(model: Any, cut: Cut) -> Iterator[Seen]:
    """Context in which the model's file calls these functions; yields what they have seen."""
    home, seen = sys.modules[type(model).__module__], Seen([], [])
    ours: dict[str, Any] = {name: functools.partial(_delta_rule, rule, cut, seen) for name, rule in RULES.items()}
    ours |= {SCAN: functools.partial(_state_space, cut, seen), FUSED: lambda *_, **__: None}
    if not any(name in vars(home) for name in ours):
        raise ValueError(f"--step and --gpu do not support the recurrence of {type(model).__name__}")
    if cut.ranks > 1:
        ours[CONVOLUTION] = functools.partial(_convolution, vars(home).get(CONVOLUTION))
    found = {name: vars(home)[name] for name in ours if name in vars(home)}
    AttentionInterface.register(ATTENTION, functools.partial(_attention, cut, seen))
    for name in found:
        setattr(home, name, ours[name])
    try:
        yield seen
    finally:
        for name, function in found.items():
            setattr(home, name, function)


def model_of(config: dict[str, Any]) -> Any:
    """Model of a config.json on the meta device; the text model of one of text and images. Raises ValueError."""
    config = text_model(config)
    kind = config.pop("model_type", None)
    try:
        model_config = AutoConfig.for_model(kind, **config)
        size, pad = (getattr(model_config, name, None) for name in ("vocab_size", "pad_token_id"))
        if size is not None and pad is not None and not -size <= pad < size:
            raise ValueError(
                f"pad_token_id is {pad} ({'in the file' if 'pad_token_id' in config else 'the default'}), vocab_size "
                f'{size}: set "pad_token_id" to null or to a number below vocab_size'
            )
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(model_config).to(torch.bfloat16).train()
    except Exception as error:  # transformers' and huggingface_hub's checks raise classes of their own
        raise ValueError(f"transformers cannot build {kind!r} from this config: {error}") from None


def step_of(model: Any, cut: Cut, slice_tokens: int | None = None) -> Step:
    """Step of a model on the meta device, called as in training: logits of all tokens, transformers' loss; or the loss
    in slices.

    Raises ValueError if the model's memory depends on data, e.g. for experts that run one after the other.
    """
    check_cut(cut)
    model.config._attn_implementation = ATTENTION
    model.config.use_cache = False
    parameters, counter, marks = [*model.parameters()], Living(), dict[str, int]()

    def of_loss(gradient: Tensor) -> None:
        marks["loss"] = counter.most
        counter.most = counter.bytes

    def of_layers(base: Any, arguments: Any, outputs: Any) -> None:
        marks["forward"] = counter.most
        marks["layers"] = counter.most = counter.bytes
        outputs[0].register_hook(of_loss)

    hook = model.base_model.register_forward_hook(of_layers)
    with _counted(model, cut) as seen, counter:
        for p in parameters:
            counter.add(p)
        own = counter.bytes
        trained = [p for p in parameters if p.requires_grad]
        for p in trained:
            p.grad = torch.empty_like(p)
        gradients = counter.bytes - own
        moments = [torch.empty_like(p) for p in trained for _ in range(2)]
        before = counter.bytes
        tokens = torch.empty(cut.batch, cut.own, dtype=torch.int64, device="meta")
        try:
            if slice_tokens is None:
                loss = model(input_ids=tokens, labels=tokens).loss
            else:
                hidden = model.base_model(input_ids=tokens)[0]
                loss = _SlicedLoss.apply(hidden, model.get_output_embeddings().weight, slice_tokens)
                del hidden
            saved = counter.bytes - before
            loss.backward()
        except (NotImplementedError, RuntimeError) as error:
            raise ValueError(
                f"--step and --gpu cannot estimate {type(model).__name__}, whose memory depends on data: {error}"
            ) from None
        finally:
            hook.remove()
            for p in trained:
                p.grad = None
    del moments
    most, layers = max(counter.most, marks["forward"], marks["loss"]), marks["layers"]
    state = own, gradients, before - own - gradients
    return Step(*state, saved, most, layers - before, marks["loss"] - layers, counter.most - layers, seen)


def report_of_step(config: dict[str, Any], cut: Cut) -> str:
    """The report that follows the table of operators."""
    found = step_of(model_of(config), cut)
    lines = [
        "a training step of the whole model",
        line_of("parameters, bfloat16", found.parameters),
        line_of("gradients", found.gradients),
        line_of("two moments of AdamW", found.optimizer),
        line_of("kept between forward and backward", found.saved),
        line_of("peak, all of these included", found.peak),
    ]
    return "\n".join(lines)
