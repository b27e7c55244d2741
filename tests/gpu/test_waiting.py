"""A waiting kernel must not block others: NCCL overlapped with waiting kernels; middle ranks of a chain on one GPU."""

from __future__ import annotations

import itertools
import random
import statistics
import time

import pytest
import torch
import torch.distributed as dist
import triton
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import allscan
from allscan.reference import allscan_reference
from allscan.shmem_kernels.wait import backoff, clock_ns
from allscan.tools.ranks import Ranks, on_first
from bench import harness
from bench.baselines import windows
from bench.proof import Method, kernels, ran
from support.values import late, raised
from support.virtual import VirtualRanks

pytestmark = pytest.mark.gpu


def beside_nccl_case(group, how, mib, nccl_mib, symmetric=False):
    """Rank 0 waits in a kernel for rank 1, which first makes an all-reduce; rank 0 launches its part after the kernel.
    symmetric: instead, an all-gather by NCCL's kernels for symmetric memory."""
    with allscan.Communicator(group, timeout=8) as comm:
        H = int(mib * 16)
        device, generator = comm.device, torch.Generator("cuda").manual_seed(comm.rank)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, device=device)

        x = torch.ones(nccl_mib << 18, device=device)
        if how == "scan":
            state, decay = normal(H, 128, 128), torch.rand(H, 128, device=device) / 2 + 0.5
            scan = allscan.AllScan(comm, state.shape)

            def call():
                return scan.scan(state, decay, reverse=True)

        elif how == "transitions":
            state, dense, start = normal(H, 128, 128), normal(H, 128, 128) / 24, normal(H, 128, 128)

            def call():
                return allscan.allscan(state, comm=comm, transition=dense, initial_state=start, reverse=True)

        elif how == "halo":
            tokens = normal(1, 8, H << 12)

            def call():
                return allscan.halo(tokens, 4, comm=comm, reverse=True)

        else:  # the scan of the backward pass, between its other kernels
            leaves = [normal(1, 128, H, 128).requires_grad_() for _ in range(3)]
            g = torch.zeros(1, 128, H, 128, device=device)
            o, _ = allscan.zeco_gla(*leaves, g, comm=comm)

            def call():
                return torch.autograd.grad(o, leaves, torch.ones_like(o), retain_graph=True)[0]

        if symmetric:
            sent, gathered = windows(comm, nccl_mib << 18)

        def reduce():
            if symmetric:
                dist.all_gather_into_tensor(gathered.view(-1), sent, group=group)
            else:
                dist.all_reduce(x, group=group)

        call()
        if symmetric:
            ran("all-gather", kernels(reduce), ["ncclSymkDevKernel_AllGather"], ["scan_kernel"])
        reduce()
        comm.barrier()
        waits, reduces = torch.cuda.Stream(), torch.cuda.Stream()
        if comm.rank == 0:
            with torch.cuda.stream(waits):
                call()
            time.sleep(0.1)  # the kernel begins meanwhile, also where other processes share the GPU
            with torch.cuda.stream(reduces):
                reduce()
        else:
            time.sleep(0.2)
            with torch.cuda.stream(reduces):
                reduce()
            waits.wait_stream(reduces)
            with torch.cuda.stream(waits):
                call()
        torch.cuda.synchronize()
        comm.barrier()  # raises AllScanTimeout if NCCL found no free SM
        return True


@pytest.mark.parametrize(
    "how, mib",
    [
        *(("scan", mib) for mib in (0.25, 1, 2, 8, 32)),
        *itertools.product(("transitions", "halo", "zeco_gla"), (0.25, 32)),
    ],
)
def test_nccl_beside_a_kernel_that_waits(run, how, mib):
    for nccl_mib in (1, 64):
        assert all(run(2, beside_nccl_case, how, mib, nccl_mib))


@pytest.fixture(scope="module")
def of_64_programs():
    """Two ranks whose NCCL kernels for symmetric memory have 64 programs."""
    with harness.environment(harness.WITHOUT_MULTICAST | {"NCCL_SYM_CTAS": "64", "ALLSCAN_HEAP": "512M"}):
        made = Ranks(2, "cuda")
    with made as ranks:
        yield ranks


