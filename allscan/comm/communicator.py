"""Communicator: the ranks of a scan, their transport, and the state of their calls."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import uuid
import warnings
import weakref
import zlib
from collections.abc import Hashable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..base.caches import CACHE_SIZE, Agreed, Recent
from ..base.checks import integer, switch
from ..base.errors import AllScanOutOfStep, AllScanRejected, described
from ..bindings import versions
from ..bindings.interpreter import prepare_interpreter
from ..launch.streams import Streams
from ..shmem_kernels import wait
from .call_order import Order
from .calls import Calls
from .heap import (
    arena_transport,
    check_transport,
    init,
    outside_inference_mode,
    record_ended_alone,
    resolve_transport,
    symmetric_heap,
)
from .host_exchange import (
    CLOSE,
    FAILED,
    GRACE_S,
    LOST,
    TIMEOUT_S,
    Abandoned,
    StoreExchange,
    StoreGone,
    by_rank,
    differing,
)
from .memory import Line, Memory
from .places import gave_up
from .process_groups import is_desynchronized, mark_desynchronized
from .topology import Topology, check_algorithm, reach

_SET = wait.RECORD_SET.value
_handles = itertools.count(1)
_communicators: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()  # by handle


class Communicator(Calls):
    """The ranks of a process group as the neighbours of a scan, in the group's order.

    Attributes: rank, size, group, device, transport; timeout, max_ctas, algorithm and nodes, which are fixed (nodes is
    None if the ranks of a node are not consecutive); mapped (whether all neighbours reach each other by loads and
    stores); broken (whether a kernel has recorded a fault: a time-out or different tags); closed;
    debug, invariant and recompute, which must not be changed either.

    The constructor is collective over the group. The first constructor in a job also creates the arena (``init``) and
    is therefore collective over the job. **All ranks of the group make the same calls in the same order.** After
    construction the host waits for the other ranks in the first call with a shape or a cu_seqlens, in ``AllScan(...)``,
    in ``barrier``, in ``close``, in ``resync``, in ``AllScan.close``, and with ``debug`` at every launch. It also
    waits after a call that this rank has rejected, until all ranks have, and for the neighbour's next launch after a
    call with gradients whose backward did not run.

    Ranks that leave this order are detected (``allscan.AllScanOutOfStep``, ``allscan.AllScanTimeout``). If a call
    raises on a rank, and not on every rank, that rank makes no further calls and reports this to the others. If a rank
    never entered a call, the device detects it in the first launch that pairs different calls, provided that ``step``
    is called once per iteration. Otherwise the next barrier, first call or close detects it by the numbers of calls,
    and the results since then are those of other calls. ``resync`` synchronizes all ranks again.

    Args:
        group: a torch.distributed ProcessGroup, a one-dimensional DeviceMesh (``mesh["sp"]``), or None for the default
            group; without torch.distributed, None is a group of this process alone.
        transport: "auto", "nvshmem", "ipc" or "shm"; see ``init``.
        timeout: seconds that a kernel waits for another rank before it gives up and the communicator is broken. It must
            exceed the longest time that a rank is busy otherwise, such as compiling kernels or writing a checkpoint.
            The host waits 5 s longer, in ``barrier``, ``close`` and first calls; at least 125 s in this constructor.
        debug: compare every launch with the other ranks' launches on the host, before it is made. This is slow, but
            every rank names the first launch that differs in kernel, shape, direction or ``step`` (AllScanOutOfStep).
            Also compares the arguments of every call (ValueError), checks its gates, and checks its results for NaN
            (RuntimeError). Default: whether the environment has ALLSCAN_DEBUG=1. The same on every rank.
        max_ctas: maximum number of programs (thread blocks) of a kernel that waits for other ranks, as in NCCL.
            The smallest value of all ranks is used. Default: half the GPU's multiprocessors, so that kernels of other
            streams, NCCL's above all, can run on the other half, however long a rank is delayed. With all of them the
            scan of 4 MiB and more has 7 to 11 % less latency, if no other kernels are to be overlapped with it.
        nodes: number of ranks on each node, in rank order, such as (8, 8, 8); default by host names. The ranks of a
            node must reach each other by loads and stores. The same on every rank.
        algorithm: how allscan(), zeco_gla(), zeco_ssd() and ``AllScan`` scan over several nodes: "chain", "rails",
            "recursive_doubling" (docs/rails.md), or "auto": a chain, until the others were timed on a network. The same
            on every rank.
        invariant: default segment length in tokens, a multiple of 64, for calls of operators (zeco_gla() and the
            others): their results then have the same bits for every number of ranks (docs/invariant.md). 0: no
            segments. The same on every rank.
        recompute: default of zeco_gla(), zeco_kda() and zeco_gated_delta_rule(), also of a model's layers. False, with
            their own kernels: forward keeps for backward what that would compute again. Each rank may choose for
            itself.

    Raises:
        ValueError: for a wrong group, a mesh of several dimensions, or a rank outside the group; on every rank for
            other wrong arguments of any rank, or if one has no memory (with one rank also TypeError and RuntimeError).
        RuntimeError: if the transport is missing.
        AllScanRejected: if ``init`` has failed on another rank.
        AllScanHostTimeout: if a rank does not come.

    Example:
        >>> with allscan.Communicator(mesh["sp"]) as comm:
        ...     prev = allscan.allscan(state, decay, comm=comm)
    """

    _why_closed = "is closed"

    @outside_inference_mode
    def __init__(
        self,
        group: Any = None,
        *,
        transport: str = "auto",
        timeout: float = 120.0,
        debug: bool | None = None,
        max_ctas: int | None = None,
        nodes: Sequence[int] | None = None,
        algorithm: str = "auto",
        invariant: int = 0,
        recompute: bool = True,
    ) -> None:
        self._closed = True  # until construction has succeeded
        self.group = _process_group(group)
        store_exchange = StoreExchange((0,) if self.group is None else dist.get_process_group_ranks(self.group))
        self.rank, self.size = store_exchange.rank, store_exchange.size
        # of a rank with a wrong argument, until the exchange below, after which all ranks raise
        self.transport, self._timeout, self.debug, self.invariant = "", TIMEOUT_S, bool(debug), 0
        self.recompute = bool(recompute)
        node_sizes, most, wrong = None, None, list[Exception]()
        try:
            if self.size > 1:
                check_transport(transport)
            self.transport = resolve_transport(transport)
            if not isinstance(timeout, (int, float)) or not 0 < timeout < 1e9:
                raise ValueError(f"timeout must be a positive number of seconds below 1e9, got {timeout!r}")
            self._timeout = float(timeout)
            most = max_ctas if max_ctas is None else integer("max_ctas", max_ctas)
            self.debug = switch("ALLSCAN_DEBUG") if debug is None else bool(debug)
            self._algorithm = check_algorithm(algorithm)
            if integer("invariant", invariant, 0) % 64:
                raise ValueError(f"invariant must be a multiple of 64 tokens, got {invariant}")
            self.invariant = int(invariant)
            node_sizes = None if nodes is None else tuple(integer("a size of nodes", n) for n in nodes)
            if node_sizes is not None and sum(node_sizes) != self.size:
                raise ValueError(
                    f"nodes must be the number of ranks of each node, {self.size} in total, got {node_sizes}"
                )
        except (TypeError, ValueError, RuntimeError) as error:
            if self.size == 1:
                raise
            wrong.append(error)
        store_exchange.timeout = max(TIMEOUT_S, self._timeout)
        heap, pes = None, [0]
        if self.size > 1:
            init(transport=self.transport or arena_transport())
            heap = symmetric_heap(self)
            self.transport = heap.transport
            pes = [heap.pes[rank] for rank in store_exchange.ranks]
        elif self.transport == "shm":
            prepare_interpreter()
        if self.rank == 0:
            versions.warn_of_newer(*versions.ALL, *["NVSHMEM"] * (self.transport == "nvshmem"))
        cuda = self.transport != "shm"
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        if heap is not None and heap.device != self.device:
            wrong.append(ValueError(f"the arena lies on {heap.device}, the current device is {self.device}"))
        try:
            self.memory = Memory(heap, self.device)
            self.line = Line(self.rank, pes, self.memory, self._timeout)
            self.host_record = self.memory.record.numpy().data  # a view of the same memory, faster to read
            self.placeholder = torch.zeros(1, dtype=torch.float32, device=self.device)  # saved for an absent tensor
            self.streams = Streams(self.device)
            self.streams.synchronize()  # the words are initialized before any stream updates them
        except RuntimeError as error:  # out of memory
            if self.size == 1:
                raise
            wrong.append(error)
        self.collectives: weakref.WeakSet[Any] = weakref.WeakSet()  # AllScans
        self.fwd_epochs: list[torch.Tensor] = []  # free ones, see backwards.py
        self.attributes: dict[Hashable, Any] = {}  # of users of the communicator (MPI: attribute caching)
        self.calls = Recent()  # prepared calls by key
        self.checked = Recent(16 * CACHE_SIZE)  # signatures of checked arguments
        self.agreed = Agreed(self.calls, self.checked)  # entries of these two need no further exchange
        self.tables: dict[Hashable, Any] = {}  # see tokens/partition.py
        # Stands for this object in schemas of custom operators, which take numbers. Equal in the next run of a program,
        # for torch's caches on disk; another group has another number, for an exported program that is loaded there
        self.handle = zlib.crc32(str(store_exchange.ranks).encode()) << 24 | next(_handles)
        _communicators[self.handle] = self
        problem = "; ".join(f"{type(error).__name__}: {error}" for error in wrong)
        chosen = dict(nodes=node_sizes, algorithm=str(algorithm), debug=bool(self.debug), invariant=self.invariant)
        if most is None:
            most = torch.cuda.get_device_properties(self.device).multi_processor_count // 2 if cuda else 2
        mine = self.transport, reach(heap, pes, self.rank), os.uname().nodename, tuple(chosen.items()), problem, most
        answers = store_exchange.exchange((*mine, is_desynchronized(self.group), uuid.uuid4().hex), "Communicator")
        transports, reaches, hosts, choices, problems, ctas, failed, (token, *_) = zip(*answers, strict=True)
        if len(set(transports)) > 1:
            raise ValueError(f"the ranks of the group use different transports: {by_rank(transports)}")
        if any(problems):
            raise ValueError(f"cannot create a Communicator: {by_rank(text or 'ok' for text in problems)}")
        if len(set(choices)) > 1:
            raise ValueError(f"ranks differ in {differing(choices)}")
        self._max_ctas: int = min(ctas)
        if any(failed):
            mark_desynchronized(self.group)
        self.topology = Topology(reaches, node_sizes, hosts, self._algorithm)
        self.mapped = all(self.topology.mapped_links)
        if self.size > 1:
            store_exchange = store_exchange.private(token)
        store_exchange.timeout = self._timeout
        self.order = Order(store_exchange, self._timeout, self.host_record)
        self.order.gave_up = functools.partial(gave_up, self.collectives, self.streams, self.host_record)
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether ``close`` has been called, or this process was forked from the one that made the communicator."""
        return self._closed

    @property
    def gone(self) -> bool:
        """Whether torch.distributed was destroyed or restarted after this communicator was created."""
        store = self.order.store_exchange.store
        return store is not None and not (dist.is_initialized() and dist.group.WORLD is store.world)

    @property
    def broken(self) -> bool:
        """Whether a kernel has recorded a fault: a wait has timed out, or the ranks were in different calls."""
        return bool(self.host_record[_SET])

    # Read-only properties: AllScans and plans were built with these values

    @property
    def timeout(self) -> float:
        """Timeout of a kernel's wait in seconds, as given to the constructor; fixed."""
        return self._timeout

    @property
    def max_ctas(self) -> int:
        """Maximum number of programs of a kernel that waits for other ranks; fixed."""
        return self._max_ctas

    @property
    def algorithm(self) -> str:
        """Algorithm of scans over several nodes, as given to the constructor; fixed."""
        return self._algorithm

    @property
    def nodes(self) -> tuple[int, ...] | None:
        """Number of ranks on each node, fixed; None if the ranks of a node are not consecutive."""
        return self.topology.nodes

    def check(self) -> None:
        """Raise if a kernel of this rank has given up so far.

        Reads host memory only; synchronise the device first for a verdict on work that is still running.

        Raises:
            AllScanTimeout: if a wait has timed out.
            AllScanOutOfStep: if this rank is desynchronized from the others.
            RuntimeError: if the communicator is closed.

        Example:
            >>> torch.cuda.synchronize()
            >>> comm.check()                                                      # before results are used
        """
        if self._closed:
            raise RuntimeError(f"this Communicator {self._why_closed}")
        if self.host_record[_SET]:
            raise self.order.error_of_record()
        if self.order.desync_reason is not None:
            raise AllScanOutOfStep(self.order.desync_reason)

    def step(self) -> None:
        """Mark the beginning of an iteration. Call it once per iteration on every rank, before any code that may raise.

        Increments a step count on the device in stream order, so it may be part of a CUDA graph. The count is sent with
        every tile. A rank that receives a tile of another step raises ``AllScanOutOfStep`` instead of using the tile.
        So a rank that skips the calls of an iteration is detected in the next launch. A communicator of several ranks
        warns once, on its first rank, at the first call after a backward pass if this was never called.

        Raises:
            AllScanTimeout, AllScanOutOfStep, RuntimeError: those of ``check``.

        Example:
            >>> for batch in loader:
            ...     comm.step()
            ...     train(batch)
        """
        self.order.loop = 2
        self.order.steps += 1
        self.order.missed_steps += 1  # if check() raises, the device does not count: see _steps
        self.check()
        self.streams.follow()
        self.order.missed_steps -= 1
        self.memory.steps.add_(1)

    def resync(self) -> None:
        """Synchronize the ranks again after a rank missed or rejected a call, or after a time-out.

        Collective: every rank of the group calls it, in the same step, outside of the capture of a CUDA graph. It waits
        for this rank's kernels; none of them waits longer than ``timeout``. Results of unfinished calls must not be
        used, and their backward passes raise. Graphs captured before stay valid. It neither allocates nor leaks memory.
        Ranks without a fault may call it, too. It does not synchronize torch's process group: after a wait in it that
        has failed, to_zigzag(), from_zigzag() and softmax layers raise on all ranks.

        Raises:
            AllScanHostTimeout: if a rank does not come within 2 * ``timeout`` + 5 s, in which the others learn of this
                rank's fault, or at its end within ``timeout`` + 5 s.
            AllScanOutOfStep: on every rank if they have called ``step`` different numbers of times: close the
                communicator and make a new one on all ranks, and begin with the same batch.
            RuntimeError: if the ranks do not have the same AllScans, or if the communicator is closed.

        Example:
            >>> except allscan.AllScanError:                                      # on every rank, see docs/training.md
            ...     comm.resync()
        """
        if self._closed:
            self.check()
        self._drain()
        gc.collect()  # AllScans that only an exception's frames hold, on some ranks
        scans = sorted(self.collectives, key=lambda scan: scan.number)
        store_exchange = self.order.store_exchange
        late, limit = functools.partial(self.order.late_after_fault, FAILED), 2 * self._timeout + GRACE_S
        while True:
            # another rank may have learnt of the fault just now, in another call: it comes to resync() next
            with contextlib.suppress(AllScanOutOfStep, AllScanRejected):
                mine = self._steps(), [tuple(scan.spec) for scan in scans], is_desynchronized(self.group)
                answers = store_exchange.exchange(mine, "Communicator.resync", late, limit=limit)
                steps, specs, failed = zip(*answers, strict=True)
                break
        if len(set(steps)) > 1:
            raise self.order.desynchronized(
                f"the ranks call resync() in different steps (calls of step(): {by_rank(steps)}) and would go on with "
                "different batches. All ranks: close() this communicator, make a new one and begin with the same batch."
            )
        # before anything that may fail or be interrupted on one rank: the ranks then call resync() again
        missed, self.order.missed_steps = self.order.missed_steps, 0
        self.memory.steps.add_(missed)
        if any(spec != specs[0] for spec in specs):
            raise RuntimeError("the ranks do not have the same AllScans: close this communicator and make a new one")
        if any(failed):
            mark_desynchronized(self.group)
        store_exchange.forget()
        self.memory.reset()
        self.memory.free_unused()
        self.agreed.clear()  # the AllScans stay: they were compared above
        for scan in scans:
            scan._reset()
        self._drain()
        self.order.restart()
        store_exchange.exchange(None, "the end of Communicator.resync")

    def _steps(self) -> int:
        """Number of calls of ``step``, including replays of CUDA graphs. Waits."""
        return int(self.memory.step[0]) + self.order.missed_steps

    def barrier(self) -> None:
        """Return when every rank of the group has called this and its device work so far is done.

        Raises:
            AllScanOutOfStep: on every rank if they have made different numbers of calls, and on the others if this rank
                raises.
            AllScanTimeout: and all other errors of ``check``, without a wait for other ranks.
            AllScanHostTimeout: on every rank that came, if a rank does not come.

        Example:
            >>> comm.barrier()                                                    # on every rank of the group
        """
        self.check()
        self.streams.synchronize()
        self.check()
        self.order.exchange("barrier", "Communicator.barrier")

    def close(self) -> None:
        """Free the workspaces. Collective. A broken communicator waits for this rank's kernels only.

        If the communicator is broken on any rank, or an exception ends the ``with`` block of any rank, no rank frees
        its memory, because a straggler may still write to it; the other ranks get a warning with the reason. The same
        holds if torch.distributed was destroyed and the ranks cannot communicate any more.
        It waits at most ``timeout`` + 5 s for the others.

        Raises:
            AllScanOutOfStep: after closing, if this rank has not raised it before: on every rank if they have made
                different numbers of calls, or if a rank does not come because it has raised this error or
                AllScanTimeout.
            AllScanTimeout: and all other errors of ``check``, after closing, if a kernel has given up and this rank has
                not raised an error for it before.
            AllScanHostTimeout: if a rank does not come and no fault is known; the communicator stays open.

        Example:
            >>> with allscan.Communicator() as comm:                              # which closes it at its end
            ...     train(comm)
        """
        if self._closed:
            return
        if self.broken or self.gone:
            self.streams.synchronize()
        else:
            self._drain()
        unreported = self.order.unreported_error()
        counts: tuple[str, ...] = ()
        desynchronized = warning = None
        try:
            counts = self._leave(
                "has closed its communicator alone, since a kernel has given up" if self.broken else ""
            )
        except AllScanOutOfStep as error:
            desynchronized = str(error)
        except (Abandoned, StoreGone) as error:
            warning = f"{self!r} is closed without the other ranks: {error}. Its memory stays taken"
        if not counts:
            record_ended_alone()
        else:
            self.memory.free()
        for cache in (self.attributes, self.calls, self.checked, self.agreed, self.agreed.scans, self.tables):
            cache.clear()
        self._closed = True
        if len(set(counts)) > 1:
            desynchronized = "the ranks have made different numbers of calls: " + by_rank(counts)
        if warning is not None:
            warnings.warn(warning, stacklevel=2)
        if unreported is not None:
            raise unreported
        if desynchronized is not None and self.order.desync_reason is None:
            raise AllScanOutOfStep(desynchronized)

    def _leave(self, alone: str) -> tuple[str, ...]:
        """Tell the other ranks that this one leaves, and wait for them unless ``alone``, the reason not to. Returns
        each rank's call counts; () if this one leaves alone. Raises Abandoned if another one does, AllScanOutOfStep if
        one does not come after a fault; StoreGone."""
        order = self.order
        if self.size == 1:
            return () if alone else (order.describe_call_counts(),)
        if alone:
            order.report_reason(alone)
            order.store_exchange.abandon(alone)
            return ()
        why = f", rejected {order.rejected[0]}" if order.rejected else ""
        late = functools.partial(order.late_after_fault, LOST)
        return tuple(order.store_exchange.exchange(order.describe_call_counts() + why, CLOSE, late, last=True))

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is None:
            self.close()
        elif not self._closed:  # the other ranks may never come to close(), and kernels may still wait for them
            self._leave(f"has left its communicator's block by {described(error)}")
            record_ended_alone()
            self.memory.abandon()
            self._closed = True

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            record_ended_alone()
            self.memory.abandon()
            why = "a Communicator was dropped without close(); its memory stays taken"
            warnings.warn(why, ResourceWarning, stacklevel=2)

    def __deepcopy__(self, memo: object) -> Communicator:
        return self  # a copy of a module shares the communicator

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Communicator cannot be pickled, since it belongs to running processes: save the module's state_dict(), "
            "and set the module's Communicator after loading"
        )

    def __repr__(self) -> str:
        state = "closed" if self._closed else "broken" if self.broken else "open"
        return f"Communicator(rank={self.rank}, size={self.size}, transport={self.transport!r}, {state})"

    # For launches, not for users.

    def _drain(self) -> None:
        """Wait for this rank's kernels and for the completion of their puts."""
        self.streams.synchronize()
        if self.size > 1:
            self.memory.heap.quiet()


