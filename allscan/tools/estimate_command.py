"""The command ``allscan estimate``: parses its arguments and prints its report."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from ..base.tiling import H100_MULTIPROCESSORS
from .estimate import Cut, layers_of, report

USAGE = """usage: allscan estimate CONFIG --tokens T --ranks P [--step]
                        [--batch B] [--layout zigzag] [--depth 3] [--puts]

CONFIG: config.json of a model of transformers (Kimi-Linear, Qwen3-Next, Qwen3.5) or of flash-linear-attention (GLA,
KDA, Gated DeltaNet). T: tokens of the whole sequence, a multiple of P (with zigzag of 2 P). bfloat16, gates
float32. --step: also the memory of a training step of the whole model, one of transformers', which it needs."""


def main(arguments: Sequence[str]) -> int:
    """Print the report; returns the exit status."""
    parser = argparse.ArgumentParser(prog="allscan estimate", usage=USAGE.removeprefix("usage: "))
    parser.add_argument("config")
    parser.add_argument("--layout", choices=["contiguous", "zigzag"], default="contiguous")
    for name in ("--puts", "--step"):
        parser.add_argument(name, action="store_true")
    for name, default in (("tokens", None), ("ranks", None), ("batch", 1), ("depth", 3)):
        parser.add_argument(f"--{name}", type=int, default=default, required=default is None)
    parser.add_argument("--multiprocessors", type=int, default=H100_MULTIPROCESSORS)
    options = parser.parse_args(arguments)
    cut = Cut(options.tokens, options.ranks, options.batch, options.layout == "zigzag", options.depth, options.puts)
    cut = cut._replace(multiprocessors=options.multiprocessors)
    try:
        with open(options.config, encoding="utf-8") as file:
            config = json.load(file)
        lines = [report(layers_of(config), cut)]
        if options.step:
            from .estimate_step import report_of_step  # needs transformers

            lines.append(report_of_step(config, cut))
    except (ImportError, OSError, RecursionError, ValueError) as error:
        print("allscan estimate:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    print(*lines, sep="\n")
    return 0
