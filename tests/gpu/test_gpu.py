"""Tests that need GPUs: long runs, ranks far ahead, CUDA graphs, NVSHMEM's own paths. ``make test-gpu``."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
import triton.language as tl

import allscan
from allscan.bindings import nvshmem_device as nvshmem
from allscan.comm import heap as runtime
from allscan.reference import allscan_reference, gla_reference
from allscan.tools.ranks import Ranks
from support.faults import poisoned_case
from support.gla import GLACase, check, gates, gla_case
from support.long_runs import graph_case, long_case, zigzag_case
from support.scans import ScanCase, error_of, scan_case
from support.values import captured, error, inputs, late, place, relative

pytestmark = pytest.mark.gpu
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SIZES = [2, 4]


@pytest.mark.parametrize("size", SIZES)
def test_10000_epochs_of_zigzag(run, size):
    assert max(run(size, zigzag_case, 10_000, size - 1)) < 1e-5


@pytest.mark.parametrize("size", SIZES)
def test_10000_epochs_with_a_straggler(run, size):
    assert max(run(size, long_case, 10_000, "auto", 3, size - 1)) < 1e-5


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("protocol", ["sentinel", "signal", "put"])
@pytest.mark.parametrize("kind", ["transitions", "hops"])
@pytest.mark.kernels
def test_2000_epochs_of(run, size, protocol, kind):
    assert max(run(size, long_case, 2_000, protocol, depth=3, straggler=size - 1, kind=kind)) < 1e-5


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("protocol", ["sentinel", "signal", "put"])
@pytest.mark.kernels
def test_protocols_and_depths(run, size, depth, protocol):
    assert max(run(size, long_case, 300, protocol, depth, depth % size)) < 1e-5


@pytest.mark.parametrize("size", SIZES)
def test_put_in_both_directions_with_special_values(run, size):
    for reverse in (False, True):
        case = ScanCase((3, 5, 7), (3, 5), reverse, protocol="put", initial=True, epochs=6, special=True, most_ms=3)
        assert max(run(size, scan_case, case)) < 1e-6


def full_size_case(comm, protocol, depth):
    """Scan 2 MiB states without barriers, so that ranks wait for credits. With signals, several warps a tile."""
    scan = allscan.AllScan(comm, (32, 128, 128), protocol=protocol, depth=depth)
    generator = torch.Generator(comm.device).manual_seed(0)
    worst = torch.zeros((), device=comm.device, dtype=torch.float64)
    for _ in range(20):
        states = torch.randn(comm.size, *scan.shape, generator=generator, device=comm.device)
        decays = torch.rand(comm.size, *scan.shape[:-1], generator=generator, device=comm.device)
        outs = [torch.full(scan.shape, float("nan"), device=comm.device) for _ in range(20)]
        for i, out in enumerate(outs):
            scan.scan(states[comm.rank], decays[comm.rank], reverse=bool(i % 2), out=out)
        for reverse in (False, True):
            expected = allscan_reference(list(states), list(decays), reverse=reverse)[comm.rank]
            for out in outs[reverse::2]:
                worst = torch.maximum(worst, (out - expected).abs().max().nan_to_num(nan=1e30))
    comm.barrier()
    return worst.item()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("protocol", ["sentinel", "signal", "put"])
@pytest.mark.parametrize("depth", [1, 3])
def test_full_size_back_to_back(run, size, protocol, depth):
    assert max(run(size, full_size_case, protocol, depth)) < 1e-4


def ahead_case(comm, protocol):
    """All ranks but the last launch 100 scans at once while the last sleeps: credits must hold them back."""
    shape = (8, 32, 64)
    scan = allscan.AllScan(comm, shape, protocol=protocol)
    count = 100
    generator = torch.Generator(comm.device).manual_seed(0)
    states = torch.randn(count, comm.size, *shape, generator=generator, device=comm.device)
    outs = torch.full((count, *shape), float("nan"), device=comm.device)
    scan.scan(states[0, comm.rank], 0.5)  # compiles
    comm.barrier()
    if comm.rank == comm.size - 1:
        time.sleep(1.0)
    start = time.monotonic()
    for i in range(count):
        scan.scan(states[i, comm.rank], 0.5, out=outs[i])
    launched = time.monotonic() - start
    torch.cuda.synchronize()
    waited = time.monotonic() - start
    expected = torch.zeros(count, *shape, device=comm.device, dtype=torch.float64)
    for p in range(comm.rank):
        expected = 0.5 * expected + states[:, p]
    return error(outs, expected), launched, waited


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("protocol", ["sentinel", "signal", "put"])
@pytest.mark.kernels
def test_100_scans_ahead(run, size, protocol):
    answers = run(size, ahead_case, protocol)
    assert max(worst for worst, _, _ in answers) < 1e-6
    assert answers[0][2] > 0.5 > answers[0][1]  # rank 0 launched all at once, and its GPU waited for the sleeping rank


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["decays", "transitions"])
@pytest.mark.kernels
def test_1000_graph_replays(run, size, kind):
    assert max(run(size, graph_case, 1000, kind)) < 1e-4


def halo_graph_case(comm, replays):
    """Replay a causal convolution's halo and its gradient from a CUDA graph."""
    generator = torch.Generator(comm.device).manual_seed(0)
    x, y = (torch.zeros(1, 8, 2048, device=comm.device, requires_grad=True) for _ in range(2))
    weight = torch.zeros(1, 3, 4096, device=comm.device)

    def both():
        before = torch.cat(allscan.halo((x, y), 3, comm=comm), -1)
        return before.detach(), *torch.autograd.grad((before * weight).sum(), (x, y))

    graph, (before, dx, dy) = captured(comm, both)
    worst = torch.zeros((), device=comm.device)
    nothing = torch.zeros_like(weight)
    for _ in range(replays):
        wholes = torch.randn(comm.size, 1, 8, 4096, generator=generator, device=comm.device)
        weights = torch.randn(comm.size, 1, 3, 4096, generator=generator, device=comm.device)
        with torch.no_grad():
            x.copy_(wholes[comm.rank, ..., :2048])
            y.copy_(wholes[comm.rank, ..., 2048:])
            weight.copy_(weights[comm.rank])
        graph.replay()
        wanted = wholes[comm.rank - 1][:, -3:] if comm.rank else nothing
        gradient = weights[comm.rank + 1] if comm.rank + 1 < comm.size else nothing
        found = torch.cat([dx, dy], -1)
        worst = torch.maximum(worst, (before - wanted).abs().max().nan_to_num(nan=1e30))
        worst = torch.maximum(worst, (found[:, -3:] - gradient).abs().max().nan_to_num(nan=1e30))
        worst = torch.maximum(worst, found[:, :-3].abs().max().nan_to_num(nan=1e30))
    comm.barrier()
    return worst.item()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.kernels
