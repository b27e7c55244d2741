"""ringmaster's context parallelism on 2 and 3 CPU ranks, with All-Scan and with its own exchange of states, against the
unsplit model."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import time
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_fla_models import CHOICES, computed_by, model_of
from torch.distributed.device_mesh import DeviceMesh

import allscan
from support.fla import by_document, delta_recurrence, import_fla
from support.models import OWN, VOCABULARY, gradients, made
from support.values import added_up, check_answers, raised, relative

rm = pytest.importorskip("ringmaster", reason="needs axolotl-ringmaster")
pytest.importorskip("transformers", minversion="5.18", reason="needs transformers")
pytestmark = pytest.mark.cpu

SOFTMAX = dict(num_attention_heads=6, num_key_value_heads=6, head_dim=16)  # Ulysses: heads in 2 and in 3 parts
FAMILIES: dict = {"qwen3_5": SOFTMAX, "qwen3_next": SOFTMAX, "nemotron_h": SOFTMAX | dict(head_dim=8), "mamba2": {}}
PRELOAD = ["allscan.integrations.ringmaster", "allscan.integrations.transformers", "ringmaster.fla_mamba"]
PRELOAD += [f"transformers.models.{family}.modeling_{family}" for family in FAMILIES]
# documents of each row. Ranks have 15 or 10 tokens: 29 are padded, and a document of 21 is on three ranks
ONE, BATCH, PACKED, AT_SHARDS, ROWS = (
    [(0, 29)],
    [(0, 29), (0, 29)],
    [(0, 5, 26, 29)],
    [(0, 10, 15, 20, 30)],
    [(0, 5, 26, 29), (0, 29)],
)


class Plugin:
    """Stands for axolotl.integrations.context_parallel.plugin of axolotl 0.21.0: calls ringmaster as it does once the
    trainer exists, in this order. axolotl itself requires other versions of packages than these tests have."""

    def __init__(self, models, group):
        from ringmaster.strategies.state_passing import recurrent_plan

        config = rm.RingmasterConfig(size=dist.get_world_size(group), backend=rm.Backend.ULYSSES)
        config.normalize(num_kv_heads=6, intra_node_size=8)
        recurrent = any(recurrent_plan(models, config.size))
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
        options = dict(device_mesh=mesh, cp_dim="cp", device_type="cpu", inner_attn="sdpa")
        self.runtime = rm.setup(config, num_kv_heads=6, **options)
        self.undo = [rm.teardown]
        for model in models:
            self.undo.append(functools.partial(model.set_attn_implementation, model.config._attn_implementation))
            model.set_attn_implementation(self.runtime.attn_implementation)
            if recurrent:
                self.undo.append(rm.wire_recurrent_layers(model, group=self.runtime.cp_group).restore)
            model.config.use_cache = False
        balance = self.runtime.shard_load_balance
        context = rm.ContextParallelContextManager(models, self.runtime.cp_group, load_balance=balance)
        context.install()
        self.undo.append(context.remove)

    def post_train_unload(self):
        while self.undo:
            self.undo.pop()()


def axolotl_forward(layer, hidden_states, **_):
    """Stands for the forward that axolotl gives Gated DeltaNet: it calls two functions that ringmaster sets."""
    weight, bias = layer.conv1d.weight.squeeze(1), layer.conv1d.bias
    qkv = layer._axolotl_gdn_cp_conv(layer.in_proj_qkv(hidden_states), weight, bias, layer.activation)
    q, k, v = qkv.split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
    q, k = (x.unflatten(-1, (-1, layer.head_k_dim)) for x in (q, k))
    v, z = (x.unflatten(-1, (-1, layer.head_v_dim)) for x in (v, layer.in_proj_z(hidden_states)))
    g = -layer.A_log.float().exp() * F.softplus(layer.in_proj_a(hidden_states).float() + layer.dt_bias)
    options = dict(initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=True)
    o, _ = layer._axolotl_gdn_cp_chunk(q, k, v, g=g, beta=layer.in_proj_b(hidden_states).sigmoid(), **options)
    return layer.out_proj(layer.norm(o.flatten(0, 2), z.flatten(0, 2)).view(z.shape).flatten(2))


axolotl_forward._axolotl_gdn_kernel_interface = True


def convolution(x, weight, bias, activation):
    """Stands for causal_conv1d_fn: x [B, C, T]."""
    y = F.conv1d(x, weight[:, None], bias, padding=weight.shape[1] - 1, groups=len(weight))
    return F.silu(y[..., : x.shape[2]])


OF_FLA = {
    "kda": ("kda", delta_recurrence, dict(head_dim=16)),
    "mamba2 of fla": ("mamba2", by_document, CHOICES["mamba2, norm"]),
}


@contextlib.contextmanager
def unsplit(family):
    """A model in float32. What this process has in place of transformers' torch functions does not count; fla's KDA is
    computed by the recurrence, and fla's Mamba2 in torch: with stand-ins for the kernels that ringmaster asks for."""
    if family in OF_FLA:
        fla, (kind, call, options) = import_fla(), OF_FLA[family]
        with computed_by(fla, kind, call), pytest.MonkeyPatch.context() as patch:
            patch.setattr(fla.layers.mamba2, "mamba_chunk_scan_combined", lambda: None)  # is never called
            model = model_of(fla, kind, vocab_size=VOCABULARY, **options).train()
            for layer in model.modules():
                if hasattr(layer, "causal_conv1d_fn"):
                    layer.backend, layer.causal_conv1d_fn = "cuda", convolution
            yield model
        return
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    with pytest.MonkeyPatch.context() as patch:
        for name in OWN:
            if name in vars(modeling):
                patch.setattr(modeling, name, inspect.unwrap(vars(modeling)[name]))
        yield made(family, use_cache=False, **FAMILIES.get(family, {}))


