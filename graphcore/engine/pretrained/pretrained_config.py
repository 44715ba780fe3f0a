"""transformers' configs of a loaded model: of the checkpoint's own class where the folder has one."""

from pathlib import Path
from typing import TYPE_CHECKING

from graphcore.arch.transformers_settings import transformers_settings
from graphcore.checkpoint.generation_config import read_generation_config
from graphcore.engine.fallback.config import CONFIG_ERRORS, read_transformers_config
from graphcore.engine.loading.load_model import LoadedModel
from graphcore.errors import UnsupportedError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig


def pretrained_config(loaded: LoadedModel) -> "PreTrainedConfig":
    """Return the model's config: config.json read by transformers, or graphcore's settings under its names."""
    from transformers import AutoConfig

    folder = hf_folder(loaded)
    if folder is not None:
        try:
            return with_layers(read_transformers_config(folder), loaded.config.num_hidden_layers)
        except UnsupportedError:
            pass  # a class of the checkpoint's own: graphcore has read what it needs of it
    config = AutoConfig.for_model(**transformers_settings(loaded.config, loaded.loader.is_tied))
    config.name_or_path = loaded.settings.model.checkpoint
    return config


def with_layers(config: "PreTrainedConfig", num_layers: int) -> "PreTrainedConfig":
    """Return the config cut to the model's first layers."""
    text = config.get_text_config()
    if num_layers < text.num_hidden_layers:
        text.num_hidden_layers = num_layers
        if "layer_types" in text.to_dict():
            text.layer_types = text.layer_types[:num_layers]
    return config


def generation_config(loaded: LoadedModel) -> "GenerationConfig":
    """Return the folder's generation config; without one, or if it is malformed, the ids that end an answer."""
    from transformers import GenerationConfig

    folder = hf_folder(loaded)
    settings = {} if folder is None else dict(read_generation_config(folder).settings)
    if settings:
        try:
            return GenerationConfig.from_dict(settings)
        except CONFIG_ERRORS:
            pass  # loading the model has already reported the error
    ends = sorted(loaded.end_ids)
    return GenerationConfig(bos_token_id=loaded.config.bos_token_id, eos_token_id=ends or None)


def hf_folder(loaded: LoadedModel) -> Path | None:
    """Return the checkpoint's folder if it has a config.json."""
    checkpoint = loaded.loader.checkpoint
    if checkpoint.layout != "hf":
        return None
    folder = next(iter(checkpoint.files)).parent
    return folder if (folder / "config.json").is_file() else None
