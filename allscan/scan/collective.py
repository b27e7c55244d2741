"""AllScan: All-Scan with its memory and channels allocated once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..base.checks import ScanInputs, integer
from ..base.errors import REMEDY, DeferredError
from ..base.tiling import next_power_of_2, scan_tile
from ..comm.backwards import new_fwd_epochs
from ..comm.calls import call_key
from ..comm.communicator import Communicator, check_communicator
from ..comm.heap import outside_inference_mode
from ..launch.compiled_kernel import dynamo_disabled
from ..shmem_kernels.channel import Channel
from ..shmem_kernels.links import SENTINEL, SIGNAL
from .launcher import Launcher, name_of
from .rails_links import Rails
from .workspace import MAKE_WORKSPACE, PROTOCOLS, Chain, Spec, make_workspace, workspace_bytes

_numbers = itertools.count(1)
_DIRECTION = "_allscan_reverse"  # attribute of a forward epoch tensor: the direction of its launch


def _spec_and_layout(
    comm: Communicator, shape: Any, depth: Any, protocol: Any, tile: Any, max_ctas: Any, algorithm: Any
) -> tuple[Spec, Chain | Rails]:
    """The spec and memory layout for the arguments of an AllScan. Raises TypeError, ValueError or RuntimeError."""
    depth, max_ctas = integer("depth", depth), integer("max_ctas", max_ctas)
    shape = tuple(integer("a size of shape", n) for n in shape)
    if len(shape) < 2:
        raise ValueError(f"shape must be [..., K, V], got {shape}")
    if protocol != "auto" and protocol not in PROTOCOLS:
        raise ValueError(f'protocol must be "auto", "sentinel", "signal" or "put", got {protocol!r}')
    if protocol == "put" and comm.transport == "ipc":
        raise ValueError('protocol="put" requires NVSHMEM, which transport "ipc" does not use')
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

    reverse=True scans from the last rank to the first. A decay of 0 discards the received value, even Inf or NaN; -0.0
    may arrive as +0.0. In a chain each rank receives one state, whatever the number of ranks (ZeCO, arXiv 2507.01004,
    section 3). With rails each rank receives about two states over NVLink and a part of one over the network.

    Construction and ``close`` (or the end of ``with``) are collective over the group: every rank calls them with the
    same arguments, at the same place in its order of calls.

    Attributes: comm, shape, depth, protocol, algorithm; tile and num_tiles, after defaults are resolved.

    Args:
        comm: Communicator.
        shape: [..., K, V] of the float32 state, the same on every rank.
        depth: number of scans that a rank may run ahead of the next rank; number of inbox slots of each tile.
        protocol: "sentinel" (mapped peers: stores; a word that is not the sentinel value has arrived, as in NCCL's LL),
            "signal" (mapped peers: stores, then a signal with release), "put" (NVSHMEM put with signal), or "auto":
            sentinel between mapped peers, else put.
        tile: (BK, BV), rows and columns of a tile, powers of two. The default is chosen for speed with
            ``comm.max_ctas`` programs. Set it for kernels that need whole rows or columns at a time.
        max_ctas: maximum number of programs of a launch; default ``comm.max_ctas``.
        algorithm: "chain"; "rails" or "recursive_doubling" for several nodes (docs/rails.md); or "auto", a chain.
            Default ``comm.algorithm``. User kernels (``channel``, ``launch``) and transitions need a chain.

    Raises:
        ValueError: for invalid arguments, or arguments that differ between ranks.
        TypeError: for arguments of another type.
        RuntimeError: if a link cannot use the protocol.
        MemoryError: if the arena is full. Every rank raises each of these errors, before any launch.

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
        if type(comm) is not Communicator:
            check_communicator(comm)
        comm.check()
        self.comm = comm
        self._max_ctas = comm._max_ctas if max_ctas is None else max_ctas
        deferred = None
        try:
            spec, layout = _spec_and_layout(comm, shape, depth, protocol, tile, self._max_ctas, algorithm)
        except (TypeError, ValueError, RuntimeError) as error:
            deferred = DeferredError(error)
        if deferred is not None:
            comm.order.agree(None, deferred, MAKE_WORKSPACE)  # raises the error here and reports it to the other ranks
        workspace = make_workspace(comm, spec, layout, self._max_ctas)
        self._offsets, self._layout = workspace.offsets, layout
        self.spec = spec
        self.shape, self.tile, self.depth, self.protocol, self.algorithm = spec
        self.K, self.V = self.shape[-2:]
        self.num_tiles = spec.num_tiles
        rails = layout if isinstance(layout, Rails) else None
        try:
            self.launcher = Launcher(comm, spec, workspace, rails, self._max_ctas)
            self.number = next(_numbers)
            comm.collectives.add(self)
        except BaseException:
            comm.memory.free_later(*self._offsets)
            raise

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
        """The symmetric memory in bytes that an AllScan with these arguments allocates on this rank: about 2 * depth *
        the state, with put links twice that; with rails more than twice that; 0 on one rank. The call itself allocates
        nothing and does not communicate.

        Args:
            comm, shape, depth, protocol, tile, max_ctas, algorithm: the arguments of ``AllScan``.

        Returns:
            Bytes.

        Raises:
            TypeError, ValueError: as ``AllScan`` raises for the same arguments.

        Example:
            >>> allscan.AllScan.size_hint(comm, (16, 128, 128))                   # a state of 1 MiB: about 6 MiB
        """
        check_communicator(comm)
        ctas = comm.max_ctas if max_ctas is None else max_ctas
        _, layout = _spec_and_layout(comm, shape, depth, protocol, tile, ctas, algorithm)
        return workspace_bytes(comm, layout)

    @property
    def max_ctas(self) -> int:
        """Maximum number of programs of a launch; read-only."""
        return self._max_ctas

    @property
    def workspace_bytes(self) -> int:
        """Symmetric memory of both directions on this rank, in bytes; see ``size_hint``."""
        return workspace_bytes(self.comm, self._layout)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self.launcher.closed

    def close(self) -> None:
        """Free the symmetric memory. Collective: every rank calls this at the same place in its order of calls.

        Waits for this rank's kernels and for the other ranks. CUDA graphs that captured this AllScan must not be
        replayed afterwards. If the communicator is broken or desynchronized, the memory stays allocated until the
        communicator is closed.

        Raises:
            AllScanOutOfStep: if the ranks have made different numbers of calls.
            AllScanHostTimeout: if a rank does not call ``close``.

        Example:
            >>> with allscan.AllScan(comm, (16, 128, 128)) as scan:               # closed at the end of the block
            ...     prev = scan.scan(state)
        """
        comm, rails = self.comm, self.launcher.rails
        if self.launcher.closed:
            return
        if comm.size > 1 and not (comm.closed or comm.broken or comm.gone or comm.order.desync_reason is not None):
            comm._drain()
            comm.order.exchange("close", f"AllScan.close, of shape {self.shape}")
            comm.memory.free(*self._offsets)
            if rails is not None:
                rails.release()
            comm.collectives.discard(self)
        self.launcher.closed = True

    def __enter__(self) -> AllScan:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:  # else the other ranks may never come: the memory stays with the communicator
            self.close()

    def _check_open(self) -> None:
        if self.launcher.closed:
            raise RuntimeError("this AllScan is closed")
        if self.comm.closed:
            self.comm.check()

    def __deepcopy__(self, memo: object) -> AllScan:
        return self  # a copy of a module shares the memory

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an AllScan cannot be pickled, since it owns memory of running processes: create it after loading"
        )

    @property
    def epochs(self) -> tuple[int, int]:
        """Numbers of this rank's (forward, reverse) scans, counted on the device. Waits for them. 0 on one rank. Raises
        RuntimeError if this AllScan is closed."""
        self._check_open()
        self.comm.streams.synchronize()
        forward, reverse = (int(channel.epoch[0]) for channel in self.launcher.channels)
        return forward, reverse

    def channel(
        self, reverse: bool = False, *, fwd_epoch: Tensor | None = None, adjoint_of: Tensor | None = None
    ) -> Channel:
        """The channel of one direction, for user kernels; see ``allscan.device``.

        A kernel with a backward pass passes ``fwd_epoch``, int64 [1] on the device: the launch writes its epoch there.
        The backward's launch, in the other direction, takes the same tensor as ``adjoint_of`` and sends the epoch with
        its tiles. Ranks that run the backward of different calls thus detect it at once.

        Args:
            reverse: the direction; True: from the last rank to the first.
            fwd_epoch: int64 [1] on the device, see ``AllScan.fwd_epoch``; written by the launch.
            adjoint_of: the ``fwd_epoch`` that a launch in the other direction has written.

        Returns:
            The kernel's argument ``channel``, an ``allscan.device.Channel``. Valid for any number of launches.

        Raises:
            TypeError: for a forward epoch that is no tensor.
            ValueError: if the algorithm is not a chain; for both epochs at once; for a forward epoch that is empty or
                of another dtype or device; and for ``adjoint_of`` in the direction of its forward launch.
            RuntimeError: if this AllScan is closed.

        Example:
            >>> fwd_epoch = scan.fwd_epoch()
            >>> grid = (min(scan.num_tiles, comm.max_ctas),)
            >>> scan.launch(kernel, grid, x, out, channel=scan.channel(fwd_epoch=fwd_epoch))
            >>> back = scan.channel(reverse=True, adjoint_of=fwd_epoch)           # of the backward's launch
        """
        self._check_open()
        if self.launcher.rails is not None:
            raise ValueError(f'an AllScan with algorithm="{self.algorithm}" has no channel for kernels of your own')
        if fwd_epoch is not None and adjoint_of is not None:
            raise ValueError("give fwd_epoch or adjoint_of, not both")
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
        return self.launcher.channel(reverse, epoch, adjoint_of is not None)

    def fwd_epoch(self) -> Tensor:
        """Allocate the word for a forward epoch, int64 [1] on the device; see ``channel``."""
        return new_fwd_epochs(self.comm, 1)

    def _reset(self) -> None:
        """Reset the channels to their initial state. For Communicator.resync(), while no rank's kernels use them."""
        self.launcher.reset()

    @dynamo_disabled
    def launch(self, kernel: Any, grid: tuple[int, ...] | Callable[..., Any], *args: Any, **options: Any) -> None:
        """Launch ``kernel[grid](*args)``, a ``triton.jit`` function that uses a channel of this AllScan.

        The kernel's programs must handle every tile exactly once, and one of them must begin with tile 0 (see
        ``device.begin``). Otherwise this raises AllScanOutOfStep: for the tiles on CPU ranks and in debug mode, for
        tile 0 on CPU ranks. A communicator of one rank does not count tiles.

        This method checks the communicator, orders the launch after earlier launches and links NVSHMEM if a link needs
        it. In a CUDA graph's capture and its replays the caller orders the launches: one stream for all that uses a
        communicator. num_warps defaults to BK * BV / 128, at least 1 and at most 4. A kernel that waits should have at
        most ``comm.max_ctas`` programs: see ``allscan.device``.

        Args:
            kernel: a ``triton.jit`` function.
            grid: Triton's grid: one to three numbers of programs, or a function of the kernel's constants that returns
                them.
            *args: the kernel's arguments, among them a channel of this AllScan.
            **options: the kernel's constants, and Triton's launch options.

        Raises:
            TypeError: for a kernel that is no ``triton.jit`` function, for an invalid grid, and for an AllScan or its
                method ``channel`` in place of a channel.
            ValueError: for an invalid grid, for channels of another AllScan, and unless ``algorithm`` is "chain".
            RuntimeError: if this AllScan, or the AllScan of a channel, is closed.
            AllScanError: as ``Communicator.check`` raises.

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
            if not hasattr(kernel, "__getitem__"):
                raise TypeError(f"kernel must be a triton.jit function, got {kernel!r}")
            _check_grid(grid)
            for channel in channels:
                _check_channel(channel)
                if all(channel.info is not own.info for own in self.launcher.channels):
                    raise ValueError("channel must come from this AllScan")
            # as in scan(): so that a later launch detects that a rank has launched in the other direction
            step = self.comm.memory.step_of(self.comm.order.stamp_in(reverse))
            args, options = _with_step(args, step), dict(zip(options, _with_step((*options.values(),), step)))
            launcher, linked = self.launcher, self.launcher.linked(kernel)
            looks = not self.comm.streams.cuda or (self.comm.debug and not self.comm.streams.capturing())
            before = self._epochs_of(channels) if looks and self.comm.size > 1 else []
            launcher.before_launch(kernel, reverse)
            launcher.after_launch(linked[grid](*args, **options))
            if looks:
                self._check_tiles(channels, before, f"{name_of(kernel)} with a grid of {grid}")

    def _epochs_of(self, channels: list[Channel]) -> list[list[int]]:
        """The number of launches of each tile, [channel][tile]. Waits for the device."""
        self.comm.streams.synchronize()
        return [channel.epoch.tolist() for channel in channels]

    def _check_tiles(self, channels: list[Channel], before: list[list[int]], what: str) -> None:
        """After a launch of ``what``: raise AllScanOutOfStep unless each tile has had one more launch than ``before``
        and, which only a CPU rank can see, the previous rank has received its credit. Waits for the device."""
        after = self._epochs_of(channels)
        self.comm.check()
        for channel, epochs, earlier in zip(channels, after, before):
            usual = max(earlier) + 1
            others = {tile: epoch for tile, epoch in enumerate(epochs) if epoch != usual}
            if others:
                some = ", ".join(f"tile {tile} has {epoch}" for tile, epoch in [*others.items()][:4])
                some += " and so on" * (len(others) > 4)
                raise self.comm.order.desynchronized(
                    f"rank {self.comm.rank}: {what} has not handled each of the {self.spec.num_tiles} tiles exactly "
                    f"once, or has received one and not sent it: now each should have {usual}, but {some}. {REMEDY}."
                )
            # the neighbour's word is readable on CPU ranks only: GPUs have its address, put links not even that
            mapped = isinstance(channel.prev_freed, Tensor) and channel.RECV in (SENTINEL, SIGNAL)
            if mapped and channel.prev_freed[0] < usual - 1:
                raise self.comm.order.desynchronized(
                    f"rank {self.comm.rank}: {what} has not called begin() with tile 0, which tells the previous "
                    f"rank that slots are free. Of a program with several tiles, begin() takes the lowest. {REMEDY}."
                )

    @dynamo_disabled
    def scan(
        self,
        state: Tensor,
        decay: Tensor | float | None = None,
        *,
        transition: Tensor | None = None,
        transpose: bool = False,
        initial_state: Tensor | None = None,
        reverse: bool = False,
        out: Tensor | None = None,
        channel: Channel | None = None,
        async_op: bool = False,
    ) -> Any:
        """The exclusive scan of this rank's ``state``. Not differentiable; ``allscan.allscan`` is.

            R_0 = initial_state (or 0),   R_{p+1} = decay_p * R_p + state_p,   rank p gets R_p

        Args:
            state: float32 tensor of this AllScan's shape, on the communicator's device.
            decay: None (1), a number, or a float32 tensor [..., K], [...] or of no dimension, in [0, 1].
            transition: float32 [..., K, K], instead of a decay: R_{p+1} = transition_p R_p + state_p. Tiles must
                have at least K rows, and 16 rows and columns.
            transpose: whether to multiply by transposed transitions, as the adjoint scan does.
            initial_state: like state, or None (0); used by the first rank in the direction of the scan.
            out: like state, contiguous. It may be ``state`` itself (without a transition); otherwise it must not
                overlap an argument.
            reverse: whether to scan from the last rank to the first.
            channel: a result of ``self.channel(reverse, ...)``, used instead of ``self.channel(reverse)``.
            async_op: return a ``Work`` at once. The scan runs on a stream of the communicator, overlapped with later
                launches on the current stream; in a CUDA graph's capture it runs on the current stream.

        Returns:
            R_p in ``out``, or a new tensor like ``state``. The scan runs on torch's current stream; the host does not
            wait. With ``async_op`` a ``Work``, whose ``wait()`` returns the tensor.

        Raises:
            TypeError: for arguments of other types.
            ValueError: for other shapes, dtypes or devices, for ``out`` that overlaps an argument, for a channel of
                another AllScan or of the other direction, and for transitions with other tiles or another ``algorithm``
                than "chain".
            RuntimeError: if this AllScan or its communicator is closed.
            AllScanError: as ``Communicator.check`` raises.

        Example:
            >>> prev = scan.scan(state, 0.5)                                      # state: float32, of the scan's shape
            >>> work = scan.scan(state, decay, reverse=True, async_op=True)
            >>> after = work.wait()
        """
        inputs = ScanInputs(state, decay, transition, initial_state, out)
        with self.comm.call(reverse, "AllScan.scan()", inputs):
            fwd_epoch, adjoint_launch = None, False
            if channel is not None:
                _check_channel(channel)
                if channel.info is not self.launcher.channels[reverse].info:
                    raise ValueError("channel must come from this AllScan and have the direction of the scan")
                fwd_epoch, adjoint_launch = channel.fwd_epoch, channel.ADJOINT.value
            prepared = self.launcher.prepared_scan(
                call_key(inputs), inputs, bool(reverse), bool(transpose), adjoint_launch
            )
            return prepared.run(inputs, async_op, fwd_epoch)


def _channels_in(arguments: tuple[object, ...]) -> list[Any]:
    """The channels among a kernel's arguments, tuples included, and objects mistaken for one (``_check_channel``)."""
    found: list[Any] = []
    for x in arguments:
        if isinstance(x, (Channel, AllScan)) or getattr(x, "__func__", None) is AllScan.channel:
            found.append(x)
        elif isinstance(x, tuple):
            found += _channels_in(x)
    return found


def _with_step(arguments: tuple[Any, ...], step: Tensor) -> tuple[Any, ...]:
    """A kernel's arguments; channels in them, tuples included, read ``step``."""
    found: list[Any] = []
    for x in arguments:
        if isinstance(x, Channel):
            x = x._replace(step=step)
        elif isinstance(x, tuple) and _channels_in(x):
            values = _with_step(x, step)
            x = type(x)(*values) if hasattr(x, "_fields") else values
        found.append(x)
    return tuple(found)


def _check_channel(channel: object) -> None:
    if not isinstance(channel, Channel):
        got = "the method itself: call it" if callable(channel) else type(channel).__name__
        raise TypeError(f"expected a Channel from AllScan.channel(), got {got}")


def _check_grid(grid: object) -> None:
    """Raise TypeError or ValueError for a grid that Triton does not accept."""
    if callable(grid):
        return
    if not isinstance(grid, tuple) or not 1 <= len(grid) <= 3:
        raise TypeError(f"grid must be a tuple of one to three integers, such as (scan.num_tiles,), got {grid!r}")
    for n in grid:
        integer("a size of grid", n)
