"""Computation inside the chunks of KDA and Gated DeltaNet by flash-linear-attention's kernels (tested with 0.6.0).

All imports from fla for delta rules are in this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...comm.communicator import Communicator
from ...launch.plan import Stored
from ...tokens.packing import CHUNK_TOKENS, Layout
from ..carrier import IncomingStates
from .delta_passes import ChunkOperands, DeltaShape, Inputs, LocalGrads, SavedStates, StatePass


def of_heads(HK: int, *tensors: Tensor) -> Sequence[Tensor]:
    """Return the sums over the value heads of each key head."""
    return [x if x.shape[2] == HK else x.unflatten(2, (HK, -1)).sum(3) for x in tensors]


class FlaPass(StatePass):
    """A rule whose chunks fla's kernels compute. The layout must have been made with ``fla`` if sequences are packed;
    packed, options: arguments of fla's functions that describe the sequences."""

    own = False

    @staticmethod
    def saved(*_: Any) -> list[Stored]:
        """None are saved: fla's backward computes them again."""
        return []

    def __init__(self, comm: Communicator, layout: Layout, shape: DeltaShape) -> None:
        super().__init__(comm, layout, shape)
        self.packed = dict(zip(("cu_seqlens", "chunk_indices"), layout.fla or (None, None)))
        self.options: dict[str, Any] = dict(**self.packed, chunk_size=CHUNK_TOKENS)

    def log2_sums(self, g: Tensor) -> Tensor:
        """Return the cumulative sums of the gates from each chunk's first token, times log2(e), in float32."""
        from fla.ops.utils import chunk_local_cumsum
        from fla.ops.utils.constant import RCP_LN2

        sums: Tensor = chunk_local_cumsum(g=g, scale=RCP_LN2, **self.options)
        return sums

    def suffix_sums(self, dg: Tensor) -> Tensor:
        from fla.ops.utils import chunk_local_cumsum

        sums: Tensor = chunk_local_cumsum(g=dg, reverse=True, **self.options)
        return sums


class KDA(FlaPass):
    """Kimi delta attention: one gate per channel of the keys."""

    scalar, safe = False, False

    def whole_forward(
        self, x: Inputs, initial: Tensor | None, final: Tensor | None, saved_states: SavedStates, scale: float
    ) -> tuple[Tensor, ...]:
        """Run forward; return (o, sums of the gates, Aqk, T). Fills final and ``saved_states``."""
        from fla.ops.gla.chunk import chunk_gla_fwd_o_gk
        from fla.ops.kda.chunk_intra import chunk_kda_fwd_intra

        q, k, v, g, beta = x
        sums = self.log2_sums(g)
        w, u, _, kg, scores, solved = chunk_kda_fwd_intra(
            q=q, k=k, v=v, gk=sums, beta=beta, scale=scale, safe_gate=self.safe, **self.options
        )
        h, v_new = self.forward(ChunkOperands(kg, w, u, sums), initial, final, saved_states)
        o = chunk_gla_fwd_o_gk(q=q, v=v_new, g=sums, A=scores, h=h, scale=scale, **self.options)
        return o, sums, scores, solved

    def whole_backward(
        self,
        x: Inputs,
        d: LocalGrads,
        dfinal: Tensor | None,
        dinitial: Tensor | None,
        saved_states: SavedStates,
        scale: float,
    ) -> Inputs:
        """Run backward; return the gradients of the inputs, of q and k for each head of v. Fills dinitial. d: do, and
        Aqk and T in scores and solved."""
        from fla.ops.kda.chunk_bwd import chunk_kda_bwd_dAv, chunk_kda_bwd_wy_dqkg_fused
        from fla.ops.kda.chunk_intra import chunk_kda_bwd_intra
        from fla.ops.kda.wy_fast import recompute_w_u_fwd

        (q, k, v, sums, beta), (do, _, scores, solved) = x, d
        w, u, qg, kg = recompute_w_u_fwd(q=q, k=k, v=v, beta=beta, A=solved, gk=sums, **self.packed)
        between = ChunkOperands(kg, w, u, sums, qg)
        h, v_new, *incoming = self.turn(between, LocalGrads(do, None, scores), dfinal, saved_states, scale)
        d_scores, dv = chunk_kda_bwd_dAv(q=q, k=k, v=v_new, do=do, A=scores, scale=scale, **self.options)
        dh, dv = self.backward(between, LocalGrads(do, dv), IncomingStates(*incoming), dinitial, scale)
        del w, u, qg, kg, between
        of_states = dict(h=h, do=do, dh=dh, dv=dv, scale=scale)
        dq, dk, dv, dbeta, dg, d_solved = chunk_kda_bwd_wy_dqkg_fused(
            q=q, k=k, v=v, v_new=v_new, g=sums, beta=beta, A=solved, **of_states, **self.options
        )
        of_chunks = dict(dAqk=d_scores, dAkk=d_solved, dq=dq, dk=dk, db=dbeta, dg=dg, safe_gate=self.safe)
        dq, dk, dbeta, dg = chunk_kda_bwd_intra(q=q, k=k, g=sums, beta=beta, **of_chunks, **self.options)
        return Inputs(dq, dk, dv, self.suffix_sums(dg), dbeta)


