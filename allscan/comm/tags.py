"""Tags: what one rank's arrival words say of the call, so that the next rank detects that it is in another one.

A tag has the number of ``Communicator.step`` calls, a ``stamp`` of the arguments that must be equal on all ranks, the
number of backward calls, and the forward call of a backward (``shmem_kernels/channel.py`` has the layout). ``Order`` of
call_order.py decides which tag a call has.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

from ..base.errors import NEW_ONE, REMEDY, AllScanOutOfStep, names_of
from ..shmem_kernels.channel import BACKWARDS, EPOCHS, STAMPS, STEPS_A_STAMP, TAG_BACKWARDS, TAG_STEP
from ..shmem_kernels.links import EPOCH_BITS


@functools.lru_cache(maxsize=1024)
def stamp(*alike: object) -> int:
    """A hash below STAMPS of the arguments that must be equal on all ranks in a call: numbers, names, None, and tuples
    of these, such as the values of its cu_seqlens. Different ones have equal stamps with probability 1 / STAMPS."""
    found: int = hash_of(*alike) % STAMPS.value
    return found


@functools.lru_cache(maxsize=1024)
def hash_of(*alike: object) -> int:
    """A hash of 64 bits of what ``stamp`` hashes."""
    text = repr(_with_floats(alike))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _with_floats(x: Any) -> Any:
    """``x`` with numbers as floats: 1, 1.0 and True, which are equal as cache keys, then have the same repr."""
    if isinstance(x, tuple | list):
        return [_with_floats(y) for y in x]
    return x if x is None or isinstance(x, str) else float(x)


def different_tags(
    rank: int, neighbour: int, tile: int, expected: int, seen: int, others: str, job_ranks: tuple[int, int]
) -> AllScanOutOfStep:
    """The error for the expected and the received arrival word of one epoch (shmem_kernels/links.py) if tags differ."""
    wanted, came = _fields(expected), _fields(seen)
    own, other = names_of((rank, neighbour), job_ranks)
    most = STEPS_A_STAMP.value
    steps = [fields[0] % most for fields in (wanted, came)]
    remedy = NEW_ONE if steps[0] != steps[1] else REMEDY
    if steps[0] != steps[1]:
        why = (
            f"here it is step {steps[0]}, there it was step {steps[1]} (Communicator.step(), modulo {most}): "
            "one of the two has skipped a call"
        )
    elif wanted[0] != came[0]:
        why = (
            "possible causes are different cu_seqlens, layout, scale, another option or operator; an earlier call with "
            f"a different reverse; a difference of {most}, {2 * most}, ... calls of Communicator.step(). "
            "ALLSCAN_DEBUG=1 names the argument"
        )
    elif wanted[1] != came[1]:
        why = (
            f"before that call {own} had made {wanted[1]} backward calls of this shape, {other} "
            f"{came[1]} (modulo {BACKWARDS.value}): one of them ignored what a call had returned, or left out its "
            "backward pass"
        )
    else:
        why = f"here it belongs to {_backward_of(wanted[2])}, there to {_backward_of(came[2])} (modulo {EPOCHS.value})"
    return AllScanOutOfStep(
        f"{own} and {other} are in different calls, found by {own} in scan {expected & EPOCH_BITS.value} of this shape "
        f"and direction, tile {tile}: {why}. {others}{remedy}."
    )


def _fields(word: int) -> tuple[int, int, int]:
    """(step, backwards, forward) of an arrival word."""
    step, rest = divmod(word >> 32, TAG_STEP.value)
    return step, *divmod(rest, TAG_BACKWARDS.value)


def _backward_of(forward: int) -> str:
    return f"the backward of forward call {forward - 1 or EPOCHS.value}" if forward else "no backward"
