"""Imported by the server of CPU ranks before it starts any: their fresh memory holds NaN, or the largest integer.

What a kernel does not write is wrong then, not 0 as in a new process. torch fills memory where deterministic algorithms
are wanted, in C++, which leaves no dispatch mode behind. Ranks with GPUs do without: each fill is a kernel, which would
be in captured graphs and in measured times.
"""

import torch

torch.use_deterministic_algorithms(True, warn_only=True)
assert torch.utils.deterministic.fill_uninitialized_memory
