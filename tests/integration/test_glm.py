"""GLM from every form of its files gives transformers' logits, with settings that published models do not have.

Tolerance as in test_model_parity.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.streaming import errors_of
from support.tiny_models import BUILDERS, GLM4_MOE_AIR, build_reference, randomise
from torch import nn

from graphcore import Engine
from graphcore.errors import CheckpointError, UnsupportedError

pytestmark = pytest.mark.thorough

TOLERANCE = 2e-5
LENGTH, PROMPT = 45, 21
CHANGES: Mapping[str, dict[str, object]] = {
    "not_normalised": {"norm_topk_prob": False, "routed_scaling_factor": 0.5},
    "one_group": {"topk_group": 1},
    "all_experts": {"n_routed_experts": 6, "num_experts_per_tok": 6, "n_group": 2, "topk_group": 2},
    "no_dense_layer": {"first_k_dense_replace": 0, "attention_bias": False},
    "dense_layers_only": {"first_k_dense_replace": 7},
    "odd_experts": {**GLM4_MOE_AIR, "hidden_size": 60, "moe_intermediate_size": 37, "n_routed_experts": 7},
    "one_key_head": {"partial_rotary_factor": 1.0, "rope_parameters": None, "num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True, "n_shared_experts": 3, "hidden_act": "gelu"},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "partial_rotary_factor": 0.5,
        }
    },
}


DENSE: Mapping[str, tuple[str, dict[str, object]]] = {
    "one_kv_head": ("glm4", {"num_key_value_heads": 1, "attention_bias": False, "tie_word_embeddings": True}),
    "odd_sizes": ("glm4", {"hidden_size": 60, "intermediate_size": 37, "head_dim": 20, "partial_rotary_factor": 0.3}),
    "whole_heads_rotate": ("glm4", {"partial_rotary_factor": 1.0, "hidden_act": "gelu"}),
    "linear": ("glm", {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}}),
    "half_rotates": ("glm", {"partial_rotary_factor": 0.5, "num_key_value_heads": 4, "attention_bias": False}),
}


def build(name: str = "glm4_moe", **changes: object) -> nn.Module:
    torch.manual_seed(0)
    model = BUILDERS[name](**changes)
    randomise(model, 0)
    model.set_attn_implementation("eager")
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("name", [*CHANGES, *DENSE])
def test_captured_steps_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    builder, changes = DENSE[name] if name in DENSE else ("glm4_moe", CHANGES[name])
    model = build(builder, **changes)
    model.save_pretrained(tmp_path)
    assert max(errors_of(tmp_path, model, "auto")) < TOLERANCE


def test_layers_that_predict_further_tokens_are_left_out_with_a_note(tmp_path: Path) -> None:
    model = build_reference("glm4_moe")
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    last = [name for name in stored if name.startswith("model.layers.3.")]
    layer = {name.replace(".3.", ".4.", 1): stored[name].clone() for name in last}
    further = {f"model.layers.4.{name}.weight": torch.ones(3) for name in ("enorm", "hnorm", "eh_proj")}
    save_file({**stored, **layer, **further}, tmp_path / "model.safetensors")
    assert max(errors_of(tmp_path, model, "eager")) < TOLERANCE
    with Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager") as engine:
        (note,) = [note for note in engine.notes if "left out" in note]
    assert "multi-token prediction (22 tensors)" in note  # with the experts of a projection as one
    config = json.loads((tmp_path / "config.json").read_text())
    nothing = {"num_mtp_layers": 0, "num_nextn_predict_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps({**config, **nothing}))
    with pytest.raises(CheckpointError, match="unexpected tensor"):
        Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_group": 2}, "2 groups .n_group. of 9 experts"),
        ({"n_group": 9, "topk_group": 9}, "9 groups"),
        ({"topk_group": 4}, "uses 4"),
        ({"topk_group": 1, "num_experts_per_tok": 4}, "its 4 experts"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"n_shared_experts": -1}, "n_shared_experts"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused_by_name(change: dict[str, object], message: str, tmp_path: Path) -> None:
    build_reference("glm4_moe").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager")
