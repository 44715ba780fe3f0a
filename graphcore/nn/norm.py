"""RMSNorm and LayerNorm, computed in float32 and rounded as in each model family.

Legend: B batch, T tokens, D the normalised dim. Weights stay float32 whatever the compute dtype: they are small, and
Gemma's (1 + w) would lose bits of w in bf16.
"""

import torch
from torch import Tensor, nn

from graphcore.kernels.backend import Backend, TorchBackend
from graphcore.nn.spec import NormSpec


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight. Source: Zhang and Sennrich 2019, section 3."""

    weight: Tensor

    def __init__(self, spec: NormSpec, dim: int) -> None:
        super().__init__()
        self.eps = spec.eps
        self.scale_in_float32 = spec.scale_in_float32
        self.backend: Backend = TorchBackend()
        self.register_buffer("weight", torch.ones(dim, dtype=torch.float32))

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Normalise.

        Args:
            x: [..., D] any floating dtype.
            dtype: dtype of the result; x's own by default.

        Returns:
            [..., D].
        """
        dtype = dtype or x.dtype
        kernels = self.backend.token_rows(x)
        if kernels is not None:
            return kernels.rms_norm(x, self.weight, self.eps, dtype, rounds_first=not self.scale_in_float32)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.scale_in_float32:
            return (wide * self.weight).to(dtype)
        return wide.to(dtype) * self.weight.to(dtype)


class UnitNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps), without a weight, for Gemma 4's values."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.backend: Backend = TorchBackend()

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` [..., D] in float32; returns [..., D] in its dtype."""
        kernels = self.backend.token_rows(x)
        if kernels is not None:
            return kernels.rms_norm(x, None, self.eps, x.dtype)
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias. Source: Ba et al. 2016, equation 4."""

    weight: Tensor
    bias: Tensor

    def __init__(self, spec: NormSpec, dim: int) -> None:
        super().__init__()
        self.eps = spec.eps
        self.register_buffer("weight", torch.ones(dim, dtype=torch.float32))
        self.register_buffer("bias", torch.zeros(dim, dtype=torch.float32))

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Normalise `x` [..., D] in float32; returns [..., D] in `dtype` (x's own by default)."""
        wide = x.float()
        wide = nn.functional.layer_norm(wide, wide.shape[-1:], self.weight, self.bias, self.eps)
        return wide.to(dtype or x.dtype)


def build_norm(spec: NormSpec, dim: int) -> RMSNorm | LayerNorm:
    """Return the norm module of `spec` for a last axis of size `dim`."""
    return RMSNorm(spec, dim) if spec.kind == "rms" else LayerNorm(spec, dim)
