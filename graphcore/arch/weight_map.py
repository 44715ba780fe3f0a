"""The names and shapes of a decoder's weights, and the map from names in Hugging Face checkpoints to them."""

import torch

from graphcore.arch.config.model_config import ModelConfig
from graphcore.arch.registry import architecture_of
from graphcore.errors import UnsupportedError
from graphcore.nn.decoder import Decoder
from graphcore.nn.spec import ModelSpec


def weight_shapes(decoder: Decoder) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of a decoder, by name, in the order of use."""
    return {
        prefix + name: tuple(tensor.shape)
        for prefix, module in decoder.groups()
        for name, tensor in module.named_buffers()
    }


def weight_names(spec: ModelSpec) -> tuple[str, ...]:
    """Return the names of all weights of a decoder, in the order of use."""
    with torch.device("meta"):
        return tuple(weight_shapes(Decoder(spec, torch.float32)))


def get_weight_map(config: ModelConfig) -> dict[str, str]:
    """Return the decoder's name of every weight of a model, by the name in a Hugging Face checkpoint.

    The map is for people who look for a weight. Nothing in the package reads it: loading uses `weights.matching`, which
    covers every form that a checkpoint may have. A test compares the map with files that transformers has written.

    `lm_head.weight` is always included: checkpoints with tied embeddings may or may not store it.

    Raises:
        UnsupportedError: the family fuses tensors (GPT-2's q, k and v), so that the map is not one to one.
    """
    architecture = architecture_of(config)
    prefix = architecture.hf_prefixes[0]
    names = weight_names(architecture.spec(config))
    stored = [architecture.hf_source(name, config).name for name in names]
    if len(set(stored)) != len(names):
        raise UnsupportedError(f"model_type '{config.model_type}' stores fused tensors; its map is not one to one")
    return {
        source if name == "lm_head.weight" else prefix + source: name
        for source, name in zip(stored, names, strict=True)
    }
