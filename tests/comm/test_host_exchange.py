"""Exchanges on the host: one outcome for all ranks, with stragglers, interrupted and absent ranks; and their cost."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import allscan
from allscan.base.errors import MOST, described
from allscan.comm import host_exchange
from allscan.comm.host_exchange import StoreExchange
from support.values import raised

pytestmark = pytest.mark.cpu


class Store:
    """The part of torch.distributed's store that StoreExchange uses; counts requests."""

    def __init__(self):
        self.words, self.lock, self.requests, self.longest_key = {}, threading.Lock(), 0, 0

    def _request(self, *keys):
        self.requests += 1
        self.longest_key = max([self.longest_key, *map(len, keys)])

    def set(self, key, word):
        with self.lock:
            self._request(key)
            self.words[key] = word.encode()

    def check(self, keys):
        with self.lock:
            self._request(*keys)
            return all(key in self.words for key in keys)

    def get(self, key):
        with self.lock:
            self._request(key)
            return self.words[key]

    def multi_get(self, keys):
        with self.lock:
            self._request(*keys)
            return [self.words[key] for key in keys]

    def compare_set(self, key, expected, word):
        assert expected in ("", word)  # the two uses: set if absent, and read without a wait
        with self.lock:
            self._request(key)
            return self.words.get(key, word.encode()) if expected else self.words.setdefault(key, word.encode())

    def add(self, key, n):
        with self.lock:
            self._request(key)
            self.words[key] = self.words.get(key, 0) + n
            return self.words[key]

    def delete_key(self, key):
        with self.lock:
            self._request(key)
            return self.words.pop(key, None) is not None


class ThreadRank(StoreExchange):
    """A rank that is a thread."""

    def __init__(self, rank, size, store):
        self.rank, self.size, self.ranks = rank, size, tuple(range(size))
        self.name, self.store, self._counts = "name", store, {}
        self._prefix, self._last_decision, self.timeout = "allscan/name/", "", 600.0


def together(ranks, *functions):
    """Call function(rank) for each rank in a thread; return results or exceptions."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        calls = [threads.submit(functions[i % len(functions)], rank) for i, rank in enumerate(ranks)]
        return [call.exception() or call.result() for call in calls]


@pytest.mark.parametrize("count", [*(pytest.param(n, marks=pytest.mark.quick) for n in (8, 64)), 512])
def test_requests_and_keys(monkeypatch, count):
    """An exchange costs a rank a few requests and polls, whatever the number of ranks, and leaves no key."""
    monkeypatch.setattr(host_exchange, "TELL_S", 1e9)  # on a busy machine ranks wait longer, and say so until the next
    store, size = Store(), count
    ranks = [ThreadRank(rank, size, store) for rank in range(size)]
    for number in range(1 if size == 512 else 2):
        before = store.requests
        start = time.monotonic()
        answers = together(ranks, lambda rank, number=number: rank.exchange((number, rank.rank), "what"))
        # two requests a poll: 8 polls at the shortest interval, 47 at an eighth of the wait, then at the longest
        polls = 2 * size * (55 + (time.monotonic() - start) / (5e-3 * max(1, size // 16)))
        assert answers == [[(number, r) for r in range(size)]] * size
        assert store.requests - before < 16 * size + polls
    assert not store.words and store.longest_key < 64


@pytest.mark.quick
def test_an_exchange_fails_on_all_ranks_or_on_none():
    """Rank 1 comes first and gives up; ranks 0 and 2 come later, and meet it in the next exchange."""
    store, failed = Store(), threading.Event()
    ranks = [ThreadRank(rank, 3, store) for rank in range(3)]

    def late(rank):
        assert failed.wait(60)
        return rank.exchange(("mine", rank.rank), "what")

    def early(rank):
        with pytest.raises(RuntimeError, match=r"what: rank 0 \(global\) did not come within 0.5 s"):
            rank.exchange("first", "what", limit=0.5)
        failed.set()
        time.sleep(0.2)
        return rank.exchange("second", "what")

    answers = together(ranks, late, early, late)
    assert answers == [[("mine", 0), "second", ("mine", 2)]] * 3
    assert [rank._counts["name"] for rank in ranks] == [2, 2, 2] and not store.words


@pytest.mark.quick
def test_the_first_rank_gives_up():
    """Rank 2 is late: the others' error names it, and its late exchange is paired with their next one."""
    store, failed = Store(), threading.Barrier(3, timeout=60)
    ranks = [ThreadRank(rank, 3, store) for rank in range(3)]

    def there(rank):
        with pytest.raises(RuntimeError, match=r"rank 2 \(global\) did not come"):
            rank.exchange(1, "what", limit=2.0)
        failed.wait()
        return rank.exchange(rank.rank, "what")

    def absent(rank):
        failed.wait()
        return rank.exchange(rank.rank, "what")

    assert together(ranks, there, there, absent) == [[0, 1, 2]] * 3
    assert not store.words


