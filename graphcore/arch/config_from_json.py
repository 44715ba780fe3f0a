"""The reader of config.json: one `ModelConfig` for all names, nestings and versions of transformers.

    config.json, generation_config.json -> Fields (typed reads), the model type's ClassDefaults -> ModelConfig

Unsupported settings that change the mathematics are refused by name; other unknown settings are ignored. This module
reads no tensors.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from graphcore.arch.config.class_defaults import ClassDefaults
from graphcore.arch.config.layer_types import MOST_LAYERS, read_layer_types, read_pattern, read_window
from graphcore.arch.config.model_config import AttentionConfig, DeltaConfig, ExpertsConfig, ModelConfig, read_head_dim
from graphcore.arch.config.quantization_config import (
    QUANTIZED_METHODS,
    notes_on_activations,
    read_quantized_scheme,
)
from graphcore.arch.config.refusals import known_activation, refuse_unknown_mathematics
from graphcore.arch.config.rope_parameters import note_on_dynamic, read_rope
from graphcore.arch.config.ternary_scaling import BITNET_METHOD, note_on_full_weights, read_ternary_scaling
from graphcore.arch.config.typed_fields import Fields
from graphcore.arch.registry import ARCHITECTURES, MODEL_TYPES, NESTED_TYPES
from graphcore.checkpoint.generation_config import FILE_NAME, read_generation_config
from graphcore.checkpoint.json_object import read_json_object
from graphcore.checkpoint.token_ids import SPECIAL_IDS, read_special_ids
from graphcore.errors import CheckpointError, UnsupportedError, quoted
from graphcore.routing import ScoredRouting

TIE = "tie_word_embeddings"
OUTER_FIRST = (TIE,)  # Gemma3ForConditionalGeneration uses the outer flag for tying
QUANTIZATION_FILES = {  # AutoGPTQ's, AutoAWQ's and Model Optimizer's
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
OUTER_LAST = ("bos_token_id", "eos_token_id", "dtype", "torch_dtype", "quantization_config")


def load_model_config(path: str | Path) -> ModelConfig:
    """Read the typed configuration of a model folder, or of a config.json file.

    A generation_config.json in the same folder adds its bos and eos token ids; it is never refused.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CheckpointError: a file is not a JSON object, or a setting is missing or wrong.
        UnsupportedError: the model type, or a setting that changes the mathematics, is not supported.
    """
    file = Path(path).expanduser()
    file = file / "config.json" if file.is_dir() else file
    generation = read_generation_config(file.parent)
    raw = read_json_object(file)
    if raw.get("quantization_config") is None:
        raw = {**raw, **_older_quantization(raw, file.parent)}
    config = parse_model_config(raw, str(file), generation.settings)
    return replace(config, notes=(*generation.notes, *config.notes))


def _older_quantization(raw: Mapping[str, object], folder: Path) -> Mapping[str, object]:
    """Return the quantization_config that older programs wrote under another name or into a file, or nothing."""
    older = raw.get("compression_config")
    if isinstance(older, Mapping):
        inner = older.get("quantization_config")
        stated = {**older, **inner} if isinstance(inner, Mapping) else older
        return {"quantization_config": {**stated, "quant_method": "compressed-tensors"}}
    for name, method in QUANTIZATION_FILES.items():
        if (folder / name).is_file():
            stated = read_json_object(folder / name)
            inner = stated.get("quantization")  # Model Optimizer's
            stated = {**stated, **inner} if isinstance(inner, Mapping) else stated
            return {"quantization_config": {**stated, "quant_method": stated.get("quant_method") or method}}
    return {}


def parse_model_config(
    raw: Mapping[str, object], source: str, generation: Mapping[str, object] | None = None
) -> ModelConfig:
    """Return the typed configuration of a parsed config.json.

    Args:
        raw: parsed config.json; not changed.
        source: name of the file, for messages.
        generation: settings of generation_config.json, or None.

    Raises:
        CheckpointError: a setting is missing, of the wrong type, out of range, or contradicts another.
        UnsupportedError: the model type, or a setting that changes the mathematics, is not supported.
    """
    fields, defaults = _language_model(Fields(raw, source))
    refuse_unknown_mathematics(fields, defaults)
    _refuse_quantization(fields, defaults)
    hidden_size = fields.size("hidden_size") or defaults.hidden_size
    num_layers = _num_layers(fields, defaults)
    vocab_size = fields.size("vocab_size") or defaults.vocab_size
    special, notes = _special_tokens(fields, generation or {}, defaults, vocab_size)
    longest = fields.size("max_position_embeddings") or defaults.max_position_embeddings
    tie, dtype = fields.flag("tie_word_embeddings"), fields.text("dtype", "torch_dtype")
    attention = _attention(fields, defaults, hidden_size, num_layers, source)
    rope = read_rope(fields, defaults, attention.head_dim, longest) if defaults.has_rope else None
    eps = fields.positive("layer_norm_epsilon" if defaults.has_layer_norm else "rms_norm_eps")
    config = ModelConfig(
        model_type=defaults.model_type,
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size") or defaults.intermediate_size or 4 * hidden_size,
        num_hidden_layers=num_layers,
        vocab_size=vocab_size,
        max_position_embeddings=longest,
        attention=attention,
        rope=rope,
        delta=_delta(fields, defaults, source),
        experts=_experts(fields, defaults, num_layers, source),
        norm_eps=eps or defaults.norm_eps,
        hidden_act=known_activation(fields.text("hidden_act") or defaults.hidden_act, fields.source),
        mlp_bias=_has_mlp_bias(fields, defaults),
        tie_word_embeddings=defaults.tie_word_embeddings if tie is None else tie,
        bos_token_id=next(iter(special["bos_token_id"]), None),
        eos_token_ids=special["eos_token_id"],
        dtype=dtype.removeprefix("torch.") if dtype else None,
        ternary=read_ternary_scaling(fields),
        quantized=read_quantized_scheme(fields),
        notes=(*notes, *note_on_dynamic(rope, longest, fields.source), *_notes_on_quantization(fields)),
    )
    return ARCHITECTURES[defaults.model_type].complete_json(config, fields)


def _language_model(fields: Fields) -> tuple[Fields, ClassDefaults]:
    """Return the settings of the language model, and the defaults of its model type.

    A text-only file is flat. A multimodal one nests the language model under text_config, omits settings there that
    equal the defaults, and has some (tying, token ids, dtype) in the outer object. An empty text_config in a file of a
    text-only type counts as absent.

    Raises:
        CheckpointError: model_type or a required setting is missing.
        UnsupportedError: the model type is not supported.
    """
    model_type, text = fields.text("model_type"), fields.raw.get("text_config")
    if text is not None and (text != {} or model_type in NESTED_TYPES):
        return _nested(fields)
    if model_type is None:
        raise CheckpointError(
            f"{fields.source}: has no model_type; is this the config.json of a model? known: {_known()}"
        )
    if model_type in NESTED_TYPES:
        raise CheckpointError(f"{fields.source}: model_type '{model_type}' needs a text_config; fetch the file again")
    defaults = _defaults_of(model_type, fields.source)
    fields = replace(fields, own_names=defaults.own_names)
    _check_required(fields, defaults)
    return fields, defaults


def _nested(outer: Fields) -> tuple[Fields, ClassDefaults]:
    """Return text_config, completed by settings of the outer object."""
    text = outer.section("text_config")
    outer_type = outer.text("model_type")
    inner_types = {inner for types in NESTED_TYPES.values() for inner in types}
    expected = NESTED_TYPES.get(outer_type, (outer_type,))[0] if outer_type is not None else None
    model_type = text.text("model_type") or expected
    if model_type is None:
        raise CheckpointError(f"{text.source}: has no model_type, here or outside; known: {_known()}")
    if expected is not None and expected not in inner_types:
        raise _unsupported(str(outer_type), outer.source)
    defaults = _defaults_of(model_type, text.source)
    if defaults.model_type not in inner_types:
        raise _unsupported(model_type, text.source)
    merged = {**text.raw, **({TIE: True} if ARCHITECTURES[defaults.model_type].nested_ties else {})}
    merged.update((name, outer.raw[name]) for name in OUTER_FIRST if outer.raw.get(name) is not None)
    missing = (name for name in OUTER_LAST if text.raw.get(name) is None and outer.raw.get(name) is not None)
    merged.update((name, outer.raw[name]) for name in missing)
    return Fields(merged, text.source, defaults.own_names), defaults


def _defaults_of(model_type: str, source: str) -> ClassDefaults:
    if model_type not in MODEL_TYPES:
        raise _unsupported(model_type, source)
    return MODEL_TYPES[model_type].defaults


def _unsupported(model_type: str, source: str) -> UnsupportedError:
    return UnsupportedError(
        f"{source}: model_type {quoted(model_type)} is not supported; "
        f"known: {_known()}; choose a checkpoint of one of these, or run it through transformers with "
        "model.fallback=transformers"
    )


def _known() -> str:
    return ", ".join(sorted({*MODEL_TYPES, *NESTED_TYPES}))


def _check_required(fields: Fields, defaults: ClassDefaults) -> None:
    names = {name: fields.names_of(name) for name in defaults.required}
    missing = [alias[0] for alias in names.values() if all(fields.raw.get(name) is None for name in alias)]
    if missing:
        raise CheckpointError(
            f"{fields.source}: model_type '{defaults.model_type}' needs {', '.join(missing)}, found none of them; "
            "add what is missing or fetch the file again"
        )


def _refuse_quantization(fields: Fields, defaults: ClassDefaults) -> None:
    method = fields.section("quantization_config").text("quant_method")
    is_dense = fields.raw.get("quantization_config") is None or note_on_full_weights(fields)
    if is_dense or method in defaults.quant_methods or method in QUANTIZED_METHODS:
        return
    if method == BITNET_METHOD:
        known = sorted(name for name, one in ARCHITECTURES.items() if BITNET_METHOD in one.defaults.quant_methods)
        raise UnsupportedError(
            f"{fields.source}: quant_method 'bitnet' is not supported for model_type {quoted(defaults.model_type)}; "
            f"known: {', '.join(known)}"
        )
    raise UnsupportedError(
        f"{fields.source}: quantization_config has quant_method {quoted(method)}, which is not supported; "
        "use the unquantised checkpoint or a GGUF of it"
    )


def _notes_on_quantization(fields: Fields) -> tuple[str, ...]:
    return *note_on_full_weights(fields), *notes_on_activations(fields)


def _num_layers(fields: Fields, defaults: ClassDefaults) -> int:
    num_layers = fields.size("num_hidden_layers") or defaults.num_hidden_layers
    if num_layers > MOST_LAYERS:
        raise fields.wrong(fields.names_of("num_hidden_layers")[0], num_layers, f"at most {MOST_LAYERS}")
    return num_layers


def _attention(
    fields: Fields, defaults: ClassDefaults, hidden_size: int, num_layers: int, source: str
) -> AttentionConfig:
    heads = fields.size("num_attention_heads") or defaults.num_attention_heads
    # An explicit null means as many kv heads as query heads, whatever the default is.
    kv_default = None if fields.is_null("num_key_value_heads") else defaults.num_key_value_heads
    kv_heads = (fields.size("num_key_value_heads") if defaults.has_rope else None) or kv_default or heads
    stated = (fields.size("head_dim") if defaults.has_rope else None) or defaults.head_dim
    query_scalar = fields.positive("query_pre_attn_scalar") or defaults.query_pre_attn_scalar
    has_output_bias = _has_attention_bias(fields, defaults)
    return AttentionConfig(
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=read_head_dim(stated, hidden_size, (heads, kv_heads), defaults.has_rope, source),
        qkv_bias=_has_bias_on_qkv(fields, defaults),
        output_bias=has_output_bias,
        query_pre_attn_scalar=query_scalar if defaults.query_pre_attn_scalar else None,
        sliding_window=read_window(fields, defaults),
        sliding_window_pattern=read_pattern(fields, defaults),
        layer_types=read_layer_types(fields, defaults, num_layers),
    )


def _has_attention_bias(fields: Fields, defaults: ClassDefaults) -> bool:
    """Return whether attention has an output bias; the flag counts only for model types that read it."""
    is_asked = _asks_for_bias(fields, defaults) and defaults.bias_rule in ("flags", "attention_flag")
    return defaults.bias_rule == "everywhere" or is_asked


def _has_bias_on_qkv(fields: Fields, defaults: ClassDefaults) -> bool:
    is_asked = _asks_for_bias(fields, defaults) and defaults.bias_rule == "qkv_flag"
    return is_asked or defaults.bias_rule == "qkv" or _has_attention_bias(fields, defaults)


def _asks_for_bias(fields: Fields, defaults: ClassDefaults) -> bool:
    stated = fields.flag("attention_bias")
    return defaults.attention_bias if stated is None else stated


def _has_mlp_bias(fields: Fields, defaults: ClassDefaults) -> bool:
    return defaults.bias_rule == "everywhere" or (bool(fields.flag("mlp_bias")) and defaults.bias_rule == "flags")


def _experts(fields: Fields, defaults: ClassDefaults, num_layers: int, source: str) -> ExpertsConfig | None:
    usual = defaults.experts
    if usual is None:
        return None
    experts = replace(
        usual,
        num_local_experts=fields.size("num_local_experts", "num_experts") or usual.num_local_experts,
        num_experts_per_tok=fields.size("num_experts_per_tok") or usual.num_experts_per_tok,
    )
    if usual.moe_intermediate_size is None:
        limit, alpha = fields.positive("swiglu_limit"), fields.positive("swiglu_alpha")
        experts = replace(experts, swiglu_limit=limit or usual.swiglu_limit, swiglu_alpha=alpha or usual.swiglu_alpha)
    else:
        shared = usual.shared_expert_intermediate_size
        experts = replace(
            experts,
            shared_expert_intermediate_size=shared and (fields.size("shared_expert_intermediate_size") or shared),
            moe_intermediate_size=fields.size("moe_intermediate_size") or usual.moe_intermediate_size,
            norm_topk_prob=fields.switch("norm_topk_prob", usual.norm_topk_prob),
            mlp_only_layers=_mlp_only_layers(fields, num_layers),
        )
    if usual.routing is not None:
        experts = replace(experts, routing=_routing(fields, usual.routing, experts.norm_topk_prob))
    return experts.check(source)


def _routing(fields: Fields, usual: ScoredRouting, normalises: bool) -> ScoredRouting:
    """Return the rule of experts with scores of their own; a softmax (DeepSeek V2) has groups only by topk_method."""
    has_groups = usual.function == "sigmoid" or fields.text("topk_method") == "group_limited_greedy"
    return usual._replace(
        groups=(fields.size("n_group") if has_groups else None) or usual.groups,
        used_groups=(fields.size("topk_group") if has_groups else None) or usual.used_groups,
        normalises=normalises,
        factor=fields.positive("routed_scaling_factor") or usual.factor,
    )


def _delta(fields: Fields, defaults: ClassDefaults, source: str) -> DeltaConfig | None:
    usual = defaults.delta
    if usual is None:
        return None
    found = DeltaConfig(
        linear_num_key_heads=fields.size("linear_num_key_heads") or usual.linear_num_key_heads,
        linear_num_value_heads=fields.size("linear_num_value_heads") or usual.linear_num_value_heads,
        linear_key_head_dim=fields.size("linear_key_head_dim") or usual.linear_key_head_dim,
        linear_value_head_dim=fields.size("linear_value_head_dim") or usual.linear_value_head_dim,
        linear_conv_kernel_dim=fields.size("linear_conv_kernel_dim") or usual.linear_conv_kernel_dim,
    )
    return found.check(source)


def _mlp_only_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Return the layers without experts: those that are listed, and all except each decoder_sparse_step-th.

    Source: transformers, modeling_qwen3_moe, `Qwen3MoeDecoderLayer`.
    """
    listed, step = fields.indices("mlp_only_layers"), fields.size("decoder_sparse_step") or 1
    return tuple(layer for layer in range(num_layers) if layer in listed or (layer + 1) % step)


def _special_tokens(
    fields: Fields, generation: Mapping[str, object], defaults: ClassDefaults, vocab_size: int
) -> tuple[Mapping[str, tuple[int, ...]], tuple[str, ...]]:
    """Return the special token ids of both files by setting, and notes about values that are no token ids.

    The defaults count only if neither file has a setting, not even as null or as a number that is no token id.
    """
    first = read_special_ids(generation, SPECIAL_IDS, vocab_size)
    then = read_special_ids(fields.raw, SPECIAL_IDS, vocab_size)
    found = {
        name: tuple(dict.fromkeys(first.ids.get(name, ()) + then.ids.get(name, ())))
        if name in generation or name in fields.raw
        else defaults.token_ids(name)
        for name in SPECIAL_IDS
    }
    return found, (*first.note(f"{FILE_NAME} beside {fields.source}"), *then.note(fields.source))
