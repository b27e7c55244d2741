"""Kernel launches: single kernels, recorded sequences (plans), CUDA graphs of them, and streams."""
