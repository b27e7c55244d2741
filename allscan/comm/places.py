"""Where a rank is in its program, for the errors of ranks that wait for each other. Read after a fault only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..launch.streams import Streams
from ..shmem_kernels.channel import BROKEN
from ..shmem_kernels.wait import RECORD_EXPECTED, RECORD_KIND, TIMED_OUT


class Place(NamedTuple):
    """Calls that a rank's host has made, and its last one. A host may be ahead of its GPU."""

    forward: int
    reverse: int
    what: str  # the last call, with its shape
    steps: int  # calls of Communicator.step()
    device: str = ""  # see ``gave_up``

    def __str__(self) -> str:
        step = f"in step {self.steps}" if self.steps else "and has never called step()"
        calls = f"has made {self.forward} forward and {self.reverse} reverse calls"
        return f"{calls}, the last is {self.what}, {step}{self.device}"


def told(places: Mapping[int, Place | str], cause: bool = True) -> str:
    """Sentences that name the ``places`` of ranks and, with ``cause``, which rank has made fewer calls, where the
    counts show it."""
    text = f"{'; '.join(f'rank {rank} {place}' for rank, place in places.items())}. "
    known = {rank: place for rank, place in places.items() if cause and isinstance(place, Place)}
    for late, there in known.items():
        for ahead, here in known.items():
            # all calls of step n come before step n + 1: who is in a later step has made at least as many
            if here.steps > there.steps > 0 and (here.reverse < there.reverse or here.forward < there.forward):
                what = "reverse calls, such as backwards," if here.reverse < there.reverse else "forward calls"
                text += f"Rank {ahead} is in a later step and has made fewer {what} than rank {late}. "
                return text[0].upper() + text[1:]
    return text[0].upper() + text[1:]


def gave_up(scans: Iterable[Any], streams: Streams, record: Any, calls: int) -> str:
    """Which scan a kernel of this rank has given up, as far as it is known: its tiles' epochs are BROKEN. The end of a
    sentence, or "". scans: the communicator's AllScans; calls: how many the host has made."""
    found: set[tuple[tuple[int, ...], bool]] = set()
    if not streams.capturing():
        with contextlib.suppress(RuntimeError):  # of a GPU that has failed
            for scan in scans:
                for reverse, channel in enumerate(scan.launcher.channels):
                    if scan.launcher.rails is None and BROKEN.value in streams.peek(channel.epoch):
                        found.add((scan.shape, bool(reverse)))
    shapes, directions = {shape for shape, _ in found}, {reverse for _, reverse in found}
    text = ""
    if len(shapes) == 1:  # after a fault later launches give up at once, too
        text = f", and has given up a scan of {list(*shapes)}"
        if len(directions) == 1:
            text += ", from the last rank to the first" if True in directions else ", from the first rank to the last"
    if record[RECORD_KIND.value] == TIMED_OUT.value and record[RECORD_EXPECTED.value] > calls:
        text += (
            f"; its device has come to scan {int(record[RECORD_EXPECTED.value])} of a shape, more than its host has "
        )
        text += "made calls: in a replayed CUDA graph, a call of several scans, or a kernel that no call has launched"
    return text
