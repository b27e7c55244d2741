"""Functions in Python that kernels may call, compiled or in Triton's interpreter."""

from __future__ import annotations

import hashlib
import inspect

from triton.language import core
from triton.runtime.jit import JITCallable


class _Source(JITCallable):
    """Stands for a function's source where Triton works out the name of a compiled kernel in its cache."""

    cache_key = ""
    used_global_vals: dict = {}

    def __init__(self, function):
        self.cache_key = hashlib.sha256(inspect.getsource(function).encode()).hexdigest()


def builtin(function):
    """A function that the compiler calls with a builder, and the interpreter without one. A kernel that calls it is
    compiled again when its source has changed: by itself Triton looks at the sources of jit functions only."""
    setattr(function, core.TRITON_BUILTIN, True)
    function.__triton_aggregate__, function.hash_attrs = True, [_Source(function)]
    return function
