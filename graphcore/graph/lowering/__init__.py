"""Lowering: traces a module and rewrites it into the fused operations that native programs or GPU kernels implement."""
