"""Number of Python calls of the package in a warm call, the files of these functions, and returns to a file. The path
is that of a host with a GPU, simulated without one: kernels count as compiled, a repeated plan as one CUDA graph, and
launches do nothing. Rank 0 of 2."""

from __future__ import annotations

import gc
import os
import sys
import time

import pytest
import torch
import torch.nn.functional as F

import allscan
from allscan.launch import compiled_kernel, graph_cache, streams
from allscan.scan import launcher
from allscan.tokens import packing

pytestmark = pytest.mark.cpu

# calls, files, returns
BOUNDS = {
    "allscan": (12, 5, 4),
    "allscan with gradients": (18, 10, 5),
    "backward of allscan": (15, 6, 5),
    "zeco_gla": (12, 9, 2),
    "zeco_gla with gradients": (16, 11, 4),
    "backward of zeco_gla": (16, 10, 3),
    "zeco_kda": (18, 12, 3),
    "zeco_kda with gradients": (22, 14, 5),
    "backward of zeco_kda": (19, 12, 3),
}
ROOT = os.path.dirname(os.path.realpath(allscan.__file__))
FOLDERS = tuple(os.path.realpath(os.path.join(ROOT, name)) + os.sep for name in (".", "bindings", "shmem_kernels"))


class Steps:
    """Records the package's functions called inside of ``with``, in order. Comprehensions do not count."""

    def __init__(self):
        self.files, self.names = [], []

    def __enter__(self):
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _event(self, frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(FOLDERS) and not code.co_name.endswith("comp>"):
            if code.co_name != "<genexpr>":
                self.files.append(os.path.basename(code.co_filename))
                self.names.append(f"{self.files[-1]}:{code.co_name}")

    def walk(self):
        stays = [a for a, b in zip(self.files, [None, *self.files]) if a != b]
        return len(self.files), len(set(stays)), len(stays) - len(set(stays))


class Always(dict):
    """Returns a graph for every plan."""

    def pop(self, key, default=None):
        return self.kept


def as_on_a_gpu(comm):
    """Disable all later launches of this rank."""

    def nothing(*_):
        return None

    for found in gc.get_objects():
        if issubclass(type(found), compiled_kernel.Launch):
            found.ready, found.at = True, nothing
        elif issubclass(type(found), packing.Tables):
            found._streams = {0}  # marked as read on that stream
    for module in (launcher, graph_cache, streams, compiled_kernel, packing):
        for name, value in {"capturing": False, "current_stream_of": 0, "current_device": -1}.items():
            if hasattr(module, name):
                setattr(module, name, lambda *_, value=value: value)
    comm.graphs._graphs = Always()
    comm.graphs._graphs.kept = graph_cache._CachedGraph(type("Graph", (), {"launch": nothing})(), 0)
    comm.streams.cuda, comm.streams.last_number = True, 0


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
    walks, _ = fresh(2).run(walk_case, call + with_gradients, timeout=100)
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
    names, exchanges, ms = fresh(2).run(first_case, timeout=100)[0]
    print(len(names), exchanges, ms, *names, sep="\n  ")
    assert exchanges <= 2 and len(names) <= 60
