"""`allscan estimate` against peaks measured on GPUs, in bench/results."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import os
import re
import subprocess
import sys

import pytest
import torch

from allscan.base.tiling import H100_MULTIPROCESSORS
from allscan.ops.delta.delta_passes import delta_segment_length
from allscan.tokens.packing import most_segments
from allscan.tools import doctor, estimate
from allscan.tools.estimate import Cut, Recurrent, Softmax
from bench.hybrid import VOCABULARY, Hybrid
from bench.long import SLICE
from support import ROOT

MIB = 1 << 20


def installed(package):
    """Return (major, minor) of an installed package; (0,) without it."""
    try:
        return tuple(map(int, importlib.metadata.version(package).split(".")[:2]))
    except importlib.metadata.PackageNotFoundError:
        return (0,)


pytestmark = [pytest.mark.cpu, pytest.mark.quick]


@pytest.fixture
def tools():
    """allscan.tools.estimate_fit, which imports transformers: that takes seconds."""
    pytest.importorskip("transformers")
    from allscan.tools import estimate_fit

    return estimate_fit


@pytest.fixture
def estimated(tmp_path, capsys):
    """Return estimated(config, options): the exit status of ``allscan estimate`` and what it prints."""

    def estimated(config, options):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        return doctor.estimate([str(path), *options.split()]), capsys.readouterr()

    return estimated


def check_rejected(answer, message):
    status, found = answer
    assert status == 2 and not found.out and found.err.count("\n") == 1 and message in found.err


def measured(name):
    with open(os.path.join(ROOT, "bench", "results", f"{name}.csv"), encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def near(found, mib, bound):
    assert abs(found / MIB / float(mib) - 1) < bound, (found / MIB, mib)


def test_gla_is_within_a_percent_of_what_was_measured():
    rows = [x for x in measured("operator_h100") if x["method"] == "zeco" and x["ranks"] == "2"]
    assert len(rows) >= 6
    for row in rows:
        T, H, D = (int(row[name]) for name in "THD")
        found = estimate.gla_peak(Recurrent("gla", 1, H, D, D), Cut(2 * T, 2))
        near(found.forward if row["pass"] == "forward" else found.both, row["extra_mib"], 0.01)
    of_one = 0
    for row in measured("local"):
        B, T, H, K, V = (int(n) for n in row["shape"].split("x"))
        if "zeco" in row["method"] and not row["sequences"] and K == V == 128:
            layer = Recurrent("gla", 1, H, K, V)
            cut = Cut(T, 1, B, recompute="=False" not in row["method"])
            near(estimate.gla_peak(layer, cut).both, row["extra_mib"], 0.01)
            of_one += 1
    assert of_one >= 10


@pytest.mark.parametrize("T, H", [(16384, 32), (16384, 8), (4096, 32)])
@pytest.mark.parametrize("rule, of_gates", [("kda", 4 * 128), ("gated_delta_rule", 4)])
def test_delta_rules_hold_these_tensors(rule, of_gates, T, H):
    """In bfloat16 with K = V = 128: bytes a token and head, and states of segments."""
    found = estimate.delta_peak(Recurrent(rule, 1, H, 128, 128), Cut(2 * T, 2))
    wide, chunk = 2 * 128, 2 * 64  # of 128 channels, of a chunk's tokens
    kda = rule == "kda"
    saved, operands = wide + 2 * chunk, 4 * wide if kda else 3 * 4  # o, Aqk, T; qg, kg, w, u, or three factors
    grads, states = 3 * wide + of_gates + 2, 2 * (128 * 128 * 2 // 64) + 2 * wide  # + gradients; h, dh, v_new, dv_new
    pairs = 2 * chunk + 8 if kda else 2 * 2 * 4  # and sums, or parts of two sums
    length = delta_segment_length(T, H, H100_MULTIPROCESSORS)
    segments, most = T // length, most_segments(1, T, 1, length)
    state = 128 * 128 * 4 * H
    # saved for the maximum number of segments: transition, incoming; local, prefix; own, prev, dense
    of_segments, of_rank = 2 * (most + segments) * state, 3 * state
    near(found.forward, (T * H * (saved + operands) + of_segments + of_rank) / MIB, 0.03)
    of_segments += segments * state  # incoming gradients
    near(found.both, (T * H * (saved + grads + operands + states + pairs) + of_segments + of_rank) / MIB, 0.03)


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("rule, kept", [("kda", 4 * 256 + 8), ("gated_delta_rule", 256 + 512)])
def test_what_delta_rules_keep(rule, kept, zigzag):
    """With recompute=False, bytes a token and head: KDA's qg, kg, w, u and sums of gates; Gated DeltaNet's v_new and a
    64th of the chunks' states. Backward's peak has them in either case, so it is the same but for a chunk's."""
    layer, cut, T = Recurrent(rule, 1, 32, 128, 128), Cut(32768, 2, zigzag=zigzag), 16384
    usual, found = (estimate.peak(layer, cut._replace(recompute=x)) for x in (True, False))
    near(found.saved - usual.saved, kept * T * 32 / MIB, 0.02)
    assert usual.both <= found.both < 1.01 * usual.both and usual.saved < found.saved < found.forward
    assert found.forward == pytest.approx(usual.forward + (0 if rule == "kda" else kept * T * 32), rel=0.01)


