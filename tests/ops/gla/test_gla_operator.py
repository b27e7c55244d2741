"""zeco_gla over the ranks against the token-by-token recurrence in float64 over the global sequence."""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
import weakref
from decimal import Decimal
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch._subclasses import FakeTensorMode

import allscan
from allscan.comm import host_exchange
from allscan.launch.compiled_kernel import Launch
from allscan.launch.streams import Streams
from allscan.ops.carrier import record_call, register
from allscan.ops.gla import GLA, gla_operator
from allscan.ops.operator import Asked, Call
from allscan.shmem_kernels.blocks import rounded_to_tf32
from allscan.tokens import packing
from support.gla import BF16, F16, F32, LIMIT, NAMES, GLACase, Whole, check, gla_case
from support.values import backend_of_gpus, check_answers, check_errors, place, raised, relative


@triton.jit
def round_kernel(p, N: tl.constexpr):
    at = p + tl.arange(0, N)
    tl.store(at, rounded_to_tf32(tl.load(at)))


def rounded(group):
    words = [0x7FFFFFFF, 0x7FC00000, 0x7F800000, -0x800000, 0x3F800FFF, 0x3F801000, -0x407FF000, 0]
    x = torch.tensor(words, dtype=torch.int32).to("cuda" if torch.cuda.is_available() else "cpu").view(F32)
    round_kernel[(1,)](x, len(words), num_warps=1)
    return (x.view(torch.int32) & -0x2000).view(F32).tolist()  # the bits that a product uses


def test_rounding_to_tf32(run):
    first, second, *others = run(1, rounded)[0]
    assert first != first and second != second  # NaN, also in GPUs' encoding
    assert others == [float("inf"), float("-inf"), 1.0, 1 + 2**-10, -1 - 2**-10, 0.0]


@pytest.mark.slow(but=("1", "2", "3"))
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.kernels
def test_gradients_and_values(run, size):
    tokens = [(40, 70, 16, 65, 1, 33, 64, 20)[rank] for rank in range(size)]
    check(run(size, gla_case, GLACase(tokens, H=2, V=24, gates="mild")))


@pytest.mark.slow(but=("weak", "strong-1", "zero-1", "mixed", "spots-1"))
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", ["weak", "strong", "zero", "mixed", "spots"])
@pytest.mark.kernels
def test_every_gate_is_exact(run, size, kind):
    check(run(size, gla_case, GLACase([66, 270][:size], B=2, K=32, gates=kind)))


def silent_case(group):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return gla_case(group, GLACase([100], gates="strong"))


@pytest.mark.cpu
def test_what_overflows_and_is_not_used_does_so_in_silence(run):
    check(run(1, silent_case))


@pytest.mark.slow(but=("17", "16", "200", "256"))
@pytest.mark.parametrize(
    "K, V, kind, dtype",
    [
        *((K, V, "mild", F32) for K, V in ((17, 5), (48, 80), (160, 33), (256, 16), (320, 24), (16, 300))),
        # above 128 rows another kernel computes dg's term from states at chunk boundaries; with mild gates it vanishes
        (160, 33, "mild", BF16),
        (200, 20, "weak", F32),
        (200, 20, "weak", BF16),
    ],
)
def test_widths(run, K, V, kind, dtype, size=2):
    check(run(size, gla_case, GLACase([100, 72] if K >= 160 else [30, 35], K=K, V=V, gates=kind, dtype=dtype)), dtype)


@pytest.mark.slow(but=("dtype0-gate_dtype0-m", "dtype1-gate_dtype1-w"))
@pytest.mark.parametrize("kind", ["weak", "mild", "mixed"])
@pytest.mark.parametrize("dtype, gate_dtype", [(BF16, BF16), (BF16, F32), (F16, F16)])
def test_16_bit_inputs(run, kind, dtype, gate_dtype, size=2):
    check(run(size, gla_case, GLACase([40, 150], K=32, V=32, gates=kind, dtype=dtype, gate_dtype=gate_dtype)), dtype)


