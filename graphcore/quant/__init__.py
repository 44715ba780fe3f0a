"""Stored encodings of weights (quantisation formats), with one stateless Format for each.

raw (bytes as the file has them) -> dense (an ordinary float tensor). A new encoding is one module in `formats/`; it
may use torch and bit layouts, but no files, tensor names or modules.
"""

from graphcore.quant.format import Format
from graphcore.quant.registry import FORMATS, dequantize

__all__ = ["FORMATS", "Format", "dequantize"]
