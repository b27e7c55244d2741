"""Run every example of the documentation that is complete: python docs/check_examples.py [name ...]

An example is a fenced python block of docs/**/*.md whose first line is ``# runs on one process``. Each runs in a
process of its own, in Triton's interpreter, with the root of the repository (or the folder in ALLSCAN_SOURCE) on
PYTHONPATH. With names, only pages whose path contains one of them. The exit status is 1 if an example fails.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

DOCS = Path(__file__).resolve().parent
BLOCK = re.compile(r"^```python\n(# runs on one process\n.*?)^```$", re.MULTILINE | re.DOTALL)
TIMEOUT_S = 180


def examples(names: list[str]) -> list[tuple[str, str]]:
    """(page and number, program) of all of them."""
    found = []
    for path in sorted(DOCS.rglob("*.md")):
        page = path.relative_to(DOCS).as_posix()
        if not names or any(name in page for name in names):
            programs = BLOCK.findall(path.read_text(encoding="utf-8"))
            found += [(f"{page}, {i}", program) for i, program in enumerate(programs, 1)]
    return found


def run(program: str) -> tuple[bool, str]:
    """(whether it has ended well, its output)."""
    source = os.environ.get("ALLSCAN_SOURCE", str(DOCS.parent))
    options = dict(TRITON_INTERPRET="1", PYTHONPATH=source, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "example.py")  # Triton reads the source of a kernel, so it must lie in a file
        path.write_text(program, encoding="utf-8")
        try:
            done = subprocess.run(
                [sys.executable, str(path)], env=dict(os.environ, **options), cwd=folder, timeout=TIMEOUT_S,
                capture_output=True, text=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False, f"no end within {TIMEOUT_S} s"
    return done.returncode == 0, done.stdout + done.stderr


def main() -> int:
    found = examples(sys.argv[1:])
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run, [program for _, program in found]))
    failed = [(name, output) for (name, _), (ok, output) in zip(found, results, strict=True) if not ok]
    for name, output in failed:
        print(f"FAILED {name}\n{output}")
    print(f"{len(found) - len(failed)} of {len(found)} examples ran")
    return int(bool(failed) or not found)


if __name__ == "__main__":
    sys.exit(main())
