"""One CUDA graph of a prefill whose lengths only kernels read."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

import allscan
from allscan import serving
from support.values import captured, late, raised, random_requests

pytestmark = pytest.mark.gpu

H, K, V = 4, 128, 128


def inputs(rule, T, generator):
    """Inputs of T rows, on the CPU."""
    q, k, v = (torch.randn(1, T, H, n, generator=generator).bfloat16() for n in (K, K, V))
    g, beta = -torch.rand(1, T, H, K, generator=generator), torch.rand(1, T, H, generator=generator)
    return [q, F.normalize(k, dim=-1), v, g if rule == "kda" else g[..., 0], beta.bfloat16()]


class Static:
    """The tensors of a call, for requests that ``fill`` changes in place."""

    def __init__(self, comm, rule, T, requests):
        self.comm, self.rule, self.T, self.requests = comm, rule, T, requests
        self.own = [x.to(comm.device) for x in inputs(rule, T, torch.Generator().manual_seed(comm.rank))]
        self.pool = torch.zeros(requests, H, V, K, device=comm.device)
        self.memory = torch.zeros(requests, H * K, 3, device=comm.device)  # of a convolution
        self.weight = torch.randn(H * K, 1, 4, generator=torch.Generator().manual_seed(1)).to(comm.device)
        self.slots = torch.zeros(requests, dtype=torch.int32, device=comm.device)
        self.begun = torch.zeros(requests, dtype=torch.bool, device=comm.device)
        self.boundaries = torch.zeros(requests + 1, dtype=torch.int32, device=comm.device)
        self.cut = torch.zeros(comm.size + 1, dtype=torch.int32, device=comm.device)

    def fill(self, order):
        lengths, row = random_requests(order, self.requests, self.comm.size, self.T, True)
        self.boundaries.copy_(torch.tensor(lengths))
        self.cut.copy_(torch.tensor(row))
        slots = order.sample(range(self.requests), self.requests)
        self.slots.copy_(torch.tensor([slot if order.random() < 0.9 else -1 for slot in slots]))
        self.begun.copy_(torch.tensor([order.random() < 0.5 for _ in slots]))
        generator = torch.Generator().manual_seed(order.randrange(2**31))
        for x in self.pool, self.memory:
            x.copy_(torch.randn(x.shape, generator=generator))
        for x, new in zip(self.own, inputs(self.rule, self.T, generator), strict=True):
            x.copy_(new)

    def __call__(self):
        batch = dict(comm=self.comm, slots=self.slots, has_initial_state=self.begun)
        batch |= dict(query_start_loc=self.boundaries, cut=self.cut, on_device=True)
        q = serving.convolve(self.conv, self.own[0].flatten(2), pool=self.memory, **batch).view_as(self.own[0])
        operator, tensors = getattr(allscan, f"zeco_{self.rule}"), (q, *self.own[1:])
        return serving.prefill(operator, *tensors, pool=self.pool, state_v_first=True, **batch)

    def conv(self, x):
        return F.conv1d(x.mT.float(), self.weight, padding=3, groups=H * K)[..., :-3].mT.to(x.dtype)


def graph_case(group, rule, layouts):
    """Return the number of layouts whose bits differ between replays and eager calls."""
    order, different = random.Random(3), 0
    with allscan.Communicator(group) as comm:
        static = Static(comm, rule, 1000, 9)
        static.fill(order)
        graph, found = captured(comm, static)
        for i in range(layouts):
            static.fill(order)
            pools = static.pool, static.memory
            before = [x.clone() for x in pools]
            expected = [static().clone(), *(x.clone() for x in pools)]
            for x, old in zip(pools, before, strict=True):
                x.copy_(old)
            found.fill_(float("nan"))
            late(i, comm.rank, 20)
            graph.replay()
            different += not all(map(torch.equal, (found, *pools), expected))
        comm.barrier()
        comm.check()
    return different


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("rule", ["gated_delta_rule", "kda"])
def test_one_graph_for_100_layouts(run, rule, size):
    assert run(size, graph_case, rule, 100) == [0] * size


def other_case(group):
    """Return the exception after a replay in which rank 1 has another layout, at the latest in barrier(): rank 1 still
    sends its final states, NaN, so that rank 0's replay may end."""
    with allscan.Communicator(group, timeout=5) as comm:
        static = Static(comm, "kda", 300, 3)
        static.fill(random.Random(3))
        static.boundaries.copy_(torch.tensor([0, 200, 400, 500]))
        static.cut.copy_(300 * torch.arange(comm.size + 1))
        graph, _ = captured(comm, static)
        if comm.rank == 1:
            static.boundaries[1] = 100

        def replay():
            graph.replay()
            torch.cuda.synchronize()
            comm.check()
            comm.barrier()

        found = raised(replay)
        comm.resync()
        return found


def test_another_layout_in_a_replay(run, size=2):
    first, second = run(size, other_case)
    assert first and second, (first, second)
    assert second[0] == "AllScanOutOfStep" and first[0] in ("AllScanOutOfStep", "AllScanTimeout"), (first, second)
