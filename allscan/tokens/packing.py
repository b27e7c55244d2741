"""How the tokens of a rank divide into sequences, segments and chunks: tables for the kernels. Asks no other rank."""

from __future__ import annotations

import copy
import functools
import itertools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from ..base.autograd import ordered
from ..base.checks import PER_DOCUMENT, boundaries, reject_in_capture
from ..base.tiling import cdiv, next_power_of_2, power_of_2_below
from ..bindings.torch_compat import capturing, current_stream_of, version_of, without_dispatch_modes
from ..comm.call_order import stamp
from ..comm.communicator import Communicator
from ..launch.plan import ALIGNMENT
from ..launch.streams import table_stream
from ..shmem_kernels.segment_table import ENTERED, FIRST, LAST, LEFT

T_ = TypeVar("T_")

CACHE_SIZE = 256  # boundaries read from the GPU, and what is derived of a layout
CHUNK_TOKENS = 64  # BT
MOST_CHUNKS = 65535  # of a rank: what the second axis of a grid holds


EACH = -1


class TokenRange(NamedTuple):
    """Consecutive tokens of this rank that are of one sequence: start .. end - 1 of its B * T."""

    start: int
    end: int
    state_index: int  # which of the sent states is its own: the batch entry, 0 for packed sequences; in the
    # zigzag layout twice that, and 1 more for the second half of the rank's tokens; of cut documents twice the
    # sequence, and 1 more for the second of its pieces
    sequence: int  # row of initial_state and final_state; EACH: it is one of each batch entry
    flags: int  # FIRST: the sequence begins here; LAST: it ends here

    @classmethod
    def of(
        cls, start: int, end: int, state_index: int = 0, sequence: int = 0, *, begins: bool = False, ends: bool = False
    ) -> TokenRange:
        return cls(start, end, state_index, sequence, FIRST.value * begins | LAST.value * ends)

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def begins(self) -> bool:
        """Whether no tokens of the sequence are on a rank before, or in a half before."""
        return bool(self.flags & FIRST.value)

    @property
    def ends(self) -> bool:
        return bool(self.flags & LAST.value)


class Tables:
    """Tables that were made on the host, in the device's memory, which calls on any stream may read from now on: they
    are one copy, for which the host has waited. Before each call that reads them comes ``use``.

    tensors: the tables."""

    def __init__(self, tables: Sequence[torch.Tensor], device: torch.device) -> None:
        self.tensors = to_device(tables, device)
        self._streams: set[int] = set()  # that have read them
        self.held = False  # by a graph
        self._own: dict[int, list[torch.Tensor]] = {}  # see of_stream; the last used is last

    def use(self, comm: Communicator) -> None:
        """The current stream is to read them: when nothing holds them any more, their memory is given back behind what
        this stream has been given by then. In a capture the communicator keeps it: the graph has its address."""
        streams = comm.streams
        if not streams.cuda:
            return
        if capturing():
            self.held = True
            comm.memory.keep(self.tensors[0])
        elif (number := current_stream_of(streams.index)) not in self._streams:
            with without_dispatch_modes():  # of selective checkpointing, which counts the operators of torch
                self.tensors[0].record_stream(streams.current())
            self._streams.add(number)

    def of_stream(self, comm: Communicator) -> list[torch.Tensor]:
        """The tables, as tensors of the current stream's own, for functions that keep what they derive of a tensor for
        the next call with it (fla.utils.tensor_cache): it is there only behind what that stream has been given. In a
        capture, which nothing of the kind can be derived in, those that were used last."""
        if comm.streams.capturing() and self._own:
            return next(reversed(self._own.values()))
        number = comm.streams.number()
        self._own[number] = found = self._own.pop(number, None) or [x.view(x.shape) for x in self.tensors]
        return found


@functools.lru_cache
def weights(BT: int) -> torch.Tensor:
    """What blocks.load_weights takes: its three tables."""
    t, u = torch.arange(BT, device="cpu")[:, None], torch.arange(BT, device="cpu")
    return torch.stack([x.to(torch.bfloat16) for x in (torch.where(t >= u, 0.5, -0.5), t <= u, t > u)])


@functools.lru_cache
def chunk_weights(BT: int, device: torch.device) -> torch.Tensor:
    """These, and SUMS, PAIRS and ANCHORED of delta_chunks.py, in the device's memory for good."""
    t, u = torch.arange(BT, device="cpu")[:, None], torch.arange(BT, device="cpu")
    sums, pairs = [], []
    for m in range(6):
        middle = (t >> (m + 1) << (m + 1)) + (1 << m)
        sums.append((u > middle) & (u <= t) | (u > t) & (u <= middle))
        pairs.append((t >= middle) & (u < middle) & (t >> (m + 1) == u >> (m + 1)))
    anchored = [1.0 * (u <= anchor) - 1.0 * (u <= t) for anchor in range(-1, BT)]
    tables = torch.stack([x.to(torch.bfloat16) for x in (*sums, *pairs, *anchored)])
    return to_device([torch.cat([weights(BT), tables])], device)[0]


