"""Prefill with lengths that only kernels read: one sequence of launches serves all lengths."""

from __future__ import annotations

import functools
import random
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from test_serving import H, K, V, reference, tensors_of

import allscan
from allscan import serving
from allscan.base.tiling import next_power_of_2
from allscan.launch.plan import Plan
from allscan.scan.launcher import ChannelUse, Launcher
from allscan.shmem_kernels.channel import STEPS_A_STAMP, Channel
from allscan.shmem_kernels.device_tables import COUNT_WORDS, PASSES, SEGMENTS, TOKENS, tables_kernel
from allscan.shmem_kernels.segment_table import LAST, UNUSED
from allscan.tokens.packing import CHUNK_TOKENS, Layout, cut, most_segments
from support.values import raised, random_requests, relative


def tables_case(comm, layouts):
    """Compare the kernel's tables with those of the host, of all ranks. Return the number of different stamps."""
    order, stamps = random.Random(1), set()
    for _ in range(layouts):
        N, size, T, segment = order.randint(1, 40), order.randint(1, 5), order.randint(1, 400), 128
        lengths, row = random_requests(order, N, size, T, order.random() < 0.7)
        NS, NC = most_segments(1, T, N, segment), T // CHUNK_TOKENS + min(N, T)
        dtype = order.choice([torch.int32, torch.int64])
        boundaries, places = (torch.tensor(x, dtype=dtype, device=comm.device) for x in (lengths, row))
        words = []
        for rank in range(size):
            segments, chunks, counts = (
                torch.full(shape, 77, dtype=torch.int32, device=comm.device)
                for shape in ((NS, 6), (NC, 2), (COUNT_WORDS,))
            )
            word = torch.zeros(1, dtype=torch.int64, device=comm.device)
            base, BI = torch.full_like(word, 5), order.choice([1, 8, 64])
            outputs = base, segments, chunks, counts, word, comm.memory.fault, comm.memory.record
            numbers = dict(rank=rank, P=size, N=N, T=T, NS=NS, NC=NC, SEGMENT=segment, BT=CHUNK_TOKENS)
            blocks = dict(BN=next_power_of_2(N), BP=next_power_of_2(size), BI=BI)
            tables_kernel[(-(-max(NS, NC) // BI),)](boundaries, places, *outputs, **numbers, **blocks)
            begin, end = (min(x, lengths[-1]) for x in row[rank : rank + 2])
            pieces = cut(lengths, begin, end - begin, rank == 0)
            expected = Layout(pieces, 1, segment, torch.device("cpu"))
            n, m = expected.num_segments, expected.num_chunks
            assert torch.equal(segments[:n].cpu(), expected.segments.view(n, 6)), (lengths, row, rank)
            assert torch.equal(chunks[:m].cpu(), expected.chunks.view(m, 2)), (lengths, row, rank)
            assert (segments[n:, 5] == (LAST.value | UNUSED.value)).all() and not chunks[m:].any()
            counts = counts.tolist()
            assert counts[SEGMENTS.value : SEGMENTS.value + 2] == expected.segments_of_states[0].tolist()
            assert counts[PASSES.value] == bool(expected.passing) and counts[TOKENS.value] == end - begin
            words.append(int(word))
        assert len({*words}) == 1 and words[0] % STEPS_A_STAMP.value == 5, words  # equal on all ranks
        stamps.add(words[0])
    comm.check()
    return len(stamps)


def test_tables(run):
    assert run(1, tables_case, 60)[0] > 55


def rows_of(tensors, mine, T):
    """This rank's tokens in the first of T rows; others are padding that must not matter."""
    parts = [x[:, mine] for x in tensors]
    return [F.pad(x, (0, 0) * (x.ndim - 2) + (0, T - x.shape[1]), value=-3.0) for x in parts]


def drawn_batch(comm, order, requests, T, uneven, dtypes):
    """Draw a batch with one slot of -1; dtypes: of query_start_loc and cut. Return (boundaries of the requests, this
    rank's tokens, arguments of both calls, of the call with lengths on the device, of the one with them on the
    host)."""
    lengths, row = random_requests(order, requests, comm.size, T, uneven)
    begin, end = (min(x, lengths[-1]) for x in row[comm.rank : comm.rank + 2])
    slots, begun = order.sample(range(requests), requests), [order.random() < 0.5 for _ in range(requests)]
    slots[order.randrange(requests)] = -1
    boundaries, places = (torch.tensor(x, dtype=d, device=comm.device) for x, d in zip((lengths, row), dtypes))
    on_device = dict(query_start_loc=boundaries, on_device=True, **dict(cut=places) if uneven else {})
    on_host = dict(query_start_loc=lengths, first_token=begin)
    return lengths, slice(begin, end), dict(comm=comm, slots=slots, has_initial_state=begun), on_device, on_host


def lengths_case(comm, rule, layouts, T=150, requests=5):
    """Run random lengths with one capacity. Return (whether bits are those of calls that know the lengths on the host,
    the largest error of the first layouts)."""
    operator, order, same, errors = getattr(allscan, f"zeco_{rule}"), random.Random(2), [], [0.0]
    for i in range(layouts):
        dtypes = torch.int64, torch.int32
        lengths, mine, batch, on_device, on_host = drawn_batch(comm, order, requests, T, i % 2 == 1, dtypes)
        generator, n = torch.Generator().manual_seed(i), mine.stop - mine.start
        whole = tensors_of(rule, lengths[-1], generator)
        own = [x.to(comm.device) for x in rows_of(whole, mine, T)]
        pool = torch.randn(requests, H, K, V, generator=generator).to(comm.device)
        pools = [pool.clone() for _ in range(2)]
        o = serving.prefill(operator, *own, pool=pools[0], **batch, **on_device)
        found = serving.prefill(operator, *[x[:, :n] for x in own], pool=pools[1], **batch, **on_host)
        same += [torch.equal(o[:, :n], found) and not o[:, n:].any(), torch.equal(*pools)]
        if i < 4 and n:
            expected = []
            for a, b, slot, continues in zip(lengths, lengths[1:], batch["slots"], batch["has_initial_state"]):
                state = pool[slot][None].cpu() if continues and slot >= 0 else None
                if b > a:
                    expected.append(reference(rule, [x[:, a:b] for x in whole], state)[0])
            errors.append(relative(o[:, :n], torch.cat(expected, 1)[:, mine]))
    comm.check()
    return all(same), max(errors)


@pytest.mark.cpu
@pytest.mark.parametrize(
    "rule, size, layouts",
    [
        ("gated_delta_rule", 3, 10),
        ("kda", 2, 10),
        ("kda", 1, 4),
        *[pytest.param(rule, 4, 100, marks=pytest.mark.slow) for rule in ("gated_delta_rule", "kda")],
    ],
)
def test_random_lengths(run, rule, size, layouts):
    for same, error in run(size, lengths_case, rule, layouts):
        assert same and error < 2e-5, error


def convolution_case(comm, T, layouts, dtype, n=3, C=6, requests=6):
    """Return the largest difference of a convolution's outputs from those with lengths on the host, relative, and
    whether all states are theirs."""
    order, errors, same = random.Random(4), [0.0], []
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(C, 1, n + 1, generator=generator)

    def conv(x):
        return F.silu(F.conv1d(x.mT.float(), weight.to(x.device), padding=n, groups=C)[..., :-n].mT).to(x.dtype)

    for i in range(layouts):
        dtypes = torch.int32, torch.int64
        lengths, mine, batch, on_device, on_host = drawn_batch(comm, order, requests, T, i % 2 == 1, dtypes)
        whole = torch.randn(1, lengths[-1], C, generator=generator).to(dtype)
        [own], tokens = rows_of([whole.to(comm.device)], mine, T), mine.stop - mine.start
        pool = torch.randn(requests, C, n, generator=generator).to(comm.device)
        pools = [pool, pool.clone()]
        y = serving.convolve(conv, own, pool=pools[0], **batch, **on_device)
        expected = serving.convolve(conv, own[:, :tokens], pool=pools[1], **batch, **on_host)
        same.append(torch.equal(*pools) and not y[:, tokens:].any())
        if tokens:
            errors.append(relative(y[:, :tokens], expected))
    comm.check()
    return max(errors), all(same)


@pytest.mark.parametrize(
    "size, T, layouts, dtype",
    [
        (3, 40, 10, torch.float32),
        (4, 3, 12, torch.bfloat16),  # ranks with fewer tokens than the convolution reads
        (1, 40, 4, torch.float32),
        pytest.param(4, 7, 100, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_convolutions(run, size, T, layouts, dtype):
    for error, same in run(size, convolution_case, T, layouts, dtype):
        assert same and error < 1e-6, error


def arguments_case(comm):
    """The fields of the channel of a compiled launch with a step word of its own, and of one without."""
    launcher, buffer = allscan.AllScan(comm, (1, 16, 16)).launcher, Plan().scratch(1, dtype=torch.int64)
    steps, found = comm.memory.steps.data_ptr(), []
    for stamp, addresses in (buffer, [11, 22, 33]), (5, [11, 33]):
        first, channel = launcher._with_channel(ChannelUse(False, False, stamp), addresses)
        found.append((first, channel[Channel._fields.index("step")], channel[Channel._fields.index("fwd_epoch")]))
    return found == [(11, 22, 33), (11, steps + 16 * 5, 33)]


@pytest.mark.cpu
def test_arguments_of_compiled_launches(run):
    """CPU ranks do not use these: compiled kernels are launched with addresses."""
    assert run(1, arguments_case) == [True]


OTHER = {  # what rank 1 has in place of these requests
    "lengths": dict(query_start_loc=[0, 30, 90, 100]),
    "order": dict(query_start_loc=[0, 10, 40, 100]),
    "total": dict(query_start_loc=[0, 30, 40, 99]),
    "cut": dict(cut=[0, 51, 100]),
}


def checked_call(comm, rule, query_start_loc, cut):
    """Prefill three requests, each rank with 60 rows, and check the communicator afterwards."""
    own = [x.to(comm.device) for x in tensors_of(rule, 60, torch.Generator().manual_seed(0))]
    boundaries, cut = (torch.tensor(x, device=comm.device) for x in (query_start_loc, cut))
    where = dict(slots=[0, 1, 2], query_start_loc=boundaries, cut=cut, on_device=True)
    pool = torch.zeros(3, H, K, V, device=comm.device)
    serving.prefill(getattr(allscan, f"zeco_{rule}"), *own, comm=comm, pool=pool, **where)
    comm.streams.synchronize()
    comm.check()


def other_case(group, kind, timeout=5):
    """Return the exceptions of a call in which rank 1 has another layout, and of a right one after resync()."""
    with allscan.Communicator(group, timeout=timeout) as comm:
        call = functools.partial(checked_call, comm, "kda")
        places = [0, 50, 100, *[100] * (comm.size - 2)]

        right = dict(query_start_loc=[0, 30, 40, 100], cut=places)
        call(**right)
        wrong = dict(right, **OTHER[kind])
        wrong["cut"] = [*wrong["cut"], *[100] * (comm.size - 2)][: comm.size + 1]
        found = [raised(call, **(wrong if comm.rank == 1 else right))]
        comm.resync()
        return [*found, raised(call, **right)]


@pytest.mark.parametrize("kind", OTHER)
def test_another_layout_of_a_rank(run, kind, size=2):
    found = run(size, other_case, kind)
    assert all(first for first, _ in found), found
    assert found[1][0][0] == "AllScanOutOfStep" and "different cu_seqlens" in found[1][0][1], found
    assert found[0][0][0] in ("AllScanOutOfStep", "AllScanTimeout"), found
    assert all(after is None for _, after in found)


def replay_case(group, rule):
    """Return the exception of a call in which rank 1 has other lengths, and no rank looks at its fault record before
    the end: as in the replay of a CUDA graph."""
    with allscan.Communicator(group, timeout=5) as comm:
        own = [x.to(comm.device) for x in tensors_of(rule, 60, torch.Generator().manual_seed(0))]
        pool, boundaries = torch.zeros(3, H, K, V), torch.tensor([0, 30, 60 * comm.size - 20, 60 * comm.size])
        where = dict(slots=[0, 1, 2], query_start_loc=boundaries, on_device=True)

        def call():
            serving.prefill(getattr(allscan, f"zeco_{rule}"), *own, comm=comm, pool=pool, **where)

        call()
        before = boundaries.clone()
        boundaries[1] -= 10 * (comm.rank == 1)
        with (
            mock.patch.object(Launcher, "after_launch", lambda *_: None),
            mock.patch.object(Launcher, "before_launch", lambda *_: None),
            mock.patch.object(comm, "check", lambda: None),
        ):
            call()
        found = raised(comm.check)
        comm.resync()
        boundaries.copy_(before)
        pool.zero_()
        return found, raised(call), bool(pool.isfinite().all())


@pytest.mark.cpu
@pytest.mark.parametrize("rule, size", [("kda", 2), pytest.param("gated_delta_rule", 3, marks=pytest.mark.slow)])
def test_every_rank_hears_of_another_layout_in_a_replay(run, rule, size):
    found = run(size, replay_case, rule)
    assert all(first and first[0] in ("AllScanOutOfStep", "AllScanTimeout") for first, *_ in found), found
    assert found[1][0][0] == "AllScanOutOfStep" and all(rest == [None, True] for _, *rest in found), found


WRONG = {  # query_start_loc and cut that are wrong on all ranks
    "descending": ([0, 30, 20, 100], [0, 50, 100]),
    "not from 0": ([1, 30, 40, 100], [0, 50, 100]),
    "negative": ([0, -5, 40, 100], [0, 50, 100]),
    "beyond": ([0, 30, 40, 2**31 + 100], [0, 50, 100]),
    "rows": ([0, 30, 40, 100], [0, 20, 100]),
    "cut": ([0, 30, 40, 100], [0, 110, 100]),
    "cut not from 0": ([0, 30, 40, 100], [-50, 0, 50]),
}


def wrong_case(group, kind):
    """Return the exception of a call with wrong boundaries on all ranks."""
    with allscan.Communicator(group, timeout=5) as comm:
        call = functools.partial(checked_call, comm, "gated_delta_rule")

        call([0, 30, 40, 100], [0, 50, 100])
        return raised(call, *WRONG[kind])


@pytest.mark.slow(but=("descending", "rows"))
@pytest.mark.parametrize("kind", WRONG)
def test_wrong_boundaries(run, kind, size=2):
    for name, text in run(size, wrong_case, kind):
        assert name == "ValueError" and "query_start_loc must rise from 0 to at most" in text, (name, text)


def nan_case(comm, K):
    """Return whether a request without NaN has none in its output and its state, beside one with NaN."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 20, H, n, generator=generator) for n in (K, K, V))
    own = [x.to(comm.device) for x in (q, F.normalize(k, dim=-1), v, *-torch.rand(2, 1, 20, H))]
    own[4] = -own[4]
    if comm.rank == 0:
        own[2][:, 3] = float("nan")
    pool = torch.zeros(2, H, K, V, device=comm.device)
    boundaries = torch.tensor([0, 30, 20 * comm.size], device=comm.device)
    batch = dict(comm=comm, pool=pool, slots=[0, 1], query_start_loc=boundaries, on_device=True)
    o = serving.prefill(allscan.zeco_gated_delta_rule, *own, **batch)
    first = max(0, 30 - 20 * comm.rank)
    return [bool(x.isnan().any()) for x in (pool[0], pool[1], o[:, first:])]


@pytest.mark.parametrize("K", [16, 144])  # transitions that the scan's kernel holds, and that it does not
def test_nan_stays_in_its_request(run, K, size=3):
    assert run(size, nan_case, K) == [[True, False, False]] * size


REFUSED = {  # arguments, and the message
    "operator": (dict(operator=allscan.zeco_gla), "on_device=True is for zeco_kda and zeco_gated_delta_rule"),
    "layout": (dict(layout="zigzag", first_token=0), "does not support first_token, layout"),
    "list": (dict(query_start_loc=[0, 3, 5]), "query_start_loc must be a tensor"),
    "floats": (dict(query_start_loc=torch.zeros(3)), "query_start_loc must be .* int32 or int64"),
    "cut": (dict(cut=torch.zeros(4, dtype=torch.int32)), "cut must have shape"),
    "host": (dict(on_device=False, cut=torch.zeros(2, dtype=torch.int32)), "cut requires on_device=True"),
}


def refused_case(group, name):
    with allscan.Communicator(group, timeout=5) as comm:
        options, _ = REFUSED[name]
        options = {n: x.to(comm.device) if torch.is_tensor(x) else x for n, x in options.items()}
        boundaries = torch.tensor([0, 3, 5], device=comm.device)
        given = dict(slots=[0, 1], query_start_loc=boundaries, on_device=True, operator=allscan.zeco_kda) | options
        own = [x.to(comm.device) for x in tensors_of("kda", 5, torch.Generator().manual_seed(0))]
        pool = torch.zeros(2, H, K, V, device=comm.device)
        return raised(serving.prefill, given.pop("operator"), *own, comm=comm, pool=pool, **given)


@pytest.mark.cpu
@pytest.mark.parametrize("name", REFUSED)
def test_refused_arguments(run, name):
    (found,) = run(1, refused_case, name)
    assert found and found[0] in ("ValueError", "TypeError"), found
    assert pytest.RaisesExc(Exception, match=REFUSED[name][1]).matches(Exception(found[1])), found


def debug_case(group):
    """Return the exception of a call whose lengths differ on rank 1, in debug mode, which reads them."""
    with allscan.Communicator(group, timeout=20, debug=True) as comm:
        own = [x.to(comm.device) for x in tensors_of("kda", 5, torch.Generator().manual_seed(0))]
        pool = torch.zeros(2, H, K, V, device=comm.device)
        boundaries = torch.tensor([0, 3 + comm.rank, 5], device=comm.device)
        batch = dict(slots=[0, 1], query_start_loc=boundaries, on_device=True)
        return raised(serving.prefill, allscan.zeco_kda, *own, comm=comm, pool=pool, **batch)


@pytest.mark.cpu
def test_other_lengths_in_debug_mode(run):
    for name, text in run(2, debug_case):
        assert name == "ValueError" and "query_start_loc" in text, (name, text)
