"""zeco_ssd against mamba_ssm's own Triton kernels, on CPU ranks in Triton's interpreter."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import sys
import types
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from triton.runtime.autotuner import Autotuner

import allscan
from bench.tuning import mamba
from support.values import check_errors, error, place

if not all(importlib.util.find_spec(name) for name in ("mamba_ssm", "einops")):
    pytest.skip("needs mamba_ssm, which make test installs, and einops", allow_module_level=True)
TOKENS = {1: [43], 2: [26, 17]}  # of each rank; no multiples of mamba_ssm's chunk
CUTS = [0, 5, 16, 26, 43]  # at a chunk's boundary, and at the ranks'
H, P, N, CHUNK = 4, 16, 16, 16
OF_TOKENS = "x", "dt", "B", "C", "z"
PLAIN = dict(G=1, D=(H,), without=("z", "dt_bias", "initial_states"))
ALL = dict(G=2, D=(H, P), dt_softplus=True, dt_limit=(0.05, 1.5))
PACKED = dict(G=2, D=(H,), without=("z", "initial_states"), cuts=CUTS, dt_softplus=True)


@functools.cache
def theirs():
    """mamba_ssm's operator, imported past its __init__, which needs a CUDA extension. Other libraries still find no
    mamba_ssm in this process."""
    before = set(sys.modules)
    operator = mamba()
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "mamba_ssm":
            del sys.modules[name]
    return operator


def size_of_blocks(autotuner, *_, config, **__):
    """Replaces the time of a kernel's configuration: the smallest blocks fit into every GPU's shared memory."""
    return [math.prod(size for name, size in config.kwargs.items() if name.startswith("BLOCK"))]


@contextlib.contextmanager
def untuned():
    """Replace what mamba_ssm's Python code asks of a GPU, where there is none; choose its configurations untimed."""
    properties = types.SimpleNamespace(multi_processor_count=8)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Autotuner, "_bench", size_of_blocks))
        if not torch.cuda.is_available():
            stack.enter_context(mock.patch.object(torch.cuda, "device", contextlib.nullcontext))
            stack.enter_context(mock.patch.object(torch.cuda, "get_device_properties", lambda *_: properties))
        yield


def case(comm, tokens, G, D, without=(), cuts=None, **options):
    """Return the errors of y, the last final state and each gradient."""
    total, generator = sum(tokens), torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    drawn = dict(
        x=normal(1, total, H, P),
        dt=normal(1, total, H).sigmoid(),
        A=-torch.rand(H, generator=generator),
        B=normal(1, total, G, N),
        C=normal(1, total, G, N),
        D=normal(*D),
        z=normal(1, total, H, P),
        dt_bias=normal(H),
        initial_states=normal(1, H, P, N),
    )
    given = {name: t.to(comm.device) for name, t in drawn.items() if name not in without}
    dy, dfinal = normal(1, total, H, P).to(comm.device), normal(1, H, P, N).to(comm.device)

    with untuned():
        whole = {name: t.clone().requires_grad_() for name, t in given.items()}
        seq_idx = torch.bucketize(torch.arange(total), torch.tensor(cuts[1:]), right=True) if cuts else None
        seq_idx = seq_idx if seq_idx is None else seq_idx[None].int().to(comm.device)
        y, final = theirs()(**whole, chunk_size=CHUNK, seq_idx=seq_idx, return_final_states=True, **options)
        torch.autograd.backward([y, final], [dy, dfinal])

    mine = place(comm, tokens)
    own = {name: t[:, mine] if name in OF_TOKENS else t for name, t in given.items()}
    own = {name: t.detach().clone().requires_grad_() for name, t in own.items()}
    own_y, own_final = allscan.zeco_ssd(
        **own, chunk_size=CHUNK, comm=comm, cu_seqlens=cuts, return_final_states=True, **options
    )
    ((own_y * dy[:, mine]).sum() + (own_final[-1:] * dfinal).sum()).backward()
    errors, shared = {"y": error(own_y, y[:, mine])}, {"final": own_final[-1:].detach()}
    for name, t in own.items():
        if name in OF_TOKENS:
            errors[name] = error(t.grad, whole[name].grad[:, mine])
        else:
            shared[name] = t.grad
    for name, t in shared.items():
        dist.all_reduce(t, group=comm.group)
        errors[name] = error(t, final if name == "final" else whole[name].grad)
    return errors


@pytest.mark.parametrize("options", [PLAIN, ALL, PACKED], ids=["plain", "all", "packed"])
@pytest.mark.parametrize("size", [1, 2])
def test_values_and_gradients(run, size, options):
    """On GPUs mamba_ssm rounds the factors of products in float32 to TF32."""
    check_errors(run(size, case, TOKENS[size], **options), (1e-2 if torch.cuda.is_available() else 2e-6))
