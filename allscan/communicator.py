"""Communicator: who takes part in a scan, over which transport, and what happened to it."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import time
import warnings
import weakref

import torch
import torch.distributed as dist

from .bindings.heap import heap_bytes as rounded_bytes
from .bindings.interpreter import remember_repeated_work
from .bindings.nvshmem_host import NvshmemHeap
from .bindings.shared_memory import SharedMemoryHeap
from .order import REMEDY, SETTLE_S, AllScanOutOfStep, AllScanTimeout, Order, have_refused, out_of_step, refusals
from .shmem_kernels import wait

EXCHANGE_TIMEOUT_S = 120.0  # how long a rank waits for the others where the host needs all of them

_heap = None  # this process's symmetric arena; made once, by init()
_handles = itertools.count(1)
_communicators = weakref.WeakValueDictionary()  # by handle
_exchanges = {}  # scope -> how many exchanges it has had: equal on all ranks that share it
_left_behind = []  # what kernels of communicators that were not closed may still write to


def _exchange(ranks: tuple[int, ...], value, what: str, scope: str = "") -> list:
    """Every rank's ``value``, in the order of ``ranks`` (global ranks). Through torch.distributed's store.

    ``scope``: exchanges of different scopes do not meet, default that of the group; those of one have ``what`` alike.
    """
    if len(ranks) == 1:
        return [value]
    scope = scope or _scope(ranks)
    number = _exchanges[scope] = _exchanges.get(scope, 0) + 1
    store, me = dist.distributed_c10d._get_default_store(), dist.get_rank()
    try:
        words = _gather(store, ranks, f"allscan/{scope}/{number}/", pickle.dumps((what, value)), what)
    except RuntimeError:
        _exchanges[scope] -= 1  # as if this one had not been: the next one is that of ranks that have not come
        with contextlib.suppress(dist.DistError):
            store.delete_key(f"allscan/{scope}/{number}/{me}")
        raise
    if me == ranks[0] and number > 1:  # everybody who has come here has read the previous answer
        for key in (*ranks, "all"):
            store.delete_key(f"allscan/{scope}/{number - 1}/{key}")
    kinds, values = zip(*map(pickle.loads, words), strict=True)
    if len(set(kinds)) > 1:
        raise AllScanOutOfStep("the ranks are at different calls: " + by_rank(kinds))
    return list(values)


def _gather(store, ranks: tuple[int, ...], prefix: str, word: bytes, what: str) -> list[bytes]:
    """What every rank has given as ``word``, in the order of ``ranks``; RuntimeError if one does not come.

    No GPU, no stream and no collective of a back end is involved, and the wait is bounded. The first rank gathers, the
    others read one answer: O(size) requests.
    """
    missing = me = dist.get_rank()
    deadline = time.monotonic() + EXCHANGE_TIMEOUT_S
    try:
        store.set(f"{prefix}{me}", word)
        if me == ranks[0]:
            words = []
            for rank in ranks:
                missing = rank
                words.append(_wait(store, f"{prefix}{rank}", deadline))
            store.set(prefix + "all", pickle.dumps(words))
        missing = ranks[0]
        return pickle.loads(_wait(store, prefix + "all", deadline + 5))
    except (dist.DistError, TimeoutError) as error:
        raise RuntimeError(
            f"{what}: rank {missing} (global) did not come within {EXCHANGE_TIMEOUT_S:g} s. All ranks of a group make "
            "the same calls in the same order"
        ) from error


def by_rank(values) -> str:
    """One line that shows a value of every rank."""
    return "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))


def _scope(ranks) -> str:
    return "-".join(map(str, ranks))


def _wait(store, key: str, deadline: float) -> bytes:
    """The value of ``key``, or TimeoutError. Not by store.wait, which keeps other threads from the store."""
    pause = 1e-4
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise TimeoutError(key)
        time.sleep(pause)
        pause = min(2 * pause, 5e-3)
    return store.get(key)


def init(heap_bytes: int | None = None, *, transport: str = "auto") -> None:
    """Make this process's symmetric arena. Collective over the whole job (torch.distributed's default group).

    The first :class:`Communicator` calls it; call it yourself to choose the size, or where only some ranks of the job
    make communicators at first. A second call does nothing if it asks for no other size.

    heap_bytes: size of the arena; default ``ALLSCAN_HEAP`` (e.g. ``512M``), else 256 MiB. The same on every rank.
    transport: "nvshmem" (one process a GPU; the current CUDA device is used), "shm" (processes without GPUs, for
        Triton's interpreter), or "auto": "nvshmem" where CUDA is.
    Raises RuntimeError if the transport is missing, ValueError for a bad size or name, or if ranks disagree.
    """
    global _heap
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
    transport = resolve_transport(transport)
    if _heap is not None:
        if heap_bytes is not None and rounded_bytes(heap_bytes) != _heap.heap.size:
            raise ValueError(f"the arena exists already with {_heap.heap.size:,} bytes")
        if transport != _heap.transport:
            raise ValueError(f"this process already uses transport {_heap.transport!r}")
        return
    ranks = tuple(range(dist.get_world_size()))

    def exchange(value):
        return _exchange(ranks, value, "allscan.init, collective over the job")

    if len(set(transports := exchange(transport))) > 1:
        raise ValueError(f"ranks ask for different transports: {transports}")
    if transport == "nvshmem":
        _heap = NvshmemHeap(dist.get_rank(), len(ranks), exchange, heap_bytes)
    else:
        remember_repeated_work()
        _heap = SharedMemoryHeap(exchange, heap_bytes)


def finalize() -> None:
    """Give the arena back, and NVSHMEM if :func:`init` initialised it. Collective over the job, after the last use."""
    global _heap
    if isinstance(_heap, NvshmemHeap):
        _heap.close()
    _heap = None


def resolve_transport(transport: str) -> str:
    """ "nvshmem" or "shm", with "auto" decided. Raises ValueError or RuntimeError when it cannot be."""
    if transport not in ("auto", "nvshmem", "shm"):
        raise ValueError(f'transport must be "auto", "nvshmem" or "shm", got {transport!r}')
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    if transport == "auto":
        transport = "nvshmem" if torch.cuda.is_available() and not interpreted else "shm"
    if transport == "nvshmem" and not torch.cuda.is_available():
        raise RuntimeError("transport 'nvshmem' needs a CUDA device, and torch finds none")
    if transport == "shm" and not interpreted:
        raise RuntimeError(
            "without GPUs the kernels run in Triton's interpreter: set TRITON_INTERPRET=1 before Python starts"
        )
    return transport


class Communicator:
    """The ranks of a process group as the neighbours of a scan, in the group's order.

    group: a torch.distributed ProcessGroup, a one-dimensional DeviceMesh (``mesh["sp"]``), or None for the default
        group; without torch.distributed, None is a group of this process alone.
    transport: "auto", "nvshmem" or "shm"; see :func:`init`.
    timeout: seconds that a kernel waits for another rank before it gives up and the communicator is broken. Longer than
        a rank may be busy with something else, such as writing a checkpoint.
    debug: compare every launch with the other ranks', on the host, before it is made: slow, but the first call that
        differs, in kind, shape, direction or :meth:`step`, is named on every rank (RuntimeError). Default: whether the
        environment has ALLSCAN_DEBUG=1.
    max_ctas: most programs (thread blocks) of a kernel that waits for other ranks; NCCL's name for it. Default: half
        the GPU's multiprocessors, so that the others are free for kernels of other streams, NCCL's above all, however
        long a rank is late. With more the scan's latency is 1 to 2 us shorter, where nothing else is to run beside it.

    Attributes: rank, size, group, device, transport, max_ctas; mapped (whether all neighbours reach each other by loads
    and stores); broken (whether a kernel has given up: a wait timed out, or the ranks were in different calls); closed.

    The constructor involves the group's ranks only, apart from the first one in a job, which makes the arena
    (:func:`init`) and so involves all. **All ranks of the group make the same calls in the same order.** After
    construction the host waits for the other ranks at the first call for a shape or for a cu_seqlens, in
    :meth:`barrier`, in :meth:`close`, in :meth:`resync`, and with ``debug`` at every launch.

    What happens when a rank leaves that order (:class:`allscan.AllScanOutOfStep`, :class:`allscan.AllScanTimeout`):
    a rank on which a call raises makes no further ones, and says so, unless the call has raised on every rank. A rank
    that never entered a call is found on the device in the first launch that pairs different calls if :meth:`step` is
    called once an iteration; otherwise by the numbers of calls, in the next barrier, first call or close, and the
    results since then are those of other calls. :meth:`resync` brings all ranks back into step.

    Raises ValueError (arguments, a mesh of several dimensions, a rank outside the group), RuntimeError (transport).
    """

    def __init__(
        self, group=None, *, transport: str = "auto", timeout: float = 30.0, debug: bool | None = None,
        max_ctas: int | None = None,
    ):  # fmt: skip
        self._closed = True  # until construction has succeeded
        if not 0 < timeout < 1e9:
            raise ValueError(f"timeout must be a positive number of seconds below 1e9, got {timeout!r}")
        if max_ctas is not None and not (isinstance(max_ctas, int) and max_ctas >= 1):
            raise ValueError(f"max_ctas must be an integer of at least 1, got {max_ctas!r}")
        self.timeout = float(timeout)
        self.debug = os.environ.get("ALLSCAN_DEBUG") == "1" if debug is None else debug
        self._launches = 0
        self.group = _process_group(group)
        if self.group is None:
            self._ranks = (0,)
            self.rank, self.size = 0, 1
        else:
            self._ranks = tuple(dist.get_process_group_ranks(self.group))
            self.rank, self.size = dist.get_rank(self.group), len(self._ranks)
        self.transport = resolve_transport(transport)
        if self.size > 1:
            init(transport=self.transport)
        if self.transport == "nvshmem":
            self.device = torch.device("cuda", torch.cuda.current_device())
            if self.size > 1 and _heap.device != self.device:
                raise ValueError(f"the arena lies on {_heap.device}, the current device is {self.device}")
        else:
            self.device = torch.device("cpu")
        cuda = self.device.type == "cuda"
        processors = torch.cuda.get_device_properties(self.device).multi_processor_count if cuda else 4
        self.max_ctas = processors // 2 if max_ctas is None else max_ctas
        self.record = torch.zeros(wait.RECORD_WORDS, dtype=torch.int64, pin_memory=cuda)
        self.fault = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.step_word = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.order = Order()
        self.made_scans = weakref.WeakSet()  # every AllScan, for resync()
        self._record = self.record.numpy()  # the same memory, quicker to read
        self._offsets = []
        self.scans = {}  # what allscan() and zeco_gla() have made, by shape
        self.agreements = set()  # what the ranks have agreed upon at first calls
        self.splits, self.layouts = {}, {}  # of zeco_gla and halo: see layout.first_token and kept
        self.handle = next(_handles)  # a number that stands for this object where torch wants one
        _communicators[self.handle] = self
        self._last_stream = self._side = self._looking = None
        self._closed = False
        self._scope = ""
        maps = {rank: self._maps(rank) for rank in (self.rank - 1, self.rank + 1) if 0 <= rank < self.size}
        transports, maps = zip(*self.exchange((self.transport, maps), "Communicator"), strict=True)
        if len(set(transports)) > 1:
            raise ValueError(f"the ranks of the group use different transports: {by_rank(transports)}")
        # [p]: whether ranks p and p + 1 reach each other by loads and stores
        self.mapped_links = [maps[p][p + 1] and maps[p + 1][p] for p in range(self.size - 1)]
        self.mapped = all(self.mapped_links)
        if self.size > 1:  # from here on exchanges of this communicator alone, as the number of the first is its own
            group = _scope(self._ranks)
            self._scope = f"{group}/{_exchanges[group]}"

    def exchange(self, value, what: str) -> list:
        """Every rank's ``value`` in rank order. A host operation that waits for all ranks of the group.

        Raises AllScanOutOfStep on every rank if they have not made equally many calls so far."""
        order = self.order
        try:
            answers = _exchange(self._ranks, (value, tuple(order.made), order.refused), what, self._scope)
        except RuntimeError:
            order.told = True  # nobody has launched anything
            raise
        values, made, refused = zip(*answers, strict=True)
        if any(refused):
            if len({r and r[0] for r in refused}) > 1:
                words = {rank: pickle.dumps([r]) for rank, r in enumerate(refused) if r}
                raise self.told(order.lose(f"The ranks are out of step: {refusals(words)}{REMEDY}."))
            order.refused = None  # all ranks have refused that call
        if len(set(made)) > 1:
            counts = by_rank(f"{forward} forward, {reverse} reverse" for forward, reverse in made)
            raise self.told(
                order.lose(
                    f"The ranks have made different numbers of calls: {counts}. Since one of them missed a call, "
                    f"results may be those of other calls. {REMEDY}."
                )
            )
        return list(values)

    def told(self, error: Exception) -> Exception:
        """``error``, which all ranks raise alike, so that the present call counts on none."""
        self.order.told = True
        return error

    @contextlib.contextmanager
    def call(self, reverse: bool = False):
        """Around one call of a user's: counts it, and remembers if it ends with an error on this rank alone."""
        order = self.order
        if order.inside:
            yield
            return
        self.check()
        if order.refused is not None:
            self._settle()
        order.made[reverse] += 1
        order.inside, order.told = True, False
        try:
            yield
        except BaseException as error:
            if order.told:
                order.made[reverse] -= 1
            elif type(error).__name__ == "_StopRecomputationError":
                pass  # torch's activation checkpointing has what it wants, and the call was made
            elif self.size > 1 and not self.broken:
                with contextlib.suppress(dist.DistError):
                    self._store().set(self._key(self.rank), order.refuse(error))
            raise
        finally:
            order.inside = False

    def _settle(self) -> None:
        """After a call that this rank has refused: go on if every rank has refused it."""
        number, why = self.order.refused
        deadline = time.monotonic() + min(SETTLE_S, self.timeout)
        while True:
            words = self._refused()
            if have_refused(words, number) == self.size:
                self.order.refused = None
                return
            if time.monotonic() > deadline:
                break
            time.sleep(5e-3)
        raise self.order.lose(
            f"rank {self.rank} has refused its call {number} ({why}), and not all ranks have; it would pair its calls "
            f"with others of theirs. {REMEDY}."
        )

    def _refused(self) -> dict:
        """{rank: word} of the ranks that have refused a call. Does not wait."""
        if self.size == 1:
            return {}
        try:
            store = self._store()
            return {p: store.get(self._key(p)) for p in range(self.size) if store.check([self._key(p)])}
        except dist.DistError:
            return {}

    def _key(self, rank: int) -> str:
        return f"allscan/{self._scope}/refused/{rank}"

    @staticmethod
    def _store():
        return dist.distributed_c10d._get_default_store()

    def check(self) -> None:
        """Raise :class:`AllScanTimeout` if a wait has timed out so far, :class:`AllScanOutOfStep` if this rank is out
        of step with the others, RuntimeError if the communicator is closed.

        Reads host memory only; synchronise the device first for a verdict on work that is still running.
        """
        if self._closed:
            raise RuntimeError("this Communicator is closed")
        if self.broken:
            others = refusals({p: word for p, word in self._refused().items() if p != self.rank})
            kind, *found = (int(self._record[i]) for i in range(wait.RECORD_KIND.value, wait.RECORD_SEEN.value + 1))
            if kind == wait.OUT_OF_STEP.value:
                raise out_of_step(*found, others)
            raise AllScanTimeout(*found, self.timeout, others)
        if self.order.lost is not None:
            raise AllScanOutOfStep(self.order.lost)

    def step(self) -> None:
        """Say that an iteration begins. Once an iteration on every rank, before anything in it that may raise.

        Counts a word in stream order, so it may be part of a CUDA graph; it travels with every tile, and a rank whose
        neighbour sent a tile in another step raises :class:`AllScanOutOfStep` instead of taking it. So a rank that
        skips the calls of an iteration is found in the next launch.
        """
        self.check()
        self.order.steps += 1
        self._follow()
        self.step_word.add_(1)

    def resync(self) -> None:
        """Bring the ranks back into step after a call that one of them missed or refused, or after a time-out.

        Collective: every rank of the group calls it, outside of a CUDA graph's capture. It waits for this rank's
        kernels, of which none waits longer than ``timeout``. Results of calls that were under way are not to be used,
        and their backward passes raise. Graphs that were captured before stay good. No memory is taken or lost.

        Raises RuntimeError if a rank does not come, or if the ranks do not have the same AllScans.
        """
        if self._closed:
            raise RuntimeError("this Communicator is closed")
        self._drain()
        scans = sorted(self.made_scans, key=lambda scan: scan.number)
        while True:
            with contextlib.suppress(
                AllScanOutOfStep
            ):  # another rank has just learnt of it in another call: it comes next
                specs = _exchange(self._ranks, [scan.spec for scan in scans], "Communicator.resync", self._scope)
                break
        if any(spec != specs[0] for spec in specs):
            raise RuntimeError("the ranks do not have the same AllScans: close this communicator and make a new one")
        if self.size > 1:
            with contextlib.suppress(dist.DistError):
                self._store().delete_key(self._key(self.rank))
        for words in (self.record, self.fault, self.step_word):
            words.zero_()
        for scan in scans:
            scan.reset()
        self._drain()
        self.order.restart()
        self._launches = 0
        self.splits.clear()  # ranks that missed a call have used them in another order
        _exchange(self._ranks, None, "the end of Communicator.resync", self._scope)

    def _drain(self) -> None:
        """Wait for this rank's kernels, and until what they have put has arrived."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.size > 1:
            _heap.quiet()

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has been called."""
        return self._closed

    @property
    def broken(self) -> bool:
        """Whether a kernel has given up: a wait has timed out, or the ranks were in different calls."""
        return bool(self._record[wait.RECORD_SET.value])

    def barrier(self) -> None:
        """Return when every rank of the group has called this and its device work so far is done.

        Raises what :meth:`check` raises; AllScanOutOfStep on every rank if they have not made equally many calls."""
        if self.order.lost is not None and not (self._closed or self.broken):
            with contextlib.suppress(RuntimeError):
                self.exchange("barrier", "Communicator.barrier")  # so that the others hear of it too
        self.check()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.check()
        self.exchange("barrier", "Communicator.barrier")

    def close(self) -> None:
        """Give the workspaces back. Collective, unless the communicator is broken: then close() returns at once. Where
        it is broken on any rank the memory stays taken on all, because a late rank may still write into it.

        Raises AllScanOutOfStep on every rank, after it has closed, if they have not made equally many calls, and nobody
        has raised it before."""
        if self._closed:
            return
        if self.broken:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        else:
            self._drain()
        made = self._leave(self.broken)
        if made:
            for offset in self._offsets:
                _heap.heap.free(offset)
        self.scans.clear()
        self.layouts.clear()
        self._closed = True
        if self.size > 1 and self.order.refused is not None:
            with contextlib.suppress(dist.DistError):
                self._store().delete_key(self._key(self.rank))
        if len(set(made)) > 1 and self.order.lost is None:
            raise AllScanOutOfStep("the ranks have made different numbers of calls: " + by_rank(made))

    def _leave(self, broken: bool) -> tuple:
        """Tell the other ranks that this one leaves, and wait for them unless it is broken. What calls each of them has
        made; nothing if any is broken."""
        order = self.order
        if self.size == 1:
            return () if broken else (order.numbers(),)
        store, prefix = self._store(), f"allscan/{self._scope}/close/"
        if not broken:
            why = f", refused {order.refused[0]}" if order.refused else ""
            words = _gather(store, self._ranks, prefix, (order.numbers() + why).encode(), "Communicator.close")
            return () if b"broken" in words else tuple(word.decode() for word in words)
        with contextlib.suppress(dist.DistError):
            store.set(f"{prefix}{dist.get_rank()}", b"broken")
            if self.rank == 0:
                store.set(prefix + "all", pickle.dumps([b"broken"]))  # without waiting for the others
        return ()

    def __enter__(self):
        return self

    def __exit__(self, error, *_):
        if error is None:
            self.close()
        elif not self._closed:  # the other ranks may never come to close(), and kernels may still wait for them
            self._leave(broken=True)
            _left_behind.append((self.record, self.fault, self.step_word))
            self._closed = True

    def __del__(self):
        if not getattr(self, "_closed", True):
            warnings.warn("a Communicator was dropped without close(); its memory stays taken", ResourceWarning)

    def __deepcopy__(self, memo):
        return self  # of modules that hold one

    def __repr__(self):
        state = "closed" if self._closed else "broken" if self.broken else "open"
        return f"Communicator(rank={self.rank}, size={self.size}, transport={self.transport!r}, {state})"

    # What workspaces and launches need; not for users.

    def alloc(self, nbytes: int) -> int:
        """Offset of a block of this rank's arena that lives as long as the communicator."""
        self._offsets.append(_heap.heap.alloc(nbytes))
        return self._offsets[-1]

    def heap_and_pe(self, rank: int):
        """The symmetric heap, and what its transport calls ``rank`` of this group."""
        return _heap, _heap.pes[self._ranks[rank]]

    def _maps(self, rank: int) -> bool:
        heap, pe = self.heap_and_pe(rank)
        return heap.is_mapped(pe)

    def begin(self, what: str) -> None:
        """Before every launch, of ``what``: raise if broken or closed; order it behind those made on another stream."""
        self.check()
        if self.debug:
            self._launches += 1
            what = f"{what}, in step {self.order.steps}" if self.order.steps else what
            try:
                answers = _exchange(self._ranks, what, f"launch {self._launches}", self._scope)
            except RuntimeError as error:
                raise self.told(RuntimeError(f"{error}; this rank launches {what}")) from error
            if len(set(answers)) > 1:
                raise self.told(RuntimeError(f"the ranks differ in launch {self._launches}: {by_rank(answers)}"))
        self._follow()

    def _follow(self) -> None:
        """Put the current stream behind what was launched on another one."""
        if self.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            stream = torch.cuda.current_stream(self.device)
            if self._last_stream is not None and self._last_stream != stream:
                stream.wait_stream(self._last_stream)
            self._last_stream = stream

    def peek(self, words: torch.Tensor) -> list:
        """What is in this rank's ``words`` now, beside whatever its streams are doing."""
        if self.device.type == "cpu":
            return words.tolist()
        if self._looking is None:
            self._looking = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._looking):
            return words.tolist()

    @contextlib.contextmanager
    def side_stream(self):
        """A stream of this communicator, behind the current one, which goes on no earlier than this one begins. Yields
        ``join``, which makes the current stream wait for what was launched inside; memory that it uses may not be given
        back before."""
        if self.device.type == "cpu":
            yield lambda: None
            return
        current = torch.cuda.current_stream(self.device)
        if self._side is None:
            self._side = torch.cuda.Stream(self.device, priority=-1)
        self._side.wait_stream(current)
        current.wait_stream(self._side)
        with torch.cuda.stream(self._side):
            yield lambda: current.wait_stream(self._side)


def communicator_of(handle: int) -> Communicator:
    """The communicator with this ``handle``. Raises RuntimeError if it is gone."""
    try:
        return _communicators[handle]
    except KeyError:
        raise RuntimeError("this Communicator is gone") from None


def _process_group(group):
    if isinstance(group, dist.ProcessGroup):
        return group
    if group is None:
        return dist.group.WORLD if dist.is_initialized() else None
    if hasattr(group, "get_group") and hasattr(group, "ndim"):  # DeviceMesh
        if group.ndim != 1:
            raise ValueError(f'a DeviceMesh must have one dimension (mesh["sp"]), got {group.ndim}')
        return group.get_group()
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this process is not a member of the group")
    raise ValueError(f"group must be a ProcessGroup, a one-dimensional DeviceMesh or None, got {type(group).__name__}")
