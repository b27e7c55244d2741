"""cut_batch and check_batch for a model of one's own."""

from __future__ import annotations

import time

import pytest
import torch

import allscan
from support.values import raised

WRONG = {  # what rank 1 does, and the message
    "none": (lambda part: part, None),
    "other batch": (lambda part: part, "the ranks have cut different batches"),
    "no stamp": (lambda part: {k: v for k, v in part.items() if k == "input_ids"}, "some ranks have a batch"),
    "fewer tokens": (lambda part: part | dict(input_ids=part["input_ids"][:, 1:]), "but the model has 2 rows, tokens"),
    "other tokens": (lambda part: part | dict(input_ids=part["input_ids"] + 1), "input_ids have other contents"),
    "no tokens": (lambda part: {k: v for k, v in part.items() if k != "input_ids"}, "numbers of rows differ"),
}


def batch_case(group, name, layout):
    """Return (the exception of check_batch, whether the part is this rank's, the exception of the next check)."""
    with allscan.Communicator(group, timeout=5) as comm:
        tokens = torch.arange(2 * 8 * comm.size).view(2, -1)
        batch = dict(input_ids=tokens + (name == "other batch" and comm.rank == 1), labels=tokens)
        part = allscan.cut_batch(batch, comm=comm, layout=layout)
        given = WRONG[name][0](part) if comm.rank == 1 else part
        found = []

        def check(part):
            found.append(allscan.check_batch(part, comm=comm))

        first = raised(check, given)
        right = allscan.cut_batch(dict(input_ids=tokens), comm=comm, layout=layout)
        after = raised(check, right)
        mine = tokens.chunk(comm.size, 1)[comm.rank]
        if layout == "zigzag":
            halves = tokens.chunk(2 * comm.size, 1)
            mine = torch.cat([halves[comm.rank], halves[-1 - comm.rank]], 1)
        return first, torch.equal(found[-1]["input_ids"], mine) and [*found[-1]] == ["input_ids"], after


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", WRONG)
def test_a_part_is_checked_on_every_rank(run, name, layout, size=2):
    text = WRONG[name][1]
    for first, right, after in run(size, batch_case, name, layout):
        assert after is None and right
        assert first is None if text is None else first[0] == "ValueError" and text in first[1], first


def unlike_case(comm, wrong):
    """Return the exceptions of a check in which rank 1 has no tensor of two dimensions, and of the next check."""
    part = allscan.cut_batch(dict(input_ids=torch.arange(8 * comm.size)[None]), comm=comm)
    given = part | dict(input_ids=wrong) if comm.rank == 1 else part
    begun = time.monotonic()
    found = [raised(allscan.check_batch, x, comm=comm) for x in (given, part)]
    return found, time.monotonic() - begun


@pytest.mark.parametrize("wrong", [torch.arange(8), [[1, 2]]], ids=["one dimension", "a list"])
def test_other_ranks_hear_of_a_part_that_is_none(run, wrong, size=2):
    (first, seconds), (own, _) = run(size, unlike_case, wrong)
    assert own[0][0] == "ValueError" and "a part has input_ids" in own[0][1] and own[1] is None, own
    assert first[0][0] == "AllScanRejected" and first[1] is None and seconds < 30, (first, seconds)


def test_no_rank_has_a_stamp(run, size=2):
    for name, text in run(size, stampless_case):
        assert name == "ValueError" and text == "no rank has a batch of cut_batch"


def stampless_case(group):
    with allscan.Communicator(group, timeout=5) as comm:
        return raised(lambda: allscan.check_batch(dict(input_ids=torch.zeros(1, 4)), comm=comm))
