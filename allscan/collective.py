"""AllScan: All-Scan with its memory and channels allocated once."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import numbers
import sys
import time

import torch
import triton.language as tl

from .bindings import nvshmem_device
from .checks import check_tensor, check_transition, decay_rows, share_memory
from .communicator import Communicator
from .order import REMEDY
from .shmem_kernels.channel import Channel
from .shmem_kernels.links import NONE, PUT
from .shmem_kernels.scan import scan_kernel, transition_kernel
from .workspace import PROTOCOLS, make_channels, reset, workspace_bytes

# Words of a tile by kind of link: (fewest, most where a program has one tile or two, most where it has four or more). A
# launch has at most Communicator.max_ctas programs. The interpreter pays by the tile.
SENTINEL_WORDS = (128, 2048, 4096)
SIGNAL_WORDS = (1024, 8192, 8192)
CPU_WORDS = (8192, 8192, 8192)

_numbers = itertools.count(1)


def uncompiled(function):
    """torch.compiler.disable: what ``function`` asks of other ranks, and launches, is not for torch to trace. But it
    does not import the compiler, which takes a second, where nobody has."""

    disabled = None

    @functools.wraps(function)
    def call(*args, **options):
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return function(*args, **options)
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **options)

    return call


def default_tile(K: int, V: int, words: int) -> tuple[int, int]:
    """(BK, BV), powers of two of at most ``words``: whole rows of V where they fit, since those are contiguous."""
    BV = min(_next_power_of_2(V), words)
    return min(_next_power_of_2(K), max(1, words // BV)), BV


def tile_words(numel: int, ctas: int, least: int, most: int, most_of_four: int) -> int:
    """Words of a tile, a power of two, for ``numel`` words in at most ``ctas`` programs: see SENTINEL_WORDS."""
    one, four = (_next_power_of_2(-(-numel // (ctas * tiles))) for tiles in (1, 4))
    return max(least, min(one, most), min(four, most_of_four))


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


class AllScan:
    """All-Scan over the ranks of a communicator, with its memory and channels allocated once.

        R_0 = initial_state (or 0),   R_{p+1} = decay_p * R_p + state_p,   rank p gets R_p

    reverse=True numbers the ranks from the last. Where a decay is 0 nothing passes, not even Inf or NaN; -0.0 may
    arrive as +0.0. Each rank receives one state, whatever the number of ranks (ZeCO, arXiv 2507.01004, section 3).

    comm: Communicator.
    shape: [..., K, V] of the float32 state, the same on every rank.
    depth: how many scans a rank may run ahead of the next one; slots an inbox has for each tile.
    protocol: "sentinel" (mapped peers: stores whose words announce themselves), "signal" (mapped peers: stores, then a
        released signal), "put" (NVSHMEM put with signal), "auto": sentinel where peers are mapped, else put.
    tile: (BK, BV) rows and columns of a tile, powers of two; by default chosen for speed with ``comm.max_ctas``
        programs. Kernels that need whole rows or columns at a time choose it themselves.

    max_ctas: most programs of a launch; default ``comm.max_ctas``.

    Collective over the group: all ranks construct it alike, at the same place in their order of calls.
    Raises ValueError (arguments; ranks that differ), RuntimeError (protocol not possible), MemoryError (arena full);
    on every rank before anything is launched.
    """

    def __init__(
        self, comm: Communicator, shape, *, depth: int = 3, protocol: str = "auto", tile=None,
        max_ctas: int | None = None,
    ):  # fmt: skip
        comm.check()
        self.comm, self.shape, self.depth, self.protocol = comm, tuple(shape), depth, protocol
        if len(self.shape) < 2 or min(self.shape) < 1:
            raise ValueError(f"shape must be [..., K, V] with sizes of at least 1, got {self.shape}")
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        if protocol != "auto" and protocol not in PROTOCOLS:
            raise ValueError(f'protocol must be "auto", "sentinel", "signal" or "put", got {protocol!r}')
        *lead, self.K, self.V = self.shape
        direct = protocol == "sentinel" or (protocol == "auto" and comm.mapped)
        limits = CPU_WORDS if comm.device.type == "cpu" else SENTINEL_WORDS if direct else SIGNAL_WORDS
        self.max_ctas = comm.max_ctas if max_ctas is None else max_ctas
        words = tile_words(math.prod(self.shape), self.max_ctas, *limits)
        self.tile = tuple(tile) if tile is not None else default_tile(self.K, self.V, words)
        if any(n != _next_power_of_2(n) for n in self.tile):
            raise ValueError(f"tile must be two powers of two, got {self.tile}")
        self.num_tiles = math.prod(lead) * -(-self.K // self.tile[0]) * -(-self.V // self.tile[1])
        self.spec = (self.shape, self.tile, depth, protocol)
        self._channels = make_channels(comm, self.num_tiles, self.tile, depth, protocol, self.spec)
        self.number = next(_numbers)  # in the order in which this process has made them
        self.backwards = 0  # adjoint launches, as the host has made them
        self.dropped = [False, False]  # see order.Pending
        comm.made_scans.add(self)

    @property
    def workspace_bytes(self) -> int:
        """Symmetric memory of both directions on this rank, in bytes: about 2 * depth * the state, with put links
        twice that."""
        if self.comm.size == 1:
            return 0
        put = any(channel.SEND == PUT for channel in self._channels)
        return 2 * workspace_bytes(self.num_tiles, self.tile, self.depth, put)

    @property
    def epochs(self) -> tuple[int, int]:
        """Scans that this rank has made, forward and reverse, counted on the device. Waits for them. 0 on one rank."""
        if self.comm.device.type == "cuda":
            torch.cuda.synchronize(self.comm.device)
        return tuple(int(channel.epoch[0]) for channel in self._channels)

    def channel(self, reverse: bool = False, *, ticket=None, adjoint_of=None) -> Channel:
        """The channel of one direction, for kernels of your own: see ``allscan.device``.

        For a kernel that has a backward pass of its own: ``ticket``, int64 [1] on the device, takes the number of this
        launch; given as ``adjoint_of`` to the launch of the backward, in the other direction, it travels with that
        one's tiles, so that ranks that run the backward of different calls find out at once.
        """
        channel = self._channels[reverse]
        if ticket is not None:
            return channel._replace(ticket=ticket)
        if adjoint_of is not None:
            return channel._replace(ticket=adjoint_of, ADJOINT=tl.constexpr(True))
        return channel

    def ticket(self) -> torch.Tensor:
        """Room for a ticket: see :meth:`channel`."""
        return torch.empty(1, dtype=torch.int64, device=self.comm.device)

    def reset(self) -> None:
        """As if no scan had been made. For Communicator.resync(), while no kernel of any rank uses the channels."""
        if self.comm.size > 1:
            for channel in self._channels:
                reset(channel)
        self.backwards, self.dropped = 0, [False, False]

    @uncompiled
    def launch(self, kernel, grid, *args, **options):
        """Launch ``kernel[grid](*args)``, a ``triton.jit`` function that uses a channel of this AllScan.

        Checks the communicator, orders the launch behind earlier ones and links NVSHMEM if a link needs it. In a CUDA
        graph's capture, and for its replays, the order is the caller's: one stream for all that uses a communicator.
        num_warps is by default what the tile fills with 16 bytes a thread, at most 4. A kernel that waits should have
        at most ``comm.max_ctas`` programs: see ``allscan.device``.
        """
        directions = [x.info is self._channels[1].info for x in args if isinstance(x, Channel)]
        reverse = self.comm.size > 1 and bool(directions) and all(directions)
        with self.comm.call(reverse):
            self.comm.begin(self._description(kernel, reverse) if self.comm.debug else "")
            if self.dropped[reverse]:
                self._look_for_backwards(reverse)
            options.setdefault("num_warps", max(1, min(4, math.prod(self.tile) // 128)))
            if self.comm.device.type == "cuda" and any(PUT in (c.SEND, c.RECV) for c in self._channels):
                kernel = _linked(kernel)
            compiled = kernel[grid](*args, **options)
            if self.comm.device.type == "cpu":
                self.comm.check()  # the interpreter has run the kernel by now
            else:
                _make_room(compiled.function)

    def _description(self, kernel, reverse) -> str:
        name = getattr(kernel, "__name__", None) or kernel.fn.__name__
        if kernel in (scan_kernel, transition_kernel):
            name = "scan"  # ranks may mix them
        return f"{name} over {self.shape}" + (", reverse" if reverse else "")

    def _look_for_backwards(self, reverse: bool) -> None:
        """A call in this direction had no backward on this rank. Raise if the rank that sends to this one in the
        backward direction has run its own; return once that one is seen to have begun its next call instead.

        Waits for that rank's next launch: validate with torch.no_grad(), which leaves nothing to look for.
        """
        self.dropped[reverse] = False
        there, back = self._channels[reverse], self._channels[not reverse]
        if back.RECV == NONE or (self.comm.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return  # this rank's backward waits for nobody, so the others wait for it
        deadline = time.monotonic() + self.comm.timeout
        if self.comm.device.type == "cuda":
            torch.cuda.current_stream(self.comm.device).synchronize()
        launched, epoch = self.comm.peek(there.epoch[:1])[0], self.comm.peek(back.epoch[:1])[0]
        while time.monotonic() < deadline and launched >= 0 <= epoch:
            begun = max(self.comm.peek(there.freed[: self.depth])) >= launched
            arrived = self.comm.peek(back.arrived[:: self.num_tiles])
            if any((word & 0xFFFFFFFF) == epoch + 1 for word in arrived):
                raise RuntimeError(
                    "a call with gradients had no backward on this rank, but on the next one: this rank has not used "
                    "what the call returned, and its gradients since then lack what it gave to the others. Use the "
                    f"result on every rank, 0 * result.sum() if need be; or torch.no_grad() on all. {REMEDY}."
                )
            if begun:
                return
            time.sleep(1e-3)

    def scan(
        self, state, decay=None, *, transition=None, adjoint=False, initial_state=None, reverse: bool = False, out=None,
        channel: Channel | None = None,
    ):  # fmt: skip
        """The exclusive scan of this rank's ``state``; not differentiable, see :func:`allscan` for that.

        state: float32 tensor of this AllScan's shape, on the communicator's device.
        decay: None (1), a number, or a float32 tensor [..., K], [...] or of no dimension, in [0, 1].
        transition: instead of a decay, float32 [..., K, K]: R_{p+1} = transition_p R_p + state_p; with ``adjoint`` the
            transposed one. For an AllScan whose tiles are whole columns, see :func:`transition_tile`.
        initial_state: like state, or None (0); used by the first rank in the direction of the scan.
        out: like state, contiguous; may be ``state`` itself, but share no memory with it or another argument otherwise.
        channel: of the direction ``reverse``, to be used instead of ``self.channel(reverse)``.
        Returns out, or a new tensor. Runs on torch's current stream; the host does not wait.
        """
        with self.comm.call(reverse):
            check_tensor("state", state, self.shape, self.comm.device)
            state = state.contiguous()
            if initial_state is not None:
                check_tensor("initial_state", initial_state, self.shape, self.comm.device)
                initial_state = initial_state.contiguous()
            if transition is not None:
                check_transition(transition, decay, self.shape, self.comm.device)
                transition = transition.contiguous()
                if self.tile[0] < self.K or min(self.tile) < 16:
                    wanted = transition_tile(self.K)
                    raise ValueError(
                        f"a scan with transitions needs tiles such as {wanted}, this AllScan has {self.tile}"
                    )
            one_hop = isinstance(decay, numbers.Real) and decay == 0
            decay, strides = decay_rows(None if one_hop else decay, self.shape, self.comm.device)
            if out is None:
                out = torch.empty_like(state)
            else:
                check_tensor("out", out, self.shape, self.comm.device)
                self._check_out(out, state, decay=decay, transition=transition, initial_state=initial_state)
                if not out.is_inference():
                    torch.autograd.graph.increment_version(out)  # so that torch knows of the write
            channel = self.channel(reverse) if channel is None else channel
            initial = dict(HAS_INITIAL=initial_state is not None)
            given = state if initial_state is None else initial_state
            if transition is not None:
                tiles = -(-self.num_tiles // self.max_ctas)  # of a program
                self.launch(
                    transition_kernel, (-(-self.num_tiles // tiles),), state, transition, given, out, channel,
                    *((1, self.K) if adjoint else (self.K, 1)), K=self.K, V=self.V, **initial,
                    **transition_blocks(self.tile[0]),
                )  # fmt: skip
                return out
            self.launch(
                scan_kernel, (min(self.num_tiles, self.max_ctas),),
                state, state if decay is None else decay, given, out, channel, *strides,
                K=self.K, V=self.V, HAS_DECAY=decay is not None, ONE_HOP=one_hop, **initial,
                num_warps=max(1, min(8, math.prod(self.tile) // 512)),
            )  # fmt: skip
            return out

    @staticmethod
    def _check_out(out, state, **others) -> None:
        """Raise ValueError if a kernel would read what another of its programs has written."""
        if not out.is_contiguous():
            raise ValueError("out must be contiguous")
        if others["transition"] is None and out.data_ptr() == state.data_ptr():
            others["state"] = None
        else:
            others["state"] = state
        for name, x in others.items():
            if x is not None and share_memory(out, x):
                raise ValueError(
                    f"out shares memory with {name}: give another tensor (or state itself, without a transition)"
                )


def transition_tile(K: int) -> tuple[int, int]:
    """The ``tile`` of an AllScan for transitions: whole columns, 32 of them, or 16 where registers do not hold a
    transition."""
    return max(16, _next_power_of_2(K)), 32 if K <= 128 else 16


def transition_blocks(BK: int) -> dict:
    """Launch options of transition_kernel: up to 128 x 128 a transition fits the registers of 8 warps."""
    return dict(BJ=BK if BK <= 128 else 32 if BK <= 256 else 16, num_warps=4 if BK <= 64 else 8)


@functools.cache
def _make_room(function: int) -> None:
    """From the next launch on, give the multiprocessors where this kernel waits all the shared memory there is.

    A multiprocessor divides its memory into cache and shared memory for the first program on it, and holds to that
    until it is empty: programs that wait would keep away the kernels that are to run beside them.
    """
    prefer_shared_memory = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent
    error = ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(ctypes.c_void_p(function), prefer_shared_memory, 100)
    if error:
        raise RuntimeError(f"cuFuncSetAttribute: CUDA error {error}")


@functools.cache
def _linked(kernel):
    return nvshmem_device.Kernel(kernel)
