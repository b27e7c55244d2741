"""Measures each chunk kernel of the delta rules with other block sizes and fewer registers against the used ones.

    python -m bench.chunks                      # one GPU, about 90 s; prints a table
    python -m bench.chunks --only gradient

Inputs: 1 x 16384 x 32 x 128 x 128, bfloat16, gates float32, logsigmoid(normal) / 16 ("weak"), logsigmoid(normal), -5
sigmoid(2 normal) ("strong"), or logsigmoid(normal) times 0, 1e-4, 1 or 100, by channel ("mixed"); states and their
gradients are random. Results are compared with the token-by-token recurrence in float64 and its autograd, in a few
chunks. A time is the mean of consecutive calls, printed with the time to move the kernel's inputs and outputs at 3.0
TB/s. Each group runs in its own process, so that an illegal memory access stops no other group. Kernels are compiled
ahead, in parallel.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from allscan.bindings.triton_compat import OPTIONS
from allscan.ops.delta.kda_plans import chunk_blocks
from allscan.reference import delta_reference
from allscan.shmem_kernels import kda_bwd as bwd
from allscan.shmem_kernels import kda_fwd
from allscan.shmem_kernels.delta_state import DeltaSizes
from allscan.tokens import packing

C, K = 64, 128
BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
CALLS, SECONDS = 6, 100.0


class Variant(NamedTuple):
    """A kernel with its constants and options."""

    group: str  # name of its results
    kernel: Any
    constants: dict[str, Any]
    options: dict[str, int] = {}
    beside: tuple[str, ...] = ()  # names of variants that are launched before it and produce its inputs


def variants() -> dict[str, Variant]:
    """Return {name: variant}; in each group the variant in use is the first."""
    used, found = chunk_blocks(K, K, BF16), {}

    def add(group: str, kernel, constants: dict[str, Any], *others: dict[str, int], beside: tuple[str, ...] = ()):
        for other in ({}, *others):
            sizes = {x.replace("num_", ""): y for x, y in (used[group] | other).items()}
            name = ", ".join([group, *(f"{x} {y}" for x, y in sizes.items())])
            name = name if other else group
            found[name] = Variant(group, kernel, constants, used[group] | other, beside)

    operands = kda_fwd.operands_kernel
    add("operands", operands, dict(SOLVED=False, STRONG=False), dict(BV=128), dict(BJ=32, BV=128))
    add("strong", operands, dict(SOLVED=False, STRONG=True), dict(BJ=64), dict(BJ=64, BV=64))
    add("solved", operands, dict(SOLVED=True, STRONG=False))
    add("pairs", bwd.pairs_kernel, {}, dict(BV=128, maxnreg=255))
    add("gradient", bwd.gradient_kernel, dict(REST=False), dict(BV=64), beside=("pairs",))
    add("rest", bwd.gradient_kernel, dict(REST=True), dict(BV=128), beside=("pairs",))
    return found


TYPES = dict.fromkeys(
    "p_q p_k p_v p_do p_states p_dstates p_v_new p_r p_weights p_pairs p_scores p_solved p_w p_u "
    "p_kg p_qg p_dq p_dk p_dv".split(),
    BF16,
)
TYPES |= dict.fromkeys("p_g p_beta p_sums p_parts p_dg p_dbeta".split(), F32) | dict(p_chunks=I32, p_strong=I32)


def fixed(variant: Variant, H: int) -> dict[str, Any]:
    blocks, options = (
        {x: y for x, y in variant.options.items() if (x in DeltaSizes._fields) == field} for field in (True, False)
    )
    d = DeltaSizes(H=H, HK=H, K=K, V=K, BT=C, **blocks)
    return dict(d=d, PRECISION="bf16") | variant.constants | options


def compile_one(name: str, H: int) -> None:
    """Compile a variant into Triton's cache."""
    variant = variants()[name]
    given = [TYPES.get(x, 0.1) for x in variant.kernel.arg_names if x in TYPES or x == "scale"]
    variant.kernel.warmup(*given, **fixed(variant, H), **OPTIONS, grid=(1,))


