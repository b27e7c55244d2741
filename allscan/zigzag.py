"""Conversion between the contiguous layout (rank order is time order) and the zigzag layout of causal softmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .base.autograd import CustomOperator, Passes
from .base.checks import boundaries, cu_seqlens_error
from .base.errors import REMEDY, DeferredError
from .bindings.torch_compat import num_dispatch_modes, recorded
from .comm.backwards import saved_tensors
from .comm.communicator import Communicator, check_communicator, communicator_of
from .comm.process_groups import NEW_GROUP, check_group, collective
from .tokens.packing import boundaries_on_host, document_places


def to_zigzag(x: Tensor, *, comm: Communicator) -> Tensor:
    """Redistribute tokens into the zigzag layout, so that a causal softmax layer has equal work on all ranks.
    Differentiable.

    The global sequence is cut into 2P pieces of equal length. Rank p has pieces 2p and 2p + 1 in the input, and pieces
    p and 2P - 1 - p in the result. Ring attention and torch's context_parallel balance their load in the same way.

    Args:
        x: [B, T, ...], this rank's T tokens; T is even. Shape and dtype must be equal on every rank: the first call
            with them compares them on the host, on CPU ranks every call does. On GPUs a later call with other known
            ones, or with the inverse function, on some ranks gives wrong results or waits for NCCL's timeout; the next
            barrier(), close() or first call raises AllScanOutOfStep. If other ranks do not make the same call, the
            comparison fails after ``timeout`` + 5 s. Ranks that already wait in the all-to-all fail after the
            communicator's timeout on CPUs, and after the process group's NCCL timeout on GPUs.
        comm: the communicator.

    Returns:
        [B, T, ...], a new tensor, on one rank too. Communication is one all-to-all of the process group's back end;
        each rank sends at most its own tokens once.

    Raises:
        TypeError: for an argument of another type.
        ValueError: for an odd T, fewer than two dimensions, another device, or arguments that differ between ranks.
        RuntimeError: and the communicator's other errors, as ``allscan.allscan`` raises them. After a wait that has
            failed, on every rank after ``resync`` or with a new communicator of the same process group: an all-to-all
            that was abandoned would receive these tokens.

    Example:
        >>> halves = allscan.zigzag.to_zigzag(x, comm=comm)                       # [B, T, ...], chunks r and 2P - 1 - r
    """
    return _move(x, comm, True)


def from_zigzag(x: Tensor, *, comm: Communicator) -> Tensor:
    """Redistribute tokens from the zigzag layout into rank order, the inverse of ``to_zigzag``. Differentiable.

    Args:
        x: [B, T, ...], as ``to_zigzag`` returns it.
        comm: the communicator.

    Returns:
        [B, T, ...], a new tensor: this rank's consecutive tokens.

    Raises:
        ValueError: and the other errors of ``to_zigzag``.

    Example:
        >>> x = allscan.zigzag.from_zigzag(halves, comm=comm)                     # consecutive tokens again
    """
    return _move(x, comm, False)


def zigzag_positions(
    T: int, *, comm: Communicator, cu_seqlens: Tensor | Sequence[int] | None = None, per_document: bool = False
) -> Tensor:
    """The positions of this rank's tokens in the global row in the zigzag layout.

    Args:
        T: number of tokens of each rank.
        comm: the communicator.
        cu_seqlens: [N + 1] from 0 to P T, the boundaries of packed sequences in the global row. The host waits for a
            tensor on a GPU.
        per_document: False: the row is cut into 2P chunks, independent of the boundaries. True, with cu_seqlens: each
            sequence, whose length is a multiple of 2P, is cut into 2P chunks. Rank r has chunks r and 2P - 1 - r of
            each sequence, one sequence after the other, as in Megatron-core, Transformer Engine and torch's context
            parallelism. Operators and models expect this layout with per_document=True.

    Returns:
        [T] int64. This rank's part of a tensor x [B, P T, ...] of the global row, such as position_ids, is
        ``x[:, places]``.

    Raises:
        TypeError: for an argument of another type.
        ValueError: for an odd T, and for cu_seqlens that do not match it.

    Example:
        >>> places = allscan.zigzag.zigzag_positions(T, comm=comm)
        >>> mine, position_ids = row[:, places], places[None]                     # row: [B, P T], alike on all ranks
    """
    zigzag_first_token(T, comm=comm)  # raises TypeError or ValueError
    if per_document and cu_seqlens is None:
        raise ValueError("per_document=True needs cu_seqlens")
    lengths = [0, comm.size * T] if cu_seqlens is None else [*boundaries_on_host(boundaries(cu_seqlens))]
    problem = cu_seqlens_error(lengths, comm.size * T, 2 * comm.size if per_document else 1)
    if problem:
        raise ValueError(problem)
    cuts = lengths if per_document else [0, lengths[-1]]
    places = document_places(cuts, comm.rank, comm.size)
    return torch.cat([torch.arange(*place, device=comm.device) for place in places])


def zigzag_first_token(T: int, *, comm: Communicator) -> int:
    """The operators' argument ``first_token`` for packed sequences in the zigzag layout, for either per_document.

    Args:
        T: number of tokens of each rank.
        comm: the communicator.

    Returns:
        r T / 2, the number of tokens in the first halves of the ranks before rank r. With per_document=False this
        rank's first half begins at this position of the row.

    Raises:
        TypeError: for an argument of another type.
        ValueError: for an odd T.

    Example:
        >>> first = allscan.zigzag.zigzag_first_token(T, comm=comm)
        >>> o, _ = allscan.zeco_gla(q, k, v, g, comm=comm, layout="zigzag", cu_seqlens=cu_seqlens, first_token=first)
    """
    check_communicator(comm)
    if T % 2 or T < 0:
        raise ValueError(f"T must be even, got {T}")
    return comm.rank * T // 2


def _pieces(rank: int, size: int, zigzag: bool) -> tuple[int, int]:
    return (rank, 2 * size - 1 - rank) if zigzag else (2 * rank, 2 * rank + 1)


def _move(x: Tensor, comm: Communicator, to: bool) -> Tensor:
    check_communicator(comm)
    if torch.compiler.is_compiling() or (num_dispatch_modes() and recorded()):
        return _traced.forward(x, to, comm.handle)[0]
    with comm.call(False, "to_zigzag()" if to else "from_zigzag()", (x,)):
        _check(x, comm, to)
        return _Move.apply(x, comm, to)


def _check(x: Tensor, comm: Communicator, to: bool) -> None:
    """Raise TypeError or ValueError for an invalid ``x``. A first call with its signature raises on every rank."""
    check_group(comm.group)
    known, before = comm.agreed.arguments, comm.order.all_to_all_hash
    signature = "to_zigzag", (to, x.shape, x.dtype, x.device, x.layout) if isinstance(x, Tensor) else None
    first = comm.debug or signature not in known
    if first:
        problem = fields = None
        try:
            if not isinstance(x, Tensor) or x.layout != torch.strided:
                raise TypeError(f"x must be a dense tensor, got {getattr(x, 'layout', type(x).__name__)}")
            if x.ndim < 2 or x.shape[1] % 2:
                raise ValueError(f"x must be [B, T, ...] with an even number of tokens, got {tuple(x.shape)}")
            if x.device != comm.device:
                raise ValueError(f"x must be on {comm.device}, got {x.device}")
            fields = _fields(x, to)
        except (TypeError, ValueError) as error:
            problem = DeferredError(error)
        if problem is not None and "to_zigzag" in known and not comm.debug:
            raise problem.take()
        comm.order.agree(fields, problem, "the first call for a shape")
        known.remember(signature)
        known.remember("to_zigzag")
    comm.order.add_all_to_all(to, tuple(x.shape), str(x.dtype))
    if not first and comm.size > 1 and not x.is_cuda:
        _compare(x, comm, to, before)


def _fields(x: Tensor, to: bool) -> tuple[tuple[str, object], ...]:
    """(name, value) pairs that are equal on all ranks."""
    return ("call", "to_zigzag" if to else "from_zigzag"), ("shape", tuple(x.shape)), ("dtype", str(x.dtype))


def _compare(x: Tensor, comm: Communicator, to: bool, before: int) -> None:
    """Raise on every CPU rank unless all ranks have made the same calls so far, including this one.

    gloo would end the process of a rank that receives more bytes than it expects. ``before``: the hash of the calls
    before this one.
    """
    mine, ones = torch.full((comm.size,), comm.order.all_to_all_hash, device="cpu"), [1] * comm.size
    others = torch.empty_like(mine)
    _all_to_all(others, mine, ones, ones, comm)
    if not torch.equal(others, mine):
        comm.order.all_to_all_hash = before  # no rank makes this call
        comm.order.agree(_fields(x, to), None, "the comparison of different calls of to_zigzag() or from_zigzag()")


def _all_to_all(received: Tensor, send: Tensor, come: list[int], leave: list[int], comm: Communicator) -> None:
    """The all-to-all of the process group. On CPUs a rank waits for others at most the communicator's timeout."""
    with collective(comm.group, waits=False):
        work = dist.all_to_all_single(received, send, come, leave, group=comm.group, async_op=True)
    try:
        with collective(comm.group):
            if send.is_cuda:
                work.wait()  # the current stream waits, not the host
            else:
                work.wait(timedelta(seconds=comm.timeout))
    except RuntimeError as error:
        if send.is_cuda:
            raise
        raise comm.order.desynchronized(
            f"to_zigzag has waited {comm.timeout:g} s for other ranks ({error}): one is late, has ended or makes other "
            f"calls. {comm.order.rejections_of_others()}{REMEDY}. {NEW_GROUP}."
        ) from error


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, to: bool) -> Tensor:
        ctx.handle, ctx.to = comm.handle, to  # the autograd graph must not keep the communicator alive
        ctx.save_for_backward(comm.placeholder)  # so that activation checkpointing recomputes here, on every rank
        return _moved(x, comm, to)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        comm = communicator_of(ctx.handle)
        saved_tensors(ctx, lambda: comm, True)
        with comm.call(True, "the backward of to_zigzag()", (dx,)):
            _check(dx, comm, not ctx.to)
            return _Move.apply(dx, comm, not ctx.to), None, None


