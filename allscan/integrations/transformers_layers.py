"""Replacements of the functions that the layers of transformers' models call, for split models."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from ..base.autograd import wants_gradient
from ..ops.delta import zeco_gated_delta_rule, zeco_kda
from ..ops.ssd import zeco_simple_gla, zeco_ssd
from . import needing
from .attention import Blocks, attend, attend_packed, takes_packed
from .attention_blocks import after_others
from .recurrent import conv_with_halo, names_of, run_delta_rule
from .softmax import Gather, reject
from .transformers_sequence import SplitSequence

with needing(f"{__package__}.transformers", "transformers"):
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "allscan"  # name of the attention function
SEQUENCE = "allscan_sequence"  # keyword argument from the model's forward to its layers
KEYS = "allscan_keys"  # keyword argument from a softmax layer's forward to its attention function: its _Keys
OF_SPLIT = "this model was made with the config of a model that is split"
REMEDY = (
    "make it with the config from before sequence_parallel, or by "
    'AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa")'
)
CACHES = ("cache", "past_key_values", "cache_params")  # its argument: from transformers 5.24 on; before; of Mamba2


@functools.cache
def name_of_cache(kind: Any) -> str | None:
    """Name of the cache argument in the forward of a class of models or softmax layers."""
    parameters = inspect.signature(kind.forward).parameters
    return next((name for name in CACHES if name in parameters), None)


class Original(NamedTuple):
    """A function of a model's file, and what its closures and signature tell: torch.compile cannot trace either.

    packaged: whether it is a function of fla or mamba_ssm. operator: All-Scan's operator that computes the same, or
    None. known, supported: names of the options of the function and of the operator.
    """

    call: Callable[..., Any]
    packaged: bool
    operator: Callable[..., Any] | None = None
    known: frozenset[str] = frozenset()
    supported: frozenset[str] = frozenset()


def original_of(function: Any) -> Original:
    """Inspect a function of a model's file."""
    package = of_package(function)
    behind: Any = package or inspect.unwrap(function)
    operator = OURS.get(getattr(behind, "__name__", ""))
    if operator is None or not behind.__module__.startswith(("fla.", "transformers.")):
        return Original(function, package is not None)
    return Original(function, package is not None, operator, names_of(behind), names_of(operator))


class SplitOperator:
    """Replaces a function of a model's file by name; runs over the ranks if called with a SplitSequence."""

    def __init__(self, original: Any, split: Any) -> None:
        self.original, self.split = original, split
        self.inspected, self.in_torch = original_of(original), original_of(in_torch(original))
        functools.update_wrapper(self, original)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        sequence = options.pop(SEQUENCE, None)
        if sequence is None:
            return self.original(*arguments, **options)
        original = self.inspected if on_gpu(sequence.comm.device) else self.in_torch
        return self.split(original, sequence, *arguments, **options)


def _convolution(
    original: Original,
    sequence: SplitSequence,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Any = None,
    **_,
) -> torch.Tensor:
    """Short convolution over x [B, channels, tokens]; the last tokens are this rank's."""
    n = weight.shape[-1] - 1
    if not n:
        return original.call(x, weight, bias, activation=activation)  # with the padding token
    own, state = sequence.own, None
    if x.shape[2] != own:  # the tokens of the cache precede
        state, x = x.tensor_split([x.shape[2] - own], 2)
        state = None if sequence.past is None else state[:, :, -n:].mT

    def conv(x: Tensor) -> torch.Tensor:
        return original.call(x.mT, weight, bias, activation=activation).mT

    weights = weight, bias, activation
    y = conv_with_halo(conv, n, x.mT, sequence.pieces, sequence.cuts, state=state, weights=weights, **sequence.where)
    return y.mT if own else _padded(y, sequence).mT


def _own(sequence: SplitSequence, *tensors: Tensor | None) -> Sequence[torch.Tensor | None]:
    """Tensors [B, T, ...] of this rank's tokens, without the padding token."""
    return tensors if sequence.own else [x if x is None else x[:, :0] for x in tensors]


def _padded(x: Tensor, sequence: SplitSequence) -> torch.Tensor:
    """x [B, T, ...]; on a rank without tokens, one padding token of zeros for the following layers."""
    return x if sequence.own else F.pad(x, (0, 0) * (x.ndim - 2) + (0, 1))


def _fused(original: Original, sequence: SplitSequence, *_, **__) -> None:
    """Disables mamba_ssm's fused kernel of a whole layer, which cannot be split; the layer runs unfused."""


def _state_space(
    original: Original,
    sequence: SplitSequence,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    *,
    z: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    **options: Any,
) -> Any:
    own: Any = (x, dt, B, C, z) if sequence.own else _own(sequence, x, dt, B, C, z)
    x, dt, B, C, z = own
    known: dict[str, Any] = {name: options[name] for name in OF_SSD if name in options} | sequence.where
    known["initial_states"] = None if initial_states is None else initial_states.float()
    final = "all" if return_final_states else False
    found: Any = zeco_ssd(x, dt, A, B, C, chunk_size, z=z, return_final_states=final, **known)
    if sequence.own:
        return found
    return (_padded(found[0], sequence), found[1]) if return_final_states else _padded(found, sequence)


