"""Runs zeco_gla with invariant=, and joins the ranks' results for bitwise comparison."""

from __future__ import annotations

from typing import NamedTuple

import torch

import allscan

from .gla import NAMES, GLACase, Whole
from .segments import bits
from .values import late, place


class Calls(NamedTuple):
    """Options of calls of zeco_gla. S: its ``invariant``, or with ``of_comm`` the communicator's."""

    S: int = 128
    of_comm: bool = False
    compiled: bool = False
    most_ms: int = 0
    times: int = 1


def invariant_case(group, case: GLACase, calls: Calls):
    """Return (this rank's tokens, its results NAMES for them, on the CPU)."""
    with allscan.Communicator(group, invariant=calls.S if calls.of_comm else 0) as comm:
        whole = Whole(case, comm.device)
        mine = place(comm, case.tokens, case.zigzag)
        options = dict(recompute=case.recompute, layout="zigzag" if case.zigzag else "contiguous")
        if not calls.of_comm:
            options["invariant"] = calls.S

        def call(*inputs, **given):
            return allscan.zeco_gla(*inputs, **given, **options)

        call = torch.compile(call, backend="aot_eager", fullgraph=True) if calls.compiled else call
        found = []
        for i in range(calls.times):
            late(i, comm.rank, calls.most_ms)
            again = [x.detach().cpu() for x in whole.ours(comm, mine, call)]
            assert not found or same(again, found) == list(NAMES), f"call {i} has other bits than the first"
            found = again
        comm.barrier()
        return torch.arange(sum(case.tokens))[mine], found


def whole_of(parts):
    """Return NAMES of the whole sequence."""
    order, found = torch.cat([mine for mine, _ in parts]).argsort(), []
    for i, name in enumerate(NAMES):
        of_ranks = [part[i] for _, part in parts]
        # states are zero on all ranks but one
        found.append(sum(of_ranks) if "state" in name else torch.cat(of_ranks, 1)[:, order])
    return found


def same(one, other):
    """Return the names of tensors with the same bits in both."""
    return [name for name, a, b in zip(NAMES, one, other, strict=True) if torch.equal(bits(a), bits(b))]


def share_of_others(one, other):
    """Return the share of outputs with different bits."""
    return (bits(one[0]) != bits(other[0])).float().mean().item()
