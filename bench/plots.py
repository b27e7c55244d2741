"""Pictures of the committed results; needs no GPU.

    python -m bench.plots               # draws scan.png, operator.png, delta.png, host.png and hybrid_*.png

They are of the files in bench/results that are called alike, as far as they are there.
"""

from __future__ import annotations

import argparse
import csv
import glob
import json
import os
import sys

from bench.harness import results

KEYS = ("rule", "T", "H", "ranks", "gates")


def rows(path: str) -> list:
    with open(path) as file:
        return list(csv.DictReader(file))


def scan(table, path):
    """Latency over the size of the state, a line a method, a panel a number of ranks."""
    from matplotlib.figure import Figure

    counts = sorted({int(row["ranks"]) for row in table})
    figure = Figure(figsize=(5 * len(counts), 4.2), layout="constrained")
    for axes, ranks in zip(figure.subplots(1, len(counts), sharey=True, squeeze=False)[0], counts):
        for i, method in enumerate(dict.fromkeys(row["method"] for row in table)):
            points = sorted(
                (float(row["bytes"]) / (1 << 20), float(row["p50_us"]))
                for row in table
                if row["method"] == method and int(row["ranks"]) == ranks
            )
            style = dict(color="black", linestyle="--") if method == "peer copy" else dict(color=f"C{i}", marker="o")
            axes.plot(*zip(*points), label=method, markersize=3, **style)
        axes.set(xscale="log", yscale="log", xlabel="state, MiB", title=f"{ranks} ranks")
        axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.supylabel("us, slowest rank")
    figure.savefig(path, dpi=120)


def operator(table, path):
    """What each method takes more than one rank, in percent, a panel a shape and pass; bars by number of ranks."""
    from matplotlib.figure import Figure

    methods = [m for m in dict.fromkeys(row["method"] for row in table) if m not in ("all_to_all", "fla, one rank")]
    panels = list(dict.fromkeys((row["T"], row["H"], row["gates"], row["pass"]) for row in table))
    columns = (len(panels) + 1) // 2
    figure = Figure(figsize=(3.6 * columns, 6), layout="constrained")
    for axes, panel in zip(figure.subplots(2, columns, squeeze=False).T.flat, panels):
        some = [row for row in table if (row["T"], row["H"], row["gates"], row["pass"]) == panel]
        counts = sorted({int(row["ranks"]) for row in some})
        for i, method in enumerate(methods):
            more = {int(r["ranks"]): 1e4 / float(r["percent_of_ideal"]) - 100 for r in some if r["method"] == method}
            at = [counts.index(ranks) + 0.2 * i for ranks in more]
            axes.bar(at, list(more.values()), width=0.18, label=method, color=f"C{i}")
        axes.set_xticks([i + 0.1 * (len(methods) - 1) for i in range(len(counts))], [f"{c} ranks" for c in counts])
        axes.set_title("T={} a rank, H={}, gates {}\n{}".format(*panel), fontsize="small")
        axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize="small")
    figure.supylabel("% more than one rank")
    figure.savefig(path, dpi=120)


def delta(table, path):
    """Time over that of one rank, a panel a pass; bars by tokens and heads: called, and as a graph."""
    from matplotlib.figure import Figure

    figure, passes = Figure(figsize=(9, 4.2), layout="constrained"), ("forward", "forward+backward")
    for axes, kind in zip(figure.subplots(1, 2, sharey=True, squeeze=False)[0], passes):
        some = [row for row in table if row["pass"] == kind]
        alone = {tuple(row[k] for k in KEYS): row for row in some if "one rank" in row["method"]}
        methods = [m for m in dict.fromkeys(row["method"] for row in some) if "one rank" not in m]
        width = 0.4 / max(2, len(methods))  # of a bar
        for i, method in enumerate(methods):
            for column, alpha in (("p50_us", 1.0), ("graph_us", 0.4)):
                bars = {
                    n + 2 * width * i + 0.9 * width * (alpha < 1): float(row[column]) / float(alone[point][column])
                    for n, point in enumerate(alone)
                    for row in some
                    if row["method"] == method and row[column] and all(row[k] == v for k, v in zip(KEYS, point))
                }
                label = f"{method}, {'called' if alpha == 1 else 'as a graph'}"
                axes.bar(list(bars), list(bars.values()), width=0.85 * width, color=f"C{i}", alpha=alpha, label=label)
        names = [f"{rule} {T}\nH={H}" for rule, T, H, *_ in alone]
        axes.set_xticks([n + 0.29 for n in range(len(names))], names, fontsize="small")
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set(title=kind, ylim=(0.7, None))
        axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize="x-small")
    figure.supylabel("time over one rank's")
    figure.savefig(path, dpi=120)


def host(table, path):
    """Time of a call from Python over its tokens: what it keeps the host (solid), and until the GPU is done."""
    from matplotlib.figure import Figure

    figure, passes = Figure(figsize=(9, 4.2), layout="constrained"), ("forward", "forward+backward")
    for axes, kind in zip(figure.subplots(1, 2, squeeze=False)[0], passes):
        some = [row for row in table if row["T"] and row["method"].endswith(f", {kind}")]
        for i, method in enumerate(dict.fromkeys(row["method"] for row in some)):
            for column, line in (("host_us", "-"), ("total_us", ":")):
                points = sorted((int(r["T"]), float(r[column])) for r in some if r["method"] == method)
                label = method.split(",")[0] if line == "-" else None
                axes.plot(*zip(*points), line, color=f"C{i}", marker="o", markersize=3, label=label)
        axes.set(xscale="log", yscale="log", xlabel="tokens of a rank", title=kind)
        axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.supylabel("us a call; dotted: until the GPU is done")
    figure.savefig(path, dpi=120)


def hybrid(found, path):
    """A softmax layer of bench.hybrid in the zigzag layout on each rank: what gathers keys, and what computes."""
    from matplotlib.figure import Figure

    colors = {"other kernels": "lightgray", "softmax": "C0", "NCCL": "black"}
    ranks = len(found["panels"]["forward"])
    figure = Figure(figsize=(12, 1.2 + 0.8 * ranks), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, (what, profiles) in zip(panels, found["panels"].items(), strict=True):
        for rank, profile in enumerate(profiles):
            for kind, color in colors.items():
                bars = [(begin, ms) for k, _, begin, ms in profile if kind == (k if k in colors else "other kernels")]
                line = 2 * (ranks - 1 - rank) + (kind != "NCCL")
                axes.broken_barh(bars, (line + 0.1, 0.8), facecolors=color, label=kind if not rank else None)
        axes.set(xlabel="ms", title=f"a softmax layer, {what}")
        axes.set_yticks([2 * i + 1 for i in range(ranks)], [f"rank {ranks - 1 - i}" for i in range(ranks)])
    panels[0].legend(loc="upper left", fontsize="small")
    figure.suptitle(found["title"])
    figure.savefig(path, dpi=120)


def main() -> int:
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    for name, draw in (("scan", scan), ("operator", operator), ("delta", delta), ("host", host)):
        if not os.path.exists(results(f"{name}.csv")):
            continue
        draw(rows(results(f"{name}.csv")), results(f"{name}.png"))
        print(f"wrote {results(name)}.png")
    for path in glob.glob(results("hybrid_*.json")):
        with open(path) as file:
            hybrid(json.load(file), f"{path.removesuffix('.json')}.png")
        print(f"wrote {path.removesuffix('.json')}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
