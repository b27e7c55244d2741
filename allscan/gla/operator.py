"""zeco_gla: gated linear attention over a sequence that is cut over the ranks of a communicator."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..checks import (
    boundaries,
    check_for_an_operator,
    check_halves,
    check_tensor,
    in_dual_level,
    integer,
    is_zigzag,
    plain_or_traced,
    signature_of,
)
from ..communicator import Communicator, cached_on
from ..errors import Problem
from ..first_call import KEPT, check_first, checked, find_layout
from ..operators import Operator, refuse_second_derivative, wants_gradient
from ..order import recomputing
from ..packing import CHUNK_TOKENS, MOST_CHUNKS, Layout
from ..plan import Plan
from ..tiling import cdiv
from .carrier import AllScanCarrier, StateCarrier, carrier_of
from .launches import Shape, backward_plan, forward_plan, shape_of

# An autograd graph has no other to a Prepared: it is not to keep a communicator's plans
Reference: TypeAlias = "weakref.ref[Prepared]"


def zeco_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, comm: Communicator, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | Sequence[int] | None = None, first_token: int | None = None, layout: str = "contiguous",
    recompute: bool = True,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
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
    first_token: with cu_seqlens, where in the whole this rank's tokens begin, on every rank or on none. Then a new
        cu_seqlens asks no other rank on the host, and need not come with the same partition again. That the ranks'
        tokens follow one another is the caller's word; debug mode compares it.
    layout: "zigzag" where the whole is cut into 2P chunks and rank r has chunk r in the first half of its T tokens and
        chunk 2P - 1 - r in the second, as trainers have it that balance causal softmax attention. T is even. Two states
        travel instead of one: that of the first halves over the ranks, then that of the second halves back.
        first_token is that of the first half; final_state is rank 0's.
    recompute: whether backward makes the decayed queries and keys and the scores inside the chunks again. False: they
        are kept from forward, which takes about B * T * H * (4 * K + 256) bytes until backward for bfloat16 inputs, 8 *
        K + 256 for others, and spares backward two kernels. Without gradients nothing is kept either way. Each rank may
        choose for itself.

    Returns (o, final_state): o [B, T, H, V] like v; final_state [B or N, H, K, V] float32, true on the rank that has
    the sequence's last token and zeros on the others, or None.

    Differentiable in q, k, v, g and initial_state. One scan forward and one in reverse in backward, each moving one
    state of B*H*K*V float32 words from a rank to the next, while the kernels that need nothing remote run. The result
    is ready on the current stream; the host does not wait. All ranks make the same calls in the same order, forward and
    backward; activation checkpointing keeps that order. torch.compile takes it as a whole, a custom operator. The first
    call for a shape, or for a cu_seqlens, is collective on the host and must come before a CUDA graph's capture.

    Raises TypeError (dtypes), ValueError (shapes, device, cu_seqlens, a positive gate), and what
    :func:`allscan.allscan` raises, before anything is launched.
    Source: ZeCO, arXiv 2507.01004, algorithms 1 and 2.

        >>> o, _ = allscan.zeco_gla(q, k, v, g, comm=comm)         # q[:, t0:t1], ... of the whole sequence
    """
    return zeco_gla_by(
        AllScanCarrier(comm), q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, first_token, layout,
        recompute,
    )  # fmt: skip


