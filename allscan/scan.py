"""All-Scan: AllScan, the persistent form, and allscan(), the differentiable function over it."""

from __future__ import annotations

import ctypes
import functools
import math
import sys

import torch

from .bindings import nvshmem_device
from .communicator import Communicator, by_rank
from .shmem_kernels.channel import PUT, Channel
from .shmem_kernels.scan import scan_kernel, transition_kernel
from .workspace import PROTOCOLS, make_channels, workspace_bytes

# (words of a tile, most programs of the scan kernel). Sentinel: one 16-byte access for each thread of a warp; on 4
# H200s 2 MiB took 10.5 us so, 11.4 with 256 words, 11.9 with 512; 8 MiB 28.8, 28.8, 30.2. With signals a tile is known
# only when its stores have been acknowledged, behind those of every other tile that is under way: 2 MiB took 25.0 us
# with 256 programs, 26.2 us with all 512 tiles at once. The interpreter pays by the program.
SENTINEL_SHAPE = (128, 2048)
SIGNAL_SHAPE = (1024, 256)
CPU_SHAPE = (8192, 2048)


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
    tile: (BK, BV) rows and columns of a tile, powers of two; by default chosen for speed. Kernels that need whole rows
        or columns at a time choose it themselves.

    Collective over the group: all ranks construct it alike, at the same place in their order of calls.
    Raises ValueError (arguments; ranks that differ), RuntimeError (protocol not possible), MemoryError (arena full);
    on every rank before anything is launched.
    """

    def __init__(self, comm: Communicator, shape, *, depth: int = 3, protocol: str = "auto", tile=None):
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
        words, self._programs = SENTINEL_SHAPE if direct else SIGNAL_SHAPE
        if comm.device.type == "cpu":
            words, self._programs = CPU_SHAPE
        self.tile = tuple(tile) if tile is not None else default_tile(self.K, self.V, words)
        if any(n != _next_power_of_2(n) for n in self.tile):
            raise ValueError(f"tile must be two powers of two, got {self.tile}")
        self.num_tiles = math.prod(lead) * -(-self.K // self.tile[0]) * -(-self.V // self.tile[1])
        spec = (self.shape, self.tile, depth, protocol)
        self._channels = make_channels(comm, self.num_tiles, self.tile, depth, protocol, spec)

    @property
    def workspace_bytes(self) -> int:
        """Symmetric memory of both directions on this rank, in bytes: about 2 * depth * the state, with put links
        twice that."""
        if self.comm.size == 1:
            return 0
        put = any(channel.SEND == PUT for channel in self._channels)
        return 2 * workspace_bytes(self.num_tiles, self.tile, self.depth, put)

    def channel(self, reverse: bool = False) -> Channel:
        """The channel of one direction, for kernels of your own: see ``allscan.device``."""
        return self._channels[reverse]

    @uncompiled
    def launch(self, kernel, grid, *args, **options):
        """Launch ``kernel[grid](*args)``, a ``triton.jit`` function that uses a channel of this AllScan.

        Checks the communicator, orders the launch behind earlier ones and links NVSHMEM if a link needs it. In a CUDA
        graph's capture, and for its replays, the order is the caller's: one stream for all that uses a communicator.
        num_warps is by default what the tile fills with 16 bytes a thread, at most 4.
        """
        self.comm.begin(self._description(kernel, args) if self.comm.debug else "")
        options.setdefault("num_warps", max(1, min(4, math.prod(self.tile) // 128)))
        if any(PUT in (channel.SEND, channel.RECV) for channel in self._channels):
            kernel = _linked(kernel)
        compiled = kernel[grid](*args, **options)
        if self.comm.device.type == "cpu":
            self.comm.check()  # the interpreter has run the kernel by now
        else:
            _make_room(compiled.function)

    def _description(self, kernel, args) -> str:
        direction = ", reverse" if any(x is self._channels[1] for x in args) else ""
        name = getattr(kernel, "__name__", None) or kernel.fn.__name__
        if kernel in (scan_kernel, transition_kernel):
            name = "scan"  # ranks may mix them
        return f"{name} over {self.shape}{direction}"

    def scan(
        self, state, decay=None, *, transition=None, adjoint=False, initial_state=None, reverse: bool = False, out=None
    ):
        """The exclusive scan of this rank's ``state``; not differentiable, see :func:`allscan` for that.

        state: float32 tensor of this AllScan's shape, on the communicator's device.
        decay: None (1), a number, or a float32 tensor [..., K], [...] or of no dimension, in [0, 1].
        transition: instead of a decay, float32 [..., K, K]: R_{p+1} = transition_p R_p + state_p; with ``adjoint`` the
            transposed one. For an AllScan whose tiles are whole columns, see :func:`transition_tile`.
        initial_state: like state, or None (0); used by the first rank in the direction of the scan.
        out: like state, contiguous; may be ``state`` itself.
        Returns out, or a new tensor. Runs on torch's current stream; the host does not wait.
        """
        check_tensor("state", state, self.shape, self.comm.device)
        state = state.contiguous()
        if initial_state is not None:
            check_tensor("initial_state", initial_state, self.shape, self.comm.device)
            initial_state = initial_state.contiguous()
        if transition is not None:
            check_transition(transition, decay, self.shape, self.comm.device)
            if self.tile[0] < self.K or min(self.tile) < 16:
                wanted = transition_tile(self.K)
                raise ValueError(f"a scan with transitions needs tiles such as {wanted}, this AllScan has {self.tile}")
        one_hop = isinstance(decay, (int, float)) and decay == 0
        decay, strides = decay_rows(None if one_hop else decay, self.shape, self.comm.device)
        if out is None:
            out = torch.empty_like(state)
        else:
            check_tensor("out", out, self.shape, self.comm.device)
            if not out.is_contiguous():
                raise ValueError("out must be contiguous")
            if transition is not None and out.data_ptr() == state.data_ptr():
                raise ValueError("out must be another tensor than state where there is a transition")
            if not out.is_inference():
                torch.autograd.graph.increment_version(out)  # so that torch knows of the write
        if transition is not None:
            self.launch(
                transition_kernel, (self.num_tiles,), state, transition.contiguous(),
                state if initial_state is None else initial_state, out, self.channel(reverse),
                *((1, self.K) if adjoint else (self.K, 1)), K=self.K, V=self.V,
                HAS_INITIAL=initial_state is not None, **transition_blocks(self.tile[0]),
            )  # fmt: skip
            return out
        self.launch(
            scan_kernel, (self.num_tiles if one_hop else min(self.num_tiles, self._programs),),
            state, state if decay is None else decay,
            state if initial_state is None else initial_state, out, self.channel(reverse), *strides,
            K=self.K, V=self.V, HAS_DECAY=decay is not None, HAS_INITIAL=initial_state is not None, ONE_HOP=one_hop,
            num_warps=max(1, min(8, math.prod(self.tile) // 512)),
        )  # fmt: skip
        return out


def transition_tile(K: int) -> tuple[int, int]:
    """The ``tile`` of an AllScan for transitions: whole columns, 16 of them."""
    return max(16, _next_power_of_2(K)), 16


def transition_blocks(BK: int) -> dict:
    """Launch options of transition_kernel: up to 128 x 128 a transition fits the registers of 8 warps."""
    return dict(BJ=BK if BK <= 128 else 32 if BK <= 256 else 16, num_warps=4 if BK <= 64 else 8)


def decay_target(decay, shape, device):
    """The part of ``shape`` that a decay is to be expanded to: [..., K], [...], or () for a number; None without one.

    Raises TypeError or ValueError unless it is a number, None, or a tensor broadcastable to one of these.
    """
    if decay is None:
        return None
    if not isinstance(decay, torch.Tensor):
        float(decay)
        return ()
    check_tensor("decay", decay, None, device)
    rows, heads = tuple(shape[:-1]), tuple(shape[:-2])
    if decay.ndim == 0:
        return ()
    target = rows if decay.ndim == len(rows) else heads
    if decay.ndim != len(target) or any(d not in (1, t) for d, t in zip(decay.shape, target, strict=True)):
        raise ValueError(f"decay must be broadcastable to {rows} or {heads}, got {tuple(decay.shape)}")
    return target


def decay_rows(decay, shape, device):
    """What a kernel gets of a decay: (float32 tensor or None, (stride of a matrix, stride of a row))."""
    target = decay_target(decay, shape, device)
    if target is None:
        return None, (0, 0)
    if not isinstance(decay, torch.Tensor):
        decay = torch.full((), float(decay), dtype=torch.float32, device=device)
    if not target:
        return decay, (0, 0)
    return decay.expand(target).contiguous(), (shape[-2], 1) if len(target) == len(shape) - 1 else (1, 0)


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


def check_tensor(name: str, tensor, shape, device) -> None:
    """Raise TypeError or ValueError unless ``tensor`` is a float32 tensor of that shape (None: any) and device."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype != torch.float32:
        raise TypeError(f"{name} must be float32, got {tensor.dtype}")
    if shape is not None and tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")


