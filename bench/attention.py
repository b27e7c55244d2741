"""Softmax attention of one rank of a split sequence, in blocks, on one GPU: errors and times against a single kernel.

    python -m bench.attention           # writes bench/results/attention.csv; without a GPU only checks, on the CPU
    python -m bench.attention --kernels # each kernel alone, also where the table does not choose it

Checks first: all ranks' parts in sequence against float64 on the whole sequence, relative to the error of one kernel
over the whole in the same dtype; and gradients of both layouts, twice each, since cuDNN may confuse their graphs.
Times: forward and backward of one rank's queries, its own causal block and ``before`` earlier keys, against one kernel
with causal_lower_right, as PyTorch chooses it. Keys are present: no collective is timed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import warnings
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from allscan.integrations import attention_backward, attention_kernels
from allscan.integrations.attention_blocks import Blocks, merged
from allscan.integrations.attention_kernels import kernel_for
from bench.harness import Table, results, sample

COLUMNS = (
    "kernel",
    "pass",
    "queries",
    "before",
    "batch",
    "heads",
    "kv_heads",
    "D",
    "V",
    "blocks_ms",
    "one_kernel_ms",
    "gpu",
    "torch",
    "triton",
    "sources",
)
NAMES = "o", "dq", "dk", "dv"
LIMITS = dict(o=1.45, dq=1.45, dk=1.1, dv=1.1)  # as multiples of one kernel's error
IN_TRIANGLES = LIMITS | dict(dk=1.3, dv=1.3)  # gradients of keys are rounded once more
# Checked: (heads, kv heads, width of keys, width of values)
CHECKED = [(8, 8, 128, 128), (8, 2, 128, 128), (8, 8, 128, 96), (4, 4, 192, 128), (8, 8, 64, 64), (8, 2, 256, 256)]
TIMED = [(16, 16, 128, 128, before) for before in (8192, 16384, 24576)]
TIMED += [(32, 32, 192, 128, 16384), (16, 2, 256, 256, 16384), (16, 2, 128, 128, 16384)]
QUERIES = 8192
# --kernels: (queries, keys, whether causal); the first block for all sizes of heads
BLOCKS = [(16384, 16384, True), (8192, 8192, True), (8192, 16384, False), (16384, 8192, False), (8192, 24576, False)]
BLOCKS += [(n, 2 * n, False) for n in (4096, 2048, 1024, 512)]


class Whole:
    """Replaces softmax.Gather, with all keys on this rank."""

    def __init__(self, rank, size, zigzag, *tensors):
        self.comm, self.halves = SimpleNamespace(rank=rank, size=size), 1 + zigzag
        self.length = tensors[0].shape[1] // (size * self.halves)
        self.filled = [self.length] * (size * self.halves)
        self.tensors = tensors

    def read(self, slots):
        def chunk(slot):
            size = self.comm.size
            return slot if self.halves == 1 else slot - size if slot >= size else 2 * size - 1 - slot

        places = [chunk(slot) * self.length for slot in slots]
        return [torch.cat([x[:, at : at + self.length] for at in places] or [x[:, :0]], 1) for x in self.tensors]


def causal(q, k, v, scale=None):
    """Return causal attention [B, T, H, V] of unsharded sequences, q [B, H, T, D], k and v [B, G, T, ...], by the
    kernels of the blocks, else by sdpa."""
    if kernel_for(q, k, v) is not None:
        return merged(q, k, v, Blocks(None, scale))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped).transpose(1, 2)


def mine(rank, size, zigzag, total):
    """Return the indices of a rank's tokens."""
    length = total // (size * (1 + zigzag))
    own = (rank, 2 * size - 1 - rank) if zigzag else (rank,)
    return torch.cat([torch.arange(i * length, (i + 1) * length) for i in own])


