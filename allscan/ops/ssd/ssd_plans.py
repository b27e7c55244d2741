"""Launch plans of zeco_ssd: block sizes, grids and kernel arguments, in the order of ssd_fwd.py and ssd_bwd.py."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...base.tiling import cdiv, next_power_of_2
from ...launch.plan import Buffer
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

SPLIT_HEADS = 32  # most heads whose contributions to dB and dC one program adds up
LONGEST, SHORTEST = 4096, 512  # tokens of a segment on a GPU
FULL = 0.9  # a segment is the longest whose programs fill this part of their waves

# (num_warps, num_stages) of bfloat16 inputs and large states; rows of the states in a program of ssd_gradients_kernel
TUNED = dict(state=(8, 3), output=(4, 1), adjoint=(8, 3), gradients=(8, 2))
WIDE = dict(state=(8, 3), output=(8, 2), adjoint=(8, 2))  # of states of more than 8,192 elements in a program
GRADIENT_ROWS = 128
TWO_HEADS = {"state", "adjoint"}  # kernels whose programs take two heads of up to 64 columns


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

    @functools.cached_property
    def segment(self) -> int:
        """Tokens of a segment."""
        if self.invariant:
            return self.invariant
        if not self.num_sms:
            return 2 * CHUNK_TOKENS
        _, BV, heads = self.blocks
        of_one = self.B * cdiv(self.V, BV) * self.H // heads  # programs
        waves, best = (2 if self.sequences > self.B else 1), (0.0, SHORTEST)
        length = LONGEST
        while length >= SHORTEST:
            programs = of_one * cdiv(self.T, length)
            full = programs / (self.num_sms * max(waves, cdiv(programs, self.num_sms)))
            if full >= FULL:
                return length
            best = max(best, (full, length))
            length //= 2
        return best[1]


shape_of = functools.lru_cache(4096)(SSDShape)  # one object per shape: SSDShape hashes by identity


class Options(NamedTuple):
    """scale: of y. The others determine d_t of ``zeco_ssd``."""

    scale: float = 1.0
    softplus: bool = False
    least: float = 0.0
    most: float = float("inf")


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
        self, carrier: StateCarrier, shape: SSDShape, options: Options, strides: Inputs, layout: Layout, reverse: bool
    ) -> None:
        super().__init__(carrier, shape, layout, reverse)
        self.scale, self.strides = options.scale, strides._asdict() | dict(dy=shape.H * shape.V)
        self.N, self.P, self.G = shape.K, shape.V, shape.G
        self.cuda = shape.device == "cuda"
        self.chunks = self.constant(layout.chunks)
        self.dtype = torch.bfloat16 if shape.is_bf16 else torch.float32  # of stored states
        self.common: dict[str, Any] = dict(H=self.H, G=self.G, N=self.N, P=self.P, BT=CHUNK_TOKENS)
        self.common["PRECISION"] = "bf16" if shape.is_bf16 else "tf32x3"
        BH = min(16 if self.cuda else 1024, next_power_of_2(self.H))
        self.by_heads = layout.num_chunks * cdiv(self.H, BH)
        _, softplus, least, most = options  # of the kernels of d_t
        self.steps: dict[str, Any] = dict(least=least, most=most, STRIDE=strides.dt, SOFTPLUS=softplus)
        self.steps |= dict(H=self.H, BT=CHUNK_TOKENS, BH=BH, num_warps=4)

    def walk(self, kernel: Any, name: str, *tensors: Buffer | None, **fixed: Any) -> None:
        """Record a kernel that goes from chunk to chunk."""
        BK, BV, heads = self.shape.blocks
        heads = heads if name in TWO_HEADS or not self.cuda else 1
        tuned = TUNED if BK * BV <= 8192 else WIDE
        warps, stages = tuned[name] if self.shape.is_bf16 and BK <= 128 else (8, 1)
        self.launch(
            kernel,
            (cdiv(self.P, BV) * self.H // heads, self.layout.num_segments),
            *tensors,
            **self.common,
            **fixed,
            BK=BK,
            BV=BV,
            HEADS=heads,
            num_warps=warps if BK * BV * heads > 4096 else 4,
            num_stages=stages,
        )

    def strided(self, *names: str) -> dict[str, int]:
        """A kernel's parameters for the elements from one token to the next of these tensors."""
        return {f"{name.upper()}_STRIDE": self.strides[name] for name in names}

    def factors(self, x: Inputs) -> Buffer:
        """Record ssd_steps_kernel; return the factors, of one chunk more: kernels may load those of the first chunk of
        an empty segment."""
        factors = self.scratch(self.layout.num_chunks + 1, self.H, 3, CHUNK_TOKENS)
        self.launch(ssd_steps_kernel, (self.by_heads,), x.dt, x.A, x.dt_bias, self.chunks, factors, **self.steps)
        return factors

    def scores(self, x: Inputs) -> Buffer:
        """Record ssd_scores_kernel; return the scores [B, T, G, BT]."""
        scores = self.scratch(self.shape.B, self.shape.T, self.G, CHUNK_TOKENS)
        sizes = {name: self.common[name] for name in ("G", "N", "BT", "PRECISION")}
        self.launch(
            ssd_scores_kernel,
            (self.layout.num_chunks * self.G,),
            *(x.C, x.B, self.chunks, scores),
            scale=self.scale,
            **self.strided("C", "B"),
            BK=min(self.shape.blocks[0], 64),
            **sizes,
            num_warps=4,
            num_stages=1,
        )
        return scores

    def local_states(self, b: Buffer, x: Buffer, factors: Buffer, states: Buffer) -> Buffer:
        """Record the kernel that writes each segment's local state to ``states``; return the sums of gates
        [NS, H, N]. b, x: B and x; in backward C and dy."""
        sums = self.scratch(self.layout.num_segments, self.H, self.N)
        strides = ("C", "dy") if self.reverse else ("B", "x")
        self._state_kernel(strides, b, x, factors, self.segments, *[None] * 4, states, sums, REVERSE=self.reverse)
        return sums

    def chunk_states(self, x: Inputs, factors: Buffer, incoming: IncomingStates) -> Buffer:
        """Record the kernel that writes each chunk's incoming state [NC, H, N, P]."""
        states = self.of_chunks()
        tensors = x.B, x.x, factors, self.segments, *incoming, states, None, None
        self._state_kernel(("B", "x"), *tensors, REVERSE=False)
        return states

    def of_chunks(self) -> Buffer:
        return self.scratch(self.layout.num_chunks, self.H, self.N, self.P, dtype=self.dtype)

    def _state_kernel(self, strides: tuple[str, str], *tensors: Buffer | None, **fixed: Any) -> None:
        B, X = (self.strides[name] for name in strides)
        self.walk(ssd_state_kernel, "state", *tensors, scale=self.scale, B_STRIDE=B, X_STRIDE=X, **fixed)

    def outputs(
        self,
        x: Inputs,
        scores: Buffer,
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
            *(x.C, x.B, x.x, scores, factors, self.segments, *incoming, x.D, x.z, dy, y, dz),
            scale=self.scale,
            **self.strided("C", "B", "x", "z", "dy"),
            PER_CHANNEL=per_channel(x.D),
        )

    def adjoint(
        self, x: Inputs, dy: Buffer, scores: Buffer, factors: Buffer, back: IncomingStates, dx: Buffer
    ) -> Buffer:
        """Record ssd_adjoint_kernel; return the gradients of the chunks' outgoing states."""
        dstates = self.of_chunks()
        self.walk(
            ssd_adjoint_kernel,
            "adjoint",
            *(x.C, x.B, dy, scores, factors, self.segments, *back, x.D, dstates, dx),
            scale=self.scale,
            **self.strided("C", "B", "dy"),
            PER_CHANNEL=per_channel(x.D),
        )
        return dstates

    def gradients(
        self,
        x: Inputs,
        dy: Buffer,
        scores: Buffer,
        factors: Buffer,
        of_states: tuple[Buffer, Buffer],
        grads: Inputs,
    ) -> None:
        """Record the kernels that write the gradients of B, C, D, A, dt and dt_bias."""
        NC, tokens, is_bf16 = self.layout.num_chunks, self.shape.B * self.shape.T, self.shape.is_bf16
        BK, BV, _ = self.shape.blocks
        BJ = min(BK, GRADIENT_ROWS if is_bf16 else 64) if self.cuda else BK
        BV = min(BV, 64 if is_bf16 else 32) if self.cuda else BV
        NJ, split = cdiv(self.N, BJ), cdiv(self.H // self.G, SPLIT_HEADS)
        parts, through = self.scratch(NC, self.H, NJ, 2, CHUNK_TOKENS), self.scratch(NC, self.H, NJ)
        scalars = self.scratch(NC, self.H, 2, CHUNK_TOKENS)
        of_D = None if x.D is None else self.scratch(NC, *x.D.shape)
        dc, db = grads.C, grads.B
        if split > 1:
            dc, db = (self.scratch(split, tokens, self.G, self.N) for _ in "cb")
        self.launch(
            ssd_gradients_kernel,
            (NC * self.G * split * NJ,),
            *(x.C, x.B, x.x, dy, factors, self.chunks, *of_states, dc, db, parts, through),
            tokens=tokens,
            scale=self.scale,
            **self.strided("C", "B", "x", "dy"),
            **self.common,
            BJ=BJ,
            BV=BV,
            SPLIT=split,
            num_warps=TUNED["gradients"][0] if is_bf16 and BJ > 32 else 8 if BJ > 32 else 4,
            num_stages=TUNED["gradients"][1] if is_bf16 else 1,
        )
        self.launch(
            ssd_pairs_kernel,
            (NC * self.H,),
            *(x.x, dy, scores, factors, self.chunks, parts, through, scalars, of_D),
            **self.strided("x", "dy"),
            **{name: value for name, value in self.common.items() if name != "N"},
            BV=BV,
            NJ=NJ,
            PER_CHANNEL=per_channel(x.D),
            num_warps=4,
            num_stages=1,
        )
        if split > 1:
            for part, whole in ((dc, grads.C), (db, grads.B)):
                self._sum(part, whole, split)
        of_A, of_bias = (None if t is None else self.scratch(NC, self.H) for t in (x.A, x.dt_bias))
        pointers = x.dt, x.A, x.dt_bias, factors, self.chunks, scalars, grads.dt, of_A, of_bias
        self.launch(ssd_step_grad_kernel, (self.by_heads,), *pointers, **self.steps)
        for part, whole in ((of_A, grads.A), (of_bias, grads.dt_bias), (of_D, grads.D)):
            if part is not None:
                self._sum(part, whole, NC)

    def _sum(self, parts: Buffer, whole: Buffer, number: int) -> None:
        width = math.prod(whole.shape)
        few = number <= 64
        BN, BW = (min(64, next_power_of_2(number)), 1024) if few else (128, 16)
        if not self.cuda:
            BN, BW = next_power_of_2(max(1, number)), min(4096, next_power_of_2(max(1, width)))
        grid = (cdiv(width, BW),)
        self.launch(ssd_sums_kernel, grid, parts, whole, parts=number, width=width, BN=BN, BW=BW, num_warps=4)


def per_channel(D: Any) -> bool:
    """Whether D, or its buffer, is [H, P]."""
    return D is not None and len(D.shape) == 2


def forward_plan(
    shape: SSDShape, options: Options, strides: Inputs, layout: Layout, carrier: StateCarrier, *tensors: Tensor | None
) -> SSDPlan:
    """Return the plan of forward, whose output is y. ``tensors``: Inputs, initial or None, final or None,
    saved_buffer."""
    plan = SSDPlan(carrier, shape, options, strides, layout, False)
    buffers = plan.inputs(tensors)
    x, (initial, final, saved_buffer) = Inputs(*buffers[:-3]), buffers[-3:]
    fwd_epoch, incoming, *_ = plan.saved_parts(saved_buffer)
    y = plan.output(*x.x.shape, dtype=x.x.dtype)
    factors, scores = plan.factors(x), plan.scores(x)
    sums = plan.local_states(x.B, x.x, factors, incoming.states)
    plan.carry(carrier, sums, incoming, (initial, final), fwd_epoch)
    plan.join_carry()
    plan.outputs(x, scores, factors, incoming, y)
    plan.end()
    return plan


def backward_plan(
    shape: SSDShape, options: Options, strides: Inputs, layout: Layout, carrier: StateCarrier, *tensors: Tensor | None
) -> SSDPlan:
    """Return the plan of backward, whose outputs are the gradients of the Inputs that are not None. ``tensors``:
    Inputs, dy, dfinal or None, dinitial or None, saved_buffer.

    The kernel that makes the chunks' states again needs no remote gradient and overlaps with the carry."""
    plan = SSDPlan(carrier, shape, options, strides, layout, True)
    buffers = plan.inputs(tensors)
    x, (dy, dfinal, dinitial, saved_buffer) = Inputs(*buffers[:-4]), buffers[-4:]
    grads = Inputs(*[t if t is None else plan.output(*t.shape, dtype=t.dtype) for t in x])
    fwd_epoch, incoming, *_ = plan.saved_parts(saved_buffer)
    back = plan.incoming_states()
    factors, scores = plan.factors(x), plan.scores(x)
    if x.z is not None:
        dout, dy = dy, plan.scratch(*dy.shape, dtype=dy.dtype)
        plan.outputs(x, scores, factors, incoming, dy, dout, grads.z)
    sums = plan.local_states(x.C, dy, factors, back.states)
    states = plan.carry(
        carrier, sums, back, (dfinal, dinitial), fwd_epoch, lambda: plan.chunk_states(x, factors, incoming)
    )
    plan.join_carry()
    dstates = plan.adjoint(x, dy, scores, factors, back, grads.x)
    plan.gradients(x, dy, scores, factors, (states, dstates), grads)
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
