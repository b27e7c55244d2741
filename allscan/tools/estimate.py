"""``allscan estimate``: memory and traffic of a model's layers over a sharded sequence, from its config, without a GPU.

An operator's memory is the memory of its launch plans, which are recorded here as for a GPU, in bfloat16.
tests/tools/test_estimate.py and tests/gpu/test_estimate_gpu.py compare it with measured peaks.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from ..base.checks import integer
from ..base.tiling import H100_MULTIPROCESSORS, cdiv, scan_tile, transition_tile
from ..comm.backwards import FWD_EPOCHS
from ..launch.plan import Plan, words_of
from ..ops.carrier import AllScanCarrier, CarriedState, record_call
from ..ops.delta.delta_operator import DELTA
from ..ops.delta.delta_passes import DeltaShape, Inputs, LocalGrads, SavedStates, delta_segment_length
from ..ops.delta.gdn_plans import ScalarChunkPass
from ..ops.delta.kda_plans import ChunkPass
from ..ops.gla.gla_operator import GLA
from ..ops.gla.gla_plans import backward_plan, forward_plan, shape_of
from ..ops.gpu_blocks import HOPPER
from ..ops.operator import Call
from ..ops.ssd.ssd_plans import backward_plan as ssd_backward_plan
from ..ops.ssd.ssd_plans import forward_plan as ssd_forward_plan
from ..ops.ssd.ssd_plans import shape_of as ssd_shape_of
from ..ops.ssd.ssd_plans import strides_of
from ..scan.workspace import Spec, workspace_layout
from ..tokens.packing import CHUNK_TOKENS, GRID_LIMIT, Layout, batch_pieces, most_chunks, most_segments

OPERATORS = {"gla": "zeco_gla", "kda": "zeco_kda", "gated_delta_rule": "zeco_gated_delta_rule", "ssd": "zeco_ssd"}
FLA = {"gla": "gla", "kda": "kda", "gated_deltanet": "gated_delta_rule"}
LAYER_TYPES = "linear_attention", "full_attention"

Kind = TypeVar("Kind", dict, list)


class Recurrent(NamedTuple):
    """Recurrent layers of one shape."""

    rule: str  # key of OPERATORS
    layers: int
    heads: int
    K: int
    V: int


class Softmax(NamedTuple):
    """Softmax layers of one shape; numbers: gathered elements per token, of keys and values or of latents."""

    layers: int
    numbers: int


class Cut(NamedTuple):
    """Distribution of the sequence over the ranks, in equal parts, and options of the calls; see ``check_cut``."""

    tokens: int  # number of tokens of all ranks
    ranks: int
    batch: int = 1
    zigzag: bool = False
    depth: int = 3
    puts: bool = False  # NVSHMEM's put in place of loads and stores
    multiprocessors: int = H100_MULTIPROCESSORS
    recompute: bool = True  # of zeco_gla and the delta rules

    @property
    def own(self) -> int:
        """Number of tokens of a rank."""
        return self.tokens // self.ranks

    def layout(self, segment: int) -> Layout:
        """Layout of the tokens of a middle rank, if there is one."""
        pieces = batch_pieces(self.batch, self.own, self.zigzag, self.ranks == 1, self.ranks == 1)
        return Layout(pieces, len(pieces), segment, torch.device("cpu"), halves=1 + self.zigzag)


class Peak(NamedTuple):
    """Bytes besides an operator's inputs: of a forward pass without gradients, of both passes, and of the tensors saved
    between the passes, including the output."""

    forward: int
    both: int
    saved: int


class _Apart:
    """Stand-in for the AllScan of a middle rank, to record a plan for its memory only."""

    handle = 0

    def __init__(self, ranks: int) -> None:
        attributes = {(AllScanCarrier, True): self}
        self.comm: Any = types.SimpleNamespace(size=ranks, attributes=attributes, device=torch.device("cuda"))

    def get_or_create_scan(self, *_: Any, **__: Any) -> None:
        """No agreement with other ranks."""

    def stream(self, *_: Any) -> contextlib.nullcontext:
        """No stream: the plan does not run."""
        return contextlib.nullcontext(lambda: None)

    def carry(self, *_: Any) -> None:
        """Never called."""

    def pending(self, *_: Any) -> list:
        """No pending backward."""
        return []

    def neighbours(self, *_: Any) -> tuple[bool, bool]:
        """Both neighbours exist."""
        return True, True

    def record(self, plan: Plan, carried: CarriedState, reverse: bool, zigzag: bool) -> None:
        """Record a step with the scan's buffers."""
        record_call(plan, carried, reverse, zigzag)

    def expected_us(self, words: int, zigzag: bool) -> float:
        """A fixed time, so that forward processes its keys in one kernel."""
        return 0.0


