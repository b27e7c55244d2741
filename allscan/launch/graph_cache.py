"""LRU cache of CUDA graphs for repeated launch sequences, keyed by addresses: one driver call replaces many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from ..bindings.cuda_driver import ExecutableGraph, Graph, KernelNode, new_graph
from ..bindings.torch_compat import capturing, current_device, current_stream_of

MOST_BYTES = 256 << 20  # default limit of the GPU memory of a communicator's graphs
NODE_BYTES = 32 << 10  # upper estimate of the GPU memory that the driver allocates for a node, see docs/limits.md
SEEN = 4096  # maximum number of remembered keys (plan, addresses) without a graph
FAILURES = 3  # consecutive failures to build a graph of a plan, after which no more are built


class GraphCounts(NamedTuple):
    """CUDA graphs of a communicator so far; see ``allscan.Communicator.cuda_graphs``."""

    enabled: bool
    kept: int  # graphs in the cache
    bytes: int  # GPU memory of these graphs, an upper estimate
    most_bytes: int  # limit of ``bytes``
    built: int  # graphs built so far, including evicted ones
    launched: int  # launch sequences (calls, or parts of calls) that were launched as a graph
    declined: int  # repeated sequences that were launched kernel by kernel because the memory limit was reached
    failed: int  # failures to build or launch a graph
    why: str  # reason of the last failure


class Buildable(Protocol):
    """A launch sequence that is equal in all runs except for the addresses of its buffers."""

    number: int  # unique in the process
    num_nodes: int
    failures: int  # consecutive failures to build a graph of it

    def build(self, builder: Builder) -> None:
        """Add its launches to the graph. Raises NotImplementedError if a launch cannot be a node."""


class Graphs:
    """Cache of one communicator's CUDA graphs, keyed by launch sequence and addresses.

    In training an operator gets the same addresses in each step, since an allocator answers equal requests equally. The
    first launch with some addresses is made kernel by kernel. The second one builds a graph, node by node, without
    stream capture; it and later ones launch the graph. A graph holds addresses only and keeps no buffer alive. During
    stream capture by the caller, or if no graph can be built, the launches are made kernel by kernel.

    All graphs together take at most ``most_bytes`` of GPU memory. At this limit a new graph replaces the least recently
    used one, but only if that one was last used before the new graph's addresses were last seen: if more addresses
    alternate than fit, the existing graphs stay.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self.bytes = self.built = self.launched = self.declined = self.failed = 0
        self.why = ""
        self._graphs: dict[tuple[int, ...], _CachedGraph] = {}  # least recently used first
        self._seen: dict[tuple[int, ...], int] = {}  # by key without a graph: time of its last launch
        self._now = 0  # logical time: number of launches

    def counts(self) -> GraphCounts:
        rest = (getattr(self, name) for name in GraphCounts._fields[2:])
        return GraphCounts(self.most_bytes > 0, len(self._graphs), *rest)

    def launch(
        self,
        device: int,
        plan: Buildable,
        places: Sequence[int],
        launches: Callable[..., None],
        context: Any,
        *args: Any,
    ) -> None:
        """Run ``plan`` with the addresses ``places`` on the current stream of the GPU ``device``: as a graph, or by
        ``launches(context, *args)``, which makes the same launches one by one."""
        if not self.most_bytes or current_device() != device or capturing():
            return launches(context, *args)
        now = self._now = self._now + 1
        key = plan.number, *places
        cached = self._graphs.pop(key, None) or self._build(key, plan, context, places)
        if cached is None:
            return launches(context, *args)
        try:
            cached.graph.launch(current_stream_of(device))
        except BaseException as error:
            self._gone(cached)
            if not isinstance(error, RuntimeError):
                raise  # Ctrl-C
            # out of memory, for example: nothing was launched
            self._rejected(plan, error)
            return launches(context, *args)
        if not cached.used:
            plan.failures = 0
        self._graphs[key], cached.used = cached, now
        self.launched += 1

    def forget(self, number: int) -> None:
        """Destroy the graphs of the plan with this number, which was deleted."""
        for key in [key for key in list(self._graphs) if key[0] == number]:
            if cached := self._graphs.pop(key, None):  # garbage collection may call this inside of itself
                self._gone(cached)

    def close(self) -> None:
        """Destroy all graphs. No graph is built afterwards."""
        self.most_bytes = 0
        while self._graphs:
            self._gone(self._graphs.popitem()[1])
        self._seen.clear()

    def _build(self, key: tuple[int, ...], plan: Buildable, context: Any, places: Sequence[int]) -> _CachedGraph | None:
        """Build a graph. Returns None if the addresses are new, or if no graph can be built."""
        last = self._seen.pop(key, None)
        nbytes = plan.num_nodes * NODE_BYTES
        if last is not None and plan.failures < FAILURES and self._make_room(nbytes, last):
            try:
                with new_graph() as graph:
                    builder = Builder(graph, context, places)
                    plan.build(builder)
                    executable = graph.instantiate()
            except Exception as error:  # out of memory; a kernel that cannot be a node; an old driver
                self._rejected(plan, error)
            else:
                self.built += 1
                self.bytes += nbytes
                return _CachedGraph(executable, nbytes)
        if self.most_bytes:
            if len(self._seen) >= SEEN:
                del self._seen[next(iter(self._seen))]
            self._seen[key] = self._now
        return None

    def _make_room(self, nbytes: int, last: int) -> bool:
        """Evict graphs last used before time ``last`` until ``nbytes`` fit. Returns whether they fit."""
        while self.bytes + nbytes > self.most_bytes:
            oldest = next(iter(self._graphs), None)
            if oldest is None or self._graphs[oldest].used >= last:
                self.declined += 1
                return False
            self._gone(self._graphs.pop(oldest))
        return True

    def _gone(self, cached: _CachedGraph) -> None:
        cached.graph.destroy()
        self.bytes -= cached.nbytes

    def _rejected(self, plan: Buildable, error: Exception) -> None:
        plan.failures = FAILURES if isinstance(error, NotImplementedError) else plan.failures + 1
        self.failed += 1
        self.why = f"{type(error).__name__}: {error}"


