"""KDA and Gated DeltaNet with our own chunk kernels, against the token-by-token recurrence in float64."""

from __future__ import annotations

import contextlib
import sys
from unittest import mock

import pytest
import torch

import allscan
from allscan.ops.delta import delta_passes, gdn_plans, kda_plans
from allscan.reference import delta_reference
from allscan.shmem_kernels.delta_state import DeltaSizes
from allscan.shmem_kernels.gdn import scalar_operands_kernel
from bench import harness, local_delta
from support.delta import LOG2_E, NAMES, DeltaCase, Whole, of_rank, own_case, same_prefix
from support.delta_chunks import WEAK, chunked
from support.gla import BF16, F32
from support.values import check_errors, place, raised, relative, relative_all

pytestmark = pytest.mark.cpu
LIMIT = {F32: 3e-5, BF16: 1e-2, torch.float16: 1.5e-3}


@pytest.mark.parametrize("rule", ["kda", "gated_delta_rule"])
@pytest.mark.parametrize("kind", ["zero", "mixed", "strong"])
def test_the_chunked_form(rule, kind):
    """The formulas of the kernels, and their gradients, are right in float64."""
    whole = Whole(DeltaCase(rule, [150], HV=2, K=24, gates=kind, dtype=torch.float64), torch.device("cpu"))
    tensors = [x[0].double() for x in (*whole.tensors(), whole.do, whole.initial, whole.dfinal)]
    wanted = [x[0] for x in whole.reference()]
    errors = relative_all(NAMES, chunked(*tensors, 24**-0.5), wanted)
    assert max(errors.values()) < 1e-11, errors


@pytest.mark.slow(but=("zigzag", "a rank without tokens-gated"))
@pytest.mark.quick("GVA", "packed")
@pytest.mark.parametrize("rule", ["kda", "gated_delta_rule"])
@pytest.mark.parametrize(
    "case",
    [
        DeltaCase("", [70, 130, 20], B=2, HV=2, K=32, gates="mixed"),
        DeltaCase("", [150, 70], B=2, H=2, HV=2, V=40, gates="zero", dtype=BF16),
        DeltaCase("", [70, 130, 10, 90], K=24, gates="strong", lengths=[0, 13, 39, 39, 215, 216, 300]),
        DeltaCase("", [140, 0, 36], B=2, gates="mild"),
        DeltaCase("", [68, 68], zigzag=True),
    ],
    ids=["GVA", "bfloat16", "packed", "a rank without tokens", "zigzag"],
)
def test_operators(run, rule, case):
    check_errors(run(len(case.tokens), own_case, case._replace(rule=rule)), LIMIT[case.dtype])


def strong_case(comm, rule, strength):
    """Return errors where one gate of twenty is ``strength`` and the others are near 0."""
    whole = Whole(DeltaCase(rule, [100, 60], HV=2, K=32), comm.device)
    whole.g[torch.rand(whole.g.shape, generator=torch.Generator().manual_seed(1)) < 0.05] = strength
    mine = place(comm, [100, 60])
    wanted = of_rank(whole.reference(), comm, [100, 60], None, 1)
    return relative_all(NAMES, whole.ours(comm, mine, chunk="allscan"), wanted)


@pytest.mark.slow(but="-inf")
@pytest.mark.parametrize("rule", ["kda", "gated_delta_rule"])
@pytest.mark.parametrize("strength", [-1e5, -float("inf")])
def test_strong_gates(run, rule, strength):
    """These gates, for which fla's chunk kernels lose digits (docs/delta.md) or return NaN, are as exact as others."""
    check_errors(run(2, strong_case, rule, strength), 2e-6)


def one_strong_gate_case(comm, at, strength):
    """Return errors where only token ``at`` has a strong gate, and all others weak ones."""
    whole = Whole(DeltaCase("kda", [94], gates="weak", K=32), comm.device)
    whole.g[:, at] = strength
    return relative_all(NAMES, whole.ours(comm, place(comm, [94]), chunk="allscan"), whole.reference())


@pytest.mark.parametrize("at", [0, 10])
@pytest.mark.parametrize("strength", [-90.0, -110.0, -float("inf")])
def test_one_strong_gate(run, at, strength):
    """Sums after it do not contain it, and keep their digits."""
    [errors] = run(1, one_strong_gate_case, at, strength)
    assert max(errors.values()) < 2e-6, errors


