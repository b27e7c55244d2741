"""What the parts of a delta rule hand to each other: tensors, or the buffers of a plan that stand for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...launch.plan import Buffer


class Before(NamedTuple):
    """What is done to the arguments before the rule; see ``zeco_kda``."""

    normalize: bool
    gate: bool
    sigmoid: bool
    twice: bool
    lower_bound: float | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    state_v_first: bool
    chunk: str


class Asked(NamedTuple):
    """Options of a call as its caller passes them: see ``zeco_kda``."""

    scale: float | None
    initial_state: Tensor | None
    output_final_state: bool | str
    cu_seqlens: Tensor | Sequence[int] | None
    first_token: int | None
    layout: str
    per_document: bool
    invariant: int | None


class Options(NamedTuple):
    """What is not in the tensors of a call, checked. fields, bound: of Before, what the ranks compare; zigzag: see
    zigzag_of."""

    rule: str
    scale: float
    fields: str
    bound: float | None
    first_token: int | None = None
    zigzag: int = 0
    invariant: int = 0


class Inputs(NamedTuple):
    """Of a rule, [B, T, heads, ...]; or gradients of them. In backward of fla's rules g are the sums of the gates."""

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any


class Saved(NamedTuple):
    """What backward takes of the chunks, in a dtype of the size of q's."""

    scores: Any  # Aqk [B, T, heads of v, 64], or nothing
    solved: Any  # Akk, the same


class Outer(NamedTuple):
    """What comes to a backward pass from outside, the gradients of o and of the final states [N, H, K, V] or None; and
    what it fills, unless that is None: those of the initial states."""

    do: Any
    dfinal: Any
    dinitial: Any


class SavedStates(NamedTuple):
    """What backward takes from forward; of a scan in reverse, with gradients for states."""

    transitions: Any  # [segments, H, K, K], words of float32, of whatever dtype of 4 bytes
    incoming: Any  # [segments, H, K, V], the same; what has entered each
    fwd_epoch: Any  # number of the call


class Between(NamedTuple):
    """What the chunks hand to the passes between them, as shmem_kernels/delta.py says."""

    k: Any  # kg
    w: Any
    u: Any  # not in backward
    g: Any  # sums of the gates
    q: Any = None  # qg, in backward


class OfOutput(NamedTuple):
    """Gradients inside the chunks, of the output and, by way of it, of v_new; or scores Aqk to make the latter of."""

    do: Any
    dv: Any
    scores: Any = None


class Ends(NamedTuple):
    """States of sequences [N, H, K, V] float32, or None: those where a pass begins, and those where it ends, which it
    fills. Forward initial and final ones, backward gradients of the final and of the initial ones."""

    inputs: Any
    outputs: Any


class IncomingStates(NamedTuple):
    """Each segment's incoming state from this rank's tokens; if any comes from beyond it, the transition from the
    rank's entry to each segment, and the rank's incoming state."""

    states: Any
    through: Any = None
    prev: Any = None


class Scratch(NamedTuple):
    """Of a rank: local state; transition from its entry to each segment; incoming state; by which matrix that leaves
    it. None where there is no such thing."""

    own: Buffer | None
    through: Buffer | None
    prev: Buffer | None
    dense: Buffer | None

    def incoming(self, states: Buffer) -> IncomingStates:
        return IncomingStates(states, self.through, self.prev)


class DeltaShape(NamedTuple):
    """B states of H heads are sent, with ``zigzag`` twice as many: of the first half of a batch entry's tokens, or of a
    document's, and of the second. scalar: gates are one number a token and head, and k and q, of HK heads, come without
    them. dtype: of k, w, u."""

    B: int
    H: int
    HK: int
    K: int
    V: int
    dtype: torch.dtype
    scalar: bool
    zigzag: bool = False
    in_order: bool = False  # through all segments in the order of the sequence: see docs/invariant.md
