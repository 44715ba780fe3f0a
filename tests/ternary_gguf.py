"""Ternary models as GGUF files, written byte by byte: the gguf package does not know i2_s.

Packing here follows the description of the format (quant/formats/i2_s.py has the picture), not our own packer.
"""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np

F32, I2_S = 0, 36
LEAVES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.attn_sub_norm": "attn_sub_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.ffn_sub_norm": "ffn_sub_norm",
}
GLOBAL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    """Return llama.cpp's name of one of transformers' weights."""
    if name in GLOBAL:
        return GLOBAL[name]
    _, _, layer, leaf = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{LEAVES[leaf]}.weight"


def i2_s(weight: np.ndarray) -> bytes:
    """Return the bytes of ternary * scale: byte j of 32: elements j, 32 + j, 64 + j, 96 + j, high bits first."""
    scale = np.abs(weight).max()
    codes = (np.sign(weight) + 1).astype(np.uint8).reshape(-1, 4, 32)
    packed = codes[:, 0] << 6 | codes[:, 1] << 4 | codes[:, 2] << 2 | codes[:, 3]
    return packed.tobytes() + struct.pack("<f", scale) + b"\xff" * 28  # the C writer leaves 28 bytes as they were


def encoded(weight: np.ndarray, kind: int) -> bytes:
    """Return a tensor's bytes in a ggml type."""
    if kind == I2_S:
        return i2_s(weight)
    quantized = gguf.quants.quantize(weight.astype(np.float32), gguf.GGMLQuantizationType(kind))
    return quantized.tobytes()


def write_gguf(
    path: Path, architecture: str, sizes: Mapping[str, int | float], tensors: Mapping[str, np.ndarray], kind: int
) -> None:
    """Write a model; matrices of the blocks in type `kind`, the rest in float32.

    Args:
        path: of the file.
        architecture: general.architecture.
        sizes: its keys, without their prefix.
        tensors: by transformers' names.
        kind: ggml type id.
    """
    entries = [text("general.architecture") + struct.pack("<I", 8) + text(architecture)]
    for key, value in sizes.items():
        typed = struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)
        entries.append(text(f"{architecture}.{key}") + typed)
    infos, section = [], b""
    for name, tensor in tensors.items():
        is_projection = name.endswith("_proj.weight")
        raw = encoded(tensor, kind if is_projection else F32)
        infos.append(info(gguf_name(name), tensor.shape, kind if is_projection else F32, len(section)))
        section += raw + bytes(-len(raw) % 32)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(entries)) + b"".join(entries) + b"".join(infos)
    path.write_bytes(header + bytes(-len(header) % 32) + section)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def info(name: str, shape: Sequence[int], kind: int, offset: int) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return text(name) + sizes + struct.pack("<IQ", kind, offset)
