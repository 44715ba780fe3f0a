"""Imports every module that has a GPU kernel; each registers its ops with torch at its import."""

from importlib import import_module
from importlib.util import find_spec

# of this package; each imports what it needs
MODULES = (
    *("norm", "codes", "product", "packed_linear", "unpack", "rotate_write", "attend"),
    *("experts", "router", "choose", "sample"),
)


def register() -> bool:
    """Make the ops of this package known to torch, and return whether they are; again is harmless.

    Called where a GPU computes, before anything is traced or captured. Without Triton ops that have an implementation
    of plain torch operations keep it.
    """
    if find_spec("triton") is None:
        return False
    for name in MODULES:
        import_module(f"graphcore.kernels.gpu.{name}")
    return True
