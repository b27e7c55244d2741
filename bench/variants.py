"""Compares scan kernels of several sources, or with several tile sizes, in turns, in one process group.

    git archive --prefix=old/ 1dd12ea~1 shmem_kernels | tar x -C /tmp
    python -m bench.variants now=shmem_kernels now=shmem_kernels:2048:4 before=/tmp/old/shmem_kernels:2048:4

A variant is NAME=FOLDER[:WORDS[:WARPS]]: a folder like shmem_kernels, launched by the host code of this checkout, words
of a tile (default: AllScan's choice) and warps of a program. Before timing, each must return bitwise the values that
rank 0 sends, in 60 scans of fresh values with stragglers. Times are measured as in bench.scan, on 2 ranks; the median
of 3 turns counts. Writes a file only with --csv. Without two GPUs only the values are checked, on 2 CPU ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import math
import os
import statistics
import sys
from typing import NamedTuple

import torch
import torch.distributed as dist

import allscan
from allscan.scan import launcher
from allscan.tools.ranks import Ranks
from bench.harness import WITHOUT_MULTICAST, Table, environment, group_of, state_shape, stopwatches

COLUMNS = (
    "variant",
    "bytes",
    "words",
    "warps",
    "us",
    "least_us",
    "most_us",
    "back_to_back_us",
    "gpu",
    "torch",
    "triton",
)
COLUMNS += ("sources",)
TURNS, EPOCHS = 3, 60
SPECIAL = [-0.0, float("inf"), float("-inf"), 0.0, 1e-42, -0.0, 3.0]  # first values of the sent states


class Variant(NamedTuple):
    """A variant; see the module's docstring."""

    name: str
    folder: str
    words: int | None = None
    warps: int | None = None

    @classmethod
    def of(cls, text: str) -> Variant:
        """Parse a variant from the command line. Raises ValueError."""
        name, equals, rest = text.partition("=")
        folder, *numbers = rest.split(":")
        if not equals or len(numbers) > 2 or not os.path.isfile(os.path.join(folder, "scan.py")):
            raise ValueError(f"{text!r} is not NAME=FOLDER[:WORDS[:WARPS]] with a scan.py in the folder")
        if not all(number.isdigit() for number in numbers):
            raise ValueError(f"{text!r}: words and warps must be numbers")
        return cls(name, os.path.abspath(folder), *map(int, numbers))

    def __str__(self) -> str:
        return ":".join([self.name, *(str(n) for n in self[2:] if n)])


def kernels_of(folder: str):
    """Import scan.py of a folder; the folder replaces allscan.shmem_kernels for its own imports."""
    package = f"allscan.kernels_of_{folder.encode().hex()}"
    if package not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            package, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
        )
        sys.modules[package] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return importlib.import_module(f"{package}.scan")


@contextlib.contextmanager
def launching(variant: Variant):
    """Make first launches inside the block use the variant's kernel."""
    kept = launcher.scan_kernel, launcher.Launch

    def launch(kernel, grid, **options):
        return kept[1](kernel, grid, **options | ({"num_warps": variant.warps} if variant.warps else {}))

    launcher.scan_kernel, launcher.Launch = kernels_of(variant.folder).scan_kernel, launch
    try:
        yield
    finally:
        launcher.scan_kernel, launcher.Launch = kept


