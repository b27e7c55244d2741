"""recompute=False of the delta rules: forward keeps the intermediates of the chunks for backward."""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch
import torch.utils.checkpoint

import allscan
from allscan.launch.compiled_kernel import Launch
from allscan.ops.delta.gdn_plans import ScalarChunkPass
from allscan.ops.delta.kda_plans import ChunkPass
from allscan.shmem_kernels import gdn, kda_fwd
from support.delta import NAMES, DeltaCase, Whole, kept_case, of_rank
from support.fla import import_fla
from support.gla import BF16, F32
from support.launches import Launches, launch_chunks
from support.values import place, raised, relative_all

pytestmark = pytest.mark.cpu
F16 = torch.float16
LIMIT = {F32: 3e-6, BF16: 1e-2, F16: 1.5e-3}
RULES = {"kda": allscan.zeco_kda, "gated_delta_rule": allscan.zeco_gated_delta_rule}
PACKED = dict(tokens=[70, 130, 10, 90], K=24, gates="strong", lengths=[0, 13, 39, 39, 215, 216, 300])


@pytest.mark.slow(but=("packed", "zigzag", "bfloat16"))
@pytest.mark.quick("packed")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "case, options",
    [
        (DeltaCase("", [70, 130, 20], B=2, HV=2, K=32, V=32, gates="mixed"), {}),
        (DeltaCase("", [150, 70], B=2, H=2, HV=2, V=40, gates="mild", dtype=BF16), {}),
        (DeltaCase("", [150, 70], H=2, HV=2, gates="strong", dtype=F16), {}),
        (DeltaCase("", **PACKED), {}),
        (DeltaCase("", [70, 0, 36], B=2, gates="mild"), {}),
        (DeltaCase("", [68, 68], B=2, zigzag=True), {}),
        (DeltaCase("", [128, 64, 30], HV=2, gates="mixed"), dict(invariant=64)),
        (DeltaCase("", [100, 100], gates="mixed", lengths=[0, 30, 140, 200], zigzag=True), {}),
    ],
    ids=["GVA", "bfloat16", "float16", "packed", "a rank without tokens", "zigzag", "invariant", "packed, zigzag"],
)
def test_what_is_kept(run, rule, case, options):
    """Backward takes what forward has computed: the bits that it would compute again, except KDA's w and kg of 16-bit
    inputs, which forward rounds at other places. (Here K > V would add products for w in another order, too.)"""
    case = case._replace(rule=rule)
    same = NAMES[:2] if rule == "kda" and case.dtype != F32 else NAMES
    for errors, differing in run(len(case.tokens), kept_case, case, [False] * len(case.tokens), **options):
        assert max(errors.values()) < LIMIT[case.dtype] and not {*differing} & {*same}, (errors, differing)


@pytest.mark.parametrize("rule", RULES)
def test_each_rank_chooses(run, rule):
    for errors, differing in run(3, kept_case, DeltaCase(rule, [70, 80, 66], gates="mild"), [True, False, True]):
        assert max(errors.values()) < LIMIT[F32] and not differing, (errors, differing)


def modes_case(comm, rule, lengths):
    """Return errors of compiled calls and of activation checkpointing, of a second backward pass on the same graph, and
    the bytes that a call saves by recompute= and with and without gradients."""
    tokens, keeping = [70, 66], functools.partial(RULES[rule], recompute=False)
    whole = Whole(DeltaCase(rule, tokens, HV=2, gates="mild", lengths=lengths), comm.device)
    mine = place(comm, tokens)
    wanted = of_rank(whole.reference(), comm, tokens, lengths, 1)

    def checkpointed(*x, **options):
        return torch.utils.checkpoint.checkpoint(keeping, *x, **options, use_reentrant=False)

    calls = torch.compile(keeping, fullgraph=True, backend="aot_eager"), checkpointed
    errors = [max(relative_all(NAMES, whole.ours(comm, mine, call=x), wanted).values()) for x in calls]

    own, saved, found = [x[:, mine].clone().requires_grad_() for x in whole.tensors()], [], []

    def packed(x):
        saved[-1] += x.nbytes
        return x.clone()  # as a hook that moves tensors

    for call, differentiable in ((RULES[rule], True), (keeping, True), (keeping, False)):
        saved.append(0)
        with torch.autograd.graph.saved_tensors_hooks(packed, torch.clone), torch.set_grad_enabled(differentiable):
            o, _ = call(*own, comm=comm, cu_seqlens=lengths)
        if differentiable:
            found += [torch.autograd.grad((o * whole.do[:, mine]).sum(), own, retain_graph=True) for _ in range(2)]
    same = all(torch.equal(a, b) for some in found[1:] for a, b in zip(found[0], some, strict=True))
    return errors, same, saved


