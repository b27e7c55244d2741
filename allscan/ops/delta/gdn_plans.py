"""Computation inside the chunks of Gated DeltaNet by our own kernels: shmem_kernels/gdn.py."""

from __future__ import annotations

from typing import Any

import torch

from ...base.tiling import cdiv
from ...comm.communicator import Communicator
from ...launch.plan import Buffer, Plan
from ...shmem_kernels.gdn import (
    factors_kernel,
    parts_kernel,
    scalar_adjoint_kernel,
    scalar_gradients_kernel,
    scalar_operands_kernel,
    scalar_states_kernel,
    scalar_summary_kernel,
)
from ...tokens.packing import CHUNK_TOKENS, Layout
from .delta_passes import _words
from .kda_plans import ChunkPass
from .records import BoundaryStates, DeltaShape, IncomingStates, Inputs, OutputGrads, Saved, SavedStates


def scalar_blocks(BK: int, BV_max: int, dtype: torch.dtype) -> dict[str, dict[str, int]]:
    """Return the fastest block sizes and warps on a GPU."""
    fine = dtype != torch.bfloat16
    wide = BK > 128 or fine
    rows = (16 if BK > 128 else 32) if fine else 64 if wide else 128
    stages = 1 if wide else 3  # with 2 no copy overlaps a product
    summary = dict(num_warps=8 if BV_max >= 32 or fine else 4, num_stages=stages)
    columns = min(16 if fine else 32 if wide else 128, BV_max)
    BJ = min(32, BK)
    several = dict(BV=columns, BJ=BJ, num_warps=8 if wide or columns == 128 else 4, num_stages=stages)
    return dict(
        factors=dict(num_warps=2),
        triangle=dict(BJ=min(BK, 32 if fine else 128), num_warps=4, num_stages=1)
        | ({} if wide else dict(maxnreg=128)),  # four programs per multiprocessor
        scalar_summary=summary | dict(BR=min(rows, BK), BV=min(64 if wide else 128, BV_max)),
        scalar_output=several,
        scalar_states=several,
        scalar_local=several,
        scalar_adjoint=several,
        scalar_gradients=dict(
            BJ=min(BK, 32 if fine else 64), BV=min(BV_max, 32 if fine else 128), num_warps=4, num_stages=1
        ),
        parts=dict(num_warps=1),
    )


def scalar_blocks_of_cpus(BK: int, BV_max: int) -> dict[str, dict[str, int]]:
    """Return the block sizes for the interpreter, whose time grows with the number of operations."""
    several = dict.fromkeys(
        ("scalar_output", "scalar_states", "scalar_local", "scalar_adjoint"), dict(BV=BV_max, BJ=BK)
    )
    return several | dict(
        factors={},
        parts={},
        scalar_gradients=dict(BJ=BK, BV=BV_max),
        triangle=dict(BJ=BK),
        scalar_summary=dict(BR=BK, BV=BV_max),
    )


