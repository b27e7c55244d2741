"""Concurrent cases: each has its own answers, and its own errors."""

from __future__ import annotations

import types

import pytest
import torch.distributed as dist

from support import side_by_side

pytestmark = [pytest.mark.cpu, pytest.mark.quick]


def some_case(group, what, more):
    if what == "wrong" and dist.get_rank(group) == 1:
        raise ValueError("what is wrong")
    return what, more, dist.get_rank(group), dist.get_world_size(group)


def made(size, what):
    """Return a stand-in for a pytest test."""
    return types.SimpleNamespace(
        nodeid=f"{what}-{size}",
        function=lambda answers, size, what: None,
        callspec=types.SimpleNamespace(params=dict(size=size, what=what)),
        get_closest_marker=lambda name: types.SimpleNamespace(kwargs=dict(case=some_case, more=3)),
    )


def test_each_case_has_its_own_answers(pool):
    first, wrong, larger = items = [made(1, "first"), made(2, "wrong"), made(3, "larger")]
    try:
        answers = pool.answers_of(first, items[1:])
        assert {first.nodeid, wrong.nodeid} <= pool.begun and (larger.nodeid in pool.begun) == (pool.size >= 6)
        assert answers == [("first", 3, 0, 1)]
        with pytest.raises(RuntimeError, match="(?s)^rank 1: .*ValueError: what is wrong") as caught:
            pool.answers_of(wrong, items[2:])
        assert "rank 0" not in str(caught.value)
        assert pool.answers_of(larger, []) == [("larger", 3, rank, 3) for rank in range(3)]
    finally:
        pool.begun -= {item.nodeid for item in items}


def test_as_many_as_have_ranks():
    items = [made(size, "some") for size in (3, 2, 4, 3, 1)]
    assert [(*place, item.callspec.params["size"]) for place, item in side_by_side.fitting(items, 8)] == [
        (0, 1, 2, 3),
        (3, 4, 2),
        (5, 6, 7, 3),
    ]
