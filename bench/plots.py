"""Draws plots of the committed results; needs no GPU.

    python -m bench.plots               # draws scan, operator, delta, long, prefill, training and hybrid_*.png

Each plot shows the file of the same name in bench/results, if it exists; training.png shows model, long, hybrid and
hybrid_short.
"""

from __future__ import annotations

import argparse
import csv
import glob
import json
import os
import sys

from bench.harness import results


def rows(path: str) -> list:
    with open(path) as file:
        return list(csv.DictReader(file))


def scan(table, path):
    """Draw latency over the size of the state, a line per method, a panel per number of ranks."""
    from matplotlib.figure import Figure

    counts = sorted({int(row["ranks"]) for row in table})
    figure = Figure(figsize=(5 * len(counts), 4.6), layout="constrained")
    for axes, ranks in zip(figure.subplots(1, len(counts), sharey=True, squeeze=False)[0], counts):
        methods = dict.fromkeys(row["method"] for row in table)
        # of windows only one number of programs: it is nearly the fastest
        for i, method in enumerate(x for x in methods if x in NAMES or not x.startswith("windows")):
            points = sorted(
                (float(row["bytes"]) / (1 << 20), float(row["p50_us"]))
                for row in table
                if row["method"] == method and int(row["ranks"]) == ranks
            )
            style = dict(color="black", linestyle="--") if method == "peer copy" else dict(color=f"C{i}", marker="o")
            axes.plot(*zip(*points), label=NAMES.get(method, method), markersize=3, **style)
        axes.set(xscale="log", yscale="log", xlabel="state, MiB", title=f"{ranks} ranks")
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    figure.supylabel("us, slowest rank")
    figure.suptitle(conditions(table, "latency of a scan in a CUDA graph"), fontsize="medium")
    figure.savefig(path, dpi=120)


NAMES = {  # labels of methods
    "windows (fused fold), 32 programs": "NCCL all-gather of windows and fused fold",
    "windows (no fold), 32 programs": "NCCL all-gather of windows alone",
    "zeco": "All-Scan",
    "sentinel": "All-Scan",
    "signal": "All-Scan, stores with a signal",
    "put": "All-Scan, NVSHMEM puts",
    "all_gather": "NCCL all-gather",
    "all_gather overlapped": "NCCL all-gather, overlapped",
    "all_gather (fused fold)": "NCCL all-gather and fused fold",
    "all_gather (no fold)": "NCCL all-gather alone",
    "ring": "NCCL ring, rank to rank",
    "peer copy": "copy of a state to the next rank",
    "fla cp_context": "fla's context parallelism",
    "fla cp_context, All-Scan": "the same with fla_cp.enable()",
    "zeco, zigzag": "All-Scan, zigzag",
    "zeco, tokens moved": "tokens moved out of zigzag and back",
}


def conditions(table, *more) -> str:
    gpus = ", ".join(sorted({row["gpu"].removeprefix("NVIDIA ") for row in table}))
    return ", ".join([gpus, *more, "less is better"])


