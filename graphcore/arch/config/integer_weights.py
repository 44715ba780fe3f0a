"""Reader of a quantization_config of integer weights: GPTQ's, and compressed-tensors'.

Source: transformers, utils/quantization_config.py (`GPTQConfig`, `CompressedTensorsConfig`); the configs of
gptqmodel and compressed-tensors.
"""

from collections.abc import Mapping

from graphcore.arch.config.typed_fields import Fields
from graphcore.checkpoint.integer_checkpoint import IntegerLayout, IntegerScheme, Width
from graphcore.errors import UnsupportedError, quoted

GPTQ_METHOD, COMPRESSED_METHOD = "gptq", "compressed-tensors"
INTEGER_METHODS = (GPTQ_METHOD, COMPRESSED_METHOD)
GPTQ_LAYOUTS: Mapping[str, IntegerLayout] = {"gptq": "gptq", "gptq_v2": "gptq_v2"}
COMPRESSED_LAYOUTS: Mapping[str, IntegerLayout] = {
    "pack-quantized": "pack-quantized",
    "int-quantized": "int-quantized",
    "naive-quantized": "int-quantized",
}
ADVICE = "use another checkpoint of the model, or a GGUF of it"


def read_integer_scheme(fields: Fields) -> IntegerScheme | None:
    """Return the layout, bit widths, group sizes and act-order of integer weights; None for another quant_method.

    Args:
        fields: settings of config.json.

    Raises:
        UnsupportedError: a setting of the quantization_config is not supported; the message names it.
        CheckpointError: a setting has the wrong type.
    """
    stated = fields.section("quantization_config")
    method = stated.text("quant_method")
    if method == GPTQ_METHOD:
        return _gptq(stated)
    return _compressed(stated) if method == COMPRESSED_METHOD else None


def notes_on_integers(fields: Fields) -> tuple[str, ...]:
    """Return notes on what of a quantization_config is left out: how activations and caches are rounded."""
    stated = fields.section("quantization_config")
    if stated.text("quant_method") != COMPRESSED_METHOD:
        return ()
    found = []
    if any(group.raw.get("input_activations") is not None for group in _groups(stated)):
        found.append(f"{stated.source}: input_activations is left out: activations keep the precision that is set here")
    if stated.raw.get("kv_cache_scheme") is not None:
        found.append(f"{stated.source}: kv_cache_scheme is left out: kv_dtype says how keys and values are kept")
    return tuple(found)


def _gptq(stated: Fields) -> IntegerScheme:
    if stated.flag("sym") is False:
        raise _unsupported(stated, "sym", False)
    layout = stated.text("checkpoint_format", "format") or "gptq"
    if layout not in GPTQ_LAYOUTS:
        raise _unsupported(stated, "checkpoint_format", layout)
    packed = stated.text("pack_dtype") or "int32"
    if packed.removeprefix("torch.") != "int32":
        raise _unsupported(stated, "pack_dtype", packed)
    bits, group = stated.size("bits"), stated.raw.get("group_size")
    dynamic = stated.section("dynamic")  # gptqmodel's exceptions by module
    exceptions = [dynamic.section(name) for name in dynamic.raw]
    has_orders = any(one.flag("desc_act") for one in (stated, *exceptions))
    if bits is None or exceptions:
        return IntegerScheme(GPTQ_LAYOUTS[layout], has_orders=has_orders)
    size = 0 if group in (None, -1) else stated.size("group_size") or 0
    return IntegerScheme(GPTQ_LAYOUTS[layout], (Width(bits, size),), has_orders)


def _compressed(stated: Fields) -> IntegerScheme:
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
    layouts = {COMPRESSED_LAYOUTS[name] for name in formats if name in COMPRESSED_LAYOUTS}
    if not layouts or len(formats) != 1:
        raise _unsupported(stated, "format", ", ".join(sorted(formats)))
    return IntegerScheme(layouts.pop(), tuple(dict.fromkeys(_width(group.section("weights")) for group in groups)))


def _width(weights: Fields) -> Width:
    if (weights.text("type") or "int") != "int":
        raise _unsupported(weights, "type", weights.text("type"))
    if weights.flag("symmetric") is False:
        raise _unsupported(weights, "symmetric", False)
    strategy = weights.text("strategy") or ("channel" if weights.raw.get("group_size") in (None, -1) else "group")
    if strategy not in ("tensor", "channel", "group"):
        raise _unsupported(weights, "strategy", strategy)
    size = weights.size("group_size") or 0 if strategy == "group" else 0
    return Width(weights.size("num_bits") or 8, size)


def _groups(stated: Fields) -> list[Fields]:
    """Return the groups that have weights."""
    groups = stated.section("config_groups")
    found = [groups.section(name) for name in groups.raw]
    return [group for group in found if group.section("weights").raw]


def _unsupported(stated: Fields, name: str, value: object) -> UnsupportedError:
    return UnsupportedError(f"{stated.source}: {name} is {quoted(value)}, which is not supported; {ADVICE}")