def of_rows(model, whole, rows):
    """Logits of the unsplit model, each document by itself."""
    rows = [[whole[i : i + 1, a:b] for a, b in pairwise(row)] for i, row in enumerate(rows)]
    return torch.cat([torch.cat([model(input_ids=x).logits for x in row], 1) for row in rows])


def positions_of(documents):
    return torch.stack([torch.cat([torch.arange(b - a) for a, b in pairwise(row)]) for row in documents])


def split_case(group, family, documents, ours, axolotl=False):
    """Return relative errors of the logits and of each parameter's gradient, and the change of the logits without the
    states and tokens of other ranks."""
    size, rank, T = dist.get_world_size(group), dist.get_rank(group), documents[0][-1]
    n = -(-T // size)  # tokens of each rank
    torch.manual_seed(0)
    whole = torch.randint(1, VOCABULARY, (len(documents), T))
    with unsplit(family) as model, pytest.MonkeyPatch.context() as patch:
        logits = of_rows(model, whole, documents)
        weights = torch.randn_like(logits)
        (logits * weights).sum().backward()
        expected = {name: gradient / size for name, gradient in added_up(gradients(model), group).items()}
        model.zero_grad()
        with torch.no_grad():
            alone = of_rows(model, whole, [sorted({*row, *range(0, T, n)}) for row in documents])
        if ours:
            patch.setattr("ringmaster.cp_collectives.all_gather_cp", None)  # is not called
            allscan.integrations.ringmaster.enable()
        if axolotl:
            patch.setattr(type(model.model.layers[0].linear_attn), "forward", axolotl_forward)
        plugin = Plugin([model], group)
        found = model(input_ids=whole, position_ids=positions_of(documents)).logits
        own, weights = (x[:, rank * n : (rank + 1) * n] for x in (logits, weights))
        found = found[:, : own.shape[1]]  # without the row's padding
        (found * weights).sum().backward()
        errors = {"logits": relative(found, own)}
        for name, gradient in added_up(gradients(model), group).items():
            if expected[name].any():
                errors[name] = relative(gradient, expected[name])
            else:
                assert not gradient.any(), name
        plugin.post_train_unload()
        allscan.integrations.ringmaster.disable()
        patch.undo()
        assert torch.equal(of_rows(model, whole, documents), logits)
        return errors, relative(alone, logits)


def check(answers, documents):
    """Errors are those of rounding, and states of other ranks matter: the test fails without them."""
    for errors, change in answers:
        assert max(errors.values()) < 1e-5, errors
        assert change > 0.1 or documents is AT_SHARDS


MODELS = [
    *((family, ONE, size) for family in (*FAMILIES, "kda") for size in (2, 3)),
    *((family, PACKED, size) for family in (*FAMILIES, "kda") for size in (2, 3)),
    ("qwen3_5", AT_SHARDS, 3),
    ("mamba2", AT_SHARDS, 2),
    ("kda", AT_SHARDS, 2),
    ("mamba2", BATCH, 2),
    ("mamba2", ROWS, 3),
    ("mamba2 of fla", PACKED, 3),
    ("mamba2 of fla", ROWS, 2),
]


def name_of(case):
    names = {id(ONE): "one", id(BATCH): "batch", id(PACKED): "packed", id(AT_SHARDS): "at shards", id(ROWS): "rows"}
    return "-".join(str(names.get(id(x), x)) for x in case)


@pytest.mark.slow(but=("qwen3_5-packed-3", "mamba2-packed-3", "mamba2-rows-3", "kda-packed-2", "nemotron_h-one-2"))
@pytest.mark.parametrize("family, documents, size", MODELS, ids=map(name_of, MODELS))
def test_models(run, family, documents, size):
    check(run(size, split_case, family, documents, True), documents)


def test_axolotls_layers(run, size=3):
    check(run(size, split_case, "qwen3_5", PACKED, True, axolotl=True), PACKED)


OWN_EXCHANGE = [
    ("mamba2", ONE, 3),
    ("mamba2", PACKED, 2),
    ("mamba2", PACKED, 3),
    ("mamba2", AT_SHARDS, 2),
    ("mamba2", ROWS, 3),
    ("nemotron_h", ONE, 2),
    ("nemotron_h", PACKED, 3),
]


@pytest.mark.slow(but=("mamba2-packed-3", "mamba2-rows-3"))
@pytest.mark.parametrize("family, documents, size", OWN_EXCHANGE, ids=map(name_of, OWN_EXCHANGE))
def test_its_own_exchange(run, family, documents, size):
    """ringmaster's gather of Mamba2's states. Its delta rules run fla's, which needs a GPU."""
    check(run(size, split_case, family, documents, False), documents)


def training_case(group, family):
    """Return losses of a training, unsplit and split: as with axolotl, the collator cuts the batches."""
    from ringmaster.shard import shard_collated_batch

    size, rank, losses = dist.get_world_size(group), dist.get_rank(group), ([], [])
    generator = torch.Generator().manual_seed(2)
    batches = [torch.randint(1, VOCABULARY, (1, 30), generator=generator) for _ in range(3)]
    documents = [(0, 5, 26, 30)]
    for found, split in zip(losses, (False, True), strict=True):
        with unsplit(family) as model, allscan.Communicator(group) as comm:
            if split:
                allscan.integrations.ringmaster.enable()
                plugin = Plugin([model], group)
                allscan.integrations.ringmaster.enable(comm)  # after wiring
                model.gradient_checkpointing_enable()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for whole in batches:
                comm.step()
                labels = whole.clone()
                labels[:, [0, 5, 26]] = -100
                count = (labels != -100).sum()
                if split:
                    batch = dict(input_ids=whole, labels=labels, position_ids=positions_of(documents))
                    logits = model(**shard_collated_batch(batch, cp_rank=rank, cp_size=size)).logits
                    target = F.pad(labels[:, 1:], (0, 1), value=-100).chunk(size, 1)[rank]
                else:
                    logits, target = of_rows(model, whole, documents)[:, :-1], labels[:, 1:]
                loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum") / count
                loss.backward()
                if split:
                    loss = added_up(loss, group)
                    for p, gradient in zip(model.parameters(), added_up(gradients(model), group).values(), strict=True):
                        p.grad = gradient
                found.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
            if split:
                plugin.post_train_unload()
                allscan.integrations.ringmaster.disable()
                assert comm.calls and not comm.closed
    return losses


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("mamba2", marks=pytest.mark.slow)])
def test_training_like_axolotl(run, family, size=3):
    for alone, split in run(size, training_case, family):
        assert alone[-1] != alone[0]
        assert max(abs(a - b) for a, b in zip(alone, split, strict=True)) < 1e-5, (alone, split)


