"""Delta rules over several ranks: KDA and Gated DeltaNet.

``operator`` what a user calls, ``chunks`` what happens inside of chunks, by flash-linear-attention, ``passes`` what
happens between them, by shmem_kernels/delta.py, and over the ranks.
"""

from .delta_operator import zeco_gated_delta_rule, zeco_kda

__all__ = ["zeco_gated_delta_rule", "zeco_kda"]
