"""Alternatives to All-Scan, as fast as we can build them: LASP-2's all-gather and LASP-1's ring, alone and as the
communication of the GLA operator, with the local kernels of zeco_gla."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import allscan
from allscan.launch.streams import SCANS
from allscan.ops.carrier import record_call, register
from allscan.ops.gla import GLA
from allscan.ops.operator import Asked


@triton.jit
def fold_kernel(
    p_states, p_decays, p_out, numel, step, decays_step, COUNT: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr
):
    """The exclusive scan for a rank with COUNT ranks before it, in one pass over their gathered states and decays.
    These are ``step`` and ``decays_step`` words apart, the farthest rank first."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < numel
    carry = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(COUNT):
        decay = tl.load(p_decays + i * decays_step + offsets // V, mask=inside, other=0.0)
        carry = decay * carry + tl.load(p_states + i * step + offsets, mask=inside, other=0.0)
    tl.store(p_out + offsets, carry, mask=inside)


class AllGather:
    """LASP-2: gather all states and decays (one coalesced NCCL call), then fold those of lower ranks.

    fused: fold with one kernel of this file, else with torch's operators, as a user would.
    """

    def __init__(self, comm, state, decay, fused=True, reverse=False, out=None):
        self.fused, self.reverse = fused, reverse
        self.comm, self.state, self.decay = comm, state, decay
        self.out = torch.empty_like(state) if out is None else out
        self.states, self.decays = state.new_empty(comm.size, *state.shape), decay.new_empty(comm.size, *decay.shape)

    def gather(self):
        group = self.comm.group
        if self.state.device.type == "cpu":
            dist.all_gather(list(self.states), self.state, group=group)
            dist.all_gather(list(self.decays), self.decay, group=group)
            return
        with dist._coalescing_manager(group, device=self.state.device, async_ops=False):
            dist.all_gather_into_tensor(self.states, self.state, group=group)
            dist.all_gather_into_tensor(self.decays, self.decay, group=group)

    def __call__(self):
        self.gather()
        size, rank = self.comm.size, self.comm.rank
        before = range(size - 1, rank, -1) if self.reverse else range(rank)
        if not self.fused:
            self.out.zero_()
            for p in before:
                state, decay = self.states[p].view_as(self.out), self.decays[p].view_as(self.decay)
                torch.addcmul(state, self.out, decay[..., None], out=self.out)
            return self.out
        numel, block = self.state.numel(), 1024
        first = before[0] if before else 0
        fold_kernel[(triton.cdiv(numel, block),)](
            self.states[first],
            self.decays[first],
            self.out,
            numel,
            before.step * self.states.stride(0),
            before.step * self.decays.stride(0),
            COUNT=len(before),
            V=self.state.shape[-1],
            BLOCK=block,
        )
        return self.out


class WindowAllGather(AllGather):
    """LASP-2 with NCCL's kernels for symmetric memory: state and decay are produced in one window, and gathered by one
    call into another."""

    def __init__(self, comm, state, decay, fused=True, reverse=False, out=None):
        super().__init__(comm, state, decay, fused, reverse, out)
        self.sent, self.gathered = windows(comm, state.numel() + decay.numel())
        torch.cat([state.flatten(), decay.flatten()], out=self.sent)
        self.states, self.decays = self.gathered.split([state.numel(), decay.numel()], 1)

    def gather(self):
        dist.all_gather_into_tensor(self.gathered.view(-1), self.sent, group=self.comm.group)


_windows: dict = {}


def windows(comm, words):
    """Return (float32 [words], float32 [ranks, words]), registered with NCCL as symmetric memory. Collective."""
    key = comm.group, words
    if key not in _windows:
        backend = comm.group._get_backend(comm.device)
        dist.barrier(comm.group)  # creates NCCL's communicator
        pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            made = [torch.zeros(n, words, device=comm.device) for n in (1, comm.size)]
        backend.register_mem_pool(pool, symm=True)
        _windows[key] = pool, made[0][0], made[1]
    return _windows[key][1:]


class LowContention(AllGather):
    """LASP-2 with PyTorch's all-gather by the GPU's copy engines, from its symmetric memory."""

    def __init__(self, comm, state, decay, fused=True, reverse=False, out=None):
        super().__init__(comm, state, decay, fused, reverse, out)
        (self.sent, _), _ = symmetric(comm, state.numel() + decay.numel())
        torch.cat([state.flatten(), decay.flatten()], out=self.sent)

    def gather(self):
        gathered = torch.ops.symm_mem._low_contention_all_gather(self.sent, self.comm.group.group_name)
        gathered = torch.ops._c10d_functional.wait_tensor(gathered).view(self.comm.size, -1)
        self.states, self.decays = gathered.split([self.state.numel(), self.decay.numel()], 1)


class Pull:
    """A manual implementation with today's tools: states and decays in PyTorch's symmetric memory, its barrier, and one
    kernel that reads and folds those of lower ranks. Two alternating buffers, so that one barrier is enough: when all
    ranks have reached the next barrier, all have read this buffer."""

    def __init__(self, comm, state, decay, reverse=False, out=None):
        self.comm, self.state, self.decay, self.reverse = comm, state, decay, reverse
        self.out = torch.empty_like(state) if out is None else out
        self.buffers = [symmetric(comm, state.numel() + decay.numel(), turn) for turn in range(2)]
        self.turn = 0
        for (own, _), _ in self.buffers:
            torch.cat([state.flatten(), decay.flatten()], out=own)

    def __call__(self):
        self.turn = 1 - self.turn
        (_, handle), addresses = self.buffers[self.turn]
        handle.barrier()
        size, rank = self.comm.size, self.comm.rank
        before = range(size - 1, rank, -1) if self.reverse else range(rank)
        first, block, numel = before[0] if before else 0, 1024, self.state.numel()
        pull_kernel[(triton.cdiv(numel, block),)](
            addresses, self.out, numel, first, before.step, COUNT=len(before), V=self.state.shape[-1], BLOCK=block
        )
        return self.out


class SignalChain:
    """A chain by PyTorch's symmetric memory: a kernel of torch computes the outgoing state into the next rank's memory
    (the first rank copies its own), between its waits for and signals of arrived data and of free memory."""

    ARRIVED, FREE = 0, 1  # channels

    def __init__(self, comm, state, decay):
        self.state, self.decay, self.out = state, decay, torch.empty_like(state)
        # of its own, since an earlier chain has left its last signal of free memory
        (own, self.handle), _ = symmetric(comm, state.numel(), ("chain", len(_symmetric)))
        self.arrived = own.view(state.shape)
        self.before = comm.rank - 1 if comm.rank else None
        self.after = comm.rank + 1 if comm.rank + 1 < comm.size else None
        if self.after is not None:
            self.inbox = self.handle.get_buffer(self.after, state.shape, state.dtype)
        if self.before is not None:
            self.handle.put_signal(self.before, self.FREE)

    def __call__(self):
        handle = self.handle
        if self.before is not None:
            handle.wait_signal(self.before, self.ARRIVED)
        if self.after is not None:
            handle.wait_signal(self.after, self.FREE)
            if self.before is None:
                self.inbox.copy_(self.state)
            else:
                torch.addcmul(self.state, self.arrived, self.decay[..., None], out=self.inbox)
            handle.put_signal(self.after, self.ARRIVED)
        if self.before is None:
            self.out.zero_()
        else:
            self.out.copy_(self.arrived)
            handle.put_signal(self.before, self.FREE)
        return self.out


_symmetric: dict = {}


def symmetric(comm, words, turn=0):
    """Return ((float32 [words] in PyTorch's symmetric memory, its handle), all ranks' addresses, int64). Collective."""
    from torch.distributed import _symmetric_memory

    key = comm.group, words, turn
    if key not in _symmetric:
        own = _symmetric_memory.empty(words, dtype=torch.float32, device=comm.device)
        handle = _symmetric_memory.rendezvous(own, comm.group.group_name)
        peers = [handle.get_buffer(rank, (words,), torch.float32).data_ptr() for rank in range(comm.size)]
        _symmetric[key] = (own, handle), torch.tensor(peers, device=comm.device)
    return _symmetric[key]


@triton.jit
def pull_kernel(p_peers, p_out, numel, first, step, COUNT: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr):
    """:func:`fold_kernel` over the memory of COUNT ranks: first, first + step, ..."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < numel
    carry = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(COUNT):
        p_state = tl.multiple_of(tl.load(p_peers + first + i * step).to(tl.pointer_type(tl.float32)), 16)
        decay = tl.load(p_state + numel + offsets // V, mask=inside, other=0.0)
        carry = decay * carry + tl.load(p_state + offsets, mask=inside, other=0.0)
    tl.store(p_out + offsets, carry, mask=inside)


class Ring:
    """LASP-1: receive, combine, send, by NCCL point to point."""

    def __init__(self, comm, state, decay, reverse=False, out=None):
        self.step = -1 if reverse else 1
        self.comm, self.state, self.decay = comm, state, decay
        self.out = torch.empty_like(state) if out is None else out
        self.message = torch.empty_like(state)

    def __call__(self):
        comm = self.comm
        ranks = dist.get_process_group_ranks(comm.group)
        prev, next_ = comm.rank - self.step, comm.rank + self.step
        if 0 <= prev < comm.size:
            dist.recv(self.out, ranks[prev], group=comm.group)
        else:
            self.out.zero_()
        if 0 <= next_ < comm.size:
            torch.addcmul(self.state, self.out, self.decay[..., None], out=self.message)
            dist.send(self.message, ranks[next_], group=comm.group)
        return self.out


# (carrier of the state, whether kernels without remote inputs overlap with it, part of the names of its NCCL kernels or
# copies)
METHODS = {
    "all_gather": (AllGather, False, "AllGather"),
    "all_gather overlapped": (AllGather, True, "AllGather"),
    "ring": (Ring, False, "SendRecv"),
}
# Methods that need GPUs. They use no multiprocessors, except for the copy into the window, which is one kernel
COPY_ENGINES = "all_gather, copy engines"
METHODS_OF_GPUS = {
    COPY_ENGINES: (WindowAllGather, True, "Memcpy"),  # in processes with NCCL_CTA_POLICY=2
    "low contention": (LowContention, True, "Memcpy"),
}


class Baseline:
    """A StateCarrier (allscan/ops/carrier.py) by a method of METHODS or METHODS_OF_GPUS. ``scans``: number of carried
    states."""

    def __init__(self, comm, method: str):
        self.comm, self.handle = comm, register(self)
        self._method, self._overlapped, self.nccl = (METHODS | METHODS_OF_GPUS)[method]
        self.scans = 0

    def get_or_create_scan(self, shape, agree=None, problem=None, *, first_call_only=False):
        if problem is not None:
            raise problem
        self.comm.agreed.arguments.remember((shape, agree))  # gates are inspected once only: that waits for the GPU

    def stream(self, priority=SCANS):
        return self.comm.streams.side(priority) if self._overlapped else contextlib.nullcontext(lambda: None)

    def carry(self, carried, reverse, zigzag):
        if zigzag:
            raise NotImplementedError("these methods are for the contiguous layout")
        state, decay, out = (x.flatten(0, 2) for x in (carried.state, carried.decay, carried.out))
        self.scans += 1
        self._kept = self._method(self.comm, state, decay, reverse=reverse, out=out)  # kept until the next call
        self._kept()

    def record(self, *of_plan):
        record_call(*of_plan)

    def neighbours(self, shape, zigzag):
        return True, True

    def expected_us(self, words, zigzag):
        """Return the expected time, close to measurements (scan.csv): 1 MiB 23 us on 2 ranks, 42 on 4."""
        return 10.0 + 8.0 * self.comm.size * max(1.0, words / (1 << 18)) if self._overlapped else 0.0

    def pending(self, shape, zigzag):
        return []


def gla(q, k, v, g, *, carrier: Baseline, recompute: bool = True):
    """Call zeco_gla with another communication."""
    return GLA.run(carrier.comm, "zeco_gla", (q, k, v, g, None), Asked(recompute=recompute), carrier)[0]


class Turn(torch.autograd.Function):
    """All-to-all between tokens split over the ranks [1, T, H, W] and heads split over them [1, P * T, H / P, W]."""

    @staticmethod
    def forward(ctx, x, comm, to_heads, exchange):
        ctx.comm, ctx.to_heads, ctx.exchange = comm, to_heads, exchange
        P = comm.size
        parts = x[0].unflatten(1, (P, -1)).transpose(0, 1) if to_heads else x[0].unflatten(0, (P, -1))
        received = exchange(comm, parts)  # [P, T, H / P, W]
        received = received.flatten(0, 1) if to_heads else received.transpose(0, 1).flatten(1, 2)
        return received.contiguous()[None]

    @staticmethod
    def backward(ctx, dx):
        return Turn.apply(dx.contiguous(), ctx.comm, not ctx.to_heads, ctx.exchange), None, None, None


def by_nccl(comm, parts):
    """Send parts[r] to rank r; return what all ranks have sent to this one, in their order."""
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=comm.group)
    return received


def by_copies(comm, parts):
    """``by_nccl`` by copies out of the other ranks' memory, which the GPU's copy engines run, through PyTorch's
    symmetric memory, as fast-ulysses."""
    (buffer, handle), _ = symmetric(comm, -(-parts.numel() * parts.element_size() // 4))
    buffer.view(parts.dtype)[: parts.numel()].view(parts.shape).copy_(parts)
    received = parts.new_empty(parts.shape)
    handle.barrier(channel=0)
    for rank in (*range(comm.rank, comm.size), *range(comm.rank)):
        sent = handle.get_buffer(rank, parts.shape[1:], parts.dtype, comm.rank * parts[0].numel())
        received[rank].copy_(sent)
    handle.barrier(channel=1)
    return received


def all_to_all(q, k, v, g, *, comm, alone, exchange=by_nccl):
    """DeepSpeed-Ulysses: each rank computes the whole sequence for its share of the heads. B = 1; H is a multiple of
    the number of ranks."""
    o, _ = allscan.zeco_gla(*(Turn.apply(x, comm, True, exchange) for x in (q, k, v, g)), comm=alone)
    return Turn.apply(o, comm, False, exchange)
