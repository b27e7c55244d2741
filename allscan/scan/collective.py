"""AllScan: All-Scan with its memory and channels allocated once."""

from __future__ import annotations

import itertools
import math
import numbers
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from ..base.checks import (
    ScanInputs,
    Shift,
    call_key,
    check_tensor,
    check_transition,
    decay_rows,
    decay_target,
    integer,
    plain,
)
from ..base.errors import REMEDY, Problem
from ..base.tiling import next_power_of_2, scan_tile, transition_blocks, transition_tile
from ..bindings.triton_compat import launchable
from ..comm.communicator import Communicator, check_communicator
from ..comm.heap import outside_inference_mode
from ..launch.compiled_kernel import (
    Launch,
    channel_addresses,
    dynamo_disabled,
    prefer_shared_memory_carveout,
    with_nvshmem,
)
from ..launch.plan import Buffer, Plan
from ..launch.streams import Beside
from ..shmem_kernels.channel import Channel
from ..shmem_kernels.links import NONE, PUT
from ..shmem_kernels.rails import rails_kernel
from ..shmem_kernels.scan import scan_kernel, shift_rows_kernel
from ..shmem_kernels.transition import transition_kernel
from .rails_links import Rails
from .tickets import new_tickets
from .workspace import PROTOCOLS, Spec, make_workspace, reset, workspace_bytes

_numbers = itertools.count(1)
_TICKET = Channel._fields.index("ticket")
_DIRECTION = "_allscan_reverse"  # attribute of a ticket: of the launch that it was given to


def _spec(comm: Communicator, shape, depth, protocol, tile, max_ctas, algorithm) -> Spec:
    """Raises TypeError or ValueError for wrong arguments."""
    depth, max_ctas = integer("depth", depth), integer("max_ctas", max_ctas)
    shape = tuple(integer("a size of shape", n) for n in shape)
    if len(shape) < 2:
        raise ValueError(f"shape must be [..., K, V], got {shape}")
    if protocol != "auto" and protocol not in PROTOCOLS:
        raise ValueError(f'protocol must be "auto", "sentinel", "signal" or "put", got {protocol!r}')
    if protocol == "put" and comm.transport == "ipc":
        raise ValueError('protocol="put" is NVSHMEM\'s, transport "ipc" has none')
    if tile is None:
        sentinel = protocol == "sentinel" or (protocol == "auto" and comm.mapped)
        tile = scan_tile(shape, max_ctas, sentinel, comm.device)
    tile = tuple(integer("a size of tile", n) for n in tile)
    if len(tile) != 2 or any(n != next_power_of_2(n) for n in tile):
        raise ValueError(f"tile must be two powers of two, got {tile}")
    algorithm = comm.topology.algorithm_for(math.prod(shape) * 4, algorithm)
    return Spec(shape, tile, depth, protocol, algorithm)


def _rails(comm: Communicator, spec: Spec) -> Rails | None:
    return None if spec.algorithm == "chain" else Rails(comm, spec)


