"""torch.compile drops, merges, reorders and repeats no call, since other ranks count calls."""

from __future__ import annotations

import functools
import gc
import itertools
import warnings
from unittest import mock

import pytest
import torch
import torch._functorch.config
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import allscan
from allscan import zigzag
from allscan.base.autograd import CustomOperator, Passes
from allscan.comm import communicator
from support.fla import import_fla
from support.values import backend_of_gpus, error, raised

PRELOAD = ["torch._inductor.compile_fx"]
CASES = [  # operator, layout
    ("allscan", "contiguous"),
    ("halo", "contiguous"),
    ("halo", "zigzag"),
    ("to_zigzag", "contiguous"),
    pytest.param("zeco_gla", "contiguous", marks=pytest.mark.quick),  # with every torch of make matrix
    ("zeco_gla", "zigzag"),
    ("zeco_kda", "contiguous"),
    ("zeco_gated_delta_rule", "zigzag"),
]


def call(comm, name, layout, x):
    """Return a result of shape [1, 8, 1, 16] of the operator."""
    if name == "allscan":
        return allscan.allscan(x, 0.5, comm=comm)
    if name == "halo":
        before = allscan.halo(x, 2, comm=comm, layout=layout)
        return torch.cat([before, x[:, before.shape[1] :]], 1)
    if name == "to_zigzag":
        return zigzag.to_zigzag(x, comm=comm)
    if name == "zeco_gla":
        return allscan.zeco_gla(x, x, x, -x.abs(), comm=comm, layout=layout)[0]
    k, beta, g = torch.nn.functional.normalize(x, dim=-1), x[..., 0].sigmoid(), -x.abs()
    g = g if name == "zeco_kda" else g[..., 0]
    return getattr(allscan, name)(k, k, x, g, beta, comm=comm, layout=layout)[0]


def operator_case(group, name, layout, backend):
    """On rank 0 programs ignore results, make equal calls, and repeat calls in backward. Return (error of results and
    gradients of the compiled program, its forward and backward calls, expected calls)."""
    if name in ("zeco_kda", "zeco_gated_delta_rule"):
        import_fla(False)
    answers = []
    with allscan.Communicator(group, timeout=30) as comm:
        one_call = functools.partial(call, comm, name, layout)

        def unused(x):
            y = one_call(x.sin())
            z = one_call(x.cos())
            last = one_call(x)
            return z.sin() if comm.rank == 0 else z.sin() + 0 * y + 0 * last

        def equal(x):
            return one_call(x.sin()) * one_call(x.sin() if comm.rank == 0 else x.cos())

        def region(x):
            return one_call((one_call(x.sin()) + x).cos()).exp()

        def repeated(x):
            return checkpoint(region, checkpoint(region, x, use_reentrant=False), use_reentrant=False)

        generator = torch.Generator().manual_seed(comm.rank)
        x = torch.randn(1, 8, 1, 16, generator=generator).to(comm.device)
        for program, gradients, budget in (
            (unused, False, 1.0),
            (equal, False, 1.0),
            (equal, True, 1.0),
            (repeated, True, 1.0),
            (repeated, True, 0.5),
            (equal, True, 0.0),
        ):
            torch._dynamo.reset()
            found, counts = [], []
            for function in program, torch.compile(program, backend=backend, fullgraph=True):
                leaf, before = x.clone().requires_grad_(gradients), list(comm.order.call_counts)
                with torch._functorch.config.patch(activation_memory_budget=budget), warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "activation_memory_budget")
                    y = function(leaf)
                forward = comm.order.call_counts[0] - before[0]
                if gradients:
                    y.square().sum().backward()
                found.append([y.detach(), leaf.grad] if gradients else [y])
                counts.append([comm.order.call_counts[0] - before[0], comm.order.call_counts[1] - before[1]])
            if gradients and (name, layout) == ("halo", "zigzag"):
                forward *= 2  # its backward begins with the ascending scan: these calls count as forward
            answers.append((max(error(a, b) for a, b in zip(*found)), counts[1], [forward, counts[0][1]]))
    return answers