def _forked() -> None:
    """Make all communicators unusable in a process that was just forked: its calls would take the place of the
    parent's."""
    for comm in list(_communicators.values()):
        comm._closed, comm._why_closed = True, "belongs to the process from which this one was forked"


os.register_at_fork(after_in_child=_forked)


def check_communicator(comm: object) -> None:
    """Raise TypeError unless ``comm`` is a Communicator."""
    if not isinstance(comm, Communicator):
        got = f"a {type(comm).__name__}"
        if comm is None:
            got = "None"
        elif isinstance(comm, dist.ProcessGroup) or hasattr(comm, "get_group"):
            got += ", which is its argument"
        raise TypeError(
            f"comm must be a Communicator, got {got}: create it once by comm = allscan.Communicator(group_or_mesh)"
        )


def communicator_of(handle: int) -> Communicator:
    """The communicator with this ``handle``. Raises RuntimeError if it was deleted."""
    try:
        return _communicators[handle]
    except KeyError:
        raise RuntimeError(
            "this Communicator was deleted, or an exported program (torch.export) runs without those of the exporting "
            "program, created in the same order"
        ) from None


def _process_group(group: Any) -> dist.ProcessGroup | None:
    if isinstance(group, dist.ProcessGroup):
        return group
    if group is None:
        if dist.is_initialized():
            return dist.group.WORLD
        started = os.environ.get("WORLD_SIZE", "1")
        if "RANK" in os.environ and started != "1":  # torchrun or a compatible launcher
            raise RuntimeError(
                f"WORLD_SIZE={started}, but torch.distributed is not initialised: call "
                "torch.distributed.init_process_group first, or unset RANK and WORLD_SIZE for a process by itself"
            )
        return None
    if hasattr(group, "get_group") and hasattr(group, "ndim"):  # DeviceMesh
        if group.ndim != 1:
            raise ValueError(f'a DeviceMesh must have one dimension (mesh["sp"]), got {group.ndim}')
        found: dist.ProcessGroup = group.get_group()
        return found
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this process is not a member of the group")
    what = type(group).__name__ + (": pass comm.group" if isinstance(group, Communicator) else "")
    raise ValueError(f"group must be a ProcessGroup, a one-dimensional DeviceMesh or None, got {what}")