@pytest.mark.quick
def test_ranks_that_wait_for_each_other_at_different_calls(monkeypatch):
    """The error of each rank names the call at which the other one waits; later exchanges leave no key."""
    monkeypatch.setattr(host_exchange, "TELL_S", 0.1)
    store, names, errors = Store(), ("one", "another"), {}
    groups = [[ThreadRank(rank, 2, store) for rank in range(2)] for _ in names]
    for name, group in zip(names, groups, strict=True):
        for rank in group:
            rank.name, rank._prefix = name, f"allscan/{name}/"

    def wait(rank):
        with pytest.raises(RuntimeError, match="did not come within 2 s, it waited in: ") as caught:
            groups[rank.rank][rank.rank].exchange(1, f"call {names[rank.rank]}", limit=2.0)
        errors[rank.rank] = str(caught.value)

    try:
        together(groups[0], wait)
        for own, other in ((0, 1), (1, 0)):
            assert errors[own].startswith(f"call {names[own]}: rank {other} (global)"), errors
            assert f"it waited in: call {names[other]}, of another communicator or group" in errors[own]
        assert together(groups[0], lambda rank: rank.exchange(2, "what")) == [[2, 2]] * 2
        assert not [key for key in store.words if "waits" in key] and not host_exchange._wait_keys
    finally:
        host_exchange._wait_keys.clear()


@pytest.mark.quick
def test_what_is_read_executes_nothing():
    """A word that is not JSON is rejected, whoever has written it."""
    store = Store()
    ranks = [ThreadRank(rank, 2, store) for rank in range(2)]
    store.words["allscan/name/rejected/any"] = b""
    store.words["allscan/name/rejected/0"] = b"__import__('os').system('true')"
    with pytest.raises(ValueError, match="Expecting value"):
        ranks[1].posted_rejections()


@pytest.mark.quick
def test_an_answer_without_ones_own_word_is_rejected(monkeypatch):
    monkeypatch.setattr(host_exchange, "GRACE_S", 0.1)
    store = Store()
    store.words["allscan/name/1/decision"] = b'done [["what", "another"], ["what", 5]]'
    with pytest.raises(RuntimeError, match="the store returned another exchange"):
        ThreadRank(0, 2, store).exchange("mine", "what")


@pytest.mark.quick
def test_a_dead_store_is_named_as_such():
    class Dead(Store):
        def check(self, keys):
            raise dist.DistNetworkError("Connection reset by peer")

    with pytest.raises(RuntimeError, match="what: the store of torch.distributed does not answer"):
        ThreadRank(0, 2, Dead()).exchange(1, "what")


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["tcp", "hash", "file"])
def test_keys_that_another_rank_deletes(kind, tmp_path):
    """No read of a fault, a rejection or a wait lasts until a key is there again that was deleted after a check."""
    made = {
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
        "hash": dist.HashStore,
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 1),
    }
    store = made[kind]()
    store.set_timeout(timedelta(seconds=10))
    values = {
        "allscan/name/rejected/1": '[[1, "why"]]',
        "allscan/name/fault": "rank 1 why",
        f"{host_exchange._WAITS}1": '["name", "what"]',
    }

    def check(keys):
        found = store.check(keys)
        for key in set(keys) & set(values):
            store.delete_key(key)
        return found

    rank = ThreadRank(0, 2, types.SimpleNamespace(check=check, get=store.get, compare_set=store.compare_set))
    for key, value in [*values.items(), ("allscan/name/rejected/any", "")]:
        store.set(key, value)
    assert rank.posted_rejections() == {1: ((1, "why"),)} and rank.fault() == "rank 1 why"
    assert rank._elsewhere(rank.store, 1) == ", it waited in: what"
    for key in values:
        store.delete_key(key)
    nothing = ", and has reported nothing"
    assert rank.posted_rejections() == {} and rank.fault() is None and rank._elsewhere(rank.store, 1) == nothing
    assert not any(store.check([key]) for key in values)  # a read creates no key


