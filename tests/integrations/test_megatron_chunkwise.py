"""All-Scan inside Megatron-core's chunkwise Gated DeltaProduct: on CPU ranks with a backend in torch, on GPUs with
Megatron's own of fla; and the calls of its Gated DeltaNet. ``ALLSCAN_MEGATRON=checkout`` takes Megatron's files from a
checkout; without it the CPU tests use a stand-in (support/gdp_stand_in.py), and those of fla's backend are skipped."""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import partial
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import allscan
from allscan.reference import delta_reference
from support.fla import has_gradients, import_fla
from support.gdp import Backend, load, recurrence
from support.gla import BF16
from support.values import pairs, raised, relative_all

NAMES = "o", "q", "k", "v", "g", "beta"
CUTS = {  # in ranks: not packed; one sequence; one over three ranks; an end on a middle rank, and at a rank's end
    "batch": lambda size: None,
    "one": lambda size: [0, size],
    "packed": lambda size: [0, 0.5, size - 0.5, size] if size > 2 else [0, 0.25, 1.5, 1.75, 2],
    "middle": lambda size: [0, size / 2, size],
    "borders": lambda size: [0, 1, size],
}


def drawn(cuts, size, T, n, K, V, device="cpu", dtype=torch.float32):
    """Return (q, k, v, g, beta and the output's gradient of all ranks, their boundaries or None)."""
    torch.manual_seed(0)
    cuts = CUTS[cuts](size)
    B, H, HV, T = 2 if cuts is None else 1, 1, 2, size * T
    q, k, v, g, beta, do = (
        torch.randn(*shape, device="cpu").to(device, dtype)
        for shape in ((B, T, H, K), (B, n * T, H, K), (B, n * T, HV, V), (B, T, HV), (B, n * T, HV), (B, T, HV, V))
    )
    inputs = [F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, F.logsigmoid(g.float()) * 4 / T, beta.sigmoid(), do]
    return inputs, None if cuts is None else [int(cut * T / size) for cut in cuts]


def law(inputs, cuts, n):
    """Return the unsplit computation's output and gradients, float64."""
    *inputs, do = (x.double() for x in inputs)
    leaves = [x.requires_grad_() for x in inputs]
    o, _ = recurrence(*leaves, cuts, n, 0.5)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def part(x, comm):
    return x.chunk(comm.size, 1)[comm.rank].contiguous()


def layer(comm, modules, backend, inputs, cuts, n, backward=True, between=None):
    """Return this rank's output and gradients, by the call of Megatron's layer. between: called between the passes."""
    chunkwise, gdp_common, *_ = modules
    *leaves, do = (part(x, comm) for x in inputs)
    leaves = [x.requires_grad_() for x in leaves]
    which, local = {}, None
    if cuts is not None:
        numbers = torch.repeat_interleave(torch.arange(len(cuts) - 1), torch.tensor(cuts).diff())
        numbers = numbers.int()[None].to(comm.device)
        metadata = chunkwise.build_packed_sequence_cp_metadata(numbers, comm.rank, comm.size)
        which = {name: getattr(metadata, name) for name in ("preceding_rank_start", "following_rank_stop")}
        local = metadata.local_cu_seqlens
    o = gdp_common.gdp_chunkwise_context_parallel(
        *leaves, local, num_householder=n, scale=0.5, cp_group=comm.group, backend=backend, **which
    )
    if between is not None:
        between()
    return [o.detach(), *(torch.autograd.grad(o, leaves, do.to(o.dtype)) if backward else ())]


def stacked_gather(output, x, group):
    """Megatron's use of all_gather_into_tensor, which gloo rejects: an output with one more dimension."""
    dist.all_gather([*output], x, group=group)


