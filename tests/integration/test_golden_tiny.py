"""Tiny checkpoints give transformers' and llama.cpp's logits, from safetensors and from GGUF alike.

Five come from golden/, with both logits. Qwen 2 is not among them: gguf-py writes its GGUF here, by its own name table.

Tolerances, over what the two references differ by themselves: 1.2e-6 for Llama 3 and Qwen 3; llama.cpp looks GELU up in
a table of half precision, so its GPT-2 differs by 3.8e-4 and its Gemma 3 by 1.2e-3; it runs gpt-oss's MXFP4 experts on
activations of eight bits and rounds YaRN's ramp, so its gpt-oss differs by 1.8e-2.
"""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.tiny_models import TinyModel

from graphcore import Engine

pytestmark = pytest.mark.thorough

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny"
LLAMACPP_TOLERANCES = {"llama3": 1e-5, "qwen3": 1e-5, "gpt2": 4e-4, "gemma3": 1.5e-3, "gptoss": 2e-2}
FORMS = [(name, form) for name in LLAMACPP_TOLERANCES for form in ("safetensors", "gguf")]


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_logits_match_both_references(name: str, form: str) -> None:
    golden = np.load(GOLDEN / "logits.npz")
    path = GOLDEN / (name if form == "safetensors" else f"{name}.gguf")
    ids = torch.from_numpy(golden["tokens"].astype(np.int64))[None]
    with Engine.load(path, dtype="fp32", device="cpu", graph="eager", overrides=["prefill_chunk=16"]) as engine:
        logits = engine.logits(ids)[0].numpy()
    assert np.abs(logits - golden[f"{name}.hf_logits"]).max() < 1e-5
    assert np.abs(logits - golden[f"{name}.llamacpp_logits"]).max() < LLAMACPP_TOLERANCES[name]


@pytest.mark.parametrize("name", LLAMACPP_TOLERANCES)
def test_both_forms_hold_the_same_weights(name: str) -> None:
    engines = [
        Engine.load(path, dtype="fp32", device="cpu", graph="eager")
        for path in (GOLDEN / name, GOLDEN / f"{name}.gguf")
    ]
    folder, file = (dict(engine.runner.builder.decoder.named_buffers()) for engine in engines)
    assert folder.keys() == file.keys()
    # llama.cpp's converter adds Gemma's one in float32, as we do.
    assert [key for key in folder if not torch.equal(folder[key], file[key])] == []


def write_qwen2(tiny: TinyModel, path: Path) -> None:
    """Write a Qwen 2 checkpoint as GGUF; llama.cpp keeps its rows in order."""
    config = tiny.reference.config
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, tensor in load_file(tiny.folder / "model.safetensors").items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        writer.add_tensor(stored, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_qwen2_file_gives_transformers_logits(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    tiny, path = tiny_model("qwen2"), tmp_path / "qwen2.gguf"
    write_qwen2(tiny, path)
    with Engine.load(path, dtype="fp32", device="cpu", graph="eager") as engine:
        assert (engine.logits(tiny.ids) - tiny.logits).abs().max() < 2e-5