TIMEOUT_S = 5.0


def rejected_case(group):
    """Return the exceptions of wrong calls, their seconds, and the error of valid calls behind them."""
    answers, seconds, errors = {}, [], []
    with (
        allscan.Communicator(group, timeout=TIMEOUT_S) as comm,
        unsplit("qwen3_5") as delta,
        unsplit("mamba2") as mamba,
    ):
        allscan.integrations.ringmaster.enable(comm)
        layers = dict(delta=delta.model.layers[0].linear_attn, mamba=mamba.backbone.layers[0].mixer)
        torch.manual_seed(0)
        x = torch.randn(1, comm.size * 8, 32)
        mine, alone = x.chunk(comm.size, 1)[comm.rank], comm.rank == comm.size - 1
        expected = {name: layer(x).chunk(comm.size, 1)[comm.rank].detach() for name, layer in layers.items()}
        plugin = Plugin([delta, mamba], group)
        wrong = {  # the last rank's call of a layer; the first error is ours, the second ringmaster's
            "tokens, the rows of all ranks": ("mamba", mine, [0, 3, 8 * comm.size + 1]),
            "micro_batch_size: 1": ("delta", mine.expand(2, -1, -1), None),
        }
        for text, (name, x, documents) in wrong.items():
            begun = time.monotonic()
            with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
                if alone and documents:
                    patch.setattr(plugin.runtime, "varlen", (torch.tensor(documents), 5))
                answers[text] = raised(lambda call=layers[name], x=x: (call(x if alone else mine), comm.barrier()))
            seconds.append(time.monotonic() - begun)
            comm.resync()
            errors += [relative(layer(mine), expected[name]) for name, layer in layers.items()]
        plugin.post_train_unload()
        allscan.integrations.ringmaster.disable()
    return answers, seconds, max(errors)


