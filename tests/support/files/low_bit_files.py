"""GGUF files whose matrices have one to three bits a weight, and others beside them, as llama.cpp mixes them.

Of a mixture the experts alone are of such a format.
"""

from collections.abc import Sequence
from pathlib import Path

import gguf
import torch
from torch import nn

from support.files import llama_files, qwen_moe_files
from support.packed_matrices import stored_matrix

LEVELS = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")
FILES = {
    "iq2_xxs": ("iq2_xxs", "q2_k", "iq2_xxs", "q4_k", "iq2_xxs", "q6_k", "iq4_nl"),  # as llama.cpp mixes them
    "iq3": ("iq3_s", "iq3_xxs", "q4_k", "iq3_s", "q5_k"),
    "iq1": ("iq1_s", "iq1_m", "q2_k", "iq2_xxs", "q5_k"),
    "iq2": ("iq2_xs", "iq2_s", "q4_k", "iq3_s", "iq4_xs"),
}
SHAPES = (
    {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64},
    {"hidden_size": 512, "intermediate_size": 768, "head_dim": 128},
)
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8]])


def low_bit_file(
    path: Path, formats: Sequence[str], shape: dict[str, int], seed: int, family: str = "qwen2"
) -> tuple[nn.Module, Path]:
    """Write a file whose matrices are of these formats, one after another; return transformers' model, and its path."""
    model = llama_files.build(family, seed, num_hidden_layers=2, vocab_size=96, **shape)
    stored = {}
    layers = [one for one in model.named_modules() if isinstance(one[1], nn.Linear | nn.Embedding)]
    for number, (name, module) in enumerate(layers):
        matrix = stored_matrix(formats[number % len(formats)], *module.weight.shape, seed=seed + number)
        stored[f"{name}.weight"], dense = matrix, matrix.dense.clone()
        if family == "llama" and name.endswith(("q_proj", "k_proj")):  # whose rows the file has in another order
            dense = dense.unflatten(0, (-1, shape["head_dim"] // 2, 2)).transpose(1, 2).flatten(0, 2)
        module.weight.data = dense
    return model, llama_files.write_gguf(path, model, family, stored)


def low_bit_mixture(path: Path, format_name: str, is_fused: bool) -> nn.Module:
    """Write a mixture whose experts are of a format, gate and up together or apart; return transformers' model."""
    model = qwen_moe_files.build(hidden_size=256, moe_intermediate_size=256, num_hidden_layers=2)
    stored = {}
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            experts, rows, columns = parameter.shape
            matrix = stored_matrix(format_name, experts * rows, columns, seed=len(stored))
            parameter.copy_(matrix.dense.view(parameter.shape))
            stored[name] = matrix.rows.view(experts, rows, -1).numpy()
    qwen_moe_files.write_gguf(path, model, gguf.GGMLQuantizationType[format_name.upper()], is_fused, stored)
    return model