# Tokens of each rank, and boundaries of packed sequences over all of them
PACKED = {
    "one": ([64], [0, 64]),
    "several on one rank": ([200], [0, 3, 3, 70, 135, 199, 200]),
    "over the cut": ([40, 30], [0, 25, 55, 70]),
    "at the cut": ([64, 64], [0, 64, 128]),
    "one-token tails": ([33, 40], [0, 1, 32, 33, 34, 72, 73]),
    "empty ones": ([20, 20], [0, 0, 20, 20, 20, 39, 40, 40]),
    "one over all": ([30, 20, 25], [0, 75]),
    "over three, between others": ([40, 70, 10, 50], [0, 13, 39, 125, 126, 170]),
    "several a rank, uneven": ([90, 5, 70, 140], [0, 10, 20, 91, 94, 95, 96, 230, 300, 305]),
}


@pytest.mark.slow(but=("1-one", "2-over", "2-empty", "3"))
@pytest.mark.quick("2-at the cut")
@pytest.mark.parametrize("size, name", [(len(tokens), name) for name, (tokens, _) in PACKED.items()])
def test_packed(run, size, name):
    tokens, lengths = PACKED[name]
    for kind in ("mild", "weak"):
        check(run(size, gla_case, GLACase(tokens, H=2, gates=kind, lengths=lengths)))


@pytest.mark.slow(but=("1", "2-lengths4", "2-None"))
@pytest.mark.parametrize("kind", ["weak", "mixed"])
@pytest.mark.parametrize(
    "size, lengths, zigzag, dtype",
    [
        (1, None, False, BF16),
        (3, None, False, F32),
        (2, [0, 25, 25, 55, 110], False, F32),
        (2, None, True, F16),
        (2, [0, 25, 55, 110], True, F32),
    ],
)
def test_operands_that_are_kept(run, size, kind, lengths, zigzag, dtype):
    tokens, B = [70, 40, 129][:size], 1 if lengths else 2
    case = GLACase(tokens, B=B, H=2, K=24, gates=kind, dtype=dtype, lengths=lengths, zigzag=zigzag, recompute=False)
    check(run(size, gla_case, case), dtype)


