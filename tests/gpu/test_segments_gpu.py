"""Bits that do not depend on the number of ranks, at model sizes: eager and in CUDA graphs, many times."""

from __future__ import annotations

import pytest
import torch

import allscan
from support.segments import bits, integers
from support.values import late

pytestmark = pytest.mark.gpu
T, H, D = 8192, 16, 128


def _inputs(device, kind):
    generator = torch.Generator(device).manual_seed(5)
    q, k, v, do, g = (torch.randn(1, T, H, D, generator=generator, device=device) for _ in range(5))
    g = torch.nn.functional.logsigmoid(g) * kind
    return [*(x.bfloat16() for x in (q, k, v)), g], do.bfloat16()


def gla_case(group, S, gates, tokens, zigzag, graph, times):
    """Return (o, dq, dk, dv, dg) of this rank's tokens; AssertionError if one of ``times`` repeated calls has other
    bits."""
    with allscan.Communicator(group) as comm:
        whole, do = _inputs(comm.device, gates)
        if zigzag:
            chunks = torch.arange(T).chunk(2 * comm.size)
            mine = torch.cat([chunks[comm.rank], chunks[-1 - comm.rank]])
        else:
            begin = sum(tokens[: comm.rank])
            mine = torch.arange(begin, begin + tokens[comm.rank])
        leaves, own = [x[:, mine].contiguous().requires_grad_() for x in whole], do[:, mine].contiguous()

        def step():
            o, _ = allscan.zeco_gla(
                *leaves, comm=comm, invariant=S, layout="zigzag" if zigzag else "contiguous", recompute=not graph
            )
            return o, *torch.autograd.grad(o, leaves, own)

        first = [x.detach().clone() for x in step()]
        run = step
        if graph:
            torch.cuda.synchronize()
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                made = step()

            def run():
                captured.replay()
                return made

        for i in range(times):
            late(i, comm.rank, 2 if i % 8 == 0 else 0)
            # copies to the host would take minutes in a thousand calls
            assert all(torch.equal(integers(a), integers(b)) for a, b in zip(run(), first, strict=True)), i
        comm.barrier()
        return mine, [bits(x) for x in first]


def whole_of(parts):
    order = torch.cat([mine for mine, _ in parts]).argsort()
    return [torch.cat(of_ranks, 1)[:, order] for of_ranks in zip(*(found for _, found in parts), strict=True)]


@pytest.mark.parametrize("S, gates", [(2048, 1e-4), (1024, 0.0), (1024, 1.0), (2048, 100.0)])
def test_zeco_gla(run, gates, S, size=2):
    """One rank against two, with even, uneven and zigzag tokens; in a CUDA graph with even ones."""
    one = whole_of(run(1, gla_case, S, gates, [T], zigzag=False, graph=False, times=2))
    for tokens, zigzag, graph in (([S, T - S], False, False), ([T // 2] * 2, False, True), ([T // 2] * 2, True, False)):
        two = whole_of(run(2, gla_case, S, gates, tokens, zigzag, graph=graph, times=4))
        assert [torch.equal(a, b) for a, b in zip(one, two, strict=True)] == [True] * 5, (tokens, zigzag, graph)


def test_a_thousand_times(run, size=2):
    """With stragglers, replayed."""
    one = whole_of(run(1, gla_case, S=2048, gates=1e-4, tokens=[T], zigzag=False, graph=False, times=1))
    two = whole_of(run(2, gla_case, S=2048, gates=1e-4, tokens=[T // 2] * 2, zigzag=False, graph=True, times=1000))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_without_it_bits_differ(run, size=2):
    """The control."""
    one = whole_of(run(1, gla_case, S=0, gates=1e-4, tokens=[T], zigzag=False, graph=False, times=1))
    two = whole_of(run(2, gla_case, S=0, gates=1e-4, tokens=[T // 2] * 2, zigzag=False, graph=False, times=1))
    assert not any(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def segments_case(group, counts, times):
    """Return (incoming, outgoing) of allscan_segments after many equal calls."""
    shape = (32, D, D)
    with allscan.Communicator(group) as comm:
        generator = torch.Generator().manual_seed(1)
        states = torch.randn(sum(counts), *shape, generator=generator)
        decays = torch.rand(sum(counts), *shape[:-1], generator=generator)
        begin = sum(counts[: comm.rank])
        own = [x[begin : begin + counts[comm.rank]].to(comm.device) for x in (states, decays)]
        first = None
        for i in range(times):
            late(i, comm.rank, 2 if i % 16 == 0 else 0)
            found = [bits(x) for x in allscan.allscan_segments(*own, comm=comm)]
            first = first or found
            assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True)), i
        comm.barrier()
        return first


@pytest.mark.parametrize("counts", [(8, 8), (0, 16), (3, 13)])
def test_allscan_segments(run, counts, size=2):
    [(incoming, outgoing)] = run(1, segments_case, (16,), 2)
    parts = run(2, segments_case, counts, 100)
    assert torch.equal(torch.cat([part[0] for part in parts]), incoming)
    assert torch.equal(parts[-1][1], outgoing)


def delta_case(group, S, tokens, zigzag):
    """Return (o, dq, dk, dv, dg, dbeta) of zeco_kda of this rank's tokens; AssertionError if a second call differs."""
    total = sum(tokens)
    with allscan.Communicator(group, invariant=S) as comm:
        generator = torch.Generator(comm.device).manual_seed(2)
        q, k, v, do, g = (torch.randn(1, total, H, D, generator=generator, device=comm.device) for _ in range(5))
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
        beta = torch.rand(1, total, H, generator=generator, device=comm.device)
        chunks = torch.arange(total).chunk(2 * comm.size)
        begin = sum(tokens[: comm.rank])
        mine = torch.arange(begin, begin + tokens[comm.rank])
        mine = torch.cat([chunks[comm.rank], chunks[-1 - comm.rank]]) if zigzag else mine
        given = [*(x.bfloat16() for x in (q, k, v)), torch.nn.functional.logsigmoid(g) / 64, beta]
        leaves = [x[:, mine].contiguous().requires_grad_() for x in given]
        layout, found = "zigzag" if zigzag else "contiguous", []
        for _ in range(2):
            o, _ = allscan.zeco_kda(*leaves, comm=comm, chunk="allscan", layout=layout)
            found.append([bits(x) for x in (o, *torch.autograd.grad(o, leaves, do[:, mine].bfloat16()))])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        comm.barrier()
        return mine, found[0]


def test_zeco_kda(run, size=2):
    one = whole_of(run(1, delta_case, 1024, [4096], False))
    for tokens, zigzag in (([1024, 3072], False), ([2048, 2048], True)):
        two = whole_of(run(2, delta_case, 1024, tokens, zigzag))
        assert [torch.equal(a, b) for a, b in zip(one, two, strict=True)] == [True] * 6, (tokens, zigzag)
