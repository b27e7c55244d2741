"""allscan_segments(): the scan over segments, whose results are bitwise equal for every partition over ranks."""

from __future__ import annotations

import numbers
import weakref
from typing import Any

import torch
from torch import Tensor

from ..base.autograd import Function, check_saveable, second_derivative_error, wants_gradient
from ..base.checks import check_decay, check_tensor, is_zigzag, restored
from ..base.errors import DeferredError
from ..base.tiling import transition_tile
from ..comm.backwards import PendingBackward, borrow_fwd_epoch, gone_error, new_fwd_epochs, recomputing, saved_tensors
from ..comm.communicator import Communicator, check_communicator
from ..comm.tags import stamp
from ..launch.compiled_kernel import dynamo_disabled
from ..scan.agreement import ScanVariant, get_or_create_scan
from ..scan.segment_launches import Direction, Segments, SegmentScans, outer_products, row_sums
from .allscan import JoinBackward
from .carrier import check_in_order

NAME = "allscan_segments()"


@dynamo_disabled
def allscan_segments(
    states: Any,
    decays: Any = None,
    *,
    comm: Communicator,
    transitions: Any = None,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    layout: str = "contiguous",
) -> tuple[Any, Any]:
    """Differentiable exclusive scan over the segments of a sharded sequence. The incoming state of each segment is
    bitwise equal for every number of ranks.

        R' = decay_s * R + state_s        with transitions:  R' = transition_s R + state_s

    The scan runs segment by segment in sequence order, from rank 0's first to the last rank's last. With ``allscan``
    a rank's tokens are added up first, in an order that depends on the partition. Here one function computes each step,
    with one rounding for a decay, so that the result and the gradients of states, decays, transitions and initial_state
    do not depend on rank boundaries. -0.0 counts as +0.0 at the boundary of every segment. The gradients are the same
    scan from the last segment to the first: with E_s = dL/d(outgoing state of segment s), dstate_s = E_s,
    ddecay_s = sum(E_s * R_s), dtransition_s = E_s R_s^T.

    The call is collective, like ``allscan``; for gradients every rank must use a result. The algorithm is a chain over
    the ranks, also if ``comm.algorithm`` is "auto". torch.compile breaks its graph here.

    Args:
        states: [n, ..., K, V] float32, the local state of each of this rank's n segments. n may differ between ranks
            and calls, and may be 0: such a rank forwards the incoming state.
        decays: None (1), a number, or float32 [n, ..., K] or [n, ...], in [0, 1].
        comm: the communicator.
        transitions: float32 [n, ..., K, K] in place of decays, on all ranks or on none.
        initial_state: [..., K, V] float32, the state before the global first segment; equal on all ranks or None on all
            ranks. Its gradient is non-zero on the first rank only.
        reverse: whether to scan from the last rank's last segment to the first; equal on all ranks.
        layout: "contiguous", or "zigzag" for ranks that hold chunks p and 2P - 1 - p of 2P. In the zigzag layout
            states, and decays and transitions unless None, are pairs, for the segments of the first and of the second
            chunk. Not with reverse.

    Returns:
        (incoming, outgoing): incoming [n, ..., K, V] is the incoming state of each segment; outgoing [..., K, V] is the
        outgoing state of this rank's last segment, on the last rank the final state. In the zigzag layout each is a
        pair; rank 0's second outgoing state is the final state.

    Raises:
        TypeError: the dtype is not supported.
        ValueError: shape or device are wrong, arguments differ between ranks, or the communicator has
            algorithm="rails" or "recursive_doubling", which add in another order.
        RuntimeError: as ``allscan``, whose other errors are raised too; each before anything is launched.

    Example:
        >>> incoming, outgoing = allscan.allscan_segments(states, decays, comm=comm)
    """
    check_communicator(comm)
    reverse = bool(reverse)
    inputs = states, decays, transitions, initial_state
    with comm.call(reverse, NAME, inputs):
        parts, deferred = [], None
        try:
            zigzag = is_zigzag(layout)
            parts = _parts(states, decays, transitions, zigzag)
            _check(comm, parts, initial_state, reverse and zigzag)
        except (TypeError, ValueError) as error:
            deferred = DeferredError(error)
        if deferred is not None:
            get_or_create_scan(comm, None, deferred=deferred)
        shape, dense = parts[0].states.shape[1:], parts[0].transitions is not None
        fields = dict(layout=layout, reverse=reverse) | {"initial_state is None": initial_state is None}
        agree = "allscan_segments", *fields.items(), ("transitions is None", not dense)
        comm.order.stamp = comm.order.stamp or stamp(*agree)  # the calling operator's stamp, if any
        tile = transition_tile(shape[-2]) if dense else None
        scans = SegmentScans.of(get_or_create_scan(comm, shape, agree, variant=ScanVariant(tile)))
        if not zigzag:
            return _scan(scans, parts[0], initial_state, Direction(reverse, reverse))
        return _scan_zigzag(scans, parts, initial_state)


