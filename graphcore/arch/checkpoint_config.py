"""The config of a checkpoint in any container, and the views of its weights that depend on the config."""

from graphcore.arch.config.model_config import ModelConfig
from graphcore.arch.config_from_gguf import config_from_gguf
from graphcore.arch.config_from_json import load_model_config
from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.checkpoint.gguf_checkpoint import GGUFCheckpoint
from graphcore.checkpoint.quantized.quantized_checkpoint import QuantizedCheckpoint
from graphcore.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from graphcore.checkpoint.ternary_checkpoint import TernaryCheckpoint
from graphcore.errors import CheckpointError
from graphcore.quant.registry import has_tensor_scale

# Names of GGUF's tensors of divisors of the rotary frequencies: of all contexts, and longrope's of short and long ones.
ROPE_FREQS = "rope_freqs.weight"
ROPE_SHORT, ROPE_LONG = "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_TENSORS = (ROPE_FREQS, ROPE_SHORT, ROPE_LONG)


def read_config(checkpoint: Checkpoint) -> ModelConfig:
    """Read the config that is stored with the checkpoint: GGUF metadata, or config.json in its folder."""
    if isinstance(checkpoint, GGUFCheckpoint):
        freqs, short, long = (_rope_divisors(checkpoint, name) for name in ROPE_TENSORS)
        shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
        has_ternary = any(has_tensor_scale(info.encoding) for info in checkpoint.tensors.values())
        if (short is None) != (long is None):
            lacking = ROPE_SHORT if short is None else ROPE_LONG
            raise CheckpointError(f"{checkpoint.source}: lacks tensor '{lacking}'; fetch the file again")
        factors = None if short is None or long is None else (short, long)
        return config_from_gguf(checkpoint.metadata, shapes, freqs, checkpoint.source, has_ternary, factors)
    assert isinstance(checkpoint, SafetensorsCheckpoint), f"{type(checkpoint).__name__} has no config of its own"
    return load_model_config(checkpoint.folder)


def _rope_divisors(checkpoint: GGUFCheckpoint, name: str) -> list[float] | None:
    """Return the values of a tensor of divisors; None if the file does not have it."""
    if name not in checkpoint.tensors:
        return None
    info, freqs = checkpoint.tensors[name], checkpoint.read(name)
    if len(info.shape) != 1 or not freqs.is_floating_point():
        raise CheckpointError(
            f"{checkpoint.source}: tensor '{name}' is {info.encoding} of shape {list(info.shape)}, where a "
            "vector of f32 is expected; fetch the file again"
        )
    return [float(value) for value in freqs.float()]


def with_packed_weights(checkpoint: Checkpoint, config: ModelConfig) -> Checkpoint:
    """Return the checkpoint, with Hugging Face's forms of ternary and quantised weights presented as packed tensors.

    Raises:
        UnsupportedError: weights have values that no format holds.
        CheckpointError: tensors of a weight are missing or do not fit together.
    """
    if checkpoint.layout != "hf":
        return checkpoint
    if config.ternary is not None:
        return TernaryCheckpoint(checkpoint, config.ternary)
    return checkpoint if config.quantized is None else QuantizedCheckpoint(checkpoint, config.quantized)


def stored_dtype(checkpoint: Checkpoint, config: ModelConfig) -> str | None:
    """Return the dtype of the stored matrices if all have the same dense one; else the config's."""
    names = {"f64": "float32", "f32": "float32", "bf16": "bfloat16", "f16": "float16"}
    encodings = {info.encoding for info in checkpoint.tensors.values() if len(info.shape) > 1}
    if not encodings:
        raise CheckpointError(f"{checkpoint.source}: holds no matrix, so it is no language model")
    return names.get(encodings.pop(), config.dtype) if len(encodings) == 1 else config.dtype
