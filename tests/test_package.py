"""The package as a whole: layers, import, installation, documentation."""

from __future__ import annotations

import ast
import glob
import graphlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import tarfile
import textwrap
import types

import conftest
import pytest

import allscan
import allscan.device
import allscan.reference
from allscan.__main__ import main
from allscan.bindings import nvshmem_device
from allscan.comm.heap import source_hash
from support import gpu_record

pytestmark = pytest.mark.cpu
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Folders of the package, and files at its top. Each imports only from its own line's folder or from lines above
ROOMS = """
bindings | bindings.interpreter
base
shmem_kernels
launch
comm
scan | tokens
ops
ops.gla | ops.delta
ops.ssd
__init__ device reference zigzag serving
integrations
tools
__main__
"""


def python_files(*folders):
    for folder in folders:
        yield from glob.glob(os.path.join(ROOT, folder, "**", "*.py"), recursive=True)


def module_name(path):
    """Return a path's module name, relative to ``allscan`` (which is ``__init__``); other folders' names are kept."""
    parts = os.path.relpath(path, ROOT).removesuffix(".py").split(os.sep)
    parts = parts[1:] if parts[0] in ("allscan", "tests") else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imported(path, modules):
    """Yield the modules of ``modules`` that a file imports."""
    own = os.path.relpath(path, ROOT).removesuffix(".py").split(os.sep)
    for node in ast.walk(ast.parse(open(path, encoding="utf-8").read())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*own[: -node.level], node.module or ""] if node.level else [node.module or ""]).strip(".")
            names = [f"{base}.{alias.name}" for alias in node.names] + [base]
        else:
            continue
        names = ["__init__" if name == "allscan" else name.removeprefix("allscan.") for name in names]
        known = [name for name in names if name in modules and modules[name] != path]
        # ``from package import module`` imports the module
        yield from (name for name in known if not any(other.startswith(name + ".") for other in known))


def room_of(name, packages):
    """Return the folder of a module of the package; its own name, if it is at the top."""
    return name if name in packages else name.rpartition(".")[0] or name


@pytest.mark.quick
def test_layers_know_only_what_is_above_them():
    """Each file is in a folder of ROOMS; no two files have one name."""
    paths = {module_name(path): path for path in python_files("allscan")}  # bindings and shmem_kernels are links in it
    packages = {name for name, path in paths.items() if path.endswith("__init__.py")} - {"__init__"}
    lines = [[room.split() for room in line.split("|")] for line in ROOMS.strip().splitlines()]
    places = {name: (i, j) for i, line in enumerate(lines) for j, names in enumerate(line) for name in names}
    assert {room_of(name, packages) for name in paths} == {*places}, "folders, and ROOMS"
    assert len({*places} - packages) <= 6, "files at the top"
    stems = [name.rpartition(".")[2] for name in {*paths} - packages]
    assert len(stems) == len({*stems}), sorted(name for name in stems if stems.count(name) > 1)
    for name, path in paths.items():
        place = places[room_of(name, packages)]
        for other in imported(path, paths):
            above = places[room_of(other, packages)]
            assert above == place or above[0] < place[0], f"{name} imports {other}"
        if name.startswith("shmem_kernels"):
            text = open(path, encoding="utf-8").read()
            assert "torch.distributed" not in text and "import torch" not in text, path


def test_the_tree_in_the_documentation():
    """docs/architecture.md lists all folders and files of the package, and no other."""
    with open(os.path.join(ROOT, "docs", "architecture.md"), encoding="utf-8") as file:
        text = file.read()
    tree, here, found = text.partition("```tree\n")[2].partition("```")[0], "", []
    for line in tree.splitlines():
        folder, files = re.fullmatch(r"(\S+/)?\s+([\w ]+?)(?:  .*)?", line).groups()
        here = folder or here
        found += [f"{here}{name}.py" for name in files.split()]
    paths = {os.path.relpath(path, ROOT).replace(os.sep, "/") for path in python_files("allscan")}
    paths = {path.removeprefix("allscan/") if path.count("/") > 1 else path for path in paths}
    assert sorted(found) == sorted(path for path in paths if not path.endswith("/__init__.py"))
    named = re.findall(r"`((?:allscan|bindings|shmem_kernels)/[\w/]+\.py)`", text)
    assert named and all(os.path.exists(os.path.join(ROOT, path)) for path in named), named


