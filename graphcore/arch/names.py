"""The weight map of a model, as a table: Hugging Face checkpoint names to the decoder's names."""

import torch

from graphcore.arch.registry import architecture_of
from graphcore.checkpoint.model_config import ModelConfig
from graphcore.errors import UnsupportedError
from graphcore.nn.decoder import Decoder
from graphcore.nn.spec import ModelSpec


def weight_names(spec: ModelSpec) -> tuple[str, ...]:
    """Return the names of all weights of a decoder, in the order in which they are used."""
    with torch.device("meta"):
        decoder = Decoder(spec, torch.float32)
    return tuple(prefix + name for prefix, module in decoder.groups() for name, _ in module.named_buffers())


def get_weight_map(config: ModelConfig) -> dict[str, str]:
    """Return checkpoint name to decoder name for every weight of the model.

    `lm_head.weight` is always in it: checkpoints with tied embeddings store it or leave it out as they like.

    Raises:
        UnsupportedError: the family fuses tensors, so that its map is not one to one (GPT-2's q, k and v).
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