@pytest.mark.parametrize("rule", ["gla", "kda", "gated_delta_rule"])
def test_peaks_of_other_cuts(rule):
    """Compare the same tokens a rank on one rank, on two, and in two halves a rank, each of which sends a state."""
    layer, T = Recurrent(rule, 1, 16, 128, 128), 8192
    one, two, halves = (
        estimate.peak(layer, Cut(ranks * T, ranks, zigzag=zigzag))
        for ranks, zigzag in ((1, False), (2, False), (2, True))
    )
    for x, y in ((one, two), (two, halves)):
        assert all(a <= b < 1.15 * a for a, b in zip(x, y, strict=True)), (x, y)
    assert two.forward < halves.forward  # more segments, and two states
    for found in (one, two, halves):
        assert T * 16 * 128 * 2 < found.saved < found.forward < found.both
    batch = estimate.peak(layer, Cut(T, 2, batch=2))
    assert abs(batch.both / two.both - 1) < 0.05


def config_of(row):
    """Return the config of a measured hybrid."""
    family, _, mla = row["model"].partition(", MLA ")
    made = Hybrid(family, int(mla or 0)).config(int(row["layers"]), 2048, int(row["heads"]), 128, VOCABULARY)
    return made.to_dict()


def cut_of(row):
    ranks = 1 if row["method"] == "data parallel" else int(row["ranks"])
    return Cut(int(row["T"]) * ranks, ranks, zigzag="zigzag" in row["method"])


OUR_CONVOLUTIONS = "03fd9c956838", "cedc25747836"  # sources; data parallel ran torch's there


def rows_of_hybrids():
    """Return rows of bench/results/hybrid.csv: whole models whose recurrent layers run our kernels of delta rules. With
    data parallelism each rank has a sequence of its own."""
    rows = [x for x in measured("hybrid") if x["chunk"] == "allscan" and x["peak_gib"] and "heads" not in x["method"]]
    return [x for x in rows if x["model"] != "nemotron_h" and x["method"] != "gathered"]


def measured_hybrids():
    """Return the rows whose peaks can be compared: others were measured with torch's convolutions, which save more than
    ours."""
    rows = [x for x in rows_of_hybrids() if x["method"] == "data parallel" or x["sources"] in OUR_CONVOLUTIONS]
    return [pytest.param(x, id=f"{x['model']}, {x['method']}") for x in rows]


@pytest.mark.slow(but=("kimi_linear, MLA 128, allscan, zigzag", "qwen3_next, allscan"))
@pytest.mark.skipif(
    installed("transformers") < (5, 23), reason="measured with transformers 5.23, whose layers save less than 5.20's"
)
@pytest.mark.parametrize("row", measured_hybrids())
def test_whole_hybrids_are_within_a_percent_of_what_was_measured(tools, row):
    found = tools.step_of(tools.model_of(config_of(row)), cut_of(row))
    assert found.parameters == pytest.approx(2 * int(row["parameters"]), rel=1e-4)
    near(found.peak, 1024 * float(row["peak_gib"]), 0.01)


