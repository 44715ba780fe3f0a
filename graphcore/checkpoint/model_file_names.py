"""The names of a checkpoint's files: which are weights, which belong together, and which are no model."""

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_PREFIX = "adapter_"  # begins the names of PEFT's files
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
UNFINISHED_SUFFIXES = (
    ".crdownload",
    ".incomplete",
    ".part",
    ".partial",
    ".download",
    ".aria2",
)  # suffixes of unfinished downloads

_SHARD = re.compile(r"(?P<stem>.+)-(?P<part>\d{1,5})-of-(?P<count>\d{1,5})(?P<suffix>\.safetensors|\.gguf)", re.DOTALL)
_NO_MODEL = re.compile(r".*mmproj.*|imatrix.*|.*[._-]imatrix\.gguf", re.DOTALL)  # image projectors, importance matrices


def shards_of(file: str) -> list[str]:
    """Return the names of all shards of a file, in order; only the file itself if it is not sharded."""
    match = _SHARD.fullmatch(file)
    if match is None:
        return [file]
    count, width = int(match["count"]), len(match["part"])
    return [f"{match['stem']}-{index:0{width}}-of-{match['count']}{match['suffix']}" for index in range(1, count + 1)]


def model_names(file_names: Iterable[str]) -> list[str]:
    """Return one file name for each GGUF model: the first part of a split model.

    Image projectors and importance matrices, recognised by their names, are left out.

    Args:
        file_names: names in one folder, or paths with "/".
    """
    models: dict[tuple[str, str], str] = {}
    for name in sorted(file_names):
        own = PurePosixPath(name).name.lower()
        if own.endswith(".gguf") and not _NO_MODEL.fullmatch(own):
            part = _SHARD.fullmatch(name)
            models.setdefault((part["stem"], part["count"]) if part else (name, ""), name)
    return list(models.values())