@pytest.mark.slow(but="kda-None")
@pytest.mark.parametrize("lengths", [None, [0, 13, 39, 136]])
@pytest.mark.parametrize("rule", RULES)
def test_modes(run, rule, lengths):
    of_rule = ChunkPass if rule == "kda" else ScalarChunkPass
    for tokens, (errors, same, (usual, kept, without)) in zip([70, 66], run(2, modes_case, rule, lengths)):
        assert max(errors) < LIMIT[F32] and same and without == 0
        always, stored = (of_rule.saved((1, tokens, 2, 16), 16, 2, F32, saves) for saves in (False, True))
        least = sum(torch.Size(shape).numel() * 4 for shape, _ in stored[len(always) :])
        assert least <= kept - usual < 2 * least, (kept - usual, least)


@pytest.mark.parametrize("saves", [False, True])
def test_what_backward_launches(saves, monkeypatch):
    """Kept, KDA's operands and anchors and Gated DeltaNet's states are computed by forward alone."""
    for scalar, kernel, times in (
        (False, kda_fwd.operands_kernel, 3),
        (True, gdn.scalar_states_kernel, 2),
    ):
        with monkeypatch.context() as patch:
            launch_chunks(32, 32, BF16, scalar, patch, saves=saves)
            assert [x[0] for x in Launches.made].count(kernel) == times - saves


def checkpoint_case(comm):
    """Return the launches of kernels that only recompute=True makes twice, by activation checkpointing (its form, or
    None) and recompute=, from the call to the end of backward."""
    found, before = {}, Launch.__call__
    whole = Whole(DeltaCase("kda", [140], gates="mild"), comm.device)
    own = [x.clone().requires_grad_() for x in whole.tensors()]
    for reentrant in (None, False, True):
        for recompute in (True, False):
            launched: list = []

            def counting(launch, *tensors, launched=launched):
                launched.append(launch.kernel)
                return before(launch, *tensors)

            def call(*x, recompute=recompute):
                return allscan.zeco_kda(*x, comm=comm, recompute=recompute)[0]

            with mock.patch.object(Launch, "__call__", counting):
                if reentrant is None:
                    call(*own).sum().backward()
                else:
                    torch.utils.checkpoint.checkpoint(call, *own, use_reentrant=reentrant).sum().backward()
            found[reentrant, recompute] = launched.count(kda_fwd.operands_kernel)
    return found


def test_activation_checkpointing(run):
    """Forward runs twice, with two launches each, and the second keeps for backward, which else makes a fifth."""
    [found] = run(1, checkpoint_case)
    assert [found[None, x] for x in (True, False)] == [3, 2], found
    assert all(found[reentrant, x] == 4 + x for reentrant in (False, True) for x in (True, False)), found


def default_case(group):
    """Return the bytes that calls save with the communicator's default, and with the default overridden."""
    found = {}
    with allscan.Communicator(group, recompute=False) as comm:
        whole = Whole(DeltaCase("kda", [70]), comm.device)
        q, k, v, g, beta = (x.clone().requires_grad_() for x in whole.tensors())
        calls = {
            "gla": lambda **how: allscan.zeco_gla(q, k, v, g, comm=comm, **how),
            "kda": lambda **how: allscan.zeco_kda(q, k, v, g, beta, comm=comm, **how),
            "gdn": lambda **how: allscan.zeco_gated_delta_rule(q, k, v, g[..., 0], beta, comm=comm, **how),
            "fla": lambda **how: allscan.zeco_kda(q, k, v, g, beta, comm=comm, chunk="fla", **how),
        }
        import_fla(models=False)
        for name, call in calls.items():
            for how in ({}, dict(recompute=True), dict(recompute=False)):
                saved: list = []
                if name == "fla" and how.get("recompute") is False:
                    continue
                with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x.nbytes), id):
                    call(**how)
                found[name, how.get("recompute")] = sum(saved)
    return found


def test_default_of_the_communicator(run):
    [found] = run(1, default_case)
    for name in ("gla", "kda", "gdn"):
        assert found[name, None] == found[name, False] > found[name, True], found
    assert found["fla", None] == found["fla", True], found


def chunk_case(comm):
    x, g = torch.ones(1, 6, 2, 8), -torch.ones(1, 6, 2)
    beta, found = torch.zeros(1, 6, 2), []
    for call, gates in ((allscan.zeco_kda, -x), (allscan.zeco_gated_delta_rule, g)):
        wrong = dict(chunk="fla", recompute=False) if comm.rank else {}
        found += [raised(call, x, x, x, gates, beta, comm=comm, **wrong)]
        call(x, x, x, gates, beta, comm=comm)
    comm.barrier()
    return found


def test_with_flas_kernels(run):
    """These compute what they need again, by fla's own choice: an error on all ranks."""
    others, own = run(2, chunk_case)
    assert all(found[0] == "ValueError" and "with recompute=False chunk must be" in found[1] for found in own), own
    assert all(others), others
