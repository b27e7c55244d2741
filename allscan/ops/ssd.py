"""zeco_ssd: the state space duality of Mamba2 over a sequence that is sharded across the ranks of a communicator."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base.autograd import check_saveable, product, wants_gradient
from ..base.checks import PER_DOCUMENT, check_halves, check_tensor, checked_first_token, integer, zigzag_of
from ..base.errors import DeferredError
from ..bindings.torch_compat import without_dispatch_modes
from ..comm.communicator import Communicator, check_communicator
from ..comm.tags import stamp
from ..launch.compiled_kernel import dynamo_disabled
from ..scan.agreement import ScanVariant, get_or_create_scan
from ..tokens.packing import (
    CUTS,
    EACH,
    Tables,
    TokenRange,
    apart,
    boundaries_on_host,
    carried_states,
    own_boundaries,
    together,
)
from ..tokens.partition import cached_table, check_packed, compare_values, own_batch_pieces, partition_start
from .allscan import allscan, check_final, final_of_all, using
from .carrier import check_cut, check_invariant
from .first_call import check_gates, common_fields, looks_at_gates
from .ssd_segments import Segment, by_segments, scan_in_order, segments_of


@dynamo_disabled
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
    chunk_scan: Callable | None = None,
    invariant: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba2's scan (SSD) over a sharded sequence; each rank holds consecutive tokens, in rank order.

        d_t = clamp(dt_t + dt_bias, *dt_limit), or clamp(softplus(dt_t + dt_bias), *dt_limit) with dt_softplus
        S_t = exp(d_t A) S_{t-1} + d_t x_t^T B_t,     y_t = S_t C_t + D x_t,  times silu(z_t) if z is given

    The arguments are those of ``mamba_ssm``'s ``mamba_chunk_scan_combined``, with comm= in addition.

    The function is differentiable in all tensors; the gradients of A, D and dt_bias are this rank's contribution. The
    chunk scan runs once, from a zero state; the outputs are linear in the incoming state, so one product adds its
    contribution. Forward runs one scan over the ranks; backward runs one scan in reverse. Each scan sends one state of
    B * H * P * N float32 words from each rank to the next. Products here and in torch's chunk scan are computed in
    float64 and rounded to float32; torch.autocast and torch.set_float32_matmul_precision do not change that. A
    ``chunk_scan`` runs under the caller's settings.

    Args:
        x: [B, T, H, P], this rank's T tokens; bfloat16, float16 or float32. T may differ between ranks and may be 0;
            all other dimensions and options must be equal on all ranks unless stated otherwise.
        dt: [B, T, H].
        A: [H], at most 0. Neither A nor the sum of d_t A over chunk_size tokens may be below -1,048,576. This is
            checked at the first call for a shape and in debug mode only, because the check synchronizes with the GPU.
        B, C: [B, T, G, N], one for each group of H / G heads.
        D: [H] or [H, P].
        z: like x.
        dt_bias: [H]. dt, A, B, C, D, z and dt_bias may have any float dtypes of at most 32 bits.
        chunk_size: tokens of a chunk; results do not depend on it, and it may differ between ranks.
        dt_softplus, dt_limit: equal on all ranks.
        dt_limit: lower and upper bound of d_t, the lower one at least 0.
        initial_states: [B or number of sequences, H, P, N] float32, equal on all ranks. Its gradient is non-zero only
            on the rank with a sequence's first token; without cu_seqlens, on the first rank.
        return_final_states: whether to return each sequence's state after its last token. Each rank may choose for
            itself, except that "all" is for all ranks or none: see output_final_state of ``allscan.zeco_gla``.
        cu_seqlens, first_token, layout, per_document, comm: as in ``allscan.zeco_gla``; in place of ``seq_idx``.
        chunk_scan: function that computes this rank's tokens from a zero state. It is called like
            ``mamba_chunk_scan_combined``, with x, dt, A, B, C, chunk_size=, D=, seq_idx=, return_final_states=True,
            where dt is d_t; seq_idx is int32 [B, T], or None if all tokens of the rank are of one sequence. A rank
            without tokens calls it with one token of zeros. Default: on GPUs that of mamba_ssm, if installed,
            otherwise a torch implementation; if mamba_ssm is installed and its import fails, a warning says why.
        invariant: as in ``allscan.zeco_gla``: results, and gradients except those of A, D and dt_bias, are bitwise
            equal for every number of ranks. Cost: one call of the chunk scan for each segment and batch entry.

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
    check_communicator(comm)
    inputs = dict(x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias)
    of_all = False
    if isinstance(return_final_states, str):
        of_all = return_final_states = check_final(return_final_states, comm, "return_final_states")
    with comm.call(False, "zeco_ssd", (*inputs.values(), initial_states)):
        steps = _Steps(dt_softplus, dt_limit)
        invariant = comm.invariant if invariant is None else invariant
        where = cu_seqlens, first_token, layout, per_document
        asked = _CallOptions(chunk_size, initial_states, *where, chunk_scan, invariant, of_all)
        zigzag, cu_seqlens, first_token = _prepare(comm, inputs, steps, asked)
        # kernels of a chunk scan read memory and ignore the negative bit
        x, A, B, C = (t.resolve_neg() for t in (x, A, B, C))
        D = None if D is None else D.resolve_neg()
        spans, seq_idx = _spans(comm, x, cu_seqlens, first_token, zigzag)
        if invariant:
            inputs |= dict(x=x, A=A, B=B, C=C, D=D)
            y, final = _in_order(comm, inputs, spans, zigzag, steps, asked)
            if not return_final_states:
                return y
            return final_of_all(y, final, comm, cu_seqlens is not None, bool(zigzag)) if of_all else (y, final)
        d, A = steps.of(dt, dt_bias), A.float()
        scan = chunk_scan or _installed(x.device)
        taken = (x, d, A, B, C) if x.shape[1] else [t if t is A else _one_token(t) for t in (x, d, A, B, C)]
        y, last = scan(*taken, chunk_size=chunk_size, D=D, seq_idx=seq_idx, return_final_states=True)
        tokens = _Tokens(x, d, d * A, B, C)
        per_document = zigzag == PER_DOCUMENT
        # runs[i]: the spans that contribute to the i-th state that is sent
        runs = [[s] for s in spans] if per_document else [_of_half(spans, half) for half in range(1 + zigzag)]
        leave = [run[-1] for run in runs]
        states = {([s for s in leave if s.tokens] or leave)[-1]: last.float()}  # local states of spans
        for span in (*spans, *leave):
            if span not in states and (span in leave or (return_final_states and span.ends)):
                states[span] = tokens.state(span)
        incoming = {s: initial_states[_rows(s)] for s in spans if s.begins and initial_states is not None}

        def after(span: TokenRange) -> Tensor:
            return states[span] if span not in incoming else states[span] + tokens.decay(span) * incoming[span]

        outgoing = [after(span) for span in leave]
        # the incoming state contributes to the outgoing state if no sequence begins or ends in between
        passing = [len(run) == 1 and not run[0].begins for run in runs]
        decays = [
            tokens.decay(run[0])[..., 0, 0] if p else torch.zeros_like(last[..., 0, 0], dtype=torch.float32)
            for run, p in zip(runs, passing, strict=True)
        ]
        if per_document:
            outgoing, decays = ([together(some[half::2]) for half in range(2)] for some in (outgoing, decays))
        if wants_gradient((*inputs.values(), initial_states)):  # equal on all ranks
            outgoing = [t if t.requires_grad else t.detach().requires_grad_() for t in outgoing]
            if initial_states is not None and initial_states.requires_grad:  # its gradient needs all scans on all ranks
                outgoing = [using(comm, t, initial_states) for t in outgoing]
        if zigzag:
            prevs = allscan(tuple(outgoing), tuple(decays), comm=comm, layout="zigzag")
        else:
            prevs = (allscan(outgoing[0], decays[0], comm=comm),)
        if per_document:
            received = apart(prevs, len(runs) // 2)
        else:
            received = prevs
        incoming |= {run[0]: prev for run, prev in zip(runs, received, strict=True) if not run[0].begins}
        outputs = [
            y[:, s.start : s.end].float() + (tokens.read(s, incoming[s]) if s in incoming else 0.0)
            for s in spans
            if s.tokens
        ]
        y = torch.cat(outputs or [y[:, :0].float()], 1)
        used = prevs if initial_states is None else (*prevs, initial_states)
        y = using(comm, (y if z is None else y * F.silu(z.float())).to(x.dtype), *used)
        if not return_final_states:
            comm._look_for_nan("zeco_ssd", y=y)
            return y
        ended = {s.sequence: after(s) for s in spans if s.ends}
        if cu_seqlens is None:
            final = ended.get(EACH, torch.zeros_like(last, dtype=torch.float32))
        else:
            none = torch.zeros_like(last, dtype=torch.float32)
            final = torch.cat([ended.get(i, none) for i in range(len(cu_seqlens) - 1)])
        comm._look_for_nan("zeco_ssd", y=y, final_states=final)
        final = using(comm, final, *used)
        packed = cu_seqlens is not None and not per_document
        return final_of_all(y, final, comm, packed, bool(zigzag)) if of_all else (y, final)


def _rows(span: TokenRange) -> slice:
    """Return the index of the states of the span's sequence."""
    return slice(None) if span.sequence == EACH else slice(span.sequence, span.sequence + 1)


