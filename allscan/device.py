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
* ``send``: send the tile to the next rank; put any combine you like between the two.
* ``shift``: both at once for a value that does not depend on what comes; the neighbours alone are waited for.
* ``begin``, ``send_ahead``, ``allscan_begun``: for a program with several tiles: begin once with the lowest, send those
  that wait for nothing, then take all (``shift_ahead``, ``shift_begun`` likewise).
* ``fold``: the step of ``allscan.allscan_segments`` over one segment, ``b_prev = fold(b_state, b_decay, b_prev)``: the
  same bits in a kernel that goes through segments of its own between ``recv`` and ``send``.
* ``wait_signal``, ``set_signal``: the signals underneath, for words of your own in mapped memory.

``scan.launch`` checks the communicator and links NVSHMEM where a link needs it (another node); with mapped neighbours
``my_kernel[grid](...)`` does as well.

The rules, by the numbers of docs/own_kernels.md:

1. Every launch handles every tile 0 .. num_tiles - 1 of the channel exactly once, by ``allscan``, ``recv`` before
   ``send``, or one ``shift``: on every rank, also where there is nobody to receive from or to send to.
2. Launches on one channel follow one another on a stream.
3. A block does nothing between ``recv`` and ``send`` that waits for another block.
4. Values are float32 blocks [channel.BK, channel.BV] of compile-time sizes; -0.0 may arrive as +0.0, all other bits as
   they are. ``b_first`` is what the first rank receives (zeros or an initial state).
5. Where a program of more than one warp receives over a sentinel link, a tile has at least 32 * num_warps words.
6. At most ``comm.max_ctas`` programs (by default half the multiprocessors), each with a loop over its tiles. Programs
   that wait hold their place on the GPU, and the rank that they wait for may itself be waiting for NCCL, whose blocks
   need a whole multiprocessor. More programs are safe only if no collective of another library runs beside the kernel.
7. A program takes its tiles in any order. If it calls ``begin`` itself, it does so once, before its first tile, with
   its lowest tile: ``begin`` with tile 0 tells the previous rank for all tiles that slots are free.
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
