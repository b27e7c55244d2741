"""transformers' models, cut over the ranks, against the same model on one: in float32, with its own torch functions."""

from __future__ import annotations

import copy
import importlib
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

import allscan
from support.values import place, relative

pytest.importorskip("transformers", minversion="5.23", reason="needs transformers")
pytestmark = pytest.mark.cpu  # the functions for GPUs are not torch's own

TOKENS = {2: [17, 12], 3: [9, 14, 7], 4: [6, 3, 11, 9]}  # of each rank
CUTS = {2: [0, 1, 8, 17, 21, 29], 3: [0, 5, 7, 12, 26, 30], 4: [0, 4, 5, 14, 18, 29]}  # some at the ranks' cuts
VOCABULARY = 53
COMMON = dict(vocab_size=VOCABULARY, hidden_size=32, num_attention_heads=4, pad_token_id=0)
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=6)
MIXED = dict(layer_types=["linear_attention", "full_attention"], num_hidden_layers=2)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
MAMBA = dict(mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=10, mamba_chunk_size=8)
CHOICES = {
    "qwen3_next": ("Qwen3Next", COMMON | DELTA | MIXED | EXPERTS | dict(num_key_value_heads=2, head_dim=8)),
    "qwen3_5": ("Qwen3_5Text", COMMON | DELTA | MIXED | dict(
        num_key_value_heads=2, head_dim=16, intermediate_size=32,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 1], partial_rotary_factor=0.5))),
    "qwen3_5_moe": ("Qwen3_5MoeText", COMMON | DELTA | MIXED | EXPERTS | dict(
        num_key_value_heads=2, head_dim=16,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 1], partial_rotary_factor=0.5))),
    "kimi_linear": ("KimiLinear", COMMON | MIXED | dict(
        num_key_value_heads=4, linear_num_heads=2, linear_head_dim=8, q_lora_rank=None, kv_lora_rank=12, qk_nope_head_dim=6,
        qk_rope_head_dim=4, v_head_dim=8, intermediate_size=32, moe_intermediate_size=16, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1)),
    "nemotron_h": ("NemotronH", COMMON | dict(
        layers_block_type=["linear_attention", "full_attention", "mlp"], num_key_value_heads=2, head_dim=8,
        intermediate_size=32, mamba_num_heads=4, mamba_head_dim=16, n_groups=2, ssm_state_size=10, chunk_size=8)),
    "bamba": ("Bamba", COMMON | MAMBA | dict(
        num_hidden_layers=2, attn_layer_indices=[1], num_key_value_heads=2, intermediate_size=32,
        z_loss_coefficient=0.0)),
    "granitemoehybrid": ("GraniteMoeHybrid", COMMON | MAMBA | MIXED | dict(
        num_key_value_heads=2, intermediate_size=32, shared_intermediate_size=32, num_local_experts=4,
        num_experts_per_tok=2, position_embedding_type="rope")),
    "falcon_h1": ("FalconH1", COMMON | dict(MAMBA, mamba_d_ssm=64, mamba_expand=2) | dict(
        num_hidden_layers=2, num_key_value_heads=2, head_dim=8, intermediate_size=32)),
}  # fmt: skip
PRELOAD = ["allscan.integrations.transformers", *(f"transformers.models.{f}.modeling_{f}" for f in CHOICES)]
OWN = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan", "causal_conv1d_fn",
       "torch_recurrent_gated_delta_rule", "recurrent_kimi_delta_attention", "mamba2_selective_state_update",
       "causal_conv1d_update", "mamba2_split_conv1d_scan_combined")  # fmt: skip


