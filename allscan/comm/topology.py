"""Which ranks are a node, and by which algorithm a state of some size is scanned over them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..bindings.transport import SymmetricHeap

ALGORITHMS = ("chain", "rails", "recursive_doubling")

ANY_SIZE = 1 << 62

# (nodes at least, bytes of the state at most, algorithm), the first that fits; else the chain
Table = tuple[tuple[int, int, str], ...]
# What was measured between nodes: nothing. `python -m bench.scaling` has a table of a model, all of it extrapolated.
MEASURED: Table = ()


class Topology:
    """Of a group, on every rank alike.

    reaches: [p]: the first and the last of the ranks around rank p that it reaches by loads and stores, without a gap.
    nodes: how many ranks each node has, which must map each other; None: by ``hosts``, [p]: the name of rank p's.
    algorithm: of the communicator. Raises ValueError if it, or ``nodes``, cannot be.

    Attributes: nodes (None where the ranks of a node do not follow one another); mapped_links ([p]: whether ranks p and
    p + 1 reach each other by loads and stores).
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
                    raise ValueError(f"the ranks of a node must map each other, in nodes of {nodes} not all do")
                self.nodes = None
        self.algorithm_for(0)

    def maps(self, a: int, b: int) -> bool:
        """Whether two ranks reach each other by loads and stores, as all between them do."""
        (first_a, last_a), (first_b, last_b) = self._reaches[a], self._reaches[b]
        return first_a <= b <= last_a and first_b <= a <= last_b

    def algorithm_for(self, nbytes: int, algorithm: str | None = None) -> str:
        """Of a scan of ``nbytes``, ``algorithm`` or the communicator's with "auto" decided. Raises ValueError if it
        cannot be."""
        algorithm = self._algorithm if algorithm is None else check_algorithm(algorithm)
        if self.size == 1:
            return "chain"
        if algorithm == "auto":
            return choose(self.nodes, nbytes)
        if algorithm != "chain" and self.nodes is None:
            raise ValueError(
                f'algorithm="{algorithm}" needs nodes whose ranks follow one another in the group and map each other'
            )
        return algorithm


def reach(heap: SymmetricHeap | None, pes: Sequence[int], rank: int) -> tuple[int, int]:
    """The first and the last of the ranks around ``rank``, this one, that it reaches by loads and stores, without a
    gap. ``pes``: what the transport calls each rank."""
    first = last = rank
    if heap is None:  # one rank alone
        return first, last
    while first > 0 and heap.is_mapped(pes[first - 1]):
        first -= 1
    while last < len(pes) - 1 and heap.is_mapped(pes[last + 1]):
        last += 1
    return first, last


def check_algorithm(algorithm: object) -> str:
    """Raises ValueError unless it is "auto" or one of ALGORITHMS."""
    if algorithm != "auto" and algorithm not in ALGORITHMS:
        raise ValueError(f'algorithm must be "auto", "chain", "rails" or "recursive_doubling", got {algorithm!r}')
    return str(algorithm)


def runs(hosts: Sequence[str]) -> tuple[int, ...] | None:
    """The number of consecutive ranks on each host, in rank order; None if a host comes twice."""
    found = [(host, len(list(ranks))) for host, ranks in itertools.groupby(hosts)]
    return tuple(n for _, n in found) if len({host for host, _ in found}) == len(found) else None


def choose(nodes: Sequence[int] | None, nbytes: int, table: Table = MEASURED) -> str:
    """The algorithm for a state of ``nbytes``: the same on every rank and at every call. With one node, or a node of
    one rank, a chain."""
    if nodes is None or len(nodes) == 1 or min(nodes) == 1:
        return "chain"
    fitting = (algorithm for least, most, algorithm in table if len(nodes) >= least and nbytes <= most)
    return next(fitting, "chain")
