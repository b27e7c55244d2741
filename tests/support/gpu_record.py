"""Records results of the GPU tests: each result immediately, so that an interrupted run can be continued, and a summary
of complete parts.

``tests/gpu/results.jsonl``, not in git: first the setting (GPUs, versions, sources, tests), then [test, outcome, part,
seconds], with the traceback's end if it failed, and [None, "whole", part, 0] for a part of the suite that has run
completely. If a test ran again, its last outcome counts.
``tests/gpu/last_run.json``, in git: the complete parts, the number of passed tests, the failed ones, and those that
passed only in a second run with fewer tests at once.
``tests/gpu/seconds.json``, in git: the time of a case of each test function, for the order of the next run.
"""

from __future__ import annotations

import collections
import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from .gpu_schedule import function_of

PARTS = {"not alone", "alone"}  # parts of the suite in make test-gpu
OUTCOMES = "passed", "failed", "error", "skipped"
TRACEBACK = 8000  # characters of a failed test's traceback


def what_runs(tests: str, gpus: int | None = None) -> dict:
    """Return the setting of results. ``tests``: the folder, ``gpus``: GPUs per test, if not all."""
    import triton

    from allscan.bindings.versions import version_of
    from allscan.comm.heap import source_hash

    digests = {}
    for folder, _, names in os.walk(tests):
        for path in (os.path.join(folder, name) for name in names if name.endswith(".py")):
            with open(path, "rb") as file:
                digests[os.path.relpath(path, os.path.dirname(tests))] = hashlib.sha256(file.read()).hexdigest()
    files = {path: digests.pop(path) for path in [*digests] if os.path.basename(path).startswith("test_")}
    return {
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())][:gpus],
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "nvshmem": version_of("NVSHMEM"),
        },
        "sha256": source_hash(),
        "support": hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest(),
        "files": files,
    }


def read_lines(folder: str) -> Iterator[Any]:
    """Read the lines of results in ``folder``, which is tests/gpu."""
    try:
        with open(os.path.join(folder, "results.jsonl")) as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        return
    for text in lines:
        try:
            yield json.loads(text)
        except ValueError:  # a run was interrupted here
            continue


def read(folder: str) -> tuple[dict, dict[str, tuple[str, str]], set[str]]:
    """Read results in ``folder``, which is tests/gpu: (setting, (outcome, part) by test, complete parts)."""
    of, results, parts = {}, {}, set()
    for line in read_lines(folder):
        if isinstance(line, dict):
            of = line
        elif line[0] is None:
            parts.add(line[2])
        else:
            results[line[0]] = line[1], line[2]
    return of, results, parts


class Record:
    """Recorder for the tests in ``folder`` (tests/gpu); ``of``: the setting. Results of another setting are deleted; if
    only files of tests differ, those of their tests."""

    def __init__(self, folder: str, of: dict) -> None:
        self._folder, self._of = folder, of
        self._setups: dict[str, float] = {}  # seconds of setup, by running test
        before, lines = read(folder)[0], [line for line in read_lines(folder) if isinstance(line, list)]
        if before | {"files": of["files"]} != of:
            lines = []
        elif before != of:  # parts are no longer complete
            same = {path for path, digest in of["files"].items() if before["files"].get(path) == digest}
            lines = [line for line in lines if line[0] is not None and line[0].partition("::")[0] in same]
        with open(os.path.join(folder, "results.jsonl"), "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in [of, *lines])

    def add(self, test: str | None, what: str, part: str, seconds: float = 0.0, why: str = "") -> None:
        line = [test, what, part, round(seconds, 1), *([why[-TRACEBACK:]] if why else [])]
        with open(os.path.join(self._folder, "results.jsonl"), "a") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_runtest_logreport(self, report) -> None:
        part = "alone" if "alone" in report.keywords else "not alone"
        seconds = self._setups.pop(report.nodeid, 0.0) + report.duration  # includes the start of ranks
        why = report.longreprtext if report.failed else ""
        if report.when == "call" or report.skipped:
            self.add(report.nodeid, report.outcome, part, seconds, why)
        elif report.when == "setup":
            self._setups[report.nodeid] = report.duration
        if report.failed and report.when != "call":
            self.add(report.nodeid, "error", part, seconds, why)

    def whole(self, ended: set[str]) -> None:
        """Write last_run.json after all tests of these parts have run."""
        for part in ended:
            self.add(None, "whole", part)
        _, results, parts = read(self._folder)
        outcomes = {test: what for test, (what, part) in results.items() if part in parts}
        found = [*outcomes.values()]
        record = {
            "date": time.strftime("%Y-%m-%d"),
            **self._of,
            **{kind: found.count(kind) for kind in OUTCOMES},
            "parts": sorted(parts, reverse=True),
            "tests_that_failed": sorted(test for test, what in outcomes.items() if what in ("failed", "error")),
        }
        del record["support"], record["files"]
        results_of = [line for line in read_lines(self._folder) if isinstance(line, list) and line[0] in outcomes]
        failed = {test for test, what, *_ in results_of if what in ("failed", "error")}
        record["tests_that_passed_again"] = sorted(test for test in failed if outcomes[test] == "passed")
        self._write("last_run.json", record)
        spent = collections.defaultdict(list)
        for test, what, _, seconds, *_ in results_of:
            if what == "passed":
                spent[function_of(test)].append(seconds)
        self._write("seconds.json", {name: round(statistics.mean(spent[name]), 1) for name in sorted(spent)})

    def _write(self, name: str, record: dict) -> None:
        with open(os.path.join(self._folder, name), "w") as file:
            json.dump(record, file, indent=1)
            file.write("\n")