def _of_half(spans: list[TokenRange], half: int) -> list[TokenRange]:
    """Return the spans with tokens in a half, or, if there are none, the span that forwards the incoming state."""
    own, through = [s for s in spans if s.half == half], TokenRange(0, 0, half, sequence=EACH)
    return [s for s in own if s.tokens] or [
        next((s for s in own if s.sequence == EACH or not s.ends), through)  # the other spans are empty sequences
    ]


def _one_token(x: Tensor) -> Tensor:
    """Pad [B, 0, ...] to one token of zeros, which does not change a state."""
    return F.pad(x, (0, 0) * (x.ndim - 2) + (0, 1))


class _Tokens(NamedTuple):
    """This rank's tokens. dt is d_t of ``zeco_ssd``, g is d_t A."""

    x: Tensor
    dt: Tensor
    g: Tensor
    B: Tensor
    C: Tensor

    def decay(self, span: TokenRange) -> Tensor:
        """Return the decay of a state over a span's tokens [B, H, 1, 1]."""
        return self.g[:, span.start : span.end].sum(1).exp()[..., None, None]

    def state(self, span: TokenRange) -> Tensor:
        """Return the local state of a span's tokens [B, H, P, N]."""
        x, dt, g, B = (t[:, span.start : span.end].float() for t in (self.x, self.dt, self.g, self.B))
        behind = F.pad(g[:, 1:], (0, 0, 0, 1)) if g.shape[1] else g
        weights = dt * behind.flip(1).cumsum(1).flip(1).exp()
        inputs = _grouped(x * weights[..., None], B).movedim(1, -1)  # [B, G, heads of a group, P, T]
        return product(inputs, B.transpose(1, 2)[:, :, None]).flatten(1, 2)

    def read(self, span: TokenRange, state: Tensor) -> Tensor:
        """Return the contribution of a span's incoming state to its outputs [B, tokens, H, P]."""
        C = self.C[:, span.start : span.end].float()
        state = state.unflatten(1, (C.shape[2], -1)).mT  # [B, G, heads of a group, N, P]
        read = product(C.transpose(1, 2)[:, :, None], state).flatten(1, 2).transpose(1, 2)
        return read * self.g[:, span.start : span.end].cumsum(1).exp()[..., None]


