"""halo(): exchange of tokens next to a shard boundary, for short convolutions, token shifts and labels, by a neighbour
shift of AllScan."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base.autograd import (
    CustomOperator,
    Function,
    Passes,
    check_saveable,
    inference_tensors,
    second_derivative_error,
    wants_gradient,
)
from ..base.checks import (
    PER_DOCUMENT,
    ScanInputs,
    Shift,
    check_halves,
    check_tensor,
    checked_first_token,
    integer,
    restored,
    signature_of,
    zigzag_of,
)
from ..base.errors import DeferredError
from ..bindings.torch_compat import num_dispatch_modes, recorded
from ..comm.backwards import FWD_EPOCHS, new_fwd_epochs, pending_backward
from ..comm.communicator import Communicator, check_communicator, communicator_of
from ..comm.tags import stamp
from ..launch.compiled_kernel import dynamo_disabled
from ..scan.agreement import get_or_create_scan
from ..scan.zigzag_scan import outgoing
from ..tokens.packing import Tables, boundaries_on_host, carried_states, own_boundaries, tokens_of_pieces
from ..tokens.partition import cached_table, check_packed, compare_values, partition_start
from .allscan import OF_HALO, scan_once

Xs = TypeVar("Xs", Tensor, tuple[Tensor, ...])


def halo(
    x: Xs,
    n: int,
    *,
    comm: Communicator,
    reverse: bool = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    first_token: int | None = None,
    layout: str = "contiguous",
    per_document: bool = False,
) -> Xs:
    """Get the n tokens that precede this rank's part of the sequence, from the preceding ranks. Differentiable.

        out[:, i] = whole[:, first - n + i],   i = 0 .. n - 1, where this rank has whole[:, first : first + T]

    With reverse=True, get the n following tokens: out[:, i] = whole[:, first + T + i]. Missing tokens are zeros.

    The exchange is a neighbour shift, by ``allscan.allscan`` with the decay 0: a rank waits for its neighbours only. A
    rank with fewer than n tokens also forwards tokens of the ranks before it, and waits for these first. The first call
    for a shape is collective on the host. For gradients every rank must use the result, also the first rank, whose
    result is zeros: otherwise its backward does not run, and its next call raises (in a compiled function the other
    ranks time out instead). torch.compile traces the call with fullgraph=True, except for per_document=True and for
    cu_seqlens that is no tensor.

    Args:
        x: [B, T, ...], this rank's T tokens. T may differ between ranks, may be less than n and may be 0; other
            dimensions must be equal on all ranks. Floats of at most 32 bits are sent as float32 (-0.0 may arrive as
            +0.0); integers are sent as 16 bits per word and arrive unchanged. Or a tuple of such tensors with the same
            B and T, which are sent together.
        n: number of tokens, at least 1; equal on all ranks.
        comm: the communicator.
        reverse: whether to get the following tokens; equal on all ranks.
        cu_seqlens, first_token: packed sequences, B = 1, as for ``allscan.zeco_gla``. Tokens of another sequence than
            the one at the shard boundary count as missing.
        layout: "zigzag" as for zeco_gla: out is [B, 2n, ...], n tokens for the first half of x and n for the second.
        per_document: as for zeco_gla: out is [1, N * 2n, ...], n tokens for each piece of x in order, empty pieces
            included. One message in each direction has the tokens of all sequences; pieces shorter than n need one
            message for each length.

    Returns:
        [B, n, ...] like x; a tuple if x is a tuple.

    Raises:
        ValueError: n or cu_seqlens are wrong, T is odd in the zigzag layout, or shapes differ between ranks.
        TypeError: the dtype is not supported.
        RuntimeError: as ``allscan.allscan``, whose other errors are raised too.

    Example:
        >>> before = allscan.halo(x, 3, comm=comm)                       # a causal convolution over 4 tokens:
        >>> y = conv(torch.cat([before, x], 1))                          # without padding of its own
        >>> after = allscan.halo(tokens, 1, comm=comm, reverse=True)     # 0 behind the last rank's
        >>> labels = torch.cat([tokens[:, 1:], after if comm.rank < comm.size - 1 else after.fill_(-100)], 1)
    """
    check_communicator(comm)
    options = Options(n, bool(reverse), cu_seqlens, first_token, layout, per_document)
    if not (torch.compiler.is_compiling() or (num_dispatch_modes() and recorded())):
        return _eager_halo(x, comm, options)
    xs = x if isinstance(x, tuple) else (x,)
    if not per_document and _traceable(xs, n, comm, cu_seqlens, layout):
        halves, T, alike = 1 + (layout == "zigzag"), xs[0].shape[1], (_dtypes(xs), _widths(xs))
        edges = _edges(xs, n, halves, reverse)
        edge = torch.stack(edges) if halves == 2 else edges[0]
        cu_seqlens = None if cu_seqlens is None else own_boundaries(cu_seqlens)
        found = _traced.forward(edge, T, cu_seqlens, first_token, reverse, comm.handle, *alike)[0]
        found = _from_edges(found, xs, halves * n)
        return found if isinstance(x, tuple) else found[0]
    return _not_traced(x, comm, options)


class Options(NamedTuple):
    """Options of a call: see ``halo``. T: the rank's number of tokens, if x has only the edges."""

    n: Any
    reverse: bool = False
    cu_seqlens: Any = None
    first_token: int | None = None
    layout: str = "contiguous"
    per_document: bool = False
    T: int | None = None

    def alike(self, dtypes: str, widths: Sequence[int]) -> tuple:
        """Return the arguments that must be equal on all ranks, except (B, n, words of a token)."""
        kinds = ("dtypes", dtypes), ("words of a token in each x", tuple(widths))
        n, reverse, cu_seqlens, first_token, layout, per_document, _ = self
        are_none = ("cu_seqlens is None", cu_seqlens is None), ("first_token is None", first_token is None)
        how = ("reverse", bool(reverse)), ("layout", layout)
        return "halo", ("n", n), *kinds, *how, *are_none, ("per_document", bool(per_document))


