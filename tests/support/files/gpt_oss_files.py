"""gpt-oss checkpoints in every form of their files, with transformers' model of each, all small and random.

dense     Hugging Face, experts by input row, gate and up alternating
mxfp4     Hugging Face, blocks and scales: random bytes, which transformers' own code unpacks into the model
gguf      apart or fused (attn_qkv, ffn_gate_up_exps), experts float32 or MXFP4; written with gguf-py
"""

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from support.tiny_models import gpt_oss, randomise

PARTS = ("gate_up_proj", "down_proj")


def build(seed: int, **changes: object) -> nn.Module:
    """Return transformers' model with random weights; `changes` are of tiny_models.GPT_OSS."""
    torch.manual_seed(seed)
    model = gpt_oss(**changes)
    randomise(model, seed)
    model.set_attn_implementation("eager")
    return model.eval().requires_grad_(False)


def pack(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Give every expert random MXFP4 weights; return them as blocks and scales, by transformers' names."""
    generator = torch.Generator().manual_seed(seed)
    packed = {}
    for index, layer in enumerate(model.model.layers):
        for part in PARTS:
            parameter = getattr(layer.mlp.experts, part)  # [X, I, O]
            experts, inputs, outputs = parameter.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator).byte()
            scales = torch.randint(121, 125, blocks.shape[:-1], generator=generator).byte()
            parameter.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            name = f"model.layers.{index}.mlp.experts.{part}"
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return packed


def save_mxfp4(folder: Path, seed: int, **changes: object) -> nn.Module:
    """Save a checkpoint as openai's are and return the model."""
    model = build(seed, **changes)
    packed = pack(model, seed)
    kept = {name: tensor for name, tensor in model.state_dict().items() if f"{name}_blocks" not in packed}
    save_file(kept | packed, folder / "model.safetensors")
    config = model.config.to_dict()
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return model


def save_dense(folder: Path, seed: int, dtype: torch.dtype = torch.float32, **changes: object) -> nn.Module:
    """Save a checkpoint as transformers does, dense in `dtype`, and return the model in float32."""
    model = build(seed, **changes)
    for parameter in model.parameters():  # and no buffer: the rotary frequencies stay float32
        parameter.data = parameter.data.to(dtype)
    model.save_pretrained(folder)
    return model.float()


def ggml_blocks(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return rows of 17-byte blocks, [X, O, I/32 * 17]: written down from the definitions of both layouts."""
    codes = np.stack((blocks & 15, blocks >> 4), axis=-1).reshape(*blocks.shape[:-1], 32)
    both_halves = codes[..., :16] | codes[..., 16:] << 4
    rows = np.concatenate((scales[..., None], both_halves), axis=-1)
    return rows.reshape(*rows.shape[:2], -1)


def gguf_tensors(model: nn.Module, packed: dict[str, Tensor], is_fused: bool) -> dict[str, np.ndarray]:
    """Return llama.cpp's tensors: gate and up taken apart, or gate before up; q, k, v alone or in this order."""
    state = model.state_dict()
    found: dict[str, np.ndarray] = {}

    def put(name: str, stored: str) -> None:
        found[stored] = state[name].numpy()

    for name, stored in (("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output")):
        put(f"{name}.weight", f"{stored}.weight")
    for index in range(len(model.model.layers)):
        theirs, ours = f"model.layers.{index}.", f"blk.{index}."
        put(f"{theirs}input_layernorm.weight", f"{ours}attn_norm.weight")
        put(f"{theirs}post_attention_layernorm.weight", f"{ours}post_attention_norm.weight")
        put(f"{theirs}self_attn.sinks", f"{ours}attn_sinks.weight")
        for leaf in ("weight", "bias"):
            put(f"{theirs}mlp.router.{leaf}", f"{ours}ffn_gate_inp.{leaf}")
            put(f"{theirs}self_attn.o_proj.{leaf}", f"{ours}attn_output.{leaf}")
            for part in "qkv":
                put(f"{theirs}self_attn.{part}_proj.{leaf}", f"{ours}attn_{part}.{leaf}")
            if is_fused:
                found[f"{ours}attn_qkv.{leaf}"] = np.concatenate([found.pop(f"{ours}attn_{p}.{leaf}") for p in "qkv"])
        for part in PARTS:
            name = f"{theirs}mlp.experts.{part}"
            rows = state[name].mT.numpy()
            if packed:
                rows = ggml_blocks(packed[f"{name}_blocks"].numpy(), packed[f"{name}_scales"].numpy())
            for leaf, tensor in (("weight", rows), ("bias", state[f"{name}_bias"].numpy())):
                if part == "down_proj":
                    found[f"{ours}ffn_down_exps.{leaf}"] = tensor
                elif is_fused:
                    found[f"{ours}ffn_gate_up_exps.{leaf}"] = np.concatenate((tensor[:, ::2], tensor[:, 1::2]), axis=1)
                else:
                    found[f"{ours}ffn_gate_exps.{leaf}"] = tensor[:, ::2]
                    found[f"{ours}ffn_up_exps.{leaf}"] = tensor[:, 1::2]
    return found


def write_gguf(path: Path, model: nn.Module, tensors: dict[str, np.ndarray]) -> Path:
    """Write the keys that llama.cpp's converter writes, no more."""
    config, rope = model.config, model.config.rope_parameters
    writer = gguf.GGUFWriter(path, "gpt-oss")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_sliding_window(config.sliding_window)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    writer.add_tokenizer_model("none")
    for name, tensor in tensors.items():
        raw_dtype = gguf.GGMLQuantizationType.MXFP4 if tensor.dtype == np.uint8 else None
        writer.add_tensor(name, np.ascontiguousarray(tensor), raw_dtype=raw_dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