@pytest.mark.quick
def test_texts_for_other_ranks():
    class Silent(Exception):
        def __str__(self):
            raise RuntimeError

    assert described(ValueError("name \udcff")) == "ValueError: name ?"
    assert described(Silent()) == "Silent: its message cannot be read"
    assert described(KeyError()) == "KeyError: without a message" and len(described(ValueError("x" * 10**7))) == MOST


@pytest.mark.quick
def test_an_interrupted_wait_is_forgotten(monkeypatch):
    """Later messages say nothing of a wait that Ctrl-C has ended."""

    def interrupt(late):
        if store.words.get(f"{host_exchange._WAITS}0"):
            raise KeyboardInterrupt

    monkeypatch.setattr(host_exchange, "TELL_S", 0.05)
    store = Store()
    ranks, answers = [ThreadRank(rank, 2, store) for rank in range(2)], []
    with pytest.raises(KeyboardInterrupt):
        ranks[0].exchange(0, "what", interrupt)
    assert store.check([f"{host_exchange._WAITS}0"])
    other = threading.Thread(target=lambda: answers.append(ranks[1].exchange(1, "what")))
    other.start()
    answers.append(ranks[0].exchange(0, "what"))
    other.join()
    assert answers == [[0, 1]] * 2 and not store.check([f"{host_exchange._WAITS}0"])


@pytest.mark.quick
@pytest.mark.parametrize("then", ["again", "abandon", "absent", "decided", "answered"])
def test_the_last_exchange_after_one_that_failed(then):
    """Rank 0 gets Ctrl-C in the last exchange, before or after its decision or after the answer, or rank 1 is absent;
    then it repeats or abandons it. Rank 1 comes later. The fault is reported until the exchange has succeeded."""
    store = Store()
    ranks, answers = [ThreadRank(rank, 2, store) for rank in range(2)], []
    ranks[1].tell_fault("a fault", "a place")
    other = threading.Thread(target=lambda: answers.append(raised(ranks[1].exchange, 1, "what", last=True)))

    def interrupt(*_):
        raise KeyboardInterrupt

    if then == "absent":
        with pytest.raises(allscan.AllScanHostTimeout, match="did not come"):
            ranks[0].exchange(0, "what", last=True, limit=0.5)
    elif then == "answered":
        other.start()
        ranks[0]._end = lambda *a, **options: (vars(ranks[0]).pop("_end"), interrupt())
        with pytest.raises(KeyboardInterrupt):
            ranks[0].exchange(0, "what", last=True)
    elif then == "decided":
        other.start()
        store.compare_set = lambda *a: (vars(store).pop("compare_set"), store.compare_set(*a), interrupt())
        with pytest.raises(KeyboardInterrupt):
            ranks[0].exchange(0, "what", last=True)
    else:
        with pytest.raises(KeyboardInterrupt):
            ranks[0].exchange(0, "what", interrupt, last=True)
    if then not in ("decided", "answered"):
        assert ranks[0].fault() == "rank 1 a fault"
        other.start()
    if then == "abandon":
        ranks[0].abandon("is broken")
    else:
        assert ranks[0].exchange(0, "what", last=True) == [0, 1]
    other.join(60)
    told = answers[0] and answers[0][0]
    assert told == ("Abandoned" if then == "abandon" else None) and not store.words, (answers, store.words)


