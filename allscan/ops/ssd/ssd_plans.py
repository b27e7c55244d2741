"""Launch plans of zeco_ssd: block sizes, grids and kernel arguments, in the order of ssd_fwd.py and ssd_bwd.py."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...base.tiling import cdiv, next_power_of_2
from ...launch.plan import Buffer
from ...shmem_kernels.ssd_blocks import SSDSizes
from ...shmem_kernels.ssd_bwd import (
    ssd_adjoint_kernel,
    ssd_gradients_kernel,
    ssd_pairs_kernel,
    ssd_step_grad_kernel,
    ssd_sums_kernel,
)
from ...shmem_kernels.ssd_fwd import ssd_output_kernel, ssd_scores_kernel, ssd_state_kernel, ssd_steps_kernel
from ...tokens.packing import CHUNK_TOKENS, Layout
from ..carrier import IncomingStates, StateCarrier
from ..gla.gla_plans import CarryPlan, Shape
from ..gpu_blocks import fitted
from ..operator import Call

SPLIT_HEADS = 32  # most heads whose contributions to dB and dC one program adds up
LONGEST, SHORTEST = 4096, 512  # tokens of a segment on a GPU
FULL = 0.9  # a segment is the longest whose programs fill this part of their waves
LEAST_PART = 8192  # least tokens of a part of the segments in backward

# (num_warps, num_stages) of bfloat16 inputs and large states
TUNED = dict(local=(4, 3), state=(4, 3), output=(4, 1), adjoint=(4, 1), pairs=(4, 3), gradients=(4, 3))
TWO_HEADS = dict(local=(8, 3), state=(8, 3), adjoint=(8, 3))  # of programs with two heads of up to 8,192 elements
WIDE = TUNED | dict(local=(8, 3), state=(8, 3), adjoint=(8, 3))  # of states of more than 8,192 elements in a program
# programs of two heads that a multiprocessor has registers for; heads are taken in twos if they fill the GPU so
RESIDENT = dict(local=2, state=1, adjoint=1)
GRADIENT_ROWS = 64  # rows of the states in a program of ssd_gradients_kernel


@dataclasses.dataclass(frozen=True, eq=False)
class SSDShape(Shape):
    """Shape of a call whose states are [N, P]: K is N, V is P, dtype that of x, gate_dtype that of dt."""

    G: int = 1
    is_bf16: bool = False  # x, B and C are bfloat16: products of bfloat16, else of three TF32 parts

    @functools.cached_property
    def blocks(self) -> tuple[int, int, int]:
        """(BK, BV, HEADS): rows and columns of a state, and most heads, of a program that goes from chunk to chunk."""
        BK, BV = max(16, next_power_of_2(self.K)), max(16, next_power_of_2(self.V))
        if self.device == "cpu":
            return BK, BV, 2 if self.H // self.G % 2 == 0 else 1
        BV = min(BV, (16384 if self.is_bf16 else 4096) // max(128, BK))
        return BK, BV, 2 if self.is_bf16 and BK * BV <= 8192 and self.H // self.G % 2 == 0 else 1

    def filled(self, segments: int, waves: int, resident: int = 1) -> float:
        """The part of its waves, at least ``waves``, that a kernel fills by so many segments, most heads a program.
        resident: programs of a multiprocessor at once."""
        _, BV, heads = self.blocks
        programs, at_once = segments * cdiv(self.V, BV) * self.H // heads, self.num_sms * resident
        return programs / (at_once * max(waves, cdiv(programs, at_once)))

    @functools.cached_property
    def segment(self) -> int:
        """Tokens of a segment."""
        if self.invariant:
            return self.invariant
        if not self.num_sms:
            return 2 * CHUNK_TOKENS
        waves, best = (2 if self.sequences > self.B else 1), (0.0, SHORTEST)
        length = LONGEST
        while length >= SHORTEST:
            full = self.filled(self.B * cdiv(self.T, length), waves)
            if full >= FULL:
                return length
            best = max(best, (full, length))
            length //= 2
        return best[1]


shape_of = functools.lru_cache(4096)(SSDShape)  # one object per shape: SSDShape hashes by identity


class Inputs(NamedTuple):
    """Tensors of the operators. Without A, dt are the gates and d_t is 1; without dt, A are the gates."""

    x: Any
    dt: Any
    A: Any
    B: Any
    C: Any
    D: Any = None
    z: Any = None
    dt_bias: Any = None


STRIDED = "x", "dt", "B", "C", "z"  # Inputs that kernels read by their strides


class SSDPlan(CarryPlan):
    """A forward or backward pass for calls of one shape. ``reverse``: backward."""

    shape: SSDShape

    def __init__(
        self, carrier: StateCarrier, shape: SSDShape, call: Call, strides: Inputs, layout: Layout, reverse: bool
    ) -> None:
        super().__init__(carrier, shape, layout, reverse)
        self.N, self.P, self.G = shape.K, shape.V, shape.G
        self.cuda = shape.device == "cuda"
        self.chunks = self.constant(layout.chunks)
        BK, BV, _ = shape.blocks
        self.d = SSDSizes(
            H=self.H,
            G=self.G,
            N=self.N,
            P=self.P,
            BT=CHUNK_TOKENS,
            BK=BK,
            BV=BV,
            BH=min(16 if self.cuda else 1024, next_power_of_2(self.H)),
            DT_STRIDE=strides.dt,
            C_STRIDE=strides.C,
            B_STRIDE=strides.B,
            X_STRIDE=strides.x,
            Z_STRIDE=strides.z,
            DY_STRIDE=self.H * self.P,
        )
        self.scaled: dict[str, Any] = dict(scale=call.scale, PRECISION="bf16" if shape.is_bf16 else "tf32x3")
        self.by_heads = layout.num_chunks * cdiv(self.H, self.d.BH)
        self.steps = steps_of(call.more) | dict(num_warps=4)

    def walk(
        self, kernel: Any, name: str, segments: int, *tensors: Buffer | None, d: SSDSizes | None = None, **fixed: Any
    ) -> None:
        """Record a kernel that goes from chunk to chunk of so many segments. d: self.d by default."""
        BK, BV, heads = self.shape.blocks
        tuned = TUNED if BK * BV <= 8192 else WIDE
        if self.cuda and name == "output":
            BV, heads, tuned = min(BV, 8192 // min(BK, 128)), 1, TUNED
        elif self.cuda and heads == 2:
            filled = self.shape.filled(segments, 1, RESIDENT[name]) >= FULL
            heads = 2 if filled or self.shape.invariant else 1  # invariant: the same kernel for every number of ranks
            tuned = TWO_HEADS if heads == 2 else TUNED
        warps, stages = tuned[name] if self.shape.is_bf16 and BK <= 128 else (8, 1)
        warps = warps if BK * BV * heads > 4096 else 4
        sizes = dict(BK=BK, BV=BV, HEADS=heads, num_warps=warps, num_stages=stages)
        sizes = fitted(self.shape.gpu, f"ssd_{name}", sizes)
        blocks = {field: sizes.pop(field) for field in ("BK", "BV", "HEADS")}
        self.launch(
            kernel,
            (cdiv(self.P, blocks["BV"]) * self.H // blocks["HEADS"], segments),
            *tensors,
            d=(d or self.d)._replace(**blocks),
            **self.scaled,
            **fixed,
            **sizes,
        )

    def factors(self, x: Inputs) -> Buffer:
        """Record ssd_steps_kernel; return the factors, of one chunk more: kernels may load those of the first chunk of
        an empty segment."""
        factors = self.scratch(self.layout.num_chunks + 1, self.H, 3, CHUNK_TOKENS)
        tensors = x.dt, x.A, x.dt_bias, self.chunks, factors
        self.launch(ssd_steps_kernel, (self.by_heads,), *tensors, d=self.d, **self.steps)
        return factors

    def scores(self, x: Inputs) -> Buffer | None:
        """Record ssd_scores_kernel; return the scores [B, T, G, BT]. None if no two heads share them."""
        if self.G == self.H:
            return None
        scores = self.scratch(self.shape.B, self.shape.T, self.G, CHUNK_TOKENS)
        options: dict[str, Any] = dict(d=self.d, num_warps=4, num_stages=1, **self.scaled)
        self.launch(ssd_scores_kernel, (self.layout.num_chunks * self.G,), x.C, x.B, self.chunks, scores, **options)
        return scores

    def local_states(self, b: Buffer, x: Buffer, factors: Buffer, states: Buffer) -> Buffer:
        """Record the kernel that writes each segment's local state to ``states``; return the sums of gates
        [NS, H, N]. b, x: B and x; in backward C and dy."""
        sums = self.scratch(self.layout.num_segments, self.H, self.N)
        tensors, every = (b, x, factors, self.segments, *[None] * 4, states, sums), range(self.layout.num_segments)
        self.state_kernel("local", *tensors, part=every, REVERSE=self.reverse)
        return sums

    def chunks_of(self, part: range) -> range:
        """The chunks of consecutive segments."""
        return range(self.layout.first_chunks[part.start], self.layout.first_chunks[part.stop])

    def state_kernel(self, name: str, *tensors: Buffer | None, part: range, REVERSE: bool) -> None:
        """Record ssd_state_kernel of a part of the segments, for "local" states or each chunk's "state"."""
        d = self.d._replace(B_STRIDE=self.d.C_STRIDE, X_STRIDE=self.d.DY_STRIDE) if REVERSE else self.d
        fixed = dict(first_segment=part.start, first_chunk=self.chunks_of(part).start, REVERSE=REVERSE)
        self.walk(ssd_state_kernel, name, len(part), *tensors, d=d, **fixed)

    def outputs(
        self,
        x: Inputs,
        scores: Buffer | None,
        factors: Buffer,
        incoming: IncomingStates,
        y: Buffer,
        dy: Buffer | None = None,
        dz: Buffer | None = None,
    ) -> None:
        """Record ssd_output_kernel."""
        self.walk(
            ssd_output_kernel,
            "output",
            self.layout.num_segments,
            *(x.C, x.B, x.x, scores, factors, self.segments, *incoming, x.D, x.z, dy, y, dz),
            PER_CHANNEL=per_channel(x.D),
        )


