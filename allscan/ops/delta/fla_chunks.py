"""Computation inside the chunks of KDA and Gated DeltaNet by flash-linear-attention's kernels (tested with 0.6.0).

All imports from fla for delta rules are in this file.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ...tokens.packing import CHUNK_TOKENS, Layout
from .records import BoundaryStates, ChunkOperands, Inputs, LocalGrads, OutputGrads, Saved, SavedStates


class Local(NamedTuple):
    """Arguments that describe this rank's packed sequences to fla's functions; None if sequences are not packed."""

    cu_seqlens: Tensor | None
    chunk_indices: Tensor | None

    def options(self) -> dict[str, Any]:
        return dict(cu_seqlens=self.cu_seqlens, chunk_indices=self.chunk_indices, chunk_size=CHUNK_TOKENS)


def local(layout: Layout) -> Local:
    """Return the Local of a layout, which must have been made with ``fla`` if sequences are packed."""
    return Local(*layout.fla) if layout.fla else Local(None, None)


def log2_sums(g: Tensor, tables: Local) -> Tensor:
    """Return the cumulative sums of the gates from each chunk's first token, times log2(e), in float32."""
    from fla.ops.utils import chunk_local_cumsum
    from fla.ops.utils.constant import RCP_LN2

    return chunk_local_cumsum(g=g, scale=RCP_LN2, **tables.options())


def _suffix_sums(dg: Tensor, tables: Local) -> Tensor:
    from fla.ops.utils import chunk_local_cumsum

    return chunk_local_cumsum(g=dg, reverse=True, **tables.options())


def _of_heads(x: Tensor, HK: int) -> Tensor:
    """Return the sum over the value heads of each key head."""
    return x if x.shape[2] == HK else x.unflatten(2, (HK, -1)).sum(3)


class ChunkCall(NamedTuple):
    """Arguments of the functions inside the chunks, except tensors of the call."""

    states: Any  # a StatePass, of own chunks a ChunkPass
    scale: float
    tables: Local


class KDA:
    """Kimi delta attention: one gate per channel of the keys. safe_gate: no gate is below -5."""

    scalar = False

    def __init__(self, safe_gate: bool = False) -> None:
        self.safe = dict(safe_gate=safe_gate)

    def forward(
        self, call: ChunkCall, x: Inputs, ends: BoundaryStates, saved_states: SavedStates
    ) -> tuple[Tensor, Tensor, Saved]:
        """Run forward; return (o, sums of the gates, the tensors saved for backward)."""
        from fla.ops.gla.chunk import chunk_gla_fwd_o_gk
        from fla.ops.kda.chunk_intra import chunk_kda_fwd_intra

        (states, scale, tables), (q, k, v, g, beta) = call, x
        options = tables.options()
        sums = log2_sums(g, tables)
        w, u, _, kg, scores, solved = chunk_kda_fwd_intra(
            q=q, k=k, v=v, gk=sums, beta=beta, scale=scale, **self.safe, **options
        )
        h, v_new = states.forward(ChunkOperands(kg, w, u, sums), ends, saved_states)
        o = chunk_gla_fwd_o_gk(q=q, v=v_new, g=sums, A=scores, h=h, scale=scale, **options)
        return o, sums, Saved(scores, solved)

    def backward(
        self, call: ChunkCall, x: Inputs, saved: Saved, outer: OutputGrads, saved_states: SavedStates
    ) -> Inputs:
        """Run backward; return the gradients of the inputs. Fills ``outer``."""
        from fla.ops.kda.chunk_bwd import chunk_kda_bwd_dAv, chunk_kda_bwd_wy_dqkg_fused
        from fla.ops.kda.chunk_intra import chunk_kda_bwd_intra
        from fla.ops.kda.wy_fast import recompute_w_u_fwd

        (states, scale, tables), (q, k, v, sums, beta), (scores, solved) = call, x, saved
        do, dfinal, dinitial = outer
        options = tables.options()
        indices = dict(cu_seqlens=tables.cu_seqlens, chunk_indices=tables.chunk_indices)
        w, u, qg, kg = recompute_w_u_fwd(q=q, k=k, v=v, beta=beta, A=solved, gk=sums, **indices)
        between = ChunkOperands(kg, w, u, sums, qg)
        h, v_new, incoming = states.turn(between, LocalGrads(do, None, scores), dfinal, saved_states, scale)
        d_scores, dv = chunk_kda_bwd_dAv(q=q, k=k, v=v_new, do=do, A=scores, scale=scale, **options)
        dh, dv = states.backward(between, LocalGrads(do, dv), incoming, dinitial, scale)
        del w, u, qg, kg, between
        of_states = dict(h=h, do=do, dh=dh, dv=dv, scale=scale)
        dq, dk, dv, dbeta, dg, d_solved = chunk_kda_bwd_wy_dqkg_fused(
            q=q, k=k, v=v, v_new=v_new, g=sums, beta=beta, A=solved, **of_states, **options
        )
        of_chunks = dict(dAqk=d_scores, dAkk=d_solved, dq=dq, dk=dk, db=dbeta, dg=dg)
        dq, dk, dbeta, dg = chunk_kda_bwd_intra(q=q, k=k, g=sums, beta=beta, **of_chunks, **self.safe, **options)
        heads = q.shape[2]
        return Inputs(_of_heads(dq, heads), _of_heads(dk, heads), dv, _suffix_sums(dg, tables), dbeta)


