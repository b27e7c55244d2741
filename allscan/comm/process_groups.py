"""Process groups of torch in which a rank has abandoned a collective, so that the next one would get its tokens."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

_desynchronized: weakref.WeakSet[Any] = weakref.WeakSet()
_under_way: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # thread in a ``collective``, by group

NEW_GROUP = (
    "A wait in torch's process group has failed or was interrupted, so its collectives are desynchronized. For tokens "
    "that torch moves all ranks need another one (torch.distributed.new_group), and a Communicator of it"
)


def is_desynchronized(group: Any) -> bool:
    """Whether this rank knows that collectives of this process group do not match between ranks."""
    if group is None:
        return False
    return group in _desynchronized or _under_way.get(group) == threading.get_ident()


def mark_desynchronized(group: Any, failed: bool = True) -> None:
    """Remember, if ``failed``, what ``is_desynchronized`` tells. A Communicator's constructor and ``resync`` tell the
    other ranks."""
    if failed:
        _desynchronized.add(group)


def check_group(group: Any) -> None:
    """Raise RuntimeError if collectives of this process group do not match between ranks."""
    if is_desynchronized(group):
        raise RuntimeError(f"{NEW_GROUP}.")


@contextlib.contextmanager
def collective(group: Any) -> Iterator[None]:
    """Context of a collective, or of the wait for one: if it is left by an exception, the group is desynchronized."""
    if group is not None:
        _under_way[group] = threading.get_ident()
    try:
        yield
    except BaseException:
        mark_desynchronized(group)
        raise
    _under_way.pop(group, None)  # not after an exception that a signal handler has raised in this function
