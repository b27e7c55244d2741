"""Fast paths for the most frequent operations of Triton's interpreter.

At every operation Triton computes the type and shape of the result, and converts and broadcasts both operands. The
operands are numpy arrays, and numpy does most of this itself. So the first call with given operand types runs Triton's
code and records a plan: the fields of the result, and a Python number as an array of the type that Triton gives it.
Later calls with these types are one numpy call. No plan is recorded if numpy returns another type or value than
Triton, e.g. for integers that become float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numpy import ndarray as Array
    from triton.language.core import tensor as Block


def operations_by_numpy(core, interpreter) -> dict:
    """Return {name: function from Triton's operation to the fast one}."""
    np, tensor, constexpr, new = interpreter.np, core.tensor, core.constexpr, object.__new__
    handle = interpreter.TensorHandle
    floats, signed = {core.float32.name, core.float64.name}, {core.int32.name, core.int64.name}
    numbers = floats | signed

    def result_of(data, dtype, fields) -> Block:
        result_handle, result = new(handle), new(tensor)
        result_handle.data, result_handle.dtype, result_handle.attr = data, dtype, {}
        result.__dict__.update(fields)
        result.handle = result_handle
        return result

    def fields_of(found) -> dict[str, object]:
        return {name: value for name, value in found.__dict__.items() if name != "handle"}

    def quotient(lhs, rhs) -> Array:
        return (lhs - np.fmod(lhs, rhs)) // rhs

    def constant(dtype, number) -> Array | None:
        """Return ``number`` as Triton converts it for a tensor of this type; None if Triton chooses another type."""
        if dtype.name in signed and type(number) is int:
            bound = 1 << (dtype.primitive_bitwidth - 1)
            fits = -bound <= number < bound
        else:
            exact = abs(number) < 1 << 24 if type(number) is int else not number or 2.0**-126 <= abs(number) < 2.0**127
            fits = dtype.name == core.float32.name and exact
        if number == 0 and not keeps_sign:
            number = 0
        return np.array([number], dtype=interpreter._get_np_dtype(dtype)) if fits else None

    # Triton before 3.9 reads -0.0 as 0.0
    keeps_sign = np.signbit(interpreter.interpreter_semantic.to_tensor(-0.0).handle.data).all()

    def fitting(lhs, rhs) -> bool:
        """Check whether numpy promotes two element types as Triton does."""
        return lhs == rhs or lhs in signed and rhs in signed

    @functools.cache
    def advance(width) -> Callable:
        return lambda pointers, steps: pointers + width * steps.astype(np.uint64)

    def operation(function, known, reflected=False) -> Callable:
        def of(slowly) -> Callable:
            plans: dict = {}

            def plan_of(self, other, is_tensor, found) -> tuple:
                element, number, call = self.dtype, None, function
                if element.is_ptr() and function is np.add:
                    call = advance(max(1, element.element_ty.primitive_bitwidth // 8))
                    element = core.int64 if is_tensor else core.int32  # of the offset
                if not isinstance(found, tensor) or element.name not in known:
                    return ()
                if not is_tensor and (number := constant(element, other)) is None:
                    return ()
                if is_tensor and not fitting(element.name, other.dtype.name):
                    return ()
                rhs = other.handle.data if is_tensor else number
                data = call(rhs, self.handle.data) if reflected else call(self.handle.data, rhs)
                theirs = found.handle.data
                alike = data.dtype == theirs.dtype and data.shape == theirs.shape
                if not alike or not np.array_equal(data, theirs, equal_nan=data.dtype.kind == "f"):
                    return ()
                return fields_of(found), found.handle.dtype, number, call

            def operate(self, other, **options) -> Block:
                if options:
                    return slowly(self, other, **options)
                key: tuple
                kind = type(other)
                if kind is constexpr:
                    other = other.value
                    kind = type(other)
                if kind is tensor and type(self) is tensor:
                    key = self.type.name, self.handle.dtype.name, other.type.name
                elif type(self) is tensor and (kind is int or kind is float):
                    key = self.type.name, self.handle.dtype.name, kind, other or str(other)  # -0.0 == 0.0
                else:
                    return slowly(self, other)
                plan = plans.get(key)
                if not plan:
                    found = slowly(self, other)
                    if plan is None and (kind is tensor or other == other):  # a key with NaN never matches
                        plans[key] = plan_of(self, other, kind is tensor, found)
                    return found
                fields, dtype, number, function = plan
                rhs = other.handle.data if number is None else number
                data = function(rhs, self.handle.data) if reflected else function(self.handle.data, rhs)
                return result_of(data, dtype, fields)

            return operate

        return of

    whole = slice(None)

    def index(slowly) -> Callable:
        plans: dict = {}

        def getitem(self, slices) -> Block:
            if type(slices) is not tuple or not all(x is None or type(x) is slice and x == whole for x in slices):
                return slowly(self, slices)
            key = self.type.name, tuple(x is None for x in slices)
            if not self.type.is_block():
                return slowly(self, slices)
            if key not in plans:
                plans[key] = fields_of(slowly(self, slices))
            return result_of(self.handle.data[slices], self.handle.dtype.scalar, plans[key])

        return getitem

    def choose(slowly) -> Callable:
        plans: dict = {}

        def plan_of(condition, x, y, found) -> tuple:
            element = (x if type(x) is tensor else y).dtype
            same = {v.dtype.name for v in (x, y) if type(v) is tensor} == {element.name}
            if condition.dtype.name != core.int1.name or not same or element.name not in numbers:
                return ()
            constants = [constant(element, v) if type(v) in (int, float) else None for v in (x, y)]
            if any(type(v) is not tensor and c is None for v, c in zip((x, y), constants)):
                return ()
            return fields_of(found), *constants

        def where(condition, x, y) -> Block:
            x, y = (v.value if type(v) is constexpr else v for v in (x, y))
            arrays = [v.handle.data if type(v) is tensor else None for v in (x, y)]
            names = tuple(v.type.name if type(v) is tensor else (type(v), v or str(v)) for v in (x, y))
            if type(condition) is not tensor or arrays[0] is None and arrays[1] is None:
                return slowly(condition, x, y)
            key = condition.type.name, *names
            plan = plans.get(key)
            if not plan:
                found = slowly(condition, x, y)
                if plan is None:
                    plans[key] = plan_of(condition, x, y, found)
                return found
            fields, lhs, rhs = plan
            if condition.handle.data.dtype != bool:
                return slowly(condition, x, y)
            lhs, rhs = (arrays[0] if lhs is None else lhs), (arrays[1] if rhs is None else rhs)
            dtype = (y if plan[2] is None else x).handle.dtype.scalar
            return result_of(np.where(condition.handle.data, lhs, rhs), dtype, fields)

        return where

    semantic = interpreter.interpreter_semantic
    memory = interpreter._interpreter

    def of_memory(pointer, mask) -> bool:
        """Check that ``pointer`` is a tensor of pointers to numbers, and ``mask`` None or a boolean tensor."""
        if type(pointer) is not tensor or not pointer.dtype.is_ptr():
            return False
        element, boolean = pointer.dtype.element_ty, core.int1.name
        if element.is_ptr() or element.is_block() or element.name == boolean:
            return False
        return mask is None or type(mask) is tensor and mask.handle.data.dtype == bool and mask.dtype.name == boolean

    def spread(x, shape) -> Array:
        return x if x.shape == shape else np.broadcast_to(x, shape)

    def loading(slowly) -> Callable:
        plans: dict = {}

        def load(pointer, mask=None, other=None, **options) -> Block:
            if type(other) is constexpr:
                other = other.value
            kind = type(other)
            if not of_memory(pointer, mask) or not (other is None or kind in (tensor, int, float)):
                return slowly(pointer, mask, other, **options)
            of_other = other.type.name if kind is tensor else (kind, other or str(other))
            key = pointer.type.name, None if mask is None else mask.type.name, of_other, *options.items()
            plan = plans.get(key)
            if not plan:
                found = slowly(pointer, mask, other, **options)
                element = pointer.dtype.element_ty
                if plan is None and (kind is not tensor or other.dtype.name == element.name) and other == other:
                    shape = tuple(found.handle.data.shape)
                    number = None
                    if kind is not tensor:  # the values of masked-out elements, converted as by Triton
                        value = semantic.cast(semantic.to_tensor(0 if other is None else other), element)
                        number = np.full(shape, value.handle.data)
                    plans[key] = fields_of(found), shape, element, interpreter._get_np_dtype(element), number
                    if mask is None:
                        plans[key] += (np.ones(shape, dtype=bool),)
                return found
            fields, shape, element, dtype, number = plan[:5]
            if pointer.handle.data.shape != shape:
                return slowly(pointer, mask, other, **options)
            inside = plan[5] if mask is None else spread(mask.handle.data, shape)
            number = spread(other.handle.data, shape) if number is None else number
            return result_of(memory.load(pointer.handle.data, inside, number, dtype), element, fields)

        return load

    def storing(slowly) -> Callable:
        plans: dict = {}

        def store(pointer, value, mask=None, **options) -> object:
            if options or type(value) is not tensor or not of_memory(pointer, mask):
                return slowly(pointer, value, mask, **options)
            key = pointer.type.name, value.type.name, None if mask is None else mask.type.name
            plan = plans.get(key)
            shape = pointer.handle.data.shape
            if plan is None or plan[0] != shape:
                found = slowly(pointer, value, mask)
                if value.dtype.name == pointer.dtype.element_ty.name:
                    plans[key] = shape, np.ones(shape, dtype=bool), found
                return found
            inside = plan[1] if mask is None else spread(mask.handle.data, shape)
            memory.store(pointer.handle.data, spread(value.handle.data, shape), inside)
            return plan[2]

        return store

    bits = signed | {core.int1.name}
    return {
        "__add__": operation(np.add, numbers),
        "__radd__": operation(np.add, numbers, True),
        "__sub__": operation(np.subtract, numbers),
        "__rsub__": operation(np.subtract, numbers, True),
        "__mul__": operation(np.multiply, numbers),
        "__rmul__": operation(np.multiply, numbers, True),
        "__truediv__": operation(np.divide, floats),
        "__rtruediv__": operation(np.divide, floats, True),
        "__floordiv__": operation(quotient, signed),
        "__mod__": operation(np.fmod, signed),
        "__and__": operation(np.bitwise_and, bits),
        "__or__": operation(np.bitwise_or, bits),
        "__xor__": operation(np.bitwise_xor, bits),
        "__lt__": operation(np.less, numbers),
        "__le__": operation(np.less_equal, numbers),
        "__gt__": operation(np.greater, numbers),
        "__ge__": operation(np.greater_equal, numbers),
        "__getitem__": index,
        "where": choose,
        "load": loading,
        "store": storing,
        "__eq__": operation(np.equal, numbers),
        "__ne__": operation(np.not_equal, numbers),
    }
