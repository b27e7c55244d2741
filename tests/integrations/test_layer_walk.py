"""Number of the package's Python functions in a warm split layer, forward and backward: that of a model of two such
layers minus that of one. The path is that of a host with a GPU (see ``support.walk``), zigzag, 2 ranks."""

from __future__ import annotations

import collections

import pytest
import torch
from integrations import test_fla_models, test_transformers

import allscan
from support.fla import import_fla
from support.models import made
from support.walk import Steps, as_on_a_gpu

pytestmark = pytest.mark.cpu
PRELOAD = test_transformers.PRELOAD
LINEAR, FULL = "linear_attention", "full_attention"
# layer: (family, options of a model of n layers)
TRANSFORMERS = {
    "KDA": ("kimi_linear", lambda n: dict(layer_types=[LINEAR] * n, mlp_layer_types=["dense"] * n)),
    "MLA": ("kimi_linear", lambda n: dict(layer_types=[FULL] * n, mlp_layer_types=["dense"] * n)),
    "Gated DeltaNet": ("qwen3_next", lambda n: dict(layer_types=[LINEAR] * n, mlp_only_layers=[*range(n)])),
    "attention": ("qwen3_next", lambda n: dict(layer_types=[FULL] * n, mlp_only_layers=[*range(n)])),
    "Gated DeltaNet of Qwen3.5": ("qwen3_5", lambda n: dict(layer_types=[LINEAR] * n)),
    "Mamba2": ("nemotron_h", lambda n: dict(layers_block_type=[LINEAR] * n)),
}
SOFTMAX = test_fla_models.SOFTMAX
FLA = {
    "KDA": ("kda", dict(head_dim=16)),
    "Gated DeltaNet": ("gated_deltanet", dict(head_dim=16, num_v_heads=4, expand_v=1)),
    "GLA": ("gla", dict(use_short_conv=True)),
    "attention": ("gla", dict()),
}
# (package, layer): calls of forward and backward
BOUNDS = {
    ("transformers", "KDA"): 98,
    ("transformers", "MLA"): 69,
    ("transformers", "Gated DeltaNet"): 98,
    ("transformers", "attention"): 69,
    ("transformers", "Gated DeltaNet of Qwen3.5"): 98,
    ("transformers", "Mamba2"): 94,
    ("fla", "KDA"): 211,
    ("fla", "Gated DeltaNet"): 211,
    ("fla", "GLA"): 146,
    ("fla", "attention"): 86,
}


def transformers_model(layer, n, comm):
    from allscan.integrations import transformers, transformers_layers

    transformers_layers.on_gpu = lambda device: True
    family, options = TRANSFORMERS[layer]
    options = dict(num_hidden_layers=n, **options(n)) if family != "nemotron_h" else options(n)
    model = made(family, **options)
    return transformers.sequence_parallel(model, comm=comm, layout="zigzag")


def fla_model(layer, n, comm):
    fla = import_fla()
    from allscan.integrations.fla import sequence_parallel

    kind, options = FLA[layer]
    if layer == "attention":  # behind a recurrent layer, which a split model must have
        options = dict(attn=SOFTMAX | dict(layers=[*range(1, 1 + n)]))
        n += 1
    model = test_fla_models.model_of(fla, kind, fuse_cross_entropy=False, num_hidden_layers=n, **options).train()
    return sequence_parallel(model, comm=comm, layout="zigzag")


def walk_case(package, layer):
    """Return (calls of a layer's forward, of its backward, {function: its number in both}) on this rank."""
    made = {"transformers": transformers_model, "fla": fla_model}[package]
    ids, found, comm = torch.randint(1, 50, (1, 16)), [], allscan.Communicator()
    models = [made(layer, n, comm) for n in (1, 2)]

    def both():
        for model in models:
            output = model(input_ids=ids, labels=ids, use_cache=False)
            output.loss.backward()

    for _ in range(3):
        both()
    comm.barrier()
    as_on_a_gpu(comm)
    both()
    for model in models:
        with Steps() as forward:
            output = model(input_ids=ids, labels=ids, use_cache=False)
        with Steps() as backward:
            output.loss.backward()
        found.append((forward.names, backward.names))
    numbers = [len(two) - len(one) for one, two in zip(*found, strict=True)]
    names = [collections.Counter(two) - collections.Counter(one) for one, two in zip(*found, strict=True)]
    return *numbers, *(dict(x.most_common()) for x in names)


@pytest.mark.slow(but=("transformers-MLA", "transformers-attention", "transformers-Mamba2"))
@pytest.mark.parametrize("package, layer", BOUNDS)
def test_a_layers_calls(fresh, package, layer):
    for forward, backward, *names in fresh(2).run(walk_case, package, layer):
        print(package, layer, forward, backward, *names, sep="\n  ")
        assert forward + backward <= BOUNDS[package, layer], (forward, backward)
