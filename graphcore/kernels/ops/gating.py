"""Activations in torch, and the gated activations (SwiGLU and others) that combine an expert's gate and up products."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from graphcore.activations import ACTIVATIONS, CLAMPED_SWIGLU, Activation, Gating


def relu_squared(x: Tensor) -> Tensor:
    """Return relu(x)^2, elementwise. Source: So et al. 2021 (Primer)."""
    return nn.functional.relu(x).square()


FUNCTIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        Activation.SILU: nn.functional.silu,
        Activation.GELU: nn.functional.gelu,
        Activation.GELU_TANH: partial(nn.functional.gelu, approximate="tanh"),
        Activation.RELU: nn.functional.relu,
        Activation.RELU2: relu_squared,
        Activation.SIGMOID: torch.sigmoid,
    }
)


def gated_features(gate: Tensor, up: Tensor, gating: Gating) -> Tensor:
    """Return an expert's hidden features from its gate and up products, all of one shape."""
    if gating.activation == CLAMPED_SWIGLU:
        return clamped_swiglu(gate, up, gating.limit, gating.alpha)
    return FUNCTIONS[ACTIVATIONS[gating.activation]](gate) * up


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float, alpha: float) -> Tensor:
    """Return (up + 1) * gate * sigmoid(alpha * gate) of the clamped arguments, all of one shape."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(alpha * gate))
