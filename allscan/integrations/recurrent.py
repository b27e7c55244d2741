"""Recurrent layers of other packages over a sharded sequence, around single-device functions: delta rules, with one
call for each piece of a sequence, and short convolutions."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base.autograd import product
from ..base.checks import ScanInputs, has_tangents
from ..comm.communicator import Communicator
from ..launch.compiled_kernel import dynamo_disabled
from ..ops.allscan import allscan, final_of_all, tie_backward
from ..ops.convolution import convolution
from ..ops.halo import halo, halo_from_boundary_tokens
from ..scan.zigzag_scan import outgoing
from ..tokens.packing import Tables, TokenRange, join_document_states, split_document_states
from ..tokens.partition import cached_table
from .softmax import joined, reject


def conv_with_halo(
    conv: Callable[[Tensor], Tensor],
    n: int,
    x: Tensor,
    pieces: list[TokenRange],
    tables: dict[int, Cuts],
    *,
    comm: Communicator,
    state: Tensor | None = None,
    weights: tuple[Tensor, Tensor | None, Any] | None = None,
    **where: Any,
) -> torch.Tensor:
    """conv over x [B, T, C], with the n tokens before each shard boundary, and zeros before a sequence's first token,
    or ``state``, the n tokens [B, n, C] before a row of one sequence whose pieces have at least n tokens.

    weights: (weight [C, n + 1], bias, activation), if conv is that causal convolution: eagerly, on a row of one
    sequence, our kernels compute it instead (``ops.convolution``).

    Else a row of one sequence is concatenated with the tokens before each piece, and conv runs once.

    With packed sequences conv first runs over the whole row. The first n outputs of each piece lack the tokens before
    it: conv computes them again from 2n tokens, and they overwrite those in conv's result, in place. The backward of
    the overwritten outputs receives zeros. No other node may hold the result's gradient: it is changed in place, like
    that of ``gather_rows``. tables: those of these pieces, by n; the first call with an n adds them.
    """
    (B, T), count = x.shape[:2], len(pieces)
    if where.get("cu_seqlens") is None:
        differentiable = state is None or not x.requires_grad  # with a state the scan's result would be unused
        if weights and differentiable:
            first = None if state is None or not pieces[0].begins else state
            y = convolution(x, *weights, comm=comm, layout=where.get("layout", "contiguous"), state=first)
            if y is not None:
                return y
        if T:
            before = after_state(halo(x, n, comm=comm, **where).unflatten(1, (count, n)), state, pieces)
            y = conv(torch.cat([before, x.unflatten(1, (count, -1))], 2).flatten(0, 1))[:, n:]
            return y.unflatten(0, (-1, count)).flatten(1, 2)
    elif torch.compiler.is_compiling():
        return _not_traced(conv, n, x, pieces, tables, comm=comm, **where)
    if not T:
        before = halo(x, n, comm=comm, **where)
        return conv(torch.cat([before, x], 1))[:, before.shape[1] :]
    cuts = tables.get(n)
    if cuts is None:
        cuts = tables[n] = cached_table(comm, ("convolution", n, *pieces), lambda: Cuts(pieces, n, comm.device))
    cuts.use(comm)
    x, tokens = gather_rows(x, cuts, comm)
    ends, after = tokens.split([cuts.ends, count * n], 1)
    after = after.unflatten(1, (-1, n))
    before = halo_from_boundary_tokens(ends, T, n, comm=comm, **where).unflatten(1, (-1, n))
    if before.shape[1] < count:
        before = torch.zeros_like(after).index_copy(1, cuts.first, before)
    replacements = conv(torch.cat([before, after], 2).flatten(0, 1))[:, n:].unflatten(0, (B, -1)).flatten(1, 2)
    if len(cuts.valid) < replacements.shape[1]:  # drop outputs beyond pieces of fewer than n tokens
        replacements = replacements.index_select(1, cuts.valid)
    return _Replaced.apply(conv(x), cuts.outputs, replacements)


_not_traced = dynamo_disabled(conv_with_halo)


def after_state(before: Tensor, state: Tensor | None, pieces: list[TokenRange]) -> torch.Tensor:
    """The tokens before each piece, [B, pieces, n, C]; before the one that begins the row, ``state``."""
    if state is None or not pieces[0].begins:
        return before
    return torch.cat([state[:, None].to(before.dtype), before[:, 1:]], 1)


def gather_rows(x: Tensor, tokens: Tokens, comm: Communicator, alone: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, selected tokens of x [B, numbers, ...], with zeros for token numbers outside the row).

    The backward adds the tokens' gradient to the gradient of x, in place if no other node holds that (``alone``).
    Autograd's own indexing would allocate a full tensor of zeros and a sum.
    """
    if has_tangents((x,)):
        with comm.call(False, "halo()", (x,)):  # comm.call rejects tangents
            pass
    return _Taken.apply(x, tokens, alone)


