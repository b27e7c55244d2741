"""``allscan estimate``: memory and traffic of a model's layers over a sharded sequence, from its config, without a GPU.

An operator's memory is the memory of its launch plans, which are recorded here as for a GPU, in bfloat16.
tests/tools/test_estimate.py and tests/gpu/test_estimate_gpu.py compare it with measured peaks.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..base.tiling import H100_MULTIPROCESSORS, scan_tile, transition_tile
from ..launch.plan import Plan
from ..ops.carrier import Carried, record_call
from ..ops.delta.delta_passes import delta_segment_length
from ..ops.delta.own_chunks import ChunkPass
from ..ops.delta.records import DeltaShape, Ends, Inputs, Outer, Saved, SavedStates
from ..ops.delta.scalar_chunks import ScalarChunkPass
from ..ops.gla.gla_plans import backward_plan, forward_plan, shape_of
from ..scan.fwd_epochs import FWD_EPOCHS
from ..scan.workspace import Spec, workspace_layout
from ..tokens.packing import CHUNK_TOKENS, Layout, batch_pieces, most_segments

OPERATORS = {"gla": "zeco_gla", "kda": "zeco_kda", "gated_delta_rule": "zeco_gated_delta_rule"}
FLA = {"gla": "gla", "kda": "kda", "gated_deltanet": "gated_delta_rule"}


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
    """Distribution of the sequence over the ranks."""

    tokens: int  # number of tokens of all ranks
    ranks: int
    batch: int = 1
    zigzag: bool = False
    depth: int = 3
    puts: bool = False  # NVSHMEM's put in place of loads and stores
    multiprocessors: int = H100_MULTIPROCESSORS

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
        attributes = {"carrier of transitions": self}
        of_gpu = dict(device=torch.device("cuda"), graphs=None)
        self.comm: Any = types.SimpleNamespace(size=ranks, attributes=attributes, **of_gpu)

    def prepare(self, *_: Any, **__: Any) -> None:
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

    def record(self, plan: Plan, carried: Carried, reverse: bool, zigzag: bool) -> None:
        """Record a step with the scan's buffers."""
        record_call(plan, carried, reverse, zigzag)

    def expected_us(self, words: int, zigzag: bool) -> float:
        """A fixed time, so that forward processes its keys in one kernel."""
        return 0.0


def gla_peak(layer: Recurrent, cut: Cut, recompute: bool = True) -> Peak:
    """Peak of zeco_gla."""
    B, T, H, K, V = cut.batch, cut.own, layer.heads, layer.K, layer.V
    of_gates, dtype = torch.float32, torch.bfloat16
    how = int(cut.zigzag), cut.multiprocessors, not recompute
    shape = shape_of(B, T, H, K, V, B, dtype, of_gates, "cuda", *how)
    layout, apart = cut.layout(shape.segment), _Apart(cut.ranks)
    tensors = *_of_meta([B, T, H], [K, K, V]), _of_meta([B, T, H], [K], of_gates)[0]
    saved = torch.empty(shape.saved_words, dtype=torch.float32, device="meta")
    forward = forward_plan(shape, 1.0, layout, apart, *tensors, None, None, saved)
    backward = backward_plan(shape, 1.0, layout, apart, *tensors, tensors[2], None, None, saved)
    stays = tensors[2].nbytes + saved.nbytes
    gradients = sum(x.nbytes for x in tensors)
    return Peak(stays + forward.bytes, stays + max(forward.bytes, gradients + backward.bytes), stays)


def delta_peak(layer: Recurrent, cut: Cut) -> Peak:
    """Peak of zeco_kda or zeco_gated_delta_rule with allscan's chunk kernels and as many key heads as value heads."""
    B, T, H, K, V = cut.batch, cut.own, layer.heads, layer.K, layer.V
    segment = delta_segment_length(B * T, H, cut.multiprocessors)
    segments = most_segments(B, T, B, segment, int(cut.zigzag))
    scalar, dtype = layer.rule == "gated_delta_rule", torch.bfloat16
    shape = DeltaShape(B, H, H, K, V, dtype, scalar, cut.zigzag)
    states = (ScalarChunkPass if scalar else ChunkPass)(_Apart(cut.ranks).comm, cut.layout(segment), shape)
    rows = [1, B * T, H] if cut.zigzag else [B, T, H]  # zigzag packs both halves
    q, v, scores = _of_meta(rows, [K, V, CHUNK_TOKENS])
    g, beta = (_of_meta(rows, [K], torch.float32)[0], torch.empty(rows, dtype=dtype, device="meta"))
    x = Inputs(q, q, v, g[..., 0] if scalar else g, beta)
    transitions, incoming = _of_meta([segments, H, K], [K, V], torch.float32)
    saved_states = SavedStates(transitions, incoming, torch.empty(FWD_EPOCHS, dtype=torch.int64, device="meta"))
    saved, outer = Saved(scores, scores), Outer(v, None, None)
    forward, _ = states.recorded(states.record_forward, x, Ends(None, None), saved_states, scale=1.0)
    backward, _ = states.recorded(states.record_backward, x, saved, outer, saved_states, scale=1.0)
    stays = sum(y.nbytes for y in (v, scores, scores, transitions, incoming))
    gradients = sum(y.numel() * y.element_size() for y in x)
    return Peak(stays + forward.bytes, stays + max(forward.bytes, gradients + backward.bytes), stays)


