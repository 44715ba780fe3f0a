"""The C++ kernels for CPUs: building and loading the library, weight packing, attention, and native decode programs."""
