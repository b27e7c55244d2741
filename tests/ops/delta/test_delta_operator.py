"""KDA and Gated DeltaNet over the ranks against the token-by-token recurrence in float64 over the global sequence."""

from __future__ import annotations

import collections
import functools
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint

import allscan
from allscan.ops.delta.delta_passes import ChunkOperands, DeltaShape, StatePass
from allscan.reference import delta_reference
from allscan.tokens.packing import Layout, TokenRange
from support.delta import NAMES, DeltaCase, Whole, of_rank, operator_case, pass_case
from support.fla import delta_recurrence, import_fla
from support.gla import BF16, F32
from support.values import check_errors, place, raised, relative, relative_all

# on GPUs fla's kernels round float32 to TF32: tests/gpu/test_delta_gpu.py
on_cpus = pytest.mark.cpu
LIMIT = {F32: 1e-5, BF16: 8e-3}
KINDS = "zero", "mixed"
PACKED = {
    "over the cut": ([100, 150], [0, 30, 240, 250]),
    "one over three, between others": ([70, 130, 10, 90], [0, 13, 39, 215, 216, 300]),
    "at the cut": ([64, 64], [0, 64, 128]),
    "empty ones": ([70, 70], [0, 0, 70, 70, 70, 139, 140, 140]),
    "whole": ([140, 70, 200], [0, 410]),
}


def check(answers, dtype=F32):
    for errors in answers:
        assert max(errors.values()) < LIMIT[dtype], errors


def tokens_of(size):
    return [(300, 150, 10, 200)[rank] for rank in range(size)]


OF_PASSES = {
    **{
        f"{size} {kind}": DeltaCase("", tokens_of(size), HV=2, V=24, gates=kind)
        for size in (1, 2, 3, 4)
        for kind in KINDS
    },
    "2 mild": DeltaCase("", tokens_of(2), HV=2, V=24, gates="mild"),
    "3 strong": DeltaCase("", tokens_of(3), HV=2, V=24, gates="strong"),
    "bfloat16": DeltaCase("", [300, 270], H=2, HV=2, K=32, gates="weak", dtype=BF16),
    "bfloat16, beta of 0": DeltaCase("", [300, 270], H=2, HV=2, K=32, gates="zero", dtype=BF16, beta=0.0),
    "bfloat16, beta of 1": DeltaCase("", [300, 270], H=2, HV=2, K=32, gates="zero", dtype=BF16, beta=1.0),
    **{f"{K}, {V}": DeltaCase("", [150, 140], K=K, V=V) for K, V in ((24, 40), (100, 16), (200, 40))},
    **{f"packed, {name}": DeltaCase("", tokens, lengths=lengths) for name, (tokens, lengths) in PACKED.items()},
}


@pytest.mark.slow(but=("1 mixed", "2 mild", "4 mixed", "bfloat16-", "24", "200", "packed"))
@pytest.mark.parametrize("rule", ["kda", "gated_delta_rule"])
@pytest.mark.parametrize("name, size", [(name, len(case.tokens)) for name, case in OF_PASSES.items()])
def test_passes(run, rule, name, size):
    case = OF_PASSES[name]._replace(rule=rule)
    check(run(size, pass_case, case), case.dtype)


OF_OPERATORS = [
    *(DeltaCase("gated_delta_rule", [70, 130, 20, 65][:n], B=2, HV=2, K=32, gates="mild") for n in (1, 2, 3, 4)),
    *(DeltaCase("gated_delta_rule", *PACKED[x][:1], lengths=PACKED[x][1]) for x in [*PACKED][:2]),
    *(DeltaCase("kda", [40, 30, 10][:n], gates="mild") for n in (2, 3)),
    DeltaCase("kda", [25, 30], lengths=[0, 5, 40, 40, 55]),
]
IDS = [f"{case.rule}-{len(case.tokens)}{' packed' * bool(case.lengths)}" for case in OF_OPERATORS]


@pytest.mark.slow(but=("gated_delta_rule-1", "gated_delta_rule-2", "kda-2"))
@pytest.mark.quick("gated_delta_rule-2", "kda-2")
@on_cpus
@pytest.mark.parametrize("case, size", [(case, len(case.tokens)) for case in OF_OPERATORS], ids=IDS)
def test_operators(run, case, size):
    check(run(size, operator_case, case))