class ScalarChunkPass(ChunkPass):
    """A ChunkPass of one gate a head: between the kernels there are Aqk, T - 1 and factors of tokens alone."""

    def __init__(self, comm: Communicator, layout: Layout, shape: DeltaShape) -> None:
        super().__init__(comm, layout, shape)
        self.blocks |= self._fitted(scalar_blocks, scalar_blocks_of_cpus)
        self.sizes: dict[str, Any] = dict(HK=self.HK, BT=CHUNK_TOKENS, PRECISION=self.chunked["PRECISION"])

    def record_forward(
        self, plan: Plan, x: Inputs, ends: BoundaryStates, saved_states: SavedStates, scale: float
    ) -> tuple[Buffer, ...]:
        """Record whole_forward in a plan."""
        (q, k, v, g, beta), saved_states = x, _words(plan, saved_states)
        o, segments = plan.output_like(v), self._segments(plan)
        scores, solved = (plan.output(*v.shape[:3], CHUNK_TOKENS, dtype=v.dtype) for _ in "as")
        factors, chunks = self._factors_memory(plan), plan.constant(self.layout.chunks)
        fixed = self.sizes | dict(H=self.H, K=self.K) | self.blocks["triangle"]
        grid = (self.layout.num_chunks * 2 * self.H,)
        tensors: tuple[Any, ...] = q, k, g, beta, chunks, scores, solved, factors
        plan.launch(scalar_operands_kernel, grid, *tensors, scale=scale, **fixed)
        local = plan.scratch(*self.of_states)
        if self.summarizes:
            rows, columns = cdiv(self.K, self.blocks["scalar_summary"]["BR"]), self._columns("scalar_summary")
            of_segments = rows * columns, self.layout.num_segments, self.H
            inputs = k, v, factors, solved, segments, saved_states.transitions, local
            self._launch(plan, "scalar_summary", scalar_summary_kernel, of_segments, *inputs, **self.sizes)
        scratch = self._scratch(plan.scratch, plan.scratch, False)
        self._carry(plan, saved_states, local, ends.inputs, False, scratch)
        tensors = q, k, v, factors, scores, solved, segments, *scratch.incoming(saved_states.incoming)
        self._by_chunks(plan, "output", scalar_states_kernel, *tensors, o, None, None, ends.outputs, scale=scale)
        return o, scores, solved

    def record_backward(
        self, plan: Plan, x: Inputs, saved: Saved, outer: OutputGrads, saved_states: SavedStates, scale: float
    ) -> tuple[Buffer, ...]:
        """Record whole_backward in a plan."""
        (q, k, v, g, beta), (scores, solved), (do, dfinal, dinitial) = x, saved, outer
        saved_states, segments = _words(plan, saved_states), self._segments(plan)
        dq, dk, dv, dg, dbeta = self._gradients_memory(plan, x)
        factors, chunks = self._factors_memory(plan), plan.constant(self.layout.chunks)
        programs = self.layout.num_chunks * self.H
        sizes = dict(H=self.H, BT=CHUNK_TOKENS)
        plan.launch(factors_kernel, (programs,), g, beta, chunks, factors, **sizes, **self.blocks["factors"])
        incoming, scratch = plan.scratch(*self.of_states), self._scratch(plan.scratch, plan.scratch, True)
        inputs, local = (q, k, factors, do, scores, solved, segments), plan.scratch(*self.of_states)
        self._by_chunks(plan, "local", scalar_adjoint_kernel, *inputs, *[None] * 6, local, dfinal, scale=scale)
        with plan.side_stream(lambda carrier: carrier.stream()):
            self._carry(plan, saved_states._replace(incoming=incoming), local, dfinal, True, scratch)
        h, dh = (plan.scratch(*self.of_chunks, dtype=self.fine) for _ in "hd")  # large states overflow float16
        v_new, r = (plan.scratch(*v.shape, dtype=self.fine) for _ in "vr")
        states = k, v, factors, None, solved, segments, *IncomingStates(saved_states.incoming), None, h, v_new, None
        self._by_chunks(plan, "states", scalar_states_kernel, None, *states, scale=scale)
        plan.join()
        outputs = dh, r, dinitial, None, None
        self._by_chunks(
            plan, "adjoint", scalar_adjoint_kernel, *inputs, *scratch.incoming(incoming), *outputs, scale=scale
        )
        columns = cdiv(self.K, self.blocks["scalar_gradients"]["BJ"])
        parts = plan.scratch(self.layout.num_chunks, self.H, columns, 2, CHUNK_TOKENS)
        tensors = q, k, v, g, chunks, factors, h, dh, v_new, do, r, dq, dk, dv, parts
        fixed = self.sizes | dict(H=self.H, K=self.K, V=self.V) | self.blocks["scalar_gradients"]
        plan.launch(scalar_gradients_kernel, (programs * columns,), *tensors, scale=scale, **fixed)
        plan.launch(parts_kernel, (programs,), parts, chunks, dg, dbeta, **sizes, NJ=columns, **self.blocks["parts"])
        return dq, dk, dv, dg, dbeta

    def _factors_memory(self, plan: Plan) -> Buffer:
        """Allocate the factors, of one chunk more: kernels load those of the first chunk where there is none."""
        return plan.scratch(self.layout.num_chunks + 1, self.H, 3, CHUNK_TOKENS)

    def _columns(self, name: str) -> int:
        return cdiv(self.V, self.blocks[name]["BV"])

    def _by_chunks(self, plan: Plan, name: str, kernel: Any, *buffers: Buffer | None, **fixed: Any) -> None:
        grid = self._columns("scalar_" + name), self.layout.num_segments, self.H
        self._launch(plan, "scalar_" + name, kernel, grid, *buffers, **self.sizes, **fixed)