def check_transition(transition, decay, shape, device) -> None:
    """Raise TypeError or ValueError unless ``transition`` goes with a state of ``shape``, in place of a decay."""
    check_tensor("transition", transition, (*shape[:-1], shape[-2]), device)
    if decay is not None:
        raise ValueError("a scan has a decay or a transition, not both")


def persistent(
    comm: Communicator, shape, agree=None, problem: Exception | None = None, tile=None, at_first: bool = False
) -> AllScan:
    """The AllScan that ``comm`` keeps for ``shape`` (and ``tile``), made at the first call, which is collective.

    ``agree``: what else must be the same on all ranks; a first call with it is collective too. None: nothing.
    ``problem``: what is wrong with this rank's arguments. It is raised here; at a first call the other ranks, which are
    on their way to make the workspace, raise ValueError with it, as they do when shape or agree differ. (A problem
    without a shape, None, counts as one of a first call as long as there has been no other call.) ``at_first``: the
    problem is of a kind that is looked for at a first call with ``agree`` only, which this is for all ranks.
    """
    comm.check()
    shape = shape and tuple(shape)
    key = shape if tile is None else (shape, tile)
    if problem is not None and not at_first and (key in comm.scans or (shape is None and comm.scans)):
        raise problem
    if key not in comm.scans or (agree is not None and (shape, agree) not in comm.agreements):
        try:
            answers = comm.exchange(
                ((key, agree), problem and f"{type(problem).__name__}: {problem}"), "the first call for a shape"
            )
        except RuntimeError as nobody_came:
            if problem is not None:
                raise problem from nobody_came
            raise
        if problem is None and any(answer != ((key, agree), None) for answer in answers):
            raise ValueError("ranks call with different arguments: " + by_rank(e or k for k, e in answers))
    if problem is not None:
        raise problem
    if key not in comm.scans:
        comm.scans[key] = AllScan(comm, shape, tile=tile)
    comm.agreements.add((shape, agree))
    return comm.scans[key]


