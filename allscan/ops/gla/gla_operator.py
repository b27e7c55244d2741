"""zeco_gla: gated linear attention over a sequence that is sharded across the ranks of a communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...base.tiling import multiprocessors
from ...comm.communicator import Communicator
from ...launch.plan import Plan
from ...tokens.packing import Layout
from ..carrier import StateCarrier
from ..gpu_blocks import gpu_kind
from ..operator import Asked, Call, PreparedCall, SequenceOperator, check_dtypes, layout_of
from .gla_plans import Shape, backward_plan, forward_plan, shape_of

SAVED_DTYPE = torch.int32  # of the saved buffer: integers, so that a saved_tensors_hook does not treat it as floats


def zeco_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    comm: Communicator,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | str = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    first_token: int | None = None,
    layout: str = "contiguous",
    per_document: bool = False,
    recompute: bool | None = None,
    invariant: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention over a sharded sequence; each rank holds consecutive tokens, in rank order.

        S_0 = initial_state (or 0),   S_t = diag(exp(g_t)) S_{t-1} + k_t^T v_t,   o_t = scale * q_t S_t

    The function is differentiable in q, k, v, g and initial_state. Forward runs one scan over the ranks; backward runs
    one scan in reverse. Each scan sends one state of B*H*K*V float32 words from each rank to the next, overlapped with
    the kernels that need no remote data. The result is ready on the current stream; the host does not wait. All ranks
    must make the same calls in the same order, forward and backward; activation checkpointing keeps that order.
    torch.compile traces the call as one custom operator. The first call for a shape, or for a cu_seqlens, is collective
    on the host and must come before a CUDA graph's capture.

    Args:
        q, k, v: [B, T, H, K] (v: V), this rank's T tokens; bfloat16, float16 or float32, one dtype for all three. K is
            at most 512. T may differ between ranks and between calls, and may be 0: such a rank forwards the incoming
            state. B, H, K and V must be equal on all ranks. A rank has at most 65,535 chunks of 64 tokens in its
            B * T tokens; the last chunk of each sequence on the rank counts as full.
        g: [B, T, H, K], natural logarithm of the decay, at most 0 (-inf is exact); float32, or q's dtype. Positive and
            NaN gates are detected at the first call for a shape and in debug mode only, because the check
            synchronizes with the GPU.
        comm: the communicator.
        scale: factor of the output, finite and not 0, K ** -0.5 by default; equal on all ranks.
        initial_state: [B or N, H, K, V] float32, equal on all ranks: each sequence's state before its first token.
            Its gradient is non-zero only on the rank with this token; without cu_seqlens, on the first rank.
        output_final_state: whether to return each sequence's state after its last token. Each rank may choose for
            itself. "all", on all ranks or on none: every rank gets the final state, to decode after a sharded prefill.
            One more scan, with cu_seqlens two for every 8 sequences, sends it from its rank to the others; its gradient
            is the sum over the ranks.
        cu_seqlens: packed sequences, B = 1: integers [N + 1] rising from 0 to the number of tokens of *all* ranks;
            sequence i has tokens cu_seqlens[i] .. cu_seqlens[i + 1] - 1 of the row. Equal on all ranks; a tensor
            on the CPU or the GPU, or a list. Sequences may be empty and may span any number of ranks. A communicator
            binds a cu_seqlens to one partition: each rank must have the same T in every call with it. Backward uses
            the values from the time of the forward call. A tensor on the GPU is read once, which synchronizes, and
            again after a write that torch has counted. Do not change it in other ways (``.data``, other code's
            kernels, a CUDA graph's replay); do not change a tensor from torch.inference_mode at all. Debug mode
            detects such changes. In a CUDA graph's capture, pass a list or a CPU tensor.
        first_token: with cu_seqlens, the position of this rank's first token in the global sequence, on all ranks or on
            none. A new cu_seqlens then needs no exchange on the host, and its partition may change between calls. The
            caller guarantees that the ranks' tokens are contiguous; debug mode checks it.
        layout: "contiguous", or "zigzag", the layout that balances causal softmax attention: the row is split into 2P
            chunks; rank r has chunk r in the first half of its T tokens and chunk 2P - 1 - r in the second. T is even.
            Two states are sent instead of one: the state of the first halves in an ascending scan, then the state of
            the second halves in a descending scan. first_token is the position of the first half; rank 0 has
            final_state.
        per_document: for packed sequences in the zigzag layout; equal on all ranks. False: the whole row is split,
            wherever sequences begin. True: each sequence is split into 2P chunks of its own, and rank r has chunks r
            and 2P - 1 - r of each, one sequence after the other (``allscan.zigzag.zigzag_positions``): each length is
            a multiple of 2P, T is 1 / P of the row on every rank, and first_token is r T / 2. An ascending and a
            descending scan then send the states of all N sequences; N, rounded up to a power of 2, is part of the
            shape.
        recompute: whether backward recomputes the decayed queries and keys and the scores inside the chunks. False:
            forward saves them for backward, about B * T * H * (4 * K + 256) bytes for bfloat16 inputs, 8 * K + 256 in
            place of 4 * K + 256 for others, and backward runs two kernels fewer. Without gradients nothing is saved in
            either case. Each rank may choose for itself. Default: the communicator's value.
        invariant: tokens of a segment, a multiple of 64 such as 2,048; equal on all ranks. The results of the call and
            of its backward are then bitwise equal for every number of ranks, one included, and for every partition
            whose boundaries are multiples of it (docs/invariant.md). 0: no such guarantee; the segment length is
            chosen for speed. Default: the communicator's value. Not with per_document.

    Returns:
        (o, final_state): o [B, T, H, V] like v; final_state [B or N, H, K, V] float32, or None. without
        cu_seqlens the last rank has it (zigzag: the first), also without tokens; with cu_seqlens the rank with the
        sequence's last token. Other ranks have zeros. With "all" every rank has it.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: shapes, device or cu_seqlens are wrong, or a gate is positive.
        RuntimeError, MemoryError, NotImplementedError, AllScanError: as ``allscan.allscan``.

    Example:
        >>> o, _ = allscan.zeco_gla(q, k, v, g, comm=comm)         # q[:, t0:t1], ... of the global sequence

    Source:
        ZeCO, arXiv 2507.01004, algorithms 1 and 2.
    """
    asked = Asked(output_final_state, (), scale, cu_seqlens, first_token, layout, per_document, invariant, recompute)
    return GLA.run(comm, "zeco_gla", (q, k, v, g, initial_state), asked)