class AllScan:
    """All-Scan over the ranks of a communicator, with its memory and channels allocated once.

        R_0 = initial_state (or 0),   R_{p+1} = decay_p * R_p + state_p,   rank p gets R_p

    reverse=True numbers the ranks from the last. Where a decay is 0 nothing passes, not even Inf or NaN; -0.0 may
    arrive as +0.0. In a chain each rank receives one state, whatever the number of ranks (ZeCO, arXiv 2507.01004,
    section 3); with rails about two over NVLink, and a part of one over the network.

    comm: Communicator.
    shape: [..., K, V] of the float32 state, the same on every rank.
    depth: how many scans a rank may run ahead of the next one; slots an inbox has for each tile.
    protocol: "sentinel" (mapped peers: stores whose words announce themselves), "signal" (mapped peers: stores, then a
        released signal), "put" (NVSHMEM put with signal), "auto": sentinel where peers are mapped, else put.
    tile: (BK, BV) rows and columns of a tile, powers of two; by default chosen for speed with ``comm.max_ctas``
        programs. Kernels that need whole rows or columns at a time choose themselves.
    max_ctas: most programs of a launch; default ``comm.max_ctas``.
    algorithm: "chain", "rails" or "doubling" (docs/rails.md), for several nodes, or "auto", by the number of nodes and
        the size of the state; default ``comm.algorithm``. Kernels of one's own (:meth:`channel`, :meth:`launch`) and
        transitions need a chain.

    Collective over the group: all ranks construct it alike, at the same place in their order of calls, and close it
    alike: :meth:`close`, or ``with``.
    Raises ValueError, TypeError (arguments; ranks that differ), RuntimeError (protocol not possible), MemoryError
    (arena full); on every rank before anything is launched.

        >>> with allscan.AllScan(comm, (32, 128, 128)) as scan:     # 2 MiB of state
        ...     prev = scan.scan(state, decay)
    """

    @outside_inference_mode
    def __init__(
        self,
        comm: Communicator,
        shape: Sequence[int],
        *,
        depth: int = 3,
        protocol: str = "auto",
        tile: tuple[int, int] | None = None,
        max_ctas: int | None = None,
        algorithm: str | None = None,
    ) -> None:
        check_communicator(comm)
        comm.check()
        self.comm = comm
        self._max_ctas = comm.max_ctas if max_ctas is None else max_ctas
        spec: Spec | Problem
        self._rails = None
        try:
            spec = _spec(comm, shape, depth, protocol, tile, self._max_ctas, algorithm)
            self._rails = _rails(comm, spec)
        except (TypeError, ValueError, RuntimeError) as error:
            spec = Problem(error)  # which the other ranks are to hear of
        self._workspace = make_workspace(comm, spec, self._rails, self._max_ctas)
        assert isinstance(spec, Spec)
        self.spec: Spec = spec
        self.shape, self.tile, self.depth, self.protocol, self.algorithm = spec
        self.K, self.V = self.shape[-2:]
        self._rows = self.shape[:-1]
        self.num_tiles = spec.num_tiles
        self._channels = self._workspace.channels
        self._adjoint_channels = tuple(c._replace(ADJOINT=tl.constexpr(True)) for c in self._channels)
        # by ADJOINT and direction: what kernels take before and behind the address of the ticket
        self._addresses: list[list[tuple[tuple, tuple]]] = [[], []]
        if self._rails is None:
            for adjoint, channels in enumerate((self._channels, self._adjoint_channels)):
                addresses = [channel_addresses(channel) for channel in channels]
                self._addresses[adjoint] = [(x[:_TICKET], x[_TICKET + 1 :]) for x in addresses]
        self._launches: dict[tuple, Launch] = {}
        self._prepared: dict[tuple, PreparedScan] = {}
        self._closed = False
        self.number = next(_numbers)
        self.backwards = 0  # adjoint launches, as the host has made them
        self.dropped = [False, False]  # see order.PendingBackward
        comm.collectives.add(self)

    @staticmethod
    def size_hint(
        comm: Communicator,
        shape: Sequence[int],
        *,
        depth: int = 3,
        protocol: str = "auto",
        tile: tuple[int, int] | None = None,
        max_ctas: int | None = None,
        algorithm: str | None = None,
    ) -> int:
        """Symmetric memory that an AllScan with these arguments would take on this rank, in bytes: about 2 * depth *
        the state, with put links twice that; with rails more than twice that; nothing on one rank. Takes nothing, and
        asks no other rank."""
        check_communicator(comm)
        ctas = comm.max_ctas if max_ctas is None else max_ctas
        spec = _spec(comm, shape, depth, protocol, tile, ctas, algorithm)
        return workspace_bytes(comm, spec, _rails(comm, spec))

    @property
    def max_ctas(self) -> int:
        """Most programs of a launch; fixed."""
        return self._max_ctas

    @property
    def workspace_bytes(self) -> int:
        """Symmetric memory of both directions on this rank, in bytes: see :meth:`size_hint`."""
        return workspace_bytes(self.comm, self.spec, self._rails)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def close(self) -> None:
        """Give the symmetric memory back. Collective: every rank closes it at the same place in its order of calls.

        Waits for this rank's kernels and for the other ranks. CUDA graphs that hold it must not be replayed any more.
        Where the communicator is broken or out of step the memory stays taken until that is closed.
        Raises AllScanOutOfStep if the ranks have not made equally many calls, RuntimeError if one does not come.
        """
        comm = self.comm
        if self._closed:
            return
        if comm.size > 1 and not (comm.closed or comm.broken or comm.gone or comm.order.lost is not None):
            comm._drain()
            comm.order.exchange("close", f"AllScan.close, of shape {self.shape}")
            for offset in self._workspace.offsets:
                comm.memory.free(offset)
            if self._rails is not None:
                self._rails.release()
            for channel in self._channels if self._rails is None else ():
                comm.memory.release(channel.info)
            comm.collectives.discard(self)
        self._closed = True

    def __enter__(self) -> AllScan:
        return self

    def __exit__(self, error, *_) -> None:
        if error is None:  # else the other ranks may never come: the memory stays with the communicator
            self.close()

    @property
    def epochs(self) -> tuple[int, int]:
        """Scans that this rank has made, forward and reverse, counted on the device. Waits for them. 0 on one rank."""
        self.comm.streams.synchronize()
        forward, reverse = (int(channel.epoch[0]) for channel in self._channels)
        return forward, reverse

    def channel(
        self, reverse: bool = False, *, ticket: Tensor | None = None, adjoint_of: Tensor | None = None
    ) -> Channel:
        """The channel of one direction, for kernels of your own: see ``allscan.device``.

        For a kernel that has a backward pass of its own: ``ticket``, int64 [1] on the device, takes the number of this
        launch; given as ``adjoint_of`` to the launch of the backward, in the other direction, it travels with that
        one's tiles, so that ranks that run the backward of different calls find out at once.
        Raises ValueError where the algorithm is not a chain, for both of them, for a ticket that is none, and for
        ``adjoint_of`` in the direction of its forward launch; RuntimeError if this is closed.
        """
        if self._closed:
            raise RuntimeError("this AllScan is closed")
        if self._rails is not None:
            raise ValueError(f'an AllScan with algorithm="{self.algorithm}" has no channel for kernels of your own')
        if ticket is not None and adjoint_of is not None:
            raise ValueError("a launch has a ticket or is the adjoint of one, not both")
        given = adjoint_of if ticket is None else ticket
        if given is not None and not isinstance(given, Tensor):
            raise TypeError(f"a ticket must be a tensor, such as AllScan.ticket(), got {type(given).__name__}")
        if given is not None and (given.dtype != torch.int64 or given.device != self.comm.device or not given.numel()):
            wanted = f"int64 [1] on {self.comm.device}"
            raise ValueError(f"a ticket must be {wanted}, got {given.dtype} {list(given.shape)} on {given.device}")
        if ticket is not None:
            setattr(ticket, _DIRECTION, bool(reverse))
        elif getattr(adjoint_of, _DIRECTION, None) is bool(reverse):
            raise ValueError(
                f"adjoint_of belongs to a launch with reverse={bool(reverse)}, whose adjoint goes the other way: "
                f"channel(reverse={not reverse}, adjoint_of=ticket)"
            )
        return self.channel_of_scan(reverse, ticket, adjoint_of)

    def channel_of_scan(self, reverse: bool, ticket: Tensor | None = None, adjoint_of: Tensor | None = None) -> Channel:
        """:meth:`channel`, for :meth:`scan` only, whatever the algorithm."""
        if ticket is not None:
            return _with_ticket(self._channels[reverse], ticket)
        if adjoint_of is not None:
            return _with_ticket(self._adjoint_channels[reverse], adjoint_of)
        return self._channels[reverse]

    def ticket(self) -> Tensor:
        """Room for a ticket: see :meth:`channel`."""
        return new_tickets(self.comm, 1)

    def reset(self) -> None:
        """As if no scan had been made. For Communicator.resync(), while no kernel of any rank uses the channels."""
        if self._rails is not None:
            self._rails.reset()
        elif self.comm.size > 1:
            for channel in self._channels:
                reset(channel)
        self.backwards, self.dropped = 0, [False, False]

    @dynamo_disabled
    def launch(self, kernel: Any, grid: tuple[int, ...] | Callable, *args: Any, **options: Any) -> None:
        """Launch ``kernel[grid](*args)``, a ``triton.jit`` function that uses a channel of this AllScan.

        grid: one to three numbers of programs, or a function of the kernel's constants that returns them, as for
        Triton. Its programs handle every tile exactly once. Where they do not, on CPU ranks and in debug mode,
        AllScanOutOfStep; on one rank no tiles are counted, and nothing is found.

        Checks the communicator, orders the launch behind earlier ones and links NVSHMEM if a link needs it. In a CUDA
        graph's capture, and for its replays, the order is the caller's: one stream for all that uses a communicator.
        num_warps is by default what the tile fills with 16 bytes a thread, at most 4. A kernel that waits should have
        at most ``comm.max_ctas`` programs: see ``allscan.device``.
        Raises TypeError or ValueError for another grid, and for channels of another AllScan.
        """
        if self._rails is not None:
            raise ValueError(f'kernels of your own need algorithm="chain", this AllScan has "{self.algorithm}"')
        channels = _channels_in((*args, *options.values()))
        reverse = (
            self.comm.size > 1
            and bool(channels)
            and all(isinstance(x, Channel) and x.info is self._channels[1].info for x in channels)
        )
        options.setdefault("num_warps", max(1, min(4, math.prod(self.tile) // 128)))
        with self.comm.call(reverse, "AllScan.launch()", args):
            _check_grid(grid)
            for channel in channels:
                _check_channel(channel)
                if all(channel.info is not own.info for own in self._channels):
                    raise ValueError("channel must be of the AllScan whose launch() is called")
            linked = self._linked(kernel)
            self._before_launch(kernel, reverse)
            self._after_launch(linked[grid](*args, **options))
            if not self.comm.streams.cuda or (self.comm.debug and not self.comm.streams.capturing()):
                self._check_tiles(channels, f"{_name_of(kernel)} with a grid of {grid}")

    def _check_tiles(self, channels: list[Channel], what: str) -> None:
        """Behind a launch of ``what``: raise AllScanOutOfStep unless it has handled all tiles equally often. Waits."""
        self.comm.streams.synchronize()
        self.comm.check()
        for channel in channels:
            epochs = channel.epoch.tolist()
            usual = max(epochs, key=epochs.count)
            others = {tile: epoch for tile, epoch in enumerate(epochs) if epoch != usual}
            if others:
                some = ", ".join(f"tile {tile} {epoch}" for tile, epoch in [*others.items()][:4])
                raise self.comm.order.out_of_step(
                    f"rank {self.comm.rank}: {what} has not handled each of the {self.spec.num_tiles} tiles exactly "
                    f"once. They have had {usual} launches so far, but {some}{', ...' * (len(others) > 4)}. {REMEDY}."
                )

    def _linked(self, kernel: Any) -> Any:
        """``kernel``, with NVSHMEM if a link needs it."""
        puts = any(PUT in (c.SEND, c.RECV) for c in self._channels) if self._rails is None else self._rails.puts
        return with_nvshmem(kernel) if puts and self.comm.streams.cuda else kernel

    def _before_launch(self, kernel: Any, reverse: bool) -> None:
        if self._closed:
            raise RuntimeError("this AllScan is closed")
        self.comm._before_launch(self._description, kernel, reverse)
        if self.dropped[reverse]:
            self._look_for_backwards(reverse)

    def _after_launch(self, compiled: Any) -> None:
        if self.comm.streams.cuda:
            prefer_shared_memory_carveout(compiled)
        else:
            self.comm.check()  # the interpreter has run the kernel by now

    def _description(self, kernel, reverse) -> str:
        name = _name_of(kernel)
        if name in ("scan_kernel", "shift_rows_kernel", "transition_kernel", "rails_kernel"):
            name = "scan"  # ranks may mix them
        return f"{name} over {self.shape}" + (", reverse" if reverse else "")

    def _look_for_backwards(self, reverse: bool) -> None:
        """A call in this direction had no backward on this rank. Raise if the rank that sends to this one in the
        backward direction has run its own; return once that one is seen to have begun its next call instead.

        Waits for that rank's next launch: validate with torch.no_grad(), which leaves nothing to look for.
        """
        self.dropped[reverse] = False
        there, back = self._channels[reverse], self._channels[not reverse]
        first = back.RECV == NONE if self._rails is None else self._rails.is_first(not reverse)
        if first or self.comm.streams.capturing():
            return  # this rank's backward waits for nobody, so the others wait for it
        deadline = time.monotonic() + self.comm.timeout
        if self.comm.streams.cuda:
            torch.cuda.current_stream(self.comm.device).synchronize()
        launched, epoch = self.comm.streams.peek(there.epoch[:1])[0], self.comm.streams.peek(back.epoch[:1])[0]
        while time.monotonic() < deadline and launched >= 0 <= epoch:
            if self._rails is None:
                begun = max(self.comm.streams.peek(there.freed[: self.depth])) >= launched
                arrived = self.comm.streams.peek(back.arrived[:: self.num_tiles])
                ran = any((word & 0xFFFFFFFF) == epoch + 1 for word in arrived)
            else:
                begun = self._rails.have_begun(reverse, launched)
                ran = self._rails.have_run(not reverse, epoch)
            if ran:
                raise RuntimeError(
                    "a call with gradients had no backward on this rank, but on another one: this rank has not used "
                    "what the call returned, and its gradients since then lack what it gave to the others. Use the "
                    f"result on every rank, 0 * result.sum() if need be; or torch.no_grad() on all. {REMEDY}."
                )
            if begun:
                return
            time.sleep(1e-3)

    @overload
    def scan(
        self,
        state: Tensor,
        decay: Tensor | float | None = None,
        *,
        transition: Tensor | None = None,
        adjoint: bool = False,
        initial_state: Tensor | None = None,
        reverse: bool = False,
        out: Tensor | None = None,
        channel: Channel | None = None,
        async_op: Literal[False] = False,
    ) -> Tensor: ...

    @overload
    def scan(
        self,
        state: Tensor,
        decay: Tensor | float | None = None,
        *,
        transition: Tensor | None = None,
        adjoint: bool = False,
        initial_state: Tensor | None = None,
        reverse: bool = False,
        out: Tensor | None = None,
        channel: Channel | None = None,
        async_op: Literal[True],
    ) -> Work: ...

    @dynamo_disabled
    def scan(
        self,
        state: Tensor,
        decay: Tensor | float | None = None,
        *,
        transition: Tensor | None = None,
        adjoint: bool = False,
        initial_state: Tensor | None = None,
        reverse: bool = False,
        out: Tensor | None = None,
        channel: Channel | None = None,
        async_op: bool = False,
    ) -> Tensor | Work:
        """The exclusive scan of this rank's ``state``; not differentiable, see :func:`allscan` for that.

        state: float32 tensor of this AllScan's shape, on the communicator's device.
        decay: None (1), a number, or a float32 tensor [..., K], [...] or of no dimension, in [0, 1].
        transition: instead of a decay, float32 [..., K, K]: R_{p+1} = transition_p R_p + state_p; with ``adjoint`` the
            transposed one. For an AllScan whose tiles are whole columns, see ``allscan.base.tiling.transition_tile``.
        initial_state: like state, or None (0); used by the first rank in the direction of the scan.
        out: like state, contiguous; may be ``state`` itself, but share no memory with it or another argument otherwise.
        channel: what ``self.channel(reverse, ...)`` has returned, to be used instead of ``self.channel(reverse)``.
        async_op: return a :class:`Work` at once; the scan runs on the communicator's own stream, beside what is
            launched next on the current one; in a CUDA graph's capture on the current one.
        Returns out, or a new tensor. Runs on torch's current stream; the host does not wait.
        """
        inputs = ScanInputs(state, decay, transition, initial_state, out)
        with self.comm.call(reverse, "AllScan.scan()", inputs):
            ticket, of_adjoint = None, False
            if channel is not None:
                _check_channel(channel)
                if channel.info is not self._channels[reverse].info:
                    raise ValueError("channel must be of this AllScan and of the direction of the scan")
                ticket, of_adjoint = channel.ticket, channel.ADJOINT.value
            prepared = self.prepare(call_key(inputs), inputs, bool(reverse), bool(adjoint), of_adjoint)
            return prepared.run(inputs, async_op, ticket)

    def _check(self, inputs: ScanInputs) -> None:
        """Raise TypeError or ValueError for what a scan cannot take."""
        state, decay, transition, initial_state, out = inputs
        check_tensor("state", state, self.shape, self.comm.device)
        decay_target(decay, self.shape, self.comm.device)
        if initial_state is not None:
            check_tensor("initial_state", initial_state, self.shape, self.comm.device)
        if transition is not None:
            check_transition(transition, decay, self.shape, self.comm.device)
            if self._rails is not None:
                raise ValueError(f'transitions need algorithm="chain", this AllScan has "{self.algorithm}"')
            if self.tile[0] < self.K or min(self.tile) < 16:
                wanted = transition_tile(self.K)
                raise ValueError(f"a scan with transitions needs tiles such as {wanted}, this AllScan has {self.tile}")
        if out is not None:
            check_tensor("out", out, self.shape, self.comm.device)

    def prepare(
        self, key: tuple, inputs: ScanInputs, reverse: bool, adjoint: bool = False, of_adjoint: bool = False
    ) -> PreparedScan:
        """What runs scans of inputs with this :func:`call_key`, after all checks. of_adjoint: a launch that belongs to
        the forward launch of its ticket."""
        known = key, reverse, adjoint, of_adjoint
        found = self._prepared.get(known)
        if found is None:
            self._check(inputs)
            kind, whole = self._kind(inputs, reverse, adjoint)
            launch = self._launches.get((kind, of_adjoint))
            if launch is None:
                launch = self._launches[kind, of_adjoint] = self._make_launch(*kind)
            one_hop = self._one_hop(inputs.decay)
            found = self._prepared[known] = PreparedScan(self, launch, whole, one_hop, reverse, of_adjoint)
        return found

    def _one_hop(self, decay: Any) -> bool | Shift:
        """Whether a decay that is no tensor lets nothing pass; a Shift as it is."""
        if isinstance(decay, Shift):
            return decay
        return self._rails is None and isinstance(decay, numbers.Real) and decay == 0

    def _kind(self, inputs: ScanInputs, reverse: bool, adjoint: bool) -> tuple[tuple, bool]:
        """(arguments of _make_launch, whether the decay has all rows that a kernel reads)."""
        _, decay, transition, initial_state, _ = inputs
        one_hop = self._one_hop(decay)
        whole = isinstance(decay, Tensor) and decay.shape == self._rows
        if transition is not None:
            strides = (1, self.K) if adjoint else (self.K, 1)
        else:
            strides = decay_rows(None if one_hop else decay, self.shape, self.comm.device)[1]
        has_decay = decay is not None and not one_hop
        if isinstance(one_hop, Shift) and adjoint:
            one_hop = Shift(-one_hop.rows)
        return (transition is not None, has_decay, strides, one_hop, initial_state is not None, reverse), whole

    def launch_prepared(self, prepared: PreparedScan, tensors: tuple, addresses: list[int]) -> None:
        """Launch a scan's kernel with ``tensors``, the last of which is the ticket, at ``addresses``."""
        launch, reverse, adjoint = prepared.launch, prepared.reverse, prepared.of_adjoint
        self._before_launch(launch.kernel, reverse)
        if self._rails is None and launch.ready and launchable(addresses):
            before, behind = self._addresses[adjoint][reverse]
            ticket = addresses.pop()
            launch.at((*addresses, (*before, ticket, *behind)))
        else:
            self._with_tensors(launch, reverse, adjoint, *tensors)

    def _with_channel(self, reverse: bool, adjoint: bool, addresses: list[int]) -> tuple:
        """``addresses``, as :class:`Launch` takes them; the last one is the ticket's."""
        before, behind = self._addresses[adjoint][reverse]
        return (*addresses[:-1], (*before, addresses[-1], *behind))

    def _with_tensors(self, launch: Any, reverse: bool, adjoint: bool, *tensors: Tensor) -> None:
        """The same with tensors, in a launch."""
        channel = (self._adjoint_channels if adjoint else self._channels)[reverse]
        self._after_launch(launch(*tensors[:-1], _with_ticket(channel, tensors[-1])))

    def record(
        self,
        plan: Plan,
        state: Buffer,
        out: Buffer,
        ticket: Buffer,
        reverse: bool,
        *,
        decay: Buffer | None = None,
        transition: Buffer | None = None,
    ) -> None:
        """Record the scan of ``state`` [..., K, V] by a decay [..., K] or a transition [..., K, K], by the decay 0 if
        there is neither, in a plan whose runs are in a call of the communicator. ``ticket``: as for :meth:`channel`,
        with ``reverse`` the adjoint's."""
        if self._rails is not None:
            raise ValueError("plans need a chain")
        factor = decay or transition or state
        strides = (0, 0) if factor is state else (self.K, 1)
        launch = self._make_launch(transition is not None, decay is not None, strides, factor is state, False)
        plan.step(
            launch,
            (state, factor, state, out, ticket),
            partial(self._with_tensors, launch, reverse, reverse),
            partial(self._with_channel, reverse, reverse),
            partial(self._before_launch, launch.kernel, reverse),
        )

    def _make_launch(
        self,
        dense: bool,
        has_decay: bool,
        strides: tuple[int, int],
        one_hop: bool | Shift,
        has_initial: bool,
        reverse: bool = False,
    ) -> Any:
        """A Launch of a scan, ``dense`` with transitions. strides: of decays, or of rows and columns of transitions."""
        fixed = dict(K=self.K, V=self.V, HAS_INITIAL=has_initial)
        if self._rails is not None:
            return self._rails.launch(
                self._linked(rails_kernel),
                reverse,
                min(self.num_tiles, self._workspace.max_ctas),
                stride_g=strides[0],
                stride_k=strides[1],
                **fixed,
                HAS_DECAY=has_decay,
            )
        num_warps = max(1, min(8, math.prod(self.tile) // 512))
        if isinstance(one_hop, Shift):
            return Launch(self._linked(shift_rows_kernel), (1,), rows=one_hop.rows, **fixed, num_warps=num_warps)
        if not dense:
            return Launch(
                self._linked(scan_kernel),
                (min(self.num_tiles, self.max_ctas),),
                stride_g=strides[0],
                stride_k=strides[1],
                **fixed,
                HAS_DECAY=has_decay,
                ONE_HOP=one_hop,
                num_warps=num_warps,
            )
        tiles = -(-self.num_tiles // self.max_ctas)  # of a program
        return Launch(
            self._linked(transition_kernel),
            (-(-self.num_tiles // tiles),),
            stride_i=strides[0],
            stride_j=strides[1],
            **fixed,
            **transition_blocks(self.tile[0]),
        )

    def there_and_back(
        self,
        there: Tensor,
        back: Tensor,
        *,
        decays: tuple = (None, None),
        transitions: tuple = (None, None),
        adjoint: bool = False,
        initial_state: Tensor | None = None,
        channels: tuple[Channel, Channel] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The scan of ``there`` over the ranks, then that of ``back`` from the last rank to the first, which begins
        with what the first one leaves behind the last rank: both halves of the zigzag layout.

            R_0 = initial_state (or 0),   R_{p+1} = decay_p R_p + there_p,
            E_{P-1} = R_P,                E_{p-1} = decay'_p E_p + back_p

        decays, transitions: of the two, as for :meth:`scan`. adjoint: the transposed transitions. channels: of the two.
        Returns (R_p, E_p). The adjoint is the same with the two exchanged. Neither waits for itself on another rank: a
        rank's scan there waits for scans there only, and its scan back, launched behind it, for scans there and for
        those back of the ranks behind it.
        """
        channels = channels or (self.channel_of_scan(False), self.channel_of_scan(True))
        options = [
            dict(decay=d, transition=t, adjoint=adjoint, channel=c)
            for d, t, c in zip(decays, transitions, channels, strict=True)
        ]
        prev = self.scan(there, initial_state=initial_state, **options[0])
        handed = None
        if self.comm.rank == self.comm.size - 1:
            handed = leaves(there, decays[0], transitions[0], prev, adjoint)
        return prev, self.scan(back, initial_state=handed, reverse=True, **options[1])


def _name_of(kernel: Any) -> str:
    return getattr(kernel, "__name__", None) or kernel.fn.__name__


def _channels_in(given: tuple) -> list:
    """Of what a kernel is given, tuples included; also the method that makes one, see :func:`_check_channel`."""
    found: list = []
    for x in given:
        if isinstance(x, Channel) or getattr(x, "__func__", None) is AllScan.channel:
            found.append(x)
        elif isinstance(x, tuple):
            found += _channels_in(x)
    return found


def _check_channel(channel: Any) -> None:
    if not isinstance(channel, Channel):
        kind = "the method itself: call it" if callable(channel) else type(channel).__name__
        raise TypeError(f"a channel is what AllScan.channel() returns, got {kind}")


def _check_grid(grid: Any) -> None:
    """Raise TypeError or ValueError unless Triton takes it."""
    if callable(grid):
        return
    if not isinstance(grid, tuple) or not 1 <= len(grid) <= 3:
        raise TypeError(f"grid must be a tuple of one to three integers, such as (scan.num_tiles,), got {grid!r}")
    for n in grid:
        integer("a size of grid", n)


class PreparedScan:
    """Scans of one variant: their inputs were checked, and their kernel is known. Made by :meth:`AllScan.prepare`."""

    __slots__ = "scan", "launch", "reverse", "of_adjoint", "_whole", "_one_hop", "_ticket", "backward"

    def __init__(
        self, scan: AllScan, launch: Any, whole: bool, one_hop: bool | Shift, reverse: bool, of_adjoint: bool
    ) -> None:
        self.scan, self.launch, self._whole, self._one_hop = scan, launch, whole, one_hop
        self.reverse, self.of_adjoint = reverse, of_adjoint
        self._ticket = scan.channel_of_scan(reverse).ticket
        self.backward: PreparedScan | None = None  # of allscan()

    def run(self, inputs: ScanInputs, async_op: bool = False, ticket: Tensor | None = None) -> Any:
        """:meth:`AllScan.scan`, in a call of the communicator. ticket: as for :meth:`AllScan.channel`; with
        ``of_adjoint`` that of the forward launch."""
        comm = self.scan.comm
        state, decay, transition, initial_state, out = inputs
        state = plain(state)
        given = state if initial_state is None else plain(initial_state)
        factor = state
        if transition is not None:
            factor = plain(transition)
        elif self._whole:
            factor = plain(decay)
        elif decay is not None and not self._one_hop:
            factor = decay_rows(decay, self.scan.shape, comm.device)[0]
        if written := out is not None:
            if not out.is_contiguous() or out.is_neg():
                raise ValueError("out must be contiguous, and no view of a negative")
        else:
            out = torch.empty_like(state)
        tensors = state, factor, given, out, self._ticket if ticket is None else ticket
        addresses = [x.data_ptr() for x in tensors]
        if written:
            # a scan may read its state from where it writes the result
            _check_apart(tensors, addresses, addresses[0] == addresses[3] and transition is None)
            if not out.is_inference():
                increment_version(out)  # so that torch knows of the write
        if not async_op:
            self.scan.launch_prepared(self, tensors, addresses)
            if comm.debug:
                comm.look_for_nan("the scan", result=out)
            return out
        with comm.streams.beside() as beside:
            self.scan.launch_prepared(self, tensors, addresses)
        if comm.debug:
            beside.wait(tensors)
            comm.look_for_nan("the scan", result=out)
        return Work(comm, out, beside, tensors)  # the ticket's memory is used there, too


def _with_ticket(channel: Channel, ticket: Tensor) -> Channel:
    return Channel._make((*channel[:_TICKET], ticket, *channel[_TICKET + 1 :]))  # a third of _replace's time


def check_out(inputs: ScanInputs) -> None:
    """Raise ValueError unless a scan with these inputs, which are right, may write to ``out``: what AllScan.scan looks
    at in each call, before a first call asks the others."""
    state, decay, transition, initial_state, out = inputs
    if not out.is_contiguous() or out.is_neg():
        raise ValueError("out must be contiguous, and no view of a negative")
    state = plain(state)
    factor = state if transition is None else plain(transition)
    if isinstance(decay, Tensor):
        factor = decay_rows(decay, state.shape, state.device)[0]
    tensors = state, factor, state if initial_state is None else plain(initial_state), out
    addresses = [x.data_ptr() for x in tensors]
    _check_apart(tensors, addresses, addresses[0] == addresses[3] and transition is None)


def _check_apart(tensors: tuple, addresses: list[int], in_place: bool) -> None:
    """Raise ValueError if a kernel would read what another of its programs has written: ``tensors`` are (state, decay
    or transition or state, initial_state or state, out, ...), at ``addresses``. in_place: the state may be there."""
    state, begin = tensors[0], addresses[3]
    end = begin + tensors[3].nbytes
    for i in range(3):
        x, address = tensors[i], addresses[i]
        if address < end and begin < address + x.nbytes and not (in_place and x is state):
            name = "state" if x is state else ("", "decay or transition", "initial_state")[i]
            raise ValueError(
                f"out shares memory with {name}: give another tensor (or state itself, without a transition)"
            )


class Work:
    """A scan under way, as ``async_op=True`` returns it.

    What the scan reads must not be written before :meth:`wait`. A Work that goes without having been waited for only
    gives its memory back behind the scan (in a CUDA graph's capture, with the next call behind that): this rank has
    taken part all the same. With gradients its result then counts
    as ignored, see :func:`allscan.allscan`.
    """

    def __init__(self, comm: Communicator, result: Tensor, beside: Beside, read: tuple) -> None:
        self._comm, self.result, self._beside, self._read = comm, result, beside, read

    def of(self, result: Tensor) -> Work:
        """This, with ``result`` in place of the tensor that the scan writes."""
        self.result = result
        return self

    def wait(self) -> Tensor:
        """The result. What is launched on the current stream from here on has it; the host does not wait. May be called
        again. Raises AllScanTimeout or AllScanOutOfStep if the scan is known to have failed; as long as it is not, the
        next call does, as for a scan that was not asynchronous. RuntimeError in a CUDA graph's capture, which goes on,
        for a scan that was begun before: a graph cannot wait for it."""
        self._beside.wait(self._read)
        self._read = ()
        self._comm.check()
        return self.result

    def __del__(self) -> None:
        if self._read:
            self._beside.release(self._read)


def leaves(state: Tensor, decay, transition, prev: Tensor, adjoint: bool = False) -> Tensor:
    """What leaves a rank that ``prev`` enters, differentiable: decay * prev + state; of a decay that is 0, state."""
    if isinstance(decay, Shift):
        rows = -decay.rows if adjoint else decay.rows
        return state + F.pad(prev, (0, 0, -rows, rows))  # negative: rows that are left out
    if transition is not None:  # float64, since torch may multiply float32 as TF32
        factor = transition.mT if adjoint else transition
        return (factor.double() @ prev.double() + state).float()
    if decay is None:
        return prev + state
    if not isinstance(decay, Tensor):
        return state if decay == 0 else decay * prev + state
    factor = decay[(...,) + (None,) * (prev.ndim - decay.ndim)] if decay.ndim else decay
    return factor * torch.where(factor == 0, prev.nan_to_num(0.0, 0.0, 0.0), prev) + state
