"""`allscan estimate` beside what torch's allocator counts."""

from __future__ import annotations

import pytest
import torch

import allscan
from allscan.tools import estimate
from allscan.tools.estimate import Cut, Recurrent
from bench.harness import extra_mib

pytestmark = pytest.mark.gpu
OPERATORS = {"gla": "zeco_gla", "kda": "zeco_kda", "gated_delta_rule": "zeco_gated_delta_rule"}
LAYERS = 3


def inputs(rule, T, H, D, device):
    """Of a layer, in the dtypes of estimate.inputs; and the gradient of its output."""
    normal = [torch.randn(1, T, H, D, device=device).bfloat16().requires_grad_() for _ in range(3)]
    gates = torch.randn(1, T, H, *[D] * (rule != "gated_delta_rule"), device=device)
    given = [*normal, torch.nn.functional.logsigmoid(gates).requires_grad_()]
    if rule != "gla":
        given.append(torch.rand(1, T, H, device=device).bfloat16().requires_grad_())
    return given, torch.randn_like(normal[2])


def passes(operator, given, do, options):
    """Forward without gradients, both passes, and both of a chain of layers, each of which takes the output of the one
    before as q."""

    def forward():
        with torch.no_grad():
            operator(*given, **options)

    def both():
        torch.autograd.grad(operator(*given, **options)[0], given, do)

    def chain():
        q = given[0]
        for _ in range(LAYERS):
            q, _ = operator(q, *(x.detach() for x in given[1:]), **options)
        torch.autograd.grad(q, given[0], do)

    return forward, both, chain


def peaks_case(group, rule, layout, H, D):
    """Of two numbers of tokens each of ``passes``, over what is estimated."""
    ratios = []
    with allscan.Communicator(group) as comm:
        options = dict(comm=comm, layout=layout) | ({} if rule == "gla" else dict(chunk="allscan"))
        processors = torch.cuda.get_device_properties(comm.device).multi_processor_count
        for T in (4096, 16384):
            cut = Cut(T * comm.size, comm.size, 1, layout == "zigzag", multiprocessors=processors)
            found = estimate.peak(Recurrent(rule, 1, H, D, D), cut)
            expected = found.forward, found.both, (LAYERS - 1) * found.kept + found.both
            functions = passes(getattr(allscan, OPERATORS[rule]), *inputs(rule, T, H, D, comm.device), options)
            for function, nbytes in zip(functions, expected, strict=True):
                function()  # compiled, agreed upon
                ratios.append(round(extra_mib(function) * (1 << 20) / nbytes, 4))
        comm.barrier()
    return ratios


@pytest.mark.parametrize("size, layout", [(1, "contiguous"), (2, "contiguous"), (2, "zigzag")])
@pytest.mark.parametrize("rule", OPERATORS)
def test_peaks_are_those_estimated(run, size, layout, rule):
    for ratios in run(size, peaks_case, rule, layout, 16, 128):
        assert len(ratios) == 6 and all(abs(ratio - 1) < 0.1 for ratio in ratios), ratios
