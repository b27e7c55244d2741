"""Extends the timeout of waiting kernels by the time that other ranks compile.

A kernel gives up a wait after the communicator's timeout. A rank with a cold cache may compile for longer than that on
its host, before it launches the kernel that the others wait for. So a counter in the store of torch.distributed holds
the number of processes in which Triton or torch.compile is compiling. If a kernel of this process has waited for a
quarter of the timeout, a thread reads the counter and extends the wait while another process compiles (wait.py). A
compilation that fails counts until the thread that began it compiles again or enters a call.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from typing import Any

import torch.distributed as dist

from ..bindings.torch_compat import default_store
from ..bindings.triton_compat import compilations_told, compiles_in_pool
from ..shmem_kernels import wait
from .bounded_store import BoundedStore, bounded

LIMIT_S = 600.0  # limit for one compilation: a process may have died while it compiled
ANSWER_S = 1.0  # how long a compilation waits for the store
_KEY = "allscan/compiling"  # store key: number of processes of the job that compile, plus CHANGE for each change of it
CHANGE = 1 << 20
_EXTRA = wait.RECORD_EXTRA.value

_lock = threading.Lock()
_depth = 0  # nested compilations under way in this process
# (thread, kernel) of compilations by Triton that were not told to have ended; thread 0: of a pool
kernels_under_way: list[tuple[int, object]] = []
_counted_in: Any = None  # the store that counts this process
_seen = 0, 0.0  # (last value of the key, time at which it was first read)
_watched: weakref.WeakSet[Any] = weakref.WeakSet()  # communicators
_stop = threading.Event()
_thread: threading.Thread | None = None
_dynamo_hooked = False


def _store() -> BoundedStore | None:
    """The job's store; None if torch.distributed is not initialized or is being destroyed."""
    with contextlib.suppress(ValueError, RuntimeError):
        return bounded(default_store()) if dist.is_initialized() else None
    return None


def begin(*_: object, of_kernel: tuple[int, object] | None = None) -> None:
    """Record that a compilation begins in this process. of_kernel: an element of ``kernels_under_way``."""
    global _depth, _counted_in
    with _lock:
        _depth += 1
        if of_kernel is not None:
            kernels_under_way.append(of_kernel)
        if _depth == 1 and _watched and (store := _store()) is not None:
            unanswered = store.add_later(_KEY, CHANGE + 1)[1]
            _counted_in = store  # it will be counted; other ranks should know before this one compiles
            unanswered.acquire(timeout=ANSWER_S)


def end(*_: object) -> None:
    """Record that a compilation has ended in this process."""
    global _depth
    with _lock:
        _depth = max(0, _depth - 1)
        if not _depth:
            _count_out()


def end_all() -> None:
    """Record that an exception has ended all compilations in this process."""
    global _depth
    if _depth:
        with _lock:
            _depth = 0
            kernels_under_way.clear()
            _count_out()


def _begin_kernel(kernel: object) -> None:
    """``begin`` for Triton; kernel: see ``compilations_told``."""
    if kernel is None:
        begin()
        return
    pooled = compiles_in_pool()
    if not pooled:
        end_failed()
    begin(of_kernel=(0 if pooled else threading.get_ident(), kernel))


def _end_kernel(kernel: object) -> None:
    """``end`` for Triton. Another thread than the one that began may call it."""
    if kernel is not None:
        with _lock:
            mine, found = (threading.get_ident(), kernel), [x for x in kernels_under_way if x[1] == kernel]
            if not found:
                return  # counted as failed
            kernels_under_way.remove(mine if mine in found else found[0])
    end()


def end_failed() -> None:
    """Record that compilations by Triton which this thread has begun have failed: it does not compile now.

    Triton tells nothing of a compilation that fails, and triton.autotune goes on with another configuration."""
    with _lock:
        failed = [x for x in kernels_under_way if x[0] == threading.get_ident()]
        for x in failed:
            kernels_under_way.remove(x)
    for _ in failed:
        end()


