"""Every argument of the delta rules, with our own chunk kernels, forward and backward, against float64."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import allscan
from allscan.reference import delta_reference
from support.delta import NAMES, DeltaCase, Whole, of_rank
from support.gla import BF16, F16, F32
from support.values import place, raised, relative_all

pytestmark = pytest.mark.cpu
LIMIT = {F32: 3e-5, F16: 2e-3, BF16: 1.2e-2}
INF = float("inf")
RULES = {"kda": allscan.zeco_kda, "gated_delta_rule": allscan.zeco_gated_delta_rule}
PACKED = [0, 0, 20, 20, 20, 70, 104, 130, 130]  # with empty sequences, also at the first and last token of a rank


class Point(NamedTuple):
    """case: changes of DeltaCase's defaults. gate, beta: dtypes of g and beta. A_log, dt_bias: whether they exist.
    closed: the share of gates of -inf. first_state: whether there is one."""

    case: dict[str, Any] = {}
    options: dict[str, Any] = {}
    gate: torch.dtype = F32
    beta: torch.dtype = F32
    A_log: bool = False
    dt_bias: bool = False
    closed: float = 0.0
    first_state: bool = True
    size: float = 1.0  # factor of q and k where they are normalized
    draws: int = 1  # whose root mean square error is judged: that of one draw whose dg nearly cancels may be large


RAW = dict(use_gate_in_kernel=True)
NORMS, SIGMOID = dict(use_qk_l2norm_in_kernel=True), dict(use_beta_sigmoid_in_kernel=True)
BOUNDED = RAW | dict(lower_bound=-5.0)
BOTH = {
    "gates in bfloat16": Point(dict(dtype=BF16), gate=BF16, draws=4),
    "gates in float16": Point(dict(dtype=F16, gates="mild"), gate=F16),
    "beta in bfloat16": Point(dict(dtype=BF16), beta=BF16, draws=4),
    "beta in float64": Point(beta=torch.float64),
    "norms": Point(options=NORMS, size=3.0),
    "norms, raw gates and beta": Point(options=RAW | NORMS | SIGMOID, A_log=True, dt_bias=True, size=3.0),
    "beta's sigmoid": Point(dict(beta=0.5), SIGMOID, beta=F16),
    "negative eigenvalues": Point(dict(beta=1.5), SIGMOID | dict(allow_neg_eigval=True)),
    "raw gates": Point(options=RAW, A_log=True, dt_bias=True),
    "raw gates in bfloat16": Point(dict(dtype=BF16), RAW, gate=BF16, A_log=True),
    "raw gates of packed sequences": Point(dict(lengths=PACKED), RAW, A_log=True, dt_bias=True),
    "raw gates in zigzag": Point(dict(zigzag=True), RAW, A_log=True, dt_bias=True),
    "three heads of values to one": Point(dict(H=2, HV=6, gates="mild")),
    "states with V first": Point(dict(HV=2, V=24), dict(state_v_first=True)),
    "V first, packed": Point(dict(lengths=PACKED, V=24), dict(state_v_first=True)),
    "no first state": Point(first_state=False),
    "packed without first states": Point(dict(lengths=PACKED), first_state=False),
    "empty sequences": Point(dict(lengths=PACKED, gates="mixed")),
    "empty sequences in zigzag": Point(dict(lengths=PACKED, gates="mixed", zigzag=True)),
    "documents in zigzag": Point(
        dict(tokens=[66, 66], lengths=[0, 0, 16, 16, 80, 132, 132], zigzag=True, per_document=True)
    ),
    "zigzag, two in a batch": Point(dict(B=2, zigzag=True, gates="strong")),
    "zigzag in float16": Point(dict(zigzag=True, dtype=F16)),
    "a scale": Point(options=dict(scale=0.25)),
    "K of 256": Point(dict(tokens=[20, 30], K=256)),
    "K of 1, V of 1": Point(dict(K=1, V=1, gates="mild")),
    "V of 300": Point(dict(tokens=[20, 30], V=300)),
    "closed gates": Point(closed=0.05),
    "all gates closed": Point(closed=1.0),
    "closed gates in float16": Point(dict(dtype=F16), gate=F16, closed=0.1),
    "closed gates in bfloat16, packed": Point(dict(dtype=BF16, lengths=PACKED), closed=0.1),
    "closed gates in zigzag": Point(dict(zigzag=True, HV=2), closed=0.1),
}
OF_KDA = {
    "a lower bound": Point(options=BOUNDED, A_log=True, dt_bias=True),
    "a lower bound without A_log": Point(options=BOUNDED, dt_bias=True),
    "a lower bound alone": Point(dict(dtype=BF16), RAW | dict(lower_bound=-0.5)),
    "safe_gate": Point(dict(dtype=F16), BOUNDED | dict(safe_gate=True), gate=F16, A_log=True),
    "safe_gate of gates as they are": Point(options=dict(safe_gate=True)),
    "safe_gate and a lower bound of gates as they are": Point(options=dict(safe_gate=True, lower_bound=-5.0)),
}
POINTS = [(rule, name, point) for rule in RULES for name, point in BOTH.items()]
POINTS += [("kda", name, point) for name, point in OF_KDA.items()]


def whole_of(rule, point, device):
    """Return (the global sequence; A_log and dt_bias, or None)."""
    case = DeltaCase(**dict(rule=rule, tokens=[70, 60]) | point.case)
    whole, generator = Whole(case, device), torch.Generator().manual_seed(7)
    if point.options.get("use_gate_in_kernel"):
        whole.g = torch.randn(whole.g.shape, generator=generator) - 2
    whole.g[torch.rand(whole.g.shape, generator=generator) < point.closed] = -INF
    whole.q, whole.k = whole.q * point.size, whole.k * point.size
    whole.g, whole.beta = whole.g.to(point.gate), whole.beta.to(point.beta)
    A_log = torch.linspace(-1, 1, case.HV) if point.A_log else None
    columns = case.HV * (case.K if rule == "kda" else 1)
    return case, whole, [A_log, torch.linspace(-2, 1, columns) if point.dt_bias else None]


def applied(leaves, parameters, options):
    """Return the rule's inputs, computed from raw arguments in float64."""
    (q, k, v, g, beta), (A_log, dt_bias) = leaves, parameters
    if options.get("use_qk_l2norm_in_kernel"):
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    if options.get("use_gate_in_kernel"):
        rate = g.new_ones(()) if A_log is None else A_log.exp().view(-1, *[1] * (g.ndim - 3))
        g = g if dt_bias is None else g + dt_bias.view(g.shape[2:])
        bound = options.get("lower_bound")
        g = -rate * F.softplus(g) if bound is None else bound * (rate * g).sigmoid()
    if options.get("use_beta_sigmoid_in_kernel"):
        beta = (1 + options.get("allow_neg_eigval", False)) * beta.sigmoid()
    return q, k, v, g, beta


