"""Triton's interpreter: types, shapes and blocks of numbers are computed once ."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numpy import dtype as NumpyType
    from numpy import ndarray as Array
    from triton.language.core import block_type as BlockType
    from triton.language.core import tensor as Block
    from triton.runtime.interpreter import TensorHandle

MOST_BLOCKS = 256  # remembered blocks of one number each, of each kind


def remember_types(core, interpreter) -> None:
    """Create each block type and each numpy type once; create blocks without checks of their element sizes."""
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


def shorten_operations(core, interpreter) -> None:
    """Check and convert operands of equal types and numbers without a promotion."""
    semantic = interpreter.TritonSemantic
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


def remember_blocks(core, interpreter) -> None:
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