def operator(table, path):
    """Draw each method's additional time over one rank, in percent, the worst of all gates; a panel per pass."""
    from matplotlib.figure import Figure

    methods = [
        m
        for m in dict.fromkeys(row["method"] for row in table)
        if m != "fla, one rank" and not m.startswith("all_to_all")
    ]
    passes = list(dict.fromkeys(row["pass"] for row in table))
    counts = sorted({int(row["ranks"]) for row in table})
    figure = Figure(figsize=(10, 1.2 + 0.32 * len(counts) * (len(methods) + 1)), layout="constrained")

    def more(ranks, method, what) -> float:
        some = [r for r in table if (int(r["ranks"]), r["method"], r["pass"]) == (ranks, method, what)]
        return max((1e4 / float(row["percent_of_ideal"]) - 100 for row in some), default=float("nan"))

    for axes, what in zip(figure.subplots(1, len(passes), sharey=True, squeeze=False)[0], passes):
        lines = [(ranks, method) for ranks in counts for method in methods]
        at = [n + n // len(methods) for n in range(len(lines))]  # a gap between numbers of ranks
        values = [more(*line, what) for line in lines]
        bars = axes.barh(at, values, color=[f"C{methods.index(method)}" for _, method in lines])
        axes.bar_label(bars, [f"{x:+.1f} %" for x in values], padding=3, fontsize="small")
        axes.set_yticks(at, [f"{NAMES.get(m, m)}, {ranks} ranks" for ranks, m in lines])
        axes.set(title=what, xlim=(min(0.0, *values), 1.25 * max(values)))
        far = ", ".join(f"{more(ranks, 'all_to_all', what):+.0f} % on {ranks}" for ranks in counts)
        axes.set_xlabel(f"% more time than one rank\n(heads by all-to-all: {far})", fontsize="small")
        axes.grid(alpha=0.3, axis="x")
        if not axes.yaxis_inverted():
            axes.invert_yaxis()
    shapes = sorted({f"{int(row['T']):,} tokens a rank, H={row['H']}, K=V={row['D']}" for row in table})
    title = conditions(table, "zeco_gla in CUDA graphs", "; ".join(shapes), "worst of three kinds of gates")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=120)


def delta(table, path):
    """Draw the time of a call over that of fla's operator on one rank with as many tokens, 2 ranks; a panel per rule
    and pass."""
    from matplotlib.figure import Figure

    methods = [m for m in NAMES if any(row["method"] == m for row in table)]
    passes, rules = ("forward", "forward+backward"), list(dict.fromkeys(row["rule"] for row in table))
    table = [row for row in table if row["gates"] != "0" and row["ranks"] == "2"]  # others are of other machines
    points = {rule: list(dict.fromkeys((r["T"], r["H"]) for r in table if r["rule"] == rule)) for rule in rules}
    height = 1.6 + 0.16 * sum(len(x) for x in points.values()) * (len(methods) + 1)
    figure = Figure(figsize=(11, height), layout="constrained")
    ratios = [len(points[rule]) for rule in rules]
    panels = figure.subplots(len(rules), 2, squeeze=False, gridspec_kw=dict(height_ratios=ratios))
    for rule, line in zip(rules, panels):
        for axes, what in zip(line, passes):
            some = [row for row in table if (row["rule"], row["pass"]) == (rule, what)]
            one = {
                (r["T"], r["H"]): float(r["p50_us"]) for r in some if r["method"] in ("fla, one rank", "zeco, one rank")
            }
            for i, method in enumerate(methods):
                times = {(r["T"], r["H"]): float(r["p50_us"]) for r in some if r["method"] == method}
                at = [n + i / (len(methods) + 1) for n, point in enumerate(points[rule]) if point in times]
                values = [times[point] / one[point] for point in points[rule] if point in times]
                bars = axes.barh(at, values, 0.8 / len(methods), color=f"C{i}", label=NAMES[method])
                axes.bar_label(bars, [f"{x:.2f}" for x in values], padding=2, fontsize=6)
            axes.set_yticks([n + 0.2 for n in range(len(points[rule]))], [f"T={T}, H={H}" for T, H in points[rule]])
            axes.set_xlim(0, 1.12 * axes.dataLim.xmax)
            axes.axvline(1, color="black", linewidth=0.8)
            axes.set(title=f"{rule}, {what}")
            axes.grid(alpha=0.3, axis="x")
            axes.invert_yaxis()
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    figure.suptitle(
        conditions(table, "2 ranks", "called eagerly", "K=V=128, decays near 1", "time over one rank's with T tokens"),
        fontsize="medium",
    )
    figure.savefig(path, dpi=120)