@pytest.mark.quick
@pytest.mark.parametrize(("request_", "other_comes"), [(0, "later"), (1, "before"), (2, "meanwhile"), (2, "before")])
def test_interrupted_at_one_of_the_requests(request_, other_comes):
    """Ctrl-C during a request, which the store completes: later exchanges are right, and no key is left.
    Requests of rank 0: here is its value; are all values there; is there a decision, or have all read it. A rank that
    comes later goes on to the next exchange."""
    interrupted, came, looked = threading.Event(), threading.Event(), threading.Event()
    fails = (request_, other_comes) in ((1, "before"), (2, "meanwhile"))  # while the other rank waits

    class Interrupting(Store):
        checks = 0

        def set(self, key, value):
            if threading.current_thread() is other and other_comes == "meanwhile":
                assert interrupted.wait(60)
            super().set(key, value)
            if threading.current_thread() is other:
                came.set()
            elif request_ == 0 and not interrupted.is_set():
                interrupted.set()
                raise KeyboardInterrupt

        def check(self, keys):
            if threading.current_thread() is other:  # it reads no decision before
                assert fails or not came.is_set() or interrupted.wait(60)
                found = super().check(keys)
                looked.set()
                return found
            elif not interrupted.is_set():
                self.checks += 1
                assert self.checks != 1 or other_comes != "before" or came.wait(60)
                if self.checks == request_:
                    interrupted.set()
                    assert other_comes == "later" or came.wait(60) and (not fails or looked.wait(60))
                    super().check(keys)
                    raise KeyboardInterrupt
            return super().check(keys)

    store = Interrupting()
    ranks = [ThreadRank(0, 2, store), ThreadRank(1, 2, store)]
    answers = []
    other = threading.Thread(target=lambda: answers.extend(raised(ranks[1].exchange, n, "what") for n in (1, 2)))
    begun = other_comes != "later"
    if begun:
        other.start()
    with pytest.raises(KeyboardInterrupt):
        ranks[0].exchange(0, "what")
    assert ranks[0]._counts["name"] == 1
    if not begun:
        other.start()
    assert [ranks[0].exchange(3, "what") for _ in range(2 - begun)][-1] == [3, 2]
    other.join(60)
    if fails:
        assert "rank 0 (global) was interrupted" in answers[0][1], answers
    else:
        assert answers[0] is None, answers
    assert answers[1] is None and [rank._counts["name"] for rank in ranks] == [3 - begun] * 2 and not store.words


@pytest.mark.quick
def test_a_slow_store():
    """The time limit holds, and a rank's own decision counts, if its first look takes longer than that."""

    class Slow(Store):
        def check(self, keys):
            time.sleep(0.15)
            return super().check(keys)

    for told, kind in (("lost a fault", allscan.AllScanOutOfStep), (None, allscan.AllScanHostTimeout)):
        store = Slow()
        rank = ThreadRank(0, 2, store)
        with pytest.raises(kind):
            rank.exchange(1, "what", lambda late, told=told: told or host_exchange.if_late(late), limit=0.2)
        assert rank._counts["name"] == 1


def interrupted_case():
    """Rank 1 gets Ctrl-C while it waits: the others do not continue without it, and the next exchange is right."""
    everybody = StoreExchange(range(3))
    everybody.exchange(None, "begin")
    rank = dist.get_rank()
    if rank == 1:
        signal.signal(signal.SIGUSR1, signal.default_int_handler)
        try:
            everybody.exchange(rank, "what", lambda late: os.kill(os.getpid(), signal.SIGUSR1))
        except KeyboardInterrupt:
            first = "interrupted"
            everybody.store.set("interrupted", "")
    elif rank == 0:
        dist.distributed_c10d._get_default_store().wait(["interrupted"], timedelta(seconds=60))
        first = everybody.exchange(rank, "what")
    else:
        first = raised(everybody.exchange, rank, "what")
        assert "rank 1 (global) was interrupted" in first[1]
    return first, everybody.exchange(rank, "other")


