"""Records how the libraries that write quantised Hugging Face folders store weights, and what they read back.

    python record.py LIBRARY...

A LIBRARY is one of the functions in RECORDERS below; each is run with its own library installed, and writes
`<LIBRARY>.npz` (or a folder) beside this file. See README.md for the versions and for what is in the files.
"""

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent
VIEWS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8, torch.float8_e8m0fnu: torch.uint8}


def dtype_name(tensor: torch.Tensor) -> str:
    """Return "bfloat16" for torch.bfloat16."""
    return str(tensor.dtype).removeprefix("torch.")


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return the values, or the bits where numpy lacks the dtype."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor.view(VIEWS.get(tensor.dtype, tensor.dtype)).numpy()


class Cases:
    """The cases of one file: stored tensors, what the library makes of them, and what config.json says."""

    def __init__(self, *packages: str) -> None:
        """Start an empty file that names the versions of these packages."""
        self.versions = {name: importlib.metadata.version(name) for name in packages}
        self.arrays: dict[str, np.ndarray] = {}
        self.listed: list[dict[str, Any]] = []

    def add(
        self, name: str, stored: dict[str, torch.Tensor], dense: torch.Tensor, config: dict[str, Any], **notes: object
    ) -> None:
        """Keep one layer: `dense` is [outputs, inputs], as the library dequantised it."""
        stored = {key: value for key, value in stored.items() if value is not None}
        self.arrays |= {f"{name}/{key}": as_array(value) for key, value in stored.items()}
        self.arrays[f"{name}/dense"] = dense.detach().float().numpy()
        tensors = {key: {"dtype": dtype_name(value), "shape": list(value.shape)} for key, value in stored.items()}
        case = {"name": name, "tensors": tensors, "dense_dtype": dtype_name(dense), "config": config, **notes}
        self.listed.append(case)
        print(name, {key: (value["dtype"], value["shape"]) for key, value in tensors.items()}, dtype_name(dense))

    def write(self, name: str) -> None:
        """Write `<name>.npz`."""
        about = {"versions": np.array(json.dumps(self.versions)), "cases": np.array(json.dumps(self.listed))}
        path = HERE / f"{name}.npz"
        np.savez_compressed(path, **self.arrays, **about)
        print(path.name, path.stat().st_size, self.versions)


