"""Checkpoints of Qwen 3 Next and Qwen 3.5 in every form of their files, with transformers' model, small and random.

hf       transformers' own names; or those of the multimodal model, with tensors of vision and of further predictions
gguf     what llama.cpp's converter makes: 1 + w, -exp(A_log), value heads tiled (Qwen 3.5), inputs fused or apart
"""

import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from support.tiny_models import BUILDERS, randomise

ARCHS = {
    "qwen3_next": ("qwen3next", gguf.MODEL_ARCH.QWEN3NEXT),
    "qwen3_5": ("qwen35", gguf.MODEL_ARCH.QWEN35),
    "qwen3_5_moe": ("qwen35moe", gguf.MODEL_ARCH.QWEN35MOE),
}


def build(name: str, seed: int = 0, **changes: object) -> nn.Module:
    """Return transformers' model with random weights; `changes` are of the tiny model's config."""
    torch.manual_seed(seed)
    model = BUILDERS[name](**changes)
    randomise(model, seed)
    model.set_attn_implementation("eager")
    return model.eval().requires_grad_(False)


def save_multimodal(folder: Path, model: nn.Module) -> None:
    """Save the model as published files are: inside a multimodal one, with tensors that text generation leaves out."""
    config = model.config.to_dict()
    tensors = {name.replace("model.", "model.language_model.", 1): one for name, one in model.state_dict().items()}
    tensors["model.visual.blocks.0.attn.qkv.weight"] = torch.ones(3, 2)
    tensors["mtp.layers.0.self_attn.q_proj.weight"] = torch.ones(2, 2)
    tensors["mtp.norm.weight"] = torch.ones(2)
    save_file({name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors")
    outer = {"model_type": config["model_type"].removesuffix("_text"), "text_config": config, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(outer))


def write_gguf(
    path: Path, name: str, model: nn.Module, is_fused: bool = False, predicting: int = 0, is_stale: bool = False
) -> Path:
    """Write the keys and tensors that llama.cpp's converter writes, in float32.

    Args:
        is_fused: True for the inputs of Qwen 3 Next's delta rule as one tensor, as older files have them.
        predicting: number of layers after the last one that predict further tokens.
        is_stale: True for a file that counts these layers and does not have them, so that the trunk's count is wrong.
    """
    config, (architecture, arch) = model.config, ARCHS[name]
    writer = gguf.GGUFWriter(path, architecture)
    num_layers = config.num_hidden_layers
    writer.add_block_count(num_layers + (0 if is_stale else predicting))
    if predicting:
        writer.add_nextn_predict_layers(predicting)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    if name != "qwen3_5_moe":
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    writer.add_uint32(f"{architecture}.full_attention_interval", 1 + config.layer_types.index("full_attention"))
    if name != "qwen3_5":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_tokenizer_model("none")
    table = gguf.get_tensor_name_map(arch, num_layers)
    for stored, tensor in converted(name, model, table, is_fused):
        writer.add_tensor(stored, np.ascontiguousarray(tensor.numpy()))
    for layer in range(num_layers, num_layers + (0 if is_stale else predicting)):
        writer.add_tensor(f"blk.{layer}.nextn.eh_proj.weight", np.ones((2, 2), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(name: str, model: nn.Module, table: gguf.TensorNameMap, is_fused: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield llama.cpp's tensors."""
    config, is_tiled = model.config, name != "qwen3_next"
    groups, width = config.linear_num_key_heads, config.linear_value_head_dim
    for hf_name, tensor in model.state_dict().items():
        module, _, leaf = hf_name.rpartition(".")
        part = module.rpartition(".")[2] if leaf == "weight" else leaf
        if hf_name.endswith("norm.weight") and "linear_attn" not in hf_name:
            tensor = tensor + 1
        if is_tiled and "linear_attn" in hf_name:
            tensor = tiled(part, tensor, groups, config)
        match part:
            case "A_log":
                yield table.get_name(hf_name), -tensor.exp()
            case "dt_bias":
                yield f"{table.get_name(f'{module}.dt_proj')}.bias", tensor
            case "conv1d":
                yield f"{table.get_name(module)}.weight", tensor.squeeze(1)
            case "shared_expert_gate":
                yield f"{table.get_name(module)}.weight", tensor.squeeze(0)
            case "gate_up_proj":
                for half, rows in zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True):
                    yield f"{table.get_name(f'{module}.{half}')}.weight", rows
            case "down_proj" if tensor.ndim == 3:
                yield f"{table.get_name(hf_name)}.weight", tensor
            case "in_proj_qkvz" if not is_fused:
                key_dim, values = config.linear_key_head_dim, config.linear_num_value_heads // groups * width
                parts = tensor.view(groups, -1, tensor.shape[1]).split([key_dim, key_dim, values, values], dim=1)
                q, k, v, z = (one.reshape(-1, tensor.shape[1]) for one in parts)
                for own, rows in (("qkv", torch.cat((q, k, v))), ("z", z)):
                    yield f"{table.get_name(module.replace('qkvz', own))}.weight", rows
            case _:
                yield f"{table.get_name(module)}.{leaf}", tensor


def tiled(part: str, tensor: Tensor, groups: int, config: object) -> Tensor:
    """Return the tensor with its value heads in llama.cpp's order: the first of each key head, then the second, ..."""
    width, num_heads = config.linear_value_head_dim, config.linear_num_value_heads
    order = torch.arange(num_heads).view(groups, -1).T.flatten()
    columns = (order[:, None] * width + torch.arange(width)).flatten()
    first = 2 * groups * config.linear_key_head_dim
    match part:
        case "in_proj_qkv" | "conv1d":
            return torch.cat((tensor[:first], tensor[first:][columns]))
        case "in_proj_z":
            return tensor[columns]
        case "in_proj_a" | "in_proj_b" | "A_log" | "dt_bias":
            return tensor[order]
        case "out_proj":
            return tensor[:, columns]
    return tensor
