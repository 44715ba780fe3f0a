"""Triton kernels as torch custom ops, for NVIDIA GPUs.

Nothing outside this package imports triton. Its modules are imported where a GPU computes, and by tests, which run the
kernels in Triton's interpreter on the CPU and compile them for GPUs that are not there (tests/gpu_compile.py).
"""
