"""From a checkpoint source to its config, spec and tokenizer; no weight is read.

source -> local path -> Checkpoint                                   fetch_checkpoint, for a model of either kind
                        Checkpoint -> ModelConfig -> ModelSpec       open_model, for graphcore's own architectures
"""

from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from types import MappingProxyType

from graphcore.arch.checkpoint_config import read_config, stored_dtype, with_packed_weights
from graphcore.arch.config.model_config import ModelConfig
from graphcore.arch.config_from_json import parse_model_config
from graphcore.arch.random_checkpoint import RandomCheckpoint
from graphcore.arch.registry import architecture_of
from graphcore.checkpoint.absent_files import Elsewhere
from graphcore.checkpoint.adapter import Adapter
from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.checkpoint.gguf_checkpoint import GGUFCheckpoint
from graphcore.checkpoint.open_checkpoint import open_adapter, open_checkpoint
from graphcore.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from graphcore.checkpoint.sources.fetch import fetch
from graphcore.checkpoint.sources.source import RandomSource, parse_source
from graphcore.checkpoint.stacked_checkpoint import with_stacked_experts
from graphcore.config.settings import ModelSettings
from graphcore.config.user_path import user_path
from graphcore.errors import ConfigError, UnreadTokenizerError
from graphcore.nn.spec import ModelSpec
from graphcore.progress import Progress
from graphcore.tokenizer.gguf_tokenizer import has_vocab
from graphcore.tokenizer.hf_folder import has_tokenizer
from graphcore.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """A checkpoint with its config and tokenizer, whatever runs the model.

    Attributes:
        dtype: name in torch of the dtype of the stored weights ("bfloat16"); None where they are packed or it is not
            stated.
        tokenizer: the tokenizer; None if the checkpoint has none.
        unread: reason why the checkpoint's tokenizer is not read; empty if it is, or if there is none.
    """

    checkpoint: Checkpoint
    config: ModelConfig
    dtype: str | None
    tokenizer: Tokenizer | None
    unread: str = ""


@dataclass(frozen=True, kw_only=True)
class Model(OpenedModel):
    """An opened model of one of graphcore's own architectures.

    Attributes:
        path: local file or folder; None for random weights.
        stored_layers: number of layers in the checkpoint; the config may use only the first of them.
        adapters: LoRA adapters that change the weights, in the order of the settings.
    """

    path: Path | None
    spec: ModelSpec
    stored_layers: int
    adapters: tuple[Adapter, ...] = ()


def open_model(
    settings: ModelSettings,
    seed: int,
    cache_dir: Path,
    on_progress: Progress,
    elsewhere: Elsewhere = MappingProxyType({}),
) -> Model:
    """Return the model that the settings name, downloading it if need be.

    Args:
        settings: model settings: the checkpoint's source, its hash, the number of layers.
        seed: seed of random weights.
        cache_dir: folder for downloads and rebuilt tokenizers.
        on_progress: callback while downloading; see `graphcore.progress`.
        elsewhere: tensors of files that other processes have, and that may be missing here.

    Raises:
        CheckpointError: there is none, it is damaged, or it is not supported.
        ConfigError: a setting contradicts the checkpoint.
    """
    found = fetch_checkpoint(settings, cache_dir, on_progress, elsewhere)
    adapters = open_adapters(settings)
    if isinstance(found, RandomSource):
        return replace(_random_model(settings, seed, found.options), adapters=adapters)
    path, checkpoint = found
    stored = read_config(checkpoint)
    config = stored.cut(settings.num_hidden_layers, checkpoint.source)
    spec = architecture_of(config).spec(config)
    weights = with_packed_weights(checkpoint, config)
    weights = weights if config.experts is None else with_stacked_experts(weights)
    dtype = stored_dtype(weights, config)
    tokenizer, unread = read_tokenizer(checkpoint, cache_dir)
    return Model(
        checkpoint=weights,
        path=path,
        config=config,
        spec=spec,
        stored_layers=stored.num_hidden_layers,
        dtype=dtype,
        tokenizer=tokenizer,
        unread=unread,
        adapters=adapters,
    )


def open_adapters(settings: ModelSettings) -> tuple[Adapter, ...]:
    """Return the adapters that the settings name, opened, with their weights.

    Raises:
        CheckpointError: an adapter is missing, damaged or not supported.
        ConfigError: the setting names no adapter, or a weight that is not finite.
    """
    return tuple(
        replace(open_adapter(path), weight=weight) for path, weight in map(adapter_and_weight, settings.adapters)
    )


def _is_there(text: str) -> bool:
    """Return whether a path exists; False for one that no file can have."""
    try:
        return Path(text).expanduser().exists()
    except OSError:  # too long
        return False


def adapter_and_weight(text: str) -> tuple[Path, float]:
    """Return the path and the weight in "PATH:WEIGHT", or a weight of 1 for "PATH"; a path that exists is taken whole.

    Raises:
        ConfigError: the path is empty, of another place than this machine, or the weight is not finite.
    """
    path, colon, weight = text.rpartition(":")
    if text.startswith(("hf:", "pypi:")) and not _is_there(text):
        raise ConfigError(
            f"model.adapter={text}: adapters are read from this machine; download it first (hf download ORG/NAME "
            "--local-dir FOLDER), and name the folder"
        )
    if not colon or _is_there(text):
        return user_path(text, "model.adapter="), 1.0
    try:
        factor = float(weight)
    except ValueError:
        return user_path(text, "model.adapter="), 1.0
    if not isfinite(factor):
        raise ConfigError(f"model.adapter={text}: the weight {weight} is not finite; use a number such as 0.5")
    return user_path(path, "model.adapter="), factor


def _random_model(settings: ModelSettings, seed: int, format_name: str) -> Model:
    if not settings.random_config:
        raise ConfigError(
            f"model={settings.name} has no model.random_config, the shape that model.checkpoint=random: would make"
        )
    where = f"conf/model/{settings.name}.yaml: model.random_config"
    config = parse_model_config(settings.random_config, where).cut(settings.num_hidden_layers, where)
    spec = architecture_of(config).spec(config)
    return Model(
        checkpoint=RandomCheckpoint(spec, seed, format_name),
        path=None,
        config=config,
        spec=spec,
        stored_layers=config.num_hidden_layers,
        dtype="bfloat16",
        tokenizer=None,
    )


def fetch_checkpoint(
    settings: ModelSettings, cache_dir: Path, on_progress: Progress, elsewhere: Elsewhere = MappingProxyType({})
) -> tuple[Path, Checkpoint] | RandomSource:
    """Return the local path and the checkpoint that the settings name, downloaded if need be; or the random source.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    source = parse_source(settings.checkpoint)
    if isinstance(source, RandomSource):
        return source
    path = fetch(source, cache_dir, settings.expected_sha256, on_progress)
    return path, open_checkpoint(path, elsewhere)


def read_tokenizer(checkpoint: Checkpoint, cache_dir: Path) -> tuple[Tokenizer | None, str]:
    """Return the checkpoint's tokenizer, or None and the reason why it is not read; an empty one if it has none."""
    try:
        if isinstance(checkpoint, GGUFCheckpoint):
            has_one = has_vocab(checkpoint.metadata)
            return Tokenizer.from_gguf(checkpoint.metadata, checkpoint.source, cache_dir) if has_one else None, ""
        assert isinstance(checkpoint, SafetensorsCheckpoint), f"{type(checkpoint).__name__} has no tokenizer of its own"
        return Tokenizer.from_folder(checkpoint.folder) if has_tokenizer(checkpoint.folder) else None, ""
    except UnreadTokenizerError as error:
        return None, str(error)
