"""Delta rules over several ranks: zeco_kda and zeco_gated_delta_rule against fla, on one rank and with its cp_context.

    python -m bench.delta               # 2 GPUs and all of this machine; writes bench/results/delta.csv; needs fla

Weak scaling: T tokens a rank. Methods: fla's operator on one rank with as many tokens, the ideal cost of a split; fla's
own context parallelism (``cp_context=``); the same with allscan.integrations.fla_cp; allscan. allscan is also timed
with a middle rank's work on every rank: an initial state on the first and a gradient of the final state on the last, so
that all ranks compute and apply transitions; and, at a rule's first shape, with tokens in the zigzag layout, natively
and with tokens moved to rank order and back. All kinds of gates but the first are measured at the first shape of the
first rule only. fla rejects the backward of Gated DeltaNet on Hopper with this Triton: there allscan is compared with
allscan on one rank (``zeco, one rank``). ``times_one_rank``: time over that of the point's method "..., one rank". At
the end, on one rank, the part between the chunks against fla's two kernels for it.

Methods are called from Python, in turns in a new random order each time. A time is the median over samples of CALLS
consecutive calls, of the slowest rank. ``graph_us``: the time of a replayed CUDA graph, if the method can be captured.
Every method is checked first against the whole sequence on one rank, at an eighth of the tokens: against fla, or where
fla rejects against the recurrence in float64, with at most REFERENCE tokens a rank. Afterwards the kernels of one more
call prove that the method ran (torch's profiler; column ``proof``, of rank 0). Failures are printed, the others
continue, and the exit status is 1.

allscan uses fla's kernels inside chunks here (chunk="fla"), as the other methods: only the split differs. fla's
configurations are chosen ahead (bench/tuning.py); the number of those that a rank still timed is printed on stderr.
With --chunk allscan it uses its own kernels inside chunks, as by default, is compared with allscan on one rank, and fla
is not used; the check is against the recurrence in float64. Then allscan with the same bits for every number of ranks
(invariant=) is measured too.

    python -m bench.delta --rules gdn2 gated_delta_product dplr rwkv7      # writes bench/results/delta_fla.csv

Rules that only fla has: its operator on one rank, its context parallelism, and the same with fla_cp, at the two longest
shapes. fla_cp may be 1.1 times as far from one rank as fla's own exchange, if that is more than 0.02: for gdn2 it is
0.04. K = V = 64 for DPLR and RWKV-7, and two Householder steps a token for the gated delta product, whose backward runs
with Triton from 3.7.1 on (``PYTHONPATH=folder``, as make test-triton).
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from functools import partial
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

import allscan
from allscan.reference import delta_reference
from allscan.tools.ranks import Ranks
from allscan.zigzag import from_zigzag, to_zigzag, zigzag_positions
from bench.harness import Table, checked, extra_mib, quantiles, results, sample, slowest
from bench.operator import INVARIANT  # only with chunk="allscan"
from bench.proof import kernels, ran
from bench.tuning import OF_FLA, TIMED, Job, compile_ahead, fla_operator, fla_trains, inputs, step, time_quickly

RULES = ("kda", "gated_delta_rule")
SHAPES = [(16384, 32), (16384, 8), (4096, 32), (4096, 8), (2048, 32), (2048, 8)]  # T tokens a rank, H; K = V = 128
GATES = {"near 1": 1 / 16, "0": 0.0}
SAMPLES, CALLS = 15, 5
REFERENCE = 256  # tokens
# By method: (kernels that one call must run, kernels that it must not)
SEEN = {
    "fla, one rank": ((), ("nccl", "summary_kernel", "chunk_cp")),
    "zeco, one rank": (("delta_states_kernel",), ("nccl", "transition_kernel", "chunk_cp")),
    "fla cp_context": (("AllGather", "chunk_cp"), ("summary_kernel", "transition_kernel")),
    "fla cp_context, All-Scan": (("scan_kernel|transition_kernel",), ("nccl",)),
    "zeco": (("scan_kernel|transition_kernel", "delta_states_kernel"), ("nccl", "chunk_cp")),
    "zeco, middle rank's work": (("scan_kernel|transition_kernel", "delta_states_kernel"), ("nccl", "chunk_cp")),
    "zeco, zigzag": (("scan_kernel|transition_kernel", "delta_states_kernel"), ("nccl", "chunk_cp")),
    "zeco, invariant 2048": (("delta_segments_kernel", "delta_states_kernel"), ("nccl", "chunk_cp")),
    "zeco, invariant 1024": (("delta_segments_kernel", "delta_states_kernel"), ("nccl", "chunk_cp")),
    "zeco, tokens moved": (("scan_kernel|transition_kernel", "delta_states_kernel", "SendRecv"), ("chunk_cp",)),
}
ZIGZAG = ("zeco, zigzag", "zeco, tokens moved")  # methods with tokens in that layout
COLUMNS = (
    "method",
    "rule",
    "T",
    "H",
    "gates",
    "pass",
    "ranks",
    "p20_us",
    "p50_us",
    "p80_us",
    "skew_us",
    "graph_us",
    "times_one_rank",
    "extra_mib",
    "max_error",
    "chunk",
    "proof",
    "gpu",
    "torch",
    "triton",
    "sources",
)


def fla_runs(rule: str, backward: bool, chunk: str) -> bool:
    """Check whether fla can run this rule; see the module's docstring."""
    return chunk == "fla" and (not backward or fla_trains(rule))


