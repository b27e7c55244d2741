"""Caches of values that all ranks have agreed on, and of values that a rank has computed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

CACHE_SIZE = 256  # entries, by default


class Agreement(dict[Hashable, Any]):
    """Cache of values of one type that are equal on all ranks.

    An exchange adds each entry. It succeeds on all ranks or fails on all, so all ranks have the same entries. A rank
    that finds an entry makes no exchange: a rank that has dropped the entry alone would wait for the others for ever.
    Hence entries are dropped all at once and on all ranks at the same call, in two cases: ``most`` entries exist and a
    new one is agreed on, or ``resync`` is called. ``local``: caches of derived values, cleared together with it."""

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


class Agreed:
    """Values that all ranks of one communicator have agreed on.

    scans: AllScans by shape and variant; they own symmetric memory and live until the communicator is closed.
    arguments: arguments of calls that must be equal on all ranks. partitions: tokens of every rank, by cu_seqlens."""

    def __init__(self, *local: dict[Hashable, Any]) -> None:
        self.scans: dict[Hashable, Any] = {}
        self.arguments, self.partitions = Agreement(16 * CACHE_SIZE, *local), Agreement(CACHE_SIZE)

    def clear(self) -> None:
        """Drop all but the AllScans, so that all ranks agree again: a rank that missed calls, or that was interrupted
        between an exchange and ``remember``, lacks entries."""
        self.arguments.clear()
        self.partitions.clear()


class Recent(dict[Hashable, Any]):
    """The ``most`` entries added last. Ranks may evict independently."""

    def __init__(self, most: int = CACHE_SIZE) -> None:
        super().__init__()
        self.most = most

    def remember(self, key: Hashable, value: Any = True) -> Any:
        """Add an entry and return its value."""
        if len(self) >= self.most:
            self.pop(next(iter(self)), None)
        self[key] = value
        return value

    def find(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value of ``key``, by ``make()`` if there is none."""
        found = self.get(key)
        return self.remember(key, make()) if found is None else found
