"""Triton's interpreter: launches and calls of device functions with less repeated work."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import itertools
import sys
import threading
import types
from collections.abc import Callable


def shorten_launches(interpreter) -> None:
    """Reduce the work of a launch besides its kernel: inspect ``triton.language`` and the kernel's signature once, not
    at every launch and every first call of a device function; pass the address of a CPU tensor without a copy of the
    tensor object.

    Ctrl-C raises KeyboardInterrupt anywhere, also here and in clean-up. So what a launch changes is recorded before it
    is changed, and the next launch completes what is left."""
    function, executor = interpreter.InterpretedFunction, interpreter.GridExecutor
    prepare, launch = executor.__init__, executor.__call__
    language_of, start, apply, restore = _languages(interpreter)
    arguments_of = _arguments_in_place(interpreter)
    launches: list = []  # (thread, object of its own): the first one runs; it may also be one whose end was interrupted
    constexprs: dict = {}  # names by function; the interpreter never frees these functions

    def executor_init(self, fn, arg_names, grid, pre_run_hooks=()) -> None:
        known = constexprs.get(fn)
        if known is None:
            prepare(self, fn, arg_names, grid, pre_run_hooks)
            constexprs[fn] = self.constexprs
        else:
            self.fn, self.arg_names, self.grid, self.pre_run_hooks = fn, arg_names, grid, pre_run_hooks
            self.constexprs = known

    def run_grid(self, arguments) -> None:
        sizes = self.grid(arguments) if callable(self.grid) else self.grid
        assert len(sizes) <= 3, "grid must have at most 3 dimensions"
        sizes = sizes + (1,) * (3 - len(sizes))
        builder, run = interpreter.interpreter_builder, self.fn
        builder.set_grid_dim(*sizes)
        try:
            for place in itertools.product(*map(range, sizes)):
                builder.set_grid_idx(*place)
                run(**arguments)
        except Exception as error:
            if interpreter.triton.knobs.compilation.front_end_debugging:
                raise
            raise interpreter.InterpreterError(repr(error)) from error

    def in_launch(thread) -> bool:
        """Whether a thread is inside of another launch than this one."""
        frame = sys._getframe(2) if thread == threading.get_ident() else sys._current_frames().get(thread)
        while frame is not None and frame.f_code is not grid_call.__code__:
            frame = frame.f_back
        return frame is not None

    def run_arguments(self, args, kwargs) -> None:
        with interpreter.np.errstate(over="ignore", invalid="ignore"):  # GPUs do not report Inf and NaN
            arguments = arguments_of(self, args, kwargs)
            if arguments is None:
                launch(self, *args, **kwargs)
            else:
                run_grid(self, arguments)

    def grid_call(self, *args, **kwargs) -> None:
        mine = threading.get_ident(), object()
        launches.append(mine)
        while (first := launches[0]) is not mine:
            if in_launch(first[0]):  # waiting could deadlock: it may wait for this rank
                launches.remove(mine)
                raise RuntimeError(
                    f"{'this' if first[0] == mine[0] else 'another'} thread of this process is inside of a kernel, and "
                    "Triton's interpreter runs one at a time: on CPUs use communicators in one thread, or in processes "
                    "of their own"
                )
            with contextlib.suppress(ValueError):  # another thread may have removed it
                launches.remove(first)
        try:
            start(language_of(self.fn))
            contextvars.copy_context().run(run_arguments, self, args, kwargs)  # numpy's errstate ends with the context
        finally:
            restore()
            launches.remove(mine)

    def device_call(self, *args, **kwargs) -> object:
        apply(language_of(self.fn))
        try:
            return self.rewrite()(*args, **kwargs)
        except interpreter.InterpreterError:
            raise
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    executor.__init__, executor.__call__, function.__call__ = executor_init, grid_call, device_call


def _languages(interpreter) -> tuple[Callable, Callable, Callable, Callable]:
    """Four functions: language_of(function) identifies the languages in a Python function's globals; start(language)
    and apply(language) set the interpreter's functions in those of a kernel and of a device function, if they are not
    set; restore() resets all of them. Each may be interrupted, and start() then completes restore()."""
    patch, missing, languages = interpreter._patch_lang, interpreter._MISSING, (interpreter.tl, interpreter.tl.core)
    if not hasattr(interpreter._LangPatchScope(), "_changes") or "_LangPatchScope" not in patch.__code__.co_names:
        raise AttributeError("_LangPatchScope")
    changes: dict = {}  # names of languages -> [(object, name, value)]
    originals: dict = {}  # names of languages -> [(object, name, value before)]
    applied: dict = {}  # names of languages -> [(object, name, value before)], before the first of them is set

    @functools.cache
    def language_of(python_function) -> tuple:
        values = python_function.__globals__.values()
        return python_function, frozenset(x.__name__ for x in values if inspect.ismodule(x) and x in languages)

    def apply(language) -> None:
        python_function, names = language
        if any(names <= others for others in applied):
            return
        if names in changes:
            applied[names] = originals[names]
            for changed, name, value in changes[names]:
                setattr(changed, name, value)
            return
        before = [*applied]
        restore()
        scope = interpreter._LangPatchScope()
        applied[names] = scope._changes  # Triton records each value before it sets another
        own = patch.__globals__ | {"_LangPatchScope": lambda: scope}
        types.FunctionType(patch.__code__, own)(python_function)
        places = {(id(changed), name): (changed, name, value) for changed, name, value in reversed(scope._changes)}
        originals[names] = [*places.values()]  # the value before the first change of each place
        changes[names] = [(changed, name, vars(changed)[name]) for changed, name, _ in places.values()]
        for others in before:
            apply((python_function, others))

    def start(language) -> None:
        """Apply a kernel's language, while none is applied. Forget all if another package has set a function since."""
        restore()  # what an interrupted launch has left
        known = originals.get(language[1], ())
        if any(vars(x).get(name, missing) is not value for x, name, value in known):
            changes.clear()
            originals.clear()
        apply(language)

    def restore() -> None:
        for changed, name, value in itertools.chain(*map(reversed, applied.values())):
            if value is not missing:
                setattr(changed, name, value)
            elif name in vars(changed):
                delattr(changed, name)
        applied.clear()

    return language_of, start, apply, restore