@pytest.mark.parametrize(
    "how, mib", [("scan", 0.25), ("scan", 2), ("scan", 8), ("scan", 32), ("zeco_gla", 0.25), ("zeco_gla", 32)]
)
def test_symmetric_kernels_of_nccl_beside_one_that_waits(of_64_programs, how, mib, size=2):
    for nccl_mib in (1, 8):
        answers = of_64_programs.run(on_first, size, beside_nccl_case, how, mib, nccl_mib, True, timeout=120)
        assert all(answers)


def ddp_case(group):
    """DistributedDataParallel overlaps its all-reduces with scans of stragglers."""
    with allscan.Communicator(group, timeout=8) as comm:
        torch.manual_seed(0)
        width, heads = 1024, 8
        layers = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(6)).to(comm.device)

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = layers

            def forward(self, x):
                for layer in self.layers:
                    q, k, v, g = (y.unflatten(-1, (heads, -1)) for y in layer(x).chunk(4, -1))
                    q, k = (nn.functional.normalize(y, dim=-1) for y in (q, k))
                    g = nn.functional.logsigmoid(g) / 1e4
                    x = x + 1e-2 * allscan.zeco_gla(q, k, v, g, comm=comm)[0].flatten(-2)
                return x

        model = DistributedDataParallel(Model(), process_group=group, bucket_cap_mb=8)
        x = torch.randn(1, 512, width, device=comm.device)
        losses = []
        for i in range(12):
            comm.step()
            late(i, comm.rank, 30)
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.detach())
            for p in model.parameters():
                p.grad = None
        comm.barrier()
        return bool(torch.stack(losses).isfinite().all())


def test_ddp_overlap_beside_stragglers(run, pool):
    assert all(run(pool.size, ddp_case))


def stepped_graph_case(group, replays, skips):
    """Replay step() and a scan from a CUDA graph; the last rank skips the scan of one step."""
    with allscan.Communicator(group, timeout=5) as comm:
        scan = allscan.AllScan(comm, (4, 16, 32))
        state, out = torch.zeros(4, 16, 32, device=comm.device), torch.zeros(4, 16, 32, device=comm.device)
        scan.scan(state, out=out)
        comm.step()
        comm.barrier()
        graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
        with torch.cuda.graph(graphs[0]):
            comm.step()
            scan.scan(state, out=out)
        with torch.cuda.graph(graphs[1]):
            comm.step()
        wrong = 0
        for i in range(1, replays + 1):
            state.fill_(float(i))
            skipped = skips and i == replays // 2 and comm.rank == comm.size - 1
            graphs[skipped].replay()
            if not skipped:
                wrong += ((out != i * comm.rank) & ~out.isnan()).any().int()
        torch.cuda.synchronize()
        found, text = raised(comm.check) or (None, "")
        told = "more than its host has made calls: in a replayed" in text
        comm.resync()
        state.fill_(3.0)
        graphs[0].replay()
        comm.barrier()
        return int(wrong), found, told, bool((out == 3 * comm.rank).all())


def test_steps_in_a_graph(run):
    """The time-out tells that the scan is none of the host's calls."""
    assert run(2, stepped_graph_case, 1000, False) == [(0, None, False, True)] * 2
    first, last = run(2, stepped_graph_case, 40, True)
    assert last == (0, "AllScanOutOfStep", False, True) and first == (0, "AllScanTimeout", True, True)


@pytest.mark.parametrize("protocol", ["sentinel", "signal"])
@pytest.mark.parametrize("decays", ["random", "0", "1", "mixed"])
def test_ranks_in_the_middle(decays, protocol):
    """4 ranks on one GPU, two of them in the middle: more tiles than programs, in any order, many times."""
    size, shape = 4, (8, 64, 128)
    ranks = VirtualRanks(size, shape, protocol=protocol, tile=(16, 128), programs=8)
    assert ranks.spec.num_tiles == 4 * ranks.programs
    generator, chance = torch.Generator("cuda").manual_seed(0), random.Random(0)
    for epoch in range(60):
        states = torch.randn(size, *shape, generator=generator, device="cuda")
        factors = torch.rand(size, *shape[:2], generator=generator, device="cuda")
        if decays in ("0", "1"):
            factors.fill_(float(decays))
        elif decays == "mixed":
            factors[:, ::2] = 0  # whole tiles
        reverse = epoch % 2 == 1
        outs = ranks.scan(states, factors, reverse=reverse, ranks=chance.sample(range(size), size))
        ranks.check()
        expected = allscan_reference(list(states), list(factors), reverse=reverse)
        for rank in range(size):
            assert (outs[rank] - expected[rank]).abs().max() < 1e-5, (epoch, rank)


