"""zeco_ssd and zeco_simple_gla: one decay per head, over a sequence that is sharded across ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...base.checks import check_restored, integer, plain
from ...base.tiling import multiprocessors
from ...comm.communicator import Communicator
from ...launch.plan import Plan
from ...tokens.packing import Layout
from ..gla.gla_operator import SAVED_DTYPE, BufferedCall, BufferedOperator
from ..gpu_blocks import gpu_kind
from ..operator import FLOATS, Asked, Call, check_dtypes
from .ssd_plans import Inputs, SSDShape, backward_plan, forward_plan, shape_of, steps_of, strides_of

MOST_ROWS = 256  # of a state: N of zeco_ssd, K of zeco_simple_gla


def zeco_ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    *,
    comm: Communicator,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool | str = False,
    first_token: int | None = None,
    layout: str = "contiguous",
    per_document: bool = False,
    invariant: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba2's scan (SSD) over a sharded sequence; each rank holds consecutive tokens, in rank order.

        d_t = clamp(dt_t + dt_bias, *dt_limit), or clamp(softplus(dt_t + dt_bias), *dt_limit) with dt_softplus
        S_t = exp(d_t A) S_{t-1} + d_t x_t^T B_t,     y_t = S_t C_t + D x_t,  times silu(z_t) if z is given

    The arguments are those of ``mamba_ssm``'s ``mamba_chunk_scan_combined``, with comm= in addition.

    The function is differentiable in all tensors; the gradients of A, D and dt_bias are this rank's contribution.
    Forward runs one scan over the ranks; backward runs one scan in reverse. Each scan sends one state of B * H * P * N
    float32 words from each rank to the next, overlapped with the kernels that need no remote data. Decays are exact for
    every d_t A from 0 to -inf. Kernels read x, dt, B, C and z by their strides: columns of a larger contiguous tensor,
    such as the output of one convolution, are not copied.

    Args:
        x: [B, T, H, P], this rank's T tokens; bfloat16, float16 or float32. T may differ between ranks and may be 0;
            all other dimensions and options must be equal on all ranks unless stated otherwise.
        dt: [B, T, H].
        A: [H], at most 0. A positive A and NaN in A or dt are detected at the first call for a shape and in debug mode
            only, because the check synchronizes with the GPU.
        B, C: [B, T, G, N], one for each group of H / G heads; N is at most 256.
        D: [H] or [H, P].
        z: like x.
        dt_bias: [H]. dt, A, B, C, D, z and dt_bias may have any float dtypes of at most 32 bits. Products are computed
            in bfloat16 if x, B and C all are bfloat16, else in float32 (three TF32 parts).
        chunk_size: an integer for the arguments of ``mamba_ssm``, without effect; it may differ between ranks.
        dt_softplus, dt_limit: equal on all ranks.
        dt_limit: lower and upper bound of d_t, the lower one at least 0.
        initial_states: [B or number of sequences, H, P, N] float32, equal on all ranks. Its gradient is non-zero only
            on the rank with a sequence's first token; without cu_seqlens, on the first rank.
        return_final_states: whether to return each sequence's state after its last token. Each rank may choose for
            itself, except that "all" is for all ranks or none: see output_final_state of ``allscan.zeco_gla``.
        cu_seqlens, first_token, layout, per_document, comm: as in ``allscan.zeco_gla``; in place of ``seq_idx``.
        invariant: as in ``allscan.zeco_gla``: results, and gradients except those of A, D and dt_bias, are bitwise
            equal for every number of ranks.

    Returns:
        y [B, T, H, P] like x; with return_final_states (y, final_states). final_states [B or number of sequences, H, P,
        N] float32 is valid on the rank with the sequence's last token, without cu_seqlens on the last rank; it is zero
        on the other ranks.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: shapes, device or cu_seqlens are wrong, or A is positive.
        RuntimeError: as ``allscan.allscan``, whose other errors are raised too; each before anything is launched.

    Example:
        >>> y = allscan.zeco_ssd(x, dt, A, B, C, 256, D=D, dt_bias=bias, dt_softplus=True, comm=comm)

    Source:
        Mamba2, arXiv 2405.21060; ZeCO, arXiv 2507.01004.
    """
    limit = tuple(dt_limit) if isinstance(dt_limit, tuple | list) else (dt_limit,)
    more = chunk_size, dt_softplus, *limit
    asked = Asked(return_final_states, more, 1.0, cu_seqlens, first_token, layout, per_document, invariant, True)
    y, final_states = SSD.run(comm, "zeco_ssd", (x, dt, A, B, C, D, z, dt_bias, initial_states), asked)
    return y if final_states is None else (y, final_states)


