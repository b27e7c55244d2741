"""zeco_kda and zeco_gated_delta_rule: delta rules over a sequence that is sharded across the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...base.autograd import Operator, Passes, reject_second_derivative, wants_gradient, watched
from ...base.checks import (
    call_key,
    plain_or_traced,
    restored,
    saved_tensor_error,
)
from ...bindings.torch_compat import num_dispatch_modes, recorded
from ...comm.backwards import saved_tensors
from ...comm.communicator import Communicator, check_communicator, communicator_of
from ..allscan import check_final, final_of_all
from ..carrier import carrier_of
from ..first_call import FINAL_OF_ALL
from .delta_checks import RULES, TITLES, checked, shapes_of
from .delta_prepared import PreparedDelta, prepare_delta, saved_specs, state_specs, sums_and_chunks
from .own_chunks import OwnChunks
from .raw_inputs import Gate, gate, normalized
from .records import Before, CallOptions, Inputs, Options, Outer, Saved, SavedStates

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
    flags = use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval
    if safe_gate and not use_gate_in_kernel and isinstance(lower_bound, (int, float)) and -5 <= lower_bound < 0:
        lower_bound = None  # as in fla: it only restates the guarantee for gates that are not raw
    before = Before(*flags, lower_bound, A_log, dt_bias, state_v_first, chunk)
    rule = "own_kda" if chunk == "allscan" else "safe_kda" if safe_gate else "kda"
    asked = CallOptions(
        scale, initial_state, output_final_state, cu_seqlens, first_token, layout, per_document, invariant
    )
    return _call(rule, before, Inputs(q, k, v, g, beta), comm, asked)


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
    invariant: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule (Gated DeltaNet) over a sharded sequence; each rank holds consecutive tokens, in rank order.

        S_t = exp(g_t) (1 - beta_t k_t k_t^T) S_{t-1} + beta_t k_t^T v_t,     o_t = scale * q_t S_t

    The arguments are those of ``fla.ops.gated_delta_rule.chunk_gated_delta_rule``, with comm= in addition. Backward
    also runs on Hopper with Triton 3.6, where fla rejects this rule's backward.

    Args:
        g: [B, T, HV], natural logarithm of each head's decay.
        dt_bias: [HV], optional.
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
    before = Before(*flags, None, A_log, dt_bias, state_v_first, chunk)
    rule = "own_gated_delta_rule" if chunk == "allscan" else "gated_delta_rule"
    asked = CallOptions(
        scale, initial_state, output_final_state, cu_seqlens, first_token, layout, per_document, invariant
    )
    return _call(rule, before, Inputs(q, k, v, g, beta), comm, asked)


def _call(rule: str, before: Before, x: Inputs, comm: Communicator, asked: CallOptions) -> tuple[Tensor, Tensor | None]:
    if type(comm) is not Communicator:
        check_communicator(comm)
    if torch.compiler.is_compiling() or (num_dispatch_modes() and recorded()):
        return _delta(rule, before, x, comm, asked)
    with comm.call(False, TITLES[rule], (*x, asked.initial_state, before.A_log, before.dt_bias)):
        return _delta(rule, before, x, comm, asked)


def _delta(rule: str, before: Before, x: Inputs, comm: Communicator, asked: CallOptions) -> tuple[Tensor, Any]:
    final, of_all = asked.output_final_state, False
    if isinstance(final, str):
        of_all = final = check_final(final, comm)
    cu_seqlens, initial_state = None, asked.initial_state
    key = None if torch.compiler.is_compiling() else _key(rule, before, x, comm, asked, of_all)
    prepared = None if key is None else comm.calls.get(key)
    if prepared is None:
        cu_seqlens, options = checked(rule, before, _fields_of(before, of_all), x, comm, asked)
    if initial_state is not None and before.state_v_first:
        initial_state = initial_state.mT
    *inputs, initial_state = plain_or_traced(*x, initial_state)
    tensors = *_applied(before, Inputs(*inputs), comm.handle), initial_state
    if prepared is None and watched((*tensors, cu_seqlens)):
        o, final_state, *_ = _operator.forward(*tensors, cu_seqlens, final, comm.handle, *options)
    else:
        if prepared is None:
            prepared = prepare_delta(comm, tensors, cu_seqlens, options)
            if key is not None:
                comm.calls.remember(key, prepared)
        if wants_gradient(tensors):
            o, final_state = _operator.eager((prepared, (cu_seqlens, final)), *tensors)
        else:
            o, final_state, *_ = prepared.forward(*tensors, cu_seqlens, final)
    if not final:
        return o, None
    if of_all:
        packed = asked.cu_seqlens is not None and not asked.per_document
        o, final_state = final_of_all(o, final_state, comm, packed, asked.layout == "zigzag")
    return o, final_state.mT if before.state_v_first else final_state


FIELDS = (
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
    "A_log is None",
    "dt_bias is None",
    "state_v_first",
    FINAL_OF_ALL,
)


def _fields_of(before: Before, of_all: bool) -> str:
    """Return names and values of the options that must be equal on all ranks, except lower_bound. of_all: see
    final_of_all."""
    values = *before[:4], before.A_log is None, before.dt_bias is None, before.state_v_first, of_all
    return ";".join([f"{name}={bool(value)}" for name, value in zip(FIELDS, values)])


def _applied(before: Before, x: Inputs, handle: int) -> Inputs:
    """Apply norms, gates and sigmoids to raw arguments; return the inputs of the rule. handle: the communicator's."""
    q, k, v, g, beta = x
    if before.normalize:
        q, k = normalized(q, k, handle)
    if before.gate:
        A_log, dt_bias = plain_or_traced(before.A_log, before.dt_bias)
        g = gate(g, Gate(A_log, dt_bias, before.lower_bound), handle)
    if before.sigmoid:
        beta = gate(beta, Gate(bound=2.0 if before.twice else 1.0), handle)
    elif beta.dtype not in BETAS:
        beta = beta.float()
    return Inputs(q, k, v, g, beta)


