"""Softmax attention over a split sequence, in blocks without masks, against one rank's in float64."""

from __future__ import annotations

import itertools
import warnings
from types import SimpleNamespace

import pytest
import torch

import allscan
from allscan.base.autograd import REVISION
from allscan.integrations import attention, attention_backward, attention_blocks, attention_kernels, softmax
from bench.attention import causal
from support.attention import attention_case, packed_case, split, varlen, whole_case
from support.values import error, place, relative

pytestmark = pytest.mark.cpu  # GPU tests are in tests/gpu/test_attention_gpu.py


@pytest.mark.parametrize(
    "size, kind, layout, batch",
    [
        (2, "heads", "zigzag", 1),
        (2, "latents", "zigzag", 2),
        (3, "groups", "zigzag", 2),
        (4, "latents", "zigzag", 1),
        (5, "narrow", "zigzag", 1),
        (2, "groups", "contiguous", 2),
        (3, "latents", "contiguous", 1),
        (4, "heads", "contiguous", 2),
        (4, "latents", "contiguous", 1),
        (5, "narrow", "contiguous", 1),
        (4, "latents", "uneven zigzag", 2),
        (5, "groups", "uneven zigzag", 1),
    ],
)
def test_values_and_gradients(run, size, kind, layout, batch):
    """Covers uneven ranks and, in the contiguous layout, a rank without tokens."""
    for errors, _ in run(size, attention_case, kind, layout, batch):
        assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "no_grad"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_checkpoints(run, how, layout, size=3):
    for errors, _ in run(size, attention_case, "latents", layout, 1, how):
        assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("size", range(1, 9))
def test_ranges(size):
    """In both layouts each query attends exactly once to each earlier token, including its own causal block."""
    for zigzag in (False, True):
        # chunk of the sequence in each slot
        chunk = [c for i in range(size) for c in (i, 2 * size - 1 - i)] if zigzag else range(size)
        for rank in range(size):
            own = (rank, 2 * size - 1 - rank) if zigzag else (rank,)
            read, blocks = attention_blocks.reads(rank, size, zigzag)
            seen = {half: read[-many:] for halves, many in blocks for half in halves}
            assert sum(len(halves) for halves, _ in blocks) == len(seen) and all(many for _, many in blocks)
            for half, mine in enumerate(own):  # the causal block has the rank's earlier chunks
                assert sorted([chunk[slot] for slot in seen.get(half, ())] + [*own[:half]]) == list(range(mine))
            assert set(read) == {slot for slots in seen.values() for slot in slots}
            work = sum(map(len, seen.values()))
            assert work == (2 * size - 2 if zigzag else rank)  # zigzag: the same on each rank


def order_case(group, layout):
    """Return names of the steps, in their order, of a rank."""
    with allscan.Communicator(group, timeout=60) as comm, pytest.MonkeyPatch.context() as patch:
        events = []

        def told(name, function):
            def call(*arguments, **options):
                events.append(name(arguments) if callable(name) else name)
                return function(*arguments, **options)

            return call

        for name in ("start", "finish", "start_sum", "finish_sum"):
            patch.setattr(softmax.Gather, name, told(name, getattr(softmax.Gather, name)))
        (kernel,) = [kernel for kernel in attention_kernels.KERNELS if kernel.name == "cpu"]
        kernel = kernel._replace(
            forward=told(lambda given: f"forward, causal {given[3]}", kernel.forward),
            backward=told(
                lambda given: f"backward, causal {given[7]}" + ", lse in rows" * (not given[5].is_contiguous()),
                kernel.backward,
            ),
        )
        patch.setattr(attention_kernels, "KERNELS", (kernel,))
        zigzag = layout == "zigzag"
        tokens = [6] * comm.size
        given, expand, do = whole_case("latents", 1, sum(tokens), torch.float32, comm.device)
        mine = place(comm, tokens, zigzag)
        own = {name: x[:, mine].requires_grad_() for name, x in given.items()}

        def expanded(*tensors):
            events.append("expand")
            k, v = expand(*tensors)
            k.register_hook(lambda _: events.append("expand's backward"))
            return k, v

        split(comm, tokens, zigzag, own, expanded).backward(do[:, mine])
        return events


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_the_order(run, layout, size=3):
    """The own block overlaps with the gather of keys, and in backward with the sums of their gradients. Every rank
    projects, also the first one in the contiguous layout, which attends to no other rank's keys."""
    for rank, events in enumerate(run(size, order_case, layout)):
        blocks = len(attention_blocks.reads(rank, size, layout == "zigzag")[1])
        others = ["expand"] + ["forward, causal False"] * blocks
        assert events[: 4 + len(others)] == ["start", "expand", "forward, causal True", "finish", *others]
        back = ["backward, causal False"] * blocks + ["expand's backward"]
        back += ["start_sum", "backward, causal True", "expand's backward", "finish_sum"]
        assert events[4 + len(others) :] == back