def _traceable(
    xs: tuple[Tensor, ...], n: int, comm: Communicator, cu_seqlens: Tensor | Sequence[int] | None, layout: str
) -> bool:
    """Return whether the arguments are valid."""
    alike = (
        len(xs) > 0
        and all(  # torch 2.11 does not trace bool() of a tuple
            isinstance(x, Tensor)
            and x.ndim >= 2
            and x.device == comm.device
            and x.shape[:2] == xs[0].shape[:2]
            and x.layout == torch.strided
            and not x.is_complex()
            and x.dtype not in (torch.float64, torch.bool)
            for x in xs
        )
    )
    packed = isinstance(cu_seqlens, Tensor) and cu_seqlens.ndim == 1 and cu_seqlens.dtype in (torch.int32, torch.int64)
    return (
        alike
        and type(n) is int
        and n >= 1
        and (layout == "contiguous" or (layout == "zigzag" and xs[0].shape[1] % 2 == 0))
        and (cu_seqlens is None or packed and len(cu_seqlens) > 1)
    )


def _eager_halo(x: Xs, comm: Communicator, options: Options) -> Any:
    with comm.call(options.reverse, "halo()", x):
        out = _halo(x if isinstance(x, tuple) else (x,), comm, options)
        return out if isinstance(x, tuple) else out[0]


_not_traced = dynamo_disabled(_eager_halo)


def halo_from_boundary_tokens(x: Xs, T: int, n: int, *, comm: Communicator, layout: str, **where: Any) -> Xs:
    """Run ``halo`` for this rank's ``T`` tokens; x has only their edges: the last n tokens, or all if fewer, of each
    half or of each document's pieces. where: cu_seqlens, first_token, per_document."""
    found: Xs = _eager_halo(x, comm, Options(n, layout=layout, T=T, **where))
    return found


