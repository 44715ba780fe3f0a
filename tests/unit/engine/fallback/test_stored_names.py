"""Which stored tensor is which weight of a transformers model, and what is refused before a byte is read."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.fallback_models import build_fallback, save_fallback
from torch import Tensor

from graphcore.checkpoint.open_checkpoint import open_checkpoint
from graphcore.engine.fallback.config import read_transformers_config
from graphcore.engine.fallback.skeleton import build_skeleton
from graphcore.engine.fallback.stored_names import match_skeleton, only_stacks
from graphcore.errors import CheckpointError, UnsupportedError

Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def match(folder: Path) -> dict[str, str]:
    skeleton = build_skeleton(read_transformers_config(folder), "eager", torch.float32, str(folder))
    return {name: source.name for name, source in match_skeleton(skeleton, open_checkpoint(folder)).sources.items()}


def changed(folder: Path, change: Change) -> Path:
    """Write the folder's tensors anew."""
    file = folder / "model.safetensors"
    tensors = change(load_file(file))
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.fixture
def phi3(tmp_path: Path) -> Path:
    return save_fallback("phi3", tmp_path).folder


def test_stored_names_are_the_models_own(phi3: Path) -> None:
    sources = match(phi3)
    assert all(name == stored for name, stored in sources.items())
    assert sources.keys() == build_fallback("phi3").state_dict().keys()


def test_a_base_models_names_are_found_without_their_prefix(phi3: Path) -> None:
    changed(phi3, lambda tensors: {name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    assert match(phi3)["model.layers.0.self_attn.o_proj.weight"] == "layers.0.self_attn.o_proj.weight"


def test_a_tied_head_that_is_not_stored_is_the_table_and_one_that_is_stored_wins(tmp_path: Path) -> None:
    folder = save_fallback("granite", tmp_path).folder
    assert match(folder)["lm_head.weight"] == "model.embed_tokens.weight"
    changed(folder, lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] * 2})
    assert match(folder)["lm_head.weight"] == "lm_head.weight"


def test_an_untied_head_that_is_not_stored_is_missing(phi3: Path) -> None:
    changed(phi3, lambda tensors: {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"})
    with pytest.raises(CheckpointError, match=r"Missing required tensor: 'lm_head\.weight'; .*Phi3ForCausalLM"):
        match(phi3)


@pytest.mark.parametrize("name", ["model.layers.3.input_layernorm.weight", "model.layers.0.self_attn.q_proj.lora_A"])
def test_a_tensor_that_the_model_does_not_have_is_refused(phi3: Path, name: str) -> None:
    changed(phi3, lambda tensors: {**tensors, name: torch.zeros(64)})
    with pytest.raises(CheckpointError, match=f"unexpected tensor '{name}'"):
        match(phi3)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"])
def test_buffers_that_old_files_hold_are_passed_over(phi3: Path, name: str) -> None:
    changed(phi3, lambda tensors: {**tensors, name: torch.zeros(8)})
    assert name not in match(phi3).values()


def test_a_tensor_of_another_shape_is_refused(phi3: Path) -> None:
    changed(phi3, lambda tensors: {**tensors, "model.norm.weight": torch.zeros(65)})
    with pytest.raises(CheckpointError, match=r"Shape mismatch for model\.norm\.weight: expected \[64\].* got \[65\]"):
        match(phi3)


def test_whole_numbers_are_no_weights(phi3: Path) -> None:
    changed(phi3, lambda tensors: {**tensors, "model.norm.weight": torch.zeros(64, dtype=torch.int8)})
    with pytest.raises(UnsupportedError, match=r"'model\.norm\.weight' holds i8"):
        match(phi3)


def mixtral() -> "torch.nn.Module":
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 12}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads))


def test_experts_that_are_stored_one_by_one_are_stacked_as_transformers_stacks_them(tmp_path: Path) -> None:
    model = mixtral()
    model.save_pretrained(tmp_path)
    assert "model.layers.0.block_sparse_moe.experts.11.w3.weight" in open_checkpoint(tmp_path).tensors
    skeleton = build_skeleton(read_transformers_config(tmp_path), "eager", torch.float32, str(tmp_path))
    loader = match_skeleton(skeleton, open_checkpoint(tmp_path))
    for name, expected in model.state_dict().items():
        assert torch.equal(loader.dense(name, torch.float32), expected), name


def test_an_expert_of_another_shape_is_refused(tmp_path: Path) -> None:
    mixtral().save_pretrained(tmp_path)
    name = "model.layers.0.block_sparse_moe.experts.11.w3.weight"
    changed(tmp_path, lambda tensors: {**tensors, name: torch.zeros(47, 64)})
    with pytest.raises(CheckpointError, match=r"experts\.11\.w3\.weight.*\[47, 64\].*does not fit"):
        match(tmp_path)


def test_an_expert_that_is_missing_is_refused(tmp_path: Path) -> None:
    mixtral().save_pretrained(tmp_path)
    changed(
        tmp_path,
        lambda tensors: {name: one for name, one in tensors.items() if ".0.block_sparse_moe.experts.11." not in name},
    )
    with pytest.raises(CheckpointError, match=r"Shape mismatch for .*gate_up_proj: expected \[12.* got \[11"):
        match(tmp_path)


def test_experts_that_are_stored_as_one_are_found_too(tmp_path: Path) -> None:
    model = mixtral()
    model.save_pretrained(tmp_path, save_original_format=False)
    assert match(tmp_path).keys() == model.state_dict().keys()


def test_only_rules_that_stack_experts_are_known() -> None:
    from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

    def rule(*operations: object) -> WeightConverter:
        return WeightConverter(["a.*.x", "a.*.y"], "a.xy", operations=list(operations))

    assert only_stacks(rule(MergeModulelist(0), Concatenate(1)))
    assert not only_stacks(rule(MergeModulelist(0), Concatenate(0)))
    assert not only_stacks(rule(MergeModulelist(0), Concatenate(1), Transpose(1, 2)))
