"""zeco_kda and zeco_gated_delta_rule: delta rules over a sequence that is sharded across the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...base.checks import plain_or_traced
from ...comm.communicator import Communicator
from ...tokens.packing import CHUNK_TOKENS
from ..carrier import StateCarrier
from ..operator import Asked, Call, SequenceOperator
from .delta_checks import RULES, TITLES, InputTransforms, check_options, check_tensors, shapes_of
from .delta_prepared import PreparedDelta, saved_specs, state_specs, sums_and_chunks
from .raw_inputs import gate, normalized

BETAS = torch.float32, torch.bfloat16, torch.float16  # dtypes of beta that fla's kernels support


def zeco_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    comm: Communicator,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | str = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    first_token: int | None = None,
    layout: str = "contiguous",
    per_document: bool = False,
    chunk: str = "allscan",
    recompute: bool | None = None,
    invariant: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Kimi delta attention over a sharded sequence; each rank holds consecutive tokens, in rank order.

        S_t = (1 - beta_t k_t k_t^T) diag(exp(g_t)) S_{t-1} + beta_t k_t^T v_t,     o_t = scale * q_t S_t

    The arguments and defaults are those of ``fla.ops.kda.chunk_kda``, with comm= in addition.

    The function is differentiable in q, k, v, g, beta, A_log, dt_bias and initial_state; the gradients of A_log and
    dt_bias are this rank's contribution. Forward runs one scan over the ranks, with the K x K transition of each rank's
    tokens; backward runs one scan in reverse. Each scan sends one state of B * HV * K * V float32 words from each rank
    to the next.

    Args:
        q, k: [B, T, H, K], this rank's T tokens; float16, bfloat16 or float32, v too. K is at most 256. T may differ
            between ranks and may be 0; all other dimensions must be equal on all ranks.
        v: [B, T, HV, V], HV a multiple of H.
        g: [B, T, HV, K], natural logarithm of the decay, 0 to -inf; float32, or q's dtype. With fla's kernels the sum
            over 64 tokens must be at least -1,048,576, and errors grow with that sum (docs/delta.md): mark the
            beginning of a document by cu_seqlens, not by a strong decay. Gates are checked at the first call for a
            shape and in debug mode only, because the check synchronizes with the GPU.
        beta: [B, T, HV], any float dtype.
        use_qk_l2norm_in_kernel: whether q and k are divided by their norms first.
        use_gate_in_kernel: whether g is raw, of any float dtype. The decay's logarithm is then -exp(A_log) softplus(g +
            dt_bias), or with lower_bound (below 0) lower_bound * sigmoid(exp(A_log) (g + dt_bias)).
        A_log: [HV], optional with lower_bound. A_log, dt_bias and lower_bound require use_gate_in_kernel.
        dt_bias: HV * K numbers, optional.
        use_beta_sigmoid_in_kernel: whether beta is raw: sigmoid(beta) is used, with allow_neg_eigval twice that.
        safe_gate: the caller guarantees that no decay's logarithm is below -5. fla's kernels are then faster; our
            kernels detect such gates themselves. Without use_gate_in_kernel a lower_bound of at least -5 is accepted
            as part of this guarantee and has no effect.
        state_v_first: whether states are [.., V, K]; final_state is then a transposed view.
        scale, initial_state, output_final_state, cu_seqlens, first_token, layout, per_document, comm: as in
            ``allscan.zeco_gla``; states are [B or N, HV, K, V] float32.
        chunk: implementation of the computation inside chunks of 64 tokens, equal on all ranks: "allscan", our own
            kernels; or "fla", flash-linear-attention, which must be installed (``pip install flash-linear-attention``).
        recompute: whether backward recomputes w, u, kg and qg of the chunks. False, with chunk="allscan" only: forward
            saves them, B * T * HV * (6 * K + 2 * V) bytes for 16-bit inputs and twice that for others, and backward
            runs two kernels fewer. Without gradients nothing is saved in either case. Each rank may choose for itself.
            Default: the communicator's value, without effect with chunk="fla".
        invariant: as in ``allscan.zeco_gla``, with chunk="allscan" only: bitwise equal results for every number of
            ranks. The first and the last rank must have tokens.

    Returns:
        (o, final_state), as ``allscan.zeco_gla``.

    Raises:
        ImportError: chunk="fla" and flash-linear-attention is not installed.
        RuntimeError: as ``allscan.zeco_gla``, whose other errors are raised too; each before anything is launched.

    Example:
        >>> o, _ = allscan.zeco_kda(q, k, v, g, beta, comm=comm)         # q[:, t0:t1], ... of the global sequence

    Source:
        Kimi Linear, arXiv 2510.26692; ZeCO, arXiv 2507.01004; docs/delta.md.
    """
    if safe_gate and not use_gate_in_kernel and isinstance(lower_bound, (int, float)) and -5 <= lower_bound < 0:
        lower_bound = None  # as in fla: it only restates the guarantee for gates that are not raw
    flags = use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval
    raw = InputTransforms(*flags, lower_bound, state_v_first, chunk)
    asked = Asked(output_final_state, raw, scale, cu_seqlens, first_token, layout, per_document, invariant, recompute)
    rule = "own_kda" if chunk == "allscan" else "safe_kda" if safe_gate else "kda"
    o, final_state = DELTA.run(comm, rule, (q, k, v, g, beta, initial_state, A_log, dt_bias), asked)
    return o, final_state.mT if state_v_first and final_state is not None else final_state


