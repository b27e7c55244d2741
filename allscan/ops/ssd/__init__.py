"""Scalar decays: Mamba2's state space duality, simple GLA. Its exports are the public ones; its modules are internal.

ssd_operator    zeco_ssd, zeco_simple_gla: arguments, checks, autograd
ssd_plans       launches of both passes, by the kernels of shmem_kernels/ssd_fwd.py and ssd_bwd.py
"""

from .ssd_operator import zeco_simple_gla as zeco_simple_gla
from .ssd_operator import zeco_ssd as zeco_ssd
