"""Pictures of the committed results; needs no GPU.

    python -m bench.plots               # draws scan.png and operator.png

They are of bench/results/scan.csv and operator.csv.
"""

from __future__ import annotations

import argparse
import csv
import sys

from bench.harness import results


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


def main() -> int:
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    for name, draw in (("scan", scan), ("operator", operator)):
        draw(rows(results(f"{name}.csv")), results(f"{name}.png"))
        print(f"wrote {results(name)}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
