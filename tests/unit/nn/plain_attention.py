"""Attention as the textbook has it, in float64, from a module's own weights and an additive mask."""

import torch
from torch import Tensor

from graphcore.nn.attention import Attention
from graphcore.nn.rope import rope_table
from graphcore.nn.span import Span

SEED_SCALE = 0.2


def fill(module: torch.nn.Module, seed: int = 1) -> None:
    """Give every buffer seeded random values; norm weights are drawn around one.

    They are drawn in float32: what a generator gives for another dtype depends on torch's version.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, buffer in module.named_buffers():
        mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        buffer.copy_(torch.empty(buffer.shape).normal_(mean, SEED_SCALE, generator=generator))


def run(module: Attention, x: Tensor, slots: int | None = None) -> Tensor:
    """Run the module from an empty cache, at positions 0 .. T-1."""
    spec, (batch, tokens, _) = module.spec, x.shape
    caches = [torch.zeros(batch, spec.kv_heads, slots or tokens, spec.head_dim, dtype=x.dtype) for _ in range(2)]
    table = torch.arange(batch, dtype=torch.int32)[:, None]
    span = Span(torch.zeros(batch, dtype=torch.int64), torch.full((batch,), tokens))
    rope = None
    if spec.rope is not None:
        rope = rope_table(spec.rope, spec.head_dim, tokens)[span.positions(tokens)]
    return module(x, rope, span, *caches, table)  # type: ignore[no-any-return]


def plain(module: Attention, x: Tensor, mask: Tensor) -> Tensor:
    """Return the same by the formula. Args: x: [B, T, D].  mask: [1, 1, T, T] additive.  Returns [B, T, D] float64."""
    spec, wide = module.spec, x.double()
    weights = {name: tensor.double() for name, tensor in module.named_buffers()}
    batch, tokens, _ = x.shape

    def heads(name: str, num_heads: int) -> Tensor:
        out = wide @ weights[f"{name}_proj.weight"].T + weights.get(f"{name}_proj.bias", torch.zeros(1))
        out = out.reshape(batch, tokens, num_heads, spec.head_dim).transpose(1, 2)  # [B, H, T, E]
        if name == "v":
            return out
        if spec.qk_norm is not None:
            rms = torch.sqrt((out**2).mean(-1, keepdim=True) + spec.qk_norm.eps)
            out = out / rms * weights[f"{name}_norm.weight"]
        return out if spec.rope is None else turned(out, spec.rope.theta)

    repeats = spec.heads // spec.kv_heads
    query = heads("q", spec.heads)
    key, value = (heads(name, spec.kv_heads).repeat_interleave(repeats, dim=1) for name in ("k", "v"))
    weight = (spec.scale * query @ key.transpose(2, 3) + mask.double()).softmax(-1)
    joined = (weight @ value).transpose(1, 2).reshape(batch, tokens, spec.heads * spec.head_dim)
    if spec.sub_norm is not None:
        rms = torch.sqrt((joined**2).mean(-1, keepdim=True) + spec.sub_norm.eps)
        joined = joined / rms * weights["attn_sub_norm.weight"]
    return joined @ weights["o_proj.weight"].T + weights.get("o_proj.bias", torch.zeros(1))


def turned(x: Tensor, theta: float) -> Tensor:
    """Rotate [B, H, T, E] by its positions, each pair as a complex number."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half], x[..., half:])
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * frequencies
    rotated = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((rotated.real, rotated.imag), dim=-1)
