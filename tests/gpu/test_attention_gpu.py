"""Softmax attention in blocks by GPU kernels: errors against float64, compared with one kernel's errors."""

from __future__ import annotations

import pytest
import torch

from allscan.integrations import attention_blocks, attention_kernels
from bench import attention as bench
from support.attention import attention_case, packed_case

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


@pytest.mark.parametrize("shape", bench.CHECKED)
def test_errors(shape):
    """On one GPU, errors of o and dq are at most 1.45 times one kernel's, those of dk and dv 1.1 times."""
    wrong = bench.check(DEVICE, torch.bfloat16, 1024, shape)
    assert not wrong, wrong


def test_errors_of_a_batch():
    wrong = bench.check(DEVICE, torch.bfloat16, 1024, bench.CHECKED[0], batch=2)
    assert not wrong, wrong


def test_errors_in_triangles():
    """Errors of dk and dv are at most 1.3 times one kernel's."""
    wrong = bench.check_triangles(DEVICE, torch.bfloat16, "cudnn", 512)
    assert not wrong, wrong


def test_errors_by_rows():
    wrong = bench.check_rows(DEVICE, torch.bfloat16, "cudnn", 2048)
    assert not wrong, wrong


@pytest.mark.parametrize("B", [1, 2])
@pytest.mark.parametrize("before", [1, 200, 1000])
@pytest.mark.parametrize("width, V", [(64, 64), (128, 128), (192, 128), (256, 256), (96, 96)])
def test_queries_of_a_prefill(width, V, before, B):
    """The two blocks of a rank in a prefill, with keys that are a part of a cache, eager and in a CUDA graph, against
    float64. Errors are at most 1.45 times those of the unsplit row's kernel."""
    H, G, T = 8, 2, 512
    generator = torch.Generator(DEVICE).manual_seed(before)
    cache = [torch.randn(B, G, 4096, n, generator=generator, device=DEVICE).bfloat16() for n in (width, V)]
    whole = torch.randn(B, before + T, H, width, generator=generator, device=DEVICE).bfloat16().transpose(1, 2)
    q, (k, v) = whole[:, :, before:], (x[:, :, : before + T] for x in cache)

    def attend(*tensors):
        return torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)

    with torch.no_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = attend(*(x.double() for x in (whole, k, v)))[:, :, before:]
    with torch.no_grad():
        of_one = (attend(whole, k, v)[:, :, before:].double() - expected).norm()
        found = attention_blocks.after_others(q, k, v)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = attention_blocks.after_others(q, k, v)
    graph.replay()
    assert (found.double() - expected).norm() < 1.45 * of_one
    assert torch.equal(found, replayed)


@pytest.mark.parametrize("queries, keys", [(8192, 40960), (16384, 4096)])
def test_rows_of_the_chosen_kernel(queries, keys):
    """The kernel in use for heads of 256 with long blocks, in parts of the keys and in one call, also in a CUDA graph;
    its memory. Without rows dq and dk differ by roundings."""
    H, G, W = 8, 2, 256
    q, k, v, do = bench.drawn(DEVICE, torch.bfloat16, 1, max(queries, keys), H, G, W, W)
    q, k, v, do = (x[:, :n].transpose(1, 2) for x, n in zip((q, k, v, do), (queries, keys, keys, queries)))
    kernel, scale = attention_kernels.kernel_for(q, k, v), W**-0.5
    plain = bench.kernel_named("cudnn")
    assert kernel.name == "cudnn, rows"
    o, lse, more = kernel.forward(q, k, v, False, scale)
    inputs = do, q, k, v, o, lse.contiguous(), more, False, scale
    wanted = plain.backward(*inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = kernel.backward(*inputs)
    used = torch.cuda.max_memory_allocated() - before
    assert used < 1.5 * 4 * H * W * attention_kernels.ROWS_TIMES_KEYS, used  # dk and dv of the rows, and others
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernel.backward(*inputs)
    for x in captured:
        x.zero_()
    graph.replay()
    for a, b, c in zip(found, wanted, captured, strict=True):
        assert max(bench.errors([a, c], [b.double(), b.double()])) < 6e-3
    assert not torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("shape", bench.CHECKED)
def test_layouts_of_gradients(shape):
    """cuDNN caches graphs for backward without the layout of o's gradient."""
    wrong = bench.check_layouts(DEVICE, torch.bfloat16, 1024, shape)
    assert not wrong, wrong


def test_the_choice():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("Hopper's")

    def chosen(dtype, *shape, tokens=1024):
        kernel = bench.kernel_of(DEVICE, dtype, tokens, *shape)
        return kernel and kernel.name

    half = torch.bfloat16
    assert chosen(half, 8, 8, 128, 128) == chosen(half, 8, 2, 64, 64) == "cudnn"
    assert chosen(half, 8, 8, 192, 128) == "cudnn, triangles"
    assert chosen(half, 8, 2, 256, 256) == "cudnn, rows" and chosen(half, 8, 8, 192, 192) == "flash"
    assert chosen(half, 8, 8, 128, 96) == "cudnn" and chosen(half, 8, 8, 96, 96) == "flash"
    assert chosen(half, 8, 8, 128, 128, tokens=64) == "flash"
    assert chosen(torch.float32, 8, 8, 128, 128) is None


def test_deterministic_algorithms():
    """Deterministic mode chooses FlashAttention; its gradients have the same bits each time."""
    q, k, v, do = bench.drawn(DEVICE, torch.bfloat16, 1, 4096, 8, 2, 128, 128)
    torch.use_deterministic_algorithms(True)
    try:
        kernel = attention_kernels.kernel_for(*(x.transpose(1, 2) for x in (q, k, v)))
        assert kernel.name == "flash"
        answers = [bench.in_blocks(q, k, v, do, 2, True) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    for other in answers[1:]:
        assert all(torch.equal(a, b) for a, b in zip(answers[0], other, strict=True))


@pytest.mark.parametrize("how", ["plain", "captured"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("kind", ["128", "128 in groups", "latents of 192"])
def test_over_the_gpus(run, kind, layout, how, size=2):
    """Gathers and sums by NCCL, also in a CUDA graph."""
    for ours, alone in run(size, attention_case, kind, layout, 1, how, dtype=torch.bfloat16, length=1024):
        assert all(ours[name] < 1.6 * alone[name] for name in ours), (ours, alone)


@pytest.mark.parametrize("size, zigzag, per_document", [(1, False, 0), (2, False, 0), (2, True, 0), (2, True, 1)])
@pytest.mark.parametrize("kind", ["128", "128 in groups", "latents of 192"])
def test_packed_sequences_in_one_call(run, kind, zigzag, per_document, size):
    for errors in run(size, packed_case, zigzag, kind, torch.bfloat16, per_document):
        assert max(errors) < 1e-2, errors
