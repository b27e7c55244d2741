"""zeco_gla: gated linear attention over a sequence that is cut over the ranks of a communicator."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.autograd import forward_ad

from .carrier import AllScanCarrier, StateCarrier, carrier_of
from .checks import check_tensor
from .collective import default_tile
from .communicator import Communicator
from .layout import CHUNK, find_layout, most_segments, segment_length
from .order import recomputing
from .shmem_kernels.gla_bwd import da_kernel, grad_kernel, wide_grad_kernel
from .shmem_kernels.gla_fwd import (
    carry_kernel,
    final_kernel,
    keys_kernel,
    output_kernel,
    queries_kernel,
    state_kernel,
    wide_kernel,
)

# Tokens of a sub-block, whose pairs of tokens fill the registers of a GPU, and of keys_kernel's step. The interpreter
# pays by the operation.
SUB_BLOCK = {"cuda": 16, "cpu": 32}
STEP = {"cuda": 4, "cpu": 16}

CARRY_WORDS = {"cuda": 256, "cpu": 8192}  # of a program of carry_kernel

MOST_CHUNKS = 65535  # what the second axis of a grid holds

# Operands of products on the tensor cores. float16 could not hold a decay's small end, and tf32 rounds like it.
PRECISION = {torch.bfloat16: "bf16", torch.float16: "tf32x3", torch.float32: "tf32x3"}


def zeco_gla(
    q, k, v, g, *, comm: Communicator, scale: float | None = None, initial_state=None,
    output_final_state: bool = False, cu_seqlens=None,
):  # fmt: skip
    """Gated linear attention with the sequence cut over the ranks; each rank holds consecutive tokens, in rank order.

        S_t = diag(exp(g_t)) S_{t-1} + k_t^T v_t,     o_t = scale * q_t S_t         for every sequence and head

    q, k: [B, T, H, K], v: [B, T, H, V]; this rank's T tokens; bfloat16, float16 or float32, all three alike. K up to
        512. T may differ between ranks; B, H, K and V may not. B * T of a rank at most 65,535 chunks of 64 tokens, a
        sequence's last one on the rank counting as whole.
    g: [B, T, H, K], natural logarithm of the decay, at most 0 (down to -inf is exact); float32, or like q. That no gate
        is positive is checked at the first call for a shape only: looking waits for the GPU.
    scale: default K ** -0.5.
    initial_state: [B or N, H, K, V] float32, the same on every rank: each sequence's state before its first token. Its
        gradient is non-zero on the rank that has this token.
    output_final_state: whether to return each sequence's state after its last token.
    cu_seqlens: packed sequences, B = 1: integers [N + 1] rising from 0 to the number of tokens of *all* ranks; sequence
        i has tokens cu_seqlens[i] .. cu_seqlens[i + 1] - 1 of the whole. The same on every rank; a tensor on the CPU or
        the GPU, or a list. Sequences may be empty, and lie on any number of ranks. On one communicator a cu_seqlens has
        one split: each rank has the same T whenever it comes again. A tensor on the GPU is read once, which waits for
        it; do not change its values afterwards other than by torch, and not at all if made in torch.inference_mode.

    Returns (o, final_state): o [B, T, H, V] like v; final_state [B or N, H, K, V] float32, true on the rank that has
    the sequence's last token and zeros on the others, or None.

    Differentiable in q, k, v, g and initial_state. One scan forward and one in reverse in backward, each moving one
    state of B*H*K*V float32 words from a rank to the next, while the kernels that need nothing remote run. The result
    is ready on the current stream; the host does not wait. All ranks make the same calls in the same order, forward and
    backward; activation checkpointing keeps that order. A torch custom op: torch.compile takes it as a whole. The first
    call for a shape, or for a cu_seqlens, is collective on the host and must come before a CUDA graph's capture.

    Raises TypeError (dtypes), ValueError (shapes, device, cu_seqlens, a positive gate), and what
    :func:`allscan.allscan` raises, before anything is launched.
    Source: ZeCO, arXiv 2507.01004, algorithms 1 and 2.

        >>> o, _ = allscan.zeco_gla(q, k, v, g, comm=comm)         # q[:, t0:t1], ... of the whole sequence
    """
    return zeco_gla_by(AllScanCarrier(comm), q, k, v, g, scale, initial_state, output_final_state, cu_seqlens)


def zeco_gla_by(
    carrier: StateCarrier, q, k, v, g, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None
):
    """:func:`zeco_gla` with the state carried over the ranks by ``carrier``."""
    arguments = carrier, q, k, v, g, scale, initial_state, output_final_state, cu_seqlens
    if torch.compiler.is_compiling():
        return _zeco_gla(*arguments)
    with carrier.comm.call():
        return _zeco_gla(*arguments)


def _zeco_gla(carrier, q, k, v, g, scale, initial_state, output_final_state, cu_seqlens):
    problem = _not_for_an_operator(dict(q=q, k=k, v=v, g=g, initial_state=initial_state), cu_seqlens, scale)
    if problem is not None:
        carrier.prepare(None, problem=problem)  # raises it, on the other ranks too if this is a first call
    if cu_seqlens is not None and not isinstance(cu_seqlens, Tensor):
        cu_seqlens = torch.tensor(cu_seqlens)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    q, k, v, g = q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous()
    if initial_state is not None:
        initial_state = initial_state.contiguous()
    o, final_state, *_ = _forward(q, k, v, g, initial_state, cu_seqlens, scale, output_final_state, carrier.handle)
    return o, final_state if output_final_state else None


def _not_for_an_operator(tensors, cu_seqlens, scale) -> Exception | None:
    """What is wrong with arguments that a custom op does not take as they are."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor) and not (x is None and name == "initial_state"):
            return TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if not (cu_seqlens is None or isinstance(cu_seqlens, Tensor) or hasattr(cu_seqlens, "__len__")):
        return TypeError(f"cu_seqlens must be a tensor or a list, got {type(cu_seqlens).__name__}")
    if not torch.compiler.is_compiling() and any(_has_tangent(x) for x in tensors.values()):
        return NotImplementedError("zeco_gla has no forward-mode derivatives (torch.func.jvp, forward_ad)")
    if scale is not None and not 0.0 < abs(scale) < float("inf"):
        return ValueError(f"scale must be finite and not 0, got {scale}")
    return None


