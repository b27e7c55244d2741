"""Computation inside the chunks of Gated DeltaNet by our own kernels: shmem_kernels/gdn.py."""

from __future__ import annotations

from typing import Any

import torch

from ...comm.communicator import Communicator
from ...launch.plan import Buffer, Plan, Stored
from ...shmem_kernels.gdn import (
    scalar_adjoint_kernel,
    scalar_gradients_kernel,
    scalar_operands_kernel,
    scalar_states_kernel,
    scalar_summary_kernel,
)
from ...tokens.packing import CHUNK_TOKENS, DeviceBoundaries, Layout
from ..carrier import IncomingStates
from .delta_passes import DeltaShape, Inputs, LocalGrads, SavedStates, _words, planned
from .kda_plans import ChunkPass, states_of


def scalar_blocks(BK: int, BV_max: int, dtype: torch.dtype) -> dict[str, dict[str, int]]:
    """Return the fastest block sizes and warps on a GPU."""
    fine = dtype != torch.bfloat16
    wide = BK > 128 or fine
    stages = 1 if wide else 3  # with 2 no copy overlaps a product
    columns = min(16 if fine else 32 if wide else 128, BV_max)
    BJ = min(32, BK)
    several = dict(BV=columns, BJ=BJ, num_warps=8 if wide or columns == 128 else 4, num_stages=stages)
    return dict(
        triangle=dict(BJ=min(BK, 32 if fine else 128), num_warps=4, num_stages=1)
        | ({} if wide else dict(maxnreg=128)),  # four programs per multiprocessor
        scalar_output=several,
        scalar_states=several,
        scalar_local=several,
        scalar_adjoint=several,
        scalar_gradients=dict(
            BJ=min(BK, 32 if fine else 64), BV=min(BV_max, 32 if fine else 128), num_warps=4, num_stages=1
        ),
    )


def scalar_blocks_of_cpus(BK: int, BV_max: int) -> dict[str, dict[str, int]]:
    """Return the block sizes for the interpreter, whose time grows with the number of operations."""
    several = dict.fromkeys(
        ("scalar_output", "scalar_states", "scalar_local", "scalar_adjoint"), dict(BV=BV_max, BJ=BK)
    )
    return several | dict(
        scalar_gradients=dict(BJ=BK, BV=BV_max),
        triangle=dict(BJ=BK),
    )


class ScalarChunkPass(ChunkPass):
    """A ChunkPass of one gate a head: between the kernels there are Aqk, T - 1 and factors of tokens alone."""

    scalar = True

    @staticmethod
    def saved(values: tuple[int, ...], K: int, chunks: int, dtype: torch.dtype, saves: bool) -> list[Stored]:
        """Shapes of the factors, of one chunk more, as kernels load those of the first chunk where there is none; with
        ``saves`` also of h and v_new."""
        factors = (chunks + 1, values[2], 3, CHUNK_TOKENS), torch.float32
        return [factors, *(states_of(values, K, chunks, dtype) if saves else ())]

    def __init__(self, comm: Communicator, layout: Layout, shape: DeltaShape) -> None:
        super().__init__(comm, layout, shape)
        self.blocks |= self._fitted(scalar_blocks, scalar_blocks_of_cpus)
        self.d = self.d._replace(HK=self.HK)

    @planned
    def whole_forward(
        self,
        plan: Plan,
        x: Inputs,
        initial: Buffer | None,
        final: Buffer | None,
        saved_states: SavedStates,
        scale: float,
        boundaries: DeviceBoundaries | None = None,
    ) -> tuple[Buffer | None, ...]:
        (q, k, v, g, beta), saved_states = x, _words(plan, saved_states)
        o, segments = self._output(plan, v, boundaries), self._segments(plan)
        scores, solved = (plan.output(*v.shape[:3], CHUNK_TOKENS, dtype=v.dtype) for _ in ("Aqk", "T - 1"))
        factors, *states = self._saved(plan, v, saved_states)
        chunks = self._table(plan, "chunks")
        fixed, grid = dict(scale=scale, PRECISION=self.precision), (self.layout.num_chunks * 2 * self.H,)
        tensors: tuple[Any, ...] = q, k, g, beta, chunks, scores, solved, factors
        self._launch(plan, "triangle", scalar_operands_kernel, grid, *tensors, **fixed)
        local = plan.scratch(*self.of_states)
        if self.summarizes:
            tensors = k, v, factors, solved, segments, saved_states.transitions, local
            self._summarize(plan, scalar_summary_kernel, *tensors)
        incoming = self._carry(plan, saved_states, local, initial)
        tensors = q, k, v, factors, scores, solved, segments, *incoming, o, *(states or (None, None)), final
        self._by_segments(plan, "scalar_output", scalar_states_kernel, *tensors, scale=scale)
        return o, None, scores, solved

    @planned
    def whole_backward(
        self,
        plan: Plan,
        x: Inputs,
        d: LocalGrads,
        dfinal: Buffer | None,
        dinitial: Buffer | None,
        saved_states: SavedStates,
        scale: float,
    ) -> tuple[Buffer, ...]:
        (q, k, v, g, _), (do, _, scores, solved) = x, d
        saved_states, segments = _words(plan, saved_states), self._segments(plan)
        dq, dk, dv, dg, dbeta = self._gradients_memory(plan, x)
        factors, *states = self._saved(plan, v, saved_states)
        chunks = self._table(plan, "chunks")
        local, inputs = plan.scratch(*self.of_states), (q, k, factors, do, scores, solved, segments)
        tensors: tuple[Any, ...] = *inputs, *[None] * 6, local, dfinal
        self._by_segments(plan, "scalar_local", scalar_adjoint_kernel, *tensors, scale=scale)
        back = self._carry_back(plan, saved_states, local, dfinal)
        h, v_new = states or self._states_memory(plan, v)
        dh, r = self._states_memory(plan, v)
        if not self.saves:
            incoming = IncomingStates(saved_states.incoming)
            tensors = None, k, v, factors, None, solved, segments, *incoming, None, h, v_new, None
            self._by_segments(plan, "scalar_states", scalar_states_kernel, *tensors, scale=scale)
        plan.join()
        tensors = *inputs, *back, dh, r, dinitial, None, None
        self._by_segments(plan, "scalar_adjoint", scalar_adjoint_kernel, *tensors, scale=scale)
        tensors = q, k, v, g, chunks, factors, h, dh, v_new, do, r, dq, dk, dv, dg, dbeta
        self._launch_chunks(plan, "scalar_gradients", scalar_gradients_kernel, *tensors, scale=scale)
        return dq, dk, dv, dg, dbeta
