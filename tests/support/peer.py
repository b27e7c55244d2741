"""Runs flash-linear-attention's own tests with its operators replaced by allscan's: ``make peer PEER=checkout``.

    python -m support.peer CHECKOUT [--ranks N] [--chunk allscan] [--record FILE] [options of pytest]
    python -m support.peer --summary FILE

Tests that compile the same kernels form a group: with -n, pytest-xdist gives a group to one worker. --record: a file
for results, written immediately; tests that have passed or been skipped there do not run again, so that an interrupted
run can be continued.

The tests are in a checkout that the caller names; nothing of it is copied. In its tests/ops a call of chunk_gla,
chunk_kda or chunk_gated_delta_rule is split over ranks: each rank takes a part of the tokens, in either layout, and
outputs, states and gradients are joined before fla's assertions. In its tests/context_parallel a test's processes send
states, and the tokens of convolutions and token shifts, by All-Scan (``fla_cp.enable()``).

fla's context-parallel test of KDA misses its own bound, 8e-3 of a tensor's norm, with fla's exchange and with this
one, also if no state is sent. The cause is its inputs: q and k are normalized in bfloat16, and the keys are nearly
parallel (-50 +- 10 in each element). Against float64 (384 steps of its recurrence on a CPU, 2 heads, K = V = 128, its
own inputs) the gradient of q has these errors: 8.9e-3 in the test's reference, whose norms are rounded to bfloat16;
7.6e-3 in a computation that is exact except for one rounding of the normalized q and k to bfloat16. In float32 both
errors are below 5e-7.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import socket
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from triton.runtime.autotuner import Autotuner

import allscan
from allscan.bindings.interpreter import prepare_interpreter
from allscan.ops.delta.delta_checks import CHUNKS
from allscan.tools import ranks
from support.fla import import_fla
from support.gpu_schedule import turned

OPERATORS = {
    "chunk_gla": "zeco_gla",
    "chunk_kda": "zeco_kda",
    "chunk_gated_delta_rule": "zeco_gated_delta_rule",
}
LAYOUTS = "contiguous", "zigzag"
TOKENWISE = "q", "k", "v", "g", "beta"
SIZES = {"chunk_gla": (64,), "chunk_kda": (32, 64), "chunk_gated_delta_rule": (16, 32, 64)}  # chunk sizes of fla
HOW = "disable_recompute", "cu_seqlens_cpu", "chunk_size"  # arguments that do not change the result
FILES = (  # in the checkout; files that a version of fla lacks are skipped
    "tests/ops/test_gla.py",
    "tests/ops/test_kda.py",
    "tests/ops/test_gdn.py",
    "tests/ops/test_gated_delta.py",
    "tests/context_parallel/test_cp_kda.py",
    "tests/context_parallel/test_cp_gdn.py",
    "tests/context_parallel/test_cp_conv.py",
    "tests/context_parallel/test_cp_dplr.py",
    "tests/context_parallel/test_cp_rwkv7.py",
    "tests/context_parallel/test_cp_token_shift.py",
)


def main(checkout: str, *options: str) -> int:
    if checkout == "--summary":
        print(*summary(read(options[0])), sep="\n")
        return 0
    files = [str(Path(checkout, name)) for name in FILES if Path(checkout, name).exists()]
    if not files:
        raise SystemExit(f"{checkout} has none of {', '.join(FILES)}")
    environment = dict(os.environ) if torch.cuda.is_available() else os.environ | {"TRITON_INTERPRET": "1"}
    pytest_options = ["-c", os.devnull, "--rootdir", checkout, "-q", "-p", "support.peer", *options, *files]
    if any(option.startswith(("-n", "--numprocesses")) for option in options):
        pytest_options += ["--dist", "loadgroup"]
    environment = {"OMP_NUM_THREADS": "1"} | dict(environment)  # many workers, each with ranks
    return subprocess.call([sys.executable, "-m", "pytest", *pytest_options], env=environment)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    Autotuner._bench = lambda *_, **__: [1.0, 1.0, 1.0]  # each kernel uses its first configuration
    worker, count = os.environ.get("PYTEST_XDIST_WORKER"), torch.cuda.device_count()
    if worker is not None and count:  # distribute the workers' references over the GPUs
        devices = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        os.environ["CUDA_VISIBLE_DEVICES"] = turned(worker, devices.split(","))
    if not torch.cuda.is_available():  # fla's references also use kernels
        prepare_interpreter()
        import fla.utils

        fla.utils.device, fla.utils.device_torch_lib = "cpu", torch.cpu


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ranks", type=int, help="number of ranks that split a call; default: one per GPU, at least 2")
    parser.addoption("--chunk", choices=CHUNKS, help="option chunk of zeco_kda and zeco_gated_delta_rule")
    parser.addoption("--record", help="file of results; passed tests do not run again")


class Result(NamedTuple):
    """A line of --record."""

    test: str
    outcome: str
    seconds: float
    why: str


def read(path: str) -> dict[str, Result]:
    """Read the last result of each test."""
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return {line[0]: Result(*line) for line in map(json.loads, lines)}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "xdist_group(name): tests of one worker")
    if config.getoption("--record") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Record(config.getoption("--record")))


class Record:
    """Writes each result immediately."""

    def __init__(self, path: str) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed and (report.skipped or report.when == "setup"):
            crash = getattr(report.longrepr, "reprcrash", None)
            why = (crash.message if crash else str(report.longrepr or ""))[-600:]
            outcome = "error" if report.failed and report.when == "setup" else report.outcome
            line = json.dumps(Result(name_of(report.nodeid), outcome, round(report.duration, 2), why))
            with open(self.path, "a") as file:
                file.write(f"{line}\n")


def name_of(node: str) -> str:
    """Return a test's name without the group that pytest-xdist has added."""
    return node.rpartition("@")[0] or node


