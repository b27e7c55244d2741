"""Compares All-Scan with its definition in float64."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch

import allscan
from allscan.reference import allscan_reference

from .values import error, inputs, late


class Guarded:
    """A tensor of NaN between guard words that must not change."""

    GUARD, WORDS = 12345.0, 64  # a multiple of 16 bytes

    def __init__(self, shape, device):
        self._all = torch.full((2 * self.WORDS + math.prod(shape),), self.GUARD, device=device)
        self.tensor = self._all[self.WORDS : -self.WORDS].view(shape).fill_(float("nan"))

    def intact(self):
        return all(bool((x == self.GUARD).all()) for x in (self._all[: self.WORDS], self._all[-self.WORDS :]))


class ScanCase(NamedTuple):
    """Several scans of one AllScan."""

    shape: tuple[int, ...]
    decay_shape: tuple[int, ...] | None
    reverse: bool | None = False  # None: in both directions, in turns
    depth: int = 2
    protocol: str = "auto"
    initial: bool | None = False  # whether there is an initial state; None: in every other epoch
    epochs: int = 1
    special: bool = False  # whether there are NaN, Inf and -0
    most_ms: int = 0  # largest delay of a rank


def scan_case(group, case: ScanCase, nodes=None, **options):
    """Return the largest error of a rank. options: of the AllScan."""
    shape, decay_shape, one_way, depth, protocol, with_initial, epochs, special, most_ms = case
    directions = (False, True) if one_way is None else (one_way,)
    with allscan.Communicator(group, nodes=nodes) as comm:
        scan = allscan.AllScan(comm, shape, depth=depth, protocol=protocol, **options)
        worst = 0.0
        for epoch, reverse in itertools.product(range(epochs), directions):
            states, decays = inputs(comm, shape, decay_shape, epoch, special)
            has_initial = epoch % 2 if with_initial is None else with_initial
            initial = torch.randn(shape, generator=torch.Generator().manual_seed(epoch)) if has_initial else None
            expected = allscan_reference(states, decays, initial, reverse)[comm.rank]
            out = Guarded(shape, comm.device)
            late(2 * epoch + reverse, comm.rank, most_ms)
            scan.scan(
                states[comm.rank].to(comm.device),
                None if decays is None else decays[comm.rank].to(comm.device),
                initial_state=None if initial is None else initial.to(comm.device),
                reverse=reverse,
                out=out.tensor,
            )
            worst = max(worst, error(out.tensor, expected))
            assert out.intact(), epoch
        launches = tuple(epochs * (reverse in directions) for reverse in (False, True))
        assert comm.size == 1 or scan.epochs == launches
        comm.check()
    return worst


def error_of(comm, call, shape, seed, reverse=False):
    """Return the error of call(state, decay, reverse=...) for one draw of all ranks' states and decays."""
    states, decays = inputs(comm, shape, shape[:-1], seed)
    found = call(states[comm.rank].to(comm.device), decays[comm.rank].to(comm.device), reverse=reverse)
    return error(found, allscan_reference(states, decays, reverse=reverse)[comm.rank])


def gradient_case(group, shape, decay_shape, reverse, options=None):
    with allscan.Communicator(group, **options or {}) as comm:
        states, decays = inputs(comm, shape, decay_shape, 7)
        generator = torch.Generator().manual_seed(1)
        initial = torch.randn(shape, generator=generator)
        weights = [torch.randn(shape, generator=generator) for _ in range(comm.size)]

        leaves = [x.double().requires_grad_() for x in states]
        decay_leaves = [x.double().requires_grad_() for x in decays]
        initial_leaf = initial.double().requires_grad_()
        prevs = allscan_reference(leaves, decay_leaves, initial_leaf, reverse)
        sum((w * prev).sum() for w, prev in zip(weights, prevs)).backward()

        weight = weights[comm.rank].to(comm.device)
        state = states[comm.rank].to(comm.device).requires_grad_()
        decay = decays[comm.rank].to(comm.device).requires_grad_()
        start = initial.to(comm.device).requires_grad_()
        prev = allscan.allscan(state, decay, comm=comm, initial_state=start, reverse=reverse)
        if prev.is_cuda:  # backward may load kernels, and hold CUDA's locks that NVSHMEM's proxy may need
            torch.cuda.current_stream().synchronize()
        (prev * weight).sum().backward()
        first = comm.rank == (comm.size - 1 if reverse else 0)
        last = comm.rank == (0 if reverse else comm.size - 1)

        def zeros_if_none(grad, like):
            return torch.zeros_like(like) if grad is None else grad

        return (
            error(prev, prevs[comm.rank]),
            error(state.grad, zeros_if_none(leaves[comm.rank].grad, state)),
            # the last rank's decay has no effect: the reference has no gradient, ours is zero
            error(decay.grad, zeros_if_none(None if last else decay_leaves[comm.rank].grad, decay)),
            error(start.grad, initial_leaf.grad if first else torch.zeros(shape)),
        )
