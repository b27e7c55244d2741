"""Runs many epochs with fresh data and stragglers, and compares each: on GPUs, over any links."""

from __future__ import annotations

import random
import time

import torch

import allscan
from allscan.base.checks import ScanInputs
from allscan.base.tiling import transition_tile
from allscan.reference import allscan_reference
from allscan.scan.zigzag_scan import two_way_scan

from .values import captured


def drawn(comm, shape, generator, kind):
    """Draw (states, "decay" or "transition", decays or transitions) of all ranks, [size, ...]."""
    states = torch.randn(comm.size, *shape, generator=generator, device=comm.device)
    if kind == "transitions":
        width = shape[-2]
        transitions = torch.randn(comm.size, *shape[:-1], width, generator=generator, device=comm.device)
        return states, "transition", transitions / (2 * width**0.5)
    return states, "decay", torch.rand(comm.size, *shape[:-1], generator=generator, device=comm.device)


def long_case(group, epochs, protocol, depth, straggler, kind="decays", waits=0):
    """Scan fresh data every epoch, and check every epoch; one rank is delayed now and then.

    kind: "decays", "transitions", or "hops": the number 0 as decay on all ranks but one, a different one each time.
    waits: number of epochs between two waits of the host, so that launches do not fill CUDA's queue; 0: no waits.
    """
    with allscan.Communicator(group) as comm:
        shape = (4, 16, 32)
        tile = transition_tile(16) if kind == "transitions" else None
        scan = allscan.AllScan(comm, shape, protocol=protocol, depth=depth, tile=tile)
        generator = torch.Generator(comm.device).manual_seed(0)  # the same numbers on every rank
        chance, turns = random.Random(comm.rank), random.Random(0)
        worst = torch.zeros((), device=comm.device, dtype=torch.float64)
        out = torch.empty(shape, device=comm.device)
        for epoch in range(epochs):
            states, name, factors = drawn(comm, shape, generator, kind)
            factors = list(factors)
            factor = factors[comm.rank]
            if kind == "hops":
                chained = turns.randrange(comm.size)
                factors = [x if rank == chained else 0 * x for rank, x in enumerate(factors)]
                factor = factor if comm.rank == chained else 0
            if comm.rank == straggler and chance.random() < 0.02:
                torch.cuda.synchronize()
                time.sleep(chance.uniform(0, 4e-3))
            out.fill_(float("nan"))
            scan.scan(states[comm.rank], **{name: factor}, out=out)
            if waits and epoch % waits == 0:
                torch.cuda.current_stream().synchronize()
            expected = allscan_reference(list(states), **{name + "s": factors})[comm.rank]
            worst = torch.maximum(worst, (out - expected).abs().max().nan_to_num(nan=1e30))
        comm.barrier()
        return worst.item()


def zigzag_case(group, epochs, straggler):
    """Run long_case in the zigzag layout: two states, ascending and descending."""
    with allscan.Communicator(group) as comm:
        shape, P = (4, 16, 32), comm.size
        scan = allscan.AllScan(comm, shape)
        generator = torch.Generator(comm.device).manual_seed(0)
        chance, places = random.Random(comm.rank), (comm.rank, 2 * P - 1 - comm.rank)
        worst = torch.zeros((), device=comm.device, dtype=torch.float64)
        for _ in range(epochs):
            states = torch.randn(2 * P, *shape, device=comm.device, generator=generator)
            decays = torch.rand(2 * P, *shape[:-1], device=comm.device, generator=generator)
            if comm.rank == straggler and chance.random() < 0.02:
                torch.cuda.synchronize()
                time.sleep(chance.uniform(0, 4e-3))
            found = two_way_scan(scan, *(ScanInputs(states[i], decays[i]) for i in places))
            expected = allscan_reference(list(states), decays=list(decays))
            for x, i in zip(found, places, strict=True):
                worst = torch.maximum(worst, (x - expected[i]).abs().max().nan_to_num(nan=1e30))
        comm.barrier()
        return worst.item()


def graph_case(group, replays, kind):
    with allscan.Communicator(group) as comm:
        shape = (4, 16, 32)
        scan = allscan.AllScan(comm, shape, tile=transition_tile(16) if kind == "transitions" else None)
        generator = torch.Generator(comm.device).manual_seed(0)
        states, name, factors = drawn(comm, shape, generator, kind)
        state, factor = torch.zeros_like(states[0]), torch.zeros_like(factors[0])
        forward, backward = torch.empty_like(state), torch.empty_like(state)

        def both():
            scan.scan(state, **{name: factor}, out=forward)
            scan.scan(forward, **{name: factor}, reverse=True, out=backward)

        graph, _ = captured(comm, both)
        worst = torch.zeros((), device=comm.device, dtype=torch.float64)
        chance = random.Random(comm.rank)
        for _ in range(replays):
            states, _, factors = drawn(comm, shape, generator, kind)
            state.copy_(states[comm.rank])
            factor.copy_(factors[comm.rank])
            if chance.random() < 0.02:
                time.sleep(2e-3)
            graph.replay()
            given = {name + "s": list(factors)}
            prevs = allscan_reference(list(states), **given)
            nexts = allscan_reference(prevs, **given, reverse=True)
            for actual, expected in ((forward, prevs[comm.rank]), (backward, nexts[comm.rank])):
                worst = torch.maximum(worst, (actual - expected).abs().max().nan_to_num(nan=1e30))
        comm.barrier()
        return worst.item()
