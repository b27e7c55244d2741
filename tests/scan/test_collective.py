"""allscan() and AllScan against float64, on CPU ranks or GPUs."""

from __future__ import annotations

import copy
import functools
import pickle
import time
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import allscan
from allscan.base.tiling import transition_tile
from allscan.comm.backwards import AT_ONCE as FWD_EPOCHS_AT_ONCE
from allscan.reference import allscan_reference
from allscan.scan.launcher import PreparedScan
from support.fla import import_fla
from support.scans import ScanCase, error_of, gradient_case, scan_case
from support.values import backend_of_gpus, check_errors, error, inputs, late, raised, value_or_error

SIZES = [1, 2, 4, 8]
CASES = [
    # shape, shape of decay
    ((2, 16, 32), (2, 16)),
    ((3, 5, 7), (3, 5)),
    ((1, 33, 129), (1, 33)),
    ((2, 3, 8, 4), (2, 1)),  # per head, broadcast along one dimension
    ((2, 3, 8, 4), (1, 3, 8)),
    ((4, 6), ()),
    ((2, 1, 1), None),
]


@pytest.mark.slow(but=("shape1", "shape2", "shape4", "shape5"))
@pytest.mark.quick("shape2-decay_shape2-4")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape, decay_shape", CASES)
@pytest.mark.kernels
def test_values(run, size, shape, decay_shape):
    for reverse in (False, True):
        case = ScanCase(shape, decay_shape, reverse=reverse, depth=3, initial=reverse, epochs=2)
        assert max(run(size, scan_case, case)) < 1e-6


