"""A linear recurrence y_t = a * y_{t-1} + x_t over a sequence that is cut over the ranks, in one kernel of your own.

torchrun --nproc-per-node 4 examples/scan_in_your_kernel.py                       # on 4 GPUs
TRITON_INTERPRET=1 torchrun --nproc-per-node 4 examples/scan_in_your_kernel.py    # on CPUs
"""

import os

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import allscan
from allscan.device import allscan as device_allscan


@triton.jit
def recurrence_kernel(p_x, p_y, channel, T, D, a):
    tile = tl.program_id(0)
    d = tile * channel.BV + tl.arange(0, channel.BV)[None, :]  # [1, BV] columns of this tile

    b_local = tl.zeros([1, channel.BV], tl.float32)  # this rank's tokens alone, from zero
    decay = 1.0
    t = 0
    while t < T:
        b_local = a * b_local + tl.load(p_x + t * D + d, mask=d < D, other=0.0)
        decay = decay * a
        t += 1

    b_first = tl.zeros([1, channel.BV], tl.float32)
    b_y, _ = device_allscan(channel, tile, b_local, decay, b_first)  # y just before this rank's first token

    t = 0
    while t < T:
        b_y = a * b_y + tl.load(p_x + t * D + d, mask=d < D, other=0.0)
        tl.store(p_y + t * D + d, b_y, mask=d < D)
        t += 1


def recurrence(x, a, scan):
    """x: [T, D] float32, this rank's tokens. scan: AllScan of shape (1, D). Returns y [T, D]."""
    y = torch.empty_like(x)
    scan.launch(recurrence_kernel, (scan.num_tiles,), x, y, scan.channel(), *x.shape, a)
    return y


def main():
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    with allscan.Communicator() as comm:
        T, D, a = 16, 300, 0.9
        x = torch.randn(comm.size * T, D, generator=torch.Generator().manual_seed(0))  # the same on every rank
        scan = allscan.AllScan(comm, (1, D))
        mine = x[comm.rank * T : (comm.rank + 1) * T].to(comm.device)
        y = recurrence(mine, a, scan)

        expected, rows = torch.zeros(D, dtype=torch.float64), []
        for row in x.double():
            expected = a * expected + row
            rows.append(expected)
        difference = (y.cpu() - torch.stack(rows)[comm.rank * T : (comm.rank + 1) * T]).abs().max().item()
        print(f"rank {comm.rank}: largest difference to the unsplit recurrence {difference:.1e}", flush=True)
        assert difference < 1e-5
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
