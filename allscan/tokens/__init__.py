"""Which tokens a rank has, and the tables that kernels read of them."""
