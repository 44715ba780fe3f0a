"""Small ternary models in each of Hugging Face's forms, and as GGUF files."""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from support.tiny_models import BUILDERS, VOCAB, randomise

# Ternary models as GGUF files, written byte by byte: the gguf package does not know i2_s.
#
# Packing here follows the description of the format (quant/formats/i2_s.py has the picture), not our own packer.

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


# Small random ternary models in each of Hugging Face's forms, with transformers' own layers as the reference.
#
# transformers loads such checkpoints only with accelerate, so its BitLinear and AutoBitLinear are put into its model
# here, as its quantizer does, and given the stored tensors.

FORMS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "bitlinear": {"linear_class": "bitlinear"},
    "autobitlinear": {"linear_class": "autobitlinear", "quantization_mode": "offline"},
    "online": {"linear_class": "autobitlinear", "quantization_mode": "online"},
}


@dataclass(frozen=True)
class TernaryModel:
    """A checkpoint folder and transformers' float32 model of the same tensors."""

    folder: Path
    reference: nn.Module
    ids: Tensor

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Return transformers' logits of `ids`: [2, 50, V]."""
        with torch.compiler.set_stance("force_eager"):
            return self.reference(input_ids=self.ids, use_cache=False).logits.float()


def save_ternary(
    name: str, form: str, seed: int, folder: Path, changes: Mapping[str, object] | None = None
) -> TernaryModel:
    """Save a family's model with random ternary projections and return it with its folder.

    Args:
        name: in `BUILDERS`.
        form: in `FORMS`.
        seed: of the weights.
        folder: to write to.
        changes: of the family's config.
    """
    torch.manual_seed(seed)
    plain = BUILDERS[name](**(changes or {}))
    randomise(plain, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    stored = {key: tensor.clone() for key, tensor in plain.state_dict().items()}
    if plain.config.tie_word_embeddings:
        del stored["lm_head.weight"]
    for key in [key for key in stored if key.endswith("_proj.weight")]:
        if form != "online":
            stored.update(packed(key, stored[key], form, generator))
    settings = {"quant_method": "bitnet", **FORMS[form]}
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**plain.config.to_dict(), "quantization_config": settings}))
    ids = torch.randint(0, VOCAB, (2, 50), generator=generator)
    return TernaryModel(folder, with_transformers_layers(plain, stored, form), ids)


def packed(key: str, weight: Tensor, form: str, generator: torch.Generator) -> dict[str, Tensor]:
    """Return a weight of random signs as stored: bytes by transformers' own packer, and a scale in bf16."""
    from transformers.integrations.bitnet import pack_weights

    ternary = torch.randint(-1, 2, weight.shape, generator=generator, dtype=torch.int8)
    scale = (1.0 + torch.rand(1, generator=generator)) * (1.5 / weight.shape[1]) ** 0.5
    stated = scale if form == "autobitlinear" else 1.0 / scale
    return {key: pack_weights(ternary.clone()), f"{key}_scale": stated.to(torch.bfloat16)}


def with_transformers_layers(plain: nn.Module, stored: Mapping[str, Tensor], form: str) -> nn.Module:
    """Return the model with transformers' ternary layers in place of its Linears, float32, eager attention."""
    from transformers import BitNetQuantConfig
    from transformers.integrations.bitnet import replace_with_bitnet_linear, unpack_weights

    settings = BitNetQuantConfig(**FORMS[form])
    model = replace_with_bitnet_linear(plain, ["lm_head"], settings)
    with torch.compiler.set_stance("force_eager"):
        tensors = {
            key: unpack_weights(tensor, torch.float32)
            if form == "autobitlinear" and tensor.dtype is torch.uint8
            else tensor
            for key, tensor in stored.items()
        }
    tensors = {key: tensor.float() if tensor.is_floating_point() else tensor for key, tensor in tensors.items()}
    found = model.load_state_dict(tensors, strict=False, assign=True)
    assert set(found.missing_keys) <= {"lm_head.weight"}, found
    assert not found.unexpected_keys, found
    model.tie_weights()
    model.set_attn_implementation("eager")
    return model.eval()
