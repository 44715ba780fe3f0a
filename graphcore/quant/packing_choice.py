"""Which of the packings holds a matrix, by its format, its shape and what multiplies it."""

from pathlib import Path

from graphcore.quant.device_packing import DevicePacking
from graphcore.quant.packing import KernelPacking, Packing, StoredPacking
from graphcore.quant.registry import FORMATS


def choose_packing(name: str, rows: int, columns: int, library: Path | None, *, on_gpu: bool = False) -> Packing | None:
    """Return how a matrix of a stored format is held; None is dense: a row is no whole number of blocks.

    Args:
        name: the format's.
        rows, columns: O and I.
        library: of the CPU's kernels, or None where they cannot be built or do not run.
        on_gpu: a GPU multiplies.
    """
    one = FORMATS[name]
    if columns % one.block_elements:
        return None
    if on_gpu and one.planes is not None:
        return DevicePacking(name, rows, columns)
    if library is not None and one.kernel_number is not None:
        return KernelPacking(name, rows, columns, str(library))
    return StoredPacking(name, rows, columns)
