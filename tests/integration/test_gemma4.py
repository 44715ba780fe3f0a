"""Gemma 4's own mathematics gives transformers' logits: shared keys, features of layers, two kinds of heads, experts.

Tolerance as in test_model_parity, a little wider: features add products to each layer. A step token by token follows
prefill chunks that are shorter and longer than the window, so that a ring that later layers read has wrapped.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.streaming import runs_as
from support.tiny_models import GEMMA4, GEMMA4_DENSE, GEMMA4_MOE, VOCAB, WINDOW, gemma4, randomise
from torch import Tensor, nn

from graphcore import Engine
from graphcore.errors import CheckpointError, UnsupportedError
from graphcore.kvcache.sizes import touched_pages
from graphcore.weights.matching import FEATURES

pytestmark = pytest.mark.thorough

TOLERANCE = 1e-4  # of logits up to 4; transformers' own float32 is as far from float64
LENGTH, PROMPT = 45, 37
SLIDING, FULL = "sliding_attention", "full_attention"
CHANGES: Mapping[str, dict[str, object]] = {
    "features_and_sharing": {},
    "features_alone": {"num_kv_shared_layers": 0},
    "sharing_alone": {"num_kv_shared_layers": 4, "use_double_wide_mlp": False},
    "one_layer_shares": {"num_kv_shared_layers": 1},
    "keys_are_values": GEMMA4_DENSE,
    "experts": GEMMA4_MOE,
    "experts_and_features": {**GEMMA4_MOE, "hidden_size_per_layer_input": 12, "num_kv_shared_layers": 2},
    "all_experts": {**GEMMA4_MOE, "top_k_experts": 6, "num_experts": 6},
    "odd_sizes": {
        "hidden_size": 60,
        "intermediate_size": 37,
        "hidden_size_per_layer_input": 7,
        "head_dim": 10,
        "global_head_dim": 22,
    },
    "equal_heads": {"head_dim": 24, "global_head_dim": 24},
    "all_heads_alone": {"num_key_value_heads": 4},
    "last_layer_is_made_full": {"layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, SLIDING, SLIDING]},
    "no_cap_and_untied": {"final_logit_softcapping": None, "tie_word_embeddings": False},
}


def build(folder: Path, **changes: object) -> nn.Module:
    """Save a random model and return it; `changes` are of tiny_models.GEMMA4."""
    torch.manual_seed(0)
    model = gemma4(**changes)
    randomise(model, 0)
    model.set_attn_implementation("eager")
    model.save_pretrained(folder)
    return model.eval().requires_grad_(False)


def ids_of(seed: int) -> Tensor:
    return torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(100 + seed))


@torch.inference_mode()
def errors_of(path: Path, model: nn.Module, graph: str, chunk: int = 16) -> tuple[float, float]:
    """Return the largest error of one pass over two sequences, and of one sequence token by token after a prompt."""
    ids = ids_of(0)
    expected = model(input_ids=ids, use_cache=False).logits
    overrides = [f"prefill_chunk={chunk}", "context_length=64", f"batch_size={2 if graph == 'eager' else 1}"]
    with Engine.load(path, dtype="fp32", device="cpu", graph=graph, overrides=overrides) as engine:
        assert runs_as(engine, graph)
        rows = [ids] if graph == "eager" else [row[None] for row in ids]
        whole = (torch.cat([engine.logits(one) for one in rows]) - expected).abs().max().item()
        row = ids[1].tolist()
        steps = [engine.runner.extend([row[:PROMPT]], [0])]
        steps += [engine.runner.extend([[token]], [at]) for at, token in enumerate(row[PROMPT:], start=PROMPT)]
        return whole, (torch.cat(steps) - expected[1, PROMPT - 1 :]).abs().max().item()


@pytest.mark.parametrize("name", CHANGES)
def test_logits_and_steps_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = build(tmp_path, **CHANGES[name])
    assert max(errors_of(tmp_path, model, "eager")) < TOLERANCE


@pytest.mark.parametrize("name", ["features_and_sharing", "experts_and_features", "odd_sizes", "keys_are_values"])
def test_native_steps_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = build(tmp_path, **CHANGES[name])
    assert max(errors_of(tmp_path, model, "auto")) < TOLERANCE


@pytest.mark.slow  # test_model_parity.py compiles its blocks
@pytest.mark.parametrize("name", ["odd_sizes", "keys_are_values"])
def test_compiled_prompts_and_native_steps_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = build(tmp_path, **CHANGES[name])
    assert max(errors_of(tmp_path, model, "captured")) < TOLERANCE


@pytest.mark.parametrize("chunk", [2, WINDOW - 1, WINDOW, WINDOW + 1, 64])
def test_layers_that_share_see_the_window_before_a_chunk_of_any_length(chunk: int, tmp_path: Path) -> None:
    model = build(tmp_path)
    assert max(errors_of(tmp_path, model, "eager", chunk)) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "graph", "source"),
    [
        ("features_and_sharing", "eager", "auto"),
        ("features_and_sharing", "auto", "disk"),
        ("experts_and_features", "eager", "disk"),
        ("experts_and_features", "auto", "auto"),
    ],
)
def test_a_streamed_model_gives_the_same_bits(name: str, graph: str, source: str, tmp_path: Path) -> None:
    build(tmp_path, **CHANGES[name])
    found = []
    for streaming in ("off", "on"):
        overrides = ["prefill_chunk=16", "context_length=64", f"streaming.source={source}"]
        how = {"dtype": "fp32", "device": "cpu", "graph": graph, "streaming": streaming}
        with Engine.load(tmp_path, overrides=overrides if streaming == "on" else overrides[:2], **how) as engine:
            row = ids_of(1)[0].tolist()
            steps = [engine.runner.extend([row[:PROMPT]], [0])]
            steps += [engine.runner.extend([[token]], [at]) for at, token in enumerate(row[PROMPT:], start=PROMPT)]
            found.append(torch.cat(steps))
            decoder = engine.runner.builder.decoder
            assert decoder.table(FEATURES).is_gathered == (streaming == "on")
            assert decoder.table(FEATURES).weight.is_meta == (streaming == "on")
    assert torch.equal(*found)


def test_a_streamed_table_of_features_is_not_in_memory_and_gives_the_rows_that_are_asked_for(tmp_path: Path) -> None:
    model = build(tmp_path)
    with Engine.load(
        tmp_path,
        dtype="fp32",
        device="cpu",
        graph="eager",
        streaming="on",
        overrides=["streaming.source=disk", "context_length=64"],
    ) as engine:
        plan, per_layer = engine.plan, model.model.embed_tokens_per_layer.weight
        assert plan.groups.features_nbytes == per_layer.nbytes
        assert not plan.groups.are_features_resident
        table = engine.runner.builder.decoder.table(FEATURES)
        assert table.weight.is_meta
        rows = table.rows(torch.tensor([[5, 3, 5]]))
    assert torch.equal(rows[0], per_layer[[5, 3, 5]] * 12**0.5)


def test_shared_layers_keep_no_keys_of_their_own(tmp_path: Path) -> None:
    build(tmp_path)
    with Engine.load(
        tmp_path, dtype="fp32", device="cpu", graph="eager", overrides=["prefill_chunk=16", "context_length=64"]
    ) as engine:
        caches = engine.runner.builder.caches
        assert [one is caches[2] for one in caches] == [index in (2, 4, 5) for index in range(7)]
        assert caches[6] is caches[3]
        # rings: pages of 16 positions for the window beside the tokens of a pass
        assert [caches[layer].slots for layer in (0, 2)] == [16 * touched_pages(WINDOW - 1 + 16, 16)] * 2 == [48] * 2
        held = {tensor.data_ptr(): tensor.nbytes for cache in caches for tensor in cache.inputs}
        assert engine.plan.kv_nbytes == sum(held.values())


def test_keys_that_a_file_has_for_sharing_layers_are_left_out(tmp_path: Path) -> None:
    model = build(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {
        "model.layers.6.self_attn.k_proj.weight": torch.zeros(80, 64),
        "model.layers.6.self_attn.k_norm.weight": torch.zeros(40),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert max(errors_of(tmp_path, model, "eager")) < TOLERANCE
    save_file({**tensors, "model.layers.6.self_attn.q_bias": torch.zeros(160)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"unexpected tensor 'model.layers.6.self_attn.q_bias'"):
        errors_of(tmp_path, model, "eager")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("use_bidirectional_attention", "all"),
        ("attn_logit_softcapping", 50.0),
        ("shared_expert_intermediate_size", 16),
    ],
)
def test_settings_that_change_the_mathematics_are_refused_by_name(setting: str, value: object, tmp_path: Path) -> None:
    build(tmp_path)
    change(tmp_path, setting, value)
    with pytest.raises(UnsupportedError, match=setting):
        Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"1": {"head_dim": 40, "sliding_window": 4}}, "'sliding_window' differs by layer"),
        ({"0": {"head_dim": 40}}, "sliding layer 0 has heads of its own"),
        ({"1": {"head_dim": 40}, "3": {"head_dim": 24}}, "full-attention layers have different heads"),
    ],
)
def test_other_differences_between_layers_are_refused(value: object, message: str, tmp_path: Path) -> None:
    build(tmp_path)
    change(tmp_path, "per_layer_config", value)
    with pytest.raises(UnsupportedError, match=message):
        Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager")


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("num_kv_shared_layers", 7, "no earlier layer has full_attention"),
        ("num_kv_shared_layers", 8, "'num_kv_shared_layers' must be an integer from 0 to 7"),
        ("hidden_size_per_layer_input", -1, "'hidden_size_per_layer_input' must be an integer"),
        ("enable_moe_block", True, "enable_moe_block needs num_experts, top_k_experts, moe_intermediate_size"),
    ],
)
def test_settings_that_do_not_fit_are_named(setting: str, value: object, message: str, tmp_path: Path) -> None:
    build(tmp_path)
    change(tmp_path, setting, value)
    with pytest.raises(CheckpointError, match=message):
        Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager")


def test_heads_of_full_layers_are_read_from_either_form_of_the_config(tmp_path: Path) -> None:
    model = build(tmp_path, **GEMMA4_DENSE)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert "global_head_dim" not in raw
    del raw["per_layer_config"]
    raw |= {name: GEMMA4_DENSE[name] for name in ("global_head_dim", "num_global_key_value_heads")}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert max(errors_of(tmp_path, model, "eager")) < TOLERANCE


def test_the_first_layers_run_alone(tmp_path: Path) -> None:
    model = build(tmp_path)
    ids = ids_of(0)
    with torch.inference_mode():
        hidden = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    for layers in (3, 5):
        overrides = [f"model.num_hidden_layers={layers}", "context_length=64"]
        with Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager", overrides=overrides) as engine:
            _, found = engine.logits(ids, output_hidden_states=True)
        # A row of the features' table holds those of all layers, also when only the first run.
        assert (torch.stack(found) - torch.stack(hidden[: layers + 1])).abs().max() < TOLERANCE


def change(folder: Path, setting: str, value: object) -> None:
    """Change a setting of a checkpoint's config.json."""
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, setting: value}))


def test_the_shapes_above_are_longer_than_their_window() -> None:
    assert WINDOW == GEMMA4["sliding_window"] < PROMPT < LENGTH
