"""Launches of one AllScan's scans: eager, asynchronous or recorded in a plan. Each signature has its kernel variant."""

from __future__ import annotations

import numbers
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from ..base.checks import ScanInputs, Shift, check_scan, decay_rows, plain
from ..base.errors import REMEDY
from ..base.tiling import scan_num_warps, transition_blocks, transition_tile
from ..bindings.torch_compat import current_stream_of
from ..bindings.triton_compat import launchable
from ..comm.backwards import Backwards
from ..comm.communicator import Communicator
from ..comm.host_exchange import ABORT_CHECK_S
from ..launch.compiled_kernel import Launch, channel_addresses, prefer_shared_memory_carveout, with_nvshmem
from ..launch.plan import Buffer, Plan
from ..launch.streams import AsyncLaunches
from ..shmem_kernels.channel import STAMPS, Channel
from ..shmem_kernels.links import EPOCH_BITS, NONE, PUT
from ..shmem_kernels.rails import rails_kernel
from ..shmem_kernels.scan import scan_kernel, shift_rows_kernel, transition_kernel
from ..shmem_kernels.wait import RECORD_SET
from .rails_links import Rails
from .workspace import Spec, Workspace, reset

# Ranks may launch different ones of these for one scan
KERNELS_OF_A_SCAN = frozenset(
    "scan_kernel shift_rows_kernel transition_kernel rails_kernel segments_kernel dense_segments_kernel".split()
)

_STEP = Channel._fields.index("step")  # step and the next field, fwd_epoch, change with each call
_BEHIND = _STEP + 2
_STAMPS = STAMPS.value
_SET = RECORD_SET.value


class ChannelUse(NamedTuple):
    """Selects the channel of a launch that a plan records."""

    reverse: bool  # from the last rank to the first
    adjoint: bool  # the launch is the adjoint of the launch that wrote its forward epoch
    # of the call, see tags.stamp; the Buffer of a step word (channel.py), int64 [1]; or None for Order.stamp_in of the
    # call that runs the plan, as launches outside of plans have it
    stamp: Any
    second: bool = False  # of a plan's two scans, both of one AllScan


class ScanBuffers(NamedTuple):
    """The buffers of a scan in a plan: ``state`` [..., K, V] with a decay [..., K] or a transition [..., K, K]. With
    neither, the decay is 0. fwd_epoch: see AllScan.channel. passes: with a transition, see transition_kernel."""

    state: Buffer
    out: Buffer
    fwd_epoch: Buffer
    decay: Buffer | None = None
    transition: Buffer | None = None
    passes: Buffer | None = None


