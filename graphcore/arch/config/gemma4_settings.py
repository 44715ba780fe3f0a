"""The settings that only Gemma 4 has, from config.json and from GGUF metadata: what differs by layer, and features.

    config.json   global_head_dim, num_global_key_value_heads, or per_layer_config (transformers since 5.23); ...
    GGUF          key_length and key_length_swa; head_count_kv, feed_forward_length and sliding_window_pattern by layer

Source: transformers 5.23, configuration_gemma4.py; gguf-py, constants.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from graphcore.arch.config.class_defaults import ClassDefaults
from graphcore.arch.config.gguf_keys import WINDOW, GGUFKeys
from graphcore.arch.config.layer_types import layer_types_of_pattern
from graphcore.arch.config.model_config import ExpertsConfig, ModelConfig
from graphcore.arch.config.typed_fields import LARGEST_SIZE, Fields
from graphcore.errors import CheckpointError, UnsupportedError, quoted

FULL = "full_attention"
PATTERN = 6  # every sixth layer is full where layer_types is absent, and the last one always
LAYER_FIELDS = ("head_dim", "num_key_value_heads")  # what per_layer_config may change
PER_LAYER_WIDTH = 256
FULL_HEAD_DIM = 512


@dataclass(frozen=True)
class Gemma4Settings:
    """The settings that only Gemma 4 has.

    Attributes:
        full_head_dim, full_kv_heads: width of a head, and number of kv heads, in full-attention layers.
        values_are_keys: True if full-attention layers have no value projection.
        first_shared: index of the first layer that attends another's keys and values; the number of layers for none.
        shared_width: hidden width of the MLP in such layers.
        per_layer: number of a token's features for each layer; 0 for none.
        per_layer_layers: number of layers that have features in the checkpoint.
        per_layer_vocab: number of rows of the features' table.
        logit_cap: bound of the logits; 0 for none.
    """

    full_head_dim: int
    full_kv_heads: int
    values_are_keys: bool
    first_shared: int
    shared_width: int
    per_layer: int
    per_layer_layers: int
    per_layer_vocab: int
    logit_cap: float

    def cut(self, num_layers: int) -> "Gemma4Settings":
        """Return the settings of the model's first layers."""
        return replace(self, first_shared=min(self.first_shared, num_layers))


def read_settings(config: ModelConfig, fields: Fields, defaults: ClassDefaults, has_features: bool) -> ModelConfig:
    """Return the config with heads of full layers, shared layers, features, experts and the logits' bound.

    Args:
        fields: settings of the language model in config.json.
        has_features: True if layers of the model type may have features.

    Raises:
        CheckpointError: a setting is missing or wrong.
        UnsupportedError: a setting is not supported.
    """
    types, num_layers = _forced(types_of(config)), config.num_hidden_layers
    shared = _count(fields, "num_kv_shared_layers", num_layers)
    width = config.intermediate_size * (2 if fields.flag("use_double_wide_mlp") else 1)
    head_dim, kv_heads = _full_heads(fields, config, types)
    own = Gemma4Settings(
        full_head_dim=head_dim,
        full_kv_heads=kv_heads,
        values_are_keys=bool(fields.flag("attention_k_eq_v")),
        first_shared=num_layers - shared,
        shared_width=width,
        per_layer=_per_layer_width(fields) if has_features else 0,
        per_layer_layers=num_layers,
        per_layer_vocab=fields.size("vocab_size_per_layer_input") or defaults.vocab_size,
        logit_cap=fields.positive("final_logit_softcapping") or 0.0,
    )
    attention = replace(config.attention, layer_types=types)
    return _checked(replace(config, attention=attention, own=own, experts=_experts(fields)), fields.source)


