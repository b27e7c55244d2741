"""Index tables of one rank's tokens for the kernels: sequences, segments and chunks. No communication.

In the zigzag layout rank r of P has chunks r and 2P - 1 - r of 2P equal chunks: of the row, or with per_document=True
of each document. P = 2 ranks, documents A of 4 tokens and B of 20 (cu_seqlens [0, 4, 24]), each letter a token:

    row                    A A A A B B B B B B B B B B B B B B B B B B B B
    zigzag: rank           0 0 0 0 0 0 1 1 1 1 1 1 1 1 1 1 1 1 0 0 0 0 0 0
    per_document: rank     0 1 1 0 0 0 0 0 0 1 1 1 1 1 1 1 1 1 1 0 0 0 0 0

A rank's tokens lie one after another in its memory, in the order of the pieces (``zigzag_cut``, ``document_cut``). Each
piece is one segment here, a row of ``Layout.segments`` (START END FIRST_CHUNK STATE_INDEX SEQUENCE, FLAGS). States of
first halves come first among those that are sent:

                    rank   tokens of the row   segment     flags
    zigzag          0      A 0 - 3             0 4 0 0 0   FIRST LAST
                    0      B 4 - 5             4 6 1 0 1   FIRST LEFT
                    0      B 18 - 23           6 12 2 1 1  LAST ENTERED
                    1      B 6 - 11            0 6 0 0 1   ENTERED LEFT
                    1      B 12 - 17           6 12 1 1 1  ENTERED LEFT
    per_document    0      A 0 - 0             0 1 0 0 0   FIRST LEFT
                    0      A 3 - 3             1 2 1 2 0   LAST ENTERED
                    0      B 4 - 8             2 7 2 1 1   FIRST LEFT
                    0      B 19 - 23           7 12 3 3 1  LAST ENTERED
                    1      A 1 - 1             0 1 0 0 0   ENTERED LEFT
                    1      A 2 - 2             1 2 1 2 0   ENTERED LEFT
                    1      B 9 - 13            2 7 2 1 1   ENTERED LEFT
                    1      B 14 - 18           7 12 3 3 1  ENTERED LEFT
"""

from __future__ import annotations

import copy
import functools
import itertools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..base.autograd import ordered
from ..base.caches import CACHE_SIZE, Recent
from ..base.checks import PER_DOCUMENT, boundaries, reject_in_capture
from ..base.tiling import cdiv, next_power_of_2, power_of_2_below
from ..bindings.torch_compat import capturing, current_stream_of, version_of, without_dispatch_modes
from ..comm.communicator import Communicator
from ..comm.tags import stamp
from ..launch.plan import ALIGNMENT
from ..launch.streams import table_stream
from ..shmem_kernels.segment_table import ENTERED, FIRST, LAST, LEFT

T_ = TypeVar("T_")

CHUNK_TOKENS = 64  # BT
GRID_LIMIT = 65535  # chunks of a rank, and states times heads: CUDA's limit of the second axis of a grid


EACH = -1  # see TokenRange.sequence


class TokenRange(NamedTuple):
    """Consecutive tokens of one sequence on this rank: start .. end - 1 of the rank's B * T tokens."""

    start: int
    end: int
    # The range's state is number ``entry`` of the states that the rank sends for its ``half``
    half: int = 0  # 1: in the zigzag layout the second half of the rank's tokens, or of its tokens of a document
    entry: int = 0  # the batch entry; 0 for packed sequences; with per_document=True the sequence
    sequence: int = 0  # row of initial_state and final_state; EACH: one row for each batch entry
    flags: int = 0  # see ``flags_of``

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def begins(self) -> bool:
        """Whether the sequence begins with this range: no earlier rank and no earlier half has tokens of it."""
        return bool(self.flags & FIRST.value)

    @property
    def ends(self) -> bool:
        return bool(self.flags & LAST.value)


def flags_of(begins: bool = False, ends: bool = False) -> int:
    """The flags of tokens with which a sequence begins (FIRST) and ends (LAST)."""
    return FIRST.value * begins | LAST.value * ends


