"""Imports every module that has a GPU kernel; each registers its ops with torch at its import."""

from importlib import import_module

MODULES = ("norm", "attend", "experts", "router", "choose", "sample")  # of this package; each imports what it needs


def register() -> None:
    """Make the ops of this package known to torch; again is harmless.

    Called where a GPU computes, before anything is traced or captured: a machine without a GPU may have no triton.
    """
    for name in MODULES:
        import_module(f"graphcore.kernels.gpu.{name}")