def kept_case(group, dtype):
    """Call with saved operands, with recomputed operands, and without backward. Return the kernels of each pass, the
    number of saved words, and results."""
    launched, made, answers = [], [], []
    with allscan.Communicator(group) as comm, pytest.MonkeyPatch.context() as patch:
        call_launch, make = Launch.__call__, gla_operator.PreparedGLA.forward
        patch.setattr(Launch, "__call__", lambda self, *x: (launched.append(self.kernel), call_launch(self, *x))[1])
        patch.setattr(gla_operator.PreparedGLA, "forward", lambda self, *x: (made.append(make(self, *x)), made[-1])[1])
        whole = Whole(GLACase([70], B=2, H=2, V=24, gates="spots", dtype=dtype), comm.device)

        def names():
            found = [getattr(kernel, "fn", kernel).__name__ for kernel in launched]
            launched.clear()
            return found

        def pass_of(call):
            answer = call()
            return names(), made[-1][2].numel(), answer

        mine = place(comm, [40, 30][: comm.size])
        for recompute in (True, False):
            call = functools.partial(allscan.zeco_gla, recompute=recompute)
            *forward, backward = pass_of(functools.partial(whole.forward, comm, mine, call))
            answers.append([forward, pass_of(lambda backward=backward: [x.detach() for x in backward()])])
        x = whole.q[:, mine].requires_grad_()
        with torch.no_grad():
            answers.append(pass_of(lambda: allscan.zeco_gla(x, x, x, -x.abs(), comm=comm, recompute=False))[:2])
        x = x.detach()
        answers.append(pass_of(lambda: allscan.zeco_gla(x, x, x, -x.abs(), comm=comm, recompute=False))[:2])
    return answers


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_what_is_kept(run, size, dtype):
    for rank, answers in enumerate(run(size, kept_case, dtype)):
        (again, of_again), (kept, of_kept), *without_gradients = answers
        operands = {"operands_kernel", "strong_decay_kernel"}
        assert operands <= set(again[0]) and again[0] == kept[0] and again[0].count("operands_kernel") == 1
        # overlaps with the scan, if there is one that takes longer than the rest
        behind = again[0].index("operands_kernel") > again[0].index("state_passing_kernel")
        if size > 1:  # the last rank sends nothing, so its scan does not wait for its segments
            assert (again[0].index("scan_kernel") < again[0].index("state_passing_kernel")) == (rank == size - 1)
            assert of_again[0].index("scan_kernel") > of_again[0].index("state_passing_kernel")
        assert behind == (size > 1) and again[0][0] == ("keys_kernel" if behind else "operands_kernel")
        assert operands <= set(of_again[0]) and of_again[0].count("operands_kernel") == 1
        assert of_kept[0][0] == "state_kernel" and of_kept[0] == [x for x in of_again[0] if x not in operands]
        words = 2 * [40, 30][rank] * 2 * ((16 + 16) * dtype.itemsize + 64 * 4) // 4
        words += 2 * 2 * (16 + 1)  # gates of chunks, and marks of strong ones
        assert 0 <= kept[1] - again[1] - words < 5 * 64
        first = 0 if dtype == F32 else 1  # of bfloat16 inputs, o is more exact with the saved A
        same = [(a, b) for a, b in zip(of_again[2][first:], of_kept[2][first:], strict=True) if not torch.equal(a, b)]
        # keys_kernel computes the saved k_out, and operands_kernel the recomputed one
        assert all(relative(a, b) < (1e-6 if dtype == F32 else 2e-3) for a, b in same) and (not same or size > 1)
        for names, words in without_gradients:
            assert words < again[1] and not {"da_kernel", "grad_kernel"} & set(names)


def unwritten_case(comm, recompute):
    """Return how many words of saved tensors backward has changed. Autograd, and torch.compile of the custom operator,
    require none."""
    saved = []
    whole = Whole(GLACase([300], gates="mild"), comm.device)
    mine = place(comm, [170, 130])
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append((x, x.clone())) or x, lambda x: x):
        backward = whole.forward(comm, mine, functools.partial(allscan.zeco_gla, recompute=recompute))
    backward()
    return sum((x.view(torch.int32) != before.view(torch.int32)).sum().item() for x, before in saved)


@pytest.mark.parametrize("recompute", [True, False])
def test_backward_writes_to_nothing_that_is_saved(run, recompute, size=2):
    assert run(size, unwritten_case, recompute) == [0, 0]


def first_token_case(group, debug):
    """Use new cu_seqlens and new splits of them; with first_token there is no host exchange."""
    with allscan.Communicator(group, debug=debug) as comm:
        for i, cuts in enumerate(([20, 50], [30, 50], [31, 50])):
            edges = [0, *cuts[: comm.size - 1], 64]
            tokens = [b - a for a, b in zip(edges, edges[1:])]
            whole = Whole(GLACase([64], lengths=[0, 11, 34 + 4 * (i > 1), 64], seed=i), comm.device)
            mine = place(comm, tokens)
            told = functools.partial(allscan.zeco_gla, first_token=mine.start)
            before = dict(host_exchange._exchanges)
            answers = [x.detach() for x in whole.ours(comm, mine, told)]
            expected = [x[:, mine] if n in (0, 2, 3, 4, 5) else x for n, x in enumerate(whole.reference())]
            assert max(relative(answers[n], expected[n]) for n in (0, 2, 3, 4, 5)) < LIMIT[F32]
            halo = allscan.halo(whole.v[:, mine], 3, comm=comm, cu_seqlens=whole.lengths, first_token=mine.start)
            for n, t in enumerate(range(mine.start - 3, mine.start)):
                same = any(a <= t and mine.start < b for a, b in zip(whole.lengths, whole.lengths[1:]))
                assert torch.equal(halo[:, n], whole.v[:, t] if same else torch.zeros_like(halo[:, n]))
            if i and not debug:
                assert host_exchange._exchanges == before
        wrong = [dict(first_token=-1), dict(first_token=1.0)]
        if debug:  # a middle rank cannot detect it by itself
            wrong.append(dict(first_token=mine.start + (comm.rank == 1)))
        messages = [raised(allscan.halo, whole.v[:, mine], 3, comm=comm, cu_seqlens=whole.lengths, **w) for w in wrong]
        return messages


