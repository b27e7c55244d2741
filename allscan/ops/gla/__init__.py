"""Gated linear attention over a sequence that is cut over the ranks of a communicator.

``gla_operator``  zeco_gla: checks, autograd, torch's custom operators.
``gla_plans``     which kernel is launched with what.
"""

from .gla_operator import Asked, zeco_gla, zeco_gla_by

__all__ = ["Asked", "zeco_gla", "zeco_gla_by"]
