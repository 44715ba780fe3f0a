"""What graphcore asks of any model, read from a transformers config of any class."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from graphcore.checkpoint.config_fields import Fields
from graphcore.checkpoint.json_object import parse_json_object
from graphcore.checkpoint.model_config import ModelConfig
from graphcore.errors import UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

GENERATION = "generation_config.json"
CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
LENGTH_DEPENDENT = ("dynamic", "longrope")
UNBOUNDED_CONTEXT = 1 << 20  # tokens, where positions are no table and no length is said (ALiBi)


def model_config_of(config: "PreTrainedConfig", folder: Path) -> ModelConfig:
    """Return the sizes and token ids of a model; what only its own class reads stays in the class's config.

    Raises:
        UnsupportedError: the config's weights are quantised, or it has no vocabulary, width or number of layers.
    """
    values = Fields(config.to_dict(), str(folder / "config.json"))
    if values.raw.get("quantization_config") is not None:
        raise UnsupportedError(
            f"{values.source}: the weights are quantised (quantization_config), and model.fallback=transformers reads "
            "dense ones only; choose the unquantised checkpoint"
        )
    names = config.attribute_map
    heads = _size(values, names, "num_attention_heads")
    hidden = _size(values, names, "hidden_size")
    file = folder / GENERATION
    generation = Fields(parse_json_object(file.read_bytes(), str(file)) if file.is_file() else {}, str(file))
    ends = generation.token_ids("eos_token_id") + values.token_ids("eos_token_id")
    starts = generation.token_ids("bos_token_id") + values.token_ids("bos_token_id")
    return ModelConfig(
        model_type=config.model_type,
        hidden_size=hidden,
        intermediate_size=values.size(names.get("intermediate_size", "intermediate_size")) or 4 * hidden,
        num_hidden_layers=_size(values, names, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=values.size("num_key_value_heads", "num_kv_heads") or heads,
        vocab_size=_size(values, names, "vocab_size"),
        max_position_embeddings=values.size(*CONTEXT_NAMES) or UNBOUNDED_CONTEXT,
        head_dim=values.size("head_dim") or hidden // heads,
        tie_word_embeddings=bool(values.flag("tie_word_embeddings")),
        bos_token_id=starts[0] if starts else None,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        dtype=values.text("dtype"),
    )


def why_whole(config: "PreTrainedConfig") -> str:
    """Return why a prompt must run in one pass and without neighbours of other lengths; empty if it need not.

    Rotary frequencies may depend on a pass's longest row, and recurrent layers may begin anew with every pass of
    several tokens, or take padding for tokens.
    """
    stated = config.to_dict().get("rope_parameters") or {}
    ropes = [stated, *stated.values()]
    if any(isinstance(rope, Mapping) and rope.get("rope_type") in LENGTH_DEPENDENT for rope in ropes):
        return "its rotary frequencies depend on a pass's longest row"
    kinds = set(config.layer_types or ()) if hasattr(config, "layer_types") else set()
    if kinds - ATTENTION_KINDS:
        return f"it has layers that are no attention ({', '.join(sorted(kinds - ATTENTION_KINDS))})"
    return ""


def _size(values: Fields, names: Mapping[str, str], name: str) -> int:
    """Return a size under the name that the config's class has for it."""
    found = values.size(names.get(name, name), name)
    if found is None:
        raise UnsupportedError(
            f"{values.source}: has no {name}; model.fallback=transformers needs a language model with attention"
        )
    return found