class Tokens(Tables):
    """Tables for ``gather_rows``: token numbers in a row of T tokens, possibly outside it, and ``more`` tables."""

    def __init__(self, numbers: Sequence[int], T: int, device: torch.device, *more: Sequence[int]) -> None:
        places: dict[int, list[int]] = {}
        for place, token in enumerate(numbers):
            if 0 <= token < T:
                places.setdefault(token, []).append(place)
        depth = max(map(len, places.values()), default=0)
        lacking = [
            [places_of[i] if i < len(places_of) else len(numbers) for places_of in places.values()]
            for i in range(depth)
        ]
        tables = [min(max(token, 0), T - 1) for token in numbers], [*places], lacking, *more
        beyond = torch.tensor([[not 0 <= token < T] for token in numbers], device="cpu")
        super().__init__([beyond, *(torch.tensor(x, dtype=torch.int64, device="cpu") for x in tables)], device)
        self.beyond, self.numbers, self.distinct, self.places, *self.more = self.tensors
        self.inside = len(places) == len(numbers) or not beyond.any()


class Cuts(Tokens):
    """Token numbers for ``conv_with_halo``: the last n tokens of each half; n tokens from the start of each piece."""

    def __init__(self, pieces: list[TokenRange], n: int, device: torch.device) -> None:
        starts, halves = [*itertools.accumulate((p.tokens for p in pieces), initial=0)], _halves(pieces)
        spans = [(starts[some[0]], starts[some[-1] + 1]) for some in halves]
        ends = [token for start, end in spans for token in range(max(start, end - n), end)]
        after = [token for start in starts[:-1] for token in range(start, start + n)]
        places = [(i * n + j, starts[i] + j) for i, piece in enumerate(pieces) for j in range(min(n, piece.tokens))]
        more = [some[0] for some in halves], [at for at, _ in places], [token for _, token in places]
        super().__init__([*ends, *after], starts[-1], device, *more)
        self.first, self.valid, self.outputs = self.more
        self.ends = len(ends)


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tokens, alone: bool) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.tokens, ctx.alone = tokens, alone
        found = x.index_select(1, tokens.numbers)
        if not tokens.inside:
            found.masked_fill_(tokens.beyond.view(-1, *(1,) * (x.ndim - 2)), 0)
        return x.detach(), found  # shares x's memory, but is no autograd view: those reject in-place writes

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dtokens: Tensor) -> tuple[torch.Tensor, None, None]:
        # each token once, in a fixed order: atomic additions to one address are not deterministic
        places = ctx.tokens.places
        padded = F.pad(dtokens, (0, 0) * (dtokens.ndim - 2) + (0, 1))
        sums = padded.index_select(1, places.flatten()).unflatten(1, places.shape).sum(1)
        alone = ctx.alone and not torch.is_grad_enabled() and 0 not in dx.stride()
        add = dx.index_add_ if alone else dx.index_add
        return add(1, ctx.tokens.distinct, sums.to(dx.dtype)), None, None