def operator_of(function: Callable) -> str | None:
    """Return the operator that a test's code names."""

    def names(code: types.CodeType) -> set[str]:
        inner = (names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
        return set(code.co_names).union(*inner)

    called = names(inspect.unwrap(function).__code__) & OPERATORS.keys()
    return called.pop() if called else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    layouts = LAYOUTS if operator_of(metafunc.function) else LAYOUTS[:1]
    metafunc.parametrize("allscan_layout", layouts, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def concerned(item: pytest.Item) -> bool:
        return "context_parallel" in item.path.parts or operator_of(item.function) is not None

    record = config.getoption("--record")
    over = {name for name, result in read(record).items() if result.outcome in ("passed", "skipped")} if record else ()
    chosen = [item for item in items if concerned(item) and item.nodeid not in over]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    for item in chosen:
        item.add_marker(pytest.mark.xdist_group(group_of(item)))
    items[:] = chosen


def group_of(item: pytest.Item) -> str:
    """Return the group of tests that compile the same kernels; context-parallel tests start their own processes."""
    name = operator_of(item.function)
    if name is None:
        return item.nodeid.replace("/", ".")
    parameters = item.callspec.params
    return " ".join([name, *(str(parameters.get(one, "")) for one in ("Hq", "H", "HV", "D", "dtype"))])


@pytest.fixture(scope="session")
def allscan_ranks(request: pytest.FixtureRequest) -> Iterator[ranks.Ranks]:
    count = request.config.getoption("--ranks") or max(2, torch.cuda.device_count())
    os.environ.setdefault("ALLSCAN_HEAP", "1G" if torch.cuda.is_available() else "256M")
    if torch.cuda.is_available() and count > torch.cuda.device_count():
        os.environ["ALLSCAN_TRANSPORT"] = "ipc"
    with ranks.Ranks(count) as group:
        yield group


@pytest.fixture(autouse=True)
def allscan_layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Split | None]:
    """Replace the operator that the test calls."""
    name = operator_of(request.function)
    if name is None:
        monkeypatch.setattr(torch.multiprocessing, "start_processes", start_processes)
        yield None
        return
    group = request.getfixturevalue("allscan_ranks")
    chunk = request.config.getoption("--chunk") if name != "chunk_gla" else None
    split = Split(group, name, getattr(request.module, name), request.param, chunk)
    monkeypatch.setattr(request.module, name, split)
    yield split
    forget()
    group.run(forget)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    result = yield
    split = pyfuncitem.funcargs["allscan_layout"]
    if split is not None and not split.calls:
        raise AssertionError(f"the test has not called {split.name}")
    return result


class Split:
    """Replaces an operator of fla, called with whole sequences, by ranks with a part of the tokens each."""

    def __init__(
        self, group: ranks.Ranks, name: str, original: Callable, layout: str, chunk: str | None = None
    ) -> None:
        self.group, self.name, self.layout, self.calls = group, name, layout, 0
        self.options = {} if chunk is None else dict(chunk=chunk)
        self._signature = inspect.signature(original)

    def __call__(self, *arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.calls += 1
        given = dict(self._signature.bind(*arguments, **options).arguments)
        given |= given.pop("kwargs", {})
        given = {name: value for name, value in given.items() if value is not None}
        if given.get("chunk_size", 64) not in SIZES[self.name]:
            pytest.skip("what fla rejects")
        given = {name: value for name, value in given.items() if name not in HOW}
        parameters = inspect.signature(getattr(allscan, OPERATORS[self.name])).parameters
        v_first = "state_v_first" not in parameters and given.pop("state_v_first", False)
        if unknown := given.keys() - parameters.keys():
            pytest.skip(f"allscan has no {', '.join(sorted(unknown))}")
        if "cu_seqlens" in given:
            given["cu_seqlens"] = given["cu_seqlens"].tolist()
        if "initial_state" in given:
            state = given["initial_state"].float()
            given["initial_state"] = state.mT if v_first else state
        tensors = {name: given.pop(name) for name in [*given] if isinstance(given[name], torch.Tensor)}
        if "A_log" in tensors:
            tensors["A_log"] = tensors["A_log"].flatten()
        total = tensors["q"].shape[1]
        if self.layout == "zigzag" and total % 2:  # the layout needs an even number of tokens
            tensors = with_one_more(tensors, bool(given.get("use_gate_in_kernel")))
            if "cu_seqlens" in given:
                given["cu_seqlens"] = [*given["cu_seqlens"][:-1], total + 1]
        o, state = OverRanks.apply(self, [*tensors], given | self.options, *tensors.values())
        return o[:, :total], None if not given.get("output_final_state") else state.mT if v_first else state


def with_one_more(tensors: dict[str, torch.Tensor], raw: bool) -> dict[str, torch.Tensor]:
    """Append a token that changes no state: zero key, no decay. ``raw``: gates are raw inputs."""
    longer = {}
    for name, x in tensors.items():
        if name in TOKENWISE:
            x = torch.cat([x, torch.full_like(x[:, :1], -1e4 if raw and name == "g" else 0)], 1)
        longer[name] = x
    return longer


class OverRanks(torch.autograd.Function):
    """Sends the whole tensors to the ranks, and joins their results."""

    @staticmethod
    def forward(
        ctx: Any, split: Split, names: list[str], options: dict[str, Any], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.split, ctx.names = split, names
        ctx.call = Call(next(_numbers), OPERATORS[split.name], split.layout, names, ctx.needs_input_grad[3:], options)
        found = split.group.run(forward, ctx.call, [on_host(x) for x in tensors], timeout=600.0)
        q, v = (tensors[names.index(name)] for name in "qv")
        o = together(v, ctx.call.layout, [answer[0] for answer in found])
        if not options.get("output_final_state"):
            return o, q.new_zeros(0)
        return o, sum(answer[1] for answer in found).to(o.device)

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor, dstate: torch.Tensor) -> tuple:
        found = ctx.split.group.run(backward, ctx.call, on_host(do), on_host(dstate), timeout=600.0)
        gradients: list[torch.Tensor | None] = []
        for i, name in enumerate(ctx.names):
            parts = [answer[i] for answer in found]
            if parts[0] is None:
                gradients.append(None)
            elif name in TOKENWISE:
                gradients.append(together(do, ctx.call.layout, parts))
            else:
                gradients.append(sum(parts).to(do.device))
        return None, None, None, *gradients


_numbers = itertools.count()


class Call(NamedTuple):
    """Description of a call for the ranks."""

    number: int
    name: str
    layout: str
    names: list[str]
    wanted: tuple[bool, ...]  # whether a gradient is needed, by tensor
    options: dict[str, Any]


def on_host(x: torch.Tensor) -> torch.Tensor:
    return x.detach().cpu().clone()


def parts_of(total: int, layout: str, rank: int, size: int) -> list[slice]:
    """Return a rank's tokens out of ``total``; their number may differ between ranks."""
    if layout == "contiguous":
        return [slice(total * rank // size, total * (rank + 1) // size)]
    begin, end = (total // 2 * i // size for i in (rank, rank + 1))
    return [slice(begin, end), slice(total - end, total - begin)]


def together(like: torch.Tensor, layout: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """Join the ranks' parts to [B, T, ..], on the device of ``like``."""
    total = sum(part.shape[1] for part in parts)
    whole = parts[0].new_empty(parts[0].shape[0], total, *parts[0].shape[2:])
    for rank, part in enumerate(parts):
        places = parts_of(total, layout, rank, len(parts))
        for place, piece in zip(places, part.chunk(len(places), 1), strict=True):
            whole[:, place] = piece
    return whole.to(like.device)


# --- functions that the ranks run

_comm: allscan.Communicator | None = None
_graphs: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}  # by call: (inputs, results)


def forward(call: Call, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    global _comm
    import_fla(models=False)
    if _comm is None:
        _comm = allscan.Communicator(dist.group.WORLD)
    inputs = []
    for name, x, wanted in zip(call.names, tensors, call.wanted, strict=True):
        if name in TOKENWISE:
            x = torch.cat([x[:, part] for part in parts_of(x.shape[1], call.layout, _comm.rank, _comm.size)], 1)
        inputs.append(x.to(_comm.device, copy=True).requires_grad_(wanted))
    operator = getattr(allscan, call.name)
    given = dict(zip(call.names, inputs, strict=True))
    o, state = operator(**given, comm=_comm, layout=call.layout, **call.options)
    if any(call.wanted):
        _graphs[call.number] = inputs, [x for x in (o, state) if x is not None]
    return on_host(o), None if state is None else on_host(state)


def backward(call: Call, do: torch.Tensor, dstate: torch.Tensor) -> list[torch.Tensor | None]:
    assert _comm is not None
    inputs, results = _graphs[call.number]
    do = torch.cat([do[:, part] for part in parts_of(do.shape[1], call.layout, _comm.rank, _comm.size)], 1)
    gradients = [x.to(_comm.device) for x in (do, dstate)][: len(results)]
    wanted = [x for x in inputs if x.requires_grad]
    found = iter(torch.autograd.grad(results, wanted, gradients))
    return [on_host(next(found)) if x.requires_grad else None for x in inputs]


def forget() -> None:
    _graphs.clear()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --- the tests of context parallelism, which start their own processes

_start_processes = torch.multiprocessing.start_processes


def start_processes(function: Callable, args: tuple = (), **options: Any) -> Any:
    with socket.create_server((ranks.LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    return _start_processes(with_allscan, (port, function, *args), **options)


def with_allscan(rank: int, port: int, function: Callable, *arguments: Any) -> None:
    """Run ``function`` in a new process in which All-Scan carries the states of every group. port: replaces the test's
    fixed port."""
    from allscan.integrations import fla_cp

    import_fla(models=False)
    fla_cp.enable()
    destroy, init, used = dist.destroy_process_group, dist.init_process_group, []

    def begin(*names: Any, **options: Any) -> None:
        os.environ["MASTER_PORT"] = str(port)
        init(*names, **options)

    def close() -> None:
        used.extend(fla_cp._communicators.values())
        for comm in used:
            comm.close()
        destroy()

    dist.init_process_group, dist.destroy_process_group = begin, close
    function(rank, *arguments)
    if not used:
        raise AssertionError("the test has not used All-Scan")


# --- the summary


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    found = read(config.getoption("--record")) if config.getoption("--record") else {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            name = name_of(report.nodeid)
            found[name] = found.get(name) or Result(name, outcome, 0.0, "")
    for line in summary(found):
        terminalreporter.write_line(line)


def summary(found: dict[str, Result]) -> list[str]:
    """Return a line per test function, then one per file, each by layout."""
    counts: dict[tuple[str, str], dict[str, int]] = {}
    for test, outcome, *_ in found.values():
        path, _, function = test.partition("::")
        layout = "zigzag" if "zigzag" in function else "contiguous"
        for what in (f"{Path(path).name}::{function.partition('[')[0]}", Path(path).name):
            some = counts.setdefault((what, layout), {})
            some[outcome] = some.get(outcome, 0) + 1
    lines = [
        f"{what} {layout}: " + ", ".join(f"{n} {outcome}" for outcome, n in some.items())
        for (what, layout), some in sorted(counts.items(), key=lambda x: ("::" not in x[0][0], x[0]))
    ]
    bad = [f"{result.outcome.upper()} {result.test}: {result.why}" for result in found.values() if result.why]
    return [line for line in bad if not line.startswith("SKIPPED")] + lines


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