class Launcher:
    """Launches the kernels of one AllScan on this rank. ``max_ctas``: maximum number of programs of a launch."""

    def __init__(
        self, comm: Communicator, spec: Spec, workspace: Workspace, rails: Rails | None, max_ctas: int
    ) -> None:
        self.comm, self.spec, self.rails, self.closed = comm, spec, rails, False
        self.shape, (self.K, self.V) = spec.shape, spec.shape[-2:]
        self._max_ctas, self._common_max_ctas = max_ctas, workspace.max_ctas
        self.num_warps = scan_num_warps(spec.tile)
        self.backwards = Backwards(comm.order, [False, False])
        self.channels = workspace.channels
        self._adjoint_channels = tuple(c._replace(ADJOINT=tl.constexpr(True)) for c in self.channels)
        # [ADJOINT][direction]: kernel arguments before and after the addresses of step and of the forward epoch
        of_both = self.channels, self._adjoint_channels
        self._addresses = [[(x[:_STEP], x[_BEHIND:]) for x in map(channel_addresses, channels)] for channels in of_both]
        self._steps = comm.memory.steps.data_ptr()
        self._prepared: dict[tuple[object, ...], PreparedScan] = {}

    def reset(self) -> None:
        """Reset the channels to their initial state, while no kernel of any rank uses them."""
        if self.rails is not None:
            self.rails.reset()
        elif self.comm.size > 1:
            for channel in self.channels:
                reset(channel)
        self.backwards.adjoint_launches, self.backwards.dropped = 0, [False, False]

    def channel(
        self,
        reverse: bool,
        fwd_epoch: Tensor | None = None,
        adjoint: bool = False,
        stamp: int = 0,
        step: Tensor | None = None,
    ) -> Channel:
        """As ``AllScan.channel``, but for any algorithm and unchecked. adjoint: the launch is the adjoint of the launch
        that wrote ``fwd_epoch``. stamp: see tags.stamp. step: a step word in place of that of the stamp."""
        channel = (self._adjoint_channels if adjoint else self.channels)[reverse]
        if fwd_epoch is None and not stamp and step is None:
            return channel
        if step is None:
            step = self.comm.memory.step_of(stamp) if stamp else channel.step
        own = step, channel.fwd_epoch if fwd_epoch is None else fwd_epoch
        return Channel._make((*channel[:_STEP], *own, *channel[_BEHIND:]))  # a third of _replace's time

    def linked(self, kernel: Any) -> Any:
        """``kernel``, linked with NVSHMEM if a link needs it."""
        puts = any(PUT in (c.SEND, c.RECV) for c in self.channels) if self.rails is None else self.rails.puts
        return with_nvshmem(kernel) if puts and self.comm.streams.cuda else kernel

    @property
    def segment_programs(self) -> int:
        """Number of programs of a scan over segments. A waiting program occupies its multiprocessor, so their number is
        bounded; on one rank no program waits."""
        tiles = self.spec.num_tiles
        return tiles if self.comm.size == 1 else min(tiles, self._max_ctas)

    def before_launch(self, kernel: Any, reverse: bool, look: bool = True) -> None:
        """Raise if the AllScan or its communicator is closed or broken. In debug mode compare the launch with the other
        ranks'. Order it after launches on other streams. look: check for dropped backward passes."""
        comm, streams = self.comm, self.comm.streams
        if self.closed:
            raise RuntimeError("this AllScan is closed")
        if comm._closed or comm.host_record[_SET] or comm.order.desync_reason is not None:
            comm.check()
        if comm.debug:
            comm.order.compare_launch(self._description(kernel, reverse))
        if streams.cuda and (current_stream_of(streams.index) != streams.last_number or streams.later):
            streams.follow()
        if look and self.backwards.dropped[reverse]:
            self._look_for_backwards(reverse)

    def _look_for_backwards(self, reverse: bool) -> None:
        """Called after a call in direction ``reverse`` had no backward on this rank. Raise RuntimeError if the rank
        that sends to this one in the backward direction has run its backward; return once that rank has begun its next
        call, or a rank has reported a fault.

        Waits for that rank's next launch. Validation under torch.no_grad() avoids the wait: it has no backward.
        """
        comm, rails = self.comm, self.rails
        self.backwards.dropped[reverse] = False
        there, back = self.channels[reverse], self.channels[not reverse]
        first = back.RECV == NONE if rails is None else rails.is_first(not reverse)
        if first or comm.streams.capturing():
            return  # this rank's backward waits for no rank: the others wait for it
        peek, now = comm.streams.peek, time.monotonic()
        deadline, look = now + comm.timeout, now + ABORT_CHECK_S
        if comm.streams.cuda:
            torch.cuda.current_stream(comm.device).synchronize()
        launched, epoch = peek(there.epoch[:1])[0], peek(back.epoch[:1])[0]
        while now < deadline and launched >= 0 <= epoch:
            if rails is None:
                begun = max(peek(there.freed[: self.spec.depth])) >= launched
                arrived = peek(back.arrived[:: self.spec.num_tiles])
                ran = any(word & EPOCH_BITS.value == epoch + 1 for word in arrived)
            else:
                begun, ran = rails.have_begun(reverse, launched), rails.have_run(not reverse, epoch)
            if ran:
                raise RuntimeError(
                    "a call with gradients had no backward on this rank, but on another one: this rank has not used "
                    "what the call returned, and its gradients since then lack that call's part. Use the "
                    f"result on every rank, 0 * result.sum() if need be; or torch.no_grad() on all. {REMEDY}."
                )
            now = time.monotonic()
            if begun or (now > look and comm.order.fault()):  # then another rank makes no further calls
                return
            look = now + ABORT_CHECK_S if now > look else look
            time.sleep(1e-3)

    def after_launch(self, compiled: Any) -> None:
        if self.comm.streams.cuda:
            prefer_shared_memory_carveout(compiled)
        else:
            self.comm.check()  # the interpreter has run the kernel by now

    def _description(self, kernel: Any, reverse: bool) -> str:
        name = "scan" if name_of(kernel) in KERNELS_OF_A_SCAN else name_of(kernel)
        return f"{name} over {self.shape}" + (", reverse" if reverse else "")

    def prepared_scan(
        self,
        key: tuple[object, ...],
        inputs: ScanInputs,
        reverse: bool,
        transposed: bool = False,
        adjoint_launch: bool = False,
    ) -> PreparedScan:
        """The cached PreparedScan for inputs with this ``call_key``; the first call checks the inputs.

        transposed: the scan multiplies by transposed transitions; with a Shift, it shifts in the other direction.
        adjoint_launch: the launch is the adjoint of the launch that wrote its forward epoch."""
        known = key, reverse, transposed, adjoint_launch
        found = self._prepared.get(known)
        if found is not None:
            return found
        check_scan(inputs, self.shape, self.comm.device)
        _, decay, transition, initial_state, _ = inputs
        if isinstance(decay, Shift):
            neighbour_shift: bool | Shift = Shift(-decay.rows) if transposed else decay
        else:  # True for the number 0 only
            neighbour_shift = self.rails is None and isinstance(decay, numbers.Real) and decay == 0
        ndim = decay.ndim if isinstance(decay, Tensor) else 0
        strides = (self.K, 1) if ndim == len(self.shape) - 1 else (min(ndim, 1), 0)  # of decay_rows
        if transition is not None:
            if self.rails is not None:
                raise ValueError(f'transitions need algorithm="chain", this AllScan has "{self.spec.algorithm}"')
            if self.spec.tile[0] < self.K or min(self.spec.tile) < 16:
                wanted = transition_tile(self.K)
                raise ValueError(
                    f"a scan with transitions needs tiles such as {wanted}, this AllScan has {self.spec.tile}"
                )
            strides = (1, self.K) if transposed else (self.K, 1)
        has_decay, has_initial = decay is not None and not neighbour_shift, initial_state is not None
        launch = self._make_launch(transition is not None, has_decay, strides, neighbour_shift, has_initial, reverse)
        factor: Callable[[Any], Tensor] | None = None
        if transition is not None or (isinstance(decay, Tensor) and decay.shape == self.shape[:-1]):
            factor = plain
        elif has_decay:
            factor = partial(decay_rows, shape=self.shape, device=self.comm.device)
        found = self._prepared[known] = PreparedScan(self, launch, factor, reverse, adjoint_launch)
        return found

    def launch_scan(self, prepared: PreparedScan, tensors: tuple[Tensor, ...], addresses: list[int]) -> None:
        """Launch a scan's kernel with ``tensors``, which lie at ``addresses``. The last one is the forward epoch."""
        launch, reverse, adjoint = prepared.launch, prepared.reverse, prepared.adjoint_launch
        self.before_launch(launch.kernel, reverse)
        order = self.comm.order
        stamp = (order.stamp + order.call_counts[not reverse]) % _STAMPS  # inlined Order.stamp_in, for speed
        if self.rails is None and launch.ready and launchable(addresses):  # inlined _with_channel, for speed
            before, behind = self._addresses[adjoint][reverse]
            fwd_epoch = addresses.pop()
            step = self._steps + 16 * stamp if order.step_word is None else order.step_word.data_ptr()
            launch.at((*addresses, (*before, step, fwd_epoch, *behind)))
        else:
            step = order.step_word if self.rails is None else None
            channel = self.channel(reverse, tensors[-1], adjoint, stamp, step)
            self.after_launch(launch(*tensors[:-1], channel))

    def _with_channel(self, use: ChannelUse, addresses: list[int]) -> tuple[Any, ...]:
        """The arguments of ``Launch.at``: ``addresses``, with a channel in place of the last, the forward epoch's, or
        of the last two."""
        reverse, adjoint, stamp, _ = use
        before, behind = self._addresses[adjoint][reverse]
        if isinstance(stamp, Buffer):
            return (*addresses[:-2], (*before, *addresses[-2:], *behind))
        stamp = self.comm.order.stamp_in(reverse) if stamp is None else stamp
        return (*addresses[:-1], (*before, self._steps + 16 * stamp, addresses[-1], *behind))

    def record_scan(
        self, plan: Plan, buffers: ScanBuffers, use: ChannelUse, initial_state: Buffer | None = None
    ) -> None:
        """Record a scan in a plan, which runs inside a call of the communicator. initial_state: like the state, on the
        first rank in the direction of the scan."""
        if self.rails is not None:
            raise ValueError('plans require algorithm="chain"')
        state, out, fwd_epoch, decay, transition, passes = buffers
        factor = decay or transition or state
        strides = (0, 0) if factor is state else (self.K, 1)
        dense, has_decay, has_initial = (x is not None for x in (transition, decay, initial_state))
        launch = self._make_launch(dense, has_decay, strides, factor is state, has_initial, use.reverse, bool(passes))
        more = () if passes is None else (passes,)
        self.record_launch(plan, launch, (state, factor, initial_state or state, out, *more, fwd_epoch), use)

    def record_launch(self, plan: Plan, launch: Launch, buffers: Sequence[Buffer], use: ChannelUse) -> None:
        """Record a kernel's launch with ``buffers``. The last is a forward-epoch word, for which the kernel gets a
        channel with its address."""
        reverse, adjoint, stamp, second = use
        if isinstance(stamp, Buffer):
            buffers = *buffers[:-1], stamp, buffers[-1]

        def call(*tensors: Tensor) -> None:
            *others, fwd_epoch = tensors
            if isinstance(stamp, Buffer):
                channel = self.channel(reverse, fwd_epoch, adjoint, step=others.pop())
            else:
                of_call = self.comm.order.stamp_in(reverse) if stamp is None else stamp
                channel = self.channel(reverse, fwd_epoch, adjoint, of_call)
            self.after_launch(launch(*others, channel))

        # a plan runs all checks before its first launch, for which other ranks wait: that of the first scan is also for
        # the second. Debug mode compares every launch
        check = None
        if self.comm.debug or not second:
            check = partial(self.before_launch, launch.kernel, reverse, not second)
        plan.launch_with(launch, buffers, call, partial(self._with_channel, use), check)

    def _make_launch(
        self,
        dense: bool,
        has_decay: bool,
        strides: tuple[int, int],
        neighbour_shift: bool | Shift,
        has_initial: bool,
        reverse: bool,
        has_passes: bool = False,
    ) -> Any:
        """The Launch of a scan's kernel, or a RailsLaunch. dense: with transitions; strides: of decays, or of the rows
        and columns of transitions; neighbour_shift: True for a zero decay; has_passes: see transition_kernel."""
        fixed: dict[str, Any] = dict(K=self.K, V=self.V, HAS_INITIAL=has_initial)
        tiles = self.spec.num_tiles
        if dense:
            of_program = -(-tiles // self._max_ctas)
            fixed |= dict(zip(("stride_i", "stride_j"), strides)) | transition_blocks(self.spec.tile[0])
            fixed |= {} if has_passes else dict(p_passes=None)
            return Launch(self.linked(transition_kernel), (-(-tiles // of_program),), **fixed)
        fixed |= dict(num_warps=self.num_warps)
        if isinstance(neighbour_shift, Shift):
            return Launch(self.linked(shift_rows_kernel), (1,), rows=neighbour_shift.rows, **fixed)
        fixed |= dict(zip(("stride_g", "stride_k"), strides)) | dict(HAS_DECAY=has_decay)
        if self.rails is not None:
            programs = min(tiles, self._common_max_ctas)
            return self.rails.make_launch(self.linked(rails_kernel), reverse, programs, **fixed)
        programs = min(tiles, self._max_ctas)
        return Launch(self.linked(scan_kernel), (programs,), **fixed, NEIGHBOUR_SHIFT=neighbour_shift)


def name_of(kernel: Any) -> str:
    """The name of a kernel in error messages."""
    return str(getattr(kernel, "__name__", None) or kernel.fn.__name__)


class PreparedScan:
    """Runs scans of one variant, with checked inputs and a selected kernel. See ``Launcher.prepared_scan``."""

    def __init__(
        self, launcher: Launcher, launch: Any, factor: Callable[[Any], Tensor] | None, reverse: bool, adjoint: bool
    ) -> None:
        self.comm, self.launcher, self.launch = launcher.comm, launcher, launch
        self._factor = factor  # from the decay or transition, the tensor that the kernel takes
        self.reverse, self.adjoint_launch = reverse, adjoint
        self._fwd_epoch = launcher.channels[reverse].fwd_epoch
        self.backward: PreparedScan | None = None  # set by allscan()

    def run(self, inputs: ScanInputs, async_op: bool = False, fwd_epoch: Tensor | None = None) -> Any:
        """Run ``AllScan.scan`` inside a call of the communicator. fwd_epoch: see ``AllScan.channel``; with
        ``adjoint_launch`` it is the forward launch's."""
        comm = self.comm
        state, decay, transition, initial_state, out = inputs
        state = plain(state)
        initial = state if initial_state is None else plain(initial_state)
        factor = state
        if self._factor is not None:
            factor = self._factor(decay if transition is None else transition)
        written = out is not None
        if not written:
            out = torch.empty_like(state)
        tensors = state, factor, initial, out, self._fwd_epoch if fwd_epoch is None else fwd_epoch
        addresses = [x.data_ptr() for x in tensors]
        if written:
            _check_apart(tensors, transition is not None)
            if not out.is_inference():
                increment_version(out)  # torch does not see the kernel's write
        if not async_op:
            self.launcher.launch_scan(self, tensors, addresses)
            if comm.debug:
                comm._look_for_nan("the scan", result=out)
            return out
        with AsyncLaunches(comm.streams) as launches:
            self.launcher.launch_scan(self, tensors, addresses)
        if comm.debug:
            launches.wait(tensors)
            comm._look_for_nan("the scan", result=out)
        return Work(comm, out, launches, tensors)  # tensors: the side stream uses the forward epoch's memory, too


class Work:
    """The handle of an asynchronous scan, returned by ``async_op=True``.

    The scan's inputs must not be written before ``wait``. A Work that is deleted without ``wait`` frees its memory
    after the scan (in a CUDA graph's capture: at the next call after the scan). This rank has taken part in the scan
    even so. With gradients the result then counts as ignored, see ``allscan.allscan``.

    Example:
        >>> work = allscan.allscan(state, decay, comm=comm, async_op=True)
        >>> prev = work.wait()
    """

    def __init__(self, comm: Communicator, result: Tensor, launches: AsyncLaunches, read: tuple[object, ...]) -> None:
        self._comm, self.result, self._launches, self._read = comm, result, launches, read

    def wait(self) -> Tensor:
        """Let the current stream wait for the scan; the host does not wait. May be called again.

        Returns:
            The result, ready for later launches on the current stream.

        Raises:
            AllScanTimeout: if the scan is known to have failed.
            AllScanOutOfStep: likewise. A failure that is not known yet is raised by the next call, as for a synchronous
                scan.
            RuntimeError: in a CUDA graph's capture, for a scan begun before the capture: a graph cannot wait for it.
                The capture goes on.
        """
        self._launches.wait(self._read)
        self._read = ()
        self._comm.check()
        return self.result

    def __del__(self) -> None:
        if self._read:
            self._launches.release(self._read)


def check_out(inputs: ScanInputs) -> None:
    """Raise ValueError unless a scan with these inputs, which are checked, may write to ``out``. AllScan.scan checks
    the same in each call; a first call does it here, before it communicates with the other ranks."""
    state, decay, transition, initial_state, out = inputs
    state = plain(state)
    factor = state if transition is None else plain(transition)
    if isinstance(decay, Tensor):
        factor = decay_rows(decay, state.shape, state.device)
    _check_apart((state, factor, state if initial_state is None else plain(initial_state), out), transition is not None)


def _check_apart(tensors: tuple[Tensor, ...], dense: bool) -> None:
    """Raise ValueError unless ``out`` is contiguous and overlaps no input, where a program of the kernel could read
    another program's output. tensors: (state, decay or transition or state, initial_state or state, out, ...). Without
    transitions (``dense``) ``out`` may be the state's memory."""
    state, out = tensors[0], tensors[3]
    if not out.is_contiguous() or out.is_neg():
        raise ValueError("out must be contiguous and not a negated view (call out.resolve_neg())")
    begin, end = out.data_ptr(), out.data_ptr() + out.nbytes
    for name, x in zip(("state", "decay or transition", "initial_state"), tensors):
        address, in_place = x.data_ptr(), x is state and x.data_ptr() == begin and not dense
        if address < end and begin < address + x.nbytes and not in_place:
            name = "state" if x is state else name
            raise ValueError(
                f"out shares memory with {name}: pass another tensor (or state itself, without a transition)"
            )
