"""Tables of README.md and docs/**/*.md from bench/results/*.csv and tests/gpu/last_run.json.

Each public function returns one table in Markdown; generate.py writes it where a page names the function.
"""

from __future__ import annotations

import csv
import functools
import itertools
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@functools.cache
def _rows(name: str) -> list[dict[str, str]]:
    with open(ROOT / "bench" / "results" / f"{name}.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _matching(name: str, **wanted: object) -> list[dict[str, str]]:
    """Return the rows with these values."""
    return [row for row in _rows(name) if all(row[key] == str(value) for key, value in wanted.items())]


def _find(name: str, **wanted: object) -> dict[str, str]:
    """Return the only row with these values."""
    found = _matching(name, **wanted)
    if len(found) != 1:
        raise LookupError(f"{len(found)} rows of {name}.csv have {wanted}")
    return found[0]


def _number(text: str, digits: int) -> str:
    return f"{float(text):,.{digits}f}"


_TIMES = "p50_us", "back_to_back_us"


def _pair(row: dict[str, str]) -> str:
    """Format latency / back-to-back time, in microseconds."""
    back = row.get("back_to_back_us") or row["free_running_us"]
    return f"{_number(row['p50_us'], 1)} / {_number(back, 1)}"


def _ratio(above: dict[str, str], below: dict[str, str], column: str = "p50_us", digits: int = 3) -> str:
    return f"{float(above[column]) / float(below[column]):.{digits}f}"


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):g} MiB" if nbytes >= 1 << 18 else f"{nbytes >> 10} KiB"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _scan(method: str, ranks: int, size: int = 2 << 20) -> dict[str, str]:
    return _find("scan", method=method, ranks=ranks, bytes=size)


def numbers() -> str:
    """README.md: three measurements with their bounds."""
    long = _find("long", model="gla", method="split")
    told = f"{_number(long['sequence'], 0)} tokens on {long['ranks']} GPUs"
    rows = [
        [
            f"training GLA of {float(long['parameters']) / 1e9:.2f} billion parameters, one sequence of {told}",
            f"**{_number(long['percent_of_data_parallel'], 1)} %** of data parallel's tokens/s",
            "100 %",
        ]
    ]
    of = functools.partial(_find, "hybrid_short", model="kimi_linear, MLA 128, fla's convolutions", T=16384)
    split, alone = of(method="allscan, zigzag"), of(method="data parallel")
    in_torch = _find("hybrid", model="kimi_linear, MLA 128", method="allscan, zigzag", ranks=2)
    measured, beside_torch = (_number(x["percent_of_data_parallel"], 1) for x in (split, in_torch))
    bound = 100 * float(alone["step_ms"]) / float(split["bound_ms"])
    rows.append(
        [
            "training 12 layers of Kimi-Linear, a hybrid, one sequence of 32,768 tokens on 2 GPUs",
            f"**{measured} %** of data parallel with fla's convolutions, {beside_torch} % of it with torch's",
            f"{bound:.1f} %, computed: softmax over a sequence twice as long, with any split",
        ]
    )
    scans = _scan("sentinel", 2), _scan("peer copy", 2)
    copies = [_number(x["p50_us"], 1) for x in scans]
    rows.append(["a scan of 2 MiB over 2 GPUs, latency", f"**{copies[0]} us**", f"{copies[1]} us, a bare copy"])
    return _table(["", "measured", "bound"], rows)


