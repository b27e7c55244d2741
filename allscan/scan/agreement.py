"""Cache of AllScans by shape, and the agreement of the ranks on a call's arguments at its first call."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..base.errors import DeferredError
from ..bindings.torch_compat import without_dispatch_modes
from ..comm.communicator import Communicator
from .collective import AllScan


class ScanVariant(NamedTuple):
    """The arguments of an AllScan that select it besides its shape; see ``AllScan``."""

    tile: tuple[int, int] | None = None
    max_ctas: int | None = None
    algorithm: str = "chain"


CHAIN = ScanVariant()


def get_or_create_scan(
    comm: Communicator,
    shape: Any,
    agree: tuple[Any, ...] | None = None,
    deferred: DeferredError | None = None,
    first_call_only: bool = False,
    variant: ScanVariant = CHAIN,
) -> AllScan:
    """The cached AllScan of ``comm`` for a shape and variant. The first call constructs it and is collective.

    Args:
        comm, variant: see ``AllScan`` and ``ScanVariant``.
        shape: of the state; None if a rank with an invalid argument cannot tell it.
        agree: further values that must be equal on all ranks: the name of the call, then (name, value) pairs. The first
            call with new values is collective too; in debug mode every call is. None: no further values.
        deferred: the error of this rank's invalid arguments. This function raises it. At a first call the other ranks,
            which are about to construct the workspace, raise ValueError with it, as they do if ``shape`` or ``agree``
            differ. An error without a shape counts as one of a first call until there has been another call.
        first_call_only: the error is of a check made at first calls with ``agree`` only: all ranks are in such a call.
    """
    comm.check()
    scans, arguments = comm.agreed.scans, comm.agreed.arguments
    shape = None if shape is None else tuple(shape)
    key = shape, variant
    always = comm.debug and agree is not None
    if deferred is not None and not (first_call_only or always) and (key in scans or (shape is None and scans)):
        raise deferred.take()
    first = key not in scans or (agree is not None and (shape, agree) not in arguments)
    if first or always:
        if first and deferred is None and comm.streams.capturing():
            raise RuntimeError(
                "the first call for a shape exchanges arguments and allocates memory, which cannot be captured: call "
                "once before the capture"
            )
        call, *pairs = agree or (None,)
        shapes = ("the state's shape", shape), *variant._asdict().items()
        comm.order.agree((("call", call), *shapes, *pairs), deferred, "the first call for a shape")
        if key not in scans:
            with without_dispatch_modes():  # selective checkpointing's mode counts torch operators
                scans[key] = AllScan(comm, shape, **variant._asdict())
        if first:
            arguments.remember((shape, agree))
    if deferred is not None:
        raise deferred.take()
    scan: AllScan = scans[key]
    return scan