OF_SSD = "D", "dt_bias", "dt_softplus", "dt_limit"  # options of a model's scan that zeco_ssd has, too


@functools.cache
def of_package(function: Callable[..., Any]) -> Callable | None:
    """The function of fla or mamba_ssm behind a function of a model's file, or None for transformers' own in torch."""
    inside = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    found = inside.get("implementation")  # of use_kernel_func_from_hub_with_fallback
    return None if found is inside.get("torch_function") else found


@functools.cache
def in_torch(function: Callable[..., Any]) -> Callable:
    """transformers' torch function in place of a package's function, whose kernels need a GPU."""
    own = getattr(function, "__wrapped__", None)
    if own is None or of_package(function) is None:
        return function
    taken = names_of(own)

    @functools.wraps(own)
    def call(*arguments: Any, **options: Any) -> Any:
        return own(*arguments, **{name: x for name, x in options.items() if name in taken})

    return call


def ours(original: Original, device: torch.device, options: Any, anywhere: bool = False) -> Callable | None:
    """All-Scan's operator for a model's delta rule, on a GPU or with ``anywhere``; None unless it supports all
    ``options`` of the call that the model's function knows."""
    if not (anywhere or on_gpu(device)):
        return None
    supported = all(name in original.supported for name in options if name in original.known)
    return original.operator if supported else None


def on_gpu(device: torch.device) -> bool:
    """Whether ``device`` is a GPU; the tests replace this function."""
    return device.type == "cuda"


def _delta_rule(
    original: Original,
    sequence: SplitSequence,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated DeltaNet and KDA: by All-Scan's operator, or by ``original`` in pieces."""
    tensors: Any = (query, key, value, g, beta) if sequence.own else _own(sequence, query, key, value, g, beta)
    operator = ours(original, value.device, options, sequence.comm.invariant > 0)
    # transformers' torch functions, unlike All-Scan's operators, take any size, and cast any dtype
    fits = original.packaged or (
        query.dtype == key.dtype == value.dtype
        and query.dtype in HALF_OR_SINGLE
        and g.dtype in (torch.float32, query.dtype)
        and key.shape[-1] <= 256
    )
    o, state = run_delta_rule(
        operator if fits else None,
        original.call,
        tensors,
        sequence.pieces,
        sequence.where,
        final=output_final_state,
        initial=initial_state,
        supported=original.supported,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        **options,
    )
    return o if sequence.own else _padded(o, sequence), state


HALF_OR_SINGLE = torch.bfloat16, torch.float16, torch.float32
OURS = {"chunk_gated_delta_rule": zeco_gated_delta_rule, "chunk_kda": zeco_kda}
OURS |= {"torch_chunk_gated_delta_rule": zeco_gated_delta_rule, "chunk_kimi_delta_attention": zeco_kda}
OPERATORS = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _state_space,
    "mamba2_split_conv1d_scan_combined": _fused,
}
RECURRENCES = {name for name, split in OPERATORS.items() if split in (_delta_rule, _state_space)}
OTHER_VERSION = "this version of transformers is not supported"


class _Keys:
    """Replaces a softmax layer's cache: the layer appends its keys and values, or latents.

    ``update`` returns those of all ranks. If ``attend`` may run in merged blocks, ``update`` only starts the gather and
    returns this rank's own. expands: whether the layer appends latents.
    """

    def __init__(self, sequence: SplitSequence, cache: Any, expands: bool) -> None:
        self.sequence, self.cache = sequence, cache
        self.gathers_keys = expands and sequence.few  # in ``blocks``, once the layer has them
        self.gather: Gather | None = None

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *arguments: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sequence, self.appended = self.sequence, (key, value)
        if sequence.comm.size > 1:
            whole = self.cache is not None or sequence.lengths is not None or sequence.inner != "sdpa"
            if sequence.merged and not whole:
                if not self.gathers_keys:
                    self.gather = self._start(key, value)
                return key, value
            self.gathers_keys = False
            key, value = (x.transpose(1, 2) for x in sequence.in_order(self._start(key, value)))
        if self.cache is not None:
            kept = self.cache.update(key, value, layer_idx, *arguments, **options)
            if sequence.past:  # a static cache returns all of its memory
                key, value = (x[:, :, : sequence.past + key.shape[2]] for x in kept)
        return key, value

    def _start(self, key: Tensor, value: Tensor) -> Gather:
        tensors: Any = key.transpose(1, 2), value.transpose(1, 2)
        return self.sequence.gather(*(tensors if self.sequence.own else _own(self.sequence, *tensors)))

    def blocks(self, module: Any, key: Tensor, value: Tensor, scale: float | None, dropout: float) -> Blocks | None:
        """The first back end's arguments for ``attend``, or None if ``update`` has returned the keys of all ranks."""
        name, project = type(module).__name__, None
        if self.gathers_keys:
            return Blocks(self._start(key, value), scale, None, dropout)
        if self.gather is None:
            total = sum(self.sequence.tokens) + (self.sequence.past or 0)
            if key.shape[2] != total:
                what = f"has the keys of {key.shape[2]} tokens, not of the {total} of all ranks: {OTHER_VERSION}"
                reject(self.sequence.comm, f"a {name} {what}")
            return None
        if [key.shape, value.shape] != [x.shape for x in self.appended]:  # latents were appended
            if not hasattr(module, "expand_kv"):
                reject(self.sequence.comm, f"a {name} changes the keys that it keeps: {OTHER_VERSION}")
            project = module.expand_kv
        return Blocks(self.gather, scale, project, dropout)