def checked_options(xs: tuple[Tensor, ...], comm: Communicator, options: Options) -> Options:
    """Check a call, unless an equal one was; return its options with converted values. Sets the call's stamp."""
    n, reverse, cu_seqlens, first_token, layout, per_document, T = options
    cached = cu_seqlens is None and type(n) is int and type(layout) is str
    cached = cached and not (comm.debug or (wants_gradient(xs) and inference_tensors(xs)))
    where: tuple[object, ...] = (n, reverse, first_token is None, layout, per_document, T) if cached else ()
    signature = "halo", *signature_of(*xs), *where
    stamp_of_call = comm.checked.get(signature) if cached else None
    if stamp_of_call is None:
        n, cu_seqlens, first_token, stamp_of_call = _check_halo(xs, comm, options)
        if cached:
            comm.checked.remember(signature, stamp_of_call)
    comm.order.stamp = stamp_of_call
    return options._replace(n=n, cu_seqlens=cu_seqlens, first_token=first_token)


def _halo(xs: tuple[Tensor, ...], comm: Communicator, options: Options) -> tuple[Tensor, ...]:
    n, reverse, cu_seqlens, first_token, layout, per_document, T = checked_options(xs, comm, options)
    if per_document:
        return _of_documents(xs, n, comm, reverse, boundaries_on_host(cu_seqlens), first_token, T)
    zigzag, tokens = layout == "zigzag", xs[0].shape[1]
    halves = 1 + zigzag
    edges, decay = _edges(xs, n, halves, reverse), _decay(tokens // halves, n, reverse)
    inside = _inside(comm, tokens if T is None else T, n, reverse, cu_seqlens, first_token, zigzag)
    found = _exchange(comm, edges, decay, reverse)
    if inside is not None:
        found = torch.where(inside, found, 0.0)
    return _from_edges(found, xs, halves * n)


def _scans(
    comm: Communicator,
    parts: Sequence[Tensor],
    decay: Any,
    reverse: bool,
    fwd_epoch: Tensor | None = None,
    adjoint: bool = False,
) -> list[Tensor]:
    """The scans of a call: of its edges, one or those of both halves; with ``adjoint`` of the results' gradients. With
    ``reverse`` the ascending scan is that of the second halves. fwd_epoch: int64 [FWD_EPOCHS]."""
    zigzag, found, outgoing_state = len(parts) == 2, [*parts], None
    for descending in (adjoint, not adjoint) if zigzag else (reverse,):  # the scans in forward, in backward's order
        half = int(zigzag and descending != reverse)
        inputs = ScanInputs(parts[half], decay, None, outgoing_state)
        epoch = None if fwd_epoch is None else _epoch_of(fwd_epoch, descending)
        back = descending != adjoint
        found[half] = scan_once(comm, inputs, back, part=OF_HALO, fwd_epoch=epoch, adjoint=adjoint)
        if zigzag and comm.rank == comm.size - 1:  # where the first scan has ended, and the second one begins
            outgoing_state = outgoing(inputs, found[half], adjoint)
    return found


def _exchange(comm: Communicator, edges: Sequence[Tensor], decay: Any, reverse: bool) -> Tensor:
    """The n tokens for each of ``edges``, [B, n, words], or in the zigzag layout [B, 2n, words]."""
    if not wants_gradient(edges):
        return _joined(_scans(comm, edges, decay, reverse))
    found: Tensor = _Exchange.apply((comm, decay, reverse), *edges)
    return found


class _Exchange(Function):
    """``_exchange`` with a gradient. how: (comm, decay, reverse). It saves no tensor on any rank, so that activation
    checkpointing decides alike on all ranks."""

    @staticmethod
    def forward(ctx: Any, how: tuple[Communicator, Any, bool], *edges: Tensor) -> Tensor:
        comm, decay, reverse = how
        zigzag, fwd_epoch = len(edges) == 2, new_fwd_epochs(comm, FWD_EPOCHS)
        found = _joined(_scans(comm, edges, decay, reverse, fwd_epoch))
        ctx.pending = pending_backward(get_or_create_scan(comm, edges[0].shape), None if zigzag else reverse)
        ctx.call, ctx.how = (comm.handle, comm.order.stamp), (decay, reverse, fwd_epoch, zigzag)
        return found

    @staticmethod
    def backward(ctx: Any, dfound: Tensor) -> tuple[Tensor | None, ...]:
        if torch.compiler.is_compiling():  # autograd's graph: torch must not trace this backward
            return _backward_not_traced(ctx, dfound)
        (handle, stamp_of_call), (decay, reverse, fwd_epoch, zigzag) = ctx.call, ctx.how
        comm = communicator_of(handle)
        if ctx.pending is not None:
            ctx.pending.run()
        with comm.call(not (reverse or zigzag), "the backward of halo()", dfound):  # the direction of its first scan
            if torch.is_grad_enabled():
                raise second_derivative_error("halo()")
            comm.order.stamp = stamp_of_call
            return None, *_scans(comm, _halves(dfound, zigzag), decay, reverse, fwd_epoch, adjoint=True)


_backward_not_traced = dynamo_disabled(_Exchange.backward)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts], 1)