def drawn(device, dtype, batch, tokens, H, G, D, V):
    """Draw q, k, v, do [B, T, heads, width]."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = (tokens, H, D), (tokens, G, D), (tokens, G, V), (tokens, H, V)
    return [torch.randn(batch, *shape, generator=generator, device=device).to(dtype) for shape in shapes]


def exact(q, k, v, do):
    """Return o and gradients in float64, [B, T, heads, width]."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    Q, K, V = (x.transpose(1, 2) for x in leaves)
    K, V = (x.repeat_interleave(Q.shape[1] // x.shape[1], 1) for x in (K, V))
    scores = (Q @ K.mT) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    o = (scores.masked_fill_(hidden, -torch.inf).softmax(-1) @ V).transpose(1, 2)
    o.backward(do.double())
    return [o.detach(), *(x.grad for x in leaves)]


def one_kernel(q, k, v, do):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    Q, K, V = (x.transpose(1, 2) for x in leaves)
    if q.shape[2] != k.shape[2]:
        K, V = (x.repeat_interleave(q.shape[2] // k.shape[2], 1) for x in (K, V))
    o = F.scaled_dot_product_attention(Q, K, V, is_causal=True).transpose(1, 2)
    o.backward(do)
    return [o.detach(), *(x.grad for x in leaves)]


def in_blocks(q, k, v, do, size, zigzag):
    """Return o and gradients from ``size`` ranks in sequence; the ranks' gradients of keys are added in float32."""
    total, found = q.shape[1], [torch.zeros_like(do), *(torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))]
    for rank in range(size):
        own = mine(rank, size, zigzag, total).to(q.device)
        leaves = [x.detach().requires_grad_() for x in (q[:, own], k[:, own], v[:, own], k, v)]
        Q, K, V = (x.transpose(1, 2) for x in leaves[:3])
        o = merged(Q, K, V, Blocks(Whole(rank, size, zigzag, *leaves[3:])))
        o.backward(do[:, own])
        found[0][:, own] = o.detach()
        for total_gradient, x in zip(found[1:], leaves[:3], strict=True):
            total_gradient[:, own] += x.grad
        for total_gradient, x in zip(found[2:], leaves[3:], strict=True):
            total_gradient += 0 if x.grad is None else x.grad
    return found


def errors(found, wanted):
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True)]


def kernel_of(device, dtype, tokens, H, G, D, V):
    shapes = (1, H, tokens, D), (1, G, tokens, D), (1, G, tokens, V)
    return kernel_for(*(torch.empty(shape, dtype=dtype, device=device) for shape in shapes))


def check(device, dtype, tokens, shape, batch=1, limits=LIMITS) -> list[str]:
    """Print the errors and one kernel's; return the failures."""
    wrong = []
    for size, zigzag in ((2, True), (2, False), (3, True)):
        q, k, v, do = drawn(device, dtype, batch, size * tokens, *shape)
        wanted = exact(q, k, v, do)
        ours, one = errors(in_blocks(q, k, v, do, size, zigzag), wanted), errors(one_kernel(q, k, v, do), wanted)
        name = kernel_of(device, dtype, tokens // (1 + zigzag), *shape).name
        ratios = dict(zip(NAMES, (a / b for a, b in zip(ours, one, strict=True)), strict=True))
        case = f"{name}, heads {shape}, batch {batch}, {size} ranks, {'zigzag' if zigzag else 'contiguous'}"
        print(f"{case}: error", *(f"{n} {e:.2e} ({r:.2f} x)" for (n, r), e in zip(ratios.items(), ours)), flush=True)
        least = 1e-5 if dtype == torch.float32 else 0
        wrong += [
            f"{case}: {n} {e}, {r:.2f} times one kernel's"
            for (n, r), e in zip(ratios.items(), ours)
            if not (r <= limits[n] or e < least)
        ]
    return wrong


def check_layouts(device, dtype, tokens, shape) -> list[str]:
    """Check backward with both layouts of o's gradient, twice each in turns: cuDNN's cache of graphs ignores the
    layout."""
    wrong = []
    q, k, v, do = (x.transpose(1, 2) for x in drawn(device, dtype, 2, tokens, *shape))
    kernel = kernel_of(device, dtype, tokens, *shape)
    wanted = exact(*(x.transpose(1, 2) for x in (q, k, v, do)))[1:]
    for heads_first in (False, True):  # layout of q, too
        given = [x.contiguous() if heads_first else x for x in (q, k, v)]
        o, lse, more = kernel.forward(*given, True, shape[2] ** -0.5)
        for turn, gradient in itertools.product(range(2), (do, do.contiguous())):
            found = kernel.backward(gradient, *given, o, lse, more, True, shape[2] ** -0.5)
            worst = max(errors([x.transpose(1, 2) for x in found], wanted))
            if not worst < 2e-2:
                how = "contiguous" if gradient.is_contiguous() else "tokens first"
                wrong.append(f"{kernel.name} {shape}: gradient {how}, heads first {heads_first}, turn {turn}: {worst}")
    print(f"{kernel.name}, heads {shape}: both layouts of the gradient, twice each: {wrong or 'right'}", flush=True)
    return wrong


def time_one(device, dtype, batch, H, G, D, V, before, queries=QUERIES) -> list[dict]:
    """Return rows for both passes and for forward."""
    q, k, v, do = drawn(device, dtype, batch, queries + before, H, G, D, V)
    own = slice(before, before + queries)
    q, do, keys = q[:, own].clone(), do[:, own].clone(), [x[:, own].clone() for x in (k, v)]
    earlier = [x[:, :before].clone() for x in (k, v)]
    size = before // queries + 1
    gather = Whole(size - 1, size, False, *earlier)
    gather.length, gather.filled = queries, [queries] * size
    gather.read = lambda slots: earlier
    leaves = [x.requires_grad_() for x in (q, *keys, *earlier)]
    mask = causal_lower_right(queries, queries + before)

    def blocks(backward):
        o = merged(*(x.transpose(1, 2) for x in (q, *keys)), Blocks(gather))
        return torch.autograd.grad(o, leaves, do) if backward else o

    whole = [x.detach().requires_grad_() for x in (q, k, v)]

    def one(backward):
        options = dict(enable_gqa=True) if H != G else {}
        o = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in whole), attn_mask=mask, **options)
        return torch.autograd.grad(o.transpose(1, 2), whole, do) if backward else o

    kernel, rows = kernel_of(device, dtype, queries, H, G, D, V), []
    for backward in (False, True):
        row = dict(kernel=kernel.name, queries=queries, before=before, batch=batch, heads=H, kv_heads=G, D=D, V=V)
        row["pass"] = "both" if backward else "forward"
        for name, call in (("blocks_ms", blocks), ("one_kernel_ms", one)):
            try:
                for _ in range(2):
                    call(backward)
                row[name] = min(sample(lambda: call(backward), 5) for _ in range(3)) / 1e3  # noqa: B023
            except (RuntimeError, torch.OutOfMemoryError) as error:
                print(f"{name}: {str(error).splitlines()[0][:160]}", file=sys.stderr)
                row[name] = float("nan")
        print({name: x if not isinstance(x, float) else round(x, 3) for name, x in row.items()}, flush=True)
        rows.append(row)
    return rows


