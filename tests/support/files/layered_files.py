"""The GGUF files whose layers llama.cpp has recorded (tests/golden/llamacpp/layers.npz), and the tokens that ran."""

from math import log
from pathlib import Path

import torch

from graphcore.config.compose import compose_settings
from graphcore.engine.loading.open_model import open_model
from graphcore.export.pack import Packer
from support.chat_folders import TINY
from support.files import llama_files, qwen_moe_files
from support.files.low_bit_files import FILES, SHAPES, low_bit_file
from support.tiny_models import BUILDERS, LONGROPE, MINISTRAL_ROPE, randomise

GEMMA2_CAPS = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 3.0}
# Settings and keys of small random models, whose files the tests write as the converter does.
WRITTEN = {
    "phi3": (
        {
            "num_key_value_heads": 4,
            "original_max_position_embeddings": 8,
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75},
        },
        {
            "attention__sliding_window": 0,
            "rope__scaling__original_context_length": 8,
            "rope__scaling__attn_factor": (1 + log(64) / log(8)) ** 0.5,
        },
    ),
    "starcoder2": ({}, {}),
    "stablelm": ({"use_qkv_bias": True}, {"use_parallel_residual": False}),
    "gemma": ({"tie_word_embeddings": True}, {}),
    "gemma2": (
        {"tie_word_embeddings": True, "query_pre_attn_scalar": 16, "sliding_window": 4, **GEMMA2_CAPS},
        {"attention__sliding_window": 4, **GEMMA2_CAPS},
    ),
}
# Models of tests/support/tiny_models.py that task=pack writes, with changes that suit llama.cpp and the few tokens.
LATENT = ("deepseek_v3", "glm4_moe_lite")
PLAIN = ("glm4_moe", "glm4_moe_air", "glm4", "glm", "lfm2", "lfm2_moe", "olmo2", "olmo3", "exaone4_full", *LATENT)
PACKED = {
    **{name: {} for name in PLAIN},
    "ministral3": {"rope_parameters": {**MINISTRAL_ROPE, "original_max_position_embeddings": 4}},
    "mixtral": {},
    "granite": {},
    "granite_moe": {},
    "smollm3": {"no_rope_layer_interval": 4},
}
NAMES = ("llama3", "qwen3", "gemma3", "gpt2", "gptoss", "qwen3_moe", *FILES, *PACKED, *WRITTEN)
TOKEN_IDS = [11, 42, 7, 93, 3, 60, 28, 75, 19, 5]
SMOLLM2_IDS = [504, 3575, 282, 4649, 314, 260, 2010, 29, 1]


def layered_file(name: str, folder: Path) -> Path:
    """Return a model's GGUF file: one of tests/golden/tiny, or written into the folder with random weights."""
    if name in FILES:  # Llama's projections have their rows in another order in a file
        family = "llama" if name == "iq2_xxs" else "qwen2"
        return low_bit_file(folder / f"{name}.gguf", FILES[name], SHAPES[0], len(name), family)[1]
    if name in WRITTEN:
        changes, keys = WRITTEN[name]
        return llama_files.write_gguf(folder / f"{name}.gguf", llama_files.build(name, **changes), name, **keys)
    if name in PACKED:
        return packed_file(name, folder)
    if name != "qwen3_moe":
        return TINY / f"{name}.gguf"
    return qwen_moe_files.write_gguf(folder / f"{name}.gguf", qwen_moe_files.build(), None, is_fused=False)


def packed_file(name: str, folder: Path, **changes: object) -> Path:
    """Write a random model's GGUF file as task=pack does, in float32, and return its path.

    Args:
        changes: settings of the model, by the names of its config class.
    """
    torch.manual_seed(0)
    model = BUILDERS[name](**{**PACKED.get(name, {}), **changes})
    randomise(model, 0)
    model.save_pretrained(folder / name)
    settings = compose_settings([f"model.checkpoint={folder / name}"])
    opened = open_model(settings.model, 0, folder / "cache", lambda *_: None)
    path = folder / f"{name}.gguf"
    list(Packer(opened, "stored").pack(path, lambda *_: None))
    return path