@uncompiled
def allscan(
    state, decay=None, *, comm: Communicator, transition=None, initial_state=None, reverse: bool = False, out=None
):
    """Exclusive scan of a state over the ranks of ``comm``, in rank order, differentiable.

        R_0 = initial_state (or 0),   R_{p+1} = decay_p * R_p + state_p,   rank p gets R_p
        with a transition:            R_{p+1} = transition_p R_p + state_p

    With reverse=True the last rank is the first. With E_p = dL/dR_{p+1} the adjoint is the scan in the other direction:
    E_{p-1} = decay_p * E_p + dL/d(out_p),  dstate_p = E_p,  ddecay_p = sum(E_p * R_p) over what it is broadcast along;
    E_{p-1} = transition_p^T E_p + dL/d(out_p),  dtransition_p = E_p R_p^T.

    state: [..., K, V] float32; on the communicator's device. A torch tensor, or a CuPy or NumPy array.
    decay: None (1), a number, or float32 [..., K], [...], or no dimension; in [0, 1]. 0 lets nothing pass; with the
        number 0 this rank sends each tile before it waits for that tile, so that the next rank does not wait for the
        previous ones (as far as a GPU holds the tiles' programs at once: about 2 MiB of state).
    transition: float32 [..., K, K] in place of a decay, for delta rules and other dense recurrences: the product of the
        transitions of this rank's tokens. Stays where it is; products are as accurate as float32's.
    initial_state: like state, the same on every rank; its gradient is non-zero on the first rank only.
    out: like state, to be written instead of a new array; not with gradients.
    Returns R_p, like state and of the same kind of array.

    Each rank receives one state and sends one. The first call for a shape is collective on the host (it makes an
    :class:`AllScan`, which ``comm`` keeps); later ones only launch one kernel on the current stream.

    Raises TypeError (dtype), ValueError (shape, device, ranks that differ), RuntimeError (closed, no transport),
    AllScanTimeout (an earlier call has timed out), before anything is launched.

        >>> comm = allscan.Communicator()
        >>> prev = allscan.allscan(state, decay, comm=comm)         # rank p: what ranks 0 .. p-1 have left
    """
    if not isinstance(state, torch.Tensor):
        return _foreign(state, decay, transition, comm, initial_state, reverse, out)
    problem = tile = None
    try:
        check_tensor("state", state, None, comm.device)
        if state.ndim < 2 or min(state.shape) < 1:
            raise ValueError(f"state must be [..., K, V] with no empty dimension, got {tuple(state.shape)}")
        decay_target(decay, state.shape, comm.device)
        if transition is not None:
            tile = transition_tile(state.shape[-2])
            check_transition(transition, decay, state.shape, comm.device)
        for name, x in (("initial_state", initial_state), ("out", out)):
            if x is not None:
                check_tensor(name, x, state.shape, comm.device)
        inputs = (state, decay, transition, initial_state, out)
        wanted = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)
        if out is not None and (wanted or not out.is_contiguous()):
            raise ValueError("out must be contiguous, and cannot be used where a gradient is wanted")
    except (TypeError, ValueError) as error:
        problem = error
    scan = persistent(comm, state.shape, problem=problem, tile=tile)
    if wanted:
        return _AllScan.apply(state, decay, transition, initial_state, scan, reverse)
    return scan.scan(state, decay, transition=transition, initial_state=initial_state, reverse=reverse, out=out)


