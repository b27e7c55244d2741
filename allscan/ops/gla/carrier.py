"""What brings the state of zeco_gla from rank to rank: All-Scan, or another method that bench/ sets beside it."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from ...base.errors import Problem
from ...comm.backwards import PendingBackward, pending_backwards
from ...comm.communicator import Communicator, communicator_of
from ...launch.plan import Buffer, Plan
from ...launch.streams import SCANS
from ...scan.collective import AllScan
from ...scan.tickets import zigzag_channels
from ..first_call import get_or_create_scan

HOP_US, WORD_US = 5.0, 1.5e-5  # of the scan: from rank to rank, and for each word of a state over NVLink


class StateCarrier(Protocol):
    """An exclusive scan over the ranks, as zeco_gla_by uses it."""

    comm: Communicator
    handle: int  # stands for this object where torch wants a number

    def prepare(self, shape, agree=None, problem: Problem | None = None, *, at_first: bool = False) -> object:
        """Before the first forward call with tensors like its own; see first_call.get_or_create_scan."""

    def stream(self, priority: int = SCANS) -> AbstractContextManager[Callable[[], None]]:
        """Where ``carry`` is called: ``with stream() as join``. What is launched on the current stream after join() has
        the result; what is launched before may run at the same time. Each priority has a stream of its own."""

    def carry(self, state: Tensor, decay: Tensor, out: Tensor, *, ticket: Tensor, reverse: bool, zigzag: bool) -> None:
        """Begin the scan of ``state`` [B, 1, H, K, V]: each rank multiplies what enters it by ``decay`` [B, 1, H, K];
        ``out``, like state, is to hold what the ranks before this one leave. With ``reverse``, which is the backward
        pass, from the last rank. ``zigzag``: [B, 2, H, ...], of the first half of a rank's tokens and of the second.
        ``ticket``, int64 [TICKETS]: see AllScan.channel; written forward, read in reverse."""

    def neighbours(self, shape: tuple[int, ...], zigzag: bool) -> tuple[bool, bool]:
        """Whether a forward ``carry`` of states [B, 1 or 2, H, K, V] waits for a rank before this one, and whether it
        sends to one behind. A carry that does not wait writes zeros to ``out``, which nobody reads: it may be ``state``
        itself. One that does not send must not use ``state`` and ``decay``: they may be written while it runs. Where it
        would do neither, as on one rank, there is no call."""

    def record(
        self, plan: Plan, state: Buffer, decay: Buffer, out: Buffer, ticket: Buffer, reverse: bool, zigzag: bool
    ) -> None:
        """Record ``carry`` in a plan whose runs have a carrier of this kind as their context: :func:`record_call`, or
        something quicker."""

    def expected_us(self, words: int, zigzag: bool) -> float:
        """About how long ``carry`` takes with states of so many words in all, if it runs beside others: where that is
        long, forward leaves more for this time."""

    def pending(self, shape, zigzag: bool) -> list[PendingBackward]:
        """For the backward that a forward call is to have."""


def record_call(plan: Plan, state, decay, out, ticket, reverse: bool, zigzag: bool) -> None:
    """Record a call of ``carry``."""

    def carry(carrier: StateCarrier, state: Tensor, decay: Tensor, out: Tensor, ticket: Tensor) -> None:
        carrier.carry(state, decay, out, ticket=ticket, reverse=reverse, zigzag=zigzag)

    plan.call(carry, state, decay, out, ticket)


class AllScanCarrier:
    """All-Scan, on the communicator's own stream."""

    def __init__(self, comm: Communicator):
        self.comm, self.handle = comm, comm.handle
        self._scans: dict[tuple, AllScan] = {}  # see pending

    @staticmethod
    def of(comm: Communicator) -> AllScanCarrier:
        """That of ``comm``, the same until it is closed."""
        return comm.attributes.setdefault("carrier", AllScanCarrier(comm))

    def prepare(self, shape, agree=None, problem=None, *, at_first=False) -> AllScan:
        # A program keeps large ones of other kernels off its multiprocessor, so here half of those that may wait do.
        ctas = max(1, self.comm.max_ctas // 2)
        algorithm = "chain" if shape is None else self.comm.topology.algorithm_for(4 * math.prod(shape))
        return get_or_create_scan(
            self.comm, shape, agree, problem, at_first=at_first, max_ctas=ctas, algorithm=algorithm
        )

    def stream(self, priority=SCANS):
        return self.comm.streams.side(priority)

    def neighbours(self, shape, zigzag):
        if zigzag or self._scan(shape).algorithm != "chain":
            return True, True
        return self.comm.rank > 0, self.comm.rank < self.comm.size - 1

    def record(self, plan, state, decay, out, ticket, reverse, zigzag):
        scan = self._scan(state.shape)
        if scan.algorithm == "chain" and not zigzag:
            scan.record(plan, state, out, ticket, reverse, decay=decay)
        else:
            record_call(plan, state, decay, out, ticket, reverse, zigzag)

    def _scan(self, shape) -> AllScan:
        return self.prepare((shape[0] * shape[2], *shape[3:]))

    def carry(self, state, decay, out, *, ticket, reverse, zigzag):
        scan = self._scan(state.shape)
        if zigzag:
            order = (1, 0) if reverse else (0, 1)  # backward, second halves go from the first rank to the last
            states, decays = (tuple(x[:, i].flatten(0, 1) for i in order) for x in (state, decay))
            found = scan.there_and_back(*states, decays=decays, channels=zigzag_channels(scan, ticket, reverse))
            for i, x in zip(order, found, strict=True):
                out[:, i] = x.unflatten(0, (out.shape[0], -1))
        else:
            given = dict(adjoint_of=ticket) if reverse else dict(ticket=ticket)
            channel, parts = scan.channel_of_scan(reverse, **given), (x.flatten(0, 2) for x in (state, decay))
            scan.scan(*parts, reverse=reverse, out=out.view(scan.shape), channel=channel)

    def expected_us(self, words, zigzag):
        hops = (self.comm.size - 1) * (1 + zigzag)
        return hops * HOP_US + words * WORD_US if hops else 0.0

    def pending(self, shape, zigzag):
        scan = self._scans.get(shape)
        if scan is None:
            scan = self._scans[shape] = self.prepare(shape)
        return pending_backwards(scan, zigzag)


# By handle, those that are no communicator's own
_carriers: weakref.WeakValueDictionary[int, StateCarrier] = weakref.WeakValueDictionary()
_handles = itertools.count(-1, -1)  # a communicator's are positive


def register(carrier: StateCarrier) -> int:
    """A handle for a carrier of one's own, for as long as the object lives."""
    handle = next(_handles)
    _carriers[handle] = carrier
    return handle


def carrier_of(handle: int) -> StateCarrier:
    """The carrier with this handle. Raises RuntimeError if it, or its communicator, is gone."""
    if handle > 0:
        return AllScanCarrier.of(communicator_of(handle))
    try:
        return _carriers[handle]
    except KeyError:
        raise RuntimeError("this StateCarrier is gone") from None
