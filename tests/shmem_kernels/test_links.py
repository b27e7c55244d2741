"""Words that cross a link."""

from __future__ import annotations

import pytest
import torch

from allscan.shmem_kernels.channel import BROKEN
from allscan.shmem_kernels.wait import OUT_OF_STEP, TIMED_OUT
from allscan.tools.virtual import VirtualRanks
from support.any_epoch import control_case

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


@pytest.mark.parametrize("control, most_s, right", [(True, 0.0, True), (True, 0.1, False), (False, 0.1, True)])
def test_puts_overtake_each_other(fresh, control, most_s, right):
    """A receiver that takes any later epoch computes wrong values, or waits until its time-out."""
    assert all(fresh(2).run(control_case, None, 30, control, most_s)) == right
