"""The native decoder: kernels of ours for a CPU, compiled on the machine that runs them."""
