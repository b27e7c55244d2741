"""All private Triton functions that allscan uses, except the interpreter's (interpreter/); a new Triton may
change them. Bound once, at import.

Checked against the sources of Triton 3.6 to 3.9:

* 3.6: each signature has its own launcher, a C module that takes the arguments one by one.
* 3.7: one launcher for all kernels takes the arguments in a tuple, with annotations and the signature's types.
* 3.8: a compiled kernel unloads its CUDA module when it is garbage-collected: see ``hold``.
* 3.9: warns without an explicit ``enable_fp_fusion``: 3.10 will not contract products and sums by default.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget as GPUTarget  # with ASTSource for tools/compiled.py
from triton.compiler import ASTSource as ASTSource
from triton.language import core  # builtins: inline assembly, functions of linked libraries, ``_semantic``
from triton.runtime.cache import get_cache_manager as get_cache_manager
from triton.runtime.jit import JITCallable

# Options of all kernels of this package: x * y + z is rounded once, as for the errors in docs/versions.md
OPTIONS: dict[str, Any] = {"enable_fp_fusion": True}

_ONE_BY_ONE = triton.__version__.startswith("3.6.")
_IN_A_TUPLE = triton.__version__.startswith(("3.7.", "3.8.", "3.9."))

_held: set[Any] = set()


def hold(compiled: Any) -> None:
    """Keep a compiled kernel for the rest of the process. Launches and callers' CUDA graphs hold only its
    handle, and from Triton 3.8 on a deleted kernel unloads its module."""
    _held.add(compiled)


def launcher(
    compiled: Any,
    grid: tuple[int, int, int],
    arguments: Sequence[Any],
    places: Sequence[int],
    stream_of: Callable[[int], int],
    device: int,
) -> Callable[[Sequence[Any]], Any]:
    """Return ``launch(addresses)``: it launches a compiled kernel on ``stream_of(device)`` and returns the kernel.

    arguments: all arguments of the Python function, in its order. places: the positions that ``addresses`` replaces
    (tuples for tuples). Arguments are not checked. For a kernel without scratch memory this takes 1 us less than
    ``compiled.run``; an unknown Triton version uses ``compiled.run``.
    """
    hold(compiled)
    x, y, z = grid
    run, function = compiled.run, compiled.function
    options: tuple = (function, compiled.packed_metadata, None, None, None)  # no metadata, no hooks
    scratch = getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1)
    bare = not scratch and not getattr(run, "gsan_enabled", False)
    first = [*places] == [*range(len(places))]
    template, rest = [*arguments], [*arguments[len(places) :]]

    in_a_tuple = bare and _IN_A_TUPLE
    if in_a_tuple:
        launch_options = run.launch_cooperative_grid, run.launch_pdl, *options[1:], None, None
        options = (function, *launch_options, run.arg_annotations, run.kernel_signature)
        run = run.launch
    elif bare and _ONE_BY_ONE:
        options = (function, run.launch_cooperative_grid, run.launch_pdl, None, None, *options[1:])
        run = run.launch

    def launch(addresses: Sequence[Any]) -> Any:
        if first:
            values = [*addresses, *rest]
        else:
            values = template.copy()
            for place, address in zip(places, addresses):
                values[place] = address
        if in_a_tuple:
            run(x, y, z, stream_of(device), *options, values)
        else:
            run(x, y, z, stream_of(device), *options, *values)
        return compiled

    return launch


def launchable(addresses: Sequence[int]) -> bool:
    """Check whether kernels may be launched with these addresses without Triton: all are multiples of 16, as the
    kernels were compiled for, and no launch hook is set."""
    bits = 0
    for address in addresses:  # half the time of functools.reduce
        bits |= address
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return not (bits & 15 or getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def interpreting() -> bool:
    """Check whether a kernel defined now is interpreted."""
    return knobs.runtime.interpret


def module_of(compiled: Any) -> int:
    """Load a compiled kernel's CUDA module if necessary, and return its handle. After the kernel is deleted another
    module may get the same handle."""
    compiled._init_handles()
    return int(compiled.module)


def unwrapped(x: Any) -> Any:
    """Return the value of a constexpr, or ``x`` itself."""
    return core._unwrap_if_constexpr(x)


def warps_of(semantic: Any) -> int:
    """Return the number of warps of the kernel being compiled."""
    return semantic.builder.options.num_warps


class _Source(JITCallable):
    """Adds a Python function's source to the cache key of a compiled kernel."""

    cache_key = ""
    used_global_vals: dict = {}

    def __init__(self, function: Any) -> None:
        self.cache_key = hashlib.sha256(inspect.getsource(function).encode()).hexdigest()


def functions_of(library: str, names: Sequence[str]) -> str:
    """Extract functions and their dependencies from a bitcode library into LLVM text in Triton's cache; return its
    path.

    A kernel linked with the extract has the same code: Triton reads the whole library for each kernel, and links only
    the functions that the kernel calls. Raises one of ``NOT_SO_IN_THIS_TRITON`` if Triton's LLVM interface differs.
    """
    with open(library, "rb") as file:
        content = hashlib.sha256(file.read()).hexdigest()
    cache = get_cache_manager(hashlib.sha256(repr((content, triton.__version__, names)).encode()).hexdigest())
    if (found := cache.get_file("functions.ll")) is not None:
        return found
    return cache.put(_text_of(library, names), "functions.ll", binary=False)


NOT_SO_IN_THIS_TRITON = ImportError, AttributeError, TypeError, RuntimeError


def _text_of(library: str, names: Sequence[str]) -> str:
    """Link ``library`` into a module that only declares ``names``, as triton.backends.nvidia does; return its text."""
    from triton._C.libtriton import ir, llvm, nvidia

    dialects = ir.context()
    ir.load_dialects(dialects)
    nvidia.load_dialects(dialects)
    with tempfile.NamedTemporaryFile("w", suffix=".mlir") as file:
        file.write("module {\n" + "".join(f"  llvm.func @{name}()\n" for name in names) + "}\n")
        file.flush()
        declared = ir.parse_mlir_module(file.name, dialects)
    llvm.init_targets()
    context = llvm.context()
    linked = llvm.to_module(declared, context)
    llvm.attach_datalayout(linked, "nvptx64-nvidia-cuda", "sm_90", "")
    llvm.link_extern_libs(linked, [library])
    text = str(linked)
    del linked, context  # in this order
    if missing := [name for name in names if not re.search(rf"^define .*@{name}\(", text, re.M)]:
        raise RuntimeError(f"{library} has no {missing}")
    # linking makes functions internal; they must be visible to be linked again
    return re.sub("^define internal ", "define ", text, flags=re.M)


def builtin(function: Any) -> Callable:
    """Make a Python function callable from kernels: the compiler calls it with a builder, the interpreter without one.
    A change of its source recompiles the kernels that call it; Triton alone tracks the sources of jit functions
    only."""
    setattr(function, core.TRITON_BUILTIN, True)
    function.__triton_aggregate__, function.hash_attrs = True, [_Source(function)]
    return function
