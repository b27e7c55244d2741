"""How the tokens of this rank divide into sequences, segments and chunks: tables for the kernels, once a layout."""

from __future__ import annotations

import functools
import weakref
from typing import NamedTuple

import torch

from .communicator import Communicator, by_rank
from .shmem_kernels.gla_blocks import FIRST, LAST

KEPT = 256  # layouts, and splits, that a communicator keeps
NOT_IN_CAPTURE = "a first call with these lengths cannot be captured: call once before the capture"
CHUNK = 64  # tokens of a chunk, BT


class Piece(NamedTuple):
    """What this rank has of one sequence."""

    start: int  # tokens start .. end - 1 of this rank's B * T
    end: int
    slot: int  # which of the travelling states is its own: the batch entry, 0 for packed sequences
    sequence: int  # row of initial_state and final_state
    flags: int  # FIRST: the sequence begins here; LAST: it ends here


class Layout:
    """Tables of pieces, cut into segments of ``segment`` tokens and chunks of BT tokens."""

    def __init__(self, pieces: list[Piece], slots: int, segment: int, device, BT: int = CHUNK):
        segments, chunks, begins = [], [], []
        for piece in pieces:
            while len(begins) <= piece.slot:
                begins.append(len(segments))
            starts = range(piece.start, piece.end, segment) or [piece.start]  # an empty sequence has an empty segment
            for start in starts:
                end = min(start + segment, piece.end)
                first, last = start == piece.start, end == piece.end
                flags = (FIRST.value * first | LAST.value * last) & piece.flags
                segments.append((start, end, len(chunks), piece.slot, piece.sequence, flags))
                chunks += [(c, min(c + BT, end)) for c in range(start, end, BT)]
        begins += [len(segments)] * (slots + 1 - len(begins))
        self.num_segments, self.num_chunks = len(segments), len(chunks)
        self.segments, self.chunks, self.slots = (
            torch.tensor(table, dtype=torch.int32).to(device) for table in (segments, chunks, begins)
        )
        distance = torch.arange(BT)[:, None] - torch.arange(BT)  # what gla_blocks.load_weights takes
        weights = torch.where(distance >= 0, 0.5, -0.5), distance <= 0, distance > 0
        self.weights = torch.stack([w.to(torch.bfloat16) for w in weights]).to(device)


def segment_length(tokens: int, H: int, cuda: bool) -> int:
    """Tokens of a segment, some chunks: long, for few states to be carried, yet enough segments to fill a GPU."""
    if not cuda:
        return 2 * CHUNK
    length = 1024
    while length > 4 * CHUNK and tokens * H // length < 128:
        length //= 2
    return length


def most_segments(B: int, T: int, sequences: int, segment: int) -> int:
    """An upper bound of the number of segments that does not depend on where packed sequences begin."""
    return B * (T // segment) + sequences


def find_layout(comm: Communicator, B: int, T: int, cu_seqlens, segment: int) -> Layout:
    """The layout of this rank; raises what :func:`first_token` raises."""
    lengths = None if cu_seqlens is None else content(cu_seqlens)
    first = 0 if lengths is None else first_token(comm, lengths, T)

    def make():
        if lengths is None:
            flags = FIRST.value * (comm.rank == 0) | LAST.value * (comm.rank == comm.size - 1)
            pieces = [Piece(b * T, (b + 1) * T, b, b, flags) for b in range(B)]
        else:
            pieces = cut(lengths, first, T)
        return Layout(pieces, B, segment, comm.device)

    return kept(comm, (B, T, first, lengths, segment), make)


def kept(comm: Communicator, key, make):
    """What ``make()``, which asks no other rank, returned for ``key`` at the first call with it.

    The communicator keeps KEPT of them, and those whose addresses a graph holds.
    """
    value, captured = comm.layouts.pop(key, (None, False))
    capturing = _capturing(comm)
    if value is None:
        if capturing:
            raise RuntimeError(NOT_IN_CAPTURE)
        value = make()
        if len(comm.layouts) >= KEPT:
            oldest = next((k for k, (_, held) in comm.layouts.items() if not held), None)
            comm.layouts.pop(oldest, None)
    comm.layouts[key] = (value, captured or capturing)  # the newest is last
    return value


def _capturing(comm: Communicator) -> bool:
    return comm.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def first_token(comm: Communicator, lengths, T: int) -> int:
    """Where in the whole this rank's T tokens begin. For each call with cu_seqlens, on all ranks alike: the first with
    these ``lengths`` is collective, and the split that it finds is kept (the last KEPT, the same ones on every rank).

    Raises ValueError on all ranks for lengths that are wrong or differ; on a rank whose T is not that of the first
    call, because the others cannot see that; RuntimeError for a first call in a CUDA graph's capture.
    """
    if lengths in comm.splits:
        tokens = comm.splits[lengths] = comm.splits.pop(lengths)  # the newest is last
        if tokens[comm.rank] != T:
            raise ValueError(
                f"these cu_seqlens came with {tokens[comm.rank]} tokens on this rank before, now with {T}: on one "
                "communicator a cu_seqlens has one split"
            )
        return sum(tokens[: comm.rank])
    if _capturing(comm):
        raise RuntimeError(NOT_IN_CAPTURE)
    answers = comm.exchange((lengths, T), "the first call with these cu_seqlens")
    if any(answer[0] != lengths for answer in answers):
        raise comm.told(ValueError("cu_seqlens differs between ranks: " + by_rank(answer[0] for answer in answers)))
    tokens = [answer[1] for answer in answers]
    if lengths[0] != 0 or any(a > b for a, b in zip(lengths, lengths[1:])) or lengths[-1] != sum(tokens):
        problem = (
            f"cu_seqlens must rise from 0 to the {sum(tokens)} tokens of all ranks ({by_rank(tokens)}), got {lengths}"
        )
        raise comm.told(ValueError(problem))
    if len(comm.splits) >= KEPT:
        del comm.splits[next(iter(comm.splits))]
    comm.splits[lengths] = tokens
    return sum(tokens[: comm.rank])


def cut(lengths, begin: int, T: int) -> list[Piece]:
    """The pieces of packed sequences in tokens begin .. begin + T - 1. An empty sequence lies where a token before it
    would: behind the last token of the rank that ends there, or on the first rank."""
    pieces = []
    for i, (first, end) in enumerate(zip(lengths, lengths[1:])):
        here = begin < end <= begin + T or (first == end == begin == 0)
        if first == end:
            flags = FIRST.value | LAST.value
        else:
            flags = FIRST.value * (begin <= first < begin + T) | LAST.value * here
            here = first < begin + T and end > begin
        if here:
            pieces.append(Piece(max(first, begin) - begin, min(end, begin + T) - begin, 0, i, flags))
    return pieces


def content(cu_seqlens: torch.Tensor) -> tuple[int, ...]:
    """cu_seqlens as Python's numbers."""
    if cu_seqlens.device.type == "cpu":
        return tuple(cu_seqlens.tolist())
    return _device_content(Identity(cu_seqlens))


class Identity:
    """A tensor as a dictionary key: the same object, not written to since."""

    def __init__(self, tensor):
        self.tensor = weakref.ref(tensor)
        self.key = (id(tensor), tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)

    def __hash__(self):
        return hash(self.key)

    def __eq__(self, other):
        return self.key == other.key and self.tensor() is other.tensor()


@functools.lru_cache(maxsize=KEPT)
def _device_content(identity):
    return tuple(identity.tensor().tolist())  # waits for the GPU, once for each tensor
