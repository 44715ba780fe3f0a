"""Checkpoints of LFM2 in every form of their files, with transformers' model, small and random.

hf       transformers' own names; or those of the multimodal model; or an older config.json with full_attn_idxs
gguf     what llama.cpp's converter makes: kv heads by layer, convolutions without their axis of size 1
"""

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from support.tiny_models import BUILDERS, randomise


def build(name: str = "lfm2", seed: int = 0, **changes: object) -> nn.Module:
    """Return transformers' model with random weights; `changes` are of the tiny model's config."""
    torch.manual_seed(seed)
    model = BUILDERS[name](**changes)
    randomise(model, seed)
    model.set_attn_implementation("eager")
    return model.eval().requires_grad_(False)


def save_multimodal(folder: Path, model: nn.Module) -> None:
    """Save the model as the language model of LFM2-VL, with tensors that text generation leaves out."""
    tensors = {name.replace("model.", "model.language_model.", 1): one for name, one in model.state_dict().items()}
    tensors["model.vision_tower.vision_model.head.weight"] = torch.ones(3, 2)
    tensors["model.multi_modal_projector.linear_1.weight"] = torch.ones(2, 2)
    tensors.pop("lm_head.weight")
    save_file({name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors")
    outer = {"model_type": "lfm2_vl", "text_config": model.config.to_dict(), "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(outer))


def save_older(folder: Path, model: nn.Module) -> None:
    """Save the model with the settings' names of the first published files."""
    config = model.config.to_dict()
    kinds = config.pop("layer_types")
    config["full_attn_idxs"] = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    config["block_ff_dim"], config["tie_embedding"] = config.pop("intermediate_size"), config.pop("tie_word_embeddings")
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config |= {"block_norm_eps": 1e-5, "conv_dim": config["hidden_size"], "use_pos_enc": True, "num_heads": 4}
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))


def write_gguf(path: Path, model: nn.Module, window: int = 0) -> Path:
    """Write the keys and tensors that llama.cpp's converter writes, in float32.

    Args:
        window: sliding window of the layers that attend; 0 for none.
    """
    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, "lfm2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(len(state["model.layers.0.feed_forward.w1.weight"]))
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([0 if kind == "conv" else config.num_key_value_heads for kind in config.layer_types])
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_shortconv_l_cache(config.conv_L_cache)
    writer.add_vocab_size(config.vocab_size)
    if window:
        writer.add_sliding_window(window)
    writer.add_tokenizer_model("none")
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LFM2, config.num_hidden_layers)
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = tensor.squeeze(1) if name.endswith("conv.conv.weight") else tensor
        module, _, parameter = name.rpartition(".")
        writer.add_tensor(f"{table.get_name(module)}.{parameter}", np.ascontiguousarray(stored.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
