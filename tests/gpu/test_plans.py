"""Launch plans on GPUs: launches by the package pass compiled kernels the same arguments as Triton's launcher."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from triton import knobs

import allscan
from allscan.tokens import partition
from support.fla import import_fla
from support.packed import calls, differ, forward_and_backward
from support.values import late, raised, relative

pytestmark = pytest.mark.gpu


@contextlib.contextmanager
def launch_hook(found):
    """Install a launch hook, as profilers do: every launch then goes through Triton, and its name is appended to
    ``found``."""

    def enter(metadata):
        found.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(enter)
    try:
        yield
    finally:
        knobs.runtime.launch_enter_hook.remove(enter)


def leaves(device, dtype=torch.bfloat16, T=300, H=4, K=64, V=128, off=0):
    """Return q, k, v, g, each at an offset of ``off`` elements in its memory."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(1, T, H, width, generator=generator) for width in (K, K, V, K)]
    made[3] = torch.nn.functional.logsigmoid(made[3])
    found = []
    for i, x in enumerate(made):
        room = torch.empty(x.numel() + off, device=device, dtype=torch.float32 if i == 3 else dtype)
        room[off:] = x.flatten()
        found.append(room[off:].view(x.shape).requires_grad_())
    return found


def step(comm, tensors, cu_seqlens=None, layout="contiguous", recompute=True):
    """Return zeco_gla's o and final state, an allscan and a halo of these, and gradients."""
    sequences = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    H, K, V = tensors[0].shape[2], tensors[0].shape[3], tensors[2].shape[3]
    initial = torch.ones(sequences, H, K, V, device=comm.device).requires_grad_()
    o, state = allscan.zeco_gla(
        *tensors,
        comm=comm,
        initial_state=initial,
        output_final_state=True,
        cu_seqlens=cu_seqlens,
        layout=layout,
        recompute=recompute,
    )
    o *= 2.0  # changing a result in place is allowed
    prev = allscan.allscan(state[0], state[0, ..., 0].sigmoid(), comm=comm)
    before = allscan.halo(o, 3, comm=comm)
    loss = o.float().sum() + state.sum() + prev.sum() + before.float().sum()
    return [o, state, prev, before, *torch.autograd.grad(loss, [*tensors, initial])]


def same(found, expected):
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def through_triton_case(comm):
    for dtype in (torch.bfloat16, torch.float32):
        packed = [0, 100, 100, comm.size * 300]
        for given in ((None,), (packed,), (None, "zigzag"), (None, "contiguous", False)):
            tensors, names = leaves(comm.device, dtype), []
            step(comm, tensors, *given)
            found = step(comm, tensors, *given)  # with the kernels that the first call has compiled
            with launch_hook(names):
                same(step(comm, tensors, *given), found)
            kernels = {name for name in names if name.endswith("_kernel")}
            wanted = {"operands_kernel", "scan_kernel", "grad_kernel", "state_passing_kernel", "da_kernel"}
            assert wanted <= kernels, kernels
            assert len(names) >= 17 - 2 * (given[-1] is False)  # 7 + 10; recompute=False: up to 2 fewer
            same(step(comm, tensors, *given), found)
    comm.barrier()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.kernels
def test_the_same_bits_as_through_triton(run, size):
    run(size, through_triton_case)


def unaligned_case(comm):
    aligned, unaligned = leaves(comm.device), leaves(comm.device, off=1)
    expected, other = step(comm, aligned), step(comm, unaligned)  # Triton compiles other kernels for these
    assert all(relative(a, b) < 5e-3 for a, b in zip(other, expected, strict=True))
    for _ in range(2):
        same(step(comm, unaligned), other)
        same(step(comm, aligned), expected)
    comm.barrier()


def test_addresses_that_are_no_multiples_of_16(run, size=2):
    run(size, unaligned_case)


