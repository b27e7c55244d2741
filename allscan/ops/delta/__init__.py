"""Delta rules over several ranks: KDA and Gated DeltaNet.

``delta_operator`` what a user calls, ``raw_inputs`` norms, gates and beta of raw arguments, ``own_chunks`` what happens
inside of chunks, ``fla_chunks`` the same by flash-linear-attention, ``delta_passes`` what happens between them, by
shmem_kernels/delta.py, and over the ranks.
"""

from .delta_operator import zeco_gated_delta_rule, zeco_kda

__all__ = ["zeco_gated_delta_rule", "zeco_kda"]
