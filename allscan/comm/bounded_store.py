"""The store of torch.distributed, with a limit for each request.

torch's clients wait without a limit for a server that is stopped (SIGSTOP, a frozen container) and not dead.
"""

from __future__ import annotations

import functools
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

LIMIT_S = 10.0  # of one request; a server answers in microseconds, in a thread of its own


class StoreGone(RuntimeError):
    """The store does not answer, or it belongs to a job that has ended."""


class BoundedStore:
    """The job's store, whose requests run in a thread, in order. Each raises StoreGone if torch.distributed was ended
    or restarted, if there is no answer within LIMIT_S, and at once while an earlier request has none. Such a request
    may still be carried out later."""

    add: Callable[..., Any]
    check: Callable[..., bool]
    compare_set: Callable[..., bytes]
    delete_key: Callable[..., bool]
    get: Callable[..., bytes]
    multi_get: Callable[..., list[bytes]]
    set: Callable[..., None]

    def __init__(self, store: Any) -> None:
        self.clone: Callable[[], dist.Store] = lambda: store.clone()  # another connection, without a limit
        self.world = dist.group.WORLD
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._late: list[Any] | None = None  # the answer of a request that had none in time: empty until it comes
        for name in self.__annotations__:
            setattr(self, name, functools.partial(self._request, getattr(store, name)))
        # one request for several keys, since each request wakes the thread and the caller
        self.delete_keys: Callable[[list[str]], None] = functools.partial(self._request, _delete, store.delete_key)
        # requests that wait for no answer and never fail: they run after the earlier ones. The lock is released after
        # the answer
        self.add_later: Callable[..., tuple[list[Any], threading.Lock]] = functools.partial(self._put, store.add)
        self.compare_set_later: Callable[..., object] = functools.partial(self._put, store.compare_set)
        threading.Thread(target=self._run, name="allscan-store", daemon=True).start()

    def _request(self, method: Callable[..., Any], *arguments: Any) -> Any:
        if not (dist.is_initialized() and dist.group.WORLD is self.world):
            raise StoreGone("torch.distributed was ended, or restarted, since this communicator was made")
        answer: list[Any] = []
        if self._late is None or self._late:
            unanswered = threading.Lock()  # as in _put
            unanswered.acquire()
            self._requests.put((method, arguments, answer, unanswered))
            self._late = None if unanswered.acquire(timeout=LIMIT_S) else answer
        if self._late is not None:
            raise StoreGone(
                f"the store of torch.distributed has not answered within {LIMIT_S:g} s; the process that has it, "
                "usually rank 0's or torchrun's, may be stopped"
            )
        value, error = answer
        if error is not None:
            raise error
        return value

    def _put(self, method: Callable[..., Any], *arguments: Any) -> tuple[list[Any], threading.Lock]:
        answer: list[Any] = []
        # a lock, no Event: an interrupt of its wait may leave it locked, and the thread would wait for ever
        unanswered = threading.Lock()
        unanswered.acquire()
        self._requests.put((method, arguments, answer, unanswered))
        return answer, unanswered

    def _run(self) -> None:
        while True:
            method, arguments, answer, unanswered = self._requests.get()
            try:
                answer += method(*arguments), None
            except BaseException as error:
                answer += None, error
            unanswered.release()
            del method, arguments, answer, unanswered


def _delete(delete_key: Callable[[str], bool], keys: list[str]) -> None:
    for key in keys:
        delete_key(key)


_last: tuple[dist.Store, BoundedStore] | None = None
_inherited: dist.Store | None = None  # the store of the process from which this one was forked


def bounded(store: dist.Store) -> BoundedStore:
    """The BoundedStore of ``store``, one object as long as no other store is asked for."""
    global _last
    if store is _inherited:
        raise StoreGone("this process was forked from a rank of torch.distributed, and is none itself")
    if _last is None or _last[0] is not store:
        _last = store, BoundedStore(store)
    return _last[1]


def _forked() -> None:
    global _last, _inherited
    _last, _inherited = None, _last[0] if _last else _inherited  # its thread is the parent's


os.register_at_fork(after_in_child=_forked)
