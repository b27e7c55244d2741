"""Modules without ranks and kernels: errors, argument checks, tile sizes, differentiable operators."""
