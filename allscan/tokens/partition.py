"""The partition of packed sequences over the ranks, agreed upon by all of them; cached tables of each rank's part."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch

from ..base.checks import PER_DOCUMENT, boundaries, cu_seqlens_error
from ..base.tiling import cdiv
from ..bindings.torch_compat import without_dispatch_modes
from ..comm.communicator import Communicator
from ..comm.heap import outside_inference_mode
from ..comm.host_exchange import by_rank
from .packing import (
    CHUNK_TOKENS,
    CUTS,
    GRID_LIMIT,
    AlignedLayout,
    CapacityLayout,
    DeviceBoundaries,
    Layout,
    Tables,
    batch_pieces,
    boundaries_on_host,
    carried_states,
)

CACHE_SIZE = 256  # tables that a communicator keeps
NOT_IN_CAPTURE = "a first call with these lengths cannot be captured: call once before the capture"

Tables_ = TypeVar("Tables_", bound=Tables)


def cached_table(comm: Communicator, key: Hashable, make: Callable[[], Tables_]) -> Tables_:
    """The tables for ``key``, for reads on the current stream. The first call for ``key`` computes them by ``make()``,
    which communicates with no other rank.

    The communicator caches CACHE_SIZE of them, and evicts none whose addresses a CUDA graph holds.
    """
    known = comm.tables
    tables = known.pop(key, None)
    if tables is None:
        if comm.streams.capturing():
            raise RuntimeError(NOT_IN_CAPTURE)
        with without_dispatch_modes():
            tables = outside_inference_mode(make)()
        if len(known) >= CACHE_SIZE:
            oldest = next((k for k, x in known.items() if not x.held), None)
            known.pop(oldest, None)
    known[key] = tables  # the newest is last
    tables.use(comm)
    return tables


def partition_start(
    comm: Communicator, lengths: tuple[int, ...], T: int, first_token: int | None = None, zigzag: int = False
) -> int:
    """The position of this rank's first token in the global sequence. Every call with cu_seqlens calls this, on all
    ranks alike. The first call with these ``lengths`` is collective; all ranks cache the partition that it finds. If
    the caller passes ``first_token``, ranks communicate in debug mode only.

    Raises:
        ValueError: on all ranks, if ``lengths`` are invalid or differ; on one rank only, if its T differs from the
            first call's, because the others cannot see that; with ``first_token``, on each rank that sees it is wrong.
        RuntimeError: for a first call in a CUDA graph's capture.
    """
    halves = 2 if zigzag else 1  # the first half of each rank's tokens fills the first half of the row
    if first_token is not None:
        begin, end = first_token, first_token + T // halves
        _check_place(comm, lengths, begin, end, halves)
        if comm.debug:
            places = comm.order.exchange((lengths, begin, end), "first_token, in debug mode")
            if any(here[0] != lengths for here in places) or any(a[2] != b[1] for a, b in zip(places, places[1:])):
                found = by_rank(f"tokens {a} .. {b - 1} of {c}" for c, a, b in places)
                raise comm.order.raised_everywhere(
                    ValueError(f"the ranks' tokens are not contiguous in the row: {found}")
                )
        tokens, first = [T], first_token
    else:
        tokens = partition(comm, lengths, T)
        first = sum(tokens[: comm.rank]) // halves
    if zigzag == PER_DOCUMENT:
        _check_documents(comm, lengths, tokens, first_token)
    return first


def partition(comm: Communicator, lengths: tuple[int, ...], T: int) -> list[int]:
    """The number of tokens of every rank; see ``partition_start``."""
    partitions = comm.agreed.partitions
    tokens = partitions.get(lengths)
    if tokens is not None:
        if tokens[comm.rank] != T:
            raise ValueError(
                f"these cu_seqlens were first used with {tokens[comm.rank]} tokens on this rank, now with {T}: pass "
                "first_token= on all ranks to change the partition, or use another communicator"
            )
        return tokens
    if comm.streams.capturing():
        raise RuntimeError(NOT_IN_CAPTURE)
    answers = comm.order.exchange((lengths, T), "the first call with these cu_seqlens")
    _check_alike(comm, [answer[0] for answer in answers])
    tokens = [answer[1] for answer in answers]
    problem = cu_seqlens_error(lengths, sum(tokens))
    if problem:
        raise comm.order.raised_everywhere(ValueError(f"{problem}; tokens: {by_rank(tokens)}"))
    partitions.remember(lengths, tokens)
    return tokens


def _check_alike(comm: Communicator, lengths: list[tuple[int, ...]]) -> None:
    """Raise ValueError on every rank unless all have the same ``lengths``."""
    if any(of_a_rank != lengths[0] for of_a_rank in lengths):
        problem = f"cu_seqlens differs between ranks: {by_rank(lengths)}"
        raise comm.order.raised_everywhere(ValueError(problem))


def compare_values(comm: Communicator, argument: object, read: Any) -> None:
    """In debug mode, at each call with packed sequences whose cu_seqlens the host reads: raise ValueError on every rank
    if the values of ``argument``, a cu_seqlens, are no longer the values ``read`` from it earlier on some rank, or if
    they differ between ranks."""
    if not isinstance(read, torch.Tensor) or not comm.debug or torch.compiler.is_compiling():
        return
    lengths, now = (tuple(boundaries(x).tolist()) for x in (read, argument))
    answers = comm.order.exchange((lengths, now), "the values of cu_seqlens, in debug mode")
    if any(x[0] != x[1] for x in answers):
        found = by_rank("ok" if x[0] == x[1] else f"{tuple(x[0])}, now {tuple(x[1])}" for x in answers)
        problem = f"cu_seqlens was written to in a way that torch does not count, so it is not read again: {found}"
        raise comm.order.raised_everywhere(ValueError(problem))
    _check_alike(comm, [x[0] for x in answers])


def check_packed(comm: Communicator, cu_seqlens: Any, T: int, first_token: int | None, zigzag: int = False) -> None:
    """Raise TypeError or ValueError if this rank alone can see that the packed sequences are invalid. A first call
    checks this before it communicates with the other ranks; in later calls partition_start raises."""
    if not isinstance(cu_seqlens, torch.Tensor):  # none, or DeviceBoundaries, which a kernel checks
        return
    try:
        lengths = boundaries_on_host(cu_seqlens)
    except RuntimeError as error:  # raised by a tensor subclass without values
        raise TypeError(f"cu_seqlens cannot be read: {error}") from error
    if zigzag == PER_DOCUMENT and not cu_seqlens_error(lengths, None):
        _check_documents(comm, lengths, [T], first_token)
    if first_token is not None:
        halves = 1 + bool(zigzag)
        _check_place(comm, lengths, first_token, first_token + T // halves, halves)


def _check_documents(comm: Communicator, lengths: tuple[int, ...], tokens: list[int], first: int | None) -> None:
    """Raise ValueError if a sequence's length is no multiple of 2P, if a rank has not 1/P of all tokens, or if
    ``first``, the caller's first_token or None, is not the right one."""
    problem, share = cu_seqlens_error(lengths, None, 2 * comm.size), lengths[-1] // comm.size
    if problem:
        raise ValueError(problem)
    if any(T != share for T in tokens):
        raise ValueError(
            f"with per_document=True each rank must have {share} of {lengths[-1]} tokens, got {by_rank(tokens)}"
        )
    if first is not None and first != comm.rank * share // 2:
        place = f"with per_document=True first_token of rank {comm.rank} must be {comm.rank * share // 2}"
        raise ValueError(f"{place}, half of the tokens of the ranks before it, got {first}")


