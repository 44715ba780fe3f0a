"""Registration of the GPU kernels: imports every module that has one, which registers its ops with torch."""

from importlib import import_module
from importlib.util import find_spec

# modules of this package; each imports the modules that it needs
MODULES = (
    *("norm", "int8_rows", "products.decode_products", "packed.linear", "packed.to_dense", "packed.level_planes"),
    *("attention.decode", "attention.latent", "attention.write_and_attend"),
    *("delta.launch", "gated_convolution", "experts.launch", "experts.router", "sampling.likeliest", "sampling.drawn"),
)


def register() -> bool:
    """Register the ops of this package with torch, and return whether they are; calling it again has no effect.

    Called on machines that compute on a GPU, before anything is traced or captured. Without Triton, ops that have an
    implementation in plain torch operations keep it.
    """
    if find_spec("triton") is None:
        return False
    for name in MODULES:
        import_module(f"graphcore.kernels.gpu.{name}")
    return True
