"""Triton kernels: the channel, the scans, gated linear attention, delta rules. Independent of process groups."""