def modes_case(comm):
    """Check compiled calls, activation checkpointing, and calls without optional arguments."""
    import_fla()
    tokens = [30, 45]
    whole = Whole(DeltaCase("gated_delta_rule", [75]), comm.device)
    mine = place(comm, tokens)
    expected = of_rank(whole.reference(), comm, tokens, None, 1)
    call = allscan.zeco_gated_delta_rule

    def checkpointed(*x, **options):
        return torch.utils.checkpoint.checkpoint(call, *x, **options, use_reentrant=False)

    calls = call, torch.compile(call, fullgraph=True, backend="aot_eager"), checkpointed
    errors = [relative_all(NAMES, whole.ours(comm, mine, call=c), expected) for c in calls]
    plain = call(*(x[:, mine] for x in whole.tensors()), comm=comm, scale=0.5, use_qk_l2norm_in_kernel=True)
    q, k, *others = whole.tensors()
    other, _ = delta_reference(3 * q, k, *others, scale=0.5 / 3)
    again = call(3 * q[:, mine], k[:, mine], *(x[:, mine] for x in others), comm=comm, scale=0.5 / 3)
    assert plain[1] is None and again[1] is None
    return errors, relative(plain[0], other[:, mine]), relative(again[0], other[:, mine])


@on_cpus
def test_compiled_checkpointed_and_options(run):
    for errors, plain, again in run(2, modes_case):
        for of_a_call in errors:
            assert max(of_a_call.values()) < LIMIT[F32], errors
        assert max(plain, again) < LIMIT[F32]


def raw_case(comm, rule):
    """Pass raw gates and beta, norms and states with V first, as fla's layers do. Return errors of o, the final state
    and each gradient; gradients of parameters are summed."""
    import_fla()
    tokens, HV, K = [9, 15], 2, 16
    kda = rule != "gated_delta_rule"
    whole = Whole(DeltaCase("kda" if kda else rule, [24], HV=HV, K=K, V=8), comm.device)
    g, beta, q = 2 * whole.g.sigmoid() - 3, 4 * whole.beta - 2, 3 * whole.q
    A_log, dt_bias = torch.linspace(-1, 1, HV), torch.linspace(-2, 1, HV * K if kda else HV)
    bound = -4.0 if rule == "bounded" else None
    whole.q, whole.g, whole.beta = q, g, beta
    parameters = [x.to(comm.device).requires_grad_() for x in (A_log, dt_bias)]
    leaves = [x.clone().requires_grad_() for x in (*whole.tensors(), whole.initial)]
    given = dict(lower_bound=bound, allow_neg_eigval=True, initial_state=leaves[5].mT)
    o, final = delta_recurrence(*leaves[:5], *parameters, **given)
    expected = [o, final, *torch.autograd.grad(whole.loss(o, final.mT, whole.do), (*leaves, *parameters))]

    mine = place(comm, tokens)
    own = [x[:, mine].clone().requires_grad_() for x in whole.tensors()]
    own.append(whole.initial.clone().requires_grad_())
    options = dict(
        initial_state=own[5].mT,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
        A_log=parameters[0],
        dt_bias=parameters[1],
        state_v_first=True,
        comm=comm,
    )
    call = functools.partial(allscan.zeco_kda, lower_bound=bound) if kda else allscan.zeco_gated_delta_rule
    errors = []
    for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        o, final = run(*own[:5], **options)
        found = torch.autograd.grad(whole.loss(o, final.mT, whole.do[:, mine]), (*own, *parameters))
        for x in (final, *found[5:]):
            dist.all_reduce(x, group=comm.group)
        of_tokens = [x[:, mine] for x in (expected[0], *expected[2:7])]
        pairs = zip((o, *found[:5], final, *found[5:]), (*of_tokens, expected[1], *expected[7:]), strict=True)
        errors += [relative(a.detach(), b.detach()) for a, b in pairs]
    return errors


@pytest.mark.slow(but="kda")
@on_cpus
@pytest.mark.parametrize("rule", ["kda", "bounded", "gated_delta_rule"])
def test_raw_arguments(run, rule):
    check_errors(run(2, raw_case, rule), LIMIT[F32])


WRONG = {
    "no A_log": (ValueError, "requires A_log", lambda x: x | dict(use_gate_in_kernel=True)),
    "A_log": (ValueError, "A_log must be 2", lambda x: x | dict(use_gate_in_kernel=True, A_log=torch.ones(3))),
    "A_log without its gate": (ValueError, "use_gate_in_kernel=True", lambda x: x | dict(A_log=torch.ones(2))),
    "dt_bias without its gate": (ValueError, "use_gate_in_kernel=True", lambda x: x | dict(dt_bias=torch.ones(2))),
    "twice": (ValueError, "allow_neg_eigval", lambda x: x | dict(allow_neg_eigval=True)),
    "dtypes": (TypeError, "must share one dtype", lambda x: x | dict(v=x["v"].double())),
    "bfloat16 in the interpreter": (
        TypeError,
        "on CPUs",
        lambda x: {n: t.bfloat16() for n, t in x.items()} | dict(chunk="fla"),
    ),
    "heads": (ValueError, "multiple", lambda x: x | dict(v=x["v"][:, :, :1].repeat(1, 1, 3, 1))),
    "gates of another rule": (ValueError, "g must be", lambda x: x | dict(g=x["g"][..., None])),
    "positive gate": (ValueError, "at most 0", lambda x: x | dict(g=-x["g"])),
    "beta": (ValueError, "beta must be", lambda x: x | dict(beta=x["beta"][0])),
    "no tensor": (TypeError, "must be a tensor", lambda x: x | dict(beta=0.5)),
    "initial state": (ValueError, "initial_state", lambda x: x | dict(initial_state=torch.zeros(1, 2, 4, 4))),
    "scale": (ValueError, "scale", lambda x: x | dict(scale=0)),
}