class _Replaced(torch.autograd.Function):
    """Write ``replacements`` into y at the indices ``outputs``, in place.

    The backward sets the gradient of y to zero there, in place: a difference to the gradient of the overwritten values
    would leave their rounding errors, which can exceed the gradients of the replacements.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, outputs: Tensor, replacements: Tensor) -> torch.Tensor:
        ctx.outputs = outputs
        if _is_saved(y):
            y = y.clone()
        y.index_copy_(1, outputs, replacements)
        return y.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[torch.Tensor, None, torch.Tensor]:
        dreplacements = dy.index_select(1, ctx.outputs)
        alone = not torch.is_grad_enabled() and 0 not in dy.stride()
        return (dy.index_fill_ if alone else dy.index_fill)(1, ctx.outputs, 0), None, dreplacements


_VIEWS = ("Transpose", "Slice", "View", "UnsafeView", "Permute", "Squeeze", "Unsqueeze", "Alias", "Unflatten")


def _is_saved(y: Tensor) -> bool:
    """Whether the node that computed y has saved its result for backward (as relu does), not its argument."""
    node = y.grad_fn
    while node is not None and type(node).__name__.partition("Backward")[0] in _VIEWS:
        node = node.next_functions[0][0]
    return hasattr(type(node), "_saved_result")


@functools.cache
def names_of(function: Callable[..., Any]) -> frozenset[str]:
    """The names of the function's arguments."""
    return frozenset(inspect.signature(function).parameters)