def _check_place(comm: Communicator, lengths: tuple[int, ...], begin: int, end: int, halves: int) -> None:
    """Raise ValueError if begin .. end - 1 cannot be the tokens of this rank, as far as it sees alone."""
    if problem := cu_seqlens_error(lengths, None):
        raise ValueError(problem)
    inside = 0 <= begin <= end <= lengths[-1] / halves
    first, last = comm.rank == 0, comm.rank == comm.size - 1
    if not inside or (first and begin != 0) or (last and end != lengths[-1] / halves):
        bounds = f"{'0 =' if first else '0 <='} first_token, first_token + T{' / 2' * (halves - 1)} "
        bounds += f"{'=' if last else '<='} {lengths[-1] // halves}"
        place = f"those of rank {comm.rank} of {comm.size} in {lengths[-1]} tokens"
        got = f"{begin} and {halves * (end - begin)}"
        raise ValueError(f"first_token and T must be {place}: {bounds}; got {got}")


class OwnTokens(NamedTuple):
    """The tokens of this rank: B * T. first_token: position of the first one in the row of packed sequences, if the
    caller passes it. zigzag: see checks.zigzag_of."""

    B: int
    T: int
    cu_seqlens: torch.Tensor | DeviceBoundaries | None = None
    first_token: int | None = None
    zigzag: int = 0


