"""Per-signature state of delta rules: the first call with a signature makes it, later calls reuse it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...base.checks import signature_of
from ...bindings.torch_compat import unsafe_view
from ...comm.communicator import Communicator
from ...scan.fwd_epochs import FWD_EPOCHS
from ...tokens.packing import CHUNK_TOKENS, Layout, carried_states, most_segments
from ...tokens.partition import OwnTokens, check_packed, find_layout
from ..carrier import AllScanCarrier, check_cut
from ..first_call import FirstCall, check_first, common_fields, look_for_head_first
from .delta_checks import RULES, TITLES, Shapes, check_tensors, shapes_of
from .delta_passes import StatePass
from .fla_chunks import KDA, ChunkCall, GatedDeltaNet, local
from .own_chunks import ChunkPass, OwnChunks
from .records import DeltaShape, Ends, Inputs, Options, Outer, Saved, SavedStates
from .scalar_chunks import ScalarChunkPass

# Dtypes of saved buffers that kernels fill only in part. They are integers, so that a saved_tensors_hook that reads
# values, such as a quantizer, does not treat unwritten memory as floats
WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def _find_layout(comm: Communicator, x: Shapes, cu_seqlens: Tensor | None, options: Options) -> Layout:
    # fla's functions take both halves of the zigzag layout as packed sequences
    fla = not isinstance(RULES[options.rule], OwnChunks) and (bool(options.zigzag) or cu_seqlens is not None)
    tokens = OwnTokens(x.B, x.T, cu_seqlens, options.first_token, options.zigzag)
    return find_layout(comm, tokens, x.segment_length(), fla, bool(x.invariant))


class PreparedDelta:
    """State of one call signature. The first call with the signature makes it; later calls find it by their cache key,
    skip all other checks, and run their forward and backward passes by it.

    dtypes: of beta and of the gates that are saved. traced: for a call of the custom operator, whose saved states have
    the size for any number of pieces of packed sequences; otherwise they have that of this rank's pieces. saved_specs:
    see the function. fixed: the operator's last inputs."""

    def __init__(
        self,
        comm: Communicator,
        x: Shapes,
        cu_seqlens: Tensor | None,
        options: Options,
        dtypes: tuple[torch.dtype, torch.dtype],
        traced: bool = False,
    ) -> None:
        rule, scale, *_, zigzag, _ = options
        self.comm, self.rule, self.name = comm, RULES[rule], TITLES[rule]
        # fla's kernels process the halves of the zigzag layout as packed sequences, of a batch of one
        self.in_one = bool(zigzag) and not isinstance(self.rule, OwnChunks)
        self.layout = _find_layout(comm, x, cu_seqlens, options)
        self.states = state_pass(comm, self.layout, x, options)
        self.call = ChunkCall(self.states, scale, local(self.layout))
        self.fixed = comm.handle, *options
        self.state_shape = x.sequences, x.HV, x.K, x.V
        segments = None if traced or cu_seqlens is None else max(1, self.layout.num_segments)
        self._state_specs = state_specs(x, zigzag, segments)
        self.saved_specs = saved_specs(x, dtypes, rule, zigzag, segments)
        carrier = self.states.carrier
        self.pending = partial(carrier.pending, carrier.prepare(x.carried(zigzag)), bool(zigzag))

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        """Run forward. ``inputs``: the operator's inputs before ``fixed``.

        Returns (o, final_state or None, and for backward: sums of gates, the fields of Saved and of SavedStates)."""
        *tensors, initial_state, _, final = inputs
        x = Inputs(*tensors)
        ends = Ends(initial_state, x.q.new_zeros(self.state_shape, dtype=torch.float32) if final else None)
        saved_states = SavedStates(*(x.q.new_empty(shape, dtype=dtype) for dtype, shape in self._state_specs))
        self.layout.use(self.comm)
        v_shape = x.v.shape
        if not v_shape[1]:
            self.states.forward_of_none(ends, saved_states)
            o, *chunks = torch.empty_like(x.v), *sums_and_chunks(self.rule, x.k, x.v, x.g)
        else:
            if self.in_one:
                x = Inputs(*_in_one(*x))
            o, sums, (scores, solved) = self.rule.forward(self.call, x, ends, saved_states)
            if self.in_one:
                o = unsafe_view(o, v_shape)  # not a view for autograd: a caller may write to o in place
                solved = solved.view(v_shape[0], -1, *solved.shape[2:])
                sums = sums.view(v_shape[0], -1, *sums.shape[2:]) if sums.numel() else sums
                scores = scores.view(solved.shape) if scores.numel() else scores
            chunks = [sums, scores.view(WORDS[scores.dtype]), solved]
        if self.comm.debug:
            self.comm._look_for_nan(self.name, o=o, final_state=ends.outputs)
        return o, ends.outputs, *chunks, *saved_states

    def backward(self, x: Inputs, saved: Saved, outer: Outer, saved_states: SavedStates) -> list[Any]:
        """Run backward; return the gradients of the inputs."""
        self.layout.use(self.comm)
        if not x.q.shape[1]:
            self.states.backward_of_none(Ends(outer.dfinal, outer.dinitial), saved_states)
            grads: Any = [torch.empty_like(y) for y in x]
        else:
            saved, like = saved._replace(scores=saved.scores.view(saved.solved.dtype)), x
            if self.in_one:
                x, scores = Inputs(*_in_one(*x)), saved.scores
                saved = Saved(*_in_one(scores if scores.numel() else None, saved.solved))
                outer = outer._replace(do=outer.do.flatten(0, 1)[None])
            grads = self.rule.backward(self.call, x, saved, outer, saved_states)
            grads = [d.to(y.dtype).contiguous() for d, y in zip(grads, like, strict=True)]
            if self.in_one:
                grads = [d.view(y.shape) for d, y in zip(grads, like, strict=True)]
        if self.comm.debug:
            named = dict(zip(("dq", "dk", "dv", "dg", "dbeta"), grads), dinitial_state=outer.dinitial)
            self.comm._look_for_nan(f"{self.name}'s backward", **named)
        return grads