def made(family, inner="sdpa", **more):
    """A model with random weights whose file calls torch's own functions, also where fla is installed."""
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    for name in OWN:
        function = vars(modeling).get(name)
        if function is not None and not hasattr(function, "split"):
            setattr(modeling, name, getattr(function, "__wrapped__", function))
    kind, options = CHOICES[family]
    config = getattr(importlib.import_module(f"transformers.models.{family}.configuration_{family}"), f"{kind}Config")
    config = config(**options | dict(attn_implementation=inner, use_cache=True) | more)
    torch.manual_seed(0)
    model = getattr(modeling, f"{kind.removesuffix('Text')}ForCausalLM")(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                p.uniform_(-4, -1)  # states last over some ranks
            elif name.endswith(("dt_bias", ".D")):
                p.normal_()
            elif p.ndim > 1 and "conv" not in name:
                p.normal_(std=p.shape[-1] ** -0.5)  # layers change more than rounding does
    return model.train()


def gradients(model):
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def expected(model, whole, labels, lengths):
    """(logits, loss, gradients) of one rank: each sequence by itself."""
    logits = torch.cat([model(input_ids=whole[:, a:b], use_cache=False).logits for a, b in pairwise(lengths)], 1)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
    loss.backward()
    return logits.detach(), loss.detach(), copy.deepcopy(gradients(model))


def model_case(group, family, packed, inner):
    """Relative errors of logits, loss, and of the gradients together and each; parameters without a gradient."""
    from allscan.integrations.transformers import sequence_parallel

    with allscan.Communicator(group) as comm:
        tokens, model = TOKENS[comm.size], made(family, inner)
        names = [name for name, _ in model.named_parameters()]
        whole = torch.randint(1, VOCABULARY, (1 if packed else 2, sum(tokens)))
        labels = whole.clone()
        labels[:, 3] = -100
        lengths = CUTS[comm.size] if packed else [0, sum(tokens)]
        labels[:, lengths[:-1]] = -100  # no sequence predicts the next one's first token
        logits, loss, grads = expected(model, whole, labels, lengths)
        model.zero_grad()
        mine = place(comm, tokens)
        positions = torch.cat([torch.arange(b - a) for a, b in pairwise(lengths)])[None]
        how = {None: {}, "cu_seq_lens": dict(cu_seq_lens_q=torch.tensor(lengths, dtype=torch.int32)),
               "position_ids": dict(position_ids=positions[:, mine])}[packed]  # fmt: skip
        assert sequence_parallel(model, comm=comm) is model
        assert [name for name, _ in model.named_parameters()] == names
        model = copy.deepcopy(model)  # as for averaged weights
        output = model(input_ids=whole[:, mine], labels=labels[:, mine], **how)
        output.loss.backward()
        share = output.loss.detach()
        dist.all_reduce(share, group=comm.group)
        errors = {"logits": relative(output.logits, logits[:, mine]), "loss": relative(share, loss)}
        unused = []
        for name, gradient in gradients(model).items():
            dist.all_reduce(gradient, group=comm.group)
            if not grads[name].any():
                unused.append(name)
                assert not gradient.any()
            else:
                errors[name] = relative(gradient, grads[name])
        return errors, unused


@pytest.mark.parametrize(
    "family, size, packed, inner",
    [("qwen3_next", 2, None, "sdpa"), ("qwen3_next", 4, "cu_seq_lens", "sdpa"),
     ("qwen3_5", 3, None, "eager"), ("qwen3_5", 2, "position_ids", "eager"), ("qwen3_5_moe", 2, None, "sdpa"),
     ("kimi_linear", 2, None, "sdpa"), ("kimi_linear", 4, "position_ids", "eager"),
     ("nemotron_h", 4, None, "sdpa"), ("nemotron_h", 2, "cu_seq_lens", "sdpa"),
     ("bamba", 2, None, "sdpa"), ("bamba", 3, "position_ids", "sdpa"), ("granitemoehybrid", 2, None, "sdpa"),
     ("falcon_h1", 2, None, "sdpa"), ("falcon_h1", 3, "cu_seq_lens", "eager")],
)  # fmt: skip
def test_models(run, family, size, packed, inner):
    for errors, unused in run(size, model_case, family, packed, inner):
        assert max(errors.values()) < 2e-5, {k: v for k, v in errors.items() if not v < 2e-5}
        assert all("experts" in name or "gate" in name for name in unused), unused
