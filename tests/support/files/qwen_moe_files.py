"""Checkpoints of Qwen's mixtures of experts in every form of their files, with transformers' model, small and random.

one by one   Hugging Face, one tensor for each expert and projection
fused        Hugging Face, transformers' own parameters: gate before up
gguf         experts of a projection together, or gate and up fused; float32 or packed; written with gguf-py
"""

import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from support.tiny_models import qwen3_moe, randomise


def build(seed: int = 0, **changes: object) -> nn.Module:
    """Return transformers' model with random weights; `changes` are of tiny_models.QWEN3_MOE."""
    torch.manual_seed(seed)
    model = qwen3_moe(**changes)
    randomise(model, seed)
    model.set_attn_implementation("eager")
    return model.eval().requires_grad_(False)


def names_of(model: nn.Module, is_fused: bool) -> dict[str, Tensor]:
    """Return the tensors as files have them: one for each expert, or transformers' own parameters."""
    found = {}
    for name, tensor in model.state_dict().items():
        if is_fused or ".experts." not in name:
            found[name] = tensor
            continue
        before, _, part = name.rpartition(".")
        for expert, matrix in enumerate(tensor):
            parts = zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True) if "gate" in part else [(part, matrix)]
            found |= {f"{before}.{expert}.{leaf}.weight": rows.contiguous() for leaf, rows in parts}
    return found


def save(folder: Path, model: nn.Module, is_fused: bool) -> None:
    """Save a checkpoint folder."""
    save_file(names_of(model, is_fused), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))


def write_gguf(
    path: Path,
    model: nn.Module,
    encoding: gguf.GGMLQuantizationType | None,
    is_fused: bool,
    stored: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write the keys and names that llama.cpp's converter writes; experts and their norms as it lays them out.

    Args:
        encoding: of all experts; None for float32.
        stored: experts' bytes by their names in the model, [X, O, bytes], if gguf-py cannot make them.
    """
    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_tokenizer_model("none")
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, config.num_hidden_layers)
    for name, tensor in state.items():
        before, _, part = name.rpartition(".")
        values = (stored or {}).get(name, tensor.numpy())
        if part == "gate_up_proj" and not is_fused:
            for leaf, rows in zip(("gate_proj", "up_proj"), np.split(values, 2, axis=1), strict=True):
                add(writer, f"{table.get_name(f'{before}.{leaf}')}.weight", rows, encoding)
        elif part in ("gate_up_proj", "down_proj"):
            down = f"{table.get_name(f'{before}.down_proj')}.weight"
            add(writer, down.replace("down", "gate_up") if "gate" in part else down, values, encoding)
        else:
            add(writer, f"{table.get_name(before)}.weight", tensor.numpy(), None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, name: str, tensor: np.ndarray, encoding: gguf.GGMLQuantizationType | None) -> None:
    tensor = np.ascontiguousarray(tensor)
    if encoding is None or tensor.dtype == np.uint8:
        writer.add_tensor(name, tensor, raw_dtype=encoding)
    else:
        writer.add_tensor(name, gguf.quants.quantize(tensor, encoding), raw_dtype=encoding)


def round_experts(model: nn.Module, encoding: gguf.GGMLQuantizationType) -> None:
    """Give the model's experts the values that the encoding can hold."""
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            packed = gguf.quants.quantize(parameter.numpy(), encoding)
            parameter.copy_(torch.from_numpy(gguf.quants.dequantize(packed, encoding)))