def prepare_delta(
    comm: Communicator, tensors: tuple, cu_seqlens: Tensor | None, options: Options, traced: bool = False
) -> PreparedDelta:
    """Run the remaining checks; return the PreparedDelta. The first call for a signature checks the tensors and
    compares its arguments with those of the other ranks. tensors: q, k, v, g, beta, initial_state."""
    q, _, v, g, beta, initial_state = tensors
    rule, scale, fields, bound, first_token, zigzag, invariant = options
    are_none = initial_state is None, cu_seqlens is None, first_token is None
    sequences = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    signature = rule, scale, fields, bound, signature_of(*tensors), sequences, are_none, zigzag, invariant
    if comm.debug or signature not in comm.checked:
        shape = agree = None
        if q.ndim == v.ndim == 4:
            shape = shapes_of(q, v, cu_seqlens).carried(zigzag)
            of_fields = (*(tuple(field.split("=")) for field in fields.split(";")), ("lower_bound", bound))
            common = common_fields(q.shape[0], q.dtype, scale, zigzag, *are_none)
            agree = f"zeco_{rule}", ("heads of q", q.shape[2]), *common, *of_fields, ("invariant", invariant)

        def check() -> None:
            check_tensors(comm, tensors, cu_seqlens, rule, zigzag)
            check_packed(comm, cu_seqlens, q.shape[1], first_token, zigzag)
            check_cut(comm, q.shape[1], invariant, zigzag)
            if invariant and not q.shape[1] and comm.rank in ((0,) if zigzag else (0, comm.size - 1)):
                raise ValueError(f"with invariant={invariant} the first and the last rank must have tokens")
            if cu_seqlens is None and q.shape[2] == v.shape[2]:  # head-first inputs have T there
                look_for_head_first(comm, TITLES[rule], q)

        summed = None if isinstance(RULES[rule], OwnChunks) else CHUNK_TOKENS  # our kernels also support gates of -inf
        first = FirstCall(signature, shape, agree, summed)
        check_first(comm, first, check, g, AllScanCarrier.of(comm, dense=True).prepare)
    x = shapes_of(q, v, cu_seqlens, invariant)
    own = isinstance(RULES[rule], OwnChunks)  # our kernels save the gates, not their sums
    return PreparedDelta(comm, x, cu_seqlens, options, (beta.dtype, g.dtype if own else torch.float32), traced)


