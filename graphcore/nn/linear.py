"""One Linear for every projection.

Legend: B batch, T tokens, I input features, O output features.
"""

import torch
from torch import Tensor, nn

from graphcore.nn.int8_rows import Int8Rows, quantize_rows

CODE_UNIT = 128  # codes enter a product divided by it: exact, and their sums stay inside fp16


class Linear(nn.Module):
    """x @ weight.T (+ bias); with `int8_input` x is rounded to int8 per token before.

    A compiled graph for a single row writes the product as multiply and sum: Inductor then makes one vectorised loop
    that reads the weight at memory speed (45 GB/s on two cores where the library's matrix product reads 15 to 30).
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, inputs: int, outputs: int, bias: bool, dtype: torch.dtype, int8_input: bool = False) -> None:
        super().__init__()
        self.int8_input = int8_input
        self.register_buffer("weight", torch.empty(outputs, inputs, dtype=dtype))
        self.register_buffer("bias", torch.empty(outputs, dtype=dtype) if bias else None)

    def prepare(self, x: Tensor) -> Tensor | Int8Rows:
        """Return `x` as this projection reads it; projections of the same input may share what one has prepared."""
        return quantize_rows(x) if self.int8_input else x

    def forward(self, x: Tensor | Int8Rows) -> Tensor:
        """Project.

        Args:
            x: [..., I] compute dtype, or what `prepare` made of it.

        Returns:
            [..., O] compute dtype.
        """
        if isinstance(x, Tensor) and not self.int8_input:
            return _linear(x, self.weight, self.bias)
        rows = x if isinstance(x, Int8Rows) else quantize_rows(x)
        product = _linear(rows.codes.to(self.weight.dtype) / CODE_UNIT, self.weight, None)
        product = product.float() * CODE_UNIT / rows.scale
        if self.bias is not None:
            product = product + self.bias.float()
        return product.to(self.weight.dtype)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias: [..., O] in x's dtype."""
    if torch.compiler.is_compiling() and x.device.type == "cpu" and is_one_row(x):
        product = (x.float().unsqueeze(-2) * weight.float()).sum(-1)  # [..., 1, I] * [O, I] -> [..., O]
        if bias is not None:
            product = product + bias.float()
        return product.to(x.dtype)
    return nn.functional.linear(x, weight, bias)


def is_one_row(x: Tensor) -> bool:
    """Return whether `x` [..., I] is known, without a guard on a symbolic size, to hold a single row."""
    return all(isinstance(size, int) and size == 1 for size in x.shape[:-1])