def sum_case(group, dtype):
    """Return (error of Gather's sums over the ranks, error of sums in that dtype)."""
    with allscan.Communicator(group, timeout=60) as comm:
        x = torch.zeros(1, 2, 64, dtype=dtype, requires_grad=True)
        parts = torch.randn(comm.size, 1, 2 * comm.size, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
        gather = softmax.Gather(comm, [2] * comm.size, True, x)
        (found,) = gather.read(gather.in_order())
        found.backward(parts[comm.rank])
        mine = place(comm, [2] * comm.size, True)
        exact = parts.double().sum(0)[:, mine]
        return relative(x.grad, exact), relative(exact.to(dtype), exact)


def test_sums_in_float32(run, size=8):
    for found, rounded in run(size, sum_case, torch.bfloat16):
        assert found < 1.01 * rounded


def compiled_case(group, dtypes, layout):
    """Return errors of two communicators' gathers of tensors of these dtypes against eager ones: of their values and
    gradients, if all ranks compile, and if rank 0 alone does."""
    errors, tokens, zigzag = [], [4, 6], layout == "zigzag"
    torch._dynamo.reset()
    for _ in range(2):
        with allscan.Communicator(group, timeout=60) as comm:

            def gathered(*xs):
                gather = softmax.Gather(comm, tokens, zigzag, *(2 * x for x in xs))
                return [y.sin() for y in gather.read(gather.in_order() if comm.rank else [])]

            numbers = torch.Generator().manual_seed(comm.rank)
            xs = [torch.randn(2, tokens[comm.rank], 3, 2 + i, generator=numbers).to(x) for i, x in enumerate(dtypes)]
            compiled = torch.compile(gathered, backend="aot_eager", fullgraph=True)
            found = []
            for function in gathered, compiled, gathered if comm.rank else compiled:
                leaves = [x.clone().requires_grad_() for x in xs]
                ys = function(*leaves)
                torch.autograd.backward(ys, [y.detach().cos() for y in ys])
                found.append([*ys, *(x.grad for x in leaves)])
            expected, *others = found
            assert [[x.dtype for x in other] for other in others] == [[x.dtype for x in expected]] * 2
            errors += [relative(x, y) for other in others for x, y in zip(other, expected, strict=True)]
    return errors


BOTH = torch.bfloat16, torch.float32


@pytest.mark.parametrize("dtypes, layout", [(BOTH[1:], "zigzag"), (BOTH, "zigzag"), (BOTH * 2, "contiguous")])
def test_compiled_gathers(run, dtypes, layout, size=2):
    """A rank whose torch compiles no more, at its limit of recompilations, calls the same collectives as the others."""
    for errors in run(size, compiled_case, dtypes, layout):
        assert max(errors) < 1e-6, errors


def test_compiled_attention_is_no_part_of_torchs_graphs():
    """Replays would start no gather, and use what was saved of another call."""
    for name in ("gather", "gather_backward", "gather_read", "gather_read_backward", "blocks", "blocks_backward"):
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.allscan, f"{name}_{REVISION}").default.tags


