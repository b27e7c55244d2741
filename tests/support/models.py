"""Models of transformers for tests: small ones of every family, and what the unsplit model computes."""

from __future__ import annotations

import copy
import importlib
from itertools import pairwise

import torch

from .values import in_ranks

VOCABULARY = 53
COMMON = dict(vocab_size=VOCABULARY, hidden_size=32, pad_token_id=0)
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=6)
MIXED = dict(layer_types=["linear_attention", "full_attention"], num_hidden_layers=2)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
SHARED = EXPERTS | dict(shared_expert_intermediate_size=16)
MAMBA = dict(mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=10, mamba_chunk_size=8)
STATES = dict(n_groups=2, chunk_size=8)
SOFTMAX = dict(num_attention_heads=4, num_key_value_heads=2)
DENSE = SOFTMAX | dict(intermediate_size=32)
ROPE = dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 1], partial_rotary_factor=0.5)
QWEN3_5 = DELTA | MIXED | SOFTMAX | dict(head_dim=16, rope_parameters=ROPE)
LATENTS = dict(num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4)
LATENTS |= MIXED | dict(v_head_dim=8, intermediate_size=32, moe_intermediate_size=16, num_experts_per_tok=2)
LATENTS |= dict(n_group=1, topk_group=1)
LFM2 = DENSE | dict(num_hidden_layers=2, layer_types=["conv", "full_attention"])
CHOICES = {  # by family: the name of its classes, options of its config beside COMMON
    "qwen3_next": ("Qwen3Next", DELTA | MIXED | SHARED | SOFTMAX | dict(head_dim=8)),
    "qwen3_5": ("Qwen3_5Text", QWEN3_5 | dict(intermediate_size=32)),
    "qwen3_5_moe": ("Qwen3_5MoeText", QWEN3_5 | SHARED),
    "kimi_linear": (
        "KimiLinear",
        LATENTS | dict(linear_num_heads=2, linear_head_dim=8, q_lora_rank=None, n_routed_experts=4),
    ),
    "nemotron_h": (
        "NemotronH",
        DENSE
        | STATES
        | dict(layers_block_type=["linear_attention", "full_attention", "mlp"], head_dim=8)
        | dict(mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=10),
    ),
    "bamba": ("Bamba", DENSE | MAMBA | dict(num_hidden_layers=2, attn_layer_indices=[1], z_loss_coefficient=0.0)),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        DENSE
        | MAMBA
        | MIXED
        | dict(shared_intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, position_embedding_type="rope"),
    ),
    "falcon_h1": ("FalconH1", DENSE | MAMBA | dict(mamba_d_ssm=64, mamba_expand=2, num_hidden_layers=2, head_dim=8)),
    "zamba2": (
        "Zamba2",
        dict(num_hidden_layers=3, layers_block_type=["linear_attention", "hybrid", "hybrid"], intermediate_size=32)
        | dict(num_attention_heads=4, n_mamba_heads=4, mamba_ngroups=2, mamba_d_state=10, chunk_size=8)
        | dict(use_mem_rope=True, use_shared_attention_adapter=True, adapter_rank=4),
    ),
    "mamba2": ("Mamba2", STATES | dict(num_hidden_layers=2, num_heads=4, head_dim=16, state_size=10)),
    "minimax": (
        "MiniMax",
        DENSE
        | dict(num_hidden_layers=3, layer_types=["full_attention", "linear_attention", "linear_attention"])
        | dict(num_local_experts=2, block_size=8),
    ),
    "olmo_hybrid": ("OlmoHybrid", DELTA | MIXED | DENSE | dict(linear_allow_neg_eigval=True)),
    "bailing_hybrid": (
        "BailingHybrid",
        LATENTS | dict(head_dim=8, mlp_layer_types=["dense", "sparse"], num_experts=4),
    ),
    "lfm2": ("Lfm2", LFM2 | dict(block_auto_adjust_ff_dim=False)),
    "lfm2_moe": ("Lfm2Moe", LFM2 | EXPERTS | dict(num_dense_layers=1)),
}
OWN = (
    "torch_chunk_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "mamba2_chunk_scan",
    "causal_conv1d_fn",
    "torch_recurrent_gated_delta_rule",
    "recurrent_kimi_delta_attention",
    "mamba2_selective_state_update",
    "causal_conv1d_update",
    "mamba2_split_conv1d_scan_combined",
)


def made(family, inner="sdpa", keep=False, **more):
    """Return a model with random weights whose file calls torch's own functions, also where fla is installed; with
    keep, the functions are left as they are."""
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    for name in OWN if not keep else ():
        function = vars(modeling).get(name)
        if function is not None and not hasattr(function, "split"):
            setattr(modeling, name, getattr(function, "__wrapped__", function))
    kind, options = CHOICES[family]
    inner = "eager" if family == "mamba2" else inner  # it has no softmax layers
    return with_weights(family, kind, COMMON | options | dict(attn_implementation=inner, use_cache=True) | more)


def with_weights(family, kind, options, rates=(-4, -1)):
    """Return a model of these options with random weights; rates: range of A_log, by which states last over some
    ranks."""
    configuration, modeling = (
        importlib.import_module(f"transformers.models.{family}.{file}_{family}")
        for file in ("configuration", "modeling")
    )
    config = getattr(configuration, f"{kind}Config")(**options)
    torch.manual_seed(0)
    model = getattr(modeling, f"{kind.removesuffix('Text')}ForCausalLM")(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                p.uniform_(*rates)
            elif name.endswith(("dt_bias", ".D")):
                p.normal_()
            elif p.ndim > 1 and "conv" not in name:
                p.normal_(std=p.shape[-1] ** -0.5)  # layers change more than rounding does
    return model.train()


def gradients(model):
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def expected(model, whole, labels, lengths):
    """Return (logits, loss, gradients) of one rank, with each sequence by itself."""
    logits = torch.cat([model(input_ids=whole[:, a:b], use_cache=False).logits for a, b in pairwise(lengths)], 1)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
    loss.backward()
    return logits.detach(), loss.detach(), copy.deepcopy(gradients(model))


sequence_parallel = in_ranks("transformers", "sequence_parallel")
