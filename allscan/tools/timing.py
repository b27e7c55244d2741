"""Time measurements on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl


def replay_us(calls: Sequence[Callable[[], object]], replays: int = 30) -> torch.Tensor:
    """Time a CUDA graph of ``calls``, after a warm-up. Collective if the calls are.

    Args:
        calls: functions without arguments; each different one is called once before the capture.
        replays: number of values.

    Returns:
        Microseconds of each replay, float64 [replays] on the CPU.

    Raises:
        RuntimeError: torch's, without a GPU, or for a call that cannot be captured.

    Example:
        >>> us = replay_us([run] * 32).median() / 32                                  # of one call among others
    """
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