class _AllScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, state, decay, transition, initial_state, scan, reverse):
        prev = scan.scan(state, decay, transition=transition, initial_state=initial_state, reverse=reverse)
        tensor_decay = isinstance(decay, torch.Tensor)
        ctx.save_for_backward(decay if tensor_decay else None, transition, prev)
        ctx.number = None if tensor_decay else decay
        ctx.scan, ctx.reverse = scan, reverse
        return prev

    @staticmethod
    def backward(ctx, dprev):
        if torch.is_grad_enabled():
            raise RuntimeError("allscan() has no second derivative (create_graph=True)")
        with torch.autocast(dprev.device.type, enabled=False):
            return _gradients(ctx, dprev.contiguous())


def _gradients(ctx, dprev):
    decay, transition, prev = ctx.saved_tensors
    scan, given = ctx.scan, decay if decay is not None else ctx.number
    dstate = scan.scan(dprev, given, transition=transition, adjoint=True, reverse=not ctx.reverse)
    ddecay = dtransition = dinitial = None
    if ctx.needs_input_grad[1]:
        rows = (dstate * prev).sum(-1)
        if decay.ndim < rows.ndim:
            rows = rows.sum(-1)
        ddecay = rows.sum_to_size(decay.shape)
    if ctx.needs_input_grad[2]:
        dtransition = dstate @ prev.transpose(-1, -2)
    if ctx.needs_input_grad[3]:
        dinitial = torch.zeros_like(prev)
        if scan.comm.rank == (scan.comm.size - 1 if ctx.reverse else 0):
            if transition is not None:
                dinitial = transition.transpose(-1, -2) @ dstate + dprev
            elif decay is None:
                dinitial = dprev if ctx.number == 0 else dprev + dstate * (1.0 if ctx.number is None else ctx.number)
            else:
                factor = decay[(...,) + (None,) * (prev.ndim - decay.ndim)] if decay.ndim else decay
                dinitial = torch.where(factor == 0, dprev, factor * dstate + dprev)
    return dstate, ddecay, dtransition, dinitial, None, None


def _foreign(state, decay, transition, comm, initial_state, reverse, out):
    """CuPy and NumPy arrays, through DLPack, without a copy."""
    if not hasattr(state, "__dlpack__"):
        raise TypeError(f"state must be a torch tensor or a CuPy or NumPy array, got {type(state).__name__}")

    def tensor(array):
        if any(stride < 0 for stride in getattr(array, "strides", None) or ()):
            raise ValueError("an array with negative strides cannot be shared: make a copy of it")
        return torch.from_dlpack(array) if hasattr(array, "__dlpack__") else array

    result = allscan(
        tensor(state), tensor(decay), transition=tensor(transition), comm=comm, initial_state=tensor(initial_state),
        reverse=reverse, out=tensor(out),
    )  # fmt: skip
    if type(state).__module__.partition(".")[0] == "cupy":
        import cupy

        result = cupy.from_dlpack(result)  # puts CuPy's stream behind torch's
        return result if out is None else out
    return result.numpy() if out is None else out
