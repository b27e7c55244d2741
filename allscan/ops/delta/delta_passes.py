"""Forward and backward passes of a delta rule over the states of a rank's chunks, with All-Scan over the ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...base.caches import Recent
from ...base.tiling import cdiv, next_power_of_2, power_of_2_below
from ...comm.communicator import Communicator
from ...launch.plan import Buffer, Plan, with_places
from ...shmem_kernels.delta_state import (
    DeltaSizes,
    adjoint_kernel,
    delta_state_passing_kernel,
    delta_states_kernel,
    scalar_gradient_kernel,
    summary_kernel,
)
from ...shmem_kernels.device_tables import (
    COUNT_WORDS,
    PASSES,
    SEGMENTS,
    clear_padding_kernel,
    tables_kernel,
)
from ...shmem_kernels.segment_table import SEGMENT_WORDS
from ...shmem_kernels.segments import delta_segments_kernel
from ...tokens.packing import CHUNK_TOKENS, CapacityLayout, DeviceBoundaries, Layout, even_cut
from ..carrier import AllScanCarrier, CarriedState, IncomingStates, InOrderCarrier
from ..gpu_blocks import fitted, gpu_kind

PRECISION = {torch.bfloat16: "bf16", torch.float16: "tf32x3", torch.float32: "tf32x3"}  # see gla_plans

# Records that the parts of a delta rule exchange: tensors, or plan buffers in place of tensors


class Inputs(NamedTuple):
    """Inputs of a rule [B, T, heads, ...], or their gradients. In backward of fla's rules g has sums of the gates."""

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any


class SavedStates(NamedTuple):
    """States that forward saves for backward. In a reverse scan: gradients in place of states."""

    transitions: Any  # [segments, H, K, K], float32 bits in any 4-byte dtype
    incoming: Any  # [segments, H, K, V], likewise: each segment's incoming state
    fwd_epoch: Any  # forward epoch of the call
    intermediates: Any = None  # int32 words of ChunkPass.saved


class ChunkOperands(NamedTuple):
    """Operands of the chunks for the passes between the chunks: see shmem_kernels/delta_state.py."""

    k: Any  # kg
    w: Any
    u: Any  # None in backward
    g: Any  # sums of the gates
    q: Any = None  # qg, in backward only


class LocalGrads(NamedTuple):
    """Gradients inside the chunks: of the output, and of v_new through it, or the scores Aqk to compute the latter. The
    scores [B, T, heads of v, 64] and solved, which forward saves, are in a dtype of the size of q's."""

    do: Any
    dv: Any
    scores: Any = None
    solved: Any = None  # T - 1: then r = T^T dv' is computed in place of dv'


class DeltaShape(NamedTuple):
    """Shape of a StatePass. It sends B states of H heads; with ``zigzag`` 2 * B, for the first and for the second half
    of the tokens of each batch entry or document. scalar: there is one gate per token and head, and k and q, of HK
    heads, are not multiplied by gates. dtype: of k, w, u."""

    B: int
    H: int
    HK: int
    K: int
    V: int
    dtype: torch.dtype
    scalar: bool
    zigzag: bool = False
    in_order: bool = False  # scan all segments in sequence order: see docs/invariant.md
    saves: bool = False  # forward saves the intermediates of the chunks for backward, which recomputes them otherwise


