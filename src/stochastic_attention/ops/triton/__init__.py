"""Fused kernels for CUDA devices. Only modules of this package import triton, and nothing does so before a call."""