@pytest.mark.parametrize("size, debug", [(2, False), (3, False), (3, True)])
def test_first_token(run, size, debug):
    for messages in run(size, first_token_case, debug):
        assert [kind for kind, _ in messages] == ["ValueError", "TypeError", "ValueError"][: 2 + debug], messages
        assert not debug or "are not contiguous" in messages[2][1]


class Layer(torch.nn.Module):
    def __init__(self, comm, H, D, recompute):
        super().__init__()
        torch.manual_seed(0)
        self.H, self.qkvg = H, torch.nn.Linear(H * D, 4 * H * D)
        self.options = dict(comm=comm, recompute=recompute)

    def forward(self, x, cu_seqlens=None):
        q, k, v, g = (t.unflatten(-1, (self.H, -1)) for t in self.qkvg(x).chunk(4, -1))
        o, _ = allscan.zeco_gla(q, k, v, F.logsigmoid(g), cu_seqlens=cu_seqlens, **self.options)
        return x + o.flatten(-2)


def pipeline_case(group, tokens):
    """Run three micro-batches in a pipeline stage's order: backward of the first before forward of the last."""
    with allscan.Communicator(group, debug=True) as comm:
        wholes = [Whole(GLACase(tokens, H=2, V=24, gates="mild", seed=seed), comm.device) for seed in range(3)]
        mine, results = place(comm, tokens), []
        waiting = [whole.forward(comm, mine) for whole in wholes[:2]]
        results.append(waiting[0]())
        waiting.append(wholes[2].forward(comm, mine))
        results += [backward() for backward in waiting[1:]]
        return [
            {NAMES[i]: relative(actual[i], whole.reference()[i][:, mine]) for i in (0, 2, 3, 4, 5)}
            for whole, actual in zip(wholes, results, strict=True)
        ]


def test_interleaved_micro_batches(run, size=2):
    for answers in run(size, pipeline_case, [40, 33]):
        check(answers)


def compiled_case(comm, packed, recompute):
    """Return gradients of a layer that is eager, compiled as one graph, and under activation checkpointing."""
    from torch.utils.checkpoint import checkpoint

    layer = Layer(comm, 2, 16, recompute).to(comm.device)
    T = 40
    lengths = torch.tensor([0, 30, 40 * comm.size - 7, 40 * comm.size], device=comm.device) if packed else None
    torch._dynamo.reset()
    backend = backend_of_gpus() if packed else "aot_eager"
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    forms = {
        "plain": layer,
        "compiled": compiled,
        "checkpointed": lambda x, cu: checkpoint(layer, x, cu, use_reentrant=False),
    }
    results = {}
    for name, form in forms.items():
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(1, T * comm.size, 32, generator=generator)[:, comm.rank * T :][:, :T]
            x = x.to(comm.device).requires_grad_()
            layer.zero_grad()
            y = form(x, lengths)
            y.square().sum().backward()
        results[name] = [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]
    plain = results.pop("plain")
    return {name: max(relative(a, b) for a, b in zip(values, plain)) for name, values in results.items()}


@pytest.mark.slow(but="False-True-2")
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("packed, recompute", [(False, True), (True, True), (True, False)])
def test_compiled_and_checkpointed(run, size, packed, recompute):
    check_errors(run(size, compiled_case, packed, recompute), 1e-5)