def headline() -> str:
    """docs/results.md: split models against one GPU, and against the strongest alternative measured."""
    step = functools.partial(_find, "operator", gates=0, T=16384)
    both = {"pass": "forward+backward"}
    gla = {ranks: step(method="zeco", ranks=ranks, **both) for ranks in (2, 4)}
    gathered = step(method="all_gather overlapped", ranks=4, **both)
    of_kda = dict(rule="kda", T=16384, H=32, gates="near 1") | both

    def hybrid(method: str, ranks: int) -> str:
        found = _hybrids(method, ranks).items()
        gpus = {told: row["gpu"].split()[1] for told, row in found}
        return "; ".join(
            f"{_number(row['percent_of_data_parallel'], 1)} % ({told}, {gpus[told]}s)" for told, row in found
        )

    trained = {n: _find("model", method="zeco", ranks=n, T=16384) for n in (2, 4)}
    moved = _find("model", method="all_to_all", ranks=4, T=16384)
    shape = "1x16384x16x128x128"
    ours = _find("local", shape=shape, sequences="", method="zeco_gla")
    fla = _find("local", shape=shape, sequences="", method="fla chunk_gla", sources="313947c01e12")

    def over(row: dict[str, str]) -> str:
        return f"{float(row['p50_us']) / float(row['one_rank_us']):.3f}"

    alone = {
        row["method"]: row["forward_backward_us"]
        for row in _rows("local_kda")
        if row["gates"] == "weak" and row["shape"] == "1x16384x32x128x128" and row["rule"] == "kda"
    }

    def ms(us: str) -> str:
        return f"{float(us) / 1e3:.2f}"

    def kda(csv: str, method: str, ranks: int) -> str:
        row = _find(csv, method=method, ranks=ranks, **of_kda)
        return f"{ms(row['p50_us'])}; {_number(row['times_one_rank'], 3)}"

    ssd = _find("ssd_split", rule="zeco_ssd", T=16384, ranks=2, **both)
    mamba = {row["method"]: row["forward_backward_us"] for row in _matching("ssd", shape="16384x128x64x8x128")}
    of_pull = [functools.partial(_find, "scan_pull", bytes=2 << 20, ranks=n) for n in (2, 4)]
    by_hand, beside = ("; ".join(_pair(of(method=m)) for of in of_pull) for m in ("pull and fold", "sentinel"))
    rows = [
        [
            "scan of 2 MiB, us, latency / back to back",
            _pair(_scan("sentinel", 2)),
            _pair(_scan("sentinel", 4)),
            "NCCL all-gather of symmetric windows and a fused fold, 2 and 4 ranks: "
            f"{_windows(2, 2 << 20, 'fused fold')}; {_windows(4, 2 << 20, 'fused fold')}. Hand-written pull and fold, "
            f"2 and 4 ranks: {by_hand}; in those runs the scan took {beside}",
        ],
        [
            "GLA, both passes, over one GPU's time",
            over(gla[2]),
            over(gla[4]),
            f"NCCL all-gather, overlapped, 4 ranks: {over(gathered)}",
        ],
        [
            "KDA, both passes, ms; over the same kernels' time on one GPU",
            *(kda("delta_allscan", "zeco", n) for n in (2, 4)),
            "fla's context parallelism, 2 and 4 ranks: "
            + " and ".join(kda("delta", "fla cp_context", n) for n in (2, 4)),
        ],
        [
            "Mamba2 (128 heads of 64, 8 groups), both passes, ms; over the same kernels' time on one GPU",
            f"{ms(ssd['p50_us'])}; {_number(ssd['over_one_rank'], 3)}",
            "",
            f"on one GPU `mamba_ssm`: {ms(mamba['mamba_ssm'])}, `zeco_ssd`: {ms(mamba['zeco_ssd'])}",
        ],
        [
            "GLA training, tokens/s, % of data parallel",
            f"{_number(trained[2]['percent_of_data_parallel'], 1)} %",
            f"{_number(trained[4]['percent_of_data_parallel'], 1)} %",
            f"heads by all-to-all, 4 ranks: {_number(moved['percent_of_data_parallel'], 1)} %",
        ],
        [
            "hybrid training (12 layers, 0.7 to 2.5 billion parameters), tokens/s, % of data parallel",
            hybrid("allscan, zigzag", 2),
            hybrid("allscan, zigzag", 4),
            f"heads by all-to-all, 2 ranks: {hybrid('heads', 2)}; 4 ranks: {hybrid('heads', 4)}",
        ],
        [
            "GLA (16 heads), KDA (32 heads), decays near 1, on one GPU, both passes, ms",
            f"1 GPU: {ms(ours['forward_backward_us'])}; {ms(alone['zeco_kda, chunk=allscan'])}",
            "",
            f"fla's `chunk_gla`: {ms(fla['forward_backward_us'])}; `chunk_kda`: {ms(alone['fla chunk_kda'])}, "
            f"with `safe_gate` {ms(alone['fla chunk_kda, safe_gate'])}",
        ],
    ]
    return _table(["", "2 ranks", "4 ranks", "alternative"], rows)


def scan() -> str:
    """docs/results.md: the scan against other methods, H200s."""
    methods = ["sentinel", "peer copy", "all_gather (no fold)", "all_gather (fused fold)", "all_gather", "ring"]
    names = ["All-Scan", "bare copy to a neighbour, latency", "NCCL all-gather alone"]
    names += ["and its fold, fused", "and its fold, by operators", "NCCL ring"]
    rows = []
    for ranks in (2, 4):
        found = [_scan(method, ranks) for method in methods]
        rows.append([str(ranks), *(_pair(x) for x in found)])
        rows[-1][2] = _number(found[1]["p50_us"], 1)
    return _table(["ranks", *names], rows)


_OPERATOR = "zeco", "all_gather", "all_gather overlapped", "ring", "all_to_all"


