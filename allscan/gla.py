"""zeco_gla: gated linear attention over a sequence that is cut over the ranks of a communicator."""

from __future__ import annotations

import torch
import triton

from .communicator import Communicator
from .scan import check_tensor, persistent
from .shmem_kernels.channel import lonely
from .shmem_kernels.gla_bwd import grad_kernel, intra_grad_kernel, score_grad_kernel
from .shmem_kernels.gla_fwd import carry_kernel, intra_kernel, output_kernel, state_kernel

# Tokens of a sub-block. On GPUs its pairs of tokens fill the registers; the interpreter pays by the program.
SUB_BLOCK = {"cuda": 16, "cpu": 32}


def zeco_gla(
    q, k, v, g, *, comm: Communicator, scale: float | None = None, initial_state=None,
    output_final_state: bool = False, cu_seqlens=None,
):  # fmt: skip
    """Gated linear attention with the sequence cut over the ranks; each rank holds consecutive tokens, in rank order.

        S_t = diag(exp(g_t)) S_{t-1} + k_t^T v_t,     o_t = scale * q_t S_t         for every batch entry and head

    q, k: [B, T, H, K], v: [B, T, H, V]; this rank's T tokens; bfloat16, float16 or float32, all three alike.
    g: [B, T, H, K], natural logarithm of the decay, at most 0 (down to -inf is exact); float32, or like q.
    scale: default K ** -0.5.
    initial_state: [B, H, K, V] float32, the same on every rank: the state before the first rank's first token. Its
        gradient is non-zero on the first rank only.
    output_final_state: whether to return the state after the last rank's last token.
    cu_seqlens: packed sequences; not supported yet, must be None.

    Returns (o, final_state): o [B, T, H, V] like v; final_state [B, H, K, V] float32, true on the last rank and zeros
    on the others, or None. K and V up to 256. T may differ between ranks; B, H, K and V may not.

    Differentiable in q, k, v, g and initial_state. One scan forward and one in reverse in backward, each moving one
    state of B*H*K*V float32 words from a rank to the next. Runs on the current stream; the host does not wait. All
    ranks make the same calls in the same order, forward and backward.

    Raises TypeError (dtypes), ValueError (shapes, device), NotImplementedError (cu_seqlens), and what
    :func:`allscan.allscan` raises, before anything is launched.
    Source: ZeCO, arXiv 2507.01004, algorithms 1 and 2.

        >>> o, _ = allscan.zeco_gla(q, k, v, g, comm=comm)         # q[:, t0:t1], ... of the whole sequence
    """
    if cu_seqlens is not None:
        raise NotImplementedError("zeco_gla does not take packed sequences (cu_seqlens) yet")
    shape = agree = problem = None
    try:
        _check(q, k, v, g, initial_state, comm)
        B, _, H, K = q.shape
        shape, agree = (B * H, K, v.shape[-1]), ("zeco_gla", B, q.dtype, initial_state is None)
    except (TypeError, ValueError) as error:
        problem = error
    scan = persistent(comm, shape, agree, problem)
    if initial_state is not None:
        initial_state = initial_state.contiguous()
    scale = K**-0.5 if scale is None else float(scale)
    o, final_state = _ZecoGla.apply(*(x.contiguous() for x in (q, k, v, g)), initial_state, scale, scan)
    return o, final_state if output_final_state else None


def _check(q, k, v, g, initial_state, comm):
    names = dict(q=q, k=k, v=v, g=g)
    for name, x in names.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
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
    if max(q.shape[-1], v.shape[-1]) > 256:
        raise ValueError(f"K and V must be at most 256, got {q.shape[-1]} and {v.shape[-1]}")
    if initial_state is not None:
        B, _, H, K = q.shape
        check_tensor("initial_state", initial_state, (B, H, K, v.shape[-1]), comm.device)


