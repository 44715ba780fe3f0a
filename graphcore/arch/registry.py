"""Model types to architectures."""

from collections.abc import Mapping
from types import MappingProxyType

from graphcore.arch import families
from graphcore.arch.architecture import Architecture
from graphcore.checkpoint.model_config import ModelConfig
from graphcore.errors import UnsupportedError
from graphcore.registry import collect

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {model_type: item for item in collect(families, Architecture) for model_type in item.model_types}  # type: ignore[type-abstract]
)


def architecture_of(config: ModelConfig) -> Architecture:
    """Return the architecture of a config.

    Raises:
        UnsupportedError: none has that model type; the message lists those there are, and suggests none of them: what
            has a name like it is another model.
    """
    if config.model_type not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedError(f"model_type '{config.model_type}' is none of graphcore's own architectures: {known}")
    return ARCHITECTURES[config.model_type]
