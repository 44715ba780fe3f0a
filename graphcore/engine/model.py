"""From a checkpoint source to a model that has been understood: config, spec, tokenizer; no weight read.

source -> local path -> Checkpoint -> ModelConfig -> ModelSpec
"""

from dataclasses import dataclass, replace
from pathlib import Path

from graphcore.arch.random_checkpoint import RandomCheckpoint
from graphcore.arch.registry import architecture_of
from graphcore.checkpoint.bitnet_packing import TernaryCheckpoint
from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.checkpoint.config import load_model_config, parse_model_config
from graphcore.checkpoint.gguf_checkpoint import GGUFCheckpoint
from graphcore.checkpoint.gguf_config import config_from_gguf
from graphcore.checkpoint.model_config import ModelConfig
from graphcore.checkpoint.open_checkpoint import open_checkpoint
from graphcore.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from graphcore.checkpoint.sources.fetch import fetch
from graphcore.checkpoint.sources.source import RandomSource, parse_source
from graphcore.config.settings import ModelSettings
from graphcore.encodings import has_tensor_scale
from graphcore.errors import CheckpointError, ConfigError
from graphcore.nn.spec import ModelSpec
from graphcore.progress import Progress
from graphcore.tokenizer.gguf_tokenizer import has_vocab
from graphcore.tokenizer.hf_folder import has_tokenizer
from graphcore.tokenizer.tokenizer import Tokenizer

ROPE_FREQS = "rope_freqs.weight"


@dataclass(frozen=True)
class Model:
    """A checkpoint that has been understood.

    Attributes:
        path: local file or folder; None for random weights.
        stored_layers: layers that the checkpoint has; the config may ask for the first of them only.
        dtype: what the weights are stored in, as torch names it ("bfloat16"), or None where it is packed or unsaid.
        tokenizer: None if the checkpoint has none.
    """

    checkpoint: Checkpoint
    path: Path | None
    config: ModelConfig
    spec: ModelSpec
    stored_layers: int
    dtype: str | None
    tokenizer: Tokenizer | None


def open_model(settings: ModelSettings, seed: int, cache_dir: Path, on_progress: Progress) -> Model:
    """Return the model that the settings name, fetched if need be.

    Args:
        settings: whose checkpoint, hash and layer count apply.
        seed: of random weights.
        cache_dir: for downloads and rebuilt tokenizers.
        on_progress: told how far fetching is; see `graphcore.progress`.

    Raises:
        CheckpointError: there is none, it is damaged, or it is not supported.
        ConfigError: a setting contradicts the checkpoint.
    """
    source = parse_source(settings.checkpoint)
    if isinstance(source, RandomSource):
        return _random_model(settings, seed, source.options)
    path = fetch(source, cache_dir, settings.expected_sha256, on_progress)
    checkpoint = open_checkpoint(path)
    stored = read_config(checkpoint)
    config = cut_layers(stored, settings.num_hidden_layers, checkpoint.source)
    spec = architecture_of(config).spec(config)
    tokenizer = read_tokenizer(checkpoint, cache_dir)
    if config.ternary is not None and checkpoint.layout == "hf":
        checkpoint = TernaryCheckpoint(checkpoint, config.ternary)
    dtype = stored_dtype(checkpoint, config)
    return Model(checkpoint, path, config, spec, stored.num_hidden_layers, dtype, tokenizer)


def _random_model(settings: ModelSettings, seed: int, format_name: str) -> Model:
    if not settings.random_config:
        raise ConfigError(
            f"model={settings.name} has no model.random_config, the shape that model.checkpoint=random: would make"
        )
    where = f"conf/model/{settings.name}.yaml: model.random_config"
    config = cut_layers(parse_model_config(settings.random_config, where), settings.num_hidden_layers, where)
    spec = architecture_of(config).spec(config)
    return Model(
        RandomCheckpoint(spec, seed, format_name), None, config, spec, config.num_hidden_layers, "bfloat16", None
    )


def read_config(checkpoint: Checkpoint) -> ModelConfig:
    """Return the config that lies beside or inside the checkpoint."""
    if isinstance(checkpoint, GGUFCheckpoint):
        freqs = _rope_freqs(checkpoint) if ROPE_FREQS in checkpoint.tensors else None
        shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
        has_ternary = any(has_tensor_scale(info.encoding) for info in checkpoint.tensors.values())
        return config_from_gguf(checkpoint.metadata, shapes, freqs, checkpoint.source, has_ternary)
    assert isinstance(checkpoint, SafetensorsCheckpoint), f"{type(checkpoint).__name__} has no config of its own"
    return load_model_config(checkpoint.folder)


def _rope_freqs(checkpoint: GGUFCheckpoint) -> list[float]:
    info = checkpoint.tensors[ROPE_FREQS]
    freqs = checkpoint.read(ROPE_FREQS)
    if len(info.shape) != 1 or not freqs.is_floating_point():
        raise CheckpointError(
            f"{checkpoint.source}: tensor '{ROPE_FREQS}' is {info.encoding} of shape {list(info.shape)}, where a "
            "vector of f32 is expected; fetch the file again"
        )
    return [float(value) for value in freqs.float()]


def read_tokenizer(checkpoint: Checkpoint, cache_dir: Path) -> Tokenizer | None:
    """Return the checkpoint's tokenizer, or None if it carries none."""
    if isinstance(checkpoint, GGUFCheckpoint):
        has_one = has_vocab(checkpoint.metadata)
        return Tokenizer.from_gguf(checkpoint.metadata, checkpoint.source, cache_dir) if has_one else None
    assert isinstance(checkpoint, SafetensorsCheckpoint), f"{type(checkpoint).__name__} has no tokenizer of its own"
    return Tokenizer.from_folder(checkpoint.folder) if has_tokenizer(checkpoint.folder) else None


def cut_layers(config: ModelConfig, num_layers: int | None, source: str) -> ModelConfig:
    """Return the config of the first `num_layers` layers, or of all for None.

    Raises:
        ConfigError: there are not as many.
    """
    if num_layers is None:
        return config
    if num_layers > config.num_hidden_layers:
        raise ConfigError(
            f"model.num_hidden_layers={num_layers}, but {source} has {config.num_hidden_layers} layers; ask for fewer"
        )
    layer_types = config.layer_types[:num_layers] if config.layer_types else None
    return replace(config, num_hidden_layers=num_layers, layer_types=layer_types)


def stored_dtype(checkpoint: Checkpoint, config: ModelConfig) -> str | None:
    """Return the dtype of the stored matrices where they are dense and alike, else what the config says."""
    names = {"f64": "float32", "f32": "float32", "bf16": "bfloat16", "f16": "float16"}
    encodings = {info.encoding for info in checkpoint.tensors.values() if len(info.shape) > 1}
    if not encodings:
        raise CheckpointError(f"{checkpoint.source}: holds no matrix, so it is no language model")
    return names.get(encodings.pop(), config.dtype) if len(encodings) == 1 else config.dtype
