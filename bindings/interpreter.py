"""Speeds up Triton's interpreter: this package's kernels run about fifteen times as fast, with the same results.
``prepare_interpreter`` also fixes other needs of CPU ranks.

Triton's interpreter (3.6 to 3.9) patches ``triton.language`` again at every call of a device function, computes the
type and shape of each block again at every operation, and repeats each integer operation to detect overflow. Here
patches (interpreter_launches.py), types and shapes (interpreter_blocks.py) are cached. The overflow check and numpy's
overflow warnings are off, as in compiled kernels. The most frequent operations are single numpy calls
(interpreter_operations.py). A change that needs an attribute which the installed Triton lacks is skipped.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

from .interpreter_blocks import remember_blocks, remember_types, shorten_operations
from .interpreter_launches import patch_with_less, shorten_launches
from .interpreter_operations import operations_by_numpy

if TYPE_CHECKING:
    from triton.runtime.interpreter import TensorHandle


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

        shorten_launches(interpreter)
        remember_types(core, interpreter)
        shorten_operations(core, interpreter)
        remember_blocks(core, interpreter)
        patch_with_less(core, interpreter, operations_by_numpy(core, interpreter))
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
