"""The reference built from our weights is the model that transformers itself loads from the same checkpoint."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.chat_folders import TINY
from support.files.layered_files import packed_file
from support.tiny_models import ARCHITECTURES, LATENT_ATTENTION, VOCAB, build_reference
from transformers import AutoModelForCausalLM

from graphcore.config.compose import compose_settings
from graphcore.engine.loading.open_model import Model, open_model
from graphcore.engine.loading.prepare_model import match_model
from graphcore.tasks.reference.transformers_model import (
    FROM_FOLDER,
    FROM_OUR_WEIGHTS,
    Reference,
    from_weights,
    load_reference,
)
from graphcore.weights.loader import Loader

pytestmark = pytest.mark.thorough

FAMILIES = ("llama3", "qwen3", "gemma3", "gpt2")


def opened(checkpoint: str, *overrides: str) -> tuple[Model, Loader]:
    settings = compose_settings([f"model.checkpoint='{checkpoint}'", *overrides])
    model = open_model(settings.model, 0, Path("unused"), lambda *_: None)
    return model, match_model(model, torch.float32)[1]


def reference(checkpoint: str, *overrides: str) -> Reference:
    return load_reference(*opened(checkpoint, *overrides))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_file_gives_the_model_of_its_folder(family: str) -> None:
    stored, rebuilt = reference(str(TINY / family)), reference(str(TINY / f"{family}.gguf"))
    assert (stored.origin, rebuilt.origin) == (FROM_FOLDER, FROM_OUR_WEIGHTS)
    expected, found = dict(stored.model.named_parameters()), dict(rebuilt.model.named_parameters())
    assert expected.keys() == found.keys()
    for name, parameter in expected.items():
        # Gemma's norms went from w to 1 + w in float32 and back
        assert torch.allclose(found[name], parameter, rtol=0, atol=1e-7), name


@torch.inference_mode()
def error_of_our_weights(checkpoint: Path, folder: Path) -> float:
    """Return how far logits of transformers' model of our weights are from those of the model in the folder."""
    ids = torch.randint(0, VOCAB, (1, 24), generator=torch.Generator().manual_seed(0))
    model, loader = opened(str(checkpoint))
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    found = from_weights(model.config, loader)(ids, use_cache=False).logits
    return (found - saved(ids, use_cache=False).logits).abs().max().item()


@pytest.mark.parametrize("name", dict.fromkeys((*ARCHITECTURES, *LATENT_ATTENTION)))
def test_our_weights_and_settings_make_the_model_that_was_saved(name: str, tmp_path: Path) -> None:
    build_reference(name).save_pretrained(tmp_path)
    # Experts are summed in another order, and outputs of a delta rule are divided by their magnitude.
    assert error_of_our_weights(tmp_path, tmp_path) < 2e-5


@pytest.mark.parametrize(
    "name",
    [
        *("qwen3_next", "qwen3_5", "qwen3_5_moe", "gemma4", "gemma4_moe", "deepseek_v2", "deepseek_v3"),
        *("lfm2_moe", "ministral3", "mixtral", "granite", "granite_moe", "smollm3"),
    ],
)
def test_a_packed_file_makes_the_model_that_was_saved(name: str, tmp_path: Path) -> None:
    assert error_of_our_weights(packed_file(name, tmp_path), tmp_path / name) < 5e-5  # a file's numbers are float32


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["", ".gguf"])
def test_its_logits_are_the_golden_ones(family: str, form: str) -> None:
    golden = np.load(TINY / "logits.npz")
    outputs = reference(str(TINY / (family + form))).run(golden["tokens"].tolist())
    # 2e-6: float32 sums in another order between machines
    assert np.abs(outputs.logits.numpy() - golden[f"{family}.hf_logits"]).max() < 2e-6


@pytest.mark.parametrize("form", ["", ".gguf"])
def test_gpt_oss_filled_with_our_weights_has_the_golden_logits(form: str) -> None:
    golden = np.load(TINY / "logits.npz")
    loaded = reference(str(TINY / f"gptoss{form}"))
    assert loaded.origin == FROM_OUR_WEIGHTS
    outputs = loaded.run(golden["tokens"].tolist())
    assert np.abs(outputs.logits.numpy() - golden["gptoss.hf_logits"]).max() < 2e-6


@pytest.mark.parametrize(("path", "key"), [("bitnet", "bitnet"), ("bitnet_i2s.gguf", "bitnet_i2s")])
def test_ternary_models_are_built_with_transformers_own_layers(path: str, key: str) -> None:
    golden = np.load(TINY / "logits.npz")
    loaded = reference(str(TINY / path))
    assert loaded.origin == FROM_OUR_WEIGHTS  # from_pretrained needs the accelerate package
    logits, expected = loaded.run(golden["tokens"].tolist()).logits.numpy(), golden[f"{key}.hf_logits"]
    # int8 rounding makes steps of errors in the last place: the two were recorded on another machine
    assert np.abs(logits - expected).mean() < 2e-3
    assert np.array_equal(logits.argmax(-1), expected.argmax(-1))


def test_layers_are_the_streams_that_transformers_reports() -> None:
    ids = list(range(5, 25))
    loaded = reference(str(TINY / "qwen3"))
    outputs = loaded.run(ids)
    with torch.no_grad():
        hidden = loaded.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    # transformers normalises the last one; the others are ours
    for found, expected in zip(outputs.layers[:-1], hidden[:-1], strict=True):
        assert torch.equal(found, expected[0])
    norm = loaded.model.get_decoder().norm
    assert torch.equal(norm(outputs.layers[-1]), hidden[-1][0])


def test_cut_layers_are_cut_in_the_reference_too() -> None:
    cut = reference(str(TINY / "gemma3"), "model.num_hidden_layers=3")
    whole = reference(str(TINY / "gemma3"))
    assert len(cut.run([1, 2, 3]).layers) == 4
    assert torch.equal(cut.run([1, 2, 3]).layers[3], whole.run([1, 2, 3]).layers[3])


def test_casting_keeps_rotation_tables_in_float32() -> None:
    loaded = reference(str(TINY / "llama3"))
    loaded.cast(torch.bfloat16)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in loaded.model.buffers()} == {torch.float32}


def test_random_weights_have_a_reference() -> None:
    shape = "{model_type: qwen2, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4,"
    shape += " num_key_value_heads: 2, vocab_size: 64, max_position_embeddings: 128}"
    loaded = reference("random:", f"model.random_config={shape}")
    assert loaded.origin == FROM_OUR_WEIGHTS
    assert loaded.run([1, 2, 3]).logits.shape == (3, 64)