def _parts(states: Any, decays: Any, transitions: Any, zigzag: bool) -> list[Segments]:
    if not zigzag:
        return [Segments(states, decays, transitions)]
    pairs = [(None, None) if x is None else x for x in (states, decays, transitions)]
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise TypeError('with layout="zigzag" states, decays and transitions must be pairs: (first half, second half)')
    return [Segments(*part) for part in zip(*pairs, strict=True)]


def _check(comm: Communicator, parts: list[Segments], initial_state: Any, both: bool) -> None:
    """Raise TypeError or ValueError for arguments that are wrong on this rank."""
    if both:
        raise ValueError('layout="zigzag" does not support reverse=True')
    check_in_order(comm, NAME)
    shape: tuple[int, ...] | None = None
    for states, decays, transitions in parts:
        check_tensor("states", states, None, comm.device)
        if states.ndim < 3 or min(states.shape[1:]) < 1 or (shape or states.shape[1:]) != states.shape[1:]:
            wanted = "[n, ..., K, V] where all dimensions except n are non-zero and equal in both"
            raise ValueError(f"states must be {wanted}, got {tuple(states.shape)}")
        shape = states.shape[1:]
        if transitions is not None:
            check_tensor("transitions", transitions, (*states.shape[:-1], states.shape[-2]), comm.device)
            if decays is not None:
                raise ValueError("give decays or transitions, not both")
        elif isinstance(decays, Tensor):
            check_tensor("decays", decays, None, comm.device)
            if decays.shape not in (states.shape[:-1], states.shape[:-2]):
                shapes = f"{tuple(states.shape[:-1])} or {tuple(states.shape[:-2])}"
                raise ValueError(f"decays must have the shape {shapes}, got {tuple(decays.shape)}")
        elif decays is not None and not isinstance(decays, numbers.Real):
            raise TypeError(f"decays must be a number or a tensor, got {type(decays).__name__}")
        else:
            check_decay(decays, states.shape, comm.device)  # raises for a number that is not a float
    if initial_state is not None:
        check_tensor("initial_state", initial_state, shape, comm.device)
    inputs = *(x for part in parts for x in part), initial_state
    check_saveable(inputs, inputs)


def _scan(
    scans: SegmentScans, part: Segments, initial_state: Any, direction: Direction, zigzag: bool = False
) -> tuple[Tensor, Tensor]:
    states, decays, transitions = part
    if not wants_gradient((states, decays, transitions, initial_state)):
        return scans.run(part, direction, None, initial_state)
    number = None if isinstance(decays, Tensor) else decays
    decays = decays if number is None else None
    found: tuple[Tensor, Tensor] = _AllScanSegments.apply(
        (scans, number, direction, zigzag), states, decays, transitions, initial_state
    )
    return found