def test_every_module_has_its_tests():
    """A test is in the folder and file of its module's name, or in that given by tests/README.md, which has no other
    entries and none twice."""
    with open(os.path.join(ROOT, "tests", "README.md"), encoding="utf-8") as file:
        lines = [re.findall(r"`([\w/.]+)`", line) for line in file if line.startswith("| `")]
    named = [[x for x in line if not x.endswith(".py")] for line in lines]
    tests = {x for line in lines for x in line if x.endswith(".py")}
    assert not [x for x in tests if not os.path.exists(os.path.join(ROOT, "tests", x))]
    modules = (os.path.relpath(x, os.path.join(ROOT, "allscan")).removesuffix(".py") for x in python_files("allscan"))
    modules = {x.replace(os.sep, "/") for x in modules if not x.endswith("__init__")}
    own = {x for x in modules if os.path.exists(os.path.join(ROOT, "tests", *_test_of(x)))}
    said = [x for line in named for x in line]
    assert sorted(said) == sorted(modules - own), (set(said) ^ (modules - own), said)


def _test_of(module):
    folder, _, name = module.rpartition("/")
    return folder, f"test_{name}.py"


OF_INTERPRETER = "corrections", "fast_blocks", "fast_launches", "fast_operations"
COMPAT = "bindings.torch_compat", "bindings.triton_compat", "bindings.interpreter"
COMPAT += (*(f"bindings.interpreter.{x}" for x in OF_INTERPRETER),)
OF_TRITON = "runtime compiler backends knobs tools language.core".split()  # private parts, which change without notice
OF_KERNELS = "_init_handles packed_metadata launch_cooperative_grid device_caches launch_enter_hook".split()


def private_names(path):
    """Yield private names of torch and Triton that a file imports or uses."""
    roots = {"torch", "triton", "dist", "tl", "aten"}
    for node in ast.walk(ast.parse(open(path, encoding="utf-8").read())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            if node.attr in OF_KERNELS:
                yield node.attr
            names = [ast.unparse(node)] if re.fullmatch(r"[\w.]+", ast.unparse(node)) else []
        for name in names:
            root, _, rest = name.partition(".")
            private = any(part.startswith("_") and not part.startswith("__") for part in rest.split("."))
            inside = root == "triton" and any(f"{rest}.".startswith(f"{inner}.") for inner in OF_TRITON)
            if root in roots and (private or inside):
                yield name


def test_what_torch_and_triton_do_not_promise_is_in_one_place_each():
    paths = {module_name(path): path for path in python_files("allscan")}
    assert all(any(private_names(paths[name])) for name in COMPAT[:2])
    found = {name: sorted({*private_names(path)}) for name, path in paths.items() if name not in COMPAT}
    assert {name: names for name, names in found.items() if names} == {}


@pytest.mark.quick
def test_no_circle_of_imports():
    paths = {module_name(path): path for path in python_files("allscan", "bench", "examples", "tests")}
    graph = {name: set(imported(path, paths)) - {name} for name, path in paths.items()}
    assert any("scan.collective" in others for others in graph.values())
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_import_is_quick_and_needs_no_gpu():
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES="", PYTHONPATH=ROOT)
    # processor time, since other tests run concurrently
    code = "from time import process_time as t; a = t(); import torch; b = t(); import allscan; print(b - a, t() - b)"
    shares = []
    for _ in range(2):  # the first reads from the disk
        done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
        of_torch, own = map(float, done.stdout.split())
        shares.append(own / of_torch)
        if shares[-1] < 0.6:
            break
    assert min(shares) < 0.6, shares


def test_installed_package_imports_outside_the_checkout(tmp_path):
    target = str(tmp_path / "site")
    command = [sys.executable, *"-m pip install -q --no-deps --no-build-isolation --target".split(), target, ROOT]
    config = tmp_path / "build.cfg"  # otherwise setuptools takes files of an earlier build from build/
    config.write_text(f"[build]\nbuild_base = {tmp_path / 'build'}\n")
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"DIST_EXTRA_CONFIG": str(config)})
    code = "import allscan, allscan.device, allscan.bindings.arena as h; print(allscan.__file__, h.__file__)"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": target}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert all(path.startswith(target) for path in done.stdout.split())
    assert sorted(name for name in os.listdir(target) if not name.endswith("info") and name != "bin") == ["allscan"]
    assert os.path.exists(os.path.join(target, "allscan", "py.typed"))
    installed = os.path.join(target, "allscan")
    folders = os.path.join(ROOT, "allscan"), installed
    here, there = ({os.path.relpath(path, folder) for path in python_files(folder)} for folder in folders)
    assert here == there


