"""verl's layer of Qwen3.5, which calls fla with a ``cp_context``, split over ranks with ``fla_cp``: on CPU ranks its
convolution, around our delta rule; on GPUs the whole layer. ``ALLSCAN_VERL=checkout`` names verl's sources (tested:
0.9.1): one file is loaded by its path, with a stand-in of ``verl.utils.ulysses``."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import allscan
from allscan.reference import delta_reference
from support.fla import has_gradients, import_fla
from support.gla import BF16, F32
from support.values import relative_all

FILE = os.path.join(os.environ.get("ALLSCAN_VERL", ""), "verl", "models", "transformers", "qwen3_5.py")
if not os.path.exists(FILE) or not all(map(importlib.util.find_spec, ("transformers", "fla"))):
    pytest.skip("needs ALLSCAN_VERL, verl's sources, and transformers and fla", allow_module_level=True)

WIDTH, T = 64, 96  # tokens of a rank
CUTS = {  # in ranks: one sequence; several, a border of ranks or a few tokens before or after it among their ends
    "one": lambda size: [0, size],
    "packed": lambda size: [0, 0.25, 1 - 2 / T, 1 + 1 / T, size - 0.5, size],
    "borders": lambda size: [0, 1, size],
}


def loaded():
    """Return (verl's file as a module, the stand-in of verl.utils.ulysses, whose ``group`` a case sets)."""
    from transformers.models.qwen3_5 import modeling_qwen3_5
    from transformers.utils import ModelOutput

    ulysses = types.ModuleType("verl.utils.ulysses")
    ulysses.group, ulysses.ulysses_pad_and_slice_inputs = None, None
    ulysses.get_ulysses_sequence_parallel_group = lambda: ulysses.group
    ulysses.get_ulysses_sequence_parallel_world_size = lambda: ulysses.group.size() if ulysses.group else 1
    spec = importlib.util.spec_from_file_location("verl_qwen3_5", FILE)
    module = importlib.util.module_from_spec(spec)
    output = mock.patch.object(modeling_qwen3_5, "Qwen3_5CausalLMOutputWithPast", ModelOutput, create=True)
    with mock.patch.dict(sys.modules, {ulysses.__name__: ulysses}), output:  # before 5.11 transformers has this class
        spec.loader.exec_module(module)
    return module, ulysses


def new_layer(device, dtype):
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    config = Qwen3_5TextConfig(
        hidden_size=WIDTH,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    )
    torch.manual_seed(0)
    layer = Qwen3_5GatedDeltaNet(config, 0)
    with torch.no_grad():
        layer.A_log.fill_(-4.0)  # a state that outlives a rank's tokens
        layer.dt_bias.zero_()
    layer.causal_conv1d_fn = None  # set by transformers before 5.11, which verl 0.9.1 requires
    return layer.to(device, dtype)


def in_float64(q, k, v, g, beta, cu_seqlens, cu_seqlens_cpu, use_qk_l2norm_in_kernel=True, **_):
    q, k = (x.double() * torch.rsqrt(x.double().square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    return delta_reference(q, k, v, g, beta, cu_seqlens=cu_seqlens)[0].to(v.dtype), None


def by_allscan(q, k, v, comm, whole, cp_context, g, beta, use_qk_l2norm_in_kernel, **_):
    """In place of fla's rule, which needs a GPU."""
    where = dict(comm=comm, cu_seqlens=whole, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    return allscan.zeco_gated_delta_rule(q, k, v, g, beta, **where)[0], None


def layer_case(group, cuts, backward):
    """Return the errors of outputs and gradients against the unsplit layer in float32: with All-Scan; and on GPUs with
    fla's exchange, and of the unsplit layer with fla's rule."""
    import_fla(models=False)
    from fla.ops.cp import chunk_delta_h
    from fla.ops.cp import comm as exchange
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    from allscan.integrations import fla_cp

    verl, ulysses = loaded()
    comm = allscan.Communicator(group)
    on_gpu, total = comm.device.type == "cuda", comm.size * T
    whole = torch.tensor([round(T * cut) for cut in CUTS[cuts](comm.size)], dtype=torch.int32)
    torch.manual_seed(1)
    x, do = torch.randn(2, 1, total, WIDTH, device="cpu").to(comm.device)
    mine = slice(comm.rank * T, (comm.rank + 1) * T)

    def results(dtype, rule, part, split):
        layer = new_layer(comm.device, dtype)
        layer.chunk_gated_delta_rule, ulysses.group = rule, group if split else None
        given = x[:, part].to(dtype).requires_grad_()
        o = verl.qwen3_5_gated_delta_net_forward(
            layer, given, cu_seqlens=whole.to(comm.device), cu_seqlens_cpu=whole.clone()
        )
        own = slice(None) if split else mine
        if not backward:
            return dict(o=o[:, own])
        o.backward(do[:, part].to(dtype))
        found = {name: p.grad.float() for name, p in layer.named_parameters()}
        if split:
            for gradient in found.values():
                dist.all_reduce(gradient, group=group)
        return found | dict(o=o[:, own], x=given.grad[:, own])

    expected = results(F32, in_float64, slice(None), False)
    found = []
    if on_gpu:
        found.append(results(BF16, chunk_gated_delta_rule, mine, True))
        found.append(results(BF16, chunk_gated_delta_rule, slice(None), False))
    fla_cp.context_parallel(comm)
    rule = chunk_gated_delta_rule if on_gpu else partial(by_allscan, comm=comm, whole=whole)
    places = [mock.patch.object(module, "all_gather_into_tensor", None) for module in (exchange, chunk_delta_h)]
    with places[0], places[1]:  # a call would fail
        found.insert(0, results(BF16 if on_gpu else F32, rule, mine, True))
    fla_cp.disable()
    comm.close()
    return [relative_all(expected, some.values(), expected.values()) for some in found]


@pytest.mark.cpu
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("cuts", CUTS)
def test_convolution_of_a_layer(run, size, cuts):
    for (errors,) in run(size, layer_case, cuts, True):
        assert len(errors) > 8 and max(errors.values()) < 1e-5, errors


@pytest.mark.gpu
@pytest.mark.parametrize("cuts", CUTS)
def test_layer(run, cuts, size=2):
    """The split layer is as accurate as with fla's exchange, and as the unsplit one; gradients where fla has them."""
    for scanned, gathered, unsplit in run(size, layer_case, cuts, has_gradients()):
        for name, ours in scanned.items():
            assert ours <= 1.3 * max(gathered[name], unsplit[name]) + 1e-4 and ours < 0.1, (name, scanned, gathered)
