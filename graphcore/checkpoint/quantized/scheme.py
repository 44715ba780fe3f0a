"""What a quantization_config says about stored weights. Plain data, without torch."""

from typing import Literal, NamedTuple

LayoutName = Literal[
    "gptq",
    "gptq_v2",
    "awq",
    "pack-quantized",
    "int-quantized",
    "fp8",
    "nvfp4",
    "mxfp4",
    "modelopt-nvfp4",
    "bnb-8bit",
    "bnb-4bit",
]
"""Names of layouts; those of compressed-tensors are its formats' names, or begin them."""


class Width(NamedTuple):
    """Bit width and group size of quantised weights, compressed-tensors' num_bits and group_size.

    Attributes:
        bits: bits of a code.
        group_size: columns of a group; 0 for all columns of a row.
    """

    bits: int
    group_size: int

    def fits(self, columns: int, groups: int) -> bool:
        """Return whether a weight of that many columns and groups has this group size; it may exceed the columns."""
        is_whole = self.group_size == 0 or self.group_size >= columns
        return groups == 1 if is_whole else columns == groups * self.group_size


class QuantizedScheme(NamedTuple):
    """What a quantization_config says about stored weights.

    Attributes:
        layouts: layouts that weights may have; tensors' names and dtypes say which one a weight has.
        widths: bit widths with their group sizes; empty to take them from the tensors' shapes.
        is_symmetric: True if the zero of every integer weight is the middle of its codes, False if every one has zero
            points; None if some have.
        block: rows and columns of the blocks of FP8 weights that share a scale; None if scales belong to rows or to
            whole tensors.
        has_orders: True if the columns of GPTQ's groups may lie apart. Other layouts store g_idx only if they do.
    """

    layouts: tuple[LayoutName, ...]
    widths: tuple[Width, ...] = ()
    is_symmetric: bool | None = True
    block: tuple[int, int] | None = None
    has_orders: bool = False