def weight_of(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Return a float32 weight for which zero points take many values: two rows, of one sign each, get the ends."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 0.05
    means = 0.03 * torch.randn(rows, 1, generator=generator)
    means[2:4] = torch.tensor([[0.3], [-0.3]])
    return weight + means


# compressed-tensors

# name: (format, rows, columns, weights, dtype of the scales)
COMPRESSED = {
    "pack4_asym_group32": (
        "pack-quantized",
        48,
        128,
        {"num_bits": 4, "group_size": 32, "symmetric": False},
        "bfloat16",
    ),
    "pack4_asym_group128": (
        "pack-quantized",
        52,
        256,
        {"num_bits": 4, "group_size": 128, "symmetric": False},
        "bfloat16",
    ),
    "pack4_asym_channel": ("pack-quantized", 52, 100, {"num_bits": 4, "group_size": -1, "symmetric": False}, "float16"),
    "pack4_asym_tensor": ("pack-quantized", 24, 128, {"num_bits": 4, "symmetric": False}, "bfloat16"),
    "pack8_asym_group32": (
        "pack-quantized",
        24,
        128,
        {"num_bits": 8, "group_size": 32, "symmetric": False},
        "bfloat16",
    ),
    "pack8_asym_channel": ("pack-quantized", 26, 128, {"num_bits": 8, "group_size": -1, "symmetric": False}, "float32"),
    "pack3_asym_group32": (
        "pack-quantized",
        24,
        128,
        {"num_bits": 3, "group_size": 32, "symmetric": False},
        "bfloat16",
    ),
    "pack2_group32": ("pack-quantized", 24, 128, {"num_bits": 2, "group_size": 32}, "bfloat16"),
    "pack6_channel": ("pack-quantized", 24, 100, {"num_bits": 6, "group_size": -1}, "bfloat16"),
    "pack4_group32_float32": ("pack-quantized", 24, 128, {"num_bits": 4, "group_size": 32}, "float32"),
    "pack4_group32_bfloat16": ("pack-quantized", 24, 128, {"num_bits": 4, "group_size": 32}, "bfloat16"),
    "pack4_group32_float16": ("pack-quantized", 24, 128, {"num_bits": 4, "group_size": 32}, "float16"),
    "int8_asym_channel": ("int-quantized", 24, 128, {"num_bits": 8, "group_size": -1, "symmetric": False}, "bfloat16"),
    "int8_asym_group32": ("int-quantized", 24, 128, {"num_bits": 8, "group_size": 32, "symmetric": False}, "float16"),
    "int8_asym_tensor": ("int-quantized", 12, 128, {"num_bits": 8, "symmetric": False}, "float32"),
    "int8_channel_float32": ("int-quantized", 12, 128, {"num_bits": 8, "group_size": -1}, "float32"),
    "int8_channel_float16": ("int-quantized", 24, 128, {"num_bits": 8, "group_size": -1}, "float16"),
    "int4_naive_channel": ("naive-quantized", 24, 128, {"num_bits": 4, "group_size": -1}, "bfloat16"),
    "float8_tensor": ("float-quantized", 24, 128, {"num_bits": 8, "type": "float"}, "bfloat16"),
    "float8_channel": ("float-quantized", 24, 128, {"num_bits": 8, "type": "float", "group_size": -1}, "bfloat16"),
    "float8_channel_float32": (
        "float-quantized",
        12,
        128,
        {"num_bits": 8, "type": "float", "group_size": -1},
        "float32",
    ),
    "float8_block": (
        "float-quantized",
        140,
        200,
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
        "bfloat16",
    ),
    "float8_block_small": (
        "float-quantized",
        40,
        80,
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]},
        "float32",
    ),
    "nvfp4": ("nvfp4-pack-quantized", 48, 128, "NVFP4A16", "float32"),
    "nvfp4_activations": ("nvfp4-pack-quantized", 24, 128, "NVFP4", "float32"),
    "mxfp4": ("mxfp4-pack-quantized", 48, 128, "MXFP4A16", "bfloat16"),
    "mxfp8": ("mxfp8-quantized", 24, 128, "MXFP8A16", "bfloat16"),
}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def extremes(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and the greatest value of every part of the weight that has a scale of its own."""
    if args.strategy == "tensor":
        return torch.aminmax(weight)
    if args.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if args.strategy == "block":
        tall, wide = args.block_structure
        padding = (0, -weight.shape[1] % wide, 0, -weight.shape[0] % tall)
        blocks = torch.nn.functional.pad(weight, padding).unflatten(1, (-1, wide)).unflatten(0, (-1, tall))
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    groups = weight.unflatten(1, (-1, args.group_size))
    return groups.amin(2), groups.amax(2)


def compressed_tensors() -> None:
    """Record each format of compressed-tensors, by its compressors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    cases = Cases("compressed-tensors", "torch")
    for seed, (name, (file_format, rows, columns, weights, scale)) in enumerate(COMPRESSED.items()):
        if isinstance(weights, str):
            scheme = preset_name_to_scheme(weights, ["Linear"])
        else:
            scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
        scheme.format = file_format
        args, dense = scheme.weights, weight_of(rows, columns, seed).to(DTYPES[scale])
        least, greatest = extremes(dense, args)
        state = {"weight": dense}
        if "nvfp4" in name:
            state["weight_global_scale"] = generate_gparam(*torch.aminmax(dense))
        if name == "nvfp4_activations":
            state["input_global_scale"] = generate_gparam(torch.tensor(-3.0), torch.tensor(2.5))
        scales, zeros = calculate_qparams(least, greatest, args, state.get("weight_global_scale"))
        if args.scale_dtype is None:
            scales = scales.to(DTYPES[scale])
        compressor = BaseCompressor.get_value_from_registry(file_format)
        stored = compressor.compress(state | {"weight_scale": scales, "weight_zero_point": zeros}, scheme)
        groups = {"group_0": scheme}
        config = QuantizationConfig(
            config_groups=groups, format=file_format, quantization_status="compressed", ignore=["lm_head"]
        )
        cases.add(name, stored, compressor.decompress(stored, scheme)["weight"], config.model_dump(mode="json"))
    cases.write("compressed_tensors")


# name: (columns, weights), with scales in bfloat16
OLD_COMPRESSED = {
    "pack4_g_idx": (128, {"num_bits": 4, "group_size": 32, "actorder": "group"}),
    "pack4_asym_g_idx": (128, {"num_bits": 4, "group_size": 32, "symmetric": False, "actorder": "group"}),
    "pack8_g_idx": (128, {"num_bits": 8, "group_size": 64, "actorder": "group"}),
    "pack4_weight_order": (128, {"num_bits": 4, "group_size": 32, "actorder": "weight"}),
    "pack3_asym_group32": (128, {"num_bits": 3, "group_size": 32, "symmetric": False}),
    "pack6_channel": (128, {"num_bits": 6, "group_size": -1}),
    "int8_g_idx": (128, {"num_bits": 8, "group_size": 32, "actorder": "group"}),
}


def compressed_tensors_012() -> None:
    """Record what versions before 0.18 wrote: columns in groups of their own, and values that never span two words."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.quantized_compressors.pack_quantized import unpack_from_int32
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams

    cases = Cases("compressed-tensors", "torch")
    for seed, (name, (columns, weights)) in enumerate(OLD_COMPRESSED.items(), 100):
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
        file_format = "int-quantized" if name.startswith("int8") else "pack-quantized"
        args, dense = scheme.weights, weight_of(24, columns, seed).to(torch.bfloat16)
        g_idx, ordered = None, dense
        if args.actorder == "group":
            order = torch.randperm(columns, generator=torch.Generator().manual_seed(seed))
            g_idx = torch.empty(columns, dtype=torch.int32)
            g_idx[order] = torch.arange(columns, dtype=torch.int32) // args.group_size
            ordered = dense[:, torch.argsort(g_idx)]
        scales, zeros = calculate_qparams(*extremes(ordered, args), args)
        given = {"weight": dense, "weight_scale": scales, "weight_zero_point": zeros, "weight_g_idx": g_idx}
        compressor = BaseCompressor.load_from_registry(file_format)
        state = {f"layer.{key}": value for key, value in given.items() if value is not None}
        stored = compressor.compress(state, {"layer": scheme})
        stored = {key.removeprefix("layer."): value for key, value in stored.items()}
        if args.symmetric:
            read = compressor.decompress_weight(stored, args)
        else:  # this version's decompress_weight refuses packed zeros: its parts are called
            codes = unpack_from_int32(stored["weight_packed"], args.num_bits, dense.shape)
            packed = stored["weight_zero_point"]
            points = unpack_from_int32(packed, args.num_bits, (len(dense), scales.shape[1]), packed_dim=0)
            read = dequantize(codes, scales, points, args, g_idx=g_idx)
        config = QuantizationConfig(config_groups={"group_0": scheme}, format=file_format, ignore=["lm_head"])
        cases.add(name, stored, read, config.model_dump(mode="json"))
    cases.write("compressed_tensors_012")


# bitsandbytes

# name: (rows, columns, quant_type, block size, whether the scales are quantised too, dtype, dtype of storage)
FOUR_BIT = {
    "nf4": (48, 128, "nf4", 64, False, "float32", "uint8"),
    "nf4_nested": (144, 128, "nf4", 64, True, "bfloat16", "uint8"),
    "nf4_float16": (24, 128, "nf4", 64, False, "float16", "uint8"),
    "nf4_tail": (23, 100, "nf4", 64, True, "float16", "uint8"),
    "nf4_block128": (24, 256, "nf4", 128, False, "bfloat16", "uint8"),
    "nf4_block128_tail": (24, 320, "nf4", 128, False, "bfloat16", "uint8"),
    "nf4_stored_bfloat16": (24, 128, "nf4", 64, True, "bfloat16", "bfloat16"),
    "fp4": (48, 128, "fp4", 64, False, "float32", "uint8"),
    "fp4_nested": (24, 128, "fp4", 64, True, "bfloat16", "uint8"),
}


def bitsandbytes() -> None:
    """Record the state dicts of Linear4bit and Linear8bitLt."""
    from bitsandbytes import functional, nn
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute

    cases = Cases("bitsandbytes", "torch")
    names = list(FOUR_BIT)
    for name, (rows, columns, kind, block, is_nested, dtype, storage) in FOUR_BIT.items():
        layer = nn.Linear4bit(columns, rows, bias=name == "nf4", compress_statistics=is_nested, quant_type=kind)
        state = {"weight": weight_of(rows, columns, names.index(name)).to(getattr(torch, dtype))}
        state |= {"bias": weight_of(rows, 1, 9)[:, 0]} if name == "nf4" else {}
        kept = {"compress_statistics": is_nested, "blocksize": block, "quant_type": kind}
        layer.weight = nn.Params4bit(state["weight"], False, quant_storage=getattr(torch, storage), **kept).to("cpu")
        if name == "nf4":
            layer.bias.data = state["bias"]
        dense, state = functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state), layer.weight.quant_state
        if not is_nested:  # the library's code in PyTorch: its CPU kernel misreads rows that end inside a block
            data = layer.weight.data.view(torch.uint8).reshape(-1)
            dense = _dequantize_4bit_compute(data, state.absmax, state.code, block, state.shape, state.dtype)
        config = {"load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": is_nested}
        config |= {"quant_method": "bitsandbytes", "bnb_4bit_quant_storage": storage}
        cases.add(name, layer.state_dict(), dense, config)
    for name, dtype in {"int8": torch.float16, "int8_bias": torch.bfloat16}.items():
        layer = nn.Linear8bitLt(128, 48, bias=name == "int8_bias", has_fp16_weights=False)
        state = {"weight": weight_of(48, 128, 20).to(dtype)} | (
            {"bias": weight_of(48, 1, 9)[:, 0]} if layer.bias is not None else {}
        )
        layer.load_state_dict(state)
        layer = layer.to("cpu")
        dense = functional.int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB)
        cases.add(name, layer.state_dict(), dense, {"load_in_8bit": True, "quant_method": "bitsandbytes"})
    cases.write("bitsandbytes")


def tiny_llama() -> Any:
    """Return a Llama of two layers with random weights, in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads, **ends, initializer_range=0.1, tie_word_embeddings=False))
    return model.to(torch.bfloat16).eval()


