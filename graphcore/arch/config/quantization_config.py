"""Reader of a quantization_config: GPTQ, AWQ, auto-round, compressed-tensors, FP8, modelopt and bitsandbytes.

Source: transformers, utils/quantization_config.py; the configs of gptqmodel, AutoAWQ, auto-round, compressed-tensors
and TensorRT Model Optimizer.
"""

import re
from collections.abc import Callable, Mapping

from graphcore.arch.config.typed_fields import Fields
from graphcore.checkpoint.quantized.scheme import LayoutName, QuantizedScheme, Width
from graphcore.errors import UnsupportedError, quoted

GPTQ_LAYOUTS: Mapping[str, LayoutName] = {"gptq": "gptq", "gptq_v2": "gptq_v2"}
COMPRESSED_LAYOUTS: Mapping[str, tuple[LayoutName, ...]] = {
    "pack-quantized": ("pack-quantized",),
    "int-quantized": ("int-quantized",),
    "naive-quantized": ("int-quantized", "fp8"),
    "float-quantized": ("fp8",),
    "nvfp4-pack-quantized": ("nvfp4",),
    "mxfp4-pack-quantized": ("mxfp4",),
    "mxfp8-quantized": ("fp8",),
}
AUTO_ROUND_LAYOUTS: Mapping[str, LayoutName] = {  # the first stores zero points as they are, as version 2 does
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq",
    "auto_round:auto_gptq": "gptq",
    "auto_round:auto_awq": "awq",
}
MODELOPT_LAYOUTS: Mapping[str, tuple[LayoutName, ...]] = {
    "FP8": ("fp8",),
    "NVFP4": ("modelopt-nvfp4",),
    "MIXED_PRECISION": ("fp8", "modelopt-nvfp4"),
}
WHOLE_ROWS = (None, -1, 0)  # group sizes that stand for a whole row
EXCEPTIONS = ("dynamic", "extra_config")  # settings of single modules, gptqmodel's and auto-round's
ALL_COMPRESSED: tuple[LayoutName, ...] = ("pack-quantized", "int-quantized", "fp8", "nvfp4", "mxfp4")
MIXED = "mixed-precision"  # compressed-tensors' format of a file whose groups have formats of their own
ROUNDED_ACTIVATIONS = {  # settings of configs whose programs round activations
    "compressed-tensors": "input_activations",
    "fp8": "activation_scheme",
    "fbgemm_fp8": "activation_scale_ub",
    "modelopt": "quant_algo for activations",
    "bitsandbytes": "llm_int8_threshold",
}
DEFAULT_BLOCK = (128, 128)  # rows and columns of an FP8 block if transformers' config states none
ADVICE = "use another checkpoint of the model, or a GGUF of it"


def read_quantized_scheme(fields: Fields) -> QuantizedScheme | None:
    """Parse quantization_config: packing layouts, bit widths, group sizes, symmetry; None for another quant_method.

    Args:
        fields: settings of config.json.

    Raises:
        UnsupportedError: a setting of the quantization_config is not supported; the message names it.
        CheckpointError: a setting has the wrong type.
    """
    stated = fields.section("quantization_config")
    reader = READERS.get(stated.text("quant_method") or "")
    return None if reader is None else reader(stated)


def notes_on_activations(fields: Fields) -> tuple[str, ...]:
    """Return notes on what of a quantization_config is left out: how activations and caches are rounded."""
    stated = fields.section("quantization_config")
    method, found = stated.text("quant_method"), []
    left_out = {
        "compressed-tensors": any(group.raw.get("input_activations") is not None for group in _groups(stated)),
        "fp8": stated.raw.get("activation_scheme") is not None,
        "fbgemm_fp8": stated.raw.get("activation_scale_ub") is not None,
        "modelopt": True,
        "bitsandbytes": stated.flag("load_in_8bit", "_load_in_8bit") is True,
    }
    if left_out.get(method or ""):
        name = ROUNDED_ACTIVATIONS[method or ""]
        found.append(f"{stated.source}: {name} is left out: activations keep the precision that is set here")
    for name in ("kv_cache_scheme", "kv_cache_quant_algo"):
        if stated.raw.get(name) is not None:
            found.append(f"{stated.source}: {name} is left out: kv_dtype says how keys and values are kept")
    return tuple(found)