def _grouped(x: Tensor, B: Tensor) -> Tensor:
    """View [B, T, H, ...] as [B, T, G, heads of a group, ...]."""
    return x.unflatten(2, (B.shape[2], -1))


class _Steps(NamedTuple):
    """Options that determine d_t of ``zeco_ssd``."""

    softplus: bool
    limit: Any

    def of(self, dt: Tensor, dt_bias: Tensor | None) -> Tensor:
        d = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
        return (F.softplus(d) if self.softplus else d).clamp(*self.limit)


class _CallOptions(NamedTuple):
    """Unchecked options of a call, as the caller passes them: see ``zeco_ssd``."""

    chunk_size: Any
    initial_states: Tensor | None
    cu_seqlens: Any
    first_token: int | None
    layout: str
    per_document: bool
    chunk_scan: Callable | None
    invariant: int
    of_all: bool


def _prepare(
    comm: Communicator, inputs: dict[str, Any], steps: _Steps, asked: _CallOptions
) -> tuple[int, tuple[int, ...] | None, int | None]:
    """Run all checks; return (zigzag, cu_seqlens on the host, first_token). A first call is collective on the host."""
    deferred = shape = None
    agree: Any = None
    chunk_size, initial_states, cu_seqlens, first_token, layout, per_document, chunk_scan, invariant, of_all = asked
    values_checked, boundaries, dt_limit = False, cu_seqlens, steps.limit
    try:
        zigzag = zigzag_of(layout, per_document, cu_seqlens)
        cu_seqlens = None if cu_seqlens is None else own_boundaries(cu_seqlens)
        first_token = checked_first_token(first_token, cu_seqlens)
        shape = _check(comm, inputs)
        integer("chunk_size", chunk_size)
        check_saveable(saved := (*inputs.values(), initial_states), saved)
        x, groups = inputs["x"], inputs["B"].shape[2]
        if len(dt_limit) != 2 or not 0 <= dt_limit[0] <= dt_limit[1]:
            raise ValueError(f"dt_limit must be two numbers that rise from at least 0, got {dt_limit}")
        absent = tuple((f"{name} is None", inputs[name] is None) for name in ("D", "z", "dt_bias"))
        how = ("dt_softplus", bool(steps.softplus)), ("dt_limit", tuple(map(float, dt_limit)))
        are_none = initial_states is None, cu_seqlens is None, first_token is None
        common = common_fields(x.shape[0], x.dtype, 1.0, zigzag, *are_none)
        invariant = check_invariant(comm, invariant, zigzag)
        last = ("invariant", invariant), ("return_final_states is 'all'", of_all)
        agree = ("zeco_ssd", ("groups", groups), *common, *absent, *how, *last)
        check_cut(comm, x.shape[1], invariant, zigzag)
        if zigzag:
            check_halves(x.shape[1])
        if cu_seqlens is not None and x.shape[0] != 1:
            raise ValueError(f"cu_seqlens must be [N + 1] with B = 1, got {tuple(cu_seqlens.shape)}, B = {x.shape[0]}")
        sequences = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        shape = carried_states(x.shape[0], sequences, zigzag), *shape[1:]
        if initial_states is not None:
            check_tensor("initial_states", initial_states, (sequences, *shape[1:]), comm.device)
        check_packed(comm, cu_seqlens, x.shape[1], first_token, zigzag)
        if chunk_scan is not None and not callable(chunk_scan):
            raise TypeError(f"chunk_scan must be a function, got {type(chunk_scan).__name__}")
        values_checked = looks_at_gates(comm, shape, agree)
        if values_checked:
            with torch.no_grad(), without_dispatch_modes():
                A = inputs["A"].float()
                check_gates("A", A[None, None], 1)
                check_gates("dt * A", A * steps.of(inputs["dt"], inputs["dt_bias"]), chunk_size)
    except (TypeError, ValueError) as error:
        deferred = DeferredError(error)
    algorithm = "chain" if shape is None or invariant else comm.topology.algorithm_for(4 * math.prod(shape))
    get_or_create_scan(
        comm, shape, agree, deferred, first_call_only=values_checked, variant=ScanVariant(algorithm=algorithm)
    )
    compare_values(comm, boundaries, cu_seqlens)
    lengths = None if cu_seqlens is None else boundaries_on_host(cu_seqlens)
    comm.order.stamp = stamp(lengths, *agree)
    return zigzag, lengths, first_token


