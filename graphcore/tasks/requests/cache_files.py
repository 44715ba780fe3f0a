"""The settings cache.load and cache.save: a prompt prefix's KV cache, loaded before a run's requests, and saved."""

from collections.abc import Sequence
from contextlib import suppress

from graphcore.config.byte_sizes import in_words
from graphcore.config.settings import Settings
from graphcore.config.user_path import user_path
from graphcore.engine.engine import Engine
from graphcore.errors import ConfigError
from graphcore.kvcache.chunks import common
from graphcore.kvcache.snapshot_file import check_replaceable
from graphcore.tasks.task import Context, Record


def check_cache_files(settings: Settings) -> None:
    """Check the files, as far as possible before a model is loaded.

    Raises:
        ConfigError: the file to load is missing, the one to save cannot be written, or the model has no such cache.
    """
    asked = settings.cache
    given = next((key for key in ("save", "load") if vars(asked)[key] is not None), None)
    if given is not None and settings.model.fallback is not None:
        raise ConfigError(
            f"cache.{given} is for graphcore's own architectures; leave it out with model.fallback=transformers"
        )
    with suppress(OSError):  # reported by the code that reads or writes
        if asked.load is not None:
            path = user_path(asked.load, "cache.load=")
            if not path.is_file():
                what = "is no file" if path.exists() else "no such file"
                raise ConfigError(f"cache.load={path}: {what}; name one that cache.save wrote, or leave it out")
        if asked.save is not None:
            path = user_path(asked.save, "cache.save=")
            folder = path.absolute().parent
            if not folder.is_dir():
                raise ConfigError(f"cache.save={path}: there is no folder {folder}; name a file in one that is there")
            check_replaceable(path)


def load_cache_file(context: Context, engine: Engine) -> int | None:
    """Load the file that the settings name and return its number of tokens; None without a file.

    Raises:
        ConfigError: the file is damaged, or belongs to another model or other settings.
    """
    file = context.settings.cache.load
    if file is None:
        return None
    tokens = engine.load_cache(file)
    context.console.note(f"[cache.load={file}: {tokens} tokens]")
    return tokens


def save_cache_file(context: Context, engine: Engine, prompts: Sequence[Sequence[int]]) -> int | None:
    """Save the prompts' common prefix to the file that the settings name, and return its number of tokens.

    Without a file, nothing is saved and None is returned.

    Args:
        prompts: token ids of each prompt, at least one prompt.

    Raises:
        ConfigError: the prompts' common prefix is too short, or the file cannot be written.
    """
    file = context.settings.cache.save
    if file is None:
        return None
    shared = min(common(prompts[0], prompt) for prompt in prompts)
    if not shared:
        raise ConfigError(
            f"cache.save={file} keeps the common prefix of all {len(prompts)} prompts, and they have none"
        )
    tokens = engine.save_cache(prompts[0][:shared], file)
    nbytes = user_path(file, "cache.save=").stat().st_size
    context.console.note(f"[cache.save={file}: {tokens} tokens, {in_words(nbytes)}]")
    return tokens


def cache_record(loaded: int | None, saved: int | None) -> Record:
    """Return the part of result.json about saved caches."""
    return {"cache": {"loaded_tokens": loaded, "saved_tokens": saved}}
