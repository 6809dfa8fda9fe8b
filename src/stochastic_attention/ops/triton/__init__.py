"""Fused kernels for CUDA devices. Only modules of this package import triton, and nothing imports them before a call."""