def point_case(group, rule, point):
    """Return errors of results and gradients; those of A_log and dt_bias are summed over the ranks."""
    with mock.patch.dict(sys.modules, {"fla": None}), allscan.Communicator(group) as comm:
        case, whole, parameters = whole_of(rule, point, comm.device)
        options, v_first = dict(point.options), point.options.get("state_v_first", False)
        if not point.first_state:
            whole.initial.zero_()
        exact = [x.double().requires_grad_() for x in (*whole.tensors(), whole.initial)]
        of_parameters = [x if x is None else x.double().requires_grad_() for x in parameters]
        given = applied(exact[:5], of_parameters, options)
        of_rule = dict(scale=options.get("scale"), initial_state=exact[5], cu_seqlens=whole.lengths)
        o, final = delta_reference(*given, **of_rule)
        there = [x for x in of_parameters if x is not None]
        wanted = [o, final, *torch.autograd.grad(whole.loss(o, final, whole.do), exact + there, materialize_grads=True)]
        documents = whole.lengths if case.per_document else None
        expected = of_rank(wanted[:8], comm, case.tokens, whole.lengths, case.B, case.zigzag, case.per_document)

        mine = place(comm, case.tokens, case.zigzag, documents)
        own = [x[:, mine].clone().requires_grad_() for x in whole.tensors()]
        own.append((whole.initial.mT if v_first else whole.initial).contiguous().requires_grad_())
        own += [x.requires_grad_() for x in parameters if x is not None]
        o, final = RULES[rule](
            *own[:5],
            comm=comm,
            initial_state=own[5] if point.first_state else None,
            output_final_state=True,
            cu_seqlens=whole.lengths,
            layout="zigzag" if case.zigzag else "contiguous",
            per_document=case.per_document,
            A_log=parameters[0],
            dt_bias=parameters[1],
            **options,
        )
        assert o.dtype == case.dtype and final.dtype == F32
        final = final.mT if v_first else final
        grads = [*torch.autograd.grad(whole.loss(o, final, whole.do[:, mine]), own, materialize_grads=True)]
        assert [x.dtype for x in grads] == [x.dtype for x in own]
        grads[5] = grads[5].mT if v_first else grads[5]
        if not point.first_state:
            expected[7] = grads[5]
        for x in grads[6:]:
            dist.all_reduce(x, group=comm.group)
        names = *NAMES, *(name for name, x in zip(("A_log", "dt_bias"), parameters) if x is not None)
        return relative_all(names, (o, final, *grads), (*expected, *wanted[8:]))


