"""Gated linear attention over a sequence that is sharded across the ranks of a communicator.

``gla_operator``  zeco_gla: argument checks, autograd, torch's custom operators.
``gla_plans``     launch plans: kernels, grids, block sizes and buffers.
"""

from .gla_operator import GLA, zeco_gla

__all__ = ["GLA", "zeco_gla"]
