"""Keys and values from latents: those of transformers' layers, in every bit, with their gradients."""

from __future__ import annotations

import importlib
import pkgutil
from types import MethodType

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from allscan.integrations import latents
from allscan.integrations.latents import expand, expansion_of

transformers = pytest.importorskip("transformers")


def layers():
    """Return all classes of transformers' models that compute keys from latents, by name."""
    from transformers import models

    found = {}
    for _, name, package in pkgutil.iter_modules(models.__path__):
        path = f"{models.__path__[0]}/{name}/modeling_{name}.py"
        try:
            with open(path) as file:
                if not package or "def expand_kv" not in file.read():
                    continue
            module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        except (FileNotFoundError, ImportError):
            continue
        found |= {kind.__name__: kind for kind in vars(module).values() if "expand_kv" in getattr(kind, "__dict__", ())}
    return found


LAYERS = layers()


class Layer(torch.nn.Module):
    """A layer with another class's ``expand_kv``."""

    def __init__(self, kind, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim, self.num_heads = 6, 4, 8, 3
        self.kv_b_proj = torch.nn.Linear(5, 3 * 14, bias=False, dtype=dtype)
        with torch.no_grad():
            self.kv_b_proj.weight.copy_(torch.randn(3 * 14, 5, generator=generator))
        type(self).expand_kv = kind.expand_kv


def of(kind, dtype=torch.float32):
    return type("Of" + kind.__name__, (Layer,), {})(kind, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_bits(name, dtype):
    module = of(LAYERS[name], dtype)
    ours = expansion_of(module)
    assert getattr(ours, "func", None) is expand
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(2, 1, 7, width, generator=generator).to(dtype) for width in (5, 4)]
    gradients = [torch.randn(2, 3, 7, width, generator=generator).to(dtype) for width in (10, 8)]
    answers = []
    for how in (ours, module.expand_kv):
        leaves = [x.clone().requires_grad_() for x in drawn]
        found = how(*leaves)
        answers.append([*found, *torch.autograd.grad(found, (*leaves, module.kv_b_proj.weight), gradients)])
    for a, b in zip(*answers, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    keys, values = expand(module, *drawn)
    assert keys.transpose(1, 2).is_contiguous() and values.transpose(1, 2).stride(1) == 3 * 14


def test_there_are_such_layers():
    assert {"KimiLinearAttention", "DeepseekV3Attention"} <= set(LAYERS)


class Other:
    """Layers that compute something else, or need what ``expand`` does not know."""

    def scaled(self, latents, rope_keys):
        keys, values = expand(self, latents, rope_keys)
        return 2 * keys, values

    def three(self, latents, rope_keys):
        return *expand(self, latents, rope_keys), None

    def more(self, latents, rope_keys):
        return expand(self, latents * self.scale_of_latents, rope_keys)

    def sizes(self, latents, rope_keys):
        keys, values = expand(self, latents, rope_keys)
        return keys[..., :-1], values


@pytest.mark.parametrize("name", ["scaled", "three", "more", "sizes"])
def test_other_layers_keep_their_own(name):
    kind = type(name, (), dict(expand_kv=getattr(Other, name)))
    module = kind()
    assert expansion_of(module) == module.expand_kv


def test_a_changed_method_of_an_instance_is_used():
    module = of(LAYERS["KimiLinearAttention"])
    module.expand_kv = MethodType(Other.scaled, module)
    assert expansion_of(module) is module.expand_kv
    module.expand_kv = lambda latents, rope_keys: None
    assert expansion_of(module) is module.expand_kv


def test_a_changed_method_of_a_class_is_used():
    module = of(LAYERS["KimiLinearAttention"])
    assert expansion_of(module).func is expand
    type(module).expand_kv = Other.scaled
    assert expansion_of(module) == module.expand_kv


def test_an_error_of_any_kind():
    def expand_kv(self, latents, rope_keys):
        raise KeyError("scale")

    module = type("Raises", (), dict(expand_kv=expand_kv))()
    assert expansion_of(module) == module.expand_kv


def test_with_fake_tensors():
    """What is found there holds for later layers."""
    module = of(LAYERS["DeepseekV3Attention"])
    with FakeTensorMode():
        assert expansion_of(module).func is expand


def test_other_devices_and_modes():
    """The comparison of a class is made with numbers, whatever the default device is; on the meta device, too."""
    module = of(LAYERS["KimiLinearAttention"]).to("meta")
    latents._computes_the_same.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"), torch.inference_mode():
            ours = expansion_of(module)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"), torch.inference_mode():
        keys, values = ours(torch.empty(1, 1, 6, 5), torch.empty(1, 1, 6, 4))
    assert ours.func is expand and keys.shape == (1, 3, 6, 10) and values.shape == (1, 3, 6, 8)