class Chunks:
    """Inputs and outputs of the kernels, and the reference of a few chunks."""

    def __init__(self, gates: str, T: int, H: int, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape):
            return torch.randn(shape, generator=generator, device=device)

        self.N, self.H, self.scale = T // C, H, K**-0.5
        mild = gates in ("weak", "logsigmoid")
        q, k = (F.normalize(normal(T, H, K), dim=-1).to(BF16) for _ in "qk")
        g = F.logsigmoid(normal(T, H, K)) if mild else -5 * (2 * normal(T, H, K)).sigmoid()
        g /= 16 if gates == "weak" else 1
        if gates == "mixed":
            g *= torch.tensor([0.0, 1e-4, 1.0, 100.0], device=device)[torch.randint(0, 4, (1, H, K), device=device)]
        states = ((0.3 * normal(self.N, H, K, K)).to(BF16) for _ in "sd")
        start = torch.arange(0, T, C, dtype=I32, device=device)
        self.x = dict(zip(("p_v", "p_do"), (normal(T, H, K).to(BF16) for _ in "vo")), p_q=q, p_k=k, p_g=g)
        self.x |= dict(zip(("p_states", "p_dstates"), states), p_beta=normal(T, H).sigmoid())
        self.x |= dict(
            p_weights=packing.chunk_weights(C, torch.device(device)), p_chunks=torch.stack([start, start + C], 1)
        )
        shapes = dict.fromkeys("p_v_new p_r p_w p_u p_kg p_qg p_dq p_dk p_dv p_dg".split(), (T, H, K))
        shapes |= dict(p_scores=(T, H, C), p_solved=(T, H, C), p_dbeta=(T, H), p_strong=(self.N, H))
        shapes |= dict(p_sums=(self.N + 1, H, K), p_parts=(self.N, H, 4, C), p_pairs=(self.N, H, 2, C, C))
        self.x |= {name: torch.zeros(shape, dtype=TYPES[name], device=device) for name, shape in shapes.items()}
        self.places = sorted({(0, 0), (self.N // 2, H // 2), (self.N - 1, H - 1)})
        self.wanted = [self._recurrence(*at) for at in self.places]

    def _recurrence(self, n: int, h: int) -> dict[str, torch.Tensor]:
        rows = slice(n * C, n * C + C)
        leaves = [self.x[f"p_{name}"][None, rows, h, None].double().requires_grad_() for name in "q k v g beta".split()]
        state, dstate, do = (self.x[f"p_{name}"] for name in ("states", "dstates", "do"))
        o, final = delta_reference(*leaves, initial_state=state[n, h].double()[None, None], scale=self.scale)
        loss = (o[0, :, 0] * do[rows, h].double()).sum() + (final[0, 0] * dstate[n, h].double()).sum()
        grads = torch.autograd.grad(loss, leaves)
        return dict(o=o[0, :, 0].detach()) | {f"d{x}": d[0, :, 0] for x, d in zip("q k v g beta".split(), grads)}

    def launch(self, variant: Variant) -> Any:
        given = [self.x.get(x, self.scale) for x in variant.kernel.arg_names if x in TYPES or x == "scale"]
        return variant.kernel[(self.N * self.H,)](*given, **fixed(variant, self.H), **OPTIONS)

    def floor(self, variant: Variant, rate: float = 3.0e9) -> float:
        """Return the ms for reading inputs and writing outputs once at 3.0 TB/s."""
        return sum(self.x[x].nbytes for x in variant.kernel.arg_names if x in TYPES) / rate

    def spoil(self, names: str) -> None:
        for name in names.split():
            self.x[f"p_{name}"].fill_(float("nan"))

    def between(self) -> None:
        """Compute v_new and r from the results of operands_kernel."""
        w, u, kg, scores, solved, do = (
            self.x[f"p_{name}"].unflatten(0, (-1, C)).transpose(1, 2).float()
            for name in "w u kg scores solved do".split()
        )
        v_new = u - w @ self.x["p_states"].float()
        r = scores.mT @ do + kg @ self.x["p_dstates"].float()
        r += solved.mT @ r
        for name, x in (("p_v_new", v_new), ("p_r", r)):
            self.x[name].copy_(x.transpose(1, 2).flatten(0, 1))

    def output(self) -> torch.Tensor:
        state, qg, scores, v_new = (self.x[f"p_{name}"] for name in "states qg scores v_new".split())
        qg, scores, v_new = (x.unflatten(0, (-1, C)).transpose(1, 2).float() for x in (qg, scores, v_new))
        return (self.scale * qg @ state.float() + scores @ v_new).transpose(1, 2).flatten(0, 1)

    def errors(self, made: dict[str, torch.Tensor]) -> dict[str, float]:
        """Return the largest errors, relative to each tensor's norm."""
        found = {}
        for name, x in made.items():
            parts = [(x[n * C : n * C + C, h].double(), w[name]) for (n, h), w in zip(self.places, self.wanted)]
            found[name] = torch.stack([(x - w).norm() / w.norm() for x, w in parts]).max().item()  # NaN if any is
        return found


def anchored(chunks: Chunks, ALL: bool = False) -> None:
    """Compute the flags of strong chunks, and their anchors, with ALL also those of weak ones."""
    chunks.launch(variants()["operands"])
    fixed = dict(d=DeltaSizes(H=chunks.H, K=K, BT=C, BK=K), ALL=ALL, num_warps=1)
    given = [chunks.x[f"p_{name}"] for name in ("g", "chunks", "strong")]
    kda_fwd.anchors_kernel[(chunks.N * chunks.H,)](*given, **fixed, **OPTIONS)


def measure(chunks: Chunks, name: str, known: dict[str, Variant], timed: bool) -> dict[str, float]:
    """Return errors against float64; with ``timed`` also ms, registers and bytes spilled."""
    variant = known[name]
    if variant.kernel is kda_fwd.operands_kernel:
        chunks.spoil("w u kg qg" if variant.group == "solved" else "w u kg qg scores solved")
        if variant.group == "strong":
            anchored(chunks)
        compiled = chunks.launch(variant)
        chunks.between()
        found = chunks.errors(dict(o=chunks.output()))
    else:
        chunks.spoil("dq dk dv dg dbeta pairs parts")
        for other in (known[x] for x in variant.beside):
            chunks.launch(other)
        compiled = chunks.launch(variant)
        if variant.group == "pairs":
            chunks.launch(known["gradient"])
        found = chunks.errors({x: chunks.x[f"p_{x}"] for x in "dq dk dv dg dbeta".split()})
    if timed:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in "fl")
        first.record()
        for _ in range(CALLS):
            chunks.launch(variant)
        last.record()
        torch.cuda.synchronize()
        found |= dict(ms=first.elapsed_time(last) / CALLS, registers=compiled.n_regs, spilled=compiled.n_spills)
        found["floor"] = chunks.floor(variant)
    return found


def groups(gates: str) -> list[str]:
    operands = ["strong"] if gates in ("strong", "mixed") else ["operands", "solved"]
    return operands + (["rest"] if gates == "mixed" else ["pairs", "gradient"])


def run(gates: str, group: str, T: int, H: int, device: str, limit: float = 1.5e-2) -> int:
    """Run a group; return the number of variants that are wrong or fail."""
    known, wrong = variants(), 0
    chunks = Chunks(gates, T, H, device)
    anchored(chunks)
    chunks.launch(known["strong"])
    chunks.between()
    if known[group].kernel is not kda_fwd.operands_kernel:
        anchored(chunks, ALL=True)
    for name in [x for x in known if known[x].group == group]:
        try:
            found = measure(chunks, name, known, device == "cuda")
        except Exception as error:
            print(f"FAILED: {name}: {error!r}", flush=True)
            return wrong + 1
        times = [f"{x} {found.pop(x):.4g}" for x in ("ms", "floor", "registers", "spilled") if x in found]
        print(f"{gates:6} {name:50}", *times, *(f"{x} {y:.2e}" for x, y in found.items()), flush=True)
        wrong += not all(error < limit for error in found.values())
    return wrong


def ended(command: list[str]) -> bool:
    """Run a command; return whether it failed or timed out."""
    try:
        return subprocess.run(command, timeout=SECONDS, check=False).returncode != 0
    except subprocess.TimeoutExpired:
        print(f"FAILED: more than {SECONDS:.0f} s", flush=True)
        return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", help="a group: operands, strong, solved, pairs, gradient, rest")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--compile", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--group", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        for name in options.compile:
            compile_one(name, options.heads)
        return 0
    if options.group:
        return run(*options.group, options.tokens, options.heads, "cuda")
    if not torch.cuda.is_available():
        print("No GPU here; tests/bench/test_chunks.py runs the variants on CPUs and compiles them for sm_90.")
        return 0
    begin, sizes = time.monotonic(), ["--tokens", str(options.tokens), "--heads", str(options.heads)]
    command, names = [sys.executable, "-m", "bench.chunks", *sizes], sorted(variants(), key=lambda x: "strong" not in x)
    count = min(len(names), os.cpu_count() or 1)
    compiling = [subprocess.Popen([*command, "--compile", *names[i::count]]) for i in range(count)]
    wrong = sum(process.wait() != 0 for process in compiling)
    print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
    for gates in ("weak", "logsigmoid", "strong", "mixed"):
        for group in groups(gates):
            if options.only in (None, group):
                wrong += ended([*command, "--group", gates, group])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
