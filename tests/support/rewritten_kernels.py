"""Imported by the server of CPU ranks before it starts any: the package's kernels, as Triton's interpreter rewrites
each at its first call. Else every rank would read, parse and compile their sources again."""

import importlib
import pkgutil

from triton.language import standard
from triton.runtime.interpreter import InterpretedFunction

from allscan import shmem_kernels

names = (module.name for module in pkgutil.iter_modules(shmem_kernels.__path__, f"{shmem_kernels.__name__}."))
for module in (standard, *map(importlib.import_module, names)):
    for function in [x for x in vars(module).values() if isinstance(x, InterpretedFunction)]:
        function.rewrite()