class BackwardPlan(SSDPlan):
    """The kernels of backward alone. The segments are processed in ``parts``, one after the other, whose chunks' states
    and gradients of states take turns in the same memory."""

    def __init__(self, carrier: StateCarrier, shape: SSDShape, call: Call, strides: Inputs, layout: Layout) -> None:
        super().__init__(carrier, shape, call, strides, layout, True)
        BJ, BV = self.d.BK, self.d.BV
        if self.cuda:
            BJ, BV = min(BJ, GRADIENT_ROWS), min(BV, 64 if shape.is_bf16 else 32)
        self.split = cdiv(self.H // self.G, SPLIT_HEADS)
        self.of_groups = self.d._replace(BV=BV, BJ=BJ, NJ=cdiv(self.N, BJ), SPLIT=self.split)
        self.tokens = dict(tokens=shape.B * shape.T)
        self.parts = self._cut(layout.first_chunks)

    def _cut(self, first_chunks: Sequence[int]) -> list[range]:
        """Cut segments with these first chunks into parts of about as many chunks: of LEAST_PART tokens or more, whose
        programs fill a GPU."""
        *firsts, chunks = first_chunks
        number = 2
        if self.cuda:
            least = next(n for n in itertools.count(1) if self.shape.filled(n, 1) >= FULL)
            least = max(least, cdiv(LEAST_PART, self.shape.segment))
            number = max(1, min(len(firsts), chunks * CHUNK_TOKENS // self.shape.segment) // least)
        inner = {bisect.bisect_left(firsts, chunks * i // number) for i in range(1, number)}
        cuts = sorted({0, *inner, len(firsts)}) if firsts else [0, 0]
        return [range(*ends) for ends in itertools.pairwise(cuts)]

    def allocate(self, x: Inputs, grads: Inputs) -> None:
        """Allocate what the kernels leave for each other, see ssd_bwd.py."""
        NC, H, G, tokens = self.layout.num_chunks, self.H, self.G, self.shape.B * self.shape.T
        most = max(1, *(len(self.chunks_of(part)) for part in self.parts))
        dtype = torch.bfloat16 if self.shape.is_bf16 else torch.float32
        self.states, self.dstates = (self.scratch(most, H, self.N, self.P, dtype=dtype) for _ in "SE")
        self.dc, self.db = grads.C, grads.B
        if self.split > 1:
            self.dc, self.db = (self.scratch(self.split, tokens, G, self.N) for _ in "cb")
        self.scalars = self.scratch(NC, H, 2, CHUNK_TOKENS)
        self.weights = self.scratch(self.split, tokens, G, CHUNK_TOKENS)
        self.terms = self.scratch(NC, H, self.of_groups.NJ, 2, CHUNK_TOKENS)
        self.through = self.scratch(NC, H, self.N)
        self.skip = None if x.D is None else self.scratch(NC, *x.D.shape)  # of D

    def pairs(self, x: Inputs, dy: Buffer, scores: Buffer | None, factors: Buffer) -> None:
        """Record ssd_pairs_kernel."""
        warps, stages = TUNED["pairs"] if self.shape.is_bf16 else (4, 1)
        options = fitted(self.shape.gpu, "ssd_pairs", dict(num_warps=warps, num_stages=stages))
        self.launch(
            ssd_pairs_kernel,
            (self.layout.num_chunks * self.G * self.split,),
            *(x.C, x.B, x.x, dy, scores, factors, self.chunks, self.scalars, self.weights, self.skip),
            **self.tokens,
            **self.scaled,
            d=self.of_groups,
            PER_CHANNEL=per_channel(x.D),
            **options,
        )

    def chunk_states(self, x: Inputs, factors: Buffer, incoming: IncomingStates, part: range) -> None:
        """Record the kernel that writes the incoming state of each chunk of a part."""
        tensors = x.B, x.x, factors, self.segments, *incoming, self.states, None, None
        self.state_kernel("state", *tensors, part=part, REVERSE=False)

    def adjoint(
        self,
        x: Inputs,
        dy: Buffer,
        scores: Buffer | None,
        factors: Buffer,
        back: IncomingStates,
        part: range,
        dx: Buffer,
    ) -> None:
        """Record ssd_adjoint_kernel of a part."""
        self.walk(
            ssd_adjoint_kernel,
            "adjoint",
            len(part),
            *(x.C, x.B, dy, scores, factors, self.segments, *back, x.D, self.dstates, dx),
            first_segment=part.start,
            first_chunk=self.chunks_of(part).start,
            PER_CHANNEL=per_channel(x.D),
        )

    def gradients(self, x: Inputs, dy: Buffer, factors: Buffer, part: range) -> None:
        """Record ssd_gradients_kernel of a part."""
        # of float32: with 8 warps, ptxas loses operands of products in TF32 (tests/support/sm90.py)
        warps, stages = TUNED["gradients"] if self.shape.is_bf16 else (4, 1)
        options = fitted(self.shape.gpu, "ssd_gradients", dict(num_warps=warps, num_stages=stages))
        chunks = self.chunks_of(part)
        self.launch(
            ssd_gradients_kernel,
            (len(chunks) * self.G * self.split * self.of_groups.NJ,),
            *(x.C, x.B, x.x, dy, self.weights, factors, self.chunks, self.states, self.dstates),
            *(self.dc, self.db, self.terms, self.through),
            first_chunk=chunks.start,
            **self.tokens,
            **self.scaled,
            d=self.of_groups,
            **options,
        )

    def step_gradients(self, x: Inputs, factors: Buffer, grads: Inputs) -> None:
        """Record the kernels that write ddt and the gradients that are sums: of A, D and dt_bias over chunks, of B and
        C over programs of one group."""
        NC = self.layout.num_chunks
        of_A, of_bias = (None if t is None else self.scratch(NC, self.H) for t in (x.A, x.dt_bias))
        self.launch(
            ssd_step_grad_kernel,
            (self.by_heads,),
            *(x.dt, x.A, x.dt_bias, factors, self.chunks, self.scalars, self.terms, self.through),
            *(grads.dt, of_A, of_bias),
            d=self.of_groups._replace(BK=next_power_of_2(self.N)),
            **self.steps,
        )
        sums = [(of_A, grads.A, NC), (of_bias, grads.dt_bias, NC), (self.skip, grads.D, NC)]
        if self.split > 1:
            sums += [(self.dc, grads.C, self.split), (self.db, grads.B, self.split)]
        for parts, whole, number in sums:
            if parts is not None:
                self._sum(parts, whole, number)

    def _sum(self, parts: Buffer, whole: Buffer, number: int) -> None:
        width = math.prod(whole.shape)
        few = number <= 64
        BN, BW = (min(64, next_power_of_2(number)), 1024) if few else (128, 16)
        if not self.cuda:
            BN, BW = next_power_of_2(max(1, number)), min(4096, next_power_of_2(max(1, width)))
        grid = (cdiv(width, BW),)
        self.launch(ssd_sums_kernel, grid, parts, whole, parts=number, width=width, BN=BN, BW=BW, num_warps=4)


def steps_of(more: str) -> dict[str, Any]:
    """The parameters of ssd_steps_kernel that determine d_t of ``zeco_ssd``, from a Call's ``more``."""
    if not more:
        return dict(least=0.0, most=math.inf, SOFTPLUS=False)
    softplus, limit = (field.partition("=")[2] for field in more.split(","))
    least, most = map(float, limit.split(" to "))
    return dict(least=least, most=most, SOFTPLUS=softplus == "True")


def per_channel(D: Any) -> bool:
    """Whether D, or its buffer, is [H, P]."""
    return D is not None and len(D.shape) == 2


def forward_plan(
    shape: SSDShape, call: Call, strides: Inputs, layout: Layout, carrier: StateCarrier, *tensors: Tensor | None
) -> SSDPlan:
    """Return the plan of forward, whose output is y. ``tensors``: Inputs, initial or None, final or None,
    saved_buffer."""
    plan = SSDPlan(carrier, shape, call, strides, layout, False)
    buffers = plan.inputs(tensors)
    x, (initial, final, saved_buffer) = Inputs(*buffers[:-3]), buffers[-3:]
    fwd_epoch, incoming, *_ = plan.saved_parts(saved_buffer)
    y = plan.output(*x.x.shape, dtype=x.x.dtype)
    factors = plan.factors(x)
    sums = plan.local_states(x.B, x.x, factors, incoming.states)
    plan.carry(carrier, sums, incoming, (initial, final), fwd_epoch)
    scores = plan.scores(x)  # overlapped with the scan
    plan.join_carry()
    plan.outputs(x, scores, factors, incoming, y)
    plan.end()
    return plan


def backward_plan(
    shape: SSDShape, call: Call, strides: Inputs, layout: Layout, carrier: StateCarrier, *tensors: Tensor | None
) -> SSDPlan:
    """Return the plan of backward, whose outputs are the gradients of the Inputs that are not None. ``tensors``:
    Inputs, dy, dfinal or None, dinitial or None, saved_buffer.

    The chunks' states of the first part, and the pairs, need no remote gradient and overlap with the carry."""
    plan = BackwardPlan(carrier, shape, call, strides, layout)
    buffers = plan.inputs(tensors)
    x, (dy, dfinal, dinitial, saved_buffer) = Inputs(*buffers[:-4]), buffers[-4:]
    grads = Inputs(*[t if t is None else plan.output(*t.shape, dtype=t.dtype) for t in x])
    fwd_epoch, incoming, *_ = plan.saved_parts(saved_buffer)
    back = plan.incoming_states()
    factors, scores = plan.factors(x), plan.scores(x)
    plan.allocate(x, grads)
    if x.z is not None:
        dout, dy = dy, plan.scratch(*dy.shape, dtype=dy.dtype)
        plan.outputs(x, scores, factors, incoming, dy, dout, grads.z)
    sums = plan.local_states(x.C, dy, factors, back.states)
    ends, first = (dfinal, dinitial), plan.parts[0]
    plan.carry(carrier, sums, back, ends, fwd_epoch, lambda: plan.chunk_states(x, factors, incoming, first))
    plan.pairs(x, dy, scores, factors)
    plan.join_carry()
    for part in plan.parts:
        if part is not first:
            plan.chunk_states(x, factors, incoming, part)
        plan.adjoint(x, dy, scores, factors, back, part, grads.x)
        plan.gradients(x, dy, factors, part)
    plan.step_gradients(x, factors, grads)
    plan.end()
    return plan


def strides_of(tensors: Sequence[Tensor | None]) -> tuple[list[Tensor | None], Inputs]:
    """Return Inputs as kernels take them, and the elements from one token to the next of those in STRIDED. A view of a
    tensor's columns is taken as it is; what is not [tokens, a row] in memory is copied."""
    taken: list[Tensor | None] = []
    strides: dict[str, int] = dict.fromkeys(Inputs._fields, 0)
    for name, x in zip(Inputs._fields, tensors):
        if x is None:
            taken.append(None)
            continue
        x = x.resolve_neg() if x.is_neg() else x
        if name in STRIDED:
            stride = _token_stride(x)
            x = x.contiguous() if stride is None else x
            strides[name] = math.prod(x.shape[2:]) if stride is None else stride
        elif not x.is_contiguous():
            x = x.contiguous()
        taken.append(x)
    return taken, Inputs(**strides)


def _token_stride(x: Tensor) -> int | None:
    """Elements from one token of x [B, T, ...] to the next; None if a copy is needed."""
    width = 1
    for size, stride in zip(reversed(x.shape[2:]), reversed(x.stride()[2:]), strict=True):
        if size > 1 and stride != width:
            return None
        width *= size
    (B, T), (batch, token) = x.shape[:2], x.stride()[:2]
    if B * T <= 1:
        return width
    stride = token if T > 1 else batch
    alike = T == 1 or B == 1 or batch == T * token
    return stride if alike and stride >= width and x.data_ptr() % 16 == 0 and stride * x.itemsize % 16 == 0 else None
