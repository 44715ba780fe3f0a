"""A model's config as GGUF metadata: the keys that llama.cpp's converter writes, for models that come from elsewhere.

Every file is checked before it is written: the metadata is read back as it would be from the file, and must give the
same `ModelSpec`. What GGUF has no key for is so refused rather than lost. A new architecture adds its name to
`ARCHITECTURES` of `checkpoint.gguf_keys` and, for keys beyond the common ones, an entry to `EXTRA_FIELDS`.

Source: llama.cpp, gguf-py/gguf/constants.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from types import MappingProxyType

import numpy as np
import torch

from graphcore.arch.architecture import Architecture
from graphcore.checkpoint.gguf_config import config_from_gguf
from graphcore.checkpoint.gguf_keys import ARCHITECTURES
from graphcore.checkpoint.model_config import ModelConfig
from graphcore.errors import UnsupportedError
from graphcore.export.gguf_file import FieldValue
from graphcore.nn.rope import rope_frequencies
from graphcore.nn.spec import DivisorScaling, Llama3Scaling, ModelSpec, RopeSpec

Fields = dict[str, FieldValue]
NOT_STORED = ("swiglu_limit", "swiglu_alpha")  # the readers of gpt-oss know them
ALIASES: Mapping[str, str] = MappingProxyType({"mistral": "llama"})  # model types that llama.cpp has under another name


def gguf_architecture(config: ModelConfig) -> str:
    """Return general.architecture for the model.

    Raises:
        UnsupportedError: llama.cpp has no name for it that graphcore knows.
    """
    names = {defaults.model_type: name for name, defaults in reversed(list(ARCHITECTURES.items()))}
    names.update(ALIASES)
    if config.model_type not in names:
        raise UnsupportedError(f"model_type {config.model_type} has no GGUF form; known: {', '.join(sorted(names))}")
    return names[config.model_type]


def model_fields(config: ModelConfig, architecture: str) -> Fields:
    """Return the architecture's keys with their full names."""
    found: Fields = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "vocab_size": config.vocab_size,
        **(_plain_fields(config) if config.layer_norm_eps is not None else _rotary_fields(config)),
        **(EXTRA_FIELDS[architecture](config) if architecture in EXTRA_FIELDS else {}),
    }
    return {f"{architecture}.{key}": value for key, value in found.items()}


def _plain_fields(config: ModelConfig) -> Fields:
    assert config.layer_norm_eps is not None, "asked for a model without LayerNorm"
    return {"attention.layer_norm_epsilon": config.layer_norm_eps}


def _rotary_fields(config: ModelConfig) -> Fields:
    head_dim = config.computed_head_dim
    scaling = config.rope_scaling
    is_linear = scaling is not None and scaling["rope_type"] == "linear"
    return {
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": head_dim,
        "rope.freq_base": config.rope_theta,
        **(
            {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling["factor"])}
            if scaling is not None and is_linear
            else {}
        ),
    }


def _gemma3_fields(config: ModelConfig) -> Fields:
    found: Fields = {"attention.sliding_window": config.sliding_window or 0}
    if config.sliding_window_pattern is not None:
        found["attention.sliding_window_pattern"] = config.sliding_window_pattern
    if config.rope_local_base_freq is not None:
        found["rope.freq_base_swa"] = config.rope_local_base_freq
    return found


def _gpt_oss_fields(config: ModelConfig) -> Fields:
    found: Fields = {
        "attention.sliding_window": config.sliding_window or 0,
        "expert_count": config.num_local_experts or 0,
        "expert_used_count": config.num_experts_per_tok or 0,
        "expert_feed_forward_length": config.intermediate_size,
    }
    scaling = config.rope_scaling
    if scaling is not None and scaling["rope_type"] == "yarn":
        found["rope.scaling.type"] = "yarn"
        found["rope.scaling.factor"] = float(scaling["factor"])
        found["rope.scaling.original_context_length"] = int(scaling["original_max_position_embeddings"])
    return found


EXTRA_FIELDS: Mapping[str, Callable[[ModelConfig], Fields]] = MappingProxyType(
    {"gemma3": _gemma3_fields, "gpt-oss": _gpt_oss_fields}
)


def rope_divisors(spec: ModelSpec) -> tuple[float, ...] | None:
    """Return what `rope_freqs.weight` holds, [head_dim / 2]: None for models whose scaling has a key or that have none.

    llama.cpp has no key for Llama 3's scaling; its files hold what each frequency is divided by.
    """
    found: dict[RopeSpec, int] = {
        block.attention.rope: block.attention.head_dim for block in spec.blocks if block.attention.rope is not None
    }
    for rope, head_dim in found.items():
        match rope.scaling:
            case DivisorScaling(divisors):
                return divisors
            case Llama3Scaling():
                plain = rope_frequencies(replace(rope, scaling=None), head_dim).double()
                return tuple((plain / rope_frequencies(rope, head_dim)).to(torch.float32).tolist())
    return None


def check_says_the_same(
    architecture: Architecture,
    config: ModelConfig,
    metadata: Mapping[str, FieldValue],
    shapes: Mapping[str, tuple[int, ...]],
    source: str,
) -> None:
    """Return if a reader of the file will see the same model.

    Args:
        metadata: of the file, general.architecture included.
        shapes: of its tensors.
        source: of the model, for messages.

    Raises:
        UnsupportedError: GGUF has no key for something in which this model differs from what readers assume.
    """
    divisors = rope_divisors(architecture.spec(config))
    stored = {key: _as_float32(value) if isinstance(value, float) else value for key, value in metadata.items()}
    read = architecture.spec(config_from_gguf(stored, shapes, divisors, source))
    wanted = architecture.spec(_as_stored(config, divisors, is_tied="output.weight" not in shapes))
    if read == wanted:
        return
    parts = [field.name for field in fields(ModelSpec) if getattr(read, field.name) != getattr(wanted, field.name)]
    raise UnsupportedError(
        f"{source}: a GGUF file of this model would be read as another one (its {', '.join(parts)} differ: GGUF has no "
        "key for them); keep the safetensors"
    )


def _as_float32(value: float) -> float:
    return float(np.float32(value))


def _as_stored(config: ModelConfig, divisors: tuple[float, ...] | None, is_tied: bool) -> ModelConfig:
    """Return the config with its floats as float32 has them, as GGUF stores them, and its scaling as divisors."""
    rounded = {
        name: _as_float32(value)
        for name, value in vars(config).items()
        if isinstance(value, float) and name not in NOT_STORED
    }
    changed = replace(config, **rounded, tie_word_embeddings=is_tied)  # type: ignore[arg-type]  # all are floats
    if divisors is not None:
        return replace(changed, rope_scaling=None, rope_freq_divisors=divisors)
    if changed.rope_scaling is not None:
        factor = _as_float32(float(changed.rope_scaling["factor"]))
        return replace(changed, rope_scaling={**changed.rope_scaling, "factor": factor})
    return changed
