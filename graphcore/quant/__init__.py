"""What stored weight bytes mean: one stateless Format per encoding.

raw (bytes as the file has them) -> dense (an ordinary float tensor). A new encoding is one module in `formats/`; it
may know torch and bit layouts, and nothing of files, tensor names or modules.
"""

from graphcore.quant.format import Format
from graphcore.quant.registry import FORMATS, dequantize

__all__ = ["FORMATS", "Format", "dequantize"]
