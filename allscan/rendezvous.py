"""What the ranks of a group tell each other on the host, through the store of torch.distributed.

No GPU, no stream and no collective of a back end is involved, and every wait is bounded.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from .errors import AllScanOutOfStep

EXCHANGE_TIMEOUT_S = 120.0  # how long a rank waits for the others where the host needs all of them

_exchanges: dict[str, int] = {}  # name of a rendezvous -> how many exchanges it has had: equal on all its ranks


def by_rank(values: Iterable) -> str:
    """One line that shows a value of every rank."""
    return "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))


class Rendezvous:
    """Where some ranks of the job meet. Those who meet make the same exchanges in the same order.

    ranks: global ranks, in the group's order; this process is one of them.
    name: exchanges of different names do not meet; default that of the ranks.
    """

    def __init__(self, ranks: Iterable[int], name: str = "") -> None:
        self.ranks = tuple(ranks)
        self.name = name or "-".join(map(str, self.ranks))
        self.size = len(self.ranks)
        self.rank = self.ranks.index(dist.get_rank()) if self.size > 1 else 0

    def private(self) -> Rendezvous:
        """Another one of the same ranks, whose exchanges meet no others'. After an exchange of this one, whose number
        makes the name."""
        return Rendezvous(self.ranks, f"{self.name}/{_exchanges.get(self.name, 0)}")

    def exchange(self, value: Any, what: str) -> list:
        """Every rank's ``value``, in rank order. ``what`` is alike on all of them, or AllScanOutOfStep.

        Raises RuntimeError if a rank does not come within EXCHANGE_TIMEOUT_S."""
        if self.size == 1:
            return [value]
        number = _exchanges[self.name] = _exchanges.get(self.name, 0) + 1
        store, me = _store(), self.ranks[self.rank]
        try:
            words = self.gather(f"{number}/", pickle.dumps((what, value)), what)
        except RuntimeError:
            _exchanges[self.name] -= 1  # as if this one had not been: the next one is that of ranks that have not come
            with contextlib.suppress(dist.DistError):
                store.delete_key(f"{self._prefix}{number}/{me}")
            raise
        if self.rank == 0 and number > 1:  # everybody who has come here has read the previous answer
            for key in (*self.ranks, "all"):
                store.delete_key(f"{self._prefix}{number - 1}/{key}")
        kinds, values = zip(*map(pickle.loads, words), strict=True)
        if len(set(kinds)) > 1:
            raise AllScanOutOfStep("the ranks are at different calls: " + by_rank(kinds))
        return list(values)

    def gather(self, topic: str, word: bytes, what: str) -> list[bytes]:
        """What every rank has given as ``word`` under ``topic``, in rank order; RuntimeError if one does not come.

        The first rank gathers, the others read one answer: O(size) requests. The words stay in the store."""
        store, prefix = _store(), self._prefix + topic
        missing = me = self.ranks[self.rank]
        deadline = time.monotonic() + EXCHANGE_TIMEOUT_S
        try:
            store.set(f"{prefix}{me}", word)
            if self.rank == 0:
                words = []
                for rank in self.ranks:
                    missing = rank
                    words.append(_wait(store, f"{prefix}{rank}", deadline))
                store.set(prefix + "all", pickle.dumps(words))
            missing = self.ranks[0]
            return pickle.loads(_wait(store, prefix + "all", deadline + 5))
        except (dist.DistError, TimeoutError) as error:
            raise RuntimeError(
                f"{what}: rank {missing} (global) did not come within {EXCHANGE_TIMEOUT_S:g} s. All ranks of a group "
                "make the same calls in the same order"
            ) from error

    def answer_for_all(self, topic: str, word: bytes) -> None:
        """End a :meth:`gather` under ``topic`` with ``word`` alone, without waiting for the others."""
        with contextlib.suppress(dist.DistError):
            _store().set(f"{self._prefix}{topic}{self.ranks[self.rank]}", word)
            if self.rank == 0:
                _store().set(f"{self._prefix}{topic}all", pickle.dumps([word]))

    def post(self, topic: str, word: bytes) -> None:
        """Leave a word for whoever looks."""
        with contextlib.suppress(dist.DistError):
            _store().set(f"{self._prefix}{topic}/{self.rank}", word)

    def take_back(self, topic: str) -> None:
        """Remove this rank's word."""
        if self.size > 1:
            with contextlib.suppress(dist.DistError):
                _store().delete_key(f"{self._prefix}{topic}/{self.rank}")

    def posted(self, topic: str) -> dict[int, bytes]:
        """{rank: its word} of those who have left one. Does not wait."""
        if self.size == 1:
            return {}
        try:
            keys = {rank: f"{self._prefix}{topic}/{rank}" for rank in range(self.size)}
            return {rank: _store().get(key) for rank, key in keys.items() if _store().check([key])}
        except dist.DistError:
            return {}

    @property
    def _prefix(self) -> str:
        return f"allscan/{self.name}/"


def _store():
    return dist.distributed_c10d._get_default_store()


def _wait(store, key: str, deadline: float) -> bytes:
    """The value of ``key``, or TimeoutError. Not by store.wait, which keeps other threads from the store."""
    pause = 1e-4
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise TimeoutError(key)
        time.sleep(pause)
        pause = min(2 * pause, 5e-3)
    return store.get(key)
