"""Checkpoint folders of 4- and 8-bit integer weights, written by hand from the documented layouts, with their values.

Legend: O rows, I columns, G groups, B bits.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from support.files import llama_files, qwen_moe_files

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 2, "vocab_size": 96}
COLUMNS = 64  # the fewest of a projection


class Integers(NamedTuple):
    """A random weight of symmetric integers.

    Attributes:
        codes: [O, I] int64, from 0; the middle stands for 0.
        scales: [O, G], float16 or bfloat16.
        dense: [O, I] float32, their product.
        groups: [I] int32, each column's group.
        is_ordered: True if the columns of a group lie apart (act-order).
    """

    codes: Tensor
    scales: Tensor
    dense: Tensor
    groups: Tensor
    is_ordered: bool = False


def integers(
    rows: int, columns: int, bits: int, group: int, dtype: torch.dtype, seed: int, is_ordered: bool = False
) -> Integers:
    """Return a random weight; a group of 0 is the whole row."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=generator)
    groups = columns // (group or columns)
    scales = (torch.rand(rows, groups, generator=generator) + 0.5).mul_(0.2 / (1 << bits)).to(dtype)
    of_column = torch.arange(columns) // (columns // groups)
    if is_ordered:
        of_column = of_column[torch.randperm(columns, generator=generator)]
    dense = (codes - (1 << bits - 1)).float() * scales.float()[:, of_column]
    return Integers(codes, scales, dense, of_column.to(torch.int32), is_ordered)


def words_of(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [.., n] into int32 words along the last axis, the lowest bits first."""
    each = 32 // bits
    parts = codes.unflatten(-1, (-1, each)) << torch.arange(0, 32, bits)
    words = parts.sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def gptq(one: Integers, bits: int, version: int = 1) -> dict[str, Tensor]:
    """Return the tensors of a weight as GPTQ's programs store them, by their suffixes."""
    rows = len(one.codes)
    groups = one.scales.shape[1]
    zeros = torch.full((groups, rows), (1 << bits - 1) - (version == 1))
    return {
        "qweight": words_of(one.codes.T.contiguous().T, bits).T.contiguous(),
        "qzeros": words_of(zeros, bits),
        "scales": one.scales.T.contiguous(),
        "g_idx": one.groups,
    }


def packed(one: Integers, bits: int) -> dict[str, Tensor]:
    """Return the tensors of a weight in compressed-tensors' format pack-quantized."""
    shape = torch.tensor(one.codes.shape, dtype=torch.int64)
    order = {"weight_g_idx": one.groups} if one.is_ordered else {}
    return {"weight_packed": words_of(one.codes, bits), "weight_scale": one.scales, "weight_shape": shape, **order}


def plain(one: Integers, _bits: int) -> dict[str, Tensor]:
    """Return the tensors of a weight in compressed-tensors' format int-quantized."""
    return {"weight": (one.codes - 128).to(torch.int8), "weight_scale": one.scales}


def compressed_config(name: str, bits: int, group: int, **more: object) -> dict[str, Any]:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    weights = {"num_bits": bits, "type": "int", "symmetric": True, **strategy}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        **more,
    }


def gptq_config(bits: int, group: int, version: int = 1) -> dict[str, Any]:
    named = {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    return {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "sym": True, "desc_act": False, **named}


def with_order(stated: dict[str, Any], is_ordered: bool) -> dict[str, Any]:
    """Return the quantization_config, with act-order if asked for."""
    if is_ordered and stated["quant_method"] == "gptq":
        return {**stated, "desc_act": True}
    for scheme in stated.get("config_groups", {}).values() if is_ordered else ():
        scheme["weights"]["actorder"] = "group"
    return stated


Layout = tuple[Callable[[Integers, int], dict[str, Tensor]], Callable[[int, int], dict[str, Any]]]
LAYOUTS: Mapping[str, Layout] = {
    "gptq": (gptq, gptq_config),
    "gptq_v2": (lambda one, bits: gptq(one, bits, 2), lambda bits, group: gptq_config(bits, group, 2)),
    "pack-quantized": (packed, lambda bits, group: compressed_config("pack-quantized", bits, group)),
    "int-quantized": (plain, lambda bits, group: compressed_config("int-quantized", bits, group)),
}


def save_model(
    folder: Path,
    layout: str,
    bits: int,
    group: int,
    dtype: torch.dtype = torch.float16,
    model: nn.Module | None = None,
    ordered: Collection[str] = (),
) -> nn.Module:
    """Save a folder whose projections are integers; return transformers' model with the same values in float32.

    Args:
        model: transformers' model, whose projections get other values; None for a small Llama.
        ordered: endings of the names of projections with act-order, such as "q_proj"; each has its own order.
    """
    store, config = LAYOUTS[layout]
    model = model or llama_files.build("llama", 3, **SHAPE)
    tensors: dict[str, Tensor] = {}
    for number, (name, parameter) in enumerate(model.state_dict().items()):
        if name.endswith(("_proj.weight", "in_proj_qkv.weight")):
            is_ordered = name.removesuffix(".weight").endswith(tuple(ordered))
            one = integers(*parameter.shape, bits, group, dtype, number, is_ordered)
            parameter.copy_(one.dense)
            stem = name.removesuffix(".weight")
            tensors |= {f"{stem}.{suffix}": value for suffix, value in store(one, bits).items()}
        else:
            tensors[name] = parameter.to(torch.float32).clone()
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    stated = {**model.config.to_dict(), "quantization_config": with_order(config(bits, group), bool(ordered))}
    (folder / "config.json").write_text(json.dumps(stated))
    return model


def save_mixture(folder: Path, layout: str, bits: int, group: int, ordered: Collection[str] = ()) -> nn.Module:
    """Save a mixture whose projections and experts are integers, each expert in tensors of its own."""
    store, config = LAYOUTS[layout]
    model = qwen_moe_files.build(hidden_size=64, moe_intermediate_size=64, num_hidden_layers=2)
    tensors: dict[str, Tensor] = {}
    for number, (name, matrix) in enumerate(matrices_of(model)):
        one = integers(*matrix.shape, bits, group, torch.float16, number, name.endswith(tuple(ordered)))
        matrix.copy_(one.dense)
        tensors |= {f"{name}.{suffix}": value for suffix, value in store(one, bits).items()}
    dense = {name: value for name, value in model.state_dict().items() if "_proj" not in name}
    folder.mkdir(exist_ok=True)
    save_file({**tensors, **{name: value.clone() for name, value in dense.items()}}, folder / "model.safetensors")
    stated = {**model.config.to_dict(), "quantization_config": with_order(config(bits, group), bool(ordered))}
    (folder / "config.json").write_text(json.dumps(stated))
    return model


def matrices_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield projections, and each expert's by the name that files give it, as views of the model's weights."""
    for name, parameter in model.state_dict().items():
        before, _, part = name.rpartition(".")
        if part == "gate_up_proj":
            for expert, both in enumerate(parameter):
                for leaf, rows in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    yield f"{before}.{expert}.{leaf}", rows
        elif part == "down_proj":
            for expert, matrix in enumerate(parameter):
                yield f"{before}.{expert}.down_proj", matrix
        elif name.endswith("_proj.weight"):
            yield before, parameter
