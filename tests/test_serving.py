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


def prefill_case(
    group, rule, layout, pieces, dtype=torch.float32, state_v_first=False, on_device=False, invariant=None
):
    """Return (error of the outputs, of the states in the pool, whether other slots are unchanged, this rank's pool)."""
    operator = getattr(allscan, f"zeco_{rule}")
    with allscan.Communicator(group) as comm:
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


def aligned_case(group, rule):
    with allscan.Communicator(group) as comm:
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


def convolution_case(group, layout, pieces, dtype, transposed):
    """Return (error of the outputs, this rank's pool)."""
    C, n = 10, 3
    with allscan.Communicator(group) as comm:
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


WRONG = {  # arguments, and the message
    "twice": (dict(slots=[1, 1]), "slots must be distinct"),
    "beyond": (dict(slots=[0, 3]), "slots must be below 3"),
    "few": (dict(slots=[0]), "slots must be 2 signed integers"),
    "floats": (dict(slots=[0.0, 1.0]), "slots must be 2 signed integers"),
    "flags": (dict(has_initial_state=[True]), "has_initial_state must be 2 booleans"),
    "flat": (dict(pool=torch.zeros(3, H, K)), "pool must be a tensor of 4 dimensions"),
    "integers": (dict(pool=torch.zeros(3, H, K, V, dtype=torch.int32)), "pool must be a tensor of float32"),
    "final": (dict(output_final_state=True), "takes output_final_state from the pool"),
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

        def call(operator, **options):
            serving.prefill(operator, *tensors, **options)
            if comm.device.type == "cuda":
                torch.cuda.synchronize()
            comm.check()

        call(**right)
        found = [raised(call, **right | (wrong if comm.rank == 1 else {}))]
        comm.resync()
        return [*found, raised(call, **right)]


@pytest.mark.slow(but=("twice", "shape", "operator"))
@pytest.mark.parametrize("name", WRONG)
def test_a_rank_with_wrong_arguments(run, name, size=2):
    (first, after), (second, also) = run(size, rejected_case, name)
    assert second[0] in ("ValueError", "TypeError") and WRONG[name][1] in second[1], second
    assert first[0] in ("AllScanRejected", "AllScanTimeout") and WRONG[name][1] in first[1], first
    assert after is also is None


def slots_on_device_case(group, slots):
    """Return (the exception of check() after a call with slots that the host has not looked at, whether the pool is
    unchanged outside of slot 1)."""
    with allscan.Communicator(group, timeout=20) as comm:
        pool = torch.randn(3, H, K, V, device=comm.device)
        before = pool.clone()
        requests = serving._Requests(comm, pool, [0, 1], [0, 3, 5], None)
        requests.slots = torch.tensor(slots, device=comm.device)
        requests.write(requests.read() + 1)
        if comm.device.type == "cuda":
            torch.cuda.synchronize()
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
