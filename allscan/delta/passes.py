"""The passes of a delta rule over the states of a rank's chunks, forward and backward, with All-Scan over the ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..collective import AllScan
from ..communicator import Communicator
from ..errors import Problem
from ..first_call import get_or_create_scan
from ..launching import Launch
from ..order import zigzag_channels
from ..packing import CHUNK_TOKENS, KEPT, Layout
from ..shmem_kernels.delta import (
    adjoint_kernel,
    delta_carry_kernel,
    delta_states_kernel,
    scalar_gradient_kernel,
    summary_kernel,
)
from ..tiling import cdiv, next_power_of_2, transition_tile

PRECISION = {torch.bfloat16: "bf16", torch.float16: "tf32x3", torch.float32: "tf32x3"}  # see gla.launches
PROGRAMS = 128  # of the passes over segments: about one a multiprocessor


def delta_segment_length(tokens: int, H: int, cuda: bool) -> int:
    """Tokens of a segment, whole chunks: few and long, since each has a transition, yet enough to fill a GPU."""
    if not cuda:
        return 2 * CHUNK_TOKENS
    number = max(1, min(32, PROGRAMS // H))
    return max(4 * CHUNK_TOKENS, cdiv(cdiv(tokens, number), CHUNK_TOKENS) * CHUNK_TOKENS)


def blocks(BK: int, widest: int, dtype: torch.dtype, scalar: bool) -> dict[str, dict[str, int]]:
    """Block sizes and warps of each kernel on a GPU: what fits the registers (tests/test_compile.py)."""
    fine, BJ = dtype != torch.bfloat16, 32 if BK > 16 else 16
    wide = BK > 128 or fine
    columns = min(16 if fine else 32 if wide else 128, widest)
    rows = (16 if BK > 128 else 32) if fine else 64 if wide else 128
    # where 8 warps have 16 columns of a product with 64 rows, Triton 3.6 makes them read outside of shared memory
    summary = dict(num_warps=8 if widest >= 32 or fine else 4, num_stages=1 if wide else 3)
    several = dict(BV=columns, BJ=BJ, num_warps=8 if wide or columns == 128 else 4, num_stages=1 if wide else 2)
    return dict(
        summary=summary | dict(BR=min(rows, BK), BV=min(64 if wide else 128, widest)),
        carry=dict(BC=16, BJ=min(64, BK), num_warps=4 if BK <= 128 else 8),
        states=several if wide else several | dict(BV=min(64, widest), num_warps=4),
        leaves=several if wide else several | dict(num_stages=3),
        adjoint=several,
        gradients=dict(BV=min(32 if wide else 64, widest), BJ=min(32 if wide else 64, BK), num_warps=4, num_stages=1),
    )


def blocks_of_cpus(BK: int, widest: int) -> dict[str, dict[str, int]]:
    """The same for the interpreter, which pays by the operation."""
    several = dict(BV=widest, BJ=BK)
    return dict(
        summary=dict(BR=BK, BV=widest), carry=dict(BC=max(BK, widest), BJ=BK), states=several, leaves=several,
        adjoint=several, gradients=several,
    )  # fmt: skip


def prepare(comm: Communicator, shape, agree=None, problem: Problem | None = None, at_first: bool = False) -> AllScan:
    """The All-Scan with transitions of a state of this shape [.., K, V]; see get_or_create_scan."""
    tile = None if shape is None else transition_tile(shape[-2])
    return get_or_create_scan(comm, shape, agree, problem, tile, at_first)


class Kept(NamedTuple):
    """What backward takes from forward."""

    transitions: Tensor  # [segments, H, K, K]
    enters: Tensor  # [segments, H, K, V], what has entered each
    ticket: Tensor  # number of the call


class StatePass:
    """Forward and backward through the states of this rank's chunks: the launches, made once for calls that differ in
    their tensors only.

    layout: of this rank's tokens, with segments of delta_segment_length; B states of H heads travel, with ``zigzag``
    twice as many: of the first half of a batch entry's tokens, and of the second. scalar: gates are
    one number a token and head, and k and q, of HK heads, come without them. dtype: of k, w, u.
    """

    def __init__(
        self, comm: Communicator, layout: Layout, B: int, H: int, HK: int, K: int, V: int, dtype: torch.dtype,
        scalar: bool, zigzag: bool = False,
    ) -> None:  # fmt: skip
        self.comm, self.layout, self.B, self.H, self.K, self.V = comm, layout, B, H, K, V
        self.zigzag, self.num_states = zigzag, 2 * B if zigzag else B
        self.alone = comm.size == 1 and not zigzag  # nothing travels
        self.cuda = comm.device.type == "cuda"
        BK = max(16, next_power_of_2(K))
        self.common = dict(H=H, K=K, V=V, BK=BK)
        self.chunked = dict(HK=HK, BT=CHUNK_TOKENS, SCALAR=scalar, PRECISION=PRECISION[dtype])
        widest = max(16, next_power_of_2(V))
        self.blocks = blocks(BK, widest, dtype, scalar) if self.cuda else blocks_of_cpus(BK, widest)
        self._launches: dict[tuple, Launch] = {}

    def empty(self, *shape, dtype=torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.comm.device)

    def forward(self, k, w, u, g, initial, final: Tensor | None, kept: Kept):
        """(h [chunks, H, K, V], the state that enters each chunk, like k; v_new, like u). ``kept`` is filled, and
        ``final`` [N, H, K, V] float32 where a sequence ends here. initial: [N, H, K, V] float32 or None."""
        leaves = self.states()
        if not self.alone or self.layout.num_segments > self.B:
            self._summaries(k, w, u, g, kept.transitions, leaves)
        room = self._room(False)
        through, prev = self._carry(kept.transitions, leaves, kept.enters, initial, kept.ticket, False, room)
        return self._states(k, w, u, g, kept.enters, through, prev, final)

    def _summaries(self, k, w, u, g, transitions, leaves) -> None:
        rows, columns = cdiv(self.K, self.blocks["summary"]["BR"]), cdiv(self.V, self.blocks["summary"]["BV"])
        grid, tensors = (rows * columns, self.layout.num_segments, self.H), (k, w, u, g, self.layout.segments)
        self._launch("summary", summary_kernel, grid, *tensors, transitions, leaves, **self.chunked)

    def _room(self, reverse):
        """(what the rank leaves, by which matrix what enters the rank comes to each segment, by which it leaves the
        rank, what enters the rank), uninitialised, of the current stream; None where there is no such thing."""
        H, K = self.H, self.K
        own = self.empty(self.num_states * H, K, self.V)
        prev = None if self.alone else torch.empty_like(own)
        if self.alone or not (self.layout.left if reverse else self.layout.entered):
            return own, None, None, prev
        return own, self.empty(self.layout.num_segments, H, K, K), self.empty(self.num_states * H, K, K), prev

    def _through(self, transitions, leaves, enters, outside, reverse, room=None):
        """Fill ``enters`` with what enters each segment from this rank's tokens, of what each leaves. Returns (by which
        matrix what enters the rank comes to each segment, what the rank leaves, by which matrix what enters it leaves
        it); the matrices are None where nothing enters."""
        own, through, dense, _ = room or self._room(reverse)
        layout, block = self.layout, self.blocks["carry"]["BC"]
        columns = cdiv(self.V, block) + (0 if through is None else cdiv(self.K, block))
        self._launch(
            "carry", delta_carry_kernel, (columns, self.num_states * self.H),
            transitions, leaves, layout.segments, layout.first_segments, leaves if outside is None else outside,
            enters, enters if through is None else through, own, own if dense is None else dense,
            HAS_OUTSIDE=outside is not None, REVERSE=reverse,
        )  # fmt: skip
        return through, own, dense

    def _carry(self, transitions, leaves, enters, outside, ticket, reverse, room):
        """_through, and the scan. Returns (by which matrix what enters the rank comes to each segment, what enters the
        rank), None where nothing does."""
        prev = room[3]
        through, own, dense = self._through(transitions, leaves, enters, outside, reverse, room)
        if prev is None:
            return None, None
        scan = prepare(self.comm, (self.B * self.H, *own.shape[1:]))
        if self.zigzag:
            self._there_and_back(scan, own, dense, prev, ticket, reverse)
        else:
            channel = scan.channel(reverse, **{"adjoint_of" if reverse else "ticket": ticket[:1]})
            # where no sequence goes through the whole rank, nothing that enters it leaves it
            passing = dict(transition=dense) if self.layout.passing else dict(decay=0)
            scan.scan(own, **passing, reverse=reverse, channel=channel, out=prev)
        return (None, None) if through is None else (through, prev)

    def _there_and_back(self, scan, own, dense, prev, ticket, reverse) -> None:
        """Fill ``prev`` in the zigzag layout. Backward, what goes from the first rank to the last are second halves."""
        order = (1, 0) if reverse else (0, 1)

        def half(x, i):
            return x.unflatten(0, (self.B, 2, self.H))[:, i].flatten(0, 1)

        passing = [any(index % 2 == i for index in self.layout.passing) for i in order]
        decays = tuple(None if passes else 0 for passes in passing)
        transitions = tuple(half(dense, i) if passes else None for i, passes in zip(order, passing, strict=True))
        states, channels = (half(own, i) for i in order), zigzag_channels(scan, ticket, reverse)
        found = scan.there_and_back(*states, decays=decays, transitions=transitions, channels=channels)
        for i, x in zip(order, found, strict=True):
            prev.unflatten(0, (self.B, 2, self.H))[:, i] = x.unflatten(0, (self.B, self.H))

    def total(self, k, w, u, g) -> tuple[Tensor, Tensor]:
        """(what this rank leaves from zero [B * H, K, V], its transition [B * H, K, K]) of a layout whose sequences
        neither begin nor end here."""
        transitions, states = self.empty(self.layout.num_segments, self.H, self.K, self.K), self.states()
        self._summaries(k, w, u, g, transitions, states)
        return self._through(transitions, states, self.states(), None, reverse=False)[1:]

    def total_back(self, q, k, w, g, do, dv, scale) -> tuple[Tensor, Tensor]:
        """The same of the gradient, from the end to the beginning."""
        transitions, states = self.empty(self.layout.num_segments, self.H, self.K, self.K), self.states()
        self._summaries(k, w, do, g, transitions, states)
        leaves = self.leaves(q, k, w, g, do, None, None, scale, dv=dv)
        return self._through(transitions, leaves, states, None, reverse=True)[1:]

    def states(self) -> Tensor:
        """Uninitialised, one for each segment."""
        return self.empty(self.layout.num_segments, self.H, self.K, self.V)

    def _entering(self, states, through, prev) -> tuple:
        return (states, *(states if x is None else x for x in (through, prev)))

    def _by_segments(self, name, kernel, *tensors, **fixed) -> None:
        grid = cdiv(self.V, self.blocks[name]["BV"]), self.layout.num_segments, self.H
        self._launch(name, kernel, grid, *tensors, **self.chunked, **fixed)

    def _launch(self, name, kernel, grid, *tensors, **fixed) -> None:
        """With the block sizes of ``name``. ``fixed``: the other parameters."""
        key = (name, grid, *fixed.values(), *(x.dtype for x in tensors))
        launch = self._launches.get(key)
        if launch is None:
            if len(self._launches) >= KEPT:  # of calls with ever other scales
                self._launches.clear()
            launch = self._launches[key] = Launch(kernel, grid, **self.common, **self.blocks[name], **fixed)
        launch(*tensors)

    def _states(self, k, w, u, g, enters, through, prev, final):
        h, v_new = self.empty(self.layout.num_chunks, self.H, self.K, self.V, dtype=k.dtype), torch.empty_like(u)
        self._by_segments(
            "states", delta_states_kernel, k, w, u, g, self.layout.segments, *self._entering(enters, through, prev),
            h, v_new, h if final is None else final, HAS_PREV=prev is not None, HAS_FINAL=final is not None,
        )  # fmt: skip
        return h, v_new

    def again(self, k, w, u, g, kept: Kept):
        """(h, v_new) of forward."""
        return self._states(k, w, u, g, kept.enters, None, None, None)

    def leaves(self, q, k, w, g, do, scores, dfinal, scale, *, dv: Tensor | None = None) -> Tensor:
        """The gradient that each segment leaves [segments, H, K, V], the last one of a sequence from dfinal, the others
        from zero. ``dv``, or scores Aqk to make it of."""
        leaves = self.states()
        given = scores if dv is None else dv
        nothing = leaves, leaves
        self._adjoint(q, k, w, g, do, given, scale, leaves, None, None, nothing, leaves, dfinal, from_scores=dv is None)
        return leaves

    def carry_back(self, leaves, dfinal, kept: Kept):
        """(what enters each segment from behind, for :meth:`backward`; join): the scan is launched beside the current
        stream, which is to wait for it by ``join()``, in any case."""
        room, enters = self._room(True), self.states()  # here, since memory belongs to the stream on which it is taken
        with self.comm.streams.side() as join:
            try:
                through, next_ = self._carry(kept.transitions, leaves, enters, dfinal, kept.ticket, True, room)
            except BaseException:
                join()
                raise

        def join_and_free(_kept=(room, leaves)):  # until then another stream uses it
            join()

        return (enters, through, next_), join_and_free

    def backward(self, q, k, w, g, do, dv, scale, entering, dinitial: Tensor | None):
        """(dh [chunks, H, K, V], the gradient of the state that leaves each chunk, like k; dv', like dv). dinitial is
        filled where a sequence begins here."""
        dh, dv_new = self.empty(self.layout.num_chunks, self.H, self.K, self.V, dtype=k.dtype), torch.empty_like(dv)
        out = dh if dinitial is None else dinitial
        enters, through, next_ = entering
        written, final = (dh, dv_new), dinitial is not None
        self._adjoint(q, k, w, g, do, dv, scale, enters, through, next_, written, out, every=True, final=final)
        return dh, dv_new

    def gradients(self, q, k, v_new, w, g, do, dv, h, dh, scale):
        """Of a rule with one gate a head: (dq, dk, dw, like w, and dg, like g), see scalar_gradient_kernel."""
        dq, dk, dw, dg = (torch.empty_like(x) for x in (w, w, w, g))
        chunked = {name: value for name, value in self.chunked.items() if name != "SCALAR"}
        self._launch(
            "gradients", scalar_gradient_kernel, (self.layout.num_chunks, self.H),
            q, k, v_new, g, do, dv, h, dh, self.layout.chunks, dq, dk, dw, dg, scale=scale, **chunked,
        )  # fmt: skip
        return dq, dk, dw, dg

    def _adjoint(self, q, k, w, g, do, dv, scale, enters, through, prev, written, out, outside=None, *,
                 every=False, final=False, from_scores=False) -> None:  # fmt: skip
        self._by_segments(
            "adjoint" if every else "leaves", adjoint_kernel, q, k, w, g, do, dv, self.layout.segments,
            *self._entering(enters, through, prev), *written, out, out if outside is None else outside, scale=scale,
            HAS_PREV=prev is not None, EVERY_CHUNK=every, HAS_OUTSIDE=outside is not None, HAS_FINAL=final,
            FROM_SCORES=from_scores,
        )  # fmt: skip