def zeco_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    *,
    comm: Communicator,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | str = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    first_token: int | None = None,
    layout: str = "contiguous",
    per_document: bool = False,
    invariant: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention with one decay per head (simple GLA, RetNet, lightning attention) over a sharded sequence;
    each rank holds consecutive tokens, in rank order.

        S_t = exp(g_t) S_{t-1} + k_t^T v_t,     o_t = scale * q_t S_t

    The arguments are those of ``fla.ops.simple_gla.chunk_simple_gla``, with comm= in addition. The function is
    differentiable in all tensors; the gradient of g_gamma, which fla does not compute, is this rank's contribution.
    Decays are exact for every g from 0 to -inf. Kernels read q, k, v and g by their strides, as those of
    ``allscan.zeco_ssd``.

    Args:
        q, k: [B, T, H, K], this rank's T tokens; bfloat16, float16 or float32. K is at most 256.
        v: [B, T, HV, V], of q's dtype. HV is a multiple of H: consecutive heads share one head of q and k.
        g: [B, T, HV], natural logarithm of the decay, at most 0; bfloat16, float16 or float32.
        g_gamma: [HV], the same for all tokens. Give g or g_gamma, or neither: then nothing decays.
        state_v_first: whether initial and final states are [..., HV, V, K] instead of [..., HV, K, V].
        scale, initial_state, output_final_state, cu_seqlens, first_token, layout, per_document, invariant, comm: as in
            ``allscan.zeco_gla``. With invariant=, the gradient of g_gamma is not bitwise equal.

    Returns:
        (o, final_state), as ``allscan.zeco_gla``; o like v.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: shapes, device or cu_seqlens are wrong, or a gate is positive.
        RuntimeError: as ``allscan.allscan``, whose other errors are raised too; each before anything is launched.

    Example:
        >>> o, _ = allscan.zeco_simple_gla(q, k, v, g, comm=comm)

    Source:
        Lightning attention-2, arXiv 2401.04658; ZeCO, arXiv 2507.01004.
    """
    if state_v_first and initial_state is not None and initial_state.ndim > 1:
        initial_state = initial_state.mT
    asked = Asked(output_final_state, (), scale, cu_seqlens, first_token, layout, per_document, invariant)
    o, final_state = SIMPLE_GLA.run(comm, "zeco_simple_gla", (v, g, g_gamma, k, q, initial_state), asked)
    return o, final_state.mT if state_v_first and final_state is not None else final_state


class PreparedSSD(BufferedCall):
    """Calls of zeco_ssd, whose states are [P, N] where the kernels' are [N, P], or of zeco_simple_gla."""

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        *tensors, initial, _, final = inputs
        x = tensors[0]
        final_states = x.new_zeros(self.states, dtype=torch.float32) if final else None
        saved_buffer = x.new_empty(self.words, dtype=SAVED_DTYPE)
        (y,) = self._run(forward_plan, tensors, (self._turn(initial), final_states, saved_buffer))
        final_states = self._turn(final_states)
        if self.comm.debug:
            self.comm._look_for_nan(self.call.rule, y=y, final_states=final_states)
        return y, final_states, saved_buffer

    def backward(self, do: Tensor, dfinal: Tensor | None, kept: Sequence[Any], initial: bool) -> Sequence[Any]:
        *tensors, saved_buffer = kept
        saved_buffer = plain(saved_buffer)
        if saved_buffer.data_ptr() % 16:  # as in PreparedGLA
            saved_buffer = saved_buffer.clone()
        dinitial = do.new_zeros(self.states, dtype=torch.float32) if initial else None
        rest = do.contiguous(), self._turn(dfinal), dinitial, saved_buffer
        found = iter(self._run(backward_plan, tensors, rest))
        grads = [None if x is None else next(found) for x in tensors]
        dinitial = self._turn(dinitial)
        if self.comm.debug:
            named = {f"gradient {i}": x for i, x in enumerate((*grads, dinitial))}
            self.comm._look_for_nan(f"{self.call.rule}'s backward", **named)
        return *grads, dinitial

    def _turn(self, states: Tensor | None) -> Any:
        """States of the caller as those of the kernels, or the other way."""
        return states if states is None else plain(states.mT if self.call.rule == "zeco_ssd" else states)

    def _run(self, make: Callable[..., Plan], tensors: Sequence[Any], rest: tuple[Tensor | None, ...]) -> list[Tensor]:
        """Run the plan of a pass, which ``make`` makes."""
        self.layout.use(self.comm)
        taken, strides = strides_of(tensors)
        variant = make, strides, tuple(x is None for x in rest)
        plan = self._plans.get(variant)
        if plan is None:
            kinds = tuple(None if x is None else (x.shape, x.dtype) for x in tensors)

            def new(layout: Layout) -> Plan:
                return make(self.shape, self.call, strides, layout, self.carrier, *taken, *rest)

            plan = self._plans[variant] = self._record((*variant, kinds), new, self.shape.G)
        return plan.run(self.carrier, *[x for x in (*taken, *rest) if x is not None])