def kernel_named(name):
    (kernel,) = [kernel for kernel in attention_kernels.KERNELS if kernel.name == name]
    return kernel


def in_triangles(name, square):
    """Return a kernel by name that computes gradients of unmasked blocks in triangles, from ``square`` tokens on."""
    kernel = kernel_named(name)
    return kernel._replace(name=f"{name}, triangles", backward=attention_backward.by_triangles(kernel.backward, square))


def in_rows(name, row=attention_kernels.ROW, most=attention_kernels.ROWS_TIMES_KEYS):
    """Return a kernel by name that computes gradients of unmasked blocks in rows of a batch."""
    kernel = kernel_named(name)
    return kernel._replace(name=f"{name}, rows", backward=attention_backward.by_rows(kernel.backward, row, most))


def check_as(kernel, device, dtype, cases, limits) -> list[str]:
    """Return the failures of blocks by this kernel. cases: (batch, tokens, shape); warnings of triangles are errors."""
    wrong = []
    with mock.patch.object(attention_kernels, "KERNELS", (kernel,)), warnings.catch_warnings():
        warnings.filterwarnings("error", message="gradients of softmax attention in triangles")
        for batch, tokens, shape in cases:
            wrong += check(device, dtype, tokens, shape, batch, limits)
    return wrong


