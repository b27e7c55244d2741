"""Layouts of packed sequences, by hand and at random: every token in one chunk, every sequence with one end."""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import types
from unittest import mock

import numpy
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import allscan
from allscan.base.autograd import REVISION
from allscan.base.tiling import H100_MULTIPROCESSORS
from allscan.launch.compiled_kernel import Launch
from allscan.shmem_kernels.segment_table import FIRST, LAST
from allscan.tokens import packing, partition
from allscan.tokens.packing import Layout, TokenRange, cut, most_segments, segment_length
from allscan.tokens.partition import OwnTokens, find_layout, partition_start
from support.packed import calls, differ, forward_and_backward
from support.values import check_answers, own_triton, raised

of_operators = pytest.mark.parametrize(
    "operators", [("zeco_gla", "halo"), pytest.param(None, marks=pytest.mark.slow)], ids=["two", "all"]
)

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    "shape, packed, expected",
    [
        ((1, 16384, 16, 128, 128), False, 1024),
        ((1, 16384, 16, 128, 128), True, 512),
        ((2, 16384, 16, 128, 128), False, 2048),
        ((4, 4096, 64, 128, 128), False, 4096),
        ((4, 2048, 16, 128, 128), False, 1024),
        ((1, 16384, 16, 128, 256), False, 2048),
        ((1, 16384, 16, 128, 64), False, 1024),
        ((1, 16384, 4, 256, 512), False, 1024),
        ((8, 1024, 8, 64, 64), False, 256),
        ((1, 2048, 4, 64, 64), False, 128),
        ((1, 1, 1, 256, 16), False, 256),
    ],
)
def test_segments_on_a_gpu(shape, packed, expected):
    """The best lengths of development runs on an H200, among those that fill the GPU as often as required."""
    assert segment_length(*shape, packed, H100_MULTIPROCESSORS) == expected


@pytest.mark.quick
def test_by_hand():
    """Ranks have 4, 3 and 5 tokens; sequences 0, 2, 4, 0, 1 and 5 tokens, the fourth and fifth at the second rank
    boundary."""
    lengths = [0, 0, 2, 6, 6, 7, 12]
    assert [tuple(piece) for piece in cut(lengths, 0, 4)] == [
        (0, 0, 0, 0, 0, FIRST.value | LAST.value),
        (0, 2, 0, 0, 1, FIRST.value | LAST.value),
        (2, 4, 0, 0, 2, FIRST.value),
    ]
    assert [tuple(piece) for piece in cut(lengths, 4, 3)] == [
        (0, 2, 0, 0, 2, LAST.value),
        (2, 2, 0, 0, 3, FIRST.value | LAST.value),
        (2, 3, 0, 0, 4, FIRST.value | LAST.value),
    ]
    assert [tuple(piece) for piece in cut(lengths, 7, 5)] == [(0, 5, 0, 0, 5, FIRST.value | LAST.value)]