@pytest.mark.slow(
    "kda",
    "gated_delta_rule-gates in b",
    "gated_delta_rule-beta in b",
    but=("kda-a lower", "kda-safe", "kda-beta in float64", "kda-norms", "kda-V of 300"),
)
@pytest.mark.quick("kda-closed gates in zigzag", "kda-a lower bound", "gated_delta_rule-raw gates")
@pytest.mark.parametrize("rule, name", [(rule, name) for rule, name, _ in POINTS])
def test_a_point_of_the_interface(run, rule, name, size=2):
    point = OF_KDA.get(name) or BOTH[name]
    most = LIMIT[point.case.get("dtype", F32)]
    limits = {"dg": max(most, LIMIT[point.gate]), "dbeta": max(most, LIMIT.get(point.beta, 0))}  # rounded
    draws = [point._replace(case=dict(seed=seed) | point.case) for seed in range(point.draws)]
    for of_draws in zip(*(run(size, point_case, rule, draw) for draw in draws), strict=True):
        errors = {name: (sum(x[name] ** 2 for x in of_draws) / len(draws)) ** 0.5 for name in of_draws[0]}
        assert not {name: x for name, x in errors.items() if not x < limits.get(name, most)}, errors


def promise_case(comm):
    """Return errors where rank 0 alone passes safe_gate with an invalid lower_bound."""
    whole, mine = Whole(DeltaCase("kda", [20, 20]), comm.device), place(comm, [20, 20])
    inputs = [x[:, mine] for x in whole.tensors()]
    found = []
    for bound in (3.0, 0.0, -100.0, float("nan"), "-5"):
        bound = -5.0 if comm.rank else bound
        found.append(
            raised(lambda bound=bound: allscan.zeco_kda(*inputs, comm=comm, safe_gate=True, lower_bound=bound))
        )
    return found


def test_what_safe_gate_does_not_promise_is_rejected_on_all_ranks(run, size=2):
    for problems in run(size, promise_case):
        assert all(found and found[0] == "ValueError" and "lower_bound" in found[1] for found in problems), problems


def types_case(comm, rule):
    """Return errors where rank 0 alone passes a tensor of a wrong kind in place of a raw argument."""
    whole, mine = Whole(DeltaCase(rule, [20, 20]), comm.device), place(comm, [20, 20])
    right = dict(
        zip(("q", "k", "v", "g", "beta"), (x[:, mine] for x in whole.tensors()), strict=True), A_log=torch.zeros(1)
    )
    flags = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, state_v_first=True, comm=comm)
    wrong = dict(
        k=right["k"].to(torch.float8_e4m3fn),
        v=right["v"][0, 0, 0],
        g=right["g"].to(torch.complex64),
        beta=right["beta"] > 0.5,
        A_log=right["A_log"].to_sparse(),
        dt_bias=torch.zeros(16 if rule == "kda" else 1, dtype=torch.int64),
        initial_state=torch.zeros(16),
    )
    found = {}
    for name, x in wrong.items():
        given = right | flags | ({} if comm.rank else {name: x})
        found[name] = raised(lambda given=given: RULES[rule](**given))
    return found


@pytest.mark.parametrize("rule", RULES)
def test_tensors_of_a_wrong_kind_are_rejected_on_all_ranks(run, rule, size=2):
    for rank, problems in enumerate(run(size, types_case, rule)):
        for name, (kind, text) in problems.items():
            wanted = "ValueError" if rank or name in ("v", "initial_state") else "TypeError"
            assert kind == wanted and name in text and (not rank or "rank 0" in text), (rank, name, kind, text)