def _called_alone(layer: Any) -> ValueError:
    return ValueError(f"a {type(layer).__name__} cannot be called directly in a split model: call the model")


def softmax_forward(
    layer: Any, taken: Any, *arguments: Any, past_key_values: Any = None, cache: Any = None, **options: Any
) -> Any:
    """Forward of a softmax layer with the keys and values of all ranks. taken: the name of its cache argument."""
    sequence = options.get(SEQUENCE)
    if sequence is None:
        raise _called_alone(layer)
    cache = past_key_values if cache is None else cache
    options[KEYS] = keys = _Keys(sequence, cache, hasattr(layer, "expand_kv"))
    return type(layer).forward(layer, *arguments, **{taken: keys}, **options)


def lightning_forward(
    layer: Any,
    hidden_states: Tensor,
    *_: Any,
    past_key_values: Any = None,
    cache: Any = None,
    attention_mask: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, Tensor | None]:
    """Forward of MiniMax's lightning attention: simple GLA with a constant decay per head, and an output gate."""
    sequence = options.get(SEQUENCE)
    if sequence is None:
        raise _called_alone(layer)
    cache = past_key_values if cache is None else cache
    qkv = layer.act_fn(layer.qkv_proj(hidden_states)).unflatten(-1, (layer.num_attention_heads, -1))
    own: Any = _own(sequence, *qkv.split(layer.head_dim, -1))
    q, k, v = own
    decays, final = -layer.slope_rate.flatten(), False if cache is None else "all"
    before = None if sequence.past is None else cache.get_linear_cache(layer.layer_idx).float()
    how: Any = dict(scale=1.0, initial_state=before, output_final_state=final, **sequence.where)
    o, state = zeco_simple_gla(q, k, v, g_gamma=decays, **how)
    if state is not None:
        state = state.to(qkv.dtype)
        cache.set_linear_cache(layer.layer_idx, state)
    o = layer.norm(_padded(o, sequence).flatten(-2))
    return layer.out_proj(layer.output_gate(hidden_states).sigmoid() * o), state


class _Proxy:
    """An object with other values of some attributes."""

    def __init__(self, original: Any, **replaced: Any) -> None:
        vars(self).update(replaced, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: causal attention of this rank's queries [B, H, T, D] over the row."""
    sequence = options.get(SEQUENCE)
    if sequence is None:
        raise ValueError(f"the attention function {NAME!r} is for models of sequence_parallel; {OF_SPLIT}: {REMEDY}")
    inner = sequence.inner
    device = query.device.type
    if inner == "sdpa" and torch.is_autocast_enabled(device):  # causal_lower_right bypasses autocast
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    blocks = options[KEYS].blocks(module, key, value, scaling, dropout)
    packed = inner == "sdpa" and sequence.lengths is not None and not dropout and takes_packed(query, key, value)

    def function(*tensors: Tensor) -> torch.Tensor:
        layer = _Proxy(module, config=_Proxy(module.config, _attn_implementation=inner))  # names the original function
        eager = sys.modules[sequence.home].eager_attention_forward
        original = ALL_ATTENTION_FUNCTIONS.get_interface(inner, eager)
        q, k, v = (x.transpose(1, 2) for x in tensors)
        T, before, mask = q.shape[2], k.shape[2] - q.shape[2], None
        if inner == "eager" and T > 1:
            mask = q.new_full((T, T + before), torch.finfo(q.dtype).min).triu(before + 1)[None, None]
        elif inner == "sdpa" and T > 1 and before:  # sdpa's own mask begins at token 0
            trains = dropout or torch.compiler.is_compiling() or wants_gradient(tensors)
            if sequence.merged and not trains and (o := after_others(q, k, v, scaling)) is not None:
                return o.transpose(1, 2)
            mask = causal_lower_right(T, T + before)  # lets kernels run without a mask in memory
        return original(layer, q, k, v, mask, scaling=scaling, dropout=dropout)[0]

    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    o = attend_packed(q, k, v, sequence, scaling) if packed else attend(q, k, v, sequence, function, blocks=blocks)
    return o if sequence.own else _padded(o, sequence), None


AttentionInterface.register(NAME, _attention)