def large_case(comm, case):
    """Return errors of float16 inputs whose states exceed float16's range, and whose results do not."""
    whole = Whole(case, comm.device)
    whole.q, whole.initial = whole.q / 16, torch.full_like(whole.initial, 1e5)
    whole.do, whole.dfinal = whole.do / 100, torch.zeros_like(whole.dfinal)  # keeps gradients in range, too
    wanted = of_rank(whole.reference(), comm, case.tokens, None, 1)
    return relative_all(NAMES, whole.ours(comm, place(comm, case.tokens), chunk="allscan"), wanted)


@pytest.mark.parametrize("rule", ["kda", "gated_delta_rule"])
def test_large_states_of_float16_inputs(run, rule):
    case = DeltaCase(rule, [100, 60], K=32, gates="zero", dtype=torch.float16)
    check_errors(run(2, large_case, case), LIMIT[case.dtype])


def repeated_key_case(comm, rule, dtype, beta, gate):
    """Return the largest error of o in three draws of 256 equal keys."""
    found = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(1, n, 1, 64, generator=generator) for n in (256, 1, 256))
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k.repeat(1, 256, 1, 1)))
        q, k, v = (x.to(dtype) for x in (q, k, v))
        g = torch.full((1, 256, 1, 64) if rule == "kda" else (1, 256, 1), gate)
        inputs = q, k, v, g, torch.full((1, 256, 1), beta)
        o, _ = getattr(allscan, f"zeco_{rule}")(*inputs, comm=comm)
        found.append(relative(o, delta_reference(*inputs)[0]))
    return max(found)


@pytest.mark.slow(but=("dtype1", "dtype3"))
@pytest.mark.parametrize("rule", ["kda", "gated_delta_rule"])
@pytest.mark.parametrize(
    "dtype, beta, gate, least, most",
    [
        (BF16, 1.0, 0.0, 0, 0.04),
        (BF16, 1.9, 0.0, 0.1, 0.6),
        (BF16, 2.0, -0.05, 0, 0.12),
        (F32, 1.9, 0.0, 0, 2e-5),
        (F32, 2.0, 0.0, 0, 1e-3),  # 9e-5 or 4e-4, by the order in which the CPU adds
    ],
)
def test_a_repeated_key(run, rule, dtype, beta, gate, least, most):
    """As docs/delta.md states: T's rounding is the same for each token, and errors add up without decay."""
    for found in run(1, repeated_key_case, rule, dtype, beta, gate):
        assert least <= found < most, found


def alone_case(group, case):
    """Return errors of the default on CPU ranks without fla; states are [.., V, K]."""
    with mock.patch.dict(sys.modules, {"fla": None}), allscan.Communicator(group) as comm:
        whole = Whole(case, comm.device)
        wanted = of_rank(whole.reference(), comm, case.tokens, None, case.B)
        wanted[1], wanted[7] = wanted[1].mT, wanted[7].mT
        whole.initial, whole.dfinal = whole.initial.mT.contiguous(), whole.dfinal.mT.contiguous()
        return relative_all(NAMES, whole.ours(comm, place(comm, case.tokens), state_v_first=True), wanted)


@pytest.mark.slow(but="dtype1")
@pytest.mark.parametrize("rule", ["kda", "gated_delta_rule"])
@pytest.mark.parametrize("dtype, K, V", [(F32, 200, 72), (torch.float16, 24, 40)])
def test_without_fla(run, rule, dtype, K, V):
    """The default on CPU ranks."""
    check_errors(
        run(2, alone_case, DeltaCase(rule, [70, 40], HV=2, K=K, V=V, gates="mixed", dtype=dtype)), LIMIT[dtype]
    )


def later_tokens_case(group):
    """same_prefix of the first rank's first tokens if all later tokens are others."""
    case, cut = DeltaCase("kda", [64 + 30, 20], gates="mixed"), 41

    def others(whole):
        for x, y in zip(whole.tensors(), Whole(case._replace(seed=1), whole.q.device).tensors(), strict=True):
            x[:, cut:] = y[:, cut:]

    return same_prefix(group, case, cut, (lambda whole: None, others))


def test_a_prefix_does_not_depend_on_what_follows(run):
    same = run(2, later_tokens_case)[0]
    assert all(same.values()), same