def _key(rule: str, before: Before, x: Inputs, comm: Communicator, asked: CallOptions, of_all: bool) -> tuple | None:
    """Return the cache key of the call's PreparedDelta, or None if the call needs all checks: Decimal(1), an invalid
    scale, equals 1.0, and NaN equals nothing."""
    scale, bound, layout = asked.scale, before.lower_bound, asked.layout
    if asked.cu_seqlens is not None or asked.first_token is not None or asked.per_document:
        return None
    if comm.debug or num_dispatch_modes():
        return None
    for number in (scale, bound):
        if type(number) not in (float, int, type(None)) or number != number:
            return None
    if not type(layout) is type(before.chunk) is str or type(asked.invariant) not in (int, type(None)):
        return None
    flags = *before[:4], before.state_v_first, of_all
    if {*map(type, flags)} != {bool}:
        return None
    tensors = call_key((*x, asked.initial_state, before.A_log, before.dt_bias))
    return None if tensors[-1] == 2 else (tensors, rule, scale, bound, layout, before.chunk, flags, asked.invariant)


# The custom operator, which torch.compile traces


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    final: bool,
    handle: int,
    rule: str,
    scale: float,
    fields: str,
    bound: float | None,
    first_token: int | None = None,
    zigzag: int = False,
    invariant: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    comm, tensors = communicator_of(handle), (q, k, v, g, beta, initial_state)
    with comm.call(False, TITLES[rule], tensors):
        options = Options(rule, scale, fields, bound, first_token, zigzag, invariant)
        prepared = prepare_delta(comm, tensors, cu_seqlens, options, traced=True)
        return prepared.forward(*tensors, cu_seqlens, final)


