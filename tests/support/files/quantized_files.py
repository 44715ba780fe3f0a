"""Checkpoint folders of weights with zero points and of floats, written by hand from the documented layouts.

Legend: O rows, I columns, G groups. A writer returns the tensors of a random weight by their suffixes, and its values
as float32 [O, I], computed from the layout's definition.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from graphcore.encodings import FP4_LEVELS, NF4_LEVELS
from support.files import llama_files, qwen_moe_files
from support.files.integer_files import SHAPE, compressed_config, gptq_config, matrices_of, words_of

Written = tuple[dict[str, Tensor], Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # row of each nibble of a word, AutoAWQ's order_map
BLOCK = (32, 64)  # rows and columns of FP8 blocks here


class Affine(NamedTuple):
    """A random weight with zero points: codes [O, I] and zeros [O, G] from 0, scales [O, G], dense [O, I] float32."""

    codes: Tensor
    zeros: Tensor
    scales: Tensor
    dense: Tensor


def affine(rows: int, columns: int, bits: int, group: int, dtype: torch.dtype, seed: int, least: int = 0) -> Affine:
    """Return a random weight; a group of 0 is the whole row."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=generator)
    groups = columns // (group or columns)
    zeros = torch.randint(least, 1 << bits, (rows, groups), generator=generator)
    scales = (torch.rand(rows, groups, generator=generator) + 0.5).mul_(0.2 / (1 << bits)).to(dtype)
    each = columns // groups
    dense = (codes - zeros.repeat_interleave(each, 1)).double() * scales.double().repeat_interleave(each, 1)
    return Affine(codes, zeros, scales, dense.float())