def large_values_case(group, dtype):
    """same_prefix of a chunk's first tokens if later values are large."""
    cut = 41

    def times(factor):
        def change(whole):
            whole.v[:, cut:] *= factor

        return change

    return same_prefix(group, DeltaCase("kda", [64 + 30], gates="strong", dtype=dtype), cut, map(times, (1.0, 2.0**40)))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_prefix_does_not_depend_on_large_later_values(run, dtype):
    [same] = run(1, large_values_case, dtype)
    assert all(same.values()), same


def gates_at_the_limit(tokens):
    """Return gates of a channel whose sum is above the kernels' limit of strong gates, while the sum of their first 16
    bits is below it."""
    generator, sums = torch.Generator().manual_seed(0), (0.0, 0.0)
    while not sums[0] >= -WEAK > sums[1] + 1e-4:
        g = -4.0 - torch.rand(tokens, generator=generator)
        g[16:] /= 100
        g[3] -= WEAK / LOG2_E + g.sum()
        to_base_2 = g * LOG2_E
        high = (to_base_2.view(torch.int32) & -65536).view(torch.float32)
        sums = to_base_2.cumsum(0)[-1], (high.double() + (to_base_2 - high).to(BF16)).sum()
    return g


def weak_prefix_case(group, rule, dtype, later=-5.0, at_limit=False, K=16):
    """same_prefix of a chunk's first tokens if its ``later`` gates are strong, so that another kernel computes them."""
    cut = 20 if at_limit else 41

    def later_gates(strength):
        def change(whole):
            if at_limit:
                whole.g[0, :cut] = gates_at_the_limit(cut)[:, None, None]
            if strength is not None:
                whole.g[:, cut:64] = strength

        return change

    case = DeltaCase(rule, [64 + 30], gates="mild", dtype=dtype, K=K)
    return same_prefix(group, case, cut, map(later_gates, (0.0 if at_limit else None, later)))


@pytest.mark.slow(but="-5.0")
@pytest.mark.parametrize("rule, K", [("kda", 16), ("kda", 128), ("gated_delta_rule", 16)])
@pytest.mark.parametrize("dtype", [F32, torch.float16, BF16])
@pytest.mark.parametrize("later", [-5.0, -float("inf")])
def test_a_prefix_does_not_depend_on_the_strength_of_later_gates(run, rule, K, dtype, later):
    [same] = run(1, weak_prefix_case, rule, dtype, later, K=K)
    assert all(same.values()), same


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_prefix_at_the_limit_of_strong_gates(run, dtype):
    [same] = run(1, weak_prefix_case, "kda", dtype, -5.0, True)
    assert all(same.values()), same


@pytest.mark.slow(but=("7", "65"))
@pytest.mark.parametrize("K, V, H, HV", [(7, 9, 1, 2), (65, 1, 2, 2), (160, 300, 1, 1), (256, 64, 1, 3)])
def test_widths_of_gated_delta_rule(run, K, V, H, HV):
    tokens, lengths = [70, 33], [0, 0, 20, 20, 52, 102, 103, 103]
    case = DeltaCase("gated_delta_rule", tokens, H=H, HV=HV, K=K, V=V, gates="mixed", lengths=lengths)
    check_errors(run(2, own_case, case), 3e-6)


def small_blocks_case(group, case, BV_max):
    """own_case with blocks of 16 columns of K; of V, and of K where T is multiplied, ``BV_max``."""
    with contextlib.ExitStack() as patches:
        for module, name in (
            (delta_passes, "blocks_of_cpus"),
            (kda_plans, "chunk_blocks_of_cpus"),
            (gdn_plans, "scalar_blocks_of_cpus"),
        ):
            patches.enter_context(mock.patch.object(module, name, small(getattr(module, name), BV_max)))
        return own_case(group, case)


def small(blocks, BV_max):
    """The block sizes of ``blocks``, at most 16; BV at most ``BV_max``."""
    return lambda *x: {
        name: {key: min(BV_max if key == "BV" else 16, value) for key, value in sizes.items()}
        for name, sizes in blocks(*x).items()
    }


@pytest.mark.slow(but="64-dtype0-3e-06")
@pytest.mark.parametrize("rule", ["kda", "gated_delta_rule"])
@pytest.mark.parametrize("dtype, limit", [(F32, 3e-6), (BF16, 1e-2)])
@pytest.mark.parametrize("BV_max", [16, 64])
def test_several_blocks_of_columns(run, rule, dtype, limit, BV_max):
    case = DeltaCase(rule, [70, 33], H=1, HV=2, K=40, V=40, gates="mixed", dtype=dtype, lengths=[0, 20, 20, 52, 103])
    check_errors(run(2, small_blocks_case, case, BV_max), limit)