def _gptq(stated: Fields) -> QuantizedScheme:
    layout = stated.text("checkpoint_format", "format") or "gptq"
    if layout not in GPTQ_LAYOUTS:
        raise _unsupported(stated, "checkpoint_format", layout)
    packed = stated.text("pack_dtype") or "int32"
    if packed.removeprefix("torch.") != "int32":
        raise _unsupported(stated, "pack_dtype", packed)
    dynamic = stated.section("dynamic")
    has_orders = any(one.flag("desc_act") for one in (stated, *(dynamic.section(name) for name in dynamic.raw)))
    return QuantizedScheme((GPTQ_LAYOUTS[layout],), _widths(stated), _is_symmetric(stated), has_orders=has_orders)


def _awq(stated: Fields) -> QuantizedScheme:
    version = (stated.text("version", "format") or "gemm").lower()
    if version != "gemm":
        raise _unsupported(stated, "version", version)
    bits = stated.size("bits", "w_bit")
    if bits not in (None, 4):
        raise _unsupported(stated, "bits", bits)
    return QuantizedScheme(("awq",), _widths(stated), stated.flag("zero_point") is False)


def _auto_round(stated: Fields) -> QuantizedScheme:
    packing = stated.text("packing_format", "checkpoint_format") or "auto_round:auto_gptq"
    kind = stated.text("data_type") or "int"
    if packing == "auto_round:llm_compressor" and kind == "mx_fp":
        return QuantizedScheme(("mxfp4", "fp8"))
    if kind != "int":
        raise _unsupported(stated, "data_type", kind)
    if packing not in AUTO_ROUND_LAYOUTS:
        raise _unsupported(stated, "packing_format", packing)
    return QuantizedScheme((AUTO_ROUND_LAYOUTS[packing],), _widths(stated), _is_symmetric(stated))


def _is_symmetric(stated: Fields) -> bool | None:
    """Return whether all weights are symmetric; None if some have settings of their own."""
    if any(stated.raw.get(name) for name in EXCEPTIONS):
        return None
    return stated.flag("sym") is not False


def _widths(stated: Fields) -> tuple[Width, ...]:
    """Return the one width of all weights; none if it is not stated, or some weights have another."""
    bits = stated.size("bits", "w_bit")
    if bits is None or any(stated.raw.get(name) for name in EXCEPTIONS):
        return ()
    size = stated.raw.get("group_size", stated.raw.get("q_group_size"))
    return (Width(bits, 0 if size in WHOLE_ROWS else stated.size("group_size", "q_group_size") or 0),)


def _compressed(stated: Fields) -> QuantizedScheme:
    groups = _groups(stated)
    if not groups:
        raise UnsupportedError(f"{stated.source}: config_groups has no weights, so none are described; {ADVICE}")
    formats = {group.text("format") or stated.text("format") or "none" for group in groups}
    status = stated.text("quantization_status") or "compressed"
    if status not in ("compressed", "frozen"):  # older programs wrote the second one for compressed weights, too
        raise _unsupported(stated, "quantization_status", status)
    for name in ("sparsity_config", "transform_config"):
        inner = stated.section(name)
        if inner.raw and inner.text("format") != "dense":
            raise UnsupportedError(f"{inner.source} is not supported; {ADVICE}")
    unknown = sorted(formats - COMPRESSED_LAYOUTS.keys() - {MIXED})
    if unknown:
        raise _unsupported(stated, "format", ", ".join(unknown))
    layouts = ALL_COMPRESSED if MIXED in formats else tuple(one for name in formats for one in COMPRESSED_LAYOUTS[name])
    weights = [group.section("weights") for group in groups]
    flags = {one.flag("symmetric") is not False for one in weights if (one.text("type") or "int") == "int"}
    is_symmetric = None if len(flags) > 1 else flags != {False}
    widths = [_width(one) for one in weights]
    blocks = {block for one in weights if (block := _fp8_block(one)) is not None}
    if len(blocks) > 1:
        raise _unsupported(weights[0], "block_structure", sorted(blocks))
    integers = [one for one in widths if one is not None]
    known = tuple(dict.fromkeys(integers)) if len(integers) == len(widths) else ()
    return QuantizedScheme(tuple(sorted(set(layouts))), known, is_symmetric, next(iter(blocks), None))


