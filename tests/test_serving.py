"""Prefill of batches of requests, in pieces, with states in the slots of a pool."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.nn.functional as F

import allscan
from allscan import serving
from allscan.reference import delta_reference, gla_reference, ssd_reference
from support.values import place, raised, relative

H, K, V, SLOTS = 2, 16, 8, 7
REQUESTS = [150, 1, 37, 2, 64]  # tokens
RULES = "gla", "gated_delta_rule", "kda", "simple_gla", "ssd"


def tensors_of(rule, T, generator):
    q, k, v = (torch.randn(1, T, H, n, generator=generator) for n in (K, K, V))
    g, beta = -torch.rand(1, T, H, K, generator=generator), torch.rand(1, T, H, generator=generator)
    if rule == "ssd":  # x, dt, A, B, C, chunk_size
        return v, beta, -torch.rand(H, generator=generator), q, k, 64
    if rule in ("gla", "simple_gla"):
        return q, k, v, g if rule == "gla" else g[..., 0]
    return q, F.normalize(k, dim=-1), v, g if rule == "kda" else g[..., 0], beta


def of_tokens(tensors, tokens):
    return [x[:, tokens] if isinstance(x, torch.Tensor) and x.ndim > 1 else x for x in tensors]


def reference(rule, tensors, state):
    """Return (o, final state), in float64, of one request after a state or None."""
    if rule == "ssd":
        *tensors, _ = tensors
        return ssd_reference(*tensors, initial_states=state)
    if rule == "simple_gla":
        return gla_reference(*tensors[:3], tensors[3][..., None].expand(*tensors[3].shape, K), initial_state=state)
    call = gla_reference if rule == "gla" else delta_reference
    if rule == "gated_delta_rule":
        tensors = [*tensors[:3], tensors[3][..., None].expand(*tensors[3].shape, K), tensors[4]]
    return call(*tensors, initial_state=state)


def batches_of(pieces, order):
    """Cut each request into this many pieces; return [(number of tokens of each request in the batch)]."""
    cuts = [sorted(order.choices(range(n + 1), k=pieces - 1)) for n in REQUESTS]
    bounds = [[0, *some, n] for some, n in zip(cuts, REQUESTS, strict=True)]
    return [[b[i + 1] - b[i] for b in bounds] for i in range(pieces)]


def tokens_of(comm, total, zigzag, order):
    """Return the number of tokens of each rank."""
    if zigzag:
        return [total // comm.size] * comm.size
    cuts = sorted(order.choices(range(total + 1), k=comm.size - 1))
    return [b - a for a, b in itertools.pairwise([0, *cuts, total])]


def batches(comm, zigzag, pieces):
    """Yield (slots in the order of the batch, requests, boundaries, whether they continue, tokens of each rank, place
    of this rank's tokens, first_token) for each batch. In zigzag the last request, of which there is no answer, fills
    the row up."""
    order = random.Random(pieces)
    taken = order.sample(range(SLOTS), len(REQUESTS))
    seen = [0] * len(REQUESTS)
    for lengths in batches_of(pieces, order):
        which = order.sample(range(len(REQUESTS)), len(REQUESTS))
        sizes, slots = [lengths[i] for i in which], [taken[i] for i in which]
        if zigzag and (missing := -sum(sizes) % (2 * comm.size)):
            sizes, slots, which = [*sizes, missing], [*slots, -1], [*which, None]
        starts = [0, *itertools.accumulate(sizes)]
        begun = [i is not None and seen[i] > 0 for i in which]
        tokens = tokens_of(comm, starts[-1], zigzag, order)
        mine, first = place(comm, tokens, zigzag), sum(tokens[: comm.rank]) // (1 + zigzag)
        yield which, slots, starts, begun, mine, first
        for i, n in zip(which, sizes, strict=True):
            if i is not None:
                seen[i] += n


def prefill_case(comm, rule, layout, pieces, dtype=torch.float32, state_v_first=False, on_device=False, invariant=None):
    """Return (error of the outputs, of the states in the pool, whether other slots are unchanged, this rank's pool)."""
    operator = getattr(allscan, f"zeco_{rule}")
    generator = torch.Generator().manual_seed(0)
    whole = [tensors_of(rule, n, generator) for n in REQUESTS]
    if rule == "ssd":  # one A for all requests
        whole = [(x, dt, whole[0][2], *rest) for x, dt, _, *rest in whole]
    rows, columns = (V, K) if state_v_first or rule == "ssd" else (K, V)
    pool = torch.randn(SLOTS, H, rows, columns, generator=generator).to(comm.device, dtype)
    before, used, states, seen = pool.clone(), set(), {}, dict.fromkeys(range(len(REQUESTS)), 0)
    errors, zigzag = [0.0], layout == "zigzag"
    for which, slots, starts, begun, mine, first in batches(comm, zigzag, pieces):
        parts, expected = [], []
        for i, n in zip(which, torch.tensor(starts).diff().tolist(), strict=True):
            if i is None:
                parts.append(of_tokens(whole[0], slice(0, n)))
                expected.append(reference(rule, parts[-1], None)[0])
                continue
            parts.append(of_tokens(whole[i], slice(seen[i], seen[i] + n)))
            seen[i] += n
            if n:
                o, state = reference(rule, parts[-1], states.get(i))
                expected.append(o)
                states[i] = state.to(dtype).double()
        whole_row = [torch.cat(x, 1) if torch.is_tensor(x[0]) and x[0].ndim > 1 else x[0] for x in zip(*parts)]
        own = [x.to(comm.device) if torch.is_tensor(x) else x for x in of_tokens(whole_row, mine)]
        if on_device:
            slots, begun = torch.tensor(slots, device=comm.device), torch.tensor(begun, device=comm.device)
        options = dict(first_token=first, layout=layout, invariant=invariant)
        options |= dict(state_v_first=True) if state_v_first else {}
        o = serving.prefill(
            operator,
            *own,
            comm=comm,
            pool=pool,
            slots=slots,
            query_start_loc=starts,
            has_initial_state=begun,
            **options,
        )
        if own[0].shape[1]:
            errors.append(relative(o, torch.cat(expected, 1)[:, mine]))
        used |= {int(slot) for slot in slots if slot >= 0}
        for i, slot in zip(which, slots, strict=True):
            if i in states:
                found = pool[int(slot)].mT if state_v_first else pool[int(slot)]
                errors.append(relative(found[None], states[i]))
    comm.check()
    others = [slot for slot in range(SLOTS) if slot not in used]
    return max(errors), torch.equal(pool[others], before[others]), pool.cpu()


@pytest.mark.parametrize(
    "rule, layout, pieces, size, dtype, state_v_first",
    [
        ("gated_delta_rule", "contiguous", 2, 3, torch.float32, True),
        ("kda", "zigzag", 2, 2, torch.bfloat16, False),
        ("gla", "contiguous", 5, 4, torch.float32, False),
        ("simple_gla", "contiguous", 2, 2, torch.float32, True),
        ("ssd", "zigzag", 2, 2, torch.float32, False),
        ("kda", "contiguous", 1, 1, torch.bfloat16, True),
        *[
            pytest.param(rule, layout, 5, 4, dtype, rule in ("kda", "gated_delta_rule"), marks=pytest.mark.slow)
            for rule in RULES
            for layout in ("contiguous", "zigzag")
            for dtype in (torch.float32, torch.bfloat16)
        ],
    ],
)
def test_requests_in_pieces(run, rule, layout, pieces, size, dtype, state_v_first):
    found = run(size, prefill_case, rule, layout, pieces, dtype, state_v_first, on_device=pieces == 2)
    for error, unchanged, pool in found:
        assert error < (2e-5 if dtype == torch.float32 else 6e-3), error
        assert unchanged and torch.equal(pool, found[0][2])


@pytest.mark.parametrize("rule", ["kda", pytest.param("gla", marks=pytest.mark.slow)])
def test_the_same_bits_with_invariant(run, rule):
    """Ranks that begin at multiples of the segment, and a pool whose states are those of one rank."""
    pools = [run(size, aligned_case, rule) for size in (1, 2)]
    assert all(torch.equal(pools[0][0], pool) for pool in pools[1])


def aligned_case(comm, rule):
    tensors = tensors_of(rule, 256, torch.Generator().manual_seed(0))
    pool = torch.zeros(3, H, K, V, device=comm.device)
    mine = place(comm, [256 // comm.size] * comm.size)
    own = [x.to(comm.device) for x in of_tokens(tensors, mine)]
    for _ in range(2):
        serving.prefill(
            getattr(allscan, f"zeco_{rule}"),
            *own,
            comm=comm,
            pool=pool,
            slots=[2, 0],
            query_start_loc=[0, 100, 256],
            invariant=64,
        )
    comm.check()
    return pool.cpu()


def convolution_case(comm, layout, pieces, dtype, transposed):
    """Return (error of the outputs, this rank's pool)."""
    C, n = 10, 3
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(C, 1, n + 1, generator=generator)
    whole = [torch.randn(1, size, C, generator=generator).to(dtype).float() for size in REQUESTS]

    def conv(x):
        padded = F.conv1d(x.mT.float(), weight.to(x.device), padding=n, groups=C)
        return F.silu(padded[..., :-n].mT).to(x.dtype)

    expected, zigzag = [conv(x) for x in whole], layout == "zigzag"
    memory = torch.randn(SLOTS, n, C, generator=generator).to(comm.device, dtype)
    pool = memory.mT if transposed else memory.mT.contiguous()
    seen, slot_of, errors = [0] * len(REQUESTS), {}, [0.0]
    for which, slots, starts, begun, mine, first in batches(comm, zigzag, pieces):
        row, wanted = [], []
        for i, size, slot in zip(which, torch.tensor(starts).diff().tolist(), slots, strict=True):
            part = slice(0, size) if i is None else slice(seen[i], seen[i] + size)
            row.append(whole[i or 0][:, part])
            wanted.append(expected[i or 0][:, part])
            if i is not None:
                seen[i], slot_of[i] = seen[i] + size, slot
        y = serving.convolve(
            conv,
            torch.cat(row, 1)[:, mine].to(comm.device, dtype),
            comm=comm,
            pool=pool,
            slots=slots,
            query_start_loc=starts,
            has_initial_state=begun,
            first_token=first,
            layout=layout,
        )
        wanted = torch.cat(wanted, 1)[:, mine].to(dtype)
        assert y.shape == wanted.shape and y.dtype == dtype
        if y.numel():
            errors.append(relative(y, wanted))
        for i, slot in slot_of.items():
            last = F.pad(whole[i], (0, 0, n, 0))[:, seen[i] : seen[i] + n]
            assert torch.equal(pool[slot].float().cpu(), last[0].mT)  # copies
    return max(errors), pool.cpu()


@pytest.mark.parametrize(
    "layout, pieces, size, dtype, transposed",
    [
        ("contiguous", 5, 4, torch.float32, False),
        ("zigzag", 2, 2, torch.bfloat16, True),
        ("contiguous", 1, 1, torch.float32, True),
        pytest.param("zigzag", 5, 4, torch.float32, True, marks=pytest.mark.slow),
        pytest.param("contiguous", 2, 3, torch.bfloat16, False, marks=pytest.mark.slow),
    ],
)
def test_convolutions_in_pieces(run, layout, pieces, size, dtype, transposed):
    found = run(size, convolution_case, layout, pieces, dtype, transposed)
    for error, pool in found:
        assert error < 1e-6, error
        assert torch.equal(pool, found[0][1])


def negated(x):
    return torch.view_as_complex(x).conj().imag


WRONG = {  # arguments, or their functions of the device, and the message
    "twice": (dict(slots=[1, 1]), "slots must be distinct"),
    "beyond": (dict(slots=[0, 3]), "slots must be below 3"),
    "few": (dict(slots=[0]), "slots must be 2 signed integers"),
    "floats": (dict(slots=[0.0, 1.0]), "slots must be 2 signed integers"),
    "flags": (dict(has_initial_state=[True]), "has_initial_state must be 2 booleans"),
    "flat": (dict(pool=torch.zeros(3, H, K)), "pool must have 4 dimensions"),
    "integers": (dict(pool=torch.zeros(3, H, K, V, dtype=torch.int32)), "pool must be float32"),
    "final": (dict(output_final_state=True), "takes output_final_state from the pool"),
    "none": (dict(slots=None), "slots must be 2 signed integers"),
    "no memory": (dict(pool=torch.zeros(3, H, K, 0)), "pool must have 4 dimensions, none of them empty"),
    "expanded": (dict(pool=lambda where: torch.zeros(1, H, K, V, device=where).expand(3, -1, -1, -1)), "written to"),
    "negated": (dict(pool=lambda where: negated(torch.zeros(3, H, K, V, 2, device=where))), "pool must be written to"),
    "shape": (dict(pool=torch.zeros(3, H, K, V + 1)), "initial_state must have shape"),
    "operator": (dict(operator=torch.add), "operator must be one of allscan.zeco_gla"),
}


def rejected_case(group, name):
    """Return the exceptions of a call that is wrong on rank 1 alone, and of a right one after resync()."""
    with allscan.Communicator(group, timeout=3) as comm:
        tensors = [x.to(comm.device) for x in tensors_of("kda", 5, torch.Generator().manual_seed(0))]
        pool = torch.zeros(3, H, K, V, device=comm.device)
        right = dict(
            comm=comm, pool=pool, slots=[2, 0], query_start_loc=[0, 3, 5 * comm.size], operator=allscan.zeco_kda
        )
        wrong = {k: x.to(comm.device) if torch.is_tensor(x) else x for k, x in WRONG[name][0].items()}
        if callable(wrong.get("pool")):
            wrong["pool"] = wrong["pool"](comm.device)

        def call(operator, **options):
            serving.prefill(operator, *tensors, **options)
            comm.streams.synchronize()
            comm.check()

        call(**right)
        found = [raised(call, **right | (wrong if comm.rank == 1 else {}))]
        comm.resync()
        return [*found, raised(call, **right)]


@pytest.mark.slow(but=("twice", "shape", "none"))
@pytest.mark.parametrize("name", WRONG)
def test_a_rank_with_wrong_arguments(run, name, size=2):
    (first, after), (second, also) = run(size, rejected_case, name)
    assert second[0] in ("ValueError", "TypeError") and WRONG[name][1] in second[1], second
    assert first[0] in ("AllScanRejected", "AllScanTimeout") and WRONG[name][1] in first[1], first
    assert after is also is None


def failing_convolution_case(group):
    """Return the exceptions of a convolution that raises on rank 1, between its two exchanges, and of a call after
    resync(); whether the pool is unchanged in between."""
    with allscan.Communicator(group, timeout=3) as comm:
        x, pool = torch.ones(1, 5, 2, device=comm.device), torch.ones(3, 2, 3, device=comm.device)

        def failing(x):
            raise MemoryError("no memory")

        def call(conv):
            batch = dict(slots=[0], query_start_loc=[0, 5 * comm.size], first_token=5 * comm.rank)
            serving.convolve(conv, x, comm=comm, pool=pool, **batch)
            comm.streams.synchronize()
            comm.check()

        call(torch.neg)
        x += 1
        found = raised(call, failing if comm.rank == 1 else torch.neg)
        unchanged = bool((pool == 1).all())
        comm.resync()
        return found, raised(call, torch.neg), unchanged


@pytest.mark.cpu
def test_a_convolution_that_raises_on_a_rank(run, size=2):
    (first, after, unchanged), (second, also_after, also) = run(size, failing_convolution_case)
    assert second[0] == "MemoryError" and first[0].startswith("AllScan") and "no memory" in first[1], (first, second)
    assert after is also_after is None and unchanged and also


def begun_case(group, debug):
    """Return the exception of a call with has_initial_state that differs on rank 1."""
    with allscan.Communicator(group, timeout=20, debug=debug) as comm:
        tensors = [x.to(comm.device) for x in tensors_of("kda", 5, torch.Generator().manual_seed(0))]
        batch = dict(slots=[2, -1], query_start_loc=[0, 3, 5 * comm.size], has_initial_state=[comm.rank != 1, True])
        pool = torch.zeros(3, H, K, V, device=comm.device)
        return raised(serving.prefill, allscan.zeco_kda, *tensors, comm=comm, pool=pool, **batch)


def test_ranks_that_differ_in_has_initial_state(run, size=2):
    for found in run(size, begun_case, True):
        assert found[0] == "ValueError" and "has_initial_state" in found[1], found


def slots_on_device_case(group, slots):
    """Return (the exception of check() after a call with slots that the host has not looked at, whether the pool is
    unchanged outside of slot 1)."""
    with allscan.Communicator(group, timeout=20) as comm:
        pool = torch.randn(3, H, K, V, device=comm.device)
        before = pool.clone()
        requests = serving._Requests(comm, pool, [0, 1], [0, 3, 5], None)
        requests.slots = torch.tensor(slots, device=comm.device)
        requests.write(requests.read() + 1)
        comm.streams.synchronize()
        found = raised(comm.check)
        comm.resync()
        comm.check()
        return found, torch.equal(pool[0], before[0]) and torch.equal(pool[2], before[2])


@pytest.mark.parametrize("slots", [[1, 1], [1, 3], [1, -1]])
def test_slots_on_the_device(run, slots, size=1):
    ((found, unchanged),) = run(size, slots_on_device_case, slots)
    assert unchanged
    if slots[1] < 0:
        assert found is None
    else:
        assert found[0] == "ValueError" and f"slots[1] is {slots[1]}" in found[1], found


def slots_of(kind, device):
    if kind == "strided":
        return torch.tensor([[2, 1], [0, 1]], device=device)[:, 0]
    return torch.tensor([2, 0], device=device, dtype=getattr(torch, kind))


def same_slots_case(comm, kind):
    """Whether these slots are those of a list."""
    found = []
    for slots in [2, 0], slots_of(kind, comm.device):
        pool = torch.arange(3 * H * K * V, dtype=torch.float32, device=comm.device).view(3, H, K, V)
        requests = serving._Requests(comm, pool, slots, [0, 3, 5], [True, False])
        requests.write(requests.read() + 1)
        found.append(pool)
    comm.check()
    return torch.equal(*found)


@pytest.mark.parametrize("kind", ["strided", "int8", "int64"])
def test_kinds_of_slots(run, kind):
    assert run(1, same_slots_case, kind) == [True]


def large_pool_case(comm, dim):
    """Write and read the states of two slots of a pool whose stride in this dimension is 2**30 numbers, and whose
    memory is that of the few numbers which are touched. Return whether the states are right."""
    shape, strides = [2, 3, 3, 3], [27, 9, 3, 1]
    strides[dim] = 2**30
    memory = torch.empty(2**31 + 2**10, dtype=torch.bfloat16, device=comm.device)
    pool = memory.as_strided(shape, strides)
    states = torch.arange(54.0, device=comm.device).view(shape)
    requests = serving._Requests(comm, pool, [1, 0], [0, 3, 5], None)
    requests.write(states)
    return torch.equal(pool.float()[[1, 0]], states) and torch.equal(requests.read(), states)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_addresses_of_large_pools(run, dim):
    assert run(1, large_pool_case, dim) == [True]


def compiled_case(group):
    """Whether a compiled function with both calls returns what they return, and writes the same states."""
    with allscan.Communicator(group) as comm, torch.no_grad():
        tensors = [x.to(comm.device) for x in tensors_of("kda", 5, torch.Generator().manual_seed(0))]
        batch = dict(comm=comm, slots=[2, 0], query_start_loc=[0, 3, 5 * comm.size], first_token=5 * comm.rank)

        def layer(pool, memory):
            q = serving.convolve(torch.neg, tensors[0].flatten(2), pool=memory, **batch).view_as(tensors[0])
            return 2 * serving.prefill(allscan.zeco_kda, 3 * q, *tensors[1:], pool=pool, **batch)

        torch._dynamo.reset()
        found = []
        for function in layer, torch.compile(layer, backend="aot_eager"):
            pools = [torch.ones(shape, device=comm.device) for shape in ((3, H, K, V), (3, H * K, 2))]
            found.append([function(*pools), *pools])
        return all(map(torch.equal, *found))


@pytest.mark.slow
def test_compiled_functions(run, size=2):
    assert all(run(size, compiled_case))