# Errors of fla 0.6.0's chunk_kda on one H100, bfloat16, inputs drawn as below with 16 heads
ERRORS_OF_FLA = {
    "weak": dict(o=3.86e-3, dq=3.44e-3, dk=3.51e-3, dv=3.43e-3, dg=3.29e-3, dbeta=3.07e-3),
    "mild": dict(o=3.35e-3, dq=2.91e-3, dk=2.92e-3, dv=2.95e-3, dg=2.44e-3, dbeta=2.48e-3),
    "strong": dict(o=3.32e-3, dq=2.87e-3, dk=2.87e-3, dv=2.91e-3, dg=2.36e-3, dbeta=2.44e-3),
}


def rounding_case(comm, gates, recompute):
    """Return errors of zeco_kda in bfloat16, by tensor."""
    leaves, do = local_delta.drawn(local_delta.Shape(512, 4, gates=gates), 512, comm.device)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    wanted = harness.step(exact, do.double(), lambda *x: delta_reference(*x)[0], True)
    found = harness.step(leaves, do, lambda *x: allscan.zeco_kda(*x, comm=comm, recompute=recompute)[0], True)
    return relative_all(ERRORS_OF_FLA[gates], found, wanted)


def first_gate_case(comm, gates):
    """Return the largest gradient of the first gates, 0 without an initial state, relative to dg's root mean square."""
    leaves, do = local_delta.drawn(local_delta.Shape(64, 1, gates=gates), 64, comm.device)
    o, _ = allscan.zeco_kda(*leaves, comm=comm, chunk="allscan")
    [dg] = torch.autograd.grad((o * do).sum(), leaves[3:4])
    return (dg[:, 0].abs().max() / dg.square().mean().sqrt()).item()


@pytest.mark.parametrize("gates", ["weak", "strong"])
def test_pairs_terms_cancel_in_earlier_gates(run, gates):
    """Operands of products with pairs are rounded once, and dG takes the rounded ones."""
    assert run(1, first_gate_case, gates)[0] < 1e-5


@pytest.mark.slow(but="mild-True")
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("gates", ERRORS_OF_FLA)
def test_errors_are_at_most_flas(run, gates, recompute):
    """The bound is 2 %: where both only round the result, the last digits are random."""
    [errors] = run(1, rounding_case, gates, recompute)
    assert all(errors[name] <= 1.02 * most for name, most in ERRORS_OF_FLA[gates].items()), errors


def nan_case(comm, rule):
    """Return o and dv of bfloat16 inputs where beta of token 10 and head 0 is a NaN with all bits set."""
    leaves, do = local_delta.drawn(local_delta.Shape(94, 2, rule=rule), 94, comm.device)
    leaves[4].data.view(torch.int32)[0, 10, 0] = -1
    operator = getattr(allscan, f"zeco_{rule}")
    o, _, _, dv, *_ = harness.step(leaves, do, lambda *x: operator(*x, comm=comm, chunk="allscan")[0], True)
    return o, dv


@pytest.mark.parametrize("rule", ["kda", "gated_delta_rule"])
def test_nan_stays_nan(run, rule):
    [(o, dv)] = run(1, nan_case, rule)
    assert o[:, 10:, 0].isnan().all() and dv[:, :11, 0].isnan().all() and not o[:, :, 1].isnan().any()


def triangle_case(group, dtype):
    """Error of Gated DeltaNet's T, before it is rounded, of a chunk of 60 tokens with similar keys."""
    with allscan.Communicator(group):
        generator, T, K = torch.Generator().manual_seed(0), 60, 24
        k = torch.nn.functional.normalize(1 + torch.randn(T, 1, K, generator=generator), dim=-1).to(dtype)
        g, beta = -torch.rand(T, 1, generator=generator) / 50, torch.rand(T, 1, generator=generator).to(dtype)
        scores, solved, factors = (torch.zeros(n, 1, 64) for n in (T, T, 3))
        d = DeltaSizes(H=1, HK=1, K=K, BT=64, BJ=16)
        tensors = k, k, g, beta, torch.tensor([[0, T]], dtype=torch.int32), scores, solved, factors
        precision = "bf16" if dtype == BF16 else "tf32x3"
        scalar_operands_kernel[(2,)](*tensors, scale=0.5, d=d, PRECISION=precision)
    k, sums, beta = k[:, 0].double(), g[:, 0].double().cumsum(0), beta.double()
    a = k @ k.mT * (sums[:, None] - sums[None]).exp()
    wanted = torch.linalg.inv(torch.eye(T) + (a * beta).tril(-1))
    return relative(scores[:, 0, :T], a.tril() / 2), relative(solved[:, 0, :T] + torch.eye(T), wanted)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_triangle(run, dtype):
    """TF32 has less than a tenth of the error of T's bfloat16."""
    [(scores, solved)] = run(1, triangle_case, dtype)
    assert scores < 1e-6 and solved < (1e-6 if dtype == F32 else 4e-4), (scores, solved)