def wrong_case(comm, name):
    """Rank 1 is wrong at a first call: every rank raises, and all go on; then all are wrong, at a later call."""
    import_fla()
    right = dict(q=torch.ones(1, 6, 2, 8), k=torch.ones(1, 6, 2, 8), v=torch.ones(1, 6, 2, 8))
    right |= dict(g=-torch.ones(1, 6, 2), beta=torch.zeros(1, 6, 2))
    wrong = WRONG[name][2](right)
    call = allscan.zeco_gated_delta_rule
    first = raised(call, **(wrong if comm.rank == 1 else right), comm=comm)
    o, _ = call(**right, comm=comm)
    comm.barrier()
    return first, raised(call, **wrong, comm=comm), bool(o.any())


@pytest.mark.cpu
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(run, name):
    kind, words, _ = WRONG[name]
    for rank, (first, later, any_output) in enumerate(run(2, wrong_case, name)):
        assert first is not None and (rank == 0 or first[0] == kind.__name__ and words in first[1]), first
        assert name == "positive gate" or later[0] == kind.__name__ and words in later[1], later
        assert not any_output  # beta is 0


def without_fla_case(comm):
    with mock.patch.dict(sys.modules, {"fla.ops.kda": None}):
        x, y = torch.ones(1, 6, 2, 8), torch.zeros(1, 6, 2)
        return raised(allscan.zeco_gated_delta_rule, x, x, x, y, y, comm=comm, chunk="fla")


@pytest.mark.cpu
def test_without_fla(run):
    assert all(answer[0] in ("ImportError", "ModuleNotFoundError") for answer in run(2, without_fla_case))


def bench_case():
    from bench import delta

    if dist.get_rank() < 2:
        import_fla()
    ours = delta.point(2, "kda", 128, 1, 0.1, True, [*delta.INVARIANT], "allscan")
    return delta.point(2, "gated_delta_rule", 70, 1, 0.1, True), ours


@pytest.mark.cpu
def test_what_the_benchmark_checks(pool):
    from bench import delta

    for errors, ours in pool.run(bench_case)[:2]:
        names = {n for n in delta.SEEN if n.startswith("zeco") and "one rank" not in n}
        assert errors.keys() == names - delta.INVARIANT.keys() and ours.keys() == delta.INVARIANT.keys()
        assert max(*errors.values(), *ours.values()) < 1e-4


def part_of_tokens(comm):
    """Return the local state of tokens 0 to 64 for several numbers of tokens, as fla's context parallelism requests
    it."""
    layout = Layout([TokenRange(0, 64)], 1, 128, comm.device)
    passes = StatePass(comm, layout, DeltaShape(1, 1, 1, 16, 16, F32, True))
    generator = torch.Generator().manual_seed(0)
    k, w, u = (torch.randn(1, 192, 1, 16, generator=generator).to(comm.device) / 10 for _ in range(3))
    g = -torch.rand(1, 192, 1, generator=generator).to(comm.device)
    return [passes.total(ChunkOperands(*(x[:, :T].contiguous() for x in (k, w, u, g))))[0] for T in (192, 128, 64, 192)]


@on_cpus
def test_plans_are_of_a_number_of_tokens(run):
    first, *others = run(1, part_of_tokens)[0]
    assert first.any() and all(torch.equal(first, other) for other in others)


@pytest.mark.cpu
@pytest.mark.quick
def test_a_row_proves_its_method():
    from bench.delta import SEEN
    from bench.proof import ran

    def proof(name, found):
        return ran(name, collections.Counter(found), *SEEN[name])

    ours = {"transition_kernel": 1, "delta_states_kernel": 1, "elementwise": 3}
    assert proof("zeco", ours) == "1 scan_kernel|transition_kernel; 1 delta_states_kernel; of 5 kernels"
    for other in ({"chunk_cp_fwd_kernel_h": 1, "ncclDevKernel_AllGather": 1}, ours | {"ncclKernel": 1}, {}):
        with pytest.raises(AssertionError, match="was not what ran"):
            proof("zeco", other)
