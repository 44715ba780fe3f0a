"""The feed-forward network of a block, gated or plain, and its elementwise functions.

Legend: B batch, T tokens, D model dim, F hidden features.
"""

import torch
from torch import Tensor, nn

from graphcore.activations import ACTIVATIONS
from graphcore.kernels.backend import Backend, TorchBackend
from graphcore.kernels.ops.gating import FUNCTIONS
from graphcore.nn.linear import Linear, gated_projection
from graphcore.nn.norm import build_norm
from graphcore.nn.spec import Int8Order, MLPSpec


def capped(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap), elementwise: a soft cap."""
    return (x / cap).tanh() * cap


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    """Return x * factor, for a learned number [1] float32."""
    return x * factor


class ActivationModule(nn.Module):
    """An activation, named as in config.json; it is a module so that traces contain its name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.kind = ACTIVATIONS[name]
        self.function = FUNCTIONS[self.kind]
        self.backend: Backend = TorchBackend()

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation of `x`, any shape."""
        kernels = self.backend.token_rows(x)
        return self.function(x) if kernels is None else kernels.activated(x, self.kind)


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate; optionally with a norm before down."""

    def __init__(self, spec: MLPSpec, dim: int, dtype: torch.dtype, int8_order: Int8Order | None = None) -> None:
        super().__init__()
        self.spec, self.dtype = spec, dtype
        self.backend: Backend = TorchBackend()
        self.activation = ActivationModule(spec.activation)
        self.gate_proj = Linear(dim, spec.hidden, spec.bias, dtype, int8_order) if spec.gated else None
        self.up_proj = Linear(dim, spec.hidden, spec.bias, dtype, int8_order)
        self.down_proj = Linear(spec.hidden, dim, spec.bias, dtype, int8_order)
        self.ffn_sub_norm = build_norm(spec.sub_norm, spec.hidden) if spec.sub_norm else None

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` [B, T, D] to [B, T, D]."""
        shared = self.up_proj.prepare(x)
        if self.ffn_sub_norm is None and self.gate_proj is not None:
            hidden = gated_projection(self.gate_proj, self.up_proj, shared, self.activation.kind)
            if hidden is not None:
                return self.down_proj(hidden)  # type: ignore[no-any-return]  # Module.__call__
        up = self.up_proj(shared)
        gate = None if self.gate_proj is None else self.gate_proj(shared)
        if self.ffn_sub_norm is None:
            return self.down_proj(self._hidden(gate, up))  # type: ignore[no-any-return]  # Module.__call__
        # float32 until the norm: with relu2 the product can overflow fp16 although its factors do not
        wide = self._hidden(None if gate is None else gate.float(), up.float())
        return self.down_proj(self.ffn_sub_norm(wide, self.dtype))  # type: ignore[no-any-return]  # Module.__call__

    def _hidden(self, gate: Tensor | None, up: Tensor) -> Tensor:
        """Return act(gate) * up, or act(up) without a gate: [B, T, F]."""
        if gate is None:
            return self.activation(up)  # type: ignore[no-any-return]  # Module.__call__
        kernels = self.backend.token_rows(gate)
        if kernels is not None:
            return kernels.gated(gate, up, self.activation.kind)
        return self.activation(gate) * up  # type: ignore[no-any-return]  # Module.__call__