class Layout(Tables):
    """Tables of pieces, cut into segments of ``segment`` tokens and chunks of BT; ``states``: how many are sent.
    ``fla``: with those that fla's functions take of packed sequences, see delta.chunks."""

    def __init__(
        self,
        pieces: list[TokenRange],
        states: int,
        segment: int,
        device: torch.device,
        BT: int = CHUNK_TOKENS,
        fla: bool = False,
    ) -> None:
        segments: list[tuple] = []
        chunks: list[tuple[int, int]] = []
        begins: list[int] = []
        for piece in pieces:
            while len(begins) <= piece.state_index:
                begins.append(len(segments))
            beyond = ENTERED.value * (not piece.flags & FIRST.value) | LEFT.value * (not piece.flags & LAST.value)
            starts = self.starts(piece, segment)
            for start, end in zip(starts, [*starts[1:], piece.end], strict=True):
                first, last = start == piece.start, end == piece.end
                flags = (FIRST.value * first | LAST.value * last) & piece.flags | beyond
                segments.append((start, end, len(chunks), piece.state_index, piece.sequence, flags))
                chunks += [(c, min(c + BT, end)) for c in range(start, end, BT)]
        begins += [len(segments)] * (states + 1 - len(begins))
        self.num_segments, self.num_chunks = len(segments), len(chunks)
        self.passing = {piece.state_index for piece in pieces if piece.flags == 0}  # of states that enter and leave
        self.entered = any(not piece.flags & FIRST.value for piece in pieces)  # by a state of another rank
        self.left = any(not piece.flags & LAST.value for piece in pieces)
        self._derived: dict = {}
        self.alike: tuple[object, ...] = ()  # of all ranks, in calls with this layout
        self.stamp = 0  # of calls with these tables, see call_order.stamp
        self.boundaries = [0] + [piece.end for piece in pieces if piece.end > piece.start]  # cu_seqlens of this rank
        tables = [torch.tensor(table, dtype=torch.int32, device="cpu") for table in (segments, chunks, begins)]
        tables.append(weights(BT))
        if fla:
            lengths = list(itertools.pairwise(self.boundaries))
            indices = [(i, n) for i, (a, b) in enumerate(lengths) for n in range(cdiv(b - a, BT))]
            tables += [torch.tensor(x, dtype=torch.int64, device="cpu") for x in (self.boundaries, indices)]
        super().__init__(tables, device)
        self.segments, self.chunks, self.first_segments, self.weights = self.tensors[:4]
        self.fla = tuple(self.tensors[4:])  # (cu_seqlens, chunk_indices)

    def starts(self, piece: TokenRange, segment: int) -> list[int]:
        """The first tokens of the segments of a piece; of an empty one that of an empty segment."""
        return [*range(piece.start, piece.end, segment)] or [piece.start]

    def tables(self, *alike: object) -> Layout:
        """This, without what is derived of it, for calls of which all ranks have these values alike, too."""
        alone = copy.copy(self)
        alone._derived, alone.stamp = {}, stamp(*self.alike, *alike)
        return alone

    def derived(self, key: Hashable, make: Callable[[], T_]) -> T_:
        """What ``make()`` returned for ``key`` at one of the last CACHE_SIZE such calls: launches for these tokens. It
        should hold ``tables``, not this, which would then hold itself."""
        found = self._derived.get(key)
        if found is None:
            if len(self._derived) >= CACHE_SIZE:
                del self._derived[next(iter(self._derived))]
            found = self._derived[key] = make()
        return found


