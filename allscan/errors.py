"""What is raised when ranks do not make the same calls."""

from __future__ import annotations

REMEDY = "All ranks: close() this communicator and make a new one, or call resync()"


class AllScanTimeout(RuntimeError):
    """A wait on another rank ended by time-out. What the kernels returned since then is not to be used.

    Attributes: ``rank`` waited for ``neighbour``; ``tile``, ``expected`` and ``seen`` (epochs) say for what;
    ``timeout`` in seconds; ``others``: what other ranks have said of themselves, or "".
    """

    def __init__(
        self, rank: int, neighbour: int, tile: int, expected: int, seen: int, timeout: float, others: str = ""
    ) -> None:
        super().__init__(rank, neighbour, tile, expected, seen, timeout, others)
        self.rank, self.neighbour, self.tile = rank, neighbour, tile
        self.expected, self.seen, self.timeout, self.others = expected, seen, timeout, others

    def __str__(self) -> str:
        return (
            f"rank {self.rank} waited {self.timeout:g} s for rank {self.neighbour}, tile {self.tile}: expected epoch "
            f"{self.expected}, saw {self.seen}. Rank {self.neighbour} is late, has ended, or does not make the same "
            f"calls in the same order. {self.others}{REMEDY}."
        )


class AllScanOutOfStep(RuntimeError):
    """The ranks have not made the same calls. What the call that raises has returned is not to be used."""