class _Shape:
    """Sizes, block sizes and launches that forward and backward share."""

    def __init__(self, q, v, scale, scan):
        self.B, self.T, self.H, self.K = q.shape
        self.V = v.shape[-1]
        self.BT = BT = 64 if self.K <= 128 else 32  # tokens of a chunk
        self.BC = SUB_BLOCK[q.device.type]
        self.N = triton.cdiv(self.T, BT)
        self.BH = self.B * self.H
        self.scale, self.scan = scale, scan
        self.BK = max(16, triton.next_power_of_2(self.K))
        self.BV = min(64, max(16, triton.next_power_of_2(self.V)))
        self.NV = triton.cdiv(self.V, self.BV)
        self.BS = min(32, self.BK)
        self.precision = dict(PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32")
        self.widths = dict(H=self.H, K=self.K, V=self.V)
        self.blocks = dict(BT=BT, BK=self.BK, BV=self.BV)

    def states(self, x, y, g, initial, channel, reverse):
        """([BH, N, K, V] entering each chunk, [BH, K, V] entering this rank, the same leaving the last rank)."""
        states = x.new_empty(self.BH, self.N, self.K, self.V, dtype=torch.float32)
        gates = x.new_empty(self.BH, self.N, self.K, dtype=torch.float32)
        prev, final = (states.new_empty(self.B, self.H, self.K, self.V) for _ in range(2))
        state_kernel[(self.NV, self.N, self.BH)](
            x, y, g, states, gates, self.T, self.N, self.scale,
            **self.widths, **self.blocks, REVERSE=reverse, **self.precision,
        )  # fmt: skip
        self.scan.launch(
            carry_kernel, (self.scan.num_tiles,), states, gates, states if initial is None else initial, prev, final,
            channel, self.N, K=self.K, V=self.V, HAS_INITIAL=initial is not None, REVERSE=reverse, num_warps=1,
        )  # fmt: skip
        return states, prev, final

    def scores(self, q, k, g):
        """A [B, T, H, BT]; above the diagonal it holds nothing."""
        a = q.new_empty(self.B, self.T, self.H, self.BT, dtype=torch.float32)
        intra_kernel[(self.N * (self.BT // self.BC), self.BH)](
            q, k, g, a, self.T, self.scale,
            H=self.H, K=self.K, BT=self.BT, BC=self.BC, BK=self.BK, BS=self.BS, **self.precision,
        )  # fmt: skip
        return a


class _ZecoGla(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, initial_state, scale, scan):
        shape = _Shape(q, v, scale, scan)
        states, prev, final = shape.states(k, v, g, initial_state, scan.channel(), reverse=False)
        a = shape.scores(q, k, g)
        o = torch.empty_like(v)
        output_kernel[(shape.NV, shape.N, shape.BH)](
            q, v, g, a, states, o, shape.T, shape.N, scale, **shape.widths, **shape.blocks, **shape.precision
        )
        ctx.save_for_backward(q, k, v, g, prev)
        ctx.shape = shape
        ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dfinal):
        q, k, v, g, prev = ctx.saved_tensors
        shape, scan = ctx.shape, ctx.shape.scan
        do = torch.zeros_like(v) if do is None else do.contiguous()
        dfinal = None if dfinal is None else dfinal.contiguous()
        dstates, _, dinitial = shape.states(q, do, g, dfinal, scan.channel(reverse=True), reverse=True)
        states, _, _ = shape.states(k, v, g, prev, lonely(scan.channel()), reverse=False)
        a = shape.scores(q, k, g)
        da = torch.empty_like(a)
        score_grad_kernel[(shape.N, shape.BH)](
            v, do, da, shape.T, shape.scale, H=shape.H, V=shape.V, BT=shape.BT, BV=shape.BV, **shape.precision
        )
        dq_intra, dk_intra = (torch.empty_like(q, dtype=torch.float32) for _ in range(2))
        intra_grad_kernel[(triton.cdiv(shape.K, shape.BS), shape.N * (shape.BT // shape.BC), shape.BH)](
            q, k, g, da, dq_intra, dk_intra, shape.T,
            H=shape.H, K=shape.K, BT=shape.BT, BC=shape.BC, BK=shape.BK, BS=shape.BS, **shape.precision,
        )  # fmt: skip
        dq, dk, dv, dg = (torch.empty_like(x) for x in (q, k, v, g))
        blocks = shape.blocks | dict(BV=min(32, shape.BV))
        grad_kernel[(shape.N, shape.BH)](
            q, k, v, g, do, a, states, dstates, dq_intra, dk_intra, dq, dk, dv, dg, shape.T, shape.N, shape.scale,
            **shape.widths, **blocks, **shape.precision, num_stages=1,
            num_warps=8 if shape.BK >= 64 else 4,  # Triton 3.6, K = 16, float32, 8 warps: shared address out of range
        )  # fmt: skip
        return dq, dk, dv, dg, dinitial if ctx.needs_input_grad[4] else None, None, None
