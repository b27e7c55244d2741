"""Compares the GLA operator with the token-by-token recurrence in float64 over the whole sequence."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F

import allscan
from allscan.reference import gla_reference

from .values import chunks, place, relative_all

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def gates(kind, shape, generator):
    """Draw natural-log decays: mild as in models, near 1, strong, exactly 1, closed, or all of these mixed; "spots":
    near 1 except for single tokens, so that about half of the chunks are strong."""
    g = F.logsigmoid(torch.randn(shape, generator=generator))
    if kind == "weak":
        return g / 64
    if kind == "strong":
        return -20 - 60 * torch.rand(shape, generator=generator)
    if kind == "spots":
        return torch.where(torch.rand((*shape[:-1], 1), generator=generator) < 0.01, -200.0, g / 64)
    if kind == "zero":
        return torch.zeros(shape)
    if kind == "mixed":
        scales = torch.tensor([0.0, 1e-4, 1.0, 20.0, 80.0, float("inf")])
        g = g * scales[torch.randint(0, 6, shape, generator=generator)]
    return g


class GLACase(NamedTuple):
    """A random sequence over the ranks, for the tests of zeco_gla."""

    tokens: list[int]  # by rank
    B: int = 1
    H: int = 1
    K: int = 16
    V: int = 16
    gates: str = "weak"  # argument of gates()
    dtype: torch.dtype = F32
    gate_dtype: torch.dtype = F32
    lengths: list[int] | None = None  # cu_seqlens of packed sequences
    seed: int = 0
    zigzag: bool = False
    recompute: bool = True
    per_document: bool = False


class Whole:
    """The whole sequence with all inputs, the same on every rank, and its float64 reference."""

    def __init__(self, case: GLACase, device):
        _, B, H, K, V, kind, dtype, gate_dtype, lengths, seed, *_ = case
        generator, total = torch.Generator().manual_seed(seed), sum(case.tokens)

        def normal(*shape):
            return torch.randn(shape, generator=generator).to(device)

        self.lengths, sequences = lengths, B if lengths is None else len(lengths) - 1
        self.q, self.k, self.v = (normal(B, total, H, w).to(dtype) for w in (K, K, V))
        self.g = gates(kind, (B, total, H, K), generator).to(device, gate_dtype)
        self.do = normal(B, total, H, V).to(dtype)
        self.initial, self.dfinal = normal(sequences, H, K, V), normal(sequences, H, K, V)

    def reference(self):
        """Return (o, final_state, dq, dk, dv, dg, dinitial_state) in float64."""
        leaves = [x.double().requires_grad_() for x in (self.q, self.k, self.v, self.g, self.initial)]
        o, final = gla_reference(*leaves[:4], initial_state=leaves[4], cu_seqlens=self.lengths)
        ((o * self.do.double()).sum() + (final * self.dfinal.double()).sum()).backward()
        return [o, final] + [torch.zeros_like(x) if x.grad is None else x.grad.nan_to_num() for x in leaves]

    def ours(self, comm, mine, call=allscan.zeco_gla):
        """Return the tensors of ``reference`` from zeco_gla on tokens ``mine``. Gradients of -inf gates, which have no
        useful value, are set to 0."""
        return self.forward(comm, mine, call)()

    def forward(self, comm, mine, call=allscan.zeco_gla):
        """Run the forward pass of ours(); return a function that runs the rest."""
        own = [x[:, mine].requires_grad_() for x in (self.q, self.k, self.v, self.g)]
        own.append(self.initial.clone().requires_grad_())
        packed = None if self.lengths is None else torch.tensor(self.lengths, device=comm.device)
        o, final = call(*own[:4], comm=comm, initial_state=own[4], output_final_state=True, cu_seqlens=packed)

        def backward():
            ((o.float() * self.do[:, mine].float()).sum() + (final * self.dfinal).sum()).backward()
            own[3].grad.masked_fill_(own[3].detach().isinf(), 0.0)
            return [o, final] + [x.grad for x in own]

        return backward


NAMES = ("o", "final_state", "dq", "dk", "dv", "dg", "dinitial_state")


def owners(tokens, lengths, sequences, zigzag=False):
    """Return (rank of each sequence's first token, rank of its last); for an empty sequence both are the rank that its
    last token would have."""
    parts = list(chunks(tokens, zigzag))
    if lengths is None:
        return [parts[0][0]] * sequences, [parts[-1][0]] * sequences
    last = [next(r for r, _, end in parts if b <= end) for b in lengths[1:]]
    first = [
        next(r for r, _, end in parts if a < end) if a < b else last[i]
        for i, (a, b) in enumerate(zip(lengths, lengths[1:]))
    ]
    return first, last


def errors_of_part(whole, expected, actual, rank, tokens, mine, zigzag=False, per_document=False):
    """Return the relative error of each tensor of one rank, for its tokens ``mine``; ``expected``: the reference of the
    whole sequence. States that belong to other ranks must be 0."""
    wanted = list(expected)
    first, last = owners(tokens, None if per_document else whole.lengths, whole.initial.shape[0], zigzag)
    for i in (0, 2, 3, 4, 5):
        wanted[i] = wanted[i][:, mine]
    for i, ranks in ((1, last), (6, first)):
        has = torch.tensor([r == rank for r in ranks], device=wanted[i].device)
        assert not actual[i][~has].any()
        wanted[i] = torch.where(has[:, None, None, None], wanted[i], 0.0)
    return relative_all(NAMES, actual, wanted)


LIMIT = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 6e-4}


def gla_case(group, case: GLACase):
    """Return the relative error of each tensor."""
    with allscan.Communicator(group) as comm:
        whole = Whole(case, comm.device)
        mine = place(comm, case.tokens, case.zigzag, case.lengths if case.per_document else None)
        where = dict(layout="zigzag" if case.zigzag else "contiguous", per_document=case.per_document)
        call = functools.partial(allscan.zeco_gla, recompute=case.recompute, **where)
        actual = whole.ours(comm, mine, call)
        assert len(comm.agreed.scans) == 1  # forward and backward share a workspace
        placed = comm.rank, case.tokens, mine, case.zigzag, case.per_document
        return errors_of_part(whole, whole.reference(), actual, *placed)


def check(answers, dtype=torch.float32):
    for errors in answers:
        assert max(errors.values()) < LIMIT[dtype], errors