def values_case(group, cuts, n, given):
    """Return this rank's errors against the unsplit computation by All-Scan, and by Megatron's gather."""
    from allscan.integrations import megatron_chunkwise

    chunkwise, gdp_common = modules = load()
    theirs = gdp_common.chunkwise_cp_forward, gdp_common.chunkwise_cp_backward
    comm = allscan.Communicator(group)
    inputs, ends = drawn(cuts, comm.size, 6, n, 16, 8)
    expected = [part(x, comm) for x in law(inputs, ends, n)]
    backend = Backend(*modules)
    with mock.patch.object(dist, "all_gather_into_tensor", stacked_gather):
        enable = partial(megatron_chunkwise.enable, comm=comm if given else None)
        gathered = layer(comm, modules, backend, inputs, ends, n, between=enable)  # backward gathers, too
    megatron_chunkwise.enable()
    assert gdp_common.chunkwise_cp_forward is not theirs[0] and gdp_common.chunkwise_cp_backward is not theirs[1]
    with mock.patch.object(dist, "all_gather_into_tensor", None):  # a call would fail
        scanned = [layer(comm, modules, backend, inputs, ends, n) for _ in range(2)]
    used = [*megatron_chunkwise._communicators.values()]
    megatron_chunkwise.disable()
    assert theirs == (gdp_common.chunkwise_cp_forward, gdp_common.chunkwise_cp_backward)
    assert len(used) == 1 and used[0].closed == (used[0] is not comm) == (not given)
    megatron_chunkwise.disable()  # no effect
    comm.close()
    return [relative_all(NAMES, found, expected) for found in (*scanned, gathered)]


@pytest.mark.slow(
    but=(
        "batch-2-False-2",
        "one-2-True-3",
        "packed-1-True-2",
        "packed-2-False-3",
        "middle-1-True-3",
        "borders-1-True-2",
    )
)
@pytest.mark.cpu
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("cuts, n, given", pairs([*CUTS], [1, 2], [True, False]))
def test_values(run, size, cuts, n, given):
    for errors in run(size, values_case, cuts, n, given):
        assert all(max(found.values()) < 2e-6 for found in errors), errors


