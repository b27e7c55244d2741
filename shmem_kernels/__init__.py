"""The kernels, Triton only: the channel, the scan, gated linear attention. Knows nothing of process groups."""
