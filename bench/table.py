"""What the benchmarks share: rows of the slowest rank, written as CSV with the machine that they are of."""

from __future__ import annotations

import csv
import os

import torch
import triton

from allscan.tools.provenance import source_hash

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def results(name: str) -> str:
    """Path of a committed result."""
    return os.path.join(ROOT, "bench", "results", name)


def machine() -> dict:
    """GPU, versions, and which sources: the columns that every table ends with."""
    return dict(
        gpu=torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__,
        sources=source_hash()[:12],
    )  # fmt: skip


def quantiles(us: torch.Tensor) -> dict:
    """p20, p50 and p80 of the samples."""
    return {f"p{n}_us": us.quantile(n / 100).item() for n in (20, 50, 80)}


def slowest(rows, *most) -> dict:
    """One row from those of all ranks: the times of the slowest rank, how far the fastest is from it (skew_us), and of
    the columns ``most`` the largest."""
    row = dict(max(rows, key=lambda r: r["p50_us"]))
    row["skew_us"] = row["p50_us"] - min(r["p50_us"] for r in rows)
    for name in most:
        row[name] = max(r.get(name, 0.0) for r in rows)
    return row


class Table:
    """A CSV file that is complete after every row. Other entries of a row than ``columns`` are left out."""

    def __init__(self, path: str, columns, digits: int = 5):
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        self.path, self.columns, self.digits, self.machine = path, columns, digits, machine()

    def __enter__(self):
        self._file = open(self.path, "w", newline="")
        self._writer = csv.DictWriter(self._file, self.columns)
        self._writer.writeheader()
        return self

    def __exit__(self, *error):
        self._file.close()

    def write(self, row: dict) -> None:
        row = row | self.machine
        values = {c: row[c] for c in self.columns}
        self._writer.writerow({c: f"{x:.{self.digits}g}" if isinstance(x, float) else x for c, x in values.items()})
        self._file.flush()
