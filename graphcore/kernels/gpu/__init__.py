"""Triton kernels as torch custom ops, for NVIDIA GPUs.

Only this package imports triton. Its kernels are imported on machines that compute on a GPU, and by tests, which run
the kernels in Triton's interpreter on the CPU and compile them for GPUs that are absent (tests/gpu_compile.py).
"""
