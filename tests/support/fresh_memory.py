"""Fills fresh memory of CPU ranks with NaN, or the largest integer; imported by their server before it starts any.

A word that a kernel fails to write is then wrong, and not 0 as in a new process. torch fills memory in C++ in
deterministic mode, without a dispatch mode. Not for ranks on GPUs: each fill is a kernel, which would be in captured
graphs and measured times.
"""

import torch

torch.use_deterministic_algorithms(True, warn_only=True)
assert torch.utils.deterministic.fill_uninitialized_memory