class Tables:
    """Tables computed on the host and copied to the device. Calls on any stream may read them: the constructor makes
    one copy, and the host waits for it. Each call that reads the tables calls ``use`` first.

    Attributes: tensors, the tables on the device."""

    def __init__(self, tables: Sequence[torch.Tensor], device: torch.device) -> None:
        self.tensors = to_device(tables, device)
        self._streams: set[int] = set()  # streams that have read the tables
        self.held = False  # whether a CUDA graph holds the addresses
        self._own: dict[int, list[torch.Tensor]] = {}  # by stream, see of_stream; the most recently used is last

    def use(self, comm: Communicator) -> None:
        """Prepare a read of the tables on the current stream (``Tensor.record_stream``): the allocator reuses their
        memory only after the work queued on this stream by the time they are freed. In a capture the communicator
        keeps the memory alive, because the graph holds its address."""
        streams = comm.streams
        if not streams.cuda:
            return
        if capturing():
            self.held = True
            comm.memory.keep(self.tensors[0])
        elif (number := current_stream_of(streams.index)) not in self._streams:
            with without_dispatch_modes():  # selective checkpointing's mode counts torch operators
                self.tensors[0].record_stream(streams.current())
            self._streams.add(number)

    def of_stream(self, comm: Communicator) -> list[torch.Tensor]:
        """The tables as tensor objects that only the current stream uses. fla.utils.tensor_cache and the like cache
        values derived from a tensor object, and such a value is ready only on the stream that computed it. A capture
        can derive nothing: it gets the tensors used last, on whichever stream."""
        if comm.streams.capturing() and self._own:
            return next(reversed(self._own.values()))
        number = comm.streams.number()
        self._own[number] = found = self._own.pop(number, None) or [x.view(x.shape) for x in self.tensors]
        return found


@functools.lru_cache
def weights(BT: int) -> torch.Tensor:
    """The three tables that blocks.load_weights reads: [3, BT, BT] bfloat16, on the CPU."""
    t, u = torch.arange(BT, device="cpu")[:, None], torch.arange(BT, device="cpu")
    # stacked in float32: torch.autocast of CPUs to float16 rejects stack() of bfloat16
    return torch.stack([x.float() for x in (torch.where(t >= u, 0.5, -0.5), t <= u, t > u)]).to(torch.bfloat16)


@functools.lru_cache
def chunk_weights(BT: int, device: torch.device) -> torch.Tensor:
    """``weights(BT)`` and SUMS and PAIRS of kda_fwd.py, on the device; never freed."""
    t, u = torch.arange(BT, device="cpu")[:, None], torch.arange(BT, device="cpu")
    sums, pairs = [], []
    for m in range(6):
        middle = (t >> (m + 1) << (m + 1)) + (1 << m)
        sums.append((u > middle) & (u <= t) | (u > t) & (u <= middle))
        pairs.append((t >= middle) & (u < middle) & (t >> (m + 1) == u >> (m + 1)))
    tables = torch.stack([x.float() for x in (*weights(BT), *sums, *pairs)])
    return to_device([tables.to(torch.bfloat16)], device)[0]