def operator_case(group):
    """Run torch's own checks of the custom operators: schema, fake kernels, autograd registration."""
    with allscan.Communicator(group) as comm:
        whole = Whole(GLACase([100], H=2, gates="mild", lengths=[0, 30, 100]), comm.device)
        packed = torch.tensor([0, 30, 100])
        leaves = [x.requires_grad_() for x in (whole.q, whole.k, whole.v, whole.g, whole.initial)]
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        for final, cu_seqlens, initial, keeps in ((True, packed, leaves[4], True), (False, None, None, False)):
            call = Call("zeco_gla", 0.25, saves=keeps)
            arguments = (*leaves[:4], initial, cu_seqlens, final, comm.handle, 0.25, None, None, call.text)
            torch.library.opcheck(GLA.custom.operator, arguments, test_utils=checks)
    return True


def test_custom_operators(run):
    assert run(1, operator_case) == [True]


def watched_case(group):
    """Under a dispatch mode zeco_gla is one operator. A second derivative is rejected, and all ranks get an error."""
    with allscan.Communicator(group, timeout=4) as comm:
        x = torch.rand(1, 70, 2, 16, device=comm.device)
        with FakeTensorMode() as mode:
            shape = allscan.zeco_gla(*[mode.from_tensor(x)] * 4, comm=comm)[0].shape
        leaf = x.clone().requires_grad_()
        answers = []
        for create_graph in (False, comm.rank == 1):
            o, _ = allscan.zeco_gla(leaf, leaf, leaf, -x, comm=comm)
            answers.append(raised(torch.autograd.grad, o.square().sum(), leaf, create_graph=create_graph))
            comm.streams.synchronize()
        answers.append(raised(comm.barrier))
        comm.resync()
        return shape == x.shape, answers


def test_modes_and_second_derivatives(run):
    (of_first, first), (of_second, second) = run(2, watched_case)
    assert of_first and of_second and first[0] is second[0] is None
    assert "no second derivative" in second[1][1] and "has rejected its call" in first[2][1], (first, second)


def in_place_case(comm):
    """Results of zeco_gla may be changed in place like any others: gradients are those of the changed result."""
    x = torch.rand(1, 70, 2, 16, device=comm.device).requires_grad_()

    def call(x):
        o, _ = allscan.zeco_gla(x, x, x, -x, comm=comm)
        return o

    def changed(x):
        return call(x).mul_(3.0).add_(1.0)

    expected = torch.autograd.grad(3.0 * call(x).sum(), x)[0]
    torch._dynamo.reset()
    for form in (changed, torch.compile(changed, fullgraph=True, backend="aot_eager")):
        o = form(x)
        assert relative(torch.autograd.grad(o.sum(), x)[0], expected) < 1e-6
        assert relative(o, 3.0 * call(x.detach()) + 1.0) < 1e-6


def test_results_may_be_changed_in_place(run):
    run(2, in_place_case)


def bad_input_case(comm):
    """Return ({expected text: error}, those of wrong types); ranks with right arguments raise ValueError."""
    q = torch.zeros(1, 8, 2, 16, device=comm.device)
    v = torch.zeros(1, 8, 2, 8, device=comm.device)
    wide, odd = torch.zeros(1, 8, 1, 513, device=comm.device), comm.rank == 1
    positive, half = q + (0.5 if odd else 0.0), [x.bfloat16() if odd else x for x in (q, q, v)]

    def call(*tensors, **options):
        return raised(allscan.zeco_gla, *tensors, comm=comm, **options)

    def packed(*lengths):
        return call(q, q, v, q, cu_seqlens=list(lengths))

    of_types = {
        "float64": call(q, q, v, q.double()),
        "initial_state": call(q, q, v, q, initial_state=q),
        "int32 or int64": call(q, q, v, q, cu_seqlens=torch.tensor([0.0, 16.0])),
    }
    answers = {
        "q, k, g must be": call(q, q[:, :4], v, q),
        "no empty dimension": call(q, q, v[..., :0], q),
        "g must be at most 0": call(q, q, v, positive),
        "at most 512": call(wide, wide, wide, wide),
        "bfloat16": call(*half, q),
        ("must rise from 0", 1): packed(0, 8 * comm.size - 1),
        ("must rise from 0", 2): packed(0, 12, 5, 8 * comm.size),
        ("must rise from 0", 3): packed(1, 8 * comm.size),
        "differs between ranks": packed(0, 5 + comm.rank, 8 * comm.size),
        "N + 1": packed(0),
        # a first call with these dtypes
        ("g must be at most 0", "halves"): call(*(x.half() for x in (q, q, v, positive))),
    }
    healthy = allscan.zeco_gla(q + 1, q + 1, v + 1, q, comm=comm, cu_seqlens=[0, 8 * comm.size])[0]
    assert relative(healthy[0, -1, 0], torch.full((8,), 4.0 * 8 * (comm.rank + 1))) < 1e-6
    return answers, of_types


