"""Delta rules over several ranks: KDA and Gated DeltaNet.

``delta_operator`` has the public functions; ``raw_inputs`` computes norms, gates and beta of raw arguments;
``kda_plans`` computes inside the chunks by our kernels, ``fla_chunks`` by flash-linear-attention; ``delta_passes``
computes the states between the chunks, by shmem_kernels/delta_state.py, and scans them over the ranks.
"""

from .delta_operator import zeco_gated_delta_rule, zeco_kda

__all__ = ["zeco_gated_delta_rule", "zeco_kda"]
