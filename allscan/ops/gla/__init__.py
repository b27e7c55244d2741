"""Gated linear attention over a sequence that is cut over the ranks of a communicator.

``operator``  zeco_gla: checks, autograd, torch's custom operators.
``launches``  which kernel is launched with what.
``carrier``   what brings the state from rank to rank.
"""

from .gla_operator import zeco_gla, zeco_gla_by

__all__ = ["zeco_gla", "zeco_gla_by"]