def _fake(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    _, _, cu_seqlens, final, _, *others = rest
    options = Options(*others)
    specs = state_specs(shapes_of(q, v, cu_seqlens, options.invariant), options.zigzag)
    saved_states = (q.new_empty(shape, dtype=dtype) for dtype, shape in specs)
    final_state = _zeros(q, v, cu_seqlens, final)
    return torch.empty_like(v), final_state, *sums_and_chunks(RULES[options.rule], k, v, g), *saved_states


def _zeros(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, wanted: bool) -> Tensor | None:
    """Return zeros for the final states, or None if not ``wanted``."""
    x = shapes_of(q, v, cu_seqlens)
    return q.new_zeros((x.sequences, x.HV, x.K, x.V), dtype=torch.float32) if wanted else None


def _backward(
    do: Tensor,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None,
    sums: Tensor,
    scores: Tensor,
    solved: Tensor,
    transitions: Tensor,
    incoming: Tensor,
    fwd_epoch: Tensor,
    initial: bool,
    beta_dtype: torch.dtype,
    handle: int,
    rule: str,
    scale: float,
    fields: str,
    bound: float | None,
    first_token: int | None = None,
    zigzag: int = False,
    invariant: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run backward; return (dq, dk, dv, dg, dbeta, dinitial_state or None)."""
    saved = q, k, v, beta, cu_seqlens, sums, scores, solved, transitions, incoming, fwd_epoch
    options = handle, rule, scale, fields, bound, first_token, zigzag, invariant
    return _run_backward(None, do, dfinal, *saved, initial, beta_dtype, *options)


def _run_backward(prepared: PreparedDelta | None, do: Tensor, dfinal: Tensor | None, *inputs: Any) -> tuple[Any, ...]:
    """Check the restored tensors and run backward. ``inputs``: the inputs of ``_backward``."""
    *tensors, initial, beta_dtype, handle, rule, scale, fields, bound, first_token, zigzag, invariant = inputs
    q, k, v, beta, cu_seqlens, sums, *others = tensors
    comm = communicator_of(handle)
    with comm.call(True, f"the backward of {TITLES[rule]}", (do, dfinal)):
        reject_second_derivative("a delta rule")
        if q.ndim != 4:
            raise saved_tensor_error(TITLES[rule], "q", q, "[B, T, H, K]")
        names = "q k v beta sums scores solved transitions incoming fwd_epoch do"
        check = partial(restored, TITLES[rule], names, (q, k, v, beta, sums, *others, do))
        if prepared is None:
            own = isinstance(RULES[rule], OwnChunks) and sums.dtype == do.dtype  # the gates have q's dtype
            shapes = shapes_of(q, do, cu_seqlens, invariant)
            dtypes = beta_dtype, do.dtype if own else torch.float32
            incoming = others[3]
            packed = cu_seqlens is not None and incoming.shape != state_specs(shapes, zigzag)[1][1]  # of an eager call
            check(saved_specs(shapes, dtypes, rule, zigzag, incoming.shape[0] if packed and incoming.ndim else None))
            options = Options(rule, scale, fields, bound, first_token, zigzag, invariant)
            prepared = PreparedDelta(comm, shapes, cu_seqlens, options, dtypes, traced=not packed)
        q, k, v, beta, sums, scores, solved, *saved_states, do = check(prepared.saved_specs)
        dinitial = q.new_zeros(prepared.state_shape, dtype=torch.float32) if initial else None
        outer = Outer(do, dfinal, dinitial)
        grads = prepared.backward(Inputs(q, k, v, sums, beta), Saved(scores, solved), outer, SavedStates(*saved_states))
        return *grads, dinitial


def _fake_backward(*inputs: Any) -> tuple[Tensor | None, ...]:
    _, _, q, k, v, beta, cu_seqlens, sums, _, _, _, _, _, initial, *_ = inputs
    dinitial = _zeros(q, v, cu_seqlens, initial)
    return *(torch.empty_like(x) for x in (q, k, v, sums, beta)), dinitial


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    q, k, v, g, beta, initial_state, cu_seqlens, _, handle, rule, *where = inputs
    sums = g if isinstance(RULES[rule], OwnChunks) else output[2]
    ctx.save_for_backward(q, k, v, beta, cu_seqlens, sums, *output[3:])
    ctx.gate_dtype, initial = g.dtype, initial_state is not None and initial_state.requires_grad
    ctx.rest = initial, beta.dtype, handle, rule, *where


def _pending(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    *rest: Any,
) -> list:
    """Return the PendingBackward records of a call of the custom operator."""
    _, handle, *_, zigzag, invariant = rest
    carrier = carrier_of(handle, invariant, dense=True)
    return carrier.pending(carrier.prepare(shapes_of(q, v, cu_seqlens).carried(zigzag)), bool(zigzag))


def _gradient(backward: Callable[..., Any], ctx: Any, do: Tensor, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, g, beta and initial_state."""
    for pending in ctx.pending:
        pending.run()
    initial, _, handle, *_ = ctx.rest
    q, k, v, *saved = saved_tensors(ctx, lambda: communicator_of(handle), True)
    do, dfinal = plain_or_traced(torch.zeros_like(v) if do is None else do, dfinal)
    dq, dk, dv, dg, dbeta, dinitial = backward(do, dfinal, q, k, v, *saved, *ctx.rest)
    return dq, dk, dv, dg.to(ctx.gate_dtype), dbeta, dinitial if initial else None


_passes = Passes(_forward, _fake, _backward, _fake_backward)
_operator = Operator("allscan::zeco_delta", _passes, _setup_context, _gradient, _pending, _run_backward)
