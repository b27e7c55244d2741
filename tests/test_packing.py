"""Layouts of packed sequences, by hand and at random: every token in one chunk, every sequence with one end."""

from __future__ import annotations

import random

import pytest
import torch

import allscan
from allscan import first_call
from allscan.communicator import cached_on
from allscan.first_call import find_layout, partition_start
from allscan.packing import Layout, cut, most_segments, segment_length
from allscan.shmem_kernels.gla_blocks import FIRST, LAST
from support.values import raised

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    "shape, packed, expected",
    [
        ((1, 16384, 16, 128, 128), False, 1024), ((1, 16384, 16, 128, 128), True, 512),
        ((2, 16384, 16, 128, 128), False, 2048), ((4, 4096, 64, 128, 128), False, 4096),
        ((4, 2048, 16, 128, 128), False, 1024), ((1, 16384, 16, 128, 256), False, 2048),
        ((1, 16384, 16, 128, 64), False, 1024), ((1, 16384, 4, 256, 512), False, 1024),
        ((8, 1024, 8, 64, 64), False, 256), ((1, 2048, 4, 64, 64), False, 128), ((1, 1, 1, 256, 16), False, 256),
    ],
)  # fmt: skip
def test_segments_on_a_gpu(shape, packed, expected):
    """As bench/results/development.txt has found them best, of those that fill the GPU as often as they should."""
    assert segment_length(*shape, packed, True) == expected


def test_by_hand():
    """Ranks of 4, 3 and 5 tokens; sequences of 0, 2, 4, 0, 1 and 5 tokens, the fourth and fifth at the second cut."""
    lengths = [0, 0, 2, 6, 6, 7, 12]
    assert [tuple(piece) for piece in cut(lengths, 0, 4)] == [
        (0, 0, 0, 0, FIRST.value | LAST.value),
        (0, 2, 0, 1, FIRST.value | LAST.value),
        (2, 4, 0, 2, FIRST.value),
    ]
    assert [tuple(piece) for piece in cut(lengths, 4, 3)] == [
        (0, 2, 0, 2, LAST.value),
        (2, 2, 0, 3, FIRST.value | LAST.value),
        (2, 3, 0, 4, FIRST.value | LAST.value),
    ]
    assert [tuple(piece) for piece in cut(lengths, 7, 5)] == [(0, 5, 0, 5, FIRST.value | LAST.value)]


@pytest.mark.parametrize("seed", range(200))
def test_at_random(seed):
    chance = random.Random(seed)
    tokens = [chance.choice((1, 2, 31, 32, 33, 64, 100)) for _ in range(chance.randint(1, 5))]
    total = sum(tokens)
    edges = sorted(chance.randint(0, total) for _ in range(chance.randint(0, 12)))
    edges += chance.choices(edges, k=2) if edges else []  # some sequences are empty
    lengths = [0, *sorted(edges), total]
    begun, ended, seen = [], [], []
    begin = 0
    for T in tokens:
        pieces = cut(lengths, begin, T)
        tables = Layout(pieces, 1, 32, "cpu", 16)
        segments, chunks = tables.segments.tolist(), tables.chunks.tolist()
        assert len(segments) == tables.num_segments <= most_segments(1, T, len(lengths) - 1, 32)
        assert tables.first_segments.tolist() == [0, len(segments)]
        assert [t for a, b in chunks for t in range(a, b)] == list(range(T))
        for number, (start, end, chunk, index, sequence, flags) in enumerate(segments):
            assert index == 0 and lengths[sequence] <= begin + start <= begin + end <= lengths[sequence + 1]
            own = [t for a, b in chunks[chunk:] for t in range(a, b)][: end - start]
            assert own == list(range(start, end)) and end - start <= 32
            if flags & FIRST.value:
                assert begin + start == lengths[sequence]
                begun.append(sequence)
            if flags & LAST.value:
                assert begin + end == lengths[sequence + 1]
                ended.append(sequence)
            if not flags & FIRST.value and number:  # it goes on where the one before it stopped
                assert segments[number - 1][4] == sequence and not segments[number - 1][5] & LAST.value
        seen += [begin + t for t in range(T)]
        begin += T
    assert begun == ended == list(range(len(lengths) - 1)) and seen == list(range(total))


def partition_case(group):
    """One cu_seqlens, cut in another way at the second call; then a layout of other segments, on rank 1 alone."""
    with allscan.Communicator(group) as comm:
        answers = [raised(partition_start, comm, (0, 5, 60), T[comm.rank]) for T in ([20, 20, 20], [20, 25, 15])]
        segment = 128 if comm.rank == 1 else 256
        return [*answers, find_layout(comm, 1, 20, torch.tensor([0, 5, 60]), segment).num_segments]  # asks nobody


def test_a_cu_seqlens_has_one_partition(run):
    answers = run(3, partition_case)
    assert [first for first, _, _ in answers] == [None, None, None]
    assert answers[0][1] is None and all("one partition" in second[1] for _, second, _ in answers[1:])


def kept_case(group):
    """More cu_seqlens than are kept, and more layouts on rank 1 than on rank 0. Returns how many are kept."""
    kept, first_call.KEPT = first_call.KEPT, 3
    try:
        with allscan.Communicator(group) as comm:
            for i in range(12):
                find_layout(comm, 1, 4, torch.tensor([0, i % 4, 8]), 128)
                if comm.rank == 1:
                    find_layout(comm, 1, 4 + i, None, 128)
            return len(cached_on(comm, "partitions 0"))
    finally:
        first_call.KEPT = kept


def test_all_ranks_forget_the_same(run):
    assert run(2, kept_case) == [3, 3]
