"""Rotary position embedding: cos and sin tables, and one rotation for all architectures.

Legend: B batch, T tokens, H heads, E head dim, R features of a head that rotate (usually E), P positions.

    angle(p, i) = p / theta^(2i / R)          for i in 0 .. R/2 - 1, then scaled
    (x[i], x[i + R/2]) -> (x[i] cos - x[i + R/2] sin,  x[i + R/2] cos + x[i] sin)

In some models the rotated queries are also multiplied by a factor of their position (`scale_queries`).

Source: Su et al. 2021, equation 34, in the half-split pairing of GPT-NeoX.
"""

import math

import torch
from torch import Tensor

from graphcore.nn.rope_spec import (
    DivisorScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    RopeSpec,
    YarnScaling,
)


def rope_frequencies(spec: RopeSpec, head_dim: int, context: int = 1) -> Tensor:
    """Return the angle of each pair per position: [R/2] float32, radians.

    Args:
        context: number of positions of a table, by which LongRoPE chooses one of its lists of divisors.
    """
    width = spec.width or head_dim
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width
    plain = 1.0 / spec.theta**exponents
    match spec.scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / factor
        case DivisorScaling(divisors):
            return plain / torch.tensor(divisors, dtype=torch.float32, device="cpu")
        case Llama3Scaling():
            return _llama3_frequencies(plain, spec.scaling)
        case ProportionalScaling(share, factor):
            return (
                plain / factor * (torch.arange(len(plain), dtype=torch.int64, device="cpu") < int(share * width // 2))
            )
        case LongScaling(short, long, original_context):
            chosen = torch.tensor(long if context > original_context else short, dtype=torch.float32, device="cpu")
            return 1.0 / (chosen * spec.theta**exponents)  # rounded as in transformers
        case YarnScaling():
            return _yarn_frequencies(plain, spec.theta, spec.scaling)


def _llama3_frequencies(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Return frequencies: high ones unchanged, low ones divided by the factor, a linear blend in between."""
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
    """Return frequencies: a linear ramp over the pairs, from the plain ones to those divided by the factor."""
    pairs = plain.shape[0]

    def pair_of(turns: float) -> float:
        """Return the (fractional) index of the pair that makes this many turns over the original context."""
        return pairs * math.log(scaling.original_context / (turns * 2 * math.pi)) / math.log(theta)

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.rounds_ramp:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    width = last - first or 0.001
    divided = ((torch.arange(pairs, dtype=torch.float32, device="cpu") - first) / width).clamp(0, 1)
    return plain / scaling.factor * divided + plain * (1 - divided)


def rope_table(spec: RopeSpec, head_dim: int, positions: int) -> Tensor:
    """Return cosines and sines of positions 0 .. P-1: [P, 2, R/2] float32 (index 0 cos, 1 sin)."""
    angles = torch.arange(positions, dtype=torch.float32, device="cpu")[:, None] * rope_frequencies(
        spec, head_dim, positions
    )  # [P, R/2]
    table = torch.stack((angles.cos(), angles.sin()), dim=1)
    return table * spec.scaling.attention_factor if isinstance(spec.scaling, YarnScaling | LongScaling) else table


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate each pair of `x` by its position's angle, in float32; features after the first R stay as they are.

    Args:
        x: [B, T, H, E] compute dtype.
        rope: [B, T, 2, R/2] float32, rows of `rope_table`.

    Returns:
        [B, T, H, E] compute dtype.
    """
    cos, sin = rope[:, :, None, 0], rope[:, :, None, 1]  # [B, T, 1, R/2]
    width = 2 * rope.shape[-1]
    first, second = (x if width == x.shape[-1] else x[..., :width]).float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), dim=-1)


def scale_queries(query: Tensor, starts: Tensor, beta: float, period: int) -> Tensor:
    """Multiply rotated queries by a factor of their position p, 1 + beta * log(1 + floor(p / period)), in float32.

    Args:
        query: [B, T, H, E] compute dtype.
        starts: [B] int64, position of each sequence's first token.
        beta, period: fields of `PositionScale`.

    Returns:
        [B, T, H, E] compute dtype.
    """
    positions = starts[:, None] + torch.arange(query.shape[1], device=starts.device, dtype=torch.int64)  # [B, T]
    factors = 1 + beta * (1 + positions // period).float().log()
    return (query.float() * factors[..., None, None]).to(query.dtype)
