"""Per-signature state of delta rules: the first call with a signature makes it, later calls reuse it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...bindings.torch_compat import unsafe_view
from ...comm.backwards import FWD_EPOCHS
from ...comm.communicator import Communicator
from ...launch.plan import words_of
from ...tokens.packing import (
    CHUNK_TOKENS,
    DeviceBoundaries,
    Layout,
    carried_states,
    most_chunks,
    most_segments,
)
from ...tokens.partition import OwnTokens, find_layout
from ..carrier import StateCarrier
from ..operator import Call, PreparedCall
from .delta_checks import RULES, TITLES, Pass, Shapes
from .delta_passes import DeltaShape, Inputs, LocalGrads, SavedStates
from .fla_chunks import of_heads

# Dtypes of saved buffers that kernels fill only in part. They are integers, so that a saved_tensors_hook that reads
# values, such as a quantizer, does not treat unwritten memory as floats
WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


class PreparedDelta(PreparedCall):
    """Calls of one signature. dtypes: of beta and of the gates that are saved. traced: see SequenceOperator.make."""

    def __init__(
        self,
        carrier: StateCarrier,
        x: Shapes,
        cu_seqlens: Tensor | None,
        first_token: int | None,
        call: Call,
        dtypes: tuple[torch.dtype, torch.dtype],
        traced: bool,
    ) -> None:
        states = x.sequences, x.HV, x.K, x.V
        super().__init__(carrier, call, first_token, states, carried_states(x.B, x.sequences, call.zigzag))
        self.rule, self.title, zigzag = RULES[call.rule], TITLES[call.rule], call.zigzag
        # fla's kernels process the halves of the zigzag layout as packed sequences, of a batch of one
        self.in_one = bool(zigzag) and not self.rule.own
        of_fla = not self.rule.own and (bool(zigzag) or cu_seqlens is not None)
        own = OwnTokens(x.B, x.T, cu_seqlens, first_token, zigzag)
        self.layout = find_layout(self.comm, own, x.segment_length(), of_fla, bool(x.invariant))
        self.passes: Any = state_pass(self.comm, self.layout, x, call)
        sizes = None
        if not (traced or cu_seqlens is None):
            sizes = max(1, self.layout.num_segments), saved_words(x, call, self.layout.num_chunks)
        self._state_specs = state_specs(x, call, sizes)
        self.saved_specs = saved_specs(x, dtypes, call, sizes)

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        """See PreparedCall; returns sums of gates, scores, solved and the fields of SavedStates behind the results."""
        *tensors, initial_state, cu_seqlens, final = inputs
        x = Inputs(*tensors)
        boundaries = (cu_seqlens,) if isinstance(cu_seqlens, DeviceBoundaries) else ()
        final_state = x.q.new_zeros(self.states, dtype=torch.float32) if final else None
        saved_states = SavedStates(*(x.q.new_empty(shape, dtype=dtype) for dtype, shape in self._state_specs))
        self.layout.use(self.comm)
        v_shape = x.v.shape
        if not v_shape[1]:
            self.passes.forward_of_none(initial_state, final_state, saved_states)
            o, chunks = torch.empty_like(x.v), sums_and_chunks(self.rule, x.k, x.v, x.g)
        else:
            if self.in_one:
                x = Inputs(*_in_one(*x))
            states = initial_state, final_state, saved_states
            o, *found = self.passes.whole_forward(x, *states, self.call.scale, *boundaries)
            if self.in_one:
                o = unsafe_view(o, v_shape)  # not a view for autograd: a caller may write to o in place
                found = [y if y is None else y.view(*v_shape[:2], *y.shape[2:]) for y in found]
            sums, scores, solved = found
            scores = solved.new_empty(0) if scores is None else scores
            sums = x.g.new_empty(0, dtype=torch.float32) if sums is None else sums
            chunks = sums, scores.view(WORDS[scores.dtype]), solved
        if self.comm.debug:
            self.comm._look_for_nan(self.title, o=o, final_state=final_state)
        return o, final_state, *chunks, *saved_states

    def backward(self, do: Tensor, dfinal: Tensor | None, kept: Sequence[Tensor], initial: bool) -> Sequence[Any]:
        q, k, v, beta, sums, scores, solved, *states = kept
        dinitial = q.new_zeros(self.states, dtype=torch.float32) if initial else None
        x, saved_states = Inputs(q, k, v, sums, beta), SavedStates(*states)
        self.layout.use(self.comm)
        if not q.shape[1]:
            self.passes.backward_of_none(dfinal, dinitial, saved_states)
            grads: Any = [torch.empty_like(y) for y in x]
        else:
            like, d = x, LocalGrads(do, None, scores.view(solved.dtype) if scores.numel() else None, solved)
            if self.in_one:
                x, d = Inputs(*_in_one(*x)), LocalGrads(*_in_one(*d))
            dq, dk, *others = self.passes.whole_backward(x, d, dfinal, dinitial, saved_states, self.call.scale)
            grads = *of_heads(q.shape[2], dq, dk), *others
            grads = [dy.to(y.dtype).contiguous() for dy, y in zip(grads, like, strict=True)]
            if self.in_one:
                grads = [dy.view(y.shape) for dy, y in zip(grads, like, strict=True)]
        if self.comm.debug:
            named = dict(zip(("dq", "dk", "dv", "dg", "dbeta"), grads), dinitial_state=dinitial)
            self.comm._look_for_nan(f"{self.title}'s backward", **named)
        return *grads, dinitial


def state_pass(comm: Communicator, layout: Layout, x: Shapes, call: Call) -> Any:
    """Return the pass of a call, of the class in RULES; calls with equal layout and shape share it."""
    rule, zigzag = RULES[call.rule], call.zigzag
    heads = x.H if rule.scalar or rule.own else x.HV
    B = carried_states(x.B, x.sequences, zigzag)
    how = rule.scalar, bool(zigzag), bool(x.invariant), call.saves
    shape = DeltaShape(B, x.HV, heads, x.K, x.V, x.dtype, *how)
    alike = *call.agreed, x.B, x.H, str(x.dtype)
    return layout.derived((shape, alike), lambda: rule(comm, layout.for_calls(*alike), shape))


def _in_one(*tensors: Tensor | None) -> Iterator[Any]:
    """View [B, T, ...] as [1, B * T, ...]."""
    return (x if x is None else x.flatten(0, 1)[None] for x in tensors)


def saved_words(x: Shapes, call: Call, chunks: int) -> int:
    """Return the words of the tensors of so many chunks that forward saves for backward."""
    return sum(words_of(RULES[call.rule].saved((x.B, x.T, x.HV, x.V), x.K, chunks, x.dtype, call.saves)))


def state_specs(
    x: Shapes, call: Call, sizes: tuple[int, int] | None = None
) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
    """Return (dtype, shape) of each field of SavedStates. Except the epoch they are saved as integers: see WORDS.
    sizes: the number of segments, and ``saved_words``; None: upper bounds."""
    if sizes is None:
        of_row = x.B, x.T, x.sequences
        chunks = most_chunks(*of_row, call.zigzag, bool(x.invariant))
        sizes = most_segments(*of_row, x.segment_length(), call.zigzag), saved_words(x, call, chunks)
    segments, words = sizes
    states = ((torch.int32, (segments, x.HV, x.K, width)) for width in (x.K, x.V))
    return *states, (torch.int64, (FWD_EPOCHS,)), (torch.int32, (words,))


def sums_and_chunks(rule: Pass, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialized sums of gates, scores and solved."""
    solved = k.new_empty(*v.shape[:3], CHUNK_TOKENS)
    scores = k.new_empty(0 if rule.scalar and not rule.own else solved.shape, dtype=WORDS[k.dtype])
    return g.new_empty(0 if rule.own else g.shape, dtype=torch.float32), scores, solved


@functools.lru_cache(1024)
def saved_specs(
    x: Shapes, dtypes: tuple[torch.dtype, torch.dtype], call: Call, sizes: tuple[int, int] | None = None
) -> list[tuple]:
    """Return (dtype, shape, device) of the tensors that autograd saves, except cu_seqlens, and of do. dtypes, sizes:
    see PreparedDelta and state_specs."""
    (beta_dtype, gate_dtype), rule = dtypes, RULES[call.rule]
    keys, of_v, dtype, scalar = (x.B, x.T, x.H, x.K), (x.B, x.T, x.HV), x.dtype, rule.scalar
    values, chunk = (*of_v, x.V), (*of_v, CHUNK_TOKENS)
    without = scalar and not rule.own
    specs = [(dtype, keys), (dtype, keys), (dtype, values), (beta_dtype, of_v)]
    specs += (gate_dtype, of_v if scalar else (*of_v, x.K)), (WORDS[dtype], (0,) if without else chunk)
    specs += (dtype, chunk), *state_specs(x, call, sizes), (dtype, values)
    return [(of, torch.Size(shape), x.device) for of, shape in specs]
