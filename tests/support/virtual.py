"""Several ranks of a chain on one GPU: the real kernels, with the neighbours' memory on the same device.

For what a machine with two GPUs lacks, ranks in the middle of a chain. It is one GPU's memory, not NVLink's.
"""

from __future__ import annotations

import torch

from allscan.shmem_kernels import wait
from allscan.shmem_kernels.links import SENTINEL
from allscan.shmem_kernels.scan import scan_kernel
from allscan.tiling import default_tile, tile_words
from allscan.workspace import Spec, make_channel, reset, workspace_layout


class _Heap:
    def __init__(self, size, nbytes, device):
        self._arenas = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(size)]

    def local(self, pe, offset, numel, dtype):
        return self._arenas[pe][offset : offset + numel * dtype.itemsize].view(dtype)

    view = local


class VirtualRank:
    """What make_channel asks of a Communicator."""

    def __init__(self, rank, size, heap, device, timeout):
        self.rank, self.size, self.device, self.timeout, self.heap = rank, size, device, timeout, heap
        self.record = torch.zeros(wait.RECORD_WORDS, dtype=torch.int64, pin_memory=True)
        self.fault = torch.zeros(1, dtype=torch.int64, device=device)
        self.step_word = torch.zeros(1, dtype=torch.int64, device=device)
        self.stream = torch.cuda.Stream(device)

    def pe(self, rank):
        return rank

    def keep(self, buffer):
        return buffer


class VirtualScan:
    """The All-Scan of ``size`` ranks over states of ``shape``, each rank on a stream of its own."""

    def __init__(self, size, shape, ctas, depth=3, link=SENTINEL.value, tile=None, timeout=5.0):
        device = torch.device("cuda", torch.cuda.current_device())
        self.shape, self.K, self.V = shape, *shape[1:]
        self.tile = tile or default_tile(self.K, self.V, tile_words(torch.Size(shape).numel(), ctas, 128, 2048, 4096))
        spec = Spec(tuple(shape), self.tile, depth, "auto")
        self.tiles = spec.num_tiles
        self.ctas = min(ctas, self.tiles)
        layout, nbytes = workspace_layout(spec, False)
        heap = _Heap(size, 2 * nbytes, device)
        self.ranks = [VirtualRank(rank, size, heap, device, timeout) for rank in range(size)]
        self.channels = []
        for direction, step in enumerate((1, -1)):
            spaces = [(direction * nbytes, layout)] * size
            self.channels.append([make_channel(rank, spaces, spec, [link] * (size - 1), step) for rank in self.ranks])
            for channel in self.channels[-1]:
                reset(channel)
        for reverse in (False, True):  # compile and load, in an order in which nobody waits
            for rank in range(size)[:: -1 if reverse else 1]:
                state = torch.zeros(shape, device=device)
                torch.cuda.synchronize()
                self.launch(rank, state, state[..., 0].contiguous(), torch.empty_like(state), reverse)
                torch.cuda.synchronize()

    def launch(self, rank, state, decay, out, reverse=False):
        """The scan of one rank; decay [G, K]."""
        words = self.tile[0] * self.tile[1]
        with torch.cuda.stream(self.ranks[rank].stream):
            scan_kernel[(self.ctas,)](
                state, decay, state, out, self.channels[reverse][rank], self.K, 1, K=self.K, V=self.V, HAS_DECAY=True,
                HAS_INITIAL=False, ONE_HOP=False, num_warps=max(1, min(8, words // 512)),
            )  # fmt: skip

    def broken(self):
        return [bool(rank.record[wait.RECORD_SET.value]) for rank in self.ranks]
