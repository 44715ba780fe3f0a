"""The attention type of each layer, sliding or full: from explicit layer_types, or by the rule of the model type.

    gemma3, pattern 6:   s s s s s F s s s s s F ...      (every 6th is full, the rest slide)
    gpt-oss, pattern 2:  s F s F ...
    qwen, opt-in:        F F ... F s s s                  (from max_window_layers on, if use_sliding_window)
    mistral:             s s s ...                        (all, unless sliding_window is null)
    exaone, pattern 4:   s s s F s s s F ...              (the same, unless sliding_window is null; or "LLLG")
    qwen mixtures:       s s s ...                        (all, if use_sliding_window)
    qwen 3.5:            d d d F d d d F ...              (every 4th attends, the rest have a delta rule)
    lfm2:                c c F c c F ...                  (those of full_attn_idxs attend, the rest have a convolution)

Source: transformers 5.23, the `__post_init__` of each configuration and MistralModel.forward.
"""

from collections.abc import Sequence

from graphcore.arch.config.class_defaults import CONV_LAYER_TYPES, DELTA_LAYER_TYPES, LAYER_TYPES, ClassDefaults
from graphcore.arch.config.gguf_keys import NO_WINDOW, WINDOW, WINDOW_PATTERN, GGUFKeys
from graphcore.arch.config.typed_fields import Fields
from graphcore.errors import CheckpointError, UnsupportedError, quoted

OPT_IN = ("opt_in", "every_opt_in")  # rules that need use_sliding_window
UNIFORM = ("none", "every", "every_opt_in")  # rules by which all layers have the same type
WITHOUT_WINDOW = ("none", "delta", "conv")  # rules by which no layer slides
PATTERNS = ("pattern", "pattern_opt_in")  # rules by which each layer but some slides
MOST_LAYERS = 65_536  # upper limit for lists with one entry per layer, far above any model


def read_window(fields: Fields, defaults: ClassDefaults) -> int | None:
    """Return the window of sliding layers in tokens; None if the model type has none or does not use it.

    Raises:
        CheckpointError: the window is not a positive integer, or use_sliding_window is not a boolean.
    """
    if defaults.window_rule in WITHOUT_WINDOW or fields.is_null("sliding_window"):
        return None
    if defaults.window_rule in OPT_IN and not fields.flag("use_sliding_window"):
        return None
    return fields.size("sliding_window") or defaults.sliding_window


def read_pattern(fields: Fields, defaults: ClassDefaults) -> int | None:
    """Return the distance between full-attention layers; None if the model type has no such rule.

    Raises:
        CheckpointError: the value is not a positive integer.
    """
    has_pattern = defaults.window_rule == "pattern" or (
        defaults.window_rule == "pattern_opt_in" and read_window(fields, defaults) is not None
    )
    if not has_pattern:
        return None
    letters = _letters(fields, defaults)
    if letters is not None:
        return len(letters) if letters == "L" * (len(letters) - 1) + "G" else None
    return fields.size("sliding_window_pattern") or defaults.sliding_window_pattern


def _letters(fields: Fields, defaults: ClassDefaults) -> str | None:
    """Return a pattern of letters, L for a sliding layer and G for a full one; None for a number or none.

    Raises:
        CheckpointError: there are other letters.
    """
    value = fields.raw.get("sliding_window_pattern")
    if defaults.window_rule != "pattern_opt_in" or not isinstance(value, str):
        return None
    if not value or set(value) - {"L", "G"}:
        raise fields.wrong("sliding_window_pattern", value, "a number, or letters L and G")
    return value


def read_layer_types(fields: Fields, defaults: ClassDefaults, num_layers: int) -> tuple[str, ...] | None:
    """Return the attention type of each layer; None if all layers have full attention.

    Raises:
        CheckpointError: the list has the wrong length, or has sliding layers without a window.
        UnsupportedError: a name is unknown, or the model type does not support layers of different types.
    """
    window = read_window(fields, defaults)
    explicit = fields.texts("layer_types")
    layer_types = explicit if explicit is not None else _by_rule(fields, defaults, num_layers, window)
    if layer_types is None:
        return None
    _check_names(fields, defaults, layer_types, num_layers)
    if window is None and "sliding_attention" in layer_types and defaults.window_rule not in WITHOUT_WINDOW:
        raise CheckpointError(
            f"{fields.source}: layer_types has sliding_attention, but there is no sliding_window; give one"
        )
    if defaults.window_rule in UNIFORM and layer_types != _uniform(num_layers, window):
        raise UnsupportedError(
            f"{fields.source}: layer_types differs from what {defaults.model_type} computes "
            f"({_uniform(num_layers, window)[0]} in every layer); remove it or use a model type that has it"
        )
    return layer_types


def layer_types_of_pattern(num_layers: int, pattern: int, other: str = "sliding_attention") -> tuple[str, ...]:
    """Return layer types with full attention in every `pattern`-th layer, counted from one, and `other` elsewhere."""
    return tuple(other if (layer + 1) % pattern else "full_attention" for layer in range(num_layers))


