"""Gated short convolution (LFM2): an input projection, a gate, a causal convolution, a gate, an output projection.

Legend: B batch, T tokens, D model dim, C channels, W width of the convolution.

    b, c, x = in_proj(input)        out_proj(c * convolution(b * x))

Everything between the projections is one custom op (kernels/ops/gated_convolution.py). The layer's state is the
convolution's last W - 1 inputs.
"""

import torch
from torch import Tensor, nn

from graphcore.kernels.backend import Backend, TorchBackend
from graphcore.kernels.ops.gated_convolution import ConvParts
from graphcore.nn.delta_net import Factors
from graphcore.nn.linear import Linear
from graphcore.nn.span import Span
from graphcore.nn.spec import ConvSpec


class ShortConv(nn.Module):
    """The gated short convolution between its projections, `in_proj` to b, c and x, and `out_proj`."""

    def __init__(self, spec: ConvSpec, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        self.backend: Backend = TorchBackend()
        self.in_proj = Linear(dim, 3 * spec.channels, spec.bias, dtype)
        self.conv1d = Factors(spec.channels, spec.width, has_bias=spec.bias)
        self.out_proj = Linear(spec.channels, dim, spec.bias, dtype)

    def forward(self, x: Tensor, span: Span, convolution: Tensor) -> Tensor:
        """Run the span's tokens through the layer, and advance its state.

        Args:
            x: [B, T, D] compute dtype.
            span: positions of the tokens in their sequences.
            convolution: [B, C, W - 1] float32; written in place.

        Returns:
            [B, T, D] compute dtype.
        """
        parts = ConvParts(self.in_proj(x), self.conv1d.weight, self.conv1d.bias, convolution, span.starts, span.counts)
        return self.out_proj(self.backend.gated_convolution(parts))  # type: ignore[no-any-return]  # Module.__call__
