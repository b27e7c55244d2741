"""Compiles and autotunes flash-linear-attention's and mamba_ssm's kernels before a measurement.

fla chooses among hundreds of configurations. Before a rank does, many processes compile them (compile_ahead); then one
process per GPU times each for 15 ms (Triton: 100) with TUNED_AT tokens. fla stores the choices in Triton's cache, and
all ranks read them there for all T and, with most kernels, all H: fla's keys do not contain these.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import multiprocessing
import os
import re
import sys
import tempfile
import time
import traceback
import types
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
import triton

from bench import harness

TUNED_AT = 16384  # tokens
OF_FLA = ("gdn2", "gated_delta_product", "dplr", "rwkv7")  # rules that only fla has
TIMED = [0]  # number of configurations timed in this process


def inputs(rule, T, H, gate, device, seed, dtype=torch.bfloat16, K=None, V=None):
    """Draw ([q, k, v, g, beta], gradient of o, a state); for the rules OF_FLA the inputs of fla's operator."""
    generator, K = torch.Generator(device).manual_seed(seed), K or (64 if rule in ("dplr", "rwkv7") else 128)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=device)

    n = 2 if rule == "gated_delta_product" else 1  # tokens of k, v and beta for each of q
    q, k = (F.normalize(normal(1, t, H, K), dim=-1).to(dtype) for t in (T, n * T))
    v, do = (normal(1, t, H, V or K).to(dtype) for t in (n * T, T))
    g = F.logsigmoid(normal(1, T, H) if rule.startswith("gated") else normal(1, T, H, K)) * gate
    beta, state = normal(1, n * T, H).sigmoid(), normal(1, H, K, V or K)
    if rule == "gdn2":
        return [q, k, v, g, *(torch.randn_like(x).sigmoid() for x in (k, v))], do, state
    if rule in ("dplr", "rwkv7"):
        a = -F.normalize(torch.randn_like(k), dim=-1)
        b = -a * torch.randn_like(k).sigmoid()
        return [q, k, v, a, b, g] if rule == "dplr" else [q, g, k, v, a, b], do, state
    return [q, k, v, g, beta], do, state


def of_ssd(T, H, P, G, N, strong=False, device="cuda", dtype=torch.bfloat16):
    """Draw ({name: tensor}, dy) for zeco_ssd."""
    make = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=make)

    mixed = torch.cat([normal(1, T, H * P), normal(1, T, 2 * G * N) / N**0.5], 2).to(device, dtype)
    x, B, C = mixed.split([H * P, G * N, G * N], 2)
    steps = torch.exp(torch.rand(H, generator=make) * 4.6 - 6.9)  # Mamba2's: 0.001 to 0.1
    A = -torch.arange(1.0, H + 1) if strong else -(1 + 15 * torch.rand(H, generator=make))
    given = dict(
        x=x.unflatten(2, (H, P)),
        dt=(normal(1, T, H) * 0.5).to(device, dtype),
        A=A.to(device),
        B=B.unflatten(2, (G, N)),
        C=C.unflatten(2, (G, N)),
        D=normal(H).to(device),
        dt_bias=(steps + torch.log(-torch.expm1(-steps))).to(device),
    )
    leaves = {name: t.detach().requires_grad_() for name, t in given.items()}
    return leaves, normal(1, T, H, P).to(device, dtype)


def of_simple_gla(T, H, P, G, N, strong=False, device="cuda", dtype=torch.bfloat16):
    """Draw ({name: tensor}, do) for zeco_simple_gla. With g, fla rejects its backward on Hopper and Triton 3.6."""
    make = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, T, G, N, generator=make).to(device, dtype) for _ in "qk")
    v, do = (torch.randn(1, T, H, P, generator=make).to(device, dtype) for _ in "vo")
    g_gamma = torch.linspace(-1, -1e-3, H).to(device) * (100 if strong else 1)
    return {name: t.requires_grad_() for name, t in dict(q=q, k=k, v=v).items()} | dict(g_gamma=g_gamma), do


def mamba():
    """Return mamba_chunk_scan_combined, without the rest of mamba_ssm, which imports CUDA extensions."""
    if "mamba_ssm" not in sys.modules:
        spec = importlib.util.find_spec("mamba_ssm")
        package = types.ModuleType("mamba_ssm")
        package.__path__ = list(spec.submodule_search_locations)
        package.__spec__ = spec
        sys.modules["mamba_ssm"] = package
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    return mamba_chunk_scan_combined