def gla_peak(layer: Recurrent, cut: Cut) -> Peak:
    """Peak of zeco_gla."""
    B, T, H, K, V = cut.batch, cut.own, layer.heads, layer.K, layer.V
    of_gates, dtype = torch.float32, torch.bfloat16
    how = int(cut.zigzag), cut.multiprocessors, not cut.recompute
    shape = shape_of(B, T, H, K, V, B, dtype, of_gates, "cuda", *how)
    layout, apart, call = cut.layout(shape.segment), _Apart(cut.ranks), Call("zeco_gla", 1.0)
    tensors = *_of_meta([B, T, H], [K, K, V]), _of_meta([B, T, H], [K], of_gates)[0]
    saved = torch.empty(shape.saved_words, dtype=torch.float32, device="meta")
    forward = forward_plan(shape, call, layout, apart, *tensors, None, None, saved)
    backward = backward_plan(shape, call, layout, apart, *tensors, tensors[2], None, None, saved)
    stays = tensors[2].nbytes + saved.nbytes
    gradients = sum(x.nbytes for x in tensors)
    return Peak(stays + forward.bytes, stays + max(forward.bytes, gradients + backward.bytes), stays)


def delta_peak(layer: Recurrent, cut: Cut) -> Peak:
    """Peak of zeco_kda or zeco_gated_delta_rule with allscan's chunk kernels and as many key heads as value heads."""
    B, T, H, K, V = cut.batch, cut.own, layer.heads, layer.K, layer.V
    segment = delta_segment_length(B * T, H, cut.multiprocessors)
    segments = most_segments(B, T, B, segment, int(cut.zigzag))
    scalar, dtype = layer.rule == "gated_delta_rule", torch.bfloat16
    shape = DeltaShape(B, H, H, K, V, dtype, scalar, cut.zigzag, saves=not cut.recompute)
    states = (ScalarChunkPass if scalar else ChunkPass)(_Apart(cut.ranks).comm, cut.layout(segment), shape)
    chunks = most_chunks(B, T, B, int(cut.zigzag), False)
    words = sum(words_of(states.saved((B, T, H, V), K, chunks, dtype, states.saves)))
    kept = torch.empty(words, dtype=torch.int32, device="meta")
    rows = [1, B * T, H] if cut.zigzag else [B, T, H]  # zigzag packs both halves
    q, v, scores = _of_meta(rows, [K, V, CHUNK_TOKENS])
    g, beta = (_of_meta(rows, [K], torch.float32)[0], torch.empty(rows, dtype=dtype, device="meta"))
    x = Inputs(q, q, v, g[..., 0] if scalar else g, beta)
    transitions, incoming = _of_meta([segments, H, K], [K, V], torch.float32)
    saved_states = SavedStates(transitions, incoming, torch.empty(FWD_EPOCHS, dtype=torch.int64, device="meta"), kept)
    d = LocalGrads(v, None, scores, scores)
    forward, _ = states.recorded("whole_forward", x, None, None, saved_states, 1.0)
    backward, _ = states.recorded("whole_backward", x, d, None, None, saved_states, 1.0)
    stays = sum(y.nbytes for y in (v, scores, scores, transitions, incoming, kept))
    gradients = sum(y.numel() * y.element_size() for y in x)
    return Peak(stays + forward.bytes, stays + max(forward.bytes, gradients + backward.bytes), stays)