def read_gguf_window(keys: GGUFKeys) -> tuple[int | None, int | None]:
    """Return the window of sliding layers in tokens, and the distance between full-attention layers; None for none.

    Without a window all layers have full attention, as in llama.cpp (gemma3.cpp).

    Raises:
        CheckpointError: the window or the distance is not a positive integer.
        UnsupportedError: the file has layers of different types, which the model type does not support.
    """
    if keys.defaults.window_rule not in ("every", *PATTERNS) or keys.fields.raw.get(keys.name(WINDOW)) in NO_WINDOW:
        return None, None
    window = keys.required_size(WINDOW)
    if keys.defaults.window_rule == "every":
        if keys.fields.raw.get(keys.name(WINDOW_PATTERN)) is not None:
            raise UnsupportedError(
                f"{keys.fields.source}: {keys.name(WINDOW_PATTERN)} is not supported for {keys.defaults.model_type}, "
                "all of whose layers slide; use the safetensors checkpoint"
            )
        return window, None
    if WINDOW_PATTERN in keys.defaults.sizes_by_layer:
        return window, None  # the family reads each layer's type
    return window, keys.size(WINDOW_PATTERN) or keys.defaults.sliding_window_pattern


def read_gguf_layer_types(keys: GGUFKeys, num_layers: int, pattern: int) -> tuple[str, ...]:
    """Return the layers' types: an array of booleans, true where a layer slides, or the distance of full ones.

    Args:
        pattern: distance of full layers in files that do not state it.

    Raises:
        CheckpointError: the array has another number of values.
    """
    name = keys.name(WINDOW_PATTERN)
    value = keys.fields.raw.get(name)
    if value is None or type(value) is int:
        return layer_types_of_pattern(num_layers, keys.fields.size(name) or pattern)
    if not isinstance(value, Sequence) or len(value) != num_layers:
        raise keys.fields.wrong(name, value, f"a list of {num_layers} booleans")
    return tuple("sliding_attention" if slides else "full_attention" for slides in value)


def note_on_gguf_window(keys: GGUFKeys) -> tuple[str, ...]:
    """Return a line about a window that the model type does not use, or that llama.cpp does not; else nothing."""
    window = keys.fields.raw.get(keys.name(WINDOW))
    if window in NO_WINDOW or keys.defaults.window_rule in (*PATTERNS, "conv"):
        return ()
    stated = f"{keys.fields.source}: {keys.name(WINDOW)} is {quoted(window)}"
    if keys.defaults.window_rule == "every":
        return (f"{stated}: every layer slides, as in transformers' {keys.defaults.model_type}; llama.cpp ignores it",)
    return (f"{stated}, which is ignored, as in llama.cpp: every layer of {keys.defaults.model_type} sees all tokens",)


def _uniform(num_layers: int, window: int | None) -> tuple[str, ...]:
    return num_layers * ("full_attention" if window is None else "sliding_attention",)


def _by_rule(fields: Fields, defaults: ClassDefaults, num_layers: int, window: int | None) -> tuple[str, ...] | None:
    if defaults.window_rule == "delta":
        interval = fields.size("full_attention_interval") or defaults.full_attention_interval
        return layer_types_of_pattern(num_layers, interval, "linear_attention")
    if defaults.window_rule == "conv":
        return _around_convolutions(fields, num_layers)
    letters = _letters(fields, defaults)
    if letters is not None and window is not None:
        kinds = {"L": "sliding_attention", "G": "full_attention"}
        repeated = tuple(kinds[letters[layer % len(letters)]] for layer in range(num_layers))
        return (*repeated[:-1], "full_attention")
    pattern = read_pattern(fields, defaults)
    if pattern is not None:
        return layer_types_of_pattern(num_layers, pattern)
    if window is None:
        return None
    if defaults.window_rule in UNIFORM:
        return _uniform(num_layers, window)
    first_sliding = _max_window_layers(fields, defaults)
    return tuple("sliding_attention" if layer >= first_sliding else "full_attention" for layer in range(num_layers))


def _around_convolutions(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Return full attention in the layers of full_attn_idxs, or in all without that list, and "conv" elsewhere."""
    attend = range(num_layers) if fields.raw.get("full_attn_idxs") is None else fields.indices("full_attn_idxs")
    return tuple("full_attention" if layer in attend else "conv" for layer in range(num_layers))


def _max_window_layers(fields: Fields, defaults: ClassDefaults) -> int:
    if fields.raw.get("max_window_layers") == 0:  # every layer slides
        return 0
    return fields.size("max_window_layers") or defaults.max_window_layers


def _check_names(fields: Fields, defaults: ClassDefaults, layer_types: tuple[str, ...], num_layers: int) -> None:
    known = {"delta": DELTA_LAYER_TYPES, "conv": CONV_LAYER_TYPES}.get(defaults.window_rule, LAYER_TYPES)
    unknown = sorted(set(layer_types) - set(known))
    if unknown:
        raise UnsupportedError(
            f"{fields.source}: layer_types has {quoted(unknown[0])}, which is not supported; known: {', '.join(known)}"
        )
    if len(layer_types) != num_layers:
        raise CheckpointError(
            f"{fields.source}: layer_types names {len(layer_types)} layers, num_hidden_layers is {num_layers}; "
            "correct one of them"
        )