def zeco_gla_by(
    carrier: StateCarrier, q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | Sequence[int] | None = None, first_token: int | None = None, layout: str = "contiguous",
    recompute: bool = True,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """:func:`zeco_gla` with the state carried over the ranks by ``carrier``."""
    arguments = (
        carrier, q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, first_token, layout, recompute,
    )  # fmt: skip
    if torch.compiler.is_compiling():
        return _zeco_gla(*arguments)
    with carrier.comm.call():
        return _zeco_gla(*arguments)


def _zeco_gla(
    carrier, q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, first_token, layout, recompute
):
    keeps = not recompute and wants_gradient((q, k, v, g, initial_state))
    prepared = None
    if cu_seqlens is None and not torch.compiler.is_compiling():
        prepared = _prepared(carrier, signature_of(q, k, v, g, initial_state), scale, layout, keeps)
    if prepared is None or not prepared.ready:
        problem = None
        try:
            zigzag = is_zigzag(layout)
            check_for_an_operator("zeco_gla", dict(q=q, k=k, v=v, g=g, initial_state=initial_state), scale)
            cu_seqlens = None if cu_seqlens is None else boundaries(cu_seqlens)
            first_token = None if first_token is None or cu_seqlens is None else integer("first_token", first_token, 0)
        except (TypeError, ValueError, NotImplementedError) as error:
            problem = Problem(error)
        if problem is not None:
            carrier.prepare(None, problem=problem)  # raises it, on the other ranks too if this is a first call
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    else:
        scale, zigzag, first_token = prepared.scale, prepared.shape.zigzag, None
    q, k, v, g, initial_state = plain_or_traced(q, k, v, g, initial_state)
    o, final_state, *_ = _operator(
        q, k, v, g, initial_state, cu_seqlens, scale, output_final_state, carrier.handle, first_token, zigzag, keeps,
        prepared=None if prepared is None else weakref.ref(prepared),
    )  # fmt: skip
    return o, final_state if output_final_state else None


class Prepared:
    """Of calls without cu_seqlens and with tensors of one kind: what the first of them has worked out, with which the
    later ones need no checks but those by which they find it. ``ready`` once ``_forward`` of the first call has filled
    it."""

    def __init__(self) -> None:
        self.ready = False
        self._plans: dict[tuple, Plan] = {}

    def fill(self, shape: Shape, layout: Layout, scale: float) -> Prepared:
        self.shape, self.layout, self.scale, self.ready = shape, layout, scale, True
        return self

    def run(self, carrier: StateCarrier, make: Callable[..., Plan], *tensors: Tensor | None) -> list[Tensor]:
        """Run the plan of a pass, made at the first call with these tensors that are None."""
        given = [x for x in tensors if x is not None]
        kind = make, *[x is None for x in tensors]
        plan = self._plans.get(kind)
        if plan is None:
            shape, layout, scale = self.shape, self.layout, self.scale
            key = type(carrier), shape, scale, *kind
            plan = layout.derived(key, lambda: make(shape, scale, layout.tables(), carrier, *tensors))
            self._plans[kind] = plan
        return plan.run(carrier, *given)


def _prepared(carrier: StateCarrier, signature: tuple, scale: Any, layout: Any, keeps: bool) -> Prepared | None:
    """For a call without cu_seqlens, which the first such call is to fill. None where each call is to be checked: where
    tensors may have tangents, and where a wrong argument would be found for a right one that it equals (Decimal(1)), or
    be another one at each call (NaN)."""
    if in_dual_level() or type(scale) not in (float, int, type(None)) or scale != scale or type(layout) is not str:
        return None
    known = cached_on(carrier.comm, "calls of zeco_gla")
    key = type(carrier), signature, scale, layout, keeps
    try:
        prepared = known.get(key)
    except TypeError:  # sizes that are symbols have no hash
        return None
    if prepared is None:
        if len(known) >= KEPT:
            del known[next(iter(known))]
        prepared = known[key] = Prepared()
    return prepared


def _known(reference: Reference | None, carrier: StateCarrier) -> Prepared | None:
    """What ``reference`` is to, if that is there and ready. In a capture, whose graph has the addresses of the layout's
    tables, the communicator keeps them."""
    prepared = None if reference is None else reference()
    if prepared is None or not prepared.ready:
        return None
    if carrier.comm.streams.capturing():
        cached_on(carrier.comm, "layouts in graphs")[id(prepared.layout)] = prepared.layout
    return prepared


def _check(q, k, v, g, initial_state, cu_seqlens, comm, zigzag):
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
    if q.shape[0] * cdiv(q.shape[1], CHUNK_TOKENS) > MOST_CHUNKS:
        raise ValueError(f"B * T must be at most {MOST_CHUNKS:,} chunks of {CHUNK_TOKENS} tokens, got {tuple(q.shape)}")
    if zigzag:
        check_halves(q.shape[1])
    if (1 + zigzag) * q.shape[0] * q.shape[2] > MOST_CHUNKS:
        raise ValueError(f"B * H must be at most {MOST_CHUNKS // (1 + zigzag):,}, got {tuple(q.shape)}")
    if q.shape[-1] > 512:
        raise ValueError(f"K must be at most 512, got {q.shape[-1]}")
    if cu_seqlens is not None:
        if q.shape[0] != 1:
            raise ValueError(f"cu_seqlens must be [N + 1] with B = 1, got {tuple(cu_seqlens.shape)}, B = {q.shape[0]}")
    if initial_state is not None:
        check_tensor("initial_state", initial_state, _state_shape(q, v, cu_seqlens), comm.device)


def _carried_shape(q, v):
    """Of what travels over the ranks."""
    B, _, H, K = q.shape
    return B * H, K, v.shape[3]


def _state_shape(q, v, cu_seqlens):
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return sequences, q.shape[2], q.shape[3], v.shape[3]


def _check_call(q, k, v, g, initial_state, cu_seqlens, carrier, first_token, zigzag) -> None:
    """All checks; those of the tensors at the first call with tensors like these, which agrees with the other ranks."""
    comm = carrier.comm
    are_none = initial_state is None, cu_seqlens is None, first_token is None
    sequences = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    signature = "zeco_gla", signature_of(q, k, v, g, initial_state), sequences, are_none, zigzag, type(carrier)
    if signature not in checked(comm):
        shape = agree = None
        if q.ndim == v.ndim == 4:
            shape, agree = _carried_shape(q, v), ("zeco_gla", q.shape[0], str(q.dtype), *are_none, zigzag)

        def check():
            _check(q, k, v, g, initial_state, cu_seqlens, comm, zigzag)

        check_first(comm, signature, shape, agree, check, g, carrier.prepare)


def _shape(q, v, g, cu_seqlens, zigzag, keeps, made=shape_of) -> Shape:
    (B, T, H, K), sequences = q.shape, q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    device = "cuda" if q.is_cuda else "cpu"  # an eighth of q.device.type's time
    return made(B, T, H, K, v.shape[3], sequences, q.dtype, g.dtype, device, zigzag, keeps)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    scale: float, final: bool, handle: int, first_token: int | None = None, zigzag: bool = False, keeps: bool = False,
    *, prepared: Reference | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(o, final_state or None, and what backward takes: Shape.kept)."""
    carrier = carrier_of(handle)
    with carrier.comm.call():
        known = _known(prepared, carrier)
        if known is None:
            _check_call(q, k, v, g, initial_state, cu_seqlens, carrier, first_token, zigzag)
            known = _fill(prepared, carrier, scale, q, v, g, cu_seqlens, first_token, zigzag, keeps)
        final_state, kept = made = _made(q, v, cu_seqlens, final, known.shape)
        return *known.run(carrier, forward_plan, q, k, v, g, initial_state, final_state, kept), *made


def _fill(reference: Reference | None, carrier, scale, q, v, g, cu_seqlens, first_token, zigzag, keeps) -> Prepared:
    """What ``reference`` is to, or one for this call alone."""
    shape = _shape(q, v, g, cu_seqlens, zigzag, keeps)
    layout = find_layout(carrier.comm, shape.B, shape.T, cu_seqlens, shape.segment, first_token, zigzag)
    prepared = None if reference is None else reference()
    return (prepared or Prepared()).fill(shape, layout, scale)


def _made(q, v, cu_seqlens, final, shape):
    """(final_state or None, and uninitialised, for backward, Shape.kept)."""
    return _zeros(q, v, cu_seqlens, final), q.new_empty(shape.kept_words, dtype=torch.float32)


def _zeros(q, v, cu_seqlens, wanted):
    """States, or None."""
    return q.new_zeros(_state_shape(q, v, cu_seqlens), dtype=torch.float32) if wanted else None


def _fake(q, k, v, g, initial_state, cu_seqlens, scale, final, handle, first_token=None, zigzag=False, keeps=False):
    return torch.empty_like(v), *_made(q, v, cu_seqlens, final, _shape(q, v, g, cu_seqlens, zigzag, keeps, Shape))


def _backward(
    do: Tensor, dfinal: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, cu_seqlens: Tensor | None,
    kept: Tensor, scale: float, initial: bool, handle: int, first_token: int | None = None,
    zigzag: bool = False, keeps: bool = False, *, prepared: Reference | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dv, dq, dk, dg, dinitial_state or None)."""
    carrier = carrier_of(handle)
    with carrier.comm.call(reverse=True):
        refuse_second_derivative("zeco_gla")
        known = _known(prepared, carrier)
        if known is None:
            known = _fill(None, carrier, scale, q, v, g, cu_seqlens, first_token, zigzag, keeps)
        dinitial = _zeros(q, v, cu_seqlens, initial)
        dv, dq, dk, dg = known.run(carrier, backward_plan, q, k, v, g, do, dfinal, dinitial, kept)
        return dv, dq, dk, dg, dinitial


def _fake_backward(do, dfinal, q, k, v, g, cu_seqlens, kept, scale, initial, handle, first_token=None, zigzag=False,
                   keeps=False):  # fmt: skip
    return *(torch.empty_like(x) for x in (v, q, k, g)), _zeros(q, v, cu_seqlens, initial)


def _save(ctx, inputs, output):
    q, k, v, g, initial_state, cu_seqlens, ctx.scale, _, *ctx.where = inputs
    ctx.initial = initial_state is not None and initial_state.requires_grad
    ctx.save_for_backward(q, k, v, g, cu_seqlens, output[2])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    no_node = type(output[0]) is not Tensor or recomputing()  # traced by torch.compile, or checkpointing's
    handle, _, zigzag, _ = ctx.where
    ctx.pending = [] if no_node else carrier_of(handle).pending(_carried_shape(q, v), zigzag)


def _gradient(backward, ctx, do, dfinal, *_):
    for pending in ctx.pending:
        pending.run()
    q, k, v, g, cu_seqlens, kept = ctx.saved_tensors
    do, dfinal = plain_or_traced(torch.zeros_like(v) if do is None else do, dfinal)
    dv, dq, dk, dg, dinitial = backward(do, dfinal, q, k, v, g, cu_seqlens, kept, ctx.scale, ctx.initial, *ctx.where)
    return dq, dk, dv, dg, dinitial if ctx.initial else None, None, None, None, None, None, None, None


_operator = Operator("allscan::zeco_gla", _forward, _fake, _backward, _fake_backward, _save, _gradient, tensors=6)