class Layout(Tables):
    """Tables of pieces, which are cut into segments of ``segment`` tokens and chunks of CHUNK_TOKENS tokens.

    states: number of states sent, equally many of each of ``halves`` (2 in the zigzag layout). In the tables and in
    memory the states of the first half come first. fla: add the tables that fla's functions take for packed sequences,
    see ``fla_chunks.FlaPass``.
    """

    def __init__(
        self,
        pieces: list[TokenRange],
        states: int,
        segment: int,
        device: torch.device,
        fla: bool = False,
        halves: int = 1,
    ) -> None:
        BT = CHUNK_TOKENS
        segments: list[tuple] = []
        chunks: list[tuple[int, int]] = []
        of_states = [[0, 0] for _ in range(states)]  # first segment and end of each state
        for piece in pieces:
            place = piece.half * (states // halves) + piece.entry
            if not of_states[place][1]:
                of_states[place][0] = len(segments)
            beyond = ENTERED.value * (not piece.flags & FIRST.value) | LEFT.value * (not piece.flags & LAST.value)
            starts = self.starts(piece, segment)
            for start, end in zip(starts, [*starts[1:], piece.end], strict=True):
                first, last = start == piece.start, end == piece.end
                flags = (FIRST.value * first | LAST.value * last) & piece.flags | beyond
                segments.append((start, end, len(chunks), place, piece.sequence, flags))
                chunks += [(c, min(c + BT, end)) for c in range(start, end, BT)]
            of_states[place][1] = len(segments)
        self.num_segments, self.num_chunks = len(segments), len(chunks)
        self.first_chunks = [*(chunk for _, _, chunk, *_ in segments), len(chunks)]  # of each segment, and the end
        # halves of the tokens, 0 and 1, of which a state is both received and sent on
        self.passing = {piece.half for piece in pieces if piece.flags == 0}
        self.entered = any(not piece.flags & FIRST.value for piece in pieces)  # a state is received
        self.left = any(not piece.flags & LAST.value for piece in pieces)
        self._derived = Recent()
        self.alike: tuple[object, ...] = ()  # values equal on all ranks in calls with this layout
        self.stamp = 0  # stamp of calls with these tables, see tags.stamp
        self.boundaries = [0] + [piece.end for piece in pieces if piece.end > piece.start]  # cu_seqlens of this rank
        tables = [torch.tensor(table, dtype=torch.int32, device="cpu") for table in (segments, chunks, of_states)]
        tables.append(weights(BT))
        if fla:
            lengths = list(itertools.pairwise(self.boundaries))
            indices = [(i, n) for i, (a, b) in enumerate(lengths) for n in range(cdiv(b - a, BT))]
            tables += [torch.tensor(x, dtype=torch.int64, device="cpu") for x in (self.boundaries, indices)]
        super().__init__(tables, device)
        self.segments, self.chunks, self.segments_of_states, self.weights = self.tensors[:4]
        self.fla = tuple(self.tensors[4:])  # (cu_seqlens, chunk_indices)

    def starts(self, piece: TokenRange, segment: int) -> list[int]:
        """The first token of each segment of a piece. An empty piece has one empty segment."""
        return [*range(piece.start, piece.end, segment)] or [piece.start]

    def for_calls(self, *alike: object) -> Layout:
        """A copy without derived launches, for calls in which the values ``alike`` are equal on all ranks as well."""
        alone = copy.copy(self)
        alone._derived, alone.stamp = Recent(), stamp(*self.alike, *alike)
        return alone

    def derived(self, key: Hashable, make: Callable[[], T_]) -> T_:
        """The cached result of ``make()`` for ``key``: launches for these tokens. A result should hold ``for_calls()``,
        not this layout: that would be a reference cycle."""
        found: T_ = self._derived.find(key, make)
        return found


class DeviceBoundaries(NamedTuple):
    """cu_seqlens [N + 1] that only kernels read, on the device: see shmem_kernels/device_tables.py. Rank r has tokens
    cut[r] .. cut[r + 1] - 1 of the row, at the beginning of its T tokens; cut [P + 1], None: r T .. (r + 1) T - 1.
    step, int64 [1]: a kernel writes the step word (channel.py) of a call with these boundaries there."""

    boundaries: Tensor
    cut: Tensor | None
    step: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.boundaries.shape


class CapacityLayout(Layout):
    """The most segments and chunks of N sequences in T tokens on each rank. Each call has tables of its own."""

    def __init__(self, comm: Communicator, N: int, T: int, segment: int) -> None:
        if not 0 < T <= (2**31 - 1) // comm.size or T // CHUNK_TOKENS + N > GRID_LIMIT:
            most = f"T // {CHUNK_TOKENS} + N at most {GRID_LIMIT:,}"
            raise ValueError(f"T must be at least 1, and {most}, got T = {T:,} and N = {N:,} with on_device=True")
        super().__init__([], 1, segment, comm.device)
        self.num_segments, self.num_chunks = most_segments(1, T, N, segment), T // CHUNK_TOKENS + min(N, T)
        self.sequences, self.tokens, self.segment, self.alike = N, T, segment, ("capacity", N, T, segment)
        self.entered, self.left, self.passing = comm.rank > 0, comm.rank < comm.size - 1, {0}


@functools.cache
def even_cut(size: int, T: int, device: torch.device) -> torch.Tensor:
    """The cut of T tokens for each of ``size`` ranks, on the device; never freed."""
    return to_device([torch.arange(size + 1, device="cpu") * T], device)[0]


class AlignedLayout(Layout):
    """A Layout whose segments begin where pieces begin and at multiples of ``segment`` of this rank's tokens."""

    def starts(self, piece: TokenRange, segment: int) -> list[int]:
        return [piece.start, *range((piece.start // segment + 1) * segment, piece.end, segment)]


def to_device(tables: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy tables from the host into one allocation on the device. A GPU gets them by one copy on a separate stream;
    the host waits for this copy only."""
    device = torch.device(device)
    if device.type != "cuda":
        return [*tables]
    places = [*itertools.accumulate((cdiv(x.nbytes, ALIGNMENT) * ALIGNMENT for x in tables), initial=0)]

    def there(memory: Tensor, place: int, table: Tensor) -> torch.Tensor:
        return memory[place : place + table.nbytes].view(table.dtype).view(table.shape)

    host = torch.empty(places[-1], dtype=torch.uint8, device="cpu", pin_memory=True)
    for place, table in zip(places, tables):
        there(host, place, table).copy_(table)
    with torch.cuda.stream(table_stream(device)):
        memory = torch.empty(places[-1], dtype=torch.uint8, device=device)
        memory.copy_(host, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
    copied.synchronize()
    return [there(memory, place, table) for place, table in zip(places, tables)]


def segment_length(B: int, T: int, H: int, K: int, V: int, packed: bool, num_sms: int) -> int:
    """The number of tokens of a segment, a multiple of the chunk. Long segments mean few states to carry, but the
    programs of output_kernel have to fill a GPU of ``num_sms`` multiprocessors (0 on CPUs). Segments of more than 1,024
    tokens fill it at least twice: otherwise the kernel's time doubles where other kernels occupy a few multiprocessors.
    Packed sequences, whose lengths vary, fill it at least four times."""
    if not num_sms:
        return 2 * CHUNK_TOKENS
    # resident programs, of 8 or 4 warps: about one or two on a multiprocessor
    at_once = power_of_2_below(num_sms) * (1 if 64 < K <= 128 and V > 64 else 2)
    programs = B * H * cdiv(V, 64 if K > 128 else 128)  # of one segment of each batch entry
    length, least = 4096, CHUNK_TOKENS * (2 if K <= 64 else 4)
    while length > least and programs * cdiv(T, length) < at_once * (4 if packed else 2 if length > 1024 else 1):
        length //= 2
    return length


def most_segments(B: int, T: int, sequences: int, segment: int, zigzag: int = False) -> int:
    """An upper bound of the number of segments, independent of the boundaries of packed sequences."""
    return B * (T // segment) + sequences + (sequences if zigzag == PER_DOCUMENT else B * zigzag)


def most_chunks(B: int, T: int, sequences: int, zigzag: int, aligned: bool) -> int:
    """An upper bound of the number of chunks. aligned: as for a Layout; then a piece of a sequence may begin with a
    segment that is not a whole number of chunks."""
    return most_segments(B, T, sequences, CHUNK_TOKENS, zigzag) + (sequences + B * bool(zigzag) if aligned else 0)


def batch_pieces(B: int, T: int, zigzag: int, begins: bool, ends: bool) -> list[TokenRange]:
    """The pieces of B sequences of which this rank has T tokens each. begins, ends: whether they begin and end on this
    rank; in the zigzag layout they begin with its first half and end with its second."""
    edges = ((begins, False), (False, ends)) if zigzag else ((begins, ends),)
    n = T // len(edges)
    return [
        TokenRange(b * T + half * n, b * T + half * n + n, half, b, b, flags_of(*edge))
        for b in range(B)
        for half, edge in enumerate(edges)
    ]


def cut(lengths: Sequence[int], begin: int, T: int, on_first: bool = True) -> list[TokenRange]:
    """The pieces of packed sequences in tokens begin .. begin + T - 1 of the row. An empty sequence belongs to the rank
    whose last token precedes it, or to the first rank at the row's beginning; ``on_first``: this is the first rank. A
    rank without tokens whose position is inside a sequence has an empty piece of that sequence."""
    pieces = []
    for i, (first, end) in enumerate(zip(lengths, lengths[1:])):
        here = begin < end <= begin + T or (on_first and first == end == begin == 0)
        if first == end:
            flags = flags_of(True, True)
        else:
            flags = flags_of(begin <= first < begin + T, here)
            here = first < begin + T and end > begin
        if here:
            pieces.append(TokenRange(max(first, begin) - begin, min(end, begin + T) - begin, sequence=i, flags=flags))
    return pieces


def zigzag_cut(lengths: Sequence[int], begin: int, T: int, on_first: bool = True) -> list[TokenRange]:
    """``cut`` for the zigzag layout. The rank's first half begins at token ``begin``; its second half ends at the same
    distance from the end of the row."""
    n = T // 2
    heads, tails = cut(lengths, begin, n, on_first), cut(lengths, lengths[-1] - begin - n, n, False)
    return heads + [p._replace(start=p.start + n, end=p.end + n, half=1) for p in tails]


def tokens_of_pieces(lengths: Sequence[int], T: int) -> list[int]:
    """With per_document=True: for each document the number of tokens in each of its two pieces on a rank with T
    tokens."""
    return [(b - a) * (T // 2) // max(lengths[-1], 1) for a, b in itertools.pairwise(lengths)]


def document_cut(lengths: Sequence[int], begin: int, T: int, on_first: bool = True) -> list[TokenRange]:
    """``cut`` for the zigzag layout with per_document=True. Rank r has two pieces of each sequence, chunks r and
    2P - 1 - r of the sequence's 2P chunks; sequences follow one another. begin: r T / 2, unused."""
    pieces, start = [], 0
    first, last = flags_of(begins=on_first), flags_of(ends=on_first)
    for i, n in enumerate(tokens_of_pieces(lengths, T)):
        pieces += [
            TokenRange(start, start + n, 0, i, i, first),
            TokenRange(start + n, start + 2 * n, 1, i, i, last),
        ]
        start += 2 * n
    return pieces


CUTS = cut, zigzag_cut, document_cut  # indexed by the result of checks.zigzag_of


def document_places(lengths: Sequence[int], rank: int, size: int) -> list[tuple[int, int]]:
    """(First token, end) of each piece of document_cut, as positions in the global sequence."""
    places = []
    for a, b in itertools.pairwise(lengths):
        n = (b - a) // (2 * size)
        places += [(a + i * n, a + (i + 1) * n) for i in (rank, 2 * size - 1 - rank)]
    return places


def carried_states(B: int, sequences: int, zigzag: int) -> int:
    """The number of states sent over the ranks in each direction. B, but with per_document=True the number of
    sequences rounded up to a power of 2: each number needs a workspace of its own, and rounding keeps them few."""
    return next_power_of_2(int(sequences)) if zigzag == PER_DOCUMENT else B


def join_document_states(states: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the documents' states, [1, ...] each, and pad with zeros: [carried_states, ...], as sent."""
    missing = carried_states(1, len(states), PER_DOCUMENT) - len(states)
    return torch.cat([*states, *[torch.zeros_like(states[0])] * missing])


def split_document_states(pairs: Sequence[torch.Tensor], documents: int) -> list[torch.Tensor]:
    """Split two received tensors into states [1, ...]: first and second piece of each document in turn, no padding."""
    return [x for pair in zip(*(x.split(1) for x in pairs)) for x in pair][: 2 * documents]


def without_empty(lengths: Sequence[int]) -> tuple[int, ...]:
    """cu_seqlens without the empty sequences; (0, 0), one empty sequence, if all are empty."""
    distinct = sorted({*lengths})
    return tuple(distinct) if len(distinct) > 1 else (0, 0)


def boundaries_on_host(cu_seqlens: torch.Tensor) -> tuple[int, ...]:
    """cu_seqlens as Python integers, cached by ``TensorKey``. Raises ValueError for a GPU tensor in a capture."""
    if cu_seqlens.device.type == "cpu":
        return tuple(cu_seqlens.tolist())
    reject_in_capture(cu_seqlens)
    return _read_boundaries(TensorKey(cu_seqlens))


def own_boundaries(cu_seqlens: object) -> Any:
    """Copy the caller's cu_seqlens (checks.boundaries) to private memory on the CPU, read once. Backward then reads the
    same values as forward, even if the caller writes to its tensor in between. DeviceBoundaries are not read."""
    if isinstance(cu_seqlens, DeviceBoundaries):
        return cu_seqlens
    values = boundaries(cu_seqlens)
    if torch.compiler.is_compiling():
        return _traced_copy(values)[0]  # a clone would be made again in backward
    return _own(values)


def _own(values: torch.Tensor) -> torch.Tensor:
    if values.device.type == "cpu" or type(values) is not torch.Tensor:
        return values.clone()
    try:
        return torch.tensor(boundaries_on_host(values), dtype=values.dtype, device="cpu")
    except RuntimeError as error:
        raise TypeError(f"cu_seqlens cannot be read: {error}") from error


def _copy(cu_seqlens: torch.Tensor) -> tuple[torch.Tensor]:
    return (_own(cu_seqlens),)


def _fake_copy(cu_seqlens: Tensor) -> tuple[torch.Tensor]:
    return (torch.empty(cu_seqlens.shape, dtype=cu_seqlens.dtype, device="cpu"),)


_traced_copy = ordered("allscan::boundaries", _copy, _fake_copy)


class TensorKey:
    """A tensor as a dictionary key. Two keys are equal for the same tensor object with the same version counter. torch
    does not count writes through ``.data``, by code other than torch's, by a CUDA graph's replay, or to tensors created
    in torch.inference_mode: such writes go unnoticed."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = weakref.ref(tensor)
        self.key = (id(tensor), tensor.data_ptr(), tensor.shape, version_of(tensor))

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorKey) and self.key == other.key and self.tensor() is other.tensor()


@functools.lru_cache(maxsize=CACHE_SIZE)
def _read_boundaries(identity: TensorKey) -> tuple[int, ...]:
    tensor = identity.tensor()
    assert tensor is not None  # the caller holds a reference
    return tuple(tensor.tolist())  # waits for the GPU, once for each version of a tensor