class BufferedCall(PreparedCall):
    """Calls of one signature that save one buffer: shape, token layout and launch plans. words: of the buffer."""

    def __init__(
        self,
        carrier: StateCarrier,
        shape: Any,
        layout: Layout,
        call: Call,
        first_token: int | None,
        words: int,
        saved_specs: list[tuple[Any, ...]],
    ) -> None:
        super().__init__(carrier, call, first_token, (shape.sequences, shape.H, shape.K, shape.V), shape.carried)
        self.shape, self.layout, self.words, self.saved_specs = shape, layout, words, saved_specs
        self._plans: dict[tuple, Plan] = {}  # by variant of the pass

    def _record(self, variant: tuple, make: Callable[[Layout], Plan], *alike: object) -> Plan:
        """Return the plan of a pass, which ``make(layout)`` records. ``variant``: what else determines it; ``alike``:
        what else is equal on all ranks."""
        self.layout.use(self.comm)
        key = type(self.carrier), self.carrier.handle, self.shape, self.call, *variant
        of_all_ranks = self.shape.B, str(self.shape.dtype), *alike, *self.call.agreed
        return self.layout.derived(key, lambda: make(self.layout.for_calls(*of_all_ranks)))


class PreparedGLA(BufferedCall):
    """Calls of zeco_gla."""

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        q, k, v, g, initial_state, _, final = inputs
        final_state = q.new_zeros(self.states, dtype=torch.float32) if final else None
        saved_buffer = q.new_empty(self.words, dtype=SAVED_DTYPE)
        tensors = q, k, v, g, initial_state, final_state, saved_buffer
        variant = forward_plan, initial_state is None, final_state is None
        plan = self._plans.get(variant) or self._of_tensors(variant, tensors)
        self.layout.use(self.comm)
        (o,) = plan.run(self.carrier, *[x for x in tensors if x is not None])
        if self.comm.debug:
            self.comm._look_for_nan("zeco_gla", o=o, final_state=final_state)
        return o, final_state, saved_buffer

    def backward(self, do: Tensor, dfinal: Tensor | None, kept: Sequence[Tensor], initial: bool) -> Sequence[Any]:
        *inputs, saved_buffer = kept
        if saved_buffer.data_ptr() % 16:  # kernels need 16-byte alignment; a caller's hook may return other memory
            saved_buffer = saved_buffer.clone()
        dinitial = do.new_zeros(self.states, dtype=torch.float32) if initial else None
        tensors = *inputs, do, dfinal, dinitial, saved_buffer
        variant = backward_plan, dfinal is None, dinitial is None
        plan = self._plans.get(variant) or self._of_tensors(variant, tensors)
        self.layout.use(self.comm)
        dv, dq, dk, dg = plan.run(self.carrier, *[x for x in tensors if x is not None])
        if self.comm.debug:
            named = dict(dq=dq, dk=dk, dv=dv, dg=dg, dinitial_state=dinitial)
            self.comm._look_for_nan("zeco_gla's backward", **named)
        return dq, dk, dv, dg, dinitial

    def _of_tensors(self, variant: tuple, tensors: Sequence[Tensor | None]) -> Plan:
        """Return the plan of a pass. ``variant``: the function that makes the plan; which optional tensors are None."""
        make, shape, call = variant[0], self.shape, self.call
        plan = self._record(variant, lambda layout: make(shape, call, layout, self.carrier, *tensors))
        self._plans[variant] = plan
        return plan


