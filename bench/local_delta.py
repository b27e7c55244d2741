"""python -m bench.local --rule kda: zeco_kda and zeco_gated_delta_rule on one GPU, with allscan's chunk kernels and
with fla's, against fla's operators and those of cuDNN's frontend, FlashQLA and attn_gym, if installed.

Each method is first compared with the token-by-token recurrence in float64, on 512 tokens, and then proven by the
kernels that it launches. Times are of CUDA graphs of one call, medians over samples of 10 replays; for packed sequences
of 10 calls, since fla waits for the GPU there. fla's dispatch to other packages is disabled; --backends enables it, and
the column proof shows the kernels that ran. fla rejects the backward of Gated DeltaNet on Hopper before Triton 3.7.1:
then only forward is measured. Exceptions are printed and have no row.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton

import allscan
from allscan.bindings.versions import number
from allscan.reference import delta_reference
from bench.harness import both_passes, checked, step
from bench.proof import kernels, ran
from bench.tuning import Job

K, SAMPLES, CHECKED = 128, 15, 512
COLUMNS = ("shape", "rule", "gates", "method", "note", "forward_us", "forward_backward_us", "extra_mib", "max_error")
COLUMNS += ("proof", "gpu", "torch", "triton", "sources")


class Method(NamedTuple):
    """A method. make(comm, boundaries on the host or None) returns a function of q, k, v, g, beta, whose first result
    is o. wanted, unwanted: names of kernels that it must and must not run, a dict: how often in both passes, None for
    any number. note: difference from other methods."""

    rule: str
    make: Callable
    wanted: tuple[str, ...] | dict[str, int | None] = ()
    unwanted: tuple[str, ...] = ()
    package: str = "allscan"
    note: str = ""

    def trains(self) -> bool:
        rejected = self.make is _FLA_GDN and torch.cuda.get_device_capability()[0] == 9
        return not rejected or number(triton.__version__) >= (3, 7, 1)


def _ours(operator, chunk: str, **options) -> Callable:
    return lambda comm, lengths: functools.partial(operator, comm=comm, cu_seqlens=lengths, chunk=chunk, **options)


def _fla(module: str, name: str, **options) -> Callable:
    def make(_, lengths):
        operator = getattr(importlib.import_module(module), name)
        return functools.partial(operator, **options, **({} if lengths is None else dict(cu_seqlens=lengths.cuda())))

    return make


def _cudnn(_, lengths) -> Callable:
    from cudnn.linear_attention.ops import kimi_delta_attention

    def call(q, k, v, g, beta):
        bounds = torch.tensor([0, q.shape[1]], device=q.device) if lengths is None else lengths.cuda()
        found = kimi_delta_attention(*(x[0] for x in (q, k, v, g, beta)), bounds.int())
        return found[0][None], *found[1:]

    return call


def _attn_gym(module: str, name: str) -> Callable:
    def make(_, lengths):
        operator = getattr(importlib.import_module(f"attn_gym.linear.{module}"), name)
        return functools.partial(operator, cu_seqlens=None if lengths is None else lengths.int().cuda())

    return make


_FLA_GDN = _fla("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
_KDA = functools.partial(_fla, "fla.ops.kda", "chunk_kda")
METHODS = {
    "zeco_kda, chunk=allscan": Method(
        "kda", _ours(allscan.zeco_kda, "allscan"), ("operands_kernel", "output_kernel"), ("chunk_kda",)
    ),
    "zeco_kda, recompute=False": Method(
        "kda",
        _ours(allscan.zeco_kda, "allscan", recompute=False),
        {"operands_kernel": 2, "output_kernel": None},  # without the third, of backward
        ("chunk_kda",),
        note="keeps w, u, kg, qg",
    ),
    "zeco_kda, chunk=fla": Method(
        "kda", _ours(allscan.zeco_kda, "fla"), ("delta_states_kernel", "chunk_kda"), ("operands_kernel",), "fla"
    ),
    "fla chunk_kda": Method("kda", _KDA(), ("chunk_kda",), ("operands_kernel", "summary_kernel"), "fla"),
    "fla chunk_kda, safe_gate": Method(
        "kda",
        _KDA(safe_gate=True, lower_bound=-5.0),
        ("chunk_kda",),
        ("operands_kernel",),
        "fla",
        "gates of at least -5",
    ),
    "fla chunk_kda, disable_recompute": Method(
        "kda", _KDA(disable_recompute=True), ("chunk_kda",), ("operands_kernel",), "fla", "keeps w, u, kg, qg"
    ),
    "cudnn kimi_delta_attention": Method(
        "kda", _cudnn, (), ("chunk_kda", "operands_kernel"), "cudnn", "gates of at least -5, a truncated state"
    ),
    "attn_gym chunk_kda": Method(
        "kda", _attn_gym("kda", "chunk_kda"), (), ("operands_kernel", "summary_kernel"), "attn_gym", "gates above -5.9"
    ),
    "zeco_gated_delta_rule, chunk=allscan": Method(
        "gated_delta_rule",
        _ours(allscan.zeco_gated_delta_rule, "allscan"),
        ("operands_kernel", "scalar_states_kernel"),
        ("chunk_fwd",),
    ),
    "zeco_gated_delta_rule, recompute=False": Method(
        "gated_delta_rule",
        _ours(allscan.zeco_gated_delta_rule, "allscan", recompute=False),
        {"operands_kernel": None, "scalar_states_kernel": 1},  # without the second, of backward
        ("chunk_fwd",),
        note="keeps the chunks' states, v_new",
    ),
    "zeco_gated_delta_rule, chunk=fla": Method(
        "gated_delta_rule",
        _ours(allscan.zeco_gated_delta_rule, "fla"),
        ("delta_states_kernel", "chunk_fwd"),
        ("operands_kernel",),
        "fla",
    ),
    "fla chunk_gated_delta_rule": Method(
        "gated_delta_rule",
        _FLA_GDN,
        ("chunk_fwd",),
        ("operands_kernel", "summary_kernel"),
        "fla",
    ),
    "flash_qla chunk_gated_delta_rule": Method(
        "gated_delta_rule",
        _fla("flash_qla", "chunk_gated_delta_rule"),
        (),
        ("operands_kernel", "summary_kernel"),
        "flash_qla",
    ),
    "attn_gym chunk_gdn": Method(
        "gated_delta_rule", _attn_gym("gdn", "chunk_gdn"), (), ("operands_kernel", "summary_kernel"), "attn_gym"
    ),
}


class Shape(NamedTuple):
    T: int
    H: int
    V: int = 128
    gates: str = "weak"  # logsigmoid(normal) / 16; "mild": logsigmoid(normal); "strong": -5 sigmoid(2 normal)
    packed: bool = False  # 37 sequences of uneven lengths
    rule: str = "kda"

    def __str__(self) -> str:
        return f"1x{self.T}x{self.H}x{K}x{self.V}{', packed' if self.packed else ''}"

    @property
    def job(self) -> Job:
        """Return what bench.tuning compiles for fla's operator."""
        return Job(self.rule, self.H, "halves" if self.packed else "one rank", V=self.V)

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
    Shape(16384, 32, rule="gated_delta_rule"),
    Shape(16384, 32, gates="strong", rule="gated_delta_rule"),
    Shape(4096, 32, rule="gated_delta_rule"),
)