@pytest.mark.parametrize("name", ["cudnn", "flash"])
def test_what_the_operators_take(name):
    """The arguments of our calls are those of this PyTorch's operators."""
    assert dict(cudnn=attention_kernels.CUDNN_IS_KNOWN, flash=attention_kernels.FLASH_IS_KNOWN)[name]


@pytest.mark.parametrize(
    "capability, version, widths, chosen",
    [
        ((9, 0), 91900, (128, 128), "cudnn"),
        ((9, 0), 92002, (192, 128), "cudnn, triangles"),
        ((9, 0), 91900, (256, 256), "cudnn, rows"),
        ((9, 0), 91802, (128, 128), "flash"),
        ((9, 0), 91802, (192, 128), "flash"),
        ((9, 0), None, (128, 128), "flash"),
        ((10, 0), 91900, (128, 128), "flash"),
        ((8, 0), 91900, (64, 64), "flash"),
        ((12, 0), 92002, (192, 128), "flash"),
        ((7, 5), 91900, (128, 128), None),
    ],
)
def test_cudnn_where_it_was_tested(monkeypatch, capability, version, widths, chosen):
    """cuDNN's kernels are chosen on the GPUs and from the version that tests have covered; else FlashAttention's."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    D, V = widths
    q, k, v = (
        SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16, shape=(1, 8, 1024, width))
        for width in (D, D, V)
    )
    kernel = attention.kernel_for(q, k, v)
    assert (kernel and kernel.name) == chosen


def test_the_choice_is_traced(monkeypatch):
    """torch.compile asks for the GPU and for torch's switches once, without a graph break."""
    monkeypatch.setattr(attention_kernels, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)

    def number(q, k, v):
        kernel = attention.kernel_for(q, k, v)
        return q * [x.name for x in attention_kernels.KERNELS].index(kernel.name) + attention.takes_packed(q, k, v)

    torch._dynamo.reset()
    q = torch.ones(1, 1, 256, 64, dtype=torch.bfloat16)
    (found,) = torch.compile(number, backend="eager", fullgraph=True)(q, q, q).unique().tolist()
    assert found == [x.name for x in attention_kernels.KERNELS].index("cudnn") + 1


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("V", [16, 8])
def test_queries_after_other_tokens(V, scale):
    """The rectangular causal block of a rank in a prefill: the last query is aligned with the last key."""
    B, H, G, T, S, D = 2, 4, 2, 24, 96, 16
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator) for shape in ((B, H, T, D), (B, G, S, D), (B, G, S, V)))
    mask = torch.ones(T, S, dtype=torch.bool).tril(S - T)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), mask, scale=scale, enable_gqa=True
    )
    assert error(attention_blocks.after_others(q, k, v, scale), expected) < 1e-5


def test_a_prefill_without_kernels_for_blocks(monkeypatch):
    monkeypatch.setattr(attention_kernels, "KERNELS", ())
    q = torch.ones(1, 1, 8, 8)
    assert attention_blocks.after_others(q, torch.cat([q, q], 2), torch.cat([q, q], 2)) is None


def test_switches_that_change_after_compiling(monkeypatch):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: attention_blocks.merged(x, x, x, attention_blocks.Blocks(None)), backend="eager")
    compiled(torch.ones(1, 1, 8, 8))
    monkeypatch.setattr(attention_kernels, "KERNELS", ())
    with pytest.raises(RuntimeError, match="have changed since torch.compile"):
        compiled(torch.ones(1, 1, 8, 8))


def packed_on_cpu_case(group, zigzag, kind, per_document):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "flash_packed", varlen)
        return packed_case(group, zigzag, kind, torch.float32, per_document)


