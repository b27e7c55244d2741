"""What brings the state of an operator from rank to rank: All-Scan, or another method that bench/ compares with it."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ..base.checks import PER_DOCUMENT, ScanInputs, integer
from ..base.errors import DeferredError
from ..base.tiling import transition_tile
from ..comm.backwards import PendingBackward, pending_backwards
from ..comm.communicator import Communicator, communicator_of
from ..launch.compiled_kernel import Launch
from ..launch.plan import Buffer, Plan
from ..launch.streams import SCANS
from ..scan.agreement import ScanVariant, get_or_create_scan
from ..scan.collective import AllScan
from ..scan.launcher import Scanned
from ..scan.segment_launches import dense_blocks
from ..scan.two_way import two_way_channels, two_way_scan
from ..tokens.packing import CHUNK_TOKENS

HOP_US, WORD_US = 5.0, 1.5e-5  # of the scan: from rank to rank, and for each word of a state over NVLink


class Carried(NamedTuple):
    """A state on its way over the ranks: tensors, or the buffers of a plan that stand for them. Each rank multiplies
    its incoming state by its decay or transition; by 0 where there is neither, or where nothing ``passes``.

    In the zigzag layout the second dimension is 2: the first half of a rank's tokens, and the second; else 1."""

    state: Any  # [B, 1 or 2, H, K, V]
    out: Any  # like state: the incoming state, when it has come
    fwd_epoch: Any  # int64 [FWD_EPOCHS], see AllScan.channel: written forward, read in reverse
    decay: Any = None  # [B, 1 or 2, H, K]
    transition: Any = None  # [B, 1 or 2, H, K, K]
    passes: tuple[bool, bool] = (True, True)  # in each half
    stamp: int = 0  # of the call, see call_order.stamp


class StateCarrier(Protocol):
    """An exclusive scan over the ranks, as operators use it."""

    comm: Communicator
    handle: int  # stands for this object where torch wants a number, among carriers of its class; see ``register``

    def prepare(
        self,
        shape: Sequence[int] | None,
        agree: tuple[Any, ...] | None = None,
        deferred: DeferredError | None = None,
        *,
        at_first: bool = False,
    ) -> Any:
        """Before the first forward call with tensors like its own; see agreement.get_or_create_scan. Returns what
        ``pending`` takes."""

    def stream(self, priority: int = SCANS) -> AbstractContextManager[Callable[[], None]]:
        """Where ``carry`` is called, by ``with ... as join``. What is launched on the current stream after join() has
        the result; what is launched before may run at the same time. Each priority has a stream of its own."""

    def carry(self, carried: Carried, reverse: bool, zigzag: bool) -> None:
        """Begin the scan; with ``reverse``, which is the backward pass, from the last rank."""

    def neighbours(self, shape: tuple[int, ...], zigzag: bool) -> tuple[bool, bool]:
        """Whether a forward ``carry`` of states [B, 1 or 2, H, K, V] waits for a rank before this one, and whether it
        sends to one behind. A carry that does not wait writes zeros to ``out``, which nobody reads: it may be ``state``
        itself. One that does not send must not use state and decay: they may be written while it runs. Where it
        would do neither, as on one rank, there is no call."""

    def record(self, plan: Plan, carried: Carried, reverse: bool, zigzag: bool) -> None:
        """Record ``carry`` in a plan whose runs have this carrier as their context: ``record_call``, or something
        quicker."""

    def expected_us(self, words: int, zigzag: bool) -> float:
        """About how long ``carry`` takes with states of so many words in all, if it is overlapped: where that is
        long, forward leaves more for this time."""

    def pending(self, prepared: Any, zigzag: bool) -> list[PendingBackward]:
        """For the backward that a forward call is to have; ``prepared``: by ``prepare``."""


def record_call(plan: Plan, carried: Carried, reverse: bool, zigzag: bool) -> None:
    """Record a call of ``carry``."""
    buffers: dict[str, Buffer] = {name: x for name, x in carried._asdict().items() if isinstance(x, Buffer)}

    def carry(carrier: StateCarrier, *tensors: Tensor) -> None:
        carrier.carry(Carried(**carried._asdict() | dict(zip(buffers, tensors, strict=True))), reverse, zigzag)

    plan.call_python(carry, *buffers.values())


