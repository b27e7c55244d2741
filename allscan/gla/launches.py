"""The launches of the GLA operator: block sizes, grids, and what each kernel is given, in the order of gla_fwd.py."""

from __future__ import annotations

import torch

from ..packing import CHUNK_TOKENS
from ..shmem_kernels.gla_bwd import da_kernel, grad_kernel
from ..shmem_kernels.gla_fwd import (
    carry_kernel,
    final_kernel,
    keys_kernel,
    output_kernel,
    queries_kernel,
    state_kernel,
)
from ..shmem_kernels.gla_strong import strong_decay_grad_kernel, strong_decay_kernel
from ..tiling import cdiv, default_tile, next_power_of_2

# Tokens of a sub-block, whose pairs of tokens fill the registers of a GPU, and of keys_kernel's step. The interpreter
# pays by the operation.
SUB_BLOCK = {"cuda": 16, "cpu": 32}
STEP = {"cuda": 4, "cpu": 16}

CARRY_WORDS = {"cuda": 256, "cpu": 8192}  # of a program of carry_kernel

# Operands of products on the tensor cores. float16 could not hold a decay's small end, and tf32 rounds like it.
PRECISION = {torch.bfloat16: "bf16", torch.float16: "tf32x3", torch.float32: "tf32x3"}