def _operator(name: str) -> str:
    rows = []
    kinds = {(x["gates"], x["pass"], int(x["ranks"])): None for x in _rows(name) if x["T"] == "16384"}
    for gates, both, ranks in sorted(kinds, key=lambda kind: (kind[0] != "0", kind)):
        where = {"gates": gates, "pass": both, "ranks": ranks, "T": 16384}
        zeco, *others = (_find(name, method=method, **where) for method in _OPERATOR)
        one = zeco["one_rank_us"]
        over = f"{float(zeco['p50_us']) / float(one):.3f}"
        times = [_number(x["p50_us"], 0) for x in others]
        told = both.replace("+", " + ")
        rows.append([gates, told, str(ranks), _number(one, 0), f"**{_number(zeco['p50_us'], 0)}**", over, *times])
    head = ["gates", "pass", "ranks", "1 rank", "**ZeCO**", "over 1 rank", "all-gather (LASP-2)", "overlapped"]
    return _table([*head, "ring (LASP-1)", "all-to-all"], rows)


def operator() -> str:
    """docs/results.md: zeco_gla against the same local kernels with other communication, H200s."""
    return _operator("operator")


def operator_h100() -> str:
    """docs/results.md: the table of ``operator`` on 2 H100s."""
    return _operator("operator_h100")


def training() -> str:
    """docs/results.md: a GLA model."""
    rows = []
    for ranks in (2, 4):
        ideal, *found = (_find("model", method=x, ranks=ranks, T=16384) for x in ("data parallel", *_OPERATOR))
        speeds = [_number(x["tokens_per_s_per_gpu"], 0) for x in (ideal, *found)]
        told = [f"{s} ({_number(x['percent_of_data_parallel'], 1)} %)" for s, x in zip(speeds[1:], found, strict=True)]
        rows.append([str(ranks), speeds[0], f"**{told[0]}**", *told[1:]])
    head = ["ranks", "data parallel", "**ZeCO**", "all-gather (LASP-2)", "overlapped", "ring (LASP-1)", "all-to-all"]
    return _table(head, rows)


def hybrid() -> str:
    """docs/results.md: transformers' hybrids on 2 ranks."""
    return _hybrid(2)


def hybrid_4() -> str:
    """docs/results.md: the same on 4 ranks."""
    return _hybrid(4)


def _hybrid(ranks: int) -> str:
    """A row per model: tokens/s/GPU and, of the methods that split a sequence, percentages of data parallel's and of
    the bound's, where that was measured."""
    found = {method: _hybrids(method, ranks) for method in ("data parallel", "allscan, zigzag", "allscan", "heads")}
    rows = []
    for model in found["data parallel"]:
        cells = [model]
        for method, of_models in found.items():
            row = of_models.get(model)
            if row is None:
                cells.append("not measured")
                continue
            speed, percent = (
                _number(row[x], n) for x, n in (("tokens_per_s_per_gpu", 0), ("percent_of_data_parallel", 1))
            )
            of_bound = row["percent_of_bound"] and f"; {_number(row['percent_of_bound'], 1)} %"
            told = speed if method == "data parallel" else f"{speed} ({percent} %{of_bound})"
            cells.append(f"**{told}**" if method == "allscan, zigzag" else told)
        rows.append(cells)
    return _table(["", "data parallel", "**zigzag**", "consecutive parts", "heads by all-to-all"], rows)


def hybrid_short() -> str:
    """docs/results.md: the hybrids with few tokens a rank, in zigzag."""
    rows = []
    for row in _rows("hybrid_short"):
        if row["method"] == "allscan, zigzag":
            keys = {"model": row["model"], "T": row["T"]}
            cells = [row["model"], _number(row["T"], 0)]
            for some in row, _find("hybrid_short", method="data parallel", **keys):
                cells.append(f"{_number(some['step_ms'], 1)} ({_number(some['in_a_row_ms'], 1)})")
            cells.append(f"{_number(row['percent_of_data_parallel'], 1)} ({_number(row['percent_in_a_row'], 1)})")
            rows.append(cells)
    head = ["model", "tokens a rank", "zigzag, ms (in a row)", "data parallel, ms (in a row)", "of data parallel, %"]
    return _table(head, rows)


def long() -> str:
    """docs/long_sequences.md: training with each layer recomputed, MLP and loss in slices."""
    rows = []
    for row in _rows("long"):
        told = (
            f"one sequence of {_number(row['sequence'], 0)} tokens" if "split" in row["method"] else "a sequence a rank"
        )
        told += "".join(row["method"].partition(",")[1:])
        percent = row["percent_of_data_parallel"] and f"{_number(row['percent_of_data_parallel'], 1)} %"
        numbers = [_number(row[key], digits) for key, digits in (("step_s", 2), ("tokens_per_s_per_gpu", 0))]
        numbers += [percent, _number(row["peak_gib"], 0), _number(row["mfu_percent"], 1)]
        if row["softmax_s"]:
            rest = 100 - 100 * float(row["softmax_s"]) / float(row["step_s"])
            numbers += [_number(row["softmax_tflops"], 0), f"{rest:.1f} %"]
        rows.append([row["model"], row["ranks"], _number(row["T"], 0), told, *numbers])
    head = ["model", "GPUs", "tokens a rank", "", "s a step", "tokens/s/GPU", "of data parallel", "peak GiB", "MFU, %"]
    head += ["softmax, TFLOP/s", "all else, of the step"]
    return _table(head, [[*row, *[""] * (len(head) - len(row))] for row in rows])