TOKENS = [[5, 17, 80, 33, 2, 61, 44, 9]]


@torch.no_grad()
def write_logits(folder: Path, packages: tuple[str, ...], run: Any, dense: dict[str, torch.Tensor]) -> None:
    """Write logits.npz: by the library itself, and by a float32 Llama of the weights that the library dequantised.

    `run` is the model that the library read from the folder, None where it runs on no CPU; `dense` the weights
    of the quantised layers by their modules' names.
    """
    from safetensors.torch import load_file
    from transformers import AutoConfig, LlamaForCausalLM

    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    plain = LlamaForCausalLM(config).float().eval()
    stored = {key: value for path in folder.glob("*.safetensors") for key, value in load_file(path).items()}
    weights = {key: stored[key] for key in plain.state_dict() if key.removesuffix(".weight") not in dense}
    plain.load_state_dict(weights | {f"{key}.weight": value.float() for key, value in dense.items()})
    tokens = torch.tensor(TOKENS)
    arrays = {"tokens": tokens.numpy(), "dense_logits": plain(tokens).logits.numpy()}
    if run is not None:
        arrays["logits"] = run(tokens).logits.float().numpy()
    versions = {name: importlib.metadata.version(name) for name in (*packages, "transformers", "torch")}
    np.savez_compressed(folder / "logits.npz", **arrays, versions=np.array(json.dumps(versions)))
    gap = np.abs(arrays.get("logits", arrays["dense_logits"]) - arrays["dense_logits"]).max()
    print(folder.name, sum(path.stat().st_size for path in folder.iterdir()), "gap of the logits", gap, versions)


