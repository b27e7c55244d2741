"""Extrapolates beyond this machine by a small model, which is first compared with measurements. Needs no GPU.

    python -m bench.scaling                     # writes bench/results/scaling.csv and scaling.png
    python -m bench.scaling --net-us 3 --net-gbps 100 --node 4

Each method is a sum of latencies and bytes over bandwidth, with P ranks and a state of m bytes:

    chain       t + (P - 1) a + m / B + [P > 2] m c     pipelined tiles: All-Scan; c: a rank in the middle, which
                                                        receives and sends, is slower than the first and the last
    all-gather  t + (P - 1) (a + m / B)                 every rank receives all states, then folds; between nodes
                                                        over all L cards, as in NCCL's rings
    ring        (P - 1) (t + m / B)                     sequential send and receive: LASP-1
    rails       t + give + (N - 1) n + m / L W + take   N nodes of L GPUs (docs/rails.md), one launch: a slice is sent
                                                        to its owner, over the nodes by a chain, and back
    recursive doubling    t + give + q (n + 17/16 m / L W) + take like rails, over the nodes in q rounds with decays

    give = a + (L - 1) / L m (1 / B + c) + 2 (L - 1) l          take = a + (L - 1) / L m (1 / B + c) + (L - 1) l

t, a, B and c of the first three are fitted to measurements of 2026-11-22 (scan_2026_11_22.csv; 2 and 4 H200s, NVLink,
each a launch in a CUDA graph, so t includes the launch boundary) by least squares of the relative error. Those of
2026-11-27 (scan.csv) are fitted within 11 % for All-Scan and 25 % for the others, as these are; but leaving one size
out, the prediction for signal is 41 % off at 32 MiB (these: below 35 %). We have no links between nodes to measure: W,
50 GB/s a GPU, is a 400 Gb/s ConnectX-7 (as in DeepEP's README), and n, 5 us for a put with its signal, is an
assumption; the table also names the fastest method at 2 and at 10 us. Others have measured 7 us and 47 GB/s for
NVSHMEM's IBGDA. l, the time to poll a part of a slice that has arrived, is also assumed; virtual ranks
(tests/support/virtual.py) can measure it.

Launch boundaries: one per method, for the ring one per hop. The model does not cover programs with several tiles of one
slice, whose rounds of recursive doubling are sequential: with 66 programs and nodes of 8 from 32 MiB on, with the 33 of
zeco_gla from 16 MiB on.

"by proxy": NVSHMEM 3.4.5, whose bitcode has no IBGDA: a host thread makes each put. Its latency, and its time for a put
with signal (one per tile of 32 KiB), are assumptions.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import sys

import numpy as np

from allscan.comm.topology import ANY_SIZE
from allscan.scan.rails_links import distances
from bench.harness import results

MIB = 1 << 20
CHAINS = ("sentinel", "signal", "put")
GATHER = "all_gather (fused fold)"
CHAIN = "virtual, 2 GPUs, no launch"  # a kind of bench.chain
SCAN = results("scan_2026_11_22.csv")  # the measurements of bench.scan that the model is fitted to
LOOK_US = 0.4  # l, assumed
PROXY_US, PROXY_PUT_US, PROXY_BYTES = 12.0, 1.0, 32 << 10  # assumed
SCANS = ("chain", "rails", "recursive_doubling")  # implemented algorithms
# ZeCO, arXiv 2507.01004, table 2, in us: H100s, H=32, K=V=128, so 2 MiB
PUBLISHED_RANKS = (8, 16, 32, 64, 128, 256)
PUBLISHED = {
    "all_gather": (375, 658, 1616, 2543, 4350, 8514),
    "All-Scan": (226, 297, 448, 739, 1272, 2165),
}


def terms(method: str, ranks, nbytes):
    """Return the model's terms [points, 4] with coefficients t, a, 1 / B and c."""
    hops = np.asarray(ranks, float) - 1
    nbytes = np.asarray(nbytes, float)
    if method == "ring":
        return np.stack([hops, 0 * hops, hops * nbytes, 0 * hops], 1)
    if method in CHAINS:
        return np.stack([1 + 0 * hops, hops, nbytes, nbytes * (hops > 1)], 1)
    return np.stack([1 + 0 * hops, hops, hops * nbytes, 0 * hops], 1)


def fit(method: str, ranks, nbytes, us):
    """Fit (t, a, 1 / B, c) by least squares of the relative error."""
    us = np.asarray(us, float)
    return np.linalg.lstsq(terms(method, ranks, nbytes) / us[:, None], np.ones(len(us)), rcond=None)[0]


def measured(path: str):
    """Read {method: (ranks, bytes, us)}."""
    points = {}
    with open(path) as file:
        for row in csv.DictReader(file):
            if row["method"] in (*CHAINS, GATHER, "ring"):
                point = int(row["ranks"]), int(row["bytes"]), float(row["p50_us"])
                points.setdefault(row["method"], []).append(point)
    return {method: tuple(zip(*rows)) for method, rows in points.items()}


