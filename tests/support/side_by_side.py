"""Cases of a test that run at once, on ranks of their own: those of a test that waits for time-outs take no longer
together than one of them."""

from __future__ import annotations

import inspect
from typing import Any

import torch.distributed as dist

from allscan.comm.heap import init

_groups: dict[range, Any] = {}  # of this process's job, by their ranks


def on_ranks(cases):
    """On every rank of the job: function(group, **arguments) of the case that has this rank, None outside of all.
    cases: [(ranks, function, arguments)]."""
    init()  # collective over the job
    for ranks, *_ in cases:
        if ranks not in _groups:
            _groups[ranks] = dist.new_group([*ranks])  # by all ranks, in the same order
    mine = [case for case in cases if dist.get_rank() in case[0]]
    return mine[0][1](_groups[mine[0][0]], **mine[0][2]) if mine else None


def size_of(item) -> int:
    """Ranks of a test: its parameter ``size``, or what that is by default."""
    size = inspect.signature(item.function).parameters.get("size")
    size = 1 if size is None or size.default is size.empty else size.default
    return item.callspec.params.get("size", size) if hasattr(item, "callspec") else size


def case_of(item) -> tuple[Any, dict[str, Any]]:
    """(function, its arguments but the group) of a test with the mark side_by_side(case=function, **arguments): those,
    and the test's parameters that the function has, too."""
    arguments = dict(item.get_closest_marker("side_by_side").kwargs)
    function = arguments.pop("case")
    names = inspect.signature(function).parameters
    return function, arguments | {name: x for name, x in item.callspec.params.items() if name in names}


def fitting(items, most):
    """[(ranks, item)] of those that have place on ``most`` ranks together, the first one among them."""
    places, first = [], 0
    for item in items:
        if first + size_of(item) <= most:
            places.append((range(first, first + size_of(item)), item))
            first += size_of(item)
    return places