def scaled_case(comm, dtype, gate, scale):
    """Return errors against float64 of gradients at another scale, divided by it, and differences from gradients at
    scale 1."""
    tokens, found = [64 + 30], []
    whole = Whole(DeltaCase("kda", tokens, K=32, V=32, dtype=dtype), comm.device)
    whole.g = gate - 0.1 * torch.rand(whole.g.shape, generator=torch.Generator().manual_seed(1))
    wanted = whole.reference()
    for factor in (1.0, scale):
        whole.do, whole.dfinal = whole.do * factor, whole.dfinal * factor
        o, final, *grads = whole.ours(comm, place(comm, tokens), chunk="allscan")
        found.append([o.double(), final.double(), *(x.double() / factor for x in grads)])
    return relative_all(NAMES, found[1], wanted), relative_all(NAMES, *found)


@pytest.mark.slow(but=("dtype0--1.0", "dtype1--1.0"))
@pytest.mark.parametrize(
    "gate, scale",
    [(gate, scale) for gate in (-1.0, -1.5, -4.6) for scale in (2.0**-40, 2.0**40)]
    + [(-1.5, 2.0**-80), (-4.6, 2.0**-80)],
)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_small_and_large_gradients(run, dtype, gate, scale):
    """A gradient times e^G_t alone or e^-G_s alone, which are far from 1, also stays within float32's range: gates of
    -1 are weak, those of -4.6 begin a stretch every 24 tokens."""
    [(errors, differences)] = run(1, scaled_case, dtype, gate, scale)
    assert max(errors.values()) < LIMIT[dtype] and max(differences.values()) < 1e-5, (errors, differences)


def prepared_case(group):
    """Return errors of calls that differ from earlier ones in one wrong argument; whether calls that differ in one
    valid argument get the results that a new communicator computes."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(1, 70, 2, 16, generator=generator) / 4 for _ in "qkvg")
    given = dict(q=q, k=k, v=v, g=g, beta=g[..., 0].sigmoid(), use_gate_in_kernel=True, A_log=torch.zeros(2), scale=1.0)
    wrong = dict(
        chunk="other",
        layout="other",
        scale=float("nan"),
        lower_bound=1.0,
        A_log=torch.zeros(3),
        beta=q,
        use_gate_in_kernel=False,  # positive gates
        allow_neg_eigval=True,
    )
    right = dict(
        scale=2.0,
        lower_bound=-1.0,
        A_log=torch.ones(2),
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        initial_state=torch.ones(1, 2, 16, 16),
        layout="zigzag",
    )

    def kda(comm, **options):
        return allscan.zeco_kda(**dict(chunk="allscan") | given | options, comm=comm)[0]

    with allscan.Communicator(group) as comm:
        same = [kda(comm) for _ in range(3)]
        problems = {name: raised(kda, comm, **{name: x}) for name, x in wrong.items()}
        found = {name: [kda(comm, **{name: x}) for _ in range(2)] for name, x in right.items()}
        again = kda(comm)
    fresh = {}
    for name, x in right.items():
        with allscan.Communicator(group) as comm:
            fresh[name] = kda(comm, **{name: x})
    own = {name: all(torch.equal(o, fresh[name]) for o in some) for name, some in found.items()}
    others = {name: not torch.equal(some[0], again) for name, some in found.items()}
    return problems, own, others, all(torch.equal(o, again) for o in same)


def test_calls_that_are_known(run):
    """A call reuses what an equal call has prepared, and nothing else."""
    answers = run(2, prepared_case)
    for problems, own, _, same in answers:
        assert all(found and found[0] == "ValueError" for found in problems.values()), problems
        assert "chunk must be one of" in problems["chunk"][1]
        assert all(own.values()) and same, own
    _, _, others, _ = answers[0]  # rank 0 has the first tokens; on the next rank an initial state has decayed
    assert all(others.values()), others
