"""fp4: 32 four-bit codes of 16 levels, four-bit floats, and a float32 scale: bitsandbytes' FP4.

Legend: N blocks.

    0 d[4]  4 codes[16]
    codes byte j: hhhh llll, l = element j, h = element j + 16
    y = level[code] * d, levels in encodings.py

The folders of these weights are read by checkpoint/quantized/; GGUF files have no such type.
"""

from graphcore.encodings import FP4_LEVELS, Planes
from graphcore.quant.formats.nf4 import FloatLevelsFormat

FP4 = FloatLevelsFormat(
    name="fp4",
    block_elements=32,
    block_nbytes=20,
    kernel_number=32,
    bits=4,
    float_levels=FP4_LEVELS,
    planes=Planes(low=(4, 20), scales=(0, 4), scale="float"),
)