def test_interrupted(fresh):
    """Rank 0, absent until then, goes on to the next exchange: the calls differ between ranks, and all get an error."""
    ranks = fresh(3)
    ranks.start(interrupted_case)
    for value, error in ranks.results():
        assert value is None and "different calls" in str(error), (value, error)


def new_job_case():
    """The default group is restarted: an error says so, and after finalize() everything works in the new group."""
    comm = allscan.Communicator()
    store = dist.distributed_c10d._get_default_store()
    rejected = raised(allscan.finalize)
    assert rejected[0] == "RuntimeError" and "open communicators" in rejected[1] and "size=2" in rejected[1]
    rank = dist.get_rank()
    for name in host_exchange._exchanges:  # as in a process next to one that an elastic restart created
        host_exchange._exchanges[name] += 3 * rank
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("second", store), rank=1 - rank, world_size=2)
    assert "restarted" in raised(allscan.Communicator)[1]
    assert "restarted" in raised(comm.barrier)[1]
    with pytest.warns(UserWarning, match="is closed without the other ranks: torch.distributed was ended"):
        allscan.finalize()
    comm.close()
    with allscan.Communicator() as new:
        return allscan.allscan(torch.full((1, 16), 1.0 + new.rank), comm=new).sum().item()


def test_torch_distributed_begun_anew(fresh):
    assert fresh(2).run(new_job_case) == [16.0, 0.0]


def forgotten_finalize_case():
    """torch.distributed is restarted, and rank 1 alone calls finalize() before that."""
    with allscan.Communicator():
        pass
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    if rank:
        allscan.finalize()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("second", store), rank=rank, world_size=2)
    error = raised(allscan.Communicator)
    if not rank:
        allscan.finalize()
    with allscan.Communicator() as new:
        return error, allscan.allscan(torch.full((1, 16), 1.0 + new.rank), comm=new).sum().item()


def test_a_rank_that_forgets_finalize(fresh):
    """All ranks raise at once, and the next Communicator works."""
    (of_0, zeros), (of_1, ones) = fresh(2).run(forgotten_finalize_case)
    assert of_0[0] == "RuntimeError" and "call allscan.finalize()" in of_0[1]
    assert of_1[0] == "AllScanRejected" and "rank 0: RuntimeError: torch.distributed was restarted" in of_1[1]
    assert (zeros, ones) == (0.0, 16.0)


def ended_job_case(how):
    """torch.distributed ends while communicators are open (a notebook's cell, an elastic restart)."""
    comm, other = allscan.Communicator(), allscan.Communicator()
    scan = allscan.AllScan(comm, (4, 16, 16))
    kept = allscan.allscan(torch.ones(1, 16, requires_grad=True), comm=comm)
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    dist.destroy_process_group()
    start = time.monotonic()
    if how == "close":
        scan.close()
        for some in (comm, other):
            with pytest.warns(UserWarning, match="is closed without the other ranks"):
                some.close()
        allscan.finalize()
    elif how == "leave":
        with pytest.warns(UserWarning, match="is closed without the other ranks"), comm, other:
            assert raised(allscan.allscan, torch.ones(3, 16), comm=comm)[0] == "StoreGone"
        allscan.finalize()
    else:
        if how == "fault":  # not yet reported
            comm.order.unreported_error = lambda: allscan.AllScanOutOfStep("a kernel has given up")
        with pytest.warns(UserWarning, match="is closed without the other ranks") as warned:
            allscan.finalize()
        assert len(warned) == 2 + (how == "fault")
        assert sum("is closed: a kernel has given up" in str(one.message) for one in warned) == (how == "fault")
        allscan.finalize()
    assert comm.closed and other.closed and time.monotonic() - start < 60
    dist.init_process_group("gloo", store=dist.PrefixStore(how, store), rank=1 - rank, world_size=2)
    with allscan.Communicator() as new:
        assert (new.rank, new.size) == (1 - rank, 2)
        assert raised(kept.sum().backward)[0] == "RuntimeError"
        found = allscan.allscan(torch.full((1, 16), 1.0 + new.rank), comm=new).sum().item()
    allscan.finalize()  # on both ranks
    return found


