"""The order of calls: what this rank counts of its calls on a communicator, and how ranks that differ are found.

All ranks of a communicator make the same calls in the same order. A rank can leave that order in three ways, and each
must be found before a number of another call is taken for one's own:

* it *rejects* a call: an argument is wrong there, or the call runs out of memory. ``Order`` remembers it, and the
  rank's next calls raise instead of computing.
* it *never enters* a call, because an exception came before it. The tags that are sent with every tile show it at once
  where the ranks call ``Communicator.step()``; else the counts that are compared wherever the host meets the others.
* it *ignores* what a call returned, so that autograd never runs the call's backward on this rank. Tags again, and
  ``allscan.comm.backwards.PendingBackward``.

Or it makes the same call with another ``cu_seqlens``, ``scale`` or whatever else all have alike, of which all know by
earlier calls, so that nobody is asked: a ``stamp`` of these is part of the tags.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ..base.errors import (
    REMEDY,
    AllScanHostTimeout,
    AllScanOutOfStep,
    AllScanRejected,
    AllScanTimeout,
    DeferredError,
    names_of,
)
from ..bindings.torch_compat import stops_recomputation
from ..shmem_kernels import wait
from ..shmem_kernels.channel import BACKWARDS, CALLS, STAMP, STAMPS, TAG_BACKWARDS, TAG_STEP
from .compile_watch import give_up
from .host_exchange import GRACE_S, LOST, REJECTED, Excuse, StoreExchange, by_rank, differing

E = TypeVar("E", bound=Exception)

_SET = wait.RECORD_SET.value
SETTLE_S = 10.0  # how long a rank that has rejected a call waits to hear whether all have


class Order:
    """The calls of one communicator as this rank has made them, and what the other ranks are told of them.

    timeout: of the communicator, in seconds. record: the fault record, which says whether a kernel of this rank has
    given up.
    """

    def __init__(self, store_exchange: StoreExchange, timeout: float, record: Any) -> None:
        self.store_exchange, self._timeout, self._record = store_exchange, timeout, record
        self.generation = -1  # how often restart() was called
        self.restart()

    def restart(self) -> None:
        """As if no call had been made."""
        # Seconds that a call waits for the others on the host, None: as any exchange does. After a resync() a rank may
        # fail again before a call that is a first one again: the others wait for it as their kernels would
        self._patience = self._timeout + GRACE_S if self.generation >= 0 else None
        self.generation += 1
        self.call_counts = [0, 0]  # calls in the two directions, forward and reverse, counted as they are entered
        self.steps = 0  # calls of Communicator.step(), of which those in CUDA graphs are counted on the device only
        self.missed_steps = 0  # those that have raised, which the device has not counted
        self.launches = 0  # in debug mode
        self.inside = False  # in a call; what it calls is part of it
        self.reverse = False  # the direction of the present call
        self.everywhere = False  # the error that ends the present call is raised on all ranks alike
        # of the present call, as far as its launches are not part of a plan, which has its own. Launches add the calls
        # made in the other direction: no tile of theirs tells that one rank has made one of them in place of another
        self.stamp = 0
        self.rejected: tuple[int, str] | None = None  # (number, why) of the last call that raised on this rank alone
        # the last two: a rank that has settled one may reject the next before others have settled it
        self._rejections: list[tuple[int, str]] = []
        self.lost: str | None = None  # why this rank is desynchronized for certain
        self._told = False  # the others, that this rank makes no further calls

    def error_of_record(self) -> Exception:
        """What the fault record says; the others hear of it."""
        others = self.rejections_of_others()
        kind, *found = (int(self._record[i]) for i in range(wait.RECORD_KIND.value, wait.RECORD_SEEN.value + 1))
        rank, neighbour, tile, expected, seen = found
        job_ranks = self.store_exchange.ranks[rank], self.store_exchange.ranks[neighbour]
        if kind == wait.OUT_OF_STEP.value:
            return self.told(different_tags(rank, neighbour, tile, expected, seen, others, job_ranks))
        return self.told(AllScanTimeout(rank, neighbour, tile, expected, seen, self._timeout, others, job_ranks))

    def unsaid(self) -> Exception | None:
        """What the fault record says, if this rank has raised nothing of it."""
        return self.error_of_record() if self._record[_SET] and not self._told else None

    @property
    def has_rejected(self) -> bool:
        """Whether this rank has posted a rejection, settled or not."""
        return bool(self._rejections)

    def stamp_in(self, reverse: bool) -> int:
        """Of a launch in the present call that is no part of a plan."""
        return int((self.stamp + self.call_counts[not reverse]) % STAMPS.value)

    def describe_call_counts(self) -> str:
        return f"{self.call_counts[0]} forward and {self.call_counts[1]} reverse"

    def raised_everywhere(self, error: Exception) -> Exception:
        """``error``, which all ranks raise alike, so that the present call counts on none."""
        self.everywhere = True
        return error

    def desynchronized(self, why: str) -> AllScanOutOfStep:
        """The error that this rank raises from now on."""
        self.lost = why
        return self.told(AllScanOutOfStep(why))

    def told(self, error: E) -> E:
        """``error``, after which this rank makes no further calls: the others hear of it, and wait for it no longer."""
        text = str(error).removesuffix(f"{REMEDY}.").rstrip(" .;")
        self.tell(f"has raised {type(error).__name__}: {text}")
        return error

    def tell(self, why: str) -> None:
        """The same, in words; the first time."""
        if not self._told:
            self._told = True
            self.store_exchange.tell_fault(why)

    def failed(self, reverse: bool, error: BaseException) -> None:
        """A call has ended with an ``error``: remember that if this rank alone has it."""
        give_up()
        if self.everywhere:
            self.call_counts[reverse] -= 1
        elif stops_recomputation(error):
            pass  # torch's activation checkpointing has what it wants, and the call was made
        elif self.store_exchange.size > 1 and not self._record[_SET]:
            self._reject(error)

    def _reject(self, error: BaseException) -> None:
        self.rejected = (sum(self.call_counts), f"{type(error).__name__}: {str(error) or 'without a message'}")
        self._rejections = [*self._rejections[-1:], self.rejected]
        self.store_exchange.post("rejected", self._rejections)

    def settle(self) -> None:
        """After a call that this rank has rejected: go on if every rank has rejected it."""
        assert self.rejected is not None
        number, why = self.rejected
        deadline = time.monotonic() + min(SETTLE_S, self._timeout)
        while True:
            if self._rejected_by_all(number, self.store_exchange.posted("rejected")):
                self.rejected = None
                return
            if time.monotonic() > deadline:
                break
            time.sleep(2e-2)
        raise self.desynchronized(
            f"rank {self.store_exchange.rank} has rejected its call {number} ({why}), and not all ranks have; it would "
            f"pair its calls with others of theirs. {REMEDY}."
        )

    def _rejected_by_all(self, number: int, rejected: dict[int, Any]) -> bool:
        return sum(any(number == n for n, _ in some) for some in rejected.values()) == self.store_exchange.size

    def _rejected_by_another(self) -> str | None:
        """Who has rejected the call that this rank is in, and why."""
        number = sum(self.call_counts)
        for rank, of_a_rank in self.store_exchange.posted("rejected").items():
            why = next((why for n, why in of_a_rank if n == number), None)
            if why is not None and rank != self.store_exchange.rank:
                return f"rank {rank} has rejected this call: {why}"
        return None

    def rejections_of_others(self) -> str:
        """What other ranks have rejected last, and not all have, as sentences; "" for nothing."""
        rejected = self.store_exchange.posted("rejected")
        last = {p: of_a_rank[-1] for p, of_a_rank in rejected.items() if p != self.store_exchange.rank}
        return _sentences({p: some for p, some in last.items() if not self._rejected_by_all(some[0], rejected)})

    def fault(self) -> str | None:
        """Why this rank or another one, as far as it has said so, makes no further calls."""
        if self._record[_SET]:
            return f"rank {self.store_exchange.rank} has waited in vain for another one"
        return self.store_exchange.fault()

    def _excuse(self, _: Callable[[], int]) -> str | None:
        """Of an exchange that is part of a call, or a call by itself: nobody comes after a fault."""
        if self.inside and (reason := self._rejected_by_another()):
            return REJECTED + reason
        fault = self.fault()
        return fault and LOST + fault

    def _explained(self, problem: object) -> str:
        """With the fault behind it, if a rank has told of one and this is not it."""
        fault = self.fault()
        return f"{problem}. {REMEDY}." if fault is None or fault in str(problem) else f"{problem}; {fault}. {REMEDY}."

    def excuse_after_fault(self, kind: str, times: float) -> Excuse:
        """Of an exchange that ranks come to after a fault, too: decided by ``kind`` once ``times`` the time-out has
        passed since this rank knows of one."""
        known: float | None = None
        limit = times * self._timeout + GRACE_S

        def excuse(missing: Callable[[], int]) -> str | None:
            nonlocal known
            fault = self.fault()
            if fault is None and self.rejected is not None:
                number, why = self.rejected
                if not self._rejected_by_all(number, self.store_exchange.posted("rejected")):
                    fault = f"rank {self.store_exchange.rank} has rejected its call {number}: {why}"
            if fault is None:
                known = None
                return None
            known = time.monotonic() if known is None else known
            if time.monotonic() - known < limit:
                return None
            return f"{kind}rank {missing()} (global) did not come within {limit:g} s after a fault: {fault}"

        return excuse

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Every rank's ``value`` in rank order. A host operation that waits for all ranks of the group.

        Raises AllScanOutOfStep on every rank if they have made different numbers of calls so far, or if one of them has
        raised it, or AllScanTimeout, and makes no further calls."""
        try:
            mine = value, tuple(self.call_counts), self.rejected, self.reverse if self.inside else None
            within = self._patience if self.inside else None
            answers = self.store_exchange.exchange(mine, what, self._excuse, within=within)
        except AllScanRejected:
            raise  # this rank rejects the call, too
        except AllScanOutOfStep as problem:  # at different calls: this rank may not go on as if it had made its own
            error = self.raised_everywhere(self.desynchronized(self.lost or self._explained(problem)))
            raise (self.error_of_record() if self._record[_SET] else error) from None  # the former says more
        except RuntimeError:
            self.everywhere = True  # nobody has launched anything
            raise
        values, call_counts, rejected, reverse = zip(*answers, strict=True)
        if any(rejected):
            if len({r and r[0] for r in rejected}) > 1:
                found = _sentences({rank: r for rank, r in enumerate(rejected) if r})
                raise self.raised_everywhere(self.desynchronized(f"The ranks are desynchronized: {found}{REMEDY}."))
            self.rejected = None  # all ranks have rejected that call
        if len(set(call_counts)) > 1:
            if (
                None not in reverse and len({(f + d, r - d) for (f, r), d in zip(call_counts, reverse)}) == 1
            ):  # before this
                directions = differing([[("reverse", d)] for d in reverse])
                raise self.raised_everywhere(ValueError(f"ranks call with different arguments: {directions}"))
            counts = by_rank(f"{forward} forward, {reverse} reverse" for forward, reverse in call_counts)
            raise self.raised_everywhere(
                self.desynchronized(
                    f"The ranks have made different numbers of calls: {counts}. Since one of them missed a call, "
                    f"results may be those of other calls. {REMEDY}."
                )
            )
        return list(values)

    def agree(
        self, fields: tuple[tuple[str, object], ...] | None, deferred: DeferredError | None, what: str, more: Any = None
    ) -> list[Any]:
        """Raise on every rank unless all have the same (name, value) pairs and no error: what is different, and where.
        Returns every rank's ``more``. Collective; ``what``: for."""
        try:
            answers = self.exchange((fields, deferred and deferred.text, more), what)
        except RuntimeError as nobody_came:
            if deferred is not None:
                raise deferred.take() from nobody_came
            raise
        if deferred is not None:
            raise self.raised_everywhere(deferred.take())
        if any(answer[:2] != (fields, None) for answer in answers):
            wrong = [f"rank {rank}: {text}" for rank, (_, text, _) in enumerate(answers) if text]
            different = "; ".join(wrong) or differing([of_rank or () for of_rank, *_ in answers])
            raise self.raised_everywhere(ValueError(f"ranks call with different arguments: {different}"))
        return [more for *_, more in answers]

    def compare_launch(self, what: str) -> None:
        """Debug mode: RuntimeError on every rank unless all of them are about to launch ``what``."""
        self.launches += 1
        what = f"{what}, in step {self.steps}" if self.steps else what
        try:
            within = self._patience if self.inside else None
            answers = self.store_exchange.exchange(what, f"launch {self.launches}", self._excuse, within=within)
        except AllScanRejected:
            self.launches -= 1  # this rank rejects the call, too
            raise
        except AllScanOutOfStep as problem:  # another rank is not about to launch anything
            why = self._explained(f"{problem}; this rank launches {what}")
            raise self.raised_everywhere(self.desynchronized(why)) from None
        except RuntimeError as error:
            kind = AllScanHostTimeout if isinstance(error, AllScanHostTimeout) else RuntimeError
            raise self.raised_everywhere(kind(f"{error}; this rank launches {what}")) from error
        if len(set(answers)) > 1:
            raise self.raised_everywhere(
                RuntimeError(f"the ranks differ in launch {self.launches}: {by_rank(answers)}")
            )

    def compare_results(self, what: str, nan: list[str]) -> None:
        """Debug mode: RuntimeError on every rank if any of them has found NaN in results of ``what``, with these
        names."""
        answers = self.exchange(nan, f"the results of {what}, in debug mode")
        if any(answers):
            found = by_rank(", ".join(names) or "none" for names in answers)
            raise self.raised_everywhere(RuntimeError(f"{what} has returned NaN: {found}"))


