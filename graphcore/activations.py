"""The activations that graphcore computes, with their names and the kernels' numbers for them.

The mathematics is in nn/mlp.py (torch), kernels/native/lanes.h (C++) and kernels/gpu/epilogue.py (Triton).
"""

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType


class Activation(IntEnum):
    """An elementwise function.

    Attributes:
        NONE: x.
        SILU: x * sigmoid(x).
        GELU: x * the normal distribution's cumulative probability of x.
        GELU_TANH: approximation of GELU with tanh.
        RELU: max(x, 0).
        RELU2: max(x, 0)^2.
        SIGMOID: 1 / (1 + e^-x).
    """

    NONE = 0
    SILU = 1
    GELU = 2
    GELU_TANH = 3
    RELU = 4
    RELU2 = 5
    SIGMOID = 6

    @property
    def kernel_name(self) -> str:
        """The name of the activation in Triton's kernels; empty for none."""
        return self.name.lower() if self else ""


# Keys are config.json's names; gelu_new is the tanh approximation under GPT-2's name.
ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "silu": Activation.SILU,
        "gelu_pytorch_tanh": Activation.GELU_TANH,
        "gelu_new": Activation.GELU_TANH,
        "gelu": Activation.GELU,
        "relu": Activation.RELU,
        "relu2": Activation.RELU2,
        "sigmoid": Activation.SIGMOID,
    }
)
