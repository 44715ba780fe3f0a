"""The registry of architectures, by model type of config.json and by general.architecture of GGUF files."""

from collections.abc import Mapping
from types import MappingProxyType

from graphcore.arch import families
from graphcore.arch.architecture import Architecture
from graphcore.arch.config.model_config import ModelConfig
from graphcore.errors import UnsupportedError
from graphcore.registry import collect

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {one.model_type: one for one in collect(families, Architecture)}  # type: ignore[type-abstract]
)
MODEL_TYPES: Mapping[str, Architecture] = MappingProxyType(
    {name: one for one in ARCHITECTURES.values() for name in (one.model_type, *one.other_types)}
)
"""Architecture by each model_type that config.json may have: Kimi K2's is DeepSeek V3's."""
GGUF_ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {name: one for one in ARCHITECTURES.values() if one.is_read_from_gguf for name in one.gguf_names}
)
WINDOWED_GGUF: Mapping[str, Architecture] = MappingProxyType(
    {name: one for one in ARCHITECTURES.values() if one.is_read_with_window for name in one.gguf_names}
)
"""Architecture of GGUF files that state a window: Mistral's have Llama's general.architecture, OLMo 3's OLMo 2's."""
MIXED_GGUF: Mapping[str, Architecture] = MappingProxyType(
    {
        name: one
        for one in ARCHITECTURES.values()
        if one.defaults.experts is not None
        for name in one.gguf_names
        if GGUF_ARCHITECTURES[name].defaults.experts is None
    }
)
"""Architecture of dense types' GGUF files that state a number of experts: Mixtral's have Llama's architecture."""
NESTED_TYPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        one.nested_in: tuple(other.model_type for other in ARCHITECTURES.values() if other.nested_in == one.nested_in)
        for one in ARCHITECTURES.values()
        if one.nested_in is not None
    }
)
"""Model types of the language models in text_config, by multimodal model type; the first is the default."""


def architecture_of(config: ModelConfig) -> Architecture:
    """Return the architecture of a config.

    Raises:
        UnsupportedError: no architecture has that model type. The message lists all of them and suggests none, because
            a similar name means a different model.
    """
    if config.model_type not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedError(f"model_type '{config.model_type}' is none of graphcore's own architectures: {known}")
    return ARCHITECTURES[config.model_type]