@pytest.mark.parametrize("how", ["close", "finalize", "leave", "fault"])
def test_a_communicator_whose_process_group_is_gone(fresh, how):
    assert fresh(2).run(ended_job_case, how) == [16.0, 0.0]


def nvshmem_case():
    """finalize() leaves NVSHMEM's heap: collectives of this stand-in raise, since they would wait for ever."""
    from allscan.bindings import nvshmem_host
    from allscan.comm import heap as runtime

    class Forever:
        def __getattr__(self, name):
            raise AssertionError(f"{name} is collective")

    torch.cuda.synchronize = lambda *_: None
    torch.cuda.is_available = lambda: True
    runtime._interpreted = lambda: False
    heap = object.__new__(nvshmem_host.NvshmemHeap)
    heap.device, heap._base, heap._owner, heap._block, heap._bindings = "cuda", 0, True, None, Forever()
    runtime._heap, runtime._job = heap, object()
    runtime.record_ended_alone()
    with pytest.warns(UserWarning, match="has not finalized NVSHMEM"):
        allscan.finalize()
    return raised(allscan.init, transport="nvshmem")


def test_nvshmem_is_left_where_ranks_are_gone(fresh):
    ((kind, text),) = fresh(1).run(nvshmem_case)
    assert kind == "RuntimeError" and "ranks [0] need a new process" in text


def hosting_case(port, how):
    """Rank 0 hosts the store, and its process ends after the last call; the others poll for answers every 2 s."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    comm = allscan.Communicator(timeout=60)
    host_exchange.GRACE_S = 60.0
    allscan.allscan(torch.ones(1, 16), comm=comm)
    if rank:
        host_exchange.time = types.SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: time.sleep(2.0))
    if how == "leave" and rank == 0:
        comm.__exit__(ValueError, ValueError(), None)
    elif how == "leave":
        with pytest.warns(UserWarning, match="is closed without the other ranks"):
            comm.close()
    else:
        getattr(comm, how)()
    if rank == 0:
        os._exit(0)
    return comm.closed


@pytest.mark.slow(but=("barrier", "leave"))
@pytest.mark.parametrize("how", ["close", "barrier", "leave"])
def test_the_rank_that_has_the_store_ends_first(fresh, how):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    ranks = fresh(3)
    ranks.start(hosting_case, port, how)
    (_, ended), *others = ranks.results()
    assert "exit code 0" in str(ended)
    assert others == [(how != "barrier", None)] * 2


def finalized_case():
    """Closing a communicator of a finalized arena frees nothing of the next one."""
    old = allscan.Communicator()
    allscan.AllScan(old, (4, 16, 16))
    old.close()
    allscan.finalize()
    allscan.init()
    with allscan.Communicator() as comm:
        scan = allscan.AllScan(comm, (4, 16, 16))
        free = comm.memory.heap.arena.free_bytes
        old.close()
        assert comm.memory.heap.arena.free_bytes == free
        return scan.scan(torch.ones(4, 16, 16)).mean().item()


def test_an_arena_after_another(fresh):
    assert fresh(2).run(finalized_case) == [0.0, 1.0]


def keys_case(group):
    """Return how many keys the store has gained after the life of some communicators."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()

    def keys():
        dist.barrier(group)
        n = store.num_keys() if rank == 0 else 0
        dist.barrier(group)
        return n

    with allscan.Communicator(group):
        pass
    before = keys()
    for i in range(3):
        with allscan.Communicator(group) as comm:
            allscan.allscan(torch.ones(2, 4 + i, 8), comm=comm)
            rejected = raised(allscan.allscan, torch.ones(2), comm=comm)
            assert rejected[0] == "ValueError"
            comm.barrier()
            if i:  # close() alone removes rejections, too
                comm.resync()
    return keys() - before


def test_no_key_is_left(run):
    assert run(3, keys_case) == [0, 0, 0]
