"""Megatron-core's mixers in one of its models, and stand-ins for missing packages."""

from __future__ import annotations

import contextlib
import functools
from itertools import pairwise
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

from allscan.integrations.attention_blocks import Blocks, merged
from allscan.integrations.softmax import Gather
from allscan.reference import delta_reference, ssd_reference
from bench.attention import causal

from .fla import import_fla
from .values import place

VOCABULARY, WIDTH = 37, 24
_alone: list = []


class Norm(torch.nn.RMSNorm):
    """Replaces Transformer Engine's norm."""

    def __init__(self, config, hidden_size, eps):
        super().__init__(hidden_size, eps)


class GatedNorm(torch.nn.Module):
    """Replaces mamba_ssm's RMSNorm, which needs a GPU."""

    def __init__(self, width, eps, group_size, norm_before_gate, device, dtype):
        super().__init__()
        self.weight, self.eps, self.group = torch.nn.Parameter(torch.ones(width, dtype=dtype)), eps, group_size
        assert not norm_before_gate

    def forward(self, x, z):
        x = (x * F.silu(z)).unflatten(-1, (-1, self.group))
        return (x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()).flatten(-2) * self.weight


def chunk_scan(x, dt, A, B, C, chunk_size, state_dtype=None, return_final_states=False, **options):
    """Replace mamba_ssm's mamba_chunk_scan_combined on one rank by the token-by-token recurrence in float64."""
    from megatron.core.ssm import mamba_mixer

    assert (state_dtype is not None) == mamba_mixer.MAMBA_HAS_STATE_DTYPE and not return_final_states
    return ssd_reference(x, dt, A, B, C, **options)[0].to(x.dtype)


def rule(q, k, v, g, beta, **_):
    """Replace fla's chunk_gated_delta_rule on one rank by the token-by-token recurrence in float64."""
    return delta_reference(q, k, v, g, beta)[0].to(v.dtype), None


class CoreAttention(torch.nn.Module):
    """Replaces Transformer Engine's DotProductAttention, which is not installed; gathers the keys of all ranks. comm:
    None for one rank."""

    def __init__(self, *, softmax_scale, comm=None, layout="zigzag", **_):
        super().__init__()
        self.scale, self.comm, self.zigzag = softmax_scale, comm, layout == "zigzag"

    def forward(self, query, key, value, mask, **_):
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # from [T, B, H, D]
        if self.comm is None:
            return causal(q, k, v, self.scale).transpose(0, 1).flatten(2)
        tokens = [len(query)] * self.comm.size
        others = Gather(self.comm, tokens, self.zigzag, *(x.transpose(0, 1) for x in (key, value)))
        return merged(q, k, v, Blocks(others, self.scale)).transpose(0, 1).flatten(2)


def share_storage(output, recomputed):
    """Fill an output's freed storage. Megatron compiles C++ for this, which takes minutes on a busy machine, and a
    process that is stopped meanwhile leaves a lock for which all later ones wait without end."""
    storage = output.untyped_storage()
    storage.resize_(recomputed.untyped_storage().nbytes())
    storage.copy_(recomputed.untyped_storage())


@contextlib.contextmanager
def stand_ins():
    """Patch Megatron-core to run here: no GPU random numbers without a GPU, no compilation, and the stand-ins above for
    mamba_ssm and Transformer Engine."""
    from megatron.core import parallel_state
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.ssm import mamba_mixer
    from megatron.core.ssm.gated_delta_net import common
    from megatron.core.tensor_parallel import random
    from megatron.core.utils import GlobalMemoryBuffer

    import_fla(models=False)
    tracker = mock.Mock(fork=contextlib.nullcontext)
    current_device = torch.cuda.current_device if torch.cuda.is_available() else lambda: torch.device("cpu")
    with contextlib.ExitStack() as stack:
        for where, name, value in (
            (torch.cuda, "current_device", current_device),
            (mamba_mixer, "get_cuda_rng_tracker", lambda: tracker),
            (common, "get_cuda_rng_tracker", lambda: tracker),
            (mamba_mixer, "HAVE_MAMBA_SSM", True),
            (mamba_mixer, "ExtendedRMSNorm", GatedNorm),
            (mamba_mixer, "mamba_chunk_scan_combined", chunk_scan),
            (hybrid_block, "TENorm", Norm),
            (random, "_get_all_rng_states", tuple),
            (random, "_set_all_rng_states", lambda: None),
            (random, "_get_share_storage", lambda: share_storage),
            # Transformer Engine's
            (random, "FP8GlobalStateManager", mock.Mock(is_fp8_enabled=lambda: False)),
            (random, "activation_recompute_forward", lambda **_: contextlib.nullcontext()),
            (random, "fp8_autocast", lambda **_: contextlib.nullcontext()),
            (parallel_state, "_GLOBAL_MEMORY_BUFFER", GlobalMemoryBuffer()),
        ):
            stack.enter_context(mock.patch.object(where, name, value, create=where is random))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def configuration(**more):
    from megatron.core.transformer import TransformerConfig

    options = dict(
        num_layers=2,
        hidden_size=WIDTH,
        num_attention_heads=2,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=8,
        linear_value_head_dim=6,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        mamba_state_dim=10,
        mamba_head_dim=6,
        mamba_num_heads=4,
        mamba_num_groups=2,
        use_mamba_mem_eff_path=False,
        deterministic_mode=True,
        use_cpu_initialization=True,
        normalization="RMSNorm",
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        bias_dropout_fusion=False,
    )
    return TransformerConfig(**options | more)