def gptq(bits: int, group: int, version: int = 1) -> Callable[[int, int, int], Written]:
    def write(rows: int, columns: int, seed: int) -> Written:
        one = affine(rows, columns, bits, group, torch.float16, seed, least=int(version == 1))
        tensors = {
            "qweight": words_of(one.codes.T.contiguous().T, bits).T.contiguous(),
            "qzeros": words_of((one.zeros - int(version == 1)).T.contiguous(), bits),
            "scales": one.scales.T.contiguous(),
            "g_idx": (torch.arange(columns) // (columns // one.scales.shape[1])).to(torch.int32),
        }
        return tensors, one.dense

    return write


def awq(group: int) -> Callable[[int, int, int], Written]:
    def interleaved(codes: Tensor) -> Tensor:  # [n, O]
        return words_of(codes.unflatten(1, (-1, 8))[..., list(AWQ_ORDER)].flatten(1), 4)

    def write(rows: int, columns: int, seed: int) -> Written:
        one = affine(rows, columns, 4, group, torch.float16, seed)
        tensors = {
            "qweight": interleaved(one.codes.T.contiguous()),
            "qzeros": interleaved(one.zeros.T.contiguous()),
            "scales": one.scales.T.contiguous(),
        }
        return tensors, one.dense

    return write


def packed(bits: int, group: int, dtype: torch.dtype) -> Callable[[int, int, int], Written]:
    def write(rows: int, columns: int, seed: int) -> Written:
        one = affine(rows, columns, bits, group, dtype, seed)
        tensors = {
            "weight_packed": words_of(one.codes, bits),
            "weight_scale": one.scales,
            "weight_zero_point": words_of(one.zeros.T.contiguous(), bits).T.contiguous(),
            "weight_shape": torch.tensor(one.codes.shape),
        }
        return tensors, one.dense

    return write


def plain(group: int, dtype: torch.dtype) -> Callable[[int, int, int], Written]:
    def write(rows: int, columns: int, seed: int) -> Written:
        one = affine(rows, columns, 8, group, dtype, seed)
        tensors = {
            "weight": (one.codes - 128).to(torch.int8),
            "weight_scale": one.scales,
            "weight_zero_point": (one.zeros - 128).to(torch.int8),
        }
        return tensors, one.dense

    return write


def fp8(kind: str, suffix: str, dtype: torch.dtype = torch.float32) -> Callable[[int, int, int], Written]:
    """Return a writer of E4M3 with a scale for each block, row, or the tensor."""

    def write(rows: int, columns: int, seed: int) -> Written:
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randint(0, 256, (rows, columns), generator=generator).to(torch.uint8)
        codes[(codes & 127) == 127] = 1  # a subnormal
        high, wide = {"block": BLOCK, "row": (1, columns), "tensor": (rows, columns), "number": (rows, columns)}[kind]
        shape = (-(-rows // high), -(-columns // wide))
        scales = ((torch.rand(shape, generator=generator) + 0.5) / 4096).to(dtype)
        each = scales.double().repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        values = codes.view(torch.float8_e4m3fn)
        stored = scales.reshape({"tensor": (1,), "number": ()}.get(kind, shape))
        return {"weight": values, suffix: stored}, (values.double() * each).float()

    return write


def nvfp4(rows: int, columns: int, seed: int) -> Written:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, columns), generator=generator).to(torch.uint8)
    scales = (torch.rand(rows, columns // 16, generator=generator) * 400 + 1).to(torch.float8_e4m3fn)
    whole = torch.tensor([3000.0 + seed])
    each = (scales.float() / whole).double().repeat_interleave(16, 1)
    tensors = {
        "weight_packed": codes[:, ::2] | codes[:, 1::2] << 4,
        "weight_scale": scales,
        "weight_global_scale": whole,
    }
    return tensors, (e2m1(codes) * each).float()


def modelopt_nvfp4(rows: int, columns: int, seed: int) -> Written:
    """Return NVFP4 as Model Optimizer stores it: the global scale is a factor."""
    tensors, _ = nvfp4(rows, columns, seed)
    codes, scales = tensors["weight_packed"], tensors["weight_scale"]
    whole = torch.tensor(1 / (3000.0 + seed))
    each = (scales.float() * whole).double().repeat_interleave(16, 1)
    values = e2m1(torch.stack([codes & 15, codes >> 4], dim=2).flatten(1))
    return {"weight": codes, "weight_scale": scales, "weight_scale_2": whole}, (values * each).float()


def mxfp4(rows: int, columns: int, seed: int) -> Written:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, columns), generator=generator).to(torch.uint8)
    exponents = torch.randint(119, 123, (rows, columns // 32), generator=generator)
    each = (2.0 ** (exponents.double() - 127)).repeat_interleave(32, 1)
    tensors = {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": exponents.to(torch.uint8)}
    return tensors, (e2m1(codes) * each).float()


def e2m1(codes: Tensor) -> Tensor:
    """Return the values of E2M1 codes, float64: sign, two bits of an exponent with a bias of 1, one of a mantissa."""
    exponent, mantissa = (codes >> 1 & 3).double(), (codes & 1).double()
    size = torch.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1))
    return torch.where(codes & 8 != 0, -size, size)


def bnb_int8(rows: int, columns: int, seed: int) -> Written:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, (rows, columns), generator=generator).to(torch.int8)
    largest = torch.rand(rows, generator=generator) / 8 + 0.05
    tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, (codes.double() * (largest / 127).double().unsqueeze(1)).float()


def bnb_4bit(kind: str, is_nested: bool, blocksize: int = 64) -> Callable[[int, int, int], Written]:
    levels = torch.tensor(NF4_LEVELS if kind == "nf4" else FP4_LEVELS, dtype=torch.float32)

    def write(rows: int, columns: int, seed: int) -> Written:
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randint(0, 16, (rows * columns,), generator=generator)
        count = rows * columns // blocksize
        absmax = torch.rand(count, generator=generator) / 8 + 0.05
        state: dict[str, Any] = {
            "quant_type": kind,
            "blocksize": blocksize,
            "dtype": "bfloat16",
            "shape": [rows, columns],
        }
        tensors = {
            "weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8).unsqueeze(1),
            "weight.absmax": absmax,
            "weight.quant_map": levels.clone(),
        }
        if is_nested:
            index = torch.randint(0, 256, (count,), generator=generator)
            table = torch.linspace(-1, 1, 256)
            nested = torch.rand(-(-count // 256), generator=generator) / 16 + 0.01
            absmax = table[index] * nested.repeat_interleave(256)[:count] + 0.125
            tensors |= {
                "weight.absmax": index.to(torch.uint8),
                "weight.nested_absmax": nested,
                "weight.nested_quant_map": table.clone(),
            }
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.125}
        raw = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = raw
        dense = levels[codes].double() * absmax.double().repeat_interleave(blocksize)
        return tensors, dense.float().view(rows, columns)

    return write


class FolderLayout(NamedTuple):
    """A writer of weights, the quantization_config that describes them, and the format that they become."""

    write: Callable[[int, int, int], Written]
    config: dict[str, Any]
    format: str


def _compressed(name: str, bits: int, group: int, **weights: object) -> dict[str, Any]:
    config = compressed_config(name, bits, group)
    config["config_groups"]["group_0"]["weights"] |= {"symmetric": False, **weights}
    return config


FLOAT_CONFIG = {"type": "float", "symmetric": True, "group_size": None}
FOLDER_LAYOUTS: Mapping[str, FolderLayout] = {
    "gptq 4": FolderLayout(gptq(4, 32), {**gptq_config(4, 32), "sym": False}, "affine4"),
    "gptq 8": FolderLayout(gptq(8, 64), {**gptq_config(8, 64), "sym": False}, "affine8"),
    "gptq_v2 4": FolderLayout(gptq(4, 0, 2), {**gptq_config(4, 0, 2), "sym": False}, "affine4"),
    "gptq_v2 8": FolderLayout(gptq(8, 32, 2), {**gptq_config(8, 32, 2), "sym": False}, "affine8"),
    "awq": FolderLayout(
        awq(64), {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}, "affine4"
    ),
    "auto-round": FolderLayout(
        gptq(4, 32),
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 32,
            "sym": False,
            "data_type": "int",
            "packing_format": "auto_round:auto_gptq",
        },
        "affine4",
    ),
    "packed 4 bf16": FolderLayout(packed(4, 32, torch.bfloat16), _compressed("pack-quantized", 4, 32), "affine4"),
    "packed 4 f32": FolderLayout(packed(4, 0, torch.float32), _compressed("pack-quantized", 4, 0), "affine8"),
    "packed 8": FolderLayout(packed(8, 64, torch.float16), _compressed("pack-quantized", 8, 64), "affine8"),
    "int8 rows": FolderLayout(plain(0, torch.bfloat16), _compressed("int-quantized", 8, 0), "affine8"),
    "int8 groups": FolderLayout(plain(32, torch.float32), _compressed("int-quantized", 8, 32), "affine8"),
    "fp8 rows": FolderLayout(
        fp8("row", "weight_scale", torch.bfloat16),
        _compressed("float-quantized", 8, 0, **FLOAT_CONFIG, strategy="channel"),
        "fp8",
    ),
    "fp8 blocks": FolderLayout(
        fp8("block", "weight_scale_inv"),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)},
        "fp8",
    ),
    "fp8 blocks, compressed": FolderLayout(
        fp8("block", "weight_scale"),
        _compressed("float-quantized", 8, 0, **FLOAT_CONFIG, strategy="block", block_structure=list(BLOCK)),
        "fp8",
    ),
    "fp8 tensor": FolderLayout(
        fp8("tensor", "weight_scale"), _compressed("float-quantized", 8, 0, **FLOAT_CONFIG, strategy="tensor"), "fp8"
    ),
    "fp8 number": FolderLayout(fp8("number", "weight_scale"), {"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
    "fbgemm": FolderLayout(fp8("row", "weight_scale"), {"quant_method": "fbgemm_fp8"}, "fp8"),
    "nvfp4": FolderLayout(nvfp4, _compressed("nvfp4-pack-quantized", 4, 16, **FLOAT_CONFIG), "nvfp4_f32"),
    "nvfp4 modelopt": FolderLayout(
        modelopt_nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, "nvfp4_f32"
    ),
    "mxfp4": FolderLayout(mxfp4, _compressed("mxfp4-pack-quantized", 4, 32, **FLOAT_CONFIG), "mxfp4"),
    "int8 bnb": FolderLayout(bnb_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}, "affine8"),
    "nf4": FolderLayout(bnb_4bit("nf4", False), {"quant_method": "bitsandbytes", "load_in_4bit": True}, "nf4"),
    "nf4 nested": FolderLayout(bnb_4bit("nf4", True), {"quant_method": "bitsandbytes", "_load_in_4bit": True}, "nf4"),
    "fp4": FolderLayout(bnb_4bit("fp4", False, 32), {"quant_method": "bitsandbytes", "load_in_4bit": True}, "fp4"),
}