def prefill() -> str:
    """docs/serving.md: time to the first token of a long prompt."""
    rows = []
    for row in _rows("prefill"):
        times = [
            f"{_number(row[took], 0)}{row[over] and f' ({_number(row[over], 2)})'}" if row[took] else ""
            for took, over in (("first_token_ms", "times_one_gpu"), ("graph_ms", "graph_times_one_gpu"))
        ]
        parts = [_number(row[f"{part}_ms"], 0) for part in ("softmax", "recurrent", "other", "host")]
        rows.append([row["model"], _number(row["T"], 0), row["pieces"], row["ranks"], *times, *parts])
        rows[-1].append(_number(row["peak_gib"], 0))
    head = ["model", "tokens", "pieces", "GPUs", "first token, ms (times one GPU's speed)", "as a CUDA graph"]
    return _table([*head, "softmax", "recurrences", "other kernels", "host", "GiB"], rows)


def loss() -> str:
    """docs/long_sequences.md: a language model's head and loss."""
    rows = []
    for row in _rows("loss"):
        numbers = [_number(row[key], digits) for key, digits in (("ms", 1), ("percent_of_whole", 0), ("extra_gib", 2))]
        rows.append([row["method"], row["weight"], _number(row["tokens"], 0), *numbers])
    return _table(["", "weight", "tokens", "ms", "of torch's whole loss, a token, %", "more memory, GiB"], rows)


def megatron() -> str:
    """docs/integrations/megatron.md: Megatron's hybrids, measured by bench.megatron."""
    if not (ROOT / "bench" / "results" / "megatron.csv").exists():
        return "`python -m bench.megatron` writes a csv; none is in bench/results yet.\n"
    names = {
        "data parallel": "data parallel, a sequence as long as a rank's part on each",
        "allscan, zigzag": "**`integrations.megatron`, zigzag**",
        "allscan": "the same, contiguous",
        "all-to-all": "Megatron's own: all-to-all",
    }
    patterns = list(dict.fromkeys(row["pattern"] for row in _rows("megatron")))
    rows = []
    for method, told in names.items():
        rows.append([told])
        for pattern in patterns:
            row = _find("megatron", pattern=pattern, method=method)
            rows[-1].append(f"{_number(row['step_ms'], 1)} ({_number(row['percent_of_data_parallel'], 1)} %)")
    rows.append(["stand-ins"])
    for pattern in patterns:
        rows[-1].append(_find("megatron", pattern=pattern, method="allscan")["stand_ins"])
    row = _rows("megatron")[0]
    head = f"ms of a training step, {row['ranks']} x {row['gpu']}, {int(row['T']):,} tokens a rank"
    return _table([head, *(f"`{pattern}`" for pattern in patterns)], rows)


HYBRIDS = {
    "kimi_linear, MLA 128": "heads of 128",
    "kimi_linear, MLA 192": "Kimi's own, 192 / 128",
    "qwen3_next": "Qwen3-Next",
    "nemotron_h": "Nemotron-H",
}


def _hybrids(method: str, ranks: int) -> dict[str, dict[str, str]]:
    """Return the rows of the measured models, by the model's name in the text."""
    return {
        told: _find("hybrid", model=model, method=method, ranks=ranks)
        for model, told in HYBRIDS.items()
        if _matching("hybrid", model=model, method=method, ranks=ranks)
    }


def zigzag() -> str:
    """docs/api/zigzag.md: zeco_gla in both layouts, 2 H100s."""
    names = {"zeco": "rank order", "zeco, zigzag": "zigzag", "zeco, tokens moved": "zigzag, tokens moved and back"}
    rows = []
    for gates in ("0", "near 1"):
        for both in ("forward", "forward+backward"):
            found = [_find("operator_h100", method=x, gates=gates, T=16384, **{"pass": both}) for x in names]
            cells = [f"{_number(x['p50_us'], 0)} ({float(x['p50_us']) / float(x['one_rank_us']):.3f})" for x in found]
            rows.append([gates, both.replace("+", " + "), *cells])
    return _table(["gates", "pass", *names.values()], rows)


def worth() -> str:
    """docs/worth_it.md: time that the split adds to both passes of zeco_gla on one rank, us."""
    rows = []
    for ranks in (2, 4):
        where = {"gates": 0, "pass": "forward+backward", "T": 16384, "ranks": ranks}
        found = [_find("operator", method=x, **where) for x in _OPERATOR]
        one = float(found[0]["one_rank_us"])
        rows.append([str(ranks), f"{one:,.0f}", *(f"{float(x['p50_us']) - one:+,.0f}" for x in found)])
    return _table(["ranks", "one rank", "ZeCO", "all-gather", "overlapped", "ring", "all-to-all"], rows)