def small(family, layers=8):
    """Return a config of ``layers`` layers of two or three kinds."""
    if family != "nemotron_h":
        return Hybrid(family, 128 * (family == "kimi_linear")).config(layers, 256, 4, 64, 4099).to_dict()
    kinds = ["mamba", "mlp", "mamba", "attention", "mlp", "mamba", "mlp", "mamba"]
    sizes = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=64, mamba_num_heads=8, mamba_head_dim=64)
    more = dict(n_groups=2, ssm_state_size=64, vocab_size=4099, pad_token_id=None, eos_token_id=1, bos_token_id=0)
    return dict(model_type=family, hidden_size=256, intermediate_size=512, layers_block_type=kinds, **sizes, **more)


@pytest.mark.slow(but=("kimi_linear-False-None", "nemotron_h-True-512"))
@pytest.mark.parametrize("checkpointing, loss_slice", [(False, None), (True, 512)])
@pytest.mark.parametrize("family", ["kimi_linear", "qwen3_next", "nemotron_h"])
def test_a_table_of_few_layers_is_that_of_the_whole_model(tools, family, checkpointing, loss_slice):
    for cut in Cut(4096, 1), Cut(16384, 4, zigzag=True):
        found = tools.fit(small(family), cut, tools.Options(checkpointing, 1, loss_slice))
        model = tools.model_of(small(family))
        if checkpointing:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=dict(use_reentrant=False))
        whole = tools.step_of(model, cut, loss_slice)
        assert found.state == pytest.approx(whole.parameters + whole.gradients + whole.optimizer, rel=1e-2)
        assert -1e-3 < (found.total - found.arena) / whole.peak - 1 < 2e-2


def test_whole_hybrids_fit_within_two_percent_of_what_was_measured(tools):
    rows = {(x["model"], x["method"]): x for (x,) in (row.values for row in measured_hybrids())}
    row = rows["qwen3_next", "allscan, zigzag"]
    found = tools.fit(config_of(row), cut_of(row), tools.Options())
    near(found.total - found.arena, 1024 * float(row["peak_gib"]), 0.02)
    assert found.keys > 0 and 0 < found.share < 1


@pytest.mark.parametrize("family", ["kimi_linear", "qwen3_next"])
def test_long_steps_fit_as_measured(tools, family):
    """Peaks of bench.long, each layer recomputed, the loss and MLPs in slices."""
    config = Hybrid(family, 128 if family == "kimi_linear" else 0).config(12, 2048, 16, 128, VOCABULARY).to_dict()
    rows = [row for row in measured("long") if row["model"] == family]
    assert rows
    for row in rows:
        ranks, T = (1, int(row["T"])) if row["method"] == "data parallel" else (int(row["ranks"]), int(row["T"]))
        options = tools.Options(True, 1, 8192, 2, SLICE, offload="host" in row["method"])
        found = tools.fit(config, Cut(T * ranks, ranks, zigzag=ranks > 1), options)
        near(found.total - found.arena, 1024 * float(row["peak_gib"]), 0.1)


@pytest.mark.slow
def test_measured_shares_of_speed_are_above_the_computed_ones(tools):
    rows = [row for row in rows_of_hybrids() if row["method"].startswith("allscan")]
    assert {(x["ranks"], x["method"]) for x in rows} == {(n, f"allscan{z}") for n in "24" for z in ("", ", zigzag")}
    for row in rows:
        found = tools.fit(config_of(row), cut_of(row), tools.Options()).share
        above = float(row["percent_of_data_parallel"]) / 100 - found
        low, high = (0.035, 0.105) if cut_of(row).zigzag else (0.085, 0.155)
        if row["sources"] in OUR_CONVOLUTIONS:
            low, high = 0.155, 0.185
        assert low < above < high, (row["model"], row["method"], row["ranks"], above)


