"""The files of a Hugging Face repository that make up one model, told from their names alone.

hf:org/name             safetensors beside a config.json; else the repository's only GGUF model
hf:org/name:Q8_0        the GGUF model whose name has that quant, as in llama.cpp and ollama
hf:org/name/folder      the same two inside one folder
hf:org/name/x.gguf      this file, with the other parts of a split model

Source of the tag's meaning: llama.cpp, common/download.cpp (a tag is matched without case, up to a "." or "-").
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import PurePosixPath

from graphcore.checkpoint.model_file_names import (
    ADAPTER_CONFIG,
    ADAPTER_PREFIX,
    INDEX_NAME,
    PICKLE_SUFFIXES,
    SINGLE_NAME,
    model_names,
    shards_of,
)
from graphcore.checkpoint.sources.source import HubSource
from graphcore.errors import CheckpointError, CheckpointNotFoundError, quoted

SMALL_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken")
NOT_WEIGHTS = ("consolidated", ADAPTER_PREFIX)  # Mistral's second copy of the weights, and adapters
DEFAULT_TAG = "latest"  # ollama's default tag
SHOWN = 12  # names of files in one message


@dataclass(frozen=True)
class ModelFiles:
    """The files of one model, by their paths in the repository.

    Attributes:
        opened: path of the file or folder that opens the model; empty for the repository's own folder.
        weights: files with weights, all shards of each.
        others: small files, such as the config and the tokenizer's.
    """

    opened: str
    weights: tuple[str, ...]
    others: tuple[str, ...] = ()


def choose_files(source: HubSource, names: Iterable[str]) -> ModelFiles:
    """Return the files of the model that a source names.

    Args:
        names: paths of all files in the repository.

    Raises:
        CheckpointNotFoundError: the repository has no such model.
        CheckpointError: the source names several models; the message lists them.
    """
    names = sorted(name for name in names if not PurePosixPath(name).name.startswith("."))
    if source.file is not None:
        return _named(source, source.file, names)
    prefix = "" if source.folder is None else f"{source.folder}/"
    inside = [name for name in names if name.startswith(prefix)]
    if not inside:
        folders = sorted({str(PurePosixPath(name).parent) for name in names if "/" in name})
        listed = f"it has {_listed(folders)}" if folders else "it has none; leave the folder out"
        raise repository_error(source, f"has no folder {quoted(source.folder)}", listed)
    top = [name.removeprefix(prefix) for name in inside if "/" not in name.removeprefix(prefix)]
    tag = None if source.tag is None or source.tag.lower() == DEFAULT_TAG else source.tag
    weights = [] if tag else _safetensors(source, top)
    if not weights:
        return _gguf_model(source, tag, inside, top)
    small = [name for name in top if any(fnmatch(name, pattern) for pattern in SMALL_FILES)]
    return ModelFiles(
        source.folder or "", tuple(prefix + name for name in weights), tuple(prefix + name for name in small)
    )


def repository_error(source: HubSource, found: str, action: str) -> CheckpointNotFoundError:
    """Return the error about a repository: what was found, and what to do."""
    return CheckpointNotFoundError(f"hf:{source.repo} {found}; {action}")


def _named(source: HubSource, file: str, names: Sequence[str]) -> ModelFiles:
    shards = shards_of(file)
    missing = [shard for shard in shards if shard not in names]
    if missing:
        models = model_names(names)
        action = f"its GGUF models are {_listed(models)}" if models else "check the path after the repository"
        raise repository_error(source, f"has no file {quoted(missing[0])}", action)
    return ModelFiles(file, tuple(shards))


def _safetensors(source: HubSource, names: Sequence[str]) -> list[str]:
    """Return the safetensors files that open_checkpoint would take, given the names in one folder; none without config.

    Variants of other precisions ("model.fp16.safetensors") are left out.
    """
    stored = [name for name in names if name.endswith(".safetensors") and not name.startswith(NOT_WEIGHTS)]
    if "config.json" not in names or not stored:
        return []
    if SINGLE_NAME in stored:
        return [SINGLE_NAME]
    sharded = [name for name in stored if shards_of(name) != [name]]
    usual = [name for name in sharded if name.startswith("model-")] or sharded
    if usual or INDEX_NAME in names or len(stored) == 1:
        return list(dict.fromkeys(shard for name in usual for shard in shards_of(name))) or stored
    raise CheckpointError(
        f"hf:{source.repo} holds {len(stored)} safetensors files ({_listed(stored)}), but neither {SINGLE_NAME} nor "
        f"{INDEX_NAME}; download one, and name it"
    )


def _gguf_model(source: HubSource, tag: str | None, inside: Sequence[str], top: Sequence[str]) -> ModelFiles:
    """Return the only GGUF model of the folder, or the one that the tag names."""
    models = model_names(inside)
    if not models:
        raise repository_error(source, *_without_model(top, tag))
    found = models if tag is None else _tagged(models, tag)
    if len(found) == 1:
        return ModelFiles(found[0], tuple(shards_of(found[0])))
    if found:
        raise CheckpointError(
            f"hf:{source.repo} holds {len(found)} GGUF models{f' of {tag}' if tag else ''} ({_listed(found)}); "
            f"name one, as in hf:{source.repo}/{found[0]}, or its quant, as in hf:{source.repo}:Q8_0"
        )
    raise repository_error(source, f"has no GGUF model of {quoted(tag)}", f"it has {_listed(models)}")


def _tagged(models: Sequence[str], tag: str) -> list[str]:
    """Return the models whose name is the tag, else those whose name has it, else those in a folder of that name."""
    wanted = tag.lower().removesuffix(".gguf")
    part = re.compile(rf"(?<![a-z0-9]){re.escape(wanted)}(?=[.-]|$)")
    stems = {model: PurePosixPath(model.lower()).name.removesuffix(".gguf") for model in models}
    folders = {model: PurePosixPath(model.lower()).parent.parts for model in models}
    return (
        [model for model in models if stems[model] == wanted]
        or [model for model in models if part.search(stems[model])]
        or [model for model in models if any(part.search(folder) for folder in folders[model])]
    )


def _without_model(names: Sequence[str], tag: str | None) -> tuple[str, str]:
    """Return what a folder without a model holds, and what to do."""
    if tag is not None:
        return "has no GGUF file", f"leave :{tag} out"
    if ADAPTER_CONFIG in names and "config.json" not in names:
        what = f"is an adapter ({ADAPTER_CONFIG}), not a model"
        return what, "download it, and name its folder in model.adapter= beside its base model"
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        return f"holds only pickled weights ({pickles[0]})", "look for a version with safetensors, or convert it"
    lacks = "safetensors" if "config.json" in names else "config.json"
    return f"has no {lacks} and no GGUF file", "name a repository, or a folder of it, that holds a model"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
