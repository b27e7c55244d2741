"""Tables of measurements (bench.harness.Table)."""

from __future__ import annotations

import csv

import pytest

from bench import harness
from bench.harness import Table

pytestmark = pytest.mark.cpu


def rows_of(path):
    with open(path, newline="") as file:
        return [(row["model"], row["ms"]) for row in csv.DictReader(file)]


def write(path, columns, rows, **options):
    with Table(path, columns, **options) as table:
        for model, ms in rows:
            table.write(dict(model=model, ms=ms))


def test_rows_of_an_earlier_run(tmp_path, monkeypatch):
    """Rows stay only if ``keep`` says so and the columns are the same."""
    monkeypatch.setattr(harness, "machine", lambda: dict(gpu="none"))
    path = str(tmp_path / "table.csv")
    write(path, ("model", "ms"), [("a", 1.0), ("b", 2.0)])
    write(path, ("model", "ms"), [("b", 3.0)], keep=lambda row: row["model"] != "b")
    assert rows_of(path) == [("a", "1"), ("b", "3")]
    write(path, ("model", "ms", "gpu"), [("c", 4.0)], keep=lambda row: True)
    assert rows_of(path) == [("c", "4")]
    write(path, ("model", "ms", "gpu"), [("d", 5.0)])
    assert rows_of(path) == [("d", "5")]
