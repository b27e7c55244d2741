"""What the ranks of a group tell each other on the host, through the store of torch.distributed.

No GPU, no stream and no collective of a back end is involved, and every wait is bounded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist

from ..base.errors import AllScanHostTimeout, AllScanOutOfStep, AllScanRejected
from ..bindings.torch_compat import default_store
from .compile_watch import another_compiles

EXCHANGE_TIMEOUT_S = 120.0  # how long a rank waits for the others at least where the host needs all
ABSENT_TIMEOUT_S = 10.0  # the same where one of them did not come the last time
GRACE_S = 5.0  # how much longer the others wait for the first rank, which waits for all

EXCUSE_S = 0.2  # how often a rank that waits looks whether another one has said that it will not come

# How a decision begins. REJECTED, LOST: the call that the exchange is part of, by a rank; the order of calls
_DONE, FAILED, REJECTED, LOST, ABANDONED = "done ", "failed ", "rejected ", "lost ", "abandoned "

Excuse = Callable[[Callable[[], int]], str | None]  # of which rank has not come: how to decide without it, if at all

_world: dist.ProcessGroup | None = None  # torch.distributed's default group that the following are of
_exchanges: dict[str, int] = {}  # name of a StoreExchange -> how many exchanges it has had: equal on all its ranks
_absent: set[int] = set()  # global ranks that have not come to the last exchange that they were expected at


class Abandoned(RuntimeError):
    """A rank has said that it will not come."""


class StoreGone(RuntimeError):
    """The store does not answer, or is of a job that has ended."""


def by_rank(values: Iterable[object]) -> str:
    """One line that shows a value of every rank."""
    return "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))


def differing(answers: Sequence[Iterable[tuple[str, object]]]) -> str:
    """One line that shows what differs between ranks, of every rank's (name, value) pairs, and which have which value.
    Where the first that differs is named "call", that alone: what others follow from it."""
    fields, lines = [dict(answer) for answer in answers], []
    for name in dict.fromkeys(name for of_rank in fields for name in of_rank):
        ranks: dict[str, list[str]] = {}
        for rank, of_rank in enumerate(fields):
            ranks.setdefault(str(of_rank.get(name)), []).append(str(rank))
        if len(ranks) > 1:
            values = (f"{value} on rank{'s' * (len(some) > 1)} {', '.join(some)}" for value, some in ranks.items())
            lines.append(f"{name}: " + "; ".join(values))
            if name == "call":
                break
    return ". ".join(lines)


class StoreExchange:
    """Where some ranks of the job meet. Those who meet make the same exchanges in the same order.

    ranks: global ranks, in the group's order; this process is one of them.
    name: exchanges of different names do not meet; default one that stands for the ranks.

    What is exchanged is what JSON knows: numbers, strings, booleans, None, and tuples of these (a list arrives as a
    tuple). An exchange is decided once, for all: the first rank, which gathers,
    and a rank that gives up each try to set one key, by the store's compare_set, and whoever comes first has decided.
    So an exchange succeeds on all of its ranks or fails on all, and the next one has the same number everywhere: a rank
    that comes to one that has failed without it goes on to the next.
    """

    timeout = 0.0  # of the communicator: a rank that its kernels would wait for is waited for here, too

    def __init__(self, ranks: Iterable[int], name: str = "") -> None:
        global _world
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.name = name or hashlib.sha256(str(self.ranks).encode()).hexdigest()[:16]
        self._prefix = f"allscan/{self.name}/"
        self.rank, self._world = 0, None
        self._job_store: Any = None
        if self.size > 1:
            self.rank, self._world = self.ranks.index(dist.get_rank()), dist.group.WORLD
            self._job_store = default_store()
            if _world is not self._world:  # torch.distributed was restarted
                _world = self._world
                _exchanges.clear()
                _absent.clear()
        self._counts = _exchanges

    def private(self, token: str) -> StoreExchange:
        """Another one of the same ranks, whose exchanges meet no others', with a ``token`` that is alike on all of them
        and was never used: a store may outlive its process group."""
        other = StoreExchange(self.ranks, f"{self.name}/{token}")
        other.timeout = self.timeout
        return other

    def _next_topic(self, store: dist.Store) -> str:
        """The number of the next exchange that has not failed yet."""
        while True:
            number = self._counts[self.name] = self._counts.get(self.name, 0) + 1
            base = f"{self._prefix}{number}/"
            decided = store.check([f"{base}decision"])
            if not decided or store.get(f"{base}decision").decode().startswith(_DONE):
                return str(number)
            self._read(store, base)

    def exchange(
        self, value: Any, what: str, excuse: Excuse | None = None, last: str = "", within: float | None = None
    ) -> list[Any]:
        """Every rank's ``value``, in rank order. ``what`` is alike on all of them, or AllScanOutOfStep.

        ``excuse``: asked now and then whether a rank will not come; a decision that ends the exchange on all ranks:
        with REJECTED they raise AllScanRejected, with LOST AllScanOutOfStep. last: the name of the last exchange in the
        life of this StoreExchange, behind which processes may end. within: seconds in place of the following.
        Raises AllScanHostTimeout, on all ranks, if one does not come within max(EXCHANGE_TIMEOUT_S, timeout), or later
        while a rank compiles, or is interrupted; Abandoned if one has called ``abandon``."""
        if self.size == 1:
            return [value]
        store = self._store()
        try:
            base = f"{self._prefix}{last or self._next_topic(store)}/"
            try:
                word = json.dumps((what, value))
                store.set(f"{base}{self.rank}", word)
                decision = self._decision(store, base, excuse, within)
            except BaseException as error:
                why = f"was interrupted by {type(error).__name__}"
                self._decide(store, base, f"{FAILED}rank {self.ranks[self.rank]} (global) {why}")
                self._read(store, base, bool(last))
                raise
        except dist.DistError as error:
            raise StoreGone(
                f"{what}: the store of torch.distributed does not answer; the process that has it may have ended"
            ) from error
        # the first rank of the job has the store, as a rule, and may end next
        keeps_store = decision.startswith(_DONE) and (bool(last) or self.ranks[self.rank] == 0)
        self._read(store, base, bool(last), until_all=keeps_store)
        for prefix, error_of in ((ABANDONED, Abandoned), (REJECTED, AllScanRejected), (LOST, AllScanOutOfStep)):
            if decision.startswith(prefix):
                raise error_of(f"{what}: {decision.removeprefix(prefix)}")
        if decision.startswith(FAILED):
            reason = decision.removeprefix(FAILED)
            raise AllScanHostTimeout(f"{what}: {reason}. All ranks of a group make the same calls in the same order")
        # not ast.literal_eval, which fails now and then in Python 3.11 where several threads parse
        answers = _as_tuples(json.loads(decision.removeprefix(_DONE)))
        if json.dumps(answers[self.rank]) != word:
            raise RuntimeError(f"{what}: the answer is of another exchange, {answers[self.rank]} instead of {word}")
        names, values = zip(*answers, strict=True)
        if len(set(names)) > 1:
            raise AllScanOutOfStep("the ranks are at different calls: " + by_rank(names))
        return list(values)

    def abandon(self, topic: str, why: str) -> None:
        """In place of the last ``exchange``, without waiting for anybody."""
        with contextlib.suppress(dist.DistError, RuntimeError):
            store, base = self._store(), f"{self._prefix}{topic}/"
            self._decide(store, base, f"{ABANDONED}rank {self.ranks[self.rank]} (global) {why}")
            self._read(store, base, last=True)

    def _decision(self, store: dist.Store, base: str, excuse: Excuse | None, within: float | None) -> str:
        """What has been decided. O(1) requests a rank, but for who is missing where one is."""

        def missing() -> int:
            return next((self.ranks[r] for r, key in enumerate(keys) if not store.check([key])), self.ranks[0])

        limit = max(EXCHANGE_TIMEOUT_S, self.timeout) if within is None else within
        if _absent & set(self.ranks):
            limit = min(limit, ABSENT_TIMEOUT_S)
        keys = [f"{base}{rank}" for rank in range(self.size)]
        deadline = time.monotonic() + limit + (GRACE_S if self.rank else 0.0)
        pause, longest = 1e-4, 5e-3 * max(1, self.size // 16)
        looked = time.monotonic()
        while not store.check([f"{base}decision"]):
            if self.rank == 0 and store.check(keys):
                words = [word.decode() for word in store.multi_get(keys)]
                self._decide(store, base, f"{_DONE}[{', '.join(words)}]")
                break
            if time.monotonic() > deadline and not another_compiles(store):
                absent = missing()
                self._decide(store, base, f"{FAILED}rank {absent} (global) did not come within {limit:g} s")
                _absent.add(absent)
                break
            if excuse is not None and time.monotonic() - looked > EXCUSE_S:
                looked = time.monotonic()
                if excused := excuse(missing):
                    self._decide(store, base, excused)
                    break
            time.sleep(pause)
            pause = min(2 * pause, longest)
        decision: str = store.get(f"{base}decision").decode()
        if decision.startswith(_DONE):
            _absent.difference_update(self.ranks)
        return decision

    @staticmethod
    def _decide(store: dist.Store, base: str, decision: str) -> None:
        """Decide, unless somebody else has."""
        with contextlib.suppress(dist.DistError):
            store.compare_set(f"{base}decision", "", decision)

    def _read(self, store: dist.Store, base: str, last: bool = False, until_all: bool = False) -> None:
        """This rank has read the decision; the last one removes what was written, behind the last exchange all.
        until_all: return when all ranks have read it, GRACE_S later at the latest."""
        with contextlib.suppress(dist.DistError):
            if store.add(f"{base}read", 1) == self.size:
                if last:
                    self.forget_fault()
                for key in (*range(self.size), "read", "decision"):
                    store.delete_key(f"{base}{key}")
            deadline, pause = time.monotonic() + GRACE_S, 1e-4
            while until_all and store.check([f"{base}decision"]) and time.monotonic() < deadline:
                time.sleep(pause)
                pause = min(2 * pause, 5e-3)

    def post(self, topic: str, value: object) -> None:
        """Leave a value for whoever looks."""
        if self.size > 1:
            with contextlib.suppress(dist.DistError, StoreGone):
                self._store().set(f"{self._prefix}{topic}/{self.rank}", json.dumps(value))
                self._store().set(f"{self._prefix}{topic}/any", "")

    def take_back(self, topic: str) -> None:
        """Remove what this rank has left. After all ranks have seen what is still of interest."""
        if self.size > 1:
            with contextlib.suppress(dist.DistError, StoreGone):
                for key in (self.rank, "any"):
                    self._store().delete_key(f"{self._prefix}{topic}/{key}")

    def posted(self, topic: str) -> dict[int, Any]:
        """{rank: what it has left}. Does not wait."""
        if self.size == 1:
            return {}
        try:
            if not self._store().check([f"{self._prefix}{topic}/any"]):
                return {}
            store, keys = self._store(), {rank: f"{self._prefix}{topic}/{rank}" for rank in range(self.size)}
            return {r: _as_tuples(json.loads(store.get(key).decode())) for r, key in keys.items() if store.check([key])}
        except (dist.DistError, RuntimeError):
            return {}

    def tell_fault(self, why: str) -> None:
        """Let all ranks know of a fault; the first one is kept, until ``forget_fault``."""
        if self.size > 1:
            with contextlib.suppress(dist.DistError, StoreGone):
                self._store().compare_set(f"{self._prefix}fault", "", f"rank {self.rank} {why}")

    def fault(self) -> str | None:
        """The fault that a rank has told of."""
        if self.size > 1:
            with contextlib.suppress(dist.DistError, StoreGone):
                store, key = self._store(), f"{self._prefix}fault"
                if store.check([key]):
                    return store.get(key).decode()
        return None

    def forget_fault(self) -> None:
        if self.size > 1:
            with contextlib.suppress(dist.DistError, StoreGone):
                self._store().delete_key(f"{self._prefix}fault")

    @property
    def gone(self) -> bool:
        """Whether this StoreExchange belongs to a job that has ended: torch.distributed was, or was restarted."""
        return self.size > 1 and not (dist.is_initialized() and dist.group.WORLD is self._world)

    def _store(self) -> dist.Store:
        """Raises StoreGone if this StoreExchange belongs to a job that has ended."""
        if self.gone:
            raise StoreGone("torch.distributed was ended, or restarted, since this communicator was made")
        store: dist.Store = self._job_store
        return store


def _as_tuples(value: object) -> Any:
    """What JSON has made of tuples, as it was."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