def restored_views(
    title: str, names: Sequence[str], tensors: Sequence[Any], specs: list[tuple[Any, ...]]
) -> Sequence[Any]:
    """``restored`` for tensors that kernels read by their strides, and None."""
    named = [(name, x) for name, x in zip(names, tensors, strict=True) if x is not None]
    check_restored(title, [name for name, _ in named], [x for _, x in named], specs)
    return tensors


class _ScalarDecay(BufferedOperator):
    """Inputs of calls: those of ``Inputs``, or the first of them."""

    restored = staticmethod(restored_views)
    strided = True
    q_at, v_at = 3, 0
    dtypes_at = 3, 0
    prepared, shape_of = PreparedSSD, staticmethod(shape_of)

    def prepared_inputs(self, tensors: Sequence[Any], more: Any, handle: int) -> Sequence[Any]:
        return tensors  # kernels read them by their strides

    def sizes(self, tensors: Sequence[Any], cu_seqlens: Tensor | None, call: Call, dtypes: Any) -> tuple[Any, ...]:
        x, dt, _, B, C, *_ = tensors
        (batch, T, H, P), (G, N) = x.shape, B.shape[2:]
        sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        is_bf16 = x.dtype == B.dtype == C.dtype == torch.bfloat16
        how = x.device.type, call.zigzag, multiprocessors(x.device), False, call.invariant, gpu_kind(x.device)
        gate_dtype = torch.float32 if dt is None else dt.dtype
        return batch, T, H, N, P, sequences, x.dtype, gate_dtype, *how, G, is_bf16

    def specs(self, tensors: Sequence[Any], shape: SSDShape, dtypes: Sequence[torch.dtype], words: int) -> list:
        x, _, _, B, _, *rest = tensors
        device, of_x, of_B = x.device, x.shape, B.shape
        shapes = Inputs(of_x, of_x[:3], of_x[2:3], of_B, of_B, rest[0].shape if rest and rest[0] is not None else None)
        shapes = shapes._replace(z=of_x, dt_bias=of_x[2:3])
        known = dict(zip(self.dtypes_at, dtypes))
        specs = [(known.get(i, t.dtype), of, device) for i, (t, of) in enumerate(zip(tensors, shapes)) if t is not None]
        return [*specs, (SAVED_DTYPE, torch.Size((words,)), device), (x.dtype, of_x, device)]

    def _save(self, ctx: Any, inputs: tuple[Any, ...], rule: str, output: Sequence[Any]) -> None:
        super()._save(ctx, inputs, rule, output)
        ctx.given = [x is not None for x in inputs[: len(self.inputs) + 1]]

    def _gradient(self, backward: Callable[..., Any], ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return tuple([x if given else None for x, given in zip(super()._gradient(backward, ctx, *grads), ctx.given)])


class _SSD(_ScalarDecay):
    name = "zeco_ssd"
    inputs = Inputs._fields
    optional = "D", "z", "dt_bias"
    initial, final = "initial_states", "return_final_states"

    def check_options(self, rule: str, tensors: Sequence[Any], asked: Asked, invariant: int) -> None:
        chunk_size, _, *limit = asked.more
        integer("chunk_size", chunk_size)
        if len(limit) != 2 or not 0 <= limit[0] <= limit[1]:
            raise ValueError(f"dt_limit must be two numbers that rise from at least 0, got {tuple(limit)}")

    def options(self, tensors: Sequence[Any], more: Any) -> tuple[float | None, str]:
        _, softplus, least, most = more
        return None, f"dt_softplus={bool(softplus)},dt_limit={float(least)} to {float(most)}"

    def check_tensors(self, comm: Communicator, tensors: Sequence[Any], call: Call) -> None:
        check_ssd(Inputs(*tensors[:-1]))

    def gates(self, tensors: Sequence[Any], call: Call) -> Iterator[tuple[str, Tensor]]:
        x, steps = Inputs(*tensors[:-1]), steps_of(call.more)
        yield "A", x.A[None, None]
        d = x.dt.float() if x.dt_bias is None else x.dt.float() + x.dt_bias.float()
        d = (F.softplus(d) if steps["SOFTPLUS"] else d).clamp(steps["least"], steps["most"])
        yield "dt * A", torch.where(d == 0, 0.0, x.A.float() * d)

    def state_shape(self, n: int, q: Tensor, v: Tensor) -> tuple[int, int, int, int]:
        return n, v.shape[2], v.shape[3], q.shape[3]


class _SimpleGLA(_ScalarDecay):
    name = "zeco_simple_gla"
    inputs = "v", "g", "g_gamma", "k", "q"  # x, dt, A, B, C of Inputs
    optional = "g", "g_gamma"

    def check_tensors(self, comm: Communicator, tensors: Sequence[Any], call: Call) -> None:
        v, g, g_gamma, k, q, _ = tensors
        check_dtypes(q, k, v)
        if v.ndim != 4 or q.shape != k.shape or q.shape[:2] != v.shape[:2] or 0 in (*q.shape[2:], *v.shape[2:]):
            shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in dict(q=q, k=k, v=v).items())
            raise ValueError(f"q, k must be [B, T, H, K] and v [B, T, HV, V], not empty but for T, got {shapes}")
        (B, T, H, K), HV = q.shape, v.shape[2]
        if HV % H:
            raise ValueError(f"v must have a multiple of the {H} heads of q, got {HV}")
        if K > MOST_ROWS:
            raise ValueError(f"K must be at most {MOST_ROWS}, got {K}")
        if g is not None and g_gamma is not None:
            raise ValueError("give g or g_gamma, not both")
        for name, x, expected in (("g", g, (B, T, HV)), ("g_gamma", g_gamma, (HV,))):
            if x is not None:
                _check_dtype(name, x)
                if x.shape != expected:
                    raise ValueError(f"{name} must be {list(expected)}, got {list(x.shape)}")

    def gates(self, tensors: Sequence[Any], call: Call) -> Iterable[tuple[str, Tensor]]:
        _, g, g_gamma, *_ = tensors
        return [("g", g)] if g is not None else [] if g_gamma is None else [("g_gamma", g_gamma[None, None])]


