"""The feed-forward half of a block, gated or plain.

Legend: B batch, T tokens, D model dim, F hidden features.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from graphcore.nn.linear import Linear
from graphcore.nn.norm import build_norm
from graphcore.nn.spec import Int8Order, MLPSpec

gelu_tanh = partial(nn.functional.gelu, approximate="tanh")


def relu_squared(x: Tensor) -> Tensor:
    """Return relu(x)^2, elementwise. Source: So et al. 2021 (Primer)."""
    return nn.functional.relu(x).square()


# By the name that config.json uses; gelu_new is the tanh approximation under GPT-2's name.
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": nn.functional.silu,
        "gelu": nn.functional.gelu,
        "gelu_new": gelu_tanh,
        "gelu_pytorch_tanh": gelu_tanh,
        "relu": nn.functional.relu,
        "relu2": relu_squared,
    }
)


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate; optionally normalised before down."""

    def __init__(self, spec: MLPSpec, dim: int, dtype: torch.dtype, int8_order: Int8Order | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.activation = ACTIVATIONS[spec.activation]
        self.gate_proj = Linear(dim, spec.hidden, spec.bias, dtype, int8_order) if spec.gated else None
        self.up_proj = Linear(dim, spec.hidden, spec.bias, dtype, int8_order)
        self.down_proj = Linear(spec.hidden, dim, spec.bias, dtype, int8_order)
        self.ffn_sub_norm = build_norm(spec.sub_norm, spec.hidden) if spec.sub_norm else None

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` [B, T, D] to [B, T, D]."""
        shared = self.up_proj.prepare(x)
        up = self.up_proj(shared)
        gate = None if self.gate_proj is None else self.gate_proj(shared)
        if self.ffn_sub_norm is None:
            return self.down_proj(self._hidden(gate, up))  # type: ignore[no-any-return]  # Module.__call__
        # relu2 squares: the product outgrows fp16 where its factors do not, so it stays float32 up to the norm
        wide = self._hidden(None if gate is None else gate.float(), up.float())
        return self.down_proj(self.ffn_sub_norm(wide, x.dtype))  # type: ignore[no-any-return]  # Module.__call__

    def _hidden(self, gate: Tensor | None, up: Tensor) -> Tensor:
        """Return act(gate) * up, or act(up) without a gate: [B, T, F]."""
        return self.activation(up) if gate is None else self.activation(gate) * up
