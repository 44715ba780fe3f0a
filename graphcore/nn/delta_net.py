"""Gated DeltaNet, a linear attention: projections, a short convolution, the gated delta rule, a gated norm.

Legend: B batch, T tokens, D model dim, C channels, H value heads, N key dim, M value dim, W width of the convolution.

Everything between the projections is one custom op (kernels/ops/gated_delta.py). It takes lengths as tensors, so that
they never cause a recompilation.
"""

import torch
from torch import Tensor, nn

from graphcore.kernels.backend import Backend, TorchBackend
from graphcore.kernels.ops.gated_delta import DeltaParts
from graphcore.nn.linear import Linear
from graphcore.nn.span import Span
from graphcore.nn.spec import DeltaSpec


class Factors(nn.Module):
    """A float32 vector or matrix as the buffer `weight`, and if asked for a `bias` with a number for each row."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, *shape: int, has_bias: bool = False) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(shape, dtype=torch.float32))
        self.register_buffer("bias", torch.zeros(shape[0], dtype=torch.float32) if has_bias else None)


class DeltaNet(nn.Module):
    """The Gated DeltaNet layer: projections of queries, keys, values and gates, the delta rule, output projection.

    Attributes:
        rate: [H] float32, -exp(A_log), decay rate of each head.
        dt_bias: [H] float32, bias of the decay gate's input.
    """

    rate: Tensor
    dt_bias: Tensor

    def __init__(self, spec: DeltaSpec, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        self.backend: Backend = TorchBackend()
        values = spec.value_heads * spec.value_dim
        self.in_proj_qkv = Linear(dim, spec.channels, bias=False, dtype=dtype)
        self.in_proj_z = Linear(dim, values, bias=False, dtype=dtype)
        self.in_proj_a = Linear(dim, spec.value_heads, bias=False, dtype=dtype)
        self.in_proj_b = Linear(dim, spec.value_heads, bias=False, dtype=dtype)
        self.conv1d = Factors(spec.channels, spec.width)
        self.register_buffer("rate", torch.zeros(spec.value_heads, dtype=torch.float32))
        self.register_buffer("dt_bias", torch.zeros(spec.value_heads, dtype=torch.float32))
        self.norm = Factors(spec.value_dim)
        self.out_proj = Linear(values, dim, bias=False, dtype=dtype)

    def forward(self, x: Tensor, span: Span, recurrent: Tensor, convolution: Tensor) -> Tensor:
        """Run the span's tokens through the layer, and advance its states.

        Args:
            x: [B, T, D] compute dtype.
            span: positions of the tokens in their sequences.
            recurrent: [B, H, N, M] float32; written in place.
            convolution: [B, C, W - 1] float32; written in place.

        Returns:
            [B, T, D] compute dtype.
        """
        parts = DeltaParts(
            self.in_proj_qkv(x),
            self.in_proj_z(x),
            self.in_proj_a(x),
            self.in_proj_b(x),
            self.conv1d.weight,
            None,
            self.rate,
            self.dt_bias,
            self.norm.weight,
            convolution,
            recurrent,
            span.starts,
            span.counts,
            self.spec.key_heads,
            self.spec.eps,
            self.spec.tiled,
        )
        answers = self.backend.delta_heads(parts)
        return self.out_proj(answers)  # type: ignore[no-any-return]  # Module.__call__
