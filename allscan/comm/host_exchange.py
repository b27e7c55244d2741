"""Exchange of small values between the ranks of a group on the host, through the store of torch.distributed.

It uses no GPU, no stream and no collective of a backend. Every wait for another rank is bounded. torch's client of the
store waits without a limit while the store's process is stopped (SIGSTOP).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from ..base.errors import AllScanHostTimeout, AllScanOutOfStep, AllScanRejected
from ..bindings.torch_compat import default_store

P = ParamSpec("P")
R = TypeVar("R")

TIMEOUT_S = 120.0  # default of Communicator(timeout=); time limit of exchanges before there is a communicator
GRACE_S = 5.0  # additional time limit of exchanges: ranks whose kernels wait for the same rank report it before

# Polls come at an eighth of the wait so far, between these bounds; those of 32 ranks and more are longer in proportion
SHORTEST_S, LONGEST_S = 2e-5, 5e-3
TELL_S = 1.0  # a rank that waits longer tells the others where it waits
ABORT_CHECK_S = 0.2  # interval at which a waiting rank checks whether another rank has reported that it will not come

# Prefixes of decisions. REJECTED: a rank has rejected the call of the exchange. LOST: the order of calls is lost
_DONE, FAILED, REJECTED, LOST, ABANDONED = "done ", "failed ", "rejected ", "lost ", "abandoned "

_NO_VALUE = "none"  # what _find reads for a key that does not exist

CLOSE = "Communicator.close"  # name of the last exchange of a communicator

_WAITS = "allscan/waits/"  # with a global rank, the key of (name of the StoreExchange, name of the call) of its wait

# abort_check(late): a decision that ends the exchange, or None to wait on. late: "", or at the time limit a text that
# names an absent rank
AbortCheck = Callable[[str], str | None]

_world: dist.ProcessGroup | None = None  # torch.distributed's default group to which the next two belong
_exchanges: dict[str, int] = {}  # name of a StoreExchange -> number of its exchanges, equal on all its ranks
_wait_keys: list[str] = []  # keys of exchanges in which this process has timed out, until its next exchange
_inherited: dist.ProcessGroup | None = None  # the default group of the process from which this one was forked


class Abandoned(RuntimeError):
    """A rank has reported, by ``abandon``, that it will not come to the last exchange."""


class StoreGone(RuntimeError):
    """torch.distributed or the process of its store has ended, or this process is none of its ranks."""


class JobStore:
    """The store of torch.distributed's default group. Requests raise StoreGone once that group was destroyed or
    replaced. Raises StoreGone in a process that was forked from a rank, whose connection it would share."""

    def __init__(self) -> None:
        self.world, self._store = dist.group.WORLD, default_store()
        if self.world is _inherited:
            raise StoreGone("this process was forked from a rank of torch.distributed and is not a rank itself")

    def __getattr__(self, request: str) -> Any:
        if not (dist.is_initialized() and dist.group.WORLD is self.world):
            raise StoreGone("torch.distributed was ended, or restarted, since this communicator was made")
        return getattr(self._store, request)


def _forked() -> None:
    global _inherited
    _inherited = dist.group.WORLD if dist.is_initialized() else None


os.register_at_fork(after_in_child=_forked)


def by_rank(values: Iterable[object]) -> str:
    """One line of text with the value of every rank."""
    return "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))


def differing(answers: Sequence[Iterable[tuple[str, object]]]) -> str:
    """One line of text with the values that differ between ranks, and the ranks that have them. ``answers``: (name,
    value) pairs of every rank. If the first difference is named "call", the others follow from it and are left out."""
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


def if_late(late: str) -> str | None:
    """The AbortCheck that waits for the time limit only: AllScanHostTimeout."""
    return FAILED + late if late else None


def _if_there(request: Callable[P, R]) -> Callable[P, R | None]:
    """``request`` of a StoreExchange. Returns None for one rank, and without the store: no other rank then waits."""

    @functools.wraps(request)
    def call(*args: P.args, **options: P.kwargs) -> R | None:
        exchange: Any = args[0]
        if exchange.size > 1:
            with contextlib.suppress(RuntimeError):
                return request(*args, **options)
        return None

    return call


class StoreExchange:
    """Exchanges of values between some ranks of the job. All of these make the same exchanges in the same order.

    ranks: global ranks, in the group's order; this process is one of them.
    name: namespace of the exchanges; default: derived from the ranks.

    Values are those of JSON: numbers, strings, booleans, None, and tuples of these (a list arrives as a tuple). Each
    exchange has one decision for all ranks. Rank 0, which gathers the values, and any rank that gives up try to set one
    key by the store's compare_set; the first one decides. So an exchange succeeds on all of its ranks or fails on all,
    and the next one has the same number on all ranks: a rank that finds at its first look that the exchange has failed
    goes on to the next.
    """

    def __init__(self, ranks: Iterable[int], name: str = "") -> None:
        global _world
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.timeout = TIMEOUT_S
        self.name = name or hashlib.sha256(str(self.ranks).encode()).hexdigest()[:16]
        self._prefix = f"allscan/{self.name}/"
        self._last_decision = ""  # that of the last exchange, once this rank knows it
        self.rank = 0
        self.store: Any = None
        if self.size > 1:
            self.rank = self.ranks.index(dist.get_rank())
            self.store = JobStore()
            if _world is not dist.group.WORLD:  # torch.distributed was restarted
                _world = dist.group.WORLD
                _exchanges.clear()
                _wait_keys.clear()
        self._counts = _exchanges

    def private(self, token: str) -> StoreExchange:
        """A StoreExchange of the same ranks in a namespace of its own. ``token``: equal on all ranks and never used
        before, since a store may outlive its process group."""
        return StoreExchange(self.ranks, f"{self.name}/{token}")

    def _last(self, store: dist.Store) -> tuple[str, int, str]:
        """(namespace, number, decision or "") of the last exchange, without those that have failed without this rank.
        A rank that is interrupted here has not begun the exchange, and comes to the same one next."""
        name = f"{self.name}/last"
        while True:
            number = self._counts.get(name, 0) + 1
            key = f"allscan/{name}/{number}/decision"
            decision = store.get(key).decode() if store.check([key]) else ""
            if not decision.startswith(FAILED):
                return name, number, decision
            self._end(store, name, number)

    @_if_there
    def rank_in_close(self) -> str | None:
        """A text that names another rank if one waits in the last exchange; else None. Does not wait."""
        name, number, decision = self._last(self.store)
        rank = None if decision else _find(self.store, f"allscan/{name}/{number}/came")
        return rank and f"rank {rank} waits in {CLOSE}"

    def exchange(
        self,
        value: Any,
        what: str,
        abort_check: AbortCheck = if_late,
        last: bool = False,
        limit: float | None = None,
        if_interrupted: str = FAILED,
    ) -> list[Any]:
        """Return every rank's ``value``, in rank order. Raises AllScanOutOfStep unless ``what`` is equal on all ranks.

        ``abort_check``: polled while this rank waits; its result, unless None, is a decision that ends the exchange on
        all ranks, which raise AllScanRejected if it begins with REJECTED, AllScanOutOfStep if with LOST. last: whether
        this is the last exchange of this StoreExchange, after which processes may end. After AllScanHostTimeout it can
        be made again; after any other end, making it again has the same result. limit: seconds; default ``timeout`` +
        GRACE_S. if_interrupted: how the decision begins if this rank is interrupted, other than by a RuntimeError.
        Raises AllScanHostTimeout, on all ranks, if a rank does not come within the limit or is interrupted; Abandoned
        if a rank has called ``abandon``."""
        if self.size == 1:
            return [value]
        store = self.store
        word = json.dumps((what, value))
        decision = self._last_decision if last else ""
        while not decision:
            try:
                name, number, _ = self._last(store) if last else (self.name, self._counts.get(self.name, 0) + 1, "")
                base = f"allscan/{name}/{number}/"
                try:
                    if not last:
                        self._counts[name] = number
                    else:
                        store.set(f"{base}came", str(self.rank))
                    store.set(f"{base}{self.rank}", word)
                    limit = self.timeout + GRACE_S if limit is None else limit
                    decision, at_once = self._decision(store, base, what, abort_check, limit)
                except BaseException as error:
                    kind = FAILED if isinstance(error, RuntimeError) else if_interrupted
                    own = f"{kind}rank {self.ranks[self.rank]} (global) was interrupted by {type(error).__name__}"
                    self._end(store, name, number, self._decide(store, base, own), last)
                    raise
            except dist.DistError as error:
                raise StoreGone(
                    f"{what}: the store of torch.distributed does not answer; the process that hosts it may have ended"
                ) from error
            # rank 0 of the job usually hosts the store, and its process may end next
            keeps_store = decision.startswith(_DONE) and (last or self.ranks[self.rank] == 0)
            self._end(store, name, number, decision, last, until_all=keeps_store)
            if at_once and not last and not decision.startswith(_DONE):
                decision = ""  # that one has failed without this rank
        for prefix, error_of in ((ABANDONED, Abandoned), (REJECTED, AllScanRejected), (LOST, AllScanOutOfStep)):
            if decision.startswith(prefix):
                raise error_of(f"{what}: {decision.removeprefix(prefix)}")
        if decision.startswith(FAILED):
            reason = decision.removeprefix(FAILED)
            raise AllScanHostTimeout(f"{what}: {reason}. All ranks of a group make the same calls in the same order")
        # not ast.literal_eval, which sometimes fails in Python 3.11 if several threads parse
        answers = _as_tuples(json.loads(decision.removeprefix(_DONE)))
        if json.dumps(answers[self.rank]) != word:
            raise RuntimeError(
                f"{what}: internal error, the store returned another exchange's value: {answers[self.rank]} for {word}"
            )
        names, values = zip(*answers, strict=True)
        if len(set(names)) > 1:
            raise AllScanOutOfStep("the ranks are at different calls: " + by_rank(names))
        return list(values)

    @_if_there
    def abandon(self, why: str) -> None:
        """End the last exchange on all ranks, without a wait. Called in place of ``exchange``."""
        if not self._last_decision:
            name, number, _ = self._last(self.store)
            why = f"{ABANDONED}rank {self.ranks[self.rank]} (global) {why}"
            decision = self._decide(self.store, f"allscan/{name}/{number}/", why)
            self._end(self.store, name, number, decision, last=True)

    def _decision(
        self, store: dist.Store, base: str, what: str, abort_check: AbortCheck, limit: float
    ) -> tuple[str, bool]:
        """Wait for the decision; return (decision, whether it was another rank's and there at the first look). O(1)
        requests to the store per rank and poll, each of which takes the host some 100 us; O(size) to find a missing
        rank."""
        keys = [f"{base}{rank}" for rank in range(self.size)]
        if _wait_keys:
            _forget_waits(store)
        begun, told, at_once = time.monotonic(), False, True
        looked, many = begun, max(1, self.size // 16)
        own: str | None = None  # this rank's decision, which holds if no rank has set one before
        while True:
            if self.rank == 0 and store.check(keys):
                own = f"{_DONE}[{', '.join(word.decode() for word in store.multi_get(keys))}]"
            elif store.check([f"{base}decision"]):
                decision = store.get(f"{base}decision").decode()
                break
            elif time.monotonic() - begun > limit:
                absent = next((self.ranks[r] for r, key in enumerate(keys) if not store.check([key])), self.ranks[0])
                where = self._elsewhere(store, absent)
                own = abort_check(f"rank {absent} (global) did not come within {limit:g} s{where}")
            elif time.monotonic() - looked > ABORT_CHECK_S:
                looked = time.monotonic()
                own = abort_check("")
            if own:
                decision = store.compare_set(f"{base}decision", "", own).decode()
                break
            waited = time.monotonic() - begun
            if not told and waited > TELL_S:
                told = True
                _wait_keys.append(f"{_WAITS}{self.ranks[self.rank]}")
                store.set(f"{_WAITS}{self.ranks[self.rank]}", json.dumps((self.name, what)))
            time.sleep(min(max(SHORTEST_S * many, waited / 8), LONGEST_S * many))
            at_once = False
        if decision.startswith(_DONE) and _wait_keys:
            _forget_waits(store)
        return decision, at_once and decision != own

    def _elsewhere(self, store: dist.Store, rank: int) -> str:
        """Where the absent ``rank`` (global) has waited itself, as the end of a message."""
        found = _find(store, f"{_WAITS}{rank}")
        if found is None:
            return ", and has reported nothing"
        name, what = json.loads(found)
        return f", it waited in: {what}" + (", of another communicator or group" if name != self.name else "")

    @staticmethod
    def _decide(store: Any, base: str, decision: str) -> str:
        """Set the decision, unless a rank has set it before. Returns the one that holds."""
        with contextlib.suppress(dist.DistError, StoreGone):
            return str(store.compare_set(f"{base}decision", "", decision).decode())
        return decision

    def _end(
        self, store: Any, name: str, number: int, decision: str = FAILED, last: bool = False, until_all: bool = False
    ) -> None:
        """Count the exchange, and record that this rank has read its decision. The last rank to do so deletes its keys;
        if no exchange follows also the fault, the rejections, and the exchange that other ranks may have left alone.
        until_all: return when all ranks have read the decision, after GRACE_S at the latest."""
        base, ended = f"allscan/{name}/{number}/", last and not decision.startswith(FAILED)
        if ended:
            self._last_decision = decision
        else:
            self._counts[name] = number
        with contextlib.suppress(dist.DistError, StoreGone):
            if store.add(f"{base}read", 1) == self.size:
                came = ["came"] * name.endswith("/last")
                names = ["decision", *map(str, range(self.size)), "read", *came]  # until_all waits for the first
                keys = [f"{base}{key}" for key in names]
                if ended:
                    count = self._counts.get(self.name, 0)
                    keys += [f"{self._prefix}{n}/{key}" for n in (count, count + 1) for key in names]
                    keys += [f"{self._prefix}rejected/{key}" for key in (*range(self.size), "any")]
                    keys += [f"{self._prefix}{key}" for key in ("fault", *(f"place/{r}" for r in range(self.size)))]
                for key in keys:
                    store.delete_key(key)
                return
            begun = time.monotonic()
            while until_all and store.check([f"{base}decision"]) and (waited := time.monotonic() - begun) < GRACE_S:
                time.sleep(min(max(SHORTEST_S, waited / 8), LONGEST_S))

    @_if_there
    def post_rejections(self, rejections: object) -> None:
        """Publish this rank's rejected calls for the other ranks, which read them with ``posted_rejections``."""
        self.store.set(f"{self._prefix}rejected/{self.rank}", json.dumps(rejections))
        self.store.set(f"{self._prefix}rejected/any", "yes")

    def posted_rejections(self) -> dict[int, Any]:
        """{rank: its posted rejections}. Does not wait for other ranks."""
        if self._posted("rejected/any") is None:
            return {}
        found = {rank: self._posted(f"rejected/{rank}") for rank in range(self.size)}
        return {rank: _as_tuples(json.loads(text)) for rank, text in found.items() if text is not None}

    @_if_there
    def tell_fault(self, why: str, place: Sequence[object]) -> None:
        """Report a fault to all ranks. The first report stays until ``forget``; later ones are ignored. place: where
        this rank is, see places.py."""
        self.store.set(f"{self._prefix}place/{self.rank}", json.dumps(place))
        self.store.compare_set(f"{self._prefix}fault", "", f"rank {self.rank} {why}")

    def fault(self) -> str | None:
        """The reported fault, or None."""
        return self._posted("fault")

    def place(self, rank: int, seconds: float) -> Sequence[Any] | None:
        """The ``place`` of a rank that has reported a fault; None if it does not within ``seconds``."""
        begun = time.monotonic()
        while (found := self._posted(f"place/{rank}")) is None and time.monotonic() - begun < seconds:
            time.sleep(2e-2)
        return None if found is None else list(json.loads(found))

    @_if_there
    def _posted(self, key: str) -> str | None:
        return _find(self.store, f"{self._prefix}{key}")

    @_if_there
    def forget(self) -> None:
        """Delete the reported fault and this rank's posted rejections, when no rank needs them any more."""
        for key in (f"rejected/{self.rank}", "rejected/any", "fault", f"place/{self.rank}"):
            self.store.delete_key(f"{self._prefix}{key}")


def _find(store: dist.Store, key: str) -> str | None:
    """The value of ``key``, None without one. For keys that another rank may delete: a get() after a check() would wait
    until the key is there again."""
    # the stores return the expected value of a key that does not exist, and set nothing unless that is empty
    found = store.compare_set(key, _NO_VALUE, _NO_VALUE).decode()
    return None if found == _NO_VALUE else str(found)


def _forget_waits(store: dist.Store) -> None:
    """Delete the keys of _wait_keys. Another thread may do so at the same time. An exchange succeeds without it."""
    with contextlib.suppress(IndexError, dist.DistError, StoreGone):
        while True:
            store.delete_key(_wait_keys.pop())


def _as_tuples(value: object) -> Any:
    """``value`` with the lists that JSON returns converted back to tuples."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