def test_layers_that_share_parameters(tools):
    """Zamba2: every block of attention counts in each layer that calls it, its parameters and moments once."""
    sizes = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=4, mamba_d_state=16, n_mamba_heads=8)
    more = dict(num_hidden_layers=8, num_mem_blocks=1, adapter_rank=8, vocab_size=97)
    more["layers_block_type"] = ["mamba", "hybrid"] * 4
    config = dict(model_type="zamba2", mamba_ngroups=1, pad_token_id=None, **sizes, **more)
    model = tools.model_of(config)
    shared = sum(p.numel() for p in model.model.layers[1].shared_transformer.parameters() if p.ndim > 1)
    once = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    assert len(tools.Layers(model).counts) == 8 and tools._active(model) == once + 3 * shared
    cut = Cut(4096, 2)
    whole = tools.step_of(tools.model_of(config), cut)
    found, sharded = (tools.fit(config, cut, tools.Options(shard=n)) for n in (1, 2))
    assert found.state == 8 * sum(p.numel() for p in model.parameters()) < whole.parameters * 4  # which are rounded up
    assert found.state / 2 < sharded.state < found.state and found.keys > 0
    assert abs((found.total - found.arena) / whole.peak - 1) < 2e-2


@pytest.mark.slow
def test_the_table_in_the_documentation(tools, estimated):
    with open(os.path.join(ROOT, "docs", "estimate.md"), encoding="utf-8") as file:
        text = file.read()
    config, command, table = re.search(
        r"```json\n(.*?)```.*?\nallscan estimate config.json (.*?)\n```.*?```\n(.*?)```", text, re.S
    ).groups()
    status, found = estimated(json.loads(config), command)
    assert status == 0 and found.out == table


def test_the_memory_of_zeco_ssd_is_what_was_measured():
    row = next(x for x in measured("ssd") if x["method"] == "zeco_ssd" and x["shape"] == "16384x128x64x8x128")
    T, H, P, G, N = map(int, row["shape"].split("x"))

    def of_meta(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype, device="meta")

    B, heads = of_meta(1, T, G, N), of_meta(H, dtype=torch.float32)
    found = estimate.ssd_peak((of_meta(1, T, H, P), of_meta(1, T, H), heads, B, B, heads, None, heads), Cut(T, 1))
    near(found.both, row["extra_mib"], 0.01)


def test_shares_of_the_state(tools):
    """FSDP2 over 8 GPUs, and the share of speed: doubling the ranks doubles the softmax layers' operations."""
    config = small("qwen3_next")
    plain, sharded = (tools.fit(config, Cut(4096, 1), tools.Options(shard=n, state_bytes=4)) for n in (1, 8))
    assert plain.state / 8 < sharded.state < plain.state
    one, two, four = (tools.fit(config, Cut(4096 * n, n), tools.Options()) for n in (1, 2, 4))
    assert one.share == 1.0 and 1 / four.share - 1 == pytest.approx(3 * (1 / two.share - 1))
    assert one.keys == 0 and four.keys == 3 * two.keys
    assert tools.fit(small("kimi_linear") | dict(num_experts=0), Cut(4096, 1), tools.Options()).parameters > 0


def test_the_table_from_the_command_line(tools, estimated):
    config = small("nemotron_h")
    options = "--tokens 16k --ranks 1,2,4 --gpu 1g --checkpointing --loss-slice 512 --shard 4"
    status, found = estimated(config, options)
    rows = found.out.splitlines()[-3:]
    assert status == 0
    assert [row.split()[:2] for row in rows] == [["1", "16,384"], ["2", "8,192"], ["4", "4,096"]]
    assert all(row.endswith("fits") for row in rows) and found.err.count(" rank") == 3
    status, found = estimated(config, "--tokens 16k --ranks 4 --gpu 16m")
    *_, row, hint = found.out.splitlines()
    assert status == 0 and row.endswith("does not fit") and "--checkpointing" in hint
    assert doctor.size("80GB") == doctor.size("80g") == 80 << 30


def test_a_step_beside_a_count_by_hand():
    """Counts live, saved and backward tensors of a torch model."""
    from allscan.tools.estimate_step import Living

    with Living() as counter:
        x = torch.empty(1024, 1024, device="meta", requires_grad=True)
        assert counter.bytes == 4 * MIB
        y = (x.exp() * 2).relu()  # saved: exp's and relu's results; temporarily the product's
        assert (counter.bytes, counter.most) == (12 * MIB, 16 * MIB)
        y.sum().backward()
        assert x.grad is not None and counter.most <= 24 * MIB
        del y
        assert counter.bytes == 8 * MIB


