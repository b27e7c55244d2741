"""AllScan: All-Scan with its memory and channels allocated once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from ..base.checks import ScanInputs, call_key, integer
from ..base.errors import REMEDY, DeferredError
from ..base.tiling import next_power_of_2, scan_tile
from ..comm.communicator import Communicator, check_communicator
from ..comm.heap import outside_inference_mode
from ..launch.compiled_kernel import dynamo_disabled
from ..shmem_kernels.channel import Channel
from ..shmem_kernels.links import SENTINEL, SIGNAL
from .fwd_epochs import new_fwd_epochs
from .launcher import Launcher, name_of
from .rails_links import Rails
from .work import Work
from .workspace import MAKING, PROTOCOLS, Chain, Spec, make_workspace, workspace_bytes

_numbers = itertools.count(1)
_DIRECTION = "_allscan_reverse"  # attribute of a forward epoch: of the launch that it was given to


def _plan(
    comm: Communicator, shape: Any, depth: Any, protocol: Any, tile: Any, max_ctas: Any, algorithm: Any
) -> tuple[Spec, Chain | Rails]:
    """What an AllScan with these arguments is. Raises TypeError, ValueError or RuntimeError for wrong ones."""
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
        raise ValueError(f"tile must be two powers of two, got {tile}: kernels mask what lies beyond K and V")
    algorithm = comm.topology.algorithm_for(math.prod(shape) * 4, algorithm)
    spec = Spec(shape, tile, depth, protocol, algorithm)
    if algorithm != "chain":
        return spec, Rails(comm, spec)
    return spec, Chain(comm.line, spec, comm.topology.mapped_links)


class AllScan:
    """All-Scan over the ranks of a communicator, with its memory and channels allocated once.

        R_0 = initial_state (or 0),   R_{p+1} = decay_p * R_p + state_p,   rank p gets R_p

    reverse=True numbers the ranks from the last. Where a decay is 0 nothing passes, not even Inf or NaN; -0.0 may
    arrive as +0.0. In a chain each rank receives one state, whatever the number of ranks (ZeCO, arXiv 2507.01004,
    section 3); with rails about two over NVLink, and a part of one over the network.

    Collective over the group: all ranks construct it alike, at the same place in their order of calls, and close it
    alike: ``close``, or ``with``.

    Attributes: comm, shape, depth, protocol, algorithm; tile and num_tiles, as chosen.

    Args:
        comm: Communicator.
        shape: [..., K, V] of the float32 state, the same on every rank.
        depth: how many scans a rank may run ahead of the next one; slots an inbox has for each tile.
        protocol: "sentinel" (mapped peers: stores whose words announce themselves), "signal" (mapped peers: stores,
            then a released signal), "put" (NVSHMEM put with signal), "auto": sentinel where peers are mapped, else put.
        tile: (BK, BV) rows and columns of a tile, powers of two; by default chosen for speed with ``comm.max_ctas``
            programs. Kernels that need whole rows or columns at a time choose themselves.
        max_ctas: most programs of a launch; default ``comm.max_ctas``.
        algorithm: "chain", "rails" or "recursive_doubling" (docs/rails.md), for several nodes, or "auto", a chain;
            default ``comm.algorithm``. Kernels of one's own (``channel``, ``launch``) and transitions need a chain.

    Raises:
        ValueError: arguments; ranks that differ.
        TypeError: arguments of another type.
        RuntimeError: the protocol is not possible.
        MemoryError: the arena is full. Each on every rank, before anything is launched.

    Example:
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
        deferred = None
        try:
            spec, layout = _plan(comm, shape, depth, protocol, tile, self._max_ctas, algorithm)
        except (TypeError, ValueError, RuntimeError) as error:
            deferred = DeferredError(error)
        if deferred is not None:
            comm.order.agree(None, deferred, MAKING)  # raises it; the other ranks hear of it
        workspace = make_workspace(comm, spec, layout, self._max_ctas)
        self._offsets, self._layout = workspace.offsets, layout
        self.spec = spec
        self.shape, self.tile, self.depth, self.protocol, self.algorithm = spec
        self.K, self.V = self.shape[-2:]
        self.num_tiles = spec.num_tiles
        rails = layout if isinstance(layout, Rails) else None
        self.launcher = Launcher(comm, spec, workspace, rails, self._max_ctas)
        self.number = next(_numbers)
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
        asks no other rank.

        Args:
            comm, shape, depth, protocol, tile, max_ctas, algorithm: those of ``AllScan``.

        Returns:
            Bytes.

        Raises:
            TypeError, ValueError: those of ``AllScan`` for the same arguments.

        Example:
            >>> allscan.AllScan.size_hint(comm, (16, 128, 128))                   # a state of 1 MiB: about 6 MiB
        """
        check_communicator(comm)
        ctas = comm.max_ctas if max_ctas is None else max_ctas
        _, layout = _plan(comm, shape, depth, protocol, tile, ctas, algorithm)
        return workspace_bytes(comm, layout)

    @property
    def max_ctas(self) -> int:
        """Most programs of a launch; fixed."""
        return self._max_ctas

    @property
    def workspace_bytes(self) -> int:
        """Symmetric memory of both directions on this rank, in bytes: see ``size_hint``."""
        return workspace_bytes(self.comm, self._layout)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self.launcher.closed

    def close(self) -> None:
        """Give the symmetric memory back. Collective: every rank closes it at the same place in its order of calls.

        Waits for this rank's kernels and for the other ranks. CUDA graphs that hold it must not be replayed any more.
        Where the communicator is broken or desynchronized the memory stays taken until that is closed.

        Raises:
            AllScanOutOfStep: if the ranks have made different numbers of calls.
            RuntimeError: if one does not come.

        Example:
            >>> with allscan.AllScan(comm, (16, 128, 128)) as scan:               # which closes it at its end
            ...     prev = scan.scan(state)
        """
        comm, rails = self.comm, self.launcher.rails
        if self.launcher.closed:
            return
        if comm.size > 1 and not (comm.closed or comm.broken or comm.gone or comm.order.lost is not None):
            comm._drain()
            comm.order.exchange("close", f"AllScan.close, of shape {self.shape}")
            comm.memory.free(*self._offsets)
            if rails is not None:
                rails.release()
            else:
                comm.memory.release(*(channel.info for channel in self.launcher.channels))
            comm.collectives.discard(self)
        self.launcher.closed = True

    def __enter__(self) -> AllScan:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:  # else the other ranks may never come: the memory stays with the communicator
            self.close()

    @property
    def epochs(self) -> tuple[int, int]:
        """Scans that this rank has made, forward and reverse, counted on the device. Waits for them. 0 on one rank."""
        self.comm.streams.synchronize()
        forward, reverse = (int(channel.epoch[0]) for channel in self.launcher.channels)
        return forward, reverse

    def channel(
        self, reverse: bool = False, *, fwd_epoch: Tensor | None = None, adjoint_of: Tensor | None = None
    ) -> Channel:
        """The channel of one direction, for kernels of your own: see ``allscan.device``.

        For a kernel that has a backward pass of its own: ``fwd_epoch``, int64 [1] on the device, takes the number of
        this launch; given as ``adjoint_of`` to the launch of the backward, in the other direction, it goes with that
        one's tiles, so that ranks that run the backward of different calls find out at once.

        Args:
            reverse: the direction: from the last rank to the first.
            fwd_epoch: int64 [1] on the device, see ``AllScan.fwd_epoch``; filled by the launch.
            adjoint_of: what a launch in the other direction has filled.

        Returns:
            What the kernel takes as its argument ``channel``: ``allscan.device.Channel``. For one launch or many.

        Raises:
            TypeError: for a forward epoch that is no tensor.
            ValueError: where the algorithm is not a chain, for both of them, for a forward epoch that is none, and for
                ``adjoint_of`` in the direction of its forward launch.
            RuntimeError: if this is closed.

        Example:
            >>> fwd_epoch = scan.fwd_epoch()
            >>> grid = (min(scan.num_tiles, comm.max_ctas),)
            >>> scan.launch(kernel, grid, x, out, channel=scan.channel(fwd_epoch=fwd_epoch))
            >>> back = scan.channel(reverse=True, adjoint_of=fwd_epoch)           # of the backward's launch
        """
        if self.launcher.closed:
            raise RuntimeError("this AllScan is closed")
        if self.launcher.rails is not None:
            raise ValueError(f'an AllScan with algorithm="{self.algorithm}" has no channel for kernels of your own')
        if fwd_epoch is not None and adjoint_of is not None:
            raise ValueError("a launch has a forward epoch or is the adjoint of one, not both")
        epoch = adjoint_of if fwd_epoch is None else fwd_epoch
        if epoch is not None and not isinstance(epoch, Tensor):
            raise TypeError(
                f"a forward epoch must be a tensor, such as AllScan.fwd_epoch(), got {type(epoch).__name__}"
            )
        if epoch is not None and (epoch.dtype != torch.int64 or epoch.device != self.comm.device or not epoch.numel()):
            wanted = f"int64 [1] on {self.comm.device}"
            raise ValueError(
                f"a forward epoch must be {wanted}, got {epoch.dtype} {list(epoch.shape)} on {epoch.device}"
            )
        if fwd_epoch is not None:
            setattr(fwd_epoch, _DIRECTION, bool(reverse))
        elif getattr(adjoint_of, _DIRECTION, None) is bool(reverse):
            raise ValueError(
                f"adjoint_of belongs to a launch with reverse={bool(reverse)}, whose adjoint goes the other way: "
                f"channel(reverse={not reverse}, adjoint_of=forward epoch)"
            )
        return self.launcher.channel(reverse, fwd_epoch, adjoint_of)

    def fwd_epoch(self) -> Tensor:
        """Memory for a forward epoch: see ``channel``."""
        return new_fwd_epochs(self.comm, 1)

    def _reset(self) -> None:
        """As if no scan had been made. For Communicator.resync(), while no kernel of any rank uses the channels."""
        self.launcher.reset()

    @dynamo_disabled
    def launch(self, kernel: Any, grid: tuple[int, ...] | Callable[..., Any], *args: Any, **options: Any) -> None:
        """Launch ``kernel[grid](*args)``, a ``triton.jit`` function that uses a channel of this AllScan.

        Its programs handle every tile exactly once, and one of them begins with tile 0 (see ``device.begin``). Where
        they do not, AllScanOutOfStep: of tiles on CPU ranks and in debug mode, of tile 0 on CPU ranks. On one rank
        none are counted.

        Checks the communicator, orders the launch behind earlier ones and links NVSHMEM if a link needs it. In a CUDA
        graph's capture, and for its replays, the order is the caller's: one stream for all that uses a communicator.
        num_warps is by default BK * BV / 128, at least 1 and at most 4. A kernel that waits should have
        at most ``comm.max_ctas`` programs: see ``allscan.device``.

        Args:
            kernel: a ``triton.jit`` function.
            grid: one to three numbers of programs, or a function of the kernel's constants that returns them, as for
                Triton.
            *args: of the kernel, among them a channel of this AllScan.
            **options: the kernel's constants, and Triton's launch options.

        Raises:
            TypeError: for another grid, and for an AllScan or its method ``channel`` in place of what that returns.
            ValueError: for another grid, and for channels of another AllScan.
            RuntimeError: if this, or the AllScan of a channel, is closed.
            AllScanError: what ``Communicator.check`` raises.

        Example:
            >>> grid = (min(scan.num_tiles, comm.max_ctas),)
            >>> scan.launch(kernel, grid, x, out, scan.channel(), num_warps=4)
        """
        if self.launcher.rails is not None:
            raise ValueError(f'kernels of your own need algorithm="chain", this AllScan has "{self.algorithm}"')
        channels = _channels_in((*args, *options.values()))
        reverse = (
            self.comm.size > 1
            and bool(channels)
            and all(isinstance(x, Channel) and x.info is self.launcher.channels[1].info for x in channels)
        )
        options.setdefault("num_warps", max(1, min(4, math.prod(self.tile) // 128)))
        with self.comm.call(reverse, "AllScan.launch()", args):
            _check_grid(grid)
            for channel in channels:
                _check_channel(channel)
                if all(channel.info is not own.info for own in self.launcher.channels):
                    raise ValueError("channel must be of the AllScan whose launch() is called")
            launcher, linked = self.launcher, self.launcher.linked(kernel)
            looks = not self.comm.streams.cuda or (self.comm.debug and not self.comm.streams.capturing())
            before = self._epochs_of(channels) if looks and self.comm.size > 1 else []
            launcher.before_launch(kernel, reverse)
            launcher.after_launch(linked[grid](*args, **options))
            if looks:
                self._check_tiles(channels, before, f"{name_of(kernel)} with a grid of {grid}")

    def _epochs_of(self, channels: list[Channel]) -> list[list[int]]:
        """How many launches each tile has had. Waits."""
        self.comm.streams.synchronize()
        return [channel.epoch.tolist() for channel in channels]

    def _check_tiles(self, channels: list[Channel], before: list[list[int]], what: str) -> None:
        """Behind a launch of ``what``: raise AllScanOutOfStep unless each tile has had one more launch than ``before``
        and, as far as a CPU rank sees it, the rank before has its credit. Waits."""
        after = self._epochs_of(channels)
        self.comm.check()
        for channel, epochs, earlier in zip(channels, after, before):
            usual = max(earlier) + 1
            others = {tile: epoch for tile, epoch in enumerate(epochs) if epoch != usual}
            if others:
                some = ", ".join(f"tile {tile} {epoch}" for tile, epoch in [*others.items()][:4])
                raise self.comm.order.desynchronized(
                    f"rank {self.comm.rank}: {what} has not handled each of the {self.spec.num_tiles} tiles exactly "
                    f"once. They have had {usual} launches so far, but {some}{', ...' * (len(others) > 4)}. {REMEDY}."
                )
            # the neighbour's word: GPUs have but its address, put links not even that
            mapped = isinstance(channel.prev_freed, Tensor) and channel.RECV in (SENTINEL, SIGNAL)
            if mapped and channel.prev_freed[0] < usual - 1:
                raise self.comm.order.desynchronized(
                    f"rank {self.comm.rank}: {what} has not called begin() with tile 0, which tells the previous "
                    f"rank that slots are free. Of a program with several tiles, begin() takes the lowest. {REMEDY}."
                )

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
        """The exclusive scan of this rank's ``state``; not differentiable, see ``allscan`` for that.

        Args:
            state: float32 tensor of this AllScan's shape, on the communicator's device.
            decay: None (1), a number, or a float32 tensor [..., K], [...] or of no dimension, in [0, 1].
            transition: instead of a decay, float32 [..., K, K]: R_{p+1} = transition_p R_p + state_p; with ``adjoint``
                the transposed one. For an AllScan whose tiles are whole columns, see
                ``allscan.base.tiling.transition_tile``.
            initial_state: like state, or None (0); used by the first rank in the direction of the scan.
            out: like state, contiguous; may be ``state`` itself, but share no memory with it or another argument
                otherwise.
            channel: what ``self.channel(reverse, ...)`` has returned, to be used instead of ``self.channel(reverse)``.
            async_op: return a ``Work`` at once; the scan runs on the communicator's own stream, overlapped with what is
                launched next on the current one; in a CUDA graph's capture on the current one.

        Returns:
            ``out``, or a new tensor. Runs on torch's current stream; the host does not wait. With ``async_op`` a
            ``Work``, whose ``wait()`` returns it.

        Raises:
            TypeError: for arguments of other types.
            ValueError: for other shapes, dtypes or devices, for ``out`` that shares memory with an argument, and for a
                channel of another AllScan or of the other direction.
            RuntimeError: if this AllScan or its communicator is closed.
            AllScanError: what ``Communicator.check`` raises.

        Example:
            >>> prev = scan.scan(state, 0.5)                                      # state: float32, of the scan's shape
            >>> work = scan.scan(state, decay, reverse=True, async_op=True)
            >>> after = work.wait()
        """
        inputs = ScanInputs(state, decay, transition, initial_state, out)
        with self.comm.call(reverse, "AllScan.scan()", inputs):
            fwd_epoch, of_adjoint = None, False
            if channel is not None:
                _check_channel(channel)
                if channel.info is not self.launcher.channels[reverse].info:
                    raise ValueError("channel must be of this AllScan and of the direction of the scan")
                fwd_epoch, of_adjoint = channel.fwd_epoch, channel.ADJOINT.value
            prepared = self.launcher.prepared_scan(call_key(inputs), inputs, bool(reverse), bool(adjoint), of_adjoint)
            found: Tensor | Work = prepared.run(inputs, async_op, fwd_epoch)
            return found


def _channels_in(arguments: tuple[object, ...]) -> list[Any]:
    """Of the arguments of a kernel, tuples included; also what is mistaken for one, see ``_check_channel``."""
    found: list[Any] = []
    for x in arguments:
        if isinstance(x, (Channel, AllScan)) or getattr(x, "__func__", None) is AllScan.channel:
            found.append(x)
        elif isinstance(x, tuple):
            found += _channels_in(x)
    return found


def _check_channel(channel: object) -> None:
    if not isinstance(channel, Channel):
        got = "the method itself: call it" if callable(channel) else type(channel).__name__
        raise TypeError(f"a channel is what AllScan.channel() returns, got {got}")


def _check_grid(grid: object) -> None:
    """Raise TypeError or ValueError unless Triton takes it."""
    if callable(grid):
        return
    if not isinstance(grid, tuple) or not 1 <= len(grid) <= 3:
        raise TypeError(f"grid must be a tuple of one to three integers, such as (scan.num_tiles,), got {grid!r}")
    for n in grid:
        integer("a size of grid", n)
