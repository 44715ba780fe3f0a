"""One layer of each kind at the true shapes of published models: transformers' logits and hidden states.

    pytest -m slow -s tests/integration/test_true_layers.py

Random float32 weights with a small vocabulary. One model at a time is in memory, so that 9 GB are enough. Measured
errors stand in docs/compatibility.md.
"""

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.tiny_models import BUILDERS, MINISTRAL_ROPE, VOCAB, randomise
from torch import Tensor

from graphcore import Engine

LENGTH, PROMPT, WINDOW = 45, 21, 16  # the window is shorter than published ones, which this length would not fill
TOLERANCE = 1e-4
SLIDING, FULL = "sliding_attention", "full_attention"
DELTA_RULE = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", FULL],
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
GEMMA4 = {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL], "head_dim": 256, "global_head_dim": 512}
GEMMA4 |= {"sliding_window": WINDOW, "final_logit_softcapping": 30.0}
WITHOUT_FEATURES = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "attention_k_eq_v": True}
GRANITE_FACTORS = {"embedding_multiplier": 12.0, "attention_multiplier": 0.015625, "residual_multiplier": 0.22}
LATENT = {
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
SHAPES: Mapping[str, tuple[str, dict[str, object]]] = {
    "Qwen3.5-9B": (
        "qwen3_5",
        {
            **DELTA_RULE,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_attention_heads": 16,
            "linear_num_value_heads": 32,
        },
    ),
    "Qwen3.5-27B": (
        "qwen3_5",
        {
            **DELTA_RULE,
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_attention_heads": 24,
            "linear_num_value_heads": 48,
        },
    ),
    "Phi-4-mini": (
        "phi3",
        {
            "num_hidden_layers": 1,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": 48 * [1.0],
                "long_factor": [1.0 + pair / 2 for pair in range(48)],
            },
        },
    ),
    "StarCoder2-3B": (
        "starcoder2",
        {
            "num_hidden_layers": 1,
            "sliding_window": WINDOW,
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_attention_heads": 24,
            "num_key_value_heads": 2,
        },
    ),
    "StableLM-2-1.6B": (
        "stablelm",
        {
            "num_hidden_layers": 1,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
        },
    ),
    "Gemma-2B": (
        "gemma",
        {
            "num_hidden_layers": 1,
            "hidden_size": 2048,
            "intermediate_size": 16384,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 256,
        },
    ),
    "Gemma-2-9B": (
        "gemma2",
        {
            "num_hidden_layers": 2,
            "sliding_window": WINDOW,
            "hidden_size": 3584,
            "intermediate_size": 14336,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "Gemma-4-E2B": (  # the last two share keys and values, and have MLPs of twice the width
        "gemma4",
        {
            **GEMMA4,
            "num_hidden_layers": 4,
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
            "num_kv_shared_layers": 2,
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "hidden_size_per_layer_input": 256,
        },
    ),
    "Gemma-4-31B": (
        "gemma4",
        {
            **GEMMA4,
            **WITHOUT_FEATURES,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
        },
    ),
    "Gemma-4-26B-A4B": (
        "gemma4",
        {
            **GEMMA4,
            **WITHOUT_FEATURES,
            "hidden_size": 2816,
            "intermediate_size": 2112,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
        },
    ),
    "OLMo-3-32B": (
        "olmo3",
        {
            "num_hidden_layers": 2,
            "layer_types": [SLIDING, FULL],
            "sliding_window": WINDOW,
            "hidden_size": 5120,
            "intermediate_size": 27648,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
        },
    ),
    "EXAONE-4.0-32B": (
        "exaone4",
        {
            "num_hidden_layers": 2,
            "layer_types": [SLIDING, FULL],
            "sliding_window": WINDOW,
            "hidden_size": 5120,
            "intermediate_size": 27392,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
    "LFM2-1.2B": (
        "lfm2",
        {
            "num_hidden_layers": 2,
            "layer_types": ["conv", FULL],
            "hidden_size": 2048,
            "intermediate_size": 12288,
            "block_multiple_of": 256,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
    "LFM2-8B-A1B": (  # a dense layer, and one with half of the experts
        "lfm2_moe",
        {
            "num_hidden_layers": 2,
            "layer_types": ["conv", FULL],
            "hidden_size": 2048,
            "intermediate_size": 7168,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
        },
    ),
    "GLM-4-32B": (
        "glm4",
        {
            "num_hidden_layers": 1,
            "hidden_size": 6144,
            "intermediate_size": 23040,
            "num_attention_heads": 48,
            "num_key_value_heads": 2,
            "head_dim": 128,
        },
    ),
    "GLM-4.5-Air": (  # a dense layer, and one with an eighth of the experts
        "glm4_moe",
        {
            "num_hidden_layers": 2,
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "n_routed_experts": 16,
            "num_experts_per_tok": 8,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 1408,
        },
    ),
    "DeepSeek-V2-Lite": (  # a dense layer, and one with half of the experts
        "deepseek_v2",
        {
            **LATENT,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "n_routed_experts": 32,
            "num_experts_per_tok": 6,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1408,
            "max_position_embeddings": 163840,
            "rope_parameters": {**DEEPSEEK_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "DeepSeek-V3": (  # a dense layer, and one with two experts of each group
        "deepseek_v3",
        {
            **LATENT,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "n_routed_experts": 16,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "n_shared_experts": 1,
            "moe_intermediate_size": 2048,
            "max_position_embeddings": 163840,
            "rope_parameters": {**DEEPSEEK_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "GLM-4.7-Flash": (  # a dense layer, and one with half of the experts
        "glm4_moe_lite",
        {
            **LATENT,
            "hidden_size": 2048,
            "intermediate_size": 10240,
            "num_attention_heads": 20,
            "num_key_value_heads": 20,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "n_routed_experts": 32,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 1.8,
            "n_shared_experts": 1,
            "moe_intermediate_size": 1536,
        },
    ),
    "Ministral-3-8B": (
        "ministral3",
        {
            "num_hidden_layers": 1,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_parameters": {**MINISTRAL_ROPE, "rope_theta": 1e6, "llama_4_scaling_beta": 0.1},
        },
    ),
    "Mixtral-8x7B": (  # with 3 of its 8 experts, which would take 11 GB twice
        "mixtral",
        {
            "num_hidden_layers": 1,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 3,
        },
    ),
    "Granite-3.3-2B": (
        "granite",
        {
            **GRANITE_FACTORS,
            "num_hidden_layers": 2,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "logits_scaling": 8.0,
        },
    ),
    "Granite-3.0-1B-A400M": (
        "granite_moe",
        {
            **GRANITE_FACTORS,
            "num_hidden_layers": 2,
            "hidden_size": 1024,
            "intermediate_size": 512,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "num_experts_per_tok": 8,
            "logits_scaling": 6.0,
        },
    ),
    "SmolLM3-3B": (
        "smollm3",
        {
            "num_hidden_layers": 2,
            "no_rope_layers": [1, 0],
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
        },
    ),
}


@dataclass(frozen=True)
class Expected:
    """What transformers computes.

    Attributes:
        logits: [1, T, V] float32.
        hidden: the stream after the embedding and after each layer but the last, [1, T, D] each.
        normed: the last layer's stream after the final norm, [1, T, D].
    """

    logits: Tensor
    hidden: tuple[Tensor, ...]
    normed: Tensor


@torch.no_grad()
def save_and_run(name: str, folder: Path, ids: Tensor) -> Expected:
    """Save a random model, and return what transformers computes with it."""
    builder, changes = SHAPES[name]
    torch.manual_seed(0)
    model = BUILDERS[builder](**changes)
    randomise(model, 0)
    model.set_attn_implementation("eager")
    model.save_pretrained(folder, max_shard_size="2GB")
    output = model.eval()(input_ids=ids, use_cache=False, output_hidden_states=True)
    return Expected(output.logits, tuple(output.hidden_states[:-1]), output.hidden_states[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_layers_of_the_true_shape_give_transformers_logits_and_hidden_states(name: str, tmp_path: Path) -> None:
    ids = torch.randint(0, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(100))
    expected = save_and_run(name, tmp_path, ids)
    gc.collect()
    overrides = ["context_length=64", "prefill_chunk=16", "batch_size=1"]
    with Engine.load(tmp_path, dtype="fp32", device="cpu", graph="captured", overrides=overrides) as engine:
        logits, hidden = engine.logits(ids, output_hidden_states=True)
        row = ids[0].tolist()
        steps = [engine.runner.extend([row[:PROMPT]], [0])]
        steps += [engine.runner.extend([[token]], [at]) for at, token in enumerate(row[PROMPT:], start=PROMPT)]
        with torch.inference_mode():
            normed = engine.runner.builder.decoder.head.norm(hidden[-1])
    found = {
        "logits": (logits - expected.logits).abs().max().item(),
        "token by token": (torch.cat(steps) - expected.logits[0, PROMPT - 1 :]).abs().max().item(),
        "hidden states": max(_relative(*pair) for pair in zip(hidden, expected.hidden, strict=False)),
        "final hidden states": _relative(normed, expected.normed),
    }
    print(f"\n{name}: largest errors {', '.join(f'{what} {error:.1e}' for what, error in found.items())};", end=" ")
    print(f"logits up to {expected.logits.abs().max():.1f}, the stream up to {expected.hidden[-1].abs().max():.1f}")
    assert max(found.values()) < TOLERANCE
    for file in tmp_path.iterdir():
        file.unlink()


def _relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()
