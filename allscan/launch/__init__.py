"""How kernels are launched: one, a recorded sequence of them, as a CUDA graph, on which stream."""