def _of_meta(rows: list[int], widths: list[int], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.empty(*rows, width, dtype=dtype, device="meta") for width in widths]


def peak(layer: Recurrent, cut: Cut) -> Peak:
    """Peak of one call of the layer's operator."""
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
    if layer.rule == "gla":  # half of the programs that may wait, see AllScanCarrier.prepare
        device = torch.device("cuda")
        tile = scan_tile((G, layer.K, layer.V), max(1, cut.multiprocessors // 4), not cut.puts, device)
    else:
        tile = transition_tile(layer.K)
    spec = Spec((G, layer.K, layer.V), tile, cut.depth, "put" if cut.puts else "sentinel", "chain")
    return 2 * workspace_layout(spec, cut.puts)[1]


def gathered(layer: Softmax, cut: Cut) -> int:
    """Bytes of all ranks' keys and values in one layer, saved for backward; the other ranks' are received."""
    return 2 * cut.batch * cut.tokens * layer.numbers


def layers_of(config: dict[str, Any]) -> list[Recurrent | Softmax]:
    """The layers of a model from its config.json; a model of text and images counts by its text model.

    Raises ValueError for unknown models and missing fields.
    """
    config = config.get("text_config") or config
    kind = config.get("model_type")
    try:
        if kind in FLA:
            return _of_fla(FLA[kind], config)
        if kind == "kimi_linear":
            of_checkpoint = config.get("linear_attn_config") or {}
            size, heads = (of_checkpoint.get(x) or config[f"linear_{x}"] for x in ("head_dim", "num_heads"))
            recurrent = len(of_checkpoint["kda_layers"]) if "kda_layers" in of_checkpoint else None
            softmax = config["kv_lora_rank"] + config["qk_rope_head_dim"]
            return _of_types(config, ("kda", heads, size, size), softmax, recurrent)
        if kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
            heads, K, V = (config[f"linear_{name}"] for name in ("num_value_heads", "key_head_dim", "value_head_dim"))
            softmax, recurrent = 2 * config["num_key_value_heads"] * config["head_dim"], None
            if not config.get("layer_types"):
                recurrent = config["num_hidden_layers"]
                recurrent -= recurrent // config.get("full_attention_interval", 4)
            return _of_types(config, ("gated_delta_rule", heads, K, V), softmax, recurrent)
    except KeyError as error:
        raise ValueError(f"the config of a {kind} model has no {error.args[0]!r}") from None
    known = ", ".join((*FLA, "kimi_linear", "qwen3_next", "qwen3_5_text"))
    raise ValueError(f"model_type {kind!r} is not known, only {known}")


def _of_types(
    config: dict[str, Any], rule: tuple[str, int, int, int], numbers: int, recurrent: int | None
) -> list[Recurrent | Softmax]:
    if recurrent is None:
        recurrent = sum(kind == "linear_attention" for kind in config["layer_types"])
    layers = config["num_hidden_layers"] if "num_hidden_layers" in config else len(config["layer_types"])
    return _present(rule, recurrent, Softmax(layers - recurrent, numbers))


def _of_fla(rule: str, config: dict[str, Any]) -> list[Recurrent | Softmax]:
    attention = config.get("attn") or {}
    softmax = len(attention.get("layers", ()))
    if rule == "gla":
        heads = config["num_heads"]
        K, V = (int(config["hidden_size"] * config[f"expand_{x}"]) // heads for x in "kv")
    else:
        heads = config.get("num_v_heads") or config["num_heads"]
        K, V = config["head_dim"], int(config["head_dim"] * config["expand_v"])
    numbers = 0
    if softmax:
        heads_of_keys = attention.get("num_kv_heads") or attention["num_heads"]
        numbers = 2 * heads_of_keys * (config["hidden_size"] // attention["num_heads"])
    layers = config["num_hidden_layers"] - softmax
    return _present((rule, heads, K, V), layers, Softmax(softmax, numbers))


def _present(rule: tuple[str, int, int, int], layers: int, softmax: Softmax) -> list[Recurrent | Softmax]:
    name, *sizes = rule
    return [x for x in (Recurrent(name, layers, *sizes), softmax) if x.layers]


def report(layers: Sequence[Recurrent | Softmax], cut: Cut) -> str:
    """The printed table."""
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
