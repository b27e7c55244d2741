"""Triton's interpreter: types and shapes are computed once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numpy import dtype as NumpyType
    from numpy import ndarray as Array
    from triton.language.core import block_type as BlockType
    from triton.language.core import tensor as Block


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
    """Return operands that need no conversion without Triton's checks."""
    semantic = interpreter.TritonSemantic
    as_tensor, cast = semantic.to_tensor, semantic.cast
    tensor, unwrap, constexpr = core.tensor, core._unwrap_if_constexpr, core.constexpr

    def to_tensor(self, x, check_type=True) -> Block:
        return x if type(x) is tensor else as_tensor(self, x, check_type)

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
    semantic.to_tensor, semantic.cast = to_tensor, cast_to
    core._unwrap_if_constexpr = unwrapped
