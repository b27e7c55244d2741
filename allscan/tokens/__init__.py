"""The token ranges of a rank, and the index tables that kernels read."""
