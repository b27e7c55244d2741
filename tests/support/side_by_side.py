"""Runs cases of a test at the same time, on separate ranks: cases that wait for time-outs then take no longer together
than one of them."""

from __future__ import annotations

import inspect
from typing import Any

import torch.distributed as dist

from allscan.comm.heap import init

_groups: dict[range, Any] = {}  # process groups by their ranks


def on_ranks(cases):
    """Run function(group, **arguments) of this rank's case; return None on a rank without a case. Runs on every rank
    of the job. cases: [(ranks, function, arguments)]."""
    init()  # collective over the job
    for ranks, *_ in cases:
        if ranks not in _groups:
            _groups[ranks] = dist.new_group([*ranks])  # collective: all ranks call it in the same order
    mine = [case for case in cases if dist.get_rank() in case[0]]
    return mine[0][1](_groups[mine[0][0]], **mine[0][2]) if mine else None


def size_of(item) -> int:
    """Return the number of ranks of a test: its parameter ``size``, or that parameter's default."""
    size = inspect.signature(item.function).parameters.get("size")
    size = 1 if size is None or size.default is size.empty else size.default
    return item.callspec.params.get("size", size) if hasattr(item, "callspec") else size


def case_of(item) -> tuple[Any, dict[str, Any]]:
    """Return (function, its arguments without the group) of a test with the mark side_by_side(case=function,
    **arguments): the mark's arguments, and the test's parameters that the function also has."""
    arguments = dict(item.get_closest_marker("side_by_side").kwargs)
    function = arguments.pop("case")
    names = inspect.signature(function).parameters
    return function, arguments | {name: x for name, x in item.callspec.params.items() if name in names}


def fitting(items, most):
    """Return [(ranks, item)] of items that fit on ``most`` ranks together, starting with the first one."""
    places, first = [], 0
    for item in items:
        if first + size_of(item) <= most:
            places.append((range(first, first + size_of(item)), item))
            first += size_of(item)
    return places
