"""Forward and backward passes of a delta rule over the states of a rank's chunks, with All-Scan over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...base.caches import Recent
from ...base.tiling import cdiv, is_hopper, next_power_of_2, power_of_2_below
from ...comm.communicator import Communicator
from ...launch.plan import Buffer, Plan, with_places
from ...shmem_kernels.delta_state import (
    adjoint_kernel,
    delta_carry_kernel,
    delta_states_kernel,
    scalar_gradient_kernel,
    summary_kernel,
)
from ...shmem_kernels.segments import delta_segments_kernel
from ...tokens.packing import CHUNK_TOKENS, Layout
from ..carrier import AllScanCarrier, CarriedState, InOrderCarrier
from .records import BoundaryStates, ChunkOperands, DeltaShape, IncomingStates, LocalGrads, SavedStates, Scratch

PRECISION = {torch.bfloat16: "bf16", torch.float16: "tf32x3", torch.float32: "tf32x3"}  # see gla_plans


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
        carry=dict(BC=16, BJ=min(64, BK), num_warps=4 if BK <= 128 else 8),
        states=several if wide else several | dict(BV=min(64, BV_max), num_warps=4),
        local=several if wide else several | dict(num_stages=3),
        adjoint=several,
        gradients=dict(BV=min(32 if wide else 64, BV_max), BJ=min(32 if wide else 64, BK), num_warps=4, num_stages=1),
    )


# On other GPUs than Hopper, unless BV is smaller. With more columns code for A100s spills kilobytes of registers, and
# code of Triton 3.6 to 3.8 for Blackwell needs more tensor memory than the 512 columns of a multiprocessor; that of
# KDA's gradients also with 32 channels in float32 (ptxas gets 16 wrong for Hopper only, see blocks.product_of_parts)
NARROW = "output local adjoint scalar_output scalar_states scalar_local scalar_adjoint"
OFF_HOPPER = dict.fromkeys(NARROW.split(), dict(BV=64, num_warps=8))
OFF_HOPPER |= dict.fromkeys(("gradient", "rest"), dict(BJ=16, BV=32))


def blocks_of_cpus(BK: int, BV_max: int) -> dict[str, dict[str, int]]:
    """Return the block sizes for the interpreter, whose time grows with the number of operations."""
    several = dict(BV=BV_max, BJ=BK)
    return dict(
        summary=dict(BR=BK, BV=BV_max),
        carry=dict(BC=max(BK, BV_max), BJ=BK),
        states=several,
        local=several,
        adjoint=several,
        gradients=several,
    )


class StatePass:
    """Forward and backward passes over the states of this rank's chunks. Each plan is recorded once and serves all
    calls that differ in their tensors only.

    layout: the Layout of this rank's tokens, with segments of delta_segment_length.
    """

    def __init__(self, comm: Communicator, layout: Layout, shape: DeltaShape) -> None:
        B, H, HK, K, V, dtype, scalar, zigzag, in_order = shape
        self.comm, self.layout, self.B, self.H, self.K, self.V, self.dtype = comm, layout, B, H, K, V, dtype
        self.zigzag, self.num_states = zigzag, 2 * B if zigzag else B
        self.alone = comm.size == 1 and not zigzag  # nothing is sent
        self.summarizes = not self.alone or layout.num_segments > B  # a segment has another one, or a rank, after it
        self.in_order = in_order
        self.carrier = (InOrderCarrier if in_order else AllScanCarrier).of(comm, dense=True)
        BK = max(16, next_power_of_2(K))
        self.common = dict(H=H, K=K, V=V, BK=BK)
        self.chunked = dict(HK=HK, BT=CHUNK_TOKENS, SCALAR=scalar, TOTALS=False, PRECISION=PRECISION[dtype])
        self.blocks = self._fitted(blocks, blocks_of_cpus)
        batch = 1 if zigzag else B  # shape of chunks in fla, also for packed sequences
        self.of_chunks = batch, layout.num_chunks // batch, H, K, V
        self.of_states, self.of_transitions = ((layout.num_segments, H, K, width) for width in (V, K))
        self._plans = Recent()

    def _fitted(self, of_hopper: Callable[..., Any], of_cpus: Callable[..., Any]) -> dict[str, dict[str, int]]:
        """Return the block sizes of kernels on this device, from those on Hopper and on CPUs."""
        widths, device = (self.common["BK"], max(16, next_power_of_2(self.V))), self.comm.device
        if device.type != "cuda":
            return of_cpus(*widths)
        sizes = of_hopper(*widths, self.dtype)
        if not is_hopper(device):
            for name, smaller in OFF_HOPPER.items():
                if name in sizes and sizes[name]["BV"] >= smaller["BV"]:
                    sizes[name] = sizes[name] | smaller  # some names share one dict
        return sizes

    def forward(self, x: ChunkOperands, ends: BoundaryStates, saved_states: SavedStates) -> list[Tensor]:
        """Run forward; return (h, the incoming state of each chunk [B, chunks of each, H, K, V] in k's dtype; v_new,
        like u). Fills ``saved_states``, and ``ends`` for the sequences that end on this rank."""
        return self._run(self._forward, x, ends, saved_states)

    def turn(
        self, x: ChunkOperands, d: LocalGrads, dfinal: Tensor | None, saved_states: SavedStates, scale: float
    ) -> tuple[Any, ...]:
        """Recompute h and v_new of forward, overlapped with the scan of the gradient; return (h, v_new,
        ``IncomingStates`` of gradients for ``backward``). dfinal: [N, H, K, V] or None."""
        h, v_new, *incoming = self._run(self._turn, x, d, (dfinal,), saved_states, scale=scale)
        return h, v_new, IncomingStates(*incoming)

    def backward(
        self, x: ChunkOperands, d: LocalGrads, incoming: IncomingStates, dinitial: Tensor | None, scale: float
    ) -> list[Tensor]:
        """Run backward; return (dh, the gradient of each chunk's outgoing state, like h; dv', like dv). Fills dinitial
        for the sequences that begin on this rank."""
        return self._run(self._backward, x._replace(u=None), d, incoming, (dinitial,), scale=scale)

    def forward_of_none(self, ends: BoundaryStates, saved_states: SavedStates) -> None:
        """Run ``forward`` on a rank without tokens: it forwards the incoming state."""
        k, v, g = self._nothing()
        self.forward(ChunkOperands(k, k, v, g), ends, saved_states)

    def backward_of_none(self, ends: BoundaryStates, saved_states: SavedStates) -> None:
        """Run ``turn`` and ``backward`` on a rank without tokens."""
        k, v, g = self._nothing()
        x, d = ChunkOperands(k, k, v, g, k), LocalGrads(v, v)
        *_, incoming = self.turn(x, d, ends.inputs, saved_states, 1.0)
        self.backward(x, d, incoming, ends.outputs, 1.0)

    def _nothing(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys, values and gates of one token. Kernels read at most one gate of them and do not use it."""
        make = self.comm.memory.step.new_zeros
        k, v = (make(1, 1, self.H, width, dtype=self.dtype) for width in (self.K, self.V))
        return k, v, make(k.shape[: 3 if self.chunked["SCALAR"] else 4], dtype=torch.float32)

    def gradients(
        self, x: ChunkOperands, v_new: Tensor, d: LocalGrads, states: Sequence[Tensor], scale: float
    ) -> list[Tensor]:
        """Return (dq, dk, dw like w, dg like g) of a rule with one gate per head: see scalar_gradient_kernel. states:
        (h, dh). d: with dv'."""
        return self._run(self._gradients, x._replace(u=None), (v_new,), d, tuple(states), scale=scale)

    def total(self, x: ChunkOperands) -> list[Tensor]:
        """Return (this rank's local state [B * H, K, V], its transition [B * H, K, K]). The layout's sequences must
        neither begin nor end on this rank."""
        return self._run(self._total, x)

    def total_back(self, x: ChunkOperands, d: LocalGrads, scale: float) -> list[Tensor]:
        """Return the local state and transition of the gradient's scan, which runs from the last token to the first."""
        return self._run(self._total_back, x, d, scale=scale)

    def _run(self, record: Callable[..., Sequence[Buffer | None]], *groups: tuple[Any, ...], **fixed: Any) -> list[Any]:
        """Run the plan that ``record(plan, *buffers, **fixed)`` recorded at the first call with such tensors;
        ``groups`` are tuples of tensors, whose sizes the layout and the first tensor determine. Returns the tensors of
        the buffers that ``record`` returned, None for None."""
        tensors = [x for group in groups for x in group]
        key = record.__name__, tensors[0].shape, *fixed.values(), *[x if x is None else x.dtype for x in tensors]
        found = self._plans.get(key)
        if found is None:
            found = self._plans.remember(key, with_places(*self.recorded(record, *groups, **fixed)))
        plan, order = found
        outputs = plan.run(self.carrier, *[x for x in tensors if x is not None])
        return [i if i is None else outputs[i] for i in order]

    def recorded(
        self, record: Callable[..., Sequence[Buffer | None]], *groups: tuple[Any, ...], **fixed: Any
    ) -> tuple[Plan, Sequence[Buffer | None]]:
        """Record a plan; return (the plan, the result of ``record``). See _run."""
        plan = Plan(self.comm.graphs)
        inputs = [[x if x is None else plan.input(x) for x in group] for group in groups]
        return plan, record(plan, *map(_like, groups, inputs), **fixed)

    def _forward(self, plan: Plan, x: ChunkOperands, ends: BoundaryStates, saved_states: SavedStates) -> tuple:
        outputs = self._chunks(plan, x.k, x.u)
        saved_states = _words(plan, saved_states)
        local = plan.scratch(*self.of_states)
        if self.summarizes:
            self._summaries(plan, x, saved_states.transitions, local)
        scratch = self._scratch(plan.scratch, plan.scratch, False)
        self._carry(plan, saved_states, local, ends.inputs, False, scratch)
        return self._states(plan, x, scratch.incoming(saved_states.incoming), ends.outputs, outputs)

    def _turn(
        self, plan: Plan, x: ChunkOperands, d: LocalGrads, ends: tuple, saved_states: SavedStates, scale: float
    ) -> tuple:
        outputs, (dfinal,) = self._chunks(plan, x.k, x.u), ends
        saved_states = _words(plan, saved_states)
        incoming, scratch = plan.output(*self.of_states), self._scratch(plan.scratch, plan.output, True)
        local = self._local_gradients(plan, x, d, dfinal, scale)
        with plan.side_stream(lambda carrier: carrier.stream()):
            self._carry(plan, saved_states._replace(incoming=incoming), local, dfinal, True, scratch)
        self._states(plan, x, IncomingStates(saved_states.incoming), None, outputs)
        plan.join()
        return *outputs, *scratch.incoming(incoming)

    def _backward(
        self, plan: Plan, x: ChunkOperands, d: LocalGrads, incoming: IncomingStates, ends: tuple, scale: float
    ) -> tuple:
        (dinitial,) = ends
        outputs = self._chunks(plan, x.k, d.dv)
        self._adjoint(plan, x, d, incoming, (*outputs, dinitial), scale)
        return outputs

    def _gradients(
        self, plan: Plan, x: ChunkOperands, of: tuple, d: LocalGrads, states: tuple, scale: float
    ) -> list[Buffer]:
        outputs = [plan.output_like(like) for like in (x.w, x.w, x.w, x.g)]
        chunked = {name: value for name, value in self.chunked.items() if name not in ("SCALAR", "TOTALS")}
        grid, table = (self.layout.num_chunks, self.H), plan.constant(self.layout.chunks)
        tensors = x.q, x.k, *of, x.g, d.do, d.dv, *states, table, *outputs
        self._launch(plan, "gradients", scalar_gradient_kernel, grid, *tensors, scale=scale, **chunked)
        return outputs

    def _total(self, plan: Plan, x: ChunkOperands) -> tuple:
        scratch, saved_states = self._scratch(plan.output, plan.scratch, False), self._scratch_states(plan)
        local = plan.scratch(*self.of_states)
        self._summaries(plan, x, saved_states.transitions, local)
        self._through(plan, saved_states, local, None, False, scratch)
        return scratch.own, scratch.dense

    def _total_back(self, plan: Plan, x: ChunkOperands, d: LocalGrads, scale: float) -> tuple:
        scratch, saved_states = self._scratch(plan.output, plan.scratch, True), self._scratch_states(plan)
        self._summaries(plan, x._replace(u=d.do), saved_states.transitions, plan.scratch(*self.of_states))
        local = self._local_gradients(plan, x, d, None, scale)
        self._through(plan, saved_states, local, None, True, scratch)
        return scratch.own, scratch.dense

    def _scratch_states(self, plan: Plan) -> SavedStates:
        """Return SavedStates in scratch memory, for a run without a scan."""
        return SavedStates(plan.scratch(*self.of_transitions), plan.scratch(*self.of_states), None)

    def _chunks(self, plan: Plan, k: Buffer, u: Buffer) -> tuple:
        """Allocate outputs (states of the chunks in k's dtype, values like u)."""
        return plan.output(*self.of_chunks, dtype=k.dtype), plan.output_like(u)

    def _scratch(self, rank: Callable[..., Buffer], segments: Callable[..., Buffer], reverse: bool) -> Scratch:
        """Allocate the Scratch. ``rank`` allocates its first and last field, ``segments`` the other two."""
        if self.in_order:
            return Scratch(None, None, None, None)
        states = self.num_states * self.H
        own, prev = rank(states, self.K, self.V), None if self.alone else segments(states, self.K, self.V)
        if self.alone or not (self.layout.left if reverse else self.layout.entered):
            return Scratch(own, None, prev, None)
        return Scratch(own, segments(*self.of_transitions), prev, rank(states, self.K, self.K))

    def _summaries(self, plan: Plan, x: ChunkOperands, transitions: Buffer, local: Buffer) -> None:
        rows, columns = cdiv(self.K, self.blocks["summary"]["BR"]), cdiv(self.V, self.blocks["summary"]["BV"])
        grid, tensors = (rows * columns, self.layout.num_segments, self.H), (x.k, x.w, x.u, x.g, self._segments(plan))
        self._launch(plan, "summary", summary_kernel, grid, *tensors, transitions, local, **self.chunked)

    def _through(
        self,
        plan: Plan,
        saved_states: SavedStates,
        local: Buffer,
        outside: Buffer | None,
        reverse: bool,
        scratch: Scratch,
    ) -> None:
        """Fill ``saved_states.incoming`` with each segment's incoming state from this rank's tokens, computed from the
        segments' local states; and all of ``scratch`` except the rank's incoming state."""
        block = self.blocks["carry"]["BC"]
        columns = cdiv(self.V, block) + (0 if scratch.through is None else cdiv(self.K, block))
        self._launch(
            plan,
            "carry",
            delta_carry_kernel,
            (columns, self.num_states * self.H),
            saved_states.transitions,
            local,
            self._segments(plan),
            plan.constant(self.layout.segments_of_states),
            outside,
            saved_states.incoming,
            scratch.through,
            scratch.own,
            scratch.dense,
            REVERSE=reverse,
        )

    def _carry(
        self,
        plan: Plan,
        saved_states: SavedStates,
        local: Buffer,
        outside: Buffer | None,
        reverse: bool,
        scratch: Scratch,
    ) -> None:
        """Record ``_through`` and the scan over the ranks."""
        if self.in_order:
            self._carry_in_order(plan, saved_states, local, outside, reverse)
            return
        self._through(plan, saved_states, local, outside, reverse, scratch)
        own, _, prev, dense = scratch
        if prev is None:
            return
        # without a sequence that spans the whole rank, the incoming state does not contribute to the outgoing state
        passes = 0 in self.layout.passing, int(self.zigzag) in self.layout.passing
        lead = 1 + self.zigzag, self.B, self.H
        own, prev, dense = (x if x is None else plan.view(x, 0, *lead, *x.shape[1:]) for x in (own, prev, dense))
        carried = CarriedState(
            own, prev, saved_states.fwd_epoch, transition=dense, passes=passes, stamp=self.layout.stamp
        )
        self.carrier.record(plan, carried, reverse, self.zigzag)

    def _carry_in_order(
        self, plan: Plan, saved_states: SavedStates, local: Buffer, outside: Buffer | None, reverse: bool
    ) -> None:
        """Record both scans of ``_carry`` as one kernel. ``saved_states.incoming`` is then each segment's full incoming
        state, including the contribution of other ranks."""
        halves, carrier = 1 + self.zigzag, self.carrier
        assert isinstance(carrier, InOrderCarrier)
        outgoing = [plan.scratch(self.B * self.H, self.K, self.V) for _ in range(halves)]
        tables = self._segments(plan), plan.constant(self.layout.segments_of_states)
        buffers = saved_states.transitions, local, *tables, outside, saved_states.incoming
        fixed = dict(H=self.H, K=self.K, V=self.V, STATES=self.B, REVERSE=reverse)
        carrier.record_halves(
            plan, delta_segments_kernel, buffers, (*outgoing, saved_states.fwd_epoch), self.layout.stamp, **fixed
        )

    def _states(
        self, plan: Plan, x: ChunkOperands, incoming: IncomingStates, final: Buffer | None, outputs: tuple
    ) -> tuple:
        h, v_new = outputs
        tensors = x.k, x.w, x.u, x.g, self._segments(plan), *incoming, h, v_new, final
        self._by_segments(plan, "states", delta_states_kernel, *tensors)
        return outputs

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
        return plan.constant(self.layout.segments)

    def _by_segments(self, plan: Plan, name: str, kernel: Any, *buffers: Buffer | None, **fixed: Any) -> None:
        grid = cdiv(self.V, self.blocks[name]["BV"]), self.layout.num_segments, self.H
        self._launch(plan, name, kernel, grid, *buffers, **self.chunked, **fixed)

    def _launch(self, plan: Plan, name: str, kernel: Any, grid: tuple, *buffers: Buffer | None, **fixed: Any) -> None:
        """Record a launch with the block sizes of ``name``. ``fixed``: the other parameters."""
        plan.launch(kernel, grid, *buffers, **self.common, **self.blocks[name], **fixed)


def _like(record: tuple[Any, ...], values: Iterable[Any]) -> tuple[Any, ...]:
    """Return ``values`` as a tuple of ``record``'s type."""
    return type(record)(*values) if hasattr(record, "_fields") else tuple(values)


def _words(plan: Plan, saved_states: SavedStates) -> SavedStates:
    """View transitions and incoming, which are saved as integers, as float32."""
    first, second = (plan.view(x, 0, *x.shape, dtype=torch.float32) for x in saved_states[:2])
    return saved_states._replace(transitions=first, incoming=second)
