"""Words that cross a link."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import triton
import triton.language as tl

from allscan.shmem_kernels.channel import BROKEN, begin, finish, receive
from allscan.shmem_kernels.wait import OUT_OF_STEP, TIMED_OUT
from support.any_epoch import control_case
from support.virtual import VirtualRanks

pytestmark = pytest.mark.cpu


def half_a_tile_case(group, tag):
    """The middle one of three ranks gets a part of a tile, with this tag, and gives up. Return (its fault, words at the
    next rank, expected words there, words left in its inbox, sent words, its result)."""
    ranks = VirtualRanks(3, (1, 4, 8), tile=(4, 8), timeout=0.2)
    generator = torch.Generator().manual_seed(0)
    states, decays = torch.randn(3, 1, 4, 8, generator=generator), torch.rand(3, 1, 4, generator=generator)
    sent = torch.randn(4, 8, generator=generator)
    channel = ranks.channels[1][0]
    epoch, slots = 1, (channel.DEPTH.value, 1, 4, 8)
    inbox, following = channel.inbox.view(slots)[epoch, 0], channel.next_inbox.view(slots)[epoch, 0]
    channel.arrived[epoch] = tag << 32 | epoch
    here = torch.zeros(4, 8, dtype=torch.bool)
    here[:2], here[2, 4:], here[3, :3] = True, True, True  # one of the last four is missing
    inbox[here] = sent[here]
    outs = ranks.scan(states, decays, ranks=[1])
    assert channel.epoch[0] == BROKEN.value
    passed = decays[1, 0, :, None] * sent + states[1, 0]
    return ranks.faults()[1][0], following.clone(), passed, inbox.clone(), sent, outs[1, 0]


def test_words_pass_as_they_come(run):
    """A middle rank forwards the words of a tile that have arrived, by fours, whether or not the others arrive."""
    [(fault, following, passed, inbox, sent, out)] = run(1, half_a_tile_case, 0)
    free = torch.full((), -0.0).view(torch.int32)
    fours = torch.zeros(4, 8, dtype=torch.bool)
    fours[:2], fours[2, 4:] = True, True
    assert fault == TIMED_OUT.value and out.isnan().all()
    torch.testing.assert_close(following[fours], passed[fours])
    assert (following.view(torch.int32)[~fours] == free).all()
    assert (inbox.view(torch.int32)[fours] == free).all() and torch.equal(inbox[3, :3], sent[3, :3])


def test_no_word_of_another_call_passes(run):
    """If the tag is another call's, no word is used, forwarded or freed."""
    [(fault, following, _, inbox, sent, out)] = run(1, half_a_tile_case, 1 << 16)
    assert fault == OUT_OF_STEP.value and out.isnan().all()
    assert (following.view(torch.int32) == torch.full((), -0.0).view(torch.int32)).all()
    assert torch.equal(inbox[:2], sent[:2])


@triton.jit
def receive_kernel(p_out, channel):
    epoch, word, ok = begin(channel, 0, True)
    b_prev, ok = receive(channel, 0, epoch, word, ok, tl.zeros([channel.BK, channel.BV], tl.float32))
    tl.store(p_out + tl.arange(0, channel.BK)[:, None] * channel.BV + tl.arange(0, channel.BV)[None, :], b_prev)
    if ok:
        finish(channel, 0, epoch)


def word_by_word_case(group):
    """The last of two ranks receives a tile whose words arrive one after another. Return (the tile, its inbox, the sent
    words, the words that were written in place of those of the first group)."""
    ranks = VirtualRanks(2, (1, 4, 8), tile=(4, 8), timeout=20.0)
    channel = ranks.channels[1][0]
    generator, epoch = torch.Generator().manual_seed(0), 1
    inbox = channel.inbox.view(channel.DEPTH.value, 32)[epoch]
    sent, other, out = (torch.randn(32, generator=generator) for _ in range(3))

    def write():
        inbox[:4] = sent[:4]
        for i in (torch.randperm(28, generator=generator) + 4).tolist():
            time.sleep(0.01)
            inbox[i] = sent[i]
            if i == 20:
                channel.arrived[epoch] = epoch
            if i == 30:
                inbox[:4] = other[:4]

    writer = threading.Thread(target=write)
    writer.start()
    receive_kernel[(1,)](out, channel)
    writer.join()
    return out, inbox.clone(), sent, other


def test_words_are_awaited_one_by_one(run):
    """A group of four words that has arrived is not loaded again."""
    [(out, inbox, sent, other)] = run(1, word_by_word_case)
    assert torch.equal(out, sent) and not torch.equal(out[:4], other[:4])
    assert (inbox.view(torch.int32) == torch.full((), -0.0).view(torch.int32)).all()


@pytest.mark.slow(but=("True-False", "False"))
@pytest.mark.parametrize("control, overtakes", [(True, False), (True, True), (False, True)])
def test_puts_overtake_each_other(fresh, control, overtakes):
    """A receiver that takes any later epoch computes wrong values, or waits until its time-out."""
    wrong = control and overtakes
    assert all(fresh(2).run(control_case, None, 30, control, overtakes, 3.0 if wrong else 60.0)) != wrong
