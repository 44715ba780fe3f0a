"""Whole-model parity at the true shapes of the models that graphcore is developed for: minutes and gigabytes.

    pytest -m slow -s tests/integration/test_true_shapes.py

Random weights, saved in bf16 as published checkpoints are, run in float32 by transformers and by graphcore. One model
at a time is in memory. Measured errors stand in docs/lab/correctness.md.
"""

import gc
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphcore import Engine

NUM_TOKENS = 32
TOLERANCE = 1e-4
LLAMA_3_2_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": True,
}
QWEN3_1_7B = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "tie_word_embeddings": True,
}
GEMMA_3_1B = {
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
    "sliding_window": 16,  # 512 in the published one: longer than what is run here, and would not show
    "tie_word_embeddings": True,
}
Build = Callable[[], nn.Module]


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**LLAMA_3_2_1B))


def _qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**QWEN3_1_7B))


def _gemma3() -> nn.Module:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA_3_1B))


MODELS: Mapping[str, Build] = {"Llama-3.2-1B": _llama, "Qwen3-1.7B": _qwen3, "gemma-3-1b": _gemma3}


@torch.no_grad()
def save_and_run(build: Build, folder: Path, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Save a random model in bf16; return transformers' float32 logits of it and its final hidden states."""
    from transformers import AutoModelForCausalLM

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        torch.manual_seed(0)
        model = build()
    finally:
        torch.set_default_dtype(default)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    del model
    gc.collect()
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    reference = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    output = reference(input_ids=ids, use_cache=False, output_hidden_states=True)
    return output.logits, output.hidden_states[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_logits_at_the_true_shape_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    began = time.perf_counter()
    ids = torch.randint(0, 100_000, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(1))
    expected, final = save_and_run(MODELS[name], tmp_path, ids)
    gc.collect()
    transformers_seconds = time.perf_counter() - began
    began = time.perf_counter()
    overrides = ["context_length=64", "prefill_chunk=20"]
    with Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager", overrides=overrides) as engine:
        logits, hidden = engine.logits(ids, output_hidden_states=True)
        with torch.inference_mode():
            decoded = torch.cat([engine.runner.extend([[int(token)]], [at]) for at, token in enumerate(ids[0])])
        normed = engine.runner.builder.decoder.head.norm(hidden[-1])
    errors = [(found - wanted).abs().max().item() for found, wanted in ((logits, expected), (decoded, expected[0]))]
    hidden_error = (normed - final).abs().max().item()
    print(f"\n{name}: largest error of logits {errors[0]:.1e}, token by token {errors[1]:.1e}, of final hidden states")
    print(f"{hidden_error:.1e}; logits vary by {expected.std().item():.2f}; transformers {transformers_seconds:.0f} s,")
    print(f"graphcore {time.perf_counter() - began:.0f} s, load included")
    assert max(errors) < TOLERANCE
    for file in tmp_path.iterdir():
        file.unlink()
