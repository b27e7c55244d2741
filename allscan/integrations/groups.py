"""Communicators of process groups that a framework hands over in its calls."""

from __future__ import annotations

import contextlib
from typing import Any

from ..comm.communicator import Communicator


class Communicators(dict[Any, Communicator]):
    """Communicators by process group: those that users pass, and those that ``of`` creates."""

    def __init__(self) -> None:
        super().__init__()
        self.created: list[Communicator] = []  # by ``of``, in order of creation

    def of(self, group: Any) -> Communicator:
        """The communicator of ``group``; a new one, which is collective on the host, without an open one."""
        comm = self.get(group)
        if comm is None or comm.closed:
            comm = self[group] = Communicator(group)
            self.created = [*(x for x in self.created if not x.closed), comm]
        return comm

    def close(self) -> None:
        """Forget all communicators, and close those that ``of`` has created, in order of creation."""
        self.clear()
        with contextlib.ExitStack() as stack:  # after an error, too: other ranks may already wait in the next close
            while self.created:
                stack.callback(self.created.pop().close)