@pytest.mark.slow(but=("to_zigzag", "zeco_gla", "halo-zigzag"))
@pytest.mark.parametrize("name, layout", [x for x in CASES if x != ("zeco_gla", "zigzag")])  # an operator's once
def test_every_call_is_made_once(run, name, layout):
    """Covers calls whose results a rank does not use, equal calls on a rank, and calls in a recomputed region
    (torch.utils.checkpoint, memory budgets), forward and backward."""
    backend = backend_of_gpus()
    # fla multiplies float32 as TF32 for KDA on GPUs: an input with another last bit, as from inductor's sine, may
    # change results by some steps of 2**-11. Another call's result would differ by about 1
    limit = 1e-2 if name == "zeco_kda" and torch.cuda.is_available() else 1e-5
    for of_rank in run(2, operator_case, name, layout, backend):
        for worst, made, expected in of_rank:
            assert worst < limit and made == expected, of_rank


def recorded_case(group, name, layout):
    """Return (largest difference of make_fx's graph from the eager call, calls of two runs of the graph, errors of
    calls that cannot be recorded)."""
    if name in ("zeco_kda", "zeco_gated_delta_rule"):
        import_fla(False)
    with allscan.Communicator(group, timeout=30) as comm:
        x = torch.randn(1, 8, 1, 16, generator=torch.Generator().manual_seed(comm.rank)).to(comm.device)
        one_call = functools.partial(call, comm, name, layout)
        expected, graph = one_call(x), make_fx(one_call)(x)
        before = sum(comm.order.call_counts)
        worst = max(error(graph(x), expected) for _ in range(2))
        calls = sum(comm.order.call_counts) - before

        def ssd(y):
            return allscan.zeco_ssd(y, y[..., 0].exp(), -y[0, 0, :, 0].exp(), y, y, 4, comm=comm)

        worst = max(worst, error(make_fx(ssd)(x)(x), ssd(x)))
        scan, pair = allscan.AllScan(comm, x.shape), (x, x)
        others = (
            lambda y: allscan.allscan(pair, comm=comm, layout="zigzag")[0] + y,
            lambda y: allscan.allscan(y, comm=comm, out=torch.empty_like(x)),
            lambda y: allscan.allscan_segments(y, comm=comm)[0],
            lambda y: allscan.halo(y, 1, comm=comm, layout="zigzag", cu_seqlens=[0, 16], per_document=True),
            lambda y: scan.scan(y),
        )
        return worst, calls, [raised(make_fx(other), x) for other in others]


@pytest.mark.slow(but=("allscan", "zeco_gla-contiguous", "zeco_gated"))
@pytest.mark.parametrize("name, layout", CASES)
def test_calls_that_make_fx_records(run, name, layout):
    """A graph that lacked a call would return memory that nothing has written."""
    for worst, calls, errors in run(2, recorded_case, name, layout):
        assert worst == 0.0 and calls == 2
        assert all(error is not None and "make_fx cannot record" in error[1] for error in errors), errors


def exported():
    """Return (an exported program, its input, its difference from the eager call)."""
    module = torch.nn.Module()
    with allscan.Communicator(timeout=30) as comm:
        x = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(comm.rank)).to(comm.device)
        module.forward = lambda y: allscan.allscan(y, 0.5, comm=comm) * 1
        program = torch.export.export(module, (x,))
        return program, x, error(program.module()(x), module.forward(x))


def exported_case():
    """Return (difference of an exported program from the eager call, its error with another communicator)."""
    program, x, difference = exported()
    alone = [torch.distributed.new_group([rank]) for rank in range(2)][torch.distributed.get_rank()]
    gc.collect()
    with mock.patch.object(communicator, "_handles", itertools.count(1)), allscan.Communicator(alone):
        return difference, raised(program.module(), x)


@pytest.mark.cpu
def test_an_exported_program_with_another_communicator(fresh):
    """The number of a communicator in a program is of its ranks, too."""
    for difference, problem in fresh(2).run(exported_case):
        assert difference == 0.0 and problem is not None and "was deleted" in problem[1], problem


def symbolic_case(group):
    """Return the largest difference of a compiled function with a changing first_token from the eager one, and of a
    compiled scan whose result is written to in place."""
    with allscan.Communicator(group, timeout=30) as comm:
        whole = torch.randn(4, 1, 40, 1, 16, generator=torch.Generator().manual_seed(0)).to(comm.device)

        def layer(q, k, v, g, first):
            return allscan.zeco_gla(q, k, v, -g.abs(), comm=comm, cu_seqlens=[0, 7, 40], first_token=first)[0] * 1

        def scan(state):
            found = allscan.allscan(state * 2, comm=comm)
            found.add_(1.0)
            return found.sin()

        compiled, worst = torch.compile(layer, backend="aot_eager", fullgraph=True), 0.0
        for cut in (20, 15, 22):
            first, end = (0, cut) if comm.rank == 0 else (cut, 40)
            part = whole[:, :, first:end].clone().unbind()
            worst = max(worst, error(compiled(*part, first), layer(*part, first)))
        results = []
        for function in (scan, torch.compile(scan, backend="aot_eager", fullgraph=True)):
            state = whole[0].clone().requires_grad_()
            y = function(state)
            y.sum().backward()
            results.append((y.detach(), state.grad))
        return worst, max(error(*pair) for pair in zip(*results, strict=True))