def ssd_peak(tensors: Sequence[torch.Tensor | None], cut: Cut) -> Peak:
    """Peak of zeco_ssd with these inputs (``ssd_plans.Inputs``), on the meta device."""
    x, B = tensors[0], tensors[3]
    assert x is not None and B is not None
    (batch, T, H, P), (G, N) = x.shape, B.shape[2:]
    bf16 = x.dtype == B.dtype == torch.bfloat16
    how = "cuda", int(cut.zigzag), cut.multiprocessors, False, 0, HOPPER, G, bf16
    shape = ssd_shape_of(batch, T, H, N, P, batch, x.dtype, torch.float32, *how)
    layout, apart, call = cut.layout(shape.segment), _Apart(cut.ranks), Call("zeco_ssd", 1.0)
    taken, strides = strides_of(tensors)
    saved = torch.empty(shape.saved_words, dtype=torch.float32, device="meta")
    forward = ssd_forward_plan(shape, call, strides, layout, apart, *taken, None, None, saved)
    backward = ssd_backward_plan(shape, call, strides, layout, apart, *taken, x, None, None, saved)
    y, gradients = 2 * x.numel(), sum(t.nbytes for t in taken if t is not None)
    stays = y + saved.nbytes
    return Peak(stays + forward.bytes, stays + max(forward.bytes, gradients + backward.bytes), stays)


def _of_meta(rows: list[int], widths: list[int], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.empty(*rows, width, dtype=dtype, device="meta") for width in widths]


def check_cut(cut: Cut) -> None:
    """Raise ValueError for sizes that no call can have, or tokens that do not divide evenly among the ranks."""
    for name in ("tokens", "ranks", "batch", "depth", "multiprocessors"):
        _integer(cut._asdict(), name)
    parts = cut.ranks * (1 + cut.zigzag)
    if cut.tokens % parts:
        of_ranks = "twice the ranks, with zigzag" if cut.zigzag else "the ranks"
        raise ValueError(f"tokens must be a multiple of {parts}, {of_ranks}, got {cut.tokens}")
    if cut.batch * cdiv(cut.own, CHUNK_TOKENS) > GRID_LIMIT:
        most = f"{GRID_LIMIT:,} chunks of {CHUNK_TOKENS} tokens"
        raise ValueError(f"a rank may have {most}, got batch {cut.batch} of {cut.own:,} tokens")


def check_call(layer: Recurrent, cut: Cut) -> None:
    """Raise ValueError for a call that the layer's operator rejects, by the operator's own checks."""
    check_cut(cut)
    rows, scalar = [cut.batch, cut.own, layer.heads], layer.rule == "gated_delta_rule"
    comm: Any = types.SimpleNamespace(device=torch.device("meta"), rank=1, size=1, attributes={})
    try:
        q, v, g = _of_meta(rows, [layer.K, layer.V, layer.K])
        if layer.rule == "gla":
            GLA.check_all(comm, (q, q, v, g, None), None, None, Call("zeco_gla", 1.0, zigzag=int(cut.zigzag)))
        else:
            tensors = q, q, v, g[..., 0] if scalar else g, g[..., 0], None
            DELTA.check_all(comm, tensors, None, None, Call(f"own_{layer.rule}", 1.0, zigzag=int(cut.zigzag)))
    except (ValueError, RuntimeError) as error:  # RuntimeError: torch, about sizes
        raise ValueError(f"{OPERATORS[layer.rule]}: {error}") from None


def peak(layer: Recurrent, cut: Cut) -> Peak:
    """Peak of one call of the layer's operator. Raises ValueError for a call that it rejects."""
    check_call(layer, cut)
    return gla_peak(layer, cut) if layer.rule == "gla" else delta_peak(layer, cut)


def inputs(layer: Recurrent, cut: Cut) -> int:
    """Bytes of q, k, v, gates and beta, which every layer saves for backward."""
    gates = 4 * (1 if layer.rule == "gated_delta_rule" else layer.K) + (0 if layer.rule == "gla" else 2)
    return cut.batch * cut.own * layer.heads * (2 * (2 * layer.K + layer.V) + gates)


def state(layer: Recurrent, cut: Cut) -> int:
    """Bytes that a rank sends to its neighbour in forward; backward sends as many."""
    return 4 * cut.batch * layer.heads * layer.K * layer.V