def _width(weights: Fields) -> Width | None:
    """Return the width of integer weights; None for floats, whose layouts have a width of their own."""
    kind, strategy = weights.text("type") or "int", weights.text("strategy")
    if kind not in ("int", "float"):
        raise _unsupported(weights, "type", kind)
    if strategy is None:
        strategy = "channel" if weights.raw.get("group_size") in WHOLE_ROWS else "group"
    known = ("tensor", "channel", "group") if kind == "int" else ("tensor", "channel", "block", "group", "tensor_group")
    if strategy not in known:
        raise _unsupported(weights, "strategy", strategy)
    if kind == "float":
        return None
    is_whole = strategy != "group" or weights.raw.get("group_size") in WHOLE_ROWS
    return Width(weights.size("num_bits") or 8, 0 if is_whole else weights.size("group_size") or 0)


def _groups(stated: Fields) -> list[Fields]:
    """Return compressed-tensors' groups that have weights."""
    groups = stated.section("config_groups")
    found = [groups.section(name) for name in groups.raw]
    return [group for group in found if group.section("weights").raw]


def _fp8(stated: Fields) -> QuantizedScheme:
    kind = stated.text("fmt") or "e4m3"
    if kind != "e4m3":
        raise _unsupported(stated, "fmt", kind)
    experts = stated.text("expert_dtype") or "fp8"
    if experts != "fp8":
        raise _unsupported(stated, "expert_dtype", experts)
    is_default = "weight_block_size" not in stated.raw and stated.text("quant_method") != "fbgemm_fp8"
    block = DEFAULT_BLOCK if is_default else _block(stated, "weight_block_size")
    return QuantizedScheme(("fp8",), block=block)


def _fp8_block(weights: Fields) -> tuple[int, int] | None:
    """Return the blocks of eight-bit floats: those that are stated, or groups of columns."""
    is_grouped = weights.text("strategy") == "group" and weights.raw.get("group_size") not in WHOLE_ROWS
    if is_grouped and weights.text("type") == "float" and weights.size("num_bits") == 8:
        return 1, weights.size("group_size") or 1
    return _block(weights, "block_structure")


def _block(stated: Fields, name: str) -> tuple[int, int] | None:
    """Return rows and columns of a block of weights, a list or "128x128"; None if it is not stated."""
    value = stated.raw.get(name)
    if value is None:
        return None
    sizes: list[object] = list(value.split("x") if isinstance(value, str) else value if isinstance(value, list) else ())
    numbers = [int(str(size)) for size in sizes if re.fullmatch(r"[0-9]{1,9}", str(size))]
    if len(numbers) != 2 or len(sizes) != 2 or min(numbers) < 1:
        raise stated.wrong(name, value, "two sizes, such as [128, 128]")
    return numbers[0], numbers[1]


def _modelopt(stated: Fields) -> QuantizedScheme:
    algorithm = (stated.text("quant_algo") or "none").upper()
    if algorithm not in MODELOPT_LAYOUTS:
        raise _unsupported(stated, "quant_algo", algorithm)
    return QuantizedScheme(MODELOPT_LAYOUTS[algorithm])


def _bitsandbytes(stated: Fields) -> QuantizedScheme | None:
    if stated.flag("load_in_8bit", "_load_in_8bit"):
        return QuantizedScheme(("bnb-8bit",))
    return QuantizedScheme(("bnb-4bit",)) if stated.flag("load_in_4bit", "_load_in_4bit") else None


READERS: Mapping[str, Callable[[Fields], QuantizedScheme | None]] = {
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp8": _fp8,
    "modelopt": _modelopt,
    "bitsandbytes": _bitsandbytes,
}
QUANTIZED_METHODS = tuple(READERS)


def _unsupported(stated: Fields, name: str, value: object) -> UnsupportedError:
    return UnsupportedError(f"{stated.source}: {name} is {quoted(value)}, which is not supported; {ADVICE}")