@pytest.mark.skipif(not os.path.exists(os.path.join(ROOT, ".git")), reason="needs git")
def test_a_checkout_without_symbolic_links(tmp_path):
    """It can be imported in place, and has the same sources as one with links."""
    clone = str(tmp_path / "clone")
    subprocess.run(["git", "clone", "-q", "-c", "core.symlinks=false", ROOT, clone], check=True, capture_output=True)
    assert os.path.isfile(os.path.join(clone, "allscan", "bindings"))
    code = """
        import os, allscan, allscan.tools.ranks as ranks, allscan.bindings.arena as h, allscan.shmem_kernels.scan as s
        from allscan.comm.heap import source_hash
        print(os.path.dirname(allscan.__file__), h.__file__, s.__file__, source_hash())
    """
    paths = python(code, tmp_path, PYTHONPATH=clone).stdout.split()
    assert len(paths) == 4 and all(path.startswith(clone) for path in paths[:3]), paths
    if not subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True).stdout:
        assert paths[3] == source_hash()


def python(code, tmp_path, **environment):
    """Run a user's program in an empty folder."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | {"PYTHONPATH": ROOT, "TRITON_INTERPRET": "1"} | environment,
    )


def test_modules_are_imported_when_they_are_asked_for(tmp_path):
    code = "import allscan; print(allscan.reference.gla_reference.__name__, allscan.integrations.softmax.__name__)"
    done = python(code, tmp_path)
    assert done.stdout.split() == ["gla_reference", "allscan.integrations.softmax"], done.stderr


PACKAGE_OF = dict(
    fla="flash-linear-attention",
    fla_cp="flash-linear-attention",
    megatron="megatron-core",
    ringmaster="axolotl-ringmaster",
    transformers="transformers",
)


def test_a_missing_package_is_named(tmp_path):
    """The error names the package on the index, which differs from the module."""
    code = f"""
        import sys, importlib
        from importlib import metadata
        class Nothing:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("fla", "megatron", "ringmaster", "transformers"):
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        sys.meta_path.insert(0, Nothing())
        version, absent = metadata.version, {[*PACKAGE_OF.values()]}
        metadata.version = lambda name: version("no such" if name in absent else name)
        for module in {[*PACKAGE_OF]}:
            try:
                importlib.import_module("allscan.integrations." + module).sequence_parallel
            except ImportError as error:
                print(" ".join(str(error).split()))
    """
    done = python(code, tmp_path)
    lines = done.stdout.splitlines()
    assert len(lines) == len(PACKAGE_OF), done.stdout + done.stderr
    for line, package in zip(lines, PACKAGE_OF.values(), strict=True):
        assert f"needs {package}" in line and f"pip install '{package}" in line, line


def test_a_forgotten_init_process_group_is_rejected(tmp_path):
    """Without it, processes started by torchrun would each be a rank of one."""
    code = """
        import os, allscan
        allscan.Communicator(transport='shm').close()
        print("one rank")
        os.environ |= dict(RANK="1", WORLD_SIZE="3")
        allscan.Communicator(transport='shm')
    """
    done = python(code, tmp_path)
    assert done.returncode != 0 and "one rank" in done.stdout, done
    assert "torch.distributed.init_process_group first" in done.stderr


@pytest.mark.slow(but="triton")
@pytest.mark.parametrize(
    "first, then, value, words",
    [
        ("allscan", "os", "1", "set too late: triton and allscan had"),
        ("triton", "allscan", "1", "set too late: triton had"),
        ("allscan", "os", "0", "is off, and was on when triton and allscan were imported"),
    ],
)
def test_triton_interpret_that_is_set_too_late(first, then, value, words, tmp_path):
    """Triton reads the variable when kernels are defined."""
    code = f"import os, {first}; os.environ['TRITON_INTERPRET'] = '{value}'; import {then}, allscan"
    code += "; allscan.Communicator()"
    done = python(code, tmp_path, TRITON_INTERPRET=str(1 - int(value)))
    assert done.returncode == 1 and words in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("fla"), reason="needs flash-linear-attention")
def test_delta_rules_run_on_cpu_ranks_without_patches(tmp_path):
    """Alone and in a model of fla's, forward and backward, with a user's environment."""
    code = """
        import os, torch, torch._dynamo, torch.distributed as dist, torch.nn.functional as F
        from fla.models import KDAConfig, KDAForCausalLM
        import allscan
        rank = int(os.fork() == 0)  # both ranks have all imports
        dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=rank, world_size=2)
        with allscan.Communicator() as comm:
            torch.manual_seed(0)
            q, k, v, g = (torch.randn(1, 40, 2, 16).requires_grad_() for _ in "qkvg")
            rest = v, -g.abs(), torch.rand(1, 40, 2)
            o, _ = allscan.zeco_kda(q, F.normalize(k, dim=-1), *rest, comm=comm, chunk="fla")
            o.sum().backward()
            options = dict(hidden_size=32, num_hidden_layers=1, num_heads=1, head_dim=16, vocab_size=32)
            model = allscan.integrations.fla.sequence_parallel(KDAForCausalLM(KDAConfig(**options)), comm=comm)
            tokens = torch.randint(32, (1, 8))
            model(input_ids=tokens, labels=tokens).loss.backward()
            assert all(x.grad.isfinite().all() for x in (q, k, v, g, *model.parameters()))
            print("right", flush=True)
        dist.destroy_process_group()
        assert rank or os.wait()[1] == 0
    """
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(code))
    environment = {name: x for name, x in os.environ.items() if name != "FLA_CACHE_RESULTS"}
    environment |= {"PYTHONPATH": ROOT, "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(program)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    assert done.stdout.count("right") == 2, done.stdout + done.stderr


@pytest.mark.quick
def test_public_things_are_documented():
    public = [getattr(allscan, name) for name in allscan.__all__]
    public += [getattr(allscan.device, name).fn for name in allscan.device.__all__ if name[0].islower()]
    public += [f for name, f in vars(nvshmem_device).items() if inspect.isfunction(f) and not name.startswith("_")]
    for thing in public:
        assert inspect.getdoc(thing), thing


def functions(node, compiled=False):
    """Yield (function, whether Triton compiles it or an enclosing function) for all below ``node``."""
    for child in ast.iter_child_nodes(node):
        inside = compiled
        if isinstance(child, ast.FunctionDef):
            inside = compiled or any("jit" in ast.unparse(decorator) for decorator in child.decorator_list)
            yield child, inside
        yield from functions(child, inside)


def host_functions():
    """Yield (path, function) of the package's functions that Triton does not compile: it would read annotations."""
    for path in python_files("allscan"):  # bindings and shmem_kernels are links in it
        with open(path, encoding="utf-8") as file:
            yield from ((path, f) for f, compiled in functions(ast.parse(file.read())) if not compiled)