def _halves(dfound: Tensor, zigzag: bool) -> list[Tensor]:
    return [x.contiguous() for x in dfound.chunk(1 + zigzag, 1)]


def _check_halo(xs: Sequence[Tensor], comm: Communicator, options: Options) -> tuple[int, Any, int | None, int]:
    """Run all checks; return (n, cu_seqlens, first_token, the call's stamp). A first call for a shape is collective."""
    n, _, cu_seqlens, first_token, layout, per_document, tokens = options
    shape = deferred = None
    agree: Any = None
    boundaries = cu_seqlens
    try:
        for x in xs:
            check_tensor("x", x, None, None, None)
            if x.is_complex() or x.dtype in (torch.float64, torch.bool):
                raise TypeError(f"x must have an integer type or a float type of at most 32 bits, got {x.dtype}")
        n = integer("n", n)
        if not xs or min(x.ndim for x in xs) < 2:
            raise ValueError(f"x must be [B, T, ...], got {_shapes(xs)}")
        if any(0 in (x.shape[0], *x.shape[2:]) for x in xs):
            raise ValueError(f"x must have no empty dimension but T, got {_shapes(xs)}")
        if cu_seqlens is not None:
            cu_seqlens = own_boundaries(cu_seqlens)
        first_token = checked_first_token(first_token, cu_seqlens)
        B, T = xs[0].shape[:2]
        if any(x.shape[:2] != (B, T) for x in xs):
            raise ValueError(f"all tensors in x must have the same B and T, got {_shapes(xs)}")
        T = T if tokens is None else tokens
        zigzag = zigzag_of(layout, per_document, cu_seqlens)
        shape = (B, n, sum(_widths(xs)))
        options = options._replace(n=n, cu_seqlens=cu_seqlens, first_token=first_token)
        agree = options.alike(_dtypes(xs), _widths(xs))
        if zigzag:
            check_halves(T)
        for x in xs:
            if x.device != comm.device:
                raise ValueError(f"x must be on {comm.device}, got {x.device}")
        check_saveable(xs, xs)
        check_packed(comm, cu_seqlens, T, first_token, zigzag)
        if zigzag == PER_DOCUMENT:
            if B != 1:
                raise ValueError(f"packed sequences require batch size 1, got {B}")
            shape = (_groups(boundaries_on_host(cu_seqlens), n, T)[0][2], *shape[1:])
    except (TypeError, ValueError) as error:
        deferred = DeferredError(error)
    get_or_create_scan(comm, shape, agree, deferred)
    compare_values(comm, boundaries, cu_seqlens)
    return n, cu_seqlens, first_token, _stamp_of(cu_seqlens, agree)


def _stamp_of(cu_seqlens: Any, agree: tuple) -> int:
    return stamp(None if cu_seqlens is None else boundaries_on_host(cu_seqlens), *agree)


def _decay(T: int, n: int, reverse: bool) -> Any:  # float | Shift
    """Return 0 for a rank with at least n tokens, which forwards no tokens of other ranks. A rank with fewer forwards
    as many as fit beside its own: a Shift."""
    return 0.0 if T >= n else Shift(-T if reverse else T)


