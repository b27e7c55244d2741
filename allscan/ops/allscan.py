"""allscan(): the differentiable function over AllScan."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base.autograd import (
    NOT_SAVEABLE,
    CustomOperator,
    Function,
    Passes,
    check_saveable,
    product,
    second_derivative_error,
)
from ..base.checks import (
    ScanInputs,
    check_decay,
    check_scan,
    is_zigzag,
    plain_or_traced,
    restored,
)
from ..base.errors import DeferredError
from ..base.tiling import next_power_of_2, transition_tile
from ..bindings.torch_compat import num_dispatch_modes, recorded
from ..comm.backwards import PendingBackward, borrow_fwd_epoch, gone_error, new_fwd_epochs, recomputing, saved_tensors
from ..comm.calls import call_key
from ..comm.communicator import Communicator, check_communicator, communicator_of
from ..comm.tags import stamp
from ..launch.compiled_kernel import dynamo_disabled
from ..scan.agreement import CHAIN, ScanVariant, get_or_create_scan
from ..scan.launcher import PreparedScan, Work, check_out
from ..scan.zigzag_scan import outgoing

Array = TypeVar("Array")  # torch.Tensor, numpy.ndarray or cupy.ndarray


def allscan(
    state: Array,
    decay: Array | float | None = None,
    *,
    comm: Communicator,
    transition: Array | None = None,
    initial_state: Array | None = None,
    reverse: bool = False,
    out: Array | None = None,
    layout: str = "contiguous",
    async_op: bool = False,
) -> Any:
    """Differentiable exclusive scan of a state over the ranks of ``comm``, in rank order.

        R_0 = initial_state (or 0),   R_{p+1} = decay_p * R_p + state_p,   rank p gets R_p
        with a transition:            R_{p+1} = transition_p R_p + state_p

    With reverse=True the scan runs from the last rank to the first. With D_p = dL/dR_{p+1} the adjoint is the scan in
    the other direction: D_{p-1} = decay_p * D_p + dL/d(out_p),  dstate_p = D_p,  ddecay_p = sum(D_p * R_p) over the
    broadcast dimensions; D_{p-1} = transition_p^T D_p + dL/d(out_p),  dtransition_p = D_p R_p^T.

    In a chain each rank receives one state and sends one; with several nodes ``comm.algorithm`` selects the algorithm
    (docs/rails.md). The first call for a shape is collective on the host: it creates an ``AllScan``, which ``comm``
    caches. Later calls only launch one kernel on the current stream. torch.compile traces the call as one operator,
    also with fullgraph=True, except for the zigzag layout, out, async_op and other kinds of array.

    Args:
        state: [..., K, V] float32; on the communicator's device. A torch tensor, or a CuPy or NumPy array.
        decay: None (1), a number, or float32 [..., K], [...], or no dimension; in [0, 1], a factor and no logarithm:
            checked at the first call for a shape and in debug mode only. 0 discards the incoming state. With the
            number 0 in a chain this rank sends all tiles before it waits for any, so the next rank waits for this rank
            only.
        transition: float32 [..., K, K] in place of a decay, for delta rules and other dense recurrences: the product of
            the transitions of this rank's tokens. It is not sent; products have float32's accuracy.
        initial_state: like state, equal on all ranks or None on all ranks; its gradient is non-zero on the first rank
            only.
        reverse: whether to scan from the last rank to the first; equal on all ranks.
        comm: the communicator.
        out: like state, receives the result in place of a new array; not with gradients.
        layout: "contiguous", or "zigzag" for ranks that hold chunks p and 2P - 1 - p of 2P. In the zigzag layout state,
            and decay and transition unless None, are pairs of tensors, for the first and for the second chunk. An
            ascending scan is followed by a descending scan:
            E_{P-1} = R_P, E_{p-1} = decay'_p * E_p + state'_p. Not with reverse or out. For gradients every rank must
            use one of the results, or both in one backward pass.
        async_op: return an ``allscan.Work`` at once, whose ``wait()`` returns R_p. The scan runs on the communicator's
            own stream, overlapped with later kernels of the current stream. The scan of the backward pass is not
            asynchronous. For torch tensors in the contiguous layout.

    Returns:
        R_p, like state and of the same kind of array; in the zigzag layout (R_p, E_p).

    Raises:
        TypeError: the dtype is not supported.
        ValueError: shape or device are wrong, or arguments differ between ranks.
        RuntimeError: the communicator is closed or has no transport, or a first call is in a CUDA graph's capture. In
            debug mode also for NaN in a result.
        NotImplementedError: forward-mode AD or torch.func.
        MemoryError: the arena is full.
        AllScanTimeout: a kernel's wait has timed out: an earlier call's, on CPU ranks also this one's.
        AllScanOutOfStep: the ranks have not made the same calls; on CPU ranks also found by this call.
        AllScanHostTimeout, AllScanRejected: in a first call, if another rank does not come, or has rejected it.
        All but those of CPU ranks and NaN are raised before anything is launched.

    Example:
        >>> comm = allscan.Communicator()
        >>> prev = allscan.allscan(state, decay, comm=comm)         # rank p: the scan of ranks 0 .. p-1
        >>> work = allscan.allscan(state, decay, comm=comm, async_op=True)
        >>> prev = work.wait()                                      # after kernels that do not need prev
    """
    inputs = ScanInputs(state, decay, transition, initial_state, out)
    if torch.compiler.is_compiling() or (num_dispatch_modes() and recorded()):
        return _compiled(comm, inputs, reverse, layout, async_op)
    if type(comm) is not Communicator:
        check_communicator(comm)
    reverse = bool(reverse)
    with comm.call(reverse, "allscan()", inputs):
        if layout != "contiguous":
            return scan_zigzag(comm, inputs, reverse, layout, async_op)
        if not isinstance(state, Tensor) and not async_op:
            return _foreign(comm, inputs, reverse)
        return scan_once(comm, inputs, reverse, async_op)


_not_traced = dynamo_disabled(allscan)


def _compiled(comm: Communicator, inputs: ScanInputs, reverse: bool, layout: str, async_op: bool) -> Tensor:
    """Run ``allscan`` under torch.compile or make_fx."""
    check_communicator(comm)
    state, decay, transition, initial_state, out = inputs
    if isinstance(state, Tensor) and layout == "contiguous" and out is None and not async_op:
        if decay is None or isinstance(decay, Tensor | int | float):
            number = None if decay is None or isinstance(decay, Tensor) else float(decay)
            factor = decay if isinstance(decay, Tensor) else None
            return _traced.forward(state, factor, transition, initial_state, number, reverse, comm.handle)[0]
    if not torch.compiler.is_compiling():
        with comm.call(bool(reverse), "allscan()", inputs):  # raises: make_fx cannot record it
            pass
    more = dict(transition=transition, initial_state=initial_state, out=out)
    return _not_traced(state, decay, comm=comm, reverse=reverse, layout=layout, async_op=async_op, **more)


# Which scan of a call this is: an ``allscan``'s only one; one of its two in the zigzag layout; one of halo(), which
# compares the whole call's arguments between ranks and uses a chain
WHOLE, HALF, OF_HALO = "whole", "half", "halo"


def scan_once(
    comm: Communicator,
    inputs: ScanInputs,
    reverse: bool,
    async_op: bool = False,
    part: str = WHOLE,
    fwd_epoch: Tensor | None = None,
    adjoint: bool = False,
) -> Any:
    """Run ``allscan`` on tensors in the contiguous layout, inside a call of ``comm``.

    fwd_epoch: of a node with a backward of its own: see ``PreparedScan.run``. adjoint: of a backward.
    """
    key = call_key(inputs)
    prepared = None if comm.debug else comm.calls.get((key, reverse, part, adjoint))
    if prepared is None:
        prepared = _prepare(comm, key, inputs, reverse, part, adjoint)
    if fwd_epoch is not None or not key[-1]:
        return prepared.run(inputs, async_op, fwd_epoch)
    works: list[Work] = []
    state, decay, transition, initial_state, _ = inputs
    decay, number = (decay, None) if isinstance(decay, Tensor) else (None, decay)
    looks = None if part == HALF and prepared.launcher.rails is None else reverse  # see PendingBackward
    prev = _AllScan.apply((prepared, number, async_op, works, looks), state, decay, transition, initial_state)
    if async_op:
        works[0].result = prev  # with autograd's node
    return works[0] if async_op else prev


def _prepare(
    comm: Communicator, key: tuple, inputs: ScanInputs, reverse: bool, part: str, adjoint: bool
) -> PreparedScan:
    """Run all checks; return the PreparedScan of the call, which a first call makes. Wrong arguments raise, at a first
    call on every rank."""
    state, _, transition, initial_state, out = inputs
    shape, agree, variant = getattr(state, "shape", None), None, CHAIN
    descending = part == HALF and reverse  # only the last rank has its initial state, so ranks do not compare it
    if not (part == OF_HALO or adjoint or descending):
        how = "zigzag" if part == HALF else "contiguous", reverse, initial_state is None
        agree = "allscan", *zip(("layout", "reverse", "initial_state is None"), how, strict=True)
    deferred, values_checked = None, False
    try:
        check_scan(inputs, None, comm.device)
        if out is not None:
            if key[-1]:
                raise ValueError("out must be None if an input requires a gradient")
            check_out(inputs)
        if key[-1] == 2:
            raise ValueError(NOT_SAVEABLE)
        first = comm.debug or (shape, agree) not in comm.agreed.arguments  # as SequenceOperator.check_first
        values_checked = first and part == WHOLE and not (adjoint or comm.streams.capturing())
        if values_checked:
            check_decay(inputs.decay, state.shape, comm.device, values=True)
    except (TypeError, ValueError) as error:
        deferred = DeferredError(error)
    if shape is not None and len(shape) > 1 and part != OF_HALO:
        if transition is not None:
            variant = ScanVariant(transition_tile(shape[-2]))
        else:
            variant = ScanVariant(algorithm=comm.topology.algorithm_for(4 * math.prod(shape)))
    scan = get_or_create_scan(comm, shape, agree, deferred, first_call_only=values_checked, variant=variant)
    prepared = scan.launcher.prepared_scan(key, inputs, reverse, adjoint, adjoint)
    comm.calls.remember((key, reverse, part, adjoint), prepared)
    return prepared


ZIGZAG = stamp("allscan", "zigzag")


def scan_zigzag(
    comm: Communicator,
    inputs: ScanInputs,
    reverse: bool = False,
    layout: str = "zigzag",
    async_op: bool = False,
) -> Any:
    """Run ``allscan`` on pairs in the zigzag layout."""
    state, decay, transition, initial_state, out = inputs
    ascending: Any
    descending: Any
    deferred = None
    try:
        is_zigzag(layout)
        pairs = [(None, None) if x is None else x for x in (state, decay, transition)]
        if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
            raise TypeError('with layout="zigzag" state, decay and transition must be pairs: (first half, second half)')
        if reverse or out is not None or async_op:
            raise ValueError("the zigzag layout does not support reverse, out or async_op")
        (ascending, descending), decays, transitions = pairs
        operands = ascending, descending, *decays, *transitions, initial_state
        key = call_key(operands)
        known = "zigzag", key
        if comm.debug or known not in comm.checked:
            if (
                not isinstance(ascending, Tensor)
                or not isinstance(descending, Tensor)
                or ascending.shape != descending.shape
            ):
                raise TypeError("both states must be tensors of the same shape")
            for half in zip((ascending, descending), decays, transitions, (initial_state, None), strict=True):
                check_scan(ScanInputs(*half), None, comm.device)
            for decay in () if comm.streams.capturing() else decays:
                check_decay(decay, ascending.shape, comm.device, values=True)
            check_saveable(operands, operands)
            comm.checked.remember(known)
    except (TypeError, ValueError) as error:
        deferred = DeferredError(error)
    if deferred is not None:
        get_or_create_scan(comm, None, deferred=deferred)
    comm.order.stamp = comm.order.stamp or ZIGZAG  # the calling operator's stamp, if any
    wanted = bool(key[-1])
    if wanted:
        # both scans then have a backward on every rank, even if only one input requires a gradient
        taken = [x if i < 2 or (isinstance(x, Tensor) and x.requires_grad) else None for i, x in enumerate(operands)]
        found = JoinBackward.apply(None, *taken)
        ascending, descending, *rest = (x if t is None else t for x, t in zip(operands, found, strict=True))
        decays, transitions, initial_state = rest[:2], rest[2:4], rest[4]
    inputs = ScanInputs(ascending, decays[0], transitions[0], initial_state)
    prev = scan_once(comm, inputs, False, part=HALF)
    outgoing_state = None
    if comm.rank == comm.size - 1:  # where the ascending scan ends, and the descending one begins
        outgoing_state = outgoing(ScanInputs(ascending, decays[0], transitions[0]), prev)
    inputs = ScanInputs(descending, decays[1], transitions[1], outgoing_state)
    found = prev, scan_once(comm, inputs, True, part=HALF)
    # the last rank then runs the same backward scans as the others, also if only one result is used
    return JoinBackward.apply(None, *found) if wanted else found


class JoinBackward(Function):
    """Identity with one autograd node for several tensors: its backward runs after the backward of all their users."""

    @staticmethod
    def forward(ctx: Any, _, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        # detach() shares the memory; autograd forbids in-place writes to views that a multi-output function returns
        return tuple(x if x is None else x.detach() for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *grads


class _AllScan(Function):
    """Autograd function of ``allscan``. It is no ``Operator``, whose hooks take three more Python calls a pass: the
    forward epoch is borrowed until the node is freed, and async_op returns a Work."""

    @staticmethod
    def forward(
        ctx: Any, how: Any, state: Tensor, decay: Tensor | None, transition: Tensor | None, initial_state: Tensor | None
    ) -> Tensor:
        prepared, number, async_op, works, looks = how
        comm, again = prepared.comm, recomputing()
        fwd_epoch, fwd_epochs = (new_fwd_epochs(comm, 1), None) if again else borrow_fwd_epoch(comm)
        inputs = ScanInputs(state, number if decay is None else decay, transition, initial_state)
        try:
            prev = prepared.run(inputs, async_op, fwd_epoch)
        except BaseException:
            if fwd_epochs is not None:
                fwd_epochs.append(fwd_epoch)
            raise
        if async_op:
            works.append(prev)
            prev = prev.result
        _, _, of_decay, of_transition, _ = ctx.needs_input_grad
        # save two tensors on every rank, whichever inputs it has: torch's activation checkpointing decides by the saved
        # and unpacked tensors what it recomputes, and when
        nothing, factor = comm.placeholder, decay if transition is None else transition
        ctx.save_for_backward(nothing if factor is None else factor, prev if of_decay or of_transition else nothing)
        pending = None if again else PendingBackward(prepared.launcher.backwards, looks, fwd_epoch, fwd_epochs)
        shape = None if factor is None else factor.shape
        of_call = comm.handle, comm.order.stamp
        ctx.saved = weakref.ref(prepared), of_call, fwd_epoch, number, pending, decay is not None, shape
        return prev

    @staticmethod
    def backward(ctx: Any, dprev: Tensor) -> tuple[Tensor | None, ...]:
        if torch.compiler.is_compiling():  # autograd's graph: torch must not trace this backward
            return _backward_not_traced(ctx, dprev)
        reference, (handle, stamp_of_call), fwd_epoch, number, pending, has_decay, shape = ctx.saved
        prepared = reference()
        if prepared is None:
            raise gone_error(handle)
        comm, reverse = prepared.comm, prepared.reverse
        if pending is not None:
            pending.run()
        factor, prev = saved_tensors(ctx, lambda: comm, not reverse)
        with comm.call(not reverse, "the backward of allscan()", (dprev,)):
            if torch.is_grad_enabled():
                raise second_derivative_error("allscan()")
            comm.order.stamp = stamp_of_call
            if shape is None:
                decay, transition = number, None
            else:
                prev = prev if any(ctx.needs_input_grad[2:4]) else None  # type: ignore[assignment]
                factor, prev = _restored(factor, shape, has_decay, prev, dprev)
                decay, transition = (factor, None) if has_decay else (None, factor)
            inputs = ScanInputs(dprev, decay, transition)
            if prepared.backward is None or type(dprev) is not Tensor:
                key = call_key(inputs)
                prepared.backward = prepared.launcher.prepared_scan(key, inputs, not reverse, True, True)
            dstate = prepared.backward.run(inputs, False, fwd_epoch)
            return None, dstate, *_gradients(comm, dstate, inputs, prev, reverse, ctx.needs_input_grad[2:])


_backward_not_traced = dynamo_disabled(_AllScan.backward)


def _restored(factor: Any, shape: Any, is_decay: bool, prev: Any, dprev: Tensor) -> Sequence[Any]:
    """Check saved tensors by ``restored``; return (factor of this shape, prev, of dprev's shape, or None)."""
    kinds, names = [(dprev.dtype, x, dprev.device) for x in (shape, dprev.shape)], "decay" if is_decay else "transition"
    if prev is None:
        return *restored("allscan()", (names,), (factor,), kinds[:1]), None
    return restored("allscan()", (names, "prev"), (factor, prev), kinds)


def _gradients(
    comm: Communicator, dstate: Tensor, inputs: ScanInputs, prev: Any, reverse: bool, wanted: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of decay, transition and initial_state, None if not ``wanted``. ``inputs``: the inputs of
    the scan that computed dstate. ``prev`` is used for the gradients of decay and transition."""
    _, decay, *_ = inputs
    ddecay = dtransition = dinitial = None
    if wanted[0]:
        rows = (dstate * prev).sum(-1)
        if decay.ndim < rows.ndim:
            rows = rows.sum(-1)
        ddecay = rows.sum_to_size(decay.shape)
    if wanted[1]:
        dtransition = product(dstate, prev.mT)
    if wanted[2]:
        dinitial = torch.zeros_like(dstate)
        if comm.rank == (comm.size - 1 if reverse else 0):
            dinitial = outgoing(inputs, dstate, adjoint=True)
    return ddecay, dtransition, dinitial


def _forward(
    state: Tensor,
    decay: Tensor | None,
    transition: Tensor | None,
    initial_state: Tensor | None,
    number: float | None,
    reverse: bool,
    handle: int,
) -> tuple[Tensor, Tensor]:
    """Custom operator of allscan() for torch.compile: (R_p, forward epoch). number: a decay that is no tensor."""
    comm = communicator_of(handle)
    with comm.call(reverse, "allscan()", (state, decay, transition, initial_state)):
        inputs = ScanInputs(state, number if decay is None else decay, transition, initial_state)
        fwd_epoch = new_fwd_epochs(comm, 1)
        return scan_once(comm, inputs, reverse, fwd_epoch=fwd_epoch), fwd_epoch


def _fake(state: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return state.new_empty(state.shape), state.new_empty(1, dtype=torch.int64)


def _backward(
    dprev: Tensor,
    decay: Tensor | None,
    transition: Tensor | None,
    prev: Tensor | None,
    fwd_epoch: Tensor,
    number: float | None,
    reverse: bool,
    handle: int,
    of_decay: bool,
    of_transition: bool,
    of_initial: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of state, decay, transition and initial_state; empty tensors if not wanted."""
    comm = communicator_of(handle)
    with comm.call(not reverse, "the backward of allscan()", (dprev,)):
        if decay is not None:
            decay, prev = _restored(decay, decay.shape, True, prev, dprev)
        elif transition is not None:
            shape = torch.Size((*dprev.shape[:-1], dprev.shape[-2]))
            transition, prev = _restored(transition, shape, False, prev, dprev)
        (fwd_epoch,) = restored(
            "allscan()", ("fwd_epoch",), [fwd_epoch], [(torch.int64, torch.Size([1]), dprev.device)]
        )
        inputs = ScanInputs(dprev, number if decay is None else decay, transition)
        dstate = scan_once(comm, inputs, not reverse, fwd_epoch=fwd_epoch, adjoint=True)
        grads = dstate, *_gradients(comm, dstate, inputs, prev, reverse, (of_decay, of_transition, of_initial))
        if torch.is_grad_enabled():
            raise second_derivative_error("allscan()")
        dstate, *rest = (
            dprev.new_empty(0) if x is None else x.clone() if x is dprev else x.contiguous() for x in grads
        )  # a custom operator must not return its inputs
        return dstate, rest[0], rest[1], rest[2]


def _fake_backward(dprev: Tensor, decay: Tensor, transition: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    of_decay, of_transition, of_initial = rest[-3:]
    shapes = dprev.shape, of_decay and decay.shape, of_transition and transition.shape, of_initial and dprev.shape
    return tuple(dprev.new_empty(shape if shape is not False else 0) for shape in shapes)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    _, decay, transition, _, *ctx.where = inputs
    prev, fwd_epoch = output
    # without these gradients the caller may write to prev in place
    ctx.save_for_backward(decay, transition, prev if any(ctx.needs_input_grad[1:3]) else None, fwd_epoch)
    ctx.mark_non_differentiable(fwd_epoch)


def _gradient(backward: Callable[..., Any], ctx: Any, dprev: Tensor, _) -> tuple[Tensor | None, ...]:
    wanted = ctx.needs_input_grad[1:4]
    grads = backward(dprev, *ctx.saved_tensors, *ctx.where, *wanted)
    return grads[0], *(x if w else None for x, w in zip(grads[1:], wanted, strict=True))


_passes = Passes(_forward, _fake, _backward, _fake_backward)
_traced = CustomOperator("allscan::scan", _passes, _setup_context, _gradient)


def tie_backward(comm: Communicator, x: Tensor, *others: Any) -> Tensor:
    """Return x. Its backward also runs the backward of the other tensors, as every rank must."""
    found: Tensor = _Using.apply(x, comm.handle, *others)
    return found


class _Using(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, handle: int, *others: Any) -> Tensor:
        ctx.handle, ctx.kinds = handle, [(other.shape, other.dtype) for other in others]
        ctx.save_for_backward(*others)  # so that activation checkpointing recomputes here, on every rank
        return x.detach()  # the same memory, but no view for autograd: a caller may write to it in place

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:  # dx may go to a kernel next
        saved_tensors(ctx, lambda: communicator_of(ctx.handle), True)
        return plain_or_traced(dx)[0], None, *(dx.new_zeros(shape, dtype=dtype) for shape, dtype in ctx.kinds)


def check_final(word: str, comm: Communicator, name: str = "output_final_state") -> bool:
    """Return True for "all". Another word raises ValueError and reports it to the other ranks."""
    if word == "all":
        return True
    what = f'{name} must be True, False or "all", got {word!r}'
    if torch.compiler.is_compiling():
        raise ValueError(what)
    with comm.call():
        raise ValueError(what)


FINAL_STATES = 8  # that a scan sends at a time: each shape of a scan has memory of its own in the arena


def final_of_all(
    o: Tensor, final: Any, comm: Communicator, packed: bool, zigzag: bool, step: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Send final states, which are non-zero on one rank, to all ranks; return (o, final states). Without ``packed``
    that rank is the last, in the zigzag layout the first. A rank's backward runs if the rank uses either result. step:
    a step word that the tiles carry; then a rank that only sends in the operator's scan also finds another one there.
    """
    if comm.size == 1:
        return o, final
    found, parts = final, [final]
    if packed:
        count = int(final.shape[0])
        size = min(next_power_of_2(count), FINAL_STATES)
        if missing := -count % size:
            final = F.pad(final, (0, 0, 0, 0, 0, 0, 0, missing))
        parts = final.split(size)
    comm.order.step_word = step
    try:
        for reverse in (True, False):
            if packed or reverse != zigzag:
                others = [allscan(part, comm=comm, reverse=reverse) for part in parts]
                found = found + (others[0] if len(others) == 1 else torch.cat(others))[: len(found)]
    finally:
        comm.order.step_word = None
    if found.requires_grad:
        o, found = tie_backward(comm, o, found), found.clone()  # tie_backward saves the first; users may write to it
    return o, found


def _foreign(comm: Communicator, inputs: ScanInputs, reverse: bool) -> Any:
    """Run ``allscan`` on CuPy or NumPy arrays, through DLPack, without a copy."""
    state, decay, transition, initial_state, out = inputs
    if not hasattr(state, "__dlpack__"):
        raise TypeError(f"state must be a torch tensor or a CuPy or NumPy array, got {type(state).__name__}")

    def tensor(array: Any) -> Any:
        if any(stride < 0 for stride in getattr(array, "strides", None) or ()):
            raise ValueError("an array with negative strides cannot be shared: make a copy of it")
        try:
            return torch.from_dlpack(array) if hasattr(array, "__dlpack__") else array
        except BufferError as error:
            raise TypeError(f"this array cannot be shared: {error}") from error

    if not getattr(getattr(out, "flags", None), "writeable", True):
        raise ValueError("out must be writeable, got a read-only array")
    result = allscan(
        tensor(state),
        tensor(decay),
        transition=tensor(transition),
        comm=comm,
        initial_state=tensor(initial_state),
        reverse=reverse,
        out=tensor(out),
    )
    if type(state).__module__.partition(".")[0] == "cupy":
        import cupy

        result = cupy.from_dlpack(result)  # makes CuPy's stream wait for torch's
        return result if out is None else out
    return result.numpy() if out is None else out
