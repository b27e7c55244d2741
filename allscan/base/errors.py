"""Errors that are raised when ranks do not make the same calls."""

from __future__ import annotations

REMEDY = (
    "All ranks of this group, also those without an error: close() this communicator and make a new one, or call "
    "resync()"
)
NEW_ONE = (  # where ranks have counted different steps, which resync() rejects
    "All ranks of this group, also those without an error: close() this communicator, make a new one and begin with "
    "the same batch"
)


MOST = 4000  # characters of a text for other ranks: a store's request has a limit of bytes


def described(error: BaseException) -> str:
    """Type and text of ``error`` for other ranks. Also if it has no text, or one that is no Unicode."""
    try:
        text = str(error) or "without a message"
    except Exception:
        text = "its message cannot be read"
    return f"{type(error).__name__}: {text}".encode("utf8", "replace").decode()[:MOST]


class DeferredError:
    """An error in this rank's arguments. The exception is raised after the other ranks have been told of it.

    A frame must not hold the exception itself. An exception refers to the frames of its traceback, and the resulting
    cycle keeps their tensors, and the hooks of torch's activation checkpointing, alive until Python's garbage
    collection: the next step's backward would then recompute a layer of this step.
    """

    def __init__(self, error: Exception) -> None:
        self._error: Exception | None = error
        self.text = described(error)

    def take(self) -> Exception:
        """Return the exception and drop the reference to it. Call once, in the ``raise`` statement."""
        error, self._error = self._error, None
        assert error is not None
        return error


class AllScanError(RuntimeError):
    """Base class of the errors that a rank raises because of another rank. A training step may catch it.

    ``Communicator.resync()`` on all ranks synchronizes them again.
    """


class AllScanTimeout(AllScanError):
    """A kernel's wait for another rank timed out. Results of kernels since then must not be used.

    Attributes:
        rank: group rank that waited.
        neighbour: group rank that was waited for.
        tile: index of the tile of the state.
        expected: epoch that the kernel waited for, of a tile or of the credit for a free slot (``depth`` epochs back).
        seen: epoch of the credit that was there instead; in a wait for a tile ``expected`` - 1, which is not read.
        timeout: seconds.
        others: reports of other ranks on calls that they rejected, as sentences; "" if there are none.
        job_ranks: global ranks (of the job) of ``rank`` and ``neighbour``.
        places: the last call, its shape and the step of both ranks' hosts, which may be ahead of their GPUs; the scans
            that were given up; and which rank has made fewer calls, where counts show it. As sentences.
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
        self.job_ranks, self.places = job_ranks or (rank, neighbour), ""

    def __str__(self) -> str:
        own, other = names_of((self.rank, self.neighbour), self.job_ranks)
        guess = f"{other[0].upper()}{other[1:]} is late, has ended, or does not make the same calls in the same order. "
        return (
            f"{own} waited {self.timeout:g} s for {other}, tile {self.tile}: expected epoch {self.expected}, saw "
            f"{self.seen}. {self.others or guess}{self.places}{REMEDY}."
        )


def names_of(ranks: tuple[int, int], job_ranks: tuple[int, int]) -> list[str]:
    """Texts that name two group ranks, with their global ranks if these differ."""
    if ranks == job_ranks:
        return [f"rank {rank}" for rank in ranks]
    return [f"rank {rank} (of the job: {of_job})" for rank, of_job in zip(ranks, job_ranks)]


class AllScanHostTimeout(AllScanError):
    """A rank did not enter an operation that waits for all ranks on the host, such as a first call, or was interrupted
    in it (Ctrl-C). All ranks that entered it raise this error. The operation has launched nothing."""


class AllScanRejected(AllScanError):
    """Another rank has rejected the call in which this rank waits for it. The message gives that rank and its reason.
    This rank's call counts as rejected, too: if all ranks raise, they stay synchronized."""


class AllScanOutOfStep(AllScanError):
    """The ranks have not made the same calls. Results of the call that raises this error must not be used."""