def read_gguf_settings(config: ModelConfig, keys: GGUFKeys, shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """Return the config with what differs by layer, which llama.cpp stores as arrays or under keys of its own.

    Args:
        shapes: shape of each tensor by name, in torch order.

    Raises:
        CheckpointError: a key is wrong.
        UnsupportedError: layers that should be alike differ.
    """
    keys.check_required((WINDOW,))
    num_layers = config.num_hidden_layers
    types = _gguf_layer_types(keys, num_layers)
    shared = _count(keys.fields, keys.name("attention.shared_kv_layers"), num_layers)
    widths = keys.sizes("feed_forward_length", num_layers)
    kv_heads = keys.sizes("attention.head_count_kv", num_layers)
    sliding = next((layer for layer, kind in enumerate(types) if kind != FULL), types.index(FULL))
    full = types.index(FULL)
    full_head_dim = keys.size("attention.key_length") or config.attention.head_dim
    own = Gemma4Settings(
        full_head_dim=full_head_dim,
        full_kv_heads=kv_heads[full],
        values_are_keys=f"blk.{full}.attn_v.weight" not in shapes,
        first_shared=num_layers - shared,
        shared_width=widths[-1],
        per_layer=_count(keys.fields, keys.name("embedding_length_per_layer_input"), LARGEST_SIZE),
        per_layer_layers=num_layers,
        per_layer_vocab=shapes.get("per_layer_token_embd.weight", (config.vocab_size,))[0],
        logit_cap=keys.fields.number(keys.name("final_logit_softcapping")) or 0.0,
    )
    attention = replace(
        config.attention,
        head_dim=keys.size("attention.key_length_swa") or full_head_dim,
        num_key_value_heads=kv_heads[sliding],
        layer_types=types,
    )
    config = replace(config, intermediate_size=widths[0], attention=attention, own=own, experts=_gguf_experts(keys))
    _check_by_layer(keys, config, kv_heads, widths)
    return _checked(config, keys.fields.source)


def _forced(types: Sequence[str]) -> tuple[str, ...]:
    """Return the layer types with full attention in the last layer, whatever the file says."""
    return (*types[:-1], FULL)


def _per_layer_width(fields: Fields) -> int:
    """Return the number of features for each layer; 0 where the file says 0 or null."""
    return _count(fields, "hidden_size_per_layer_input", LARGEST_SIZE, PER_LAYER_WIDTH)


def _count(fields: Fields, name: str, most: int, default: int = 0) -> int:
    """Return an integer from 0 to `most`; 0 for null, and the default where the setting is absent."""
    value = fields.raw.get(name, default) or 0
    if type(value) is not int or not 0 <= value <= most:
        raise fields.wrong(name, value, f"an integer from 0 to {most}")
    return value


def _full_heads(fields: Fields, config: ModelConfig, types: Sequence[str]) -> tuple[int, int]:
    """Return the width of full layers' heads and the number of their kv heads, from either form that files have.

    Files of transformers since 5.23 list the layers that differ, under per_layer_config; others give two numbers.
    """
    usual = config.attention.num_key_value_heads
    if fields.raw.get("per_layer_config") is None:
        kv_heads = fields.size("num_global_key_value_heads") if fields.flag("attention_k_eq_v") else None
        return fields.size("global_head_dim") or FULL_HEAD_DIM, kv_heads or usual
    by_layer = fields.section("per_layer_config")
    if not all(key.isdecimal() for key in by_layer.raw):
        raise fields.wrong("per_layer_config", dict(by_layer.raw), "an object with indices of layers as names")
    names = {int(key): key for key in by_layer.raw}  # transformers writes all with as many digits as the last
    found = set()
    for layer, kind in enumerate(types):
        one = by_layer.section(names.get(layer, ""))
        unknown = sorted(set(one.raw) - set(LAYER_FIELDS))
        if unknown:
            raise UnsupportedError(
                f"{one.source}: {quoted(unknown[0])} differs by layer, which is not supported; known: "
                f"{', '.join(LAYER_FIELDS)}"
            )
        heads = one.size("head_dim") or config.attention.head_dim, one.size("num_key_value_heads") or usual
        if kind == FULL:
            found.add(heads)
        elif heads != (config.attention.head_dim, usual):
            raise UnsupportedError(f"{one.source}: sliding layer {layer} has heads of its own, which is not supported")
    if len(found) > 1:
        raise UnsupportedError(f"{by_layer.source}: full-attention layers have different heads, which is not supported")
    return found.pop()


def _experts(fields: Fields) -> ExpertsConfig | None:
    if not fields.flag("enable_moe_block"):
        return None
    names = ("num_experts", "top_k_experts", "moe_intermediate_size")
    sizes = [fields.size(name) for name in names]
    if None in sizes:
        raise CheckpointError(f"{fields.source}: enable_moe_block needs {', '.join(names)}; add what is missing")
    count, used, width = (size for size in sizes if size is not None)
    return ExpertsConfig(count, used, moe_intermediate_size=width).check(fields.source)


def _gguf_experts(keys: GGUFKeys) -> ExpertsConfig | None:
    count = keys.fields.raw.get(keys.name("expert_count"))
    if count in (None, 0):
        return None
    keys.check_required(("expert_used_count", "expert_feed_forward_length"))
    used, width = keys.required_size("expert_used_count"), keys.required_size("expert_feed_forward_length")
    return ExpertsConfig(keys.required_size("expert_count"), used, moe_intermediate_size=width).check(
        keys.fields.source
    )


def _gguf_layer_types(keys: GGUFKeys, num_layers: int) -> tuple[str, ...]:
    """Return the layers' types: an array of booleans, true where a layer slides, or the distance of full ones."""
    name = keys.name("attention.sliding_window_pattern")
    value = keys.fields.raw.get(name)
    if value is None or type(value) is int:
        types = layer_types_of_pattern(num_layers, keys.fields.size(name) or PATTERN)
        return _forced(types)
    if not isinstance(value, Sequence) or len(value) != num_layers:
        raise keys.fields.wrong(name, value, f"a list of {num_layers} booleans")
    types = tuple("sliding_attention" if slides else FULL for slides in value)
    if types[-1] != FULL:
        raise UnsupportedError(f"{keys.fields.source}: {name} lets the last layer slide, which is not supported")
    return types


def _check_by_layer(keys: GGUFKeys, config: ModelConfig, kv_heads: Sequence[int], widths: Sequence[int]) -> None:
    """Refuse arrays whose values differ among layers that are alike."""
    own, types = _own(config), types_of(config)
    usual = config.attention.num_key_value_heads
    for layer, kind in enumerate(types):
        wanted = (
            own.full_kv_heads if kind == FULL else usual,
            own.shared_width if layer >= own.first_shared else config.intermediate_size,
        )
        if (kv_heads[layer], widths[layer]) != wanted:
            raise UnsupportedError(
                f"{keys.fields.source}: layer {layer} has {kv_heads[layer]} kv heads and an MLP of {widths[layer]}, "
                f"others like it {wanted[0]} and {wanted[1]}; such layers are not supported"
            )


def _checked(config: ModelConfig, source: str) -> ModelConfig:
    """Return the config after a check that heads divide, and that layers that share have one to share with.

    Raises:
        CheckpointError: a number of heads is no multiple of kv heads, heads cannot be rotated, or no earlier layer of
            a sharing layer's type has keys and values.
    """
    own, types, heads = _own(config), types_of(config), config.attention.num_attention_heads
    if heads % own.full_kv_heads or own.full_head_dim % 2:
        raise CheckpointError(
            f"{source}: {heads} heads of {own.full_head_dim} and {own.full_kv_heads} kv heads in full-attention layers "
            "do not fit; correct them"
        )
    lacking = sorted(set(types[own.first_shared :]) - set(types[: own.first_shared]))
    if lacking:
        raise CheckpointError(
            f"{source}: layers from {own.first_shared} on share keys and values, but no earlier layer has "
            f"{lacking[0]}; correct num_kv_shared_layers or layer_types"
        )
    return config


def types_of(config: ModelConfig) -> tuple[str, ...]:
    """Return the attention type of each layer."""
    assert config.attention.layer_types is not None, "Gemma 4 has both types of layers"
    return config.attention.layer_types


def _own(config: ModelConfig) -> Gemma4Settings:
    assert isinstance(config.own, Gemma4Settings), "the settings were read"
    return config.own