def test_1000_graph_replays_of_halo(run, size):
    assert max(run(size, halo_graph_case, 1000)) == 0


def gla_graph_case(comm, packed, mixed, layout, recompute):
    """Replay zeco_gla forward and backward in one CUDA graph on fresh inputs, and twice on the same.

    packed: sequences over several ranks; mixed: one link of the chain requires NVSHMEM.
    """
    if mixed:
        comm.topology.mapped_links[1] = False
    B, T, H, K, V = 1, 128, 2, 64, 64
    cuts = [0, 50, 50, 51, 190, T * comm.size] if packed else [0, T * comm.size]
    lengths = torch.tensor(cuts) if packed else None
    leaves = [torch.zeros(B, T, H, w, device=comm.device, requires_grad=True) for w in (K, K, V, K)]
    weights = torch.zeros(B, T, H, V, device=comm.device)

    def step():
        for leaf in leaves:
            leaf.grad = None
        o, _ = allscan.zeco_gla(*leaves, comm=comm, cu_seqlens=lengths, layout=layout, recompute=recompute)
        (o * weights).sum().backward()
        return o

    graph, o = captured(comm, step)
    worst = 0.0
    for i in range(5):
        generator = torch.Generator().manual_seed(i)
        whole = [torch.randn(B, T * comm.size, H, w, generator=generator) for w in (K, K, V)]
        whole += [gates("mild", (B, T * comm.size, H, K), generator)]
        whole += [torch.randn(B, T * comm.size, H, V, generator=generator)]
        reference = [x.double().to(comm.device).requires_grad_() for x in whole]
        expected, _ = gla_reference(*reference[:4], cu_seqlens=cuts)
        (expected * reference[4]).sum().backward()
        mine = place(comm, [T] * comm.size, layout == "zigzag")
        with torch.no_grad():
            for leaf, x in zip((*leaves, weights), whole):
                leaf.copy_(x[:, mine])
        late(i, comm.rank, 5)
        graph.replay()
        worst = max(worst, relative(o, expected[:, mine]))
        for leaf, x in zip(leaves, reference):
            worst = max(worst, relative(leaf.grad, x.grad[:, mine]))
    before = [x.clone() for x in (o, *(leaf.grad for leaf in leaves))]
    graph.replay()
    comm.barrier()
    same = all(torch.equal(a, b) for a, b in zip(before, (o, *(leaf.grad for leaf in leaves))))
    return worst, same


