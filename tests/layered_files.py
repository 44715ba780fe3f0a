"""The GGUF files whose layers llama.cpp has recorded (tests/golden/llamacpp/layers.npz), and the tokens that ran."""

from pathlib import Path

import qwen_moe_files
from chat_folder import TINY
from low_bit_files import FILES, SHAPES, low_bit_file
from tiny_models import save_tiny

from graphcore.config.compose import compose_settings
from graphcore.engine.loading.open_model import open_model
from graphcore.export.pack import Packer

PACKED = (
    "glm4_moe",
    "glm4_moe_air",
    "glm4",
    "glm",
    "lfm2",
    "lfm2_moe",
    "olmo2",
    "olmo3",
    "exaone4_full",
)  # models of tiny_models.py, written by task=pack
NAMES = ("llama3", "qwen3", "gemma3", "gpt2", "gptoss", "qwen3_moe", *FILES, *PACKED)
TOKEN_IDS = [11, 42, 7, 93, 3, 60, 28, 75, 19, 5]
SMOLLM2_IDS = [504, 3575, 282, 4649, 314, 260, 2010, 29, 1]


def layered_file(name: str, folder: Path) -> Path:
    """Return a model's GGUF file: one of tests/golden/tiny, or written into the folder with random weights."""
    if name in FILES:  # Llama's projections have their rows in another order in a file
        family = "llama" if name == "iq2_xxs" else "qwen2"
        return low_bit_file(folder / f"{name}.gguf", FILES[name], SHAPES[0], len(name), family)[1]
    if name in PACKED:
        return packed_file(name, folder)
    if name != "qwen3_moe":
        return TINY / f"{name}.gguf"
    return qwen_moe_files.write_gguf(folder / f"{name}.gguf", qwen_moe_files.build(), None, is_fused=False)


def packed_file(name: str, folder: Path) -> Path:
    """Return the GGUF file that task=pack writes of a tiny model, float32."""
    tiny = save_tiny(name, folder / name)
    model = open_model(
        compose_settings([f"model.checkpoint={tiny.folder}"]).model, 0, folder / "cache", lambda *_: None
    )
    list(Packer(model, "stored").pack(folder / f"{name}.gguf", lambda *_: None))
    return folder / f"{name}.gguf"