def bitsandbytes_folders() -> None:
    """Record whole folders as transformers saves them with BitsAndBytesConfig."""
    import tempfile

    from bitsandbytes import functional
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    nested = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16"}
    configs = {"llama_nf4": BitsAndBytesConfig(load_in_4bit=True, **nested)}
    configs["llama_int8"] = BitsAndBytesConfig(load_in_8bit=True)
    for name, config in configs.items():
        with tempfile.TemporaryDirectory() as source:
            tiny_llama().save_pretrained(source)
            model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config, device_map="cpu")
        model.save_pretrained(HERE / name)
        model = AutoModelForCausalLM.from_pretrained(HERE / name, device_map="cpu")
        dense = {}
        for module, layer in model.named_modules():
            if type(layer).__name__ == "Linear4bit":
                dense[module] = functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            elif type(layer).__name__ == "Linear8bitLt":
                dense[module] = functional.int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB)
        write_logits(HERE / name, ("bitsandbytes",), model, dense)


# the whole folders of compressed-tensors: {name: what is quantised how}, as LLM Compressor's modifier takes it
INTEGERS = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
FLOATS = {"num_bits": 8, "type": "float", "strategy": "channel"}
LLM_COMPRESSOR = {
    "llama_compressed_tensors": {
        "config_groups": {
            "group_0": {"targets": [r"re:.*(q|k|v|o|gate|up)_proj$"], "weights": INTEGERS},
            "group_1": {"targets": ["re:.*down_proj"], "weights": FLOATS},
        },
        "ignore": ["lm_head", "model.layers.1.self_attn.k_proj"],
    },
    "llama_nvfp4": {"scheme": "NVFP4A16", "targets": ["Linear"], "ignore": ["lm_head", "re:.*layers.1.self_attn.*"]},
}


def llmcompressor_folders() -> None:
    """Record whole folders that LLM Compressor saved, and transformers read."""
    import tempfile

    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM

    for name, settings in LLM_COMPRESSOR.items():
        with tempfile.TemporaryDirectory() as source:
            tiny_llama().save_pretrained(source)
            model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
            oneshot(model=model, recipe=QuantizationModifier(**settings))
            model.save_pretrained(HERE / name)
        (HERE / name / "recipe.yaml").unlink(missing_ok=True)
        model = AutoModelForCausalLM.from_pretrained(HERE / name, device_map="cpu")
        model(torch.tensor(TOKENS))  # compressed-tensors decompresses the model when it first runs
        quantised = {key: layer for key, layer in model.named_modules() if hasattr(layer, "quantization_scheme")}
        dense = {key: layer.weight.data for key, layer in quantised.items()}
        write_logits(HERE / name, ("llmcompressor", "compressed-tensors"), model, dense)


# GPTQ and AWQ


