"""Launch plans of the GLA operator: block sizes, grids and kernel arguments, in the order of gla_fwd.py and
gla_bwd.py."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...base.tiling import cdiv, default_tile, next_power_of_2
from ...comm.backwards import FWD_EPOCHS
from ...launch.plan import Buffer, Plan, Stored, words_of
from ...launch.streams import LONG
from ...shmem_kernels.gla_blocks import GLASizes
from ...shmem_kernels.gla_bwd import da_kernel, grad_kernel, value_grad_kernel
from ...shmem_kernels.gla_fwd import (
    final_kernel,
    keys_kernel,
    operands_kernel,
    output_kernel,
    state_kernel,
    state_passing_kernel,
)
from ...shmem_kernels.gla_strong import strong_decay_grad_kernel, strong_decay_kernel
from ...shmem_kernels.segments import gated_segments_kernel
from ...tokens.packing import CHUNK_TOKENS, Layout, carried_states, most_chunks, most_segments, segment_length
from ..carrier import CarriedState, IncomingStates, InOrderCarrier, StateCarrier
from ..gpu_blocks import HOPPER, fitted
from ..operator import Call

# Tokens of a sub-block (on a GPU its token pairs fill the registers) and of a step of keys_kernel. Larger on CPUs:
# the interpreter's time grows with the number of operations.
SUB_BLOCK = {"cuda": 16, "cpu": 32}
STEP = {"cuda": 4, "cpu": 16}

APART_US = 1.75e-6  # microseconds for each element of q that a separate keys_kernel adds to forward

# Programs of the strong-decay kernels per multiprocessor (as many as are resident at once), and flags of chunks that
# a program scans in a step
LOOKERS = 2
LOOK = {"cuda": 4096, "cpu": 8}

# Tuned values for bfloat16 inputs that replace the defaults of GLAPlan.blocks, by launch. Key: BK, rows of a state.
# Value: (BV, num_warps, num_stages): columns of a state in a program, warps, stages of the loop over chunks
TUNED = dict(
    states={},
    chunks={128: (64, 4, 2)},  # state_kernel, which writes the state of every chunk
    chunks_reverse={128: (128, 8, 1)},
    output={256: (64, 4, 1)},
    output_reverse={16: (64, 4, 2), 32: (64, 4, 2), 64: (64, 4, 3), 128: (64, 4, 2)},
)
STATE_PASSING_WORDS = {"cuda": 256, "cpu": 8192}  # words of a state in a program of state_passing_kernel

# Precision of products, by input dtype. float16 cannot represent the smallest decays, so products of float16
# inputs are of three TF32 parts, as those of float32.
PRECISION = {torch.bfloat16: "bf16", torch.float16: "tf32x3", torch.float32: "tf32x3"}
# Dtype of stored operands, by input dtype. Backward's A is an exception: in bfloat16 the error of dv would be 1.2 times
# that of fla, which also stores A in float32.
OPERANDS = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float32, torch.float32: torch.float32}
A_FOR_DV = OPERANDS | {torch.bfloat16: torch.float32}


@dataclasses.dataclass(frozen=True, eq=False)
class Shape:
    """Parameters of a call that determine its plans, together with the Layout of its sequences. See ``shape_of``."""

    B: int
    T: int
    H: int
    K: int
    V: int
    sequences: int
    dtype: torch.dtype  # of q, k, v
    gate_dtype: torch.dtype
    device: str
    zigzag: int  # see checks.zigzag_of
    num_sms: int  # multiprocessors of the GPU; 0 on CPUs
    saves: bool  # forward saves the `intermediates` of the chunks for backward, which recomputes them otherwise
    invariant: int = 0  # tokens of a segment if the bits must not depend on the partition over ranks; 0: they may
    gpu: str = HOPPER  # its kind, see gpu_blocks

    @functools.cached_property
    def segment(self) -> int:
        """Tokens of a segment."""
        if self.invariant:
            return self.invariant
        packed = self.sequences > self.B
        return segment_length(self.B, self.T, self.H, self.K, self.V, packed, self.num_sms)

    @functools.cached_property
    def carried(self) -> int:
        """Number of states that are sent in each direction."""
        return carried_states(self.B, self.sequences, self.zigzag)

    @property
    def states(self) -> int:
        """Number of states that are sent in all directions."""
        return 2 * self.carried if self.zigzag else self.carried

    def incoming(self, segments: int) -> list[Stored]:
        """Shapes of IncomingStates."""
        state = self.H, self.K, self.V
        shapes = (segments, *state), (segments, self.H, self.K), (self.states, *state)
        return [(shape, torch.float32) for shape in shapes]

    def intermediates(self, chunks: int, reverse: bool) -> list[Stored]:
        """Shapes of the chunks' gates, flags of strong decay, k_out, q_in and A: see GLAPlan.allocate."""
        tokens, dtype = (self.B, self.T, self.H), OPERANDS[self.dtype]
        # with invariant, saved intermediates must have the precision of recomputed ones
        of_a = A_FOR_DV[self.dtype] if reverse or self.saves or self.invariant else dtype
        operands = [((*tokens, self.K), dtype), ((*tokens, self.K), dtype), ((*tokens, CHUNK_TOKENS), of_a)]
        return [((chunks, self.H, self.K), torch.float32), ((chunks, self.H), torch.int32), *operands]

    def all_saved(self, segments: int, chunks: int) -> list[Stored]:
        """Shapes of the buffers that forward saves for backward, which only reads them: forward epochs, incoming states
        and, with ``saves``, the intermediates of the chunks."""
        fwd_epochs: list[Stored] = [((FWD_EPOCHS,), torch.int64)]
        return fwd_epochs + self.incoming(segments) + (self.intermediates(chunks, False) if self.saves else [])

    def saved_sizes(self, segments: int, chunks: int) -> list[int]:
        """Words of each buffer of ``all_saved``."""
        return words_of(self.all_saved(segments, chunks))

    @functools.cached_property
    def saved_words(self) -> int:
        """Sum of ``saved_sizes`` for the most segments and chunks that a rank may have."""
        segments = most_segments(self.B, self.T, self.sequences, self.segment, self.zigzag)
        chunks = most_chunks(self.B, self.T, self.sequences, self.zigzag, bool(self.invariant))
        return sum(self.saved_sizes(segments, chunks))