_groups: dict = {}


@contextlib.contextmanager
def joined(ranks: int):
    """Return (communicator of the first ``ranks`` ranks, communicator of this rank alone); None on the other ranks.
    Collective over the job."""
    allscan.init()
    for purpose in ("ranks", "fla"):  # a separate group for fla, so that All-Scan does not carry its states
        if (purpose, ranks) not in _groups:
            _groups[purpose, ranks] = dist.new_group(list(range(ranks)))
    if "alone" not in _groups:  # collective over the job, as all groups
        _groups["alone"] = [dist.new_group([r]) for r in range(dist.get_world_size())][dist.get_rank()]
    if dist.get_rank() >= ranks:
        yield None
        return
    with allscan.Communicator(_groups["ranks", ranks], timeout=60.0) as comm:
        comm.step()  # all calls are one iteration
        with allscan.Communicator(_groups["alone"]) as one:
            yield comm, one


def seen(name: str, chunk: str) -> tuple:
    """Return (kernels that one call must run, kernels that it must not)."""
    wanted, unwanted = SEEN[name]
    if chunk == "allscan":
        wanted = tuple("operands_kernel" if x == "delta_states_kernel" else x for x in wanted)
    return wanted, unwanted


def rejected(*_, **__):
    raise ValueError("only fla has this rule")