def hybrid(found, path):
    """Draw a softmax layer of bench.hybrid in the zigzag layout on each rank: gathers of keys, and computation."""
    from matplotlib.figure import Figure

    colors = {"other kernels": "lightgray", "softmax": "C0", "NCCL": "black"}
    ranks = len(found["panels"]["forward"])
    figure = Figure(figsize=(12, 1.5 + 0.8 * ranks), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, (what, profiles) in zip(panels, found["panels"].items(), strict=True):
        for rank, profile in enumerate(profiles):
            for kind, color in colors.items():
                bars = [(begin, ms) for k, _, begin, ms in profile if kind == (k if k in colors else "other kernels")]
                line = 2 * (ranks - 1 - rank) + (kind != "NCCL")
                axes.broken_barh(bars, (line + 0.1, 0.8), facecolors=color, label=kind if not rank else None)
        axes.set(xlabel="ms", title=f"a softmax layer, {what}")
        axes.set_yticks([2 * i + 1 for i in range(ranks)], [f"rank {ranks - 1 - i}" for i in range(ranks)])
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    figure.suptitle(found["title"])
    figure.savefig(path, dpi=120)


MODELS = {  # labels of models in long.csv and hybrid.csv
    "gla": "GLA",
    "kimi_linear": "Kimi-Linear",
    "kimi_linear, MLA 128": "Kimi-Linear, heads of 128",
    "kimi_linear, MLA 128, fla's convolutions": "the same beside fla's convolutions",
    "kimi_linear, MLA 192": "Kimi-Linear, its own heads",
    "qwen3_next": "Qwen3-Next",
    "nemotron_h": "Nemotron-H",
}


def training(model, long, hybrid, short, path):
    """Draw the tokens/s of split training, in percent of data parallel's: models of GLA, then hybrids."""
    from matplotlib.figure import Figure

    split = {"zeco": 0, "split": 0, "allscan, zigzag": 0, "all_to_all": 1, "heads": 1}
    table = [row | dict(model="GLA") for row in model if row["T"] == "16384"]
    table += [row for row in long if row["percent_of_data_parallel"]]
    beside_fla = [row for row in short if "fla" in row["model"] and row["T"] == "16384"]
    table += sorted([*hybrid, *beside_fla], key=lambda row: (int(row["ranks"]), [*MODELS].index(row["model"])))
    lines = {}
    for row in table:
        if row["method"] in split:
            name = MODELS.get(row["model"], row["model"])
            line = f"{name}, {int(row['T']):,} tokens a rank, {row['ranks']} ranks"
            lines.setdefault(line, {})[split[row["method"]]] = float(row["percent_of_data_parallel"])
    figure = Figure(figsize=(10, 1.2 + 0.42 * len(lines)), layout="constrained")
    axes = figure.subplots()
    for i, label in enumerate(("All-Scan", "heads by all-to-all")):
        at = [n + 0.38 * i for n, values in enumerate(lines.values()) if i in values]
        values = [values[i] for values in lines.values() if i in values]
        bars = axes.barh(at, values, 0.36, color=("C0", "lightgray")[i], label=label)
        axes.bar_label(bars, [f"{x:.1f} %" for x in values], padding=3, fontsize="small")
    axes.set_yticks([n + 0.19 * (len(values) - 1) for n, values in enumerate(lines.values())], list(lines))
    axes.axvline(100, color="black", linewidth=0.8, zorder=0)
    axes.set(xlim=(0, 116), xlabel="tokens/s of a training step, % of data parallel with as many tokens a rank")
    axes.invert_yaxis()
    axes.grid(alpha=0.3, axis="x")
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    gpus = ", ".join(sorted({row["gpu"].removeprefix("NVIDIA ") for row in table}))
    torchs = "hybrids above 100 %: short convolutions by kernels of the package, in other bars in torch"
    figure.suptitle(f"one sequence over all ranks, {gpus}; more is better\n{torchs}", fontsize="medium")
    figure.savefig(path, dpi=120)


def prefill(table, path):
    """Draw the time to the first token over the length of the prompt, read whole, a panel per model."""
    from matplotlib.figure import Figure

    models = [*dict.fromkeys(row["model"] for row in table)]
    figure = Figure(figsize=(5 * len(models), 4.2), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models):
        for column, told, style in (("first_token_ms", "", "-"), ("graph_ms", ", as a CUDA graph", "--")):
            for i, ranks in enumerate(dict.fromkeys(row["ranks"] for row in table)):
                of = [x for x in table if (x["model"], x["ranks"], x["pieces"]) == (model, ranks, "1") and x[column]]
                places = sorted((int(x["T"]), float(x[column])) for x in of)
                label = f"{ranks} GPU{'s' * (ranks != '1')}{told}"
                axes.plot(*zip(*places), color=f"C{i}", marker="o", markersize=4, linestyle=style, label=label)
        axes.set(
            xlabel="tokens of the prompt",
            ylabel="ms to the first token",
            title={"qwen3_next": "Qwen3.5-9B's shape"}.get(model, MODELS[model]),
        )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    figure.suptitle(conditions(table, "prefill in the zigzag layout"), fontsize="medium")
    figure.savefig(path, dpi=120)


def long(table, path):
    """Draw memory over the tokens of a rank, and tokens/s over the length of the sequence, a line per model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    memory, speed = figure.subplots(1, 2)
    for i, model in enumerate(dict.fromkeys(row["model"] for row in table)):
        for axes, x, y in ((memory, "T", "peak_gib"), (speed, "sequence", "tokens_per_s_per_gpu")):
            # a time with inputs on the host is that of their allocation
            of = [row for row in table if row["model"] == model and (axes is memory or "host" not in row["method"])]
            points = {float(row[x]): float(row[y]) for row in of}
            axes.plot(*zip(*sorted(points.items())), color=f"C{i}", marker="o", label=MODELS.get(model, model))
            labels = {float(row[x]): "inputs on the host" if "host" in row["method"] else row["ranks"] for row in of}
            for place, told in labels.items():
                told = told if "host" in told else f"{told} GPU" + "s" * (told != "1")
                axes.annotate(f"{told}  ", (place, points[place]), fontsize="x-small", ha="right", va="top")
    for gigabytes in (80, 141):
        memory.axhline(gigabytes * 1e9 / 2**30, color="black", linewidth=0.8, linestyle="--")
        memory.text(1 << 16, gigabytes * 1e9 / 2**30, f"a GPU of {gigabytes} GB", fontsize="x-small", va="top")
    memory.set(xlabel="tokens a rank", ylabel="peak of a step, GiB")
    speed.set(xlabel="tokens of the sequence", ylabel="tokens/s/GPU", yscale="log")
    for axes in (memory, speed):
        axes.set_xscale("log", base=2)
        axes.margins(x=0.16)
        axes.grid(alpha=0.3)
    figure.legend(*memory.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    what = "each layer recomputed, MLPs and the loss in slices"
    gpus = ", ".join(sorted({row["gpu"].removeprefix("NVIDIA ") for row in table}))
    figure.suptitle(f"training on {gpus}s, {what}", fontsize="medium")
    figure.savefig(path, dpi=120)


def main() -> int:
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    for name, draw in (("scan", scan), ("operator", operator), ("delta", delta), ("long", long), ("prefill", prefill)):
        if not os.path.exists(results(f"{name}.csv")):
            continue
        draw(rows(results(f"{name}.csv")), results(f"{name}.png"))
        print(f"wrote {results(name)}.png")
    training(
        *(rows(results(f"{name}.csv")) for name in ("model", "long", "hybrid", "hybrid_short")), results("training.png")
    )
    print(f"wrote {results('training')}.png")
    for path in glob.glob(results("hybrid_*.json")):
        with open(path) as file:
            hybrid(json.load(file), f"{path.removesuffix('.json')}.png")
        print(f"wrote {path.removesuffix('.json')}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