class BufferedOperator(SequenceOperator):
    """An operator that saves its inputs and one buffer of integers for backward."""

    outputs = ("saved_buffer",)
    prepared: type[BufferedCall]
    shape_of: Any  # lru_cache of the class of Shapes

    def __init__(self) -> None:
        self.kept = *self.inputs, *self.outputs
        self.kept_at = {self.name: range(len(self.kept))}
        self.titles = {self.name: self.name}
        super().__init__()

    def sizes(self, tensors: Sequence[Any], cu_seqlens: Tensor | None, call: Call, dtypes: Any) -> tuple[Any, ...]:
        """Arguments of ``shape_of`` for a call. dtypes: those at ``dtypes_at``."""
        raise NotImplementedError

    def shape(self, *of: Any) -> Any:
        """The Shape of a call with ``sizes(*of)``."""
        return self.shape_of(*self.sizes(*of))

    def specs(self, tensors: Sequence[Any], shape: Any, dtypes: Sequence[torch.dtype], words: int) -> list:
        """(dtype, shape, device) of the tensors that autograd saves (inputs that are not None, the buffer), and of do.
        ``tensors``: inputs, or what was restored in their place."""
        raise NotImplementedError

    def make(
        self,
        carrier: StateCarrier,
        tensors: Sequence[Any],
        cu_seqlens: Tensor | None,
        first_token: int | None,
        call: Call,
        traced: bool,
    ) -> BufferedCall:
        tensors = tensors[: len(self.inputs)]
        dtypes = [tensors[i].dtype for i in self.dtypes_at]
        shape = self.shape(tensors, cu_seqlens, call, dtypes)
        layout = layout_of(carrier.comm, tensors[self.v_at], cu_seqlens, first_token, call, shape.segment)
        every_cut = traced or cu_seqlens is None
        words = shape.saved_words if every_cut else sum(shape.saved_sizes(layout.num_segments, layout.num_chunks))
        specs = self.specs(tensors, shape, dtypes, words)
        return self.prepared(carrier, shape, layout, call, first_token, words, specs)

    def make_again(
        self, carrier: StateCarrier, rest: Sequence[Any], check: Callable[..., Any], dtypes: Sequence[torch.dtype]
    ) -> BufferedCall:
        (*tensors, saved_buffer), do, cu_seqlens, first_token, call = rest
        tensors[self.v_at] = do  # of v's shape and dtype, and not restored
        shape = self.shape(tensors, cu_seqlens, call, dtypes)
        packed = cu_seqlens is not None and saved_buffer.shape != (shape.saved_words,)  # saved by an eager call
        check(self.specs(tensors, shape, dtypes, saved_buffer.numel() if packed else shape.saved_words))
        return self.make(carrier, tensors, cu_seqlens, first_token, call, not packed)

    def fake_outputs(self, inputs: Sequence[Tensor], cu_seqlens: Tensor | None, call: Call) -> Sequence[Tensor]:
        dtypes = [inputs[i].dtype for i in self.dtypes_at]
        shape = self.shape_of.__wrapped__(*self.sizes(inputs, cu_seqlens, call, dtypes))  # sizes may be symbols
        return [inputs[self.v_at].new_empty(shape.saved_words, dtype=SAVED_DTYPE)]

    def gradients_like(self, kept: Sequence[Any]) -> Sequence[Any]:
        return kept[:-1]


