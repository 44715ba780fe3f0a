"""The C++ kernels of the CPU: their library, packing, and the decode step that they run."""
