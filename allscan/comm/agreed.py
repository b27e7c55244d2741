"""Caches of a communicator with values that all ranks have agreed on."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ..base.caches import CACHE_SIZE, Agreement


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
