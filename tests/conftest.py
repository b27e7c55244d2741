"""Provides ranks for the tests: processes in Triton's interpreter, or with ``--gpu`` one per GPU.

This process itself does not use the interpreter: it compiles kernels for sm_90.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os

import pytest
import torch

from allscan.tools import ranks
from support import gpu_record, gpu_schedule, side_by_side
from support.values import on_communicator

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OF_GPU = os.path.join(ROOT, "tests", "gpu")
ranks.PRELOAD = [*ranks.PRELOAD, "support.fresh_memory", "support.rewritten_kernels"]


def pytest_addoption(parser):
    parser.addoption("--gpu", action="store_true", help="run on the GPUs of this machine, and write gpu/last_run.json")
    parser.addoption("--go-on", action="store_true", help="with --gpu: only tests not passed since the last change")
    parser.addoption("--gpus", type=int, help="with --gpu: GPUs per test; workers use different ones")
    parser.addoption("--share", type=int, help="with --gpu: number of ranks, which share the GPUs; no record")
    parser.addoption("--network", action="store_true", help="run the network tests; no record")
    parser.addoption("--all", action="store_true", help="also the cases marked slow, which GPU runs always have")
    parser.addoption("--seeds", type=int, help="number of seeds for each property (test_properties.py)")


def pytest_configure(config):
    worker = getattr(config, "workerinput", None)  # of pytest-xdist
    if config.getoption("--gpu") and torch.cuda.device_count() > 1:
        choose_gpus(config, worker)
    if worker:  # more threads, here and in its ranks, would compete for cores with the other workers
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)
    if not config.getoption("--gpu"):  # else inductor starts a pool of processes in every rank
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if config.getoption("--share"):
        os.environ["ALLSCAN_TRANSPORT"] = "ipc"
    elif config.option.markexpr == "kernels":
        pass  # another version of Triton: no record
    elif config.getoption("--gpu") and not worker:
        of = gpu_record.what_runs(os.path.join(ROOT, "tests"), config.getoption("--gpus"))
        record = gpu_record.Record(OF_GPU, of)
        config.pluginmanager.register(record, "gpu record")


def choose_gpus(config, worker):
    """Set CUDA_VISIBLE_DEVICES before CUDA starts: each worker of pytest-xdist has a different first GPU."""
    devices = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    count = config.getoption("--gpus")
    if worker or (count and not config.getoption("numprocesses", None)):
        name = worker["workerid"] if worker else "gw0"
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu_schedule.turned(name, devices.split(","), count)


def choose_cases(item):
    """Remove from a case the marks quick and slow that are for other cases of its test, and slow if quick names it."""
    case = item.callspec.id if hasattr(item, "callspec") else ""
    for mark in [mark for mark in item.own_markers if mark.name in ("quick", "slow")]:
        if not case.startswith(mark.args or "") or case.startswith(mark.kwargs.get("but", ())):
            item.own_markers.remove(mark)
    if any(mark.name == "quick" for mark in item.own_markers):
        item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "slow"]


def pytest_collection_modifyitems(config, items):
    on_gpu = config.getoption("--gpu")
    largest = count_of_ranks(config) if on_gpu else 8
    sharing = on_gpu and config.getoption("--share")
    kept, dropped = [], []
    go_on = on_gpu and not sharing and config.getoption("--go-on")
    before = gpu_record.read(OF_GPU)[1] if go_on else {}
    without_slow = not on_gpu and not config.getoption("--all")
    for item in items:
        choose_cases(item)
        size = side_by_side.size_of(item)
        if sharing and ("nvshmem" in item.nodeid or item.get_closest_marker("alone")):
            size = largest + 1
        over_network = (item.get_closest_marker("network") is not None) == config.getoption("--network")
        marks = {mark.name for mark in item.iter_markers()}  # keywords would include the names of folders
        here = ("gpu" in marks) <= on_gpu and not ("cpu" in marks and on_gpu)
        here = here and not (without_slow and "slow" in marks)
        here = here and ("every_shape" in marks) == (config.option.markexpr == "every_shape")
        wanted = over_network and here and size <= largest
        (kept if wanted and before.get(item.nodeid, (None,))[0] != "passed" else dropped).append(item)
    if any("import_fla" in vars(item.module) for item in kept) and importlib.util.find_spec("fla"):
        ranks.PRELOAD = [*ranks.PRELOAD, "fla.models.gla", "fla.ops.kda"]  # importing them takes ten seconds
    for module in {item.module for item in kept} if config.option.markexpr != "quick" else ():
        ranks.PRELOAD = [*ranks.PRELOAD, *vars(module).get("PRELOAD", ())]
    config.hook.pytest_deselected(items=dropped)
    if not on_gpu:  # tests of the whole package are the longest and must not start last
        kept.sort(key=lambda item: os.path.dirname(item.path) != os.path.join(ROOT, "tests"))
    items[:] = kept
    if on_gpu and hasattr(config, "workerinput"):
        order = gpu_schedule.longest_first([item.nodeid for item in kept], gpu_schedule.seconds(OF_GPU))
        place = {test: i for i, test in enumerate(order)}
        items.sort(key=lambda item: place[item.nodeid])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if not config.getoption("--gpu"):
        return None
    sets = torch.cuda.device_count() // (config.getoption("--gpus") or torch.cuda.device_count() or 1)
    return gpu_schedule.scheduler(config, log, gpu_schedule.seconds(OF_GPU), max(sets, 1))


@pytest.fixture(autouse=True)
def free_cached_memory():
    """Free this process's cached GPU memory for ranks of other tests: it runs some GPU tests itself."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