def _arguments_in_place(interpreter) -> Callable:
    """A function that returns a kernel's arguments by name, or None if Triton must prepare them: tensors outside of
    CPU memory, tensor descriptors, hooks, and wrong arguments, which Triton rejects."""
    np, convert, handle, tensor = (
        interpreter.np,
        interpreter._implicit_cvt,
        interpreter.TensorHandle,
        interpreter.tl.tensor,
    )
    int32, descriptor = interpreter.tl.int32, interpreter.TensorDescriptor
    pointers: dict = {}  # torch dtype -> type of a pointer
    signatures: dict = {}  # function -> (names, defaults)

    def signature_of(python_function) -> tuple:
        if python_function not in signatures:
            found = inspect.getfullargspec(python_function)
            last = found.args[len(found.args) - len(found.defaults or ()) :]
            others = found.kwonlyargs or found.varargs or found.varkw
            signatures[python_function] = None if others else (found.args, dict(zip(last, found.defaults or ())))
        return signatures[python_function]

    def converted(x) -> object:
        kind = type(x)
        if kind is int and -(1 << 31) <= x < 1 << 31:
            return tensor(handle(np.array([x], dtype=np.int32), int32), int32)
        if getattr(x, "is_cpu", False) is True:
            if x.dtype not in pointers:
                pointers[x.dtype] = convert(x).type
            pointer = pointers[x.dtype]
            return tensor(handle(np.array([x.data_ptr()], dtype=np.uint64), pointer), pointer)
        if isinstance(x, tuple):
            values = map(converted, x)
            return kind(*values) if hasattr(x, "_fields") else kind(values)
        if isinstance(x, descriptor) or hasattr(x, "data_ptr"):
            raise NotInPlaceError
        return convert(x)

    class NotInPlaceError(Exception):
        pass

    def arguments_of(self, args, kwargs) -> dict | None:
        signature = signature_of(self.fn)
        if self.pre_run_hooks or signature is None:
            return None
        names, defaults = signature
        in_order = dict(zip(names, args))
        named = {name: x for name, x in kwargs.items() if name in names}
        arguments = defaults | in_order | named
        if len(args) > len(names) or not in_order.keys().isdisjoint(named) or len(arguments) < len(names):
            return None
        own = self.constexprs
        try:
            return {name: x if name in own else converted(x) for name, x in arguments.items()}
        except NotInPlaceError:
            return None

    return arguments_of


def patch_with_less(core, interpreter, operations) -> None:
    """Patch ``triton.language`` with less work: find the members once, skip the check at each call, and replace members
    by ``operations`` of the same name."""
    checked = core.tensor.__add__.__code__  # of Triton's wrapper that checks for a semantic argument
    found: dict = {}

    def with_semantic(member, semantic) -> Callable:
        if getattr(member, "__code__", None) is checked:
            member = member.__wrapped__

        def call(*args, **kwargs) -> object:
            kwargs["_semantic"] = semantic
            return member(*args, **kwargs)

        return call

    def patch(pkg, builder, scope) -> None:
        if pkg not in found:
            semantic = interpreter.TritonSemantic(builder)
            members = [(name, member) for name, member in inspect.getmembers(pkg) if core.is_builtin(member)]
            calls = [(name, member, with_semantic(member, semantic)) for name, member in members]
            if pkg in (core.tensor, core, interpreter.tl):
                calls = [(n, m, operations[n](call) if n in operations else call) for n, m, call in calls]
            found[pkg] = calls
        for name, member, call in found[pkg]:
            if getattr(pkg, name) is member:  # not patched yet
                scope.set_attr(pkg, name, call)

    interpreter._patch_builtin = patch
