"""One Linear for every projection.

Legend: B batch, T tokens, I input features, O output features.
"""

import torch
from torch import Tensor, nn

from graphcore.quant.packing import Packing


class Linear(nn.Module):
    """x @ weight.T (+ bias).

    The weight is dense, [O, I] in the compute dtype, or packed, [nbytes] uint8; then `packing` says how to multiply.

    A compiled graph for a single row writes the product as multiply and sum: Inductor then makes one vectorised loop
    that reads the weight at memory speed (45 GB/s on two cores where the library's matrix product reads 15 to 30).
    """

    weight: Tensor
    bias: Tensor | None
    packing: Packing | None

    def __init__(self, inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.outputs = outputs
        self.packing = None
        self.rounding = "float"
        self.register_buffer("weight", torch.empty(outputs, inputs, dtype=dtype))
        self.register_buffer("bias", torch.empty(outputs, dtype=dtype) if bias else None)

    def pack(self, packing: Packing, rounding: str) -> None:
        """Hold the weight packed from now on, its bytes still to come; `rounding` of x as in kernels/packed.py."""
        self.packing, self.rounding = packing, rounding
        self.weight = torch.empty(packing.nbytes, dtype=torch.uint8, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        """Project.

        Args:
            x: [..., I] compute dtype.

        Returns:
            [..., O] compute dtype.
        """
        if self.packing is not None:
            return self.packing.linear(x, self.weight, self.bias, self.rounding)
        if torch.compiler.is_compiling() and x.device.type == "cpu" and is_one_row(x):
            product = (x.float().unsqueeze(-2) * self.weight.float()).sum(-1)  # [..., 1, I] * [O, I] -> [..., O]
            if self.bias is not None:
                product = product + self.bias.float()
            return product.to(x.dtype)
        return nn.functional.linear(x, self.weight, self.bias)


def is_one_row(x: Tensor) -> bool:
    """Return whether `x` [..., I] is known, without a guard on a symbolic size, to hold a single row."""
    return all(isinstance(size, int) and size == 1 for size in x.shape[:-1])
