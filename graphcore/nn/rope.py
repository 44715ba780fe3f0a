"""Rotary position embedding: tables once per model, one rotation for every architecture.

Legend: B batch, T tokens, H heads, E head dim, P positions.

    angle(p, i) = p / theta^(2i / E)          for i in 0 .. E/2 - 1, then scaled
    (x[i], x[i + E/2]) -> (x[i] cos - x[i + E/2] sin,  x[i + E/2] cos + x[i] sin)

Source: Su et al. 2021, equation 34, in the half-split pairing of GPT-NeoX.
"""

import math

import torch
from torch import Tensor

from graphcore.nn.spec import DivisorScaling, LinearScaling, Llama3Scaling, RopeSpec, YarnScaling


def rope_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """Return the angle per position of each pair: [E/2] float32, radians."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / spec.theta**exponents
    match spec.scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / factor
        case DivisorScaling(divisors):
            return plain / torch.tensor(divisors, dtype=torch.float32)
        case Llama3Scaling():
            return _llama3_frequencies(plain, spec.scaling)
        case YarnScaling():
            return _yarn_frequencies(plain, spec.theta, spec.scaling)


def _llama3_frequencies(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Divide the long wavelengths by the factor and blend the band in between."""
    wavelengths = 2 * math.pi / plain
    longest_kept = scaling.original_context / scaling.high_freq_factor
    shortest_scaled = scaling.original_context / scaling.low_freq_factor
    blend = (scaling.original_context / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - blend) * plain / scaling.factor + blend * plain
    scaled = torch.where(wavelengths > shortest_scaled, plain / scaling.factor, between)
    return torch.where(wavelengths < longest_kept, plain, scaled)


def _yarn_frequencies(plain: Tensor, theta: float, scaling: YarnScaling) -> Tensor:
    """Blend from the plain frequencies to the divided ones over a ramp of pairs."""
    pairs = plain.shape[0]

    def pair_of(turns: float) -> float:
        """Return the pair, between whole ones too, that turns so often over the original context."""
        return pairs * math.log(scaling.original_context / (turns * 2 * math.pi)) / math.log(theta)

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.rounds_ramp:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    width = last - first or 0.001
    divided = ((torch.arange(pairs, dtype=torch.float32) - first) / width).clamp(0, 1)
    return plain / scaling.factor * divided + plain * (1 - divided)


def rope_table(spec: RopeSpec, head_dim: int, positions: int) -> Tensor:
    """Return cosines and sines of positions 0 .. P-1: [P, 2, E/2] float32 (index 0 cos, 1 sin)."""
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * rope_frequencies(spec, head_dim)  # [P, E/2]
    table = torch.stack((angles.cos(), angles.sin()), dim=1)
    return table * spec.scaling.attention_factor if isinstance(spec.scaling, YarnScaling) else table


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate each pair of `x` by its position's angle, in float32.

    Args:
        x: [B, T, H, E] compute dtype.
        rope: [B, T, 2, E/2] float32, rows of `rope_table`.

    Returns:
        [B, T, H, E] compute dtype.
    """
    cos, sin = rope[:, :, None, 0], rope[:, :, None, 1]  # [B, T, 1, E/2]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
