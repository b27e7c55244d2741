"""Run every complete example of the documentation: python docs/check_examples.py [name ...]

An example is a fenced python block of docs/**/*.md whose first line is ``# runs on one process``, or ``# runs on N
ranks``. Each runs in one new process, or in N with torchrun's variables, in Triton's interpreter, with the root of the
repository (or the folder in ALLSCAN_SOURCE) on the path. With names, only pages whose path contains one of them. The
exit status is 1 if an example fails.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import re
import runpy
import sys
import tempfile
import time
import traceback
from pathlib import Path

DOCS = Path(__file__).resolve().parent
BLOCK = re.compile(r"^```python\n(# runs on (?:one process|\d ranks)\n.*?)^```$", re.MULTILINE | re.DOTALL)
TIMEOUT_S = 180
# What examples import, at once or in a call; loaded once, before they are forked
IMPORTED = "torch._dynamo", "transformers.modeling_utils", "transformers.trainer"


def examples(names: list[str]) -> list[tuple[str, str]]:
    """Return (page and number, program) of each example."""
    found = []
    for path in sorted(DOCS.rglob("*.md")):
        page = path.relative_to(DOCS).as_posix()
        if not names or any(name in page for name in names):
            programs = BLOCK.findall(path.read_text(encoding="utf-8"))
            found += [(f"{page}, {i}", program) for i, program in enumerate(programs, 1)]
    return found


def _run(path: str, rank: int, size: int, port: int | None) -> None:
    """Run an example in its own process, forked from this one: the imports of main() are loaded."""
    folder = os.path.dirname(path)
    os.chdir(folder)
    if size > 1:
        torchrun = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, MASTER_PORT=port)
        os.environ |= {name: str(value) for name, value in torchrun.items()}
        os.environ |= {"MASTER_ADDR": "localhost", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with open(f"output{rank}", "w", encoding="utf-8", buffering=1) as output:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            try:
                runpy.run_path(path, run_name="__main__")
            except BaseException:
                traceback.print_exc()
                sys.exit(1)


def _serve(end) -> None:
    """Serve torch.distributed's store, which outlives every rank, as with torchrun. Runs in a separate process: a
    process forked from one with the store's thread may inherit a lock that is never released."""
    import torch.distributed as dist

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    end.send(store.port)
    time.sleep(2 * TIMEOUT_S)


@contextlib.contextmanager
def _store(fork):
    """Start the store's process; return its port."""
    ours, theirs = multiprocessing.Pipe()
    server = fork(target=_serve, args=(theirs,))
    server.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        server.kill()
        server.join()


def run(program: str) -> tuple[bool, str]:
    """Run a program; return (whether all ranks succeeded, their output)."""
    said = re.match(r"# runs on (\d) ranks", program)
    size, end = int(said[1]) if said else 1, time.monotonic() + TIMEOUT_S
    fork = multiprocessing.get_context("fork").Process
    beside = _store(fork) if size > 1 else contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as folder, beside as port:
        path = Path(folder, "example.py")  # a file, since Triton reads the source of a kernel
        path.write_text(program, encoding="utf-8")
        processes = [fork(target=_run, args=(str(path), rank, size, port)) for rank in range(size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        late = [process for process in processes if process.is_alive()]
        for process in late:
            process.kill()
            process.join()
        told = "".join(Path(folder, f"output{rank}").read_text(encoding="utf-8") for rank in range(size))
        if late:
            return False, f"no end within {TIMEOUT_S} s\n{told}"
        return all(process.exitcode == 0 for process in processes), told


def main() -> int:
    found = examples(sys.argv[1:])
    os.environ |= dict(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    sys.path.insert(0, os.environ.get("ALLSCAN_SOURCE", str(DOCS.parent)))
    import allscan  # noqa: F401

    for name in IMPORTED:
        with contextlib.suppress(ImportError):  # the examples that need it say so
            importlib.import_module(name)
    results = [run(program) for _, program in found]
    failed = [(name, output) for (name, _), (ok, output) in zip(found, results, strict=True) if not ok]
    for name, output in failed:
        print(f"FAILED {name}\n{output}")
    print(f"{len(found) - len(failed)} of {len(found)} examples ran")
    return int(bool(failed) or not found)


if __name__ == "__main__":
    sys.exit(main())
