"""Checkpoints as training programs leave them have the logits that transformers computes from the plain checkpoint."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import TOLERANCE, TinyModel
from torch import Tensor

from graphcore import Engine
from graphcore.errors import CheckpointError

pytestmark = pytest.mark.thorough

Tensors = dict[str, Tensor]
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def prefixed(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()}


def compiled_layers(tensors: Tensors) -> Tensors:
    return {name.replace("layers.1.", "layers.1._orig_mod."): tensor for name, tensor in tensors.items()}


def beside(**extra: Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name.replace("__", "."): tensor for name, tensor in extra.items()}


VARIANTS = {
    "DistributedDataParallel": (prefixed("module."), "'module."),
    "torch.compile": (prefixed("_orig_mod."), "'_orig_mod."),
    "compiled layers": (compiled_layers, "layers.1._orig_mod."),
    "merged PEFT": (prefixed("base_model.model."), "'base_model.model."),
    "a larger module": (prefixed("policy."), None),
    "trl": (beside(v_head__summary__weight=torch.ones(1, 64), v_head__summary__bias=torch.ones(1)), "'v_head.summary"),
    "a counter": (beside(step=torch.tensor(7)), "'step'"),
    "a mask": (beside(model__layers__0__self_attn__masked_bias=torch.tensor(-1e4)), "masked_bias'"),
}


@pytest.fixture
def folder(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model("llama_biased").folder, tmp_path / "model"))


def check(folder: Path, tiny: TinyModel, note: str | None) -> None:
    with Engine.load(folder, dtype="fp32", device="cpu", graph="eager", overrides=["context_length=64"]) as engine:
        assert (engine.logits(tiny.ids.tolist()) - tiny.logits).abs().max() < TOLERANCE
        said = [line for line in engine.notes if "checkpoint" in line or "wrappers" in line or "shards" in line]
    assert len(said) == (note is not None)
    assert note is None or note in said[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_plain_checkpoint(
    tiny_model: Callable[[str], TinyModel], folder: Path, variant: str
) -> None:
    change, note = VARIANTS[variant]
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    check(folder, tiny_model("llama_biased"), note)


def shard(folder: Path, changes: dict[str, str]) -> None:
    """Store the checkpoint in two shards, with an index in which `changes` are made."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    half = sorted(tensors)[: len(tensors) // 2]
    save_file({name: tensors[name] for name in half}, folder / ONE)
    save_file({name: tensors[name] for name in tensors if name not in half}, folder / TWO)
    weight_map = {name: ONE if name in half else TWO for name in tensors} | changes
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"])
def test_an_index_may_name_what_the_model_does_not_need(
    tiny_model: Callable[[str], TinyModel], folder: Path, name: str
) -> None:
    shard(folder, {name: TWO})
    check(folder, tiny_model("llama_biased"), f"does not need: '{name}'")


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.9.nothing"])
def test_an_index_that_maps_a_needed_tensor_to_another_shard_is_refused(folder: Path, name: str) -> None:
    shard(folder, {"model.norm.weight": ONE, name: ONE})
    with pytest.raises(CheckpointError, match=r"maps tensor 'model\.norm\.weight' to model-00001.*; fetch both again"):
        Engine.load(folder, dtype="fp32", device="cpu", graph="eager", overrides=["context_length=64"])
