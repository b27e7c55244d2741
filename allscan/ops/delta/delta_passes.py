"""The passes of a delta rule over the states of a rank's chunks, forward and backward, with All-Scan over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...base.tiling import cdiv, next_power_of_2
from ...comm.communicator import Communicator
from ...launch.plan import Buffer, Plan
from ...shmem_kernels.delta import (
    adjoint_kernel,
    delta_carry_kernel,
    delta_states_kernel,
    scalar_gradient_kernel,
    summary_kernel,
)
from ...tokens.packing import CHUNK_TOKENS, KEPT, Layout
from ..carrier import AllScanCarrier, Carried
from .fla_replay import FlaReplay

PRECISION = {torch.bfloat16: "bf16", torch.float16: "tf32x3", torch.float32: "tf32x3"}  # see gla_plans
PROGRAMS = 128  # of the passes over segments: about one a multiprocessor


def delta_segment_length(tokens: int, H: int, cuda: bool) -> int:
    """Tokens of a segment, whole chunks: few and long, since each has a transition, yet enough to fill a GPU."""
    if not cuda:
        return 2 * CHUNK_TOKENS
    number = max(1, min(32, PROGRAMS // H))
    return max(4 * CHUNK_TOKENS, cdiv(cdiv(tokens, number), CHUNK_TOKENS) * CHUNK_TOKENS)


def blocks(BK: int, BV_max: int, dtype: torch.dtype) -> dict[str, dict[str, int]]:
    """Block sizes and warps of each kernel on a GPU: what fits the registers (tests/shmem_kernels/test_compile.py)."""
    fine, BJ = dtype != torch.bfloat16, 32 if BK > 16 else 16
    wide = BK > 128 or fine
    columns = min(16 if fine else 32 if wide else 128, BV_max)
    rows = (16 if BK > 128 else 32) if fine else 64 if wide else 128
    # where 8 warps have 16 columns of a product with 64 rows, Triton 3.6 makes them read outside of shared memory
    summary = dict(num_warps=8 if BV_max >= 32 or fine else 4, num_stages=1 if wide else 3)
    several = dict(BV=columns, BJ=BJ, num_warps=8 if wide or columns == 128 else 4, num_stages=1 if wide else 2)
    return dict(
        summary=summary | dict(BR=min(rows, BK), BV=min(64 if wide else 128, BV_max)),
        carry=dict(BC=16, BJ=min(64, BK), num_warps=4 if BK <= 128 else 8),
        states=several if wide else several | dict(BV=min(64, BV_max), num_warps=4),
        leaves=several if wide else several | dict(num_stages=3),
        adjoint=several,
        gradients=dict(BV=min(32 if wide else 64, BV_max), BJ=min(32 if wide else 64, BK), num_warps=4, num_stages=1),
    )


def blocks_of_cpus(BK: int, BV_max: int) -> dict[str, dict[str, int]]:
    """The same for the interpreter, which pays by the operation."""
    several = dict(BV=BV_max, BJ=BK)
    return dict(
        summary=dict(BR=BK, BV=BV_max),
        carry=dict(BC=max(BK, BV_max), BJ=BK),
        states=several,
        leaves=several,
        adjoint=several,
        gradients=several,
    )


class Kept(NamedTuple):
    """What backward takes from forward."""

    transitions: Tensor  # [segments, H, K, K], words of float32, of whatever dtype of 4 bytes
    enters: Tensor  # [segments, H, K, V], the same; what has entered each
    fwd_epoch: Tensor  # number of the call


class StatePass:
    """Forward and backward through the states of this rank's chunks: plans, recorded once for calls that differ in
    their tensors only.

    layout: of this rank's tokens, with segments of delta_segment_length; B states of H heads are sent, with ``zigzag``
    twice as many: of the first half of a batch entry's tokens, or of a document's, and of the second. scalar: gates are
    one number a token and head, and k and q, of HK heads, come without them. dtype: of k, w, u.
    """

    def __init__(
        self,
        comm: Communicator,
        layout: Layout,
        B: int,
        H: int,
        HK: int,
        K: int,
        V: int,
        dtype: torch.dtype,
        scalar: bool,
        zigzag: bool = False,
    ) -> None:
        self.comm, self.layout, self.B, self.H, self.K, self.V, self.dtype = comm, layout, B, H, K, V, dtype
        self.zigzag, self.num_states = zigzag, 2 * B if zigzag else B
        self.alone = comm.size == 1 and not zigzag  # nothing is sent
        self.carrier = AllScanCarrier.of(comm, dense=True)
        BK = max(16, next_power_of_2(K))
        self.common = dict(H=H, K=K, V=V, BK=BK)
        self.chunked = dict(HK=HK, BT=CHUNK_TOKENS, SCALAR=scalar, TOTALS=False, PRECISION=PRECISION[dtype])
        BV_max = max(16, next_power_of_2(V))
        cuda = comm.device.type == "cuda"
        self.blocks = blocks(BK, BV_max, dtype) if cuda else blocks_of_cpus(BK, BV_max)
        batch = 1 if zigzag else B  # as fla takes chunks, of packed sequences too
        self.of_chunks = batch, layout.num_chunks // batch, H, K, V
        self.of_states, self.of_transitions = ((layout.num_segments, H, K, width) for width in (V, K))
        self.fla = FlaReplay(cuda and comm.replay, comm.graphs)  # what fla's functions are called by
        self._plans: dict[tuple, tuple[Plan, list]] = {}

    def forward(self, k, w, u, g, initial, final: Tensor | None, kept: Kept) -> list[Tensor]:
        """(h [B, chunks of each, H, K, V], the state that enters each chunk, like k; v_new, like u). ``kept`` is
        filled, and ``final`` [N, H, K, V] float32 where a sequence ends here. initial: [N, H, K, V] float32 or None."""
        return self._run(self._forward, k, w, u, g, initial, final, *kept)

    def turn(
        self, q, k, w, u, g, do, scores, dfinal, scale, kept: Kept, *, dv: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Any]:
        """(h, v_new of forward, made again; each segment's incoming gradient, for ``backward``). The scan of
        the gradient runs beside the former. ``dv``, or scores Aqk to make it of. dfinal: [N, H, K, V] or None."""
        given, options = scores if dv is None else dv, dict(scale=scale, from_scores=dv is None)
        h, v_new, *entering = self._run(self._turn, q, k, w, u, g, do, given, dfinal, *kept, **options)
        return h, v_new, entering

    def backward(self, q, k, w, g, do, dv, scale, entering, dinitial: Tensor | None) -> list[Tensor]:
        """(dh, like h: the gradient of the state that leaves each chunk; dv', like dv). dinitial is filled where a
        sequence begins here."""
        return self._run(self._backward, q, k, w, g, do, dv, *entering, dinitial, scale=scale)

    def forward_of_none(self, initial, final: Tensor | None, kept: Kept) -> None:
        """``forward`` of a rank without tokens: what comes goes on."""
        k, v, g = self._nothing()
        self.forward(k, k, v, g, initial, final, kept)

    def backward_of_none(self, dfinal, dinitial: Tensor | None, kept: Kept) -> None:
        """``turn`` and ``backward`` of such a rank."""
        k, v, g = self._nothing()
        *_, entering = self.turn(k, k, k, v, g, v, None, dfinal, 1.0, kept, dv=v)
        self.backward(k, k, k, g, v, v, 1.0, entering, dinitial)

    def _nothing(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and gates of one token, of which kernels read no more than a gate, without using it."""
        make = self.comm.memory.step.new_zeros
        k, v = (make(1, 1, self.H, width, dtype=self.dtype) for width in (self.K, self.V))
        return k, v, make(k.shape[: 3 if self.chunked["SCALAR"] else 4], dtype=torch.float32)

    def gradients(self, q, k, v_new, w, g, do, dv, h, dh, scale) -> list[Tensor]:
        """Of a rule with one gate a head: (dq, dk, dw, like w, and dg, like g), see scalar_gradient_kernel."""
        return self._run(self._gradients, q, k, v_new, w, g, do, dv, h, dh, scale=scale)

    def total(self, k, w, u, g) -> list[Tensor]:
        """(what this rank leaves from zero [B * H, K, V], its transition [B * H, K, K]) of a layout whose sequences
        neither begin nor end here."""
        return self._run(self._total, k, w, u, g)

    def total_back(self, q, k, w, g, do, dv, scale) -> list[Tensor]:
        """The same of the gradient, from the end to the beginning."""
        return self._run(self._total_back, q, k, w, g, do, dv, scale=scale)

    def _run(self, record, *tensors, **fixed) -> list[Any]:
        """Run the plan that ``record(plan, buffers, **fixed)`` has recorded at the first call with tensors like these
        (their sizes are the layout's and those of the first); the tensors of the buffers that it has returned, None for
        None."""
        key = record.__name__, tensors[0].shape, *fixed.values(), *[x if x is None else x.dtype for x in tensors]
        found = self._plans.get(key)
        if found is None:
            if len(self._plans) >= KEPT:  # of calls with ever other scales
                self._plans.clear()
            plan = Plan(self.comm.graphs)
            buffers = record(plan, *(x if x is None else plan.input(x) for x in tensors), **fixed)
            places = sorted(x.number for x in buffers if x is not None)  # in the order in which a run makes them
            found = self._plans[key] = plan, [x if x is None else places.index(x.number) for x in buffers]
        plan, order = found
        made = plan.run(self.carrier, *[x for x in tensors if x is not None])
        return [i if i is None else made[i] for i in order]

    def _forward(self, plan: Plan, k, w, u, g, initial, final, transitions, enters, fwd_epoch) -> tuple:
        made = self._chunks(plan, k, u)
        transitions, enters = _words(plan, transitions, enters)
        leaves = plan.scratch(*self.of_states)
        if not self.alone or self.layout.num_segments > self.B:
            self._summaries(plan, k, w, u, g, transitions, leaves)
        room = self._room(plan.scratch, plan.scratch, False)
        self._carry(plan, transitions, leaves, enters, initial, fwd_epoch, False, room)
        return self._states(plan, k, w, u, g, (enters, *room[1:3]), final, made)

    def _turn(
        self, plan: Plan, q, k, w, u, g, do, given, dfinal, transitions, entered, fwd_epoch, scale, from_scores
    ) -> tuple:
        made = self._chunks(plan, k, u)
        transitions, entered = _words(plan, transitions, entered)
        enters, room = plan.output(*self.of_states), self._room(plan.scratch, plan.output, True)
        leaves = self._leaves(plan, q, k, w, g, do, given, dfinal, scale, from_scores)
        with plan.side_stream(lambda carrier: carrier.stream()):
            self._carry(plan, transitions, leaves, enters, dfinal, fwd_epoch, True, room)
        self._states(plan, k, w, u, g, (entered, None, None), None, made)
        plan.join()
        return *made, enters, *room[1:3]

    def _backward(self, plan: Plan, q, k, w, g, do, dv, enters, through, prev, dinitial, scale) -> tuple:
        dh, dv_new = made = self._chunks(plan, k, dv)
        out, final = dh if dinitial is None else dinitial, dinitial is not None
        entering = enters, through, prev
        self._adjoint(plan, q, k, w, g, do, dv, scale, entering, made, out, EVERY_CHUNK=True, HAS_FINAL=final)
        return made

    def _gradients(self, plan: Plan, q, k, v_new, w, g, do, dv, h, dh, scale) -> list[Buffer]:
        made = [plan.output_like(x) for x in (w, w, w, g)]
        chunked = {name: value for name, value in self.chunked.items() if name not in ("SCALAR", "TOTALS")}
        self._launch(
            plan,
            "gradients",
            scalar_gradient_kernel,
            (self.layout.num_chunks, self.H),
            q,
            k,
            v_new,
            g,
            do,
            dv,
            h,
            dh,
            plan.constant(self.layout.chunks),
            *made,
            scale=scale,
            **chunked,
        )
        return made

    def _total(self, plan: Plan, k, w, u, g) -> tuple:
        room = self._room(plan.output, plan.scratch, False)
        transitions, leaves, enters = (plan.scratch(*x) for x in (self.of_transitions, self.of_states, self.of_states))
        self._summaries(plan, k, w, u, g, transitions, leaves)
        self._through(plan, transitions, leaves, enters, None, False, room)
        return room[0], room[3]

    def _total_back(self, plan: Plan, q, k, w, g, do, dv, scale) -> tuple:
        room = self._room(plan.output, plan.scratch, True)
        transitions, states, enters = (plan.scratch(*x) for x in (self.of_transitions, self.of_states, self.of_states))
        self._summaries(plan, k, w, do, g, transitions, states)
        leaves = self._leaves(plan, q, k, w, g, do, dv, None, scale, from_scores=False)
        self._through(plan, transitions, leaves, enters, None, True, room)
        return room[0], room[3]

    def _chunks(self, plan: Plan, k, u) -> tuple:
        """New (states of the chunks, like k; values like u)."""
        return plan.output(*self.of_chunks, dtype=k.dtype), plan.output_like(u)

    def _room(self, rank, segments, reverse: bool) -> tuple:
        """(local state; transition from the rank's entry to each segment; incoming state; by
        which matrix it leaves the rank); None where there is no such thing. ``rank``, ``segments``: what makes memory
        for the first and last of them, and for the other two."""
        states = self.num_states * self.H
        own, prev = rank(states, self.K, self.V), None if self.alone else segments(states, self.K, self.V)
        if self.alone or not (self.layout.left if reverse else self.layout.entered):
            return own, None, prev, None
        return own, segments(*self.of_transitions), prev, rank(states, self.K, self.K)

    def _summaries(self, plan: Plan, k, w, u, g, transitions, leaves) -> None:
        rows, columns = cdiv(self.K, self.blocks["summary"]["BR"]), cdiv(self.V, self.blocks["summary"]["BV"])
        grid, tensors = (rows * columns, self.layout.num_segments, self.H), (k, w, u, g, self._segments(plan))
        self._launch(plan, "summary", summary_kernel, grid, *tensors, transitions, leaves, **self.chunked)

    def _through(self, plan: Plan, transitions, leaves, enters, outside, reverse, room) -> None:
        """Fill ``enters`` with each segment's incoming state from this rank's tokens, of each one's local state; and of
        ``room`` all but the rank's incoming state."""
        own, through, _, dense = room
        block = self.blocks["carry"]["BC"]
        columns = cdiv(self.V, block) + (0 if through is None else cdiv(self.K, block))
        self._launch(
            plan,
            "carry",
            delta_carry_kernel,
            (columns, self.num_states * self.H),
            transitions,
            leaves,
            self._segments(plan),
            plan.constant(self.layout.first_segments),
            outside or leaves,
            enters,
            through or enters,
            own,
            dense or own,
            HAS_OUTSIDE=outside is not None,
            REVERSE=reverse,
        )

    def _carry(self, plan: Plan, transitions, leaves, enters, outside, fwd_epoch, reverse, room) -> None:
        """_through, and the scan."""
        self._through(plan, transitions, leaves, enters, outside, reverse, room)
        own, _, prev, dense = room
        if prev is None:
            return
        # where no sequence goes through the whole rank, nothing that enters it leaves it
        halves = range(1 + self.zigzag)
        passes = [any(index % len(halves) == i for index in self.layout.passing) for i in halves]
        lead = self.B, len(halves), self.H
        own, prev, dense = (x if x is None else plan.view(x, 0, *lead, *x.shape[1:]) for x in (own, prev, dense))
        carried = Carried(own, prev, fwd_epoch, transition=dense, passes=(passes[0], passes[-1]))
        self.carrier.record(plan, carried, reverse, self.zigzag)

    def _states(self, plan: Plan, k, w, u, g, entering, final, made) -> tuple:
        h, v_new = made
        self._by_segments(
            plan,
            "states",
            delta_states_kernel,
            k,
            w,
            u,
            g,
            self._segments(plan),
            *_entering(*entering),
            h,
            v_new,
            final or h,
            HAS_PREV=entering[1] is not None,
            HAS_FINAL=final is not None,
        )
        return made

    def _leaves(self, plan: Plan, q, k, w, g, do, given, dfinal, scale, from_scores: bool) -> Any:
        """The gradient that each segment leaves [segments, H, K, V], the last one of a sequence from dfinal, the others
        from zero."""
        leaves = plan.scratch(*self.of_states)
        self._adjoint(
            plan,
            *(q, k, w, g, do, given),
            scale,
            (leaves, None, None),
            (leaves, leaves),
            leaves,
            dfinal,
            FROM_SCORES=from_scores,
        )
        return leaves

    def _adjoint(
        self,
        plan: Plan,
        q,
        k,
        w,
        g,
        do,
        given,
        scale,
        entering,
        written,
        out,
        outside=None,
        *,
        EVERY_CHUNK=False,
        HAS_FINAL=False,
        FROM_SCORES=False,
    ) -> None:
        self._by_segments(
            plan,
            "adjoint" if EVERY_CHUNK else "leaves",
            adjoint_kernel,
            *(q, k, w, g, do, given),
            self._segments(plan),
            *_entering(*entering),
            *written,
            out,
            outside or out,
            scale=scale,
            HAS_PREV=entering[1] is not None,
            EVERY_CHUNK=EVERY_CHUNK,
            HAS_OUTSIDE=outside is not None,
            HAS_FINAL=HAS_FINAL,
            FROM_SCORES=FROM_SCORES,
        )

    def _segments(self, plan: Plan) -> Any:
        return plan.constant(self.layout.segments)

    def _by_segments(self, plan: Plan, name, kernel, *buffers, **fixed) -> None:
        grid = cdiv(self.V, self.blocks[name]["BV"]), self.layout.num_segments, self.H
        self._launch(plan, name, kernel, grid, *buffers, **self.chunked, **fixed)

    def _launch(self, plan: Plan, name, kernel, grid, *buffers, **fixed) -> None:
        """With the block sizes of ``name``. ``fixed``: the other parameters."""
        plan.launch(kernel, grid, *buffers, **self.common, **self.blocks[name], **fixed)


def _words(plan: Plan, *kept) -> Iterator[Buffer]:
    """Of Kept, as the float32 that they are."""
    return (plan.view(x, 0, *x.shape, dtype=torch.float32) for x in kept)


def _entering(states, through, prev) -> tuple:
    """What kernels take: pointers that are not used where there is no such thing."""
    return states, through or states, prev or states


def functions_with_plans(comm: Communicator) -> dict[str, bool]:
    """Which of fla's functions were traced for calls of this communicator, and whether all of them are plans now."""
    layouts = [x for x in comm.tables.values() if isinstance(x, Layout)]
    derived = [x for layout in layouts for x in layout.all_derived()]
    return FlaReplay(False).plans(*(x.fla for x in derived if isinstance(x, StatePass)))