def fla_operator(rule):
    from fla.ops.gated_delta_product import chunk_gated_delta_product
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.gdn2 import chunk_gdn2
    from fla.ops.generalized_delta_rule import chunk_dplr_delta_rule
    from fla.ops.kda import chunk_kda
    from fla.ops.rwkv7 import chunk_rwkv7

    safe = dict(safe_gate=True, chunk_size=64)  # as in fla's RWKV-7 layer
    return {
        "kda": chunk_kda,
        "gated_delta_rule": chunk_gated_delta_rule,
        "gdn2": chunk_gdn2,
        "gated_delta_product": functools.partial(chunk_gated_delta_product, num_householder=2),
        "dplr": functools.partial(chunk_dplr_delta_rule, **safe),
        "rwkv7": functools.partial(chunk_rwkv7, lower_bound=-0.6065306597126334, **safe),
    }[rule]


def fla_trains(rule) -> bool:
    """Whether fla runs the rule's backward: with Triton before 3.7.1 it rejects two of them on Hopper."""
    numbers = tuple(map(int, re.findall(r"\d+", triton.__version__)[:3]))
    return not rule.startswith("gated") or numbers >= (3, 7, 1)


def step(call, given, do, state, backward):
    """Run one call; return (o, gradients of the inputs) or (o,). ``state`` is the gradient of a final state."""
    leaves = [x.detach().requires_grad_(backward) for x in given]
    initial = state.detach().requires_grad_(backward)
    with torch.set_grad_enabled(backward):
        o, final = call(*leaves, initial)
    if not backward:
        return [o.detach()]
    outs, ways = ([o], [do]) if final is None else ([o, final], [do, state])
    return [o.detach(), *torch.autograd.grad(outs, leaves, ways)]


def time_quickly() -> None:
    """Time each configuration in this process for 15 ms, after 5 ms of warm-up; Triton's default is 100 after 25."""
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    def timed(call, quantiles):
        TIMED[0] += 1
        return do_bench(call, warmup=5, rep=15, quantiles=quantiles)

    Autotuner.do_bench = property(lambda self: timed)