def find_layout(comm: Communicator, own: OwnTokens, segment: int, fla: bool = False, aligned: bool = False) -> Layout:
    """The cached layout of this rank's tokens, for reads on the current stream. In the zigzag layout each half of a
    batch entry's (or of a document's) tokens has a state. ``fla``: with the tables of packed sequences for fla's
    functions. ``aligned``: segments of packed sequences are cut at multiples of ``segment`` in the row; this rank's
    tokens begin at such a multiple.

    Raises the errors of partition_start, and ValueError if a rank has more chunks than kernels take: without
    first_token on every rank, with it on that rank only.
    """
    B, T, cu_seqlens, first_token, zigzag = own
    if isinstance(cu_seqlens, DeviceBoundaries):
        N = len(cu_seqlens.boundaries) - 1
        return cached_table(comm, ("capacity", N, T, segment), lambda: CapacityLayout(comm, N, T, segment))
    lengths = None if cu_seqlens is None else boundaries_on_host(cu_seqlens)
    first = 0 if lengths is None else partition_start(comm, lengths, T, first_token, zigzag)

    def make() -> Layout:
        if lengths is not None:
            pieces = CUTS[zigzag](lengths, first, T, comm.rank == 0)
            tokens = {comm.rank: T} if first_token is not None else dict(enumerate(partition(comm, lengths, T)))
            _check_chunks(lengths, first, tokens, zigzag, aligned)
        else:
            pieces = batch_pieces(B, T, zigzag, comm.rank == 0, comm.rank == (0 if zigzag else comm.size - 1))
        states = carried_states(B, B if lengths is None else len(lengths) - 1, zigzag)
        cls = AlignedLayout if aligned and lengths is not None else Layout
        halves = 2 if zigzag else 1
        layout = cls(pieces, halves * states, segment, comm.device, fla=fla, halves=halves)
        layout.alike = lengths, zigzag, segment if aligned else 0
        if layout.num_chunks > GRID_LIMIT:  # possible if a segment does not begin with a sequence
            raise ValueError(
                f"a rank may have at most {GRID_LIMIT:,} chunks of packed sequences, got {layout.num_chunks:,}"
            )
        return layout

    return cached_table(comm, (B, T, first, lengths, segment, zigzag, fla, aligned), make)


def _check_chunks(
    lengths: tuple[int, ...], first: int, tokens: dict[int, int], zigzag: int, aligned: bool = False
) -> None:
    """Raise ValueError if a rank has more chunks of packed sequences than kernels take; an empty sequence counts as one
    chunk. tokens: numbers of tokens, in order, of the ranks for which this rank knows them; ``first``: this rank's
    first token. A segment that is ``aligned`` may begin inside a chunk of its sequence, which adds one chunk."""
    pieces_of_one = 1 + (zigzag == PER_DOCUMENT) + aligned
    if max(tokens.values()) // CHUNK_TOKENS + len(lengths) * pieces_of_one + 1 <= GRID_LIMIT:
        return
    found = {}
    begin = first if len(tokens) == 1 else 0
    for rank, T in tokens.items():
        pieces = CUTS[zigzag](lengths, begin, T, rank == 0)
        found[rank] = sum(max(1, cdiv(piece.end - piece.start, CHUNK_TOKENS)) + aligned for piece in pieces)
        begin += T // (1 + bool(zigzag))
    if max(found.values()) > GRID_LIMIT:
        most = ", ".join(f"rank {rank} {number:,}" for rank, number in found.items() if number > GRID_LIMIT)
        raise ValueError(f"a rank may have at most {GRID_LIMIT:,} chunks of packed sequences: {most}")