def workspace(layer: Recurrent, cut: Cut) -> int:
    """Bytes of symmetric memory, shared by all layers of the shape; see AllScan.size_hint."""
    if cut.ranks == 1:
        return 0
    G = cut.batch * layer.heads
    if layer.rule in ("gla", "ssd"):  # half of the programs that may wait, see AllScanCarrier._variant
        device = torch.device("cuda")
        tile = scan_tile((G, layer.K, layer.V), max(1, cut.multiprocessors // 4), not cut.puts, device)
    else:
        tile = transition_tile(layer.K)
    spec = Spec((G, layer.K, layer.V), tile, cut.depth, "put" if cut.puts else "sentinel", "chain")
    return 2 * workspace_layout(spec, cut.puts)[1]


def gathered(layer: Softmax, cut: Cut) -> int:
    """Bytes of all ranks' keys and values in one layer, saved for backward; the other ranks' are received."""
    return 2 * cut.batch * cut.tokens * layer.numbers


def _integer(fields: dict[str, Any], name: str, least: int = 1) -> int:
    """A field. Raises KeyError without it, ValueError unless it is an integer from ``least`` to 2^63 - 1."""
    try:
        found = integer(name, fields[name], least)
    except TypeError as error:
        raise ValueError(str(error)) from None
    if found > sys.maxsize:
        raise ValueError(f"{name} must be below 2^63, got {found}")
    return found


def _either(*fields: tuple[dict[str, Any], str]) -> int:
    """The first of these fields that is there and not null."""
    return _integer(*next((x for x in fields if x[0].get(x[1]) is not None), fields[-1]))


def _container(fields: dict[str, Any], name: str, kind: type[Kind]) -> Kind:
    """A field that is an object or a list; an empty one without it. Raises ValueError for other types."""
    found = fields.get(name)
    if found is not None and not isinstance(found, kind):
        raise ValueError(f"{name} must be {'an object' if kind is dict else 'a list'}, got {found!r}")
    return found or kind()


def _expanded(fields: dict[str, Any], name: str, factor: str) -> int:
    size, number = _integer(fields, name), fields[factor]
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < size * number < sys.maxsize:
        raise ValueError(f"{name} * {factor} must be a positive number below 2^63, got {size} * {number!r}")
    return int(size * number)


def _quotient(name: str, whole: int, of: str, part: int) -> int:
    if whole % part:
        raise ValueError(f"{name} must be a multiple of {of}, got {whole} and {part}")
    return whole // part


def text_model(config: Any) -> dict[str, Any]:
    """The fields of a model's config.json, for text and images those of the text model. Without num_hidden_layers that
    is the length of layer_types. Raises ValueError for other types."""
    if not isinstance(config, dict):
        raise ValueError(f"the config must be an object, got {config!r}")
    config = _container(config, "text_config", dict) or config
    kinds = _container(config, "layer_types", list)
    return ({"num_hidden_layers": len(kinds)} if kinds else {}) | config


def layers_of(config: dict[str, Any]) -> list[Recurrent | Softmax]:
    """The layers of a model from its config.json; a model of text and images counts by its text model.

    Raises ValueError for unknown models and for missing or wrong fields.
    """
    config = text_model(config)
    kind = config.get("model_type")
    try:
        if kind in [*FLA]:  # a list: what JSON holds may have no hash
            return _of_fla(FLA[kind], config)
        if kind == "kimi_linear":
            own = _container(config, "linear_attn_config", dict)  # of a checkpoint
            size, heads = (_either((own, x), (config, f"linear_{x}")) for x in ("head_dim", "num_heads"))
            recurrent = None if own.get("kda_layers") is None else len(_container(own, "kda_layers", list))
            softmax = _integer(config, "kv_lora_rank") + _integer(config, "qk_rope_head_dim", 0)
            return _of_types(config, ("kda", heads, size, size), softmax, recurrent)
        if kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
            names = [f"linear_{name}" for name in ("num_value_heads", "key_head_dim", "value_head_dim")]
            heads, K, V = (_integer(config, name) for name in names)
            _quotient(names[0], heads, keys := "linear_num_key_heads", _integer({keys: 1} | config, keys))
            softmax, recurrent = 2 * _integer(config, "num_key_value_heads") * _integer(config, "head_dim"), None
            if not config.get("layer_types"):
                recurrent = _integer(config, "num_hidden_layers")
                recurrent -= recurrent // _integer({"full_attention_interval": 4} | config, "full_attention_interval")
            return _of_types(config, ("gated_delta_rule", heads, K, V), softmax, recurrent)
    except KeyError as error:
        raise ValueError(f"the config of a {kind} model has no {error.args[0]!r}") from None
    known = ", ".join((*FLA, "kimi_linear", "qwen3_next", "qwen3_5_text"))
    raise ValueError(f"model_type {kind!r} is not known, only {known}")


def _of_types(
    config: dict[str, Any], rule: tuple[str, int, int, int], numbers: int, recurrent: int | None
) -> list[Recurrent | Softmax]:
    kinds = _container(config, "layer_types", list)
    if recurrent is None:
        if not kinds:
            raise KeyError("layer_types")
        recurrent = kinds.count(LAYER_TYPES[0])
    layers = _integer(config, "num_hidden_layers")
    if unknown := [x for x in kinds if x not in LAYER_TYPES]:
        raise ValueError(f"layer_types must be of {' and '.join(LAYER_TYPES)}, got {unknown[0]!r}")
    if kinds and layers != len(kinds):
        raise ValueError(f"num_hidden_layers is {layers}, but layer_types has {len(kinds)} entries")
    return _present(rule, recurrent, Softmax(layers - recurrent, numbers))


def _of_fla(rule: str, config: dict[str, Any]) -> list[Recurrent | Softmax]:
    attention, heads = _container(config, "attn", dict), _integer(config, "num_heads")
    softmax = len(_container(attention, "layers", list))
    if rule == "gla":
        widths = {f"hidden_size * expand_{x}": _expanded(config, "hidden_size", f"expand_{x}") for x in "kv"}
        K, V = (_quotient(*width, "num_heads", heads) for width in widths.items())
    else:
        of_keys, heads = heads, _either((config, "num_v_heads"), (config, "num_heads"))
        _quotient("num_v_heads", heads, "num_heads", of_keys)
        K, V = _integer(config, "head_dim"), _expanded(config, "head_dim", "expand_v")
    numbers = 0
    if softmax:
        heads_of_keys = _either((attention, "num_kv_heads"), (attention, "num_heads"))
        size, of_queries = _integer(config, "hidden_size"), _integer(attention, "num_heads")
        numbers = 2 * heads_of_keys * _quotient("hidden_size", size, "num_heads of attn", of_queries)
    layers = _integer(config, "num_hidden_layers") - softmax
    return _present((rule, heads, K, V), layers, Softmax(softmax, numbers))


def _present(rule: tuple[str, int, int, int], layers: int, softmax: Softmax) -> list[Recurrent | Softmax]:
    name, *sizes = rule
    if (fewest := min(layers, softmax.layers)) < 0:
        raise ValueError(f"num_hidden_layers is {layers + softmax.layers}, {-fewest} less than the layers listed")
    return [x for x in (Recurrent(name, layers, *sizes), softmax) if x.layers]


def report(layers: Sequence[Recurrent | Softmax], cut: Cut) -> str:
    """The printed table. Raises ValueError for a cut or a layer that the operators reject."""
    check_cut(cut)
    lines = [f"{cut.ranks} ranks, {cut.own:,} tokens on each, batch {cut.batch}, bfloat16; MiB of one rank"]
    traffic = workspaces = stays = most = 0
    for layer in layers:
        if isinstance(layer, Recurrent):
            found, sent = peak(layer, cut), state(layer, cut) * (1 + cut.zigzag) * (cut.ranks > 1)
            workspaces += workspace(layer, cut)
            stays += layer.layers * (inputs(layer, cut) + found.saved)
            most = max(most, found.both - found.saved)
            traffic += 2 * layer.layers * sent
            name = f"{layer.layers} x {OPERATORS[layer.rule]}, {layer.heads} heads of {layer.K} x {layer.V}"
            lines += [
                name,
                line_of("inputs, kept for backward, a layer", inputs(layer, cut)),
                line_of("output and what else is kept, a layer", found.saved),
                line_of("peak beside inputs, forward alone", found.forward),
                line_of("peak beside inputs, both passes", found.both),
                line_of("state that is sent, a layer and pass", sent),
            ]
        else:
            all_ranks = gathered(layer, cut)
            received = all_ranks * (cut.ranks - 1) // cut.ranks
            stays += layer.layers * all_ranks
            traffic += 2 * layer.layers * received
            lines += [
                f"{layer.layers} x softmax, {layer.numbers} numbers a token",
                line_of("keys of all ranks, kept for backward, a layer", all_ranks),
                line_of("received, a layer and pass", received),
            ]
    lines += [
        "the model",
        line_of("kept for backward by these operators", stays),
        line_of("the same at the peak of one's backward", stays + most),
        line_of("workspaces, in the arena (ALLSCAN_HEAP)", workspaces),
        line_of("sent or received in a step", traffic),
    ]
    return "\n".join(lines)


def line_of(told: str, nbytes: float) -> str:
    """A line of the table."""
    return f"  {told:<48} {nbytes / (1 << 20):12,.1f}"
