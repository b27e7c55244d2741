"""python -m bench.local --rule kda: zeco_kda on one GPU, by our own chunk kernels and by fla's, beside fla's chunk_kda.

Each method is compared with the token-by-token recurrence in float64 first, on 512 tokens, and then proven by the
kernels that it launches. Times are of CUDA graphs of one call, medians over samples of 10 replays; of packed sequences
of 10 calls, since fla waits for the GPU there. fla is told not to pass its calls on to other packages.
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

import torch
import torch.nn.functional as F

import allscan
from allscan.reference import delta_reference
from bench.harness import both_passes, checked, step
from bench.proof import kernels, ran

K, SAMPLES, CHECKED = 128, 15, 512
COLUMNS = ("shape", "gates", "method", "forward_us", "forward_backward_us", "extra_mib", "max_error", "proof")
COLUMNS += ("gpu", "torch", "triton", "sources")
# What must be among the names of a method's kernels, and what must not
SEEN = {
    "zeco_kda, chunk=allscan": (("operands_kernel", "output_kernel"), ("chunk_kda",)),
    "zeco_kda, chunk=fla": (("delta_states_kernel", "chunk_kda"), ("operands_kernel",)),
    "fla chunk_kda": (("chunk_kda",), ("operands_kernel", "summary_kernel")),
}


class Shape(NamedTuple):
    T: int
    H: int
    V: int = 128
    gates: str = "weak"  # logsigmoid(normal) / 16; "mild": logsigmoid(normal); "strong": -5 sigmoid(2 normal)
    packed: bool = False  # 37 sequences of uneven lengths

    def __str__(self) -> str:
        return f"1x{self.T}x{self.H}x{K}x{self.V}{', packed' if self.packed else ''}"

    def boundaries(self, tokens: int):
        if not self.packed:
            return None
        cuts = torch.rand(36, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 2
        return torch.tensor([0, *sorted((cuts * tokens).long().tolist()), tokens])


SHAPES = Shape(16384, 32), Shape(16384, 32, gates="mild"), Shape(16384, 32, gates="strong")
SHAPES += (
    Shape(16384, 32, packed=True),
    Shape(4096, 32),
    Shape(2048, 32),
    Shape(16384, 8),
    Shape(16384, 32, V=64),
    Shape(16384, 32, V=256),
)


def drawn(shape: Shape, tokens: int, device, dtype=torch.bfloat16):
    """([q, k, v, g, beta], do)."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*width):
        return torch.randn(1, tokens, shape.H, *width, generator=generator, device=device)

    q, k = (F.normalize(normal(K), dim=-1).to(dtype) for _ in "qk")
    v, do = (normal(shape.V).to(dtype) for _ in "vo")
    g = -5 * (2 * normal(K)).sigmoid() if shape.gates == "strong" else F.logsigmoid(normal(K))
    g /= 16 if shape.gates == "weak" else 1
    return [x.requires_grad_() for x in (q, k, v, g, normal().sigmoid())], do


def method(name: str, comm, lengths):
    """A function of q, k, v, g, beta."""
    if name.startswith("zeco"):
        options = dict(comm=comm, cu_seqlens=lengths, chunk=name.partition("=")[2])
        return lambda *x: allscan.zeco_kda(*x, **options)[0]
    from fla.ops.kda import chunk_kda

    options = {} if lengths is None else dict(cu_seqlens=lengths.cuda())
    return lambda *x: chunk_kda(*x, **options)[0]


def check(name: str, comm, shape: Shape, tokens: int = CHECKED, limit: float = 1e-2) -> float:
    """Largest relative error of o and the gradients against float64."""
    lengths = shape.boundaries(tokens)
    leaves, do = drawn(shape, tokens, comm.device)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = step(exact, do.double(), lambda *x: delta_reference(*x, cu_seqlens=lengths)[0], True)
    return checked(name, step(leaves, do, method(name, comm, lengths), True), expected, limit)


def measure(name: str, comm, shape: Shape) -> dict:
    row = dict(max_error=check(name, comm, shape))
    leaves, do = drawn(shape, shape.T, comm.device)
    call = method(name, comm, shape.boundaries(shape.T))
    step(leaves, do, call, True)
    row["proof"] = ran(name, kernels(functools.partial(step, leaves, do, call, True)), *SEEN[name])
    return row | both_passes(leaves, do, call, shape.packed, SAMPLES)


def rows(comm, names):
    """Row by row of the table; what raises is printed, and the others go on."""
    os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"  # before fla is imported
    for shape in SHAPES:
        for name in names:
            try:
                row = measure(name, comm, shape)
            except Exception as error:
                print(f"FAILED: {shape} {shape.gates} {name}: {error!r}", flush=True)
                continue
            yield dict(row, shape=str(shape), gates=shape.gates, method=name)