class _GLA(BufferedOperator):
    name = "zeco_gla"
    inputs = "q", "k", "v", "g"
    prepared, shape_of = PreparedGLA, staticmethod(shape_of)

    def check_tensors(self, comm: Communicator, tensors: Sequence[Any], call: Call) -> None:
        q, k, v, g, _ = tensors
        check_dtypes(q, k, v)
        names = dict(q=q, k=k, v=v, g=g)
        for name, x in names.items():
            if x.ndim != 4 or 0 in (*x.shape[:1], *x.shape[2:]):
                last = "V" if name == "v" else "K"
                raise ValueError(
                    f"{name} must be [B, T, H, {last}] with no empty dimension but T, got {tuple(x.shape)}"
                )
        if g.dtype not in (torch.float32, q.dtype):
            raise TypeError(f"g must be float32 or have the dtype of q, {q.dtype}, got {g.dtype}")
        if not q.shape == k.shape == g.shape or q.shape[:3] != v.shape[:3]:
            shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in names.items())
            raise ValueError(f"q, k, g must be [B, T, H, K] and v [B, T, H, V], got {shapes}")
        if q.shape[-1] > 512:
            raise ValueError(f"K must be at most 512, got {q.shape[-1]}")

    def sizes(self, tensors: Sequence[Any], cu_seqlens: Tensor | None, call: Call, dtypes: Any) -> tuple[Any, ...]:
        q, _, v, _ = tensors
        (B, T, H, K), n, device = q.shape, q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1, v.device
        of_gpu, options = (device.type, call.zigzag, multiprocessors(device)), (call.saves, call.invariant)
        return B, T, H, K, v.shape[3], n, v.dtype, dtypes[0], *of_gpu, *options, gpu_kind(device)

    def specs(self, tensors: Sequence[Any], shape: Shape, dtypes: Sequence[torch.dtype], words: int) -> list:
        keys, values = ((shape.B, shape.T, shape.H, width) for width in (shape.K, shape.V))
        specs: list[tuple[torch.dtype, tuple[int, ...]]] = [(shape.dtype, x) for x in (keys, keys, values)]
        specs += [(shape.gate_dtype, keys), (SAVED_DTYPE, (words,)), (shape.dtype, values)]
        return [(dtype, torch.Size(x), tensors[self.v_at].device) for dtype, x in specs]


GLA = _GLA()