def _scan_zigzag(scans: SegmentScans, parts: list[Segments], initial_state: Any) -> tuple[Any, Any]:
    """Run the ascending scan over the ranks, then the descending scan. The latter begins on the last rank with the
    outgoing state of its first chunk; within a rank, segments are in ascending order in both."""
    inputs = [*(x for part in parts for x in part), initial_state]
    wanted = wants_gradient(inputs)
    if wanted:  # both scans then have a backward on every rank, whichever inputs require gradients
        taken = [x if i % 3 == 0 or (isinstance(x, Tensor) and x.requires_grad) else None for i, x in enumerate(inputs)]
        taken[-1] = initial_state if isinstance(initial_state, Tensor) and initial_state.requires_grad else None
        found = JoinBackward.apply(None, *taken)
        *inputs, initial_state = [x if t is None else t for x, t in zip(inputs, found, strict=True)]
        parts = [Segments(*inputs[:3]), Segments(*inputs[3:])]
    ascending, passed = _scan(scans, parts[0], initial_state, Direction(), True)
    outgoing_state = passed if scans.is_first(True) else None
    descending, left = _scan(scans, parts[1], outgoing_state, Direction(reverse=True), True)
    results = (ascending, descending, passed, left)
    if wanted:
        results = JoinBackward.apply(None, *results)
    return results[:2], results[2:]


class _AllScanSegments(Function):
    @staticmethod
    def forward(ctx: Any, how: Any, states: Any, decays: Any, transitions: Any, initial_state: Any) -> Any:
        scans, number, direction, zigzag = how
        comm, again = scans.comm, recomputing()
        fwd_epoch, free = (new_fwd_epochs(comm, 1), None) if again else borrow_fwd_epoch(comm)
        part = Segments(states, number if decays is None else decays, transitions)
        try:
            incoming, outgoing = scans.run(part, direction, fwd_epoch, initial_state)
        except BaseException:
            if free is not None:
                free.append(fwd_epoch)
            raise
        factor, uses = decays if transitions is None else transitions, any(ctx.needs_input_grad[2:4])
        # save two tensors on every rank, whichever inputs it has: see ops/allscan.py
        ctx.save_for_backward(comm.placeholder if factor is None else factor, incoming if uses else comm.placeholder)
        ctx.set_materialize_grads(False)
        looks = None if zigzag else direction.reverse  # see PendingBackward
        pending = None if again else PendingBackward(scans.launcher.backwards, looks, fwd_epoch, free)
        shapes = states.shape, None if factor is None else factor.shape
        of_call = comm.handle, comm.order.stamp
        ctx.saved = weakref.ref(scans), of_call, number, direction, fwd_epoch, pending, decays is not None, shapes
        return incoming, outgoing

    @staticmethod
    def backward(ctx: Any, dincoming: Any, doutgoing: Any) -> tuple[Tensor | None, ...]:
        reference, (handle, stamp_of_call), number, direction, fwd_epoch, pending, has_decays, (shape, factor_shape) = (
            ctx.saved
        )
        scans = reference()
        if scans is None:
            raise gone_error(handle)
        comm = scans.comm
        if pending is not None:
            pending.run()
        saved = saved_tensors(ctx, lambda: comm, not direction.reverse)
        with comm.call(not direction.reverse, f"the backward of {NAME}", (dincoming, doutgoing)):
            if torch.is_grad_enabled():
                raise second_derivative_error(NAME)
            comm.order.stamp = stamp_of_call
            uses = any(ctx.needs_input_grad[2:4])
            shapes = (factor_shape or comm.placeholder.shape, shape if uses else comm.placeholder.shape)
            kinds = [(torch.float32, x, comm.device) for x in shapes]
            factor, incoming = restored(NAME, ("decays_or_transitions", "incoming"), saved, kinds)
            decays, transitions = (factor, None) if has_decays else (number, None if factor_shape is None else factor)
            if dincoming is None:
                dincoming = torch.zeros(shape, dtype=torch.float32, device=comm.device)
            part = Segments(dincoming, decays, transitions)
            dstates, dinitial = scans.run(part, direction.back(), fwd_epoch, doutgoing)
            ddecays = dtransitions = None
            if ctx.needs_input_grad[2]:
                ddecays = row_sums(dstates, incoming)
                if ddecays.shape != factor_shape:
                    ddecays = row_sums(ddecays)
            if ctx.needs_input_grad[3]:
                dtransitions = outer_products(dstates, incoming)
            if not ctx.needs_input_grad[4]:
                dinitial = None
            elif not scans.is_first(direction.reverse):
                dinitial = torch.zeros_like(dinitial)
            return None, dstates, ddecays, dtransitions, dinitial