def _check_dtype(name: str, x: Tensor) -> None:
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} must be bfloat16, float16 or float32, got {x.dtype}")


def check_ssd(tensors: Inputs) -> None:
    """Raise TypeError or ValueError for inputs of zeco_ssd that are wrong on this rank."""
    x, B, D = tensors.x, tensors.B, tensors.D
    named = tensors._asdict()
    for name, t in named.items():
        if t is not None:
            _check_dtype(name, t)
    if x.ndim != 4 or 0 in (*x.shape[:1], *x.shape[2:], *B.shape[2:]):
        shapes = f"{tuple(x.shape)}, {tuple(B.shape)}"
        raise ValueError(f"x must be [B, T, H, P] and B [B, T, G, N] with no empty dimension but T, got {shapes}")
    (batch, T, H, P), (G, N) = x.shape, B.shape[2:]
    if H % G:
        raise ValueError(f"the {H} heads of x must be a multiple of the {G} groups of B")
    expected = dict(dt=(batch, T, H), A=(H,), B=(batch, T, G, N), C=(batch, T, G, N), z=(batch, T, H, P), dt_bias=(H,))
    for name, shape in expected.items():
        if named[name] is not None and named[name].shape != shape:
            why = f"{name} must be {list(shape)}, got {list(named[name].shape)}"
            head_first = name == "A" and named[name].shape == (T,)
            raise ValueError(why + f": is x, {list(x.shape)}, [B, H, T, P] in place of [B, T, H, P]?" * head_first)
    if D is not None and D.shape not in ((H,), (H, P)):
        raise ValueError(f"D must be {[H]} or {[H, P]}, got {list(D.shape)}")
    if N > MOST_ROWS:
        raise ValueError(f"N must be at most {MOST_ROWS}, got {N}")


SSD, SIMPLE_GLA = _SSD(), _SimpleGLA()