def test_what_is_sent_and_held():
    layer, cut = Recurrent("kda", 9, 16, 128, 128), Cut(32768, 2)
    assert estimate.state(layer, cut) == MIB
    assert 6 <= estimate.workspace(layer, cut) / MIB < 6.1  # 2 directions, depth 3
    assert 12 <= estimate.workspace(layer, cut._replace(puts=True)) / MIB < 12.1
    assert estimate.workspace(layer, cut._replace(ranks=1)) == 0
    assert estimate.inputs(layer, cut) == 16384 * 16 * (2 * 3 * 128 + 4 * 128 + 2)
    assert estimate.gathered(Softmax(3, 576), cut) == 32768 * 576 * 2
    assert estimate.inputs(layer, cut._replace(ranks=4)) * 2 == estimate.inputs(layer, cut)


KIMI = dict(
    model_type="kimi_linear",
    linear_head_dim=128,
    linear_num_heads=16,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    layer_types=["linear_attention"] * 3 + ["full_attention"],
)
NEXT = dict(
    model_type="qwen3_next",
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    num_key_value_heads=2,
    head_dim=256,
    layer_types=["linear_attention"] * 3 + ["full_attention"],
)
CHECKPOINT = dict(  # as in Kimi-Linear's own config: layers count from 1
    model_type="kimi_linear",
    num_hidden_layers=27,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    linear_attn_config=dict(
        head_dim=128,
        num_heads=32,
        kda_layers=[i for i in range(1, 27) if i % 4],
        full_attn_layers=[*range(4, 25, 4), 27],
    ),
)
TEXT = dict(  # for text and images, without layer types: every fourth is softmax
    model_type="qwen3_5",
    text_config=dict(
        model_type="qwen3_5_text",
        num_hidden_layers=32,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_key_value_heads=4,
        head_dim=256,
    ),
)
GLA = dict(model_type="gla", hidden_size=2048, num_hidden_layers=24, num_heads=4, expand_k=0.5, expand_v=1.0)
GDN = dict(model_type="gated_deltanet", num_hidden_layers=6, num_heads=6, head_dim=256, expand_v=2, hidden_size=2048)


@pytest.mark.parametrize(
    "config, layers",
    [
        (KIMI, [Recurrent("kda", 3, 16, 128, 128), Softmax(1, 576)]),
        (NEXT, [Recurrent("gated_delta_rule", 3, 32, 128, 128), Softmax(1, 1024)]),
        (GLA, [Recurrent("gla", 24, 4, 256, 512)]),
        (CHECKPOINT, [Recurrent("kda", 20, 32, 128, 128), Softmax(7, 576)]),
        (TEXT, [Recurrent("gated_delta_rule", 24, 32, 128, 128), Softmax(8, 2048)]),
        (GDN, [Recurrent("gated_delta_rule", 6, 6, 256, 512)]),
        (
            GDN | dict(attn=dict(layers=[1], num_heads=16, num_kv_heads=4)),
            [Recurrent("gated_delta_rule", 5, 6, 256, 512), Softmax(1, 1024)],
        ),
    ],
)
def test_configs(config, layers):
    assert estimate.layers_of(config) == layers