@pytest.mark.parametrize(
    "size, zigzag, kind, per_document",
    [
        (1, False, "heads", 0),
        (4, False, "groups", 0),
        (4, True, "narrow", 0),
        (1, True, "heads", 1),
        (3, True, "narrow", 1),
    ],
)
def test_packed_sequences_in_one_call(run, size, zigzag, kind, per_document):
    """A stand-in for the GPU kernels checks their arguments."""
    assert attention.flash_packed is not None
    for errors in run(size, packed_on_cpu_case, zigzag, kind, per_document):
        assert max(errors) < 1e-5, errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_whole_sequences(dtype):
    q, k, v = (
        torch.randn(2, heads, 9, width, dtype=dtype, requires_grad=True) for heads, width in ((4, 12), (2, 12), (2, 8))
    )
    answers = []
    for o in (
        causal(q, k, v),
        torch.nn.functional.scaled_dot_product_attention(
            q, *(x.repeat_interleave(2, 1) for x in (k, v)), is_causal=True
        ).transpose(1, 2),
    ):
        answers.append([o, *torch.autograd.grad((o * torch.arange(8)).sum(), (q, k, v))])
    assert all(relative(a, b) < 1e-6 for a, b in zip(*answers, strict=True))


def test_the_kernels_results():
    """Each kernel on CPUs returns o, its log-sum-exp, and parts of gradients with the log-sum-exp over more keys."""
    generator = torch.Generator().manual_seed(0)
    for D, V, dtype in itertools.product((16, 20), (16, 12), (torch.float32, torch.float64)):
        q, k, v, do = (
            torch.randn(2, heads, tokens, width, dtype=dtype, generator=generator).requires_grad_()
            for heads, tokens, width in ((4, 6, D), (2, 9, D), (2, 9, V), (4, 6, V))
        )
        kernel = attention.kernel_for(q, k, v)
        o, lse, more = kernel.forward(q, k, v, False, 0.2)
        scores = q.double() @ k.double().repeat_interleave(2, 1).mT * 0.2
        wanted = scores.softmax(-1) @ v.double().repeat_interleave(2, 1)
        limit = 1e-5 if dtype == torch.float32 else 1e-12
        assert relative(o, wanted) < limit and relative(lse, scores.logsumexp(-1)) < limit
        assert o.transpose(1, 2).is_contiguous()
        found = kernel.backward(
            do.detach(), *(x.detach() for x in (q, k, v)), o.detach(), lse.detach(), more, False, 0.2
        )
        for dx, x in zip(found, torch.autograd.grad(wanted, (q, k, v), do.double()), strict=True):
            assert relative(dx, x) < limit


def rows_case(batch, row, most):
    """Return (gradients of 12 queries and 10 keys by rows, the kernel's, [(rows, queries, keys) of a call])."""
    do, q, k, v = triangles_inputs((batch, 4, 2, 12, 10, 6, 4))
    kernel, calls = attention.kernel_for(q, k, v), []
    o, lse, more = kernel.forward(q, k, v, False, 0.3)
    tensors, saved = (do, q, k, v, o, lse + torch.rand(lse.shape, dtype=lse.dtype)), object()

    def backward(*given):
        rows, _, queries, _ = given[1].shape
        calls.append((rows, queries, given[2].shape[2]))
        assert given[6:] == (saved, False, 0.3) and given[5].is_contiguous()
        assert all(len(x) == rows for x in given[:6])
        assert given[1] is q or rows == 1 or given[2].stride(0) == given[3].stride(0) == 0
        return kernel.backward(*given[:6], more, *given[7:])

    found = attention_backward.by_rows(backward, row, most)(*tensors, saved, False, 0.3)
    return found, kernel.backward(*tensors, more, False, 0.3), calls


