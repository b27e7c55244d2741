"""The configurations of flash-linear-attention's kernels, compiled and chosen before anything is measured.

fla chooses among hundreds of configurations. Before any rank does, many processes compile them (compile_ahead), then
one process a GPU times each for 15 ms (Triton: 100) with TUNED_AT tokens. fla keeps what it has found in Triton's
cache, and all ranks take it from there for all T and, with most kernels, all H: fla's keys do not contain them.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

from bench import harness

TUNED_AT = 16384  # tokens
TIMED = [0]  # configurations, in this process


def inputs(rule, T, H, gate, device, seed, dtype=torch.bfloat16, K=128):
    """([q, k, v, g, beta], gradient of o, a state)."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=device)

    q, k = (F.normalize(normal(1, T, H, K), dim=-1).to(dtype) for _ in "qk")
    v, do = (normal(1, T, H, K).to(dtype) for _ in "vo")
    g = F.logsigmoid(normal(1, T, H, K) if rule == "kda" else normal(1, T, H)) * gate
    return [q, k, v, g, normal(1, T, H).sigmoid()], do, normal(1, H, K, K)


def fla_operator(rule):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    return chunk_kda if rule == "kda" else chunk_gated_delta_rule


def step(call, given, do, state, backward):
    """(o, gradients of the five) or (o,). The gradient of a final state that there is is ``state``."""
    leaves = [x.detach().requires_grad_(backward) for x in given]
    initial = state.detach().requires_grad_(backward)
    with torch.set_grad_enabled(backward):
        o, final = call(*leaves, initial)
    if not backward:
        return [o.detach()]
    outs, ways = ([o], [do]) if final is None else ([o, final], [do, state])
    return [o.detach(), *torch.autograd.grad(outs, leaves, ways)]


def time_quickly() -> None:
    """In this process a configuration is timed for 15 ms, after 5; by itself Triton takes 100 after 25."""
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    def timed(call, quantiles):
        TIMED[0] += 1
        return do_bench(call, warmup=5, rep=15, quantiles=quantiles)

    Autotuner.do_bench = property(lambda self: timed)


class Job(NamedTuple):
    """What fla is called for ahead. rule: "gla" too. kind: "one rank", with states and without; "cp_context", as a rank
    in the middle of several; "halves": packed, as zeco's zigzag layout has it; "packed", of "gla". normalized: numbers
    of tokens whose queries fla normalises by a kernel that depends on it."""

    rule: str
    H: int
    kind: str = "one rank"
    beta: torch.dtype = torch.float32
    normalized: tuple[int, ...] = ()
    K: int = 128  # of "gla" alone
    V: int = 128

    def run(self, T: int, device: torch.device) -> None:
        """Every kernel of fla's that a rank launches. Of Gated DeltaNet's backward what zeco_gated_delta_rule takes."""
        if self.rule == "gla":
            return self._gla(T, device)
        for tokens in self.normalized:
            self._normalize(tokens, device)
        given, do, state = inputs(self.rule, T, self.H, 0.1, device, 1)
        given[4] = given[4].to(self.beta)
        operator, options = fla_operator(self.rule), {}
        if self.kind == "cp_context":
            options = dict(cp_context=middle_of_three(T, device))
        if self.kind == "halves":
            options = dict(cu_seqlens=torch.tensor([0, T // 2, T], device=device))
        calls = [lambda *x: operator(*x[:5], **options)]
        if self.kind == "one rank":
            calls.append(lambda *x: operator(*x[:5], initial_state=x[5], output_final_state=True))
        with mock.patch("fla.ops.gated_delta_rule.chunk.chunk_bwd_dqkwg", rejected):
            for call in calls:
                step(call, given, do, state, self.rule == "kda" or self.kind == "one rank")

    def _normalize(self, T: int, device: torch.device) -> None:
        from fla.modules.l2norm import l2norm

        x = torch.zeros(1, T, self.H, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
        l2norm(x).backward(torch.zeros_like(x))

    def _gla(self, T: int, device: torch.device) -> None:
        from fla.ops.gla import chunk_gla

        leaves, do = harness.inputs(T, self.H, self.K, device, V=self.V)
        packed = dict(cu_seqlens=torch.tensor([0, T // 2, T], device=device)) if self.kind == "packed" else {}
        chunk_gla(*leaves, **packed)[0].backward(do)


def rejected(*, q, k, w, g, **_):
    """In place of the kernel that fla rejects to run."""
    return tuple(torch.zeros_like(x) for x in (q, k, w, g))


def middle_of_three(T: int, device: torch.device):
    """fla's context of a rank that has others before and behind it, which are made up: it launches all kernels."""
    from fla.ops.cp import build_cp_context
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
    bounds = torch.tensor([0, 3 * T], dtype=torch.int32, device=device)
    return build_cp_context(bounds, dist.group.WORLD)


def compile_share(claims: str, shares: list[tuple[int, list[Job]]]) -> list[str]:
    """Compile the configurations of fla's kernels that no other process has claimed, which then lie in Triton's cache;
    nothing is launched. Of each share what Triton would time: for arguments with keys that have come before, and be it
    with another number of heads, it takes the choice that it has. What was raised."""
    from triton.runtime.autotuner import Autotuner

    share = [0]

    def claimed_only(self, *args, **kwargs):
        self.nargs = dict(zip(self.arg_names, args))
        given = self.nargs | {name: x for name, x in kwargs.items() if name in self.arg_names}
        key = [given[name] for name in self.keys if name in given]
        key += [str(x.dtype) for x in given.values() if hasattr(x, "dtype")]
        configs = self.prune_configs(kwargs) if len(self.configs) > 1 else self.configs
        for config in configs:
            claim = f"{share[0]} {self.base_fn.__module__} {self.base_fn.__name__} {key} {config}"
            with contextlib.suppress(Exception):  # what does not compile is left out when configurations are timed
                place = os.path.join(claims, hashlib.sha256(claim.encode()).hexdigest())
                open(place, "x").close()  # raises if there is one
                kernel = self.fn.run(*args, **kwargs | dict(warmup=True), **config.all_kwargs())
                if config is configs[0]:
                    kernel.run  # noqa: B018 - its launcher, the same for all of them, is compiled when it is asked for

    raised = []
    with mock.patch.object(Autotuner, "run", claimed_only):
        for share[0], jobs in shares:
            raised += _each(jobs, os.getpid() % torch.cuda.device_count(), 512)
    return raised


def tune_share(gpu: int, jobs: list[Job]) -> list[str]:
    """Let fla choose its configurations, which then lie in Triton's cache, too. What was raised."""
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
    """By many processes, since fla has hundreds of configurations, and would compile one after the other; then chosen
    by one process a GPU, of the same K and V by the same. meanwhile: what is done while they compile."""
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