@pytest.mark.quick
def test_every_function_says_what_it_returns():
    missing = [f"{path}:{x.lineno} {x.name}" for path, x in host_functions() if x.returns is None]
    assert not missing, "\n".join(missing)


OF_THE_INTERPRETER = *(f"{x}.py" for x in OF_INTERPRETER), "rails.py"  # functions that replace Triton's


@pytest.mark.quick
def test_every_parameter_has_a_type():
    """Except for unused parameters, whose names begin with an underscore."""
    missing = []
    for path, function in host_functions():
        device = any(name in ast.unparse(x) for x in function.decorator_list for name in ("builtin", "extern"))
        given = function.args
        taken = *given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg
        untyped = [x.arg for x in taken if x and x.annotation is None and x.arg.strip("_") and x.arg[0] != "_"]
        untyped = [name for name in untyped if name not in ("self", "cls")]
        if os.path.basename(path) not in OF_THE_INTERPRETER and not device and untyped:
            missing.append(f"{path}:{function.lineno} {function.name} {untyped}")
    assert not missing, "\n".join(missing)


def test_kernels_say_what_each_pointer_is():
    """The parameter's line has a comment with dtype and shape."""
    bare = []
    for path in python_files("shmem_kernels"):
        with open(path, encoding="utf-8") as file:
            text = file.read()
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                lines = [(x.arg, text.splitlines()[x.lineno - 1]) for x in node.args.args if x.arg.startswith("p_")]
                bare += [f"{path} {node.name}: {name}" for name, line in lines if "  # " not in line]
    assert not bare, "\n".join(bare)


@pytest.mark.quick
def test_types_are_consistent():
    pytest.importorskip("mypy")
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_doctor(monkeypatch, capsys):
    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["allscan", *arguments])
        return main(), capsys.readouterr().out

    status, told = command("doctor")
    assert status == 0, told
    words = "torch", "Triton", "NVSHMEM", "transport   shm"
    for word in (*words, "GPU tests", "self-test   3 ranks on cpu"):
        assert word in told
    assert command()[0] == 2
    for option, words in (("--version", allscan.__version__), ("--help", "allscan doctor")):
        status, told = command(option)
        assert status == 0 and words in told