shape_of = functools.lru_cache(4096)(Shape)  # one object per shape: Shape hashes by identity, so lookups are fast


class CarryPlan(Plan):
    """A pass whose states are scanned over this rank's segments and over the ranks.

    ``reverse``: backward.
    """

    def __init__(self, carrier: StateCarrier, shape: Shape, layout: Layout, reverse: bool) -> None:
        super().__init__()
        self.stamp = layout.stamp
        self.shape, self.layout, self.reverse = shape, layout, reverse
        self.H, self.K, self.V = shape.H, shape.K, shape.V
        self.segments, self.segments_of_states = (
            self.constant(x) for x in (layout.segments, layout.segments_of_states)
        )
        zigzag = bool(shape.zigzag)
        self.halves = 1 + zigzag, shape.carried, self.H, self.K
        # whether this rank receives a state in forward, a gradient in backward, other than with carry_in_order
        self.before = self.behind = False
        if not shape.invariant:
            self.before, self.behind = carrier.neighbours((*self.halves, self.V), zigzag)
        # set by ``carry``, for ``join_carry`` and ``end``
        self._joins_last = False  # no kernel of this rank needs the scan's result: ``end`` joins, not ``join_carry``
        self._of_final_kernel: tuple[tuple[Buffer, ...], tuple[int, ...], dict[str, Any]] | None = None

    def inputs(self, tensors: Sequence[Tensor | None]) -> list[Any]:
        """Declare the inputs of a run; None for None."""
        return [None if x is None else self.input(x) for x in tensors]

    def saved_parts(self, saved_buffer: Buffer) -> list[Any]:
        """Return [forward epoch, IncomingStates, further parts]: see Shape.all_saved."""
        stored = self.shape.all_saved(self.layout.num_segments, self.layout.num_chunks)
        parts: list[Any] = self.views(saved_buffer, stored)
        return [parts[0], IncomingStates(*parts[1 : 4 if self.before else 3]), *parts[4:]]

    def incoming_states(self) -> IncomingStates:
        """Allocate IncomingStates of gradients."""
        shapes = self.shape.incoming(self.layout.num_segments)[: 3 if self.behind else 2]
        return IncomingStates(*(self.scratch(*of) for of, _ in shapes))

    def carry(
        self,
        carrier: StateCarrier,
        sums: Buffer,
        incoming: IncomingStates,
        ends: tuple[Buffer | None, Buffer | None],
        fwd_epoch: Buffer,
        long: Callable[[], Any] | None = None,
    ) -> Any:
        """Record the scan over this rank's segments (state_passing_kernel), then the scan over the ranks. Both overlap
        with the kernels that are recorded before ``join_carry``.

        Afterwards ``states`` and ``gates`` give each segment's incoming state, ``prev`` [states, H, K, V] is this
        rank's incoming state (None: it receives none), and ``final`` holds the final states of the sequences.

        Forward has little work to overlap with the scan over the ranks: operands_kernel if keys_kernel is separate,
        otherwise none. The last rank sends to no rank, so it starts that scan first and runs state_passing_kernel while
        the scan waits. The first rank receives from no rank, so it does not wait for its scan until ``end``.

        ``long`` records kernels with few long programs, which need neither the results of state_passing_kernel nor
        those of the scan. They run after state_passing_kernel on a stream of their own (LONG). When multiprocessors
        become free, the GPU starts their programs after the scan's and before the pending programs of the current
        stream.
        Returns the result of ``long``."""
        if self.shape.invariant:
            assert isinstance(carrier, InOrderCarrier)
            return self.carry_in_order(carrier, sums, incoming, ends, fwd_epoch, long)
        (states, gates, prev), (outside, final) = incoming, ends
        H, K, V, reverse, zigzag = self.H, self.K, self.V, self.reverse, bool(self.shape.zigzag)
        halves, before, behind = self.halves, self.before, self.behind
        own, decay = self.scratch(*halves, V), self.scratch(*halves)
        BK, BV = default_tile(K, V, STATE_PASSING_WORDS[self.shape.device])
        grid = cdiv(K, BK), cdiv(V, BV), self.shape.states * H
        blocks: dict[str, Any] = dict(d=GLASizes(H=H, K=K, V=V, BK=BK, BV=BV), REVERSE=reverse, num_warps=1)
        tables = self.segments, self.segments_of_states
        if final is not None and prev is not None:
            self._of_final_kernel = (final, sums, gates, *tables, prev), grid, blocks
        first, last = behind and not (before or reverse), before and not (behind or reverse)
        self._joins_last = first
        out = own if prev is None else self.view(prev, 0, *halves, V)

        def segments() -> None:
            self.launch(state_passing_kernel, grid, states, sums, gates, *tables, outside, own, decay, final, **blocks)

        if first:
            segments()
        with self.side_stream(lambda carrier: carrier.stream()):
            if not (first or last):
                segments()
            outputs = None
            if long:
                with self.side_stream(lambda carrier: carrier.stream(LONG)):
                    outputs = long()
            if before or behind:
                carried = CarriedState(own, out, fwd_epoch, decay, stamp=self.stamp)
                carrier.record(self, carried, reverse, zigzag)
            if long:
                self.join()
        if last:
            segments()
        return outputs

    def carry_in_order(
        self,
        carrier: InOrderCarrier,
        sums: Buffer,
        incoming: IncomingStates,
        ends: tuple[Buffer | None, Buffer | None],
        fwd_epoch: Buffer,
        long: Callable[[], Any] | None,
    ) -> Any:
        """Record both scans of ``carry`` as one kernel (gated_segments_kernel). ``states`` then holds each segment's
        full incoming state, including the contribution of other ranks; later kernels add nothing to it."""
        (states, gates, _), zigzag, outputs = incoming, bool(self.shape.zigzag), None
        fixed: dict[str, int] = dict(H=self.H, K=self.K, V=self.V, STATES=self.shape.carried, REVERSE=self.reverse)
        with self.side_stream(lambda carrier: carrier.stream()):
            if long:
                with self.side_stream(lambda carrier: carrier.stream(LONG)):
                    outputs = long()
            buffers = states, sums, gates, self.segments, self.segments_of_states, *ends
            carrier.record_halves(self, gated_segments_kernel, buffers, fwd_epoch, zigzag, self.stamp, **fixed)
            if long:
                self.join()
        return outputs

    def join_carry(self) -> None:
        """Record the join of ``carry``'s stream, if later kernels need its results, and final_kernel if this rank
        receives a state and final states are wanted."""
        if not self._joins_last:
            self.join()
        if self._of_final_kernel is not None:
            buffers, grid, blocks = self._of_final_kernel
            self.launch(final_kernel, grid, *buffers, **blocks)

    def end(self) -> None:
        """Join the scan, after the last kernel of a forward pass, if ``join_carry`` has not."""
        if self._joins_last:
            self.join()