class SafeKDA(KDA):
    """KDA whose caller guarantees that no gate is below -5."""

    safe = True


class GatedDeltaNet(FlaPass):
    """The gated delta rule: one gate per head."""

    scalar = True

    def whole_forward(
        self, x: Inputs, initial: Tensor | None, final: Tensor | None, saved_states: SavedStates, scale: float
    ) -> tuple[Tensor | None, ...]:
        """Run forward; return (o, sums of the gates, None, T)."""
        from fla.ops.common.chunk_o import chunk_fwd_o
        from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra

        q, k, v, g, beta = x
        sums = self.log2_sums(g)
        w, u, solved = chunk_gated_delta_rule_fwd_intra(k=k, v=v, g=sums, beta=beta, **self.options)
        h, v_new = self.forward(ChunkOperands(k, w, u, sums), initial, final, saved_states)
        o = chunk_fwd_o(q=q, k=k, v=v_new, h=h, g=sums, scale=scale, **self.options)
        return o, sums, None, solved

    def whole_backward(
        self,
        x: Inputs,
        d: LocalGrads,
        dfinal: Tensor | None,
        dinitial: Tensor | None,
        saved_states: SavedStates,
        scale: float,
    ) -> Inputs:
        from fla.ops.common.chunk_o import chunk_bwd_dv_local
        from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd, recompute_w_u_fwd

        (q, k, v, sums, beta), (do, _, _, solved) = x, d
        w, u = recompute_w_u_fwd(k=k, v=v, beta=beta, A=solved, g=sums, **self.packed)
        dv = chunk_bwd_dv_local(q=q, k=k, g=sums, do=do, scale=scale, **self.options)
        between = ChunkOperands(k, w, u, sums, q)
        h, v_new, *incoming = self.turn(between, LocalGrads(do, dv), dfinal, saved_states, scale)
        dh, dv = self.backward(between, LocalGrads(do, dv), IncomingStates(*incoming), dinitial, scale)
        # fla rejects its own kernel for this on Hopper before Triton 3.7.1
        dq, dk, dw, dg = self.gradients(between, v_new, LocalGrads(do, dv), (h, dh), scale)
        dk2, dv, dbeta, dg2 = prepare_wy_repr_bwd(k=k, v=v, beta=beta, g=sums, A=solved, dw=dw, du=dv, **self.packed)
        dq, dk, dk2 = of_heads(q.shape[2], dq, dk, dk2)
        return Inputs(dq, dk + dk2, dv, self.suffix_sums(dg + dg2), dbeta)