def measured_chain(path: str):
    """Read (ranks, bytes, us) of bench.chain, for sizes at which hops that share a link's direction measure latency."""
    with open(path) as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == "chain"]
    points = [(int(row["ranks"]), int(row["bytes"]), float(row["p50_us"])) for row in rows]
    most = {2: math.inf, 3: math.inf, 4: MIB // 2, 5: MIB // 2}
    return tuple(zip(*(point for point in points if point[1] <= most.get(point[0], MIB // 4))))


def beyond(fits, P: int, m: float, node: int, net_us: float, net_gbps: float):
    """Return {method: us} for P ranks in nodes of ``node``: measured inside a node, ``net_us`` and ``net_gbps``
    between nodes."""
    t, a, inverse, middle = fits["sentinel"]
    inverse += middle * (P > 2)
    nodes = math.ceil(P / node)
    inside = min(P, node)
    net = m / (net_gbps * 1e3) if nodes > 1 else 0.0
    wire = max(m * inverse, net)
    gather_t, gather_a, gather_inverse, _ = fits[GATHER]
    ring_t, _, ring_inverse, _ = fits["ring"]
    slow = nodes - 1  # hops between nodes in a chain
    others = (inside - 1) / inside * m * (fits["sentinel"][2] + middle)
    give = a + others + 2 * (inside - 1) * LOOK_US
    take = a + others + (inside - 1) * LOOK_US
    if nodes == 1:  # no choice of algorithm
        give = take = math.inf
    hops = (P - 1 - slow) * gather_a + slow * net_us
    rounds = len(distances(nodes))

    def over_nodes(us, part):
        """Return the us for a slice (by a chain, in rounds)."""
        return slow * us + part, rounds * (us + part * 17 / 16)

    rails, recursive_doubling = over_nodes(net_us, net / inside)
    proxy = max(net, PROXY_PUT_US * m / PROXY_BYTES) if slow else 0.0
    by_proxy = over_nodes(PROXY_US, proxy / inside)
    return {
        "chain": t + (P - 1 - slow) * a + slow * net_us + wire,
        "rails": t + give + rails + take,
        "recursive_doubling": t + give + recursive_doubling + take,
        "chain by proxy": t + (P - 1 - slow) * a + slow * PROXY_US + max(wire, proxy),
        "rails by proxy": t + give + min(by_proxy) + take,
        "all-gather": gather_t + hops + (P - 1) * max(m * gather_inverse, net / inside),
        "ring": (P - 1 - slow) * (ring_t + m * ring_inverse) + slow * (ring_t + net_us + net),
    }


def choices(fits, node: int, net_us: float, net_gbps: float) -> tuple:
    """Compute a table of allscan.comm.topology: by number of nodes the largest size, a power of two in bytes, at which
    recursive doubling is the fastest of SCANS, and then the same for rails."""
    sizes = [1 << i for i in range(14, 31)]
    found = {}
    for nodes in (128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2):
        times = [beyond(fits, nodes * node, m, node, net_us, net_gbps) for m in sizes]
        for method in ("recursive_doubling", "rails"):
            won = [m for m, us in zip(sizes, times) if min(SCANS, key=us.get) == method]
            if won:
                found[method, nodes] = max(won) if max(won) < sizes[-1] else ANY_SIZE
    table = [(nodes, most, method) for (method, nodes), most in found.items()]
    table.sort(key=lambda row: (row[2] == "rails", -row[0]))
    # drop rows that repeat a row for fewer nodes
    return tuple(a for a, b in zip(table, [*table[1:], None]) if b is None or a[1:] != b[1:])


def draw(path, points, lines):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    axes = figure.subplots()
    for i, (method, (ranks, us)) in enumerate(lines.items()):
        axes.plot(ranks, us, "--", color=f"C{i}", label=f"{method}, extrapolated")
    for i, (method, (ranks, nbytes, us)) in enumerate(points.items()):
        some = [(p, u) for p, n, u in zip(ranks, nbytes, us) if n == 2 * MIB]
        axes.plot(*zip(*some), "os^Dv"[i], color="black", markerfacecolor="none", label=f"{method}, measured, H200")
    for marker, (method, us) in zip("x+", PUBLISHED.items()):
        axes.plot(PUBLISHED_RANKS, us, marker, color="red", label=f"{method}, published, H100 (ZeCO, table 2)")
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="us", title="Scan of a 2 MiB state")
    axes.set_xticks([2, 4, 8, 32, 128, 512], [2, 4, 8, 32, 128, 512])
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=120)


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--scan", default=SCAN, help="CSV file of bench.scan")
    parser.add_argument("--chain", default=results("chain.csv"), help="CSV file of bench.chain, if it exists")
    parser.add_argument("--node", type=int, default=8, help="GPUs per node, joined by NVLink")
    parser.add_argument("--net-us", type=float, default=5.0, help="latency of a put with signal between nodes")
    parser.add_argument("--net-gbps", type=float, default=50.0, help="GB/s of a GPU's network card")
    parser.add_argument("--out", default=results("scaling"), help="path of the results, without suffix")
    options = parser.parse_args(arguments)
    points = measured(options.scan)
    fits = {method: fit(method, *values) for method, values in points.items()}
    rows = []

    def keep(kind, method, ranks, nbytes, us, model):
        rows.append((kind, method, ranks, int(nbytes), f"{us:.4g}" if us else "", f"{model:.4g}"))

    print("The model and our measurements (H200, NVLink):")
    for method, (ranks, nbytes, us) in points.items():
        t, a, inverse, middle = fits[method]
        model = terms(method, ranks, nbytes) @ fits[method]
        worst = np.abs(model / us - 1).max()
        print(
            f"  {method:24} t {t:6.2f} us  a {a:5.2f} us  B {1e-3 / inverse:5.0f} GB/s, in the middle "
            f"{1e-3 / (inverse + middle):5.0f}   worst error {worst:4.0%}"
        )
        for values in zip(ranks, nbytes, us, model):
            keep("measured", method, *values)
    if os.path.exists(options.chain):
        chain = measured_chain(options.chain)
        t, a, inverse, middle = fit("sentinel", *chain)
        model = terms("sentinel", *chain[:2]) @ (t, a, inverse, middle)
        print(
            f"  {CHAIN:24} t {t:6.2f} us  a {a:5.2f} us  B {1e-3 / inverse:5.0f} GB/s, in the middle "
            f"{1e-3 / (inverse + middle):5.0f}   worst error {np.abs(model / chain[2] - 1).max():.0%}"
        )
        for values in zip(*chain, model):
            keep("measured", CHAIN, *values)
    print("The same forms and the published table 2 (H100, 2 MiB), fitted to it:")
    for method, us in PUBLISHED.items():
        shape = terms("sentinel", PUBLISHED_RANKS, [0] * 6)[:, :2]
        t, a = np.linalg.lstsq(shape / np.array(us)[:, None], np.ones(6), rcond=None)[0]
        model = shape @ (t, a)
        worst = np.abs(model / us - 1).max()
        print(f"  {method:24} t {t:6.0f} us, {a:5.1f} us for each further rank             worst error {worst:4.0%}")
        for values in zip(PUBLISHED_RANKS, [2 * MIB] * 6, us, model):
            keep("published", method, *values)

    print(
        f"EXTRAPOLATED: nodes of {options.node}, {options.net_us:g} us and {options.net_gbps:g} GB/s between them; us"
    )
    lines = {}

    def fastest(P, m, net_us):
        us = beyond(fits, P, m, options.node, net_us, options.net_gbps)
        return min((method for method in us if "proxy" not in method), key=us.get)

    for mib in (0.25, 2, 32):
        print(
            f"  {mib:g} MiB"
            + "".join(f"{name:>16}" for name in beyond(fits, 2, 1, 8, 5, 50))
            + "   fastest at 2/5/10 us"
        )
        for P in (8, 16, 32, 64, 128, 256, 512, 1024):
            times = beyond(fits, P, mib * MIB, options.node, options.net_us, options.net_gbps)
            winners = [fastest(P, mib * MIB, net_us) for net_us in (2.0, 5.0, 10.0)]
            shown = "".join(f"{us:16.0f}" if us < math.inf else " " * 15 + "-" for us in times.values())
            print(f"  {P:5d}  " + shown + "   " + ", ".join(winners))
            for method, us in times.items():
                if us == math.inf:
                    continue
                keep("extrapolated", method, P, mib * MIB, None, us)
                if mib == 2:
                    lines.setdefault(method, ([], []))
                    lines[method][0].append(P)
                    lines[method][1].append(us)
    print("EXTRAPOLATED: the fastest algorithm (nodes at least, bytes at most):")
    for least, most, method in choices(fits, options.node, options.net_us, options.net_gbps):
        print(f"  {least:4d}  {'any size' if most == ANY_SIZE else f'{most / MIB:g} MiB':>9}  {method}")
    print(
        "EXTRAPOLATED: recursive doubling, 2 MiB, us, 5 us and 50 GB/s / 7 us and 47 GB/s; wanted at most 120 and 150:"
    )
    for P in (256, 1024):
        both = [
            beyond(fits, P, 2 * MIB, options.node, *net)["recursive_doubling"] for net in ((5.0, 50.0), (7.0, 47.0))
        ]
        print(f"  {P:5d} ranks  {both[0]:.0f} / {both[1]:.0f}")
    with open(options.out + ".csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("kind", "method", "ranks", "bytes", "us", "model_us"))
        writer.writerows(rows)
    draw(options.out + ".png", points, lines)
    print(f"wrote {options.out}.csv and {options.out}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