def save_quantized(folder: Path, layout: str, family: str = "llama") -> nn.Module:
    """Save a folder whose projections are of this layout; return transformers' model with the same values."""
    one = FOLDER_LAYOUTS[layout]
    model = llama_files.build(family, 3, **SHAPE)
    tensors: dict[str, Tensor] = {}
    for number, (name, parameter) in enumerate(model.state_dict().items()):
        if name.endswith("_proj.weight"):
            stored, dense = one.write(*parameter.shape, number)
            parameter.copy_(dense)
            tensors |= {f"{name.removesuffix('.weight')}.{suffix}": value for suffix, value in stored.items()}
        else:
            tensors[name] = parameter.to(torch.float32).clone()
    save_folder(folder, model, tensors, one.config)
    return model


def save_quantized_mixture(folder: Path, layout: str) -> nn.Module:
    """Save a mixture whose projections and experts are of this layout, each expert in tensors of its own."""
    one = FOLDER_LAYOUTS[layout]
    model = qwen_moe_files.build(hidden_size=64, moe_intermediate_size=64, num_hidden_layers=2)
    tensors: dict[str, Tensor] = {}
    for number, (name, matrix) in enumerate(matrices_of(model)):
        stored, dense = one.write(*matrix.shape, number)
        matrix.copy_(dense)
        tensors |= {f"{name}.{suffix}": value for suffix, value in stored.items()}
    tensors |= {name: value.clone() for name, value in model.state_dict().items() if "_proj" not in name}
    save_folder(folder, model, tensors, one.config)
    return model


def save_folder(folder: Path, model: nn.Module, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**model.config.to_dict(), "quantization_config": config}))
