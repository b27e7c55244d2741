"""The order of calls: call counts of this rank on a communicator, and detection of ranks that make other calls.

All ranks of a communicator make the same calls in the same order. A rank can leave that order in three ways. Each must
be detected before a rank uses numbers of another call:

* It *rejects* a call: an argument is wrong on this rank, or the call runs out of memory. ``Order`` remembers it, and
  the rank's next calls raise instead of computing.
* It *never enters* a call, because an exception was raised before it. If the ranks call ``Communicator.step()``, the
  tags that are sent with every tile show it at once; otherwise the call counts, compared in every host exchange, do.
* It *ignores* the results of a call, so autograd never runs the call's backward on this rank. Tags detect this, and
  ``allscan.comm.backwards.PendingBackward``.

A rank may also make the same call with another ``cu_seqlens``, ``scale`` or other argument that must be equal on all
ranks. If all ranks know these values from earlier calls, no exchange compares them: a ``stamp`` of them is part of the
tags.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..base.errors import (
    NEW_ONE,
    REMEDY,
    AllScanHostTimeout,
    AllScanOutOfStep,
    AllScanRejected,
    AllScanTimeout,
    DeferredError,
    described,
)
from ..bindings.torch_compat import stops_recomputation
from ..shmem_kernels import wait
from ..shmem_kernels.channel import STAMPS
from .host_exchange import FAILED, LOST, REJECTED, StoreExchange, by_rank, differing, if_late
from .places import Place, told
from .tags import different_tags, hash_of

E = TypeVar("E", bound=Exception)

_SET = wait.RECORD_SET.value
HEARD_S = 2.0  # after a time-out a rank waits so long for the other rank's last call


class Order:
    """Counts this rank's calls on one communicator, and reports its rejected calls and faults to the other ranks.

    timeout: the communicator's timeout in seconds. record: the fault record, which is set once a kernel of this rank
    has given up.
    """

    def __init__(self, store_exchange: StoreExchange, timeout: float, record: Any) -> None:
        self.store_exchange, self._timeout, self._record = store_exchange, timeout, record
        # Whether a call is to look if this is a loop without step(), see Calls._look_for_steps: 0 until a backward pass
        # makes a call, then 1 until a call outside of backward passes, then 2. Also 2 from the first step() on
        self.loop = 0 if store_exchange.size > 1 else 2
        self.generation = -1  # number of calls of restart() after the first
        self.gave_up: Callable[[int], str] = lambda calls: ""  # see places.gave_up, without the number of calls
        self.restart()

    def restart(self) -> None:
        """Reset all counts and errors, as if no call had been made."""
        self.generation += 1
        self.call_counts = [0, 0]  # calls entered so far, forward and reverse
        self.all_to_all_hash = 0  # of calls that move tokens by torch's all-to-all, whose messages have no tags
        self.steps = 0  # calls of Communicator.step(); replays of CUDA graphs are counted on the device only
        self.missed_steps = 0  # calls of step() that raised: the device has not counted them
        self.what = "none"  # name of the last call that was entered
        self._places = ""  # where this rank and the one that it waited for are, once a wait has timed out
        self.forwards = 0  # forward passes of split models begun, also those that raised before they made a call
        self.launches = 0  # counted in debug mode only
        # Debug mode: number of the last call in which this rank has launched a kernel. Without it no exchange follows a
        # launch in a call
        self._launched = -1
        self.inside: weakref.ref[Any] | None = None  # the running call; nested calls are part of it. Dead: interrupted
        self.reverse = False  # direction of the current call
        self.everywhere = False  # whether all ranks raise the error that ends the current call
        # Stamp of the current call, for its launches outside of plans (a plan has its own). Launches add the call count
        # of the other direction: otherwise no tile shows that a rank made such a call in place of another one
        self.stamp = 0
        self.step_word: Any = None  # int64 [1] on the device, in place of the step word of that stamp, see channel.py
        self.rejected: tuple[int, str] | None = None  # (number, reason) of the last call that raised on this rank alone
        # the last two rejections: a rank that has settled one may reject the next before others have settled the first
        self._rejections: list[tuple[int, str]] = []
        self.desync_reason: str | None = None  # reason why this rank is desynchronized, or None
        self._has_reported = False  # whether the other ranks were told that this rank makes no further calls

    def error_of_record(self) -> Exception:
        """The error for the fault record. Reports it to the other ranks."""
        others = self.rejections_of_others()
        kind, *found = (int(self._record[i]) for i in range(wait.RECORD_KIND.value, wait.RECORD_SEEN.value + 1))
        rank, neighbour, tile, expected, seen = found
        if kind == wait.BAD_SLOT.value:
            what = f"slots[{tile}] is {seen}, which another request has, or which a pool of {expected} slots lacks"
        elif kind == wait.BAD_BOUNDARIES.value:
            what = f"query_start_loc must rise from 0 to at most {expected}, the end of the cut, got {seen} at its end"
            what += f" with {tile} requests; or the cut does not rise from 0, or a rank has more tokens than rows"
        if kind in (wait.BAD_SLOT.value, wait.BAD_BOUNDARIES.value):
            return self.report_error(ValueError(f"allscan.serving: {what}. {REMEDY}."))
        job_ranks = self.store_exchange.ranks[rank], self.store_exchange.ranks[neighbour]
        if kind == wait.OUT_OF_STEP.value:
            return self.report_error(different_tags(rank, neighbour, tile, expected, seen, others, job_ranks))
        error = self.report_error(
            AllScanTimeout(rank, neighbour, tile, expected, seen, self._timeout, others, job_ranks)
        )
        if not self._places:
            told_place = self.store_exchange.place(neighbour, HEARD_S)
            other = f"has reported nothing for {HEARD_S:g} s" if told_place is None else Place(*told_place)
            self._places = told({rank: self._place(), neighbour: other}, cause=not (others or self.rejected))
        error.places = self._places
        return error

    def _place(self) -> Place:
        forward, reverse = self.call_counts
        device = self.gave_up(forward + reverse) if self._record[_SET] else ""
        return Place(forward, reverse, self.what, self.steps, device)

    def _places_of_reported(self) -> str:
        """Sentences on where this rank is, and the others that have reported a fault."""
        own, found = self.store_exchange.rank, dict[int, Place | str]()
        for rank in range(self.store_exchange.size):
            if rank != own and (place := self.store_exchange.place(rank, 0.0)) is not None:
                found[rank] = Place(*place)
        return told({own: self._place(), **found}).rstrip(" .")

    def unreported_error(self) -> Exception | None:
        """The error for the fault record, if it is set and this rank has reported no error yet; else None."""
        return self.error_of_record() if self._record[_SET] and not self._has_reported else None

    def stamp_in(self, reverse: bool) -> int:
        """The stamp of a launch in the current call that is not part of a plan."""
        return int((self.stamp + self.call_counts[not reverse]) % STAMPS.value)

    def add_all_to_all(self, *alike: object) -> None:
        """Add a call of torch's all-to-all to the hash that exchanges compare."""
        self.all_to_all_hash = (self.all_to_all_hash * STAMPS.value + hash_of(*alike)) % 0x1FFFFFFFFFFFFFFF  # a prime

    def describe_call_counts(self) -> str:
        return f"{self.call_counts[0]} forward and {self.call_counts[1]} reverse"

    def raised_everywhere(self, error: Exception) -> Exception:
        """Mark ``error`` as raised on all ranks, so that no rank counts the current call. Returns it."""
        self.everywhere = True
        return error

    def desynchronized(self, why: str) -> AllScanOutOfStep:
        """Mark this rank as desynchronized. Returns the error that it raises in this and all later calls."""
        self.desync_reason = why
        return self.report_error(AllScanOutOfStep(why))

    def report_error(self, error: E) -> E:
        """Report ``error`` to the other ranks, which then stop waiting: no calls of this rank follow. Returns it."""
        text = str(error).removesuffix(f"{REMEDY}.").rstrip(" .;")
        self.report_reason(f"has raised {type(error).__name__}: {text}")
        return error

    def report_reason(self, why: str) -> None:
        """Report to the other ranks why this rank makes no further calls. Only the first report is sent."""
        if not self._has_reported:
            self._has_reported = True
            self.store_exchange.tell_fault(why, self._place())

    def failed(self, reverse: bool, error: BaseException) -> None:
        """Handle the ``error`` that ended a call: remember it as a rejection if only this rank raises it."""
        if self.everywhere:
            self.call_counts[reverse] -= 1
            self._launched = -1  # the next call has the same number
        elif stops_recomputation(error):
            pass  # activation checkpointing stopped its recomputation early; the call was made
        elif self.store_exchange.size > 1 and not self._record[_SET]:
            # counts as a forward call, since ranks that reject it may have given different directions
            self.call_counts[0] += reverse
            self.call_counts[1] -= reverse
            self.reverse = False
            self.rejected = sum(self.call_counts), described(error)
            self._rejections = [*self._rejections[-1:], self.rejected]
            self.store_exchange.post_rejections(self._rejections)

    def interrupted(self) -> AllScanOutOfStep:
        """The error of the next call after one that Ctrl-C has ended before it was counted as failed."""
        self.inside = None
        number, rank = sum(self.call_counts), self.store_exchange.rank
        return self.desynchronized(f"rank {rank} was interrupted in its call {number}. {REMEDY}.")

    def wait_for_rejections(self) -> None:
        """After a call that this rank has rejected: wait until every rank has rejected it. Raises AllScanOutOfStep if
        they have not within the timeout, or once another rank has reported a fault or is in close()."""
        begun = time.monotonic()
        while True:
            # read before the rejections: a rank that has rejected the call may come to close() between the two
            reason = self.store_exchange.fault() or self.store_exchange.rank_in_close()
            if (why := self._unsettled()) is None:
                break
            if reason or time.monotonic() - begun > self._timeout:
                why = f"{why}, and not all ranks have; its next calls would meet other calls of theirs"
                raise self.desynchronized(f"{why}; {reason}. {REMEDY}." if reason else f"{why}. {REMEDY}.")
            time.sleep(2e-2)
        self.rejected = None

    def _unsettled(self) -> str | None:
        """A text that names the last call that this rank has rejected; None if all ranks have rejected it."""
        if self.rejected is None or self._rejected_by_all(self.rejected[0], self.store_exchange.posted_rejections()):
            return None
        return f"rank {self.store_exchange.rank} has rejected its call {self.rejected[0]} ({self.rejected[1]})"

    def _rejected_by_all(self, number: int, rejected: dict[int, Any]) -> bool:
        return sum(any(number == n for n, _ in some) for some in rejected.values()) == self.store_exchange.size

    def _rejected_by_another(self) -> str | None:
        """A text that names another rank that has rejected the current call, and its reason; None if there is none."""
        number = sum(self.call_counts)
        for rank, of_a_rank in self.store_exchange.posted_rejections().items():
            why = next((why for n, why in of_a_rank if n == number), None)
            if why is not None and rank != self.store_exchange.rank:
                return f"rank {rank} has rejected this call: {why}"
        return None

    def rejections_of_others(self) -> str:
        """Sentences on the last rejection of each other rank, unless all ranks have rejected that call; "" for none."""
        rejected = self.store_exchange.posted_rejections()
        last = {p: of_a_rank[-1] for p, of_a_rank in rejected.items() if p != self.store_exchange.rank}
        return _sentences({p: some for p, some in last.items() if not self._rejected_by_all(some[0], rejected)})

    def fault(self) -> str | None:
        """Why this rank, or another rank that has reported it, makes no further calls; None without a fault."""
        if self._record[_SET]:
            return f"rank {self.store_exchange.rank} timed out waiting for another rank"
        return self.store_exchange.fault()

    def _abort_reason(self, late: str) -> str | None:
        """The AbortCheck of exchanges that are calls or parts of calls: no rank comes to them after a fault."""
        if self.inside and (reason := self._rejected_by_another()):
            return (LOST if self._launched == sum(self.call_counts) else REJECTED) + reason
        fault = self.fault() or self.store_exchange.rank_in_close()
        return LOST + fault if fault else if_late(late)

    def _explained(self, problem: object) -> str:
        """``problem`` as sentences, followed by the reported fault if there is one and ``problem`` lacks it."""
        fault = self.fault()
        why = problem if fault is None or fault in str(problem) else f"{problem}; {fault}"
        return f"{why}. {self._places_of_reported()}. {REMEDY}."

    def late_after_fault(self, kind: str, late: str) -> str | None:
        """The AbortCheck of exchanges that ranks enter after a fault, too. Decisions then begin with ``kind``."""
        fault = (self.fault() or self._unsettled()) if late else None
        return f"{kind}{late}, after a fault: {fault}" if fault else if_late(late)

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Return every rank's ``value`` in rank order. Collective on the host: waits for all ranks of the group.

        Raises AllScanOutOfStep on every rank if they have made different numbers of calls so far, or have moved tokens
        by different calls, or if a rank makes no further calls because it has raised AllScanOutOfStep or
        AllScanTimeout."""
        if self.inside is not None and self.inside() is None:
            raise self.interrupted()
        reverse = self.reverse if self.inside else None
        mine = value, tuple(self.call_counts), self.rejected, reverse, self.all_to_all_hash
        values, call_counts, rejected, reverses, hashes = zip(*self._exchange(mine, what), strict=True)
        if any(rejected):
            if len({r and r[0] for r in rejected}) > 1:
                found = _sentences({rank: r for rank, r in enumerate(rejected) if r})
                raise self.raised_everywhere(self.desynchronized(f"The ranks are desynchronized: {found}{REMEDY}."))
            self.rejected = None  # all ranks have rejected that call
        if len(set(call_counts)) > 1:
            # equal before the current call, which the ranks make in different directions
            if None not in reverses and len({(f + d, r - d) for (f, r), d in zip(call_counts, reverses)}) == 1:
                directions = differing([[("reverse", d)] for d in reverses])
                raise self.raised_everywhere(ValueError(f"ranks call with different arguments: {directions}"))
            counts = by_rank(f"{forward} forward, {reverse} reverse" for forward, reverse in call_counts)
            why = (
                "The ranks have made calls with different reverse"
                if len(set(map(sum, call_counts))) == 1
                else "One of the ranks missed a call: they have made different numbers of calls"
            )
            why = f"{why}: {counts}. Results may be those of other calls. {REMEDY}."
            raise self.raised_everywhere(self.desynchronized(why))
        if len(set(hashes)) > 1:
            why = "The ranks have made different calls of to_zigzag() or from_zigzag(): results may be those of other"
            raise self.raised_everywhere(self.desynchronized(f"{why} calls. {REMEDY}."))
        return list(values)

    def _exchange(self, mine: Any, what: str, launch: str = "") -> list[Any]:
        """Exchange ``mine`` as a call, or as part of one. ``launch``: the end of an error's text."""
        # a rank that is interrupted in a call rejects it on all ranks, unless this one has launched in it
        kind = REJECTED if self.inside and self._launched != sum(self.call_counts) else FAILED
        try:
            return self.store_exchange.exchange(mine, what, self._abort_reason, if_interrupted=kind)
        except AllScanRejected:
            raise  # this rank rejects the call, too
        except AllScanOutOfStep as problem:  # ranks are at different calls: this rank must not continue
            why = self.desync_reason or self._explained(f"{problem}{launch}")
            error = self.raised_everywhere(self.desynchronized(why))
            # the record names rank, tile and epoch
            raise (self.error_of_record() if self._record[_SET] else error) from None
        except RuntimeError as error:  # no rank has launched anything
            self.everywhere = True
            if isinstance(error, AllScanHostTimeout):
                launch += f". {self._places_of_reported()}"
            if launch:
                error.args = (f"{error}{launch}",)
            raise

    def compare_forwards(self, counts: Sequence[tuple[int, int]]) -> None:
        """Raise AllScanOutOfStep on every rank if the ranks' (forwards, steps), exchanged at a forward pass of a split
        model, differ."""
        if len(set(counts)) > 1:
            found = by_rank(f"{forwards} forward passes, {steps} calls of step()" for forwards, steps in counts)
            remedy = NEW_ONE if len({steps for _, steps in counts}) > 1 else REMEDY
            why = f"One of the ranks skipped an iteration: so far the ranks have begun {found}. {remedy}."
            raise self.raised_everywhere(self.desynchronized(why))

    def agree(
        self, fields: tuple[tuple[str, object], ...] | None, deferred: DeferredError | None, what: str, more: Any = None
    ) -> list[Any]:
        """Return every rank's ``more``. Raises on every rank unless all ranks have the same (name, value) pairs in
        ``fields`` and no ``deferred`` error; the message gives the differences by rank. Collective. ``what``: name of
        the exchange, equal on all ranks."""
        try:
            answers = self.exchange((fields, deferred and deferred.text, more), what)
        except RuntimeError as timeout_error:
            if deferred is not None:
                raise deferred.take() from timeout_error
            raise
        if deferred is not None:
            raise self.raised_everywhere(deferred.take())
        if any(answer[:2] != (fields, None) for answer in answers):
            wrong = [f"rank {rank} has rejected this call: {text}" for rank, (_, text, _) in enumerate(answers) if text]
            different = differing([of_rank or () for of_rank, *_ in answers])
            problem = "; ".join(wrong) or f"ranks call with different arguments: {different}"
            raise self.raised_everywhere(ValueError(problem))
        return [more for *_, more in answers]

    def compare_launch(self, what: str) -> None:
        """Debug mode: raise AllScanOutOfStep on every rank unless all ranks are about to launch ``what``."""
        number = self.launches + 1
        answers = self._exchange((what, self.steps), f"launch {number}", f"; this rank launches {what}")
        self.launches = number
        if len(set(answers)) == 1:
            self._launched = sum(self.call_counts)
        else:
            launches = by_rank(f"{launch}, in step {step}" for launch, step in answers)
            raise self.raised_everywhere(AllScanOutOfStep(f"the ranks differ in launch {number}: {launches}"))

    def compare_results(self, what: str, nan: list[str]) -> None:
        """Debug mode: raise RuntimeError on every rank if a rank has found NaN in results of the call ``what``.
        ``nan``: names of this rank's results with NaN."""
        answers = self.exchange(nan, f"the results of {what}, in debug mode")
        if any(answers):
            found = by_rank(", ".join(names) or "none" for names in answers)
            raise self.raised_everywhere(RuntimeError(f"{what} has returned NaN: {found}"))


def _sentences(rejected: dict[int, tuple[int, str]]) -> str:
    return "".join(f"Rank {p} has rejected its call {number}: {why}. " for p, (number, why) in sorted(rejected.items()))
