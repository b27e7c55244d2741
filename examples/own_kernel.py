"""All-Scan inside a kernel of your own, forward and backward: h_t = a_t h_{t-1} + x_t, by elements (HGRN, minGRU).

    python examples/own_kernel.py                 # on all GPUs, or on 4 CPU processes in Triton's interpreter
    torchrun --nproc-per-node 2 examples/own_kernel.py  # with its ranks; on CPUs with TRITON_INTERPRET=1

The kernel computes this rank's local state from zero, sends the outgoing state to the next rank, receives its incoming
state, and passes through the tokens again from there. Backward is the same from the last token to the first, over the
channel of the other direction. Prints the largest differences to the unsplit sequence, of outputs and gradients; above
1e-5 the exit status is 1.
"""

import sys

import torch
import triton
import triton.language as tl

import allscan
from allscan.device import allscan as device_allscan
from allscan.tools.ranks import launch


@triton.jit
def recurrence_kernel(p_a, p_x, p_y, p_before, channel, T, D, REVERSE: tl.constexpr):
    """y_t = a_t y_{t-1} + x_t, and y before the first token; REVERSE: y_t = x_t + a_{t+1} y_{t+1}. All [T, D]."""
    tile = tl.program_id(0)
    while tile < channel.num_tiles:  # at most max_ctas programs wait at a time, so a program may have several tiles
        d = tile * channel.BV + tl.arange(0, channel.BV)[None, :]  # [1, BV] columns of this tile
        b_carry = tl.zeros([1, channel.BV], tl.float32)
        b_decay = tl.full([1, channel.BV], 1.0, tl.float32)
        step = -1 if REVERSE else 1

        offsets = (T - 1) * D + d if REVERSE else d
        t = 0
        while t < T:
            b_a = tl.load(p_a + offsets, mask=d < D, other=0.0)
            b_x = tl.load(p_x + offsets, mask=d < D, other=0.0)
            b_carry = b_a * (b_x + b_carry) if REVERSE else b_a * b_carry + b_x
            b_decay *= b_a
            offsets += step * D
            t += 1

        b_first = tl.zeros([1, channel.BV], tl.float32)  # the incoming state of the whole sequence
        b_carry, _ = device_allscan(channel, tile, b_carry, b_decay, b_first)
        tl.store(p_before + d, b_carry, mask=d < D)

        offsets = (T - 1) * D + d if REVERSE else d
        t = 0
        while t < T:
            b_a = tl.load(p_a + offsets, mask=d < D, other=0.0)
            b_x = tl.load(p_x + offsets, mask=d < D, other=0.0)
            b_y = b_x + b_carry if REVERSE else b_a * b_carry + b_x
            tl.store(p_y + offsets, b_y, mask=d < D)
            b_carry = b_a * b_y if REVERSE else b_y
            offsets += step * D
            t += 1
        tile += tl.num_programs(0)


class Recurrence(torch.autograd.Function):
    @staticmethod
    def run(scan, a, x, channel, reverse):
        y, before = torch.empty_like(x), torch.empty_like(x[:1])
        programs = min(scan.num_tiles, scan.comm.max_ctas)
        scan.launch(recurrence_kernel, (programs,), a, x, y, before, channel, *x.shape, REVERSE=reverse)
        return y, before

    @staticmethod
    def forward(ctx, a, x, scan):
        ctx.fwd_epoch = scan.fwd_epoch()  # of this call: detects ranks in the backward of different calls
        y, before = Recurrence.run(scan, a, x, scan.channel(fwd_epoch=ctx.fwd_epoch), False)
        ctx.save_for_backward(a, y, before)
        ctx.scan = scan
        return y

    @staticmethod
    def backward(ctx, dy):
        a, y, before = ctx.saved_tensors
        channel = ctx.scan.channel(reverse=True, adjoint_of=ctx.fwd_epoch)
        dx, _ = Recurrence.run(ctx.scan, a, dy.contiguous(), channel, True)
        return dx * torch.cat([before, y[:-1]]), dx, None


def compare(T, D):
    with allscan.Communicator() as comm:
        torch.manual_seed(0)
        a, x, w = torch.rand(comm.size * T, D) ** 0.1, *torch.randn(2, comm.size * T, D)
        mine = slice(comm.rank * T, (comm.rank + 1) * T)

        whole = [y.double().requires_grad_() for y in (a, x)]
        rows, state = [], torch.zeros(D, dtype=torch.float64)
        for a_t, x_t in zip(*whole):
            state = a_t * state + x_t
            rows.append(state)
        expected = torch.stack(rows)
        (expected * w).sum().backward()

        own = [y[mine].to(comm.device).requires_grad_() for y in (a, x)]
        # created once, on every rank: it allocates the channels. By default a CPU would use one tile
        scan = allscan.AllScan(comm, (1, D), tile=(1, 128))
        y = Recurrence.apply(*own, scan)
        (y * w[mine].to(comm.device)).sum().backward()
        pairs = [(y, expected[mine])] + [(p.grad, q.grad[mine]) for p, q in zip(own, whole)]
        return [((p.cpu() - q).norm() / q.norm()).item() for p, q in pairs]


def main(ranks) -> int:
    y, da, dx = map(max, zip(*ranks.run(compare, 24, 300)))
    print(f"{ranks.size} ranks against 1: h {y:.1e}, da {da:.1e}, dx {dx:.1e}")
    return int(not max(y, da, dx) < 1e-5)


if __name__ == "__main__":
    sys.exit(launch(main))
