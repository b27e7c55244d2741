"""The order of calls: what this rank counts of its calls on a communicator, and the errors when ranks differ in them.

All ranks of a communicator make the same calls in the same order. A rank can leave that order in three ways, and each
must be found before a number of another call is taken for one's own:

* it *refuses* a call: an argument is wrong there, or the call runs out of memory. :class:`Order` remembers it, and the
  rank's next calls raise instead of computing.
* it *never enters* a call, because an exception came before it. The tags that travel with every tile show it at once
  where the ranks call ``Communicator.step()``; else the counts that are compared wherever the host meets the others.
* it *ignores* what a call returned, so that autograd never runs the call's backward on this rank. Tags again, and
  :class:`Pending`.
"""

from __future__ import annotations

import pickle
import weakref

import torch

from .shmem_kernels.channel import BACKWARDS, CALLS, STEPS, TAG_BACKWARDS, TAG_STEP

SETTLE_S = 5.0  # how long a rank that has refused a call waits to hear whether all have

REMEDY = "All ranks: close() this communicator and make a new one, or call resync()"


class AllScanTimeout(RuntimeError):
    """A wait on another rank ended by time-out. What the kernels returned since then is not to be used.

    Attributes: ``rank`` waited for ``neighbour``; ``tile``, ``expected`` and ``seen`` (epochs) say for what;
    ``others``: what other ranks have said of themselves, or "".
    """

    def __init__(
        self, rank: int, neighbour: int, tile: int, expected: int, seen: int, timeout: float, others: str = ""
    ):
        super().__init__(rank, neighbour, tile, expected, seen, timeout, others)
        self.rank, self.neighbour, self.tile = rank, neighbour, tile
        self.expected, self.seen, self.timeout, self.others = expected, seen, timeout, others

    def __str__(self):
        return (
            f"rank {self.rank} waited {self.timeout:g} s for rank {self.neighbour}, tile {self.tile}: expected epoch "
            f"{self.expected}, saw {self.seen}. Rank {self.neighbour} is late, has ended, or does not make the same "
            f"calls in the same order. {self.others}{REMEDY}."
        )


class AllScanOutOfStep(RuntimeError):
    """The ranks have not made the same calls. What the call that raises has returned is not to be used."""


def out_of_step(rank: int, neighbour: int, tile: int, expected: int, seen: int, others: str) -> AllScanOutOfStep:
    """The error for two arrival words of one epoch (shmem_kernels/links.py) whose tags differ."""
    wanted, came = _fields(expected), _fields(seen)
    if wanted[0] != came[0]:
        why = (
            f"here it is step {wanted[0]}, there it was step {came[0]} (Communicator.step(), modulo {STEPS.value}): "
            "one of the two has skipped a call"
        )
    elif wanted[1] != came[1]:
        why = (
            f"before that call rank {rank} had made {wanted[1]} backward calls of this shape, rank {neighbour} "
            f"{came[1]} (modulo {BACKWARDS.value}): one of them ignored what a call had returned, or left out its "
            "backward pass"
        )
    else:
        why = (
            f"here it belongs to the backward of forward call {wanted[2] or 'none'}, there to that of "
            f"{came[2] or 'none'} (modulo {CALLS.value}, the first is 2)"
        )
    return AllScanOutOfStep(
        f"rank {rank} and rank {neighbour} are in different calls, found by rank {rank} in its call "
        f"{expected & 0xFFFFFFFF} of a shape and direction, tile {tile}: {why}. {others}{REMEDY}."
    )


def _fields(word: int) -> tuple[int, int, int]:
    """(step, backwards, of) of an arrival word."""
    step, rest = divmod(word >> 32, TAG_STEP.value)
    return step, *divmod(rest, TAG_BACKWARDS.value)


class Order:
    """The calls of one communicator as this rank has made them."""

    def __init__(self):
        self.made = [0, 0]  # calls in the two directions, forward and reverse, counted as they are entered
        self.steps = 0
        self.generation = 0  # how often resync() was called
        self.inside = False  # in a call; what it calls is part of it
        self.told = False  # the error that ends the present call is raised on all ranks alike
        self.refused = None  # (number of the call, why): the last one that ended with an error on this rank alone
        self._refusals = []  # all of them; a rank that has settled one may refuse the next before others have
        self.lost = None  # why this rank is out of step for certain

    def numbers(self) -> str:
        return f"{self.made[0]} forward and {self.made[1]} reverse"

    def refuse(self, error: BaseException) -> bytes:
        """Remember that the present call has ended with ``error``; what the other ranks are to know of it."""
        self.refused = (sum(self.made), f"{type(error).__name__}: {str(error) or 'without a message'}")
        self._refusals = [*self._refusals[-99:], self.refused]
        return pickle.dumps(self._refusals)

    def lose(self, why: str) -> AllScanOutOfStep:
        self.lost = why
        return AllScanOutOfStep(why)

    def restart(self) -> None:
        """After resync()."""
        generation = self.generation + 1
        self.__init__()
        self.generation = generation


def have_refused(words: dict, number: int) -> int:
    """How many of the ranks in {rank: what ``Order.refuse`` gave} have refused that call."""
    return sum(any(number == n for n, _ in pickle.loads(word)) for word in words.values())


def refusals(words: dict) -> str:
    """{rank: what ``Order.refuse`` gave} as sentences, "" for none: the last refused call of each."""
    found = {rank: pickle.loads(word)[-1] for rank, word in words.items()}
    return "".join(f"Rank {p} has refused its call {number}: {why}. " for p, (number, why) in sorted(found.items()))


def recomputing() -> bool:
    """Whether this thread runs a backward pass: calls in it are activation checkpointing's, whose nodes are not run."""
    return torch._C._current_graph_task_id() != -1


class Pending:
    """Stands for the backward pass that a call with gradients is to have; lives as long as its autograd node.

    If the node goes without having run, and no other backward of its AllScan has run since the call, either no rank
    runs one (validation with gradients enabled), or this rank alone has ignored what the call returned: then its
    gradients lack a part. ``AllScan`` finds out which before its next launch in that direction.
    """

    def __init__(self, scan, reverse: bool):
        self._scan, self._reverse, self._backwards = weakref.ref(scan), reverse, scan.backwards
        self.generation = scan.comm.order.generation

    def run(self) -> None:
        """The backward runs now. Raises RuntimeError if the forward call was before a resync()."""
        scan = self._scan()
        if scan is None:
            raise RuntimeError("the AllScan of this call is gone")
        if scan.comm.order.generation != self.generation:
            raise RuntimeError("this call was made before Communicator.resync(): its backward cannot be run any more")
        scan.backwards += 1

    def __del__(self):
        scan = self._scan()
        if scan is not None and scan.backwards == self._backwards:
            scan.dropped[self._reverse] = True
