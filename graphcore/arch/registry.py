"""Model types to architectures."""

from collections.abc import Mapping
from types import MappingProxyType

from graphcore.arch import families
from graphcore.arch.architecture import Architecture
from graphcore.checkpoint.model_config import ModelConfig
from graphcore.errors import UnsupportedError
from graphcore.registry import collect, lookup

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {model_type: item for item in collect(families, Architecture) for model_type in item.model_types}  # type: ignore[type-abstract]
)


def architecture_of(config: ModelConfig) -> Architecture:
    """Return the architecture of a config.

    Raises:
        UnsupportedError: none has that model type; the message lists those there are.
    """
    return lookup("model_type", config.model_type, ARCHITECTURES, UnsupportedError)