class AllScanCarrier:
    """All-Scan, on the communicator's own stream. ``dense``: of states with transitions."""

    def __init__(self, comm: Communicator, dense: bool = False) -> None:
        self.comm, self.handle, self._dense = comm, comm.handle, dense

    @staticmethod
    def of(comm: Communicator, dense: bool = False) -> AllScanCarrier:
        """That of ``comm``, the same until it is closed."""
        name = "carrier of transitions" if dense else "carrier"
        return comm.attributes.get(name) or comm.attributes.setdefault(name, AllScanCarrier(comm, dense))

    def prepare(
        self,
        shape: Sequence[int] | None,
        agree: tuple[Any, ...] | None = None,
        deferred: DeferredError | None = None,
        *,
        at_first: bool = False,
    ) -> AllScan:
        if self._dense:
            variant = ScanVariant(None if shape is None else transition_tile(shape[-2]))
        else:
            # A program keeps large ones of other kernels off its multiprocessor: half of those that may wait do
            algorithm = "chain" if shape is None else self.comm.topology.algorithm_for(4 * math.prod(shape))
            variant = ScanVariant(None, max(1, self.comm.max_ctas // 2), algorithm)
        return get_or_create_scan(self.comm, shape, agree, deferred, at_first, variant)

    def stream(self, priority: int = SCANS) -> AbstractContextManager[Callable[[], None]]:
        return self.comm.streams.side(priority)

    def neighbours(self, shape: tuple[int, ...], zigzag: bool) -> tuple[bool, bool]:
        if zigzag or self._scan(shape).algorithm != "chain":
            return True, True
        return self.comm.rank > 0, self.comm.rank < self.comm.size - 1

    def record(self, plan: Plan, carried: Carried, reverse: bool, zigzag: bool) -> None:
        scan = self._scan(carried.state.shape)
        if zigzag or scan.algorithm != "chain":
            record_call(plan, carried, reverse, zigzag)
            return
        factors = (carried.decay, carried.transition) if carried.passes[0] else ()
        fwd_epoch = plan.view(carried.fwd_epoch, 0, 1)
        buffers = Scanned(carried.state, carried.out, fwd_epoch, *factors)
        scan.launcher.record_scan(plan, buffers, reverse, carried.stamp)

    def _scan(self, shape: Sequence[int]) -> AllScan:
        return self.prepare((shape[0] * shape[2], *shape[3:]))

    def carry(self, carried: Carried, reverse: bool, zigzag: bool) -> None:
        scan, out, fwd_epoch = self._scan(carried.state.shape), carried.out, carried.fwd_epoch
        halves = [self._half(carried, i) for i in range(1 + zigzag)]
        self.comm.order.stamp = carried.stamp
        if zigzag:
            order = (1, 0) if reverse else (0, 1)  # backward, second halves go from the first rank to the last
            channels = two_way_channels(scan, fwd_epoch, reverse)
            found = two_way_scan(scan, *(halves[i] for i in order), channels=channels)
            for i, x in zip(order, found, strict=True):
                out[:, i] = x.unflatten(0, (out.shape[0], -1))
        else:
            channel = scan.launcher.channel(reverse, **{"adjoint_of" if reverse else "fwd_epoch": fwd_epoch})
            state, decay, *_ = halves[0]
            scan.scan(state, decay, reverse=reverse, out=out.view(scan.shape), channel=channel)

    def _half(self, carried: Carried, i: int) -> ScanInputs:
        state, *factors = (
            None if x is None else x[:, i].flatten(0, 1) for x in (carried.state, carried.decay, carried.transition)
        )
        return ScanInputs(state, *factors) if carried.passes[i] else ScanInputs(state, 0)

    def expected_us(self, words: int, zigzag: bool) -> float:
        hops = (self.comm.size - 1) * (1 + zigzag)
        return hops * HOP_US + words * WORD_US if hops else 0.0

    def pending(self, prepared: Any, zigzag: bool) -> list[PendingBackward]:
        return pending_backwards(prepared.launcher.backwards, zigzag)


class InOrderCarrier(AllScanCarrier):
    """Of ``invariant=``: a chain through all segments in the order of the sequence, see GLAPlan.carry_in_order."""

    @staticmethod
    def of(comm: Communicator, dense: bool = False) -> InOrderCarrier:
        """That of ``comm``, the same until it is closed."""
        name = "carrier of transitions in order" if dense else "carrier in order"
        found: InOrderCarrier | None = comm.attributes.get(name)
        return found or comm.attributes.setdefault(name, InOrderCarrier(comm, dense))  # type: ignore[no-any-return]

    def prepare(
        self,
        shape: Sequence[int] | None,
        agree: tuple[Any, ...] | None = None,
        deferred: DeferredError | None = None,
        *,
        at_first: bool = False,
    ) -> AllScan:
        tile = transition_tile(shape[-2]) if self._dense and shape is not None else None
        return get_or_create_scan(self.comm, shape, agree, deferred, at_first, ScanVariant(tile))

    def record_segments(
        self, plan: Plan, kernel: Any, buffers: Sequence[Buffer | None], how: tuple[bool, bool, int], **fixed: Any
    ) -> None:
        """Record a scan of a kernel of shmem_kernels/segments.py; the last two buffers are the outgoing state and the
        forward epoch. how: (over the ranks in reverse; an adjoint; the call's stamp)."""
        present = [x for x in buffers if x is not None]
        scan = self.prepare(present[-2].shape)
        launcher, tiles = scan.launcher, scan.spec.num_tiles
        kernel = launcher.linked(kernel)
        fixed |= {name: None for name, x in zip(kernel.arg_names, buffers) if x is None}
        if self._dense:
            fixed |= dense_blocks(scan.tile[0])
        else:
            fixed["num_warps"] = max(1, min(8, math.prod(scan.tile) // 512))
        # waiting programs hold their places; on one rank none waits
        programs = tiles if self.comm.size == 1 else min(tiles, scan.max_ctas)
        launcher.record_launch(plan, Launch(kernel, (programs,), **fixed), present, how)

    def record_halves(
        self,
        plan: Plan,
        kernel: Any,
        buffers: Sequence[Buffer | None],
        back: Sequence[Buffer],
        stamp: int,
        **fixed: Any,
    ) -> None:
        """The same over each of the HALVES of this rank's tokens, with REVERSE from the last. ``buffers``: the kernel's
        first; ``back``: the outgoing state of each half, and the forward epochs. The last rank's outgoing state of the
        half that is gone through first comes to the other."""
        *outgoing, fwd_epoch = back
        halves, reverse = fixed["HALVES"], fixed["REVERSE"]
        handed = None
        for i in range(halves):
            half, against = halves - 1 - i if reverse else i, i == 1 if halves == 2 else reverse
            segment_buffers = *buffers, handed, outgoing[half], plan.view(fwd_epoch, 2 * half, 1)
            self.record_segments(plan, kernel, segment_buffers, (against, reverse, stamp), HALF=half, **fixed)
            handed = outgoing[half] if self.comm.rank == self.comm.size - 1 else None


def check_invariant(comm: Communicator, invariant: object, zigzag: int) -> int:
    """``invariant`` of a call as an int. Raises TypeError or ValueError where such calls are not possible."""
    invariant = integer("invariant", invariant, 0)
    if invariant % CHUNK_TOKENS:
        raise ValueError(f"invariant must be a multiple of {CHUNK_TOKENS} tokens, got {invariant}")
    if invariant and zigzag == PER_DOCUMENT:
        raise ValueError(
            f"invariant={invariant} does not go with per_document=True: each document is cut into 2P chunks, which "
            f"would have to be multiples of it: no document could have less than {2 * comm.size * invariant} tokens"
        )
    if invariant and comm.algorithm in ("rails", "recursive_doubling"):
        raise ValueError(
            f'invariant={invariant} adds in the order of the sequence, which algorithm="{comm.algorithm}" of the '
            'communicator does not: make it with "auto" or "chain"'
        )
    if invariant and not isinstance(comm.attributes.get("carrier", AllScanCarrier.of(comm)), AllScanCarrier):
        raise ValueError("invariant is All-Scan's, the communicator has another carrier")
    return invariant


def check_cut(comm: Communicator, T: int, invariant: int, zigzag: int) -> None:
    """Raise ValueError unless this rank's T tokens end at a multiple of ``invariant``, or the global sequence with
    them."""
    tokens = T // 2 if zigzag else T
    if invariant and tokens % invariant and (zigzag or comm.rank < comm.size - 1):
        what = "half of T" if zigzag else "T, but on the last rank,"
        raise ValueError(f"with invariant={invariant} {what} must be a multiple of it, got T = {T}")


# By handle, those that are no communicator's own
_carriers: weakref.WeakValueDictionary[int, StateCarrier] = weakref.WeakValueDictionary()
_handles = itertools.count(-1, -1)  # a communicator's are positive


def register(carrier: StateCarrier) -> int:
    """A handle for a carrier of one's own, for as long as the object lives."""
    handle = next(_handles)
    _carriers[handle] = carrier
    return handle


def carrier_of(handle: int, invariant: int = 0) -> StateCarrier:
    """The carrier with this handle. Raises RuntimeError if it, or its communicator, is gone."""
    if invariant:
        return InOrderCarrier.of(communicator_of(handle))
    if handle > 0:
        return AllScanCarrier.of(communicator_of(handle))
    try:
        return _carriers[handle]
    except KeyError:
        raise RuntimeError("this StateCarrier is gone") from None
