"""What kernels need of Triton's interpreter (3.6 to 3.9): masks, loop bounds and counters, autotuned kernels,
overflow."""

from __future__ import annotations

import ast
import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triton.runtime.interpreter import TensorHandle


def correct(autotuner, interpreter) -> None:
    """Patch the interpreter where it differs from compiled kernels, or rejects what they accept."""
    _skip_autotuning(autotuner, interpreter)
    _let_blocks_be_loop_bounds(interpreter)
    _let_loop_counters_be_cast(interpreter)
    _keep_masks_bool(interpreter)
    builder = interpreter.interpreter_builder  # without a check of overflow, as compiled kernels
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


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


def _let_loop_counters_be_cast(interpreter) -> None:
    """Let kernels cast the counter of a loop over ``range``, as ``i.to(tl.int64)``: compiled kernels have a scalar
    there, the interpreter a Python int (flash-linear-attention's chunk kernels). Other loops stay as they are."""

    def visit_for(self, node: ast.For) -> ast.For:
        self.generic_visit(node)
        counter = getattr(node.target, "id", None)
        casts = (x for x in ast.walk(node) if isinstance(x, ast.Attribute) and x.attr == "to")
        if any(getattr(x.value, "id", None) == counter is not None for x in casts):
            as_scalar = ast.parse(f"{counter} = {counter}").body[0]
            node.body.insert(0, self.visit(as_scalar))  # Triton makes the assigned value a tensor
        return node

    interpreter.ASTTransformer.visit_For = visit_for


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