@pytest.mark.parametrize(
    "size, packed, mixed, layout, recompute",
    [
        (2, False, False, "contiguous", True),
        (2, True, False, "contiguous", False),
        (4, False, False, "contiguous", True),
        (4, True, False, "contiguous", True),
        (4, False, True, "contiguous", True),
        (2, False, False, "zigzag", True),
        (2, True, False, "zigzag", True),
        (4, True, False, "zigzag", False),
    ],
)
@pytest.mark.kernels
def test_zeco_gla_in_a_graph(run, size, packed, mixed, layout, recompute):
    for worst, same in run(size, gla_graph_case, packed, mixed, layout, recompute):
        assert worst < 1e-5 and same


F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "B, T, H, D, kind, dtype",
    [
        (1, 64, 1, 64, "mild", F16),
        (2, 1024, 4, 60, "mild", F16),
        (2, 1024, 8, 128, "mild", BF16),
        (2, 1024, 8, 128, "strong", BF16),
        (8, 2048, 68, 32, "spots", BF16),  # more chunks than one step of the scan for strong decay reads
        (1, 1024, 2, 128, "mixed", F32),
        (4, 2048, 8, 64, "mild", BF16),
        (1, 512, 4, 256, "mild", BF16),
        (1, 512, 2, 256, "mixed", BF16),
        (1, 512, 2, 320, "mild", BF16),
    ],
)
@pytest.mark.kernels
def test_zeco_gla_at_size(run, size, B, T, H, D, kind, dtype):
    check(run(size, gla_case, GLACase([T // size] * size, B=B, H=H, K=D, V=D, gates=kind, dtype=dtype)), dtype)


@pytest.mark.parametrize(
    "size, H, D, lengths",
    [
        (2, 4, 64, [3000, 4000, 3240]),
        (4, 4, 128, [7000, 3240]),
        (4, 4, 128, [700, 2, 800, 1000, 1, 1, 0, 3000, 500, 4000, 236]),
    ],
)
@pytest.mark.kernels
def test_packed_at_size(run, size, H, D, lengths):
    """Sequences span ranks and ranks span sequences; 10,240 tokens in all."""
    edges = [0]
    for length in lengths:
        edges.append(edges[-1] + length)
    check(run(size, gla_case, GLACase([edges[-1] // size] * size, H=H, K=D, V=D, dtype=BF16, lengths=edges)), BF16)


@nvshmem.jit
def effects_kernel(p_words, p_data, p_out, peer):
    """Call every function and constant. p_words: int64 [8], p_data: float32 [4, 128], both symmetric."""
    i = tl.arange(0, 128)
    tl.store(p_out, nvshmem.my_pe())
    tl.store(p_out + 1, nvshmem.n_pes())
    tl.store(p_out + 2, nvshmem.remote_ptr(p_words, peer))
    tl.store(p_data + i, (i + 1000 * nvshmem.my_pe()).to(tl.float32))  # this PE's values
    tl.debug_barrier()
    nvshmem.barrier_all_block()
    # word 0: 77, set to 5; word 1: 77 + 5
    nvshmem.putmem_signal_block(p_data + 128, p_data, 512, p_words, 5, nvshmem.SIGNAL_SET, peer)
    nvshmem.putmem_signal_nbi_block(p_data + 256, p_data, 512, p_words + 1, 5, nvshmem.SIGNAL_ADD, peer)
    tl.store(p_out + 3, nvshmem.signal_wait_until(p_words, nvshmem.CMP_EQ, 5).to(tl.int64))
    tl.store(p_out + 4, nvshmem.signal_wait_until(p_words + 1, nvshmem.CMP_GE, 82).to(tl.int64))
    tl.store(p_out + 5, nvshmem.signal_wait_until(p_words, nvshmem.CMP_NE, 77).to(tl.int64))
    tl.store(p_out + 6, nvshmem.signal_wait_until(p_words, nvshmem.CMP_LT, 6).to(tl.int64))
    tl.store(p_out + 7, nvshmem.signal_wait_until(p_words, nvshmem.CMP_LE, 5).to(tl.int64))
    tl.store(p_out + 8, nvshmem.signal_wait_until(p_words + 1, nvshmem.CMP_GT, 81).to(tl.int64))
    nvshmem.quiet()
    nvshmem.barrier_all_block()
    nvshmem.getmem_block(p_data + 384, p_data, 512, peer)
    tl.debug_barrier()
    nvshmem.putmem_block(p_words + 3, p_out, 8, peer)  # this PE's number, by a plain put
    nvshmem.putmem_nbi_block(p_words + 4, p_out, 8, peer)
    nvshmem.getmem_nbi_block(p_words + 5, p_words + 6, 8, peer)
    nvshmem.fence()
    nvshmem.signal_op(p_words + 2, 9, nvshmem.SIGNAL_SET, peer)
    nvshmem.quiet()
    tl.store(p_out + 9, nvshmem.signal_wait_until(p_words + 2, nvshmem.CMP_GE, 9).to(tl.int64))
    nvshmem.sync_all_block()


def effects_case(group):
    """Check the effects on all PEs of the job; the memory is a block of the arena."""

    heap = runtime.symmetric_heap()
    comm = allscan.Communicator(group)
    offset = comm.memory.alloc(8192)
    assert len(set(comm.order.exchange(offset, "test"))) == 1, "the test wants equal offsets"
    me, peer = heap.pes[comm.rank], heap.pes[(comm.rank + 1) % comm.size]
    before = heap.pes[(comm.rank - 1) % comm.size]
    words = heap.local(me, offset, 8, torch.int64)
    data = heap.local(me, offset + 4096, 512, torch.float32)
    words.copy_(torch.tensor([77, 77, 0, -1, -1, -1, 60 + me, 0]))
    data.fill_(float("nan"))
    out = torch.full((16,), -1, dtype=torch.int64, device=comm.device)
    comm.barrier()
    effects_kernel[(1,)](words, data, out, peer, num_warps=4)
    comm.barrier()
    got = out.tolist()
    assert got[:2] == [me, comm.size] and got[2] != 0
    assert got[3:10] == [5, 82, 5, 5, 5, 82, 9], got
    index = torch.arange(128, device=comm.device)
    for row, pe in enumerate((me, before, before, peer)):
        assert torch.equal(data[row * 128 : row * 128 + 128], (index + 1000 * pe).float()), (row, pe)
    assert words.tolist()[:6] == [5, 82, 9, before, before, 60 + peer]
    comm.close()
    return True


def test_nvshmem_functions_and_constants_by_effect(run, pool, size=2):
    assert all(run(pool.size, effects_case))


def quick_case(protocol="auto", epoch=1):
    with allscan.Communicator() as comm:
        scan = allscan.AllScan(comm, (2, 8, 16), protocol=protocol)
        return error_of(comm, scan.scan, scan.shape, epoch)


def test_ranks_that_share_gpus(monkeypatch):
    monkeypatch.setenv("ALLSCAN_TRANSPORT", "ipc")
    with Ranks(torch.cuda.device_count() + 1, "cuda") as ranks:
        for epoch in range(20):
            assert max(ranks.run(quick_case, "auto", epoch)) < 1e-6
        with pytest.raises(RuntimeError, match="requires NVSHMEM"):
            ranks.run(quick_case, "put")


def shared_case():
    """NVSHMEM is initialised before All-Scan: it is shared, and usable after finalize()."""
    import numpy as np
    import nvshmem.core
    from cuda.core import Device

    rank, size = dist.get_rank(), dist.get_world_size()
    device = Device(torch.cuda.current_device())
    device.set_current()
    uid = nvshmem.core.get_unique_id(empty=rank != 0)
    answer = [uid._data.view(np.int8).copy()]
    dist.broadcast_object_list(answer, src=0)
    uid._data.view(np.int8)[...] = answer[0]
    nvshmem.core.init(device=device, uid=uid, rank=rank, nranks=size, initializer_method="uid")
    worst = quick_case()
    allscan.finalize()
    tensor = nvshmem.core.tensor((16,), dtype=torch.float32)
    tensor.fill_(1.0)
    nvshmem.core.free_tensor(tensor)
    nvshmem.core.finalize()
    return worst


def finalize_case():
    """Each cycle has its own NVSHMEM and arena, and uses kernels linked in the first."""
    worst, protocol = [], "auto" if os.environ.get("ALLSCAN_TRANSPORT") == "ipc" else "put"
    for epoch, heap_bytes in enumerate((64 << 20, 128 << 20)):
        allscan.init(heap_bytes)
        worst.append(quick_case(protocol, epoch))
        allscan.finalize()
    return max(worst)


def test_gloo_as_default_back_end_and_finalize(size=2):
    with Ranks(size, "cuda", "gloo") as ranks:
        assert max(ranks.run(finalize_case)) < 1e-6


def ended_job_case():
    """torch.distributed ends with a communicator open: finalize() waits for no rank, present or not."""
    comm, rank = allscan.Communicator(), dist.get_rank()
    allscan.allscan(torch.ones(1, 16, device=comm.device), comm=comm)
    comm.barrier()
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    if rank == 0:
        time.sleep(3.0)  # NVSHMEM's collectives would keep rank 1 waiting for as long
    start = time.monotonic()
    with pytest.warns(UserWarning, match="closed without the other ranks") as warned:
        allscan.finalize()
    seconds = time.monotonic() - start
    dist.init_process_group("gloo", store=dist.PrefixStore("second", store), rank=rank, world_size=2)
    texts = " ".join(str(w.message) for w in warned)
    try:
        with allscan.Communicator() as new:
            found = allscan.allscan(torch.ones(1, 16, device=new.device), comm=new).sum().item()
    except RuntimeError as problem:
        found = str(problem)
    return comm.closed, seconds, texts, found


def test_a_process_group_that_ends_before_its_communicator(fresh, size=2):
    for rank, (closed, seconds, texts, found) in enumerate(fresh(size).run(ended_job_case)):
        assert closed and seconds < 2 and "is closed without the other ranks" in texts, (closed, seconds, texts)
        if os.environ.get("ALLSCAN_TRANSPORT") == "ipc":
            assert found == 16.0 * rank
        else:
            assert "has not finalized NVSHMEM" in texts and "ranks [0, 1] need a new process" in found, (texts, found)


def test_nvshmem_of_somebody_else_is_shared(fresh):
    assert max(fresh(2).run(shared_case)) < 1e-6


def test_a_wait_on_nvshmem_is_bounded_too(fresh):
    assert fresh(2).run(poisoned_case, 0, "put") == [None, True]


def mixed_case(group):
    """Run a chain as over two nodes: ranks 1 and 2 do not map each other, so that their link requires NVSHMEM."""
    comm = allscan.Communicator(group)
    comm.topology.mapped_links[1] = False
    scan = allscan.AllScan(comm, (4, 16, 32))
    kinds = [scan.channel().RECV.value, scan.channel().SEND.value]
    worst = 0.0
    for epoch in range(40):
        for reverse in (False, True):
            late(epoch, comm.rank, 3)
            worst = max(worst, error_of(comm, scan.scan, scan.shape, epoch, reverse))
    comm.close()
    return worst, kinds


def test_a_chain_of_both_kinds_of_links(run, size=4):
    answers = run(size, mixed_case)
    none, sentinel, put = -1, 0, 2
    assert [kinds for _, kinds in answers] == [[none, sentinel], [sentinel, put], [put, sentinel], [sentinel, none]]
    assert max(worst for worst, _ in answers) < 1e-6


def test_streams_are_joined(run):
    assert max(run(2, streams_case)) < 1e-6


def streams_case(comm):
    """Calls on changing streams run in the order of the calls."""
    scan = allscan.AllScan(comm, (4, 16, 32))
    streams, chance = [torch.cuda.Stream() for _ in range(3)], random.Random(comm.rank)
    given = [inputs(comm, scan.shape, (4, 16), epoch) for epoch in range(60)]
    own = [[x[comm.rank].to(comm.device) for x in both] for both in given]
    outs = [torch.empty(scan.shape, device=comm.device) for _ in given]
    torch.cuda.synchronize()
    for epoch, (state, decay) in enumerate(own):  # the host does not wait between launches
        with torch.cuda.stream(streams[epoch % 3]):
            torch.cuda._sleep(chance.randrange(200_000))
            scan.scan(state, decay, out=outs[epoch])
    comm.barrier()
    return max(error(out, allscan_reference(*both)[comm.rank]) for out, both in zip(outs, given, strict=True))


ENDS = """
import gc, weakref, torch, allscan
from allscan.launch.streams import SCANS
streams = []
for _ in range(2):
    with allscan.Communicator() as comm:
        x = torch.ones(1, 130, 2, 16, device="cuda", requires_grad=True)
        allscan.zeco_gla(x, x, x, -x, comm=comm)[0].sum().backward()
        streams.append(comm.streams.own(SCANS).cuda_stream)
        assert not weakref.getweakrefcount(comm.streams.own(SCANS))
    del comm
    gc.collect()
assert streams[0] == streams[1], streams
"""


def test_a_process_ends_well():
    """Processes that freed a communicator's stream before their end crashed (segmentation fault) through a weak
    reference: see streams._PrivateStream. The next communicator has the last one's stream. Streams that live to the
    end are deleted after the module's names."""
    done = subprocess.run([sys.executable, "-c", ENDS], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    assert "Exception ignored" not in done.stderr, done.stderr[-2000:]
