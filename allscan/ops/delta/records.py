"""Records that the parts of a delta rule exchange: tensors, or plan buffers in place of tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Inputs(NamedTuple):
    """Inputs of a rule [B, T, heads, ...], or their gradients. In backward of fla's rules g has sums of the gates."""

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any


class SavedStates(NamedTuple):
    """States that forward saves for backward. In a reverse scan: gradients in place of states."""

    transitions: Any  # [segments, H, K, K], float32 bits in any 4-byte dtype
    incoming: Any  # [segments, H, K, V], likewise: each segment's incoming state
    fwd_epoch: Any  # forward epoch of the call
    intermediates: Any = None  # with recompute=False int32 words of ChunkPass.intermediates


class ChunkOperands(NamedTuple):
    """Operands of the chunks for the passes between the chunks: see shmem_kernels/delta_state.py."""

    k: Any  # kg
    w: Any
    u: Any  # None in backward
    g: Any  # sums of the gates
    q: Any = None  # qg, in backward only


class LocalGrads(NamedTuple):
    """Gradients inside the chunks: of the output, and of v_new through it, or the scores Aqk to compute the latter. The
    scores [B, T, heads of v, 64] and solved, which forward saves, are in a dtype of the size of q's."""

    do: Any
    dv: Any
    scores: Any = None
    solved: Any = None  # T - 1: then r = T^T dv' is computed in place of dv'


class BoundaryStates(NamedTuple):
    """States of sequences [N, H, K, V] float32, or None: inputs, where a pass begins, and outputs, which the pass
    fills. Forward: initial and final states. Backward: gradients of the final and of the initial states."""

    inputs: Any
    outputs: Any


class DeltaShape(NamedTuple):
    """Shape of a StatePass. It sends B states of H heads; with ``zigzag`` 2 * B, for the first and for the second half
    of the tokens of each batch entry or document. scalar: there is one gate per token and head, and k and q, of HK
    heads, are not multiplied by gates. dtype: of k, w, u."""

    B: int
    H: int
    HK: int
    K: int
    V: int
    dtype: torch.dtype
    scalar: bool
    zigzag: bool = False
    in_order: bool = False  # scan all segments in sequence order: see docs/invariant.md
    saves: bool = False  # forward saves the intermediates of the chunks for backward, which recomputes them otherwise
