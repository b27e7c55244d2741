"""Caches of a communicator: values that all ranks have agreed on, and values that this rank has computed."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

CACHE_SIZE = 256  # maximum number of partitions of cu_seqlens, and of prepared calls


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


class Recent(dict[Hashable, Any]):
    """Cache of values that this rank has computed: the ``most`` entries added last. Ranks may evict independently."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def remember(self, key: Hashable, value: Any = True) -> None:
        if len(self) >= self.most:
            self.pop(next(iter(self)), None)
        self[key] = value


class Agreed:
    """Agreed values of one communicator.

    scans: AllScans by shape and other properties; they own symmetric memory and live until the communicator is closed.
    arguments: arguments of calls that must be equal on all ranks. partitions: tokens of every rank, by cu_seqlens."""

    def __init__(self, *local: dict[Hashable, Any]) -> None:
        self.scans: dict[Hashable, Any] = {}
        self.arguments = Agreement(16 * CACHE_SIZE, *local)
        self.partitions = Agreement(CACHE_SIZE)

    def resync(self) -> None:
        """Drop arguments and partitions, so that all ranks agree on them again: a rank that missed calls, or that was
        interrupted between an exchange and ``remember``, lacks entries. The AllScans stay: resync() compared them."""
        self.arguments.clear()
        self.partitions.clear()

    def clear(self) -> None:
        """Drop all entries, when the communicator is closed."""
        for found in (self.scans, self.arguments, self.partitions):
            found.clear()