def drawn(shape: Shape, tokens: int, device, dtype=torch.bfloat16):
    """Draw ([q, k, v, g, beta], do)."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*width):
        return torch.randn(1, tokens, shape.H, *width, generator=generator, device=device)

    q, k = (F.normalize(normal(K), dim=-1).to(dtype) for _ in "qk")
    v, do = (normal(shape.V).to(dtype) for _ in "vo")
    raw = normal(*([K] if shape.rule == "kda" else []))
    g = -5 * (2 * raw).sigmoid() if shape.gates == "strong" else F.logsigmoid(raw)
    g /= 16 if shape.gates == "weak" else 1
    return [x.requires_grad_() for x in (q, k, v, g, normal().sigmoid())], do


def installed(shape: Shape | None = None) -> list[str]:
    """Return the methods of the shape's rule, or of all rules, whose packages are installed."""
    return [
        name
        for name, x in METHODS.items()
        if (shape is None or x.rule == shape.rule) and importlib.util.find_spec(x.package) is not None
    ]


def method(name: str, comm, lengths):
    """Return the method's function of q, k, v, g, beta."""
    call = METHODS[name].make(comm, lengths)
    return lambda *x: call(*x)[0]


def check(name: str, comm, shape: Shape, tokens: int = CHECKED, limit: float = 1e-2) -> float:
    """Return the largest relative error of o and the gradients against float64."""
    lengths = shape.boundaries(tokens)
    (leaves, do), both = drawn(shape, tokens, comm.device), METHODS[name].trains()
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = step(exact, do.double(), lambda *x: delta_reference(*x, cu_seqlens=lengths)[0], both)
    return checked(name, step(leaves, do, method(name, comm, lengths), both), expected, limit)


def measure(name: str, comm, shape: Shape, backends: bool = False) -> dict:
    row = dict(max_error=check(name, comm, shape), note=METHODS[name].note)
    (leaves, do), both = drawn(shape, shape.T, comm.device), METHODS[name].trains()
    call = method(name, comm, shape.boundaries(shape.T))
    step(leaves, do, call, both)
    found = kernels(functools.partial(step, leaves, do, call, both))
    of_others = "; ".join(sorted(found)) if backends or METHODS[name].package not in ("allscan", "fla") else ""
    row["proof"] = of_others[:500] or ran(name, found, METHODS[name].wanted, METHODS[name].unwanted)
    return row | both_passes(leaves, do, call, shape.packed, SAMPLES, both)


def rows(comm, names, backends: bool = False, shapes=SHAPES):
    """Yield the table row by row; print exceptions, and continue with other methods. backends: only fla's methods, with
    its dispatch to other packages."""
    if not backends:
        os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"  # before fla is imported
    for shape in shapes:
        for name in [name for name in installed(shape) if name in names]:
            try:
                row = measure(name, comm, shape, backends)
            except Exception as error:
                print(f"FAILED: {shape} {shape.gates} {name}: {error!r}"[:400], flush=True)
                continue
            told = name + (", its back ends on" if backends else "")
            yield dict(row, shape=str(shape), rule=shape.rule, gates=shape.gates, method=told)
