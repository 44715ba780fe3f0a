"""LoRA adapters as files: PEFT's folders, and GGUF files in the layout of llama.cpp's convert_lora_to_gguf.py."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from support.files import llama_files
from support.packed_matrices import stored_matrix

WRAPPER = "base_model.model."
Factors = Mapping[str, tuple[Tensor, Tensor]]
"""A [R, I] and B [O, R] of each module, by its name in the stored model."""


def drawn(shapes: Mapping[str, tuple[int, int]], rank: int = 4, seed: int = 0) -> dict[str, tuple[Tensor, Tensor]]:
    """Return random factors whose products are as large as the matrices of small test models. Args: shapes: [O, I]."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (
            torch.randn(rank, inputs, generator=generator) * inputs**-0.5,
            torch.randn(outputs, rank, generator=generator),
        )
        for name, (outputs, inputs) in shapes.items()
    }


def write_peft(
    folder: Path, factors: Factors, infix: str = "", extra: Mapping[str, Tensor] | None = None, **config: object
) -> Path:
    """Write PEFT's folder. Args: infix: ".default" as in old versions; extra: tensors by their whole names."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{WRAPPER}{name}.lora_{which}{infix}.weight": factor.contiguous()
        for name, pair in factors.items()
        for which, factor in zip("AB", pair, strict=True)
    }
    save_file({**tensors, **(extra or {})}, folder / "adapter_model.safetensors")
    rank = len(next(iter(factors.values()))[0]) if factors else 8
    stated = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "base_model_name_or_path": "another/name", **config}
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    return folder


def write_gguf_adapter(
    path: Path,
    factors: Factors,
    architecture: str = "llama",
    alpha: float | None = 8.0,
    kind: str = "lora",
    general: str = "adapter",
    extra: Mapping[str, Tensor] | None = None,
    packed: str | None = None,
    invocation: Sequence[int] = (),
) -> Path:
    """Write a GGUF file. Args: extra: tensors by their whole names; packed: quantised type of the factors."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type(general)
    writer.add_string("adapter.type", kind)
    if invocation:
        writer.add_array("adapter.alora.invocation_tokens", invocation)
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    named = {
        f"{name}.weight.lora_{which}": factor
        for name, pair in factors.items()
        for which, factor in zip("ab", pair, strict=True)
    }
    for name, tensor in {**named, **(extra or {})}.items():
        values = np.ascontiguousarray(tensor.numpy())
        if packed is None or values.shape[-1] % 32:
            writer.add_tensor(name, values)
        else:
            number = gguf.GGMLQuantizationType[packed.upper()]
            writer.add_tensor(name, gguf.quants.quantize(values, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


STORED = {
    "q_proj": "q4_0",
    "k_proj": "q8_0",
    "v_proj": "q8_0",
    "o_proj": "q4_0",
    "gate_proj": "q4_0",
    "up_proj": "q8_0",
}


def packed_file(path: Path, name: str) -> nn.Module:
    """Write a GGUF file with packed matrices of random bytes; return transformers' model of the same values."""
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    model = llama_files.build(name, **sizes)
    stored = {}
    for index, (key, one) in enumerate(model.named_parameters()):
        kind = STORED.get(key.split(".")[-2])
        if kind is not None:
            stored[key] = stored_matrix(kind, *one.shape, seed=index)
            dense = stored[key].dense
            if (name == "llama" and "q_proj" in key) or (name == "llama" and "k_proj" in key):
                heads = model.config.num_attention_heads if "q_proj" in key else model.config.num_key_value_heads
                dense = dense.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)  # the file's order of rows
            one.data = dense.clone()
    llama_files.write_gguf(path, model, name, stored)
    return model
