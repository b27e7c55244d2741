"""Checks of a communicator around each call: whether it is broken, and whether the ranks are synchronized."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, NoReturn

import torch

from ..base.checks import has_tangents
from ..bindings.torch_compat import forward_ad, graph_task, num_dispatch_modes, recorded, transforms_active
from ..launch.streams import Streams
from ..shmem_kernels.wait import RECORD_SET
from .call_order import Order
from .compile_watch import end_failed, kernels_under_way

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

    def call(self, reverse: bool = False, what: str = "allscan", inputs: object = ()) -> AbstractContextManager[None]:
        """Context manager of one user call: counts it, and remembers it if it raises on this rank alone.

        ``what``: name of the called function. ``inputs``: its inputs; tensors and tuples of tensors among them are
        checked. Raises NotImplementedError for forward-mode derivatives, and inside of torch.func's transforms and
        make_fx."""
        outer = self.order.inside
        return _Call((self, bool(reverse), what, inputs)) if outer is None or not _runs(outer) else _INSIDE

    def end_interrupted(self) -> None:
        """Count a call as failed that Ctrl-C has ended in ``_Call.__exit__``."""
        order = self.order
        if order.inside is not None and not _runs(order.inside):
            order.failed(order.reverse, KeyboardInterrupt("at the end of the call"))
            order.inside = None

    def _look_for_steps(self) -> None:
        """Warn on the first rank, once, of a loop without ``step()``: at the first call outside of backward passes
        after one in a backward pass. Called when a call finds ``order.loop`` to change."""
        order = self.order
        order.loop += 1
        if order.loop == 2 and self.rank == 0:
            warnings.warn(NO_STEPS, stacklevel=4)  # the caller of allscan() or of an operator

    def _look_for_nan(self, what: str, **results: torch.Tensor | None) -> None:
        """Debug mode, outside of captures: wait for ``results`` of a call, and raise RuntimeError on every rank if they
        have NaN on any rank."""
        if not self.debug or self.streams.capturing():
            return
        found = [name for name, x in results.items() if x is not None and bool(x.isnan().any())]
        self.check()  # a wait that timed out leaves NaN, too
        self.order.compare_results(what, found)


class _Call(tuple[Any, ...]):
    """See ``Calls.call``: (communicator, reverse, what, inputs)."""

    __slots__ = ()

    def __enter__(self) -> None:
        comm, reverse, _, inputs = self
        order = comm.order
        if kernels_under_way:  # this thread's have failed, since it makes a call
            end_failed()
        if comm._closed or comm.host_record[_SET] or order.desync_reason is not None:
            comm.check()
        if order.inside is not None:
            comm.end_interrupted()
        if order.rejected is not None:
            order.wait_for_rejections()
        try:
            order.inside, order.everywhere, order.reverse, order.stamp = sys._getframe(1), False, reverse, 0
            order.call_counts[reverse] += 1
            if order.loop < 2 and (graph_task() != -1) != order.loop:  # without a function, for speed
                comm._look_for_steps()
            if transforms_active() or (forward_ad._current_level >= 0 and has_tangents(inputs)):
                self._reject()
            if num_dispatch_modes() and recorded():
                raise NotImplementedError(f"make_fx cannot record {self[2]} with these arguments")
        except BaseException as error:  # also Ctrl-C: without an entry there is no __exit__
            self.__exit__(type(error), error, None)
            raise

    def _reject(self) -> NoReturn:
        if transforms_active():
            why = "allscan does not work inside of torch.func's transforms (vmap, grad, jvp)"
        else:
            why = f"{self[2]} has no forward-mode derivatives (torch.func.jvp, forward_ad)"
        raise NotImplementedError(why)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        comm = self[0]
        if error is not None:
            comm.order.failed(self[1], error)
        comm.order.inside = None  # last: after Ctrl-C above the next call finds that this one has not ended


_INSIDE = contextlib.nullcontext()  # context manager of a nested call


def _runs(frame: FrameType, top: FrameType | None = None) -> bool:
    """Whether a function runs below ``top``, by default in any thread. It does not if Ctrl-C has ended it."""
    here = top or sys._getframe(1)
    while here is not None and here is not frame:
        here = here.f_back  # type: ignore[assignment]
    return here is frame or (top is None and any(_runs(frame, other) for other in sys._current_frames().values()))