class Scan:
    """A variant's scan, with its inputs."""

    def __init__(self, comm, shape, variant: Variant):
        words, V = variant.words, shape[-1]
        tile = None if words is None else (max(1, words // V), min(V, words))
        self.comm, self.variant = comm, variant
        self.scan = allscan.AllScan(comm, shape, protocol="sentinel", tile=tile)
        self.state, self.out = (torch.ones(shape, device=comm.device) for _ in range(2))
        self.decay = torch.ones(shape[:-1], device=comm.device)
        with launching(variant):
            self()

    def __call__(self):
        self.scan.scan(self.state, self.decay, out=self.out)

    def check(self, epochs: int = EPOCHS) -> None:
        """Raise AssertionError if a bit is wrong."""
        device, rank = self.comm.device, self.comm.rank
        generator = torch.Generator(device).manual_seed(1)
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        for i in range(epochs):
            draws = [torch.randn(self.state.shape, generator=generator, device=device) for _ in range(2)]
            draws[0].view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL, device=device)
            self.state.copy_(draws[rank])
            if device.type == "cuda" and i % 5 == rank:
                torch.cuda._sleep(60_000 * (1 + i % 3))
            self()
            expected = draws[0] + 0.0 if rank else torch.zeros_like(self.out)  # without a -0.0
            wrong += (self.out.view(torch.int32) != expected.view(torch.int32)).sum()
            self.out.fill_(float("nan"))
        self.comm.check()
        if wrong.item():
            raise AssertionError(f"{self.variant}: {wrong.item()} words are wrong")


def point(nbytes: int, variants: list[Variant]) -> list[dict]:
    """Return the rows of one size on the first two ranks; runs on all ranks of the job."""
    group = group_of(2)
    if dist.get_rank() >= 2:
        return []
    with allscan.Communicator(group) as comm:
        shape = state_shape(nbytes)
        scans = [Scan(comm, shape, variant) for variant in variants]
        rows = []
        for scan, variant in zip(scans, variants):
            scan.check(EPOCHS if comm.device.type == "cuda" else 3)
            rows.append(
                dict(variant=variant.name, bytes=4 * math.prod(shape), words=scan.scan.tile[0] * scan.scan.tile[1])
            )
            rows[-1] |= dict(warps=variant.warps or "", latencies=[], in_a_row=[])
        if comm.device.type == "cuda":
            latency, in_a_row = stopwatches(2)
            for turn in range(TURNS):
                for scan, row in [*zip(scans, rows)][:: 1 - turn % 2 * 2]:
                    row["latencies"].append(latency(scan).median().item())
                    row["in_a_row"].append(in_a_row(scan).median().item())
            comm.check()
        for scan in scans:
            scan.scan.close()
        return rows


def slowest(rows) -> dict:
    """Reduce the rows of both ranks to one."""
    slow = max(rows, key=lambda row: statistics.median(row["latencies"]))
    latencies = slow["latencies"]
    return slow | dict(
        us=statistics.median(latencies),
        least_us=min(latencies),
        most_us=max(latencies),
        back_to_back_us=max(statistics.median(row["in_a_row"]) for row in rows),
    )


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("variants", nargs="+", type=Variant.of, metavar="NAME=FOLDER[:WORDS[:WARPS]]")
    parser.add_argument("--mib", type=float, nargs="+", default=[0.25, 2, 8])
    parser.add_argument("--csv", default=os.devnull)
    options = parser.parse_args(arguments)
    if torch.cuda.device_count() < 2:
        print("No two GPUs here: a check of each variant on 2 CPU ranks.")
        with Ranks(2, "cpu") as ranks:
            for row in ranks.run(point, 1 << 14, options.variants)[1]:
                print(f"{row['variant']}, {row['words']} words a tile: right")
        return 0
    with (
        environment(WITHOUT_MULTICAST | {"ALLSCAN_HEAP": "2G"}),
        Ranks(2, "cuda") as ranks,
        Table(options.csv, COLUMNS) as table,
    ):
        for mib in options.mib:
            for rows in zip(*ranks.run(point, int(mib * (1 << 20)), options.variants)):
                row = slowest(rows)
                table.write(row)
                print(
                    f"{mib:6g} MiB  {row['variant']:12} {row['words']:5} words {row['warps']!s:2} "
                    f"{row['us']:7.2f} us ({row['least_us']:.2f}-{row['most_us']:.2f})  "
                    f"back to back {row['back_to_back_us']:.2f}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
