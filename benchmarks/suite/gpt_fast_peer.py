"""gpt-fast's way to decode, written anew from what its README and its blog post describe; for Llama's shapes in bf16.

    python gpt_fast_peer.py DEVICE CONTEXT < lines                     (peer_answers.py has the lines)

A plain model of Linear layers with q, k and v in one matrix; a KV cache of a fixed size that is written at `position`;
attention by scaled_dot_product_attention under a mask that is looked up by position; one token's step compiled with
mode="reduce-overhead" and fullgraph=True, which captures it as a CUDA graph, with Inductor's coordinate descent; a
greedy loop that never waits for the host. Prefill runs uncompiled.

Source: "Accelerating Generative AI with PyTorch II: GPT, Fast" (pytorch.org, 2023), and the README of
pytorch-labs/gpt-fast. Rotary frequencies are Llama's without long-context scaling, which takes the same time.

Legend: T tokens, D model dim, H heads, K kv heads, E head dim, S cache slots, V vocab.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from suite.peer_answers import answer, prompt_of


class Attention(nn.Module):
    """Grouped attention over a static cache."""

    k_cache: Tensor
    v_cache: Tensor

    def __init__(self, config: dict[str, Any], context: int) -> None:
        super().__init__()
        dim, self.heads, self.kv_heads = (
            config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads")
        )
        self.head_dim = config.get("head_dim") or dim // self.heads
        self.wqkv = nn.Linear(dim, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.wo = nn.Linear(self.heads * self.head_dim, dim, bias=False)
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.zeros(1, self.kv_heads, context, self.head_dim), persistent=False)

    def forward(self, x: Tensor, positions: Tensor, rope: Tensor, mask: Tensor) -> Tensor:
        tokens = x.shape[1]
        sizes = [count * self.head_dim for count in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (part.view(1, tokens, -1, self.head_dim) for part in self.wqkv(x).split(sizes, dim=-1))
        q, k, v = (part.transpose(1, 2) for part in (rotate(q, rope), rotate(k, rope), v))  # [1, H or K, T, E]
        self.k_cache[:, :, positions] = k
        self.v_cache[:, :, positions] = v
        out = F.scaled_dot_product_attention(q, self.k_cache, self.v_cache, attn_mask=mask, enable_gqa=True)
        y: Tensor = self.wo(out.transpose(1, 2).reshape(1, tokens, -1))
        return y


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate halves of [1, T, H, E] by the cosines and sines [T, 2, E/2]."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = rope[:, 0, None], rope[:, 1, None]  # [T, 1, E/2]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).type_as(x)


class Layer(nn.Module):
    """Attention and a gated MLP, each after a norm."""

    def __init__(self, config: dict[str, Any], context: int) -> None:
        super().__init__()
        dim, hidden, eps = config["hidden_size"], config["intermediate_size"], config.get("rms_norm_eps", 1e-5)
        self.attention = Attention(config, context)
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim, eps), nn.RMSNorm(dim, eps)

    def forward(self, x: Tensor, positions: Tensor, rope: Tensor, mask: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), positions, rope, mask)
        normed = self.ffn_norm(h)
        y: Tensor = h + self.w2(F.silu(self.w1(normed)) * self.w3(normed))
        return y


class Transformer(nn.Module):
    """The whole model; tables by position are looked up inside, so that a step's inputs are a token and a position."""

    ropes: Tensor
    masks: Tensor

    def __init__(self, config: dict[str, Any], context: int) -> None:
        super().__init__()
        dim, vocab = config["hidden_size"], config["vocab_size"]
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(config, context) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(dim, config.get("rms_norm_eps", 1e-5))
        self.output = nn.Linear(dim, vocab, bias=False)
        head_dim = config.get("head_dim") or dim // config["num_attention_heads"]
        powers = torch.arange(0, head_dim, 2).float() / head_dim
        angles = torch.arange(context).float()[:, None] / float(config.get("rope_theta", 10000.0)) ** powers
        self.register_buffer("ropes", torch.stack([angles.cos(), angles.sin()], dim=1), persistent=False)
        whole = torch.ones(context, context, dtype=torch.bool).tril()
        self.register_buffer("masks", whole, persistent=False)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the logits after the last token, [1, V]. Args: ids: [1, T].  positions: [T]."""
        x = self.tok_embeddings(ids)
        mask, rope = self.masks[positions], self.ropes[positions]
        for layer in self.layers:
            x = layer(x, positions, rope, mask)
        logits: Tensor = self.output(self.norm(x[:, -1]))
        return logits


class FastPeer:
    """A model on random weights, and its two ways to run."""

    def __init__(
        self, config: dict[str, Any], device: torch.device, context: int, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        torch.manual_seed(0)
        torch.set_default_dtype(dtype)
        with torch.device(device):
            self.model = Transformer(config, context).eval()
        torch.set_default_dtype(torch.float32)
        self.model.ropes = self.model.ropes.float()
        self.device = device
        self.step: Callable[[Tensor, Tensor], Tensor] = self.next_token

    def next_token(self, token: Tensor, position: Tensor) -> Tensor:
        """Return the likeliest next token, [1, 1]."""
        logits: Tensor = self.model(token, position)
        return logits.argmax(dim=-1, keepdim=True)

    def compile(self, **how: str) -> None:
        """Compile a token's step as one graph, and run it until it is captured. Args: how: torch.compile's."""
        self.step = torch.compile(self.next_token, fullgraph=True, **how)  # type: ignore[call-overload]  # its options
        self.decode(self.prefill(prompt_of(8)), 8, 4)

    @torch.no_grad()
    def prefill(self, prompt: list[int]) -> Tensor:
        """Run a prompt; what lies behind it in the cache is masked until it is written again."""
        ids = torch.tensor([prompt], device=self.device)
        return self.next_token(ids, torch.arange(len(prompt), device=self.device))

    @torch.no_grad()
    def decode(self, token: Tensor, start: int, new_tokens: int) -> list[int]:
        """Return that many greedy tokens; the host reads none of them before the last."""
        position = torch.tensor([start], device=self.device)
        chosen = []
        for _ in range(new_tokens):
            torch.compiler.cudagraph_mark_step_begin()
            token = self.step(token, position).clone()
            position = position + 1
            chosen.append(token)
        return torch.cat(chosen, dim=1)[0].tolist()

    def weight_nbytes(self) -> int:
        """Return the bytes of all parameters but the embedding table."""
        own = sum(parameter.nbytes for parameter in self.model.parameters())
        return own - self.model.tok_embeddings.weight.nbytes

    def name(self) -> str:
        return "gpt-fast's loop, rewritten"


def make(config: dict[str, Any], device: torch.device, context: int) -> FastPeer:
    """Return a peer that has compiled its step; without a GPU, where nothing can be captured, one that has not."""
    peer = FastPeer(config, device, context)
    if device.type == "cuda":
        import torch._inductor.config as inductor

        inductor.coordinate_descent_tuning = True  # as gpt-fast's generate.py sets it
        peer.compile(mode="reduce-overhead")
    return peer


if __name__ == "__main__":
    answer(make)