def methods(rule, comm, one, T, chunk) -> dict:
    """Return {name: function of q, k, v, g, beta, a state or None}; each returns (o, final state or None)."""
    ours = {"kda": allscan.zeco_kda, "gated_delta_rule": allscan.zeco_gated_delta_rule}.get(rule, rejected)
    if comm.device.type == "cuda":
        ours = partial(ours, chunk=chunk)

    def middle(*x):
        *given, state = x
        return ours(*given, comm=comm, initial_state=state, output_final_state=True)

    def moved(*x):
        o, _ = ours(*(from_zigzag(part, comm=comm) for part in x[:5]), comm=comm)
        return to_zigzag(o, comm=comm), None

    found = {
        "zeco, one rank": lambda *x: ours(*x[:5], comm=one),
        "zeco": lambda *x: ours(*x[:5], comm=comm),
        "zeco, middle rank's work": middle,
        "zeco, zigzag": lambda *x: ours(*x[:5], comm=comm, layout="zigzag"),
        "zeco, tokens moved": moved,
    }
    if chunk == "allscan":
        for name, segment in INVARIANT.items():
            found[name] = lambda *x, segment=segment: ours(*x[:5], comm=comm, invariant=min(segment, T // 2))
    if comm.device.type == "cuda" and chunk == "fla":
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
            found[name] = lambda *x, context=context: operator(*x[:-1], cp_context=context)
        found["fla, one rank"] = lambda *x: operator(*x[:-1])
    return found


def recurrence(*given, initial_state=None, **_):
    o, final = delta_reference(*given, initial_state=initial_state)
    return o.to(given[0].dtype), final.float()


def check(rule, comm, found, T, H, gate, backward, failed, chunk) -> dict:
    """Return {method: largest relative error against the whole sequence on one rank}."""
    on_gpu = comm.device.type == "cuda"
    small = () if on_gpu else (torch.float32, 16)
    whole = fla_operator(rule) if on_gpu and fla_runs(rule, backward, chunk) else recurrence
    total = comm.size * T
    given, do, state = inputs(rule, total, H, gate, comm.device, 1, *small)
    places, errors = (slice(comm.rank * T, (comm.rank + 1) * T), zigzag_positions(T, comm=comm)), {}
    alone = (
        lambda *x: (whole(*x[:-1])[0], None),
        lambda *x: whole(*x[:-1], initial_state=x[-1], output_final_state=True),
    )

    def own(x, mine):
        return x.unflatten(1, (total, -1))[:, mine].flatten(1, 2)  # a tensor may have several tokens for each

    with said(comm, "the whole on one rank"):
        expected = [step(call, given, do, state, backward) for call in alone]
    for name, call in found.items():
        if "one rank" not in name:
            mine = places[name in ZIGZAG]
            with said(comm, f"{name} checked"), noted(failed, name):
                part = step(call, [own(x, mine) for x in given], do[:, mine], state, backward)
                wanted = [own(x, mine) for x in expected["middle" in name]]
                limit = 2e-2 if on_gpu else 1e-4
                if rule in OF_FLA:  # or as exact as fla's own exchange, which comes first
                    limit = max(limit, 1.1 * errors.get("fla cp_context", 0.0)) if "All-Scan" in name else 6e-2
                errors[name] = checked(name, part, wanted, limit)
    return errors


@contextlib.contextmanager
def said(comm, what):
    """Print, on the first rank, the time of the block: first calls compile, and time unknown configurations."""
    begin, before = time.monotonic(), TIMED[0]
    yield
    if comm.device.type == "cuda":
        torch.cuda.synchronize()
        if comm.rank == 0:
            timed = f", {TIMED[0] - before} configurations timed" if TIMED[0] > before else ""
            print(f"  {what}: {time.monotonic() - begin:.1f} s{timed}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def noted(failed: dict, name: str):
    """Record a method's exception in ``failed``."""
    try:
        yield
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {error}"


def without(failed: dict, calls: dict, ranks: int) -> dict:
    """Return ``calls`` without methods that have failed on some rank: the same on all ranks."""
    everywhere: list = [None] * ranks
    dist.all_gather_object(everywhere, list(failed), group=_groups["fla", ranks])
    return {name: call for name, call in calls.items() if not any(name in names for names in everywhere)}


def point(ranks, rule, T, H, gate, backward, names=None, chunk="fla") -> dict | None:
    """Return {method: row, or its exception} on each of the first ``ranks`` ranks; on CPUs only errors. ``names``:
    methods, default all."""
    with joined(ranks) as both:
        if both is None:
            return None
        (comm, one), failed, extra, proofs, graphs = both, {}, {}, {}, {}

        def those(T) -> dict:
            found = methods(rule, comm, one, T, chunk)
            return {name: found[name] for name in names or found}

        if comm.device.type == "cpu":
            return check(rule, comm, those(T), T, H, gate, backward, failed, chunk) | failed
        time_quickly()
        given, do, state = inputs(rule, T, H, gate, comm.device, comm.rank)
        calls = {name: partial(step, call, given, do, state, backward) for name, call in those(T).items()}
        for name, call in calls.items():
            with said(comm, f"{name} called"), noted(failed, name):
                call()
                extra[name] = extra_mib(call)
        calls = without(failed, calls, ranks)
        few = T // 8 if fla_runs(rule, backward, chunk) else min(T // 8, REFERENCE)
        checked = {name: call for name, call in those(few).items() if name in calls}
        errors = check(rule, comm, checked, few, H, gate, backward, failed, chunk)
        calls = without(failed, calls, ranks)
        times: dict = {name: [] for name in calls}
        with said(comm, "timed"):
            for turn in range(SAMPLES):
                for name in random.Random(turn).sample(list(calls), len(calls)):
                    comm.barrier()
                    times[name].append(sample(calls[name], CALLS))
        with said(comm, "proven"):
            for name, call in calls.items():
                comm.barrier()
                with noted(failed, name):
                    proofs[name] = ran(name, kernels(call), *seen(name, chunk))
        calls = without(failed, calls, ranks)
        with said(comm, "as graphs"):
            for name, call in calls.items():
                with noted(failed, name):
                    graphs[name] = graph_us(name, call, comm)
        rows = {
            name: dict(
                **quantiles(torch.tensor(times[name])),
                extra_mib=extra[name],
                max_error=errors.get(name, ""),
                proof=proofs[name],
                graph_us=us,
            )
            for name, us in graphs.items()
        }
        return rows | failed


def first_calls(ranks, rule, H, backward, names, chunk) -> None:
    """Compile allscan's kernels and connect NCCL's ranks, while other processes compile fla's kernels, which are
    skipped here: the results are meaningless."""
    from triton.runtime.autotuner import Autotuner

    T = 2048
    with joined(ranks) as both, mock.patch.object(Autotuner, "run", lambda *_, **__: None):
        if both is None:
            return
        comm, one = both
        given, do, state = inputs(rule, T, H, 1 / 16, comm.device, comm.rank)
        found = methods(rule, comm, one, T, chunk)
        with said(comm, f"our kernels for {rule}, H={H}, backward {backward}"):
            for name in names:
                step(found[name], given, do, state, backward)


def graph_us(name, call, comm) -> float | str:
    """Return the time of a CUDA graph, for allscan, and fla on one rank; methods that wait on the host cannot be
    captured."""
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
    """Return times in us, on one rank, of the part between chunks of KDA, by allscan and by fla's two kernels: forward,
    and backward, which recomputes forward's states."""
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu, chunk_gated_delta_rule_fwd_h

    from allscan.base.tiling import multiprocessors
    from allscan.ops.carrier import IncomingStates
    from allscan.ops.delta.delta_passes import (
        ChunkOperands,
        DeltaShape,
        LocalGrads,
        SavedStates,
        StatePass,
        delta_segment_length,
    )
    from allscan.tokens.partition import OwnTokens, find_layout

    with allscan.Communicator() as comm:
        generator = torch.Generator(comm.device).manual_seed(0)

        def normal(*shape):
            return torch.randn(shape, generator=generator, device=comm.device)

        q, k, w = ((normal(1, T, H, K) / K).bfloat16() for _ in range(3))
        u, do, dv = (normal(1, T, H, K).bfloat16() for _ in range(3))
        sums = F.logsigmoid(normal(T // 64, 64, H, K)).div(16).cumsum(1).view(1, T, H, K)
        scores, scale = (normal(1, T, H, 64) / 8).bfloat16(), K**-0.5
        layout = find_layout(comm, OwnTokens(1, T), delta_segment_length(T, H, multiprocessors(comm.device)))
        ours = StatePass(comm, layout, DeltaShape(1, H, H, K, K, torch.bfloat16, scalar=False))
        saved_states = SavedStates(
            sums.new_empty(ours.of_transitions),
            sums.new_empty(ours.of_states),
            torch.empty(2, dtype=torch.int64, device=comm.device),
        )

        def backward():
            between = ChunkOperands(k, w, u, sums, q)
            _, _, *incoming = ours.turn(between, LocalGrads(do, None, scores), None, saved_states, scale)
            ours.backward(between, LocalGrads(do, dv), IncomingStates(*incoming), None, scale)

        def fla_forward():
            return chunk_gated_delta_rule_fwd_h(k=k, w=w, u=u, gk=sums)

        def fla_backward():
            fla_forward()
            chunk_gated_delta_rule_bwd_dhu(q=q, k=k, w=w, do=do, dv=dv, gk=sums, scale=scale)

        calls = {
            "ours, forward": lambda: ours.forward(ChunkOperands(k, w, u, sums), None, None, saved_states),
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


def _shape(text: str) -> tuple[int, int]:
    T, H = text.split(",")
    return int(T), int(H)


class Point(NamedTuple):
    rule: str
    T: int
    H: int
    gates: str
    backward: bool
    names: list[str]
    chunk: str

    def jobs(self) -> list[Job]:
        if self.chunk != "fla":
            return []
        kinds = {
            "one rank": True,
            "cp_context": any("cp_context" in name for name in self.names),
            "halves": "zeco, zigzag" in self.names,
        }
        return [Job(self.rule, self.H, kind) for kind, wanted in kinds.items() if wanted]


def points(rules, shapes, gates, chosen, chunk) -> list[Point]:
    """Return the points to measure, gates other than the first at the end. ``chosen``: methods, or None."""
    found = []
    for rule in rules:
        places = shapes or (SHAPES[:2] if rule in OF_FLA else SHAPES)
        for T, H in places:
            first = (T, H) == places[0]
            for backward in (False, True):
                runs = fla_runs(rule, backward, chunk)
                if rule in OF_FLA and not runs:
                    continue
                names = chosen or [name for name in SEEN if first or name not in ZIGZAG]
                if rule in OF_FLA:
                    names = [name for name in SEEN if "fla cp_context" in name]
                names = [n for n in names if runs or "fla" not in n and (n not in ZIGZAG or chunk != "fla")]
                names = [name for name in names if chunk == "allscan" or name not in INVARIANT]
                names = [name for name in names if "one rank" not in name] + [f"{'fla' if runs else 'zeco'}, one rank"]
                for kind in gates if first and rule == rules[0] else gates[:1]:
                    found.append(Point(rule, T, H, kind, backward, names, chunk))
    return sorted(found, key=lambda each: gates.index(each.gates))


def write_rows(table, at: Point, count: int, answers) -> int:
    """Write the rows of a point; return the number of failed methods."""
    failed = {name: x for answer in answers for name, x in answer.items() if isinstance(x, str)}
    rows = {
        name: slowest([a[name] for a in answers], "extra_mib", "max_error") for name in at.names if name not in failed
    }
    alone = rows.get(at.names[-1], {}).get("p50_us")
    for name, row in rows.items():
        row |= dict(method=name, rule=at.rule, T=at.T, H=at.H, gates=at.gates, ranks=count, chunk=at.chunk)
        row["pass"] = "forward+backward" if at.backward else "forward"
        row["times_one_rank"] = row["p50_us"] / alone if alone else ""
        row["proof"] = answers[0][name]["proof"]
        table.write(row)
        print(
            f"{at.rule} T={at.T} H={at.H} {at.gates:6} {row['pass']:16} P={count} {name:26}{row['p50_us']:9.0f} us  "
            f"{row['times_one_rank'] or float('nan'):.3f} x one rank  graph {row['graph_us'] or float('nan'):9.0f}  "
            f"extra {row['extra_mib']:.0f} MiB",
            flush=True,
        )
    for name, text in failed.items():
        print(f"FAILED: {name}, {at}: {text}", flush=True)
    return len(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks; default 2 and all GPUs")
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=RULES + OF_FLA)
    parser.add_argument("--gates", nargs="+", default=list(GATES), choices=list(GATES))
    parser.add_argument("--shapes", type=_shape, nargs="+", help="tokens per rank, heads: e.g. 16384,32; default all")
    parser.add_argument("--methods", nargs="+", help='methods in addition to "fla, one rank", e.g. zeco; default all')
    parser.add_argument("--chunk", default="fla", choices=["fla", "allscan"], help="whose kernels to use inside chunks")
    parser.add_argument("--csv", help="default: bench/results/delta.csv, delta_allscan.csv or delta_fla.csv")
    arguments = parser.parse_args()
    if arguments.csv is None:
        usual = "delta_fla.csv" if set(arguments.rules) <= set(OF_FLA) else "delta.csv"
        arguments.csv = results(usual if arguments.chunk == "fla" else "delta_allscan.csv")
    gpus, begin, failures = torch.cuda.device_count(), time.monotonic(), 0
    plan = points(arguments.rules, arguments.shapes, arguments.gates, arguments.methods, arguments.chunk)
    jobs = list(dict.fromkeys(job for at in plan for job in at.jobs()))

    def elapsed(what):
        print(f"{time.monotonic() - begin:.0f} s: {what}", file=sys.stderr, flush=True)

    if gpus < 2:
        print("No two GPUs here, and fla's kernels need one: only what is between the chunks is measured, if at all.")
        if gpus:
            compile_ahead([job for job in jobs if job.kind == "one rank"])
    else:
        counts = arguments.ranks or sorted({2, gpus})
        with Table(arguments.csv, COLUMNS) as table, Ranks(max(counts), "cuda") as ranks:

            def meanwhile():
                most: dict = {}  # the first point of each kind has all methods
                for at in plan:
                    most.setdefault((at.rule, at.H, at.backward), at.names)
                for kind, names in most.items():
                    try:
                        ranks.run(first_calls, counts[-1], *kind, names, arguments.chunk, timeout=120.0)
                    except RuntimeError as error:  # the measurement of the point will report it
                        elapsed(error)
                elapsed("our kernels compiled")

            compile_ahead(jobs, meanwhile)
            for at in plan:
                for count in counts:
                    elapsed((count, *at))
                    given = count, at.rule, at.T, at.H, GATES[at.gates], at.backward, at.names, at.chunk
                    try:
                        failures += write_rows(table, at, count, ranks.run(point, *given, timeout=200.0)[:count])
                    except RuntimeError as error:
                        failures += 1
                        print(f"FAILED: {at}: {error}", flush=True)
        print(f"wrote {arguments.csv}")
    if gpus and arguments.chunk == "fla" and not set(arguments.rules) <= set(OF_FLA):
        elapsed("between the chunks")
        time_quickly()
        for T, H in dict.fromkeys((at.T, at.H) for at in plan):
            times = passes(T, H)
            faster = sum(t for n, t in times.items() if "fla" in n) / sum(t for n, t in times.items() if "ours" in n)
            print(
                f"between the chunks, one rank, T={T} H={H}, us:",
                {n: round(t, 1) for n, t in times.items()},
                f"together {faster:.2f} times as fast",
                flush=True,
            )
        elapsed("end")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
