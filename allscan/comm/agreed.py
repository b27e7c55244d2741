"""What a communicator keeps between calls: what all ranks have agreed upon, and what this rank has worked out."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

CACHE_SIZE = 256  # partitions of cu_seqlens, calls that were checked


class Agreement(dict[Hashable, Any]):
    """Values that are equal on all ranks, of one kind. An entry is made by an exchange, which succeeds on all ranks or
    fails on all, so all have the same ones. A rank that finds an entry asks nobody: one that has dropped it alone would
    wait for the others for ever. Hence two rules drop entries, all at once and on all ranks at the same call: when
    ``most`` are there, the next one that is agreed upon does, and ``resync`` does. ``local``: what follows from
    entries, emptied with them."""

    def __init__(self, most: int, *local: dict[Hashable, Any]) -> None:
        super().__init__()
        self.most, self._local = most, local

    def remember(self, key: Hashable, value: Any = True) -> None:
        if len(self) >= self.most:
            self.clear()
        self[key] = value

    def clear(self) -> None:
        super().clear()
        for found in self._local:
            found.clear()


class Recent(dict[Hashable, Any]):
    """What this rank has worked out: the last ``most`` entries that were remembered, since nobody else has to know."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def remember(self, key: Hashable, value: Any = True) -> None:
        if len(self) >= self.most:
            self.pop(next(iter(self)), None)
        self[key] = value


class Agreed:
    """Of one communicator. scans: the AllScans by shape and what else makes them; they own symmetric memory, and stay
    until the communicator is closed. arguments: what calls must have alike. partitions: the tokens of every rank, by
    cu_seqlens."""

    def __init__(self, *local: dict[Hashable, Any]) -> None:
        self.scans: dict[Hashable, Any] = {}
        self.arguments = Agreement(16 * CACHE_SIZE, *local)
        self.partitions = Agreement(CACHE_SIZE)

    def resync(self) -> None:
        """Every rank asks again at its next first calls: one that missed calls, or was interrupted between the answers
        of the others and ``remember``, lacks what they know. The AllScans were compared."""
        self.arguments.clear()
        self.partitions.clear()

    def clear(self) -> None:
        """The communicator is closed."""
        for found in (self.scans, self.arguments, self.partitions):
            found.clear()