def reused_memory_case(comm):
    """Free and overwrite tensors around calls, on two streams."""
    tensors = leaves(comm.device)
    expected = step(comm, tensors)
    expected = step(comm, tensors)
    torch.cuda.synchronize()
    streams = torch.cuda.current_stream(), torch.cuda.Stream()
    for i in range(200):
        stream = streams[i // 20 % 2]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            trash = [torch.full((n,), float("nan"), device=comm.device) for n in (1 << 10, 1 << 16, 1 << 20)]
            found = step(comm, tensors)
            del trash
            trash = [torch.full((n,), float("nan"), device=comm.device) for n in (1 << 20, 1 << 16, 1 << 18)]
            same(found, expected)
            del found, trash
        torch.cuda.current_stream().wait_stream(stream)
    comm.barrier()


def test_memory_is_not_given_back_too_early(run, size=2):
    run(size, reused_memory_case)


def new_plans_case(group):
    """Each call has new boundaries, so a new plan, on one of two streams that are never joined."""
    with allscan.Communicator(group) as comm:
        tensors, total = leaves(comm.device), comm.size * 300
        cuts = [[0, n, total - n, total] for n in range(10, 40)]
        expected = [step(comm, tensors, cut) for cut in cuts]
        torch.cuda.synchronize()
        with allscan.Communicator(group) as other:  # it has no plans yet
            streams, found = [torch.cuda.Stream(), torch.cuda.Stream()], []
            for i, cut in enumerate(cuts):
                with torch.cuda.stream(streams[i % 2]):
                    found.append(step(other, tensors, cut))
            torch.cuda.synchronize()
            for a, b in zip(found, expected, strict=True):
                same(a, b)
            other.barrier()
        comm.barrier()


def test_new_plans_on_streams_that_are_not_joined(run, size=2):
    run(size, new_plans_case)


def captured_case(comm, layout, recompute):
    """Repeated steps and the caller's graph of one have the same bits."""
    once = functools.partial(step, layout=layout, recompute=recompute)
    tensors = leaves(comm.device)
    # without its autograd graph, in which torch records that the leaves were used on another stream
    expected = [x.detach() for x in once(comm, tensors)]
    for _ in range(12):
        same(once(comm, tensors), expected)
    graph = torch.cuda.CUDAGraph()
    comm.barrier()
    with torch.cuda.graph(graph):
        captured = once(comm, tensors)
    for _ in range(3):
        graph.replay()
    same(captured, expected)
    same(once(comm, tensors), expected)
    comm.barrier()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("layout, recompute", [("contiguous", True), ("contiguous", False), ("zigzag", True)])
@pytest.mark.kernels
def test_the_same_bits_in_the_callers_graph(run, size, layout, recompute):
    run(size, captured_case, layout, recompute)


def stragglers_case(comm, calls):
    """Call all operators with plans: the same bits, with stragglers."""
    fla = importlib.util.find_spec("fla") is not None

    def call(comm):
        tensors, packed = leaves(comm.device), [0, 100, 100, comm.size * 300]
        found = [x for given in ((None,), (packed,), (None, "zigzag")) for x in step(comm, tensors, *given)]
        found += step(comm, tensors, recompute=False) + step(comm, leaves(comm.device, torch.float32))
        if fla:
            q, k, v, g = leaves(comm.device, K=64, V=64)
            beta = torch.ones(1, 300, 4, device=comm.device)
            of_rules = (allscan.zeco_kda, g), (allscan.zeco_gated_delta_rule, g[..., 0].contiguous())
            kinds = ("fla", "contiguous"), ("allscan", "contiguous"), ("allscan", "zigzag")
            for (operator, gate), (chunk, layout) in itertools.product(of_rules, kinds):
                how = dict(comm=comm, output_final_state=True, chunk=chunk, layout=layout)
                o, state = operator(q, k * 0.1, v, gate, beta, **how)
                found += [o, state, *torch.autograd.grad(o.float().sum() + state.sum(), [q, k, v, g])]
        return [x.detach() for x in found]

    if fla:
        import_fla()
    expected = call(comm)
    for i in range(calls):
        late(i, comm.rank, 20)
        same(call(comm), expected)
        torch.cuda.synchronize()
    comm.barrier()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.kernels
def test_the_same_bits_with_stragglers(run, size):
    run(size, stragglers_case, 20)


def profiled_case(comm):
    tensors = leaves(comm.device)
    for _ in range(12):
        step(comm, tensors)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step(comm, tensors)
        torch.cuda.synchronize()
    comm.barrier()
    return {event.key for event in seen.key_averages()}


def test_profilers_name_the_kernels(run, size=2):
    for names in run(size, profiled_case):
        assert {"operands_kernel", "scan_kernel", "grad_kernel", "strong_decay_kernel"} <= names, names


def many_calls_case(comm, dtype, D, calls):
    """Return how many calls of zeco_gla, forward and backward, have other bits than the first call with the same
    boundaries. Each of the boundaries recurs after all others."""
    tensors, total = leaves(comm.device, dtype, T=1024, K=D, V=D), comm.size * 1024
    cuts = [None, *([0, n, 2 * n, total] for n in range(100, 400))]  # more than a communicator retains
    first, different = {}, torch.zeros((), dtype=torch.int64, device=comm.device)
    for i in range(calls):
        cut = i // 2 % len(cuts)  # twice in a row: with a new plan, and with one that has run
        packed = dict(cu_seqlens=cuts[cut], first_token=comm.rank * 1024) if cuts[cut] else {}
        o, _ = allscan.zeco_gla(*tensors, comm=comm, **packed)
        found = [o.detach(), *torch.autograd.grad(o.square().sum(), tensors)]
        sums = torch.stack([x.double().sum() for x in found] + [x.double().square().sum() for x in found])
        different += (first.setdefault(cut, sums) != sums).any()
    comm.barrier()
    return int(different)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dtype, D", [(torch.float32, 64), (torch.bfloat16, 128)])
def test_3000_calls_give_the_same_bits(run, size, dtype, D):
    assert run(size, many_calls_case, dtype, D, 3000) == [0] * size


def two_streams_case(group, kept):
    """Return the calls that differ from calls on one stream. The first call with new tables waits behind a backlog on
    one stream; the same call follows at once on another. ``kept``: how many tables a communicator retains; freed ones
    are overwritten."""
    import_fla(False)
    with mock.patch.object(partition, "CACHE_SIZE", kept), allscan.Communicator(group, timeout=30) as comm:
        T, wrong = 256, []
        streams = [torch.cuda.Stream() for _ in range(2)]
        for name, call in calls(comm, T, K=64).items():
            for i in range(8):
                lengths = None if i == 0 else [0, 20 + 7 * i, 20 + 7 * i, T * comm.size]
                found = []
                torch.cuda.synchronize()
                for stream in streams:
                    with torch.cuda.stream(stream):
                        if stream is streams[0]:
                            torch.cuda._sleep(120_000_000)  # 60 ms
                        found.append(forward_and_backward(call, lengths))
                        trash = [torch.full((n,), -1, device=comm.device) for n in (1 << 8, 1 << 12, 1 << 16)]
                        del trash
                torch.cuda.synchronize()
                expected = forward_and_backward(call, lengths)
                torch.cuda.synchronize()
                if any(differ(x, expected) for x in found):
                    wrong.append((*name, lengths))
        comm.barrier()
        return wrong


@pytest.mark.parametrize("kept", [256, 2])
@pytest.mark.parametrize("size", [1, 2])
def test_two_streams_share_tables(run, size, kept):
    """Two calls may share memory only if their order does not depend on a scan launched first; freed memory may be read
    by another stream. Covers every operator, layout and number of ranks."""
    assert run(size, two_streams_case, kept) == [[]] * size


def captured_lengths_case(group):
    """Return the error of a captured call with cu_seqlens on the GPU, and whether one with cu_seqlens on the CPU is
    captured and replayed."""
    import_fla(False)
    with allscan.Communicator(group, timeout=30) as comm:
        T, answers = 256, {}
        for name, call in calls(comm, T, K=64).items():
            lengths = torch.tensor([0, 100, T * comm.size])
            with torch.no_grad():
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    expected = [call(lengths)[0] for _ in range(3)][-1]
                torch.cuda.current_stream().wait_stream(side)
                on_gpu = lengths.to(comm.device)
                comm.barrier()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    rejected = raised(call, on_gpu)
                    result = call(lengths)[0]
                graph.replay()
                torch.cuda.synchronize()
                answers[name] = rejected, torch.equal(result, expected)
        comm.barrier()
        return answers


@pytest.mark.parametrize("size", [1, 2])
def test_a_capture_has_lengths_of_the_host(run, size):
    for answers in run(size, captured_lengths_case):
        for name, (rejected, same_bits) in answers.items():
            assert rejected and rejected[0] == "ValueError" and "cannot be captured" in rejected[1], (name, rejected)
            assert same_bits, name


def dropped_work_case(comm, replays):
    """Drop a Work, begun before a capture, inside of it without a wait; wait for another one inside: a graph cannot, so
    this raises RuntimeError, and the capture goes on."""
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(4, 64, 64, generator=generator) for _ in range(comm.size)]
    state, expected = states[comm.rank].to(comm.device), sum(states[: comm.rank], torch.zeros(4, 64, 64))
    allscan.allscan(state, comm=comm, async_op=True).wait()
    allscan.allscan(state, comm=comm)
    works = [allscan.allscan(state, comm=comm, async_op=True) for _ in range(2)]
    found = [work.result for work in works]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        del works[0]
        said = raised(works[0].wait)
        found.append(allscan.allscan(state, comm=comm))
    del works
    for i in range(replays):
        late(i, comm.rank, 10)
        graph.replay()
    torch.cuda.synchronize()
    comm.barrier()
    return said, max(relative(x.cpu(), expected) if comm.rank else float(x.abs().max()) for x in found)


@pytest.mark.parametrize("size", [1, 2])
def test_a_work_that_goes_in_a_capture(run, size):
    for said, error in run(size, dropped_work_case, 200):
        assert said and said[0] == "RuntimeError" and error < 1e-6, (said, error)