@pytest.mark.alone
def test_nothing_waits_for_the_first_rank_through_decays_of_0():
    """With decays of 0 the last rank is done before the first has begun; with decays of 1 it waits until the
    time-out."""
    size, shape = 4, (8, 64, 128)
    for decay, done in ((0.0, True), (1.0, False)):
        ranks = VirtualRanks(size, shape, programs=8, timeout=1.0)
        states, factors = torch.ones(size, *shape, device="cuda"), torch.full((size, *shape[:2]), decay, device="cuda")
        outs = ranks.scan(states, factors, ranks=range(1, size), join=False)
        last = torch.cuda.Event()
        last.record(ranks.ranks[size - 1].stream)
        time.sleep(0.3)
        assert last.query() == done
        if done:
            ranks.scan(states, factors, ranks=[0])
        torch.cuda.synchronize()
        assert bool(ranks.faults()) != done and (outs[1:] == 1).all() == done


@triton.jit
def delay_kernel(ns):
    begin = clock_ns()
    while clock_ns() - begin < ns:
        backoff(1)


def straggler_backward_case(group, size, us, samples=60):
    """Return microseconds of a step on this rank, as a CUDA graph, with all ranks on time and with the last one late by
    ``us`` between forward and backward. A barrier before each step keeps the other ranks' previous steps out of its
    time."""
    with allscan.Communicator(harness.group_of(size)) as comm:
        barrier = harness.barrier_of(size)
        leaves, do = harness.inputs(16384, 16, 128, comm.device, comm.rank)

        def step(late):
            o, _ = allscan.zeco_gla(*leaves, comm=comm)
            if late and comm.rank == comm.size - 1:
                delay_kernel[(1,)](round(us * 1e3), num_warps=1)
            return torch.autograd.grad(o, leaves, do)

        step(True)
        comm.barrier()
        medians = []
        for late in (False, True):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                kept = step(late)
            events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(samples)]
            for begin, end in events:
                barrier()
                begin.record()
                graph.replay()
                end.record()
            comm.barrier()
            del kept
            medians.append(statistics.median(begin.elapsed_time(end) * 1e3 for begin, end in events[samples // 4 :]))
        return medians


@pytest.mark.alone
def test_backward_has_100_us_of_work_for_a_straggling_neighbour(run, pool, size=2):
    *others, last = run(pool.size, straggler_backward_case, pool.size, 100.0)
    print("on time, late:", *others, last)
    assert last[1] - last[0] > 80
    assert all(late - on_time < 15 for on_time, late in others), others


def proof_case(comm):
    """Return proofs of execution for All-Scan and for a baseline that runs All-Scan itself."""
    from bench.baselines import Baseline

    class Fraud(Baseline):
        """Runs All-Scan instead of a method of its own, as bench/baselines.py did from b79203f to f275caf."""

        def carry(self, *carried):
            from allscan.ops.carrier import AllScanCarrier

            AllScanCarrier(self.comm).carry(*carried)

    from bench.baselines import gla

    leaves, do = harness.inputs(256, 2, 64, comm.device)
    answers = []
    for carrier in (Baseline(comm, "all_gather"), Fraud(comm, "all_gather")):
        method = Method(lambda *x, c=carrier: gla(*x, carrier=c), comm, nccl=carrier.nccl)
        graph, *_ = harness.capture(leaves, do, method, True)
        before = method.epochs()
        for _ in range(3):
            graph.replay()
        try:
            answers.append(method.prove("all_gather", before, 3, 1, True, graph.replay))
        except AssertionError as problem:
            answers.append(f"rejected: {problem}")
    comm.barrier()
    return answers


def test_a_row_is_of_the_method_that_it_names(run):
    for honest, fraud in run(2, proof_case):
        assert "AllGather" in honest and "0 scans of All-Scan" in honest, honest
        assert fraud.startswith("rejected") and "All-Scan made (3, 3) scans" in fraud, fraud
