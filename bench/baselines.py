"""What users would take instead of All-Scan, built as well as we can: LASP-2's all-gather and LASP-1's ring, alone and
as the communication of the same GLA operator with the same local kernels as zeco_gla."""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import allscan
from allscan.gla import _Launcher, _state_tensors
from allscan.layout import Layout, Piece, chunk_tokens, segment_length
from allscan.shmem_kernels.gla_bwd import grad_kernel, intra_grad_kernel, value_grad_kernel
from allscan.shmem_kernels.gla_fwd import FIRST, LAST, output_kernel


@triton.jit
def fold_kernel(
    p_states, p_decays, p_out, numel, step, COUNT: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The exclusive scan for the rank that has COUNT ranks before it, in one pass over what these have gathered. They
    lie ``step`` places apart, the farthest first."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < numel
    carry = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(COUNT):
        decay = tl.load(p_decays + i * step * (numel // V) + offsets // V, mask=inside, other=0.0)
        carry = decay * carry + tl.load(p_states + i * step * numel + offsets, mask=inside, other=0.0)
    tl.store(p_out + offsets, carry, mask=inside)


class AllGather:
    """LASP-2: gather all states and decays (one coalesced NCCL call), then fold what came from lower ranks.

    fused: the fold is one kernel of ours; else it is written with torch's operators, as a user would.
    """

    def __init__(self, comm, state, decay, fused=True, reverse=False):
        self.fused, self.reverse = fused, reverse
        self.comm, self.state, self.decay, self.out = comm, state, decay, torch.empty_like(state)
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
                torch.addcmul(self.states[p], self.out, self.decays[p][..., None], out=self.out)
            return self.out
        numel, block = self.state.numel(), 1024
        first = before[0] if before else 0
        fold_kernel[(triton.cdiv(numel, block),)](
            self.states[first], self.decays[first], self.out, numel, before.step,
            COUNT=len(before), V=self.state.shape[-1], BLOCK=block,
        )  # fmt: skip
        return self.out


class Ring:
    """LASP-1: receive, combine, send, by NCCL point to point."""

    def __init__(self, comm, state, decay, reverse=False):
        self.step = -1 if reverse else 1
        self.comm, self.state, self.decay, self.out = comm, state, decay, torch.empty_like(state)
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


class Nothing:
    """No communication: the ideal that no method can beat, and a wrong result."""

    def __init__(self, comm, state, decay, reverse=False):
        self.out = torch.zeros_like(state)

    def __call__(self):
        return self.out


# What carries the state, and whether the kernels that need nothing remote run beside it
METHODS = {
    "all_gather": (AllGather, False),
    "all_gather overlapped": (AllGather, True),
    "ring": (Ring, False),
    "no communication": (Nothing, False),
}


def gla(q, k, v, g, *, comm, alone, method: str):
    """zeco_gla with another communication, by ``method`` of METHODS. ``alone``: a Communicator of this rank only, for
    the local part. q, k, v, g contiguous, of equal lengths on all ranks."""
    return _Gla.apply(q, k, v, g, comm, alone, *METHODS[method])


class _Gla(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, comm, alone, method, overlapped):
        local = _Local(q, v, comm, alone, method, overlapped)
        x = local.launcher
        states, gates, prev, join = local.scan(k, v, g, reverse=False)
        a = x.scores(q, k, g)
        join()
        o = torch.empty_like(v)
        output_kernel[(x.NV, x.layout.num_segments, x.H)](
            q, k, v, g, a, x.layout.segments, states, gates, prev, o, x.scale,
            **x.widths, **x.blocks, **x.precision, num_warps=x.num_warps, num_stages=1,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, g, states, gates, prev)
        ctx.local = local
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, g, *entering = ctx.saved_tensors
        do = do.contiguous()
        x = ctx.local.launcher
        *leaving, join = ctx.local.scan(q, do, g, reverse=True)
        states = x.chunk_states(k, v, g, entering, reverse=False)
        a = x.scores(q, k, g)
        dq_intra, dk_intra = (torch.empty_like(q, dtype=torch.float32) for _ in range(2))
        intra_grad_kernel[(x.layout.num_chunks, x.H)](
            q, k, v, g, do, x.layout.chunks, torch.empty_like(a), dq_intra, dk_intra, x.scale,
            **x.widths, **x.blocks | dict(BV=min(64, x.BV)), **x.intra, **x.precision,
        )  # fmt: skip
        join()
        dstates = x.chunk_states(q, do, g, leaving, reverse=True)
        dq, dk, dv, dg = (torch.empty_like(t) for t in (q, k, v, g))
        value_grad_kernel[(x.NV, x.layout.num_chunks, x.H)](
            k, g, do, a, x.layout.chunks, dstates, dv,
            **x.widths, **x.blocks, **x.precision, num_warps=x.num_warps, num_stages=1,
        )  # fmt: skip
        blocks = dict(BT=x.BT, BK=min(32, x.BK), BV=min(64, x.BV))
        grad_kernel[(triton.cdiv(x.K, blocks["BK"]), x.layout.num_chunks, x.H)](
            q, k, v, g, do, x.layout.chunks, states, dstates, dq_intra, dk_intra, dq, dk, dg, x.scale,
            **x.widths, **blocks, **x.precision, num_warps=4, num_stages=1,
        )  # fmt: skip
        return dq, dk, dv, dg, None, None, None, None


class _Local:
    """zeco_gla's local part, in which this rank's tokens end every sequence, so that their state comes out, and another
    way to carry it to the other ranks."""

    def __init__(self, q, v, comm, alone, method, overlapped):
        self.q, self.v, self.comm, self.alone = q, v, comm, alone
        self.method, self.overlapped = method, overlapped
        B, T, H, K = q.shape
        key = ("baseline", B, T, H, K, v.shape[-1])
        if key not in alone.scans:
            segment = segment_length(B * T, H, chunk_tokens(K), q.is_cuda)
            layouts = []
            for end in (LAST, FIRST):  # forward, reverse
                pieces = [Piece(b * T, (b + 1) * T, b, b, end.value) for b in range(B)]
                layouts.append(Layout(pieces, B, segment, chunk_tokens(K), q.device))
            alone.scans[key] = allscan.AllScan(alone, (B * H, K, v.shape[-1])), layouts
        scan, self.layouts = alone.scans[key]
        self.launcher = _Launcher(q, v, K**-0.5, scan, self.layouts[0])

    def scan(self, x, y, g, reverse):
        """What enters each segment: from this rank's tokens, the gates up to there, and what enters this rank, which is
        there after ``join()``, the fourth."""
        launcher, B, n = self.launcher, self.q.shape[0], self.layouts[0].num_segments
        launcher.layout = self.layouts[reverse]
        total, states, gates, prev = _state_tensors(self.q, self.v, None, True)
        gate = launcher.segment_states(x, y, g, states, reverse)
        launcher.carry(states, gate, gates, None, prev, total, launcher.scan.channel(), reverse)()
        edge = 0 if reverse else -1
        decay = (gates[:n] + gate[:n]).unflatten(0, (B, -1))[:, edge].exp()
        if not self.overlapped:
            return states, gates, self.method(self.comm, total, decay, reverse=reverse)(), lambda: None
        with self.alone.side_stream() as join:
            prev = self.method(self.comm, total, decay, reverse=reverse)()
        return states, gates, prev, join


class _Turn(torch.autograd.Function):
    """From tokens cut over the ranks to heads cut over them, [1, T, H, W] to [1, P * T, H / P, W], or back."""

    @staticmethod
    def forward(ctx, x, comm, to_heads):
        ctx.comm, ctx.to_heads = comm, to_heads
        P = comm.size
        if to_heads:
            send = x[0].unflatten(1, (P, -1)).transpose(0, 1).contiguous()  # [P, T, H / P, W]
        else:
            send = x[0].unflatten(0, (P, -1)).contiguous()  # [P, T, H / P, W]
        received = torch.empty_like(send)
        dist.all_to_all_single(received, send, group=comm.group)
        received = received.flatten(0, 1) if to_heads else received.transpose(0, 1).flatten(1, 2)
        return received.contiguous()[None]

    @staticmethod
    def backward(ctx, dx):
        return _Turn.apply(dx.contiguous(), ctx.comm, not ctx.to_heads), None, None


def all_to_all(q, k, v, g, *, comm, alone):
    """DeepSpeed-Ulysses: each rank gets the whole sequence for its share of the heads. B = 1; the ranks divide H."""
    o, _ = allscan.zeco_gla(*(_Turn.apply(x, comm, True) for x in (q, k, v, g)), comm=alone)
    return _Turn.apply(o, comm, False)
