"""State carriers scan the state of an operator over the ranks: All-Scan, or a method that bench/ compares with it."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from ..base.checks import PER_DOCUMENT, ScanInputs, integer
from ..base.errors import DeferredError
from ..base.tiling import transition_tile
from ..comm.backwards import PendingBackward
from ..comm.communicator import Communicator, communicator_of
from ..launch.compiled_kernel import Launch
from ..launch.plan import Buffer, Plan
from ..launch.streams import SCANS
from ..scan.agreement import ScanVariant, get_or_create_scan
from ..scan.collective import AllScan
from ..scan.launcher import ChannelUse, ScanBuffers
from ..scan.segment_launches import dense_blocks
from ..scan.zigzag_scan import record_two_way, two_way_channels, two_way_scan
from ..tokens.packing import CHUNK_TOKENS

C = TypeVar("C", bound="AllScanCarrier")

# Microseconds of the scan for each hop, and for each word of a state over NVLink: for 2 MiB on 2 and 4 ranks within 0.7
# of the latency in scan.csv
HOP_US, WORD_US = 2.0, 1.5e-5


class CarriedState(NamedTuple):
    """Arguments of a scan over the ranks: tensors, or plan buffers in place of tensors. Each rank multiplies its
    incoming state by its decay or transition; by 0 if it has neither, or if ``passes`` is False.

    The first dimension is 2 in the zigzag layout (first and second half of a rank's tokens), otherwise 1."""

    state: Any  # [1 or 2, B, H, K, V]
    out: Any  # like state: receives the incoming state
    fwd_epoch: Any  # int64 [FWD_EPOCHS], see AllScan.channel: forward writes it, the reverse scan reads it
    decay: Any = None  # [1 or 2, B, H, K]
    transition: Any = None  # [1 or 2, B, H, K, K]
    passes: tuple[bool, bool] = (True, True)  # for each half: the incoming state contributes to the outgoing state
    stamp: Any = 0  # of the call, see tags.stamp; or a step word, see ChannelUse
    passes_on_device: Any = None  # int32 [1], in place of ``passes``: see transition_kernel


class IncomingStates(NamedTuple):
    """Each segment's incoming state from this rank's tokens and, if the rank has an incoming state, the gates or the
    transition from the rank's entry to each segment and that incoming state."""

    states: Any  # [segments, H, K, V]
    through: Any = None  # [segments, H, K] or [segments, H, K, K]
    prev: Any = None  # [states, H, K, V]


class StateCarrier(Protocol):
    """An exclusive scan over the ranks, as operators use it."""

    comm: Communicator
    handle: int  # identifies this carrier within its class, as an argument of custom operators; see ``register``

    def get_or_create_scan(
        self,
        shape: Sequence[int] | None,
        agree: tuple[Any, ...] | None = None,
        deferred: DeferredError | None = None,
        *,
        first_call_only: bool = False,
    ) -> Any:
        """Prepare forward calls of this shape, before the first of them: as agreement.get_or_create_scan. Returns
        ``scan`` for ``pending``."""

    def stream(self, priority: int = SCANS) -> AbstractContextManager[Callable[[], None]]:
        """Return a context manager for ``carry``, used as ``with ... as join``. Kernels launched on the current stream
        after join() see the result; kernels launched before join() may overlap. Each priority has its own stream."""

    def carry(self, carried: CarriedState, reverse: bool, zigzag: bool) -> None:
        """Launch the scan; with ``reverse`` (the backward pass) from the last rank to the first."""

    def neighbours(self, shape: tuple[int, ...], zigzag: bool) -> tuple[bool, bool]:
        """Return whether a forward ``carry`` of states [1 or 2, B, H, K, V] waits for a preceding rank, and whether it
        sends to a following rank. A carry that does not wait writes zeros to ``out``; no kernel reads them, so ``out``
        may alias ``state``. A carry that does not send must not read state and decay, which may be written while it
        runs. If it would neither wait nor send, as on one rank, ``carry`` is not called."""

    def record(self, plan: Plan, carried: CarriedState, reverse: bool, zigzag: bool) -> None:
        """Record ``carry`` in a plan whose context at run time is this carrier: by ``record_call``, or by a faster
        method."""

    def expected_us(self, words: int, zigzag: bool) -> float:
        """Return the expected microseconds of a ``carry`` of ``words`` in all, if it can be overlapped. If that is
        long, forward moves more work into this time."""

    def pending(self, scan: Any, zigzag: bool) -> list[Callable[[], PendingBackward]]:
        """Return functions that make the PendingBackward records of a forward call, one each. ``scan``: the result of
        ``get_or_create_scan``."""


def record_call(plan: Plan, carried: CarriedState, reverse: bool, zigzag: bool) -> None:
    """Record a call of ``carry``."""
    buffers: dict[str, Buffer] = {name: x for name, x in carried._asdict().items() if isinstance(x, Buffer)}

    def carry(carrier: StateCarrier, *tensors: Tensor) -> None:
        carrier.carry(CarriedState(**carried._asdict() | dict(zip(buffers, tensors, strict=True))), reverse, zigzag)

    plan.call_python(carry, *buffers.values())


class AllScanCarrier:
    """All-Scan on the communicator's own stream. ``dense``: the scan has transitions."""

    def __init__(self, comm: Communicator, dense: bool = False) -> None:
        self.comm, self.handle, self._dense = comm, comm.handle, dense

    @classmethod
    def of(cls: type[C], comm: Communicator, dense: bool = False) -> C:
        """Return the carrier of this class for ``comm``, one object until ``comm`` is closed."""
        found: C = comm.attributes.get((cls, dense)) or comm.attributes.setdefault((cls, dense), cls(comm, dense))
        return found

    def get_or_create_scan(
        self,
        shape: Sequence[int] | None,
        agree: tuple[Any, ...] | None = None,
        deferred: DeferredError | None = None,
        *,
        first_call_only: bool = False,
    ) -> AllScan:
        return get_or_create_scan(self.comm, shape, agree, deferred, first_call_only, self._variant(shape))

    def _variant(self, shape: Sequence[int] | None) -> ScanVariant:
        if self._dense:
            return ScanVariant(None if shape is None else transition_tile(shape[-2]))
        # A scan program blocks large programs of other kernels from its multiprocessor, so use half of max_ctas
        algorithm = "chain" if shape is None else self.comm.topology.algorithm_for(4 * math.prod(shape))
        return ScanVariant(None, max(1, self.comm.max_ctas // 2), algorithm)

    def stream(self, priority: int = SCANS) -> AbstractContextManager[Callable[[], None]]:
        return self.comm.streams.side(priority)

    def neighbours(self, shape: tuple[int, ...], zigzag: bool) -> tuple[bool, bool]:
        if zigzag or self._scan(shape).algorithm != "chain":
            return True, True
        return self.comm.rank > 0, self.comm.rank < self.comm.size - 1

    def record(self, plan: Plan, carried: CarriedState, reverse: bool, zigzag: bool) -> None:
        scan = self._scan(carried.state.shape)
        aligned = not zigzag or math.prod(scan.shape[:-1]) % 4 == 0  # second halves begin at multiples of 16 bytes
        if not aligned or scan.algorithm != "chain":
            record_call(plan, carried, reverse, zigzag)
            return

        def half(i: int) -> ScanBuffers:
            """The buffers of one half of the tokens; without zigzag, of all."""

            def part(x: Buffer) -> Buffer:
                return plan.view(x, i * math.prod(x.shape[1:]), *x.shape[1:])

            factors = (carried.decay, carried.transition) if carried.passes[i] else ()
            fwd_epoch = plan.view(carried.fwd_epoch, 2 * i, 1)
            decay, transition = (x and part(x) for x in factors or (None, None))
            found = ScanBuffers(part(carried.state), part(carried.out), fwd_epoch, decay, transition)
            return found._replace(passes=carried.passes_on_device) if transition else found

        if zigzag:
            first, second = (1, 0) if reverse else (0, 1)  # in backward the ascending scan is that of the second halves
            record_two_way(plan, scan, half(first), half(second), reverse, carried.stamp)
        else:
            scan.launcher.record_scan(plan, half(0), ChannelUse(reverse, reverse, carried.stamp))

    def _scan(self, shape: Sequence[int]) -> AllScan:
        return self.get_or_create_scan((shape[1] * shape[2], *shape[3:]))

    def carry(self, carried: CarriedState, reverse: bool, zigzag: bool) -> None:
        scan, out, fwd_epoch = self._scan(carried.state.shape), carried.out, carried.fwd_epoch
        halves = [self._half(carried, i) for i in range(1 + zigzag)]
        self.comm.order.stamp = carried.stamp
        if zigzag:
            order = (1, 0) if reverse else (0, 1)  # in backward the ascending scan is that of the second halves
            channels = two_way_channels(scan, fwd_epoch, reverse)
            found = two_way_scan(scan, *(halves[i] for i in order), channels=channels)
            for i, x in zip(order, found, strict=True):
                out[i] = x.view(out.shape[1:])
        else:
            channel = scan.launcher.channel(reverse, fwd_epoch, adjoint=reverse)
            state, decay, *_ = halves[0]
            scan.scan(state, decay, reverse=reverse, out=out.view(scan.shape), channel=channel)

    def _half(self, carried: CarriedState, i: int) -> ScanInputs:
        state, *factors = (
            None if x is None else x[i].flatten(0, 1) for x in (carried.state, carried.decay, carried.transition)
        )
        multiplied = carried.passes[i] and any(x is not None for x in factors)
        return ScanInputs(state, *factors) if multiplied else ScanInputs(state, 0)

    def expected_us(self, words: int, zigzag: bool) -> float:
        hops = (self.comm.size - 1) * (1 + zigzag)
        return hops * HOP_US + words * WORD_US if hops else 0.0

    def pending(self, scan: Any, zigzag: bool) -> list[Callable[[], PendingBackward]]:
        directions: list[bool | None] = [False]
        if zigzag:
            directions = [None] if scan.algorithm == "chain" else [False, True]  # see PendingBackward
        return [partial(PendingBackward, scan.launcher.backwards, reverse) for reverse in directions]


class InOrderCarrier(AllScanCarrier):
    """Carrier of calls with ``invariant=``: a chain over all segments in sequence order, see GLAPlan.carry_in_order."""

    def _variant(self, shape: Sequence[int] | None) -> ScanVariant:
        return super()._variant(shape) if self._dense else ScanVariant()

    def record_halves(
        self,
        plan: Plan,
        kernel: Any,
        buffers: Sequence[Buffer | None],
        fwd_epoch: Buffer,
        zigzag: bool,
        stamp: int,
        **fixed: Any,
    ) -> None:
        """Record one scan by a kernel of shmem_kernels/segments.py for each half of this rank's tokens (without the
        zigzag layout one for all tokens), with REVERSE from the last half. ``buffers``: the first buffers of the
        kernel. On the last rank the outgoing state of the first scan is the incoming state of the second."""
        halves, reverse, last = 1 + zigzag, fixed["REVERSE"], self.comm.rank == self.comm.size - 1
        outgoing = [plan.scratch(fixed["STATES"] * fixed["H"], fixed["K"], fixed["V"]) for _ in range(halves)]
        scan = self.get_or_create_scan(outgoing[0].shape)
        launcher = scan.launcher
        kernel = launcher.linked(kernel)
        fixed |= dense_blocks(scan.tile[0]) if self._dense else dict(num_warps=launcher.num_warps)
        outgoing_state = None
        for i in range(halves):
            half, against = halves - 1 - i if reverse else i, i == 1 if zigzag else reverse
            pointers = *buffers, outgoing_state, outgoing[half], plan.view(fwd_epoch, 2 * half, 1)
            unused = {name: None for name, x in zip(kernel.arg_names, pointers) if x is None}
            launch = Launch(kernel, (launcher.segment_programs,), HALF=half, **fixed, **unused)
            present = [x for x in pointers if x is not None]
            launcher.record_launch(plan, launch, present, ChannelUse(against, reverse, stamp, i == 1))
            outgoing_state = outgoing[half] if last else None


def check_invariant(comm: Communicator, invariant: object, zigzag: int) -> int:
    """Return ``invariant`` as an int. Raises TypeError or ValueError if the call does not support it."""
    invariant = int(integer("invariant", invariant, 0))  # not symbolic: it is a part of the operator's text
    if invariant % CHUNK_TOKENS:
        raise ValueError(f"invariant must be a multiple of {CHUNK_TOKENS} tokens, got {invariant}")
    if invariant and zigzag == PER_DOCUMENT:
        raise ValueError(
            f"invariant={invariant} does not support per_document=True: each document is cut into 2P chunks, which "
            f"would have to be multiples of it: no document could have less than {2 * comm.size * invariant} tokens"
        )
    if invariant:
        check_in_order(comm, f"invariant={invariant}")
    return invariant


def check_in_order(comm: Communicator, what: str) -> None:
    """Raise ValueError if the communicator's algorithm does not add in the order of the sequence."""
    if comm.algorithm in ("rails", "recursive_doubling"):
        raise ValueError(
            f'{what} requires a communicator with algorithm="auto" or "chain", got {comm.algorithm!r}: others do not '
            "add in the order of the sequence"
        )


def check_cut(comm: Communicator, T: int, invariant: int, zigzag: int) -> None:
    """Raise ValueError unless this rank's T tokens, or halves of them, are a multiple of ``invariant``, or this is the
    last rank of consecutive parts."""
    tokens = T // 2 if zigzag else T
    if invariant and tokens % invariant and (zigzag or comm.rank < comm.size - 1):
        what = "half of T" if zigzag else "on every rank but the last T"
        raise ValueError(f"{what} must be a multiple of invariant={invariant}, got T = {T}")


# Carriers that users registered, by handle
_carriers: weakref.WeakValueDictionary[int, StateCarrier] = weakref.WeakValueDictionary()
_handles = itertools.count(-1, -1)  # a communicator's are positive


def register(carrier: StateCarrier) -> int:
    """Register a carrier that does not belong to a communicator; return its handle, valid while the object lives."""
    handle = next(_handles)
    _carriers[handle] = carrier
    return handle


def carrier_of(handle: int, invariant: int = 0, dense: bool = False) -> StateCarrier:
    """Return the carrier with this handle. Raises RuntimeError if the carrier or its communicator no longer exists.
    dense: whether it passes transitions, too."""
    if invariant:
        return InOrderCarrier.of(communicator_of(handle), dense)
    if handle > 0:
        return AllScanCarrier.of(communicator_of(handle), dense)
    try:
        return _carriers[handle]
    except KeyError:
        raise RuntimeError("this StateCarrier was deleted") from None