def _groups(lengths: Sequence[int], n: int, T: int) -> list[tuple[int, list[int], int]]:
    """Group documents by piece length. Returns (tokens of a piece, at most n; the documents with such pieces; the
    number of states sent together), equal on all ranks. Empty documents are in the group of the longest."""
    counts = tokens_of_pieces(lengths, T)
    most = min(n, max(counts))
    by_tokens: dict[int, list[int]] = {most: []}
    for i, count in enumerate(counts):
        by_tokens.setdefault(min(n, count) if count else most, []).append(i)
    return [(size, some, carried_states(1, len(some), PER_DOCUMENT)) for size, some in sorted(by_tokens.items())[::-1]]


class _Documents(Tables):
    """Tables of a call with per_document: the indices of the tokens that are sent, [2, states that are sent, n] for the
    first and for the second pieces in the order of the scans; flags of missing tokens; the place of each document's
    pieces among the states."""

    def __init__(self, groups: Any, counts: list[int], n: int, reverse: bool, device: torch.device) -> None:
        starts = [*itertools.accumulate(counts, initial=0)]  # start of each piece in x
        rows = [i for _, some, size in groups for i in (*some, *[None] * (size - len(some)))]
        order = (1, 0) if reverse else (0, 1)
        tokens = []
        for half in order:
            for i in rows:
                first, end = (0, 0) if i is None else starts[2 * i + half : 2 * i + half + 2]
                here = range(first, first + n) if reverse else range(end - n, end)
                tokens += [t if first <= t < end else None for t in here]
        at = {i: row for row, i in enumerate(rows) if i is not None}
        places = [order.index(half) * len(rows) + at[i] for i in range(len(at)) for half in range(2)]
        absent = torch.tensor([[t is None] for t in tokens], device="cpu")
        numbers = (torch.tensor(x, device="cpu") for x in ([t or 0 for t in tokens], places))
        super().__init__([absent, *numbers], device)
        self.some_absent = bool(absent.any())


def _of_documents(
    xs: Sequence[Tensor],
    n: int,
    comm: Communicator,
    reverse: bool,
    lengths: tuple[int, ...],
    first_token: int | None,
    T: int | None,
) -> tuple[Tensor, ...]:
    """Run halo() with per_document. T: the rank's number of tokens, if x has only the edges."""
    tokens, ends = xs[0].shape[1] if T is None else T, T is not None
    partition_start(comm, lengths, tokens, first_token, PER_DOCUMENT)
    N, widths = len(lengths) - 1, sum(_widths(xs))
    if not tokens:  # then no rank has tokens
        return tuple(F.pad(x, (0, 0) * (x.ndim - 2) + (0, 2 * N * n)) for x in xs)
    groups = _groups(lengths, n, tokens)

    def make() -> _Documents:
        counts = [c for c in tokens_of_pieces(lengths, tokens) for _ in range(2)]
        return _Documents(groups, [min(n, c) for c in counts] if ends else counts, n, reverse, comm.device)

    table = cached_table(comm, ("halo of documents", lengths, tokens, n, reverse, ends), make)
    absent, numbers, places = table.tensors
    (edges,) = _edges([x.index_select(1, numbers) for x in xs], len(numbers), 1, False)
    if table.some_absent:
        edges = edges.masked_fill(absent, 0.0)
    found, at = [], 0
    edges = edges.view(2, -1, n, widths)
    for size, _, states in groups:
        decay = _decay(size, n, reverse)
        pair = edges[:, at : at + states].contiguous().unbind()
        both = _exchange(comm, pair, decay, False)
        found.append(both.unflatten(1, (2, n)).transpose(0, 1))
        at += states
    together = found[0] if len(found) == 1 else torch.cat(found, 1)
    return _from_edges(together.flatten(0, 1).index_select(0, places).view(1, -1, widths), xs, 2 * N * n)


