"""Topology: the nodes of a group, and the algorithm of a scan by the size of its state."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..bindings.arena import SymmetricHeap

ALGORITHMS = ("chain", "rails", "recursive_doubling")
NAMES = ("auto", *ALGORITHMS)  # values of algorithm=

ANY_SIZE = 1 << 62

# Rows (minimum number of nodes, maximum bytes of the state, algorithm). The first matching row applies, else the chain
Table = tuple[tuple[int, int, str], ...]
# Measurements between nodes: none. `python -m bench.scaling` has a table of a model, all of it extrapolated.
MEASURED: Table = ()


class Topology:
    """The topology of a group, equal on every rank.

    reaches: [p]: first and last rank of the consecutive ranks around p that rank p reaches by loads and stores.
    nodes: number of ranks on each node; the ranks of a node must map each other. None: derived from ``hosts``.
    hosts: [p]: host name of rank p.
    algorithm: the communicator's algorithm. Raises ValueError if it or ``nodes`` is not possible.

    Attributes: nodes (None if the ranks of a node are not consecutive, or do not map each other); mapped_links ([p]:
    whether ranks p and p + 1 reach each other by loads and stores).
    """

    def __init__(
        self,
        reaches: Sequence[tuple[int, int]],
        nodes: tuple[int, ...] | None = None,
        hosts: Sequence[str] = (),
        algorithm: str = "auto",
    ) -> None:
        self._reaches, self._algorithm, self.size = reaches, algorithm, len(reaches)
        self.mapped_links = [self.maps(p, p + 1) for p in range(self.size - 1)]
        self.nodes = runs(hosts) if nodes is None else nodes
        if self.nodes is not None:
            ends = list(itertools.accumulate(self.nodes))
            if not all(self.maps(end - n, p) for n, end in zip(self.nodes, ends) for p in range(end - n, end)):
                if nodes is not None:
                    raise ValueError(
                        f"the ranks of a node must map each other's memory, which some do not in nodes of {nodes}"
                    )
                self.nodes = None
        self.algorithm_for(0)

    def maps(self, a: int, b: int) -> bool:
        """Whether ranks a and b, and all ranks between them, reach each other by loads and stores."""
        (first_a, last_a), (first_b, last_b) = self._reaches[a], self._reaches[b]
        return first_a <= b <= last_a and first_b <= a <= last_b

    def algorithm_for(self, nbytes: int, algorithm: str | None = None) -> str:
        """The algorithm of a scan of ``nbytes``: ``algorithm``, by default the communicator's. "auto" is resolved: by
        MEASURED, or to the chain if ``nodes`` is None, if there is one node, or if a node has one rank. Equal on every
        rank and in every call. Raises ValueError for another name, or if the nodes do not allow the algorithm."""
        algorithm = self._algorithm if algorithm is None else algorithm
        if algorithm not in NAMES:
            check_algorithm(algorithm)
        if self.size == 1:
            return "chain"
        if algorithm != "auto":
            if algorithm != "chain" and self.nodes is None:
                wanted = "nodes whose ranks follow one another in the group and map each other"
                raise ValueError(f'algorithm="{algorithm}" needs {wanted}')
            return algorithm
        if self.nodes is None or len(self.nodes) == 1 or min(self.nodes) == 1:
            return "chain"
        count = len(self.nodes)
        fitting = (algorithm for least, most, algorithm in MEASURED if count >= least and nbytes <= most)
        return next(fitting, "chain")


def reach(heap: SymmetricHeap | None, pes: Sequence[int], rank: int) -> tuple[int, int]:
    """(first, last) of the consecutive ranks around ``rank``, this rank, that it reaches by loads and stores. ``pes``:
    the transport's PE number of each rank."""
    first = last = rank
    if heap is None:  # a communicator of one rank
        return first, last
    while first > 0 and heap.is_mapped(pes[first - 1]):
        first -= 1
    while last < len(pes) - 1 and heap.is_mapped(pes[last + 1]):
        last += 1
    return first, last


def check_algorithm(algorithm: object) -> str:
    """Return ``algorithm``. Raises ValueError unless it is one of NAMES."""
    if algorithm not in NAMES:
        raise ValueError(f'algorithm must be "auto", "chain", "rails" or "recursive_doubling", got {algorithm!r}')
    return str(algorithm)


def runs(hosts: Sequence[str]) -> tuple[int, ...] | None:
    """The number of consecutive ranks on each host, in rank order; None if a host's ranks are not consecutive."""
    found = [(host, len(list(ranks))) for host, ranks in itertools.groupby(hosts)]
    return tuple(n for _, n in found) if len({host for host, _ in found}) == len(found) else None
