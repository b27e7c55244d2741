"""Checks of a communicator around each call: whether it is broken, and whether the ranks are synchronized. The key by
which a call finds in ``comm.calls`` what an equal one has prepared."""

from __future__ import annotations

import contextlib
import functools
import numbers
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..base.checks import Shift, has_tangents
from ..bindings.torch_compat import forward_ad, graph_task, num_dispatch_modes, recorded, transforms_active
from ..launch.streams import Streams
from ..shmem_kernels.wait import RECORD_SET
from .call_order import Order

_SET = RECORD_SET.value

NO_STEPS = (
    "a backward pass has ended, and Communicator.step() was never called: if one rank skips an iteration (an except, a "
    "continue, a loader that ends), the ranks use states of different batches without an error. Call comm.step() first "
    "in every iteration, on every rank"
)


class Calls:
    """Base class of Communicator: entry and exit of calls."""

    debug: bool
    order: Order
    rank: int
    streams: Streams
    host_record: Any  # the fault record
    _closed: bool
    check: Callable[[], None]

    def call(self, reverse: bool = False, what: str = "a check", inputs: object = ()) -> AbstractContextManager[None]:
        """Context manager of one user call: counts it, and remembers it if it raises on this rank alone.

        ``what``: name of the called function. ``inputs``: its inputs; tensors and tuples of tensors among them are
        checked. Raises NotImplementedError for forward-mode derivatives, and inside of torch.func's transforms and
        make_fx."""
        inside = self.order.inside
        if inside is not None and inside() is not None:
            return _NESTED
        return _Call(_leave, self, bool(reverse), what, inputs)

    def _look_for_steps(self) -> None:
        """Warn on the first rank, once, of a loop without ``step()``: at the first call outside of backward passes
        after one in a backward pass. Called when a call finds ``order.loop`` to change."""
        order = self.order
        order.loop += 1
        if order.loop == 2 and self.rank == 0:
            warnings.warn(NO_STEPS, stacklevel=4)  # the caller of allscan() or of an operator

    def _look_for_nan(self, what: str, **results: Tensor | None) -> None:
        """Debug mode, outside of captures: wait for ``results`` of a call, and raise RuntimeError on every rank if they
        have NaN on any rank."""
        if not self.debug or self.streams.capturing():
            return
        found = [name for name, x in results.items() if x is not None and bool(x.isnan().any())]
        self.check()  # a wait that timed out leaves NaN, too
        self.order.compare_results(what, found)


class _Call(functools.partial):  # type: ignore[type-arg]
    """See ``Calls.call``. The ``with`` statement holds the only reference to it, so ``Order.inside``, a weak one, tells
    whether the block still runs, also if Ctrl-C has prevented that ``_leave`` runs. It is a partial of ``_leave``
    because then no frame of a traceback refers to it."""

    __exit__ = functools.partial.__call__

    def __enter__(self) -> None:
        comm, reverse, what, inputs = self.args
        order = comm.order
        if comm._closed or comm.host_record[_SET] or order.desync_reason is not None:
            comm.check()
        if order.inside is not None:
            raise order.interrupted()
        if order.rejected is not None:
            order.wait_for_rejections()
        order.everywhere, order.reverse, order.stamp, order.what = False, reverse, 0, what
        try:
            order.inside, order.call_counts[reverse] = weakref.ref(self), order.call_counts[reverse] + 1
            if order.loop < 2 and (graph_task() != -1) != order.loop:  # without a function, for speed
                comm._look_for_steps()
            if transforms_active() or (forward_ad._current_level >= 0 and has_tangents(inputs)):
                _reject(what)
            if num_dispatch_modes() and recorded():
                raise NotImplementedError(f"make_fx cannot record {what} with these arguments")
        except BaseException as error:  # also Ctrl-C: without an entry there is no exit
            if order.inside is not None:
                _leave(*self.args, type(error), error, None)
            raise


def _leave(comm: Calls, reverse: bool, *rest: Any) -> None:
    """The exit of a call: ``rest`` ends with the type, value and traceback of its exception, or three times None."""
    error = rest[-2]
    if error is not None:
        comm.order.failed(reverse, error)
    comm.order.inside = None  # last: after Ctrl-C above the next call finds that this one was interrupted


def _reject(what: str) -> NoReturn:
    if transforms_active():
        why = "allscan does not work inside of torch.func's transforms (vmap, grad, jvp)"
    else:
        why = f"{what} has no forward-mode derivatives (torch.func.jvp, forward_ad)"
    raise NotImplementedError(why)


_NESTED: AbstractContextManager[None] = contextlib.nullcontext()  # context manager of a nested call


def call_key(inputs: Sequence[object]) -> tuple[object, ...]:
    """Cache key of the variant of a call with these inputs: ``signature_of`` them, and for each number whether it is 0.
    The last entry is False if no gradient is wanted, 1 if one is wanted, 2 if one is wanted and torch cannot save the
    tensors for it (torch.inference_mode)."""
    grad, inference, wanted = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), False
    found: list[object] = []
    for x in inputs:
        if x is None:
            found.append(None)
        elif isinstance(x, Tensor):
            found += type(x), x.shape, x.dtype, x.device, x.layout
            if grad:
                wanted = wanted or x.requires_grad
                inference = inference or x.is_inference()
        else:
            found += type(x), x == 0 if isinstance(x, numbers.Real) else x if isinstance(x, Shift) else None
    found.append(wanted and 1 + inference)
    return tuple(found)