def test_first_tokens_that_change_and_writes_to_a_result(run):
    assert run(2, symbolic_case) == [(0.0, 0.0)] * 2


def alone_case(group):
    """One rank runs eagerly, as at torch's limit of recompilations, the other's function is compiled. Return the
    largest error of results and gradients without checkpointing, and the errors raised with it."""

    def layer(x):
        return allscan.halo(x.sin(), 2, comm=comm).sin() + x[:, :2]

    def repeated(x):
        return checkpoint(layer, x, use_reentrant=False)

    worst, errors = 0.0, []
    with allscan.Communicator(group, timeout=5) as comm:
        for eager in range(2):
            found = []
            for program in layer, layer, repeated:
                torch._dynamo.reset()
                compiled = program if comm.rank == eager or not found else torch.compile(program, backend="aot_eager")
                x = torch.linspace(0, 1, 32, device=comm.device).view(1, 8, 4).requires_grad_()
                y = compiled(x)
                problem = raised(y.square().sum().backward)
                found.append((y.detach(), x.grad))
            worst = max(worst, *(error(a, b) for a, b in zip(*found[:2])))
            errors.append(problem or raised(comm.barrier))
            comm.resync()
    return worst, errors


@pytest.mark.cpu  # on CPUs the call itself ends with the time-out
def test_a_rank_that_does_not_compile(run):
    """It makes the same calls, except with checkpointing: eager backward passes repeat calls. That raises an error."""
    for worst, errors in run(2, alone_case):
        assert worst < 1e-6
        assert all(name in ("AllScanTimeout", "AllScanOutOfStep") for name, _ in errors), errors


# An operator that logs its calls, in one process


LOG: list[int] = []


def final_case(comm, layout):
    """Return the largest difference between gradients of a compiled function and of the eager one. All ranks get the
    final state; rank 1 does not use it."""
    given = [torch.randn(1, 8, 2, 16) for _ in range(3)]
    given.append(-given[0].abs())

    def function(q, k, v, g):
        o, state = allscan.zeco_gla(q, k, v, g, comm=comm, output_final_state="all", layout=layout)
        return o.sin().sum() + (0 if comm.rank == 1 else state.sin().sum())

    answers = []
    for call in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        leaves = [x.to(comm.device).requires_grad_() for x in given]
        answers.append(torch.autograd.grad(call(*leaves), leaves))
    return max(error(*pair) for pair in zip(*answers, strict=True))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_final_states_on_every_rank(run, layout, size=2):
    assert max(run(size, final_case, layout)) < 1e-6


