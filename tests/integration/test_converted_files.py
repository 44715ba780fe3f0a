"""Files as llama.cpp's converter writes them are transformers' models, and task=pack writes the same files.

Each family of `layered_files.WRITTEN`; test_llama_cpp_layers.py compares the same files with llama.cpp, layer by layer.
"""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from support.files import llama_files
from support.files.layered_files import WRITTEN, layered_file
from torch import nn

from graphcore import Engine
from graphcore.config.compose import compose_settings
from graphcore.engine.loading.open_model import open_model
from graphcore.engine.loading.prepare_model import match_model
from graphcore.errors import UnsupportedError
from graphcore.export.pack import Packer
from graphcore.tasks.reference.transformers_model import load_reference

pytestmark = pytest.mark.thorough

TOLERANCE = 2e-5
IDS = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(2))
UNDESCRIBED = {  # settings that GGUF has no key for
    "phi3": {"hidden_act": "gelu"},
    "starcoder2": {"hidden_act": "silu"},
    "stablelm": {"hidden_act": "gelu"},
    "gemma": {"hidden_act": "silu"},
    "gemma2": {"query_pre_attn_scalar": 40},
}


def error(path: Path, reference: nn.Module) -> float:
    """Return the largest difference of the logits from transformers'."""
    with torch.no_grad():
        expected = reference(input_ids=IDS, use_cache=False).logits
    with Engine.load(path, dtype="fp32", device="cpu", graph="eager", overrides=["prefill_chunk=16"]) as engine:
        return (engine.logits(IDS) - expected).abs().max().item()


def pack(folder: Path, path: Path) -> None:
    settings = compose_settings([f"model.checkpoint={folder}"])
    list(Packer(open_model(settings.model, 0, folder / "cache", lambda *_: None), "stored").pack(path, lambda *_: None))


def content(path: Path) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    """Return the tensors and the metadata of a file."""
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return {tensor.name: tensor.data for tensor in reader.tensors}, fields


@pytest.mark.parametrize("name", WRITTEN)
def test_a_converted_file_is_transformers_model(name: str, tmp_path: Path) -> None:
    reference = llama_files.build(name, **WRITTEN[name][0])
    assert error(layered_file(name, tmp_path), reference) < TOLERANCE


@pytest.mark.parametrize("name", WRITTEN)
def test_a_packed_folder_is_the_converted_file(name: str, tmp_path: Path) -> None:
    reference = llama_files.build(name, **WRITTEN[name][0])
    reference.save_pretrained(tmp_path)
    pack(tmp_path, tmp_path / "packed.gguf")
    (tensors, fields), (expected, wanted) = content(tmp_path / "packed.gguf"), content(layered_file(name, tmp_path))
    assert tensors.keys() == expected.keys()
    for key, values in expected.items():
        assert np.array_equal(tensors[key], values), key
    assert {key: fields.get(key) for key in wanted if key.startswith(f"{name}.")} == {
        key: value for key, value in wanted.items() if key.startswith(f"{name}.")
    }
    assert error(tmp_path / "packed.gguf", reference) < TOLERANCE


@pytest.mark.parametrize("name", WRITTEN)
def test_a_reference_that_is_built_of_a_converted_file_is_transformers_model(name: str, tmp_path: Path) -> None:
    settings = compose_settings([f"model.checkpoint={layered_file(name, tmp_path)}"])
    opened = open_model(settings.model, 0, tmp_path / "cache", lambda *_: None)
    built = load_reference(opened, match_model(opened, torch.float32)[1]).model
    reference = llama_files.build(name, **WRITTEN[name][0])
    with torch.no_grad():
        found, expected = (model(input_ids=IDS, use_cache=False).logits for model in (built, reference))
    assert (found - expected).abs().max() < 1e-6


@pytest.mark.parametrize("name", UNDESCRIBED)
def test_a_setting_that_gguf_cannot_describe_is_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    llama_files.build(name, **{**WRITTEN[name][0], **UNDESCRIBED[name]}).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="its blocks differ"):
        pack(tmp_path, tmp_path / "packed.gguf")
    assert list(tmp_path.glob("*.gguf")) == []


def test_caps_that_float32_rounds_are_packed_as_it_rounds_them(tmp_path: Path) -> None:
    changes = {"attn_logit_softcapping": 1.3, "final_logit_softcapping": 2.7}
    reference = llama_files.build("gemma2", **{**WRITTEN["gemma2"][0], **changes})
    reference.save_pretrained(tmp_path)
    pack(tmp_path, tmp_path / "packed.gguf")
    assert error(tmp_path / "packed.gguf", reference) < TOLERANCE


def test_a_gemma2_without_caps_is_packed_with_caps_of_zero(tmp_path: Path) -> None:
    changes = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    reference = llama_files.build("gemma2", **{**WRITTEN["gemma2"][0], **changes})
    reference.save_pretrained(tmp_path)
    pack(tmp_path, tmp_path / "packed.gguf")
    assert error(tmp_path / "packed.gguf", reference) < TOLERANCE