def test_a_step_from_the_command_line(tools, estimated):
    config = Hybrid("qwen3_next").config(4, 64, 4, 16, 97).to_dict()

    def told(config, ranks, options=""):
        return estimated(config, f"--tokens {4096 * ranks} --ranks {ranks} --step {options}")

    def kept(text):
        return [float(line.split()[-1]) for line in text.splitlines() if "kept between" in line]

    (status, one), (_, two), (_, four), (_, rows) = (told(config, *x) for x in ((1,), (2,), (4,), (1, "--batch 2")))
    assert status == 0 and one.out.count("a training step of the whole model") == 1
    assert kept(two.out) < kept(four.out) < kept(rows.out)  # saved: other ranks' keys; another row's everything
    assert kept(two.out) < kept(one.out)  # whose convolutions are torch's
    status, more = told(config, 1, "--no-recompute")
    assert status == 0 and kept(one.out) < kept(more.out)
    experts = config | dict(mlp_only_layers=[], num_experts=4, moe_intermediate_size=64)
    few, more = (told(experts | dict(num_experts_per_tok=n), 1)[1].out for n in (1, 3))
    assert kept(few) < kept(more)
    model = tools.model_of(experts)
    model.config._experts_implementation = "eager"  # one expert after the other, while there are tokens for them
    with pytest.raises(ValueError, match="whose memory depends on data"):
        tools.step_of(model, Cut(256, 1))
    status, found = told(GLA | dict(hidden_size=64), 1)
    assert status == 2 and "recurrence of GLAForCausalLM" in found.err
    small = Hybrid("kimi_linear", 128).config(4, 64, 4, 16, 97).to_dict()
    status, found = told(small | dict(pad_token_id=97), 1)
    assert status == 2 and 'pad_token_id is 97 (in the file), vocab_size 97: set "pad_token_id" to null' in found.err
    assert "(the default), vocab_size 97" in told({n: x for n, x in small.items() if n != "pad_token_id"}, 1)[1].err
    assert [told(small | dict(pad_token_id=pad), 1)[0] for pad in (96, None)] == [0, 0]


@pytest.mark.parametrize(
    "config, message",
    [
        (GLA | dict(num_heads=1, expand_k=2.0, expand_v=2.0), "zeco_gla: K must be at most 512, got 4096"),
        (NEXT | dict(linear_key_head_dim=300), "zeco_gated_delta_rule: K must be at most 256, got 300"),
        (NEXT | dict(linear_value_head_dim=1 << 60), "zeco_gated_delta_rule: Storage size"),
        (KIMI | dict(linear_num_heads=70000), "zeco_kda: 1 states of sequences"),
        (GLA | dict(num_hidden_layers=-2), "num_hidden_layers must be at least 1, got -2"),
        (CHECKPOINT | dict(num_hidden_layers=3), "num_hidden_layers is 3, 17 less"),
        (KIMI | dict(num_hidden_layers=27), "num_hidden_layers is 27, but layer_types has 4 entries"),
        ([], "the config must be an object, got []"),
        ("x", "the config must be an object, got 'x'"),
        (None, "the config must be an object, got None"),
        ({"text_config": 5}, "text_config must be an object, got 5"),
        ({"model_type": ["x"]}, "model_type ['x'] is not known"),
        (KIMI | dict(model_type="llama"), "'llama' is not known"),
        (GLA | dict(num_heads=0), "num_heads must be at least 1, got 0"),
        (GLA | dict(num_heads="4"), "num_heads must be an integer, got '4'"),
        (GLA | dict(num_heads=-4), "num_heads must be at least 1, got -4"),
        (GLA | dict(num_heads=3), "hidden_size * expand_k must be a multiple of num_heads, got 1024 and 3"),
        (GLA | dict(num_heads=10**30), "num_heads must be below 2^63"),
        (GLA | dict(expand_k=float("nan")), "must be a positive number below 2^63, got 2048 * nan"),
        (GDN | dict(num_v_heads=7), "num_v_heads must be a multiple of num_heads, got 7 and 6"),
        (GDN | dict(attn=dict(layers=5)), "layers must be a list, got 5"),
        (KIMI | dict(layer_types=[["x"]]), "layer_types must be of linear_attention and full_attention"),
        (TEXT["text_config"] | dict(full_attention_interval=0), "full_attention_interval must be at least 1"),
    ],
)
def test_wrong_configs(config, message, estimated):
    check_rejected(estimated(config, "--tokens 4096 --ranks 2"), message)


@pytest.mark.parametrize(
    "options, message",
    [
        ("--tokens 65 --ranks 2", "tokens must be a multiple of 2, the ranks, got 65"),
        ("--tokens 1 --ranks 2", "tokens must be a multiple of 2, the ranks, got 1"),
        ("--tokens 66 --ranks 2 --layout zigzag", "tokens must be a multiple of 4, twice the ranks, with zigzag"),
        ("--tokens 99999999999999999999 --ranks 1", "tokens must be below 2^63"),
        ("--tokens 8388608 --ranks 2", "a rank may have 65,535 chunks of 64 tokens, got batch 1 of 4,194,304"),
        ("--tokens 64 --ranks 2 --depth 0", "depth must be at least 1, got 0"),
    ],
)
def test_wrong_cuts(options, message, estimated):
    check_rejected(estimated(GLA, options), message)