def _in_order(
    comm: Communicator, inputs: dict[str, Any], spans: list[TokenRange], zigzag: int, steps: _Steps, asked: _CallOptions
) -> tuple[Tensor, Tensor]:
    """Compute (y, final_states) with ``invariant``. Every function of tokens is called for one segment of one batch
    entry."""
    x, A, D, initial = inputs["x"], inputs["A"].float(), inputs["D"], asked.initial_states
    (batch, _, H, P), N = x.shape, inputs["B"].shape[3]
    scan = asked.chunk_scan or _installed(x.device)

    def segment(own: dict[str, Any]) -> Segment:
        d, n = steps.of(own["dt"], inputs["dt_bias"]), own["x"].shape[1]
        taken = own["x"], d, A, own["B"], own["C"]
        y, last = scan(*taken, chunk_size=asked.chunk_size, D=D, seq_idx=None, return_final_states=True)
        tokens, whole = _Tokens(own["x"], d, d * A, own["B"], own["C"]), TokenRange(0, n, sequence=EACH)

        def outputs(state: Tensor) -> Tensor:
            found = y.float() + tokens.read(whole, state)
            return found if "z" not in own else found * F.silu(own["z"].float())

        return Segment(last.float(), tokens.decay(whole)[..., 0, 0], outputs)

    sizes = [segments_of(s, asked.invariant) for s in spans]
    parts = by_segments({name: inputs[name] for name in ("x", "dt", "B", "C", "z")}, sum(sizes, []))
    segments = iter([[segment(own) for own in of_segment] for of_segment in parts])
    rows = None if initial is None else initial.split(1)

    def before(s: TokenRange | None) -> Tensor:
        if s is None or initial is None or rows is None:
            return x.new_zeros(batch, H, P, N, dtype=torch.float32)
        return initial if s.sequence == EACH else rows[s.sequence]

    wanted = wants_gradient((*inputs.values(), initial))
    placed = [(s, [next(segments) for _ in of_span]) for s, of_span in zip(spans, sizes, strict=True)]
    found = scan_in_order(comm, placed, 1 + bool(zigzag), before, wanted)
    used = found.scanned if initial is None else (*found.scanned, initial)
    if not found.outputs:  # without tokens the gradients are zeros, not None
        used = *used, *(t for t in inputs.values() if t is not None)
    # concatenated in float32: torch.autocast to another 16-bit type than x's would reject x's
    y = using(comm, torch.cat(found.outputs or [x[:, :0].float()], 1).to(x.dtype), *used)
    none = before(None)
    if asked.cu_seqlens is None:
        final = found.final.get(EACH, none)
    else:
        final = torch.cat([found.final.get(i, none) for i in range(len(asked.cu_seqlens) - 1)])
    comm._look_for_nan("zeco_ssd", y=y, final_states=final)
    return y, using(comm, final, *used)


