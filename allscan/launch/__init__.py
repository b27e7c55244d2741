"""Kernel launches: single kernels, recorded sequences (plans), and streams."""
