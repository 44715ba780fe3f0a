"""Ternary GGUF files of every architecture and type give the logits of transformers' layers with the same weights."""

import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.files.ternary_files import I2_S, TernaryModel, save_ternary, write_gguf
from torch import Tensor

from graphcore import Engine

pytestmark = pytest.mark.thorough

TQ1_0, TQ2_0 = int(gguf.GGMLQuantizationType.TQ1_0), int(gguf.GGMLQuantizationType.TQ2_0)
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return q or k as llama files hold it. Source: LlamaModel.permute of llama.cpp's converter."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def dense(stored: dict[str, Tensor], form: str, heads: dict[str, int]) -> dict[str, np.ndarray]:
    """Return a packed checkpoint's tensors, projections as ternary * scale.

    Args:
        stored: as saved.
        form: which decides what a scale means.
        heads: of the projections whose rows are to be permuted.
    """
    from transformers.integrations.bitnet import unpack_weights

    tensors = {}
    for name, tensor in stored.items():
        if name.endswith("weight_scale"):
            continue
        value = tensor.float().numpy()
        if tensor.dtype is torch.uint8:
            scale = stored[name + "_scale"].float()
            with torch.compiler.set_stance("force_eager"):
                ternary = unpack_weights(tensor, torch.float32)
            value = (ternary * (scale if form == "autobitlinear" else 1.0 / scale)).numpy()
        found = re.search(r"\.([qk]_proj)\.", name)
        tensors[name] = permuted(value, heads[found[1]]) if found and heads else value
    return tensors


def written(model: TernaryModel, form: str, architecture: str, kind: int, path: Path) -> Path:
    """Write the model of a folder as GGUF."""
    config = model.reference.config
    sizes = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    if architecture == "llama":
        sizes["attention.key_length"] = sizes["rope.dimension_count"] = config.head_dim
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors = dense(load_file(model.folder / "model.safetensors"), form, heads if architecture == "llama" else {})
    write_gguf(path, architecture, sizes, tensors, kind)
    return path


def assert_same(path: Path, model: TernaryModel) -> None:
    with Engine.load(path, dtype="fp32", device="cpu", graph="eager", overrides=["prefill_chunk=16"]) as engine:
        logits, expected = engine.logits(model.ids), model.logits()
    assert (logits - expected).abs().mean() < 2e-3
    # A last place of float32, which processors sum in different orders, becomes a step of int8 now and then: that moves
    # single logits by up to 0.06, so the likeliest token may change places with one that is as near.
    behind = expected.amax(-1) - expected.gather(-1, logits.argmax(-1, keepdim=True)).squeeze(-1)
    assert behind.max() < 0.05


@pytest.mark.parametrize("kind", [I2_S, TQ1_0, TQ2_0], ids=["i2_s", "tq1_0", "tq2_0"])
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("bitnet-b1.58", {"tie_word_embeddings": True}),
        ("bitnet-25", {"tie_word_embeddings": False}),
        ("bitnet", {"tie_word_embeddings": True, "hidden_act": "silu"}),
    ],
    ids=["bitnet-b1.58", "bitnet-25", "bitnet"],
)
def test_bitnet_files_give_transformers_logits(
    architecture: str, changes: dict[str, object], kind: int, tmp_path: Path
) -> None:
    model = save_ternary("bitnet", "autobitlinear", 4, tmp_path, SIZES | changes)
    assert_same(written(model, "autobitlinear", architecture, kind, tmp_path / "model.gguf"), model)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_i2_s_in_a_llama_file_gives_the_logits_of_bitlinear(seed: int, tmp_path: Path) -> None:
    plain_rope = {"rope_type": "default", "rope_theta": 10000.0}
    model = save_ternary("llama3", "bitlinear", seed, tmp_path, {"rope_parameters": plain_rope})
    assert_same(written(model, "bitlinear", "llama", I2_S, tmp_path / "model.gguf"), model)