LIMIT_S = 900.0  # for a case on ranks; kernels and exchanges have limits of their own


class PatientRanks(ranks.Ranks):
    """Ranks that may take as long as they need on a busy machine."""

    def run(self, *arguments, timeout=LIMIT_S):
        return super().run(*arguments, timeout=timeout)


class Pool:
    """Ranks shared by tests. After a failed test they are replaced if they do not answer."""

    def __init__(self, size, device):
        self.size, self.ranks = size, PatientRanks(size, device)
        self.begun, self._answers = set(), {}  # started tests; results by test: [(value, error)] by rank

    def run(self, *arguments):
        try:
            found = self.ranks.run(*arguments)
            if self.ranks.device == "cuda":
                self.ranks.run(torch.cuda.empty_cache)  # for other processes on these GPUs
            return found
        except RuntimeError as error:
            self._replace_lost_ranks()
            if 'transport "ipc" does not use' in str(error):
                pytest.skip("needs NVSHMEM's puts")
            raise

    def _replace_lost_ranks(self):
        try:
            self.ranks.run(answering, timeout=60.0)
        except RuntimeError:
            self.ranks.close(0.0)
            self.ranks = PatientRanks(self.size, self.ranks.device)

    def answers_of(self, item, others):
        """Return a test's results by rank. Run it together with tests from ``others`` that have not started, as many as
        the ranks allow."""
        if item.nodeid not in self._answers:
            items = [item, *(other for other in others if other.nodeid not in self.begun)]
            places = side_by_side.fitting(items, self.size)
            self.begun |= {item.nodeid for _, item in places}
            self.ranks.start(side_by_side.on_ranks, [(place, *side_by_side.case_of(item)) for place, item in places])
            answers = self.ranks.results(LIMIT_S, after_failure=30.0)
            self._answers |= {item.nodeid: [answers[rank] for rank in place] for place, item in places}
            if any(error for _, error in answers):
                self._replace_lost_ranks()
        return ranks.values_of(self._answers.pop(item.nodeid))


def count_of_ranks(config):
    """Return the number of ranks on the GPUs."""
    return config.getoption("--share") or torch.cuda.device_count()