def worth_kda() -> str:
    """docs/worth_it.md: time that the split adds to fla's chunk_kda on one rank, by tokens, eager."""
    rows = []
    for tokens in (2048, 4096, 16384):
        row = [f"{tokens:,}"]
        for both in ("forward", "forward+backward"):
            where = {"rule": "kda", "T": tokens, "H": 32, "gates": "near 1", "ranks": 2, "pass": both}
            found = (_find("delta", method=method, **where) for method in ("zeco", "fla cp_context"))
            row += [_number(method["times_one_rank"], 3) for method in found]
        rows.append(row)
    head = ["T a rank", "forward, All-Scan", "fla's `cp_context`", "both passes, All-Scan", "fla's `cp_context`"]
    return _table(head, rows)


def memory() -> str:
    """docs/memory.md: peak memory without the inputs, both passes, one GPU or a rank of 2."""
    rows = []
    for method in ("zeco_gla", "zeco_gla, recompute=False", "fla chunk_gla"):
        of_run = {} if method.startswith("zeco") else dict(sources="c2ee9aef2fcb")
        row = _find("local", shape="1x16384x16x128x128", sequences="", method=method, **of_run)
        rows.append([method, "16 heads of 128 x 128", _number(row["extra_mib"], 0)])
    ours = _find("local_kda", shape="1x16384x32x128x128", gates="weak", method="zeco_kda, chunk=allscan")
    rows.append(["zeco_kda", "32 heads of 128 x 128", _number(ours["extra_mib"], 0)])
    for method, told in (("zeco", 'zeco_kda(chunk="fla"), 2 ranks'), ("fla, one rank", "fla chunk_kda")):
        at = dict(rule="kda", T=16384, H=32, gates="near 1", ranks=2)
        row = _find("delta", method=method, **at, **{"pass": "forward+backward"})
        rows.append([told, "32 heads of 128 x 128", _number(row["extra_mib"], 0)])
    return _table(["16,384 tokens a rank, bfloat16", "", "peak beside inputs, MiB"], rows)


def _windows(ranks: int, size: int, fold: str) -> str:
    """Format the all-gather of symmetric windows: the least of all numbers of programs, for each of both times."""
    names = (f"windows ({fold}){programs}" for programs in ("", ", 16 programs", ", 32 programs", ", 64 programs"))
    found = [_find("scan", method=name, ranks=ranks, bytes=size) for name in names]
    return " / ".join(_number(str(min(float(row[x]) for row in found)), 1) for x in _TIMES)


def alternatives() -> str:
    """docs/results.md: the scan against NCCL's symmetric windows, H200s."""
    rows = []
    for ranks, size in itertools.product((2, 4), (1 << 18, 2 << 20, 8 << 20, 32 << 20)):
        ours, copy = (_pair(_scan(method, ranks, size)) for method in ("sentinel", "peer copy"))
        windows = (_windows(ranks, size, fold) for fold in ("fused fold", "no fold"))
        rows.append([str(ranks), _size(size), f"**{ours}**", copy, *windows])
    head = ["ranks", "state", "All-Scan", "bare copy", "symmetric windows and a fused fold", "without fold"]
    return _table(head, rows)


def pull() -> str:
    """docs/results.md: the scan against a pull written by hand, H200s."""
    rows = []
    for ranks, kibs in ((2, (64, 256, 512, 1024, 2048, 4096, 8192, 32768)), (4, (256, 2048, 8192))):
        for kib in kibs:
            of_size = functools.partial(_find, "scan_pull", ranks=ranks, bytes=kib << 10)
            methods = "sentinel", "sentinel (whole GPU)", "pull and fold", "peer copy"
            ours, whole, by_hand, copy = (of_size(method=method) for method in methods)
            times = map(_pair, (ours, whole, by_hand, copy))
            ratios = (_ratio(by_hand, ours, x, 2) for x in _TIMES)
            rows.append([str(ranks), _size(kib << 10), *times, *ratios])
    head = ["ranks", "state", "All-Scan", "on every multiprocessor", "pull and fold", "bare copy"]
    return _table([*head, "ratio, latency", "back to back"], rows)


