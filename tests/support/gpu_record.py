"""What the GPU tests gave: each result as it comes, so that a run that was cut can go on, and a record of whole parts.

``tests/gpu/results.jsonl``, which git does not keep: first what the results are of (GPUs, versions, sources, tests),
then [test, outcome], and [None, part] for a part of the suite of which all have run. ``tests/gpu/last_run.json``, which
it keeps: how many passed, which failed, of which parts.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time

import torch

PARTS = {"not alone", "alone"}  # of the tests, as make test-gpu has them; or "all"
OUTCOMES = "passed", "failed", "error", "skipped"


def what_runs(tests: str) -> dict:
    """What results are of; ``tests``: the folder."""
    import triton

    from allscan.tools.provenance import nvshmem_version, source_hash

    digest = hashlib.sha256()
    for folder, folders, names in sorted(os.walk(tests)):
        folders.sort()
        for name in sorted(name for name in names if name.endswith(".py")):
            with open(os.path.join(folder, name), "rb") as file:
                digest.update(file.read())
    return {
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "nvshmem": nvshmem_version(),
        },
        "sha256": source_hash(),
        "tests": digest.hexdigest(),
    }


def read(folder: str) -> tuple[dict, dict[str, str], list[str]]:
    """(what the results in tests/gpu, ``folder``, are of, the outcome of each test, whole parts)."""
    of, outcomes, parts = {}, {}, []
    try:
        with open(os.path.join(folder, "results.jsonl")) as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        return of, outcomes, parts
    for text in lines:
        try:
            line = json.loads(text)
        except ValueError:  # a run was cut here
            continue
        if isinstance(line, dict):
            of = line
        elif line[0] is None:
            parts.append(line[1])
        else:
            outcomes[line[0]] = line[1]
    return of, outcomes, parts


class Record:
    """Of the tests in ``folder`` (tests/gpu), which are of ``of``: results of anything else are thrown away."""

    def __init__(self, folder: str, of: dict) -> None:
        self._folder, self._of = folder, of
        same = read(folder)[0] == of
        with open(os.path.join(folder, "results.jsonl"), "a" if same else "w") as file:
            file.write("\n" if same else json.dumps(of) + "\n")

    def add(self, test: str | None, what: str) -> None:
        with open(os.path.join(self._folder, "results.jsonl"), "a") as file:
            file.write(json.dumps([test, what]) + "\n")

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.skipped:
            self.add(report.nodeid, report.outcome)
        elif report.failed:
            self.add(report.nodeid, "error")

    def whole(self, part: str) -> None:
        """All tests of a part have run: write last_run.json."""
        self.add(None, part)
        _, outcomes, parts = read(self._folder)
        parts = ["all"] if part == "all" else sorted({*parts} & PARTS, reverse=True)
        found = [*outcomes.values()]
        record = {
            "date": time.strftime("%Y-%m-%d"), **self._of, **{kind: found.count(kind) for kind in OUTCOMES},
            "parts": parts,
            "tests_that_failed": sorted(test for test, what in outcomes.items() if what in ("failed", "error")),
        }  # fmt: skip
        del record["tests"]
        with open(os.path.join(self._folder, "last_run.json"), "w") as file:
            json.dump(record, file, indent=1)
            file.write("\n")
