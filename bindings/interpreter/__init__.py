"""Triton's interpreter for CPU ranks: ``prepare_interpreter`` corrects it, and makes it about twelve times as fast.

``corrections``      what kernels need. The other files change no bit of a result:
``fast_launches``    patches of ``triton.language`` and signatures are cached; Triton makes them at every call. Also
                     rejects launches of two threads, and completes what Ctrl-C has interrupted.
``fast_blocks``      types and shapes are cached; Triton computes them at every operation.
``fast_operations``  the most frequent operations are single numpy calls.
"""

from __future__ import annotations

import contextlib
import functools


@functools.cache
def prepare_interpreter() -> None:
    """Patch the interpreter for the rest of this process. A patch that needs an attribute which the installed Triton
    lacks is skipped. Afterwards this process cannot compile kernels: the interpreter and the compiler share classes."""
    with contextlib.suppress(ImportError, AttributeError):
        from triton.language import core
        from triton.runtime import autotuner, interpreter

        from . import corrections, fast_blocks, fast_launches, fast_operations

        with contextlib.suppress(AttributeError):
            corrections.correct(autotuner, interpreter)
        fast_launches.shorten_launches(interpreter)
        fast_blocks.remember_types(core, interpreter)
        fast_blocks.shorten_operations(core, interpreter)
        operations = fast_operations.operations_by_numpy(core, interpreter)
        fast_launches.patch_with_less(core, interpreter, operations)