class AlignedLayout(Layout):
    """The same with segments that begin where pieces do, and at multiples of ``segment`` of this rank's tokens."""

    def starts(self, piece: TokenRange, segment: int) -> list[int]:
        return [piece.start, *range((piece.start // segment + 1) * segment, piece.end, segment)]


def to_device(tables: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Tables on the host, in one memory of the device. To a GPU they are one copy, on a stream of its own, which the
    host waits for, and for nothing else."""
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
    """Tokens of a segment, some chunks: long, for few states to be carried, yet enough segments for the programs of
    output_kernel to fill a GPU of ``num_sms`` multiprocessors (0 on CPUs). Of more than 1,024 tokens so many that they
    fill it twice, lest their time double where others use a few multiprocessors; of packed sequences, which are of many
    lengths, four times."""
    if not num_sms:
        return 2 * CHUNK_TOKENS
    # programs, which then have 8 or 4 warps: about one or two a multiprocessor
    at_once = power_of_2_below(num_sms) * (1 if 64 < K <= 128 and V > 64 else 2)
    programs = B * H * cdiv(V, 64 if K > 128 else 128)  # of a segment of each sequence
    length, least = 4096, CHUNK_TOKENS * (2 if K <= 64 else 4)
    while length > least and programs * cdiv(T, length) < at_once * (4 if packed else 2 if length > 1024 else 1):
        length //= 2
    return length


def most_segments(B: int, T: int, sequences: int, segment: int, zigzag: int = False) -> int:
    """An upper bound of the number of segments that does not depend on where packed sequences begin."""
    return B * (T // segment) + sequences + (sequences if zigzag == PER_DOCUMENT else B * zigzag)


def cut(lengths: Sequence[int], begin: int, T: int, on_first: bool = True) -> list[TokenRange]:
    """The pieces of packed sequences in tokens begin .. begin + T - 1. An empty sequence lies where a token before it
    would: behind the last token of the rank that ends there, or on the first rank, which ``on_first`` says of this one.
    A rank without tokens inside of a sequence has an empty piece of it."""
    pieces = []
    for i, (first, end) in enumerate(zip(lengths, lengths[1:])):
        here = begin < end <= begin + T or (on_first and first == end == begin == 0)
        if first == end:
            flags = FIRST.value | LAST.value
        else:
            flags = FIRST.value * (begin <= first < begin + T) | LAST.value * here
            here = first < begin + T and end > begin
        if here:
            pieces.append(TokenRange(max(first, begin) - begin, min(end, begin + T) - begin, 0, i, flags))
    return pieces


def zigzag_cut(lengths: Sequence[int], begin: int, T: int, on_first: bool = True) -> list[TokenRange]:
    """The same of a rank in the zigzag layout, with the tokens begin .. begin + T / 2 - 1 and as many that lie as far
    from the end as these from the beginning: state 0 is that of the former, 1 that of the latter."""
    n = T // 2
    heads, tails = cut(lengths, begin, n, on_first), cut(lengths, lengths[-1] - begin - n, n, False)
    return heads + [p._replace(start=p.start + n, end=p.end + n, state_index=1) for p in tails]


def document_cut(lengths: Sequence[int], begin: int, T: int, on_first: bool = True) -> list[TokenRange]:
    """The same of a rank that has two pieces of each sequence, chunks r and 2P - 1 - r of its 2P, one sequence behind
    the other. begin: r T / 2, which is not looked at."""
    pieces, start = [], 0
    first, last = FIRST.value * on_first, LAST.value * on_first
    for i, (a, b) in enumerate(itertools.pairwise(lengths)):
        n = (b - a) * (T // 2) // max(lengths[-1], 1)
        pieces += [
            TokenRange(start, start + n, 2 * i, i, first),
            TokenRange(start + n, start + 2 * n, 2 * i + 1, i, last),
        ]
        start += 2 * n
    return pieces


CUTS = cut, zigzag_cut, document_cut  # by checks.zigzag_of


def document_places(lengths: Sequence[int], rank: int, size: int) -> list[tuple[int, int]]:
    """(first token, end) in the global sequence of each piece of document_cut."""
    places = []
    for a, b in itertools.pairwise(lengths):
        n = (b - a) // (2 * size)
        places += [(a + i * n, a + (i + 1) * n) for i in (rank, 2 * size - 1 - rank)]
    return places


def carried_states(B: int, sequences: int, zigzag: int) -> int:
    """How many states are sent over the ranks in each direction. Of cut documents as many as there are, and some that
    are nobody's up to a power of 2: each number takes a workspace, of which there are few then."""
    return next_power_of_2(int(sequences)) if zigzag == PER_DOCUMENT else B


def together(states: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of documents' states [1, ...] what is sent: [carried_states, ...]."""
    missing = carried_states(1, len(states), PER_DOCUMENT) - len(states)
    return torch.cat([*states, *[torch.zeros_like(states[0])] * missing])


def apart(pairs: Sequence[torch.Tensor], documents: int) -> list[torch.Tensor]:
    """Of both things that have come, those [1, ...] of the first piece and of the second of each document in turn."""
    return [x for pair in zip(*(x.split(1) for x in pairs)) for x in pair][: 2 * documents]


def without_empty(lengths: Sequence[int]) -> tuple[int, ...]:
    """cu_seqlens without sequences that have no tokens; one of these, if there is nothing else."""
    distinct = sorted({*lengths})
    return tuple(distinct) if len(distinct) > 1 else (0, 0)


def boundaries_on_host(cu_seqlens: torch.Tensor) -> tuple[int, ...]:
    """cu_seqlens as Python's numbers; see ``TensorKey``. Raises ValueError for one on the GPU in a capture."""
    if cu_seqlens.device.type == "cpu":
        return tuple(cu_seqlens.tolist())
    reject_in_capture(cu_seqlens)
    return _read_boundaries(TensorKey(cu_seqlens))


def own_boundaries(cu_seqlens: object) -> torch.Tensor:
    """checks.boundaries of what a caller gives, read once, on the CPU and in memory that nobody writes to: what
    backward reads again is what forward had."""
    values = boundaries(cu_seqlens)
    if torch.compiler.is_compiling():
        return cast(torch.Tensor, _traced_copy(values)[0])  # a clone would be made again in backward
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
    """A tensor as a dictionary key: the same object, not written to since, as far as torch has counted: not by way of
    ``.data``, of other code than torch's, or of a CUDA graph's replay, nor if it was made in torch.inference_mode."""

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
    assert tensor is not None  # which the caller holds
    return tuple(tensor.tolist())  # waits for the GPU, once for each tensor