def separate_case(comm, first):
    """The first of two sequences, of ``first`` tokens, has NaN. Return whether the second one's outputs and gradients
    are the same."""
    from allscan.integrations import megatron_chunkwise

    modules = load()
    megatron_chunkwise.enable(comm=comm)
    inputs, _ = drawn("packed", comm.size, 6, 2, 16, 8)
    answers = []
    for value in (1.0, float("nan")):
        inputs[2][:, : 2 * first] = value
        found = layer(comm, modules, Backend(*modules), inputs, [0, first, 6 * comm.size], 2)
        ours = max(first - 6 * comm.rank, 0)
        answers.append([x[:, ours * (x.shape[1] // 6) :] for x in found])
    megatron_chunkwise.disable()
    return [torch.equal(a, b) for a, b in zip(*answers, strict=True)]


@pytest.mark.cpu
@pytest.mark.parametrize("first", [6, 9])  # of a rank's 6: an end at a rank's end, and on a middle rank
def test_nan_stays_in_its_sequence(run, first, size=3):
    assert all(sum(run(size, separate_case, first), []))


def rejected_case(group, backward):
    """The backend rejects the inputs on one rank, forward: in a first call and in a later one on the first rank, from
    which the others receive; or the gradients on the last rank. Return the errors of all calls."""
    from allscan.integrations import megatron_chunkwise

    modules = load()
    comm = allscan.Communicator(group, timeout=4)
    megatron_chunkwise.enable(comm=comm)
    inputs, ends = drawn("one", comm.size, 3, 1, 16, 8)
    backend = Backend(*modules)

    def call(fails):
        backend.fails = fails
        return raised(layer, comm, modules, backend, inputs, ends, 1)

    found = [] if backward else [call("forward" if comm.rank == comm.size - 1 else None)]
    found += [call(None) for _ in range(2)]
    where, which = (comm.size - 1, "backward") if backward else (0, "forward")
    found.append(call(which if comm.rank == where else None))
    megatron_chunkwise.disable()
    return found


@pytest.mark.cpu
@pytest.mark.parametrize("backward", [False, True])
def test_inputs_that_one_rank_rejects(run, backward, size=3):
    """All ranks learn of a rejection: they raise at once in a first call, and name it where they wait in vain."""
    sender, what = (2, "gradients") if backward else (0, "inputs")
    why = f"the backend rejects these {what}"
    for rank, (*first, one, two, last) in enumerate(run(size, rejected_case, backward)):
        assert one is None and two is None
        if not backward and rank == 2:
            assert first[0] == ("ValueError", why)
        elif not backward:
            assert first[0][0] == "AllScanRejected" and f"ValueError: {why}" in first[0][1], first
        if rank == sender:
            assert last == ("ValueError", why)
        elif rank == abs(sender - 1):
            assert last[0] == "AllScanTimeout" and f"rank {sender} has rejected" in last[1].lower(), last
            assert why in last[1], last


def unpacked_case(comm):
    from allscan.integrations import megatron_chunkwise

    modules = load()
    megatron_chunkwise.enable(comm=comm)
    backend = Backend(*modules)
    backend.packed = False
    problem = raised(layer, comm, modules, backend, *drawn("one", comm.size, 2, 1, 16, 8), 1)
    megatron_chunkwise.disable()
    return problem


@pytest.mark.cpu
def test_summaries_that_are_not_packed(run, size=2):
    assert run(size, unpacked_case) == [("TypeError", "the backend must return packed summaries, got Tensor")] * size


@pytest.mark.cpu
def test_megatron_without_it(monkeypatch):
    """The error names what is missing, and nothing is replaced."""
    from allscan.integrations import megatron_chunkwise

    def without(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(ImportError, match=r"megatron_chunkwise needs Megatron-core's gdp_common"):
        megatron_chunkwise.enable()
    megatron_chunkwise.disable()


def of_fla(comm, cuts, backward):
    """Return (errors by All-Scan, by Megatron's gather) of Megatron's backend of fla, bfloat16, against float64."""
    import_fla(models=False)
    from allscan.integrations import megatron_chunkwise

    modules = load("gdp")
    backend, n = modules[2].FLAGatedDeltaProductCPBackend(), 2
    inputs, ends = drawn(cuts, comm.size, 192, n, 64, 64, comm.device, BF16)
    expected = [part(x, comm) for x in law(inputs, ends, n)]
    gathered = layer(comm, modules, backend, inputs, ends, n, backward)
    megatron_chunkwise.enable(comm=comm)
    scanned = layer(comm, modules, backend, inputs, ends, n, backward)
    megatron_chunkwise.disable()
    return [relative_all(NAMES, found, expected) for found in (scanned, gathered)]


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("cuts", CUTS)
def test_backend_of_fla(run, size, cuts):
    if "ALLSCAN_MEGATRON" not in os.environ:
        pytest.skip("needs ALLSCAN_MEGATRON, a checkout of Megatron-LM with gdp_common")
    if not importlib.util.find_spec("fla") or raised(load, "gdp"):
        pytest.skip("needs the fla of Megatron's backend: 0.5")
    for scanned, gathered in run(size, of_fla, cuts, has_gradients()):
        for name, theirs in gathered.items():
            assert scanned[name] <= 1.1 * theirs + 1e-5 and theirs < 2e-2, (name, scanned, gathered)


def convolution(x, weight, cuts):
    """silu of a causal convolution of x [1, T, D], for each sequence."""
    width = weight.shape[1] - 1
    pieces = [F.pad(x[:, a:b].mT, (width, 0)) for a, b in pairwise(cuts)]
    return torch.cat([F.silu(F.conv1d(piece, weight[:, None], groups=len(weight))).mT for piece in pieces], 1)


def of_gated_delta_net(group, cuts, backward):
    """Return the errors of outputs and gradients by the calls of Megatron's chunkwise Gated DeltaNet, with ``fla_cp``,
    and on GPUs with fla's exchange. On CPU ranks with our delta rule, since fla's needs a GPU."""
    import_fla(models=False)
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.cp import build_cp_context, chunk_delta_h
    from fla.ops.cp import comm as exchange
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    from allscan.integrations import fla_cp

    comm = allscan.Communicator(group)
    on_gpu = comm.device.type == "cuda"
    T, K, dtype = (192, 64, BF16) if on_gpu else (12, 16, torch.float32)
    total = comm.size * T
    ends = [int(cut * T) for cut in CUTS[cuts](comm.size)]
    whole = torch.tensor(ends, dtype=torch.int32)
    torch.manual_seed(0)
    x, g, beta, do = (torch.randn(1, total, n, device="cpu").to(comm.device) for n in (3 * K, 1, 1, K))
    given = [x.to(dtype), F.logsigmoid(g) * 4 / T, beta.sigmoid().to(dtype), do[:, :, None].to(dtype)]
    weight = (torch.randn(3 * K, 4, device="cpu") / 2).to(comm.device, dtype)

    def results(convolve, rule, inputs, weight, **where):
        *inputs, do = inputs
        leaves = [x.detach().clone().requires_grad_() for x in (*inputs, weight)]
        x, g, beta, weight = leaves
        q, k, v = (y.unflatten(-1, (1, -1)) for y in convolve(x, weight, **where).chunk(3, -1))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        o = rule(q=q, k=k, v=v, g=g, beta=beta, **where)[0]
        return [o.detach(), *(torch.autograd.grad(o, leaves, do.to(o.dtype)) if backward else ())]

    def convolve(x, weight, **where):
        return causal_conv1d(x=x, weight=weight, bias=None, activation="silu", **nothing, **where)[0]

    def rule(cp_context, cu_seqlens, **operands):
        if on_gpu:
            where = dict(cp_context=cp_context, cu_seqlens=cu_seqlens)
            return chunk_gated_delta_rule(**operands, use_qk_l2norm_in_kernel=False, **nothing, **where)
        return allscan.zeco_gated_delta_rule(**operands, cu_seqlens=whole, comm=comm)

    nothing = dict(initial_state=None, output_final_state=False)
    expected = results(
        partial(convolution, cuts=ends),
        partial(delta_reference, cu_seqlens=ends),
        [x.double() for x in given],
        weight.double(),
    )
    expected = [*(part(x, comm) for x in expected[:-1]), expected[-1]] if backward else [part(expected[0], comm)]
    mine = [part(x, comm) for x in given]
    where = dict(cu_seqlens=whole.to(comm.device), cp_context=None)
    where["cp_context"] = build_cp_context(
        cu_seqlens=where["cu_seqlens"], cu_seqlens_cpu=whole, group=comm.group, conv1d_kernel_size=4
    )
    found = [results(convolve, rule, mine, weight, **where)] if on_gpu else []
    fla_cp.context_parallel(comm)
    places = [mock.patch.object(module, "all_gather_into_tensor", None) for module in (exchange, chunk_delta_h)]
    with places[0], places[1]:  # a call would fail
        found.insert(0, results(convolve, rule, mine, weight, **where))
    fla_cp.disable()
    comm.close()
    for some in found if backward else ():
        some[-1] = some[-1].float()
        dist.all_reduce(some[-1], group=group)
    return [relative_all(("o", "x", "g", "beta", "weight"), some, expected) for some in found]


needs_fla = pytest.mark.skipif(not importlib.util.find_spec("fla"), reason="needs fla")


@needs_fla
@pytest.mark.cpu
@pytest.mark.parametrize("cuts, size", [("one", 2), ("packed", 3), ("middle", 3), ("borders", 2)])
def test_calls_of_gated_delta_net(run, size, cuts):
    for (errors,) in run(size, of_gated_delta_net, cuts, True):
        assert len(errors) == 5 and max(errors.values()) < 1e-5, errors


@needs_fla
@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("cuts", ["one", "packed", "middle", "borders"])
def test_calls_of_gated_delta_net_on_gpus(run, size, cuts):
    for scanned, gathered in run(size, of_gated_delta_net, cuts, has_gradients()):
        for name, theirs in gathered.items():
            assert scanned[name] <= 1.1 * theirs + 1e-5 and theirs < 2e-2, (name, scanned, gathered)