class GLAPlan(CarryPlan):
    """A forward or backward pass for calls of one shape.

    ``reverse``: backward. ``tensors``: q, k, v, g and ``others``.
    """

    def __init__(
        self,
        carrier: StateCarrier,
        shape: Shape,
        call: Call,
        layout: Layout,
        reverse: bool,
        tensors: Sequence[Tensor | None],
    ) -> None:
        super().__init__(carrier, shape, layout, reverse)
        self.scale, self.BT = call.scale, CHUNK_TOKENS
        self.BK, self.BV_max = max(16, next_power_of_2(self.K)), max(16, next_power_of_2(self.V))
        self.is_bf16 = is_bf16 = shape.dtype == torch.bfloat16  # 2-byte operands: blocks may be twice as large
        self.columns = min(64, self.BV_max)  # BV of kernels that hold no state
        self.num_stages = 3 if is_bf16 else 1
        self.dtype = OPERANDS[shape.dtype]  # of stored operands
        self.num_chunks = layout.num_chunks
        self.by_chunks = layout.num_chunks, self.H
        self.grid = self.by_chunks[::-1]  # heads first: those of a token are adjacent in memory
        self.precision = dict(PRECISION=PRECISION[shape.dtype])
        self.d = GLASizes(
            H=self.H,
            K=self.K,
            V=self.V,
            BT=self.BT,
            BK=self.BK,
            BR=STEP[shape.device] * (2 if self.BK == 256 else 1),
            BC=SUB_BLOCK[shape.device],
            BS=min(32, self.BK),
            LOOK=LOOK[shape.device],
            RANGE=23.0 if shape.dtype == torch.float32 else 115.0,
        )
        self.flags = layout.num_chunks * self.H
        self.lookers = (min(self.flags, LOOKERS * max(1, shape.num_sms)),)
        self.chunks, self.weights = self.constant(layout.chunks), self.constant(layout.weights)
        self.q, self.k, self.v, self.g, *self.others = self.inputs(tensors)

    def per_token(self, width: int, **options: Any) -> Buffer:
        return self.scratch(self.shape.B, self.shape.T, self.H, width, **options)

    def of_chunks(self, dtype: torch.dtype, **options: Any) -> Buffer:
        """Allocate scratch for a state per chunk [NC, H, K, V]."""
        return self.scratch(*self.by_chunks, self.K, self.V, dtype=dtype, **options)

    def allocate(self, saved: Sequence[Buffer], grads: Sequence[Buffer] = ()) -> None:
        """Set the intermediates of the chunks to those that forward ``saved``, or to scratch. Scratch except gate and
        strong, which backward uses to the end, shares the memory of ``grads`` if it fits: backward writes ``grads``
        last."""
        shapes = () if saved else self.shape.intermediates(self.num_chunks, self.reverse)
        scratch = [
            self.scratch(*shape, dtype=dtype, before=grads if i > 1 else ()) for i, (shape, dtype) in enumerate(shapes)
        ]
        self.gate, self.strong, self.k_out, self.q_in, self.a = saved or scratch

    def keys_apart(self, carrier: StateCarrier) -> bool:
        """Return whether forward runs a separate keys_kernel and computes q_in and A overlapped with the scan. True if
        the expected time of the scan exceeds the cost of the extra kernel."""
        shape = self.shape
        if shape.invariant:
            return False
        us = carrier.expected_us(shape.states * self.H * self.K * self.V, bool(shape.zigzag))
        return us > APART_US * shape.B * shape.T * self.H * self.K

    def keys(self) -> None:
        """Record keys_kernel."""
        self.launch(
            keys_kernel,
            self.grid,
            *(self.k, self.g, self.chunks, self.k_out, self.gate, self.strong),
            d=self.d,
            num_warps=max(1, self.BK // 128),
        )

    def operands(self, keys: bool) -> None:
        """Record operands_kernel."""
        self.launch(
            operands_kernel,
            self.grid,
            *(self.q, self.k, self.g, self.chunks, self.weights),
            *(self.gate, self.strong, self.q_in, self.k_out, self.a),
            scale=self.scale,
            d=self.d._replace(BK=min(32, self.BK)),
            **self.precision,
            KEYS=keys,
            num_warps=2 if self.is_bf16 else 4,
            num_stages=3,
        )

    def strong_operands(self) -> None:
        """Record strong_decay_kernel."""
        self.launch(
            strong_decay_kernel,
            self.lookers,
            *(self.q, self.k, self.g, self.chunks, self.strong, self.q_in, self.k_out, self.a),
            scale=self.scale,
            N=self.flags,
            d=self.d,
            **self.precision,
            **self.fitted("strong"),
        )

    def _with_state(self, kernel: Any, BK: int, name: str, *args: Buffer | None, **options: Any) -> None:
        """Record a kernel whose programs hold BK rows, BV columns of a state in registers. ``name``: see blocks."""
        sizes = self.blocks(BK, name)
        BV = sizes.pop("BV")
        grid = cdiv(self.V, BV) * cdiv(self.K, BK), self.H, self.layout.num_segments
        options |= sizes | self.precision
        self.launch(kernel, grid, *args, scale=self.scale, d=self.d._replace(BK=BK, BV=BV), **options)

    def fitted(self, name: str, **sizes: int) -> dict[str, int]:
        """Return the block sizes and options of the launch ``name`` on this GPU, from those on Hopper."""
        return fitted(self.shape.gpu, f"gla_{name}", sizes)

    def blocks(self, BK: int, name: str) -> dict[str, int]:
        """Return BV, num_warps, num_stages for BK; TUNED[name] overrides the defaults for bfloat16 inputs."""
        BV = (16384 if self.is_bf16 else 8192) // max(128, BK)
        stages = max(1, min(self.num_stages, 512 // BK))
        default = BV, 8 if BK * BV > 8192 else 4, stages
        BV, num_warps, stages = TUNED[name].get(BK, default) if self.is_bf16 else default
        BV = min(BV, self.BV_max)
        segments = self.shape.B * cdiv(self.shape.T, self.shape.segment)  # approximate, and equal for every layout
        few = 0 if self.shape.invariant else self.shape.num_sms  # one program per multiprocessor
        while BV > 32 and BK <= 64 and cdiv(self.V, BV) * segments * self.H < few:
            BV //= 2
        return self.fitted(name, BV=BV, num_warps=num_warps if BK * BV > 8192 else 4, num_stages=stages)

    def segment_states(self, x: Buffer, y: Buffer, states: Buffer) -> Buffer:
        """Record the kernel that writes each segment's local state to ``states`` [NS, H, K, V].

        Returns the sums of gates [NS, H, K]."""
        sums = self.scratch(self.layout.num_segments, self.H, self.K)
        pointers = x, y, self.gate, self.segments, states, None, sums, *[None] * 5
        self._with_state(state_kernel, min(128, self.BK), "states", *pointers, REVERSE=self.reverse)
        return sums

    def outputs(self, incoming: IncomingStates, o: Buffer) -> None:
        """Record output_kernel. Forward does not use the parameters after o."""
        pointers = self.k_out, self.v, self.q_in, self.a, self.gate, self.segments, *incoming, o, *[None] * 4
        self._with_state(output_kernel, self.BK, "output", *pointers, REVERSE=False)

    def value_gradients(
        self, do: Buffer, incoming: IncomingStates, dv: Buffer, of_chunks: tuple[Buffer, Buffer | None]
    ) -> tuple[Buffer, Buffer]:
        """Record the kernels that write dv.

        Returns (D, the gates' gradient through the states, one sum for each block of V): see output_kernel."""
        states, low = of_chunks
        pointers: tuple[Buffer | None, ...]
        whole = self.BK <= 128
        BK, name = (self.BK, "output_reverse") if whole else (128, "chunks_reverse")
        dstates = self.of_chunks(self.dtype)
        passed = self.scratch(*self.by_chunks, cdiv(self.V, self.blocks(BK, name)["BV"]), self.K)
        if whole:
            pointers = self.q_in, do, self.k_out, self.a, self.gate, self.segments
            pointers = *pointers, *incoming, dv, states, low, dstates, passed
            self._with_state(output_kernel, BK, name, *pointers, REVERSE=True)
        else:
            pointers = self.q_in, do, self.gate, self.segments, dstates, low, None, *incoming, states, passed
            self._with_state(state_kernel, BK, name, *pointers, REVERSE=True)
            BV = min(128 if self.is_bf16 else 64, self.BV_max)
            self.launch(
                value_grad_kernel,
                (cdiv(self.V, BV), *self.grid),
                *(do, self.k_out, self.a, self.chunks, dstates, dv),
                d=self.d._replace(BK=64, BV=BV),
                **self.precision,
                num_warps=4,
                num_stages=self.num_stages,
            )
        return dstates, passed

    def chunk_states(self, incoming: IncomingStates, grads: Sequence[Buffer]) -> tuple:
        """Record the kernel that writes each chunk's incoming state [NC, H, K, V] in the format of store_split.

        Returns (states, low or None). ``grads``: buffers that are written after the last use of ``low``, which may
        share their memory."""
        states = self.of_chunks(self.dtype)
        low = self.of_chunks(torch.int8, before=grads) if self.is_bf16 else None
        pointers = self.k_out, self.v, self.gate, self.segments, states, low, None, *incoming, None, None
        self._with_state(state_kernel, min(128, self.BK), "chunks", *pointers, REVERSE=False)
        return states, low

    def score_gradients(self, do: Buffer) -> tuple:
        """Record da_kernel; return (dA, its diagonal). See load_da."""
        da = self.per_token((2 if self.is_bf16 else 1) * self.BT, dtype=self.dtype)
        diagonal = self.scratch(self.shape.B, self.shape.T, self.H)
        self.launch(
            da_kernel,
            self.grid,
            *(self.v, do, self.chunks, da, diagonal),
            scale=self.scale,
            d=self.d._replace(BV=self.columns),
            **self.precision,
            num_warps=4,
            num_stages=self.num_stages,
        )
        return da, diagonal

    def gradients(
        self, do: Buffer, of_scores: Sequence[Buffer | None], of_states: Sequence[Any], grads: Sequence[Buffer]
    ) -> None:
        """Record the kernels that write dq, dk and dg (``grads``): see grad_kernel."""
        x, d = (self.q, self.k, self.v, self.g), self.d._replace(BV=self.columns, PARTS=of_states[2].shape[2])
        # 64 also for K = 32: for 32 columns of bfloat16 the ptxas of Triton 3.6 generates wrong code
        sizes = self.fitted(
            "grad", BK=64 if self.is_bf16 else min(32, self.BK), num_warps=4, num_stages=self.num_stages
        )
        BK = sizes.pop("BK")
        self.launch(
            grad_kernel,
            (cdiv(self.K, BK), *self.grid),
            *(*x, do, self.chunks, self.weights, self.gate, self.strong),
            *(*of_scores, *of_states, *grads),
            scale=self.scale,
            d=d._replace(BK=BK),
            **self.precision,
            **sizes,
        )
        self.launch(
            strong_decay_grad_kernel,
            self.lookers,
            *(*x, do, self.chunks, self.strong, *of_scores, *of_states, *grads),
            scale=self.scale,
            N=self.flags,
            d=d,
            **self.precision,
        )


def forward_plan(shape: Shape, call: Call, layout: Layout, carrier: StateCarrier, *tensors: Tensor | None) -> GLAPlan:
    """Return the plan of forward, whose output is o. ``tensors``: q, k, v, g, initial or None, final or None,
    saved_buffer."""
    plan = GLAPlan(carrier, shape, call, layout, False, tensors)
    initial, final, saved_buffer = plan.others
    fwd_epoch, incoming, *saved = plan.saved_parts(saved_buffer)
    plan.allocate(saved)
    o = plan.output_like(plan.v)
    if apart := plan.keys_apart(carrier):
        plan.keys()
    else:
        plan.operands(True)
    plan.strong_operands()
    sums = plan.segment_states(plan.k_out, plan.v, incoming.states)
    plan.carry(carrier, sums, incoming, (initial, final), fwd_epoch)
    if apart:
        plan.operands(False)
    plan.join_carry()
    plan.outputs(incoming, o)
    plan.end()
    return plan


def backward_plan(shape: Shape, call: Call, layout: Layout, carrier: StateCarrier, *tensors: Tensor | None) -> GLAPlan:
    """Return the plan of backward, whose outputs are dv, dq, dk, dg. ``tensors``: q, k, v, g, do, dfinal or None,
    dinitial or None, saved_buffer.

    Two kernels need no remote data and overlap with the carry. da_kernel, on the caller's stream, has many short
    programs. As they end, the scan's programs start, then those of state_kernel, which has few long programs on the
    stream LONG. The remaining programs of da_kernel fill the multiprocessors that state_kernel leaves free. At
    1 x 16384 x 16 x 128 x 128 a waiting scan occupies the places of 10 to 40 of state_kernel's 512 programs. These
    programs start later and run together with da_kernel's; without da_kernel they would be an extra wave.
    """
    plan = GLAPlan(carrier, shape, call, layout, True, tensors)
    do, dfinal, dinitial, saved_buffer = plan.others
    dv, *grads = (plan.output_like(t) for t in (plan.v, plan.q, plan.k, plan.g))
    fwd_epoch, incoming, *saved = plan.saved_parts(saved_buffer)
    plan.allocate(saved, grads)
    back = plan.incoming_states()
    if not shape.saves:
        plan.operands(True)
        plan.strong_operands()
    sums, ends = plan.segment_states(plan.q_in, do, back.states), (dfinal, dinitial)
    of_chunks = plan.carry(carrier, sums, back, ends, fwd_epoch, lambda: plan.chunk_states(incoming, grads))
    of_scores = plan.score_gradients(do)
    plan.join_carry()
    of_dstates = plan.value_gradients(do, back, dv, of_chunks)
    # from here on grads hold gradients; before, low (and k_out, q_in, a unless saved) used their memory
    plan.gradients(do, of_scores, (of_chunks[0], *of_dstates), grads)
    return plan
