"""`allscan estimate` beside what torch's allocator counts."""

from __future__ import annotations

import functools

import pytest
import torch

import allscan
from allscan.tools import estimate
from allscan.tools.estimate import Cut, Recurrent
from bench.harness import extra_mib

pytestmark = pytest.mark.gpu
OPERATORS = {"gla": "zeco_gla", "kda": "zeco_kda", "gated_delta_rule": "zeco_gated_delta_rule"}


def peaks_case(group, rule, T, H, D):
    """(forward without gradients, both passes) of a call, over what is estimated."""
    with allscan.Communicator(group) as comm:
        normal = [torch.randn(1, T, H, D, device=comm.device).bfloat16().requires_grad_() for _ in range(3)]
        gates = torch.randn(1, T, H, *[D] * (rule != "gated_delta_rule"), device=comm.device)
        given = [*normal, torch.nn.functional.logsigmoid(gates).requires_grad_()]
        if rule != "gla":
            given.append(torch.rand(1, T, H, device=comm.device).bfloat16().requires_grad_())
        do, options = torch.randn_like(normal[2]), dict(comm=comm)
        if rule != "gla":
            options["chunk"] = "allscan"
        operator = functools.partial(getattr(allscan, OPERATORS[rule]), **options)

        def forward():
            with torch.no_grad():
                operator(*given)

        def both():
            torch.autograd.grad(operator(*given)[0], given, do)

        for function in (forward, both):  # compiled, agreed upon
            function()
        cut = Cut(T * comm.size, comm.size, multiprocessors=torch.cuda.get_device_properties(0).multi_processor_count)
        found = estimate.peak(Recurrent(rule, 1, H, D, D), cut)
        result = [extra_mib(f) * (1 << 20) / n for f, n in zip((forward, both), found, strict=True)]
        comm.barrier()
        return result


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("T", [4096, 16384])
@pytest.mark.parametrize("rule", OPERATORS)
def test_peaks_are_those_estimated(run, size, T, rule):
    for ratios in run(size, peaks_case, rule, T, 16, 128):
        assert all(abs(ratio - 1) < 0.1 for ratio in ratios), ratios