def state_pass(comm: Communicator, layout: Layout, x: Shapes, options: Options) -> StatePass:
    """Return the StatePass of a call; calls with equal layout and shape share it."""
    rule, zigzag = RULES[options.rule], options.zigzag
    own = isinstance(rule, OwnChunks)
    cls = StatePass if not own else ScalarChunkPass if rule.scalar else ChunkPass
    heads = x.H if rule.scalar or own else x.HV
    B = carried_states(x.B, x.sequences, zigzag)
    shape = DeltaShape(B, x.HV, heads, x.K, x.V, x.dtype, rule.scalar, bool(zigzag), bool(x.invariant))
    alike = options.rule, x.B, x.H, options.scale, options.fields, options.bound
    return layout.derived((cls, shape, alike), lambda: cls(comm, layout.for_calls(*alike, str(x.dtype)), shape))


def _in_one(*tensors: Tensor | None) -> Iterator[Any]:
    """View [B, T, ...] as [1, B * T, ...]."""
    return (x if x is None else x.flatten(0, 1)[None] for x in tensors)


def state_specs(x: Shapes, zigzag: int, segments: int | None = None) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
    """Return (dtype, shape) of each field of SavedStates. The first two are saved as integers: see WORDS. segments:
    their number; None: an upper bound."""
    if segments is None:
        segments = most_segments(x.B, x.T, x.sequences, x.segment_length(), zigzag)
    states = ((torch.int32, (segments, x.HV, x.K, width)) for width in (x.K, x.V))
    return *states, (torch.int64, (FWD_EPOCHS,))


def sums_and_chunks(
    rule: GatedDeltaNet | KDA | OwnChunks, k: Tensor, v: Tensor, g: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialized sums of gates, scores and solved."""
    solved, own = k.new_empty(*v.shape[:3], CHUNK_TOKENS), isinstance(rule, OwnChunks)
    scores = k.new_empty(0 if rule.scalar and not own else solved.shape, dtype=WORDS[k.dtype])
    return g.new_empty(0 if own else g.shape, dtype=torch.float32), scores, solved


@functools.lru_cache(1024)
def saved_specs(
    x: Shapes, dtypes: tuple[torch.dtype, torch.dtype], rule: str, zigzag: int, segments: int | None = None
) -> list[tuple]:
    """Return (dtype, shape, device) of the tensors that autograd saves, except cu_seqlens, and of do. dtypes, segments:
    see PreparedDelta and state_specs."""
    beta_dtype, gate_dtype = dtypes
    keys, of_v, dtype, scalar = (x.B, x.T, x.H, x.K), (x.B, x.T, x.HV), x.dtype, RULES[rule].scalar
    values, chunk = (*of_v, x.V), (*of_v, CHUNK_TOKENS)
    without = scalar and not isinstance(RULES[rule], OwnChunks)
    specs = [(dtype, keys), (dtype, keys), (dtype, values), (beta_dtype, of_v)]
    specs += (gate_dtype, of_v if scalar else (*of_v, x.K)), (WORDS[dtype], (0,) if without else chunk)
    specs += (dtype, chunk), *state_specs(x, zigzag, segments), (dtype, values)
    return [(of, torch.Size(shape), x.device) for of, shape in specs]
