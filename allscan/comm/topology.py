"""Which ranks are a node, and by which algorithm a state of some size is scanned over them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

ALGORITHMS = ("chain", "rails", "doubling")

ANY_SIZE = 1 << 62

# (nodes at least, bytes of the state at most, algorithm), the first that fits; else the chain. What `python -m
# bench.scaling` finds fastest, from measurements on one host and an assumed network: see there. All of it is
# extrapolated. tests/test_bench.py compares the two.
TABLE: tuple[tuple[int, int, str], ...] = (
    (64, 16 << 20, "doubling"),
    (32, 8 << 20, "doubling"),
    (12, 4 << 20, "doubling"),
    (4, 1 << 20, "doubling"),
    (2, ANY_SIZE, "rails"),
)


def check_algorithm(algorithm: object) -> str:
    """Raises ValueError unless it is "auto" or one of ALGORITHMS."""
    if algorithm != "auto" and algorithm not in ALGORITHMS:
        raise ValueError(f'algorithm must be "auto", "chain", "rails" or "doubling", got {algorithm!r}')
    return str(algorithm)


def runs(hosts: Sequence[str]) -> tuple[int, ...] | None:
    """The number of consecutive ranks on each host, in rank order; None if a host comes twice."""
    found = [(host, len(list(ranks))) for host, ranks in itertools.groupby(hosts)]
    return tuple(n for _, n in found) if len({host for host, _ in found}) == len(found) else None


def choose(nodes: Sequence[int] | None, nbytes: int) -> str:
    """The algorithm for a state of ``nbytes``: the same on every rank and at every call. With one node, or a node of
    one rank, a chain."""
    if nodes is None or len(nodes) == 1 or min(nodes) == 1:
        return "chain"
    fitting = (algorithm for least, most, algorithm in TABLE if len(nodes) >= least and nbytes <= most)
    return next(fitting, "chain")