def test_the_record_of_gpu_tests(tmp_path):
    """The record adds up its two parts; an interrupted part, or one with other tests, counts once all of its tests have
    run."""
    folder = tmp_path / "gpu"
    folder.mkdir()
    of = dict(gpus=["a GPU"], versions={}, sha256="of sources", support="of support", files={"a": "of a", "b": "of b"})

    def session(marks, results, exitstatus=0, shouldfail=False, of=of, **options):
        made = gpu_record.Record(str(folder), of)
        for test, outcome in results.items():
            when = "setup" if outcome in ("skipped", "error") else "call"
            outcome = "failed" if outcome == "error" else outcome
            report = dict(nodeid=test, when=when, outcome=outcome, keywords={marks: 1}, duration=1.0)
            report["longreprtext"] = f"why {test} did not pass"
            made.pytest_runtest_logreport(
                types.SimpleNamespace(**report, failed=outcome == "failed", skipped=outcome == "skipped")
            )
        empty = dict(keyword="", file_or_dir=[], collectonly=False)
        config = types.SimpleNamespace(
            option=types.SimpleNamespace(markexpr=marks, go_on=False, **empty | options),
            pluginmanager=types.SimpleNamespace(get_plugin=lambda name: made),
        )
        conftest.pytest_sessionfinish(types.SimpleNamespace(config=config, shouldfail=shouldfail), exitstatus)
        path = folder / "last_run.json"
        found = json.loads(path.read_text()) if path.exists() else {}
        return found.get("parts"), [found.get(kind) for kind in gpu_record.OUTCOMES], found.get("tests_that_failed")

    nothing = None, [None] * 4, None
    assert session("not alone", dict(a="passed", b="failed"), exitstatus=2) == nothing
    assert session("not alone", dict(b="failed"), 1, "stopping after 1 failures") == nothing
    assert session("quick", dict(c="skipped")) == session("not alone", {}, lf=True) == nothing
    assert session("not alone", {}, deselect=["test_gla.py"]) == nothing
    with open(folder / "results.jsonl", "a") as file:
        file.write('["d", "pas')  # interrupted
    assert session("not alone", dict(b="error"), exitstatus=1) == (["not alone"], [1, 0, 1, 1], ["b"])
    assert session("alone", dict(e="passed")) == (["not alone", "alone"], [2, 0, 1, 1], ["b"])
    assert session("not alone", dict(b="passed"))[1:] == ([3, 0, 0, 1], [])
    assert json.loads((folder / "last_run.json").read_text())["tests_that_passed_again"] == ["b"]
    assert json.loads((folder / "seconds.json").read_text()) == dict(a=1.0, b=1.0, e=1.0)
    of_each = {test: outcome for test, (outcome, _) in gpu_record.read(str(folder))[1].items()}
    assert of_each == dict(a="passed", b="passed", c="skipped", e="passed")
    lines = [line for line in gpu_record.read_lines(str(folder)) if isinstance(line, list)]
    why = {test: more for test, what, _, _, *more in lines if what == "failed"}
    assert why == dict(b=["why b did not pass"])
    others = of | dict(sha256="others")
    session("not alone", dict(a="passed", b="failed"), exitstatus=2, of=others)
    assert session("alone", dict(e="passed"), of=others) == (["alone"], [1, 0, 0, 0], [])
    others["support"] = "others"
    assert session("", dict(e="failed"), 1, of=others) == (["not alone", "alone"], [0, 1, 0, 0], ["e"])
    session("", {"a::1": "passed", "b::1": "failed"}, exitstatus=2, of=others)
    others["files"] = {"a": "of a", "b": "others"}  # results of its tests alone are deleted, and both parts incomplete
    session("", {}, exitstatus=2, of=others)
    assert gpu_record.read(str(folder))[1:] == ({"a::1": ("passed", "not alone")}, set())
    assert session("", {"b::1": "passed"}, of=others) == (["not alone", "alone"], [2, 0, 0, 0], [])


@pytest.mark.parametrize("first, again, second", [(0, 1, 0), (1, 0, 0), (1, 1, 0), (2, 0, 0), (0, 1, 1)])
def test_make_test_gpu_fails_where_a_part_does(tmp_path, first, again, second):
    """Tests that failed with many concurrent others run again with few, and the second result counts."""
    python = tmp_path / "python"
    cases = f'*"not alone"*--go-on*) echo again; exit {again};; *"not alone"*) exit {first};;'
    python.write_text(f'#!/bin/sh\ncase "$*" in {cases} esac\necho second\nexit {second}\n')
    python.chmod(0o755)
    made = subprocess.run(["make", "-s", "test-gpu", f"PYTHON={python}"], cwd=ROOT, capture_output=True, text=True)
    assert "second" in made.stdout and ("again" in made.stdout) == (first == 1)
    assert bool(made.returncode) == bool(second or (again if first == 1 else first))