class _CachedGraph:
    __slots__ = "graph", "nbytes", "used"

    def __init__(self, graph: ExecutableGraph, nbytes: int) -> None:
        self.graph, self.nbytes, self.used = graph, nbytes, 0


class Builder:
    """Adds the launches of one run to a graph, with the dependencies that the order of the streams implies.

    places: addresses of the run's buffers.
    """

    def __init__(self, graph: Graph, context: Any, places: Sequence[int]) -> None:
        self.context, self.places = context, places
        self._graph = graph
        self._streams = [0]  # priorities of the entered streams, the current one last; 0: the caller's
        self._last: dict[int, set[int]] = {0: set()}  # by stream: nodes that its next node depends on
        self._joins: list[tuple[int, int]] = []  # (side stream, stream that will wait for it), in order of entry
        self._before: dict[int, set[int]] = {}  # by node: all nodes that it depends on

    def kernel(self, node: KernelNode) -> None:
        stream = self._streams[-1]
        self._add(stream, self._graph.kernel(node, self._behind(stream), stream))

    def zeros(self, address: int, nbytes: int) -> None:
        stream = self._streams[-1]
        self._add(stream, self._graph.zeros(address, nbytes, self._behind(stream)))

    def enter(self, priority: int) -> None:
        """Enter the side stream of this priority. Its next node depends on all nodes of the current stream so far."""
        current = self._streams[-1]
        self._streams.append(priority)
        self._joins.append((priority, current))
        self._put_behind(priority, current)

    def leave(self) -> None:
        self._streams.pop()

    def join(self) -> None:
        """Let the stream that entered the last side stream wait for that side stream."""
        side, current = self._joins.pop()
        self._put_behind(current, side)

    def _put_behind(self, later: int, earlier: int) -> None:
        self._last.setdefault(later, set()).update(self._last[earlier])

    def _behind(self, stream: int) -> list[int]:
        """Nodes that the stream's next node depends on, without those that another of them depends on."""
        nodes = self._last[stream]
        return sorted(nodes - set().union(*(self._before[node] for node in nodes)))

    def _add(self, stream: int, node: int) -> None:
        nodes = self._last[stream]
        self._before[node] = nodes.union(*(self._before[other] for other in nodes))
        self._last[stream] = {node}