def toy_forward(x: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Double x; append the call's number to LOG (backward appends it with a minus sign)."""
    LOG.append(number)
    return 2 * x, x.new_zeros(1, dtype=torch.int64)


def toy_backward(dy: torch.Tensor, x: torch.Tensor, fwd_epoch: torch.Tensor, number: int) -> tuple[torch.Tensor]:
    LOG.append(-number)
    return (2 * dy,)


def toy_fake(x, number):
    return torch.empty_like(x), x.new_empty(1, dtype=torch.int64)


def toy_fake_backward(dy, x, fwd_epoch, number):
    return (torch.empty_like(dy),)


def toy_save(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.number = inputs[1]


def toy_gradient(backward, ctx, dy, _):
    return *backward(dy, *ctx.saved_tensors, ctx.number), None


TOY_PASSES = Passes(toy_forward, toy_fake, toy_backward, toy_fake_backward)
TOY = CustomOperator("toys::toy", TOY_PASSES, toy_save, toy_gradient)


def toy(x, number):
    return TOY.forward(x, number)[0]


def plain(x):
    toy(x, 1)
    y, z = toy(x.exp(), 2), toy(x.exp(), 2)
    w = toy(x.sin(), 3) + toy(x.cos(), 4)
    toy(x.detach(), 5)
    return (w * y * z).sum()


def region(x):
    c = toy(x.detach().sin(), 1)
    y = (toy(x.sin(), 2).cos() + toy(x.exp() * c, 3).sin()).tanh()
    toy(y, 4)
    return y


def checkpointed(x):
    for _ in range(2):
        x = checkpoint(region, x, use_reentrant=False)
    return toy(x, 5).sum()


def pair(x):
    return (toy(x.sin(), 1).cos() + toy(x.exp(), 2).sin()).tanh()


def pairs(x):  # inductor would order backward calls by their memory use
    for _ in range(2):
        x = checkpoint(pair, x, use_reentrant=False)
    return toy(x, 7).sum()


def within(x):
    return toy(checkpoint(region, toy(x, 6), use_reentrant=False), 7)


def nested(x):
    return checkpoint(within, x, use_reentrant=False).sum()


def always(_, operator, *args, **options):
    return CheckpointPolicy.MUST_RECOMPUTE


CHOOSING = functools.partial(create_selective_checkpoint_contexts, always)


def selective(x):
    return checkpoint(region, x, use_reentrant=False, context_fn=CHOOSING).sum()


ONCE = [1, 2, 3, 4]
TOYS = [
    (plain, [1, 2, 2, 3, 4, 5, -4, -3, -2, -2]),
    (pairs, [1, 2, 1, 2, 7, -7, -2, -1, -2, -1]),
    (checkpointed, [*ONCE, *ONCE, 5, -5, -3, -2, -3, -2]),
    (nested, [6, *ONCE, 7, -7, -3, -2, -6]),
    (selective, [*ONCE, -3, -2]),
]


def value_and_gradient(function, gradients):
    LOG.clear()
    x = torch.linspace(-1, 1, 2048).view(64, 32).requires_grad_(gradients)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "activation_memory_budget")
        y = function(x)
    if gradients:
        y.backward()
    return [y.detach(), *([x.grad] if gradients else [])]


@pytest.mark.slow(but=("aot_eager-1.0-False", "inductor-1.0-False"))
@pytest.mark.cpu
@pytest.mark.parametrize(
    "backend, budget, gradients",
    [
        ("aot_eager", 1.0, False),
        *(("aot_eager", budget, True) for budget in (1.0, 0.5, 0.0)),  # of what forward saves
        ("inductor", 1.0, True),
        ("inductor", 1.0, False),
    ],
)
def test_order(backend, budget, gradients):
    """A compiler keeps the order of calls that share no data."""
    for program, expected in TOYS if backend == "aot_eager" else [TOYS[gradients]]:
        torch._dynamo.reset()
        wanted = value_and_gradient(program, gradients)
        with torch._functorch.config.patch(activation_memory_budget=budget):
            found = value_and_gradient(torch.compile(program, backend=backend, fullgraph=True), gradients)
        assert LOG == [n for n in expected if gradients or n > 0]
        assert max(error(a, b) for a, b in zip(found, wanted)) < 1e-5


def in_a_branch(x):
    return torch.cond(x.sum() > 0, lambda x: toy(x, 1), lambda x: x.sin(), (x,))


@torch.compiler.nested_compile_region
def nested_region(x):
    return toy(x, 1)


def in_nested_regions(x):
    return nested_region(nested_region(x).exp())


@pytest.mark.cpu
@pytest.mark.parametrize("function", [in_a_branch, in_nested_regions])
def test_what_torch_does_not_order_is_rejected(function):
    torch._dynamo.reset()
    LOG.clear()
    _, message = raised(torch.compile(function, backend="aot_eager", fullgraph=True), torch.ones(3))
    assert "order of calls" in message and not LOG


def cached_case(older):
    """Return the calls of a compiled function without gradients; ``older``: of an operator without an effect."""
    function = toy
    if older:
        library_operator = torch.library.custom_op(
            "toys::toy", lambda x, n: LOG.append(n) or 2 * x, mutates_args=(), schema="(Tensor x, int n) -> Tensor"
        )
        library_operator.register_fake(lambda x, n: torch.empty_like(x))
        function = library_operator

    def program(x):
        function(x, 1)
        return function(x, 2)  # needs no kernel of inductor's own: a C++ compiler is slow

    torch.compile(program, fullgraph=True)(torch.ones(4))
    return LOG


@pytest.mark.cpu
def test_graphs_of_an_older_version_in_the_cache(fresh, tmp_path, monkeypatch):
    """torch's cache on disk has operators of the same name with other effects, arguments or results: they are not
    used."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for older, expected in ((True, [2]), (False, [1, 2]), (False, [1, 2])):
        assert fresh(1).run(cached_case, older) == [expected]