@pytest.mark.parametrize(
    "most, wanted",
    [
        (30, [(3, 4, 10)]),
        (29, [(2, 4, 10), (1, 4, 10)]),
        (20, [(2, 4, 10), (1, 4, 10)]),
        (19, [(3, 4, 5)] * 2),
        (10, [(2, 4, 5), (1, 4, 5)] * 2),
        (8, [(2, 4, 4), (1, 4, 4)] * 2 + [(2, 4, 2), (1, 4, 2)]),
    ],
)
@pytest.mark.parametrize("batch", [1, 2])
def test_rows(batch, most, wanted):
    """Queries are rows of a batch; a call has at most ``most`` rows times keys, and at least two rows are allowed."""
    found, alone, calls = rows_case(batch, 4, most)
    assert calls == wanted * batch
    for a, b in zip(found, alone, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and relative(a, b) < 1e-12


@pytest.mark.parametrize("row", [12, 5, 24])
def test_blocks_that_are_no_rows(row):
    found, alone, calls = rows_case(2, row, 30)
    assert calls == [(2, 12, 10)] and all(map(torch.equal, found, alone))


def test_rows_of_no_sequence():
    do, q, k, v = (x[:0] for x in triangles_inputs((1, 2, 2, 8, 4, 4, 4)))
    inputs = do, q, k, v, do, q[..., 0], None, False, 0.3
    assert attention_backward.by_rows(lambda *given: given, 4, 100)(*inputs) == inputs


def test_rows_of_causal_blocks():
    do, q, k, v = triangles_inputs((1, 2, 2, 8, 8, 4, 4))
    inputs = do, q, k, v, do, q[..., 0], None, True, 0.3
    assert attention_backward.by_rows(lambda *given: given, 4, 100)(*inputs) == inputs


def test_sums_of_rows():
    """Gradients of keys of several calls, and of queries from several parts of the keys, are added in float32."""
    do, q, k, v = (torch.zeros(1, 1, n, 8, dtype=torch.bfloat16) for n in (36, 36, 36, 36))
    count = 0

    def backward(do, q, k, v, *others):
        nonlocal count
        count += 1
        assert len(q) == 2 or count % 9
        return tuple(torch.full_like(x, 1.0 if count == 1 else 2.0**-9) for x in (q, k, v))

    _, dk, dv = attention_backward.by_rows(backward, 2, 72)(do, q, k, v, do, q[..., 0].float(), None, False, 1.0)
    assert count == 9 and dk.dtype == dv.dtype == torch.bfloat16
    assert (dk == 2 + 16 * 2.0**-9).all()  # of 2 rows in each call
    count = 0
    dq, _, _ = attention_backward.by_rows(backward, 18, 8)(do, q, k, v, do, q[..., 0].float(), None, False, 1.0)
    assert count == 9 and dq.dtype == torch.bfloat16 and (dq == 1 + 8 * 2.0**-9).all()


@pytest.mark.parametrize("most", [30, 20, 8])
@pytest.mark.parametrize("batch", [1, 2])
def test_rows_lie_in_memory_like_the_kernels_gradients(batch, most):
    """Tokens before heads, also of sums."""
    shape = dict(do=(12, 4), q=(12, 6), k=(10, 6), v=(10, 4))
    do, q, k, v = (torch.randn(batch, n, 4, width).transpose(1, 2) for n, width in shape.values())

    def backward(do, q, k, v, *others):
        return tuple(torch.zeros(x.shape[0], x.shape[2], 4, x.shape[3]).transpose(1, 2) for x in (q, k, v))

    found = attention_backward.by_rows(backward, 4, most)(do, q, k, v, do, q[..., 0], None, False, 1.0)
    assert all(x.transpose(1, 2).is_contiguous() for x in found)


def triangles_cases():
    """Return [(B, H, G, queries, keys, D, V)] for squares of 4 or 6."""
    cases = [(2, 2, 1, 4, 12, 6, 4), (1, 2, 2, 8, 4, 6, 4), (2, 4, 2, 6, 6, 4, 8), (1, 2, 1, 8, 12, 6, 6)]
    return [*cases, (1, 2, 1, 4, 36, 6, 4), (1, 1, 1, 20, 4, 4, 4), (2, 2, 1, 12, 20, 4, 4)]


def triangles_inputs(case):
    B, H, G, queries, keys, D, V = case
    generator = torch.Generator().manual_seed(0)
    shapes = (B, H, queries, V), (B, H, queries, D), (B, G, keys, D), (B, G, keys, V)
    return (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)


@pytest.mark.parametrize("case", triangles_cases())
def test_triangles(case):
    """Gradients of square blocks come from causal ones; o and its log-sum-exp may cover more keys. For a causal block,
    and if squares would be smaller than requested, they are the kernel's."""
    do, q, k, v = triangles_inputs(case)
    parts = {(8, 12): 2, (4, 36): 3, (20, 4): 2, (12, 20): 6}.get(case[3:5], 1)  # four squares at once
    kernel = attention.kernel_for(q, k, v)
    o, lse, more = kernel.forward(q, k, v, False, 0.3)
    lse = lse + torch.rand(lse.shape, dtype=lse.dtype)
    given = do, q, k, v, o, lse, more
    wanted = kernel.backward(*given, False, 0.3)
    calls = []

    def counted(*given):
        calls.append(given[7])
        assert not given[7] or (given[1].shape[2] == given[2].shape[2] and given[5].is_contiguous())
        return kernel.backward(*given)

    backward = attention_backward.by_triangles(counted, 4)
    for turn in range(2):
        found = backward(*given, False, 0.3)
        for a, b in zip(found, wanted, strict=True):
            assert a.shape == b.shape and relative(a, b) < 1e-12
        assert calls.count(False) == 1  # compared at the first call for a shape
        assert calls.count(True) == 2 * (turn + 1) * parts
    plain = attention_backward.by_triangles(kernel.backward, 7)(*given, False, 0.3)
    assert all(torch.equal(a, b) for a, b in zip(plain, wanted, strict=True))
    if q.shape[2] == k.shape[2]:
        found = backward(*given, True, 0.3)
        assert all(map(torch.equal, found, kernel.backward(*given, True, 0.3)))


@pytest.mark.parametrize("how", ["wrong", "rejects", "no memory", "not finite"])
def test_triangles_are_compared(how):
    """If a kernel's causal gradients are wrong, or it rejects its arguments, its other gradients are used."""
    do, q, k, v = triangles_inputs((1, 2, 2, 8, 4, 6, 4))
    kernel, calls = attention.kernel_for(q, k, v), []
    o, lse, more = kernel.forward(q, k, v, False, 0.3)
    if how == "not finite":
        do[0, 0, 0, 0] = torch.nan

    def backward(*given):
        calls.append(given[7])
        found = kernel.backward(*given)
        if given[7] and how == "rejects":
            raise RuntimeError("no plan")
        if given[7] and how == "no memory":
            raise torch.OutOfMemoryError("no memory")
        return (found[0], found[1] * (1.05 if given[7] and how == "wrong" else 1), found[2])

    in_triangles = attention_backward.by_triangles(backward, 4)
    warned = {"wrong": "differ by", "rejects": "no plan"}.get(how)
    for turn in range(2):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            answers = in_triangles(do, q, k, v, o, lse, more, False, 0.3)
        assert [warned in str(x.message) for x in found] == [True] * bool(warned and not turn)
        wanted = kernel.backward(do, q, k, v, o, lse, more, False, 0.3)
        assert all(torch.equal(a, b) or how == "not finite" for a, b in zip(answers, wanted, strict=True))
    # a failed shape is not tried again; a shape without a comparison is, at the next call
    assert calls.count(True) == {"wrong": 2, "rejects": 1, "no memory": 2, "not finite": 0}[how]


@pytest.mark.slow(but=("half", "not a number-2"))
@pytest.mark.parametrize("of, row", [(0, -1), (1, 0), (2, -1), (0, 37)])
@pytest.mark.parametrize("how", ["half", "zero", "of another size", "not a number"])
def test_one_row_is_compared(monkeypatch, of, row, how):
    """One wrong row of 8,192, which hardly changes the norm, is detected. Rounding is accepted, also in rows that are 0
    or a thousandth of the others."""
    do, q, k, v = triangles_inputs((1, 16, 16, 512, 512, 8, 8))
    do[:, :, 64:128] = 0.0
    do[:, :, 128:160] *= 1e-3
    kernel, plant = attention.kernel_for(q, k, v), []
    o, lse, more = kernel.forward(q, k, v, False, 0.3)
    given = do, q, k, v, o, lse, more, False, 0.3
    wanted, exact = kernel.backward(*given), attention_backward._in_triangles

    def in_triangles(*given):
        noise = torch.Generator().manual_seed(0)
        found = [x * (1 + 1e-3 * torch.randn(x.shape, dtype=x.dtype, generator=noise)) for x in exact(*given)]
        if plant:
            x = found[of]
            x[0, 1, row] = {"half": x[0, 1, row] / 2, "zero": 0.0, "not a number": torch.nan}.get(how, x.norm() / 800)
        return tuple(found)

    monkeypatch.setattr(attention_backward, "_in_triangles", in_triangles)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = attention_backward.by_triangles(kernel.backward, 512)(*given)
    assert 0 < relative(found[of], wanted[of]) < 2e-3
    plant.append("a row")
    with pytest.warns(UserWarning, match="in a row|nan"):
        found = attention_backward.by_triangles(kernel.backward, 512)(*given)
    assert all(map(torch.equal, found, wanted))


def test_triangles_of_far_keys():
    """A query whose keys have very small weights does not overflow where its gradient is masked."""
    do, q, k, v = triangles_inputs((1, 1, 1, 4, 8, 4, 4))
    q[:, :, 0], k = 40.0, -40.0 * torch.ones_like(k)
    kernel = attention.kernel_for(q, k, v)
    o, lse, more = kernel.forward(q, k, v, False, 1.0)
    assert lse.min() < -1000
    wanted = kernel.backward(do, q, k, v, o, lse, more, False, 1.0)
    backward = attention_backward.by_triangles(kernel.backward, 4)
    backward(do, q, k, v, o, lse, more, False, 1.0)
    found = backward(do, q, k, v, o, lse, more, False, 1.0)
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-9)