def asymmetric(
    weight: torch.Tensor, bits: int, group: int, g_idx: torch.Tensor | None = None, is_symmetric: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and zero points [outputs, groups] of the least and the greatest value of each group."""
    ordered = weight if g_idx is None else weight[:, torch.argsort(g_idx, stable=True)]
    parts = ordered.float().unflatten(1, (-1, group))
    least, greatest, top = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0), 2**bits - 1
    if is_symmetric:
        greatest = torch.maximum(greatest, -least)
        scales = (2 * greatest / top).half().float()
        return scales, torch.full_like(scales, 2 ** (bits - 1))
    scales = ((greatest - least) / top).half().float()
    return scales, torch.round(-least / scales).clamp(0, top)


def ordered_groups(columns: int, group: int, seed: int) -> torch.Tensor:
    """Return the group of each column where columns of a group are not side by side."""
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(seed))
    g_idx = torch.empty(columns, dtype=torch.int32)
    g_idx[order] = torch.arange(columns, dtype=torch.int32) // group
    return g_idx


def on_grid(
    weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int, g_idx: torch.Tensor
) -> torch.Tensor:
    """Return the values that the codes stand for: not all packers clamp codes to those that there are."""
    columns = g_idx.long()
    codes = torch.round(weight.float() / scales[:, columns] + zeros[:, columns]).clamp(0, 2**bits - 1)
    return (codes - zeros[:, columns]) * scales[:, columns]


def linear_of(weight: torch.Tensor, with_bias: bool = False) -> torch.nn.Linear:
    """Return a layer with this weight."""
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=with_bias, dtype=weight.dtype)
    layer.weight.data = weight
    if with_bias:
        layer.bias.data = weight_of(len(weight), 1, 9)[:, 0].to(weight.dtype)
    return layer


# name: (bits, group size, columns, desc_act, sym, checkpoint_format)
GPTQ = {
    "gptq4_sym": (4, 128, 128, False, True, "gptq"),
    "gptq4_asym": (4, 32, 128, False, False, "gptq"),
    "gptq4_asym_v2": (4, 32, 128, False, False, "gptq_v2"),
    "gptq4_asym_channel": (4, -1, 128, False, False, "gptq"),
    "gptq4_order": (4, 32, 128, True, True, "gptq"),
    "gptq4_asym_order_v2": (4, 32, 128, True, False, "gptq_v2"),
    "gptq2_asym": (2, 32, 128, False, False, "gptq"),
    "gptq2_asym_v2": (2, 32, 128, False, False, "gptq_v2"),
    "gptq3_asym": (3, 32, 128, False, False, "gptq"),
    "gptq3_asym_v2": (3, 32, 128, True, False, "gptq_v2"),
    "gptq8_sym": (8, 32, 128, False, True, "gptq"),
    "gptq8_asym": (8, 32, 128, False, False, "gptq"),
    "gptq8_asym_v2": (8, 32, 128, True, False, "gptq_v2"),
    "gptq3_planar": (3, 32, 64, False, False, "gptq_p"),
    "gptq5_planar": (5, 32, 64, False, False, "gptq_p"),
    "gptq7_planar": (7, 32, 64, False, False, "gptq_p"),
}


def gptqmodel() -> None:
    """Record what gptqmodel packs, and reads back."""
    from gptqmodel import QuantizeConfig
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization.config import FORMAT
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module, convert_gptq_v2_to_v1_format_module

    cases = Cases("gptqmodel", "torch")
    for seed, (name, (bits, group, columns, is_ordered, is_symmetric, file_format)) in enumerate(GPTQ.items(), 200):
        size = columns if group == -1 else group
        weight = weight_of(32, columns, seed).half()
        g_idx = ordered_groups(columns, size, seed) if is_ordered else torch.arange(columns, dtype=torch.int32) // size
        scales, zeros = asymmetric(weight, bits, size, g_idx if is_ordered else None, is_symmetric)
        config = QuantizeConfig(bits=bits, group_size=group, desc_act=is_ordered, sym=is_symmetric, format=file_format)
        shape = {"bits": bits, "group_size": group, "sym": is_symmetric, "desc_act": is_ordered}
        shape |= {"in_features": columns, "out_features": 32, "format": FORMAT(file_format)}
        layer = TorchLinear(**shape, bias=name == "gptq4_sym")
        weight = on_grid(weight, scales, zeros, bits, g_idx)
        layer.pack(linear_of(weight, name == "gptq4_sym"), scales, zeros, g_idx)
        layer.qzero_format(format=2)
        if file_format == "gptq":
            convert_gptq_v2_to_v1_format_module(layer, config)
        stored = {key: value.clone() for key, value in layer.state_dict().items()}
        if file_format == "gptq":
            convert_gptq_v1_to_v2_format_module(layer, bits, torch.int32)
        layer.post_init()
        about = config.to_dict()
        del about["meta"]
        cases.add(name, stored, layer.dequantize_weight().T, json.loads(json.dumps(about)), zeros=zeros.int().tolist())
    cases.write("gptqmodel")


def auto_gptq() -> None:
    """Record what AutoGPTQ packs, and how its layer in PyTorch reads it."""
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear

    cases = Cases("auto-gptq", "torch")
    chosen = {key: value for key, value in GPTQ.items() if value[-1] == "gptq"}
    for seed, (name, (bits, group, columns, is_ordered, is_symmetric, _)) in enumerate(chosen.items(), 300):
        size = columns if group == -1 else group
        weight = weight_of(32, columns, seed).half()
        g_idx = ordered_groups(columns, size, seed) if is_ordered else torch.arange(columns, dtype=torch.int32) // size
        scales, zeros = asymmetric(weight, bits, size, g_idx if is_ordered else None, is_symmetric)
        zeros = zeros.clamp(min=1)  # 0 is stored as -1, which this library spreads over the rest of the word
        layer = QuantLinear(bits, group, columns, 32, name == "gptq4_sym", weight_dtype=torch.float16)
        shown = zeros.int().tolist()
        weight = on_grid(weight, scales, zeros, bits, g_idx)
        layer.pack(linear_of(weight.half(), name == "gptq4_sym"), scales, zeros, g_idx)
        stored = {key: value.clone() for key, value in layer.state_dict().items() if key != "wf"}
        layer.bias = None
        dense = layer.float()(torch.eye(columns)).T
        config = {"bits": bits, "group_size": group, "desc_act": is_ordered, "sym": is_symmetric}
        config |= {"damp_percent": 0.01, "static_groups": False, "true_sequential": True, "quant_method": "gptq"}
        cases.add(name, stored, dense, config, zeros=shown)
    cases.write("auto_gptq")


def autoawq() -> None:
    """Record what AutoAWQ packs, and how it reads it."""
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.modules.linear.gemv import WQLinear_GEMV
    from awq.utils.packing_utils import dequantize_gemm

    cases = Cases("autoawq", "torch")
    for seed, (name, (group, columns, is_symmetric)) in enumerate(
        {
            "gemm": (32, 128, False),
            "gemm_group128": (128, 256, False),
            "gemm_channel": (-1, 96, False),
            "gemm_zeros_of_8": (32, 128, True),
        }.items(),
        400,
    ):
        size = columns if group == -1 else group
        weight = weight_of(64, columns, seed).half()
        scales, zeros = asymmetric(weight, 4, size, None, is_symmetric)
        weight = on_grid(weight, scales, zeros, 4, torch.arange(columns) // size)
        layer = linear_of(weight, name == "gemm")
        packed = WQLinear_GEMM.from_linear(layer, 4, size, scales=scales.T.contiguous(), zeros=zeros.T.contiguous())
        dense = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, size).T
        config = {"bits": 4, "group_size": group, "zero_point": True, "version": "gemm", "quant_method": "awq"}
        config |= {"modules_to_not_convert": None}
        cases.add(name, packed.state_dict(), dense, config, zeros=zeros.int().tolist())
        if name in ("gemm", "gemm_group128"):  # the same values in the other layout, which no function reads on a CPU
            packed = WQLinear_GEMV.from_linear(layer, 4, size, scales=scales, zeros=zeros)
            cases.add(name.replace("gemm", "gemv"), packed.state_dict(), dense, config | {"version": "gemv"})
    cases.write("autoawq")


# AutoRound

# name: (format that is asked for, settings, settings of single layers)
MIXED = {"model.layers.1.mlp.down_proj": {"bits": 8}, "model.layers.1.self_attn.k_proj": {"bits": 16}}
SINGLE = {"model.layers.1.self_attn.k_proj": {"bits": 16}}
INTEGER = {"bits": 4, "group_size": 32}
AUTO_ROUND = {
    "auto_round_sym": ("auto_round", INTEGER | {"sym": True}, MIXED),
    "auto_round_asym": ("auto_round", INTEGER | {"sym": False}, MIXED),
    "auto_round_asym_2bit": ("auto_round", INTEGER | {"sym": False, "bits": 2}, {}),
    "auto_round_asym_3bit": ("auto_round", INTEGER | {"sym": False, "bits": 3}, {}),
    "auto_round_asym_5bit": ("auto_round", INTEGER | {"sym": False, "bits": 5}, {}),
    "auto_round_gptq_sym": ("auto_round:auto_gptq", INTEGER | {"sym": True}, MIXED),
    "auto_round_gptq_asym": ("auto_round:auto_gptq", INTEGER | {"sym": False}, MIXED),
    "auto_round_awq_sym": ("auto_round:auto_awq", INTEGER | {"sym": True}, SINGLE),
    "auto_round_awq_asym": ("auto_round:auto_awq", INTEGER | {"sym": False}, SINGLE),
    "auto_gptq_asym": ("auto_gptq", INTEGER | {"sym": False}, MIXED),
    "auto_awq_asym": ("auto_awq", INTEGER | {"sym": False}, SINGLE),
    "auto_round_mxfp4": ("auto_round", {"scheme": "MXFP4"}, {}),
    "auto_round_mxfp8": ("auto_round", {"scheme": "MXFP8"}, {}),
    "llm_compressor_mxfp4": ("llm_compressor", {"scheme": "MXFP4"}, {}),
    "llm_compressor_w4a16": ("llm_compressor", {"scheme": "W4A16", "group_size": 32}, {}),
}
KEPT = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")


class NoTokenizer:
    """What AutoRound saves beside the model; rounding to nearest reads no text."""

    def save_pretrained(self, *_: object, **__: object) -> None:
        """Save nothing."""


@torch.no_grad()
def read_packed(tensors: dict[str, torch.Tensor], packing: str, group: int) -> torch.Tensor:
    """Return [outputs, inputs] as AutoRound's own layers read integer weights in this packing."""
    from auto_round.export.export_to_awq.utils import dequantize_gemm
    from auto_round_extension.torch.qlinear_torch import QuantLinear
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear as OffsetQuantLinear

    qweight, qzeros, scales = (tensors[key] for key in ("qweight", "qzeros", "scales"))
    columns, rows = scales.shape[0] * group, scales.shape[1]
    if "awq" in packing:
        return dequantize_gemm(qweight, qzeros, scales, 4, group).T
    kind = OffsetQuantLinear if "gptq" in packing else QuantLinear
    layer = kind(qweight.shape[0] * 32 // columns, group, columns, rows, False)
    layer.load_state_dict({"qweight": qweight, "qzeros": qzeros, "scales": scales}, strict=False)
    layer.post_init()
    return layer.float()(torch.eye(columns)).T


def export_auto_round(folder: Path, file_format: str, settings: dict[str, Any], layers: dict[str, Any]) -> Path:
    """Round a Llama to nearest, and return the folder that AutoRound wrote below this one."""
    from auto_round import AutoRound

    given = {"tokenizer": NoTokenizer(), "iters": 0, "disable_opt_rtn": True, "layer_config": dict(layers)}
    AutoRound(tiny_llama(), **given, **settings).quantize_and_save(str(folder), format=file_format)
    return next(folder.rglob("config.json")).parent


def packing_of(config: dict[str, Any]) -> str:
    """Return the packing that config.json names: quant_method gptq and awq name none."""
    return config.get("packing_format", config["quant_method"])


def auto_round() -> None:
    """Record two layers of a Llama in each format that AutoRound exports."""
    import tempfile

    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    cases = Cases("auto-round", "transformers", "torch")
    for name, (file_format, settings, layers) in AUTO_ROUND.items():
        with tempfile.TemporaryDirectory() as parent:
            folder = export_auto_round(Path(parent) / "out", file_format, settings, layers)
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
            stored = {key: value for path in folder.glob("*.safetensors") for key, value in load_file(path).items()}
            for module in KEPT if layers is MIXED else KEPT[:1]:
                tensors = {key[len(module) + 1 :]: value for key, value in stored.items() if key.startswith(module)}
                if "qweight" in tensors:
                    dense = read_packed(tensors, packing_of(config), 32)
                else:  # a row of the unit matrix goes through the rounding of activations unchanged
                    model = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu")
                    with torch.no_grad():
                        model(torch.tensor(TOKENS))  # compressed-tensors decompresses the model when it first runs
                        dense = model.get_submodule(module)(torch.eye(64, dtype=torch.bfloat16)).T
                cases.add(f"{name}.{module.rpartition('.')[2]}", tensors, dense, config, module=module)
    cases.write("auto_round")


def auto_round_folders() -> None:
    """Record whole folders by AutoRound: its own format, and those of AutoGPTQ and AutoAWQ."""
    import shutil
    import tempfile

    from safetensors.torch import load_file

    for name, key in {
        "llama_auto_round": "auto_round_asym",
        "llama_gptq": "auto_gptq_asym",
        "llama_awq": "auto_awq_asym",
    }.items():
        with tempfile.TemporaryDirectory() as parent:
            source = export_auto_round(Path(parent) / "out", *AUTO_ROUND[key])
            shutil.copytree(source, HERE / name, dirs_exist_ok=True)
        config = json.loads((HERE / name / "config.json").read_text(encoding="utf-8"))["quantization_config"]
        stored = load_file(HERE / name / "model.safetensors")
        dense = {}
        for module in (key.removesuffix(".qweight") for key in stored if key.endswith(".qweight")):
            tensors = {part: stored[f"{module}.{part}"] for part in ("qweight", "qzeros", "scales")}
            dense[module] = read_packed(tensors, packing_of(config), 32)
        write_logits(HERE / name, ("auto-round",), None, dense)


# FP8


def fp8_blocks(weight: torch.Tensor, tall: int, wide: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float8_e4m3fn codes and float32 scales of blocks, those at the edges being smaller."""
    padding = (0, -weight.shape[1] % wide, 0, -weight.shape[0] % tall)
    blocks = torch.nn.functional.pad(weight, padding).unflatten(1, (-1, wide)).unflatten(0, (-1, tall))
    scales = blocks.abs().amax((1, 3)) / 448
    spread = scales.repeat_interleave(tall, 0)[: len(weight)].repeat_interleave(wide, 1)[:, : weight.shape[1]]
    return (weight / spread).to(torch.float8_e4m3fn), scales


def transformers_fp8() -> None:
    """Record folders of quant_method fp8, mxfp8 and fbgemm_fp8 as transformers dequantises them."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, _dequantize_fp8_weight

    cases, reader = Cases("transformers", "torch"), Fp8Dequantize(None)
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    codes, scales = fp8_blocks(weight_of(256, 128, 500), 128, 128)
    dense = reader._dequantize_one(codes, scales, torch.bfloat16)
    cases.add("block128", {"weight": codes, "weight_scale_inv": scales}, dense, config)
    # Fp8Dequantize divides the weight by the number of scales, which is not the size of a block where one is cut off;
    # the function of the backward pass takes the size of a block
    codes, scales = fp8_blocks(weight_of(140, 200, 501), 128, 128)
    dense = _dequantize_fp8_weight(codes, scales, [128, 128], torch.float32)
    cases.add("block128_edges", {"weight": codes, "weight_scale_inv": scales}, dense, config)
    codes, scales = fp8_blocks(weight_of(64, 96, 502), 32, 32)
    dense = reader._dequantize_one(codes, scales.bfloat16(), torch.bfloat16)
    small = config | {"weight_block_size": [32, 32]}
    cases.add("block32_bfloat16", {"weight": codes, "weight_scale_inv": scales.bfloat16()}, dense, small)
    powers = torch.exp2(torch.ceil(torch.log2(scales))).to(torch.float8_e8m0fnu)
    spread = powers.float().repeat_interleave(32, 0).repeat_interleave(32, 1)
    codes = (weight_of(64, 96, 502) / spread).to(torch.float8_e4m3fn)
    dense = reader._dequantize_one(codes, powers, torch.bfloat16)
    cases.add("block32_ue8m0", {"weight": codes, "weight_scale_inv": powers}, dense, small | {"scale_fmt": "ue8m0"})
    weight = weight_of(48, 128, 503)
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    whole = config | {"weight_block_size": None}
    stored = {"weight": codes, "weight_scale_inv": scale}
    cases.add("tensor", stored, _dequantize_fp8_weight(codes, scale, None, torch.float32), whole)
    stored = {"weight": codes, "weight_scale_inv": scale.bfloat16().reshape(1), "activation_scale": torch.tensor(0.02)}
    dense = _dequantize_fp8_weight(codes, stored["weight_scale_inv"], None, torch.float32)
    cases.add("tensor_static", stored, dense, whole | {"activation_scheme": "static"})
    codes, scales = fp8_blocks(weight_of(48, 128, 504), 1, 32)
    bytes_ = (torch.ceil(torch.log2(scales)) + 127).to(torch.uint8)
    codes = (weight_of(48, 128, 504) / torch.exp2(bytes_.float() - 127).repeat_interleave(32, 1)).to(
        torch.float8_e4m3fn
    )
    dense = reader._dequantize_one(codes, bytes_, torch.bfloat16)
    rows = {"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}
    cases.add("mxfp8", {"weight": codes, "weight_scale_inv": bytes_}, dense, rows)
    packed = torch.randint(0, 256, (48, 64), generator=torch.Generator().manual_seed(505), dtype=torch.uint8)
    dense = reader._dequantize_one(packed.view(torch.int8), bytes_.view(torch.float8_e8m0fnu), torch.bfloat16)
    stored = {"weight": packed.view(torch.int8), "weight_scale_inv": bytes_.view(torch.float8_e8m0fnu)}
    cases.add("experts_fp4", stored, dense, config | {"expert_dtype": "fp4", "scale_fmt": "ue8m0"})
    # FbgemmFp8Linear runs on no CPU: its kernel multiplies the product of codes by the scale of the row
    scales = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scales).to(torch.float8_e4m3fn)
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    cases.add("fbgemm", {"weight": codes, "weight_scale": scales}, codes.float() * scales, config)
    cases.write("transformers_fp8")


def transformers_fp8_folder() -> None:
    """Record a whole folder of quant_method fp8, quantised and read by transformers."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    class Quantizer:
        """What the two operations ask of the quantizer."""

        quantization_config = FineGrainedFP8Config(
            weight_block_size=(32, 32), modules_to_not_convert=["lm_head", "model.layers.1.self_attn.k_proj"]
        )

    folder, model = HERE / "llama_fp8", tiny_llama()
    model.config.quantization_config = Quantizer.quantization_config
    model.config.save_pretrained(folder)
    stored, dense = {}, {}
    for name, value in model.state_dict().items():
        module = name.removesuffix(".weight")
        is_kept = not module.endswith("_proj") or module in Quantizer.quantization_config.modules_to_not_convert
        stored |= {name: value} if is_kept else Fp8Quantize(Quantizer)._quantize_one(name, value)
        if not is_kept:
            scales = stored[f"{module}.weight_scale_inv"]
            dense[module] = Fp8Dequantize(Quantizer)._dequantize_one(stored[name], scales, torch.float32)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    write_logits(folder, (), AutoModelForCausalLM.from_pretrained(folder, device_map="cpu"), dense)


RECORDERS = {
    recorder.__name__: recorder
    for recorder in (
        compressed_tensors,
        compressed_tensors_012,
        bitsandbytes,
        bitsandbytes_folders,
        llmcompressor_folders,
        gptqmodel,
        auto_gptq,
        autoawq,
        auto_round,
        auto_round_folders,
        transformers_fp8,
        transformers_fp8_folder,
    )
}

if __name__ == "__main__":
    for library in sys.argv[1:]:
        RECORDERS[library]()