class Job(NamedTuple):
    """Calls of fla or mamba_ssm to tune ahead. rule: also "gla", "simple_gla" and, with N and P as K and V, "mamba".
    kind: "one rank", with states and without; "cp_context", as a middle rank; "halves": packed, as in the zigzag
    layout; "packed", for "gla". normalized: numbers of tokens for which fla's kernel that normalizes queries has
    its own configuration."""

    rule: str
    H: int
    kind: str = "one rank"
    beta: torch.dtype = torch.float32
    normalized: tuple[int, ...] = ()
    K: int = 128  # another only for "gla", "simple_gla" and "mamba"
    V: int = 128
    G: int = 1  # only for "mamba"

    def run(self, T: int, device: torch.device) -> None:
        """Launch every fla kernel that a rank uses; of Gated DeltaNet's backward those of zeco_gated_delta_rule."""
        if self.rule in ("gla", "simple_gla", "mamba"):
            return getattr(self, f"_{self.rule}")(T, device)
        for tokens in self.normalized:
            self._normalize(tokens, device)
        V = None if self.rule in OF_FLA else self.V  # the width that inputs() has for the rule
        given, do, state = inputs(self.rule, T, self.H, 0.1, device, 1, V=V)
        if self.rule not in OF_FLA:
            given[4] = given[4].to(self.beta)
        operator, options = fla_operator(self.rule), {}
        if self.kind == "cp_context":
            options = dict(cp_context=middle_of_three(T, device))
        if self.kind == "halves":
            options = dict(cu_seqlens=torch.tensor([0, T // 2, T], device=device))
        calls = [lambda *x: operator(*x[:-1], **options)]
        if self.kind == "one rank":
            calls.append(lambda *x: operator(*x[:-1], initial_state=x[-1], output_final_state=True))
        trains = fla_trains(self.rule)
        replaced = mock.patch("fla.ops.gated_delta_rule.chunk.chunk_bwd_dqkwg", rejected)
        with contextlib.nullcontext() if trains else replaced:
            for call in calls:
                step(call, given, do, state, trains or self.kind == "one rank")

    def _normalize(self, T: int, device: torch.device) -> None:
        from fla.modules.l2norm import l2norm

        x = torch.zeros(1, T, self.H, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
        l2norm(x).backward(torch.zeros_like(x))

    def _gla(self, T: int, device: torch.device) -> None:
        from fla.ops.gla import chunk_gla

        leaves, do = harness.inputs(T, self.H, self.K, device, V=self.V)
        packed = dict(cu_seqlens=torch.tensor([0, T // 2, T], device=device)) if self.kind == "packed" else {}
        chunk_gla(*leaves, **packed)[0].backward(do)

    def _simple_gla(self, T: int, device: torch.device) -> None:
        from fla.ops.simple_gla import chunk_simple_gla

        leaves, do = of_simple_gla(T, self.H, self.V, self.H, self.K, device=device)
        chunk_simple_gla(**leaves)[0].backward(do)

    def _mamba(self, T: int, device: torch.device) -> None:
        leaves, dy = of_ssd(T, self.H, self.V, self.G, self.K, device=device)
        x, dt, A, B, C, D, bias = leaves.values()
        mamba()(x, dt, A, B, C, 256, D=D, dt_bias=bias, dt_softplus=True).backward(dy)


def rejected(*, q, k, w, g, **_):
    """Replace the kernel that fla rejects."""
    return tuple(torch.zeros_like(x) for x in (q, k, w, g))


def middle_of_three(T: int, device: torch.device):
    """Return fla's context of a middle rank with fake neighbours: it launches all kernels."""
    from fla.ops.cp import build_cp_context
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
    bounds = torch.tensor([0, 3 * T], dtype=torch.int32, device=device)
    return build_cp_context(bounds, dist.group.WORLD)


def compile_share(claims: str, shares: list[tuple[int, list[Job]]]) -> list[str]:
    """Compile the configurations of fla's kernels that no other process has claimed, into Triton's cache, without a
    launch. Compiles for each share the configurations that Triton would time: for known keys, even with another number
    of heads, Triton uses its earlier choice. Return the errors."""
    from triton.runtime.autotuner import Autotuner

    share = [0]

    def claimed_only(self, *args, **kwargs):
        self.nargs = dict(zip(self.arg_names, args))
        given = self.nargs | {name: x for name, x in kwargs.items() if name in self.arg_names}
        key = [given[name] for name in self.keys if name in given]
        key += [str(x.dtype) for x in given.values() if hasattr(x, "dtype")]
        configs = self.prune_configs(kwargs) if len(self.configs) > 1 else self.configs
        self.best_config = configs[0]  # mamba_ssm reads it
        for config in configs:
            claim = f"{share[0]} {self.base_fn.__module__} {self.base_fn.__name__} {key} {config}"
            with contextlib.suppress(Exception):  # the autotuner skips configurations that do not compile
                place = os.path.join(claims, hashlib.sha256(claim.encode()).hexdigest())
                open(place, "x").close()  # raises if it exists
                kernel = self.fn.run(*args, **kwargs | dict(warmup=True), **config.all_kwargs())
                if config is configs[0]:
                    kernel.run  # noqa: B018 - compiles the launcher, which all configurations share

    raised = []
    with mock.patch.object(Autotuner, "run", claimed_only):
        for share[0], jobs in shares:
            raised += _each(jobs, os.getpid() % torch.cuda.device_count(), 512)
    return raised


def tune_share(gpu: int, jobs: list[Job]) -> list[str]:
    """Let fla choose its configurations, and store them in Triton's cache. Return the errors."""
    time_quickly()
    return _each(jobs, gpu, TUNED_AT)


def _each(jobs, gpu, T) -> list[str]:
    torch.cuda.set_device(gpu)
    raised = []
    for job in jobs:
        try:
            job.run(T, torch.device("cuda", gpu))
            torch.cuda.synchronize()
        except Exception:
            raised.append(f"{job}: {traceback.format_exc()}")
    return raised


def compile_ahead(jobs: list[Job], meanwhile=lambda: None) -> None:
    """Compile in many processes, since fla would compile its hundreds of configurations sequentially; then choose in
    one process per GPU, the same one for equal K and V. meanwhile: called during compilation."""
    gpus, begin, raised = torch.cuda.device_count(), time.monotonic(), []
    count = max(gpus, min(28, (os.cpu_count() or 2) - 4))
    widths = list(dict.fromkeys((job.K, job.V) for job in jobs))
    shares = [(gpu, [job for job in jobs if widths.index((job.K, job.V)) % gpus == gpu]) for gpu in range(gpus)]
    with tempfile.TemporaryDirectory() as claims, multiprocessing.get_context("spawn").Pool(count) as pool:
        compiling = pool.starmap_async(compile_share, [(claims, shares)] * count, chunksize=1)
        meanwhile()
        raised += compiling.get()
        compiled = time.monotonic()
        print(
            f"{len(os.listdir(claims))} configurations compiled by {count} processes: {compiled - begin:.1f} s",
            file=sys.stderr,
            flush=True,
        )
        raised += pool.starmap(tune_share, shares, chunksize=1)
        print(f"chosen among: {time.monotonic() - compiled:.1f} s", file=sys.stderr, flush=True)
    for text in dict.fromkeys(sum(raised, [])):
        print(text, file=sys.stderr, flush=True)