def delta_segment_length(tokens: int, H: int, num_sms: int) -> int:
    """Return the tokens of a segment, a multiple of the chunk. Segments are long, because each needs a transition, but
    there are enough for about one program on each of ``num_sms`` multiprocessors (0 on CPUs)."""
    if not num_sms:
        return 2 * CHUNK_TOKENS
    number = max(1, min(32, power_of_2_below(num_sms) // H))
    return max(4 * CHUNK_TOKENS, cdiv(cdiv(tokens, number), CHUNK_TOKENS) * CHUNK_TOKENS)


def blocks(BK: int, BV_max: int, dtype: torch.dtype) -> dict[str, dict[str, int]]:
    """Return block sizes and warps of each kernel on a GPU; they fit the registers, as
    tests/shmem_kernels/test_compile.py checks."""
    fine, BJ = dtype != torch.bfloat16, 32 if BK > 16 else 16
    wide = BK > 128 or fine
    columns = min(16 if fine else 32 if wide else 128, BV_max)
    rows = (16 if BK > 128 else 32) if fine else 64 if wide else 128
    # with 8 warps and a product of 64 rows and 16 columns, Triton 3.6 generates reads outside of shared memory
    summary = dict(num_warps=8 if BV_max >= 32 or fine else 4, num_stages=1 if wide else 3)
    several = dict(BV=columns, BJ=BJ, num_warps=8 if wide or columns == 128 else 4, num_stages=1 if wide else 2)
    return dict(
        summary=summary | dict(BR=min(rows, BK), BV=min(64 if wide else 128, BV_max)),
        state_passing=dict(BC=32 if BK == 128 else 16, BJ=min(64, BK), num_warps=8 if BK > 64 else 4),
        states=several if wide else several | dict(BV=min(64, BV_max), num_warps=4),
        local=several if wide else several | dict(num_stages=3),
        adjoint=several,
        gradients=dict(BV=min(32 if wide else 64, BV_max), BJ=min(32 if wide else 64, BK), num_warps=4, num_stages=1),
    )


def blocks_of_cpus(BK: int, BV_max: int) -> dict[str, dict[str, int]]:
    """Return the block sizes for the interpreter, whose time grows with the number of operations."""
    several = dict(BV=BV_max, BJ=BK)
    return dict(
        summary=dict(BR=BK, BV=BV_max),
        state_passing=dict(BC=max(BK, BV_max), BJ=BK),
        states=several,
        local=several,
        adjoint=several,
        gradients=several,
    )


def planned(record: Callable[..., Sequence[Buffer | None]]) -> Callable[..., list[Any]]:
    """A method of a StatePass that runs the plan which ``record(self, plan, *buffers)`` records at the first call with
    such arguments, and returns the tensors of the buffers that ``record`` returns, None for None.

    Arguments are tensors, None, numbers, or tuples of these; the layout and the first tensor determine all sizes."""

    @functools.wraps(record)
    def run(states: StatePass, *arguments: Any) -> list[Any]:
        flat = [x for group in arguments for x in (group if isinstance(group, tuple) else (group,))]
        key = record, flat[0].shape, *[getattr(x, "dtype", x) for x in flat]
        found = states.plans.get(key)
        if found is None:
            found = states.plans.remember(key, with_places(*states.recorded(record.__name__, *arguments)))
        plan, order = found
        outputs = plan.run(states.carrier, *[x for x in flat if isinstance(x, Tensor)])
        return [i if i is None else outputs[i] for i in order]

    return run


class StatePass:
    """Forward and backward passes over the states of this rank's chunks. Each plan is recorded once and serves all
    calls that differ in their tensors only.

    layout: the Layout of this rank's tokens, with segments of delta_segment_length. initial, final, dinitial, dfinal
    of methods: states of sequences [N, H, K, V] float32 and their gradients, or None; a pass fills final, or dinitial.
    """

    def __init__(self, comm: Communicator, layout: Layout, shape: DeltaShape) -> None:
        B, H, HK, K, V, dtype, scalar, zigzag, in_order, self.saves = shape
        self.comm, self.layout, self.B, self.H, self.K, self.V, self.dtype = comm, layout, B, H, K, V, dtype
        self.zigzag, self.num_states = zigzag, 2 * B if zigzag else B
        self.alone = comm.size == 1 and not zigzag  # nothing is sent
        self.summarizes = not self.alone or layout.num_segments > B  # a segment has another one, or a rank, after it
        self.in_order = in_order
        self.carrier = (InOrderCarrier if in_order else AllScanCarrier).of(comm, dense=True)
        BK = max(16, next_power_of_2(K))
        self.d = DeltaSizes(H=H, K=K, V=V, HK=HK, BT=CHUNK_TOKENS, BK=BK, SCALAR=scalar)
        self.precision = PRECISION[dtype]
        self.blocks = self._fitted(blocks, blocks_of_cpus)
        batch = 1 if zigzag else B  # shape of chunks in fla, also for packed sequences
        self.of_chunks = batch, layout.num_chunks // batch, H, K, V
        self.of_states, self.of_transitions = ((layout.num_segments, H, K, width) for width in (V, K))
        self.plans = Recent()  # by the arguments of ``planned`` methods

    def _fitted(self, of_hopper: Callable[..., Any], of_cpus: Callable[..., Any]) -> dict[str, dict[str, int]]:
        """Return the block sizes of kernels on this device, from those on Hopper and on CPUs."""
        widths, device = (self.d.BK, max(16, next_power_of_2(self.V))), self.comm.device
        if device.type != "cuda":
            return of_cpus(*widths)
        gpu = gpu_kind(device)
        return {name: fitted(gpu, name, sizes) for name, sizes in of_hopper(*widths, self.dtype).items()}

    @planned
    def forward(
        self, plan: Plan, x: ChunkOperands, initial: Buffer | None, final: Buffer | None, saved_states: SavedStates
    ) -> tuple[Buffer, Buffer]:
        """Run forward; return (h, the incoming state of each chunk [B, chunks of each, H, K, V] in k's dtype; v_new,
        like u). Fills ``saved_states``, and final for the sequences that end on this rank."""
        outputs = self._chunks(plan, x.k, x.u)
        saved_states = _words(plan, saved_states)
        local = plan.scratch(*self.of_states)
        if self.summarizes:
            self._summaries(plan, x, saved_states.transitions, local)
        incoming = self._carry(plan, saved_states, local, initial)
        self._states(plan, x, incoming, final, outputs)
        return outputs

    @planned
    def turn(
        self,
        plan: Plan,
        x: ChunkOperands,
        d: LocalGrads,
        dfinal: Buffer | None,
        saved_states: SavedStates,
        scale: float,
    ) -> tuple[Buffer | None, ...]:
        """Recompute h and v_new of forward, overlapped with the scan of the gradient; return (h, v_new, and the fields
        of IncomingStates of gradients for ``backward``)."""
        outputs = self._chunks(plan, x.k, x.u)
        saved_states = _words(plan, saved_states)
        local = self._local_gradients(plan, x, d, dfinal, scale)
        incoming = self._carry_back(plan, saved_states, local, dfinal, plan.output)
        self._states(plan, x, IncomingStates(saved_states.incoming), None, outputs)
        plan.join()
        return *outputs, *incoming

    @planned
    def backward(
        self,
        plan: Plan,
        x: ChunkOperands,
        d: LocalGrads,
        incoming: IncomingStates,
        dinitial: Buffer | None,
        scale: float,
    ) -> tuple[Buffer, Buffer]:
        """Run backward; return (dh, the gradient of each chunk's outgoing state, like h; dv', like dv). Fills dinitial
        for the sequences that begin on this rank."""
        outputs = self._chunks(plan, x.k, d.dv)
        self._adjoint(plan, x, d, incoming, (*outputs, dinitial), scale)
        return outputs

    def forward_of_none(self, initial: Tensor | None, final: Tensor | None, saved_states: SavedStates) -> None:
        """Run ``forward`` on a rank without tokens: it forwards the incoming state."""
        k, v, g = self._nothing()
        self.forward(ChunkOperands(k, k, v, g), initial, final, saved_states)

    def backward_of_none(self, dfinal: Tensor | None, dinitial: Tensor | None, saved_states: SavedStates) -> None:
        """Run ``turn`` and ``backward`` on a rank without tokens."""
        k, v, g = self._nothing()
        x, d = ChunkOperands(k, k, v, g, k), LocalGrads(v, v)
        _, _, *incoming = self.turn(x, d, dfinal, saved_states, 1.0)
        self.backward(x, d, IncomingStates(*incoming), dinitial, 1.0)

    def _nothing(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys, values and gates of one token. Kernels read at most one gate of them and do not use it."""
        make = self.comm.memory.step.new_zeros
        k, v = (make(1, 1, self.H, width, dtype=self.dtype) for width in (self.K, self.V))
        return k, v, make(k.shape[: 3 if self.d.SCALAR else 4], dtype=torch.float32)

    @planned
    def gradients(
        self, plan: Plan, x: ChunkOperands, v_new: Buffer, d: LocalGrads, states: tuple[Buffer, Buffer], scale: float
    ) -> list[Buffer]:
        """Return (dq, dk, dw like w, dg like g) of a rule with one gate per head: see scalar_gradient_kernel. states:
        (h, dh). d: with dv'."""
        outputs = [plan.output_like(like) for like in (x.w, x.w, x.w, x.g)]
        grid, table = (self.layout.num_chunks, self.H), self._table(plan, "chunks")
        tensors = x.q, x.k, v_new, x.g, d.do, d.dv, *states, table, *outputs
        fixed = dict(scale=scale, PRECISION=self.precision)
        self._launch(plan, "gradients", scalar_gradient_kernel, grid, *tensors, **fixed)
        return outputs

    @planned
    def total(self, plan: Plan, x: ChunkOperands) -> tuple[Buffer | None, ...]:
        """Return (this rank's local state [B * H, K, V], its transition [B * H, K, K]). The layout's sequences must
        neither begin nor end on this rank."""
        saved_states, local = self._scratch_states(plan), plan.scratch(*self.of_states)
        self._summaries(plan, x, saved_states.transitions, local)
        own, _, dense = self._through(plan, saved_states, local, None, False, rank=plan.output)
        return own, dense

    @planned
    def total_back(self, plan: Plan, x: ChunkOperands, d: LocalGrads, scale: float) -> tuple[Buffer | None, ...]:
        """Return the local state and transition of the gradient's scan, which runs from the last token to the first."""
        saved_states = self._scratch_states(plan)
        self._summaries(plan, x._replace(u=d.do), saved_states.transitions, plan.scratch(*self.of_states))
        local = self._local_gradients(plan, x, d, None, scale)
        own, _, dense = self._through(plan, saved_states, local, None, True, rank=plan.output)
        return own, dense

    def recorded(self, name: str, *arguments: Any) -> tuple[Plan, Sequence[Buffer | None]]:
        """Record the plan of the ``planned`` method ``name``; return (the plan, the buffers of the results)."""
        plan = Plan()

        def placed(x: Any) -> Any:
            if isinstance(x, tuple):
                return getattr(type(x), "_make", tuple)(map(placed, x))
            return plan.input(x) if isinstance(x, Tensor) else x

        return plan, getattr(type(self), name).__wrapped__(self, plan, *map(placed, arguments))

    def _scratch_states(self, plan: Plan) -> SavedStates:
        """Return SavedStates in scratch memory, for a run without a scan."""
        return SavedStates(plan.scratch(*self.of_transitions), plan.scratch(*self.of_states), None)

    def _chunks(self, plan: Plan, k: Buffer, u: Buffer) -> tuple[Buffer, Buffer]:
        """Allocate outputs (states of the chunks in k's dtype, values like u)."""
        return plan.output(*self.of_chunks, dtype=k.dtype), plan.output_like(u)

    def _summaries(self, plan: Plan, x: ChunkOperands, transitions: Buffer, local: Buffer) -> None:
        tensors = x.k, x.w, x.u, x.g, self._segments(plan), transitions, local
        self._summarize(plan, summary_kernel, *tensors)

    def _summarize(self, plan: Plan, kernel: Any, *tensors: Buffer) -> None:
        """Record the kernel of each segment's transition and local state."""
        rows, columns = cdiv(self.K, self.blocks["summary"]["BR"]), cdiv(self.V, self.blocks["summary"]["BV"])
        grid = rows * columns, self.layout.num_segments, self.H
        self._launch(plan, "summary", kernel, grid, *tensors, PRECISION=self.precision)

    def _through(
        self,
        plan: Plan,
        saved_states: SavedStates,
        local: Buffer,
        outside: Buffer | None,
        reverse: bool,
        segments: Callable[..., Buffer] | None = None,
        rank: Callable[..., Buffer] | None = None,
    ) -> tuple[Buffer, Buffer | None, Buffer | None]:
        """Fill ``saved_states.incoming`` with each segment's incoming state from this rank's tokens, computed from the
        segments' local states. Return (the rank's local state; transition from the rank's entry to each segment;
        transition of the whole rank). ``segments`` allocates the second, ``rank`` the other two, by default as scratch.
        """
        segments, rank = segments or plan.scratch, rank or plan.scratch
        states, through, dense = self.num_states * self.H, None, None
        own, block = rank(states, self.K, self.V), self.blocks["state_passing"]["BC"]
        programs = cdiv(self.V, block)
        if not self.alone and (self.layout.left if reverse else self.layout.entered):
            through, dense = segments(*self.of_transitions), rank(states, self.K, self.K)
            programs += cdiv(self.K, block)
        tables = self._segments(plan), self._table(plan, "segments_of_states")
        tensors = saved_states.transitions, local, *tables, outside, saved_states.incoming, through, own, dense
        self._launch(plan, "state_passing", delta_state_passing_kernel, (programs, states), *tensors, REVERSE=reverse)
        return own, through, dense

    def _carry(
        self,
        plan: Plan,
        saved_states: SavedStates,
        local: Buffer,
        outside: Buffer | None,
        reverse: bool = False,
        allocate: Callable[..., Buffer] | None = None,
    ) -> IncomingStates:
        """Record the scan over this rank's segments and the scan over the ranks. Return the segments' incoming states,
        which ``allocate`` allocates, by default as scratch."""
        if self.in_order:
            self._carry_in_order(plan, saved_states, local, outside, reverse)
            return IncomingStates(saved_states.incoming)
        own, through, dense = self._through(plan, saved_states, local, outside, reverse, allocate)
        if self.alone:
            return IncomingStates(saved_states.incoming)
        prev = (allocate or plan.scratch)(*own.shape)
        # without a sequence that spans the whole rank, the incoming state does not contribute to the outgoing state
        passes = 0 in self.layout.passing, int(self.zigzag) in self.layout.passing
        lead = 1 + self.zigzag, self.B, self.H
        state, out, transition = (x if x is None else plan.view(x, 0, *lead, *x.shape[1:]) for x in (own, prev, dense))
        carried = CarriedState(
            state,
            out,
            saved_states.fwd_epoch,
            transition=transition,
            passes=passes,
            stamp=plan.named.get("step", self.layout.stamp),
            passes_on_device=plan.named.get("passes"),
        )
        self.carrier.record(plan, carried, reverse, self.zigzag)
        return IncomingStates(saved_states.incoming, through, prev)

    def _carry_back(
        self,
        plan: Plan,
        saved_states: SavedStates,
        local: Buffer,
        dfinal: Buffer | None,
        allocate: Callable[..., Buffer] | None = None,
    ) -> IncomingStates:
        """Record ``_carry`` of the gradients on a side stream, which the caller joins."""
        gradients = saved_states._replace(incoming=(allocate or plan.scratch)(*self.of_states))
        with plan.side_stream(lambda carrier: carrier.stream()):
            return self._carry(plan, gradients, local, dfinal, True, allocate)

    def _carry_in_order(
        self, plan: Plan, saved_states: SavedStates, local: Buffer, outside: Buffer | None, reverse: bool
    ) -> None:
        """Record both scans of ``_carry`` as one kernel. ``saved_states.incoming`` is then each segment's full incoming
        state, including the contribution of other ranks."""
        transitions, incoming, fwd_epoch, _ = saved_states
        tables = self._segments(plan), self._table(plan, "segments_of_states")
        buffers = transitions, local, *tables, outside, incoming
        fixed = dict(H=self.H, K=self.K, V=self.V, STATES=self.B, REVERSE=reverse)
        assert isinstance(self.carrier, InOrderCarrier)
        self.carrier.record_halves(
            plan, delta_segments_kernel, buffers, fwd_epoch, self.zigzag, self.layout.stamp, **fixed
        )

    def _states(
        self,
        plan: Plan,
        x: ChunkOperands,
        incoming: IncomingStates,
        final: Buffer | None,
        outputs: tuple[Buffer, Buffer],
    ) -> None:
        """Fill (h, v_new), ``outputs``, and ``final`` for sequences that end on this rank, from each segment's incoming
        state."""
        tensors = x.k, x.w, x.u, x.g, self._segments(plan), *incoming, *outputs, final
        self._by_segments(plan, "states", delta_states_kernel, *tensors)

    def _local_gradients(
        self, plan: Plan, x: ChunkOperands, d: LocalGrads, dfinal: Buffer | None, scale: float
    ) -> Buffer:
        """Record the kernel for each segment's local gradient [segments, H, K, V]; return its buffer. The last segment
        of a sequence starts from dfinal, the others start from zero."""
        local = plan.scratch(*self.of_states)
        self._adjoint_kernel(plan, "local", x, d, *[None] * 6, local, dfinal, scale=scale)
        return local

    def _adjoint(
        self, plan: Plan, x: ChunkOperands, d: LocalGrads, incoming: IncomingStates, filled: tuple, scale: float
    ) -> None:
        """Fill dh, dv' and, for sequences that begin on this rank, dinitial (unless None), from each segment's incoming
        gradient."""
        self._adjoint_kernel(plan, "adjoint", x, d, *incoming, *filled, None, None, scale=scale)

    def _adjoint_kernel(
        self, plan: Plan, name: str, x: ChunkOperands, d: LocalGrads, *pointers: Buffer | None, scale: float
    ) -> None:
        scores = d.scores if d.dv is None else None
        tensors = x.q, x.k, x.w, x.g, d.do, d.dv, scores, d.solved, self._segments(plan), *pointers
        self._by_segments(plan, name, adjoint_kernel, *tensors, scale=scale)

    def _segments(self, plan: Plan) -> Any:
        return self._table(plan, "segments")

    def _table(self, plan: Plan, name: str) -> Buffer:
        """A table of the layout; that of a CapacityLayout is the plan's own."""
        return plan.named.get(name) or plan.constant(getattr(self.layout, name))

    def _output(self, plan: Plan, v: Buffer, boundaries: DeviceBoundaries | None) -> Buffer:
        """Allocate o. With ``boundaries`` record the kernels that write the plan's tables from them, and zeros to rows
        of o that are no tokens of a sequence."""
        o = plan.output_like(v)
        if boundaries is None:
            return o
        layout, memory, (size, rank) = self.layout, self.comm.memory, (self.comm.size, self.comm.rank)
        assert isinstance(layout, CapacityLayout)
        N, T, NS, NC = layout.sequences, layout.tokens, layout.num_segments, layout.num_chunks
        cut = boundaries.cut or plan.constant(even_cut(size, T, self.comm.device))
        segments = plan.scratch(NS, SEGMENT_WORDS.value, dtype=torch.int32)
        chunks = plan.scratch(NC, 2, dtype=torch.int32)
        counts = plan.scratch(COUNT_WORDS, dtype=torch.int32)
        step: Any = boundaries.step
        of_states, passes = plan.view(counts, SEGMENTS.value, 1, 2), plan.view(counts, PASSES.value, 1)
        plan.named |= dict(segments=segments, chunks=chunks, segments_of_states=of_states, passes=passes, step=step)
        inputs: Any = boundaries.boundaries, cut, plan.constant(memory.step_of(layout.stamp))
        faults = plan.constant(memory.fault), plan.constant(memory.record)
        BN = next_power_of_2(N)
        BI = min(max(1, 4096 // BN), next_power_of_2(max(NS, NC)))
        numbers = dict(rank=rank, P=size, N=N, T=T, NS=NS, NC=NC, SEGMENT=layout.segment, BT=CHUNK_TOKENS)
        numbers |= dict(BN=BN, BP=next_power_of_2(size), BI=BI, num_warps=max(4, min(16, BN // 256)))
        plan.launch(
            tables_kernel, (cdiv(max(NS, NC), BI),), *inputs, segments, chunks, counts, step, *faults, **numbers
        )
        W = math.prod(o.shape[2:])
        plan.launch(clear_padding_kernel, (cdiv(T, 16),), o, counts, T=T, W=W, BR=16, BW=min(next_power_of_2(W), 512))
        return o

    def _by_segments(self, plan: Plan, name: str, kernel: Any, *buffers: Buffer | None, **fixed: Any) -> None:
        """Record a launch of one program for each block of columns, segment and head."""
        grid = cdiv(self.V, self.blocks[name]["BV"]), self.layout.num_segments, self.H
        self._launch(plan, name, kernel, grid, *buffers, **fixed, PRECISION=self.precision)

    def _launch(self, plan: Plan, name: str, kernel: Any, grid: tuple, *buffers: Buffer | None, **fixed: Any) -> None:
        """Record a launch with the block sizes of ``name``. ``fixed``: other parameters, and fields of ``d``."""
        options = self.blocks[name] | fixed
        sizes = {field: options.pop(field) for field in DeltaSizes._fields if field in options}
        plan.launch(kernel, grid, *buffers, d=self.d._replace(**sizes), **options)


def _words(plan: Plan, saved_states: SavedStates) -> SavedStates:
    """View transitions and incoming, which are saved as integers, as float32."""
    first, second = (plan.view(x, 0, *x.shape, dtype=torch.float32) for x in saved_states[:2])
    return saved_states._replace(transitions=first, incoming=second)