def _check(comm: Communicator, inputs: dict[str, Any]) -> tuple[int, int, int, int]:
    """Check dtypes, devices and shapes; return the shape of the state. Raises TypeError or ValueError."""
    x, B, D = (inputs[name] for name in "xBD")
    for name, t in inputs.items():
        if t is None and name in ("D", "z", "dt_bias"):
            continue
        check_tensor(name, t, None, comm.device, None)
        if t.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise TypeError(f"{name} must be bfloat16, float16 or float32, got {t.dtype}")
    if x.ndim != 4 or B.ndim != 4 or 0 in (*x.shape[:1], *x.shape[2:], *B.shape[2:]):
        shapes = f"{tuple(x.shape)}, {tuple(B.shape)}"
        raise ValueError(f"x must be [B, T, H, P] and B [B, T, G, N] with no empty dimension but T, got {shapes}")
    (batch, T, H, P), (G, N) = x.shape, B.shape[2:]
    if H % G:
        raise ValueError(f"the {H} heads of x must be a multiple of the {G} groups of B")
    wanted = dict(dt=(batch, T, H), A=(H,), B=(batch, T, G, N), C=(batch, T, G, N), z=(batch, T, H, P), dt_bias=(H,))
    for name, shape in wanted.items():
        if inputs[name] is not None and inputs[name].shape != shape:
            why = f"{name} must be {list(shape)}, got {list(inputs[name].shape)}"
            head_first = name == "A" and inputs[name].shape == (T,)
            raise ValueError(why + f": is x, {list(x.shape)}, [B, H, T, P] in place of [B, T, H, P]?" * head_first)
    if D is not None and D.shape not in ((H,), (H, P)):
        raise ValueError(f"D must be {[H]} or {[H, P]}, got {list(D.shape)}")
    return batch, H, P, N


