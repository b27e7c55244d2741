"""All-Scan inside your own ``@triton.jit`` kernel.

    scan = allscan.AllScan(comm, state.shape, tile=(K, BV))     # once; collective
    programs = min(scan.num_tiles, comm.max_ctas)
    scan.launch(my_kernel, (programs,), state, out, scan.channel(), ...)

    @triton.jit
    def my_kernel(p_state, p_out, channel, ...):
        tile = tl.program_id(0)
        while tile < channel.num_tiles:
            b_state = ...                                       # [channel.BK, channel.BV] float32
            b_prev, b_inclusive = device.allscan(channel, tile, b_state, b_decay, b_first)
            tile += tl.num_programs(0)

* ``allscan``: receive, combine ``b_decay * prev + b_state``, send; returns (prev, inclusive).
* ``recv``: wait for the tile from the previous rank; ``b_first`` on the first rank.
* ``send``: send the tile to the next rank. Any combine may stand between ``recv`` and ``send``.
* ``shift``: ``recv`` and ``send`` in one, for a sent value that does not depend on the received one. It waits for the
  neighbours only.
* ``begin``, ``send_ahead``, ``allscan_begun``: for a program with several tiles. Call ``begin`` once with the lowest
  tile, ``send_ahead`` for tiles that depend on no received value, then ``allscan_begun`` for all tiles
  (``shift_ahead``, ``shift_begun`` likewise).
* ``fold``: the step of ``allscan.allscan_segments`` over one segment, ``b_prev = fold(b_state, b_decay, b_prev)``. A
  kernel that loops over its own segments between ``recv`` and ``send`` gets the same bits.
* ``wait_signal``, ``set_signal``: the underlying signals, for a user's own words in mapped memory.

``scan.launch`` checks the communicator and links NVSHMEM if a link needs it (another node). With mapped neighbours a
plain ``my_kernel[grid](...)`` works, too.

The rules, numbered as in docs/own_kernels.md:

1. Every launch handles every tile 0 .. num_tiles - 1 of the channel exactly once, by ``allscan``, by ``recv`` before
   ``send``, or by one ``shift``. This holds on every rank, including the first and the last one.
2. Launches on one channel are ordered on one stream.
3. Between ``recv`` and ``send`` a block must not wait for another block.
4. Values are float32 blocks [channel.BK, channel.BV] of compile-time sizes; ``b_decay`` is a number or a block with 1
   in place of BK or BV. Others are errors at compile time. -0.0 may arrive as +0.0; all other values arrive bit for
   bit. The first rank receives ``b_first`` (zeros or an initial state).
5. If a program of more than one warp receives over a sentinel link, a tile has at least 32 * num_warps words.
6. A launch has at most ``comm.max_ctas`` programs (by default half the multiprocessors), each with a loop over its
   tiles. A waiting program keeps its place on a multiprocessor, and the rank that it waits for may itself wait for
   NCCL, whose blocks need a whole multiprocessor. More programs are safe only if no collective of another library
   runs concurrently with the kernel.
7. A program handles its tiles in any order. A program that calls ``begin`` itself calls it once, before its first tile,
   with its lowest tile: ``begin`` with tile 0 tells the previous rank for all tiles that slots are free.
"""

from .shmem_kernels.channel import (
    Channel,
    allscan,
    allscan_begun,
    begin,
    recv,
    send,
    send_ahead,
    shift,
    shift_ahead,
    shift_begun,
)
from .shmem_kernels.segments import fold
from .shmem_kernels.wait import INFO_NEXT, INFO_PREV, set_signal, wait_signal

__all__ = [
    "INFO_NEXT",
    "INFO_PREV",
    "Channel",
    "allscan",
    "allscan_begun",
    "begin",
    "fold",
    "recv",
    "send",
    "send_ahead",
    "set_signal",
    "shift",
    "shift_ahead",
    "shift_begun",
    "wait_signal",
]