def test_bad_input_is_rejected_on_every_rank(run, size=2):
    for answers, of_types in run(size, bad_input_case):
        check_answers(answers)
        check_answers(of_types, "TypeError", "ValueError")


def calls_that_are_known_case(comm):
    """Repeat calls with known signatures, which skip checks: equal results in other memory, and errors for wrong
    arguments."""
    generator = torch.Generator().manual_seed(comm.rank)
    *tensors, g, do = (torch.randn(1, 70, 2, 16, generator=generator).to(comm.device) for _ in range(5))
    tensors.append(-g.abs() / 64)
    initial = torch.linspace(-1, 1, 512).view(1, 2, 16, 16).to(comm.device)

    def call(change=lambda x: x, **options):
        leaves = [x.clone().requires_grad_() for x in tensors]
        o, final = allscan.zeco_gla(*map(change, leaves), comm=comm, **options)
        loss = (o * do).sum() + (0.0 if final is None else final.sum())
        return [o, *torch.autograd.grad(loss, leaves)]

    kinds = {}, dict(scale=0.5), dict(initial_state=initial), dict(recompute=False), dict(output_final_state=True)
    plain, scaled, begun, kept, ended = (call(**options) for options in kinds)
    known = len(comm.calls)
    again = [
        (plain, call()),
        (plain, call(lambda x: torch._neg_view(-x))),
        (plain, call(lambda x: x.mT.contiguous().mT)),
        (plain, call(scale=16**-0.5)),
        (scaled, call(scale=0.5)),
        (begun, call(initial_state=initial)),
        (kept, call(recompute=False)),
        (ended, call(output_final_state=True)),
        (call(scale=1), call(scale=True)),
    ]
    for i, (expected, found) in enumerate(again):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), i
    for other in (scaled, begun):
        assert not torch.equal(plain[0], other[0])
    assert known == 4  # a final state needs no signature of its own
    wrong = (
        dict(g=tensors[3].to_sparse()),
        dict(g=tensors[3].cpu().numpy()),
        dict(scale=[0.25]),
        dict(scale=float("nan")),
        dict(scale=1e-46),  # 0 in float32
        dict(scale=1e39),
        dict(scale=10**400),  # no float
        dict(layout=["contiguous"]),
        dict(first_token=3),  # valid with cu_seqlens only
        dict(scale=Decimal(1)),  # no Python number, although it equals 1
    )
    names = dict(zip("qkvg", tensors, strict=True))
    rejected = [raised(allscan.zeco_gla, comm=comm, **names | change) for change in wrong]
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(tensors[0], tensors[0])
        rejected.append(raised(allscan.zeco_gla, comm=comm, **names | dict(q=dual)))
    with FakeTensorMode() as mode:  # neither uses cached calls, nor is cached
        allscan.zeco_gla(*map(mode.from_tensor, tensors), comm=comm)
    assert all(torch.equal(a, b) for a, b in zip(plain, call(), strict=True))
    return [name for name, _ in rejected]


