"""`allscan estimate` against the counters of torch's allocator."""

from __future__ import annotations

import pytest
import torch

import allscan
from allscan.tools import estimate
from allscan.tools.estimate import Cut, Recurrent
from bench.harness import extra_mib
from bench.hybrid import Hybrid, made
from bench.model import text

pytestmark = pytest.mark.gpu
OPERATORS = {"gla": "zeco_gla", "kda": "zeco_kda", "gated_delta_rule": "zeco_gated_delta_rule"}
LAYERS = 3


def inputs(rule, T, H, D, device):
    """Return the inputs of a layer, in the dtypes of estimate.inputs, and the gradient of its output."""
    normal = [torch.randn(1, T, H, D, device=device).bfloat16().requires_grad_() for _ in range(3)]
    gates = torch.randn(1, T, H, *[D] * (rule != "gated_delta_rule"), device=device)
    given = [*normal, torch.nn.functional.logsigmoid(gates).requires_grad_()]
    if rule != "gla":
        given.append(torch.rand(1, T, H, device=device).bfloat16().requires_grad_())
    return given, torch.randn_like(normal[2])


def passes(operator, given, do, options):
    """Return functions: forward without gradients; both passes; both passes of a chain of layers, each with the output
    of the one before as q."""

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


def peaks_case(comm, rule, layout, H, D, recompute):
    """Return measured over estimated peaks of ``passes``, for two numbers of tokens."""
    ratios = []
    options = dict(comm=comm, layout=layout, recompute=recompute) | ({} if rule == "gla" else dict(chunk="allscan"))
    processors = torch.cuda.get_device_properties(comm.device).multi_processor_count
    for T in (4096, 16384):
        how = dict(multiprocessors=processors, recompute=recompute)
        cut = Cut(T * comm.size, comm.size, 1, layout == "zigzag", **how)
        found = estimate.peak(Recurrent(rule, 1, H, D, D), cut)
        expected = found.forward, found.both, (LAYERS - 1) * found.saved + found.both
        functions = passes(getattr(allscan, OPERATORS[rule]), *inputs(rule, T, H, D, comm.device), options)
        for function, nbytes in zip(functions, expected, strict=True):
            function()  # compiles, and agrees with the other ranks
            ratios.append(round(extra_mib(function) * (1 << 20) / nbytes, 4))
    comm.barrier()
    return ratios


@pytest.mark.parametrize("size, layout", [(1, "contiguous"), (2, "contiguous"), (2, "zigzag")])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("rule", OPERATORS)
def test_peaks_are_those_estimated(run, size, layout, rule, recompute):
    ratios = list(zip(*run(size, peaks_case, rule, layout, 16, 128, recompute), strict=True))  # by rank
    # a middle rank is estimated: the first one receives no state, the last one sends none
    assert len(ratios) == 6 and all(abs(max(of_ranks) - 1) < 0.1 for of_ranks in ratios), ratios


SHAPE = dict(layers=4, width=2048, heads=16, head=128, vocabulary=8192)  # three recurrent layers and one softmax layer


def hybrid_case(group, hybrid, layout):
    """Return measured over estimated memory of a step, for two numbers of tokens each: saved between forward and
    backward; the peak without parameters, gradients and optimizer; the whole peak."""
    from allscan.integrations.transformers import sequence_parallel
    from allscan.tools.estimate_step import model_of, step_of

    ratios = []
    with allscan.Communicator(group, timeout=120) as comm:  # one rank may compile longer than another
        processors = torch.cuda.get_device_properties(comm.device).multi_processor_count
        without_memory, estimates = model_of(hybrid.config(**SHAPE).to_dict()), {}
        for T in (4096, 8192):
            cut = Cut(T * comm.size, comm.size, 1, layout == "zigzag", multiprocessors=processors)
            estimates[T] = step_of(without_memory, cut)
        before = torch.cuda.memory_allocated()
        model = sequence_parallel(made(hybrid, comm.device, torch.bfloat16, **SHAPE), comm=comm, layout=layout)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        for T, found in estimates.items():
            tokens = text(T, SHAPE["vocabulary"], comm.device, comm.rank)[:, :-1]
            for _ in range(3):  # compiles and agrees; creates gradients and moments
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                start = torch.cuda.memory_allocated()
                loss = model(input_ids=tokens, labels=tokens).loss
                kept = torch.cuda.memory_allocated() - start
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
                whole = torch.cuda.max_memory_allocated() - before
            base = found.parameters + found.gradients + found.optimizer
            beside = (whole - base) / (found.peak - base)
            ratios += [round(x, 4) for x in (kept / found.saved, beside, whole / found.peak)]
        sequence_parallel(model, comm=None)
        comm.barrier()
    return ratios


@pytest.mark.parametrize("size, layout", [(1, "contiguous"), (2, "contiguous"), (2, "zigzag")])
@pytest.mark.parametrize("hybrid", [Hybrid("kimi_linear", 192), Hybrid("qwen3_next")], ids=lambda hybrid: hybrid.family)
def test_peaks_of_a_hybrid_are_those_estimated(run, hybrid, size, layout):
    pytest.importorskip("transformers")
    for ratios in run(size, hybrid_case, hybrid, layout):
        print(hybrid.name, size, layout, ratios)
        assert len(ratios) == 6 and all(abs(ratio - 1) < 0.1 for ratio in ratios), ratios