def _has_tangent(x) -> bool:
    return x is not None and forward_ad.unpack_dual(x).tangent is not None


def _check(q, k, v, g, initial_state, cu_seqlens, comm):
    """Raise TypeError or ValueError for arguments that are wrong on this rank."""
    names = dict(q=q, k=k, v=v, g=g)
    for name, x in names.items():
        if x.device != comm.device:
            raise ValueError(f"{name} must be on {comm.device}, got {x.device}")
        if x.ndim != 4 or min(x.shape) < 1:
            raise ValueError(f"{name} must be [B, T, H, K or V] with no empty dimension, got {tuple(x.shape)}")
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32) or not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k, v must be bfloat16, float16 or float32 alike, got {q.dtype}, {k.dtype}, {v.dtype}")
    if g.dtype not in (torch.float32, q.dtype):
        raise TypeError(f"g must be float32 or {q.dtype}, got {g.dtype}")
    if not q.shape == k.shape == g.shape or q.shape[:3] != v.shape[:3]:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in names.items())
        raise ValueError(f"q, k, g must be [B, T, H, K] and v [B, T, H, V], got {shapes}")
    if q.shape[0] * triton.cdiv(q.shape[1], CHUNK) > MOST_CHUNKS:
        raise ValueError(f"B * T must be at most {MOST_CHUNKS:,} chunks of {CHUNK} tokens, got {tuple(q.shape)}")
    if q.shape[-1] > 512:
        raise ValueError(f"K must be at most 512, got {q.shape[-1]}")
    if cu_seqlens is not None:
        if cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
        if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or q.shape[0] != 1:
            raise ValueError(f"cu_seqlens must be [N + 1] with B = 1, got {tuple(cu_seqlens.shape)}, B = {q.shape[0]}")
    if initial_state is not None:
        check_tensor("initial_state", initial_state, _state_shape(q, v, cu_seqlens), comm.device)


def _carried_shape(q, v):
    """Of what travels over the ranks."""
    return q.shape[0] * q.shape[2], q.shape[3], v.shape[3]


def _state_shape(q, v, cu_seqlens):
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return sequences, q.shape[2], q.shape[3], v.shape[3]


