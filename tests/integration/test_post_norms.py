"""OLMo 2, OLMo 3 and EXAONE 4 give transformers' logits with settings that published models do not have.

Tolerance as in test_model_parity.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from support.streaming import SIZES, runs_as
from support.tiny_models import BUILDERS, EXAONE4_FULL, LLAMA3_ROPE, VOCAB, randomise

from graphcore import Engine

pytestmark = pytest.mark.thorough

TOLERANCE = 2e-5
LENGTH, PROMPT = 45, 21
SLIDING, FULL = "sliding_attention", "full_attention"
CHANGES: Mapping[str, tuple[str, dict[str, object]]] = {
    "biases": ("olmo2", {"attention_bias": True, "tie_word_embeddings": True}),
    "wide_heads": ("olmo2", {"head_dim": 26, "num_key_value_heads": 1}),
    "as_many_kv_heads": ("olmo2", {"num_key_value_heads": None, "hidden_act": "gelu"}),
    "scaled": ("olmo2", {"rope_parameters": LLAMA3_ROPE, "rms_norm_eps": 0.01}),
    "sliding_layers_only": ("olmo3", {"layer_types": 5 * [SLIDING], "attention_bias": True}),
    "full_layer_first": ("olmo3", {"layer_types": [FULL, SLIDING, SLIDING, FULL, SLIDING], "num_key_value_heads": 4}),
    "two_bases": (
        "olmo3",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            }
        },
    ),
    "no_rotation": ("exaone4", {"layer_types": 5 * [FULL]}),
    "window_beyond_the_prompt": ("exaone4", {"sliding_window": 4096, "num_key_value_heads": 1}),
    "odd_sizes": ("exaone4", {"hidden_size": 60, "intermediate_size": 37, "head_dim": 18, "tie_word_embeddings": True}),
    "yarn": (
        "exaone4",
        {
            **EXAONE4_FULL,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
}


@pytest.mark.parametrize("name", CHANGES)
@torch.inference_mode()
def test_captured_steps_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    builder, changes = CHANGES[name]
    torch.manual_seed(0)
    model = BUILDERS[builder](**changes)
    randomise(model, 0)
    model.set_attn_implementation("eager")
    model.eval().save_pretrained(tmp_path)
    ids = torch.randint(0, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(100))
    expected, row = model(input_ids=ids, use_cache=False).logits, ids[0].tolist()
    overrides = [*SIZES, "batch_size=1"]
    with Engine.load(tmp_path, dtype="fp32", device="cpu", graph="auto", overrides=overrides) as engine:
        assert runs_as(engine, "auto")
        assert (engine.logits(ids) - expected).abs().max() < TOLERANCE
        steps = [engine.runner.extend([row[:PROMPT]], [0])]
        steps += [engine.runner.extend([[token]], [at]) for at, token in enumerate(row[PROMPT:], start=PROMPT)]
        assert (torch.cat(steps) - expected[0, PROMPT - 1 :]).abs().max() < TOLERANCE
