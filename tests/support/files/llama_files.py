"""GGUF files of small transformers models of Llama's kind, with the names and keys of llama.cpp's converter."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import nn

from support.packed_matrices import StoredMatrix
from support.tiny_models import NO_TOKENS, SIZES, randomise

GQA = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "phi3": "Phi3",
    "starcoder2": "Starcoder2",
    "stablelm": "StableLm",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
}


def build(name: str, seed: int = 0, **changes: object) -> nn.Module:
    """Return transformers' model of a family with random weights, float32, eager attention."""
    import transformers

    end = "ForCausalLM"
    config = getattr(transformers, f"{CLASSES[name]}{'Text' if name == 'gemma3' else ''}Config")
    torch.manual_seed(seed)
    settings = {**SIZES, **GQA, **NO_TOKENS, "head_dim": 16, "tie_word_embeddings": False, **changes}
    model = getattr(transformers, CLASSES[name] + end)(config(**settings))
    randomise(model, seed)
    model.set_attn_implementation("eager")
    return model.eval().requires_grad_(False)


def write_gguf(
    path: Path,
    model: nn.Module,
    architecture: str,
    stored: Mapping[str, StoredMatrix] | None = None,
    most_tensors: int = 0,
    **keys: object,
) -> Path:
    """Write the model as an F32 file.

    Args:
        architecture: general.architecture.
        most_tensors: tensors of each part of a split model; 0 for one file.
        stored: matrices that are written in other formats, by transformers' names; llama's q and k in the file's order.
        keys: keys of the architecture, `__` for a dot, added to those of every file or put in place of them.
    """
    config, writer = model.config, gguf.GGUFWriter(path, architecture, split_max_tensors=most_tensors)
    rope = config.rope_parameters
    stated = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        **_epsilon(config),
        "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
        "rope.dimension_count": int(config.head_dim * rope.get("partial_rotary_factor", 1.0)),
        "vocab_size": config.vocab_size,
        **{key.replace("__", "."): value for key, value in keys.items()},
    }
    for key, value in stated.items():
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        kinds[type(value)](f"{architecture}.{key}", value)
    writer.add_tokenizer_model("none")
    for name in ("long", "short"):
        if f"{name}_factor" in rope:
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:  # the converter leaves it out
            continue
        before, _, part = name.rpartition(".")
        gguf_name, matrix = f"{table.get_name(before)}.{part}", (stored or {}).get(name)
        if matrix is None:
            writer.add_tensor(gguf_name, _as_stored(name, tensor, config, architecture))
        else:
            kind = gguf.GGMLQuantizationType[matrix.format.upper()]
            writer.add_tensor(gguf_name, matrix.rows.numpy(), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _epsilon(config: object) -> dict[str, float]:
    """Return the key of the norms' epsilon: that of LayerNorm in StarCoder 2 and StableLM."""
    names = {"starcoder2": "norm_epsilon", "stablelm": "layer_norm_eps"}
    if config.model_type in names:
        return {"attention.layer_norm_epsilon": getattr(config, names[config.model_type])}
    return {"attention.layer_norm_rms_epsilon": float(config.rms_norm_eps)}


def _as_stored(name: str, tensor: torch.Tensor, config: object, architecture: str) -> np.ndarray:
    """Return the values as the converter stores them: Llama's q and k in interleaved order, Gemma's norms as 1 + w."""
    if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        tensor = tensor + 1.0
    return np.ascontiguousarray(tensor.numpy())