@pytest.mark.quick
def test_the_picture():
    """The tables of the module's docstring are those of its functions."""
    lengths, T, names = [0, 4, 24], 12, ("FIRST", "LAST", "ENTERED", "LEFT")
    rows = re.findall(r"^ +(\w+)? +(\d) +([AB]) (\d+) - (\d+) +([\d ]+\d)  +([A-Z ]+)$", packing.__doc__, re.MULTILINE)
    expected = []
    for documents, rank in itertools.product((1, 2), range(2)):
        places = packing.document_places([0, 24] if documents == 1 else lengths, rank, 2)
        tokens = [token for place in places for token in range(*place)]  # of the row, in the order of the rank's memory
        pieces = (packing.zigzag_cut, packing.document_cut)[documents - 1](lengths, rank * T // 2, T, rank == 0)
        table = Layout(pieces, 2 * documents, T, "cpu", halves=2).segments.tolist()
        for piece, (*words, flags) in zip(pieces, table, strict=True):
            first, last = tokens[piece.start], tokens[piece.end - 1]
            named = " ".join(name for bit, name in enumerate(names) if flags >> bit & 1)
            expected.append((str(rank), "AB"[piece.sequence], f"{first}", f"{last}", " ".join(map(str, words)), named))
    assert [row[1:] for row in rows] == expected and {row[0] for row in rows} == {"zigzag", "", "per_document"}


def test_states_of_first_halves_come_first():
    """In the tables of the zigzag layout, though pieces lie in the order of batch entries."""
    pieces = [TokenRange(100 * i, 100 * i + 100, i % 2, i // 2, i // 2, 0 if i == 2 else FIRST.value) for i in range(4)]
    layout = Layout(pieces, 4, 64, "cpu", halves=2)
    assert layout.segments[:, 3].tolist() == [0, 0, 2, 2, 1, 1, 3, 3]
    assert layout.segments_of_states.tolist() == [[0, 2], [4, 6], [2, 4], [6, 8]] and layout.passing == {0}


@pytest.mark.quick("1")
@pytest.mark.parametrize("seed", range(200))
def test_at_random(seed):
    chance = random.Random(seed)
    tokens = [chance.choice((1, 2, 127, 128, 129, 256, 400)) for _ in range(chance.randint(1, 5))]
    total = sum(tokens)
    edges = sorted(chance.randint(0, total) for _ in range(chance.randint(0, 12)))
    edges += chance.choices(edges, k=2) if edges else []  # some sequences are empty
    lengths = [0, *sorted(edges), total]
    begun, ended, seen = [], [], []
    begin = 0
    for T in tokens:
        pieces = cut(lengths, begin, T)
        tables = Layout(pieces, 1, 128, "cpu")
        segments, chunks = tables.segments.tolist(), tables.chunks.tolist()
        assert len(segments) == tables.num_segments <= most_segments(1, T, len(lengths) - 1, 128)
        assert tables.segments_of_states.tolist() == [[0, len(segments)]]
        assert [t for a, b in chunks for t in range(a, b)] == list(range(T))
        for number, (start, end, chunk, index, sequence, flags) in enumerate(segments):
            assert index == 0 and lengths[sequence] <= begin + start <= begin + end <= lengths[sequence + 1]
            own = [t for a, b in chunks[chunk:] for t in range(a, b)][: end - start]
            assert own == list(range(start, end)) and end - start <= 128
            if flags & FIRST.value:
                assert begin + start == lengths[sequence]
                begun.append(sequence)
            if flags & LAST.value:
                assert begin + end == lengths[sequence + 1]
                ended.append(sequence)
            if not flags & FIRST.value and number:  # it continues the previous one
                assert segments[number - 1][4] == sequence and not segments[number - 1][5] & LAST.value
        seen += [begin + t for t in range(T)]
        begin += T
    assert begun == ended == list(range(len(lengths) - 1)) and seen == list(range(total))


def partition_case(comm):
    """Split one cu_seqlens in another way at the second call; then use a layout with other segments on rank 1 alone."""
    answers = [raised(partition_start, comm, (0, 5, 60), T[comm.rank]) for T in ([20, 20, 20], [20, 25, 15])]
    segment = 128 if comm.rank == 1 else 256
    return [
        *answers,
        find_layout(comm, OwnTokens(1, 20, torch.tensor([0, 5, 60])), segment).num_segments,
    ]  # without an exchange


def test_a_cu_seqlens_has_one_partition(run):
    answers = run(3, partition_case)
    assert [first for first, _, _ in answers] == [None, None, None]
    assert answers[0][1] is None and all("first used with" in second[1] for _, second, _ in answers[1:])


def kept_case(comm):
    """Use more cu_seqlens than the cache holds, and more layouts on rank 1 than on rank 0. Return the cache's size."""
    comm.agreed.partitions.most = 3
    with mock.patch.object(partition, "CACHE_SIZE", 3):
        for i in range(12):
            find_layout(comm, OwnTokens(1, 4, torch.tensor([0, i % 4, 8])), 128)
            if comm.rank == 1:
                find_layout(comm, OwnTokens(1, 4 + i), 128)
    return len(comm.agreed.partitions)


def test_all_ranks_forget_the_same(run):
    assert run(2, kept_case) == [3, 3]


class LateCopies:
    """A stand-in for torch in packing, with a GPU whose memory is the host's: a non-blocking copy runs when the host
    waits for a later event on its stream. Until then the destination has zeros."""

    def __init__(self):
        self._stream, self._copies = None, []
        self.made = []  # (number of bytes, stream) of each finished copy
        self.cuda = types.SimpleNamespace(stream=self._on, Event=lambda: self._Event(self))

    def __getattr__(self, name):
        return getattr(torch, name)

    def device(self, _):
        return types.SimpleNamespace(type="cuda")

    def empty(self, *shape, device, dtype, pin_memory=False):
        return torch.empty(*shape, dtype=dtype, device="cpu").zero_()

    @contextlib.contextmanager
    def _on(self, stream):
        before, self._stream = self._stream, stream
        yield
        self._stream = before

    class _Event:
        def __init__(self, gpu):
            self._gpu = gpu

        def record(self):
            self._behind, self._gpu._copies = self._gpu._copies, []

        def synchronize(self):
            for there, host, stream in self._behind:
                there.copy_(host)
                self._gpu.made.append((host.nbytes, stream))
            self._behind = []

    @contextlib.contextmanager
    def there(self):
        copy, to = torch.Tensor.copy_, torch.Tensor.to

        def straggling_copy(x, host, non_blocking=False):
            return (self._copies.append((x, host, self._stream)) or x) if non_blocking else copy(x, host)

        def straggle_to(x, *where, non_blocking=False, **options):
            if not non_blocking:
                return to(x, *where, **options)
            made = torch.zeros_like(x)
            self._copies.append((made, x, self._stream))
            return made

        with (
            mock.patch.object(packing, "torch", self),
            mock.patch.object(packing, "table_stream", lambda _: "tables", create=True),
            mock.patch.object(torch.Tensor, "copy_", straggling_copy),
            mock.patch.object(torch.Tensor, "to", straggle_to),
            mock.patch.object(torch.Tensor, "pin_memory", lambda x: x),
        ):
            yield


def straggling_copies_case(group, operators):
    """Return the calls that differ from those with immediate copies of tables; and the copies."""
    results, gpu = [], LateCopies()
    for there in (contextlib.nullcontext, gpu.there):
        with allscan.Communicator(group) as comm, there():
            packings = None, [0, 7, 7, 20 * comm.size], [0, 5, 20 * comm.size]
            results.append(
                {
                    (*name, i): forward_and_backward(call, lengths)
                    for name, call in calls(comm, 20, operators=operators).items()
                    for i, lengths in enumerate(packings)
                }
            )
            tables = len(comm.tables)
    plain, late = results
    return [name for name in plain if differ(late[name], plain[name])], gpu.made, tables


@of_operators
def test_tables_are_there_before_any_stream_reads_them(run, operators, size=2):
    """Two calls share tables only if their order does not depend on a scan launched first. Calls on two streams have no
    order: one copies tables that the other reads. So the creator of tables waits for the copy, one a layout, on a
    stream without other launches."""
    for different, made, tables in run(size, straggling_copies_case, operators):
        assert not different, different
        assert len(made) == tables >= (10 if operators is None else 4) and {stream for _, stream in made} == {"tables"}


def uses_case(group, operators):
    """Return calls with tables, repeated calls included, whose forward or backward pass does not register their use."""
    counted = []
    use = packing.Tables.use
    with (
        allscan.Communicator(group) as comm,
        mock.patch.object(packing.Tables, "use", lambda self, comm: (counted.append(self), use(self, comm))[1]),
    ):
        silent = []
        for (name, layout), call in calls(comm, 20, operators=operators).items():
            for lengths in (None, [0, 7, 20 * comm.size]):
                forward_and_backward(call, lengths)
                del counted[:]
                result, inputs = call(lengths)
                forward = len(counted)
                torch.autograd.grad(result.sum(), inputs, allow_unused=True)
                backward = len(counted) - forward
                has_tables = lengths is not None or name != "halo"
                backward_too = has_tables and name != "halo"  # autograd holds its tables
                if has_tables > forward or backward_too > backward:
                    silent.append((name, layout, lengths is None))
        return silent


@of_operators
def test_every_call_says_that_it_reads_tables(run, operators, size=2):
    """Freed tables may still be read on another stream: calls register their stream for the tables that they read."""
    assert run(size, uses_case, operators) == [[]] * size


def test_memory_of_tables_is_given_back_behind_its_readers():
    """record_stream is called for every reading stream; in a capture the communicator holds the memory."""
    recorded, kept = [], []
    at = types.SimpleNamespace(stream=1, capturing=False)  # the current stream
    streams = types.SimpleNamespace(cuda=True, index=0, capturing=lambda: at.capturing, number=lambda: at.stream)
    streams.current = lambda: {1: "first", 2: "second"}[at.stream]
    comm = types.SimpleNamespace(streams=streams, memory=types.SimpleNamespace(keep=kept.append))
    tables = packing.Tables([torch.arange(3), torch.ones(2)], "cpu")
    with (
        mock.patch.object(torch.Tensor, "record_stream", lambda x, stream: recorded.append((x, stream))),
        mock.patch.multiple(packing, capturing=lambda: at.capturing, current_stream_of=lambda index: at.stream),
    ):
        own = tables.of_stream(comm)
        for at.stream in (1, 2, 1, 2):
            tables.use(comm)
        other = tables.of_stream(comm)
        assert all(x is not y and torch.equal(x, y) for x, y in zip(own, other))
        at.capturing, at.stream = True, 3
        tables.use(comm)
        assert tables.of_stream(comm) is other and tables.held
    assert [stream for _, stream in recorded] == ["first", "second"]
    assert all(x is tables.tensors[0] for x in (recorded[0][0], *kept)) and len(kept) == 1


def changed(how, lengths):
    """Return (a cu_seqlens, a function that writes other boundaries into it)."""
    array = numpy.array(lengths)
    if how == "NumPy array":
        return array, lambda: array.__setitem__(1, lengths[1] + 5)
    if how == "list":
        given = [*lengths]
        return given, lambda: given.__setitem__(1, lengths[1] + 5)
    tensor = torch.from_numpy(array) if how == "memory of NumPy" else torch.tensor(lengths)

    def write():
        if how == "memory of NumPy":
            array[1] += 5
        elif how == "data":
            tensor.data[1] += 5
        elif how == "operator":
            tensor[1] += 5
        else:
            with torch.autograd._unsafe_preserve_version_counter(tensor):
                tensor[1] += 5

    return tensor, write


WAYS = "list", "NumPy array", "memory of NumPy", "data", "operator", "without a version"
WAYS_OF_CUSTOM = "list", "data", "operator"  # a custom operator takes a tensor: one that has a new version, or has not


class Looking(TorchDispatchMode):
    """A dispatch mode, under which operators run as custom ones."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def changed_case(comm, custom, operators):
    """Return the backward passes that differ if cu_seqlens is written to after the forward pass."""
    lengths, wrong = [0, 10, 20 * comm.size], []
    for name, call in calls(comm, 20, operators=operators).items():
        expected = forward_and_backward(call, lengths)
        for how in WAYS_OF_CUSTOM if custom else WAYS:
            cu_seqlens, write = changed(how, lengths)
            with Looking() if custom else contextlib.nullcontext():
                result, inputs = call(cu_seqlens)
            write()
            weights = torch.linspace(-1, 1, result.numel()).view(result.shape)
            found = [result.detach(), *torch.autograd.grad(result, inputs, weights, allow_unused=True)]
            if differ(found, expected):
                wrong.append((*name, how))
    return wrong


@of_operators
@pytest.mark.parametrize("custom", [False, True])
def test_backward_has_the_boundaries_of_forward(run, custom, operators, size=2):
    """Backward must not derive data from a changed cu_seqlens: callers refill it for the next batch, in ways that
    torch's version counter detects and in others."""
    assert run(size, changed_case, custom, operators) == [[]] * size


def compiled_case(comm, backend):
    """Return compiled functions whose gradients differ from those with an unchanged cu_seqlens."""
    x = torch.rand(1, 20, 2, 16, generator=torch.Generator().manual_seed(comm.rank)).requires_grad_()

    def operators(x, y, c):  # in one function: compiling takes most of the time
        o, _ = allscan.zeco_gla(x, x, x, -x, comm=comm, cu_seqlens=c)
        return o * 1.0, allscan.halo(y, 3, comm=comm, cu_seqlens=c) * 1.0

    wrong, expected, names = [], None, ("zeco_gla", "halo")
    compiled, y = torch.compile(operators, backend=backend, fullgraph=True), x.detach().clone().requires_grad_()
    for how in (None, "data", "memory of NumPy", "without a version"):
        # the first rank boundary is inside of a sequence, then at a sequence's end
        cu_seqlens, write = changed(how or "data", [0, 15, 20 * comm.size])
        results = compiled(x, y, cu_seqlens)
        if how is not None:
            write()
        weights = [torch.linspace(-1, 1, z.numel()).view(z.shape) for z in results]
        found = torch.autograd.grad(results, (x, y), weights)
        expected = found if how is None else expected
        wrong += [(name, how) for name, a, b in zip(names, found, expected, strict=True) if differ([a], [b])]
    return wrong


@pytest.mark.slow("inductor")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_backward_has_the_boundaries_of_forward(run, backend, size=2):
    """torch's partitioner or inductor could repeat a copy in backward, which would then read the changed contents."""
    if backend == "inductor" and torch.cuda.is_available() and not own_triton():
        pytest.skip("inductor belongs to the Triton of its torch")
    assert run(size, compiled_case, backend) == [[]] * size


def test_packed_operators_are_no_part_of_torchs_graphs():
    """Replays would reuse one packing's tables: operators with cu_seqlens and the copy of cu_seqlens are tagged."""
    assert allscan.zeco_gla and allscan.zeco_kda and allscan.halo  # imported on demand
    for name in ("zeco_gla", "zeco_delta", "hop"):
        for part in (name, f"{name}_backward"):
            plain, packed = (getattr(torch.ops.allscan, f"{x}_{REVISION}").default for x in (part, f"{part}_packed"))
            assert torch.Tag.cudagraph_unsafe in packed.tags and torch.Tag.cudagraph_unsafe not in plain.tags
    assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.allscan, f"boundaries_{REVISION}").default.tags


class OnGPU(torch.Tensor):
    """torch reports this tensor as a GPU tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda = True


def captured_case(comm, operators):
    """Return errors of calls in a capture with cu_seqlens on the GPU, and whether later calls are right."""
    answers, right = {}, []
    lengths = [0, 10, 20 * comm.size]
    on_gpu = torch.tensor(lengths).as_subclass(OnGPU)
    for name, call in calls(comm, 20, operators=operators).items():
        expected = forward_and_backward(call, lengths)
        with (
            mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True),
            mock.patch.object(Launch, "__call__", lambda *_: pytest.fail("launched")),
        ):
            answers[name] = raised(call, on_gpu)
        right.append(not differ(forward_and_backward(call, lengths), expected))
    return answers, right


@of_operators
def test_a_capture_rejects_cu_seqlens_on_the_gpu(run, operators, size=2):
    """A graph's replays would not read new contents: every rank raises before a launch."""
    for answers, right in run(size, captured_case, operators):
        assert all(right)
        check_answers({("cannot be captured", name): answer for name, answer in answers.items()})


def debug_case(group, operators):
    """In debug mode, with boundaries cached as for tensors on a GPU. Return the error of a call after a write on rank 1
    that torch does not count, and after one that it counts; then with one known cu_seqlens on rank 0 and another on the
    others, and with the same again."""
    answers = {}

    def read(x):
        return torch.tensor(packing._read_boundaries(packing.TensorKey(x)))

    with allscan.Communicator(group, timeout=4, debug=True) as comm, contextlib.ExitStack() as patches:
        for module in ("operator", "halo"):
            patches.enter_context(mock.patch(f"allscan.ops.{module}.own_boundaries", read))
        for name, call in calls(comm, 20, operators=operators).items():
            cu_seqlens = torch.tensor([0, 10, 20 * comm.size])
            call(cu_seqlens)
            if comm.rank == 1:
                cu_seqlens.data[1] = 15
            first = raised(call, cu_seqlens)
            cu_seqlens[1] = 15
            counted = raised(call, cu_seqlens)
            known = [torch.tensor([0, cut, 20 * comm.size]) for cut in (10, 15)]
            answers[name] = first, counted, raised(call, known[comm.rank > 0]), raised(call, known[0])
    return answers


@of_operators
def test_debug_mode_compares_the_values_of_cu_seqlens(run, operators, size=2):
    for answers in run(size, debug_case, operators):
        for name, (first, second, differs, last) in answers.items():
            assert first is not None and first[0] == "ValueError" and "does not count" in first[1], (name, first)
            assert second is None and last is None, (name, second, last)
            assert differs is not None and differs[0] == "ValueError", (name, differs)
            assert "cu_seqlens differs between ranks: rank 0: (0, 10, 40); rank 1: (0, 15, 40)" in differs[1]


def chunks_case(group, layout):
    """One rank has more chunks than kernels support: all ranks raise; the next call is right."""
    partition.GRID_LIMIT = 4  # these ranks end with the test
    with allscan.Communicator(group, timeout=60) as comm:
        T, total = 8, 8 * comm.size
        q = torch.randn(1, T, 1, 16, generator=torch.Generator().manual_seed(comm.rank)).to(comm.device)
        many = [0, *range(total - 7, total + 1)] if layout == "contiguous" else [*range(8), total]
        found = raised(allscan.zeco_gla, q, q, q, -q.abs(), comm=comm, cu_seqlens=many, layout=layout)
        for lengths in ([0, total], [0, 3, total]):
            o, _ = allscan.zeco_gla(q, q, q, -q.abs(), comm=comm, cu_seqlens=lengths, layout=layout)
            assert o.isfinite().all()
        return found


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_more_chunks_than_kernels_take(fresh, layout, size=3):
    of = size - 1 if layout == "contiguous" else 0
    for found in fresh(size).run(chunks_case, None, layout):
        assert found[0] == "ValueError" and f"packed sequences: rank {of} " in found[1], found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_under_autocast(dtype):
    """The first call of a process may be within torch.autocast."""
    cpu = torch.device("cpu")
    expected = packing.chunk_weights(64, cpu)
    with torch.autocast("cpu", dtype):
        assert torch.equal(packing.weights.__wrapped__(64), expected[:3])
        assert torch.equal(packing.chunk_weights.__wrapped__(64, cpu), expected)