class GatedDeltaNet:
    """The gated delta rule: one gate per head."""

    scalar = True

    def forward(
        self, call: ChunkCall, x: Inputs, ends: BoundaryStates, saved_states: SavedStates
    ) -> tuple[Tensor, Tensor, Saved]:
        from fla.ops.common.chunk_o import chunk_fwd_o
        from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra

        (states, scale, tables), (q, k, v, g, beta) = call, x
        options = tables.options()
        sums = log2_sums(g, tables)
        w, u, solved = chunk_gated_delta_rule_fwd_intra(k=k, v=v, g=sums, beta=beta, **options)
        h, v_new = states.forward(ChunkOperands(k, w, u, sums), ends, saved_states)
        o = chunk_fwd_o(q=q, k=k, v=v_new, h=h, g=sums, scale=scale, **options)
        return o, sums, Saved(solved.new_empty(0), solved)

    def backward(
        self, call: ChunkCall, x: Inputs, saved: Saved, outer: OutputGrads, saved_states: SavedStates
    ) -> Inputs:
        from fla.ops.common.chunk_o import chunk_bwd_dv_local
        from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd, recompute_w_u_fwd

        (states, scale, tables), (q, k, v, sums, beta), (_, solved) = call, x, saved
        do, dfinal, dinitial = outer
        options = tables.options()
        indices = dict(cu_seqlens=tables.cu_seqlens, chunk_indices=tables.chunk_indices)
        w, u = recompute_w_u_fwd(k=k, v=v, beta=beta, A=solved, g=sums, **indices)
        dv = chunk_bwd_dv_local(q=q, k=k, g=sums, do=do, scale=scale, **options)
        between = ChunkOperands(k, w, u, sums, q)
        h, v_new, incoming = states.turn(between, LocalGrads(do, dv), dfinal, saved_states, scale)
        dh, dv = states.backward(between, LocalGrads(do, dv), incoming, dinitial, scale)
        # fla rejects its own kernel for this on Hopper before Triton 3.7.1
        dq, dk, dw, dg = states.gradients(between, v_new, LocalGrads(do, dv), (h, dh), scale)
        dk2, dv, dbeta, dg2 = prepare_wy_repr_bwd(k=k, v=v, beta=beta, g=sums, A=solved, dw=dw, du=dv, **indices)
        dq, dk, dk2 = (_of_heads(x, q.shape[2]) for x in (dq, dk, dk2))
        return Inputs(dq, dk + dk2, dv, _suffix_sums(dg + dg2, tables), dbeta)
