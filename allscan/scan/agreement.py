"""AllScans by their shapes, and what the ranks have alike in a call: agreed upon once, at first calls."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..base.errors import DeferredError
from ..comm.communicator import Communicator
from .collective import AllScan


class ScanVariant(NamedTuple):
    """What makes an AllScan besides its shape; see there."""

    tile: tuple[int, int] | None = None
    max_ctas: int | None = None
    algorithm: str = "chain"


CHAIN = ScanVariant()


def get_or_create_scan(
    comm: Communicator,
    shape: Any,
    agree: tuple[Any, ...] | None = None,
    deferred: DeferredError | None = None,
    at_first: bool = False,
    variant: ScanVariant = CHAIN,
) -> AllScan:
    """The AllScan that ``comm`` keeps for a shape and variant, made at the first call: collective.

    ``agree``: what else must be the same on all ranks, the name of the call and (name, value) pairs; a first call with
    it is collective too, in debug mode every call. None: nothing.
    ``deferred``: what is wrong with this rank's arguments. It is raised here; at a first call the other ranks, which
    are on their way to make the workspace, raise ValueError with it, as they do when shape or agree differ. (One
    without a shape, None, counts as one of a first call as long as there has been no other call.) ``at_first``: it is
    of a variant that is looked for at a first call with ``agree`` only, which this is for all ranks.
    """
    comm.check()
    scans, arguments = comm.agreed.scans, comm.agreed.arguments
    shape = None if shape is None else tuple(shape)
    key = shape, variant
    always = comm.debug and agree is not None
    if deferred is not None and not (at_first or always) and (key in scans or (shape is None and scans)):
        raise deferred.take()
    first = key not in scans or (agree is not None and (shape, agree) not in arguments)
    if first or always:
        if first and deferred is None and comm.streams.capturing():
            raise RuntimeError(
                "the first call for a shape asks the other ranks and makes a workspace, which cannot be captured: call "
                "once before the capture"
            )
        call, *pairs = agree or (None,)
        shapes = ("the state's shape", shape), *variant._asdict().items()
        comm.order.agree((("call", call), *pairs, *shapes), deferred, "the first call for a shape")
        if key not in scans:
            scans[key] = AllScan(comm, shape, **variant._asdict())
        if first:
            arguments.remember((shape, agree))
    if deferred is not None:
        raise deferred.take()
    scan: AllScan = scans[key]
    return scan