@pytest.mark.quick("2")
@pytest.mark.parametrize("protocol", ["sentinel", "signal"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_depths_and_protocols(run, pool, depth, protocol):
    size = min(3, pool.size)
    case = ScanCase((2, 9, 20), (2, 9), depth=depth, protocol=protocol, initial=True, epochs=8)
    assert max(run(size, scan_case, case._replace(most_ms=5))) < 1e-6
    assert max(run(size, scan_case, case._replace(reverse=True))) < 1e-6


@pytest.mark.parametrize("V", [1, 2, 3, 126, 127])
def test_rows_that_do_not_fill_their_words(run, pool, V):
    """Middle ranks forward words by fours, and store nothing outside of ``out``."""
    assert max(run(min(3, pool.size), scan_case, ScanCase((2, 3, V), (2, 3), protocol="sentinel", epochs=3))) < 1e-6


@pytest.mark.parametrize("protocol", ["sentinel", "signal"])
def test_special_values(run, pool, protocol):
    size = min(4, pool.size)
    assert max(run(size, scan_case, ScanCase((2, 8, 40), (2, 8), protocol=protocol, epochs=4, special=True))) < 1e-6


def test_many_epochs_with_stragglers(run, pool):
    size = min(4, pool.size)
    assert max(run(size, scan_case, ScanCase((1, 4, 8), (1, 4), epochs=60, most_ms=4))) < 1e-6


@pytest.mark.slow(but=("decay_shape0", "decay_shape2", "decay_shape3-4"))
@pytest.mark.quick("decay_shape1-2")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("decay_shape", [(2, 5), (2,), (1, 5), ()])
@pytest.mark.kernels
def test_gradients(run, size, decay_shape):
    for reverse in (False, True):
        check_errors(run(size, gradient_case, (2, 5, 6), decay_shape, reverse), 1e-5)


def hop_case(comm, reverse):
    """Use the number 0 as decay, on some ranks or all. Return errors of values and gradients of several different
    calls."""
    errors = []
    for epoch in range(6):
        shape = (2, 5, 6)
        states, decays = inputs(comm, shape, (2, 5), epoch)
        hops = [(epoch + rank) % 3 != 1 or epoch == 0 for rank in range(comm.size)]
        initial = torch.randn(shape, generator=torch.Generator().manual_seed(epoch))
        leaves = [x.double().requires_grad_() for x in states]
        first_leaf = initial.double().requires_grad_()
        given = [torch.zeros_like(d) if hop else d for d, hop in zip(decays, hops, strict=True)]
        prevs = allscan_reference(leaves, given, first_leaf, reverse)
        sum(prev.square().sum() for prev in prevs).backward()

        late(epoch, comm.rank, 5)
        state = states[comm.rank].to(comm.device).requires_grad_()
        start = initial.to(comm.device).requires_grad_()
        decay = 0 if hops[comm.rank] else decays[comm.rank].to(comm.device)
        prev = allscan.allscan(state, decay, comm=comm, initial_state=start, reverse=reverse)
        prev.square().sum().backward()
        first, last = (comm.rank == (comm.size - 1 if reverse == begin else 0) for begin in (True, False))
        zeros = torch.zeros(shape)
        errors += [
            error(prev, prevs[comm.rank]),
            error(state.grad, zeros if last else leaves[comm.rank].grad),
            error(start.grad, first_leaf.grad if first else zeros),
        ]
    return errors


@pytest.mark.quick("4")
@pytest.mark.parametrize("size", SIZES)
def test_neighbour_shift(run, size):
    for reverse in (False, True):
        check_errors(run(size, hop_case, reverse), 1e-5)


def autograd_case(comm):
    """Check autograd beyond a first gradient: it detects writes, other uses are rejected."""
    x = torch.ones(1, 2, 2, device=comm.device, requires_grad=True)
    decay = torch.full((1, 2), 0.5, device=comm.device, requires_grad=True)
    prev = allscan.allscan(x.square(), decay, comm=comm)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(prev.square().sum(), (x, decay), create_graph=True)
    comm.barrier()

    weight = torch.ones(1, 2, 2, device=comm.device, requires_grad=True)
    out = torch.empty_like(x)
    loss = (weight * allscan.allscan(x.detach(), comm=comm, out=out)).sum()
    allscan.allscan(2 * x.detach(), comm=comm, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(ValueError, match="out must be"):
        allscan.allscan(x.detach(), comm=comm, out=out.requires_grad_())


def test_beside_first_gradients(run):
    run(2, autograd_case)


def compiled_case(group, backend, packed):
    """Compile allscan() and halo() in one full graph."""

    def layer(x, decay):
        cuts = torch.tensor([0, x.shape[1] + 1, 2 * x.shape[1]]) if packed else None
        before, _ = allscan.halo((x, x.square()), 1, comm=comm, cu_seqlens=cuts)
        after = allscan.halo(x.half(), 2, comm=comm, reverse=True, cu_seqlens=cuts)
        small = after.float().mean(1, keepdim=True) / 64  # below 1e-5, as the compiler may round to 16 bits elsewhere
        state = (x[:, -2:] + before + small).sin()
        dense = torch.stack([decay, state[:, 0, :2]], 1)
        prev = allscan.allscan(state, decay.sigmoid(), comm=comm)
        prev = allscan.allscan(prev.cos(), 0.5, comm=comm, initial_state=state[:1], reverse=True)
        return allscan.allscan(prev, comm=comm, transition=dense).cos() * x.sum()

    with allscan.Communicator(group) as comm, warnings.catch_warnings():
        warnings.filterwarnings("error", "Dynamo detected")
        torch._dynamo.reset()
        compiled, worst = torch.compile(layer, backend=backend, fullgraph=True), 0.0
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + comm.rank)
            answers = []
            given = torch.randn(1, 3 + step, 6, generator=generator), torch.randn(1, 2, generator=generator)
            for call in (layer, compiled):
                leaves = [x.to(comm.device).clone().requires_grad_() for x in given]
                y = call(*leaves)
                y.square().sum().backward()
                answers.append([y, *(leaf.grad for leaf in leaves)])
            worst = max(worst, *(error(a, b) for a, b in zip(*answers, strict=True)))
        return worst


@pytest.mark.slow(but="True")
@pytest.mark.parametrize("packed", [False, True])
def test_in_compiled_functions(run, packed):
    assert max(run(2, compiled_case, backend_of_gpus(), packed)) < 1e-5


def asynchronous_case(comm):
    """Wait for scans later, in another order, or not at all, between synchronous scans."""
    behind, first = comm.size - 1 - comm.rank, comm.rank == 0
    ones, found = torch.ones(2, 5, 6, device=comm.device), []
    scan = allscan.AllScan(comm, ones.shape)
    for i in range(1, 4):
        early = scan.scan(ones * i, async_op=True)  # nothing else refers to its input
        late = allscan.allscan(ones * 2 * i, 0.5, comm=comm, async_op=True)
        scan.scan(ones, async_op=True)  # never waited for
        found.append(allscan.allscan(ones * 3 * i, comm=comm))
        assert torch.equal(late.wait(), late.wait())
        found += [late.wait() / (2 - 2.0 * 0.5**comm.rank if comm.rank else 1.0), early.wait()]
    wanted = [i * x * (not first) for i in range(1, 4) for x in (3 * comm.rank, 2, comm.rank)]
    right = all(torch.equal(x, torch.full_like(x, float(w))) for x, w in zip(found, wanted, strict=True))
    state = torch.full((2, 5, 6), 3.0, device=comm.device, requires_grad=True)
    prev = allscan.allscan(state, comm=comm, async_op=True).wait()
    (prev * prev).sum().backward()
    gradient = sum(2.0 * 3 * (comm.rank + 1 + i) for i in range(behind))
    right &= torch.equal(state.grad, torch.full_like(state, gradient))
    for wrong in (dict(layout="zigzag"), dict(out=torch.empty(2, 6, device=comm.device))):
        pair = (ones, ones) if "layout" in wrong else ones
        assert raised(allscan.allscan, pair, comm=comm, async_op=True, **wrong)[0] == "ValueError"
    return right, raised(allscan.allscan, ones.cpu().numpy(), comm=comm, async_op=True)[0]


@pytest.mark.parametrize("size", [1, 3])
def test_asynchronous(run, size):
    assert run(size, asynchronous_case) == [(True, "TypeError")] * size


def failing_case(group):
    """The first rank makes no call; the others get an error in wait() or at the next call."""
    comm = allscan.Communicator(group, timeout=4)
    state = torch.ones(1, 8, device=comm.device)
    allscan.allscan(state, comm=comm)

    def waited():
        work = allscan.allscan(state, comm=comm, async_op=True)
        comm.streams.synchronize()
        return work.wait()

    answers = [value_or_error(waited) for _ in range(2)] if comm.rank else []
    dist.barrier(group)
    comm.resync()
    again = allscan.allscan(state, comm=comm, async_op=True).wait().mean().item() == comm.rank
    comm.close()
    return answers, again


def test_an_asynchronous_scan_that_fails(run):
    (first, _), (second, _) = answers = run(2, failing_case)
    assert first == [] and second == ["AllScanTimeout"] * 2 and all(again for _, again in answers)


def transition_case(comm, shape, reverse, from_zero):
    """Return errors of values and of all gradients, with a dense transition like the delta rules' (norm about 1)."""
    generator = torch.Generator().manual_seed(3)
    *lead, K, V = shape

    def normals(*sizes):
        return [torch.randn(*lead, *sizes, generator=generator) for _ in range(comm.size)]

    states, weights, (initial, *_) = normals(K, V), normals(K, V), normals(K, V)
    initial *= not from_zero
    transitions = [x / (2 * K**0.5) for x in normals(K, K)]
    leaves, dense = ([x.double().requires_grad_() for x in some] for some in (states, transitions))
    first_leaf = initial.double().requires_grad_()
    prevs = allscan_reference(leaves, None, first_leaf, reverse, dense)
    sum((w * prev).sum() for w, prev in zip(weights, prevs)).backward()

    own = [x[comm.rank].to(comm.device).requires_grad_() for x in (states, transitions)]
    start = initial.to(comm.device).requires_grad_()
    errors = []
    for factor in range(1, 5):  # another result each time, more often than an inbox has slots
        for leaf in (*own, start):
            leaf.grad = None
        late(len(errors), comm.rank, 3)
        prev = allscan.allscan(
            factor * own[0],
            comm=comm,
            transition=own[1],
            initial_state=None if from_zero else factor * start,
            reverse=reverse,
        )
        (prev * weights[comm.rank].to(comm.device)).sum().backward()
        prev, own[1].grad = prev / factor, own[1].grad / factor
        own[0].grad /= factor
        first, last = (comm.rank == (comm.size - 1 if reverse == begin else 0) for begin in (True, False))
        zero = torch.zeros(())
        errors += [
            error(prev, prevs[comm.rank]),
            error(own[0].grad, zero.expand(shape) if last else leaves[comm.rank].grad),
            error(own[1].grad, zero.expand(*lead, K, K) if last else dense[comm.rank].grad),
        ]
        if not from_zero:
            errors.append(error(start.grad / factor, first_leaf.grad if first else zero.expand(shape)))
    return errors


@pytest.mark.slow(but=("shape0", "shape1-2", "shape2-2", "shape3-2", "shape4-1", "shape5-1"))
@pytest.mark.quick("shape0-2")
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("shape", [(2, 5, 6), (3, 40, 24), (2, 2, 16, 33), (2, 128, 64), (1, 200, 20), (1, 300, 17)])
@pytest.mark.kernels
def test_dense_transitions(run, size, shape):
    for reverse in (False, True):
        check_errors(run(size, transition_case, shape, reverse, not reverse), 1e-5)


def received_case(comm, dense):
    """Return (bytes changed by others in the last rank's memory when they have made a scan and it has not; number of
    tiles)."""
    shape, last = (3, 32, 64), comm.rank == comm.size - 1
    scan = allscan.AllScan(comm, shape, tile=transition_tile(32))
    state, transition = (torch.rand(3, 32, w, device=comm.device) for w in (64, 32))
    words = comm.memory.heap.local(comm.line.pes[comm.rank], 0, comm.memory.heap.arena.size // 4, torch.int32)
    before = words.clone()
    comm.barrier()
    for calls in (not last, last):
        if calls:
            scan.scan(state, transition=transition if dense else None)
        comm.streams.synchronize()
        dist.barrier(comm.group)
        if last and not calls:
            parts = zip(words.split(1 << 20), before.split(1 << 20))
            received = sum(4 * (a != b).sum().item() for a, b in parts if not torch.equal(a, b))
    return (received, scan.num_tiles) if last else None


@pytest.mark.slow(but="True-2")
@pytest.mark.quick("False-2")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dense", [False, True])
def test_a_rank_receives_one_state(run, size, dense):
    """Each tile has an arrival word, too: its low half changes from 0 to 1 here, and the tag stays 0."""
    received, tiles = run(size, received_case, dense)[-1]
    assert received == 4 * 3 * 32 * 64 + 4 * tiles


def infinite_case(comm, K):
    """Return the incoming state for an Inf in the first rank's state, and those of allscan_segments for two segments on
    every rank. Transitions are positive, so that nothing is NaN."""
    transition = torch.full((2, 1, K, K), 0.5, device=comm.device)
    states = torch.ones(2, 1, K, 2, device=comm.device)
    if comm.rank == 0:
        states[0, 0, 0, 0] = float("inf")
    found = allscan.allscan(states[0], comm=comm, transition=transition[0])
    return found, allscan.allscan_segments(states, transitions=transition, comm=comm)[0]


@pytest.mark.parametrize("K", [3, 40])
def test_infinite_values_and_dense_transitions(run, K, size=4):
    """An Inf spreads over its own column alone, also where K is no size of a block."""
    parts = run(size, infinite_case, K)
    for rank in range(1, size):
        found, incoming = parts[rank]
        for state in (found, *incoming):
            assert (state[0, :, 0] == float("inf")).any() and state[0, :, 1].isfinite().all(), rank
            assert not state.isnan().any(), rank


def wrong_transition_case(comm):
    state = torch.zeros(2, 4, 8, device=comm.device)
    dense = torch.zeros(2, 4, 4, device=comm.device)
    with pytest.raises(ValueError, match="not both"):
        allscan.allscan(state, 0.5, comm=comm, transition=dense)
    with pytest.raises(ValueError, match="transition must have shape"):
        allscan.allscan(state, comm=comm, transition=dense[:, :3])
    with pytest.raises(TypeError, match="transition must be float32"):
        allscan.allscan(state, comm=comm, transition=dense.double())
    scan = allscan.AllScan(comm, state.shape, tile=(2, 8))
    with pytest.raises(ValueError, match=r"tiles such as \(16, 32\)"):
        scan.scan(state, transition=dense)


@pytest.mark.cpu
def test_wrong_transitions(run):
    run(2, wrong_transition_case)


def arrays_case(comm):
    states, decays = inputs(comm, (2, 4, 8), (2, 4), 3)
    expected = allscan_reference(states, decays)[comm.rank]
    state, decay = states[comm.rank], decays[comm.rank]
    if comm.device.type == "cpu":
        with pytest.raises(ValueError, match="negative strides"):
            allscan.allscan(state.numpy()[::-1], comm=comm)
        result = allscan.allscan(state.numpy(), decay.numpy(), comm=comm)
        assert isinstance(result, np.ndarray)
        return error(torch.from_numpy(result), expected)
    import cupy

    result = allscan.allscan(cupy.asarray(state.numpy()), cupy.asarray(decay.numpy()), comm=comm)
    assert isinstance(result, cupy.ndarray)
    return error(torch.from_numpy(result.get()), expected)


def test_arrays_of_other_libraries(run):
    assert max(run(2, arrays_case)) < 1e-6


def read_only_case(comm):
    """Read-only arrays are accepted as inputs and rejected as ``out``, also if out is the state itself. If one rank
    alone rejects its first call, the others get an error."""
    state = np.ones((2, 4, 8), np.float32)
    frozen = state.copy()
    frozen.flags.writeable = False
    view = np.ones((2, 4, 8), np.float32)
    view = view[:]
    view.flags.writeable = False
    first = raised(allscan.allscan, state, comm=comm, out=frozen if comm.rank == 1 else state.copy())
    for bad in (frozen, view):
        with pytest.raises(ValueError, match="writeable"):
            allscan.allscan(state, comm=comm, out=bad)
    with pytest.raises(ValueError, match="writeable"):
        allscan.allscan(frozen, comm=comm, out=frozen)
    out = np.zeros_like(state)
    assert allscan.allscan(frozen, frozen[..., 0], comm=comm, out=out, initial_state=frozen) is out
    assert (frozen == 1).all() and (view == 1).all() and (out == comm.rank + 1).all()
    return first


@pytest.mark.cpu
def test_read_only_arrays(run):
    first, second = run(2, read_only_case)
    assert second[0] == "ValueError" and "writeable" in first[1] and "rank 1" in first[1]


class Awaited(torch.Tensor):
    """A tensor without memory, like a functional collective's result."""

    def __new__(cls, x):
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, device=x.device)

    @classmethod
    def __torch_dispatch__(cls, operator, *_, **__):
        raise AssertionError(operator)

    def wait(self):
        return torch.ones(self.shape)


def subclasses_case(comm):
    """Results of functional collectives are rejected; the error names the method that returns a tensor with memory."""
    import torch.distributed._functional_collectives as functional

    reduced = functional.all_reduce(torch.ones(2, 3, 4, device=comm.device), "sum", comm.group)
    found = [raised(allscan.allscan, x, comm=comm) for x in (reduced, Awaited(reduced.wait()))]
    return found, bool(allscan.allscan(reduced.wait(), comm=comm).eq(2 * comm.rank).all())


def test_tensors_of_functional_collectives(run):
    for found, good in run(2, subclasses_case):
        assert good and all("wait()" in text and "to_local" not in text for _, text in found), found


def inference_case(comm, operator):
    """torch cannot save for these gradients: enable_grad inside of inference_mode, or tensors created there. Each
    operator raises before a launch, also on one rank alone; then all go on."""
    if operator in ("zeco_kda", "zeco_gated_delta_rule"):
        import_fla(models=False)
    calls = dict(
        allscan=lambda q, g: allscan.allscan(q[0].transpose(0, 1), g[0, 0, :, 0], comm=comm),
        zigzag=lambda q, g: allscan.allscan((q[0],) * 2, (g[0, :, :, 0],) * 2, comm=comm, layout="zigzag")[0],
        halo=lambda q, g: allscan.halo((q, g), 2, comm=comm)[0],
        packed=lambda q, g: allscan.zeco_gla(q, q, q, g, comm=comm, cu_seqlens=[0, 3, 4 * comm.size])[0],
        zeco_gla=lambda q, g: allscan.zeco_gla(q, q, q, g, comm=comm)[0],
        zeco_kda=lambda q, g: allscan.zeco_kda(q, q, q, g, g.exp()[..., 0], comm=comm)[0],
        zeco_gated_delta_rule=lambda q, g: allscan.zeco_gated_delta_rule(
            q, q, q, g[..., 0], g.exp()[..., 0], comm=comm
        )[0],
        zeco_ssd=lambda q, g: allscan.zeco_ssd(q, g.exp()[..., 0], g[0, 0, :, 0], q, q, 8, comm=comm),
    )
    call = calls[operator]

    def tensors():
        gates = torch.rand(1, 4, 2, 16, device=comm.device)
        return torch.randn(1, 4, 2, 16, device=comm.device), gates if operator in ("allscan", "zigzag") else -gates

    def inside(q, g):
        with torch.inference_mode(), torch.enable_grad():
            call(q.requires_grad_(), g)

    def made_inside():
        with torch.inference_mode():
            return tensors()[1]

    q, g = tensors()
    launches = [scan.epochs for scan in comm.collectives]
    found = [raised(inside, q, g), raised(call, tensors()[0].requires_grad_(), made_inside())]
    assert launches == [scan.epochs for scan in comm.collectives] == []
    alone = raised(call, tensors()[0].requires_grad_(), made_inside() if comm.rank == 1 else g)  # a first call
    with torch.no_grad():
        expected = call(*(x.detach() for x in (q, g)))
    with torch.inference_mode():
        same = torch.equal(call(q, g), expected)
    call(q.requires_grad_(), g).sum().backward()
    found.append(raised(inside, q, g))  # at a later call
    comm.barrier()
    return found, alone, same


@pytest.mark.cpu
@pytest.mark.parametrize(
    "operator",
    ["allscan", "zigzag", "halo", "packed", "zeco_gla", "zeco_kda", "zeco_gated_delta_rule", "zeco_ssd"],
)
def test_gradients_of_inference_tensors(run, operator):
    for rank, (found, alone, same) in enumerate(run(2, inference_case, operator)):
        assert same
        for kind, text in found:
            assert kind == "ValueError" and "inference_mode" in text, (kind, text)
        assert "inference_mode" in alone[1] and (rank == 1 or "rank 1" in alone[1]), alone


def memory_case(group):
    """An AllScan's memory equals size_hint, and is freed by close(), by ``with``, and after a rejection."""
    with allscan.Communicator(group) as comm:
        arena, shape = comm.memory.heap.arena, (3, 40, 24)
        free, buffers = arena.free_bytes, len(comm.memory._buffers)
        for options in ({}, {"depth": 1}, {"protocol": "put"}, {"tile": (8, 8), "max_ctas": 2}):
            hint = allscan.AllScan.size_hint(comm, shape, **options)
            with allscan.AllScan(comm, shape, **options) as scan:
                assert scan.workspace_bytes == hint == free - arena.free_bytes, options
                state = torch.rand(shape, device=comm.device)
                scan.scan(state)
            assert scan.closed and arena.free_bytes == free and len(comm.memory._buffers) == buffers
            with pytest.raises(RuntimeError, match="this AllScan is closed"):
                scan.scan(state)
            scan.close()
        with pytest.raises(TypeError, match="depth must be an integer"):
            allscan.AllScan(comm, shape, depth=4 / 2)
        with pytest.raises(MemoryError, match="arena is full"):
            allscan.AllScan(comm, (1 << 20, 64, 64))
        mine = (4, 8, 8 + comm.rank)
        assert "different arguments" in raised(allscan.AllScan, comm, mine)[1]
        wrong = raised(allscan.AllScan, comm, (4, 8) if comm.rank else (8,))
        assert wrong[0] == "ValueError" and ("must be [..., K, V]" in wrong[1]), wrong  # also on rank 1
        assert arena.free_bytes == free and not comm.collectives
        kept = allscan.AllScan(comm, shape)
        if comm.rank == 0:
            answer = raised(kept.close)
        else:
            answer = raised(comm.barrier)
        assert answer[0] == "AllScanOutOfStep" and "different calls" in answer[1], answer
        comm.resync()
    assert arena.free_bytes == free


@pytest.mark.quick
def test_memory_comes_back(run):
    run(2, memory_case)


def options_case(comm):
    """Check a number as decay, out= that is the state itself, non-contiguous input, a custom tile, a DeviceMesh."""
    states, _ = inputs(comm, (3, 8, 16), None, 5)
    mine = states[comm.rank].to(comm.device)
    expected = allscan_reference(states, [0.5] * comm.size)[comm.rank]
    assert error(allscan.allscan(mine, 0.5, comm=comm), expected) < 1e-6
    strided = mine.transpose(1, 2).contiguous().transpose(1, 2)
    assert error(allscan.allscan(strided, 0.5, comm=comm), expected) < 1e-6
    for tile in ((8, 16), (2, 4), (16, 32)):
        scan = allscan.AllScan(comm, mine.shape, tile=tile)
        assert scan.workspace_bytes >= 2 * scan.depth * mine.numel() * 4
        assert error(scan.scan(mine, 0.5), expected) < 1e-6
    buffer = mine.clone()
    assert allscan.allscan(buffer, 0.5, comm=comm, out=buffer) is buffer
    return error(buffer, expected)


def test_options(run):
    assert max(run(2, options_case)) < 1e-6


def channel_case(group):
    """A scan accepts only its own channels, in their direction, on every rank."""
    with (
        allscan.Communicator(group) as comm,
        allscan.AllScan(comm, (2, 8)) as scan,
        allscan.AllScan(comm, (2, 8)) as other,
    ):
        state = torch.ones(2, 8, device=comm.device)
        for channel in (scan.channel(reverse=True), other.channel()):
            with pytest.raises(ValueError, match="from this AllScan and have the direction"):
                scan.scan(state, channel=channel)
        fwd_epoch = scan.fwd_epoch()
        for options in (
            dict(fwd_epoch=state),
            dict(adjoint_of=fwd_epoch.int()),
            dict(fwd_epoch=fwd_epoch, adjoint_of=fwd_epoch),
        ):
            with pytest.raises(ValueError, match="forward epoch|fwd_epoch or adjoint_of"):
                scan.channel(**options)
        assert torch.equal(scan.scan(state, channel=scan.channel(fwd_epoch=fwd_epoch)), comm.rank * state)


@pytest.mark.cpu
def test_channels_of_others(run):
    run(2, channel_case)


def all_are_back(comm):
    """Return whether each forward epoch of two blocks is back; on GPUs torch's backward thread may hold a node slightly
    longer."""
    deadline = time.monotonic() + 60
    while len(comm.fwd_epochs) < 2 * FWD_EPOCHS_AT_ONCE and time.monotonic() < deadline:
        time.sleep(0.01)
    return len({x.data_ptr() for x in comm.fwd_epochs}) == 2 * FWD_EPOCHS_AT_ONCE == len(comm.fwd_epochs)


def fwd_epochs_case(comm):
    """Calls with a pending backward have different forward epochs, which later calls reuse."""
    leaf = torch.ones(2, 8, device=comm.device, requires_grad=True)
    for _ in range(2):
        kept = [allscan.allscan(leaf, comm=comm) for _ in range(FWD_EPOCHS_AT_ONCE + 2)]
        fwd_epochs = [prev.grad_fn.saved[2] for prev in kept]
        assert len({x.data_ptr() for x in fwd_epochs}) == len(kept) and not any(x.data_ptr() % 16 for x in fwd_epochs)
        for prev in reversed(kept):
            (gradient,) = torch.autograd.grad(prev, leaf, torch.ones_like(prev))
            assert torch.equal(gradient, torch.full_like(leaf, comm.size - 1 - comm.rank))
        del kept, fwd_epochs, prev
    assert all_are_back(comm)
    prev = allscan.allscan(leaf, comm=comm)
    for _ in range(2):  # a backward that may run again retains its forward epoch
        torch.autograd.grad(prev, leaf, torch.ones_like(prev), retain_graph=True)
        assert prev.grad_fn.saved[2].data_ptr() not in [x.data_ptr() for x in comm.fwd_epochs]
    comm.resync()
    del prev
    assert all_are_back(comm)
    with (
        mock.patch.object(PreparedScan, "run", side_effect=torch.OutOfMemoryError),
        pytest.raises(torch.OutOfMemoryError),
    ):
        allscan.allscan(leaf, comm=comm)
    assert all_are_back(comm)
    comm.resync()  # the ranks' agreements are dropped: the next call is a first one
    allscan.allscan(leaf.detach(), comm=comm)
    with mock.patch.object(comm.streams, "capturing", lambda: True):  # replays reuse the forward epoch
        prev = allscan.allscan(leaf, comm=comm)
    assert len(comm.fwd_epochs) == 2 * FWD_EPOCHS_AT_ONCE
    prev.sum().backward()


def test_fwd_epochs(run):
    run(2, fwd_epochs_case)


def dispatch_modes_case(comm):
    """The forward pass borrows forward epochs, recomputation does not. The pool is empty in some calls only."""
    save_products = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    decay = torch.full((3,), 0.5, device=comm.device, requires_grad=True)
    gradients = []
    for how in ("kept", "made again", "made again, first forward epochs"):
        if how.endswith("first forward epochs"):
            comm.fwd_epochs.clear()
        leaf = torch.full((3, 4), 1.0 + comm.rank, device=comm.device, requires_grad=True)

        def call(x):
            return allscan.allscan(x.sin(), decay, comm=comm)

        again = functools.partial(checkpoint, call, use_reentrant=False, context_fn=save_products)
        (call if how == "kept" else again)(leaf).square().sum().backward()
        gradients.append((leaf.grad, decay.grad))
        decay.grad = None
        assert len(comm.fwd_epochs) == FWD_EPOCHS_AT_ONCE
    comm.barrier()  # raises if a kernel has given up
    for found in gradients[1:]:
        assert all(map(torch.equal, found, gradients[0])), gradients
    if comm.device.type == "cuda":
        return
    comm.fwd_epochs.clear()
    with FakeTensorMode(), pytest.raises((RuntimeError, TypeError)):  # fake tensors cannot be launched with
        allscan.allscan(torch.ones(3, 4, requires_grad=True), 0.5, comm=comm)
    comm.resync()
    leaf = torch.ones(3, 4, requires_grad=True)
    allscan.allscan(leaf, comm=comm).sum().backward()
    assert torch.equal(leaf.grad, torch.full_like(leaf, comm.size - 1 - comm.rank))


def test_fwd_epochs_and_torchs_dispatch_modes(run):
    run(2, dispatch_modes_case)


def evaluation_first_case(group):
    """A communicator, its workspaces and tables, created in inference mode, work in training."""
    with torch.inference_mode():
        comm = allscan.Communicator(group, timeout=60)
    with comm:
        T, K = 8, 16
        cu_seqlens = [0, 5, T * comm.size]
        x = torch.full((1, T, K), 1.0 + comm.rank, device=comm.device)
        q = x.unflatten(2, (1, K))

        def calls(x, q):
            around = allscan.halo(x, 2, comm=comm, cu_seqlens=cu_seqlens), allscan.allscan(x, 0.5, comm=comm)
            return *around, allscan.zeco_gla(q, q, q, -q, comm=comm, cu_seqlens=cu_seqlens)[0]

        with torch.inference_mode():
            expected = calls(x, q)
        for _ in range(2):
            comm.step()
            leaves = [t.clone().requires_grad_() for t in (x, q)]
            found = calls(*leaves)
            assert all(map(torch.equal, found, expected))
            sum(y.sum() for y in found).backward()
            assert all(leaf.grad.isfinite().all() for leaf in leaves)
            comm.resync()


def test_evaluation_first(run):
    run(2, evaluation_first_case)


def default_device_case(group):
    """torch.set_default_device applies to the caller's tensors only; "meta" has no memory."""
    own = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    with torch.device("cuda" if own.type == "cuda" else "meta"), allscan.Communicator(group) as comm:
        T, K = 8, 16
        cu_seqlens = [0, 5, T * comm.size]
        x = torch.full((1, T, K), 1.0 + comm.rank, device=own)
        q = x.unflatten(2, (1, K))
        before = allscan.halo(x, 1, comm=comm, cu_seqlens=cu_seqlens)
        assert before.device == own and torch.equal(before, torch.full_like(before, comm.rank))
        for packed in (None, cu_seqlens):
            o, _ = allscan.zeco_gla(q, q, q, -q, comm=comm, cu_seqlens=packed)
            assert o.device == own and o.isfinite().all()


def test_default_device(run):
    run(2, default_device_case)


def one_gradient_case(comm, dense):
    """A gradient computed alone equals that computed together with the others."""
    generator = torch.Generator().manual_seed(comm.rank)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(comm.device)

    given = [normal(2, 16, 8), normal(2, 16, 16) / 8 if dense else normal(2, 16).sigmoid(), normal(2, 16, 8)]
    weights, found = normal(2, 16, 8), []
    for wanted in ([0, 1, 2], [0], [1], [2]):
        leaves = [x.clone().requires_grad_(i in wanted) for i, x in enumerate(given)]
        factor = dict(transition=leaves[1]) if dense else dict(decay=leaves[1])
        prev = allscan.allscan(leaves[0], **factor, initial_state=leaves[2], comm=comm)
        found.append(torch.autograd.grad((prev * weights).sum(), [leaves[i] for i in wanted]))
    for i in range(3):
        assert torch.equal(found[1 + i][0], found[0][i])


@pytest.mark.parametrize("dense", [False, True])
def test_the_gradient_of_one_input_alone(run, dense):
    run(2, one_gradient_case, dense)


def mesh_case(group):
    mesh = dist.device_mesh.init_device_mesh(
        "cuda" if torch.cuda.is_available() else "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("sp", "dp")
    )
    with pytest.raises(ValueError, match="one dimension"):
        allscan.Communicator(mesh)
    # sp is strided inside the world; all its groups scan concurrently, with a communicator over all ranks
    with allscan.Communicator(mesh["sp"]) as comm, allscan.Communicator() as world:
        worst = 0.0
        for epoch in range(5):
            for scope, seed in ((comm, 100 * mesh["dp"].get_local_rank()), (world, 7)):
                late(epoch, dist.get_rank(), 10)
                call = functools.partial(allscan.allscan, comm=scope)
                worst = max(worst, error_of(scope, call, (2, 4, 8), seed + epoch))
    return worst


def test_sub_groups_at_work_at_once(run, pool, size=2):
    assert max(run(pool.size, mesh_case)) < 1e-6


def copies_case(group):
    """Return whether a copy of an AllScan is the same one; errors of a pickle, and of closed objects."""
    comm = allscan.Communicator(group)
    scan, other = (allscan.AllScan(comm, (2, 4, 8)) for _ in range(2))
    x = torch.ones(2, 4, 8, device=comm.device)
    scan.scan(x)
    same = copy.deepcopy([scan, scan]) == [scan, scan]
    answers = [raised(pickle.dumps, scan), scan.epochs]
    scan.close()
    answers += [raised(lambda: scan.epochs), raised(scan.channel)]
    comm.close()
    return same, [*answers, raised(lambda: other.epochs), raised(other.channel)]


def test_copies_and_closed_ones(run, size=2):
    for same, (pickled, epochs, *closed) in run(size, copies_case):
        assert same and pickled[0] == "TypeError" and "memory of running processes" in pickled[1] and epochs == (1, 0)
        assert [kind for kind, _ in closed] == ["RuntimeError"] * 4
        assert [text for _, text in closed] == ["this AllScan is closed"] * 2 + ["this Communicator is closed"] * 2


def decays_case(group, debug):
    """Return the errors of decays outside of [0, 1], at a first call and at a later one."""
    with allscan.Communicator(group, debug=debug) as comm:
        state, wrong = torch.ones(2, 4, 8, device=comm.device), []
        for decay in (-0.5, 1.5, float("nan"), 10**400):
            wrong.append(raised(allscan.allscan, state, decay, comm=comm))
        for value in (-0.5, 1.5, float("nan")):
            decay = torch.ones(2, 4, device=comm.device)
            decay[1, 3] = value
            wrong.append(raised(allscan.allscan, state, decay, comm=comm))
        allscan.allscan(state, torch.ones(2, 4, device=comm.device), comm=comm)
        later = raised(allscan.allscan, state, torch.full((2, 4), -1.0, device=comm.device), comm=comm)
        if later:
            comm.resync()
        return wrong, later


@pytest.mark.parametrize("debug", [False, True])
def test_decays_that_are_rejected(run, debug, size=2):
    """A decay is a factor in [0, 1]; a logarithm, NaN or a growing one raises on every rank."""
    for wrong, later in run(size, decays_case, debug):
        assert all(answer[0] == "ValueError" and "decay must be" in answer[1] for answer in wrong), wrong
        assert (later is not None) == debug


def zigzag_decays_case(comm, of):
    """Return the errors of pairs in the zigzag layout of which one rank's one decay is out of range."""
    states = [torch.ones(2, 4, 8, device=comm.device) for _ in range(2)]
    decays = [torch.ones(2, 4, device=comm.device) for _ in range(2)]
    if not comm.rank:
        decays[of] = 2 * decays[of]
    answers = [raised(allscan.allscan, states, decays, comm=comm, layout="zigzag")]
    decays = [x.clamp(max=1.0) for x in decays]
    found = allscan.allscan(states, decays, comm=comm, layout="zigzag")
    return answers, [x[0, 0, 0].item() for x in found]


@pytest.mark.parametrize("of", [0, 1])
def test_wrong_decays_in_the_zigzag_layout(run, of, size=2):
    for rank, (answers, found) in enumerate(run(size, zigzag_decays_case, of)):
        assert answers[0][0] == "ValueError" and "decay must be in [0, 1]" in answers[0][1]
        assert found == [float(rank), float(2 * size - 1 - rank)]


def checkpointed_checks_case(comm):
    """Return the gradients of a first call and of a later one in selective activation checkpointing, with a comparison
    and views of the caller's that are saved."""
    saved = torch.ops.aten.ge.Scalar, torch.ops.aten.slice.Tensor, torch.ops.aten.select.int
    policy = functools.partial(create_selective_checkpoint_contexts, [*saved])
    generator = torch.Generator().manual_seed(comm.rank)
    x = torch.rand(2, 4, 8, generator=generator).to(comm.device).requires_grad_()
    q = torch.randn(1, 64, 2, 16, generator=generator).to(comm.device)

    def layer(x, q):
        prev = allscan.allscan(x, x.detach()[..., 0], comm=comm)
        o, _ = allscan.zeco_gla(q, q, q, -q.abs(), comm=comm)
        parts = (x[..., :3] * x[..., 3:6]).sum() * (x.select(0, 1) * prev.select(0, 0)).sum()
        return (torch.where(x >= 0.5, prev + x * x, 2 * prev)).sum() + (o * (q >= 0.5)).sum() + parts

    answers = []
    for _ in range(2):
        loss = checkpoint(layer, x, q, use_reentrant=False, context_fn=policy)
        answers += torch.autograd.grad(loss, x)
    return torch.equal(*answers)


def test_first_calls_in_selective_checkpointing(run, size=2):
    """Checks of values and new workspaces run at the first call alone: recomputation must not count their operators."""
    assert all(run(size, checkpointed_checks_case))


def max_ctas_case(group):
    number = dist.get_rank(group)
    with allscan.Communicator(group, max_ctas=8 - 2 * number) as comm:
        x = torch.ones(1, 64, 2, 16, device=comm.device)
        allscan.zeco_gla(x, x, x, -x, comm=comm)
        allscan.allscan(torch.ones(2, 4, 8, device=comm.device), comm=comm)
        return comm.max_ctas


def test_ranks_with_different_max_ctas(run, size=2):
    """The smallest number counts, as on GPUs with different numbers of multiprocessors."""
    assert run(size, max_ctas_case) == [6, 6]