@pytest.mark.parametrize(
    "options, message",
    [
        ("--ranks 2,0 --gpu 1g", "ranks must be at least 1, got 0"),
        ("--ranks 1,a --gpu 1g", "argument --ranks: invalid numbers value: '1,a'"),
        ("--ranks 1 --gpu x", "argument --gpu: invalid size value: 'x'"),
        ("--ranks 1 --gpu infg", "argument --gpu: invalid size value: 'infg'"),
        ("--ranks 1 --gpu 0", "such as 80G, got 0 bytes"),
        ("--ranks 1 --gpu 80", "such as 80G, got 80 bytes"),
        ("--ranks 1,2", "several numbers of ranks are for --gpu"),
        ("--ranks 1 --gpu 1g --shard 0", "shard must be at least 1, got 0"),
        ("--ranks 1 --gpu 1g --loss-slice 0", "loss_slice must be at least 1, got 0"),
        ("--ranks 1 --gpu 1g --step", "--step and --gpu are two reports"),
        ("--ranks 1 --gpu 1g --offload", "--offload is for --checkpointing"),
        (
            "--ranks 1 --shard 8",
            "--checkpointing, --offload, --shard, --loss-slice, --mlp-slice and --state-dtype are for --gpu",
        ),
        ("--ranks 1 --tokens 8k5", "argument --tokens: invalid size value: '8k5'"),
    ],
)
def test_wrong_options_of_gpu(options, message, tools, estimated):
    check_rejected(estimated(small("qwen3_next"), f"--tokens 4k {options}"), message)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({}, None),
        ({"hidden_size": "x"}, "transformers cannot build 'kimi_linear'"),
        ({"num_hidden_layers": 27}, "num_hidden_layers is 27, but layer_types has 12"),
    ],
)
def test_a_step_of_the_config_in_the_documentation(fields, message, tools, estimated):
    with open(os.path.join(ROOT, "docs", "estimate.md"), encoding="utf-8") as file:
        (text,) = re.findall(r"^config = (\{.*?^\})", file.read(), re.M | re.S)
    status, found = estimated(eval(text) | fields, "--tokens 4096 --ranks 2 --step")
    if message is None:
        assert status == 0 and "9 x zeco_kda" in found.out and "a training step of the whole model" in found.out
    else:
        check_rejected((status, found), message)


@pytest.mark.slow(but="estimate")
@pytest.mark.parametrize("options", ["--version", "estimate {config} --tokens 64 --ranks 2"])
def test_a_reader_that_closes_the_output(options, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GLA))
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "allscan", *options.format(config=path).split()]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=900)
    os.close(writer)
    assert done.returncode == 141 and not done.stderr  # as of a program that SIGPIPE ends


def test_from_the_command_line(estimated):
    (status, usual), (_, more) = (estimated(KIMI, f"--tokens 32768 --ranks 2 {x}") for x in ("", "--no-recompute"))
    assert status == 0 and "3 x zeco_kda, 16 heads of 128 x 128" in usual.out and "1 x softmax" in usual.out
    state, sent = (float(line.split()[-1]) for line in usual.out.splitlines() if "sent" in line)
    assert state == 1.0 and sent == 2 * 3 * 1.0 + 2 * 16384 * 576 * 2 / MIB  # both passes
    recomputed, kept = (
        next(float(line.split()[-1]) for line in found.out.splitlines() if "kept, a layer" in line)
        for found in (usual, more)
    )
    assert kept - recomputed == pytest.approx(16384 * 16 * (4 * 256 + 8) / MIB, rel=0.02)
    with pytest.raises(ValueError, match="has no 'linear_head_dim'"):
        estimate.layers_of({name: x for name, x in KIMI.items() if name != "linear_head_dim"})
