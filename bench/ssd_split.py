"""Measures zeco_ssd and zeco_simple_gla over several ranks, beside one GPU's pass with as many tokens as a rank has.

    python -m bench.ssd_split            # 2 GPUs and all of this machine; writes bench/results/ssd_split.csv

Weak scaling: T consecutive tokens a rank, bfloat16. Both methods run on the same GPUs in turns, in a new random order
each time: replayed as CUDA graphs, and called from Python (columns with ``python``). A time is the median over samples
of consecutive calls, of the slowest rank; ``over_one_rank`` is its ratio to one rank's time, ``one_rank_us``. Before,
the split is checked against one rank with the whole sequence, at a 16th of the tokens; afterwards its scans are counted
(column ``proof``, of rank 0). Without GPUs only the check runs, on 2 CPU ranks.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys

import torch
import torch.distributed as dist

import allscan
from allscan.tools.ranks import Ranks
from bench.delta import CALLS, joined
from bench.harness import STEP_REPLAYS, Table, checked, extra_mib, quantiles, results, sample, slowest
from bench.operator import SAMPLES
from bench.proof import Method
from bench.ssd import both, forward
from bench.tuning import of_simple_gla, of_ssd

TOKENS = 8192, 16384
SIZES = 128, 64, 8, 128  # heads, their width, groups, rows of a state
COLUMNS = (
    *("rule", "T", "H", "P", "G", "N", "pass", "ranks", "p20_us", "p50_us", "p80_us", "skew_us", "one_rank_us"),
    *("over_one_rank", "python_us", "one_rank_python_us", "python_over_one_rank", "extra_mib", "max_error", "proof"),
    *("gpu", "torch", "triton", "sources"),
)


def ssd(comm, x, dt, A, B, C, **rest):
    return allscan.zeco_ssd(x, dt, A, B, C, 256, **rest, dt_softplus=True, comm=comm)


def simple_gla(comm, **leaves):
    return allscan.zeco_simple_gla(**leaves, comm=comm)[0]


RULES = dict(zeco_ssd=(ssd, of_ssd), zeco_simple_gla=(simple_gla, of_simple_gla))


def check(rule, comm, one, T, sizes, **how) -> float:
    """Return the largest error of y and of all gradients against one rank with the whole sequence."""
    call, draw = RULES[rule]
    leaves, do = draw(T * comm.size, *sizes, device=comm.device, **how)
    mine = slice(comm.rank * T, (comm.rank + 1) * T)
    own = {name: t[:, mine] if t.ndim > 1 else t for name, t in leaves.items()}
    own = {name: t.detach().requires_grad_(leaves[name].requires_grad) for name, t in own.items()}
    y, *grads = both(functools.partial(call, comm), own, do[:, mine])
    wanted, *expected = both(functools.partial(call, one), leaves, do)
    for x in (x for x in grads if x.ndim == 1):
        dist.all_reduce(x, group=comm.group)
    expected = [wanted[:, mine], *(x[:, mine] if x.ndim > 1 else x for x in expected)]
    return checked(rule, [y, *grads], expected, 1e-5 if comm.device.type == "cpu" else 2e-2)


def point(ranks, rule, T, sizes, backward) -> dict | None:
    """Return {method: row} on each of the first ``ranks`` ranks; on CPUs the error."""
    with joined(ranks) as communicators:
        if communicators is None:
            return None
        comm, one = communicators
        one.step()  # all calls are one iteration
        if comm.device.type == "cpu":
            return check(rule, comm, one, T, sizes, dtype=torch.float32)
        error = check(rule, comm, one, T // 16, sizes)
        (call, draw), methods = RULES[rule], {"split": Method(None, comm, scans=1), "one rank": Method(None, one)}
        leaves, do = draw(T, *sizes, device=comm.device)
        calls, graphs, rows = {}, {}, {}
        for name, method in methods.items():
            called = functools.partial(call, method.comm)
            calls[name] = functools.partial(both, called, leaves, do)
            if not backward:
                calls[name] = functools.partial(forward, called, leaves)
            calls[name]()
            rows[name] = dict(extra_mib=extra_mib(calls[name]), max_error=error)
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name]):
                rows[name]["kept"] = calls[name]()
        before = {name: method.epochs() for name, method in methods.items()}
        times, in_python = ({name: [] for name in methods} for _ in range(2))
        for turn in range(SAMPLES):
            for name in random.Random(turn).sample(list(methods), len(methods)):
                dist.barrier(comm.group)
                graphs[name].replay()
                times[name].append(sample(graphs[name].replay))
                dist.barrier(comm.group)
                in_python[name].append(sample(calls[name], CALLS))
        comm.barrier()
        steps = SAMPLES * (1 + STEP_REPLAYS + CALLS)
        for name, method in methods.items():
            dist.barrier(comm.group)
            proof = method.prove(name, before[name], steps, 1, backward, graphs[name].replay)
            rows[name] |= dict(**quantiles(torch.tensor(times[name])), proof=proof)
            rows[name]["python_us"] = torch.tensor(in_python[name]).median().item()
            del rows[name]["kept"]
        return rows


def time_one(ranks, table, rule, T, count, backward) -> None:
    answers = ranks.run(point, count, rule, T, SIZES, backward)[:count]
    most = "extra_mib", "max_error", "python_us"
    row, one = (slowest([answer[name] for answer in answers], *most) for name in ("split", "one rank"))
    row |= dict(zip("HPGN", SIZES), rule=rule, T=T, ranks=count, proof=answers[0]["split"]["proof"])
    row["pass"] = "forward+backward" if backward else "forward"
    row |= dict(one_rank_us=one["p50_us"], over_one_rank=row["p50_us"] / one["p50_us"])
    ratio = row["python_us"] / one["python_us"]
    row |= dict(one_rank_python_us=one["python_us"], python_over_one_rank=ratio)
    table.write(row)
    print(
        f"{rule:16} T={T} P={count} {row['pass']:16} {row['p50_us']:9.1f} us, {row['over_one_rank']:.4f} x one rank; "
        f"from Python {row['python_us']:9.1f} us, {ratio:.4f} x",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks; default 2 and all GPUs")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="tokens per rank")
    parser.add_argument("--rules", nargs="+", default=[*RULES], choices=RULES)
    parser.add_argument("--csv", default=results("ssd_split.csv"))
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count()
    if gpus < 2:
        print("No two GPUs here: a check of both rules on 2 CPU ranks, forward and backward.")
        with Ranks(2, "cpu") as ranks:
            for rule in RULES:
                print(f"{rule:22} error {ranks.run(point, 2, rule, 70, (4, 8, 2, 16), True)[0]:.1e}")
        return 0
    counts = arguments.ranks or sorted({2, gpus})
    cases = [(rule, T, count) for rule in arguments.rules for T in arguments.tokens for count in counts]
    with Table(arguments.csv, COLUMNS) as table, Ranks(max(counts), "cuda") as ranks:
        for case in cases:
            for backward in (False, True):
                time_one(ranks, table, *case, backward)
    print(f"wrote {arguments.csv}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