def zeco_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    comm: Communicator,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | str = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    first_token: int | None = None,
    layout: str = "contiguous",
    per_document: bool = False,
    chunk: str = "allscan",
    recompute: bool | None = None,
    invariant: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule (Gated DeltaNet) over a sharded sequence; each rank holds consecutive tokens, in rank order.

        S_t = exp(g_t) (1 - beta_t k_t k_t^T) S_{t-1} + beta_t k_t^T v_t,     o_t = scale * q_t S_t

    The arguments are those of ``fla.ops.gated_delta_rule.chunk_gated_delta_rule``, with comm= in addition. Backward
    also runs on Hopper with Triton 3.6, where fla rejects this rule's backward.

    Args:
        g: [B, T, HV], natural logarithm of each head's decay.
        dt_bias: [HV], optional.
        recompute: as in ``allscan.zeco_kda``, of each chunk's state and of v - w S: B * T * HV * (K * V / 32 + 2 * V)
            bytes for bfloat16 inputs, twice that for others; backward runs one kernel fewer.
        q, k, v, beta, comm, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
            use_beta_sigmoid_in_kernel, allow_neg_eigval, A_log, state_v_first, cu_seqlens, first_token, layout,
            per_document, chunk, invariant: as in ``allscan.zeco_kda``.

    Returns:
        (o, final_state), as ``allscan.zeco_gla``.

    Raises:
        ImportError: chunk="fla" and flash-linear-attention is not installed.
        RuntimeError: as ``allscan.zeco_gla``, whose other errors are raised too; each before anything is launched.

    Example:
        >>> o, _ = allscan.zeco_gated_delta_rule(q, k, v, g, beta, comm=comm)

    Source:
        Gated Delta Networks, arXiv 2412.06464; ZeCO, arXiv 2507.01004; docs/delta.md.
    """
    flags = use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval
    raw = InputTransforms(*flags, None, state_v_first, chunk)
    asked = Asked(output_final_state, raw, scale, cu_seqlens, first_token, layout, per_document, invariant, recompute)
    rule = "own_gated_delta_rule" if chunk == "allscan" else "gated_delta_rule"
    o, final_state = DELTA.run(comm, rule, (q, k, v, g, beta, initial_state, A_log, dt_bias), asked)
    return o, final_state.mT if state_v_first and final_state is not None else final_state


class _Delta(SequenceOperator):
    """``tensors`` of calls: the inputs, initial_state, A_log, dt_bias."""

    name = "zeco_delta"
    titles = TITLES
    inputs = "q", "k", "v", "g", "beta"
    outputs = "sums", "scores", "solved", "transitions", "incoming", "fwd_epoch", "intermediates"
    kept = "q", "k", "v", "beta", *outputs
    # sums: our own kernels save the gates in their place
    kept_at = {rule: (0, 1, 2, 4, 3 if of.own else 5, *range(6, 12)) for rule, of in RULES.items()}
    dense = True

    def check_options(self, rule: str, tensors: Sequence[Any], asked: Asked, invariant: int) -> None:
        check_options(rule, tensors, asked.more, invariant, asked.recompute)

    def options(self, tensors: Sequence[Any], raw: InputTransforms) -> tuple[float | None, str]:
        flags = dict(zip(InputTransforms._fields[:4], raw[:4])) | dict(state_v_first=raw.state_v_first)
        flags |= {"A_log is None": tensors[6] is None, "dt_bias is None": tensors[7] is None}
        bound = None if raw.lower_bound is None or not raw.use_gate_in_kernel else float(raw.lower_bound)
        return bound, ",".join([f"{name}={bool(flag)}" for name, flag in flags.items()])

    def prepared_inputs(self, tensors: Sequence[Any], raw: InputTransforms, handle: int) -> Sequence[Any]:
        """Apply norms, gates and sigmoids to raw arguments."""
        q, k, v, g, beta, initial_state, A_log, dt_bias = tensors
        if initial_state is not None and raw.state_v_first:
            initial_state = initial_state.mT
        q, k, v, g, beta, initial_state = plain_or_traced(q, k, v, g, beta, initial_state)
        if raw.use_qk_l2norm_in_kernel:
            q, k = normalized(q, k, handle)
        if raw.use_gate_in_kernel:
            A_log, dt_bias = plain_or_traced(A_log, dt_bias)
            g = gate(g, handle, A_log, dt_bias, raw.lower_bound)
        if raw.use_beta_sigmoid_in_kernel:
            beta = gate(beta, handle, bound=2.0 if raw.allow_neg_eigval else 1.0)
        elif beta.dtype not in BETAS:
            beta = beta.float()
        return q, k, v, g, beta, initial_state

    def check_tensors(self, comm: Communicator, tensors: Sequence[Any], call: Call) -> None:
        check_tensors(comm, tensors, call)

    def summed_gates(self, rule: str) -> int | None:
        return None if RULES[rule].own else CHUNK_TOKENS  # our kernels also support gates of -inf

    def make(
        self,
        carrier: StateCarrier,
        tensors: Sequence[Any],
        cu_seqlens: Tensor | None,
        first_token: int | None,
        call: Call,
        traced: bool,
    ) -> PreparedDelta:
        q, _, v, g, beta, _ = tensors
        dtypes = beta.dtype, g.dtype if RULES[call.rule].own else torch.float32  # own kernels save gates, not sums
        shapes = shapes_of(q, v, cu_seqlens, call.invariant)
        return PreparedDelta(carrier, shapes, cu_seqlens, first_token, call, dtypes, traced)

    def make_again(
        self, carrier: StateCarrier, rest: Sequence[Any], check: Callable[..., Any], dtypes: Sequence[torch.dtype]
    ) -> PreparedDelta:
        (q, *_, incoming, _, saved), do, cu_seqlens, first_token, call = rest
        gate_dtype, beta_dtype = dtypes
        shapes = shapes_of(q, do, cu_seqlens, call.invariant)
        of_saved = beta_dtype, gate_dtype if RULES[call.rule].own else torch.float32
        most = [shape for _, shape in state_specs(shapes, call)]
        packed = cu_seqlens is not None and [incoming.shape, saved.shape] != most[1::2]  # saved by an eager call
        sizes = (incoming.shape[0], saved.numel()) if packed and incoming.ndim else None
        check(saved_specs(shapes, of_saved, call, sizes))
        return PreparedDelta(carrier, shapes, cu_seqlens, first_token, call, of_saved, not packed)

    def fake_outputs(self, inputs: Sequence[Tensor], cu_seqlens: Tensor | None, call: Call) -> Sequence[Tensor]:
        q, k, v, g, *_ = inputs
        specs = state_specs(shapes_of(q, v, cu_seqlens, call.invariant), call)
        saved_states = (q.new_empty(shape, dtype=dtype) for dtype, shape in specs)
        return *sums_and_chunks(RULES[call.rule], k, v, g), *saved_states

    def gradients_like(self, kept: Sequence[Tensor]) -> Sequence[Tensor]:
        q, k, v, beta, sums, *_ = kept
        return q, k, v, sums, beta


DELTA = _Delta()
