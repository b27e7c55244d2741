"""Time measurements on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl


def replay_us(calls: Sequence[Callable[[], object]], replays: int = 30) -> torch.Tensor:
    """Microseconds of a CUDA graph of ``calls``, one value per replay, after a warm-up."""
    for call in {id(call): call for call in calls}.values():
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(replays + 5):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return torch.tensor(times[5:], dtype=torch.float64)


@triton.jit
def copy_kernel(p_dst, p_src, numel, BLOCK: tl.constexpr):
    """A plain copy into a peer's memory ``p_dst``: the link's limit, for comparison."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_dst + offsets, tl.load(p_src + offsets, mask=offsets < numel), mask=offsets < numel)