def _count_out() -> None:
    global _counted_in
    store, _counted_in = _counted_in, None
    if store is not None:
        store.add_later(_KEY, CHANGE - 1)


def another_compiles(store: Any) -> bool:
    """Whether another process of the job compiles; False once LIMIT_S has passed without a change."""
    global _seen
    try:
        value = store.add(_KEY, 0) if store.check([_KEY]) else 0
    except (dist.DistError, RuntimeError):
        return False
    if value != _seen[0]:
        _seen = value, time.monotonic()
    count = value % CHANGE - (_counted_in is not None)
    return count > 0 and time.monotonic() - _seen[1] < LIMIT_S


def _forked() -> None:
    """Forget the communicators of the parent process, whose store this one must not use."""
    global _lock, _depth, _counted_in, _thread
    _lock, _depth, _counted_in, _thread = threading.Lock(), 0, None, None
    kernels_under_way.clear()
    _watched.clear()


os.register_at_fork(after_in_child=_forked)


def watch(comm: Any) -> None:
    """Extend the timeout of kernels of ``comm`` from now on by the time that other ranks compile."""
    global _thread
    with _lock:
        _watched.add(comm)
        if _thread is None:
            compilations_told(_begin_kernel, _end_kernel)
            _thread = threading.Thread(target=_run, name="allscan-compiling", daemon=True)
            _thread.start()
            atexit.register(_end_thread)
    _hook_dynamo()


def _run() -> None:
    watch = _Watch()
    interval = 1.0
    while not _stop.wait(interval):
        _hook_dynamo()
        interval = watch.look()


class _Watch:
    """State of the thread between polls. It holds no strong reference to a communicator."""

    def __init__(self) -> None:
        # a separate connection of the thread: another thread may block in the first one
        self._own: dist.Store | None = None
        self._of: BoundedStore | None = None
        self._clocks: weakref.WeakKeyDictionary[Any, _Clock] = weakref.WeakKeyDictionary()

    def look(self) -> float:
        """Extend the timeout of communicators with long waits. Returns the seconds until the next poll."""
        interval = 1.0
        for comm in list(_watched):
            interval = min(interval, max(0.02, comm.timeout / 20))
            if not comm.host_record[_EXTRA] or comm.closed or (store := _store()) is None:
                continue
            if store is not self._of:
                self._own, self._of = _connection(store), store
            clock = self._clocks.setdefault(comm, _Clock())
            comm.host_record[_EXTRA] = clock.extra(comm, another_compiles(self._own))
        return interval


class _Clock:
    """Computes the extension of the timeout for the waits of one communicator."""

    def __init__(self) -> None:
        self._began: float | None = None  # time at which a wait for a compilation was first seen
        self._held = 0.0  # seconds after _began until which a rank has compiled
        self._last = 0.0  # time at which a long wait was last seen

    def extra(self, comm: Any, compiles: bool) -> int:
        """The extension in nanoseconds, an even number (bit 0 of the word is the kernels' request)."""
        present = time.monotonic()
        if comm.host_record[_EXTRA] & 1:
            self._last = present
        elif present - self._last > max(1.0, comm.timeout / 4):  # no kernel waits any more
            self._began = None
        if compiles:
            self._began = present if self._began is None else self._began
            self._held = present - self._began + LIMIT_S
        elif self._began is not None:
            self._held = min(self._held, present - self._began)
        return 0 if self._began is None else int(1e9 * self._held) & ~1


def _connection(store: Any) -> dist.Store:
    found: dist.Store = store
    with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):
        found = store.clone()
    return found


def _end_thread() -> None:
    _stop.set()
    if _thread is not None:
        _thread.join(5.0)


def _hook_dynamo() -> None:
    """Let torch.compile call ``begin`` and ``end``, once it has been imported."""
    global _dynamo_hooked
    callback = sys.modules.get("torch._dynamo.callback")
    if not _dynamo_hooked and hasattr(callback, "on_compile_end"):
        _dynamo_hooked = True
        callback.on_compile_start(begin)  # type: ignore[union-attr]
        callback.on_compile_end(end)  # type: ignore[union-attr]