_BOTH = "forward+backward"
_HOST = {
    "AllScan.scan(out=)": "`AllScan.scan(out=)`",
    "allscan, no gradients": "`allscan()`",
    "allscan, forward with gradients": "with gradients, forward",
    "allscan, async_op": "with `async_op`",
    "halo": "`halo`",
    f"autograd.Function of nothing, {_BOTH}": "an autograd.Function that launches nothing, with its backward",
    "zeco_gla, forward": "`zeco_gla`, forward",
    f"zeco_gla, {_BOTH}, a layer of 8": "both passes, one of eight calls, each with the last one's output as v",
    f"zeco_gla, {_BOTH}": "both passes, a single call",
    f"zeco_gla, {_BOTH}, one thread": "the same with torch's backward in the caller's thread",
    f"zeco_gla in zigzag, {_BOTH}": "a single call in the zigzag layout",
    "zeco_kda, forward": "`zeco_kda`, forward",
    f"zeco_kda, {_BOTH}": "both passes, a single call",
    f"zeco_kda in zigzag, {_BOTH}": "the same in the zigzag layout",
    "fla chunk_gla, forward": "fla's `chunk_gla` on one rank, forward",
    f"fla chunk_gla, {_BOTH}, a layer of 8": "both passes, one of eight calls",
    f"fla chunk_gla, {_BOTH}": "both passes, a single call",
    "fla chunk_kda, forward": "fla's `chunk_kda` on one rank, forward",
    f"fla chunk_kda, {_BOTH}": "both passes, a single call",
}
_HOST_TOKENS = 512, 2048, 16384


def host() -> str:
    """docs/results.md: host time of a call over that of NCCL's all-gather."""

    def cell(csv: str, method: str) -> str:
        found = [row for row in _matching(csv, method=method) if not row["T"] or int(row["T"]) in _HOST_TOKENS]
        return ", ".join(_number(row["over_nccl"], 1 if row["T"] else 2) for row in found)

    rows = [[told, *(cell(csv, method) for csv in ("host", "host_h100"))] for method, told in _HOST.items()]
    return _table(["", "2 H200s", "2 H100s"], rows)


def host_ratios() -> str:
    """docs/results.md: operators from Python against fla's and against a CUDA graph, 2 H200s."""

    def row(told: str, column: str, above: str, below: str, digits: int = 2) -> list[str]:
        pairs = [(_find("host", method=above, T=T), _find("host", method=below, T=T)) for T in _HOST_TOKENS]
        return [told, *(_ratio(a, b, column, digits) for a, b in pairs)]

    kda, gla = (f"zeco_{rule}, {_BOTH}" for rule in ("kda", "gla"))
    rows = [
        row("`zeco_kda` to `chunk_kda`, host, forward", "host_us", "zeco_kda, forward", "fla chunk_kda, forward"),
        row("`zeco_kda` to `chunk_kda`, host, both passes", "host_us", kda, f"fla chunk_kda, {_BOTH}"),
        row("the same until the end on the GPU", "total_us", kda, f"fla chunk_kda, {_BOTH}"),
        row("`zeco_gla` to `chunk_gla`, until the end on the GPU", "total_us", gla, f"fla chunk_gla, {_BOTH}"),
        row("`zeco_gla` to the caller's CUDA graph of it, likewise", "total_us", gla, f"{gla}, CUDA graph"),
        row("in the zigzag layout to consecutive tokens, `zeco_gla`", "total_us", f"zeco_gla in zigzag, {_BOTH}", gla),
        row("in the zigzag layout to consecutive tokens, `zeco_kda`", "total_us", f"zeco_kda in zigzag, {_BOTH}", kda),
    ]
    return _table(["", *(f"{T:,} tokens" for T in _HOST_TOKENS)], rows)


_RULES = {"kda": "KDA", "gated_delta_rule": "Gated DeltaNet"}


def invariant_delta() -> str:
    """docs/invariant.md: delta rules with ``invariant`` over the same call without it, 2 H200s, eager."""
    rows = []
    for rule, told in _RULES.items():
        cells = [told]
        for which, S in itertools.product(("forward", "forward+backward"), (2048, 1024)):
            found = functools.partial(_find, "delta_allscan", rule=rule, ranks=2, **{"pass": which})
            cells.append(_ratio(found(method=f"zeco, invariant {S}"), found(method="zeco")))
        rows.append(cells)
    return _table(["", "forward, 2,048", "1,024", "both passes, 2,048", "1,024"], rows)


def dense() -> str:
    """docs/results.md: transitions on 4 ranks, latency."""
    rows = []
    for heads, K, V in ((32, 128, 128), (32, 64, 64), (6, 256, 512)):
        cells = [f"{heads}, {K}, {V}"]
        for method in ("All-Scan", "all_gather alone", "all_gather and fla's merge"):
            found = _matching("transitions", method=method, ranks=4, heads=heads, K=K, V=V)
            cells.append(_number(found[0]["p50_us"], 1) if found else "not measured")
        rows.append(cells)
    return _table(["heads, K, V", "All-Scan", "NCCL all-gather alone", "and fla's merge"], rows)


_DELTA = {
    "fla, one rank": "fla's operator, one rank",
    "zeco, one rank": "ours, one rank",
    "zeco": "**ours, 2 ranks**",
    "zeco, middle rank's work": "the same where both ranks do a middle rank's work",
    "zeco, zigzag": "the same in the zigzag layout",
    "zeco, tokens moved": "tokens moved from zigzag to rank order and back",
    "fla cp_context": "fla's `cp_context`",
    "fla cp_context, All-Scan": "fla's `cp_context` with `fla_cp`",
}