def _moved(x: Tensor, comm: Communicator, to: bool) -> Tensor:
    size, rank = comm.size, comm.rank
    if size == 1:
        return x.clone(memory_format=torch.contiguous_format)
    owner = {piece: r for r in range(size) for piece in _pieces(r, size, to)}
    source = {piece: r for r in range(size) for piece in _pieces(r, size, not to)}
    have, wanted = _pieces(rank, size, not to), _pieces(rank, size, to)
    # sender and receiver order pieces by the other's rank, then by piece
    leaving = sorted(range(2), key=lambda i: (owner[have[i]], have[i]))
    coming = sorted(range(2), key=lambda i: (source[wanted[i]], wanted[i]))
    halves = x.unflatten(1, (2, -1)).movedim(1, 0)  # [2, B, T / 2, ...]
    send = torch.stack([halves[i] for i in leaving])
    received = torch.empty_like(send)
    splits = [[table[piece] for piece in some] for table, some in ((source, wanted), (owner, have))]
    come, leave = ([ranks.count(r) for r in range(size)] for ranks in splits)
    _all_to_all(received.view(torch.uint8), send.view(torch.uint8), come, leave, comm)  # of any dtype
    return torch.cat([received[coming.index(i)] for i in range(2)], 1)


# The custom operator, which torch.compile traces


def _forward(x: Tensor, to: bool, handle: int) -> tuple[Tensor]:
    comm = communicator_of(handle)
    with comm.call(False, "to_zigzag()", (x,)):
        _check(x, comm, to)
        return (_moved(x, comm, to),)


def _fake(x: Tensor, to: bool, handle: int) -> tuple[Tensor]:
    return (x.new_empty(x.shape),)


def _backward(dx: Tensor, to: bool, handle: int) -> tuple[Tensor]:
    comm = communicator_of(handle)
    with comm.call(True, "the backward of to_zigzag()", (dx,)):
        _check(dx, comm, not to)
        return (_moved(dx, comm, not to),)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    _, *ctx.where = inputs


def _gradient(backward: Callable[..., Any], ctx: Any, dx: Tensor) -> tuple[Tensor]:
    return (backward(dx, *ctx.where)[0],)


_passes = Passes(_forward, _fake, _backward, _fake)
_traced = CustomOperator("allscan::to_zigzag", _passes, _setup_context, _gradient)
