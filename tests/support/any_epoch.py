"""Negative control of the network tests: links with one arrival word per tile, and a receiver that accepts any epoch
from the expected one on. Correct if puts arrive in order, wrong if they are reordered."""

from __future__ import annotations

import time

import torch
import triton
import triton.language as tl

import allscan
from allscan.reference import allscan_reference
from allscan.shmem_kernels import channel as channels
from allscan.shmem_kernels import links, scan
from allscan.shmem_kernels.links import EPOCH_BITS, nvshmem, poll_word, slot_offsets
from allscan.shmem_kernels.wait import INFO_NEXT_PE, INFO_PREV, gave_up, now, polls_per_clock

from .values import error, inputs


@triton.jit
def post_to_one_word(channel, tile, epoch, word, b_value):
    SIZE: tl.constexpr = channel.BK * channel.BV
    at = (epoch % channel.DEPTH) * channel.num_tiles + tile
    tl.store(channel.outbox + slot_offsets(channel, tile, epoch), b_value)
    tl.debug_barrier()
    pe = tl.load(channel.info + INFO_NEXT_PE).to(tl.int32)
    p_to, p_from = channel.next_inbox + at * SIZE, channel.outbox + at * SIZE
    p_word = channel.next_arrived + tile
    nvshmem.putmem_signal_nbi_block(p_to, p_from, SIZE * 4, p_word, word.to(tl.uint64), nvshmem.SIGNAL_SET, pe)


@triton.jit
def take_any_later(channel, tile, epoch, word, ok):
    started = now(channel, tile)
    polls = 0
    missing = (poll_word(channel.arrived + tile) & EPOCH_BITS) < epoch
    while ok & missing:
        missing = (poll_word(channel.arrived + tile) & EPOCH_BITS) < epoch
        polls += 1
        if missing & (polls % polls_per_clock() == 0):
            ok = not gave_up(channel, started, INFO_PREV, tile, epoch, epoch - 1)
    return tl.load(channel.inbox + slot_offsets(channel, tile, epoch), volatile=True), word, ok


def reverse(network, count):
    """Deliver the puts of the interpreter's network in groups of ``count``, each group in reverse order."""
    deliver, held = network.put_signal, []

    def put_signal(*put):
        held.append(put)
        if len(held) == count:
            while held:
                deliver(*held.pop())

    network.put_signal = put_signal


def control_case(group, epochs, control=True, overtakes=None, timeout=20.0):
    """Check the values of ``epochs`` scans launched at once. control: use the links of this file; the process must not
    have compiled a scan. overtakes: whether a tile's puts of epochs 1, 2, 3, 4, ... arrive in the order 2, 1, 4, 3, ...
    or in order, in the interpreter's own network; None: another network."""
    if control:
        channels.post = scan.post = post_to_one_word
        links._take_signal = take_any_later
    comm = allscan.Communicator(group, timeout=timeout)
    collective = allscan.AllScan(comm, (2, 16, 32), protocol="put", tile=(8, 32), depth=4)
    shape = collective.shape
    if overtakes is not None:
        comm.memory.heap.network.most_s = 0.0
        if overtakes and comm.rank == 0:  # rank 1 sends only credits
            reverse(comm.memory.heap.network, 2 * collective.num_tiles)
    given = [inputs(comm, shape, shape[:-1], epoch) for epoch in range(epochs)]
    own = [[x[comm.rank].to(comm.device) for x in both] for both in given]
    outs = [torch.full(shape, float("nan"), device=comm.device) for _ in given]
    try:
        for (state, decay), out in zip(own, outs, strict=True):
            collective.scan(state, decay, out=out)
        comm.streams.synchronize()
        comm.check()
        expected = [allscan_reference(*both)[comm.rank] for both in given]
        right = max(error(out, wanted) for out, wanted in zip(outs, expected, strict=True)) < 1e-5
    except (allscan.AllScanTimeout, AssertionError):
        right = False
    comm.streams.synchronize()
    time.sleep(1.0)  # pending puts arrive
    comm.resync()
    comm.close()
    return right