def device_for(size, config):
    """Return the device of a test's ranks. Skip the test if there are too few GPUs; tests with a parameter ``size`` are
    deselected before."""
    if not config.getoption("--gpu"):
        return "cpu"
    if size > count_of_ranks(config):
        pytest.skip(f"needs {size} GPUs")
    return "cuda"


def answering():
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # raises at every call after an illegal memory access


@pytest.fixture(scope="session")
def pool(request):
    on_gpu = request.config.getoption("--gpu")
    os.environ.setdefault("ALLSCAN_HEAP", "512M")
    size = count_of_ranks(request.config) if on_gpu else 4 if request.config.option.markexpr == "quick" else 8
    made = Pool(size, "cuda" if on_gpu else "cpu")
    yield made
    made.ranks.close()


@pytest.fixture
def run(pool, request):
    """Return run(size, function, *arguments, **named): it calls function(group, *arguments, **named) on the first
    ``size`` ranks and returns the results by rank. A function whose first parameter is ``comm`` gets a communicator of
    the group, which is closed behind it."""

    def run(size, function, *arguments, **named):
        device_for(size, request.config)
        if [*inspect.signature(function).parameters][:1] == ["comm"]:
            function = functools.partial(on_communicator, function)
        function = functools.partial(function, **named) if named else function
        return pool.run(ranks.on_first, size, function, *arguments)[:size]

    return run


@pytest.fixture
def answers(pool, request):
    """Return the results of the test's case by rank: function(group, **arguments) of its mark
    ``side_by_side(case=function)``. On CPUs the first case also runs later cases, on other ranks."""
    if request.config.getoption("--gpu"):
        size = side_by_side.size_of(request.node)
        device_for(size, request.config)
        function, arguments = side_by_side.case_of(request.node)
        return pool.run(ranks.on_first, size, functools.partial(function, **arguments))[:size]
    items = request.session.items
    others = [item for item in items[items.index(request.node) :] if item.function is request.node.function]
    return pool.answers_of(request.node, others[1:])


@pytest.fixture
def fresh(request):
    """Return fresh(size): it starts separate ranks, for tests that break or kill them."""
    made = []

    def fresh(size):
        made.append(PatientRanks(size, device_for(size, request.config)))
        return made[-1]

    yield fresh
    for group in made:
        group.close()


def pytest_terminal_summary(terminalreporter):
    """Print the versions of frameworks; tests of a missing one are skipped."""
    from allscan.bindings.versions import installed_version

    names = "torch triton flash-linear-attention transformers accelerate trl axolotl-ringmaster megatron-core"
    names += " mamba-ssm causal-conv1d transformer-engine"
    found = [f"{name} {installed_version(name) or 'missing'}" for name in names.split()]
    terminalreporter.write_line(f"with {', '.join(found)}")


class FailuresAtOnce:
    """Prints failures immediately: a run on GPUs may be interrupted."""

    def __init__(self, reporter):
        self.reporter = reporter

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.reporter.write_line(f"\nFAILED {report.nodeid}\n{report.longreprtext[-4000:]}")


def pytest_sessionstart(session):
    manager = session.config.pluginmanager
    if (session.config.option.gpu or session.config.option.network) and manager.get_plugin("terminalreporter"):
        manager.register(FailuresAtOnce(manager.get_plugin("terminalreporter")))


def pytest_sessionfinish(session, exitstatus):
    options, record = session.config.option, session.config.pluginmanager.get_plugin("gpu record")
    chosen = "keyword", "file_or_dir", "collectonly", "lf", "deselect", "ignore", "ignore_glob"
    parts = {options.markexpr} & gpu_record.PARTS if options.markexpr else gpu_record.PARTS
    if record is None or any(getattr(options, name, None) for name in chosen):
        return  # a selection of tests is no complete part
    ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
    if ended and parts and not session.shouldfail:  # shouldfail: stopped by --exitfirst
        record.whole(parts)
    if options.go_on and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK  # all have passed