def _spans(
    comm: Communicator, x: Tensor, lengths: tuple[int, ...] | None, first_token: int | None, zigzag: int
) -> tuple[list[TokenRange], Tensor | None]:
    """Return (this rank's spans, seq_idx or None)."""
    batch, T = x.shape[:2]
    if lengths is None:
        spans = [piece._replace(sequence=EACH) for piece in own_batch_pieces(comm, 1, T, zigzag)]
        key: tuple = ("ssd", batch, T)
    else:
        first = partition_start(comm, lengths, T, first_token, zigzag)
        spans = CUTS[zigzag](lengths, first, T, comm.rank == 0)
        key = ("ssd", batch, T, first, lengths, zigzag)

    def make() -> Tables:
        numbers = torch.repeat_interleave(torch.tensor([s.tokens for s in spans], device="cpu"))
        return Tables([numbers.to(torch.int32).expand(batch, -1).contiguous()], comm.device)

    several = sum(s.tokens > 0 for s in spans) > 1
    return spans, cached_table(comm, key, make).tensors[0] if several else None


def _installed(device: torch.device) -> Callable:
    """Return the default chunk scan of this device."""
    return (device.type == "cuda" and _of_mamba_ssm()) or torch_chunk_scan


@functools.cache
def _of_mamba_ssm() -> Callable | None:
    """Return mamba_ssm's chunk scan; None if it is not installed, or, with a warning, if its import fails."""
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    except Exception as error:  # an incomplete installation can raise any exception
        if not isinstance(error, ModuleNotFoundError) or error.name != "mamba_ssm":
            warnings.warn(
                "zeco_ssd uses torch's operators, about 12 times slower, since the import of mamba_ssm failed: "
                f"{type(error).__name__}: {error}. Repair its installation (a wheel built without CUDA lacks "
                "selective_scan_cuda, which its __init__ imports but its chunk scan does not use: an empty module of "
                "that name suffices), or pass chunk_scan=",
                stacklevel=4,
            )
        return None
    return mamba_chunk_scan_combined


def torch_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    seq_idx: Tensor | None = None,
    return_final_states: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute mamba_chunk_scan_combined from a zero state in torch operators; return (y, states after the last token),
    both float32."""
    T, G, L = x.shape[1], B.shape[2], min(chunk_size, x.shape[1])

    def chunked(t: Tensor) -> Tensor:  # [B, chunks, G, heads of a group or 1, L, ...]
        t = F.pad(t.float(), (0, 0) * (t.ndim - 2) + (0, -T % L)).unflatten(1, (-1, L)).unflatten(3, (G, -1))
        return t.movedim(2, 4)

    numbers = torch.zeros(1, T, dtype=torch.int32, device=x.device) if seq_idx is None else seq_idx
    numbers = F.pad(numbers[:, None].float(), (0, -T % L), mode="replicate")[:, 0].unflatten(1, (-1, L))
    numbers = numbers[:, :, None, None]  # [B or 1, chunks, 1, 1, L]
    last = numbers[..., -1:]  # the sequence of each chunk's outgoing state
    entered = torch.cat([last[:, :1] * 0 - 1, last[:, :-1]], 1)
    b, c = chunked(B), chunked(C)
    # differences of sums are computed in float64, so that a strong decay in a chunk does not round away the others
    sums = chunked(dt * A).double().cumsum(-1)
    inputs = chunked(x * dt[..., None])
    seen = torch.ones(L, L, dtype=torch.bool, device=x.device).tril() & (numbers[..., None] == numbers[..., None, :])
    decay = (sums[..., None] - sums[..., None, :]).float().masked_fill(~seen, -torch.inf).exp()
    y = product(product(c, b.mT) * decay, inputs)
    decay_to_end = torch.where(numbers == last, (sums[..., -1:] - sums).float().exp(), 0.0)
    left = product((inputs * decay_to_end[..., None]).mT, b)
    passed = torch.where(last == entered, sums[..., -1:].float().exp(), 0.0)[..., None]
    states = [torch.zeros_like(left[:, 0])]
    for chunk_decay, added in zip(passed.unbind(1), left.unbind(1), strict=True):  # unbind's backward makes one tensor
        states.append(chunk_decay * states[-1] + added)
    reached = torch.where(numbers == entered, sums.float().exp(), 0.0)[..., None]
    y = y + product(c, torch.stack(states[:-1], 1).mT) * reached
    y = y.movedim(4, 2).flatten(3, 4).flatten(1, 2)[:, :T]
    if D is not None:
        y = y + x.float() * (D.float() if D.ndim == 2 else D.float()[:, None])
    return y, states[-1].flatten(1, 2)