@pytest.mark.slow(but="1")
@pytest.mark.parametrize("size", [1, 2])
def test_calls_that_are_known(run, size):
    wanted = ["TypeError"] * 2 + ["ValueError"] * 8 + ["NotImplementedError"]
    assert run(size, calls_that_are_known_case) == [wanted] * size


class Filled:
    """A StateCarrier whose incoming state on each rank is a constant."""

    def __init__(self, comm, value, waits=True):
        self.comm, self.handle, self.value, self.waits = comm, register(self), value, waits

    def get_or_create_scan(self, shape, agree=None, deferred=None, *, first_call_only=False):
        self.comm.agreed.arguments.remember((shape, agree))

    def stream(self, priority=0):
        return contextlib.nullcontext(lambda: None)

    def carry(self, carried, reverse, zigzag):
        carried.out.fill_(self.value)

    def record(self, *of_plan):
        record_call(*of_plan)

    def neighbours(self, shape, zigzag):
        return self.waits, True

    def expected_us(self, words, zigzag):
        return 0.0

    def pending(self, prepared, zigzag):
        return []


def carriers_case(group, recompute):
    """Return errors of outputs and gradients for several equal carriers in turns."""
    answers = []
    with allscan.Communicator(group) as comm, allscan.Communicator(group) as middle:
        middle.rank, middle.size = 1, 3  # the first rank's sequences begin with zeros
        q, k, v = (torch.rand(1, 40, 2, 16, device=comm.device) for _ in range(3))
        carriers = [Filled(middle, 1.0), Filled(middle, 2.0), Filled(middle, 0.0, waits=False)]
        for carrier in [*carriers, *carriers]:
            found = []
            for by_carrier in (True, False):
                leaves = [x.clone().requires_grad_() for x in (q, k, v)]
                initial = torch.full((1, 2, 16, 16), carrier.value, device=comm.device)
                if by_carrier:
                    o, _ = GLA.run(carrier.comm, "zeco_gla", (*leaves, -q, None), Asked(recompute=recompute), carrier)
                else:
                    o, _ = allscan.zeco_gla(*leaves, -q, comm=comm, initial_state=initial)
                found.append([o, *torch.autograd.grad(o.sum(), leaves[:1])])
            answers += [relative(a, b) for a, b in zip(*found, strict=True)]
        middle.rank, middle.size = 0, 1
    return answers


@pytest.mark.parametrize("recompute", [True, False])
def test_carriers_of_one_kind(run, recompute):
    """Each call uses its own carrier."""
    (errors,) = run(1, carriers_case, recompute)
    assert max(errors) < 1e-5, errors


def lives_case(group):
    """Cached state of a call is freed with its communicator; a captured graph holds its tables."""
    comm = allscan.Communicator(group)
    x = torch.rand(1, 8, 1, 16, device=comm.device)
    leaf = x.clone().requires_grad_()

    call = functools.partial(allscan.zeco_gla, leaf, x, x, -x, comm=comm)
    kept = [call()[0] for _ in range(2)]
    tables = comm.tables
    tables.clear()  # as after many other lengths
    for options in ({}, dict(first_token=0, cu_seqlens=[0, 8])):
        with (
            mock.patch.object(Streams, "capturing", lambda self: True),
            mock.patch.object(packing, "capturing", lambda: True),
        ):
            answer = raised(call, **options)
        assert (answer is None) == (not options), answer  # the latter's tables would be new
    (layout,) = (prepared.layout for prepared in comm.calls.values())
    if comm.streams.cuda:
        assert layout.held and comm.memory.holds(layout.tensors[0])
    kept.append(call()[0])
    watched = weakref.ref(comm)
    comm.close()
    del comm, call, layout
    gc.collect()
    assert watched() is None and all(o.grad_fn is not None for o in kept)
    return raised(kept[0].sum().backward)


@pytest.mark.cpu
def test_what_a_call_leaves(run):
    ((name, why),) = run(1, lives_case)
    assert name == "RuntimeError" and "deleted" in why