def _prepare(q, k, v, g, initial_state, cu_seqlens, carrier):
    """The Layout, after all checks."""
    comm = carrier.comm
    shape = agree = problem = None
    positive = False
    try:
        if q.ndim == v.ndim == 4:
            B = q.shape[0]
            shape = _carried_shape(q, v)
            agree = ("zeco_gla", B, q.dtype, initial_state is None, cu_seqlens is None)
        _check(q, k, v, g, initial_state, cu_seqlens, comm)
        positive = (shape, agree) not in comm.agreements and bool((g > 0).any())
        if positive:
            raise ValueError(f"g must be at most 0, got {g.max().item():g}")
    except (TypeError, ValueError) as error:
        problem = error
    carrier.prepare(shape, agree, problem, at_first=positive)
    layout = find_layout(comm, B, q.shape[1], cu_seqlens, _segment_length(q))
    if max(layout.num_chunks, layout.num_segments) > MOST_CHUNKS:  # of packed sequences
        raise ValueError(f"a rank may have {MOST_CHUNKS:,} chunks of sequences, got {layout.num_chunks:,}")
    return layout


def _segment_length(q) -> int:
    B, T, H, K = q.shape
    return segment_length(B * T, H, q.device.type == "cuda")


class _Launcher:
    """Block sizes, and the launches that forward and backward share."""

    def __init__(self, q, k, v, g, scale, carrier, layout):
        self.q, self.k, self.v, self.g, self.scale, self.carrier, self.layout = q, k, v, g, scale, carrier, layout
        self.H, self.K, self.V = q.shape[2], q.shape[3], v.shape[3]
        self.BT = CHUNK
        self.BK = max(16, triton.next_power_of_2(self.K))
        self.narrow = narrow = q.dtype == torch.bfloat16  # operands of 2 bytes: twice as much fits
        widest = (16384 if narrow else 8192) // max(128, self.BK)  # what the registers hold of a state
        self.BV = min(widest, max(16, triton.next_power_of_2(self.V)))
        self.NT = triton.cdiv(self.V, min(64, self.BV))  # parts of ``through``
        self.columns = min(64, max(16, triton.next_power_of_2(self.V)))  # of V, where there is no state
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
        grid = triton.cdiv(self.V, BV), self.layout.num_segments, self.H
        num_warps = 8 if self.BK * BV > 8192 else 4
        return grid, self.widths | self.precision | dict(BT=self.BT, BK=self.BK, BV=BV, num_warps=num_warps)

    def empty(self, *shape, dtype=torch.float32):
        return self.q.new_empty(*shape, dtype=dtype)

    def keys(self):
        """(k_out, the sums of gates and the wide ones of the chunks): see keys_kernel."""
        chunks, K = self.layout.num_chunks, self.K
        k_out, gate = torch.empty_like(self.k, dtype=self.dtype), self.empty(chunks, self.H, K)
        wide = self.empty(chunks, self.H, dtype=torch.int32)
        keys_kernel[(chunks, self.H)](
            self.k, self.g, self.layout.chunks, k_out, gate, wide,
            H=self.H, K=K, BT=self.BT, BR=self.step, BK=self.BK, RANGE=self.range, num_warps=max(1, self.BK // 128),
        )  # fmt: skip
        return k_out, gate, wide

    def queries(self, gate, wide, dtype):
        """(q_in, A in ``dtype``): see queries_kernel."""
        q, k, g, chunks = self.q, self.k, self.g, self.layout.chunks
        q_in, a = torch.empty_like(q, dtype=self.dtype), self.empty(*q.shape[:3], self.BT, dtype=dtype)
        grid, shape = (self.layout.num_chunks, self.H), dict(H=self.H, K=self.K, BT=self.BT, **self.precision)
        queries_kernel[grid](
            q, k, g, chunks, self.layout.weights, gate, wide, q_in, a, self.scale,
            **shape, BK=min(32, self.BK), num_warps=2 if self.narrow else 4, num_stages=3,
        )  # fmt: skip
        wide_kernel[grid](q, k, g, chunks, wide, q_in, a, self.scale, **shape, BK=self.BK, **self.sub_blocks)
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

    def gradients(self, do, gate, wide, of_scores, of_states):
        """dq, dk, dg: see grad_kernel."""
        q, k, v, g, layout = self.q, self.k, self.v, self.g, self.layout
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(g)
        # also for K = 32: with 32 columns of bfloat16 the ptxas of Triton 3.6 makes wrong code
        BK = 64 if self.narrow else min(32, self.BK)
        blocks = self.widths | self.precision | dict(BT=self.BT, BV=self.columns, NT=self.NT)
        grad_kernel[(triton.cdiv(self.K, BK), layout.num_chunks, self.H)](
            q, k, v, g, do, layout.chunks, layout.weights, gate, wide, *of_scores, *of_states, *grads, self.scale,
            **blocks, BK=BK, num_warps=4, num_stages=self.num_stages,
        )  # fmt: skip
        wide_grad_kernel[(layout.num_chunks, self.H)](
            q, k, v, g, do, layout.chunks, wide, *of_scores, *of_states, *grads, self.scale,
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
        segment, ``prev`` [slots, H, K, V] what enters this rank, ``final`` the ends of the sequences. Returns ``join``:
        what is launched on the current stream after join() has ``prev`` and ``final``."""
        B, H, K, V = prev.shape
        BK, BV = default_tile(K, V, CARRY_WORDS[prev.device.type])
        grid, tables = (triton.cdiv(K, BK), triton.cdiv(V, BV), B * H), (self.layout.segments, self.layout.slots)
        blocks = self.widths | dict(BK=BK, BV=BV, REVERSE=reverse, num_warps=1)
        own, decay = torch.empty_like(prev), self.empty(B * H, K)
        with self.carrier.stream() as join:
            try:
                carry_kernel[grid](
                    states, sums, gates, *tables, states if outside is None else outside, own, decay,
                    prev if final is None else final, HAS_OUTSIDE=outside is not None, HAS_FINAL=final is not None,
                    **blocks,
                )  # fmt: skip
                self.carrier.carry(own.flatten(0, 1), decay, prev.flatten(0, 1), ticket=ticket, reverse=reverse)
            except BaseException:
                join()  # what was launched uses memory that is given back now
                raise

        def join_and_finish(_kept=(own, decay)):  # until then another stream uses them
            join()
            if final is not None and self.carrier.comm.size > 1:
                final_kernel[grid](final, sums, gates, *tables, prev, **blocks)

        return join_and_finish

    def outputs(self, x, y, z, a, gate, entering, o, chunks, reverse):
        """See output_kernel; ``chunks``: states, dstates, through."""
        grid, blocks = self.by_segments(min(64, self.BV) if reverse else self.BV)
        output_kernel[grid](
            x, y, z, a, gate, self.layout.segments, *entering, o, *chunks, self.scale,
            **blocks, REVERSE=reverse, num_stages=min(self.state_stages, 2 if reverse else 3),
        )  # fmt: skip


def _state_tensors(q, v, cu_seqlens, final):
    """Uninitialised (final_state, what enters each segment, its gates, what enters this rank)."""
    B, T, H, K = q.shape
    shape = _state_shape(q, v, cu_seqlens)
    segments = most_segments(B, T, shape[0], _segment_length(q))
    empty = q.new_empty
    states, gates = (empty(s, dtype=torch.float32) for s in ((segments, *shape[1:]), (segments, H, K)))
    final_state = q.new_zeros(shape if final else 0, dtype=torch.float32)
    return final_state, states, gates, empty(B, *shape[1:], dtype=torch.float32)


@torch.library.custom_op("allscan::zeco_gla_forward", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    scale: float, final: bool, handle: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(o, final_state or nothing, and for backward: the states that enter each segment, their gates, and this rank; the
    number of this call)."""
    carrier = carrier_of(handle)
    with carrier.comm.call():
        layout = _prepare(q, k, v, g, initial_state, cu_seqlens, carrier)
        return _forward_kernels(
            q, k, v, g, initial_state, cu_seqlens, final, _Launcher(q, k, v, g, scale, carrier, layout)
        )


def _forward_kernels(q, k, v, g, initial_state, cu_seqlens, final, launcher):
    final_state, states, gates, prev = _state_tensors(q, v, cu_seqlens, final)
    k_out, gate, wide = launcher.keys()
    sums = launcher.segment_states(k_out, v, gate, states, reverse=False)
    ticket = launcher.empty(1, dtype=torch.int64)
    join = launcher.carry(
        states, sums, gates, initial_state, prev, final_state if final else None, ticket, reverse=False
    )
    try:
        q_in, a = launcher.queries(gate, wide, launcher.dtype)
    finally:
        join()  # in any case: what the side stream uses may not be given back before
    o = torch.empty_like(v)
    launcher.outputs(k_out, v, q_in, a, gate, (states, gates, prev), o, (o, o, o), reverse=False)
    return o, final_state, states, gates, prev, ticket


@_forward.register_fake
def _(q, k, v, g, initial_state, cu_seqlens, scale, final, handle):
    return torch.empty_like(v), *_state_tensors(q, v, cu_seqlens, final), q.new_empty(1, dtype=torch.int64)


@torch.library.custom_op("allscan::zeco_gla_backward", mutates_args=())
def _backward(
    do: Tensor, dfinal: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, cu_seqlens: Tensor | None,
    states: Tensor, gates: Tensor, prev: Tensor, ticket: Tensor, scale: float, initial: bool, handle: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv, dg, dinitial_state or nothing)."""
    carrier = carrier_of(handle)
    with carrier.comm.call(reverse=True):
        layout = find_layout(carrier.comm, *q.shape[:2], cu_seqlens, _segment_length(q))
        launcher = _Launcher(q, k, v, g, scale, carrier, layout)
        return _backward_kernels(do, dfinal, q, v, cu_seqlens, states, gates, prev, ticket, initial, launcher)


def _backward_kernels(do, dfinal, q, v, cu_seqlens, states, gates, prev, ticket, initial, launcher):
    dinitial, dstates, dgates, dprev = _state_tensors(q, v, cu_seqlens, initial)
    k_out, gate, wide = launcher.keys()
    q_in, a = launcher.queries(gate, wide, torch.float32)
    sums = launcher.segment_states(q_in, do, gate, dstates, reverse=True)
    join = launcher.carry(dstates, sums, dgates, dfinal, dprev, dinitial if initial else None, ticket, reverse=True)
    try:
        states, chunk_dstates = launcher.chunk_states(k_out, v, gate, (states, gates, prev))
        of_scores = launcher.score_gradients(do)
    finally:
        join()
    through = launcher.empty(launcher.layout.num_chunks, launcher.H, launcher.NT, launcher.K)
    dv = torch.empty_like(v)
    chunks = (states, chunk_dstates, through)
    launcher.outputs(q_in, do, k_out, a, gate, (dstates, dgates, dprev), dv, chunks, reverse=True)
    del q_in, k_out, a
    dq, dk, dg = launcher.gradients(do, gate, wide, of_scores, chunks)
    return dq, dk, dv, dg, dinitial


@_backward.register_fake
def _(do, dfinal, q, k, v, g, cu_seqlens, states, gates, prev, ticket, scale, initial, handle):
    return *(torch.empty_like(x) for x in (q, k, v, g)), _state_tensors(q, v, cu_seqlens, initial)[0]


def _save(ctx, inputs, output):
    q, k, v, g, initial_state, cu_seqlens, ctx.scale, _, ctx.handle = inputs
    ctx.initial = initial_state is not None and initial_state.requires_grad
    ctx.save_for_backward(q, k, v, g, cu_seqlens, *output[2:])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    no_node = type(output[0]) is not Tensor or recomputing()  # traced by torch.compile, or checkpointing's
    ctx.pending = None if no_node else carrier_of(ctx.handle).pending(_carried_shape(q, v))


def _gradient(ctx, do, dfinal, *_):
    if ctx.pending is not None:
        ctx.pending.run()
    q, k, v, g, cu_seqlens, *saved = ctx.saved_tensors
    do = torch.zeros_like(v) if do is None else do.contiguous()
    dfinal = None if dfinal is None else dfinal.contiguous()
    grads = _backward(do, dfinal, q, k, v, g, cu_seqlens, *saved, ctx.scale, ctx.initial, ctx.handle)
    return *grads[:4], grads[4] if ctx.initial else None, None, None, None, None


torch.library.register_autograd("allscan::zeco_gla_forward", _gradient, setup_context=_save)
