"""Delta rules over several ranks: zeco_kda and zeco_gated_delta_rule beside fla, on one rank and under its cp_context.

    python -m bench.delta               # 2 GPUs and all of this machine; writes bench/results/delta.csv; needs fla

Weak scaling: T tokens a rank. Beside each other: fla's operator on one rank with as many tokens, which is what a split
should cost; fla's own context parallelism (``cp_context=``); the same with allscan.integrations.fla_cp; ours. Ours is
also timed with every rank doing a middle rank's work: an initial state on the first and a gradient of the final state
on the last, so that transitions are made and applied everywhere; and with tokens in the zigzag layout, as it takes them
natively, and moved to rank order and back. Before that, on one rank, what is between the chunks, beside fla's two
kernels for it.

Calls from Python, in turns whose order is drawn anew each time; a time is the median over samples of CALLS calls in a
row, of the slowest rank. ``graph_us``: the same as a replayed CUDA graph, where the method can be captured. Every
method is checked first against fla on one rank with the whole sequence, at an eighth of the tokens, and proven
afterwards by the kernels of one more call (torch's profiler; column ``proof``, of rank 0). fla chooses its
configurations at the first shape, which many processes compile first; the other shapes use what it chose, unless its
keys contain the shape. The backward of Gated DeltaNet is left out, which fla refuses on Hopper with this
Triton.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import sys
import time
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

import allscan
from allscan.tools.ranks import Ranks
from allscan.zigzag import from_zigzag, to_zigzag, zigzag_positions
from bench.harness import Table, checked, extra_mib, quantiles, results, sample, slowest
from bench.proof import kernels, ran

SHAPES = [(16384, 32), (16384, 8), (4096, 32), (4096, 8), (2048, 32), (2048, 8)]  # T tokens a rank, H; K = V = 128
RULES = ("kda", "gated_delta_rule")
GATES = {"0": 0.0, "near 1": 1 / 16}
SAMPLES, CALLS = 15, 5
# of each method: what one call must run, and what it must not
SEEN = {
    "fla, one rank": ((), ("nccl", "summary_kernel", "chunk_cp")),
    "fla cp_context": (("AllGather", "chunk_cp"), ("summary_kernel", "transition_kernel")),
    "fla cp_context, All-Scan": (("scan_kernel|transition_kernel",), ("nccl",)),
    "zeco": (("scan_kernel|transition_kernel", "delta_states_kernel"), ("nccl", "chunk_cp")),
    "zeco, middle rank's work": (("scan_kernel|transition_kernel", "delta_states_kernel"), ("nccl", "chunk_cp")),
    "zeco, zigzag": (("scan_kernel|transition_kernel", "delta_states_kernel"), ("nccl", "chunk_cp")),
    "zeco, tokens moved": (("scan_kernel|transition_kernel", "delta_states_kernel", "SendRecv"), ("chunk_cp",)),
}
ZIGZAG = ("zeco, zigzag", "zeco, tokens moved")  # methods that are given tokens in that layout
COLUMNS = (
    "method", "rule", "T", "H", "gates", "pass", "ranks", "p20_us", "p50_us", "p80_us", "skew_us", "graph_us",
    "times_one_rank", "extra_mib", "max_error", "proof", "gpu", "torch", "triton", "sources",
)  # fmt: skip


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


_groups: dict = {}


def methods(rule, comm, T) -> dict:
    """{name: function of q, k, v, g, beta, a state or None}; each returns (o, final state or None)."""
    ours = {"kda": allscan.zeco_kda, "gated_delta_rule": allscan.zeco_gated_delta_rule}[rule]

    def middle(*x):
        *given, state = x
        return ours(*given, comm=comm, initial_state=state, output_final_state=True)

    def moved(*x):
        o, _ = ours(*(from_zigzag(part, comm=comm) for part in x[:5]), comm=comm)
        return to_zigzag(o, comm=comm), None

    found = {
        "zeco": lambda *x: ours(*x[:5], comm=comm),
        "zeco, middle rank's work": middle,
        "zeco, zigzag": lambda *x: ours(*x[:5], comm=comm, layout="zigzag"),
        "zeco, tokens moved": moved,
    }
    if comm.device.type == "cuda":
        from fla.ops.cp import build_cp_context

        from allscan.integrations.fla_cp import context_parallel

        operator = fla_operator(rule)
        context_parallel(comm)
        bounds = torch.tensor([0, comm.size * T], dtype=torch.int32, device=comm.device)
        for name, group in {
            "fla cp_context": _groups["fla", comm.size],
            "fla cp_context, All-Scan": comm.group,
        }.items():
            context = build_cp_context(bounds, group)
            found[name] = lambda *x, context=context: operator(*x[:5], cp_context=context)
        found["fla, one rank"] = lambda *x: operator(*x[:5])
    return found


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


def check(rule, comm, found, T, H, gate, backward) -> dict:
    """{method: largest relative error against the whole sequence on one rank}; the others' inputs lie in one draw."""
    given, do, state = inputs(rule, comm.size * T, H, gate, comm.device, 1, *_small(comm))
    places, errors = (slice(comm.rank * T, (comm.rank + 1) * T), zigzag_positions(T, comm=comm)), {}
    with allscan_alone() as one:
        ours = {"kda": allscan.zeco_kda, "gated_delta_rule": allscan.zeco_gated_delta_rule}[rule]
        whole = fla_operator(rule) if comm.device.type == "cuda" else partial(ours, comm=one)
        with said(comm, "the whole on one rank"):
            expected = {
                False: step(lambda *x: (whole(*x[:5])[0], None), given, do, state, backward),
                True: step(
                    lambda *x: whole(*x[:5], initial_state=x[5], output_final_state=True), given, do, state, backward
                ),
            }  # fmt: skip
    for name, call in found.items():
        if name != "fla, one rank":
            mine = places[name in ZIGZAG]
            with said(comm, f"{name} checked"):
                part = step(call, [x[:, mine] for x in given], do[:, mine], state, backward)
            wanted = [x[:, mine] for x in expected["middle" in name]]
            errors[name] = checked(name, part, wanted, 2e-2 if given[0].dtype == torch.bfloat16 else 1e-4)
    return errors