def run_delta_rule(
    operator: Callable[..., Any] | None,
    function: Callable[..., Any],
    tensors: Sequence[Any],
    pieces: list[TokenRange],
    where: Mapping[str, Any],
    *,
    final: bool = False,
    initial: Tensor | None = None,
    supported: frozenset[str] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated DeltaNet or KDA over the ranks, for every model: see ``delta_rule``.

    operator: zeco_kda or zeco_gated_delta_rule, if it computes the same as ``function``; it gets the ``options`` that
        it knows (``supported`` has their names), and ``where`` this rank's tokens lie. None: ``function`` runs over
        each piece.
    """
    initial = None if initial is None else initial.float()
    if operator is None:
        function = functools.partial(function, **options)
        return delta_rule(function, tensors, pieces, comm=where["comm"], final=final, initial=initial)
    supported = names_of(operator) if supported is None else supported
    known = {name: x for name, x in options.items() if name in supported}
    if initial is not None:
        known["initial_state"] = initial
    return operator(*tensors, output_final_state="all" if final else False, **known | dict(where))


def delta_rule(
    operator: Callable,
    tensors: Sequence[Any],
    pieces: list[TokenRange],
    *,
    comm: Communicator,
    final: bool = False,
    initial: Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated DeltaNet or KDA over the ranks: (o, with ``final`` the final state of the row on every rank, else None).

    For sharded documents (per_document=True) one ascending and one descending scan send all states, and there is no
    final state. tensors: q, k, v, g, beta. initial: the state before a row of one sequence. operator: is called for
    each piece with fla's signature, with initial_state and output_final_state. Outputs and last states are jointly
    linear in values and initial states: K columns of zeros behind the values, with the unit matrix as their initial
    state, yield the dependence on the initial state.
    """
    if has_tangents(tensors):
        with comm.call(False, "a delta rule", tensors):  # comm.call rejects tangents
            pass
    if comm.invariant:
        name = getattr(getattr(operator, "func", operator), "__name__", "a function of its own")
        reject(
            comm,
            f"invariant={comm.invariant} of the communicator is of zeco_kda and zeco_gated_delta_rule: neither takes "
            f"the place of {name}, whose results depend on where the ranks cut the sequence",
        )
    q, k, v, g, beta = (t.resolve_neg() for t in tensors)  # kernels ignore the negative bit
    (batch, _, HV, V), K, halves = v.shape, k.shape[-1], _halves(pieces)
    zeros = torch.zeros(batch, HV, K, V + K, dtype=torch.float32, device=v.device)
    identity = torch.eye(K, dtype=torch.float32, device=v.device)
    unit = torch.cat([zeros[..., :V], identity.expand(batch, HV, K, K)], -1)
    wide = [i in (some[0] for some in halves) and not piece.begins for i, piece in enumerate(pieces)]
    outputs, states, sizes = [], [], [piece.tokens for piece in pieces]
    start = initial if pieces[0].begins else None  # of the first piece
    for more, *of_piece in zip(wide, *(t.split(sizes, 1) for t in (q, k, v, g, beta)), strict=True):
        q, k, v, g, beta = of_piece
        v = F.pad(v, (0, K)) if more else v
        if v.shape[1]:
            before = unit if more else start
            o, state = operator(q, k, v, g=g, beta=beta, initial_state=before, output_final_state=True)
        else:  # the incoming state passes through, with a gradient as on the other ranks
            state = unit if more else zeros[..., :V] if start is None else start
            o, state = v, state + sum(t.sum() for t in of_piece)
        start = None
        outputs.append(o)
        states.append(state.float())
    documents = len(halves) // 2 if len(halves) > 2 else 0  # sharded documents: one scan sends all their states
    left = [states[some[-1]][..., :V] for some in halves]
    passes = [len(some) == 1 and wide[some[0]] for some in halves]  # the end of a sequence stops the incoming state
    through = [(states[some[0]] if p else zeros)[..., V:] for some, p in zip(halves, passes, strict=True)]
    prevs: Any
    if documents:
        states, dense = ([join_document_states(some[half::2]) for half in range(2)] for some in (left, through))
        found = allscan(tuple(states), comm=comm, transition=tuple(dense), layout="zigzag")
        prevs = split_document_states(found, documents)
    elif len(halves) > 1:
        prevs = allscan(tuple(left), comm=comm, transition=tuple(through), layout="zigzag")
    else:
        prevs = (allscan(left[0], comm=comm, transition=through[0]),)
    for some, prev in zip(halves, prevs, strict=True):
        o = outputs[some[0]]
        if wide[some[0]]:
            added = product(o[..., V:].float().transpose(1, 2), prev).transpose(1, 2)
            outputs[some[0]] = (o[..., :V].float() + added).to(o.dtype)
    o = tie_backward(comm, joined(outputs, 1), *(found if documents else prevs))
    if not final:
        return o, None
    if comm.rank == (0 if len(halves) > 1 else comm.size - 1):
        state = outgoing(ScanInputs(left[-1], None, through[-1]), prevs[-1])
    else:
        state = torch.zeros_like(left[-1])
    return final_of_all(o, tie_backward(comm, state, *prevs), comm, False, len(halves) > 1)


@torch.no_grad()
def of_last_tokens(states: Any, comm: Communicator, zigzag: bool) -> tuple[torch.Tensor, ...]:
    """Broadcast convolution states [B, C, W] from the rank with the last tokens of the row."""
    together = torch.cat([x.float() for x in states], 1)
    if comm.rank != (0 if zigzag else comm.size - 1):
        together = torch.zeros_like(together)
    found = final_of_all(together, together, comm, False, zigzag)[1].split([x.shape[1] for x in states], 1)
    return tuple(y.to(x.dtype).contiguous() for x, y in zip(states, found, strict=True))


def _halves(pieces: Any) -> list[list[int]]:
    """Indices of the pieces of each half, of each document in turn if those are sharded; one list of all pieces in the
    contiguous layout."""
    places = itertools.product(range(pieces[-1].entry + 1), range(pieces[-1].half + 1))
    found: dict[tuple[int, ...], list[int]] = {place: [] for place in places}
    for i, piece in enumerate(pieces):
        found[piece.entry, piece.half].append(i)
    return [*found.values()]
