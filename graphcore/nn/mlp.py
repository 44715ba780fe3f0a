"""The feed-forward half of a block, gated or plain.

Legend: B batch, T tokens, D model dim, F hidden features.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from graphcore.nn.linear import Linear
from graphcore.nn.spec import MLPSpec

gelu_tanh = partial(nn.functional.gelu, approximate="tanh")

# By the name that config.json uses; gelu_new is the tanh approximation under GPT-2's name.
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": nn.functional.silu,
        "gelu": nn.functional.gelu,
        "gelu_new": gelu_tanh,
        "gelu_pytorch_tanh": gelu_tanh,
        "relu": nn.functional.relu,
    }
)


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate."""

    def __init__(self, spec: MLPSpec, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        self.activation = ACTIVATIONS[spec.activation]
        self.gate_proj = Linear(dim, spec.hidden, spec.bias, dtype) if spec.gated else None
        self.up_proj = Linear(dim, spec.hidden, spec.bias, dtype)
        self.down_proj = Linear(spec.hidden, dim, spec.bias, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` [B, T, D] to [B, T, D]."""
        if self.gate_proj is None:
            return self.down_proj(self.activation(self.up_proj(x)))  # type: ignore[no-any-return]  # Module.__call__
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]