def specification(gdn=(), mamba=(), attention=()):
    """Return hybrid_stack_spec without Transformer Engine. attention: options of CoreAttention."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    linear = dict(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    of_attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=functools.partial(CoreAttention, **dict(attention)),
        linear_proj=RowParallelLinear,
    )
    attention = ModuleSpec(SelfAttention, dict(attn_mask_type=AttnMaskType.causal), of_attention)
    of_mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    mamba = ModuleSpec(MambaMixer, dict(mamba), MambaMixerSubmodules(**linear))
    gdn = ModuleSpec(GatedDeltaNet, dict(gdn), GatedDeltaNetSubmodules(out_norm=Norm, **linear))
    return ModuleSpec(
        HybridStack,
        submodules=HybridStackSubmodules(
            mamba_layer=ModuleSpec(
                MambaLayer, submodules=MambaLayerSubmodules(norm=Norm, mixer=mamba, mamba_bda=get_bias_dropout_add)
            ),
            gdn_layer=ModuleSpec(
                TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=Norm, self_attention=gdn, self_attn_bda=get_bias_dropout_add
                ),
            ),
            attention_layer=ModuleSpec(
                module=TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=Norm, self_attention=attention, self_attn_bda=get_bias_dropout_add
                ),
            ),
            mlp_layer=ModuleSpec(
                module=MLPLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=Norm,
                    mlp=functools.partial(MLP.as_mlp_submodule, submodules=of_mlp),
                    mlp_bda=get_bias_dropout_add,
                ),
            ),
        ),
    )


def group_of_one():
    if not torch.cuda.is_available():
        return dist.new_group([dist.get_rank()], use_local_synchronization=True)
    if not _alone:  # NCCL creates groups collectively, with all ranks
        _alone.extend(dist.new_group([rank]) for rank in range(dist.get_world_size()))
    return _alone[dist.get_rank()]


def model(spec, cp=None, tp=None, pattern="MG", vocabulary=VOCABULARY + 1, **more):
    """Create a HybridModel with random weights over these groups; by default a Mamba2 and a Gated DeltaNet layer."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups, alone = ProcessGroupCollection(), group_of_one()
    for name in ("pp", "ep", "embd", "dp"):
        setattr(groups, name, alone)
    cp, groups.tp = cp or alone, tp or alone
    groups.cp, groups.tp_cp, groups.dp_cp = cp, cp, cp
    more = dict(num_layers=len(pattern)) | more
    config = configuration(context_parallel_size=cp.size(), tensor_model_parallel_size=groups.tp.size(), **more)
    made = HybridModel(config, spec, vocabulary, 512, hybrid_layer_pattern=pattern, pg_collection=groups)
    made = made.cuda() if torch.cuda.is_available() else made
    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in made.named_parameters():
            drawn = torch.empty_like(p, dtype=torch.float32)  # other dtypes get the same values, rounded
            if name.endswith("A_log"):
                drawn.uniform_(-4, -1)  # states persist over several ranks
            elif name.endswith(("dt_bias", ".D", "bias")):
                drawn.normal_()
            else:
                drawn.normal_(std=p.shape[-1] ** -0.5)
            p.copy_(drawn)
    return made


def mixers(made):
    return made.decoder.layers[0].mixer, made.decoder.layers[1].self_attention


def gradients(made):
    return {name: p.grad for name, p in made.named_parameters()}


def packing(lengths):
    from megatron.core.packed_seq_params import PackedSeqParams

    cu_seqlens = torch.tensor(lengths, dtype=torch.int32, device="cuda" if torch.cuda.is_available() else "cpu")
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)


def placed(comm, tokens, lengths, layout):
    """Return the indices of this rank's tokens; layout "zigzag": zigzag in each sequence, "row": over the whole row."""
    if layout != "zigzag":
        return torch.arange(sum(tokens))[place(comm, tokens, layout == "row")]
    parts = [a + place(comm, [(b - a) // comm.size] * comm.size, True) for a, b in pairwise(lengths)]
    return torch.cat(parts)


def called(made, embedded, labels, packed=None):
    """Return (logits [T, B, vocabulary], overwritten by Megatron's loss, loss of each token [B, T])."""
    logits = []
    with_logits = made.output_layer.register_forward_hook(lambda module, given, out: logits.append(out[0].clone()))
    losses = made(None, None, None, decoder_input=embedded, labels=labels, packed_seq_params=packed)
    with_logits.remove()
    return logits[0], losses
