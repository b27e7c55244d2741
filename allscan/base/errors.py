"""What is raised when ranks do not make the same calls."""

from __future__ import annotations

REMEDY = (
    "All ranks of this group, also those without an error: close() this communicator and make a new one, or call "
    "resync()"
)


class DeferredError:
    """What is wrong with this rank's arguments: an exception that is raised when the other ranks have heard of it.

    A frame must not hold the exception itself. An exception holds the frames that it came through, and such a cycle
    keeps their tensors, and the hooks of torch's activation checkpointing, until Python looks for cycles: the next
    step's backward would then compute a layer of this one again.
    """

    def __init__(self, error: Exception) -> None:
        self._error: Exception | None = error
        self.text = f"{type(error).__name__}: {error}"

    def take(self) -> Exception:
        """The exception, for the one ``raise``."""
        error, self._error = self._error, None
        assert error is not None
        return error


class AllScanError(RuntimeError):
    """Base class of the errors that a rank raises because of another one: what a training step may catch.

    ``Communicator.resync()`` on all ranks brings them back into step.
    """


class AllScanTimeout(AllScanError):
    """A wait on another rank ended by time-out. What the kernels returned since then is not to be used.

    Attributes:
        rank: that waited, in the group.
        neighbour: the rank that was waited for.
        tile: which tile of the state.
        expected: epoch.
        seen: epoch that was there instead.
        timeout: seconds.
        others: what other ranks have said of themselves, or "".
        job_ranks: rank and neighbour as ranks of the job.
    """

    def __init__(
        self,
        rank: int,
        neighbour: int,
        tile: int,
        expected: int,
        seen: int,
        timeout: float,
        others: str = "",
        job_ranks: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(rank, neighbour, tile, expected, seen, timeout, others, job_ranks)
        self.rank, self.neighbour, self.tile = rank, neighbour, tile
        self.expected, self.seen, self.timeout, self.others = expected, seen, timeout, others
        self.job_ranks = job_ranks or (rank, neighbour)

    def __str__(self) -> str:
        own, other = names_of((self.rank, self.neighbour), self.job_ranks)
        return (
            f"{own} waited {self.timeout:g} s for {other}, tile {self.tile}: expected epoch {self.expected}, saw "
            f"{self.seen}. {other[0].upper()}{other[1:]} is late, has ended, or does not make the same calls in the "
            f"same order. {self.others}{REMEDY}."
        )


def names_of(ranks: tuple[int, int], job_ranks: tuple[int, int]) -> list[str]:
    """Two ranks of a group in words, with those of the job where they are others."""
    if ranks == job_ranks:
        return [f"rank {rank}" for rank in ranks]
    return [f"rank {rank} (of the job: {of_job})" for rank, of_job in zip(ranks, job_ranks)]


class AllScanHostTimeout(AllScanError):
    """A rank did not come to an operation that waits for all ranks on the host, such as a first call, or was
    interrupted in it (Ctrl-C). All ranks that came raise this. The operation has launched nothing."""


class AllScanRejected(AllScanError):
    """Another rank has rejected the call that this rank waits for it in: its name and reason are in the message. This
    rank's call counts as rejected, too, so where all ranks raise they are in step."""


class AllScanOutOfStep(AllScanError):
    """The ranks have not made the same calls. What the call that raises has returned is not to be used."""
