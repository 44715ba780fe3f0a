"""The activations that graphcore computes, with their names and the kernels' numbers for them.

The mathematics is in kernels/ops/gating.py (torch), kernels/cpu/native/lanes.h (C++) and kernels/gpu/epilogue.py
(Triton).
"""

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple


class Activation(IntEnum):
    """An elementwise function.

    Attributes:
        NONE: x.
        SILU: x * sigmoid(x).
        GELU: x * Phi(x), with the standard normal distribution's CDF Phi.
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

OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "swish": "silu",
        "gelu_python": "gelu",
        "gelu_python_tanh": "gelu_pytorch_tanh",
        "gelu_fast": "gelu_pytorch_tanh",
        "gelu_accurate": "gelu_pytorch_tanh",
    }
)
"""Further names of the same functions in config.json. Source: transformers, activations.py, `ACT2CLS`."""

CLAMPED_SWIGLU = "clamped_swiglu"


class Gating(NamedTuple):
    """The elementwise function that combines the gate and up products of a gated expert.

    Attributes:
        activation: name of an activation, for activation(gate) * up; or CLAMPED_SWIGLU, for
            (up + 1) * gate * sigmoid(alpha * gate), where gate is at most `limit` and up is within [-limit, limit].
        limit, alpha: constants of CLAMPED_SWIGLU; 0 for an activation.
    """

    activation: str
    limit: float = 0.0
    alpha: float = 0.0

    @property
    def number(self) -> int:
        """The number of the function in the C++ kernels."""
        return len(Activation) if self.activation == CLAMPED_SWIGLU else ACTIVATIONS[self.activation]

    @property
    def kernel_name(self) -> str:
        """The name of the function in Triton's kernels."""
        return CLAMPED_SWIGLU if self.activation == CLAMPED_SWIGLU else ACTIVATIONS[self.activation].kernel_name


SILU = Gating("silu")
