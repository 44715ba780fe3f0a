"""Which part of a config.json describes the language model, and as which model type.

A text-only file is flat. A multimodal one nests the language model under text_config, omits there whatever equals the
class defaults, and says some things (tying, token ids, dtype) outside.
"""

from graphcore.checkpoint.config_defaults import CLASS_DEFAULTS, NESTED_TYPES, ClassDefaults
from graphcore.checkpoint.config_fields import Fields
from graphcore.checkpoint.quoted import quoted
from graphcore.errors import CheckpointError, UnsupportedError

OUTER_FIRST = ("tie_word_embeddings",)  # Gemma3ForConditionalGeneration ties by the outer flag
OUTER_LAST = ("bos_token_id", "eos_token_id", "dtype", "torch_dtype", "quantization_config")


def language_model_fields(fields: Fields) -> tuple[Fields, ClassDefaults]:
    """Return the language model's settings and the defaults of its model type.

    Raises:
        CheckpointError: model_type or a required setting is missing.
        UnsupportedError: the model type is not supported.
    """
    if fields.raw.get("text_config") is not None:
        return _nested(fields)
    model_type = fields.text("model_type")
    if model_type is None:
        raise CheckpointError(
            f"{fields.source}: has no model_type; is this the config.json of a model? known: {_known()}"
        )
    if model_type in NESTED_TYPES:
        raise CheckpointError(f"{fields.source}: model_type '{model_type}' needs a text_config; fetch the file again")
    defaults = _defaults_of(model_type, fields.source)
    _check_required(fields, defaults)
    return fields, defaults


def _nested(outer: Fields) -> tuple[Fields, ClassDefaults]:
    """Return text_config, completed by what only the outer object says."""
    text = outer.section("text_config")
    outer_type = outer.text("model_type")
    expected = NESTED_TYPES.get(outer_type, outer_type) if outer_type is not None else None
    model_type = text.text("model_type") or expected
    if model_type is None:
        raise CheckpointError(f"{text.source}: has no model_type, here or outside; known: {_known()}")
    if expected is not None and expected not in NESTED_TYPES.values():
        raise _unsupported(str(outer_type), outer.source)
    if model_type not in NESTED_TYPES.values():
        raise _unsupported(model_type, text.source)
    merged = dict(text.raw)
    merged.update((name, outer.raw[name]) for name in OUTER_FIRST if outer.raw.get(name) is not None)
    missing = (name for name in OUTER_LAST if text.raw.get(name) is None and outer.raw.get(name) is not None)
    merged.update((name, outer.raw[name]) for name in missing)
    return Fields(merged, text.source), _defaults_of(model_type, text.source)


def _defaults_of(model_type: str, source: str) -> ClassDefaults:
    if model_type not in CLASS_DEFAULTS:
        raise _unsupported(model_type, source)
    return CLASS_DEFAULTS[model_type]


def _unsupported(model_type: str, source: str) -> UnsupportedError:
    return UnsupportedError(
        f"{source}: model_type {quoted(model_type)} is not supported; "
        f"known: {_known()}; choose a checkpoint of one of these, or run it through transformers with "
        "model.fallback=transformers"
    )


def _known() -> str:
    return ", ".join(sorted({*CLASS_DEFAULTS, *NESTED_TYPES}))


def _check_required(fields: Fields, defaults: ClassDefaults) -> None:
    names = {name: defaults.names_of(name) for name in defaults.required}
    missing = [alias[0] for alias in names.values() if all(fields.raw.get(name) is None for name in alias)]
    if missing:
        raise CheckpointError(
            f"{fields.source}: model_type '{defaults.model_type}' needs {', '.join(missing)}, found none of them; "
            "add what is missing or fetch the file again"
        )