def check_triangles(device, dtype, name, tokens) -> list[str]:
    """Return the failures of gradients in triangles, in squares from tokens / 2 on."""
    cases = [(n, n * tokens, (4, 4, 192, 128)) for n in (1, 2)]
    return check_as(in_triangles(name, tokens // 2), device, dtype, cases, IN_TRIANGLES)


def check_rows(device, dtype, name, tokens) -> list[str]:
    """Return the failures of gradients by rows of tokens / 4 queries, of which a call has two to four."""
    cases = [(n, tokens, (8, 2, 256, 256)) for n in (1, 2)]
    return check_as(in_rows(name, tokens // 4, 2 * tokens), device, dtype, cases, LIMITS)


def compare_kernels(device, dtype) -> None:
    """Print each kernel's time for a block, forward and backward."""

    def padded(kernel, width):
        """Pad all heads to ``width`` with zeros."""

        def pad(x):
            return F.pad(x, (0, width - x.shape[-1]))

        def forward(q, k, v, causal, scale):
            o, lse, more = kernel.forward(pad(q), pad(k), pad(v), causal, scale)
            return o, lse, more

        def backward(do, q, k, v, o, lse, more, causal, scale):
            return kernel.backward(pad(do), pad(q), pad(k), pad(v), o, lse, more, causal, scale)

        return kernel._replace(name=f"{kernel.name}, padded to {width}", forward=forward, backward=backward)

    for H, G, D, V in ((16, 16, 128, 128), (16, 16, 192, 128), (16, 2, 256, 256)):
        kernels = [kernel_named("cudnn"), kernel_named("flash")]
        kernels += [in_triangles("cudnn", 1), in_rows("cudnn")]
        kernels += [padded(kernels[0], width) for width in (192, 256) if V < width and D <= width and D != V]
        for queries, keys, causal in BLOCKS if D != V else BLOCKS[:4]:
            q, k, v, do = drawn(device, dtype, 1, max(queries, keys), H, G, D, V)
            q, do, k, v = (x[:, :n].clone() for x, n in ((q, queries), (do, queries), (k, keys), (v, keys)))
            for kernel, heads_first in itertools.product(kernels, (False, True)):
                given = [x.transpose(1, 2) for x in (q, k, v, do)]
                given = [x.contiguous() if heads_first else x for x in given]
                scale, flops = D**-0.5, 2 * H * queries * keys / (1 + causal)
                try:
                    o, lse, more = kernel.forward(*given[:3], causal, scale)
                    found = kernel.backward(given[3], *given[:3], o, lse, more, causal, scale)
                    wanted = kernel_named("flash").forward(*given[:3], causal, scale)
                    wanted = kernel_named("flash").backward(given[3], *given[:3], *wanted, causal, scale)
                    apart = max(errors([x[..., : y.shape[-1]] for x, y in zip(found, wanted)], wanted))
                    ahead = functools.partial(kernel.forward, *given[:3], causal, scale)
                    back = functools.partial(kernel.backward, given[3], *given[:3], o, lse, more, causal, scale)
                    ms = [min(sample(call, 5) for _ in range(2)) / 1e3 for call in (ahead, back)]
                except RuntimeError as error:
                    print(f"{kernel.name}, {(H, G, D, V)}: {str(error).splitlines()[0][:140]}", flush=True)
                    continue
                speeds = flops * (D + V) / ms[0] / 1e9, flops * (3 * D + 2 * V) / ms[1] / 1e9
                how = f"{queries} x {keys} {'causal' if causal else 'unmasked'}{', heads first' * heads_first}"
                print(
                    f"{(H, G, D, V)} {how}, {kernel.name}: {ms[0]:.3f} and {ms[1]:.3f} ms, "
                    f"{speeds[0]:.0f} and {speeds[1]:.0f} TFLOP/s, {apart:.1e} from flash",
                    flush=True,
                )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--csv", default=results("attention.csv"))
    parser.add_argument("--checks-only", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        wrong = [w for shape in CHECKED for w in check(torch.device("cpu"), torch.float32, 24, shape, 2)]
        for checked in (check_triangles, check_rows):
            wrong += checked(torch.device("cpu"), torch.float32, "cpu", 24)
        assert not wrong, wrong
        return 0
    device, dtype, wrong = torch.device("cuda"), torch.bfloat16, []
    if arguments.kernels:
        compare_kernels(device, dtype)
        return 0
    for shape in CHECKED:
        wrong += check(device, dtype, 1024, shape)
        wrong += check_layouts(device, dtype, 1024, shape)
    wrong += check(device, dtype, 1024, CHECKED[0], batch=2)
    wrong += check_triangles(device, dtype, "cudnn", 512)
    wrong += check_rows(device, dtype, "cudnn", 2048)
    if not arguments.checks_only:
        with Table(arguments.csv, COLUMNS) as table:
            for shape in TIMED:
                for row in time_one(device, dtype, 1, *shape):
                    table.write(row)
    assert not wrong, "\n".join(wrong)
    print(f"wrote {arguments.csv}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