def _small(comm):
    return () if comm.device.type == "cuda" else (torch.float32, 16)


@contextlib.contextmanager
def allscan_alone():
    """A communicator of this rank alone, on CPUs; None on GPUs."""
    if torch.cuda.is_available():
        yield None
        return
    with allscan.Communicator(_groups["alone"]) as one:
        yield one


@contextlib.contextmanager
def said(comm, what):
    """The first rank says how long it took: first calls compile, and fla measures its configurations."""
    begin = time.monotonic()
    yield
    if comm.device.type == "cuda":
        torch.cuda.synchronize()
        if comm.rank == 0:
            print(f"  {what}: {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)


def point(ranks, rule, T, H, gate, backward, chosen=None) -> dict | None:
    """{method: row} on each of the first ``ranks`` ranks; on CPUs only errors. ``chosen``: methods, default all."""
    allscan.init()
    for purpose in ("ranks", "fla"):  # fla's own, so that All-Scan does not carry its states
        if (purpose, ranks) not in _groups:
            _groups[purpose, ranks] = dist.new_group(list(range(ranks)))
    if "alone" not in _groups:  # by every rank of the job, as all groups
        _groups["alone"] = [dist.new_group([r]) for r in range(dist.get_world_size())][dist.get_rank()]
    group = _groups["ranks", ranks]
    if dist.get_rank() >= ranks:
        return None
    with allscan.Communicator(group) as comm:

        def those(T) -> dict:
            found = methods(rule, comm, T)
            return {name: found[name] for name in (*chosen, "fla, one rank")} if chosen else found

        if comm.device.type == "cpu":
            return check(rule, comm, those(T), T, H, gate, backward)
        found = those(T)
        given, do, state = inputs(rule, T, H, gate, comm.device, comm.rank)
        calls = {name: partial(step, call, given, do, state, backward) for name, call in found.items()}
        extra = {}
        for name, call in calls.items():
            with said(comm, f"{name} called"):
                call()
            extra[name] = extra_mib(call)
        errors = check(rule, comm, those(T // 8), T // 8, H, gate, backward)
        times: dict = {name: [] for name in calls}
        for turn in range(SAMPLES):
            for name in random.Random(turn).sample(list(calls), len(calls)):
                comm.barrier()
                times[name].append(sample(calls[name], CALLS))
        rows = {}
        for name, call in calls.items():
            comm.barrier()
            row = dict(**quantiles(torch.tensor(times[name])), extra_mib=extra[name], max_error=errors.get(name, ""))
            rows[name] = row | dict(proof=ran(name, kernels(call), *SEEN[name]), graph_us=graph_us(name, call, comm))
        return rows


def graph_us(name, call, comm) -> float | str:
    """Of ours and of fla on one rank; what waits on the host cannot be captured."""
    if "cp_context" in name:
        return ""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()
    comm.barrier()
    times = [sample(graph.replay, CALLS) for _ in range(SAMPLES)]
    comm.barrier()
    del kept
    return torch.tensor(times).median().item()


def passes(T: int, H: int, K: int = 128) -> dict[str, float]:
    """On one rank, us: what is between the chunks of KDA, forward and backward, which makes forward's states again,
    ours and by fla's two kernels for it."""
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu, chunk_gated_delta_rule_fwd_h

    from allscan.delta.passes import Kept, StatePass, delta_segment_length
    from allscan.first_call import find_layout

    with allscan.Communicator() as comm:
        generator = torch.Generator(comm.device).manual_seed(0)

        def normal(*shape):
            return torch.randn(shape, generator=generator, device=comm.device)

        q, k, w = ((normal(1, T, H, K) / K).bfloat16() for _ in range(3))
        u, do, dv = (normal(1, T, H, K).bfloat16() for _ in range(3))
        sums = F.logsigmoid(normal(T // 64, 64, H, K)).div(16).cumsum(1).view(1, T, H, K)
        scores, scale = (normal(1, T, H, 64) / 8).bfloat16(), K**-0.5
        layout = find_layout(comm, 1, T, None, delta_segment_length(T, H, True))
        ours = StatePass(comm, layout, 1, H, H, K, K, torch.bfloat16, scalar=False)
        kept = Kept(
            sums.new_empty(ours.of_transitions),
            sums.new_empty(ours.of_states),
            torch.empty(2, dtype=torch.int64, device=comm.device),
        )

        def backward():
            _, _, entering = ours.turn(q, k, w, u, sums, do, scores, None, scale, kept)
            ours.backward(q, k, w, sums, do, dv, scale, entering, None)

        def fla_forward():
            return chunk_gated_delta_rule_fwd_h(k=k, w=w, u=u, gk=sums)

        def fla_backward():
            fla_forward()
            chunk_gated_delta_rule_bwd_dhu(q=q, k=k, w=w, do=do, dv=dv, gk=sums, scale=scale)

        calls = {
            "ours, forward": lambda: ours.forward(k, w, u, sums, None, None, kept),
            "ours, backward": backward,
            "fla, forward": fla_forward,
            "fla, backward": fla_backward,
        }
        for call in calls.values():
            call()
        times: dict = {name: [] for name in calls}
        for turn in range(SAMPLES):
            for name in random.Random(turn).sample(list(calls), len(calls)):
                times[name].append(sample(calls[name], CALLS))
        return {name: torch.tensor(values).median().item() for name, values in times.items()}


def compile_share(share: int, of: int, rule: str, H: int) -> None:
    """Compile every ``of``-th configuration of fla's kernels, which then lie in Triton's cache."""
    from triton.runtime.autotuner import Autotuner

    seen: dict = {}

    def bench(self, *args, config, **meta):
        number = seen[self] = seen.get(self, -1) + 1
        if number and number % of != share:  # the first too, for there must be one that runs
            return [float("inf")] * 3
        with contextlib.suppress(Exception):  # what does not compile is left out when configurations are measured
            self.fn.run(*args, **meta, **config.all_kwargs())
            return [float(number % of != share)] * 3
        return [float("inf")] * 3

    def without_cache(self, key, configs, measure):
        measure()
        return False

    Autotuner._bench, Autotuner.check_disk_cache = bench, without_cache
    given, do, state = inputs(rule, 512, H, 0.1, torch.device("cuda", 0), 1)
    operator, backward = fla_operator(rule), rule == "kda"
    step(lambda *x: (operator(*x[:5])[0], None), given, do, state, backward)
    step(lambda *x: operator(*x[:5], initial_state=x[5], output_final_state=True), given, do, state, backward)


def compile_ahead(rules, H: int) -> None:
    """By many processes, since fla has hundreds of configurations, and would compile one after the other."""
    count = max(1, min(16, (os.cpu_count() or 2) - 2))
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        for rule in rules:
            pool.starmap(compile_share, [(share, count, rule, H) for share in range(count)], chunksize=1)


def _shape(text: str) -> tuple[int, int]:
    T, H = text.split(",")
    return int(T), int(H)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks; default 2 and all GPUs")
    parser.add_argument("--rules", nargs="+", default=["kda"], choices=RULES)
    parser.add_argument("--gates", nargs="+", default=list(GATES), choices=list(GATES))
    parser.add_argument(
        "--shapes", type=_shape, nargs="+", default=SHAPES, help="such as 16384,32: tokens a rank, heads"
    )
    parser.add_argument("--methods", nargs="+", help='beside "fla, one rank", such as zeco; default all')
    parser.add_argument("--csv", default=results("delta.csv"))
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count()
    if gpus:
        compile_ahead(arguments.rules, arguments.shapes[0][1])
        for T, H in arguments.shapes:
            times = passes(T, H)
            faster = sum(t for n, t in times.items() if "fla" in n) / sum(t for n, t in times.items() if "ours" in n)
            print(f"between the chunks, one rank, T={T} H={H}, us:", {n: round(t, 1) for n, t in times.items()},
                  f"together {faster:.2f} times as fast", flush=True)  # fmt: skip
    if gpus < 2:
        print("No two GPUs here, and fla's kernels need one: nothing else is measured.")
        return 0
    counts = arguments.ranks or sorted({2, gpus})
    with Table(arguments.csv, COLUMNS) as table, Ranks(max(counts), "cuda") as ranks:
        for rule in arguments.rules:
            for T, H in arguments.shapes:
                for kind in arguments.gates:
                    for count in counts:
                        for backward in (False, True)[: 1 + (rule == "kda")]:  # fla refuses the other's on Hopper
                            given = count, rule, T, H, GATES[kind], backward, arguments.methods
                            answers = ranks.run(point, *given, timeout=570.0)[:count]
                            rows = {n: slowest([a[n] for a in answers], "extra_mib") for n in answers[0]}
                            alone = rows["fla, one rank"]["p50_us"]
                            for name, row in rows.items():
                                row |= dict(method=name, rule=rule, T=T, H=H, gates=kind, ranks=count)
                                row["pass"] = "forward+backward" if backward else "forward"
                                row["times_one_rank"], row["proof"] = row["p50_us"] / alone, answers[0][name]["proof"]
                                table.write(row)
                                print(
                                    f"{rule} T={T} H={H} {kind:6} {row['pass']:16} P={count} {name:26}"
                                    f"{row['p50_us']:9.0f} us  {row['times_one_rank']:.3f} x one rank  graph "
                                    f"{row['graph_us'] or float('nan'):9.0f}  extra {row['extra_mib']:.0f} MiB",
                                    flush=True,
                                )
    print(f"wrote {arguments.csv}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