def _edges(xs: Sequence[Tensor], n: int, halves: int, reverse: bool) -> list[Tensor]:
    """Return the last n tokens of each half, with ``reverse`` the first n, as float32 [B, n, words], concatenated over
    ``xs``. Missing tokens are zeros."""
    half = xs[0].shape[1] // halves
    if half < n:
        missing = (0, 0, 0, n - half) if reverse else (0, 0, n - half, 0)
        return [F.pad(edge, missing) for edge in _edges(xs, half, halves, reverse)]
    edges = [x.unflatten(1, (halves, half)) for x in xs]
    if half > n:  # a slice of all tokens would cost a copy in backward
        edges = [x[:, :, :n] if reverse else x[:, :, half - n :] for x in edges]
    if len(xs) > 1 or xs[0].ndim != 3 or xs[0].dtype != torch.float32:
        words = [_to_words(x.reshape(*x.shape[:3], math.prod(x.shape[3:]))) for x in edges]
        edges = [torch.cat(words, -1) if len(words) > 1 else words[0]]
    return [*edges[0].unbind(1)]


def _from_edges(words: Tensor, xs: Sequence[Tensor], n: int) -> tuple[Tensor, ...]:
    """Convert words [B, n, all] to tensors [B, n, ...] like each of ``xs``."""
    if len(xs) == 1 and xs[0].ndim == 3 and xs[0].dtype == torch.float32:
        return (words,)
    if len(xs) == 1:
        parts = [_from_words(words, xs[0].dtype)]
    else:  # float32 results also need memory of their own
        split = zip(words.split(_widths(xs), -1), xs, strict=True)
        parts = [part.clone() if x.dtype == torch.float32 else _from_words(part, x.dtype) for part, x in split]
    return tuple(part.reshape(x.shape[0], n, *x.shape[2:]) for part, x in zip(parts, xs, strict=True))


def _dtypes(xs: Sequence[Tensor]) -> str:
    return ", ".join([str(x.dtype) for x in xs])


def _widths(xs: Sequence[Tensor]) -> list[int]:
    return [math.prod(x.shape[2:]) * _words(x.dtype) for x in xs]


def _inside(
    comm: Communicator, T: int, n: int, reverse: bool, cu_seqlens: Tensor | None, first_token: int | None, zigzag: int
) -> Tensor | None:
    """Return the mask of tokens beyond the shard boundary that belong to the same sequence as this rank's token there,
    [n, 1], with zigzag [2n, 1]; None without cu_seqlens. The first call with these arguments is collective."""
    if cu_seqlens is None:
        return None
    lengths, half = boundaries_on_host(cu_seqlens), T // (1 + zigzag)
    first = partition_start(comm, lengths, T, first_token, zigzag)

    def make() -> Tables:
        table = []
        for begin in [first, lengths[-1] - first - half][: 1 + zigzag]:
            end = begin + half
            here = end - 1 if reverse else begin  # the token next to the boundary; without tokens: the boundary
            pairs = ((a, b) for a, b in zip(lengths, lengths[1:]) if (a <= here < b if half else a < begin < b))
            a, b = next(pairs, (0, 0))
            table += [[a <= t < b] for t in (range(end, end + n) if reverse else range(begin - n, begin))]
        return Tables([torch.tensor(table, device="cpu")], comm.device)

    return cached_table(comm, ("halo", first, T, lengths, n, reverse, zigzag), make).tensors[0]


