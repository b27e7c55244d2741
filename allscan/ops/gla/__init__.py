"""Gated linear attention over a sequence that is sharded across the ranks of a communicator.

``gla_operator``  zeco_gla: argument checks, autograd, torch's custom operators.
``gla_plans``     launch plans: kernels, grids, block sizes and buffers.
"""

from .gla_operator import CallOptions, zeco_gla, zeco_gla_by

__all__ = ["CallOptions", "zeco_gla", "zeco_gla_by"]
