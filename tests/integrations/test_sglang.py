"""sglang's linear-attention layers over the ranks: its dispatcher and pool, with a stand-in for its own kernel."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from allscan.integrations.sglang import PrefillKernel
from allscan.reference import delta_reference
from support.values import raised, relative

H, HV, K, V = 1, 2, 16, 8
SGLANG = os.environ.get("SGLANG", "")  # a folder with sglang's sources


class Kernel:
    """Stands for sglang's TritonGDNKernel and TritonKDAKernel: what its backends read and call."""

    supports_packed_decode = True
    uses_state_checkpoints = True
    supports_track_state_snapshot = True
    supports_safe_gate = False
    prefill_graph_wrapper_cls = object

    def decode(self, q, k, v, a, b, *, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, **kwargs):
        return "decoded"

    def extend(self, q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc, **kwargs):
        raise AssertionError("the kernel that is replaced")


def gates_of(rule, T, raw, generator):
    """Return (g and beta as sglang passes them, more arguments, those of the reference)."""
    g, beta = torch.randn(1, T, HV, K, generator=generator), torch.randn(1, T, HV, generator=generator)
    if rule == "gdn":
        g = -F.softplus(g[..., 0])
        return g, beta.sigmoid(), {}, (g[..., None].expand(-1, -1, -1, K), beta.sigmoid())
    A_log, bias = torch.rand(1, 1, HV, 1, generator=generator), torch.randn(HV * K, generator=generator)
    decay = -A_log.exp() * F.softplus(g + bias.view(HV, K))
    if not raw:
        return decay, beta, dict(beta_is_raw=True), (decay, beta.sigmoid())
    more = dict(A_log=A_log, dt_bias=bias, lower_bound=None, beta_is_raw=True)
    return g, beta, more, (decay, beta.sigmoid())


def extend_case(comm, rule, whole_rows, raw):
    """Return (error of the outputs, of the pool, this rank's pool) of two batches: requests 0 and 1 begin, then 1
    continues and 2 begins. Whole rows have two tokens more, behind the last request."""
    generator = torch.Generator().manual_seed(0)
    kernel = PrefillKernel(Kernel(), comm=comm, rule=rule, whole_rows=whole_rows)
    assert kernel.decode(*[None] * 5, A_log=0, dt_bias=0, ssm_states=0, cache_indices=0, query_start_loc=0)
    assert kernel.supports_packed_decode and not kernel.uses_state_checkpoints
    assert kernel.supports_safe_gate and kernel.prefill_graph_wrapper_cls is None
    pool = torch.zeros(5, HV, V, K, device=comm.device)
    states, errors = {}, []
    for slots, lengths in ([3, 1], [17, 20]), ([1, 4, -1], [9, 1, 3]):
        starts = [0, *itertools.accumulate(lengths)]
        total = starts[-1]
        q, k = (torch.randn(1, total, H, K, generator=generator) for _ in range(2))
        v = torch.randn(1, total, HV, V, generator=generator)
        g, beta, more, exact = gates_of(rule, total, raw, generator)
        each = -(-total // comm.size)
        mine = slice(min(comm.rank * each, total), min((comm.rank + 1) * each, total))
        own = (q, k, v, g, beta)
        own = [F.pad(x, (0, 0) * (x.ndim - 2) + (0, 2)) if whole_rows else x[:, mine] for x in own]
        answer = kernel.extend(
            *(x.to(comm.device) for x in own),
            ssm_states=pool,
            cache_indices=torch.tensor(slots, dtype=torch.int32, device=comm.device),
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=comm.device),
            layer_id=0,
            **{name: x.to(comm.device) if torch.is_tensor(x) else x for name, x in more.items()},
        )
        if rule == "gdn":
            assert len(answer) == 3 and answer[1:] == (None, None)
            answer = answer[0]
        expected = []
        for slot, part in zip(slots, map(slice, starts, starts[1:])):
            normalized = [F.normalize(x, dim=-1).expand(-1, -1, HV, -1)[:, part] for x in (q, k)]
            rest = [x[:, part] for x in (v, *exact)]
            o, state = delta_reference(*normalized, *rest, initial_state=states.get(slot))
            expected.append(o)
            if slot >= 0:
                states[slot] = state
                errors.append(relative(pool[slot].mT[None], state))
        expected = torch.cat(expected, 1)
        expected = F.pad(expected, (0, 0, 0, 0, 0, 2)) if whole_rows else expected[:, mine]
        assert answer.shape == expected.shape
        errors.append(relative(answer, expected) if answer.numel() else 0.0)
    comm.check()
    return max(errors), pool.cpu()


@pytest.mark.parametrize(
    "rule, whole_rows, raw, size",
    [
        ("gdn", True, False, 2),
        ("kda", False, True, 3),
        pytest.param("kda", True, False, 2, marks=pytest.mark.slow),
        pytest.param("gdn", False, False, 4, marks=pytest.mark.slow),
        pytest.param("kda", True, True, 1, marks=pytest.mark.slow),
    ],
)
def test_batches(run, rule, whole_rows, raw, size):
    found = run(size, extend_case, rule, whole_rows, raw)
    for error, pool in found:
        assert error < 2e-5, error
        assert torch.equal(pool, found[0][1])


def not_supported_case(comm):
    kernel = PrefillKernel(Kernel(), comm=comm, rule="kda")
    x, loc = torch.zeros(1, 1, 1, 16), torch.tensor([0, 1])
    pool = dict(ssm_states=x, cache_indices=loc[:1], query_start_loc=loc)
    options = dict(inplace_update=False), dict(return_intermediate_states=True), dict(track_state=x)
    found = [raised(kernel.extend, *[x] * 5, **pool, **more) for more in (*options, dict(num_state_checkpoints=2))]
    return [*found, raised(PrefillKernel, Kernel(), comm=comm, rule="gla")]


def test_what_is_not_supported(run):
    *found, rule = run(1, not_supported_case)[0]
    assert all(name == "NotImplementedError" for name, _ in found), found
    assert rule[0] == "ValueError"


@pytest.mark.skipif(not SGLANG, reason="SGLANG=folder of sglang's sources")
def test_the_interface_of_the_sources():
    """The arguments of sglang's own interface."""
    path = Path(SGLANG) / "srt/layers/attention/linear/kernels/kernel_backend.py"
    spec = importlib.util.spec_from_file_location("kernel_backend", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    theirs = inspect.signature(module.LinearAttnKernelBase.extend).parameters
    ours = inspect.signature(PrefillKernel.extend).parameters
    for name, parameter in theirs.items():
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            assert ours[name].kind is parameter.kind and ours[name].default is parameter.default
    flags = {name for name, x in vars(module.LinearAttnKernelBase).items() if isinstance(x, bool)}
    assert all(hasattr(PrefillKernel, name) or name.startswith("supports_") for name in flags), flags