_LENGTHS = (16384, 32), (16384, 8), (4096, 32)


def _delta(rule: str, methods: dict[str, str] = _DELTA, sizes=_LENGTHS, csv="delta") -> str:
    rows = []
    for tokens, heads in sizes:
        for method, told in methods.items():
            cells: list[str] = []
            for both in ("forward", "forward+backward"):
                wanted = dict(rule=rule, T=tokens, H=heads, gates="near 1", method=method, ranks=2) | {"pass": both}
                found = _matching(csv, **wanted)
                one = found and (_number(found[0]["p50_us"], 0), _number(found[0]["times_one_rank"], 3))
                cells += one or ("", "")
            if any(cells):
                rows.append([f"{tokens:,}, {heads}", told, *cells])
    return _table(["T, heads", "", "forward, us", "over one rank", "both passes, us", "over one rank"], rows)


def local_kda() -> str:
    """docs/delta_kernels.md: KDA on one GPU, allscan's chunk kernels against fla's."""
    names = {
        "zeco_kda, chunk=allscan": "**`zeco_kda`**",
        "zeco_kda, recompute=False": "the same, `recompute=False`",
        "zeco_kda, chunk=fla": '`zeco_kda(chunk="fla")`',
        "fla chunk_kda": "fla 0.6.0's `chunk_kda`",
        "fla chunk_kda, safe_gate": "the same, `safe_gate`",
        "fla chunk_kda, disable_recompute": "the same, `disable_recompute`",
        "attn_gym chunk_kda": "attn_gym 0.0.17's `chunk_kda`",
    }
    rows = []
    for method, told in names.items():
        row = [told]
        for gates in ("weak", "mild", "strong"):
            for found in _matching("local_kda", shape="1x16384x32x128x128", method=method, gates=gates):
                row.append(" / ".join(f"{float(found[x]) / 1e3:.2f}" for x in ("forward_us", "forward_backward_us")))
        row += [""] * (4 - len(row))
        rows.append(row)
    return _table(["forward / both passes", "weak", "mild", "strong"], rows)


def local_kda_shapes(run: str = "local_kda") -> str:
    """docs/delta_kernels.md: delta rules by shape, allscan's kernels and fla's operators; ``run``: the file's name."""
    rows, passes = [], ("forward_us", "forward_backward_us")
    for row in _rows(run):
        if not row["method"].endswith("chunk=allscan"):
            continue
        shape, _, packed = row["shape"].partition(", ")
        _, T, H, _, V = shape.split("x")
        cells = [f"{float(row[x]) / 1e3:.2f}" for x in passes]
        same = {name: row[name] for name in ("shape", "rule", "gates")}
        for found in _matching(run, method=_FLA_OPERATORS[row["rule"]], **same):
            cells += [
                f"{float(found[x]) / 1e3:.2f} ({float(found[x]) / float(row[x]):.2f})" for x in passes if found[x]
            ]
        cells += [""] * (4 - len(cells))
        rows.append(
            [_RULES[row["rule"]], f"{int(T):,}, {H}, {V}", ", ".join([row["gates"], *filter(None, [packed])]), *cells]
        )
    head = ["", "T, heads, V", "gates", "ours, forward, ms", "both passes", "fla, forward (times ours)", "both passes"]
    return _table(head, rows)


def local_kda_shapes_h100() -> str:
    """docs/delta_kernels.md: the same on an H100, earlier kernels."""
    return local_kda_shapes("local_kda_h100")


_FLA_OPERATORS = {"kda": "fla chunk_kda", "gated_delta_rule": "fla chunk_gated_delta_rule"}


def delta_allscan() -> str:
    """docs/delta.md: both rules with allscan's chunk kernels, eager and as a CUDA graph."""
    names = {
        ("zeco, one rank", 2): "one rank",
        ("zeco", 2): "**2 ranks**",
        ("zeco, middle rank's work", 2): _DELTA["zeco, middle rank's work"],
        ("zeco, zigzag", 2): _DELTA["zeco, zigzag"],
        ("zeco, invariant 2048", 2): "`invariant=2048`",
        ("zeco, invariant 1024", 2): "`invariant=1024`",
        ("zeco", 4): "**4 ranks**",
        ("zeco, zigzag", 4): _DELTA["zeco, zigzag"],
    }
    rows = []
    for rule, (method, ranks) in itertools.product(_RULES, names):
        cells: list[str] = []
        for passes in ("forward", "forward+backward"):
            at = dict(rule=rule, T=16384, H=32, gates="near 1", ranks=ranks) | {"pass": passes}
            row, one = (_find("delta_allscan", method=name, **at) for name in (method, "zeco, one rank"))
            graphs = float(row["graph_us"]) / float(one["graph_us"])
            cells += [_number(row["p50_us"], 0), _number(row["times_one_rank"], 3)]
            cells += [_number(row["graph_us"], 0), f"{graphs:.3f}"]
        rows.append([_RULES[rule], names[method, ranks], *cells])
    part = ["over one rank", "graph, us", "over one rank"]
    return _table(["", "", "forward, us", *part, "both passes, us", *part], rows)