class Launcher:
    """Block sizes, and the launches that forward and backward share."""

    def __init__(self, q, k, v, g, scale, carrier, layout, zigzag):
        self.q, self.k, self.v, self.g, self.scale, self.carrier, self.layout = q, k, v, g, scale, carrier, layout
        self.zigzag = zigzag
        self.H, self.K, self.V = q.shape[2], q.shape[3], v.shape[3]
        self.BT = CHUNK_TOKENS
        self.BK = max(16, next_power_of_2(self.K))
        self.narrow = narrow = q.dtype == torch.bfloat16  # operands of 2 bytes: twice as much fits
        widest = (16384 if narrow else 8192) // max(128, self.BK)  # what the registers hold of a state
        self.BV = min(widest, max(16, next_power_of_2(self.V)))
        self.NT = cdiv(self.V, min(64, self.BV))  # parts of what dg has from state to state
        self.columns = min(64, max(16, next_power_of_2(self.V)))  # of V, where there is no state
        self.precision = dict(PRECISION=PRECISION[q.dtype])
        self.widths = dict(H=self.H, K=self.K, V=self.V)
        self.num_stages = 3 if narrow else 1
        self.state_stages = max(1, min(self.num_stages, 512 // self.BK))  # of loops over all rows of a state
        self.dtype = q.dtype if narrow else torch.float32  # of operands that are stored
        self.range = 23.0 if q.dtype == torch.float32 else 115.0
        self.step = STEP[q.device.type]
        self.sub_blocks = dict(BC=SUB_BLOCK[q.device.type], BS=min(32, self.BK))

    def by_segments(self, BV):
        """Grid and block sizes of a kernel that has a state [BK, BV] in registers."""
        grid = cdiv(self.V, BV), self.layout.num_segments, self.H
        num_warps = 8 if self.BK * BV > 8192 else 4
        return grid, self.widths | self.precision | dict(BT=self.BT, BK=self.BK, BV=BV, num_warps=num_warps)

    def empty(self, *shape, dtype=torch.float32):
        return self.q.new_empty(*shape, dtype=dtype)

    def keys(self):
        """(k_out, the sums of gates and the strong ones of the chunks): see keys_kernel."""
        chunks, K = self.layout.num_chunks, self.K
        k_out, gate = torch.empty_like(self.k, dtype=self.dtype), self.empty(chunks, self.H, K)
        strong = self.empty(chunks, self.H, dtype=torch.int32)
        keys_kernel[(chunks, self.H)](
            self.k, self.g, self.layout.chunks, k_out, gate, strong,
            H=self.H, K=K, BT=self.BT, BR=self.step, BK=self.BK, RANGE=self.range, num_warps=max(1, self.BK // 128),
        )  # fmt: skip
        return k_out, gate, strong

    def queries(self, gate, strong, dtype):
        """(q_in, A in ``dtype``): see queries_kernel."""
        q, k, g, chunks = self.q, self.k, self.g, self.layout.chunks
        q_in, a = torch.empty_like(q, dtype=self.dtype), self.empty(*q.shape[:3], self.BT, dtype=dtype)
        grid, shape = (self.layout.num_chunks, self.H), dict(H=self.H, K=self.K, BT=self.BT, **self.precision)
        queries_kernel[grid](
            q, k, g, chunks, self.layout.weights, gate, strong, q_in, a, self.scale,
            **shape, BK=min(32, self.BK), num_warps=2 if self.narrow else 4, num_stages=3,
        )  # fmt: skip
        strong_decay_kernel[grid](q, k, g, chunks, strong, q_in, a, self.scale, **shape, BK=self.BK, **self.sub_blocks)
        return q_in, a

    def score_gradients(self, do):
        """(dA, its diagonal): see da_kernel and load_da."""
        rows, parts = self.q.shape[:3], 2 if self.narrow else 1
        da, diagonal = self.empty(*rows, parts * self.BT, dtype=self.dtype), self.empty(*rows)
        da_kernel[(self.layout.num_chunks, self.H)](
            self.v, do, self.layout.chunks, da, diagonal, self.scale, H=self.H, V=self.V, BT=self.BT,
            BV=self.columns, **self.precision, num_warps=4, num_stages=self.num_stages,
        )  # fmt: skip
        return da, diagonal

    def gradients(self, do, gate, strong, of_scores, of_states):
        """dq, dk, dg: see grad_kernel."""
        q, k, v, g, layout = self.q, self.k, self.v, self.g, self.layout
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(g)
        # also for K = 32: with 32 columns of bfloat16 the ptxas of Triton 3.6 makes wrong code
        BK = 64 if self.narrow else min(32, self.BK)
        blocks = self.widths | self.precision | dict(BT=self.BT, BV=self.columns, NT=self.NT)
        grad_kernel[(cdiv(self.K, BK), layout.num_chunks, self.H)](
            q, k, v, g, do, layout.chunks, layout.weights, gate, strong, *of_scores, *of_states, *grads, self.scale,
            **blocks, BK=BK, num_warps=4, num_stages=self.num_stages,
        )  # fmt: skip
        strong_decay_grad_kernel[(layout.num_chunks, self.H)](
            q, k, v, g, do, layout.chunks, strong, *of_scores, *of_states, *grads, self.scale,
            **blocks, BK=self.BK, **self.sub_blocks,
        )  # fmt: skip
        return grads

    def segment_states(self, x, y, gate, states, reverse):
        """Write what each segment leaves into ``states`` [NS, H, K, V]; return the sums of gates [NS, H, K]."""
        gates = self.empty(states.shape[:3])
        self._states(x, y, gate, (states, states, gates), (states, gates, states), reverse, False)
        return gates

    def chunk_states(self, x, y, gate, entering):
        """What enters each chunk [NC, H, K, V] and what its rounding has taken; ``entering``: own, gates, prev."""
        states = self.empty(self.layout.num_chunks, self.H, self.K, self.V, dtype=self.dtype)
        low = torch.empty_like(states)
        self._states(x, y, gate, (states, low, gate), entering, False, True)
        return states, low

    def _states(self, x, y, gate, written, entering, reverse, every_chunk):
        grid, blocks = self.by_segments(self.BV)
        state_kernel[grid](
            x, y, gate, self.layout.segments, *written, *entering, self.scale,
            **blocks, REVERSE=reverse, EVERY_CHUNK=every_chunk, num_stages=self.state_stages,
        )  # fmt: skip

    def carry(self, states, sums, gates, outside, prev, final, ticket, reverse):
        """Through the segments (carry_kernel) and over the ranks: ``states`` and ``gates`` become what enters each
        segment, ``prev`` [states, H, K, V] what enters this rank, ``final`` the ends of the sequences. Returns
        ``join``: what is launched on the current stream after join() has ``prev`` and ``final``."""
        B, H, K, V = prev.shape
        BK, BV = default_tile(K, V, CARRY_WORDS[prev.device.type])
        grid, tables = (
            (cdiv(K, BK), cdiv(V, BV), B * H),
            (self.layout.segments, self.layout.first_segments),
        )
        blocks = self.widths | dict(BK=BK, BV=BV, REVERSE=reverse, num_warps=1)
        own, decay = torch.empty_like(prev), self.empty(B * H, K)
        with self.carrier.stream() as join:
            try:
                carry_kernel[grid](
                    states, sums, gates, *tables, states if outside is None else outside, own, decay,
                    prev if final is None else final, HAS_OUTSIDE=outside is not None, HAS_FINAL=final is not None,
                    **blocks,
                )  # fmt: skip
                halves = 1 + self.zigzag
                own_, prev_ = (x.unflatten(0, (-1, halves)) for x in (own, prev))
                self.carrier.carry(
                    own_, decay.view(own_.shape[:-1]), prev_, ticket=ticket, reverse=reverse, zigzag=self.zigzag
                )
            except BaseException:
                join()  # what was launched uses memory that is given back now
                raise

        def join_and_finish(_kept=(own, decay)):  # until then another stream uses them
            join()
            if final is not None and (self.carrier.comm.size > 1 or self.zigzag):
                final_kernel[grid](final, sums, gates, *tables, prev, **blocks)

        return join_and_finish

    def outputs(self, x, y, z, a, gate, entering, o, chunks, reverse):
        """See output_kernel; ``chunks``: states, dstates, through."""
        grid, blocks = self.by_segments(min(64, self.BV) if reverse else self.BV)
        output_kernel[grid](
            x, y, z, a, gate, self.layout.segments, *entering, o, *chunks, self.scale,
            **blocks, REVERSE=reverse, num_stages=min(self.state_stages, 2 if reverse else 3),
        )  # fmt: skip