@pytest.mark.parametrize("has_all", [True, False])
def test_make_test_gpu_finds_its_python(tmp_path, has_all):
    """It takes python3 if that has the packages for GPU tests; else an environment with CUDA's packages is created."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    for name, path in (("python3", tmp_path / "python3"), ("of venv", venv / "bin" / "python")):
        check = f'case "$*" in "-c import pytest"*"assert torch.cuda"*) exit {int(not has_all)};; esac'
        path.write_text(f'#!/bin/sh\n{check}\necho "{name}: $*"\n')
        path.chmod(0o755)
    (venv / "ready").touch()  # newer than pyproject.toml
    of_make = "PYTHON", "MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS"  # make may have started this test
    environment = {name: x for name, x in os.environ.items() if name not in of_make}
    environment["PATH"] = os.pathsep.join((str(tmp_path), environment["PATH"]))
    command = ["make", "-s", "test-gpu", f"VENV={venv}"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    lines = made.stdout.splitlines()
    assert made.returncode == 0 and len(lines) == (2 if has_all else 3), made
    assert all(line.startswith("python3: " if has_all else "of venv: ") for line in lines), lines
    assert has_all or "-e .[cuda13" in lines[0]
    assert "-m pytest --gpu -m alone" in lines[-1]


@pytest.mark.slow
def test_pytest_runs_in_an_unpacked_sdist(tmp_path):
    """It has all tests and their files: all are collected, and some of each type pass."""
    code = f"import setuptools.build_meta as b; print(b.build_sdist({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    environment = {name: x for name, x in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}

    chosen = "layers_know or public_things or short or (test_values and shape2-decay_shape2-4)"
    options = ["-p", "no:cacheprovider", "-vv", "-m", "quick", "-k", chosen]
    code = f"""
        import sys
        sys.path.insert(0, ".")
        import allscan.bindings, pytest
        print(allscan.bindings.__file__)
        class Collected:
            def pytest_itemcollected(self, item):
                files.add(item.path.name)
        files = set()
        status = pytest.main({options}, plugins=[Collected()])
        print("collected:", *files)
        sys.exit(status)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and done.stdout.startswith(str(folder)), done.stdout + done.stderr
    assert re.search(r"^collected: .*\btest_transformers.py", done.stdout, re.MULTILINE), done.stdout
    for name in ("test_package", "test_docs", "scan/test_collective"):
        assert re.search(rf"tests/{name}.py::.* PASSED", done.stdout), (name, done.stdout)


@pytest.mark.quick
def test_the_changelog_begins_with_this_version():
    """As .github/workflows/release.yml compares them with a tag, which also wants a date."""
    with open(os.path.join(ROOT, "CHANGELOG.md"), encoding="utf-8") as file:
        version, date = re.search(r"^## \[(.+)\] - (.+)$", file.read(), re.MULTILINE).groups()
    assert version == allscan.__version__ and re.fullmatch(r"unreleased|\d{4}-\d\d-\d\d", date)


@pytest.mark.parametrize("url", ["", "https://example.org/allscan"])
def test_the_readme_on_the_package_index(url, monkeypatch):
    """The index renders it, without a link or a picture relative to a checkout."""
    markdown = pytest.importorskip("readme_renderer.markdown")
    monkeypatch.chdir(ROOT)
    given = {}
    monkeypatch.setattr("setuptools.setup", given.update)
    with open("setup.py", encoding="utf-8") as file:
        exec(re.sub(r'^URL = ".*"$', f"URL = {url!r}", file.read(), flags=re.MULTILINE), {})
    html = markdown.render(given["long_description"])
    assert html is not None and "<h2" in html and "<table" in html
    places = re.findall(r'(?:href|src)="([^"]*)"', html)
    assert places and all(place.startswith(("https://", "#")) for place in places), places
    assert any(place.startswith(url + "/blob/main/docs/") for place in places) == bool(url)
    assert any(place.startswith(url + "/raw/main/bench/") for place in places) == bool(url)
    assert "](" not in html
    assert bool(given["project_urls"]) == bool(url) and all(x.startswith(url) for x in given["project_urls"].values())
