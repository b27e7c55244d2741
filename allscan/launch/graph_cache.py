"""CUDA graphs of launches that come again with the same addresses: one call of the driver in place of many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from ..bindings.cuda_driver import ExecutableGraph, Graph, KernelNode, new_graph
from ..bindings.torch_compat import capturing, current_device, current_stream_of

MOST_BYTES = 256 << 20  # of GPU memory, that the graphs of a communicator take by default
NODE_BYTES = 32 << 10  # of GPU memory that the driver takes for a node: an upper estimate, see docs/limits.md
SEEN = 4096  # addresses that have no graph, and are known to have come before
FAILURES = 3  # in a row to make a graph of one plan, after which no other is tried


class GraphCounts(NamedTuple):
    """CUDA graphs of a communicator so far; see ``allscan.Communicator.cuda_graphs``."""

    enabled: bool
    kept: int  # graphs
    bytes: int  # of GPU memory that these take, an upper estimate
    most_bytes: int
    built: int  # graphs, and those that are gone
    launched: int  # calls, or parts of calls, that were a graph
    declined: int  # those that had come before, and were launched one by one since there was no room for a graph
    failed: int  # those of which no graph could be made
    why: str  # the last of these could not


class Buildable(Protocol):
    """A launch sequence that is always the same but for the addresses of its memories."""

    number: int  # unique in the process
    num_nodes: int
    failures: int  # in a row to make a graph of it

    def build(self, builder: Builder) -> None:
        """Add its launches. Raises NotImplementedError where one cannot be a node."""


class Graphs:
    """A cache of CUDA graphs, by the launch sequence and the addresses that it is given, of one communicator.

    Training gives an operator the same addresses step after step, since an allocator answers the same requests alike.
    What comes for the first time is launched as it is; the second time a graph is built of it, node by node, which
    takes nothing of a stream, and from then on it is launched as a graph. A graph has the addresses in it and nothing
    else: no memory is kept for it. In a capture of the caller's the launches are made as they are, and likewise where
    no graph can be built.

    All graphs together take at most ``most_bytes`` of GPU memory. Where there is no room, a graph takes the place of
    the one that was used longest ago, if that was longer ago than its own addresses came: of more addresses in turn
    than there is room for, those that have a graph keep it.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self.bytes = self.built = self.launched = self.declined = self.failed = 0
        self.why = ""
        self._graphs: dict[tuple[int, ...], _CachedGraph] = {}  # that was used last is last
        self._seen: dict[tuple[int, ...], int] = {}  # when addresses without a graph came last
        self._now = 0  # counts the launches

    def counts(self) -> GraphCounts:
        return GraphCounts(
            self.most_bytes > 0,
            len(self._graphs),
            self.bytes,
            self.most_bytes,
            self.built,
            self.launched,
            self.declined,
            self.failed,
            self.why,
        )

    def launch(
        self,
        device: int,
        plan: Buildable,
        places: Sequence[int],
        launches: Callable[..., None],
        context: Any,
        *args: Any,
    ) -> None:
        """``launches(context, *args)`` on the current stream of the GPU ``device``: what ``plan`` launches with the
        addresses ``places``."""
        if not self.most_bytes or current_device() != device or capturing():
            return launches(context, *args)
        now = self._now = self._now + 1
        key = plan.number, *places
        cached = self._graphs.pop(key, None) or self._build(key, plan, context, places)
        if cached is None:
            return launches(context, *args)
        try:
            cached.graph.launch(current_stream_of(device))
        except RuntimeError as error:  # no memory for it, for one: nothing was launched
            self._gone(cached)
            self._rejected(plan, error)
            return launches(context, *args)
        if not cached.used:
            plan.failures = 0
        self._graphs[key], cached.used = cached, now
        self.launched += 1

    def forget(self, number: int) -> None:
        """The plan with this number is gone."""
        for key in [key for key in self._graphs if key[0] == number]:
            self._gone(self._graphs.pop(key))

    def close(self) -> None:
        """Give the memory back. No graph is built afterwards."""
        self.most_bytes = 0
        while self._graphs:
            self._gone(self._graphs.popitem()[1])
        self._seen.clear()

    def _build(self, key: tuple[int, ...], plan: Buildable, context: Any, places: Sequence[int]) -> _CachedGraph | None:
        """None if these addresses are new, or no graph can be built."""
        last = self._seen.pop(key, None)
        nbytes = plan.num_nodes * NODE_BYTES
        if last is not None and plan.failures < FAILURES and self._make_room(nbytes, last):
            try:
                with new_graph() as graph:
                    builder = Builder(graph, context, places)
                    plan.build(builder)
                    executable = graph.instantiate()
            except Exception as error:  # no memory for it; a kernel that cannot be a node; an old driver
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
        """For a graph of addresses that came last at ``last``, and are worth more than those that came before."""
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
    """Adds the launches of one run to a graph, each behind those that the order of the streams puts it behind.

    places: addresses of the run's memories.
    """

    def __init__(self, graph: Graph, context: Any, places: Sequence[int]) -> None:
        self.context, self.places = context, places
        self._graph = graph
        self._streams = [0]  # by priority, those that it is in, the current one last; 0 is the caller's
        self._last: dict[int, set[int]] = {0: set()}  # of each stream, the nodes that its next one is behind
        self._joins: list[tuple[int, int]] = []  # (stream, the one that is to be put behind it), the last entered last
        self._before: dict[int, set[int]] = {}  # of each node, all others that it is behind

    def kernel(self, node: KernelNode) -> None:
        stream = self._streams[-1]
        self._add(stream, self._graph.kernel(node, self._behind(stream), stream))

    def zeros(self, address: int, nbytes: int) -> None:
        stream = self._streams[-1]
        self._add(stream, self._graph.zeros(address, nbytes, self._behind(stream)))

    def enter(self, priority: int) -> None:
        """What comes next is on the side stream of this priority, behind what the current stream has had so far."""
        current = self._streams[-1]
        self._streams.append(priority)
        self._joins.append((priority, current))
        self._put_behind(priority, current)

    def leave(self) -> None:
        self._streams.pop()

    def join(self) -> None:
        """The stream in which the last side stream was entered is put behind it."""
        side, current = self._joins.pop()
        self._put_behind(current, side)

    def _put_behind(self, later: int, earlier: int) -> None:
        self._last.setdefault(later, set()).update(self._last[earlier])

    def _behind(self, stream: int) -> list[int]:
        """Without those that another one is behind."""
        nodes = self._last[stream]
        return sorted(nodes - set().union(*(self._before[node] for node in nodes)))

    def _add(self, stream: int, node: int) -> None:
        nodes = self._last[stream]
        self._before[node] = nodes.union(*(self._before[other] for other in nodes))
        self._last[stream] = {node}