@functools.lru_cache(maxsize=1024)
def stamp(*alike: object) -> int:
    """A number below STAMPS for what all ranks have alike in a call: numbers, names, None, and tuples of these, such as
    the values of its cu_seqlens. Where these differ so do their stamps, but for one pair in STAMPS."""
    text = repr(_with_floats(alike))
    found: int = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % STAMPS.value
    return found


def _with_floats(x: Any) -> Any:
    """``x`` with one text for equal numbers, 1, 1.0 and True, which are the same key, too."""
    if isinstance(x, tuple | list):
        return [_with_floats(y) for y in x]
    return x if x is None or isinstance(x, str) else float(x)


def _sentences(rejected: dict[int, tuple[int, str]]) -> str:
    return "".join(f"Rank {p} has rejected its call {number}: {why}. " for p, (number, why) in sorted(rejected.items()))


def different_tags(
    rank: int, neighbour: int, tile: int, expected: int, seen: int, others: str, job_ranks: tuple[int, int]
) -> AllScanOutOfStep:
    """The error for two arrival words of one epoch (shmem_kernels/links.py) whose tags differ."""
    wanted, came = _fields(expected), _fields(seen)
    own, other = names_of((rank, neighbour), job_ranks)
    steps = [fields[0] % STAMP.value for fields in (wanted, came)]
    if steps[0] != steps[1]:
        why = (
            f"here it is step {steps[0]}, there it was step {steps[1]} (Communicator.step(), modulo {STAMP.value}): "
            "one of the two has skipped a call"
        )
    elif wanted[0] != came[0]:
        why = (
            "both scan a state of this shape, in calls whose cu_seqlens, layout, scale, other options or operator "
            f"differ, behind calls that differ in reverse, or a multiple of {STAMP.value} steps apart "
            "(Communicator.step())"
        )
    elif wanted[1] != came[1]:
        why = (
            f"before that call {own} had made {wanted[1]} backward calls of this shape, {other} "
            f"{came[1]} (modulo {BACKWARDS.value}): one of them ignored what a call had returned, or left out its "
            "backward pass"
        )
    else:
        why = (
            f"here it belongs to the backward of forward call {wanted[2] or 'none'}, there to that of "
            f"{came[2] or 'none'} (modulo {CALLS.value}, the first is 2)"
        )
    return AllScanOutOfStep(
        f"{own} and {other} are in different calls, found by {own} in its call "
        f"{expected & 0xFFFFFFFF} of a shape and direction, tile {tile}: {why}. {others}{REMEDY}."
    )


def _fields(word: int) -> tuple[int, int, int]:
    """(step, backwards, of) of an arrival word."""
    step, rest = divmod(word >> 32, TAG_STEP.value)
    return step, *divmod(rest, TAG_BACKWARDS.value)
