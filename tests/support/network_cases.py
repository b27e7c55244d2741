"""Cases of a network that delays, stalls or loses puts, and of a rank that is gone; on GPUs or CPU ranks."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

import allscan

from . import network
from .values import late


def halo_case(group, epochs):
    with allscan.Communicator(group) as comm:
        for epoch in range(epochs):
            whole = torch.randn(comm.size, 2, 8, 300, generator=torch.Generator().manual_seed(epoch)).to(comm.device)
            late(epoch, comm.rank, 2)
            own = whole[comm.rank].clone().requires_grad_()
            before = allscan.halo(own, 3, comm=comm)
            assert torch.equal(before, whole[0][:, -3:] if comm.rank else torch.zeros_like(before))
            before.sum().backward()
            assert own.grad.sum().item() == (0 if comm.rank else own[:, -3:].numel())
    return True


def memory_of_heaps_case(group):
    """Return the memory of this rank's arena and of the mapped ones: {rank: ("host" or "gpu", GPU index)}."""
    with allscan.Communicator(group) as comm:
        heap, me = comm.memory.heap, comm.rank
        found = {me: network.memory_of(heap.local(heap.pes[me], 0, 16, torch.uint8).data_ptr())}
        for rank in set(range(comm.size)) - {me}:
            if heap.is_mapped(heap.pes[rank]):
                found[rank] = network.memory_of(heap.view(heap.pes[rank], 0, 16, torch.uint8).data_ptr())
    return found


def absent_case(group):
    """Time out while rank 0 does not call; then resync all ranks."""
    comm = allscan.Communicator(group, timeout=3.0)
    scan, found = allscan.AllScan(comm, (2, 4, 8)), None
    state = torch.ones(scan.shape, device=comm.device)
    if comm.rank:
        try:
            scan.scan(state)
            comm.streams.synchronize()
            comm.check()
        except allscan.AllScanTimeout as timeout:
            found = timeout.rank, timeout.neighbour
    dist.barrier(group)
    comm.resync()
    again = bool((scan.scan(state) == comm.rank).all())
    comm.close()
    return found, again


def memory_case(group, epochs):
    """Return (bytes allocated by torch, free on the device, free in the arena) after each ``epochs`` epochs."""
    with allscan.Communicator(group) as comm:
        scan, found = allscan.AllScan(comm, (4, 16, 32)), []
        state, out = torch.ones(scan.shape, device=comm.device), torch.zeros(scan.shape, device=comm.device)
        done = 0
        for many in epochs:
            for _ in range(many - done):
                scan.scan(state, 0.5, out=out)
            done = many
            comm.barrier()
            cuda = comm.device.type == "cuda"
            given = (torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]) if cuda else ()
            found.append((*given, comm.memory.heap.arena.free_bytes))
        return found


def stall_case(group, seconds):
    """Return (seconds from the stall's begin on rank 0 to the end of close(), puts held after it, whether the value
    arrived)."""
    comm = allscan.Communicator(group)
    scan = allscan.AllScan(comm, (2, 4, 8))
    state = torch.ones(scan.shape, device=comm.device)
    scan.scan(state)  # compiles
    comm.barrier()
    start = time.monotonic()
    if comm.rank == 0:
        network.behave("stall", int(seconds * 1e9))
    prev = scan.scan(3 * state)
    comm.close()
    return time.monotonic() - start, network.counts()["held"], bool((prev == 3 * comm.rank).all())


def lost_case(group):
    """Return rank 1's error if a scan of rank 0 is never delivered; then resync all ranks."""
    comm = allscan.Communicator(group, timeout=3.0)
    scan, found = allscan.AllScan(comm, (2, 4, 8)), None
    state = torch.ones(scan.shape, device=comm.device)
    scan.scan(state)
    comm.barrier()
    if comm.rank == 0:
        network.behave("never")
    dist.barrier(group)
    out = torch.zeros_like(state)
    try:
        scan.scan(state, out=out)
        comm.streams.synchronize()
        comm.check()
    except allscan.AllScanTimeout as timeout:
        found = timeout.rank, timeout.neighbour, bool(out.isnan().all())
    dist.barrier(group)
    network.behave("reorder", 200_000)
    comm.resync()
    again = bool((scan.scan(state) == comm.rank).all())
    comm.close()
    return found, again