@pytest.mark.slow(but="3")
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_rejects_leaves_nobody_waiting(run, size):
    *others, last = run(size, rejected_case)
    check_answers(last[0])
    for answers, (of_ours, of_theirs), _ in others:
        assert all(found is not None and found[0].startswith("AllScan") for found in answers.values()), answers
        assert of_ours < TIMEOUT_S and of_theirs < 4 * TIMEOUT_S, (of_ours, of_theirs)
    assert max(error for *_, error in (*others, last)) < 1e-5


def wiring_case(group):
    """Check which functions are bound, and when communicators are closed."""
    from ringmaster import mamba, recurrent

    from allscan.integrations import ringmaster

    names = [(recurrent, "require_fla_cp"), (recurrent, "require_kda_cp"), (mamba, "_bindings")]
    theirs = [getattr(module, name) for module, name in names]
    assert raised(ringmaster.enable, group)[0] == "TypeError"
    with unsplit("mamba2") as model:
        x, created = torch.randn(1, 8, 32), []
        for ours in (True, False):
            if ours:
                ringmaster.enable()
            plugin = Plugin([model], group)
            bound = model.backbone.layers[0].mixer.forward.__func__.__globals__["mamba2_chunk_scan"]
            assert bound.__module__.startswith("allscan" if ours else "ringmaster")
            with torch.no_grad():
                model.backbone.layers[0].mixer(x)
            created += ringmaster._communicators.created
            plugin.post_train_unload()
            ringmaster.disable()
            assert [getattr(module, name) for module, name in names] == theirs
        assert len(created) == 1 and created[0].closed
    with unsplit("kimi_linear") as model:
        return raised(Plugin, [model], group)


def test_what_is_wired(run, size=2):
    """Models of transformers' Kimi-Linear are not ringmaster's."""
    for found in run(size, wiring_case):
        assert found == ("ValueError", "No context-parallel state adapter for KimiLinearDeltaAttention"), found
