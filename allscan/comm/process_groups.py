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
    "A collective of torch's process group failed or was interrupted, so the ranks' collectives do not match any more. "
    "Create a new group (torch.distributed.new_group) and its Communicator on all ranks"
)


def is_desynchronized(group: Any) -> bool:
    """Whether this rank knows that collectives of this process group do not match between ranks."""
    if group is None:
        return False
    return group in _desynchronized or _under_way.get(group) == threading.get_ident()


def mark_desynchronized(group: Any) -> None:
    """Remember what ``is_desynchronized`` tells. A Communicator's constructor and ``resync`` tell the other ranks."""
    _desynchronized.add(group)


def check_group(group: Any) -> None:
    """Raise RuntimeError if collectives of this process group do not match between ranks."""
    if is_desynchronized(group):
        raise RuntimeError(f"{NEW_GROUP}.")


@contextlib.contextmanager
def collective(group: Any, waits: bool = True) -> Iterator[None]:
    """Context of a collective: if it is left by an exception, the group is desynchronized. Not ``waits``: it only
    starts the collective; then an error is one of its arguments, and only an interruption counts."""
    _under_way[group] = threading.get_ident()
    try:
        yield
    except BaseException as error:
        if waits or not isinstance(error, Exception):
            mark_desynchronized(group)
        _under_way.pop(group, None)
        raise
    _under_way.pop(group, None)  # not after an exception that a signal handler has raised in this function
