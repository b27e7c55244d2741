"""Number of Python calls of the package in a warm call, the files of these functions, and returns to a file. The path
is that of a host with a GPU, simulated without one: kernels count as compiled, a repeated plan as one CUDA graph, and
launches do nothing. Rank 0 of 2."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F

import allscan
from support.walk import Steps, as_on_a_gpu

pytestmark = pytest.mark.cpu

# calls, files, returns
BOUNDS = {
    "allscan": (12, 5, 4),
    "allscan with gradients": (18, 9, 6),
    "backward of allscan": (15, 6, 5),
    "zeco_gla": (12, 7, 3),
    "zeco_gla with gradients": (16, 9, 5),
    "backward of zeco_gla": (16, 9, 4),
    "zeco_kda": (16, 10, 3),
    "zeco_kda with gradients": (20, 12, 5),
    "backward of zeco_kda": (19, 11, 4),
}


def calls_of(comm):
    """Return {name: call}; a call returns the inputs of backward, or None."""
    state, decay = torch.randn(2, 16, 16), torch.rand(2, 16)
    q = torch.randn(1, 64, 2, 16)
    g = F.logsigmoid(torch.randn(1, 64, 2, 16))

    def scan(*tensors):
        return allscan.allscan(*tensors, comm=comm)

    def gla(*tensors):
        return allscan.zeco_gla(*tensors, comm=comm)[0]

    def kda(*tensors):
        return allscan.zeco_kda(*tensors, comm=comm, chunk="allscan")[0]

    wanted, beta = (
        [[x.clone().requires_grad_() for x in some] for some in ((state, decay), (q, q, q, g))],
        g[..., 0].exp(),
    )
    of_delta = [x.clone().requires_grad_() for x in (q, q, q, g, beta)]
    return {
        "allscan": (scan, (state, decay)),
        "allscan with gradients": (scan, wanted[0]),
        "zeco_gla": (gla, (q, q, q, g)),
        "zeco_gla with gradients": (gla, wanted[1]),
        "zeco_kda": (kda, (q, q, q, g, beta)),
        "zeco_kda with gradients": (kda, of_delta),
    }


def walk_case(name):
    comm = allscan.Communicator()
    call, tensors = calls_of(comm)[name]

    def both():
        found = call(*tensors)
        if found.requires_grad:
            found.backward(torch.ones_like(found))

    for _ in range(3):
        both()
    comm.barrier()
    if comm.rank:
        return None
    as_on_a_gpu(comm)
    both()
    with Steps() as forward:
        found = call(*tensors)
    steps = {name: forward}
    if found.requires_grad:
        ones = torch.ones_like(found)
        with Steps() as steps["backward of " + name.split()[0]]:
            found.backward(ones)
    return {name: (some.walk(), some.names) for name, some in steps.items()}


@pytest.mark.parametrize("with_gradients", ["", " with gradients"])
@pytest.mark.parametrize("call", ["allscan", "zeco_gla", "zeco_kda"])
def test_warm_calls(fresh, call, with_gradients):
    walks, _ = fresh(2).run(walk_case, call + with_gradients)
    for part, (walk, names) in walks.items():
        print(part, walk, *names, sep="\n  ")
        assert all(a <= b for a, b in zip(walk, BOUNDS[part], strict=True)), (part, walk, BOUNDS[part])


def first_case():
    """Return (functions called in the first call, exchanges, milliseconds) on this rank."""
    comm, exchanges = allscan.Communicator(), []
    exchange = comm.order.store_exchange.exchange
    comm.order.store_exchange.exchange = lambda *args, **how: exchanges.append(args) or exchange(*args, **how)
    state, decay = torch.randn(2, 16, 16), torch.rand(2, 16)
    comm.barrier()
    exchanges.clear()
    start = time.perf_counter()
    with Steps() as steps:
        allscan.allscan(state, decay, comm=comm)
    ms = 1e3 * (time.perf_counter() - start)
    interpreted = tuple(name for name in set(steps.names) if name.startswith(tuple(INTERPRETED)))
    return sorted(set(steps.names) - set(interpreted)), len(exchanges), ms


INTERPRETED = "fast_ corrections nvshmem_device builtin wait.py links.py channel.py scan.py tiles.py".split()


def test_a_first_call(fresh):
    names, exchanges, ms = fresh(2).run(first_case)[0]
    print(len(names), exchanges, ms, *names, sep="\n  ")
    assert exchanges <= 2 and len(names) <= 60