def kda() -> str:
    """docs/delta.md."""
    return _delta("kda")


def gated_delta_rule() -> str:
    """docs/delta.md."""
    return _delta("gated_delta_rule")


def _delta_cp(rule: str, csv: str = "delta") -> str:
    methods = {name: _DELTA[name] for name in ("fla, one rank", "fla cp_context", "fla cp_context, All-Scan", "zeco")}
    return _delta(rule, methods, _LENGTHS[:2], csv)


def kda_cp() -> str:
    """docs/integrations/fla_cp.md."""
    return _delta_cp("kda")


def gated_delta_rule_cp() -> str:
    """docs/integrations/fla_cp.md."""
    return _delta_cp("gated_delta_rule")


def fla_cp() -> str:
    """docs/integrations/fla_cp.md: rules that only fla has."""
    names = {"gdn2": "Gated DeltaNet 2", "gated_delta_product": "Gated delta product, two Householder steps a token"}
    names |= {"dplr": "DPLR", "rwkv7": "RWKV-7"}
    measured = {row["rule"] for row in _rows("delta_fla")}
    return "\n".join(f"{name}:\n\n{_delta_cp(rule, 'delta_fla')}" for rule, name in names.items() if rule in measured)


def _chain(kind: str, size: int, ranks: int) -> dict[str, str]:
    return _find("chain", kind=kind, bytes=size, ranks=ranks)


def chain() -> str:
    """docs/results.md: virtual ranks on two GPUs, each hop over their link."""
    rows = []
    for size in (1 << 16, 1 << 18, 1 << 19, 1 << 20, 2 << 20):
        times = {ranks: float(_chain("chain", size, ranks)["p50_us"]) for ranks in (2, 3, 4, 5, 8, 9)}
        rows.append([_size(size), *(f"{us:.1f}" for us in times.values()), f"**{times[3] - times[2]:.2f}**"])
    return _table(["state", *(f"{ranks} ranks" for ranks in (2, 3, 4, 5, 8, 9)), "a further hop"], rows)


def hop() -> str:
    """docs/results.md: times of the parts of a hop, by clocks in the kernel."""
    parts = [row for row in _rows("chain") if row["kind"].startswith("hop: ")]
    sizes = {int(row["bytes"]): _size(int(row["bytes"])) for row in parts}
    kinds = dict.fromkeys(row["kind"] for row in parts)
    rows = []
    for kind in kinds:
        found = [_chain(kind, size, 3) for size in sizes]
        times = [_number(row["p50_us"], 2) + (f" ± {row['error_us'][:4]}" * (row["error_us"] != "0")) for row in found]
        rows.append([kind.removeprefix("hop: "), *times])
    return _table(["", *sizes.values()], rows)


def invariant() -> str:
    """docs/invariant.md: zeco_gla with segments against without."""
    rows = []
    for name in ("zeco", "zeco, invariant 2048", "zeco, invariant 1024"):
        both = [_find("operator_invariant", method=name, **{"pass": one}) for one in ("forward", "forward+backward")]
        plain = [_find("operator_invariant", method="zeco", **{"pass": row["pass"]}) for row in both]
        cells = [(_number(a["p50_us"], 0), _ratio(a, b)) for a, b in zip(both, plain, strict=True)]
        rows.append([name.removeprefix("zeco, "), *(cell for pair in cells for cell in pair)])
    return _table(["", "forward, us", "of without", "both passes, us", "of without"], rows)


def segments() -> str:
    """docs/invariant.md: scans over segments and of one state, latency / back to back, and over that of one state."""
    scan, *others = rows = _rows("segments")
    ratios = [" / ".join(_ratio(row, scan, x, 2) for x in _TIMES) for row in rows]
    head = ["", "`AllScan.scan` of one state"]
    for row in others:
        head.append(f"{row['segments']} segment" + "s" * (row["segments"] != "1"))
    return _table(head, [["us", *map(_pair, rows)], ["over one state", *ratios]])


def last_run() -> str:
    """docs/status.md: tests/gpu/last_run.json."""
    run = json.loads((ROOT / "tests" / "gpu" / "last_run.json").read_text(encoding="utf-8"))
    failed = [f"`{x.removeprefix('tests/gpu/')}`" for x in run["tests_that_failed"]]
    counts = [str(run[name]) for name in ("passed", "failed", "error", "skipped")]
    gpus = f"{len(run['gpus'])} x {run['gpus'][0]}"
    head = ["GPUs", "date", "sources", "passed", "failed", "errors", "skipped", "which failed"]
    return _table(head, [[gpus, run["date"], run["sha256"][:12], *counts, ", ".join(failed) or "none"]])
