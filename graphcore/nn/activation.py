"""Activations as modules, so that a trace of a block shows them by name."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from graphcore import activations


def relu_squared(x: Tensor) -> Tensor:
    """Return relu(x)^2, elementwise. Source: So et al. 2021 (Primer)."""
    return nn.functional.relu(x).square()


def capped(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap), elementwise: about x where it is small, never beyond the cap."""
    return (x / cap).tanh() * cap


FUNCTIONS: Mapping[activations.Activation, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        activations.Activation.SILU: nn.functional.silu,
        activations.Activation.GELU: nn.functional.gelu,
        activations.Activation.GELU_TANH: partial(nn.functional.gelu, approximate="tanh"),
        activations.Activation.RELU: nn.functional.relu,
        activations.Activation.RELU2: relu_squared,
        activations.Activation.SIGMOID: torch.sigmoid,
    }
)


class ActivationModule(nn.Module):
    """An elementwise function, by the name that config.json uses."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.kind = activations.ACTIVATIONS[name]
        self.function = FUNCTIONS[self.kind]

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation of `x`, any shape."""
        return self.function(x)
