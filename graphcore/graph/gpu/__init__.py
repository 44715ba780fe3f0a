"""Decode steps of a GPU: a list of kernels, norm fusion, sampling on the device, and capture as CUDA graphs."""
