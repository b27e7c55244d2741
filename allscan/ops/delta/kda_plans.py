"""Computation inside the chunks of KDA by our own kernels: shmem_kernels/kda_fwd.py. Gated DeltaNet:
gdn_plans.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...comm.communicator import Communicator
from ...launch.plan import Buffer, Plan, Stored
from ...shmem_kernels.kda_bwd import gradient_kernel, pairs_kernel
from ...shmem_kernels.kda_fwd import anchors_kernel, operands_kernel, output_kernel
from ...tokens.packing import CHUNK_TOKENS, DeviceBoundaries, Layout, chunk_weights
from ..carrier import IncomingStates
from .delta_passes import (
    ChunkOperands,
    DeltaShape,
    Inputs,
    LocalGrads,
    SavedStates,
    StatePass,
    _words,
    planned,
)


def chunk_blocks(BK: int, BV_max: int, dtype: torch.dtype) -> dict[str, dict[str, int]]:
    """Return the fastest block sizes, warps and registers on a GPU. With operands of 32 columns ptxas 12.8 may generate
    wrong code, see product_of_parts (tests/shmem_kernels/test_compile.py checks each kernel)."""
    fine = dtype != torch.bfloat16
    both = dict(BJ=32 if fine else 64, BV=32 if fine else 64, num_warps=4, num_stages=1)
    wide = BK > 128 or fine
    columns = min(16 if fine else 32 if wide else 64, BV_max)
    output = dict(BV=columns, BJ=min(32, BK), num_warps=8 if wide else 4, num_stages=1 if wide else 2)
    if not wide and BK == 128 and BV_max >= 128:  # 64 columns would also allow one program per multiprocessor only
        output |= dict(BV=128, num_warps=8)
    found = dict.fromkeys(("operands", "strong", "solved", "pairs", "gradient", "rest"), both)
    if not fine:
        found["strong"] = both | dict(BJ=32, BV=128)
        found["solved"] = found["pairs"] = both | dict(maxnreg=168)  # three programs per multiprocessor
        # V up to 256 at once: do, r and v_new stay in shared memory, for which more columns would be too many
        found["gradient"] = both | dict(BJ=32, BV=max(64, BV_max) if BV_max <= 256 else 128)
        found["rest"] = both | dict(BJ=32)
    return found | dict(anchors=dict(num_warps=1), output=output)


def chunk_blocks_of_cpus(BK: int, BV_max: int) -> dict[str, dict[str, int]]:
    """Return the block sizes for the interpreter, whose time grows with the number of operations."""
    names = "operands", "strong", "solved", "output", "pairs", "gradient", "rest"
    return dict.fromkeys(names, dict(BJ=BK, BV=BV_max)) | dict(anchors={})


def states_of(values: tuple[int, ...], K: int, chunks: int, dtype: torch.dtype) -> list[Stored]:
    """Shapes of the chunks' incoming states and of v_new, for v's shape. Large states overflow float16."""
    fine = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    return [((chunks, values[2], K, values[3]), fine), (values, fine)]


class ChunkPass(StatePass):
    """A StatePass that also computes inside the chunks: forward and backward are one plan each. KDA."""

    own, scalar = True, False

    def __init__(self, comm: Communicator, layout: Layout, shape: DeltaShape) -> None:
        super().__init__(comm, layout, shape._replace(HK=shape.H, scalar=False))
        self.d = self.d._replace(TOTALS=True)
        self.blocks |= self._fitted(chunk_blocks, chunk_blocks_of_cpus)
        self.HK = shape.HK
        self.weights = chunk_weights(CHUNK_TOKENS, layout.weights.device)

    @staticmethod
    def saved(values: tuple[int, ...], K: int, chunks: int, dtype: torch.dtype, saves: bool) -> list[Stored]:
        """Shapes of the tensors of the chunks that forward saves for backward, for v's shape: with ``saves`` qg, kg, w,
        u, the sums of each chunk's gates (one row more: see chunk_decay of delta_state.py) and the chunks' anchors."""
        if not saves:
            return []
        keys, H = ((*values[:3], K), dtype), values[2]
        return [keys, keys, keys, (values, dtype), ((chunks + 1, H, K), torch.float32), ((chunks, H), torch.int32)]

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
        """Run the whole forward pass; return (o, None, Aqk, T - 1). Fills ``saved_states`` and final like
        ``forward``. boundaries: of a CapacityLayout."""
        v, saved_states = x.v, _words(plan, saved_states)
        o = self._output(plan, v, boundaries)
        solved = tuple(plan.output(*v.shape[:3], CHUNK_TOKENS, dtype=v.dtype) for _ in ("Aqk", "T - 1"))
        qg, kg, w, u, sums, strong = operands = self._operands_memory(plan, v, saved_states)
        self._operands(plan, "operands", x, solved, operands, scale)
        self._anchors(plan, x.g, strong, ALL=False)
        self._operands(plan, "strong", x, solved, operands, scale)
        if self.saves:
            self._anchors(plan, x.g, strong, ALL=True)
        local = plan.scratch(*self.of_states)
        if self.summarizes:
            self._summaries(plan, ChunkOperands(kg, w, u, sums), saved_states.transitions, local)
        incoming = self._carry(plan, saved_states, local, initial)
        tensors = qg, kg, w, u, solved[0], sums, self._segments(plan), *incoming, o, final
        self._by_segments(plan, "output", output_kernel, *tensors, scale=scale)
        return o, None, *solved

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
        """Run the whole backward pass; return (dq, dk for each head of v, dv, dg, dbeta). Fills dinitial. d: do, and
        Aqk and T - 1 in scores and solved."""
        q, k, v, g, beta = x
        saved_states, (dq, dk, dv, dg, dbeta) = _words(plan, saved_states), self._gradients_memory(plan, x)
        qg, kg, w, u, sums, strong = operands = self._operands_memory(plan, v, saved_states)
        if not self.saves:
            self._operands(plan, "solved", x, (d.scores, d.solved), operands, scale)
        between = ChunkOperands(kg, w, u, sums, qg)
        local = self._local_gradients(plan, between, d, dfinal, scale)
        back = self._carry_back(plan, saved_states, local, dfinal)
        (h, v_new), (dh, r) = self._states_memory(plan, v), self._states_memory(plan, v)
        self._states(plan, between, IncomingStates(saved_states.incoming), None, (h, v_new))
        plan.join()
        self._adjoint(plan, between, d, back, (dh, r, dinitial), scale)
        if not self.saves:
            self._anchors(plan, g, strong, ALL=True)
        chunks, strong, weights = self._tables(plan, strong)
        programs = self.layout.num_chunks * self.H
        pairs = plan.scratch(programs, 2, CHUNK_TOKENS, CHUNK_TOKENS, dtype=h.dtype)
        parts = plan.scratch(programs, 3, CHUNK_TOKENS)
        inputs: tuple[Any, ...] = v, beta, chunks, v_new, d.do, r
        outputs: tuple[Buffer, ...] = dv, pairs, parts
        self._launch_chunks(plan, "pairs", pairs_kernel, *inputs, *outputs, scale=scale)
        inputs = q, k, g, beta, chunks, strong, weights, h, dh, v_new, d.do, r, pairs, parts
        outputs = dq, dk, dg, dbeta
        for name, REST in ("gradient", False), ("rest", True):
            self._launch_chunks(plan, name, gradient_kernel, *inputs, *outputs, scale=scale, REST=REST)
        return dq, dk, dv, dg, dbeta

    def _states_memory(self, plan: Plan, v: Buffer) -> list[Buffer]:
        """Allocate h and v_new, or dh and r."""
        stored = states_of(v.shape, self.K, self.layout.num_chunks, v.dtype)
        return [plan.scratch(*shape, dtype=dtype) for shape, dtype in stored]

    def _saved(self, plan: Plan, v: Buffer, saved_states: SavedStates) -> list[Buffer]:
        """Return the tensors of ``saved`` in the buffer that forward saves."""
        stored = self.saved(v.shape, self.K, self.layout.num_chunks, v.dtype, self.saves)
        return plan.views(saved_states.intermediates, stored)

    def _operands_memory(self, plan: Plan, v: Buffer, saved_states: SavedStates) -> list[Buffer]:
        """Return the operands of the chunks: in the buffer that forward saves, or scratch."""
        stored = self.saved(v.shape, self.K, self.layout.num_chunks, v.dtype, True)
        return self._saved(plan, v, saved_states) or [plan.scratch(*shape, dtype=dtype) for shape, dtype in stored]

    def _gradients_memory(self, plan: Plan, x: Inputs) -> tuple[Buffer, ...]:
        """Allocate dq and dk for each head of v, dv, dg and dbeta."""
        dtype = x.q.dtype if self.H == self.HK else torch.float32  # summed over value heads
        dq, dk = (plan.output(*x.v.shape[:3], self.K, dtype=dtype) for _ in "qk")
        return dq, dk, *(plan.output_like(y) for y in (x.v, x.g, x.beta))

    def _operands(
        self, plan: Plan, name: str, x: Inputs, solved: tuple, operands: Sequence[Buffer], scale: float
    ) -> None:
        """Record operands_kernel. name: "operands", "strong" for chunks of strong decay, or "solved" in backward."""
        qg, kg, w, u, sums, strong = operands
        tensors, fixed = (*x, *self._tables(plan, strong), *solved, w, u, kg, qg, sums), dict(scale=scale)
        self._launch_chunks(
            plan, name, operands_kernel, *tensors, **fixed, SOLVED=name == "solved", STRONG=name == "strong"
        )

    def _anchors(self, plan: Plan, g: Buffer, strong: Buffer, ALL: bool) -> None:
        """Record the kernel that overwrites the flags of strong chunks, or of all, by their anchors."""
        grid, chunks = (self.layout.num_chunks * self.H,), self._table(plan, "chunks")
        self._launch(plan, "anchors", anchors_kernel, grid, g, chunks, strong, ALL=ALL)

    def _tables(self, plan: Plan, strong: Buffer) -> tuple:
        return self._table(plan, "chunks"), strong, plan.constant(self.weights)

    def _launch_chunks(self, plan: Plan, name: str, kernel: Any, *buffers: Buffer | None, **fixed: Any) -> None:
        """Record a launch of one program for each chunk and head."""
        grid = (self.layout.num_chunks * self.H,)
        self._launch(plan, name, kernel, grid, *buffers, HK=self.HK, PRECISION=self.precision, **fixed)
