"""Runs operators with invariant=, and joins the ranks' results for bitwise comparison."""

from __future__ import annotations

from typing import NamedTuple

import torch

import allscan
from allscan.reference import ssd_reference

from .delta import NAMES as NAMES_OF_DELTA
from .delta import DeltaCase
from .delta import Whole as WholeDelta
from .gla import F32, NAMES, GLACase, Whole
from .segments import bits
from .values import late, place


class SSDCase(NamedTuple):
    """A random sequence over the ranks, for zeco_ssd."""

    tokens: list[int]
    B: int = 1
    dtype: torch.dtype = F32
    lengths: list[int] | None = None
    zigzag: bool = False


class WholeSSD:
    """The whole sequence with all inputs, the same on every rank."""

    OF_TOKENS = "x", "dt", "B", "C", "z"
    OPTIONS = dict(dt_softplus=True, dt_limit=(0.0, 1.5))

    def __init__(self, case: SSDCase, device, H=4, G=2, P=6, N=10):
        tokens, B, dtype, self.lengths, _ = case
        total, generator = sum(tokens), torch.Generator().manual_seed(0)
        sequences = B if self.lengths is None else len(self.lengths) - 1

        def normal(*shape):
            return torch.randn(shape, generator=generator).to(device)

        self.given = dict(
            x=normal(B, total, H, P).to(dtype),
            dt=normal(B, total, H),
            B=normal(B, total, G, N).to(dtype),
            C=normal(B, total, G, N).to(dtype),
            z=normal(B, total, H, P),
            initial_states=normal(sequences, H, P, N),
        )
        self.fixed = dict(A=-torch.rand(H, generator=generator).to(device) / 4, D=normal(H), dt_bias=normal(H))
        self.do, self.dfinal = normal(B, total, H, P), normal(sequences, H, P, N)

    def gradients(self, o, final, do, leaves):
        return [o, final, *torch.autograd.grad((o * do).sum() + (final * self.dfinal).sum(), leaves.values())]

    def reference(self):
        leaves = {name: x.double().requires_grad_() for name, x in self.given.items()}
        o, final = ssd_reference(**leaves, **self.fixed, **self.OPTIONS, cu_seqlens=self.lengths)
        return self.gradients(o, final, self.do, leaves)

    def ours(self, comm, mine, call, **options):
        leaves = {name: (x[:, mine] if name in self.OF_TOKENS else x).clone() for name, x in self.given.items()}
        leaves = {name: x.requires_grad_() for name, x in leaves.items()}
        given = leaves | self.fixed | self.OPTIONS | dict(chunk_size=16, return_final_states=True)
        return self.gradients(*call(**given, comm=comm, cu_seqlens=self.lengths, **options), self.do[:, mine], leaves)


class Rule(NamedTuple):
    """How the tests call an operator. names: results, those with "state" of sequences, the others of tokens."""

    operator: str
    case: type
    whole: type
    names: tuple[str, ...]
    options: dict


OF_SSD = ("o", "final_state", "dx", "ddt", "dB", "dC", "dz", "dinitial_state")
RULES = {
    "gla": Rule("zeco_gla", GLACase, Whole, NAMES, {}),
    "kda": Rule("zeco_kda", DeltaCase, WholeDelta, NAMES_OF_DELTA, dict(chunk="allscan")),
    "gated_delta_rule": Rule("zeco_gated_delta_rule", DeltaCase, WholeDelta, NAMES_OF_DELTA, dict(chunk="allscan")),
    "ssd": Rule("zeco_ssd", SSDCase, WholeSSD, OF_SSD, {}),
}


def case_of(rule, tokens, **options):
    """Return a case of the rule; the delta rules have two heads of values, zeco_gla two heads."""
    if rule == "ssd":
        return SSDCase(tokens, **options)
    return GLACase(tokens, H=2, **options) if rule == "gla" else DeltaCase(rule, tokens, HV=2, **options)


class Calls(NamedTuple):
    """Options of calls. S: ``invariant`` of the operator, or with ``of_comm`` the communicator's. raw: the delta rule
    computes norms, gate and beta from raw arguments. most_ms: largest delay of a rank."""

    S: int = 128
    of_comm: bool = False
    compiled: bool = False
    raw: bool = False
    most_ms: int = 0
    times: int = 1


def invariant_case(group, rule, case, calls: Calls):
    """Return (this rank's tokens, its results for them, on the CPU)."""
    of = RULES[rule]
    with allscan.Communicator(group, invariant=calls.S if calls.of_comm else 0) as comm:
        whole, mine = of.whole(case, comm.device), place(comm, case.tokens, case.zigzag)
        options = dict(layout="zigzag" if case.zigzag else "contiguous")
        if not calls.of_comm:
            options |= of.options | dict(invariant=calls.S)
        if rule == "gla":
            options["recompute"] = case.recompute
        if calls.raw:
            options |= dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)
            options["A_log"] = torch.linspace(-1, 1, case.HV, device=comm.device)

        def call(*inputs, **given):
            return getattr(allscan, of.operator)(*inputs, **given, **options)

        call = torch.compile(call, backend="aot_eager", fullgraph=True) if calls.compiled else call
        found = []
        for i in range(calls.times):
            late(i, comm.rank, calls.most_ms)
            again = [x.detach().cpu() for x in whole.ours(comm, mine, call)]
            assert not found or same(rule, again, found) == [*of.names], f"call {i} has other bits than the first"
            found = again
        comm.barrier()
        return torch.arange(sum(case.tokens))[mine], found


def found(run, rule, case, **how):
    """Return the results of the whole sequence."""
    parts = run(len(case.tokens), invariant_case, rule, case, Calls(**how))
    order, whole = torch.cat([mine for mine, _ in parts]).argsort(), []
    for i, name in enumerate(RULES[rule].names):
        of_ranks = [part[i] for _, part in parts]
        # states are zero on all ranks but one
        whole.append(sum(of_ranks) if "state" in name else torch.cat(of_ranks, 1)[:, order])
    return whole


def same(rule, one, other):
    """Return the names of tensors with the same bits in both."""
    return [name for name, a, b in zip(RULES[rule].names, one, other, strict=True) if torch.equal(bits(a), bits(b))]
