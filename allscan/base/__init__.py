"""What knows neither ranks nor kernels: errors, checks of arguments, sizes of tiles, differentiable operators."""