def triangle_kernels_case(group):
    """Return relative errors of the kernels reverse and fold against torch's operators."""
    errors = []
    for case in triangles_cases():
        _, q, k, _ = (x.float() for x in triangles_inputs(case))
        for x, n in ((q, q.shape[2]), (k.transpose(2, 3).contiguous().transpose(2, 3)[..., ::2], 2), (k, 4)):
            if x.shape[2] % n or x.stride(3) != 1:
                continue
            for shift in (n - 1, n - 2):
                for last in (False, True):
                    errors.append(
                        relative(
                            attention_backward.launch_reverse(x, n, shift, last),
                            attention_backward.reverse(x, n, shift, last),
                        )
                    )
        B, H, n, W = 2, 3, 5, 6
        x, behind = torch.randn(2, B * 4, n, H, W).half().transpose(2, 3)
        x = x.contiguous() if case[0] == 1 else x  # heads before tokens
        for blocks in (1, 2, 4):
            found = attention_backward.launch_fold(x, behind, n, n - 2, (B, blocks))
            wanted = attention_backward.fold(x, behind, n, n - 2, (B, blocks))
            assert found.stride() == wanted.stride() and found.dtype == torch.float16
            errors.append(relative(found, wanted))
    return errors


def test_kernels_of_triangles(run, size=1):
    errors = run(size, triangle_kernels_case)[0]
    assert len(errors) >= 28 and max(errors) < 1e-6


def merge_case(group):
    """Return (error of o, error of its log-sum-exp) of the kernel against torch's operators."""
    errors = []
    for (B, H, T, V), dtype in (((2, 3, 5, 16), torch.float32), ((1, 2, 37, 12), torch.float16)):
        o, more = (torch.randn(B, T, H, V).to(dtype).transpose(1, 2) for _ in range(2))
        lse, more_lse = (torch.randn(B, H, T) * 50 for _ in range(2))
        if dtype == torch.float32:  # the second of two halves
            o, lse = (torch.cat([x, x], 2) for x in (o, lse))
            o = attention_backward.tokens_first(o)
            o, lse = o[:, :, T:], lse[:, :, T:]
        wanted = o.float(), lse.clone()
        attention_blocks._merge(*wanted, more.float(), more_lse)
        attention_blocks.merge(o, lse, more, more_lse)
        errors.append((relative(o, wanted[0].to(dtype)), relative(lse, wanted[1])))
    return errors


def test_the_merge(run, size=1):
    ((small, lse), (half, half_lse)) = run(size, merge_case)[0]
    assert max(small, lse, half_lse) < 1e-6 and half < 1e-3
