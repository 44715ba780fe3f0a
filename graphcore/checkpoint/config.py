"""The config.json reader: one frozen `ModelConfig` whatever names, nesting and transformers version wrote the file.

    config.json, generation_config.json -> Fields (typed reads) -> ModelConfig -> (arch) ModelSpec

Knows files and JSON; knows no tensor and no mathematics beyond which settings are computed at all. A setting that
changes the mathematics and is not understood is refused by name; any other unknown one is ignored.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from graphcore.checkpoint.config_defaults import ClassDefaults
from graphcore.checkpoint.config_fields import Fields
from graphcore.checkpoint.config_layers import MOST_LAYERS, read_layer_types, read_pattern, read_window
from graphcore.checkpoint.config_refusals import known_activation, refuse_unknown_mathematics
from graphcore.checkpoint.config_sections import language_model_fields
from graphcore.checkpoint.config_ternary import read_ternary_scaling
from graphcore.checkpoint.json_object import parse_json_object
from graphcore.checkpoint.model_config import ModelConfig
from graphcore.checkpoint.rope_parameters import read_rope
from graphcore.errors import CheckpointError, CheckpointNotFoundError

__all__ = ["ModelConfig", "load_model_config", "parse_model_config"]


def load_model_config(path: str | Path) -> ModelConfig:
    """Return the typed configuration of a model folder, or of a config.json itself.

    A generation_config.json beside it adds its bos and eos token ids.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CheckpointError: a file is not a JSON object, or a setting is missing or wrong.
        UnsupportedError: the model type, or a setting that changes the mathematics, is not supported.
    """
    file = Path(path).expanduser()
    file = file / "config.json" if file.is_dir() else file
    generation_file = file.with_name("generation_config.json")
    generation = _read_json(generation_file) if generation_file.is_file() else None
    return parse_model_config(_read_json(file), str(file), generation)


def _read_json(file: Path) -> dict[str, object]:
    try:
        return parse_json_object(file.read_bytes(), str(file))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointNotFoundError(
            f"{file}: no such file; give a model folder that holds config.json, or a .gguf file"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror}); check its permissions") from error


def parse_model_config(
    raw: Mapping[str, object], source: str, generation: Mapping[str, object] | None = None
) -> ModelConfig:
    """Return the typed configuration of a parsed config.json.

    Args:
        raw: the object; not changed.
        source: the file, for messages.
        generation: the parsed generation_config.json, if there is one.

    Raises:
        CheckpointError: a setting is missing, of the wrong type, out of range, or contradicts another.
        UnsupportedError: the model type, or a setting that changes the mathematics, is not supported.
    """
    fields, defaults = language_model_fields(Fields(raw, source))
    refuse_unknown_mathematics(fields, defaults)
    config = _sizes(fields, defaults)
    config = _with_numbers(config, fields, defaults)
    config = _with_rope(config, fields, defaults)
    config = _with_layer_types(config, fields, defaults)
    config = _with_biases(config, fields, defaults)
    config = _with_experts(config, fields, defaults)
    config = _with_ternary_weights(config, fields)
    settings = Fields(generation or {}, f"generation_config.json beside {source}")
    return _with_token_ids(config, fields, settings, defaults).check(source)


def _sizes(fields: Fields, defaults: ClassDefaults) -> ModelConfig:
    def size(name: str) -> int | None:
        return fields.size(*defaults.names_of(name))

    heads = size("num_attention_heads") or defaults.num_attention_heads
    hidden_size = size("hidden_size") or defaults.hidden_size
    # An explicit null asks for as many as query heads, whatever the class default is.
    kv_default = None if fields.is_null("num_key_value_heads") else defaults.num_key_value_heads
    return ModelConfig(
        model_type=defaults.model_type,
        hidden_size=hidden_size,
        intermediate_size=size("intermediate_size") or defaults.intermediate_size or 4 * hidden_size,
        num_hidden_layers=_num_layers(fields, defaults),
        num_attention_heads=heads,
        num_key_value_heads=(size("num_key_value_heads") if defaults.has_rope else None) or kv_default or heads,
        vocab_size=size("vocab_size") or defaults.vocab_size,
        max_position_embeddings=size("max_position_embeddings") or defaults.max_position_embeddings,
        head_dim=(size("head_dim") if defaults.has_rope else None) or defaults.head_dim,
    )


def _num_layers(fields: Fields, defaults: ClassDefaults) -> int:
    names = defaults.names_of("num_hidden_layers")
    num_layers = fields.size(*names) or defaults.num_hidden_layers
    if num_layers > MOST_LAYERS:
        raise fields.wrong(names[0], num_layers, f"at most {MOST_LAYERS}")
    return num_layers


def _with_numbers(config: ModelConfig, fields: Fields, defaults: ClassDefaults) -> ModelConfig:
    activation = fields.text(*defaults.names_of("hidden_act")) or defaults.hidden_act
    query_scalar = fields.positive("query_pre_attn_scalar") or defaults.query_pre_attn_scalar
    tie = fields.flag("tie_word_embeddings")
    dtype = fields.text("dtype", "torch_dtype")
    return replace(
        config,
        rms_norm_eps=fields.positive("rms_norm_eps") or defaults.norm_eps,
        layer_norm_eps=None if defaults.has_rope else fields.positive("layer_norm_epsilon") or defaults.norm_eps,
        hidden_act=known_activation(activation, fields.source),
        query_pre_attn_scalar=query_scalar if defaults.query_pre_attn_scalar else None,
        tie_word_embeddings=defaults.tie_word_embeddings if tie is None else tie,
        dtype=dtype.removeprefix("torch.") if dtype else None,
    )


def _with_rope(config: ModelConfig, fields: Fields, defaults: ClassDefaults) -> ModelConfig:
    if not defaults.has_rope:
        return config
    rope = read_rope(fields, defaults)
    return replace(config, rope_theta=rope.theta, rope_scaling=rope.scaling, rope_local_base_freq=rope.local_theta)


def _with_layer_types(config: ModelConfig, fields: Fields, defaults: ClassDefaults) -> ModelConfig:
    return replace(
        config,
        sliding_window=read_window(fields, defaults),
        sliding_window_pattern=read_pattern(fields, defaults),
        layer_types=read_layer_types(fields, defaults, config.num_hidden_layers),
    )


def _with_biases(config: ModelConfig, fields: Fields, defaults: ClassDefaults) -> ModelConfig:
    """Take the flags only where the model type's class reads them; the others' biases are fixed by the class."""
    everywhere = defaults.bias_rule == "everywhere"
    stated = fields.flag("attention_bias")
    attends_biased = defaults.attention_bias if stated is None else stated
    attention_flag = attends_biased and defaults.bias_rule in ("flags", "attention_flag")
    mlp_flag = bool(fields.flag("mlp_bias")) and defaults.bias_rule == "flags"
    return replace(
        config,
        attention_bias=everywhere or attention_flag,
        qkv_bias=everywhere or attention_flag or defaults.bias_rule == "qkv",
        mlp_bias=everywhere or mlp_flag,
    )


def _with_experts(config: ModelConfig, fields: Fields, defaults: ClassDefaults) -> ModelConfig:
    if defaults.num_local_experts is None:
        return config
    return replace(
        config,
        num_local_experts=fields.size("num_local_experts", "num_experts") or defaults.num_local_experts,
        num_experts_per_tok=fields.size("num_experts_per_tok") or defaults.num_experts_per_tok,
        swiglu_limit=fields.positive("swiglu_limit") or defaults.swiglu_limit,
        swiglu_alpha=fields.positive("swiglu_alpha") or defaults.swiglu_alpha,
    )


def _with_ternary_weights(config: ModelConfig, fields: Fields) -> ModelConfig:
    return replace(config, ternary=read_ternary_scaling(fields, config.model_type))


def _with_token_ids(config: ModelConfig, fields: Fields, generation: Fields, defaults: ClassDefaults) -> ModelConfig:
    """Unite what both files say; the class defaults count only where neither says anything, null included."""
    ids: dict[str, tuple[int, ...]] = {}
    for name in ("bos_token_id", "eos_token_id"):
        stated = generation.token_ids(name) + fields.token_ids(name)
        is_silent = not generation.has(name) and not fields.has(name)
        ids[name] = defaults.token_ids(name) if is_silent else tuple(dict.fromkeys(stated))
    bos = ids["bos_token_id"]
    return replace(config, bos_token_id=bos[0] if bos else None, eos_token_ids=ids["eos_token_id"])