def _forward(
    edge: Tensor,
    T: int,
    cu_seqlens: Tensor | None,
    first_token: int | None,
    reverse: bool,
    handle: int,
    dtypes: str,
    widths: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Custom operator of halo() for torch.compile; returns (the neighbour's edge [B, n, words], forward epoch). In the
    zigzag layout edge is [2, B, n, words], and the result [B, 2n, words]."""
    comm, n, zigzag = communicator_of(handle), edge.shape[-2], edge.ndim == 4
    with comm.call(reverse, "halo()", edge):
        agree = Options(n, reverse, cu_seqlens, first_token, _LAYOUTS[zigzag]).alike(dtypes, widths)
        deferred = None
        try:
            check_packed(comm, cu_seqlens, T, checked_first_token(first_token, cu_seqlens), zigzag)
        except (TypeError, ValueError) as error:
            deferred = DeferredError(error)
        get_or_create_scan(comm, edge.shape[-3:], agree, deferred)
        comm.order.stamp = _stamp_of(cu_seqlens, agree)
        inside, decay = _inside(comm, T, n, reverse, cu_seqlens, first_token, zigzag), _decay(T >> zigzag, n, reverse)
        fwd_epoch = new_fwd_epochs(comm, FWD_EPOCHS)
        found = _joined(_scans(comm, [*edge.unbind()] if zigzag else [edge], decay, reverse, fwd_epoch))
        return found if inside is None else torch.where(inside, found, 0.0), fwd_epoch


_LAYOUTS = "contiguous", "zigzag"


def _epoch_of(fwd_epoch: Tensor, descending: bool) -> Tensor:
    """The forward epoch of the ascending or of the descending scan."""
    return fwd_epoch[2:3] if descending else fwd_epoch[:1]


def _fake(edge: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    B, n, words = edge.shape[-3:]
    return edge.new_empty(B, n * (edge.ndim - 2), words), edge.new_empty(FWD_EPOCHS, dtype=torch.int64)


def _backward(
    dfound: Tensor,
    fwd_epoch: Tensor,
    T: int,
    cu_seqlens: Tensor | None,
    first_token: int | None,
    reverse: bool,
    handle: int,
    dtypes: str,
    widths: Sequence[int],
    zigzag: bool,
) -> tuple[Tensor]:
    comm, n = communicator_of(handle), dfound.shape[1] >> zigzag
    agree = Options(n, reverse, cu_seqlens, first_token, _LAYOUTS[zigzag]).alike(dtypes, widths)
    with comm.call(not (reverse or zigzag), "the backward of halo()", dfound):
        comm.order.stamp = _stamp_of(cu_seqlens, agree)
        inside, decay = _inside(comm, T, n, reverse, cu_seqlens, first_token, zigzag), _decay(T >> zigzag, n, reverse)
        dfound = dfound if inside is None else torch.where(inside, dfound, 0.0)
        kind = torch.int64, torch.Size([FWD_EPOCHS]), comm.device
        (fwd_epoch,) = restored("halo()", ("fwd_epoch",), [fwd_epoch], [kind])
        found = _scans(comm, _halves(dfound, zigzag), decay, reverse, fwd_epoch, adjoint=True)
    return (torch.stack(found) if zigzag else found[0],)


def _fake_backward(dfound: Tensor, *rest: Any) -> tuple[Tensor]:
    B, n, words = dfound.shape
    return (dfound.new_empty((2, B, n // 2, words) if rest[-1] else dfound.shape),)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    edge, ctx.T, cu_seqlens, *ctx.where = inputs
    ctx.where.append(edge.ndim == 4)
    ctx.save_for_backward(output[1], cu_seqlens)
    ctx.mark_non_differentiable(output[1])


def _gradient(backward: Callable[..., Any], ctx: Any, dfound: Tensor, _) -> tuple[Tensor | None, ...]:
    fwd_epoch, cu_seqlens = ctx.saved_tensors
    return backward(dfound, fwd_epoch, ctx.T, cu_seqlens, *ctx.where)


_passes = Passes(_forward, _fake, _backward, _fake_backward)
_traced = CustomOperator("allscan::hop", _passes, _setup_context, _gradient)


def _words(dtype: torch.dtype) -> int:
    """Return the float32 words of an element. A word has 16 bits of an integer, because no word may be -0.0."""
    return 1 if dtype.is_floating_point else max(1, dtype.itemsize // 2)


def _to_words(x: Tensor) -> Tensor:
    """Convert [..., elements] to float32 [..., words]; integers become whole numbers below 2 ** 16."""
    if x.dtype.is_floating_point:
        return x.float()
    count, x = _words(x.dtype), x.long()  # shifts: inductor of torch 2.11 fails to view integers as shorter ones
    words = torch.stack([x >> 16 * i for i in range(count)], -1).flatten(-2) if count > 1 else x
    return (words & 0xFFFF).float()


def _from_words(words: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point:
        return words.to(dtype)
    parts = (words.int() & 0xFFFF).long().unflatten(-1, (-1, _words(dtype))).unbind(-1)  # NaN, of a time-out, becomes 0
    return functools.reduce(torch.bitwise_or, [part << 16 * i for i, part in enumerate(parts)]).to(dtype)


def _shapes(xs: Sequence[Tensor]) -> str:
    return ", ".join(str(tuple(x.shape)) for x in xs)
