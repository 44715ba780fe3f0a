"""Which layers attend a window only: explicit layer_types, or the rule of the model type's class.

    gemma3, pattern 6:   s s s s s F s s s s s F ...      (every 6th is full, the rest slide)
    gpt-oss, pattern 2:  s F s F ...
    qwen, opt-in:        F F ... F s s s                  (from max_window_layers on, if use_sliding_window)
    mistral:             s s s ...                        (all, unless sliding_window is null)

Source: transformers 5.23, the `__post_init__` of each configuration and MistralModel.forward.
"""

from graphcore.checkpoint.config_defaults import LAYER_TYPES, ClassDefaults
from graphcore.checkpoint.config_fields import Fields
from graphcore.checkpoint.quoted import quoted
from graphcore.errors import CheckpointError, UnsupportedError

DEFAULT_MAX_WINDOW_LAYERS = 28  # Qwen2Config, Qwen3Config
MOST_LAYERS = 65_536  # a bound on the lists made per layer, far above any model


def read_window(fields: Fields, defaults: ClassDefaults) -> int | None:
    """Return the window of sliding layers in tokens, or None where the class has none or does not use it.

    Raises:
        CheckpointError: it is not a positive integer, or its switch is not a boolean.
    """
    if defaults.window_rule == "none" or fields.is_null("sliding_window"):
        return None
    if defaults.window_rule == "opt_in" and not fields.flag("use_sliding_window"):
        return None
    return fields.size("sliding_window") or defaults.sliding_window


def read_pattern(fields: Fields, defaults: ClassDefaults) -> int | None:
    """Return the distance between full-attention layers, or None where the class has no such rule.

    Raises:
        CheckpointError: it is not a positive integer.
    """
    if defaults.window_rule != "pattern":
        return None
    return fields.size(*defaults.names_of("sliding_window_pattern")) or defaults.sliding_window_pattern


def read_layer_types(fields: Fields, defaults: ClassDefaults, num_layers: int) -> tuple[str, ...] | None:
    """Return "sliding_attention" or "full_attention" per layer, or None where all attend everything.

    Raises:
        CheckpointError: the list has the wrong length, or slides without a window.
        UnsupportedError: a name is unknown, or the class does not choose by layer.
    """
    window = read_window(fields, defaults)
    explicit = fields.texts("layer_types")
    layer_types = explicit if explicit is not None else _by_rule(fields, defaults, num_layers, window)
    if layer_types is None:
        return None
    _check_names(fields, layer_types, num_layers)
    if window is None and "sliding_attention" in layer_types and defaults.window_rule != "none":
        raise CheckpointError(
            f"{fields.source}: layer_types has sliding_attention, but there is no sliding_window; give one"
        )
    if defaults.window_rule in ("none", "every") and layer_types != _uniform(num_layers, window):
        raise UnsupportedError(
            f"{fields.source}: layer_types differs from what {defaults.model_type} computes "
            f"({_uniform(num_layers, window)[0]} in every layer); remove it or use a model type that has it"
        )
    return layer_types


def layer_types_of_pattern(num_layers: int, pattern: int) -> tuple[str, ...]:
    """Return layer types in which each `pattern`-th layer, counted from one, attends everything."""
    return tuple("sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(num_layers))


def _uniform(num_layers: int, window: int | None) -> tuple[str, ...]:
    return num_layers * ("full_attention" if window is None else "sliding_attention",)


def _by_rule(fields: Fields, defaults: ClassDefaults, num_layers: int, window: int | None) -> tuple[str, ...] | None:
    pattern = read_pattern(fields, defaults)
    if pattern is not None:
        return layer_types_of_pattern(num_layers, pattern)
    if window is None:
        return None
    if defaults.window_rule == "every":
        return _uniform(num_layers, window)
    first_sliding = _max_window_layers(fields)
    return tuple("sliding_attention" if layer >= first_sliding else "full_attention" for layer in range(num_layers))


def _max_window_layers(fields: Fields) -> int:
    if fields.raw.get("max_window_layers") == 0:  # every layer slides
        return 0
    return fields.size("max_window_layers") or DEFAULT_MAX_WINDOW_LAYERS


def _check_names(fields: Fields, layer_types: tuple[str, ...], num_layers: int) -> None:
    unknown = sorted(set(layer_types) - set(LAYER_TYPES))
    if unknown:
        raise UnsupportedError(
            f"{fields.source}: layer_types has {quoted(unknown[0])}, which is not supported; "
            f"known: {', '.join(LAYER_TYPES)}"
        )
    if len(layer_types) != num_layers:
        raise CheckpointError(
            f"{fields.source}: layer_types names {len(layer_types)} layers, num_hidden_layers is {num_layers}; "
            "correct one of them"
        )
