"""Measures the GLA operator over several ranks: zeco_gla, other communication of the same kernels, cost of the split.

    python -m bench.operator            # all GPUs of this machine, and 2 of them; writes bench/results/operator.csv

Weak scaling: T tokens a rank. Methods, all with the same local kernels: zeco_gla; LASP-2's all-gather (NCCL, one fused
fold), blocking and overlapped with kernels without remote inputs; overlapped also without multiprocessors, by NCCL's
symmetric windows with NCCL_CTA_POLICY=2, in separate processes, and by PyTorch's low-contention all-gather; LASP-1's
ring; Ulysses' all-to-all, by NCCL and, as fast-ulysses does it, by copy engines through PyTorch's symmetric memory;
zeco_gla with tokens in the zigzag layout, natively and with tokens moved to rank order and back; zeco_gla with the same
bits for every number of ranks (invariant=), in segments of 2,048 and of 1,024 tokens;
zeco_gla on one rank, the ideal, since it is the same work without communication; and, if fla is installed, its
chunk_gla on one rank. All are CUDA graphs, replayed on the same GPUs in the same processes, in turns in a new random
order each time. A time is the median over samples of STEP_REPLAYS consecutive replays, of the slowest rank. Every
method is checked first against one rank's zeco_gla on the whole sequence (at a 16th of the tokens, to fit one GPU), and
afterwards proven to have run (bench/proof.py; column ``proof``, of rank 0). Without GPUs only the check runs, on 3 CPU
ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import random
import sys

import torch
import torch.distributed as dist

import allscan
from allscan.tools.ranks import Ranks
from allscan.zigzag import from_zigzag, to_zigzag, zigzag_positions
from bench.baselines import COPY_ENGINES, METHODS, METHODS_OF_GPUS, Baseline, all_to_all, by_copies, gla
from bench.harness import (
    STEP_REPLAYS,
    WITHOUT_MULTICAST,
    Table,
    capture,
    checked,
    environment,
    inputs,
    quantiles,
    results,
    sample,
    slowest,
    step,
)
from bench.proof import Method
from bench.tuning import Job, compile_ahead

SHAPES = [(16384, 16, 128), (32768, 16, 128), (8192, 32, 128)]  # T tokens a rank, H, K = V
# Divisor of logsigmoid(normal); 0: all gates are 0, no decay. With the other two a rank's decay over 16,384 tokens is 0
# in float32, so that no rank's output depends on its incoming state (rank_decay: the largest decay of a channel over a
# rank).
GATES = {"0": 0.0, "near 1": 16.0, "mild": 1.0}
SAMPLES = 20
COLUMNS = (
    "method",
    "T",
    "H",
    "D",
    "gates",
    "pass",
    "ranks",
    "p20_us",
    "p50_us",
    "p80_us",
    "skew_us",
    "one_rank_us",
    "percent_of_ideal",
    "extra_mib",
    "max_error",
    "rank_decay",
    "proof",
    "gpu",
    "torch",
    "triton",
    "sources",
)


FLA = "fla, one rank"
ZIGZAG = ("zeco, zigzag", "zeco, tokens moved")  # methods with tokens in that layout
INVARIANT = {"zeco, invariant 2048": 2048, "zeco, invariant 1024": 1024}  # tokens of a segment


def in_order(q, k, v, g, *, comm, segment):
    """Call zeco_gla with the same bits for every number of ranks; for few tokens with one segment per rank."""
    return allscan.zeco_gla(q, k, v, g, comm=comm, invariant=min(segment, q.shape[1]))[0]


def moved(q, k, v, g, *, comm):
    """Call zeco_gla on tokens in the zigzag layout, moved to rank order and back."""
    return to_zigzag(allscan.zeco_gla(*(from_zigzag(x, comm=comm) for x in (q, k, v, g)), comm=comm)[0], comm=comm)


def calls(comm, one, others, zigzags, ordered) -> dict:
    """Return {method: Method}. ``one``: a communicator of this rank alone; ``others``: {method: Baseline}; ``zigzags``,
    ``ordered``: the communicators of ZIGZAG and of INVARIANT."""
    native, moving = zigzags
    found = {"zeco": Method(lambda *x: allscan.zeco_gla(*x, comm=comm)[0], comm, scans=1)}
    found[ZIGZAG[0]] = Method(lambda *x: allscan.zeco_gla(*x, comm=native, layout="zigzag")[0], native, scans=2)
    found[ZIGZAG[1]] = Method(functools.partial(moved, comm=moving), moving, scans=1, nccl="SendRecv")
    for (name, segment), own in zip(INVARIANT.items(), ordered, strict=True):
        found[name] = Method(functools.partial(in_order, comm=own, segment=segment), own, scans=1)
    for name, other in others.items():
        found[name] = Method(functools.partial(gla, carrier=other), other.comm, nccl=other.nccl)
    found["all_to_all"] = Method(lambda *x: all_to_all(*x, comm=comm, alone=one), one, nccl="SendRecv")
    if comm.device.type == "cuda":
        by_peer = functools.partial(all_to_all, comm=comm, alone=one, exchange=by_copies)
        found["all_to_all, copy engines"] = Method(by_peer, one, nccl="Memcpy")
    found["one rank"] = Method(lambda *x: allscan.zeco_gla(*x, comm=one)[0], one)
    if comm.device.type == "cuda":
        with contextlib.suppress(ImportError):
            from fla.ops.gla import chunk_gla

            found[FLA] = Method(lambda *x: chunk_gla(*x)[0], one)
    return found


def check(comm, methods, T, H, D, dtype, mildness) -> dict:
    """Return {method: largest error against one rank with the whole sequence, relative to each tensor's norm}."""
    leaves, do = inputs(T * comm.size, H, D, comm.device, 1, dtype, mildness)
    expected = step(leaves, do, methods["one rank"], True)
    mine, places = slice(comm.rank * T, (comm.rank + 1) * T), zigzag_positions(T, comm=comm)
    own = [x.detach()[:, mine].contiguous().requires_grad_() for x in leaves]
    local = step(own, do[:, mine].contiguous(), methods["one rank"], True)
    limit, errors = 1e-5 if dtype == torch.float32 else 5e-3, {}
    for name in (name for name in methods if name != "one rank"):
        where = places if name in ZIGZAG else mine
        given = [x.detach()[:, where].contiguous().requires_grad_() for x in leaves]
        wanted = local if name == FLA else [x[:, where] for x in expected]
        errors[name] = checked(name, step(given, do[:, where].contiguous(), methods[name], True), wanted, limit)
    return errors


_groups = {}


@contextlib.contextmanager
def over(ranks):
    """Return (communicator, {method: function of q, k, v, g}) on the first ``ranks`` ranks, None on the others.
    Collective over the job."""
    allscan.init()
    if ranks not in _groups:
        alone = [dist.new_group([r]) for r in range(dist.get_world_size())]
        _groups[ranks] = (dist.new_group(list(range(ranks))), alone[dist.get_rank()])
    if dist.get_rank() >= ranks:
        yield None
        return
    group, alone = _groups[ranks]
    with contextlib.ExitStack() as stack:

        def opened(group):
            comm = stack.enter_context(allscan.Communicator(group))
            comm.step()  # all calls are one iteration, so that steps take no time in what is measured
            return comm

        comm, one = map(opened, (group, alone))
        names = [*METHODS, *(METHODS_OF_GPUS if comm.device.type == "cuda" else ())]
        others = {name: Baseline(opened(group), name) for name in names}
        zigzags = [opened(group) for _ in ZIGZAG]
        ordered = [opened(group) for _ in INVARIANT]
        yield comm, calls(comm, one, others, zigzags, ordered)


def point(ranks, T, H, D, mildness, backward, chosen=None) -> dict | None:
    """Return {method: row} on each of the first ``ranks`` ranks; on CPUs only errors. ``chosen``: methods, default
    all."""
    with over(ranks) as here:
        if here is None:
            return None
        comm, methods = here
        chosen = chosen or [name for name in methods if name != COPY_ENGINES]
        methods = {name: methods[name] for name in dict.fromkeys((*chosen, "one rank"))}
        if comm.device.type == "cpu":
            return check(comm, methods, T, H, D, torch.float32, mildness)
        errors = check(comm, methods, T // 16, H, D, torch.bfloat16, mildness)
        leaves, do = inputs(T, H, D, comm.device, comm.rank, mildness=mildness)
        made = {name: capture(leaves, do, call, backward) for name, call in methods.items()}
        before = {name: method.epochs() for name, method in methods.items()}
        times = {name: [] for name in made}
        comm.barrier()
        for turn in range(SAMPLES):
            for name in random.Random(turn).sample(list(made), len(made)):
                graph = made[name][0]
                dist.barrier(comm.group)
                graph.replay()
                times[name].append(sample(graph.replay))
        comm.barrier()
        decay = leaves[3].detach().double().sum(1).exp().max().item()
        rows = {}
        for name, (graph, _, extra) in made.items():
            dist.barrier(comm.group)
            proof = methods[name].prove(name, before[name], SAMPLES * (1 + STEP_REPLAYS), 1, backward, graph.replay)
            rows[name] = dict(**quantiles(torch.tensor(times[name])), extra_mib=extra, rank_decay=decay, proof=proof)
            rows[name]["max_error"] = errors.get(name, "")
        return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks; default 2 and all GPUs")
    parser.add_argument("--gates", nargs="+", default=list(GATES), choices=list(GATES))
    parser.add_argument("--tokens", type=int, nargs="+", help="only SHAPES with so many tokens per rank")
    parser.add_argument("--methods", nargs="+", help='methods, e.g. zeco or "all_gather overlapped"; default all')
    parser.add_argument("--csv", default=results("operator.csv"))
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count()
    if gpus < 2:
        print("No two GPUs here: a check of every method on 3 CPU ranks, forward and backward.")
        with Ranks(3, "cpu") as ranks:
            for name, error in ranks.run(point, 3, 128, 3, 16, 16.0, True)[2].items():
                print(f"{name:22} error {error:.1e}")
        return 0
    counts = arguments.ranks or sorted({2, gpus})
    shapes = [shape for shape in SHAPES if not arguments.tokens or shape[0] in arguments.tokens]
    cases = [
        (*shape, kind, count, backward)
        for shape in shapes
        for kind in arguments.gates
        for count in counts
        for backward in (False, True)
    ]
    if importlib.util.find_spec("fla") is not None and FLA in (arguments.methods or [FLA]):
        compile_ahead([Job("gla", H) for H in sorted({shape[1] for shape in shapes})])
    methods = arguments.methods
    runs = [(WITHOUT_MULTICAST, methods and [name for name in methods if name != COPY_ENGINES])]
    if methods is None or COPY_ENGINES in methods:
        runs.append((WITHOUT_MULTICAST | {"NCCL_CTA_POLICY": "2"}, [COPY_ENGINES]))
    with Table(arguments.csv, COLUMNS) as table:
        for variables, chosen in runs:
            if chosen != []:
                with environment(variables), Ranks(max(counts), "cuda") as ranks:
                    for case in cases:
                        time_one(ranks, table, case, chosen)
    print(f"wrote {arguments.csv}")
    return 0


def time_one(ranks, table, case, chosen) -> None:
    T, H, D, kind, count, backward = case
    answers = ranks.run(point, count, T, H, D, GATES[kind], backward, chosen)[:count]
    rows = {name: slowest([answer[name] for answer in answers], "extra_mib", "max_error") for name in answers[0]}
    one_rank = rows["one rank"]["p50_us"]
    for name, row in rows.items():
        if name == "one rank":
            continue
        row["proof"] = answers[0][name]["proof"]
        row |= dict(method=name, T=T, H=H, D=D, gates=kind, ranks=count, one_rank_us=one_rank)
        row["pass"] = "forward+backward" if backward else "forward"
        row["percent_of_ideal"] = 100 * one_rank / row["p50_us"]
        table.write(row)
        print(
            f"T={T} H={H} {kind:7} {row['pass']:16} P={count} {name:24}{row['p50_us']:9.1f} us "
            f"({row['p20_us']:.1f}-{row['p80_us']:.1f})  {row['p50_us'] / one_rank:.4f} x one rank  "
            f"{row['percent_of_ideal']:5.1f} % of ideal  extra {row['extra_mib']:.0f} MiB",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
