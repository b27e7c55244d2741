"""Speeds up Triton's interpreter: this package's kernels run about fifteen times as fast, with the same results.
``prepare_interpreter`` also fixes other needs of CPU ranks.

Triton's interpreter (3.6 to 3.9) patches ``triton.language`` again at every call of a device function, computes the
type and shape of each block again at every operation, and repeats each integer operation to detect overflow. Here
patches, types and shapes are cached. The overflow check and numpy's overflow warnings are off, as in compiled kernels.
The most frequent operations are single numpy calls (interpreter_operations.py). A change that needs an attribute which
the installed Triton lacks is skipped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from .interpreter_operations import operations_by_numpy

if TYPE_CHECKING:
    from numpy import dtype as NumpyType
    from numpy import ndarray as Array
    from triton.language.core import block_type as BlockType
    from triton.language.core import tensor as Block
    from triton.runtime.interpreter import TensorHandle


MOST_BLOCKS = 256  # remembered blocks of one number each, of each kind


@functools.cache
def prepare_interpreter() -> None:
    """Patch the interpreter for the rest of this process: speed, and autotuned kernels of other packages. Afterwards
    this process cannot compile kernels: the interpreter and the compiler share classes."""
    with contextlib.suppress(ImportError, AttributeError):
        from triton.runtime import autotuner, interpreter

        _skip_autotuning(autotuner, interpreter)
        _let_blocks_be_loop_bounds(interpreter)
        _keep_masks_bool(interpreter)
    try:
        from triton.language import core
        from triton.runtime import interpreter

        _shorten_launches(interpreter)
        _remember_types(core, interpreter)
        _shorten_operations(core, interpreter)
        _remember_blocks(core, interpreter)
        _patch_with_less(core, interpreter, operations_by_numpy(core, interpreter))
    except (ImportError, AttributeError):
        pass


def _skip_autotuning(autotuner, interpreter) -> None:
    """Use the first configuration after pruning for interpreted kernels: Triton's autotuner needs a GPU driver
    (flash-linear-attention's kernels on CPU ranks)."""
    run = autotuner.Autotuner.run

    def first_configuration(self, *args, **kwargs) -> object:
        kernel = self.fn
        while not isinstance(kernel, interpreter.InterpretedFunction) and hasattr(kernel, "fn"):
            kernel = kernel.fn
        configs = self.configs
        if len(configs) < 2 or not isinstance(kernel, interpreter.InterpretedFunction):
            return run(self, *args, **kwargs)
        self.nargs = dict(zip(self.arg_names, args))
        self.configs = [self.prune_configs(kwargs)[0]]
        try:
            return run(self, *args, **kwargs)
        finally:
            self.configs = configs

    autotuner.Autotuner.run = first_configuration


def _let_blocks_be_loop_bounds(interpreter) -> None:
    """Let ``range`` accept interpreted scalars: they are arrays of shape [1], no valid index in numpy 2.4 and later."""
    patch = interpreter._patch_lang_tensor

    def with_index(tensor, *scope) -> None:
        patch(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = with_index


def _keep_masks_bool(interpreter) -> None:
    """Keep a scalar condition boolean when it is broadcast to a block. Triton makes it int32, and the loads and stores
    of Triton 3.9 reject such a mask."""
    builder = interpreter.InterpreterBuilder
    splat = builder.create_splat

    def create_splat(self, ret_ty, arg) -> TensorHandle:
        if not ret_ty.scalar.is_int1():
            return splat(self, ret_ty, arg)
        value = arg.data[0] if isinstance(arg.dtype, interpreter.tl.block_type) else arg.data
        return interpreter.TensorHandle(interpreter.np.full(ret_ty.shape, value, dtype=bool), interpreter.tl.int1)

    builder.create_splat = create_splat


def _shorten_launches(interpreter) -> None:
    """Reduce the work of a launch besides its kernel: inspect ``triton.language`` and the kernel's signature once, not
    at every launch and every first call of a device function; pass the address of a CPU tensor without a copy of the
    tensor object."""
    function, executor = interpreter.InterpretedFunction, interpreter.GridExecutor
    prepare, launch = executor.__init__, executor.__call__
    language_of, start, apply, restore = _languages(interpreter)
    arguments_of = _arguments_in_place(interpreter)
    launching = threading.Lock()  # held during a launch
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

    def grid_call(self, *args, **kwargs) -> None:
        if not launching.acquire(blocking=False):  # waiting could deadlock: the other launch may wait for this rank
            raise RuntimeError(
                "another thread of this process is inside of a kernel, and Triton's interpreter runs one at a time: on "
                "CPUs use communicators in one thread, or in processes of their own"
            )
        with contextlib.ExitStack() as stack:
            stack.callback(launching.release)
            stack.callback(restore)
            start(language_of(self.fn))
            with interpreter.np.errstate(over="ignore", invalid="ignore"):  # GPUs do not report Inf and NaN
                arguments = arguments_of(self, args, kwargs)
                if arguments is None:
                    launch(self, *args, **kwargs)
                else:
                    run_grid(self, arguments)

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
    set; restore() resets all of them."""
    patch, missing, languages = interpreter._patch_lang, interpreter._MISSING, (interpreter.tl, interpreter.tl.core)
    if not hasattr(interpreter._LangPatchScope(), "_changes"):
        raise AttributeError("_changes")
    changes: dict = {}  # names of languages -> [(object, name, value)]
    originals: dict = {}  # names of languages -> {(id, name): (object, name, value before)}
    applied: list = []  # names of languages

    @functools.cache
    def language_of(python_function) -> tuple:
        values = python_function.__globals__.values()
        return python_function, frozenset(x.__name__ for x in values if inspect.ismodule(x) and x in languages)

    def apply(language) -> None:
        python_function, names = language
        if any(names <= others for others in applied):
            return
        if names not in changes:
            before = [*applied]
            restore()
            remember(names, patch(python_function)._changes)
            for others in before:
                apply((python_function, others))
        else:
            for changed, name, value in changes[names]:
                setattr(changed, name, value)
        applied.append(names)

    def start(language) -> None:
        """Apply a kernel's language, while none is applied. Forget all if another package has set a function since."""
        known = originals.get(language[1], {}).values()
        if any(vars(x).get(name, missing) is not value for x, name, value in known):
            changes.clear()
            originals.clear()
        apply(language)

    def remember(names, patched) -> None:
        places = {(id(changed), name): (changed, name, value) for changed, name, value in reversed(patched)}
        originals[names] = places  # the value before the first change of each place
        changes[names] = [(changed, name, vars(changed)[name]) for changed, name, _ in places.values()]

    def restore() -> None:
        places = originals[applied[0]] if applied else {}
        for names in applied[1:]:
            places = places | originals[names]
        applied.clear()
        for changed, name, value in places.values():
            if value is missing:
                delattr(changed, name)
            else:
                setattr(changed, name, value)

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


def _remember_types(core, interpreter) -> None:
    block_type_init, np_dtype_of = core.block_type.__init__, interpreter._get_np_dtype
    block_types: dict = {}
    shapes: dict = {}

    def block_type(self, element_ty, shape) -> None:
        key = element_ty.name, *(size.value if isinstance(size, core.constexpr) else size for size in shape)
        known = block_types.get(key)
        if known is None:
            block_type_init(self, element_ty, shape)
            block_types[key] = dict(self.__dict__)
        else:
            self.__dict__.update(known)

    with_element = core.block_type.with_element_ty

    def with_element_ty(self, scalar_ty) -> BlockType:
        if scalar_ty.is_ptr():
            return with_element(self, scalar_ty)
        key = self.name, scalar_ty.name
        if key not in elements:
            elements[key] = with_element(self, scalar_ty)
        return elements[key]

    elements: dict = {}
    core.block_type.with_element_ty = with_element_ty

    def handle(self, data, dtype, attr=None) -> None:  # without the check of element sizes
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    interpreter.TensorHandle.__init__ = handle
    tensor_init = core.tensor.__init__

    def tensor(self, handle, type) -> None:
        key = type.shape.values if type.is_block() else ()
        key = (*key,)
        known = shapes.get(key)
        if known is None:
            tensor_init(self, handle, type)
            shapes[key] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor

    np_dtypes: dict = {}

    def np_dtype(tt_dtype) -> NumpyType:
        name = tt_dtype.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = np_dtype_of(tt_dtype)
        return np_dtypes[name]

    interpreter._get_np_dtype = np_dtype


def _shorten_operations(core, interpreter) -> None:
    builder, semantic = interpreter.interpreter_builder, interpreter.TritonSemantic
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    check = semantic.binary_op_type_checking_impl
    alike = {core.float32.name, core.int32.name, core.int64.name}  # two operands of one such type need no promotion

    constants: dict = {}

    def constant(block, number) -> Block | None:
        """Return a Python number as a block of ``block``'s type and shape; None if the result has another type."""
        of_floats = block.dtype.name == core.float32.name
        if not block.type.is_block() or block.dtype.name not in alike or number != number:
            return None
        if type(number) is not int and not (of_floats and type(number) is float) or str(number) == "-0.0":
            return None
        key = block.dtype.name, number, *block.type.shape.values
        if key not in constants:
            if len(constants) >= MOST_BLOCKS:
                constants.clear()
            dtype = interpreter._get_np_dtype(block.dtype)
            data = interpreter.np.full(block.type.shape.values, number, dtype=dtype)
            constants[key] = core.tensor(interpreter.TensorHandle(data, block.dtype), block.type)
        return constants[key]

    def types_of_operands(self, lhs, rhs, *options, **named) -> tuple[Block, Block]:
        if isinstance(lhs, core.tensor) and isinstance(rhs, core.tensor):
            name = lhs.dtype.name
            if name == rhs.dtype.name and name in alike and lhs.type.is_block() == rhs.type.is_block():
                return common_shape(self, lhs, rhs)
        elif isinstance(lhs, core.tensor) and (number := constant(lhs, rhs)) is not None:
            return lhs, number
        return check(self, lhs, rhs, *options, **named)

    broadcast = semantic.broadcast_impl_value
    common: dict = {}

    def common_shape(self, lhs, rhs) -> tuple[Block, Block]:
        if not (lhs.type.is_block() and rhs.type.is_block()) or len(lhs.type.shape) != len(rhs.type.shape):
            return broadcast(self, lhs, rhs)
        key = *lhs.type.shape.values, None, *rhs.type.shape.values
        if key not in common:
            found = broadcast(self, lhs, rhs)
            common[key] = list(found[0].type.shape.values)
            return found
        shape = common[key]
        return tuple(
            x
            if x.type.shape.values == shape
            else core.tensor(self.builder.create_broadcast(x.handle, shape), core.block_type(x.type.scalar, shape))
            for x in (lhs, rhs)
        )

    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = types_of_operands, common_shape

    as_tensor, scalar_constant, cast = semantic.to_tensor, semantic.scalar_constant, semantic.cast
    tensor, handle, unwrap, constexpr = core.tensor, interpreter.TensorHandle, core._unwrap_if_constexpr, core.constexpr
    scalars: dict = {}

    def to_tensor(self, x, check_type=True) -> Block:
        return x if type(x) is tensor else as_tensor(self, x, check_type)

    def scalar(self, value, dtype) -> Block:
        if dtype is None or value != value:
            return scalar_constant(self, value, dtype)
        key = type(value), value or str(value), dtype.name  # -0.0 == 0.0
        if key not in scalars:
            scalars[key] = scalar_constant(self, value, dtype).handle
        return tensor(handle(scalars[key].data, scalars[key].dtype), dtype)

    def cast_to(self, input, dtype, rounding=None) -> Block:
        known, wanted = input.type.scalar, dtype.scalar
        if known is wanted or known.name == wanted.name and not known.is_ptr():
            return input
        return cast(self, input, dtype, rounding)

    plain = {tensor, int, float, bool, str, type(None), core.dtype, core.block_type, core.pointer_type}

    def unwrapped(x) -> object:
        kind = type(x)
        return x.value if kind is constexpr else x if kind in plain else unwrap(x)

    np, convert = interpreter.np, interpreter._convert_float

    def convert_float(data, known, wanted, rounding) -> Array:
        """Convert between float32 and bfloat16 by shifts: bfloat16 is the upper half of float32."""
        wide, narrow = core.float32.name, core.bfloat16.name
        if rounding is None and {known.name, wanted.name} == {wide, narrow}:
            up = wanted.name == wide
            bits = np.array(data, order="C").view(np.uint16 if up else np.uint32).astype(np.uint32) << (16 * up)
            if not (((bits & 0x7F800000) == 0) & ((bits & 0x7FFFFF) != 0)).any():  # Triton converts subnormal numbers
                return bits if up else (bits >> 16).astype(np.uint16)
        return convert(data, known, wanted, rounding)

    interpreter._convert_float = convert_float
    semantic.to_tensor, semantic.scalar_constant, semantic.cast = to_tensor, scalar, cast_to
    core._unwrap_if_constexpr = unwrapped


def _remember_blocks(core, interpreter) -> None:
    """Create each range and each block of one number once, and check the operands' types of each kind of product once.
    Arrays that several blocks share are read-only."""
    builder, semantic = interpreter.interpreter_builder, interpreter.TritonSemantic
    tensor, handle = core.tensor, interpreter.TensorHandle
    arange, full, dot, multiply = semantic.arange, semantic.full, semantic.dot, builder.create_dot
    blocks: dict = {}
    products: dict = {}  # types of operands -> (the accumulator without one, create_dot's options, type of the result)

    def shared(key, create, *arguments) -> Block:
        if key not in blocks:
            if len(blocks) >= MOST_BLOCKS:
                blocks.clear()
            created = create(*arguments)
            created.handle.data.flags.writeable = False
            blocks[key] = created
        known = blocks[key]
        return tensor(handle(known.handle.data, known.handle.dtype), known.type)

    def remembered_range(self, start, end, **options) -> Block:
        if options or type(start) is not int or type(end) is not int:
            return arange(self, start, end, **options)
        return shared((start, end), arange, self, start, end)

    def remembered_full(self, shape, value, dtype) -> Block:
        if type(value) not in (int, float) or value != value or dtype is None or not shape:
            return full(self, shape, value, dtype)
        key = type(value), value or str(value), dtype.name, *shape  # -0.0 == 0.0
        return shared(key, full, self, shape, value, dtype)

    def remembered_dot(self, lhs, rhs, acc, *options, **named) -> Block:
        if named:
            return dot(self, lhs, rhs, acc, *options, **named)
        key = lhs.type.name, rhs.type.name, None if acc is None else acc.type.name, *map(str, options)
        if key not in products:
            calls: list = []

            def recorded(*arguments) -> TensorHandle:
                calls.append(arguments)
                return multiply(*arguments)

            builder.create_dot = recorded
            try:
                found = dot(self, lhs, rhs, acc, *options)
            finally:
                del builder.create_dot
            left, right, start, *others = calls[0]
            alike = left is lhs.handle and right is rhs.handle and (acc is None or start is acc.handle)
            products[key] = (start, others, found.type) if alike and len(calls) == 1 else None
            return found
        if products[key] is None:
            return dot(self, lhs, rhs, acc, *options)
        start, others, kind = products[key]
        return tensor(multiply(lhs.handle, rhs.handle, start if acc is None else acc.handle, *others), kind)

    semantic.arange, semantic.full, semantic.dot = remembered_range, remembered_full, remembered_dot


def _patch_with_less(core, interpreter, operations) -> None:
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
            found[pkg] = [(name, member, with_semantic(member, semantic)) for name, member in members]
            if pkg in (core.tensor, core, interpreter.tl):
                found[pkg] = [(n, m, operations[n](call) if n in operations else call) for n, m, call in found[pkg]]
        for name, member, call in found[pkg]:
            if getattr(pkg, name) is member:  # not patched yet
                scope.set_attr(pkg, name, call)

    interpreter._patch_builtin = patch
